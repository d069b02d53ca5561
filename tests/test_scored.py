"""A learned distance equals plain autograd over the whole matrix: value, and gradients of features, Ω, scale, bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import distance
from scored import KINDS, PROBLEMS, by_formula, by_tiles, gradients, leaves, numbers, scorer, sides
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from contrastile import contrast, encode
from contrastile.footprint import footprint
from contrastile.losses.softmax import Softmax
from contrastile.scorers import Bilinear, MaxSim, PairMLP
from contrastile.tiles.scored import Scored

WORKSPACE = 2**20


def close(x: Tensor, truth: Tensor) -> bool:
    """To 1e-12 of its size; what cancels to rounding noise, to 1e-14 itself."""
    return x.shape == truth.shape and float((x - truth).norm()) <= 1e-12 * float(truth.norm()) + 1e-14


def same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(
        (x is None) == (truth is None) and (x is None or close(x, truth)) for x, truth in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_loss_and_scorer_equals_plain_autograd(name: str, kind: str, reduction: str, tiles: list[int]) -> None:
    problem = PROBLEMS[name](43, 71)
    module, (rows, cols), named = scorer(kind, problem.same), sides(kind, problem), numbers(problem)
    groups = (leaves(rows, cols), module.parameters(), named.values())
    truth = by_formula(problem, module, rows, cols, named, reduction=reduction)
    loss = by_tiles(problem, module, rows, cols, named, reduction=reduction)
    assert loss.shape == truth.shape
    assert close(loss.detach(), truth.detach())
    wanted = [list(group) for group in groups]
    assert same(gradients(loss, *wanted), gradients(truth, *wanted))
    assert min(tiles) < problem.N


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tiles of 16: a small problem has several, and uneven ones; the sides that were in use."""
    used: list[int] = []

    def side(self: Scored, dtype: torch.dtype) -> int:
        used.append(min(16, self.side))
        return used[-1]

    monkeypatch.setattr(Scored, "_side", side)
    return used
