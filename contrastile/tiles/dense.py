"""A block as one tile: the whole matrix at once, as CLIP's and OpenCLIP's training code holds it.

The baseline of the papers' tables. With the exchanges `replicate`, `gather` and `ring` it gives their first three
columns: b², b²/n and b²/n² elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from contrastile._types import accumulator
from contrastile.losses.base import PairLoss
from contrastile.tiles.eager import TILES_HELD_CPU, Eager

# float32 matrices of the block's size at the peak, with positives on a diagonal and by index, whose masks are matrices
MATRICES, MATRICES_BY_INDEX = 3.0, 7.25


@dataclass
class Dense(Eager):
    """One tile of the size of the block, whatever the workspace says."""

    def _side(self, dtype: torch.dtype) -> int:
        del dtype
        return 2**62

    @classmethod
    def expected_bytes(
        cls, loss: PairLoss, N: int, M: int, D: int, dtype: torch.dtype, workspace: int, device: torch.device,
        *, by_index: bool = False,
    ) -> int:  # fmt: skip
        del loss, D, workspace
        matrices = MATRICES_BY_INDEX if by_index else TILES_HELD_CPU if device.type == "cpu" else MATRICES
        return int(matrices * N * M * accumulator(dtype).itemsize)
