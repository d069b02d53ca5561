"""Positives by label as sums: launches of `kernels/label_sums.py`, beside `sorting.py`, for a block in any order.

Where positives are part of the denominator, as in the softmax loss, a row's loss is its log-sum-exp over all pairs less
the mean logit of its positives, and the latter is linear in their features:

    Σ_{p ∈ P(i)} ⟨q_i, k_p⟩ = ⟨q_i, S⟩        u_i −= t_i · S + Σ_{p ∈ P(i)} t'_p k_p        S = Σ_{p ∈ P(i)} k_p

with the targets t_i of the row and t'_p of its columns, which beside a teacher have the hard loss's weight. The tile
kernels compute all pairs as without labels, in the same time for any number of positives; labels add only sums of the
features of N + M rows.

A row with one positive is different: its probability may round to 1, and its target is 1. Such pairs are positives
known by position (`kernels/positions.py`), which never enter the strip.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from contrastile.tiles.triton.block import Block, Order, Runs
from contrastile.tiles.triton.budget import SUMMED
from contrastile.tiles.triton.kernels import label_sums as kernels
from contrastile.tiles.triton.launch import BLOCK
from contrastile.tiles.triton.plan import EXACT, tiles_of
from contrastile.tiles.triton.start import run

# rows of a chunk and warps of its program, chunks added at once, rows and warps of one program that reads the sums
CHUNK, CHUNK_WARPS, TILES, ROWS, WARPS = 32, 2, 64, 32, 8


def runs(order: Order, *, one_way: bool) -> Runs:
    """Find the pairs that are the only positive of a row."""
    singles = torch.empty_like(order.rows), torch.empty_like(order.cols)
    N, M = map(len, singles)
    run(
        kernels.single_positives, (tiles_of(max(N, M), BLOCK), 2), row_spans_ptr=order.of_rows,
        row_order_ptr=order.rows, row_out_ptr=singles[0], N=N, col_spans_ptr=order.of_cols, col_order_ptr=order.cols,
        col_out_ptr=singles[1], M=M, COLUMNS=not one_way, BLOCK=BLOCK,
    )  # fmt: skip
    return Runs(order, singles, one_way)


def add_totals(block: Block, stats: Sequence[Tensor], room: int) -> None:
    """Add the positives of rows, and of columns, that have several to the statistics, which hold all pairs.

    room: bytes of memory for sums.
    """
    given: dict[str, Any] = {"constants_ptr": block.constants, "ROWS": ROWS, "BLOCK": SUMMED}
    for name, of_side in zip(("row", "col"), (stats[0], stats[-1]), strict=True):
        given |= {f"{name}_stats_ptr": of_side, f"{name}_stats_stride": of_side.stride(0)}
    for grid, sums in _summed(block, room, plain=len(stats), weighed=0, sides=len(stats)):
        run(kernels.add_to_totals, grid, warps=WARPS, **given, **sums)


def add_gradients(block: Block, u: Tensor | None, v: Tensor | None, inner: Tensor, room: int) -> None:
    """Subtract the targets of the same positives from u and v, and from Σ g · ⟨q, k⟩ of each row [N].

    room: bytes of memory for sums.
    """
    assert block.runs is not None
    both = not block.runs.one_way
    given: dict[str, Any] = {"inner_ptr": inner, "COLUMNS": both, "U": u is not None, "ROWS": ROWS, "BLOCK": SUMMED}
    for name, total in (("row", u), ("col", v)):
        out = block.constants[None] if total is None else total
        given |= {f"{name}_out_ptr": out, f"{name}_out_stride": out.stride(0)}
    sides = 1 if v is None else 2
    for grid, sums in _summed(block, room, plain=1 + both, weighed=1 + both, sides=sides):
        run(kernels.add_to_gradients, grid, warps=WARPS, **given, **sums)


def _summed(
    block: Block, room: int, *, plain: int, weighed: int, sides: int
) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
    """Sum the features opposite to rows, and to columns, by label: as many features at a time as there is room for.

    Yields the grid and the arguments of a kernel that reads the sums. plain: the first sides that have sums of
    features. weighed: the last of two sides that have sums of features times targets.
    """
    given = _arguments(block)
    N, M, D = given["N"], given["M"], given["D"]
    kinds = 2 if plain + weighed > 2 else 1
    each = 4 * kinds * sides * max(N, M)
    width = min(tiles_of(D, SUMMED), max(1, room // (each * SUMMED))) * SUMMED
    out = block.constants.new_empty(sides * kinds, max(N, M), width)
    given |= {"width": width, "out_ptr": out, "out_step": out.stride(0), "sums_ptr": out, "sums_step": out.stride(0)}
    # of 8 bits each
    pieces = {torch.bfloat16: 1, torch.float16: 2, torch.float32: EXACT}[block.rows.features.dtype]
    for first in range(0, D, width):
        given |= {"first_feature": first}
        chunks, blocks = tiles_of(max(N, M), CHUNK), tiles_of(min(width, D - first), SUMMED)
        options = {"CHUNK": CHUNK, "BLOCK": SUMMED, "KINDS": kinds, "TILES": TILES}
        options |= {"PLAIN": plain, "WEIGHED": weighed, "PIECES": pieces}
        run(kernels.chunk_sums, (chunks, blocks, sides), warps=CHUNK_WARPS, **given, **options)
        run(kernels.run_sums, (chunks, blocks, sides * kinds), **given, **options)
        yield (tiles_of(max(N, M), ROWS), sides), given


def _arguments(block: Block) -> dict[str, Any]:
    """Rows and columns of a block as the kernels read them; states only in a backward."""
    assert block.runs is not None
    order, given = block.runs.order, dict[str, Any]()
    given |= {"D": block.rows.features.shape[1], "N": len(block.rows), "M": len(block.cols)}
    given |= {"smoothing": block.epilogue.label_smoothing}
    sides = (("row", block.rows, order.rows, order.of_rows), ("col", block.cols, order.cols, order.of_cols))
    for (name, shard, places, spans), singles in zip(sides, block.runs.singles, strict=True):
        x = shard.features
        state = block.constants[None] if shard.state is None else shard.state
        coefficient = block.constants if shard.coefficient is None else shard.coefficient
        of_side = {
            "x_ptr": x, "x_row_stride": x.stride(0), "x_stride": x.stride(1), "order_ptr": places, "spans_ptr": spans,
            "state_ptr": state, "state_stride": state.stride(0), "coefficient_ptr": coefficient, "singles_ptr": singles,
        }  # fmt: skip
        given |= {f"{name}_{key}": value for key, value in of_side.items()}
    return given
