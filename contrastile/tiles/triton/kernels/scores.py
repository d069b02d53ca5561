"""Device code between the scores of a block and their gradients, for scores that lie in memory.

Launched by `triton/maxsim/late.py`. The kernels before and behind, which compute scores and pass gradients on, are a
scorer's own:

    score_stats      statistics of rows and columns, as losses/softmax.py counts them
    score_gradients  ∂loss/∂logit of each pair, and its sums
    token_flags      0, or NaN where a token that counts is not finite

With `finish` and `coefficients` of `finish.py` they replace some two hundred small operations.

Names as in `forward.py`; BM and BN are the rows and columns of a tile of scores.
"""

import triton
import triton.language as tl

from contrastile.tiles.triton.kernels.arithmetic import count_along, store_stats
from contrastile.tiles.triton.kernels.careful import add_along, softmax_gradient
from contrastile.tiles.triton.kernels.masks import valid_pairs

# arguments that change from call to call: compiled once for all their values. Strides of scores are not among them:
# one of them is 1, along which neighbours are loaded at once
ANY = ("N", "M", "diagonal", "self_diagonal", "positives", "positives_stride", "positives_start", "row_stats_stride",
       "col_stats_stride", "row_state_stride", "col_state_stride", "smoothing", "q_tokens", "k_tokens",
       "q_blocks")  # fmt: skip


@triton.jit
def _equal_groups(groups, rows, cols, N, M):
    """Mask of the pairs whose ids, or labels, are equal."""
    row_groups_ptr, col_groups_ptr = groups
    row_groups = tl.load(row_groups_ptr + rows, mask=rows < N, other=0)
    col_groups = tl.load(col_groups_ptr + cols, mask=cols < M, other=0)
    return row_groups[:, None] == col_groups[None, :]


@triton.jit
def _load_pairs(scores_ptr, scale_ptr, row_stride, col_stride, rows, cols, N, M, masks, ids, labels,
                DIAGONAL: tl.constexpr, SELF: tl.constexpr, POSITIVES: tl.constexpr, IDS: tl.constexpr,
                LABELS: tl.constexpr):  # fmt: skip
    """Scores and logits of a tile, and masks of its positives and of its negatives."""
    there = valid_pairs(rows, cols, N, M, masks, False, SELF, 0)
    at = rows.to(tl.int64)[:, None] * row_stride + cols.to(tl.int64)[None, :] * col_stride
    s = tl.load(scores_ptr + at, mask=(rows < N)[:, None] & (cols < M)[None, :], other=0.0)
    negative = valid_pairs(rows, cols, N, M, masks, DIAGONAL, SELF, POSITIVES)
    if LABELS:
        negative = negative & (_equal_groups(labels, rows, cols, N, M) == 0)
    positive = there & (negative == 0)
    if IDS:
        negative = negative & (_equal_groups(ids, rows, cols, N, M) == 0)
    return s, s * tl.load(scale_ptr), positive, negative


@triton.jit
def _store_side(scores_ptr, scale_ptr, row_stride, col_stride, N, M, masks, ids, labels, stats_ptr, stats_stride,
                DIAGONAL: tl.constexpr, SELF: tl.constexpr, POSITIVES: tl.constexpr, IDS: tl.constexpr,
                LABELS: tl.constexpr, SMOOTH: tl.constexpr, ALONG: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr):  # fmt: skip
    """Statistics of a tile's rows over all columns (ALONG = 1), or of its columns over all rows (0)."""
    LENGTH: tl.constexpr = BM if ALONG == 1 else BN
    STEP: tl.constexpr = BN if ALONG == 1 else BM
    n = N if ALONG == 1 else M
    others = M if ALONG == 1 else N
    at = tl.program_id(0) * LENGTH + tl.arange(0, LENGTH)
    zero = tl.zeros((LENGTH,), tl.float32)
    top = zero - float("inf")
    total, logit_sum, count = zero, zero, zero
    positive_top, positive_total, positive_sum, positive_count = top, zero, zero, zero
    for start in range(0, others, STEP):
        other = start + tl.arange(0, STEP)
        rows = at if ALONG == 1 else other
        cols = other if ALONG == 1 else at
        _, x, positive, negative = _load_pairs(scores_ptr, scale_ptr, row_stride, col_stride, rows, cols, N, M, masks,
                                               ids, labels, DIAGONAL, SELF, POSITIVES, IDS, LABELS)  # fmt: skip
        top, total, logit_sum, count = add_along(top, total, logit_sum, count, x, negative, ALONG, SMOOTH)
        # most tiles have none
        if tl.max(count_along(x, positive, ALONG), 0) > 0:
            positive_top, positive_total, positive_sum, positive_count = add_along(
                positive_top, positive_total, positive_sum, positive_count, x, positive, ALONG, True)  # fmt: skip
    inside = at < n
    store_stats(top, total, logit_sum, count, stats_ptr + at, stats_stride, inside, True)
    store_stats(positive_top, positive_total, positive_sum, positive_count, stats_ptr + 4 * stats_stride + at,
                stats_stride, inside, True)  # fmt: skip


@triton.jit(do_not_specialize=ANY)
def score_stats(scores_ptr, scale_ptr, row_stats_ptr, col_stats_ptr, positives_ptr, row_ids_ptr, col_ids_ptr,
                row_labels_ptr, col_labels_ptr, row_stride, col_stride, N, M, diagonal, self_diagonal, positives,
                positives_stride, positives_start, row_stats_stride, col_stats_stride, DIAGONAL: tl.constexpr,
                SELF: tl.constexpr, POSITIVES: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr,
                SMOOTH: tl.constexpr, SIDE: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Write the statistics [8, N] of the rows (program_id 1 = 0), and [8, M] of the columns (1).

    SIDE: rows, or columns, of a program, which meet STEP of the others at a time.
    """
    ids = (row_ids_ptr, col_ids_ptr)
    masks = (diagonal, self_diagonal, positives_ptr, positives, positives_stride, positives_start)
    labels = (row_labels_ptr, col_labels_ptr)
    if tl.program_id(1) == 0:
        _store_side(scores_ptr, scale_ptr, row_stride, col_stride, N, M, masks, ids, labels, row_stats_ptr,
                    row_stats_stride, DIAGONAL, SELF, POSITIVES, IDS, LABELS, SMOOTH, 1, SIDE, STEP)  # fmt: skip
    else:
        _store_side(scores_ptr, scale_ptr, row_stride, col_stride, N, M, masks, ids, labels, col_stats_ptr,
                    col_stats_stride, DIAGONAL, SELF, POSITIVES, IDS, LABELS, SMOOTH, 0, STEP, SIDE)  # fmt: skip


@triton.jit(do_not_specialize=ANY)
def score_gradients(scores_ptr, scale_ptr, out_ptr, sums_ptr, row_state_ptr, row_coefficient_ptr, col_state_ptr,
                    col_coefficient_ptr, positives_ptr, row_ids_ptr, col_ids_ptr, row_labels_ptr, col_labels_ptr,
                    row_stride, col_stride, N, M, diagonal, self_diagonal, positives, positives_stride, positives_start,
                    row_state_stride, col_state_stride, smoothing, DIAGONAL: tl.constexpr, SELF: tl.constexpr,
                    POSITIVES: tl.constexpr, IDS: tl.constexpr, LABELS: tl.constexpr, COLUMNS: tl.constexpr,
                    BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Write g = ∂loss/∂logit of each pair with the strides of the scores, and sums [2, programs] of g and g · score."""
    ids = (row_ids_ptr, col_ids_ptr)
    masks = (diagonal, self_diagonal, positives_ptr, positives, positives_stride, positives_start)
    labels = (row_labels_ptr, col_labels_ptr)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    s, x, positive, negative = _load_pairs(scores_ptr, scale_ptr, row_stride, col_stride, rows, cols, N, M, masks, ids,
                                           labels, DIAGONAL, SELF, POSITIVES, IDS, LABELS)  # fmt: skip
    several = tl.max(count_along(x, positive, 1), 0)
    g = softmax_gradient(x, x, positive, several, row_state_ptr, row_state_stride, row_coefficient_ptr, 1.0, rows,
                         rows < N, smoothing, 1, True, 0)  # fmt: skip
    if COLUMNS:
        g += softmax_gradient(x, x, positive, several, col_state_ptr, col_state_stride, col_coefficient_ptr, 1.0, cols,
                              cols < M, smoothing, 0, True, 0)  # fmt: skip
    g = tl.where(positive | negative, g, 0.0)
    at = rows.to(tl.int64)[:, None] * row_stride + cols.to(tl.int64)[None, :] * col_stride
    tl.store(out_ptr + at, g, mask=(rows < N)[:, None] & (cols < M)[None, :])
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums_ptr + program, tl.sum(g))
    tl.store(sums_ptr + tl.num_programs(0) * tl.num_programs(1) + program, tl.sum(g * s))


@triton.jit
def _flag(x_ptr, mask_ptr, block, tokens, D, MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Σ x · 0 over the ROWS tokens of a block that count."""
    token = block * ROWS + tl.arange(0, ROWS)
    counted = token < tokens
    if MASKED:
        counted = counted & (tl.load(mask_ptr + token, mask=counted, other=0) != 0)
    flag = tl.zeros((ROWS,), tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        at = token.to(tl.int64)[:, None] * D + d[None, :]
        x = tl.load(x_ptr + at, mask=counted[:, None] & (d < D)[None, :], other=0.0)
        flag += tl.sum(x.to(tl.float32) * 0.0, 1)
    return tl.sum(flag)


@triton.jit(do_not_specialize=ANY)
def token_flags(q_ptr, q_mask_ptr, k_ptr, k_mask_ptr, scale_ptr, out_ptr, q_tokens, k_tokens, q_blocks, D,
                ROWS_MASKED: tl.constexpr, COLS_MASKED: tl.constexpr, ROWS: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Write Σ x · 0 of each block of ROWS tokens, first those of q [q_tokens, D], then those of k; and scale · 0."""
    block = tl.program_id(0)
    if block < q_blocks:
        flag = _flag(q_ptr, q_mask_ptr, block, q_tokens, D, ROWS_MASKED, ROWS, BLOCK)
    else:
        flag = _flag(k_ptr, k_mask_ptr, block - q_blocks, k_tokens, D, COLS_MASKED, ROWS, BLOCK)
    tl.store(out_ptr + block, flag + tl.load(scale_ptr) * 0.0)
