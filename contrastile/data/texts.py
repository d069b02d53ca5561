"""Queries and the passages that answer them: the form in which every source of texts hands over its data.

Stands between `files.py` and the sources of texts; `registry.py` opens a source by its name. Batches take rows of the
queries of a `TextSet`, and a retriever learns to find their positives among all passages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from contrastile.data.base import Indices
from contrastile.data.files import write_text

PASSAGES, QUERIES, SPLITS = FILES = ("passages.jsonl", "queries.jsonl", "splits.json")


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
    `scores`: rows of passages with a teacher's score.
    """

    id: str
    text: str
    positives: tuple[int, ...] = ()
    grades: tuple[int, ...] = ()
    negatives: tuple[int, ...] = ()
    answers: tuple[str, ...] = ()
    # left out of the digest, because it follows from the ids
    itself: int | None = field(default=None, repr=False)
    # left out too, because most trainings do not read them
    scores: tuple[tuple[int, float], ...] = field(default=(), repr=False)


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

    def scores_digest(self) -> str:
        """A checksum of the scores."""
        digest = hashlib.sha256()
        for query in self.queries:
            digest.update(repr([(row, score) for row, score in query.scores]).encode())
        return digest.hexdigest()


def text_digest(passage: Passage) -> bytes:
    """A digest of title and text, equal for equal passages."""
    return hashlib.sha256(f"{passage.title}\0{passage.text}".encode()).digest()[:12]


def write_texts(folder: Path, texts: TextSet) -> None:
    """Write `FILES` in `folder`, as lines of JSON without empty fields."""
    for name, items in ((PASSAGES, texts.passages), (QUERIES, texts.queries)):
        filled = ({key: value for key, value in asdict(item).items() if value not in ("", (), None)} for item in items)
        write_text(folder / name, "".join(json.dumps(fields) + "\n" for fields in filled))
    splits = {name: rows.tolist() for name, rows in texts.splits.items()}
    write_text(folder / SPLITS, json.dumps({"splits": splits, "skipped": texts.skipped}))


def read_texts(folder: Path) -> TextSet:
    """Read the files of `write_texts`."""
    header = json.loads((folder / SPLITS).read_text(encoding="utf-8"))
    return TextSet(
        passages=[Passage(**fields) for fields in _lines(folder / PASSAGES)],
        queries=[Query(**fields) for fields in _lines(folder / QUERIES)],
        splits={name: np.array(rows, dtype=np.int64) for name, rows in header["splits"].items()},
        skipped=header["skipped"],
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            fields = json.loads(line)
            yield {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
