"""A block as one tile: the whole matrix at once, as CLIP's and OpenCLIP's training code holds it.

The baseline of the papers' tables. With the exchanges `replicate`, `gather` and `ring` it gives their first three
columns: b², b²/n and b²/n² elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from contrastile.tiles.eager import Eager


@dataclass
class Dense(Eager):
    """One tile of the size of the block, whatever the workspace says."""

    def _side(self, dtype: torch.dtype) -> int:
        del dtype
        return 2**62
