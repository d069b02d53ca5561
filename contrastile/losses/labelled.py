"""Positives by few labels on a CPU: sums over labels are products with their indicators, without a mask of pairs.

A softmax loss of tiles whose rows meet all columns, as `Softmax.direct`. With rows' and columns' indicators R [I, G]
and C [J, G] of G labels, each 1 in one place of a row, and logits x [I, J],

    Σ_{p ∈ P(i)} x_ip = (x C)_{i, label i}        [j ∈ P(i)] = (R Cᵀ)_ij

so that masks, which take longer than exponentials, are not made. With two positives or more of a row its loss is log 2
at least, and the difference of its log-sum-exp and their mean keeps its digits.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile.losses.base import FEW, SPREAD, Diagonal, Direct, Finished, PairLoss, Shard, Tile, fill

# terms of a product that are added one by one, which would round sums of many like terms in one direction
TERMS = 64


class Labels(NamedTuple):
    """Labels of a tile's rows and columns, numbered from 0."""

    # [I] and [J] labels; [I, G] and [J, G] indicators; [I] and [J] numbers of positives
    numbers: tuple[Tensor, Tensor]
    indicators: tuple[Tensor, Tensor]
    counts: tuple[Tensor, Tensor]


def few_labels(loss: PairLoss, rows: Shard, cols: Shard, bounds: tuple[float, float] | None) -> Labels | None:
    """The labels of a tile that has all columns of its rows; None where masks are needed, or as fast.

    Masks are needed where pairs are excluded by ids, where logits lie so far apart that exponentials of one top
    underflow, and where a row, or a column of a symmetric loss, has fewer than two positives: the difference of a
    probability and its target cancels for one positive.
    """
    if bounds is None or not all(map(math.isfinite, bounds)) or bounds[1] - bounds[0] > SPREAD:
        return None
    by_label = rows.diagonal is None and rows.positives is None and (rows.ids is None or cols.ids is None)
    if rows.labels is None or cols.labels is None or not by_label or (loss.symmetric and len(rows) != len(cols)):
        return None
    values, numbers = torch.unique(torch.cat([rows.labels, cols.labels]), return_inverse=True)
    if len(values) * FEW > 1:
        return None
    of_sides = numbers.split([len(rows), len(cols)])
    sizes = [side.bincount(minlength=len(values)) for side in of_sides]
    # of the other side
    counts = sizes[1][of_sides[0]], sizes[0][of_sides[1]]
    if loss.exclude_self:
        first = rows.start - cols.start
        if first < 0 or first + len(rows) > len(cols):
            return None
        # an example may have another label as a key
        itself = (of_sides[0] == of_sides[1][first : first + len(rows)]).long()
        counts[0].sub_(itself)
        counts[1][first : first + len(rows)] -= itself
    if min(int(side.min()) for side in counts[: 1 + loss.symmetric]) < 2:
        return None
    return Labels(of_sides, (F.one_hot(of_sides[0], len(values)), F.one_hot(of_sides[1], len(values))), counts)


def direct_by_labels(loss: PairLoss, tile: Tile) -> Direct:
    """The loss of a tile with few labels, and its gradient: see `Softmax`."""
    x, itself, symmetric, smoothing = tile.x, tile.excluded, loss.symmetric, getattr(loss, "label_smoothing", 0.0)
    labels: Labels = tile.labels
    assert tile.bounds is not None
    assert itself is None or isinstance(itself, Diagonal)
    rows, cols = (side.to(x.dtype) for side in labels.indicators)
    own = [side[:, None] for side in labels.numbers[: 1 + symmetric]]
    counts = torch.stack([side.to(x.dtype) for side in labels.counts[: 1 + symmetric]])
    # keys of a row; rows and columns of a symmetric loss are as many
    keys = x.shape[1] - (itself is not None)

    # relative to the largest logit of the tile
    fill(x.sub_(tile.bounds[1]), itself, 0.0)
    sums = [_sums(*given) for given in ((x, cols), (x.T, rows))[: 1 + symmetric]]
    mean = torch.stack([side.gather(1, at)[:, 0] for side, at in zip(sums, own, strict=True)]).div_(counts)
    fill(x.exp_(), itself, 0.0)
    totals = torch.stack([x.sum(dim) for dim in (1, 0)[: 1 + symmetric]])
    losses = totals.log().sub_(mean)
    if smoothing:
        losses += mean.sub_(torch.stack([side.sum(1) for side in sums]), alpha=1 / keys).mul_(smoothing)

    def pair_grad(coefficients: Tensor | float, keep: bool) -> Tensor:
        weights = totals.reciprocal().mul_(coefficients)
        targets = counts.reciprocal().mul_(coefficients).mul_(1 - smoothing)[..., None]
        weight = weights[0][:, None] + weights[1] if symmetric else weights.T
        grad = x * weight if keep else x.mul_(weight)
        if symmetric:
            left, right = torch.cat([rows * targets[0], rows], 1), torch.cat([cols, cols * targets[1]], 1)
        else:
            left, right = rows * targets[0], cols
        grad.addmm_(left, right.T, alpha=-1)
        if smoothing:
            share = torch.zeros_like(counts).add_(coefficients).mul_(smoothing / keys)
            grad.sub_(share[0][:, None] + share[1] if symmetric else share.T)
        return fill(grad, itself, 0.0)

    # every row has a loss, and a state is not needed
    count = losses.new_ones(()).expand(losses.shape[1])
    return Direct([Finished(each, count, each.new_empty(0, len(each))) for each in losses], pair_grad)


def _sums(x: Tensor, indicators: Tensor) -> Tensor:
    """x @ indicators, in parts of few terms."""
    parts = len(indicators) // TERMS
    whole = parts * TERMS
    of_parts = indicators[:whole].unflatten(0, (parts, TERMS))
    total = (x[:, :whole].unflatten(1, (parts, TERMS)).transpose(0, 1) @ of_parts).sum(0)
    return total.addmm_(x[:, whole:], indicators[whole:])
