"""Numbers that kernels share: positions of a block's constants and statistics, exponents, sums of exponentials.

Below `labels.py`, `forward.py` and all other kernels.
"""

import triton
import triton.language as tl

from contrastile.losses.distilled import TeacherStats
from contrastile.losses.softmax import SoftmaxState, SoftmaxStats

# kernels run on the CPU, in float32 where a chip takes 16 bits; fixed when they are imported
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
# log(2) in two parts: ten bits, and the rest
LN2_FIRST = tl.constexpr(0.693359375)
LN2_REST = tl.constexpr(-2.1219444005469057e-4)
# largest exponent t of a term
HIGHEST = tl.constexpr(100.0)
# a smaller sum may have lost terms that matter
LOWEST_SUM = tl.constexpr(2.0**-60)
# exponents of negatives that a guide leaves are raised to this: a sum of 0 has no pair, and needs no careful form
FAINT = tl.constexpr(-120.0)
# positions of a block's constants: factor and shift of t; unit of a 16-bit strip; bias and scale, for logits computed
# in float32; careful flag; 0, or NaN if a feature or the scale is not finite; a correction of the factor; the largest
# sum that is trusted; and the factor of positives, which have no hardness weights
FACTOR, SHIFT, UNIT, BIAS, SCALE, CAREFUL, NONFINITE, REST, LIMIT, POSITIVE_FACTOR = (
    tl.constexpr(position) for position in range(10)
)
# position at which those of a teacher's logits begin
TEACHERS = tl.constexpr(POSITIVE_FACTOR.value + 1)
# values of GUIDE: negatives where the guide's product exceeds the row's number do not count; or the product, as logit
# of a teacher, gives soft targets
MASK, TEACHER = tl.constexpr(1), tl.constexpr(2)
# values of KEEP: a forward writes exponentials, and adds up them, or what their rounding to 16 bits leaves of them
EXACT, ROUNDED = tl.constexpr(1), tl.constexpr(2)
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
       "vectors_step", "sums_step", "part_stride", "part_row_stride", "part_col_stride", "parts", "stats_row_stride",
       "stats_stride", "row_stats_stride", "col_stats_stride", "row_state_stride", "col_state_stride", "row_tiles",
       "col_tiles", "row_first", "row_last", "col_first", "col_last", "q_blocks", "blocks", "truncation", "careful",
       "keys", "smoothing", "m", "spans_stride", "spans_start", "row_stride", "col_stride", "x_lost",
       "y_lost", "step")  # fmt: skip


@triton.jit
def one_side(of_rows, row, col):
    """Each value of the rows' tuple, or of the columns'."""
    chosen = (tl.where(of_rows, row[0], col[0]),)
    for at in tl.static_range(1, len(row)):
        chosen += (tl.where(of_rows, row[at], col[at]),)
    return chosen


@triton.jit
def count_along(x, valid, axis: tl.constexpr):
    """Number of valid pairs along `axis`, computed from x to keep its layout: masks lie across the threads."""
    return tl.sum(tl.where(valid, x * 0.0 + 1.0, 0.0), axis)


@triton.jit
def log1p(x):
    """log(1 + x) for x ≥ 0, exact to float32 for small x too."""
    series = x * (1.0 - x * (0.5 - x * (0.3333333333 - x * (0.25 - x * 0.2))))
    return tl.where(x < 0.03, series, tl.math.log2(1.0 + x) * LN2)


@triton.jit
def packed(e, strip_mem, TMA: tl.constexpr):
    """Numbers of at least 0 in the 16 bits of a strip: float32's exponent, and 8 bits of its fraction.

    bf16 keeps 7 of them, and a sign.
    """
    dtype: tl.constexpr = strip_mem.dtype if TMA else strip_mem.dtype.element_ty
    bits = (e.to(tl.int32, bitcast=True) + 0x4000) >> 15
    return bits.to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def unpacked(x):
    """The numbers that `packed` has written, in float32."""
    return (x.to(tl.uint16, bitcast=True).to(tl.int32) << 15).to(tl.float32, bitcast=True)


@triton.jit
def log2(x):
    """The logarithm of a normal number, in one instruction; at most −126, also of 0."""
    if INTERPRETED:
        value = tl.where(x > 0, tl.math.log2(x), -126.0)
    else:
        value = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f, f", [x], dtype=tl.float32, is_pure=True,
                                          pack=1)  # fmt: skip
    return tl.maximum(value, -126.0)


@triton.jit
def exponent_constants(constants_ptr, factor: tl.constexpr = FACTOR):
    """Factor, shift and rest of `exponents`; factor: its position, POSITIVE_FACTOR for positives by label."""
    return tl.load(constants_ptr + factor), tl.load(constants_ptr + SHIFT), tl.load(constants_ptr + REST)


@triton.jit
def exponents(inner, constants, SOFTPLUS: tl.constexpr, PRODUCTS: tl.constexpr):
    """t of products ⟨q, k⟩, rounded once.

    A softplus in float32 also adds the rounding errors of factor and shift: a bias cancels most of a logit, and would
    leave the same error in all of them.
    """
    factor, shift, rest = constants
    t = tl.fma(inner, factor, -shift)
    if SOFTPLUS and PRODUCTS > 3:
        t = tl.fma(inner, rest, t)
    return t


@triton.jit
def load_rows(ptr, row, step, D, row_stride, stride, exists, BLOCK: tl.constexpr):
    """[ROWS, BLOCK] features of these rows in float32, 0 outside."""
    at = step + tl.arange(0, BLOCK)
    inside = exists[:, None] & (at < D)[None, :]
    features = ptr + row.to(tl.int64)[:, None] * row_stride + at.to(tl.int64)[None, :] * stride
    return tl.load(features, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def steps_of_rows(ptr, row, D, row_stride, stride, exists, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The numbers that round features of these rows to their first pieces, see `rounding_to_steps`."""
    squares = tl.zeros((ROWS,), tl.float32)
    for step in range(0, D, BLOCK):
        x = load_rows(ptr, row, step, D, row_stride, stride, exists, BLOCK)
        squares += tl.sum(x * x, 1)
    return rounding_to_steps(squares)


@triton.jit
def binade(total):
    """The whole part of log2 of a number that is not negative, read off its bits: the same in every kernel."""
    return ((total.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32)


@triton.jit
def rounding_to_steps(squares):
    """The number c for which (x + c) − c is x in whole steps of about 2⁻¹¹ of its row's norm, from the squared norms.

    Sums of products of such numbers are exact in 24 bits, in any order. 0 where the squares are too small to tell.
    """
    # three quarters: the power of two of a normalised row must not depend on the order of its sum
    exponent = (((squares * 0.75).to(tl.int32, bitcast=True) >> 23) - 125) >> 1
    c = (((exponent + (12 + 127)) << 23) | (1 << 22)).to(tl.float32, bitcast=True)
    return tl.where(squares > 1e-30, c, 0.0)


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


@triton.jit
def store_rows(values, at, stride, inside):
    """Store a tuple of numbers, one stride apart."""
    for row in tl.static_range(len(values)):
        tl.store(at + row * stride, values[row], mask=inside)


@triton.jit
def sum_per_lane(x, BM: tl.constexpr, WIDTH: tl.constexpr):
    """Partial sums of the rows of x as [BM, 4]: within threads, in the layout that the tensor cores return."""
    left, right = tl.split(tl.reshape(x, (BM, WIDTH // 2, 2)))
    return tl.sum(tl.reshape(left + right, (BM, WIDTH // 8, 4)), 1)


@triton.jit
def load_stats(at, stride, inside, top: tl.constexpr = -float("inf")):
    """The statistics that `store_stats` has written, those of no pair outside. top: of no pair."""
    return (tl.load(at, mask=inside, other=top), tl.load(at + stride, mask=inside, other=0.0),
            tl.load(at + 2 * stride, mask=inside, other=0.0),
            tl.load(at + 3 * stride, mask=inside, other=0.0))  # fmt: skip


@triton.jit
def load_positive_state(state_ptr, stride, at, inside):
    """Numbers of rows for the gradients of their positives: maximum, inverse sum, missing probability, and target."""
    return (tl.load(state_ptr + STATE_POSITIVE_TOP * stride + at, mask=inside, other=0.0),
            tl.load(state_ptr + POSITIVE_INVERSE * stride + at, mask=inside, other=0.0),
            tl.load(state_ptr + MISSING * stride + at, mask=inside, other=0.0),
            tl.load(state_ptr + POSITIVE_SHARE * stride + at, mask=inside, other=0.0))  # fmt: skip


@triton.jit
def store_stats(top, total, logit_sum, count, at, stride, inside, SUMS: tl.constexpr):
    """Store the statistics of negatives, or of positives, one stride apart in the order of losses/softmax.py."""
    tl.store(at, top, mask=inside)
    tl.store(at + stride, total, mask=inside)
    if SUMS:
        tl.store(at + 2 * stride, logit_sum, mask=inside)
        tl.store(at + 3 * stride, count, mask=inside)
