"""A learned distance's two sweeps as one autograd operation: the distance gradient cache, and the link to the next.

Beside `_sweep.py`, for `contrast(..., scorer=module)`. The inputs of the operation are the features of both sides,
and Ω, the module's parameters; so every parameter gets its gradient once, whatever the number of tiles, and the
features' gradients go on to `encode` as those of a dot product do: the paper's two caches, linked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from contrastile._check import wrong
from contrastile._sweep import Call, Gradients, at_once, finished, halves, with_coefficients, with_states, workspace_on
from contrastile._task import Inputs, Task
from contrastile.exchange.base import Exchange
from contrastile.losses.base import Side
from contrastile.reach import silent
from contrastile.tiles.scored import Form, Scored, Scorer, fitting_side

# the tile of backend="dense": the whole block
WHOLE = 2**62


def scored_inputs(module: nn.Module, q: Any, k: Any, negatives: Any) -> Inputs:
    """Both sides' tensors, and the module that compares them."""
    row_form, rows = Form.of("q", q)
    col_form, cols = Form.of("k", k)
    keys = len(cols[0])
    if negatives is not None:
        form, more = Form.of("negatives", negatives)
        if form.spec != col_form.spec or [x.shape[1:] for x in more] != [x.shape[1:] for x in cols]:
            raise wrong("negatives", "be nested and shaped as `k`", [list(x.shape) for x in more], "Pad both alike.")
        for here, there in zip(cols, more, strict=True):
            if (here.dtype, here.device) != (there.dtype, there.device):
                got = f"{here.dtype} on {here.device} and {there.dtype} on {there.device}"
                raise wrong("negatives", "have the types of `k`, and lie beside it", got, "Convert one side first.")
        col_form, cols = Form.of("k", pytree.tree_map(_behind, k, negatives))
    if cols[0].device != rows[0].device:
        got = f"{rows[0].device} and {cols[0].device}"
        raise wrong("k", "be on the device of `q`", got, "Move one side first.")
    return Inputs(tuple(rows), tuple(cols), keys, Scorer.of(module, (row_form, rows), (col_form, cols)))


def scored(task: Task, scorer: Scorer, exchange: Exchange) -> Tensor:
    """The loss, differentiable in the features, Ω, the scale and the bias."""
    options = task.options
    if options.backend == "triton":
        remedy = "A scorer brings its own kernels."
        raise wrong("backend", "be auto, eager or dense with a scorer", "'triton'", remedy)
    if scorer.seed is not None and not exchange.once:
        remedy = "Take gather or ring, or put the scorer in eval mode."
        raise wrong("exchange", "compute each pair once if the scorer draws random numbers", "replicate", remedy)
    workspace = workspace_on(scorer.device, options.workspace)
    side = WHOLE if options.backend == "dense" else fitting_side(scorer, task.rows, task.cols, workspace)
    call = task.call(partial(Scored, scorer=scorer, side=side), exchange)
    inputs = (task.scale, task.bias, *task.inputs.rows, *task.inputs.cols, *scorer.parameters)
    wants = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    # in float16 the upstream, a GradScaler's factor, must be in what goes through the module: or it underflows
    early = wants and at_once(call) and scorer.dtype != torch.float16
    operation = _ScoredAtOnce if early else _Scored
    result: Tensor = operation.apply(call, scorer, *inputs)
    return result


class _Scored(torch.autograd.Function):
    """Forward: tiles of scores without a graph. Backward: the same tiles with theirs, one at a time."""

    @staticmethod
    def forward(ctx: Any, call: Call, scorer: Scorer, scale: Tensor, bias: Tensor | None, *tensors: Tensor) -> Tensor:
        with torch.autocast(scorer.device.type, enabled=False):
            tiles = _tiles(call, scorer, scale, bias)
            swept = finished(call, call.exchange.stats(tiles, call.rows, call.cols), tiles.scale * 0)
        tensors = (*tensors, *call.groups, *scorer.frozen)
        ctx.call, ctx.scorer, ctx.given = call, scorer, len(tensors)
        # all that is read again: autograd then sees that it has not changed
        ctx.save_for_backward(scale, bias, *tensors, *swept.states, *swept.coefficients)
        return swept.value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        call, scorer = ctx.call, ctx.scorer
        scale, bias, *saved = ctx.saved_tensors
        with call.exchange.in_step(), torch.autocast(scorer.device.type, enabled=False):
            tiles = _tiles(call, scorer, scale, bias)
            rows, cols = with_states(call, upstream, halves(saved[ctx.given :]), tiles.scale.dtype)
            u, v = _room(tiles, rows, cols)
            with silent(scorer.parameters):
                sums = call.exchange.grads(tiles, rows, cols, u, v)
            return None, None, *_hand_back(call, tiles, Gradients(u, v, sums), scale, bias)


class _ScoredAtOnce(torch.autograd.Function):
    """One sweep for both, where a pair's gradient waits for nothing: every score is computed once."""

    @staticmethod
    def forward(ctx: Any, call: Call, scorer: Scorer, scale: Tensor, bias: Tensor | None, *tensors: Tensor) -> Tensor:
        with torch.autocast(scorer.device.type, enabled=False):
            tiles = _tiles(call, scorer, scale, bias)
            rows, coefficient = with_coefficients(call, tiles.scale * 0)
            u, v = _room(tiles, rows, call.cols)
            with silent(scorer.parameters):
                stats, sums = call.exchange.stats_and_grads(tiles, rows, call.cols, u, v)
            value: Tensor = call.exchange.total((coefficient * call.loss.finish(stats).loss).sum())
        ctx.call, ctx.tiles = call, tiles
        ctx.save_for_backward(scale, bias, u, v, sums, *tensors)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale, bias, u, v, sums, *_ = ctx.saved_tensors
        with ctx.call.exchange.in_step():
            times = upstream.to(sums.dtype) * ctx.call.exchange.gradient_factor()
            # asked for again, they must be as they were
            u, v = (None if x is None else x * times for x in (u, v))
            found = Gradients(u, v, sums * times)
            return None, None, *_hand_back(ctx.call, ctx.tiles, found, scale, bias)


def _tiles(call: Call, scorer: Scorer, scale: Tensor, bias: Tensor | None) -> Scored:
    tiles = call.arithmetic(scale, bias, scorer.dtype)
    assert isinstance(tiles, Scored)
    return tiles


def _room(tiles: Scored, rows: Side, cols: Side) -> tuple[Tensor | None, Tensor | None]:
    """Accumulators [n, numbers of a row] of what wants a gradient on either side."""
    widths = tiles.scorer.rows.widths(rows.leaves), tiles.scorer.cols.widths(cols.leaves)
    u, v = (
        tiles.scale.new_zeros(len(side), sum(each)) if each else None
        for side, each in zip((rows, cols), widths, strict=True)
    )
    return u, v


def _hand_back(
    call: Call, tiles: Scored, found: Gradients, scale: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """What was accumulated, times the scale, as gradients of scale, bias, features and Ω, each in its own type."""
    scorer, (u, v, sums) = tiles.scorer, found
    of_bias = sums[0] if call.loss.uses_bias else torch.zeros_like(sums[0])
    return (
        sums[1].to(scale.dtype).reshape(scale.shape),
        None if bias is None else of_bias.to(bias.dtype).reshape(bias.shape),
        *_unpacked(u, scorer.rows, call.rows.leaves, tiles.scale),
        *_unpacked(v, scorer.cols, call.cols.leaves, tiles.scale),
        *_of_parameters(sums[2:], tiles, empty=not (len(call.rows) and sum(call.exchange.shards.cols))),
    )


def _unpacked(whole: Tensor | None, form: Form, leaves: Sequence[Tensor], scale: Tensor) -> list[Tensor | None]:
    """Each leaf's own gradient, out of the matrix in which all were accumulated."""
    parts = iter(() if whole is None else whole.mul_(scale).split(form.widths(leaves), dim=1))
    return [
        next(parts).to(leaf.dtype).reshape(leaf.shape) if want else None
        for leaf, want in zip(leaves, form.wanted, strict=True)
    ]


def _of_parameters(sums: Tensor, tiles: Scored, *, empty: bool) -> list[Tensor | None]:
    """Ω's gradients; none for a parameter that no pair reaches, as in plain autograd, if there are pairs here."""
    parameters, nothing = tiles.scorer.parameters, empty and not tiles.touched
    parts = (sums * tiles.scale).split([parameter.numel() for parameter in parameters])
    return [
        part.to(parameter.dtype).reshape(parameter.shape) if index in tiles.touched or nothing else None
        for index, (part, parameter) in enumerate(zip(parts, parameters, strict=True))
    ]


def _behind(k: Tensor | None, negatives: Tensor | None) -> Tensor | None:
    return None if k is None or negatives is None else torch.cat([k, negatives])
