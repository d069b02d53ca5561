"""Collectives: operations that all ranks of a process group carry out together.

Stands on the ground of the house, on `failure.py`; `exchange/`, `consistency.py`, `ddp_fsdp.py` and
`train/` use it. The transport is torch.distributed's. A tensor without elements is not sent: sender and receiver both
know that it is empty. A collective that fails raises `LostRankError`, with the rank, the step and the operation.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from contrastile._errors import invalid
from contrastile._torch import backend_options, post_together
from contrastile._types import Gradient
from contrastile.distributed.failure import LostRankError, lost, misused, progress, state_of
from contrastile.distributed.failure import rank as rank
from contrastile.distributed.failure import resolved as resolved
from contrastile.distributed.failure import size as size

# torch 2.13 renamed both, and warns at the former names
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# texts in Gloo's errors; the second one is of a connection that this rank has closed itself
GLOO_ERRORS = ("gloo", "pair closure")
RING = "ring exchange"
# tensors that travel together begin at multiples of this number of bytes, where any kernel can read them
ALIGNMENT = 256
# bytes of host memory that travel by way of a GPU at a time, with as much of its memory in both directions
STAGED = 2**25
# bytes of a rank that copy engines carry beside a ring: they need room for as many again
MOST_COPIED = 2**28
# dtypes that every backend sends; tensors of another one are sent as bytes
SENDABLE = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64,
)  # fmt: skip


class Collective:
    """Context of an operation of all ranks: its failure becomes an error that names rank, step and operation.

    carrier: the group whose connections carry it, if not this one. begins: it is no wait for one that has begun.
    copied: no backend carries it, so that no error tells of a lost rank, and no replay counts it. A class, because a
    generator takes twice as long.
    """

    def __init__(
        self, operation: str, group: Any, carrier: Any = None, *, begins: bool = True, copied: bool = False
    ) -> None:
        self._operation, self._group, self._carrier = operation, resolved(group), carrier
        self._begins, self._copied = begins, copied

    def __enter__(self) -> None:
        state, operation = state_of(self._group), self._operation
        if state.left_by is not None:
            rule, got = "be carried out by all ranks", f"this one, which left the others by {state.left_by}"
            raise LostRankError(str(invalid(operation, rule, got, "Start all ranks again.")))
        if state.in_flight is not None:
            raise misused(f"a {state.in_flight.operation} under way, which the {operation} would meet")
        if self._copied:
            state.hops += self._begins
        else:
            state.operations += self._begins
        progress.operation = operation

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            progress.operation = None
        elif not self._copied:
            _raise_lost(error, self._operation, self._carrier or self._group)


class _CapturedCall(threading.local):
    """The call that this thread captures, to be replayed later; `transfer` takes each step that graphs cannot have."""

    transfer: Callable[[Callable[[], None]], None] | None = None


captured_call = _CapturedCall()


def _carry_out(step: Callable[[], None]) -> None:
    """Take a step of an operation of all ranks: now, and in each replay of a call that is captured."""
    if captured_call.transfer is None:
        step()
    else:
        captured_call.transfer(step)


@contextmanager
def reporting_lost_ranks(operation: str, group: Any) -> Iterator[None]:
    """Turn a backend's error in collectives that torch makes, such as FSDP2's, into one that names rank and step."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(words in str(error) for words in GLOO_ERRORS):
            _raise_lost(error, operation, group)
        raise


def _raise_lost(error: BaseException, operation: str, group: Any) -> None:
    """Raise the error that names the missing ranks, where a backend's RuntimeError tells of them."""
    if isinstance(error, RuntimeError) and not isinstance(error, (torch.OutOfMemoryError, LostRankError)):
        progress.failing = True
        raise lost(operation, group, error) from error


@dataclass
class Transfer:
    """Tensors on their way between ranks. `wait` is called once, before the group carries anything else."""

    group: Any
    operation: str
    # posts it, and returns the works to be waited for; keeps what leaves alive
    post: Callable[[], list[Any]]
    arriving: list[Tensor]
    # result of `wait`, made of the tensors that arrived
    finish: Callable[[list[Tensor]], list[Tensor]] = list
    # copy engines carry it: a captured call's graphs have both steps
    copied: bool = False

    def __post_init__(self) -> None:
        self.works: list[Any] = []
        self._take(self._begin)

    def wait(self) -> list[Tensor]:
        """The tensors that arrived. Raises RuntimeError at a second call."""
        if state_of(self.group).in_flight is not self:
            raise misused(f"a {self.operation} that was waited for already")
        self._take(self.complete)
        return self.finish(self.arriving)

    def _take(self, step: Callable[[], None]) -> None:
        if self.copied:
            step()
        else:
            _carry_out(step)

    def _begin(self) -> None:
        with Collective(self.operation, self.group, copied=self.copied):
            self.works = self.post()
        state_of(self.group).in_flight = self

    def complete(self) -> None:
        """Wait until nothing is under way, and let the group carry the next operation."""
        state_of(self.group).in_flight = None
        with Collective(self.operation, self.group, begins=False, copied=self.copied):
            for work in self.works:
                work.wait()
        self.works = []


def post(leaving: Tensor, arriving: Tensor, group: Any, gpu: torch.device | None = None) -> Transfer:
    """Send a tensor to the next rank of the ring and receive another from the previous one.

    gpu: this rank's, by way of which tensors in host memory travel. Raises RuntimeError where the group has a transfer
    under way.
    """
    group = resolved(group)
    ranks, me = group.size(), group.rank()

    def posted(leaving: Tensor = leaving, arriving: Tensor = arriving) -> list[Any]:
        operations = [(group.send, leaving, (me + 1) % ranks), (group.recv, arriving, (me - 1) % ranks)]
        return post_together([each for each in operations if each[1].numel()], group)

    staged = posted if gpu is None else partial(_staged, leaving, arriving, gpu, posted)
    return Transfer(group, RING, staged, [arriving])


def has_nccl(group: Any) -> bool:
    """Return whether NCCL carries the group's tensors on GPUs."""
    return "cuda:nccl" in dist.get_backend_config(resolved(group))


def _staged(
    leaving: Tensor, arriving: Tensor, gpu: torch.device, posted: Callable[[Tensor, Tensor], list[Any]]
) -> list[Any]:
    """Copy parts of a tensor in host memory to the GPU, post them, and copy what arrives to host memory.

    The host waits for the result, which it reads next; nothing else waits for this.
    """
    sides = [x.view(-1).view(torch.uint8) for x in (leaving, arriving)]
    stream = torch.cuda.Stream(gpu)
    with torch.cuda.stream(stream):
        memory = [x.new_empty(min(len(x), STAGED), device=gpu) for x in sides]
        for start in range(0, max(map(len, sides)), STAGED):
            parts = [x[start : start + STAGED] for x in sides]
            out, into = (room[: len(part)] for room, part in zip(memory, parts, strict=True))
            out.copy_(parts[0], non_blocking=True)
            for work in posted(out, into):
                # the stream waits, not the host
                work.wait()
            parts[1].copy_(into, non_blocking=True)
        return [_Arrival(stream.record_event(), memory)]


@dataclass
class _Arrival:
    """The end of a transfer by way of a GPU, whose memory is kept until then."""

    event: torch.cuda.Event
    memory: list[Tensor]

    def wait(self) -> None:
        """Wait until all that arrives is in host memory."""
        self.event.synchronize()


def _copy_buffers(x: Tensor, count: int, group: Any) -> Any:
    """The buffers by which copy engines carry `count` bytes of each rank; None where the group's backend does."""
    buffers = state_of(group).neighbours
    if buffers is None or not x.is_cuda or count > min(2 * buffers.size, MOST_COPIED):
        return None
    if torch.cuda.is_current_stream_capturing():
        # a graph of the user's own would read buffers that later calls replace
        return None if captured_call.transfer is None else buffers
    buffers.follow()
    return buffers


def bytes_per_row(x: Tensor) -> int:
    return prod(x.shape[1:]) * x.itemsize


def aligned(count: int) -> int:
    """The number of bytes up to the next multiple of `ALIGNMENT`."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def gather_rows(x: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
    """The rows [Σ sizes, ...] of all ranks' x, in rank order; ranks may have different numbers of rows."""
    return begin_gather([x], sizes, group).wait()[0]


def begin_gather(tensors: Sequence[Tensor], sizes: Sequence[int], group: Any) -> Transfer:
    """Start `gather_rows` of several tensors."""
    group, largest = resolved(group), max(sizes)
    if buffers := _copy_buffers(tensors[0], sum(aligned(largest * bytes_per_row(x)) for x in tensors), group):
        return buffers.begin_gather(tensors, sizes, group)
    sent = [_padded(_as_bytes(x), largest) for x in tensors]
    received = [x.new_empty((len(sizes) * largest, *x.shape[1:])) for x in sent]

    def unpacked(arrived: list[Tensor]) -> list[Tensor]:
        # not copied where there is no padding
        if any(n != largest for n in sizes):
            arrived = [torch.cat([rows[:n] for rows, n in zip(x.split(largest), sizes, strict=True)]) for x in arrived]
        pairs = zip(arrived, tensors, strict=True)
        return [all_rows if all_rows.dtype == x.dtype else all_rows.view(x.dtype).squeeze(-1) for all_rows, x in pairs]

    def posted() -> list[Any]:
        several = zip(received, sent, strict=True)
        return [all_gather(all_rows, x, group=group, async_op=True) for all_rows, x in several if all_rows.numel()]

    return Transfer(group, "gather of rows", posted, received, unpacked)


def begin_scatter_sum(x: Tensor, sizes: Sequence[int], group: Any) -> Transfer:
    """Start the sum over ranks of x [Σ sizes, ...], of which each rank receives its own rows; x may be written over."""
    group, largest = resolved(group), max(sizes)
    if buffers := _copy_buffers(x, x.nbytes, group):
        return buffers.begin_scatter_sum(x, sizes, group)
    even = all(n == largest for n in sizes)
    padded = x if even else torch.cat([_padded(rows, largest) for rows in x.split(list(sizes))])
    own, rows = x.new_empty((largest, *x.shape[1:])), sizes[group.rank()]

    def posted() -> list[Any]:
        return [_reduce_scatter(own, padded, group=group, async_op=True)] if own.numel() else []

    return Transfer(group, "sum of the ranks' parts", posted, [own], lambda arrived: [arrived[0][:rows]])


def exchange_rows(x: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
    """Send rows to every other rank, and return the rows [W − 1, sizes[rank], ...] received, in rank order.

    x [Σ sizes of the others, ...]: the rows for each other rank.
    """
    group, W = resolved(group), len(sizes)
    if buffers := _copy_buffers(x, sum(sizes) * bytes_per_row(x), group):
        return buffers.exchange_rows(x, sizes, group)
    me = group.rank()
    leaving = [0 if other == me else n for other, n in enumerate(sizes)]
    arriving = [0 if other == me else sizes[me] for other in range(W)]
    received = x.new_empty(((W - 1) * sizes[me], *x.shape[1:]))

    def carry() -> None:
        with Collective("exchange of statistics", group):
            dist.all_to_all_single(received, x, arriving, leaving, group=group)

    _carry_out(carry)
    return received.view(W - 1, sizes[me], *x.shape[1:])


def total(x: Tensor, group: Any) -> Tensor:
    """Σ over ranks of x, the same bits everywhere."""
    if buffers := _copy_buffers(x, x.nbytes, group):
        return buffers.every(x, "sum over ranks", resolved(group)).sum(0, dtype=x.dtype)
    return _reduce(x.clone(), group, "sum over ranks", dist.ReduceOp.SUM)


def largest(x: Tensor, group: Any) -> Tensor:
    """The largest over ranks of each number of x."""
    if buffers := _copy_buffers(x, x.nbytes, group):
        return buffers.every(x, "maximum over ranks", resolved(group)).amax(0)
    return _reduce(x.clone(), group, "maximum over ranks", dist.ReduceOp.MAX)


def sum_into(x: Tensor, group: Any, operation: str) -> None:
    """Replace x by its sum over ranks."""
    _reduce(x, group, operation, dist.ReduceOp.SUM)


def _reduce(x: Tensor, group: Any, operation: str, kind: Any) -> Tensor:
    def carry() -> None:
        with Collective(operation, group):
            dist.all_reduce(x, kind, group=group)

    _carry_out(carry)
    return x


def broadcast(x: Tensor, group: Any, source: int = 0) -> None:
    """Replace x by that of one rank, the first one unless another is named."""
    sent = x.contiguous()
    with Collective("broadcast", group):
        dist.broadcast(sent, dist.get_global_rank(resolved(group), source), group=group)
    if sent is not x:
        x.copy_(sent)


def unsharded(x: Tensor, combined: Gradient) -> Tensor:
    """A sharded number, such as FSDP2's scale before the module that owns it has run, as all ranks see it.

    Its gradient is combined as the wrapper would: by the ranks' mean, or by their sum.
    """
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None or not isinstance(x, tensor.DTensor):
        return x
    mesh = x.device_mesh
    full: Tensor = x.full_tensor(grad_placements=[tensor.Partial("sum")] * mesh.ndim)
    if combined == "mean" and full.requires_grad:
        full.register_hook(lambda gradient: gradient / mesh.size())
    return full


def reserved_multiprocessors(group: Any) -> int:
    """Multiprocessors that transfers between GPUs may hold at once; 0 where no limit was set.

    The limit is the group's own `config.max_ctas`; NCCL_MAX_CTAS sets it for all groups, and has precedence.
    """
    group = resolved(group)
    if "nccl" not in dist.get_backend_config(group):
        return 0
    config = getattr(backend_options(group), "config", None)
    # negative: unset
    limit: int = getattr(config, "max_ctas", -1)
    return max(0, int(os.environ.get("NCCL_MAX_CTAS") or limit))


def _as_bytes(x: Tensor) -> Tensor:
    """x, or its bytes in a last axis if some backend does not send its dtype."""
    return x if x.dtype in SENDABLE else x.contiguous().unsqueeze(-1).view(torch.uint8)


def _padded(x: Tensor, rows: int) -> Tensor:
    if len(x) == rows:
        return x.contiguous()
    padded = x.new_zeros((rows, *x.shape[1:]))
    padded[: len(x)] = x
    return padded
