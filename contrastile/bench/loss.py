"""The losses measured: check against float64, peak memory, timed rounds; one line and one row per result.

    case ── gate ── one step each: memory ── interleaved rounds ── result

Stands on `harness.py`, `peers.py` and `gate.py`. A wrong result of contrastile has no speed; peers are shown with their
distance. A failure is named and costs its own rows only. Under torchrun the exchanges are compared with one process
that has the whole batch, and a failure on one rank leaves the contestant out on all.

`python -m contrastile.bench.loss QUESTION` prints the peak of one step on the CPU, measured in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from contrastile.bench.gate import SAMPLE_ROWS, SUBJECTS, Distance, Gate, Sample, gate_rows, problem, step
from contrastile.bench.harness import Machine, Report, Row, Step, Table, Timing, World, sentence_of
from contrastile.bench.peers import ANY_NUMBER, DENSE, PEERS, Case, Contestant, Loss, rank_peers
from contrastile.distributed import collectives
from contrastile.train.provenance import provenance

OURS = "contrastile"
# workspaces of contrastile on a GPU; rows with the first are not marked
WORKSPACE, SMALL_WORKSPACE = 2 * 2**30, 192 * 2**20
# the workspace for `beside`: so small that all of it is used
LEAST_WORKSPACE = 32 * 2**20
BACKENDS = {"cuda": "triton"}
# products before a step that is timed once
ONCE_PRODUCTS = 100
# exchanges across ranks and the most rows of each; replicate does the work of all ranks on each
EXCHANGES = {"gather": ANY_NUMBER, "ring": ANY_NUMBER, "replicate": 2**15}
ONE_PROCESS = "one process"

_NAMES = (("loss", "8"), ("b", ">8"), ("d", ">5"), ("dtype", "9"), ("implementation", "44"))
_TIMES = (("ms", ">10.2f"), ("least ms", ">10.2f"), ("TFLOP/s", ">8.3g"), ("ratio", ">6.3f"))
_DISTANCES = (("loss", ">8.0e"), ("gradient", ">8.0e"))
TABLE = Table(*_NAMES, *_TIMES, ("times dense", ">11.2f"), ("extra MiB", ">9,.0f"), *_DISTANCES)
EXCHANGE_TABLE = Table(
    *(*_NAMES, *_TIMES, ("cost", ">6.3f"), ("single", ">10.2f"), ("cost", ">6.3f")),
    *(("extra MiB", ">9,.0f"), ("beside", ">9,.0f"), *_DISTANCES, ("scale", ">8.0e")),
)


def suite(device: torch.device, *, quick: bool, ranks: int = 1) -> list[Case]:
    """Return the cases that are measured by default."""
    on_gpu, wide = device.type == "cuda", (WORKSPACE,)
    if ranks > 1 and on_gpu:
        clip = [Case("clip", b, 768, "bfloat16", wide) for b in ([2**16] if quick else [2**16, 2**17, 2**18])]
        return clip if quick else [*clip, Case("siglip", 2**16, 768, "bfloat16", wide)]
    if ranks > 1:
        return [Case(loss, 512 if quick else 4096, 128, "float32") for loss in ("clip", "siglip")]
    if not on_gpu:
        sizes, features = ((512,), 32) if quick else ((4096, 8192), 128)
        return [Case(loss, b, features, "float32") for loss in SUBJECTS for b in sizes]
    if quick:
        return [Case("clip", b, 512, "bfloat16", wide) for b in (8192, 32768)]
    both = (WORKSPACE, SMALL_WORKSPACE)
    return [
        *(Case("clip", b, d, "bfloat16", both) for b in (65536, 262144) for d in (512, 768, 1024)),
        Case("siglip", 65536, 768, "bfloat16", wide),
        *(Case("clip", 32768, 512, "float32", wide, precision) for precision in ("high", "highest")),
        *(Case("clip", b, 512, "bfloat16", wide) for b in (4096, 8192, 32768)),
    ]


def contestants(case: Case, device: torch.device, *, peers: bool) -> list[Contestant]:
    """Return the dense formulas, contrastile with each workspace, and the peers that have this loss."""
    ours = [_contrastile(case.loss, device, workspace) for workspace in case.workspaces]
    return [one for one in (*DENSE, *ours, *(PEERS if peers else ())) if one.offers(case)]


def _contrastile(
    loss: str, device: torch.device, workspace: int | None, name: str = "", most_rows: int = ANY_NUMBER, **how: Any
) -> Contestant:
    backend = BACKENDS.get(device.type, "eager")
    marked = "" if workspace in (None, WORKSPACE) else f", workspace {workspace // 2**20} MiB"
    module = SUBJECTS[loss].module(backend=backend, workspace=workspace, **how)
    return Contestant(OURS, f"{backend}{name and f', {name}'}{marked}", {loss: module}, most_rows=most_rows)


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Set the precision of torch's float32 products, and restore it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class Entry:
    """A contestant in a case, computing on `world` ranks together or on each alone.

    frugal: contrastile's loss with the least workspace, for `beside`.
    """

    case: Case
    contestant: Contestant
    world: int = 1
    frugal: Loss | None = None

    @property
    def ours(self) -> bool:
        return self.contestant.name == OURS

    @property
    def subject(self) -> str:
        return f"{self.contestant.label}, {self.case}"

    def step_of(self, leaves_of: Mapping[int, list[Tensor]]) -> Step:
        """Return the step on the leaves for this entry's number of ranks."""
        loss, leaves = self.contestant.losses[self.case.loss], leaves_of[self.world]
        return lambda: step(loss, leaves)


@dataclass(frozen=True)
class Result:
    """The measurements of an entry.

    beside: bytes of the peak without the gradients returned and the workspace. alone: the timing of one process with
    the whole batch; None where it did not fit.
    """

    entry: Entry
    distance: Distance
    peak_bytes: int
    timing: Timing
    beside: int = 0
    alone: Timing | None = None

    @property
    def rate(self) -> float:
        """Operations per second and rank, counting those that the loss needs at least."""
        case = self.entry.case
        operations = SUBJECTS[case.loss].operations * case.b**2 * case.d
        return operations / self.entry.world / (self.timing.ms / 1e3)

    @property
    def backend(self) -> str:
        case, backend = self.entry.case, self.entry.contestant.backend
        marked = case.dtype == "float32" and case.precision != "highest"
        return f"{backend}, precision {case.precision}" if marked else backend

    @property
    def costs(self) -> tuple[float | None, float | None]:
        """The ranks' time together over that of one process: of steps in a row, and of single steps."""
        if self.alone is None:
            return None, None
        world = self.entry.world
        return world * self.timing.ms / self.alone.ms, world * self.timing.single_ms / self.alone.single_ms

    def line(self, dense_ms: float | None = None, *, across: bool = False) -> str:
        """Return the line of `TABLE`, or `across` ranks of `EXCHANGE_TABLE`."""
        case, timing, far = self.entry.case, self.timing, self.distance
        name, (cost, single_cost) = f"{self.entry.contestant.name} ({self.backend})", self.costs
        start = (case.loss, case.b, case.d, case.dtype, name, timing.ms, timing.least_ms, self.rate / 1e12)
        ratio, peak, beside = self.rate / timing.product_rate, self.peak_bytes / 2**20, self.beside / 2**20
        if across:
            costs = (cost, timing.single_ms, single_cost)
            return EXCHANGE_TABLE.line(*start, ratio, *costs, peak, beside, far.loss, far.gradient, far.scalar)
        return TABLE.line(*start, ratio, dense_ms and dense_ms / timing.ms, peak, far.loss, far.gradient)

    def row(self, device: torch.device) -> Row:
        """Return the columns of a loss and of an exchange."""
        case, contestant = self.entry.case, self.entry.contestant
        cost, single_cost = (None if each is None else round(each, 4) for each in self.costs)
        return {
            "impl": contestant.name,
            "loss": case.loss,
            "backend": self.backend,
            "b": case.b,
            "d": case.d,
            "dtype": case.dtype,
            "world": self.entry.world,
            "ms": round(self.timing.ms, 3),
            "effective_tflops": round(self.rate / 1e12, 4),
            "ratio": round(self.rate / self.timing.product_rate, 4),
            "peak_bytes": self.peak_bytes,
            **provenance(device, contestant.package or contestant.name),
            "cost": cost,
            "single_ms": round(self.timing.single_ms, 3),
            "single_cost": single_cost,
            "beside_bytes": self.beside,
        }


@dataclass
class LossBench:
    """Measures cases on one process, or the exchanges between the ranks of `machine.world`."""

    machine: Machine
    peers: bool
    report: Report
    _alone: Any = None
    _reference: str = field(default="", init=False)

    def __post_init__(self) -> None:
        if self._across:
            # every rank makes every group
            self._alone = [dist.new_group([rank]) for rank in range(self._world.size)][self._world.rank]

    @property
    def _world(self) -> World:
        return self.machine.world

    @property
    def _across(self) -> bool:
        return self._world.size > 1

    def measure(self, cases: Iterable[Case]) -> None:
        """Measure every case; report each result as soon as it is there."""
        self.head()
        for case in cases:
            dense_ms: float | None = None
            with float32_products(case.precision):
                for result in self._results(case):
                    contestant = result.entry.contestant
                    if contestant.name == "dense" and dense_ms is None:
                        dense_ms = result.timing.ms
                        if contestant.label != self._reference:
                            self._reference = contestant.label
                            self.report.say(f"  times dense: over {contestant.label}")
                    self._report(result, dense_ms)

    def head(self) -> None:
        """Say the rows that are compared with float64, and the columns."""
        at_size = "" if self._across else f", and on {SAMPLE_ROWS} of all where there are more"
        self.report.say(
            f"{OURS} is compared with float64 on {gate_rows(self.machine.device):,} rows{at_size}\n"
            "ms: forward and backward; ratio: of torch.mm's rate; loss, gradient: relative distances from float64"
        )
        self.report.say((EXCHANGE_TABLE if self._across else TABLE).header())

    def once(self, case: Case) -> None:
        """Time one step of contrastile, for a size where a step takes minutes; check it at its own size."""
        for one in contestants(case, self.machine.device, peers=False):
            entry = Entry(case, one)
            with float32_products(case.precision), self.report.failures(entry.subject, judged=entry.ours):
                if entry.ours:
                    self._once(entry)

    def _once(self, entry: Entry) -> None:
        machine, case, loss = self.machine, entry.case, entry.contestant.losses[entry.case.loss]
        gate = Gate(case, machine.device)
        # compiles the kernels of the large step
        Sample(case.loss, gate.leaves).step(loss)
        distance = gate.distance(loss)
        sample = Sample(case.loss, problem(case, machine.device))
        product = machine.time(machine.product, ONCE_PRODUCTS)
        results: list[tuple[Tensor, ...]] = []
        seconds: list[float] = []
        peak = machine.peak(lambda: seconds.append(machine.time(lambda: results.append(sample.step(loss)))))
        at_size, cast = sample.distance(results[0])
        if not self._rejected(entry, gate.red(distance) or gate.red(at_size, cast)):
            ms = seconds[0] * 1e3
            timing = Timing(ms, machine.product_operations / product, ms, ms)
            self._report(Result(entry, distance.worst(at_size), peak, timing))

    def _report(self, result: Result, dense_ms: float | None = None) -> None:
        line = result.line(dense_ms, across=self._across)
        self.report.result(line, result.row(self.machine.device))

    def _results(self, case: Case) -> Iterator[Result]:
        """The results of a case: across ranks one workspace after the other, the peers with the first."""
        size = self._world.size
        if case.b % size:
            self.report.note(f"{case.b} rows are left out: they cannot be shared evenly by {size} ranks")
            return
        gate, leaves = Gate(case, self.machine.device), problem(case, self.machine.device)
        leaves_of = {size: self.shard(leaves), 1: leaves}
        for workspaces in [(workspace,) for workspace in case.workspaces] if self._across else [case.workspaces]:
            part, peers = replace(case, workspaces=workspaces), self.peers and workspaces[0] == case.workspaces[0]
            checked = [self._check(entry, gate, leaves_of[entry.world]) for entry in self.entries(part, peers=peers)]
            results, alone = [result for result in checked if result is not None], None
            self.machine.load()
            for turn in self._turns(results):
                steps = {result.entry.contestant.label: result.entry.step_of(leaves_of) for result in turn}
                timings: dict[str, Timing] = {}
                first = turn[0].entry
                with self.report.failures(first.subject, judged=first.ours):
                    timings = self.machine.race(steps)
                for result, timing in zip(turn, timings.values(), strict=False):
                    if self._across and result.entry.world == 1:
                        alone = timing
                    yield replace(result, timing=timing, alone=alone)

    def _turns(self, results: list[Result]) -> list[list[Result]]:
        """The results whose steps race together.

        A shared CPU drifts, and all must drift alike; a GPU's clocks follow each step. Exchanges race each other.
        """
        on_cpu = self.machine.device.type == "cpu"
        together = [result for result in results if (result.entry.ours if self._across else on_cpu)]
        singly = [[result] for result in results if result not in together]
        return [together, *singly] if together else singly

    def entries(self, case: Case, *, peers: bool) -> Iterator[Entry]:
        """Yield the contestants; across ranks one process, the exchanges, and the peers of ranks."""
        device, size = self.machine.device, self._world.size
        if not self._across:
            yield from (Entry(case, one) for one in contestants(case, device, peers=peers))
            return
        for name, most_rows in {ONE_PROCESS: ANY_NUMBER, **EXCHANGES}.items():
            how = {"group": self._alone} if name == ONE_PROCESS else {"exchange": name}
            one = _contrastile(case.loss, device, case.workspaces[0], name, most_rows, **how)
            frugal = _contrastile(case.loss, device, LEAST_WORKSPACE, name, **how).losses[case.loss]
            yield Entry(case, one, 1 if name == ONE_PROCESS else size, frugal)
        others = rank_peers(self._world.rank, size) if peers else ()
        yield from (Entry(case, one, size) for one in others if one.offers(case))

    def shard(self, leaves: list[Tensor]) -> list[Tensor]:
        """Return this rank's rows of both sides, and the scalars."""
        rank, size = self._world.rank, self._world.size
        sides = (side.detach().tensor_split(size)[rank].clone().requires_grad_() for side in leaves[:2])
        return [*sides, *leaves[2:]]

    def _check(self, entry: Entry, gate: Gate, leaves: list[Tensor]) -> Result | None:
        """Run an entry at both sizes; return its distance and memory without a timing, None if it cannot go on."""
        one, loss = entry.contestant, entry.contestant.losses[entry.case.loss]
        reason = self._world.failure(one.declines(entry.case, self.machine))
        if reason is not None:
            self.report.note(f"{one.label}: {reason}")
            return None
        few: tuple[Tensor, ...] = ()
        memory, trouble = (0, 0), None
        try:
            few = step(loss, gate.leaves if entry.world == 1 else self.shard(gate.leaves))
            memory = self._memory(entry, leaves)
        except Exception as error:
            trouble = sentence_of(error)
        # before a collective that a failed rank would not join
        if self._rejected(entry, self._world.failure(trouble)):
            return None
        distance = gate.distance(few if entry.world == 1 else self._combined(few))
        if entry.ours:
            red = gate.red(distance)
            if red is None and not self._across and entry.case.b > len(gate.leaves[0]):
                sample = Sample(entry.case.loss, leaves)
                at_size, cast = sample.distance(sample.step(loss))
                red, distance = gate.red(at_size, cast), distance.worst(at_size)
            if self._rejected(entry, self._world.failure(red)):
                return None
        peak, beside = (int(self._world.slowest(number)) for number in memory)
        return Result(entry, distance, peak, Timing(0.0, 0.0), beside)

    def _rejected(self, entry: Entry, reason: str | None) -> bool:
        if reason is not None:
            self.report.passed = self.report.passed and not entry.ours
            self.report.note(f"{entry.subject}: {reason}")
        return reason is not None

    def _memory(self, entry: Entry, leaves: list[Tensor]) -> tuple[int, int]:
        """The peak beside the features, and across ranks the part that is neither gradients nor workspace."""
        run = entry.step_of({entry.world: leaves})
        on_cpu = self.machine.device.type == "cpu"
        if not self._across:
            return peak_apart(entry.case, entry.contestant.label) if on_cpu else self.machine.peak(run), 0
        # the first call loads libraries, whose memory is not the loss's
        run()
        if on_cpu:
            return 0, 0
        peak, gradients, frugal = self.machine.peak(run), sum(leaf.nbytes for leaf in leaves), entry.frugal
        if frugal is None:
            return peak, peak - gradients
        step(frugal, leaves)
        return peak, self.machine.peak(lambda: step(frugal, leaves)) - gradients - LEAST_WORKSPACE

    def _combined(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The mean of the ranks' losses, and the gradients of the whole batch.

        A rank's features have W times the gradient of the whole, which a wrapper's mean divides by W.
        """
        size, (value, dq, dk, *scalars) = self._world.size, results
        rows = [int(number) for number in self._world.numbers(len(dq))]
        gathered = [collectives.gather_rows(gradient, rows, None) / size for gradient in (dq, dk)]
        return (collectives.total(value, None) / size, *gathered, *(collectives.total(x, None) / size for x in scalars))


def peak_apart(case: Case, label: str) -> int:
    """Return the peak of one step on the CPU, measured in a process that holds nothing else."""
    question = json.dumps({"case": asdict(case), "label": label})
    # freed memory goes back to the system, so that it does not count as room for the next tensor
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    command = [sys.executable, "-m", "contrastile.bench.loss", question]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().split("\n")[-1] or f"ended with code {done.returncode}")
    return int(done.stdout)


def _peak(question: str) -> int:
    """The answer to the question of `peak_apart`."""
    asked = json.loads(question)
    case = Case(**asked["case"] | {"workspaces": tuple(asked["case"]["workspaces"])})
    device = torch.device("cpu")
    loss = next(one for one in contestants(case, device, peers=True) if one.label == asked["label"]).losses[case.loss]
    with float32_products(case.precision):
        # the first call loads libraries
        step(loss, problem(replace(case, b=600), device))
        leaves = problem(case, device)
        return Machine.of(device, seconds=0).peak(lambda: step(loss, leaves))


if __name__ == "__main__":
    sys.stdout.write(f"{_peak(sys.argv[1])}\n")
