"""Device code of masks by position: the pairs of a tile that count, unless a bit of `guides.py` excludes them.

Below `forward.py`. `masks` holds the excluded positions: the two diagonals, and the positives by index with their
number per row, stride and first column.
"""

import triton
import triton.language as tl

# positives per row up to which a kernel is compiled for their number; above it, one kernel loops over them
UNROLLED = tl.constexpr(4)
# value of POSITIVES if they are known by label: then `positives_ptr` has five columns for each row, in the order of
# labels. They are the first column of its label, the first behind those, and its own column (or −1); then the least
# first column over this row and all later rows of its tile, and the largest end over it and all earlier rows
BY_LABEL = tl.constexpr(-1)
FIRST, STOP, ITSELF, LOWEST_COLUMN, HIGHEST_COLUMN = (tl.constexpr(row) for row in range(5))


@triton.jit
def _column(positives_at, inside, positives_start):
    """Columns of positives, in 32 bits: the comparisons of a tile cost twice as much in 64."""
    return (tl.load(positives_at, mask=inside, other=-1) - positives_start).to(tl.int32)


@triton.jit
def row_spans(spans_ptr, stride, start, rows, N):
    """Each row's first column of its label, the first behind them, and its own column, counted from `start`."""
    first = tl.load(spans_ptr + FIRST * stride + rows, mask=rows < N, other=0) - start
    stop = tl.load(spans_ptr + STOP * stride + rows, mask=rows < N, other=0) - start
    itself = tl.load(spans_ptr + ITSELF * stride + rows, mask=rows < N, other=-1) - start
    return first, stop, itself


@triton.jit
def _any_in_tile(positives_at, inside, positives_start, j, BN: tl.constexpr):
    """True if any of these positives lies in the j-th column of tiles."""
    col = _column(positives_at, inside, positives_start)
    return tl.max(((col >= j * BN) & (col < (j + 1) * BN)).to(tl.int32)) > 0


@triton.jit
def has_masked(i, j, N, M, masks, BM: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr, SELF: tl.constexpr,
               POSITIVES: tl.constexpr):  # fmt: skip
    """True if the tile has a pair that is excluded by its position, or reaches over the edge."""
    diagonal, self_diagonal, positives_ptr, positives, positives_stride, positives_start = masks
    masked = ((i + 1) * BM > N) | ((j + 1) * BN > M)
    if DIAGONAL:
        masked = masked | ((diagonal + i * BM < (j + 1) * BN) & (diagonal + (i + 1) * BM > j * BN))
    if SELF and POSITIVES != BY_LABEL:
        masked = masked | ((self_diagonal + i * BM < (j + 1) * BN) & (self_diagonal + (i + 1) * BM > j * BN))
    if POSITIVES == BY_LABEL:
        bounds = positives_ptr + i * BM
        last = tl.minimum(BM, N - i * BM) - 1
        lowest = tl.load(bounds + LOWEST_COLUMN * positives_stride) - positives_start
        highest = tl.load(bounds + HIGHEST_COLUMN * positives_stride + last) - positives_start
        masked = masked | ((lowest < (j + 1) * BN) & (highest > j * BN))
    else:
        positives_at = positives_ptr + (i * BM + tl.arange(0, BM)).to(tl.int64) * positives_stride
        inside = i * BM + tl.arange(0, BM) < N
        if POSITIVES <= UNROLLED:
            for p in tl.static_range(POSITIVES):
                masked = masked | _any_in_tile(positives_at + p, inside, positives_start, j, BN)
        else:
            for p in range(positives):
                masked = masked | _any_in_tile(positives_at + p, inside, positives_start, j, BN)
    return masked


@triton.jit
def valid_pairs(rows, cols, N, M, masks, DIAGONAL: tl.constexpr, SELF: tl.constexpr, POSITIVES: tl.constexpr):
    """Mask of the pairs that exist and are not excluded by their position."""
    diagonal, self_diagonal, positives_ptr, positives, positives_stride, positives_start = masks
    valid = (rows < N)[:, None] & (cols < M)[None, :]
    if DIAGONAL:
        valid = valid & (cols[None, :] != (rows + diagonal)[:, None])
    if POSITIVES == BY_LABEL:
        first, stop, itself = row_spans(positives_ptr, positives_stride, positives_start, rows, N)
        valid = valid & ((cols[None, :] < first[:, None]) | (cols[None, :] >= stop[:, None]))
        if SELF:
            valid = valid & (cols[None, :] != itself[:, None])
    else:
        if SELF:
            valid = valid & (cols[None, :] != (rows + self_diagonal)[:, None])
        positives_at = positives_ptr + rows.to(tl.int64) * positives_stride
        if POSITIVES <= UNROLLED:
            for p in tl.static_range(POSITIVES):
                col = _column(positives_at + p, rows < N, positives_start)
                valid = valid & (cols[None, :] != col[:, None])
        else:
            for p in range(positives):
                col = _column(positives_at + p, rows < N, positives_start)
                valid = valid & (cols[None, :] != col[:, None])
    return valid


@triton.jit
def _store_column(acc, col, at, rows, cols, N, M, first, BN: tl.constexpr):
    """Store the number of each row's column, where that lies in the tile."""
    here = tl.sum(tl.where(cols[None, :] == col[:, None], acc, 0.0), 1)
    tl.store(at, here, mask=(rows < N) & (col >= first) & (col < tl.minimum(first + BN, M)))


@triton.jit
def store_listed(acc, listed_ptr, i, j, N, M, masks, BM: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr,
                 POSITIVES: tl.constexpr):  # fmt: skip
    """Write ⟨q, k⟩ of the positives that lie in tile (i, j) to `listed` [N, positives], for `positions.py`.

    So they have the rounding errors of the tiles. A difference between a positive and negatives like it would remain
    where their gradients cancel.
    """
    diagonal, _, positives_ptr, positives, positives_stride, positives_start = masks
    rows = i * BM + tl.arange(0, BM)
    cols = j * BN + tl.arange(0, BN)
    if DIAGONAL:
        _store_column(acc, rows + diagonal, listed_ptr + rows, rows, cols, N, M, j * BN, BN)
    else:
        at = rows.to(tl.int64)
        if POSITIVES <= UNROLLED:
            for p in tl.static_range(POSITIVES):
                col = _column(positives_ptr + at * positives_stride + p, rows < N, positives_start)
                _store_column(acc, col, listed_ptr + at * positives + p, rows, cols, N, M, j * BN, BN)
        else:
            for p in range(positives):
                col = _column(positives_ptr + at * positives_stride + p, rows < N, positives_start)
                _store_column(acc, col, listed_ptr + at * positives + p, rows, cols, N, M, j * BN, BN)
