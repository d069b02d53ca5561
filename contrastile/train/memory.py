"""How much memory a run takes, and how much the dense way would have taken: the two bars of the report.

Stands beside `loop.py`, which asks for the peak at every step and for the dense way's needs once.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

import torch

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
