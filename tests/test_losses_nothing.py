"""Batches in which no row has a loss: the mean is 0, with gradients of 0, in every route and on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import distance
from ranks import Pool
from torch import Tensor

from contrastile import ClipLoss, DistillClipLoss, GISTLoss, ScoreDistillLoss, SigLipLoss, contrast
from contrastile.losses import DecoupledWeighted, Sigmoid, Softmax
from contrastile.losses.reference import dense_decoupled, dense_sigmoid, dense_softmax

SHARES = [5, 7, 3]


def _pads(n: int, P: int = 1) -> Tensor:
    return torch.full((n, P), -1)


# rows without a positive, without a negative of the decoupled loss, or of weight 0
NOBODY: dict[str, Callable[..., Tensor]] = {
    "positives": lambda q, k, scale, **how: contrast(
        q, k, scale=scale, loss=Softmax(), positives=_pads(len(q)), **how
    ),
    "labels": lambda q, k, scale, **how: contrast(
        q, k, scale=scale, query_labels=torch.zeros(len(q)).long(), key_labels=torch.ones(len(k)).long(), **how
    ),
    "ids": lambda q, k, scale, **how: contrast(
        q, k, scale=scale, loss=DecoupledWeighted(symmetric=True), query_ids=torch.zeros(len(q)).long(),
        key_ids=torch.zeros(len(k)).long(), **how
    ),
    "weights": lambda q, k, scale, **how: ClipLoss(**how)(q, k, scale, weights=torch.zeros(len(q))),
    "pairwise": lambda q, k, scale, **how: SigLipLoss(**how)(q, k, scale, weights=torch.zeros(len(q))),
    "guide": lambda q, k, scale, **how: GISTLoss(**how)(
        q, k, scale, guide_query=q.detach(), guide_key=k.detach(), positives=_pads(len(q))
    ),
    "teacher": lambda q, k, scale, **how: DistillClipLoss(**how)(
        q, k, scale, q.detach(), k.detach(), 3.0, weights=torch.zeros(len(q))
    ),
    "scores": lambda q, k, scale, **how: ScoreDistillLoss(**how)(
        q, k, torch.zeros(len(q), 2), scale, lists=_pads(len(q), 2)
    ),
}  # fmt: skip


# Triton's interpreter computes with NumPy, which warns
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "route"),
    [
        *[(name, route) for name in NOBODY for route in ("eager", "strips", "dense")],
        # listed scores have no kernel, and the other losses share these kernels
        *[(name, "triton") for name in ("ids", "weights", "pairwise", "guide")],
        ("weights", "compile"),
    ],
)
def test_the_mean_over_nothing_is_0(name: str, route: str) -> None:
    """0 / 0 would end a training."""
    if route == "triton":
        pytest.importorskip("triton")
    q, k = (x.requires_grad_() for x in F.normalize(torch.randn(2, 1100 if route == "strips" else 37, 4), dim=-1))
    scale = torch.tensor(10.0, requires_grad=True)
    backend = route if route in ("dense", "triton") else "eager"
    if route == "compile":
        torch._dynamo.reset()
    for reduction in ("mean", "none", "sum")[: 3 if route == "eager" else 1]:
        call: Callable[..., Tensor] = partial(NOBODY[name], reduction=reduction, backend=backend)
        loss = (torch.compile(call, backend="eager") if route == "compile" else call)(q, k, scale)
        assert (loss == 0).all()
        assert all((gradient == 0).all() for gradient in torch.autograd.grad(loss.sum(), (q, k, scale)))


def test_the_plain_formulas_have_it_so() -> None:
    q, k = (x.requires_grad_() for x in torch.randn(2, 5, 8))
    for formula in (dense_softmax, dense_decoupled, dense_sigmoid):
        loss = formula(q, k, 2.0, weights=torch.zeros(5))
        assert loss == 0
        assert all((gradient == 0).all() for gradient in torch.autograd.grad(loss, (q, k)))


def test_it_hides_no_number_that_is_not_finite() -> None:
    q, k = F.normalize(torch.randn(2, 5, 8), dim=-1)
    q[4, 2] = torch.nan
    for name in ("positives", "weights", "pairwise", "ids"):
        assert NOBODY[name](q, k, 1.0).isnan(), name


def test_weights_that_cancel_have_no_mean() -> None:
    q, k = F.normalize(torch.randn(2, 2, 8), dim=-1)
    for loss in (ClipLoss(), SigLipLoss()):
        assert not loss(q, k, 10.0, weights=torch.tensor([1.0, -1.0])).isfinite()


def _some_silent(rank: int, group: Any, kind: str, silent: list[int], how: dict[str, Any]) -> list[Tensor]:
    """Loss and gradients of a rank, or of all ranks in one process, where no row of the silent ones has a loss."""
    ranks = slice(rank, rank + 1) if group is not None else slice(0, 3)
    sides = torch.randn(2, sum(SHARES), 6, generator=torch.Generator().manual_seed(1)).double().split(SHARES, dim=1)
    q, k = (x.requires_grad_() for x in F.normalize(torch.cat(sides[ranks], 1), dim=-1))
    speaks = torch.cat([torch.full((n,), r not in silent) for r, n in enumerate(SHARES)][ranks])
    scale, weights = torch.tensor(5.0, dtype=torch.float64, requires_grad=True), speaks.double()
    if kind == "positives":
        positives = torch.arange(len(q)).where(speaks, torch.tensor(-1))
        loss = contrast(q, k, scale=scale, loss=Softmax(), positives=positives, group=group, **how)
    elif kind == "scores":
        listed = ScoreDistillLoss(kind="margin_mse", group=group, **how)
        loss = listed(q, torch.stack([k, -k], 1), torch.zeros(len(q), 2), scale, weights=weights)
    else:
        pair_loss = {"sigmoid": Sigmoid(), "dclw": DecoupledWeighted(symmetric=True)}.get(kind, Softmax(symmetric=True))
        loss = contrast(q, k, scale=scale, loss=pair_loss, weights=weights, group=group, **how)
    return [loss.detach(), *torch.autograd.grad(loss, (q, k, scale))]


KINDS = ["positives", "scores", "clip", "sigmoid", "dclw"]


def _every_kind(rank: int, group: Any, how: dict[str, Any]) -> list[list[Tensor]]:
    return [_some_silent(rank, group, kind, silent, how) for kind in KINDS for silent in ([1], [0, 2], [0, 1, 2])]


@pytest.mark.parametrize("exchange", ["gather", "ring", "replicate"])
def test_ranks_without_a_row_that_has_a_loss(pool: Pool, exchange: str) -> None:
    truths, answers = _every_kind(0, None, {}), pool.run(_every_kind, 3, {"exchange": exchange})
    for case, (truth, *true_gradients) in enumerate(truths):
        # every third case has no row with a loss on any rank
        assert (truth == 0) == (case % 3 == 2)
        losses, *gradients = zip(*(answer[case] for answer in answers), strict=True)
        assert all(distance(loss, truth) <= 1e-12 for loss in losses)
        for parts, true in zip(gradients, true_gradients, strict=True):
            combined = torch.cat(parts) / 3 if true.ndim else torch.stack(parts).mean(0)
            assert distance(combined, true) <= 1e-12
            assert (combined == 0).all() or case % 3 < 2
