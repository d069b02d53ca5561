# mypy: ignore-errors
# device code: Triton compiles these functions from their source, their arguments have no Python types
"""Device code of positives by label: a block in the order of its labels, in which a row's positives are neighbours.

Launched by `sorting.py`, beside the tile kernels, which leave the positives out:

    sort_chunks        labels of each chunk in rising order
    order_labels       labels in rising order
    count_equal        the number of equal labels on the other side
    spans              of each row, the first column of its label and the first behind it
    label_totals       the positives' part of each row's statistics
    label_gradients    their gradients, written into the strip of a super-tile
    move_ordered       numbers of rows in the order of labels, and back
    add_ordered        sums of gradients in the order of the caller

A row tile meets its positives in few tiles, so that these kernels compute a small part of the products again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.tiles.triton.arithmetic import (
    ANY,
    CAREFUL,
    INVERSE,
    LN2,
    LOG2E,
    MISSING,
    POSITIVE_INVERSE,
    POSITIVE_SHARE,
    POSITIVE_TOP,
    SHARE,
    SHIFT,
    STATE_POSITIVE_TOP,
    STATE_TOP,
    UNIT,
    count_along,
    exponent_constants,
    exponents,
    finite,
    log1p,
    merge_exponentials,
    quarter,
    shift_as_logarithm,
    store_stats,
)
from contrastile.tiles.triton.backward import probability_factor, softmax_positive
from contrastile.tiles.triton.forward import products
from contrastile.tiles.triton.masks import FIRST, HIGHEST_COLUMN, ITSELF, LOWEST_COLUMN, STOP, row_spans


@triton.jit
def _position(others_ptr, label, low, high, after, STEPS: tl.constexpr):
    """Position from low to high of each label among others in rising order: behind equal ones where `after`."""
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        open_ = low < high
        other = tl.load(others_ptr + middle, mask=open_, other=0)
        before = (other < label) | ((other == label) & after)
        low = tl.where(open_ & before, middle + 1, low)
        high = tl.where(open_ & (before == 0), middle, high)
    return low


@triton.jit
def _chunks(start, n, SLOTS: tl.constexpr, CHUNK: tl.constexpr):
    """Numbers of the chunks from `start` on, and the first and the last position of each, [1, SLOTS]."""
    chunk = (start + tl.arange(0, SLOTS))[None, :]
    return chunk, tl.minimum(chunk * CHUNK, n), tl.minimum((chunk + 1) * CHUNK, n)


@triton.jit(do_not_specialize=ANY)
def sort_chunks(row_labels_ptr, row_chunks_ptr, row_within_ptr, N, col_labels_ptr, col_chunks_ptr, col_within_ptr, M,
                CHUNK: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Sort the labels of each chunk, equal ones in their order, by counting those before each.

    Writes them in rising order, and the place of each within its chunk. program_id 1 = 0 sorts those of the rows, 1
    those of the columns.
    """
    of_rows = tl.program_id(1) == 0
    labels_ptr = tl.where(of_rows, row_labels_ptr, col_labels_ptr)
    n = tl.where(of_rows, N, M)
    first = tl.program_id(0) * CHUNK
    rows = first + tl.arange(0, CHUNK)
    label = tl.load(labels_ptr + rows, mask=rows < n, other=0)
    place = tl.zeros((CHUNK,), tl.int32)
    for start in range(first, first + CHUNK, BLOCK):
        at = start + tl.arange(0, BLOCK)
        other = tl.load(labels_ptr + at, mask=at < n, other=0)[None, :]
        less = (other < label[:, None]) | ((other == label[:, None]) & (at[None, :] < rows[:, None]))
        place += tl.sum((less & (at < n)[None, :]).to(tl.int32), 1)
    tl.store(tl.where(of_rows, row_chunks_ptr, col_chunks_ptr) + first + place, label, mask=rows < n)
    tl.store(tl.where(of_rows, row_within_ptr, col_within_ptr) + rows, place.to(tl.int64), mask=rows < n)


@triton.jit(do_not_specialize=ANY)
def order_labels(row_labels_ptr, row_chunks_ptr, row_within_ptr, row_sorted_ptr, row_order_ptr, row_places_ptr, N,
                 col_labels_ptr, col_chunks_ptr, col_within_ptr, col_sorted_ptr, col_order_ptr, col_places_ptr, M,
                 ROWS: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr):  # fmt: skip
    """Sort the labels of each side, equal ones in their order, by their positions in all sorted chunks.

    Writes the labels in rising order, the position of each of these, and its inverse: the place of each position.
    program_id 1 = 0 sorts those of the rows, 1 those of the columns.
    """
    of_rows = tl.program_id(1) == 0
    n = tl.where(of_rows, N, M)
    chunks_ptr = tl.where(of_rows, row_chunks_ptr, col_chunks_ptr)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS < n:
        label = tl.load(tl.where(of_rows, row_labels_ptr, col_labels_ptr) + rows, mask=rows < n, other=0)
        place = tl.load(tl.where(of_rows, row_within_ptr, col_within_ptr) + rows, mask=rows < n, other=0).to(tl.int32)
        own = (rows // CHUNK)[:, None]
        for start in range(0, tl.cdiv(n, CHUNK), SLOTS):
            chunk, first, stop = _chunks(start, n, SLOTS, CHUNK)
            # nothing of their own chunk
            low = first + own * 0
            high = tl.where(chunk == own, low, stop)
            place += tl.sum(_position(chunks_ptr, label[:, None], low, high, chunk < own, STEPS) - low, 1)
        tl.store(tl.where(of_rows, row_sorted_ptr, col_sorted_ptr) + place, label, mask=rows < n)
        tl.store(tl.where(of_rows, row_order_ptr, col_order_ptr) + place, rows.to(tl.int64), mask=rows < n)
        tl.store(tl.where(of_rows, row_places_ptr, col_places_ptr) + rows, place.to(tl.int64), mask=rows < n)


@triton.jit(do_not_specialize=ANY)
def count_equal(labels_ptr, chunks_ptr, out_ptr, n, m, ROWS: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
                STEPS: tl.constexpr):  # fmt: skip
    """Write the number of the m others, in sorted chunks, that equal each of the n labels."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    label = tl.load(labels_ptr + rows, mask=rows < n, other=0)[:, None]
    count = tl.zeros((ROWS,), tl.int32)
    for start in range(0, tl.cdiv(m, CHUNK), SLOTS):
        _, first, stop = _chunks(start, m, SLOTS, CHUNK)
        low = first + rows[:, None] * 0
        high = stop + rows[:, None] * 0
        first = _position(chunks_ptr, label, low, high, high < 0, STEPS)
        count += tl.sum(_position(chunks_ptr, label, first, high, high >= 0, STEPS) - first, 1)
    tl.store(out_ptr + rows, count, mask=rows < n)


@triton.jit(do_not_specialize=ANY)
def spans(row_labels_ptr, row_order_ptr, row_places_ptr, row_out_ptr, N, col_labels_ptr, col_order_ptr, col_places_ptr,
          col_out_ptr, M, self_diagonal, SELF: tl.constexpr, BM: tl.constexpr, STEPS: tl.constexpr):  # fmt: skip
    """Write [5, n] numbers of the rows, or of the columns, in the order of their labels, as `masks.py` counts them.

    labels: in rising order. order, places: see `order_labels`. SELF: row i and column i + self_diagonal of the caller
    are one example. 2 to the power of STEPS is greater than both numbers. program_id 1 = 0 computes rows, 1 columns.
    """
    of_rows = tl.program_id(1) == 0
    n = tl.where(of_rows, N, M)
    m = tl.where(of_rows, M, N)
    others_ptr = tl.where(of_rows, col_labels_ptr, row_labels_ptr)
    at = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = at < n
    label = tl.load(tl.where(of_rows, row_labels_ptr, col_labels_ptr) + at, mask=inside, other=0)
    first = _position(others_ptr, label, at * 0, at * 0 + m, at < 0, STEPS)
    stop = _position(others_ptr, label, first, at * 0 + m, at >= 0, STEPS)
    itself = first * 0 - 1
    lowest, highest = first, stop
    if SELF:
        column = tl.load(tl.where(of_rows, row_order_ptr, col_order_ptr) + at, mask=inside, other=0)
        column += tl.where(of_rows, self_diagonal, -self_diagonal)
        exists = inside & (column >= 0) & (column < m)
        places_ptr = tl.where(of_rows, col_places_ptr, row_places_ptr)
        itself = tl.load(places_ptr + column, mask=exists, other=-1).to(tl.int32)
        lowest = tl.where(inside, tl.minimum(first, tl.where(exists, itself, m)), m)
        highest = tl.where(inside, tl.maximum(stop, itself + 1), 0)
        lowest = first * 0 + tl.min(lowest)
        highest = first * 0 + tl.max(highest)
    out = tl.where(of_rows, row_out_ptr, col_out_ptr) + at
    tl.store(out + FIRST * n, first, mask=inside)
    tl.store(out + STOP * n, stop, mask=inside)
    tl.store(out + ITSELF * n, itself, mask=inside)
    tl.store(out + LOWEST_COLUMN * n, lowest, mask=inside)
    tl.store(out + HIGHEST_COLUMN * n, highest, mask=inside)


@triton.jit
def _tile_range(spans_ptr, stride, start, i, N, M, BM: tl.constexpr, BN: tl.constexpr):
    """The first tile of columns in which a row tile has positives, and the first behind them."""
    first = tl.load(spans_ptr + FIRST * stride + i * BM) - start
    stop = tl.load(spans_ptr + STOP * stride + tl.minimum((i + 1) * BM, N) - 1) - start
    return tl.maximum(first, 0) // BN, tl.cdiv(tl.minimum(stop, M), BN)


@triton.jit
def _is_left(spans_ptr, stride, start, i, N, M, BM: tl.constexpr, TALL: tl.constexpr, LONG: tl.constexpr):
    """True if another launch has the positives of this row tile: of more than LONG columns, tiles of TALL rows have."""
    if LONG == 0:
        left = i < 0
    else:
        at = i * BM // TALL * TALL
        first = tl.load(spans_ptr + FIRST * stride + at) - start
        stop = tl.load(spans_ptr + STOP * stride + tl.minimum(at + TALL, N) - 1) - start
        left = (tl.minimum(stop, M) - tl.maximum(first, 0) > LONG) != (BM == TALL)
    return left


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
def label_totals(q_ptr, k_ptr, constants_ptr, stats_ptr, stats_stride, spans_ptr, spans_stride, spans_start,
                 row_numbers_ptr, col_numbers_ptr, row_first, q_stride, k_stride, N, M, D, BM: tl.constexpr,
                 BN: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PRODUCTS: tl.constexpr,
                 UPCAST: tl.constexpr, SELF: tl.constexpr, SOFTPLUS: tl.constexpr, WEIGHED: tl.constexpr,
                 TALL: tl.constexpr, LONG: tl.constexpr):  # fmt: skip
    """Add the positives of a super-tile to the statistics of its rows; row_first: its columns are the first.

    SOFTPLUS adds Σ weight · log(1 + exp(−x)).
    """
    i = tl.program_id(0)
    if _is_left(spans_ptr, spans_stride, spans_start, i, N, M, BM, TALL, LONG):
        return
    rows = i * BM + tl.arange(0, BM)
    own = row_spans(spans_ptr, spans_stride, spans_start, rows, N)
    start, end = _tile_range(spans_ptr, spans_stride, spans_start, i, N, M, BM, BN)
    constants = exponent_constants(constants_ptr)
    total = tl.zeros((BM,), tl.float32)
    logit_sum, count = total, total
    top = total - float("inf")
    for j in range(start, end):
        acc = tl.zeros((BM, BN), tl.float32)
        acc = products(acc, q_ptr, k_ptr, q_stride, k_stride, i, j, N, M, D, BM, BN, BK, LEFT, RIGHT, PRODUCTS, False,
                       UPCAST)  # fmt: skip
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
    out = stats_ptr + rows
    if SOFTPLUS:
        tl.store(out, tl.load(out, mask=rows < N, other=0.0) + total, mask=rows < N)
    else:
        natural, error = shift_as_logarithm(tl.load(constants_ptr + SHIFT) + finite(top))
        top = tl.where(top == -float("inf"), top, natural)
        total = tl.fma(total, error, total)
        logit_sum = logit_sum * LN2 + count * error
        out += POSITIVE_TOP * stats_stride
        if row_first == 0:
            before = tl.load(out, mask=rows < N, other=-float("inf"))
            total_before = tl.load(out + stats_stride, mask=rows < N, other=0.0)
            logits = tl.load(out + 2 * stats_stride, mask=rows < N, other=0.0)
            count_before = tl.load(out + 3 * stats_stride, mask=rows < N, other=0.0)
            higher, total = merge_exponentials(before, total_before, top, total)
            safe = finite(higher)
            logit_sum += logits + count_before * (finite(before) - safe) + count * (finite(top) - safe)
            count += count_before
            top = higher
        store_stats(top, total, logit_sum, count, out, stats_stride, rows < N, True)


@triton.jit
def _load_direction(state_ptr, stride, coefficient_ptr, at, inside, shift, smoothing, SMOOTH: tl.constexpr):
    """Numbers of rows, or of columns, for `_direction`: the first two are the top as an exponent t.

    One number would be rounded, and move all gradients of the row.
    """
    top = tl.load(state_ptr + STATE_POSITIVE_TOP * stride + at, mask=inside, other=0.0)
    inverse = tl.load(state_ptr + POSITIVE_INVERSE * stride + at, mask=inside, other=0.0)
    missing = tl.load(state_ptr + MISSING * stride + at, mask=inside, other=0.0)
    target = tl.load(state_ptr + POSITIVE_SHARE * stride + at, mask=inside, other=0.0)
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
                    spans_stride, spans_start, row_numbers_ptr, col_numbers_ptr, q_stride, k_stride, N, M, D,
                    part_stride, out_stride, smoothing, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                    LEFT: tl.constexpr, RIGHT: tl.constexpr, PRODUCTS: tl.constexpr, UPCAST: tl.constexpr,
                    SELF: tl.constexpr, COLUMNS: tl.constexpr, SOFTPLUS: tl.constexpr, WEIGHED: tl.constexpr,
                    SMOOTH: tl.constexpr, INSIDE: tl.constexpr, LOSS: tl.constexpr, PARTS: tl.constexpr,
                    KEPT: tl.constexpr, TALL: tl.constexpr, LONG: tl.constexpr):  # fmt: skip
    """Write the gradients of a super-tile's positives into the strip [PARTS, N, M], over the zeros of `gradient`.

    Adds each row's Σ g · ⟨q, k⟩, or Σ g with SOFTPLUS, to `label_sums`, and with LOSS their loss to the statistics.
    KEPT: the strip has exponentials of one direction, and its positives the gradient over the factor a of their row
    (`kept.py`). A tile's gradient is computed in quarters, of which several programs' fit a multiprocessor.
    """
    i = tl.program_id(0)
    if _is_left(spans_ptr, spans_stride, spans_start, i, N, M, BM, TALL, LONG):
        return
    rows = i * BM + tl.arange(0, BM)
    own = row_spans(spans_ptr, spans_stride, spans_start, rows, N)
    start, end = _tile_range(spans_ptr, spans_stride, spans_start, i, N, M, BM, BN)
    constants = exponent_constants(constants_ptr)
    unit = tl.load(constants_ptr + UNIT)
    shift = tl.load(constants_ptr + SHIFT).to(tl.float64)
    sums = tl.zeros((BM,), tl.float32)
    loss = sums
    coefficient = tl.load(row_coefficient_ptr + rows, mask=rows < N, other=0.0)
    if not SOFTPLUS:
        of_rows = _load_direction(row_state_ptr, row_state_stride, row_coefficient_ptr, rows, rows < N, shift,
                                  smoothing, SMOOTH)  # fmt: skip
    if KEPT:
        # two factors: their product may exceed float32
        fast = tl.load(constants_ptr + CAREFUL) == 0
        by_coefficient = 1.0 / tl.where(fast, tl.where(coefficient == 0, 1.0, coefficient), 1.0)
        top = tl.load(row_state_ptr + STATE_TOP * row_state_stride + rows, mask=rows < N, other=0.0)
        inverse = tl.load(row_state_ptr + INVERSE * row_state_stride + rows, mask=rows < N, other=1.0)
        by_factor = 1.0 / tl.where(fast, probability_factor(top, inverse, shift), 1.0)
    WIDTH: tl.constexpr = BN // 4
    for j in range(start, end):
        acc = tl.zeros((BM, BN), tl.float32)
        acc = products(acc, q_ptr, k_ptr, q_stride, k_stride, i, j, N, M, D, BM, BN, BK, LEFT, RIGHT, PRODUCTS, False,
                       UPCAST)  # fmt: skip
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
            else:
                g = _direction(t, of_rows, smoothing, 1, INSIDE)
                if COLUMNS:
                    of_cols = _load_direction(col_state_ptr, col_state_stride, col_coefficient_ptr, cols, cols < M,
                                              shift, smoothing, SMOOTH)  # fmt: skip
                    g += _direction(t, of_cols, smoothing, 0, INSIDE)
            g = tl.where(positive, g * unit, 0.0)
            sums += tl.sum(g if SOFTPLUS else g * part, 1)
            if KEPT:
                g = (g * by_coefficient[:, None]) * by_factor[:, None]
            for piece_at in tl.static_range(PARTS):
                piece = g.to(strip_ptr.dtype.element_ty)
                row = (piece_at * part_stride + rows).to(tl.int64)
                strip_at = strip_ptr + row[:, None] * out_stride + cols[None, :]
                if BM == TALL:
                    # all of a tile, 16 bytes at a time: most of its pairs are positives
                    merged = tl.where(positive, piece, tl.load(strip_at))
                    tl.debug_barrier()
                    tl.store(strip_at, merged)
                else:
                    tl.store(strip_at, piece, mask=positive)
                g = g - piece.to(tl.float32)
    sums_at = label_sums_ptr + rows
    sums += tl.load(sums_at, mask=rows < N, other=0.0)
    if LOSS:
        loss += tl.load(stats_ptr + rows, mask=rows < N, other=0.0)
    # all warps have read before one of them writes
    tl.debug_barrier()
    tl.store(sums_at, sums, mask=rows < N)
    if LOSS:
        tl.store(stats_ptr + rows, loss, mask=rows < N)


@triton.jit(do_not_specialize=ANY)
def move_ordered(row_x_ptr, row_stride, row_last_ptr, row_order_ptr, row_out_ptr, N, col_x_ptr, col_stride,
                 col_last_ptr, col_order_ptr, col_out_ptr, M, CHANNELS: tl.constexpr, LAST: tl.constexpr,
                 PUT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """out[c, i] = x[c, order[i]] or, with PUT, out[c, order[i]] = x[c, i], for each of the channels [CHANNELS, n].

    LAST: those of `last` [n] follow. out has no gaps. program_id 1 = 0 moves those of the rows, 1 of the columns.
    """
    of_rows = tl.program_id(1) == 0
    n = tl.where(of_rows, N, M)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    place = tl.load(tl.where(of_rows, row_order_ptr, col_order_ptr) + at, mask=inside, other=0)
    source = at if PUT else place
    out = tl.where(of_rows, row_out_ptr, col_out_ptr) + (place if PUT else at)
    x_ptr = tl.where(of_rows, row_x_ptr, col_x_ptr) + source
    for channel in tl.static_range(CHANNELS):
        x = tl.load(x_ptr + channel * tl.where(of_rows, row_stride, col_stride).to(tl.int64), mask=inside, other=0.0)
        tl.store(out + channel * n.to(tl.int64), x, mask=inside)
    if LAST:
        x = tl.load(tl.where(of_rows, row_last_ptr, col_last_ptr) + source, mask=inside, other=0.0)
        tl.store(out + CHANNELS * n.to(tl.int64), x, mask=inside)


@triton.jit(do_not_specialize=ANY)
def add_ordered(total_ptr, out_ptr, order_ptr, factors_ptr, n, D, total_stride, out_stride, ADD: tl.constexpr,
                TIMES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """out[order[i]] = total[i], or with ADD += it, for each of n rows; TIMES: total[i] · factors[i]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = rows.to(tl.int64)[:, None]
    to = tl.load(order_ptr + rows, mask=rows < n, other=0).to(tl.int64)[:, None]
    if TIMES:
        factors = tl.load(factors_ptr + rows, mask=rows < n, other=0.0)[:, None]
    for step in range(0, D, BLOCK):
        cols = step + tl.arange(0, BLOCK)
        inside = (rows < n)[:, None] & (cols < D)[None, :]
        total = tl.load(total_ptr + row * total_stride + cols[None, :], mask=inside, other=0.0)
        out = out_ptr + to * out_stride + cols[None, :]
        if TIMES:
            total *= factors
        if ADD:
            total += tl.load(out, mask=inside, other=0.0)
        tl.store(out, total, mask=inside)
