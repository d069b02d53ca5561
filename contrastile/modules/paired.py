"""Losses of two sides that come in pairs, such as images and texts; both directions count."""

from __future__ import annotations

from typing import ClassVar, Never, Unpack

from torch import Tensor

from contrastile._errors import truth_value
from contrastile.engine import arguments as checks
from contrastile.losses.decoupled import Decoupled, DecoupledWeighted
from contrastile.losses.distilled import Distilled
from contrastile.losses.sigmoid import BalancedSigmoid, Sigmoid
from contrastile.losses.softmax import Softmax
from contrastile.modules.base import How, Loss, PairedLoss


class ClipLoss(PairedLoss):
    """CLIP's symmetric InfoNCE (Radford et al. 2021): the mean of the cross-entropies over texts and over images.

    Naively

        logits = logit_scale * image_features @ text_features.T + logit_bias
        loss = (F.cross_entropy(logits, torch.arange(N)) + F.cross_entropy(logits.T, torch.arange(N))) / 2

    over the batch of all ranks. With `labels` all pairs of equal labels are positives, and the loss of a row is their
    mean (UniCL, Yang et al. 2022). Made as `ClipLoss(**how)`, with the options of `contrast`: `backend`,
    `exchange`, `group`, `gradient`, `label_smoothing`, `reduction`, `workspace`, `device`.

    Returns a scalar ([N] with reduction="none") in float32, or float64 for float64 features. Raises ValueError for
    arguments that do not fit together; the message has the argument, the rule, the value and the remedy.

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

    Options, arguments and errors are those of `ClipLoss`, except `label_smoothing`. Pairs of equal ids leave
    the sum; the divisor stays N. With `labels` every pair of equal labels has z = 1; `SigLipLoss(balanced=True)` gives
    the positives of each example one weight together (see `contrastile.losses.BalancedSigmoid`).

    >>> import torch, torch.nn.functional as F
    >>> image, text = F.normalize(torch.randn(2, 8, 16), dim=-1)
    >>> loss = SigLipLoss()(image, text, 10.0, -10.0)
    >>> z = 2 * torch.eye(8) - 1
    >>> torch.testing.assert_close(loss, -F.logsigmoid(z * (10.0 * image @ text.T - 10.0)).sum() / 8)
    """

    pair_loss = Sigmoid()

    def __init__(self, *, balanced: bool = False, **how: Unpack[How]) -> None:
        super().__init__(**how)
        truth_value("balanced", balanced)
        self.own_options = {"balanced": balanced}
        if balanced:
            self.loss = BalancedSigmoid()


class DCLLoss(PairedLoss):
    """The decoupled contrastive loss in both directions (Yeh et al. 2022): positives leave the denominator.

    Naively

        x = logit_scale * image_features @ text_features.T
        negatives = x.masked_fill(torch.eye(N, dtype=torch.bool), -torch.inf)
        loss = (negatives.logsumexp(1) + negatives.logsumexp(0)).mean() / 2 - (w * x.diagonal()).mean()

    with w = 1 or, with `DCLLoss(sigma=0.5)`, the weights 2 - N * softmax(⟨image_i, text_i⟩ / sigma), constants
    (DCLW). Arguments and errors are those of `ClipLoss`, except `label_smoothing`. A row without a
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
        self.own_options = {"sigma": sigma}
        if sigma is not None:
            self.loss = DecoupledWeighted(symmetric=True, sigma=sigma)


class DistillClipLoss(Loss):
    """CLIP's loss mixed with distillation from a teacher (TinyCLIP, Wu et al. 2023), as in open_clip's class.

    Naively, with x = logit_scale * image_features @ text_features.T and t the teacher's logits,

        hard = (F.cross_entropy(x, arange) + F.cross_entropy(x.T, arange)) / 2
        soft = (kl(t, x) + kl(t.T, x.T)) / 2
        loss = (1 - weight) * hard + weight * soft

    where kl(t, x) is `F.kl_div(x.log_softmax(1), t.log_softmax(1), log_target=True, reduction="batchmean")`. open_clip
    returns hard and soft separately. Its soft loss is larger by the teacher's entropy, which has no gradient.
    Made as `DistillClipLoss(weight=0.5, **how)`, with the options of `contrast` except `label_smoothing`; returns and
    raises what `ClipLoss` does.

    >>> import torch, torch.nn.functional as F
    >>> image, text = F.normalize(torch.randn(2, 8, 16), dim=-1)
    >>> teacher_image, teacher_text = F.normalize(torch.randn(2, 8, 24), dim=-1)
    >>> loss = DistillClipLoss(weight=1.0)(image, text, 10.0, teacher_image, teacher_text, 20.0)
    >>> x, t = 10.0 * image @ text.T, 20.0 * teacher_image @ teacher_text.T
    >>> both = [(b.softmax(1) * (b.log_softmax(1) - a.log_softmax(1))).sum(1).mean() for a, b in ((x, t), (x.T, t.T))]
    >>> torch.testing.assert_close(loss, (both[0] + both[1]) / 2)
    """

    names: ClassVar[dict[str, str]] = {
        **PairedLoss.names, "guide_q": "dist_image_features", "guide_k": "dist_text_features",
        "guide_scale": "dist_logit_scale",
    }  # fmt: skip
    pair_loss = Distilled(symmetric=True)

    def __init__(self, *, weight: float = 0.5, **how: Unpack[How]) -> None:
        super().__init__(**how)
        self.own_options = {"weight": weight}
        self.loss = Distilled(symmetric=True, weight=weight)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        dist_image_features: Tensor,
        dist_text_features: Tensor,
        dist_logit_scale: Tensor | float,
        *,
        ids: Tensor | None = None,
        labels: Tensor | None = None,
        weights: Tensor | None = None,
        **unknown: Never,
    ) -> Tensor:
        """Return the loss of N pairs, with a teacher's features of them, over the batch of all ranks.

        Arguments:
            image_features, text_features: [N, D], rows of unit length.
            logit_scale: a number, or a tensor of shape [] or [1]; the scale, not its logarithm.
            dist_image_features, dist_text_features: [N, G], the teacher's features, of a dtype and a size of their own,
                rows of unit length; constants.
            dist_logit_scale: the teacher's scale, a number or a tensor of shape [] or [1], a constant.
            ids: [N] integers; pairs of equal ids are not negatives of each other.
            labels: [N] integers; all pairs of equal labels are positives. The hard loss of a row is the mean over them.
            weights: [N]; the loss is Σ w·loss / Σ w.
        """
        if unknown:
            self._refuse(unknown)
        with self._shared_errors():
            checks.features("dist_image_features", dist_image_features)
            checks.features("image_features", image_features)
            checks.number("dist_logit_scale", dist_logit_scale, image_features)
            if isinstance(dist_logit_scale, Tensor):
                checks.constant("dist_logit_scale", dist_logit_scale)
            checks.features("dist_text_features", dist_text_features)
            checks.alike("dist_text_features", dist_text_features, "dist_image_features", dist_image_features)
        operation, inputs = self._prepared(
            image_features, text_features, logit_scale, query_ids=ids, key_ids=ids, query_labels=labels,
            key_labels=labels, weights=weights, paired=True, guides=((dist_image_features, dist_text_features),),
            guide_scale=dist_logit_scale,
        )  # fmt: skip
        loss: Tensor = operation(*inputs)
        if self._may_warn:
            self._warn_of_inputs(logit_scale, image_features, text_features)
        return loss
