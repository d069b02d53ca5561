"""File events of a command that kill it, tear what it wrote, or fail; and the commands that have to survive them.

python tests/faults.py [--tries 30] [--seed 0] [--only train encode torchrun] [--all]

A command runs undisturbed once, and its events below its folder are counted: every opening for writing, line of
metrics, syncing, renaming and removing. Then it runs again and again, each time with a fault at one event; afterwards
the same command, with --resume where it has that, must end with the bytes of the undisturbed one. Without --all a
random sample of the events is tried. The exit code is 1 where anything differs.
"""

import argparse
import csv
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from ranks import as_in_tests, free_port, fresh
from test_train_elsewhere import overrides
from tiny_runs import write_recipe
from tiny_texts import write_text_recipe

from contrastile.cli.main import main as contrastile
from contrastile.experiments.results import ORIGIN
from contrastile.train import log
from contrastile.train.log import MEASURED, read_metrics

# Python announces these before they happen; `write` and `fsync` are announced by the layer
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.truncate"}
# those that need room on the disk
GROWING = {"open", "os.mkdir", "write", "fsync"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# kill: SIGKILL. tear: a power cut, which leaves half of everything that was not synced. fail: this event is an error
# of the disk. full: from here on there is no room
FAULTS = ("kill", "tear", "fail", "full")
# seconds after which a process counts as hanging
PATIENCE = 120
# handed by torchrun to its ranks: the arguments of `carry_out`
LAUNCHED = "CONTRASTILE_FAULTS"


class Faults:
    """The layer between this process and the files below `folder`: counts events in `seen`, and acts at number `at`."""

    def __init__(self, folder: Path, at: int = 0, how: str = "kill") -> None:
        self.seen = 0
        self._folder, self._at, self._how = os.path.realpath(folder), at, how
        # the size up to which a file that was opened is on the disk
        self._synced: dict[str, int] = {}

    def install(self) -> None:
        """Watch this process until its end."""
        sync, write = os.fsync, log.Metrics.write

        def fsync(handle: int) -> None:
            path = os.readlink(f"/proc/self/fd/{handle}")
            self._event("fsync", path)
            sync(handle)
            if path in self._synced:
                self._synced[path] = os.path.getsize(path)

        def write_line(metrics: log.Metrics, *kind: Any, **values: Any) -> None:
            file: Any = metrics._file
            try:
                self._event("write", os.path.realpath(file.name))
            except OSError as failure:
                metrics._file = _Failing(file, failure)  # type: ignore[assignment]
            write(metrics, *kind, **values)
            metrics._file = file

        os.fsync, log.Metrics.write = fsync, write_line  # type: ignore[assignment]
        sys.addaudithook(self._audit)

    def _audit(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name not in EVENTS or (name == "open" and not arguments[2] & WRITING):
            return
        # of a removal inside of an open folder, the second argument is that folder
        inside = arguments[1] if name in ("os.remove", "os.rmdir") and arguments[1] >= 0 else None
        path = _absolute(arguments[0], inside)
        self._event(name, path)
        if not path.startswith(self._folder):
            return
        if name == "open":
            whole = arguments[2] & (os.O_TRUNC | os.O_EXCL)
            self._synced[path] = 0 if whole or not os.path.exists(path) else os.path.getsize(path)
        elif name == "os.rename" and path in self._synced:
            self._synced[_absolute(arguments[1], None)] = self._synced.pop(path)

    def _event(self, name: str, path: str) -> None:
        if not path.startswith(self._folder):
            return
        self.seen += 1
        if not self._at or self.seen < self._at:
            return
        if self._how == "full":
            if name in GROWING:
                raise OSError(errno.ENOSPC, "No space left on device", path)
        elif self.seen == self._at:
            self._act(path)

    def _act(self, path: str) -> None:
        if self._how == "fail":
            raise OSError(errno.EIO, "Input/output error", path)
        self._at = 0
        for other, synced in self._synced.items() if self._how == "tear" else ():
            if os.path.isfile(other) and (size := os.path.getsize(other)) > synced:
                os.truncate(other, synced + (size - synced) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(PATIENCE)


class _Failing:
    """An open file on a broken disk."""

    def __init__(self, file: Any, failure: OSError) -> None:
        self.name, self.fileno, self.truncate, self._failure = file.name, file.fileno, file.truncate, failure

    def write(self, _line: bytes) -> int:
        raise self._failure


def _absolute(path: Any, inside: int | None) -> str:
    """The path of an event; that of an open file is its handle."""
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    if inside is not None:
        return os.path.join(os.readlink(f"/proc/self/fd/{inside}"), os.fsdecode(path))
    return os.path.abspath(os.fsdecode(path))


def carry_out(
    rank: int, words: Sequence[str], folder: Path, at: int, how: str, said: Path, environment: dict[str, str]
) -> None:
    """Run a command in this process under the layer; its output goes to `said`, the number of its events beside it."""
    os.environ |= environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if environment else {})
    sys.stdout = sys.stderr = said.with_suffix(f".{rank}").open("w", buffering=1)
    # torch's own messages, and those of a process that ends without Python
    os.dup2(sys.stderr.fileno(), 2)
    as_in_tests()
    # of several ranks the first one writes
    faults = Faults(folder, at if rank == 0 else 0, how)
    faults.install()
    code = contrastile(words)
    said.with_suffix(f".{rank}.events").write_text(str(faults.seen))
    sys.stdout.flush()
    os._exit(code)


@dataclass
class Scenario:
    """A command: its words for a folder of results, what it leaves there, and a command that looks at it at any time.

    prepare: fills the folder before the command. ranks: processes that run it together. launched: by torchrun itself,
    whose exit code is 1 where a rank was killed.
    """

    words: Callable[[Path], list[str]]
    left: Callable[[Path], dict[str, Any]]
    prepare: Callable[[Path], object] = lambda folder: None
    look: Callable[[Path], list[str]] | None = None
    ranks: int = 1
    launched: bool = False
    events: int = 0
    expected: dict[str, Any] = field(default_factory=dict)
    seen: str = ""

    def run(self, folder: Path, words: list[str], at: int = 0, how: str = "kill") -> tuple[list[int], str, int]:
        """Exit codes, output, and the number of events."""
        said = folder.parent / "said.txt"
        environment = {}
        if self.ranks > 1 and words[0] == "train":
            environment = {"WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "localhost"}
            environment["MASTER_PORT"] = str(free_port())
        count = self.ranks if environment else 1
        if self.launched:
            return self._launch(words, folder, at, how, said)
        with fresh(count, carry_out, words, folder, at, how, said, environment) as processes:
            for process in processes:
                process.join(PATIENCE)
            codes = [process.exitcode if process.exitcode is not None else 99 for process in processes]
        return codes, *_outcome(said, count)

    def _launch(self, words: list[str], folder: Path, at: int, how: str, said: Path) -> tuple[list[int], str, int]:
        """The same under torchrun; its own exit code stands for all ranks."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        environment = {**os.environ, LAUNCHED: json.dumps([words, str(folder), at, how, str(said)])}
        done = subprocess.run([*launcher, __file__], capture_output=True, env=environment, check=False, timeout=600)
        killed = done.returncode == 1 and how in ("kill", "tear") and at > 0
        code = -signal.SIGKILL if killed else done.returncode
        return [code] * self.ranks, *_outcome(said, self.ranks)

    def begin(self, folder: Path) -> None:
        """Run undisturbed."""
        self.prepare(folder)
        codes, text, self.events = self.run(folder, self.words(folder))
        assert codes == [0] * self.ranks, text
        self.expected = self.left(folder)
        if self.look is not None:
            self.seen = self.run(folder, self.look(folder))[1]

    def survives(self, folder: Path, at: int, how: str) -> str:
        """Run with a fault and again without; the difference to the undisturbed run in words, empty for none."""
        self.prepare(folder)
        codes, text, _ = self.run(folder, self.words(folder), at, how)
        if "Traceback" in text or codes[0] not in ((-signal.SIGKILL,) if how in ("kill", "tear") else (0, 1, 2)):
            return f"exit codes {codes}: {text[-2000:]}"
        if self.look is not None:
            codes, text, _ = self.run(folder, self.look(folder))
            if codes != [2] and (codes, text) != ([0], self.seen):
                return f"what is there is shown as if it were whole: {text[-2000:]}"
        codes, text, _ = self.run(folder, self.words(folder))
        if codes != [0] * self.ranks:
            return f"again, exit codes {codes}: {text[-2000:]}"
        left, expected = self.left(folder), self.expected
        # lines that a broken disk has lost are reported, and no error
        lost = {"metrics"} if how in ("fail", "full") else set()
        return ", ".join(f"another {name}" for name in expected.keys() - lost if left.get(name) != expected[name])


def _outcome(said: Path, count: int) -> tuple[str, int]:
    """The output of so many ranks, and the number of events of the first."""
    text = "".join(said.with_suffix(f".{rank}").read_text() for rank in range(count))
    events = said.with_suffix(".0.events")
    seen = int(events.read_text()) if events.exists() else 0
    events.unlink(missing_ok=True)
    return text, seen


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "none"


def _without_times(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in MEASURED} for line in read_metrics(path)]


def of_run(folder: Path) -> dict[str, Any]:
    """Files and values left by the run below a folder, without times; a killed start may lie beside it as `tiny-1`."""
    run = folder / "tiny"
    names = sorted(path.name for path in run.iterdir())
    measured = [path for path in sorted(run.iterdir()) if path.suffix in (".trec", ".qrels")]
    files = {path.name: _checksum(path) for path in (*measured, run / "model.safetensors", run / "evaluation.json")}
    return {"files": names, "metrics": _without_times(run / "metrics.jsonl"), **files}


def of_index(folder: Path) -> dict[str, Any]:
    """The checksums of an index."""
    return {path.name: _checksum(path) for path in sorted((folder / "index").iterdir())}


# columns of a comparison that say when and by what it was made
UNEQUAL = ("seconds", *ORIGIN)


def of_comparison(folder: Path) -> dict[str, Any]:
    """A comparison's table and metrics without times."""
    path = folder / "tiny-batches"
    with (path / "compare.csv").open() as file:
        rows = [{key: value for key, value in row.items() if key not in UNEQUAL} for row in csv.DictReader(file)]
    lines = [_without_times(one) for one in sorted(path.glob("*.jsonl"))]
    return {"table": rows, "metrics": lines, "files": sorted(one.name for one in path.iterdir())}


SHORT = ("train.batch=16", "save.steps=2", "evaluate.every=0.5")


def _trained(runs: Path, recipe: Path, *words: str) -> list[str]:
    return ["train", str(recipe), *SHORT, *words, "--runs", str(runs), "--resume"]


def _finished(runs: Path, recipe: Path, *words: str) -> Path:
    """The folder of a finished run, which other commands read."""
    runs.mkdir()
    scenario = Scenario(lambda runs: _trained(runs, recipe, "train.examples=64", *words), of_run)
    scenario.begin(runs)
    return runs / "tiny"


def _pictures(folder: Path) -> Scenario:
    recipe, tests = write_recipe(folder), overrides(folder)
    return Scenario(lambda runs: _trained(runs, recipe, *tests, "train.examples=96"), of_run)


def _retriever(folder: Path) -> Scenario:
    recipe = write_text_recipe(folder)
    return Scenario(lambda runs: _trained(runs, recipe, "train.examples=96"), of_run)


def _encode(folder: Path) -> Scenario:
    """The index is searched after each fault: it must be refused, or answer as the whole one."""
    run = _finished(folder / "runs", write_text_recipe(folder))
    question = ["search", str(run), "where is the red fox", "-k", "3", "--verify", "--index"]
    return Scenario(
        lambda out: ["encode", str(run), "--shard", "50", "--out", str(out / "index")],
        of_index,
        look=lambda out: [*question, str(out / "index")],
    )


def _evaluate(folder: Path) -> Scenario:
    run = _finished(folder / "runs", write_recipe(folder), *overrides(folder))
    copy = lambda runs: shutil.copytree(run, runs / "tiny")  # noqa: E731
    return Scenario(lambda runs: ["evaluate", str(runs / "tiny")], of_run, prepare=copy)


def _compare(folder: Path) -> Scenario:
    words = ["compare", str(write_recipe(folder)), "--batches", "16", "--seeds", "2", "device=cpu"]
    words += ["train.examples=32", "evaluate.every=1.0", "--resume", "--runs"]
    return Scenario(lambda runs: [*words, str(runs)], of_comparison)


def _shard(folder: Path) -> Scenario:
    """Two ranks with a part of the weights each, of which the first one writes."""
    recipe, words = write_recipe(folder), ("train.parallel=shard", "train.examples=64", "train.timeout=20.0")
    return Scenario(lambda runs: _trained(runs, recipe, *words), of_run, ranks=2)


def _torchrun(folder: Path) -> Scenario:
    return replace(_shard(folder), launched=True)


SCENARIOS: dict[str, Callable[[Path], Scenario]] = {
    "train": _pictures,
    "retriever": _retriever,
    "encode": _encode,
    "evaluate": _evaluate,
    "compare": _compare,
    "shard": _shard,
    # starting it takes most of the time: by name, or with --all
    "torchrun": _torchrun,
}


def survey(names: Sequence[str], tries: int | None, seed: int) -> tuple[list[str], list[str]]:
    """The rows of the table, and the faults that were not survived. tries: of all commands; None: every event."""
    rows, lost, draw = [], [], random.Random(seed)
    for name in names:
        with tempfile.TemporaryDirectory() as temporary:
            folder, began = Path(temporary), time.monotonic()
            (folder / "data").mkdir()
            scenario = SCENARIOS[name](folder / "data")
            scenario.begin(_place(folder))
            cases = [(at, how) for how in FAULTS for at in range(1, scenario.events + 1)]
            if tries is not None:
                cases = draw.sample(cases, min(len(cases), -(-tries // len(names))))
            survived = 0
            for at, how in cases:
                difference = scenario.survives(_place(folder), at, how)
                survived += not difference
                if difference:
                    lost.append(f"{name}, {how} at event {at} of {scenario.events}: {difference}")
                    sys.stderr.write(f"{lost[-1]}\n")
            seconds = time.monotonic() - began
            rows.append(f"| {name} | {scenario.events} | {len(cases)} | {survived} | {seconds:.0f} |")
    return rows, lost


def _place(folder: Path) -> Path:
    """The empty folder of a try; its output lies beside it."""
    shutil.rmtree(folder / "try", ignore_errors=True)
    (folder / "try" / "runs").mkdir(parents=True)
    return folder / "try" / "runs"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=30, help="faults in all (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=[], help="some commands")
    parser.add_argument("--all", action="store_true", help="every event, with every fault")
    options = parser.parse_args()
    names = options.only or [name for name in SCENARIOS if options.all or name != "torchrun"]
    rows, lost = survey(names, None if options.all else options.tries, options.seed)
    table = ["| command | events | faults tried | survived | seconds |", "|---|---|---|---|---|", *rows]
    sys.stdout.write("\n".join(table) + "\n")
    return 1 if lost else 0


if __name__ == "__main__":
    if LAUNCHED in os.environ:
        its_words, *paths = json.loads(os.environ[LAUNCHED])
        its_folder, its_at, its_how, its_said = paths
        carry_out(int(os.environ["RANK"]), its_words, Path(its_folder), its_at, its_how, Path(its_said), {})
    # other processes import this file by its name
    sys.exit(import_module("faults").main())
