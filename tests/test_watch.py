"""The watch over copies between GPUs: a step that does not end becomes an error, and one that ends does not."""

from __future__ import annotations

import gc
import os
import threading
import time
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

from contrastile.distributed import watch
from contrastile.distributed.failure import LostRankError

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
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
    monkeypatch.setattr(watch, "_threads", ())
    monkeypatch.setattr(watch, "_steps", watch.deque())
    monkeypatch.setattr(watch, "_to_free", [])
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(watch, "_has_ended", _Event.query)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "a stream")
    recorded.clear()
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(watch, "lost", lambda operation, group, error: LostRankError(f"{operation}, {group}: {error}"))
    return codes


def test_a_step_that_does_not_end_ends_the_process(
    ended: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = list[int]()
    monkeypatch.setattr(_Event, "done", False)
    watch.watch("a group", 0.02, lambda: prepared.append(threading.get_ident()))
    for thread in watch._threads:
        thread.join(PATIENCE)
    # by each thread where the first leaves the process alive, as here
    assert set(ended) == {1}
    assert set(capsys.readouterr().err.splitlines()) == {"copy between GPUs, a group: it did not end within 0.02 s"}
    # by the thread itself
    assert prepared == [watch._threads[0].ident]


def test_a_driver_that_does_not_answer_ends_the_process_too(ended: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(watch, "_has_ended", lambda _: answer.wait(PATIENCE))
    for group in ("a group", "another"):
        watch.watch(group, 0.02, lambda: None)
    watch._threads[1].join(PATIENCE)
    assert (ended, watch._threads[0].is_alive()) == ([1], True)
    answer.set()
    _stop(monkeypatch)


def test_steps_that_end_are_forgotten(ended: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _take_three_steps(monkeypatch)
    assert (len(watch._steps), len(recorded), ended) == (0, 3, [])
    _stop(monkeypatch)


def test_the_main_thread_frees_the_events(ended: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In another thread their destructor aborts a process that ends meanwhile."""
    # another test's may still wait to be freed
    freed, others = list[int](), [id(x) for x in gc.get_objects() if type(x) is _Event]

    def free(event: _Event) -> None:
        if id(event) not in others:
            freed.append(threading.get_ident())

    monkeypatch.setattr(_Event, "__del__", free, raising=False)
    _take_three_steps(monkeypatch)
    assert not freed
    watch.watch("a group", PATIENCE, lambda: None)
    assert (freed, ended) == ([threading.get_ident()] * 3, [])
    _stop(monkeypatch)


def test_a_step_of_a_group_that_is_gone_ends_the_process_too(
    ended: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The main thread waits for the copy in `destroy_process_group`."""
    monkeypatch.setattr(_Event, "done", False)
    monkeypatch.setattr(watch, "weakly", ref)
    watch.watch(_Event(), 0.02, lambda: None)
    for thread in watch._threads:
        thread.join(PATIENCE)
    assert set(ended) == {1}
    assert set(capsys.readouterr().err.splitlines()) == {
        "`copy between GPUs` must be carried out by all ranks; got no answer in a group that has been destroyed (it "
        "did not end within 0.02 s). See which rank ended first, and start all ranks again."
    }


def test_a_slow_answer_about_a_step_that_ended_long_ago_ends_nothing(
    ended: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step of a training is forgotten, with its group, before an evaluation keeps the driver busy."""
    busy = threading.Event()
    monkeypatch.setattr(watch, "_has_ended", lambda _: bool(busy.is_set() and time.sleep(0.1)) or True)
    watch.watch("a group", 1.0, lambda: None)
    time.sleep(0.5)
    busy.set()
    time.sleep(1.0)
    assert (len(watch._steps), ended) == (0, [])
    _stop(monkeypatch)


def test_nothing_is_watched_behind_an_error_of_the_device(ended: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would forget the steps, and the groups that they have."""

    def refuse() -> None:
        raise RuntimeError

    watch.watch("a group", PATIENCE, refuse)
    watch._threads[0].join(PATIENCE)
    watch.watch("another group", PATIENCE, lambda: None)
    assert (len(watch._steps), ended) == (1, [])
    _stop(monkeypatch)


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


@pytest.mark.parametrize(("answer", "ended"), [(0, True), (watch.NOT_READY, False)])
def test_the_driver_is_asked_without_pythons_lock(monkeypatch: pytest.MonkeyPatch, answer: int, ended: bool) -> None:
    """Where its answer waits for a stuck copy, the other thread must run to end the process."""
    monkeypatch.setattr(watch, "CDLL", lambda _: SimpleNamespace(cuEventQuery=lambda _: answer))
    assert watch._has_ended(SimpleNamespace(cuda_event=1)) is ended
    # an event whose first record waits
    assert watch._has_ended(SimpleNamespace(cuda_event=0)) is False
    monkeypatch.setattr(watch, "CDLL", lambda _: SimpleNamespace(cuEventQuery=lambda _: 719))
    with pytest.raises(RuntimeError, match=r"^cuEventQuery of CUDA's driver failed with error 719$"):
        watch._has_ended(SimpleNamespace(cuda_event=1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_driver_answers_about_an_event_of_torch() -> None:
    event = torch.cuda.Event()
    assert not watch._has_ended(event)
    torch.cuda._sleep(10**9)
    event.record()
    assert not watch._has_ended(event)
    torch.cuda.synchronize()
    assert watch._has_ended(event)


def _take_three_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch three steps with an event each, until the thread has seen their ends."""
    monkeypatch.setattr(watch, "APART", -1.0)
    for _ in range(3):
        watch.watch("a group", PATIENCE, lambda: None)
    began = time.monotonic()
    while watch._steps and time.monotonic() - began < PATIENCE:
        time.sleep(0.001)


def _stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """End the threads, as an error of the device does."""

    def refuse(_: _Event) -> bool:
        raise RuntimeError

    monkeypatch.setattr(watch, "_has_ended", refuse)
    began = time.monotonic()
    while any(thread.is_alive() for thread in watch._threads) and time.monotonic() - began < PATIENCE:
        watch.watch("a group", PATIENCE, lambda: None)
        time.sleep(0.001)
    assert not any(thread.is_alive() for thread in watch._threads)
