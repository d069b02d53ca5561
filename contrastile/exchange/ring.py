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
of the hop are launched, and waited for when the tiles need what is gathered. A buffer that came goes on as it is, once
this rank's part has been added to it: two buffers serve all hops, whatever their number. What goes home leaves as soon
as it is complete, while the tiles still compute this rank's own gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contrastile import comm
from contrastile.exchange.base import Exchange, Shards, held_each
from contrastile.losses.base import Side
from contrastile.tiles.base import Tiles, Turn

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

        def visit(shard: Side, turn: Turn) -> None:
            nonlocal row_stats
            here, part = tiles.stats(rows, shard)
            if row_stats is None:
                row_stats = here
            else:
                tiles.merge(row_stats, here[None])
            if part is not None and turn.first:
                turn.here().copy_(part)
            elif part is not None:
                tiles.merge(turn.here(), part[None])

        self._around(cols, home, 1, visit)
        assert row_stats is not None
        return row_stats, home if tiles.loss.symmetric else None

    def grads(self, tiles: Tiles, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None) -> Tensor:
        def sweep(shard: Side, v: Any) -> Tensor:
            return tiles.grads(rows, shard, u, v)

        return self._gradients(tiles, cols, v, sweep)

    def stats_and_grads(
        self, tiles: Tiles, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        row_stats = tiles.init(rows)

        def sweep(shard: Side, v: Any) -> Tensor:
            here, pair_sum = tiles.stats_and_grads(rows, shard, u, v)
            tiles.merge(row_stats, here[None])
            return pair_sum

        return row_stats, self._gradients(tiles, cols, v, sweep)

    @classmethod
    def extra_bytes(cls, shards: Shards, D: int, dtype: torch.dtype) -> int:
        return 2 * max(shards.cols) * D * held_each(dtype)

    def _gradients(self, tiles: Tiles, cols: Side, v: Tensor | None, sweep: Callable[[Side, Any], Tensor]) -> Tensor:
        pair_sum = tiles.no_pairs()
        home = tiles.scale.new_empty(len(cols), 0) if v is None else v
        visit = self._added_at_once if tiles.takes_turns else self._added_after(home)

        def visited(shard: Side, turn: Turn) -> None:
            pair_sum.add_(sweep(shard, None) if v is None else visit(shard, turn, sweep))

        self._around(cols, home, 0, visited)
        return pair_sum

    def _added_at_once(self, shard: Side, turn: Turn, sweep: Callable[[Side, Any], Tensor]) -> Tensor:
        """The tiles add to what is gathered, when they have to."""
        if turn.first:
            turn.here().zero_()
        return sweep(shard, turn)

    def _added_after(self, home: Tensor) -> Callable[[Side, Turn, Callable[[Side, Any], Tensor]], Tensor]:
        """The tiles compute this rank's part by itself."""
        most = max(self.shards.cols)
        # until v comes home, its memory takes each hop's part
        room = home if len(home) == most else home.new_empty(most, home.shape[1])

        def added(shard: Side, turn: Turn, sweep: Callable[[Side, Any], Tensor]) -> Tensor:
            part = room[: len(shard)].zero_()
            found = sweep(shard, part)
            (torch.Tensor.copy_ if turn.first else torch.Tensor.add_)(turn.here(), part)
            return found

        return added

    def _around(self, shard: Side, home: Tensor, axis: int, visit: Callable[[Side, Turn], None]) -> None:
        """Writes to `home` what the visits of all ranks make of this rank's shard, whose columns are its `axis`.

        Merged in the order of the ring, so that every run gives the same bits.
        """
        W, me, group, sizes = len(self.shards), self.shards.rank, self.shards.group, self.shards.cols
        cargo = _Cargo(shard, home, axis, max(sizes))

        def parcel(hop: int) -> Parcel:
            """Where a hop's arrivals lie. The last one brings no columns."""
            here, coming = sizes[(me - hop) % W], sizes[(me - hop - 1) % W]
            return cargo.parcel(hop % 2, 0 if hop == W - 1 else coming, here)

        def post(hop: int, leaving: Parcel, arriving: Parcel) -> comm.Flight:
            """Nobody has gathered anything for a first shard, and the last goes no further."""
            sent = leaving.bytes[leaving.border :] if hop == W - 1 else leaving.bytes
            return comm.post(sent, arriving.bytes if hop else arriving.bytes[: arriving.border], group)

        leaving, arriving = cargo.parcel(1, sizes[me], 0), parcel(0)
        for packed, x in zip(leaving.luggage, shard.luggage(), strict=True):
            packed.copy_(x)
        flights = [post(0, leaving, arriving)]
        for hop in range(W):
            last = hop == W - 1
            following = arriving if last else parcel(hop + 1)

            def go_on(hop: int = hop, leaving: Parcel = arriving, arriving: Parcel = following) -> None:
                done = hop == W - 1
                flights.append(comm.post(leaving.gathered, home, group) if done else post(hop + 1, leaving, arriving))

            # the next one comes to where the present shard lies; home, to where nothing lies
            turn = Turn(arriving.gathered, flights[-1].wait, go_on, first=hop == 0, early=last)
            visit(shard, turn)
            turn.leave()
            if not last:
                shard = shard.moved(arriving.luggage, sum(sizes[: (me - hop - 1) % W]))
            arriving = following
        flights[-1].wait()


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
