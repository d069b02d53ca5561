"""Gather: every rank gets all columns, computes its own rows against them, and hands the columns' gradients back.

The decomposition of DisCo-CLIP (Chen et al. 2023, equations 5 to 8) and of OpenCLIP's local loss with gathered
gradients, with the columns' statistics from the same sweep. Simple, and as fast as the ring where b · D · (bytes of
a feature and of its accumulator) fit. What travels is hidden behind the pairs that need nobody: in the forward a rank
begins with its own columns, while the others' are on their way; in the backward it ends with them, while the others'
gradients are. The columns stay from the one to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from contrastile import comm
from contrastile.exchange.base import Exchange, Shards, gather_side, held_each
from contrastile.losses.base import Side
from contrastile.tiles.base import Tiles

# of a block of rows and columns: adds its part to u and v, and returns its sums
Sweep = Callable[[Side, Side, Tensor | None, Tensor | None], Tensor]


@dataclass(frozen=True)
class Gather(Exchange):
    """All-gather of the columns, reduce-scatter of their gradients."""

    # the columns of all ranks, between forward and backward
    kept: list[Side] = field(default_factory=list, compare=False, repr=False)

    def stats(self, tiles: Tiles, rows: Side, cols: Side) -> tuple[Tensor, Tensor | None]:
        coming = gather_side(cols, self.shards.cols, self.shards.group)
        row_stats, col_stats = tiles.stats(rows, cols)
        everyone = coming.wait()
        self.kept[:] = [everyone]
        parts = []
        for run, _ in self._elsewhere(everyone):
            here, part = tiles.stats(rows, run)
            tiles.merge(row_stats, here[None])
            parts.append(part)
        if col_stats is not None:
            sent = torch.cat([col_stats.T[:0], *(part.T for part in parts if part is not None)])
            returned = comm.exchange_rows(sent, self.shards.cols, self.shards.group)
            tiles.merge(col_stats, returned.transpose(1, 2))
        return row_stats, col_stats

    def grads(self, tiles: Tiles, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None) -> Tensor:
        return self._gradients(tiles, rows, cols, u, v, tiles.grads)

    def stats_and_grads(
        self, tiles: Tiles, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        row_stats = tiles.init(rows)

        def sweep(rows: Side, run: Side, u: Tensor | None, v: Tensor | None) -> Tensor:
            here, pair_sum = tiles.stats_and_grads(rows, run, u, v)
            tiles.merge(row_stats, here[None])
            return pair_sum

        return row_stats, self._gradients(tiles, rows, cols, u, v, sweep)

    @classmethod
    def extra_bytes(cls, shards: Shards, D: int, dtype: torch.dtype) -> int:
        return sum(shards.cols) * D * held_each(dtype)

    def _gradients(
        self, tiles: Tiles, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None, sweep: Sweep
    ) -> Tensor:
        everyone = self._everyone(cols)
        v_all = None if v is None else v.new_zeros(len(everyone), v.shape[1])
        pair_sum = tiles.no_pairs()
        for run, at in self._elsewhere(everyone):
            pair_sum += sweep(rows, run, u, None if v_all is None else v_all[at])
        leaving = None if v_all is None else comm.begin_scatter_sum(v_all, self.shards.cols, self.shards.group)
        pair_sum += sweep(rows, cols, u, v)
        if v is not None and leaving is not None:
            v += leaving.wait()[0]
        return pair_sum

    def _everyone(self, cols: Side) -> Side:
        """All columns, as the forward left them, with what the backward needs of their statistics."""
        sizes, group = self.shards.cols, self.shards.group
        if not self.kept:
            return gather_side(cols, sizes, group).wait()
        everyone = self.kept.pop()
        if cols.state is None or cols.coefficient is None:
            return everyone
        both = comm.gather_rows(torch.cat([cols.state, cols.coefficient[None]]).T.contiguous(), sizes, group)
        state, coefficient = both.T.contiguous().split([len(cols.state), 1])
        return replace(everyone, state=state, coefficient=coefficient[0])

    def _elsewhere(self, everyone: Side) -> Iterator[tuple[Side, slice]]:
        """The columns before this rank's own, and those behind them."""
        sizes, rank = self.shards.cols, self.shards.rank
        first = sum(sizes[:rank])
        for at in (slice(0, first), slice(first + sizes[rank], sum(sizes))):
            if at.stop > at.start:
                yield everyone.narrow(at.start, at.stop), at
