"""InfoNCE: the cross-entropy of a softmax over keys (van den Oord et al. 2018; Inf-CL, equations 1 to 4).

For row i with positives P(i) among the keys A(i) that are not excluded, and ε the label smoothing,

    loss_i = log Σ_{j ∈ A(i)} exp x_ij − (1 − ε) mean_{p ∈ P(i)} x_ip − ε mean_{j ∈ A(i)} x_ij .

Positives and negatives are summed apart. With n_i and p_i the two log-sum-exps, the first two terms are
`log(1 + exp(n_i − p_i)) + (p_i − mean x_ip)`, whose second part is exactly 0 for one positive: a model that is
confident to 1e-8 keeps all digits of its loss, and of its gradient, where `lse − x` would cancel
(docs/numerics.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from contrastile.losses.base import Finished, PairLoss, Side, Tile

# exp(−60) is still a normal number in float32, with room for a sum below it
SPREAD = 60.0


class SoftmaxStats(NamedTuple):
    """What is kept per row; `total · exp(top)` is a sum of exponentials."""

    top: Tensor
    total: Tensor
    positive_top: Tensor
    positive_total: Tensor
    positive_sum: Tensor
    positive_count: Tensor
    # over all pairs that count, for label smoothing
    logit_sum: Tensor
    kept: Tensor


class SoftmaxState(NamedTuple):
    """What the backward needs per row: p_ij = exp(x_ij − top) · inverse, rounded less than exp(x_ij − lse)."""

    # the largest logit of all keys that count, and 1 / the sum of exponentials relative to it
    top: Tensor
    inverse: Tensor
    # the same over the positives alone
    positive_top: Tensor
    positive_inverse: Tensor
    # probability of not being a positive, without cancellation
    missing: Tensor
    # 1 / number of positives
    positive_share: Tensor
    # 1 / number of keys that count
    share: Tensor


@dataclass(frozen=True)
class Softmax(PairLoss):
    """Cross-entropy over the keys of each row, and over the rows of each key too when symmetric."""

    symmetric: bool = False
    exclude_self: bool = False
    label_smoothing: float = 0.0
    # adding the same number to every logit changes nothing
    uses_bias: bool = False
    pairwise: bool = False

    def smoothed(self, label_smoothing: float) -> Softmax:
        return replace(self, label_smoothing=label_smoothing)

    def init(self, n: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        stats = torch.zeros(len(SoftmaxStats._fields), n, dtype=dtype, device=device)
        named = SoftmaxStats(*stats)
        named.top.fill_(-torch.inf)
        named.positive_top.fill_(-torch.inf)
        return stats

    def absorb(self, tile: Tile) -> tuple[Tensor, ...]:
        x, positive = tile.x, tile.positive
        dims = (1, 0) if self.symmetric else (1,)
        sides = [self.init(x.shape[1 - dim], dtype=x.dtype, device=x.device) for dim in dims]
        others = x if positive is None else x.masked_fill(positive, -torch.inf)
        # where no logit lies far under the highest one, rows and columns share their exponentials
        shared = None
        if tile.bounds is not None and tile.bounds[1] - tile.bounds[0] <= SPREAD:
            shared = (others - tile.bounds[1]).exp_()
        for dim, stats in zip(dims, sides, strict=True):
            named = SoftmaxStats(*stats)
            if shared is not None:
                torch.sum(shared, dim, out=named.total)
                named.top.fill_(tile.bounds[1] if tile.bounds else 0.0).masked_fill_(named.total == 0, -torch.inf)
            else:
                _exponential_sum(others, dim, named.top, named.total)
            if positive is not None:
                _exponential_sum(x.masked_fill(~positive, -torch.inf), dim, named.positive_top, named.positive_total)
                torch.sum(x.masked_fill(~positive, 0.0), dim, out=named.positive_sum)
                torch.sum(positive, dim, dtype=x.dtype, out=named.positive_count)
            if self.label_smoothing:
                counted = x if tile.excluded is None else x.masked_fill(tile.excluded, 0.0)
                torch.sum(counted, dim, out=named.logit_sum)
                named.kept.fill_(x.shape[dim])
                if tile.excluded is not None:
                    named.kept.sub_(tile.excluded.sum(dim))
        return tuple(sides)

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        merged = a + b
        one, other, both = SoftmaxStats(*a), SoftmaxStats(*b), SoftmaxStats(*merged)
        _merge_exponentials(one.top, one.total, other.top, other.total, both.top, both.total)
        _merge_exponentials(
            one.positive_top,
            one.positive_total,
            other.positive_top,
            other.positive_total,
            both.positive_top,
            both.positive_total,
        )
        return merged

    def finish(self, stats: Tensor) -> Finished:
        named = SoftmaxStats(*stats)
        counts = (named.positive_count > 0).to(stats.dtype)
        # differences of maxima first: they are exact where their logits are alike
        gap = (named.top - named.positive_top) + (named.total.log() - named.positive_total.log())
        positive_share = 1 / named.positive_count.clamp(min=1)
        mean = named.positive_sum * positive_share
        zero = torch.zeros_like(gap)
        loss = torch.logaddexp(zero, gap) + ((named.positive_top - mean) + named.positive_total.log())
        share = zero
        if self.label_smoothing:
            share = 1 / named.kept.clamp(min=1)
            loss = loss + self.label_smoothing * (mean - named.logit_sum * share)
        top, total = torch.empty_like(zero), torch.empty_like(zero)
        _merge_exponentials(named.top, named.total, named.positive_top, named.positive_total, top, total)
        state = SoftmaxState(
            _finite(top),
            1 / total,
            _finite(named.positive_top),
            1 / named.positive_total.masked_fill(counts == 0, 1.0),
            torch.sigmoid(gap),
            positive_share,
            share,
        )
        # a row without a positive has no loss; NaN must stay NaN elsewhere
        return Finished(torch.where(counts > 0, loss, zero), counts, torch.stack(state))

    def pair_grad(self, tile: Tile, rows: Side, cols: Side) -> Tensor:
        x = tile.x
        assert rows.state is not None
        assert rows.coefficient is not None
        directions = [(SoftmaxState(*rows.state[:, :, None]), rows.coefficient[:, None])]
        if self.symmetric:
            assert cols.state is not None
            assert cols.coefficient is not None
            directions.append((SoftmaxState(*cols.state[:, None, :]), cols.coefficient[None, :]))
        grad = self._negative_grad(tile, directions)
        if tile.positive is not None:
            grad = torch.where(tile.positive, self._positive_grad(x, directions), grad)
        if self.label_smoothing:
            for state, coefficient in directions:
                grad.sub_(state.share * coefficient * self.label_smoothing)
            if tile.excluded is not None:
                grad.masked_fill_(tile.excluded, 0.0)
        return grad

    def _negative_grad(self, tile: Tile, directions: list[tuple[SoftmaxState, Tensor]]) -> Tensor:
        """Σ over directions of p · coefficient, with one exponential for all of them where no logit lies far below."""
        x = tile.x
        if tile.bounds is not None:
            top = max(float(state.top.max()) for state, _ in directions)
            if top - tile.bounds[0] <= SPREAD:
                weight = sum(
                    (
                        state.top.neg().add_(top).exp_() * state.inverse * coefficient
                        for state, coefficient in directions
                    ),
                    x.new_zeros(()),
                )
                return (x - top).exp_().mul_(weight)
        (state, coefficient), *more = directions
        grad = (x - state.top).exp_().mul_(state.inverse * coefficient)
        for state, coefficient in more:
            grad.addcmul_((x - state.top).exp_(), state.inverse * coefficient)
        return grad

    def _positive_grad(self, x: Tensor, directions: list[tuple[SoftmaxState, Tensor]]) -> Tensor:
        """p − (1 − ε)/|P| where p is the probability of a positive, written so that p → 1 loses no digits."""
        grad = torch.zeros_like(x)
        for state, coefficient in directions:
            # probability among the positives alone: exactly 1 when there is one
            among = (x - state.positive_top).exp_().mul_(state.positive_inverse)
            value = (among - state.positive_share) - among * state.missing
            if self.label_smoothing:
                value = value + self.label_smoothing * state.positive_share
            grad.addcmul_(value, coefficient)
        return grad


def _finite(top: Tensor) -> Tensor:
    """The maximum to subtract: 0 where there was nothing to take one of."""
    return top.masked_fill(top == -torch.inf, 0.0)


def _exponential_sum(x: Tensor, dim: int, top: Tensor, total: Tensor) -> None:
    torch.amax(x, dim, out=top)
    torch.sum((x - _finite(top).unsqueeze(dim)).exp_(), dim, out=total)


def _merge_exponentials(
    top_a: Tensor, total_a: Tensor, top_b: Tensor, total_b: Tensor, top: Tensor, total: Tensor
) -> None:
    torch.maximum(top_a, top_b, out=top)
    safe = _finite(top)
    torch.add(total_a * (top_a - safe).exp(), total_b * (top_b - safe).exp(), out=total)
