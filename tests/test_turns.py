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
from contrastile.tiles.triton import backend, launch
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


def _watched(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    def watch(name: str) -> None:
        real = getattr(backend, f"_{name}")

        def watched(*given: Any) -> None:
            log.append(name)
            real(*given)

        monkeypatch.setattr(backend, f"_{name}", watched)

    watch("add_rows")
    watch("add_cols")


def _swept(dtype: torch.dtype, diagonal: int | None, log: list[str], **how: bool) -> tuple[Tensor, Tensor]:
    """What a turn's accumulator holds when it leaves, and what one that stays would."""
    tiles, rows, cols = _sides(dtype, diagonal)
    u, v, gathered, left = torch.zeros(N, D), torch.ones(M, D), torch.ones(M, D), []

    def go_on() -> None:
        log.append("leaves")
        left.append(gathered.clone())

    turn = InFlight(gathered, lambda: log.append("waits"), go_on, **how)
    total = tiles.backward(rows, cols, u, turn)
    turn.release()
    seen, again = list(log), torch.zeros_like(u)
    assert torch.equal(total, tiles.backward(rows, cols, again, v))
    log[:] = seen
    assert torch.equal(u, again)
    (gone,) = left
    return gone, v


# each with each of the others once
@pytest.mark.parametrize(
    ("dtype", "diagonal", "early"),
    [(torch.float32, None, True), (torch.float32, 3, False), (torch.float16, None, False), (torch.float16, 3, True)],
    ids=str,
)
def test_it_leaves_with_all_that_was_added(dtype: torch.dtype, diagonal: int | None, early: bool) -> None:
    gone, stayed = _swept(dtype, diagonal, [], first=False, early=early)
    assert torch.equal(gone, stayed)
    assert not torch.equal(stayed, torch.ones(M, D))


def test_what_may_leave_early_has_the_last_product_to_hide_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    _watched(monkeypatch, log)
    _swept(torch.bfloat16, None, log, first=False, early=True)
    assert log[:3] == ["waits", "add_cols", "add_rows"]
    assert log[-3:] == ["add_cols", "leaves", "add_rows"]
    assert len(log) > 5


def test_what_may_not_is_waited_for_as_late_as_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    _watched(monkeypatch, log)
    _swept(torch.bfloat16, None, log, first=False, early=False)
    assert log[:3] == ["add_rows", "waits", "add_cols"]
    # by itself, before what is small comes to an end
    assert log[-3:] == ["add_rows", "add_cols", "leaves"]
    assert log.count("leaves") == 1


def test_pairs_that_are_listed_are_in_it_before_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    _watched(monkeypatch, log)
    _swept(torch.bfloat16, 3, log, first=False, early=True)
    assert log[-3:] == ["add_cols", "add_rows", "leaves"]


def test_a_turn_waits_once_and_leaves_once() -> None:
    log: list[str] = []
    turn = InFlight(torch.zeros(1), lambda: log.append("waits"), lambda: log.append("leaves"), first=False, early=False)
    assert turn.value() is turn.value()
    assert log == ["waits"]
    turn.release()
    turn.release()
    assert log == ["waits", "leaves"]
    # what nobody asked for is waited for before it goes on; and a first one need not come
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
