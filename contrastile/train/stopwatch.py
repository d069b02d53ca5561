"""Shares of a step's time: towers, loss, optimizer, and waiting for data.

On a GPU the marks are CUDA events, so that no measurement makes the host wait.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class HostTimer:
    """Marks, and the seconds between two of them, on a device that computes synchronously."""

    def mark(self) -> Any:
        return time.perf_counter()

    def between(self, start: Any, end: Any) -> float:
        return float(end - start)


class DeviceTimer(HostTimer):
    """The same on a CUDA device; a mark is the moment at which the device's queue reaches it."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        # the device may not have reached the later event
        end.synchronize()
        return start.elapsed_time(end) / 1000


class Stopwatch:
    """Marks of one step after the other; a mark names the part of the step that begins there.

    The optimizer's time is that of the step before, because a device still runs the optimizer when its step is logged.
    The sum of gradients over ranks counts as towers.
    """

    def __init__(self, timer: HostTimer) -> None:
        self._timer = timer
        # None: outside any step
        self._marks: list[tuple[str | None, Any]] = []
        self._began = time.perf_counter()

    def start(self) -> None:
        """Begin a step, which waits for its data first."""
        self._began = time.perf_counter()
        # a step that the guard skipped has no mark at the optimizer's end
        if self._marks and self._marks[-1][0] is not None:
            self._marks.clear()
        self.mark("data")

    def mark(self, part: str | None) -> None:
        """Begin `part` of the step."""
        self._marks.append((part, self._timer.mark()))

    def follow(self, optimizer: Optimizer) -> None:
        """Mark the begin and the end of each step of the optimizer."""
        optimizer.register_step_pre_hook(lambda *_: self.mark("optimizer"))
        optimizer.register_step_post_hook(lambda *_: self.mark(None))

    def around(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The same loss with marks at its ends, forward and backward; its first two inputs are the towers' features."""

        def marked(*inputs: Any, **options: Any) -> Tensor:
            self.mark("loss")
            for side in inputs[:2]:
                # token vectors come with their mask
                features = side[0] if isinstance(side, tuple) else side
                if features.requires_grad:
                    features.register_hook(lambda _: self.mark("towers"))
            value = loss(*inputs, **options)
            if value.requires_grad:
                value.register_hook(lambda _: self.mark("loss"))
            return value

        return marked

    def read(self, examples: int) -> dict[str, Any]:
        """Values of the finished step for `metrics.jsonl`: host seconds, examples per second, shares that sum to 1."""
        spent: dict[str, float] = defaultdict(float)
        # the time of this step's optimizer belongs to the next step
        marks = self._marks[:-1] if self._marks[-1][0] is None else self._marks
        for (part, start), (_, end) in pairwise(marks):
            if part is not None:
                spent[part] += self._timer.between(start, end)
        self._marks = self._marks[-2:]
        seconds, total = time.perf_counter() - self._began, sum(spent.values())
        shares = {part: round(took / total, 4) for part, took in sorted(spent.items())} if total > 0 else {}
        return {"seconds": seconds, "speed": examples / max(seconds, 1e-9), "shares": shares}


def shares_text(shares: dict[str, float]) -> str:
    """The shares for a log line.

    >>> shares_text({"data": 0.031, "loss": 0.25, "towers": 0.719})
    'towers 72%, loss 25%, data 3%'
    """
    return ", ".join(f"{part} {share:.0%}" for part, share in sorted(shares.items(), key=lambda item: -item[1]))
