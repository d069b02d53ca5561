# mypy: ignore-errors
# device code: Triton compiles these functions from their source, their arguments have no Python types
"""Device code of the forward: products of a super-tile, and their sums.

Launched by `launch.py`; shared with the files beside it. Kernels with the shape of a matrix product differ in their
epilogue, the work on one tile of products:

    totals    one exponential (or softplus) per pair; sums along rows and columns, one number per tile and row
    maxima    its careful form, in `careful.py`

A pair's term is an exponential or, with the constexpr SOFTPLUS, a softplus. Exponentials are computed in base 2:
t = ⟨q, k⟩ · factor − shift with factor = scale · log2(e), so that exp(x) = 2^shift · 2^t. The shift comes from the
largest norms so that t ≤ 100: nothing overflows, no maximum is needed, and 226 binades lie between the largest term
and the first that is lost. A sum that ends below 2^−60 sets the careful flag on the device. The careful kernels run
where it is set and return at once elsewhere. The factor compensates the matrix units' truncation (docs/numerics.md).

Names: `_ptr` points to memory, `_mem` to memory or a descriptor of it; N and M are the rows and columns of the
super-tile, BM and BN those of a tile, D is the padded feature size, and G that of a guide.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.losses.distilled import TeacherStats
from contrastile.losses.softmax import SoftmaxState, SoftmaxStats
from contrastile.tiles.triton.masks import distinct_pairs, equal_groups, has_masked, valid_pairs

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
# position at which those of a teacher's logits begin
TEACHERS = tl.constexpr(8)
# values of GUIDE: negatives where the guide's product exceeds the row's number do not count; or the product, as logit
# of a teacher, gives soft targets
MASK, TEACHER = tl.constexpr(1), tl.constexpr(2)
# start of a tile's products where a pair does not count; products of features are larger than half of it
EXCLUDED = tl.constexpr(-(2.0**100))
# rows of a softmax's statistics, and of its state
TOP, TOTAL, LOGIT_SUM, LOGIT_COUNT, POSITIVE_TOP, POSITIVE_TOTAL, POSITIVE_SUM, POSITIVE_COUNT = (
    tl.constexpr(row) for row in range(len(SoftmaxStats._fields))
)
STATS = tl.constexpr(len(SoftmaxStats._fields))
STATE_TOP, INVERSE, STATE_POSITIVE_TOP, POSITIVE_INVERSE, MISSING, POSITIVE_SHARE, SHARE = (
    tl.constexpr(row) for row in range(len(SoftmaxState._fields))
)
# those of a teacher follow
TEACHER_TOP, TEACHER_TOTAL, GAP, X_TOP = (
    tl.constexpr(len(SoftmaxStats._fields) + row) for row in range(len(TeacherStats._fields))
)
STATE_TEACHER_TOP, TEACHER_INVERSE = (tl.constexpr(len(SoftmaxState._fields) + row) for row in range(2))
# arguments that change from call to call: compiled once for all their values
ANY = ("N", "M", "n", "diagonal", "self_diagonal", "positives", "positives_stride", "positives_start", "per_row",
       "part_stride", "part_row_stride", "part_col_stride", "parts", "stats_row_stride", "stats_stride",
       "row_stats_stride", "col_stats_stride", "row_state_stride", "col_state_stride", "row_tiles", "col_tiles",
       "row_first", "row_last", "col_first", "col_last", "q_blocks", "blocks", "truncation", "careful",
       "smoothing")  # fmt: skip


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
def products(acc, q_mem, k_mem, q_stride, k_stride, i, j, N, M, D, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
             LEFT: tl.constexpr, RIGHT: tl.constexpr, PRODUCTS: tl.constexpr, TMA: tl.constexpr,
             UPCAST: tl.constexpr):  # fmt: skip
    """acc + ⟨q, k⟩ of tile (i, j). Pieces of features lie side by side; product p takes pieces LEFT[p] and RIGHT[p]."""
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
def tile_products(q_mem, k_mem, q_stride, k_stride, D, guide_q_mem, guide_k_mem, guide_q_stride, guide_k_stride, G,
                  row_numbers_ptr, i, j, N, M, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                  LEFT: tl.constexpr, RIGHT: tl.constexpr, PRODUCTS: tl.constexpr, GUIDE: tl.constexpr,
                  GUIDE_LEFT: tl.constexpr, GUIDE_RIGHT: tl.constexpr, GUIDE_PRODUCTS: tl.constexpr,
                  TMA: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """⟨q, k⟩ of tile (i, j), and the guide's product with it.

    A mask needs no registers of its own: the sum of a pair that does not count begins at EXCLUDED. A teacher's product
    stays in registers beside the sums of the next one, for which `plan.SHAPES_TAUGHT` has twice the threads.
    """
    acc = tl.zeros((BM, BN), tl.float32)
    guide = acc
    if GUIDE != 0:
        guide = products(guide, guide_q_mem, guide_k_mem, guide_q_stride, guide_k_stride, i, j, N, M, G, BM, BN, BK,
                         GUIDE_LEFT, GUIDE_RIGHT, GUIDE_PRODUCTS, TMA, UPCAST)  # fmt: skip
    if GUIDE == MASK:
        rows = i * BM + tl.arange(0, BM)
        threshold = tl.load(row_numbers_ptr + rows, mask=rows < N, other=0.0)
        acc = tl.where(guide > threshold[:, None], EXCLUDED, 0.0)
    acc = products(acc, q_mem, k_mem, q_stride, k_stride, i, j, N, M, D, BM, BN, BK, LEFT, RIGHT, PRODUCTS, TMA, UPCAST)
    return acc, guide


@triton.jit
def counts(acc):
    """Mask of the pairs that the guide does not exclude."""
    return acc > EXCLUDED * 0.5


@triton.jit
def count_along(x, valid, axis: tl.constexpr):
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
def positive_weights(labels, numbers, rows, cols, N, M):
    """The weight of a positive by label, a number of the row and one of the column; 1 for all other pairs."""
    row_numbers_ptr, col_numbers_ptr = numbers
    of_rows = tl.load(row_numbers_ptr + rows, mask=rows < N, other=0.0)
    of_cols = tl.load(col_numbers_ptr + cols, mask=cols < M, other=0.0)
    return tl.where(equal_groups(labels, rows, cols, N, M), of_rows[:, None] + of_cols[None, :], 1.0)


@triton.jit
def weighed_softplus_sum(t, positives, labels, numbers, rows, j, N, M, BM: tl.constexpr, BN: tl.constexpr):
    """`softplus_sum` with the positives' weights. A tile without any of its positives is summed up as quickly."""
    total = softplus_sum(t, BM, BN)
    if positives > 0:
        WIDTH: tl.constexpr = BN // 4
        for at in tl.static_range(4):
            part = quarter(t, at, BM, BN)
            cols = j * BN + at * WIDTH + tl.arange(0, WIDTH)
            terms = log1p(tl.math.exp2(tl.abs(part) * -1.0)) + tl.maximum(part, 0.0) * LN2
            total += tl.sum((positive_weights(labels, numbers, rows, cols, N, M) - 1.0) * terms, 1)
    return total


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
    tl.store(at + 2 * stride, count_along(acc, valid, axis), mask=inside)


@triton.jit
def store_teacher(total, soft, gap, at, stride, inside):
    """Store Σ 2^x of the logits, Σ 2^t of the teacher's, and Σ 2^t (t − x)."""
    tl.store(at, total, mask=inside)
    tl.store(at + stride, soft, mask=inside)
    tl.store(at + 2 * stride, gap, mask=inside)


@triton.jit(do_not_specialize=ANY)
def totals(q_mem, k_mem, guide_q_mem, guide_k_mem, constants_ptr, row_part_ptr, col_part_ptr, positives_ptr,
           row_ids_ptr, col_ids_ptr, row_labels_ptr, col_labels_ptr, row_numbers_ptr, col_numbers_ptr,
           q_stride, k_stride, guide_q_stride, guide_k_stride, N, M, D, G, diagonal, self_diagonal, positives,
           positives_stride, positives_start, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
           LEFT: tl.constexpr, RIGHT: tl.constexpr, PRODUCTS: tl.constexpr, GUIDE: tl.constexpr,
           GUIDE_LEFT: tl.constexpr, GUIDE_RIGHT: tl.constexpr, GUIDE_PRODUCTS: tl.constexpr,
           TMA: tl.constexpr, UPCAST: tl.constexpr, DIAGONAL: tl.constexpr, SELF: tl.constexpr, POSITIVES: tl.constexpr,
           IDS: tl.constexpr, LABELS: tl.constexpr, COLUMNS: tl.constexpr, SOFTPLUS: tl.constexpr,
           SMOOTH: tl.constexpr, WEIGHED: tl.constexpr, FLATTEN: tl.constexpr):  # fmt: skip
    """Per tile: Σ 2^t of the valid pairs, along rows [channel, col tile, N] and columns [channel, row tile, M].

    SMOOTH adds two channels, see `_store_logits`; so does GUIDE == TEACHER, see `store_teacher`. SOFTPLUS sums
    softplus(±x), along rows only.
    """
    masks = (diagonal, self_diagonal, positives_ptr, positives, positives_stride, positives_start)
    ids = (row_ids_ptr, col_ids_ptr)
    labels = (row_labels_ptr, col_labels_ptr)
    row_tiles = tl.cdiv(N, BM)
    col_tiles = tl.cdiv(M, BN)
    constants = exponent_constants(constants_ptr)
    if GUIDE == TEACHER:
        teachers = exponent_constants(constants_ptr + TEACHERS)
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0), flatten=FLATTEN):
        i, j = tile_at(tile, row_tiles, col_tiles, GROUP)
        acc, guide = tile_products(
            q_mem, k_mem, q_stride, k_stride, D, guide_q_mem, guide_k_mem, guide_q_stride, guide_k_stride, G,
            row_numbers_ptr, i, j, N, M, BM, BN, BK, LEFT, RIGHT, PRODUCTS, GUIDE, GUIDE_LEFT, GUIDE_RIGHT,
            GUIDE_PRODUCTS, TMA, UPCAST)  # fmt: skip
        rows = i * BM + tl.arange(0, BM)
        cols = j * BN + tl.arange(0, BN)
        row_at = row_part_ptr + j.to(tl.int64) * N + rows
        col_at = col_part_ptr + i.to(tl.int64) * M + cols
        if GUIDE == TEACHER:
            masked = has_masked(i, j, N, M, masks, BM, BN, DIAGONAL, SELF, POSITIVES)
            row_stride = col_tiles.to(tl.int64) * N
            col_stride = row_tiles.to(tl.int64) * M
            total = tl.zeros((BM,), tl.float32)
            soft, gap = total, total
            WIDTH: tl.constexpr = BN // 4
            for at in tl.static_range(4):
                cols = j * BN + at * WIDTH + tl.arange(0, WIDTH)
                x = exponents(quarter(acc, at, BM, BN), constants, SOFTPLUS, PRODUCTS)
                t = exponents(quarter(guide, at, BM, BN), teachers, SOFTPLUS, GUIDE_PRODUCTS)
                apart = t - x
                if IDS or masked:
                    valid = valid_pairs(rows, cols, N, M, masks, DIAGONAL, SELF, POSITIVES)
                    if IDS:
                        valid = valid & distinct_pairs(ids, labels, rows, cols, N, M, LABELS)
                    x = tl.where(valid, x, -float("inf"))
                    t = tl.where(valid, t, -float("inf"))
                e = tl.math.exp2(x)
                f = tl.math.exp2(t)
                total += tl.sum(e, 1)
                soft += tl.sum(f, 1)
                gap += tl.sum(f * apart, 1)
                if COLUMNS:
                    col_at = col_part_ptr + i.to(tl.int64) * M + cols
                    store_teacher(tl.sum(e, 0), tl.sum(f, 0), tl.sum(f * apart, 0), col_at, col_stride, cols < M)
            store_teacher(total, soft, gap, row_at, row_stride, rows < N)
        else:
            t = exponents(acc, constants, SOFTPLUS, PRODUCTS)
            if GUIDE == MASK:
                t = tl.where(counts(acc), t, -float("inf"))
            if SOFTPLUS and LABELS:
                positive = equal_groups(labels, rows, cols, N, M)
                t = tl.where(positive, -t, t)
                if WEIGHED:
                    several = tl.max(count_along(t, positive, 1), 0)
            if IDS or SMOOTH:
                valid = valid_pairs(rows, cols, N, M, masks, DIAGONAL, SELF, POSITIVES)
                if IDS:
                    valid = valid & distinct_pairs(ids, labels, rows, cols, N, M, LABELS)
                if GUIDE == MASK:
                    valid = valid & counts(acc)
                t = tl.where(valid, t, -float("inf"))
            elif has_masked(i, j, N, M, masks, BM, BN, DIAGONAL, SELF, POSITIVES):
                t = tl.where(valid_pairs(rows, cols, N, M, masks, DIAGONAL, SELF, POSITIVES), t, -float("inf"))
            if SOFTPLUS:
                if LABELS and WEIGHED:
                    loss = weighed_softplus_sum(t, several, labels, (row_numbers_ptr, col_numbers_ptr), rows, j, N, M,
                                                BM, BN)  # fmt: skip
                else:
                    loss = softplus_sum(t, BM, BN)
                tl.store(row_at, loss, mask=rows < N)
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
def merge_teachers(top, total, gap, x_top, other_top, other_total, other_gap, other_x_top):
    """A teacher's statistics of two disjoint sets: `merge` of losses/distilled.py."""
    higher = tl.maximum(top, other_top)
    x_higher = tl.maximum(x_top, other_x_top)
    safe = finite(higher)
    x_safe = finite(x_higher)
    share = tl.exp(top - safe)
    other_share = tl.exp(other_top - safe)
    gap += total * ((finite(top) - safe) - (finite(x_top) - x_safe))
    other_gap += other_total * ((finite(other_top) - safe) - (finite(other_x_top) - x_safe))
    return higher, total * share + other_total * other_share, gap * share + other_gap * other_share, x_higher


@triton.jit
def store_stats(top, total, logit_sum, count, at, stride, inside, SUMS: tl.constexpr):
    """Store the statistics of negatives, or of positives, one stride apart in the order of losses/softmax.py."""
    tl.store(at, top, mask=inside)
    tl.store(at + stride, total, mask=inside)
    if SUMS:
        tl.store(at + 2 * stride, logit_sum, mask=inside)
        tl.store(at + 3 * stride, count, mask=inside)


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


@triton.jit
def shift_as_logarithm(shift):
    """A shift as a natural logarithm, rounded, and the rounding error.

    Uncorrected, rounding moves every loss by 4e-6 at a shift of 100. The first part of log(2) has ten bits, so that
    its product with a whole number is exact.
    """
    exact = shift * LN2_FIRST
    top = exact + shift * LN2_REST
    return top, (exact - top) + shift * LN2_REST
