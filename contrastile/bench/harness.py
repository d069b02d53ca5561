"""Timing, memory, rows and tables: the parts that every measurement of the bench shares.

Stands below `loss.py` and `step.py`. A step is a function without arguments. A loss is timed beside a matrix product on
the same device in the same minute: a machine that is shared or throttled slows both, and their ratio stays.
"""

import argparse
import csv
import gc
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from contrastile._errors import invalid, written_to
from contrastile.distributed import collectives, consistency
from contrastile.distributed.neighbours import used_bytes
from contrastile.offload import free_memory
from contrastile.train.folder import WRITABLE, refused
from contrastile.train.memory import Weighed
from contrastile.train.provenance import ORIGIN, provenance
from contrastile.train.ranks import Ranks

Step = Callable[[], object]
Row = dict[str, Any]

# shorter steps are repeated to this many seconds, because the host's clock times them
LEAST_SECONDS = 0.01
# products between two runs of a step last as long as the step, up to this: a GPU's clocks follow its load
MOST_PRODUCT_SECONDS = 0.25
MOST_ROUNDS = 25
# untimed steps at first, at most: the fifth call of a kind may be the one that is captured
WARMUP_STEPS = 8
# seconds of a first and of a second step that may have compiled, and of a later one that may have been captured
COMPILATION = 60.0, 5.0, 1.0
# side and dtype of the product that times are compared with
PRODUCTS = {"cuda": (8192, torch.bfloat16), "cpu": (2048, torch.float32)}
# seconds of load after which a GPU's clocks are those of a training run
LOAD_SECONDS = {"cuda": 2.0}
# across ranks: fewest rounds; seconds and fewest steps timed in a row, because in training the host runs ahead of the
# device; and the seconds of a step beside which the start of a row is nothing
RANK_ROUNDS, ROW_SECONDS, ROW_STEPS, LONG_STEP = 3, 0.1, 3, 1.0
# the longest wait for another rank, which may be timing a slow peer
TIMEOUT = timedelta(minutes=10)

_LOSS = ("impl", "loss", "backend", "b", "d", "dtype")
_STEP = ("impl", "way", "model", "batch", "sub_batch")
_RATES = ("ms", "effective_tflops", "ratio", "peak_bytes")
# The columns of the results files, by kind of measurement. Every bench makes rows of these keys, and a file takes its
# own. impl: "contrastile", "dense" or a peer's name. backend, way: how it computes, and each setting that is not the
# bench's default. b, batch: rows or pairs of the global batch. world: ranks that share it. ms: median time of a step
# (across ranks: of steps in a row, on the slowest rank). effective_tflops: the operations that the loss needs at least,
# over the time, per rank. ratio: that over the product's rate; of host features, to resident ones. peak_bytes: of one
# rank; of a loss without its features, of a step with everything.
#   exchanges   cost: (ms x world) over that of one process with the whole batch, empty where that did not fit.
#               single_ms, single_cost: the same of a step that begins with an idle device. beside_bytes: of the peak,
#               without the gradients returned and the workspace
#   host        limit_bytes: of the device that the process may allocate
#   steps       retain: the argument of `encode`. inputs: on the "device", on the "host", or from a "pool" on the
#               device. ratio_to_plain: time per pair over the plain step's at the largest batch up to this one that
#               fits it; of compiled towers, over that of compiled ones
#   memory      of one rank of a world that is not there; ms: its arithmetic alone. planned_bytes: contrastile plan's
#   rank steps  bytes of the first rank. data: its inputs. loss: beside the features and their gradients. backbone:
#               weights, gradients and the activations of one sub-batch
COLUMNS = {
    "losses": (*_LOSS, "world", *_RATES, *ORIGIN),
    "exchanges": (*_LOSS, "world", *_RATES, *ORIGIN, "cost", "single_ms", "single_cost", "beside_bytes"),
    "host": (*_LOSS, *_RATES, "limit_bytes", *ORIGIN),
    "steps": (
        *(*_STEP, "retain", "inputs", "dtype", "world", "ms", "us_per_pair", "ratio_to_plain", "peak_bytes"),
        *ORIGIN,
    ),
    "rank steps": (
        *(*_STEP, "dtype", "world", "data_bytes", "loss_bytes", "backbone_bytes", "peak_bytes", "ms", "us_per_pair"),
        *ORIGIN,
    ),
    "memory": ("impl", "way", "world", "b", "d", "dtype", "ms", "peak_bytes", "planned_bytes", *ORIGIN),
}


class Table:
    """Lines of aligned cells from rows; bytes are shown in MiB.

    cells: "key=label format", with bars between them; the label may be left out where it is the row's key. A key alone
    is one of the `columns` that no line shows.

    >>> Table("name 6 | peak_bytes=MiB >4.0f | seconds").header()
    'name    MiB'
    """

    def __init__(self, cells: str) -> None:
        self.columns = [re.split(r"[= ]", cell)[0] for cell in cells.split(" | ")]
        shown = re.findall(r"(\w+)(?:=([^|]+))? (([<>]?\d+)[^\s|]*)", cells)
        self._cells = [(key, label or key, spec, width) for key, label, spec, width in shown]

    def header(self) -> str:
        return " ".join(f"{label:{width}}" for _, label, _, width in self._cells)

    def line(self, row: Row) -> str:
        """Return the line of a row; a value of None, and one that the row lacks, is left blank."""
        cells = []
        for key, _, spec, width in self._cells:
            value = row.get(key)
            value = value / 2**20 if value is not None and key.endswith("_bytes") else value
            cells.append(f"{'':{width}}" if value is None else f"{value:{spec}}")
        return " ".join(cells)


@contextmanager
def results_file(path: Path | None, columns: Sequence[str]) -> Iterator[Callable[[Row], None]]:
    """Open a results file and yield a function that appends a row, which is on disk when it returns.

    A column that the row lacks is left empty. The function does nothing where `path` is None.
    """
    if path is None:
        yield lambda _: None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    old = path.exists() and path.stat().st_size > 0
    if old and (header := path.read_text().splitlines()[0].split(",")) != [*columns]:
        raise invalid("csv", "have the columns of a results file", f"{path}: {', '.join(header)}", "Name another.")
    with refused("csv", WRITABLE, path):
        file = path.open("a", newline="")
    writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")

    def write(row: Row) -> None:
        with written_to(path):
            writer.writerow(row)
            file.flush()

    try:
        if not old:
            write({name: name for name in columns})
        yield write
    finally:
        # closing writes again what could not be written before
        with written_to(path):
            file.close()


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class World(Ranks):
    """The ranks that measure together; by default this process alone."""

    def numbers(self, number: float) -> list[float]:
        if self.size == 1:
            return [number]
        return [float(rank["number"]) for rank in consistency.agree(None, {"number": number}, free=["number"])]

    def slowest(self, seconds: float) -> float:
        return max(self.numbers(seconds))

    def failure(self, reason: str | None) -> str | None:
        """Return the first rank's reason against going on, named by its rank; None if no rank has one."""
        if self.size == 1:
            return reason
        statements = consistency.agree(None, {"reason": reason and reason[:200]}, free=["reason"])
        return next((f"rank {rank}: {x['reason']}" for rank, x in enumerate(statements) if x["reason"]), None)


ALONE = World()


@contextmanager
def joined(kind: str) -> Iterator[tuple[torch.device, World]]:
    """Join the process group that torchrun describes; yield this rank's device ("cpu" or "cuda") and the ranks."""
    ranks, on_gpu = Ranks.of_environment(kind), kind == "cuda"
    if ranks.size == 1:
        yield torch.device(kind), ALONE
        return
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT, device_id=device if on_gpu else None)
    try:
        yield device, World(ranks.rank, ranks.size)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a step, median and least over the rounds; the median rate of the products between its runs.

    single_ms: median of a step that begins with an idle device; differs from `ms` only across ranks.
    """

    ms: float
    product_rate: float
    least_ms: float = 0.0
    single_ms: float = 0.0


@dataclass(frozen=True)
class Machine:
    """A device, the seconds per step, the product that times are compared with, and the ranks that take part."""

    device: torch.device
    seconds: float = 0.0
    product: Step = lambda: None
    product_operations: int = 1
    world: World = ALONE

    @classmethod
    def of(cls, device: torch.device, seconds: float, world: World = ALONE) -> Self:
        side, dtype = PRODUCTS.get(device.type, PRODUCTS["cpu"])
        # random numbers: products of zeros draw less power and run faster
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        return cls(device, seconds, lambda: torch.mm(a, b), 2 * side**3, world)

    def free_bytes(self) -> int:
        """Return the free bytes, after garbage and torch's cache are given back."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return free_memory(self.device)[0]

    @contextmanager
    def limited(self, limit: int) -> Iterator[None]:
        """Let torch allocate `limit` bytes of a GPU."""
        if self.device.type != "cuda":
            yield
            return
        torch.cuda.empty_cache()
        # a device without an index is refused; the index None is the current device
        share, index = limit / torch.cuda.get_device_properties(self.device).total_memory, self.device.index
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), index)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, index)

    def load(self) -> None:
        """Run products until the device is in its steady state."""
        end = time.perf_counter() + LOAD_SECONDS.get(self.device.type, 0.0)
        while time.perf_counter() < end:
            self.time(self.product, 8)

    def race(self, steps: Mapping[str, Step]) -> dict[str, Timing]:
        """Time steps in interleaved rounds: each round runs every step once, after products of about its length."""
        self.free_bytes()
        across, run_seconds = self.world.size > 1, {name: self._warm_up(step) for name, step in steps.items()}
        repeats = {name: _repeats(seconds, across=across) for name, seconds in run_seconds.items()}
        product_seconds = self.time_together(self.product)
        round_seconds = sum(seconds * (repeats[name] + 1 if across else 1) for name, seconds in run_seconds.items())
        rounds = int(self.seconds * len(steps) / max(round_seconds, 1e-9))
        rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in steps}
        for _ in range(max(RANK_ROUNDS if across else 1, min(MOST_ROUNDS, rounds))):
            for name, step in steps.items():
                load = min(max(run_seconds[name], LEAST_SECONDS), MOST_PRODUCT_SECONDS)
                product = self.time(self.product, max(1, round(load / product_seconds)))
                seconds = self.time_together(step, repeats[name])
                single = self.time_together(step) if across and repeats[name] > 1 else seconds
                rows[name].append((seconds, product, single))
        timings = {}
        for name, several in rows.items():
            seconds, product, single = (statistics.median(column) for column in zip(*several, strict=True))
            least = min(several)[0]
            timings[name] = Timing(seconds * 1e3, self.product_operations / product, least * 1e3, single * 1e3)
        return timings

    def _warm_up(self, step: Step) -> float:
        """Least seconds of the first steps, which allocate, compile, and may be captured.

        The warm-up goes on while its time may have been that of compilation alone.
        """
        seconds = [self.time_together(step)]
        while len(seconds) < WARMUP_STEPS and seconds[-1] < COMPILATION[min(len(seconds), len(COMPILATION)) - 1]:
            seconds.append(self.time_together(step))
        # the last one may have been the capture; a number of steps in a row follows from this
        return min(seconds)

    def time_together(self, step: Step, repeats: int = 1) -> float:
        """Return the seconds of one of `repeats` steps in a row, begun by all ranks together, on the slowest one."""
        if self.world.size > 1:
            collectives.total(torch.zeros((), device=self.device), None)
        return self.world.slowest(self.time(step, repeats))

    def time(self, step: Step, repeats: int = 1, *, queued: bool = False) -> float:
        """Return the seconds of one of `repeats` steps in a row on this rank; of their launches alone if `queued`."""
        self.wait()
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        if not queued:
            self.wait()
        return (time.perf_counter() - start) / repeats

    def peak(self, step: Step) -> int:
        return self.time_and_peak(step)[1]

    def time_and_peak(self, step: Step) -> tuple[float, int]:
        """Return a step's seconds on this rank, and the most bytes of tensors beside those held before it.

        A ring's buffers between GPUs of one node count, although they stay between steps.
        """
        used_bytes()
        with Weighed(self.device) as weighed:
            seconds = self.time(step)
        return seconds, weighed.bytes + used_bytes()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _repeats(seconds: float, *, across: bool) -> int:
    if not across:
        return max(1, round(LEAST_SECONDS / seconds))
    return 1 if seconds >= LONG_STEP else max(ROW_STEPS, round(ROW_SECONDS / max(seconds, 1e-9)))


@dataclass
class Report:
    """The output of a bench: lines to `say`, rows to `write`, and whether all of contrastile's own passed.

    world: across ranks an exception is raised again, because the other ranks would wait for this one. origin: the
    columns of `ORIGIN` for rows that have none of their own.
    """

    say: Callable[[str], None]
    write: Callable[[Row], None] = lambda _: None
    world: World = ALONE
    passed: bool = True
    origin: Row = field(default_factory=dict)
    _table: Table = field(default_factory=lambda: Table(""))
    _notes: set[str] = field(default_factory=set)

    def begin(self, table: Table) -> None:
        """Say the header of the table that the next results are lines of."""
        self._table = table
        self.say(table.header())

    def result(self, row: Row, remark: str = "") -> None:
        """Say a row's line, with a remark behind it, and write the row."""
        self.say(f"{self._table.line(row).rstrip()}{remark}")
        self.write(self.origin | row)

    def note(self, sentence: str) -> None:
        """Say an indented line, once."""
        if sentence not in self._notes:
            self._notes.add(sentence)
            self.say(f"  {sentence}")

    @contextmanager
    def failures(self, subject: str, *, judged: bool, row: Row | None = None) -> Iterator[None]:
        """Report any exception in one line and go on; a peer may raise anything, and so may a full memory.

        row: reported without its numbers where memory runs out.
        """
        try:
            yield
        except Exception as error:
            if row is not None and isinstance(error, torch.OutOfMemoryError):
                self.result(row, " does not fit")
                return
            if self.world.size > 1:
                raise
            self.passed = self.passed and not judged
            self.note(f"{subject}: {sentence_of(error)}")


@contextmanager
def reporting(
    path: Path | None, columns: Sequence[str], kind: str, *packages: str
) -> Iterator[tuple[torch.device, Report]]:
    """Join the ranks, print device and versions; yield this rank's device, and a report.

    On the first rank it prints lines and appends rows to a file. kind: as in `joined`.
    """
    with joined(kind) as (device, world):
        first = world.rank == 0
        say = partial(print, flush=True) if first else lambda _: None
        with results_file(path if first else None, columns) as write:
            ranks, origin = f"{world.size} ranks on " if world.size > 1 else "", provenance(device, *packages)
            say(f"{ranks}{origin['chip']}; {origin['versions']}")
            if warning := busy(device):
                say(warning)
            yield device, Report(say, write, world, origin=origin)
        if path:
            say(f"rows: {path}")


@contextmanager
def script(
    doc: str | None, table: Table, *packages: str, seconds: float = 0.0,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[tuple[argparse.Namespace, Machine, Report]]:  # fmt: skip
    """Parse a script's `--csv` and its own arguments; yield them, the GPU or else the CPU, and a report.

    Under torchrun the ranks join, and the first one reports.

    table: of the lines; its columns, then those of `ORIGIN`, are those of the file. seconds: of the machine, beside
    whose products times are taken, unless `--seconds` is one of the arguments; 0 is for scripts that need no product.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write rows there, behind those that it has")
    for name, words in (options or {}).items():
        parser.add_argument(name, **words)
    arguments, kind = parser.parse_args(), "cuda" if torch.cuda.is_available() else "cpu"
    with reporting(arguments.csv, (*table.columns, *ORIGIN), kind, *packages) as (device, report):
        report.begin(table)
        seconds = vars(arguments).get("seconds", seconds)
        yield arguments, Machine.of(device, seconds, report.world) if seconds else Machine(device), report


def sentence_of(error: Exception) -> str:
    """Return the type and the first line of an exception."""
    return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"


def not_installed(module: str) -> str | None:
    """Return the reason against a peer whose module is missing; None where it is installed or needs none."""
    return None if not module or find_spec(module) else "is not installed"


def busy(device: torch.device) -> str | None:
    """Return a warning where other programs keep the CPU busy: threads of a step wait for each other many times."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if device.type != "cpu" or load < cores / 2:
        return None
    return f"other programs want {load:.1f} of {cores} cores: times will be long, and ratios wrong"
