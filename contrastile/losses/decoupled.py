"""Decoupled contrastive loss: the positive pair leaves the denominator (Yeh et al. 2022, equation 6).

For row i with positives P(i) and the other keys N(i) that count,

    loss_i = log Σ_{j ∈ N(i)} exp x_ij − mean_{p ∈ P(i)} x_ip ,

whose gradient does not vanish where the positive is already the most similar key. That of InfoNCE does in small
batches. The softmax sums positives and negatives separately, so only `finish` differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from contrastile._errors import number
from contrastile.losses.base import Direct, Finished, Formula, Tile, Total, divisor
from contrastile.losses.pairs import direct_by_pairs
from contrastile.losses.softmax import Softmax, SoftmaxState, SoftmaxStats, finite


@dataclass(frozen=True)
class Decoupled(Softmax):
    """The softmax loss without the positives in the denominator (DCL, Yeh et al. 2022, equation 6).

    A row without a negative has no loss. Naively, with logits x [N, M] and a diagonal of positives,
    `torch.logsumexp(x.masked_fill(eye, -inf), 1) - x.diagonal()`, averaged over rows; and over the columns too where
    `symmetric`.

    >>> from contrastile import contrast
    >>> q, k = torch.nn.functional.normalize(torch.randn(2, 6, 16), dim=-1)
    >>> contrast(q, k, scale=10.0, loss=Decoupled(symmetric=True)).shape
    torch.Size([])
    """

    formula = Formula("exponential", denominator="negatives")
    unsmoothed = "the decoupled loss", "Leave it out, or take the softmax loss."

    def direct(self, tile: Tile) -> Direct | None:
        return direct_by_pairs(self, tile) if type(self) is Decoupled else None

    def finish(self, stats: Tensor) -> Finished:
        return self._finished(stats, None)

    def _finished(self, stats: Tensor, weights: Tensor | None) -> Finished:
        """weights: [n], of each row's positives; None: 1."""
        named, counts = SoftmaxStats(*stats), _counts(stats)
        zero, share = torch.zeros_like(counts), named.positive_count.clamp(min=1).reciprocal()
        total = named.total.masked_fill(named.total == 0, 1.0)
        top, mean = finite(named.positive_top), named.positive_sum * share
        if weights is not None:
            top, mean, share = top * weights, mean * weights, share * weights
        loss = (finite(named.top) - top) + (total.log() - mean)
        # no probability is a positive's, so that its gradient is −1/|P|
        state = SoftmaxState(
            top=finite(named.top), inverse=total.reciprocal(), positive_top=finite(named.positive_top),
            positive_inverse=zero, missing=torch.ones_like(zero), positive_share=share, share=zero,
        )  # fmt: skip
        return Finished(torch.where(counts > 0, loss, zero), counts, torch.stack(state))


@dataclass(frozen=True)
class DecoupledWeighted(Decoupled):
    """The decoupled loss with von Mises-Fisher weights (DCLW, Yeh et al. 2022, equation 7).

    The positives of row i, of mean similarity s_i = mean_{p ∈ P(i)} ⟨q_i, k_p⟩, have the weight
    w_i = 2 − exp(s_i / σ) / mean_j exp(s_j / σ), a constant, over the rows j of all ranks that have a loss: pairs that
    are apart weigh more. Naively, with a diagonal of positives,

        s = (q * k).sum(1).detach()
        w = 2 - N * torch.softmax(s / sigma, 0)
        (torch.logsumexp(x.masked_fill(eye, -inf), 1) - w * x.diagonal()).mean()

    sigma: σ, for rows of unit length; 0.5 in the paper. A bias is refused: with weights of rows it would not cancel.

    >>> from contrastile import contrast
    >>> q, k = torch.nn.functional.normalize(torch.randn(2, 6, 16), dim=-1)
    >>> contrast(q, k, scale=10.0, loss=DecoupledWeighted(symmetric=True)).shape
    torch.Size([])
    """

    formula = Formula("exponential", denominator="negatives", finish_fields=frozenset({"sigma"}), mises_fisher=True)
    rowwise: ClassVar[bool] = False
    takes_bias: ClassVar[bool] = False
    # logits that change no sum and no exponential
    least_scale: ClassVar[float] = 2.0**-100

    sigma: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        number("sigma", self.sigma, lambda sigma: sigma > 0.0, "be positive", "The paper has 0.5.")

    def finish_all(self, directions: Sequence[Tensor], scale: Tensor, total: Total) -> list[Finished]:
        exponents, tops = mises_fisher_exponents(directions, scale.double() * self.sigma, total)
        kernels = [
            torch.stack([(x - top).exp(), _counts(stats).double()])
            for x, top, stats in zip(exponents, tops, directions, strict=True)
        ]
        # of each direction the sum over all ranks' rows, and their number
        sums = total(torch.stack([kernel.sum(1) for kernel in kernels]))
        return [
            self._finished(stats, (2 - kernel[0] * (number / divisor(number, whole))).to(stats.dtype))
            for stats, kernel, (whole, number) in zip(directions, kernels, sums, strict=True)
        ]


def mises_fisher_exponents(directions: Sequence[Tensor], width: Tensor, total: Total) -> tuple[list[Tensor], Tensor]:
    """s_i / σ of each direction's rows, −∞ for rows without a loss, and the largest of each direction on all ranks.

    width: scale · σ in float64, which has the quotient of a small sigma.
    """
    exponents = []
    for stats in directions:
        named = SoftmaxStats(*stats)
        mean = finite(named.positive_top) + named.positive_sum / named.positive_count.clamp(min=1)
        exponents.append(torch.where(_counts(stats) == 0, -torch.inf, mean.double() / width))
    none = width.new_full((1,), -torch.inf)
    tops = total(torch.stack([torch.cat([x, none]).amax() for x in exponents]), largest=True)
    return exponents, finite(tops)


def _counts(stats: Tensor) -> Tensor:
    """1 for each row with a positive and a negative, 0 for others. NaN differs from 0: it stays NaN in the loss."""
    named = SoftmaxStats(*stats)
    return ((named.positive_count > 0) & (named.total != 0)).to(stats.dtype)
