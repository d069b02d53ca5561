"""The five losses by name: what a training script writes.

Each only says, in the words of `_contrast.py`, which rows meet which columns and what a positive is. They compute
with features as given: normalise first where the method wants it (a CLIP-like loss says once if rows are not of unit
length). All take the keywords of `Options` (`backend`, `exchange`, `group`, `gradient`, `label_smoothing`,
`reduction`, `workspace`, `device`), return one number, and raise ValueError for what does not fit together: a keyword
that is none of these when they are made, tensors when they are called, told in the names of the call.
"""

from __future__ import annotations

import itertools
import re
import warnings
from typing import Any, ClassVar, Literal, overload

import torch
from torch import Tensor, nn

from contrastile import _check
from contrastile._check import wrong
from contrastile._choose import Options
from contrastile._contrast import contrast, tell_all
from contrastile.losses.base import PairLoss
from contrastile.losses.sigmoid import Sigmoid
from contrastile.losses.softmax import Softmax

# how far from 1 a row's length may be before a CLIP-like loss says so
LENGTH_TOLERANCE = 0.05
# losses of a process that look, on a GPU: one that is made anew at every step must not wait for the device each time
MOST_LOOKS = 16
_looks = itertools.count()


class _Loss(nn.Module):
    """A loss with its options, checked when it is made."""

    # what `contrast` calls its arguments, and what the user called them here
    names: ClassVar[dict[str, str]] = {}

    def __init__(self, **how: Any) -> None:
        super().__init__()
        Options.of(how)
        self.how = how
        self._lengths_seen = False

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.how.items())

    def _contrast(self, q: Tensor, k: Tensor, **given: Any) -> Tensor:
        """`contrast`, whose errors are told in this loss's names."""
        try:
            return contrast(q, k, **given, **self.how)
        except ValueError as error:
            error.args = (re.sub(r"`(\w+)`", lambda found: f"`{self.names.get(found[1], found[1])}`", str(error)),)
            raise

    def _tell_all(self, error: ValueError) -> None:
        tell_all(error, self.how.get("group"), self.how.get("exchange", "auto"))

    def _look_at_lengths(self, *sides: Tensor) -> None:
        """Says once, at the first call, that rows are not of unit length: the commonest slip with these losses."""
        if self._lengths_seen or torch.compiler.is_compiling() or any(len(side) == 0 for side in sides):
            return
        on_gpu = any(side.is_cuda for side in sides)
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return
        self._lengths_seen = True
        if on_gpu and next(_looks) >= MOST_LOOKS:
            return
        for side in sides:
            lengths = torch.linalg.vector_norm(side.detach()[:64].float(), dim=-1)
            if bool(((lengths - 1).abs() > LENGTH_TOLERANCE).any()):
                # the same words every time, at the user's line: Python tells them once, whatever makes new losses
                warnings.warn(
                    f"{type(self).__name__} got rows of length other than 1; it computes with features as given. "
                    "Normalise them first, with torch.nn.functional.normalize(x, dim=-1).",
                    stacklevel=5,
                )
                return


class _PairedLoss(_Loss):
    """A loss of images and texts that come in pairs."""

    pair_loss: PairLoss
    names: ClassVar[dict[str, str]] = {
        "q": "image_features", "k": "text_features", "scale": "logit_scale", "bias": "logit_bias", "query_ids": "ids",
        "key_ids": "ids",
    }  # fmt: skip

    @overload
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: Literal[False] = False,
        *,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        *,
        output_dict: Literal[True],
        ids: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> dict[str, Tensor]: ...

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
        *,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        try:
            _check.features("image_features", image_features)
            _check.features("text_features", text_features)
            _check.same_length("text_features", text_features, "image_features", image_features)
        except ValueError as error:
            self._tell_all(error)
            raise
        loss = self._contrast(
            image_features,
            text_features,
            scale=logit_scale,
            bias=logit_bias,
            loss=self.pair_loss,
            query_ids=ids,
            key_ids=ids,
            weights=weights,
        )
        self._look_at_lengths(image_features, text_features)
        return {"contrastive_loss": loss} if output_dict else loss


class ClipLoss(_PairedLoss):
    """CLIP's symmetric InfoNCE (Radford et al. 2021): the mean of the cross-entropies over texts and over images.

    Made with the keywords of `contrastile._choose.Options`, such as `ClipLoss(exchange="ring")`, as all losses are.
    Call: `(image_features [N, D], text_features [N, D], logit_scale, logit_bias=None, output_dict=False, *, ids=None,
    weights=None)`. Naively `logits = logit_scale * image @ text.T` and the mean of `cross_entropy(logits,
    arange(N))` and of the transposed; see `contrast` for all arguments. A bias changes nothing in a softmax; its
    gradient is 0.

    >>> import torch, torch.nn.functional as F
    >>> image, text = F.normalize(torch.randn(2, 8, 16), dim=-1)
    >>> ClipLoss()(image, text, 100.0).ndim
    0
    """

    pair_loss = Softmax(symmetric=True)


class SigLipLoss(_PairedLoss):
    """SigLIP's pairwise sigmoid loss (Zhai et al. 2023), summed over all pairs and divided by the global batch.

    Call: as `ClipLoss`. Naively `-logsigmoid(z * (logit_scale * image @ text.T + logit_bias)).sum() / N` with z = 1
    on the diagonal and −1 beside it. Pairs of equal ids leave the sum; the divisor stays N.

    >>> import torch, torch.nn.functional as F
    >>> image, text = F.normalize(torch.randn(2, 8, 16), dim=-1)
    >>> SigLipLoss()(image, text, 10.0, -10.0).ndim
    0
    """

    pair_loss = Sigmoid()


class InfoNCELoss(_Loss):
    """One direction: each query finds its positives among the keys (van den Oord et al. 2018; Karpukhin et al. 2020).

    Call: `(query [N, D], key [M, D], scale, *, positives=None, negatives=None, query_ids=None, key_ids=None,
    weights=None)`. Naively `cross_entropy(scale * query @ cat([key, negatives]).T, positives)`. Without `positives`
    key i belongs to query i and the keys behind the first N are hard negatives; with [N, P] of them the loss of a
    row is the mean of their −log p.

    >>> import torch
    >>> query, key = torch.randn(4, 16), torch.randn(12, 16)
    >>> InfoNCELoss()(query, key, 1.0, positives=torch.tensor([0, 3, 6, 9])).ndim
    0
    """

    names: ClassVar[dict[str, str]] = {"q": "query", "k": "key"}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        scale: Tensor | float,
        *,
        positives: Tensor | None = None,
        negatives: Tensor | None = None,
        query_ids: Tensor | None = None,
        key_ids: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        return self._contrast(
            query,
            key,
            scale=scale,
            loss=Softmax(),
            positives=positives,
            negatives=negatives,
            query_ids=query_ids,
            key_ids=key_ids,
            weights=weights,
        )


class SupConLoss(_Loss):
    """Supervised contrastive learning (Khosla et al. 2020, equation 2): every other example of the label is a
    positive.

    Call: `(features [N, D] or [N, views, D], labels [N], scale)`, `scale` being one over the temperature. Per anchor,
    the mean over its positives of −log of a softmax over all other examples; the mean over anchors that have a
    positive. Naively, with `same` the pairs of equal labels but for an example with itself,
    `log_p = (scale * features @ features.T).fill_diagonal_(-inf).log_softmax(1)` and the mean of
    `-log_p[i, same[i]].mean()` over i.

    >>> import torch, torch.nn.functional as F
    >>> features = F.normalize(torch.randn(6, 2, 16), dim=-1)
    >>> SupConLoss()(features, torch.tensor([0, 0, 1, 1, 2, 2]), 10.0).ndim
    0
    """

    names: ClassVar[dict[str, str]] = {"q": "features", "k": "features"}

    def forward(self, features: Tensor, labels: Tensor, scale: Tensor | float) -> Tensor:
        try:
            if not isinstance(features, Tensor) or features.ndim not in (2, 3):
                got = f"shape {list(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
                rule = "be a tensor of shape [N, D] or [N, views, D]"
                raise wrong("features", rule, got, "Flatten the others first.")
            _check.vector("labels", labels, "features", features, integer=True)
        except ValueError as error:
            self._tell_all(error)
            raise
        if features.ndim == 3:
            labels = labels.repeat_interleave(features.shape[1])
            features = features.flatten(0, 1)
        return self._contrast(
            features, features, scale=scale, loss=Softmax(exclude_self=True), query_labels=labels, key_labels=labels
        )


class NTXentLoss(_Loss):
    """SimCLR's normalised-temperature cross-entropy (Chen et al. 2020, equation 1).

    Call: `(view_a [N, D], view_b [N, D], scale)`, `scale` being one over the temperature. The 2N views are compared
    with each other, a view's own pair left out; the other view of the same example is its positive; the mean over the
    2N. Naively `x = scale * views @ views.T` of `views = cat([view_a, view_b])`, and
    `cross_entropy(x.fill_diagonal_(-inf), arange(2 * N).roll(N))`.

    >>> import torch, torch.nn.functional as F
    >>> a, b = F.normalize(torch.randn(2, 8, 16), dim=-1)
    >>> NTXentLoss()(a, b, 2.0).ndim
    0
    """

    names: ClassVar[dict[str, str]] = {"q": "view_a", "k": "view_b"}

    def forward(self, view_a: Tensor, view_b: Tensor, scale: Tensor | float) -> Tensor:
        try:
            _check.features("view_a", view_a)
            _check.features("view_b", view_b)
            _check.alike("view_b", view_b, "view_a", view_a)
            _check.same_length("view_b", view_b, "view_a", view_a)
        except ValueError as error:
            self._tell_all(error)
            raise
        views = torch.cat([view_a, view_b])
        N = len(view_a)
        other = torch.arange(2 * N, device=views.device).roll(N)
        return self._contrast(views, views, scale=scale, loss=Softmax(exclude_self=True), positives=other)
