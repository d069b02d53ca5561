"""Forms of late interaction's kernels on a chip, as measured (docs/kernels.md)."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from contrastile.tiles.triton.plan import interpreting, multiprocessors, tiles_of

# entries of a slot, the first whose padding is at most this share; the last of them otherwise
SLOTS, PADDING = (256, 128, 64, 32, 16, 8), 1 / 15
SLOT_MASKED = 16
# compute capabilities of chips that have 99 KiB of shared memory for a program
LESS_SHARED = (8, 6), (8, 9), (12, 0)
# capability of the chips whose products wait for registers or shared memory, as a kernel chooses
WGMMA = 9
# the beginning of a program, which loads its entries, in blocks of tokens
BEGINNING = 4


class Tiling(NamedTuple):
    """The sweep on a chip: entries × tokens of a tile, documents of a program, and the form of its loop."""

    entries: int = 128
    tokens: int = 64
    warps: int = 4
    stages: int = 3
    # at most
    documents: int = 128
    # programs that share a multiprocessor
    programs: int = 3
    # documents and their tiles are one loop, so that the next document's loads overlap the sums
    flatten: bool = True
    # the entries stay in registers instead of shared memory
    registers: bool = True
    # largest number of a thread's registers, with which three programs share a multiprocessor
    most_registers: int | None = 168


class Gathering(NamedTuple):
    """The gradients' kernels on a chip: entries of a query tile, tokens of a document tile, and listed entries."""

    entries: int = 32
    # largest number of a query tile's features
    features: int = 64
    warps: int = 1
    stages: int = 1
    registers: int | None = 128
    # entries that are listed at once
    listed: int = 512
    tokens: int = 16
    document_features: int = 128
    group: int = 32
    document_warps: int = 1
    document_stages: int = 3
    document_registers: int | None = 160


TILING_INTERPRETED = Tiling(entries=32, tokens=16, documents=3, registers=False)
# in float32, which takes more registers
GATHERING_WIDE = Gathering(group=64, document_warps=4, document_registers=None)
GATHERING_INTERPRETED = Gathering(entries=32, listed=16, group=16)


def slot_of(L: int, most: int, *, masked: bool) -> int:
    """Entries of a slot of queries of L tokens, `most` of which fit a tile.

    Behind a mask L does not matter, so that padding changes no order of sums.
    """
    if masked:
        return SLOT_MASKED
    return next((s for s in SLOTS if s <= most and tiles_of(L, s) * s <= (1 + PADDING) * L), SLOTS[-1])


def tiling_for(x: Tensor, *, best: bool = False) -> Tiling:
    """The tiling of the sweep for queries [N, L, D]."""
    if interpreting():
        return TILING_INTERPRETED
    capability = torch.cuda.get_device_capability(x.device)
    if x.shape[2] > 128:
        form = Tiling(entries=64, stages=2) if capability in LESS_SHARED else Tiling(warps=8)
        return form._replace(registers=False, most_registers=None, programs=1)
    if capability[0] != WGMMA:
        return Tiling(entries=256, warps=8, registers=False, most_registers=128 if best else None, programs=1)
    return Tiling()


@lru_cache(1024)
def documents_for(tiling: Tiling, tiles: int, J: int, M: int, device: torch.device) -> int:
    """Documents of a program, of J that each of so many tiles of entries meets: the last programs end together.

    M: tokens of a document.
    """
    if interpreting():
        return tiling.documents
    blocks, at_once = tiles_of(M, tiling.tokens), tiling.programs * multiprocessors(device)

    def length(documents: int) -> int:
        """Blocks of tokens that are computed one after the other."""
        return tiles_of(tiles * tiles_of(J, documents), at_once) * (documents * blocks + BEGINNING)

    return min(range(tiling.documents, 0, -1), key=length)


def gathering_for(x: Tensor) -> Gathering:
    """The form of the gradients' kernels for queries [N, L, D]."""
    if interpreting():
        return GATHERING_INTERPRETED
    return GATHERING_WIDE if x.dtype == torch.float32 else Gathering()
