"""Whole training steps measured: towers forward, loss, towers backward, in every way of `ways.py`.

    model ── gate: gradients against plain ones ── batch by batch, way by way: time, memory ── a line, a row

Stands on `harness.py`, `ways.py` and `caches.py`. A judged way with wrong gradients has no speed. A step that does not
fit into memory is a row without numbers. The optimizer is left out by default: it costs all ways the same. Under
torchrun the four losses are compared, gradients averaged by an explicit all-reduce, with the columns of table 4 of
Cheng et al. 2024: data, loss, backbone, and the peak of the whole step.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from contrastile.bench.caches import PEERS
from contrastile.bench.harness import ALONE, Report, Row, Table, World, not_installed
from contrastile.bench.towers import Pairs, Towers
from contrastile.bench.ways import OURS, PLAIN, Task, Way, with_inputs
from contrastile.gradcache.encode import encode
from contrastile.losses.reference import dense_clip
from contrastile.modules import ClipLoss
from contrastile.train.memory import PeakMemory
from contrastile.train.provenance import provenance

# ways that keep inputs on the device take them from a pool where the whole batch does not fit
POOLS = {f"pool-{name}": with_inputs(way, "pool") for name, way in {**PLAIN, **PEERS}.items() if way.cut}
WAYS = {**PLAIN, **OURS, **PEERS, **POOLS}
GATE_BATCH, GATE_SUB_BATCH, GATE_DROPOUT = 8, 3, 0.1
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

_START = (("model", "9"), ("batch", ">8"), ("sub_batch", ">9"), ("implementation", "55"), ("inputs", "7"))
TABLE = Table(*_START, ("ms", ">10.1f"), ("us/pair", ">8.1f"), ("times plain", ">11.3f"), ("peak MiB", ">9,.0f"))
_BYTES = tuple((f"{name} MiB", ">12,.0f") for name in ("data", "loss", "backbone", "peak"))
RANK_TABLE = Table(("model", "9"), ("batch", ">8"), ("ranks", ">5"), ("loss", "16"), *_BYTES, ("ms", ">10.1f"))


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


@dataclass(frozen=True)
class Measured:
    """Seconds of a step, the median of some; bytes at its peak and, across ranks, of data, loss and backbone."""

    seconds: float
    peak: int
    parts: tuple[int, int, int] | None = None


@dataclass
class StepBench:
    """Measures steps on one process, or on the ranks of `world` together.

    seconds: per way and batch, beyond the first step. longest: a step that would take more is left out; within: so is
    one that would not end in this many seconds from now.
    """

    device: torch.device
    dtype: torch.dtype
    report: Report
    ways: Mapping[str, Way] = field(default_factory=lambda: WAYS)
    world: World = ALONE
    seconds: float = 20.0
    longest: float = 600.0
    within: float = math.inf
    optimizer: bool = False
    rows: list[Row] = field(default_factory=list)
    # microseconds per pair, by model and way, at the largest batch so far
    _pace: dict[tuple[str, str], float] = field(default_factory=dict)
    _start: float = field(default_factory=time.perf_counter)
    # ways that did not fit at a smaller batch
    _full: set[str] = field(default_factory=set)

    def measure(self, model: str, plan: Mapping[int, Sequence[str]], sub_batch: int | None = None) -> None:
        """Measure the ways named for each batch; report each result as soon as it is there."""
        # in the order of the table, so that the plain step comes first: others are compared with it
        ways = {name: way for name, way in self.ways.items() if any(name in names for names in plan.values())}
        ways = {name: way for name, way in ways.items() if self._passes(model, way)}
        self._clear()
        self.report.say((TABLE if self.world.size == 1 else RANK_TABLE).header())
        self._full = set()
        torch.manual_seed(0)
        towers = Towers(model, self.device)
        pairs = Pairs(towers.shape, self.device)
        for batch, names in sorted(plan.items()):
            for name, way in ((name, way) for name, way in ways.items() if name in names):
                ahead = self._expected(model, name, batch)
                if ahead > min(self.longest, self.within - (time.perf_counter() - self._start)):
                    self.report.say(f"  {way.label} at {batch:,}: left out, it would take about {ahead:,.0f} s")
                    continue
                with self.report.failures(way.label, judged=way.judged):
                    at_once = sub_batch or towers.shape.sub_batch
                    measured = self._measured(way, name, towers, pairs, batch, at_once)
                    row = self._row(way, name, model, batch, at_once, measured)
                    self.rows.append(row)
                    self.report.result(self._line(row), row)
                self._clear(towers)

    def _expected(self, model: str, name: str, batch: int) -> float:
        """Seconds of a step at the way's pace so far, or else at the slowest pace of the model."""
        paces = [pace for (other, _), pace in self._pace.items() if other == model]
        return self._pace.get((model, name), max(paces, default=0.0)) * batch / 1e6

    def _passes(self, model: str, way: Way) -> bool:
        """Report a way's distance from plain gradients; return if it may be measured."""
        if reason := not_installed(way.module):
            self.report.say(f"  {way.label}: {reason}")
            return False
        with self.report.failures(way.label, judged=way.judged):
            towers, scale = gate(model, way, self.device, self.world)
            red = way.same and way.judged and not max(towers, scale) <= GATE_TOLERANCE
            verdict = ": no speed for a wrong result" if red else ""
            distances = f"the towers' gradients are {towers:.1e} from plain ones, the scale's {scale:.1e}"
            self.report.say(f"  {way.label}: {distances}{verdict}")
            self.report.passed = self.report.passed and not red
            return not red
        return False

    def _measured(
        self, way: Way, name: str, towers: Towers, pairs: Pairs, batch: int, sub_batch: int
    ) -> Measured | None:
        """The measurements of a way; None where a step does not fit into memory, at this batch or a smaller one."""
        if name in self._full:
            return None
        try:
            return self._timed(way, towers, pairs, batch // self.world.size, sub_batch)
        except torch.OutOfMemoryError:
            # ranks have as many pairs each, and run out of memory at the same place
            self._full.add(name)
            return None

    def _timed(self, way: Way, towers: Towers, pairs: Pairs, batch: int, sub_batch: int) -> Measured:
        towers.checkpointing(way.checkpointing)
        sides = pairs.sides(towers, batch, way.inputs)
        task = Task(towers, sides, min(sub_batch, batch), self.device, self.dtype, way.loss)
        optimizer = torch.optim.AdamW(towers.parameters(), lr=1e-6) if self.optimizer else None
        backbone = self._backbone_bytes(task) if self.world.size > 1 else 0
        warm_loss(task)
        whole = not way.cut or task.sub_batches <= WARMUP_SUB_BATCHES
        self._step(way, task if whole else task.first(2 * sub_batch), optimizer)
        memory = PeakMemory(self.device)
        taken, peak = [self._step(way, task, optimizer, memory)], memory.bytes()
        # every rank must take as many steps
        while len(taken) < MOST_ROUNDS and self.world.slowest(sum(taken) + taken[-1]) < self.seconds:
            taken.append(self._step(way, task, optimizer))
        seconds = statistics.median(taken)
        if self.world.size == 1:
            return Measured(seconds, peak)
        data = sum(leaf.nbytes for _, leaf in task.sides)
        return Measured(self.world.slowest(seconds), peak, (data, _loss_bytes(task), backbone))

    def _step(
        self, way: Way, task: Task, optimizer: torch.optim.Optimizer | None, memory: PeakMemory | None = None
    ) -> float:
        task.towers.zero_grad()
        if memory is not None:
            memory.start()
        self._wait()
        if self.world.size > 1:
            dist.barrier()
        start = time.perf_counter()
        way.run(task)
        if optimizer is not None:
            optimizer.step()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _clear(self, towers: Towers | None = None) -> None:
        """Release the memory of a way before the next."""
        if towers is not None:
            towers.zero_grad()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _backbone_bytes(self, task: Task) -> int:
        """Weights, gradients, and the activations of one sub-batch at a time, measured with two sub-batches."""
        few, memory = task.first(2 * task.sub_batch), PeakMemory(task.device)
        self._clear(task.towers)
        memory.start()
        with few.autocast():
            outs = [encode(tower, leaf, sub_batch=few.sub_batch) for tower, leaf in few.sides]
        torch.autograd.backward(outs, [torch.full_like(out, 1e-3) for out in outs])
        return max(0, memory.bytes() - sum(leaf.nbytes for _, leaf in task.sides))

    def _row(self, way: Way, name: str, model: str, batch: int, sub_batch: int, measured: Measured | None) -> Row:
        """The columns of a step on one process and across ranks; no numbers where it did not fit."""
        pace = None if measured is None else measured.seconds / batch * 1e6
        if pace is not None:
            self._pace[model, name] = pace
        plain = self._pace.get((model, "plain"))
        data, loss, backbone = (measured and measured.parts) or (None, None, None)
        return {
            "impl": way.impl,
            "way": way.name,
            "model": model,
            "batch": batch,
            "sub_batch": sub_batch if way.cut else None,
            "retain": way.retain,
            "inputs": way.inputs,
            "dtype": str(self.dtype).removeprefix("torch."),
            "world": self.world.size,
            "ms": None if measured is None else round(measured.seconds * 1e3, 2),
            "us_per_pair": None if pace is None else round(pace, 2),
            "ratio_to_plain": round(pace / plain, 4) if pace and plain else None,
            "data_bytes": data,
            "loss_bytes": loss,
            "backbone_bytes": backbone,
            "peak_bytes": None if measured is None else measured.peak,
            **provenance(self.device, "transformers", way.package or way.impl),
        }

    def _line(self, row: Row) -> str:
        fits, mib = row["ms"] is not None, {name: row[name] and row[name] / 2**20 for name in row if "bytes" in name}
        if self.world.size > 1:
            start: tuple[object, ...] = (row["model"], row["batch"], row["world"], row["way"])
            line = RANK_TABLE.line(*start, *mib.values(), row["ms"]) if fits else RANK_TABLE.line(*start)
        else:
            start = (row["model"], row["batch"], row["sub_batch"], f"{row['impl']}, {row['way']}", row["inputs"])
            times = (row["ms"], row["us_per_pair"], row["ratio_to_plain"], mib["peak_bytes"])
            line = TABLE.line(*start, *times) if fits else TABLE.line(*start)
        return line if fits else f"{line} does not fit"


def random_features(task: Task, rows: int) -> list[Tensor]:
    """Return unit features of both sides as the towers give them; leaves that require a gradient."""
    width = task.towers.shape.text["projection_dim"]
    return [
        F.normalize(torch.randn(rows, width, device=task.device), dim=-1).to(task.dtype).requires_grad_()
        for _ in range(2)
    ]


def warm_loss(task: Task) -> None:
    """Run the loss alone, which compiles its kernels."""
    task.loss_of(*random_features(task, min(task.batch, MOST_WARMUP_PAIRS))).backward()
    task.towers.zero_grad()


def _loss_bytes(task: Task) -> int:
    """Bytes of the loss beside the features and their gradients."""
    q, k = random_features(task, task.batch)
    memory = PeakMemory(task.device)
    before = memory.start()
    task.loss_of(q, k).backward()
    task.towers.zero_grad()
    return max(0, memory.bytes() - before - q.nbytes - k.nbytes)


def gate(model: str, way: Way, device: torch.device, world: World = ALONE) -> tuple[float, float]:
    """Compare a way's gradients with plain ones of the same batch, in float32, with dropout if it replays it.

    Returns the distance of the towers' parameters (the worst relative to its gradient's norm; across ranks of all
    together) and of the scale. Both draw the same random numbers: a way that cuts is compared with a plain step that
    encodes the same sub-batches and keeps all their graphs. Across ranks there is no dropout.
    """
    torch.manual_seed(0)
    batch, across = world.size * GATE_BATCH, world.size > 1
    towers = Towers(model, device, dropout=GATE_DROPOUT if way.replays and not across else 0.0)
    sides = Pairs(towers.shape, device, most=batch).sides(towers, batch, way.inputs)
    whole = Task(towers, sides, GATE_SUB_BATCH, device, torch.float32, ClipLoss())
    own = [(tower, leaf.chunk(world.size)[world.rank]) for tower, leaf in sides]
    task = Task(towers, own, GATE_SUB_BATCH, device, torch.float32, way.loss)

    def gradients(run: Callable[[Task], object], task: Task) -> list[Tensor]:
        towers.zero_grad()
        torch.manual_seed(1)
        run(task)
        parameters = (towers.logit_scale, *towers.encoder_parameters())
        return [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in parameters]

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        true = gradients(partial(plain_in_parts, sub_batch=GATE_SUB_BATCH if way.cut else batch), whole)
        towers.checkpointing(way.checkpointing)
        results = gradients(way.run, task)
    if across:
        results, true = ([x[0], torch.cat([y.flatten() for y in x[1:]])] for x in (results, true))
    least = GATE_FLOOR * max(float(gradient.norm()) for gradient in true[1:])
    floors = [0.0, *(least for _ in true[1:])]
    scale, *distances = (
        float((x - y).norm() / y.norm().clamp(min=floor)) for x, y, floor in zip(results, true, floors, strict=True)
    )
    # torch's max is NaN where one is, which Python's may hide
    return float(torch.tensor(distances).max()), scale


def plain_in_parts(task: Task, sub_batch: int) -> Tensor:
    """Take the plain step with the dense loss, in sub-batches whose graphs are all kept."""
    images, texts = (
        torch.cat([tower(rows.to(task.device)) for rows in leaf.split(sub_batch)]) for tower, leaf in task.sides
    )
    loss = dense_clip(images, texts, task.towers.logit_scale.exp())
    loss.backward()
    return loss.detach()
