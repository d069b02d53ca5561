"""Columns [I, H, D] that each row meets alone, in kernels: `OwnColumns` of fused tiles, and tiles without a block.

Beside `backend.py`. Plain PyTorch would make a float32 copy of the columns for each of its operations.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from contrastile.losses.base import PairLoss, Shard
from contrastile.tiles.base import OwnColumns
from contrastile.tiles.eager import Eager
from contrastile.tiles.triton import own_kernels, plan
from contrastile.tiles.triton.launch import on, run

# pairs of a row and a column, and features, that one program takes at a time
PAIRS, BLOCK = 8, 512


class FusedOwnColumns(OwnColumns):
    """The same in kernels that read the columns in their own dtype, so that no copy is held."""

    copies: ClassVar[int] = 0

    @staticmethod
    def products(q: Tensor, own: Tensor, out: Tensor) -> Tensor:
        blocks = plan.tiles_of(out.numel(), PAIRS)
        zeros = out.new_empty(blocks)
        with on(q.device):
            run(own_kernels.own_products, (blocks,), out_ptr=out, zeros_ptr=zeros, **_rows(q, own), **_columns(own))
        return zeros.sum()

    @staticmethod
    def add(g: Tensor, own: Tensor, u: Tensor) -> None:
        (N, H, D), g = own.shape, g.contiguous()
        with on(u.device):
            grid = N, plan.tiles_of(D, BLOCK)
            run(own_kernels.own_sums, grid, g_ptr=g, u_ptr=u, H=H, D=D, BLOCK=BLOCK, **_columns(own))

    @staticmethod
    def gradient(g: Tensor, q: Tensor, number: Tensor, out: Tensor) -> None:
        grid, g = (plan.tiles_of(g.numel(), PAIRS), plan.tiles_of(q.shape[1], BLOCK)), g.contiguous()
        with on(q.device):
            run(own_kernels.own_gradients, grid, g_ptr=g, number_ptr=number, out_ptr=out, **_rows(q, out))


class OwnTiles(Eager):
    """Tiles of rows that meet their own columns alone, by a loss that has no kernels."""

    capturable: ClassVar[bool] = True
    own_columns = FusedOwnColumns

    @classmethod
    def declines(cls, _loss: PairLoss, rows: Shard, _cols: Shard) -> str | None:
        return plan.refusal(rows.features.dtype, rows.features.device)


def _rows(q: Tensor, own: Tensor) -> dict[str, Any]:
    N, H, D = own.shape
    sizes = {"pairs": N * H, "H": H, "D": D, "PAIRS": PAIRS, "BLOCK": BLOCK}
    return {"q_ptr": q, "q_row_stride": q.stride(0), "q_stride": q.stride(1), **sizes}


def _columns(own: Tensor) -> dict[str, Any]:
    row, column, feature = own.stride()
    return {"own_ptr": own, "own_row_stride": row, "own_stride": column, "own_feature_stride": feature}
