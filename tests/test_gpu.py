"""Properties that only a GPU shows: its tensor cores' arithmetic, large sizes, losses beside graphs and streams.

Run by `make test-gpu`; elsewhere skipped.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import distance
from torch import Tensor, nn

pytest.importorskip("triton")

from contrastile import ClipLoss, InfoNCELoss, NTXentLoss, SigLipLoss, contrast, encode
from contrastile.bench.gate import Gate, Sample, problem
from contrastile.bench.loss import float32_products
from contrastile.bench.peers import Case
from contrastile.bench.subjects import SUBJECTS
from contrastile.bench.towers import Pairs, Towers
from contrastile.bench.ways import Task, cached
from contrastile.engine import arguments as checks
from contrastile.engine import graph
from contrastile.engine.arguments import MOST_READS
from contrastile.losses.decoupled import Decoupled
from contrastile.losses.distilled import Distilled
from contrastile.losses.guided import Guided
from contrastile.losses.reference import dense_clip, dense_decoupled, dense_sigmoid
from contrastile.losses.sigmoid import BalancedSigmoid, Sigmoid
from contrastile.losses.softmax import Softmax
from contrastile.scorers import Bilinear, PairMLP
from contrastile.tiles import eager
from contrastile.tiles.triton.plan import interpreting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.unpoisoned,
    pytest.mark.skipif(interpreting() or not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
MIB = 2**20


@pytest.fixture(autouse=True)
def _on_the_device() -> Iterator[None]:
    _forget()
    with CUDA:
        yield
    _forget()


def _forget() -> None:
    """Drop all graphs, those of tests of other files too."""
    graph._graphs.clear()
    graph._calls.clear()
    torch.cuda.empty_cache()


def _pairs(n: int, D: int, cosine: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Unit features whose pairs have about this cosine, and a scale of 100; leaves that want gradients."""
    q, k = (F.normalize(torch.randn(n, D), dim=-1) for _ in range(2))
    q = F.normalize(cosine * k + (1 - cosine**2) ** 0.5 * q, dim=-1)
    return [q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(), torch.tensor(100.0, requires_grad=True)]


def _step(loss: Any, leaves: list[Tensor]) -> list[Tensor]:
    value = loss(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def _wide(leaves: list[Tensor]) -> list[Tensor]:
    return [leaf.detach().double().requires_grad_() for leaf in leaves]


@pytest.mark.parametrize("D", [384, 512, 768, 1024, 1152, 2048])
@pytest.mark.parametrize("cosine", [0.0, 0.2, 0.3])
def test_the_loss_is_right_to_a_millionth(D: int, cosine: float) -> None:
    leaves = _pairs(8192, D, cosine)
    truth = dense_clip(*_wide(leaves))
    assert distance(ClipLoss(backend="triton")(*leaves).detach(), truth.detach()) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("cosine", [0.0, 0.2, 0.3, 0.4])
def test_the_scales_gradient_of_correlated_pairs(cosine: float, dtype: torch.dtype) -> None:
    leaves = _pairs(8192, 512, cosine, dtype)
    true, found = _step(dense_clip, _wide(leaves)), _step(ClipLoss(backend="triton"), leaves)
    assert distance(found[3], true[3]) <= 5e-5


def _decoupled(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    return contrast(q, k, scale=scale, loss=Decoupled(symmetric=True), backend="triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("cosine", [0.0, 0.3, 0.6])
def test_the_decoupled_loss_and_its_gradients(cosine: float, dtype: torch.dtype) -> None:
    leaves, formula = _pairs(8192, 512, cosine, dtype), partial(dense_decoupled, symmetric=True)
    true, dense, found = _step(formula, _wide(leaves)), _step(formula, leaves), _step(_decoupled, leaves)
    assert distance(found[0], true[0]) <= 1e-6
    for gradient, plain, truth in zip(found[1:3], dense[1:3], true[1:3], strict=True):
        assert distance(gradient, truth) <= max(2 * distance(plain, truth), 1e-6)
    assert distance(found[3], true[3]) <= 5e-5


@pytest.mark.parametrize("loss", SUBJECTS)
def test_large_sizes_by_a_sample(loss: str) -> None:
    case = Case(loss, 2**16 - 3, 512, "bfloat16")
    gate, sample = Gate(case, CUDA), Sample(loss, problem(case, CUDA))
    at_size, cast = sample.distance(sample.step(SUBJECTS[loss].module(backend="triton", workspace=256 * MIB)))
    assert gate.red(at_size, cast) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_so_it_is_in_other_types(dtype: torch.dtype) -> None:
    leaves = _pairs(8192, 512, 0.2, dtype)
    truth = dense_clip(*_wide(leaves))
    assert distance(ClipLoss(backend="triton")(*leaves).detach(), truth.detach()) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_of_eager_tiles(dtype: torch.dtype) -> None:
    """Two 16-bit operands: a pair's gradient, which in fp16 would mostly be 0, and the features."""
    k = F.normalize(torch.randn(4096, 256), dim=-1).to(dtype)
    g = (torch.softmax(k.float() @ k.float().T, 1) - torch.eye(4096)) / 8192
    total = torch.zeros(4096, 256)
    eager.add_product(total, g, k, fresh=False)
    assert distance(total, g.double() @ k.double()) <= (5e-4 if dtype == torch.float16 else 4e-3)


@pytest.mark.parametrize("loss", ["clip", "siglip", "infonce", "gist", "distill", "siglip_balanced"])
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("bfloat16", "highest"), ("float16", "highest"), ("float32", "high"), ("float32", "highest")],
)
def test_the_gate_of_the_bench_is_green(loss: str, dtype: str, precision: str) -> None:
    for D in (512, 768, 1024) if dtype == "bfloat16" else (512,):
        with float32_products(precision):
            gate = Gate(Case(loss, 2**16, D, dtype, precision=precision), CUDA)
            assert gate.red(gate.distance(SUBJECTS[loss].module(backend="triton"))) is None


def test_confident_models_keep_their_digits() -> None:
    leaves = _pairs(4096, 768, 0.4)
    truth, found = _step(dense_clip, _wide(leaves)), _step(ClipLoss(backend="triton"), leaves)
    assert truth[0] < 1e-8
    assert distance(found[0], truth[0]) <= 1e-4
    assert max(distance(x, y) for x, y in zip(found[1:3], truth[1:3], strict=True)) <= 1e-2


@pytest.mark.parametrize(("workspace", "extra"), [(192 * MIB, 0.45 * 1024 * MIB), (32 * MIB, 0.4 * 1024 * MIB)])
def test_65536_rows_in_little_memory(workspace: int, extra: float) -> None:
    leaves, n = _pairs(65536, 512, 0.2), 65536
    loss = ClipLoss(backend="triton", workspace=workspace)
    loss(*leaves).backward()
    for leaf in leaves:
        leaf.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss(*leaves).backward()
    assert torch.cuda.max_memory_allocated() - before <= extra
    q, k, scale = (leaf.detach().double() for leaf in leaves)
    # the lines of log-probabilities of all rows, a thousand at a time, for a few rows' gradients
    few = torch.arange(0, n, n // 16)
    rows = torch.cat([torch.logsumexp(scale * part @ k.T, 1) for part in q.split(1024)])
    cols = torch.cat([torch.logsumexp(scale * part @ q.T, 1) for part in k.split(1024)])
    x = scale * q[few] @ k.T
    g = (x - rows[few, None]).exp() + (x - cols[None]).exp()
    g[torch.arange(len(few)), few] -= 2
    truth = scale / (2 * n) * g @ k
    assert leaves[0].grad is not None
    assert distance(leaves[0].grad[few], truth) <= 3e-3


def test_more_elements_than_32_bits_count() -> None:
    n, D = 2**22 + 3, 512
    k = F.normalize(torch.randn(n, D, dtype=torch.bfloat16), dim=-1).requires_grad_()
    places = torch.tensor([0, n // 2, n - 1])
    q = F.normalize(k.detach()[places] + 0.2 * torch.randn(3, D), dim=-1).bfloat16().requires_grad_()
    loss = contrast(q, k, scale=100.0, loss=Softmax(), positives=places, backend="triton", workspace=64 * MIB)
    dq, dk = torch.autograd.grad(loss, (q, k))
    x = 100.0 * torch.cat([q.detach().double() @ part.double().T for part in k.detach().split(2**18)], dim=1)
    g = x.softmax(1)
    g[torch.arange(3), places] -= 1
    assert distance(loss.detach(), (x.logsumexp(1) - x[torch.arange(3), places]).mean()) <= 1e-5
    assert distance(dk[places], (100 / 3) * (g.T[places] @ q.detach().double())) <= 1e-2
    assert distance(dk[n - 100 : n - 1], (100 / 3) * (g.T[n - 100 : n - 1] @ q.detach().double())) <= 1e-2
    del dq


def _labels(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and weights of a thousand pairs, and three keys for each query, one in a thousand of them a pad."""
    draw = torch.Generator(CUDA).manual_seed(seed)
    ids, weights = torch.randint(300, (1000,), generator=draw), torch.rand(1000, generator=draw)
    return ids, weights, torch.randint(-1, 1000, (1000, 3), generator=draw)


def _with_options(name: str, seed: int) -> Any:
    """A loss of features and scale with the options that the name lists."""
    ids, weights, positives = _labels(seed)
    options: dict[str, Any] = {"backend": "triton"}
    if "siglip" in name:
        options |= {"loss": Sigmoid(), "bias": torch.tensor(-10.0)}
    if "dcl" in name:
        options |= {"loss": Decoupled(symmetric=True)}
    if "infonce" in name:
        options |= {"loss": Softmax(), "positives": positives}
    if "gist" in name or "distill" in name:
        draw = torch.Generator(CUDA).manual_seed(seed)
        guides = F.normalize(torch.randn(2, 1000, 64, generator=draw), dim=-1).bfloat16()
        loss = Guided() if "gist" in name else Distilled(symmetric=True)
        options |= {"loss": loss, "guide_q": guides[0] * (1 + seed), "guide_k": guides[1]}
    if "balanced" in name:
        options |= {"loss": BalancedSigmoid(), "bias": torch.tensor(-10.0)}
    if "ids" in name:
        options |= {"query_ids": ids, "key_ids": ids}
    if "labels" in name:
        # the same tensor, or another one
        options |= {"query_labels": ids, "key_labels": ids.flip(0) if "apart" in name and seed % 2 else ids}
    if "weights" in name:
        options |= {"weights": weights}
    if "smoothing" in name:
        options |= {"label_smoothing": 0.1}
    if "rows" in name:
        return lambda q, k, scale: (
            contrast(q, k, scale=scale, reduction="none", **options) @ torch.linspace(0, 2, len(q))
        )
    return lambda q, k, scale: contrast(q, k, scale=scale, **options)


@contextmanager
def _unreplayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls are plain ones, as where a user captures a graph."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


def _views(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """Columns of another order, labels with gaps, and numbers at odd addresses."""
    ids = (torch.arange(2 * len(q), dtype=torch.int32) // 20)[1::2]
    weights = torch.linspace(0.5, 2, len(q) + 1)[1:]
    how: dict[str, Any] = {"query_ids": ids, "key_ids": ids, "weights": weights, "backend": "triton"}
    return contrast(q, k.T.contiguous().T, scale=torch.stack([scale, scale])[1:], **how)


def _odd(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """Features at odd addresses, which a kernel sums in another order than their copy."""
    odd = torch.cat([q.new_zeros(1), q.flatten()])[1:].view_as(q)
    return contrast(odd, k, scale=scale, backend="triton")


def _numbers(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    return contrast(q, k, scale=20.0, bias=-9.5, loss=Sigmoid(), backend="triton") * scale


def _one_scale(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    options: dict[str, Any] = {"loss": Sigmoid(), "backend": "triton"}
    return contrast(q, k, scale=scale.bfloat16().reshape(1), bias=scale.double() / -10, **options)


def _autocast(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return contrast(q.float() * 1.001, k, scale=scale, backend="triton")


def _negatives(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """Those of each query, whose features are not side by side in memory."""
    negatives = torch.stack([k.roll(shift, 0) for shift in (1, 5, 9)], 2).transpose(1, 2)
    return contrast(q, k, scale=scale, loss=Softmax(), negatives=negatives, backend="triton")


@pytest.mark.parametrize("loss", [_views, _odd, _numbers, _one_scale, _autocast, _negatives])
def test_a_replay_takes_its_inputs_as_a_plain_call_does(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph._graphs.clear()
    for _ in range(5):
        leaves = _pairs(1000, 512, 0.2)
        found = _step(loss, leaves)
        with _unreplayed(monkeypatch):
            plain = _step(loss, leaves)
        apart = max(distance(x, y) for x, y in zip(found, plain, strict=True))
        assert apart <= (4e-3 if loss is _odd else 0.0)
    assert len(graph._graphs) == 1


@pytest.mark.parametrize(
    "name",
    [
        "clip",
        "clip ids",
        "clip ids weights smoothing",
        "clip labels",
        "clip labels apart",
        "dcl",
        "dcl ids weights",
        "siglip",
        "siglip ids weights",
        "infonce ids",
        "gist ids",
        "distill ids",
        "balanced labels",
        "clip rows",
        "dcl ids weights rows",
        "siglip ids weights rows",
        "infonce ids rows",
    ],
)
def test_a_small_call_replayed_has_the_bits_of_a_plain_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
    for call in range(6):
        leaves, loss = _pairs(1000, 512, 0.2), _with_options(name, call)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[call % 2]):
            found = _step(loss, leaves)
        torch.cuda.synchronize()
        with _unreplayed(monkeypatch):
            plain = _step(loss, leaves)
        apart = [float((x.double() - y.double()).abs().max()) for x, y in zip(found, plain, strict=True)]
        assert apart == [0.0] * len(apart), call
    assert len(graph._graphs) == 1 + ("apart" in name) + ("rows" in name)


def test_calls_that_are_replayed_know_nothing_of_each_other() -> None:
    loss, batches = ClipLoss(backend="triton"), [_pairs(512, 256, 0.2) for _ in range(5)]
    apart = [_step(loss, leaves)[1:] for leaves in batches]
    values = [loss(*leaves) for leaves in batches]
    together = torch.autograd.grad(3.0 * sum(values), [leaf for leaves in batches for leaf in leaves])
    for found, truth in zip(together, [x for gradients in apart for x in gradients], strict=True):
        assert distance(found, 3.0 * truth.double()) <= 4e-3
    assert len(graph._graphs) == 1


def test_a_replayed_loss_may_be_changed_in_place() -> None:
    loss, leaves = ClipLoss(backend="triton"), _pairs(300, 64, 0.2)
    truth = torch.autograd.grad(loss(*leaves), leaves)
    for _ in range(graph.CALLS_BEFORE_CAPTURE + 2):
        value = loss(*leaves)
        value /= 4
        found = torch.autograd.grad(value, leaves)
        assert all(distance(4 * x, y) <= 4e-3 for x, y in zip(found, truth, strict=True))


def test_graphs_that_are_not_used_are_given_up() -> None:
    loss = ClipLoss(backend="triton")
    for n in range(100, 1000, 100):
        for _ in range(3):
            _step(loss, _pairs(n, 64))
    assert [len(one.sums[0]) for one in graph._graphs.values()] == [*range(100, 1000, 100)][-graph.MOST_GRAPHS :]


def test_a_step_inside_a_graph_of_its_own() -> None:
    loss = ClipLoss(backend="triton")
    static, fresh = _pairs(2048, 512, 0.2), _pairs(2048, 512, 0.3)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            _step(loss, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        left = _step(loss, static)
    with torch.no_grad():
        for x, y in zip(static, fresh, strict=True):
            x.copy_(y)
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(left, _step(loss, fresh), strict=True))


@pytest.mark.filterwarnings("ignore")
def test_compiled_towers_and_the_loss_are_one_graph() -> None:
    torch._dynamo.reset()
    towers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 128)) for _ in range(2))
    scale, loss = torch.tensor(20.0, requires_grad=True), ClipLoss()

    def step(x: Tensor, y: Tensor) -> Tensor:
        features = (F.normalize(tower(part), dim=-1) for tower, part in zip(towers, (x, y), strict=True))
        return loss(*features, scale)

    compiled = torch.compile(step, fullgraph=True)
    leaves = [*towers.parameters(), scale]
    for batch in (512, 300):
        x, y = torch.randn(2, batch, 32)
        truth, found = (torch.autograd.grad(way(x, y), leaves) for way in (step, compiled))
        assert all(distance(a, b) <= 1e-4 for a, b in zip(found, truth, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning", "ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_towers_draw_the_same_numbers_in_both_passes(dtype: torch.dtype) -> None:
    """The rest of the batch runs as it is written; kept graphs and replayed sub-batches have one gradient."""
    pytest.importorskip("transformers")
    torch._dynamo.reset()
    torch.manual_seed(0)
    towers = Towers("tiny", CUDA, dropout=0.1)
    sides = Pairs(towers).sides(100, "device")
    towers.compiled(True)

    def gradients(retain: int) -> Tensor:
        towers.zero_grad()
        torch.manual_seed(1)
        cached(Task(towers, sides, 16, CUDA, dtype, ClipLoss()), retain)
        # the next call reports features that differ
        torch.cuda.synchronize()
        return torch.cat([x.grad.flatten() for x in towers.parameters() if x.grad is not None])

    first = gradients(0)
    assert torch.equal(gradients(0), first)
    assert distance(gradients(7), first) <= (1e-5 if dtype == torch.float32 else 1e-2)
    torch._dynamo.reset()


def test_a_loss_made_anew_for_each_step_does_not_wait_for_the_device() -> None:
    leaves = _pairs(300, 64)
    for _ in range(MOST_READS):
        ClipLoss()(*leaves)
    with _no_waiting():
        loss = ClipLoss()(*leaves)
    assert loss.isfinite()


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Raises where the host waits for the device."""
    with warnings.catch_warnings():
        # it says that it is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_positives_do_not_wait_for_the_device(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_gpu_reads", checks.GpuReads())
    q, k, scale = _pairs(300, 64)
    own, given = NTXentLoss(backend=backend), InfoNCELoss(backend=backend)
    positives = torch.arange(300).flip(0)
    own(q, k, scale)
    with _no_waiting():
        own(q, k, scale)
    with pytest.raises(ValueError, match="`positives` must index this rank's 300 keys, or be -1; got 300"):
        given(q, k, scale, positives=positives + 1)
    for _ in range(MOST_READS):
        right = given(q, k, scale, positives=positives)
    with _no_waiting():
        unread = given(q, k, scale, positives=positives)
        wrong = given(q, k, scale, positives=positives + 1)
        gradients = torch.autograd.grad(wrong, (q, k, scale))
    assert torch.equal(unread, right)
    assert wrong.isnan()
    assert all(gradient.isnan().all() for gradient in gradients)


def test_frozen_sides_and_autocast() -> None:
    q, k, scale = _pairs(700, 256, 0.2, torch.float32)
    k = k.detach()
    truth = _step(lambda *x: dense_clip(x[0], k.double(), x[1]), _wide([q, scale]))
    with torch.autocast("cuda", torch.bfloat16):
        loss, plain = ClipLoss()(q, k, scale), dense_clip(q, k, scale)
    ours, formula = ([value.detach(), *torch.autograd.grad(value, (q, scale))] for value in (loss, plain))
    assert ours[1].dtype == torch.float32
    for x, dense, y in zip(ours, formula, truth, strict=True):
        # a single number can be right by luck
        assert distance(x, y) <= max(distance(dense, y), 0.0 if x.ndim else 1e-4)


def test_a_sigmoid_of_any_upstream() -> None:
    leaves = [*_pairs(900, 256, 0.2), torch.tensor(-10.0, requires_grad=True)]
    truth = _step(lambda *x: 7.0 * dense_sigmoid(*x), _wide(leaves))
    found = _step(lambda *x: 7.0 * SigLipLoss(backend="triton")(*x), leaves)
    assert all(distance(x, y) <= 4e-3 for x, y in zip(found, truth, strict=True))


@pytest.mark.parametrize("where", ["device", "pageable", "pinned", "function"])
def test_encode_equals_the_plain_batch_wherever_inputs_wait(where: str) -> None:
    tower = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 32))
    x = torch.randn(70, 16)
    there = {"pageable": x.cpu(), "pinned": x.cpu().pin_memory()}.get(where, x)
    # a function says nothing of devices
    encoder = (lambda rows: tower(rows)) if where == "function" else tower
    weights = torch.randn(70, 32)

    def run(way: Any) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(3)
        torch.cuda.manual_seed(3)
        value = (way() * weights).sum()
        return [value.detach(), *torch.autograd.grad(value, list(tower.parameters()))], torch.cuda.get_rng_state()

    plain, state = run(lambda: torch.cat([tower(part) for part in x.split(16)]))
    found, state_after = run(lambda: encode(encoder, there, sub_batch=16))
    assert torch.equal(state, state_after)
    assert torch.equal(found[0], plain[0])
    assert all(distance(a, b) <= 1e-6 for a, b in zip(found, plain, strict=True))


class _Counting(nn.Module):
    """Its features grow with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(16, 32), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * (1 + 0.1 * self.calls)


def test_another_second_pass_is_said_at_the_next_call_and_nobody_waits_for_it() -> None:
    tower, x = _Counting(), torch.randn(70, 16)
    for _ in range(2):
        with _no_waiting():
            encode(tower, x, sub_batch=16).sum().backward()
        torch.cuda.synchronize()
        with pytest.warns(UserWarning, match="must give the same features in both passes; got _Counting"):
            encode(nn.Linear(16, 32), x, sub_batch=16)


class _Unit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


@pytest.mark.parametrize("retain", [0, 2, "auto"])
def test_features_and_their_gradients_wait_on_the_host(retain: Any) -> None:
    towers = [nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, 32), _Unit()) for width in (16, 24)]
    inputs = [torch.randn(300, width, device="cpu").pin_memory() for width in (16, 24)]
    scale = torch.tensor(10.0, requires_grad=True)
    wanted = [scale, *(p for tower in towers for p in tower.parameters())]

    def step(where: Any, device: Any) -> list[Tensor]:
        found = [
            encode(tower, x, sub_batch=64, retain=retain, features=where)
            for tower, x in zip(towers, inputs, strict=True)
        ]
        assert all(x.device.type == ("cpu" if where == "host" else "cuda") for x in found)
        assert all(x.is_pinned() for x in found) or where == "device"
        value = ClipLoss(device=device)(*found, scale)
        return [value.detach(), *(x.detach() for x in found), *torch.autograd.grad(value, wanted)]

    truth, found = step("device", None), step("host", "cuda")
    assert all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(found[1:3], truth[1:3], strict=True))
    assert all(distance(x.cpu(), y.cpu()) <= 1e-5 for x, y in zip(found, truth, strict=True))


@pytest.mark.parametrize("made", [lambda: Bilinear(16, 16), lambda: PairMLP(16, 16, hidden=8, dropout=0.3)])
def test_a_learned_distance_of_features_in_host_memory(made: Any) -> None:
    """The scorer's parameters are on the device. Its random numbers are those of resident features."""
    sides, scorer = [torch.randn(200, 16, device="cpu").pin_memory() for _ in range(2)], made()

    def step(where: str) -> list[Tensor]:
        torch.manual_seed(4)
        leaves = [x.to(where).detach().requires_grad_() for x in sides]
        loss = contrast(*leaves, scorer=scorer, scale=2.0, device="cuda")
        return [loss.detach(), *torch.autograd.grad(loss, [*leaves, *scorer.parameters()])]

    waiting, resident = step("cpu"), step("cuda")
    assert [x.device.type for x in waiting[:3]] == ["cuda", "cpu", "cpu"]
    assert all(distance(x.cuda(), y) <= 1e-4 for x, y in zip(waiting, resident, strict=True))
    with pytest.raises(ValueError, match=r"`scorer` must be on cuda:0, which computes its scores; got cpu\. Move it"):
        contrast(*sides, scorer=made().cpu(), device="cuda")
