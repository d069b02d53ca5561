"""The memory of one rank's loss in a world of any size, on one device: the papers' memory tables.

Stands on `harness.py`, `peers.py` and the planner. torch's process group "fake" sends nothing; receive buffers are
filled with the rank's own shard. The allocator's peak and the arithmetic are those of that rank; times lack all
communication, and gradients are those of a batch that repeats this rank's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from contrastile._dispatch import device_memory
from contrastile._errors import invalid
from contrastile._torch import fake_store
from contrastile.bench.gate import problem, step
from contrastile.bench.harness import Machine, Report, Row, Table
from contrastile.bench.peers import Case, Contestant, autocast_of, both_directions, rank_peers, under_autocast
from contrastile.distributed import collectives
from contrastile.modules import ClipLoss
from contrastile.planner.loss import LossSize
from contrastile.train.provenance import provenance

# bytes of each pair of a dense block, about: more than a device has are not tried
DENSE_BYTES = 6
# the most seconds that a step may take, estimated from the step before
MOST_SECONDS = 600.0
# a step of more seconds runs once, for its peak and its time; smaller sizes have compiled its kernels
ONCE_SECONDS = 0.5

TABLE = Table(
    "world=ranks >5 | b=pairs >9 | d >5 | dtype 9 | implementation 48 | ms >11.2f | peak_bytes=peak MiB >11,.1f"
    " | planned_bytes=planned MiB >11,.1f"
)


@contextmanager
def one_rank_of(world: int) -> Iterator[None]:
    """Be the first of `world` ranks, of which no other exists; whatever another would send is this rank's own."""

    def post_together(operations: Sequence[tuple[Any, Tensor, int]], group: Any) -> list[Any]:
        # around a ring of equal ranks what leaves has the size of what arrives; statistics of columns may be absent
        del group
        if operations:
            (_, leaving, _), (_, arriving, _) = operations
            arriving.copy_(leaving)
        return []

    def reduce_scatter(own: Tensor, every: Tensor, **words: Any) -> Any:
        own.copy_(every[: len(own)])
        return dist.barrier(words["group"], async_op=True)

    def exchange_rows(x: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
        del group
        return x.clone().view(len(sizes) - 1, sizes[0], *x.shape[1:])

    ours: Any = {"post_together": post_together, "_reduce_scatter": reduce_scatter, "exchange_rows": exchange_rows}
    with patch.multiple(collectives, **ours):
        dist.init_process_group("fake", rank=0, world_size=world, store=fake_store())
        try:
            yield
        finally:
            dist.destroy_process_group()


def ways(device: torch.device, world: int) -> list[Contestant]:
    """Contestants of a world, contrastile's first."""
    tiles = "triton" if device.type == "cuda" else "eager"
    # bytes of a pair: of all rows and columns, and of a rank's rows and all columns for each direction
    matrix, strips = DENSE_BYTES, 2 * DENSE_BYTES / world
    plain = partial(under_autocast, partial(clip, local=False))
    return [
        _contrastile("gather", tiles),
        _contrastile("ring", tiles),
        _contrastile("ring", "dense", strips / world),
        Contestant("CLIP", "plain: all rows and columns", {"clip": plain}, pair_bytes=matrix),
        _open_clip("local loss", world, with_grad=False),
        _open_clip("local loss, gathered gradients", world, with_grad=True),
        Contestant("DisCo-CLIP", "decomposed", {"clip": _Decomposed.apply}, pair_bytes=strips),
        next(peer for peer in rank_peers(0, world) if peer.name == "inf-cl"),
    ]


def check_words(words: Sequence[str], device: torch.device, world: int) -> None:
    """Raise ValueError for a word that is part of no way's name."""
    known = [f"{way.name}, {way.backend}" for way in ways(device, world)]
    for word in words:
        if not any(word in label for label in known):
            raise invalid("ways", f"be words of {'; '.join(known)}", repr(word), "Leave it out for all.")


def _contrastile(exchange: Any, backend: Any, pair_bytes: float = 0) -> Contestant:
    loss = ClipLoss(exchange=exchange, backend=backend)
    return Contestant("contrastile", f"{exchange}, {backend}", {"clip": loss}, pair_bytes=pair_bytes)


def _open_clip(name: str, world: int, *, with_grad: bool) -> Contestant:
    """open_clip's class where it is installed, else the same formula in plain PyTorch."""
    try:
        how = {"local_loss": True, "gather_with_grad": with_grad, "rank": 0, "world_size": world}
        loss = import_module("open_clip").ClipLoss(**how)
    # torchvision beside another torch raises a RuntimeError
    except (ImportError, RuntimeError):
        name, loss = f"{name}, written out", partial(clip, local=True, with_grad=with_grad)
    losses, pair_bytes = {"clip": partial(under_autocast, loss)}, 2 * DENSE_BYTES / world
    return Contestant("open_clip", name, losses, pair_bytes=pair_bytes, package="open_clip_torch")


def clip(q: Tensor, k: Tensor, scale: Tensor | float, *, local: bool, with_grad: bool = False) -> Tensor:
    """The loss of CLIP's training code in plain PyTorch. Every rank gathers all rows of both sides.

    `local`: it compares its own rows with all columns, in both directions (OpenCLIP's local loss); otherwise all rows
    with all columns. with_grad: gathered rows hand gradients back.
    """
    images, texts = (_gathered(side, with_grad) for side in (q, k))
    if local:
        return both_directions(scale * q @ texts.T, scale * k @ images.T)
    logits = scale * images @ texts.T
    return both_directions(logits, logits.T)


class _AllGather(torch.autograd.Function):
    """All ranks' rows, and back this rank's part of the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, side: Tensor) -> Tensor:
        ctx.rows = len(side)
        rows = side.new_empty(dist.get_world_size() * len(side), side.shape[1])
        collectives.all_gather(rows, side.contiguous())
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient[: ctx.rows].clone()


def _gathered(side: Tensor, with_grad: bool) -> Tensor:
    """All ranks' rows; without `with_grad` this rank's rows alone have a graph."""
    if with_grad:
        return _AllGather.apply(side)
    parts = [torch.empty_like(side) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, side.detach())
    # the rank measured is the first
    return torch.cat([side, *parts[1:]])


class _Decomposed(torch.autograd.Function):
    """DisCo-CLIP's decomposition (Chen et al. 2023, equations 5 to 8) in plain PyTorch.

    A rank differentiates its own rows' and columns' losses by all gathered features, sums those gradients over ranks,
    and keeps the part of its own.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
        N, (rows, cols) = len(q), [_gathered(side, with_grad=False).requires_grad_() for side in (q, k)]
        with torch.enable_grad(), autocast_of(q):
            loss = both_directions(scale * rows[:N] @ cols.T, scale * cols[:N] @ rows.T)
            gradients = torch.autograd.grad(loss, (rows, cols))
        for gradient in gradients:
            dist.all_reduce(gradient)
        ctx.gradients = [gradient[:N].clone() for gradient in gradients]
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *(gradient * x for x in ctx.gradients), None


@dataclass
class MemoryBench:
    """Measures one rank's loss, for each size of the world and each batch of all ranks.

    longest: a step that would take more seconds is left out. words: parts of the ways' names, of which one is enough.
    """

    machine: Machine
    report: Report
    peers: bool = True
    longest: float = MOST_SECONDS
    words: Sequence[str] = ("",)
    # seconds per pair and feature of each way's last step
    _pace: dict[str, float] = field(default_factory=dict)

    def measure(self, world: int, sizes: Sequence[int], d: int, dtype: torch.dtype) -> None:
        """Measure all ways of a world; report each result as soon as it is there."""
        with one_rank_of(world):
            for way in ways(self.machine.device, world):
                label = f"{way.name}, {way.backend}"
                if not any(word in label for word in self.words):
                    continue
                if absent := way.absent(self.machine):
                    self.report.note(f"{label}: {absent}")
                    continue
                for b in sizes if self.peers or way.name == "contrastile" else ():
                    self._measure(way, world, b, d, dtype)

    def _measure(self, way: Contestant, world: int, b: int, d: int, dtype: torch.dtype) -> None:
        machine, N, label = self.machine, b // world, f"{way.name}, {way.backend}"
        case = Case("clip", N, d, str(dtype).removeprefix("torch."))
        row: Row = {
            "impl": way.name, "way": way.backend, "implementation": label, "world": world, "b": b, "d": d,
            "dtype": case.dtype, **provenance(machine.device, way.package or way.name),
        }  # fmt: skip
        if way.name == "contrastile":
            exchange, backend = way.backend.split(", ")
            total, kind = device_memory(machine.device), machine.device.type
            row["planned_bytes"] = LossSize(N, N, world, d, total, exchange, backend, kind, None, dtype, dtype).peak
        ahead = self._pace.get(label, 0.0) * N * b * d
        if ahead > self.longest:
            self.report.say(f"{TABLE.line(row).rstrip()} left out, it would take about {ahead:,.0f} s")
            return
        with self.report.failures(label, judged=way.name == "contrastile", row=row):
            if way.pair_bytes * b * b > machine.free_bytes():
                raise torch.OutOfMemoryError
            q, k, scale = problem(case, machine.device)
            run = partial(step, lambda *sides: way.losses["clip"](*sides, scale.detach()), [q, k])
            once = ahead > ONCE_SECONDS
            if not once:
                # compiles kernels, and makes what stays
                run()
            seconds, peak = machine.time_and_peak(run)
            if not once:
                # the first may capture a graph
                seconds = min(machine.time(run) for _ in range(3))
            self._pace[label] = seconds / (N * b * d)
            self.report.result(row | {"ms": round(seconds * 1e3, 3), "peak_bytes": peak})
