"""A block in fused kernels: products, exponentials and sums in one pass over the tiles, nothing of them written out.

Stands beside `eager.py`, for CUDA devices: the same statistics and the same gradients, near the speed of the matrix
products alone. The block is walked over in super-tiles, as large as the workspace allows.

The forward needs 2·N·M·D operations: one pass gives the sums of rows and of columns. The backward computes each
super-tile again, writes its gradient as one 16-bit strip, and lets the vendor's matrix product add the strip times the
features into the float32 accumulators: 6·N·M·D. Listed positives (the diagonal, or indices) never enter the strip;
they are computed and added in float32, by the loss's own formulas. Positives by label are too many for that and stay
inside, in the careful kernels.

float32 features are cut into two or three bf16 pieces, following torch's float32 matmul precision; the same kernels
then compute three or six products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from contrastile._types import Reduction
from contrastile.losses.base import PairLoss, Side
from contrastile.losses.sigmoid import Sigmoid
from contrastile.losses.softmax import Softmax, SoftmaxStats
from contrastile.tiles import triton_conclude as conclude
from contrastile.tiles import triton_launch as launch
from contrastile.tiles import triton_operands as operands
from contrastile.tiles import triton_products as products
from contrastile.tiles.base import Tiles, Turn
from contrastile.tiles.triton_block import Block, SuperTile, by_label
from contrastile.tiles.triton_budget import (
    CHANNELS,
    CHANNELS_CAREFUL,
    CHANNELS_LABELS,
    CHANNELS_SMOOTH,
    PIECES,
    Budget,
)
from contrastile.tiles.triton_device import interpreting, on, shape_for
from contrastile.tiles.triton_kernels import UNIT
from contrastile.tiles.triton_launch import Listed, Merge
from contrastile.tiles.triton_operands import tiles_of
from contrastile.tiles.triton_products import along

# the oldest chip whose matrix units take bf16
LEAST_CAPABILITY = 8, 0
# of a block: its first row and column, and how many of them
Place = tuple[int, int, int, int]


@dataclass(frozen=True)
class Triton(Tiles):
    """Super-tiles of fused kernels."""

    capturable: ClassVar[bool] = True
    takes_turns: ClassVar[bool] = True
    # of each block that this call has seen, by where it lies: found in the forward, they serve the backward
    numbers: dict[Place, Tensor] = field(default_factory=dict, compare=False, repr=False)
    counted: dict[Place, operands.Counted] = field(default_factory=dict, compare=False, repr=False)
    # multiprocessors that are left to others
    spared: int = 0

    @classmethod
    def declines(cls, loss: PairLoss, rows: Side, cols: Side) -> str | None:
        del cols
        features = rows.features
        if type(loss) not in (Softmax, Sigmoid):
            return f"no kernel for {type(loss).__name__}"
        if features.dtype not in PIECES:
            return f"no kernel for {features.dtype}"
        if interpreting():
            return None
        if features.device.type != "cuda" or torch.version.cuda is None:
            return f"the features are on {features.device.type}, not on an NVIDIA device"
        if torch.cuda.get_device_capability(features.device) < LEAST_CAPABILITY:
            return "the device is older than compute capability 8.0"
        return None

    def stats(self, rows: Side, cols: Side) -> tuple[Tensor, Tensor | None]:
        symmetric = self.loss.symmetric
        if not len(rows) or not len(cols):
            return self.init(rows), self.init(cols) if symmetric else None
        # the first merge fills all rows of them
        row_stats, col_stats = self._room(rows), self._room(cols) if symmetric else None
        with on(self.scale.device):
            block = self._block(rows, cols)
            labels = by_label(rows)
            if self._sigmoid or not labels:
                self._sums(block, row_stats, col_stats)
            if not self._sigmoid:
                self._maxima(block, row_stats, col_stats, labels=labels)
            self._listed_stats(block, row_stats, col_stats)
        return row_stats, col_stats

    def grads(self, rows: Side, cols: Side, u: Tensor | None, v: Tensor | Turn | None) -> Tensor:
        if not len(rows) or not len(cols):
            return self.no_pairs()
        with on(self.scale.device):
            return self._grads(self._block(rows, cols), u, v, None)

    def stats_and_grads(
        self, rows: Side, cols: Side, u: Tensor | None, v: Tensor | Turn | None
    ) -> tuple[Tensor, Tensor]:
        if not len(rows) or not len(cols):
            return self.init(rows), self.no_pairs()
        row_stats = self._room(rows)
        with on(self.scale.device):
            block = self._block(rows, cols)
            total = self._grads(block, u, v, row_stats)
            self._listed_stats(block, row_stats, None)
        return row_stats, total

    def merge(self, stats: Tensor, parts: Tensor) -> None:
        with on(self.scale.device):
            launch.merge_parts(stats, parts, sigmoid=self._sigmoid)

    def ended(
        self,
        stats: Sequence[Tensor],
        weights: Tensor | None,
        reduction: Reduction,
        total: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, list[Tensor], list[Tensor]] | None:
        blocks = list(self.numbers.values())
        if self._sigmoid or reduction == "none" or not blocks:
            return None
        weights = None if weights is None else weights.to(torch.float32).contiguous()
        # statistics that have been cut out of others are not laid out as the kernels read them
        stats = [side.contiguous() for side in stats]
        with on(self.scale.device):
            mean, smoothing = reduction == "mean", self._smoothing
            # the first block has this rank's own columns: between them, the ranks look at all features
            return conclude.ended(stats, weights, blocks[0], total, mean=mean, smoothing=smoothing)

    def scaled(self, x: Tensor, total: Tensor, times: Tensor | None, *, keep: bool) -> Tensor:
        out = total if x.dtype == total.dtype and not keep else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if total.numel():
            with on(self.scale.device):
                conclude.scaled(total, self.scale, times, out)
        return out

    def workspace_bytes(self, N: int, M: int, D: int, dtype: torch.dtype) -> int:
        return self._budget.most(N, M, D, dtype)

    def sparing(self, multiprocessors: int) -> Triton:
        """The same, which leaves so many of the device's multiprocessors to others.

        Each program of the large kernels has its share of the tiles from the start. One that finds its place taken
        begins when the others may be done already.
        """
        return replace(self, spared=multiprocessors)

    def _room(self, side: Side) -> Tensor:
        return self.scale.new_empty(1 if self._sigmoid else len(SoftmaxStats._fields), len(side))

    @property
    def weighs(self) -> bool:
        # a sigmoid's sum does not cancel, and its kernel has no registers left
        return not self._sigmoid

    @property
    def _budget(self) -> Budget:
        return Budget(self.loss, self.scale.device, self.workspace)

    @property
    def _sigmoid(self) -> bool:
        return isinstance(self.loss, Sigmoid)

    @property
    def _smoothing(self) -> float:
        return self.loss.label_smoothing if isinstance(self.loss, Softmax) else 0.0

    def _block(self, rows: Side, cols: Side) -> Block:
        place = rows.start, len(rows), cols.start, len(cols)
        if place not in self.numbers:
            self.numbers[place] = launch.numbers(
                rows.features, cols.features, self.scale, self.bias, sigmoid=self._sigmoid,
                # positives by label need maxima of their own
                careful=by_label(rows) and not self._sigmoid,
            )  # fmt: skip
            self.counted[place] = operands.counted(rows, cols)
        of_rows, of_cols = self.counted[place]
        sides = operands.laid_out(rows, of_rows), operands.laid_out(cols, of_cols)
        return Block(*sides, self.numbers[place], self._budget, self.spared)

    # the forward

    def _sums(self, block: Block, row_stats: Tensor, col_stats: Tensor | None) -> None:
        """Statistics of the pairs that are not listed, by one exponential per pair."""
        smooth = bool(self._smoothing)
        for tile in block.super_tiles(self._budget.forward):
            row_part, col_part = self._partial(tile, CHANNELS_SMOOTH if smooth else CHANNELS)
            launch.totals(tile.pair, block.numbers, row_part, col_part, smooth=smooth, sigmoid=self._sigmoid)
            merges = _merges(tile, row_part, col_part, row_stats, col_stats)
            launch.merge_sums(*merges, block.numbers, sigmoid=self._sigmoid)

    def _maxima(self, block: Block, row_stats: Tensor, col_stats: Tensor | None, *, labels: bool) -> None:
        """The same the careful way, on the device's own decision, and with positives by label."""
        for tile in block.super_tiles(self._budget.labels if labels else self._budget.forward):
            row_part, col_part = self._partial(tile, CHANNELS_LABELS if labels else CHANNELS_CAREFUL)
            launch.maxima(tile.pair, block.numbers, row_part, col_part, smooth=bool(self._smoothing))
            merges = _merges(tile, row_part, col_part, row_stats, col_stats)
            launch.merge_maxima(*merges, block.numbers, labels=labels)

    def _partial(self, tile: SuperTile, channels: int) -> tuple[Tensor, Tensor | None]:
        """Room for the tiles' numbers: [channels, col tiles, height] and [channels, row tiles, width]."""
        shape = shape_for(self.scale.device)
        height, width = len(tile.rows), len(tile.cols)
        row_part = self.scale.new_empty(channels, tiles_of(width, shape.cols), height)
        if not self.loss.symmetric:
            return row_part, None
        return row_part, self.scale.new_empty(channels, tiles_of(height, shape.rows), width)

    def _listed_stats(self, block: Block, row_stats: Tensor, col_stats: Tensor | None) -> None:
        """Puts what the listed positives say beside it."""
        pairs = block.listed()
        if pairs is not None:
            launch.listed_totals(
                block.rows.features, block.cols.features, pairs, block.numbers, row_stats, col_stats,
                smooth=bool(self._smoothing), sigmoid=self._sigmoid,
            )  # fmt: skip

    # the backward

    def _grads(self, block: Block, u: Tensor | None, v: Tensor | Turn | None, row_stats: Tensor | None) -> Tensor:
        """Adds all pairs' gradient to u and v, and where asked their loss to the statistics.

        Returns Σ_ij g_ij of a sigmoid. Of a softmax, whose sum is 0, Σ_ij g_ij · ⟨q_i, k_j⟩ behind it, taken from the
        tiles as they are computed: the accumulators have lost what 16 bits and the matrix units cut off, and what
        pulls and what pushes often cancel to a few percent.
        """
        pairs = block.listed()
        if block.rows.features.dtype == torch.float16:
            total = self._in_units(block, u, None if v is None else _here(v), row_stats)
        else:
            total = self._strips(block, u, v, row_stats, more=pairs is not None)
        if pairs is not None:
            g_NP, inner_NP = self._listed_grads(block, pairs, u, None if v is None else _here(v))
            total = total + (inner_NP if self.weighs else g_NP).sum(dtype=torch.float64)
        if not self.weighs:
            return total.to(self.scale.dtype)
        found = self.no_pairs()
        found[1].copy_(total)
        return found

    def _in_units(self, block: Block, u: Tensor | None, v: Tensor | None, row_stats: Tensor | None) -> Tensor:
        """`_strips` of fp16, whose range is small: all that is added up meanwhile is in units of the block's own."""
        unit = products.unit([coefficient for _, coefficient in self._states(block.rows, block.cols)])
        block.numbers[int(UNIT.value)] = unit
        products.multiply((u, v), unit)
        total = self._strips(block, u, v, row_stats, more=True)
        products.multiply((u, v, total), 1 / unit)
        return total

    def _strips(
        self, block: Block, u: Tensor | None, v: Tensor | Turn | None, row_stats: Tensor | None, *, more: bool
    ) -> Tensor:
        """The gradient of the pairs that are not listed, one strip of the matrix at a time; returns its sum.

        A v that may leave early is added to first; any other last, because it may still be on its way, and because the
        columns must stay until they have been read. It leaves then, unless there is more to add.
        """
        sums = launch.no_sums(self.scale.device)
        out: Tensor | None = None
        vectors, cut = self._vectors(block), launch.cut(block.rows.features) if self.weighs else 0.0
        early = isinstance(v, Turn) and v.early
        for tile in block.super_tiles(self._budget.backward):
            if out is None:
                out = operands.strip(tile.pair.q, tile.pair.k)
            self._fill(block, tile, vectors, out, sums, row_stats)
            if not early:
                products.add_rows(u, tile.along_i, tile.pair, out)
            if v is not None:
                products.add_cols(_here(v), tile.along_j, tile.pair, out)
            if tile.last_i and tile.last_j:
                if isinstance(v, Turn) and not more:
                    v.leave()
                # small things, under which what leaves finds room on the device before the next large one takes it all
                total = sums.sum(dtype=torch.float64) * (1 + cut)
            if early:
                products.add_rows(u, tile.along_i, tile.pair, out)
        return total

    def _vectors(self, block: Block) -> list[tuple[Tensor, Tensor]]:
        """What the kernel multiplies a pair's exponential with, and subtracts, for each direction."""
        if self._sigmoid:
            _, coefficient = _state(block.rows)
            weight = coefficient * block.numbers[int(UNIT.value)]
            return [(weight, weight)]
        return launch.prepare(self._states(block.rows, block.cols), block.numbers, self._smoothing)

    def _fill(
        self,
        block: Block,
        tile: SuperTile,
        vectors: list[tuple[Tensor, Tensor]],
        out: Tensor,
        sums: Tensor,
        row_stats: Tensor | None,
    ) -> None:
        """Writes the super-tile's gradient into `out`, and adds to its sums."""
        places = (tile.along_i, tile.along_j)
        cut = [(along(a, at), along(c, at)) for (a, c), at in zip(vectors, places, strict=False)]
        common = (tile.pair, block.numbers)
        if self._sigmoid:
            row_part = None if row_stats is None else self._partial(tile, CHANNELS)[0]
            launch.gradient(*common, cut, out, sums, smooth=False, sigmoid=True, row_part=row_part)
            if row_part is not None and row_stats is not None:
                merges = _merges(tile, row_part, None, row_stats, None)
                launch.merge_sums(*merges, block.numbers, sigmoid=True)
            return
        if not by_label(block.rows):
            launch.gradient(*common, cut, out, sums, smooth=bool(self._smoothing), sigmoid=False, row_part=None)
        launch.careful_gradient(*common, self._states(tile.rows, tile.cols), out, sums, smoothing=self._smoothing)

    def _listed_grads(self, block: Block, pairs: Listed, u: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds the listed positives' gradient in float32; returns that of each pair, and times its product."""
        q, k = block.rows.features, block.cols.features
        g_NP, inner_NP = launch.listed_gradient(
            q, k, pairs, block.numbers, self._states(block.rows, block.cols), u, v,
            smoothing=self._smoothing, sigmoid=self._sigmoid,
        )  # fmt: skip
        if v is not None and pairs.columns is not None:
            # the pairs of a column one after the other: the same order, and bits, every run
            columns, order = torch.where(pairs.columns < 0, len(v), pairs.columns).flatten().sort(stable=True)
            starts = torch.searchsorted(columns, torch.arange(len(v) + 1, device=v.device))
            launch.add_pairs(v, q, starts, order // pairs.per_row, g_NP.flatten()[order])
        return g_NP, inner_NP

    def _states(self, rows: Side, cols: Side) -> list[tuple[Tensor, Tensor]]:
        """State and coefficient of each direction."""
        return [_state(side) for side in ((rows, cols) if self.loss.symmetric else (rows,))]


def _state(side: Side) -> tuple[Tensor, Tensor]:
    assert side.state is not None
    assert side.coefficient is not None
    return side.state, side.coefficient


def _merges(
    tile: SuperTile, row_part: Tensor, col_part: Tensor | None, row_stats: Tensor, col_stats: Tensor | None
) -> tuple[Merge, Merge | None]:
    i, j = tile.along_i, tile.along_j
    rows = Merge(row_part, along(row_stats, i), first=j.start == 0, last=tile.last_j)
    if col_part is None or col_stats is None:
        return rows, None
    return rows, Merge(col_part, along(col_stats, j), first=i.start == 0, last=tile.last_i)


def _here(v: Tensor | Turn) -> Tensor:
    return v.here() if isinstance(v, Turn) else v
