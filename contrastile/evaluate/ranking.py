"""Measures of rankings as trec_eval computes them: nDCG, MRR, MAP, recall, precision and hits.

Beside `retrieval.py`, which counts ranks of features, this takes the run of any search engine. A run holds the scores
of the passages retrieved for each query; judgements hold the grade of a passage, 0 or below for a wrong one. Passages
are ordered by score, those of equal score (in float32, trec_eval's type) by descending id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from contrastile._errors import invalid

Run = Mapping[str, Mapping[str, float]]
Judgements = Mapping[str, Mapping[str, int]]

USUAL = ("hit@1", "hit@5", "hit@20", "hit@100", "nDCG@10", "MRR@10", "MAP", "recall@100")


def ranking(scores: Mapping[str, float]) -> list[str]:
    """Ids, the best first.

    >>> ranking({"a": 1.0, "b": 2.0, "c": 1.0})
    ['b', 'c', 'a']
    """
    float32 = np.fromiter(scores.values(), dtype=np.float32, count=len(scores)).tolist()
    return [name for _, name in sorted(zip(float32, scores, strict=True), reverse=True)]


def measure(run: Run, judgements: Judgements, names: Sequence[str] = USUAL) -> dict[str, dict[str, float]]:
    """Each measure of each judged query: `{query: {name: value}}`; 0 for a query that is missing in the run.

    names: "nDCG@10", "MRR@10", "MAP", "recall@100", "precision@5", "hit@20" (a right passage among the first 20), with
    any cutoff or none. Equal to trec_eval's ndcg_cut, recip_rank, map, recall, P and success with its option -c.
    Raises ValueError for other names.

    >>> measure({"q": {"a": 2.0, "b": 1.0}}, {"q": {"b": 1, "c": 1}}, ["MRR@10", "recall@2", "MAP"])
    {'q': {'MRR@10': 0.5, 'recall@2': 0.5, 'MAP': 0.25}}
    """
    formulas = [(name, *_parsed(name)) for name in names]
    measured = {}
    for query, judged in judgements.items():
        grades = [max(judged.get(passage, 0), 0) for passage in ranking(run.get(query, {}))]
        ideal = sorted((grade for grade in judged.values() if grade > 0), reverse=True)
        measured[query] = {
            name: formula(grades[:cutoff], ideal, cutoff) if ideal else 0.0 for name, formula, cutoff in formulas
        }
    return measured


def means(measured: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The mean of each measure over all queries. Raises ValueError for no queries.

    >>> means({"q": {"MAP": 1.0}, "r": {"MAP": 0.0}})
    {'MAP': 0.5}
    """
    if not measured:
        raise invalid("judgements", "not be empty", "no queries", "There is nothing to measure.")
    names = next(iter(measured.values()))
    return {name: math.fsum(values[name] for values in measured.values()) / len(measured) for name in names}


# of the retrieved grades, best first, up to the cutoff; of all positive grades, highest first; and of the cutoff
Formula = Callable[[Sequence[int], Sequence[int], int | None], float]


def _ndcg(grades: Sequence[int], ideal: Sequence[int], cutoff: int | None) -> float:
    return _gain(grades) / _gain(ideal[:cutoff])


def _gain(grades: Sequence[int]) -> float:
    return math.fsum(grade / math.log2(rank + 2) for rank, grade in enumerate(grades) if grade)


def _map(grades: Sequence[int], ideal: Sequence[int], _: int | None) -> float:
    ranks = [rank for rank, grade in enumerate(grades) if grade]
    return math.fsum((number + 1) / (rank + 1) for number, rank in enumerate(ranks)) / len(ideal)


FORMULAS: dict[str, Formula] = {
    "nDCG": _ndcg,
    "MRR": lambda grades, *_: next((1 / (rank + 1) for rank, grade in enumerate(grades) if grade), 0.0),
    "MAP": _map,
    "recall": lambda grades, ideal, _: sum(grade > 0 for grade in grades) / len(ideal),
    "precision": lambda grades, _, cutoff: sum(grade > 0 for grade in grades) / (cutoff or max(len(grades), 1)),
    "hit": lambda grades, *_: float(any(grades)),
}


def _parsed(name: str) -> tuple[Formula, int | None]:
    kind, at, cutoff = name.partition("@")
    if kind not in FORMULAS or (at and not (cutoff.isdecimal() and int(cutoff) > 0)):
        remedy = "With a cut or without: nDCG@10, MAP."
        raise invalid("names", f"be measures among {', '.join(FORMULAS)}", f'"{name}"', remedy)
    return FORMULAS[kind], int(cutoff) if at else None
