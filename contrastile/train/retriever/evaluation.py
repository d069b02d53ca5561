"""Evaluation of a retriever: all passages ranked for every held-out query, beside BM25; the measures are trec_eval's.

Runs after training, and as a `probe` on a sample between steps. Measures are computed by `evaluate/`; this file ranks
the passages and makes the rows of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile.data.bm25 import BM25
from contrastile.data.pairs import Indices
from contrastile.data.texts import Passage, TextSet
from contrastile.evaluate.ranking import answer_recall, means, measure
from contrastile.evaluate.retrieval import Right, recall_where, topk
from contrastile.train.log import progress
from contrastile.train.retriever.batches import TextMaterials, TokenStore
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.retriever.run import RetrieverRun

Row = dict[str, Any]

KS = (1, 5, 20, 100)
# the columns of a table beside the hits at KS; rows hold the recalls at the other KS too
MEASURES = ("nDCG@10", "MRR@10", "MAP", f"recall@{KS[-1]}")
PARTS = {"functions": "held-out functions", "packages": "held-out packages", "held_out": "held-out queries"}


class Searchable(Protocol):
    """Passages that are encoded already, such as an index on disk."""

    def __len__(self) -> int:
        """The number of passages."""

    def __getitem__(self, row: int, /) -> Passage:
        """The passage at a row."""

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Scores and rows of the `k` best passages for each query."""


Passages = Sequence[Passage] | Searchable
# scores and rows of the k best passages for each of n questions, both `[n, k]`
Search = Callable[[Sequence[str], int], tuple[Any, Indices]]


@dataclass(frozen=True)
class Rankings:
    """The ranked passages of a part's queries by one system: rows of `passages` and scores, both `[n, depth]`.

    `queries` `[n]`: rows of the text set. A row of −1 pads a shorter ranking.
    """

    part: str
    system: str
    passages: Passages
    queries: Indices
    rows: Indices
    scores: Any

    @property
    def title(self) -> str:
        """The name of the test in a table."""
        return f"{PARTS.get(self.part, self.part)}, {self.system}"

    @property
    def ks(self) -> list[int]:
        """The `KS` within the depth of the rankings."""
        return [k for k in KS if k <= self.rows.shape[1]]

    def ranking(self, query: int) -> list[tuple[Passage, float]]:
        """The passages of the n-th query with scores, the best first."""
        ranked = zip(self.rows[query].tolist(), self.scores[query].tolist(), strict=True)
        return [(self.passages[row], score) for row, score in ranked if row >= 0]


def held_out(texts: TextSet) -> dict[str, Indices]:
    """Rows of the queries of every part that is not for training, where it has any."""
    return {name: rows for name, rows in texts.splits.items() if name != "train" and len(rows)}


def rank_all(run: RetrieverRun, texts: TextSet, passages: TokenStore | Searchable) -> list[Rankings]:
    """Rankings of all held-out queries over the tokens of all passages, or over an index.

    With BM25's rankings where the recipe wants them and there is no index.
    """
    settings = run.recipe.evaluate
    searches: dict[str, Search] = {}
    if isinstance(passages, TokenStore):
        corpus: Passages = texts.passages
        features = run.encode_tokens("passage", passages, title="encoding passages")
        searches["retriever"] = _text_search(run, lambda queries, k: topk(queries, features, k))
        if settings.bm25:
            searches["BM25"] = partial(BM25(texts.passages).search, progress=progress)
    else:
        corpus = passages
        searches["retriever"] = _text_search(run, passages.search)
    rankings = [
        rank_part(texts, part, system, corpus, search, settings.depth)
        for part in held_out(texts)
        for system, search in searches.items()
    ]
    if corpus is not texts.passages:
        _check_ids(rankings, texts, corpus)
    return rankings


def _text_search(run: RetrieverRun, search: Callable[[Tensor, int], tuple[Tensor, Tensor]]) -> Search:
    """A search by questions, from a search by their features."""

    def by_text(questions: Sequence[str], k: int) -> tuple[Any, Indices]:
        scores, rows = search(run.encode_query(questions), k)
        return scores.cpu().numpy(), rows.cpu().numpy()

    return by_text


def rank_part(texts: TextSet, part: str, system: str, passages: Passages, search: Search, depth: int) -> Rankings:
    """Rankings of a part's queries, `depth` passages each; a query's own text is left out of its ranking."""
    queries = [texts.queries[row] for row in texts.splits[part].tolist()]
    # one more passage where a query's own text may be among them
    k = depth + any(query.itself is not None for query in queries)
    scores, rows = search([query.text for query in queries], min(k, len(passages)))
    if k > depth:
        # compared by id, because an index has rows of its own
        itself = np.array(
            [
                [query.itself is not None and passages[row].id == query.id for row in ranked]
                for query, ranked in zip(queries, rows.tolist(), strict=True)
            ]
        )
        order = itself.argsort(axis=1, kind="stable")[:, :depth]
        scores = np.take_along_axis(scores, order, axis=1)
        rows = np.take_along_axis(np.where(itself, -1, rows), order, axis=1)
    return Rankings(part, system, passages, texts.splits[part], rows, scores)


def _check_ids(rankings: Sequence[Rankings], texts: TextSet, index: Passages) -> None:
    """Raise ValueError where no passage of the index has an id that is right for any query."""
    if any(texts.queries[row].answers for one in rankings for row in one.queries.tolist()):
        # a passage of any id may contain an answer
        return
    judged = [(run_of(one, texts), judgements_of(one.queries, texts)) for one in rankings]
    right = {passage for _, judgements in judged for passages in judgements.values() for passage in passages}
    hit = any(run[query].keys() & passages for run, judgements in judged for query, passages in judgements.items())
    # the whole index is read only where no ranking has a hit
    if right and not hit and not any(index[row].id in right for row in range(len(index))):
        remedy = "Encode a corpus whose ids are those of the questions' passages."
        raise invalid("--index", "hold passages that are right for a question", f"none of {len(right):,} ids", remedy)


def run_of(rankings: Rankings, texts: TextSet) -> dict[str, dict[str, float]]:
    """Scores by ids of query and passage, as in a run file; of an id that an index holds twice, the best score."""
    return {
        texts.queries[row].id: {passage.id: score for passage, score in reversed(rankings.ranking(query))}
        for query, row in enumerate(rankings.queries.tolist())
    }


def judgements_of(rows: Indices, texts: TextSet) -> dict[str, dict[str, int]]:
    """Grades by ids of query and passage, of the queries at `rows` that have positives."""
    return {
        query.id: {
            texts.passages[passage].id: grade
            for passage, grade in zip(query.positives, query.grades or (1,) * len(query.positives), strict=True)
        }
        for query in (texts.queries[row] for row in rows.tolist())
        if query.positives
    }


def evaluate(recipe: RetrieverRecipe, texts: TextSet, rankings: Sequence[Rankings]) -> list[Row]:
    """The rows of evaluation.json: test, queries, choices, hits at `KS` and measures; a `headline` leads the report.

    A part with answers has a second row: the share of queries with an answer in the text of one of the first k
    passages, not in its title, as in the evaluation of DPR.
    """
    rows = []
    for one in rankings:
        judgements = judgements_of(one.queries, texts)
        if judgements:
            # recalls beyond the depth of the rankings would be too low
            names = [*(f"hit@{k}" for k in one.ks), *MEASURES[:-1], *(f"recall@{k}" for k in one.ks)]
            values = means(measure(run_of(one, texts), judgements, names))
            hits = {k: values.pop(f"hit@{k}") for k in one.ks}
            rows.append(_row(one, one.title, len(judgements), hits, values))
        answered = [query for query, row in enumerate(one.queries.tolist()) if texts.queries[row].answers]
        if answered:
            passages = [[passage.text for passage, _ in one.ranking(query)] for query in answered]
            answers = [texts.queries[one.queries[query]].answers for query in answered]
            hits = answer_recall(passages, answers, match=recipe.evaluate.match, ks=one.ks)
            rows.append(_row(one, f"{one.title}, answers", len(answered), hits, {}))
    return rows


def _row(one: Rankings, test: str, queries: int, hits: Mapping[int, float], measures: dict[str, float]) -> Row:
    return {
        "test": test,
        "queries": queries,
        "choices": len(one.passages),
        "recall": {str(k): share for k, share in hits.items()},
        "measures": measures,
        "chance": 1 / len(one.passages),
        "headline": one.system == "retriever",
    }


def probe(run: RetrieverRun, materials: TextMaterials) -> dict[str, dict[str, float]]:
    """Recall at 1 and 5 of a sample of each held-out part, among the first positives of the sampled queries.

    As in the whole evaluation, any passage that is right for a query counts, and a query's own text is left out.
    """
    texts, recalls = materials.texts, {}
    for name, rows in held_out(texts).items():
        judged = [row for row in rows.tolist() if texts.queries[row].positives]
        sample = np.random.default_rng(0).permutation(judged)[: run.recipe.evaluate.probe]
        if len(sample) == 0:
            continue
        queries = [texts.queries[row] for row in sample.tolist()]
        keys = sorted({int(materials.same[query.positives[0]]) for query in queries})
        right = _mask(run, materials, keys, [query.positives for query in queries])
        itself = _mask(run, materials, keys, [() if query.itself is None else (query.itself,) for query in queries])
        query_features = run.encode_query([query.text for query in queries])
        key_features = run.encode_passage([texts.passages[row] for row in keys])
        shares = recall_where(query_features, key_features, right, aside=itself, ks=(1, 5))
        recalls[name] = {str(k): share for k, share in shares.items()}
    return recalls


def _mask(run: RetrieverRun, materials: TextMaterials, keys: list[int], passages: Sequence[Sequence[int]]) -> Right:
    """Marks the `keys` that are among each query's `passages`."""
    key_columns = {row: column for column, row in enumerate(keys)}
    mask = torch.zeros(len(passages), len(keys), dtype=torch.bool)
    for query, rows in enumerate(passages):
        mask[query, [key_columns[row] for row in map(int, materials.same[list(rows)]) if row in key_columns]] = True
    mask = mask.to(run.device)
    return lambda rows, columns: mask[rows, columns]
