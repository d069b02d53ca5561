# mypy: ignore-errors
# device code: Triton compiles these functions from their source, their arguments have no Python types
"""The device code of a call's two ends: from statistics to the loss, and from accumulators to gradients.

Launched by `triton_conclude.py`. The same as the softmax's `finish` and what `_sweep.py` writes around the sweeps in
some eighty small operations, which take the host longer than a small batch takes the device. Sums are taken per block
of rows and added up afterwards, in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.losses.softmax import SoftmaxStats
from contrastile.tiles.triton_kernels import (
    INVERSE,
    MISSING,
    POISON,
    POSITIVE_INVERSE,
    POSITIVE_SHARE,
    SHARE,
    STATE_POSITIVE_TOP,
    STATE_TOP,
    log1p,
)

# rows of a softmax's statistics
TOP, TOTAL, POSITIVE_TOP, POSITIVE_TOTAL, POSITIVE_SUM, POSITIVE_COUNT, LOGIT_SUM, KEPT = (
    tl.constexpr(row) for row in range(len(SoftmaxStats._fields))
)
# rows of what `finish` leaves: the state, then these
LOSS, WEIGHT = tl.constexpr(7), tl.constexpr(8)
# numbers that change from call to call: compiled once for all their values
ANY = ("N", "M", "n", "blocks", "row_stride", "col_stride", "smoothing")


@triton.jit
def _finite(top):
    """The maximum to subtract: 0 where there was nothing to take one of."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def _finish_side(stats_ptr, stride, weights_ptr, n, first, length, side, sides, blocks, numbers_ptr, out_ptr, sums_ptr,
                 smoothing, WEIGHTS: tl.constexpr, SMOOTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    top = tl.load(stats_ptr + TOP * stride + at, mask=inside, other=0.0)
    total = tl.load(stats_ptr + TOTAL * stride + at, mask=inside, other=1.0)
    positive_top = tl.load(stats_ptr + POSITIVE_TOP * stride + at, mask=inside, other=0.0)
    positive_total = tl.load(stats_ptr + POSITIVE_TOTAL * stride + at, mask=inside, other=1.0)
    positive_sum = tl.load(stats_ptr + POSITIVE_SUM * stride + at, mask=inside, other=0.0)
    count = tl.load(stats_ptr + POSITIVE_COUNT * stride + at, mask=inside, other=0.0)
    # differences of maxima first: they are exact where their logits are alike
    gap = (top - positive_top) + (tl.log(total) - tl.log(positive_total))
    positive_share = 1.0 / tl.maximum(count, 1.0)
    mean = positive_sum * positive_share
    loss = log1p(tl.exp(-tl.abs(gap))) + tl.maximum(gap, 0.0) + ((positive_top - mean) + tl.log(positive_total))
    share = tl.zeros((BLOCK,), tl.float32)
    if SMOOTH:
        share = 1.0 / tl.maximum(tl.load(stats_ptr + KEPT * stride + at, mask=inside, other=0.0), 1.0)
        loss += smoothing * (mean - tl.load(stats_ptr + LOGIT_SUM * stride + at, mask=inside, other=0.0) * share)
    # a row without a positive has no loss; NaN must stay NaN elsewhere
    counts = (inside & (count > 0)).to(tl.float32)
    loss = tl.where(counts > 0, loss, 0.0)
    weight = counts
    if WEIGHTS:
        weight = counts * tl.load(weights_ptr + at, mask=inside, other=0.0)
    higher = _finite(tl.maximum(top, positive_top))
    both = total * tl.exp(top - higher) + positive_total * tl.exp(positive_top - higher)
    out = out_ptr + first + at
    tl.store(out + STATE_TOP * length, higher, mask=inside)
    # where no key counts there is nothing to share out: 0 of it, and not 0 · ∞
    tl.store(out + INVERSE * length, 1.0 / tl.where(both == 0, 1.0, both), mask=inside)
    tl.store(out + STATE_POSITIVE_TOP * length, _finite(positive_top), mask=inside)
    tl.store(out + POSITIVE_INVERSE * length, 1.0 / tl.where(counts > 0, positive_total, 1.0), mask=inside)
    tl.store(out + MISSING * length, 1.0 / (1.0 + tl.exp(-gap)), mask=inside)
    tl.store(out + POSITIVE_SHARE * length, positive_share, mask=inside)
    tl.store(out + SHARE * length, share, mask=inside)
    tl.store(out + LOSS * length, loss, mask=inside)
    tl.store(out + WEIGHT * length, weight, mask=inside)
    tl.store(sums_ptr + side * blocks + block, tl.sum(loss * weight))
    tl.store(sums_ptr + (sides + side) * blocks + block, tl.sum(weight))
    if side == 0:
        here = tl.where(block == 0, 1.0, 0.0)
        poison = tl.load(numbers_ptr + POISON)
        tl.store(sums_ptr + 2 * sides * blocks + block, poison + here * n)
        tl.store(sums_ptr + (2 * sides + 1) * blocks + block, poison)


@triton.jit(do_not_specialize=ANY)
def finish(row_stats_ptr, row_stride, N, col_stats_ptr, col_stride, M, weights_ptr, numbers_ptr, out_ptr, sums_ptr,
           blocks, smoothing, WEIGHTS: tl.constexpr, SMOOTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """[9, N + M]: the state of rows and columns, each one's loss and its weight.

    And per block, for S sides, [2 · S + 2, blocks]: Σ weight · loss and Σ weight of each side, rows, and the poison.
    """
    sides = tl.num_programs(1)
    length = (N + M).to(tl.int64)
    if tl.program_id(1) == 0:
        _finish_side(row_stats_ptr, row_stride.to(tl.int64), weights_ptr, N, 0, length, 0, sides, blocks, numbers_ptr,
                     out_ptr, sums_ptr, smoothing, WEIGHTS, SMOOTH, BLOCK)  # fmt: skip
    else:
        _finish_side(col_stats_ptr, col_stride.to(tl.int64), weights_ptr, M, N, length, 1, sides, blocks, numbers_ptr,
                     out_ptr, sums_ptr, smoothing, WEIGHTS, SMOOTH, BLOCK)  # fmt: skip


@triton.jit(do_not_specialize=ANY)
def share(weight_ptr, totals_ptr, out_ptr, value_ptr, N, n, MEAN: tl.constexpr, SIDES: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """From the totals of `finish`'s sums: the loss, and ∂loss/∂(each row's loss) of the N rows and then the columns."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    loss = tl.load(totals_ptr)
    mass = tl.load(totals_ptr + SIDES)
    other_loss = loss
    other_mass = mass
    if SIDES == 2:
        other_loss = tl.load(totals_ptr + 1)
        other_mass = tl.load(totals_ptr + 3)
    poison = tl.load(totals_ptr + 2 * SIDES + 1)
    if MEAN:
        value = 0.5 * (loss / mass) + 0.5 * (other_loss / other_mass)
        factor = tl.where(at < N, (1.0 / SIDES) / mass, (1.0 / SIDES) / other_mass)
    else:
        value = 0.5 * loss + 0.5 * other_loss
        factor = 1.0 / SIDES
    tl.store(out_ptr + at, tl.load(weight_ptr + at, mask=inside, other=0.0) * factor + poison, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(value_ptr, value + poison)


@triton.jit(do_not_specialize=ANY)
def scaled(total_ptr, out_ptr, scale_ptr, times_ptr, n, D, total_stride, out_stride, TIMES: tl.constexpr,
           ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """out = total · scale · times, in its own type."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    factor = tl.load(scale_ptr)
    if TIMES:
        factor *= tl.load(times_ptr)
    row = rows.to(tl.int64)[:, None]
    for step in range(0, D, BLOCK):
        cols = step + tl.arange(0, BLOCK)
        inside = (rows < n)[:, None] & (cols < D)[None, :]
        total = tl.load(total_ptr + row * total_stride + cols[None, :], mask=inside, other=0.0)
        scaled = (total * factor).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * out_stride + cols[None, :], scaled, mask=inside)
