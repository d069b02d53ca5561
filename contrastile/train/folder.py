"""A run's folder: where it is, who may write in it, and how a file gets there whole.

`runs/<name>` is always the newest run of its name. An earlier one is moved aside to `runs/<name>-1`, `-2`, ...: nothing
is ever overwritten or lost. Every file but `metrics.jsonl` is written beside its place and renamed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import file_digest
from itertools import count
from pathlib import Path
from typing import Any

from contrastile._wrong import wrong

logger = logging.getLogger("contrastile")

RECIPE = "recipe.toml"
METRICS = "metrics.jsonl"
WEIGHTS = "model.safetensors"
FACTS = "run.json"
EVALUATION = "evaluation.json"
GALLERIES, QUESTIONS = "galleries.json", "questions.json"
REPORT = "report.html"
CHECKPOINTS = "checkpoints"
# of the folder that `contrastile encode` writes
INDEX = "index.json"


class RunFolder:
    """The folder at `path`, which exists."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @contextmanager
    def written_whole(self, name: str) -> Iterator[Path]:
        """A path to write to; on leaving without an error it becomes the file `name`, in one step."""
        temporary = self.path / f".{name}.part"
        try:
            yield temporary
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            os.replace(temporary, self.path / name)
        finally:
            temporary.unlink(missing_ok=True)

    def write_text(self, name: str, text: str) -> None:
        """The file `name` holds `text`."""
        with self.written_whole(name) as path:
            path.write_text(text, encoding="utf-8")

    def write_json(self, name: str, value: Any) -> None:
        """The file `name` holds `value` as JSON, readable by people too."""
        self.write_text(name, json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> Any:
        """What `write_json` wrote."""
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except ValueError as error:
            raise wrong(name, "be JSON", f'"{self.path / name}": {error}', "The file is damaged; restore it.") from None

    def checksum(self, name: str) -> str:
        """The SHA-256 of the file `name`."""
        with (self.path / name).open("rb") as file:
            return file_digest(file, "sha256").hexdigest()


def finished_run(path: str | Path) -> RunFolder:
    """The folder of a run that has kept its weights, or a sentence that says what is missing."""
    folder = Path(path)
    missing = [name for name in (RECIPE, WEIGHTS, FACTS) if not (folder / name).is_file()]
    if missing:
        remedy = "Train one first: contrastile train recipes/glyphs.toml"
        if RECIPE not in missing and (folder / METRICS).is_file():
            remedy = f"It has begun: contrastile train {folder / RECIPE} --runs {folder.parent} --resume"
        raise wrong("run", f"be the folder of a run, with {', '.join(missing)}", f'"{folder}"', remedy)
    return RunFolder(folder)


@contextmanager
def new_run(runs: str | Path, name: str) -> Iterator[RunFolder]:
    """An empty `runs/<name>`, held by this process alone; an earlier run of that name is moved aside first."""
    path = Path(runs) / name
    make_folder("--runs", runs)
    if path.exists():
        with _held(path):
            aside = path.rename(free_name(path))
        logger.warning("the earlier %s is now %s", path, aside)
    path.mkdir()
    with _held(path):
        yield RunFolder(path)


def make_folder(asked: str, path: str | Path) -> None:
    """The folder that `asked` names is there, its parents too, and can be written to; else it is named in an error.

    Every verb calls this, or `make_way`, before anything is loaded: what was computed must have a place to go.
    """
    _made(asked, "a folder, or where one can be made", path, Path(path))
    if not os.access(path, os.W_OK | os.X_OK):
        raise wrong(asked, "be a folder that can be written to", f'"{path}"', "Name another one.")


def make_way(asked: str, path: str | Path) -> None:
    """The file that `asked` names can be written: its folder is there, and no folder has its name."""
    path = Path(path)
    _made(asked, "a file, or where one can be made", path, path.parent)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise wrong(asked, "be a file that can be written to", f'"{path}"', "Name another one.")


def _made(asked: str, what: str, path: str | Path, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise wrong(asked, f"be {what}", f'"{path}"', f"{error.strerror}.") from None


def begun_run(runs: str | Path, name: str) -> RunFolder | None:
    """The folder of a run that has begun, to be resumed; None where there is none."""
    path = Path(runs) / name
    return RunFolder(path) if (path / RECIPE).is_file() else None


@contextmanager
def resumed_run(folder: RunFolder) -> Iterator[RunFolder]:
    """The same folder, held by this process alone; what a killed process left half written is removed."""
    with _held(folder.path):
        for left in folder.path.glob(".*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield folder


def free_name(path: Path) -> Path:
    """The first of `<path>-1`, `<path>-2`, ... that does not exist."""
    return next(free for number in count(1) if not (free := path.with_name(f"{path.name}-{number}")).exists())


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """The folder's lock, which the system drops with the process; a sentence where another process has it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            remedy = "Wait for that run to end, or give this one another name: name=another"
            raise wrong("name", "be that of no run under way", f'"{path.name}"', remedy) from None
        yield
    finally:
        os.close(handle)
