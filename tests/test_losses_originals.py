"""Losses equal the classes that users know, loss and gradients, in float64; skipped where a library is not installed.

pip install sentence-transformers pytorch-metric-learning lightly open_clip_torch siglip-kernel
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from further import _unit as unit
from problems import distance
from torch import Tensor

from contrastile import InfoNCELoss

N, H, D = 14, 2, 9


def _leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [unit(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def _products(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.T


def _equal(ours: Tensor, theirs: Tensor, leaves: list[Tensor], constant: float = 0.0) -> None:
    """Equal losses, but for a constant, and equal gradients."""
    assert abs(float(ours + constant - theirs)) <= 1e-12 * max(1.0, abs(float(theirs)))
    for a, b in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        assert distance(a, b) <= 1e-12


@pytest.mark.parametrize("mode", [None, "in_batch_negatives", "hard_negatives", "all_negatives"])
def test_hardness_of_sentence_transformers(mode: Any) -> None:
    """Their hard negatives are negatives of all queries, and those of the query itself have their own weight."""
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    anchor, positive, *negatives = leaves = _leaves(*[(N, D)] * (2 + H))
    hardness: Any = {"hardness_mode": mode, "hardness_strength": 5.0} if mode else {}
    # their default normalises, which takes the radial part of the gradients away
    theirs = losses.MultipleNegativesRankingLoss(None, scale=20.0, similarity_fct=_products, **hardness)
    rows = torch.arange(N)
    # a key behind the first N has the id of its query, which meets it among its own negatives
    ours = InfoNCELoss(**hardness)(
        anchor, torch.cat([positive, *negatives]), 20.0, negatives=torch.stack(negatives, 1), query_ids=rows,
        key_ids=rows.repeat(1 + H), negative_ids=torch.full((N, H), -1),
    )  # fmt: skip
    _equal(ours, theirs.compute_loss_from_embeddings(leaves, None), leaves)
