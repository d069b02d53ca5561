"""Who decodes a collection's pictures: threads of this process, or processes beside it, into one batch's memory.

Below `collection.py`, which says what and when. Threads share one interpreter with the training step and with each
other: about a thousand pictures a second is what all of them together decode, and a step on a GPU, which asks for the
interpreter thousands of times, is slowed to a third. So a GPU is fed by processes. They are plain programs without
a terminal: this process sends them what to decode, and where to, over a socket, and when it ends, however it ends, so
do they. Nothing is pickled; pictures travel through memory that both sides map.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from io import BytesIO
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from contrastile.data.crop import Crop
from contrastile.data.pairs import Pictures
from contrastile.data.shards import MOST_BYTES
from contrastile.data.skipped import Skipped
from contrastile.data.table import decode
from contrastile.offload import usable_cpus

# the largest room that a GPU fetches from while it computes: pinned memory cannot be swapped
MOST_PINNED = 8 << 30
# pictures that are decoded before more are asked for
GROUP = 16
# a message of a group of pictures is a few kilobytes
MOST_MESSAGE = 1 << 20


class Origin(Protocol):
    """A picture's bytes, and which example of the run it is, from which its crop is drawn."""

    @property
    def place(self) -> int:
        """Which example."""

    def read(self) -> bytes:
        """The bytes of its file; raises `Skipped` or OSError."""


class Piece(NamedTuple):
    """An origin that any process can read: bytes within a file."""

    path: str
    offset: int
    # None: the whole file
    size: int | None
    place: int

    def read(self) -> bytes:
        """The bytes; raises `Skipped` where the file has become shorter, or is longer than any picture."""
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size if self.size is None else self.size
            if size > MOST_BYTES:
                raise Skipped("too large")
            content = os.pread(file.fileno(), size, self.offset)
        if len(content) != size:
            raise Skipped("missing picture")
        return content


class Made(NamedTuple):
    """An origin whose bytes this process alone can make."""

    read: Callable[[], bytes]
    place: int


# asked where they are decoded, so that the training step does not wait for them
Origins = Callable[[], Sequence[Origin]]


def fill(pictures: Pictures, origins: Sequence[Origin], crop: Crop | None) -> list[str | None]:
    """Decode each origin's picture into its place of `pictures` `[n, C, S, S]`; the reasons why one could not be."""
    reasons: list[str | None] = []
    for picture, origin in zip(pictures, origins, strict=False):
        try:
            box = None if crop is None else crop.box(origin.place)
            picture[:] = decode(BytesIO(origin.read()), pictures.shape[1:], box)
            reasons.append(None)
        except OSError as failure:
            reasons.append(f"unreadable file ({failure.strerror})")
        except Skipped as reason:
            reasons.append(str(reason))
    return reasons


class Threads:
    """`count` threads of this process."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, "decoding")

    def room(self, shape: Sequence[int]) -> Tensor:
        """Memory for the pictures of a batch."""
        return torch.empty(tuple(shape), dtype=torch.uint8)

    def fill(self, room: Tensor, start: int, origins: Origins, crop: Crop | None) -> Future[list[str | None]]:
        """Begin to decode `origins` into `room` from number `start` on."""
        return self._pool.submit(lambda: fill(room[start:].numpy(), origins(), crop))

    def close(self) -> None:
        """Begin nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Processes:
    """`count` processes; a thread of this one waits for each of them, which costs the interpreter next to nothing."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, "decoding")
        self._workers = [Worker() for _ in range(count)]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        self._rooms: list[Room] = []
        for worker in self._workers:
            self._idle.put(worker)

    def room(self, shape: Sequence[int]) -> Tensor:
        """Memory for the pictures of a batch, mapped by all: that of an earlier one where nobody holds it any more."""
        size = math.prod(shape)
        for room in [room for room in self._rooms if room.idle]:
            if room.size >= size:
                return room.lend(shape)
            self._rooms.remove(room)
            room.close()
        self._rooms.append(Room(size))
        return self._rooms[-1].lend(shape)

    def fill(self, room: Tensor, start: int, origins: Origins, crop: Crop | None) -> Future[list[str | None]]:
        """Begin to decode `origins`, which have to be pieces of files, into `room` from number `start` on."""
        lent = next(one for one in self._rooms if one.address == room.data_ptr())
        lent.tasks.append(self._pool.submit(self._ask, lent, list(room.shape), start, origins, crop))
        return lent.tasks[-1]

    def _ask(self, room: Room, shape: list[int], start: int, origins: Origins, crop: Crop | None) -> list[str | None]:
        task = {"shape": shape, "start": start, "pieces": origins(), "crop": crop and crop.words()}
        worker = self._idle.get()
        try:
            return worker.ask(room, task)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End them."""
        self._pool.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()
        for room in self._rooms:
            room.close()


class Room:
    """Memory without a name that processes share, lent to one batch after another; a GPU may fetch from it."""

    def __init__(self, size: int) -> None:
        self.size, self.free, self._open = size, True, True
        # those that write into it since it was lent
        self.tasks: list[Future[list[str | None]]] = []
        self.file = os.memfd_create("contrastile")
        os.ftruncate(self.file, max(size, 1))
        self._memory = mmap.mmap(self.file, max(size, 1))
        self.address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._pinned = torch.cuda.is_available() and 0 < size <= MOST_PINNED
        if self._pinned:
            self._pinned = int(torch.cuda.cudart().cudaHostRegister(self.address, size, 0)) == 0

    @property
    def idle(self) -> bool:
        """Whether nobody reads it, and nobody writes: a batch may be given up while it is still being decoded."""
        return self.free and all(task.done() for task in self.tasks)

    def lend(self, shape: Sequence[int]) -> Tensor:
        """The memory as pictures. It is free again when no tensor shows it any more."""
        self.tasks = []
        array = np.frombuffer(self._memory, np.uint8, math.prod(shape)).reshape(tuple(shape))
        self.free = False
        weakref.finalize(array, self._returned).atexit = False
        return torch.from_numpy(array)

    def _returned(self) -> None:
        self.free = True
        if not self._open:
            self._release()

    def close(self) -> None:
        """Give the memory back, now or when the last batch does."""
        self._open = False
        if self.free:
            self._release()

    def _release(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.address)
        os.close(self.file)


class Worker:
    """The near end of a decoding process."""

    def __init__(self) -> None:
        self._socket, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        where = os.pathsep.join(path for path in sys.path if path)
        # in a session of its own it hears nothing of Ctrl-C, and ends when this end of the socket closes
        self._process = subprocess.Popen(
            [sys.executable, "-m", "contrastile.data.decoding", str(far.fileno())],
            pass_fds=[far.fileno()],
            env={**os.environ, "PYTHONPATH": where, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        far.close()
        self._room: Room | None = None

    def ask(self, room: Room, task: dict[str, object]) -> list[str | None]:
        """Have a task done; the reasons that it came to."""
        try:
            # a room that it has not seen yet is handed over with the first task
            files = [] if room is self._room else [room.file]
            socket.send_fds(self._socket, [json.dumps({**task, "size": room.size}).encode()], files)
            self._room = room
            answer = self._socket.recv(MOST_MESSAGE)
        except OSError:
            answer = b""
        if not answer:
            # one that is still there, because the task could not be sent, ends now
            self._socket.close()
            code = self._process.wait()
            raise RuntimeError(f"a decoding process ended with exit code {code}: is there memory enough?")
        return list(json.loads(answer))

    def close(self) -> None:
        """It reads that nothing more will come, and ends."""
        self._socket.close()
        self._process.wait()


def stretches(
    paths: Sequence[str], shape: tuple[int, int, int], *, stretch: int, apart: bool
) -> Iterator[tuple[range, Tensor, list[str | None]]]:
    """Whole pictures, `stretch` at a time, the next ones decoded meanwhile: which, uint8 `[n, C, S, S]`, the reasons.

    Of a picture that cannot be read there is a reason, and nothing of use at its place.
    """
    decoders = (Processes if apart else Threads)(min(cores(), max(len(paths) // GROUP, 1)))

    def begin(part: range) -> tuple[range, Tensor, list[Future[list[str | None]]]]:
        room = decoders.room((len(part), *shape))
        groups = [part[start : start + GROUP] for start in range(0, len(part), GROUP)]
        return (
            part,
            room,
            [decoders.fill(room, group.start - part.start, partial(pieces, group), None) for group in groups],
        )

    def pieces(group: range) -> list[Piece]:
        return [Piece(paths[number], 0, None, 0) for number in group]

    try:
        parts = [range(start, min(start + stretch, len(paths))) for start in range(0, len(paths), stretch)]
        ahead = begin(parts[0]) if parts else None
        for following in [*parts[1:], None]:
            if ahead is None:
                return
            part, room, tasks = ahead
            ahead = begin(following) if following is not None else None
            yield part, room, [reason for task in tasks for reason in task.result()]
    finally:
        decoders.close()


def cores() -> int:
    """The CPU cores that this process may use: of those of a node, where torchrun starts several ranks, its share."""
    return max(1, int(usable_cpus()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def serve(near: socket.socket) -> None:
    """What a decoding process does, until the other end is closed."""
    memory: mmap.mmap | None = None
    while True:
        message, files, _, _ = socket.recv_fds(near, MOST_MESSAGE, 1)
        if not message:
            return
        task = json.loads(message)
        for file in files:
            memory = mmap.mmap(file, max(task["size"], 1))
            os.close(file)
        assert memory is not None
        pictures = np.frombuffer(memory, np.uint8, math.prod(task["shape"])).reshape(task["shape"])
        pieces = [Piece(*piece) for piece in task["pieces"]]
        crop = None if task["crop"] is None else Crop.of_words(task["crop"])
        reasons = fill(pictures[task["start"] : task["start"] + len(pieces)], pieces, crop)
        near.send(json.dumps(reasons).encode())


if __name__ == "__main__":
    torch.set_num_threads(1)
    with socket.socket(fileno=int(sys.argv[1])) as end:
        serve(end)
