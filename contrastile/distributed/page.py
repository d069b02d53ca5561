"""A page of memory that the ranks of one host share, in which they compare a few bytes in each step.

Stands on the ground of the house; `consistency.py` uses it, and `failure.py` closes it. By connections
between four processes that takes half a millisecond, in shared memory some hundredths of one. A rank has two records,
written in turn: it writes one only after it has read the last round of all ranks, so that no record is overwritten
while another rank reads it.

Each rank holds a lock on a byte of the page's file, which the system releases when the process ends: so the others
find a rank that was killed. torch's process groups have no transport by shared memory, and the standard library's
shared memory does not tell who has left.
"""

from __future__ import annotations

import os
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from mmap import mmap
from threading import Lock, RLock
from zlib import crc32

try:
    import fcntl
except ImportError:  # pragma: no cover
    fcntl = None  # type: ignore[assignment]

# folder of files that are memory; Linux alone has it
FOLDER = "/dev/shm"
# most letters of a page's path
LONGEST_PATH = 64
# a record's head: round, number of bytes, checksum; and the bytes of a record with its head
HEAD, RECORD = struct.Struct("=QII"), 4096
MOST_BYTES = RECORD - HEAD.size
# looks at a record before the rank sleeps, and seconds: of the shortest and the longest sleep, between two tests
# of the other ranks' locks
LOOKS, SHORTEST, LONGEST, TEST = 300, 2e-5, 1e-3, 0.005


def made(ranks: int) -> str:
    """The path of a new page's file; "" where this system has none."""
    if fcntl is None or not os.path.isdir(FOLDER):
        return ""
    with suppress(OSError):
        file, path = tempfile.mkstemp(prefix="contrastile-", dir=FOLDER)
        try:
            # reserved, because a write to memory that a full folder lacks would kill the process
            os.posix_fallocate(file, 0, 2 * RECORD * ranks)
            return path
        except OSError:
            os.unlink(path)
        finally:
            os.close(file)
    return ""


def opened(path: str, rank: int, ranks: int, timeout: float, names: Sequence[int] = ()) -> Page | None:
    """The page of this file; None where this rank does not reach it, as on another host."""
    with suppress(OSError):
        return Page(path, rank, ranks, timeout, names)
    return None


class Page:
    """A rank's place on the page. `timeout`: seconds that it waits for the others; `names`: numbers in its errors."""

    def __init__(self, path: str, rank: int, ranks: int, timeout: float, names: Sequence[int] = ()) -> None:
        # of threads of this rank, which gather one after the other; and of those that test a lock or close the file,
        # whose number another file has afterwards
        self._turn, self._use = Lock(), RLock()
        self._file, self._rank, self._ranks, self._timeout = os.open(path, os.O_RDWR), rank, ranks, timeout
        self._round, self._names, self.closed = 0, names or range(ranks), False
        self._memory = mmap(self._file, 2 * RECORD * ranks)
        # of this process alone: its children inherit none
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    def gather(self, own: bytes) -> list[bytes]:
        """The bytes of every rank, in rank order.

        Raises RuntimeError where a rank has left or does not come in time. This rank has left where it raises anything,
        such as KeyboardInterrupt: the next round would overwrite a record that others may still read.
        """
        with self._turn:
            try:
                self._check()
                self._round += 1
                at = self._at(self._rank)
                self._memory[at + HEAD.size : at + HEAD.size + len(own)] = own
                HEAD.pack_into(self._memory, at, self._round, len(own), self._checksum(own))
                return [own if rank == self._rank else self._read(rank) for rank in range(self._ranks)]
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Leave: the others find this rank's lock released."""
        with self._use:
            if not self.closed:
                self.closed = True
                os.close(self._file)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # without its lock, which another thread may have held when this process was forked, and without a name of this
        # module, whose names are gone by the end of Python
        if not getattr(self, "closed", True):
            close(self._file)

    def _check(self) -> None:
        if self.closed:
            raise RuntimeError("this rank has left")

    def _at(self, rank: int) -> int:
        return RECORD * (2 * rank + self._round % 2)

    def _checksum(self, written: bytes) -> int:
        """A number by which a reader sees all of a record: processors may show its head before its bytes."""
        return crc32(written, self._round & 0xFFFFFFFF)

    def _read(self, rank: int) -> bytes:
        """The bytes of another rank in this round, as soon as they are there."""
        looks, began, tested = 0, 0.0, 0.0
        while (written := self._written(rank)) is None:
            looks += 1
            if looks < LOOKS:
                time.sleep(0)
                continue
            # another thread, which has found that a rank is lost, may have closed the page
            self._check()
            now = time.monotonic()
            if not began:
                began = tested = now
            if now - tested > TEST:
                # a record counts that was whole before its rank left
                if self._left(rank) and self._written(rank) is None:
                    raise RuntimeError(f"rank {self._names[rank]} has left")
                tested = now
            if now - began > self._timeout:
                raise RuntimeError(f"rank {self._names[rank]} did not come within {self._timeout:g} s")
            time.sleep(min(LONGEST, max(SHORTEST, (now - began) / 10)))
        return written

    def _written(self, rank: int) -> bytes | None:
        """The bytes of another rank in this round; None until all of them are there."""
        at = self._at(rank)
        round_, length, checksum = HEAD.unpack_from(self._memory, at)
        if round_ != self._round:
            return None
        written = self._memory[at + HEAD.size : at + HEAD.size + length]
        return written if self._checksum(written) == checksum else None

    def _left(self, rank: int) -> bool:
        with self._use:
            self._check()
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
            except OSError:
                return False
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
            return True
