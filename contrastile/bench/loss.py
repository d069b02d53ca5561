"""The losses measured: what is asked, whether it is right, how long it takes, and the table of it.

    case ── gate: distance to float64 ── one run each: memory ── timed runs ── a line, a row

Stands on `measure.py`, `peers.py` and `gate.py`. A result that is wrong has no speed: where the gate is red, on few
rows or at the case's own size, contrastile leaves the case. Peers are shown with their distance, for the reader to
judge. What fails or does not fit is said by name and costs its own rows only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from contrastile.bench.gate import SAMPLE_ROWS, SUBJECTS, Distance, Gate, Sample, gate_rows, problem, step
from contrastile.bench.measure import Ledger, Machine, Row, Step, Timing
from contrastile.bench.peers import DENSE, PEERS, Case, Contestant
from contrastile.train.provenance import provenance

OURS = "contrastile"
# contrastile's workspaces on a GPU; a row at the first of them is not marked
WORKSPACE, SMALL_WORKSPACE = 2 * 2**30, 192 * 2**20
BACKENDS = {"cuda": "triton"}
# products before a step that is timed once
ONCE_PRODUCTS = 100


def suite(device: torch.device, *, quick: bool) -> list[Case]:
    """What is measured where nothing particular is asked for."""
    if device.type != "cuda":
        sizes, features = ((512,), 32) if quick else ((4096, 8192), 128)
        return [Case(loss, b, features, "float32") for loss in SUBJECTS for b in sizes]
    if quick:
        return [Case("clip", b, 512, "bfloat16", (WORKSPACE,)) for b in (8192, 32768)]
    both = (WORKSPACE, SMALL_WORKSPACE)
    return [
        *(Case("clip", b, d, "bfloat16", both) for b in (65536, 262144) for d in (512, 768, 1024)),
        Case("siglip", 65536, 768, "bfloat16", (WORKSPACE,)),
        *(Case("clip", 32768, 512, "float32", (WORKSPACE,), precision) for precision in ("high", "highest")),
        *(Case("clip", b, 512, "bfloat16", (WORKSPACE,)) for b in (4096, 8192, 32768)),
    ]


def contestants(case: Case, device: torch.device, *, peers: bool) -> list[Contestant]:
    """The dense formula, contrastile with each workspace, and the peers that have this loss."""
    ours = [_contrastile(case.loss, device, workspace) for workspace in case.workspaces]
    others = [*DENSE, *ours, *(PEERS if peers else ())]
    return [one for one in others if one.offers(case)]


def _contrastile(loss: str, device: torch.device, workspace: int | None) -> Contestant:
    backend = BACKENDS.get(device.type, "eager")
    module = SUBJECTS[loss].ours(backend=backend, workspace=workspace)
    return Contestant(OURS, backend + marked(workspace), {loss: module})


def marked(workspace: int | None) -> str:
    """What a way's name says of its workspace, where it is not the bench's standard."""
    return "" if workspace in (None, WORKSPACE) else f", workspace {workspace // 2**20} MiB"


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """torch's float32 products in a precision, and then as they were."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class Line:
    """A result."""

    case: Case
    contestant: Contestant
    distance: Distance
    peak_bytes: int
    timing: Timing
    world: int = 1

    @property
    def rate(self) -> float:
        """Operations per second and rank, of those that the loss cannot do without."""
        operations = SUBJECTS[self.case.loss].operations * self.case.b**2 * self.case.d
        return operations / self.world / (self.timing.ms / 1e3)

    @property
    def backend(self) -> str:
        marked = self.case.dtype == "float32" and self.case.precision != "highest"
        return f"{self.contestant.backend}, precision {self.case.precision}" if marked else self.contestant.backend

    def text(self, dense_ms: float | None) -> str:
        case, timing = self.case, self.timing
        times = "" if dense_ms is None else f"{dense_ms / timing.ms:.2f}"
        return (
            f"{case.loss:8} {case.b:>8} {case.d:>5} {case.dtype:9} {f'{self.contestant.name} ({self.backend})':44} "
            f"{timing.ms:>10.2f} {self.rate / 1e12:>8.3g} {self.rate / timing.product_rate:>6.3f} {times:>11} "
            f"{self.peak_bytes / 2**20:>9,.0f} {self.distance.loss:>8.0e} {self.distance.gradient:>8.0e}"
        )

    def row(self, machine: Machine) -> Row:
        return Row(
            impl=self.contestant.name,
            loss=self.case.loss,
            backend=self.backend,
            b=self.case.b,
            d=self.case.d,
            dtype=self.case.dtype,
            world=self.world,
            ms=round(self.timing.ms, 3),
            effective_tflops=round(self.rate / 1e12, 4),
            ratio=round(self.rate / self.timing.product_rate, 4),
            peak_bytes=self.peak_bytes,
            **provenance(machine.device, self.contestant.package or self.contestant.name),
        )


HEADER = (
    f"{'loss':8} {'b':>8} {'d':>5} {'dtype':9} {'implementation':44} {'ms':>10} {'TFLOP/s':>8} {'ratio':>6} "
    f"{'times dense':>11} {'extra MiB':>9} {'loss':>8} {'gradient':>8}"
)


@dataclass(frozen=True)
class _Entry:
    """Someone who takes part in a case."""

    contestant: Contestant
    step: Step
    distance: Distance
    peak_bytes: int


@dataclass
class Bench:
    """Where results go, and whether all of contrastile's own came through."""

    machine: Machine
    peers: bool
    say: Callable[[str], None]
    ledger: Ledger | None = None
    right: bool = True
    _said: set[str] = field(default_factory=set)
    _reference: str = ""

    def measure(self, cases: Iterable[Case]) -> None:
        """Every case: a line and a row for each result, as soon as it is there."""
        self.head()
        for case in cases:
            with float32_products(case.precision):
                dense_ms: float | None = None
                for line in self._results(case):
                    if line.contestant.name == "dense" and dense_ms is None:
                        dense_ms = line.timing.ms
                        self._refer(line.contestant.label)
                    self._keep(line, dense_ms)

    def head(self) -> None:
        """What was checked, and what the columns are."""
        rows = gate_rows(self.machine.device)
        self.say(
            f"{OURS} is compared with float64 on {rows:,} rows, and on {SAMPLE_ROWS} of all where there are more\n"
            "ms: forward and backward; ratio: of torch.mm's rate; loss, gradient: relative distances from float64"
        )
        self.say(HEADER)

    def once(self, case: Case) -> None:
        """A case so large that one step must do: timed, its memory taken, and checked at its own size."""
        with float32_products(case.precision):
            for one in contestants(case, self.machine.device, peers=False):
                if one.name == OURS:
                    with self._spared(one, case):
                        self._once(one, case)

    def _once(self, one: Contestant, case: Case) -> None:
        gate, loss = Gate(case, self.machine.device), one.losses[case.loss]
        # this compiles what the large step needs
        Sample(case.loss, gate.leaves).found(loss)
        distance = gate.distance(loss)
        sample = Sample(case.loss, problem(case, self.machine.device))
        product = self.machine.time(self.machine.product, ONCE_PRODUCTS)
        found: list[tuple[Tensor, ...]] = []
        taken: list[float] = []
        peak = self.machine.peak(
            lambda: taken.append(self.machine.time(lambda: found.append(sample.found(loss)), 1)),
        )
        at_size, cast = sample.distance(found[0])
        red = gate.red(distance) or gate.red(at_size, cast)
        if red is not None:
            self._reject(one, case, red)
            return
        timing = Timing(taken[0] * 1e3, self.machine.product_operations / product)
        self._keep(Line(case, one, distance.worst(at_size), peak, timing), None)

    def _keep(self, line: Line, dense_ms: float | None) -> None:
        self.say(line.text(dense_ms))
        if self.ledger is not None:
            self.ledger.write(line.row(self.machine))

    def _refer(self, label: str) -> None:
        """Says whose time the multiples are of, whenever that changes."""
        if label != self._reference:
            self._reference = label
            self.say(f"  times dense: over {label}")

    def _results(self, case: Case) -> Iterator[Line]:
        gate = Gate(case, self.machine.device)
        leaves = problem(case, self.machine.device)
        entered: dict[str, _Entry] = {}
        for one in contestants(case, self.machine.device, peers=self.peers):
            with self._spared(one, case):
                entry = self._enter(one, case, gate, leaves)
                if entry is not None:
                    entered[one.label] = entry
        self.machine.load()
        for turn in self.machine.turns(list(entered)):
            timings: dict[str, Timing] = {}
            with self._spared(entered[turn[0]].contestant, case):
                timings = self.machine.race({label: entered[label].step for label in turn})
            for label, timing in timings.items():
                entry = entered[label]
                yield Line(case, entry.contestant, entry.distance, entry.peak_bytes, timing)

    def _enter(self, one: Contestant, case: Case, gate: Gate, leaves: list[Tensor]) -> _Entry | None:
        reason = one.declines(case, self.machine)
        if reason is not None:
            self._note(f"{one.label}: {reason}")
            return None
        loss = one.losses[case.loss]
        distance = gate.distance(loss)
        if one.name == OURS:
            red = gate.red(distance)
            if red is None and case.b > len(gate.leaves[0]):
                sample = Sample(case.loss, leaves)
                at_size, cast = sample.distance(sample.found(loss))
                red, distance = gate.red(at_size, cast), distance.worst(at_size)
            if red is not None:
                self._reject(one, case, red)
                return None

        def run() -> object:
            return step(loss, leaves)

        apart = self.machine.device.type == "cpu"
        peak = peak_apart(case, one.label) if apart else self.machine.peak(run)
        return _Entry(one, run, distance, peak)

    def _reject(self, one: Contestant, case: Case, red: str) -> None:
        self.right = False
        self._note(f"{one.label}, {case.loss}, {case.b} x {case.d}, {case.dtype} {case.precision}: {red}")

    @contextmanager
    def _spared(self, one: Contestant, case: Case) -> Iterator[None]:
        """What fails is said by name, and the others go on: a peer may raise anything, and so may a full memory."""
        try:
            yield
        except Exception as error:
            self.right = self.right and one.name != OURS
            sentence = str(error).strip().split("\n")[0]
            self._note(f"{one.label}, {case.loss}, {case.b} x {case.d}: {type(error).__name__}: {sentence}")

    def _note(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self.say(f"  {sentence}")


def peak_apart(case: Case, label: str) -> int:
    """The peak of one step in a process of its own, where nothing else has left room or taken any."""
    question = json.dumps({"case": asdict(case), "label": label})
    # memory that was freed goes back to the system, and is not counted as room for what follows
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    command = [sys.executable, "-m", "contrastile.bench.peak", question]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().split("\n")[-1] or f"ended with code {done.returncode}")
    return int(done.stdout)


def peak_here(question: str) -> int:
    """The answer to `peak_apart`'s question, on the CPU."""
    asked = json.loads(question)
    asked["case"]["workspaces"] = tuple(asked["case"]["workspaces"])
    case, device = Case(**asked["case"]), torch.device("cpu")
    one = next(one for one in contestants(case, device, peers=True) if one.label == asked["label"])
    loss = one.losses[case.loss]
    with float32_products(case.precision):
        # libraries are loaded at the first call
        step(loss, problem(replace(case, b=600), device))
        leaves = problem(case, device)
        return Machine.of(device, seconds=0).peak(lambda: step(loss, leaves))
