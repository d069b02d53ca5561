"""What a retriever is worth: every held-out query answered from all passages, beside BM25; by trec_eval's measures.

After the steps, and in small (`probe`) between them. The arithmetic is `evaluate/`'s; here is decided what is asked and
where it is looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from contrastile._wrong import wrong
from contrastile.data.bm25 import BM25
from contrastile.data.pairs import Indices
from contrastile.data.texts import Passage, TextSet
from contrastile.evaluate.answers import answer_hits
from contrastile.evaluate.ranking import means, measure
from contrastile.evaluate.retrieval import recall
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
    """A part's queries (rows of the set) with what was found for each in `passages`: rows and scores `[n, depth]`."""

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


def held_out(texts: TextSet) -> dict[str, Indices]:
    """Every part of the set but the training's, where it has queries."""
    return {name: rows for name, rows in texts.splits.items() if name != "train" and len(rows)}


def answer_all(run: RetrieverRun, texts: TextSet, passages: TokenStore | Searchable) -> list[Answered]:
    """All held-out queries answered from the tokens of all passages, or from an index.

    By BM25 too, where the recipe wants it and there is no index.
    """
    settings = run.recipe.evaluate
    if not isinstance(passages, TokenStore):
        answered = [_answered_by(run, texts, part, passages, passages.search) for part in held_out(texts)]
        _check_ids(answered, texts, passages)
        return answered
    features = run.encode_tokens("passage", passages, what="encoding passages")

    def search(queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return top(queries, features, k)

    answered = [_answered_by(run, texts, part, texts.passages, search) for part in held_out(texts)]
    if settings.bm25:
        engine = BM25(texts.passages)
        for part, rows in held_out(texts).items():
            asked = [texts.queries[row].text for row in rows.tolist()]
            scores, found = engine.search(asked, settings.depth, progress=progress)
            answered.append(Answered(part, "BM25", texts.passages, rows, found, scores))
    return sorted(answered, key=lambda one: list(texts.splits).index(one.part))


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


def _answered_by(
    run: RetrieverRun,
    texts: TextSet,
    part: str,
    passages: Passages,
    search: Callable[[Tensor, int], tuple[Tensor, Tensor]],
) -> Answered:
    rows = texts.splits[part]
    asked = run.encode_query([texts.queries[row].text for row in rows.tolist()])
    scores, found = search(asked, min(run.recipe.evaluate.depth, len(passages)))
    return Answered(part, "retriever", passages, rows, found.cpu().numpy(), scores.cpu().numpy())


def run_of(answered: Answered, texts: TextSet) -> dict[str, dict[str, float]]:
    """What was found, by ids, as run files and measures have it."""
    return {
        texts.queries[row].id: {
            answered.passages[passage].id: score for passage, score in zip(found, scores, strict=True)
        }
        for row, found, scores in zip(
            answered.queries.tolist(), answered.found.tolist(), answered.scores.tolist(), strict=True
        )
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
    found = [[one.passages[row].text for row in one.found[place].tolist()] for place in asked]
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
    """Recall at 1 and 5 of a sample of each held-out part, among the right passages of that sample."""
    recalls = {}
    for name, rows in held_out(materials.texts).items():
        known = [row for row in rows.tolist() if materials.texts.queries[row].positives]
        sample = np.random.default_rng(0).permutation(known)[: run.recipe.evaluate.probe]
        if len(sample) == 0:
            continue
        queries = [materials.texts.queries[row] for row in sample.tolist()]
        rights = [int(materials.same[query.positives[0]]) for query in queries]
        keys = sorted(set(rights))
        asked = run.encode_query([query.text for query in queries])
        passages = run.encode_passage([materials.texts.passages[row] for row in keys])
        found = recall(asked, passages, *(_on(run, ids) for ids in (rights, keys)), ks=(1, 5))
        recalls[name] = {str(k): share for k, share in found.items()}
    return recalls


def _on(run: RetrieverRun, ids: list[int]) -> Tensor:
    return torch.tensor(ids, device=run.device)
