"""Device code of the forward: products of a super-tile, and their sums.

Launched by `launch.py`; shared with the files beside it. Kernels with the shape of a matrix product differ in their
epilogue, the work on one tile of products:

    totals    one exponential (or softplus) per pair; sums along rows and columns, one number per tile and row
    maxima    its careful form, in `careful.py`

A pair's term is an exponential or, with the constexpr SOFTPLUS, a softplus. Exponentials are computed in base 2:
t = ⟨q, k⟩ · factor − shift with factor = scale · log2(e), so that exp(x) = 2^shift · 2^t. The shift comes from the
largest norms so that t ≤ 100: nothing overflows, no maximum is needed, and 226 binades lie between the largest term
and the first that is lost. A sum that ends below 2^−60 sets the careful flag on the device. The careful kernels run
where it is set and return at once elsewhere. Norms of features that are not normalised allow far larger logits than
there are: in 16 bits the shift is then estimated from some pairs, and a sum above 2^100 sets the flag too.
A guide may leave a row without a negative, whose sum is 0: the exponents of those that it leaves are at least −120, so
that such a sum needs no care. The factor compensates the tensor cores' truncation (docs/numerics.md).

Names: `_ptr` points to memory, `_mem` to memory or a descriptor of it; N and M are the rows and columns of the
super-tile, BM and BN those of a tile, D is the padded feature size, and G that of a guide.
"""

import triton
import triton.language as tl

from contrastile.tiles.triton.kernels.arithmetic import (
    ANY,
    CAREFUL,
    FAINT,
    INTERPRETED,
    LN2,
    MASK,
    ROUNDED,
    TEACHER,
    TEACHERS,
    binade,
    count_along,
    exponent_constants,
    exponents,
    halves,
    log1p,
    packed,
    quarter,
    store_rows,
    sum_per_lane,
    unpacked,
)
from contrastile.tiles.triton.kernels.guides import (
    aside,
    excluded_pairs,
    has_bits,
    load_bits,
    set_aside,
    store_bits,
)
from contrastile.tiles.triton.kernels.masks import has_masked, store_listed, valid_pairs

# row tiles that are computed together, so that the columns' features stay in the cache
GROUP = tl.constexpr(16)


@triton.jit
def tile_at(tile, row_tiles, col_tiles):
    """Row and column of a tile by its number, in the order of GROUP."""
    width = GROUP * col_tiles
    first = tile // width * GROUP
    height = min(row_tiles - first, GROUP)
    return first + tile % width % height, tile % width // height


@triton.jit
def load_features(mem, stride, row, col, n, width, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    """[ROWS, COLS] of the features at (row, col), 0 outside; by TMA where available."""
    if TMA:
        piece = mem.load([row, col])
    else:
        rows = row + tl.arange(0, ROWS)
        cols = col + tl.arange(0, COLS)
        at = rows.to(tl.int64)[:, None] * stride + cols[None, :]
        piece = tl.load(mem + at, mask=(rows < n)[:, None] & (cols < width)[None, :], other=0.0)
    return piece


@triton.jit
def products(q_mem, k_mem, q_stride, k_stride, i, j, N, M, D, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
             LEFT: tl.constexpr, RIGHT: tl.constexpr, PRODUCTS: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """⟨q, k⟩ of tile (i, j). Pieces of features lie side by side; product p takes pieces LEFT[p] and RIGHT[p]."""
    acc = tl.zeros((BM, BN), tl.float32)
    # at most three pieces
    width = D * min(PRODUCTS, 3)
    for step in range(0, PRODUCTS * D, BK):
        left = step
        right = step
        if PRODUCTS > 1:
            product = step // D
            left = step + (((LEFT >> (2 * product)) & 3) - product) * D
            right = step + (((RIGHT >> (2 * product)) & 3) - product) * D
        q = load_features(q_mem, q_stride, i * BM, left, N, width, BM, BK, TMA)
        k = load_features(k_mem, k_stride, j * BN, right, M, width, BN, BK, TMA)
        if INTERPRETED:
            q = q.to(tl.float32)
            k = k.to(tl.float32)
        acc = tl.dot(q, k.T, acc)
    return acc


@triton.jit
def tile_products(q_mem, k_mem, q_stride, k_stride, D, guide_q_mem, guide_k_mem, guide_q_stride, guide_k_stride, G,
                  scratch_ptr, i, j, N, M, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr,
                  RIGHT: tl.constexpr, PRODUCTS: tl.constexpr, GUIDE: tl.constexpr, GUIDE_LEFT: tl.constexpr,
                  GUIDE_RIGHT: tl.constexpr, GUIDE_PRODUCTS: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """⟨q, k⟩ of tile (i, j). A teacher's product comes before it, and is set aside: the registers hold one of them."""
    if GUIDE == TEACHER:
        guide = products(guide_q_mem, guide_k_mem, guide_q_stride, guide_k_stride, i, j, N, M, G, BM, BN, BK,
                         GUIDE_LEFT, GUIDE_RIGHT, GUIDE_PRODUCTS, TMA)  # fmt: skip
        for at in tl.static_range(4):
            set_aside(scratch_ptr, quarter(guide, at, BM, BN), at, BM, BN)
    return products(q_mem, k_mem, q_stride, k_stride, i, j, N, M, D, BM, BN, BK, LEFT, RIGHT, PRODUCTS, TMA)


@triton.jit
def _product_less_one(a, b):
    """(1 + a)(1 + b) − 1, to full precision for small a and b too."""
    return a + b + a * b


@triton.jit
def softplus_sum(t, BM: tl.constexpr, BN: tl.constexpr):
    """Σ_j log(1 + 2^t_ij): one exponential per pair, and one logarithm for many.

    Σ log(1 + e) = log Π(1 + e). BN / 8 factors of at most 2 do not overflow.
    """
    e = tl.math.exp2(tl.abs(t) * -1.0)
    # the product less 1 keeps the digits of small terms
    growth = tl.reduce(tl.reshape(e, (BM, BN // 8, 8)), 1, _product_less_one)
    return tl.sum(log1p(growth), 1) + tl.sum(tl.maximum(t, 0.0), 1) * LN2


@triton.jit
def _added(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c


@triton.jit
def _store_column_sums(a, b, c, at, stride, inside):
    """Store the sums of three tiles along columns, as `store_rows`; warps wait for each other once, not thrice."""
    of_a, of_b, of_c = tl.reduce((a, b, c), 0, _added)
    # [columns, 2, 2], the last of which is not stored
    sums = tl.join(tl.join(of_a, of_c), tl.join(of_b, of_b))
    number = 2 * tl.arange(0, 2)[None, :, None] + tl.arange(0, 2)[None, None, :]
    tl.store(at[:, None, None] + number * stride, sums, mask=inside[:, None, None] & (number < 3))


@triton.jit
def _store_logits(acc, constants, total, valid, at, stride, inside, axis: tl.constexpr):
    """Store Σ (t − binade of the total) of the valid pairs along `axis`, and their number, behind the total.

    A sum of t itself, which may be 100, would round the mean by 1e-5.
    """
    factor, shift, _ = constants
    relative = tl.fma(acc, factor, -tl.expand_dims(shift + binade(total), axis))
    tl.store(at + stride, tl.sum(tl.where(valid, relative, 0.0), axis), mask=inside)
    tl.store(at + 2 * stride, count_along(acc, valid, axis), mask=inside)


@triton.jit
def store_half(out_mem, out_stride, g, i, col, part_stride, BM: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
                TMA: tl.constexpr):  # fmt: skip
    """Write g [BM, WIDTH] into the strip, which holds whole tiles, as PARTS 16-bit pieces that add up to it."""
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
def store_quarters(out_mem, out_stride, left, right, i, j, at: tl.constexpr, part_stride, BM: tl.constexpr,
                   BN: tl.constexpr, PARTS: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Write two quarters of tile (i, j), of which the right one has the number `at`, side by side: see `store_half`."""
    half = tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (BM, BN // 2))
    store_half(out_mem, out_stride, half, i, j * BN + (at // 2) * (BN // 2), part_stride, BM, BN // 2, PARTS, TMA)


@triton.jit
def load_quarters(strip_mem, strip_stride, i, j, at: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                  TMA: tl.constexpr):  # fmt: skip
    """The quarters `at` and `at` + 1 of tile (i, j) of a strip of one piece, which has whole tiles."""
    WIDTH: tl.constexpr = BN // 2
    half = load_features(strip_mem, strip_stride, i * BM, j * BN + at // 2 * WIDTH, (i + 1) * BM, (j + 1) * BN, BM,
                         WIDTH, TMA)  # fmt: skip
    return halves(unpacked(half), BM, WIDTH)


@triton.jit
def exponential_tile(acc, constants, masks, words, col_part_ptr, out_mem, out_stride, i, j, N, M, BM: tl.constexpr,
                     BN: tl.constexpr, DIAGONAL: tl.constexpr, SELF: tl.constexpr, POSITIVES: tl.constexpr,
                     BITS: tl.constexpr, PRODUCTS: tl.constexpr, KEEP: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Write a tile's exponentials 2^t into the strip, and their sums along columns; returns those along rows.

    In quarters, as `gradient` does. Columns have four sums, [4, row tiles, M], one of each warp: sums across warps
    take the shared memory that the strip needs, and wait for each other.

    ROUNDED: sums are those of the rounded numbers, which are above 0 where a pair counts, and 0 elsewhere.
    """
    WIDTH: tl.constexpr = BN // 4
    rows = i * BM + tl.arange(0, BM)
    masked = has_masked(i, j, N, M, masks, BM, BN, DIAGONAL, SELF, POSITIVES)
    warps = i + tl.arange(0, 4) * tl.cdiv(N, BM)
    for at in tl.static_range(4):
        cols = j * BN + at * WIDTH + tl.arange(0, WIDTH)
        part = quarter(acc, at, BM, BN)
        t = exponents(part, constants, False, PRODUCTS)
        if KEEP == ROUNDED:
            t = tl.maximum(t, FAINT)
        if BITS:
            t = tl.where(excluded_pairs(words, at * WIDTH, BM, WIDTH), -float("inf"), t)
        if masked:
            t = tl.where(valid_pairs(rows, cols, N, M, masks, DIAGONAL, SELF, POSITIVES), t, -float("inf"))
        e = tl.math.exp2(t)
        if KEEP == ROUNDED:
            stored = packed(e, out_mem, TMA)
            e = unpacked(stored)
        else:
            stored = e
        if at == 0:
            total = sum_per_lane(e, BM, WIDTH)
        else:
            total += sum_per_lane(e, BM, WIDTH)
        of_cols = tl.sum(tl.sum(tl.reshape(e, (2, 4, BM // 8, WIDTH)), 0), 1)
        col_at = col_part_ptr + warps.to(tl.int64)[:, None] * M + cols[None, :]
        tl.store(col_at, of_cols, mask=tl.broadcast_to((cols < M)[None, :], (4, WIDTH)))
        if at % 2 == 0:
            left = stored
        else:
            store_quarters(out_mem, out_stride, left, stored, i, j, at, 0, BM, BN, 1, TMA)
    return tl.sum(total, 1)


@triton.jit(do_not_specialize=ANY)
def totals(q_mem, k_mem, guide_q_mem, guide_k_mem, constants_ptr, row_part_ptr, col_part_ptr, positives_ptr, listed_ptr,
           bits_ptr, scratch_ptr, out_mem, out_stride, q_stride, k_stride, guide_q_stride, guide_k_stride, N, M, D, G,
           diagonal, self_diagonal, positives, positives_stride, positives_start, bits_stride, BM: tl.constexpr, BN:
           tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PRODUCTS: tl.constexpr, GUIDE:
           tl.constexpr, GUIDE_LEFT: tl.constexpr, GUIDE_RIGHT: tl.constexpr, GUIDE_PRODUCTS: tl.constexpr, TMA:
           tl.constexpr, DIAGONAL: tl.constexpr, SELF: tl.constexpr, POSITIVES: tl.constexpr, LISTED: tl.constexpr,
           BITS: tl.constexpr, COLUMNS: tl.constexpr, SOFTPLUS: tl.constexpr, SMOOTH: tl.constexpr, KEEP: tl.constexpr,
           FLATTEN: tl.constexpr):  # fmt: skip
    """Per tile: Σ 2^t of the valid pairs, along rows [channel, col tile, N] and columns [channel, row tile, M].

    SMOOTH adds two channels, see `_store_logits`; GUIDE == TEACHER adds Σ 2^t of its own t, and Σ 2^t (t − x). SOFTPLUS
    sums softplus(x), along rows only. KEEP also writes 2^t into a strip, see `exponential_tile`. LISTED also writes
    the products of positives, see `store_listed`.
    """
    masks = (diagonal, self_diagonal, positives_ptr, positives, positives_stride, positives_start)
    row_tiles = tl.cdiv(N, BM)
    col_tiles = tl.cdiv(M, BN)
    constants = exponent_constants(constants_ptr)
    if GUIDE == TEACHER:
        teachers = exponent_constants(constants_ptr + TEACHERS)
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0), flatten=FLATTEN):
        i, j = tile_at(tile, row_tiles, col_tiles)
        words = load_bits(bits_ptr, bits_stride, i, j, BM, BITS)
        acc = tile_products(
            q_mem, k_mem, q_stride, k_stride, D, guide_q_mem, guide_k_mem, guide_q_stride, guide_k_stride, G,
            scratch_ptr, i, j, N, M, BM, BN, BK, LEFT, RIGHT, PRODUCTS, GUIDE, GUIDE_LEFT, GUIDE_RIGHT, GUIDE_PRODUCTS,
            TMA)  # fmt: skip
        rows = i * BM + tl.arange(0, BM)
        cols = j * BN + tl.arange(0, BN)
        row_at = row_part_ptr + j.to(tl.int64) * N + rows
        col_at = col_part_ptr + i.to(tl.int64) * M + cols
        if LISTED:  # noqa: SIM102 - known when compiled
            if has_masked(i, j, N, M, masks, BM, BN, DIAGONAL, SELF, POSITIVES):
                store_listed(acc, listed_ptr, i, j, N, M, masks, BM, BN, DIAGONAL, POSITIVES)
        if GUIDE == TEACHER:
            masked = has_masked(i, j, N, M, masks, BM, BN, DIAGONAL, SELF, POSITIVES)
            if BITS:
                masked = masked | has_bits(words)
            row_stride = col_tiles.to(tl.int64) * N
            col_stride = row_tiles.to(tl.int64) * M
            total = tl.zeros((BM, 4), tl.float32)
            soft, gap = total, total
            WIDTH: tl.constexpr = BN // 4
            for at in tl.static_range(4):
                cols = j * BN + at * WIDTH + tl.arange(0, WIDTH)
                x = exponents(quarter(acc, at, BM, BN), constants, SOFTPLUS, PRODUCTS)
                t = exponents(aside(scratch_ptr, at, BM, BN), teachers, SOFTPLUS, GUIDE_PRODUCTS)
                apart = t - x
                if masked:
                    valid = valid_pairs(rows, cols, N, M, masks, DIAGONAL, SELF, POSITIVES)
                    if BITS:
                        valid = valid & (excluded_pairs(words, at * WIDTH, BM, WIDTH) == 0)
                    x = tl.where(valid, x, -float("inf"))
                    t = tl.where(valid, t, -float("inf"))
                e = tl.math.exp2(x)
                f = tl.math.exp2(t)
                apart = f * apart
                total += sum_per_lane(e, BM, WIDTH)
                soft += sum_per_lane(f, BM, WIDTH)
                gap += sum_per_lane(apart, BM, WIDTH)
                if COLUMNS:
                    col_at = col_part_ptr + i.to(tl.int64) * M + cols
                    _store_column_sums(e, f, apart, col_at, col_stride, cols < M)
            store_rows((tl.sum(total, 1), tl.sum(soft, 1), tl.sum(gap, 1)), row_at, row_stride, rows < N)
        elif KEEP:
            total = exponential_tile(acc, constants, masks, words, col_part_ptr, out_mem, out_stride, i, j, N, M, BM,
                                     BN, DIAGONAL, SELF, POSITIVES, BITS, PRODUCTS, KEEP, TMA)  # fmt: skip
            tl.store(row_at, total, mask=rows < N)
        else:
            t = exponents(acc, constants, SOFTPLUS, PRODUCTS)
            if GUIDE == MASK:
                t = tl.maximum(t, FAINT)
            if BITS:
                excluded = excluded_pairs(words, 0, BM, BN)
                t = tl.where(excluded, -float("inf"), t)
            if SMOOTH or has_masked(i, j, N, M, masks, BM, BN, DIAGONAL, SELF, POSITIVES):
                valid = valid_pairs(rows, cols, N, M, masks, DIAGONAL, SELF, POSITIVES)
                if BITS and SMOOTH:
                    valid = valid & (excluded == 0)
                t = tl.where(valid, t, -float("inf"))
            if SOFTPLUS:
                total = softplus_sum(t, BM, BN)
            else:
                e = tl.math.exp2(t)
                total = tl.sum(e, 1)
                if SMOOTH:
                    _store_logits(acc, constants, total, valid, row_at, col_tiles.to(tl.int64) * N, rows < N, 1)
                if COLUMNS:
                    of_cols = tl.sum(e, 0)
                    tl.store(col_at, of_cols, mask=cols < M)
                    if SMOOTH:
                        _store_logits(acc, constants, of_cols, valid, col_at, row_tiles.to(tl.int64) * M, cols < M, 0)
            tl.store(row_at, total, mask=rows < N)


@triton.jit(do_not_specialize=ANY)
def mask_bits(q_mem, k_mem, bits_ptr, constants_ptr, row_numbers_ptr, q_stride, k_stride, N, M, D, bits_stride, careful,
              BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
              PRODUCTS: tl.constexpr, TMA: tl.constexpr, IDS: tl.constexpr, FLATTEN: tl.constexpr):  # fmt: skip
    """Write a bit for each pair whose product exceeds the number of its row; see `store_bits`.

    IDS: beside the bits of `id_bits`. careful: for the careful kernels, which return at once where the flag is not set,
    as this one does.
    """
    row_tiles = tl.cdiv(N, BM)
    col_tiles = tl.cdiv(M, BN)
    read = (careful == 0) | (tl.load(constants_ptr + CAREFUL) != 0)
    tiles = tl.where(read, row_tiles * col_tiles, 0)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        i, j = tile_at(tile, row_tiles, col_tiles)
        acc = products(q_mem, k_mem, q_stride, k_stride, i, j, N, M, D, BM, BN, BK, LEFT, RIGHT, PRODUCTS, TMA)
        rows = i * BM + tl.arange(0, BM)
        threshold = tl.load(row_numbers_ptr + rows, mask=rows < N, other=0.0)
        words = load_bits(bits_ptr, bits_stride, i, j, BM, IDS)
        for at in tl.static_range(4):
            exceeds = quarter(acc, at, BM, BN) > threshold[:, None]
            words = store_bits(bits_ptr, bits_stride, exceeds, words, i, j, at, BM, BN)
