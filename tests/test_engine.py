"""The engine's budgets, and that no route ignores a field of a loss."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import scored
import torch
import torch.nn.functional as F
from counted import Counted
from problems import PROBLEMS, distance
from ranks import Pool
from torch import Tensor

from contrastile import ClipLoss, InfoNCELoss, SigLipLoss, contrast
from contrastile._dispatch import Options, choose_tiles
from contrastile.engine import operation, plan, small
from contrastile.engine.operation import with_gradients
from contrastile.engine.plan import prepare
from contrastile.losses import Decoupled
from contrastile.losses.base import Finished, PairLoss, Shard, Tile
from contrastile.losses.sigmoid import Sigmoid
from contrastile.losses.softmax import Softmax

FIGURES = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "house_figures.py"))
_inputs, _calls = FIGURES["inputs"], FIGURES["calls"]


def test_six_frames_lie_between_a_loss_and_its_product() -> None:
    assert 0 < FIGURES["frames_to_the_product"]() <= 6


def test_a_kept_call_holds_no_memory_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[Any, Any] = {}
    monkeypatch.setattr(plan, "_plans", kept)
    ids = torch.arange(12) // 2
    ClipLoss()(*(F.normalize(torch.randn(12, 8), dim=-1) for _ in "qk"), 10.0, ids=ids, weights=torch.rand(12))
    ((_, call),) = kept.values()
    held = [call.weights, *(getattr(side, name) for side in (call.rows, call.cols) for name in ("features", "ids"))]
    assert [x.untyped_storage().nbytes() for x in held] == [0] * 5


def test_a_step_like_the_last_one_makes_few_python_calls() -> None:
    loss, inputs = ClipLoss(), _inputs()
    loss(*inputs).backward()
    values: list[Tensor] = []
    forward = _calls(lambda: values.append(loss(*inputs)))
    backward = _calls(lambda: values[0].backward())
    # before the plan was kept: 193 and 91 calls, through 18 files
    assert len(forward) + len(backward) <= 133
    assert len(set(forward)) <= 9


@pytest.mark.parametrize("loss", [InfoNCELoss(), ClipLoss(), SigLipLoss()], ids=lambda loss: type(loss).__name__)
def test_without_grad_mode_a_loss_has_no_products_for_gradients(loss: Any) -> None:
    with torch.no_grad(), Counted() as counted:
        loss(*_inputs(40))
    assert sum(count for name, count in counted.ran.items() if "mm" in name) == 1


@pytest.mark.parametrize("option", ["label_smoothing", "sum", "none", "weights", "negatives"])
def test_options_of_one_tile_cost_no_more_products_or_exponentials(option: str) -> None:
    (q, k, scale), N, H = _inputs(40), 40, 2
    how = {"label_smoothing": {"label_smoothing": 0.1}, "sum": {"reduction": "sum"}, "none": {"reduction": "none"}}
    given = {"weights": {"weights": torch.rand(N)}, "negatives": {"negatives": torch.randn(N, H, q.shape[1])}}
    step = partial(InfoNCELoss(**how.get(option, {})), q, k, scale, **given.get(option, {}))
    with Counted() as counted:
        step().sum().backward()
    own = H if option == "negatives" else 0
    assert counted.multiplications == 3 * N * N * q.shape[1] + 2 * N * own * q.shape[1]
    if not own:
        # of the logits, in place
        assert counted.ran["exp_"] == 1


@pytest.mark.parametrize("kind", ["product", "bilinear", "mlp", "maxsim"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_without_grad_mode_inputs_that_require_a_gradient_cost_no_more(name: str, kind: str) -> None:
    problem = PROBLEMS[name](12, 15)

    def cost(wants: bool) -> tuple[int, dict[str, int]]:
        if kind == "product":
            tensors = {key: x.requires_grad_(wants) for key, x in problem.tensors(torch.float64).items()}
            step = partial(problem._call, contrast, problem.tiled, tensors)
        else:
            (rows, cols), named = scored.sides(kind, problem), scored.numbers(problem)
            for x in (*scored.leaves(rows, cols), *named.values()):
                x.requires_grad_(wants)
            module = scored.scorer(kind, problem.same).requires_grad_(wants)
            step = partial(scored.by_tiles, problem, module, rows, cols, named)
        with torch.no_grad():
            # the first call is planned
            step()
            with Counted() as counted:
                step()
        return counted.multiplications, {at: n for at, n in counted.ran.items() if at != "detach"}

    assert cost(wants=True) == cost(wants=False)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("trained", ["q and k", "k"])
def test_constant_negatives_have_no_products_for_gradients(
    monkeypatch: pytest.MonkeyPatch, trained: str, compiled: bool
) -> None:
    torch._dynamo.reset()
    N, H, D = 8, 64, 4
    q, k = (torch.randn(N, D, requires_grad=name in trained) for name in ("q", "k"))
    negatives, loss, counted = torch.randn(H, D), InfoNCELoss(), Counted()

    def sweep(*arguments: Any) -> Any:
        # within the operation: a graph does not run while operations around it are counted
        with counted:
            return with_gradients(*arguments)

    monkeypatch.setattr(small if compiled else operation, "with_gradients", sweep)
    step = partial(loss, q, k, 2.0, negatives=negatives)
    torch.autograd.backward((torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step)())
    of_queries = N * (N + H) * D if "q" in trained else 0
    assert counted.multiplications == N * (N + H) * D + of_queries + N * N * D


def test_a_second_call_of_a_signature_is_not_checked_again() -> None:
    loss, inputs = ClipLoss(), _inputs(11)
    first, second = _calls(lambda: loss(*inputs)), _calls(lambda: loss(*inputs))
    assert any(file.endswith("engine/arguments.py") for file in first)
    assert not any(file.endswith("engine/arguments.py") for file in second)
    (q, k, scale), negatives = inputs, torch.randn(3, inputs[0].shape[1])
    first, second = (_calls(lambda: InfoNCELoss()(q, k, scale, negatives=negatives)) for _ in "12")
    assert len(second) < 0.7 * len(first)


@pytest.mark.parametrize("own_ids", [True, False], ids=["ids of all", "ids of the keys"])
@pytest.mark.parametrize("constant", [True, False], ids=["constant", "learned"])
def test_a_later_call_with_shared_negatives_is_that_of_its_tensors(constant: bool, own_ids: bool) -> None:
    loss, scale = InfoNCELoss(), torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        q, k, more = (F.normalize(torch.randn(n, 7, dtype=torch.float64), dim=-1) for n in (5, 6, 4))
        leaves = [x.requires_grad_() for x in (q, k, *([] if constant else [more]))]
        query_ids, key_ids = torch.randint(3, (5,)), torch.randint(3, (10 if own_ids else 6,))
        positives = torch.randint(6, (5,))
        given: dict[str, Any] = {"positives": positives, "query_ids": query_ids, "key_ids": key_ids}
        found = loss(q, k, scale, negatives=more, **given)
        every = torch.cat([key_ids, torch.full((10 - len(key_ids),), -1)])
        left = (query_ids[:, None] == every).scatter(1, positives[:, None], value=False)
        truth = F.cross_entropy((scale * q @ torch.cat([k, more]).T).masked_fill(left, -torch.inf), positives)
        pairs = zip(*(torch.autograd.grad(x, [scale, *leaves]) for x in (found, truth)), strict=True)
        assert distance(found.detach(), truth.detach()) <= 1e-12
        assert all(distance(*pair) <= 1e-12 for pair in pairs)
    with pytest.raises(ValueError, match="positives"):
        loss(q, k, scale, negatives=more, **{**given, "positives": positives + 6})


@pytest.mark.parametrize("change", ["shape", "dtype", "grad", "kind"])
def test_a_call_of_another_signature_is_checked_anew(change: str) -> None:
    q, k, scale = _inputs(5)
    contrast(q, k, scale=scale)
    wrong: dict[str, tuple[Any, str]] = {
        "shape": (k[:4], "as many rows"),
        "dtype": (k.double(), "the dtype of `q`"),
        "kind": ([1.0], "be a tensor"),
    }
    if change == "grad":
        assert not contrast(q.detach(), k.detach(), scale=scale.detach()).requires_grad
        return
    with pytest.raises(ValueError, match=wrong[change][1]):
        contrast(q, wrong[change][0], scale=scale)


@dataclass(frozen=True)
class WithMargin(PairLoss):
    """A loss with one field more: a number that is added to every row's loss, and multiplies its gradient."""

    margin: float = 0.0

    def finish(self, stats: Tensor) -> Finished:
        finished = super().finish(stats)
        return finished._replace(loss=finished.loss + self.margin)

    def pair_grad(self, tile: Tile, rows: Shard, cols: Shard) -> Tensor:
        return super().pair_grad(tile, rows, cols) * (1 + self.margin)


@dataclass(frozen=True)
class Margin(WithMargin, Softmax):
    """A softmax with a margin."""


@dataclass(frozen=True)
class SigmoidMargin(WithMargin, Sigmoid):
    """A sigmoid with a margin."""


LOSSES: list[tuple[PairLoss, PairLoss]] = [
    (Margin(symmetric=True, margin=0.25), Softmax(symmetric=True)),
    (SigmoidMargin(margin=0.25), Sigmoid()),
]


def _loss_and_gradient(loss: PairLoss, inputs: list[Tensor], call: Any = contrast, **how: Any) -> tuple[Tensor, Tensor]:
    value = call(inputs[0], inputs[1], scale=inputs[2], loss=loss, **how)
    (gradient,) = torch.autograd.grad(value, [inputs[0]])
    return value.detach(), gradient


@pytest.mark.parametrize(("loss", "plain"), LOSSES, ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("route", ["eager", "dense", "auto", "compiled", "host"])
def test_every_route_computes_a_new_field(
    loss: PairLoss, plain: PairLoss, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = _inputs(9, torch.float64)
    value, gradient = _loss_and_gradient(plain, inputs, backend="eager")
    call: Any = contrast
    if route == "compiled":
        torch._dynamo.reset()
        call = torch.compile(contrast, backend="eager", fullgraph=True)
    if route == "host":
        monkeypatch.setattr("contrastile.engine.plan._plans", {})
        monkeypatch.setattr("contrastile.engine.plan.waits_on_host", lambda features, device: True)
    backend = route if route in ("eager", "dense") else "auto"
    found, its_gradient = _loss_and_gradient(loss, inputs, call, backend=backend)
    assert distance(found, value + 0.25) <= 1e-12
    assert distance(its_gradient, gradient * 1.25) <= 1e-12


@pytest.mark.parametrize("loss", [loss for loss, _ in LOSSES], ids=["softmax", "sigmoid"])
def test_the_fused_kernels_decline_a_loss_that_they_do_not_know(loss: PairLoss) -> None:
    pytest.importorskip("triton")
    shard = Shard(torch.randn(4, 8))
    with pytest.raises(ValueError, match=f"no kernel for {type(loss).__name__}"):
        choose_tiles("triton", loss, shard, shard)


def test_the_decoupled_loss_refuses_smoothing_and_needs_a_negative() -> None:
    sentence = r"`label_smoothing` must be 0 for the decoupled loss; got 0\.1\."
    with pytest.raises(ValueError, match=sentence):
        contrast(torch.eye(3), torch.eye(3), scale=1.0, loss=Decoupled(), label_smoothing=0.1)
    with pytest.raises(ValueError, match=sentence):
        Decoupled(label_smoothing=0.1)
    assert contrast(torch.ones(1, 2), torch.ones(1, 2), scale=1.0, loss=Decoupled()) == 0


def test_a_decoupled_row_that_has_only_its_positive_in_a_tile_keeps_its_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its only negative, in another tile, lies 140 below the logits of this one."""
    monkeypatch.setattr("contrastile.tiles.eager.SIDE_CPU", 16)
    q, k = torch.ones(2, 1, requires_grad=True), torch.full((32, 1), -100.0)
    k[0], k[1:16], k[20] = 100.0, 40.0, 50.0
    key_ids = torch.arange(32) + 100
    key_ids[1:16] = key_ids[20] = 0
    loss = contrast(
        q, k, scale=1.0, loss=Decoupled(), positives=torch.zeros(2, dtype=torch.int64),
        query_ids=torch.tensor([0, 99]), key_ids=key_ids, backend="eager",
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, q)
    # both rows pull their positive, at 100; the first pushes −100, the second almost only 50
    assert gradient[:, 0].tolist() == pytest.approx([-100.0, -25.0], rel=1e-3)


@dataclass(frozen=True)
class Taught(PairLoss):
    """Σ_j (x_ij − g_ij)² − Σ_p t_ip · x_ip of a row: g the product of the guides, t the weights of listed positives."""

    guides: ClassVar[int] = 1
    state_rows: ClassVar[int] = 0
    symmetric: bool = False
    exclude_self: bool = False
    uses_bias: bool = False
    pairwise: bool = True

    def smoothed(self, label_smoothing: float) -> PairLoss:
        raise NotImplementedError

    def init(self, n: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(1, n, dtype=dtype, device=device)

    def absorb(self, tile: Tile) -> tuple[Tensor, ...]:
        (guide,) = tile.guides
        assert tile.target is not None
        return (((tile.x - guide).square() - tile.target * tile.x).sum(1)[None],)

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def finish(self, stats: Tensor) -> Finished:
        return Finished(stats[0], torch.ones_like(stats[0]), stats[:0])

    def pair_grad(self, tile: Tile, rows: Shard, cols: Shard) -> Tensor:
        assert rows.coefficient is not None
        assert tile.target is not None
        return (2 * (tile.x - tile.guides[0]) - tile.target) * rows.coefficient[:, None]


def _guided(rank: int, group: Any, parts: int, **how: Any) -> tuple[Tensor, Tensor]:
    """The loss of nine queries and keys, of which this rank has a part, and its queries' gradient."""
    torch.manual_seed(3)
    q, k, a, b = (torch.randn(9, width, dtype=torch.float64) for width in (5, 5, 3, 3))
    n = 9 // parts
    own = slice(n * rank, n * rank + n)
    # keys of this rank: its own first one twice as a pad, and two that count
    positives, targets = torch.tensor([[0, n - 1, -1]] * n), torch.rand(9, 3, dtype=torch.float64)[own]
    rows = q[own].requires_grad_()
    options = Options(group=group, gradient="sum", **how)
    function, inputs = prepare(
        rows, k[own], 2.0, Taught(), options, positives=positives, guides=((a[own], b[own]),), targets=targets
    )
    value = function(*inputs)
    (gradient,) = torch.autograd.grad(value, [rows])
    return value.detach(), gradient


def _guided_formula(parts: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    q, k, a, b = (torch.randn(9, width, dtype=torch.float64) for width in (5, 5, 3, 3))
    targets, n = torch.rand(9, 3, dtype=torch.float64), 9 // parts
    q.requires_grad_()
    x, first = 2.0 * q @ k.T, torch.arange(9) // n * n
    pulled = sum(targets[:, p] * x[torch.arange(9), first + shift] for p, shift in ((0, 0), (1, n - 1)))
    value = ((x - a @ b.T).square().sum(1) - pulled).mean()
    return value.detach(), *torch.autograd.grad(value, [q])


@pytest.mark.parametrize("workspace", [None, 2**20])
def test_a_tile_carries_further_logits_and_soft_weights(workspace: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("contrastile.tiles.eager.SIDE_CPU", 1024 if workspace is None else 4)
    found, truth = _guided(0, None, 1, workspace=workspace), _guided_formula(1)
    assert all(distance(x, y) <= 1e-12 for x, y in zip(found, truth, strict=True))


@pytest.mark.parametrize("exchange", ["replicate", "gather", "ring"])
def test_guides_and_targets_travel_with_their_shards(pool: Pool, exchange: str) -> None:
    answers, truth = pool.run(_guided_on_ranks, 3, exchange), _guided_formula(3)
    assert all(distance(value, truth[0]) <= 1e-12 for value, _ in answers)
    assert distance(torch.cat([gradient for _, gradient in answers]), truth[1]) <= 1e-12


def _guided_on_ranks(rank: int, group: Any, exchange: str) -> tuple[Tensor, Tensor]:
    return _guided(rank, group, 3, exchange=exchange)


def test_the_fused_kernels_decline_a_loss_of_guides_without_a_formula() -> None:
    pytest.importorskip("triton")
    shard = Shard(torch.randn(4, 8), guides=(torch.randn(4, 3),))
    with pytest.raises(ValueError, match="no kernel for Taught"):
        choose_tiles("triton", Taught(), shard, shard)


def _with_margin(rank: int, group: Any, exchange: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    inputs = _inputs(9, torch.float64)
    own = slice(3 * rank, 3 * rank + 3)
    q, k = (x.detach()[own].requires_grad_() for x in inputs[:2])
    return _loss_and_gradient(LOSSES[0][0], [q, k, inputs[2]], exchange=exchange, group=group, gradient="sum")


@pytest.mark.parametrize("exchange", ["replicate", "gather", "ring"])
def test_ranks_compute_a_new_field(pool: Pool, exchange: str) -> None:
    torch.manual_seed(7)
    value, gradient = _loss_and_gradient(LOSSES[0][0], _inputs(9, torch.float64))
    answers = pool.run(_with_margin, 3, exchange)
    assert all(distance(found, value) <= 1e-12 for found, _ in answers)
    assert distance(torch.cat([found for _, found in answers]), gradient) <= 1e-12
