"""Pairs of a picture and its title: the shape in which every source hands its data to training and evaluation.

The first box of the flow: a source (the built-in glyphs, one's own table) becomes a `PairSet`; `batches` takes indices
from it, `augment` turns its bytes into what the towers see.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from contrastile._check import wrong
from contrastile.data.sources import is_collection

if TYPE_CHECKING:
    from contrastile.data.collection import Stream

Indices = npt.NDArray[np.int64]
Pictures = npt.NDArray[np.uint8]


class Progress(Protocol):
    """A bar that moves."""

    def update(self, n: int) -> object:
        """`n` more are done."""


class ProgressFactory(Protocol):
    """Makes a bar: `with progress(total, "rendering", "pictures") as bar: ... bar.update(1)`."""

    def __call__(self, total: int, what: str, unit: str) -> AbstractContextManager[Progress]:
        """A bar for `total` things of the kind `unit`."""


class Silence:
    """The progress that shows nothing.

    >>> with silent(3, "rendering", "pictures") as bar:
    ...     bar.update(1)
    """

    def __enter__(self) -> Silence:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, n: int) -> None:
        """Nothing to show."""


def silent(total: int, what: str, unit: str) -> Silence:  # noqa: ARG001
    """Where nobody watches."""
    return Silence()


@dataclass(frozen=True)
class PairSet:
    """Pictures with their titles.

    images: `[n, C, S, S]` uint8, memory-mapped and read-only; glyphs are bright ink on a dark ground.
    titles: `n` texts.
    ids: `[n]`; pairs with equal ids could each be the other's right answer, so they are not each other's negatives.
    splits: sorted indices; "train" always, the held-out parts by their names.
    skipped: how many rows of the source gave no pair, by reason.
    stream: of a collection, the pairs to train on, too many for all this: rows from `n` on, read when they are needed.
    """

    images: Pictures
    titles: list[str]
    ids: Indices
    splits: dict[str, Indices]
    skipped: dict[str, int]
    stream: Stream | None = None

    def __len__(self) -> int:
        return len(self.titles)


def open_pairs(
    source: str,
    *,
    image_size: int,
    cache: Path,
    channels: int = 1,
    held_out: float = 0.05,
    weights: Sequence[int] = (),
    most_bad: float = 1.0,
    copies: int = 1,
    seed: int = 0,
    progress: ProgressFactory | None = None,
) -> PairSet:
    """The pairs of `source`: "glyphs", the path of a table (.tsv, .csv) with the columns `filepath` and `title`, or a
    collection: tar shards, parquet files, several tables, folders of pictures, as `sources.py` reads them.

    The pictures are made once, `image_size` pixels square, with 1 channel (grey) or 3 (colour), and kept in a folder
    under `cache`; of a collection only those that are held out, the others are read when they are needed. `held_out` is
    the share kept from training: of the names (glyphs), of the pairs (a table, a collection). `most_bad`: the share of
    pairs that may be unusable. `weights`: a collection's, see `collection.py`. `copies` of each pair of the others, if
    more than one: from shards in the order of `seed`, see `copies.py`.

    Raises ValueError for a size, a number of channels or a share that makes no sense, for a table without pairs, and
    for more bad pairs than `most_bad`.
    """
    from contrastile.data.collection import open_collection
    from contrastile.data.copies import with_copies
    from contrastile.data.glyphs import open_glyphs
    from contrastile.data.table import open_table

    if image_size < 8:
        raise wrong("image_size", "be at least 8 pixels", image_size, "Glyphs are legible from 32 on.")
    if channels not in (1, 3):
        raise wrong("channels", "be 1 (grey) or 3 (colour)", channels, "Pictures are converted to either.")
    if not 0 < held_out < 1:
        raise wrong("held_out", "be a share between 0 and 1", held_out, "0.05 keeps a twentieth for evaluation.")
    opened: Callable[..., PairSet] = open_glyphs
    if source != "glyphs":
        opened = partial(open_table, Path(source), most_bad=most_bad)
    if is_collection(source):
        opened = partial(open_collection, source, weights=weights, most_bad=most_bad)
    size = {"image_size": image_size, "channels": channels}
    pairs = opened(**size, held_out=held_out, cache=cache, progress=progress or silent)
    return pairs if copies == 1 else with_copies(pairs, copies, seed=seed, cache=cache)


def joined_ids(*keys: Sequence[Hashable]) -> Indices:
    """One id per row, so that rows that agree in any of their keys, directly or through other rows, share an id.

    `keys` are columns of equal length. Ids are numbered by first appearance.

    >>> joined_ids(["A", "A", "Alpha", "B"], ["picture 1", "picture 2", "picture 2", "picture 3"])
    array([0, 0, 0, 1])
    """
    parent: dict[tuple[int, Hashable], tuple[int, Hashable]] = {}

    def root(node: tuple[int, Hashable]) -> tuple[int, Hashable]:
        while (above := parent.setdefault(node, node)) != node:
            parent[node] = node = parent[above]
        return node

    rows = list(zip(*keys, strict=True))
    for row in rows:
        first = root((0, row[0]))
        for column, value in enumerate(row[1:], start=1):
            parent[root((column, value))] = first
    number: dict[tuple[int, Hashable], int] = {}
    return np.array([number.setdefault(root((0, row[0])), len(number)) for row in rows], dtype=np.int64)


def lot(text: str) -> float:
    """A number in [0, 1) drawn by the text itself: the same on every machine, whatever else is in the set.

    >>> lot("LATIN SMALL LETTER A") == lot("LATIN SMALL LETTER A")
    True
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def groups_by_lot(titles: Sequence[str], ids: Indices) -> list[tuple[float, list[int]]]:
    """The rows of each id, ordered by the lot of the id's first title in alphabetical order."""
    rows: dict[int, list[int]] = {}
    for row, identity in enumerate(ids.tolist()):
        rows.setdefault(identity, []).append(row)
    drawn = [(lot(min(titles[row] for row in members)), members) for members in rows.values()]
    return sorted(drawn)


# what belongs beside the pictures of a source: titles, ids, splits, and the counts of what was skipped
Labels = tuple[list[str], Indices, dict[str, Indices], dict[str, int]]
