"""Ground of this folder: array types, progress bars, splits by hash, ids shared by equal examples.

Every other file here may import it; it imports none of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Images = npt.NDArray[np.uint8]


class Progress(Protocol):
    """A progress bar."""

    def update(self, n: int) -> object:
        """Advance the bar by `n`."""


class ProgressFactory(Protocol):
    """Maker of bars: `with progress(total, "rendering", "pictures") as bar: ... bar.update(1)`."""

    def __call__(self, total: int, what: str, unit: str) -> AbstractContextManager[Progress]:
        """A bar for `total` things of the kind `unit`."""


class Silence:
    """A progress bar that shows nothing.

    >>> with silent(3, "rendering", "pictures") as bar:
    ...     bar.update(1)
    """

    def __enter__(self) -> Silence:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, n: int) -> None:
        """Show nothing."""


def silent(total: int, what: str, unit: str) -> Silence:  # noqa: ARG001
    """The factory of bars that show nothing."""
    return Silence()


def hash_fraction(text: str) -> float:
    """A number in [0, 1) that depends on the text alone: the same on every machine, in every set of examples.

    >>> hash_fraction("LATIN SMALL LETTER A") == hash_fraction("LATIN SMALL LETTER A")
    True
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def sorted_by_hash(groups: Iterable[tuple[str, Sequence[int]]]) -> list[tuple[float, Sequence[int]]]:
    """The rows of each group behind the hash fraction of its key, smallest fraction first."""
    return sorted((hash_fraction(key), rows) for key, rows in groups)


def hash_split(groups: Iterable[tuple[str, Sequence[int]]], share: float) -> dict[str, Indices]:
    """Rows of "train" and "held_out": groups of rows whose key has a hash fraction below `share` are held out.

    At least one group lies on either side. A group keeps its side when others are added.
    """
    ordered = sorted_by_hash(groups)
    below = sum(fraction < share for fraction, _ in ordered)
    count = min(max(below, 1), len(ordered) - 1)
    sides = {"train": ordered[count:], "held_out": ordered[:count]}
    return {name: sorted_rows([row for _, rows in side for row in rows]) for name, side in sides.items()}


def sorted_rows(rows: Sequence[int]) -> Indices:
    """Rows as a sorted array."""
    return np.sort(np.array(rows, dtype=np.int64))


def joined_ids(*keys: Sequence[Hashable]) -> Indices:
    """One id per row, so that rows that agree in any of their keys, directly or through other rows, share an id.

    `keys` are columns of equal length. Ids are numbered by first appearance.

    >>> joined_ids(["A", "A", "Alpha", "B"], ["image 1", "image 2", "image 2", "image 3"])
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


def groups_by_id(captions: Sequence[str], ids: Indices) -> list[tuple[str, list[int]]]:
    """Rows of each id, with the id's first caption in alphabetical order as the key of `hash_split`."""
    rows: dict[int, list[int]] = {}
    for row, identity in enumerate(ids.tolist()):
        rows.setdefault(identity, []).append(row)
    return [(min(captions[row] for row in members), members) for members in rows.values()]
