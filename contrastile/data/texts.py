"""Queries and the passages that answer them: the form in which every source of texts hands over its data.

A retriever learns to find the positives of queries among all passages. BM25, by the library bm25s, is its baseline, and
the source of its hard negatives: a wrong passage that shares words with its query costs no training.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from contrastile.data.base import Indices, ProgressFactory, silent
from contrastile.data.files import write_text

# runs of letters or digits, split at capitals, so that get_maxValue becomes get, max, value
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+|\d+|[^\W\d_]+")
# queries between two updates of the bar
CHUNK = 512
# candidates for each negative, because right passages among them are passed over
CANDIDATES = 4
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
    `itself`: the row of the question's own text among the passages. `scores`: rows of passages with a teacher's score.
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
    """Queries and their corpus, with splits, sorted rows of queries: "train" and the held-out parts by their names."""

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
        scores = "".join(repr([(row, score) for row, score in query.scores]) for query in self.queries)
        return hashlib.sha256(scores.encode()).hexdigest()


def text_digest(passage: Passage) -> bytes:
    """A digest of title and text, equal for equal passages."""
    return hashlib.sha256(f"{passage.title}\0{passage.text}".encode()).digest()[:12]


def write_texts(folder: Path, texts: TextSet) -> None:
    for name, items in ((PASSAGES, texts.passages), (QUERIES, texts.queries)):
        filled = ({key: value for key, value in asdict(item).items() if value not in ("", (), None)} for item in items)
        write_text(folder / name, "".join(json.dumps(fields) + "\n" for fields in filled))
    splits = {name: rows.tolist() for name, rows in texts.splits.items()}
    write_text(folder / SPLITS, json.dumps({"splits": splits, "skipped": texts.skipped}))


def read_texts(folder: Path) -> TextSet:
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


def words(text: str) -> list[str]:
    """The words of a text or of code, in lower case.

    >>> words("def get_maxValue(HTTPServer, x2):")
    ['def', 'get', 'max', 'value', 'http', 'server', 'x', '2']
    """
    return [word.lower() for word in WORD.findall(text)]


class BM25:
    """Robertson's weighting of the words of title and text in Lucene's form, k1 = 1.5 and b = 0.75, by bm25s."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        # bm25s imports jax where that is installed, which would take three quarters of a GPU's memory at its first call
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import bm25s

        self._engine = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
        self._engine.index([words(f"{passage.title} {passage.text}") for passage in passages], show_progress=False)
        self._count = len(passages)

    def search(
        self, queries: Sequence[str], k: int, *, progress: ProgressFactory = silent
    ) -> tuple[npt.NDArray[np.float32], Indices]:
        """The `k` best passages of each query: scores and rows, both `[N, min(k, passages)]`, best first."""
        k = min(k, self._count)
        scores = np.empty((len(queries), k), dtype=np.float32)
        rows = np.empty((len(queries), k), dtype=np.int64)
        with progress(len(queries), "looking up with BM25", "queries") as bar:
            for start in range(0, len(queries), CHUNK):
                chunk = [words(query) for query in queries[start : start + CHUNK]]
                results = self._engine.retrieve(chunk, k=k, show_progress=False, backend_selection="numpy")
                rows[start : start + CHUNK], scores[start : start + CHUNK] = results.documents, results.scores
                bar.update(len(chunk))
        return scores, rows


def with_mined_negatives(texts: TextSet, count: int, *, progress: ProgressFactory = silent) -> TextSet:
    """`texts` with up to `count` hard negatives for each training query that has none.

    Negatives are the first passages by BM25 that are neither the query itself nor have the text of a positive, and
    contain no answer. Positives of held-out queries are no candidates, so that training never shows them.
    """
    train = [row for row in texts.splits["train"].tolist() if not texts.queries[row].negatives]
    held_out = (row for name, rows in texts.splits.items() if name != "train" for row in rows.tolist())
    unseen = {passage for row in held_out for passage in texts.queries[row].positives}
    candidates = [row for row in range(len(texts.passages)) if row not in unseen]
    if not count or not train or not candidates:
        return texts
    engine = BM25([texts.passages[row] for row in candidates])
    _, ranked = engine.search([texts.queries[row].text for row in train], CANDIDATES * count, progress=progress)
    queries = list(texts.queries)
    for row, ranks in zip(train, ranked.tolist(), strict=True):
        negatives = _negatives(queries[row], (candidates[rank] for rank in ranks), texts.passages)
        queries[row] = replace(queries[row], negatives=tuple(islice(negatives, count)))
    return replace(texts, queries=queries)


def _negatives(query: Query, ranked: Iterable[int], passages: Sequence[Passage]) -> Iterable[int]:
    right = {passages[row].text for row in query.positives}
    # an empty answer would be in every passage
    answers = [answer.lower() for answer in query.answers if answer.strip()]
    for row in ranked:
        text = passages[row].text
        if row != query.itself and text not in right and not any(answer in text.lower() for answer in answers):
            yield row
