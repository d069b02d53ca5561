"""A run's folder: its name, its lock, and files that are written whole or not at all.

`runs/<name>` is always the newest run of its name. An earlier one is renamed to `runs/<name>-1`, `-2`, ..., so that
nothing is overwritten. Every file but `metrics.jsonl` is written under a temporary name and renamed.
"""

import errno
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from contrastile._errors import invalid, logger, written_to
from contrastile.data.files import checksum, new_file

RECIPE = "recipe.toml"
METRICS = "metrics.jsonl"
WEIGHTS = "model.safetensors"
METADATA = "run.json"
EVALUATION = "evaluation.json"
GALLERIES, QUESTIONS = "galleries.json", "questions.json"
REPORT = "report.html"
CHECKPOINTS = "checkpoints"
RUN_ID = "run.id"
# the recipes that are installed with the package, which the command line knows by their names
PACKAGED = Path(__file__).parent.parent / "recipes"
# a folder that another process has made, renamed, or filled meanwhile
TAKEN = (errno.EEXIST, errno.ENOENT, errno.ENOTEMPTY)
WRITABLE = "a file that can be written to"
# in a folder that `contrastile encode` wrote
INDEX = "index.json"


def recipe_names() -> list[str]:
    return sorted(path.stem for path in PACKAGED.glob("*.toml"))


class RunFolder:
    """An existing folder. `locked`: the file status of a folder that this process has locked, to notice its move."""

    def __init__(self, path: Path, locked: os.stat_result | None = None) -> None:
        self._path, self._locked = path, locked

    @property
    def path(self) -> Path:
        """The path, after `check_in_place`. All files of the folder are read and written by this property."""
        self.check_in_place()
        return self._path

    def check_in_place(self) -> None:
        """Raise ValueError where a locked folder was moved, so that no other folder of its name is written to."""
        if self._locked is None:
            return
        try:
            got = "" if os.path.samestat(self._locked, self._path.stat()) else "another one"
        except FileNotFoundError:
            got = "none"
        if got:
            remedy = "Move its own back there and go on with --resume."
            raise invalid("run", "find its folder where it began", f'{got} at "{self._path}"', remedy)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @contextmanager
    def written_whole(self, name: str) -> Iterator[Path]:
        """A temporary path to write to, renamed to `name` on leaving without an error."""
        temporary = self.path / f".{name}.part"
        new_file(temporary)
        try:
            yield temporary
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            os.replace(temporary, self.path / name)
        finally:
            temporary.unlink(missing_ok=True)

    def write_text(self, name: str, text: str) -> None:
        with written_to(self.path / name), self.written_whole(name) as path:
            path.write_text(text, encoding="utf-8")

    def write_json(self, name: str, value: Any) -> None:
        self.write_text(name, json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> Any:
        """The value of a JSON file; raises ValueError where the file is damaged."""
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except ValueError as error:
            got = f'"{self.path / name}": {error}'
            raise invalid(name, "be JSON", got, "The file is damaged; restore it.") from None

    def checksum(self, name: str) -> str:
        return checksum(self / name)


def finished_run(path: str | Path) -> RunFolder:
    """The folder of a run that has saved its weights; raises ValueError with the names of missing files."""
    folder = Path(path)
    missing = [name for name in (RECIPE, WEIGHTS, METADATA) if not (folder / name).is_file()]
    if missing:
        # a run has its recipe's name
        recipe = folder.name if folder.name in recipe_names() else "glyphs"
        remedy = f"Train one first: contrastile train {recipe}"
        if RECIPE not in missing and (folder / METRICS).is_file():
            remedy = f"It has begun: contrastile train {folder / RECIPE} --runs {folder.parent} --resume"
        raise invalid("run", f"be the folder of a run, with {', '.join(missing)}", f'"{folder}"', remedy)
    return RunFolder(folder)


@contextmanager
def new_run(runs: str | Path, name: str) -> Iterator[RunFolder]:
    """A new folder `runs/<name>`, locked by this process; an earlier run of that name is renamed first."""
    path = Path(runs) / name
    make_folder("--runs", runs)
    with ExitStack() as at_end:
        try:
            if path.exists():
                with _locked(path):
                    aside = path.rename(free_name(path))
                logger.warning("the earlier %s is now %s", path, aside)
            path.mkdir()
            status = at_end.enter_context(_locked(path))
        except OSError as error:
            if error.errno not in TAKEN:
                raise
            # another run of this name begins at this moment
            raise _under_way(path) from None
        yield RunFolder(path, status)


def make_folder(option: str, path: str | Path) -> None:
    """Make the folder that `option` names; raises ValueError where it cannot be written to.

    Every verb calls this, or `make_way`, before anything is loaded, so that every result can be written at the end.
    """
    with refused(option, "a folder, or where one can be made", path):
        Path(path).mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        raise invalid(option, "be a folder that can be written to", f'"{path}"', "Name another one.")


def make_way(option: str, path: str | Path) -> None:
    """Make the folder of the file that `option` names; raises ValueError where the file cannot be written."""
    path = Path(path)
    with refused(option, "a file, or where one can be made", path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with refused(option, WRITABLE, path):
        writable = not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)
    if not writable:
        raise invalid(option, f"be {WRITABLE}", f'"{path}"', "Name another one.")


@contextmanager
def refused(option: str, rule: str, path: str | Path) -> Iterator[None]:
    """Raise an operating system's error as a ValueError that names the option, except that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise invalid(option, f"be {rule}", f'"{path}"', f"{error.strerror}.") from None


def begun_run(runs: str | Path, name: str) -> RunFolder | None:
    """The folder of a run to resume; None where there is none."""
    path = Path(runs) / name
    return RunFolder(path) if (path / RECIPE).is_file() else None


@contextmanager
def resumed_run(folder: RunFolder) -> Iterator[RunFolder]:
    """The same folder, locked by this process; files that a killed process had not written whole are removed."""
    with _locked(folder.path) as status:
        for remains in filter(Path.is_file, folder.path.glob(".*.part")):
            remains.unlink()
        yield RunFolder(folder.path, status)


def run_id(folder: RunFolder) -> str:
    """The id of a run under way, drawn once."""
    if not (folder / RUN_ID).is_file():
        folder.write_text(RUN_ID, f"{secrets.token_hex(8)}\n")
    return (folder / RUN_ID).read_text(encoding="utf-8").strip()


def free_name(path: Path) -> Path:
    """The first of `<path>-1`, `<path>-2`, ... that does not exist."""
    return next(free for number in count(1) if not (free := path.with_name(f"{path.name}-{number}")).exists())


def _locked(path: Path) -> AbstractContextManager[os.stat_result]:
    return one_writer(path, _under_way(path))


def _under_way(path: Path) -> ValueError:
    remedy = "Wait for that run to end, or give this one another name: name=another"
    return invalid("name", "be that of no run under way", f'"{path.name}"', remedy)


@contextmanager
def one_writer(path: Path, refusal: ValueError) -> Iterator[os.stat_result]:
    """Lock a folder, which the system unlocks when the process ends; its file status.

    Raises `refusal` where another process holds the lock, or moved the folder between its opening and its locking.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = os.path.samestat(os.fstat(handle), path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_there = False
        if not is_there:
            raise refusal
        yield os.fstat(handle)
    finally:
        os.close(handle)
