"""Device code of columns [N, H, D] that each row [N, D] meets alone: products, sums for the rows, and gradients.

Launched by `triton/own.py`. Every kernel reads or writes the columns once, which is all of its time; a program has one
row. Offsets have 64 bits: in a view of another layout the columns of one row may be 2³¹ numbers apart.
"""

import triton
import triton.language as tl

from contrastile.tiles.triton.kernels.arithmetic import MISSING, POSITIVE_COUNT, POSITIVE_TOP, POSITIVE_TOTAL


@triton.jit(do_not_specialize=["H"])
def own_products(q_ptr, own_ptr, out_ptr, flag_ptr, excluded_ptr, scale_ptr, stats_ptr, stats_stride, stats_col_stride,
             H, D, q_row_stride, q_stride, own_row_stride, own_stride, own_feature_stride, MERGE: tl.constexpr,
             POSITIVE: tl.constexpr, EXCLUDED: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """⟨q_i, own_ih⟩ [N, H]; the flag becomes NaN where one is not finite.

    MERGE: the exponentials of those that count, times the scale, are added to the row's statistics: their top and sum.
    POSITIVE: the first is the row's only positive.
    """
    row = tl.program_id(0).to(tl.int64)
    top = -float("inf")
    total = 0.0
    stats = stats_ptr + row * stats_col_stride
    if MERGE:
        top = tl.load(stats)
        total = tl.load(stats + stats_stride)
        scale = tl.load(scale_ptr)
    for first in range(0, H, COLS):
        h = first + tl.arange(0, COLS)
        own_at = own_ptr + row * own_row_stride + h.to(tl.int64) * own_stride
        products = tl.zeros((COLS, BLOCK), tl.float32)
        for start in range(0, D, BLOCK):
            d = start + tl.arange(0, BLOCK).to(tl.int64)
            inside = (h < H)[:, None] & (d < D)[None, :]
            own = tl.load(own_at[:, None] + d[None, :] * own_feature_stride, mask=inside, other=0.0)
            q = tl.load(q_ptr + row * q_row_stride + d * q_stride, mask=d < D, other=0.0)
            products += own.to(tl.float32) * q.to(tl.float32)[None, :]
        x = tl.sum(products, 1)
        tl.store(out_ptr + row * H + h, x, mask=h < H)
        # all programs write the same
        wrong = tl.sum(x * 0.0)
        tl.store(flag_ptr, wrong, mask=wrong != 0.0)
        if MERGE:
            counts = h < H
            if EXCLUDED:
                counts &= tl.load(excluded_ptr + row * H + h, mask=counts, other=1) == 0
            x *= scale
            if POSITIVE:
                counts &= h > 0
                if first == 0:
                    tl.store(stats + POSITIVE_TOP * stats_stride, tl.sum(tl.where(h == 0, x, 0.0)))
                    tl.store(stats + POSITIVE_TOTAL * stats_stride, 1.0)
                    tl.store(stats + POSITIVE_COUNT * stats_stride, 1.0)
            x = tl.where(counts, x, -float("inf"))
            higher = tl.maximum(top, tl.max(x))
            base = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base))
            top = higher
    if MERGE:
        # all warps have read the row's statistics
        tl.debug_barrier()
        tl.store(stats, top)
        tl.store(stats + stats_stride, total)


@triton.jit(do_not_specialize=["H"])
def own_sums(g_ptr, own_ptr, u_ptr, products_ptr, excluded_ptr, scale_ptr, state_ptr, state_stride, state_col_stride,
             coefficient_ptr, sums_ptr, H, D, own_row_stride, own_stride, own_feature_stride, GRADIENT: tl.constexpr,
             POSITIVE: tl.constexpr, EXCLUDED: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """u [N, D] += Σ_h g_ih · own_ih, for BLOCK features of one row.

    GRADIENT: g [N, H] is computed from the products, as each pair's exponential times the row's numbers, and written;
    so is Σ_h g_ih · products_ih of each row. POSITIVE: the first is the row's only positive.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    d = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    u = tl.load(u_ptr + row * D + d, mask=d < D, other=0.0)
    if GRADIENT:
        scale = tl.load(scale_ptr)
        top = tl.load(state_ptr + row * state_col_stride)
        coefficient = tl.load(coefficient_ptr + row)
        inverse = coefficient * tl.load(state_ptr + row * state_col_stride + state_stride)
        if POSITIVE:
            attraction = -coefficient * tl.load(state_ptr + row * state_col_stride + MISSING * state_stride)
        total = 0.0
    for first in range(0, H, COLS):
        h = first + tl.arange(0, COLS)
        own_at = own_ptr + row * own_row_stride + h.to(tl.int64) * own_stride
        inside = (h < H)[:, None] & (d < D)[None, :]
        own = tl.load(own_at[:, None] + d[None, :] * own_feature_stride, mask=inside, other=0.0)
        if GRADIENT:
            products = tl.load(products_ptr + row * H + h, mask=h < H, other=0.0)
            counts = h < H
            if EXCLUDED:
                counts &= tl.load(excluded_ptr + row * H + h, mask=counts, other=1) == 0
            g = tl.exp(tl.where(counts, products * scale - top, -float("inf"))) * inverse
            if POSITIVE:
                g = tl.where(h == 0, attraction, g)
            total += tl.sum(tl.where(h < H, g * products, 0.0))
            tl.store(g_ptr + row * H + h, g, mask=(h < H) & (block == 0))
        else:
            g = tl.load(g_ptr + row * H + h, mask=h < H, other=0.0)
        u += tl.sum(tl.where((h < H)[:, None], g[:, None] * own.to(tl.float32), 0.0), 0)
    # all warps have read the row's sums
    tl.debug_barrier()
    tl.store(u_ptr + row * D + d, u, mask=d < D)
    if GRADIENT:
        tl.store(sums_ptr + row, total, mask=block == 0)


@triton.jit(do_not_specialize=["H"], do_not_specialize_on_alignment=["upstream_ptr"])
def own_gradients(g_ptr, q_ptr, number_ptr, upstream_ptr, out_ptr, H, D, q_row_stride, q_stride,
                  UPSTREAM: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """out [N, H, D] = g_ih · number · q_i, for BLOCK features of one row; UPSTREAM: times another number."""
    blocks = tl.cdiv(D, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    d = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    q = tl.load(q_ptr + row * q_row_stride + d * q_stride, mask=d < D, other=0.0)
    number = tl.load(number_ptr)
    if UPSTREAM:
        number *= tl.load(upstream_ptr)
    for first in range(0, H, COLS):
        h = first + tl.arange(0, COLS)
        g = tl.load(g_ptr + row * H + h, mask=h < H, other=0.0) * number
        x = (g[:, None] * q.to(g.dtype)[None, :]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (row * H + h)[:, None] * D + d[None, :], x, mask=(h < H)[:, None] & (d < D)[None, :])
