"""The losses across ranks, under torchrun: what it costs that the columns come from elsewhere.

    case ── gate: what all ranks make of it together, against float64 ── memory ── timed runs ── a line, a row

Beside `loss.py`, whose cases, gate and rows it shares. Every exchange is timed in turns with one process that has the
whole batch: `cost` is (time × ranks) over that process's time, and 1 means that communication costs nothing; of steps
in a row, as training has them, and of a `single` step, which begins with nothing under way. What a rank finds wrong, or
has no room for, all leave out. Memory is measured on GPUs; `beside` is what is left of it without
the gradients returned and the workspace, in a step of its own with a workspace so small that all of it is used.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from contrastile import agreement, comm
from contrastile.bench.gate import SUBJECTS, Distance, Gate, problem, step
from contrastile.bench.loss import BACKENDS, OURS, WORKSPACE, Line, float32_products, marked
from contrastile.bench.measure import (
    LEAST_SECONDS,
    MOST_PRODUCT_SECONDS,
    MOST_ROUNDS,
    Ledger,
    Machine,
    Row,
    Step,
    Timing,
)
from contrastile.bench.peers import Case, Contestant, Loss, rank_peers
from contrastile.train.ranks import Ranks

# replicate does the work of all ranks on each
EXCHANGES = {"gather": 2**62, "ring": 2**62, "replicate": 2**15}
ALONE = "one process"
# the workspace in whose step `beside` is measured
LEAST_WORKSPACE = 32 * 2**20
# for how long a rank waits for another, which may be timing a slow peer
TIMEOUT = timedelta(minutes=10)
LEAST_ROUNDS = 3
# seconds and steps of a row at least: as in training, the host may run ahead of the device
IN_A_ROW, LEAST_IN_A_ROW = 0.1, 3
# seconds of a step that is its own row: what happens once between two is nothing beside it
LONG = 1.0

HEADER = (
    f"{'loss':8} {'b':>8} {'d':>5} {'dtype':9} {'implementation':44} {'ms':>10} {'TFLOP/s':>8} {'ratio':>6} "
    f"{'cost':>6} {'single':>10} {'cost':>6} {'extra MiB':>9} {'beside':>9} {'loss':>8} {'gradient':>8} {'scale':>8}"
)


def suite(device: torch.device, *, quick: bool) -> list[Case]:
    """What is measured where nothing particular is asked for."""
    if device.type != "cuda":
        return [Case(loss, 512 if quick else 4096, 128, "float32") for loss in ("clip", "siglip")]
    if quick:
        return [Case("clip", 2**16, 768, "bfloat16", (WORKSPACE,))]
    clip = [Case("clip", b, 768, "bfloat16", (WORKSPACE,)) for b in (2**16, 2**17, 2**18)]
    return [*clip, Case("siglip", 2**16, 768, "bfloat16", (WORKSPACE,))]


@contextmanager
def grouped(device: torch.device) -> Iterator[None]:
    """The default group, for as long as the bench runs."""
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        timeout=TIMEOUT,
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_gpu else None,
    )
    yield
    dist.destroy_process_group()


@dataclass(frozen=True)
class _Way:
    """Someone's way of computing a case, on all ranks or, as one process, on each."""

    contestant: Contestant
    world: int
    # contrastile's, with the least workspace
    frugal: Loss | None = None


@dataclass(frozen=True)
class _Entry:
    """A way that is right and has room."""

    way: _Way
    step: Step
    distance: Distance
    peak_bytes: int
    # of the peak, without the gradients returned and the workspace
    beside: int


@dataclass(frozen=True)
class ExchangeRow(Row):
    """One line of a file about exchanges: `ms` is of steps in a row.

    cost: (ms × world) over that of one process with the whole batch; None where that one had no room. single_ms,
    single_cost: the same of a step that begins with nothing under way. beside_bytes: of the peak, without the gradients
    returned and the workspace.
    """

    cost: float | None
    single_ms: float
    single_cost: float | None
    beside_bytes: int


@dataclass(frozen=True)
class _Result:
    """What a way took."""

    line: Line
    single_ms: float
    beside: int
    # one process's milliseconds, in a row and single; None where it had no room
    alone: tuple[float, float] | None

    @property
    def costs(self) -> tuple[float | None, float | None]:
        if self.alone is None:
            return None, None
        world, (running, single) = self.line.world, self.alone
        return world * self.line.timing.ms / running, world * self.single_ms / single

    def row(self, machine: Machine) -> ExchangeRow:
        cost, single = (None if each is None else round(each, 4) for each in self.costs)
        return ExchangeRow(
            **asdict(self.line.row(machine)),
            cost=cost,
            single_ms=round(self.single_ms, 3),
            single_cost=single,
            beside_bytes=self.beside,
        )

    def text(self) -> str:
        line = self.line
        name = f"{line.contestant.name} ({line.backend})"
        cost, single = ("" if each is None else f"{each:.3f}" for each in self.costs)
        return (
            f"{line.case.loss:8} {line.case.b:>8} {line.case.d:>5} {line.case.dtype:9} {name:44} "
            f"{line.timing.ms:>10.2f} {line.rate / 1e12:>8.3g} {line.rate / line.timing.product_rate:>6.3f} "
            f"{cost:>6} {self.single_ms:>10.2f} {single:>6} "
            f"{line.peak_bytes / 2**20:>9,.0f} {self.beside / 2**20:>9,.0f} "
            f"{line.distance.loss:>8.0e} {line.distance.gradient:>8.0e} {line.distance.scalar:>8.0e}"
        )


@dataclass
class RankBench:
    """Where results go, and whether all of contrastile's own came through; the same on all ranks."""

    machine: Machine
    ranks: Ranks
    peers: bool
    say: Callable[[str], None]
    ledger: Ledger | None = None
    right: bool = True
    _said: set[str] = field(default_factory=set)
    _alone: Any = None

    def __post_init__(self) -> None:
        # all ranks make all groups
        groups = [dist.new_group([rank]) for rank in range(self.ranks.size)]
        self._alone = groups[self.ranks.rank]

    def measure(self, cases: Iterable[Case]) -> None:
        """Every case: a line and a row for each result, as soon as it is there."""
        self.say(HEADER)
        for case in cases:
            for workspace in case.workspaces:
                # peers have none, and are measured once
                peers = self.peers and workspace == case.workspaces[0]
                with float32_products(case.precision):
                    for result in self._results(replace(case, workspaces=(workspace,)), peers):
                        self.say(result.text())
                        if self.ledger is not None:
                            self.ledger.write(result.row(self.machine))

    def _results(self, case: Case, peers: bool) -> Iterator[_Result]:
        if case.b % self.ranks.size:
            self._note(f"{case.b} rows are left out: they cannot be shared evenly by {self.ranks.size} ranks")
            return
        gate, whole = Gate(case, self.machine.device), problem(case, self.machine.device)
        share = _part(whole, self.ranks)
        entered: dict[str, _Entry] = {}
        for way in self._ways(case, peers):
            entry = self._enter(way, case, gate, whole if way.world == 1 else share)
            if entry is not None:
                entered[way.contestant.label] = entry
        self.machine.load()
        ours = [label for label, entry in entered.items() if entry.way.contestant.name == OURS]
        alone: tuple[float, float] | None = None
        for turn in [ours, *([label] for label in entered if label not in ours)]:
            timings = self._race({label: entered[label].step for label in turn})
            for label, (timing, single_ms) in timings.items():
                entry = entered[label]
                one, world = entry.way.contestant, entry.way.world
                alone = (timing.ms, single_ms) if world == 1 else alone
                line = Line(case, one, entry.distance, entry.peak_bytes, timing, world)
                yield _Result(line, single_ms, entry.beside, alone)

    def _ways(self, case: Case, peers: bool) -> list[_Way]:
        backend = BACKENDS.get(self.machine.device.type, "eager")
        make, (workspace,) = SUBJECTS[case.loss].ours, case.workspaces

        def ours(name: str, world: int, most_rows: int, **how: Any) -> _Way:
            loss = make(backend=backend, workspace=workspace, **how)
            called = f"{backend}, {name}{marked(workspace)}"
            frugal = make(backend=backend, workspace=LEAST_WORKSPACE, **how)
            return _Way(Contestant(OURS, called, {case.loss: loss}, most_rows=most_rows), world, frugal)

        size = self.ranks.size
        across = [ours(name, size, most_rows, exchange=name) for name, most_rows in EXCHANGES.items()]
        others = [_Way(one, size) for one in (rank_peers(self.ranks.rank, size) if peers else ())]
        ways = [ours(ALONE, 1, 2**62, group=self._alone), *across, *others]
        return [way for way in ways if way.contestant.offers(case)]

    def _enter(self, way: _Way, case: Case, gate: Gate, leaves: list[Tensor]) -> _Entry | None:
        one, alone = way.contestant, way.world == 1
        loss = one.losses[case.loss]
        if not self._all_are_well(one, case, one.declines(case, self.machine)):
            return None
        small = gate.leaves if alone else _part(gate.leaves, self.ranks)
        try:
            found, trouble, memory = step(loss, small), None, (0, 0)
            # what is loaded at the first call is not the loss's
            step(loss, leaves)
            if self.machine.device.type == "cuda":
                memory = self._memory(loss, way.frugal, leaves)
        except Exception as error:
            trouble = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        # before anything is put together that a rank does not have
        well = self._all_are_well(one, case, trouble)
        if well:
            distance = gate.distance(found if alone else self._together(found))
            well = self._all_are_well(one, case, gate.red(distance) if one.name == OURS else None)
        if not well:
            self.right = self.right and one.name != OURS
            return None
        peak, beside = (int(self._most(number)) for number in memory)
        return _Entry(way, lambda: step(loss, leaves), distance, peak, beside)

    def _memory(self, loss: Loss, frugal: Loss | None, leaves: list[Tensor]) -> tuple[int, int]:
        """This rank's peak beside its features, and what of it is neither gradients returned nor workspace."""
        peak, gradients = self.machine.peak(lambda: step(loss, leaves)), sum(leaf.nbytes for leaf in leaves)
        if frugal is None:
            return peak, peak - gradients
        step(frugal, leaves)
        return peak, self.machine.peak(lambda: step(frugal, leaves)) - gradients - LEAST_WORKSPACE

    def _together(self, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The mean of the ranks' losses, and their gradients as a wrapper that takes the mean has them.

        A rank's features have W times the gradient of the whole, which that mean divides by W again.
        """
        size = self.ranks.size
        value, dq, dk, *scalars = found
        sizes = [int(rows) for rows in self._all(len(dq))]
        rows = [comm.gather_rows(gradient, sizes, None) / size for gradient in (dq, dk)]
        return (comm.total(value, None) / size, *rows, *(comm.total(x, None) / size for x in scalars))

    def _all_are_well(self, one: Contestant, case: Case, trouble: str | None) -> bool:
        """Whether no rank has any trouble; the first one's is said."""
        trouble = None if trouble is None else trouble[:200]
        stated = agreement.agree(None, {"trouble": trouble}, free=["trouble"])
        found = [f"rank {rank}: {said['trouble']}" for rank, said in enumerate(stated) if said["trouble"] is not None]
        if found:
            missing = "installed" in found[0]
            self._note(f"{one.label}{'' if missing else f', {case.loss}, {case.b} x {case.d}'}: {found[0]}")
        return not found

    def _race(self, steps: Mapping[str, Step]) -> dict[str, tuple[Timing, float]]:
        """A step's time in a row of them, and the milliseconds of one by itself.

        All in turn, a product before each row. What is timed ends with its slowest rank.
        """
        machine = self.machine
        once = {name: self._most(machine.time(run, 1)) for name, run in steps.items()}
        repeats = {name: _in_a_row(seconds) for name, seconds in once.items()}
        each = sum(seconds * (repeats[name] + 1) for name, seconds in once.items())
        rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(machine.seconds * len(once) / max(each, 1e-9))))
        product_once = self._most(machine.time(machine.product, 1))
        taken: dict[str, list[float]] = {name: [] for name in steps}
        singles: dict[str, list[float]] = {name: [] for name in steps}
        products: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, run in steps.items():
                load = min(max(once[name], LEAST_SECONDS), MOST_PRODUCT_SECONDS)
                products[name].append(machine.time(machine.product, max(1, round(load / product_once))))
                taken[name].append(self._timed(run, repeats[name]))
                singles[name].append(taken[name][-1] if repeats[name] == 1 else self._timed(run, 1))
        return {
            name: (
                Timing(statistics.median(taken[name]) * 1e3, machine.product_operations / statistics.median(rates)),
                statistics.median(singles[name]) * 1e3,
            )
            for name, rates in products.items()
        }

    def _timed(self, run: Step, repeats: int) -> float:
        """Seconds of a step of so many in a row, which all ranks begin together, on the slowest."""
        comm.total(torch.zeros((), device=self.machine.device), None)
        return self._most(self.machine.time(run, repeats))

    def _most(self, here: float) -> float:
        """The largest of the ranks' numbers."""
        return max(self._all(here))

    def _all(self, here: float) -> list[float]:
        return [float(said["here"]) for said in agreement.agree(None, {"here": here}, free=["here"])]

    def _note(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self.say(f"  {sentence}")


def _in_a_row(once: float) -> int:
    """How many steps of so many seconds are timed as one row."""
    return 1 if once >= LONG else max(LEAST_IN_A_ROW, round(IN_A_ROW / max(once, 1e-9)))


def _part(leaves: list[Tensor], ranks: Ranks) -> list[Tensor]:
    """A rank's rows of both sides, and the scalars."""
    sides = [side.detach().tensor_split(ranks.size)[ranks.rank].clone().requires_grad_() for side in leaves[:2]]
    return [*sides, *leaves[2:]]
