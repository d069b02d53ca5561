"""Replicate: every rank gets all rows and columns and computes the whole matrix, as CLIP's own training did.

The baseline of the papers' tables: b² work and, with dense tiles, b² memory on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from contrastile._types import accumulator
from contrastile.distributed import collectives
from contrastile.exchange.base import Exchange, Layout, bytes_per_feature, gather_shard
from contrastile.losses.base import Shard
from contrastile.tiles.base import STATISTICS, Sum, Tiles


@dataclass(frozen=True)
class Replicate(Exchange):
    """All-gather of rows and columns; each rank takes its own rows and columns of the common result."""

    once: ClassVar[bool] = False
    by_index: ClassVar[bool] = True

    def forward(self, tiles: Tiles, rows: Shard, cols: Shard) -> tuple[Tensor, Tensor | None]:
        row_stats, col_stats = tiles.forward(self._all_rows(rows), self._all_cols(cols))
        return row_stats[:, _own(rows)], None if col_stats is None else col_stats[:, _own(cols)]

    def backward(self, tiles: Tiles, rows: Shard, cols: Shard, u: Sum, v: Sum, row_stats: Tensor | None) -> Tensor:
        all_rows, all_cols = self._all_rows(rows), self._all_cols(cols)
        u_all, v_all = (
            None if own is None else torch.zeros(len(shard), own.shape[1], dtype=own.dtype, device=own.device)
            for shard, own in ((all_rows, u), (all_cols, v))
        )
        all_stats = None if row_stats is None else tiles.init(all_rows)
        sums = tiles.backward(all_rows, all_cols, u_all, v_all, all_stats)
        for own, everyone, shard in ((u, u_all, rows), (v, v_all, cols)):
            if own is not None and everyone is not None:
                own += everyone[_own(shard)]
        if row_stats is not None and all_stats is not None:
            row_stats.copy_(all_stats[:, _own(rows)])
        # every rank has the sums over all rows, and returns an equal share, which add up to them
        return sums / len(self.layout)

    @classmethod
    def extra_bytes(cls, layout: Layout, D: int, dtype: torch.dtype) -> int:
        return (sum(layout.rows) + sum(layout.cols)) * D * bytes_per_feature(dtype)

    @classmethod
    def expected_bytes(cls, layout: Layout, D: int, dtype: torch.dtype) -> int:
        every = sum(layout.rows) + sum(layout.cols)
        return cls.extra_bytes(layout, D, dtype) + every * STATISTICS * accumulator(dtype).itemsize

    @classmethod
    def blocks(cls, layout: Layout) -> list[tuple[int, int]]:
        return [(sum(layout.rows), sum(layout.cols))]

    def _all_rows(self, rows: Shard) -> Shard:
        sizes, group = self.layout.rows, self.layout.group
        if rows.diagonal is not None:
            # as indices: the diagonal of one rank does not continue that of the rank before
            first = torch.arange(len(rows), device=rows.features.device) + rows.diagonal
            rows = replace(rows, diagonal=None, positives=first[:, None])
        gathered = gather_shard(rows, sizes, group)()
        if rows.positives is not None:
            gathered = replace(gathered, positives=collectives.gather_rows(rows.positives, sizes, group))
        if rows.targets is not None:
            gathered = replace(gathered, targets=collectives.gather_rows(rows.targets, sizes, group))
        return gathered

    def _all_cols(self, cols: Shard) -> Shard:
        return gather_shard(cols, self.layout.cols, self.layout.group)()


def _own(shard: Shard) -> slice:
    return slice(shard.start, shard.start + len(shard))
