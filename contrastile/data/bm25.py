"""BM25 over the passages, with the library bm25s: the baseline that a retriever has to beat, and its hard negatives.

Beside the flow's first box. What looks right by its words and is not is the hardest negative that costs nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import cast

import numpy as np
import numpy.typing as npt

from contrastile.data.pairs import Indices, ProgressFactory, silent
from contrastile.data.texts import Passage, Query, TextSet

# letters and digits, or capitals that begin a word: so names in code come apart, get_maxValue into get, max, value
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+|\d+|[^\W\d_]+")

# queries looked up between two moves of the bar
STRETCH = 512
# how many candidates are looked at for each negative wanted, because right ones are passed over
CANDIDATES = 4


def words(text: str) -> list[str]:
    """The words of a text or of code, in small letters.

    >>> words("def get_maxValue(HTTPServer, x2):")
    ['def', 'get', 'max', 'value', 'http', 'server', 'x', '2']
    """
    return [word.lower() for word in WORD.findall(text)]


class BM25:
    """Robertson's weighting of words in Lucene's form, with the usual k1 = 1.5 and b = 0.75. Needs bm25s.

    A passage is found by the words of its title and its text.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._engine = _library().BM25(method="lucene", k1=1.5, b=0.75)
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
            for start in range(0, len(queries), STRETCH):
                asked = [words(query) for query in queries[start : start + STRETCH]]
                found = self._engine.retrieve(asked, k=k, show_progress=False, backend_selection="numpy")
                rows[start : start + STRETCH], scores[start : start + STRETCH] = found.documents, found.scores
                bar.update(len(asked))
        return scores, rows


def _library() -> ModuleType:
    """bm25s without JAX, which it would start to sort with, and which then takes three quarters of a GPU's memory."""
    found, theirs = "jax" in sys.modules, sys.modules.get("jax")
    # what an import finds here in place of a module it takes as missing
    sys.modules["jax"] = cast(ModuleType, None)
    try:
        import bm25s
    finally:
        del sys.modules["jax"]
        if found:
            sys.modules["jax"] = cast(ModuleType, theirs)
    return bm25s


def with_mined_negatives(texts: TextSet, count: int, *, progress: ProgressFactory = silent) -> TextSet:
    """`texts` with up to `count` hard negatives for each training query that has none.

    They are the passages that BM25 ranks first and that are neither positives, nor the same text as one, nor the query
    itself, nor contain an answer. Only passages that training shows anyway are candidates: those of held-out queries
    stay unseen.
    """
    train = [row for row in texts.splits["train"].tolist() if not texts.queries[row].negatives]
    unseen = {
        passage
        for name, rows in texts.splits.items()
        if name != "train"
        for row in rows.tolist()
        for passage in texts.queries[row].positives
    }
    candidates = [row for row in range(len(texts.passages)) if row not in unseen]
    if not train or not candidates:
        return texts
    engine = BM25([texts.passages[row] for row in candidates])
    _, found = engine.search([texts.queries[row].text for row in train], CANDIDATES * count, progress=progress)
    queries = list(texts.queries)
    for row, ranked in zip(train, found.tolist(), strict=True):
        looked_up = (candidates[place] for place in ranked)
        queries[row] = replace(queries[row], negatives=_wrong_ones(queries[row], looked_up, texts.passages, count))
    return replace(texts, queries=queries)


def _wrong_ones(query: Query, ranked: Iterable[int], passages: Sequence[Passage], count: int) -> tuple[int, ...]:
    right = {passages[row].text for row in query.positives}
    answers = [answer.lower() for answer in query.answers]
    chosen: list[int] = []
    for row in ranked:
        text = passages[row].text
        if row != query.itself and text not in right and not any(answer in text.lower() for answer in answers):
            chosen.append(row)
        if len(chosen) == count:
            break
    return tuple(chosen)
