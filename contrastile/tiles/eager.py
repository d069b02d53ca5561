"""A block in plain PyTorch: two nested loops over tiles, on any device, in any dtype.

The reference that everything faster is compared with, and the way that works where nothing faster does. One sweep
gives the statistics of rows and columns (2·N·M·D operations); the backward computes each tile again and multiplies
its gradient with both sides (6·N·M·D): 8·b²·d together, and never more than one tile of the matrix in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from contrastile._types import accumulator
from contrastile.losses.base import PairLoss, Side, Tile, fill, mark
from contrastile.tiles.base import Tiles

# tiles of this size stay in a core's cache; on an accelerator they fill it
SIDE_CPU = 1024
SIDE_ACCELERATOR = 8192
# a tile, its exponentials, its gradient, one temporary, and the masks
TILES_HELD = 5


@dataclass(frozen=True)
class Eager(Tiles):
    """Tiles of plain PyTorch operations."""

    @classmethod
    def declines(cls, loss: PairLoss, rows: Side, cols: Side) -> str | None:
        del loss, rows, cols
        return None

    def stats(self, rows: Side, cols: Side) -> tuple[Tensor, Tensor | None]:
        row_stats = self.init(rows)
        col_stats = self.init(cols) if self.loss.symmetric else None
        room = self._room(rows, cols)
        for along_i, row_tile in self._tiles(rows):
            for along_j, col_tile in self._tiles(cols):
                met = self.loss.absorb(self._tile(row_tile, col_tile, room))
                row_stats[:, along_i] = self.loss.merge(row_stats[:, along_i], met[0])
                if col_stats is not None:
                    col_stats[:, along_j] = self.loss.merge(col_stats[:, along_j], met[1])
        return row_stats, col_stats

    def grads(self, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None) -> Tensor:
        total = torch.zeros_like(self.scale)
        room = self._room(rows, cols)
        for along_i, row_tile in self._tiles(rows):
            for along_j, col_tile in self._tiles(cols):
                pieces = (None if u is None else u[along_i], None if v is None else v[along_j])
                total += self._add_grads(self._tile(row_tile, col_tile, room), row_tile, col_tile, *pieces)
        return total

    def stats_and_grads(self, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor]:
        row_stats, total = self.init(rows), torch.zeros_like(self.scale)
        room = self._room(rows, cols)
        for along_i, row_tile in self._tiles(rows):
            for along_j, col_tile in self._tiles(cols):
                tile = self._tile(row_tile, col_tile, room)
                (met,) = self.loss.absorb(tile)
                row_stats[:, along_i] = self.loss.merge(row_stats[:, along_i], met)
                pieces = (None if u is None else u[along_i], None if v is None else v[along_j])
                total += self._add_grads(tile, row_tile, col_tile, *pieces)
        return row_stats, total

    def _add_grads(self, tile: Tile, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None) -> Tensor:
        """One tile's part of `grads`; its sum only where a bias asks for it."""
        g_IJ = self.loss.pair_grad(tile, rows, cols)
        if u is not None:
            _add_product(u, g_IJ, cols.features)
        if v is not None:
            _add_product(v, g_IJ.T, rows.features)
        return torch.zeros_like(self.scale) if self.bias is None else g_IJ.sum()

    def workspace_bytes(self, N: int, M: int, D: int, dtype: torch.dtype) -> int:
        side = self._side(dtype)
        size = torch.empty((), dtype=accumulator(dtype)).element_size()
        rows, cols = min(N, side), min(M, side)
        return size * (TILES_HELD * rows * cols + 2 * (rows + cols) * D)

    def _tile(self, rows: Side, cols: Side, room: Tensor) -> Tile:
        # scaled afterwards: scaled features would be rounded once more
        out = room[: len(rows) * len(cols)].view(len(rows), len(cols))
        return self._marked(_product(rows.features, cols.features.T, out).mul_(self.scale), rows, cols)

    def _marked(self, x: Tensor, rows: Side, cols: Side) -> Tile:
        """The tile of the scaled similarities x, which it may overwrite."""
        if self.bias is not None:
            x += self.bias
        bounds = None
        if x.device.type == "cpu":
            least, most = torch.aminmax(x)
            bounds = float(least), float(most)
        marks = mark(rows, cols, exclude_self=self.loss.exclude_self)
        return Tile(fill(x, marks.excluded, -torch.inf), *marks, bounds)

    def _room(self, rows: Side, cols: Side) -> Tensor:
        """For the logits of any tile: taken once, because new memory costs as much as a product."""
        side = self._side(rows.features.dtype)
        return self.scale.new_empty(min(len(rows), side) * min(len(cols), side))

    def _tiles(self, side: Side) -> Iterator[tuple[slice, Side]]:
        step = self._side(side.features.dtype)
        for start in range(0, len(side), step):
            stop = min(start + step, len(side))
            yield slice(start, stop), side.narrow(start, stop)

    def _side(self, dtype: torch.dtype) -> int:
        """Rows, and columns, of a tile: as many as pay, within the workspace."""
        most = SIDE_CPU if self.scale.device.type == "cpu" else SIDE_ACCELERATOR
        size = torch.empty((), dtype=accumulator(dtype)).element_size()
        fit = int((self.workspace / (TILES_HELD * size)) ** 0.5)
        return max(16, min(most, fit))


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a @ b with products accumulated, and the result kept, in the accumulator's type."""
    if _narrow_on_accelerator(a):
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _add_product(total: Tensor, g: Tensor, features: Tensor) -> None:
    """total += g @ features, in the accumulator's type."""
    if not _narrow_on_accelerator(features):
        total.addmm_(g, features.to(total.dtype))
    elif features.dtype == torch.float16:
        narrow, unit = _in_range(g)
        total.addcdiv_(torch.mm(narrow, features, out_dtype=torch.float32), unit)
    else:
        torch.addmm(total, g.to(features.dtype), features, out_dtype=torch.float32, out=total)


def _in_range(g: Tensor) -> tuple[Tensor, Tensor]:
    """g as fp16 in a unit of its own, and the unit, a power of two: in a mean over many pairs most of g lies below
    the least number of that type.
    """
    most = torch.linalg.vector_norm(g, ord=torch.inf)
    # 15 would reach its range; 126, float32's
    power = (14 - torch.log2(most).ceil()).clamp(max=126)
    unit = torch.where(most == 0, 1.0, torch.exp2(power))
    return torch.mul(g, unit, out=torch.empty_like(g, dtype=torch.float16)), unit


def _narrow_on_accelerator(features: Tensor) -> bool:
    """16-bit operands on a CUDA device, whose matrix units accumulate in float32 and can return it."""
    return features.is_cuda and features.dtype in (torch.float16, torch.bfloat16)
