"""Transfers between the GPUs of one node by their copy engines, where each reaches the others' memory.

Above `collectives.py`, whose functions take these buffers where a group has them; `exchange/` has them made. NCCL's
transfers are kernels. While one lasts it holds multiprocessors, and a program of a large kernel whose multiprocessor is
taken starts after the transfer. The host posts each of them, which takes it longer than few rows take the device. Copy
engines leave all multiprocessors to the tiles, and a CUDA graph can have a whole transfer.

Each rank has two buffers, and two flags for each other rank, in symmetric memory, which the others address as their
own. A transfer reads what other ranks have written into their buffers:

    a rank that is read                     rank r, which reads it
    its buffer is filled: ready of r := 1   waits for ready, and sets it to 0
                                            copies from the buffer
    waits for taken, and sets it to 0       taken of that rank := 1

A stream writes the flags and waits for them, so that neither the host nor a kernel does. In the ring each rank reads
the one before it, and in all other transfers all others.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import CDLL, Structure, byref, c_int, c_uint, c_uint32, c_uint64, c_void_p, py_object, pythonapi
from functools import cache, partial
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from contrastile._torch import backend_timeout, current_stream_address, symmetric
from contrastile.distributed.collectives import ALIGNMENT, RING, Transfer, aligned, bytes_per_row, captured_call
from contrastile.distributed.consistency import any_of, numbers_of_ranks
from contrastile.distributed.failure import resolved, state_of
from contrastile.distributed.watch import watch

logger = logging.getLogger("contrastile")

# bytes of both buffers, which stay between calls; with larger ones a hop takes so long that a transfer hardly matters
MOST_BUFFER_BYTES = 2**30
# kinds of flags, and the ranks for whose flags, four bytes each, there is room in `ALIGNMENT` bytes
READY, TAKEN = 0, 1
MOST_RANKS = ALIGNMENT // 8
# the driver's numbers: a wait for a word and a write of one, in the order of a stream; a wait until it equals a value
WAIT, WRITE, EQUAL = 1, 2, 1
# the mode of a thread that disturbs no capture
RELAXED = 2
# bytes beside a buffer that its allocation may take
ROOM = 2**22
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Neighbours:
    """Two buffers of this rank, which others read, and those of all ranks of the node, in rank order.

    Transfers beside the ring's have both buffers as one. All ranks begin the same transfer, with one under way at a
    time; `collectives.py` describes each.
    """

    def __init__(self, memories: Sequence[Tensor], rank: int, size: int, timeout: float = inf) -> None:
        """Take the memory of each rank: two buffers of `size` bytes, then the flags.

        timeout: seconds of a step after which this process ends.
        """
        self.memory, self.size, self._rank, self._memories = memories[rank], size, rank, memories
        self._timeout, self._prepare = timeout, partial(_prepare, self.memory.device)
        self._others = [each for each in range(len(memories)) if each != rank]
        # transfers have been begun since the last `watch`
        self.unwatched = False
        # since the last `used_bytes`: steps have used them, and bytes of what a step wrote; none where it was replayed
        self.used, self.needed = False, 0
        self.buffers = [self.memory[:size], self.memory[size : 2 * size]]
        device = self.memory.device
        self._stream, self._reader = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        _all.add(self)

    def post(self, group: Any, number: int, arriving: Tensor) -> Transfer:
        """Let the next rank read buffer `number`, and read the previous rank's buffer of that number into `arriving`.

        Raises RuntimeError where the group has a transfer under way.
        """
        W = len(self._memories)
        previous, following = (self._rank - 1) % W, (self._rank + 1) % W
        return self._transfer(group, RING, [(previous, number * self.size, arriving)], [following], [arriving])

    def begin_gather(
        self, tensors: Sequence[Tensor], sizes: Sequence[int], group: Any, operation: str = "gather of rows"
    ) -> Transfer:
        received, reads, at = [], list[tuple[int, int, Tensor]](), 0
        for x in (x.detach() for x in tensors):
            self._write(x, at)
            every = x.new_empty((sum(sizes), *x.shape[1:]))
            parts = every.split(list(sizes))
            parts[self._rank].copy_(x)
            reads += [(other, at, parts[other]) for other in self._others]
            received.append(every)
            at += aligned(max(sizes) * bytes_per_row(x))
        return self._transfer(group, operation, reads, self._others, received)

    def begin_scatter_sum(self, x: Tensor, sizes: Sequence[int], group: Any) -> Transfer:
        x = x.detach().contiguous()
        self._write(x, 0)
        first, own = sum(sizes[: self._rank]), x.split(list(sizes))[self._rank]
        if len(set(sizes)) == 1:
            # x has been copied: the others' parts arrive in its memory, beside its own
            parts = x.view(len(sizes), *own.shape)
        else:
            parts = x.new_empty((len(sizes), *own.shape))
            parts[self._rank].copy_(own)
        reads = [(other, first * bytes_per_row(x), parts[other]) for other in self._others]
        operation = "sum of the ranks' parts"

        def summed(arrived: list[Tensor]) -> list[Tensor]:
            return [arrived[0].sum(0, dtype=x.dtype)]

        return self._transfer(group, operation, reads, self._others, [parts], summed)

    def exchange_rows(self, x: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
        self._write(x, 0)
        rows = sizes[self._rank]
        received = x.new_empty((len(self._others), rows, *x.shape[1:]))
        reads = []
        for other, part in zip(self._others, received, strict=True):
            # of the others' rows, in rank order, there are none for itself
            first = sum(n for each, n in enumerate(sizes[: self._rank]) if each != other)
            reads.append((other, first * bytes_per_row(x), part))
        self._transfer(group, "exchange of statistics", reads, self._others, [received]).wait()
        return received

    def every(self, x: Tensor, operation: str, group: Any) -> Tensor:
        """x of all ranks, `[W, *x.shape]`."""
        return self.begin_gather([x[None]], [1] * len(self._memories), group, operation).wait()[0]

    def follow(self) -> None:
        """Let the current stream wait for the one that used the buffers before it."""
        self.used = True
        other = current_stream_address(self.memory.device.index) != self._reader.cuda_stream
        # a graph of the user's own uses no buffers
        if other and not torch.cuda.is_current_stream_capturing():
            stream = torch.cuda.current_stream(self.memory.device)
            stream.wait_stream(self._reader)
            self._reader = stream

    def watch(self, group: Any) -> None:
        """Let this process end where the transfers so far outlast the group's time-out."""
        if self.unwatched and self._timeout < inf and not torch.cuda.is_current_stream_capturing():
            self.unwatched = False
            watch(group, self._timeout, self._prepare)

    def keep(self) -> None:
        """Keep the memory for good: its release would wait for copies, whose other ranks may be gone."""
        pythonapi.Py_IncRef(py_object(self.memory))

    def need(self, count: int) -> None:
        """Count this number of bytes, flags excluded, as those of a step."""
        self.needed = max(self.needed, count)

    def _write(self, x: Tensor, at: int) -> None:
        """Write x into this rank's memory, from byte `at` on."""
        self.need(at + x.nbytes)
        if x.numel():
            self.memory[at : at + x.nbytes].copy_(_bytes(x.contiguous()))

    def _transfer(
        self, group: Any, operation: str, reads: Sequence[tuple[int, int, Tensor]], readers: Sequence[int],
        arriving: list[Tensor], finish: Callable[[list[Tensor]], list[Tensor]] = list,
    ) -> Transfer:  # fmt: skip
        """The transfer of `reads`: ranks, offsets in bytes in their memory, and the tensors that take what is there.

        readers: the ranks that read this one's memory.
        """
        return Transfer(group, operation, lambda: [self._begin(reads, readers)], arriving, finish, copied=True)

    def _begin(self, reads: Sequence[tuple[int, int, Tensor]], readers: Sequence[int]) -> torch.cuda.Event:
        """Post a transfer, and return the event of its end."""
        self.unwatched = True
        stream, read = self._stream, sorted({rank for rank, *_ in reads})
        stream.wait_stream(torch.cuda.current_stream(self.memory.device))
        self._signal(READY, readers, read)
        with torch.cuda.stream(stream):
            for rank, at, arriving in reads:
                if arriving.numel():
                    _bytes(arriving).copy_(self._memories[rank][at : at + arriving.nbytes])
        self._signal(TAKEN, read, readers)
        return stream.record_event()

    def _signal(self, kind: int, receivers: Sequence[int], senders: Sequence[int]) -> None:
        """Set this rank's flag of a kind at the receivers; wait for those of the senders here, and set them back."""
        writes = [(WRITE, self._flag(rank, kind, self._rank), 1) for rank in receivers]
        own = [self._flag(self._rank, kind, rank) for rank in senders]
        waits = [order for flag in own for order in ((WAIT, flag, 1), (WRITE, flag, 0))]
        in_order(self._stream.cuda_stream, [*writes, *waits])

    def _flag(self, rank: int, kind: int, setter: int) -> int:
        """Address of the word in a rank's memory that another rank, the setter, sets."""
        return self._memories[rank].data_ptr() + 2 * self.size + 4 * (kind * MOST_RANKS + setter)


_all: WeakSet[Neighbours] = WeakSet()


@atexit.register
def _keep() -> None:
    for each in _all:
        each.keep()


@contextmanager
def joining(group: Any) -> Iterator[None]:
    """Let the current stream wait for a transfer under way, if the step fails: a capture ends with all its streams."""
    try:
        yield
    except BaseException:
        # the capture itself may have failed
        with suppress(RuntimeError):
            if (flight := state_of(group).in_flight) is not None:
                flight.complete()
        raise


def neighbours(group: Any, size: int, device: torch.device) -> Neighbours | None:
    """The group's buffers, of at least `size` bytes each; None where its ranks send through their backend.

    All ranks of the group call it with the same size, a multiple of `ALIGNMENT`.
    """
    if 2 * size > MOST_BUFFER_BYTES or not copies_carry(group, device):
        return None
    group = resolved(group)
    state = state_of(group)
    # batches of many sizes have few sizes of buffers: 32 between a power of two and the next
    step = max(ALIGNMENT, 1 << (size - 1).bit_length() >> 6)
    size = -(-size // step) * step
    if state.neighbours is None or state.neighbours.size < size:
        state.neighbours = _made(group, size, device)
        if state.neighbours is None:
            logger.info("buffers that the GPUs of a node share could not be made: the group's backend carries all")
            state.reachable = False
            return None
    buffers: Neighbours = state.neighbours
    buffers.need(2 * size)
    if not torch.cuda.is_current_stream_capturing():
        buffers.follow()
    return buffers


def copies_carry(group: Any, device: torch.device) -> bool:
    """Return whether copy engines carry the transfers of a group. All of its ranks call it.

    False in a graph of the user's own, which would read buffers that later calls replace.
    """
    if device.type != "cuda" or (torch.cuda.is_current_stream_capturing() and captured_call.transfer is None):
        return False
    group = resolved(group)
    state = state_of(group)
    if state.reachable is None:
        state.reachable = _reachable(group, device)
    return state.reachable


def used_bytes() -> int:
    """Bytes in buffers that the steps since the last call of this function need; torch's allocator does not count them.

    Buffers stay as large as the largest batch before needed them; a step that was replayed counts them whole.
    """
    total = 0
    for each in _all:
        if each.used:
            total += min(each.memory.nbytes, (each.needed or each.memory.nbytes) + ALIGNMENT)
        each.used, each.needed = False, 0
    return total


def _reachable(group: Any, device: torch.device) -> bool:
    """Return whether all ranks of the group are on one node, with a GPU each that reaches all others' memory."""
    # torch numbers the exchanges of handles in each process: one of all ranks hangs after one of some
    all_ranks = group.size() == dist.get_world_size() <= MOST_RANKS
    if not all_ranks or "nccl" not in dist.get_backend_config(group):
        return False
    boot = BOOT.read_text() if BOOT.exists() else ""
    node = int.from_bytes(blake2b(f"{socket.gethostname()} {boot}".encode(), digest_size=7).digest())
    nodes, indices = zip(*numbers_of_ranks(group, "neighbours", [node, device.index]), strict=True)
    reachable = (
        len(set(nodes)) == 1
        # ranks that each see one GPU alone all call it 0
        and len(set(indices)) == len(indices)
        and reach_each_other(device, indices)
    )
    return not any_of([not reachable], group)[0]


def reach_each_other(device: torch.device, indices: Sequence[int]) -> bool:
    """Return whether a GPU of this process may copy from those of these indices; False where it does not see them all.

    NCCL_P2P_DISABLE is set on machines whose GPUs reach each other, but lose or alter what they read.
    """
    allowed = os.environ.get("NCCL_P2P_DISABLE", "0") == "0" and _driver() is not None
    if not allowed or len(indices) > MOST_RANKS or max(indices) >= torch.cuda.device_count():
        return False
    own = torch.cuda.current_device() if device.index is None else device.index
    return all(torch.cuda.can_device_access_peer(device, index) for index in indices if index != own)


# a first call in inference mode would make buffers that no call outside could write
@torch.inference_mode(False)
def _made(group: Any, size: int, device: torch.device) -> Neighbours | None:
    """The group's buffers, made by all ranks together; None where a rank has no room for them, or cannot reach them."""
    made, buffers = None, None
    if torch.cuda.mem_get_info(device)[0] < 2 * (size + ROOM):
        # torch keeps memory that nothing uses
        torch.cuda.empty_cache()
    with suppress(RuntimeError):
        own, of_rank = symmetric(2 * size + ALIGNMENT, device)
        own[-ALIGNMENT:].zero_()
        own[:ALIGNMENT].copy_(_written_by(group.rank(), own.device))
        stream, flag = torch.cuda.current_stream(device), own.data_ptr() + 2 * size
        # some virtual machines refuse both
        in_order(stream.cuda_stream, [(WRITE, flag, 1), (WAIT, flag, 1), (WRITE, flag, 0)])
        stream.synchronize()
        made = own, of_rank
    # no rank writes a flag before it is zero
    if any_of([made is None], group)[0] or made is None:
        return None
    own, of_rank = made
    # ranks in containers may have no way to pass each other a handle
    with suppress(RuntimeError):
        memory, me = of_rank(group), group.rank()
        memories = [own if each == me else memory(each) for each in range(group.size())]
        # processes of two containers may be taken for each other, and some machines alter what is read
        if all(torch.equal(x[:ALIGNMENT].clone(), _written_by(rank, x.device)) for rank, x in enumerate(memories)):
            buffers = Neighbours(memories, me, size, backend_timeout(group).total_seconds())
    return None if any_of([buffers is None], group)[0] else buffers


def _written_by(rank: int, device: torch.device) -> Tensor:
    """Bytes by which the others know a rank's memory."""
    return (torch.arange(ALIGNMENT, device=device) * (rank + 3) % 251).to(torch.uint8)


def in_order(stream: int, orders: Sequence[tuple[int, int, int]]) -> None:
    """Let a stream wait for words and write words, one after the other: (WAIT or WRITE, address, value) each.

    A write comes after all that the stream has done, its writes to any memory included.
    """
    batch = (_Order * len(orders))()
    for order, (kind, address, value) in zip(batch, orders, strict=True):
        order.kind, order.address, order.value, order.flags = kind, address, value, EQUAL if kind == WAIT else 0
    driver = _driver()
    assert driver is not None
    if error := driver.cuStreamBatchMemOp_v2(stream, len(orders), batch, 0):
        raise RuntimeError(f"cuStreamBatchMemOp_v2 of CUDA's driver failed with error {error}")


class _Order(Structure):
    """CUstreamBatchMemOpParams, of which only words of 32 bits are used."""

    _fields_ = (
        ("kind", c_uint32), ("address", c_uint64), ("value", c_uint64), ("flags", c_uint32), ("rest", c_uint64 * 2),
    )  # fmt: skip


@cache
def _driver() -> CDLL | None:
    """CUDA's driver, by itself: torch has a write in a stream's order, and no wait for a word without a kernel."""
    if torch.version.cuda is None:
        return None
    try:
        driver = CDLL("libcuda.so.1")
        driver.cuStreamBatchMemOp_v2.argtypes = [c_void_p, c_uint, c_void_p, c_uint]
    except (OSError, AttributeError):
        return None
    return driver


def _prepare(device: torch.device) -> None:
    """Let this thread look at a device's events, while another one captures a graph too."""
    # a thread's first call would take memory of device 0 otherwise
    torch.cuda.set_device(device)
    if (driver := _driver()) is not None:
        driver.cuThreadExchangeStreamCaptureMode(byref(c_int(RELAXED)))


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
