"""Device code between a strip of kept exponentials and the products with the features (see `exponentials.py`).

    weighted_rows     one direction: the factor of each row, and the rows times it
    weighted_pairs    both directions: the strip's exponentials become gradients in place
    weighted_total    the scale's gradient from the sums of `weighted_pairs`

Where the careful flag is set, `careful_gradient` has written the strip, which holds gradients.
"""

import triton
import triton.language as tl

from contrastile.tiles.triton.kernels.arithmetic import (
    ANY,
    CAREFUL,
    FACTOR,
    HIGHEST,
    LOG2E,
    MISSING,
    SHIFT,
    log2,
)
from contrastile.tiles.triton.kernels.finish import sum_of

# variance of a bf16 number's rounding, in units of its binade, times log2(e) / 2
ROUNDING = tl.constexpr(2.0**-14 / 24 * 1.4426950408889634)


@triton.jit(do_not_specialize=ANY)
def weighted_rows(q_ptr, out_ptr, weights_ptr, inner_ptr, factors_ptr, sums_ptr, constants_ptr, N, D, q_row_stride,
              col_tiles, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """Write a_i for the row's sums, a_i · UNIT · q_i in 16 bits for those of the columns, and Σ_j g_ij · ⟨q_i, k_j⟩.

    Where the careful flag is set, factors are 1 and sums 0.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    fast = tl.load(constants_ptr + CAREFUL) == 0
    weight = tl.load(weights_ptr + rows, mask=rows < N, other=0.0)
    factor = tl.where(fast, weight, 1.0)
    tl.store(factors_ptr + rows, factor, mask=rows < N)
    row = rows.to(tl.int64)[:, None]
    for step in range(0, D, BLOCK):
        cols = step + tl.arange(0, BLOCK)
        inside = (rows < N)[:, None] & (cols < D)[None, :]
        x = tl.load(q_ptr + row * q_row_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        x = x * (factor * UNIT)[:, None]
        tl.store(out_ptr + row * D + cols[None, :], x.to(out_ptr.dtype.element_ty), mask=inside)
    total = tl.zeros((ROWS,), tl.float32)
    for step in range(0, col_tiles, TILES):
        tile = step + tl.arange(0, TILES)
        inside = (tile < col_tiles)[:, None] & (rows < N)[None, :]
        at = tile.to(tl.int64)[:, None] * N + rows[None, :]
        total += tl.sum(tl.load(inner_ptr + at, mask=inside, other=0.0), 0)
    tl.store(sums_ptr + rows, tl.where(fast, total * weight, 0.0), mask=rows < N)


@triton.jit
def _of_tiles(x, ROWS: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr):
    """Sums of each row within each tile [ROWS, BLOCK / BN]."""
    return tl.sum(tl.reshape(x, (ROWS, BLOCK // BN, BN)), 2)


@triton.jit(do_not_specialize=ANY)
def weighted_pairs(strip_ptr, out_stride, row_part_ptr, row_a_ptr, col_b_ptr, sums_ptr, constants_ptr, N, M, blocks,
               ROWS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
               BN: tl.constexpr):  # fmt: skip
    """Multiply the strip's exponentials e = 2^t by a_i + b_j, and write Σ g · t and Σ g of each program [2, blocks].

    t is computed from the rounded e. Rounding does not change the mean of e. It makes the mean of e · log2(e), a convex
    function, larger by its variance, which is subtracted. The rows' exact sums of each tile are in `row_part`
    [col tiles, N]: both sums are corrected as if rounding had been one factor for the whole row of a tile.
    """
    TILES: tl.constexpr = BLOCK // BN
    across = tl.cdiv(M, BLOCK)
    first_row = tl.program_id(0) // across * STEPS * ROWS
    cols = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    tiles = tl.program_id(0) % across * TILES + tl.arange(0, TILES)
    # the strip has whole tiles, and with them 16 bytes of a thread at once
    inside = tl.broadcast_to((cols < out_stride)[None, :], (ROWS, BLOCK))
    b = tl.load(col_b_ptr + cols, mask=cols < M, other=0.0)[None, :]
    inner = tl.zeros((ROWS, TILES), tl.float32)
    total = tl.zeros((ROWS, TILES), tl.float32)
    steps = tl.where(tl.load(constants_ptr + CAREFUL) == 0, STEPS, 0)
    for step in tl.range(steps, num_stages=STAGES):
        rows = first_row + step * ROWS + tl.arange(0, ROWS)
        a = tl.load(row_a_ptr + rows, mask=rows < N, other=0.0)[:, None]
        at = strip_ptr + rows.to(tl.int64)[:, None] * out_stride + cols[None, :]
        e = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        part_at = row_part_ptr + tiles.to(tl.int64)[None, :] * N + rows[:, None]
        exact = tl.load(part_at, mask=(rows < N)[:, None] & (tiles * BN < M)[None, :], other=0.0)
        g = e * (a + b)
        tl.store(at, g.to(strip_ptr.dtype.element_ty), mask=inside)
        # from 1 to 2; the variance falls with its square, here a parabola
        part = ((e.to(tl.int32, bitcast=True) & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
        share = tl.fma(part, tl.fma(part, 0.7222, -2.9167), 3.1945)
        t = tl.fma(share, -ROUNDING, log2(e))
        rounded = _of_tiles(e, ROWS, BLOCK, BN)
        of_t = _of_tiles(g * t, ROWS, BLOCK, BN)
        of_g = _of_tiles(g, ROWS, BLOCK, BN)
        lost = (exact - rounded) / tl.where(rounded > 0, rounded, 1.0)
        inner += of_t + lost * (of_t + LOG2E * of_g)
        total += of_g + lost * of_g
    out = sums_ptr + tl.program_id(0)
    tl.store(out, tl.sum(inner))
    tl.store(out + blocks, tl.sum(total))


@triton.jit
def _of_negatives(state_ptr, stride, coefficient_ptr, n, BLOCK: tl.constexpr):
    """Σ g of one direction's negatives: each row's coefficient times its probability of not being a positive."""
    total = tl.zeros((BLOCK,), tl.float64)
    for step in range(0, n, BLOCK):
        at = step + tl.arange(0, BLOCK)
        missing = tl.load(state_ptr + MISSING * stride + at, mask=at < n, other=0.0)
        total += (missing * tl.load(coefficient_ptr + at, mask=at < n, other=0.0)).to(tl.float64)
    return tl.sum(total)


@triton.jit(do_not_specialize=ANY)
def weighted_total(row_state_ptr, row_state_stride, row_coefficient_ptr, N, col_state_ptr, col_state_stride,
               col_coefficient_ptr, M, sums_ptr, careful_ptr, constants_ptr, out_ptr, blocks, parts,
               BLOCK: tl.constexpr):  # fmt: skip
    """Write Σ g_ij · ⟨q_i, k_j⟩ in float64, from the sums of `weighted_pairs`, or those of `careful_gradient` [parts].

    The state of each row and column gives the exact Σ g. The rounding error of Σ g, times the derivative of e · log2(e)
    at the mean t, is subtracted.
    """
    inner = tl.zeros((BLOCK,), tl.float64)
    total = tl.zeros((BLOCK,), tl.float64)
    for step in range(0, blocks, BLOCK):
        at = step + tl.arange(0, BLOCK)
        inner += tl.load(sums_ptr + at, mask=at < blocks, other=0.0).to(tl.float64)
        total += tl.load(sums_ptr + blocks + at, mask=at < blocks, other=0.0).to(tl.float64)
    fast = tl.load(constants_ptr + CAREFUL) == 0
    careful = sum_of(careful_ptr, tl.where(fast, 0, parts), BLOCK)
    of_t = tl.sum(inner)
    of_g = tl.sum(total)
    exact = _of_negatives(row_state_ptr, row_state_stride, row_coefficient_ptr, N, BLOCK)
    exact += _of_negatives(col_state_ptr, col_state_stride, col_coefficient_ptr, M, BLOCK)
    # the weights of rows may have both signs
    mean = tl.where(of_g == 0.0, 0.0, of_t / tl.where(of_g == 0.0, 1.0, of_g))
    mean = tl.minimum(tl.maximum(mean, -HIGHEST), HIGHEST)
    of_t -= (mean + LOG2E) * (of_g - exact)
    shift = tl.load(constants_ptr + SHIFT).to(tl.float64)
    of_products = (of_t + shift * exact) / tl.load(constants_ptr + FACTOR).to(tl.float64)
    tl.store(out_ptr, tl.where(fast, of_products, careful))
