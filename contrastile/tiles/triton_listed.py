# mypy: ignore-errors
# device code: Triton compiles these functions from their source, their arguments have no Python types
"""The device code of listed positives: pairs known by their position, which never enter a 16-bit tile.

Launched by `triton_launch.py`. A row's positives are the columns listed for it, or the one on the diagonal; their
logits are computed in float32, their statistics stored beside those of all other pairs, and their gradient added to
the accumulators. Formulas as in losses/softmax.py and losses/sigmoid.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.losses.softmax import SoftmaxStats
from contrastile.tiles.triton_gradients import positive_gradient
from contrastile.tiles.triton_kernels import (
    BIAS,
    MISSING,
    POSITIVE_INVERSE,
    POSITIVE_SHARE,
    SCALE,
    SHARE,
    STATE_POSITIVE_TOP,
    log1p,
)

# rows of a softmax's statistics
POSITIVE_TOP, POSITIVE_TOTAL, POSITIVE_SUM, POSITIVE_COUNT, LOGIT_SUM, KEPT = (
    tl.constexpr(row) for row in range(SoftmaxStats._fields.index("positive_top"), len(SoftmaxStats._fields))
)
# numbers that change from call to call: compiled once for all their values
ANY = ("N", "M", "diagonal", "itself", "per_row", "row_stats_stride", "col_stats_stride", "row_state_stride",
       "col_state_stride", "smoothing")  # fmt: skip


@triton.jit
def _listed(row, p, columns_ptr, diagonal, itself, N, M, per_row, DIAGONAL: tl.constexpr, SELF: tl.constexpr):
    """The column of each row's p-th positive, and whether there is one."""
    if DIAGONAL:
        col = (row + diagonal).to(tl.int64)
        there = (row < N) & (col >= 0) & (col < M)
        if SELF:
            there = there & (col != row + itself)
    else:
        col = tl.load(columns_ptr + row.to(tl.int64) * per_row + p, mask=row < N, other=-1)
        there = col >= 0
    return col, there


@triton.jit
def _inner(q_ptr, k_ptr, row, col, there, D, q_row_stride, q_stride, k_row_stride, k_stride,
           ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """⟨q, k⟩ of each row with its column, in float32."""
    total = tl.zeros((ROWS,), tl.float32)
    for step in range(0, D, BLOCK):
        at = step + tl.arange(0, BLOCK)
        inside = there[:, None] & (at < D)[None, :]
        feature = at.to(tl.int64)[None, :]
        q = tl.load(q_ptr + row.to(tl.int64)[:, None] * q_row_stride + feature * q_stride, mask=inside, other=0.0)
        k = tl.load(k_ptr + col[:, None] * k_row_stride + feature * k_stride, mask=inside, other=0.0)
        total += tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
    return total


@triton.jit
def _store_positives(stats_ptr, stride, at, there, top, total, logits, count, SMOOTH: tl.constexpr):
    """The part of a softmax's statistics that is the positives'."""
    tl.store(stats_ptr + POSITIVE_TOP * stride + at, top, mask=there)
    tl.store(stats_ptr + POSITIVE_TOTAL * stride + at, total, mask=there)
    tl.store(stats_ptr + POSITIVE_SUM * stride + at, logits, mask=there)
    tl.store(stats_ptr + POSITIVE_COUNT * stride + at, count, mask=there)
    if SMOOTH:
        logit_sum = stats_ptr + LOGIT_SUM * stride + at
        tl.store(logit_sum, tl.load(logit_sum, mask=there, other=0.0) + logits, mask=there)
        kept = stats_ptr + KEPT * stride + at
        tl.store(kept, tl.load(kept, mask=there, other=0.0) + count, mask=there)


@triton.jit(do_not_specialize=ANY)
def listed_totals(q_ptr, k_ptr, numbers_ptr, columns_ptr, row_stats_ptr, col_stats_ptr, N, M, D, diagonal, itself,
                  per_row, q_row_stride, q_stride, k_row_stride, k_stride, row_stats_stride, col_stats_stride,
                  DIAGONAL: tl.constexpr, SELF: tl.constexpr, COLUMNS: tl.constexpr, SMOOTH: tl.constexpr,
                  SIGMOID: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """What the listed positives say of their rows, and on the diagonal of their columns, into the statistics."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    logits = tl.zeros((ROWS,), tl.float32)
    count = tl.zeros((ROWS,), tl.float32)
    for p in range(per_row):
        col, there = _listed(row, p, columns_ptr, diagonal, itself, N, M, per_row, DIAGONAL, SELF)
        inner = _inner(q_ptr, k_ptr, row, col, there, D, q_row_stride, q_stride, k_row_stride, k_stride, ROWS, BLOCK)
        x = inner * tl.load(numbers_ptr + SCALE) + tl.load(numbers_ptr + BIAS)
        if SIGMOID:
            total += tl.where(there, log1p(tl.exp(-tl.abs(x))) + tl.maximum(-x, 0.0), 0.0)
        else:
            hidden = tl.where(there, x, -float("inf"))
            higher = tl.maximum(top, hidden)
            safe = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp(top - safe) + tl.exp(hidden - safe)
            top = higher
            logits += tl.where(there, x, 0.0)
            count += there.to(tl.float32)
        if COLUMNS:
            # the only pair of its column
            one = there.to(tl.float32)
            _store_positives(col_stats_ptr, col_stats_stride, col, there, x, one, x, one, SMOOTH)
    if SIGMOID:
        out = row_stats_ptr + row
        tl.store(out, tl.load(out, mask=row < N, other=0.0) + total, mask=row < N)
    else:
        _store_positives(row_stats_ptr, row_stats_stride, row, row < N, top, total, logits, count, SMOOTH)


@triton.jit
def _positive(x, state_ptr, stride, coefficient_ptr, at, there, smoothing):
    """One direction's gradient of listed positives."""
    top = tl.load(state_ptr + STATE_POSITIVE_TOP * stride + at, mask=there, other=0.0)
    inverse = tl.load(state_ptr + POSITIVE_INVERSE * stride + at, mask=there, other=0.0)
    missing = tl.load(state_ptr + MISSING * stride + at, mask=there, other=0.0)
    target = tl.load(state_ptr + POSITIVE_SHARE * stride + at, mask=there, other=0.0)
    share = tl.load(state_ptr + SHARE * stride + at, mask=there, other=0.0)
    value = positive_gradient(tl.exp(x - top) * inverse, target, missing, smoothing) - share * smoothing
    return value * tl.load(coefficient_ptr + at, mask=there, other=0.0)


@triton.jit
def _add_scaled(out_ptr, out_stride, to, x_ptr, source, row_stride, stride, g, there, D,
                BLOCK: tl.constexpr):  # fmt: skip
    """out[to] += g · x[source]."""
    for step in range(0, D, BLOCK):
        at = step + tl.arange(0, BLOCK)
        inside = there[:, None] & (at < D)[None, :]
        x = tl.load(x_ptr + source.to(tl.int64)[:, None] * row_stride + at.to(tl.int64)[None, :] * stride, mask=inside,
                    other=0.0)  # fmt: skip
        out = out_ptr + to.to(tl.int64)[:, None] * out_stride + at[None, :]
        tl.store(out, tl.load(out, mask=inside, other=0.0) + g[:, None] * x.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=ANY)
def listed_gradient(q_ptr, k_ptr, numbers_ptr, columns_ptr, row_state_ptr, row_coefficient_ptr, col_state_ptr,
                    col_coefficient_ptr, u_ptr, v_ptr, g_ptr, inner_ptr, N, M, D, diagonal, itself, per_row,
                    q_row_stride, q_stride, k_row_stride, k_stride, row_state_stride, col_state_stride, u_stride,
                    v_stride, smoothing, DIAGONAL: tl.constexpr, SELF: tl.constexpr, COLUMNS: tl.constexpr,
                    SIGMOID: tl.constexpr, U: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """g [N, per_row], the gradient of the listed positives, and g · ⟨q, k⟩; adds what g gives to u, and on the
    diagonal to v.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    for p in range(per_row):
        col, there = _listed(row, p, columns_ptr, diagonal, itself, N, M, per_row, DIAGONAL, SELF)
        inner = _inner(q_ptr, k_ptr, row, col, there, D, q_row_stride, q_stride, k_row_stride, k_stride, ROWS, BLOCK)
        x = inner * tl.load(numbers_ptr + SCALE) + tl.load(numbers_ptr + BIAS)
        if SIGMOID:
            g = -tl.load(row_coefficient_ptr + row, mask=there, other=0.0) / (1.0 + tl.exp(x))
        else:
            g = _positive(x, row_state_ptr, row_state_stride, row_coefficient_ptr, row, there, smoothing)
            if COLUMNS:
                g += _positive(x, col_state_ptr, col_state_stride, col_coefficient_ptr, col, there, smoothing)
        g = tl.where(there, g, 0.0)
        place = row.to(tl.int64) * per_row + p
        tl.store(g_ptr + place, g, mask=row < N)
        tl.store(inner_ptr + place, g * inner, mask=row < N)
        if U:
            _add_scaled(u_ptr, u_stride, row, k_ptr, col, k_row_stride, k_stride, g, there, D, BLOCK)
        if V:
            _add_scaled(v_ptr, v_stride, col, q_ptr, row, q_row_stride, q_stride, g, there, D, BLOCK)


@triton.jit(do_not_specialize=ANY)
def add_pairs(out_ptr, out_stride, x_ptr, row_stride, feature_stride, starts_ptr, sources_ptr, values_ptr, D,
              BLOCK: tl.constexpr):  # fmt: skip
    """out[r] += Σ values[s] · x[sources[s]] over s = starts[r] ... starts[r + 1] − 1, one after the other."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(starts_ptr + row)
    stop = tl.load(starts_ptr + row + 1)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < D
    if stop > start:
        total = tl.load(out_ptr + row * out_stride + at, mask=inside, other=0.0)
        for s in range(start, stop):
            source = tl.load(sources_ptr + s).to(tl.int64)
            value = tl.load(values_ptr + s)
            x = tl.load(x_ptr + source * row_stride + at.to(tl.int64) * feature_stride, mask=inside, other=0.0)
            total += value * x.to(tl.float32)
        tl.store(out_ptr + row * out_stride + at, total, mask=inside)
