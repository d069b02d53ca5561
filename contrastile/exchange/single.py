"""One process: its rows meet its columns, and nothing travels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from contrastile.exchange.base import Exchange
from contrastile.losses.base import Side
from contrastile.tiles.base import Tiles


@dataclass(frozen=True)
class Single(Exchange):
    """The exchange of a process that has the whole batch."""

    @property
    def ranks(self) -> int:
        return 1

    def total(self, here: Tensor) -> Tensor:
        return here

    def stats(self, tiles: Tiles, rows: Side, cols: Side) -> tuple[Tensor, Tensor | None]:
        return tiles.stats(rows, cols)

    def grads(self, tiles: Tiles, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None) -> Tensor:
        return tiles.grads(rows, cols, u, v)
