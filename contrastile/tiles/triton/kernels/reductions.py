"""Device code whose work grows with N · D or with N, not with N · M.

Launched by `launch.py`, before, between and after the kernels of `forward.py` and `backward.py`:

    split_features, norms, block_constants     features as 16-bit pieces; the constants of a block
    inner_sums                                sums of products of two sides' rows
    merge_sums, merge_maxima, merge_parts     the tiles' sums brought together, in a fixed order

The end of a call is in `finish.py`.
"""

import triton
import triton.language as tl

from contrastile.tiles.triton.kernels.arithmetic import (
    ANY,
    BIAS,
    CAREFUL,
    FACTOR,
    GAP,
    HIGHEST,
    LIMIT,
    LN2,
    LOG2E,
    LOGIT_COUNT,
    LOGIT_SUM,
    LOWEST_SUM,
    MASK,
    NONFINITE,
    POSITIVE_FACTOR,
    POSITIVE_TOP,
    REST,
    SCALE,
    SHIFT,
    STATS,
    TEACHER,
    TEACHER_TOP,
    TEACHER_TOTAL,
    TEACHERS,
    TOP,
    TOTAL,
    UNIT,
    X_TOP,
    binade,
    finite,
    load_rows,
    load_stats,
    merge_exponentials,
    merge_teachers,
    one_side,
    shift_as_logarithm,
    steps_of_rows,
    store_stats,
)

# t of the middle of rows' largest logits, as estimated where norms allow far larger ones: between both limits of a sum
ESTIMATED = tl.constexpr(20.0)
# a larger sum has terms whose products could exceed float32, where no norm is their bound
HIGHEST_SUM = tl.constexpr(2.0**100)
# keys times the norms of features beyond which sums of such exponentials times features could exceed float32
MOST_EXPONENTIALS = tl.constexpr(2.0**27)


@triton.jit(do_not_specialize=ANY)
def split_features(x_ptr, out_ptr, order_ptr, n, D, row_stride, feature_stride, width, PARTS: tl.constexpr,
                   ORDERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Split x [n, D], of any strides, into PARTS 16-bit pieces that add up to it, side by side: [n, PARTS · width].

    ORDERED: the rows order[0], order[1], ... of x.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    source = rows.to(tl.int64)
    if ORDERED:
        source = tl.load(order_ptr + rows, mask=rows < n, other=0)
    if PARTS == 3:
        steps = steps_of_rows(x_ptr, source, D, row_stride, feature_stride, rows < n, ROWS, BLOCK)[:, None]
    for first in range(0, width, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        x = load_rows(x_ptr, source, first, D, row_stride, feature_stride, rows < n, BLOCK)
        out = rows.to(tl.int64)[:, None] * (PARTS * width) + cols[None, :]
        within = (rows < n)[:, None] & (cols < width)[None, :]
        for part in tl.static_range(PARTS):
            piece = x.to(out_ptr.dtype.element_ty)
            if part == 0 and PARTS == 3:
                piece = ((x + steps) - steps).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + out + part * width, piece, mask=within)
            x = x - piece.to(tl.float32)


@triton.jit(do_not_specialize=ANY)
def norms(q_ptr, k_ptr, out_ptr, N, M, D, q_row_stride, q_stride, k_row_stride, k_stride, q_blocks, blocks,
          ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """[2, blocks]: the largest squared norm of each block of rows, first of q, then of k; and Σ x · 0 of each."""
    block = tl.program_id(0)
    x_ptr, n, row_stride, stride, first = one_side(
        block < q_blocks, (q_ptr, N, q_row_stride, q_stride, 0),
        (k_ptr, M, k_row_stride, k_stride, q_blocks))  # fmt: skip
    rows = (block - first) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), tl.float32)
    zero = tl.zeros((ROWS,), tl.float32)
    for step in range(0, D, BLOCK):
        x = load_rows(x_ptr, rows, step, D, row_stride, stride, rows < n, BLOCK)
        total += tl.sum(x * x, 1)
        zero += tl.sum(x * 0.0, 1)
    tl.store(out_ptr + block, tl.max(total))
    tl.store(out_ptr + blocks + block, tl.sum(zero))


@triton.jit(do_not_specialize=ANY)
def inner_sums(q_ptr, k_ptr, out_ptr, N, D, q_row_stride, q_stride, k_row_stride, k_stride, ROWS: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """[blocks]: Σ ⟨q_i, k_i⟩ of each block of rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for step in range(0, D, BLOCK):
        q = load_rows(q_ptr, rows, step, D, q_row_stride, q_stride, rows < N, BLOCK)
        k = load_rows(k_ptr, rows, step, D, k_row_stride, k_stride, rows < N, BLOCK)
        total += q * k
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))


@triton.jit
def _high_product(q_ptr, k_ptr, N, M, D, q_row_stride, q_stride, k_row_stride, k_stride, PAIRS: tl.constexpr,
                  COLS: tl.constexpr):  # fmt: skip
    """The middle between the lowest and the highest of all rows' largest ⟨q, k⟩, estimated from some pairs.

    Most pairs are off the diagonal. Products above the mean have a mean and a deviation of their own, so that two
    groups of pairs, far from each other, do not widen it. Of M rows of M values of a normal distribution the middle
    lies around 2.2 + 0.3 · log2(M) of these deviations above this mean, the median of rows' largest values around
    1.0 + 0.3 · log2(M).
    """
    pair = tl.arange(0, PAIRS).to(tl.int64)
    row = pair * N // PAIRS
    col = (pair * M // PAIRS + M // 2) % M
    total = tl.zeros((PAIRS,), tl.float32)
    for step in range(0, D, COLS):
        q = load_rows(q_ptr, row, step, D, q_row_stride, q_stride, pair >= 0, COLS)
        k = load_rows(k_ptr, col, step, D, k_row_stride, k_stride, pair >= 0, COLS)
        total += tl.sum(q * k, 1)
    highest = tl.max(total)
    # the mean of equal products may be rounded above them
    above = total >= tl.minimum(tl.sum(total) / PAIRS, highest)
    number = tl.sum(above.to(tl.float32))
    mean = tl.sum(tl.where(above, total, 0.0)) / number
    variance = tl.sum(tl.where(above, (total - mean) * (total - mean), 0.0)) / number
    return tl.maximum(highest, mean + (2.2 + 0.3 * tl.log2(M.to(tl.float32))) * tl.sqrt(variance))


@triton.jit(do_not_specialize=ANY)
def block_constants(norms_ptr, scale_ptr, bias_ptr, out_ptr, q_ptr, k_ptr, N, M, D, q_row_stride, q_stride,
                    k_row_stride, k_stride, q_blocks, blocks, truncation, keys, least, far, hardness,
                    BIASED: tl.constexpr, SOFTPLUS: tl.constexpr, PAIRS: tl.constexpr, COLS: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """The constants of a block, as `arithmetic.py` numbers them; the shift of exponentials makes t ≤ HIGHEST.

    far: where norms allow larger logits in powers of 2, as of features that are not normalised, the shift is that of
    the largest logit that PAIRS pairs let expect, and a sum above HIGHEST_SUM sets the careful flag (`merge_sums`).

    keys: those of a block whose exponentials may be kept (`exponentials.py`), else 0: the careful flag is set where
    their sums times features could exceed float32. least: the flag is also set where all logits of negatives are closer
    to 0, in powers of 2.
    """
    at = tl.arange(0, BLOCK)
    q_norm = tl.zeros((BLOCK,), tl.float32)
    k_norm = tl.zeros((BLOCK,), tl.float32)
    zero = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, blocks, BLOCK):
        block = step + at
        norm = tl.load(norms_ptr + block, mask=block < blocks, other=0.0)
        q_norm = tl.maximum(q_norm, tl.where(block < q_blocks, norm, 0.0))
        k_norm = tl.maximum(k_norm, tl.where(block < q_blocks, 0.0, norm))
        zero += tl.load(norms_ptr + blocks + block, mask=block < blocks, other=0.0)
    scale = tl.load(scale_ptr)
    # in float64, because every logit has their rounding error; negatives have the weight exp(hardness · ⟨q, k⟩)
    positive_binary = scale.to(tl.float64) * LOG2E
    binary = positive_binary + hardness * LOG2E
    bias = scale * 0.0
    if BIASED:
        bias = tl.load(bias_ptr)
    offset = -bias.to(tl.float64) * LOG2E
    shift = offset.to(tl.float32)
    limit = scale * 0.0 + float("inf")
    factor = (binary + binary * truncation).to(tl.float32)
    # t is exactly 0 where the logit is
    rounding = tl.where(offset == 0, 1.0, shift.to(tl.float64) / tl.where(offset == 0, 1.0, offset))
    rest = (binary + binary * truncation) * rounding - factor.to(tl.float64)
    if not SOFTPLUS:
        # a negative scale may be closer to 0 with the weights
        product = tl.sqrt(tl.max(q_norm)) * tl.sqrt(tl.max(k_norm))
        of_negatives = tl.abs(binary.to(tl.float32)) * product
        largest = tl.maximum(of_negatives, tl.abs(positive_binary.to(tl.float32)) * product)
        # a whole number, for `shift_as_logarithm`
        shift = tl.ceil(tl.maximum(largest - HIGHEST, 0.0))
        # not where products overflow
        if (largest > far) & (largest < 1e18):
            high = _high_product(
                q_ptr, k_ptr, N, M, D, q_row_stride, q_stride, k_row_stride, k_stride, PAIRS, COLS)  # fmt: skip
            shift = tl.minimum(shift, tl.ceil(tl.maximum(high * binary.to(tl.float32) - ESTIMATED, 0.0)))
            limit = scale * 0.0 + HIGHEST_SUM
    tl.store(out_ptr + LIMIT, limit)
    tl.store(out_ptr + FACTOR, factor)
    tl.store(out_ptr + POSITIVE_FACTOR, (positive_binary + positive_binary * truncation).to(tl.float32))
    tl.store(out_ptr + REST, rest.to(tl.float32))
    tl.store(out_ptr + SHIFT, shift)
    tl.store(out_ptr + UNIT, 1.0)
    tl.store(out_ptr + BIAS, bias)
    tl.store(out_ptr + SCALE, scale)
    size = tl.sqrt(tl.max(k_norm)) * tl.maximum(1.0, tl.sqrt(tl.max(q_norm)))
    careful = keys.to(tl.float32) * size > MOST_EXPONENTIALS
    if not SOFTPLUS:
        careful = careful | (of_negatives < least)
    tl.store(out_ptr + CAREFUL, tl.where(careful, 1.0, 0.0))
    tl.store(out_ptr + NONFINITE, tl.sum(zero) + scale * 0.0)


@triton.jit
def _load_channel(part_ptr, channel, tiles, step, n, at, inside, TILES: tl.constexpr, other: tl.constexpr = 0.0):
    """[TILES, BLOCK] of a channel of part [channels, tiles, n]."""
    tile = step + tl.arange(0, TILES)
    at_tile = (channel * tiles.to(tl.int64) + tile[:, None]) * n + at[None, :]
    return tl.load(part_ptr + at_tile, mask=(tile < tiles)[:, None] & inside[None, :], other=other)


@triton.jit
def _merge_logits(part_ptr, tiles, step, n, at, inside, whole, logit_sum, count, TILES: tl.constexpr):
    """Add the tiles' sums of logits and their number, behind their exponentials; see `_store_logits`."""
    counts = _load_channel(part_ptr, 2, tiles, step, n, at, inside, TILES)
    lift = binade(_load_channel(part_ptr, 0, tiles, step, n, at, inside, TILES)) - whole[None, :]
    sums = _load_channel(part_ptr, 1, tiles, step, n, at, inside, TILES) + counts * lift
    return logit_sum + tl.sum(sums, 0), count + tl.sum(counts, 0)


@triton.jit
def _load_logits(stats_ptr, stride, at, inside, before, whole):
    """Sum of logits so far, relative to a new binade, and their number; each one stride behind the other."""
    count = tl.load(stats_ptr + stride + at, mask=inside, other=0.0)
    logit_sum = tl.load(stats_ptr + at, mask=inside, other=0.0)
    return logit_sum + count * (binade(before) - whole), count


@triton.jit(do_not_specialize=ANY)
def merge_sums(row_part_ptr, row_stats_ptr, row_stride, col_tiles, N, row_first, row_last, col_part_ptr, col_stats_ptr,
               col_stride, row_tiles, M, col_first, col_last, constants_ptr, SOFTPLUS: tl.constexpr,
               SMOOTH: tl.constexpr, GUIDE: tl.constexpr, LATER: tl.constexpr, BLOCK: tl.constexpr,
               TILES: tl.constexpr):  # fmt: skip
    """Add a super-tile's sums to the statistics of its rows (program_id 1 = 0) and of its columns (1).

    After the last super-tile of a side, a sum too low or too high to be trusted sets the careful flag. LATER: a
    teacher's gap comes with the backward, see `Gap` in `guided.py`; a sum of logits and their number have room for the
    lift and the teacher's sum under the shift.
    """
    part_ptr, stats_ptr, stride, tiles, n, first, last = one_side(
        tl.program_id(1) == 0, (row_part_ptr, row_stats_ptr, row_stride, col_tiles, N, row_first, row_last),
        (col_part_ptr, col_stats_ptr, col_stride, row_tiles, M, col_first, col_last))  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, tiles, TILES):
        total += tl.sum(_load_channel(part_ptr, 0, tiles, step, n, at, inside, TILES), 0)
    out = stats_ptr + at
    if not SOFTPLUS:
        out += TOTAL * stride
    before = tl.zeros((BLOCK,), tl.float32)
    if first == 0:
        before = tl.load(out, mask=inside, other=0.0)
    total += before
    if not SOFTPLUS:
        logit_sum = tl.zeros((BLOCK,), tl.float32)
        count = tl.zeros((BLOCK,), tl.float32)
        whole = binade(total)
        if SMOOTH:
            if first == 0:
                logit_sum, count = _load_logits(stats_ptr + LOGIT_SUM * stride, stride, at, inside, before, whole)
            for step in range(0, tiles, TILES):
                logit_sum, count = _merge_logits(part_ptr, tiles, step, n, at, inside, whole, logit_sum, count, TILES)
        lowest = total
        excess = total > tl.load(constants_ptr + LIMIT)
        if GUIDE == TEACHER:
            soft = tl.zeros((BLOCK,), tl.float32)
            gap = tl.zeros((BLOCK,), tl.float32)
            if first == 0:
                soft = tl.load(stats_ptr + TEACHER_TOTAL * stride + at, mask=inside, other=0.0)
                gap = tl.load(stats_ptr + GAP * stride + at, mask=inside, other=0.0)
            for step in range(0, tiles, TILES):
                soft += tl.sum(_load_channel(part_ptr, 1, tiles, step, n, at, inside, TILES), 0)
                if not LATER:
                    gap += tl.sum(_load_channel(part_ptr, 2, tiles, step, n, at, inside, TILES), 0)
            lowest = tl.minimum(lowest, soft)
            excess = excess | (soft > tl.load(constants_ptr + TEACHERS + LIMIT))
        if last != 0:
            low = lowest < LOWEST_SUM
            if GUIDE == MASK:
                low = low & (lowest > 0)
            # every program writes the same value
            if tl.max((inside & (low | excess)).to(tl.int32)) != 0:
                tl.store(constants_ptr + CAREFUL, 1.0)
            # from powers of two to a maximum, near which logarithms and sums are small
            top, error = shift_as_logarithm(tl.load(constants_ptr + SHIFT) + whole)
            if GUIDE == TEACHER:
                soft_whole = binade(soft)
                soft_top, soft_error = shift_as_logarithm(tl.load(constants_ptr + TEACHERS + SHIFT) + soft_whole)
                lift = soft_whole - whole
                if LATER:
                    logit_sum, count = lift, soft
                else:
                    gap = (gap - soft * lift) * LN2
                gap += soft * (soft_error - error)
                soft *= tl.math.exp2(-soft_whole)
                gap *= tl.math.exp2(-soft_whole)
                soft = tl.fma(soft, soft_error, soft)
                gap = tl.fma(gap, soft_error, gap)
                tl.store(stats_ptr + TEACHER_TOP * stride + at, soft_top, mask=inside)
                tl.store(stats_ptr + X_TOP * stride + at, top, mask=inside)
            if GUIDE == MASK:
                # of no pair, whatever the shift is: another block's top may lie far below it
                top = tl.where(total == 0, -float("inf"), top)
            total *= tl.math.exp2(-whole)
            # rounded once: an error of the factor 1 + error would be the same in all rows
            total = tl.fma(total, error, total)
            if SMOOTH:
                logit_sum = logit_sum * LN2 + count * error
            tl.store(stats_ptr + TOP * stride + at, top, mask=inside)
        if first != 0:
            # `positive_totals`, `add_to_totals` or `label_totals` fills the positives' rows later
            tl.store(stats_ptr + POSITIVE_TOP * stride + at, tl.full((BLOCK,), -float("inf"), tl.float32), inside)
            for blank in range(POSITIVE_TOP + 1, STATS):
                tl.store(stats_ptr + blank * stride + at, tl.zeros((BLOCK,), tl.float32), mask=inside)
        tl.store(stats_ptr + LOGIT_SUM * stride + at, logit_sum, mask=inside)
        tl.store(stats_ptr + LOGIT_COUNT * stride + at, count, mask=inside)
        if GUIDE == TEACHER:
            tl.store(stats_ptr + TEACHER_TOTAL * stride + at, soft, mask=inside)
            tl.store(stats_ptr + GAP * stride + at, gap, mask=inside)
    tl.store(out, total, mask=inside)


@triton.jit
def _merge_half(part_ptr, stats_ptr, stride, tiles, n, first, at, inside, SUMS: tl.constexpr, BLOCK: tl.constexpr,
                TILES: tl.constexpr):  # fmt: skip
    """Merge all tiles' statistics of the negatives, or of the positives, into those of a side."""
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    logit_sum, count = total, total
    if first == 0:
        top, total, logit_sum, count = load_stats(stats_ptr + at, stride, inside)
    for step in range(0, tiles, TILES):
        tops = _load_channel(part_ptr, 0, tiles, step, n, at, inside, TILES, -float("inf"))
        higher = tl.maximum(top, tl.max(tops, 0))
        safe = finite(higher)
        parts = _load_channel(part_ptr, 1, tiles, step, n, at, inside, TILES)
        total = total * tl.exp(top - safe) + tl.sum(parts * tl.exp(tops - safe[None, :]), 0)
        if SUMS:
            counts = _load_channel(part_ptr, 3, tiles, step, n, at, inside, TILES)
            sums = _load_channel(part_ptr, 2, tiles, step, n, at, inside, TILES)
            sums += counts * (finite(tops) - safe[None, :])
            logit_sum += count * (finite(top) - safe) + tl.sum(sums, 0)
            count += tl.sum(counts, 0)
        top = higher
    store_stats(top, total, logit_sum, count, stats_ptr + at, stride, inside, True)


@triton.jit
def _merge_teacher(part_ptr, out, stride, tiles, n, first, at, inside, BLOCK: tl.constexpr):
    """Merge all tiles' statistics of a teacher into those of a side, one tile after the other."""
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    x_top = top
    total = tl.zeros((BLOCK,), tl.float32)
    gap = total
    if first == 0:
        top, total, gap, x_top = load_stats(out, stride, inside, 0.0)
    channel = tiles.to(tl.int64) * n
    tile_at = part_ptr + at
    for _ in range(tiles):
        top, total, gap, x_top = merge_teachers(
            top, total, gap, x_top, tl.load(tile_at + 2 * channel, mask=inside, other=0.0),
            tl.load(tile_at + 3 * channel, mask=inside, other=0.0),
            tl.load(tile_at + 4 * channel, mask=inside, other=0.0),
            tl.load(tile_at, mask=inside, other=0.0))  # fmt: skip
        tile_at += n
    store_stats(top, total, gap, x_top, out, stride, inside, True)


@triton.jit(do_not_specialize=ANY)
def merge_maxima(constants_ptr, row_part_ptr, row_stats_ptr, row_stride, col_tiles, N, row_first, col_part_ptr,
                 col_stats_ptr, col_stride, row_tiles, M, col_first, SMOOTH: tl.constexpr, GUIDE: tl.constexpr,
                 BLOCK: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """The careful form of `merge_sums`, which replaces its results. Runs where the careful flag is set."""
    if tl.load(constants_ptr + CAREFUL) != 0:
        part_ptr, stats_ptr, stride, tiles, n, first = one_side(
            tl.program_id(1) == 0, (row_part_ptr, row_stats_ptr, row_stride, col_tiles, N, row_first),
            (col_part_ptr, col_stats_ptr, col_stride, row_tiles, M, col_first))  # fmt: skip
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        _merge_half(part_ptr, stats_ptr, stride, tiles, n, first, at, inside, SMOOTH, BLOCK, TILES)
        if GUIDE == TEACHER:
            _merge_teacher(part_ptr, stats_ptr + TEACHER_TOP * stride + at, stride, tiles, n, first, at, inside, BLOCK)


@triton.jit(do_not_specialize=ANY)
def merge_parts(stats_ptr, stats_row_stride, stats_stride, part_ptr, part_stride, part_row_stride, part_col_stride,
                parts, n, BLOCK: tl.constexpr):  # fmt: skip
    """Merge parts [parts, 8, n] of statistics, of disjoint sets of pairs, into those [8, n] of the same rows.

    program_id 1 = 0 merges those of the negatives, 1 those of the positives.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    half = 4 * tl.program_id(1)
    stats_row_stride = stats_row_stride.to(tl.int64)
    row_stride = part_row_stride.to(tl.int64)
    out = stats_ptr + at * stats_stride.to(tl.int64) + half * stats_row_stride
    parts_at = part_ptr + at * part_col_stride.to(tl.int64) + half * row_stride
    top, total, logit_sum, count = load_stats(out, stats_row_stride, inside)
    for part in range(parts):
        source = parts_at + part * part_stride.to(tl.int64)
        part_top, part_total, part_sum, part_count = load_stats(source, row_stride, inside)
        higher, total = merge_exponentials(top, total, part_top, part_total)
        safe = finite(higher)
        logit_sum += part_sum
        logit_sum += count * (finite(top) - safe) + part_count * (finite(part_top) - safe)
        count += part_count
        top = higher
    store_stats(top, total, logit_sum, count, out, stats_row_stride, inside, True)
