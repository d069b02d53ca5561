"""Positives that are few pairs on a CPU: rows with none, one and several, as the plain formula of all pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import assert_same, distance
from torch import Tensor

from contrastile import contrast
from contrastile.losses import pairs
from contrastile.losses.base import Shard, Tile, mark
from contrastile.losses.decoupled import Decoupled
from contrastile.losses.sigmoid import Sigmoid
from contrastile.losses.softmax import Softmax, SoftmaxInside

# 0 to 3 and those above 8 appear once
LABELS = torch.tensor([0, 1, 2, 3, *[4, 5, 6, 7, 8] * 3, 9, *[4, 7] * 3, 8, *range(10, 16)])
LOSSES = pytest.mark.parametrize(
    "loss",
    [
        Softmax(), Softmax(symmetric=True), Softmax(exclude_self=True), Softmax(symmetric=True, exclude_self=True),
        SoftmaxInside(), SoftmaxInside(exclude_self=True), Decoupled(), Decoupled(symmetric=True),
        Decoupled(exclude_self=True),
    ],
    ids=repr,
)  # fmt: skip


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The direct losses that were made."""
    made: list[Any] = []
    for module in ("softmax", "decoupled"):
        name = f"contrastile.losses.{module}.direct_by_pairs"
        monkeypatch.setattr(name, lambda *given: made.append(pairs.direct_by_pairs(*given)) or made[-1])
    return made


def _sides(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q, k = (F.normalize(torch.randn(len(LABELS), 5), dim=-1).to(dtype) for _ in range(2))
    return q, k


def _plain(loss: Softmax, x: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row, and in both directions of each column; and whether it has one."""
    counts = torch.ones_like(x, dtype=torch.bool)
    if loss.exclude_self:
        counts.fill_diagonal_(False)
    of_sides, known, positive = [], [], positive & counts
    for logits, of_side in ((x, positive), (x.T, positive.T))[: 1 + loss.symmetric]:
        logits, number = logits.masked_fill(~counts, -torch.inf), of_side.sum(1)
        below = counts & ~of_side if isinstance(loss, Decoupled) else counts
        some = (number > 0) & below.any(1)
        whole = logits.masked_fill(~below, -torch.inf)[some].logsumexp(1)
        if isinstance(loss, SoftmaxInside):
            inner = logits.masked_fill(~of_side, -torch.inf)[some].logsumexp(1) - number[some].to(x).log()
        else:
            inner = logits.masked_fill(~of_side, 0.0)[some].sum(1) / number[some]
        of_sides.append(torch.zeros_like(logits[:, 0]).index_put((some,), whole - inner))
        known.append(some)
    return torch.stack(of_sides), torch.stack(known)


def _mean(losses: Tensor, known: Tensor) -> Tensor:
    return (losses.sum(1) / known.sum(1)).mean()


@LOSSES
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_few_pairs_give_the_plain_formulas_loss_and_gradients(loss: Softmax, reduction: Any, found: list[Any]) -> None:
    q, k = _sides(torch.float64)
    leaves = [q.requires_grad_(), k.requires_grad_(), torch.tensor(9.0, dtype=torch.float64, requires_grad=True)]
    given = {"query_labels": LABELS, "key_labels": LABELS, "loss": loss, "reduction": reduction}
    losses, known = _plain(loss, leaves[2] * leaves[0] @ leaves[1].T, LABELS[:, None] == LABELS)
    truth = _mean(losses, known) if reduction == "mean" else (losses * (len(q) / known.sum(1))[:, None]).mean(0)
    assert_same(lambda: contrast(*leaves[:2], scale=leaves[2], **given), truth, leaves)
    assert found
    assert None not in found


def test_several_listed_positives_of_other_keys(found: list[Any]) -> None:
    q, k = (torch.randn(n, 5, dtype=torch.float64, requires_grad=True) for n in (6, 40))
    listed = torch.tensor([[3, 9], [8, -1], [-1, -1], [3, 39], [0, 0], [21, 20]])
    value = contrast(q, k, scale=0.5, loss=Softmax(), positives=listed)
    positive = torch.zeros(6, 41, dtype=torch.bool).scatter(1, listed % 41, value=True)[:, :40]
    truth = _mean(*_plain(Softmax(), 0.5 * q @ k.T, positive))
    for one, exact in zip(*(torch.autograd.grad(x, (q, k)) for x in (value, truth)), strict=True):
        assert distance(one, exact) <= 1e-12
    assert found
    assert None not in found


@LOSSES
def test_gradients_of_like_features_are_no_further_from_0_than_twice_the_plain_formulas(loss: Softmax) -> None:
    q = F.normalize(torch.randn(1, 5), dim=-1).expand(len(LABELS), -1)
    leaves = [q.clone().requires_grad_(), q.clone().requires_grad_()]
    value = contrast(*leaves, scale=9.0, query_labels=LABELS, key_labels=LABELS, loss=loss)
    plain = _mean(*_plain(loss, 9.0 * leaves[0] @ leaves[1].T, LABELS[:, None] == LABELS))
    for one, other in zip(*(torch.autograd.grad(x, leaves) for x in (value, plain)), strict=True):
        # every pair pulls and is pushed alike; one number of each row is rounded
        assert one.norm() <= 2 * other.norm() + 4 * torch.finfo(torch.float32).eps * 9.0 * len(LABELS) ** -0.5


def test_a_loss_near_0_keeps_its_digits() -> None:
    """A row whose one positive is 30 above all others."""
    x = torch.eye(9) * 30
    labels = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 7])
    leaf = x.clone().requires_grad_()
    given = {"query_labels": labels, "key_labels": labels, "reduction": "none"}
    value = contrast(leaf, torch.eye(9), scale=1.0, loss=Softmax(), **given)
    assert distance(value[0].detach(), (8 * torch.exp(torch.tensor(-30.0, dtype=torch.float64))).log1p()) <= 1e-6
    (gradient,) = torch.autograd.grad(value[0], leaf)
    assert distance(gradient[0, 1], torch.exp(torch.tensor(-30.0, dtype=torch.float64))) <= 1e-5
    assert distance(gradient[0, 0], -8 * torch.exp(torch.tensor(-30.0, dtype=torch.float64))) <= 1e-5


@pytest.mark.parametrize(("bias", "direct"), [(-9.0, True), (-80.0, False)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_sigmoid_loss_of_labels(bias: float, direct: bool, reduction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far logits have no exponential of their own."""
    if direct and reduction == "mean":
        monkeypatch.setattr(Sigmoid, "absorb", None)
    q, k = _sides(torch.float64)
    numbers = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (9.0, bias))
    leaves = [q.requires_grad_(), k.requires_grad_(), *numbers]
    given = {"query_labels": LABELS, "key_labels": LABELS, "loss": Sigmoid(), "reduction": reduction}
    value = contrast(q, k, scale=leaves[2], bias=leaves[3], **given)
    signs = 2.0 * (LABELS[:, None] == LABELS) - 1.0
    truth = -F.logsigmoid(signs * (leaves[2] * q @ k.T + leaves[3])).sum() / (len(q) if reduction == "mean" else 1)
    assert distance(value.detach(), truth.detach()) <= 1e-12
    for one, exact in zip(*(torch.autograd.grad(x, leaves) for x in (value, truth)), strict=True):
        assert distance(one, exact) <= 1e-12


def test_masks_are_read_where_lists_do_not_do() -> None:
    def made(n: int, labels: Tensor, bounds: tuple[float, float] | None, loss: Softmax, m: int = 0) -> Any:
        rows, cols = Shard(torch.empty(n, 2), labels=labels[:n]), Shard(torch.empty(m or n, 2), labels=labels[: m or n])
        positive, excluded = mark(rows, cols, exclude_self=False)
        return pairs.direct_by_pairs(loss, Tile(torch.zeros(n, m or n), positive, excluded, bounds))

    close, many = (-9.0, 9.0), torch.arange(700) // 65
    assert made(20, LABELS, close, Softmax()) is not None
    assert made(20, LABELS, (-99.0, 9.0), Softmax()) is None
    assert made(20, LABELS, None, Softmax()) is None
    assert made(20, LABELS, (-9.0, torch.inf), Softmax()) is None
    assert made(20, LABELS, close, Softmax(symmetric=True), 24) is None
    assert made(20, LABELS // 5, close, Softmax()) is None
    assert made(700, many - many % 2, close, Softmax()) is None
    assert made(700, torch.arange(700) // 60, close, Softmax()) is not None
