"""The interface of exchanges: which blocks a rank computes, and the gradient convention.

Stands between `engine/` and `tiles/`. An exchange fetches the shards of columns one after the other, has the tiles
compute the block of each, and merges the results.

**The gradient convention.** The loss L is that of the global batch, the same number on every rank. A data-parallel
wrapper combines the parameter gradients of W ranks: by their mean (DDP, FSDP) or by their sum. A rank returns
`W · ∂L/∂features` for its own features where the wrapper takes the mean, and `∂L/∂features` where it sums, so that the
combined gradient of every parameter, the scale and the bias included, is exactly ∂L/∂θ. `Exchange.gradient_factor` is
that W or 1; nothing else in the library multiplies by a number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from contrastile._types import Gradient, Reduction, accumulator
from contrastile.distributed import collectives
from contrastile.distributed.failure import in_step, state_of
from contrastile.distributed.neighbours import Neighbours, joining
from contrastile.losses.base import Gathers, Shard, changed
from contrastile.tiles.base import Accumulated, ForwardResult, Sum, Tiles

# pairs of a rank for each part of a pass, and bytes of features, sums and transfers, up to which ranks replay a call
# (`engine/graph.py`): an H200 computes 2.7 ms for so many pairs of 768 features, about as long as the host takes
REPLAYED_PAIRS, REPLAYED_BYTES = 2**28, 2**29


@dataclass(frozen=True)
class Layout:
    """The ranks that share the batch, and the numbers of rows and columns of each.

    A part of the ranks (those of one node, or one rank of every node) has a layout too, with the `starts` of its
    columns among those of all ranks.
    """

    group: Any
    rank: int
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    # global position of each rank's first column; None: ranks follow each other, from 0 on
    starts: tuple[int, ...] | None = None
    # the most tokens of a row and of a column on any rank, where a scorer pads them
    tokens: tuple[int, int] | None = None
    # ranks of a node, for a planner; None: those that the launcher started
    node: int | None = None
    # bytes of gathered columns that "auto" allows on every rank
    allowed: int = 0
    # labels and ids: True where negatives of some rank have none
    unnamed: tuple[bool, bool] = (False, False)

    def __len__(self) -> int:
        return len(self.rows)

    def start(self, rank: int) -> int:
        """The global position of a rank's first column."""
        return sum(self.cols[:rank]) if self.starts is None else self.starts[rank]

    def gathers(self) -> Gathers:
        """Functions that gather a tensor of this rank's rows, and one of its columns, from all ranks."""

        def gathered(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
            return x if len(self) == 1 else collectives.gather_rows(x.contiguous(), sizes, self.group)

        return partial(gathered, sizes=self.rows), partial(gathered, sizes=self.cols)

    def place(self, rows: Shard, cols: Shard) -> tuple[Shard, Shard]:
        """This rank's shards with positions counted over all ranks."""
        first_col, positives = self.start(self.rank), rows.positives
        if positives is not None:
            positives = torch.where(positives >= 0, positives + first_col, positives)
        diagonal = None if rows.diagonal is None else rows.diagonal + first_col
        # row i and column i of a rank may be one example, also where ranks have more columns than rows
        return (changed(rows, start=first_col, diagonal=diagonal, positives=positives), changed(cols, start=first_col))


class Traffic(NamedTuple):
    """Transfers that a rank waits for in both passes, for a planner. Pairs: of its own node, then of other nodes.

    hops: number of transfers, each of which takes a least time. sent: bytes that arrive. beside: the share of the
    rank's arithmetic that runs meanwhile.
    """

    hops: int
    sent: tuple[int, int]
    beside: tuple[float, float]


@dataclass(frozen=True)
class Exchange(ABC):
    """One way to let the rows of this rank meet the columns of all ranks."""

    # the combination of ranks' gradients by the data-parallel wrapper
    gradient: Gradient
    layout: Layout
    # every pair is computed on one rank only
    pairs_once: ClassVar[bool] = True
    # number of times that a column is sent to another rank: for the forward and for the backward
    column_sends: ClassVar[int] = 2
    # positives on a diagonal become indices
    by_index: ClassVar[bool] = False

    @abstractmethod
    def forward(self, tiles: Tiles, rows: Shard, cols: Shard) -> tuple[Tensor, Tensor | None]:
        """Statistics of this rank's rows over all columns, and of this rank's columns over all rows."""

    @abstractmethod
    def backward(self, tiles: Tiles, rows: Shard, cols: Shard, u: Sum, v: Sum, row_stats: Tensor | None) -> Tensor:
        """Add the gradients of all ranks' pairs for this rank's rows and columns to u and v, which come as zeros.

        With `row_stats` the statistics of a pairwise loss are merged into it from the same sweep. Returns the sums over
        this rank's rows (see `Tiles.backward`).
        """

    @classmethod
    def extra_bytes(cls, _layout: Layout, _D: int, _dtype: torch.dtype) -> int:
        """Bytes at the peak beside a rank's own features, gradients and workspace; 0 for one process."""
        return 0

    @classmethod
    def expected_bytes(cls, layout: Layout, D: int, dtype: torch.dtype) -> int:
        """`extra_bytes` with all smaller buffers, for a planner."""
        return cls.extra_bytes(layout, D, dtype)

    @classmethod
    def kept_bytes(cls, _layout: Layout, _D: int, _dtype: torch.dtype) -> int:
        """The part of these that stays between calls on the GPUs of one node, for a planner."""
        return 0

    @classmethod
    def staged_bytes(cls, _layout: Layout, _D: int, _dtype: torch.dtype) -> int:
        """Further bytes on the GPUs of one node, which copy engines read and which stay between calls."""
        return 0

    @classmethod
    def blocks(cls, layout: Layout, _D: int) -> list[tuple[int, int]]:
        """Rows and columns of each block that a rank computes, the block with most columns last; D numbers a column."""
        return [(max(layout.rows), max(layout.cols))]

    @classmethod
    def traffic(cls, layout: Layout, D: int, dtype: torch.dtype) -> Traffic:
        """Every column of the others, and the sums of its gradient, while the block of the rank's own is computed."""
        W, each = len(layout), cls.column_sends * dtype.itemsize + accumulator(dtype).itemsize
        sent = (sum(layout.cols) - min(layout.cols)) * D * each
        far = layout.node not in (None, W)
        return Traffic(2, (0, sent) if far else (sent, 0), (1 / W, 1 / W))

    def parts(self) -> int:
        """Number of parts that a pass has between its transfers; 0: its transfers cannot be replayed."""
        return 0

    def replayable(self, D: int, dtype: torch.dtype) -> bool:
        """Return whether a call with these transfers is replayed; D numbers a column. Ranks agree."""
        layout, parts = self.layout, self.parts()
        if len(layout) == 1:
            return True
        if parts == 0 or max(layout.rows) * sum(layout.cols) > parts * REPLAYED_PAIRS:
            return False
        # a graph keeps copies of a rank's own features, and their gradient sums, too
        own = (max(layout.rows) + max(layout.cols)) * D * bytes_per_feature(dtype)
        return own + self.expected_bytes(layout, D, dtype) <= REPLAYED_BYTES

    def finish(
        self, tiles: Tiles, stats: Sequence[Tensor], rows: Shard, cols: Shard, weights: Tensor | None,
        reduction: Reduction,
    ) -> ForwardResult:  # fmt: skip
        """The loss of the global batch from this rank's statistics."""
        return tiles.finish(stats, weights, reduction, self.total, lambda: tiles.nonfinite(rows, cols))

    def accumulate(
        self, tiles: Tiles, rows: Shard, cols: Shard, wanted: Sequence[bool], row_stats: Tensor | None = None
    ) -> Accumulated:
        """The gradient sums of this rank's rows and columns for the `wanted` gradients of scale, bias and inputs."""
        u, v = tiles.accumulators(rows, cols, wanted)
        return Accumulated(u, v, self.backward(tiles, rows, cols, u, v, row_stats))

    def total(self, local: Tensor, *, largest: bool = False) -> Tensor:
        """The sum over all ranks of a small tensor, or the largest of each of its numbers."""
        if len(self.layout.rows) == 1:
            return local
        return (collectives.largest if largest else collectives.total)(local, self.layout.group)

    def in_step(self, place: str = "operation") -> AbstractContextManager[None]:
        """A context for a sweep, in which an error of one rank becomes an error of all."""
        if len(self.layout.rows) == 1:
            return nullcontext()
        return self._step_of_ranks(place)

    @contextmanager
    def _step_of_ranks(self, place: str) -> Iterator[None]:
        if (buffers := self.buffers()) is not None:
            buffers.follow()
        with in_step(self.layout.group, place):
            yield
        # the step may have made them
        if (buffers := self.buffers()) is not None:
            buffers.watch(self.layout.group)

    def buffers(self) -> Neighbours | None:
        """The buffers that ranks of a node share for their transfers; None where they have none."""
        shared: Neighbours | None = state_of(self.layout.group).neighbours if len(self.layout) > 1 else None
        return shared

    def joining(self) -> AbstractContextManager[None]:
        """A context for the capture of a sweep: if the sweep fails, a transfer under way ends with it."""
        return nullcontext() if self.buffers() is None else joining(self.layout.group)

    def reserved(self, _cols: Shard) -> int:
        """Multiprocessors that tiles should leave to transfers between devices."""
        return 0 if len(self.layout.rows) == 1 else collectives.reserved_multiprocessors(self.layout.group)

    def gradient_factor(self) -> int:
        """The divisor of the wrapper's averaging."""
        return len(self.layout.rows) if self.gradient == "mean" else 1


@dataclass(frozen=True)
class Single(Exchange):
    """The exchange of a process that has the whole batch."""

    def accumulate(
        self, tiles: Tiles, rows: Shard, cols: Shard, wanted: Sequence[bool], row_stats: Tensor | None = None
    ) -> Accumulated:
        tiles.fresh = tiles.writes_fresh
        return super().accumulate(tiles, rows, cols, wanted, row_stats)

    def forward(self, tiles: Tiles, rows: Shard, cols: Shard) -> tuple[Tensor, Tensor | None]:
        return tiles.forward(rows, cols)

    def backward(self, tiles: Tiles, rows: Shard, cols: Shard, u: Sum, v: Sum, row_stats: Tensor | None) -> Tensor:
        return tiles.backward(rows, cols, u, v, row_stats)


def bytes_per_feature(dtype: torch.dtype) -> int:
    """Bytes of another rank's feature and of its gradient's accumulator."""
    return dtype.itemsize + accumulator(dtype).itemsize


def gather_shard(shard: Shard, sizes: Sequence[int], group: Any, start: int = 0) -> Callable[[], Shard]:
    """Start the gather of all ranks' shards with everything that travels with them; the first one begins at `start`.

    Returns a function that waits for them, and returns them as one shard, in rank order.
    """
    payload = shard.payload()
    if shard.state is not None:
        payload[-1] = payload[-1].T.contiguous()
    flight = collectives.begin_gather([x.contiguous() for x in payload], sizes, group)

    def wait() -> Shard:
        arrived = flight.wait()
        if shard.state is not None:
            arrived[-1] = arrived[-1].T
        return shard.unpacked(arrived, start)

    return wait
