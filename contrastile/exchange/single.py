"""One process: its rows meet its columns, and nothing travels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contrastile.exchange.base import Exchange, Shards
from contrastile.losses.base import Side
from contrastile.tiles.base import Tiles


@dataclass(frozen=True)
class Single(Exchange):
    """The exchange of a process that has the whole batch."""

    def stats(self, tiles: Tiles, rows: Side, cols: Side) -> tuple[Tensor, Tensor | None]:
        return tiles.stats(rows, cols)

    def grads(self, tiles: Tiles, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None) -> Tensor:
        return tiles.grads(rows, cols, u, v)

    def stats_and_grads(
        self, tiles: Tiles, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return tiles.stats_and_grads(rows, cols, u, v)

    @classmethod
    def extra_bytes(cls, shards: Shards, D: int, dtype: torch.dtype) -> int:
        del shards, D, dtype
        return 0
