"""Where the time of a step goes: how much of it the towers take, the loss, the optimizer, and waiting for data.

Beside `loop.py`, which marks where a step begins and where its batch is there; the rest is marked by hooks. Marks are
events in the device's own queue, so that nothing waits for a measurement: a step is over when its loss is known.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

Mark = TypeVar("Mark")


class Timer(Protocol[Mark]):
    """A way of marking moments."""

    def mark(self) -> Mark:
        """This moment."""

    def between(self, one: Mark, other: Mark) -> float:
        """Seconds."""


class HostTimer:
    """Of what computes where it is called."""

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, one: float, other: float) -> float:
        return other - one


class DeviceTimer:
    """Of a CUDA device that computes behind the host: its moments are those at which it comes to a mark."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, one: torch.cuda.Event, other: torch.cuda.Event) -> float:
        # the later one may be a moment ahead
        other.synchronize()
        return one.elapsed_time(other) / 1000


class Stopwatch(Generic[Mark]):
    """The parts of one step after the other: `start`, `mark`, ..., until the optimizer's step.

    What a part is called holds until the next mark. The optimizer's own time is that of the step before, because a
    device is still at it when the step is told. The ranks' sum of gradients counts as towers.
    """

    def __init__(self, timer: Timer[Mark]) -> None:
        self._timer = timer
        # None: not a part of any step
        self._marks: list[tuple[str | None, Mark]] = []
        self._began = time.perf_counter()

    @classmethod
    def of(cls, device: torch.device) -> Stopwatch[Any]:
        """The one for computations on this device."""
        return Stopwatch[Any](DeviceTimer() if device.type == "cuda" else HostTimer())

    def start(self) -> None:
        """A step begins: it waits for its data."""
        self._began = time.perf_counter()
        # a step that the guard passed over has no optimizer's end
        if self._marks and self._marks[-1][0] is not None:
            self._marks.clear()
        self.mark("data")

    def mark(self, part: str | None) -> None:
        """From here on it is this part's time."""
        self._marks.append((part, self._timer.mark()))

    def follow(self, optimizer: Optimizer) -> None:
        """Mark where its steps begin and end."""
        optimizer.register_step_pre_hook(lambda *_: self.mark("optimizer"))
        optimizer.register_step_post_hook(lambda *_: self.mark(None))

    def around(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The same loss, whose ends are marked in both directions; its first two inputs come from the towers."""

        def marked(*inputs: Any, **words: Any) -> Tensor:
            self.mark("loss")
            for features in inputs[:2]:
                if features.requires_grad:
                    features.register_hook(lambda _: self.mark("towers"))
            value = loss(*inputs, **words)
            if value.requires_grad:
                value.register_hook(lambda _: self.mark("loss"))
            return value

        return marked

    def facts(self, pairs: int) -> dict[str, Any]:
        """Of the step that is over, for `metrics.jsonl`: its seconds, pairs per second, and `shares` that add up to 1.

        The seconds are the host's, from `start` to now.
        """
        spent: dict[str, float] = defaultdict(float)
        # the optimizer of this step is the next one's
        steps = self._marks[:-1] if self._marks and self._marks[-1][0] is None else self._marks
        for (part, one), (_, other) in pairwise(steps):
            if part is not None:
                spent[part] += self._timer.between(one, other)
        self._marks = self._marks[-2:]
        seconds, total = time.perf_counter() - self._began, sum(spent.values())
        shares = {part: round(took / total, 4) for part, took in sorted(spent.items())} if total > 0 else {}
        return {"seconds": seconds, "speed": pairs / max(seconds, 1e-9), "shares": shares}


def shares_text(shares: dict[str, float]) -> str:
    """The shares as a log line has them.

    >>> shares_text({"data": 0.031, "loss": 0.25, "towers": 0.719})
    'towers 72%, loss 25%, data 3%'
    """
    return ", ".join(f"{part} {share:.0%}" for part, share in sorted(shares.items(), key=lambda item: -item[1]))
