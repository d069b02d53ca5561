"""The mean of the positives inside the logarithm (Khosla et al. 2020, equation 3; MIL-NCE, Miech et al. 2020).

For row i with positives P(i) among the keys A(i) that count,

    loss_i = −log( 1 / |P(i)| · Σ_{p ∈ P(i)} exp x_ip / Σ_{j ∈ A(i)} exp x_ij ) ,

which is satisfied by one similar positive, where the mean of logarithms (`softmax.py`) wants all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contrastile.losses.base import Finished, Formula
from contrastile.losses.softmax import Softmax, SoftmaxState, SoftmaxStats


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

    def finish(self, stats: Tensor) -> Finished:
        named, whole = SoftmaxStats(*stats), super().finish(stats)
        gap = (named.top - named.positive_top) + (named.total.log() - named.positive_total.log())
        loss = torch.logaddexp(torch.zeros_like(gap), gap) + named.positive_count.clamp(min=1).log()
        return whole._replace(loss=torch.where(whole.counts > 0, loss, torch.zeros_like(loss)))

    def _positive_grad(self, x: Tensor, directions: list[tuple[SoftmaxState, Tensor]]) -> Tensor:
        """p − among, where among is the probability among the positives: −among · (1 − the positives' probability)."""
        grad = torch.zeros_like(x)
        for state, coefficient in directions:
            among = (x - state.positive_top).exp_().mul_(state.positive_inverse)
            grad.addcmul_(among.mul_(state.missing), coefficient, value=-1)
        return grad
