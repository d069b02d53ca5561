"""Bits of the pairs that a guide excludes, from a kernel of their own before those of the tiles; a teacher's constants.

Between `launch.py` and `backend.py`. A tile's registers hold one product, so a guide's product comes first: of a mask
one bit for each pair. A teacher needs no kernel of its own: each program sets a tile of its products aside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from contrastile.losses.base import Shard
from contrastile.tiles.triton import launch, plan
from contrastile.tiles.triton.block import Block
from contrastile.tiles.triton.plan import Epilogue, Pair


@dataclass
class Guidance:
    """The bits of a whole block that the forward keeps for the backward.

    position: of the block whose bits these are.
    """

    position: tuple[int, ...] | None = None
    bits: Tensor | None = None

    def masked(self, pair: Pair, constants: Tensor, block: Block, at: tuple[slice, slice], *, careful: bool) -> Pair:
        """The pair with the bits of its pairs; careful: for the careful kernels alone."""
        size = plan.bits_shape(len(pair.q), len(pair.k), pair.shape)
        if self.bits is not None and self.position == block.position:
            i, j = at[0].start // pair.shape.rows, at[1].start // pair.shape.cols
            return replace(pair, bits=self.bits[i : i + size[0], j : j + size[1]])
        pair = replace(pair, bits=torch.empty(size, dtype=torch.int32, device=constants.device))
        launch.mask_bits(pair, constants, careful=careful)
        return pair

    def held(self, block: Block) -> int:
        """Bytes of the bits of this block."""
        return self.bits.nbytes if self.bits is not None and self.position == block.position else 0


def with_teacher(constants: Tensor, rows: Shard, cols: Shard, epilogue: Epilogue) -> Tensor:
    """The constants of a block, and behind them those of a teacher's logits."""
    ((a,), (b,)), scale = (rows.guides, cols.guides), rows.numbers
    scale = constants.new_ones(()) if scale is None else scale[0]
    return torch.cat([constants, launch.block_constants(a, b, scale, None, epilogue)])
