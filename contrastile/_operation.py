"""The same two sweeps as custom operations, for torch.compile: one node in the graph each, never a break, never
unrolled.

Beside `_contrast.py`, which takes this way only while a graph is being traced, because a custom operation costs
more per call than an autograd.Function. It covers one process; several ranks talk to each other on the host, which
a graph cannot, so there the graph ends before the call and goes on behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from contrastile import _check, comm
from contrastile._choose import choose_tiles
from contrastile._sweep import Call, backward, forward, halves
from contrastile._task import Task
from contrastile._types import Backend, Gradient, Reduction, accumulator
from contrastile.exchange.base import Shards
from contrastile.exchange.single import Single
from contrastile.losses.base import PairLoss, Side
from contrastile.losses.sigmoid import Sigmoid
from contrastile.losses.softmax import Softmax, SoftmaxState

NO_DIAGONAL = -(2**40)
# in the place of the number of keys: positives are in range
IN_RANGE = -1
Words = ParamSpec("Words")
Result = TypeVar("Result")


def untraced(function: Callable[Words, Result]) -> Callable[Words, Result]:
    """The function; torch.compile looks only into calls that are one operation, and breaks its graph around others."""

    @wraps(function)
    def call(*arguments: Words.args, **words: Words.kwargs) -> Result:
        if torch.compiler.is_compiling() and not _one_operation(words):
            return torch.compiler.disable(function)(*arguments, **words)
        return function(*arguments, **words)

    return call


def _one_operation(words: dict[str, Any]) -> bool:
    """Whether a call can be written down as tensors, numbers and words.

    Not with a scorer, whose tiles come from measuring the module (which may be compiled itself); nor with features
    that are streamed from the host; nor on several ranks.
    """
    alone = words.get("exchange") == "single" or comm.size(words.get("group")) == 1
    known = type(words.get("loss", Softmax())) in (Softmax, Sigmoid)
    return alone and known and words.get("scorer") is None and words.get("device") is None


def traced(task: Task) -> Tensor:
    """The call as one operation. How tiles are computed is chosen when it runs: a graph cannot ask the device."""
    rows, cols, loss, options = task.rows, task.cols, task.loss, task.options
    groups = [rows.positives, rows.labels, rows.ids, cols.labels, cols.ids, task.weights]
    smoothing = loss.label_smoothing if isinstance(loss, Softmax) else 0.0
    flags = f"{loss.symmetric} {loss.exclude_self}"
    words = f"{type(loss).__name__} {flags} {options.backend} {options.gradient} {options.reduction}"
    diagonal = NO_DIAGONAL if rows.diagonal is None else rows.diagonal
    numbers = [diagonal, int(options.workspace or 0), IN_RANGE if task.indexed is None else task.indexed]
    value, *_ = sweep_forward(task.inputs.q, task.inputs.k, task.scale, task.bias, *groups, words, smoothing, numbers)
    return value


@torch.library.custom_op("contrastile::forward", mutates_args=())
def sweep_forward(
    q: Tensor,
    k: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    positives: Tensor | None,
    row_labels: Tensor | None,
    row_ids: Tensor | None,
    col_labels: Tensor | None,
    col_ids: Tensor | None,
    weights: Tensor | None,
    words: str,
    smoothing: float,
    numbers: list[int],
) -> list[Tensor]:
    """The loss, then the states, then the coefficients of each direction."""
    if positives is not None and numbers[-1] != IN_RANGE:
        # a graph cannot read them; whoever runs it can
        _check.in_range(positives, numbers[-1])
        positives, scale = _check.kept_in_range(positives, numbers[-1], scale)
    call = _call(q, k, [positives, row_labels, row_ids, col_labels, col_ids, weights], words, smoothing, numbers)
    swept = forward(call, q, k, scale, bias)
    # an operation's outputs share no memory
    return [swept.value, *(x.clone() for x in (*swept.states, *swept.coefficients))]


@torch.library.custom_op("contrastile::backward", mutates_args=())
def sweep_backward(
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    positives: Tensor | None,
    row_labels: Tensor | None,
    row_ids: Tensor | None,
    col_labels: Tensor | None,
    col_ids: Tensor | None,
    swept: list[Tensor],
    words: str,
    smoothing: float,
    numbers: list[int],
    wanted: list[bool],
) -> list[Tensor]:
    """The gradients of q, k, scale and bias; one of no elements stands for each that is not wanted."""
    if positives is not None and numbers[-1] != IN_RANGE:
        positives, scale = _check.kept_in_range(positives, numbers[-1], scale)
    call = _call(q, k, [positives, row_labels, row_ids, col_labels, col_ids, None], words, smoothing, numbers)
    found = backward(call, upstream, q, k, scale, bias, halves(swept), wanted)
    return [q.new_empty(0) if gradient is None else _whole(gradient) for gradient in found]


def _whole(x: Tensor) -> Tensor:
    """x in memory of its own, from its start: outputs share none, and compiled code relies on their alignment."""
    own = x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    return x if own else x.clone(memory_format=torch.contiguous_format)


def _loss(words: str, smoothing: float) -> PairLoss:
    name, symmetric, exclude_self, *_ = words.split()
    flags = {"symmetric": symmetric == "True", "exclude_self": exclude_self == "True"}
    return Softmax(**flags, label_smoothing=smoothing) if name == "Softmax" else Sigmoid(**flags)


def _call(
    q: Tensor, k: Tensor, groups: Sequence[Tensor | None], words: str, smoothing: float, numbers: Sequence[int]
) -> Call:
    positives, row_labels, row_ids, col_labels, col_ids, weights = groups
    *_, backend, gradient, reduction = words.split()
    first, workspace, _ = numbers
    diagonal = None if first == NO_DIAGONAL else first
    loss = _loss(words, smoothing)
    rows = Side(q, diagonal=diagonal, positives=positives, labels=row_labels, ids=row_ids)
    cols = Side(k, labels=col_labels, ids=col_ids)
    tiles = choose_tiles(cast(Backend, backend), loss, rows, cols)
    exchange = Single(cast(Gradient, gradient), Shards(None, 0, (len(q),), (len(k),)))
    return Call(loss, tiles, exchange, rows, cols, weights, cast(Reduction, reduction), workspace or None)


@sweep_forward.register_fake
def _shapes_forward(q: Tensor, k: Tensor, *rest: Any) -> list[Tensor]:
    *_, words, smoothing, _ = rest
    wide, loss = accumulator(q.dtype), _loss(words, smoothing)
    kept = len(SoftmaxState._fields) if isinstance(loss, Softmax) else 0
    # the length of a tensor would be a number that the graph is bound to, and compiled anew for others
    sides = [q.shape[0], k.shape[0]] if loss.symmetric else [q.shape[0]]
    value = q.new_empty([q.shape[0]] if words.endswith("none") else [], dtype=wide)
    states = [q.new_empty((kept, n), dtype=wide) for n in sides]
    return [value, *states, *(q.new_empty((n,), dtype=wide) for n in sides)]


@sweep_backward.register_fake
def _shapes_backward(
    upstream: Tensor, q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None, *rest: Any
) -> list[Tensor]:
    del upstream
    *_, wanted = rest
    return [
        x.new_empty(x.shape) if want and x is not None else q.new_empty(0)
        for x, want in zip((q, k, scale, bias), wanted, strict=True)
    ]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, words, smoothing, numbers = inputs
    # all but the weights, which are in the coefficients
    ctx.save_for_backward(*tensors[:-1], *output[1:])
    ctx.settings, ctx.tensors = (words, smoothing, numbers), len(tensors) - 1


def _hand_back(ctx: Any, upstream: list[Tensor]) -> tuple[Tensor | None, ...]:
    given, swept = ctx.saved_tensors[: ctx.tensors], list(ctx.saved_tensors[ctx.tensors :])
    wanted = list(ctx.needs_input_grad[:4])
    found = sweep_backward(upstream[0], *given, swept, *ctx.settings, wanted)
    gradients = [gradient if want else None for gradient, want in zip(found, wanted, strict=True)]
    return *gradients, *[None] * (ctx.tensors - 4), None, None, None, None


sweep_forward.register_autograd(_hand_back, setup_context=_keep)
