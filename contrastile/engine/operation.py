"""One call as one autograd operation: forward from features to the loss, backward from its gradient to theirs.

Last step before the strategies: an exchange visits the shards of columns, tiles compute blocks, the loss defines the
statistics. Every call goes through `Operation`: dot products and learned distances, features on the device or in host
memory. A plan with `at_once` computes the gradients together with the loss.

`Operation` computes first derivatives. It has two twins: `compiled.py` for torch.compile, `graph.py` for small calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from contrastile._types import Reduction
from contrastile.engine import arguments as checks
from contrastile.exchange.base import Exchange, Single
from contrastile.gradcache.modes import first_order
from contrastile.losses.base import Finished, PairLoss, Shard, changed, divisor, with_states
from contrastile.tiles import own
from contrastile.tiles.base import Accumulated, Tiles, reduced
from contrastile.tiles.scored import Scorer

# function that makes tiles from a loss, a scale, a bias and a workspace
MakeTiles = Callable[[PairLoss, Tensor, Tensor | None, int], Tiles]
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
    # accumulator dtype
    wide: torch.dtype
    # the gradients are computed with the loss, for one of the reasons in `plan._planned`
    at_once: bool
    # a gradient is wanted; without grad mode, autograd still asks for those of inputs that require one
    wants: bool = True
    # later calls replay a graph (`graph.py`)
    replayed: bool = False
    # of losses of rows that are replayed (`small.Rows`): the plan of their gradients
    of_rows: Plan | None = None


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
    # dtypes of the features as passed, and of their gradients, where autocast has cast those of the shards
    input_dtypes: tuple[torch.dtype, ...] | None = None
    # number of keys that positives must be below, to be checked in the call; None where that is done
    positives_below: int | None = None
    # the shards have the numbers that the loss takes from guides and labels
    has_numbers: bool = True
    # number of the last columns, which are constants: no gradient sums are kept for them
    constant_cols: int = 0
    # for reduction="none", where gradients come with the loss: the upstream gradient [N] of each row's loss
    upstream: Tensor | None = None

    def tiles(self, scale: Tensor, bias: Tensor | None) -> Tiles:
        """The tiles of this call, with its numbers in the accumulator's dtype."""
        plan, loss = self.plan, self.loss
        used = None if bias is None or not loss.uses_bias else self._number(bias)
        number = self._number(scale)
        if used is not None:
            # an infinite bias alone could leave a finite loss
            number = number + used * 0
        if loss.least_scale:
            number = number.masked_fill(number == 0, loss.least_scale)
        tiles = plan.tiles(loss, number, used, plan.workspace)
        tiles.constant_cols = self.constant_cols
        tiles.grad_dtypes = None if self.input_dtypes is None else (self.input_dtypes[0], self.input_dtypes[1])
        if len(self.exchange.layout.rows) > 1:
            tiles.reserve(self.exchange.reserved(self.cols))
        return tiles

    def prepared(self, tiles: Tiles) -> Call:
        """The call with −1 in place of positives out of range, and with the numbers that the loss computes.

        A positive out of range, or a guide that is not finite, makes the scale of these tiles NaN.
        """
        call, positives = self, self.rows.positives
        if self.positives_below is not None and positives is not None:
            positives, tiles.scale = checks.mask_out_of_range(positives, self.positives_below, tiles.scale)
            call = changed(call, rows=changed(call.rows, positives=positives), positives_below=None)
        if self.has_numbers:
            return call
        gathers = self.exchange.layout.gathers()
        rows, cols, tiles.scale = checks.with_loss_numbers(self.loss, call.rows, call.cols, tiles.scale, gathers, tiles)
        return changed(call, rows=rows, cols=cols, has_numbers=True)

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

    def over_mass(self, x: Tensor, mass: Tensor) -> Tensor:
        """x divided by the mass for "mean", by mass / N for "none", whose mean is the loss, and by 1 for "sum"."""
        if self.reduction == "sum":
            return x
        return x / mass if self.reduction == "mean" else x / mass * len(self.rows)

    def times_upstream(self, coefficients: Sequence[Tensor], along: slice = slice(None)) -> list[Tensor]:
        """Coefficients of these rows, and of a symmetric loss's columns, times their upstream gradients, if any."""
        return [x if self.upstream is None else x * self.upstream[along] for x in coefficients]

    def watched(self) -> list[Tensor]:
        """Tensors that the backward reads beside its inputs, saved so that autograd notices a change in place."""
        tensors = [
            x
            for shard in (self.rows, self.cols)
            for x in (shard.positives, shard.labels, shard.ids, shard.numbers, shard.targets, *shard.guides)
            if x is not None
        ]
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
        with call.exchange.in_step(), without_autocast(call.device):
            results: Sequence[Any] = ()
            if call.plan.at_once:
                wanted = [want and call.plan.wants for want in ctx.needs_input_grad[1:]]
                value, results = with_gradients(call, tiles, inputs, wanted)
            else:
                call = call.prepared(tiles)
                rows, cols = call.shards(inputs)
                tiles.backward_later = isinstance(call.exchange, Single)
                stats = statistics(call, tiles, rows, cols)
                value, states, coefficients = call.exchange.finish(
                    tiles, stats, rows, cols, call.weights, call.reduction
                )
                results = [*states, *coefficients]
        watched = call.watched()
        ctx.call, ctx.tiles, ctx.watched = call, tiles, len(watched)
        ctx.save_for_backward(scale, bias, *inputs, *results, *watched)
        return value

    @staticmethod
    @first_order("contrast")
    def backward(ctx: Any, tensors: Sequence[Any], upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale, bias, *saved = tensors
        wanted = ctx.needs_input_grad[1:]
        inputs, results = saved[: len(wanted) - 2], saved[len(wanted) - 2 : len(saved) - ctx.watched]
        with ctx.call.exchange.in_step():
            return None, *backward(ctx.call, ctx.tiles, upstream, scale, bias, inputs, results, wanted)


def with_gradients(call: Call, tiles: Tiles, inputs: Sequence[Tensor], wanted: Wanted) -> tuple[Tensor, Accumulated]:
    """The loss and its gradient sums, for an upstream gradient of 1 or those of the rows (`Call.upstream`).

    A pairwise loss needs one sweep for both, 6·N·M·D operations instead of 8, and so do strips over all columns. Where
    nothing is `wanted`, the loss alone is computed.
    """
    call = call.prepared(tiles)
    (rows, cols), exchange = call.shards(inputs), call.exchange
    # a strip has the statistics of its rows only where these meet no further columns
    height = tiles.strip(rows, cols, any(wanted)) if len(exchange.layout.rows) == 1 else 0
    whole = height == len(rows)
    # one strip of products on a CPU may compute the mean directly (`PairLoss.direct`)
    mean = whole and tiles.writes_fresh_strip and call.device.type == "cpu"
    mean = mean and call.weights is None and call.reduction == "mean"
    # a pairwise loss takes strips for that alone: its own sweep below is as short
    if height and (not call.loss.pairwise or mean):
        return in_strips(call, tiles, rows, cols, wanted, whole=whole, mean=mean)
    if not any(wanted):
        stats = statistics(call, tiles, rows, cols)
        value = exchange.finish(tiles, stats, rows, cols, call.weights, call.reduction).value
        return value, Accumulated(None, None, tiles.no_pairs())
    if not call.loss.pairwise:
        # a part of a teacher's loss is left to the backward, which knows nothing of columns that a row meets alone
        tiles.backward_next = isinstance(exchange, Single) and not (rows.own is not None and rows.guides)
        stats = statistics(call, tiles, rows, cols)
        result = exchange.finish(tiles, stats, rows, cols, call.weights, call.reduction)
        rows, cols = with_states(rows, cols, result.states, call.times_upstream(result.coefficients))
        return result.value, _accumulated(call, tiles, rows, cols, wanted)
    flag = tiles.nonfinite(rows, cols)
    weights = flag.new_ones(len(rows)) if call.weights is None else call.weights.to(flag.dtype)
    # summed over ranks, so that a value that is not finite makes the gradients of all of them NaN; the sum of sizes
    # tells weights that are all 0 from weights that cancel
    sums = [weights.sum(), flag, *([] if call.weights is None else [weights.abs().sum()])]
    mass, flag, *sizes = exchange.total(torch.stack(sums)).unbind()
    mass = divisor(sizes[0], mass) if sizes else mass
    (coefficient,) = call.times_upstream([call.over_mass(weights, mass) + flag])
    # a pairwise loss leaves no state
    rows = changed(rows, coefficient=coefficient, state=coefficient.new_empty(0, len(rows)))
    row_stats = tiles.init(rows)
    accumulated = exchange.accumulate(tiles, rows, cols, wanted, row_stats)
    return exchange.total((coefficient * call.loss.finish(row_stats).loss).sum()), accumulated


def statistics(call: Call, tiles: Tiles, rows: Shard, cols: Shard) -> list[Tensor]:
    """The statistics of the rows, with those of their own columns, and for a symmetric loss of the columns."""
    stats = [side for side in call.exchange.forward(tiles, rows, cols) if side is not None]
    if rows.own is not None:
        stats[0] = own.forward(tiles, rows, cols, stats[0])
    return stats


def _accumulated(call: Call, tiles: Tiles, rows: Shard, cols: Shard, wanted: Wanted) -> Accumulated:
    """The gradient sums of all pairs, with those of the rows' own columns."""
    if rows.own is None:
        return call.exchange.accumulate(tiles, rows, cols, wanted)
    accumulated = call.exchange.accumulate(tiles, rows, cols, with_scale(wanted))
    return accumulated._replace(own=own.backward(tiles, rows, accumulated))


def with_scale(wanted: Wanted) -> Wanted:
    """The sums wanted of a block beside own columns, whose products the rows' accumulator alone has: the scale's
    gradient is read off it.
    """
    of_scale, of_bias, of_q, of_k, _ = wanted
    return of_scale, of_bias, of_q or of_scale, of_k


def in_strips(
    call: Call, tiles: Tiles, rows: Shard, cols: Shard, wanted: Wanted, *, whole: bool, mean: bool
) -> tuple[Tensor, Accumulated]:
    """The loss and its gradient sums from one product of each strip, whose rows meet all columns.

    whole: there is one strip, which knows the mean's divisor, the number of rows that have a positive. Sums of several
    strips are divided by it at the end. mean: the strip may compute the mean directly.
    """
    tiles.fresh = whole and tiles.writes_fresh_strip
    u, v = tiles.accumulators(rows, cols, wanted if rows.own is None else with_scale(wanted))
    values: list[Tensor] = []
    finished: list[Finished] = []

    def weigh(stats: Sequence[Tensor], direct: Sequence[Finished], along: slice) -> tuple[list[Tensor], list[Tensor]]:
        if whole:
            given, flag = (call.weights, call.reduction, call.exchange.total), partial(tiles.nonfinite, rows, cols)
            result = reduced(direct, *given, flag()) if direct else tiles.finish(stats, *given, flag)
            values.append(result.value)
            return result.states, call.times_upstream(result.coefficients)
        (end,) = direct or [call.loss.finish(stats[0])]
        # states differ in size between strips, and are of no more use
        finished.append(end._replace(state=end.state[:0]))
        coefficient = end.counts if call.weights is None else end.counts * call.weights[along].to(end.counts)
        return [end.state], call.times_upstream([coefficient], along)

    sums, value = tiles.strips(rows, cols, u, v, weigh, mean=mean, wanted=any(wanted))
    if whole or value is not None:
        return values[0] if value is None else value, Accumulated(u, v, sums, tiles.own_gradients)
    flag = tiles.nonfinite(rows, cols)
    every = Finished(*(torch.cat(parts, -1) for parts in zip(*finished, strict=True)))
    mass = every.counts if call.weights is None else every.counts * call.weights.to(every.counts.dtype)
    factor = flag + call.over_mass(torch.ones_like(flag), divisor((mass * every.loss).sum(), mass.sum()))
    for total in (u, v, sums):
        if total is not None:
            total.mul_(factor)
    value = reduced([every], call.weights, call.reduction, call.exchange.total, flag).value
    return value, Accumulated(u, v, sums)


def backward(
    call: Call, tiles: Tiles, upstream: Tensor, scale: Tensor, bias: Tensor | None, inputs: Sequence[Tensor],
    results: Sequence[Any], wanted: Wanted,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of scale, bias and inputs; `results`: gradient sums, or states and coefficients, of the forward."""
    exchange, (rows, cols) = call.exchange, call.shards(inputs)
    with without_autocast(call.device):
        # the one place where gradients are multiplied for the data-parallel wrapper
        upstream, factor = upstream.to(call.plan.wide), exchange.gradient_factor()
        if factor != 1:
            upstream = upstream * factor
        if call.plan.at_once:
            accumulated = Accumulated(*results)
        else:
            half = len(results) // 2
            coefficients = [coefficient * upstream for coefficient in results[half:]]
            rows, cols = with_states(rows, cols, results[:half], coefficients)
            tiles.whole_backward = isinstance(exchange, Single) and rows.own is None
            accumulated = _accumulated(call, tiles, rows, cols, wanted)
        # otherwise the coefficients contain it
        remaining = upstream if call.plan.at_once else None
        return gradients(call, tiles, accumulated, (rows, cols), (scale, bias), wanted, remaining)


def gradients(
    call: Call, tiles: Tiles, sums: Accumulated, shards: tuple[Shard, Shard], numbers: tuple[Tensor, Tensor | None],
    wanted: Wanted, upstream: Tensor | None,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of scale, bias and all other inputs from their sums; `numbers`, `upstream`: `Tiles.gradients`."""
    rows, cols = shards
    if rows.own is None:
        return tiles.gradients(sums, rows, cols, wanted, numbers, upstream)
    *of_block, of_own = wanted
    gradient = None
    if of_own and sums.own is not None:
        dtype = rows.own.dtype if call.input_dtypes is None else call.input_dtypes[2]
        number = tiles.scale if upstream is None else tiles.scale * upstream
        gradient = own.gradient(tiles, sums.own, rows.features, number, dtype)
    return [*tiles.gradients(sums, rows, cols, of_block, numbers, upstream), gradient]


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast; nothing is entered where it is off, because that costs time."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
