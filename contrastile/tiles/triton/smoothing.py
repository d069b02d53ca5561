"""Label smoothing as sums of features, above `label_sums.py`: every key that counts has the same share.

A row's mean logit of all keys is linear in their features, and so is its gradient. With ε times the gradient of a row's
loss over its number of keys c_i, and d_j likewise of a column,

    Σ_j x_ij = scale · ⟨q_i, K⟩        u_i −= c_i K + Σ_j d_j k_j        K = Σ_j k_j

Pairs of equal ids are excluded. Beside positives on the diagonal they are those that labels would make positives, and
their part is subtracted, by the kernels of such sums.

The tile kernels compute all pairs as without smoothing, and may keep their exponentials. With smoothing in the tiles
32,768² pairs of 512 features take 1.6 times as long as without on an H200, and with sums 1.05 times.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from contrastile.losses.softmax import Softmax, SoftmaxState
from contrastile.tiles.triton import label_sums, sorting
from contrastile.tiles.triton.block import Block, Runs, have_ids
from contrastile.tiles.triton.kernels import smoothing as kernels
from contrastile.tiles.triton.launch import BLOCK, directions
from contrastile.tiles.triton.plan import tiles_of
from contrastile.tiles.triton.start import run

# rows of one program that reads features, `BLOCK` features at a time; those of one that adds them up
ROWS, SUMMED = 16, 64


def add_totals(block: Block, stats: Sequence[Tensor], room: int) -> None:
    """Write sums and numbers of the negatives' logits into the statistics: those of all keys less the positives', and
    less those of excluded pairs.

    room: bytes of memory for sums of features by id.
    """
    excluded = [torch.zeros_like(side) for side in stats] if have_ids(block.rows, block.cols) else []
    if excluded:
        label_sums.add_totals(_of_equal_ids(block), excluded, room)
    given = _features(block, excluded or stats, "excluded") | {"sums_ptr": _sums(block, [])}
    for name, side in zip(("row", "col"), (stats[0], stats[-1]), strict=True):
        given |= {f"{name}_stats_ptr": side, f"{name}_stats_stride": side.stride(0)}
    longest = max(side.shape[1] for side in stats)
    run(
        kernels.add_totals, (tiles_of(longest, ROWS), len(stats)), constants_ptr=block.constants,
        EXCLUDED=bool(excluded), ROWS=ROWS, BLOCK=BLOCK, **given,
    )  # fmt: skip


def without_shares(block: Block) -> tuple[list[Tensor], Block]:
    """The vectors c [N] and, of a symmetric loss, d [M], and the block as if its rows and columns had no such share.

    No vectors, and the block itself, where the tiles have the smoothing.
    """
    if not block.sums_smoothing:
        return [], block
    sides, given, shares = [block.rows, block.cols], directions(block), list[Tensor]()
    for index, (state, coefficient) in enumerate(block.directions):
        out = state.new_empty(1 + len(state), len(coefficient))
        sides[index] = replace(sides[index], state=out[1:])
        shares.append(out)
    run(
        kernels.shares, (tiles_of(max(x.shape[1] for x in shares), BLOCK), len(shares)), N=len(block.rows),
        M=len(block.cols), row_out_ptr=shares[0], col_out_ptr=shares[-1], STATE=len(shares[0]) - 1, BLOCK=BLOCK,
        **given,
    )  # fmt: skip
    return [out[0] for out in shares], replace(block, rows=sides[0], cols=sides[1])


def add_gradients(
    block: Block, shares: Sequence[Tensor], u: Tensor | None, v: Tensor | None, sums: Tensor, room: int
) -> None:
    """Subtract c_i + d_j from the gradient of pairs that count: from u, v, and Σ g · ⟨q, k⟩, the second of `sums`.

    room: bytes of memory for sums of features by id.
    """
    lengths, given = [0 if x is None else len(x) for x in (u, v)], dict[str, Any]()
    for name, x, share in (("row", u, shares[0]), ("col", v, shares[-1])):
        out = sums[None] if x is None else x
        given |= {f"{name}_out_ptr": out, f"{name}_out_stride": out.stride(0), f"{name}_shares_ptr": share}
    run(
        kernels.add_gradients, (max(1, tiles_of(max(lengths), ROWS)), 1 if v is None else 2), N=lengths[0],
        M=lengths[1], sums_ptr=_sums(block, shares), inner_ptr=sums[1:], D=block.rows.features.shape[1],
        COLUMNS=len(shares) == 2, U=u is not None, ROWS=ROWS, BLOCK=BLOCK, **given,
    )  # fmt: skip
    if have_ids(block.rows, block.cols):
        # all keys had their share
        inner = torch.zeros_like(shares[0])
        label_sums.add_gradients(_of_equal_ids(block, shares), u, v, inner, room)
        sums[1] += inner.sum(dtype=sums.dtype)


def _features(block: Block, vectors: Sequence[Tensor], name: str) -> dict[str, Any]:
    """Features of rows and columns as the kernels read them, and a tensor of each direction by this name."""
    sides = (("row", block.rows.features, vectors[0]), ("col", block.cols.features, vectors[-1]))
    given: dict[str, Any] = {"N": len(block.rows), "M": len(block.cols), "D": block.rows.features.shape[1]}
    for side, x, vector in sides:
        given |= {f"{side}_x_ptr": x, f"{side}_x_row_stride": x.stride(0), f"{side}_x_stride": x.stride(1)}
        given |= {f"{side}_{name}_ptr": vector}
    return given


def _sums(block: Block, shares: Sequence[Tensor]) -> Tensor:
    """Σ q_i and Σ k_j [2, 1, D] in float32; shares: and behind each that of features times them [2, 2, D]."""
    given, kinds = _features(block, shares or [block.constants], "shares"), 2 if shares else 1
    programs = tiles_of(max(given["N"], given["M"]), SUMMED)
    out = block.constants.new_empty(2, programs, kinds, given["D"])
    run(
        kernels.feature_sums, (programs, 2, tiles_of(given["D"], BLOCK)), out_ptr=out, KINDS=kinds,
        COLUMNS=len(shares) == 2, ROWS=SUMMED, BLOCK=BLOCK, **given,
    )  # fmt: skip
    return out.sum(1)


def _of_equal_ids(block: Block, shares: Sequence[Tensor] = ()) -> Block:
    """The block as if the pairs that equal ids exclude were its positives; shares: and the negatives of these their
    targets.
    """
    sides = [replace(side, labels=side.ids, state=None, coefficient=None) for side in (block.rows, block.cols)]
    order = sorting.ordered(sides[0], sides[1], exclude_self=True)
    singles = torch.full_like(order.rows, -1), torch.full_like(order.cols, -1)
    for at, share in enumerate(shares):
        # the target of each positive is 1
        ones = torch.ones_like(share).expand(len(SoftmaxState._fields), -1)
        sides[at] = replace(sides[at], state=ones, coefficient=-share)
    runs = Runs(order, singles, one_way=not block.loss.symmetric)
    return Block(sides[0], sides[1], block.constants, Softmax(symmetric=block.loss.symmetric), runs=runs)
