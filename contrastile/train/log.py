"""Progress bars and metrics: a bar on every long wait, one line of JSON per step in `metrics.jsonl`, and its listeners.

The x-axis of all curves is the number of examples seen. No listener can end a run, or see a repeated step twice.
"""

import json
import os
import secrets
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self, TextIO

from contrastile._errors import logger
from contrastile.data.files import open_in_place, own_folder
from contrastile.train.folder import RunFolder

# seconds between two lines where there is no terminal
LINE_EVERY = 10.0
# limits on wandb's login and on reaching its server: other ranks wait meanwhile
LOGIN_SECONDS, REACH_SECONDS = 15.0, 30.0
# the folder of TensorBoard's files, and the file with the run id that wandb resumes
TENSORBOARD, WANDB = "tensorboard", "wandb.json"


class Bar:
    """A long wait: tqdm's bar on a terminal, elsewhere a line every `LINE_EVERY` seconds and one at the end.

    On a terminal the facts stand below the bar, in as many lines as its width needs.

    begun: units done before, which do not count for the speed. Nothing is shown without a `stream`, or once the reader
    of the stream has ended, as `head` does.
    """

    def __init__(self, total: int, label: str, unit: str, begun: int = 0, stream: TextIO | None = None) -> None:
        self._total, self._label, self._unit, self._stream = total, label, unit, stream
        self._done = self._begun = begun
        self._facts: dict[str, str] = {}
        self._began = self._printed = time.monotonic()
        self._tqdm: Any = None
        self._fact_lines: list[Any] = []
        # units and their total in the last line
        self._shown: tuple[int, int] | None = None
        if stream is not None and stream.isatty():
            from tqdm import tqdm

            # tqdm shows nothing on a terminal of unknown size, which here counts as 80 × 24
            size = shutil.get_terminal_size()
            self._columns = size.columns - 1
            self._new_tqdm = partial(tqdm, ncols=self._columns, nrows=size.lines, file=stream)
            self._tqdm = self._new_tqdm(total=total, desc=label, initial=begun, unit=f" {unit}", unit_scale=True)

    def update(self, n: int, *, total: int | None = None, **facts: str) -> None:
        """Add `n` finished units; `total`: a new estimate; `facts` are shown behind the bar."""
        self._done += n
        self._total = self._total if total is None else total
        self._facts.update(facts)
        if self._tqdm is not None or time.monotonic() - self._printed >= LINE_EVERY:
            self._show(n)

    def close(self) -> None:
        self._show(0, last=True)

    def _show(self, n: int, *, last: bool = False) -> None:
        try:
            if self._tqdm is not None:
                self._tqdm.total = self._total
                # tqdm redraws ten times a second at most
                if self._tqdm.update(n) or last:
                    self._show_facts()
                for line in [self._tqdm, *self._fact_lines] if last else ():
                    line.close()
            elif self._stream is not None and not (last and self._shown == (self._done, self._total)):
                print(self._line(), file=self._stream, flush=True)
        # writing to a closed file raises ValueError
        except (OSError, ValueError):
            self._stream = self._tqdm = None

    def _show_facts(self) -> None:
        """Draw the facts below the bar; a line breaks between two facts."""
        facts = (f"{name} {value}".replace(" ", "\N{NO-BREAK SPACE}") for name, value in self._facts.items())
        lines = textwrap.wrap(" · ".join(facts), self._columns)
        while len(self._fact_lines) < len(lines):
            self._fact_lines.append(self._new_tqdm(total=0, position=len(self._fact_lines) + 1, bar_format="{desc}"))
        line: Any
        for line, text in zip_longest(self._fact_lines, lines, fillvalue=""):
            line.set_description_str(text.replace("\N{NO-BREAK SPACE}", " "))

    def _line(self) -> str:
        self._printed, self._shown = time.monotonic(), (self._done, self._total)
        seconds = max(self._printed - self._began, 1e-9)
        share = self._done / max(self._total, 1)
        # units of an earlier process took none of this one's time
        rate = (self._done - self._begun) / seconds
        parts = [
            f"{self._label} {share:4.0%}",
            quantity(self._done, self._unit),
            f"{rate:,.0f} {self._unit}/s" if rate >= 1 or not rate else f"{1 / rate:,.0f} s each",
            f"{clock((self._total - self._done) / rate)} left" if rate and share < 1 else f"{clock(seconds)} taken",
            *(f"{name} {value}" for name, value in self._facts.items()),
        ]
        return " · ".join(parts)


@contextmanager
def progress(total: int, action: str, unit: str, begun: int = 0) -> Iterator[Bar]:
    """Show a wait of `total` units: `with progress(54_000, "rendering", "images") as bar: ... bar.update(1)`.

    Only the first rank shows the bar.
    """
    bar = Bar(total, action, unit, begun, sys.stderr if os.environ.get("RANK", "0") == "0" else None)
    try:
        yield bar
    finally:
        bar.close()


def quantity(number: int, unit: str) -> str:
    """A number and its unit, which is given in the plural: 1 of "queries" is "1 query"."""
    singular = f"{unit[:-3]}y" if unit.endswith("ies") else unit.removesuffix("s")
    return f"{number:,} {singular if number == 1 else unit}"


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
    return f"{count:.1f} GiB" if abs(count) < 1024 else f"{count / 1024:,.1f} TiB"


class Listener:
    """A receiver of the lines of `metrics.jsonl`."""

    def log(self, kind: str, values: Mapping[str, Any]) -> None:
        """Receive one line; its `examples` are those seen so far."""
        raise NotImplementedError

    def close(self) -> None:
        """Finish after the last line."""


class TensorBoard(Listener):
    """Scalars in the run's folder. A resumed run hides the steps that it repeats."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._writer: Any = None

    def log(self, kind: str, values: Mapping[str, Any]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(own_folder(self._folder / TENSORBOARD)), purge_step=values["examples"])
        for name, value in scalars(kind, values):
            self._writer.add_scalar(name, value, global_step=values["examples"])
        if kind != "step":
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB(Listener):
    """Scalars in a project of wandb. A resumed run continues under its id, and wandb drops the steps that it repeats.

    wandb's own settings, such as WANDB_MODE=offline, control its files and its network.
    """

    def __init__(self, folder: RunFolder, project: str, recipe: Any) -> None:
        self._folder, self._project, self._recipe = folder, project, recipe
        self._run: Any = None

    def log(self, kind: str, values: Mapping[str, Any]) -> None:
        if self._run is None:
            import wandb

            # the name that the library gives its folder
            own_folder(self._folder / "wandb")
            if not (self._folder / WANDB).is_file():
                self._folder.write_json(WANDB, {"id": secrets.token_hex(8)})
            self._run = wandb.init(
                project=self._project,
                name=self._recipe.name,
                id=str(self._folder.read_json(WANDB)["id"]),
                resume="allow",
                dir=str(self._folder.path),
                config=self._recipe.model_dump(mode="json", exclude_none=True),
                settings=wandb.Settings(login_timeout=LOGIN_SECONDS, init_timeout=REACH_SECONDS, console="off"),
            )
        # wandb merges two lines about the same number of examples
        self._run.log(dict(scalars(kind, values)), step=values["examples"])

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def scalars(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a line by their path in it; a test's lines also by its name.

    >>> list(scalars("probe", {"examples": 64, "recall": {"faces": {"1": 0.5}}, "why": "no"}))
    [('probe/recall/faces/1', 0.5)]
    >>> list(scalars("test", {"examples": 64, "test": "coco", "image_to_text_R@1": 0.5}))
    [('test/coco/image_to_text_R@1', 0.5)]
    """
    kind = f"{kind}/{values['test']}" if "test" in values else kind
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from scalars(f"{kind}/{name}", value)
        elif name != "examples" and isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{kind}/{name}", float(value)


def trackers(recipe: Any, folder: RunFolder) -> dict[str, Listener]:
    chosen: dict[str, Listener] = {}
    if recipe.log.tensorboard:
        chosen["TensorBoard"] = TensorBoard(folder)
    if recipe.log.wandb is not None:
        chosen["wandb"] = WandB(folder, recipe.log.wandb, recipe)
    return chosen


# the mark of a whole test in its line, as `json` writes it; within a text the quotes would be escaped
WHOLE = b'"whole": true'
# values that differ between equal runs, because the clock and the machine decide them
MEASURED = ("seconds", "speed", "shares", "peak_bytes")


class Metrics:
    """`metrics.jsonl`: one JSON object per line, on disk as soon as it is written; without a path, no file.

    A line that cannot be written is logged and never ends a run. The `listeners`, by name, receive each line
    afterwards; the first failure of one is logged and is its last.
    """

    def __init__(self, path: Path | None, listeners: Mapping[str, Listener] | None = None) -> None:
        self._listeners = dict(listeners or {})
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
        self._notify(lambda listener: listener.log(kind, values))

    def drop_whole_tests(self) -> None:
        """Drop the lines of whole tests at the end of the file, and half a line: an evaluation replaces them."""
        position = end = 0
        with Path(self._file.name).open("rb") as file:
            for line in file:
                position += len(line)
                if line.endswith(b"\n") and WHOLE not in line:
                    end = position
        if end < position:
            self._file.truncate(end)

    def _notify(self, call: Callable[[Listener], None]) -> None:
        for name, listener in list(self._listeners.items()):
            try:
                call(listener)
            except Exception as failure:
                del self._listeners[name]
                logger.warning("%s failed and is told nothing more; the run goes on: %r", name, failure)

    def state_dict(self) -> dict[str, int]:
        """The length of the file, synced to disk: lines behind it belong to steps after the checkpoint."""
        if not self._discarded:
            os.fsync(self._file.fileno())
        return {"bytes": os.fstat(self._file.fileno()).st_size}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Drop the lines of steps that are repeated."""
        length = os.fstat(self._file.fileno()).st_size
        if length > state_dict["bytes"]:
            self._file.truncate(state_dict["bytes"])
        elif length < state_dict["bytes"] and not self._discarded:
            # cut half a line off, so that the next line begins on its own
            path = Path(self._file.name)
            self._file.truncate(path.read_bytes().rfind(b"\n") + 1)
            logger.warning("%s has lost lines from before the checkpoint", path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._discarded:
            # synced before the files that mark the run as finished; `write` has reported a failing disk
            with suppress(OSError):
                os.fsync(self._file.fileno())
        self._file.close()
        self._notify(lambda listener: listener.close())
        if self._lost:
            logger.warning("%d lines of %s were lost", self._lost, self._file.name)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl` without damaged ones and a last one that a crash cut short."""
    return list(metrics_lines(path))


def metrics_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of `read_metrics` one by one, because a long run's would fill the memory; none without a file."""
    damaged = 0
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                if line.endswith(b"\n"):
                    yield dict(json.loads(line))
            except (ValueError, TypeError, RecursionError):
                damaged += 1
    if damaged:
        logger.warning("%d lines of %s are damaged and are left out", damaged, path)
