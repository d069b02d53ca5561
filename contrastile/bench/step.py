"""Whole steps measured: towers forward, loss, towers backward, in every way that there is.

    model ── gate: gradients beside the plain ones ── batch by batch, way by way: time, memory ── a line, a row

Stands on `ways.py` and `measure.py`. A way of ours with wrong gradients has no speed. What does not fit into memory is
a result, and a row without numbers. The optimizer is left out unless asked for: it costs all ways the same.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile.bench.caches import PEERS
from contrastile.bench.measure import Ledger
from contrastile.bench.towers import Pairs, Towers
from contrastile.bench.ways import OURS, PLAIN, Side, Task, Way, waiting
from contrastile.losses.dense import dense_clip
from contrastile.modules import ClipLoss
from contrastile.train.memory import PeakMemory
from contrastile.train.provenance import provenance

# what others keep on the device is drawn from a pool where it does not fit
POOLS = {f"pool-{name}": waiting(way, "pool") for name, way in {**PLAIN, **PEERS}.items() if way.cut}
WAYS = {**PLAIN, **OURS, **PEERS, **POOLS}
# others' gradients are shown, ours are judged
JUDGED = ("contrastile", "plain", "by hand")
GATE_BATCH, GATE_SUB_BATCH, GATE_DROPOUT = 8, 3, 0.1
# relative, in float32: rounding of sums in another order
GATE_TOLERANCE = 2e-5
# gradients below this share of the largest are rounding themselves
GATE_FLOOR = 1e-3
# a step of more sub-batches is warmed up with its first ones
WARM_SUB_BATCHES = 8
MOST_ROUNDS = 5
# pairs whose pictures still fit beside everything else: 37 GiB
MOST_REAL = 2**18
# a loss of more pairs runs the same kernels
MOST_WARM_PAIRS = 2**16


@dataclass(frozen=True)
class StepRow:
    """One line of a results file of steps; without numbers where a step did not fit.

    retain: what `encode` was told. inputs: on the "device", on the "host", or drawn again and again from a "pool" on
    the device. ratio_to_plain: time per pair over that of the plain step, at the largest batch up to this one that the
    plain step could do. peak_bytes: all that is allocated, weights, gradients and inputs included.
    """

    impl: str
    way: str
    model: str
    batch: int
    sub_batch: int | None
    retain: str
    inputs: str
    dtype: str
    world: int
    ms: float | None
    us_per_pair: float | None
    ratio_to_plain: float | None
    peak_bytes: int | None
    chip: str
    versions: str
    date: str
    commit: str

    def text(self) -> str:
        cut = "" if self.sub_batch is None else str(self.sub_batch)
        start = f"{self.model:9} {self.batch:>8} {cut:>9} {f'{self.impl}, {self.way}':55} {self.inputs:7}"
        if self.ms is None or self.us_per_pair is None:
            return f"{start} does not fit"
        ratio = "" if self.ratio_to_plain is None else f"{self.ratio_to_plain:.3f}"
        peak = "" if self.peak_bytes is None else f"{self.peak_bytes / 2**20:,.0f}"
        return f"{start} {self.ms:>10.1f} {self.us_per_pair:>8.1f} {ratio:>11} {peak:>9}"


HEADER = (
    f"{'model':9} {'batch':>8} {'sub_batch':>9} {'implementation':55} {'inputs':7} {'ms':>10} {'us/pair':>8} "
    f"{'times plain':>11} {'peak MiB':>9}"
)


@dataclass
class StepBench:
    """What is measured and how long, where results go, and whether all of ours came through.

    seconds: for each way at each batch, beyond the first step. longest: a step that would take more is left out;
    within: so is one that would not end in this many seconds from now.
    """

    device: torch.device
    dtype: torch.dtype
    say: Callable[[str], None]
    seconds: float = 20.0
    longest: float = 600.0
    within: float = math.inf
    optimizer: bool = False
    ledger: Ledger | None = None
    right: bool = True
    rows: list[StepRow] = field(default_factory=list)
    # microseconds a pair, by model and way, at the largest batch so far
    _pace: dict[tuple[str, str], float] = field(default_factory=dict)
    _start: float = field(default_factory=time.perf_counter)
    # what did not fit at a smaller batch
    _full: set[str] = field(default_factory=set)

    def measure(self, model: str, plan: Mapping[int, Sequence[str]], sub_batch: int | None = None) -> None:
        """The ways named for each batch: a line and a row for each, as soon as it is there."""
        # the plain step first: others are compared with it
        ways = {name: way for name, way in WAYS.items() if any(name in names for names in plan.values())}
        for name, way in list(ways.items()):
            if reason := way.missing():
                self.say(f"  {way.label}: {reason}")
                del ways[name]
        ways = self._through_the_gate(model, ways)
        self.say(HEADER)
        self._full = set()
        towers = Towers(model, self.device)
        pairs = Pairs(towers.shape, self.device)
        for batch, names in sorted(plan.items()):
            for name, way in ((name, way) for name, way in ways.items() if name in names):
                ahead = self._expected(model, name, batch)
                if ahead > min(self.longest, self.within - (time.perf_counter() - self._start)):
                    self.say(f"  {way.label} at {batch:,}: left out, it would take about {ahead:,.0f} s")
                    continue
                row = self._row(way, name, model, towers, pairs, batch, sub_batch or towers.shape.sub_batch)
                if row is None:
                    continue
                self.rows.append(row)
                self.say(row.text())
                if self.ledger is not None:
                    self.ledger.write(row)

    def _expected(self, model: str, name: str, batch: int) -> float:
        """Seconds of a step at the way's pace so far, or else at the slowest pace of the model."""
        paces = [pace for (other, _), pace in self._pace.items() if other == model]
        return self._pace.get((model, name), max(paces, default=0.0)) * batch / 1e6

    def _through_the_gate(self, model: str, ways: dict[str, Way]) -> dict[str, Way]:
        passed = {}
        for name, way in ways.items():
            with self._spared(way):
                towers, scale = gate(model, way, self.device)
                red = way.same and way.impl in JUDGED and not max(towers, scale) <= GATE_TOLERANCE
                verdict = ": no speed for a wrong result" if red else ""
                far = f"the towers' gradients are {towers:.1e} from plain ones, the scale's {scale:.1e}"
                self.say(f"  {way.label}: {far}{verdict}")
                self.right = self.right and not red
                if not red:
                    passed[name] = way
        self._clear()
        return passed

    def _row(
        self, way: Way, name: str, model: str, towers: Towers, pairs: Pairs, batch: int, sub_batch: int
    ) -> StepRow | None:
        timed: tuple[float, int] | None = None
        with self._spared(way):
            try:
                full = name in self._full
                timed = (math.nan, 0) if full else self._timed(way, towers, pairs, batch, sub_batch)
            except torch.OutOfMemoryError:
                self._full.add(name)
                timed = (math.nan, 0)
        self._clear(towers)
        if timed is None:
            return None
        seconds, peak = timed
        fits = peak > 0
        pace = seconds / batch * 1e6
        if fits:
            self._pace[model, name] = pace
        plain = self._pace.get((model, "plain"))
        return StepRow(
            impl=way.impl,
            way=way.name,
            model=model,
            batch=batch,
            sub_batch=sub_batch if way.cut else None,
            retain=way.retain,
            inputs=way.inputs,
            dtype=str(self.dtype).removeprefix("torch."),
            world=1,
            ms=round(seconds * 1e3, 2) if fits else None,
            us_per_pair=round(pace, 2) if fits else None,
            ratio_to_plain=round(pace / plain, 4) if fits and plain else None,
            peak_bytes=peak if fits else None,
            **provenance(self.device, "transformers", way.package or way.impl),
        )

    def _timed(self, way: Way, towers: Towers, pairs: Pairs, batch: int, sub_batch: int) -> tuple[float, int]:
        """Seconds of a step, the median of some; bytes at its peak."""
        towers.checkpointing(way.checkpointing)
        sides = pairs.sides(towers, batch, way.inputs)
        task = Task(towers, sides, min(sub_batch, batch), self.device, self.dtype, ClipLoss())
        optimizer = torch.optim.AdamW(towers.parameters(), lr=1e-6) if self.optimizer else None
        warm_loss(task)
        whole = not way.cut or task.sub_batches <= WARM_SUB_BATCHES
        self._step(way, task if whole else task.first(2 * sub_batch), optimizer)
        memory = PeakMemory(self.device)
        taken, peak = [self._step(way, task, optimizer, memory)], memory.bytes()
        while sum(taken) + taken[-1] < self.seconds and len(taken) < MOST_ROUNDS:
            taken.append(self._step(way, task, optimizer))
        return statistics.median(taken), peak

    def _step(
        self, way: Way, task: Task, optimizer: torch.optim.Optimizer | None, memory: PeakMemory | None = None
    ) -> float:
        task.towers.zero_grad()
        if memory is not None:
            memory.start()
        self._wait()
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
        """What a way leaves behind, given back before the next."""
        if towers is not None:
            towers.zero_grad()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def _spared(self, way: Way) -> Iterator[None]:
        """What fails is said by name, and the others go on."""
        try:
            yield
        except Exception as error:
            self.right = self.right and way.impl not in JUDGED
            sentence = str(error).strip().split("\n")[0]
            self.say(f"  {way.label}: {type(error).__name__}: {sentence}")


def random_features(task: Task, rows: int) -> list[Tensor]:
    """Unit features of both sides, as the towers would give them; leaves that want a gradient."""
    width = task.towers.shape.text["projection_dim"]
    return [
        F.normalize(torch.randn(rows, width, device=task.device), dim=-1).to(task.dtype).requires_grad_()
        for _ in range(2)
    ]


def warm_loss(task: Task) -> None:
    """The loss alone at the task's size: kernels are compiled at their first call."""
    task.loss_of(*random_features(task, min(task.batch, MOST_WARM_PAIRS))).backward()
    task.towers.zero_grad()


def gate(model: str, way: Way, device: torch.device) -> tuple[float, float]:
    """How far a way's gradients are from plain ones of the same batch, in float32, with dropout if it replays it.

    The worst of the towers' parameters, relative to its gradient's norm, and the scale. Both draw the same random
    numbers: what is compared with a way that cuts encodes the same sub-batches, and keeps all their graphs.
    """
    torch.manual_seed(0)
    towers = Towers(model, device, dropout=GATE_DROPOUT if way.replays else 0.0)
    sides = Pairs(towers.shape, device, most=GATE_BATCH).sides(towers, GATE_BATCH, way.inputs)
    task = Task(towers, sides, GATE_SUB_BATCH, device, torch.float32, ClipLoss())

    def gradients(run: Callable[[Task], object]) -> list[Tensor]:
        towers.zero_grad()
        torch.manual_seed(1)
        run(task)
        return [_gradient(parameter) for parameter in (towers.logit_scale, *towers.towers())]

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        true = gradients(partial(plain_in_parts, sub_batch=GATE_SUB_BATCH if way.cut else GATE_BATCH))
        towers.checkpointing(way.checkpointing)
        found = gradients(way.run)
    least = GATE_FLOOR * max(float(gradient.norm()) for gradient in true[1:])
    scale, *worst = (
        float((g - t).norm() / t.norm().clamp(min=0.0 if place == 0 else least))
        for place, (g, t) in enumerate(zip(found, true, strict=True))
    )
    # a NaN must not hide behind a number
    return float(torch.tensor(worst).max()), scale


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def plain_in_parts(task: Task, sub_batch: int) -> Tensor:
    """The plain step with the dense loss, in sub-batches whose graphs all stay."""

    def features(side: Side) -> Tensor:
        tower, leaf = side
        return torch.cat([tower(rows.to(task.device)) for rows in leaf.split(sub_batch)])

    images, texts = (features(side) for side in task.sides)
    loss = dense_clip(images, texts, task.towers.logit_scale.exp())
    loss.backward()
    return loss.detach()


def standard(device: torch.device, *, quick: bool) -> tuple[list[str], list[int]]:
    """Models and batches measured where nothing particular is asked for."""
    if device.type != "cuda":
        return ["tiny"], [64] if quick else [64, 256]
    if quick:
        return ["vit-b-16"], [1024]
    return ["vit-b-16", "vit-l-14"], [2**10, 2**13, 2**16, 2**18, 2**20]


def usual(batch: int) -> list[str]:
    """The ways measured where none is named: a pool of inputs only where others hardly fit."""
    return [name for name, way in WAYS.items() if way.inputs != "pool" or batch > MOST_REAL]
