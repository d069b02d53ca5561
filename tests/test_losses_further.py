"""Losses with inputs of their own equal their plain formulas: in every dtype, on ranks, in kernels, behind `encode`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from further import CASES, Case, N
from problems import distance, no_worse_than_twice
from ranks import Pool
from refusals import refusal
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from contrastile import (
    ClipLoss,
    DCLLoss,
    DistillClipLoss,
    GISTLoss,
    InfoNCELoss,
    NTXentLoss,
    ScoreDistillLoss,
    SigLipLoss,
    SupConLoss,
    contrast,
    encode,
)
from contrastile.losses import BalancedSigmoid, Guided, Hardness, Sigmoid, Softmax
from contrastile.losses.base import Finished
from contrastile.losses.reference import dense_decoupled, mises_fisher_weights
from contrastile.scorers import Bilinear, MaxSim
from contrastile.tiles import eager
from contrastile.tiles.base import OwnColumns, Tiles

SHARES = {1: [N], 2: [28, N - 28], 3: [20, 0, N - 20]}
# those that a fused kernel computes
FUSED = [
    "unicl",
    "siglip_labels",
    "own_negatives",
    "siglip_own",
    "own_negatives_only",
    "scores_kl",
    "scores_margin",
    "hardness_in_batch",
    "hardness_own",
    "hardness_all",
    "dclw",
    "dclw_labels",
    "gist_absolute",
    "gist_relative",
    "gist_listed_pairs",
    "gist_all_pairs",
    "distill_clip",
    "distill_clip_labels",
    "distill_labels",
    "siglip_balanced",
    "sup_con_in",
]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 columns, so that a batch has several."""
    monkeypatch.setattr(eager, "SIDE_CPU", 16)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", CASES)
def test_float64_equals_the_plain_formula(name: str, reduction: str) -> None:
    case = CASES[name]()
    tensors = case.tensors(torch.float64)
    truth, true_gradients = case.by_formula(tensors, reduction)
    # once in several tiles, once in as few as the workspace allows
    for how in ({"backend": "eager"}, {"backend": "dense"})[: 1 + (reduction == "mean")]:
        loss, gradients = case.by_tiles(tensors, reduction=reduction, workspace=2**20, **how)
        assert (loss - truth).abs().max() <= 1e-12 * truth.abs().max().clamp(min=1)
        for key, gradient in gradients.items():
            assert distance(gradient, true_gradients[key]) <= 1e-12, key


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [20.0, 100.0])
@pytest.mark.parametrize("name", CASES)
def test_no_further_from_float64_than_twice_the_plain_formula(name: str, scale: float, dtype: torch.dtype) -> None:
    case = CASES[name]()
    no_worse_than_twice(case, case.tensors(dtype, scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels(name: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    case = CASES[name]()
    no_worse_than_twice(case, case.tensors(dtype, 20.0), backend="triton")


def _on_a_rank(rank: int, group: Any, exchange: str) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Of every case the loss, and the gradients of a tower behind `encode` and of all else that wants one."""
    torch.set_default_dtype(torch.float64)
    try:
        W = 1 if group is None else torch.distributed.get_world_size(group)
        return {name: _behind_encode(CASES[name]().of_rank(rank, SHARES[W]), exchange, group) for name in CASES}
    finally:
        torch.set_default_dtype(torch.float32)


def _behind_encode(case: Case, exchange: str, group: Any) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(1)
    tensors = case.tensors(torch.float64)
    first = next(iter(tensors))
    tower = nn.Linear(tensors[first].shape[-1], tensors[first].shape[-1])
    # each rank must not only compute its own rows, but meet the others' encoded ones
    encoded = {
        key: F.normalize(encode(tower, x, sub_batch=7), dim=-1) if x.ndim == 2 else x for key, x in tensors.items()
    }
    loss = case.module(exchange=exchange, group=group)(**encoded, **case.constants)
    loss.backward()
    found = {key: x.grad for key, x in tower.named_parameters()}
    found |= {key: x.grad for key, x in tensors.items() if x.ndim != 2}
    return loss.detach(), {key: x for key, x in found.items() if x is not None}


@pytest.mark.parametrize(("W", "exchange"), [(2, "ring"), (3, "gather"), (3, "ring"), (3, "replicate")])
def test_ranks_have_the_gradients_of_one_process(pool: Pool, W: int, exchange: str) -> None:
    truths = _on_a_rank(0, None, "single")
    answers = pool.run(_on_a_rank, W, exchange)
    for name, (truth, true_gradients) in truths.items():
        for loss, _ in (answer[name] for answer in answers):
            assert distance(loss, truth) <= 1e-12, name
        for key, true in true_gradients.items():
            parts = [answer[name][1][key] for answer in answers]
            # the wrapper's mean of a parameter, and the rows of each rank
            rows = key in CASES[name]().leaves and true.ndim
            combined = torch.cat(parts) / W if rows else torch.stack(parts).mean(0)
            assert distance(combined, true) <= 1e-12, (name, key)


def _fused_labels(rank: int, group: Any, exchange: str) -> tuple[Tensor, dict[str, Tensor]]:
    case = CASES["distill_clip_labels"]().of_rank(rank, SHARES[3])
    return case.by_tiles(case.tensors(torch.float32), backend="triton", exchange=exchange, group=group)


@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_fused_kernels_compute_a_teacher_of_labels_and_ids_on_ranks(pool: Pool, exchange: str) -> None:
    """A row's label may have one row in a block and several in others."""
    pytest.importorskip("triton")
    case = CASES["distill_clip_labels"]()
    truth, true_gradients = case.by_formula(case.tensors(torch.float64))
    answers = pool.run(_fused_labels, 3, exchange)
    assert all(distance(loss, truth) <= 1e-6 for loss, _ in answers)
    for key, true in true_gradients.items():
        parts = [gradients[key] for _, gradients in answers]
        combined = torch.cat(parts) / 3 if true.ndim else torch.stack(parts).mean(0)
        assert distance(combined, true) <= 1e-5, key


# of Dynamo itself, about a tensor that it hands over a break
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("name", ["own_negatives", "siglip_balanced"])
def test_torch_compile_computes_it_beside_its_graph(name: str) -> None:
    """These calls are no operation of a graph, which breaks before them."""
    case = CASES[name]()
    tensors = case.tensors(torch.float64)
    truth = case.by_formula(tensors)[0]
    torch._dynamo.reset()
    compiled = torch.compile(lambda **named: case.module()(**named) * 2, backend="eager")
    assert distance(compiled(**tensors, **case.constants).detach(), 2 * truth) <= 1e-12


@pytest.mark.parametrize("student", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("teacher", [torch.bfloat16, torch.float16, torch.float64])
def test_a_teacher_may_have_a_type_and_a_size_of_its_own(student: torch.dtype, teacher: torch.dtype) -> None:
    pair, dist = F.normalize(torch.randn(2, 7, 5), dim=-1).to(student), F.normalize(torch.randn(2, 7, 9), dim=-1)
    dist = dist.to(teacher)
    loss = DistillClipLoss(weight=1.0)(*pair, 10.0, *dist, 30.0)
    x, t = (scale * a.double() @ b.double().T for scale, (a, b) in ((10.0, pair), (30.0, dist)))
    sides = [(b.log_softmax(1), a.log_softmax(1)) for a, b in ((x, t), (x.T, t.T))]
    truth = sum((q.exp() * (q - p)).sum(1).mean() for q, p in sides) / 2
    assert distance(loss, truth) <= 1e-5


def test_a_student_that_is_its_teacher_has_no_soft_loss() -> None:
    query, key, _ = (x.float() for x in CASES["own_negatives_only"]().leaves.values() if x.ndim < 3)
    student = query.clone().requires_grad_()
    loss = DistillClipLoss(weight=1.0)(student, key, 30.0, query, key, 30.0)
    loss.backward()
    assert loss.detach().abs() <= 1e-6
    assert student.grad is not None
    assert student.grad.abs().max() <= 1e-6


def _x(*shape: int) -> Tensor:
    return torch.ones(*shape)


def _guided_negatives(guide: Tensor) -> Tensor:
    """A guide's features of two negatives, which may not fit to them."""
    sides = {"guide_query": _x(3, 5), "guide_key": _x(3, 5)}
    return GISTLoss()(_x(3, 4), _x(3, 4), 1.0, **sides, negatives=_x(2, 4), guide_negatives=guide)


def test_features_that_are_not_finite_in_negatives_of_one_query_give_nan() -> None:
    tensors = CASES["own_negatives_only"]().tensors(torch.float32)
    with torch.no_grad():
        tensors["negatives"][3, 1] = -torch.inf
    loss = InfoNCELoss()(**tensors)
    loss.backward()
    assert loss.isnan()
    assert all(x.grad is not None and x.grad.isnan().all() for x in (tensors["query"], tensors["key"]))


def test_a_guide_that_is_not_finite_gives_nan() -> None:
    case = CASES["gist_absolute"]()
    case.constants["guide_key"][2, 1] = torch.nan
    loss, gradients = case.by_tiles(case.tensors(torch.float32))
    assert loss.isnan()
    assert all(x.isnan().all() for x in gradients.values())


@pytest.mark.parametrize(("H", "ids"), [(0, False), (1, True), (5, True), (9, False)])
# Triton's interpreter computes with NumPy, which warns
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_negatives_of_one_query_alone_in_kernels(H: int, ids: bool) -> None:
    query, key, negatives = (F.normalize(torch.randn(*size), dim=-1) for size in ((7, 6), (7, 6), (7, H, 6)))
    leaves = [query, key, negatives, torch.tensor(5.0)]
    of_queries, of_negatives = torch.arange(7) % 3, torch.randint(3, (7, H))
    more = {"query_ids": of_queries, "negative_ids": of_negatives} if ids else {}
    query, key, negatives, scale = (x.requires_grad_() for x in leaves)
    loss = InfoNCELoss(in_batch=False, backend="triton")(query, key, scale, negatives=negatives, **more)
    others = scale * (negatives @ query[..., None])[..., 0]
    if ids:
        others = others.masked_fill(of_negatives == of_queries[:, None], -torch.inf)
    x = torch.cat([scale * (query * key).sum(1, keepdim=True), others], 1)
    naive = F.cross_entropy(x, torch.zeros(7, dtype=torch.int64))
    torch.testing.assert_close(loss, naive)
    for found, true in zip(*(torch.autograd.grad(value, leaves) for value in (loss, naive)), strict=True):
        torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        negatives[-1:, :1] = torch.nan
    assert H == 0 or InfoNCELoss(in_batch=False, backend="triton")(query, key, 5.0, negatives=negatives).isnan()


def test_a_users_own_kind_of_guided_loss_is_computed_by_its_methods() -> None:
    @dataclass(frozen=True)
    class Doubled(Guided):
        def finish(self, stats: Tensor) -> Finished:
            finished = super().finish(stats)
            return finished._replace(loss=2 * finished.loss)

    query, key, a, b = (F.normalize(torch.randn(9, 6), dim=-1) for _ in range(4))
    losses = [contrast(query, key, scale=5.0, loss=loss, guide_q=a, guide_k=b) for loss in (Guided(), Doubled())]
    torch.testing.assert_close(losses[1], 2 * losses[0])
    query.requires_grad_()
    losses = [contrast(query, key, scale=5.0, loss=loss, guide_q=a, guide_k=b) for loss in (Guided(), Doubled())]
    torch.testing.assert_close(losses[1], 2 * losses[0])


# strips and tiles; one super-tile and several; fewer keys than negatives, and more
@pytest.mark.parametrize(
    ("backend", "N", "M", "H", "workspace"),
    [
        ("eager", 100, 130, 300, 2**20), ("eager", 70, 70, 40, None),
        ("triton", 100, 130, 300, None), ("triton", 70, 70, 40, 2**20),
    ],
)  # fmt: skip
def test_shared_negatives_that_are_constants_get_no_sums(
    backend: Any, N: int, M: int, H: int, workspace: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums: list[int] = []
    accumulators = Tiles.accumulators

    def noted(tiles: Tiles, *given: Any) -> Any:
        u, v = accumulators(tiles, *given)
        sums.append(len(v))
        return u, v

    monkeypatch.setattr(Tiles, "accumulators", noted)
    query, key, negatives = (F.normalize(torch.randn(n, 12), dim=-1) for n in (N, M, H))
    leaves = query.requires_grad_(), key.requires_grad_(), torch.tensor(9.0, requires_grad=True)
    loss = InfoNCELoss(backend=backend, workspace=workspace)
    results = []
    for learned in (False, True):
        for positives in (None, torch.randint(-1, M, (N, 2), generator=torch.Generator().manual_seed(0))):
            value = loss(*leaves, negatives=negatives.clone().requires_grad_(learned), positives=positives)
            results.append([value.detach(), *torch.autograd.grad(value, leaves)])
    for constant, learned in zip(results[:2], results[2:], strict=True):
        for x, y in zip(constant, learned, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-8)
    assert sums == [M, M, M + H, M + H]


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("at", range(4))
def test_a_number_that_is_not_finite_gives_nan_where_keys_are_compared_with_keys(at: int, backend: Any) -> None:
    inputs = [F.normalize(torch.randn(37, 16), dim=-1) for _ in range(4)]
    inputs[at][36, 3] = torch.nan
    query, key, guide_query, guide_key = inputs
    leaves = query.requires_grad_(), key.requires_grad_()
    loss = GISTLoss(contrast_anchors=True, contrast_positives=True, backend=backend)(
        query, key, 5.0, guide_query=guide_query, guide_key=guide_key
    )
    assert loss.isnan()
    assert all(x.isnan().all() for x in torch.autograd.grad(loss, leaves))


def test_pads_before_a_positive_leave_it_the_key_of_its_query() -> None:
    query, key, a, b = F.normalize(torch.randn(4, 9, 16), dim=-1)
    loss, own = GISTLoss(contrast_positives=True, margin=-1.0), torch.arange(9).roll(2)
    pads = torch.full_like(own, -1)
    values = [
        loss(query, key, 5.0, guide_query=a, guide_key=b, positives=positives)
        for positives in (own, torch.stack([own, pads], 1), torch.stack([pads, own], 1))
    ]
    assert values[0] == values[1] == values[2]


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_query_without_a_positive_adds_no_key_to_the_keys_of_others(dtype: torch.dtype, backend: Any) -> None:
    query, key, a, b = F.normalize(torch.randn(4, 9, 16), dim=-1)
    a, b, own, ids = a.to(dtype), b.to(dtype), torch.arange(1, 9), torch.arange(9) % 4
    results = []
    for n, positives in ((8, own), (9, torch.cat([own, torch.tensor([-1])]))):
        leaves = query.clone().requires_grad_(), key.clone().requires_grad_()
        value = GISTLoss(contrast_positives=True, margin=-1e3, backend=backend)(
            leaves[0][:n], leaves[1], 5.0, guide_query=a[:n], guide_key=b, positives=positives,
            query_ids=ids[:n], key_ids=ids,
        )  # fmt: skip
        results.append([value.detach(), *torch.autograd.grad(value, leaves)])
    for found, true in zip(*results, strict=True):
        torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_keys_among_keys_give_losses_of_rows(reduction: Any, backend: Any) -> None:
    query, key, a, b = (F.normalize(torch.randn(n, 16), dim=-1) for n in (37, 45, 37, 45))
    words: Any = {"contrast_positives": True, "backend": backend, "reduction": reduction}
    weights = torch.rand(37) if reduction == "sum" else None
    loss = GISTLoss(**words)(query, key.requires_grad_(), 5.0, guide_query=a, guide_key=b, weights=weights)
    own, diagonal = key[:37], torch.arange(37)
    guide = torch.cat([a @ b.T, b[:37] @ b[:37].T], 1)
    false = (guide > guide.diagonal()[:, None]) & ~torch.eye(*guide.shape, dtype=torch.bool)
    x = 5 * torch.cat([query @ key.T, own @ own.T], 1).masked_fill(false, -torch.inf)
    naive = F.cross_entropy(x, diagonal, reduction="none")
    naive = naive if weights is None else (weights * naive).sum()
    torch.testing.assert_close(loss, naive)
    (found,), (true,) = (torch.autograd.grad(value.sum(), key) for value in (loss, naive))
    torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["hardness_own", "hardness_all", "dclw", "dclw_labels"])
def test_weights_by_similarity_at_a_scale_of_zero(name: str) -> None:
    """They do not depend on the scale."""
    case = CASES[name]()
    (number,) = (key for key, x in case.leaves.items() if not x.ndim)
    case.leaves[number] = torch.zeros((), dtype=torch.float64)
    tensors = case.tensors(torch.float64)
    truth, true_gradients = case.by_formula(tensors)
    loss, gradients = case.by_tiles(tensors)
    assert distance(loss, truth) <= 1e-14
    for key, true in true_gradients.items():
        # those of features are 0 with the decoupled loss
        assert (gradients[key] - true).norm() <= 1e-12 * (true.norm() if true.any() else 1e-12), key


@pytest.mark.parametrize("near", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("sigma", [0.008, 1e-4, 1e-300])
def test_weights_of_a_small_sigma(sigma: float, near: float) -> None:
    """exp(s / σ) is beyond float32, and beyond float64; all similarities may be far from the largest possible."""
    image, noise = F.normalize(torch.randn(2, 9, 8, dtype=torch.float64), dim=-1)
    text = F.normalize(near * image + 0.1 * noise, dim=-1)
    weights = mises_fisher_weights(image, text, sigma)
    truth = dense_decoupled(image, text, 10.0, of_positives=weights, symmetric=True)
    assert distance(DCLLoss(sigma=sigma)(image, text, 10.0), truth) <= 1e-10
    if sigma == 0.008:
        # a rounding of the features changes s / σ
        assert distance(DCLLoss(sigma=sigma)(image.float(), text.float(), 10.0), truth) <= 1e-4


def test_ids_of_shared_negatives_may_follow_those_of_keys() -> None:
    """Also where queries and keys are compared among themselves; without them negatives have the id of nobody."""
    case = CASES["gist_all_pairs"]()
    tensors = case.tensors(torch.float64)
    truth = case.by_tiles(tensors)[0]
    ids = case.constants["key_ids"]
    case.constants["key_ids"] = torch.cat([ids, torch.full((N,), 99)])
    assert torch.equal(case.by_tiles(tensors)[0], truth)
    case.constants["key_ids"] = torch.cat([ids, ids])
    assert not torch.equal(case.by_tiles(tensors)[0], truth)


@pytest.mark.parametrize("kind", ["supcon", "ntxent"])
def test_weights_of_examples_are_those_of_their_views(kind: str) -> None:
    a, b = F.normalize(torch.randn(2, 9, 6, dtype=torch.float64), dim=-1).requires_grad_()
    weights, views = torch.rand(9) + 0.1, torch.cat([a, b])
    x = (5 * views @ views.T).fill_diagonal_(-torch.inf)
    naive = F.cross_entropy(x, torch.arange(18).roll(9), reduction="none")
    naive = (weights.double().repeat(2) * naive).sum() / (2 * weights.sum())
    if kind == "supcon":
        loss = SupConLoss()(torch.stack([a, b], 1), torch.arange(9), 5.0, weights=weights)
    else:
        loss = NTXentLoss()(a, b, 5.0, weights=weights)
    torch.testing.assert_close(loss, naive, rtol=1e-6, atol=0)
    gradients = (torch.autograd.grad(value, a, retain_graph=True)[0] for value in (loss, naive))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


def test_one_positive_each_is_balanced() -> None:
    tensors = CASES["siglip_balanced"]().tensors(torch.float64)
    plain = SigLipLoss()(**tensors)
    assert distance(SigLipLoss(balanced=True)(**tensors).detach(), plain.detach()) <= 1e-15
    labels = torch.arange(N).flip(0)
    assert distance(SigLipLoss(balanced=True)(**tensors, labels=labels).detach(), plain.detach()) <= 1e-15


class _Written(TorchDispatchMode):
    """Numbers that operations return within the block."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.numbers += result.numel() if isinstance(result, Tensor) else 0
        return result


@pytest.mark.parametrize("listed", [False, True])
def test_the_backward_of_scores_by_a_scorer_grows_with_the_number_of_queries(listed: bool) -> None:
    written = []
    for n in (40, 80):
        query, key = torch.randn(n, 4, requires_grad=True), torch.randn(n, 3, 4, requires_grad=True)
        keys, lists = (key.flatten(0, 1), torch.randint(3 * n, (n, 3))) if listed else (key, None)
        loss = ScoreDistillLoss()(query, keys, torch.randn(n, 3), lists=lists, scorer=Bilinear(4, 4))
        with _Written() as mode:
            loss.backward()
        written.append(mode.numbers)
    assert written[1] <= 2.1 * written[0]


def test_gradients_of_keys_in_many_lists_are_summed_in_float32() -> None:
    n = 1024
    query, key, scores = torch.randn(n, 8).bfloat16(), torch.randn(4, 8).bfloat16(), torch.randn(n, 4)
    lists, result = torch.arange(4).expand(n, 4), []
    for dtype in (torch.bfloat16, torch.float64):
        x = key.to(dtype).requires_grad_()
        loss = ScoreDistillLoss()(query.to(dtype), x, scores.to(dtype), lists=lists)
        result += torch.autograd.grad(loss, x)
    assert distance(*result) <= 5e-3


def test_a_score_that_is_not_finite() -> None:
    """−∞ has no share of the target; NaN is a loss of NaN."""
    query, key = torch.randn(2, 4), torch.randn(2, 3, 4)
    scores = torch.tensor([[0.0, -torch.inf, 1.0], [0.0, 2.0, 1.0]])
    x = (key @ query[..., None])[..., 0]
    truth = F.kl_div(x.log_softmax(1), scores.softmax(1), reduction="batchmean")
    torch.testing.assert_close(ScoreDistillLoss()(query, key, scores), truth)
    scores[1, 1] = torch.nan
    assert ScoreDistillLoss()(query, key, scores).isnan()


def test_a_copy_of_the_positive_does_not_exceed_it() -> None:
    """However its similarity is rounded: it is a negative, as in the plain formula."""
    generator = torch.Generator().manual_seed(0)
    guide = F.normalize(torch.randn(64, 33, generator=generator), dim=-1)
    key = torch.randn(64, 8, generator=generator)
    loss = GISTLoss()(key, torch.cat([key, key]), 1.0, guide_query=guide, guide_key=torch.cat([guide, guide]))
    ids = torch.arange(64)
    without = InfoNCELoss()(key, torch.cat([key, key]), 1.0, query_ids=ids, key_ids=torch.cat([ids, ids]))
    # the guide finds no other negative as similar as the positive, which is the query itself
    assert float(loss) > float(without) + 0.1


def test_negatives_of_each_query_under_autocast() -> None:
    case = CASES["own_negatives"]()
    tensors = case.tensors(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, gradients = case.by_tiles(tensors)
    narrow = {key: x.detach().to(torch.bfloat16 if x.ndim else x.dtype).requires_grad_() for key, x in tensors.items()}
    assert torch.equal(loss, case.by_tiles(narrow)[0])
    assert {x.dtype for x in gradients.values()} == {torch.float32}


def _with_its_own(**ids: Any) -> Tensor:
    return InfoNCELoss(in_batch=False)(_x(3, 4), _x(3, 4), 1.0, negatives=_x(3, 2, 4), **ids)


SENTENCES: dict[str, Callable[[], Any]] = {
    '`hardness_mode` must be given with `hardness_strength`; got None. "all_negatives", say.':
        lambda: InfoNCELoss(hardness_strength=5.0),
    "`guide_key` must have as many rows as `key`; got 2 and 3. Pass one row for each.":
        lambda: GISTLoss()(_x(3, 4), _x(3, 4), 1.0, guide_query=_x(3, 5), guide_key=_x(2, 5)),
    "`guide_key` must have the same feature size as `guide_query`; got 6 and 5. Project one side first.":
        lambda: GISTLoss()(_x(3, 4), _x(3, 4), 1.0, guide_query=_x(3, 5), guide_key=_x(3, 6)),
    "`guide_query` must not require a gradient; got some that do. Detach them: they are taken as constants.":
        lambda: GISTLoss()(_x(3, 4), _x(3, 4), 1.0, guide_query=_x(3, 5).requires_grad_(), guide_key=_x(3, 5)),
    "`guide_q` must be a tensor; got NoneType. Pass the tensor of features.":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, loss=Guided(), guide_q=None, guide_k=_x(3, 5)),
    "`guide_query` must be on the device of `query`; got meta and cpu. Move one side first.":
        lambda: GISTLoss()(_x(3, 4), _x(3, 4), 1.0, guide_query=torch.ones(3, 5, device="meta"), guide_key=_x(3, 5)),
    "`guide_q` must be given for the loss Guided; got None. Further features go with a loss that reads them.":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, loss=Guided()),
    "`guide_q` must be left out for the loss Softmax; got both. Further features go with a loss that reads them.":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, loss=Softmax(), guide_q=_x(3, 5), guide_k=_x(3, 5)),
    "`guide_negatives` must be given just where `negatives` is; got None. Pass both, or neither.":
        lambda: GISTLoss()(_x(3, 4), _x(3, 4), 1.0, guide_query=_x(3, 5), guide_key=_x(3, 5), negatives=_x(2, 4)),
    "`key` must have a row or more for `positives`; got none. Pass the keys of this rank's queries.":
        lambda: GISTLoss(contrast_anchors=True)(
            _x(3, 4), _x(0, 4), 1.0, guide_query=_x(3, 5), guide_key=_x(0, 5), positives=torch.full((3, 0), -1),
        ),
    "`key` must have at least as many rows as `query`; got 2 and 3. Key i belongs to query i.":
        lambda: GISTLoss(contrast_positives=True)(_x(3, 4), _x(2, 4), 1.0, guide_query=_x(3, 5), guide_key=_x(2, 5)),
    "`guide_query` must have as many rows as `query`; got 2 and 3. Pass one row for each.":
        lambda: GISTLoss(contrast_positives=True)(_x(3, 4), _x(3, 4), 1.0, guide_query=_x(2, 5), guide_key=_x(3, 5)),
    "`key_ids` must be a tensor of shape [3], one entry for each row of `key`; got shape [2]. Pass the entries of "
    "these 3 rows, in their order.":
        lambda: GISTLoss(contrast_positives=True)(
            _x(3, 4), _x(3, 4), 1.0, guide_query=_x(3, 5), guide_key=_x(3, 5), query_ids=torch.arange(3),
            key_ids=torch.arange(2),
        ),
    "`negatives` must be shared by all queries with a guide; got shape [3, 2, 4]. Pass them as [H, features].":
        lambda: contrast(
            _x(3, 4), _x(3, 4), scale=1.0, loss=Guided(), guide_q=_x(3, 5), guide_k=_x(3, 5), negatives=_x(3, 2, 4),
        ),
    "`query_labels` must be left out for a guided loss; got some. Pass `positives`.":
        lambda: contrast(
            _x(3, 4), _x(3, 4), scale=1.0, loss=Guided(), guide_q=_x(3, 5), guide_k=_x(3, 5),
            query_labels=torch.arange(3), key_labels=torch.arange(3),
        ),
    "`margin_strategy` must be one of absolute, relative; got 'both'. They are sentence-transformers' words.":
        lambda: GISTLoss(margin_strategy="both"),
    "`symmetric` must be False for a sigmoid loss; got True. Leave it out: each pair counts once for both sides.":
        lambda: Sigmoid(symmetric=True),
    "`symmetric` must be False for a guided loss; got True. Add the loss of the exchanged sides for both directions.":
        lambda: Guided(symmetric=True),
    "`dist_logit_scale` must be a number or a tensor of shape [] or [1]; got NoneType. Pass logit_scale.exp(), say.":
        lambda: DistillClipLoss()(_x(3, 4), _x(3, 4), 1.0, _x(3, 5), _x(3, 5), None),
    "`dist_logit_scale` must not require a gradient; got some that do. Detach them: they are taken as constants.":
        lambda: DistillClipLoss()(_x(3, 4), _x(3, 4), 1.0, _x(3, 5), _x(3, 5), _x(1).requires_grad_()),
    "`dist_text_features` must have the same feature size as `dist_image_features`; got 6 and 5. Project one side "
    "first.": lambda: DistillClipLoss()(_x(3, 4), _x(3, 4), 1.0, _x(3, 5), _x(3, 6), 1.0),
    "`dist_image_features` must have as many rows as `image_features`; got 2 and 3. Pass one row for each.":
        lambda: DistillClipLoss()(_x(3, 4), _x(3, 4), 1.0, _x(2, 5), _x(3, 5), 1.0),
    "`weight` must be from 0 to 1; got 1.5. 0.5 weighs teacher and labels alike.": lambda: DistillClipLoss(weight=1.5),
    "`label_smoothing` must be 0 for distillation; got 0.1. The teacher's targets are soft already.":
        lambda: DistillClipLoss(label_smoothing=0.1),
    "`scores` must be floating point of shape [3, 2], one for each listed key; got shape [3, 4], torch.float32. Score "
    "the keys that are listed, with anything for pads.": lambda: ScoreDistillLoss()(_x(3, 4), _x(3, 2, 4), _x(3, 4)),
    "`scores` must not require a gradient; got some that do. Detach them: they are taken as constants.":
        lambda: ScoreDistillLoss()(_x(3, 4), _x(3, 2, 4), _x(3, 2).requires_grad_()),
    "`scores` must be on the device of `key`; got meta and cpu. Move one side first.":
        lambda: ScoreDistillLoss()(_x(3, 4), _x(3, 2, 4), torch.ones(3, 2, device="meta")),
    "`key` must be [N, P, D], or [M, D] with `lists`; got shape [3, 4]. List each query's keys.":
        lambda: ScoreDistillLoss()(_x(3, 4), _x(3, 4), _x(3, 2)),
    "`lists` must index this rank's 5 keys, or be -1; got 5. Count from this rank's first key.":
        lambda: ScoreDistillLoss()(_x(3, 4), _x(5, 4), _x(3, 2), lists=torch.tensor([[0, 5]] * 3)),
    "`lists` must have two dimensions [N, P]; got shape [3]. List several keys.":
        lambda: ScoreDistillLoss()(_x(3, 4), _x(5, 4), _x(3, 2), lists=torch.arange(3)),
    "`lists` must index this rank's 5 keys, or be -1; got -2. Count from this rank's first key.":
        lambda: ScoreDistillLoss()(_x(3, 4), _x(5, 4), _x(3, 2), lists=torch.tensor([[0, -2]] * 3)),
    "`lists` must be integers; got torch.float32. Pass indices of keys, -1 where there is none.":
        lambda: ScoreDistillLoss()(_x(3, 4), _x(5, 4), _x(3, 2), lists=_x(3, 2)),
    "`key` must have a row or more for `lists`; got shape [0, 4]. Pass the listed keys.":
        lambda: ScoreDistillLoss()(_x(3, 4), _x(0, 4), _x(3, 2), lists=torch.full((3, 2), -1)),
    "`key` must have a list for each of the 2 queries where they have three dimensions; got shape [3, 2, 4]. List "
    "each query's own, or pass shared ones as [H, features].":
        lambda: ScoreDistillLoss()(_x(2, 4), _x(3, 2, 4), _x(3, 2)),
    "`scores` must have a column or more; got shape [3, 0]. List the keys to score.":
        lambda: ScoreDistillLoss()(_x(3, 4), _x(3, 0, 4), _x(3, 0)),
    "`scores` must be floating point of shape [3, 2], one for each listed key; got list. Score the keys that are "
    "listed, with anything for pads.": lambda: ScoreDistillLoss()(_x(3, 4), _x(3, 2, 4), [[1.0, 2.0]] * 3),
    "`dist_text_features` must be a tensor; got NoneType. Pass the tensor of features.":
        lambda: DistillClipLoss()(_x(3, 4), _x(3, 4), 1.0, _x(3, 5), None, 1.0),
    "`weight` must be from 0 to 1; got 'half'. 0.5 weighs teacher and labels alike.":
        lambda: DistillClipLoss(weight="half"),
    "`margin` must be a finite number; got nan. 0.0 is the paper's.": lambda: GISTLoss(margin=float("nan")),
    "`ids` must be a tensor of shape [3], one entry for each row of `view_a`; got shape [2]. Pass the entries of "
    "these 3 rows, in their order.": lambda: NTXentLoss()(_x(3, 4), _x(3, 4), 1.0, ids=torch.arange(2)),
    "`guide_negatives` must have the same feature size as `guide_key`; got 6 and 5. Project one side first.":
        lambda: _guided_negatives(_x(2, 6)),
    "`guide_negatives` must have as many rows as `negatives`; got 1 and 2. Pass one row for each: row i of one "
    "belongs to row i of the other.": lambda: _guided_negatives(_x(1, 5)),
    "`guide_negatives` must not require a gradient; got some that do. Detach them: they are taken as constants.":
        lambda: _guided_negatives(_x(2, 5).requires_grad_()),
    "`guide_key` must have as many rows as `key`; got 5 and 6. Pass one row for each, and for each of the `negatives`.":
        lambda: GISTLoss()(
            _x(4, 4), _x(4, 4), 1.0, guide_query=_x(4, 5), guide_key=_x(3, 5), negatives=_x(2, 4),
            guide_negatives=_x(2, 5),
        ),
    "`guide_q` must have as many rows as `q`; got 2 and 3. Pass one row for each.":
        lambda: contrast(
            _x(3, 4), _x(3, 4), scale=1.0, loss=Guided(), guide_q=_x(2, 5), guide_k=_x(3, 5), scorer=Bilinear(4, 4),
        ),
    "`kind` must be one of kl, margin_mse; got 'mse'. Leave it out for the divergence.":
        lambda: ScoreDistillLoss(kind="mse"),
    "`label_smoothing` must be 0 for a distillation of scores; got 0.1. Soften the scores instead.":
        lambda: ScoreDistillLoss(label_smoothing=0.1),
    "`labels` must be a tensor of shape [3], one entry for each row of `image_features`; got shape [2]. Pass the "
    "entries of these 3 rows, in their order.": lambda: ClipLoss()(_x(3, 4), _x(3, 4), 1.0, labels=torch.arange(2)),
    "`weights` must be a tensor of shape [3], one entry for each row of `features`; got shape [6]. Pass the entries "
    "of these 3 rows, in their order.": lambda: SupConLoss()(_x(3, 2, 4), torch.arange(3), 1.0, weights=_x(6)),
    "`form` must be one of out, in; got 'mean'. They are the paper's words.": lambda: SupConLoss(form="mean"),
    "`label_smoothing` must be 0 for the mean inside; got 0.1. Leave it out, or take the softmax loss.":
        lambda: SupConLoss(form="in", label_smoothing=0.1),
    "`positives` must be left out for the balanced sigmoid loss; got some. Pass labels.":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, loss=BalancedSigmoid(), positives=torch.arange(3)),
    "`sigma` must be positive; got 0.0. The paper has 0.5.": lambda: DCLLoss(sigma=0.0),
    "`logit_bias` must be left out for the loss DecoupledWeighted; got one. Its weights of positives keep a bias from "
    "cancelling.": lambda: DCLLoss(sigma=0.5)(_x(3, 4), _x(3, 4), 1.0, 0.0),
    "`label_smoothing` must be 0 for the decoupled loss; got 0.1. Leave it out, or take the softmax loss.":
        lambda: DCLLoss(label_smoothing=0.1),
    "`hardness_mode` must be one of in_batch_negatives, hard_negatives, all_negatives; got 'all'. They are "
    "sentence-transformers' words.": lambda: Hardness(hardness_mode="all"),
    "`hardness_strength` must be at least 0; got -1.0. 5 to 9 is usual.": lambda: Hardness(hardness_strength=-1.0),
    "`negatives` must have two dimensions [rows, features], or three [queries, H, features]; got shape [4]. Pass a "
    "batch.": lambda: InfoNCELoss()(_x(3, 4), _x(3, 4), 1.0, negatives=_x(4)),
    "`negatives` must have a list for each of the 3 queries where they have three dimensions; got shape [2, 5, 4]. "
    "List each query's own, or pass shared ones as [H, features].":
        lambda: InfoNCELoss()(_x(3, 4), _x(3, 4), 1.0, negatives=_x(2, 5, 4)),
    "`negatives` must have the same feature size as `key`; got 5 and 4. Project one side first.":
        lambda: InfoNCELoss()(_x(3, 4), _x(3, 4), 1.0, negatives=_x(3, 2, 5)),
    "`negatives` must be left out for a symmetric loss; got both. Pass loss=Softmax(), say.":
        lambda: contrast(_x(3, 4), _x(3, 4), scale=1.0, negatives=_x(3, 2, 4)),
    "`negatives` must be shared by all queries with features in host memory; got shape [3, 2, 4]. Leave `device` out.":
        lambda: InfoNCELoss(device="meta")(_x(3, 4), _x(3, 4), 1.0, negatives=_x(3, 2, 4)),
    "`negative_ids` must go with `negatives` of three dimensions [queries, H, features]; got others. Continue "
    "`key_ids` over shared negatives.":
        lambda: InfoNCELoss()(_x(3, 4), _x(3, 4), 1.0, negatives=_x(2, 4), negative_ids=torch.arange(2)),
    "`query_ids` must be given where `negative_ids` is; got None. Pass both, or neither.":
        lambda: InfoNCELoss()(_x(3, 4), _x(3, 4), 1.0, negatives=_x(3, 2, 4), negative_ids=torch.zeros(3, 2).long()),
    "`negative_ids` must be integers of shape [3, 2], one for each of the negatives; got shape [3], torch.int64. A "
    "negative with the id of its query does not count.":
        lambda: InfoNCELoss()(
            _x(3, 4), _x(3, 4), 1.0, negatives=_x(3, 2, 4), query_ids=torch.arange(3), negative_ids=torch.arange(3),
        ),
    "`query_ids` must be a tensor of shape [3], one entry for each row of `query`; got list. Convert it with "
    "torch.as_tensor.": lambda: _with_its_own(query_ids=[0, 1, 2], negative_ids=torch.zeros(3, 2).long()),
    "`negative_ids` must be integers; got torch.bool. Of a mask of pads make ids: torch.where(pads, query_ids[:, "
    "None], -1).": lambda: _with_its_own(query_ids=torch.arange(3), negative_ids=torch.ones(3, 2, dtype=torch.bool)),
    "`negative_ids` must be integers of shape [3, 2], one for each of the negatives; got list. A negative with the id "
    "of its query does not count.": lambda: _with_its_own(query_ids=torch.arange(3), negative_ids=[0, 1, 2]),
    "`query_ids` must come with `negative_ids` where in_batch=False; got one alone. Leave them out.":
        lambda: _with_its_own(query_ids=torch.arange(3)),
    "`guide_key` must be a tensor; got NoneType. Pass the tensor of features.":
        lambda: GISTLoss()(
            _x(3, 4), _x(3, 4), 1.0, guide_query=_x(3, 5), guide_key=None, negatives=_x(2, 4), guide_negatives=_x(2, 5),
        ),
    "`negatives` must be [N, H, D], each query's own, with in_batch=False; got None. List them.":
        lambda: InfoNCELoss(in_batch=False)(_x(3, 4), _x(3, 4), 1.0),
    "`positives` must be left out with in_batch=False; got both. Key i belongs to query i.":
        lambda: InfoNCELoss(in_batch=False)(_x(3, 4), _x(3, 4), 1.0, negatives=_x(3, 2, 4), positives=torch.arange(3)),
    "`query` must be a tensor; got NoneType. Pass the tensor of features.":
        lambda: InfoNCELoss(in_batch=False)(None, _x(3, 4), 1.0, negatives=_x(3, 2, 4)),
    "`query` must be a tensor; got list. Convert it with torch.as_tensor.":
        lambda: ScoreDistillLoss()([0.5], _x(3, 4), _x(3, 2), lists=torch.zeros(3, 2).long()),
    "`negative_ids` must be on the device of `query_ids`; got meta and cpu. Move one side first.":
        lambda: _with_its_own(query_ids=torch.arange(3), negative_ids=torch.zeros(3, 2, device="meta").long()),
    "`dist_image_features` must be on the device of `image_features`; got meta and cpu. Move one side first.":
        lambda: DistillClipLoss()(_x(3, 4), _x(3, 4), 1.0, _x(3, 5).to("meta"), _x(3, 5).to("meta"), torch.tensor(2.0)),
    "`query` must have the same first axis; got [3, 4]. Check each tensor's shape.":
        lambda: ScoreDistillLoss()(
            (_x(3, 5, 4), torch.ones(4, 5).bool()), _x(3, 5, 4), _x(3, 2), lists=torch.zeros(3, 2).long(),
            scorer=MaxSim(),
        ),
    "`key` must be on the device of `query`; got meta and cpu. Move one side first.":
        lambda: ScoreDistillLoss()(
            _x(3, 5, 4), _x(3, 5, 4).to("meta"), _x(3, 2), lists=torch.zeros(3, 2).long(), scorer=MaxSim(),
        ),
    "`scorer` must return a tensor [1, 2] for a query and the 2 keys of its list; got shape [2, 1]. One score for "
    "each pair.": lambda: ScoreDistillLoss()(_x(3, 4), _x(3, 2, 4), _x(3, 2), scorer=Transposed(4, 4)),
    "`scorer` must be a module; got the class MaxSim. Make one: MaxSim(...).":
        lambda: ScoreDistillLoss()(_x(3, 5, 4), _x(3, 2, 5, 4), _x(3, 2), scorer=MaxSim),
    "`scorer` must return floating point; got torch.int64. Convert it with .float().":
        lambda: ScoreDistillLoss()(_x(3, 4), _x(3, 2, 4), _x(3, 2), scorer=Counted(4, 4)),
    "`scorer` must keep its parameters and buffers until the backward; got changed ones. Call backward before they "
    "change.": lambda: _overwritten(Bilinear(4, 4)),
}  # fmt: skip


class Counted(Bilinear):
    """Scores that are whole numbers."""

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        return super().forward(rows, columns).long()


def _overwritten(scorer: Bilinear) -> None:
    loss = ScoreDistillLoss()(_x(3, 4), _x(3, 2, 4), _x(3, 2), scorer=scorer)
    with torch.no_grad():
        scorer.weight.mul_(2)
    loss.backward()


class Moded(Bilinear):
    """A distance that depends on its mode."""

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        scores = super().forward(rows, columns)
        return scores.tanh() if self.training else scores


def test_lists_are_scored_again_in_the_mode_of_the_call() -> None:
    scorer, query, key, scores = Moded(4, 4).double(), _x(3, 4).double(), _x(3, 2, 4).double(), _x(3, 2).double()
    gradients = []
    for later in (True, False):
        loss = ScoreDistillLoss()(query, key, scores, scorer=scorer.train())
        scorer.train(later)
        gradients.append(torch.autograd.grad(loss, scorer.weight)[0])
    assert torch.equal(*gradients)


class Transposed(Bilinear):
    """A distance of columns to rows."""

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        return super().forward(rows, columns).T


def test_ids_of_own_negatives_are_never_without_those_of_queries() -> None:
    with pytest.raises(ValueError, match="`query_ids` must be given where `negative_ids` is; got None"):
        _with_its_own(negative_ids=torch.zeros(3, 2).long())


@pytest.mark.parametrize("sentence", SENTENCES)
def test_every_sentence(sentence: str) -> None:
    assert refusal(SENTENCES[sentence]) == sentence


def test_indices_of_8_bits_are_no_mask() -> None:
    q, k = _x(3, 4), torch.randn(3, 4)
    scores, lists = torch.randn(3, 4), torch.tensor([[0, 2, 1, 1]] * 3)
    loss, guided = ScoreDistillLoss(), GISTLoss(contrast_positives=True)
    assert torch.equal(loss(q, k, scores, lists=lists.byte()), loss(q, k, scores, lists=lists))
    positives, guides = torch.tensor([2, 1, 1]), {"guide_query": torch.randn(3, 2), "guide_key": torch.randn(3, 2)}
    found = guided(q, k, 2.0, positives=positives.byte(), **guides)
    assert torch.equal(found, guided(q, k, 2.0, positives=positives, **guides))


def test_a_third_of_three_margins_has_the_digits_of_float64() -> None:
    query, key, scores = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 4), (5, 4, 4), (5, 4)))
    query.requires_grad_()
    x = (key @ query[..., None])[..., 0]
    plain = F.mse_loss(x[:, :1] - x[:, 1:], scores[:, :1] - scores[:, 1:])
    found = ScoreDistillLoss(kind="margin_mse")(query, key, scores)
    gradients = (torch.autograd.grad(value, query)[0] for value in (found, plain))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


def test_an_error_of_a_scorer_stays_what_it_is() -> None:
    with pytest.raises(TypeError, match=r"^Identity.forward\(\) takes 2 positional arguments but 3 were given$"):
        ScoreDistillLoss()(torch.ones(3, 4), torch.ones(3, 2, 4), torch.ones(3, 2), scorer=nn.Identity())


def test_a_loss_keeps_the_gradients_of_own_columns_alone() -> None:
    """Not the strip [N, M + H] that they were part of, until the loss itself is freed."""
    q, k, own = (torch.randn(*shape, requires_grad=True) for shape in ((12, 8), (300, 8), (12, 2, 8)))
    loss: Any = InfoNCELoss()(q, k, 0.1, negatives=own)
    kept = loss.grad_fn.tiles.own_gradients
    assert kept.shape == (12, 2)
    assert kept.untyped_storage().nbytes() == kept.nbytes


def test_own_columns_of_16_bits_are_copied_within_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    products = OwnColumns.products
    monkeypatch.setattr(OwnColumns, "products", lambda q, own, *out: (copied.append(len(own)), products(q, own, *out)))
    q, k, own = (torch.randn(*shape).half() for shape in ((200, 32), (200, 32), (200, 100, 32)))
    contrast(q, k, scale=1.0, loss=Softmax(), negatives=own, workspace=2**20)
    assert sum(copied) == 200
    assert max(copied) * 100 * 32 * 4 <= 2**20
