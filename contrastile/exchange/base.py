"""Which blocks a rank computes, and the one place that owns the gradient convention.

Stands between `_contrast.py` and `tiles/`: an exchange walks over the shards of columns, brings each one here, and
merges what the tiles say of it.

**The gradient convention.** The loss is that of the global batch, L, the same number on every rank. A data-parallel
wrapper then combines the ranks' parameter gradients: by their mean (DDP, FSDP) or by their sum. So that the
combined gradient of every parameter, the scale's and the bias's included, is exactly ∂L/∂θ, the gradient that a
rank hands back for its own features is `W · ∂L/∂features` where the wrapper takes the mean, and `∂L/∂features`
where it sums. `Exchange.gradient_factor` is that number; nothing else in the library multiplies by a number of
ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from contrastile._types import Gradient
from contrastile.losses.base import Side
from contrastile.tiles.base import Tiles


@dataclass(frozen=True)
class Exchange(ABC):
    """One way of letting the rows of this rank meet the columns of all."""

    # what the data-parallel wrapper does with gradients
    gradient: Gradient

    @property
    @abstractmethod
    def ranks(self) -> int:
        """W, the number of ranks that share the batch."""

    @abstractmethod
    def total(self, here: Tensor) -> Tensor:
        """The sum over all ranks of a small tensor."""

    @abstractmethod
    def stats(self, tiles: Tiles, rows: Side, cols: Side) -> tuple[Tensor, Tensor | None]:
        """Statistics of this rank's rows over all columns, and of this rank's columns over all rows."""

    @abstractmethod
    def grads(self, tiles: Tiles, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None) -> Tensor:
        """Adds to u and v what all ranks' pairs give this rank's rows and columns; returns Σ g of this rank's rows."""

    def gradient_factor(self) -> int:
        """What the wrapper's averaging will divide by."""
        return self.ranks if self.gradient == "mean" else 1
