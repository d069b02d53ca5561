"""Losses of two sides that come in pairs, such as images and texts; both directions count."""

from __future__ import annotations

from typing import Unpack

from contrastile.losses.decoupled import Decoupled, DecoupledWeighted
from contrastile.losses.sigmoid import Sigmoid
from contrastile.losses.softmax import Softmax
from contrastile.modules.base import How, PairedLoss


class ClipLoss(PairedLoss):
    """CLIP's symmetric InfoNCE (Radford et al. 2021): the mean of the cross-entropies over texts and over images.

    Naively

        logits = logit_scale * image_features @ text_features.T + logit_bias
        loss = (F.cross_entropy(logits, torch.arange(N)) + F.cross_entropy(logits.T, torch.arange(N))) / 2

    over the batch of all ranks. Made as `ClipLoss(**how)`, with the keywords that `contrast` tells: `backend`,
    `exchange`, `group`, `gradient`, `label_smoothing`, `reduction`, `workspace`, `device`.

    Arguments of the call:
        image_features, text_features: [N, D], of one type: bf16, fp16, fp32 or fp64; rows of unit length.
        logit_scale, logit_bias: numbers, or tensors of shape [] or [1]; the scale itself, not its logarithm. A bias
            changes nothing in a softmax; its gradient is 0.
        output_dict: whether to return `{"contrastive_loss": loss}`, as open_clip's losses can.
        ids: [N] integers; pairs of equal ids are not negatives of each other.
        weights: [N]; the loss is Σ w·loss / Σ w.

    Returns a scalar ([N] with reduction="none") in float32, or float64 for float64 features. Raises ValueError for
    anything that does not fit together, naming it, what it must be and what it is.

    >>> import torch, torch.nn.functional as F
    >>> image, text = F.normalize(torch.randn(2, 8, 16), dim=-1)
    >>> loss = ClipLoss()(image, text, 100.0)
    >>> logits, diagonal = 100.0 * image @ text.T, torch.arange(8)
    >>> torch.testing.assert_close(loss, (F.cross_entropy(logits, diagonal) + F.cross_entropy(logits.T, diagonal)) / 2)
    """

    pair_loss = Softmax(symmetric=True)


class SigLipLoss(PairedLoss):
    """SigLIP's pairwise sigmoid loss (Zhai et al. 2023), summed over all pairs and divided by the global batch.

    Naively

        z = 2 * torch.eye(N) - 1
        loss = -F.logsigmoid(z * (logit_scale * image_features @ text_features.T + logit_bias)).sum() / N

    Made, called and refused as `ClipLoss`, but for `label_smoothing`, which it does not take. Pairs of equal ids leave
    the sum; the divisor stays N.

    >>> import torch, torch.nn.functional as F
    >>> image, text = F.normalize(torch.randn(2, 8, 16), dim=-1)
    >>> loss = SigLipLoss()(image, text, 10.0, -10.0)
    >>> z = 2 * torch.eye(8) - 1
    >>> torch.testing.assert_close(loss, -F.logsigmoid(z * (10.0 * image @ text.T - 10.0)).sum() / 8)
    """

    pair_loss = Sigmoid()


class DCLLoss(PairedLoss):
    """The decoupled contrastive loss in both directions (Yeh et al. 2022): positives leave the denominator.

    Naively

        x = logit_scale * image_features @ text_features.T
        negatives = x.masked_fill(torch.eye(N, dtype=torch.bool), -torch.inf)
        loss = (negatives.logsumexp(1) + negatives.logsumexp(0)).mean() / 2 - (w * x.diagonal()).mean()

    with w = 1 or, with `DCLLoss(sigma=0.5)`, the weights 2 - N * softmax(⟨image_i, text_i⟩ / sigma), constants
    (DCLW). Called and refused as `ClipLoss`, but for `label_smoothing`, which it does not take. A row without a
    negative leaves the mean.

    >>> import torch, torch.nn.functional as F
    >>> image, text = F.normalize(torch.randn(2, 8, 16), dim=-1)
    >>> loss = DCLLoss()(image, text, 10.0)
    >>> x = 10.0 * image @ text.T
    >>> negatives = x.masked_fill(torch.eye(8, dtype=torch.bool), -torch.inf)
    >>> naive = (negatives.logsumexp(1) + negatives.logsumexp(0)).mean() / 2 - x.diagonal().mean()
    >>> torch.testing.assert_close(loss, naive)
    """

    pair_loss = Decoupled(symmetric=True)

    def __init__(self, *, sigma: float | None = None, **how: Unpack[How]) -> None:
        super().__init__(**how)
        if sigma is not None:
            self.loss = DecoupledWeighted(symmetric=True, sigma=sigma)
