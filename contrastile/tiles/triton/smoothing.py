"""Label smoothing as sums of features, above `label_sums.py`: every key that counts has the same share.

A row's mean logit of all keys is linear in their features, and so is its gradient. With ε times the gradient of a row's
loss over its number of keys c_i, and d_j likewise of a column,

    Σ_j x_ij = scale · ⟨q_i, K⟩        u_i −= c_i K + Σ_j d_j k_j        K = Σ_j k_j

Pairs of equal ids are excluded. Beside positives on the diagonal they are those that labels would make positives, and
their part is subtracted, by the kernels of such sums.

The tile kernels compute all pairs as without smoothing, and may keep their exponentials. With smoothing in the tiles
32,768² pairs of 512 features take 1.55 times as long as without on an H200, with sums 1.04 to 1.1 times.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from contrastile.losses.softmax import Softmax, SoftmaxState, SoftmaxStats
from contrastile.tiles.triton import label_sums, sorting
from contrastile.tiles.triton.block import Block, Runs
from contrastile.tiles.triton.launch import add_at_once
from contrastile.tiles.triton.positions import listed_products


def add_totals(block: Block, stats: Sequence[Tensor], scale: Tensor, room: int) -> None:
    """Write sums and numbers of the negatives' logits into the statistics: those of all keys less the positives', and
    less those of excluded pairs.

    room: bytes of memory for sums of features by id.
    """
    sides = block.rows.features, block.cols.features
    excluded = [torch.zeros_like(side) for side in stats] if block.has_ids else []
    if excluded:
        label_sums.add_totals(_of_equal_ids(block), excluded, room)
    for at, (x, others, side) in enumerate(zip(sides, sides[::-1], stats, strict=False)):
        named = SoftmaxStats(*side)
        first = torch.zeros(len(x), 1, dtype=torch.int64, device=x.device)
        logits = scale * listed_products(x, others.sum(0, dtype=side.dtype)[None], first, side.dtype)[:, 0]
        count = named.positive_count
        logits -= named.positive_sum + torch.where(count > 0, named.positive_top, 0.0) * count
        count = len(others) - count
        if excluded:
            of_ids = SoftmaxStats(*excluded[at])
            logits, count = logits - of_ids.positive_sum, count - of_ids.positive_count
        named.logit_count.copy_(count)
        named.logit_sum.copy_(logits - torch.where(count > 0, named.top, 0.0) * count)


def without_shares(block: Block) -> tuple[list[Tensor], Block]:
    """The vectors c [N] and, of a symmetric loss, d [M], and the block as if its rows and columns had no such share.

    No vectors, and the block itself, where the tiles have the smoothing.
    """
    if not block.sums_smoothing:
        return [], block
    at, sides, shares = SoftmaxState._fields.index("share"), [block.rows, block.cols], list[Tensor]()
    for index, (state, coefficient) in enumerate(block.directions):
        shares.append(state[at] * coefficient * block.epilogue.label_smoothing)
        state = state.clone()
        state[at] = 0.0
        sides[index] = replace(sides[index], state=state)
    return shares, replace(block, rows=sides[0], cols=sides[1])


def add_gradients(
    block: Block, shares: Sequence[Tensor], u: Tensor | None, v: Tensor | None, sums: Tensor, room: int
) -> None:
    """Subtract c_i + d_j from the gradient of pairs that count: from u, v, and Σ g · ⟨q, k⟩, the second of `sums`.

    room: bytes of memory for sums of features by id.
    """
    q, k, (c, *d) = block.rows.features, block.cols.features, shares
    # of a symmetric loss Σ k_j and Σ d_j k_j, and Σ q_i and Σ c_i q_i; of one direction the first and the last
    of_k = torch.stack([_weighed(k, None), *[_weighed(k, each) for each in d]])
    of_q = torch.stack([*[_weighed(q, None) for _ in d], _weighed(q, c)])
    if u is not None:
        u.addmm_(torch.stack([c, *[torch.ones_like(c) for _ in d]], 1), of_k, alpha=-1)
    if v is not None:
        # the last columns may have no sums
        v.addmm_(torch.stack([*d, torch.ones(len(k), device=v.device)], 1)[: len(v)], of_q, alpha=-1)
    sums[1] -= (of_q.flip(0) * of_k).sum()
    if block.has_ids:
        # all keys had their share
        inner = torch.zeros_like(c)
        label_sums.add_gradients(_of_equal_ids(block, shares), u, v, inner, room)
        sums[1] += inner.sum(dtype=sums.dtype)


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


def _weighed(x: Tensor, weights: Tensor | None) -> Tensor:
    """Σ_i w_i · x_i [D] in float32; None: with weights of 1."""
    if weights is None:
        return x.sum(0, dtype=torch.float32)
    unit = weights.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    whole = weights / unit
    # in two pieces of 16 bits
    left = whole.to(x.dtype)
    pieces = torch.stack([left, (whole - left).to(x.dtype)])
    out = torch.empty(2, x.shape[1], dtype=torch.float32, device=x.device)
    add_at_once(out, pieces, x, 0.0)
    return out.sum(0) * unit
