"""Accumulators that pass from rank to rank: when they are waited for, when they leave, and what they hold then.

And the multiprocessors that kernels leave to what travels.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from contrastile.distributed import collectives
from contrastile.losses.base import Shard
from contrastile.losses.softmax import Softmax
from contrastile.tiles.base import InFlight
from contrastile.tiles.triton import launch
from contrastile.tiles.triton.backend import Triton
from contrastile.tiles.triton.plan import PROGRAMS_INTERPRETED

N, M, D = 45, 70, 19
# bytes that hold a part of the block only
LITTLE = 6000


def _sides(dtype: torch.dtype, diagonal: int | None) -> tuple[Triton, Shard, Shard]:
    """A block whose diagonal of positives begins at that column; None: it lies in another block."""
    q, k = (F.normalize(torch.randn(n, D), dim=-1).to(dtype) for n in (N, M))
    tiles = Triton(Softmax(symmetric=True), torch.tensor(10.0), None, LITTLE)
    rows, cols = Shard(q, start=0, diagonal=1000 if diagonal is None else diagonal), Shard(k, start=0)
    sides = []
    for side, stats in zip((rows, cols), tiles.forward(rows, cols), strict=True):
        assert stats is not None
        # as if each row had met its positive elsewhere
        stats = stats.clone()
        stats[4:] = torch.tensor([1.0, 1.0, 0.0, 1.0])[:, None]
        found = tiles.loss.finish(stats)
        sides.append(replace(side, state=found.state, coefficient=found.counts / len(side)))
    return tiles, *sides


def _swept(dtype: torch.dtype, diagonal: int | None, early: bool) -> tuple[Tensor, Tensor, bool]:
    """A turn's accumulator when it leaves, that of one that stays, and True if the rows were done by then."""
    tiles, rows, cols = _sides(dtype, diagonal)
    u, v, gathered, left = torch.zeros(N, D), torch.ones(M, D), torch.ones(M, D), []
    turn = InFlight(
        gathered, lambda: None, lambda: left.extend([gathered.clone(), u.clone()]), first=False, early=early
    )
    total = tiles.backward(rows, cols, u, turn)
    turn.release()
    again = torch.zeros_like(u)
    assert torch.equal(total, tiles.backward(rows, cols, again, v))
    assert torch.equal(u, again)
    gone, rows_then = left
    return gone, v, torch.equal(rows_then, u)


# each with each of the others once
@pytest.mark.parametrize(
    ("dtype", "diagonal", "early"),
    [(torch.float32, None, True), (torch.float32, 3, False), (torch.float16, None, False), (torch.float16, 3, True)],
    ids=str,
)
def test_it_leaves_with_all_that_was_added(dtype: torch.dtype, diagonal: int | None, early: bool) -> None:
    gone, stayed, rows_done = _swept(dtype, diagonal, early)
    assert torch.equal(gone, stayed)
    # early, it hides behind the last product; pairs that are listed come after that
    assert rows_done == (not early or diagonal is not None)
    assert not torch.equal(stayed, torch.ones(M, D))


def test_a_turn_waits_once_and_leaves_once() -> None:
    log: list[str] = []
    turn = InFlight(torch.zeros(1), lambda: log.append("waits"), lambda: log.append("leaves"), first=False, early=False)
    assert turn.value() is turn.value()
    assert log == ["waits"]
    turn.release()
    turn.release()
    assert log == ["waits", "leaves"]
    # a message that nobody asked for is waited for before it goes on; a first one need not come
    log.clear()
    turn = InFlight(torch.zeros(1), lambda: log.append("waits"), lambda: log.append("leaves"), first=True, early=False)
    turn.value()
    assert not log
    turn.release()
    assert log == ["waits", "leaves"]


@pytest.mark.parametrize(
    ("environment", "limit", "held"), [({}, -(2**31), 0), ({}, 8, 8), ({"NCCL_MAX_CTAS": "4"}, 8, 4)]
)
def test_transfers_hold_as_many_multiprocessors_as_they_may(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], limit: int, held: int
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    backend = SimpleNamespace(options=SimpleNamespace(config=SimpleNamespace(max_ctas=limit)))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    assert collectives.reserved_multiprocessors(SimpleNamespace(_get_backend=lambda device: backend)) == held
    # as debugging has it
    wrapper = SimpleNamespace(wrapped_pg=backend)
    assert collectives.reserved_multiprocessors(SimpleNamespace(_get_backend=lambda device: wrapper)) == held
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:gloo")
    assert collectives.reserved_multiprocessors(SimpleNamespace()) == 0


def test_multiprocessors_are_left_to_what_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, to rounding, by fewer programs: what each adds up for itself is another sum."""
    grids: list[int] = []
    real = launch.run

    def run(kernel: Any, grid: tuple[int, ...], **given: Any) -> None:
        if "BM" in given:
            grids.append(grid[0])
        real(kernel, grid, **given)

    monkeypatch.setattr(launch, "run", run)
    tiles, rows, cols = _sides(torch.bfloat16, None)
    found = []
    for spared in (0, 1, 200):
        u, v = torch.zeros(N, D), torch.zeros(M, D)
        wide = replace(tiles, workspace=2**30)
        wide.reserve(spared)
        total = wide.backward(rows, cols, u, v)
        found.append((max(grids), u, v, total))
        grids.clear()
    assert [most for most, *_ in found] == [PROGRAMS_INTERPRETED, PROGRAMS_INTERPRETED - 1, 1]
    for _, u, v, total in found[1:]:
        assert torch.equal(u, found[0][1])
        assert torch.equal(v, found[0][2])
        assert torch.allclose(total, found[0][3], rtol=1e-5)
