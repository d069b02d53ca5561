"""Tiles of scores that kernels have computed: everything between the scores and their gradients.

Beside `backend.py`, for scorers with kernels of their own; `maxsim.py` derives from it. Nothing here waits for the
device, so that small calls are captured as a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from contrastile.tiles.scored import Scored
from contrastile.tiles.triton import launch


@dataclass
class FusedScores(Scored):
    """Blocks of scores from kernels; the vectors of each side are the one leaf that can want a gradient."""

    capturable: ClassVar[bool] = True

    def scaled(self, total: Tensor, dtype: torch.dtype, upstream: Tensor | None, *, keep: bool) -> Tensor:
        # rows of tokens are few and long, and a program has whole rows
        width = launch.BLOCK if total.numel() % launch.BLOCK == 0 else total.shape[1]
        with launch.on(self.scale.device):
            return launch.scaled(total.view(-1, width), self.scale, upstream, dtype, keep=keep)
