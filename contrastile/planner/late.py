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
    def operands(self) -> int:
        """The kernels' copies are bytes of their own."""
        return 0

    @property
    def at_once(self) -> bool:
        """The gradients come with the loss, from one sweep."""
        return self.backend_name == "triton" and self.ranks == 1 and not self.host and not self.fused[1]

    @property
    def fused(self) -> tuple[int, int]:
        """Bytes of the kernels beside the accumulators, and columns of a tile; 0 of gradients that come with it."""
        try:
            from contrastile.tiles.triton import maxsim
        except ImportError:
            return self._allowed, self.columns
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
        wide, (of_row, of_col) = accumulator(self.dtype).itemsize, self.sizes
        stats = (self.rows + self.columns) * STATISTICS * wide
        returned = 0 if self.given.itemsize == wide else self.given.itemsize
        if self.backend_name == "triton" and self.ranks == 1 and not self.at_once:
            # the gradients of the columns are float32 for a strip at a time
            strip = min(self.fused[1], self.columns) * of_col * wide
            of_columns = self.columns * of_col * self.given.itemsize
            throughout = self.rows * of_row * wide + of_columns + stats
            return throughout + strip, throughout + self.rows * of_row * returned
        sums = self.numbers * wide
        return sums + stats, sums * (1 + self.at_once) + stats + self.numbers * returned

    @property
    def operations(self) -> float:
        """Operations of a sweep over all tokens of a rank's pairs."""
        L, T = self.tokens
        return 2.0 * self.pairs * L * T * self.dimensions

    @property
    def gathered(self) -> float:
        """Bytes of the winning tokens that gradients of both sides read."""
        return 2.0 * self.pairs * self.tokens[0] * self.dimensions * self.dtype.itemsize
