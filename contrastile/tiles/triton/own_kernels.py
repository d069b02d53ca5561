# mypy: ignore-errors
# device code: Triton compiles these functions from their source, their arguments have no Python types
"""Device code of columns [N, H, D] that each row [N, D] meets alone: products, sums for the rows, and gradients.

Launched by `own.py`. Every kernel reads or writes the columns once, which is all of its time. Offsets have 64
bits: in a view of another layout the columns of one row may be 2³¹ numbers apart.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pairs", "H"])
def own_products(q_ptr, own_ptr, out_ptr, zeros_ptr, pairs, H, D, q_row_stride, q_stride, own_row_stride, own_stride,
             own_feature_stride, PAIRS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """⟨q_i, own_ih⟩ [N · H] of PAIRS pairs, and their sum times 0 of each program: NaN where one is not finite."""
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    row = pair // H
    q_at = row * q_row_stride
    own_at = row * own_row_stride + (pair - row * H) * own_stride
    total = tl.zeros((PAIRS, BLOCK), tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = (pair < pairs)[:, None] & (d < D)[None, :]
        own = tl.load(own_ptr + own_at[:, None] + d[None, :] * own_feature_stride, mask=inside, other=0.0)
        q = tl.load(q_ptr + q_at[:, None] + d[None, :] * q_stride, mask=inside, other=0.0)
        total += own.to(tl.float32) * q.to(tl.float32)
    out = tl.sum(total, 1)
    tl.store(out_ptr + pair, out, mask=pair < pairs)
    tl.store(zeros_ptr + tl.program_id(0), tl.sum(out * 0.0))


@triton.jit(do_not_specialize=["H"])
def own_sums(g_ptr, own_ptr, u_ptr, H, D, own_row_stride, own_stride, own_feature_stride, BLOCK: tl.constexpr):
    """u [N, D] += Σ_h g_ih · own_ih, for BLOCK features of one row."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    total = tl.load(u_ptr + row * D + d, mask=d < D, other=0.0)
    at = own_ptr + row * own_row_stride + d * own_feature_stride
    for h in range(H):
        total += tl.load(g_ptr + row * H + h) * tl.load(at, mask=d < D, other=0.0).to(tl.float32)
        at += own_stride
    tl.store(u_ptr + row * D + d, total, mask=d < D)


@triton.jit(do_not_specialize=["pairs", "H"])
def own_gradients(g_ptr, q_ptr, number_ptr, out_ptr, pairs, H, D, q_row_stride, q_stride, PAIRS: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """out [N · H, D] = g_ih · number · q_i, of PAIRS pairs and BLOCK features."""
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    inside = (pair < pairs)[:, None] & (d < D)[None, :]
    g = tl.load(g_ptr + pair, mask=pair < pairs, other=0.0) * tl.load(number_ptr)
    q = tl.load(q_ptr + (pair // H * q_row_stride)[:, None] + d[None, :] * q_stride, mask=inside, other=0.0)
    x = g[:, None] * q.to(g.dtype)
    tl.store(out_ptr + pair[:, None] * D + d[None, :], x.to(out_ptr.dtype.element_ty), mask=inside)
