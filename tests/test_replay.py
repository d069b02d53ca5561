"""Small calls whose gradients come with the loss: the same numbers, captured once and replayed.

Graphs need a GPU (`test_gpu.py`); here one is played by the plain call, between interpreted kernels.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from problems import PROBLEMS, distance, with_gradients
from ranks import Pool, fresh
from tape import Tape, run
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from contrastile import ClipLoss, InfoNCELoss, ScoreDistillLoss, contrast
from contrastile.distributed import collectives, failure
from contrastile.distributed.collectives import captured_call
from contrastile.distributed.failure import LostRankError, state_of
from contrastile.engine import compiled, graph, plan
from contrastile.engine.problem import Problem
from contrastile.exchange import gather
from contrastile.exchange.base import Exchange
from contrastile.losses import Sigmoid, Softmax
from contrastile.scorers import MaxSim
from contrastile.tiles.base import Accumulated
from contrastile.tiles.eager import Eager
from contrastile.tiles.triton import launch, own, replay, sorting
from contrastile.tiles.triton import start as starting

CAPTURED: list[int] = []
# so large that two of them are kept, with what they read
BYTES = graph.GRAPHS_BYTES // 2 - 2**20


def _captured(
    compute: Callable[[], Accumulated], *, across_ranks: bool
) -> tuple[Accumulated, Callable[[], None], int, int]:
    """A computation whose replay is a further run; in one process its results are those of no call."""
    results = compute()
    if not across_ranks:
        results.sums.fill_(torch.nan)
    CAPTURED.append(len(CAPTURED))

    def replay() -> None:
        for held, new in zip(results, compute(), strict=True):
            if held is not None:
                held.copy_(new)

    return results, replay, BYTES, 0


def _replayable(problem: Problem, exchange: Exchange) -> bool:
    return problem.options.reduction != "none" and exchange.replayable(problem.rows.features.shape[-1], problem.dtype)


@pytest.fixture
def _played(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from _plays(monkeypatch)


def _plays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (plan, compiled):
        monkeypatch.setattr(module, "_plans", {})
        monkeypatch.setattr(module, "replayable", _replayable)
        monkeypatch.setattr(module, "small", lambda *_: True)
    for name, value in {"_captured": _captured, "current_stream_address": lambda _: 0}.items():
        monkeypatch.setattr(graph, name, value)
    for name in ("current_device", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    CAPTURED.clear()
    yield
    graph._graphs.clear()
    graph._calls.clear()


def _plain(name: str, *shape: int) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    problem = PROBLEMS[name](*shape)
    tensors = problem.tensors(torch.float64)
    return tensors, *problem.by_tiles(tensors)


@pytest.mark.parametrize("name", PROBLEMS)
def test_losses_of_rows_and_their_gradients_are_replayed(name: str, request: pytest.FixtureRequest) -> None:
    """Rows have different upstream gradients. Between loss and backward another batch is replayed."""
    problem, batches = PROBLEMS[name](30, 40), [PROBLEMS[name](30, 40).tensors(torch.float64, seed=n) for n in range(2)]
    truths = [problem.by_tiles(tensors, reduction="none") for tensors in batches]
    request.getfixturevalue("_played")
    for module in (plan, compiled):
        request.getfixturevalue("monkeypatch").setattr(module, "replayable", lambda *_: True)
    for _ in range(4):
        losses = [problem._call(contrast, problem.tiled | {"reduction": "none"}, tensors) for tensors in batches]
        for loss, tensors, (truth, true_gradients) in zip(losses, batches, truths, strict=True):
            _, gradients = with_gradients(loss, tensors)
            assert distance(loss.detach(), truth) <= 1e-12
            assert all(distance(gradients[key], true_gradients[key]) <= 1e-12 for key in tensors)
    assert len(CAPTURED) == 2


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_same_numbers_from_every_call(name: str, request: pytest.FixtureRequest) -> None:
    tensors, truth, true_gradients = _plain(name, 30, 40)
    request.getfixturevalue("_played")
    for _ in range(4):
        loss, gradients = PROBLEMS[name](30, 40).by_tiles(tensors)
        assert distance(loss, truth) <= 1e-12
        assert all(distance(gradients[key], true_gradients[key]) <= 1e-12 for key in tensors)
    assert len(CAPTURED) == 1


# all leaves, and one loss without q, k or the scale
@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("clip_ids_weights_smoothing", None), ("sup_con", None),
        *(("siglip_ids_weights", frozen) for frozen in (None, 0, 1, 2)),
    ],
)  # fmt: skip
def test_the_same_numbers_from_every_call_inside_a_compiled_graph(
    name: str, frozen: int | None, request: pytest.FixtureRequest
) -> None:
    torch._dynamo.reset()
    tensors, truth, true_gradients = _plain(name, 30, 40)
    request.getfixturevalue("_played")
    problem, learned = PROBLEMS[name](30, 40), [key for at, key in enumerate(tensors) if at != frozen]
    given = {key: x.detach().requires_grad_(key in learned) for key, x in tensors.items()}
    step = torch.compile(
        lambda q, k, **named: contrast(q, k, **problem.tiled, **named), backend="aot_eager", fullgraph=True
    )
    for times in (1.0, 0.3, 7.0, -2.0):
        loss = problem._call(step, {}, given)
        gradients = torch.autograd.grad(times * loss, [given[key] for key in learned])
        assert distance(loss.detach(), truth) <= 1e-12
        pairs = zip(gradients, (times * true_gradients[key] for key in learned), strict=True)
        assert all(distance(*pair) <= 1e-12 for pair in pairs)
    assert len(CAPTURED) == 1


@pytest.mark.usefixtures("_played")
def test_compiled_calls_with_other_labels_of_the_keys_have_a_graph_of_their_own() -> None:
    torch._dynamo.reset()
    step = torch.compile(
        lambda q, k, a, b: contrast(q, k, scale=3.0, loss=Softmax(), query_labels=a, key_labels=b),
        backend="aot_eager", fullgraph=True,
    )  # fmt: skip
    q, k = (x.double().requires_grad_() for x in torch.randn(2, 12, 5))
    one, other = torch.arange(12) // 3, torch.arange(12) % 4
    for labels in [one] * 4 + [other] * 4:
        found = step(q, k, one, labels)
        truth = contrast(q, k, scale=3.0, loss=Softmax(), query_labels=one, key_labels=labels, reduction="none").mean()
        assert distance(found.detach(), truth.detach()) <= 1e-12
    assert len(CAPTURED) == 2


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize("frozen", [(), ("q",), ("k",), ("q", "k"), ("scale",)], ids=str)
def test_upstream_gradients_and_frozen_sides(frozen: tuple[str, ...]) -> None:
    q, k = (x.double() for x in torch.randn(2, 12, 5))
    leaves = {"q": q, "k": k, "scale": torch.tensor(3.0, dtype=torch.float64)}
    free = [x.requires_grad_() for name, x in leaves.items() if name not in frozen]
    for _ in range(4):
        first, second = contrast(**leaves), contrast(**leaves)
        found = torch.autograd.grad(7.0 * first - second, free)
        truth = torch.autograd.grad(6.0 * contrast(**leaves, reduction="none").mean(), free)
        assert all(distance(x, y) <= 1e-12 for x, y in zip(found, truth, strict=True))


def _of_lists(names: tuple[str, ...]) -> dict[str, Tensor]:
    """Arguments of twelve queries with three keys each."""
    integers = {"query_ids": torch.randint(3, (12,)), "negative_ids": torch.randint(3, (12, 3))}
    every = integers | {"lists": torch.randint(-1, 12, (12, 3)), "scores": torch.randn(12, 3)}
    return {name: every[name] for name in names}


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize(
    ("loss", "given"),
    [
        (partial(InfoNCELoss), ()),
        (partial(InfoNCELoss), ("query_ids", "negative_ids")),
        (partial(InfoNCELoss, in_batch=False), ()),
        (partial(InfoNCELoss, hardness_mode="hard_negatives", hardness_strength=5.0), ()),
        (partial(ScoreDistillLoss, kind="kl"), ("scores",)),
        (partial(ScoreDistillLoss, kind="margin_mse"), ("scores", "lists")),
    ],
    ids=str,
)
def test_keys_of_each_query_are_replayed(loss: partial[Any], given: tuple[str, ...]) -> None:
    """Gradients are those of the call, though another one is replayed before them."""
    loss, plain = loss(), loss(reduction="none")
    for _ in range(4):
        q, k = torch.randn(12, 5).double(), torch.randn(12, 3, 5).double()
        leaves = {"query": q, "key": k, "scale": torch.tensor(0.7, dtype=torch.float64)}
        leaves |= {} if "scores" in given else {"key": q.flip(0).clone(), "negatives": k}
        leaves |= {"key": q.flip(0).clone()} if "lists" in given else {}
        free = [x.requires_grad_() for x in leaves.values()]
        constants, others = _of_lists(given), _of_lists(given)
        value = loss(**leaves, **constants)
        loss(**leaves | {"query": q.roll(1, 0)}, **others)
        truth = plain(**leaves, **constants).mean()
        for x, y in zip(*(torch.autograd.grad(3 * each, free) for each in (value, truth)), strict=True):
            assert distance(x, y) <= 1e-12
    assert len(CAPTURED) == 1


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize("trained", ["qk", "q"])
def test_constant_negatives_are_replayed_from_where_they_are(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue's keys are not joined with those of the step once the call is replayed."""
    loss, plain, joins = InfoNCELoss(), InfoNCELoss(reduction="none"), []
    monkeypatch.setattr(plan, "joined", lambda tensors: (joins.append(tensors), torch.cat(tensors))[1])
    for _ in range(5):
        q, k = (x.requires_grad_(name in trained) for name, x in zip("qk", torch.randn(2, 12, 5).double(), strict=True))
        leaves, ids = [x for x in (q, k) if x.requires_grad], torch.arange(19) // 2
        given = {"negatives": torch.randn(7, 5).double(), "query_ids": ids[:12], "key_ids": ids}
        truth, before = plain(q, k, 0.7, **given).mean(), len(joins)
        value = loss(q, k, 0.7, **given)
        for x, y in zip(*(torch.autograd.grad(3 * each, leaves) for each in (value, truth)), strict=True):
            assert distance(x, y) <= 1e-12
    assert len(CAPTURED) == 1
    assert len(joins) == before


@pytest.mark.usefixtures("_played")
def test_sums_are_copied_away_for_a_backward_that_is_still_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []
    move = graph.Held.move
    monkeypatch.setattr(graph.Held, "move", lambda held: (moved.append(held), move(held)))

    def batch() -> Tensor:
        return torch.randn(12, 5, dtype=torch.float64, requires_grad=True)

    for _ in range(graph.CALLS_BEFORE_CAPTURE + 2):
        q = batch()
        loss = contrast(q, q.detach(), scale=3.0)
        loss.backward()
    assert not moved
    first, second = batch(), batch()
    loss = contrast(first, first.detach(), scale=3.0)
    (once,) = torch.autograd.grad(loss, first, retain_graph=True)
    contrast(second, second.detach(), scale=3.0).backward()
    assert len(moved) == 1
    (again,) = torch.autograd.grad(2.0 * loss, first)
    assert torch.equal(again, 2.0 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.usefixtures("_played")
def test_a_backward_that_failed_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any, **how: Any) -> None:
        raise MemoryError

    for _ in range(graph.CALLS_BEFORE_CAPTURE + 2):
        q = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
        loss = contrast(q, q.detach(), scale=3.0)
    with monkeypatch.context() as patch:
        patch.setattr(replay.Gradients, "__call__", failing)
        with pytest.raises(MemoryError):
            loss.backward()
    loss.backward()
    truth = torch.autograd.grad(contrast(q, q.detach(), scale=3.0, reduction="none").mean(), q)[0]
    assert distance(q.grad, truth) <= 1e-12


@pytest.mark.usefixtures("_played")
def test_kinds_that_are_not_used_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "CALLS_BEFORE_RECAPTURE", 5)
    captured = []
    for n, calls in ((3, 3), (4, 3), (5, 3), (3, 5), (3, 1)):
        for _ in range(calls):
            contrast(torch.randn(n, 4, requires_grad=True), torch.randn(n, 4), scale=1.0)
        captured.append(len(CAPTURED))
    # a kind that was given up once waits for longer
    assert captured == [1, 2, 3, 3, 4]
    assert len(graph._graphs) == 2
    # graphs of 16 bits may keep a larger workspace; float32's is limited
    for dtype, kept in ((torch.float32, 2), (torch.bfloat16, 3)):
        for _ in range(3):
            q, k = torch.randn(2, 6, 4, dtype=dtype)
            contrast(q.requires_grad_(), k, scale=1.0, workspace=2 * graph.GRAPHS_BYTES)
        assert len(graph._graphs) == kept


def _late(loss: Any, masked: bool, call: int) -> list[Tensor]:
    """A step of late interaction on tokens that change from call to call; masked ones in number too."""
    generator = torch.Generator().manual_seed(call)
    more = masked * call
    q, k = (torch.randn(3, n + more, 8, generator=generator).requires_grad_() for n in (2, 17))
    masks = [torch.rand(x.shape[:2], generator=generator) > 0.3 for x in (q, k)]
    scale = torch.tensor(2.0, requires_grad=True)
    sides = zip((q, k), masks, strict=True) if masked else (q, k)
    value = contrast(*sides, scorer=MaxSim(), scale=scale, loss=loss, backend="triton", weights=torch.arange(1.0, 4.0))
    return [value.detach(), *torch.autograd.grad(value, (q, k, scale))]


@pytest.mark.parametrize(("loss", "masked"), [(Softmax(symmetric=True), True), (Sigmoid(), False)])
def test_late_interaction_has_the_bits_of_a_plain_call(loss: Any, masked: bool, request: pytest.FixtureRequest) -> None:
    plain = [_late(loss, masked, call) for call in range(graph.CALLS_BEFORE_CAPTURE + 1)]
    request.getfixturevalue("_played")
    for call, truth in enumerate(plain):
        assert all(torch.equal(x, y) for x, y in zip(_late(loss, masked, call), truth, strict=True))
    assert len(CAPTURED) == 1


@pytest.mark.usefixtures("_played")
def test_tokens_behind_a_views_end_are_not_replayed() -> None:
    """20 tokens of a buffer of 24, the length that a graph pads them to."""
    whole, mask = torch.randn(3, 24, 8), torch.ones(3, 24, dtype=torch.bool)
    q, bias = torch.randn(3, 2, 8, requires_grad=True), torch.tensor(1.0, requires_grad=True)
    arguments: dict[str, Any] = {"scorer": MaxSim(), "scale": 2.0, "loss": Softmax(), "backend": "triton", "bias": bias}
    results = []
    for call in range(graph.CALLS_BEFORE_CAPTURE + 2):
        k = (whole[:, :20], mask[:, :20]) if call else (whole[:, :20].clone(), mask[:, :20].clone())
        value = contrast(q, k, **arguments)
        results.append([value.detach(), *torch.autograd.grad(value, (q, bias))])
    assert all(torch.equal(x, y) for result in results for x, y in zip(result, results[0], strict=True))
    assert results[0][2] == 0
    assert len(CAPTURED) == 1
    # a side without tokens is no shorter text of theirs
    with pytest.raises((ValueError, IndexError)):
        contrast(q, (whole[:, :0], mask[:, :0]), **arguments)


def test_rows_are_measured_while_they_are_copied() -> None:
    """40 rows are three blocks of programs, and 300 features two steps; the largest number is the largest norm."""
    targets = [torch.empty(n, 300, dtype=torch.bfloat16) for n in (40, 7)] + [torch.empty(5)]
    filling = replay.Filling(targets, 2)
    for largest in (9.0, float("nan")):
        # numbers that a cast leaves as they are, which the interpreter would truncate
        q, k, numbers = torch.randn(40, 300).bfloat16().float(), torch.randn(7, 300).bfloat16().float(), torch.randn(5)
        q[33, 280] = largest
        filling([q, k, numbers], torch.zeros(()), 0)
        copied = zip(targets, (q, k, numbers), strict=True)
        assert all(torch.equal(x.float().nan_to_num(), y.nan_to_num()) for x, y in copied)
        assert filling.norms is not None
        norms = torch.stack([x.square().sum(1).nan_to_num().amax() for x in (*q.split(16), k)])
        assert torch.allclose(filling.norms[0], norms)
        assert filling.norms[1].isnan().tolist() == [False, False, largest != 9.0, False]


@pytest.mark.usefixtures("_played")
def test_a_call_without_gradients_is_replayed_as_the_loss_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(2, 12, 5, requires_grad=True)
    swept = []
    backward = Eager.backward
    monkeypatch.setattr(Eager, "backward", lambda *how: (swept.append(how), backward(*how))[1])
    with torch.no_grad():
        values = [contrast(q, k, scale=3.0, bias=1.0, loss=loss) for loss in (Softmax(), Sigmoid()) for _ in range(4)]
    truth = [contrast(q, k, scale=3.0, bias=1.0, loss=loss, reduction="none").mean() for loss in (Softmax(), Sigmoid())]
    assert all(distance(x, truth[index // 4].detach()) <= 1e-6 for index, x in enumerate(values))
    assert len(CAPTURED) == 2
    assert not swept


def test_nothing_is_small_on_a_cpu() -> None:
    for _ in range(graph.CALLS_BEFORE_CAPTURE + 1):
        contrast(torch.randn(3, 4, requires_grad=True), torch.randn(3, 4), scale=1.0)
    assert not graph._calls


@pytest.mark.usefixtures("_played")
def test_a_checkpoint_around_a_loss_finds_what_it_saved() -> None:
    for _ in range(graph.CALLS_BEFORE_CAPTURE + 2):
        q = torch.randn(6, 4, requires_grad=True)
        checkpoint(lambda q: contrast(q.sin(), q, scale=3.0), q, use_reentrant=False).backward()
        contrast(q, q.detach(), scale=3.0).backward()
    assert len(CAPTURED) == 1


@pytest.mark.usefixtures("_played")
def test_a_call_waits_shortly_for_another_threads_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture may wait for another rank, and that one for the thread of this call."""
    monkeypatch.setattr(graph, "PATIENCE", 0.01)
    q = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    with graph._lock:
        losses = [contrast(q, q.detach(), scale=3.0) for _ in range(graph.CALLS_BEFORE_CAPTURE + 2)]
    assert not CAPTURED
    assert all(torch.equal(loss, losses[0]) for loss in losses)


def test_hooks_of_a_profiler_see_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiled:
        function, packed_metadata = "function", "metadata"

        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, stream: launches.append((grid, stream, arguments))

        def run(self, *arguments: Any) -> None:
            launches.append(arguments)

    launches: list[Any] = []
    compiled: Any = Compiled()
    starting.start(compiled, (3, 1, 1), 7, (5, 6))
    monkeypatch.setattr(starting.triton.knobs.runtime, "launch_enter_hook", [print])
    starting.start(compiled, (3, 1, 1), 7, (5, 6))
    assert launches == [(3, 1, 1, 7, "function", "metadata", None, None, None, 5, 6), ((3, 1, 1), 7, (5, 6))]


@pytest.mark.usefixtures("_played")
def test_a_replayed_step_makes_few_python_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of functions of the package are counted, without kernels and the captured computation."""
    monkeypatch.setattr(graph, "_captured", lambda compute, **_: (compute(), lambda: None, 1, 0))
    q, k, scale = *F.normalize(torch.randn(2, 6, 4), dim=-1).requires_grad_(), torch.tensor(3.0, requires_grad=True)
    ids, loss, calls = torch.arange(6), ClipLoss(), []
    files = [f"contrastile/{path}" for path in ("modules/", "engine/", "gradcache/", "tiles/triton/replay.py")]

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and any(file in frame.f_code.co_filename for file in files):
            calls.append(frame.f_code.co_name)

    for _ in range(graph.CALLS_BEFORE_CAPTURE + 2):
        calls.clear()
        sys.setprofile(note)
        loss(q, k, scale, ids=ids, weights=torch.ones(6)).backward()
        sys.setprofile(None)
    assert len(calls) <= 44, calls


def test_graphs_that_are_kept_were_captured_on_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of one stream share a workspace of cuBLAS, which goes with the first of them."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(graph, "_streams", {})
    monkeypatch.setattr(graph, "_graphs", graphs := dict[int, Any]())
    for number in range(3):
        graphs[number] = SimpleNamespace(capture_stream=graph._free_stream())
    first = graphs.pop(0).capture_stream
    assert first not in [each.capture_stream for each in graphs.values()]
    assert graph._free_stream() is first
    assert len(graph._streams[0]) == 3


SIZES = {"even": (4, 4, 4), "uneven": (5, 0, 3)}
KINDS: dict[str, dict[str, Any]] = {
    "clip": {"loss": Softmax(symmetric=True)},
    "ids, weights": {"loss": Softmax(symmetric=True), "query_ids": 3, "key_ids": 3, "weights": 1},
    "labels": {"loss": Softmax(symmetric=True), "query_labels": 2, "key_labels": 2},
    "siglip": {"loss": Sigmoid(), "bias": -3.0},
    "sum": {"loss": Softmax(), "reduction": "sum", "gradient": "sum"},
    "negatives": {"loss": Softmax(), "negatives": 3},
}


def _with_negatives(how: dict[str, Any], q: Tensor) -> list[Tensor]:
    """Put negatives of each query in place of their number; returns them, if there are some."""
    if "negatives" not in how:
        return []
    n, D = q.shape
    how["negatives"] = torch.randn(n, how["negatives"], D, dtype=q.dtype, requires_grad=True)
    return [how["negatives"]]


def _steps(rank: int, group: Any, kind: str, exchange: str) -> list[Tensor]:
    """Losses and gradients of calls of several sizes, which replicate never replays.

    Rank 1 can replay none, and rank 2 refuses in one of them, as rank 0, another of whose threads captures a call.
    """
    found = []
    with pytest.MonkeyPatch.context() as patch:
        played = _plays(patch)
        next(played)
        if rank == 1:
            patch.setattr(plan, "small", lambda *_: False)
        for step, sizes in enumerate(["even"] * 5 + ["uneven"] * 4 + ["even"] * 2):
            torch.manual_seed(10 * step + rank)
            n = SIZES[sizes][rank]
            q, k = (torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
            scale = torch.tensor(2.0 + step, dtype=torch.float64, requires_grad=True)
            how = dict(KINDS[kind])
            for name in ("query_ids", "key_ids", "query_labels", "key_labels"):
                if name in how:
                    how[name] = torch.randint(how[name], (n,))
            if "weights" in how:
                how["weights"] = torch.rand(n, dtype=torch.float64)
            further = _with_negatives(how, q)
            refusing: Any = nullcontext()
            if step == 4 and rank != 1:
                hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
                refusing = hooks if rank == 2 else graph._lock
            with refusing:
                loss = contrast(q, k, scale=scale, exchange=exchange, group=group, **how)
            found += [loss.detach(), *torch.autograd.grad(2.0 * loss, [q, k, scale, *further])]
        # the calls of both layouts
        assert len(CAPTURED) == (2 if exchange != "replicate" and rank != 1 else 0)
        next(played, None)
    return found


# "clip" in fused kernels: below
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "clip"])
def test_calls_of_several_ranks_are_replayed_for_each_layout(pool: Pool, kind: str) -> None:
    truth = pool.run(_steps, 3, kind, "replicate")
    for exchange in ("gather", "ring"):
        for ours, theirs in zip(pool.run(_steps, 3, kind, exchange), truth, strict=True):
            assert all(distance(x, y) <= 1e-12 for x, y in zip(ours, theirs, strict=True)), exchange


def _taped(rank: int, group: Any, kind: str, exchange: str) -> list[Tensor]:
    """Losses and gradients of calls in fused kernels; those from the third on are captured with `taped`."""
    words, found = exchange.split(), []
    name, taped = words[0], "taped" in words
    with pytest.MonkeyPatch.context() as patch:
        captured = graph._captured
        played = _plays(patch)
        next(played)
        stream = SimpleNamespace(wait_stream=lambda _: None)
        for place, values in {
            graph: {"_captured": captured, "_free_stream": lambda: stream},
            plan: {"small": lambda *_: taped},
            torch.cuda: {
                "CUDAGraph": Tape, "current_stream": lambda: stream, "memory_reserved": lambda: 0,
                "mem_get_info": lambda: (2**40, 2**40),
            },
            gather: {"ONE_BLOCK": 0 if "two" in words else gather.ONE_BLOCK},
            **{module: {"run": run} for module in (launch, own, sorting)},
        }.items():  # fmt: skip
            for attribute, value in values.items():
                patch.setattr(place, attribute, value)
        for step in range(0 if taped else 2, 5):
            torch.manual_seed(10 * step + rank)
            q, k = (torch.randn(SIZES["uneven"][rank], 6, requires_grad=True) for _ in range(2))
            scale = torch.tensor(2.0 + step, requires_grad=True)
            how = dict(KINDS[kind])
            further = _with_negatives(how, q)
            loss = contrast(q, k, scale=scale, exchange=name, group=group, backend="triton", **how)
            found += [loss.detach(), *torch.autograd.grad(2.0 * loss, [q, k, scale, *further])]
        assert len(graph._graphs) == taped
        next(played, None)
    return found


@pytest.mark.parametrize(("kind", "exchange"), [
    ("clip", "gather"), ("siglip", "gather two"), ("clip", "ring"), ("negatives", "gather"), ("negatives", "ring"),
])  # fmt: skip
def test_transfers_repeated_between_tapes_give_the_bits_of_plain_calls(pool: Pool, kind: str, exchange: str) -> None:
    taped, plain = (pool.run(_taped, 3, kind, exchange + how) for how in (" taped", ""))
    for ours, theirs in zip(taped, plain, strict=True):
        # the first two calls are plain ones
        assert all(torch.equal(x, y) for x, y in zip(ours[len(ours) - len(theirs) :], theirs, strict=True))


class _Played:
    """A graph that says what happens to it."""

    def __init__(self) -> None:
        self.number = len(HAPPENED)
        HAPPENED.append("made")

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert pool in (None, "pool")
        HAPPENED.append("begin")

    def capture_end(self) -> None:
        HAPPENED.append("end")

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        HAPPENED.append(f"replay {self.number}")


HAPPENED: list[str] = []


def _lost() -> None:
    raise LostRankError("lost")


def test_a_rank_lost_in_a_captured_call_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(graph, "_free_stream", lambda: stream)
    here = {"current_stream": lambda: stream, "stream": lambda _: nullcontext(), "memory_reserved": lambda: 0}
    # cached memory can be given back before the capture alone
    memory = {
        "mem_get_info": lambda: (graph.GRAPHS_BYTES + 2**29, 0),
        "empty_cache": lambda: HAPPENED.append("emptied"),
    }
    for name, value in {"CUDAGraph": _Played, **here, **memory}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    HAPPENED.clear()
    with pytest.raises(LostRankError):
        graph._captured(lambda: captured_call.transfer(_lost), across_ranks=True)
    assert HAPPENED == ["emptied", "made", "begin", "end", "replay 1"]


def test_transfers_are_made_between_graphs_in_a_captured_call_and_in_each_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Played)
    HAPPENED.clear()
    parts = graph.Parts()
    parts.begin()
    parts.transfer(lambda: HAPPENED.append("begun"))
    parts.transfer(lambda: HAPPENED.append("completed"))
    parts.end()
    parts.last()
    assert [each for each in HAPPENED if each not in ("made", "begin", "end")] == [
        "replay 0", "begun", "replay 5", "completed", "replay 10",
    ]  # fmt: skip
    HAPPENED.clear()
    parts.replay()
    assert HAPPENED == ["replay 0", "begun", "replay 5", "completed", "replay 10"]


def _transfers(x: Tensor, group: Any) -> list[Tensor]:
    rows = collectives.gather_rows(x, [2, 2], group)
    own = collectives.begin_scatter_sum(rows, [2, 2], group).wait()[0]
    (passed,) = collectives.post(x, torch.empty_like(x), group).wait()
    return [rows, own, collectives.exchange_rows(x, [2, 2], group), collectives.total(x, group), passed]


def _counted(rank: int, group: Any) -> list[int]:
    """Operations that a plain call, a captured one and a replay count."""
    x, steps, state = torch.zeros(2, 3), list[Callable[[], None]](), state_of(group)
    counts = [state.operations]

    def transfer(step: Callable[[], None]) -> None:
        step()
        steps.append(step)

    _transfers(x, group)
    counts.append(state.operations)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured_call, "transfer", transfer)
        rows, _, others, _, passed = _transfers(x, group)
    counts.append(state.operations)
    x += rank + 1
    for step in steps:
        step()
    counts.append(state.operations)
    assert rows.mean() == 1.5
    assert others.mean() == passed.mean() == 2 - rank
    assert state.in_flight is None
    return [after - before for before, after in pairwise(counts)]


def test_a_replayed_call_counts_as_any_other(pool: Pool) -> None:
    """By the counts ranks know that they fail at one place, while one of them replays a call and another does not."""
    assert pool.run(_counted, 2) == [[5, 5, 5]] * 2


def test_a_rank_lost_in_a_replayed_transfer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        pass

    class Work:
        def wait(self) -> None:
            raise RuntimeError("closed")

    steps, group = list[Callable[[], None]](), Group()
    monkeypatch.setattr(collectives, "all_gather", lambda *_, **how: Work())
    monkeypatch.setattr(collectives, "lost", lambda operation, *_: LostRankError(operation))
    monkeypatch.setattr(captured_call, "transfer", lambda step: (step(), steps.append(step)))
    flight = collectives.begin_gather([torch.ones(2, 3)], [2], group)
    works, flight.works = flight.works, []
    flight.wait()
    begin, complete = steps
    begin()
    assert len(works) == len(flight.works) == 1
    with pytest.raises(LostRankError, match="gather of rows"):
        complete()


@pytest.mark.usefixtures("_played")
@pytest.mark.parametrize(
    ("owner", "method"), [(replay.Filling, "__call__"), (graph.Held, "move"), (replay.Gradients, "__call__")]
)
def test_an_error_in_a_replayed_call_is_one_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    seen = []

    @contextmanager
    def in_step(_: Exchange) -> Iterator[None]:
        try:
            yield
        except MemoryError:
            seen.append(1)
            raise

    def failing(*arguments: Any) -> None:
        raise MemoryError

    q, k = torch.randn(2, 6, 4, requires_grad=True)
    losses = [contrast(q, k, scale=1.0) for _ in range(graph.CALLS_BEFORE_CAPTURE + 2)]
    monkeypatch.setattr(Exchange, "in_step", in_step)
    monkeypatch.setattr(owner, method, failing)
    with pytest.raises(MemoryError):
        (losses[-1] + contrast(q, k, scale=1.0)).backward()
    assert seen


@pytest.mark.usefixtures("_played")
def test_a_replay_that_waits_for_other_ranks_delays_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(n: int) -> None:
        contrast(torch.randn(n, 4, requires_grad=True), torch.randn(n, 4), scale=1.0)

    for n in (3, 4):
        for _ in range(graph.CALLS_BEFORE_CAPTURE + 1):
            call(n)
    waiting, done, (first, _) = threading.Event(), threading.Event(), graph._graphs.values()
    monkeypatch.setattr(first, "replay", lambda: (waiting.set(), done.wait(60)))
    thread = threading.Thread(target=call, args=(3,))
    other = threading.Thread(target=call, args=(4,), daemon=True)
    thread.start()
    waiting.wait(60)
    other.start()
    other.join(10)
    delayed = other.is_alive()
    done.set()
    thread.join()
    assert not delayed


@pytest.mark.usefixtures("_played")
def test_a_graph_is_captured_anew_where_ranks_have_made_other_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise ranks with a graph would wait for flags beside the old ones, and ranks without it beside the new."""
    q, k = torch.randn(2, 6, 4)
    for at in range(2):
        buffers = SimpleNamespace(unwatched=False)
        monkeypatch.setattr(Exchange, "buffers", lambda _, buffers=buffers: buffers)
        for _ in range(graph.CALLS_BEFORE_CAPTURE + 2):
            contrast(q, k, scale=1.0)
        assert (len(CAPTURED), buffers.unwatched) == (at + 1, True)
    assert len(graph._graphs) == 1


@pytest.mark.usefixtures("_played")
def test_a_graph_of_inference_mode_is_replayed_there_alone() -> None:
    q, k = torch.randn(2, 6, 4)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            values = [contrast(q, k, scale=1.0) for _ in range(graph.CALLS_BEFORE_CAPTURE + 2)]
        assert all(torch.equal(x, values[0]) for x in values)
    assert len(CAPTURED) == 2


def _refused(rank: int, group: Any) -> tuple[int, int]:
    tried, places, all_failed = [], list[str](), failure.all_failed

    def failing(*arguments: Any, **how: Any) -> None:
        tried.append(1)
        raise RuntimeError("no")

    with pytest.MonkeyPatch.context() as patch:
        played = _plays(patch)
        next(played)
        patch.setattr(graph, "_captured", failing)
        patch.setattr(failure, "all_failed", lambda place, group: places.append(place) or all_failed(place, group))
        q, k = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(rank))
        losses = [contrast(q.requires_grad_(), k, scale=1.0, exchange="gather", group=group).detach() for _ in range(5)]
        assert all(torch.equal(loss, losses[0]) for loss in losses)
        next(played, None)
    # another name than that of an error in a call without a graph, after which none computes it again
    return len(tried), len([place for place in places if place.startswith("capture")])


def test_a_capture_that_fails_on_all_ranks_is_not_tried_again(pool: Pool) -> None:
    assert pool.run(_refused, 2) == [(1, 1)] * 2


def _world(rank: int, W: int, path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=W)


def _in_new_worlds(rank: int, folder: Path) -> None:
    q, k = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(rank))

    def call(**how: Any) -> Tensor:
        return contrast(q.requires_grad_(), k, scale=1.0, **how).detach()

    with pytest.MonkeyPatch.context() as patch:
        _world(rank, 2, folder / "first")
        groups = [dist.group.WORLD, dist.new_group(), [dist.new_group([0]), dist.new_group([1])][rank]]
        for group in groups:
            call(exchange="gather", group=group)
        references = [ref(group) for group in groups]
        del group, groups
        dist.destroy_process_group()
        gc.collect()
        # their connections close with them, so that ranks which wait for this one wake up
        assert [group() for group in references] == [None, None, None]
        played = _plays(patch)
        next(played)
        _world(rank, 2, folder / "second")
        for _ in range(graph.CALLS_BEFORE_CAPTURE + 2):
            call(exchange="gather")
        assert len(CAPTURED) == 1
        dist.destroy_process_group()
        _world(0, 1, folder / f"alone {rank}")
        assert distance(call(exchange="gather"), call(reduction="none").mean()) <= 1e-6
        next(played, None)


def test_a_group_of_all_ranks_that_was_made_anew_is_another_one(tmp_path: Path) -> None:
    with fresh(2, _in_new_worlds, tmp_path) as processes:
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]
