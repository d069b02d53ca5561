"""A block as the fused kernels see it: cut into super-tiles, and its listed positives apart.

Stands between `triton.py`, which walks over the super-tiles, and `triton_operands.py`, which lays each of them out for
the kernels. How large one may be is `triton_budget.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from contrastile.losses.base import Side
from contrastile.tiles import triton_operands as operands
from contrastile.tiles.triton_budget import PIECES, Budget, Cost
from contrastile.tiles.triton_device import shape_for
from contrastile.tiles.triton_launch import Listed
from contrastile.tiles.triton_operands import Masks, Pair


@dataclass(frozen=True)
class SuperTile:
    """A piece of the block: where it lies, its sides, their operands, and what leaves its sums."""

    along_i: slice
    along_j: slice
    rows: Side
    cols: Side
    pair: Pair
    # no super-tile below it, or to its right, is left
    last_i: bool
    last_j: bool


@dataclass(frozen=True)
class Block:
    """Rows and columns as the kernels read them, and how they are cut."""

    rows: Side
    cols: Side
    # see triton_kernels.py
    numbers: Tensor
    budget: Budget
    # multiprocessors that are left to others
    spared: int
    # the super-tile of the last pass: often there is only one
    last: list[SuperTile] = field(default_factory=list, compare=False, repr=False)

    def super_tiles(self, cost: Cost) -> Iterator[SuperTile]:
        """Row by row, as large as the workspace allows where each takes what `cost` says."""
        features = self.rows.features
        N, M = len(self.rows), len(self.cols)
        direct = all(operands.readable(side.features) for side in (self.rows, self.cols))
        height, width = self.budget.cut(N, M, 0 if direct else features.shape[1], features.dtype, cost)
        for i in range(0, N, height):
            for j in range(0, M, width):
                yield self._super_tile(slice(i, min(i + height, N)), slice(j, min(j + width, M)))

    def _super_tile(self, along_i: slice, along_j: slice) -> SuperTile:
        last = self.last.pop() if self.last else None
        beside = last if last is not None and last.along_i == along_i else None
        if beside is None or beside.along_j != along_j:
            parts, shape = PIECES[self.rows.features.dtype](), shape_for(self.budget.device)
            rows = _narrow(self.rows, along_i) if beside is None else beside.rows
            cols = _narrow(self.cols, along_j)
            q = operands.operand(rows.features, parts, shape) if beside is None else beside.pair.q
            pair = Pair(q, operands.operand(cols.features, parts, shape), self._masks(rows, cols), self.spared)
            ends = along_i.stop == len(self.rows), along_j.stop == len(self.cols)
            beside = SuperTile(along_i, along_j, rows, cols, pair, *ends)
        self.last.append(beside)
        return beside

    def _masks(self, rows: Side, cols: Side) -> Masks:
        listed = not by_label(rows)
        return Masks(
            diagonal=None if rows.diagonal is None else rows.diagonal - cols.start,
            itself=rows.start - cols.start if self.budget.loss.exclude_self else None,
            places=rows.positives if rows.diagonal is None else None,
            places_start=cols.start,
            ids=operands.groups(rows.ids, cols.ids),
            labels=None if listed else operands.groups(rows.labels, cols.labels),
        )

    def listed(self) -> Listed | None:
        """The positives known by their position; None where there are none."""
        rows, cols = self.rows, self.cols
        N, M = len(rows), len(cols)
        itself = rows.start - cols.start if self.budget.loss.exclude_self else None
        if rows.diagonal is not None:
            diagonal = rows.diagonal - cols.start
            return Listed(None, diagonal, itself, N) if -N < diagonal < M else None
        if rows.positives is None or not rows.positives.shape[1]:
            return None
        columns = rows.positives.sort(dim=1).values
        # a column listed twice is one positive
        again = torch.zeros_like(columns, dtype=torch.bool)
        again[:, 1:] = columns[:, 1:] == columns[:, :-1]
        there = ~again & (columns >= max(0, cols.start)) & (columns < cols.start + M)
        if itself is not None:
            there &= columns != torch.arange(rows.start, rows.start + N, device=columns.device)[:, None]
        return Listed(torch.where(there, columns - cols.start, -1), None, itself, N)


def by_label(rows: Side) -> bool:
    """Whether positives are known by their label, which are too many to be listed."""
    return rows.diagonal is None and rows.positives is None and rows.labels is not None


def _narrow(side: Side, at: slice) -> Side:
    return side if at.stop - at.start == len(side) else side.narrow(at.start, at.stop)
