"""What a retriever is worth: every held-out query answered from all passages, beside BM25; by trec_eval's measures.

After the steps, and in small (`probe`) between them. The arithmetic is `evaluate/`'s; here is decided what is asked and
where it is looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from contrastile._wrong import wrong
from contrastile.data.bm25 import BM25
from contrastile.data.pairs import Indices
from contrastile.data.texts import Passage, Query, TextSet
from contrastile.evaluate.answers import answer_hits
from contrastile.evaluate.ranking import means, measure
from contrastile.evaluate.retrieval import Right, recall_where
from contrastile.evaluate.top import top
from contrastile.train.log import progress
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.retriever.feed import TextMaterials, TokenStore
from contrastile.train.retriever.run import RetrieverRun

Row = dict[str, Any]

KS = (1, 5, 20, 100)
# beside the hits at KS; a table has the last of the recalls
RECALLS = tuple(f"recall@{k}" for k in KS)
MEASURES = ("nDCG@10", "MRR@10", "MAP", RECALLS[-1])
PARTS = {"functions": "held-out functions", "packages": "held-out packages", "held_out": "held-out queries"}


class Passages(Protocol):
    """Where a search finds passages: a list of them, or an index on the disk."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, row: int, /) -> Passage:
        """The passage at a row."""


class Searchable(Passages, Protocol):
    """Passages that are encoded already."""

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Scores and rows of the `k` best for each query."""


@dataclass(frozen=True)
class Answered:
    """A part's queries (rows of the set) with what was found for each in `passages`: rows and scores `[n, depth]`.

    A row of −1 pads a ranking that is shorter than the others.
    """

    part: str
    system: str
    passages: Passages
    queries: Indices
    found: Indices
    scores: Any

    @property
    def title(self) -> str:
        """As a table calls it."""
        return f"{PARTS.get(self.part, self.part)}, {self.system}"

    def ranking(self, place: int) -> list[tuple[Passage, float]]:
        """What was found for the query at a place, the best first, with scores."""
        found = zip(self.found[place].tolist(), self.scores[place].tolist(), strict=True)
        return [(self.passages[row], score) for row, score in found if row >= 0]


def held_out(texts: TextSet) -> dict[str, Indices]:
    """Every part of the set but the training's, where it has queries."""
    return {name: rows for name, rows in texts.splits.items() if name != "train" and len(rows)}


# scores and rows of the k best passages for each of some questions, `[n, k]`
Search = Callable[[Sequence[str], int], tuple[Any, Indices]]


def answer_all(run: RetrieverRun, texts: TextSet, passages: TokenStore | Searchable) -> list[Answered]:
    """All held-out queries answered from the tokens of all passages, or from an index.

    By BM25 too, where the recipe wants it and there is no index.
    """
    settings, parts = run.recipe.evaluate, list(held_out(texts))
    if not isinstance(passages, TokenStore):
        index = passages
        answered = [answer(texts, part, "retriever", index, _by(run, index.search), settings.depth) for part in parts]
        _check_ids(answered, texts, index)
        return answered
    features = run.encode_tokens("passage", passages, what="encoding passages")
    searches = {"retriever": _by(run, lambda queries, k: top(queries, features, k))}
    if settings.bm25:
        searches["BM25"] = partial(BM25(texts.passages).search, progress=progress)
    return [
        answer(texts, part, system, texts.passages, search, settings.depth)
        for part in parts
        for system, search in searches.items()
    ]


def _by(run: RetrieverRun, search: Callable[[Tensor, int], tuple[Tensor, Tensor]]) -> Search:
    """A search by the features of questions."""

    def by_text(questions: Sequence[str], k: int) -> tuple[Any, Indices]:
        scores, found = search(run.encode_query(questions), k)
        return scores.cpu().numpy(), found.cpu().numpy()

    return by_text


def answer(texts: TextSet, part: str, system: str, passages: Passages, search: Search, depth: int) -> Answered:
    """A part's queries with the `depth` best of the passages; a question's own text is not among them."""
    rows = texts.splits[part]
    asked = [texts.queries[row] for row in rows.tolist()]
    # one more, where a question may find itself
    wanted = depth + any(query.itself is not None for query in asked)
    scores, found = search([query.text for query in asked], min(wanted, len(passages)))
    if wanted > depth:
        scores, found = _without_themselves(asked, passages, scores, found, depth)
    return Answered(part, system, passages, rows, found, scores)


def _without_themselves(
    asked: Sequence[Query], passages: Passages, scores: Any, found: Indices, depth: int
) -> tuple[Any, Indices]:
    # by ids: an index has rows of its own
    itself = np.array(
        [
            [query.itself is not None and passages[row].id == query.id for row in ranked]
            for query, ranked in zip(asked, found.tolist(), strict=True)
        ]
    )
    order = itself.argsort(axis=1, kind="stable")[:, :depth]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(np.where(itself, -1, found), order, axis=1)


def _check_ids(answers: Sequence[Answered], texts: TextSet, index: Passages) -> None:
    """Raises ValueError where every answer is wrong because the index has other ids; it is read through only then."""
    if any(texts.queries[row].answers for one in answers for row in one.queries.tolist()):
        # passages of any ids may contain an answer
        return
    judged = [(run_of(one, texts), judgements_of(one.queries, texts)) for one in answers]
    right = {passage for _, known in judged for passages in known.values() for passage in passages}
    hit = any(found[query].keys() & passages for found, known in judged for query, passages in known.items())
    if right and not hit and not any(index[row].id in right for row in range(len(index))):
        remedy = "Encode a corpus whose ids are those of the questions' passages."
        raise wrong("--index", "hold passages that are right for a question", f"none of {len(right):,} ids", remedy)


def run_of(answered: Answered, texts: TextSet) -> dict[str, dict[str, float]]:
    """What was found, by ids, as run files and measures have it; an index may hold an id twice, and the best counts."""
    return {
        texts.queries[row].id: {passage.id: score for passage, score in reversed(answered.ranking(place))}
        for place, row in enumerate(answered.queries.tolist())
    }


def judgements_of(rows: Indices, texts: TextSet) -> dict[str, dict[str, int]]:
    """What is right for each of the queries at `rows` of which that is known."""
    asked = [texts.queries[row] for row in rows.tolist()]
    return {
        query.id: {
            texts.passages[passage].id: grade
            for passage, grade in zip(query.positives, query.grades or (1,) * len(query.positives), strict=True)
        }
        for query in asked
        if query.positives
    }


def evaluate(recipe: RetrieverRecipe, texts: TextSet, answered: list[Answered]) -> list[Row]:
    """Every test as a row: name, queries, choices, hits at `KS`, the other measures; a `headline` leads the report."""
    rows = []
    for one in answered:
        judged = judgements_of(one.queries, texts)
        if judged:
            cuts = [k for k in KS if k <= one.found.shape[1]]
            # a recall at more than were looked up would be another one
            names = [*MEASURES[:-1], *RECALLS[: len(cuts)]]
            values = means(measure(run_of(one, texts), judged, [*(f"hit@{k}" for k in cuts), *names]))
            hits = {str(k): values.pop(f"hit@{k}") for k in cuts}
            rows.append(_row(one, len(judged), hits, values))
        answers = [row for row in one.queries.tolist() if texts.queries[row].answers]
        if answers:
            rows.append(_answers(recipe, texts, one))
    return rows


def _answers(recipe: RetrieverRecipe, texts: TextSet, one: Answered) -> Row:
    """The questions with answers: how many find one among their first passages, whatever was listed as right.

    As in DPR's own evaluation an answer is looked for in a passage's text, not in its title.
    """
    asked = [place for place, row in enumerate(one.queries.tolist()) if texts.queries[row].answers]
    found = [[passage.text for passage, _ in one.ranking(place)] for place in asked]
    answers = [texts.queries[one.queries[place]].answers for place in asked]
    hits = answer_hits(found, answers, match=recipe.evaluate.match, ks=[k for k in KS if k <= one.found.shape[1]])
    row = _row(one, len(asked), {str(k): hit for k, hit in hits.items()}, {})
    return {**row, "test": f"{row['test']}, answers"}


def _row(one: Answered, queries: int, recalls: dict[str, float], values: dict[str, float]) -> Row:
    return {
        "test": one.title,
        "queries": queries,
        "choices": len(one.passages),
        "recall": recalls,
        "measures": values,
        "chance": 1 / len(one.passages),
        "headline": one.system == "retriever",
    }


def probe(run: RetrieverRun, materials: TextMaterials) -> dict[str, dict[str, float]]:
    """Recall at 1 and 5 of a sample of each held-out part, among the first right passages of that sample's queries.

    As in the whole evaluation, any passage that is right for a query answers it, and a query does not find itself.
    """
    recalls = {}
    for name, rows in held_out(materials.texts).items():
        known = [row for row in rows.tolist() if materials.texts.queries[row].positives]
        sample = np.random.default_rng(0).permutation(known)[: run.recipe.evaluate.probe]
        if len(sample) == 0:
            continue
        queries = [materials.texts.queries[row] for row in sample.tolist()]
        keys = sorted({int(materials.same[query.positives[0]]) for query in queries})
        right = _marks(run, materials, keys, [query.positives for query in queries])
        itself = _marks(run, materials, keys, [() if query.itself is None else (query.itself,) for query in queries])
        asked = run.encode_query([query.text for query in queries])
        passages = run.encode_passage([materials.texts.passages[row] for row in keys])
        found = recall_where(asked, passages, right, aside=itself, ks=(1, 5))
        recalls[name] = {str(k): share for k, share in found.items()}
    return recalls


def _marks(run: RetrieverRun, materials: TextMaterials, keys: list[int], named: Sequence[Sequence[int]]) -> Right:
    """Which of the `keys` are among the passages that are `named` for each query."""
    place = {row: at for at, row in enumerate(keys)}
    marks = torch.zeros(len(named), len(keys), dtype=torch.bool)
    for query, rows in enumerate(named):
        marks[query, [place[row] for row in map(int, materials.same[list(rows)]) if row in place]] = True
    marks = marks.to(run.device)
    return lambda rows, columns: marks[rows, columns]
