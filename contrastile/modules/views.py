"""Losses of examples among themselves: those of a label, or the views of one image, are alike."""

from __future__ import annotations

import warnings
from typing import ClassVar, Literal, Never, Unpack

import torch
from torch import Tensor

from contrastile._errors import invalid, one_of
from contrastile._types import shape_or_type
from contrastile.engine import arguments as checks
from contrastile.engine.problem import autocast_type
from contrastile.gradcache.modes import joined
from contrastile.losses.softmax import Softmax, SoftmaxInside
from contrastile.modules.base import How, Loss

_gpu_reads = checks.GpuReads()


class SupConLoss(Loss):
    """Supervised contrastive learning (Khosla et al. 2020, equation 2): every other example of the label is a
    positive.

    Naively, with x = scale · ⟨f_i, f_j⟩ and P(i) the others of i's label,

        loss_i = −mean_{p ∈ P(i)} log(exp x_ip / Σ_{j ≠ i} exp x_ij)

    and the mean over the i that have a positive; 0, with a warning, if none has. With form="in" the mean is inside the
    logarithm (equation 3). Made as `SupConLoss(form="out", **how)`, with the options of `contrast`; returns
    and raises what `ClipLoss` does.

    >>> import torch, torch.nn.functional as F
    >>> features, labels = F.normalize(torch.randn(6, 16), dim=-1), torch.tensor([0, 0, 1, 1, 2, 2])
    >>> loss = SupConLoss()(features, labels, 10.0)
    >>> others = (10.0 * features @ features.T).fill_diagonal_(-torch.inf)
    >>> torch.testing.assert_close(loss, F.cross_entropy(others, torch.tensor([1, 0, 3, 2, 5, 4])))
    """

    names: ClassVar[dict[str, str]] = {"q": "features", "k": "features"}
    pair_loss = Softmax(exclude_self=True)
    instead: ClassVar[dict[str, str]] = {"mask": "Pass labels: examples of equal labels are positives."}

    def __init__(self, *, form: Literal["out", "in"] = "out", **how: Unpack[How]) -> None:
        super().__init__(**how)
        one_of("form", form, ("out", "in"), "They are the paper's words.")
        self.own_options = {"form": form}
        if form == "in":
            self.loss = SoftmaxInside(exclude_self=True, label_smoothing=self.options.label_smoothing)

    def forward(
        self, features: Tensor, labels: Tensor | None = None, scale: Tensor | float | None = None, *,
        weights: Tensor | None = None, **unknown: Never,
    ) -> Tensor:  # fmt: skip
        """Return the loss of N examples, over the batch of all ranks.

        Arguments:
            features: [N, D], or [N, views, D] for several views of each example; rows of unit length.
            labels: [N] integers; examples of equal labels are positives of each other.
            scale: a number, or a tensor of shape [] or [1]: 1 / temperature.
            weights: [N]; the loss is Σ w·loss / Σ w, over all views of an example.
        """
        if unknown or (scale is None and labels is not None):
            self._refuse(unknown, "scale")
        with self._shared_errors():
            if not isinstance(features, Tensor) or features.ndim not in (2, 3):
                rule = "be a tensor of shape [N, D] or [N, views, D]"
                remedy = "Pass features first, then labels; flatten further axes."
                raise invalid("features", rule, shape_or_type(features), remedy)
            # a missing scale alone is refused above
            if labels is None or scale is None:
                remedy = f"Pass torch.arange({len(features)}) where only the views of one example are alike."
                raise invalid("labels", "be given", None, remedy)
            checks.vector("labels", labels, "features", features, integer=True)
            if weights is not None:
                checks.vector("weights", weights, "features", features, integer=False)
        if features.ndim == 3:
            views, features = features.shape[1], features.flatten(0, 1)
            labels = labels.repeat_interleave(views)
            weights = None if weights is None else weights.repeat_interleave(views)
        operation, inputs = self._prepared(
            features, features, scale, query_labels=labels, key_labels=labels, weights=weights
        )
        loss: Tensor = operation(*inputs)
        if torch.compiler.is_compiling():
            return loss
        # do not wait for a GPU, except in the first calls of the process
        mean = self.options.reduction == "mean"
        if mean and (self._unchecked or not checks.on_gpu(loss)) and _gpu_reads.allowed(loss):
            _warn_without_positives(loss.detach(), labels)
        if self._unchecked:
            self._warn_of_inputs(scale, features)
        return loss


def _warn_without_positives(loss: Tensor, labels: Tensor) -> None:
    """Warn where a loss is 0 because no label comes twice."""
    if not checks.captured(loss) and bool(loss == 0) and len(labels.unique()) == len(labels):
        warnings.warn(
            "SupConLoss got labels that are all different: no example has a positive, and the loss is 0. Draw "
            "several examples of each label, or pass several views.",
            stacklevel=5,
        )


class NTXentLoss(Loss):
    """SimCLR's normalised-temperature cross-entropy (Chen et al. 2020, equation 1).

    Every view is compared with the 2N − 1 others; its positive is the other view of the same example. Naively

        views = torch.cat([view_a, view_b])
        x = (scale * views @ views.T).fill_diagonal_(-torch.inf)
        loss = F.cross_entropy(x, torch.arange(2 * N).roll(N))

    Made as `NTXentLoss(**how)`, with the options of `contrast`; returns and raises what `ClipLoss` does.

    >>> import torch, torch.nn.functional as F
    >>> a, b = F.normalize(torch.randn(2, 8, 16), dim=-1)
    >>> loss = NTXentLoss()(a, b, 2.0)
    >>> views = torch.cat([a, b])
    >>> others = (2.0 * views @ views.T).fill_diagonal_(-torch.inf)
    >>> torch.testing.assert_close(loss, F.cross_entropy(others, torch.arange(16).roll(8)))
    """

    names: ClassVar[dict[str, str]] = {"q": "view_a", "k": "view_b"}
    pair_loss = Softmax(exclude_self=True)

    def forward(
        self, view_a: Tensor, view_b: Tensor, scale: Tensor | float | None = None, *, ids: Tensor | None = None,
        weights: Tensor | None = None, **unknown: Never,
    ) -> Tensor:  # fmt: skip
        """Return the loss of N examples in two views, over the batch of all ranks.

        Arguments:
            view_a, view_b: [N, D], of one dtype; rows of unit length.
            scale: a number, or a tensor of shape [] or [1]: 1 / temperature.
            ids: [N] integers; views of two examples with equal ids are not negatives of each other.
            weights: [N]; the loss is Σ w·loss / Σ w, over both views of an example.
        """
        if unknown or scale is None:
            self._refuse(unknown, "scale")
        with self._shared_errors():
            checks.features("view_a", view_a)
            checks.features("view_b", view_b)
            checks.alike("view_b", view_b, "view_a", view_a, autocast_type(view_a.device))
            checks.same_length("view_b", view_b, "view_a", view_a)
            if ids is not None:
                checks.vector("ids", ids, "view_a", view_a, integer=True)
                ids = ids.repeat(2)
            if weights is not None:
                checks.vector("weights", weights, "view_a", view_a, integer=False)
                weights = weights.repeat(2)
        views = joined([view_a, view_b])
        N = len(view_a)
        other = torch.arange(2 * N, device=views.device).roll(N)
        operation, inputs = self._prepared(
            views, views, scale, positives=other, positives_in_range=True, query_ids=ids, key_ids=ids, weights=weights
        )
        loss: Tensor = operation(*inputs)
        if self._may_warn:
            self._warn_of_inputs(scale, view_a, view_b)
        return loss
