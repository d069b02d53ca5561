"""Positives by label: a block in the order of its labels; launches of `kernels/order.py` and `kernels/labels.py`.

Between `launch.py` and `backend.py`. Rows and columns of a label are neighbours in that order, so that the positives of
a tile's rows are a few columns side by side. The tile kernels leave these out as they leave out a diagonal, and small
kernels compute them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from contrastile.losses.base import Shard
from contrastile.tiles.triton.block import Block, Order, SuperTile, along
from contrastile.tiles.triton.kernels import labels as kernels
from contrastile.tiles.triton.kernels import order as order_kernels
from contrastile.tiles.triton.kernels.arithmetic import POSITIVE_TOP, STATS
from contrastile.tiles.triton.launch import BLOCK, ROWS, Weights, add_cols, add_rows, directions, merge_parts
from contrastile.tiles.triton.plan import Pair, products_of, shape_for, tiles_of
from contrastile.tiles.triton.start import run

# numbers of a row in the order of labels, see `kernels/masks.py`
NUMBERS = 5
# labels of a side up to which they are sorted by chunks, faster than by the many kernels of a sort; labels of a chunk,
# and those compared at once; labels and chunks of one program, and the steps that find a position in a chunk
MOST_CHUNKED, CHUNK, SEARCH = 16384, {"CHUNK": 128, "BLOCK": 32}, {"ROWS": 16, "SLOTS": 64, "CHUNK": 128, "STEPS": 8}
# columns of positives of a row tile above which its tiles have the size of the shape, else half of its rows; columns of
# a block above which the larger tiles' launches are worth their time
LONG, MANY = 144, 6144
# warps of the smaller and of the larger tiles of a kernel, as measured; stages of the gradients'
TOTALS_WARPS, GRADIENTS_WARPS, GRADIENTS_STAGES = (4, 8), (8, 4), 3
# programs that share the columns of a larger row tile, because row tiles alone would not fill a chip; statistics, which
# have to be merged, in blocks of up to so many rows and columns
SHARED, MOST_SHARED = 8, 16384


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
        order_kernels.spans, (tiles_of(max(N, M), height), 2), N=N, M=M, self_diagonal=rows.start - cols.start,
        SELF=exclude_self, BM=height, STEPS=max(N, M).bit_length(), **given,
    )  # fmt: skip
    return Order(row_order, col_order, row_spans, col_spans)


def _sorted(rows: Tensor, cols: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Each side's labels in rising order, the position of each, and the place of each position."""
    sides = [rows] if cols is rows else [rows, cols]
    if max(map(len, sides)) > MOST_CHUNKED:
        results = [_by_torch(labels) for labels in sides]
    else:
        chunks = _chunks(sides)
        results = [(torch.empty_like(x), *x.new_empty(2, len(x))) for x in sides]
        given = _of_sides("labels", sides) | _of_sides("chunks", [x[0] for x in chunks])
        given |= _of_sides("within", [x[1] for x in chunks]) | {"N": len(rows), "M": len(cols)}
        for at, name in enumerate(("sorted", "order", "places")):
            given |= _of_sides(name, [x[at] for x in results])
        run(
            order_kernels.order_labels, (tiles_of(max(map(len, sides)), SEARCH["ROWS"]), len(sides)), **given, **SEARCH,
        )  # fmt: skip
    return [results[0], results[-1]]


def _of_sides(name: str, sides: Sequence[Tensor]) -> dict[str, Any]:
    """Arguments of a kernel for rows and columns; one tensor may be both."""
    return {f"row_{name}_ptr": sides[0], f"col_{name}_ptr": sides[-1]}


def _chunks(sides: Sequence[Tensor]) -> list[Tensor]:
    """The labels of one or two sides [2, n], sorted within chunks, and the place of each in its chunk."""
    out = [x.new_empty(2, len(x)) for x in sides]
    run(
        order_kernels.sort_chunks, (tiles_of(max(map(len, sides)), CHUNK["CHUNK"]), len(sides)), N=len(sides[0]),
        M=len(sides[-1]), **_of_sides("labels", sides), **_of_sides("chunks", [x[0] for x in out]),
        **_of_sides("within", [x[1] for x in out]), **CHUNK,
    )  # fmt: skip
    return out


def count_equal(labels: Tensor, others: Tensor) -> Tensor:
    """The number [n] of other labels that equal each label."""
    out, ((chunks, _),) = torch.empty(len(labels), dtype=torch.int32, device=labels.device), _chunks([_wide(others)])
    run(
        order_kernels.count_equal, (tiles_of(len(labels), SEARCH["ROWS"]),), labels_ptr=_wide(labels),
        chunks_ptr=chunks, out_ptr=out, n=len(labels), m=len(others), **SEARCH,
    )  # fmt: skip
    return out


def _wide(labels: Tensor) -> Tensor:
    return labels.to(torch.int64).contiguous()


def _by_torch(labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, order = labels.sort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return values, order, places


def ordered_sides(rows: Shard, cols: Shard, order: Order) -> list[Shard]:
    """The numbers of both sides in the order of labels; their features stay as they are, and are read in that order."""
    sides, moves, ordered = [(rows, order.rows), (cols, order.cols)], [], []
    for side, places in sides:
        named = {name: x for name in ("ids", "numbers") if (x := getattr(side, name)) is not None}
        changed: dict[str, Any] = {name: x.index_select(0, places) for name, x in named.items()}
        if side.coefficient is not None:
            state = side.coefficient.new_empty(0, len(side)) if side.state is None else side.state
            out = state.new_empty(len(state) + 1, len(side))
            moves.append((state, side.coefficient, places, out))
            changed |= {"state": out[:-1], "coefficient": out[-1]}
        ordered.append(replace(side, **changed))
    if moves:
        _move(moves)
    return ordered


def given_order(ordered: Sequence[Tensor], order: Order, out: Sequence[Tensor]) -> None:
    """Write the statistics [K, n] of each side in the order of the caller."""
    sides = zip(ordered, (order.rows, order.cols), out, strict=False)
    _move([(x, None, places, given) for x, places, given in sides], put=True)


def _move(sides: Sequence[tuple[Tensor, Tensor | None, Tensor, Tensor]], *, put: bool = False) -> None:
    """Move numbers [K, n], and behind them [n] if there are any, by the order of a side to their place, or back."""
    lengths, given = [len(order) for _, _, order, _ in sides], dict[str, Any]()
    for name, (x, last, order, out) in zip(("row", "col"), (sides[0], sides[-1]), strict=True):
        given |= {f"{name}_x_ptr": x if len(x) else out, f"{name}_last_ptr": out if last is None else last}
        given |= {f"{name}_stride": x.stride(0), f"{name}_order_ptr": order, f"{name}_out_ptr": out}
    run(
        order_kernels.move_ordered, (tiles_of(max(lengths), BLOCK), len(sides)), N=lengths[0], M=lengths[-1],
        CHANNELS=len(sides[0][0]), LAST=sides[0][1] is not None, PUT=put, BLOCK=BLOCK, **given,
    )  # fmt: skip


def new_sums(block: Block) -> Tensor:
    """Zeros [S, N] for `label_gradients`."""
    return block.constants.new_zeros(SHARED, len(block.rows))


def label_totals(pair: Pair, block: Block, stats: Sequence[Tensor], first: Sequence[bool]) -> None:
    """Add a super-tile's positives to the statistics of its rows and, if symmetric, of its columns.

    first: the columns, and the rows, are the first that the statistics meet. Several programs share the columns of a
    tall tile where a block is small; `merge_parts` adds their statistics.
    """
    for columns, (of_side, is_first) in enumerate(zip(stats, first, strict=False)):
        given = _products(pair, block, columns=bool(columns)) | block.epilogue.flags
        shares = given["M"] > MANY and max(given["N"], given["M"]) <= MOST_SHARED and not block.loss.pairwise
        shared = SHARED if shares else 1
        of_positives = of_side[POSITIVE_TOP.value : STATS.value]
        parts = of_side.new_empty(shared - 1, len(of_positives), given["N"])
        given |= {"constants_ptr": block.constants, "stats_ptr": of_side, "stats_stride": of_side.stride(0)}
        given |= {"part_ptr": parts if shared > 1 else of_side, "row_first": int(is_first)}
        _run_tiles(kernels.label_totals, pair, given, TOTALS_WARPS, pair.shape.stages, shared)
        if shared > 1:
            merge_parts(of_positives, parts, block.epilogue)


def label_gradients(
    pair: Pair, block: Block, strip: Tensor, sums: Tensor, weights: Weights, stats: Sequence[Tensor] | None = None, *,
    factored: bool = False,
) -> None:  # fmt: skip
    """Write the gradients of a super-tile's positives into the strip, and add Σ g · ⟨q, k⟩, or Σ g, to `sums` [S, N].

    weights: the vectors of each direction, the last two for its positives. stats: add the loss of the positives too,
    for a pairwise loss. factored: the strip has exponentials, of which a factor of each row makes gradients
    (`exponentials.py`).
    """
    given = directions(block) | _products(pair, block)
    given |= {"strip_ptr": strip, "out_stride": strip.stride(0), "part_stride": strip.shape[0] // pair.q.parts}
    given |= {"sums_step": sums.stride(0)}
    vectors = weights if block.loss.pairwise else [x[-2:] for x in weights]
    given |= {"row_vectors_ptr": vectors[0], "col_vectors_ptr": vectors[-1], "vectors_step": vectors[0].stride(0)}
    given |= {"PARTS": pair.q.parts, "label_sums_ptr": sums, "stats_ptr": stats[0] if stats else sums}
    # a pairwise loss is added to one number of a row
    shared = 1 if block.loss.pairwise else SHARED
    given |= {"LOSS": bool(stats), "FACTORED": factored}
    _run_tiles(kernels.label_gradients, pair, given, GRADIENTS_WARPS, GRADIENTS_STAGES, shared)


def _run_tiles(
    kernel: Any, pair: Pair, given: dict[str, Any], warps: tuple[int, int], stages: int, shared: int
) -> None:
    """Launch a kernel of tiles of positives: small ones, and tall ones for rows whose positives are many.

    warps: of both. shared: programs for the columns of a tall one.
    """
    tall = pair.shape.rows
    given |= {"TALL": tall, "LONG": LONG if given["M"] > MANY else 0, "stages": stages}
    run(kernel, (tiles_of(given["N"], tall // 2),), BM=tall // 2, BN=tall // 2, warps=warps[0], **given)
    if given["LONG"]:
        run(kernel, (tiles_of(given["N"], tall), shared), BM=tall, BN=tall, warps=warps[1], **given)


def _products(pair: Pair, block: Block, *, columns: bool = False) -> dict[str, Any]:
    """The features of a super-tile, or those of its columns as rows, and which of the others are positives."""
    order = block.order
    assert order is not None
    q, k, spans, start, shape = pair.q, pair.k, order.of_rows, order.first_col, pair.shape
    numbers, given = pair.numbers, products_of(pair.q.parts)
    if columns:
        q, k, spans, start, numbers = k, q, order.of_cols, order.first_row, numbers[::-1]
        # pieces of the same products in the same order
        given = given | {"LEFT": given["RIGHT"], "RIGHT": given["LEFT"]}
    row_numbers, col_numbers = (q.data if x is None else x for x in numbers)
    return given | {
        "q_ptr": q.data, "k_ptr": k.data, "q_stride": q.data.stride(0), "k_stride": k.data.stride(0), "N": len(q),
        "M": len(k), "D": q.width, "spans_ptr": spans, "spans_stride": spans.stride(0), "spans_start": start,
        "row_numbers_ptr": row_numbers, "col_numbers_ptr": col_numbers, "SELF": block.loss.exclude_self,
        "BK": shape.depth,
    }  # fmt: skip


def add_strip(total: Tensor, tile: SuperTile, side: int, strip: Tensor, *, fresh: bool) -> None:
    """Add a super-tile's gradients to the accumulator of the rows (side 0) or of the columns (1), in either order."""
    add, order = (add_rows, add_cols)[side], tile.block.order
    if order is None:
        # the last columns may have no sums
        at = slice(*(min(end, len(total)) for end in (tile.along[side].start, tile.along[side].stop)))
        if at.start < at.stop:
            add(along(total, at, 0), tile.pair, strip, fresh=fresh)
        return
    with in_order(total, (order.rows, order.cols)[side], fresh=fresh) as part:
        add(part, tile.pair, strip, fresh=True)


@contextmanager
def in_order(
    total: Tensor, order: Tensor | None, *, fresh: bool = True, factors: Tensor | None = None
) -> Iterator[Tensor]:
    """Memory for sums in the order of labels, which are added to `total`, or replace it where `fresh`.

    factors: of each sum. Without an order the memory is `total` itself.
    """
    if order is None:
        yield total
        if factors is not None:
            total.mul_(factors[:, None])
        return
    part = total.new_empty(len(order), total.shape[1])
    yield part
    n, D = part.shape
    run(
        order_kernels.add_ordered, (tiles_of(n, ROWS),), total_ptr=part, out_ptr=total, order_ptr=order, n=n, D=D,
        factors_ptr=part if factors is None else factors, TIMES=factors is not None, total_stride=part.stride(0),
        out_stride=total.stride(0), ADD=not fresh, ROWS=ROWS, BLOCK=BLOCK,
    )  # fmt: skip
