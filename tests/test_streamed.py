"""Features in host memory, streamed past a device: the loss and gradients of features that lie there.

Of one vector for each row, and of all that a learned distance reads, such as token vectors with their mask.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import scored
import torch
from problems import PROBLEMS, distance
from ranks import Pool
from refusals import refusal
from test_exchange import SHARES, check, on_a_rank
from test_scored import close, same
from torch import Tensor

from contrastile import ClipLoss, SigLipLoss, contrast
from contrastile.engine import plan
from contrastile.exchange import host
from contrastile.losses import Softmax
from contrastile.losses.base import Shard
from contrastile.offload import BlockStream
from contrastile.scorers import Bilinear, MaxSim, PairMLP
from contrastile.tiles.eager import Eager
from contrastile.tiles.scored import Scored

# rows of a strip and columns of a shard: several of both, one of either, and one of both
CUTS = [(13, 7), (1000, 7), (13, 1000), (1000, 1000)]


@pytest.fixture(params=CUTS, ids=str)
def streaming(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As if the features waited elsewhere; the blocks that were carried."""
    blocks: list[int] = []
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "waits_on_host", lambda features, device: True)
    monkeypatch.setattr(host, "cut", lambda *_: host.Cut(*request.param))
    load = BlockStream._load

    def counted(self: BlockStream, index: int, fresh: bool) -> Any:
        blocks.append(index)
        return load(self, index, fresh)

    monkeypatch.setattr(BlockStream, "_load", counted)
    return blocks


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_float64_equals_the_resident_loss(
    name: str, reduction: str, streaming: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = PROBLEMS[name](40, 55)
    tensors = problem.tensors(torch.float64)
    loss, gradients = problem.by_tiles(tensors, reduction=reduction)
    assert streaming
    monkeypatch.undo()
    truth, true_gradients = problem.by_formula(tensors, reduction=reduction)
    assert distance(loss, truth) <= 1e-12
    for key, gradient in gradients.items():
        assert distance(gradient, true_gradients[key]) <= 1e-12, key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_columns_gather_their_gradient_in_float32(
    dtype: torch.dtype, streaming: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No further from float64 than resident features, over many strips too; a sum in bf16 would be."""
    problem = PROBLEMS["clip"](130, 130)
    tensors = problem.tensors(dtype)
    loss, gradients = problem.by_tiles(tensors)
    monkeypatch.undo()
    exact = {key: x.detach().double().requires_grad_() for key, x in tensors.items()}
    truth, true_gradients = problem.by_formula(exact)
    resident, resident_gradients = problem.by_tiles(tensors)
    assert distance(loss, truth) <= max(1.1 * distance(resident, truth), 1e-6)
    for key, gradient in gradients.items():
        assert gradient.dtype == tensors[key].dtype
        allowed = max(1.1 * distance(resident_gradients[key], true_gradients[key]), 1e-5)
        assert distance(gradient, true_gradients[key]) <= allowed, key


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("scale",), ("k", "scale"), ("bias",)], ids=str)
def test_only_what_is_asked_for_gets_a_gradient(
    wanted: tuple[str, ...], streaming: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = PROBLEMS["siglip"](40, 40)
    some = {key: x.detach().requires_grad_(key in wanted) for key, x in problem.tensors(torch.float64).items()}
    problem._call(contrast, problem.tiled, some).backward()
    monkeypatch.undo()
    truth = problem.by_formula(problem.tensors(torch.float64))[1]
    for key, x in some.items():
        if key in wanted:
            assert distance(x.grad, truth[key]) <= 1e-12
        else:
            assert x.grad is None


def test_what_is_not_finite_makes_the_loss_not_a_number(streaming: list[int]) -> None:
    for side, row in ((0, 39), (1, 20)):
        sides = [torch.randn(40, 5) for _ in range(2)]
        sides[side][row, 2] = -torch.inf
        assert contrast(*sides, scale=1.0).isnan()


def test_each_strip_meets_each_shard_once_in_each_pass(streaming: list[int], request: pytest.FixtureRequest) -> None:
    q = torch.randn(40, 5, requires_grad=True)
    contrast(q, q.detach(), scale=1.0).backward()
    strip, shard = request.node.callspec.params["streaming"]
    assert len(streaming) == 2 * -(-40 // strip) * -(-40 // shard)


# every loss with a cut of its own, every cut, and other scorers
LEARNED = [
    *((CUTS[index % len(CUTS)], name, "maxsim") for index, name in enumerate(PROBLEMS)),
    *((cuts, "clip_ids_weights_smoothing", "projected") for cuts in CUTS),
    *((CUTS[0], name, kind) for name, kind in (("info_nce_everything", "mlp"), ("siglip", "bilinear"))),
]


@pytest.mark.parametrize(("streaming", "name", "kind"), LEARNED, indirect=["streaming"])
def test_a_learned_distance_equals_the_dense_formula(
    name: str, kind: str, streaming: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = PROBLEMS[name](18, 23)
    monkeypatch.setattr(Scored, "_side", lambda self: 5)
    module, (rows, cols) = scored.scorer(kind, problem.same), scored.sides(kind, problem)
    named = scored.numbers(problem)
    wanted = [*scored.leaves(rows, cols), *module.parameters(), *named.values()]
    loss = scored.by_tiles(problem, module, rows, cols, named)
    assert streaming
    gradients = scored.gradients(loss, wanted)
    monkeypatch.undo()
    truth = scored.by_formula(problem, module, rows, cols, named)
    assert close(loss.detach(), truth.detach())
    assert same(gradients, scored.gradients(truth, wanted))


@pytest.mark.parametrize("streaming", [(1000, 1000)], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_strip_and_shard_have_the_bits_of_resident_features(
    dtype: torch.dtype, streaming: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token vectors and a scorer that draws random numbers, whose tiles are the same."""
    monkeypatch.setattr(Scored, "_side", lambda self: 8)
    mask = torch.rand(20, 4) > 0.3
    q, k = torch.randn(2, 20, 4, 6).to(dtype).requires_grad_(), torch.randn(2, 20, 6, requires_grad=True)
    mlp = PairMLP(6, 6, hidden=5, dropout=0.5)

    def step() -> list[Tensor]:
        torch.manual_seed(3)
        tokens = contrast((q[0], mask), (q[1], mask), scorer=MaxSim())
        drawn = contrast(*k, scorer=mlp)
        return [tokens.detach(), drawn.detach(), *torch.autograd.grad(tokens + drawn, [q, k, *mlp.parameters()])]

    found = step()
    assert streaming
    monkeypatch.setattr(plan, "waits_on_host", lambda features, device: False)
    assert all(torch.equal(one, other) for one, other in zip(found, step(), strict=True))


def test_the_device_of_the_features_changes_nothing() -> None:
    image, text = (torch.nn.functional.normalize(torch.randn(9, 4), dim=-1).requires_grad_() for _ in range(2))
    plain, named = ClipLoss()(image, text, 5.0), ClipLoss(device="cpu")(image, text, 5.0)
    assert named.equal(plain)
    assert type(named.grad_fn) is type(plain.grad_fn)
    assert SigLipLoss(device=torch.device("cpu"))(image, text, 5.0, -5.0).isfinite()


def test_strips_and_shards_fit_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    device, gib = torch.device("cpu"), 2**30
    monkeypatch.setattr(host, "free_memory", lambda _: (14 * gib, 16 * gib))
    found = host.cut(*_meta(2**22, 768), device, 2 * gib)
    taken = (found.strip + 3 * found.shard) * 768 * 6
    assert 4 * gib < taken <= host.SHARE * 12 * gib
    assert found.shard == host.SHARD
    # of 180 vectors each, so that several come and go
    assert host.cut(*_meta(2**14, 180, 128), device, gib).shard == host.SHARD // 180
    # with next to nothing free it still goes on
    monkeypatch.setattr(host, "free_memory", lambda _: (0, 16 * gib))
    least = host.LEAST_ROWS
    assert host.cut(*_meta(2**20, 768), device, gib) == host.Cut(least, least)
    assert host.cut(*_meta(0, 768), device, gib).strip == least


def _meta(*shape: int) -> list[Shard]:
    return [Shard(torch.empty(shape, dtype=torch.bfloat16, device="meta")) for _ in range(2)]


def _x(n: int = 3) -> Tensor:
    return torch.ones(n, 4)


SENTENCES = {
    "`device` must be where the features are, unless those are in host memory; got cpu, and features on meta. Leave it "
    "out.": lambda: contrast(_x().to("meta"), _x().to("meta"), scale=1.0, device="cpu"),
    "`scorer` must be on meta, which computes its scores; got cpu. Move it there.": lambda: contrast(
        _x(), _x(), scorer=Bilinear(4, 4), device="meta"
    ),
    "`device` must be on this machine; got 'ideep'. Leave it out to compute where the features are.": lambda: ClipLoss(
        device="ideep"
    )(_x(), _x(), 1.0),
    "`device` must be on this machine; got 'cuda:0'. Leave it out to compute where the features are.": lambda: ClipLoss(
        device="cuda:0"
    )(_x() / 2, _x() / 2, 1.0),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_each_error_has_its_sentence(sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal(SENTENCES[sentence]) == sentence


def _across(rank: int, group: Any) -> str:
    return refusal(contrast, _x(), _x(), scale=1.0, device="meta", exchange="gather", group=group)


def test_ranks_whose_features_are_on_the_host_are_a_ring(pool: Pool) -> None:
    sentence = "`exchange` must be auto, ring or single for features in host memory; got 'gather'. Take ring."
    assert pool.run(_across, 2) == [f"rank 0: {sentence}"] * 2


def _on_a_rank(
    rank: int, group: Any, name: str, shares: list[tuple[int, int]], how: dict[str, Any], cuts: tuple[int, int]
) -> tuple[Tensor, dict[str, Tensor]]:
    with (
        mock.patch.dict(plan._plans, clear=True),
        mock.patch.object(plan, "waits_on_host", return_value=True),
        mock.patch.object(host, "cut", return_value=host.Cut(*cuts)),
        # a device's tiles cannot read host memory, where features and sums are
        mock.patch.object(Eager, "inner_product", None),
    ):
        return on_a_rank(rank, group, name, shares, how)


# several strips and blocks; one of either; ranks of unequal sizes, and one without any
@pytest.mark.parametrize("shares", [SHARES[2], SHARES[3]], ids=len)
@pytest.mark.parametrize(("name", "cuts", "how"), [
    ("clip", (3, 2), {}),
    ("clip", (1000, 2), {"exchange": "ring", "gradient": "sum"}),
    ("clip_ids_weights_smoothing", (3, 1000), {}),
    ("clip_labels", (3, 2), {}),
    ("siglip", (4, 3), {}),
    ("info_nce_positives", (3, 2), {"reduction": "sum"}),
])  # fmt: skip
def test_ranks_equal_one_process(
    pool: Pool, name: str, shares: list[tuple[int, int]], cuts: tuple[int, int], how: dict[str, Any]
) -> None:
    check(pool, name, shares, partial(_on_a_rank, cuts=cuts), **how)


def _columns_alone(rank: int, group: Any) -> list[Tensor | None]:
    q, k = (x[:, :3].requires_grad_(index == 1) for index, x in enumerate(torch.eye(8).view(2, 4, 8) + rank))
    with mock.patch.object(plan, "waits_on_host", return_value=True):
        contrast(q, k, scale=torch.ones((), requires_grad=True), group=group).backward()
    return [q.grad, k.grad]


def test_of_ranks_too_only_what_is_asked_for_gets_a_gradient(pool: Pool) -> None:
    for none, gradient in pool.run(_columns_alone, 2):
        assert none is None
        assert gradient is not None
        assert gradient.abs().sum() > 0


def _one_is_not_finite(rank: int, group: Any) -> bool:
    q, k = torch.ones(4, 3), torch.ones(4, 3)
    if rank == 1:
        # a negative of every query, whose exponential is 0
        k[2, 1] = -torch.inf
    positives = torch.tensor([0, 1, 3, 3])
    with mock.patch.object(plan, "waits_on_host", return_value=True):
        loss = contrast(q, k, scale=1.0, positives=positives, loss=Softmax(symmetric=False), group=group)
        return bool(loss.isnan())


def test_what_is_not_finite_on_a_rank_makes_the_loss_of_all_not_a_number(pool: Pool) -> None:
    assert pool.run(_one_is_not_finite, 3) == [True] * 3
