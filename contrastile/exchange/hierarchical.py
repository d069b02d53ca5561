"""Hierarchical: a ring between nodes, and at each of its hops a gather within the node.

Between nodes a shard travels one hop at a time, as in a ring of nodes. Within a node, where links are fast, ranks
gather the shards that arrived. With L ranks on a node, W ranks take W / L hops instead of W, and hold the columns of L
ranks instead of one. Both levels are the exchanges of `ring.py` and `gather.py`: for the ring the gather of a node is a
kind of tiles.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from contrastile._errors import invalid
from contrastile.distributed import collectives
from contrastile.exchange.base import Exchange, Layout, Traffic
from contrastile.exchange.gather import Gather
from contrastile.exchange.ring import Ring
from contrastile.losses.base import Shard
from contrastile.tiles.base import InFlight, Sum, Tiles

# by group and ranks of a node: the groups of this rank within its node, and between nodes
_groups: WeakKeyDictionary[Any, dict[int, tuple[Any, Any]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Hierarchical(Exchange):
    """Ring between nodes, gather within a node; nodes are runs of LOCAL_WORLD_SIZE ranks, as torchrun numbers them."""

    def forward(self, tiles: Tiles, rows: Shard, cols: Shard) -> tuple[Tensor, Tensor | None]:
        ring, node = self._levels(tiles)
        return ring.forward(node, rows, cols)

    def backward(self, tiles: Tiles, rows: Shard, cols: Shard, u: Sum, v: Sum, row_stats: Tensor | None) -> Tensor:
        ring, node = self._levels(tiles)
        return ring.backward(node, rows, cols, u, v, row_stats)

    @classmethod
    def extra_bytes(cls, layout: Layout, D: int, dtype: torch.dtype) -> int:
        nodes = _nodes(layout)
        ring = Ring.extra_bytes(layout, D, dtype) if len(nodes) > 1 else 0
        return ring + max(Gather.extra_bytes(node, D, dtype) for node in nodes)

    @classmethod
    def expected_bytes(cls, layout: Layout, D: int, dtype: torch.dtype) -> int:
        nodes = _nodes(layout)
        ring = Ring.expected_bytes(layout, D, dtype) if len(nodes) > 1 else 0
        return ring + max(Gather.expected_bytes(node, D, dtype) for node in nodes)

    @classmethod
    def staged_bytes(cls, layout: Layout, D: int, dtype: torch.dtype) -> int:
        """Those of the gather of a single node; no copies between the ranks of one node among several."""
        return Gather.staged_bytes(layout, D, dtype) if len(_nodes(layout)) == 1 else 0

    @classmethod
    def blocks(cls, layout: Layout, D: int) -> list[tuple[int, int]]:
        return max((Gather.blocks(node, D) for node in _nodes(layout)), key=lambda blocks: blocks[-1][1])

    @classmethod
    def traffic(cls, layout: Layout, D: int, dtype: torch.dtype) -> Traffic:
        """A hop of the ring and a gather for each node; a gather alone has all columns for the backward."""
        nodes = _nodes(layout)
        if len(nodes) == 1:
            return Gather.traffic(nodes[0], D, dtype)
        # columns that have travelled are gathered in both passes
        near = sum(Ring.traffic(node, D, dtype).sent[0] for node in nodes)
        far = Ring.traffic(_part(layout, range(0, len(layout), len(nodes[0]))), D, dtype)
        return Traffic(4 * len(nodes), (near, sum(far.sent)), (1 / len(nodes[0]), 1.0))

    def _levels(self, tiles: Tiles) -> tuple[Exchange, Tiles]:
        """The ring between nodes and the tiles of this rank's node; with a single node its gather, and the tiles."""
        layout, W = self.layout, len(self.layout)
        size = node_size(W)
        if size == W:
            return Gather(self.gradient, layout), tiles
        within, between = _subgroups(layout.group, layout.rank, W, size)
        node, local_rank = divmod(layout.rank, size)
        ring = _part(layout, range(local_rank, W, size), between, node)
        gathers = [Gather(self.gradient, replace(each, group=within, rank=local_rank)) for each in _nodes(layout)]
        # the ring brings the shards of this node first, then those of the node before
        in_order = iter(gathers[node::-1] + gathers[:node:-1])
        return Ring(self.gradient, ring), _Node(tiles.loss, tiles.scale, tiles.bias, tiles.workspace, tiles, in_order)


@dataclass
class _Node(Tiles):
    """The gather of a node as tiles: this rank's rows against the columns of a whole node."""

    tiles: Tiles
    # for each hop the gather, among this node's ranks, of the shards that arrived
    gathers: Iterator[Gather] = field(repr=False)

    def forward(self, rows: Shard, cols: Shard) -> tuple[Tensor, Tensor | None]:
        stats = next(self.gathers).forward(self.tiles, rows, cols)
        # another hop brings another node's columns
        self.tiles.columns = None
        return stats

    def backward(self, rows: Shard, cols: Shard, u: Sum, v: Sum | InFlight, row_stats: Tensor | None = None) -> Tensor:
        assert not isinstance(v, InFlight)
        return next(self.gathers).backward(self.tiles, rows, cols, u, v, row_stats)

    def merge(self, stats: Tensor, parts: Tensor) -> None:
        self.tiles.merge(stats, parts)

    def init(self, shard: Shard) -> Tensor:
        return self.tiles.init(shard)

    def no_pairs(self) -> Tensor:
        return self.tiles.no_pairs()

    def workspace_bytes(self, N: int, M: int, D: int, dtype: torch.dtype) -> int:
        return self.tiles.workspace_bytes(N, M, D, dtype)


def _part(layout: Layout, ranks: range, group: Any = None, rank: int = 0) -> Layout:
    """Those ranks of a layout, of which this one is `rank`."""
    starts, sizes = [layout.start(each) for each in ranks], (layout.rows, layout.cols)
    rows, cols = (tuple([size[each] for each in ranks]) for size in sizes)
    return Layout(group, rank, rows, cols, tuple(starts))


def _nodes(layout: Layout) -> list[Layout]:
    """The ranks of each node."""
    W, size = len(layout), layout.node or node_size(len(layout))
    return [layout] if size == W else [_part(layout, range(first, first + size)) for first in range(0, W, size)]


def node_size(W: int) -> int:
    """Number of ranks on a node: LOCAL_WORLD_SIZE of the launcher; all ranks without a launcher."""
    size = int(os.environ.get("LOCAL_WORLD_SIZE", W))
    if W % size:
        remedy = "Start equally many ranks on every node, or take gather or ring."
        raise invalid("exchange", f"have nodes of {size} ranks each for hierarchical", f"{W} ranks", remedy)
    return size


def _subgroups(group: Any, rank: int, W: int, size: int) -> tuple[Any, Any]:
    """This rank's groups within its node and between nodes, made at the first call."""
    group = collectives.resolved(group)
    known = _groups.setdefault(group, {})
    if size not in known:
        ranks, own = dist.get_process_group_ranks(group), divmod(rank, size)
        levels = (
            [range(first, first + size) for first in range(0, W, size)],
            [range(first, W, size) for first in range(size)],
        )
        if dist.get_world_size() == W:
            # all ranks make this call, and make all groups in the same order
            nodes, across = (
                [dist.new_group([ranks[each] for each in members]) for members in level] for level in levels
            )
            known[size] = nodes[own[0]], across[own[1]]
        else:
            # only the members of a group make it
            within, between = (
                dist.new_group([ranks[each] for each in level[index]], use_local_synchronization=True)
                for level, index in zip(levels, own, strict=True)
            )
            known[size] = within, between
    return known[size]
