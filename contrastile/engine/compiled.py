"""The call as two custom operations for torch.compile: one node of the graph for the forward, one for the backward.

The twin of `operation.py`, used only while a graph is traced, because a custom operation costs more per call than an
autograd.Function. It covers one process: several ranks agree on the host, which breaks the graph before the call. A
loss is passed as the string of its class and fields (`PairLoss.spelled`); one without such a string breaks the graph
too."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from contrastile._dispatch import choose_tiles, not_empty, workspace_on
from contrastile._types import Backend, Gradient, Reduction, accumulator
from contrastile.distributed import collectives
from contrastile.engine import arguments as checks
from contrastile.engine.operation import Call, Plan, backward, statistics, with_gradients, without_autocast
from contrastile.engine.problem import Arguments, Problem
from contrastile.exchange.base import Layout, Single
from contrastile.gradcache.modes import refusal
from contrastile.losses.base import PairLoss, Shard, changed
from contrastile.tiles.base import Tiles

NO_DIAGONAL = -(2**40)
# in place of the number of keys: positives are in range
IN_RANGE = -1

GROUPS = "Tensor? positives, Tensor? row_labels, Tensor? row_ids, Tensor? col_labels, Tensor? col_ids"
INPUTS = f"Tensor q, Tensor k, Tensor scale, Tensor? bias, {GROUPS}"
SETTINGS = "str loss, str words, int[] numbers"
FORWARD = f"({INPUTS}, Tensor? weights, {SETTINGS}) -> Tensor[]"
BACKWARD = f"(Tensor upstream, {INPUTS}, Tensor[] results, {SETTINGS}, bool[] wanted) -> Tensor[]"


def traceable(arguments: Arguments) -> bool:
    """Return whether the call can be written as tensors, numbers and strings.

    None of these can be traced: the tiles of a scorer, whose module is measured; features streamed from host memory;
    the agreement of several ranks.
    """
    options, loss = arguments.options, arguments.loss
    alone = options.exchange == "single" or collectives.size(options.group) == 1
    spelled = not isinstance(loss, PairLoss) or loss.spelled is not None
    plain = arguments.scorer is None and not arguments.guides and arguments.targets is None and arguments.own is None
    plain = plain and not getattr(loss, "counts_positives", False)
    return alone and spelled and plain and options.device is None


def traced(arguments: Arguments) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """The operation and its inputs. The backend is chosen when the operation runs, on the device of the tensors."""
    problem = Problem.of(arguments, checked=False, alone=True)
    rows, cols, options = problem.rows, problem.cols, problem.options
    if collectives.size(options.group) == 1:
        not_empty(rows.features.shape[0])
    # autocast's cast is an operation of the graph
    q, k = (x.to(problem.dtype) for x in problem.inputs)
    groups = (rows.positives, rows.labels, rows.ids, cols.labels, cols.ids, problem.weights)
    words = f"{options.backend} {options.gradient} {options.reduction}"
    diagonal = NO_DIAGONAL if rows.diagonal is None else rows.diagonal
    # on a CPU one sweep computes the gradients with the loss; else the backward does
    early = torch.is_grad_enabled() and q.device.type == "cpu" and options.backend != "triton"
    given = (problem.scale, problem.bias, q, k) if early and options.reduction != "none" else ()
    wanted = sum([1 << at for at, x in enumerate(given) if x is not None and x.requires_grad])
    keys = IN_RANGE if problem.indexed is None else problem.indexed
    numbers = [diagonal, int(options.workspace or 0), wanted, keys]
    return _loss, (q, k, problem.scale, problem.bias, *groups, problem.loss.spelled, words, numbers)


def _loss(*inputs: Any) -> Tensor:
    value, *_ = operation_forward(*inputs)
    return value


@torch.library.custom_op("contrastile::forward", mutates_args=(), schema=FORWARD)
def operation_forward(q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    """The loss, then the states, then the coefficients of each direction; or the gradient sums, where it has them."""
    *groups, weights, loss, words, numbers = rest
    if groups[0] is not None and numbers[-1] != IN_RANGE:
        # checked here, because a graph cannot read values
        checks.in_range(groups[0], numbers[-1])
    call, tiles = _call(q, k, scale, bias, groups, loss, words, numbers)
    rows, cols = call.shards((q, k))
    with without_autocast(q.device):
        if call.plan.at_once:
            value, sums = with_gradients(changed(call, weights=weights), tiles, (q, k), _wanted(numbers))
            return [value, *(q.new_empty(0) if x is None else x for x in sums[:3])]
        stats = statistics(call, tiles, rows, cols)
        value, states, coefficients = call.exchange.finish(tiles, stats, rows, cols, weights, call.reduction)
    # outputs of an operation share no memory
    return [value, *(x.clone() for x in (*states, *coefficients))]


@torch.library.custom_op("contrastile::backward", mutates_args=(), schema=BACKWARD)
def operation_backward(
    upstream: Tensor, q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None, *rest: Any
) -> list[Tensor]:
    """The gradients of scale, bias, q and k; one without elements stands for each that is not wanted."""
    *groups, results, loss, words, numbers, wanted = rest
    call, tiles = _call(q, k, scale, bias, groups, loss, words, numbers)
    if call.plan.at_once:
        # copies, which are overwritten
        u, v, sums = results
        needs_u, needs_v = tiles.needed(_wanted(numbers))
        results = [u.clone() if needs_u else None, v.clone() if needs_v else None, sums]
    gradients = backward(call, tiles, upstream, scale, bias, (q, k), results, wanted)
    return [q.new_empty(0) if gradient is None else _own_memory(gradient) for gradient in gradients]


def _wanted(numbers: Sequence[int]) -> list[bool]:
    """The gradients of scale, bias, q and k that come with the loss."""
    return [bool(numbers[2] >> at & 1) for at in range(4)]


def _own_memory(x: Tensor) -> Tensor:
    """x at the start of memory of its own: outputs share none, and compiled code relies on their alignment."""
    own = x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    return x if own else x.clone(memory_format=torch.contiguous_format)


def _call(
    q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None, groups: Sequence[Tensor | None], loss: str, words: str,
    numbers: Sequence[int],
) -> tuple[Call, Tiles]:  # fmt: skip
    """The call without its weights, and its tiles."""
    positives, row_labels, row_ids, col_labels, col_ids = groups
    backend, gradient, reduction = words.split()
    first, workspace, wanted, keys = numbers
    parsed, diagonal = PairLoss.parsed(loss), None if first == NO_DIAGONAL else first
    rows = Shard(q, diagonal=diagonal, positives=positives, labels=row_labels, ids=row_ids)
    cols = Shard(k, labels=col_labels, ids=col_ids)
    exchange = Single(cast(Gradient, gradient), Layout(None, 0, (len(q),), (len(k),)))
    make = choose_tiles(cast(Backend, backend), parsed, rows, cols)
    plan = Plan(exchange, make, workspace_on(q.device, workspace or None), accumulator(q.dtype), wanted > 0)
    indexed = None if keys == IN_RANGE else keys
    call = Call(plan, exchange, parsed, rows, cols, None, cast(Reduction, reduction), q.device, indexed=indexed)
    tiles = call.tiles(scale, bias)
    return call.prepared(tiles), tiles


@operation_forward.register_fake
def _shapes_forward(q: Tensor, k: Tensor, *rest: Any) -> list[Tensor]:
    *_, loss, words, numbers = rest
    wide, parsed = accumulator(q.dtype), PairLoss.parsed(loss)
    of_scale, _, of_q, of_k = wanted = _wanted(numbers)
    if any(wanted):
        u, v = q.new_empty(q.shape, dtype=wide), k.new_empty(k.shape, dtype=wide)
        none = q.new_empty(0)
        # as `Tiles.needed` has it
        needs_u = of_q or (of_scale and not of_k)
        return [q.new_empty([], dtype=wide), u if needs_u else none, v if of_k else none, q.new_empty([], dtype=wide)]
    # shapes, not `len`, which would be a constant of the graph and compile it anew for other lengths
    sides = [q.shape[0], k.shape[0]] if parsed.symmetric else [q.shape[0]]
    value = q.new_empty([q.shape[0]] if words.endswith("none") else [], dtype=wide)
    states = [q.new_empty((parsed.state_rows, n), dtype=wide) for n in sides]
    return [value, *states, *(q.new_empty((n,), dtype=wide) for n in sides)]


@operation_backward.register_fake
def _shapes_backward(
    _upstream: Tensor, q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None, *rest: Any
) -> list[Tensor]:
    *_, wanted = rest
    return [
        x.new_empty(x.shape) if want and x is not None else q.new_empty(0)
        for x, want in zip((scale, bias, q, k), wanted, strict=True)
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, loss, words, numbers = inputs
    # all but the weights, which are in the coefficients
    ctx.save_for_backward(*tensors[:-1], *output[1:])
    ctx.settings, ctx.tensors = (loss, words, numbers), len(tensors) - 1


def _backward(ctx: Any, upstream: list[Tensor]) -> tuple[Tensor | None, ...]:
    given, results = ctx.saved_tensors[: ctx.tensors], list(ctx.saved_tensors[ctx.tensors :])
    of_q, of_k, of_scale, of_bias = ctx.needs_input_grad[:4]
    wanted = [of_scale, of_bias, of_q, of_k]
    gradients = operation_backward(upstream[0], *given, results, *ctx.settings, wanted)
    dscale, dbias, dq, dk = (gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))
    return dq, dk, dscale, dbias, *[None] * (ctx.tensors - 4), *[None] * 4


def _refuse(_ctx: Any, _upstream: list[Tensor]) -> tuple[Tensor | None, ...]:
    raise refusal("contrast")


operation_forward.register_autograd(_backward, setup_context=_save)
operation_backward.register_autograd(_refuse)
