"""Decoders: threads of this process, or processes beside it, that write images into the memory of one batch.

Stands below `loader.py`, which decides what is decoded. Threads share one interpreter with the training step: about a
thousand images a second is what all of them decode together, and a step on a GPU, which asks for the interpreter
thousands of times, is slowed to a third. So processes feed a GPU. They are plain programs without a terminal: this
process sends them their tasks over a socket, and when it ends, however it ends, so do they. Nothing is pickled; images
travel through memory that both sides map.

torch's `DataLoader` was measured in its place, with a map-style dataset, a batch sampler that holds the one batch read
ahead (the size of the batch after it is not known yet) and two forked workers. In five pairs of runs on two busy cores
these processes read 1.75 to 4.5 times as many JPEGs per second (median 2.05), and 1.06 to 1.6 times as many per second
of CPU time; the bound for keeping them was 1.3. The loader's groups are also copied once more, and pass through
/dev/shm, of which a container has 64 MB by default: less than a batch of 512 images of 224 pixels.
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple
from io import BytesIO
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from contrastile.data.base import Images
from contrastile.data.crop import Crop
from contrastile.data.images import decode
from contrastile.data.shards import read_bytes
from contrastile.data.skipped import Skipped

# the largest buffer that a GPU fetches from while it computes: pinned memory cannot be swapped
MOST_PINNED = 8 << 30
# the largest message; the task of a group of images takes a few kilobytes
MOST_MESSAGE = 1 << 20

# the reasons why images could not be read, None for each that could
Reasons = list[str | None]


class Origin(Protocol):
    """The bytes of an image, and the number of the example in the run, which decides the crop."""

    @property
    def place(self) -> int:
        """The number of the example."""

    def read(self) -> bytes:
        """The bytes of an image file; raises `Skipped` or OSError."""


class Piece(NamedTuple):
    """An origin that any process can read: bytes within a file, or the whole file where `size` is None."""

    path: str
    offset: int
    size: int | None
    place: int

    def read(self) -> bytes:
        """The bytes; raises `Skipped` where the file has become shorter, or is longer than any image."""
        return read_bytes(self.path, self.offset, self.size)


class Made(NamedTuple):
    """An origin whose bytes this process alone can make."""

    read: Callable[[], bytes]
    place: int


# called where the images are decoded, so that the training step does not wait for the look-up
Origins = Callable[[], Sequence[Origin]]


def fill(images: Images, origins: Sequence[Origin], crop: Crop | None) -> Reasons:
    """Decode each origin's image into its place of `images` `[n, C, S, S]`."""
    reasons: Reasons = []
    for image, origin in zip(images, origins, strict=False):
        try:
            box = None if crop is None else crop.box(origin.place)
            image[:] = decode(BytesIO(origin.read()), images.shape[1:], box)
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

    def buffer(self, shape: Sequence[int]) -> Tensor:
        """Memory for the images of a batch."""
        return torch.empty(tuple(shape), dtype=torch.uint8)

    def fill(self, images: Tensor, start: int, origins: Origins, crop: Crop | None) -> Future[Reasons]:
        """Begin to decode `origins` into `images` from number `start` on."""
        return self._pool.submit(lambda: fill(images[start:].numpy(), origins(), crop))

    def close(self) -> None:
        """Begin nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Processes:
    """`count` processes; a thread of this process waits for each of them, which hardly uses the interpreter."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, "decoding")
        self._workers = [Worker() for _ in range(count)]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        self._buffers: list[SharedBuffer] = []
        for worker in self._workers:
            self._idle.put(worker)

    def buffer(self, shape: Sequence[int]) -> Tensor:
        """Shared memory for the images of a batch: that of an earlier batch which nothing refers to any more."""
        size = math.prod(shape)
        for buffer in [buffer for buffer in self._buffers if buffer.idle]:
            if buffer.size >= size:
                return buffer.lend(shape)
            self._buffers.remove(buffer)
            buffer.close()
        self._buffers.append(SharedBuffer(size))
        return self._buffers[-1].lend(shape)

    def fill(self, images: Tensor, start: int, origins: Origins, crop: Crop | None) -> Future[Reasons]:
        """Begin to decode `origins`, which must be pieces of files, into `images` from number `start` on."""
        buffer = next(one for one in self._buffers if one.address == images.data_ptr())
        buffer.tasks.append(self._pool.submit(self._run, buffer, list(images.shape), start, origins, crop))
        return buffer.tasks[-1]

    def _run(self, buffer: SharedBuffer, shape: list[int], start: int, origins: Origins, crop: Crop | None) -> Reasons:
        task = {"shape": shape, "start": start, "pieces": origins(), "crop": crop and astuple(crop)}
        worker = self._idle.get()
        try:
            return worker.run(buffer, task)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()
        for buffer in self._buffers:
            buffer.close()


class SharedBuffer:
    """Anonymous memory that processes share, lent to one batch after another; pinned where there is a GPU."""

    def __init__(self, size: int) -> None:
        self.size, self.free, self._open = size, True, True
        # tasks that write into it since it was lent
        self.tasks: list[Future[Reasons]] = []
        self.file = os.memfd_create("contrastile")
        os.ftruncate(self.file, max(size, 1))
        self._memory = mmap.mmap(self.file, max(size, 1))
        self.address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._pinned = torch.cuda.is_available() and 0 < size <= MOST_PINNED
        if self._pinned:
            self._pinned = int(torch.cuda.cudart().cudaHostRegister(self.address, size, 0)) == 0

    @property
    def idle(self) -> bool:
        """True where no tensor refers to it and no task writes: a batch may be given up while it is decoded."""
        return self.free and all(task.done() for task in self.tasks)

    def lend(self, shape: Sequence[int]) -> Tensor:
        """The memory as images. It is free again when no tensor refers to it any more."""
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
        """Release the memory, now or when the last batch is gone."""
        self._open = False
        if self.free:
            self._release()

    def _release(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.address)
        os.close(self.file)


class Worker:
    """This process's end of a decoding process."""

    def __init__(self) -> None:
        self._socket, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(path for path in sys.path if path)
        # in a session of its own it gets no Ctrl-C; it ends when this end of the socket closes
        self._process = subprocess.Popen(
            [sys.executable, "-m", "contrastile.data.decoders", str(far.fileno())],
            pass_fds=[far.fileno()],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        far.close()
        self._buffer: SharedBuffer | None = None

    def run(self, buffer: SharedBuffer, task: dict[str, object]) -> Reasons:
        """Have the process do a task; return its reasons."""
        try:
            # a buffer that is new to it is handed over with its first task
            files = [] if buffer is self._buffer else [buffer.file]
            socket.send_fds(self._socket, [json.dumps({**task, "size": buffer.size}).encode()], files)
            self._buffer = buffer
            answer = self._socket.recv(MOST_MESSAGE)
        except OSError:
            answer = b""
        if not answer:
            # a process that still runs, because the task could not be sent, ends now
            self._socket.close()
            code = self._process.wait()
            raise RuntimeError(f"a decoding process ended with exit code {code}: is there memory enough?")
        return list(json.loads(answer))

    def close(self) -> None:
        """Close the socket, which ends the process."""
        self._socket.close()
        self._process.wait()


def serve(connection: socket.socket) -> None:
    """Do the tasks of the parent until it closes its end: the program of a decoding process."""
    memory: mmap.mmap | None = None
    while True:
        message, files, _, _ = socket.recv_fds(connection, MOST_MESSAGE, 1)
        if not message:
            return
        task = json.loads(message)
        for file in files:
            memory = mmap.mmap(file, max(task["size"], 1))
            os.close(file)
        assert memory is not None
        images = np.frombuffer(memory, np.uint8, math.prod(task["shape"])).reshape(task["shape"])
        pieces = [Piece(*piece) for piece in task["pieces"]]
        crop = None if task["crop"] is None else Crop(*task["crop"])
        reasons = fill(images[task["start"] : task["start"] + len(pieces)], pieces, crop)
        connection.send(json.dumps(reasons).encode())


if __name__ == "__main__":
    torch.set_num_threads(1)
    with socket.socket(fileno=int(sys.argv[1])) as end:
        serve(end)
