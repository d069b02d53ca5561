"""How far a run is, by its examples or by its minutes: what the batch size, the rate and the end of it follow.

Beside `loop.py`, which asks it before every step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Clock:
    """How much of a run is done: of its examples or of its minutes, whichever is further.

    `now` is the time, in seconds of the run, at which the present step is planned: the same for all ranks.
    """

    examples: int
    minutes: float | None
    seen: int = 0
    now: float = 0.0
    began: float = field(default_factory=time.monotonic)

    def go_on(self, seen: int, seconds: float) -> None:
        """From where a checkpoint says that the run was."""
        self.seen, self.now, self.began = seen, seconds, time.monotonic() - seconds

    def seconds(self) -> float:
        """Since the run began, without the time that it was interrupted for."""
        return time.monotonic() - self.began

    def share(self, ahead: float = 0.0) -> float:
        """The share that is done, or will be when `ahead` more examples are seen."""
        time_share = self.now / (60 * self.minutes) if self.minutes is not None else 0.0
        return max((self.seen + ahead) / self.examples, time_share)

    def expected(self) -> int:
        """How many examples the run will have seen at its end if it goes on like this."""
        return round(self.seen / min(self.share(), 1.0))
