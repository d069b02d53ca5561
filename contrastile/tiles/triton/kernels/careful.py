"""Device code of the careful forms: maxima before exponentials, for features of any size.

Launched by `launch.py`. Both kernels return at once where the careful flag is not set:

    maxima              the careful form of `totals` in `forward.py`
    careful_gradient    the careful form of `gradient` in `backward.py`: an exponential per direction
"""

import triton
import triton.language as tl

from contrastile.tiles.triton.kernels.arithmetic import (
    ANY,
    CAREFUL,
    FACTOR,
    INVERSE,
    LN2,
    SHARE,
    STATE_TEACHER_TOP,
    STATE_TOP,
    TEACHER,
    TEACHER_INVERSE,
    TEACHERS,
    UNIT,
    count_along,
    finite,
    load_positive_state,
    merge_exponentials,
    merge_teachers,
    quarter,
    store_rows,
    store_stats,
)
from contrastile.tiles.triton.kernels.backward import program_sums, softmax_positive, sum_per_thread
from contrastile.tiles.triton.kernels.forward import store_quarters, tile_at, tile_products
from contrastile.tiles.triton.kernels.guides import aside, excluded_pairs, load_bits
from contrastile.tiles.triton.kernels.masks import store_listed, valid_pairs


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
def add_along(top, total, logit_sum, count, x, valid, axis: tl.constexpr, SUMS: tl.constexpr):
    """Statistics so far and those of x along `axis` together; the last two only with SUMS."""
    new_top, new_total = _max_and_sum(x, valid, axis)
    higher, both = merge_exponentials(top, total, new_top, new_total)
    if SUMS:
        safe = finite(higher)
        logit_sum += count * (finite(top) - safe) + _sum_below(x, valid, safe, axis)
        count += count_along(x, valid, axis)
    return higher, both, logit_sum, count


@triton.jit
def _teacher(x, t, valid, axis: tl.constexpr):
    """A teacher's statistics of the valid pairs along `axis`: top, sum, gap, and the top of x."""
    hidden = tl.where(valid, t, -float("inf"))
    top = tl.max(hidden, axis)
    x_top = tl.max(tl.where(valid, x, -float("inf")), axis)
    below = hidden - tl.expand_dims(finite(top), axis)
    share = tl.exp(below)
    apart = tl.where(valid, below - (x - tl.expand_dims(finite(x_top), axis)), 0.0)
    return top, tl.sum(share, axis), tl.sum(share * apart, axis), x_top


@triton.jit(do_not_specialize=ANY)
def maxima(q_mem, k_mem, guide_q_mem, guide_k_mem, constants_ptr, row_part_ptr, col_part_ptr, positives_ptr,
           bits_ptr, scratch_ptr, q_stride, k_stride, guide_q_stride, guide_k_stride, N, M, D, G, diagonal,
           self_diagonal, positives, positives_stride, positives_start, bits_stride, BM: tl.constexpr, BN: tl.constexpr,
           BK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PRODUCTS: tl.constexpr,
           GUIDE: tl.constexpr, GUIDE_LEFT: tl.constexpr, GUIDE_RIGHT: tl.constexpr, GUIDE_PRODUCTS: tl.constexpr,
           TMA: tl.constexpr, DIAGONAL: tl.constexpr, SELF: tl.constexpr, POSITIVES: tl.constexpr, BITS: tl.constexpr,
           COLUMNS: tl.constexpr, SMOOTH: tl.constexpr):  # fmt: skip
    """The careful form of `totals`. Runs where the careful flag is set.

    Per tile: top and Σ exp(x − top) of the negatives, with SMOOTH also Σ (x − top) and their number. With GUIDE ==
    TEACHER behind the first two the teacher's top, Σ exp(t − teacher's top) and the sum of these terms times
    (t − teacher's top) − (x − top). Layout as in `totals`.
    """
    masks = (diagonal, self_diagonal, positives_ptr, positives, positives_stride, positives_start)
    row_tiles = tl.cdiv(N, BM)
    col_tiles = tl.cdiv(M, BN)
    factor = tl.load(constants_ptr + FACTOR)
    if GUIDE == TEACHER:
        teacher_factor = tl.load(constants_ptr + TEACHERS + FACTOR)
    tiles = tl.where(tl.load(constants_ptr + CAREFUL) != 0, row_tiles * col_tiles, 0)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        i, j = tile_at(tile, row_tiles, col_tiles)
        acc = tile_products(
            q_mem, k_mem, q_stride, k_stride, D, guide_q_mem, guide_k_mem, guide_q_stride, guide_k_stride, G,
            scratch_ptr, i, j, N, M, BM, BN, BK, LEFT, RIGHT, PRODUCTS, GUIDE, GUIDE_LEFT, GUIDE_RIGHT, GUIDE_PRODUCTS,
            TMA)  # fmt: skip
        rows = i * BM + tl.arange(0, BM)
        WIDTH: tl.constexpr = BN // 4
        top = tl.full((BM,), -float("inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        logit_sum, count = total, total
        teacher_top, soft, gap = top, total, total
        words = load_bits(bits_ptr, bits_stride, i, j, BM, BITS)
        for at in tl.static_range(4):
            x = quarter(acc, at, BM, BN) * factor * LN2
            cols = j * BN + at * WIDTH + tl.arange(0, WIDTH)
            negative = valid_pairs(rows, cols, N, M, masks, DIAGONAL, SELF, POSITIVES)
            if BITS:
                negative = negative & (excluded_pairs(words, at * WIDTH, BM, WIDTH) == 0)
            before = top
            top, total, logit_sum, count = add_along(top, total, logit_sum, count, x, negative, 1, SMOOTH)
            if GUIDE == TEACHER:
                t = aside(scratch_ptr, at, BM, BN) * teacher_factor * LN2
                new_top, new_soft, new_gap, new_x_top = _teacher(x, t, negative, 1)
                teacher_top, soft, gap, _ = merge_teachers(
                    teacher_top, soft, gap, before, new_top, new_soft, new_gap, new_x_top)  # fmt: skip
            if COLUMNS:
                col_at = col_part_ptr + i.to(tl.int64) * M + cols
                stride = row_tiles.to(tl.int64) * M
                of_top, of_total = _max_and_sum(x, negative, 0)
                below, number = _sum_below(x, negative, of_top, 0), count_along(x, negative, 0)
                store_stats(of_top, of_total, below, number, col_at, stride, cols < M, SMOOTH)
                if GUIDE == TEACHER:
                    of_top, of_soft, of_gap, _ = _teacher(x, t, negative, 0)
                    store_rows((of_top, of_soft, of_gap), col_at + 2 * stride, stride, cols < M)
        row_at = row_part_ptr + j.to(tl.int64) * N + rows
        stride = col_tiles.to(tl.int64) * N
        store_stats(top, total, logit_sum, count, row_at, stride, rows < N, SMOOTH)
        if GUIDE == TEACHER:
            store_rows((teacher_top, soft, gap), row_at + 2 * stride, stride, rows < N)


@triton.jit
def softmax_gradient(x, t, positive, several, state_ptr, state_stride, coefficient_ptr, unit, at, inside, smoothing,
                     axis: tl.constexpr, LABELS: tl.constexpr, GUIDE: tl.constexpr):  # fmt: skip
    """One direction's gradient of every pair with the logits x, and t by a teacher, times `unit`: losses/softmax.py.

    several: the most positives of a row.
    """
    coefficient = tl.load(coefficient_ptr + at, mask=inside, other=0.0) * unit
    top = tl.load(state_ptr + STATE_TOP * state_stride + at, mask=inside, other=0.0)
    inverse = tl.load(state_ptr + INVERSE * state_stride + at, mask=inside, other=0.0)
    share = tl.load(state_ptr + SHARE * state_stride + at, mask=inside, other=0.0)
    value = tl.exp(x - tl.expand_dims(top, axis)) * tl.expand_dims(inverse, axis)
    if LABELS and several > 0:
        positive_top, positive_inverse, missing, target = load_positive_state(state_ptr, state_stride, at, inside)
        among = tl.exp(x - tl.expand_dims(positive_top, axis)) * tl.expand_dims(positive_inverse, axis)
        target, missing = tl.expand_dims(target, axis), tl.expand_dims(missing, axis)
        value = tl.where(positive, softmax_positive(among, target, missing, smoothing, False), value)
    if GUIDE == TEACHER:
        teacher_top = tl.load(state_ptr + STATE_TEACHER_TOP * state_stride + at, mask=inside, other=0.0)
        teacher_inverse = tl.load(state_ptr + TEACHER_INVERSE * state_stride + at, mask=inside, other=0.0)
        soft = tl.exp(t - tl.expand_dims(teacher_top, axis)) * tl.expand_dims(teacher_inverse, axis)
        value = value - soft * smoothing
    return (value - tl.expand_dims(share * smoothing, axis)) * tl.expand_dims(coefficient, axis)


@triton.jit(do_not_specialize=ANY)
def careful_gradient(q_mem, k_mem, guide_q_mem, guide_k_mem, out_mem, constants_ptr, row_state_ptr, row_coefficient_ptr,
                     col_state_ptr, col_coefficient_ptr, row_state_stride, col_state_stride, sums_ptr, positives_ptr,
                     listed_ptr, bits_ptr, scratch_ptr, q_stride, k_stride, guide_q_stride, guide_k_stride, N, M, D, G,
                     diagonal, self_diagonal, positives, positives_stride, positives_start, part_stride, out_stride,
                     bits_stride, smoothing, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr,
                     RIGHT: tl.constexpr, PRODUCTS: tl.constexpr, GUIDE: tl.constexpr, GUIDE_LEFT: tl.constexpr,
                     GUIDE_RIGHT: tl.constexpr, GUIDE_PRODUCTS: tl.constexpr, TMA: tl.constexpr, DIAGONAL: tl.constexpr,
                     SELF: tl.constexpr, POSITIVES: tl.constexpr, LISTED: tl.constexpr, BITS: tl.constexpr, COLUMNS:
                     tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The careful form of `gradient`: an exponential per direction."""
    masks = (diagonal, self_diagonal, positives_ptr, positives, positives_stride, positives_start)
    row_tiles = tl.cdiv(N, BM)
    col_tiles = tl.cdiv(M, BN)
    factor = tl.load(constants_ptr + FACTOR)
    if GUIDE == TEACHER:
        teacher_factor = tl.load(constants_ptr + TEACHERS + FACTOR)
    unit = tl.load(constants_ptr + UNIT)
    tiles = tl.where(tl.load(constants_ptr + CAREFUL) != 0, row_tiles * col_tiles, 0)
    sums_at = program_sums(sums_ptr, BM)
    sums = tl.load(sums_at)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        i, j = tile_at(tile, row_tiles, col_tiles)
        acc = tile_products(
            q_mem, k_mem, q_stride, k_stride, D, guide_q_mem, guide_k_mem, guide_q_stride, guide_k_stride, G,
            scratch_ptr, i, j, N, M, BM, BN, BK, LEFT, RIGHT, PRODUCTS, GUIDE, GUIDE_LEFT, GUIDE_RIGHT, GUIDE_PRODUCTS,
            TMA)  # fmt: skip
        if LISTED:
            store_listed(acc, listed_ptr, i, j, N, M, masks, BM, BN, DIAGONAL, POSITIVES)
        rows = i * BM + tl.arange(0, BM)
        WIDTH: tl.constexpr = BN // 4
        words = load_bits(bits_ptr, bits_stride, i, j, BM, BITS)
        for at in tl.static_range(4):
            part = quarter(acc, at, BM, BN)
            cols = j * BN + at * WIDTH + tl.arange(0, WIDTH)
            x = part * factor * LN2
            valid = valid_pairs(rows, cols, N, M, masks, DIAGONAL, SELF, POSITIVES)
            if BITS:
                valid = valid & (excluded_pairs(words, at * WIDTH, BM, WIDTH) == 0)
            t = x
            if GUIDE == TEACHER:
                t = aside(scratch_ptr, at, BM, BN) * teacher_factor * LN2
            g = softmax_gradient(x, t, valid, 0.0, row_state_ptr, row_state_stride, row_coefficient_ptr, unit, rows,
                                  rows < N, smoothing, 1, False, GUIDE)  # fmt: skip
            if COLUMNS:
                g += softmax_gradient(x, t, valid, 0.0, col_state_ptr, col_state_stride, col_coefficient_ptr, unit,
                                       cols, cols < M, smoothing, 0, False, GUIDE)  # fmt: skip
            g = tl.where(valid, g, 0.0)
            sums += sum_per_thread(g * part, BM, WIDTH)
            if at % 2 == 0:
                left = g
            else:
                store_quarters(out_mem, out_stride, left, g, i, j, at, part_stride, BM, BN, PARTS, TMA)
    tl.store(sums_at, sums)
