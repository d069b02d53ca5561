"""Ring: shards of columns travel from rank to rank, and no rank ever holds more than two (Inf-CL, algorithms 1 and
3).

Forward: a shard's columns are sent on to the next rank while this rank computes them against its rows. Their statistics
follow one hop behind, merged by each rank, and return to the owner with the last hop. Backward: the same, with the
float32 gradient of the columns in place of the statistics.

    hop      sends                           receives                        computes
    0        columns of r                    columns of r − 1                r × r
    h        columns of r − h, and the       columns of r − h − 1, and the   r × (r − h)
             accumulator of r − h + 1        accumulator of r − h
    W − 1    the accumulator of r + 2        the accumulator of r + 1        r × (r + 1)
    return   the accumulator of r + 1        the accumulator of r

A packet is one buffer of bytes, so that a hop is one send and one receive. Both are posted before the tiles of the hop
are launched, and waited for when the tiles need the accumulator. A packet is sent on from the buffer in which it
arrived, with this rank's part added: two buffers serve any number of hops. An accumulator returns to its owner as soon
as it is complete, while the tiles still compute this rank's own gradient. A packet that leaves begins at the start of a
buffer, so that GPUs of one node can read it there (`neighbours.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contrastile.distributed import collectives
from contrastile.distributed.failure import resolved
from contrastile.distributed.neighbours import MOST_BUFFER_BYTES, neighbours
from contrastile.exchange.base import Exchange, Layout, Traffic, bytes_per_feature
from contrastile.losses.base import Shard
from contrastile.offload import host_room
from contrastile.tiles.base import InFlight, Sum, Tiles


class Packet(NamedTuple):
    """The content of a buffer, 0 or 1: the accumulator of one shard, then the payload of another."""

    buffer: int
    bytes: Tensor
    accumulator: Tensor
    payload: list[Tensor]
    # offset in bytes of the payload
    border: int


@dataclass(frozen=True)
class Ring(Exchange):
    """W hops, each of which fetches the next shard while the present one is computed."""

    # this rank's GPU, through which tensors in host memory travel; None: the group's backend carries all tensors itself
    gpu: torch.device | None = None

    def parts(self) -> int:
        return len(self.layout)

    def reserved(self, cols: Shard) -> int:
        """0 with copy engines; NCCL, which sends more columns than their buffers have room for, needs some."""
        return 0 if self.buffers() is not None and self._copies(cols) else super().reserved(cols)

    def _copies(self, cols: Shard) -> bool:
        """Return whether copy engines have room for all that a step sends. Else the forward takes no buffers either."""
        x = cols.features
        return self.kept_bytes(self.layout, x.shape[1:].numel(), x.dtype) > 0

    def forward(self, tiles: Tiles, rows: Shard, cols: Shard) -> tuple[Tensor, Tensor | None]:
        row_stats: Tensor | None = None
        symmetric = tiles.loss.symmetric
        # without column statistics the accumulator is empty
        col_stats = tiles.init(cols) if symmetric else rows.features.new_empty(0, len(cols))

        def visit(shard: Shard, travelling: InFlight) -> None:
            nonlocal row_stats
            block_rows, block_cols = tiles.forward(rows, shard)
            if row_stats is None:
                row_stats = block_rows
            else:
                tiles.merge(row_stats, block_rows[None])
            if block_cols is not None and travelling.first:
                travelling.value().copy_(block_cols)
            elif block_cols is not None:
                tiles.merge(travelling.value(), block_cols[None])

        self._around(cols, col_stats, 1, visit)
        assert row_stats is not None
        return row_stats, col_stats if symmetric else None

    def backward(self, tiles: Tiles, rows: Shard, cols: Shard, u: Sum, v: Sum, row_stats: Tensor | None) -> Tensor:
        sums = tiles.no_pairs()
        returned = tiles.scale.new_empty(len(cols), 0) if v is None else v
        most = max(self.layout.cols)
        # memory for the gradient of one hop's columns; v is free until the sum for it returns
        unread = v is None or tiles.accepts_in_flight or len(returned) == most
        hop_grad = returned if unread else returned.new_empty(most, returned.shape[1])

        def visit(shard: Shard, travelling: InFlight) -> None:
            if v is None:
                sums.add_(tiles.backward(rows, shard, u, None, row_stats))
            elif tiles.accepts_in_flight:
                if travelling.first:
                    travelling.value().zero_()
                sums.add_(tiles.backward(rows, shard, u, travelling, row_stats))
            else:
                part = hop_grad[: len(shard)].zero_()
                sums.add_(tiles.backward(rows, shard, u, part, row_stats))
                if travelling.first:
                    travelling.value().copy_(part)
                else:
                    travelling.value().add_(part)

        self._around(cols, returned, 0, visit)
        return sums

    @classmethod
    def extra_bytes(cls, layout: Layout, D: int, dtype: torch.dtype) -> int:
        return 2 * max(layout.cols) * D * bytes_per_feature(dtype)

    @classmethod
    def kept_bytes(cls, layout: Layout, D: int, dtype: torch.dtype) -> int:
        buffers, one_node = cls.extra_bytes(layout, D, dtype), layout.node in (None, len(layout))
        return buffers if one_node and buffers <= MOST_BUFFER_BYTES else 0

    @classmethod
    def traffic(cls, layout: Layout, D: int, dtype: torch.dtype) -> Traffic:
        return super().traffic(layout, D, dtype)._replace(hops=2 * len(layout), beside=(1.0, 1.0))

    def _around(self, shard: Shard, returned: Tensor, axis: int, visit: Callable[[Shard, InFlight], None]) -> None:
        """Send the shard around the ring, and fill `returned` [columns along `axis`] with all ranks' sum for it.

        visit: adds this rank's part to the accumulator of a shard. Ranks add in the order of the ring, so that every
        run gives the same bits.
        """
        W, rank, sizes = len(self.layout), self.layout.rank, self.layout.cols
        group, copied = resolved(self.layout.group), self._copies(shard)
        buffers = _Buffers(shard, returned, axis, max(sizes), group, copied, self.gpu)

        def packet(hop: int) -> Packet:
            """The packet that arrives in a hop. The last hop brings no columns."""
            present, coming = sizes[(rank - hop) % W], sizes[(rank - hop - 1) % W]
            return buffers.packet(hop % 2, 0 if hop == W - 1 else coming, present)

        def post(hop: int, leaving: Packet, arriving: Packet) -> collectives.Transfer:
            """Start a hop's transfer. The first one has no accumulator yet, and the last one sends no columns."""
            sent = leaving.bytes[: leaving.border] if hop == W - 1 else leaving.bytes
            return buffers.post(leaving.buffer, sent, arriving.bytes if hop else arriving.bytes[arriving.border :])

        leaving, arriving = buffers.packet(1, sizes[rank], 0), packet(0)
        for packed, x in zip(leaving.payload, shard.payload(), strict=True):
            packed.copy_(x)
        flights = [post(0, leaving, arriving)]
        for hop in range(W):
            last = hop == W - 1
            following = arriving if last else packet(hop + 1)

            def send(hop: int = hop, leaving: Packet = arriving, arriving: Packet = following) -> None:
                if hop == W - 1:
                    flights.append(buffers.post(leaving.buffer, leaving.accumulator, returned))
                else:
                    flights.append(post(hop + 1, leaving, arriving))

            # the next shard overwrites the present one, so its transfer starts after the visit; the return of the
            # accumulator has memory of its own, and may start early
            travelling = InFlight(arriving.accumulator, flights[-1].wait, send, first=hop == 0, early=last)
            visit(shard, travelling)
            travelling.release()
            if not last:
                shard = shard.unpacked(arriving.payload, self.layout.start((rank - hop - 1) % W))
            arriving = following
        flights[-1].wait()


class _Buffers:
    """Two byte buffers for packets of a payload like the shard's and an accumulator like `returned`."""

    def __init__(
        self, shard: Shard, returned: Tensor, axis: int, most: int, group: Any, copied: bool,
        gpu: torch.device | None,
    ) -> None:  # fmt: skip
        like = [(returned, axis), *[(x, 1 if x is shard.state else 0) for x in shard.payload()]]
        # for each tensor of a packet its dtype, its shape without the columns, and their axis
        self.layouts = [(x.dtype, [*x.shape[:at], *x.shape[at + 1 :]], at) for x, at in like]
        room = sum(self._sizes(most, most))
        self.group, self.gpu, self.neighbours = group, gpu, neighbours(group, room, returned.device) if copied else None
        if self.neighbours is None:
            # copies from and to a GPU run beside its computation where host memory is pinned
            empty = returned.new_empty if gpu is None else host_room
            self.buffers = [empty([room], dtype=torch.uint8) for _ in range(2)]
        else:
            self.buffers = self.neighbours.buffers
        kinds = {dtype for dtype, *_ in self.layouts}
        self.views = [{dtype: buffer.view(dtype) for dtype in kinds} for buffer in self.buffers]
        self._packets: dict[tuple[int, int, int], Packet] = {}

    def post(self, buffer: int, leaving: Tensor, arriving: Tensor) -> collectives.Transfer:
        """Send the start of a buffer to the next rank, and receive what the previous one sends."""
        if self.neighbours is None:
            return collectives.post(leaving, arriving, self.group, self.gpu)
        return self.neighbours.post(self.group, buffer, arriving)

    def packet(self, buffer: int, columns: int, accumulated: int) -> Packet:
        """A packet in a buffer, with a payload of `columns` columns and an accumulator of `accumulated` ones."""
        key = buffer, columns, accumulated
        if key not in self._packets:
            self._packets[key] = self._packet(*key)
        return self._packets[key]

    def _packet(self, buffer: int, columns: int, accumulated: int) -> Packet:
        sizes = self._sizes(columns, accumulated)
        views, tensors, begin = self.views[buffer], [], 0
        counts = self._columns(columns, accumulated)
        for (dtype, others, axis), size, n in zip(self.layouts, sizes, counts, strict=True):
            shape, view = [*others[:axis], n, *others[axis:]], views[dtype]
            strides = [prod(shape[at + 1 :]) for at in range(len(shape))]
            tensors.append(view.as_strided(shape, strides, view.storage_offset() + begin // dtype.itemsize))
            begin += size
        return Packet(buffer, self.buffers[buffer][:begin], tensors[0], tensors[1:], sizes[0])

    def _columns(self, columns: int, accumulated: int) -> list[int]:
        return [accumulated] + [columns] * (len(self.layouts) - 1)

    def _sizes(self, columns: int, accumulated: int) -> list[int]:
        """Bytes of each tensor, up to the aligned start of the next."""
        counts = zip(self.layouts, self._columns(columns, accumulated), strict=True)
        return [collectives.aligned(prod(others) * n * dtype.itemsize) for (dtype, others, _), n in counts]
