"""A block as the kernels see it: its sides, its masks, its positives, and a super-tile of it, without a launch.

Between `plan.py`, which has the operands of one super-tile, and `backend.py`, which loops over them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile.losses.base import PairLoss, Shard
from contrastile.tiles.triton.kernels.arithmetic import POSITIVE_SHARE
from contrastile.tiles.triton.plan import ALIGNMENT, Epilogue, Masks, Pair, epilogue_for, shape_for, tiles_of


@dataclass(frozen=True)
class Positives:
    """Positives known by position: columns [N, P] of the block, −1 pads, or the diagonal's first column."""

    columns: Tensor | None
    diagonal: int | None
    # no column is listed twice, as on a diagonal
    distinct: bool = False
    # memory for their products [N, P] in the order of the given lists, which each pass over the tiles writes
    # (`store_listed`), and the places [N, P] of `columns` in these lists; None where they have the same order
    products: Tensor | None = None
    places: Tensor | None = None

    @property
    def per_row(self) -> int:
        return 1 if self.columns is None else self.columns.shape[1]


@dataclass(frozen=True)
class Order:
    """The rows and columns of a block, or of a part of it, in the order of their labels."""

    # positions in the block as it was given
    rows: Tensor
    cols: Tensor
    # [5, N] and [5, M] numbers that say which of the others are positives: see `kernels/masks.py`
    of_rows: Tensor
    of_cols: Tensor
    # of the part within the block
    first_row: int = 0
    first_col: int = 0

    def narrow(self, i: slice, j: slice) -> Order:
        return Order(
            along(self.rows, i), along(self.cols, j), along(self.of_rows, i), along(self.of_cols, j), i.start, j.start
        )


@dataclass(frozen=True)
class Runs:
    """The order of a block's labels, and the pairs that are the only positive of a row.

    singles: the position of each row's only positive [N], −1 where it has none or several, and the same for each column
    [M]. With both directions such a row and column are each other's only positive. one_way: only rows matter, those of
    columns are −1.
    """

    order: Order
    singles: tuple[Tensor, Tensor]
    one_way: bool

    @property
    def listed(self) -> Positives:
        return Positives(self.singles[0][:, None], None, distinct=not self.one_way)

    def columns(self, start: int) -> Tensor:
        """The columns of the listed pairs [N, 1], counted from `start` columns before the block."""
        (columns, _) = self.singles
        return (columns if start == 0 else torch.where(columns < 0, columns, columns + start))[:, None]


@dataclass(frozen=True)
class Block:
    """Rows and columns as the kernels read them, and how `loss` sees them."""

    rows: Shard
    cols: Shard
    # see arithmetic.py
    constants: Tensor
    loss: PairLoss
    # with positives by label: all of the sides but the features is in this order
    order: Order | None = None
    # with positives by label that are sums of features: see `label_sums.py`
    runs: Runs | None = None
    # with label smoothing that is: see `smoothing.py`
    sums_smoothing: bool = False

    @cached_property
    def epilogue(self) -> Epilogue:
        return epilogue_for(self.loss, self.sums_smoothing)

    @cached_property
    def directions(self) -> list[tuple[Tensor, Tensor]]:
        """State and coefficient of the rows and, if symmetric, of the columns."""
        directions = []
        for side in (self.rows, self.cols)[: 1 + self.loss.symmetric]:
            assert side.state is not None
            assert side.coefficient is not None
            directions.append((side.state, side.coefficient))
        return directions

    def largest_gradient(self, *, weighed: bool) -> Tensor:
        """A bound on the gradient of a pair. weighed: a positive's weight, which may be of any size, is its share."""
        largest = []
        for state, coefficient in self.directions:
            # other positives than those by label are not in the strip
            by_weights = weighed and self.order is not None
            share = state[POSITIVE_SHARE.value].abs().clamp(min=1) if by_weights else 1.0
            largest.append((coefficient * share).abs().amax())
        return torch.stack(largest).sum()

    @property
    def places(self) -> tuple[Tensor | None, Tensor | None]:
        """The positions of the rows, and of the columns, in the order of the caller, where they have another one."""
        return (None, None) if self.order is None else (self.order.rows, self.order.cols)

    @property
    def position(self) -> tuple[int, ...]:
        return self.rows.start, len(self.rows), self.cols.start, len(self.cols)

    @property
    def self_diagonal(self) -> int | None:
        """The column that is the same example as the first row, if such pairs do not count."""
        return self.rows.start - self.cols.start if self.loss.exclude_self else None

    @property
    def masks(self) -> Masks:
        """Excluded pairs, with the positives known by position, and pairs that are positive by label."""
        rows, cols = self.rows, self.cols
        return Masks(
            diagonal=None if rows.diagonal is None else rows.diagonal - cols.start,
            self_diagonal=self.self_diagonal,
            positives=rows.positives if rows.diagonal is None else None,
            positives_start=cols.start if self.order is None else self.order.first_col,
            ids=_both(rows.ids, cols.ids),
            labels=_both(rows.labels, cols.labels) if rows.diagonal is None and self.order is None else None,
            spans=None if self.order is None else self.order.of_rows,
        )

    def new_parts(self, channels: int, memory: Tensor | None = None, each: int = 1) -> list[Tensor]:
        """Memory for the tiles' sums: [channels, col tiles, N] and, if symmetric, [channels, each · row tiles, M].

        memory: float32 numbers that may be overwritten.
        """
        shape, height, width = shape_for(self.constants.device), len(self.rows), len(self.cols)
        sizes = [(channels, tiles_of(width, shape.cols), height)]
        sizes += [(channels, each * tiles_of(height, shape.rows), width)] * self.loss.symmetric
        if memory is None:
            return [self.constants.new_empty(size) for size in sizes]
        # each begins at whole words, as memory of its own does
        lengths = [tiles_of(prod(size), ALIGNMENT) * ALIGNMENT for size in sizes]
        parts = memory[: sum(lengths)].split(lengths)
        return [part[: prod(size)].view(size) for part, size in zip(parts, sizes, strict=True)]

    def positives(self) -> Positives | None:
        """The positives known by position; None if there are none."""
        rows, cols, N, M = self.rows, self.cols, len(self.rows), len(self.cols)
        if rows.diagonal is not None:
            diagonal = rows.diagonal - cols.start
            return Positives(None, diagonal, distinct=True) if -N < diagonal < M else None
        if rows.positives is None or not rows.positives.shape[1]:
            return None
        columns, places = rows.positives, None
        if columns.shape[1] > 1:
            columns, places = columns.sort(dim=1)
            # a column listed twice is one positive
            repeated = F.pad(columns[:, 1:] == columns[:, :-1], (1, 0))
            columns = columns.masked_fill(repeated, -1)
        inside = (columns >= max(0, cols.start)) & (columns < cols.start + M)
        if self.loss.exclude_self:
            inside &= columns != torch.arange(rows.start, rows.start + N, device=columns.device)[:, None]
        return Positives(torch.where(inside, columns - cols.start, -1), None, places=places)


@dataclass(frozen=True)
class SuperTile:
    """A part of a block, with its operands."""

    # positions of its rows and columns in the whole block
    along: tuple[slice, slice]
    whole: Block
    block: Block
    pair: Pair
    # for the rows and for the columns: the first, the last part of the other side that they meet
    first: tuple[bool, bool]
    last: tuple[bool, bool]

    def of(self, stats: list[Tensor]) -> list[Tensor]:
        """The statistics of its rows, and of its columns."""
        return [along(x, at) for x, at in zip(stats, self.along, strict=False)]


def by_label(rows: Shard) -> bool:
    """True if positives are known by label; they are too many to be listed."""
    return rows.diagonal is None and rows.positives is None and rows.labels is not None


def have_ids(rows: Shard, cols: Shard) -> bool:
    """True if pairs of equal ids are excluded."""
    return rows.ids is not None and cols.ids is not None


def _both(rows: Tensor | None, cols: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if rows is None or cols is None else (rows, cols)


def along(x: Tensor, at: slice, axis: int = -1) -> Tensor:
    """x[at] along an axis, without a new view where that is all of x."""
    return x if at.stop - at.start == x.shape[axis] else x.narrow(axis, at.start, at.stop - at.start)


def narrow(side: Shard, at: slice) -> Shard:
    return side if at.stop - at.start == len(side) else side.narrow(at.start, at.stop)


def readable_side(side: Shard) -> Shard:
    """All but the features as the kernels read it: the last axis dense, which it is not after a transfer."""
    given = {name: getattr(side, name) for name in ("positives", "ids", "labels", "state", "coefficient", "numbers")}
    dense: dict[str, Any] = {
        name: x.contiguous() for name, x in given.items() if x is not None and x.numel() and x.stride(-1) != 1
    }
    return replace(side, **dense) if dense else side
