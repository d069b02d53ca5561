"""Ranks that listen for each other: one that dies or stops is noticed by the next, and through it by all.

Used by `ranks.py` around the steps. A backend notices a missing rank when it waits for it, and NCCL not even then
until its time is up. So a thread sends a byte to the next rank every second, and another one receives the previous
rank's: a connection that breaks is a rank that died, and one that is silent for the timeout a rank that stopped.
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

from contrastile import agreement
from contrastile.rollcall import LostRankError, farewell, here, lost

# seconds between two beats, and those that the main thread has to say itself what happened
EVERY, GRACE = 1.0, 1.0
ALIVE, GOODBYE = 1, 0


class Watch:
    """`with Watch(timeout):` ends this process with a sentence, and exit code 1, when a rank is lost.

    Where the main thread waits for that rank through Gloo, it is woken and raises the error itself.
    """

    def __init__(self, timeout: timedelta) -> None:
        # a group of its own, on the host: what the main thread waits for must not keep these threads
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        rank, size = dist.get_rank(), dist.get_world_size()
        self._next, self._previous = (rank + 1) % size, (rank - 1) % size
        self._every = min(EVERY, timeout.total_seconds() / 4)
        self._done = threading.Event()
        # set where this process ends by an error of its own
        self._over = False
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._beat, self._listen)]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = error is not None
        self._done.set()
        if error is None:
            for thread in self._threads:
                thread.join()
        else:
            # the others need not wait until this process has ended
            if not isinstance(error, LostRankError):
                farewell(error)
            agreement.hang_up(self._group)
            agreement.hang_up(None)

    def _beat(self) -> None:
        # where the next rank is gone, those that listen to it hear of it
        with suppress(RuntimeError):
            while not self._done.wait(self._every):
                dist.send(torch.tensor([ALIVE]), self._next, self._group)
            if not self._over:
                dist.send(torch.tensor([GOODBYE]), self._next, self._group)

    def _listen(self) -> None:
        heard = torch.tensor([ALIVE])
        try:
            while heard.item() == ALIVE:
                dist.recv(heard, self._previous, self._group)
        except RuntimeError as error:
            self._end(error)

    def _end(self, error: RuntimeError) -> None:
        if self._over:
            return
        # wakes the main thread
        agreement.hang_up(None)
        failure = lost(here.operation or "training", self._group, error)
        time.sleep(GRACE)
        if not (self._over or here.failing):
            sys.stderr.write(f"{failure}\n")
            sys.stderr.flush()
            os._exit(1)
