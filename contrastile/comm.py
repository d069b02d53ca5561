"""All plumbing of process groups: who is here, what they agree on, what they hand to their neighbours.

Ground of the house, used by `exchange/` and by `_contrast.py`. Everything is torch.distributed's; ranks are counted
within the group. A message of no bytes is not sent: sender and receiver both know that it is empty.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from contrastile._check import wrong

# torch 2.13 gave these their new names, and warns at the old ones
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# bytes of what a rank says of itself before a step's first exchange
STATEMENT = 2048


def size(group: Any) -> int:
    """The number of ranks in the group; 1 without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(group)


def rank(group: Any) -> int:
    return dist.get_rank(group) if size(group) > 1 else 0


def agree(group: Any, statement: dict[str, Any], free: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What every rank states, in rank order, after making sure that they state the same (but for the `free` entries).

    A rank whose own checks failed states {"error": its sentence}; every rank then raises it. So a rank that is
    wrong is an error on all of them, before any exchange could wait for ever.
    """
    written = json.dumps(statement).encode()[:STATEMENT]
    mine = torch.zeros(STATEMENT, dtype=torch.uint8)
    mine[: len(written)] = torch.frombuffer(bytearray(written), dtype=torch.uint8)
    device = _device(group)
    everyone = torch.empty(size(group) * STATEMENT, dtype=torch.uint8, device=device)
    _all_gather(everyone, mine.to(device), group=group)
    stated = [json.loads(bytes(part.tolist()).rstrip(b"\0")) for part in everyone.cpu().reshape(-1, STATEMENT).unbind()]
    for at, other in enumerate(stated):
        if "error" in other:
            raise ValueError(f"rank {at}: {other['error']}")
    for name in stated[0]:
        values = [other.get(name) for other in stated]
        if name not in free and any(value != values[0] for value in values):
            odd = next(at for at, value in enumerate(values) if value != values[0])
            raise wrong(
                name,
                "be the same on all ranks",
                f"{values[0]!r} on rank 0 and {values[odd]!r} on rank {odd}",
                "Build the loss and its inputs alike everywhere.",
            )
    return stated


def gather_rows(x: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
    """The rows [Σ sizes, ...] of all ranks' x, in rank order; ranks may have different numbers of them."""
    if x.dtype == torch.bool:
        return gather_rows(_sendable(x), sizes, group).view(torch.bool)
    most = max(sizes)
    room = x.new_empty((len(sizes) * most, *x.shape[1:]))
    _all_gather(room, _padded(x, most), group=group)
    return torch.cat([part[:n] for part, n in zip(room.split(most), sizes, strict=True)])


def scatter_sum(x: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
    """This rank's rows of Σ over ranks of x [Σ sizes, ...]."""
    most = max(sizes)
    parts = torch.cat([_padded(part, most) for part in x.split(list(sizes))])
    mine = x.new_empty((most, *x.shape[1:]))
    _reduce_scatter(mine, parts, group=group)
    return mine[: sizes[rank(group)]]


def exchange_rows(x: Tensor, sizes: Sequence[int], group: Any) -> list[Tensor]:
    """Each rank's version of this rank's rows of x [Σ sizes, ...]: W tensors [sizes[rank], ...], in rank order."""
    most = max(sizes)
    parts = torch.cat([_padded(part, most) for part in x.split(list(sizes))])
    room = torch.empty_like(parts)
    dist.all_to_all_single(room, parts, group=group)
    return [part[: sizes[rank(group)]] for part in room.split(most)]


def total(x: Tensor, group: Any) -> Tensor:
    """Σ over ranks of x, the same bits everywhere."""
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


@dataclass
class Flight:
    """Tensors under way from the previous rank and to the next one."""

    works: list[Any]
    arriving: list[Tensor]
    # must live until they have left
    leaving: list[Tensor]

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        self.leaving = []
        return self.arriving


def post(leaving: Sequence[Tensor], arriving: Sequence[Tensor], group: Any) -> Flight:
    """Sends tensors to the next rank of the ring and receives as many buffers from the previous one."""
    ranks, here = size(group), rank(group)
    following = dist.get_global_rank(_default(group), (here + 1) % ranks)
    previous = dist.get_global_rank(_default(group), (here - 1) % ranks)
    sent = [_sendable(x).contiguous() for x in leaving]
    operations = [dist.P2POp(dist.isend, x, following, group) for x in sent if x.numel()]
    operations += [dist.P2POp(dist.irecv, _sendable(x), previous, group) for x in arriving if x.numel()]
    works = dist.batch_isend_irecv(operations) if operations else []
    return Flight(works, list(arriving), sent)


def _default(group: Any) -> Any:
    return dist.group.WORLD if group is None else group


def _sendable(x: Tensor) -> Tensor:
    """x as bytes, where it is made of truth values, which not every backend sends."""
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def _padded(x: Tensor, rows: int) -> Tensor:
    if len(x) == rows:
        return x.contiguous()
    padded = x.new_zeros((rows, *x.shape[1:]))
    padded[: len(x)] = x
    return padded


def _device(group: Any) -> torch.device:
    """Where the group's backend wants its tensors."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
