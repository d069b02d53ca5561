"""Memory: the peak of a run, the peak of single updates, and the additional memory of plain autograd."""

import gc
import os
from contextlib import suppress
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile

# Linux's status of this process, and the switch that resets its high-water mark
STATUS = Path("/proc/self/status")
MARK = Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak memory since `start`: by torch's allocator on a GPU, by the process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> int:
        """Reset the mark; the bytes in use now."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return torch.cuda.memory_allocated(self.device)
        # containers may forbid the reset; the mark of the whole process is then an upper bound
        entry = "VmHWM"
        with suppress(OSError):
            MARK.write_text("5")
            entry = "VmRSS"
        return _status(entry)

    def bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else _status("VmHWM")


class Weighed:
    """Context manager that measures the peak `bytes` of tensors within, beyond those that exist at its start.

    Counted by torch's allocator on a GPU, and by its profiler on a CPU: the peak of the process would miss tensors that
    reuse memory which was freed before.

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
        # free unreachable tensors now, not at a random moment of the measurement
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            # silences the profiler's own messages; read when it starts for the first time
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._before
        else:
            self._profile.stop()
            results: Any = self._profile.profiler.kineto_results  # type: ignore[union-attr]
            moves = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
            ordered = (count for _, count in sorted(moves, key=itemgetter(0)))
            # the peak of the running sum of allocations and frees
            self.bytes = max(accumulate(ordered, initial=0))


def _status(entry: str) -> int:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{entry}:"))


def dense_need(per_example: int, batch: int, retained: int) -> dict[str, int]:
    """Additional bytes of plain autograd in a step of `batch` examples, beside a run that retains `retained` of them.

    per_example: bytes of activations. The result's `beyond` counts the examples that autograd retains in addition. The
    matrix counts once, in float32; a real softmax holds it more than once.
    """
    beyond = max(batch - retained, 0)
    sizes = {"activations": per_example * beyond, "matrix": 4 * batch * batch}
    return {"batch": batch, "beyond": beyond, "per_example": per_example, **sizes}
