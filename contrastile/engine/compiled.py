"""The call as two custom operations for torch.compile: one node of the graph for the forward, at most one for the
backward.

The twin of `operation.py`, used only while a graph is traced, because a custom operation costs more per call than an
autograd.Function. It covers one process: several ranks agree on the host, which breaks the graph before the call. A
loss is passed as the string of its class and fields (`PairLoss.spelled`); one without such a string breaks the graph
too. Where calls outside of a graph compute the gradients with the loss, the forward does, and small ones are replayed
(`graph.py`); the backward multiplies them by the gradient of the loss, in the graph."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from contrastile._dispatch import Options, choose_tiles, not_empty, workspace_on
from contrastile._errors import invalid
from contrastile._torch import has_ranks
from contrastile._types import Backend, Gradient, Reduction, accumulator
from contrastile.distributed import collectives
from contrastile.engine import arguments as checks
from contrastile.engine.graph import replayable, small
from contrastile.engine.operation import Call, Plan, backward, statistics, without_autocast
from contrastile.engine.problem import Arguments, Problem
from contrastile.engine.small import at_once
from contrastile.exchange.base import Layout, Single
from contrastile.gradcache.modes import refusal
from contrastile.losses.base import PairLoss, Shard

NO_DIAGONAL = -(2**40)
# in place of the number of keys: positives are in range
IN_RANGE = -1
# words for the ranks of a call: those of the default group, of which there is one, or this rank alone
ALL, ONE = "all", "one"
# bytes of the workspace for each pair whose exponential is kept, and the most that a default workspace has room for
KEPT_BYTES, MOST_KEPT_BYTES = 2.16, 2.16 * 2**30
# cached plans; all are dropped when more kinds of calls than that have been seen
MOST_PLANS = 256

GROUPS = "Tensor? positives, Tensor? row_labels, Tensor? row_ids, Tensor? col_labels, Tensor? col_ids"
INPUTS = f"Tensor q, Tensor k, Tensor scale, Tensor? bias, {GROUPS}"
SETTINGS = "str loss, str words, SymInt[] numbers"
FORWARD = f"({INPUTS}, Tensor? weights, {SETTINGS}) -> Tensor[]"
BACKWARD = f"(Tensor upstream, {INPUTS}, Tensor[] results, {SETTINGS}, bool[] wanted) -> Tensor[]"

_plans: dict[Hashable, Plan] = {}


class _Numbers(NamedTuple):
    """The argument `numbers` of both operations."""

    # global column that is the positive of the first row, or NO_DIAGONAL
    diagonal: int
    # bytes; 0: the default
    workspace: int
    # bits of the gradients of scale, bias, q and k that come with the loss
    wanted: int
    # number of keys that positives must be below, or IN_RANGE
    positives_below: int
    # number of the last columns, which get no gradient
    constant_cols: int


def traceable(arguments: Arguments) -> bool:
    """Return whether the call can be written as tensors, numbers and strings.

    None of these can be traced: the tiles of a scorer, whose module is measured; features streamed from host memory;
    the agreement of several ranks.
    """
    options, loss = arguments.options, arguments.loss
    alone = options.exchange == "single" or (options.group is None and not has_ranks())
    alone = alone or collectives.size(options.group) == 1
    spelled = not isinstance(loss, PairLoss) or loss.spelled is not None
    plain = arguments.scorer is None and len(arguments.guides) == 0
    plain = plain and arguments.targets is None and arguments.own is None
    plain = plain and not getattr(loss, "counts_positives", False)
    return alone and spelled and plain and options.device is None


def constant_negatives(arguments: Arguments) -> int:
    """The number of shared negatives that get no gradient, such as a queue's keys.

    Of one process: an exchange of several ranks keeps sums for all columns. The scale's gradient is read off the sums
    of the queries, or off those of all columns.
    """
    q, negatives = arguments.q, arguments.negatives
    plain = arguments.scorer is None and arguments.own is None and arguments.query_labels is None
    if not plain or negatives is None or negatives.requires_grad:
        return 0
    return len(negatives) if q.requires_grad or not getattr(arguments.scale, "requires_grad", False) else 0


def traced(arguments: Arguments) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """The operation and its inputs. The backend is chosen when the operation runs, on the device of the tensors."""
    problem = Problem.of(arguments, checked=False, alone=True)
    rows, cols, options = problem.rows, problem.cols, problem.options
    if collectives.size(options.group) == 1:
        not_empty(rows.features.shape[0])
    # autocast's cast is an operation of the graph
    q, k = (x.to(problem.dtype) for x in problem.inputs)
    groups = (rows.positives, rows.labels, rows.ids, cols.labels, cols.ids, problem.weights)
    # torch compiles a graph anew once there is a group, but not for a larger group: the operation looks at the size
    ranks = ALL if options.group is None and options.exchange != "single" else ONE
    words = f"{ranks} {options.backend} {options.gradient} {options.reduction}"
    diagonal = NO_DIAGONAL if rows.diagonal is None else rows.diagonal
    at_once = torch.is_grad_enabled() and options.reduction != "none" and _is_at_once(problem, q, k)
    inputs = (problem.scale, problem.bias, q, k) if at_once else ()
    wanted = sum([1 << at for at, x in enumerate(inputs) if x is not None and x.requires_grad])
    positives_below = IN_RANGE if problem.positives_below is None else problem.positives_below
    # as in `_Numbers`
    numbers = [diagonal, int(options.workspace or 0), wanted, positives_below, constant_negatives(arguments)]
    return _loss, (q, k, problem.scale, problem.bias, *groups, problem.loss.spelled, words, numbers)


def _is_at_once(problem: Problem, q: Tensor, k: Tensor) -> bool:
    """Return whether the gradients are computed with the loss, as in calls outside of a graph: see `plan._planned`.

    A loss of both directions keeps its exponentials for that; those of larger batches have two sweeps. One of a single
    direction has sums of all rows and columns from the forward to the backward, whatever its size.
    """
    if q.device.type == "cpu" or not problem.loss.symmetric:
        return True
    # the memory of the device cannot be asked for in a graph
    return q.shape[0] * k.shape[0] <= int((problem.options.workspace or MOST_KEPT_BYTES) / KEPT_BYTES)


def _loss(*inputs: Any) -> Tensor:
    value, *_ = operation_forward(*inputs)
    return value


@torch.library.custom_op("contrastile::forward", mutates_args=(), schema=FORWARD)
def operation_forward(q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    """The loss, then the states, then the coefficients of each direction.

    Where gradients come with it, those of scale, bias, q and k for a gradient of the loss of 1 in their place, in the
    accumulator's dtype: float16 has no room for them before a GradScaler's factor.
    """
    *groups, weights, loss, words, numbers = rest
    if words.startswith(ALL) and (size := collectives.size(None)) > 1:
        rule, remedy = "be that for which the loss was compiled", "Call torch.compiler.reset() after it is made."
        raise invalid("group", rule, f"one of {size} ranks, after one of 1", remedy)
    positives, positives_below = groups[0], _Numbers(*numbers).positives_below
    if positives is not None and positives_below != IN_RANGE:
        # checked here, because a graph cannot read values
        checks.in_range(positives, positives_below)
    call, inputs = _call(q, k, scale, bias, groups, weights, loss, words, numbers), (scale, bias, q, k)
    with without_autocast(q.device):
        if call.plan.at_once:
            value, gradients = at_once(call, inputs, _wanted(numbers), [_as_wide(x, call.plan.wide) for x in inputs])
            return [value, *(q.new_empty(0) if x is None else _own_memory(x) for x in gradients)]
        tiles = call.tiles(scale, bias)
        call = call.prepared(tiles)
        rows, cols = call.shards((q, k))
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
    if any(_wanted(numbers)):
        gradients = _multiplied(results, upstream, (scale, bias, q, k))
        return [x if want else q.new_empty(0) for x, want in zip(gradients, wanted, strict=True)]
    call = _call(q, k, scale, bias, groups, None, loss, words, numbers)
    tiles = call.tiles(scale, bias)
    call = call.prepared(tiles)
    computed = backward(call, tiles, upstream, scale, bias, (q, k), results, wanted)
    return [q.new_empty(0) if gradient is None else _own_memory(gradient) for gradient in computed]


def _as_wide(x: Tensor | None, wide: torch.dtype) -> Tensor | None:
    """A tensor of this shape and dtype, with the memory of one number."""
    return x if x is None or x.dtype == wide else x.new_empty((), dtype=wide).expand(x.shape)


def _multiplied(gradients: Sequence[Tensor], upstream: Tensor, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients times the upstream gradient, in the dtypes of their inputs."""
    return [
        (gradient * upstream).to(upstream.dtype if x is None else x.dtype)
        for gradient, x in zip(gradients, inputs, strict=True)
    ]


def _wanted(numbers: Sequence[int]) -> list[bool]:
    """The gradients of scale, bias, q and k that come with the loss."""
    bits = _Numbers(*numbers).wanted
    return [bool(bits >> at & 1) for at in range(4)]


def _own_memory(x: Tensor) -> Tensor:
    """x at the start of memory of its own: outputs share none, and compiled code relies on their alignment."""
    own = x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    return x if own else x.clone(memory_format=torch.contiguous_format)


def _call(
    q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None, groups: Sequence[Tensor | None], weights: Tensor | None,
    loss: str, words: str, numbers: Sequence[int],
) -> Call:  # fmt: skip
    """The call of an operation's arguments, whose plan is cached by their kind."""
    positives, row_labels, row_ids, col_labels, col_ids = groups
    _, backend, gradient, reduction = words.split()
    named, parsed = _Numbers(*numbers), PairLoss.parsed(loss)
    diagonal = None if named.diagonal == NO_DIAGONAL else named.diagonal
    rows = Shard(q, diagonal=diagonal, positives=positives, labels=row_labels, ids=row_ids)
    cols = Shard(k, labels=col_labels, ids=col_ids)
    positives_below = None if named.positives_below == IN_RANGE else named.positives_below
    tensors = q, k, scale, bias, *groups, weights
    facts = [x if x is None else (x.shape, x.dtype, x.device) for x in tensors]
    # a graph reads one tensor of labels for both sides once
    key = (loss, words, *numbers, row_labels is col_labels, *facts)
    plan = _plans.get(key)
    if plan is None:
        exchange = Single(cast(Gradient, gradient), Layout(None, 0, (len(q),), (len(k),)))
        make = choose_tiles(cast(Backend, backend), parsed, rows, cols)
        options = Options(cast(Backend, backend), reduction=cast(Reduction, reduction))
        problem = Problem(
            parsed, options, (q, k), scale, bias, rows, cols, weights, q.device, q.dtype, positives_below, scorer=None,
            statement={}, numbers_before_call=True,
        )  # fmt: skip
        workspace, at_once = workspace_on(q.device, named.workspace or None), named.wanted > 0
        replayed = at_once and replayable(problem, exchange) and small(problem, exchange, make)
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = Plan(exchange, make, workspace, accumulator(q.dtype), at_once, replayed=replayed)
    assert plan.exchange is not None
    return Call(
        plan, plan.exchange, parsed, rows, cols, weights, cast(Reduction, reduction), q.device,
        positives_below=positives_below, constant_cols=named.constant_cols,
    )  # fmt: skip


@operation_forward.register_fake
def _shapes_forward(q: Tensor, k: Tensor, *rest: Any) -> list[Tensor]:
    *_, loss, words, numbers = rest
    wide, parsed = accumulator(q.dtype), PairLoss.parsed(loss)
    wanted = _wanted(numbers)
    if any(wanted):
        scale, bias = rest[:2]
        return [q.new_empty([], dtype=wide), *_like((scale, bias, q, k), wanted, q, wide)]
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
    return _like((scale, bias, q, k), wanted, q)


def _like(
    inputs: Sequence[Tensor | None], wanted: Sequence[bool], q: Tensor, dtype: torch.dtype | None = None
) -> list[Tensor]:
    return [
        x.new_empty(x.shape, dtype=dtype or x.dtype) if want and x is not None else q.new_empty(0)
        for x, want in zip(inputs, wanted, strict=True)
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, loss, words, numbers = inputs
    # all but the weights, which are in the coefficients
    ctx.save_for_backward(*tensors[:-1], *output[1:])
    ctx.settings, ctx.tensors = (loss, words, numbers), len(tensors) - 1


def _backward(ctx: Any, upstream: list[Tensor]) -> tuple[Tensor | None, ...]:
    # each read unpacks all of them
    saved = ctx.saved_tensors
    tensors, results = saved[: ctx.tensors], list(saved[ctx.tensors :])
    of_q, of_k, of_scale, of_bias = ctx.needs_input_grad[:4]
    wanted = [of_scale, of_bias, of_q, of_k]
    if any(_wanted(ctx.settings[2])) and not torch.is_grad_enabled():
        # operations of the graph, whose derivative nobody can ask for
        gradients = _multiplied(results, upstream[0], (tensors[2], tensors[3], *tensors[:2]))
    else:
        gradients = operation_backward(upstream[0], *tensors, results, *ctx.settings, wanted)
    dscale, dbias, dq, dk = (gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))
    return dq, dk, dscale, dbias, *[None] * (ctx.tensors - 4), *[None] * 4


def _refuse(_ctx: Any, _upstream: list[Tensor]) -> tuple[Tensor | None, ...]:
    raise refusal("contrast")


operation_forward.register_autograd(_backward, setup_context=_save)
operation_backward.register_autograd(_refuse)
