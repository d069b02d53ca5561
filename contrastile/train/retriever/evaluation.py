"""Evaluation of a retriever: all passages ranked for every held-out query, beside BM25; the measures are trec_eval's.

Runs after training, and as a `probe` on a sample between steps. Measures are computed by `evaluate/`; this file ranks
the passages and makes the rows of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile.data.base import Indices
from contrastile.data.texts import BM25, Passage, TextSet
from contrastile.evaluate import late
from contrastile.evaluate.ranking import answer_recall, means, measure
from contrastile.evaluate.retrieval import Right, recall_where, topk
from contrastile.gradcache.inputs import Ragged
from contrastile.train.log import progress
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.retriever.run import RetrieverRun, TextMaterials, TokenStore

Row = dict[str, Any]

KS = (1, 5, 20, 100)
# the columns of a table beside the hits at KS; rows hold the recalls at the other KS too
MEASURES = ("nDCG@10", "MRR@10", "MAP", f"recall@{KS[-1]}")
PARTS = {"functions": "held-out functions", "packages": "held-out packages", "held_out": "held-out queries"}


# encoded passages that are searched, as `retrieval/index.py` has them: `len`, a passage by its row, and `search`
Searchable = Any
Passages = Sequence[Passage] | Searchable
# rows [n, C] of the passages that a late retriever scores for each of n questions, −1 for none; None: it scores all
Candidates = Callable[[Sequence[str]], Indices | None]
# the candidates of a corpus
FirstStage = Callable[[Passages], Candidates]
# scores and rows of the k best passages for each of n questions, both `[n, k]`, as arrays or tensors
Search = Callable[[Sequence[str], int], tuple[Any, Any]]


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

    def ranking(self, query: int) -> list[tuple[Passage, float]]:
        """The passages of the n-th query with scores, the best first."""
        ranked = zip(self.rows[query].tolist(), self.scores[query].tolist(), strict=True)
        return [(self.passages[row], score) for row, score in ranked if row >= 0]


def held_out(texts: TextSet) -> dict[str, Indices]:
    """Rows of the queries of every part that is not for training, where it has any."""
    return {name: rows for name, rows in texts.splits.items() if name != "train" and len(rows)}


def rank_all(
    run: RetrieverRun, texts: TextSet, passages: TokenStore | Searchable, first_stage: FirstStage | None = None
) -> list[Rankings]:
    """Rankings of all held-out queries over the tokens of all passages, or over an index.

    With BM25's rankings where the recipe wants them and there is no index. first_stage: the candidates that a late
    retriever scores, by default those of the recipe.
    """
    settings = run.recipe.evaluate
    corpus: Passages = texts.passages if isinstance(passages, TokenStore) else passages
    if first_stage is None and run.recipe.model.kind == "late" and settings.candidates:
        first_stage = partial(bm25_candidates, count=settings.candidates)
    # without candidates every passage is scored
    among: Candidates = first_stage(corpus) if first_stage is not None else lambda _: None
    searches: dict[str, Search] = {}
    if isinstance(passages, TokenStore):
        nearest = search_in(run.encode_tokens("passage", passages, title="encoding passages"))
        searches["retriever"] = lambda questions, k: nearest(run.encode_query(questions), k, among(questions))
        if settings.bm25:
            searches["BM25"] = partial(BM25(texts.passages).search, progress=progress)
    else:
        searches["retriever"] = lambda questions, k: passages.search(run.encode_query(questions), k, among(questions))
    rankings = [
        rank_part(texts, part, system, corpus, search, settings.depth)
        for part in held_out(texts)
        for system, search in searches.items()
    ]
    if corpus is not texts.passages:
        _check_ids(rankings, texts, corpus)
    return rankings


def bm25_candidates(passages: Passages, count: int) -> Candidates:
    """The first `count` passages of BM25."""
    engine = BM25(passages)
    return lambda questions: engine.search(questions, count)[1]


def search_in(features: Tensor | Ragged) -> Callable[[Any, int, Indices | None], tuple[Tensor, Tensor]]:
    """The search for the k best of encoded passages: scores and rows by encoded queries, k, and candidates."""
    if isinstance(features, Ragged):
        vectors = [late.TokenVectors.of(features.values, features.lengths)]
        return lambda queries, k, among: late.topk(queries, vectors, k, among)
    return lambda queries, k, _: topk(queries, features, k)


def rank_part(texts: TextSet, part: str, system: str, passages: Passages, search: Search, depth: int) -> Rankings:
    """Rankings of a part's queries, `depth` passages each; a query's own text is left out of its ranking."""
    queries = [texts.queries[row] for row in texts.splits[part].tolist()]
    # one more passage where a query's own text may be among them
    k = depth + any(query.itself is not None for query in queries)
    results = search([query.text for query in queries], min(k, len(passages)))
    scores, rows = (torch.as_tensor(values).numpy(force=True) for values in results)
    if k > depth:
        # compared by id, because an index has rows of its own
        itself = np.array(
            [
                [query.itself is not None and row >= 0 and passages[row].id == query.id for row in ranked]
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
    judged = (query.positives for one in rankings for query in (texts.queries[row] for row in one.queries.tolist()))
    right = {texts.passages[row].id for positives in judged for row in positives}
    # the whole index is read only where no ranking has such a passage
    ranked = (row for one in rankings for row in one.rows.ravel().tolist() if row >= 0)
    if right and right.isdisjoint(index[row].id for row in chain(ranked, range(len(index)))):
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
    judgements = {}
    for query in (texts.queries[row] for row in rows.tolist() if texts.queries[row].positives):
        ids = [texts.passages[passage].id for passage in query.positives]
        judgements[query.id] = dict(zip(ids, query.grades or (1,) * len(ids), strict=True))
    return judgements


def evaluate(recipe: RetrieverRecipe, texts: TextSet, rankings: Sequence[Rankings]) -> list[Row]:
    """The rows of evaluation.json: test, queries, choices, hits at `KS` and measures; a `headline` leads the report.

    A part with answers has a second row: the share of queries with an answer in the text of one of the first k
    passages, not in its title, as in the evaluation of DPR.
    """
    rows = []
    for one in rankings:
        # recalls beyond the depth of the rankings would be too low
        ks = [k for k in KS if k <= one.rows.shape[1]]
        # of each row of the table: the ending of its name, the number of queries, hits and measures
        results: list[tuple[str, int, dict[int, float], dict[str, float]]] = []
        if judgements := judgements_of(one.queries, texts):
            names = [*(f"hit@{k}" for k in ks), *MEASURES[:-1], *(f"recall@{k}" for k in ks)]
            values = means(measure(run_of(one, texts), judgements, names))
            results.append(("", len(judgements), {k: values.pop(f"hit@{k}") for k in ks}, values))
        answers = {query: texts.queries[row].answers for query, row in enumerate(one.queries.tolist())}
        if answers := {query: sought for query, sought in answers.items() if sought}:
            passages = [[passage.text for passage, _ in one.ranking(query)] for query in answers]
            hits = answer_recall(passages, [*answers.values()], match=recipe.evaluate.match, ks=ks)
            results.append((", answers", len(answers), hits, {}))
        rows += [
            {
                "test": f"{PARTS.get(one.part, one.part)}, {one.system}{ending}",
                "queries": queries,
                "choices": len(one.passages),
                "recall": {str(k): share for k, share in hits.items()},
                "measures": measures,
                "chance": 1 / len(one.passages),
                "headline": one.system == "retriever",
            }
            for ending, queries, hits, measures in results
        ]
    return rows


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
        if run.recipe.model.kind == "late":
            # a matrix of scores is its own product with the identity
            packed = Ragged.of(*key_features)
            query_features = late.maxsim(query_features, late.TokenVectors.of(packed.values, packed.lengths))
            key_features = torch.eye(len(keys), device=run.device)
        shares = recall_where(query_features, key_features, right, aside=itself, ks=(1, 5))
        recalls[name] = {str(k): share for k, share in shares.items()}
    return recalls


def _mask(run: RetrieverRun, materials: TextMaterials, keys: list[int], passages: Sequence[Sequence[int]]) -> Right:
    """Marks the `keys` that are among each query's `passages`."""
    mask = torch.from_numpy(np.stack([np.isin(keys, materials.same[list(rows)]) for rows in passages])).to(run.device)
    return lambda rows, columns: mask[rows, columns]
