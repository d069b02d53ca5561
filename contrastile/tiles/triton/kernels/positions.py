"""Device code of the positives known by position: their logits, statistics and gradients, row by row.

Launched by `triton/positions.py`; positives by label are in the tiles, see `labels.py`:

    listed_products      products of a guide's features
    positive_logits      their logits by a teacher
    positive_totals      their part of each row's statistics
    positive_gradients   their gradient, added to the accumulators directly
    add_pairs            the same for the columns, where a column may have several
"""

import triton
import triton.language as tl

from contrastile.tiles.triton.kernels.arithmetic import (
    ANY,
    BIAS,
    LN2,
    POSITIVE_TOP,
    SCALE,
    SHARE,
    SHIFT,
    STATE_TEACHER_TOP,
    TEACHER,
    TEACHER_INVERSE,
    TEACHER_TOP,
    exponent_constants,
    exponents,
    finite,
    load_positive_state,
    load_rows,
    load_stats,
    log1p,
    merge_exponentials,
    merge_teachers,
    shift_as_logarithm,
    store_stats,
)
from contrastile.tiles.triton.kernels.backward import softmax_positive


@triton.jit
def positive_logit(q_ptr, k_ptr, constants_ptr, columns_ptr, products_ptr, row, p, N, M, D, diagonal, self_diagonal,
                   per_row, q_row_stride, q_stride, k_row_stride, k_stride, DIAGONAL: tl.constexpr, SELF: tl.constexpr,
                   SOFTPLUS: tl.constexpr, PRODUCTS: tl.constexpr, ROWS: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    """Column of each row's p-th positive, the mask of rows that have one, ⟨q, k⟩, and the logit as a sum of two.

    Of several PRODUCTS, ⟨q, k⟩ is one of `products` [N, per_row], which the tiles have written (`store_listed`), and
    the logit is rounded as in `totals`.
    """
    if DIAGONAL:
        col = (row + diagonal).to(tl.int64)
        exists = (row < N) & (col >= 0) & (col < M)
        if SELF:
            exists = exists & (col != row + self_diagonal)
    else:
        col = tl.load(columns_ptr + row.to(tl.int64) * per_row + p, mask=row < N, other=-1)
        exists = col >= 0
    rest = tl.zeros((ROWS,), tl.float32)
    if PRODUCTS > 1:
        inner = tl.load(products_ptr + row.to(tl.int64) * per_row + p, mask=exists, other=0.0)
        t = exponents(inner, exponent_constants(constants_ptr), SOFTPLUS, PRODUCTS)
        if SOFTPLUS:
            top = t * LN2
        else:
            whole = tl.floor(t)
            top, error = shift_as_logarithm(tl.load(constants_ptr + SHIFT) + whole)
            rest = (t - whole) * LN2 + error
    else:
        inner = tl.zeros((ROWS,), tl.float32)
        for step in range(0, D, BLOCK):
            q = load_rows(q_ptr, row, step, D, q_row_stride, q_stride, exists, BLOCK)
            k = load_rows(k_ptr, col, step, D, k_row_stride, k_stride, exists, BLOCK)
            inner += tl.sum(q * k, 1)
        top = inner * tl.load(constants_ptr + SCALE) + tl.load(constants_ptr + BIAS)
    return col, exists, inner, top, rest


@triton.jit(do_not_specialize=ANY)
def listed_products(q_ptr, k_ptr, columns_ptr, out_ptr, N, M, D, per_row, q_row_stride, q_stride, k_row_stride,
                    k_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """⟨q_i, k_j⟩ [N, per_row] of the columns j of each row, ∞ where there is none."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    for p in range(per_row):
        col = tl.load(columns_ptr + row * per_row + p, mask=row < N, other=-1)
        exists = (col >= 0) & (col < M)
        total = tl.zeros((ROWS,), tl.float32)
        for step in range(0, D, BLOCK):
            q = load_rows(q_ptr, row, step, D, q_row_stride, q_stride, exists, BLOCK)
            k = load_rows(k_ptr, col, step, D, k_row_stride, k_stride, exists, BLOCK)
            total += tl.sum(q * k, 1)
        out = tl.where(exists, total, float("inf"))
        tl.store(out_ptr + row * per_row + p, out, mask=row < N)


@triton.jit(do_not_specialize=ANY)
def positive_logits(q_ptr, k_ptr, constants_ptr, columns_ptr, products_ptr, out_ptr, N, M, D, diagonal, self_diagonal,
                    per_row, q_row_stride, q_stride, k_row_stride, k_stride, DIAGONAL: tl.constexpr, SELF: tl.constexpr,
                    SOFTPLUS: tl.constexpr, PRODUCTS: tl.constexpr, ROWS: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """Write the logits [N, per_row] of the positives, rounded."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    for p in range(per_row):
        _, _, _, logit, rest = positive_logit(
            q_ptr, k_ptr, constants_ptr, columns_ptr, products_ptr, row, p, N, M, D, diagonal, self_diagonal, per_row,
            q_row_stride, q_stride, k_row_stride, k_stride, DIAGONAL, SELF, SOFTPLUS, PRODUCTS, ROWS,
            BLOCK)  # fmt: skip
        tl.store(out_ptr + row.to(tl.int64) * per_row + p, logit + rest, mask=row < N)


@triton.jit
def _add_to_teacher(top, total, gap, x_top, t, x, exists):
    """A teacher's statistics with one more pair per row."""
    one = exists.to(tl.float32)
    hidden = tl.where(exists, t, -float("inf"))
    return merge_teachers(top, total, gap, x_top, hidden, one, one * 0.0, tl.where(exists, x, -float("inf")))


@triton.jit(do_not_specialize=ANY)
def positive_totals(q_ptr, k_ptr, constants_ptr, columns_ptr, products_ptr, teacher_ptr, row_stats_ptr, col_stats_ptr,
                    N, M, D, diagonal, self_diagonal, per_row, q_row_stride, q_stride, k_row_stride, k_stride,
                    row_stats_stride, col_stats_stride, DIAGONAL: tl.constexpr, SELF: tl.constexpr, COLUMNS:
                    tl.constexpr, SOFTPLUS: tl.constexpr, GUIDE: tl.constexpr, PRODUCTS: tl.constexpr, ROWS:
                    tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write the positives into the statistics of their rows and, on the diagonal, of their columns."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    logits = tl.zeros((ROWS,), tl.float32)
    count = tl.zeros((ROWS,), tl.float32)
    if GUIDE == TEACHER:
        teacher_at = row_stats_ptr + TEACHER_TOP * row_stats_stride + row
        soft_top, soft, gap, x_top = load_stats(teacher_at, row_stats_stride, row < N, 0.0)
    for p in range(per_row):
        col, exists, _, logit, rest = positive_logit(
            q_ptr, k_ptr, constants_ptr, columns_ptr, products_ptr, row, p, N, M, D, diagonal, self_diagonal, per_row,
            q_row_stride, q_stride, k_row_stride, k_stride, DIAGONAL, SELF, SOFTPLUS, PRODUCTS, ROWS,
            BLOCK)  # fmt: skip
        if SOFTPLUS:
            x = logit + rest
            total += tl.where(exists, log1p(tl.exp(-tl.abs(x))) + tl.maximum(-x, 0.0), 0.0)
        else:
            term = tl.exp(rest)
            hidden = tl.where(exists, logit, -float("inf"))
            higher, total = merge_exponentials(top, total, hidden, term)
            safe = finite(higher)
            logits += count * (finite(top) - safe) + tl.where(exists, (logit - safe) + rest, 0.0)
            top = higher
            count += exists.to(tl.float32)
        if GUIDE == TEACHER:
            t = tl.load(teacher_ptr + row.to(tl.int64) * per_row + p, mask=exists, other=0.0)
            soft_top, soft, gap, x_top = _add_to_teacher(soft_top, soft, gap, x_top, t, logit + rest, exists)
            if COLUMNS:
                col_at = col_stats_ptr + TEACHER_TOP * col_stats_stride + col
                col_top, col_soft, col_gap, col_x_top = load_stats(col_at, col_stats_stride, exists, 0.0)
                col_top, col_soft, col_gap, col_x_top = _add_to_teacher(
                    col_top, col_soft, col_gap, col_x_top, t, logit + rest, exists)  # fmt: skip
                # all warps have read before one of them writes: they read numbers of each other's rows
                tl.debug_barrier()
                store_stats(col_top, col_soft, col_gap, col_x_top, col_at, col_stats_stride, exists, True)
        if COLUMNS:
            # a column on the diagonal has one positive
            one = exists.to(tl.float32)
            col_at = col_stats_ptr + POSITIVE_TOP * col_stats_stride + col
            store_stats(logit, one * tl.exp(rest), rest, one, col_at, col_stats_stride, exists, True)
    if SOFTPLUS:
        out = row_stats_ptr + row
        tl.store(out, tl.load(out, mask=row < N, other=0.0) + total, mask=row < N)
    else:
        row_at = row_stats_ptr + POSITIVE_TOP * row_stats_stride + row
        store_stats(top, total, logits, count, row_at, row_stats_stride, row < N, True)
        if GUIDE == TEACHER:
            tl.debug_barrier()
            store_stats(soft_top, soft, gap, x_top, teacher_at, row_stats_stride, row < N, True)


@triton.jit
def _direction_gradient(x, rest, t, state_ptr, stride, coefficient_ptr, at, exists, smoothing, INSIDE: tl.constexpr,
                        GUIDE: tl.constexpr):  # fmt: skip
    """One direction's gradient of the positives, whose logits are x + rest; t: those by a teacher."""
    top, inverse, missing, target = load_positive_state(state_ptr, stride, at, exists)
    share = tl.load(state_ptr + SHARE * stride + at, mask=exists, other=0.0)
    among = tl.exp((x - top) + rest) * inverse
    value = softmax_positive(among, target, missing, smoothing, INSIDE) - share * smoothing
    if GUIDE == TEACHER:
        teacher_top = tl.load(state_ptr + STATE_TEACHER_TOP * stride + at, mask=exists, other=0.0)
        teacher_inverse = tl.load(state_ptr + TEACHER_INVERSE * stride + at, mask=exists, other=0.0)
        value -= tl.exp(t - teacher_top) * teacher_inverse * smoothing
    return value * tl.load(coefficient_ptr + at, mask=exists, other=0.0)


@triton.jit
def _add_product(out_ptr, out_stride, to, x_ptr, source, row_stride, stride, g, exists, times, written, D,
                 BLOCK: tl.constexpr):  # fmt: skip
    """out[to] = out[to] · times + g · x[source], row by row of those `written`; the source need not exist."""
    for step in range(0, D, BLOCK):
        at = step + tl.arange(0, BLOCK)
        inside = written[:, None] & (at < D)[None, :]
        x = load_rows(x_ptr, source, step, D, row_stride, stride, exists, BLOCK)
        out = out_ptr + to.to(tl.int64)[:, None] * out_stride + at[None, :]
        tl.store(out, tl.load(out, mask=inside, other=0.0) * times[:, None] + g[:, None] * x, mask=inside)


@triton.jit(do_not_specialize=ANY)
def positive_gradients(q_ptr, k_ptr, constants_ptr, columns_ptr, products_ptr, teacher_ptr, row_state_ptr,
                       row_coefficient_ptr, col_state_ptr, col_coefficient_ptr, u_ptr, v_ptr, g_ptr, inner_ptr,
                       factors_ptr, N, M, D, diagonal, self_diagonal, per_row, q_row_stride, q_stride, k_row_stride,
                       k_stride, row_state_stride, col_state_stride, u_stride, v_stride, smoothing, DIAGONAL:
                       tl.constexpr, SELF: tl.constexpr, COLUMNS: tl.constexpr, SOFTPLUS: tl.constexpr, GUIDE:
                       tl.constexpr, INSIDE: tl.constexpr, U: tl.constexpr, V: tl.constexpr, TIMES: tl.constexpr,
                       PRODUCTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write g [N, per_row], the gradient of the positives, and g · ⟨q, k⟩. Add g · k to u and, on the diagonal, g · q
    to v. TIMES: u is multiplied by the factors [N] of its rows before.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    once = tl.full((ROWS,), 1.0, tl.float32)
    for p in range(per_row):
        col, exists, inner, x, rest = positive_logit(
            q_ptr, k_ptr, constants_ptr, columns_ptr, products_ptr, row, p, N, M, D, diagonal, self_diagonal, per_row,
            q_row_stride, q_stride, k_row_stride, k_stride, DIAGONAL, SELF, SOFTPLUS, PRODUCTS, ROWS,
            BLOCK)  # fmt: skip
        if SOFTPLUS:
            g = -tl.load(row_coefficient_ptr + row, mask=exists, other=0.0) / (1.0 + tl.exp(x + rest))
        else:
            t = x
            if GUIDE == TEACHER:
                t = tl.load(teacher_ptr + row.to(tl.int64) * per_row + p, mask=exists, other=0.0)
            g = _direction_gradient(x, rest, t, row_state_ptr, row_state_stride, row_coefficient_ptr, row, exists,
                                    smoothing, INSIDE, GUIDE)  # fmt: skip
            if COLUMNS:
                g += _direction_gradient(x, rest, t, col_state_ptr, col_state_stride, col_coefficient_ptr, col, exists,
                                         smoothing, INSIDE, GUIDE)  # fmt: skip
        g = tl.where(exists, g, 0.0)
        at = row.to(tl.int64) * per_row + p
        tl.store(g_ptr + at, g, mask=row < N)
        tl.store(inner_ptr + at, g * inner, mask=row < N)
        if U:
            times = once
            written = exists
            if TIMES:
                times = tl.where(p == 0, tl.load(factors_ptr + row, mask=row < N, other=0.0), 1.0)
                written = (row < N) & (exists | (p == 0))
            _add_product(u_ptr, u_stride, row, k_ptr, col, k_row_stride, k_stride, g, exists, times, written, D, BLOCK)
        if V:
            _add_product(v_ptr, v_stride, col, q_ptr, row, q_row_stride, q_stride, g, exists, once, exists, D, BLOCK)


@triton.jit(do_not_specialize=ANY)
def add_pairs(out_ptr, out_stride, x_ptr, row_stride, feature_stride, targets_ptr, stops_ptr, sources_ptr, values_ptr,
              n, D, BLOCK: tl.constexpr):  # fmt: skip
    """out[targets[s]] += values[s] · x[sources[s]] for each s, by targets in rising order; those from n on are left.

    The program of a target's first s adds all of them, up to stops[s], in their order.
    """
    start = tl.program_id(0)
    row = tl.load(targets_ptr + start)
    before = tl.load(targets_ptr + start - 1, mask=start > 0, other=-1)
    if (row != before) & (row < n):
        stop = tl.load(stops_ptr + start).to(tl.int32)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < D
        total = tl.load(out_ptr + row * out_stride + at, mask=inside, other=0.0).to(tl.float32)
        for s in range(start, stop):
            source = tl.load(sources_ptr + s).to(tl.int64)
            value = tl.load(values_ptr + s)
            x = tl.load(x_ptr + source * row_stride + at.to(tl.int64) * feature_stride, mask=inside, other=0.0)
            total += value * x.to(tl.float32)
        tl.store(out_ptr + row * out_stride + at, total, mask=inside)


@triton.jit(do_not_specialize=ANY)
def add_listed(out_ptr, out_stride, x_ptr, row_stride, feature_stride, columns_ptr, values_ptr, n, per_row, D,
               BLOCK: tl.constexpr, SCAN: tl.constexpr):  # fmt: skip
    """out[columns[s]] += values[s] · x[s // per_row] for each s that is not negative.

    The program of the first s of a column adds all of them, in their order. It finds them by reading all columns.
    """
    first = tl.program_id(0)
    column = tl.load(columns_ptr + first)
    before = first * 0
    for start in range(0, tl.where(column >= 0, first, 0), SCAN):
        s = start + tl.arange(0, SCAN)
        before += tl.sum((tl.load(columns_ptr + s, mask=s < first, other=-1) == column).to(tl.int32))
    if (before == 0) & (column >= 0):
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < D
        total = tl.load(out_ptr + column * out_stride + at, mask=inside, other=0.0).to(tl.float32)
        for start in range(first, n, SCAN):
            s = start + tl.arange(0, SCAN)
            same = tl.load(columns_ptr + s, mask=s < n, other=-1) == column
            source = tl.min(tl.where(same, s, n))
            while source < n:
                x = tl.load(x_ptr + (source // per_row).to(tl.int64) * row_stride + at.to(tl.int64) * feature_stride,
                            mask=inside, other=0.0)  # fmt: skip
                total += tl.load(values_ptr + source) * x.to(tl.float32)
                source = tl.min(tl.where(same & (s > source), s, n))
        tl.store(out_ptr + column * out_stride + at, total, mask=inside)
