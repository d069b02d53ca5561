"""Many copies of every training pair, each bent anew, in tar shards that are written ahead of a run and removed behind.

Between a source that is wholly there (glyphs, a table) and `collection.py`, whose `Stream` reads from here. A shard
holds the next pairs of the run in the run's own order, which seed and place alone decide, as they do how each of them
is bent. Any process of a run that needs a shard and does not find it writes the same bytes, one at a time; a shard that
was removed, or damaged, is written again. A few lie on the disk at once, however large the set is.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import logging
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from contrastile._check import wrong
from contrastile.data.augment import bend, draw
from contrastile.data.batches import Batches
from contrastile.data.collection import Stream
from contrastile.data.pairs import Indices, PairSet, Pictures
from contrastile.data.shards import Found, find_in_tar

logger = logging.getLogger("contrastile")

FORMAT = 1
# pairs of a shard, about 10 MB; shards on the disk at once, of which a process holds the last few in memory
PAIRS, KEPT, HELD = 4096, 4, 3
# pictures bent at once: bending needs several times their memory
SLICE = 512


class Copies:
    """The library of a `Stream`: `pairs` of a set over and over, in the order of `seed`, `kept` shards at once."""

    def __init__(
        self, pairs: PairSet, rows: Indices, *, seed: int, folder: Path, size: int = PAIRS, kept: int = KEPT
    ) -> None:
        self._pairs, self._rows, self._seed, self._folder = pairs, rows, seed, folder
        self._size, self._kept = size, kept
        self._order = Batches(np.arange(len(rows)), sizes=(), seed=seed)
        self._ids = dict(zip(pairs.titles, pairs.ids.tolist(), strict=True))
        self._held: dict[int, tuple[bytes, list[Found]]] = {}
        self._busy = threading.Lock()

    def title(self, row: int) -> str:
        """The title of a pair."""
        return self._pairs.titles[row]

    def identity(self, title: str) -> int:
        """The pair set's own."""
        return self._ids[title]

    def picture(self, row: int, place: int) -> bytes:
        """The PNG of example number `place` of the run, which has to be of the pair `row`."""
        number, entry = divmod(place, self._size)
        content, found = self._shard(number)
        if found[entry].title != self.title(row):
            got = f"{self.title(row)} as example {place}, where {found[entry].title} was written"
            raise wrong("seed", "be that in whose order the shards are written", got, "Take the recipe's own seed.")
        return content[found[entry].offset : found[entry].offset + found[entry].size]

    def _shard(self, number: int) -> tuple[bytes, list[Found]]:
        """A shard's bytes and what lies where in them."""
        with self._busy:
            if number not in self._held:
                try:
                    with self._alone():
                        self._held[number] = self._found(number) or self._written(number)
                except OSError as failure:
                    got = f"{self._folder} ({failure.strerror})"
                    raise wrong(
                        "cache", "be a folder with room for the shards", got, "Free it and resume."
                    ) from failure
                for old in sorted(self._held, key=lambda other: abs(other - number))[HELD:]:
                    del self._held[old]
            return self._held[number]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One process at a time looks for shards, writes and removes them; the lock ends with its process."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _found(self, number: int) -> tuple[bytes, list[Found]] | None:
        """A shard that is on the disk, if it is the bytes that its name says."""
        for path in self._folder.glob(f"{number:08}-*.tar"):
            content = path.read_bytes()
            if path == self._path(number, content):
                return content, list(find_in_tar(path))  # type: ignore[arg-type]
            logger.warning("the shard %s is damaged and is written again", path)
            path.unlink()
        return None

    def _written(self, number: int) -> tuple[bytes, list[Found]]:
        """A shard, written beside its place and renamed; those that lie farthest from it make room first."""
        for left in self._folder.glob(".part-*"):
            left.unlink()
        there = sorted(self._folder.glob("*.tar"), key=lambda path: abs(int(path.name.partition("-")[0]) - number))
        for path in there[self._kept - 1 :]:
            path.unlink()
        content = self._made(number)
        part = self._folder / f".part-{number:08}"
        part.write_bytes(content)
        part.rename(self._path(number, content))
        found = self._found(number)
        if found is None:
            raise OSError(None, "what was written is not what is read")
        return found

    def _path(self, number: int, content: bytes) -> Path:
        return self._folder / f"{number:08}-{hashlib.sha256(content).hexdigest()[:16]}.tar"

    def _made(self, number: int) -> bytes:
        """The bytes of a shard: `key.png` and `key.txt` of its pairs, whose keys are their places."""
        self._order.examples = number * self._size
        rows = self._rows[self._order.ahead(self._size).numpy()]
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            pictures = self._bent(rows, number)
            for place, (row, picture) in enumerate(zip(rows.tolist(), pictures, strict=True), number * self._size):
                for suffix, content in (("png", _png(picture)), ("txt", self.title(row).encode())):
                    entry = tarfile.TarInfo(f"{place:012}.{suffix}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
        return file.getvalue()

    def _bent(self, rows: Indices, number: int) -> Pictures:
        generator = torch.Generator().manual_seed(int(np.random.default_rng((self._seed, number)).integers(2**63)))
        lots = draw(len(rows), generator)
        images = torch.from_numpy(self._pairs.images[rows])
        slices = [slice(start, start + SLICE) for start in range(0, len(rows), SLICE)]
        bent = torch.cat([bend(images[some], lots[some]) for some in slices])
        return (bent * 255).round().byte().numpy()


def _png(picture: Pictures) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    # Pillow takes one channel as `[S, S]`
    plain = picture[0] if len(picture) == 1 else np.ascontiguousarray(picture.transpose(1, 2, 0))
    Image.fromarray(plain).save(file, "PNG", compress_level=1)
    return file.getvalue()


def with_copies(pairs: PairSet, copies: int, *, seed: int, cache: Path, size: int = PAIRS, kept: int = KEPT) -> PairSet:
    """The same pairs, of which those to train on come `copies` times an epoch, from shards below `cache`."""
    rows = np.tile(pairs.splits["train"], copies)
    told = [FORMAT, copies, seed, size, list(pairs.images.shape), pairs.titles]
    digest = hashlib.sha256(json.dumps(told).encode() + rows.tobytes() + pairs.images.tobytes()).hexdigest()
    library = Copies(pairs, rows, seed=seed, folder=cache / f"shards-{digest[:16]}", size=size, kept=kept)
    shape: tuple[int, int, int] = pairs.images.shape[1:]
    # not one may be bad: they are our own
    stream = Stream(library, rows, shape=shape, most_bad=0.0, digest=digest, copies=copies, bent=True)
    training = np.arange(len(pairs), len(pairs) + len(stream))
    return replace(pairs, splits={**pairs.splits, "train": training}, stream=stream)
