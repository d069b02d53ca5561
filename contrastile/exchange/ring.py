"""Ring: shards of columns travel from rank to rank, and no rank ever holds more than two (Inf-CL, algorithms 1 and
3).

Forward: a shard's columns go on to the next rank while this one computes them against its rows; their statistics
follow one hop behind, merged on the way, and come home with the last hop. Backward: the same, with the float32
gradient of the columns in the statistics' place.

    hop      sends                           receives                        computes
    0        columns of r                    columns of r − 1                r × r, the first of what r gathers
    h        columns of r − h, and what      columns of r − h − 1, and what  r × (r − h)
             is gathered for r − h + 1       is gathered for r − h
    W − 1    what is gathered for r + 2      what is gathered for r + 1      r × (r + 1)
    home     what is gathered for r + 1      what all gathered for r

What travels lies in one buffer of bytes, so that a hop is one send and one receive; they are posted before the tiles
are launched. A buffer that came goes on as it is, once this rank's part has been added to it: two buffers serve all
hops, whatever their number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from contrastile import comm
from contrastile.exchange.base import Exchange, Shards
from contrastile.losses.base import Side
from contrastile.tiles.base import Tiles

# bytes that the parts of a buffer begin at multiples of: any kernel can read them there
ALIGNMENT = 256


class Parcel(NamedTuple):
    """What lies in a buffer: a shard's luggage, and behind it what is gathered for another shard."""

    bytes: Tensor
    luggage: list[Tensor]
    gathered: Tensor
    # where the second begins
    border: int


@dataclass(frozen=True)
class Ring(Exchange):
    """W hops, each of which brings the next shard here under the present one's computation."""

    def stats(self, tiles: Tiles, rows: Side, cols: Side) -> tuple[Tensor, Tensor | None]:
        row_stats: Tensor | None = None
        # a loss without column statistics sends nothing after its columns
        home = tiles.init(cols) if tiles.loss.symmetric else rows.features.new_empty(0, len(cols))

        def visit(shard: Side) -> Tensor:
            nonlocal row_stats
            here, column_part = tiles.stats(rows, shard)
            if row_stats is None:
                row_stats = here
            else:
                tiles.merge(row_stats, here[None])
            return here.new_empty(0, len(shard)) if column_part is None else column_part

        def merge(gathered: Tensor, part: Tensor) -> None:
            if part.numel():
                tiles.merge(gathered, part[None])

        self._around(cols, home, 1, visit, merge)
        assert row_stats is not None
        return row_stats, home if tiles.loss.symmetric else None

    def grads(self, tiles: Tiles, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None) -> Tensor:
        def sweep(shard: Side, part: Tensor | None) -> Tensor:
            return tiles.grads(rows, shard, u, part)

        return self._gradients(tiles, cols, v, sweep)

    def stats_and_grads(
        self, tiles: Tiles, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        row_stats = tiles.init(rows)

        def sweep(shard: Side, part: Tensor | None) -> Tensor:
            here, pair_sum = tiles.stats_and_grads(rows, shard, u, part)
            tiles.merge(row_stats, here[None])
            return pair_sum

        return row_stats, self._gradients(tiles, cols, v, sweep)

    @classmethod
    def extra_bytes(cls, shards: Shards, D: int, itemsize: int) -> int:
        return 2 * max(shards.cols) * D * (itemsize + 4)

    def _gradients(
        self, tiles: Tiles, cols: Side, v: Tensor | None, sweep: Callable[[Side, Tensor | None], Tensor]
    ) -> Tensor:
        pair_sum = tiles.no_pairs()
        home = tiles.scale.new_empty(len(cols), 0) if v is None else v
        most = max(self.shards.cols)
        # until v comes home, its memory takes each hop's part
        room = home if len(home) == most else home.new_empty(most, home.shape[1])

        def visit(shard: Side) -> Tensor:
            part = room[: len(shard)].zero_()
            pair_sum.add_(sweep(shard, None if v is None else part))
            return part

        self._around(cols, home, 0, visit, torch.Tensor.add_)
        return pair_sum

    def _around(
        self,
        shard: Side,
        home: Tensor,
        axis: int,
        visit: Callable[[Side], Tensor],
        merge: Callable[[Tensor, Tensor], object],
    ) -> None:
        """Writes to `home` what the visits of all ranks make of this rank's shard, whose columns are its `axis`.

        Merged in the order of the ring, so that every run gives the same bits.
        """
        W, me, group, sizes = len(self.shards), self.shards.rank, self.shards.group, self.shards.cols
        cargo = _Cargo(shard, home, axis, max(sizes))
        leaving = cargo.parcel(1, sizes[me], 0)
        for packed, x in zip(leaving.luggage, shard.luggage(), strict=True):
            packed.copy_(x)
        for hop in range(W):
            here, coming = (me - hop) % W, (me - hop - 1) % W
            last = hop == W - 1
            arriving = cargo.parcel(hop % 2, 0 if last else sizes[coming], sizes[here])
            # the last shard goes no further, and nobody has gathered anything for a first one
            sent = leaving.bytes[leaving.border :] if last else leaving.bytes
            received = arriving.bytes if hop else arriving.bytes[: arriving.border]
            flight = comm.post(sent, received, group)
            part = visit(shard)
            flight.wait()
            (merge if hop else torch.Tensor.copy_)(arriving.gathered, part)
            if not last:
                shard = shard.moved(arriving.luggage, sum(sizes[:coming]))
            leaving = arriving
        comm.post(leaving.gathered, home, group).wait()


class _Cargo:
    """What travels: luggage like the shard's, and what is gathered like `home`, whose columns are its `axis`."""

    def __init__(self, shard: Side, home: Tensor, axis: int, most: int) -> None:
        like = [(x, 1 if x is shard.state else 0) for x in shard.luggage()]
        # of each part: its dtype, its shape without the columns, and their axis in it
        self.parts = [(x.dtype, [*x.shape[:at], *x.shape[at + 1 :]], at) for x, at in [*like, (home, axis)]]
        room = sum(self._sizes(most, most))
        self.buffers = [home.new_empty(room, dtype=torch.uint8) for _ in range(2)]
        kinds = {dtype for dtype, *_ in self.parts}
        self.views = [{dtype: buffer.view(dtype) for dtype in kinds} for buffer in self.buffers]

    def parcel(self, buffer: int, columns: int, gathered: int) -> Parcel:
        """The beginning of a buffer as luggage of so many columns, and what is gathered for others."""
        sizes = self._sizes(columns, gathered)
        views, found, begin = self.views[buffer], [], 0
        for (dtype, others, axis), size, n in zip(self.parts, sizes, self._columns(columns, gathered), strict=True):
            shape = [*others[:axis], n, *others[axis:]]
            strides = [prod(shape[at + 1 :]) for at in range(len(shape))]
            found.append(views[dtype].as_strided(shape, strides, begin // dtype.itemsize))
            begin += size
        return Parcel(self.buffers[buffer][:begin], found[:-1], found[-1], begin - sizes[-1])

    def _columns(self, columns: int, gathered: int) -> list[int]:
        return [columns] * (len(self.parts) - 1) + [gathered]

    def _sizes(self, columns: int, gathered: int) -> list[int]:
        """Bytes of the parts, up to where the next one may begin."""
        counts = zip(self.parts, self._columns(columns, gathered), strict=True)
        return [-(-prod(others) * n * dtype.itemsize // ALIGNMENT) * ALIGNMENT for (dtype, others, _), n in counts]
