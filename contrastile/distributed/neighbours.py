"""Transfers around a ring by the copy engines of GPUs that reach each other's memory, as those of one node do.

NCCL's transfers are kernels. While one lasts it holds multiprocessors, and a program of a large kernel whose
multiprocessor is taken starts after the transfer. Copy engines leave all multiprocessors to the tiles.

Each rank has two buffers and two flags in symmetric memory, which the other ranks address as their own. A transfer
reads a buffer of the previous rank:

    rank r − 1                              rank r
    its buffer is filled: ready of r := 1   waits for ready, and sets it to 0
                                            copies the buffer
    waits for taken, and sets it to 0       taken of r − 1 := 1

A stream writes the flags and waits for them, so that neither the host nor a kernel does, and a CUDA graph can have the
whole transfer.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import CDLL, c_uint, c_uint32, c_uint64, c_void_p, py_object, pythonapi
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from contrastile._torch import current_stream_address, symmetric
from contrastile.distributed.collectives import RING, Transfer, captured_call
from contrastile.distributed.consistency import any_of, numbers_of_ranks
from contrastile.distributed.failure import all_states, resolved, state_of

logger = logging.getLogger("contrastile")

# bytes of both buffers, which stay between calls; with larger ones a hop takes so long that a transfer hardly matters
MOST_BYTES = 2**30
# sizes are multiples of this number of bytes, so that any kernel can read what begins where a tensor ends; offsets in
# bytes of the flags from the end of the second buffer
ALIGNMENT, READY, TAKEN = 256, 0, 4
# the driver's number for a wait until a word equals a value
EQUAL = 1
# bytes beside a buffer that its allocation may take
ROOM = 2**22
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Neighbours:
    """Two buffers of this rank, which the next rank of a group reads, and views of the previous rank's."""

    def __init__(self, own: Tensor, previous: Tensor, following: Tensor, size: int) -> None:
        """Take memory of this rank, of the previous and of the following one: two buffers, then the flags."""
        self.memory, self.size = own, size
        # since the last `used_bytes`
        self.used = False
        self.buffers, self._previous = ([x[:size], x[size : 2 * size]] for x in (own, previous))
        flags = (x.data_ptr() + 2 * size for x in (own, previous, following))
        self._own_flags, self._previous_flags, self._following_flags = flags
        self._stream, self._reader = torch.cuda.Stream(own.device), torch.cuda.current_stream(own.device)
        _all.add(self)

    def post(self, group: Any, number: int, arriving: Tensor) -> Transfer:
        """Let the next rank read buffer `number`, and read the previous rank's buffer of that number into `arriving`.

        Raises RuntimeError where the group has a transfer under way.
        """
        return Transfer(group, RING, lambda: [self._begin(number, arriving)], [arriving], copied=True)

    def follow(self) -> None:
        """Let the current stream wait for the one that used the buffers before it."""
        self.used = True
        other = current_stream_address(self.memory.device.index) != self._reader.cuda_stream
        # a graph of the user's own uses no buffers
        if other and not torch.cuda.is_current_stream_capturing():
            stream = torch.cuda.current_stream(self.memory.device)
            stream.wait_stream(self._reader)
            self._reader = stream

    def _begin(self, number: int, arriving: Tensor) -> torch.cuda.Event:
        """Post a transfer, and return the event of its end."""
        stream, order, own = self._stream, self._stream.cuda_stream, self._own_flags
        stream.wait_stream(torch.cuda.current_stream(self.memory.device))
        _write(order, self._following_flags + READY, 1)
        _await(order, own + READY)
        if arriving.numel():
            received = arriving.view(torch.uint8).view(-1)
            with torch.cuda.stream(stream):
                received.copy_(self._previous[number][: len(received)])
        _write(order, self._previous_flags + TAKEN, 1)
        _await(order, own + TAKEN)
        return stream.record_event()


_all: WeakSet[Neighbours] = WeakSet()


@atexit.register
def _keep() -> None:
    """Keep the memory for good: its release would wait for copies, whose other ranks may be gone."""
    for each in _all:
        pythonapi.Py_IncRef(py_object(each.memory))


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

    All ranks of the group call it with the same size, a multiple of `ALIGNMENT`. None in a graph of the user's own,
    which would read buffers that later calls replace.
    """
    if device.type != "cuda" or 2 * size > MOST_BYTES:
        return None
    capturing = torch.cuda.is_current_stream_capturing()
    if capturing and captured_call.transfer is None:
        return None
    group = resolved(group)
    state = state_of(group)
    if state.reachable is None:
        state.reachable = _reachable(group, device)
    if state.reachable and (state.neighbours is None or state.neighbours.size < size):
        # batches of many sizes have few sizes of buffers: 32 between a power of two and the next
        step = max(ALIGNMENT, 1 << (size - 1).bit_length() >> 6)
        state.neighbours = _made(group, -(-size // step) * step, device)
        if state.neighbours is None:
            logger.info("the ring's buffers could not be made: the group's backend carries it")
            state.reachable = False
    if not state.reachable:
        return None
    if not capturing:
        state.neighbours.follow()
    found: Neighbours = state.neighbours
    return found


def used_bytes() -> int:
    """Bytes of all buffers used since the last call of this function, which torch's allocator does not count."""
    used = [each for state in all_states() if (each := state.neighbours) is not None and each.used]
    for each in used:
        each.used = False
    return sum(each.memory.nbytes for each in used)


def _reachable(group: Any, device: torch.device) -> bool:
    """Return whether all ranks of the group are on one node, with a GPU each that reaches all others' memory."""
    # torch numbers the exchanges of handles in each process: one of all ranks hangs after one of some
    if "nccl" not in dist.get_backend_config(group) or group.size() != dist.get_world_size():
        return False
    boot = BOOT.read_text() if BOOT.exists() else ""
    node = int.from_bytes(blake2b(f"{socket.gethostname()} {boot}".encode(), digest_size=7).digest())
    nodes, indices = zip(*numbers_of_ranks(group, "neighbours", [node, device.index]), strict=True)
    # ranks that each see one GPU alone all call it 0
    near = len(set(nodes)) == 1 and len(set(indices)) == len(indices) and _driver() is not None
    # machines whose GPUs reach each other, but lose or alter what they read
    near = near and os.environ.get("NCCL_P2P_DISABLE", "0") == "0"
    # ranks may see different numbers of GPUs
    near = near and max(indices) < torch.cuda.device_count()
    others = [index for index in indices if index != device.index]
    near = near and all(torch.cuda.can_device_access_peer(device, index) for index in others)
    return not any_of([not near], group)[0]


def _made(group: Any, size: int, device: torch.device) -> Neighbours | None:
    """The group's buffers, made by all ranks together; None where a rank has no room for them, or cannot reach them."""
    made, found, me, ranks = None, None, group.rank(), group.size()
    if torch.cuda.mem_get_info(device)[0] < 2 * (size + ROOM):
        # what torch keeps, but nothing uses
        torch.cuda.empty_cache()
    with suppress(RuntimeError):
        own, of_rank = symmetric(2 * size + ALIGNMENT, device)
        own[-ALIGNMENT:].zero_()
        stream, flags = torch.cuda.current_stream(device), own.data_ptr() + 2 * size
        # some virtual machines refuse both
        _write(stream.cuda_stream, flags + READY, 1)
        _await(stream.cuda_stream, flags + READY)
        stream.synchronize()
        made = own, of_rank
    # no rank writes a flag before it is zero
    if any_of([made is None], group)[0] or made is None:
        return None
    own, of_rank = made
    # ranks in containers may have no way to pass each other a handle
    with suppress(RuntimeError):
        memory = of_rank(group)
        found = Neighbours(own, memory((me - 1) % ranks), memory((me + 1) % ranks), size)
    return None if any_of([found is None], group)[0] else found


@cache
def _driver() -> CDLL | None:
    """CUDA's driver, by itself: torch has a write in a stream's order, and no wait for a word without a kernel."""
    if torch.version.cuda is None:
        return None
    try:
        driver = CDLL("libcuda.so.1")
        for function in (driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2):
            function.argtypes = [c_void_p, c_uint64, c_uint32, c_uint]
    except (OSError, AttributeError):
        return None
    return driver


def _write(stream: int, address: int, value: int) -> None:
    """Write a word after all that the stream has done, its writes to any memory included."""
    _call("cuStreamWriteValue32_v2", stream, address, value, 0)


def _await(stream: int, address: int) -> None:
    """Let the stream wait until a word is 1, and set it to 0."""
    _call("cuStreamWaitValue32_v2", stream, address, 1, EQUAL)
    _write(stream, address, 0)


def _call(function: str, *arguments: int) -> None:
    if error := getattr(_driver(), function)(*arguments):
        raise RuntimeError(f"{function} of CUDA's driver failed with error {error}")
