"""Loading of images beside the training step: one batch, decoded by threads or processes ahead of its use.

Threads share one interpreter with the training step: together they decode about a thousand images a second, and a step
on a GPU takes three times as long beside them. Processes therefore feed a GPU. They are plain programs without a
terminal, which get their tasks over a socket and end with this process. Nothing is pickled; images travel through
memory that both sides map. torch's `DataLoader` reads half as many JPEGs per second as these processes (docs/log.md).
"""

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
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrastile.data.base import Images, Shape, Skipped
from contrastile.data.files import open_file
from contrastile.data.images import MOST_BYTES, crop_box, decode
from contrastile.offload import usable_cpus

# images of a task
GROUP = 16
# the largest buffer that a GPU fetches from while it computes: pinned memory cannot be swapped
MOST_PINNED = 8 << 30
# seconds for the answer of a decoding process, unless a recipe says `train.timeout`; to end by itself when it is closed
TIMEOUT, PATIENCE = 100.0, 2.0
# the largest message; the task of a group of images takes a few kilobytes
MOST_MESSAGE = 1 << 20

# the reasons why images could not be read, None for each that could
Reasons = list[str | None]
# a row of a library, the number of the example in the run, the seed of its random crop or None for the whole image
Key = tuple[int, int, int | None]
# the bytes of an image file; raises `Skipped` or OSError
Origin = Callable[[], bytes]


@dataclass(frozen=True)
class Piece:
    """An origin that any process can read: bytes within a file, or the whole file where `size` is None."""

    path: str
    offset: int
    size: int | None

    def __call__(self) -> bytes:
        """The bytes; raises `Skipped` where the file has become shorter, or is longer than any image."""
        with open_file(self.path) as file:
            size = os.fstat(file.fileno()).st_size if self.size is None else self.size
            if size > MOST_BYTES:
                raise Skipped("too large")
            content = os.pread(file.fileno(), size, self.offset)
        if len(content) != size:
            raise Skipped("missing picture")
        return content


def fill(images: Images, origins: Sequence[Origin], examples: Sequence[int], crop_seed: int | None) -> Reasons:
    """Decode each origin's image into the next of `images` `[n, C, S, S]`."""
    reasons: Reasons = []
    for image, origin, example in zip(images, origins, examples, strict=False):
        try:
            box = None if crop_seed is None else partial(crop_box, crop_seed, example)
            image[:] = decode(origin(), images.shape[1:], box)
            reasons.append(None)
        except OSError as failure:
            reasons.append(f"unreadable file ({failure.strerror})")
        except Skipped as reason:
            reasons.append(str(reason))
    return reasons


class SharedBuffer:
    """Anonymous memory that processes share, lent to one batch after another; pinned where there is a GPU."""

    def __init__(self, size: int) -> None:
        self.size = size
        # tasks that write into it, and the array that was lent
        self.tasks: list[Future[Reasons]] = []
        self._lent: Callable[[], object] = lambda: None
        self.file = os.memfd_create("contrastile")
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, max(size, 1))
        self._bytes = np.frombuffer(mmap.mmap(self.file, max(size, 1)), np.uint8)
        self.address = self._bytes.ctypes.data
        if torch.cuda.is_available() and 0 < size <= MOST_PINNED:
            cuda = torch.cuda.cudart()
            if int(cuda.cudaHostRegister(self.address, size, 0)) == 0:
                weakref.finalize(self._bytes, cuda.cudaHostUnregister, self.address).atexit = False

    @property
    def idle(self) -> bool:
        """True where no tensor refers to it and no task writes: a batch may be given up while it is decoded."""
        return self._lent() is None and all(task.done() for task in self.tasks)

    def lend(self, shape: tuple[int, ...]) -> Tensor:
        array = self._bytes[: math.prod(shape)].reshape(shape)
        self._lent = weakref.ref(array)
        return torch.from_numpy(array)


class Worker:
    """This process's end of a decoding process, which has `timeout` seconds for each task."""

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self._socket, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(timeout)
        path = os.pathsep.join(path for path in sys.path if path)
        # in a session of its own it gets no Ctrl-C; it ends when this end of the socket closes
        self._process = subprocess.Popen(
            [sys.executable, "-m", "contrastile.data.loader", str(far.fileno())],
            pass_fds=[far.fileno()],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        far.close()
        self._buffer: SharedBuffer | None = None

    def run(self, buffer: SharedBuffer, task: dict[str, object]) -> Reasons:
        """Have the process do a task; return its reasons. ChildProcessError for a process that ended or is silent."""
        try:
            # a buffer that is new to it is handed over with its first task
            files = [] if buffer is self._buffer else [buffer.file]
            socket.send_fds(self._socket, [json.dumps({**task, "size": buffer.size}, default=vars).encode()], files)
            self._buffer = buffer
            answer = self._socket.recv(MOST_MESSAGE)
        except TimeoutError:
            seconds, number = self._socket.gettimeout(), self._process.pid
            self.close(patience=0.0)
            got = f"no answer for {seconds:g} s from the decoding process {number}"
            raise ChildProcessError(f"{got}: was it stopped, or is the storage of the images lost?") from None
        except OSError:
            answer = b""
        if not answer:
            # a process that still runs, because the task could not be sent, ends now
            self._socket.close()
            code = self._process.wait()
            raise ChildProcessError(f"a decoding process ended with exit code {code}: is there memory enough?")
        return list(json.loads(answer))

    def close(self, patience: float = PATIENCE) -> None:
        """Close the socket, which ends the process; one that does not end within `patience` seconds is killed."""
        self._socket.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            # a stopped process cannot notice the socket
            self._process.kill()
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
        pieces = [Piece(**piece) for piece in task["pieces"]]
        reasons = fill(images[task["start"] :], pieces, task["examples"], task["crop_seed"])
        connection.send(json.dumps(reasons).encode())


class ImageLoader:
    """Loads one batch ahead of its use, by `workers` threads; with `processes`, each leaves the decoding to a process.

    `origin(row, example)` is the origin of a row's image; processes need a `Piece`.
    """

    def __init__(
        self, origin: Callable[[int, int], Origin], shape: Shape, workers: int, *, processes: bool,
        timeout: float = TIMEOUT,
    ) -> None:  # fmt: skip
        self._origin, self._shape = origin, shape
        self._pool = ThreadPoolExecutor(workers, "decoding")
        self._workers = [Worker(timeout) for _ in range(workers)] if processes else []
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._buffers: list[SharedBuffer] = []
        # the batch under way
        self._keys: list[Key] = []
        self._images: Tensor | None = None
        self._tasks: list[Future[Reasons]] = []

    def prefetch(self, keys: list[Key]) -> None:
        """Begin to load a batch; a batch that is under way is given up."""
        shape = (len(keys), *self._shape)
        buffer = self._buffer(math.prod(shape)) if self._workers else None
        self._keys, self._images = keys, torch.empty(shape, dtype=torch.uint8) if buffer is None else buffer.lend(shape)
        # a task that held the tensor of a shared buffer would keep it from being idle
        target = self._images.numpy() if buffer is None else buffer
        task, starts = partial(self._decode, target, shape), range(0, len(keys), GROUP)
        self._tasks = [self._pool.submit(task, start, keys[start : start + GROUP]) for start in starts]
        if buffer is not None:
            buffer.tasks = self._tasks

    def _buffer(self, size: int) -> SharedBuffer:
        """Shared memory for a batch: an earlier batch's if nothing refers to it any more, else new memory."""
        for buffer in [buffer for buffer in self._buffers if buffer.idle]:
            if buffer.size >= size:
                return buffer
            self._buffers.remove(buffer)
        self._buffers.append(SharedBuffer(size))
        return self._buffers[-1]

    def _decode(
        self, target: SharedBuffer | Images, shape: tuple[int, ...], start: int, keys: Sequence[Key]
    ) -> Reasons:
        # the look-up of origins is done here, so that the training step does not wait for it
        rows, examples, seeds = zip(*keys, strict=True)
        origins = list(map(self._origin, rows, examples))
        if not isinstance(target, SharedBuffer):
            return fill(target[start:], origins, examples, seeds[0])
        # this thread hardly uses the interpreter while it waits for its process
        worker = self._idle.get()
        task = {"shape": shape, "start": start, "pieces": origins, "examples": examples, "crop_seed": seeds[0]}
        try:
            return worker.run(target, task)
        finally:
            self._idle.put(worker)

    def load(self, keys: list[Key]) -> tuple[Tensor, Reasons]:
        """Images, uint8 `[n, C, S, S]`, the caller's own, and the reasons why some could not be read."""
        if self._images is None or self._keys[: len(keys)] != keys:
            self.prefetch(keys)
        assert self._images is not None
        images, reasons = self._images[: len(keys)], [reason for task in self._tasks for reason in task.result()]
        self._images = None
        return images, reasons[: len(keys)]

    def close(self) -> None:
        self._pool.shutdown(wait=bool(self._workers), cancel_futures=True)
        for worker in self._workers:
            worker.close()


def read_chunks(
    paths: Sequence[str], shape: Shape, *, chunk: int, processes: bool, timeout: float = TIMEOUT
) -> Iterator[tuple[range, Tensor, Reasons]]:
    """Whole images of files, `chunk` at a time, the next chunk decoded meanwhile: rows, uint8 `[n, C, S, S]`, reasons.

    An image that cannot be read has a reason, and arbitrary pixels.
    """
    chunks = [range(len(paths))[start : start + chunk] for start in range(0, len(paths), chunk)]
    workers = min(cores(), max(len(paths) // GROUP, 1))
    how: dict[str, Any] = {"processes": processes, "timeout": timeout}
    with closing(ImageLoader(lambda row, _: Piece(paths[row], 0, None), shape, workers, **how)) as loader:
        for rows, following in pairwise([*chunks, range(0)]):
            decoded = loader.load([(row, 0, None) for row in rows])
            if following:
                loader.prefetch([(row, 0, None) for row in following])
            yield rows, *decoded


def cores() -> int:
    """The CPU cores that this process may use: its share of the node's, where torchrun starts several ranks."""
    return max(1, int(usable_cpus()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with socket.socket(fileno=int(sys.argv[1])) as end:
        serve(end)
