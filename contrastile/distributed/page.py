"""A page of memory that the ranks of one host share, in which they compare a few bytes in each step.

By connections between four processes that takes half a millisecond, in shared memory some hundredths of one. A rank has
two records, written in turn: it writes one only after it has read the last round of all ranks, so that none overwrites
what another still reads.

Each rank holds a lock on a byte of the page's file, which the system releases when the process ends: so the others
find a rank that was killed. torch's process groups have no transport by shared memory, and the standard library's
shared memory does not tell who has left.
"""

from __future__ import annotations

import os
import struct
import tempfile
import time
from contextlib import suppress
from mmap import mmap
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


def opened(path: str, rank: int, ranks: int, timeout: float) -> Page | None:
    """The page of this file; None where this rank does not reach it, as on another host."""
    if not path:
        return None
    with suppress(OSError):
        return Page(path, rank, ranks, timeout)
    return None


class Page:
    """A rank's place on the page. `timeout`: seconds that it waits for the others."""

    def __init__(self, path: str, rank: int, ranks: int, timeout: float) -> None:
        self._file, self._rank, self._ranks, self._timeout = os.open(path, os.O_RDWR), rank, ranks, timeout
        self._memory, self._round, self.closed = mmap(self._file, 2 * RECORD * ranks), 0, False
        # of this process alone: its children inherit none
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    def gather(self, own: bytes) -> list[bytes]:
        """The bytes of every rank, in rank order.

        Raises RuntimeError where a rank has left or does not come in time.
        """
        if self.closed:
            raise RuntimeError("this rank has left")
        self._round += 1
        at = self._at(self._rank)
        self._memory[at + HEAD.size : at + HEAD.size + len(own)] = own
        HEAD.pack_into(self._memory, at, self._round, len(own), self._checksum(own))
        return [own if rank == self._rank else self._read(rank) for rank in range(self._ranks)]

    def close(self) -> None:
        """Leave: the others find this rank's lock released."""
        if not self.closed:
            self.closed = True
            os.close(self._file)

    def __del__(self) -> None:
        if hasattr(self, "closed"):
            self.close()

    def _at(self, rank: int) -> int:
        return RECORD * (2 * rank + self._round % 2)

    def _checksum(self, written: bytes) -> int:
        """A number by which a reader sees all of a record: processors may show its head before its bytes."""
        return crc32(written, self._round & 0xFFFFFFFF)

    def _read(self, rank: int) -> bytes:
        """The bytes of another rank in this round, as soon as they are there."""
        at, looks, began, tested = self._at(rank), 0, 0.0, 0.0
        while True:
            round_, length, checksum = HEAD.unpack_from(self._memory, at)
            if round_ == self._round:
                written = self._memory[at + HEAD.size : at + HEAD.size + length]
                if self._checksum(written) == checksum:
                    return written
            looks += 1
            if looks < LOOKS:
                time.sleep(0)
                continue
            if self.closed:
                # by another thread, which has found that a rank is lost
                raise RuntimeError("this rank has left")
            now = time.monotonic()
            if not began:
                began = tested = now
            if now - tested > TEST:
                # what it wrote before it left counts
                if self._left(rank) and HEAD.unpack_from(self._memory, at)[0] != self._round:
                    raise RuntimeError(f"rank {rank} has left")
                tested = now
            if now - began > self._timeout:
                raise RuntimeError(f"rank {rank} did not come within {self._timeout:g} s")
            time.sleep(min(LONGEST, max(SHORTEST, (now - began) / 10)))

    def _left(self, rank: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True
