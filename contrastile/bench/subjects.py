"""Losses of `bench loss` whose inputs are more than two sides: modules that make these inputs, and plain formulas.

Under `gate.py`, which compares them. The inputs follow from the features or from the row alone, so that both sides of a
comparison have the same. A formula `some_...` is the mean loss of a few rows, those `some` [n] of b.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile.functional import contrast
from contrastile.losses.reference import dense_sigmoid, dense_softmax
from contrastile.modules import InfoNCELoss, ScoreDistillLoss, SupConLoss

# examples of a label, negatives of each query, and the strength of hardness
OF_A_LABEL, OWN, HARDNESS = 4, 8, 5.0

Some = Callable[..., Tensor]


def over_all(some_rows: Some) -> Some:
    """The formula of all rows."""
    return lambda q, *others: some_rows(torch.arange(len(q), device=q.device), q, *others)


def labels_of(x: Tensor) -> Tensor:
    """Labels [b] of rows."""
    return torch.arange(len(x), device=x.device) // OF_A_LABEL


def _same_label(some: Tensor, x: Tensor) -> Tensor:
    return labels_of(x)[some][:, None] == labels_of(x)


def some_clip_labels(some: Tensor, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """Both directions of the softmax loss, with positives by label."""
    positive = _same_label(some, q)
    return (
        dense_softmax(q[some], k, scale, positive=positive) + dense_softmax(k[some], q, scale, positive=positive)
    ) / 2


def some_siglip_labels(some: Tensor, q: Tensor, k: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """The sigmoid loss with positives by label."""
    return dense_sigmoid(q[some], k, scale, bias, positive=_same_label(some, q))


def some_siglip_balanced(some: Tensor, q: Tensor, k: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """The same, the positives of each example of one weight together."""
    positive, count = _same_label(some, q), labels_of(q).bincount()[labels_of(q)]
    weights = torch.where(positive, (1 / count[some][:, None] + 1 / count) / 2, 1.0)
    x = scale * q[some] @ k.T + bias
    return -(weights * F.logsigmoid(torch.where(positive, x, -x))).sum() / len(some)


class Views(nn.Module):
    """SupConLoss of both sides as views of one example, with weights."""

    def __init__(self, form: Any = "out", **how: Any) -> None:
        super().__init__()
        self.loss, self.how = SupConLoss(form=form, **how).loss, how

    def forward(self, q: Tensor, k: Tensor, scale: Tensor, weights: Tensor | None = None) -> Tensor:
        views, labels = torch.cat([q, k]), labels_of(q).repeat(2)
        both = None if weights is None else weights.repeat(2)
        return contrast(
            views, views, scale=scale, loss=self.loss, query_labels=labels, key_labels=labels, weights=both, **self.how
        )


def some_views(form: str, some: Tensor, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """SupCon's loss of a few examples in both views."""
    views, labels, rows = torch.cat([q, k]), labels_of(q).repeat(2), torch.cat([some, some + len(q)])
    itself = rows[:, None] == torch.arange(len(views), device=q.device)
    positive = (labels[rows][:, None] == labels) & ~itself
    if form == "out":
        return dense_softmax(views[rows], views, scale, positive=positive, excluded=itself)
    x = (scale * views[rows] @ views.T).masked_fill(itself, -torch.inf)
    inside = x.masked_fill(~positive, -torch.inf).logsumexp(1) - positive.sum(1).to(x.dtype).log()
    return (x.logsumexp(1) - inside).mean()


def own(k: Tensor) -> Tensor:
    """Negatives of each query [b, H, d]: the keys that follow its own."""
    return torch.stack([k.roll(-shift, 0) for shift in range(1, OWN + 1)], 1)


def some_hardness_own(some: Tensor, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """Keys of the batch, and negatives of each query that weigh exp(hardness · similarity)."""
    similar = (own(k)[some] @ q[some][..., None])[..., 0]
    return F.cross_entropy(torch.cat([scale * q[some] @ k.T, scale * similar + HARDNESS * similar.detach()], 1), some)


hardness_own = partial(InfoNCELoss, hardness_mode="hard_negatives", hardness_strength=HARDNESS)


def queued(q: Tensor, k: Tensor) -> dict[str, Any]:
    """As many earlier keys as there are rows, constants."""
    del q
    return {"negatives": k.detach().roll(1, 1)}


def some_queue(some: Tensor, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """Keys of the batch and of the queue."""
    return F.cross_entropy(scale * q[some] @ torch.cat([k, queued(q, k)["negatives"]]).T, some)


class Listed(nn.Module):
    """ScoreDistillLoss of each query's own key and negatives."""

    def __init__(self, kind: Any, **how: Any) -> None:
        super().__init__()
        self.loss = ScoreDistillLoss(kind=kind, **how)

    def forward(self, q: Tensor, k: Tensor, scale: Tensor, weights: Tensor | None = None) -> Tensor:
        value: Tensor = self.loss(q, listed(k), scores(k), scale, weights=weights)
        return value


def listed(k: Tensor) -> Tensor:
    """The keys of each query [b, 1 + H, d]."""
    return torch.cat([k[:, None], own(k)], 1)


def scores(k: Tensor) -> Tensor:
    """Scores [b, 1 + H], eighths, which every type holds."""
    count = torch.arange(len(k) * (1 + OWN), device=k.device)
    return ((count * 7 % 64).to(torch.float32) / 8).view(len(k), -1)


def some_scores(kind: str, some: Tensor, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """The distance of a few rows' logits from their scores."""
    x, s = scale * (listed(k)[some] @ q[some][..., None])[..., 0], scores(k)[some].to(q.dtype)
    if kind == "margin_mse":
        return F.mse_loss(x[:, :1] - x[:, 1:], s[:, :1] - s[:, 1:])
    return F.kl_div(x.log_softmax(1), s.log_softmax(1), log_target=True, reduction="batchmean")
