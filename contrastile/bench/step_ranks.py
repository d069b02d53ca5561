"""Whole steps across ranks, under torchrun: the four ways to compute the loss, and what takes the memory.

Beside `step.py`: the same towers, `encode` with no graph retained, gradients averaged by an explicit all-reduce. The
columns are those of table 4 of Cheng et al. 2024: data, loss, backbone, and the peak of the whole step.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from contrastile.bench.measure import Ledger
from contrastile.bench.step import (
    GATE_BATCH,
    GATE_SUB_BATCH,
    GATE_TOLERANCE,
    plain_in_parts,
    random_features,
    warm_loss,
)
from contrastile.bench.towers import Pairs, Towers
from contrastile.bench.ways import Task, cached
from contrastile.cache import encode
from contrastile.modules import ClipLoss
from contrastile.train.memory import PeakMemory
from contrastile.train.provenance import provenance

# CLIP's, OpenCLIP's, tiles across ranks only, and tiles on both levels, as they are named to the command line
LOSSES = {
    "replicate-dense": ("replicate", "dense"),
    "gather-dense": ("gather", "dense"),
    "ring-dense": ("ring", "dense"),
    "ring-tiles": ("ring", "tiles"),
}
TILES = {"cuda": "triton"}
# milliseconds of a step; bytes of data, loss, backbone and the whole step at its peak
Numbers = tuple[float, int, int, int, int]
# further steps after the first, as long as all together take less
ROUNDS, SECONDS = 3, 6.0


@dataclass(frozen=True)
class RankRow:
    """One line of a results file of steps across ranks. Bytes are those of the first rank.

    data: its inputs. loss: what the loss takes beside the features and their gradients. backbone: weights, gradients
    and a sub-batch's activations. peak: the whole step's.
    """

    impl: str
    way: str
    model: str
    batch: int
    sub_batch: int
    dtype: str
    world: int
    data_bytes: int | None
    loss_bytes: int | None
    backbone_bytes: int | None
    peak_bytes: int | None
    ms: float | None
    us_per_pair: float | None
    chip: str
    versions: str
    date: str
    commit: str

    def text(self) -> str:
        start = f"{self.model:9} {self.batch:>8} {self.world:>5} {self.way:16}"
        parts = (self.data_bytes, self.loss_bytes, self.backbone_bytes, self.peak_bytes)
        if self.ms is None:
            return f"{start} does not fit"
        return f"{start} {' '.join(f'{(part or 0) / 2**20:>12,.0f}' for part in parts)} {self.ms:>10.1f}"


HEADER = (
    f"{'model':9} {'batch':>8} {'ranks':>5} {'loss':16} {'data MiB':>12} {'loss MiB':>12} {'backbone MiB':>12} "
    f"{'peak MiB':>12} {'ms':>10}"
)


def losses(device: torch.device, names: Collection[str]) -> dict[str, ClipLoss]:
    """Those named, by what their rows call them: tiles are the device's own."""
    tiles = TILES.get(device.type, "eager")
    found: dict[str, ClipLoss] = {}
    for exchange, inside in (LOSSES[name] for name in LOSSES if name in names):
        backend = tiles if inside == "tiles" else inside
        found[f"{exchange}, {backend}"] = ClipLoss(exchange=exchange, backend=backend)
    return found


def step(task: Task) -> Tensor:
    """A cached step of this rank's pairs with the gradients of the whole batch."""
    task.towers.zero_grad()
    loss = cached(task, 0)
    gradients = [parameter.grad for parameter in task.towers.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))
    return loss


def _towers(model: str, device: torch.device) -> Towers:
    torch.manual_seed(0)
    return Towers(model, device)


def distance(model: str, device: torch.device, loss: ClipLoss) -> float:
    """How far the gradients across ranks are from those of one process with the whole batch, in float32."""
    towers, W = _towers(model, device), dist.get_world_size()
    sides = Pairs(towers.shape, device, most=W * GATE_BATCH).sides(towers, W * GATE_BATCH, "device")
    whole = Task(towers, sides, GATE_SUB_BATCH, device, torch.float32, loss)
    own = Task(
        towers,
        [(tower, leaf.chunk(W)[dist.get_rank()]) for tower, leaf in sides],
        GATE_SUB_BATCH,
        device,
        torch.float32,
        loss,
    )
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        plain_in_parts(whole, whole.batch)
        true = [parameter.grad for parameter in towers.parameters()]
        step(own)
    apart = [
        float((parameter.grad - t).square().sum())
        for parameter, t in zip(towers.parameters(), true, strict=True)
        if parameter.grad is not None and t is not None
    ]
    return math.sqrt(sum(apart) / sum(float(t.square().sum()) for t in true if t is not None))


def measure(
    model: str,
    plan: Mapping[int, Collection[str]],
    device: torch.device,
    dtype: torch.dtype,
    say: Callable[[str], None],
    ledger: Ledger | None = None,
    sub_batch: int | None = None,
) -> bool:
    """The losses named for each global batch; whether all were right."""
    every = losses(device, {name for names in plan.values() for name in names})
    right = {way: loss for way, loss in every.items() if _passes(way, model, device, loss, say)}
    say(HEADER)
    towers, W = _towers(model, device), dist.get_world_size()
    pairs, cut = Pairs(towers.shape, device), sub_batch or towers.shape.sub_batch
    for batch, names in sorted(plan.items()):
        sides, backbone_bytes = pairs.sides(towers, batch // W, "device"), None
        for way in losses(device, names):
            if way not in right:
                continue
            task = Task(towers, sides, cut, device, dtype, right[way])
            try:
                if backbone_bytes is None:
                    backbone_bytes = _backbone_bytes(task)
                numbers: Numbers | None = _numbers(task, backbone_bytes)
            except torch.OutOfMemoryError:
                # every rank has as many pairs, and runs out at the same place
                numbers = None
            _clear(task)
            row = _row(way, model, batch, task, W, numbers)
            say(row.text())
            if ledger is not None:
                ledger.write(row)
    return len(right) == len(every)


def _passes(way: str, model: str, device: torch.device, loss: ClipLoss, say: Callable[[str], None]) -> bool:
    """Whether a loss is right across ranks; says how far off it is."""
    far = distance(model, device, loss)
    red = not far <= GATE_TOLERANCE
    say(f"  {way}: gradients {far:.1e} from one process's{': no speed for a wrong result' if red else ''}")
    return not red


def _row(way: str, model: str, batch: int, task: Task, W: int, numbers: Numbers | None) -> RankRow:
    """What was measured, or that it did not fit."""
    ms, data, extra, backbone, peak = numbers or (None,) * 5
    return RankRow(
        impl="contrastile",
        way=way,
        model=model,
        batch=batch,
        sub_batch=task.sub_batch,
        dtype=str(task.dtype).removeprefix("torch."),
        world=W,
        data_bytes=data,
        loss_bytes=extra,
        backbone_bytes=backbone,
        peak_bytes=peak,
        ms=None if ms is None else round(ms, 2),
        us_per_pair=None if ms is None else round(ms * 1e3 / batch, 2),
        **provenance(task.device, "transformers"),
    )


def _numbers(task: Task, backbone: int) -> Numbers:
    warm_loss(task)
    step(task.first(2 * task.sub_batch))
    memory, taken = PeakMemory(task.device), []
    memory.start()
    again = True
    while again:
        dist.barrier()
        start = time.perf_counter()
        float(step(task))
        if task.device.type == "cuda":
            torch.cuda.synchronize(task.device)
        taken.append((time.perf_counter() - start) * 1e3)
        # every rank must take as many steps
        most = torch.tensor(sum(taken) + taken[-1], device=task.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        again = len(taken) < ROUNDS and float(most) < SECONDS * 1e3
    peak = memory.bytes()
    data = sum(leaf.nbytes for _, leaf in task.sides)
    return statistics.median(taken), data, _loss_bytes(task), backbone, peak


def _clear(task: Task) -> None:
    task.towers.zero_grad()
    if task.device.type == "cuda":
        torch.cuda.empty_cache()


def _loss_bytes(task: Task) -> int:
    q, k = random_features(task, task.batch)
    memory = PeakMemory(task.device)
    before = memory.start()
    task.loss_of(q, k).backward()
    task.towers.zero_grad()
    return max(0, memory.bytes() - before - q.nbytes - k.nbytes)


def _backbone_bytes(task: Task) -> int:
    """Weights, gradients, and one sub-batch's activations at a time; two sub-batches show it."""
    few, memory = task.first(2 * task.sub_batch), PeakMemory(task.device)
    _clear(task)
    memory.start()
    with few.autocast():
        outs = [encode(tower, leaf, sub_batch=few.sub_batch) for tower, leaf in few.sides]
    torch.autograd.backward(outs, [torch.full_like(out, 1e-3) for out in outs])
    return max(0, memory.bytes() - sum(leaf.nbytes for _, leaf in task.sides))


def join(kind: str) -> torch.device:
    """This rank's device, "cpu" or "cuda", in the process group that torchrun describes."""
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")
