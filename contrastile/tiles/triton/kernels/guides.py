"""Device code of a guide's bit or product for each pair of a tile, in the order in which threads hold the products.

Above `arithmetic.py`, below `forward.py`, whose `mask_bits` writes the bits of a mask and whose `tile_products` writes
a teacher's products. A thread of the tensor cores of Hopper chips reads and writes its own numbers, 16 bytes at a time
and without shared memory: a tile's rows are BM // 64, 4 warps, 2 and 8, its columns BN // 8, 4 threads and 2. Other
chips exchange the same numbers between threads.
"""

import triton
import triton.language as tl


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
    words += tl.sum(tl.sum(bits, 3), 1)
    if at == 3:
        ordered = tl.permute(tl.reshape(words, (BM // (16 * WARPS), WARPS, 2, 8, 4)), (1, 3, 4, 0, 2))
        tl.store(bits_ptr + _words_at(i, j, stride, BM), tl.reshape(ordered, (4 * BM,)))
    return words


@triton.jit
def load_bits(bits_ptr, stride, i, j, BM: tl.constexpr):
    """The words [BM, 4] of tile (i, j)."""
    WARPS: tl.constexpr = 4 if BM >= 64 else BM // 16
    words = tl.load(bits_ptr + _words_at(i, j, stride, BM))
    ordered = tl.permute(tl.reshape(words, (WARPS, 8, 4, BM // (16 * WARPS), 2)), (3, 0, 4, 1, 2))
    return tl.reshape(ordered, (BM, 4))


@triton.jit
def false_negatives(words, first: tl.constexpr, BM: tl.constexpr, WIDTH: tl.constexpr):
    """Mask [BM, WIDTH] of the pairs of columns from the first on that a guide excludes."""
    bits = (words[:, None, :, None] >> _numbers(first, WIDTH)) & 1
    return tl.reshape(bits, (BM, WIDTH)) != 0


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
