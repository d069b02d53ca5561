"""Heartbeats between ranks: a rank that dies or hangs is noticed by the next one, and through it by all.

Used by `ranks.py` around the steps. A backend notices a missing rank only when it waits for it, and NCCL only after its
timeout. Therefore a thread sends one byte to the next rank every second, and another thread receives the previous
rank's: a broken connection is a dead rank, silence for the timeout a hanging one.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from contrastile.distributed.failure import LostRankError, farewell, hang_up, lost, progress

# seconds between two beats, and those left for the main thread to raise the error itself
EVERY, GRACE = 1.0, 1.0
ALIVE, GOODBYE = 1, 0


class Heartbeat:
    """`with Heartbeat(timeout):` ends this process with a sentence, and exit code 1, when a rank is lost.

    A main thread that waits for the lost rank through Gloo is woken and raises the error itself.
    """

    def __init__(self, timeout: timedelta) -> None:
        # a separate group on the host, so that a collective of the main thread cannot block these threads
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        rank, size = dist.get_rank(), dist.get_world_size()
        self._next, self._previous = (rank + 1) % size, (rank - 1) % size
        self._every = min(EVERY, timeout.total_seconds() / 4)
        self._done = threading.Event()
        # set where this process ends by an error of its own
        self._failed = False
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._send, self._receive)]

    def __enter__(self) -> Heartbeat:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed = error is not None
        self._done.set()
        if error is None:
            for thread in self._threads:
                thread.join()
        else:
            # tell the other ranks at once, before this process has ended
            if not isinstance(error, LostRankError):
                farewell(error)
            hang_up(self._group)
            hang_up(None)

    def _send(self) -> None:
        # a lost next rank is noticed by the rank that listens to it
        with suppress(RuntimeError):
            while not self._done.wait(self._every):
                dist.send(torch.tensor([ALIVE]), self._next, self._group)
            if not self._failed:
                dist.send(torch.tensor([GOODBYE]), self._next, self._group)

    def _receive(self) -> None:
        beat = torch.tensor([ALIVE])
        try:
            while beat.item() == ALIVE:
                dist.recv(beat, self._previous, self._group)
        except RuntimeError as error:
            self._end(error)

    def _end(self, error: RuntimeError) -> None:
        if self._failed:
            return
        # wakes the main thread
        hang_up(None)
        failure = lost(progress.operation or "training", self._group, error)
        time.sleep(GRACE)
        if not (self._failed or progress.failing):
            sys.stderr.write(f"{failure}\n")
            sys.stderr.flush()
            os._exit(1)
