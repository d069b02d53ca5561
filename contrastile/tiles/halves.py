"""Rows with two halves of features [N, 2·D], and columns [M, D], each of which meets one half of every row.

Around the tiles of a block: the columns that meet the first halves are one block, those that meet the second halves
another, and the statistics of both are merged. GIST compares queries with keys and with each other, and the queries'
keys with each other, in one denominator (`modules/retrieval.py`): a row is a query and its key.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from contrastile._types import Reduction
from contrastile.losses.base import Shard, Total, changed
from contrastile.tiles.base import ForwardResult, InFlight, Sum, Tiles


class Span(NamedTuple):
    """Columns from `start` to `stop`, counted over all ranks, that meet this half of the rows' features: 0 or 1."""

    half: int
    start: int
    stop: int


@dataclass
class Halves(Tiles):
    """A block as two, one for each half of the rows, which tiles of another kind compute. For one-way losses alone."""

    # the tiles of a half
    kind: ClassVar[type[Tiles]]
    # `backward` clears accumulators that the tiles do not write
    writes_fresh: ClassVar[bool] = True

    spans: tuple[Span, ...] = field(kw_only=True)
    # NaN if an input of a call of one process is not finite, else 0, as the tiles have found it
    forward_flag: Tensor | None = field(default=None, init=False, repr=False)

    def forward(self, rows: Shard, cols: Shard) -> tuple[Tensor, Tensor | None]:
        stats, flag = None, self.scale * 0
        for tiles, half_rows, some_cols, _ in self._blocks(rows, cols):
            block_stats, _ = tiles.forward(half_rows, some_cols)
            # of one process
            if len(self.spans) == 2:
                flag = flag + tiles.nonfinite_after(half_rows, some_cols)
            if stats is None:
                stats = block_stats
            else:
                tiles.merge(stats, block_stats[None])
        self.forward_flag = flag
        return self.init(rows) if stats is None else stats, None

    def backward(self, rows: Shard, cols: Shard, u: Sum, v: Sum | InFlight, row_stats: Tensor | None = None) -> Tensor:
        assert not isinstance(v, InFlight)
        sums, D = self.no_pairs(), cols.features.shape[1]
        for tiles, half_rows, some_cols, (half, along) in self._blocks(rows, cols):
            of_rows = None if u is None else u[:, half * D : (half + 1) * D]
            of_cols = None if v is None else v[along]
            tiles.fresh = self.fresh and tiles.writes_fresh
            for total in (of_rows, of_cols) if self.fresh and not tiles.fresh else ():
                if total is not None:
                    total.zero_()
            sums = sums + tiles.backward(half_rows, some_cols, of_rows, of_cols, row_stats)
        return sums

    def finish(
        self, stats: Sequence[Tensor], weights: Tensor | None, reduction: Reduction, total: Total,
        nonfinite: Callable[[], Tensor],
    ) -> ForwardResult:  # fmt: skip
        tiles, flag = self.halves[0], self.forward_flag
        if len(self.spans) > 2 or self.flag is not None or flag is None:
            return super().finish(stats, weights, reduction, total, nonfinite)
        tiles.flag, tiles.noted = flag, True
        return tiles.finish(stats, weights, reduction, total, lambda: flag)

    def merge(self, stats: Tensor, parts: Tensor) -> None:
        self.halves[0].merge(stats, parts)

    def guide_numbers(self, rows: Shard, cols: Shard) -> Tensor | None:
        return self.halves[0].guide_numbers(rows, cols)

    def scaled(self, total: Tensor, dtype: torch.dtype, upstream: Tensor | None, *, keep: bool) -> Tensor:
        return self.halves[0].scaled(total, dtype, upstream, keep=keep)

    def inner_product(self, x: Tensor, total: Tensor) -> Tensor:
        return self.halves[0].inner_product(x, total)

    def reserve(self, multiprocessors: int) -> None:
        for tiles in self.halves:
            tiles.reserve(multiprocessors)

    def keeps(self, rows: Shard, cols: Shard) -> bool:
        return all(tiles.keeps(*block) for tiles, *block, _ in self._blocks(rows, cols))

    def workspace_bytes(self, N: int, M: int, D: int, dtype: torch.dtype) -> int:
        return sum(tiles.workspace_bytes(N, M, D, dtype) for tiles in self.halves)

    @property
    def sums_products(self) -> bool:
        return self.halves[0].sums_products

    @cached_property
    def halves(self) -> tuple[Tiles, Tiles]:
        """The tiles of both halves. Each has its share of the workspace, by columns: both may keep results at once."""
        numbers = [sum(span.stop - span.start for span in self.spans if span.half == half) for half in (0, 1)]
        first, second = (self.workspace * number // max(1, sum(numbers)) for number in numbers)
        make = self.kind
        return make(self.loss, self.scale, self.bias, first), make(self.loss, self.scale, self.bias, second)

    def _blocks(self, rows: Shard, cols: Shard) -> Iterator[tuple[Tiles, Shard, Shard, tuple[int, slice]]]:
        """The blocks within a block: tiles, rows with one half of their features, columns, and the places of both."""
        for half, start, stop in self.spans:
            along = slice(max(start - cols.start, 0), min(stop - cols.start, len(cols)))
            if along.start < along.stop:
                tiles = self.halves[half]
                # a mask of positives out of range has changed the scale
                tiles.scale, tiles.backward_next = self.scale, self.backward_next
                features, *guides = (x.chunk(2, dim=1)[half] for x in (rows.features, *rows.guides))
                half_rows = changed(rows, features=features, guides=tuple(guides))
                yield tiles, half_rows, cols.narrow(along.start, along.stop), (half, along)


@cache
def halves_of(tiles: type[Tiles]) -> type[Halves]:
    """The class of halves whose blocks these tiles compute."""

    class Of(Halves):
        kind = tiles
        capturable = tiles.capturable
        checks_guides = tiles.checks_guides

    return Of
