"""Graceful stop: the first Ctrl-C or SIGTERM lets the present step finish; the run saves its weights and ends.

A second signal stops at once, except under a launcher of several ranks: it passes on a Ctrl-C that the terminal has
sent to each rank already.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """`with StopRequest() as stop:` stores a signal in `stop.signal`, which a loop reads between two steps.

    patient: ignore a second signal instead of raising KeyboardInterrupt.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self.signal: int | None = None
        self._patient = patient
        self._handlers: dict[int, Any] = {}

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None and not self._patient:
            raise KeyboardInterrupt(number)
        self.signal = self.signal or number

    def __enter__(self) -> StopRequest:
        try:
            self._handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}
        except ValueError:
            # Python sets handlers in the main thread only; in others signals keep theirs
            self._handlers = {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
