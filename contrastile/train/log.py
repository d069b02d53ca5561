"""What a run says while it runs: a bar on every long wait, and one line of JSON per step in `metrics.jsonl`.

Used by every station of the story. On a terminal a wait is a tqdm bar; in a file or a CI log it is a plain line now and
then, so that the log stays readable.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

logger = logging.getLogger("contrastile")

# seconds between two lines where there is no terminal
LINE_EVERY = 10.0


class Bar(Protocol):
    """One long wait under way."""

    def update(self, n: int, *, total: int | None = None, **facts: str) -> None:
        """`n` more are done; `total` where the estimate changed; `facts` are shown behind the bar."""


class NoBar:
    """Shows nothing."""

    def update(self, n: int, *, total: int | None = None, **facts: str) -> None:
        pass


class TerminalBar:
    """A tqdm bar."""

    def __init__(self, total: int, what: str, unit: str, begun: int = 0) -> None:
        from tqdm import tqdm

        # a terminal that does not know its size is taken for one of 80 × 24; tqdm would show nothing
        columns, lines = shutil.get_terminal_size()
        self._bar = tqdm(
            total=total, desc=what, unit=f" {unit}", unit_scale=True, ncols=columns - 1, nrows=lines, initial=begun
        )

    def update(self, n: int, *, total: int | None = None, **facts: str) -> None:
        if total is not None:
            self._bar.total = total
        if facts:
            self._bar.set_postfix(facts, refresh=False)
        self._bar.update(n)

    def close(self) -> None:
        self._bar.close()


class LineBar:
    """A line at the start of a wait that lasts, another every `LINE_EVERY` seconds, and one at its end."""

    def __init__(self, total: int, what: str, unit: str, begun: int = 0, stream: TextIO | None = None) -> None:
        self._total, self._what, self._unit = total, what, unit
        self._stream = stream if stream is not None else sys.stderr
        self._done = self._begun = begun
        self._facts: dict[str, str] = {}
        self._began = self._spoke = time.monotonic()

    def update(self, n: int, *, total: int | None = None, **facts: str) -> None:
        self._done += n
        self._total = total if total is not None else self._total
        self._facts.update(facts)
        if time.monotonic() - self._spoke >= LINE_EVERY:
            self._speak()

    def close(self) -> None:
        self._speak()

    def _speak(self) -> None:
        self._spoke = time.monotonic()
        seconds = max(self._spoke - self._began, 1e-9)
        share = self._done / max(self._total, 1)
        # what an earlier process did took none of this one's time
        rate = (self._done - self._begun) / seconds
        left = f"{clock((self._total - self._done) / rate)} left" if rate and share < 1 else f"{clock(seconds)} taken"
        facts = [f"{name} {value}" for name, value in self._facts.items()]
        line = [
            f"{self._what} {share:4.0%}",
            f"{self._done:,} {self._unit}",
            f"{rate:,.0f} {self._unit}/s" if rate >= 1 or not rate else f"{1 / rate:,.0f} s each",
            left,
            *facts,
        ]
        print(" · ".join(line), file=self._stream, flush=True)


class Patient:
    """A bar that falls silent when nobody reads it any more, such as behind `| head`; the wait goes on."""

    def __init__(self, bar: TerminalBar | LineBar) -> None:
        self._bar: TerminalBar | LineBar | None = bar

    def update(self, n: int, *, total: int | None = None, **facts: str) -> None:
        self._try(lambda bar: bar.update(n, total=total, **facts))

    def close(self) -> None:
        self._try(lambda bar: bar.close())

    def _try(self, move: Callable[[TerminalBar | LineBar], None]) -> None:
        if self._bar is not None:
            try:
                move(self._bar)
            # a closed file is a ValueError
            except (OSError, ValueError):
                self._bar = None


@contextmanager
def progress(total: int, what: str, unit: str, begun: int = 0) -> Iterator[Bar]:
    """Show a wait of `total` units: `with progress(54_000, "rendering", "pictures") as bar: ... bar.update(1)`.

    `begun` of them were done before, and count for no speed. Of the ranks that torchrun starts, the first one alone
    shows it.
    """
    if os.environ.get("RANK", "0") != "0":
        yield NoBar()
        return
    bar = Patient((TerminalBar if sys.stderr.isatty() else LineBar)(total, what, unit, begun))
    try:
        yield bar
    finally:
        bar.close()


def clock(seconds: float) -> str:
    """Seconds as people read them: 75 is "1:15"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(count: float) -> str:
    """Bytes as people read them, in powers of 1024: 3 · 2³⁰ is "3.0 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


class Listener(Protocol):
    """Who hears the lines of `metrics.jsonl` too."""

    def hear(self, kind: str, values: Mapping[str, Any]) -> None:
        """A line, whose `examples` say how far the run is."""

    def close(self) -> None:
        """The run is over."""


# of a line, what the clock and the machine say: equal runs differ in it
MEASURED = ("seconds", "speed", "shares", "peak_bytes")


class Metrics:
    """`metrics.jsonl`: one JSON object per line, on disk as soon as it is written; without a path, nowhere.

    A line that cannot be written is said aloud and never ends a run. The `listeners` hear it afterwards.
    """

    def __init__(self, path: Path | None, listeners: Sequence[Listener] = ()) -> None:
        self._listeners = listeners
        self._nowhere = path is None
        self._file = (path or Path(os.devnull)).open("ab", buffering=0)
        self._lost = 0

    def write(self, kind: str, **values: Any) -> None:
        """Append one line; `kind` is "step", "skip", "probe", "test" or "failure"."""
        line = (json.dumps({"kind": kind, **values}) + "\n").encode()
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                raise OSError("the disk is full")
        except OSError as failure:
            # half a line would spoil the next one
            with suppress(OSError):
                self._file.truncate(end)
            if not self._lost:
                logger.warning("%s cannot be written (%s); the run goes on", self._file.name, failure)
            self._lost += 1
        for listener in self._listeners:
            listener.hear(kind, values)

    def state_dict(self) -> dict[str, int]:
        """How long the file is, safe on the disk: a checkpoint says up to where its lines are those of the run."""
        os.fsync(self._file.fileno())
        return {"bytes": os.fstat(self._file.fileno()).st_size}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Forget the lines of steps that are taken again."""
        there = os.fstat(self._file.fileno()).st_size
        if there > state_dict["bytes"]:
            self._file.truncate(state_dict["bytes"])
        elif there < state_dict["bytes"] and not self._nowhere:
            # what follows begins on a line of its own
            path = Path(self._file.name)
            self._file.truncate(path.read_bytes().rfind(b"\n") + 1)
            logger.warning("%s has lost lines from before the checkpoint", path)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        for listener in self._listeners:
            listener.close()
        if self._lost:
            logger.warning("%d lines of %s were lost", self._lost, self._file.name)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; a last one cut short by a crash, and any that is damaged, is left out."""
    read, damaged = [], 0
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            read.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            damaged += 1
    if damaged:
        logger.warning("%d lines of %s are damaged and are left out", damaged, path)
    return read
