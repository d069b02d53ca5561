"""Device code of the end of a call: from statistics to the loss, and to ∂loss/∂(each row's loss).

Launched by `launch.py` after the kernels of `reductions.py`:

    mises_fisher_sums       sums over all rows that the weights of positives are made of (losses/decoupled.py)
    finish, coefficients    each row's loss and state; the loss and the coefficients

With `scaled` of `backward.py` they replace some eighty small operations, or twice as many with a teacher or weights of
positives, for which the host needs longer than the device for a small batch.
"""

import triton
import triton.language as tl

from contrastile.tiles.triton.kernels.arithmetic import (
    ANY,
    LOGIT_COUNT,
    LOGIT_SUM,
    NONFINITE,
    POSITIVE_TOP,
    STATE_TEACHER_TOP,
    TEACHER,
    TEACHER_INVERSE,
    TEACHER_TOP,
    TEACHERS,
    TOP,
    TOTAL,
    finite,
    load_stats,
    log1p,
    merge_exponentials,
    one_side,
    store_rows,
)

# rows that `finish` writes before the state
LOSS, WEIGHT, STATE = (tl.constexpr(row) for row in range(3))


@triton.jit
def _mises_fisher(positive_top, mean, counts, factor_ptr, highest_ptr):
    """exp(s / σ − the highest) of the positives' mean similarity s, 0 where the row has no loss, in float64."""
    similar = (finite(positive_top) + mean).to(tl.float64) * tl.load(factor_ptr)
    return tl.where(counts, tl.exp(similar - tl.load(highest_ptr)), 0.0)


@triton.jit
def _weights_of_positives(positive_top, mean, share, counts, factor_ptr, highest_ptr, totals_ptr,
                          MISES_FISHER: tl.constexpr):  # fmt: skip
    """The positives' share of the targets with their weight, 2 − exp(s / σ) / its mean, and the weight."""
    weight = share * 0.0 + 1.0
    if MISES_FISHER:
        whole = tl.load(totals_ptr)
        number = tl.load(totals_ptr + 1)
        # as `losses.base.divisor`
        whole = tl.where((whole == 0) & (number == 0), 1.0, whole)
        similar = _mises_fisher(positive_top, mean, counts, factor_ptr, highest_ptr)
        weight = (2.0 - similar * (number / whole)).to(tl.float32)
    return share * weight, weight


@triton.jit(do_not_specialize=ANY)
def mises_fisher_sums(row_stats_ptr, row_stats_stride, N, col_stats_ptr, col_stats_stride, M, factor_ptr, highest_ptr,
                      out_ptr, blocks, BLOCK: tl.constexpr):  # fmt: skip
    """Write each side's and block's Σ exp(s / σ) and number of rows that have a loss, [2 · S, blocks] in float64.

    factor: 1 / (scale · σ). highest: the largest s / σ of each side, subtracted from all exponents
    against overflow. program_id 1 = 0 computes rows, 1 columns.
    """
    side = tl.program_id(1)
    stats_ptr, stride, n = one_side(
        side == 0, (row_stats_ptr, row_stats_stride, N), (col_stats_ptr, col_stats_stride, M))  # fmt: skip
    stride = stride.to(tl.int64)
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(stats_ptr + TOTAL * stride + at, mask=inside, other=1.0)
    positive_top, _, positive_sum, count = load_stats(stats_ptr + POSITIVE_TOP * stride + at, stride, inside, 0.0)
    counts = inside & (count > 0) & (total != 0)
    mean = positive_sum / tl.maximum(count, 1.0)
    kernels = _mises_fisher(positive_top, mean, counts, factor_ptr, highest_ptr + side)
    tl.store(out_ptr + 2 * side * blocks + block, tl.sum(kernels))
    tl.store(out_ptr + (2 * side + 1) * blocks + block, tl.sum(counts.to(tl.float64)))


@triton.jit(do_not_specialize=ANY)
def finish(row_stats_ptr, row_stats_stride, N, col_stats_ptr, col_stats_stride, M, weights_ptr, constants_ptr,
           factor_ptr, highest_ptr, kernels_ptr, out_ptr, sums_ptr, blocks, smoothing, WEIGHTS: tl.constexpr,
           DECOUPLED: tl.constexpr, MISES_FISHER: tl.constexpr, SMOOTH: tl.constexpr, INSIDE: tl.constexpr,
           GUIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write loss, weight and state of rows and columns, [2 + state, N + M], and S sides' sums, [2 · S + 2, blocks].

    The sums of each block: Σ weight · loss and Σ weight of each side, the number of rows, and NONFINITE. program_id 1 =
    0 computes rows, 1 columns. DECOUPLED leaves the positives out of the denominator, MISES_FISHER weighs them by the
    totals of `mises_fisher_sums` (losses/decoupled.py); INSIDE: see losses/softmax.py.
    """
    side = tl.program_id(1)
    sides = tl.num_programs(1)
    stats_ptr, stride, n, begin = one_side(
        side == 0, (row_stats_ptr, row_stats_stride, N, 0), (col_stats_ptr, col_stats_stride, M, N))  # fmt: skip
    stride = stride.to(tl.int64)
    length = (N + M).to(tl.int64)
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    top = tl.load(stats_ptr + TOP * stride + at, mask=inside, other=0.0)
    total = tl.load(stats_ptr + TOTAL * stride + at, mask=inside, other=1.0)
    positives_at = stats_ptr + POSITIVE_TOP * stride + at
    positive_top, positive_total, positive_sum, count = load_stats(positives_at, stride, inside, 0.0)
    positive_share = 1.0 / tl.maximum(count, 1.0)
    mean = positive_sum * positive_share
    share = tl.zeros((BLOCK,), tl.float32)
    # a row without a positive has no loss; elsewhere NaN stays NaN
    counts = inside & (count > 0)
    if DECOUPLED:
        counts = counts & (total != 0)
        denominator_top = top
        denominator = total
        positive_share, among = _weights_of_positives(
            positive_top, mean, positive_share, counts, factor_ptr, highest_ptr + side, kernels_ptr + 2 * side,
            MISES_FISHER)  # fmt: skip
        loss = (finite(top) - finite(positive_top) * among) + (tl.log(tl.where(total == 0, 1.0, total)) - mean * among)
        positive_inverse = tl.zeros((BLOCK,), tl.float32)
        missing = positive_inverse + 1.0
    else:
        denominator_top, denominator = merge_exponentials(top, total, positive_top, positive_total)
        # all exponentials of a row's positives may be among those of its other pairs
        apart = counts & (positive_total != 0)
        # the difference of maxima first, which is exact for similar logits
        of_positives = tl.log(tl.where(apart, positive_total, 1.0))
        gap = (top - finite(positive_top)) + (tl.log(total) - of_positives)
        # 0 for one positive, without the rounding errors of its two forms
        among = tl.where((count == 1) & apart, 0.0, of_positives - mean)
        if INSIDE:
            among = tl.log(tl.maximum(count, 1.0))
        loss = tl.where(apart, log1p(tl.exp(-tl.abs(gap))) + tl.maximum(gap, 0.0), gap) + among
        if SMOOTH:
            others = tl.load(stats_ptr + LOGIT_COUNT * stride + at, mask=inside, other=0.0)
            share = 1.0 / tl.maximum(count + others, 1.0)
            pull = mean - tl.load(stats_ptr + LOGIT_SUM * stride + at, mask=inside, other=0.0) / tl.maximum(others, 1.0)
            loss += smoothing * (((positive_top - finite(top)) + pull) * (others * share))
        positive_inverse = 1.0 / tl.where(apart, positive_total, 1.0)
        missing = tl.where(apart, 1.0 / (1.0 + tl.exp(-gap)), 1.0)
    # without any key, 0 instead of 0 · ∞
    inverse = 1.0 / tl.where(denominator == 0, 1.0, denominator)
    out = out_ptr + begin + at
    state = out + STATE * length
    if GUIDE == TEACHER:
        teacher_at = stats_ptr + TEACHER_TOP * stride + at
        teacher_top, teacher_total, teacher_gap, x_top = load_stats(teacher_at, stride, inside, 0.0)
        teacher_inverse = 1.0 / tl.where(teacher_total == 0, 1.0, teacher_total)
        # the teacher's mean of t − x, as a difference of logarithms of probabilities: losses/distilled.py
        apart = teacher_gap * teacher_inverse
        above = (finite(denominator_top) - finite(x_top)) - tl.log(inverse)
        loss = (1.0 - smoothing) * loss + smoothing * (above + (apart + tl.log(teacher_inverse)))
        tl.store(state + STATE_TEACHER_TOP * length, finite(teacher_top), mask=inside)
        tl.store(state + TEACHER_INVERSE * length, teacher_inverse, mask=inside)
    loss = tl.where(counts, loss, 0.0)
    weight = counts.to(tl.float32)
    if WEIGHTS:
        weight *= tl.load(weights_ptr + at, mask=inside, other=0.0)
    # as `SoftmaxState`
    numbers = (finite(denominator_top), inverse, finite(positive_top), positive_inverse, missing, positive_share, share)
    store_rows(numbers, state, length, inside)
    tl.store(out + LOSS * length, loss, mask=inside)
    tl.store(out + WEIGHT * length, weight, mask=inside)
    tl.store(sums_ptr + side * blocks + block, tl.sum(loss * weight))
    tl.store(sums_ptr + (sides + side) * blocks + block, tl.sum(weight))
    if side == 0:
        first_block = tl.where(block == 0, 1.0, 0.0)
        nonfinite = tl.load(constants_ptr + NONFINITE)
        if GUIDE == TEACHER:
            nonfinite += tl.load(constants_ptr + TEACHERS + NONFINITE)
        tl.store(sums_ptr + 2 * sides * blocks + block, nonfinite + first_block * n)
        tl.store(sums_ptr + (2 * sides + 1) * blocks + block, nonfinite)


@triton.jit(do_not_specialize=ANY)
def coefficients(rows_ptr, totals_ptr, out_ptr, value_ptr, N, n, MEAN: tl.constexpr, EACH: tl.constexpr,
                 SIDES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The loss, and ∂loss/∂(each row's loss) of the N rows and then the columns, from rows and totals of `finish`.

    With MEAN and EACH, N losses instead, whose mean over all ranks' rows is the loss (`tiles.base.reduced`).
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    weight_ptr = rows_ptr + n.to(tl.int64) + at
    loss = tl.load(totals_ptr)
    mass = tl.load(totals_ptr + SIDES)
    other_loss = loss
    other_mass = mass
    if SIDES == 2:
        other_loss = tl.load(totals_ptr + 1)
        other_mass = tl.load(totals_ptr + 3)
    nonfinite = tl.load(totals_ptr + 2 * SIDES + 1)
    if MEAN:
        # a mean over nothing is 0, as `losses.base.divisor` has it
        mass = tl.where((mass == 0.0) & (loss == 0.0), 1.0, mass)
        other_mass = tl.where((other_mass == 0.0) & (other_loss == 0.0), 1.0, other_mass)
        value = 0.5 * (loss / mass) + 0.5 * (other_loss / other_mass)
        factor = tl.where(at < N, (1.0 / SIDES) / mass, (1.0 / SIDES) / other_mass)
    else:
        value = 0.5 * loss + 0.5 * other_loss
        factor = 1.0 / SIDES
    weighed = tl.load(weight_ptr, mask=inside, other=0.0) * factor
    stored = at == 0
    if EACH:
        stored = at < N
        value = weighed * tl.load(rows_ptr + at, mask=stored, other=0.0)
        if SIDES == 2:
            other_weighed = tl.load(weight_ptr + N, mask=stored, other=0.0) * ((1.0 / SIDES) / other_mass)
            value += other_weighed * tl.load(rows_ptr + N + at, mask=stored, other=0.0)
        # ranks' rows together; the caller's mean divides by this rank's
        value *= tl.load(totals_ptr + 2 * SIDES)
        weighed *= N
    tl.store(value_ptr + at, value + nonfinite, mask=stored)
    tl.store(out_ptr + at, weighed + nonfinite, mask=inside)


@triton.jit
def sum_of(x_ptr, n, BLOCK: tl.constexpr):
    """The sum of n numbers in float64."""
    total = tl.zeros((BLOCK,), tl.float64)
    for step in range(0, n, BLOCK):
        at = step + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float64)
    return tl.sum(total)


@triton.jit(do_not_specialize=ANY)
def add_up(x_ptr, n, x_lost, y_ptr, m, y_lost, out_ptr, BLOCK: tl.constexpr):
    """Write 0, and Σ x · (1 + x_lost) + Σ y · (1 + y_lost), in the dtype of out."""
    x = sum_of(x_ptr, n, BLOCK)
    y = sum_of(y_ptr, m, BLOCK)
    tl.store(out_ptr, 0.0)
    # added apart: 1 + lost would be rounded to float32
    tl.store(out_ptr + 1, (x + y) + (x * x_lost + y * y_lost))
