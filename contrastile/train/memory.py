"""How much memory a run takes, and how much the dense way would have taken: the two bars of the report.

Stands beside `loop.py`, which asks for the peak at every step and for the dense way's needs once. What a single update
takes is `Weighed`.
"""

from __future__ import annotations

import gc
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile

# Linux's account of this process, and the switch that sets its high-water mark back to the present
STATUS = Path("/proc/self/status")
MARK = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class DenseNeed:
    """Bytes that plain autograd would hold for a step of `batch` pairs beyond what a run with the cache holds.

    That is the activations of `beyond` more pairs, and the b × b matrix.
    """

    batch: int
    beyond: int
    per_example: int
    activations: int
    matrix: int


class PeakMemory:
    """The highest memory of a device since `start`: of the process on a CPU, of torch's allocator on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> int:
        """Set the mark back; the bytes in use now."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return torch.cuda.memory_allocated(self.device)
        try:
            MARK.write_text("5")
        except OSError:
            # a container may forbid it; the mark is then that of the whole process, an upper bound
            return self.bytes()
        return _status("VmRSS")

    def bytes(self) -> int:
        """The mark now."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _status("VmHWM")


class Weighed:
    """The `bytes` that tensors take at the highest while it is entered, beyond what they took before.

    By torch's own account: on a GPU its allocator's, on a CPU its profiler's, which is told of every tensor. There the
    process's peak would not do: what was freed before is room for what comes, and is then counted as nothing.

    >>> with Weighed(torch.device("cpu")) as weighed:
    ...     ones = [torch.ones(1000) for _ in range(3)]
    ...     ones.clear()
    >>> weighed.bytes
    12000
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0

    def __enter__(self) -> Self:
        # what nobody holds any more would be freed at any time
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            # the profiler tells of its own doings on standard error; looked up when it starts for the first time
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._before
        else:
            self._profile.stop()
            self.bytes = _highest(self._profile)


def _highest(seen: profile) -> int:
    """The most that was allocated at once, of all that came and went."""
    results: Any = seen.profiler.kineto_results  # type: ignore[union-attr]
    moves = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    held = highest = 0
    for _, count in sorted(moves, key=lambda move: move[0]):
        held += count
        highest = max(highest, held)
    return highest


def _status(entry: str) -> int:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{entry}:"))


def dense_need(per_example: int, batch: int, kept: int) -> DenseNeed:
    """What one step of `batch` pairs would hold without cache and tiles, beyond a run that keeps `kept` of them.

    `per_example`: bytes of activations a pair. The matrix is counted once, in float32, which is less than what a
    softmax over it really holds.
    """
    beyond = max(batch - kept, 0)
    return DenseNeed(batch, beyond, per_example, activations=per_example * beyond, matrix=4 * batch * batch)
