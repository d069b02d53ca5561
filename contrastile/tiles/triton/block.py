"""A block as the kernels see it, and its cut into super-tiles: decided without a launch.

Between `plan.py`, which has the operands of one super-tile, and `backend.py`, which loops over them: the bytes of each
pass within the workspace; masks, positives and guides of a whole block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile.losses.base import PairLoss, Shard
from contrastile.tiles.triton.kernels.arithmetic import POSITIVE_SHARE
from contrastile.tiles.triton.plan import (
    ALIGNMENT,
    PIECES,
    Epilogue,
    Masks,
    Pair,
    bits_shape,
    epilogue_for,
    is_readable,
    padded,
    scratch_shape,
    shape_for,
    strip_shape,
    tiles_of,
)

# dtype of features, and of a strip, whose range is that of exponentials; float32 features would have three strips
EXPONENTIAL_DTYPE = torch.bfloat16
# features from which a pair's product in a symmetric loss takes longer than one read and write of its exponential, by
# the times at 512 and at 768
LEAST_FEATURES = 320
# sums of a tile's column where exponentials are kept, see `exponential_tile`
COLUMN_SUMS = 4
# features whose sums by label are in memory at once, at least
SUMMED = 64
# 32-bit ids by name, of rows and of columns
Groups = tuple[dict[str, Tensor], dict[str, Tensor]]
# function from height and width of a super-tile, the bytes of each row's and column's features that are copied, and the
# number of their 16-bit pieces, to the bytes of a pass over it
Cost = Callable[[int, int, int, int], int]


@dataclass(frozen=True)
class Budget:
    """Bytes that each pass over a super-tile takes, and the largest super-tile within the workspace."""

    loss: PairLoss
    device: torch.device
    # bytes
    workspace: int
    # height and width of super-tiles found so far
    _sizes: dict[tuple[int | None, ...], tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def epilogue(self) -> Epilogue:
        return epilogue_for(self.loss)

    def forward_bytes(self, height: int, width: int, copied: int, _parts: int) -> int:
        """The tiles' numbers, and what all passes share."""
        sums = self._sums_bytes(height, width, self.epilogue.careful_channels)
        return sums + self._shared_bytes(height, width, copied)

    def backward_bytes(self, height: int, width: int, copied: int, parts: int) -> int:
        """The strip, the sums of a loss computed in the same sweep, and what all passes share."""
        rows, cols = strip_shape(height, width, parts, shape_for(self.device))
        sums = self._sums_bytes(height, width, self.epilogue.channels) if self.loss.pairwise else 0
        return 2 * rows * cols + sums + self._shared_bytes(height, width, copied)

    def backward_beside_bits(self, held: int) -> Cost:
        """The backward's cost beside the bits that the forward has kept."""

        def cost(height: int, width: int, copied: int, parts: int) -> int:
            of_tile = self.bits_bytes(height, width) if held else 0
            return self.backward_bytes(height, width, copied, parts) + held - of_tile

        return cost

    def keeping_bytes(self, height: int, width: int, copied: int, parts: int, *, later: bool = False) -> int:
        """The strip of a forward that keeps exponentials, and the tiles' sums: two of each row, or one of each row and
        several of each column. later: in the backward, which needs those of rows alone.
        """
        each, channels = (COLUMN_SUMS, 1) if self.loss.symmetric else (1, 2)
        sums = self._sums_bytes(height, width, channels, 0 if later else each)
        return self.backward_bytes(height, width, copied, parts) + sums

    def can_keep(self, dtype: torch.dtype) -> bool:
        """Return whether exponentials of this kind can be kept: in the dtype of the features."""
        return self.epilogue.factorizes and dtype == EXPONENTIAL_DTYPE

    def keeps_exponentials(self, rows: Shard, cols: Shard) -> bool:
        """Return whether the exponentials of a whole block are kept; one direction has weighed rows beside them."""
        if not (self.can_keep(rows.features.dtype) and self._is_faster(rows.features.shape[1])):
            return False
        weighed = 0 if self.loss.symmetric else 2 * rows.features.numel()
        sizes = len(rows), len(cols), *self._copies(rows, cols)
        needed = self.keeping_bytes(*sizes) + weighed
        if self.sums_labels(rows, cols):
            needed = max(needed, self.keeping_bytes(*sizes, later=True) + self._least_sums_bytes(len(rows), len(cols)))
        return needed <= self.workspace

    def super_tiles(self, rows: Shard, cols: Shard, held: int | None) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of each super-tile of a block, row by row.

        held: bytes of the bits that the forward has kept, beside which the backward works; None in the forward.
        """
        N, M = len(rows), len(cols)
        key = held, N, M, *self._copies(rows, cols)
        if key not in self._sizes:
            cost = self.forward_bytes if held is None else self.backward_beside_bits(held)
            self._sizes[key] = self._largest(*key[1:], cost)
        height, width = self._sizes[key]
        for i in range(0, N, height):
            for j in range(0, M, width):
                yield slice(i, min(i + height, N)), slice(j, min(j + width, M))

    def most_bytes(self, N: int, M: int, D: int, dtype: torch.dtype) -> int:
        """The bytes of the largest pass over a block, with features copied or not, by label or not."""
        copies = (0, self._copied_bytes(D, dtype), self._ordered_bytes(D, dtype))
        return max(self._most_bytes(N, M, copied, dtype) for copied in copies)

    def expected_bytes(
        self, N: int, M: int, D: int, dtype: torch.dtype, *, backward_next: bool = False, labels: bool = False
    ) -> int:
        """The same for features of one kind.

        backward_next: exponentials are kept for it where they fit. Its accumulators, which are not among these bytes,
        are not there yet in the forward. labels: positives are known by label.
        """
        sizes = N, M, self._expected_copied(N, M, D, dtype, labels), PIECES[dtype]()
        # one sweep gives a pairwise loss and its gradients
        most = self._most_bytes(*sizes[:3], dtype, forward=not self.loss.pairwise)
        if backward_next and self.expects_exponentials(N, M, D, dtype, labels=labels):
            later = self.keeping_bytes(*sizes, later=True)
            most = max(most, self.keeping_bytes(*sizes) - 4 * (N + M) * D, later)
        if labels and self._can_sum_labels(N, M, dtype):
            most = max(most, min(16 * max(N, M) * padded(D, shape_for(self.device)), self.workspace))
        return most

    def expects_exponentials(self, N: int, M: int, D: int, dtype: torch.dtype, *, labels: bool = False) -> bool:
        """Return whether exponentials are kept for a backward that follows at once, as in `keeps_exponentials`."""
        if not (self._is_faster(D) and self.can_keep(dtype)):
            return False
        copied = self._expected_copied(N, M, D, dtype, labels)
        return self.keeping_bytes(N, M, copied, PIECES[dtype]()) <= self.workspace

    def _expected_copied(self, N: int, M: int, D: int, dtype: torch.dtype, labels: bool) -> int:
        """Bytes of a row's features that are copied: 16-bit features of a usual width are read as they are."""
        if labels and not self._can_sum_labels(N, M, dtype):
            return self._ordered_bytes(D, dtype)
        return 0 if dtype.itemsize == 2 and D % 8 == 0 else self._copied_bytes(D, dtype)

    def _most_bytes(self, N: int, M: int, copied: int, dtype: torch.dtype, *, forward: bool = True) -> int:
        sizes = copied, PIECES[dtype]()
        passes = [self.backward_beside_bits(self.held_bytes(N, M, *sizes)), *[self.forward_bytes] * forward]
        return max(cost(*self._largest(N, M, *sizes, cost), *sizes) for cost in passes)

    def _is_faster(self, features: int) -> bool:
        """Return whether kept exponentials are faster."""
        return not self.loss.symmetric or features >= LEAST_FEATURES

    def _largest(self, N: int, M: int, copied: int, parts: int, cost: Cost) -> tuple[int, int]:
        """Rows and columns of a super-tile: the longer side halved, in whole tiles, until it fits the workspace."""
        shape = shape_for(self.device)
        height, width = N, M
        while cost(height, width, copied, parts) > self.workspace and max(height, width) > shape.rows:
            if height >= width:
                height = tiles_of(height, 2 * shape.rows) * shape.rows
            else:
                width = tiles_of(width, 2 * shape.cols) * shape.cols
        return height, width

    def _copies(self, rows: Shard, cols: Shard) -> tuple[int, int]:
        """Bytes of each row's and column's features that are copied, and the number of their pieces."""
        copied = 0
        for q, k in zip((rows.features, *rows.guides), (cols.features, *cols.guides), strict=True):
            if by_label(rows) and not self.sums_labels(rows, cols):
                copied += self._ordered_bytes(q.shape[1], q.dtype)
            elif not (is_readable(q) and is_readable(k)):
                copied += self._copied_bytes(q.shape[1], q.dtype)
        return copied, PIECES[rows.features.dtype]()

    def _sums_bytes(self, height: int, width: int, channels: int, each: int = 1) -> int:
        shape = shape_for(self.device)
        of_cols = each * self.loss.symmetric * tiles_of(height, shape.rows) * width
        return 4 * channels * (tiles_of(width, shape.cols) * height + of_cols)

    def bits_bytes(self, height: int, width: int) -> int:
        """Bytes of a mask's bits."""
        return 4 * prod(bits_shape(height, width, shape_for(self.device))) if self.epilogue.has_mask else 0

    def held_bytes(self, N: int, M: int, copied: int, parts: int) -> int:
        """Bytes of the bits that the forward keeps for the backward: of a block that is one super-tile of it."""
        return self.bits_bytes(N, M) if self._largest(N, M, copied, parts, self.forward_bytes) == (N, M) else 0

    def _shared_bytes(self, height: int, width: int, copied: int) -> int:
        """The operands' pieces, a mask's bits, and a teacher's products of one tile of each program."""
        scratch = 4 * prod(scratch_shape(height, width, self.device)) if self.epilogue.has_teacher else 0
        return self.bits_bytes(height, width) + scratch + (height + width) * copied

    def sums_labels(self, rows: Shard, cols: Shard) -> bool:
        """True if positives by label enter as sums of features, in a block of any order: see `label_sums.py`."""
        of_labels = rows.diagonal is None and rows.labels is not None and rows.ids is None
        return of_labels and self._can_sum_labels(len(rows), len(cols), rows.features.dtype)

    def room_for_sums(self, rows: Shard, cols: Shard, *, beside: bool) -> int:
        """Bytes of the workspace for sums by label; beside: exponentials are there too."""
        sizes = len(rows), len(cols), *self._copies(rows, cols)
        return self.workspace - (self.keeping_bytes(*sizes, later=True) if beside else 0)

    def _can_sum_labels(self, N: int, M: int, dtype: torch.dtype) -> bool:
        """Return whether the loss allows sums by label, and the workspace has room for the fewest.

        In float32 the difference of a probability and its target is more precise than that of their sums.
        """
        return self.epilogue.sums_labels and dtype.itemsize == 2 and self._least_sums_bytes(N, M) <= self.workspace

    def _least_sums_bytes(self, N: int, M: int) -> int:
        """Bytes of the fewest features' sums by label, two of each row and column."""
        return 16 * SUMMED * max(N, M)

    def _copied_bytes(self, D: int, dtype: torch.dtype) -> int:
        return 2 * PIECES[dtype]() * padded(D, shape_for(self.device))

    def _ordered_bytes(self, D: int, dtype: torch.dtype) -> int:
        """Bytes of a row in the order of labels: its features, and the sum of its gradient."""
        return self._copied_bytes(D, dtype) + 4 * D


@dataclass(frozen=True)
class Positives:
    """Positives known by position: columns [N, P] of the block, −1 pads, or the diagonal's first column."""

    columns: Tensor | None
    diagonal: int | None
    # no column is listed twice, as on a diagonal
    distinct: bool = False

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

    @cached_property
    def epilogue(self) -> Epilogue:
        return epilogue_for(self.loss)

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
            labels=_both(rows.labels, cols.labels) if by_label(rows) and self.order is None else None,
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
        columns = rows.positives
        if columns.shape[1] > 1:
            columns = columns.sort(dim=1).values
            # a column listed twice is one positive
            repeated = F.pad(columns[:, 1:] == columns[:, :-1], (1, 0))
            columns = columns.masked_fill(repeated, -1)
        inside = (columns >= max(0, cols.start)) & (columns < cols.start + M)
        if self.loss.exclude_self:
            inside &= columns != torch.arange(rows.start, rows.start + N, device=columns.device)[:, None]
        return Positives(torch.where(inside, columns - cols.start, -1), None)


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


def _both(rows: Tensor | None, cols: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if rows is None or cols is None else (rows, cols)


def along(x: Tensor, at: slice, axis: int = -1) -> Tensor:
    """x[at] along an axis, without a new view where that is all of x."""
    return x if at.stop - at.start == x.shape[axis] else x.narrow(axis, at.start, at.stop - at.start)


def narrow(side: Shard, at: slice) -> Shard:
    return side if at.stop - at.start == len(side) else side.narrow(at.start, at.stop)


def numbered_groups(rows: Shard, cols: Shard) -> Groups:
    """Ids of both sides numbered from 0 in 32 bits: those of a tile must fit its registers."""
    if rows.ids is None or cols.ids is None:
        return {}, {}
    values, order = torch.cat([rows.ids, cols.ids]).sort()
    first = torch.zeros_like(values, dtype=torch.int32)
    first[1:] = values[1:] != values[:-1]
    numbers = torch.empty_like(first).scatter_(0, order, first.cumsum(0, dtype=torch.int32))
    of_rows, of_cols = numbers.split([len(rows), len(cols)])
    return {"ids": of_rows}, {"ids": of_cols}


def readable_side(side: Shard, groups: dict[str, Tensor]) -> Shard:
    """All but the features as the kernels read it: the last axis dense, which it is not after a transfer."""
    given = {name: getattr(side, name) for name in ("positives", "state", "coefficient", "numbers")}
    dense = {name: x.contiguous() for name, x in given.items() if x is not None and x.numel() and x.stride(-1) != 1}
    changed: dict[str, Any] = dense | groups
    return replace(side, **changed) if changed else side
