"""Ranks: processes that train one model together, under torchrun.

A batch is shared out among the ranks, the losses exchange features, and after the backward one sum gives every rank the
gradient of the whole batch. Only the first rank writes.
"""

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from contrastile._errors import invalid, logger
from contrastile._types import Gradient
from contrastile.data.pairs import Stream
from contrastile.distributed import collectives, consistency
from contrastile.distributed.failure import LostRankError, farewell, hang_up, lost, progress
from contrastile.train.checkpoints import Checkpoints, Parts
from contrastile.train.sharded import is_sharded, settle_gradients, sharded_model

# the time that ranks wait for one that still opens its data
LOADING = timedelta(hours=1)
# NCCL ends a process without a message at its timeout; the host's timeouts, which name the rank, come first
NCCL_EXTRA = timedelta(seconds=10)
LOADED = "contrastile/ranks that are loaded"
# seconds between two heartbeats, and seconds in which the main thread may raise the error itself
BEAT, GRACE = 1.0, 1.0
ALIVE, GOODBYE = 1, 0


@dataclass(frozen=True)
class Ranks:
    """This process among `size` that train together."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of_environment(cls, device: str) -> Self:
        """The ranks that torchrun started, or one process. A rank takes the GPU with its own number on the node."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if device != "cpu" and torch.cuda.is_available():
            if ":" in device:
                remedy = "Each rank takes a GPU of its own; CUDA_VISIBLE_DEVICES says which there are."
                raise invalid("device", 'be "auto", "cpu" or "cuda" for several ranks', f'"{device}"', remedy)
            local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
            if local >= gpus:
                remedy = "Start as many ranks as there are GPUs."
                raise invalid("nproc-per-node", f"be at most {gpus}, the GPUs that torch sees", local + 1, remedy)
            torch.cuda.set_device(local)
        return cls(int(os.environ["RANK"]), size)

    @property
    def share(self) -> slice:
        """This rank's rows of any batch: every `size`-th, so that each part of a batch is shared out evenly."""
        return slice(self.rank, None, self.size)

    @contextmanager
    def joined(self, task: Any) -> Iterator[None]:
        """Join the process group for a task, with the first rank's weights on all; an error where a rank is lost.

        Raises ValueError where the task's `statement` differs between ranks. After sharding its model is whole again on
        the first rank.
        """
        run, settings = task.run, task.run.recipe.train
        if self.size == 1:
            if settings.parallel == "shard":
                logger.warning('train.parallel = "shard" has no effect on one process: it has all of the weights')
            yield
            return
        timeout = timedelta(seconds=settings.timeout)
        # the launcher's store, once all ranks have opened their data
        try:
            store, _, _ = next(rendezvous("env://", self.rank, self.size, timeout=timeout))
            if store.add(LOADED, 1) == self.size:
                store.set(f"{LOADED}: all", "")
            store.wait([f"{LOADED}: all"], LOADING)
        except dist.DistError as error:
            remedy = "See what the first rank said last, and start all ranks again."
            got = f"no answer to rank {self.rank} from the store of the first"
            raise LostRankError(invalid("training", "be begun by all ranks", got, remedy)) from error
        how: dict[str, Any] = {"backend": "gloo", "timeout": timeout}
        if run.device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
            how = {"backend": "nccl", "timeout": timeout + NCCL_EXTRA, "device_id": device}
        dist.init_process_group(store=store, rank=self.rank, world_size=self.size, **how)
        with Heartbeat(timeout):
            consistency.agree(None, {"device": run.device.type, **task.statement(), "torch": torch.__version__})
            for tensor in run.model.state_dict().values():
                collectives.broadcast(tensor, None)
            sharded = settings.parallel == "shard"
            with sharded_model(task, self.rank) if sharded else nullcontext():
                yield
        dist.destroy_process_group()

    def restore(self, checkpoints: Checkpoints, parts: Parts, stream: Stream | None) -> int:
        """`checkpoints.restore` on every rank, from the checkpoint that the first rank chose; its step, or 0."""
        if self.size == 1:
            return checkpoints.restore(parts)
        statement: dict[str, Any] = {"checkpoint": 0}
        if self.rank == 0:
            try:
                statement = {"checkpoint": checkpoints.restore(parts)}
            except ValueError as error:
                statement = {"error": str(error)}
        step = int(consistency.agree(None, statement, free=("checkpoint",))[0]["checkpoint"])
        if self.rank > 0 and step:
            checkpoints.restore_as(step, parts)
            if stream is not None:
                # the first rank holds the counts of all
                stream.set_counts(**NO_COUNTS)
        return step

    def collect_counts(self, stream: Stream | None) -> None:
        """Add all ranks' counts of skipped pairs to the first rank's; the others start from zero."""
        if self.size > 1 and stream is not None:
            totals = _totals(consistency.agree(None, stream.counts, free=(*NO_COUNTS,)))
            stream.set_counts(**(totals if self.rank == 0 else NO_COUNTS))

    def agree(
        self, step: int, seconds: float, over: bool, signal: int | None, stream: Stream | None = None
    ) -> tuple[float, bool, int | None]:
        """Before a step: the first rank's clock, its decision that the run is `over`, and any rank's signal.

        Raises ValueError, on all ranks, where they have skipped too much of the stream together; the first rank has
        the counts of all by then.
        """
        counts = NO_COUNTS if stream is None else stream.counts
        statements: list[dict[str, Any]] = [{"seconds": seconds, "over": over, "signal": signal, **counts}]
        if self.size > 1:
            progress.begin(step)
            statements = consistency.agree(None, {"step": step, **statements[0]}, free=(*statements[0],))
        if stream is not None:
            totals = _totals(statements)
            try:
                stream.check(totals["skipped"], totals["seen"])
            except ValueError:
                # the first rank is about to write the run's metadata
                stream.set_counts(**(totals if self.rank == 0 else NO_COUNTS))
                raise
        signals = [statement["signal"] for statement in statements if statement["signal"] is not None]
        return statements[0]["seconds"], statements[0]["over"], signals[0] if signals else None

    @torch.no_grad()
    def combine(self, model: nn.Module, loss: Tensor, how: Gradient) -> Tensor:
        """Give every parameter the mean (or sum) of its gradient over ranks; return the mean of the loss.

        One all-reduce of everything in float32, of float64 weights in float64. A parameter without a gradient on any
        rank gets none.
        """
        if self.size == 1:
            return loss
        if is_sharded(model):
            settle_gradients(model, how)
            return collectives.total(loss, None) / self.size
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        present = torch.tensor([parameter.grad is not None for parameter in parameters], device=loss.device)
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        wide = torch.float64 if any(x.dtype == torch.float64 for x in flat) else torch.float32
        buffer = torch.cat([x.reshape(-1).to(wide) for x in (loss, present, *flat)])
        collectives.sum_into(buffer, None, "sum of gradients")
        loss, present, *flat = buffer.split([1, len(parameters), *(p.numel() for p in parameters)])
        factor = 1 / self.size if how == "mean" else 1.0
        for parameter, anywhere, gradient in zip(parameters, present.tolist(), flat, strict=True):
            parameter.grad = (gradient * factor).view_as(parameter).to(parameter.dtype) if anywhere else None
        return loss[0] / self.size


ALONE = Ranks()
# a stream's counts of pairs, before one is read
NO_COUNTS: dict[str, Any] = {"skipped": {}, "lost": {}, "seen": 0}


def _totals(statements: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The counts of all ranks together."""
    by_reason = {name: sum((Counter(one[name]) for one in statements), Counter[str]()) for name in ("skipped", "lost")}
    return {**by_reason, "seen": sum(statement["seen"] for statement in statements)}


class Heartbeat:
    """`with Heartbeat(timeout):` ends this process with a sentence, and exit code 1, when a rank is lost.

    A backend notices a missing rank only when it waits for it, and NCCL only after its timeout. Therefore a thread
    sends one byte to the next rank every second, and another thread receives the previous rank's: a broken connection
    is a dead rank, silence for the timeout a hanging one. A main thread that waits for the lost rank through Gloo is
    woken and raises the error itself.

    Ranks whose launcher, torchrun, has ended send themselves a SIGTERM: they save after this step and end. Otherwise
    they would train on, and nothing would stop them.
    """

    def __init__(self, timeout: timedelta) -> None:
        # a separate group on the host, so that a collective of the main thread cannot block these threads
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        rank, size = dist.get_rank(), dist.get_world_size()
        self._next, self._previous = (rank + 1) % size, (rank - 1) % size
        self._every = min(BEAT, timeout.total_seconds() / 4)
        self._done = threading.Event()
        # None without a launcher: a rank may outlive the shell that started it
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        # True where this process ends by an error of its own
        self._failed = False
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._send, self._receive)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._failed = error is not None
        self._done.set()
        if error is None:
            for thread in self._threads:
                thread.join()
        else:
            # tell the other ranks at once, before this process has ended
            if not isinstance(error, LostRankError):
                farewell(error)
            hang_up(self._group)
            hang_up(None)

    def _send(self) -> None:
        # a lost next rank is noticed by the rank that listens to it
        with suppress(RuntimeError):
            while not self._done.wait(self._every):
                dist.send(torch.tensor([ALIVE]), self._next, self._group)
                if self._launcher not in (None, os.getppid()):
                    self._launcher = None
                    logger.warning("the launcher of this rank has ended; the run stops after this step, as by SIGTERM")
                    os.kill(os.getpid(), signal.SIGTERM)
            if not self._failed:
                dist.send(torch.tensor([GOODBYE]), self._next, self._group)

    def _receive(self) -> None:
        beat = torch.tensor([ALIVE])
        try:
            while beat.item() == ALIVE:
                dist.recv(beat, self._previous, self._group)
        except RuntimeError as error:
            if self._failed:
                return
            # wakes the main thread
            hang_up(None)
            failure = lost(progress.operation or "training", self._group, error)
            time.sleep(GRACE)
            if not (self._failed or progress.failing):
                sys.stderr.write(f"{failure}\n")
                sys.stderr.flush()
                os._exit(1)
