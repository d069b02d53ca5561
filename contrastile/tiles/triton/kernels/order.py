"""Device code of a block in the order of its labels, in which a row's positives are neighbours.

Launched by `sorting.py`; `labels.py` computes the positives:

    sort_chunks        labels of each chunk in rising order
    order_labels       labels in rising order
    count_equal        the number of equal labels on the other side
    spans              of each row, the first column of its label and the first behind it
    move_ordered       numbers of rows in the order of labels, and back
    add_ordered        sums of gradients in the order of the caller
"""

import triton
import triton.language as tl

from contrastile.tiles.triton.kernels.arithmetic import ANY, one_side, store_rows


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
    labels_ptr, chunks_ptr, within_ptr, n = one_side(
        tl.program_id(1) == 0, (row_labels_ptr, row_chunks_ptr, row_within_ptr, N),
        (col_labels_ptr, col_chunks_ptr, col_within_ptr, M))  # fmt: skip
    first = tl.program_id(0) * CHUNK
    rows = first + tl.arange(0, CHUNK)
    label = tl.load(labels_ptr + rows, mask=rows < n, other=0)
    place = tl.zeros((CHUNK,), tl.int32)
    for start in range(first, first + CHUNK, BLOCK):
        at = start + tl.arange(0, BLOCK)
        other = tl.load(labels_ptr + at, mask=at < n, other=0)[None, :]
        less = (other < label[:, None]) | ((other == label[:, None]) & (at[None, :] < rows[:, None]))
        place += tl.sum((less & (at < n)[None, :]).to(tl.int32), 1)
    tl.store(chunks_ptr + first + place, label, mask=rows < n)
    tl.store(within_ptr + rows, place.to(tl.int64), mask=rows < n)


@triton.jit(do_not_specialize=ANY)
def order_labels(row_labels_ptr, row_chunks_ptr, row_within_ptr, row_sorted_ptr, row_order_ptr, row_places_ptr, N,
                 col_labels_ptr, col_chunks_ptr, col_within_ptr, col_sorted_ptr, col_order_ptr, col_places_ptr, M,
                 ROWS: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr):  # fmt: skip
    """Sort the labels of each side, equal ones in their order, by their positions in all sorted chunks.

    Writes the labels in rising order, the position of each of these, and its inverse: the place of each position.
    program_id 1 = 0 sorts those of the rows, 1 those of the columns.
    """
    labels_ptr, chunks_ptr, within_ptr, sorted_ptr, order_ptr, places_ptr, n = one_side(
        tl.program_id(1) == 0,
        (row_labels_ptr, row_chunks_ptr, row_within_ptr, row_sorted_ptr, row_order_ptr, row_places_ptr, N),
        (col_labels_ptr, col_chunks_ptr, col_within_ptr, col_sorted_ptr, col_order_ptr, col_places_ptr, M))  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS < n:
        label = tl.load(labels_ptr + rows, mask=rows < n, other=0)
        place = tl.load(within_ptr + rows, mask=rows < n, other=0).to(tl.int32)
        own = (rows // CHUNK)[:, None]
        for start in range(0, tl.cdiv(n, CHUNK), SLOTS):
            chunk, first, stop = _chunks(start, n, SLOTS, CHUNK)
            # nothing of their own chunk
            low = first + own * 0
            high = tl.where(chunk == own, low, stop)
            place += tl.sum(_position(chunks_ptr, label[:, None], low, high, chunk < own, STEPS) - low, 1)
        tl.store(sorted_ptr + place, label, mask=rows < n)
        tl.store(order_ptr + place, rows.to(tl.int64), mask=rows < n)
        tl.store(places_ptr + rows, place.to(tl.int64), mask=rows < n)


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
    labels_ptr, order_ptr, out_ptr, n, others_ptr, places_ptr, m, offset = one_side(
        tl.program_id(1) == 0,
        (row_labels_ptr, row_order_ptr, row_out_ptr, N, col_labels_ptr, col_places_ptr, M, self_diagonal),
        (col_labels_ptr, col_order_ptr, col_out_ptr, M, row_labels_ptr, row_places_ptr, N, -self_diagonal))  # fmt: skip
    at = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = at < n
    label = tl.load(labels_ptr + at, mask=inside, other=0)
    first = _position(others_ptr, label, at * 0, at * 0 + m, at < 0, STEPS)
    stop = _position(others_ptr, label, first, at * 0 + m, at >= 0, STEPS)
    itself = first * 0 - 1
    lowest, highest = first, stop
    if SELF:
        column = tl.load(order_ptr + at, mask=inside, other=0) + offset
        exists = inside & (column >= 0) & (column < m)
        itself = tl.load(places_ptr + column, mask=exists, other=-1).to(tl.int32)
        lowest = tl.where(inside, tl.minimum(first, tl.where(exists, itself, m)), m)
        highest = tl.where(inside, tl.maximum(stop, itself + 1), 0)
        lowest = first * 0 + tl.min(lowest)
        highest = first * 0 + tl.max(highest)
    store_rows((first, stop, itself, lowest, highest), out_ptr + at, n, inside)


@triton.jit(do_not_specialize=ANY)
def move_ordered(row_x_ptr, row_stride, row_last_ptr, row_order_ptr, row_out_ptr, N, col_x_ptr, col_stride,
                 col_last_ptr, col_order_ptr, col_out_ptr, M, CHANNELS: tl.constexpr, LAST: tl.constexpr,
                 PUT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """out[c, i] = x[c, order[i]] or, with PUT, out[c, order[i]] = x[c, i], for each of the channels [CHANNELS, n].

    LAST: those of `last` [n] follow. out has no gaps. program_id 1 = 0 moves those of the rows, 1 of the columns.
    """
    x_ptr, stride, last_ptr, order_ptr, out_ptr, n = one_side(
        tl.program_id(1) == 0, (row_x_ptr, row_stride, row_last_ptr, row_order_ptr, row_out_ptr, N),
        (col_x_ptr, col_stride, col_last_ptr, col_order_ptr, col_out_ptr, M))  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    place = tl.load(order_ptr + at, mask=inside, other=0)
    source = at if PUT else place
    out = out_ptr + (place if PUT else at)
    for channel in tl.static_range(CHANNELS):
        x = tl.load(x_ptr + source + channel * stride.to(tl.int64), mask=inside, other=0.0)
        tl.store(out + channel * n.to(tl.int64), x, mask=inside)
    if LAST:
        x = tl.load(last_ptr + source, mask=inside, other=0.0)
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
