# mypy: ignore-errors
# device code: Triton compiles these functions from their source, their arguments have no Python types
"""The device code of the forward, and what the backward shares with it: one super-tile on the chip, nothing else.

Launched by `triton_launch.py`, which knows tensors; neither knows losses by name, ranks or autograd. All kernels
that multiply have the shape of a matrix product, and differ in what their epilogue does with a tile of products:

    totals       one exponential (or softplus) per pair; sums along rows and columns, one number per tile and row
    maxima       the careful form of it: maxima and sums relative to them, and positives by label

The backward's, `gradient` and `careful_gradient`, are in `triton_gradients.py`.

In exponentials x is counted in binary: t = ⟨q, k⟩ · factor − shift with factor = scale · log2(e), so that
exp(x) = 2^shift · 2^t. The shift is chosen from the largest norms so that t ≤ 100: nothing can overflow, no maximum
is needed, and 226 binades lie between the largest term and the first that is lost. A sum that ends below 2^−60
raises a flag on the device, which lets the careful kernels run; otherwise they return at once. The factor makes good
what the matrix units cut off (docs/numerics.md).

Suffixes: `tl` tensors are [I, J] tiles unless named otherwise; `_ptr` points to memory; sizes N, M are those of the
super-tile in hand, D is the padded feature size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.losses.softmax import SoftmaxState, SoftmaxStats

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
# the largest power of two that a term may reach
CEILING = tl.constexpr(100.0)
# a sum below this may have lost terms that mattered
LEAST = tl.constexpr(2.0**-60)
# the numbers of a call, by their place: what a product of the tiles is multiplied with, and what is then taken off; the
# unit of a 16-bit strip; bias and scale, for logits that are computed apart; whether the careful kernels must run;
# 0, or NaN if a feature or the scale is not finite
FACTOR, SHIFT, UNIT, BIAS, SCALE, FLAG, POISON = (tl.constexpr(place) for place in range(7))
# rows of a softmax's statistics, and of its state
TOP = tl.constexpr(SoftmaxStats._fields.index("top"))
STATE_TOP, INVERSE, STATE_POSITIVE_TOP, POSITIVE_INVERSE, MISSING, POSITIVE_SHARE, SHARE = (
    tl.constexpr(row) for row in range(len(SoftmaxState._fields))
)
# numbers that change from call to call: compiled once for all their values
ANY = ("N", "M", "diagonal", "itself", "places", "places_stride", "places_start", "part_stride", "row_state_stride",
       "col_state_stride", "smoothing")  # fmt: skip
# positives listed per row that a kernel is compiled for, one by one; more of them are a loop, and the same kernel
UNROLLED = tl.constexpr(4)


@triton.jit
def _place(tile, row_tiles, col_tiles, GROUP: tl.constexpr):
    """The tile-th tile, in an order that reuses GROUP row tiles while they are in the cache."""
    width = GROUP * col_tiles
    first = tile // width * GROUP
    height = min(row_tiles - first, GROUP)
    return first + tile % width % height, tile % width // height


@triton.jit
def _piece(mem, stride, row, col, n, width, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    """[ROWS, COLS] of the features at (row, col), 0 outside; by the copy engine where the chip has one."""
    if TMA:
        piece = mem.load([row, col])
    else:
        rows = row + tl.arange(0, ROWS)
        cols = col + tl.arange(0, COLS)
        at = rows.to(tl.int64)[:, None] * stride + cols[None, :]
        piece = tl.load(mem + at, mask=(rows < n)[:, None] & (cols < width)[None, :], other=0.0)
    return piece


@triton.jit
def _products(q_mem, k_mem, q_stride, k_stride, i, j, N, M, D, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
              LEFT: tl.constexpr, RIGHT: tl.constexpr, PRODUCTS: tl.constexpr, TMA: tl.constexpr,
              UPCAST: tl.constexpr):  # fmt: skip
    """⟨q, k⟩ of tile (i, j). Features split in parts lie side by side; product p takes parts LEFT[p] and RIGHT[p]."""
    acc = tl.zeros((BM, BN), tl.float32)
    # three parts at most lie side by side
    width = D * min(PRODUCTS, 3)
    for step in range(0, PRODUCTS * D, BK):
        left = step
        right = step
        if PRODUCTS > 1:
            product = step // D
            left = step + (((LEFT >> (2 * product)) & 3) - product) * D
            right = step + (((RIGHT >> (2 * product)) & 3) - product) * D
        q = _piece(q_mem, q_stride, i * BM, left, N, width, BM, BK, TMA)
        k = _piece(k_mem, k_stride, j * BN, right, M, width, BN, BK, TMA)
        if UPCAST:
            q = q.to(tl.float32)
            k = k.to(tl.float32)
        acc = tl.dot(q, k.T, acc)
    return acc


@triton.jit
def _reaches(places_at, there, places_start, j, BN: tl.constexpr):
    """Whether any of these places lies in the j-th column of tiles."""
    place = tl.load(places_at, mask=there, other=-1) - places_start
    return tl.max(((place >= j * BN) & (place < (j + 1) * BN)).to(tl.int32)) > 0


@triton.jit
def _touched(i, j, N, M, left_out, BM: tl.constexpr, BN: tl.constexpr,
             DIAGONAL: tl.constexpr, SELF: tl.constexpr, PLACES: tl.constexpr):  # fmt: skip
    """Whether the tile has a pair that is left out by its position, or reaches over the edge."""
    diagonal, itself, places_ptr, places, places_stride, places_start = left_out
    touched = ((i + 1) * BM > N) | ((j + 1) * BN > M)
    if DIAGONAL:
        touched = touched | ((diagonal + i * BM < (j + 1) * BN) & (diagonal + (i + 1) * BM > j * BN))
    if SELF:
        touched = touched | ((itself + i * BM < (j + 1) * BN) & (itself + (i + 1) * BM > j * BN))
    places_at = places_ptr + (i * BM + tl.arange(0, BM)).to(tl.int64) * places_stride
    there = i * BM + tl.arange(0, BM) < N
    if PLACES <= UNROLLED:
        for p in tl.static_range(PLACES):
            touched = touched | _reaches(places_at + p, there, places_start, j, BN)
    else:
        for p in range(places):
            touched = touched | _reaches(places_at + p, there, places_start, j, BN)
    return touched


@triton.jit
def _counts(rows, cols, N, M, left_out, DIAGONAL: tl.constexpr, SELF: tl.constexpr, PLACES: tl.constexpr):
    """Pairs of the tile that exist and are not left out by their position."""
    diagonal, itself, places_ptr, places, places_stride, places_start = left_out
    counts = (rows < N)[:, None] & (cols < M)[None, :]
    if DIAGONAL:
        counts = counts & (cols[None, :] != (rows + diagonal)[:, None])
    if SELF:
        counts = counts & (cols[None, :] != (rows + itself)[:, None])
    places_at = places_ptr + rows.to(tl.int64) * places_stride
    if PLACES <= UNROLLED:
        for p in tl.static_range(PLACES):
            place = tl.load(places_at + p, mask=rows < N, other=-1) - places_start
            counts = counts & (cols[None, :] != place[:, None])
    else:
        for p in range(places):
            place = tl.load(places_at + p, mask=rows < N, other=-1) - places_start
            counts = counts & (cols[None, :] != place[:, None])
    return counts


@triton.jit
def _same(groups, rows, cols, N, M):
    """Pairs of the tile whose ids, or labels, are equal."""
    row_groups_ptr, col_groups_ptr = groups
    row_groups = tl.load(row_groups_ptr + rows, mask=rows < N, other=0)
    col_groups = tl.load(col_groups_ptr + cols, mask=cols < M, other=0)
    return row_groups[:, None] == col_groups[None, :]


@triton.jit
def _others(ids, labels, rows, cols, N, M, LABELS: tl.constexpr):
    """Pairs of the tile that are not of the same id, or are positive by label."""
    others = _same(ids, rows, cols, N, M) == 0
    if LABELS:
        others = others | _same(labels, rows, cols, N, M)
    return others


@triton.jit
def _count(x, kept, axis: tl.constexpr):
    """How many are kept along `axis`. Taken from x, so that it is counted where x is: masks lie across the threads."""
    return tl.sum(tl.where(kept, x * 0.0 + 1.0, 0.0), axis)


@triton.jit
def _grown(a, b):
    """(1 + a)(1 + b) − 1, to full precision also where a and b are small."""
    return a + b + a * b


@triton.jit
def log1p(x):
    """log(1 + x) for x ≥ 0, exact to float32 also where it is small."""
    series = x * (1.0 - x * (0.5 - x * (0.3333333333 - x * (0.25 - x * 0.2))))
    return tl.where(x < 0.03, series, tl.math.log2(1.0 + x) * LN2)


@triton.jit
def _softplus_sum(t, BM: tl.constexpr, BN: tl.constexpr):
    """Σ_j log(1 + 2^t_ij): one exponential per pair, and one logarithm for many.

    Σ log(1 + e) = log Π(1 + e), and the product less 1 is summed up as it stands, so that nothing small is lost;
    BN / 8 factors of at most 2 do not overflow.
    """
    grown = tl.reduce(tl.reshape(tl.math.exp2(tl.abs(t) * -1.0), (BM, BN // 8, 8)), 1, _grown)
    return tl.sum(log1p(grown), 1) + tl.sum(tl.maximum(t, 0.0), 1) * LN2


@triton.jit(do_not_specialize=ANY)
def totals(q_mem, k_mem, numbers_ptr, row_part_ptr, col_part_ptr, places_ptr, row_ids_ptr, col_ids_ptr,
           row_labels_ptr, col_labels_ptr, q_stride, k_stride, N, M, D, diagonal, itself, places, places_stride,
           places_start,
           BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
           LEFT: tl.constexpr, RIGHT: tl.constexpr, PRODUCTS: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
           DIAGONAL: tl.constexpr, SELF: tl.constexpr, PLACES: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr,
           COLUMNS: tl.constexpr, SMOOTH: tl.constexpr, SIGMOID: tl.constexpr, FLATTEN: tl.constexpr):  # fmt: skip
    """Per tile: Σ 2^t over the pairs that count, along rows [channel, col tile, N] and columns [channel, row tile, M].

    SMOOTH adds two channels: Σ x and the number of the pairs. SIGMOID sums softplus(±x) instead, along rows only.
    """
    left_out = (diagonal, itself, places_ptr, places, places_stride, places_start)
    ids = (row_ids_ptr, col_ids_ptr)
    labels = (row_labels_ptr, col_labels_ptr)
    row_tiles = tl.cdiv(N, BM)
    col_tiles = tl.cdiv(M, BN)
    factor = tl.load(numbers_ptr + FACTOR)
    shift = tl.load(numbers_ptr + SHIFT)
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0), flatten=FLATTEN):
        i, j = _place(tile, row_tiles, col_tiles, GROUP)
        acc = _products(q_mem, k_mem, q_stride, k_stride, i, j, N, M, D, BM, BN, BK, LEFT, RIGHT, PRODUCTS, TMA,
                        UPCAST)  # fmt: skip
        rows = i * BM + tl.arange(0, BM)
        cols = j * BN + tl.arange(0, BN)
        t = acc * factor - shift
        if SIGMOID and LABELS:
            t = tl.where(_same(labels, rows, cols, N, M), -t, t)
        row_at = row_part_ptr + j.to(tl.int64) * N + rows
        col_at = col_part_ptr + i.to(tl.int64) * M + cols
        if IDS or SMOOTH:
            kept = _counts(rows, cols, N, M, left_out, DIAGONAL, SELF, PLACES)
            if IDS:
                kept = kept & _others(ids, labels, rows, cols, N, M, LABELS)
            t = tl.where(kept, t, -float("inf"))
            if SMOOTH:
                x = tl.where(kept, acc * (factor * LN2), 0.0)
                tl.store(row_at + col_tiles.to(tl.int64) * N, tl.sum(x, 1), mask=rows < N)
                tl.store(row_at + col_tiles.to(tl.int64) * N * 2, _count(acc, kept, 1), mask=rows < N)
                if COLUMNS:
                    tl.store(col_at + row_tiles.to(tl.int64) * M, tl.sum(x, 0), mask=cols < M)
                    tl.store(col_at + row_tiles.to(tl.int64) * M * 2, _count(acc, kept, 0), mask=cols < M)
        elif _touched(i, j, N, M, left_out, BM, BN, DIAGONAL, SELF, PLACES):
            t = tl.where(_counts(rows, cols, N, M, left_out, DIAGONAL, SELF, PLACES), t, -float("inf"))
        if SIGMOID:
            tl.store(row_at, _softplus_sum(t, BM, BN), mask=rows < N)
        else:
            e = tl.math.exp2(t)
            tl.store(row_at, tl.sum(e, 1), mask=rows < N)
            if COLUMNS:
                tl.store(col_at, tl.sum(e, 0), mask=cols < M)


@triton.jit
def _exponentials(x, kept, axis: tl.constexpr):
    """The maximum along `axis` of x where kept, and the sum of exponentials relative to it."""
    hidden = tl.where(kept, x, -float("inf"))
    top = tl.max(hidden, axis)
    safe = tl.where(top == -float("inf"), 0.0, top)
    return top, tl.sum(tl.exp(hidden - tl.expand_dims(safe, axis)), axis)


@triton.jit
def _under_both(top, total, x, kept):
    """A row's maximum, and sum of exponentials relative to it, so far and of x together."""
    new_top, new_total = _exponentials(x, kept, 1)
    higher = tl.maximum(top, new_top)
    safe = tl.where(higher == -float("inf"), 0.0, higher)
    return higher, total * tl.exp(top - safe) + new_total * tl.exp(new_top - safe)


@triton.jit
def _absorb(x, negative, hot, at, stride, inside, LABELS: tl.constexpr, SMOOTH: tl.constexpr):
    """Stores the statistics of columns, one stride apart in the order of losses/softmax.py."""
    top, total = _exponentials(x, negative, 0)
    tl.store(at, top, mask=inside)
    tl.store(at + stride, total, mask=inside)
    if LABELS:
        top, total = _exponentials(x, hot, 0)
        logit_sum = tl.zeros_like(top)
        count = logit_sum
        if SMOOTH:
            logit_sum = tl.sum(tl.where(negative | hot, x, 0.0), 0)
            count = _count(x, negative | hot, 0)
        tl.store(at + 2 * stride, top, mask=inside)
        tl.store(at + 3 * stride, total, mask=inside)
        tl.store(at + 4 * stride, tl.sum(tl.where(hot, x, 0.0), 0), mask=inside)
        tl.store(at + 5 * stride, _count(x, hot, 0), mask=inside)
        tl.store(at + 6 * stride, logit_sum, mask=inside)
        tl.store(at + 7 * stride, count, mask=inside)


@triton.jit
def _halves(x, BM: tl.constexpr, BN: tl.constexpr):
    """The left and the right half of a tile; nothing moves, each thread has columns of both."""
    return tl.split(tl.permute(tl.reshape(x, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def _quarter(x, at: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """A quarter of the columns of a tile."""
    left, right = _halves(x, BM, BN)
    left, right = _halves(left if at < 2 else right, BM, BN // 2)
    return left if at % 2 == 0 else right


@triton.jit(do_not_specialize=ANY)
def maxima(q_mem, k_mem, numbers_ptr, row_part_ptr, col_part_ptr, places_ptr, row_ids_ptr, col_ids_ptr,
           row_labels_ptr, col_labels_ptr, q_stride, k_stride, N, M, D, diagonal, itself, places, places_stride,
           places_start,
           BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
           LEFT: tl.constexpr, RIGHT: tl.constexpr, PRODUCTS: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
           DIAGONAL: tl.constexpr, SELF: tl.constexpr, PLACES: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr,
           COLUMNS: tl.constexpr, SMOOTH: tl.constexpr):  # fmt: skip
    """The careful form of `totals`: nothing is lost whatever the features. Runs where the flag is up.

    Per tile, top and Σ exp(x − top); with LABELS all eight statistics, the last two 0 unless SMOOTH. Layout as in
    `totals`.
    """
    left_out = (diagonal, itself, places_ptr, places, places_stride, places_start)
    ids = (row_ids_ptr, col_ids_ptr)
    labels = (row_labels_ptr, col_labels_ptr)
    row_tiles = tl.cdiv(N, BM)
    col_tiles = tl.cdiv(M, BN)
    factor = tl.load(numbers_ptr + FACTOR)
    wanted = tl.where(tl.load(numbers_ptr + FLAG) != 0, row_tiles * col_tiles, 0)
    for tile in tl.range(tl.program_id(0), wanted, tl.num_programs(0)):
        i, j = _place(tile, row_tiles, col_tiles, GROUP)
        acc = _products(q_mem, k_mem, q_stride, k_stride, i, j, N, M, D, BM, BN, BK, LEFT, RIGHT, PRODUCTS, TMA,
                        UPCAST)  # fmt: skip
        rows = i * BM + tl.arange(0, BM)
        WIDTH: tl.constexpr = BN // 4
        top = tl.full((BM,), -float("inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        positive_top, positive_total = top, total
        positive_sum, positive_count, logit_sum, count = total, total, total, total
        for at in tl.static_range(4):
            x = _quarter(acc, at, BM, BN) * factor * LN2
            cols = j * BN + at * WIDTH + tl.arange(0, WIDTH)
            negative = _counts(rows, cols, N, M, left_out, DIAGONAL, SELF, PLACES)
            hot = negative
            if LABELS:
                hot = negative & _same(labels, rows, cols, N, M)
                negative = negative & (hot == 0)
            if IDS:
                negative = negative & (_same(ids, rows, cols, N, M) == 0)
            top, total = _under_both(top, total, x, negative)
            if LABELS:
                positive_top, positive_total = _under_both(positive_top, positive_total, x, hot)
                positive_sum += tl.sum(tl.where(hot, x, 0.0), 1)
                positive_count += _count(x, hot, 1)
                if SMOOTH:
                    logit_sum += tl.sum(tl.where(negative | hot, x, 0.0), 1)
                    count += _count(x, negative | hot, 1)
            if COLUMNS:
                col_at = col_part_ptr + i.to(tl.int64) * M + cols
                _absorb(x, negative, hot, col_at, row_tiles.to(tl.int64) * M, cols < M, LABELS, SMOOTH)
        row_at = row_part_ptr + j.to(tl.int64) * N + rows
        stride = col_tiles.to(tl.int64) * N
        tl.store(row_at, top, mask=rows < N)
        tl.store(row_at + stride, total, mask=rows < N)
        if LABELS:
            tl.store(row_at + 2 * stride, positive_top, mask=rows < N)
            tl.store(row_at + 3 * stride, positive_total, mask=rows < N)
            tl.store(row_at + 4 * stride, positive_sum, mask=rows < N)
            tl.store(row_at + 5 * stride, positive_count, mask=rows < N)
            tl.store(row_at + 6 * stride, logit_sum, mask=rows < N)
            tl.store(row_at + 7 * stride, count, mask=rows < N)
