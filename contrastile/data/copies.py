"""Augmented copies of every training pair, in tar shards that are written ahead of a run and removed behind it.

A shard holds the next pairs of the run in the run's own order; seed and example number alone decide the order and the
augmentation. A process of a run that finds no shard writes it, one process at a time, and all would write the same
bytes. A shard that was removed or damaged is written again. A few shards are on the disk at once, for any size of set.
"""

import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from contrastile._errors import invalid, logger
from contrastile.data.base import Batches, Images, Indices, Shape
from contrastile.data.files import locked, new_file
from contrastile.data.images import augment, draw_parameters
from contrastile.data.pairs import PairSet, Stream
from contrastile.data.shards import Pair, add_to_tar, find_in_tar

FORMAT = 1
# pairs of a shard, about 10 MB; shards on the disk at once; shards in the memory of a process
PAIRS, ON_DISK, IN_MEMORY = 4096, 4, 3
# images augmented at once: augmentation needs several times their memory
SLICE = 512

# the bytes of a tar file, and the places of its pairs
Shard = tuple[bytes, list[Pair]]


class Copies:
    """The library of a `Stream`: `pairs` of a set over and over, in the order of `seed`, few shards at once."""

    def __init__(self, pairs: PairSet, rows: Indices, *, seed: int, folder: Path) -> None:
        self._pairs, self._rows, self._seed, self._folder = pairs, rows, seed, folder
        self._order = Batches(np.arange(len(rows)), seed=seed)
        self._ids = dict(zip(pairs.captions, pairs.ids.tolist(), strict=True))
        self._shard = lru_cache(IN_MEMORY)(self._load)
        self._lock = threading.Lock()

    def caption(self, row: int) -> str:
        return self._pairs.captions[row]

    def identity(self, caption: str) -> int:
        return self._ids[caption]

    def origin(self, row: int, example: int) -> Callable[[], bytes]:
        """The reader of this example's PNG, called where it is decoded: this process holds the shards."""
        return partial(self.image_bytes, row, example)

    def image_bytes(self, row: int, example: int) -> bytes:
        """The PNG of this example of the run, which must be of the pair `row`."""
        number, entry = divmod(example, PAIRS)
        with self._lock:
            content, pairs = self._shard(number)
        pair = pairs[entry]
        if pair.caption != self.caption(row):
            got = f"{self.caption(row)} as example {example}, where {pair.caption} was written"
            raise invalid("seed", "be that in whose order the shards are written", got, "Take the recipe's own seed.")
        return content[pair.offset : pair.offset + pair.size]

    def _load(self, number: int) -> Shard:
        """Read or write a shard; one process at a time reads, writes and removes shards."""
        try:
            with locked(self._folder, ".lock"):
                return self._read(number) or self._write(number)
        except OSError as failure:
            got = f"{self._folder} ({failure.strerror})"
            raise invalid("cache", "be a folder with room for the shards", got, "Free it and resume.") from failure

    def _read(self, number: int) -> Shard | None:
        """A shard from the disk, if its bytes have the checksum in its name."""
        for path in self._folder.glob(f"{number:08}-*.tar"):
            content = path.read_bytes()
            if path == self._path(number, content):
                return content, list(find_in_tar(path))  # type: ignore[arg-type]
            logger.warning("the shard %s is damaged and is written again", path)
            path.unlink()
        return None

    def _write(self, number: int) -> Shard:
        """Write a shard under a temporary name and rename it; the shards farthest from it are removed first."""
        existing = sorted(self._folder.glob("*.tar"), key=lambda path: abs(int(path.name.partition("-")[0]) - number))
        for path in (*self._folder.glob(".part-*"), *existing[ON_DISK - 1 :]):
            path.unlink()
        content = self._shard_bytes(number)
        temporary = self._folder / f".part-{number:08}"
        new_file(temporary)
        temporary.write_bytes(content)
        path = temporary.rename(self._path(number, content))
        return content, list(find_in_tar(path))  # type: ignore[arg-type]

    def _path(self, number: int, content: bytes) -> Path:
        return self._folder / f"{number:08}-{hashlib.sha256(content).hexdigest()[:16]}.tar"

    def _shard_bytes(self, number: int) -> bytes:
        """The bytes of a shard: `key.png` and `key.txt` of its pairs, with the number of the example as the key."""
        self._order.examples = number * PAIRS
        rows = self._rows[self._order.ahead(PAIRS).numpy()]
        generator = torch.Generator().manual_seed(int(np.random.default_rng((self._seed, number)).integers(2**63)))
        parameters = draw_parameters(len(rows), generator).split(SLICE)
        pixels = torch.from_numpy(self._pairs.images[rows]).split(SLICE)
        augmented = torch.cat(list(map(augment, pixels, parameters)))
        images = (augmented * 255).round().byte().numpy()
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for example, (row, image) in enumerate(zip(rows.tolist(), images, strict=True), number * PAIRS):
                add_to_tar(tar, f"{example:012}.png", _png(image))
                add_to_tar(tar, f"{example:012}.txt", self.caption(row).encode())
        return file.getvalue()


def _png(image: Images) -> bytes:
    file = io.BytesIO()
    # Pillow takes one channel as `[S, S]`
    plain = image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0))
    Image.fromarray(plain).save(file, "PNG", compress_level=1)
    return file.getvalue()


def with_copies(pairs: PairSet, copies: int, *, seed: int, cache: Path) -> PairSet:
    """The same pairs, with `copies` augmented copies of each training pair an epoch, from shards below `cache`."""
    rows = np.tile(pairs.splits["train"], copies)
    settings = [FORMAT, copies, seed, PAIRS, list(pairs.images.shape), pairs.captions]
    digest = hashlib.sha256(json.dumps(settings).encode() + rows.tobytes() + pairs.images.tobytes()).hexdigest()
    library = Copies(pairs, rows, seed=seed, folder=cache / f"shards-{digest[:16]}")
    shape: Shape = pairs.images.shape[1:]
    # the shards are written here, so not one image may be bad
    stream = Stream(library, rows, shape=shape, most_bad=0.0, digest=digest, copies=copies, augmented=True)
    training = np.arange(len(pairs), len(pairs) + len(stream))
    return replace(pairs, splits={**pairs.splits, "train": training}, stream=stream)
