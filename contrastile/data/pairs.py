"""Pairs of an image and its caption, and their cache: the form in which every source hands over its data.

Stands between `files.py` and the sources; `registry.py` opens a source by its name. `batches.py` takes rows of a
`PairSet`, `images.py` makes floats of its bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from contrastile._errors import invalid
from contrastile.data.base import Images, Indices, ProgressFactory, silent
from contrastile.data.files import cached_folder, open_in_place, write_text
from contrastile.data.stream import Stream

IMAGES, LABELS = "images.npy", "pairs.json"

# the part of a set that is stored beside its images: captions, ids, splits, and the counts of skipped rows
Labels = tuple[list[str], Indices, dict[str, Indices], dict[str, int]]


@dataclass(frozen=True)
class PairOptions:
    """The options of `open_pairs` that a source may need; see there."""

    image_size: int
    channels: int
    held_out: float
    cache: Path
    progress: ProgressFactory = silent
    weights: Sequence[int] = ()
    most_bad: float = 1.0

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape `[C, S, S]` of an image."""
        return self.channels, self.image_size, self.image_size


@dataclass(frozen=True)
class PairSet:
    """Images with their captions.

    images: `[n, C, S, S]` uint8, memory-mapped and read-only; glyphs are bright ink on a dark ground.
    captions: `n` texts.
    ids: `[n]`; pairs with equal ids could each be the other's right answer, so they are not each other's negatives.
    splits: sorted indices; "train" always, the held-out parts by their names.
    skipped: the number of the source's rows that gave no pair, by reason.
    stream: the training pairs of a collection, too many to be held here: rows from `n` on, read on demand.
    """

    images: Images
    captions: list[str]
    ids: Indices
    splits: dict[str, Indices]
    skipped: dict[str, int]
    stream: Stream | None = None

    def __len__(self) -> int:
        return len(self.captions)


class ImageWriter:
    """Appends images of one shape to a .npy file whose length is known only at the end.

    The header is written twice: numpy pads it so that the first axis can grow.
    """

    def __init__(self, path: Path, shape: tuple[int, int, int]) -> None:
        self.shape = shape
        self.written = 0
        self._file = open_in_place(path, "wb")
        self._header()

    def _header(self) -> None:
        self._file.seek(0)
        header = {"descr": "|u1", "fortran_order": False, "shape": (self.written, *self.shape)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def add(self, image: Images) -> None:
        """Append one image, `[C, S, S]`."""
        if image.shape != self.shape or image.dtype != np.uint8:
            raise invalid("picture", f"be uint8 {self.shape}", f"{image.dtype} {image.shape}", "Convert it first.")
        self._file.write(image.tobytes())
        self.written += 1

    def __enter__(self) -> ImageWriter:
        return self

    def __exit__(self, *_: object) -> None:
        """Write the header with the true length and flush the file to the disk."""
        with self._file:
            self._header()
            self._file.flush()
            os.fsync(self._file.fileno())


def cached_pairs(
    cache: Path,
    kind: str,
    settings: Mapping[str, Any],
    *,
    shape: tuple[int, int, int],
    make: Callable[[ImageWriter], Labels],
) -> PairSet:
    """The pairs that `make` writes, from the folder under `cache` that belongs to exactly these `settings`.

    `make(writer)` adds every image and returns captions, ids, splits and the counts of skipped rows.
    """

    def write(folder: Path) -> None:
        with ImageWriter(folder / IMAGES, shape) as writer:
            captions, ids, splits, skipped = make(writer)
        rows = {name: rows.tolist() for name, rows in splits.items()}
        labels = {"titles": captions, "ids": ids.tolist(), "splits": rows, "skipped": skipped}
        write_text(folder / LABELS, json.dumps(labels))

    folder = cached_folder(cache, f"{kind}-{shape[1]}px", settings, files=(IMAGES, LABELS), make=write)
    labels = json.loads((folder / LABELS).read_text(encoding="utf-8"))
    return PairSet(
        images=np.load(folder / IMAGES, mmap_mode="r", allow_pickle=False),
        captions=labels["titles"],
        ids=np.array(labels["ids"], dtype=np.int64),
        splits={name: np.array(rows, dtype=np.int64) for name, rows in labels["splits"].items()},
        skipped=labels["skipped"],
    )
