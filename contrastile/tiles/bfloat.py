"""bf16 products on a CPU that multiplies bf16 several times as fast as float32: tiles beside `eager.py`."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from contrastile._torch import fast_bf16
from contrastile.losses.base import Shard
from contrastile.tiles.base import Sum, Tiles, Weigh
from contrastile.tiles.eager import Eager

# least scale by which pairs' gradients are multiplied before they are rounded to bf16
LEAST_FACTOR = 2.0**-60


@dataclass
class Bfloat(Eager):
    """Tiles of bf16 products on a CPU that multiplies bf16 several times as fast as float32.

    torch rounds such a product to bf16. A logit is made of two: the rounded one, and the part that its rounding took
    away, together 17 bits. A gradient to which several tiles add is made of two as well; a gradient from one tile is
    one product, rounded once. The scale's gradient is summed in float32, because pairs' gradients of one size are
    rounded in one direction.
    """

    # a tile has all columns of its rows
    all_columns: bool = field(default=False, init=False, repr=False)
    # of each gradient, the other side's features in the latest tile, and their mean
    means: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    @property
    def sums_products(self) -> bool:
        return True

    @property
    def _held(self) -> int:
        return super()._held + 1

    @classmethod
    def _copied(cls, I: int, J: int, D: int, dtype: torch.dtype) -> int:  # noqa: E741
        # products in float32 beside the logits, one tile and two products of features in bf16
        return (3 * I * J + (I + J) * D) * dtype.itemsize

    def _room(self, pairs: int) -> Tensor:
        # logits and products
        return super()._room(2 * pairs)

    def _logits(self, rows: Shard, cols: Shard, room: Tensor, *, with_graph: bool) -> tuple[Tensor, Any]:
        del with_graph
        q, k = rows.features, cols.features.T
        n, m = q.shape[0], k.shape[1]
        x, products = room[: 2 * n * m].view(2, n, m)
        rounded = torch.mm(q, k)
        products.copy_(rounded)
        products += torch.addmm(rounded, q, k, beta=-1, out=rounded)
        return torch.mul(products, self.scale, out=x), products

    def strips(
        self, rows: Shard, cols: Shard, u: Sum, v: Sum, weigh: Weigh, *, mean: bool, wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        self.all_columns = True
        return super().strips(rows, cols, u, v, weigh, mean=mean, wanted=wanted)

    def _add(self, g_IJ: Tensor, context: Any, rows: Shard, cols: Shard, u_I: Sum, v_J: Sum, sums: Tensor) -> None:
        if self.bias is not None:
            sums[0] += g_IJ.sum()
        # pairwise: a dot product rounds its running sum, whose terms are alike, in one direction
        sums[1] += context.mul_(g_IJ).sum()
        # rounded with their factor, so that the one rounding of a single part is the gradient's own
        factor = float(self.scale)
        factor = 1.0 if abs(factor) < LEAST_FACTOR else factor
        exact = g_IJ.mul_(factor)
        g = exact.to(rows.features.dtype)
        # the rounding's error is made up for by the mean of the other side's features: in a narrow cone large sums
        # cancel, and the error would be most of what is left
        error = exact.sub_(g)
        sides = (
            (u_I, g, cols.features, error.sum(1), self.fresh or self.all_columns),
            (v_J, g.T, rows.features, error.sum(0), self.fresh),
        )
        for side, (total, of_side, features, errors, in_one_tile) in enumerate(sides):
            if total is None or not len(total):
                continue
            of_side = of_side[: len(total)]
            product = torch.mm(of_side, features)
            _ = total.copy_(product).div_(factor) if self.fresh else total.add_(product, alpha=1 / factor)
            if not in_one_tile:
                total.add_(torch.addmm(product, of_side, features, beta=-1, out=product), alpha=1 / factor)
            if side not in self.means or self.means[side][0] is not features:
                self.means[side] = features, features.mean(0, dtype=total.dtype)
            total.addr_(errors[: len(total)], self.means[side][1], alpha=1 / factor)


def of_dtype(tiles: type[Tiles], dtype: torch.dtype, device: torch.device) -> type[Tiles]:
    """The tiles of products of this dtype on this device."""
    narrow = fast_bf16 and dtype == torch.bfloat16 and device.type == "cpu"
    return _with_bf16(tiles) if narrow and issubclass(tiles, Eager) else tiles


@cache
def _with_bf16(tiles: type[Eager]) -> type[Eager]:
    """The class of these tiles with bf16 products."""
    return Bfloat if tiles is Eager else type(f"Bfloat{tiles.__name__}", (Bfloat, tiles), {})
