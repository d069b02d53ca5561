"""How much memory a run takes, and how much the dense way would have taken: the two bars of the report.

Stands beside `loop.py`, which asks for the peak at every step and for the dense way's needs once.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

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


def kept_bytes(forward: Callable[[], object]) -> int:
    """The bytes that autograd keeps for the backward of `forward()`, every storage counted once."""
    kept: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        # the graph lives until the sum is taken, so that no storage is freed and its address used again
        graph = forward()
    total = sum(kept.values())
    del graph
    return total


def bytes_per_example(forward: Callable[[int], object], sub_batch: int) -> int:
    """What one more example adds to the graph: the slope between half a sub-batch and a whole one.

    `forward(n)` encodes n examples. What does not grow with n (parameters, their copies in another dtype) cancels.
    """
    whole = max(sub_batch, 2)
    half = whole // 2
    return (kept_bytes(lambda: forward(whole)) - kept_bytes(lambda: forward(half))) // (whole - half)


def dense_need(per_example: int, batch: int, kept: int) -> DenseNeed:
    """What one step of `batch` pairs would hold without cache and tiles, beyond a run that keeps `kept` of them.

    `per_example`: bytes of activations a pair. The matrix is counted once, in float32, which is less than what a
    softmax over it really holds.
    """
    beyond = max(batch - kept, 0)
    return DenseNeed(batch, beyond, per_example, activations=per_example * beyond, matrix=4 * batch * batch)
