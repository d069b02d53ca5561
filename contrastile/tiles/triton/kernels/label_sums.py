"""Device code of positives by label as sums: a softmax loss is linear in their features.

Launched by `triton/label_sums.py`, beside the tile kernels, which treat these positives as they treat negatives:

    single_positives     the positives of rows that have only one
    chunk_sums           sums of features, or of weighted ones, of the rows of a label within each chunk
    run_sums             the same of the whole label
    add_to_totals        the positives' part of each row's statistics
    add_to_gradients     their part of the gradients

A run is the rows of one label, which are neighbours in the order of labels; spans are those of `order.py`.
Features, statistics and gradients stay in the order of the caller.
"""

import triton
import triton.language as tl

from contrastile.tiles.triton.kernels.arithmetic import (
    ANY,
    INTERPRETED,
    LN2,
    POSITIVE_COUNT,
    POSITIVE_SHARE,
    POSITIVE_SUM,
    POSITIVE_TOP,
    REST,
    SCALE,
    TOP,
    load_rows,
    one_side,
)
from contrastile.tiles.triton.kernels.masks import FIRST, STOP, row_spans


@triton.jit
def _positives(spans_ptr, n, at):
    """The first column of each row's label, its own column, whether that is one of them, and its positives' number."""
    first, stop, itself = row_spans(spans_ptr, n, 0, at, n)
    own = (itself >= first) & (itself < stop)
    return first, itself, own, (stop - first) - own.to(tl.int32)


@triton.jit(do_not_specialize=ANY)
def single_positives(row_spans_ptr, row_order_ptr, row_out_ptr, N, col_spans_ptr, col_order_ptr, col_out_ptr, M,
                     COLUMNS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the only positive of each row that has one, −1 for others, and −1 for columns; in the caller's order.

    COLUMNS: of pairs that are each other's only positive, for columns too. program_id 1 = 0 computes rows, 1 columns.
    """
    of_rows = tl.program_id(1) == 0
    row = (row_spans_ptr, row_order_ptr, row_out_ptr, N)
    col = (col_spans_ptr, col_order_ptr, col_out_ptr, M)
    spans_ptr, order_ptr, out_ptr, n = one_side(of_rows, row, col)
    other_spans_ptr, other_order_ptr, _, m = one_side(of_rows, col, row)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first, itself, own, count = _positives(spans_ptr, n, at)
    other = tl.where(own & (itself == first), first + 1, first)
    single = (at < n) & (count == 1)
    if COLUMNS:
        _, _, _, others = _positives(other_spans_ptr, m, tl.where(single, other, m))
        single = single & (others == 1)
    else:
        single = single & of_rows
    partner = tl.load(other_order_ptr + other, mask=single, other=-1)
    place = tl.load(order_ptr + at, mask=at < n, other=0)
    tl.store(out_ptr + place, partner, mask=at < n)


@triton.jit
def _targets(side, places, inside, smoothing):
    """The target of each positive of these rows, times their coefficient; 0 for rows of a single one.

    side: their state, its stride, their coefficients, and their only positives. smoothing: a teacher's share.
    """
    state_ptr, state_stride, coefficient_ptr, singles_ptr = side
    target = tl.load(state_ptr + POSITIVE_SHARE * state_stride + places, mask=inside, other=0.0)
    target *= tl.load(coefficient_ptr + places, mask=inside, other=0.0) * (1.0 - smoothing)
    return tl.where(tl.load(singles_ptr + places, mask=inside, other=0) < 0, target, 0.0)


@triton.jit
def _sums_of_equal(same, x, PIECES: tl.constexpr):
    """same · x, for zeros and ones in `same`, and x in this number of 16-bit pieces."""
    if INTERPRETED:
        total = tl.dot(same, x)
    else:
        chosen = same.to(tl.bfloat16)
        piece = x.to(tl.bfloat16)
        total = tl.dot(chosen, piece)
        for _ in tl.static_range(PIECES - 1):
            x = x - piece.to(tl.float32)
            piece = x.to(tl.bfloat16)
            total = tl.dot(chosen, piece, total)
    return total


@triton.jit(do_not_specialize=ANY)
def chunk_sums(row_x_ptr, row_order_ptr, row_spans_ptr, row_state_ptr, row_state_stride, row_coefficient_ptr,
               row_singles_ptr, N, row_x_row_stride, row_x_stride, col_x_ptr, col_order_ptr, col_spans_ptr,
               col_state_ptr, col_state_stride, col_coefficient_ptr, col_singles_ptr, M, col_x_row_stride, col_x_stride,
               out_ptr, out_step, D, first_feature, width, smoothing, PLAIN: tl.constexpr, WEIGHED: tl.constexpr,
               PIECES: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the sum of each run within a chunk of the order, at its first row there, of `width` features.

    program_id 2 = 0: those of columns, for the rows; 1: those of rows, for the columns; behind each other in `out`.
    PLAIN: sums of features, for sides below PLAIN. WEIGHED: then those of features times their row's target, for the
    last WEIGHED of two sides. Each of `out_step` numbers.
    """
    side = tl.program_id(2)
    of_cols = side == 0
    spans_ptr, order_ptr, x_ptr, row_stride, stride, n = one_side(
        of_cols, (col_spans_ptr, col_order_ptr, col_x_ptr, col_x_row_stride, col_x_stride, M),
        (row_spans_ptr, row_order_ptr, row_x_ptr, row_x_row_stride, row_x_stride, N))  # fmt: skip
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = at < n
    spans = spans_ptr + at
    first = tl.load(spans + FIRST * n, mask=inside, other=-1)
    stop = tl.load(spans + STOP * n, mask=inside, other=-1)
    # labels without a row on the other side have empty spans, at the place of the label behind them
    same = ((first[:, None] == first[None, :]) & (stop[:, None] == stop[None, :])).to(tl.float32)
    behind = tl.arange(0, CHUNK) > 0
    begins = first != tl.load(spans + FIRST * n - 1, mask=inside & behind, other=-1)
    begins = begins | (stop != tl.load(spans + STOP * n - 1, mask=inside & behind, other=-1))
    places = tl.load(order_ptr + at, mask=inside, other=0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    feature = first_feature + tl.program_id(1) * BLOCK
    x = load_rows(x_ptr, places, feature, D, row_stride, stride, inside, BLOCK)
    out = out_ptr + side.to(tl.int64) * out_step * (2 if PLAIN + WEIGHED > 2 else 1)
    out += at.to(tl.int64)[:, None] * width + columns[None, :]
    written = (inside & begins)[:, None] & (columns < width)[None, :]
    if side < PLAIN:
        tl.store(out, _sums_of_equal(same, x, PIECES), mask=written)
    if side >= 2 - WEIGHED:
        state = one_side(of_cols, (col_state_ptr, col_state_stride, col_coefficient_ptr, col_singles_ptr),
                         (row_state_ptr, row_state_stride, row_coefficient_ptr, row_singles_ptr))  # fmt: skip
        weights = _targets(state, places, inside, smoothing)
        out += tl.where(side < PLAIN, out_step, 0)
        tl.store(out, _sums_of_equal(same, weights[:, None] * x, max(PIECES, 2)), mask=written)


@triton.jit(do_not_specialize=ANY)
def run_sums(row_spans_ptr, N, col_spans_ptr, M, out_ptr, out_step, width, KINDS: tl.constexpr, CHUNK: tl.constexpr,
             TILES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Replace the sum at the first row of each run by that of the whole run, from the chunks' sums of `chunk_sums`.

    A chunk has at most one run that begins in it and goes on behind it. program_id 2: which of the sums, KINDS of each
    side.
    """
    spans_ptr, n, others_ptr, m = one_side(tl.program_id(2) < KINDS, (col_spans_ptr, M, row_spans_ptr, N),
                                           (row_spans_ptr, N, col_spans_ptr, M))  # fmt: skip
    begin = tl.program_id(0) * CHUNK
    end = begin + CHUNK
    if end < n:
        # the other side's first row of the label that the chunk ends in: it has the range of the run
        of_last = tl.load(spans_ptr + FIRST * n + end - 1)
        there = tl.load(spans_ptr + STOP * n + end - 1) > of_last
        first = tl.load(others_ptr + FIRST * m + of_last, mask=there, other=0)
        stop = tl.load(others_ptr + STOP * m + of_last, mask=there, other=0)
        if (first >= begin) & (stop > end):
            columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            out = out_ptr + tl.program_id(2).to(tl.int64) * out_step + columns
            inside = columns < width
            at = out + first.to(tl.int64) * width
            total = tl.load(at, mask=inside, other=0.0)
            for tile in range(0, tl.cdiv(stop - end, CHUNK), TILES):
                rows = end + (tile + tl.arange(0, TILES)) * CHUNK
                parts = tl.load(out[None, :] + rows.to(tl.int64)[:, None] * width,
                                mask=(rows < stop)[:, None] & inside[None, :], other=0.0)  # fmt: skip
                total += tl.sum(parts, 0)
            # all warps have read before one of them writes
            tl.debug_barrier()
            tl.store(at, total, mask=inside)


@triton.jit
def _rows(spans_ptr, order_ptr, singles_ptr, n, ROWS: tl.constexpr):
    """Places of rows, their spans, the number of their positives, and the rows that have several."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = at < n
    first, itself, own, count = _positives(spans_ptr, n, at)
    places = tl.load(order_ptr + at, mask=inside, other=0)
    several = inside & (count > 0) & (tl.load(singles_ptr + places, mask=inside, other=0) < 0)
    return places, first, itself, own & several, count, several


@triton.jit(do_not_specialize=ANY)
def add_to_totals(row_x_ptr, row_order_ptr, row_spans_ptr, row_singles_ptr, N, row_x_row_stride, row_x_stride,
                  row_stats_ptr, row_stats_stride, col_x_ptr, col_order_ptr, col_spans_ptr, col_singles_ptr, M,
                  col_x_row_stride, col_x_stride, col_stats_ptr, col_stats_stride, sums_ptr, sums_step, constants_ptr,
                  D, first_feature, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Add the logits of positives to the statistics of rows (program_id 1 = 0) and columns (1), from sums of features.

    They are relative to the top of all pairs, which are there already, and have the rounding error that the factor of
    the tiles has, because the loss is the difference of both. The first features come with the number of positives.
    """
    of_rows = tl.program_id(1) == 0
    row = (row_order_ptr, row_spans_ptr, row_singles_ptr, N, row_x_ptr, row_x_row_stride, row_x_stride)
    col = (col_order_ptr, col_spans_ptr, col_singles_ptr, M, col_x_ptr, col_x_row_stride, col_x_stride)
    order_ptr, spans_ptr, singles_ptr, n, x_ptr, x_row_stride, x_stride = one_side(of_rows, row, col)
    other_order_ptr, _, _, _, other_x_ptr, other_row_stride, other_stride = one_side(of_rows, col, row)
    stats_ptr, stride = one_side(of_rows, (row_stats_ptr, row_stats_stride), (col_stats_ptr, col_stats_stride))
    places, first, itself, own, count, several = _rows(spans_ptr, order_ptr, singles_ptr, n, ROWS)
    sums_ptr += tl.program_id(1).to(tl.int64) * sums_step
    itself = tl.load(other_order_ptr + itself, mask=own, other=0)
    inner = tl.zeros((ROWS,), tl.float32)
    for step in range(0, width, BLOCK):
        feature = first_feature + step
        x = load_rows(x_ptr, places, feature, D, x_row_stride, x_stride, several, BLOCK)
        total = load_rows(sums_ptr, first, step, width, width, 1, several, BLOCK)
        total -= load_rows(other_x_ptr, itself, feature, D, other_row_stride, other_stride, own, BLOCK)
        inner += tl.sum(x * total, 1)
    stats = stats_ptr + places
    scale = tl.load(constants_ptr + SCALE) - tl.load(constants_ptr + REST).to(tl.float64) * LN2
    logits = inner.to(tl.float64) * scale
    if first_feature == 0:
        top = tl.load(stats + TOP * stride, mask=several, other=0.0)
        logits -= count * top.to(tl.float64)
        tl.store(stats + POSITIVE_TOP * stride, top, mask=several)
        tl.store(stats + POSITIVE_COUNT * stride, count.to(tl.float32), mask=several)
    else:
        logits += tl.load(stats + POSITIVE_SUM * stride, mask=several, other=0.0)
    # all warps have read before one of them writes
    tl.debug_barrier()
    tl.store(stats + POSITIVE_SUM * stride, logits.to(tl.float32), mask=several)


@triton.jit(do_not_specialize=ANY)
def add_to_gradients(row_x_ptr, row_order_ptr, row_spans_ptr, row_state_ptr, row_state_stride, row_coefficient_ptr,
                     row_singles_ptr, N, row_x_row_stride, row_x_stride, row_out_ptr, row_out_stride, col_x_ptr,
                     col_order_ptr, col_spans_ptr, col_state_ptr, col_state_stride, col_coefficient_ptr,
                     col_singles_ptr, M, col_x_row_stride, col_x_stride, col_out_ptr, col_out_stride, sums_ptr,
                     sums_step, inner_ptr, D, first_feature, width, smoothing, COLUMNS: tl.constexpr, U: tl.constexpr,
                     ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Subtract the targets of positives times the other side's features from the gradients of rows and of columns.

    program_id 1 = 0 computes rows, and with U changes their gradients; 1 columns. A row has its target times the sum
    of features and, with COLUMNS, the sum of features weighed by the other side's targets; columns without COLUMNS
    have the latter alone. Products with the features of rows are subtracted from `inner`.
    """
    side = tl.program_id(1)
    of_rows = side == 0
    row = (row_order_ptr, row_spans_ptr, N, row_x_ptr, row_x_row_stride, row_x_stride)
    col = (col_order_ptr, col_spans_ptr, M, col_x_ptr, col_x_row_stride, col_x_stride)
    order_ptr, spans_ptr, n, x_ptr, x_row_stride, x_stride = one_side(of_rows, row, col)
    other_order_ptr, _, _, other_x_ptr, other_row_stride, other_stride = one_side(of_rows, col, row)
    row_state = (row_state_ptr, row_state_stride, row_coefficient_ptr, row_singles_ptr)
    col_state = (col_state_ptr, col_state_stride, col_coefficient_ptr, col_singles_ptr)
    state = one_side(of_rows, row_state, col_state)
    out_ptr, out_stride = one_side(of_rows, (row_out_ptr, row_out_stride), (col_out_ptr, col_out_stride))
    places, first, itself, own, _, several = _rows(spans_ptr, order_ptr, state[3], n, ROWS)
    itself = tl.load(other_order_ptr + itself, mask=own, other=0)
    plain = of_rows | COLUMNS
    weighed = (of_rows == 0) | COLUMNS
    target = _targets(state, places, several & plain, smoothing)
    left = tl.where(own, target, 0.0)
    left += _targets(one_side(of_rows, col_state, row_state), itself, own & weighed, smoothing)
    sums_ptr += side.to(tl.int64) * sums_step * (2 if COLUMNS else 1)
    second = tl.where(plain, sums_step, 0)
    inner = tl.zeros((ROWS,), tl.float32)
    for step in range(0, width, BLOCK):
        columns = step + tl.arange(0, BLOCK)
        features = first_feature + columns
        feature = first_feature + step
        g = load_rows(other_x_ptr, itself, feature, D, other_row_stride, other_stride, own, BLOCK) * left[:, None]
        g -= load_rows(sums_ptr, first, step, width, width, 1, several & plain, BLOCK) * target[:, None]
        g -= load_rows(sums_ptr + second, first, step, width, width, 1, several & weighed, BLOCK)
        x = load_rows(x_ptr, places, feature, D, x_row_stride, x_stride, several & of_rows, BLOCK)
        inner += tl.sum(g * x, 1)
        if U | (of_rows == 0):
            out = out_ptr + places.to(tl.int64)[:, None] * out_stride + features[None, :]
            written = several[:, None] & ((columns < width) & (features < D))[None, :]
            tl.store(out, tl.load(out, mask=written, other=0.0) + g, mask=written)
    inner += tl.load(inner_ptr + places, mask=several & of_rows, other=0.0)
    # all warps have read before one of them writes
    tl.debug_barrier()
    tl.store(inner_ptr + places, inner, mask=several & of_rows)
