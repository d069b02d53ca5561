"""One's own questions and passages, in the formats that people have.

A source of the flow's first box for retrieval. An entry is read by its keys: DPR (`question`, `positive_ctxs`,
`hard_negative_ctxs`, `answers`), Tevatron (`query`, `positive_passages`, `negative_passages`, or ids into a corpus),
FlagEmbedding (`query`, `pos`, `neg`); any other entry is a pair or triplet as in sentence-transformers, by the names
`anchor`, `query` or `question`, `positive`, `negative...`, else in the order of its columns: question, positive,
negatives. A folder is in BEIR's format. What cannot be used is counted by its reason.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from contrastile._check import wrong
from contrastile.data.corpora import BEIR_CORPUS, first, read_corpus
from contrastile.data.entries import Entry, Tally, Unusable, read_entries, reading, text_of
from contrastile.data.pairs import Indices, ProgressFactory, silent
from contrastile.data.texts import Gathering, Passage, Query, TextSet, sorted_rows, split_by_lot

logger = logging.getLogger("contrastile")

# columns of a table of pairs that are no texts
NUMBERS = {"label", "labels", "score", "scores"}
# what columns are called where their order does not matter; negatives may be numbered
QUESTIONS, POSITIVE, NEGATIVE = ("anchor", "query", "question"), "positive", "negative"


@dataclass(frozen=True, slots=True)
class Row:
    """What one entry says: a question, its passages as (id, title, text), or their ids in a corpus."""

    question: str
    positives: Sequence[tuple[str, str, str]] = ()
    negatives: Sequence[tuple[str, str, str]] = ()
    positive_ids: Sequence[str] = ()
    negative_ids: Sequence[str] = ()
    answers: tuple[str, ...] = ()
    id: str = ""


def open_text_files(
    source: Path, *, corpus: Path | None, test: Path | None, held_out: float, bad_rows: float, progress: ProgressFactory
) -> TextSet:
    """The texts of a file or of a BEIR folder; the splits are "train" and those held out."""
    if source.is_dir():
        return open_beir(source, bad_rows=bad_rows, progress=progress)
    gathering = Gathering()
    with reading([path for path in (source, corpus, test) if path is not None], progress) as tally:
        for passage in read_corpus(corpus, tally) if corpus is not None else ():
            gathering.add(passage)
        train = _gathered(source, gathering, tally, answers_suffice=False)
        tests = [] if test is None else _gathered(test, gathering, tally, answers_suffice=True)
    skipped = tally.close(source, bad_rows)
    gathering.close(source)
    if len(train) < 2:
        got = f"{len(train)} that can be used"
        raise wrong("source", f"hold at least two questions ({source})", got, "One to train on, one to be held out.")
    if test is None:
        return TextSet(gathering.passages, gathering.queries, split_by_lot(gathering.queries, held_out), skipped)
    asked = set(tests)
    splits = {"train": sorted_rows([row for row in train if row not in asked]), "held_out": sorted_rows(tests)}
    return TextSet(gathering.passages, gathering.queries, splits, skipped)


def open_questions(
    source: Path,
    *,
    corpus: Path | None,
    bad_rows: float,
    allowed_by: str = "data.bad_rows",
    progress: ProgressFactory = silent,
) -> TextSet:
    """The questions of a file, all of which are only asked: the split "questions"; and none to train on.

    Looked for are the passages of `corpus`, and those that the file has.
    """
    gathering = Gathering()
    with reading([path for path in (source, corpus) if path is not None], progress) as tally:
        for passage in read_corpus(corpus, tally) if corpus is not None else ():
            gathering.add(passage)
        asked = _gathered(source, gathering, tally, answers_suffice=True)
    skipped = tally.close(source, bad_rows, allowed_by=allowed_by)
    gathering.close(source)
    if not asked:
        raise wrong("source", f"hold a question ({source})", "none that can be used", "Name a file of questions.")
    splits = {"train": sorted_rows([]), "questions": sorted_rows(asked)}
    return TextSet(gathering.passages, gathering.queries, splits, skipped)


def _gathered(path: Path, gathering: Gathering, tally: Tally, *, answers_suffice: bool) -> list[int]:
    """The rows of the queries of a file, each once."""
    rows: dict[int, None] = {}
    for line, entry in read_entries(path, tally):
        try:
            rows[_gather(interpret(entry), gathering, answers_suffice, f"{path}:{line}")] = None
        except Unusable as reason:
            tally.skip(str(reason), path, line)
    return list(rows)


def _gather(row: Row, gathering: Gathering, answers_suffice: bool, place: str) -> int:
    if not row.question.strip():
        raise Unusable("empty question")
    positives, negatives = (
        [
            *(known for identity in identities if (known := gathering.called(identity)) is not None),
            *(
                gathering.add(Passage(identity, text, title, place))
                for identity, title, text in passages
                if text.strip() or title.strip()
            ),
        ]
        for passages, identities in ((row.positives, row.positive_ids), (row.negatives, row.negative_ids))
    )
    if not positives and not (answers_suffice and row.answers):
        raise Unusable("positives not in the corpus" if row.positive_ids else "no positives")
    right = tuple(dict.fromkeys(positives))
    wrong_ones = tuple(dict.fromkeys(passage for passage in negatives if passage not in right))
    return gathering.query(Query(row.id, row.question, right, negatives=wrong_ones, answers=row.answers))


def interpret(entry: Entry) -> Row:
    """What an entry says, by its keys. Raises `Unusable` with the reason."""
    if "question" in entry and "positive_ctxs" in entry:
        hard = entry.get("hard_negative_ctxs") or entry.get("negative_ctxs")
        positives, negatives = _contexts(entry["positive_ctxs"]), _contexts(hard)
        return Row(text_of(entry["question"]), positives, negatives, answers=_texts(entry.get("answers")))
    question = first(entry, ("query", "query_text"))
    if "positive_passages" in entry:
        positives, negatives = _contexts(entry["positive_passages"]), _contexts(entry.get("negative_passages"))
        answers = _texts(entry.get("answers"))
        return Row(text_of(question), positives, negatives, answers=answers, id=_id(entry.get("query_id")))
    if "positive_document_ids" in entry:
        ids = [[str(one) for one in entry.get(f"{side}_document_ids") or ()] for side in ("positive", "negative")]
        return Row(text_of(question), positive_ids=ids[0], negative_ids=ids[1], id=_id(entry.get("query_id")))
    if "pos" in entry:
        return Row(text_of(question), _plain(_texts(entry["pos"])), _plain(_texts(entry.get("neg"))))
    return _columns(entry)


def _columns(entry: Entry) -> Row:
    """Question, positive, negatives, by their names or in this order.

    Two columns may be a question and a list of its answers, as in DPR's test files. A negative may be a list of texts.
    """
    for name in NUMBERS & entry.keys():
        if not _matches(entry[name]):
            raise Unusable("a pair that is no match")
    texts = {name: value for name, value in entry.items() if name not in NUMBERS}
    asked = next((name for name in QUESTIONS if name in texts), None)
    if asked is not None and POSITIVE in texts:
        texts = {asked: texts.pop(asked), POSITIVE: texts.pop(POSITIVE), **texts}
        texts = {name: value for name, value in texts.items() if name in (asked, POSITIVE) or name.startswith(NEGATIVE)}
    if len(texts) < 2:
        raise Unusable("no positives")
    question, positive, *negatives = texts.values()
    if isinstance(positive, str) and positive.startswith("[") and not negatives:
        try:
            return Row(text_of(question), answers=_texts(ast.literal_eval(positive)))
        except (ValueError, SyntaxError):
            pass
    return Row(text_of(question), _plain(_texts(positive)), _plain([text for one in negatives for text in _texts(one)]))


def _matches(label: Any) -> bool:
    try:
        return float(label or 0) > 0
    except (TypeError, ValueError):
        raise Unusable("a label that is no number") from None


def _contexts(entries: Any) -> list[tuple[str, str, str]]:
    if not isinstance(entries, list | None) or not all(isinstance(entry, dict) for entry in entries or ()):
        raise Unusable("passages that are no objects")
    names = ("passage_id", "psg_id", "docid", "id", "_id")
    return [
        (_id(first(entry, names)), text_of(entry.get("title") or ""), text_of(entry.get("text")))
        for entry in entries or ()
    ]


def _id(value: object) -> str:
    """An id as a text, "" where there is none; 0 is one."""
    return "" if value is None else str(value)


def _plain(texts: Sequence[str]) -> list[tuple[str, str, str]]:
    return [("", "", text) for text in texts]


def _texts(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    return tuple(text_of(one) for one in (value if isinstance(value, list | tuple) else [value]))


def open_beir(
    folder: Path, *, bad_rows: float, allowed_by: str = "data.bad_rows", progress: ProgressFactory
) -> TextSet:
    """A folder with corpus.jsonl, queries.jsonl and qrels/*.tsv; each file of qrels is a split by its name.

    A passage of a question's own id is that question (ArguAna, Quora), and no result of it, as in BEIR's evaluation;
    unless it is judged to be right.
    """
    judged = sorted((folder / "qrels").glob("*.tsv"))
    missing = [name for name in (BEIR_CORPUS, "queries.jsonl") if not (folder / name).is_file()]
    if missing or not judged:
        got = f"{folder} without {', '.join(missing) or 'qrels/*.tsv'}"
        raise wrong("source", "be a folder in BEIR's format", got, "It needs corpus.jsonl, queries.jsonl, qrels.")
    with reading([folder], progress) as tally:
        passages = list(_once(read_corpus(folder, tally), tally))
        texts = {passage.id: passage.text for passage in _once(read_corpus(folder / "queries.jsonl", tally), tally)}
        rows = {passage.id: row for row, passage in enumerate(passages)}
        queries: list[Query] = []
        splits: dict[str, Indices] = {"train": np.array([], dtype=np.int64)}
        for path in judged:
            start = len(queries)
            queries.extend(_judged(path, texts, rows, tally))
            splits[path.stem] = np.arange(start, len(queries))
    if count := sum(query.itself is not None for query in queries):
        said = "%s: %d of %d questions have a passage's id, which is taken for the question itself: no result of it"
        logger.warning(said, folder, count, len(queries))
    return TextSet(passages, queries, splits, tally.close(folder, bad_rows, allowed_by=allowed_by))


def _once(passages: Iterator[Passage], tally: Tally) -> Iterator[Passage]:
    """Each id once, the first of them: judgements could not tell the others from it."""
    seen: set[str] = set()
    for passage in passages:
        if passage.id in seen:
            path, _, line = passage.source.rpartition(":")
            tally.skip("id seen before", Path(path), int(line))
        else:
            seen.add(passage.id)
            yield passage


def _judged(path: Path, texts: dict[str, str], rows: dict[str, int], tally: Tally) -> Iterator[Query]:
    """The queries of one file of judgements, with what it calls right."""
    grades: dict[str, dict[int, int]] = {}
    for line, entry in read_entries(path, tally):
        try:
            query, passage, grade = _judgement(entry)
            if query not in texts:
                raise Unusable("query id not in queries.jsonl")
            if passage not in rows:
                raise Unusable("passage id not in corpus.jsonl")
        except Unusable as reason:
            tally.skip(str(reason), path, line)
        else:
            # judged and wrong: known, and nothing to be found
            right = grades.setdefault(query, {})
            if grade > 0:
                right[rows[passage]] = grade
    for query, right in grades.items():
        if right:
            grades_of = () if set(right.values()) == {1} else tuple(right.values())
            itself = rows.get(query)
            itself = None if itself in right else itself
            yield Query(query, texts[query], tuple(right), grades_of, itself=itself)


def _judgement(entry: Entry) -> tuple[str, str, int]:
    """Query, passage and grade, of three columns or TREC's four."""
    values = list(entry.values())
    try:
        return str(values[0]), str(values[-2]), int(float(values[-1]))
    except (IndexError, ValueError, OverflowError):
        raise Unusable("no judgement") from None
