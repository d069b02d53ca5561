"""One call as one autograd operation: forward from features to the loss, backward from its gradient to theirs.

Last station before the strategies: an exchange visits the shards of columns, tiles compute blocks, the loss defines the
statistics. Every call goes through `Operation`: dot products and learned distances, features on the device or in host
memory. A plan with `at_once` computes the gradients together with the loss.

`Operation` computes first derivatives; `compiled.py` is its twin for torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contrastile._types import Reduction
from contrastile.engine import arguments as checks
from contrastile.exchange.base import Exchange, Single
from contrastile.gradcache.first_order import first_order
from contrastile.losses.base import Finished, PairLoss, Shard, changed, divisor, with_states
from contrastile.tiles import own
from contrastile.tiles.base import Accumulated, ForwardResult, Tiles, reduced
from contrastile.tiles.scored import Scorer

# function that makes tiles from a loss, a scale, a bias and a workspace
MakeTiles = Callable[[PairLoss, Tensor, Tensor | None, int], Tiles]
# gradient sums, or a context in which a backward may read them
Sums = Accumulated | AbstractContextManager[Accumulated]
# function from a call, its tiles, scale, bias, other inputs and `Wanted` to the loss and its gradient sums
AtOnce = Callable[["Call", Tiles, Tensor, Tensor | None, Sequence[Tensor], Sequence[bool]], tuple[Tensor, Sums]]
# for each input of the operation (scale, bias, all others in order) whether it gets a gradient
Wanted = Sequence[bool]


@dataclass(frozen=True, eq=False)
class Plan:
    """The choices for calls of one signature. Compared by identity."""

    # None: ranks choose it in each call
    exchange: Exchange | None
    tiles: MakeTiles
    # bytes that tiles may use
    workspace: int
    # accumulator type
    wide: torch.dtype
    # computes the gradients with the loss: for losses whose pairs' gradients need no statistics, and for small calls
    at_once: AtOnce | None


@dataclass(frozen=True)
class Call:
    """One call: its plan, and all arguments that autograd does not differentiate."""

    plan: Plan
    exchange: Exchange
    loss: PairLoss
    rows: Shard
    cols: Shard
    weights: Tensor | None
    reduction: Reduction
    device: torch.device
    scorer: Scorer | None = None
    # types of the features as passed, and of their gradients, where autocast has cast those of the shards
    input_dtypes: tuple[torch.dtype, ...] | None = None
    # number of keys that positives must be below, to be checked in the call; None where that is done
    indexed: int | None = None

    def tiles(self, scale: Tensor, bias: Tensor | None) -> Tiles:
        """The tiles of this call, with its numbers in the accumulator's type."""
        plan, loss = self.plan, self.loss
        used = None if bias is None or not loss.uses_bias else self._number(bias)
        number = self._number(scale)
        if loss.least_scale:
            number = number.masked_fill(number == 0, loss.least_scale)
        tiles = plan.tiles(loss, number, used, plan.workspace)
        tiles.grad_dtypes = None if self.input_dtypes is None else (self.input_dtypes[0], self.input_dtypes[1])
        if len(self.exchange.layout.rows) > 1:
            tiles.reserve(self.exchange.reserved())
        return tiles

    def in_range(self, tiles: Tiles) -> Call:
        """The call with −1 in place of positives out of range; one of them makes the scale of these tiles NaN."""
        positives = self.rows.positives
        if self.indexed is None or positives is None:
            return self
        positives, tiles.scale = checks.mask_out_of_range(positives, self.indexed, tiles.scale)
        return changed(self, rows=changed(self.rows, positives=positives), indexed=None)

    def _number(self, x: Tensor) -> Tensor:
        x = x.detach()
        if x.ndim:
            x = x.reshape(())
        return x if x.dtype == self.plan.wide and x.device == self.device else x.to(self.device, self.plan.wide)

    def shards(self, inputs: Sequence[Tensor]) -> tuple[Shard, Shard]:
        """Rows and columns with these inputs of the operation as their features."""
        if self.scorer is None:
            q, k, *negatives = inputs
            own = negatives[0] if negatives else None
            return changed(self.rows, features=q, own=own), changed(self.cols, features=k)
        n, m = len(self.rows.leaves), len(self.cols.leaves)
        return self.rows.with_leaves(inputs[:n]), self.cols.with_leaves(inputs[n : n + m])

    def constants(self) -> list[Tensor]:
        """Tensors that the backward reads beside its inputs, saved so that autograd notices a change in place."""
        shards = (self.rows, self.cols)
        tensors = [x for shard in shards for x in (shard.positives, shard.labels, shard.ids) if x is not None]
        if self.scorer is not None:
            tensors += self.scorer.frozen
        return [x for x in tensors if not x.is_inference()] if tensors else tensors


class Operation(torch.autograd.Function):
    """The loss of a call, differentiable in the scale, the bias and all other inputs."""

    @staticmethod
    def forward(ctx: Any, call: Call, scale: Tensor, bias: Tensor | None, *inputs: Tensor) -> Tensor:
        tiles = call.tiles(scale, bias)
        if call.input_dtypes is not None:
            inputs = (call.rows.features, call.cols.features, *[x for x in (call.rows.own,) if x is not None])
        ctx.held = None
        with call.exchange.in_step(), without_autocast(call.device):
            results: Sequence[Any] = ()
            if call.plan.at_once is not None:
                value, sums = call.plan.at_once(call, tiles, scale, bias, inputs, ctx.needs_input_grad[1:])
                if isinstance(sums, Accumulated):
                    results = sums
                else:
                    ctx.held = sums
            else:
                call = call.in_range(tiles)
                rows, cols = call.shards(inputs)
                stats = [side for side in call.exchange.forward(tiles, rows, cols) if side is not None]
                if rows.own is not None:
                    stats[0] = own.forward(tiles, rows, cols, stats[0])
                value, states, coefficients = call.exchange.finish(
                    tiles, stats, rows, cols, call.weights, call.reduction
                )
                results = [*states, *coefficients]
        constants = call.constants()
        ctx.call, ctx.tiles, ctx.constants = call, tiles, len(constants)
        ctx.save_for_backward(scale, bias, *inputs, *results, *constants)
        return value

    @staticmethod
    @first_order("contrast")
    def backward(ctx: Any, tensors: Sequence[Any], upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale, bias, *saved = tensors
        wanted = ctx.needs_input_grad[1:]
        inputs, results = saved[: len(wanted) - 2], saved[len(wanted) - 2 : len(saved) - ctx.constants]
        with ctx.call.exchange.in_step(), nullcontext(results) if ctx.held is None else ctx.held as results:
            return None, *backward(ctx.call, ctx.tiles, upstream, scale, bias, inputs, results, wanted)


def with_gradients(
    call: Call, tiles: Tiles, scale: Tensor, bias: Tensor | None, inputs: Sequence[Tensor], wanted: Wanted
) -> tuple[Tensor, Accumulated]:
    """The loss and its gradient sums for an upstream gradient of 1.

    A pairwise loss needs one sweep for both, 6·N·M·D operations instead of 8, and so do strips over all columns.
    """
    del scale, bias
    call = call.in_range(tiles)
    (rows, cols), exchange = call.shards(inputs), call.exchange
    if not call.loss.pairwise and len(exchange.layout.rows) == 1 and tiles.strip(rows, cols):
        return in_strips(call, tiles, rows, cols, wanted)
    if not call.loss.pairwise:
        tiles.followed = isinstance(exchange, Single)
        stats = [side for side in exchange.forward(tiles, rows, cols) if side is not None]
        result = exchange.finish(tiles, stats, rows, cols, call.weights, call.reduction)
        carrying = with_states(rows, cols, result.states, result.coefficients)
        return result.value, exchange.accumulate(tiles, *carrying, wanted)
    flag = tiles.nonfinite(rows, cols)
    weights = flag.new_ones(len(rows)) if call.weights is None else call.weights.to(flag.dtype)
    # summed over ranks, so that a value that is not finite makes the gradients of all of them NaN
    sums = [weights.sum(), flag, *([] if call.weights is None else [weights.abs().sum()])]
    mass, flag, *size = exchange.total(torch.stack(sums)).unbind()
    mass = divisor(size[0], mass) if size else mass
    coefficient = (weights / mass if call.reduction == "mean" else weights) + flag
    # a pairwise loss leaves no state
    rows = changed(rows, coefficient=coefficient, state=coefficient.new_empty(0, len(rows)))
    row_stats = tiles.init(rows)
    accumulated = exchange.accumulate(tiles, rows, cols, wanted, row_stats)
    return exchange.total((coefficient * call.loss.finish(row_stats).loss).sum()), accumulated


def in_strips(call: Call, tiles: Tiles, rows: Shard, cols: Shard, wanted: Wanted) -> tuple[Tensor, Accumulated]:
    """The loss and its gradient sums from one product of each strip, whose rows meet all columns.

    One strip knows the mean's divisor, the number of rows that have a positive. Sums of several strips are divided by
    it at the end.
    """
    u, v = tiles.accumulators(rows, cols, wanted)
    flag, results = tiles.nonfinite(rows, cols), []
    whole = tiles.strip(rows, cols) == len(rows)

    def reduce(directions: Sequence[Finished]) -> ForwardResult:
        result = reduced(directions, call.weights, call.reduction, call.exchange.total, flag)
        results.append(result)
        return result

    def weigh(ends: Sequence[Finished], along: slice) -> Sequence[Tensor]:
        if whole:
            return reduce(ends).coefficients
        counts = ends[0].counts
        return [counts if call.weights is None else counts * call.weights[along].to(counts.dtype)]

    strips, sums = tiles.strips(rows, cols, u, v, weigh)
    if whole:
        return results[0].value, Accumulated(u, v, sums)
    every = Finished(*(torch.cat(parts, -1) for parts in zip(*(ends for (ends,) in strips), strict=True)))
    mass = every.counts if call.weights is None else every.counts * call.weights.to(every.counts.dtype)
    factor = flag + (1 / divisor((mass * every.loss).sum(), mass.sum()) if call.reduction == "mean" else 1.0)
    for total in (u, v, sums):
        if total is not None:
            total.mul_(factor)
    return reduce([every]).value, Accumulated(u, v, sums)


def backward(
    call: Call,
    tiles: Tiles,
    upstream: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    inputs: Sequence[Tensor],
    results: Sequence[Any],
    wanted: Wanted,
) -> list[Tensor | None]:
    """The gradients of scale, bias and inputs; `results`: gradient sums, or states and coefficients, of the forward."""
    exchange, (rows, cols) = call.exchange, call.shards(inputs)
    with without_autocast(call.device):
        # the one place where gradients are multiplied for the data-parallel wrapper
        ranks, factor = exchange.gradient_factor(), upstream.to(call.plan.wide)
        if ranks != 1:
            factor = factor * ranks
        if call.plan.at_once is not None:
            accumulated = Accumulated(*results)
        else:
            half = len(results) // 2
            coefficients = [coefficient * factor for coefficient in results[half:]]
            rows, cols = with_states(rows, cols, results[:half], coefficients)
            if rows.own is not None:
                return _with_own(call, tiles, rows, cols, wanted, (scale, bias))
            accumulated = exchange.accumulate(tiles, rows, cols, wanted)
        # otherwise the coefficients contain the factor
        remaining = None if call.plan.at_once is None else factor
        return tiles.gradients(accumulated, rows, cols, wanted, (scale, bias), remaining)


def _with_own(
    call: Call, tiles: Tiles, rows: Shard, cols: Shard, wanted: Wanted, numbers: tuple[Tensor, Tensor | None]
) -> list[Tensor | None]:
    """The gradients of scale, bias, q, k and the rows' own columns."""
    of_scale, of_bias, of_q, of_k, of_own = wanted
    # the scale's gradient is read off the rows' accumulator, which has the products of their own columns too
    accumulated = call.exchange.accumulate(tiles, rows, cols, (of_scale, of_bias, of_q or of_scale, of_k))
    dtype = None if call.input_dtypes is None else call.input_dtypes[2]
    gradient = own.backward(tiles, rows, accumulated, dtype, wanted=of_own)
    return [*tiles.gradients(accumulated, rows, cols, wanted[:4], numbers, None), gradient]


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast; nothing is entered where it is off, because that costs time."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
