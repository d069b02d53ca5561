"""A folder that is there whole or not at all: pictures or texts made once, checked at every opening.

Between a source (glyphs, table, docstrings) and its set: the source says how to make the files, this says where they
stay.
A folder is written beside its place and renamed, under a lock, so that neither a kill nor a second process can leave
half of it; its checksums are compared whenever it is opened, and what does not agree is made anew, said aloud.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from contrastile._wrong import written_to, wrong
from contrastile.data.pairs import Labels, PairSet, Pictures

logger = logging.getLogger("contrastile")

# raised whenever what is drawn or written changes, so that older folders are left alone
FORMAT = 1
IMAGES, LABELS, MANIFEST = "images.npy", "pairs.json", "manifest.json"


class PictureWriter:
    """Appends pictures of one shape to a .npy file whose length is known only at the end.

    numpy pads its header so that the first axis can grow, which is what lets the header be written twice.
    """

    def __init__(self, path: Path, shape: tuple[int, int, int]) -> None:
        self.shape = shape
        self.written = 0
        self._file = path.open("wb")
        self._header()

    def _header(self) -> None:
        self._file.seek(0)
        described = {"descr": "|u1", "fortran_order": False, "shape": (self.written, *self.shape)}
        np.lib.format.write_array_header_1_0(self._file, described)

    def add(self, picture: Pictures) -> None:
        """One more picture, `[C, S, S]`."""
        if picture.shape != self.shape or picture.dtype != np.uint8:
            raise wrong("picture", f"be uint8 {self.shape}", f"{picture.dtype} {picture.shape}", "Convert it first.")
        self._file.write(picture.tobytes())
        self.written += 1

    def __enter__(self) -> PictureWriter:
        return self

    def __exit__(self, *_: object) -> None:
        """The header with the true length; the file is safe on the disk after this."""
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
    make: Callable[[PictureWriter], Labels],
) -> PairSet:
    """The pairs that `make` writes, from the folder under `cache` that belongs to exactly these `settings`.

    `make(writer)` adds every picture and returns titles, ids, splits and the counts of what was skipped.
    """
    name = f"{kind}-{shape[1]}px"
    return _read(cached_folder(cache, name, settings, files=(IMAGES, LABELS), make=partial(_write_pairs, shape, make)))


def _write_pairs(shape: tuple[int, int, int], make: Callable[[PictureWriter], Labels], folder: Path) -> None:
    with PictureWriter(folder / IMAGES, shape) as writer:
        titles, ids, splits, skipped = make(writer)
    labels = {
        "titles": titles,
        "ids": ids.tolist(),
        "splits": {name: rows.tolist() for name, rows in splits.items()},
        "skipped": skipped,
    }
    write_text(folder / LABELS, json.dumps(labels))


def cached_folder(
    cache: Path, kind: str, settings: Mapping[str, Any], *, files: Sequence[str], make: Callable[[Path], None]
) -> Path:
    """The folder under `cache` that belongs to exactly these `settings`, with `files`, which `make(folder)` writes."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    folder = cache / f"{kind}-{digest[:16]}"
    with _locked(cache, folder.name):
        damage = _damage(folder, files)
        if damage is not None:
            if folder.exists():
                logger.warning("the cache %s is damaged (%s) and is made again", folder, damage)
                shutil.rmtree(folder)
            _write_whole(folder, settings, files, make)
    return folder


@contextmanager
def _locked(cache: Path, name: str) -> Iterator[None]:
    """One process at a time makes a folder; the others wait, and find it ready. The lock ends with its process."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / f".{name}.lock").open("w")
    except OSError as failure:
        raise wrong("cache", "be a folder that can be written", cache, f"Choose another one ({failure}).") from failure
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_whole(folder: Path, settings: Mapping[str, Any], files: Sequence[str], make: Callable[[Path], None]) -> None:
    """Written beside its place, then renamed. What a killed process left there is ours: we hold the lock."""
    beside = folder.with_name(f".{folder.name}.making")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        with written_to(folder):
            beside.mkdir()
            make(beside)
            sums = {name: checksum(beside / name) for name in files}
            manifest = {"format": FORMAT, "settings": settings, "sha256": sums}
            write_text(beside / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))
            sync(beside)
            beside.rename(folder)
            sync(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """A file that is safe on the disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """A file's bytes, or the names in a folder, are safe on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damage(folder: Path, files: Sequence[str]) -> str | None:
    """What is wrong with a folder, in words; None where all is well."""
    if not folder.exists():
        return "it is not there"
    try:
        sums = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"]
        for name in files:
            if checksum(folder / name) != sums[name]:
                return f"the checksum of {name} does not agree"
    except FileNotFoundError as missing:
        return f"{Path(missing.filename).name} is missing"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    return None


def _read(folder: Path) -> PairSet:
    labels = json.loads((folder / LABELS).read_text(encoding="utf-8"))
    return PairSet(
        images=np.load(folder / IMAGES, mmap_mode="r", allow_pickle=False),
        titles=labels["titles"],
        ids=np.array(labels["ids"], dtype=np.int64),
        splits={name: np.array(rows, dtype=np.int64) for name, rows in labels["splits"].items()},
        skipped=labels["skipped"],
    )
