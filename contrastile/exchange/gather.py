"""Gather: every rank gets all columns, computes its own rows against them, and returns the columns' gradients.

The decomposition of DisCo-CLIP (Chen et al. 2023, equations 5 to 8) and of OpenCLIP's local loss with gathered
gradients; rows and columns have their statistics from one sweep. It is as fast as the ring, and simpler, where all
columns and their accumulators fit into memory, b · D numbers each. Communication overlaps with the block of the rank's
own columns: the forward computes it first, while the other columns arrive, the backward last, while gradients are sent.
The gathered columns stay from the forward to the backward.

Replicate: every rank gets all rows too and computes the whole matrix, as CLIP's own training did. The baseline of the
papers' tables: b² work and, with dense tiles, b² memory on every rank.
"""

from collections.abc import Iterator
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
class Gather(Exchange):
    """All-gather of the columns, reduce-scatter of their gradients."""

    # the gathered columns stay for the backward
    column_sends: ClassVar[int] = 1

    def forward(self, tiles: Tiles, rows: Shard, cols: Shard) -> tuple[Tensor, Tensor | None]:
        wait = gather_shard(cols, self.layout.cols, self.layout.group, self.layout.start(0))
        row_stats, col_stats = tiles.forward(rows, cols)
        tiles.columns = wait()
        others = []
        for block, _ in self._other_columns(tiles.columns):
            block_rows, block_cols = tiles.forward(rows, block)
            tiles.merge(row_stats, block_rows[None])
            others.append(block_cols)
        if col_stats is not None:
            sent = torch.cat([col_stats.T[:0], *(stats.T for stats in others if stats is not None)])
            received = collectives.exchange_rows(sent, self.layout.cols, self.layout.group)
            tiles.merge(col_stats, received.transpose(1, 2))
        return row_stats, col_stats

    def backward(self, tiles: Tiles, rows: Shard, cols: Shard, u: Sum, v: Sum, row_stats: Tensor | None) -> Tensor:
        columns = self._all_columns(tiles, cols)
        v_all = None if v is None else v.new_zeros(len(columns), v.shape[1])
        sums = tiles.no_pairs()
        for block, along in self._other_columns(columns):
            sums += tiles.backward(rows, block, u, None if v_all is None else v_all[along], row_stats)
        pending = None if v_all is None else collectives.begin_scatter_sum(v_all, self.layout.cols, self.layout.group)
        sums += tiles.backward(rows, cols, u, v, row_stats)
        if v is not None and pending is not None:
            v += pending.wait()[0]
        return sums

    @classmethod
    def extra_bytes(cls, layout: Layout, D: int, dtype: torch.dtype) -> int:
        return sum(layout.cols) * D * bytes_per_feature(dtype)

    @classmethod
    def expected_bytes(cls, layout: Layout, D: int, dtype: torch.dtype) -> int:
        wide, others = accumulator(dtype).itemsize, sum(layout.cols) - min(layout.cols)
        # the sum that arrives, and the statistics of the others' columns, as sent and as received
        return cls.extra_bytes(layout, D, dtype) + wide * (max(layout.cols) * D + STATISTICS * others)

    @classmethod
    def blocks(cls, layout: Layout) -> list[tuple[int, int]]:
        # its own, and the first rank meets all other columns at once
        widths = sorted((max(layout.cols), sum(layout.cols[1:])))
        return [(max(layout.rows), width) for width in widths if width]

    def _all_columns(self, tiles: Tiles, cols: Shard) -> Shard:
        """All ranks' columns, gathered in the forward, with the states and coefficients of the backward."""
        sizes, group = self.layout.cols, self.layout.group
        if tiles.columns is None:
            return gather_shard(cols, sizes, group, self.layout.start(0))()
        columns, tiles.columns = tiles.columns, None
        if cols.state is None or cols.coefficient is None:
            return columns
        both = collectives.gather_rows(torch.cat([cols.state, cols.coefficient[None]]).T.contiguous(), sizes, group)
        state, coefficient = both.T.contiguous().split([len(cols.state), 1])
        return replace(columns, state=state, coefficient=coefficient[0])

    def _other_columns(self, columns: Shard) -> Iterator[tuple[Shard, slice]]:
        """The columns before this rank's own and those behind them, each with its slice of all columns."""
        sizes, rank = self.layout.cols, self.layout.rank
        first = sum(sizes[:rank])
        for along in (slice(0, first), slice(first + sizes[rank], sum(sizes))):
            if along.stop > along.start:
                yield columns.narrow(along.start, along.stop), along


@dataclass(frozen=True)
class Replicate(Exchange):
    """All-gather of rows and columns; each rank takes its own rows and columns of the common result."""

    once: ClassVar[bool] = False
    by_index: ClassVar[bool] = True

    def forward(self, tiles: Tiles, rows: Shard, cols: Shard) -> tuple[Tensor, Tensor | None]:
        row_stats, col_stats = tiles.forward(self._all_rows(rows), self._all_cols(cols))
        own_rows, own_cols = self._own()
        return row_stats[:, own_rows], None if col_stats is None else col_stats[:, own_cols]

    def backward(self, tiles: Tiles, rows: Shard, cols: Shard, u: Sum, v: Sum, row_stats: Tensor | None) -> Tensor:
        all_rows, all_cols = self._all_rows(rows), self._all_cols(cols)
        u_all, v_all = (
            None if own is None else torch.zeros(len(shard), own.shape[1], dtype=own.dtype, device=own.device)
            for shard, own in ((all_rows, u), (all_cols, v))
        )
        all_stats = None if row_stats is None else tiles.init(all_rows)
        sums = tiles.backward(all_rows, all_cols, u_all, v_all, all_stats)
        own_rows, own_cols = self._own()
        for own, everyone, along in ((u, u_all, own_rows), (v, v_all, own_cols)):
            if own is not None and everyone is not None:
                own += everyone[along]
        if row_stats is not None and all_stats is not None:
            row_stats.copy_(all_stats[:, own_rows])
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

    def _own(self) -> list[slice]:
        """This rank's rows among those of all ranks, and its columns."""
        rank, sides = self.layout.rank, (self.layout.rows, self.layout.cols)
        return [slice(sum(sizes[:rank]), sum(sizes[: rank + 1])) for sizes in sides]
