"""Whole training steps measured: towers forward, loss, towers backward, in every way of `ways.py`.

    model ── gate: gradients against plain ones ── batch by batch, way by way: time, memory ── a line, a row

Stands on `harness.py` and `ways.py`. A judged way with wrong gradients has no speed. A step that does not fit into
memory is a row without numbers. The optimizer is left out by default: it costs all ways the same. Under torchrun losses
and wrappers are compared, with the columns of table 4 of Cheng et al. 2024: data, loss, backbone, and the peak of the
whole step.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from contrastile.bench.gate import problem, worst
from contrastile.bench.harness import ALONE, Machine, Report, Row, Table, World, not_installed
from contrastile.bench.peers import Case
from contrastile.bench.towers import Pairs, Towers
from contrastile.bench.ways import COMPILED, WAYS, Task, Way
from contrastile.gradcache.encode import encode
from contrastile.losses.reference import dense_clip
from contrastile.modules import ClipLoss
from contrastile.train.memory import PeakMemory
from contrastile.train.provenance import provenance
from contrastile.train.sharded import full, local

GATE_BATCH, GATE_SUB_BATCH, GATE_DROPOUT = 8, 3, 0.1
# model on which ways with compiled towers are checked
GATE_MODEL = "tiny"
# relative distance in float32 that a sum in another order explains
GATE_TOLERANCE = 2e-5
# gradients below this share of the largest are mostly rounding
GATE_FLOOR = 1e-3
# a step of more sub-batches is warmed up with its first ones
WARMUP_SUB_BATCHES = 8
MOST_ROUNDS = 5
# seconds per way across ranks
RANK_SECONDS = 6.0
# pairs whose images fit beside everything else: 37 GiB
MOST_ON_DEVICE = 2**18
# a loss of more pairs runs the same kernels
MOST_WARMUP_PAIRS = 2**16

TABLE = Table(
    "model 9 | batch >8 | sub_batch >9 | implementation 55 | inputs 7 | ms >10.1f | us_per_pair=us/pair >8.1f"
    " | ratio_to_plain=times plain >11.3f | peak_bytes=peak MiB >9,.0f"
)
RANK_TABLE = Table(
    "model 9 | batch >8 | world=ranks >5 | implementation 46 | data_bytes=data MiB >12,.0f"
    " | loss_bytes=loss MiB >12,.0f | backbone_bytes=backbone MiB >12,.0f | peak_bytes=peak MiB >12,.0f | ms >10.1f"
)


def standard(device: torch.device, *, quick: bool) -> tuple[list[str], list[int]]:
    """Return the models and batches that are measured by default."""
    if device.type != "cuda":
        return ["tiny"], [64] if quick else [64, 256]
    if quick:
        return ["vit-b-16"], [1024]
    return ["vit-b-16", "vit-l-14"], [2**10, 2**13, 2**16, 2**18, 2**20]


def usual(batch: int) -> list[str]:
    """Return the ways that are measured by default: inputs from a pool only where the batch hardly fits."""
    return [name for name, way in WAYS.items() if way.inputs != "pool" or batch > MOST_ON_DEVICE]


@dataclass
class StepBench:
    """Measures steps on one process, or on the ranks of `machine.world` together.

    machine.seconds: per way and batch, beyond the first step. longest: a step that would take more is left out; within:
    so is one that would not end in this many seconds from now.
    """

    machine: Machine
    dtype: torch.dtype
    report: Report
    ways: Mapping[str, Way] = field(default_factory=lambda: WAYS)
    longest: float = 600.0
    within: float = math.inf
    optimizer: bool = False
    # microseconds per pair, by model and way, at the largest batch so far
    _pace: dict[tuple[str, str], float] = field(default_factory=dict)
    # models and ways that did not fit at a smaller batch
    _full: set[tuple[str, str]] = field(default_factory=set)
    _start: float = field(default_factory=time.perf_counter)

    def measure(self, model: str, plan: Mapping[int, Sequence[str]], sub_batch: int | None = None) -> None:
        """Measure the ways named for each batch; report each result as soon as it is there."""
        machine = self.machine
        # in the order of the table, so that the plain step comes first: others are compared with it
        ways = {name: way for name, way in self.ways.items() if any(name in names for names in plan.values())}
        ways = {name: way for name, way in ways.items() if self._passes(model, way)}
        machine.free_bytes()
        self.report.begin(TABLE if machine.world.size == 1 else RANK_TABLE)
        pairs = Pairs(self._towers(model))
        for batch, name in ((batch, name) for batch, names in sorted(plan.items()) for name in ways if name in names):
            # at the way's pace so far, or else at the slowest pace of the model
            paces = [pace for (other, _), pace in self._pace.items() if other == model]
            way, ahead = ways[name], self._pace.get((model, name), max(paces, default=0.0)) * batch / 1e6
            if ahead > min(self.longest, self.within - (time.perf_counter() - self._start)):
                seconds = f"{ahead:,.0f}" if ahead >= 10 else f"{ahead:.2g}"
                self.report.say(f"  {way.label} at {batch:,}: left out, it would take about {seconds} s")
                continue
            row = self._row(model, way, batch, size := sub_batch or pairs.towers.sub_batch)
            with self.report.failures(way.label, judged=way.judged, row=row):
                self.report.result(row | self._numbers(model, name, pairs, batch, size))
            if way.wrap is not None:
                pairs.towers = self._towers(model)
            pairs.towers.zero_grad()
            machine.free_bytes()

    def _towers(self, model: str) -> Towers:
        torch.manual_seed(0)
        return Towers(model, self.machine.device)

    def _row(self, model: str, way: Way, batch: int, sub_batch: int) -> Row:
        """The columns of a step that name it, on one process and across ranks."""
        return {
            "impl": way.impl, "way": way.name, "implementation": way.label, "model": model, "batch": batch,
            "sub_batch": sub_batch if way.cut else None, "retain": way.retain, "inputs": way.inputs,
            "dtype": str(self.dtype).removeprefix("torch."), "world": self.machine.world.size,
            **provenance(self.machine.device, "transformers", way.package or way.impl),
        }  # fmt: skip

    def _numbers(self, model: str, name: str, pairs: Pairs, batch: int, sub_batch: int) -> Row:
        """The measured columns; OutOfMemoryError where the step does not fit, or did not at a smaller batch."""
        way, known = self.ways[name], (model, name)
        # ranks have as many pairs each, and run out of memory at the same place
        if known in self._full:
            raise torch.OutOfMemoryError
        try:
            numbers = self._measured(way, pairs, batch // self.machine.world.size, sub_batch)
        except torch.OutOfMemoryError:
            self._full.add(known)
            raise
        self._pace[known] = pace = numbers["ms"] / batch * 1e3
        plain = self._pace.get((model, COMPILED + "plain" if way.compiled else "plain"))
        return numbers | {"us_per_pair": round(pace, 2), "ratio_to_plain": plain and round(pace / plain, 4)}

    def _passes(self, model: str, way: Way) -> bool:
        """Report a way's distance from plain gradients; return if it may be measured."""
        if reason := not_installed(way.module):
            self.report.say(f"  {way.label}: {reason}")
            return False
        with self.report.failures(way.label, judged=way.judged):
            # the large model would be compiled for the gate's sizes, which takes longer than the measurement
            checked = GATE_MODEL if way.compiled else model
            towers, scale = gate(checked, way, self.machine.device, self.machine.world)
            red = way.same and way.judged and not max(towers, scale) <= GATE_TOLERANCE
            verdict = ": no speed for a wrong result" if red else ""
            distances = f"the towers' gradients are {towers:.1e} from plain ones, the scale's {scale:.1e}"
            self.report.say(f"  {way.label}: {distances}{verdict}")
            self.report.passed = self.report.passed and not red
            return not red
        return False

    def _measured(self, way: Way, pairs: Pairs, batch: int, sub_batch: int) -> Row:
        """The columns of time and memory of a way, for a rank's batch."""
        machine, memory, towers = self.machine, PeakMemory(self.machine.device), pairs.towers
        towers.checkpointing(way.checkpointing)
        towers.compiled(way.compiled)
        sides = pairs.sides(batch, way.inputs)
        task = Task(towers, sides, min(sub_batch, batch), machine.device, self.dtype, way.loss)
        task = way.wrap(task) if way.wrap else task
        optimizer = torch.optim.AdamW(towers.parameters(), lr=1e-6) if self.optimizer else None
        across, nbytes = machine.world.size > 1, sum(leaf.nbytes for _, leaf in sides)
        nbytes += sum(tower.pool.nbytes for tower, _ in sides if tower.pool is not None)
        backbone = self._backbone_peak(task) - nbytes if across else 0
        loss_peak(task, machine, min(batch, MOST_WARMUP_PAIRS))

        def run(task: Task) -> float:
            def step() -> None:
                way.run(task)
                if optimizer is not None:
                    optimizer.step()

            towers.zero_grad()
            memory.start()
            return machine.time_together(step)

        short = not way.cut or task.sub_batches <= WARMUP_SUB_BATCHES
        run(task if short else task.first(2 * sub_batch))
        seconds, peak = [run(task)], memory.bytes()
        while len(seconds) < MOST_ROUNDS and sum(seconds) + seconds[-1] < machine.seconds:
            seconds.append(run(task))
        row = {"ms": round(statistics.median(seconds) * 1e3, 2), "peak_bytes": peak}
        if across:
            loss_bytes = max(0, loss_peak(task, machine, batch))
            row |= {"data_bytes": nbytes, "loss_bytes": loss_bytes, "backbone_bytes": max(0, backbone)}
        return row

    def _backbone_peak(self, task: Task) -> int:
        """Bytes of everything while two sub-batches are encoded one after the other, and their gradients computed."""
        few, memory = task.first(2 * task.sub_batch), PeakMemory(task.device)
        task.towers.zero_grad()
        self.machine.free_bytes()
        memory.start()
        with few.autocast():
            outs = [encode(tower, leaf, sub_batch=few.sub_batch) for tower, leaf in few.sides]
        # DistributedDataParallel waits for every gradient
        outs.append(task.towers.logit_scale.exp())
        torch.autograd.backward(outs, [torch.full_like(out, 1e-3) for out in outs])
        return memory.bytes()


def loss_peak(task: Task, machine: Machine, rows: int) -> int:
    """Run the loss alone on random features, which compiles its kernels; return its bytes beside their gradients."""
    case = Case("clip", rows, task.towers.text_config.projection_dim, str(task.dtype).removeprefix("torch."))
    q, k, _ = problem(case, task.device)
    peak = machine.peak(lambda: task.loss_of(q, k).backward())
    task.towers.zero_grad()
    return peak - q.nbytes - k.nbytes


def gate(model: str, way: Way, device: torch.device, world: World = ALONE) -> tuple[float, float]:
    """Compare a way's gradients with plain ones of the same batch, in float32, with dropout if it replays it.

    Returns the distance of the towers' parameters (the worst relative to its gradient's norm; across ranks of all
    together) and of the scale. Both draw the same random numbers: a way that cuts is compared with a plain step that
    encodes the same sub-batches and keeps all their graphs. Across ranks there is no dropout, nor for compiled towers,
    whose random numbers are others: they are compared with uncompiled ones.
    """
    torch.manual_seed(0)
    batch, across = world.size * GATE_BATCH, world.size > 1
    with_dropout = way.replays and not across and not way.compiled
    towers = Towers(model, device, dropout=GATE_DROPOUT if with_dropout else 0.0)
    sides = Pairs(towers, most=batch).sides(batch, way.inputs)
    whole = Task(towers, sides, GATE_SUB_BATCH, device, torch.float32, ClipLoss())
    share = [(tower, leaf.chunk(world.size)[world.rank]) for tower, leaf in sides]
    task = Task(towers, share, GATE_SUB_BATCH, device, torch.float32, way.loss)

    def gradients(run: Callable[[Task], object], task: Task) -> list[Tensor]:
        towers.zero_grad()
        torch.manual_seed(1)
        run(task)
        parameters = (towers.logit_scale, *towers.image.parameters(), *towers.text.parameters())
        scale, *others = (torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters)
        # sharded parameters have their gradient in parts; the scale's is whole on every rank
        return [local(scale), *map(full, others)]

    def plain_in_sub_batches(task: Task) -> None:
        rows = GATE_SUB_BATCH if way.cut else batch
        q, k = (torch.cat([tower(x.to(device)) for x in leaf.split(rows)]) for tower, leaf in task.sides)
        dense_clip(q, k, towers.logit_scale.exp()).backward()

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        true = gradients(plain_in_sub_batches, whole)
        towers.checkpointing(way.checkpointing)
        towers.compiled(way.compiled)
        results = gradients(way.run, way.wrap(task) if way.wrap else task)
    if across:
        results, true = ([x[0], torch.cat([y.flatten() for y in x[1:]])] for x in (results, true))
    least = GATE_FLOOR * max(float(gradient.norm()) for gradient in true[1:])
    floors = [0.0, *(least for _ in true[1:])]
    scale, *distances = (
        float((x - y).norm() / y.norm().clamp(min=floor)) for x, y, floor in zip(results, true, floors, strict=True)
    )
    return worst(distances), scale
