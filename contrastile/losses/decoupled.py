"""Decoupled contrastive loss: the positive pair leaves the denominator (Yeh et al. 2022, equation 6).

For row i with positives P(i) and the other keys N(i) that count,

    loss_i = log Σ_{j ∈ N(i)} exp x_ij − mean_{p ∈ P(i)} x_ip ,

whose gradient does not vanish where the positive is already the most similar key, as InfoNCE's does in small batches.
Positives and negatives are summed apart by the softmax, so only the end of a row differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile.losses.base import Finished, Formula
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

    formula = Formula("exponential", denominator="negatives")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing:
            remedy = "Leave it out, or take the softmax loss."
            raise invalid("label_smoothing", "be 0 for the decoupled loss", self.label_smoothing, remedy)

    def finish(self, stats: Tensor) -> Finished:
        named = SoftmaxStats(*stats)
        # NaN differs from 0: it stays NaN in the loss
        counts = ((named.positive_count > 0) & (named.total != 0)).to(stats.dtype)
        zero, share = torch.zeros_like(counts), named.positive_count.clamp(min=1).reciprocal()
        total = named.total.masked_fill(named.total == 0, 1.0)
        loss = (finite(named.top) - finite(named.positive_top)) + (total.log() - named.positive_sum * share)
        # no probability is a positive's, so that its gradient is −1/|P|
        state = SoftmaxState(
            top=finite(named.top),
            inverse=total.reciprocal(),
            positive_top=finite(named.positive_top),
            positive_inverse=zero,
            missing=torch.ones_like(zero),
            positive_share=share,
            share=zero,
        )
        return Finished(torch.where(counts > 0, loss, zero), counts, torch.stack(state))
