"""Host: features and their gradients stay in host memory, and a device that cannot hold them computes the loss.

Features are the leaves of a shard: one matrix, or all that a learned distance reads, such as token vectors and their
mask. The tiles know what a row is, and how many numbers its gradient has.

A strip of rows, as long as the device's memory allows, is on the device with its statistics or its gradient. The shards
of columns come to the device one after the other; the next one is copied while the present one is computed. In the
backward a shard comes with the sum of its gradient so far, in float32, and goes back with the new sum; after the last
strip it goes back in the features' dtype. With n strips, n · M · D numbers move each way. The only tensors of b numbers
on the device are statistics.

Several ranks are a ring whose packets are in host memory; the strips and shards of a rank are the tiles of the ring.
Packets travel through the GPUs if the group has NCCL, else over Gloo. The columns' gradient travels in float32, and the
rows' gradient waits on the host in float32 between two hops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile._types import accumulator
from contrastile.distributed.collectives import has_nccl
from contrastile.exchange.base import Exchange
from contrastile.exchange.ring import Ring
from contrastile.losses.base import Shard
from contrastile.offload import BlockStream, free_memory, host_room
from contrastile.tiles.base import STATISTICS, Accumulated, InFlight, Sum, SumRow, Tiles, inner_product

# vectors of a shard's columns: enough for the matrix products, few beside the device's memory
SHARD = 65536
# share of the free memory that strip and shards may take
SHARE = 0.6
LEAST_ROWS = 128


@dataclass(frozen=True)
class Cut:
    """Rows of a strip, which stays on the device, and columns of a shard, which comes and goes."""

    strip: int
    shard: int


def cut(rows: Shard, cols: Shard, device: torch.device, workspace: int) -> Cut:
    """Strips of equal length, as few as the free memory of the device allows."""
    of_row, of_col = (sum(row_bytes(math.prod(x.shape[1:]), x.dtype) for x in shard.leaves) for shard in (rows, cols))
    # the last axis has the features of a vector
    vectors = max(1, math.prod(cols.features.shape[1:-1]))
    return cut_within(len(rows), len(cols), (of_row, of_col), free_memory(device)[0] - workspace, vectors)


def check_exchange(name: str, ranks: int, argument: str = "exchange") -> None:
    """Check that several ranks do not name another exchange than the ring for features in host memory."""
    if ranks > 1 and name not in ("auto", "ring", "single"):
        raise invalid(argument, "be auto, ring or single for features in host memory", repr(name), "Take ring.")


def row_bytes(numbers: int, dtype: torch.dtype) -> int:
    """Bytes of a row of this dtype and of its accumulator."""
    return numbers * (dtype.itemsize + accumulator(dtype).itemsize)


def cut_within(N: int, M: int, sizes: tuple[int, int], free: int, vectors: int = 1) -> Cut:
    """Strips of equal length, as few as `free` bytes beside the workspace allow.

    sizes: `row_bytes` of a row and of a column. vectors: those of a column.
    """
    of_row, of_col = (max(1, size) for size in sizes)
    room = int(SHARE * max(0, free))
    # two shards on the device, and the gradients on their way back
    shard = max(LEAST_ROWS, min(SHARD // vectors, M, room // (4 * 3 * of_col)))
    most = max(LEAST_ROWS, (room - 3 * shard * of_col) // of_row)
    strips = max(1, -(-N // most))
    return Cut(max(LEAST_ROWS, -(-N // (strips * LEAST_ROWS)) * LEAST_ROWS), shard)


@dataclass(frozen=True)
class Host(Exchange):
    """Features that stay in host memory, of one process or of a ring of ranks."""

    device: torch.device
    # the dtype in which features are multiplied on the device; None: as given, for a scorer
    dtype: torch.dtype | None
    cuts: Cut
    # group that carries tensors in host memory between several ranks
    carrier: Any = None

    def forward(self, tiles: Tiles, rows: Shard, cols: Shard) -> tuple[Tensor, Tensor | None]:
        if len(self.layout) == 1:
            return self.block_forward(tiles, rows, cols)
        row_stats, col_stats = self._ring.forward(self._as_tiles(tiles), rows, cols)
        return row_stats.to(self.device), None if col_stats is None else col_stats.to(self.device)

    def block_forward(self, tiles: Tiles, rows: Shard, cols: Shard) -> tuple[Tensor, Tensor | None]:
        """The statistics of these rows and columns. The first block of a call also finds non-finite features."""
        blocks = BlockStream(cols.leaves, self.cuts.shard, self.device)
        row_stats, first_block = tiles.init(rows), tiles.flag is None
        no_rows, no_cols = (
            self._on_device(side, slice(0, 0), [x[:0].to(self.device) for x in side.leaves]) for side in (rows, cols)
        )
        flag = tiles.nonfinite(no_rows, no_cols)
        col_stats = tiles.init(cols) if tiles.loss.symmetric else None
        for along_i, strip in self._strips(rows):
            flag = flag + tiles.nonfinite(strip, no_cols)
            for _, along_j, block, _ in self._columns(blocks, cols, fresh=True):
                block_rows, block_cols = tiles.forward(strip, block)
                row_stats[:, along_i] = tiles.loss.merge(row_stats[:, along_i], block_rows)
                if col_stats is not None and block_cols is not None:
                    col_stats[:, along_j] = tiles.loss.merge(col_stats[:, along_j], block_cols)
                if along_i.start == 0:
                    flag = flag + tiles.nonfinite(no_rows, block)
            # free its memory before the next strip is copied
            del strip
        if first_block:
            if not len(rows):
                # no strip has met the columns
                for _, _, block, _ in self._columns(blocks, cols, fresh=True):
                    flag = flag + tiles.nonfinite(no_rows, block)
            tiles.flag = flag
        return row_stats, col_stats

    def block_backward(self, tiles: Tiles, rows: Shard, cols: Shard, u: Sum, v: Sum) -> Tensor:
        """Add the gradients of a block's pairs to u and v, which are in host memory."""
        sums = tiles.no_pairs()
        blocks = self._blocks(tiles, cols, 0 if v is None else v.shape[1], v)
        for along_i, strip in self._strips(rows):
            of_rows = None if u is None else u[along_i].to(self.device)
            for index, along_j, block, so_far in self._columns(blocks, cols, fresh=False):
                sums += tiles.backward(strip, block, of_rows, None if v is None else so_far)
                if v is not None:
                    blocks.write_back(so_far, v[along_j], index)
            if u is not None and of_rows is not None:
                blocks.write_back(of_rows, u[along_i])
            del strip, of_rows
        # the host reads both next
        blocks.finish()
        return sums

    def backward(self, tiles: Tiles, rows: Shard, cols: Shard, u: Sum, v: Sum, row_stats: Tensor | None) -> Tensor:
        raise NotImplementedError("the gradients of features in host memory are accumulated by `accumulate`")

    def accumulate(
        self, tiles: Tiles, rows: Shard, cols: Shard, wanted: Sequence[bool], row_stats: Tensor | None = None
    ) -> Accumulated:
        """The gradients of q and k on the host, scaled and in their own dtypes, and [Σ g, Σ g · ⟨q, k⟩]."""
        assert row_stats is None
        tiles.sums_are_gradients = True
        if len(self.layout) > 1:
            return self._accumulate_of_ranks(tiles, rows, cols, wanted)
        N, wide = len(rows), tiles.scale.dtype
        of_rows, of_cols = tiles.sum_rows(rows, cols, wanted)
        dq, dk = (_gradients(len(side), row) for side, row in ((rows, of_rows), (cols, of_cols)))
        # sums of the columns between two strips; those of wide features are where the result will be
        running = None
        if dk is not None and self.cuts.strip < N:
            running = dk if dk.dtype == wide else host_room(dk.shape, wide)
        blocks = self._blocks(tiles, cols, 0 if of_cols is None else of_cols.numbers, running)
        sums, products = tiles.no_pairs(), torch.zeros_like(tiles.scale)

        def bring_back(total: Tensor, to: Tensor, index: int | None = None) -> None:
            blocks.write_back(total.mul_(tiles.scale).to(to.dtype), to, index)

        for along_i, strip in self._strips(rows):
            u = None if of_rows is None else tiles.scale.new_zeros(len(strip), of_rows.numbers)
            for index, along_j, block, so_far in self._columns(blocks, cols, fresh=along_i.start == 0):
                v = None if dk is None else so_far
                sums += tiles.backward(strip, block, u, v)
                if v is None or dk is None:
                    continue
                if running is not None and along_i.stop < N:
                    blocks.write_back(v, running[along_j], index)
                else:
                    if u is None and not tiles.sums_products:
                        products += inner_product(block.features, v)
                    bring_back(v, dk[along_j], index)
            if u is not None:
                if not tiles.sums_products:
                    products += inner_product(strip.features, u)
                if dq is not None:
                    for rows_of_u, to in zip(u.split(self.cuts.shard), dq[along_i].split(self.cuts.shard), strict=True):
                        bring_back(rows_of_u, to)
                    del rows_of_u
            del strip, u
        blocks.finish()
        return Accumulated(dq, dk, sums if tiles.sums_products else torch.stack([sums, products]))

    def _accumulate_of_ranks(self, tiles: Tiles, rows: Shard, cols: Shard, wanted: Sequence[bool]) -> Accumulated:
        """`accumulate` of several ranks."""
        wide, sides = tiles.scale.dtype, tiles.sum_rows(rows, cols, wanted)
        u, v = (
            None if row is None else host_room((len(side), row.numbers), wide).zero_()
            for side, row in zip((rows, cols), sides, strict=True)
        )
        blocks = self._as_tiles(tiles)
        sums = self._ring.backward(blocks, rows, cols, u, v, None)
        if not tiles.sums_products:
            # features and sums are on the host, where kernels of the tiles cannot read them
            sums = torch.stack([x.to(sums) for x in blocks.pair_sums(sums, rows, cols, u, v, wanted[0])])
        scale = tiles.scale.cpu()
        dq, dk = (
            None if total is None or to is None else torch.mul(total, scale, out=to)
            for total, to in ((u, _gradients(len(rows), sides[0])), (v, _gradients(len(cols), sides[1])))
        )
        return Accumulated(dq, dk, sums)

    @property
    def _ring(self) -> Ring:
        gpu = self.device if self.device.type == "cuda" and has_nccl(self.carrier) else None
        return Ring(self.gradient, replace(self.layout, group=self.carrier), gpu)

    def _as_tiles(self, tiles: Tiles) -> _Blocks:
        return _Blocks(tiles.loss, tiles.scale.cpu(), tiles.bias, tiles.workspace, tiles, self)

    def _strips(self, rows: Shard) -> Iterator[tuple[slice, Shard]]:
        """Strips of rows on the device. The caller deletes each one before it takes the next."""
        for start in range(0, len(rows), self.cuts.strip):
            along = slice(start, min(start + self.cuts.strip, len(rows)))
            yield along, self._on_device(rows, along, [x[along].to(self.device) for x in rows.leaves])

    def _columns(self, blocks: BlockStream, cols: Shard, *, fresh: bool) -> Iterator[tuple[int, slice, Shard, Tensor]]:
        """Blocks of columns on the device: index, place among the columns, block, and its accumulators."""
        for index, bounds, leaves, totals in blocks.sweep(fresh=fresh):
            along = slice(*bounds)
            yield index, along, self._on_device(cols, along, leaves), totals

    def _blocks(self, tiles: Tiles, cols: Shard, width: int, totals: Tensor | None) -> BlockStream:
        """The columns, with accumulators of so many numbers for each; `totals` are theirs between two sweeps."""
        wide = tiles.scale.dtype
        return BlockStream(cols.leaves, self.cuts.shard, self.device, width=width, wide=wide, totals=totals)

    def _on_device(self, shard: Shard, along: slice, leaves: Sequence[Tensor]) -> Shard:
        """Some rows of a shard on the host, with these leaves of theirs on the device."""
        cast = leaves if self.dtype is None else [x.to(self.dtype) for x in leaves]
        return shard.narrow(along.start, along.stop).with_leaves(cast)


@dataclass
class _Blocks(Tiles):
    """The strips and shards of a rank as tiles of a ring: tensors that go in and out are in host memory."""

    tiles: Tiles
    host: Host
    # the device adds its part to what has arrived: a sum on the host would take three passes over host memory
    accepts_in_flight: ClassVar[bool] = True

    def forward(self, rows: Shard, cols: Shard) -> tuple[Tensor, Tensor | None]:
        row_stats, col_stats = self.host.block_forward(self.tiles, rows, without_features_on(cols, self.host.device))
        return row_stats.cpu(), None if col_stats is None else col_stats.cpu()

    def backward(self, rows: Shard, cols: Shard, u: Sum, v: Sum | InFlight, row_stats: Tensor | None = None) -> Tensor:
        assert row_stats is None
        so_far = v.value() if isinstance(v, InFlight) else v
        return self.host.block_backward(self.tiles, rows, without_features_on(cols, self.host.device), u, so_far)

    def init(self, shard: Shard) -> Tensor:
        return self.tiles.init(shard).cpu()

    def no_pairs(self) -> Tensor:
        return self.tiles.no_pairs()

    def workspace_bytes(self, N: int, M: int, D: int, dtype: torch.dtype) -> int:
        return self.tiles.workspace_bytes(N, M, D, dtype)


def without_features_on(shard: Shard, device: torch.device) -> Shard:
    """The shard with all its tensors but the features on the device."""
    names = ("positives", "targets", "labels", "ids", "numbers", "state", "coefficient")
    small = {name: x.to(device) for name in names if (x := getattr(shard, name)) is not None}
    return replace(shard, **small, guides=tuple([guide.to(device) for guide in shard.guides]))


def device_bytes(cuts: Cut, N: int, M: int, sizes: tuple[int, int], dtype: torch.dtype, products: torch.dtype) -> int:
    """Bytes of a device beside the workspace: a strip, shards in both directions, copies in the dtype of the products,
    and the statistics of all rows and columns. sizes: numbers of a row and of a column.
    """
    of_row, of_col = (row_bytes(size, dtype) + (products.itemsize * size if products != dtype else 0) for size in sizes)
    features = min(cuts.strip, N) * of_row + 3 * min(cuts.shard, M) * of_col
    return features + STATISTICS * accumulator(products).itemsize * (N + M)


def host_bytes(sizes: tuple[int, int], dtype: torch.dtype, ranks: int) -> int:
    """Bytes of host memory for each pair: features and gradients of both sides, sums of columns, packets of a ring.

    sizes: numbers of a row and of a column.
    """
    wide, both, of_col = accumulator(dtype).itemsize, sum(sizes), sizes[1]
    own = 2 * both * dtype.itemsize
    if ranks > 1:
        return own + both * wide + 2 * of_col * (dtype.itemsize + wide)
    return own + (of_col * wide if wide != dtype.itemsize else 0)


def _gradients(n: int, row: SumRow | None) -> Tensor | None:
    """Host memory for the gradients of n rows; None where no gradient is returned."""
    return None if row is None or row.dtype is None else host_room((n, row.numbers), row.dtype)
