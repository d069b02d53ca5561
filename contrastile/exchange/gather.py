"""Gather: every rank gets all columns, computes its own rows against them, and returns the columns' gradients.

The decomposition of DisCo-CLIP (Chen et al. 2023, equations 5 to 8) and of OpenCLIP's local loss with gathered
gradients; rows and columns have their statistics from one sweep. If all columns and their accumulators, b · D numbers
each, fit into memory, it is simpler than the ring, and over NCCL at least as fast. Communication overlaps with the
block of the rank's own columns: the forward computes it first, while the other columns arrive, and the backward last,
while gradients are sent. Ranks of few rows compute all columns in one block, because launching a second one takes
longer than the transfer that it hides. The gathered columns stay from the forward to the backward.

Replicate: every rank gets all rows too and computes the whole matrix, as CLIP's own training did. It is the baseline of
the papers' tables: b² work and, with dense tiles, b² memory on every rank.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from contrastile._types import accumulator
from contrastile.distributed import collectives
from contrastile.distributed.neighbours import neighbours
from contrastile.exchange.base import Exchange, Layout, Traffic, bytes_per_feature, gather_shard
from contrastile.losses.base import Shard
from contrastile.tiles.base import STATISTICS, Sum, Tiles

# pairs of a rank's rows and its own columns, times the numbers of a column, up to which all columns are one block: some
# 0.1 ms of an H200's arithmetic in both passes, where a second block takes the host 0.5 ms and more
ONE_BLOCK = 2**33


@dataclass(frozen=True)
class Gather(Exchange):
    """All-gather of the columns, reduce-scatter of their gradients."""

    # the gathered columns stay for the backward
    column_sends: ClassVar[int] = 1

    def parts(self) -> int:
        return 2

    def forward(self, tiles: Tiles, rows: Shard, cols: Shard) -> tuple[Tensor, Tensor | None]:
        self._share(cols)
        wait = gather_shard(cols, self.layout.cols, self.layout.group, self.layout.start(0))
        own, others = self._slices()
        if self._is_one_block(cols):
            tiles.columns = wait()
            row_stats, of_all = tiles.forward(rows, tiles.columns)
            parts = [None if of_all is None else of_all[:, along] for along in (own, *others)]
        else:
            row_stats, *parts = tiles.forward(rows, cols)
            tiles.columns = wait()
            for along in others:
                block_rows, block_cols = tiles.forward(rows, tiles.columns.narrow(along.start, along.stop))
                tiles.merge(row_stats, block_rows[None])
                parts.append(block_cols)
        col_stats, *sent = parts
        if col_stats is not None:
            col_stats = col_stats.contiguous()
            leaving = torch.cat([col_stats.T[:0], *(stats.T for stats in sent if stats is not None)])
            received = collectives.exchange_rows(leaving, self.layout.cols, self.layout.group)
            tiles.merge(col_stats, received.transpose(1, 2))
        return row_stats, col_stats

    def backward(self, tiles: Tiles, rows: Shard, cols: Shard, u: Sum, v: Sum, row_stats: Tensor | None) -> Tensor:
        columns, one_block = self._all_columns(tiles, cols), self._is_one_block(cols)
        v_all = None if v is None else v.new_zeros(len(columns), v.shape[1])
        sums = tiles.no_pairs()
        for along in [slice(0, len(columns))] if one_block else self._slices()[1]:
            block, v_block = columns.narrow(along.start, along.stop), None if v_all is None else v_all[along]
            sums += tiles.backward(rows, block, u, v_block, row_stats)
        pending = None if v_all is None else collectives.begin_scatter_sum(v_all, self.layout.cols, self.layout.group)
        if not one_block:
            sums += tiles.backward(rows, cols, u, v, row_stats)
        if v is not None and pending is not None:
            v += pending.wait()[0]
        return sums

    @classmethod
    def extra_bytes(cls, layout: Layout, D: int, dtype: torch.dtype) -> int:
        # backends carry as many rows of each rank
        return len(layout) * max(layout.cols) * D * bytes_per_feature(dtype)

    @classmethod
    def expected_bytes(cls, layout: Layout, D: int, dtype: torch.dtype) -> int:
        wide, others = accumulator(dtype).itemsize, sum(layout.cols) - min(layout.cols)
        # the sum that arrives beside a block, or of a node beside the ring, and the statistics of the others' columns,
        # as sent and as received
        arriving = 0 if in_one_block(layout, D) and layout.starts is None else max(layout.cols) * D
        return cls.extra_bytes(layout, D, dtype) + wide * (arriving + STATISTICS * others)

    @classmethod
    def staged_bytes(cls, layout: Layout, D: int, dtype: torch.dtype) -> int:
        """The sums of all columns' gradients, in whose memory the parts of other ranks arrive."""
        sums = sum(layout.cols) * D * accumulator(dtype).itemsize
        return sums if layout.node in (None, len(layout)) and sums <= collectives.MOST_COPIED else 0

    @classmethod
    def traffic(cls, layout: Layout, D: int, dtype: torch.dtype) -> Traffic:
        traffic = super().traffic(layout, D, dtype)
        return traffic._replace(beside=(0.0, 0.0)) if in_one_block(layout, D) else traffic

    @classmethod
    def blocks(cls, layout: Layout, D: int) -> list[tuple[int, int]]:
        if in_one_block(layout, D):
            return [(max(layout.rows), sum(layout.cols))]
        # its own, and the first rank meets all other columns at once
        widths = sorted((max(layout.cols), sum(layout.cols[1:])))
        return [(max(layout.rows), width) for width in widths if width]

    def _share(self, cols: Shard) -> None:
        """Make buffers that the ranks of a node read, for few columns."""
        x, most = cols.features, max(self.layout.cols)
        staged = self.staged_bytes(self.layout, x.shape[1:].numel(), x.dtype)
        if staged:
            beside = sum(collectives.aligned(most * collectives.bytes_per_row(each)) for each in cols.payload())
            neighbours(self.layout.group, collectives.aligned(max(staged, beside) // 2 + 1), x.device)

    def _all_columns(self, tiles: Tiles, cols: Shard) -> Shard:
        """All ranks' columns, gathered in the forward, with the states and coefficients of the backward."""
        sizes, group = self.layout.cols, self.layout.group
        if tiles.columns is None:
            self._share(cols)
            return gather_shard(cols, sizes, group, self.layout.start(0))()
        columns, tiles.columns = tiles.columns, None
        if cols.state is None or cols.coefficient is None:
            return columns
        both = collectives.gather_rows(torch.cat([cols.state, cols.coefficient[None]]).T.contiguous(), sizes, group)
        state, coefficient = both.T.contiguous().split([len(cols.state), 1])
        return replace(columns, state=state, coefficient=coefficient[0])

    def _is_one_block(self, cols: Shard) -> bool:
        return in_one_block(self.layout, cols.features.shape[1:].numel())

    def _slices(self) -> tuple[slice, list[slice]]:
        """This rank's own columns among all, and those before them and behind."""
        sizes, rank = self.layout.cols, self.layout.rank
        first, stop = sum(sizes[:rank]), sum(sizes[: rank + 1])
        return slice(first, stop), [slice(*ends) for ends in ((0, first), (stop, sum(sizes))) if ends[0] < ends[1]]


def in_one_block(layout: Layout, D: int) -> bool:
    """True where the block of a rank's own columns is too small to hide a transfer; the same on all ranks."""
    return max(layout.rows) * max(layout.cols) * D <= ONE_BLOCK


@dataclass(frozen=True)
class Replicate(Exchange):
    """All-gather of rows and columns; each rank takes its own rows and columns of the common result."""

    pairs_once: ClassVar[bool] = False
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
    def blocks(cls, layout: Layout, _D: int) -> list[tuple[int, int]]:
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
