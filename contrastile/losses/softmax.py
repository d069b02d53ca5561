"""InfoNCE: the cross-entropy of a softmax over keys (van den Oord et al. 2018; Inf-CL, equations 1 to 4).

For row i with positives P(i) among the keys A(i) that are not excluded, and ε the label smoothing,

    loss_i = log Σ_{j ∈ A(i)} exp x_ij − (1 − ε) mean_{p ∈ P(i)} x_ip − ε mean_{j ∈ A(i)} x_ij .

Positives and negatives are summed separately. With n_i and p_i the log-sum-exps of negatives and positives, the first
two terms are `log(1 + exp(n_i − p_i)) + (p_i − mean x_ip)`, whose second part is exactly 0 for one positive. So a loss
of 1e-8 and its gradient keep all digits, which cancel in `lse − x` (docs/numerics.md). Sums of logits are kept relative
to the largest of them, as the exponentials are: a mean of logits near 100 would be rounded by 1e-5, and the loss is a
difference of such means.

`SoftmaxInside` has the mean of the positives inside the logarithm (Khosla et al. 2020, equation 3; MIL-NCE, Miech et
al. 2020),

    loss_i = −log( 1 / |P(i)| · Σ_{p ∈ P(i)} exp x_ip / Σ_{j ∈ A(i)} exp x_ij ) ,

which is low with one similar positive. The mean of logarithms is low only if all positives are similar.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile._errors import SMOOTHING, number
from contrastile.losses.base import SPREAD, Diagonal, Direct, Finished, Formula, PairLoss, Shard, Tile, fill
from contrastile.losses.pairs import MOST, direct_by_pairs, few_pairs


class SoftmaxStats(NamedTuple):
    """Per row, of the negatives and then of the positives: top, Σ exp(x − top), Σ (x − top) and their number.

    The negatives' last two are 0 without label smoothing. A top is any number near the largest logit.
    """

    top: Tensor
    total: Tensor
    logit_sum: Tensor
    logit_count: Tensor
    positive_top: Tensor
    positive_total: Tensor
    positive_sum: Tensor
    positive_count: Tensor


class SoftmaxState(NamedTuple):
    """Numbers of a row for the backward: p_ij = exp(x_ij − top) · inverse, which rounds less than exp(x_ij − lse)."""

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
    """Cross-entropy over the keys of each row (van den Oord et al. 2018), and over the rows of each key too when
    symmetric (Radford et al. 2021).

    Naively `F.cross_entropy(x, positives)` with logits x [N, M], or the mean of it and of the transposed. With
    `exclude_self` row i and key i are the same example, which is not compared with itself (SimCLR, SupCon). Positives
    are then listed or given by labels, and the first N keys are the rows themselves.

    >>> from contrastile import contrast
    >>> views = torch.nn.functional.normalize(torch.randn(8, 16), dim=-1)
    >>> other = torch.arange(8).roll(4)
    >>> contrast(views, views, scale=10.0, loss=Softmax(exclude_self=True), positives=other).shape
    torch.Size([])
    """

    state_rows: ClassVar[int] = len(SoftmaxState._fields)
    formula = Formula("exponential", denominator="all")
    unsmoothed: ClassVar[tuple[str, str] | None] = None

    symmetric: bool = False
    exclude_self: bool = False
    label_smoothing: float = 0.0
    # adding the same number to every logit changes nothing
    uses_bias: bool = False
    pairwise: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        smoothing = self.label_smoothing
        number("label_smoothing", smoothing, lambda share: 0.0 <= share < 1.0, *SMOOTHING)
        if smoothing and self.unsmoothed is not None:
            super().smoothed(smoothing)

    def smoothed(self, label_smoothing: float) -> PairLoss:
        return replace(self, label_smoothing=label_smoothing)

    def init(self, n: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        stats = torch.zeros(len(SoftmaxStats._fields), n, dtype=dtype, device=device)
        # the two tops
        stats[:: len(SoftmaxStats._fields) // 2] = -torch.inf
        return stats

    def absorb(self, tile: Tile) -> tuple[Tensor, ...]:
        x = tile.x
        dims = (1, 0) if self.symmetric else (1,)
        stats = [self.init(x.shape[1 - dim], dtype=x.dtype, device=x.device) for dim in dims]
        sides = [SoftmaxStats(*side) for side in stats]
        for dim, named in zip(dims, sides, strict=True):
            if tile.positive is not None:
                _absorb_positives(x, tile.positive, dim, named)
        fill(x, tile.positive, -torch.inf)
        # where no logit lies far under the highest one, rows and columns share their exponentials
        spread = torch.inf if tile.bounds is None or self.label_smoothing else tile.bounds[1] - tile.bounds[0]
        top = tile.bounds[1] if tile.bounds is not None and spread <= SPREAD else None
        if top is not None:
            x.sub_(top).exp_()
        for dim, named in zip(dims, sides, strict=True):
            if top is not None:
                torch.sum(x, dim, out=named.total)
                named.top.fill_(top).masked_fill_(named.total == 0, -torch.inf)
            else:
                # nothing reads the logits after the last direction
                last = dim == dims[-1] and not self.label_smoothing
                _exponential_sum(x, dim, named.top, named.total, use_up=last)
            if self.label_smoothing:
                # −∞ are the positives alone where nothing is excluded
                alone = tile.positive if isinstance(tile.positive, Diagonal) and tile.excluded is None else None
                _logit_sum(x, dim, named.top, named.logit_sum, named.logit_count, alone)
        return tuple(stats)

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        # the negatives' four and the positives'
        return _merge(*(stats.unflatten(0, (2, -1)).transpose(0, 1) for stats in (a, b))).transpose(0, 1).flatten(0, 1)

    def finish(self, stats: Tensor) -> Finished:
        named = SoftmaxStats(*stats)
        counts = (named.positive_count > 0).to(stats.dtype)
        # fused sums by label include the positives' exponentials in the first total (`tiles/triton/label_sums.py`)
        included = (named.positive_count > 0) & (named.positive_total == 0)
        positive_log = named.positive_total.masked_fill(included, 1.0).log()
        # differences of maxima first: they are exact where their logits are alike
        gap = (named.top - named.positive_top) + (named.total.log() - positive_log)
        positive_share = 1 / named.positive_count.clamp(min=1)
        # mean of the positives relative to their top, as that of the negatives below
        mean = named.positive_sum * positive_share
        share = zero = torch.zeros_like(gap)
        # log Σ exp of the positives above their mean: exactly 0 for one positive
        above_mean = (positive_log - mean).masked_fill((named.positive_count == 1) & ~included, 0.0)
        loss = torch.where(included, gap, torch.logaddexp(zero, gap)) + above_mean
        if self.label_smoothing:
            share = 1 / (named.positive_count + named.logit_count).clamp(min=1)
            others = named.logit_sum / named.logit_count.clamp(min=1)
            # difference of the positives' mean and the negatives'
            pull = (named.positive_top - finite(named.top)) + (mean - others)
            loss = loss + self.label_smoothing * (pull * (named.logit_count * share))
        _, top, total = _union(*named[:2], *named[4:6])
        state = SoftmaxState(
            top,
            # without a key that counts, 0 instead of 0 · ∞
            1 / total.masked_fill(total == 0, 1.0),
            finite(named.positive_top),
            1 / named.positive_total.masked_fill((counts == 0) | included, 1.0),
            torch.sigmoid(gap).masked_fill(included, 1.0),
            positive_share,
            share,
        )
        # a row without a positive has no loss; NaN must stay NaN elsewhere
        return Finished(torch.where(counts > 0, loss, zero), counts, torch.stack(state))

    def pair_grad(self, tile: Tile, rows: Shard, cols: Shard) -> Tensor:
        x, positive = tile.x, tile.positive
        directions = self._directions(rows, cols, (slice(None), None), (None, slice(None)))
        if isinstance(positive, Diagonal):
            along = positive.along(x)
            on_diagonal = self._positive_grad(positive.of(x), self._directions(rows, cols, along[:1], along[1:]))
            grad = self._negative_grad(tile, directions)
            positive.of(grad).copy_(on_diagonal)
        elif positive is not None and (pairs := few_pairs(positive)) is not None:
            at_positive = self._positive_grad(x[pairs], self._directions(rows, cols, pairs[:1], pairs[1:]))
            grad = fill(self._negative_grad(tile, directions), pairs, at_positive)
        elif positive is not None:
            at_positive = self._positive_grad(x, directions)
            grad = torch.where(positive, at_positive, self._negative_grad(tile, directions))
        else:
            grad = self._negative_grad(tile, directions)
        if self.label_smoothing:
            for state, coefficient in directions:
                grad.sub_(state.share * coefficient * self.label_smoothing)
            # 0, or NaN where an input is not finite
            fill(grad, tile.excluded, directions[0][1].flatten()[0] * 0)
        return grad

    def direct(self, tile: Tile) -> Direct | None:
        return self._direct(tile) if type(self) is Softmax else None

    def _direct(self, tile: Tile) -> Direct | None:
        x, bounds, where, smoothing = tile.x, tile.bounds, tile.positive, self.label_smoothing
        # a mean of logits leaves excluded pairs out
        if bounds is None or not all(map(math.isfinite, bounds)) or (smoothing and tile.excluded is not None):
            return None
        close = bounds[1] - bounds[0] <= SPREAD
        pairs = few_pairs(where, MOST) if isinstance(where, Tensor) else where
        if not (isinstance(pairs, Diagonal) or (pairs is not None and not self.symmetric and _one_each(pairs, len(x)))):
            return None if smoothing or pairs is None else direct_by_pairs(self, tile, pairs)
        if self.symmetric and not close:
            return None
        positive = (pairs.of(x) if isinstance(pairs, Diagonal) else x[pairs]).clone()
        fill(x, pairs, -torch.inf)
        top: Tensor | float = bounds[1]
        if not close:
            # a row without negatives has its positive alone
            most = x.amax(1)
            top = torch.where(most == -torch.inf, positive, most)
        # rows and columns share their exponentials
        x.sub_(top[:, None] if isinstance(top, Tensor) else top)
        positive.sub_(top)
        dims = (1, 0) if self.symmetric else (1,)
        if smoothing:
            below = torch.stack([fill(x, pairs, 0.0).sum(dim) for dim in dims])
            fill(x, pairs, -torch.inf)
        x.exp_()
        # of the negatives
        totals = torch.stack([x.sum(dim) for dim in dims])
        gap = totals.log().sub_(positive)
        # log(1 + exp(gap)), which is the gap itself behind the threshold
        losses = F.softplus(gap, threshold=SPREAD)
        if smoothing:
            # the positive above the mean of all
            M = x.shape[1]
            losses += below.sub_(positive, alpha=M - 1).mul_(-smoothing / M)

        def pair_grad(coefficients: Tensor | float, keep: bool) -> Tensor:
            weights = positive.exp().add(totals).reciprocal_().mul_(coefficients)
            weight = weights[0][:, None] + weights[1] if self.symmetric else weights.T
            grad = x * weight if keep else x.mul_(weight)
            of_positives = torch.sigmoid(gap)
            if smoothing:
                share = torch.zeros_like(gap).add_(coefficients).mul_(smoothing / x.shape[1])
                of_positives = of_positives.sub_(smoothing).mul_(coefficients).add_(share)
                grad.sub_(share[0][:, None] + share[1] if self.symmetric else share.T)
            else:
                of_positives.mul_(coefficients)
            return fill(grad, pairs, of_positives.sum(0).neg_())

        # every row has a loss, and a state is not needed
        count = losses.new_ones(()).expand(losses.shape[1])
        return Direct([Finished(loss, count, loss.new_empty(0, len(loss))) for loss in losses], pair_grad)

    def _directions(
        self, rows: Shard, cols: Shard, row_index: tuple[Any, ...], col_index: tuple[Any, ...]
    ) -> list[tuple[SoftmaxState, Tensor]]:
        """State and coefficient of the rows and, if symmetric, of the columns, indexed to meet each other's."""
        directions = []
        for side, index in [(rows, row_index), (cols, col_index)][: 1 + self.symmetric]:
            assert side.state is not None
            assert side.coefficient is not None
            directions.append((SoftmaxState(*side.state[(slice(None), *index)]), side.coefficient[index]))
        return directions

    def _negative_grad(self, tile: Tile, directions: list[tuple[SoftmaxState, Tensor]]) -> Tensor:
        """Σ over directions of p · coefficient, with one exponential for all of them where no logit lies far below."""
        x = tile.x
        if tile.bounds is not None:
            tops = [float(top) for state, _ in directions for top in torch.aminmax(state.top)]
            top = max(tops)
            # with positives outside the denominator, the top of a row may lie below its logits in this tile
            if top - min(tile.bounds[0], *tops) <= SPREAD:
                weights = [
                    state.top.neg().add_(top).exp_() * state.inverse * coefficient for state, coefficient in directions
                ]
                weight = sum(weights, x.new_zeros(()))
                return x.sub_(top).exp_().mul_(weight)
        (state, coefficient), *more = directions
        # in place if no other direction needs the logits: a new tile costs as much as its exponentials
        below = x - state.top if more else x.sub_(state.top)
        grad = below.exp_().mul_(state.inverse * coefficient)
        for state, coefficient in more:
            grad.addcmul_((x - state.top).exp_(), state.inverse * coefficient)
        return grad

    def _positive_grad(self, x: Tensor, directions: list[tuple[SoftmaxState, Tensor]]) -> Tensor:
        """p − (1 − ε)/|P| where p is the probability of a positive, written so that p → 1 loses no digits."""
        grad, inside = torch.zeros_like(x), self.formula is not None and self.formula.inside
        for state, coefficient in directions:
            # probability among the positives alone: exactly 1 when there is one
            among = (x - state.positive_top).exp_().mul_(state.positive_inverse)
            value = among * -state.missing
            if not inside:
                value = (among - state.positive_share) + value
            if self.label_smoothing:
                value = value + self.label_smoothing * state.positive_share
            grad.addcmul_(value, coefficient)
        return grad


@dataclass(frozen=True)
class SoftmaxInside(Softmax):
    """The softmax loss with the positives' probabilities averaged before the logarithm (SupCon in, Khosla et al. 2020).

    Naively, with logits x and `positive` [N, M],
    `x.logsumexp(1) - x.masked_fill(~positive, -inf).logsumexp(1) + positive.sum(1).log()`.

    >>> from contrastile import contrast
    >>> x, labels = torch.nn.functional.normalize(torch.randn(6, 16), dim=-1), torch.arange(6) // 3
    >>> contrast(x, x, scale=10.0, loss=SoftmaxInside(exclude_self=True), query_labels=labels, key_labels=labels).shape
    torch.Size([])
    """

    formula = Formula("exponential", denominator="all", inside=True)
    unsmoothed = "the mean inside", "Leave it out, or take the softmax loss."

    def direct(self, tile: Tile) -> Direct | None:
        return direct_by_pairs(self, tile) if type(self) is SoftmaxInside else None

    def finish(self, stats: Tensor) -> Finished:
        named, whole = SoftmaxStats(*stats), super().finish(stats)
        gap = (named.top - named.positive_top) + (named.total.log() - named.positive_total.log())
        loss = torch.logaddexp(torch.zeros_like(gap), gap) + named.positive_count.clamp(min=1).log()
        return whole._replace(loss=torch.where(whole.counts > 0, loss, torch.zeros_like(loss)))


def _absorb_positives(x: Tensor, positive: Diagonal | Tensor, dim: int, named: SoftmaxStats) -> None:
    if isinstance(positive, Diagonal):
        # at most one in a row or a column
        along = positive.along(x)[1 - dim]
        named.positive_top[along] = positive.of(x)
        named.positive_total[along].fill_(1.0)
        named.positive_count[along].fill_(1.0)
    elif (pairs := few_pairs(positive)) is not None:
        x = x[pairs]
        counted = x != -torch.inf
        x, of_row = x[counted], pairs[1 - dim][counted]
        below = x - named.positive_top.scatter_reduce_(0, of_row, x, "amax")[of_row]
        for total, terms in (
            (named.positive_total, below.exp()), (named.positive_sum, below), (named.positive_count, below.new_ones(1)),
        ):  # fmt: skip
            total.index_add_(0, of_row, terms.expand_as(below))
    else:
        x = x.masked_fill(~positive, -torch.inf)
        _exponential_sum(x, dim, named.positive_top, named.positive_total)
        _logit_sum(x, dim, named.positive_top, named.positive_sum, named.positive_count)


def _one_each(pairs: tuple[Tensor, Tensor], n: int) -> bool:
    """True if each of n rows has one of these pairs."""
    return len(pairs[0]) == n and torch.equal(pairs[0], torch.arange(n, device=pairs[0].device))


def finite(top: Tensor) -> Tensor:
    """The maximum to subtract: 0 for the maximum of an empty set."""
    return top.masked_fill(top == -torch.inf, 0.0)


def _exponential_sum(x: Tensor, dim: int, top: Tensor, total: Tensor, *, use_up: bool = False) -> None:
    torch.amax(x, dim, out=top)
    highest = finite(top).unsqueeze(dim)
    torch.sum((x.sub_(highest) if use_up else x - highest).exp_(), dim, out=total)


def _logit_sum(
    x: Tensor, dim: int, top: Tensor, logit_sum: Tensor, count: Tensor, excluded: Diagonal | None = None
) -> None:
    """Σ (x − top) of the logits that count, and their number; excluded: all that do not, if not read off x."""
    below = x - finite(top).unsqueeze(dim)
    if excluded is None:
        mask = x == -torch.inf
        torch.sum(mask.logical_not(), dim, dtype=x.dtype, out=count)
        below.masked_fill_(mask, 0.0)
    else:
        count.fill_(x.shape[dim])[excluded.along(x)[1 - dim]] -= 1
    torch.sum(fill(below, excluded, 0.0), dim, out=logit_sum)


def _union(top_a: Tensor, total_a: Tensor, top_b: Tensor, total_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Top of the union of two sets, the same where it is finite, and Σ exp(x − top)."""
    higher = torch.maximum(top_a, top_b)
    top = finite(higher)
    return higher, top, total_a * (top_a - top).exp() + total_b * (top_b - top).exp()


def _merge(a: Tensor, b: Tensor) -> Tensor:
    """Statistics [4, ..., n], of negatives or of positives, of the union of two sets."""
    (top_a, total_a, sum_a, count_a), (top_b, total_b, sum_b, count_b) = a, b
    higher, top, total = _union(top_a, total_a, top_b, total_b)
    logit_sum = (sum_a + count_a * (finite(top_a) - top)) + (sum_b + count_b * (finite(top_b) - top))
    return torch.stack([higher, total, logit_sum, count_a + count_b])
