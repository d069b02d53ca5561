"""Results of a retriever: evaluation, run files for other tools, and samples of questions with the passages found.

Samples are plain JSON: a part has `title`, `sentence` and
`asks`; each of these a `question`, the passages `found`, the best first, and the `place` of the first right one, 0 if
none is right. A passage has `name`, `source`, `score`, `right` and `pieces` of its text, each with a mark; the best one
of a late retriever has an `alignment` too.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from contrastile.data.texts import WORD, Passage, Query, TextSet, words
from contrastile.evaluate.ranking import has_answer, write_judgements, write_run
from contrastile.train.folder import EVALUATION, QUESTIONS, RunFolder
from contrastile.train.report.alignment import alignment
from contrastile.train.report.page import Samples, Wording, counted, percent, stored_samples, table_text, write_report
from contrastile.train.retriever.evaluation import (
    KS,
    MEASURES,
    PARTS,
    FirstStage,
    Rankings,
    Searchable,
    evaluate,
    judgements_of,
    rank_all,
    run_of,
)
from contrastile.train.retriever.run import RetrieverRun, TokenStore

logger = logging.getLogger("contrastile")

# questions shown of each part, passages shown to each, letters shown of each passage
SHOWN, ANSWERS, LETTERS = 8, 4, 2400
# the shortest word of a question that is marked in a passage, in letters, and longer ones that say nothing
MARKED = 3
UNMARKED = re.compile(
    "about|after|all|also|and|any|are|been|before|but|can|could|did|does|each|for|from|had|has|have|how|into|its|may|"
    "more|most|not|only|other|our|out|over|should|some|such|than|that|the|their|them|then|there|these|they|this|those|"
    "through|under|use|using|very|was|were|what|when|where|which|who|why|will|with|would|you|your"
)
SENTENCE = (
    "Random questions and the best of all {:,} passages; words of the question are marked. A tick marks a passage that "
    "the data list as right, or one with an answer if none is listed; others may be right as well."
)


def evaluate_and_report(
    folder: RunFolder,
    run: RetrieverRun,
    texts: TextSet,
    passages: TokenStore | Searchable,
    first_stage: FirstStage | None = None,
    *,
    beside: bool = False,
) -> str:
    """Evaluate; write evaluation.json, the run files and report.html; the table of results as text.

    passages: the tokens of the texts' own, or an index. first_stage: the candidates that a late retriever scores.
    beside: keep the folder's results on other texts.
    """
    answered = rank_all(run, texts, passages, first_stage)
    results, match = evaluate(run.recipe, texts, answered), run.recipe.evaluate.match
    retrieved = [rankings for rankings in answered if rankings.system == "retriever"]
    # a picture for the first passage of each question alone: it takes an encoding of both
    picture = partial(alignment, run) if run.recipe.model.kind == "late" else None
    questions = [question_samples(rankings, texts, match, picture) for rankings in retrieved]
    tested, titles = {row["test"] for row in results}, {sample["title"] for sample in questions}
    before = folder.read_json(EVALUATION) if beside and (folder / EVALUATION).is_file() else []
    folder.write_json(EVALUATION, [*(row for row in before if row["test"] not in tested), *results])
    write_runs(folder, texts, answered)
    stored = stored_samples(folder, QUESTIONS) if beside else []
    shown = [sample for sample in stored if sample["title"] not in titles]
    write_report(folder, questions=[*shown, *questions], wording=WORDING)
    return table_text(results, WORDING)


def write_runs(folder: RunFolder, texts: TextSet, answered: Sequence[Rankings]) -> None:
    """Write `<part>.<system>.trec` and `<part>.qrels`, the formats of trec_eval."""
    try:
        for rankings in answered:
            with folder.written_whole(f"{rankings.part}.qrels") as path:
                write_judgements(path, judgements_of(rankings.queries, texts))
            with folder.written_whole(f"{rankings.part}.{rankings.system}.trec") as path:
                write_run(path, run_of(rankings, texts), tag=rankings.system)
    except ValueError as reason:
        # these formats have no ids with blanks; all other files are complete
        logger.warning("run files are not written: %s", reason)


def _row(row: Mapping[str, Any]) -> list[str]:
    values = (percent(row["measures"].get(name)) for name in MEASURES)
    return [*counted(row), *(percent(row["recall"].get(str(k))) for k in KS), *values]


WORDING = Wording(
    heads=("", "queries", "passages", *(f"@{k}" for k in KS), *MEASURES),
    row=_row,
    probes="Right passage first or among five (a sample among its own)",
    legend="@k: the share of queries with a right passage among the first k. nDCG, MRR, MAP, recall are trec_eval's.",
    use="""\
contrastile encode {run}
contrastile search {run} "a question\"""",
    unit="queries",
    parts=PARTS,
)


def question_samples(
    answered: Rankings, texts: TextSet, match: str, picture: Callable[[str, Passage], Any] | None = None
) -> dict[str, Any]:
    """Samples of one part: random questions, the same every time, with their best passages.

    picture: makes the `alignment` of the best one.
    """
    chosen = np.random.default_rng(0).permutation(len(answered.queries))[:SHOWN]
    samples: Samples = []
    for index in chosen.tolist():
        query = texts.queries[answered.queries[index]]
        ranking = answered.ranking(index)
        right = [is_right(passage, query, texts, match) for passage, _ in ranking]
        passages: Samples = []
        for (passage, score), one_right in zip(ranking[:ANSWERS], right, strict=False):
            pieces, name = marked(passage.text[:LETTERS], query.text), passage.title or passage.id
            shown = {"name": name, "source": passage.source, "score": score, "pieces": pieces, "right": one_right}
            if picture is not None and not passages:
                shown["alignment"] = picture(query.text, passage)
            passages.append(shown)
        rank = right.index(True) + 1 if any(right) else 0
        samples.append({"question": query.text, "found": passages, "place": rank})
    title = f"What it finds: {PARTS.get(answered.part, answered.part)}"
    return {"title": title, "sentence": SENTENCE.format(len(answered.passages)), "asks": samples}


def is_right(passage: Passage, query: Query, texts: TextSet, match: str) -> bool:
    """True if a passage is listed as right for a query, or contains an answer if none is listed."""
    if not query.positives:
        return has_answer(passage.text, query.answers, match)
    # by ids, because the rows of an index differ
    return any(texts.passages[row].id == passage.id for row in query.positives)


def marked(text: str, question: str) -> list[tuple[str, bool]]:
    """`text` in pieces, with a mark on words of the question.

    >>> marked("the minimum_value", "find the minimum")
    [('the ', False), ('minimum', True), ('_value', False)]
    """
    question_words = {word for word in words(question) if len(word) >= MARKED and not UNMARKED.fullmatch(word)}
    pieces: list[tuple[str, bool]] = []
    end = 0
    for match in WORD.finditer(text):
        if match.group().lower() in question_words:
            pieces += [(text[end : match.start()], False), (match.group(), True)]
            end = match.end()
    return [(piece, mark) for piece, mark in [*pieces, (text[end:], False)] if piece]
