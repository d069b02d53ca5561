"""Ground of this folder: array types, splits by hash, ids that equal examples share, skipped ones, order of training.

The only state of the order is the position, so a resumed run sees exactly the examples that it would have seen.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from contrastile._errors import invalid, logger

Indices = npt.NDArray[np.int64]
Images = npt.NDArray[np.uint8]
# channels, height and width of an image
Shape = tuple[int, int, int]
# maker of progress bars: `with progress(total, "rendering", "images") as bar: ... bar.update(1)`
ProgressFactory = Callable[[int, str, str], AbstractContextManager[Any]]

# with fewer held-out captions than this, images of the other captions are held out too
FEW_CAPTIONS = 20
# the fewest pairs that a share of bad ones is taken of, because one bad pair among the first ten proves little
SMALLEST_SAMPLE = 1000


@contextmanager
def silent(*_: object) -> Iterator[Any]:
    """A progress bar that shows nothing."""
    yield SimpleNamespace(update=lambda _: None)


def hash_fraction(text: str) -> float:
    """A number in [0, 1) that depends on the text alone, not on the machine or on the other examples."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def sorted_by_hash(groups: Iterable[tuple[str, Sequence[int]]]) -> list[tuple[float, Sequence[int]]]:
    """The rows of each group behind the hash fraction of its key, smallest fraction first."""
    return sorted((hash_fraction(key), rows) for key, rows in groups)


def hash_split(groups: Iterable[tuple[str, Sequence[int]]], share: float) -> dict[str, Indices]:
    """Rows of "train" and "held_out": groups of rows whose key has a hash fraction below `share` are held out.

    A group keeps its side when others are added. At least one group lies on either side.
    """
    ordered = sorted_by_hash(groups)
    below = sum(fraction < share for fraction, _ in ordered)
    count = min(max(below, 1), len(ordered) - 1)
    sides = {"train": ordered[count:], "held_out": ordered[:count]}
    return {name: sorted_rows([row for _, rows in side for row in rows]) for name, side in sides.items()}


def image_split(captions: Indices, keys: Sequence[str], share: float) -> Indices:
    """Rows of images to hold out, perhaps none. Their captions stay in training, each with its first image.

    captions: `[n]` ids of the training rows. keys: one for each image, equal for equal images.
    """
    first = np.unique(captions, return_index=True)[1]
    if len(captions) < 2 * len(first):
        return sorted_rows([])
    spared = {keys[row] for row in first}
    ordered = sorted((hash_fraction(key), row) for row, key in enumerate(keys) if key not in spared)
    return sorted_rows([row for number, (fraction, row) in enumerate(ordered) if fraction < share or number == 0])


def sorted_rows(rows: Sequence[int]) -> Indices:
    return np.sort(np.array(rows, dtype=np.int64))


def joined_ids(*keys: Sequence[Hashable]) -> Indices:
    """One id per row. Rows share an id if they agree in any of their keys, directly or through other rows.

    `keys` are columns of equal length. Ids are numbered by first appearance.

    >>> joined_ids(["A", "A", "Alpha", "B"], ["image 1", "image 2", "image 2", "image 3"])
    array([0, 0, 0, 1])
    """
    parent = list(range(len(keys[0])))

    def root(row: int) -> int:
        while (above := parent[row]) != row:
            parent[row] = row = parent[above]
        return row

    for column in keys:
        first: dict[Hashable, int] = {}
        for row, value in enumerate(column):
            parent[root(row)] = root(first.setdefault(value, row))
    number: dict[int, int] = {}
    return np.array([number.setdefault(root(row), len(number)) for row in range(len(parent))], dtype=np.int64)


def groups_by_id(captions: Sequence[str], ids: Indices) -> list[tuple[str, list[int]]]:
    """Rows of each id, with the id's first caption in alphabetical order as the key of `hash_split`."""
    rows = defaultdict[int, list[int]](list)
    for row, identity in enumerate(ids.tolist()):
        rows[identity].append(row)
    return [(min(captions[row] for row in members), members) for members in rows.values()]


class Skipped(Exception):  # noqa: N818 - no failure: the example is passed over
    """The reason why an example is passed over."""


def held_out(splits: Mapping[str, Indices]) -> dict[str, Indices]:
    """The rows of every split but the training's, where it has any."""
    return {name: rows for name, rows in splits.items() if name != "train" and len(rows)}


def counted(skipped: Mapping[str, int]) -> str:
    """Reasons with their counts, in alphabetical order.

    >>> counted({"missing picture": 2, "broken picture": 1})
    'broken picture: 1, missing picture: 2'
    """
    return ", ".join(f"{reason}: {count:,}" for reason, count in sorted(skipped.items()))


def percent(share: float) -> str:
    """A share of 1 as a percentage in three digits.

    >>> percent(0.01), percent(0.0004)
    ('1%', '0.04%')
    """
    return f"{100 * share:.3g}%"


def check_bad(
    skipped: Mapping[str, int], seen: int, most_bad: float, *, of: int | None = None, example: str = ""
) -> None:
    """Raise ValueError where more than the share `most_bad` of the pairs `seen` could not be used.

    Where these are a part of `of` pairs, the share is taken of at least `SMALLEST_SAMPLE`.
    """
    seen = seen if of is None else max(seen, min(of, SMALLEST_SAMPLE))
    if (bad := sum(skipped.values())) > most_bad * seen:
        got = f"{bad:,} of {seen:,} ({counted(skipped)}){example}"
        remedy = "Mend it, or raise data.max_bad_fraction."
        raise invalid("source", f"have at most {percent(most_bad)} bad pairs", got, remedy)


@dataclass
class SkipCounter:
    """Rows of text files: their number, and the skipped ones by reason; `advance` moves a bar by the bytes read."""

    advance: Callable[[int], object] = lambda _: None
    rows: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    _first: str = ""

    def skip(self, reason: object, location: str) -> None:
        """Count the row at `location`, a "file:line", as skipped."""
        self._first = self._first or location
        self.skipped[str(reason)] += 1

    def close(self, source: Path, limit: float, *, allowed_by: str = "data.bad_rows") -> dict[str, int]:
        """Log and return the counts; raise ValueError where they are more than the share `limit` of all rows."""
        count, reasons = self.skipped.total(), counted(self.skipped)
        if count > limit * self.rows:
            got = f"{count:,} of {self.rows:,} ({reasons}), the first at {self._first}"
            rule = f"have at most {percent(limit)} of rows that cannot be used"
            raise invalid("source", rule, got, f"Mend them, or raise {allowed_by}.")
        if count:
            message = "%s: %d of %d rows are skipped (%s), the first at %s"
            logger.warning(message, source, count, self.rows, reasons, self._first)
        return dict(self.skipped)


class Batches:
    """Rows of a pair set, shuffled anew for each epoch; a batch, int64 `[b]`, may extend into the next epoch.

    examples: the rows that come before the next batch.

    >>> whole, later = Batches(np.arange(5), seed=0), Batches(np.arange(5), seed=0, examples=2)
    >>> torch.equal(whole.take(6)[2:], later.take(4))
    True
    """

    def __init__(self, rows: Indices, *, seed: int, examples: int = 0) -> None:
        if len(rows) == 0:
            raise invalid("rows", "not be empty", "no rows", "Give the training split of a pair set.")
        self._rows, self._seed, self.examples = rows, seed, examples
        self._shuffled = (-1, rows)

    def take(self, count: int) -> Tensor:
        """The batch of the next `count` rows."""
        rows = self.ahead(count)
        self.examples += count
        return rows

    def ahead(self, count: int) -> Tensor:
        """The next `count` rows, which stay the next ones."""
        pieces, position, end = [], self.examples, self.examples + count
        while position < end:
            epoch, start = divmod(position, len(self._rows))
            if self._shuffled[0] != epoch:
                self._shuffled = epoch, np.random.default_rng((self._seed, epoch)).permutation(self._rows)
            pieces.append(self._shuffled[1][start : start + end - position])
            position += len(pieces[-1])
        return torch.from_numpy(np.concatenate(pieces))
