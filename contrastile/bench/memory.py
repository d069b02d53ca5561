"""The memory of one rank's loss in a world of any size, on one device: the papers' memory tables.

Stands on `harness.py`, `peers.py` and the planner. torch's process group "fake" sends nothing; receive buffers are
filled with the rank's own shard. The allocator's peak and the arithmetic are those of that rank; times lack all
communication, and gradients are those of a batch that repeats this rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

# its functions keep the default group of the moment of this import, which is none
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch import Tensor

from contrastile._torch import fake_store
from contrastile.bench.harness import Machine, Report, Row, Table, not_installed
from contrastile.bench.peers import rank_peers
from contrastile.distributed import collectives
from contrastile.modules import ClipLoss
from contrastile.planner.loss import LossSize
from contrastile.train.provenance import provenance

SCALE = 20.0
# bytes of each pair of a dense block, about: more than a device has are not tried
DENSE_BYTES = 6
# names of packages on PyPI that differ from the implementation's
PACKAGES = {"open_clip": "open_clip_torch"}
# the most seconds that a step may take, estimated from the step before
MOST_SECONDS = 600.0
# a step of more seconds runs once, for its peak and its time; smaller sizes have compiled its kernels
ONCE_SECONDS = 0.5

TABLE = Table(
    *(("world", "ranks", ">5"), ("b", "pairs", ">9"), ("d", "d", ">5"), ("dtype", "dtype", "9")),
    *(("implementation", "implementation", "48"), ("ms", "ms", ">11.2f")),
    *(("peak_bytes", "peak MiB", ">11,.1f"), ("planned_bytes", "planned MiB", ">11,.1f")),
)
# from features, which get their gradients, to the loss
Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Way:
    """A way to compute the loss of a rank.

    block: rows and columns of its matrix, by rows of a rank and ranks; (0, 0)
    for one without. exchange: of contrastile's, for the plan. missing: a reason why it is not there.
    """

    impl: str
    name: str
    step: Step
    block: Callable[[int, int], tuple[int, int]] = lambda N, W: (0, 0)  # noqa: ARG005
    exchange: str = ""
    backend: str = ""
    missing: str | None = None

    @property
    def label(self) -> str:
        return f"{self.impl}, {self.name}"


@contextmanager
def one_rank_of(world: int) -> Iterator[None]:
    """Be the first of `world` ranks, of which no other exists; whatever another would send is this rank's own."""
    with patch.multiple(collectives, post_together=_returned, _reduce_scatter=_own_part, exchange_rows=_own_rows):
        dist.init_process_group("fake", rank=0, world_size=world, store=fake_store())
        try:
            yield
        finally:
            dist.destroy_process_group()


def _returned(operations: Sequence[tuple[Any, Tensor, int]], group: Any) -> list[Any]:
    """Copy what leaves to where it would arrive: around a ring of equal ranks both have one size."""
    del group
    (_, leaving, _), (_, arriving, _) = operations
    arriving.copy_(leaving)
    return []


def _own_part(own: Tensor, every: Tensor, **words: Any) -> Any:
    """This rank's part of the sum, without the others'."""
    own.copy_(every[: len(own)])
    return dist.barrier(words["group"], async_op=True)


def _own_rows(x: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
    """The rows for each other rank in the place of those that they would send."""
    del group
    return x.clone().view(len(sizes) - 1, sizes[0], *x.shape[1:])


def ways(machine: Machine, world: int) -> list[Way]:
    """All ways on this device: contrastile's, and those of the papers' baselines."""
    on_gpu = machine.device.type == "cuda"
    ours = [(exchange, "triton" if on_gpu else "eager") for exchange in ("gather", "ring")]
    inf_cl = next(peer for peer in rank_peers(0, world) if peer.name == "inf-cl")
    missing = not_installed(inf_cl.module) if on_gpu else "needs a cuda device"
    return [
        *(_contrastile(exchange, backend) for exchange, backend in [*ours, ("ring", "dense")]),
        Way("CLIP", "plain: all rows and columns", partial(clip, local=False), lambda N, W: (N * W, N * W)),
        _open_clip("local loss", world, with_grad=False),
        _open_clip("local loss, gathered gradients", world, with_grad=True),
        Way("DisCo-CLIP", "decomposed", disco_clip, _two_strips),
        Way("inf-cl", "ring", partial(_step, inf_cl.losses["clip"]), missing=missing),
    ]


def _contrastile(exchange: Any, backend: Any) -> Way:
    block = (lambda N, W: (2 * N, N)) if backend == "dense" else Way.block  # noqa: ARG005
    loss = ClipLoss(exchange=exchange, backend=backend)
    return Way("contrastile", f"{exchange}, {backend}", partial(_step, loss), block, exchange, backend)


def _open_clip(name: str, world: int, *, with_grad: bool) -> Way:
    """open_clip's class where it is installed, else the same formula in plain PyTorch."""
    try:
        loss = import_module("open_clip").ClipLoss(
            local_loss=True, gather_with_grad=with_grad, rank=0, world_size=world
        )
    # torchvision beside another torch raises a RuntimeError
    except (ImportError, RuntimeError):
        step = partial(clip, local=True, with_grad=with_grad)
        return Way("open_clip", f"{name}, written out", step, _two_strips)
    return Way("open_clip", name, partial(_step, loss, autocast=True), _two_strips)


def _two_strips(N: int, W: int) -> tuple[int, int]:
    """A matrix of a rank's rows and all columns for each direction."""
    return 2 * N, N * W


def _step(loss: Callable[..., Tensor], q: Tensor, k: Tensor, *, autocast: bool = False) -> Tensor:
    """A forward and backward of a loss of features and scale."""
    with _autocast(q) if autocast else nullcontext():
        value = loss(q, k, torch.tensor(SCALE, device=q.device))
    return _differentiated(value)


def _differentiated(loss: Tensor) -> Tensor:
    loss.backward()
    return loss.detach()


def _autocast(q: Tensor) -> torch.autocast:
    return torch.autocast(q.device.type, dtype=q.dtype, enabled=q.dtype != torch.float32)


def clip(
    q: Tensor, k: Tensor, *, local: bool, with_grad: bool = False, autocast: AbstractContextManager[Any] | None = None
) -> Tensor:
    """The loss of CLIP's training code in plain PyTorch, under `autocast`; by default that of the features' type.

    Every rank gathers all rows of both sides. `local`: it compares its own rows with all columns, in both directions
    (OpenCLIP's local loss); otherwise all rows with all columns. with_grad: gathered rows hand gradients back.
    """
    images, texts = (_gathered(side, with_grad) for side in (q, k))
    with autocast or _autocast(q):
        if local:
            return _differentiated(_cross_entropies(SCALE * q @ texts.T, SCALE * k @ images.T))
        logits = SCALE * images @ texts.T
        return _differentiated(_cross_entropies(logits, logits.T))


def _cross_entropies(rows: Tensor, columns: Tensor) -> Tensor:
    """The mean of both directions, whose targets are the first diagonal."""
    labels = torch.arange(len(rows), device=rows.device)
    return (F.cross_entropy(rows, labels) + F.cross_entropy(columns, labels)) / 2


class _AllGather(torch.autograd.Function):
    """All ranks' rows, and back this rank's part of the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, side: Tensor) -> Tensor:
        ctx.rows = len(side)
        every = side.new_empty(dist.get_world_size() * len(side), side.shape[1])
        collectives.all_gather(every, side.contiguous())
        return every

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient[: ctx.rows].clone()


def _gathered(side: Tensor, with_grad: bool) -> Tensor:
    """All ranks' rows; without `with_grad` this rank's rows alone have a graph."""
    if with_grad:
        gathered: Tensor = _AllGather.apply(side)
        return gathered
    every = [torch.empty_like(side) for _ in range(dist.get_world_size())]
    dist.all_gather(every, side.detach())
    return torch.cat([side, *every[1:]])


def disco_clip(q: Tensor, k: Tensor) -> Tensor:
    """DisCo-CLIP's decomposition (Chen et al. 2023, equations 5 to 8) in plain PyTorch.

    A rank differentiates its own rows' and columns' losses by all gathered features, sums those gradients over ranks,
    and keeps the part of its own.
    """
    N = len(q)
    every = [_gathered(side.detach(), with_grad=False).requires_grad_() for side in (q, k)]
    with _autocast(q):
        loss = _cross_entropies(SCALE * every[0][:N] @ every[1].T, SCALE * every[1][:N] @ every[0].T)
    gradients = torch.autograd.grad(loss, every)
    for side, gradient in zip((q, k), gradients, strict=True):
        dist.all_reduce(gradient)
        side.backward(gradient[:N])
    return loss.detach()


class MemoryBench:
    """Measures one rank's loss, for each size of the world and each batch of all ranks.

    longest: a step that would take more seconds is left out. words: parts of the ways' names, of which one is enough.
    """

    def __init__(
        self, machine: Machine, report: Report, *, peers: bool = True, longest: float = MOST_SECONDS,
        words: Sequence[str] = ("",),
    ) -> None:  # fmt: skip
        self.machine, self.report, self.peers, self.longest, self.words = machine, report, peers, longest, words
        # seconds per pair and feature of each way's last step
        self._pace: dict[str, float] = {}

    def measure(self, world: int, sizes: Sequence[int], d: int, dtype: torch.dtype) -> None:
        """Measure all ways of a world; report each result as soon as it is there."""
        with one_rank_of(world):
            for way in ways(self.machine, world):
                if not any(word in way.label for word in self.words):
                    continue
                if way.missing:
                    self.report.note(f"{way.label}: {way.missing}")
                elif self.peers or way.impl == "contrastile":
                    for b in sizes:
                        self._measure(way, world, b, d, dtype)

    def _measure(self, way: Way, world: int, b: int, d: int, dtype: torch.dtype) -> None:
        machine, N, package = self.machine, b // world, PACKAGES.get(way.impl, way.impl)
        row: Row = {
            "impl": way.impl, "way": way.name, "implementation": way.label, "world": world, "b": b, "d": d,
            "dtype": str(dtype).removeprefix("torch."), "ms": None, "peak_bytes": None,
            "planned_bytes": self._planned(way, world, N, d, dtype), **provenance(machine.device, package),
        }  # fmt: skip
        (rows, columns), ahead = way.block(N, world), self._pace.get(way.label, 0.0) * N * b * d
        line = TABLE.line(row).rstrip()
        if ahead > self.longest:
            self.report.say(f"{line} left out, it would take about {ahead:,.0f} s")
            return
        with self.report.failures(way.label, judged=way.impl == "contrastile"):
            try:
                if DENSE_BYTES * rows * columns > machine.free_bytes():
                    raise torch.OutOfMemoryError
                row |= self._numbers(way, N, d, dtype, once=ahead > ONCE_SECONDS)
            except torch.OutOfMemoryError:
                self.report.result(f"{line} does not fit", row)
                return
            self._pace[way.label] = row["ms"] / 1e3 / (N * b * d)
            self.report.result(TABLE.line(row), row)

    def _numbers(self, way: Way, N: int, d: int, dtype: torch.dtype, *, once: bool) -> Row:
        """The peak of a step beside its features, and the milliseconds of the next, or `once` of the same."""
        device, seconds = self.machine.device, list[float]()
        generator = torch.Generator(device).manual_seed(0)
        drawn = (torch.randn(N, d, device=device, generator=generator) for _ in range(2))
        q, k = (F.normalize(side, dim=-1).to(dtype).requires_grad_() for side in drawn)

        def step() -> None:
            q.grad = k.grad = None
            way.step(q, k)

        def timed() -> None:
            seconds.append(self.machine.time(step))

        if not once:
            # compiles kernels, and makes what stays
            step()
            q.grad = k.grad = None
        peak = self.machine.peak(timed)
        if not once:
            timed()
        return {"peak_bytes": peak, "ms": round(seconds[-1] * 1e3, 3)}

    def _planned(self, way: Way, world: int, N: int, d: int, dtype: torch.dtype) -> int | None:
        """The planner's bytes for contrastile's own ways."""
        if way.impl != "contrastile":
            return None
        kind, total = self.machine.device.type, self.machine.total_bytes()
        return LossSize(N, N, world, d, total, way.exchange, way.backend, kind, None, dtype, dtype).peak
