"""A run that is asked to stop finishes its step, keeps its weights and says so.

Used by `loop.py` around its steps: the first Ctrl-C (or SIGTERM) is a request, the second one stops at once. A launcher
of several ranks passes on a Ctrl-C that the terminal has sent to each of them already: there a second one says nothing.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

ASKED = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """`with StopRequest() as stop:` turns the signals into `stop.signal`, which a loop looks at between two steps."""

    def __init__(self, *, patient: bool = False) -> None:
        self.signal: int | None = None
        self._patient = patient
        self._before: dict[int, Any] = {}

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None and not self._patient:
            raise KeyboardInterrupt(number)
        self.signal = self.signal or number

    def __enter__(self) -> StopRequest:
        try:
            self._before = {number: signal.signal(number, self._note) for number in ASKED}
        except ValueError:
            # only the main thread may set handlers; in another one Ctrl-C is left as it was
            self._before = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
