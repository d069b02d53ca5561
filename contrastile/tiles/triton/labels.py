# mypy: ignore-errors
# device code: Triton compiles these functions from their source, their arguments have no Python types
"""Device code of positives by label, within the tiles of the fast kernels.

Between `arithmetic.py` and the kernels in `forward.py` and `backward.py`. A tile is processed in quarters: mask and
exponentials of a whole one do not fit the registers beside its products. Most quarters have no positive, and take the
way of a loss without labels: `label_quarters`, launched by `launch.py`, says which have one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contrastile.tiles.triton.arithmetic import (
    ANY,
    LN2,
    binade,
    count_along,
    exponents,
    log1p,
    product_less_one,
    quarter,
    store_sums,
)
from contrastile.tiles.triton.masks import distinct_pairs, equal_groups, has_masked, valid_pairs


@triton.jit
def softplus_growth(e, BM: tl.constexpr, BN: tl.constexpr):
    """Π(1 + e) − 1 of every eighth column: the product less 1 keeps the digits of small terms."""
    return tl.reduce(tl.reshape(e, (BM, BN // 8, 8)), 1, product_less_one)


@triton.jit
def positive_by_label(labels, t, rows, cols, N, M):
    """Mask of the positives by label among the pairs that count, whose t is above −∞."""
    return equal_groups(labels, rows, cols, N, M) & (t != -float("inf"))


@triton.jit(do_not_specialize=ANY)
def label_quarters(row_labels_ptr, col_labels_ptr, quarters_ptr, N, M, col_tiles, BM: tl.constexpr,
                   BN: tl.constexpr):  # fmt: skip
    """Write a number for each tile [row tiles, col tiles]: its four bits say which quarters have equal labels.

    In the tile kernels this test would make all warps wait for each other at each quarter.
    """
    i = tl.program_id(0) // col_tiles
    j = tl.program_id(0) % col_tiles
    rows = i * BM + tl.arange(0, BM)
    of_rows = tl.load(row_labels_ptr + rows, mask=rows < N, other=-1)
    WIDTH: tl.constexpr = BN // 4
    bits = 0
    for at in tl.static_range(4):
        cols = j * BN + at * WIDTH + tl.arange(0, WIDTH)
        of_cols = tl.load(col_labels_ptr + cols, mask=cols < M, other=-2)
        equal = (of_rows[:, None] == of_cols[None, :]).to(tl.int32)
        bits = bits | (tl.max(tl.max(equal, 1), 0) << at)
    tl.store(quarters_ptr + tl.program_id(0), bits)


@triton.jit
def _label_exponents(part, constants, masks, masked, ids, labels, rows, cols, N, M, DIAGONAL: tl.constexpr,
                     SELF: tl.constexpr, POSITIVES: tl.constexpr, IDS: tl.constexpr,
                     PRODUCTS: tl.constexpr):  # fmt: skip
    """t of some of a tile's columns, negated for positives by label, 2^−|t|, and the mask of these positives."""
    t = exponents(part, constants, True, PRODUCTS)
    positive = equal_groups(labels, rows, cols, N, M)
    t = tl.where(positive, -t, t)
    if IDS or masked:
        valid = valid_pairs(rows, cols, N, M, masks, DIAGONAL, SELF, POSITIVES)
        if IDS:
            valid = valid & distinct_pairs(ids, labels, rows, cols, N, M, True)
        t = tl.where(valid, t, -float("inf"))
    return t, tl.math.exp2(tl.abs(t) * -1.0), positive


@triton.jit
def positive_weights(numbers, rows, cols, N, M):
    """The weight of each pair as a positive by label: a number of the row and one of the column."""
    row_numbers_ptr, col_numbers_ptr = numbers
    of_rows = tl.load(row_numbers_ptr + rows, mask=rows < N, other=0.0)
    of_cols = tl.load(col_numbers_ptr + cols, mask=cols < M, other=0.0)
    return of_rows[:, None] + of_cols[None, :]


@triton.jit
def _further_softplus(part, several, constants, masks, masked, labels, numbers, rows, cols, N, M, BM: tl.constexpr,
                      DIAGONAL: tl.constexpr, SELF: tl.constexpr, POSITIVES: tl.constexpr,
                      PRODUCTS: tl.constexpr):  # fmt: skip
    """Σ (weight − 1) · softplus of the positives by label, a logarithm for each pair, where there are any."""
    further = tl.zeros((BM,), tl.float32)
    if several:
        positive = equal_groups(labels, rows, cols, N, M)
        if masked:
            positive = positive & valid_pairs(rows, cols, N, M, masks, DIAGONAL, SELF, POSITIVES)
        t = -exponents(part, constants, True, PRODUCTS)
        terms = log1p(tl.math.exp2(tl.abs(t) * -1.0)) + tl.maximum(t, 0.0) * LN2
        further = tl.sum(tl.where(positive, (positive_weights(numbers, rows, cols, N, M) - 1.0) * terms, 0.0), 1)
    return further


@triton.jit
def label_softplus(part, several, constants, masks, masked, ids, labels, numbers, rows, cols, N, M, BM: tl.constexpr,
                   WIDTH: tl.constexpr, DIAGONAL: tl.constexpr, SELF: tl.constexpr, POSITIVES: tl.constexpr,
                   IDS: tl.constexpr, WEIGHED: tl.constexpr, PRODUCTS: tl.constexpr):  # fmt: skip
    """t, 2^−|t| and the mask of positives by label, of some of a tile's columns, and two sums.

    t is negated for positives. The sums are log Π(1 + e) without its logarithm, see `softplus_growth`, and the rest.
    """
    rest = tl.zeros((BM,), tl.float32)
    if WEIGHED:
        # before the others, which would not fit the registers beside it
        rest = _further_softplus(part, several, constants, masks, masked, labels, numbers, rows, cols, N, M, BM,
                                 DIAGONAL, SELF, POSITIVES, PRODUCTS)  # fmt: skip
    t, e, positive = _label_exponents(part, constants, masks, masked, ids, labels, rows, cols, N, M, DIAGONAL, SELF,
                                      POSITIVES, IDS, PRODUCTS)  # fmt: skip
    return t, e, positive, softplus_growth(e, BM, WIDTH), rest + tl.sum(tl.maximum(t, 0.0), 1) * LN2


@triton.jit
def _positive_sums(t, e, positive, axis: tl.constexpr):
    """Σ e of the positives along `axis`, Σ (t − binade of that), and their number."""
    total = tl.sum(tl.where(positive, e, 0.0), axis)
    relative = t - tl.expand_dims(binade(total), axis)
    return total, tl.sum(tl.where(positive, relative, 0.0), axis), count_along(e, positive, axis)


@triton.jit
def label_softplus_totals(acc, bits, constants, masks, ids, labels, numbers, i, j, N, M, BM: tl.constexpr,
                          BN: tl.constexpr, DIAGONAL: tl.constexpr, SELF: tl.constexpr, POSITIVES: tl.constexpr,
                          IDS: tl.constexpr, WEIGHED: tl.constexpr, PRODUCTS: tl.constexpr):  # fmt: skip
    """A tile's sums of softplus with positives by label."""
    masked = has_masked(i, j, N, M, masks, BM, BN, DIAGONAL, SELF, POSITIVES)
    rows = i * BM + tl.arange(0, BM)
    WIDTH: tl.constexpr = BN // 4
    growth = tl.zeros((BM, 8), tl.float32)
    rest = tl.zeros((BM,), tl.float32)
    for at in tl.static_range(4):
        cols = j * BN + at * WIDTH + tl.arange(0, WIDTH)
        _, _, _, more_growth, more = label_softplus(
            quarter(acc, at, BM, BN), (bits >> at) & 1, constants, masks, masked, ids, labels, numbers, rows, cols, N,
            M, BM, WIDTH, DIAGONAL, SELF, POSITIVES, IDS, WEIGHED, PRODUCTS)  # fmt: skip
        growth = product_less_one(growth, more_growth)
        rest += more
    return tl.sum(log1p(growth), 1) + rest


@triton.jit
def no_positives(row_at, col_at, rows, cols, N, M, row_tiles, col_tiles, BM: tl.constexpr, BN: tl.constexpr,
                 COLUMNS: tl.constexpr):  # fmt: skip
    """Store zeros for the sums of positives of a tile that has none."""
    none = tl.zeros((BM,), tl.float32)
    row_stride = col_tiles.to(tl.int64) * N
    store_sums(none, none, none, row_at + row_stride, row_stride, rows < N)
    if COLUMNS:
        none = tl.zeros((BN,), tl.float32)
        col_stride = row_tiles.to(tl.int64) * M
        store_sums(none, none, none, col_at + col_stride, col_stride, cols < M)


@triton.jit
def label_totals(acc, bits, constants, masks, ids, labels, row_at, col_part_ptr, i, j, N, M, row_tiles, col_tiles,
                 BM: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr, SELF: tl.constexpr,
                 POSITIVES: tl.constexpr, IDS: tl.constexpr, COLUMNS: tl.constexpr,
                 PRODUCTS: tl.constexpr):  # fmt: skip
    """A tile's sums of negatives along rows. Store those along columns, and the three of `_positive_sums` of both."""
    masked = has_masked(i, j, N, M, masks, BM, BN, DIAGONAL, SELF, POSITIVES)
    rows = i * BM + tl.arange(0, BM)
    row_stride = col_tiles.to(tl.int64) * N
    col_stride = row_tiles.to(tl.int64) * M
    total = tl.zeros((BM,), tl.float32)
    of_positives, logit_sum, count = total, total, total
    WIDTH: tl.constexpr = BN // 4
    for at in tl.static_range(4):
        cols = j * BN + at * WIDTH + tl.arange(0, WIDTH)
        col_at = col_part_ptr + i.to(tl.int64) * M + cols
        t = exponents(quarter(acc, at, BM, BN), constants, False, PRODUCTS)
        if IDS or masked:
            valid = valid_pairs(rows, cols, N, M, masks, DIAGONAL, SELF, POSITIVES)
            if IDS:
                valid = valid & distinct_pairs(ids, labels, rows, cols, N, M, True)
            t = tl.where(valid, t, -float("inf"))
        e = tl.math.exp2(t)
        if (bits >> at) & 1:
            positive = positive_by_label(labels, t, rows, cols, N, M)
            more, more_sum, more_count = _positive_sums(t, e, positive, 1)
            both = of_positives + more
            logit_sum += count * (binade(of_positives) - binade(both))
            logit_sum += more_sum + more_count * (binade(more) - binade(both))
            of_positives = both
            count += more_count
            if COLUMNS:
                more, more_sum, more_count = _positive_sums(t, e, positive, 0)
                store_sums(more, more_sum, more_count, col_at + col_stride, col_stride, cols < M)
            e = tl.where(positive, 0.0, e)
        elif COLUMNS:
            none = tl.zeros((WIDTH,), tl.float32)
            store_sums(none, none, none, col_at + col_stride, col_stride, cols < M)
        total += tl.sum(e, 1)
        if COLUMNS:
            tl.store(col_at, tl.sum(e, 0), mask=cols < M)
    store_sums(of_positives, logit_sum, count, row_at + row_stride, row_stride, rows < N)
    return total
