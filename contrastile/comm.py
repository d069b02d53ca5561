"""What ranks hand to each other: to all, to the first, to the next of a ring; and who they are.

Ground of the house, used wherever ranks meet: by `exchange/`, `agreement.py`, `wrappers.py` and `train/ranks.py`.
Everything is torch.distributed's; ranks are counted within the group. A message of no bytes is not sent: sender and
receiver both know that it is empty. What fails here is told by `rollcall.py`, with the rank, the step and the
operation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from contrastile._check import wrong
from contrastile._types import Gradient
from contrastile.rollcall import LostRankError, here, lost

# torch 2.13 gave these their new names, and warns at the old ones
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# words of Gloo's errors, of which that of a rank that hung up itself has no address
OF_GLOO = ("gloo", "pair closure")
RING = "ring exchange"
# types that every backend sends
SENT = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
# by group: what has been posted and not waited for. It keeps the buffers alive, whatever becomes of the caller
under_way: dict[Any, Flight] = {}
# by group, see `in_step.py`: how many operations this rank has begun there, and the error of its own by which it left
begun: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
left: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def size(group: Any) -> int:
    """The number of ranks in the group; 1 without torch.distributed."""
    if not dist.is_available():
        return 1
    if group is not None and not isinstance(group, dist.ProcessGroup) and group != dist.GroupMember.NON_GROUP_MEMBER:
        remedy = "Pass what torch.distributed.new_group gives."
        raise wrong("group", "be a process group", type(group).__name__, remedy)
    if not dist.is_initialized():
        return 1
    ranks = dist.get_world_size(group)
    if ranks < 1:
        raise wrong("group", "have this rank in it", f"a group without rank {dist.get_rank()}", "Pass the rank's own.")
    return ranks


def rank(group: Any) -> int:
    """This rank's number within the group; 0 without torch.distributed."""
    return dist.get_rank(group) if size(group) > 1 else 0


def gather_rows(x: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
    """The rows [Σ sizes, ...] of all ranks' x, in rank order; ranks may have different numbers of them."""
    return begin_gather([x], sizes, group).wait()[0]


def begin_gather(each: Sequence[Tensor], sizes: Sequence[int], group: Any) -> Flight:
    """`gather_rows` of several tensors, under way: what it brings is there after `wait`."""
    group, largest = resolved(group), max(sizes)
    sent = [_padded(_sendable(x), largest) for x in each]
    rooms = [x.new_empty((len(sizes) * largest, *x.shape[1:])) for x in sent]

    def joined(arrived: list[Tensor]) -> list[Tensor]:
        return [_received(_joined(room, sizes), x.dtype) for room, x in zip(arrived, each, strict=True)]

    with together("gather of rows", group):
        works = [
            all_gather(room, x, group=group, async_op=True) for room, x in zip(rooms, sent, strict=True) if room.numel()
        ]
    return _take_off(Flight(group, "gather of rows", works, rooms, sent, joined))


def begin_scatter_sum(x: Tensor, sizes: Sequence[int], group: Any) -> Flight:
    """This rank's rows of Σ over ranks of x [Σ sizes, ...], under way."""
    group, largest, what = resolved(group), max(sizes), "sum of the ranks' parts"
    even = all(n == largest for n in sizes)
    parts = x if even else torch.cat([_padded(part, largest) for part in x.split(list(sizes))])
    mine, rows = x.new_empty((largest, *x.shape[1:])), sizes[rank(group)]
    with together(what, group):
        works = [_reduce_scatter(mine, parts, group=group, async_op=True)] if mine.numel() else []
    return _take_off(Flight(group, what, works, [mine], [parts], lambda arrived: [arrived[0][:rows]]))


def exchange_rows(x: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
    """From the rows x [Σ sizes of the others, ...] meant for each other rank, those meant for this one.

    [W − 1, sizes[rank], ...], in rank order; nothing is meant for the rank itself.
    """
    me, W = rank(group), len(sizes)
    leaving = [0 if other == me else n for other, n in enumerate(sizes)]
    arriving = [0 if other == me else sizes[me] for other in range(W)]
    room = x.new_empty(((W - 1) * sizes[me], *x.shape[1:]))
    with together("exchange of statistics", group):
        dist.all_to_all_single(room, x, arriving, leaving, group=group)
    return room.view(W - 1, sizes[me], *x.shape[1:])


def total(x: Tensor, group: Any) -> Tensor:
    """Σ over ranks of x, the same bits everywhere."""
    x = x.clone()
    sum_into(x, group, "sum over ranks")
    return x


def sum_into(x: Tensor, group: Any, what: str) -> None:
    """x becomes its sum over ranks."""
    with together(what, group):
        dist.all_reduce(x, group=group)


def spread(x: Tensor, group: Any) -> None:
    """x becomes what it is on the group's first rank."""
    sent = x.contiguous()
    with together("broadcast", group):
        dist.broadcast(sent, dist.get_global_rank(resolved(group), 0), group=group)
    if sent is not x:
        x.copy_(sent)


def whole(x: Tensor, combined: Gradient) -> Tensor:
    """A sharded number (FSDP2's scale, used before the module that owns it has run) as all ranks see it.

    Its gradient is combined here as the wrapper would: by the ranks' mean, or by their sum.
    """
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None or not isinstance(x, tensor.DTensor):
        return x
    mesh = x.device_mesh
    full: Tensor = x.full_tensor(grad_placements=[tensor.Partial("sum")] * mesh.ndim)
    if combined == "mean" and full.requires_grad:
        full.register_hook(lambda gradient: gradient / mesh.size())
    return full


def options(group: Any) -> Any:
    """Of the group's backend between GPUs."""
    backend = group._get_backend(torch.device("cuda"))
    # TORCH_DISTRIBUTED_DEBUG=DETAIL puts it into another one, which in older versions has no options
    return getattr(backend, "wrapped_pg", backend).options


def held(group: Any) -> int:
    """Multiprocessors that transfers between GPUs may hold at once, where that was limited; 0 where it was not.

    By the group's own `config.max_ctas`, or for all groups by NCCL_MAX_CTAS, which has the last word.
    """
    group = resolved(group)
    if "nccl" not in dist.get_backend_config(group):
        return 0
    config = getattr(options(group), "config", None)
    # a number below 0 says that none was given
    limit: int = getattr(config, "max_ctas", -1)
    return max(0, int(os.environ.get("NCCL_MAX_CTAS") or limit))


def _as_it_came(arrived: list[Tensor]) -> list[Tensor]:
    return arrived


@dataclass
class Flight:
    """Tensors under way between ranks; waited for once, before anything else is sent."""

    group: Any
    operation: str
    works: list[Any]
    arriving: list[Tensor]
    # must live until they have left
    leaving: list[Tensor]
    # what to make of them
    made: Callable[[list[Tensor]], list[Tensor]] = _as_it_came

    def wait(self) -> list[Tensor]:
        """What has arrived. Raises RuntimeError where it was waited for before."""
        if under_way.pop(self.group, None) is not self:
            raise _misused(f"a {self.operation} that was waited for already")
        with together(self.operation, self.group):
            for work in self.works:
                work.wait()
        self.leaving = []
        return self.made(self.arriving)


def post(leaving: Tensor, arriving: Tensor, group: Any) -> Flight:
    """Sends a tensor to the next rank of the ring and receives another from the previous one.

    Raises RuntimeError where something is under way in the group already.
    """
    group = resolved(group)
    ranks, me = size(group), rank(group)
    operations = [(group.send, leaving, (me + 1) % ranks), (group.recv, arriving, (me - 1) % ranks)]
    with together(RING, group):
        works = _carried_out([each for each in operations if each[1].numel()], group)
    return _take_off(Flight(group, RING, works, [arriving], [leaving]))


def _carried_out(operations: list[tuple[Callable[..., Any], Tensor, int]], group: Any) -> list[Any]:
    """What `dist.batch_isend_irecv` does with sends and receives, in a third of its time on the host."""
    if not operations:
        return []
    device = operations[0][1].device
    coalesced = group._get_backend(device).supports_coalescing
    if coalesced:
        group._start_coalescing(device)
    works = [operation([x], other, 0) for operation, x, other in operations]
    return [group._end_coalescing(device)] if coalesced else works


def _take_off(flight: Flight) -> Flight:
    under_way[flight.group] = flight
    return flight


@contextmanager
def together(operation: str, group: Any, by: Any = None) -> Iterator[None]:
    """Around what all ranks of the group carry out: where it fails, the error says who, when and what.

    by: the group whose connections carry it, if that is another one.
    """
    group = resolved(group)
    if group in left:
        rule, remedy = "be carried out by all ranks", "Start all ranks again."
        raise LostRankError(str(wrong(operation, rule, f"this one, which left the others by {left[group]}", remedy)))
    if group in under_way:
        raise _misused(f"a {under_way[group].operation} under way, which the {operation} would meet")
    begun[group] = begun.get(group, 0) + 1
    here.operation = operation
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        here.failing = True
        raise lost(operation, by or group, error) from error
    here.operation = None


@contextmanager
def naming_the_lost(operation: str, group: Any) -> Iterator[None]:
    """Around exchanges that are not made here, such as FSDP2's: where one fails, the error says who and when."""
    try:
        yield
    except LostRankError:
        raise
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(word in str(error) for word in OF_GLOO):
            raise
        here.failing = True
        raise lost(operation, group, error) from error


def _misused(what: str) -> RuntimeError:
    remedy = "An error or a second thread left it so; start all ranks again, and give each thread a group of its own."
    return RuntimeError(str(wrong("group", "carry one exchange at a time", what, remedy)))


def resolved(group: Any) -> Any:
    """The group that is meant: the default one for None."""
    return dist.group.WORLD if group is None else group


def _sendable(x: Tensor) -> Tensor:
    """x, or the bytes of each of its numbers, of a type that not every backend sends."""
    return x if x.dtype in SENT else x.contiguous().unsqueeze(-1).view(torch.uint8)


def _received(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What was made `_sendable`, in the type that it had."""
    return x if x.dtype == dtype else x.view(dtype).squeeze(-1)


def _joined(room: Tensor, sizes: Sequence[int]) -> Tensor:
    """The rows of all ranks without what pads them; as they came where nothing does."""
    largest = max(sizes)
    if all(n == largest for n in sizes):
        return room
    return torch.cat([part[:n] for part, n in zip(room.split(largest), sizes, strict=True)])


def _padded(x: Tensor, rows: int) -> Tensor:
    if len(x) == rows:
        return x.contiguous()
    padded = x.new_zeros((rows, *x.shape[1:]))
    padded[: len(x)] = x
    return padded
