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

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from contrastile.losses.base import PairLoss, Side
from contrastile.losses.sigmoid import Sigmoid
from contrastile.losses.softmax import Softmax
from contrastile.tiles import triton_launch as launch
from contrastile.tiles import triton_operands as operands
from contrastile.tiles.base import Tiles
from contrastile.tiles.triton_device import interpreting, on, shape_for
from contrastile.tiles.triton_launch import Listed, Merge
from contrastile.tiles.triton_operands import Masks, Operand, tiles_of

# the oldest chip whose matrix units take bf16
LEAST_CAPABILITY = 8, 0
# 16-bit pieces of a float32 number, by the precision of torch's float32 products
PIECES_FLOAT32 = {"bf16": 1, "tf32": 2, "ieee": 3, "none": 3}
# the same of each type that has kernels
PIECES: dict[torch.dtype, Callable[[], int]] = {
    torch.bfloat16: lambda: 1,
    torch.float16: lambda: 1,
    torch.float32: lambda: PIECES_FLOAT32[torch.backends.cuda.matmul.fp32_precision],
}
# a strip in fp16 holds gradients up to 2 to this power
UNIT_POWER = 14
# numbers per tile and row: the sum; with smoothing; top and total; all statistics, with positives by label
CHANNELS, CHANNELS_SMOOTH, CHANNELS_CAREFUL, CHANNELS_LABELS = 1, 3, 2, 8
# bytes of a super-tile of height × width of D features in a dtype
Cost = Callable[[int, int, int, torch.dtype], int]


@dataclass(frozen=True)
class SuperTile:
    """A piece of the block: where it lies, its sides, their operands, and what leaves its sums."""

    along_i: slice
    along_j: slice
    rows: Side
    cols: Side
    q: Operand
    k: Operand
    masks: Masks
    # no super-tile below it, or to its right, is left
    last_i: bool
    last_j: bool


@dataclass(frozen=True)
class Block:
    """What a call needs to know of the whole block."""

    rows: Side
    cols: Side
    # see triton_launch.softmax_numbers
    numbers: Tensor
    # 1 where the careful kernels must run
    flag: Tensor


@dataclass(frozen=True)
class Triton(Tiles):
    """Super-tiles of fused kernels."""

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
        row_stats = self.init(rows)
        col_stats = self.init(cols) if self.loss.symmetric else None
        if not len(rows) or not len(cols):
            return row_stats, col_stats
        with on(self.scale.device):
            block = self._block(rows, cols)
            labels = _by_label(rows)
            if self._sigmoid or not labels:
                self._sums(block, row_stats, col_stats)
            if not self._sigmoid:
                self._maxima(block, row_stats, col_stats, labels=labels)
            self._listed_stats(block, row_stats, col_stats)
        return row_stats, col_stats

    def grads(self, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None) -> Tensor:
        if not len(rows) or not len(cols):
            return torch.zeros_like(self.scale)
        with on(self.scale.device):
            return self._grads(self._block(rows, cols), u, v, None)

    def stats_and_grads(self, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor]:
        """Both in one sweep of 6·N·M·D operations, for a loss whose pair gradients wait for no statistic: a sigmoid.

        `rows` carry their coefficients already. Returns the statistics of the rows, and Σ_ij g_ij.
        """
        row_stats = self.init(rows)
        if not len(rows) or not len(cols):
            return row_stats, torch.zeros_like(self.scale)
        with on(self.scale.device):
            block = self._block(rows, cols)
            total = self._grads(block, u, v, row_stats)
            self._listed_stats(block, row_stats, None)
        return row_stats, total

    def workspace_bytes(self, N: int, M: int, D: int, dtype: torch.dtype) -> int:
        costs = (self._forward_bytes, self._label_bytes, self._backward_bytes)
        # whether the features will have to be copied depends on their strides
        cuts = ((cost, copied, self._cut(N, M, copied, dtype, cost)) for cost in costs for copied in (0, D))
        return max(cost(*cut, copied, dtype) for cost, copied, cut in cuts)

    @property
    def _sigmoid(self) -> bool:
        return isinstance(self.loss, Sigmoid)

    @property
    def _smoothing(self) -> float:
        return self.loss.label_smoothing if isinstance(self.loss, Softmax) else 0.0

    def _block(self, rows: Side, cols: Side) -> Block:
        if self._sigmoid:
            numbers = launch.sigmoid_numbers(self.scale, self.bias)
        else:
            numbers = launch.softmax_numbers(rows.features, cols.features, self.scale)
        # positives by label need maxima of their own
        careful = _by_label(rows) and not self._sigmoid
        flag = torch.full_like(numbers[:1], careful, dtype=torch.int32)
        return Block(_laid_out(rows), _laid_out(cols), numbers, flag)

    def _super_tiles(self, block: Block, cost: Cost) -> Iterator[SuperTile]:
        features = block.rows.features
        shape = shape_for(features.device)
        parts = PIECES[features.dtype]()
        N, M = len(block.rows), len(block.cols)
        direct = all(operands.readable(side.features) for side in (block.rows, block.cols))
        height, width = self._cut(N, M, 0 if direct else features.shape[1], features.dtype, cost)
        for i in range(0, N, height):
            along_i = slice(i, min(i + height, N))
            rows = block.rows.narrow(along_i.start, along_i.stop)
            q = operands.operand(rows.features, parts, shape)
            for j in range(0, M, width):
                along_j = slice(j, min(j + width, M))
                cols = block.cols.narrow(along_j.start, along_j.stop)
                k = operands.operand(cols.features, parts, shape)
                masks = self._masks(rows, cols)
                yield SuperTile(along_i, along_j, rows, cols, q, k, masks, along_i.stop == N, along_j.stop == M)

    def _masks(self, rows: Side, cols: Side) -> Masks:
        listed = not _by_label(rows)
        return Masks(
            diagonal=None if rows.diagonal is None else rows.diagonal - cols.start,
            itself=rows.start - cols.start if self.loss.exclude_self else None,
            places=rows.positives if rows.diagonal is None else None,
            places_start=cols.start,
            ids=_groups(rows.ids, cols.ids),
            labels=None if listed else _groups(rows.labels, cols.labels),
        )

    # the forward

    def _sums(self, block: Block, row_stats: Tensor, col_stats: Tensor | None) -> None:
        """Statistics of the pairs that are not listed, by one exponential per pair."""
        smooth = bool(self._smoothing)
        for tile in self._super_tiles(block, self._forward_bytes):
            row_part, col_part = self._partial(tile, CHANNELS_SMOOTH if smooth else CHANNELS)
            launch.totals(
                tile.q, tile.k, tile.masks, block.numbers, row_part, col_part, smooth=smooth, sigmoid=self._sigmoid
            )
            merges = _merges(tile, row_part, col_part, row_stats, col_stats)
            launch.merge_sums(*merges, block.numbers, block.flag, sigmoid=self._sigmoid)

    def _maxima(self, block: Block, row_stats: Tensor, col_stats: Tensor | None, *, labels: bool) -> None:
        """The same the careful way, on the device's own decision, and with positives by label."""
        for tile in self._super_tiles(block, self._label_bytes if labels else self._forward_bytes):
            row_part, col_part = self._partial(tile, CHANNELS_LABELS if labels else CHANNELS_CAREFUL)
            launch.maxima(tile.q, tile.k, tile.masks, block.numbers, block.flag, row_part, col_part)
            merges = _merges(tile, row_part, col_part, row_stats, col_stats)
            launch.merge_maxima(*merges, block.flag, labels=labels)

    def _partial(self, tile: SuperTile, channels: int) -> tuple[Tensor, Tensor | None]:
        """Room for the tiles' numbers: [channels, col tiles, height] and [channels, row tiles, width]."""
        shape = shape_for(self.scale.device)
        height, width = len(tile.q), len(tile.k)
        row_part = self.scale.new_empty(channels, tiles_of(width, shape.cols), height)
        if not self.loss.symmetric:
            return row_part, None
        return row_part, self.scale.new_empty(channels, tiles_of(height, shape.rows), width)

    def _listed_stats(self, block: Block, row_stats: Tensor, col_stats: Tensor | None) -> None:
        """Puts what the listed positives say beside it."""
        pairs = self._listed(block)
        if pairs is not None:
            launch.listed_totals(
                block.rows.features, block.cols.features, pairs, block.numbers, row_stats, col_stats,
                smooth=bool(self._smoothing), sigmoid=self._sigmoid,
            )  # fmt: skip

    # the backward

    def _grads(self, block: Block, u: Tensor | None, v: Tensor | None, row_stats: Tensor | None) -> Tensor:
        """Adds all pairs' gradient to u and v, and where asked their loss to the statistics."""
        unit = None
        if block.rows.features.dtype == torch.float16:
            unit = _unit([coefficient for _, coefficient in self._states(block.rows, block.cols)])
            block.numbers[2] = unit
            _multiply((u, v), unit)
        total = self._strips(block, u, v, row_stats)
        if unit is not None:
            _multiply((u, v, total), 1 / unit)
        pairs = self._listed(block)
        return total if pairs is None else total + self._listed_grads(block, pairs, u, v)

    def _strips(self, block: Block, u: Tensor | None, v: Tensor | None, row_stats: Tensor | None) -> Tensor:
        """The gradient of the pairs that are not listed, one strip of the matrix at a time."""
        total = torch.zeros_like(self.scale)
        if u is None and v is None and not self._sigmoid:
            return total
        out: Tensor | None = None
        vectors = self._vectors(block)
        for tile in self._super_tiles(block, self._backward_bytes):
            if out is None:
                out = operands.strip(tile.q, tile.k)
            total += self._fill(block, tile, vectors, out, row_stats)
            g = operands.pieces(out, tile.q, tile.k)
            D = tile.rows.features.shape[1]
            for of_g, of_x in operands.products(tile.q.parts):
                if u is not None:
                    _add_product(u[tile.along_i], g[of_g], tile.k.piece(of_x, D))
                if v is not None:
                    _add_product(v[tile.along_j], g[of_g].T, tile.q.piece(of_x, D))
        return total

    def _vectors(self, block: Block) -> list[tuple[Tensor, Tensor]]:
        """What the kernel multiplies a pair's exponential with, and subtracts, for each direction."""
        if self._sigmoid:
            _, coefficient = _state(block.rows)
            weight = coefficient * block.numbers[2]
            return [(weight, weight)]
        return [
            launch.prepare(state, coefficient, block.numbers, block.flag, self._smoothing)
            for state, coefficient in self._states(block.rows, block.cols)
        ]

    def _fill(
        self,
        block: Block,
        tile: SuperTile,
        vectors: list[tuple[Tensor, Tensor]],
        out: Tensor,
        row_stats: Tensor | None,
    ) -> Tensor:
        """Writes the super-tile's gradient into `out`; returns its sum where the loss asks for it."""
        along = (tile.along_i, tile.along_j)
        cut = [(weight[at], spread[at]) for (weight, spread), at in zip(vectors, along, strict=False)]
        common = (tile.q, tile.k, tile.masks, block.numbers, block.flag)
        if self._sigmoid:
            sums, _ = self._partial(tile, CHANNELS)
            row_part = None if row_stats is None else self._partial(tile, CHANNELS)[0]
            launch.gradient(*common, cut, out, smooth=False, sums=sums, row_part=row_part)
            if row_part is not None and row_stats is not None:
                merges = _merges(tile, row_part, None, row_stats, None)
                launch.merge_sums(*merges, block.numbers, block.flag, sigmoid=True)
            return sums.sum()
        if not _by_label(block.rows):
            launch.gradient(*common, cut, out, smooth=bool(self._smoothing), sums=None, row_part=None)
        launch.careful_gradient(*common, self._states(tile.rows, tile.cols), out, smoothing=self._smoothing)
        return torch.zeros_like(self.scale)

    def _listed_grads(self, block: Block, pairs: Listed, u: Tensor | None, v: Tensor | None) -> Tensor:
        """Adds the listed positives' gradient in float32; returns its sum where the loss asks for it."""
        q, k = block.rows.features, block.cols.features
        g_NP = launch.listed_gradient(
            q, k, pairs, block.numbers, self._states(block.rows, block.cols), u, v,
            smoothing=self._smoothing, sigmoid=self._sigmoid,
        )  # fmt: skip
        if v is not None and pairs.columns is not None:
            # the pairs of a column one after the other: the same order, and bits, every run
            columns, order = torch.where(pairs.columns < 0, len(v), pairs.columns).flatten().sort(stable=True)
            starts = torch.searchsorted(columns, torch.arange(len(v) + 1, device=v.device))
            launch.add_pairs(v, q, starts, order // pairs.per_row, g_NP.flatten()[order])
        return g_NP.sum() if self._sigmoid else torch.zeros_like(self.scale)

    def _states(self, rows: Side, cols: Side) -> list[tuple[Tensor, Tensor]]:
        """State and coefficient of each direction."""
        return [_state(side) for side in ((rows, cols) if self.loss.symmetric else (rows,))]

    def _listed(self, block: Block) -> Listed | None:
        """The positives known by their position; None where there are none."""
        rows, cols = block.rows, block.cols
        N, M = len(rows), len(cols)
        itself = rows.start - cols.start if self.loss.exclude_self else None
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

    # super-tiles

    def _forward_bytes(self, height: int, width: int, D: int, dtype: torch.dtype) -> int:
        """The tiles' numbers, and the operands' pieces."""
        return self._partial_bytes(height, width, CHANNELS_SMOOTH) + self._operand_bytes(height, width, D, dtype)

    def _label_bytes(self, height: int, width: int, D: int, dtype: torch.dtype) -> int:
        """The same for positives by label."""
        return self._partial_bytes(height, width, CHANNELS_LABELS) + self._operand_bytes(height, width, D, dtype)

    def _partial_bytes(self, height: int, width: int, channels: int) -> int:
        shape = shape_for(self.scale.device)
        numbers = tiles_of(width, shape.cols) * height + self.loss.symmetric * tiles_of(height, shape.rows) * width
        return 4 * channels * numbers

    def _backward_bytes(self, height: int, width: int, D: int, dtype: torch.dtype) -> int:
        """The strip, and the operands' pieces."""
        strip = operands.strip_bytes(height, width, PIECES[dtype](), self.scale.device)
        # a sigmoid's sums of the gradient, and of the loss
        sums = self._partial_bytes(height, width, 2 * CHANNELS) if self._sigmoid else 0
        return strip + sums + self._operand_bytes(height, width, D, dtype)

    def _operand_bytes(self, height: int, width: int, D: int, dtype: torch.dtype) -> int:
        """Copies of the features; none where D is 0."""
        return operands.operand_bytes(height + width, D, PIECES[dtype](), self.scale.device)

    def _cut(self, N: int, M: int, D: int, dtype: torch.dtype, cost: Cost) -> tuple[int, int]:
        """Rows and columns of a super-tile: the longer side halved until it fits the workspace."""
        shape = shape_for(self.scale.device)
        height, width = N, M
        while cost(height, width, D, dtype) > self.workspace and max(height, width) > shape.rows:
            if height >= width:
                height = _halved(height, shape.rows)
            else:
                width = _halved(width, shape.cols)
        return height, width


def _by_label(rows: Side) -> bool:
    return rows.diagonal is None and rows.positives is None and rows.labels is not None


def _groups(rows: Tensor | None, cols: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if rows is None or cols is None else (rows, cols)


def _laid_out(side: Side) -> Side:
    """All but the features as the kernels read it: the last axis dense. A shard that has travelled is not."""
    travelled = ("positives", "labels", "ids", "state", "coefficient")
    given = {name: getattr(side, name) for name in travelled}
    return replace(side, **{name: x.contiguous() for name, x in given.items() if x is not None})


def _state(side: Side) -> tuple[Tensor, Tensor]:
    assert side.state is not None
    assert side.coefficient is not None
    return side.state, side.coefficient


def _merges(
    tile: SuperTile, row_part: Tensor, col_part: Tensor | None, row_stats: Tensor, col_stats: Tensor | None
) -> tuple[Merge, Merge | None]:
    i, j = tile.along_i, tile.along_j
    rows = Merge(row_part, row_stats[:, i], first=j.start == 0, last=tile.last_j)
    if col_part is None or col_stats is None:
        return rows, None
    return rows, Merge(col_part, col_stats[:, j], first=i.start == 0, last=tile.last_i)


def _unit(coefficients: list[Tensor]) -> Tensor:
    """The power of two that brings the largest gradient of a pair just under fp16's range, chosen on the device."""
    most = torch.stack([coefficient.abs().amax() for coefficient in coefficients]).sum()
    power = UNIT_POWER - torch.log2(most).ceil()
    return torch.where(most == 0, 1.0, torch.exp2(power))


def _multiply(totals: Iterable[Tensor | None], factor: Tensor) -> None:
    for total in totals:
        if total is not None:
            total.mul_(factor)


def _add_product(total: Tensor, g: Tensor, x: Tensor) -> None:
    """total += g @ x in float32, from 16-bit operands."""
    if total.is_cuda:
        torch.addmm(total, g, x, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(g.float(), x.float())


def _halved(n: int, step: int) -> int:
    """Half of n, in whole steps."""
    return -(-n // (2 * step)) * step
