"""Progress bars and metrics: a bar on every long wait, and one line of JSON per step in `metrics.jsonl`.

Used by all of `train/` and the command line. On a terminal a bar is tqdm's; in a file or a CI log it is a line every
ten seconds.
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
from typing import Any, Protocol, TextIO

from contrastile.data.files import open_in_place

logger = logging.getLogger("contrastile")

# seconds between two lines where there is no terminal
LINE_EVERY = 10.0


class Bar(Protocol):
    """A long wait under way."""

    def update(self, n: int, *, total: int | None = None, **facts: str) -> None:
        """Add `n` finished units; `total`: a new estimate; `facts` are shown behind the bar."""


class TerminalBar:
    """A tqdm bar."""

    def __init__(self, total: int, label: str, unit: str, begun: int = 0) -> None:
        from tqdm import tqdm

        # tqdm shows nothing on a terminal of unknown size, which here counts as 80 × 24
        columns, lines = shutil.get_terminal_size()
        self._bar = tqdm(
            total=total, desc=label, unit=f" {unit}", unit_scale=True, ncols=columns - 1, nrows=lines, initial=begun
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
    """One line every `LINE_EVERY` seconds of a wait, and one at its end."""

    def __init__(self, total: int, label: str, unit: str, begun: int = 0, stream: TextIO | None = None) -> None:
        self._total, self._label, self._unit = total, label, unit
        self._stream = stream if stream is not None else sys.stderr
        self._done = self._begun = begun
        self._facts: dict[str, str] = {}
        self._began = self._printed = time.monotonic()

    def update(self, n: int, *, total: int | None = None, **facts: str) -> None:
        self._done += n
        self._total = total if total is not None else self._total
        self._facts.update(facts)
        if time.monotonic() - self._printed >= LINE_EVERY:
            self._print()

    def close(self) -> None:
        self._print()

    def _print(self) -> None:
        self._printed = time.monotonic()
        seconds = max(self._printed - self._began, 1e-9)
        share = self._done / max(self._total, 1)
        # units of an earlier process took none of this one's time
        rate = (self._done - self._begun) / seconds
        left = f"{clock((self._total - self._done) / rate)} left" if rate and share < 1 else f"{clock(seconds)} taken"
        facts = [f"{name} {value}" for name, value in self._facts.items()]
        line = [
            f"{self._label} {share:4.0%}",
            f"{self._done:,} {self._unit}",
            f"{rate:,.0f} {self._unit}/s" if rate >= 1 or not rate else f"{1 / rate:,.0f} s each",
            left,
            *facts,
        ]
        print(" · ".join(line), file=self._stream, flush=True)


class SafeBar:
    """A bar that stops showing when its output is closed, such as by `| head`; without a bar it shows nothing."""

    def __init__(self, bar: TerminalBar | LineBar | None) -> None:
        self._bar = bar

    def update(self, n: int, *, total: int | None = None, **facts: str) -> None:
        self._try(lambda bar: bar.update(n, total=total, **facts))

    def close(self) -> None:
        self._try(lambda bar: bar.close())

    def _try(self, call: Callable[[TerminalBar | LineBar], None]) -> None:
        if self._bar is not None:
            try:
                call(self._bar)
            # writing to a closed file raises ValueError
            except (OSError, ValueError):
                self._bar = None


@contextmanager
def progress(total: int, what: str, unit: str, begun: int = 0) -> Iterator[Bar]:
    """Show a wait of `total` units: `with progress(54_000, "rendering", "pictures") as bar: ... bar.update(1)`.

    begun: units done before, which do not count for the speed. Of several ranks only the first shows the bar.
    """
    first = os.environ.get("RANK", "0") == "0"
    bar = SafeBar((TerminalBar if sys.stderr.isatty() else LineBar)(total, what, unit, begun) if first else None)
    try:
        yield bar
    finally:
        bar.close()


def clock(seconds: float) -> str:
    """Seconds as hours, minutes and seconds: 75 is "1:15"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(count: float) -> str:
    """Bytes in powers of 1024: 3 · 2³⁰ is "3.0 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


class Listener(Protocol):
    """A receiver of the lines of `metrics.jsonl`."""

    def log(self, kind: str, values: Mapping[str, Any]) -> None:
        """Receive one line; its `examples` are those seen so far."""

    def close(self) -> None:
        """Finish after the last line."""


# values that differ between equal runs, because the clock and the machine decide them
MEASURED = ("seconds", "speed", "shares", "peak_bytes")


class Metrics:
    """`metrics.jsonl`: one JSON object per line, on disk as soon as it is written; without a path, no file.

    A line that cannot be written is logged and never ends a run. The `listeners` receive each line afterwards.
    """

    def __init__(self, path: Path | None, listeners: Sequence[Listener] = ()) -> None:
        self._listeners = listeners
        self._discarded = path is None
        self._file = open_in_place(path or Path(os.devnull), "ab", buffering=0)
        self._lost = 0

    def write(self, kind: str, **values: Any) -> None:
        """Append one line; `kind` is "step", "skip", "probe", "test", "failure" or "end"."""
        line = (json.dumps({"kind": kind, **values}) + "\n").encode()
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                raise OSError("the disk is full")
        except OSError as failure:
            # half a line would damage the next one
            with suppress(OSError):
                self._file.truncate(end)
            if not self._lost:
                logger.warning("%s cannot be written (%s); the run goes on", self._file.name, failure)
            self._lost += 1
        for listener in self._listeners:
            listener.log(kind, values)

    def state_dict(self) -> dict[str, int]:
        """The length of the file, synced to disk: lines behind it belong to steps after the checkpoint."""
        os.fsync(self._file.fileno())
        return {"bytes": os.fstat(self._file.fileno()).st_size}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Drop the lines of steps that are repeated."""
        length = os.fstat(self._file.fileno()).st_size
        if length > state_dict["bytes"]:
            self._file.truncate(state_dict["bytes"])
        elif length < state_dict["bytes"] and not self._discarded:
            # new lines start at the begin of a line
            path = Path(self._file.name)
            self._file.truncate(path.read_bytes().rfind(b"\n") + 1)
            logger.warning("%s has lost lines from before the checkpoint", path)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        for listener in self._listeners:
            listener.close()
        if self._lost:
            logger.warning("%d lines of %s were lost", self._lost, self._file.name)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl` without damaged ones and a last one that a crash cut short."""
    lines, damaged = [], 0
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            lines.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            damaged += 1
    if damaged:
        logger.warning("%d lines of %s are damaged and are left out", damaged, path)
    return lines
