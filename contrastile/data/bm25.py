"""BM25 over the passages, with the library bm25s: the baseline of a retriever, and the source of its hard negatives.

Stands between `texts.py` and the registry. A wrong passage that shares words with its query is the hardest negative
that costs no training.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from contrastile.data.base import Indices, ProgressFactory, silent
from contrastile.data.texts import Passage, Query, TextSet

# runs of letters or digits, split at capitals, so that get_maxValue becomes get, max, value
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+|\d+|[^\W\d_]+")

# queries between two updates of the bar
CHUNK = 512
# candidates for each negative wanted, because right ones are passed over
CANDIDATES = 4


def words(text: str) -> list[str]:
    """The words of a text or of code, in lower case.

    >>> words("def get_maxValue(HTTPServer, x2):")
    ['def', 'get', 'max', 'value', 'http', 'server', 'x', '2']
    """
    return [word.lower() for word in WORD.findall(text)]


class BM25:
    """Robertson's weighting of words in Lucene's form, with the usual k1 = 1.5 and b = 0.75. Needs bm25s.

    The words of a passage are those of its title and its text.
    """

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

    Negatives are the first passages by BM25 that are no positive, have not the text of one, are not the query itself
    and contain no answer. Positives of held-out queries are no candidates, so that training never shows them.
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
    answers = [answer.lower() for answer in query.answers]
    for row in ranked:
        text = passages[row].text
        if row != query.itself and text not in right and not any(answer in text.lower() for answer in answers):
            yield row
