"""Loading of images beside the training step: one batch, decoded by threads or processes ahead of its use.

Stands between `decoders.py`, which decodes, and `stream.py`, which decides the rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from contrastile.data.crop import Crop
from contrastile.data.decoders import Origin, Piece, Processes, Reasons, Threads
from contrastile.offload import usable_cpus

# images of a task
GROUP = 16

# a row of the store, the number of the example in the run, the crop of the batch or None for whole images
Key = tuple[int, int, Crop | None]


class ImageStore(Protocol):
    """Images by row."""

    @property
    def in_processes(self) -> bool:
        """True where every origin is a `Piece`, which other processes can read."""

    def origin(self, row: int, place: int) -> Origin:
        """The origin of a row's image, for example number `place` of the run."""


class Files:
    """A store of image files."""

    in_processes = True

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths

    def origin(self, row: int, place: int) -> Origin:
        """A whole file."""
        return Piece(self._paths[row], 0, None, place)


class ImageLoader:
    """Loads one batch ahead of its use, by `workers` processes where `apart` is set, else by as many threads."""

    def __init__(self, store: ImageStore, shape: tuple[int, int, int], workers: int, *, apart: bool) -> None:
        self._store, self._shape = store, shape
        self._decoders = Processes(workers) if apart and store.in_processes else Threads(workers)
        # the batch under way
        self.keys: list[Key] = []
        self._images = torch.empty((0, *shape), dtype=torch.uint8)
        self._tasks: list[Future[Reasons]] = []

    def begin(self, keys: list[Key]) -> None:
        """Begin to load a batch; a batch that is under way is given up."""
        self.keys = keys
        self._images, self._tasks = self._decoders.buffer((len(keys), *self._shape)), []
        for start in range(0, len(keys), GROUP):
            group = keys[start : start + GROUP]
            self._tasks.append(self._decoders.fill(self._images, start, partial(self._origins, group), group[0][2]))

    def finish(self) -> tuple[Tensor, Reasons]:
        """The batch under way, once it is whole: uint8 `[n, C, S, S]`, and the reasons why images could not be read."""
        images, reasons = self._images, [reason for task in self._tasks for reason in task.result()]
        # the memory is the caller's alone, so that it can be lent again
        self._images = self._images[:0].clone()
        self.keys, self._tasks = [], []
        return images, reasons

    def _origins(self, group: Sequence[Key]) -> list[Origin]:
        return [self._store.origin(row, place) for row, place, _ in group]

    def close(self) -> None:
        """End the workers."""
        self._decoders.close()


def read_chunks(
    paths: Sequence[str], shape: tuple[int, int, int], *, chunk: int, apart: bool
) -> Iterator[tuple[range, Tensor, Reasons]]:
    """Whole images of files, `chunk` at a time, the next chunk decoded meanwhile: rows, uint8 `[n, C, S, S]`, reasons.

    An image that cannot be read has a reason, and arbitrary pixels. Processes decode where `apart` is set.
    """
    chunks = [range(start, min(start + chunk, len(paths))) for start in range(0, len(paths), chunk)]
    loader = ImageLoader(Files(paths), shape, min(cores(), max(len(paths) // GROUP, 1)), apart=apart)
    try:
        for part, following in pairwise([range(0), *chunks, range(0)]):
            decoded = loader.finish() if part else None
            if following:
                loader.begin([(row, 0, None) for row in following])
            if decoded is not None:
                yield part, *decoded
    finally:
        loader.close()


def cores() -> int:
    """The CPU cores that this process may use: its share of the node's, where torchrun starts several ranks."""
    return max(1, int(usable_cpus()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
