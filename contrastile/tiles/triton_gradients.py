# mypy: ignore-errors
# device code: Triton compiles these functions from their source, their arguments have no Python types
"""The device code of the backward: a super-tile's products once more, and its gradient as one strip.

Launched by `triton_launch.py`. Beside `triton_kernels.py`, whose numbers, places and products these are:

    gradient            one exponential per pair; the tile's gradient, written as one piece of a 16-bit strip
    careful_gradient    the careful form of it, and positives by label

Both add up what gives the scale's gradient, and wait for nobody.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.tiles.triton_kernels import (
    ANY,
    FACTOR,
    FLAG,
    INVERSE,
    LN2,
    MISSING,
    POSITIVE_INVERSE,
    POSITIVE_SHARE,
    SHARE,
    SHIFT,
    STATE_POSITIVE_TOP,
    STATE_TOP,
    UNIT,
    _counts,
    _halves,
    _others,
    _place,
    _products,
    _quarter,
    _same,
    _softplus_sum,
    _touched,
)


@triton.jit
def _joined(left, right, BM: tl.constexpr, WIDTH: tl.constexpr):
    """Two quarters beside each other, as `_halves` takes them apart."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (BM, 2 * WIDTH))


@triton.jit
def _store_half(out_mem, out_stride, g, i, col, part_stride, BM: tl.constexpr, WIDTH: tl.constexpr,
                PARTS: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Writes [BM, WIDTH] of g into the strip, which has room for whole tiles, in PARTS that add up to it."""
    for part in tl.static_range(PARTS):
        if TMA:
            piece = g.to(out_mem.dtype)
            out_mem.store([part * part_stride + i * BM, col], piece)
        else:
            piece = g.to(out_mem.dtype.element_ty)
            rows = part * part_stride + i * BM + tl.arange(0, BM)
            at = rows.to(tl.int64)[:, None] * out_stride + (col + tl.arange(0, WIDTH))[None, :]
            tl.store(out_mem + at, piece)
        if part + 1 < PARTS:
            g = g - piece.to(tl.float32)


@triton.jit
def _reciprocal(x, INTERPRETED: tl.constexpr):
    """1 / x for x from 1 to 4: in one instruction, which a general division follows up with five."""
    if INTERPRETED:
        inverse = 1.0 / x
    else:
        inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True,
                                            pack=1)  # fmt: skip
    return inverse


@triton.jit
def _in_threads(x, BM: tl.constexpr, WIDTH: tl.constexpr):
    """[BM // 32, 8, 4] that add up to x: one number for each thread, where x is as the matrix units leave it."""
    left, right = tl.split(tl.reshape(x, (BM, WIDTH // 2, 2)))
    lanes = tl.sum(tl.reshape(left + right, (BM, WIDTH // 8, 4)), 1)
    return tl.sum(tl.sum(tl.reshape(lanes, (2, BM // 32, 2, 8, 4)), 0), 1)


@triton.jit
def _vector(ptr, at, n):
    """One number for each row, or column, 0 outside."""
    return tl.load(ptr + at, mask=at < n, other=0.0)


@triton.jit
def _own_sums(sums_ptr, BM: tl.constexpr):
    """Where this program keeps its sum, of as many numbers as `_in_threads` leaves: nobody else writes there."""
    group = tl.arange(0, BM // 32)[:, None, None] * 8 + tl.arange(0, 8)[None, :, None]
    return sums_ptr + tl.program_id(0) * BM + group * 4 + tl.arange(0, 4)[None, None, :]


@triton.jit(do_not_specialize=ANY)
def gradient(q_mem, k_mem, out_mem, numbers_ptr, row_a_ptr, col_b_ptr, row_c_ptr, col_d_ptr, sums_ptr,
             row_part_ptr, places_ptr, row_ids_ptr, col_ids_ptr, row_labels_ptr, col_labels_ptr,
             q_stride, k_stride, N, M, D, diagonal, itself, places, places_stride, places_start, part_stride,
             out_stride,
             BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
             LEFT: tl.constexpr, RIGHT: tl.constexpr, PRODUCTS: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
             DIAGONAL: tl.constexpr, SELF: tl.constexpr, PLACES: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr,
             COLUMNS: tl.constexpr, SMOOTH: tl.constexpr, SIGMOID: tl.constexpr, LOSS: tl.constexpr,
             PARTS: tl.constexpr, FLATTEN: tl.constexpr):  # fmt: skip
    """The gradient of the pairs that count, 2^t · (a_i + b_j) − (c_i + d_j), as one strip [PARTS, N, M].

    c and d only where SMOOTH. SIGMOID writes a_i · σ(x), −a_i · σ(−x) for pairs of equal label; with LOSS also what
    `totals` would. Leaves the strip to `careful_gradient` where the flag is up. Each program adds what its tiles come
    to, Σ g · ⟨q, k⟩ or for a SIGMOID Σ g, to its own places of `sums` [programs, BM].

    A softmax's tile is worked out by its quarters: the products must stay until they meet their gradients, and what
    does not fit the registers costs more than all else.
    """
    left_out = (diagonal, itself, places_ptr, places, places_stride, places_start)
    ids = (row_ids_ptr, col_ids_ptr)
    labels = (row_labels_ptr, col_labels_ptr)
    row_tiles = tl.cdiv(N, BM)
    col_tiles = tl.cdiv(M, BN)
    factor = tl.load(numbers_ptr + FACTOR)
    shift = tl.load(numbers_ptr + SHIFT)
    wanted = tl.where(tl.load(numbers_ptr + FLAG) == 0, row_tiles * col_tiles, 0)
    sums_at = _own_sums(sums_ptr, BM)
    sums = tl.load(sums_at)
    for tile in tl.range(tl.program_id(0), wanted, tl.num_programs(0), flatten=FLATTEN):
        i, j = _place(tile, row_tiles, col_tiles, GROUP)
        acc = _products(q_mem, k_mem, q_stride, k_stride, i, j, N, M, D, BM, BN, BK, LEFT, RIGHT, PRODUCTS, TMA,
                        UPCAST)  # fmt: skip
        rows = i * BM + tl.arange(0, BM)
        a = _vector(row_a_ptr, rows, N)[:, None]
        touched = _touched(i, j, N, M, left_out, BM, BN, DIAGONAL, SELF, PLACES)
        if SIGMOID:
            cols = j * BN + tl.arange(0, BN)
            t = acc * factor - shift
            if LABELS:
                hot = _same(labels, rows, cols, N, M)
                t = tl.where(hot, -t, t)
                a = tl.where(hot, -a, a)
            if IDS:
                kept = _counts(rows, cols, N, M, left_out, DIAGONAL, SELF, PLACES)
                t = tl.where(kept & _others(ids, labels, rows, cols, N, M, LABELS), t, -float("inf"))
            elif touched:
                t = tl.where(_counts(rows, cols, N, M, left_out, DIAGONAL, SELF, PLACES), t, -float("inf"))
            if LOSS:
                tl.store(row_part_ptr + j.to(tl.int64) * N + rows, _softplus_sum(t, BM, BN), mask=rows < N)
            # an exponential of its own: one kept from the loss would not fit the registers
            g = a * _reciprocal(1.0 + tl.math.exp2(t * -1.0), UPCAST)
            sums += _in_threads(g, BM, BN)
            left, right = _halves(g, BM, BN)
            _store_half(out_mem, out_stride, left, i, j * BN, part_stride, BM, BN // 2, PARTS, TMA)
            _store_half(out_mem, out_stride, right, i, j * BN + BN // 2, part_stride, BM, BN // 2, PARTS, TMA)
        else:
            WIDTH: tl.constexpr = BN // 4
            if COLUMNS:
                # all at once: loads do not overtake stores
                b = tl.broadcast_to(_vector(col_b_ptr, j * BN + tl.arange(0, BN), M)[None, :], (BM, BN))
            for at in tl.static_range(4):
                part = _quarter(acc, at, BM, BN)
                cols = j * BN + at * WIDTH + tl.arange(0, WIDTH)
                t = part * factor - shift
                if IDS or SMOOTH:
                    kept = _counts(rows, cols, N, M, left_out, DIAGONAL, SELF, PLACES)
                    if IDS:
                        kept = kept & _others(ids, labels, rows, cols, N, M, LABELS)
                    t = tl.where(kept, t, -float("inf"))
                elif touched:
                    t = tl.where(_counts(rows, cols, N, M, left_out, DIAGONAL, SELF, PLACES), t, -float("inf"))
                g = tl.math.exp2(t) * (a + _quarter(b, at, BM, BN) if COLUMNS else a)
                if SMOOTH:
                    g = g - _vector(row_c_ptr, rows, N)[:, None]
                    if COLUMNS:
                        g = g - _vector(col_d_ptr, cols, M)[None, :]
                    g = tl.where(kept, g, 0.0)
                sums += _in_threads(g * part, BM, WIDTH)
                if at % 2 == 0:
                    before = g
                else:
                    half = j * BN + (at // 2) * (BN // 2)
                    g = _joined(before, g, BM, WIDTH)
                    _store_half(out_mem, out_stride, g, i, half, part_stride, BM, BN // 2, PARTS, TMA)
    tl.store(sums_at, sums)


@triton.jit
def positive_gradient(among, target, missing, smoothing):
    """p − (1 − ε) · target of a positive pair, written so that p → 1 loses no digits: see losses/softmax.py."""
    # an only positive is all of its kind, also where its logit was rounded otherwise than in the forward
    among = tl.where(target == 1.0, 1.0, among)
    return (among - target) - among * missing + smoothing * target


@triton.jit
def _softmax_gradient(x, hot, state_ptr, state_stride, coefficient_ptr, unit, at, inside, smoothing,
                      axis: tl.constexpr, LABELS: tl.constexpr):  # fmt: skip
    """One direction's gradient of every pair, as losses/softmax.py writes it; times `unit`."""
    coefficient = tl.load(coefficient_ptr + at, mask=inside, other=0.0) * unit
    top = tl.load(state_ptr + STATE_TOP * state_stride + at, mask=inside, other=0.0)
    inverse = tl.load(state_ptr + INVERSE * state_stride + at, mask=inside, other=0.0)
    share = tl.load(state_ptr + SHARE * state_stride + at, mask=inside, other=0.0)
    value = tl.exp(x - tl.expand_dims(top, axis)) * tl.expand_dims(inverse, axis)
    if LABELS:
        positive_top = tl.load(state_ptr + STATE_POSITIVE_TOP * state_stride + at, mask=inside, other=0.0)
        positive_inverse = tl.load(state_ptr + POSITIVE_INVERSE * state_stride + at, mask=inside, other=0.0)
        missing = tl.load(state_ptr + MISSING * state_stride + at, mask=inside, other=0.0)
        positive_share = tl.load(state_ptr + POSITIVE_SHARE * state_stride + at, mask=inside, other=0.0)
        among = tl.exp(x - tl.expand_dims(positive_top, axis)) * tl.expand_dims(positive_inverse, axis)
        target = tl.expand_dims(positive_share, axis)
        value = tl.where(hot, positive_gradient(among, target, tl.expand_dims(missing, axis), smoothing), value)
    return (value - tl.expand_dims(share * smoothing, axis)) * tl.expand_dims(coefficient, axis)


@triton.jit(do_not_specialize=ANY)
def careful_gradient(q_mem, k_mem, out_mem, numbers_ptr, row_state_ptr, row_coefficient_ptr,
                     col_state_ptr, col_coefficient_ptr, row_state_stride, col_state_stride, sums_ptr,
                     places_ptr, row_ids_ptr, col_ids_ptr, row_labels_ptr, col_labels_ptr,
                     q_stride, k_stride, N, M, D, diagonal, itself, places, places_stride, places_start, part_stride,
                     out_stride, smoothing, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
                     LEFT: tl.constexpr, RIGHT: tl.constexpr, PRODUCTS: tl.constexpr, TMA: tl.constexpr,
                     UPCAST: tl.constexpr, DIAGONAL: tl.constexpr, SELF: tl.constexpr, PLACES: tl.constexpr,
                     IDS: tl.constexpr, LABELS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The careful form of `gradient` for a softmax: an exponential per direction, and positives by label."""
    left_out = (diagonal, itself, places_ptr, places, places_stride, places_start)
    ids = (row_ids_ptr, col_ids_ptr)
    labels = (row_labels_ptr, col_labels_ptr)
    row_tiles = tl.cdiv(N, BM)
    col_tiles = tl.cdiv(M, BN)
    factor = tl.load(numbers_ptr + FACTOR)
    unit = tl.load(numbers_ptr + UNIT)
    wanted = tl.where(tl.load(numbers_ptr + FLAG) != 0, row_tiles * col_tiles, 0)
    sums_at = _own_sums(sums_ptr, BM)
    sums = tl.load(sums_at)
    for tile in tl.range(tl.program_id(0), wanted, tl.num_programs(0)):
        i, j = _place(tile, row_tiles, col_tiles, GROUP)
        acc = _products(q_mem, k_mem, q_stride, k_stride, i, j, N, M, D, BM, BN, BK, LEFT, RIGHT, PRODUCTS, TMA,
                        UPCAST)  # fmt: skip
        rows = i * BM + tl.arange(0, BM)
        WIDTH: tl.constexpr = BN // 4
        for at in tl.static_range(4):
            part = _quarter(acc, at, BM, BN)
            cols = j * BN + at * WIDTH + tl.arange(0, WIDTH)
            x = part * factor * LN2
            kept = _counts(rows, cols, N, M, left_out, DIAGONAL, SELF, PLACES)
            hot = kept
            if LABELS:
                hot = kept & _same(labels, rows, cols, N, M)
            g = _softmax_gradient(x, hot, row_state_ptr, row_state_stride, row_coefficient_ptr, unit, rows, rows < N,
                                  smoothing, 1, LABELS)  # fmt: skip
            if COLUMNS:
                g += _softmax_gradient(x, hot, col_state_ptr, col_state_stride, col_coefficient_ptr, unit, cols,
                                       cols < M, smoothing, 0, LABELS)  # fmt: skip
            if IDS:
                kept = kept & _others(ids, labels, rows, cols, N, M, LABELS)
            g = tl.where(kept, g, 0.0)
            sums += _in_threads(g * part, BM, WIDTH)
            if at % 2 == 0:
                before = g
            else:
                half = j * BN + (at // 2) * (BN // 2)
                g = _joined(before, g, BM, WIDTH)
                _store_half(out_mem, out_stride, g, i, half, part_stride, BM, BN // 2, PARTS, TMA)
    tl.store(sums_at, sums)
