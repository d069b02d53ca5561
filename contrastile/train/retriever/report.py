"""The last station of a retriever: its table, its run files, and a page of questions with what was found for them.

Fills the page of `train/report.py` with questions instead of pictures.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from contrastile.data.bm25 import WORD, words
from contrastile.data.texts import Passage, Query, TextSet
from contrastile.evaluate.answers import has_answer
from contrastile.evaluate.trec import write_judgements, write_run
from contrastile.train.folder import EVALUATION, RunFolder
from contrastile.train.report import (
    Ask,
    Asks,
    FoundText,
    Wording,
    counted,
    kept_asks,
    percent,
    table_text,
    write_report,
)
from contrastile.train.retriever.evaluation import (
    KS,
    MEASURES,
    PARTS,
    Answered,
    Row,
    Searchable,
    answer_all,
    evaluate,
    judgements_of,
    run_of,
)
from contrastile.train.retriever.feed import TokenStore
from contrastile.train.retriever.run import RetrieverRun

logger = logging.getLogger("contrastile")

# questions shown of each part, passages shown to each, letters shown of each passage
QUESTIONS, ANSWERS, LETTERS = 8, 4, 2400
# a word of the question is marked in a passage from so many letters on
MARKED = 3
SENTENCE = (
    "Questions drawn by lot and the best of all {:,} passages; words of the question are marked. A tick is on what the "
    "data calls right, or on what has an answer where no passages are listed; another one may be right as well."
)


def evaluate_and_report(
    folder: RunFolder, run: RetrieverRun, texts: TextSet, passages: TokenStore | Searchable, *, beside: bool = False
) -> str:
    """Measure everything; write evaluation.json, the run files and report.html; the table of results as text.

    passages: the tokens of those of the texts, or an index. beside: what was measured on other texts stays.
    """
    answered = answer_all(run, texts, passages)
    results = evaluate(run.recipe, texts, answered)
    questions = [asks(one, texts, run.recipe.evaluate.match) for one in answered if one.system == "retriever"]
    kept, shown = _of_others(folder, results, questions) if beside else ([], [])
    folder.write_json(EVALUATION, [*kept, *results])
    write_runs(folder, texts, answered)
    write_report(folder, questions=[*shown, *questions], wording=WORDING)
    return table_text(results, WORDING)


def _of_others(folder: RunFolder, results: Sequence[Row], questions: Sequence[Asks]) -> tuple[list[Row], list[Asks]]:
    """The results, and the questions, that the folder has of other texts."""
    tested, titles = {row["test"] for row in results}, {one.title for one in questions}
    before = folder.read_json(EVALUATION) if (folder / EVALUATION).is_file() else []
    return (
        [row for row in before if row["test"] not in tested],
        [one for one in kept_asks(folder) if one.title not in titles],
    )


def write_runs(folder: RunFolder, texts: TextSet, answered: Sequence[Answered]) -> None:
    """`<part>.<system>.trec` and `<part>.qrels`, for other tools."""
    try:
        for one in answered:
            with folder.written_whole(f"{one.part}.qrels") as path:
                write_judgements(path, judgements_of(one.queries, texts))
            with folder.written_whole(f"{one.part}.{one.system}.trec") as path:
                write_run(path, run_of(one, texts), tag=one.system)
    except ValueError as reason:
        # ids with blanks fit into no such file; everything else is there
        logger.warning("run files are not written: %s", reason)


def _row(row: Mapping[str, Any]) -> list[str]:
    values = (percent(row["measures"].get(name)) for name in MEASURES)
    return [*counted(row), *(percent(row["recall"].get(str(k))) for k in KS), *values]


WORDING = Wording(
    heads=("", "queries", "passages", *(f"@{k}" for k in KS), *MEASURES),
    row=_row,
    probes="Right passage first or among five (a sample among its own)",
    legend="@k: the share of queries with a right passage among the first k. nDCG, MRR, MAP, recall are trec_eval's.",
    unit="queries",
)


def asks(answered: Answered, texts: TextSet, match: str) -> Asks:
    """Some questions of a part with the passages that were found first."""
    chosen = np.random.default_rng(0).permutation(len(answered.queries))[:QUESTIONS]
    made = []
    for place in chosen.tolist():
        query = texts.queries[answered.queries[place]]
        found = answered.ranking(place)
        right = [is_right(passage, query, texts, match) for passage, _ in found]
        first = right.index(True) + 1 if any(right) else 0
        shown = zip(found[:ANSWERS], right, strict=False)
        made.append(Ask(query.text, [_found(query, *one, is_one) for one, is_one in shown], first))
    title = f"What it finds: {PARTS.get(answered.part, answered.part)}"
    return Asks(title, SENTENCE.format(len(answered.passages)), made)


def is_right(passage: Passage, query: Query, texts: TextSet, match: str) -> bool:
    """Whether a passage is listed as right for a query, or has one of its answers where none is listed."""
    if not query.positives:
        return has_answer(passage.text, query.answers, match)
    # by ids: an index has rows of its own
    return any(texts.passages[row].id == passage.id for row in query.positives)


def _found(query: Query, passage: Passage, score: float, right: bool) -> FoundText:
    return FoundText(
        passage.title or passage.id, passage.source, score, marked(passage.text[:LETTERS], query.text), right
    )


def marked(text: str, question: str) -> list[tuple[str, bool]]:
    """`text` in pieces; those are marked that are words of the question.

    >>> marked("the minimum_value", "find a minimum")
    [('the ', False), ('minimum', True), ('_value', False)]
    """
    wanted = {word for word in words(question) if len(word) >= MARKED}
    pieces: list[tuple[str, bool]] = []
    done = 0
    for match in WORD.finditer(text):
        if match.group().lower() in wanted:
            pieces += [(text[done : match.start()], False), (match.group(), True)]
            done = match.end()
    return [(piece, mark) for piece, mark in [*pieces, (text[done:], False)] if piece]
