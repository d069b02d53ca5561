"""The watch over copies between GPUs: a step that does not end becomes an error, and one that ends does not."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch

from contrastile.distributed import watch
from contrastile.distributed.failure import LostRankError

# seconds that the thread may take on a busy machine
PATIENCE = 60


# streams on which an event was recorded
recorded = list[str]()


class _EndedError(Exception):
    """In place of the end of the process."""


class _Event:
    """The end of a step."""

    done = True

    def record(self, stream: str) -> None:
        recorded.append(stream)

    def query(self) -> bool:
        return self.done


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The exit codes with which the process would have ended."""
    codes = list[Any]()

    def end(code: int) -> None:
        codes.append(code)
        raise _EndedError

    monkeypatch.setattr(watch, "LOOK", 0.005)
    monkeypatch.setattr(watch, "_thread", None)
    monkeypatch.setattr(watch, "_steps", watch.deque())
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "a stream")
    recorded.clear()
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(watch, "lost", lambda operation, group, error: LostRankError(f"{operation}, {group}: {error}"))
    return codes


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_step_that_does_not_end_ends_the_process(
    ended: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = list[int]()
    monkeypatch.setattr(_Event, "done", False)
    watch.watch("a group", 0.02, lambda: prepared.append(threading.get_ident()))
    assert watch._thread is not None
    watch._thread.join(PATIENCE)
    assert ended == [1]
    assert capsys.readouterr().err == "copy between GPUs, a group: it did not end within 0.02 s\n"
    # by the thread itself
    assert prepared == [watch._thread.ident]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_steps_that_end_are_forgotten(ended: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "APART", -1.0)
    for _ in range(3):
        watch.watch("a group", PATIENCE, lambda: None)
    began = time.monotonic()
    while len(watch._steps) > 1 and time.monotonic() - began < PATIENCE:
        time.sleep(0.001)
    assert (len(watch._steps), len(recorded), ended) == (1, 3, [])
    _stop(monkeypatch)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_steps_of_one_stream_in_quick_succession_have_one_event(
    ended: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "APART", PATIENCE)
    monkeypatch.setattr(_Event, "done", False)
    streams = ["a stream", "a stream", "another", "another", "a stream"]
    for stream in streams:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda stream=stream: stream)
        watch.watch("a group", PATIENCE, lambda: None)
    assert recorded == streams
    assert [step.stream for step in watch._steps] == ["a stream", "another", "a stream"]
    watch.watch("another group", PATIENCE, lambda: None)
    assert (len(watch._steps), ended) == (4, [])
    _stop(monkeypatch)


def _stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """End the thread, as an error of the device does."""

    def refuse(_: _Event) -> bool:
        raise RuntimeError

    monkeypatch.setattr(_Event, "query", refuse)
    watch.watch("a group", PATIENCE, lambda: None)
    assert watch._thread is not None
    watch._thread.join(PATIENCE)
    assert not watch._thread.is_alive()
