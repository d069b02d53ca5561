"""Replicate: every rank gets everything and computes the whole matrix, as CLIP's own training did.

The baseline of the papers' tables: b² work and, with dense tiles, b² memory on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from contrastile import comm
from contrastile.exchange.base import Exchange, Shards, gather_side, held_each
from contrastile.losses.base import Side
from contrastile.tiles.base import Tiles


@dataclass(frozen=True)
class Replicate(Exchange):
    """All-gather of rows and columns; this rank's part is cut out of what everybody computes."""

    once: ClassVar[bool] = False

    def stats(self, tiles: Tiles, rows: Side, cols: Side) -> tuple[Tensor, Tensor | None]:
        row_stats, col_stats = tiles.stats(self._rows(rows), self._cols(cols))
        mine_r, mine_c = self._mine(rows), self._mine(cols)
        return row_stats[:, mine_r], None if col_stats is None else col_stats[:, mine_c]

    def grads(self, tiles: Tiles, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None) -> Tensor:
        def sweep(*whole: Any) -> tuple[Tensor | None, Tensor]:
            return None, tiles.grads(*whole)

        return self._swept(sweep, rows, cols, u, v)[1]

    def stats_and_grads(
        self, tiles: Tiles, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        row_stats, pair_sum = self._swept(tiles.stats_and_grads, rows, cols, u, v)
        assert row_stats is not None
        return row_stats[:, self._mine(rows)], pair_sum

    def _swept(
        self,
        sweep: Callable[..., tuple[Tensor | None, Tensor]],
        rows: Side,
        cols: Side,
        u: Tensor | None,
        v: Tensor | None,
    ) -> tuple[Tensor | None, Tensor]:
        all_rows, all_cols = self._rows(rows), self._cols(cols)
        wholes = [
            None if mine is None else torch.zeros(len(side), mine.shape[1], dtype=mine.dtype, device=mine.device)
            for side, mine in ((all_rows, u), (all_cols, v))
        ]
        row_stats, pair_sum = sweep(all_rows, all_cols, *wholes)
        for mine, whole, side in zip((u, v), wholes, (rows, cols), strict=True):
            if mine is not None and whole is not None:
                mine += whole[self._mine(side)]
        # every rank has the sum over all rows: its own share of it is as good as any
        return row_stats, pair_sum / len(self.shards)

    @classmethod
    def extra_bytes(cls, shards: Shards, D: int, dtype: torch.dtype) -> int:
        return (sum(shards.rows) + sum(shards.cols)) * D * held_each(dtype)

    def _mine(self, side: Side) -> slice:
        return slice(side.start, side.start + len(side))

    def _rows(self, rows: Side) -> Side:
        sizes, group = self.shards.rows, self.shards.group
        if rows.diagonal is not None:
            # one rank's run of positives does not continue in the next one's
            first = torch.arange(len(rows), device=rows.features.device) + rows.diagonal
            rows = replace(rows, diagonal=None, positives=first[:, None])
        gathered = gather_side(rows, sizes, group).wait()
        if rows.positives is not None:
            gathered = replace(gathered, positives=comm.gather_rows(rows.positives, sizes, group))
        return gathered

    def _cols(self, cols: Side) -> Side:
        return gather_side(cols, self.shards.cols, self.shards.group).wait()
