"""Device code of a bit, or a teacher's product, for each pair of a tile, in the order in which threads hold products.

Above `arithmetic.py`, below `forward.py`, whose `mask_bits` writes the bits of a guide's mask and whose `tile_products`
writes a teacher's products. `id_bits` writes the bits of equal ids: the kernels of tiles have no registers for ids of
rows and columns, and a thread of theirs holds the bits of its 128 pairs in four words.

A thread of the tensor cores of Hopper chips reads and writes its own numbers, 16 bytes at a time and without shared
memory: a tile's rows are BM // 64, 4 warps, 2 and 8, its columns BN // 8, 4 threads and 2. Other chips exchange the
same numbers between threads.
"""

import triton
import triton.language as tl

from contrastile.tiles.triton.kernels.arithmetic import ANY, CAREFUL


@triton.jit
def _words_at(i, j, stride, BM: tl.constexpr):
    """Positions of the words of tile (i, j): four words [BM, 4] of a row, in the order of the threads."""
    return i.to(tl.int64) * stride + j * (4 * BM) + tl.arange(0, 4 * BM)


@triton.jit
def _numbers(first: tl.constexpr, WIDTH: tl.constexpr):
    """Bits of WIDTH columns, from the first, in the words of a row: [1, WIDTH // 8, 1, 2]."""
    return first // 4 + 2 * tl.arange(0, WIDTH // 8)[None, :, None, None] + tl.arange(0, 2)[None, None, None, :]


@triton.jit
def store_bits(bits_ptr, stride, exceeds, words, i, j, at: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Add the bits of a quarter of tile (i, j) to its words, and store them behind the last quarter."""
    WIDTH: tl.constexpr = BN // 4
    WARPS: tl.constexpr = 4 if BM >= 64 else BM // 16
    bits = tl.reshape(exceeds.to(tl.int32), (BM, WIDTH // 8, 4, 2)) << _numbers(at * WIDTH, WIDTH)
    words |= tl.sum(tl.sum(bits, 3), 1)
    if at == 3:
        ordered = tl.permute(tl.reshape(words, (BM // (16 * WARPS), WARPS, 2, 8, 4)), (1, 3, 4, 0, 2))
        tl.store(bits_ptr + _words_at(i, j, stride, BM), tl.reshape(ordered, (4 * BM,)))
    return words


@triton.jit
def load_bits(bits_ptr, stride, i, j, BM: tl.constexpr, BITS: tl.constexpr):
    """The words [BM, 4] of tile (i, j); zeros without BITS."""
    if BITS:
        WARPS: tl.constexpr = 4 if BM >= 64 else BM // 16
        words = tl.load(bits_ptr + _words_at(i, j, stride, BM))
        ordered = tl.permute(tl.reshape(words, (WARPS, 8, 4, BM // (16 * WARPS), 2)), (3, 0, 4, 1, 2))
        words = tl.reshape(ordered, (BM, 4))
    else:
        words = tl.zeros((BM, 4), tl.int32)
    return words


@triton.jit
def excluded_pairs(words, first: tl.constexpr, BM: tl.constexpr, WIDTH: tl.constexpr):
    """Mask [BM, WIDTH] of the pairs of columns from the first on that a bit excludes."""
    bits = (words[:, None, :, None] >> _numbers(first, WIDTH)) & 1
    return tl.reshape(bits, (BM, WIDTH)) != 0


@triton.jit
def has_bits(words):
    """True if a bit excludes a pair of the tile. Beside a teacher few tiles have one, and others need not look."""
    return tl.max(tl.max((words != 0).to(tl.int32), 1), 0) > 0


@triton.jit(do_not_specialize=ANY)
def id_bits(bits_ptr, constants_ptr, row_ids_ptr, col_ids_ptr, row_labels_ptr, col_labels_ptr, N, M, bits_stride,
            careful, BM: tl.constexpr, BN: tl.constexpr, LABELS: tl.constexpr):  # fmt: skip
    """Write a bit for each pair of equal ids; with LABELS not for those of equal labels, which are positives.

    In the order of `store_bits`, one tile of a program. careful: as in `mask_bits`.
    """
    if (careful == 0) | (tl.load(constants_ptr + CAREFUL) != 0):
        WARPS: tl.constexpr = 4 if BM >= 64 else BM // 16
        ROWS: tl.constexpr = BM // (8 * WARPS)
        col_tiles = tl.cdiv(M, BN)
        i = tl.program_id(0) // col_tiles
        j = tl.program_id(0) % col_tiles
        # a thread has columns of its own, and a word of them for each of its rows
        thread = tl.arange(0, 32 * WARPS)
        among = tl.arange(0, ROWS)[None, :]
        rows = i * BM + (thread // 32 * 16 + thread // 4 % 8)[:, None] + among // 2 * (16 * WARPS) + among % 2 * 8
        row_id = tl.load(row_ids_ptr + rows, mask=rows < N, other=0)
        if LABELS:
            row_label = tl.load(row_labels_ptr + rows, mask=rows < N, other=0)
        words = tl.zeros((32 * WARPS, ROWS), tl.int32)
        for bit in tl.static_range(BN // 4):
            cols = j * BN + bit // 2 * 8 + thread % 4 * 2 + bit % 2
            col_id = tl.load(col_ids_ptr + cols, mask=cols < M, other=0)
            excluded = row_id == col_id[:, None]
            if LABELS:
                col_label = tl.load(col_labels_ptr + cols, mask=cols < M, other=0)
                excluded = excluded & (row_label != col_label[:, None])
            words |= excluded.to(tl.int32) << bit
        at = i.to(tl.int64) * bits_stride + j * (4 * BM) + thread[:, None] * ROWS + among
        tl.store(bits_ptr + at, words)


@triton.jit
def _places(at: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Positions of the numbers of a quarter of a tile in the memory of this program."""
    return (4 * tl.program_id(0) + at) * (BM * BN // 4) + tl.arange(0, BM * BN // 4)


@triton.jit
def set_aside(scratch_ptr, x, at: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Write a quarter of a tile to the memory of this program, [programs, BM · BN]."""
    WIDTH: tl.constexpr = BN // 4
    # pairs of neighbours that a thread writes at once
    PAIRS: tl.constexpr = 2 if WIDTH >= 16 else 1
    part = tl.reshape(x, (BM // 16, 2, 8, WIDTH // (8 * PAIRS), PAIRS, 4, 2))
    ordered = tl.reshape(tl.permute(part, (3, 1, 0, 2, 5, 4, 6)), (BM * WIDTH,))
    tl.store(scratch_ptr + _places(at, BM, BN), ordered)
    if at == 3:
        # on other chips a number may be read by another thread
        tl.debug_barrier()


@triton.jit
def aside(scratch_ptr, at: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """A quarter of the tile that `set_aside` has written."""
    WIDTH: tl.constexpr = BN // 4
    PAIRS: tl.constexpr = 2 if WIDTH >= 16 else 1
    numbers = tl.load(scratch_ptr + _places(at, BM, BN))
    part = tl.reshape(numbers, (WIDTH // (8 * PAIRS), 2, BM // 16, 8, 4, PAIRS, 2))
    return tl.reshape(tl.permute(part, (2, 1, 3, 0, 5, 4, 6)), (BM, WIDTH))
