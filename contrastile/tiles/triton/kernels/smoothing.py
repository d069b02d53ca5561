"""Device code of label smoothing as sums of features, launched by `triton/smoothing.py`.

    feature_sums     Σ x_i and Σ w_i x_i of the rows of each program
    add_totals       sums and numbers of the negatives' logits, from Σ x_i of the other side
    shares           each row's share of its keys, and its state without it
    add_gradients    that share subtracted from the gradients of rows and columns

The tile kernels compute all pairs as without smoothing, and those of `label_sums.py` the pairs of equal ids.
"""

import triton
import triton.language as tl

from contrastile.tiles.triton.kernels.arithmetic import (
    ANY,
    LOGIT_COUNT,
    LOGIT_SUM,
    POSITIVE_COUNT,
    POSITIVE_SUM,
    POSITIVE_TOP,
    SCALE,
    SHARE,
    TOP,
    load_rows,
    one_side,
)


@triton.jit(do_not_specialize=ANY)
def feature_sums(row_x_ptr, row_x_row_stride, row_x_stride, row_shares_ptr, N, col_x_ptr, col_x_row_stride,
                 col_x_stride, col_shares_ptr, M, out_ptr, D, KINDS: tl.constexpr, COLUMNS: tl.constexpr,
                 ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write Σ x_i of this program's rows and, of two KINDS, Σ w_i x_i, to `out` [2, programs, KINDS, D].

    program_id 1 = 0: of rows, 1: of columns, which have weights with COLUMNS; program_id 2: the features.
    """
    of_rows = tl.program_id(1) == 0
    x_ptr, row_stride, stride, shares_ptr, n = one_side(
        of_rows, (row_x_ptr, row_x_row_stride, row_x_stride, row_shares_ptr, N),
        (col_x_ptr, col_x_row_stride, col_x_stride, col_shares_ptr, M))  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x = load_rows(x_ptr, row, tl.program_id(2) * BLOCK, D, row_stride, stride, row < n, BLOCK)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    out = out_ptr + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * (KINDS * D) + at
    tl.store(out, tl.sum(x, 0), mask=at < D)
    if KINDS == 2:
        weight = tl.load(shares_ptr + row, mask=(row < n) & (of_rows | COLUMNS), other=0.0)
        tl.store(out + D, tl.sum(x * weight[:, None], 0), mask=at < D)


@triton.jit(do_not_specialize=ANY)
def add_totals(row_x_ptr, row_x_row_stride, row_x_stride, row_stats_ptr, row_stats_stride, row_excluded_ptr, N,
               col_x_ptr, col_x_row_stride, col_x_stride, col_stats_ptr, col_stats_stride, col_excluded_ptr, M,
               sums_ptr, constants_ptr, D, EXCLUDED: tl.constexpr, ROWS: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """Write Σ (x − top) and the number of each row's negatives into its statistics, from the sums [2, D] of features.

    Those of all keys less those of the positives, and with EXCLUDED less those of excluded pairs, which have the place
    of positives in other statistics of the same strides. program_id 1 = 0 computes rows, 1 columns.
    """
    of_rows = tl.program_id(1) == 0
    x_ptr, row_stride, feature_stride, stats_ptr, stride, excluded_ptr, n, others = one_side(
        of_rows, (row_x_ptr, row_x_row_stride, row_x_stride, row_stats_ptr, row_stats_stride, row_excluded_ptr, N, M),
        (col_x_ptr, col_x_row_stride, col_x_stride, col_stats_ptr, col_stats_stride, col_excluded_ptr, M, N),
    )  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < n
    sums = sums_ptr + tl.where(of_rows, D, 0)
    inner = tl.zeros((ROWS,), tl.float32)
    for step in range(0, D, BLOCK):
        at = step + tl.arange(0, BLOCK)
        x = load_rows(x_ptr, row, step, D, row_stride, feature_stride, inside, BLOCK)
        inner += tl.sum(x * tl.load(sums + at, mask=at < D, other=0.0)[None, :], 1)
    logits = inner.to(tl.float64) * tl.load(constants_ptr + SCALE)
    stats = stats_ptr + row
    count = tl.load(stats + POSITIVE_COUNT * stride, mask=inside, other=0.0)
    top = tl.load(stats + POSITIVE_TOP * stride, mask=inside, other=0.0)
    logits -= tl.load(stats + POSITIVE_SUM * stride, mask=inside, other=0.0)
    logits -= tl.where(count > 0, top, 0.0).to(tl.float64) * count
    count = others - count
    if EXCLUDED:
        excluded = excluded_ptr + row
        logits -= tl.load(excluded + POSITIVE_SUM * stride, mask=inside, other=0.0)
        count -= tl.load(excluded + POSITIVE_COUNT * stride, mask=inside, other=0.0)
    top = tl.load(stats + TOP * stride, mask=inside, other=0.0)
    logits -= tl.where(count > 0, top, 0.0).to(tl.float64) * count
    tl.store(stats + LOGIT_SUM * stride, logits.to(tl.float32), mask=inside)
    tl.store(stats + LOGIT_COUNT * stride, count, mask=inside)


@triton.jit(do_not_specialize=ANY)
def shares(row_state_ptr, row_state_stride, row_coefficient_ptr, row_out_ptr, N, col_state_ptr, col_state_stride,
           col_coefficient_ptr, col_out_ptr, M, smoothing, STATE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write ε times the coefficient of each row over its number of keys, and behind it the row's state [STATE] with a
    share of 0. program_id 1 = 0 computes rows, 1 columns.
    """
    state_ptr, stride, coefficient_ptr, out_ptr, n = one_side(
        tl.program_id(1) == 0, (row_state_ptr, row_state_stride, row_coefficient_ptr, row_out_ptr, N),
        (col_state_ptr, col_state_stride, col_coefficient_ptr, col_out_ptr, M))  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    share = tl.load(state_ptr + SHARE * stride + at, mask=inside, other=0.0)
    share *= tl.load(coefficient_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, share * smoothing, mask=inside)
    for number in tl.static_range(STATE):
        value = tl.load(state_ptr + number * stride + at, mask=inside, other=0.0)
        tl.store(out_ptr + (number + 1) * n + at, tl.where(number == SHARE, 0.0, value), mask=inside)


@triton.jit(do_not_specialize=ANY)
def add_gradients(row_out_ptr, row_out_stride, row_shares_ptr, N, col_out_ptr, col_out_stride, col_shares_ptr, M,
                  sums_ptr, inner_ptr, D, COLUMNS: tl.constexpr, U: tl.constexpr, ROWS: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Subtract c_i Σ k_j + Σ d_j k_j from rows, and d_j Σ q_i + Σ c_i q_i from columns, by the sums [2, 2, D] of rows
    and of columns: plain, then weighed. Their products are subtracted from `inner`.

    COLUMNS: columns have shares. U: rows have gradients. program_id 1 = 0 computes rows, 1 columns.
    """
    of_rows = tl.program_id(1) == 0
    out_ptr, stride, shares_ptr, n = one_side(of_rows, (row_out_ptr, row_out_stride, row_shares_ptr, N),
                                              (col_out_ptr, col_out_stride, col_shares_ptr, M))  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    share = tl.load(shares_ptr + row, mask=(row < n) & (of_rows | COLUMNS), other=0.0)
    inner = tl.zeros((BLOCK,), tl.float64)
    for step in range(0, D, BLOCK):
        at = step + tl.arange(0, BLOCK)
        q = tl.load(sums_ptr + at, mask=at < D, other=0.0)
        of_q = tl.load(sums_ptr + D + at, mask=at < D, other=0.0)
        k = tl.load(sums_ptr + 2 * D + at, mask=at < D, other=0.0)
        of_k = tl.load(sums_ptr + 3 * D + at, mask=at < D, other=0.0)
        inner += of_q.to(tl.float64) * k + q.to(tl.float64) * of_k
        if U | (of_rows == 0):
            out = out_ptr + row.to(tl.int64)[:, None] * stride + at[None, :]
            inside = (row < n)[:, None] & (at < D)[None, :]
            taken = share[:, None] * tl.where(of_rows, k, q)[None, :] + tl.where(of_rows, of_k, of_q)[None, :]
            before = tl.load(out, mask=inside, other=0.0).to(tl.float32)
            tl.store(out, (before - taken).to(out_ptr.dtype.element_ty), mask=inside)
    if (tl.program_id(0) == 0) & of_rows:
        total = tl.load(inner_ptr) - tl.sum(inner)
        # all warps have read before one of them writes
        tl.debug_barrier()
        tl.store(inner_ptr, total)
