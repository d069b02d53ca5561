"""Positives by few labels on a CPU, whose sums are products with indicators: the plain formula of all pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import assert_same, distance
from torch import Tensor

from contrastile import contrast
from contrastile.losses.base import Shard
from contrastile.losses.labelled import few_labels
from contrastile.losses.softmax import Softmax

# of the rows; those of further columns repeat
LABELS = torch.tensor([7, -3, 7, 0, -3, 0, 7, -3, 0, 0, 7, 7, -3])
# one of 32 labels is few
COPIES = 9
LOSSES = pytest.mark.parametrize(
    "loss",
    [
        Softmax(), Softmax(symmetric=True), Softmax(exclude_self=True), Softmax(symmetric=True, label_smoothing=0.2),
        Softmax(exclude_self=True, label_smoothing=0.2), Softmax(symmetric=True, exclude_self=True),
    ],
    ids=repr,
)  # fmt: skip


def _sides(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    labels = LABELS.repeat(COPIES)
    q, k = (F.normalize(torch.randn(len(labels), 5), dim=-1).to(dtype) for _ in range(2))
    return q, k, labels


def _plain(loss: Softmax, x: Tensor, labels: Tensor) -> Tensor:
    """The loss of each row, and in both directions of each column."""
    positive, counts = labels[:, None] == labels, torch.ones_like(x, dtype=torch.bool)
    if loss.exclude_self:
        counts.fill_diagonal_(False)
    of_sides, smoothing = [], loss.label_smoothing
    for logits in (x, x.T)[: 1 + loss.symmetric]:
        log_p = logits.masked_fill(~counts, -torch.inf).log_softmax(1).masked_fill(~counts, 0.0)
        targets = F.normalize((positive & counts).to(x.dtype), p=1, dim=1) * (1 - smoothing)
        of_sides.append(-((targets + smoothing * F.normalize(counts.to(x.dtype), p=1, dim=1)) * log_p).sum(1))
    return torch.stack(of_sides).mean(0)


@LOSSES
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_few_labels_give_the_plain_formulas_loss_and_gradients(loss: Softmax, reduction: Any) -> None:
    q, k, labels = _sides(torch.float64)
    leaves = [q.requires_grad_(), k.requires_grad_(), torch.tensor(9.0, dtype=torch.float64, requires_grad=True)]
    given = {"query_labels": labels, "key_labels": labels, "loss": loss, "reduction": reduction}
    truth = _plain(loss, leaves[2] * leaves[0] @ leaves[1].T, labels)
    truth = truth if reduction == "none" else truth.mean()
    assert_same(lambda: contrast(*leaves[:2], scale=leaves[2], **given), truth, leaves)


def test_an_example_may_have_another_label_as_a_key() -> None:
    q, k, labels = _sides(torch.float64)
    other, itself = labels.clone(), torch.eye(len(labels), dtype=torch.bool)
    other[:2] = labels[2]
    found = contrast(
        q, k, scale=9.0, loss=Softmax(exclude_self=True), query_labels=labels, key_labels=other, reduction="none"
    )
    targets = F.normalize(((labels[:, None] == other) & ~itself).double(), p=1, dim=1)
    log_p = (9.0 * q @ k.T).masked_fill(itself, -torch.inf).log_softmax(1).masked_fill(itself, 0.0)
    assert distance(found, -(targets * log_p).sum(1)) <= 1e-12


@LOSSES
def test_gradients_of_like_features_are_no_further_from_0_than_twice_the_plain_formulas(loss: Softmax) -> None:
    _, _, labels = _sides(torch.float32)
    q = F.normalize(torch.randn(1, 5), dim=-1).expand(len(labels), -1)
    leaves = [q.clone().requires_grad_(), q.clone().requires_grad_()]
    found = contrast(*leaves, scale=9.0, query_labels=labels, key_labels=labels, loss=loss)
    plain = _plain(loss, 9.0 * leaves[0] @ leaves[1].T, labels).mean()
    for one, other in zip(*(torch.autograd.grad(x, leaves) for x in (found, plain)), strict=True):
        # every pair pulls and is pushed alike; one number of each row is rounded
        assert one.norm() <= 2 * other.norm() + 4 * torch.finfo(torch.float32).eps * 9.0 * len(labels) ** -0.5


def test_masks_are_made_where_products_do_not_do() -> None:
    q, k, labels = _sides(torch.float32)
    rows, cols, close = Shard(q, labels=labels), Shard(k, labels=labels), (-9.0, 9.0)
    ids, single = torch.arange(len(labels)), labels.clone()
    single[5] = 100
    few = Softmax()
    assert few_labels(few, rows, cols, close) is not None
    assert few_labels(few, rows, cols, (-99.0, 9.0)) is None
    assert few_labels(few, rows, cols, None) is None
    assert few_labels(few, Shard(q, labels=labels, ids=ids), Shard(k, labels=labels, ids=ids), close) is None
    assert few_labels(few, Shard(q, labels=single), Shard(k, labels=single), close) is None
    assert few_labels(few, Shard(q, labels=ids), Shard(k, labels=ids), close) is None
    assert few_labels(few, Shard(q, diagonal=0), cols, close) is None
    assert few_labels(Softmax(symmetric=True), rows.narrow(0, 40), cols, close) is None
