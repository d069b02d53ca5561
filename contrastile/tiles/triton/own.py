"""Columns [I, H, D] that each row meets alone, in kernels: `OwnColumns` of fused tiles, and tiles without a block.

Beside `backend.py`. Plain PyTorch would make a float32 copy of the columns for each of its operations.
"""

from typing import Any, ClassVar

import torch
import triton
from torch import Tensor

from contrastile.losses.base import PairLoss, Shard
from contrastile.tiles.base import OwnColumns, Tiles
from contrastile.tiles.eager import Eager
from contrastile.tiles.triton import plan
from contrastile.tiles.triton.kernels import own as own_kernels
from contrastile.tiles.triton.launch import on, run

# features that one program of one warp takes at a time, and numbers of a row's columns: with four warps, which exchange
# sums, 8,192 rows of eight columns of 512 features take 36 and 60 us instead of 30 and 34 on an H200
FEATURES, NUMBERS = 512, 4096


class FusedOwnColumns(OwnColumns):
    """The same in kernels that read the columns in their own dtype, so that no copy is held."""

    copies: ClassVar[int] = 0

    @staticmethod
    def products(
        q: Tensor, own: Tensor, out: Tensor, flag: Tensor, excluded: Tensor | None = None, **statistics: Any
    ) -> None:
        """statistics: memory of the rows', into which exponentials are merged."""
        unused: dict[str, Any] = {"stats_ptr": out, "stats_stride": 0, "stats_col_stride": 0, "scale_ptr": out}
        unused["POSITIVE"] = False
        with on(q.device):
            run(
                own_kernels.own_products, (len(q),), q_ptr=q, q_row_stride=q.stride(0), q_stride=q.stride(1),
                out_ptr=out, flag_ptr=flag, MERGE=len(statistics) > 0, warps=1, **_columns(own, excluded, out),
                **(unused | statistics),
            )  # fmt: skip

    @staticmethod
    def add(g: Tensor, own: Tensor, u: Tensor, excluded: Tensor | None = None, **numbers: Any) -> None:
        """numbers: those of the rows, from which g is computed first."""
        g = g.contiguous()
        unused: dict[str, Any] = dict.fromkeys(
            ("products_ptr", "scale_ptr", "state_ptr", "coefficient_ptr", "sums_ptr"), g
        )
        unused |= {"state_stride": 0, "state_col_stride": 0, "POSITIVE": False}
        columns = _columns(own, excluded, g)
        with on(u.device):
            run(
                own_kernels.own_sums, (len(u), plan.tiles_of(u.shape[1], columns["BLOCK"])), g_ptr=g, u_ptr=u,
                GRADIENT=len(numbers) > 0, warps=1, **columns, **(unused | numbers),
            )  # fmt: skip

    @staticmethod
    def gradient(g: Tensor, q: Tensor, number: Tensor, out: Tensor) -> None:
        programs, sizes = gradient_programs(out)
        with on(q.device):
            run(
                own_kernels.own_gradients, (programs,), g_ptr=g.contiguous(), number_ptr=number, upstream_ptr=number,
                out_ptr=out, q_ptr=q, q_row_stride=q.stride(0), q_stride=q.stride(1), UPSTREAM=False, **sizes,
            )  # fmt: skip

    @classmethod
    def absorb(cls, tiles: Tiles, rows: Shard, products: Tensor, flag: Tensor, stats: Tensor) -> bool:
        own = _exponentials(tiles, rows)
        if own is not None:
            stride, col_stride = stats.stride()
            memory = {"stats_ptr": stats, "stats_stride": stride, "stats_col_stride": col_stride}
            memory["POSITIVE"] = rows.own_positives > 0
            cls.products(rows.features, own, products, flag, rows.own_excluded, scale_ptr=tiles.scale, **memory)
        return own is not None

    @classmethod
    def backward(cls, tiles: Tiles, rows: Shard, products: Tensor, g: Tensor, u: Tensor, sums: Tensor) -> bool:
        own, state, coefficient = _exponentials(tiles, rows), rows.state, rows.coefficient
        if own is None or state is None or coefficient is None:
            return False
        of_rows = u.new_empty(len(u))
        cls.add(
            g, own, u, rows.own_excluded, products_ptr=products, scale_ptr=tiles.scale, sums_ptr=of_rows,
            coefficient_ptr=coefficient.contiguous(), state_ptr=state, state_stride=state.stride(0),
            state_col_stride=state.stride(1), POSITIVE=rows.own_positives > 0,
        )  # fmt: skip
        sums[1] += of_rows.sum()
        return True


class OwnTiles(Eager):
    """Tiles of rows that meet their own columns alone, by a loss that has no kernels."""

    capturable: ClassVar[bool] = True
    own_columns = FusedOwnColumns

    @classmethod
    def declines(cls, _loss: PairLoss, rows: Shard, _cols: Shard) -> str | None:
        return plan.refusal(rows.features.dtype, rows.features.device)


def _exponentials(tiles: Tiles, rows: Shard) -> Tensor | None:
    """The rows' own columns if the loss needs no more than negatives' exponentials and the logit of one positive."""
    loss, formula = tiles.loss, tiles.loss.formula
    plain = formula is not None and formula.pairs == "exponential" and formula.guide is None
    if formula is not None and rows.own_positives:
        plain = formula.linear and rows.own_positives == 1
    others = loss.reads_products or getattr(loss, "label_smoothing", False) or tiles.bias is not None
    return rows.own if plain and not others else None


def _columns(own: Tensor, excluded: Tensor | None, unused: Tensor) -> dict[str, Any]:
    row, column, feature = own.stride()
    mask = unused if excluded is None else excluded.contiguous().view(torch.uint8)
    return {
        "own_ptr": own, "own_row_stride": row, "own_stride": column, "own_feature_stride": feature,
        "excluded_ptr": mask, "EXCLUDED": excluded is not None, **_sizes(own),
    }  # fmt: skip


def gradient_programs(out: Tensor) -> tuple[int, dict[str, int]]:
    """The programs of `own_gradients` that write [N, H, D], and their sizes."""
    sizes = _sizes(out)
    return len(out) * plan.tiles_of(out.shape[2], sizes["BLOCK"]), sizes


def _sizes(own: Tensor) -> dict[str, int]:
    _, H, D = own.shape
    block = min(triton.next_power_of_2(D), FEATURES)
    return {"H": H, "D": D, "BLOCK": block, "COLS": min(triton.next_power_of_2(H), NUMBERS // block)}
