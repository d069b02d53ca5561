"""Positives by label: a block in the order of its labels, and the launches of `labels.py`.

Between `launch.py` and `backend.py`. Rows and columns of a label are neighbours in that order, so that the positives of
a tile's rows are a few columns side by side. The tile kernels leave these out as they leave out a diagonal, and small
kernels compute them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from contrastile.losses.base import Shard
from contrastile.tiles.triton import labels as kernels
from contrastile.tiles.triton.block import Block, Order
from contrastile.tiles.triton.launch import BLOCK, ROWS, directions, run
from contrastile.tiles.triton.plan import Epilogue, Pair, shape_for, tiles_of

# numbers of a row in the order of labels, see `masks.py`
NUMBERS = 5
# labels of a side up to which they are sorted by counting, faster than by the many kernels of a sort; labels of one
# program, and those that it compares them with at once
MOST_COUNTED, COUNTED = 16384, (32, 128)
# warps of a program, whose threads hold a tile of products and what is made of it
WARPS = 8


def ordered(rows: Shard, cols: Shard, *, exclude_self: bool) -> Order:
    """The order of a block's labels; `exclude_self`: pairs of the same position on all ranks do not count."""
    assert rows.labels is not None
    assert cols.labels is not None
    device, (N, M) = rows.labels.device, (len(rows), len(cols))
    (_, row_order, _), (_, col_order, _) = of_rows, of_cols = _sorted(_wide(rows.labels), _wide(cols.labels))
    row_spans, col_spans = (torch.empty(NUMBERS, n, dtype=torch.int32, device=device) for n in (N, M))
    given: dict[str, Any] = {
        f"{side}_{name}_ptr": x
        for side, of_side, out in (("row", of_rows, row_spans), ("col", of_cols, col_spans))
        for name, x in zip(("labels", "order", "places", "out"), (*of_side, out), strict=True)
    }
    height = shape_for(device).rows
    run(
        kernels.spans, (tiles_of(max(N, M), height), 2), N=N, M=M, self_diagonal=rows.start - cols.start,
        SELF=exclude_self, BM=height, STEPS=max(N, M).bit_length(), **given,
    )  # fmt: skip
    return Order(row_order, col_order, row_spans, col_spans)


def _sorted(rows: Tensor, cols: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each side the labels in rising order, the position of each, and the place of each position."""
    if max(len(rows), len(cols)) > MOST_COUNTED:
        of_rows = _by_torch(rows)
        return [of_rows, of_rows if cols is rows else _by_torch(cols)]
    sides = [(torch.empty_like(x), *x.new_empty(2, len(x), dtype=torch.int64)) for x in (rows, cols)]
    given: dict[str, Any] = {"N": len(rows), "M": len(cols), "row_labels_ptr": rows, "col_labels_ptr": cols}
    for side, results in zip(("row", "col"), sides, strict=True):
        names = (f"{side}_{name}_ptr" for name in ("sorted", "order", "places"))
        given |= dict(zip(names, results, strict=True))
    grid = (tiles_of(max(len(rows), len(cols)), COUNTED[0]), 2)
    run(kernels.order_labels, grid, ROWS=COUNTED[0], BLOCK=COUNTED[1], **given)
    return sides


def count_equal(labels: Tensor, others: Tensor) -> Tensor:
    """The number [n] of other labels that equal each label."""
    out = torch.empty(len(labels), dtype=torch.int32, device=labels.device)
    run(
        kernels.count_equal, (tiles_of(len(labels), COUNTED[0]),), labels_ptr=_wide(labels), others_ptr=_wide(others),
        out_ptr=out, n=len(labels), m=len(others), ROWS=COUNTED[0], BLOCK=COUNTED[1],
    )  # fmt: skip
    return out


def _wide(labels: Tensor) -> Tensor:
    return labels.to(torch.int64).contiguous()


def _by_torch(labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, order = labels.sort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return values, order, places


def ordered_side(side: Shard, order: Tensor) -> Shard:
    """The numbers of a side in the order of its labels; its features stay as they are, and are read in that order."""
    changed: dict[str, Any] = {
        name: x.index_select(0, order) for name in ("ids", "numbers", "coefficient")
        if (x := getattr(side, name)) is not None
    }  # fmt: skip
    if side.state is not None and side.state.numel():
        changed["state"] = side.state.index_select(1, order)
    return replace(side, **changed)


def label_totals(pair: Pair, block: Block, stats: Sequence[Tensor], first: Sequence[bool], epilogue: Epilogue) -> None:
    """Add a super-tile's positives to the statistics of its rows and, if symmetric, of its columns.

    first: the columns, and the rows, are the first that the statistics meet.
    """
    pairs = [pair.arguments]
    if len(stats) == 2:
        other = pair.transposed(block.transposed_masks).arguments
        # pieces of the same products in the same order
        pairs.append(other | {"LEFT": other["RIGHT"], "RIGHT": other["LEFT"]})
    for given, of_side, is_first in zip(pairs, stats, first, strict=False):
        run(
            kernels.label_totals, (tiles_of(given["N"], given["BM"]),), constants_ptr=block.constants,
            stats_ptr=of_side, stats_stride=of_side.stride(0), row_first=int(is_first),
            **(epilogue.flags | given | {"warps": WARPS}),
        )  # fmt: skip


def label_gradients(
    pair: Pair, block: Block, strip: Tensor, sums: Tensor, epilogue: Epilogue, stats: Tensor | None
) -> None:
    """Write the gradients of a super-tile's positives into the strip, and add Σ g · ⟨q, k⟩, or Σ g, to `sums` [N].

    stats: add the loss of the positives too, for a pairwise loss.
    """
    coefficient, unused = block.rows.coefficient, {"smoothing": 0.0, "constants_ptr": block.constants, **epilogue.flags}
    for side in ("row", "col") if block.loss.pairwise else ():
        unused |= {f"{side}_state_ptr": coefficient, f"{side}_state_stride": 0, f"{side}_coefficient_ptr": coefficient}
    given: dict[str, Any] = unused if block.loss.pairwise else directions(block, epilogue)
    given |= pair.arguments | {"COLUMNS": block.loss.symmetric, "LOSS": stats is not None, "warps": WARPS}
    run(
        kernels.label_gradients, (tiles_of(len(pair.q), pair.shape.rows),), strip_ptr=strip,
        out_stride=strip.stride(0), part_stride=strip.shape[0] // pair.q.parts, PARTS=pair.q.parts,
        label_sums_ptr=sums, stats_ptr=sums if stats is None else stats, **given,
    )  # fmt: skip


def add_ordered(out: Tensor, total: Tensor, order: Tensor, *, fresh: bool) -> None:
    """out[order] += total, or = it where `fresh`: gradient sums in the order of the caller."""
    n, D = total.shape
    run(
        kernels.add_ordered, (tiles_of(n, ROWS),), total_ptr=total, out_ptr=out, order_ptr=order, n=n, D=D,
        total_stride=total.stride(0), out_stride=out.stride(0), ADD=not fresh, ROWS=ROWS, BLOCK=BLOCK,
    )  # fmt: skip
