"""What a ranking is worth: nDCG, MRR, MAP, recall and hits, as trec_eval counts them.

After a search: beside `retrieval.py`, which counts ranks of features, this takes any run, a search engine's too. A run
says which passages were found for each query with which scores; judgements say how right a passage is, 0 and below for
not at all. Passages are ordered by score, those of equal score (in float32, trec_eval's type) by descending id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from contrastile._check import wrong

Run = Mapping[str, Mapping[str, float]]
Judgements = Mapping[str, Mapping[str, int]]

USUAL = ("hit@1", "hit@5", "hit@20", "hit@100", "nDCG@10", "MRR@10", "MAP", "recall@100")


def ranking(scores: Mapping[str, float]) -> list[str]:
    """Ids, the best first.

    >>> ranking({"a": 1.0, "b": 2.0, "c": 1.0})
    ['b', 'c', 'a']
    """
    exact = np.fromiter(scores.values(), dtype=np.float32, count=len(scores)).tolist()
    return [name for _, name in sorted(zip(exact, scores, strict=True), reverse=True)]


def measure(run: Run, judgements: Judgements, names: Sequence[str] = USUAL) -> dict[str, dict[str, float]]:
    """Each measure of each judged query: `{query: {name: value}}`. A query that the run lacks counts 0 everywhere.

    names: "nDCG@10", "MRR@10", "MAP", "recall@100", "precision@5", "hit@20" (a right one among the first 20), with any
    cut or none. Equal to trec_eval's ndcg_cut, recip_rank, map, recall, P and success, its option -c set.
    Raises ValueError for names that are none.

    >>> measure({"q": {"a": 2.0, "b": 1.0}}, {"q": {"b": 1, "c": 1}}, ["MRR@10", "recall@2", "MAP"])
    {'q': {'MRR@10': 0.5, 'recall@2': 0.5, 'MAP': 0.25}}
    """
    wanted = [(name, *_parsed(name)) for name in names]
    measured = {}
    for query, judged in judgements.items():
        grades = [max(judged.get(passage, 0), 0) for passage in ranking(run.get(query, {}))]
        ideal = sorted((grade for grade in judged.values() if grade > 0), reverse=True)
        measured[query] = {
            name: formula(grades if cut is None else grades[:cut], ideal, cut) if ideal else 0.0
            for name, formula, cut in wanted
        }
    return measured


def means(measured: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The mean of each measure over all queries. Raises ValueError where there are none.

    >>> means({"q": {"MAP": 1.0}, "r": {"MAP": 0.0}})
    {'MAP': 0.5}
    """
    if not measured:
        raise wrong("judgements", "not be empty", "no queries", "There is nothing to measure.")
    names = next(iter(measured.values()))
    return {name: math.fsum(values[name] for values in measured.values()) / len(measured) for name in names}


# a formula takes the grades found, best first and cut; the grades there are, highest first; and the cut
Formula = Callable[[Sequence[int], Sequence[int], int | None], float]


def _ndcg(grades: Sequence[int], ideal: Sequence[int], cut: int | None) -> float:
    return _gain(grades) / _gain(ideal[:cut])


def _gain(grades: Sequence[int]) -> float:
    return math.fsum(grade / math.log2(place + 2) for place, grade in enumerate(grades) if grade)


def _mrr(grades: Sequence[int], ideal: Sequence[int], cut: int | None) -> float:  # noqa: ARG001
    return next((1 / (place + 1) for place, grade in enumerate(grades) if grade), 0.0)


def _map(grades: Sequence[int], ideal: Sequence[int], cut: int | None) -> float:  # noqa: ARG001
    places = [place for place, grade in enumerate(grades) if grade]
    return math.fsum((found + 1) / (place + 1) for found, place in enumerate(places)) / len(ideal)


def _recall(grades: Sequence[int], ideal: Sequence[int], cut: int | None) -> float:  # noqa: ARG001
    return sum(grade > 0 for grade in grades) / len(ideal)


def _precision(grades: Sequence[int], ideal: Sequence[int], cut: int | None) -> float:  # noqa: ARG001
    return sum(grade > 0 for grade in grades) / (cut or max(len(grades), 1))


def _hit(grades: Sequence[int], ideal: Sequence[int], cut: int | None) -> float:  # noqa: ARG001
    return float(any(grades))


FORMULAS: dict[str, Formula] = {
    "nDCG": _ndcg,
    "MRR": _mrr,
    "MAP": _map,
    "recall": _recall,
    "precision": _precision,
    "hit": _hit,
}


def _parsed(name: str) -> tuple[Formula, int | None]:
    kind, at, cut = name.partition("@")
    if kind not in FORMULAS or (at and not (cut.isdecimal() and int(cut) > 0)):
        remedy = "With a cut or without: nDCG@10, MAP."
        raise wrong("names", f"be measures among {', '.join(FORMULAS)}", f'"{name}"', remedy)
    return FORMULAS[kind], int(cut) if at else None
