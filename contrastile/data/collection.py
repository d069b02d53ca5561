"""A collection too large to be decoded beforehand: an index in the cache, pictures decoded when a batch needs them.

A source of the flow's first box beside glyphs and tables. The held-out pairs are few and lie decoded in the cache, as a
table's do; the training pairs are read by their place in the index, so that `data/batches.py` alone decides the order,
on any number of ranks and workers, and a run goes on in the middle of an epoch at no cost.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from contrastile._check import wrong
from contrastile.data.cache import PictureWriter, cached_pairs, checksum
from contrastile.data.crop import Crop
from contrastile.data.decoding import GROUP, Made, Origin, Piece, Processes, Threads, cores
from contrastile.data.pairs import Indices, Labels, PairSet, ProgressFactory, joined_ids, lot
from contrastile.data.shards import find_pairs, promises, state
from contrastile.data.skipped import Skipped, check_bad, counted
from contrastile.data.sources import Source, read_source
from contrastile.data.table import decode

logger = logging.getLogger("contrastile")

FORMAT = 1
# pairs that are held out at most, whatever the share: they are decoded beforehand and compared with each other
MOST_HELD_OUT = 10_000
# rows that are looked at for each of a batch in which no picture can be read
TRIES = 10

# what to do about a source that gives too little
NOTHING_THERE = "Name a folder with pictures below it, or shards of pairs, as shards/{000..099}.tar."
ONE_TITLE = "One is to be held out. In a folder a picture's title is the .txt beside it, or its folder's name."


class Library(Protocol):
    """Whatever knows the titles of its rows and has their pictures."""

    def title(self, row: int) -> str:
        """The title of a row."""

    def picture(self, row: int, place: int) -> bytes:
        """Its picture as it lies in a file, for the example number `place` of the run."""

    def identity(self, title: str) -> int:
        """The same number for titles that could be each other's right answer."""


@dataclass(frozen=True)
class Index:
    """Where `n` pairs lie: file number, offset, size `[n, 3]`; their titles one behind the other, `ends` `[n]`.

    lots: `[n]`, drawn by the titles. parts: how many pairs each source has.
    """

    files: list[str]
    where: npt.NDArray[np.int64]
    text: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.int64]
    lots: npt.NDArray[np.float64]
    parts: list[int]
    skipped: dict[str, int]

    def __len__(self) -> int:
        return len(self.where)

    def title(self, row: int) -> str:
        """The title of a pair."""
        return bytes(self.text[self.ends[row - 1] if row else 0 : self.ends[row]]).decode()

    def identity(self, title: str) -> int:
        """Equal titles are each other's right answer."""
        return int(lot(title) * 2**53)

    def picture(self, row: int, place: int = 0) -> bytes:
        """The picture of a pair, as it lies in its file, wherever in the run it is needed."""
        return self.piece(row, place).read()

    def piece(self, row: int, place: int) -> Piece:
        """Where the picture of a pair lies, as example number `place` of a run."""
        number, offset, size = (int(value) for value in self.where[row])
        return Piece(self.files[number], offset, size, place)


class Slot(NamedTuple):
    """Where a picture is being decoded to: `place` of `room`, by a task whose picture number `group` it is."""

    room: Tensor
    place: int
    task: Future[list[str | None]]
    group: int


class Stream:
    """The training pairs of a collection, read and decoded by row; `rows` of the library are rows 0, 1, ... here.

    They are the same `copies` times over. Where they are `bent`, augmentation has been done.

    What cannot be read is counted by reason in `skipped`, and the pair before it in the batch, or in this rank's share,
    stands in for it: their ids are equal, so it is no negative. `check` finds more than the share `most_bad` too much.
    `workers` decode, each into its places of one tensor, which is the batch: threads, or processes if they are `apart`.
    """

    def __init__(
        self,
        library: Library,
        rows: Indices,
        *,
        shape: tuple[int, int, int],
        most_bad: float,
        digest: str,
        copies: int = 1,
        bent: bool = False,
    ) -> None:
        self._library, self._rows, self._shape, self._most_bad = library, rows, shape, most_bad
        self.digest, self._copies, self.bent = digest, copies, bent
        self.skipped: Counter[str] = Counter()
        self.seen = 0
        self.workers, self.apart = cores(), False
        self._decoders: Threads | Processes | None = None
        self._ahead: dict[tuple[int, int], Slot] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def titles(self, rows: Iterable[int]) -> list[str]:
        """The titles of `rows`."""
        return [self._library.title(self._rows[row]) for row in rows]

    def some_titles(self, most: int) -> list[str]:
        """Titles to train a tokenizer on: of one copy of the pairs, or of `most` of them, evenly spread."""
        count = len(self) // self._copies
        return self.titles(range(0, count, -(-count // most)))

    def identities(self, titles: Iterable[str]) -> list[int]:
        """The same number for titles that could be each other's right answer."""
        return [self._library.identity(title) for title in titles]

    def expect(self, rows: Sequence[int], places: Sequence[int], crop: Crop | None) -> None:
        """Begin to read what `read` will be asked for next."""
        wanted = [key for key in zip(rows, places, strict=True) if key not in self._ahead]
        if not wanted:
            return
        if self._decoders is None:
            lies = isinstance(self._library, Index)
            self._decoders = Processes(self.workers) if self.apart and lies else Threads(self.workers)
        room = self._decoders.room((len(wanted), *self._shape))
        for start in range(0, len(wanted), GROUP):
            group = wanted[start : start + GROUP]
            task = self._decoders.fill(room, start, partial(self._origins, group), crop)
            for number, key in enumerate(group):
                self._ahead[key] = Slot(room, start + number, task, number)

    def read(
        self, rows: Sequence[int], places: Sequence[int], crop: Crop | None, *, tries: int = TRIES
    ) -> tuple[Tensor, list[int]]:
        """Pictures `[b, C, S, S]` uint8 of `rows`, and of which rows they are where one stands in for another.

        The lots of `crop` are drawn by seed and place alone. The tensor is the caller's own.
        """
        if not rows:
            return torch.empty((0, *self._shape), dtype=torch.uint8), []
        slots, reasons = self._decoded(rows, places, crop)
        self._count(reasons, rows)
        good = [number for number, reason in enumerate(reasons) if reason is None]
        if not good and tries:
            # a share of a few pairs alone: others stand in, found by their rows, so that it happens again on resuming
            return self.read([(row + 1) % len(self) for row in rows], places, crop, tries=tries - 1)
        if not good:
            raise wrong("source", "have pictures that can be read", counted(self.skipped), "Look at the shards.")
        pictures, chosen, last = self._gathered(slots), list(rows), good[0]
        # each place itself where it is good, else the last good one before it, else the first
        for number, reason in enumerate(reasons):
            if reason is None:
                last = number
            else:
                pictures[number], chosen[number] = pictures[last], rows[last]
        return pictures, chosen

    def look(self, rows: Sequence[int], following: Sequence[int]) -> tuple[Tensor, list[str | None]]:
        """Whole pictures of rising `rows`, and why some have none; the `following` are decoded meanwhile.

        Nothing stands in for another, and nothing is counted.
        """
        slots, reasons = self._decoded(rows, rows, None)
        self.expect(following, following, None)
        return self._gathered(slots), reasons

    @property
    def fingerprint(self) -> str:
        """Which pictures these are, in which order and size."""
        told = f"{self.digest} {self._shape} {hashlib.sha256(self._rows.tobytes()).hexdigest()}"
        return hashlib.sha256(told.encode()).hexdigest()

    def _decoded(
        self, rows: Sequence[int], places: Sequence[int], crop: Crop | None
    ) -> tuple[list[Slot], list[str | None]]:
        """Where the pictures of `rows` are, when they are there, and why some are not."""
        self.expect(rows, places, crop)
        slots = [self._ahead.pop(key) for key in zip(rows, places, strict=True)]
        # of a batch shared out otherwise than it was expected to be, some will never be asked for
        self._ahead = {key: slot for key, slot in self._ahead.items() if key[1] > places[-1]}
        # waits for each task, once
        told = {task: task.result() for task in dict.fromkeys(slot.task for slot in slots)}
        return slots, [told[slot.task][slot.group] for slot in slots]

    def _origins(self, group: Sequence[tuple[int, int]]) -> list[Origin]:
        return [self._origin(*key) for key in group]

    def _origin(self, row: int, place: int) -> Origin:
        """Where a picture comes from: a place in a file, or the library, asked when it is needed."""
        row = int(self._rows[row])
        if isinstance(self._library, Index):
            return self._library.piece(row, place)
        return Made(partial(self._library.picture, row, place), place)

    def _where(self, row: int) -> str:
        """The file that a picture lies in, and its title."""
        row = int(self._rows[row])
        file = f"{self._library.piece(row, 0).path}, " if isinstance(self._library, Index) else ""
        return f'{file}"{self._library.title(row)}"'

    def close(self) -> None:
        """Forget what was expected. More may be read afterwards."""
        self._ahead = {}
        if self._decoders is not None:
            self._decoders.close()
            self._decoders = None

    def _gathered(self, slots: Sequence[Slot]) -> Tensor:
        """The pictures in the order of `slots`: as they lie where they were expected so, else copied together."""
        room = slots[0].room
        if all(slot.room is room and slot.place == number for number, slot in enumerate(slots)):
            return room[: len(slots)]
        return torch.stack([slot.room[slot.place] for slot in slots])

    def _count(self, reasons: Sequence[str | None], rows: Sequence[int]) -> None:
        self.seen += len(reasons)
        bad = [(reason, row) for reason, row in zip(reasons, rows, strict=True) if reason is not None]
        if bad and not self.skipped:
            told = "a picture of the collection is skipped (%s: %s); all are counted in the report"
            logger.warning(told, bad[0][0], self._where(bad[0][1]))
        self.skipped.update(reason for reason, _ in bad)

    def check(self, skipped: Mapping[str, int], seen: int) -> None:
        """Raises ValueError where too many of the pairs `seen`, of all ranks, could not be used."""
        check_bad(skipped, seen, self._most_bad, of=len(self))


def open_collection(
    text: str,
    *,
    image_size: int,
    channels: int,
    held_out: float,
    weights: Sequence[int],
    most_bad: float,
    cache: Path,
    progress: ProgressFactory,
) -> PairSet:
    """The pairs of a collection: held-out ones as rows of the set, training ones in its stream.

    A pair of source `i` comes `weights[i]` times an epoch; once, where there are no weights. Training rows are numbered
    behind the held-out ones. Pairs that share a title share an id and lie on the same side of the split.
    """
    sources, shape = read_source(text), (channels, image_size, image_size)
    if weights and len(weights) != len(sources):
        raise wrong("weights", f"be one for each of the {len(sources)} sources", len(weights), "Or leave them out.")
    digest = hashlib.sha256(json.dumps([FORMAT, *map(state, sources)]).encode()).hexdigest()
    told = [line for source in sources for line in promises(source)]
    name = hashlib.sha256(json.dumps([digest, told]).encode()).hexdigest() if told else digest
    index = _indexed(cache / f"index-{name[:16]}", sources, cache / "unpacked", progress)
    check_bad(index.skipped, len(index) + sum(index.skipped.values()), most_bad)
    if len(np.unique(index.lots)) < 2:
        unread = f" and skipped {counted(index.skipped)}" if index.skipped else ""
        got = f'{len(index)} pairs in "{text}"{unread}'
        remedy = ONE_TITLE if len(index) else NOTHING_THERE
        raise wrong("source", "hold at least two pairs that differ in their titles", got, remedy)
    aside = _held_out(index, held_out)
    settings = {"format": FORMAT, "index": digest, "held_out": held_out, "channels": channels}
    make = partial(_read_held_out, index, np.flatnonzero(aside), progress)
    pairs = cached_pairs(cache, "held-out", settings, shape=shape, make=make)
    check_bad(pairs.skipped, int(aside.sum()), most_bad, of=len(index))
    of_source = np.repeat(np.arange(len(sources)), index.parts)
    times = np.asarray(weights or [1] * len(sources))[of_source] * ~aside
    stream = Stream(index, np.repeat(np.arange(len(index)), times), shape=shape, most_bad=most_bad, digest=digest)
    skipped = Counter(index.skipped) + Counter(pairs.skipped)
    training = np.arange(len(pairs), len(pairs) + len(stream))
    return replace(pairs, splits={**pairs.splits, "train": training}, skipped=dict(skipped), stream=stream)


def _read_held_out(index: Index, rows: Indices, progress: ProgressFactory, writer: PictureWriter) -> Labels:
    """The pictures and titles of `rows`, decoded."""
    titles, skipped = [], Counter[str]()
    with progress(len(rows), "reading the held-out pictures", "pictures") as bar:
        for row in rows.tolist():
            try:
                writer.add(decode(BytesIO(index.picture(row)), writer.shape))
                titles.append(index.title(row))
            except Skipped as reason:
                skipped[str(reason)] += 1
            bar.update(1)
    return titles, joined_ids(titles), {"held_out": np.arange(len(titles))}, dict(skipped)


def _held_out(index: Index, share: float) -> npt.NDArray[np.bool_]:
    """The pairs whose titles drew the lowest lots: the share, but at most `MOST_HELD_OUT`, and never none or all."""
    drawn = np.unique(index.lots)
    most = np.sort(index.lots)[min(MOST_HELD_OUT, len(index) - 1)]
    bound = min(max(min(share, most), drawn[1]), drawn[-1])
    return index.lots < bound


def _indexed(folder: Path, sources: Sequence[Source], unpacked: Path, progress: ProgressFactory) -> Index:
    """The index from the cache, made first where it is not there or damaged; written beside its place and renamed."""
    if folder.exists() and not _is_whole(folder, unpacked):
        logger.warning("the cache %s is damaged and is made again", folder)
        shutil.rmtree(folder)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as beside:
            _write_index(Path(beside) / "index", sources, unpacked, progress)
            # another process may have been faster
            if not folder.exists():
                (Path(beside) / "index").rename(folder)
    told = json.loads((folder / TOLD).read_text(encoding="utf-8"))
    where, ends, lots, text = (np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in ARRAYS)
    return Index(told["files"], where, text, ends, lots, told["parts"], told["skipped"])


TOLD, ARRAYS = "index.json", ("where.npy", "ends.npy", "lots.npy", "titles.npy")


def _is_whole(folder: Path, unpacked: Path) -> bool:
    try:
        told = json.loads((folder / TOLD).read_text(encoding="utf-8"))
        # those that were unpacked into the cache may have been removed there, others are looked for elsewhere
        there = all(os.path.isfile(path) for path in told["files"] if Path(path).parent == unpacked)
        return there and all(checksum(folder / name) == told["sha256"][name] for name in ARRAYS)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_index(folder: Path, sources: Sequence[Source], unpacked: Path, progress: ProgressFactory) -> None:
    folder.mkdir()
    # arrays of plain numbers: millions of pairs as Python's own would not fit
    where, ends, lots, text, parts = array("q"), array("q"), array("d"), bytearray(), []
    files: dict[str, int] = {}
    skipped: Counter[str] = Counter()
    with progress(sum(len(source.paths) for source in sources), "reading the shards", "files") as bar:
        for source in sources:
            before = len(ends)
            for path in source.paths:
                for finding in find_pairs(replace(source, paths=(path,)), unpacked):
                    if isinstance(finding, str):
                        skipped[finding] += 1
                        continue
                    where.extend((files.setdefault(finding.path, len(files)), finding.offset, finding.size))
                    text += finding.title.encode()
                    ends.append(len(text))
                    lots.append(lot(finding.title))
                bar.update(1)
            parts.append(len(ends) - before)
    contents: list[npt.NDArray[Any]] = [
        np.frombuffer(where, np.int64).reshape(-1, 3),
        np.frombuffer(ends, np.int64),
        np.frombuffer(lots, np.float64),
        np.frombuffer(text, np.uint8),
    ]
    for name, content in zip(ARRAYS, contents, strict=True):
        np.save(folder / name, content)
    sums = {name: checksum(folder / name) for name in ARRAYS}
    told = {"files": list(files), "parts": parts, "skipped": skipped, "sha256": sums}
    (folder / TOLD).write_text(json.dumps(told), encoding="utf-8")
