"""Progress of a run, by examples or by minutes: batch size, learning rate and the end of the run follow from it.

Part of the state that a checkpoint holds. `loop.py` updates it after every step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any


@dataclass
class Progress:
    """Examples and seconds of a run so far. The share that is done is that of examples or of minutes, if larger.

    examples: those of the whole run. sizes: the batch of every step so far. now: the time, in seconds of the run, at
    which the present step was planned; the same on all ranks. pace: seconds per example of the last step, 0 before the
    first. seconds, peak_bytes: at the end of the last step.
    """

    examples: int
    minutes: float | None
    next_probe: float = 1.0
    sizes: list[int] = field(default_factory=list)
    seen: int = 0
    now: float = 0.0
    pace: float = 0.0
    seconds: float = 0.0
    peak_bytes: int = 0
    began: float = field(default_factory=time.monotonic)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers. Sizes are stored as runs of equal ones, of which there are few."""
        return {
            "sizes": [[size, len(list(same))] for size, same in groupby(self.sizes)],
            "next_probe": self.next_probe,
            "seconds": self.seconds,
            "pace": self.pace,
            "peak_bytes": self.peak_bytes,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the numbers. The list of sizes stays the same object, because the sampler reads it as it grows."""
        for name, value in state_dict.items():
            if name != "sizes":
                setattr(self, name, value)
        self.sizes[:] = [size for size, count in state_dict["sizes"] for _ in range(count)]

    def start(self) -> None:
        """Start the clock at the seconds that a checkpoint restored, or at 0."""
        self.seen, self.now, self.began = sum(self.sizes), self.seconds, time.monotonic() - self.seconds

    def step_taken(self, count: int) -> None:
        """Count `count` more examples; the pace is that of the step planned at `now`."""
        self.seen += count
        self.pace = (self.elapsed() - self.now) / count

    def has_time_for(self, count: int) -> bool:
        """Tell if a step of `count` examples, at the pace of the last one, ends within the minutes."""
        return self.minutes is None or self.now + count * self.pace <= 60 * self.minutes

    def elapsed(self) -> float:
        """Seconds since the run began, without the time during which it was interrupted."""
        return time.monotonic() - self.began

    def share(self, ahead: float = 0.0) -> float:
        """The share of the run that is done, or will be `ahead` examples later."""
        time_share = self.now / (60 * self.minutes) if self.minutes is not None else 0.0
        return max((self.seen + ahead) / self.examples, time_share)

    def expected(self) -> int:
        """The estimated number of examples at the end of the run."""
        return round(self.seen / min(self.share(), 1.0))
