"""Losses equal the classes that users know, loss and gradients, in float64; skipped where a library is not installed.

Hardness, the guided loss and the one of open_clip's teachers are compared with their adapters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from further import unit
from problems import distance
from torch import Tensor

from contrastile import (
    InfoNCELoss,
    KeyQueue,
    NTXentLoss,
    ScoreDistillLoss,
    SigLipLoss,
    SupConLoss,
    contrast,
)
from contrastile.losses import Decoupled, DecoupledWeighted, Softmax

N, H, D = 14, 2, 9


def _leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [unit(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def _equal(ours: Tensor, theirs: Tensor, leaves: list[Tensor]) -> None:
    """Equal losses and equal gradients."""
    difference, size = (ours - theirs).detach(), theirs.detach()
    assert abs(float(difference)) <= 1e-12 * max(1.0, abs(float(size)))
    for a, b in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        assert distance(a, b) <= 1e-12


# of theirs, a tensor made of a tensor
@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("sigma", [None, 0.5])
def test_decoupled_losses_of_lightly(sigma: float | None) -> None:
    """Theirs normalise, and have the other examples of the same view among the negatives."""
    losses = pytest.importorskip("lightly.loss.dcl_loss")
    a, b = leaves = _leaves((N, D), (N, D))
    theirs = losses.DCLLoss(temperature=0.1) if sigma is None else losses.DCLWLoss(temperature=0.1, sigma=sigma)
    loss, rows = Decoupled() if sigma is None else DecoupledWeighted(sigma=sigma), torch.arange(N)
    ours = [
        contrast(q, k, scale=10.0, loss=loss, negatives=q, query_ids=rows, key_ids=rows.repeat(2))
        for q, k in itertools.permutations([F.normalize(a, dim=-1), F.normalize(b, dim=-1)])
    ]
    _equal((ours[0] + ours[1]) / 2, theirs(a, b), leaves)


@pytest.mark.parametrize("kind", ["kl", "margin_mse"])
def test_scores_of_sentence_transformers(kind: Any) -> None:
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    query, *keys = leaves = _leaves(*[(N, D)] * (2 + H))
    scores = torch.randn(N, 1 + H, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    theirs = (losses.DistillKLDivLoss if kind == "kl" else losses.MarginMSELoss)(None)
    ours = ScoreDistillLoss(kind=kind)(query, torch.stack(keys, 1), scores)
    _equal(ours, theirs.compute_loss_from_embeddings(leaves, scores), leaves)


def test_supervised_loss_of_pytorch_metric_learning() -> None:
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    leaves, labels = _leaves((N, D)), torch.arange(N) // 3
    ours = SupConLoss()(F.normalize(leaves[0], dim=-1), labels, 10.0)
    _equal(ours, losses.SupConLoss(temperature=0.1)(leaves[0], labels), leaves)


def test_references_of_pytorch_metric_learning() -> None:
    """Their labels of references must be another tensor, or the diagonal is left out."""
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    leaves, labels = _leaves((N, D), (N, D)), torch.arange(N) // 3

    def unit_rows() -> Iterator[Tensor]:
        return (F.normalize(x, dim=-1) for x in leaves)

    theirs = losses.SupConLoss(temperature=0.1)(leaves[0], labels, ref_emb=leaves[1], ref_labels=labels.flip(0))
    ours = contrast(*unit_rows(), scale=10.0, loss=Softmax(), query_labels=labels, key_labels=labels.flip(0))
    _equal(ours, theirs, leaves)
    rows = torch.arange(N)
    theirs = losses.NTXentLoss(temperature=0.1)(leaves[0], rows, ref_emb=leaves[1], ref_labels=rows.clone())
    _equal(InfoNCELoss()(*unit_rows(), 10.0), theirs, leaves)
    both = losses.SelfSupervisedLoss(losses.NTXentLoss(temperature=0.1))
    _equal(NTXentLoss()(*unit_rows(), 10.0), both(*leaves), leaves)


def test_cross_batch_memory_of_pytorch_metric_learning() -> None:
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    labels = torch.arange(N) // 3
    memory = losses.CrossBatchMemory(losses.SupConLoss(temperature=0.1), D, memory_size=3 * N).double()
    queue = KeyQueue(2 * N, features=D, dtype=torch.float64)
    for step in range(5):
        leaves, own = [unit(N, D, seed=step).requires_grad_()], labels.roll(step)
        x = F.normalize(leaves[0], dim=-1)
        ours = contrast(
            x, x.detach(), scale=10.0, loss=Softmax(exclude_self=True), negatives=queue.keys, query_labels=own,
            key_labels=torch.cat([own, queue.ids]),
        )  # fmt: skip
        _equal(ours, memory(leaves[0], own), leaves)
        queue.push(x, own)


def test_balanced_sigmoid_of_siglip_kernel() -> None:
    """By its formula: its kernels need a GPU. Theirs is divided by N · N."""
    leaves, labels = _leaves((N, D), (N, D)), torch.arange(N) // 3
    positive = labels[:, None] == labels
    number = positive.double().sum(1)
    x = 10.0 * leaves[0] @ leaves[1].T - 5.0
    v = torch.where(positive, 0.5 / number[:, None] + 0.5 / number, 1.0)
    theirs = (v * F.binary_cross_entropy_with_logits(x, positive.double(), reduction="none")).mean()
    _equal(SigLipLoss(balanced=True)(*leaves, 10.0, -5.0, labels=labels), theirs * N, leaves)
