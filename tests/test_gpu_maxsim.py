"""Late interaction's fused kernels on a GPU: errors beside the plain formula's, bits, memory, and large offsets.

Run by `make test-gpu`; elsewhere skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import distance
from torch import Tensor, nn

pytest.importorskip("triton")

from contrastile import Ragged, contrast, encode
from contrastile.exchange import host
from contrastile.losses import Sigmoid, Softmax
from contrastile.scorers import MaxSim
from contrastile.tiles.triton import maxsim
from contrastile.tiles.triton.maxsim import Documents, Entries
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
    loss = contrast(*pairs, scorer=MaxSim(), scale=scale, backend=backend, **how)
    return [loss.detach(), *torch.autograd.grad(loss, [*leaves, scale])]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("D", [64, 96, 256])
def test_no_further_from_float64_than_twice_the_plain_formula(
    D: int, dtype: torch.dtype, masked: bool, loss: str
) -> None:
    q, k = (x.to(dtype).float() for x in (_tokens(70, 20, D), _tokens(70, 75, D)))
    k[:, :20] = F.normalize(q + k[:, :20], dim=-1).to(dtype)
    masks: list[Any] = [torch.rand(x.shape[:2]) > 0.3 if masked else None for x in (q, k)]
    if masked:
        masks[0][3], masks[1][5] = False, False
    truth = _step([q, k], masks, "eager", torch.float64, **LOSSES[loss])
    plain = _step([q, k], masks, "dense", dtype, **LOSSES[loss])
    fused, again = (_step([q, k], masks, "triton", dtype, **LOSSES[loss]) for _ in range(2))
    for true, theirs, ours, same in zip(truth, plain, fused, again, strict=True):
        assert torch.equal(ours, same)
        # a number that is right to a few roundings may be exact in the plain formula by luck
        assert distance(ours, true) <= max(2 * distance(theirs, true), 4 * torch.finfo(ours.dtype).eps)


def test_no_more_than_the_workspace_beside_accumulators() -> None:
    q, k = (_tokens(n, length, 128).bfloat16().requires_grad_() for n, length in ((1024, 32), (1024, 128)))
    outputs = sum(x.numel() * (4 + 2) for x in (q, k))
    for workspace in (16 * MIB, 64 * MIB):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(contrast(q, k, scorer=MaxSim(), workspace=workspace), (q, k))
        assert torch.cuda.max_memory_allocated() - before <= outputs + workspace + 16 * MIB


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
    """Less than half of what resident vectors take."""
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
