"""The five losses by name: what a training script writes.

Each one names rows, columns and positives in the words of `functional.py`, and computes with features as given, under
autocast in its type.
Normalise them first where the method wants it: all but InfoNCE, whose products may be any, warn once about rows that
are not of unit length, or a scale that looks like a temperature.
"""

from __future__ import annotations

import re
import warnings
from numbers import Real
from typing import Any, ClassVar, Literal, Never, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn

from contrastile._dispatch import Options
from contrastile._errors import invalid
from contrastile._types import Backend, ExchangeName, Gradient, Reduction
from contrastile.engine import arguments as checks
from contrastile.engine.plan import prepare, tell_all
from contrastile.losses.base import PairLoss
from contrastile.losses.hardness import Hardness
from contrastile.losses.sigmoid import Sigmoid
from contrastile.losses.softmax import Softmax

# deviation of a row's length from 1 above which a loss of cosines warns
LENGTH_TOLERANCE = 0.05
_looks = checks.Looks()


class How(TypedDict, total=False):
    """The options of every loss, for type checkers and editors."""

    backend: Backend
    exchange: ExchangeName
    group: Any
    gradient: Gradient
    label_smoothing: float
    reduction: Reduction
    workspace: int | None
    device: torch.device | str | None


class _Loss(nn.Module):
    """A loss with its options, which the docstring of `contrast` explains. They are checked at construction."""

    # the names of `contrast`, and this loss's own
    names: ClassVar[dict[str, str]] = {}
    pair_loss: ClassVar[PairLoss]
    # rows must be of unit length: the first call looks at them
    unit_rows: ClassVar[bool] = True

    def __init__(
        self,
        *,
        backend: Backend = "auto",
        exchange: ExchangeName = "auto",
        group: Any = None,
        gradient: Gradient = "mean",
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        workspace: int | None = None,
        device: torch.device | str | None = None,
        **unknown: Never,
    ) -> None:
        super().__init__()
        Options.refuse(unknown)
        self.options = Options(backend, exchange, group, gradient, label_smoothing, reduction, workspace, device)
        self.loss = self.pair_loss.smoothed(label_smoothing) if label_smoothing else self.pair_loss
        self._unseen = self.unit_rows

    def extra_repr(self) -> str:
        fields = ((name, getattr(self.options, name)) for name in Options.__dataclass_fields__)
        default = Options()
        return ", ".join(f"{name}={value!r}" for name, value in fields if value != getattr(default, name))

    def _prepared(self, q: Tensor, k: Tensor, scale: Tensor | float, **others: Any) -> tuple[Any, tuple[Any, ...]]:
        """The operation that computes the loss, and its inputs; errors speak of this loss's names."""
        try:
            return prepare(q, k, scale, self.loss, self.options, **others)
        except ValueError as error:
            sentence = re.sub(r"`(\w+)`", lambda name: f"`{self.names.get(name[1], name[1])}`", str(error))
            error.args = (sentence,)
            raise

    def _tell_all(self, error: ValueError) -> None:
        tell_all(error, self.options.group, self.options.exchange)

    def _look(self, scale: Tensor | float, *sides: Tensor) -> None:
        """Warn, at the first call, about rows that are not of unit length, or a temperature in place of the scale."""
        if torch.compiler.is_compiling() or any(len(side) == 0 for side in sides) or checks.captured(*sides):
            return
        self._unseen = False
        # a loss may be made anew in every step
        if not _looks.one_more(*sides):
            return
        for side in sides:
            lengths = torch.linalg.vector_norm(side.detach()[:64].float(), dim=-1)
            if bool(((lengths - 1).abs() > LENGTH_TOLERANCE).any()):
                # equal words at the user's line, which Python shows once, however many losses are made
                warnings.warn(
                    f"{type(self).__name__} got rows of length other than 1; it computes with features as given. "
                    "Normalise them first, with torch.nn.functional.normalize(x, dim=-1).",
                    stacklevel=5,
                )
                return
        # a tensor is not read: for a module in shards that would be a collective
        if isinstance(scale, Real) and 0.0 < scale < 1.0:
            warnings.warn(
                f"{type(self).__name__} got a scale of {float(scale):.3g}, as if it were a temperature; products are "
                "multiplied by it. Pass 1 / temperature.",
                stacklevel=5,
            )


class _PairedLoss(_Loss):
    """A loss of images and texts that come in pairs."""

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
        operation, inputs = self._prepared(
            image_features, text_features, logit_scale, bias=logit_bias, query_ids=ids, key_ids=ids, weights=weights,
            paired=True,
        )  # fmt: skip
        loss: Tensor = operation(*inputs)
        if self._unseen:
            self._look(logit_scale, image_features, text_features)
        return {"contrastive_loss": loss} if output_dict else loss


class ClipLoss(_PairedLoss):
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


class SigLipLoss(_PairedLoss):
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


class InfoNCELoss(_Loss):
    """One direction: each query finds its positives among the keys (van den Oord et al. 2018; Karpukhin et al. 2020).

    Naively

        loss = F.cross_entropy(scale * query @ torch.cat([key, negatives]).T, positives)

    Made as `InfoNCELoss(**how)`, with the keywords that `contrast` tells; returns and raises what `ClipLoss` does.

    Arguments of the call:
        query, key: [N, D] and [M, D], of one type; all keys of all ranks are compared with every query.
        scale: a number, or a tensor of shape [] or [1].
        positives: [N] or [N, P] indices into this rank's keys, −1 pads: the loss of a row is the mean of their −log p.
            Without it key i belongs to query i, and the keys behind the first N are hard negatives.
        negatives: [H, D] further keys, negatives of every query; or [N, H, D], H of each query alone.
        query_ids, key_ids: [N], [M] integers; pairs of equal ids that are not positive do not count.
        negative_ids: [N, H] integers for negatives [N, H, D]; one with the id of its query does not count.
        weights: [N]; the loss is Σ w·loss / Σ w.

    With `InfoNCELoss(in_batch=False)` a query meets its own key and its own negatives [N, H, D] alone: N·(1 + H)
    products instead of N·M. `InfoNCELoss(hardness_mode=..., hardness_strength=5.0)` weighs negatives by exp(5 ·
    similarity), see `contrastile.losses.Hardness`.

    >>> import torch, torch.nn.functional as F
    >>> query, key, positives = torch.randn(4, 16), torch.randn(12, 16), torch.tensor([0, 3, 6, 9])
    >>> loss = InfoNCELoss()(query, key, 1.0, positives=positives)
    >>> torch.testing.assert_close(loss, F.cross_entropy(query @ key.T, positives))
    >>> own = torch.randn(4, 5, 16)
    >>> loss = InfoNCELoss()(query, key[:4], 1.0, negatives=own)
    >>> x = torch.cat([query @ key[:4].T, (own @ query[..., None])[..., 0]], dim=1)
    >>> torch.testing.assert_close(loss, F.cross_entropy(x, torch.arange(4)))
    """

    names: ClassVar[dict[str, str]] = {"q": "query", "k": "key"}
    pair_loss = Softmax()
    unit_rows = False

    def __init__(
        self,
        *,
        in_batch: bool = True,
        hardness_mode: Literal["in_batch_negatives", "hard_negatives", "all_negatives"] | None = None,
        hardness_strength: float = 0.0,
        **how: Unpack[How],
    ) -> None:
        super().__init__(**how)
        self.in_batch = in_batch
        if hardness_mode is not None:
            smoothing = self.options.label_smoothing
            self.loss = Hardness(
                label_smoothing=smoothing, hardness_strength=hardness_strength, hardness_mode=hardness_mode
            )
        elif hardness_strength:
            raise invalid("hardness_mode", "be given with `hardness_strength`", None, '"all_negatives", say.')

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
        negative_ids: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        others: dict[str, Any] = {
            "positives": positives, "negatives": negatives, "query_ids": query_ids, "key_ids": key_ids,
            "negative_ids": negative_ids, "weights": weights,
        }  # fmt: skip
        if not self.in_batch:
            try:
                key, others = _own_keys(query, key, others)
            except ValueError as error:
                self._tell_all(error)
                raise
        operation, inputs = self._prepared(query, key, scale, **others)
        loss: Tensor = operation(*inputs)
        return loss


def _own_keys(query: Tensor, key: Tensor, others: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """No shared key, and the arguments in which each query's key comes before its own negatives."""
    negatives, ids = others["negatives"], others["negative_ids"]
    if not isinstance(negatives, Tensor) or negatives.ndim != 3:
        got = f"shape {list(negatives.shape)}" if isinstance(negatives, Tensor) else type(negatives).__name__
        raise invalid("negatives", "be [N, H, D], each query's own, with in_batch=False", got, "List them.")
    for name in ("positives", "key_ids"):
        if others[name] is not None:
            raise invalid(name, "be left out with in_batch=False", "both", "Key i belongs to query i.")
    checks.features("key", key)
    checks.alike("negatives", negatives, "key", key)
    checks.same_length("key", key, "query", query)
    checks.same_length("negatives", negatives, "query", query)
    if ids is not None:
        # the key always counts
        ids = torch.cat([others["query_ids"][:, None] + 1, ids], dim=1)
    own = torch.cat([key[:, None], negatives], dim=1)
    return key[:0], {**others, "negatives": own, "negative_ids": ids, "own_positives": 1}


class SupConLoss(_Loss):
    """Supervised contrastive learning (Khosla et al. 2020, equation 2): every other example of the label is a
    positive.

    Naively, with x = scale · ⟨f_i, f_j⟩ and P(i) the others of i's label,

        loss_i = −mean_{p ∈ P(i)} log(exp x_ip / Σ_{j ≠ i} exp x_ij)

    and the mean over the i that have a positive; NaN if none has. Made as `SupConLoss(**how)`, with the keywords that
    `contrast` tells; returns and raises what `ClipLoss` does.

    Arguments of the call:
        features: [N, D], or [N, views, D] for several views of each example; rows of unit length.
        labels: [N] integers.
        scale: a number, or a tensor of shape [] or [1].

    >>> import torch, torch.nn.functional as F
    >>> features, labels = F.normalize(torch.randn(6, 16), dim=-1), torch.tensor([0, 0, 1, 1, 2, 2])
    >>> loss = SupConLoss()(features, labels, 10.0)
    >>> others = (10.0 * features @ features.T).fill_diagonal_(-torch.inf)
    >>> torch.testing.assert_close(loss, F.cross_entropy(others, torch.tensor([1, 0, 3, 2, 5, 4])))
    """

    names: ClassVar[dict[str, str]] = {"q": "features", "k": "features"}
    pair_loss = Softmax(exclude_self=True)

    def forward(self, features: Tensor, labels: Tensor, scale: Tensor | float) -> Tensor:
        try:
            if not isinstance(features, Tensor) or features.ndim not in (2, 3):
                got = f"shape {list(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
                rule = "be a tensor of shape [N, D] or [N, views, D]"
                raise invalid("features", rule, got, "Flatten the others first.")
            checks.vector("labels", labels, "features", features, integer=True)
        except ValueError as error:
            self._tell_all(error)
            raise
        if features.ndim == 3:
            labels = labels.repeat_interleave(features.shape[1])
            features = features.flatten(0, 1)
        operation, inputs = self._prepared(features, features, scale, query_labels=labels, key_labels=labels)
        loss: Tensor = operation(*inputs)
        if self._unseen:
            self._look(scale, features)
        return loss


class NTXentLoss(_Loss):
    """SimCLR's normalised-temperature cross-entropy (Chen et al. 2020, equation 1).

    Every view is compared with the 2N − 1 others; its positive is the other view of the same example. Naively

        views = torch.cat([view_a, view_b])
        x = (scale * views @ views.T).fill_diagonal_(-torch.inf)
        loss = F.cross_entropy(x, torch.arange(2 * N).roll(N))

    Made as `NTXentLoss(**how)`, with the keywords that `contrast` tells; returns and raises what `ClipLoss` does.

    Arguments of the call:
        view_a, view_b: [N, D], of one type; rows of unit length.
        scale: a number, or a tensor of shape [] or [1].

    >>> import torch, torch.nn.functional as F
    >>> a, b = F.normalize(torch.randn(2, 8, 16), dim=-1)
    >>> loss = NTXentLoss()(a, b, 2.0)
    >>> views = torch.cat([a, b])
    >>> others = (2.0 * views @ views.T).fill_diagonal_(-torch.inf)
    >>> torch.testing.assert_close(loss, F.cross_entropy(others, torch.arange(16).roll(8)))
    """

    names: ClassVar[dict[str, str]] = {"q": "view_a", "k": "view_b"}
    pair_loss = Softmax(exclude_self=True)

    def forward(self, view_a: Tensor, view_b: Tensor, scale: Tensor | float) -> Tensor:
        try:
            checks.features("view_a", view_a)
            checks.features("view_b", view_b)
            checks.alike("view_b", view_b, "view_a", view_a)
            checks.same_length("view_b", view_b, "view_a", view_a)
        except ValueError as error:
            self._tell_all(error)
            raise
        views = torch.cat([view_a, view_b])
        N = len(view_a)
        other = torch.arange(2 * N, device=views.device).roll(N)
        operation, inputs = self._prepared(views, views, scale, positives=other, positives_in_range=True)
        loss: Tensor = operation(*inputs)
        if self._unseen:
            self._look(scale, view_a, view_b)
        return loss
