"""A watch over copies between GPUs, which have no time-out of their own, as NCCL's watchdog is over its operations.

Between `failure.py` and `neighbours.py`. A GPU that copies from another waits for it in the order of
a stream, for ever if that rank is lost in the middle of a step. The host may wait for the GPU by then, and learns of no
failure. So a thread looks at the ends of all steps, and ends this process with the sentence of a lost rank.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from contrastile.distributed.failure import lost

# seconds between two looks, and between two events of a stream
LOOK, APART = 1.0, 0.05


class _Step(NamedTuple):
    end: Any
    stream: Any
    group: Any
    began: float
    timeout: float


_steps: deque[_Step] = deque()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch(group: Any, timeout: float, prepare: Callable[[], None]) -> None:
    """End the process if the work of the current stream lasts longer than `timeout` seconds.

    prepare: called by the thread before it looks at events for the first time.
    """
    global _thread
    stream, now = torch.cuda.current_stream(), time.monotonic()
    last = _steps[-1] if _steps else None
    if last is None or last.stream != stream or last.group is not group or now - last.began > APART:
        last = _Step(torch.cuda.Event(), stream, group, now, timeout)
        _steps.append(last)
    # the event moves behind this work too, if it was behind the work just before
    last.end.record(stream)
    if _thread is None:
        with _lock:
            if _thread is None:
                _thread = threading.Thread(target=_look, args=(prepare,), daemon=True)
                _thread.start()


def _look(prepare: Callable[[], None]) -> None:
    # an error of the device is one of the main thread
    with suppress(RuntimeError):
        prepare()
        while True:
            time.sleep(LOOK)
            # the last event may still move
            while len(_steps) > 1 and _steps[0].end.query():
                _steps.popleft()
            if time.monotonic() - _steps[0].began > _steps[0].timeout and not _steps[0].end.query():
                _end(_steps[0])


def _end(step: _Step) -> None:
    failure = lost("copy between GPUs", step.group, RuntimeError(f"it did not end within {step.timeout:g} s"))
    sys.stderr.write(f"{failure}\n")
    sys.stderr.flush()
    os._exit(1)
