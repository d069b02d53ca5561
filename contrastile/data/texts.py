"""Queries and the passages that answer them: the form in which every source of texts hands over its data.

Stands between `base.py` and the sources of texts; `registry.py` opens a source by its name. Batches take rows of the
queries of a `TextSet`, and a retriever learns to find their positives among all passages.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from contrastile._errors import invalid
from contrastile.data.base import Indices, ProgressFactory, silent
from contrastile.data.files import write_text

logger = logging.getLogger("contrastile")

PASSAGES, QUERIES, SPLITS = "passages.jsonl", "queries.jsonl", "splits.json"
FILES = (PASSAGES, QUERIES, SPLITS)


@dataclass(frozen=True, slots=True)
class Passage:
    """A text of the corpus. `source`: its place, as "file:line"."""

    id: str
    text: str
    title: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Query:
    """A question. `positives`, `negatives`: rows of right passages, and of wrong ones that look right.

    `grades`: the relevance of each positive; 1 each where empty. `answers`: texts that a right passage contains.
    `itself`: the row of the question's own text among the passages, which is no result of it and no negative.
    """

    id: str
    text: str
    positives: tuple[int, ...] = ()
    grades: tuple[int, ...] = ()
    negatives: tuple[int, ...] = ()
    answers: tuple[str, ...] = ()
    # left out of the digest, because it follows from the ids
    itself: int | None = field(default=None, repr=False)


@dataclass(frozen=True)
class TextSet:
    """Queries and their corpus.

    splits: sorted rows of queries; "train" always, the held-out parts by their names.
    skipped: the number of the source's rows that could not be used, by reason.
    """

    passages: list[Passage]
    queries: list[Query]
    splits: dict[str, Indices]
    skipped: dict[str, int] = field(default_factory=dict)

    def digest(self) -> str:
        """A checksum of texts, splits and negatives: equal on two machines that train on the same task."""
        digest = hashlib.sha256()
        # the path of a passage differs on every machine
        for item in (*(replace(passage, source="") for passage in self.passages), *self.queries):
            digest.update(repr(item).encode())
        for name, rows in sorted(self.splits.items()):
            digest.update(name.encode() + rows.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class TextOptions:
    """The options of `open_texts` that a source may need; see there."""

    cache: Path
    mine: Callable[[TextSet], TextSet]
    corpus: Path | None = None
    test: Path | None = None
    packages: Sequence[str] = ()
    held_out: float = 0.05
    mined: int = 0
    bad_rows: float = 0.01
    progress: ProgressFactory = silent

    def with_negatives(self, texts: TextSet) -> TextSet:
        """The texts with mined negatives, if any are wanted."""
        return self.mine(texts) if self.mined else texts


class TextSetBuilder:
    """Collects passages and queries: equal texts, or ids, become one passage, equal questions one query."""

    def __init__(self) -> None:
        self.passages: list[Passage] = []
        self.queries: list[Query] = []
        self._passage_rows: dict[bytes, int] = {}
        self._id_rows: dict[str, int] = {}
        self._query_rows: dict[str, int] = {}
        # the number of texts with the id of another text, and the place of the first of them
        self._clashes, self._first = 0, ""

    def add_passage(self, passage: Passage) -> int:
        """The row of the passage with this title and text, or id; without an id, its hash becomes its id."""
        digest = text_digest(passage)
        if digest not in self._passage_rows:
            row = self._id_rows.get(passage.id, len(self.passages))
            if row < len(self.passages):
                self._clashes, self._first = self._clashes + 1, self._first or passage.source
            else:
                self.passages.append(passage if passage.id else replace(passage, id=digest.hex()))
            self._passage_rows[digest] = row
        row = self._passage_rows[digest]
        if passage.id:
            self._id_rows.setdefault(passage.id, row)
        return row

    def row_of_id(self, identity: str) -> int | None:
        """The row of the passage with this id."""
        return self._id_rows.get(identity)

    def close(self, source: Path) -> None:
        """Log the number of ids with several texts; raise ValueError where they are too many to be ids."""
        ids = len(self._id_rows)
        if self._clashes > ids:
            got = f"{ids:,} ids for {ids + self._clashes:,} texts, another text the first time at {self._first}"
            remedy = "Leave out ids that count within a question."
            raise invalid("source", f"have ids that are one passage each ({source})", got, remedy)
        if self._clashes:
            message = (
                "%s: texts whose id another one has: %d, the first at %s; they are one passage, with the first text"
            )
            logger.warning(message, source, self._clashes, self._first)

    def add_query(self, query: Query) -> int:
        """The row of the query with this text; positives and negatives are merged with those known already."""
        row = self._query_rows.setdefault(query.text, len(self.queries))
        if row == len(self.queries):
            self.queries.append(query if query.id else replace(query, id=f"q{row}"))
        else:
            self.queries[row] = _merged(self.queries[row], query)
        return row


def text_digest(passage: Passage) -> bytes:
    """A digest of title and text, equal for equal passages."""
    return hashlib.sha256(f"{passage.title}\0{passage.text}".encode()).digest()[:12]


def _merged(first: Query, second: Query) -> Query:
    """The positives and negatives of both; a positive of one is no negative of the other."""
    grades = dict(zip(first.positives, first.grades or (1,) * len(first.positives), strict=True))
    for row, grade in zip(second.positives, second.grades or (1,) * len(second.positives), strict=True):
        grades[row] = max(grade, grades.get(row, 0))
    negatives = dict.fromkeys(row for row in (*first.negatives, *second.negatives) if row not in grades)
    answers = dict.fromkeys((*first.answers, *second.answers))
    graded = tuple(grades.values()) if set(grades.values()) != {1} else ()
    return replace(first, positives=tuple(grades), grades=graded, negatives=tuple(negatives), answers=tuple(answers))


def write_texts(folder: Path, texts: TextSet) -> None:
    """Write `FILES` in `folder`, as lines of JSON."""
    for name, items in ((PASSAGES, texts.passages), (QUERIES, texts.queries)):
        write_text(folder / name, "".join(json.dumps(_filled(asdict(item))) + "\n" for item in items))
    splits = {name: rows.tolist() for name, rows in texts.splits.items()}
    write_text(folder / SPLITS, json.dumps({"splits": splits, "skipped": texts.skipped}))


def _filled(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if value not in ("", (), None)}


def read_texts(folder: Path) -> TextSet:
    """Read the files of `write_texts`."""
    header = json.loads((folder / SPLITS).read_text(encoding="utf-8"))
    return TextSet(
        passages=[Passage(**line) for line in _lines(folder / PASSAGES)],
        queries=[_query(line) for line in _lines(folder / QUERIES)],
        splits={name: np.array(rows, dtype=np.int64) for name, rows in header["splits"].items()},
        skipped=header["skipped"],
    )


def _query(line: Mapping[str, Any]) -> Query:
    entries: dict[str, Any] = {name: tuple(entry) if isinstance(entry, list) else entry for name, entry in line.items()}
    return Query(**entries)


def _lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
