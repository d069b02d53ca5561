"""The cut of a block into super-tiles within the workspace: the bytes of each pass, decided without a launch.

Above `block.py`; `backend.py` loops over the super-tiles, and the planner reads the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from contrastile.losses.base import PairLoss, Shard
from contrastile.tiles.triton import plan
from contrastile.tiles.triton.block import by_label, have_ids
from contrastile.tiles.triton.plan import PIECES, Epilogue, padded, shape_for, tiles_of

# dtype of features, and of a strip, whose range is that of exponentials; float32 features would have three strips
EXPONENTIAL_DTYPE = torch.bfloat16
# features from which a pair's product in a symmetric loss takes longer than one read and write of its exponential, by
# the times at 512 and at 768
LEAST_FEATURES = 320
# fewest pairs of which a teacher's are kept: rounding errors of few do not cancel out, 1e-3 of the loss of two rows and
# 6e-7 of that of 2,048
LEAST_DISTILLED = 2**22
# sums of a tile's column where exponentials are kept, see `exponential_tile`
COLUMN_SUMS = 4
# features whose sums by label are in memory at once, at least
SUMMED = 64
# largest label smoothing ε that enters as sums: probabilities near 1/M are rounded to 16 bits before ε/M is subtracted,
# by 1/(1 − ε) times as much as the difference would be; and fewest pairs, whose tiles take longer than sums' launches
MOST_SMOOTHING, LEAST_SMOOTHED = 0.25, 2**26


class Copies(NamedTuple):
    """Bytes that the order of labels, a width that kernels do not read, or excluded pairs add to a super-tile."""

    # of each row and of each column: its features
    each: int = 0
    # of each row, or of each column, of which there are more: the sum of its gradient, one side at a time
    longest: int = 0
    # each pair has a bit
    bits: bool = False


# function from height and width of a super-tile, its copies, and the number of 16-bit pieces of its features, to the
# bytes of a pass over it
Cost = Callable[[int, int, Copies, int], int]


@dataclass(frozen=True)
class Budget:
    """Bytes that each pass over a super-tile takes, and the largest super-tile within the workspace."""

    loss: PairLoss
    device: torch.device
    # bytes
    workspace: int
    # height and width of super-tiles found so far
    _sizes: dict[tuple[int | None, int, int, Copies, int], tuple[int, int]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @cached_property
    def epilogue(self) -> Epilogue:
        return plan.epilogue_for(self.loss)

    def forward_bytes(self, height: int, width: int, copied: Copies, _parts: int) -> int:
        """The tiles' numbers, and what all passes share."""
        sums = self._sums_bytes(height, width, *2 * (self.epilogue.careful_channels,))
        return sums + self._shared_bytes(height, width, copied)

    def backward_bytes(self, height: int, width: int, copied: Copies, parts: int) -> int:
        """The strip, sums of parts, those of a loss computed in the same sweep, and what all passes share."""
        rows, cols = plan.strip_shape(height, width, parts, shape_for(self.device))
        channels = self.epilogue.channels if self.loss.pairwise else 0
        sums = self._sums_bytes(height, width, channels, channels)
        strip = 2 * rows * cols
        return strip + plan.parts_bytes(strip, parts) + sums + self._shared_bytes(height, width, copied)

    def backward_beside_bits(self, held: int) -> Cost:
        """The backward's cost beside the bits that the forward has kept."""

        def cost(height: int, width: int, copied: Copies, parts: int) -> int:
            of_tile = self._bits_bytes(height, width, copied) if held else 0
            return self.backward_bytes(height, width, copied, parts) + held - of_tile

        return cost

    def keeping_bytes(self, height: int, width: int, copied: Copies, parts: int, *, later: bool = False) -> int:
        """The strip of a forward that keeps exponentials, and the tiles' sums: two of each row, or one of each row and
        several of each column; of a teacher's exponentials also those of the student's. later: in the backward, which
        needs those of rows alone, beside a teacher none.
        """
        if self.epilogue.has_teacher:
            sums = 0 if later else self._teacher_bytes(height, width)
        else:
            of_rows, of_cols = (1, COLUMN_SUMS) if self.loss.symmetric else (2, 0)
            sums = self._sums_bytes(height, width, of_rows, 0 if later else of_cols)
        return self.backward_bytes(height, width, copied, parts) + sums

    def can_keep(self, rows: Shard, cols: Shard) -> bool:
        """Return whether exponentials of this kind can be kept."""
        return self._can_keep(rows.features.dtype, self.sums_smoothing(rows, cols))

    def _can_keep(self, dtype: torch.dtype, sums_smoothing: bool) -> bool:
        """The same for features of a dtype: it is that of the exponentials."""
        epilogue = plan.epilogue_for(self.loss, sums_smoothing)
        factorizes = epilogue.factorizes or (epilogue.has_teacher and self.loss.symmetric)
        return factorizes and dtype == EXPONENTIAL_DTYPE

    def sums_smoothing(self, rows: Shard, cols: Shard) -> bool:
        """Return whether label smoothing enters as sums of features: see `smoothing.py`."""
        in_tiles = by_label(rows) and not self.sums_labels(rows, cols)
        sizes = len(rows), len(cols), rows.features.dtype
        ids = have_ids(rows, cols) and rows.diagonal != rows.start
        return not in_tiles and self._can_sum_smoothing(*sizes, ids=ids)

    def _can_sum_smoothing(self, N: int, M: int, dtype: torch.dtype, *, ids: bool) -> bool:
        """Return whether the loss allows it: an excluded pair has no share, and float32 is more precise in tiles.

        ids: pairs of equal ones are excluded, beside other positives than those on the diagonal.
        """
        epilogue, loss = self.epilogue, self.loss
        little = epilogue.smooth and epilogue.label_smoothing <= MOST_SMOOTHING
        every = not (ids or loss.exclude_self or epilogue.hardness or epilogue.formula.guide)
        return little and every and dtype.itemsize == 2 and N * M >= LEAST_SMOOTHED

    def keeps_exponentials(self, rows: Shard, cols: Shard) -> bool:
        """Return whether the exponentials of a whole block, or a teacher's, are kept."""
        saved = rows.guides[0] if self.epilogue.has_teacher else rows.features
        N, M = len(rows), len(cols)
        if not (self.can_keep(rows, cols) and saved.dtype == EXPONENTIAL_DTYPE and self._pays(N, M, saved.shape[1])):
            return False
        sizes = N, M, *self._copies(rows, cols)
        later = self.keeping_bytes(*sizes, later=True)
        weighed = self._weighed_bytes(len(rows), rows.features.shape[1], sizes[2])
        needed = self.keeping_bytes(*sizes) + weighed
        if self.sums_labels(rows, cols) or (have_ids(rows, cols) and self.sums_smoothing(rows, cols)):
            needed = max(needed, later + self._least_sums_bytes(*sizes[:2]))
        return max(needed - self._spare_bytes(rows, cols), later + weighed) <= self.workspace

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
        """The bytes of the largest pass over a block, with features copied or not, by label or not, with ids or not."""
        copies = (Copies(), self._copied(D, dtype), self._ordered(D, dtype))
        every = [copied._replace(bits=bits) for copied, bits in product(copies, (self.epilogue.has_mask, True))]
        return max(self._most_bytes(N, M, copied, dtype) for copied in every)

    def expected_bytes(
        self, N: int, M: int, D: int, dtype: torch.dtype, *, backward_next: bool = False, labels: bool = False,
        ids: bool = False,
    ) -> int:  # fmt: skip
        """The same for features of one kind.

        backward_next: exponentials are kept for it where they fit. Its accumulators, which are not among these bytes,
        are not there yet in the forward. labels: positives are known by label. ids: pairs of equal ones are left out.
        """
        sizes = N, M, self._expected_copied(N, M, D, dtype, labels, ids), PIECES[dtype]()
        # one sweep gives a pairwise loss and its gradients
        most = self._most_bytes(*sizes[:3], dtype, forward=not self.loss.pairwise)
        if backward_next and self.expects_exponentials(N, M, D, dtype, labels=labels, ids=ids):
            later = self.keeping_bytes(*sizes, later=True) + self._weighed_bytes(N, D, sizes[2])
            most = max(most, self.keeping_bytes(*sizes) - 4 * (N + M) * D, later)
        if labels and self._can_sum_labels(N, M, dtype, ids=ids):
            most = max(most, min(16 * max(N, M) * padded(D, shape_for(self.device)), self.workspace))
        return most

    def expects_exponentials(
        self, N: int, M: int, D: int, dtype: torch.dtype, *, labels: bool = False, ids: bool = False
    ) -> bool:
        """Return whether exponentials are kept for a backward that follows at once, as in `keeps_exponentials`."""
        in_tiles = labels and not self._can_sum_labels(N, M, dtype, ids=ids)
        sums_smoothing = not in_tiles and self._can_sum_smoothing(N, M, dtype, ids=ids and labels)
        if not (self._pays(N, M, D) and self._can_keep(dtype, sums_smoothing)):
            return False
        copied = self._expected_copied(N, M, D, dtype, labels, ids)
        return self.keeping_bytes(N, M, copied, PIECES[dtype]()) - self._spare(N, M, D, copied) <= self.workspace

    def _expected_copied(self, N: int, M: int, D: int, dtype: torch.dtype, labels: bool, ids: bool) -> Copies:
        """The copies of a usual call: 16-bit features of a usual width are read as they are."""
        if labels and not self._can_sum_labels(N, M, dtype, ids=ids):
            copied = self._ordered(D, dtype)
        else:
            copied = Copies() if dtype.itemsize == 2 and D % 8 == 0 else self._copied(D, dtype)
        return copied._replace(bits=self.epilogue.has_mask or ids)

    def _most_bytes(self, N: int, M: int, copied: Copies, dtype: torch.dtype, *, forward: bool = True) -> int:
        sizes = copied, PIECES[dtype]()
        # the forward keeps the bits of a block that is one super-tile of it
        whole = self._largest(N, M, *sizes, self.forward_bytes) == (N, M)
        passes = [self.backward_beside_bits(self._bits_bytes(N, M, copied) * whole), *[self.forward_bytes] * forward]
        return max(cost(*self._largest(N, M, *sizes, cost), *sizes) for cost in passes)

    def _spare_bytes(self, rows: Shard, cols: Shard) -> int:
        """Bytes of a forward which keeps exponentials that are free in the backward, for its accumulators."""
        copied, _ = self._copies(rows, cols)
        return self._spare(len(rows), len(cols), rows.features.shape[1], copied)

    def _spare(self, N: int, M: int, D: int, copied: Copies) -> int:
        sums = self._teacher_bytes(N, M) if self.epilogue.has_teacher else 0
        return min(self._bits_bytes(N, M, copied) + sums, 4 * (N + M) * D)

    def _teacher_bytes(self, N: int, M: int) -> int:
        """The tiles' sums in a forward that keeps a teacher's exponentials: see `guided.separate_sums`."""
        return self._sums_bytes(N, M, 2, 1 + COLUMN_SUMS)

    def _weighed_bytes(self, N: int, D: int, copied: Copies) -> int:
        """The rows times their factors, as wide as the operand, beside the exponentials of one direction."""
        return 0 if self.loss.symmetric else 2 * N * (padded(D, shape_for(self.device)) if copied.each else D)

    def _pays(self, N: int, M: int, features: int) -> bool:
        """Return whether kept exponentials are faster, and a teacher's precise enough."""
        many = not self.epilogue.has_teacher or N * M >= LEAST_DISTILLED
        return many and (not self.loss.symmetric or features >= LEAST_FEATURES)

    def _largest(self, N: int, M: int, copied: Copies, parts: int, cost: Cost) -> tuple[int, int]:
        """Rows and columns of a super-tile: the longer side halved, in whole tiles, until it fits the workspace."""
        shape = shape_for(self.device)
        height, width = N, M
        while cost(height, width, copied, parts) > self.workspace and max(height, width) > shape.rows:
            if height >= width:
                height = tiles_of(height, 2 * shape.rows) * shape.rows
            else:
                width = tiles_of(width, 2 * shape.cols) * shape.cols
        return height, width

    def _copies(self, rows: Shard, cols: Shard) -> tuple[Copies, int]:
        """The copies of both sides, and the number of pieces of their features."""
        every = []
        for q, k in zip((rows.features, *rows.guides), (cols.features, *cols.guides), strict=True):
            if by_label(rows) and not self.sums_labels(rows, cols):
                every.append(self._ordered(q.shape[1], q.dtype))
            elif not (plan.is_readable(q) and plan.is_readable(k)):
                every.append(self._copied(q.shape[1], q.dtype))
        bits = self.epilogue.has_mask or have_ids(rows, cols)
        each, longest = sum(copied.each for copied in every), sum(copied.longest for copied in every)
        return Copies(each, longest, bits), PIECES[rows.features.dtype]()

    def _sums_bytes(self, height: int, width: int, of_rows: int, of_cols: int) -> int:
        """Numbers of each row of a tile, and of each column."""
        shape, of_cols = shape_for(self.device), of_cols * self.loss.symmetric
        return 4 * (of_rows * tiles_of(width, shape.cols) * height + of_cols * tiles_of(height, shape.rows) * width)

    def _bits_bytes(self, height: int, width: int, copied: Copies) -> int:
        """Bytes of the bits of excluded pairs."""
        return 4 * prod(plan.bits_shape(height, width, shape_for(self.device))) if copied.bits else 0

    def _shared_bytes(self, height: int, width: int, copied: Copies) -> int:
        """The operands' pieces, the bits of pairs, and a teacher's products of one tile of each program."""
        scratch = 4 * prod(plan.scratch_shape(height, width, self.device)) if self.epilogue.has_teacher else 0
        of_copies = (height + width) * copied.each + max(height, width) * copied.longest
        return self._bits_bytes(height, width, copied) + scratch + of_copies

    def sums_labels(self, rows: Shard, cols: Shard) -> bool:
        """True if positives by label enter as sums of features, in a block of any order: see `label_sums.py`."""
        of_labels = rows.diagonal is None and rows.labels is not None
        sizes = len(rows), len(cols), rows.features.dtype
        return of_labels and self._can_sum_labels(*sizes, ids=have_ids(rows, cols))

    def room_for_sums(self, rows: Shard, cols: Shard, *kept: object) -> int:
        """Bytes of the workspace for sums by label; kept: exponentials that are there too, or None."""
        if all(strip is None for strip in kept):
            return self.workspace
        sizes = len(rows), len(cols), *self._copies(rows, cols)
        return self.workspace - self.keeping_bytes(*sizes, later=True) + self._spare_bytes(rows, cols)

    def _can_sum_labels(self, N: int, M: int, dtype: torch.dtype, *, ids: bool) -> bool:
        """Return whether the loss allows sums by label, and the workspace has room for the fewest.

        In float32 the difference of a probability and its target is more precise than that of their sums. Beside a
        teacher there is no other way.
        """
        prefers = dtype.itemsize == 2 and self._least_sums_bytes(N, M) <= self.workspace
        epilogue = plan.epilogue_for(self.loss, self._can_sum_smoothing(N, M, dtype, ids=ids))
        return epilogue.sums_labels and (prefers or epilogue.has_teacher)

    def _least_sums_bytes(self, N: int, M: int) -> int:
        """Bytes of the fewest features' sums by label, two of each row and column."""
        return 16 * SUMMED * max(N, M)

    def _copied(self, D: int, dtype: torch.dtype) -> Copies:
        return Copies(2 * PIECES[dtype]() * padded(D, shape_for(self.device)))

    def _ordered(self, D: int, dtype: torch.dtype) -> Copies:
        """Features in the order of labels, and sums of gradients."""
        return self._copied(D, dtype)._replace(longest=4 * D)
