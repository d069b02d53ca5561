"""The losses measured: check against float64, peak memory, timed rounds; one line and one row per result.

    case ── gate ── one step each: memory ── interleaved rounds ── result

Stands on `harness.py`, `peers.py` and `gate.py`. A wrong result of contrastile has no speed; peers are shown with their
distance. A failure is named and costs its own rows only. Under torchrun the exchanges are compared with one process
that has the whole batch, and a failure on one rank leaves the contestant out on all; `--profile` shows the time of one
step on the first rank, from an idle device on, by its use: host, kinds of kernels, communication alone, and idle.
Features in host memory are compared with resident ones.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from contrastile.bench.gate import GATE_ROWS, SAMPLE_ROWS, Distance, Gate, Sample, placed, problem, step
from contrastile.bench.harness import Machine, Report, Row, Step, Table, Timing, sentence_of
from contrastile.bench.peers import ANY_NUMBER, DENSE, PEERS, Case, Contestant, rank_peers
from contrastile.bench.subjects import SUBJECTS
from contrastile.distributed import collectives
from contrastile.exchange.hierarchical import node_size
from contrastile.train.provenance import provenance

OURS, ONE_PROCESS = "contrastile", "one process"
# workspaces of contrastile on a GPU; rows with the first are not marked
WORKSPACE, SMALL_WORKSPACE, HOST_WORKSPACE = 2 * 2**30, 192 * 2**20, 2**30
# the workspace for `beside_bytes`: so small that all of it is used
LEAST_WORKSPACE = 32 * 2**20
# products before a step that is timed once
ONCE_PRODUCTS = 100
# the most rows of one process beside several ranks: a step of a million takes 12 s
MOST_ALONE = 2**19
# exchanges across ranks and the most rows of each; replicate does the work of all ranks on each, and hierarchical is
# measured where there are several nodes
EXCHANGES = {"gather": ANY_NUMBER, "ring": ANY_NUMBER, "hierarchical": ANY_NUMBER, "replicate": 2**15}

# the name of a step in a profile, and the operations of the host that it shows
STEP, HOST_OPERATIONS = "one step", 8
# kinds of kernels by parts of their names, the first that fits; all others are small
KINDS = {
    "communication": ("nccl",),
    "tiles": ("totals", "maxima", "gradient"),
    "products": ("gemm", "nvjet", "cutlass", "splitk"),
}
# name, and begin and end in microseconds
Kernel = tuple[str, float, float]

_START = (
    "loss 15 | b >8 | d >5 | dtype 9 | implementation 44 | ms >10.2f | least_ms=least ms >10.2f"
    " | effective_tflops=TFLOP/s >8.3g | ratio >6.3f"
)
_PEAK, _FAR = "peak_bytes=extra MiB >9,.0f", "loss_distance=loss >8.0e | gradient_distance=gradient >8.0e"
TABLE = Table(f"{_START} | times_dense=speed/dense >11.2f | {_PEAK} | {_FAR}")
RANK_TABLE = Table(
    f"{_START} | cost >6.3f | single_ms=single >10.2f | single_cost=cost >6.3f | {_PEAK} | beside_bytes=beside >9,.0f"
    f" | {_FAR} | scalar_distance=scale >8.0e"
)


def suite(device: torch.device, *, quick: bool, ranks: int = 1, host: bool = False) -> list[Case]:
    """Return the cases that are measured by default."""
    on_gpu, wide = device.type == "cuda", (WORKSPACE,)
    if host and on_gpu:
        return [Case("clip", b, 768, "bfloat16", (HOST_WORKSPACE,)) for b in ([2**18] if quick else [2**18, 2**22])]
    if ranks > 1 and on_gpu:
        clip = [Case("clip", b, 768, "bfloat16", wide) for b in ([2**16] if quick else [2**16, 2**17, 2**18, 2**20])]
        return clip if quick else [*clip, Case("siglip", 2**16, 768, "bfloat16", wide)]
    if ranks > 1:
        return [Case(loss, 512 if quick else 4096, 128, "float32") for loss in ("clip", "siglip")]
    if not on_gpu:
        sizes, features = ((512,), 32) if quick else ((4096, 8192), 128)
        return [Case(loss, b, features, "float32") for loss in ("clip", "siglip", "infonce") for b in sizes]
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
    """Return the plain formulas, contrastile with each workspace, and the peers that have this loss."""
    ours = [_contrastile(case.loss, device, workspace) for workspace in case.workspaces]
    return [entry for entry in (*DENSE, *ours, *(PEERS if peers else ())) if entry.offers(case)]


def _contrastile(
    loss: str, device: torch.device, workspace: int | None, name: str = "", most_rows: int = ANY_NUMBER, /, **how: Any
) -> Contestant:
    backend = "triton" if device.type == "cuda" else "eager"
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


def columns_of(case: Case, entry: Contestant, far: Distance, device: torch.device) -> Row:
    """Return the columns of a contestant in a case: its settings, its distances from float64, and its provenance."""
    marked = case.dtype == "float32" and case.precision != "highest"
    backend = f"{entry.backend}, precision {case.precision}" if marked else entry.backend
    return {
        "impl": entry.name, "loss": case.loss, "backend": backend, "implementation": f"{entry.name} ({backend})",
        "b": case.b, "d": case.d, "dtype": case.dtype, "world": entry.world,
        **{f"{name}_distance": distance for name, distance in vars(far).items()},
        **provenance(device, entry.package or entry.name),
    }  # fmt: skip


def rate_of(case: Case, entry: Contestant, timing: Timing) -> float:
    """Return operations per second and rank, of those that the loss needs at least."""
    return SUBJECTS[case.loss].operations * case.b**2 * case.d / entry.world / (timing.ms / 1e3)


def times_of(case: Case, entry: Contestant, timing: Timing, alone: Timing | None = None) -> Row:
    """Return the columns of time; alone: of one process with the whole batch, None where it did not fit."""
    rate = rate_of(case, entry, timing)
    return {
        "ms": round(timing.ms, 3), "least_ms": timing.least_ms, "single_ms": round(timing.single_ms, 3),
        "effective_tflops": round(rate / 1e12, 4), "ratio": round(rate / timing.product_rate, 4),
        "cost": alone and round(entry.world * timing.ms / alone.ms, 4),
        "single_cost": alone and round(entry.world * timing.single_ms / alone.single_ms, 4),
    }  # fmt: skip


@dataclass
class LossBench:
    """Measures cases on one process, or the exchanges between the ranks of `machine.world`."""

    machine: Machine
    peers: bool
    report: Report
    _own_group: Any = None

    def __post_init__(self) -> None:
        self._world = self.machine.world
        self._across = self._world.size > 1
        self._reference = ""
        if self._across:
            # every rank makes every group
            self._own_group = [dist.new_group([rank]) for rank in range(self._world.size)][self._world.rank]

    def head(self, *, host: bool = False) -> None:
        """Say the rows that are compared with float64, and the columns."""
        at_size = "" if host or self._across else f", and on {SAMPLE_ROWS} of all where there are more"
        ratio = "to the first resident loss" if host else "of torch.mm's rate"
        self.report.say(
            f"{OURS} is compared with float64 on {GATE_ROWS[self.machine.device.type]:,} rows{at_size}\n"
            f"ms: forward and backward; ratio: {ratio}; loss, gradient: relative distances from float64"
        )
        self.report.begin(RANK_TABLE if self._across else TABLE)

    def measure(self, cases: Iterable[Case]) -> None:
        """Measure every case; report each result as soon as it is there."""
        self.head()
        for case in cases:
            if case.b % (size := self._world.size):
                self.report.note(f"{case.b} rows are left out: they cannot be shared evenly by {size} ranks")
                continue
            if self._across and SUBJECTS[case.loss].of_neighbours:
                self.report.note(f"{case.loss} is left out across ranks: its queries have copies of other ranks' keys")
                continue
            with float32_products(case.precision):
                self._measure(case)

    def _measure(self, case: Case) -> None:
        """Measure a case: across ranks one workspace after the other, the peers with the first."""
        device, (first, *_) = self.machine.device, case.workspaces
        gate, leaves, dense_ms = Gate(case, device), problem(case, device), None
        leaves_of = {self._world.size: self.shard(leaves), 1: leaves}
        for workspaces in [(workspace,) for workspace in case.workspaces] if self._across else [case.workspaces]:
            entered = self.entries(replace(case, workspaces=workspaces), peers=self.peers and workspaces[0] == first)
            checked = [(entry, self._check(case, entry, gate, leaves_of[entry.world])) for entry in entered]
            results, alone = [(entry, row) for entry, row in checked if row is not None], None
            # exchanges race each other; a shared CPU drifts, and all must drift alike; a GPU's clocks follow each step
            together = [x for x in results if (x[0].name == OURS if self._across else device.type == "cpu")]
            self.machine.load()
            for group in filter(None, [together, *([x] for x in results if x not in together)]):
                steps = {entry.label: step_of(case, entry, leaves_of[entry.world]) for entry, _ in group}
                timings: dict[str, Timing] = {}
                with self.report.failures(_subject(case, group[0][0]), judged=group[0][0].name == OURS):
                    timings = self.machine.race(steps)
                for (entry, row), timing in zip(group, timings.values(), strict=False):
                    if self._across and entry.world == 1:
                        alone = timing
                    if entry.name == "dense" and dense_ms is None:
                        dense_ms = timing.ms
                        if entry.label != self._reference:
                            self._reference = entry.label
                            self.report.say(f"  speed/dense: over {entry.label}")
                    times = {"times_dense": dense_ms and dense_ms / timing.ms, **times_of(case, entry, timing, alone)}
                    self.report.result(row | times)

    def once(self, cases: Iterable[Case]) -> None:
        """Time one step of contrastile, for sizes where a step takes minutes; check it at its own size."""
        self.head()
        for case in cases:
            for entry in contestants(case, self.machine.device, peers=False):
                if entry.name == OURS:
                    with float32_products(case.precision), self.report.failures(_subject(case, entry), judged=True):
                        self._once(case, entry)

    def _once(self, case: Case, entry: Contestant) -> None:
        machine, loss = self.machine, entry.losses[case.loss]
        gate = Gate(case, machine.device)
        # compiles the kernels of the large step
        Sample(case.loss, gate.leaves).step(loss)
        distance = gate.distance(loss)
        sample = Sample(case.loss, problem(case, machine.device))
        product_seconds = machine.time(machine.product, ONCE_PRODUCTS)
        results: list[tuple[Tensor, ...]] = []
        seconds, peak = machine.time_and_peak(lambda: results.append(sample.step(loss)))
        at_size, cast = sample.distance(results[0])
        if not self._rejected(case, entry, gate.red(distance) or gate.red(at_size, cast)):
            ms = seconds * 1e3
            times = times_of(case, entry, Timing(ms, machine.product_operations / product_seconds, ms, ms))
            row = columns_of(case, entry, distance.worst(at_size), machine.device)
            self.report.result(row | times | {"peak_bytes": peak})

    def host(self, cases: Iterable[Case], limit: int) -> None:
        """Measure features in host memory beside resident ones; `limit` bytes of the device may be allocated.

        Several ranks are a ring, whose packets wait in host memory. The ratio of a row is that to the first resident
        loss.
        """
        machine, device, size = self.machine, self.machine.device, self._world.size
        self.head(host=True)
        first_rate, ring = 0.0, {"exchange": "ring"} if self._across else {}
        for case, name in product(cases, ("resident", "host")):
            label = f"{name}, ring of {size}" if self._across else name
            entry = _contrastile(case.loss, device, case.workspaces[0], label, device=device, **ring)
            entry, place = replace(entry, world=size), device if name == "resident" else "cpu"
            with (
                machine.limited(limit),
                float32_products(case.precision),
                self.report.failures(_subject(case, entry), judged=name == "host"),
            ):
                gate = Gate(case, device)
                results = step(entry.losses[case.loss], placed(self.shard(gate.leaves), place))
                distance = gate.distance(self._combined(tuple([x.to(device) for x in results])))
                if self._rejected(case, entry, self._world.failure(gate.red(distance))):
                    continue
                run = step_of(case, entry, placed(self.shard(problem(case, device, on_host=True)), place))
                peak = int(self._world.slowest(machine.peak(run)))
                memory = {"peak_bytes": peak, "limit_bytes": limit}
                timing = machine.race({name: run})[name]
                first_rate = first_rate or rate_of(case, entry, timing)
                ratio = {"ratio": round(rate_of(case, entry, timing) / first_rate, 4)}
                row = columns_of(case, entry, distance, device) | memory
                self.report.result(row | times_of(case, entry, timing) | ratio)

    def entries(self, case: Case, *, peers: bool) -> Iterator[Contestant]:
        """Yield the contestants; across ranks one process, the exchanges, and the peers of ranks."""
        device, size = self.machine.device, self._world.size
        if not self._across:
            yield from contestants(case, device, peers=peers)
            return
        # by NCCL_MAX_CTAS: kernels then run on fewer multiprocessors, so rows say it
        reserved = collectives.reserved_multiprocessors(None)
        for name, most_rows in {ONE_PROCESS: MOST_ALONE, **EXCHANGES}.items():
            if name == "hierarchical" and node_size(size) == size:
                continue
            how = {"group": self._own_group} if name == ONE_PROCESS else {"exchange": name}
            label = f"{name}, {reserved} multiprocessors for transfers" if reserved and name != ONE_PROCESS else name
            entry = _contrastile(case.loss, device, case.workspaces[0], label, most_rows, **how)
            frugal = _contrastile(case.loss, device, LEAST_WORKSPACE, name, **how).losses[case.loss]
            yield replace(entry, world=1 if name == ONE_PROCESS else size, frugal=frugal)
        others = rank_peers(self._world.rank, size) if peers else ()
        yield from (replace(entry, world=size) for entry in others if entry.offers(case))

    def shard(self, leaves: list[Tensor]) -> list[Tensor]:
        """This rank's rows of both sides, pinned where the sides are, and all else."""
        rank, size = self._world.rank, self._world.size
        if size == 1:
            return leaves
        shares = [side.detach().tensor_split(size)[rank].clone() for side in leaves[:2]]
        sides = (x.pin_memory() if side.is_pinned() else x for x, side in zip(shares, leaves[:2], strict=True))
        return [*(x.requires_grad_() for x in sides), *leaves[2:]]

    def _check(self, case: Case, entry: Contestant, gate: Gate, leaves: list[Tensor]) -> Row | None:
        """Run a contestant at both sizes; return its row without times, None if it cannot go on."""
        if reason := self._world.failure(entry.declines(case, self.machine)):
            self.report.note(f"{entry.label}: {reason}")
            return None
        loss, results, memory, trouble = entry.losses[case.loss], tuple[Tensor, ...](), (0, 0), None
        try:
            results = step(loss, gate.leaves if entry.world == 1 else self.shard(gate.leaves))
            memory = self._memory(entry, step_of(case, entry, leaves), leaves)
        except Exception as error:
            trouble = sentence_of(error)
        # before a collective that a failed rank would not join
        if self._rejected(case, entry, self._world.failure(trouble)):
            return None
        distance = gate.distance(results if entry.world == 1 else self._combined(results))
        if entry.name == OURS:
            red = gate.red(distance)
            if red is None and not self._across and case.b > len(gate.leaves[0]):
                sample = Sample(case.loss, leaves)
                at_size, cast = sample.distance(sample.step(loss))
                red, distance = gate.red(at_size, cast), distance.worst(at_size)
            if self._rejected(case, entry, self._world.failure(red)):
                return None
        peak, beside = (int(self._world.slowest(number)) for number in memory)
        return columns_of(case, entry, distance, self.machine.device) | {"peak_bytes": peak, "beside_bytes": beside}

    def _rejected(self, case: Case, entry: Contestant, reason: str | None) -> bool:
        if reason is not None:
            self.report.passed = self.report.passed and entry.name != OURS
            self.report.note(f"{_subject(case, entry)}: {reason}")
        return reason is not None

    def _memory(self, entry: Contestant, run: Step, leaves: list[Tensor]) -> tuple[int, int]:
        """The peak beside the features, and across ranks the bytes that are neither gradients nor workspace."""
        if not self._across:
            return self.machine.peak(run), 0
        # the first call loads libraries, whose memory is not the loss's
        run()
        if self.machine.device.type == "cpu":
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
        if size == 1:
            return results
        rows = [int(number) for number in self._world.numbers(len(dq))]
        gathered = [collectives.gather_rows(gradient, rows, None) / size for gradient in (dq, dk)]
        return (collectives.total(value, None) / size, *gathered, *(collectives.total(x, None) / size for x in scalars))


def step_of(case: Case, entry: Contestant, leaves: list[Tensor]) -> Step:
    return partial(step, entry.losses[case.loss], leaves)


def _subject(case: Case, entry: Contestant) -> str:
    return f"{entry.label}, {case}"


def profile(bench: LossBench, case: Case) -> None:
    """Say where a step's time goes, for one process with the whole batch and for every exchange."""
    leaves = problem(case, bench.machine.device)
    leaves_of = {bench.machine.world.size: bench.shard(leaves), 1: leaves}
    for one in bench.entries(case, peers=False):
        if one.declines(case, bench.machine) is not None:
            continue
        run = step_of(case, one, leaves_of[one.world])
        # compiles kernels, connects
        run()
        bench.report.say(f"{one.label}, {case}")
        for line in _step_lines(bench.machine, run):
            bench.report.say(f"    {line}")


def _step_lines(machine: Machine, run: Step) -> list[str]:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if machine.device.type == "cuda" else [])]
    first = machine.world.rank == 0
    with torch_profile(activities=activities, acc_events=True) if first else nullcontext() as profiled:
        machine.world.slowest(0.0)
        machine.wait()
        with record_function(STEP):
            run()
        machine.wait()
    machine.world.slowest(0.0)
    if profiled is None:
        return []
    events = profiled.events()
    (call,) = (event.time_range for event in events if event.name == STEP)
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == "CUDA" and event.time_range.start > call.start and not event.is_user_annotation
    ]
    costs = sorted(profiled.key_averages(), key=lambda cost: -cost.self_cpu_time_total)
    named = [f"{cost.key} {cost.self_cpu_time_total / 1e3:.2f} ({cost.count})" for cost in costs[:HOST_OPERATIONS]]
    host = f"host, ms until the call returns: {(call.end - call.start) / 1e3:.2f}; operations (calls): "
    return [*([device_line(kernels, call.start)] if kernels else []), host + ", ".join(named)]


def device_line(kernels: list[Kernel], begin: float) -> str:
    """Return the device's milliseconds by kind of kernel."""
    kinds: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        names = (kind for kind, parts in KINDS.items() if any(part in kernel[0].lower() for part in parts))
        kinds.setdefault(next(names, "small"), []).append(kernel)
    totals = [f"{kind} {sum(e - s for _, s, e in x) / 1e3:.2f} ({len(x)})" for kind, x in sorted(kinds.items())]
    busy, gaps = covered(kernels)
    working, _ = covered([kernel for kind, group in kinds.items() if kind != "communication" for kernel in group])
    first, last = min(start for _, start, _ in kernels), max(end for *_, end in kernels)
    idle = f"alone {(busy - working) / 1e3:.2f}, idle {(last - first - busy) / 1e3:.2f} in {gaps} gaps"
    return f"device, ms (kernels): {', '.join(totals)}; {idle}, before the first {(first - begin) / 1e3:.2f}"


def covered(kernels: list[Kernel]) -> tuple[float, int]:
    """Return the microseconds in which a kernel runs, and the number of gaps between them."""
    total, gaps, end = 0.0, -1, float("-inf")
    for begin, stop in sorted(times for _, *times in kernels):
        gaps += begin > end
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total, max(gaps, 0)
