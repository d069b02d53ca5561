"""Device code of positives by label, in the order of labels (`order.py`), where a row's are neighbours.

Launched by `sorting.py`, beside the tile kernels, which leave the positives out:

    label_totals       the positives' part of each row's statistics
    label_gradients    their gradients, written into the strip of a super-tile

A row tile meets its positives in few tiles, so that these kernels compute a small part of the products again.
"""

import triton
import triton.language as tl

from contrastile.tiles.triton.kernels.arithmetic import (
    ANY,
    CAREFUL,
    INVERSE,
    LN2,
    LOG2E,
    POSITIVE_FACTOR,
    POSITIVE_TOP,
    SHARE,
    SHIFT,
    STATE_TOP,
    UNIT,
    count_along,
    exponent_constants,
    exponents,
    finite,
    load_positive_state,
    load_stats,
    log1p,
    merge_exponentials,
    quarter,
    shift_as_logarithm,
    store_stats,
)
from contrastile.tiles.triton.kernels.backward import probability_factor, softmax_positive
from contrastile.tiles.triton.kernels.forward import products
from contrastile.tiles.triton.kernels.masks import FIRST, STOP, row_spans


@triton.jit
def _tile_range(spans_ptr, stride, start, i, N, M, BM: tl.constexpr, BN: tl.constexpr):
    """The first tile of columns in which a row tile has positives, and the first behind them."""
    first = tl.load(spans_ptr + FIRST * stride + i * BM) - start
    stop = tl.load(spans_ptr + STOP * stride + tl.minimum((i + 1) * BM, N) - 1) - start
    return tl.maximum(first, 0) // BN, tl.cdiv(tl.minimum(stop, M), BN)


@triton.jit
def _is_left(spans_ptr, stride, start, i, N, M, small, BM: tl.constexpr, TALL: tl.constexpr, LONG: tl.constexpr):
    """True if another launch has the positives of this row tile: the tall tiles have those of more than LONG columns.

    small: the smaller tiles have those of all rows.
    """
    if LONG == 0:
        left = i < 0
    else:
        at = i * BM // TALL * TALL
        first = tl.load(spans_ptr + FIRST * stride + at) - start
        stop = tl.load(spans_ptr + STOP * stride + tl.minimum(at + TALL, N) - 1) - start
        left = ((tl.minimum(stop, M) - tl.maximum(first, 0) > LONG) & (small == 0)) != (BM == TALL)
    return left


@triton.jit
def _is_full(spans_ptr, stride, start, i, j, N, M, itself, BM: tl.constexpr, BN: tl.constexpr, SELF: tl.constexpr):
    """True if all pairs of a tile are positives: rows in the order of labels have rising columns."""
    first = tl.load(spans_ptr + FIRST * stride + tl.minimum((i + 1) * BM, N) - 1) - start
    stop = tl.load(spans_ptr + STOP * stride + i * BM) - start
    full = (first <= j * BN) & (stop >= (j + 1) * BN) & ((i + 1) * BM <= N) & ((j + 1) * BN <= M)
    if SELF:
        full = full & (tl.max(((itself >= j * BN) & (itself < (j + 1) * BN)).to(tl.int32)) == 0)
    return full


@triton.jit
def _positives(cols, spans, N, M, rows, SELF: tl.constexpr):
    """Mask of the positives by label."""
    first, stop, itself = spans
    positive = (cols[None, :] >= first[:, None]) & (cols[None, :] < stop[:, None])
    positive = positive & (rows < N)[:, None] & (cols < M)[None, :]
    if SELF:
        positive = positive & (cols[None, :] != itself[:, None])
    return positive


@triton.jit
def _softplus(t):
    """log(1 + 2^−t): the loss of positives."""
    return log1p(tl.math.exp2(tl.abs(t) * -1.0)) + tl.maximum(-t, 0.0) * LN2


@triton.jit
def _weights(row_numbers_ptr, col_numbers_ptr, rows, cols, N, M):
    """The weight of each pair as a positive by label: a number of the row and one of the column."""
    of_rows = tl.load(row_numbers_ptr + rows, mask=rows < N, other=0.0)
    of_cols = tl.load(col_numbers_ptr + cols, mask=cols < M, other=0.0)
    return of_rows[:, None] + of_cols[None, :]


@triton.jit(do_not_specialize=ANY)
def label_totals(q_ptr, k_ptr, constants_ptr, stats_ptr, stats_stride, part_ptr, spans_ptr, spans_stride, spans_start,
                 row_numbers_ptr, col_numbers_ptr, row_first, q_stride, k_stride, N, M, D, BM: tl.constexpr,
                 BN: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PRODUCTS: tl.constexpr,
                 SELF: tl.constexpr, SOFTPLUS: tl.constexpr, WEIGHED: tl.constexpr, TALL: tl.constexpr,
                 LONG: tl.constexpr):  # fmt: skip
    """Add the positives of a super-tile to the statistics of its rows; row_first: its columns are the first.

    SOFTPLUS adds Σ weight · log(1 + exp(−x)).

    Several programs share the columns of a row tile: all but the first write statistics of their own into `part`
    [programs − 1, 4, N], those of no pair for rows of another launch.
    """
    i = tl.program_id(0)
    share = tl.program_id(1)
    left = _is_left(spans_ptr, spans_stride, spans_start, i, N, M, i < 0, BM, TALL, LONG)
    if left & (share == 0):
        return
    rows = i * BM + tl.arange(0, BM)
    own = row_spans(spans_ptr, spans_stride, spans_start, rows, N)
    start, end = _tile_range(spans_ptr, spans_stride, spans_start, i, N, M, BM, BN)
    end = tl.where(left, start, end)
    constants = exponent_constants(constants_ptr, POSITIVE_FACTOR)
    total = tl.zeros((BM,), tl.float32)
    logit_sum, count = total, total
    top = total - float("inf")
    for j in range(start + share, end, tl.num_programs(1)):
        acc = products(q_ptr, k_ptr, q_stride, k_stride, i, j, N, M, D, BM, BN, BK, LEFT, RIGHT, PRODUCTS, False)
        cols = j * BN + tl.arange(0, BN)
        positive = _positives(cols, own, N, M, rows, SELF)
        t = exponents(acc, constants, SOFTPLUS, PRODUCTS)
        if SOFTPLUS:
            terms = _softplus(t)
            if WEIGHED:
                terms *= _weights(row_numbers_ptr, col_numbers_ptr, rows, cols, N, M)
            total += tl.sum(tl.where(positive, terms, 0.0), 1)
        else:
            hidden = tl.where(positive, t, -float("inf"))
            # a whole number, so that powers of two change no digit
            higher = tl.maximum(top, tl.floor(tl.max(hidden, 1)))
            safe = finite(higher)
            total = total * tl.math.exp2(top - safe) + tl.sum(tl.math.exp2(hidden - safe[:, None]), 1)
            logit_sum += count * (finite(top) - safe) + tl.sum(tl.where(positive, t - safe[:, None], 0.0), 1)
            count += count_along(t, positive, 1)
            top = higher
    if SOFTPLUS:
        out = stats_ptr + rows
        tl.store(out, tl.load(out, mask=rows < N, other=0.0) + total, mask=rows < N)
    else:
        natural, error = shift_as_logarithm(tl.load(constants_ptr + SHIFT) + finite(top))
        top = tl.where(top == -float("inf"), top, natural)
        total = tl.fma(total, error, total)
        logit_sum = logit_sum * LN2 + count * error
        own_at = part_ptr + (share - 1) * 4 * N
        out = tl.where(share == 0, stats_ptr + POSITIVE_TOP * stats_stride, own_at) + rows
        stats_stride = tl.where(share == 0, stats_stride, N)
        if (row_first == 0) & (share == 0):
            before, total_before, logits, count_before = load_stats(out, stats_stride, rows < N)
            higher, total = merge_exponentials(before, total_before, top, total)
            safe = finite(higher)
            logit_sum += logits + count_before * (finite(before) - safe) + count * (finite(top) - safe)
            count += count_before
            top = higher
        store_stats(top, total, logit_sum, count, out, stats_stride, rows < N, True)


@triton.jit
def _load_direction(state_ptr, stride, coefficient_ptr, at, inside, shift, smoothing, SMOOTH: tl.constexpr):
    """Values of rows, or of columns, for `_direction`: the first two are the top as an exponent t.

    A single value would be rounded, and move all gradients of the row.
    """
    top, inverse, missing, target = load_positive_state(state_ptr, stride, at, inside)
    share = tl.zeros_like(top)
    if SMOOTH:
        share = tl.load(state_ptr + SHARE * stride + at, mask=inside, other=0.0) * smoothing
    coefficient = tl.load(coefficient_ptr + at, mask=inside, other=0.0)
    exact = top.to(tl.float64) * LOG2E - shift
    power = exact.to(tl.float32)
    rest = (exact - power.to(tl.float64)).to(tl.float32)
    return power, rest, inverse, missing, target, share, coefficient


@triton.jit
def _direction(t, numbers, smoothing, axis: tl.constexpr, INSIDE: tl.constexpr):
    """One direction's gradient of the positives with exponents t: losses/softmax.py."""
    power, rest, inverse, missing, target, share, coefficient = numbers
    among = tl.math.exp2((t - tl.expand_dims(power, axis)) - tl.expand_dims(rest, axis))
    among *= tl.expand_dims(inverse, axis)
    value = softmax_positive(among, tl.expand_dims(target, axis), tl.expand_dims(missing, axis), smoothing, INSIDE)
    return (value - tl.expand_dims(share, axis)) * tl.expand_dims(coefficient, axis)


@triton.jit(do_not_specialize=ANY)
def label_gradients(q_ptr, k_ptr, strip_ptr, constants_ptr, row_state_ptr, row_coefficient_ptr, col_state_ptr,
                    col_coefficient_ptr, row_state_stride, col_state_stride, stats_ptr, label_sums_ptr, spans_ptr,
                    spans_stride, spans_start, row_numbers_ptr, col_numbers_ptr, row_vectors_ptr, col_vectors_ptr,
                    vectors_step, sums_step, q_stride, k_stride, N, M, D, part_stride, out_stride, smoothing,
                    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
                    PRODUCTS: tl.constexpr, SELF: tl.constexpr, COLUMNS: tl.constexpr, SOFTPLUS: tl.constexpr,
                    WEIGHED: tl.constexpr, SMOOTH: tl.constexpr, INSIDE: tl.constexpr, LOSS: tl.constexpr,
                    PARTS: tl.constexpr, FACTORED: tl.constexpr, TALL: tl.constexpr, LONG: tl.constexpr):  # fmt: skip
    """Write the gradients of a super-tile's positives into the strip [PARTS, N, M], over the zeros of `gradient`.

    Adds each row's Σ g · ⟨q, k⟩, or Σ g with SOFTPLUS, to `label_sums`, and with LOSS their loss to the statistics.
    FACTORED: the strip has exponentials of one direction, and positives have the gradient divided by the factor a of
    their row (`exponentials.py`). A tile's gradient is computed in quarters, so that programs share a multiprocessor.

    Tiles of TALL rows, whose positives are many, have one exponential for both directions: 2^t · (a_i + b_j) −
    (c_i + d_j), with the vectors of `direction_weights`. Where the careful flag is set, smaller ones have their rows.

    Several programs share the columns of a row tile, with sums of their own.
    """
    i = tl.program_id(0)
    JOINT: tl.constexpr = BM == TALL and not SOFTPLUS
    small = (tl.load(constants_ptr + CAREFUL) != 0) & (SOFTPLUS == 0)
    if _is_left(spans_ptr, spans_stride, spans_start, i, N, M, small, BM, TALL, LONG):
        return
    rows = i * BM + tl.arange(0, BM)
    own = row_spans(spans_ptr, spans_stride, spans_start, rows, N)
    start, end = _tile_range(spans_ptr, spans_stride, spans_start, i, N, M, BM, BN)
    constants = exponent_constants(constants_ptr, POSITIVE_FACTOR)
    unit = tl.load(constants_ptr + UNIT)
    shift = tl.load(constants_ptr + SHIFT).to(tl.float64)
    sums = tl.zeros((BM,), tl.float32)
    loss = sums
    coefficient = tl.load(row_coefficient_ptr + rows, mask=rows < N, other=0.0)
    if JOINT:
        a = tl.load(row_vectors_ptr + rows, mask=rows < N, other=0.0)[:, None]
        c = tl.load(row_vectors_ptr + vectors_step + rows, mask=rows < N, other=0.0)[:, None]
    elif not SOFTPLUS:
        of_rows = _load_direction(row_state_ptr, row_state_stride, row_coefficient_ptr, rows, rows < N, shift,
                                  smoothing, SMOOTH)  # fmt: skip
    if FACTORED:
        # two factors: their product may exceed float32
        fast = tl.load(constants_ptr + CAREFUL) == 0
        by_coefficient = 1.0 / tl.where(fast, tl.where(coefficient == 0, 1.0, coefficient), 1.0)
        top = tl.load(row_state_ptr + STATE_TOP * row_state_stride + rows, mask=rows < N, other=0.0)
        inverse = tl.load(row_state_ptr + INVERSE * row_state_stride + rows, mask=rows < N, other=1.0)
        by_factor = 1.0 / tl.where(fast, probability_factor(top, inverse, shift), 1.0)
    WIDTH: tl.constexpr = BN // 4
    for j in range(start + tl.program_id(1), end, tl.num_programs(1)):
        acc = products(q_ptr, k_ptr, q_stride, k_stride, i, j, N, M, D, BM, BN, BK, LEFT, RIGHT, PRODUCTS, False)
        if BM == TALL:
            full = _is_full(spans_ptr, spans_stride, spans_start, i, j, N, M, own[2], BM, BN, SELF)
        for at in tl.static_range(4):
            part = quarter(acc, at, BM, BN)
            cols = j * BN + at * WIDTH + tl.arange(0, WIDTH)
            positive = _positives(cols, own, N, M, rows, SELF)
            t = exponents(part, constants, SOFTPLUS, PRODUCTS)
            if SOFTPLUS:
                g = coefficient[:, None] * (-1.0 / (1.0 + tl.math.exp2(t)))
                terms = _softplus(t)
                if WEIGHED:
                    weights = _weights(row_numbers_ptr, col_numbers_ptr, rows, cols, N, M)
                    g *= weights
                    terms *= weights
                if LOSS:
                    loss += tl.sum(tl.where(positive, terms, 0.0), 1)
            elif JOINT:
                slope, taken = a, c
                if COLUMNS:
                    slope += tl.load(col_vectors_ptr + cols, mask=cols < M, other=0.0)[None, :]
                    taken += tl.load(col_vectors_ptr + vectors_step + cols, mask=cols < M, other=0.0)[None, :]
                g = tl.math.exp2(t) * slope - taken
            else:
                g = _direction(t, of_rows, smoothing, 1, INSIDE)
                if COLUMNS:
                    of_cols = _load_direction(col_state_ptr, col_state_stride, col_coefficient_ptr, cols, cols < M,
                                              shift, smoothing, SMOOTH)  # fmt: skip
                    g += _direction(t, of_cols, smoothing, 0, INSIDE)
            # the vectors have the unit
            g = tl.where(positive, g if JOINT else g * unit, 0.0)
            sums += tl.sum(g if SOFTPLUS else g * part, 1)
            if FACTORED:
                g = (g * by_coefficient[:, None]) * by_factor[:, None]
            for piece_at in tl.static_range(PARTS):
                piece = g.to(strip_ptr.dtype.element_ty)
                row = (piece_at * part_stride + rows).to(tl.int64)
                strip_at = strip_ptr + row[:, None] * out_stride + cols[None, :]
                if BM == TALL:
                    if full:
                        # 16 bytes at a time
                        tl.store(strip_at, piece)
                    else:
                        tl.store(strip_at, piece, mask=positive)
                else:
                    tl.store(strip_at, piece, mask=positive)
                g = g - piece.to(tl.float32)
    sums_at = label_sums_ptr + tl.program_id(1) * sums_step + rows
    sums += tl.load(sums_at, mask=rows < N, other=0.0)
    if LOSS:
        loss += tl.load(stats_ptr + rows, mask=rows < N, other=0.0)
    # all warps have read before one of them writes
    tl.debug_barrier()
    tl.store(sums_at, sums, mask=rows < N)
    if LOSS:
        tl.store(stats_ptr + rows, loss, mask=rows < N)
