"""The index of a collection: where every pair lies, its caption and its hash fraction, kept in the cache.

Stands between `shards.py`, which finds the pairs, and `collection.py`. Only headers and captions are read, no image.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from contrastile.data.base import ProgressFactory, hash_fraction
from contrastile.data.cache import checksum
from contrastile.data.decoders import Piece
from contrastile.data.shards import find_pairs
from contrastile.data.sources import Source

logger = logging.getLogger("contrastile")

HEADER, ARRAYS = "index.json", ("where.npy", "ends.npy", "lots.npy", "titles.npy")


@dataclass(frozen=True)
class Index:
    """Places of `n` pairs: file number, offset, size `[n, 3]`; their captions in one text, caption i up to `ends[i]`.

    fractions: `[n]`, the hash fractions of the captions. parts: the number of pairs of each source.
    """

    files: list[str]
    where: npt.NDArray[np.int64]
    text: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.int64]
    fractions: npt.NDArray[np.float64]
    parts: list[int]
    skipped: dict[str, int]
    in_processes = True

    def __len__(self) -> int:
        return len(self.where)

    def caption(self, row: int) -> str:
        """The caption of a pair."""
        return bytes(self.text[self.ends[row - 1] if row else 0 : self.ends[row]]).decode()

    def identity(self, caption: str) -> int:
        """An id that equal captions share."""
        return int(hash_fraction(caption) * 2**53)

    def origin(self, row: int, place: int) -> Piece:
        """The place of a pair's image in its file, for example number `place` of a run."""
        number, offset, size = (int(value) for value in self.where[row])
        return Piece(self.files[number], offset, size, place)

    def describe(self, row: int) -> str:
        """The file and the caption of a pair, for a log line."""
        return f'{self.files[int(self.where[row, 0])]}, "{self.caption(row)}"'


def open_index(folder: Path, sources: Sequence[Source], unpacked: Path, progress: ProgressFactory) -> Index:
    """The index from the cache; where it is missing or damaged, it is made under a temporary name and renamed."""
    if folder.exists() and not _is_whole(folder, unpacked):
        logger.warning("the cache %s is damaged and is made again", folder)
        shutil.rmtree(folder)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
            _write_index(Path(temporary) / "index", sources, unpacked, progress)
            # another process may have been faster
            if not folder.exists():
                (Path(temporary) / "index").rename(folder)
    header = json.loads((folder / HEADER).read_text(encoding="utf-8"))
    where, ends, fractions, text = (np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in ARRAYS)
    return Index(header["files"], where, text, ends, fractions, header["parts"], header["skipped"])


def _is_whole(folder: Path, unpacked: Path) -> bool:
    try:
        header = json.loads((folder / HEADER).read_text(encoding="utf-8"))
        # files that were unpacked into the cache may have been removed there; others are the user's own
        unpacked_files_exist = all(os.path.isfile(path) for path in header["files"] if Path(path).parent == unpacked)
        return unpacked_files_exist and all(checksum(folder / name) == header["sha256"][name] for name in ARRAYS)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_index(folder: Path, sources: Sequence[Source], unpacked: Path, progress: ProgressFactory) -> None:
    folder.mkdir()
    # arrays of plain numbers, because millions of pairs as Python objects would not fit into memory
    where, ends, fractions, text, parts = array("q"), array("q"), array("d"), bytearray(), []
    files: dict[str, int] = {}
    skipped: Counter[str] = Counter()
    with progress(sum(len(source.paths) for source in sources), "reading the shards", "files") as bar:
        for source in sources:
            before = len(ends)
            for path in source.paths:
                for pair in find_pairs(replace(source, paths=(path,)), unpacked):
                    if isinstance(pair, str):
                        skipped[pair] += 1
                        continue
                    where.extend((files.setdefault(pair.path, len(files)), pair.offset, pair.size))
                    text += pair.caption.encode()
                    ends.append(len(text))
                    fractions.append(hash_fraction(pair.caption))
                bar.update(1)
            parts.append(len(ends) - before)
    contents: list[npt.NDArray[Any]] = [
        np.frombuffer(where, np.int64).reshape(-1, 3),
        np.frombuffer(ends, np.int64),
        np.frombuffer(fractions, np.float64),
        np.frombuffer(text, np.uint8),
    ]
    for name, content in zip(ARRAYS, contents, strict=True):
        np.save(folder / name, content)
    sums = {name: checksum(folder / name) for name in ARRAYS}
    header = {"files": list(files), "parts": parts, "skipped": skipped, "sha256": sums}
    (folder / HEADER).write_text(json.dumps(header), encoding="utf-8")
