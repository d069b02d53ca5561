"""The operations of small calls on a GPU, which replay a graph once it is captured.

Between `plan.py` and `graph.py`, whose graphs they replay; `compiled.py` calls `at_once` in its own operation.
`Replayed` is the twin of `Operation` for such a call: nothing is left to choose, so it has none of `Operation`'s steps.
`Rows` is the twin for reduction="none", whose rows have upstream gradients of their own: one graph computes the losses,
and another one, in the backward, the gradients of their sum weighed by those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from contrastile._torch import cudagraphs_warm_up
from contrastile.engine.graph import Graph, features_of, graph_for, graph_inputs
from contrastile.engine.operation import Call, Operation, Wanted, gradients, with_gradients, without_autocast
from contrastile.gradcache.modes import first_order
from contrastile.losses.base import changed


class Replayed(torch.autograd.Function):
    """The loss of a call that is captured, differentiable in scale, bias and all other inputs."""

    @staticmethod
    def forward(
        ctx: Any, graph: Graph, arguments: Sequence[Tensor | float], scale: Any, bias: Any, *inputs: Tensor
    ) -> Tensor:
        (value, ctx.held), ctx.graph = graph(arguments), graph
        # watched by autograd for a change in place; the queries are read again for negatives of each query
        ctx.save_for_backward(*[x if isinstance(x, Tensor) else None for x in (scale, bias, *inputs)])
        return value

    @staticmethod
    @first_order("contrast")
    def backward(ctx: Any, inputs: Sequence[Tensor | None], upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.graph.backward(ctx.held, inputs, upstream)


class Rows(torch.autograd.Function):
    """The loss of each row of a call, differentiable in scale, bias and all other inputs."""

    @staticmethod
    def forward(ctx: Any, call: Call, scale: Tensor, bias: Tensor | None, *inputs: Tensor) -> Tensor:
        graph, watched = graph_for(call, (scale, bias, *inputs)), call.watched()
        ctx.call, ctx.watched = call, len(watched)
        ctx.save_for_backward(scale, bias, *inputs, *watched)
        if graph is not None:
            return graph(graph_inputs(call, scale, bias))[0]
        with without_autocast(call.device):
            return with_gradients(call, call.tiles(scale, bias), features_of(call), [False] * (2 + len(inputs)))[0]

    @staticmethod
    @first_order("contrast")
    def backward(ctx: Any, tensors: Sequence[Any], upstream: Tensor) -> tuple[Tensor | None, ...]:
        call, inputs = ctx.call, tensors[: len(tensors) - ctx.watched]
        call = changed(call, plan=call.plan.of_rows, upstream=upstream.to(call.plan.wide))
        return None, *at_once(call, inputs, ctx.needs_input_grad[1:])[1]


def at_once(
    call: Call, inputs: Sequence[Tensor | None], wanted: Wanted, outs: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """The loss of a call, and the gradients of scale, bias and all other inputs: those of a replay where it is small.

    outs: tensors of the gradients' dtypes and shapes; the inputs by default.
    """
    scale, bias, *_ = inputs
    assert scale is not None
    outs = inputs if outs is None else outs
    # a graph captured in a warm-up of inductor's own graphs would lie in memory that they use again
    if call.plan.replayed and not cudagraphs_warm_up(call.device):
        graph = graph_for(call)
        if graph is None:
            # inputs of an operation require no gradient, and those of a captured call do
            leaves = [
                x if x is None else x.detach().requires_grad_(want) for x, want in zip(inputs, wanted, strict=True)
            ]
            with torch.enable_grad():
                graph = graph_for(call, leaves)
        if graph is not None:
            value, held = graph(graph_inputs(call, scale, bias))
            return value, graph.backward(held, outs, graph.number(1.0))
    tiles, features = call.tiles(scale, bias), features_of(call)
    with without_autocast(call.device):
        value, sums = with_gradients(call, tiles, features, wanted)
    if outs is not inputs:
        of_q, of_k, *_ = [x.dtype for x in outs[2:] if x is not None]
        tiles.grad_dtypes = of_q, of_k
    assert outs[0] is not None
    return value, gradients(call, tiles, sums, call.shards(features), (outs[0], outs[1]), wanted, None)


def small_operation(call: Call, scale: Tensor, bias: Tensor | None, *inputs: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """The operation that computes a small call, and its inputs: a replay once its plan has been called often enough."""
    if call.plan.of_rows is not None:
        return Rows.apply, (call, scale, bias, *inputs)
    graph = graph_for(call, (scale, bias, *inputs))
    if graph is None:
        return Operation.apply, (call, scale, bias, *inputs)
    return Replayed.apply, (graph, graph_inputs(call, scale, bias), scale, bias, *inputs)
