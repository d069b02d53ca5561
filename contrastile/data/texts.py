"""Questions and the passages that answer them: the shape in which every source of texts hands over its data.

The first box of the flow for retrieval, beside `pairs.py`: a source (the built-in docstrings, one's own files) becomes
a `TextSet`; batches take rows of its queries, and a retriever learns to find their positives among all passages.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from contrastile._check import wrong
from contrastile.data.cache import write_text
from contrastile.data.pairs import Indices, ProgressFactory, lot, silent

logger = logging.getLogger("contrastile")

PASSAGES, QUERIES, SPLITS = "passages.jsonl", "queries.jsonl", "splits.json"
FILES = (PASSAGES, QUERIES, SPLITS)


@dataclass(frozen=True, slots=True)
class Passage:
    """A text that can be found. `source` says where it stands, as "file:line"."""

    id: str
    text: str
    title: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Query:
    """A question. `positives`, `negatives`: rows of passages that are right, and that only look so.

    `grades`: how right each positive is; 1 each where empty. `answers`: texts that a right passage contains. `itself`:
    the row of the question's own text among the passages, which is no result of it and no negative.
    """

    id: str
    text: str
    positives: tuple[int, ...] = ()
    grades: tuple[int, ...] = ()
    negatives: tuple[int, ...] = ()
    answers: tuple[str, ...] = ()
    # follows from the ids, which a digest knows
    itself: int | None = field(default=None, repr=False)


@dataclass(frozen=True)
class TextSet:
    """Queries and their corpus.

    splits: sorted rows of queries; "train" always, the held-out parts by their names.
    skipped: how many rows of the source could not be used, by reason.
    """

    passages: list[Passage]
    queries: list[Query]
    splits: dict[str, Indices]
    skipped: dict[str, int] = field(default_factory=dict)

    def digest(self) -> str:
        """A number for exactly these texts, splits and negatives: two machines with the same one did the same task."""
        known = hashlib.sha256()
        # where a passage stands is another path on every machine
        for thing in (*(replace(passage, source="") for passage in self.passages), *self.queries):
            known.update(repr(thing).encode())
        for name, rows in sorted(self.splits.items()):
            known.update(name.encode() + rows.tobytes())
        return known.hexdigest()


def open_texts(
    source: str,
    *,
    cache: Path,
    corpus: str | None = None,
    test: str | None = None,
    packages: Sequence[str] = (),
    held_out: float = 0.05,
    mined: int = 0,
    bad_rows: float = 0.01,
    progress: ProgressFactory | None = None,
) -> TextSet:
    """The texts of `source`: "docstrings", a folder in BEIR's format, or a file of questions with their passages.

    "docstrings" are the functions of Python's library and of the installed `packages`. Of a file, `corpus` has further
    passages, and `test` is a second file, whose questions are the held-out part; else `held_out`, a share of the
    questions, is. `mined`: so many hard negatives of each training query are looked up with BM25 where the source has
    none. A source may have `bad_rows`, a share of them, that cannot be used; they are counted in `skipped`. What is
    made of "docstrings" is kept in a folder under `cache`.

    Raises ValueError for a share that makes no sense, for `corpus` or `test` where they have no place, for a source
    that cannot be read or has no questions, and for more bad rows than allowed.
    """
    from contrastile.data.bm25 import with_mined_negatives
    from contrastile.data.docstrings import open_docstrings
    from contrastile.data.text_files import open_text_files

    if not 0 < held_out < 1:
        raise wrong("held_out", "be a share between 0 and 1", held_out, "0.05 keeps a twentieth for evaluation.")
    shown = progress or silent
    for name, path in (("corpus", corpus), ("test", test)):
        if path is not None and (source == "docstrings" or Path(source).expanduser().is_dir()):
            remedy = "These come with their own passages and held-out questions."
            raise wrong(name, f'be left out with the source "{source}"', f'"{path}"', remedy)
    if source == "docstrings":
        return open_docstrings(packages=packages, held_out=held_out, mined=mined, cache=cache, progress=shown)
    given, tests = (Path(path).expanduser() if path else None for path in (corpus, test))
    if tests is not None and tests.is_dir():
        raise wrong("test", "be a file of questions", f'the folder "{test}"', "A BEIR folder is a source of its own.")
    texts = open_text_files(
        Path(source).expanduser(), corpus=given, test=tests, held_out=held_out, bad_rows=bad_rows, progress=shown
    )
    return with_mined_negatives(texts, mined, progress=shown) if mined else texts


class Gathering:
    """Passages and queries as they come in: the same text, or id, becomes one passage, the same question one query."""

    def __init__(self) -> None:
        self.passages: list[Passage] = []
        self.queries: list[Query] = []
        self._passage_rows: dict[bytes, int] = {}
        self._id_rows: dict[str, int] = {}
        self._query_rows: dict[str, int] = {}
        # texts that came under an id which another text has, and where the first of them stands
        self._others, self._first = 0, ""

    def add(self, passage: Passage) -> int:
        """The row of the passage with this title and text, or id; without an id it is called by its hash."""
        digest = text_digest(passage)
        if digest not in self._passage_rows:
            row = self._id_rows.get(passage.id, len(self.passages))
            if row < len(self.passages):
                self._others, self._first = self._others + 1, self._first or passage.source
            else:
                self.passages.append(passage if passage.id else replace(passage, id=digest.hex()))
            self._passage_rows[digest] = row
        row = self._passage_rows[digest]
        if passage.id:
            self._id_rows.setdefault(passage.id, row)
        return row

    def called(self, identity: str) -> int | None:
        """The row of the passage with this id."""
        return self._id_rows.get(identity)

    def close(self, source: Path) -> None:
        """Says of how many ids the first text was taken; an error where they cannot be ids at all."""
        ids = len(self._id_rows)
        if self._others > ids:
            got = f"{ids:,} ids for {ids + self._others:,} texts, another text the first time at {self._first}"
            remedy = "Leave out ids that count within a question."
            raise wrong("source", f"have ids that are one passage each ({source})", got, remedy)
        if self._others:
            said = "%s: texts whose id another one has: %d, the first at %s; they are one passage, with the first text"
            logger.warning(said, source, self._others, self._first)

    def query(self, query: Query) -> int:
        """The row of the query with this text; what is known of it already is joined with what comes."""
        row = self._query_rows.setdefault(query.text, len(self.queries))
        if row == len(self.queries):
            self.queries.append(query if query.id else replace(query, id=f"q{row}"))
        else:
            self.queries[row] = _joined(self.queries[row], query)
        return row


def text_digest(passage: Passage) -> bytes:
    """What two passages have in common when they say the same."""
    return hashlib.sha256(f"{passage.title}\0{passage.text}".encode()).digest()[:12]


def _joined(first: Query, second: Query) -> Query:
    """Both queries' knowledge; what one calls right is no negative of the other's."""
    grades = dict(zip(first.positives, first.grades or (1,) * len(first.positives), strict=True))
    for row, grade in zip(second.positives, second.grades or (1,) * len(second.positives), strict=True):
        grades[row] = max(grade, grades.get(row, 0))
    negatives = dict.fromkeys(row for row in (*first.negatives, *second.negatives) if row not in grades)
    answers = dict.fromkeys((*first.answers, *second.answers))
    graded = tuple(grades.values()) if set(grades.values()) != {1} else ()
    return replace(first, positives=tuple(grades), grades=graded, negatives=tuple(negatives), answers=tuple(answers))


def split_by_lot(queries: Sequence[Query], share: float) -> dict[str, Indices]:
    """Rows of "train" and "held_out", drawn by the queries' own texts; at least one on either side."""
    order = sorted(range(len(queries)), key=lambda row: lot(queries[row].text))
    below = sum(lot(query.text) < share for query in queries)
    count = min(max(below, 1), len(queries) - 1)
    return {"train": sorted_rows(order[count:]), "held_out": sorted_rows(order[:count])}


def sorted_rows(rows: Sequence[int]) -> Indices:
    """Rows as an array, in order."""
    return np.sort(np.array(rows, dtype=np.int64))


def write_texts(folder: Path, texts: TextSet) -> None:
    """`FILES` in `folder`, lines of JSON that people can read too."""
    for name, things in ((PASSAGES, texts.passages), (QUERIES, texts.queries)):
        write_text(folder / name, "".join(json.dumps(_filled(asdict(thing))) + "\n" for thing in things))
    splits = {name: rows.tolist() for name, rows in texts.splits.items()}
    write_text(folder / SPLITS, json.dumps({"splits": splits, "skipped": texts.skipped}))


def _filled(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if value not in ("", (), None)}


def read_texts(folder: Path) -> TextSet:
    """What `write_texts` wrote."""
    kept = json.loads((folder / SPLITS).read_text(encoding="utf-8"))
    return TextSet(
        passages=[Passage(**line) for line in _lines(folder / PASSAGES)],
        queries=[_query(line) for line in _lines(folder / QUERIES)],
        splits={name: np.array(rows, dtype=np.int64) for name, rows in kept["splits"].items()},
        skipped=kept["skipped"],
    )


def _query(line: Mapping[str, Any]) -> Query:
    entries: dict[str, Any] = {name: tuple(entry) if isinstance(entry, list) else entry for name, entry in line.items()}
    return Query(**entries)


def _lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
