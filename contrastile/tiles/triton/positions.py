"""Launches of the kernels of positives known by position (`kernels/positions.py`), as those of `launch.py`."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from contrastile.tiles.triton import launch
from contrastile.tiles.triton.block import Block, Positives
from contrastile.tiles.triton.kernels import positions as kernels
from contrastile.tiles.triton.launch import CONSTANTS, FEW, directions, features, is_exact, truncation
from contrastile.tiles.triton.plan import EXACT, Epilogue, piece_products, tiles_of

# rows of one program that computes positives, and features at a time: more programs share few rows
POSITIVES, POSITIVES_FEW = (16, 128), (8, 256)
# products of pieces that a product of the tiles adds up
SUMMED = len(piece_products(EXACT))
# listed positives up to which each one reads all of them, in place of a sort, and those read at once
SCANNED, SCAN = 8192, 1024


def as_tiles(dtype: torch.dtype, epilogue: Epilogue) -> bool:
    """Return whether positives have the products of the tiles, with all pieces; else products of their own in float32.

    With hardness weights the tiles have another factor, that of the negatives.
    """
    return is_exact(dtype) and not epilogue.hardness


def _positives(block: Block, positives: Positives, q: Tensor, k: Tensor, products: Tensor | None) -> dict[str, Any]:
    """The positives known by position, features, and products of these by the tiles, if there are."""
    columns, unused = positives.columns, block.constants
    rows, width = POSITIVES_FEW if len(q) <= FEW else POSITIVES
    if products is not None and positives.places is not None:
        products = products.gather(1, positives.places)
    return features(q, k) | {"ROWS": rows, "BLOCK": width} | {
        "columns_ptr": unused if columns is None else columns, "per_row": positives.per_row,
        "products_ptr": unused if products is None else products, "PRODUCTS": 1 if products is None else SUMMED,
        "N": len(block.rows), "M": len(block.cols), "diagonal": positives.diagonal or 0, "DIAGONAL": columns is None,
        "self_diagonal": block.self_diagonal or 0, "SELF": block.self_diagonal is not None,
    }  # fmt: skip


def _arguments(block: Block, positives: Positives) -> dict[str, Any]:
    """The positives known by position, the features and, with a teacher, the positives' logits by it."""
    q, k, epilogue = block.rows.features, block.cols.features, block.epilogue
    given = _positives(block, positives, q, k, positives.products)
    if not epilogue.has_teacher:
        return {"teacher_ptr": block.constants, **given}
    logits = block.constants.new_empty(len(q), positives.per_row)
    ((a,), (b,)) = block.rows.guides, block.cols.guides
    of_teacher = _positives(block, positives, a, b, None)
    launch.run(
        kernels.positive_logits, (tiles_of(len(q), of_teacher["ROWS"]),),
        constants_ptr=block.constants[CONSTANTS:], out_ptr=logits, **epilogue.flags, **of_teacher,
    )  # fmt: skip
    return {"teacher_ptr": logits, **given}


def listed_products(a: Tensor, b: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """⟨a_i, b_j⟩ [n, P] of each row and the columns j at its positions, ∞ where there is none."""
    out = torch.empty(positions.shape, dtype=dtype, device=a.device)
    with launch.on(a.device):
        launch.run(
            kernels.listed_products, (tiles_of(len(a), launch.ROWS),), columns_ptr=positions.contiguous(), out_ptr=out,
            N=len(a), M=len(b), per_row=positions.shape[1], **features(a, b),
        )  # fmt: skip
    return out


def add_totals(block: Block, positives: Positives, stats: Sequence[Tensor]) -> None:
    """Write the positives known by position into the statistics, which hold all other pairs."""
    given = _arguments(block, positives)
    launch.run(
        kernels.positive_totals, (tiles_of(len(block.rows), given["ROWS"]),), constants_ptr=block.constants,
        row_stats_ptr=stats[0], row_stats_stride=stats[0].stride(0), col_stats_ptr=stats[-1],
        col_stats_stride=stats[-1].stride(0), COLUMNS=len(stats) == 2, **block.epilogue.flags, **given,
    )  # fmt: skip


def add_gradients(
    block: Block, positives: Positives, u: Tensor | None, v: Tensor | None, factors: Tensor | None = None
) -> tuple[Tensor, float]:
    """Add the positives' gradient g · k to u, times the factors [N] if there are some, and g · q to v, in float32.

    Returns g · ⟨q, k⟩ [N, P], or g for a pairwise loss, and the share that the tensor cores have lost.
    """
    N, given = len(block.rows), _arguments(block, positives)
    g_NP, inner_NP = block.constants.new_empty(2, N, positives.per_row)
    launch.run(
        kernels.positive_gradients, (tiles_of(N, given["ROWS"]),), u_ptr=g_NP if u is None else u,
        u_stride=0 if u is None else u.stride(0), v_ptr=g_NP if v is None else v,
        v_stride=0 if v is None else v.stride(0), g_ptr=g_NP, inner_ptr=inner_NP, U=u is not None,
        V=v is not None and positives.distinct, factors_ptr=g_NP if factors is None else factors,
        TIMES=factors is not None, **directions(block), **given,
    )  # fmt: skip
    q = block.rows.features
    if v is not None and positives.columns is not None and not positives.distinct:
        add_columns(v, q, positives.columns, g_NP)
    if not block.epilogue.exponential:
        return g_NP, 0.0
    return inner_NP, 0.0 if positives.products is None else truncation(q)


def add_columns(v: Tensor, q: Tensor, columns: Tensor, g_NP: Tensor) -> None:
    """v[columns[i, p]] += g[i, p] · q[i] where the column is not negative, in the order of (i, p)."""
    if columns.numel() <= SCANNED:
        D = v.shape[1]
        block = min(1024, triton.next_power_of_2(D))
        launch.run(
            kernels.add_listed, (columns.numel(), tiles_of(D, block)), out_ptr=v, out_stride=v.stride(0), x_ptr=q,
            row_stride=q.stride(0), feature_stride=q.stride(1), columns_ptr=columns, values_ptr=g_NP,
            n=columns.numel(), per_row=columns.shape[1], D=D, BLOCK=block, SCAN=SCAN,
        )  # fmt: skip
    else:
        # sorted by column, so that sums have the same order, and bits, in every run
        targets, order = torch.where(columns < 0, len(v), columns).flatten().sort(stable=True)
        add_pairs(v, q, targets, order // columns.shape[1], g_NP.flatten()[order])


def add_pairs(total: Tensor, x: Tensor, targets: Tensor, sources: Tensor, values: Tensor) -> None:
    """total[targets[s]] += values[s] · x[sources[s]], in order of s; targets rise, and those beyond total are left."""
    n, D = total.shape
    block = min(1024, triton.next_power_of_2(D))
    launch.run(
        kernels.add_pairs, (len(targets), tiles_of(D, block)), out_ptr=total, out_stride=total.stride(0), x_ptr=x,
        row_stride=x.stride(0), feature_stride=x.stride(1), targets_ptr=targets,
        stops_ptr=torch.searchsorted(targets, targets, right=True), sources_ptr=sources, values_ptr=values, n=n, D=D,
        BLOCK=block,
    )  # fmt: skip
