# mypy: ignore-errors
# device code: Triton compiles these functions from their source, their arguments have no Python types
"""Device code of the forward: products of a super-tile, their sums and maxima, and positives by label.

Launched by `launch.py`; shared with `backward.py` and `reductions.py`. Kernels with the shape of a matrix product
differ in their epilogue, the work on one tile of products:

    totals    one exponential (or softplus) per pair; sums along rows and columns, one number per tile and row
    maxima    the careful form: maxima and sums relative to them, and positives by label

A pair's term is an exponential or, with the constexpr SOFTPLUS, a softplus. Exponentials are computed in base 2:
t = ⟨q, k⟩ · factor − shift with factor = scale · log2(e), so that exp(x) = 2^shift · 2^t. The shift comes from the
largest norms so that t ≤ 100: nothing overflows, no maximum is needed, and 226 binades lie between the largest term
and the first that is lost. A sum that ends below 2^−60 sets the careful flag on the device. The careful kernels run
where it is set and return at once elsewhere. The factor compensates the matrix units' truncation (docs/numerics.md).

Names: `_ptr` points to memory, `_mem` to memory or a descriptor of it; N and M are the rows and columns of the
super-tile, BM and BN those of a tile, D is the padded feature size. `masks` holds the excluded positions: the two
diagonals, and the positives by index with their number per row, stride and first column.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.losses.softmax import SoftmaxState, SoftmaxStats

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
# log(2) in two: ten bits, and the rest
LN2_FIRST = tl.constexpr(0.693359375)
LN2_REST = tl.constexpr(-2.1219444005469057e-4)
# largest exponent t of a term
HIGHEST = tl.constexpr(100.0)
# a smaller sum may have lost terms that matter
LOWEST_SUM = tl.constexpr(2.0**-60)
# positions of a block's constants: factor and shift of t; unit of a 16-bit strip; bias and scale, for logits computed
# in float32; careful flag; 0, or NaN if a feature or the scale is not finite; and a correction of the factor
FACTOR, SHIFT, UNIT, BIAS, SCALE, CAREFUL, NONFINITE, REST = (tl.constexpr(position) for position in range(8))
# rows of a softmax's statistics, and of its state
TOP, TOTAL, LOGIT_SUM, LOGIT_COUNT, POSITIVE_TOP, POSITIVE_TOTAL, POSITIVE_SUM, POSITIVE_COUNT = (
    tl.constexpr(row) for row in range(len(SoftmaxStats._fields))
)
STATS = tl.constexpr(len(SoftmaxStats._fields))
STATE_TOP, INVERSE, STATE_POSITIVE_TOP, POSITIVE_INVERSE, MISSING, POSITIVE_SHARE, SHARE = (
    tl.constexpr(row) for row in range(len(SoftmaxState._fields))
)
# arguments that change from call to call: compiled once for all their values
ANY = ("N", "M", "n", "diagonal", "self_diagonal", "positives", "positives_stride", "positives_start", "per_row",
       "part_stride", "part_row_stride", "part_col_stride", "parts", "stats_row_stride", "stats_stride",
       "row_stats_stride", "col_stats_stride", "row_state_stride", "col_state_stride", "row_tiles", "col_tiles",
       "row_first", "row_last", "col_first", "col_last", "q_blocks", "blocks", "truncation", "careful",
       "smoothing")  # fmt: skip
# positives per row up to which a kernel is compiled for their number; above it, one kernel loops over them
UNROLLED = tl.constexpr(4)


@triton.jit
def tile_at(tile, row_tiles, col_tiles, GROUP: tl.constexpr):
    """Row and column of a tile by its number, in an order that reuses GROUP row tiles while they are in the cache."""
    width = GROUP * col_tiles
    first = tile // width * GROUP
    height = min(row_tiles - first, GROUP)
    return first + tile % width % height, tile % width // height


@triton.jit
def _load_features(mem, stride, row, col, n, width, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    """[ROWS, COLS] of the features at (row, col), 0 outside; through the copy engine where TMA."""
    if TMA:
        piece = mem.load([row, col])
    else:
        rows = row + tl.arange(0, ROWS)
        cols = col + tl.arange(0, COLS)
        at = rows.to(tl.int64)[:, None] * stride + cols[None, :]
        piece = tl.load(mem + at, mask=(rows < n)[:, None] & (cols < width)[None, :], other=0.0)
    return piece


@triton.jit
def products(q_mem, k_mem, q_stride, k_stride, i, j, N, M, D, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
             LEFT: tl.constexpr, RIGHT: tl.constexpr, PRODUCTS: tl.constexpr, TMA: tl.constexpr,
             UPCAST: tl.constexpr):  # fmt: skip
    """⟨q, k⟩ of tile (i, j). Pieces of features lie side by side; product p takes pieces LEFT[p] and RIGHT[p]."""
    acc = tl.zeros((BM, BN), tl.float32)
    # at most three pieces
    width = D * min(PRODUCTS, 3)
    for step in range(0, PRODUCTS * D, BK):
        left = step
        right = step
        if PRODUCTS > 1:
            product = step // D
            left = step + (((LEFT >> (2 * product)) & 3) - product) * D
            right = step + (((RIGHT >> (2 * product)) & 3) - product) * D
        q = _load_features(q_mem, q_stride, i * BM, left, N, width, BM, BK, TMA)
        k = _load_features(k_mem, k_stride, j * BN, right, M, width, BN, BK, TMA)
        if UPCAST:
            q = q.to(tl.float32)
            k = k.to(tl.float32)
        acc = tl.dot(q, k.T, acc)
    return acc


@triton.jit
def _any_in_tile(positives_at, inside, positives_start, j, BN: tl.constexpr):
    """True if any of these positives lies in the j-th column of tiles."""
    col = tl.load(positives_at, mask=inside, other=-1) - positives_start
    return tl.max(((col >= j * BN) & (col < (j + 1) * BN)).to(tl.int32)) > 0


@triton.jit
def has_masked(i, j, N, M, masks, BM: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr, SELF: tl.constexpr,
               POSITIVES: tl.constexpr):  # fmt: skip
    """True if the tile has a pair that is excluded by its position, or reaches over the edge."""
    diagonal, self_diagonal, positives_ptr, positives, positives_stride, positives_start = masks
    masked = ((i + 1) * BM > N) | ((j + 1) * BN > M)
    if DIAGONAL:
        masked = masked | ((diagonal + i * BM < (j + 1) * BN) & (diagonal + (i + 1) * BM > j * BN))
    if SELF:
        masked = masked | ((self_diagonal + i * BM < (j + 1) * BN) & (self_diagonal + (i + 1) * BM > j * BN))
    positives_at = positives_ptr + (i * BM + tl.arange(0, BM)).to(tl.int64) * positives_stride
    inside = i * BM + tl.arange(0, BM) < N
    if POSITIVES <= UNROLLED:
        for p in tl.static_range(POSITIVES):
            masked = masked | _any_in_tile(positives_at + p, inside, positives_start, j, BN)
    else:
        for p in range(positives):
            masked = masked | _any_in_tile(positives_at + p, inside, positives_start, j, BN)
    return masked


@triton.jit
def valid_pairs(rows, cols, N, M, masks, DIAGONAL: tl.constexpr, SELF: tl.constexpr, POSITIVES: tl.constexpr):
    """Mask of the pairs that exist and are not excluded by their position."""
    diagonal, self_diagonal, positives_ptr, positives, positives_stride, positives_start = masks
    valid = (rows < N)[:, None] & (cols < M)[None, :]
    if DIAGONAL:
        valid = valid & (cols[None, :] != (rows + diagonal)[:, None])
    if SELF:
        valid = valid & (cols[None, :] != (rows + self_diagonal)[:, None])
    positives_at = positives_ptr + rows.to(tl.int64) * positives_stride
    if POSITIVES <= UNROLLED:
        for p in tl.static_range(POSITIVES):
            col = tl.load(positives_at + p, mask=rows < N, other=-1) - positives_start
            valid = valid & (cols[None, :] != col[:, None])
    else:
        for p in range(positives):
            col = tl.load(positives_at + p, mask=rows < N, other=-1) - positives_start
            valid = valid & (cols[None, :] != col[:, None])
    return valid


@triton.jit
def equal_groups(groups, rows, cols, N, M):
    """Mask of the pairs whose ids, or labels, are equal."""
    row_groups_ptr, col_groups_ptr = groups
    row_groups = tl.load(row_groups_ptr + rows, mask=rows < N, other=0)
    col_groups = tl.load(col_groups_ptr + cols, mask=cols < M, other=0)
    return row_groups[:, None] == col_groups[None, :]


@triton.jit
def distinct_pairs(ids, labels, rows, cols, N, M, LABELS: tl.constexpr):
    """Mask of the pairs whose ids differ, or that are positive by label."""
    distinct = equal_groups(ids, rows, cols, N, M) == 0
    if LABELS:
        distinct = distinct | equal_groups(labels, rows, cols, N, M)
    return distinct


@triton.jit
def _count_along(x, valid, axis: tl.constexpr):
    """Number of valid pairs along `axis`, computed from x to keep its layout: masks lie across the threads."""
    return tl.sum(tl.where(valid, x * 0.0 + 1.0, 0.0), axis)


@triton.jit
def _product_less_one(a, b):
    """(1 + a)(1 + b) − 1, to full precision for small a and b too."""
    return a + b + a * b


@triton.jit
def log1p(x):
    """log(1 + x) for x ≥ 0, exact to float32 for small x too."""
    series = x * (1.0 - x * (0.5 - x * (0.3333333333 - x * (0.25 - x * 0.2))))
    return tl.where(x < 0.03, series, tl.math.log2(1.0 + x) * LN2)


@triton.jit
def softplus_sum(t, BM: tl.constexpr, BN: tl.constexpr):
    """Σ_j log(1 + 2^t_ij): one exponential per pair, and one logarithm for many.

    Σ log(1 + e) = log Π(1 + e). The product less 1 is accumulated, which keeps the digits of small terms; BN / 8
    factors of at most 2 do not overflow.
    """
    growth = tl.reduce(tl.reshape(tl.math.exp2(tl.abs(t) * -1.0), (BM, BN // 8, 8)), 1, _product_less_one)
    return tl.sum(log1p(growth), 1) + tl.sum(tl.maximum(t, 0.0), 1) * LN2


@triton.jit
def exponent_constants(constants_ptr):
    """Factor, shift and rest of `exponents`."""
    return tl.load(constants_ptr + FACTOR), tl.load(constants_ptr + SHIFT), tl.load(constants_ptr + REST)


@triton.jit
def exponents(inner, constants, SOFTPLUS: tl.constexpr, PRODUCTS: tl.constexpr):
    """t of products ⟨q, k⟩, rounded once.

    Of a softplus in float32 also with what factor and shift lost when they were rounded: a bias cancels most of a
    logit, and would leave the same error in all of them.
    """
    factor, shift, rest = constants
    t = tl.fma(inner, factor, -shift)
    if SOFTPLUS and PRODUCTS > 3:
        t = tl.fma(inner, rest, t)
    return t


@triton.jit
def binade(total):
    """The whole part of log2 of a number that is not negative, read off its bits: the same in every kernel."""
    return ((total.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32)


@triton.jit
def _store_logits(acc, constants, total, valid, at, stride, inside, axis: tl.constexpr):
    """Store Σ (t − binade of the total) of the valid pairs along `axis`, and their number, behind the total.

    A sum of t itself, which may be 100, would round the mean by 1e-5.
    """
    factor, shift, _ = constants
    relative = tl.fma(acc, factor, -tl.expand_dims(shift + binade(total), axis))
    tl.store(at + stride, tl.sum(tl.where(valid, relative, 0.0), axis), mask=inside)
    tl.store(at + 2 * stride, _count_along(acc, valid, axis), mask=inside)


@triton.jit(do_not_specialize=ANY)
def totals(q_mem, k_mem, constants_ptr, row_part_ptr, col_part_ptr, positives_ptr, row_ids_ptr, col_ids_ptr,
           row_labels_ptr, col_labels_ptr, q_stride, k_stride, N, M, D, diagonal, self_diagonal, positives,
           positives_stride, positives_start, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
           LEFT: tl.constexpr, RIGHT: tl.constexpr, PRODUCTS: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
           DIAGONAL: tl.constexpr, SELF: tl.constexpr, POSITIVES: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr,
           COLUMNS: tl.constexpr, SOFTPLUS: tl.constexpr, SMOOTH: tl.constexpr, FLATTEN: tl.constexpr):  # fmt: skip
    """Per tile: Σ 2^t of the valid pairs, along rows [channel, col tile, N] and columns [channel, row tile, M].

    SMOOTH adds two channels, see `_store_logits`. SOFTPLUS sums softplus(±x), along rows only.
    """
    masks = (diagonal, self_diagonal, positives_ptr, positives, positives_stride, positives_start)
    ids = (row_ids_ptr, col_ids_ptr)
    labels = (row_labels_ptr, col_labels_ptr)
    row_tiles = tl.cdiv(N, BM)
    col_tiles = tl.cdiv(M, BN)
    constants = exponent_constants(constants_ptr)
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0), flatten=FLATTEN):
        i, j = tile_at(tile, row_tiles, col_tiles, GROUP)
        acc = products(q_mem, k_mem, q_stride, k_stride, i, j, N, M, D, BM, BN, BK, LEFT, RIGHT, PRODUCTS, TMA, UPCAST)
        rows = i * BM + tl.arange(0, BM)
        cols = j * BN + tl.arange(0, BN)
        t = exponents(acc, constants, SOFTPLUS, PRODUCTS)
        if SOFTPLUS and LABELS:
            t = tl.where(equal_groups(labels, rows, cols, N, M), -t, t)
        row_at = row_part_ptr + j.to(tl.int64) * N + rows
        col_at = col_part_ptr + i.to(tl.int64) * M + cols
        if IDS or SMOOTH:
            valid = valid_pairs(rows, cols, N, M, masks, DIAGONAL, SELF, POSITIVES)
            if IDS:
                valid = valid & distinct_pairs(ids, labels, rows, cols, N, M, LABELS)
            t = tl.where(valid, t, -float("inf"))
        elif has_masked(i, j, N, M, masks, BM, BN, DIAGONAL, SELF, POSITIVES):
            t = tl.where(valid_pairs(rows, cols, N, M, masks, DIAGONAL, SELF, POSITIVES), t, -float("inf"))
        if SOFTPLUS:
            tl.store(row_at, softplus_sum(t, BM, BN), mask=rows < N)
        else:
            e = tl.math.exp2(t)
            total = tl.sum(e, 1)
            tl.store(row_at, total, mask=rows < N)
            if SMOOTH:
                _store_logits(acc, constants, total, valid, row_at, col_tiles.to(tl.int64) * N, rows < N, 1)
            if COLUMNS:
                total = tl.sum(e, 0)
                tl.store(col_at, total, mask=cols < M)
                if SMOOTH:
                    _store_logits(acc, constants, total, valid, col_at, row_tiles.to(tl.int64) * M, cols < M, 0)


@triton.jit
def finite(top):
    """A maximum to subtract: 0 for the maximum of an empty set."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def merge_exponentials(top, total, other_top, other_total):
    """Maximum, and sum of exponentials relative to it, of two disjoint sets."""
    higher = tl.maximum(top, other_top)
    safe = finite(higher)
    return higher, total * tl.exp(top - safe) + other_total * tl.exp(other_top - safe)


@triton.jit
def _max_and_sum(x, valid, axis: tl.constexpr):
    """Maximum of the valid x along `axis`, and the sum of exponentials relative to it."""
    hidden = tl.where(valid, x, -float("inf"))
    top = tl.max(hidden, axis)
    return top, tl.sum(tl.exp(hidden - tl.expand_dims(finite(top), axis)), axis)


@triton.jit
def _sum_below(x, valid, top, axis: tl.constexpr):
    """Σ (x − top) of the valid x along `axis`."""
    return tl.sum(tl.where(valid, x - tl.expand_dims(finite(top), axis), 0.0), axis)


@triton.jit
def _add_to_rows(top, total, logit_sum, count, x, valid, SUMS: tl.constexpr):
    """Statistics of the rows so far and of x together; the last two only with SUMS."""
    new_top, new_total = _max_and_sum(x, valid, 1)
    higher, both = merge_exponentials(top, total, new_top, new_total)
    if SUMS:
        safe = finite(higher)
        logit_sum += count * (finite(top) - safe) + _sum_below(x, valid, safe, 1)
        count += _count_along(x, valid, 1)
    return higher, both, logit_sum, count


@triton.jit
def store_stats(top, total, logit_sum, count, at, stride, inside, SUMS: tl.constexpr):
    """Store the statistics of negatives, or of positives, one stride apart in the order of losses/softmax.py."""
    tl.store(at, top, mask=inside)
    tl.store(at + stride, total, mask=inside)
    if SUMS:
        tl.store(at + 2 * stride, logit_sum, mask=inside)
        tl.store(at + 3 * stride, count, mask=inside)


@triton.jit
def _store_columns(x, valid, at, stride, inside, SUMS: tl.constexpr):
    """Store the statistics of the columns of x."""
    top, total = _max_and_sum(x, valid, 0)
    store_stats(top, total, _sum_below(x, valid, top, 0), _count_along(x, valid, 0), at, stride, inside, SUMS)


@triton.jit
def halves(x, BM: tl.constexpr, BN: tl.constexpr):
    """The left and the right half of a tile. Each thread holds columns of both, so nothing moves."""
    return tl.split(tl.permute(tl.reshape(x, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def quarter(x, at: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """A quarter of the columns of a tile."""
    left, right = halves(x, BM, BN)
    left, right = halves(left if at < 2 else right, BM, BN // 2)
    return left if at % 2 == 0 else right


@triton.jit(do_not_specialize=ANY)
def maxima(q_mem, k_mem, constants_ptr, row_part_ptr, col_part_ptr, positives_ptr, row_ids_ptr, col_ids_ptr,
           row_labels_ptr, col_labels_ptr, q_stride, k_stride, N, M, D, diagonal, self_diagonal, positives,
           positives_stride, positives_start, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
           LEFT: tl.constexpr, RIGHT: tl.constexpr, PRODUCTS: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
           DIAGONAL: tl.constexpr, SELF: tl.constexpr, POSITIVES: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr,
           COLUMNS: tl.constexpr, SMOOTH: tl.constexpr):  # fmt: skip
    """The careful form of `totals`, for features of any size. Runs where the careful flag is set.

    Per tile: top and Σ exp(x − top) of the negatives, with SMOOTH also Σ (x − top) and their number; with LABELS all
    four of the positives, from the fifth channel on. Layout as in `totals`.
    """
    masks = (diagonal, self_diagonal, positives_ptr, positives, positives_stride, positives_start)
    ids = (row_ids_ptr, col_ids_ptr)
    labels = (row_labels_ptr, col_labels_ptr)
    row_tiles = tl.cdiv(N, BM)
    col_tiles = tl.cdiv(M, BN)
    factor = tl.load(constants_ptr + FACTOR)
    tiles = tl.where(tl.load(constants_ptr + CAREFUL) != 0, row_tiles * col_tiles, 0)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        i, j = tile_at(tile, row_tiles, col_tiles, GROUP)
        acc = products(q_mem, k_mem, q_stride, k_stride, i, j, N, M, D, BM, BN, BK, LEFT, RIGHT, PRODUCTS, TMA, UPCAST)
        rows = i * BM + tl.arange(0, BM)
        WIDTH: tl.constexpr = BN // 4
        top = tl.full((BM,), -float("inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        logit_sum, count, positive_total, positive_sum, positive_count = total, total, total, total, total
        positive_top = top
        for at in tl.static_range(4):
            x = quarter(acc, at, BM, BN) * factor * LN2
            cols = j * BN + at * WIDTH + tl.arange(0, WIDTH)
            negative = valid_pairs(rows, cols, N, M, masks, DIAGONAL, SELF, POSITIVES)
            positive = negative
            if LABELS:
                positive = negative & equal_groups(labels, rows, cols, N, M)
                negative = negative & (positive == 0)
            if IDS:
                negative = negative & (equal_groups(ids, rows, cols, N, M) == 0)
            top, total, logit_sum, count = _add_to_rows(top, total, logit_sum, count, x, negative, SMOOTH)
            if LABELS:
                positive_top, positive_total, positive_sum, positive_count = _add_to_rows(
                    positive_top, positive_total, positive_sum, positive_count, x, positive, True)  # fmt: skip
            if COLUMNS:
                col_at = col_part_ptr + i.to(tl.int64) * M + cols
                stride = row_tiles.to(tl.int64) * M
                _store_columns(x, negative, col_at, stride, cols < M, SMOOTH)
                if LABELS:
                    _store_columns(x, positive, col_at + 4 * stride, stride, cols < M, True)
        row_at = row_part_ptr + j.to(tl.int64) * N + rows
        stride = col_tiles.to(tl.int64) * N
        store_stats(top, total, logit_sum, count, row_at, stride, rows < N, SMOOTH)
        if LABELS:
            store_stats(positive_top, positive_total, positive_sum, positive_count, row_at + 4 * stride, stride,
                        rows < N, True)  # fmt: skip


@triton.jit
def shift_as_logarithm(shift):
    """A shift as a natural logarithm, rounded, and the rounding error.

    Uncorrected, rounding moves every loss by 4e-6 at a shift of 100. The first part of log(2) has ten bits, so that
    its product with a whole number is exact.
    """
    exact = shift * LN2_FIRST
    top = exact + shift * LN2_REST
    return top, (exact - top) + shift * LN2_REST
