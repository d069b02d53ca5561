# mypy: ignore-errors
# device code: Triton compiles these functions from their source, their arguments have no Python types
"""The device code around `triton_kernels.py` whose work grows with N · D, not with N · M.

Launched by `triton_launch.py`: features prepared (split), the numbers of one call (norms, numbers), the tiles' sums
brought together in a fixed order (merge_sums, merge_maxima), and the gradient's vectors (prepare).
"""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.losses.softmax import SoftmaxStats
from contrastile.tiles.triton_kernels import (
    BIAS,
    CEILING,
    FACTOR,
    FLAG,
    INVERSE,
    LEAST,
    LOG2E,
    POISON,
    SCALE,
    SHARE,
    SHIFT,
    STATE_TOP,
    TOP,
    UNIT,
)

# log(2) in two: ten bits, and the rest
LN2_FIRST = tl.constexpr(0.693359375)
LN2_REST = tl.constexpr(-2.1219444005469057e-4)
# rows of a softmax's statistics
POSITIVE_TOP, LOGIT_SUM = (tl.constexpr(SoftmaxStats._fields.index(name)) for name in ("positive_top", "logit_sum"))
STATS = tl.constexpr(len(SoftmaxStats._fields))
# numbers that change from call to call: compiled once for all their values
ANY = ("n", "N", "M", "stride", "q_blocks", "blocks", "col_tiles", "row_tiles", "row_first", "row_last", "col_first",
       "col_last", "smoothing", "cut", "careful", "row_state_stride", "col_state_stride", "stats_row_stride",
       "stats_stride", "parts", "part_stride", "part_row_stride", "part_col_stride")  # fmt: skip


@triton.jit(do_not_specialize=ANY)
def split(x_ptr, out_ptr, n, D, row_stride, feature_stride, width, PARTS: tl.constexpr, ROWS: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """x [n, D] of any strides as PARTS 16-bit pieces that add up to it, side by side in [n, PARTS · width]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < n)[:, None] & (cols < D)[None, :]
    at = rows.to(tl.int64)[:, None] * row_stride + cols.to(tl.int64)[None, :] * feature_stride
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    target = rows.to(tl.int64)[:, None] * (PARTS * width) + cols[None, :]
    within = (rows < n)[:, None] & (cols < width)[None, :]
    for part in tl.static_range(PARTS):
        piece = x.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + target + part * width, piece, mask=within)
        x = x - piece.to(tl.float32)


@triton.jit(do_not_specialize=ANY)
def norms(q_ptr, k_ptr, out_ptr, N, M, D, q_row_stride, q_stride, k_row_stride, k_stride, q_blocks, blocks,
          ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """[2, blocks]: the largest squared norm of each block of rows, of q first and then of k; and Σ x · 0."""
    block = tl.program_id(0)
    ours = block < q_blocks
    x_ptr = tl.where(ours, q_ptr, k_ptr)
    n = tl.where(ours, N, M)
    row_stride = tl.where(ours, q_row_stride, k_row_stride)
    stride = tl.where(ours, q_stride, k_stride)
    rows = tl.where(ours, block, block - q_blocks) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), tl.float32)
    nothing = tl.zeros((ROWS,), tl.float32)
    for step in range(0, D, BLOCK):
        cols = step + tl.arange(0, BLOCK)
        at = rows.to(tl.int64)[:, None] * row_stride + cols.to(tl.int64)[None, :] * stride
        x = tl.load(x_ptr + at, mask=(rows < n)[:, None] & (cols < D)[None, :], other=0.0).to(tl.float32)
        total += tl.sum(x * x, 1)
        nothing += tl.sum(x * 0.0, 1)
    tl.store(out_ptr + block, tl.max(total))
    tl.store(out_ptr + blocks + block, tl.sum(nothing))


@triton.jit(do_not_specialize=ANY)
def numbers(norms_ptr, scale_ptr, bias_ptr, out_ptr, q_blocks, blocks, cut, careful, BIASED: tl.constexpr,
            SIGMOID: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The numbers of a call, see `triton_kernels.py`; for a softmax with a shift by which t ≤ CEILING."""
    at = tl.arange(0, BLOCK)
    q_most = tl.zeros((BLOCK,), tl.float32)
    k_most = tl.zeros((BLOCK,), tl.float32)
    nothing = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, blocks, BLOCK):
        block = step + at
        norm = tl.load(norms_ptr + block, mask=block < blocks, other=0.0)
        q_most = tl.maximum(q_most, tl.where(block < q_blocks, norm, 0.0))
        k_most = tl.maximum(k_most, tl.where(block < q_blocks, 0.0, norm))
        nothing += tl.load(norms_ptr + blocks + block, mask=block < blocks, other=0.0)
    scale = tl.load(scale_ptr)
    # in float64: what these are rounded by, every logit is off by
    binary = scale.to(tl.float64) * LOG2E
    bias = scale * 0.0
    if BIASED:
        bias = tl.load(bias_ptr)
    shift = (-bias.to(tl.float64) * LOG2E).to(tl.float32)
    if not SIGMOID:
        most = tl.abs(binary.to(tl.float32)) * tl.sqrt(tl.max(q_most)) * tl.sqrt(tl.max(k_most))
        # whole: see `_exact_top`
        shift = tl.ceil(tl.maximum(most - CEILING, 0.0))
    tl.store(out_ptr + FACTOR, (binary + binary * cut).to(tl.float32))
    tl.store(out_ptr + SHIFT, shift)
    tl.store(out_ptr + UNIT, 1.0)
    tl.store(out_ptr + BIAS, bias)
    tl.store(out_ptr + SCALE, scale)
    tl.store(out_ptr + FLAG, careful.to(tl.float32))
    tl.store(out_ptr + POISON, tl.sum(nothing) + scale * 0.0)


@triton.jit
def _summed(part_ptr, tiles, n, at, inside, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """Σ over the tiles of part [tiles, n], in a fixed order."""
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, tiles, TILES):
        tile = step + tl.arange(0, TILES)
        where = tile.to(tl.int64)[:, None] * n + at[None, :]
        total += tl.sum(tl.load(part_ptr + where, mask=(tile < tiles)[:, None] & inside[None, :], other=0.0), 0)
    return total


@triton.jit
def _exact_top(shift):
    """The shift as a natural logarithm, rounded, and exp of what rounding took off.

    Rounding alone would move every loss alike, by 4e-6 at a shift of 100. The first factor of log(2) has ten bits, so
    its product with a whole number has no rounding.
    """
    exact = shift * LN2_FIRST
    top = exact + shift * LN2_REST
    return top, 1.0 + ((exact - top) + shift * LN2_REST)


@triton.jit
def _merge_side(part_ptr, stats_ptr, stride, tiles, n, first, last, numbers_ptr, block, channel,
                SIGMOID: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = _summed(part_ptr + channel * tiles.to(tl.int64) * n, tiles, n, at, inside, BLOCK, TILES)
    row = channel
    if not SIGMOID:
        # channels are the total, the sum of the logits and the number of the pairs
        row = tl.where(channel == 0, 1, channel + 5)
        if channel == 0:
            top, correction = _exact_top(tl.load(numbers_ptr + SHIFT))
            total *= correction
            tl.store(stats_ptr + TOP * stride + at, tl.zeros((BLOCK,), tl.float32) + top, mask=inside)
            if first != 0:
                # of the positives nothing is known yet, nor of what only smoothing asks for
                tl.store(stats_ptr + POSITIVE_TOP * stride + at, tl.full((BLOCK,), -float("inf"), tl.float32), inside)
                for blank in range(POSITIVE_TOP + 1, tl.where(tl.num_programs(2) == 1, STATS, LOGIT_SUM)):
                    tl.store(stats_ptr + blank * stride + at, tl.zeros((BLOCK,), tl.float32), mask=inside)
    out = stats_ptr + row.to(tl.int64) * stride + at
    if first == 0:
        total += tl.load(out, mask=inside, other=0.0)
    tl.store(out, total, mask=inside)
    if not SIGMOID and channel == 0:
        low = tl.max((inside & (total < LEAST)).to(tl.int32))
        # all who write here write the same
        if (last != 0) & (low != 0):
            tl.store(numbers_ptr + FLAG, 1.0)


@triton.jit(do_not_specialize=ANY)
def merge_sums(row_part_ptr, row_stats_ptr, row_stride, col_tiles, N, row_first, row_last,
               col_part_ptr, col_stats_ptr, col_stride, row_tiles, M, col_first, col_last, numbers_ptr,
               SIGMOID: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """Adds a super-tile's sums to the statistics of its rows (program_id 1 = 0) and of its columns (1).

    Where a side has met its last column, a sum that is too low to be trusted raises the flag.
    """
    block = tl.program_id(0)
    channel = tl.program_id(2)
    if tl.program_id(1) == 0:
        _merge_side(row_part_ptr, row_stats_ptr, row_stride, col_tiles, N, row_first, row_last, numbers_ptr,
                    block, channel, SIGMOID, BLOCK, TILES)  # fmt: skip
    else:
        _merge_side(col_part_ptr, col_stats_ptr, col_stride, row_tiles, M, col_first, col_last, numbers_ptr,
                    block, channel, SIGMOID, BLOCK, TILES)  # fmt: skip


@triton.jit
def _merge_pair(part_ptr, stats_ptr, stride, tiles, n, first, at, inside, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """Merges (top, total) of all tiles into the statistics."""
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    if first == 0:
        top = tl.load(stats_ptr + at, mask=inside, other=-float("inf"))
        total = tl.load(stats_ptr + stride + at, mask=inside, other=0.0)
    totals_ptr = part_ptr + tiles.to(tl.int64) * n
    for step in range(0, tiles, TILES):
        tile = step + tl.arange(0, TILES)
        where = tile.to(tl.int64)[:, None] * n + at[None, :]
        there = (tile < tiles)[:, None] & inside[None, :]
        tops = tl.load(part_ptr + where, mask=there, other=-float("inf"))
        higher = tl.maximum(top, tl.max(tops, 0))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        parts = tl.load(totals_ptr + where, mask=there, other=0.0)
        total = total * tl.exp(top - safe) + tl.sum(parts * tl.exp(tops - safe[None, :]), 0)
        top = higher
    tl.store(stats_ptr + at, top, mask=inside)
    tl.store(stats_ptr + stride + at, total, mask=inside)


@triton.jit
def _merge_careful_side(part_ptr, stats_ptr, stride, tiles, n, first, block,
                        LABELS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    _merge_pair(part_ptr, stats_ptr, stride, tiles, n, first, at, inside, BLOCK, TILES)
    if LABELS:
        size = tiles.to(tl.int64) * n
        _merge_pair(part_ptr + 2 * size, stats_ptr + 2 * stride, stride, tiles, n, first, at, inside, BLOCK, TILES)
        for row in tl.static_range(4, 8):
            total = _summed(part_ptr + row * size, tiles, n, at, inside, BLOCK, TILES)
            out = stats_ptr + row * stride + at
            if first == 0:
                total += tl.load(out, mask=inside, other=0.0)
            tl.store(out, total, mask=inside)


@triton.jit(do_not_specialize=ANY)
def merge_maxima(numbers_ptr, row_part_ptr, row_stats_ptr, row_stride, col_tiles, N, row_first,
                 col_part_ptr, col_stats_ptr, col_stride, row_tiles, M, col_first,
                 LABELS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """The careful form of `merge_sums`: replaces what the fast form found. Runs where the flag is up."""
    if tl.load(numbers_ptr + FLAG) != 0:
        block = tl.program_id(0)
        if tl.program_id(1) == 0:
            _merge_careful_side(row_part_ptr, row_stats_ptr, row_stride, col_tiles, N, row_first, block,
                                LABELS, BLOCK, TILES)  # fmt: skip
        else:
            _merge_careful_side(col_part_ptr, col_stats_ptr, col_stride, row_tiles, M, col_first, block,
                                LABELS, BLOCK, TILES)  # fmt: skip


@triton.jit(do_not_specialize=ANY)
def merge_parts(stats_ptr, stats_row_stride, stats_stride, part_ptr, part_stride, part_row_stride,
                part_col_stride, parts, n, BLOCK: tl.constexpr):  # fmt: skip
    """Merges parts [parts, 8, n] of statistics, of disjoint sets of pairs, into those [8, n] of the same rows.

    Where program_id 1 is 0, the sum of exponentials and the sums over all pairs; where it is 1, what is known of the
    positives.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    kind = tl.program_id(1)
    # rows of (top, total), and of the two sums
    first = 2 * kind
    sums = tl.where(kind == 0, LOGIT_SUM, POSITIVE_TOP + 2)
    out = stats_ptr + at * stats_stride.to(tl.int64)
    here = part_ptr + at * part_col_stride.to(tl.int64)
    stats_row_stride = stats_row_stride.to(tl.int64)
    row_stride = part_row_stride.to(tl.int64)
    top = tl.load(out + first * stats_row_stride, mask=inside, other=-float("inf"))
    total = tl.load(out + (first + 1) * stats_row_stride, mask=inside, other=0.0)
    one = tl.load(out + sums * stats_row_stride, mask=inside, other=0.0)
    other = tl.load(out + (sums + 1) * stats_row_stride, mask=inside, other=0.0)
    for part in range(parts):
        source = here + part * part_stride.to(tl.int64)
        part_top = tl.load(source + first * row_stride, mask=inside, other=-float("inf"))
        part_total = tl.load(source + (first + 1) * row_stride, mask=inside, other=0.0)
        higher = tl.maximum(top, part_top)
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - safe) + part_total * tl.exp(part_top - safe)
        top = higher
        one += tl.load(source + sums * row_stride, mask=inside, other=0.0)
        other += tl.load(source + (sums + 1) * row_stride, mask=inside, other=0.0)
    tl.store(out + first * stats_row_stride, top, mask=inside)
    tl.store(out + (first + 1) * stats_row_stride, total, mask=inside)
    tl.store(out + sums * stats_row_stride, one, mask=inside)
    tl.store(out + (sums + 1) * stats_row_stride, other, mask=inside)


@triton.jit
def _prepare_side(state_ptr, stride, coefficient_ptr, numbers_ptr, weight_ptr, spread_ptr, n, smoothing,
                  SMOOTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    shift = tl.load(numbers_ptr + SHIFT)
    coefficient = tl.load(coefficient_ptr + at, mask=inside, other=0.0) * tl.load(numbers_ptr + UNIT)
    top = tl.load(state_ptr + STATE_TOP * stride + at, mask=inside, other=0.0) * LOG2E
    inverse = tl.load(state_ptr + INVERSE * stride + at, mask=inside, other=0.0)
    weight = tl.math.exp2(shift - top) * inverse
    low = tl.max((inside & (weight > 1.0 / LEAST)).to(tl.int32))
    # all who write here write the same
    if low != 0:
        tl.store(numbers_ptr + FLAG, 1.0)
    tl.store(weight_ptr + at, coefficient * weight, mask=inside)
    if SMOOTH:
        share = tl.load(state_ptr + SHARE * stride + at, mask=inside, other=0.0)
        tl.store(spread_ptr + at, coefficient * share * smoothing, mask=inside)


@triton.jit(do_not_specialize=ANY)
def prepare(row_state_ptr, row_state_stride, row_coefficient_ptr, N, col_state_ptr, col_state_stride,
            col_coefficient_ptr, M, numbers_ptr, out_ptr, smoothing, SMOOTH: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """Vectors for `gradient`, [2, N + M]: coefficient · exp(−top) · inverse under the shift, and what smoothing takes
    off.

    Both times the unit of a 16-bit strip. A sum of exponentials too low under the shift raises the flag. Rows where
    program_id 1 is 0, columns where it is 1.
    """
    if tl.program_id(1) == 0:
        _prepare_side(row_state_ptr, row_state_stride, row_coefficient_ptr, numbers_ptr, out_ptr,
                      out_ptr + N + M, N, smoothing, SMOOTH, BLOCK)  # fmt: skip
    else:
        _prepare_side(col_state_ptr, col_state_stride, col_coefficient_ptr, numbers_ptr, out_ptr + N,
                      out_ptr + 2 * N + M, M, smoothing, SMOOTH, BLOCK)  # fmt: skip
