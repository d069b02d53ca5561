"""A watch over copies between GPUs, which have no time-out of their own, as NCCL's watchdog is over its operations.

Between `failure.py` and `neighbours.py`. A GPU that copies from another waits for it in the order of
a stream, for ever if that rank is lost in the middle of a step. The host may wait for the GPU by then, and learns of no
failure. So a thread looks at the ends of all steps, and ends this process with the sentence of a lost rank.

Another thread asks the driver, whose answer may wait for the GPU too: on an H200 the end of an old event waited for an
allocation of pinned memory by the main thread, which waited for the copy.

Neither thread frees an event of torch, which lets go of Python's lock in a destructor: where Python ends meanwhile, C++
aborts the process.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from ctypes import CDLL
from typing import Any, NamedTuple
from weakref import ref

import torch

from contrastile._errors import invalid
from contrastile.distributed.failure import lost, weakly

# seconds between two looks, and between two events of a stream
LOOK, APART = 1.0, 0.05
# the driver's answer about an event that has not ended
NOT_READY = 600


class _Step(NamedTuple):
    end: Any
    stream: Any
    # what `weakly` gives: a group that its owner destroys ends then
    group: Any
    began: float
    timeout: float


_steps: deque[_Step] = deque()
# steps that have ended, which the main thread frees
_to_free: list[_Step] = []
_lock = threading.Lock()
_threads: tuple[threading.Thread, ...] = ()
# an object for the time in which the driver is asked, another one each time
_question: object = None


def watch(group: Any, timeout: float, prepare: Callable[[], None]) -> None:
    """End the process if the work of the current stream lasts longer than `timeout` seconds.

    prepare: called by the thread before it looks at events for the first time.
    """
    global _threads
    if _threads and not _threads[0].is_alive():
        # an error of the device, which the main thread meets too
        return
    stream, now, group = torch.cuda.current_stream(), time.monotonic(), weakly(group)
    last = _steps[-1] if _steps else None
    if last is None or last.stream != stream or last.group is not group or now - last.began > APART:
        _to_free.clear()
        last = _Step(torch.cuda.Event(), stream, group, now, timeout)
        _steps.append(last)
    # the event moves behind this work too, if it was behind the work just before
    last.end.record(stream)
    if not _threads:
        with _lock:
            if not _threads:
                asking = threading.Thread(target=_ask, args=(prepare,), daemon=True)
                looking = threading.Thread(target=_look, args=(asking,), daemon=True)
                asking.start()
                looking.start()
                _threads = asking, looking


def _ask(prepare: Callable[[], None]) -> None:
    """Forget steps that have ended, and end the process where one has not in time."""
    global _question
    # an error of the device is one of the main thread
    with suppress(RuntimeError):
        prepare()
        while True:
            time.sleep(LOOK)
            _question = object()
            # the event of a younger step may still move; of a late one a slow answer would count as none
            while _steps and _age(_steps[0]) > LOOK:
                if not _has_ended(_steps[0].end):
                    if _late(_steps[0]):
                        _end_process(_steps[0])
                    break
                _to_free.append(_steps.popleft())
            _question = None


def _look(asking: threading.Thread) -> None:
    """End the process where a question has no answer in time. The thread that asks has had a turn between two looks."""
    before = None
    while True:
        time.sleep(LOOK)
        if not asking.is_alive():
            return
        question = _question
        if question is not None and question is before and _steps and _late(_steps[0]):
            _end_process(_steps[0])
        before = question


def _has_ended(end: Any) -> bool:
    """Ask the driver itself: torch's `query` keeps Python's lock meanwhile, without which `_look` could not run."""
    # the event that a main thread is about to record for the first time
    if not end.cuda_event:
        return False
    if (answer := CDLL("libcuda.so.1").cuEventQuery(end)) not in (0, NOT_READY):
        raise RuntimeError(f"cuEventQuery of CUDA's driver failed with error {answer}")
    return answer == 0


def _age(step: _Step) -> float:
    return time.monotonic() - step.began


def _late(step: _Step) -> bool:
    return _age(step) > step.timeout


def _end_process(step: _Step) -> None:
    operation, reason = "copy between GPUs", f"it did not end within {step.timeout:g} s"
    group = step.group() if isinstance(step.group, ref) else step.group
    if group is None and step.group is not None:
        got = f"no answer in a group that has been destroyed ({reason})"
        remedy = "See which rank ended first, and start all ranks again."
        failure: Exception = invalid(operation, "be carried out by all ranks", got, remedy)
    else:
        failure = lost(operation, group, RuntimeError(reason))
    sys.stderr.write(f"{failure}\n")
    sys.stderr.flush()
    os._exit(1)
