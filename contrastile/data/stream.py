"""The stream of a collection's training pairs: images are read and decoded by row, the next batch ahead of its use.

Stands between `loader.py`, which decodes, and the sources that are too large to lie decoded (`collection.py`,
`copies.py`). Seed and example number alone decide what is read, so that a run resumes in the middle of an epoch at no
cost.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile.data.base import Indices, check_bad, counted
from contrastile.data.images import Crop
from contrastile.data.loader import ImageLoader, Key, Origin, Reasons, cores

logger = logging.getLogger("contrastile")

# rows that are tried in the place of each row of a batch without a single readable image
TRIES = 10


class Library(Protocol):
    """Images with their captions, by row."""

    @property
    def in_processes(self) -> bool:
        """True where every origin is a `Piece`, which other processes can read."""

    def origin(self, row: int, example: int) -> Origin:
        """The origin of a row's image, for this example of the run."""

    def caption(self, row: int) -> str:
        """The caption of a row."""

    def identity(self, caption: str) -> int:
        """An id that captions share which could be each other's right answer."""

    def describe(self, row: int) -> str:
        """The file and the caption of a row, for a log line."""


class Stream:
    """Training pairs of a library, by row: row i of the stream is row `rows[i]` of the library.

    The same pairs come `copies` times. `augmented`: the library's images are augmented already.

    An image that cannot be read is counted by reason in `skipped`; the pair before it in the batch, or in this rank's
    share, replaces it: their ids are equal, so it is no negative. `check` refuses more than the share `most_bad`.
    `workers` decode: processes where `apart` is set, which leave this process free to keep a GPU busy, else threads.
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
        augmented: bool = False,
    ) -> None:
        self._library, self._rows, self._shape, self._most_bad = library, rows, shape, most_bad
        self.digest, self._copies, self.augmented = digest, copies, augmented
        self.skipped: Counter[str] = Counter()
        self.seen = 0
        self.workers, self.apart = cores(), False
        self._loader: ImageLoader | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def captions(self, rows: Iterable[int]) -> list[str]:
        """The captions of `rows`."""
        return [self._library.caption(self._rows[row]) for row in rows]

    def sample_captions(self, most: int) -> list[str]:
        """Captions to train a tokenizer on: those of one copy of the pairs, at most `most`, evenly spread."""
        count = len(self) // self._copies
        return self.captions(range(0, count, -(-count // most)))

    def identities(self, captions: Iterable[str]) -> list[int]:
        """The ids of captions: equal for captions that could be each other's right answer."""
        return [self._library.identity(caption) for caption in captions]

    def expect(self, rows: Sequence[int], examples: Sequence[int], crop: Crop | None) -> None:
        """Begin to decode the images that the next `read` will ask for. A batch expected before is given up."""
        if self._loader is None:
            apart = self.apart and self._library.in_processes
            self._loader = ImageLoader(self._library.origin, self._shape, self.workers, apart=apart)
        self._loader.begin(self._keys(rows, examples, crop))

    def read(
        self, rows: Sequence[int], examples: Sequence[int], crop: Crop | None, *, tries: int = TRIES
    ) -> tuple[Tensor, list[int]]:
        """Images `[b, C, S, S]` uint8 of `rows`, and the rows they are of where one replaces another.

        `examples`: their numbers among the run's examples. The tensor is the caller's own.
        """
        if not rows:
            return torch.empty((0, *self._shape), dtype=torch.uint8), []
        images, reasons = self._decode(rows, examples, crop)
        self._count(reasons, rows)
        good = [number for number, reason in enumerate(reasons) if reason is None]
        if not good and tries:
            # the following rows replace a share without a readable image, so that a resumed run does the same
            return self.read([(row + 1) % len(self) for row in rows], examples, crop, tries=tries - 1)
        if not good:
            raise invalid("source", "have pictures that can be read", counted(self.skipped), "Look at the shards.")
        chosen, last = list(rows), good[0]
        # a bad image is replaced by the last good one before it, or by the first good one
        for number, reason in enumerate(reasons):
            if reason is None:
                last = number
            else:
                images[number], chosen[number] = images[last], rows[last]
        return images, chosen

    def look(self, rows: Sequence[int], following: Sequence[int]) -> tuple[Tensor, Reasons]:
        """Whole images of `rows`, and the reasons why some have none; the `following` are decoded meanwhile.

        Nothing is replaced or counted.
        """
        decoded = self._decode(rows, rows, None)
        if following:
            self.expect(following, following, None)
        return decoded

    @property
    def fingerprint(self) -> str:
        """A digest of the images, their order and their size."""
        text = f"{self.digest} {self._shape} {hashlib.sha256(self._rows.tobytes()).hexdigest()}"
        return hashlib.sha256(text.encode()).hexdigest()

    def close(self) -> None:
        """Stop decoding. More may be read afterwards."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def check(self, skipped: Mapping[str, int], seen: int) -> None:
        """Raise ValueError where too many of the pairs `seen`, of all ranks, could not be used."""
        check_bad(skipped, seen, self._most_bad, of=len(self))

    def _keys(self, rows: Sequence[int], examples: Sequence[int], crop: Crop | None) -> list[Key]:
        return [(int(self._rows[row]), example, crop) for row, example in zip(rows, examples, strict=True)]

    def _decode(self, rows: Sequence[int], examples: Sequence[int], crop: Crop | None) -> tuple[Tensor, Reasons]:
        """The images of `rows`, read now unless they begin the batch that was expected, and why some are missing."""
        keys = self._keys(rows, examples, crop)
        if self._loader is None or self._loader.keys[: len(keys)] != keys:
            self.expect(rows, examples, crop)
        assert self._loader is not None
        images, reasons = self._loader.finish()
        return images[: len(keys)], reasons[: len(keys)]

    def _count(self, reasons: Reasons, rows: Sequence[int]) -> None:
        bad = [(reason, row) for reason, row in zip(reasons, rows, strict=True) if reason is not None]
        if bad and not self.skipped:
            reason, row = bad[0]
            message = "a picture of the collection is skipped (%s: %s); all are counted in the report"
            logger.warning(message, reason, self._library.describe(int(self._rows[row])))
        self.seen += len(reasons)
        self.skipped.update(reason for reason, _ in bad)
