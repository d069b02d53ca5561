"""Late interaction's fused kernels on a GPU: errors beside the plain formula's, bits, memory, and large offsets.

Run by `make test-gpu`; elsewhere skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import distance
from torch import Tensor, nn

pytest.importorskip("triton")

from contrastile import Ragged, contrast, encode
from contrastile.engine import graph
from contrastile.exchange import host
from contrastile.losses import Decoupled, Sigmoid, Softmax
from contrastile.scorers import MaxSim
from contrastile.tiles.triton.maxsim import block as maxsim
from contrastile.tiles.triton.maxsim.block import Documents, Entries
from contrastile.tiles.triton.plan import interpreting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.unpoisoned,
    pytest.mark.skipif(interpreting() or not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 2**20
LOSSES: dict[str, dict[str, Any]] = {
    "symmetric": {},
    "one way": {"loss": Softmax(label_smoothing=0.1)},
    "sigmoid": {"loss": Sigmoid(), "bias": -3.0},
    "decoupled with ids": {"loss": Decoupled(symmetric=True), "query_ids": 2, "key_ids": 2},
    "labels": {"query_labels": 3, "key_labels": 3},
}


@pytest.fixture(autouse=True)
def _on_the_device() -> Iterator[None]:
    with torch.device("cuda"):
        yield


def _tokens(*shape: int) -> Tensor:
    return F.normalize(torch.randn(*shape), dim=-1)


def _step(sides: list[Tensor], masks: list[Any], backend: str, dtype: torch.dtype, **how: Any) -> list[Tensor]:
    leaves = [x.to(dtype).requires_grad_() for x in sides]
    scale = torch.tensor(20.0, dtype=torch.float64 if dtype == torch.float64 else torch.float32, requires_grad=True)
    pairs = zip(leaves, masks, strict=True)
    # groups of so many examples
    groups = torch.arange(len(sides[0]), device=sides[0].device)
    how |= {name: groups // how[name] for name in how if name.endswith(("ids", "labels"))}
    loss = contrast(*pairs, scorer=MaxSim(), scale=scale, backend=backend, **how)
    return [loss.detach(), *torch.autograd.grad(loss, [*leaves, scale])]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("D", [64, 96, 256])
def test_no_further_from_float64_than_twice_the_plain_formula(
    D: int, dtype: torch.dtype, masked: bool, loss: str
) -> None:
    # the rounding errors of float32 logits differ by a factor of five between draws: their mean is compared
    errors = [_errors(D, dtype, LOSSES[loss], masked=masked) for _ in range(4 if dtype == torch.float32 else 1)]
    for theirs, ours, eps in zip(*(torch.tensor(each).mean(0) for each in zip(*errors, strict=True)), strict=True):
        # a number that is right to a few roundings may be exact in the plain formula by luck
        assert ours <= max(2 * theirs, 4 * eps)


def _errors(D: int, dtype: torch.dtype, how: dict[str, Any], *, masked: bool) -> tuple[list[float], ...]:
    """Distances from float64 of the plain formula, and of the kernels; and a rounding of each result's type."""
    q, k = (x.to(dtype).float() for x in (_tokens(70, 20, D), _tokens(70, 75, D)))
    k[:, :20] = F.normalize(q + k[:, :20], dim=-1).to(dtype)
    masks: list[Any] = [torch.rand(x.shape[:2]) > 0.3 if masked else None for x in (q, k)]
    if masked:
        masks[0][3], masks[1][5] = False, False
    truth = _step([q, k], masks, "eager", torch.float64, **how)
    plain = _step([q, k], masks, "dense", dtype, **how)
    fused, again = (_step([q, k], masks, "triton", dtype, **how) for _ in range(2))
    assert all(torch.equal(ours, same) for ours, same in zip(fused, again, strict=True))
    of_plain, of_fused = ([distance(x, true) for x, true in zip(side, truth, strict=True)] for side in (plain, fused))
    return of_plain, of_fused, [float(torch.finfo(x.dtype).eps) for x in fused]


@pytest.mark.parametrize("D", [16, 128, 256])
@pytest.mark.parametrize("M", [5, 64, 75, 180, 300])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_maxima_of_negative_products_and_the_first_of_equal_ones(D: int, M: int, masked: bool) -> None:
    """Whole numbers, whose products are exact; many are equal, and documents have negative ones alone."""
    q, k = (torch.randint(-2, 3, (n, length, D)).bfloat16() for n, length in ((37, 32), (41, M)))
    q[::2], k[::3] = q[::2].abs(), -k[::3].abs() - (torch.rand(14, M, D) < 0.1).bfloat16()
    masks: list[Any] = [torch.rand(x.shape[:2]) > 0.3 if masked else None for x in (q, k)]
    entries, documents = Entries.of(q, masks[0]), Documents.of(k, masks[1])
    scores, winners = maxsim.scored(entries, documents, best=True)
    assert winners is not None
    similar = torch.einsum("ild,jmd->jilm", q.double(), k.double())
    if masked:
        similar = similar.masked_fill(~masks[1][:, None, None], -torch.inf)
    best = similar.max(-1).values
    counted = masks[0] if masked else torch.ones(q.shape[:2], dtype=torch.bool)
    assert torch.equal(scores.double(), (best * counted).sum(-1).T)
    # positions among the tokens that count, as the kernels number them
    first = torch.from_numpy((similar == best[..., None]).cpu().numpy().argmax(-1)).cuda()
    if masked:
        first = (masks[1].cumsum(1) - 1).gather(1, first.flatten(1)).view_as(first)
    rows = entries.positions()
    won = winners[:, rows >= 0].long()
    assert torch.equal(won, first.flatten(1)[:, rows[rows >= 0]])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_small_call_replayed_has_the_bits_of_a_plain_one(
    dtype: torch.dtype, masked: bool, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph._graphs.clear()
    streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
    for call in range(6):
        # masked texts of several lengths share a graph
        sides = [_tokens(40, length + masked * call, 64) for length in (18, 75)]
        masks: list[Any] = [torch.rand(x.shape[:2]) > 0.1 + 0.1 * call if masked else None for x in sides]
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[call % 2]):
            replayed = _step(sides, masks, "triton", dtype, **LOSSES[loss])
        torch.cuda.synchronize()
        with monkeypatch.context() as patch:
            # a plain call, as where a user captures a graph
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            plain = _step(sides, masks, "triton", dtype, **LOSSES[loss])
        apart = [float((x.double() - y.double()).abs().max()) for x, y in zip(replayed, plain, strict=True)]
        assert apart == [0.0] * len(apart), call
    assert len(graph._graphs) == 1


def test_a_loss_without_gradients_is_replayed() -> None:
    graph._graphs.clear()
    q, other, k = (_tokens(40, n, 64).bfloat16() for n in (20, 20, 75))
    with torch.no_grad():
        values = [contrast(q, k, scorer=MaxSim(), scale=20.0) for _ in range(5)]
        later = contrast(other, k, scorer=MaxSim(), scale=20.0)
        truth = contrast(other.double(), k.double(), scorer=MaxSim(), scale=20.0, backend="eager")
    assert len(graph._graphs) == 1
    assert all(torch.equal(x, values[0]) for x in values)
    assert distance(later, truth) <= 1e-3


def test_calls_that_are_replayed_know_nothing_of_each_other() -> None:
    graph._graphs.clear()
    batches = [[x.bfloat16().requires_grad_() for x in (_tokens(32, 8, 64), _tokens(32, 20, 64))] for _ in range(5)]

    def loss(pair: list[Tensor]) -> Tensor:
        return contrast(*pair, scorer=MaxSim(), scale=20.0)

    apart = [x for pair in batches for x in torch.autograd.grad(loss(pair), pair)]
    values = [loss(pair) for pair in batches]
    together = torch.autograd.grad(3.0 * sum(values), [x for pair in batches for x in pair])
    for x, truth in zip(together, apart, strict=True):
        assert distance(x, 3.0 * truth.double()) <= 4e-3
    assert len(graph._graphs) == 1


def test_no_more_than_the_workspace_beside_accumulators() -> None:
    q, k = (_tokens(n, length, 128).bfloat16().requires_grad_() for n, length in ((1024, 32), (1024, 128)))
    outputs = q.numel() * (4 + 2) + k.numel() * 2
    for workspace in (16 * MIB, 64 * MIB):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(contrast(q, k, scorer=MaxSim(), workspace=workspace), (q, k))
        # documents have float32 sums for a tile at a time; 80 bytes of the workspace are for a pair
        sums = int((workspace / 80) ** 0.5) * k[0].numel() * (4 + 2)
        assert torch.cuda.max_memory_allocated() - before <= outputs + sums + workspace + 16 * MIB


def test_offsets_of_more_than_31_bits() -> None:
    """Winning tokens of 2,100 documents and a million entries."""
    q, k = _tokens(32_800, 32, 16).bfloat16(), _tokens(2_100, 4, 16).bfloat16()
    entries, documents = Entries.of(q, None), Documents.of(k, None)
    scores, winners = maxsim.scored(entries, documents, best=True)
    assert winners is not None
    assert winners.numel() > 2**31
    similar = torch.einsum("ild,jmd->iljm", q[-9:].double(), k[-7:].double())
    assert distance(scores[-9:, -7:], similar.max(-1).values.sum(1)) <= 1e-5
    g = torch.zeros(len(q), len(k))
    g[-9:, -7:] = torch.randn(9, 7)
    u, v = (torch.zeros(len(x), x[0].numel()) for x in (q, k))
    maxsim.add_query_gradients(u, g, entries, documents, winners)
    maxsim.add_document_gradients(v, g, entries, documents, winners, 2**31)
    won = F.one_hot(similar.argmax(-1), 4) * g[-9:, None, -7:, None].double()
    assert distance(u[-9:].view(9, 32, 16), torch.einsum("iljm,jmd->ild", won, k[-7:].double())) <= 1e-5
    assert distance(v[-7:].view(7, 4, 16), torch.einsum("iljm,ild->jmd", won, q[-9:].double())) <= 1e-2


def test_documents_on_two_streams_have_the_bits_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four parts of the documents, beside the queries; also captured as a graph."""
    q, k = _tokens(1_100, 8, 32).bfloat16(), _tokens(1_000, 20, 32).bfloat16()
    entries, documents = Entries.of(q, None), Documents.of(k, None)
    _, winners = maxsim.scored(entries, documents, best=True)
    assert winners is not None
    g, workspace = torch.randn(len(q), len(k)), 2 * 4 * entries.count * 250

    def sums() -> list[Tensor]:
        u, v = (torch.zeros(len(x), x[0].numel()) for x in (q, k))
        queries = partial(maxsim.add_query_gradients, u, g, entries, documents, winners)
        maxsim.add_document_gradients(v, g, entries, documents, winners, workspace, meanwhile=queries)
        return [u, v]

    several, graph = sums(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sums()
    graph.replay()
    monkeypatch.setattr(maxsim, "_streams", lambda *_: (None,))
    for one, *others in zip(sums(), several, captured, strict=True):
        assert one.any()
        assert all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_token_vectors_may_wait_in_host_memory(
    dtype: torch.dtype, masked: bool, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned vectors and masks in several strips and shards, no further from float64 than resident ones."""
    sides = [_tokens(200, 20, 64).to(dtype).float(), _tokens(200, 75, 64).to(dtype).float()]
    masks: list[Any] = [torch.rand(x.shape[:2]) > 0.3 if masked else None for x in sides]
    truth = _step(sides, masks, "eager", torch.float64, **LOSSES[loss])
    resident = _step(sides, masks, "auto", dtype, **LOSSES[loss])
    masks = [None if mask is None else mask.cpu().pin_memory() for mask in masks]
    for cuts in ((96, 33), (200, 200)):
        monkeypatch.setattr(host, "cut", lambda *_, cuts=cuts: host.Cut(*cuts))
        waiting = [x.to(dtype).cpu().pin_memory() for x in sides]
        found = _step(waiting, masks, "auto", dtype, device="cuda", **LOSSES[loss])
        for true, theirs, ours in zip(truth, resident, found, strict=True):
            allowed = max(1.5 * distance(theirs, true), 4 * torch.finfo(ours.dtype).eps)
            assert distance(ours.cuda(), true) <= allowed
        assert found[1].device.type == found[2].device.type == "cpu"


def test_host_memory_leaves_the_device_to_a_strip_and_two_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is less than half of that of resident vectors."""
    sides = [torch.randn(2048, n, 128, dtype=torch.bfloat16, device="cpu").pin_memory() for n in (32, 180)]
    peaks = []
    for where in ("cpu", "cuda"):
        leaves = [x.to(where).requires_grad_() for x in sides]
        monkeypatch.setattr(host, "free_memory", lambda _: (300 * MIB, 300 * MIB))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() - sum(x.nbytes for x in leaves if x.is_cuda)
        torch.autograd.grad(contrast(*leaves, scorer=MaxSim(), device="cuda", workspace=64 * MIB), leaves)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] <= peaks[1] / 2


@pytest.mark.parametrize("packed", [False, True])
def test_token_vectors_of_encode_wait_in_host_memory(packed: bool) -> None:
    """Pinned vectors with their mask, or packed ones, and their gradients."""
    project, scale = nn.Linear(24, 16), torch.tensor(10.0, requires_grad=True)
    sides = [torch.randn(40, length, 24, device="cpu").pin_memory() for length in (6, 11)]
    masks = [(torch.rand(x.shape[:2], device="cpu") > 0.3).pin_memory() for x in sides]

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = project

        def forward(self, x: Tensor, mask: Tensor) -> Any:
            vectors = F.normalize(self.project(x), dim=-1)
            return Ragged.of(vectors, mask) if packed else (vectors, mask)

    def step(features: Any) -> list[Tensor]:
        q, k = (encode(Tower(), pair, sub_batch=16, features=features) for pair in zip(sides, masks, strict=True))
        assert (q.values if packed else q[0]).is_cuda == (features == "device")
        loss = contrast(q, k, scorer=MaxSim(), scale=scale, device="cuda")
        return [loss.detach(), *torch.autograd.grad(loss, [scale, *project.parameters()])]

    assert all(distance(one, other) <= 1e-5 for one, other in zip(step("host"), step("device"), strict=True))
