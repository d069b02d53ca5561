"""Ring: shards of columns travel from rank to rank, and no rank ever holds more than two (Inf-CL, algorithms 1 and
3).

Forward: a shard's columns go on to the next rank while this one computes them against its rows; their statistics
follow one hop behind, merged on the way, and come home with the last hop. Backward: the same, with the float32
gradient of the columns in the statistics' place. One batch of sends and receives per hop, posted before the tiles
are launched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from contrastile import comm
from contrastile.exchange.base import Exchange, Shards
from contrastile.losses.base import Side
from contrastile.tiles.base import Tiles


@dataclass(frozen=True)
class Ring(Exchange):
    """W hops, each of which brings the next shard here under the present one's computation."""

    def stats(self, tiles: Tiles, rows: Side, cols: Side) -> tuple[Tensor, Tensor | None]:
        row_stats = tiles.init(rows)

        def visit(shard: Side) -> Tensor:
            nonlocal row_stats
            here, column_part = tiles.stats(rows, shard)
            row_stats = tiles.loss.merge(row_stats, here)
            # a loss without column statistics sends nothing after its columns
            return row_stats.new_empty(len(shard), 0) if column_part is None else column_part.T.contiguous()

        def merge(a: Tensor, b: Tensor) -> Tensor:
            return tiles.loss.merge(a.T, b.T).T.contiguous() if a.numel() else a

        col_stats = self._around(cols, visit, merge)
        return row_stats, col_stats.T.contiguous() if tiles.loss.symmetric else None

    def grads(self, tiles: Tiles, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None) -> Tensor:
        pair_sum = tiles.no_pairs()

        def visit(shard: Side) -> Tensor:
            part = tiles.scale.new_zeros(len(shard), 0 if v is None else v.shape[1])
            pair_sum.add_(tiles.grads(rows, shard, u, None if v is None else part))
            return part

        home = self._around(cols, visit, torch.Tensor.add_)
        if v is not None:
            v += home
        return pair_sum

    @classmethod
    def extra_bytes(cls, shards: Shards, D: int, itemsize: int) -> int:
        return 2 * max(shards.cols) * D * (itemsize + 4)

    def _around(
        self, shard: Side, visit: Callable[[Side], Tensor], merge: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """What the visits of all ranks make of this rank's shard: [columns, ...], merged in the order of the ring."""
        W, group, sizes = len(self.shards), self.shards.group, self.shards.cols
        gathered: Tensor | None = None
        for hop in range(W):
            here = (self.shards.rank - hop) % W
            coming = (here - 1) % W
            luggage = shard.luggage() if hop < W - 1 else []
            leaving, arriving = [*luggage], [x.new_empty(sizes[coming], *x.shape[1:]) for x in luggage]
            if gathered is not None:
                leaving.append(gathered)
                arriving.append(gathered.new_empty(sizes[here], *gathered.shape[1:]))
            flight = comm.post(leaving, arriving, group)
            part = visit(shard)
            arrived = flight.wait()
            gathered = part if gathered is None else merge(arrived[-1], part)
            if hop < W - 1:
                shard = shard.moved(arrived[: len(luggage)], sum(sizes[:coming]))
        assert gathered is not None
        (home,) = comm.post(
            [gathered], [gathered.new_empty(sizes[self.shards.rank], *gathered.shape[1:])], group
        ).wait()
        return home
