"""Pairs of an image and its caption, and their cache: the form in which every source hands over its data.

A `PairSet` lies decoded in the cache. The pairs of a set too large for that are read and decoded by row from its
`Stream`, the next batch ahead of its use.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from contrastile._errors import invalid, logger
from contrastile.data.base import Images, Indices, ProgressFactory, Shape, check_bad, counted, silent
from contrastile.data.files import MANIFEST, cached_folder, open_in_place, write_text
from contrastile.data.loader import TIMEOUT, ImageLoader, Key, Origin, Piece, Reasons, cores

# rows that are tried in the place of each row of a batch without a single readable image
TRIES = 10
IMAGES, LABELS = "images.npy", "pairs.json"

# the part of a set that is stored beside its images: captions, ids, splits, and the counts of skipped rows
Labels = tuple[list[str], Indices, dict[str, Indices], dict[str, int]]


@dataclass(frozen=True)
class PairOptions:
    """The options of `open_pairs`, which describes them, that a source may need."""

    image_size: int
    channels: int
    held_out: float
    cache: Path
    progress: ProgressFactory = silent
    weights: Sequence[int] = ()
    most_bad: float = 1.0

    @property
    def shape(self) -> Shape:
        return self.channels, self.image_size, self.image_size

    @property
    def settings(self) -> dict[str, Any]:
        return {"image_size": self.image_size, "channels": self.channels, "held_out": self.held_out}


@dataclass(frozen=True)
class PairSet:
    """Images with their captions.

    images: `[n, C, S, S]` uint8, memory-mapped and read-only. captions: `n` texts. ids: `[n]`, equal for pairs that
    could each be the other's right answer. splits: sorted indices, "train" and the held-out parts by their names.
    skipped: the number of the source's rows that gave no pair, by reason. stream: the training pairs of a collection,
    rows from `n` on, read on demand. digest: the checksum of the images.
    """

    images: Images
    captions: list[str]
    ids: Indices
    splits: dict[str, Indices]
    skipped: dict[str, int]
    stream: "Stream | None" = None
    digest: str = ""

    def __len__(self) -> int:
        return len(self.captions)


class Library(Protocol):
    """Images and captions by row; an origin is a `Piece` where other processes can read it."""

    def origin(self, row: int, example: int) -> Origin: ...
    def caption(self, row: int) -> str: ...
    def identity(self, caption: str) -> int: ...


@dataclass(eq=False)
class Stream:
    """Training pairs of a library, by row: row i of the stream is row `rows[i]` of the library.

    The same pairs come `copies` times. `augmented`: the library's images are augmented already. The pair before an
    unreadable image takes the place of its pair; equal ids keep the two from being negatives of each other. `skipped`
    counts, by reason, the times that such an image was read, of the pairs `seen` in all; `lost` counts each of these
    images once, when the first epoch reads it. `workers` decode: with `processes` as such, which leaves this process
    free to keep a GPU busy, else as threads.
    """

    library: Library
    rows: Indices
    shape: Shape
    most_bad: float
    digest: str
    copies: int = 1
    augmented: bool = False
    skipped: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    seen: int = 0
    workers: int = field(default_factory=cores)
    processes: bool = False
    timeout: float = TIMEOUT
    _loader: ImageLoader | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def captions(self, rows: Iterable[int]) -> list[str]:
        return [self.library.caption(self.rows[row]) for row in rows]

    def sample_captions(self, most: int) -> list[str]:
        """At most `most` captions of one copy of the pairs, evenly spread, to train a tokenizer on."""
        count = len(self) // self.copies
        return self.captions(range(0, count, -(-count // most)))

    def prefetch(self, rows: Sequence[int], examples: Sequence[int], crop_seed: int | None) -> None:
        """Begin to decode the images that the next `read` will ask for. A batch expected before is given up."""
        self._loading().prefetch(self._keys(rows, examples, crop_seed))

    def _loading(self) -> ImageLoader:
        if self._loader is None:
            processes = self.processes and isinstance(self.library.origin(int(self.rows[0]), 0), Piece)
            origin, timeout = self.library.origin, self.timeout
            self._loader = ImageLoader(origin, self.shape, self.workers, processes=processes, timeout=timeout)
        return self._loader

    def _keys(self, rows: Sequence[int], examples: Sequence[int], crop_seed: int | None) -> list[Key]:
        return [(int(self.rows[row]), example, crop_seed) for row, example in zip(rows, examples, strict=True)]

    def read(
        self, rows: Sequence[int], examples: Sequence[int], crop_seed: int | None, *, tries: int = TRIES
    ) -> tuple[Tensor, list[int]]:
        """Images `[b, C, S, S]` uint8 of `rows`, the caller's own, and their rows: a good row in place of a bad one.

        `examples`, their numbers in the run, and `crop_seed` decide the crops; without a seed images are whole.
        """
        if not rows:
            return torch.empty((0, *self.shape), dtype=torch.uint8), []
        images, reasons = self._loading().load(self._keys(rows, examples, crop_seed))
        self._count(reasons, rows, examples)
        tried: dict[int, str | None] = {}
        while not (good := [number for number, reason in enumerate(reasons) if reason is None]):
            tried |= zip(self.rows[rows].tolist(), reasons, strict=True)
            if not tries:
                got = counted(Counter(map(str, tried.values())))
                raise invalid("source", "have images that can be read", got, "Check its files.")
            # the following rows replace a share without a readable image: a resumed run finds the same
            rows, tries = [(row + 1) % len(self) for row in rows], tries - 1
            images, reasons = self._loading().load(self._keys(rows, examples, crop_seed))
        chosen, last = list(rows), good[0]
        # a bad image is replaced by the last good one before it, or by the first good one
        for number, reason in enumerate(reasons):
            if reason is None:
                last = number
            else:
                images[number], chosen[number] = images[last], rows[last]
        return images, chosen

    def read_whole(self, rows: Sequence[int], following: Sequence[int]) -> tuple[Tensor, Reasons]:
        """Whole images of `rows`, none replaced, and the reasons why some have none; `following` are decoded next."""
        images = self._loading().load(self._keys(rows, rows, None))
        if following:
            self.prefetch(following, following, None)
        return images

    @property
    def fingerprint(self) -> str:
        """A digest of the images, their order and their size."""
        text = f"{self.digest} {self.shape} {hashlib.sha256(self.rows.tobytes()).hexdigest()}"
        return hashlib.sha256(text.encode()).hexdigest()

    def close(self) -> None:
        """Stop decoding. More may be read afterwards."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def check(self, skipped: Mapping[str, int], seen: int) -> None:
        """Raise ValueError where too many of the pairs `seen`, of all ranks, could not be used."""
        check_bad(skipped, seen, self.most_bad, of=len(self))

    @property
    def counts(self) -> dict[str, Any]:
        return {"skipped": dict(self.skipped), "lost": dict(self.lost), "seen": self.seen}

    def set_counts(self, skipped: Mapping[str, int], lost: Mapping[str, int], seen: int) -> None:
        self.skipped, self.lost, self.seen = Counter(skipped), Counter(lost), seen

    def _count(self, reasons: Reasons, rows: Sequence[int], examples: Sequence[int]) -> None:
        every = zip(reasons, rows, examples, strict=True)
        bad = [(why, row, example) for why, row, example in every if why is not None]
        if bad and not self.skipped:
            reason, row = bad[0][0], int(self.rows[bad[0][1]])
            origin = self.library.origin(row, 0)
            place = f"{origin.path}, " if isinstance(origin, Piece) else ""
            message = 'an image of the collection is skipped (%s: %s"%s"); all are counted in the report'
            logger.warning(message, reason, place, self.library.caption(row))
        self.seen += len(reasons)
        self.skipped.update(reason for reason, _, _ in bad)
        # a pair with a weight comes several times an epoch, in neighbouring rows
        once = (reason for reason, row, example in bad if example < len(self) and self.rows[row] != self.rows[row - 1])
        self.lost.update(once)


class ImageWriter:
    """Appends images of one shape to a .npy file whose length, in a header with room for it, is known at the end."""

    def __init__(self, path: Path, shape: Shape) -> None:
        self.shape, self.written = shape, 0
        self._file = open_in_place(path, "wb")
        self._header()

    def _header(self) -> None:
        self._file.seek(0)
        header = {"descr": "|u1", "fortran_order": False, "shape": (self.written, *self.shape)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def add(self, image: Images) -> None:
        if image.shape != self.shape or image.dtype != np.uint8:
            raise invalid("picture", f"be uint8 {self.shape}", f"{image.dtype} {image.shape}", "Convert it first.")
        self._file.write(image.tobytes())
        self.written += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._header()
            self._file.flush()
            os.fsync(self._file.fileno())


def cached_pairs(
    cache: Path, kind: str, settings: Mapping[str, Any], *, shape: Shape, make: Callable[[ImageWriter], Labels]
) -> PairSet:
    """The pairs whose images `make(writer)` adds and whose labels it returns, from the cache for these `settings`."""

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
        digest=json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"][IMAGES],
    )
