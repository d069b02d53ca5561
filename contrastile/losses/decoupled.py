"""Decoupled contrastive loss: the positive pair leaves the denominator (Yeh et al. 2022, equation 6).

For row i with positives P(i) and the other keys N(i) that count,

    loss_i = log Σ_{j ∈ N(i)} exp x_ij − mean_{p ∈ P(i)} x_ip ,

whose gradient does not vanish where the positive is already the most similar key, as InfoNCE's does in small batches.
Positives and negatives are accumulated apart by the softmax; only the end and a positive's gradient differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile.losses.base import Finished
from contrastile.losses.softmax import Softmax, SoftmaxState, SoftmaxStats, finite


@dataclass(frozen=True)
class Decoupled(Softmax):
    """The softmax loss without the positives in the denominator; a row without a negative has no loss.

    Naively, with a diagonal of positives, `torch.logsumexp(x.masked_fill(eye, -inf), 1) - x.diagonal()`, averaged over
    rows; and over the columns too where `symmetric`.

    >>> from contrastile import contrast
    >>> q, k = torch.nn.functional.normalize(torch.randn(2, 6, 16), dim=-1)
    >>> contrast(q, k, scale=10.0, loss=Decoupled(symmetric=True)).shape
    torch.Size([])
    """

    def smoothed(self, label_smoothing: float) -> Softmax:
        remedy = "Leave it out, or take the softmax loss."
        raise invalid("label_smoothing", "be 0 for the decoupled loss", label_smoothing, remedy)

    def finish(self, stats: Tensor) -> Finished:
        named = SoftmaxStats(*stats)
        counts = ((named.positive_count > 0) & (named.total > 0)).to(stats.dtype)
        zero, share = torch.zeros_like(counts), named.positive_count.clamp(min=1).reciprocal()
        total = named.total.masked_fill(counts == 0, 1.0)
        loss = (finite(named.top) - finite(named.positive_top)) + (total.log() - named.positive_sum * share)
        state = SoftmaxState(finite(named.top), total.reciprocal(), finite(named.positive_top), zero, zero, share, zero)
        # NaN stays NaN where a row has a loss
        return Finished(torch.where(counts > 0, loss, zero), counts, torch.stack(state))

    def _positive_grad(self, x: Tensor, directions: list[tuple[SoftmaxState, Tensor]]) -> Tensor:
        grad = torch.zeros_like(x)
        for state, coefficient in directions:
            grad.addcmul_(state.positive_share.expand_as(x), coefficient, value=-1.0)
        return grad
