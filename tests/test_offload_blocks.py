"""Block streams: on simulated streams, which record the order of their work, no copy races with a computation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from contrastile.offload import BlockStream

ROWS = 23


class Stream:
    """A simulated CUDA stream; `seen` counts the operations of every stream that end before its next one begins."""

    def __init__(self, device: Any = None) -> None:
        self.seen: dict[Stream, int] = {self: 0}

    def record_event(self) -> dict[Stream, int]:
        return dict(self.seen)

    def wait_event(self, event: dict[Stream, int]) -> None:
        for stream, count in event.items():
            self.seen[stream] = max(self.seen.get(stream, 0), count)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.seen)

    def synchronize(self) -> None:
        MACHINE.host.wait_stream(self)


class Machine:
    """Simulated device: its streams, the current one, and the accesses to each piece of memory."""

    def __init__(self) -> None:
        self.host, self.current = Stream(), Stream()
        self.touched: dict[Any, list[tuple[Stream, int, bool]]] = {}
        self.races: list[Any] = []

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def touch(self, what: Any, *, write: bool) -> None:
        stream = self.current
        stream.seen[stream] += 1
        for other, count, wrote in self.touched.setdefault(what, []):
            if (write or wrote) and stream.seen.get(other, 0) < count:
                self.races.append(what)
        self.touched[what].append((stream, stream.seen[stream], write))


MACHINE = Machine()


class Watched(BlockStream):
    """Block stream with simulated streams, and slots in host memory."""

    def _memory(self, rows: int) -> tuple[list[Tensor], Tensor]:
        block = [torch.empty(rows, *x.shape[1:], dtype=x.dtype) for x in self.tensors]
        return block, torch.empty(rows, self.width, dtype=self.wide)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    MACHINE.__init__()
    copy, zero = Tensor.copy_, Tensor.zero_

    def copied(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        MACHINE.touch(source.data_ptr(), write=False)
        MACHINE.touch(self.data_ptr(), write=True)
        return copy(self, source, non_blocking)

    def zeroed(self: Tensor) -> Tensor:
        MACHINE.touch(self.data_ptr(), write=True)
        return zero(self)

    monkeypatch.setattr(Tensor, "copy_", copied)
    monkeypatch.setattr(Tensor, "zero_", zeroed)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", MACHINE.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: MACHINE.current)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
    return MACHINE


def _add_in_turns(machine: Machine, rows: int, turns: int) -> tuple[Tensor, Tensor]:
    """Add the unmasked rows to their totals in every sweep, doubled in the last; return those and the expected ones."""
    matrix, mask = torch.randn(ROWS, 3, dtype=torch.float64), torch.rand(ROWS) > 0.3
    totals, ends = torch.full_like(matrix, torch.nan), torch.full_like(matrix, torch.nan)
    blocks = Watched((matrix, mask), rows, torch.device("cuda", 0), width=3, wide=torch.float64, totals=totals)
    for turn in range(turns):
        for index, (start, stop), (block, counted), so_far in blocks.sweep(fresh=turn == 0):
            for x in (block, counted):
                machine.touch(x.data_ptr(), write=False)
            machine.touch(so_far.data_ptr(), write=True)
            so_far += block * counted[:, None]
            if turn < turns - 1:
                blocks.write_back(so_far, totals[start:stop], index)
            else:
                blocks.write_back(so_far.mul_(2), ends[start:stop], index)
    blocks.finish()
    machine.current = machine.host
    for start in range(0, ROWS, rows):
        machine.touch(ends[start:].data_ptr(), write=False)
    return ends, 2 * turns * matrix * mask[:, None]


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("rows", [ROWS, 12, 8, 5])
def test_nothing_races_and_every_total_is_written_back(machine: Machine, rows: int, turns: int) -> None:
    ends, truth = _add_in_turns(machine, rows, turns)
    torch.testing.assert_close(ends, truth)
    assert not machine.races


@pytest.mark.parametrize("forgotten", ["wait_event", "wait_stream", "synchronize", "_stored"])
def test_a_wait_that_is_left_out_is_a_race(machine: Machine, forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if forgotten == "_stored":
        monkeypatch.setattr(BlockStream, "_stored", lambda self, index: [])
    else:
        monkeypatch.setattr(Stream, forgotten, lambda self, *_: None)
    _add_in_turns(machine, 5, 3)
    assert machine.races


@pytest.mark.parametrize("turns", [0, 1])
def test_an_error_in_a_sweep_leaves_no_copy_under_way(machine: Machine, turns: int) -> None:
    """The next allocation may get the memory that the following block is copied to."""
    matrix = torch.randn(ROWS, 3, dtype=torch.float64)
    how: dict[str, Any] = {"width": 3, "wide": torch.float64, "totals": torch.zeros_like(matrix)}
    blocks = Watched((matrix,), 5, torch.device("cuda", 0), **how)
    places = [x.data_ptr() for block, totals in blocks.slots for x in (*block, totals)]
    for _ in range(turns):
        list(blocks.sweep(fresh=True))
    for _ in blocks.sweep(fresh=True):
        # as when the computation has too little memory
        break
    for place in places:
        machine.touch(place, write=True)
    assert not machine.races
