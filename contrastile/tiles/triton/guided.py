"""What a guide says of each pair, written by kernels of their own before those of the tiles.

Between `launch.py` and `backend.py`. A tile's registers hold one product, so a guide's product comes first: of a mask
one bit for each pair, of a teacher its exponential, in a strip that the gradient then overwrites. A teacher of features
that do not have 16 bits in bf16 has no strip: each program sets a tile of its products aside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from contrastile.losses.base import Shard
from contrastile.tiles.triton import forward, launch, plan
from contrastile.tiles.triton.block import Block
from contrastile.tiles.triton.plan import Epilogue, Pair

# 16-bit pieces of a teacher's exponentials: for sums, which need 16 digits of them, and for gradients, which have 8
OF_SUMS, OF_GRADIENTS = plan.SOFT_SUMS, 1


@dataclass
class Guidance:
    """What the forward keeps of a guide for the backward: bits of a whole block, or a strip of one.

    position: of the block whose bits these are.
    """

    position: tuple[int, ...] | None = None
    bits: Tensor | None = None
    strip: Tensor | None = None

    def masked(self, pair: Pair, constants: Tensor, block: Block, at: tuple[slice, slice], *, careful: bool) -> Pair:
        """The pair with the bits of its pairs; careful: for the careful kernels alone."""
        size = plan.bits_shape(len(pair.q), len(pair.k), pair.shape)
        if self.bits is not None and self.position == block.position:
            i, j = at[0].start // pair.shape.rows, at[1].start // pair.shape.cols
            return replace(pair, guided=self.bits[i : i + size[0], j : j + size[1]])
        pair = replace(pair, guided=torch.empty(size, dtype=torch.int32, device=constants.device))
        _run(forward.mask_bits, pair, constants, careful=careful)
        return pair

    def taught(self, pair: Pair, constants: Tensor, *, keep: bool) -> Pair:
        """The pair with a strip of the teacher's exponentials, for sums; keep: for the backward too."""
        if not plan.is_soft(pair):
            return pair
        strip = pair.new_strip(OF_SUMS)
        pair = replace(pair, guided=strip, pieces=OF_SUMS)
        _run(forward.soft_strip, pair, constants)
        self.strip = strip if keep else None
        return pair

    def taught_gradient(self, pair: Pair, constants: Tensor, strip: Tensor) -> Pair:
        """The same for gradients, in the strip that they overwrite: the one that the forward has kept, or a new one."""
        if not plan.is_soft(pair):
            return pair
        pair = replace(pair, guided=strip, pieces=OF_GRADIENTS)
        if strip is not self.strip:
            _run(forward.soft_strip, pair, constants)
        return pair

    def held(self, block: Block) -> int:
        """Bytes of the bits of this block."""
        return self.bits.nbytes if self.bits is not None and self.position == block.position else 0


def with_teacher(constants: Tensor, rows: Shard, cols: Shard, epilogue: Epilogue) -> Tensor:
    """The constants of a block, and behind them those of a teacher's logits."""
    ((a,), (b,)), scale = (rows.guides, cols.guides), rows.numbers
    scale = constants.new_ones(()) if scale is None else scale[0]
    return torch.cat([constants, launch.block_constants(a, b, scale, None, epilogue)])


def _run(kernel: Any, pair: Pair, constants: Tensor, *, careful: bool = False) -> None:
    """Launch a kernel of the guide's products alone; careful: one of bits for the careful kernels."""
    guide = pair.of_guide
    given: dict[str, Any] = {"constants_ptr": constants, "careful": int(careful), "FLATTEN": guide.flattened}
    launch.run(kernel, guide.programs, **given, **guide.arguments)
