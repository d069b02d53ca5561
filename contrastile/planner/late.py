"""The loss of token vectors as the planner sees it: the bytes and the work of `MaxSim`.

Beside `loss.py`, whose sizes are those of one vector for each row. A row has L tokens, a column T, each of D features.
"""

from __future__ import annotations

from dataclasses import dataclass

from contrastile._types import accumulator
from contrastile.planner.loss import LossSize
from contrastile.scorers import MaxSim
from contrastile.tiles.base import STATISTICS


@dataclass(frozen=True)
class LateSize(LossSize):
    """The loss of rows and columns with so many `tokens` each, of `dimensions` features.

    masked: tokens behind a mask do not count, as those of a recipe.
    """

    tokens: tuple[int, int] = (1, 1)
    masked: bool = True

    @property
    def numbers(self) -> int:
        """Numbers of the features of all rows and columns."""
        of_row, of_col = self.sizes
        return self.rows * of_row + self.columns * of_col

    @property
    def sizes(self) -> tuple[int, int]:
        L, T = self.tokens
        return L * self.dimensions, T * self.dimensions

    @property
    def vectors(self) -> int:
        return self.tokens[1]

    @property
    def carried(self) -> int:
        return max(self.tokens) * self.dimensions

    @property
    def at_once(self) -> bool:
        """The gradients come with the loss, from one sweep."""
        return self.backend_name == "triton" and self.ranks == 1 and not self.host and self.fused[1]

    @property
    def fused(self) -> tuple[int, bool]:
        """Bytes of the kernels beside the accumulators, and whether all columns are in one tile."""
        try:
            from contrastile.tiles.triton import maxsim
        except ImportError:
            return self._allowed, False
        cast = self.given != self.dtype
        copies = self.dtype.itemsize * (self.masked + cast)
        rows, cols = self.blocks[-1]
        return maxsim.expected_bytes(
            rows, cols, self.tokens, self.dimensions, self._allowed, symmetric=self.loss.symmetric, copies=copies,
            at_once=not self.host,
        )  # fmt: skip

    @property
    def workspace_bytes(self) -> int:
        if self.backend_name == "triton":
            return self.fused[0]
        rows, cols = self.blocks[-1]
        L, T = self.tokens
        tile = MaxSim.tile_bytes(rows, cols, L, T, self.dimensions, accumulator(self.dtype).itemsize)
        if self.device == "cuda":
            # all similarities of a tile, and their gradients
            tile += 2 * self.dtype.itemsize * rows * L * cols * T
        return tile if self.backend_name == "dense" else min(tile, self._allowed)

    @property
    def resident(self) -> tuple[int, int]:
        """Accumulators and statistics; at the end gradients, and the accumulators twice if they came with the loss."""
        if self.host:
            return super().resident
        wide = accumulator(self.dtype)
        sums = self.numbers * wide.itemsize
        throughout = sums + (self.rows + self.columns) * STATISTICS * wide.itemsize
        returned = 0 if self.given == wide else self.numbers * self.given.itemsize
        return throughout, throughout + sums * self.at_once + returned

    @property
    def operations(self) -> float:
        """Operations of a sweep over all tokens of a rank's pairs."""
        L, T = self.tokens
        return 2.0 * self.pairs * L * T * self.dimensions

    @property
    def gathered(self) -> float:
        """Bytes of the winning tokens that gradients of both sides read."""
        return 2.0 * self.pairs * self.tokens[0] * self.dimensions * self.dtype.itemsize
