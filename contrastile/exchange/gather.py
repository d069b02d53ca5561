"""Gather: every rank gets all columns, computes its own rows against them, and hands the columns' gradients back.

The decomposition of DisCo-CLIP (Chen et al. 2023, equations 5 to 8) and of OpenCLIP's local loss with gathered
gradients, with the columns' statistics from the same sweep. Simple, and as fast as the ring where b · D · (bytes of
a feature + 4) fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from contrastile import comm
from contrastile.exchange.base import Exchange, Shards
from contrastile.losses.base import Side
from contrastile.tiles.base import Tiles


@dataclass(frozen=True)
class Gather(Exchange):
    """All-gather of the columns in both passes, reduce-scatter of their gradients."""

    def stats(self, tiles: Tiles, rows: Side, cols: Side) -> tuple[Tensor, Tensor | None]:
        row_stats, col_stats = tiles.stats(rows, self._all(cols))
        if col_stats is not None:
            parts = comm.exchange_rows(col_stats.T.contiguous(), self.shards.cols, self.shards.group)
            col_stats = reduce(tiles.loss.merge, [part.T for part in parts])
        return row_stats, col_stats

    def grads(self, tiles: Tiles, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None) -> Tensor:
        everything = self._all(cols)
        v_all = None if v is None else torch.zeros(len(everything), v.shape[1], dtype=v.dtype, device=v.device)
        pair_sum = tiles.grads(rows, everything, u, v_all)
        if v is not None and v_all is not None:
            v += comm.scatter_sum(v_all, self.shards.cols, self.shards.group)
        return pair_sum

    @classmethod
    def extra_bytes(cls, shards: Shards, D: int, itemsize: int) -> int:
        return sum(shards.cols) * D * (itemsize + 4)

    def _all(self, cols: Side) -> Side:
        return cols.moved([comm.gather_rows(x, self.shards.cols, self.shards.group) for x in cols.luggage()], 0)
