"""Positives that are few pairs of a tile, as lists of their rows and columns, on a CPU.

Below `softmax.py` and `decoupled.py`. A mask [I, J] of positives costs as much as exponentials in every operation that
reads it; of the listed pairs each operation is as long as the list.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile.losses.base import FEW, SPREAD, Diagonal, Direct, Finished, PairLoss, Tile, fill

# a diagonal, or row and column of each pair
Pairs = Diagonal | tuple[Tensor, Tensor]
# share of a tile's pairs up to which those of a direct loss are listed, and most of a row: their exponentials are added
# one by one, which would round sums of many like terms in one direction
MOST, TERMS = 1 / 8, 64


def few_pairs(positive: Tensor, most: float = FEW) -> tuple[Tensor, Tensor] | None:
    """Row and column of each positive; None if they are many, or on a device, where a count would wait."""
    if positive.device.type != "cpu":
        return None
    # in NumPy, which takes a sixth of the time of torch's `nonzero`
    marks = positive.contiguous().numpy()
    if np.count_nonzero(marks) > most * marks.size:
        return None
    row, column = np.divmod(np.flatnonzero(marks), positive.shape[1])
    return torch.from_numpy(row), torch.from_numpy(column)


def direct_by_pairs(loss: PairLoss, tile: Tile, pairs: Pairs | None = None) -> Direct | None:
    """The loss of a tile whose rows have any number of positives, and its gradient.

    pairs: the positives, if they are listed. With the log-sum-exps n_i of the negatives and p_i of the positives P(i),
    and the mean m_i of the positives' logits,

        softplus(n_i − p_i) + (p_i − m_i)           `Softmax`
        softplus(n_i − p_i) + log |P(i)|            `SoftmaxInside`
        n_i − m_i                                   `Decoupled`

    None where positives are many, and where logits lie so far apart that exponentials of one top underflow.
    """
    x, bounds, symmetric, formula = tile.x, tile.bounds, loss.symmetric, loss.formula
    assert formula is not None
    if bounds is None or not all(map(math.isfinite, bounds)) or bounds[1] - bounds[0] > SPREAD:
        return None
    (n, m), decoupled = x.shape, formula.denominator == "negatives"
    pairs = pairs or (few_pairs(tile.positive, MOST) if isinstance(tile.positive, Tensor) else tile.positive)
    if pairs is None or (symmetric and n != m):
        return None
    if isinstance(pairs, Diagonal):
        rows, cols = pairs.along(x)
        pairs = (
            torch.arange(rows.start, rows.stop, device=x.device), torch.arange(cols.start, cols.stop, device=x.device),
        )  # fmt: skip
    sides = pairs[: 1 + symmetric]
    numbers = torch.stack([side.bincount(minlength=n) for side in sides]).to(x.dtype)
    if numbers.numel() and numbers.max() > TERMS:
        return None
    at = x[pairs].sub_(bounds[1])
    fill(x, pairs, -torch.inf).sub_(bounds[1]).exp_()
    # of the negatives
    totals = torch.stack([x.sum(dim) for dim in (1, 0)[: 1 + symmetric]])
    exponentials = at.exp()

    def of_rows(y: Tensor) -> Tensor:
        return torch.stack([totals.new_zeros(n).index_add_(0, side, y) for side in sides])

    counted = (numbers > 0) & (totals > 0) if decoupled else numbers > 0
    several = numbers.clamp(min=1)
    means = of_rows(at).div_(several)
    if decoupled:
        positives = gap = torch.zeros_like(totals)
        losses = totals.masked_fill(totals == 0, 1.0).log().sub_(means)
    else:
        positives = of_rows(exponentials).masked_fill_(numbers == 0, 1.0)
        logs = positives.log()
        gap = totals.log().sub_(logs)
        losses = F.softplus(gap, threshold=SPREAD)
        # exactly 0 for one positive
        losses += several.log() if formula.inside else logs.sub_(means).masked_fill_(numbers == 1, 0.0)
    losses.masked_fill_(~counted, 0.0)

    def pair_grad(coefficients: Tensor | float, keep: bool) -> Tensor:
        factors = torch.zeros_like(totals).add_(coefficients).masked_fill_(~counted, 0.0)
        weights = factors / (totals + positives).masked_fill_(~counted, 1.0)
        weight = weights[0][:, None] + weights[1] if symmetric else weights.T
        grad = x * weight if keep else x.mul_(weight)
        missing, shares, of_pairs = torch.sigmoid(gap), several.reciprocal(), torch.zeros_like(at)
        for direction, side in enumerate(sides):
            if decoupled:
                value = shares[direction][side].neg_()
            else:
                # probability among the positives alone: exactly 1 when there is one
                among = exponentials / positives[direction][side]
                value = torch.zeros_like(among) if formula.inside else among - shares[direction][side]
                value.addcmul_(among, missing[direction][side], value=-1)
            of_pairs.addcmul_(value, factors[direction][side])
        return fill(grad, pairs, of_pairs)

    counts = counted.to(x.dtype)
    results = [Finished(each, count, each.new_empty(0, n)) for each, count in zip(losses, counts, strict=True)]
    return Direct(results, pair_grad, every=bool(counted.all()))
