"""Device code of the backward: a super-tile's gradient as one 16-bit strip, and the end of a call.

Launched by `launch.py`. Products, masks and constants are those of `forward.py`:

    direction_weights    the vectors that `gradient` reads: each row's and column's part of its pairs' gradients
    gradient             one exponential per pair; each tile's gradient is one part of the strip
    scaled               accumulators to gradients

The gradient kernels, also those of `careful.py` and `positions.py`, return the terms of the scale's gradient.
Programs never wait for each other.
"""

import triton
import triton.language as tl

from contrastile.tiles.triton.kernels.arithmetic import (
    ANY,
    CAREFUL,
    FAINT,
    INTERPRETED,
    INVERSE,
    LN2,
    LOG2E,
    LOWEST_SUM,
    MASK,
    SHARE,
    SHIFT,
    STATE_TEACHER_TOP,
    STATE_TOP,
    TEACHER,
    TEACHER_INVERSE,
    TEACHERS,
    UNIT,
    exponent_constants,
    exponents,
    halves,
    load_positive_state,
    log2,
    one_side,
    quarter,
    sum_per_lane,
)
from contrastile.tiles.triton.kernels.forward import (
    load_quarters,
    products,
    softplus_sum,
    store_half,
    store_quarters,
    tile_at,
)
from contrastile.tiles.triton.kernels.guides import aside, excluded_pairs, has_bits, load_bits, set_aside
from contrastile.tiles.triton.kernels.masks import has_masked, store_listed, valid_pairs


@triton.jit
def probability_factor(top, inverse, shift):
    """exp(−top) · inverse under the shift.

    In float64, and the whole part apart: a rounding error of their size would be in every gradient of the row.
    """
    power = shift - top.to(tl.float64) * LOG2E
    whole = tl.floor(power)
    return tl.math.exp2(whole.to(tl.float32)) * (tl.exp((power - whole) * LN2) * inverse).to(tl.float32)


@triton.jit
def _positive_vectors(state_ptr, stride, at, inside, shift, smoothing, SMOOTH: tl.constexpr, INSIDE: tl.constexpr):
    """The factor of 2^t and the value subtracted from it, for gradients of positives: `softmax_positive` as a line.

    A single positive has factor 0: its exponential and the subtracted value would cancel.
    """
    top, inverse, missing, target = load_positive_state(state_ptr, stride, at, inside)
    if INSIDE:
        share = smoothing - missing
        taken = missing * 0.0
    else:
        share = 1.0 - missing
        taken = target * (1.0 - smoothing)
    # in float64, whose range no factor leaves
    among = tl.exp((shift - top.to(tl.float64) * LOG2E) * LN2) * inverse
    slope = tl.where(target == 1.0, 0.0, among * share).to(tl.float32)
    taken = tl.where(target == 1.0, missing - smoothing, taken)
    if SMOOTH:
        taken += tl.load(state_ptr + SHARE * stride + at, mask=inside, other=0.0) * smoothing
    return slope, taken


@triton.jit(do_not_specialize=ANY)
def direction_weights(row_state_ptr, row_state_stride, row_coefficient_ptr, N, col_state_ptr, col_state_stride,
                      col_coefficient_ptr, M, constants_ptr, row_lift_ptr, col_lift_ptr, lack_ptr, out_ptr, smoothing,
                      step, SMOOTH: tl.constexpr, GUIDE: tl.constexpr, LATER: tl.constexpr, INSIDE: tl.constexpr,
                      LABELS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the vectors of `gradient`, times the unit of the strip: [2, step], those of the columns behind the rows'.

    Zeros follow up to whole blocks of each side: `gradient` reads them without a mask, and so two numbers at once.

    First coefficient · exp(−top) · inverse under the shift, then the part that smoothing subtracts, or the like factor
    of a teacher's exponentials. A sum of exponentials too low under the shift sets the careful flag. LATER: also the
    part of a teacher's gap from the sums of `merge_sums`, [N + M]. program_id 1 = 0 computes rows, 1 columns.

    LABELS: then two vectors of the positives by label, whose gradient is 2^t times the first less the second.
    """
    state_ptr, stride, coefficient_ptr, lift_ptr, n, begin, first = one_side(
        tl.program_id(1) == 0, (row_state_ptr, row_state_stride, row_coefficient_ptr, row_lift_ptr, N, 0, 0),
        (col_state_ptr, col_state_stride, col_coefficient_ptr, col_lift_ptr, M, N, tl.cdiv(N, BLOCK) * BLOCK),
    )  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    weight_at = out_ptr + first + at
    inside = at < n
    exists = at < tl.cdiv(n, BLOCK) * BLOCK
    shift = tl.load(constants_ptr + SHIFT)
    coefficient = tl.load(coefficient_ptr + at, mask=inside, other=0.0) * tl.load(constants_ptr + UNIT)
    top = tl.load(state_ptr + STATE_TOP * stride + at, mask=inside, other=0.0)
    weight = probability_factor(top, tl.load(state_ptr + INVERSE * stride + at, mask=inside, other=0.0), shift)
    # a sum that the forward trusts stays trusted where its inverse is rounded
    low = tl.max((inside & (weight > 2.0 / LOWEST_SUM)).to(tl.int32))
    if GUIDE == TEACHER:
        top = tl.load(state_ptr + STATE_TEACHER_TOP * stride + at, mask=inside, other=0.0)
        inverse = tl.load(state_ptr + TEACHER_INVERSE * stride + at, mask=inside, other=0.0)
        soft = probability_factor(top, inverse, tl.load(constants_ptr + TEACHERS + SHIFT))
        low += tl.max((inside & (soft > 2.0 / LOWEST_SUM)).to(tl.int32))
        soft *= coefficient * smoothing
        tl.store(weight_at + step, tl.where(inside, soft, 0.0), mask=exists)
        if LATER:
            lift = tl.load(lift_ptr + at, mask=inside, other=0.0)
            total = tl.load(lift_ptr + at + n, mask=inside, other=0.0)
            # the careful kernels write 0: their gap is complete
            lack = tl.where(total == 0, 0.0, (soft * total) * (shift - lift))
            tl.store(lack_ptr + begin + at, lack, mask=inside)
    if LABELS:
        slope, taken = _positive_vectors(state_ptr, stride, at, inside, shift, smoothing, SMOOTH, INSIDE)
        low += tl.max((inside & (tl.abs(slope) > 2.0 / LOWEST_SUM)).to(tl.int32))
        behind = weight_at + (2 if SMOOTH else 1) * step
        tl.store(behind, coefficient * slope, mask=inside)
        tl.store(behind + step, coefficient * taken, mask=inside)
    # every program writes the same value
    if low != 0:
        tl.store(constants_ptr + CAREFUL, 1.0)
    tl.store(weight_at, tl.where(inside, coefficient * weight, 0.0), mask=exists)
    if SMOOTH:
        share = tl.load(state_ptr + SHARE * stride + at, mask=inside, other=0.0)
        tl.store(weight_at + step, coefficient * share * smoothing, mask=exists)


@triton.jit
def _reciprocal(x):
    """1 / x for x from 1 to 4, in one instruction; a general division takes six."""
    if INTERPRETED:
        inverse = 1.0 / x
    else:
        inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f, f", [x], dtype=tl.float32, is_pure=True,
                                            pack=1)  # fmt: skip
    return inverse


@triton.jit
def sum_per_thread(x, BM: tl.constexpr, WIDTH: tl.constexpr):
    """Partial sums of x as [BM // 32, 8, 4]: one number per thread."""
    lanes = sum_per_lane(x, BM, WIDTH)
    return tl.sum(tl.sum(tl.reshape(lanes, (2, BM // 32, 2, 8, 4)), 0), 1)


@triton.jit
def program_sums(sums_ptr, BM: tl.constexpr):
    """Addresses of this program's own partial sums, in the layout of `sum_per_thread`."""
    group = tl.arange(0, BM // 32)[:, None, None] * 8 + tl.arange(0, 8)[None, :, None]
    return sums_ptr + tl.program_id(0) * BM + group * 4 + tl.arange(0, 4)[None, None, :]


@triton.jit
def _teacher_tile(acc, teachers, masks, words, c_ptr, d_ptr, scratch_ptr, i, j, N, M, BM: tl.constexpr,
                  BN: tl.constexpr, DIAGONAL: tl.constexpr, SELF: tl.constexpr, POSITIVES: tl.constexpr,
                  BITS: tl.constexpr, COLUMNS: tl.constexpr, LATER: tl.constexpr,
                  PRODUCTS: tl.constexpr):  # fmt: skip
    """Set 2^t · (c_i + d_j) of a teacher's tile aside, before the student's product needs the registers.

    LATER: returns Σ 2^t · (c_i + d_j) · t per thread.
    """
    WIDTH: tl.constexpr = BN // 4
    rows = i * BM + tl.arange(0, BM)
    masked = has_masked(i, j, N, M, masks, BM, BN, DIAGONAL, SELF, POSITIVES)
    if BITS:
        masked = masked | has_bits(words)
    c = tl.load(c_ptr + rows)[:, None]
    gaps = 0.0
    for at in tl.static_range(4):
        cols = j * BN + at * WIDTH + tl.arange(0, WIDTH)
        t = exponents(quarter(acc, at, BM, BN), teachers, False, PRODUCTS)
        f = tl.math.exp2(t)
        if masked:
            valid = valid_pairs(rows, cols, N, M, masks, DIAGONAL, SELF, POSITIVES)
            if BITS:
                valid = valid & (excluded_pairs(words, at * WIDTH, BM, WIDTH) == 0)
            f = tl.where(valid, f, 0.0)
        if COLUMNS:
            f = f * (c + tl.load(d_ptr + cols)[None, :])
        else:
            f = f * c
        set_aside(scratch_ptr, f, at, BM, BN)
        if LATER:
            gap = sum_per_thread(f * t, BM, WIDTH)
            # not added to zeros, which have another layout
            gaps = gap if at == 0 else gaps + gap
    return gaps


@triton.jit(do_not_specialize=ANY)
def gradient(q_mem, k_mem, guide_q_mem, guide_k_mem, out_mem, constants_ptr, row_a_ptr, col_b_ptr, sums_ptr,
             row_part_ptr, positives_ptr, listed_ptr, bits_ptr, scratch_ptr, q_stride, k_stride, guide_q_stride,
             guide_k_stride, N, M, D, G, diagonal, self_diagonal, positives, positives_stride, positives_start,
             part_stride, out_stride, bits_stride, vectors_step, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
             LEFT: tl.constexpr, RIGHT: tl.constexpr, PRODUCTS: tl.constexpr, GUIDE: tl.constexpr,
             GUIDE_LEFT: tl.constexpr, GUIDE_RIGHT: tl.constexpr, GUIDE_PRODUCTS: tl.constexpr, TMA: tl.constexpr,
             DIAGONAL: tl.constexpr, SELF: tl.constexpr, POSITIVES: tl.constexpr, LISTED: tl.constexpr,
             BITS: tl.constexpr, COLUMNS: tl.constexpr, SOFTPLUS: tl.constexpr, SMOOTH: tl.constexpr,
             LOSS: tl.constexpr, KEPT: tl.constexpr, PARTS: tl.constexpr, FLATTEN: tl.constexpr):  # fmt: skip
    """Write the gradient of the valid pairs, 2^t · (a_i + b_j) − (c_i + d_j), into the strip [PARTS, N, M].

    SMOOTH subtracts c and d, GUIDE == TEACHER their product with a teacher's exponentials. SOFTPLUS writes a_i · σ(x);
    with LOSS it also writes the sums of `totals`. Where the careful flag is set, the strip is left to
    `careful_gradient`. Each program adds Σ g · ⟨q, k⟩ of its tiles, or Σ g with SOFTPLUS, to its own row of `sums`
    [programs, BM]. LISTED also writes the products of positives, see `store_listed`.

    With KEPT the strip holds a teacher's exponentials, as `exponential_tile` has rounded them, 0 where a pair does not
    count: each tile is read before it is written.

    With a teacher's t and the student's x, LOSS also adds Σ 2^t · (c_i + d_j) · (t − x) to the program's number in
    `row_part` [programs], without the shift of x, which `direction_weights` adds: see `Gap` in `guided.py`.

    Of another exponential with LOSS, in one direction, the strip holds 2^t alone, for a backward that knows a later:
    see `exponentials.py`. Each tile's Σ 2^t and Σ 2^t · ⟨q, k⟩ along rows go to `row_part` [2, col tiles, N].

    A softmax's tile is processed in quarters: the products stay in registers until their gradients are known, and
    spilling them costs more than all else. A teacher's tile becomes a gradient before the student's product begins.
    """
    # whole blocks, see `direction_weights`
    vectors_step = tl.multiple_of(vectors_step, 16)
    masks = (diagonal, self_diagonal, positives_ptr, positives, positives_stride, positives_start)
    row_tiles = tl.cdiv(N, BM)
    col_tiles = tl.cdiv(M, BN)
    constants = exponent_constants(constants_ptr)
    if GUIDE == TEACHER:
        teachers = exponent_constants(constants_ptr + TEACHERS)
    tiles = tl.where(tl.load(constants_ptr + CAREFUL) == 0, row_tiles * col_tiles, 0)
    KEEP: tl.constexpr = LOSS and GUIDE != TEACHER
    LATER: tl.constexpr = LOSS and GUIDE == TEACHER
    sums_at = program_sums(sums_ptr, BM)
    sums = tl.load(sums_at)
    if LATER:
        gaps_at = row_part_ptr + tl.program_id(0)
        before = tl.load(gaps_at)
        gaps = sums * 0.0
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        i, j = tile_at(tile, row_tiles, col_tiles)
        rows = i * BM + tl.arange(0, BM)
        words = load_bits(bits_ptr, bits_stride, i, j, BM, BITS)
        if GUIDE == TEACHER and not KEPT:
            acc = products(guide_q_mem, guide_k_mem, guide_q_stride, guide_k_stride, i, j, N, M, G, BM, BN, BK,
                           GUIDE_LEFT, GUIDE_RIGHT, GUIDE_PRODUCTS, TMA)  # fmt: skip
            gap = _teacher_tile(
                acc, teachers, masks, words, row_a_ptr + vectors_step, col_b_ptr + vectors_step, scratch_ptr, i, j, N,
                M, BM, BN, DIAGONAL, SELF, POSITIVES, BITS, COLUMNS, LATER, GUIDE_PRODUCTS)  # fmt: skip
            if LATER:
                gaps += gap
        acc = products(q_mem, k_mem, q_stride, k_stride, i, j, N, M, D, BM, BN, BK, LEFT, RIGHT, PRODUCTS, TMA)
        if SOFTPLUS:
            a = tl.load(row_a_ptr + rows, mask=rows < N, other=0.0)[:, None]
        elif not KEEP:
            a = tl.load(row_a_ptr + rows)[:, None]
        masked = has_masked(i, j, N, M, masks, BM, BN, DIAGONAL, SELF, POSITIVES)
        if GUIDE == TEACHER and BITS:
            masked = masked | has_bits(words)
        if LISTED:  # noqa: SIM102 - known when compiled
            if masked:
                store_listed(acc, listed_ptr, i, j, N, M, masks, BM, BN, DIAGONAL, POSITIVES)
        if SOFTPLUS:
            cols = j * BN + tl.arange(0, BN)
            t = exponents(acc, constants, SOFTPLUS, PRODUCTS)
            if BITS:
                t = tl.where(excluded_pairs(words, 0, BM, BN), -float("inf"), t)
            if masked:
                t = tl.where(valid_pairs(rows, cols, N, M, masks, DIAGONAL, SELF, POSITIVES), t, -float("inf"))
            if LOSS:
                loss = softplus_sum(t, BM, BN)
                tl.store(row_part_ptr + j.to(tl.int64) * N + rows, loss, mask=rows < N)
            # recomputed: the loss's exponential would not fit the registers
            g = a * _reciprocal(1.0 + tl.math.exp2(t * -1.0))
            added = sum_per_thread(g, BM, BN)
            left, right = halves(g, BM, BN)
            store_half(out_mem, out_stride, left, i, j * BN, part_stride, BM, BN // 2, PARTS, TMA)
            store_half(out_mem, out_stride, right, i, j * BN + BN // 2, part_stride, BM, BN // 2, PARTS, TMA)
        else:
            WIDTH: tl.constexpr = BN // 4
            if COLUMNS and GUIDE != TEACHER:
                # loaded before the quarters, because loads do not overtake stores
                b = tl.broadcast_to(tl.load(col_b_ptr + j * BN + tl.arange(0, BN))[None, :], (BM, BN))
            for at in tl.static_range(4):
                part = quarter(acc, at, BM, BN)
                cols = j * BN + at * WIDTH + tl.arange(0, WIDTH)
                t = exponents(part, constants, SOFTPLUS, PRODUCTS)
                if GUIDE == MASK:
                    t = tl.maximum(t, FAINT)
                if BITS and GUIDE != TEACHER:
                    t = tl.where(excluded_pairs(words, at * WIDTH, BM, WIDTH), -float("inf"), t)
                if SMOOTH or masked:
                    valid = valid_pairs(rows, cols, N, M, masks, DIAGONAL, SELF, POSITIVES)
                    if BITS and (SMOOTH or GUIDE == TEACHER):
                        valid = valid & (excluded_pairs(words, at * WIDTH, BM, WIDTH) == 0)
                    t = tl.where(valid, t, -float("inf"))
                e = tl.math.exp2(t)
                if KEPT:
                    if at % 2 == 0:
                        f, of_right = load_quarters(out_mem, out_stride, i, j, at, BM, BN, TMA)
                    else:
                        f = of_right
                    e = tl.where(f > 0, e, 0.0)
                g = e
                if KEEP:
                    if at == 0:
                        total = sum_per_lane(e, BM, WIDTH)
                        inner = sum_per_lane(e * part, BM, WIDTH)
                    else:
                        total += sum_per_lane(e, BM, WIDTH)
                        inner += sum_per_lane(e * part, BM, WIDTH)
                elif GUIDE == TEACHER and COLUMNS:
                    # the columns' vectors stay in memory: the registers hold a teacher's numbers
                    g = e * (a + tl.load(col_b_ptr + cols)[None, :])
                else:
                    g = e * (a + quarter(b, at, BM, BN) if COLUMNS else a)
                if GUIDE == TEACHER:
                    if KEPT:
                        c = tl.load(row_a_ptr + vectors_step + rows)[:, None]
                        if COLUMNS:
                            c = c + tl.load(col_b_ptr + vectors_step + cols)[None, :]
                        of_teacher = f * c
                        if LATER:
                            apart = tl.fma(part, -constants[0], log2(f))
                            gaps += sum_per_thread(of_teacher * apart, BM, WIDTH)
                    else:
                        of_teacher = aside(scratch_ptr, at, BM, BN)
                    g = g - of_teacher
                    if LATER and not KEPT:
                        gaps -= sum_per_thread(of_teacher * part, BM, WIDTH) * constants[0]
                if SMOOTH:
                    g = g - tl.load(row_a_ptr + vectors_step + rows)[:, None]
                    if COLUMNS:
                        g = g - tl.load(col_b_ptr + vectors_step + cols)[None, :]
                    g = tl.where(valid, g, 0.0)
                if not KEEP:
                    sums += sum_per_thread(g * part, BM, WIDTH)
                if at % 2 == 0:
                    left = g
                else:
                    store_quarters(out_mem, out_stride, left, g, i, j, at, part_stride, BM, BN, PARTS, TMA)
            if KEEP:
                row_at = row_part_ptr + j.to(tl.int64) * N + rows
                tl.store(row_at, tl.sum(total, 1), mask=rows < N)
                tl.store(row_at + col_tiles.to(tl.int64) * N, tl.sum(inner, 1), mask=rows < N)
        if SOFTPLUS:
            sums += added
    tl.store(sums_at, sums)
    if LATER:
        tl.store(gaps_at, before + tl.sum(gaps))


@triton.jit
def softmax_positive(among, target, missing, smoothing, INSIDE: tl.constexpr):
    """p − (1 − ε) · target of a positive pair, without cancellation as p → 1: see losses/softmax.py.

    INSIDE: the probability among the positives is the target, see losses/softmax.py.
    """
    # exactly 1 for a single positive, even if its logit is rounded otherwise than in the forward
    among = tl.where(target == 1.0, 1.0, among)
    if INSIDE:
        target = among
    return (among - target) - among * missing + smoothing * target


@triton.jit(do_not_specialize=ANY)
def scaled(total_ptr, out_ptr, scale_ptr, times_ptr, n, D, total_stride, out_stride, TIMES: tl.constexpr,
           ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """out = total · scale · times, in the dtype of out."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    factor = tl.load(scale_ptr)
    if TIMES:
        factor *= tl.load(times_ptr)
    row = rows.to(tl.int64)[:, None]
    for step in range(0, D, BLOCK):
        cols = step + tl.arange(0, BLOCK)
        inside = (rows < n)[:, None] & (cols < D)[None, :]
        total = tl.load(total_ptr + row * total_stride + cols[None, :], mask=inside, other=0.0)
        scaled = (total * factor).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * out_stride + cols[None, :], scaled, mask=inside)
