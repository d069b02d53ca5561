"""Several processes that train one model: who this one is, when all go on or stop, how their gradients become one.

Beside `loop.py`, which tells the same story on every rank. A batch is shared out among the ranks; the losses meet by
themselves; after the backward, one sum over ranks gives every rank the gradient of the whole batch. The first rank
alone writes and shows. One process is a rank without others, and nothing here costs it anything.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from contrastile import agreement, comm
from contrastile._check import wrong
from contrastile._types import Gradient
from contrastile.data.collection import Stream
from contrastile.rollcall import here
from contrastile.train.recipe import to_toml
from contrastile.train.sharded import dealt, in_shards, is_sharded, settle_gradients, taken
from contrastile.train.state import Checkpoints, Parts
from contrastile.train.watch import Watch

if TYPE_CHECKING:
    from contrastile.train.job import Job

logger = logging.getLogger("contrastile")

# for how long ranks that have opened their data wait for one that has not
LOADING = timedelta(hours=1)
# NCCL ends a process without a word when its time is up: those who can say what happened are to be first
LATER = timedelta(seconds=10)
LOADED = "contrastile/ranks that are loaded"


@dataclass(frozen=True)
class Ranks:
    """This process among `size` that train together."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of_environment(cls, device: str) -> Ranks:
        """What torchrun says; without it, one process. A rank on a GPU takes the one of its number on its node."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if device != "cpu" and torch.cuda.is_available():
            if ":" in device:
                remedy = "Each rank takes a GPU of its own; CUDA_VISIBLE_DEVICES says which there are."
                raise wrong("device", 'be "auto", "cpu" or "cuda" for several ranks', f'"{device}"', remedy)
            local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
            if local >= gpus:
                remedy = "Start as many ranks as there are GPUs."
                raise wrong("nproc-per-node", f"be at most {gpus}, the GPUs that torch sees", local + 1, remedy)
            torch.cuda.set_device(local)
        return cls(int(os.environ["RANK"]), size)

    @property
    def share(self) -> slice:
        """This rank's rows of any batch: every one in `size`, so that each part of it is shared out evenly."""
        return slice(self.rank, None, self.size)

    @contextmanager
    def joined(self, job: Job[Any]) -> Iterator[None]:
        """Together with the others, all with the first one's weights; an error, where a rank is lost or not alike."""
        run = job.run
        if self.size == 1:
            if run.recipe.train.parallel == "shard":
                logger.warning('train.parallel = "shard" has no effect on one process: it has all of the weights')
            yield
            return
        timeout = timedelta(seconds=run.recipe.train.timeout)
        store = self._met(timeout)
        on_gpu = run.device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=timeout + LATER if on_gpu else timeout,
            device_id=torch.device("cuda", torch.cuda.current_device()) if on_gpu else None,
        )
        with Watch(timeout):
            agreement.agree(None, _statement(job))
            for tensor in run.model.state_dict().values():
                comm.spread(tensor, None)
            with in_shards(job, self.rank) if run.recipe.train.parallel == "shard" else nullcontext():
                yield
        dist.destroy_process_group()

    def _met(self, timeout: timedelta) -> Any:
        """The store of the launcher, when all ranks have come there: some may still be reading their data."""
        store, _, _ = next(rendezvous("env://", self.rank, self.size, timeout=timeout))
        if store.add(LOADED, 1) == self.size:
            store.set(f"{LOADED}: all", "")
        store.wait([f"{LOADED}: all"], LOADING)
        return store

    def restore(self, checkpoints: Checkpoints, parts: Parts, stream: Stream | None) -> int:
        """`checkpoints.restore`, on every rank from the checkpoint that the first one found; its step, or 0."""
        if self.size == 1:
            return checkpoints.restore(parts)
        if is_sharded(parts["model"]):
            parts = dealt(parts)
        statement: dict[str, Any] = {"checkpoint": 0}
        if self.rank == 0:
            try:
                statement = {"checkpoint": checkpoints.restore(parts)}
            except ValueError as error:
                statement = {"error": str(error)}
        step = int(agreement.agree(None, statement, free=("checkpoint",))[0]["checkpoint"])
        if self.rank > 0 and step:
            checkpoints.restore_as(step, parts)
            if stream is not None:
                # the first rank has them
                stream.skipped, stream.seen = Counter(), 0
        return step

    def save(self, checkpoints: Checkpoints, step: int, seconds: float, parts: Parts, *, must: bool = False) -> None:
        """`checkpoints.save`, of parts that are whole: what is in shards all ranks bring together for the first one."""
        if is_sharded(parts["model"]):
            parts = taken(parts, keep=self.rank == 0)
        checkpoints.save(step, seconds, parts, must=must)

    def hand_in(self, stream: Stream | None) -> None:
        """The first rank counts what all of them skipped so far, the others count anew."""
        if self.size == 1 or stream is None:
            return
        self._count(stream, agreement.agree(None, _counts(stream), free=("skipped", "seen")))

    def _count(self, stream: Stream, stated: Sequence[Mapping[str, Any]]) -> None:
        stream.skipped, stream.seen = Counter(), 0
        for one in stated if self.rank == 0 else ():
            stream.skipped.update(one["skipped"])
            stream.seen += one["seen"]

    def agree(
        self, step: int, seconds: float, signal: int | None, stream: Stream | None = None
    ) -> tuple[float, int | None]:
        """Before a step: the first rank's clock, and the signal that any of them got.

        Raises ValueError, on all of them, where they have skipped too much of the stream together; their counts are
        handed in by then.
        """
        stated: list[dict[str, Any]] = [{"seconds": seconds, "signal": signal, **_counts(stream)}]
        if self.size > 1:
            here.begin(step)
            stated = agreement.agree(None, {"step": step, **stated[0]}, free=(*stated[0],))
        if stream is not None:
            skipped = sum((Counter(one["skipped"]) for one in stated), Counter[str]())
            try:
                stream.check(skipped, sum(one["seen"] for one in stated))
            except ValueError:
                # the first one is about to write down what came of the run
                self._count(stream, stated)
                raise
        signals = [other["signal"] for other in stated if other["signal"] is not None]
        return stated[0]["seconds"], signals[0] if signals else None

    @torch.no_grad()
    def combine(self, model: nn.Module, loss: Tensor, how: Gradient) -> Tensor:
        """Gives every parameter the ranks' mean (or sum) of its gradient, and returns the mean of the loss.

        One sum over ranks, of everything in float32. A parameter that no rank has a gradient for gets none.
        """
        if self.size == 1:
            return loss
        if is_sharded(model):
            settle_gradients(model, how)
            return comm.total(loss, None) / self.size
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        there = torch.tensor([parameter.grad is not None for parameter in parameters], device=loss.device)
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        together = torch.cat([x.reshape(-1).float() for x in (loss, there, *flat)])
        comm.sum_into(together, None, "sum of gradients")
        loss, there, *flat = together.split([1, len(parameters), *(p.numel() for p in parameters)])
        factor = 1 / self.size if how == "mean" else 1.0
        for parameter, anywhere, gradient in zip(parameters, there.tolist(), flat, strict=True):
            parameter.grad = (gradient * factor).view_as(parameter).to(parameter.dtype) if anywhere else None
        return loss[0] / self.size


ALONE = Ranks()


def _counts(stream: Stream | None) -> dict[str, Any]:
    """What this rank skipped of a stream, and of how many pairs."""
    return {"skipped": {}, "seen": 0} if stream is None else {"skipped": stream.skipped, "seen": stream.seen}


def _statement(job: Job[Any]) -> dict[str, str | int]:
    """What ranks must have in common before the first step."""
    return {
        "device": job.run.device.type,
        job.unit: len(job.rows),
        "data": job.data[:16],
        "recipe": hashlib.sha256(to_toml(job.run.recipe).encode()).hexdigest()[:16],
        "torch": torch.__version__,
    }
