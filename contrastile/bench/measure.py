"""Time, memory, the facts of a machine, and the file that results go to.

The ground of the bench: it knows steps, which are functions without arguments, and nothing of losses. Every time is
taken beside a matrix product on the same device in the same minute: a machine shared or throttled slows both, and the
ratio of the two stays what it is.
"""

from __future__ import annotations

import csv
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from contrastile._wrong import written_to, wrong
from contrastile.train.memory import PeakMemory

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Step = Callable[[], object]

# what is shorter is repeated until it takes this long: the clock is read from the host
LEAST_SECONDS = 0.01
# products between two runs of a step last as long as the step, up to this: at first they would run at its clocks
MOST_PRODUCT_SECONDS = 0.25
MOST_ROUNDS = 25
# steps before the first that counts, unless they take this long
FIRST_STEPS, MOST_FIRST_SECONDS = 5, 1.0
# side and dtype of the product that times are compared with
PRODUCTS = {"cuda": (8192, torch.bfloat16), "cpu": (2048, torch.float32)}
# clocks fall under load, and only then is a time one that a training run would see
LOAD_SECONDS = {"cuda": 2.0}


@dataclass(frozen=True)
class Timing:
    """Medians over rounds: milliseconds of a step, and operations per second of the products between its runs."""

    ms: float
    product_rate: float


@dataclass(frozen=True)
class Machine:
    """A device, the product that measures it, and how many seconds a step may be measured for."""

    device: torch.device
    seconds: float
    product: Step
    product_operations: int

    @classmethod
    def of(cls, device: torch.device, seconds: float) -> Machine:
        side, dtype = PRODUCTS.get(device.type, PRODUCTS["cpu"])
        # random numbers: products of zeros draw less power and run faster
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        return cls(device, seconds, lambda: torch.mm(a, b), 2 * side**3)

    def turns(self, names: list[str]) -> list[list[str]]:
        """Which steps race together. A shared CPU drifts, and all must drift alike; a GPU's clocks follow each step."""
        if self.device.type == "cpu":
            return [names] if names else []
        return [[name] for name in names]

    def room(self) -> int:
        """Bytes that can be had, once what torch keeps for later is given back."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info(self.device)[0]
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def load(self) -> None:
        """Products for as long as the device needs to reach its steady state."""
        end = time.perf_counter() + LOAD_SECONDS.get(self.device.type, 0.0)
        while time.perf_counter() < end:
            self.time(self.product, 8)

    def race(self, steps: Mapping[str, Step]) -> dict[str, Timing]:
        """Each step's time, all steps in turn, a product before each."""
        self.room()
        once = {name: self._pace(step) for name, step in steps.items()}
        rounds = max(1, min(MOST_ROUNDS, int(self.seconds * len(once) / sum(once.values()))))
        repeats = {name: max(1, round(LEAST_SECONDS / seconds)) for name, seconds in once.items()}
        product_once = self.time(self.product, 1)
        products_between = {
            name: max(1, round(min(max(seconds, LEAST_SECONDS), MOST_PRODUCT_SECONDS) / product_once))
            for name, seconds in once.items()
        }
        taken: dict[str, list[float]] = {name: [] for name in steps}
        products: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                products[name].append(self.time(self.product, products_between[name]))
                taken[name].append(self.time(step, repeats[name]))
        return {
            name: Timing(
                ms=statistics.median(taken[name]) * 1e3,
                product_rate=self.product_operations / statistics.median(products[name]),
            )
            for name in steps
        }

    def _pace(self, step: Step) -> float:
        """Seconds of a step that has found its pace: the first ones allocate, compile, and may be captured."""
        taken: list[float] = []
        while len(taken) < FIRST_STEPS and sum(taken) < MOST_FIRST_SECONDS:
            taken.append(self.time(step, 1))
        return taken[-1]

    def peak(self, step: Step) -> int:
        """Bytes that a step takes at most, beside what was there before it."""
        memory = PeakMemory(self.device)
        before = memory.start()
        step()
        self._wait()
        return memory.bytes() - before

    def time(self, step: Step, repeats: int) -> float:
        """Seconds of one of `repeats` steps in a row."""
        self._wait()
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        self._wait()
        return (time.perf_counter() - start) / repeats

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Row:
    """One line of a results file.

    impl: `contrastile`, `dense`, or the peer's name. backend: how it computes, and what was not left at the bench's
    standard. b: rows of the global batch. world: ranks that share it. effective_tflops: the operations that the loss
    needs at least, over the time, for each rank. ratio: that to the product measured in the same run. peak_bytes: of
    one rank, beside the features.
    """

    impl: str
    loss: str
    backend: str
    b: int
    d: int
    dtype: str
    world: int
    ms: float
    effective_tflops: float
    ratio: float
    peak_bytes: int
    chip: str
    versions: str
    date: str
    commit: str


class Ledger:
    """A CSV file of rows. Rows go behind those that are there, and each is on disk before the next is measured.

    kind: the rows' dataclass.
    """

    def __init__(self, path: Path, kind: type[DataclassInstance] = Row) -> None:
        self._path = path
        header = [field.name for field in fields(kind)]
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists() or path.stat().st_size == 0
        if not new:
            with path.open(newline="") as file:
                found = next(csv.reader(file))
            if found != header:
                raise wrong("csv", "have the columns of a results file", f"{path}: {', '.join(found)}", "Name another.")
        self._file = path.open("a", newline="")
        self._writer = csv.DictWriter(self._file, header, lineterminator="\n")
        if new:
            self._writer.writeheader()

    def write(self, row: DataclassInstance) -> None:
        with written_to(self._path):
            self._writer.writerow(asdict(row))
            self._file.flush()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # what is not yet on the disk is tried once more
        with written_to(self._path):
            self._file.close()


def busy(device: torch.device) -> str | None:
    """What to know before a CPU is timed that has other work: threads of a step wait for each other many times over."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if device.type != "cpu" or load < cores / 2:
        return None
    return f"other programs keep {load:.1f} of {cores} cores busy: times will be long, and ratios wrong"
