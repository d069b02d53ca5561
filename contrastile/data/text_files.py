"""Source: the user's own questions and passages, in the usual formats.

Stands between `entries.py`, `passages.py` and the registry. An entry is read by its keys: DPR (`question`,
`positive_ctxs`, `hard_negative_ctxs`, `answers`), Tevatron (`query`, `positive_passages`, `negative_passages`, or ids
into a corpus), FlagEmbedding (`query`, `pos`, `neg`); any other entry is a pair or triplet as in sentence-transformers,
by the names `anchor`, `query` or `question`, `positive`, `negative...`, else in the order of its columns: question,
positive, negatives. An entry that cannot be used is counted by its reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contrastile._errors import invalid
from contrastile.data.base import ProgressFactory, SkipCounter, Skipped, hash_split, silent, sorted_rows
from contrastile.data.entries import Entry, read_entries, reading, text_of
from contrastile.data.passages import first, read_passages
from contrastile.data.texts import Passage, Query, TextOptions, TextSet, TextSetBuilder

# columns of a table of pairs that hold no texts
NUMBERS = {"label", "labels", "score", "scores"}
# names of columns in any order; negatives may be numbered
QUESTIONS, POSITIVE, NEGATIVE = ("anchor", "query", "question"), "positive", "negative"


@dataclass(frozen=True, slots=True)
class Question:
    """One entry: a question with its passages as (id, title, text), or with their ids in a corpus."""

    text: str
    positives: Sequence[tuple[str, str, str]] = ()
    negatives: Sequence[tuple[str, str, str]] = ()
    positive_ids: Sequence[str] = ()
    negative_ids: Sequence[str] = ()
    answers: tuple[str, ...] = ()
    id: str = ""


def open_text_files(source: str, options: TextOptions) -> TextSet:
    """The texts of a file; the splits are "train" and "held_out"."""
    path, corpus, test = Path(source).expanduser(), options.corpus, options.test
    builder = TextSetBuilder()
    with reading([file for file in (path, corpus, test) if file is not None], options.progress) as counter:
        _add_corpus(corpus, builder, counter)
        train = _add_questions(path, builder, counter, answers_suffice=False)
        tests = [] if test is None else _add_questions(test, builder, counter, answers_suffice=True)
    skipped = counter.close(path, options.bad_rows)
    builder.close(path)
    if len(train) < 2:
        got = f"{len(train)} that can be used"
        raise invalid("source", f"hold at least two questions ({path})", got, "One to train on, one to be held out.")
    if test is None:
        splits = hash_split(((query.text, [row]) for row, query in enumerate(builder.queries)), options.held_out)
    else:
        splits = {"train": sorted_rows(sorted(set(train) - set(tests))), "held_out": sorted_rows(tests)}
    return options.with_negatives(TextSet(builder.passages, builder.queries, splits, skipped))


def open_questions(
    source: Path,
    *,
    corpus: Path | None,
    bad_rows: float,
    allowed_by: str = "data.bad_rows",
    progress: ProgressFactory = silent,
) -> TextSet:
    """The questions of a file for evaluation alone: the split "questions", and an empty one to train on.

    The corpus has the passages of `corpus`, and those of the file.
    """
    builder = TextSetBuilder()
    with reading([path for path in (source, corpus) if path is not None], progress) as counter:
        _add_corpus(corpus, builder, counter)
        questions = _add_questions(source, builder, counter, answers_suffice=True)
    skipped = counter.close(source, bad_rows, allowed_by=allowed_by)
    builder.close(source)
    if not questions:
        raise invalid("source", f"hold a question ({source})", "none that can be used", "Name a file of questions.")
    splits = {"train": sorted_rows([]), "questions": sorted_rows(questions)}
    return TextSet(builder.passages, builder.queries, splits, skipped)


def _add_corpus(corpus: Path | None, builder: TextSetBuilder, counter: SkipCounter) -> None:
    for passage in read_passages(corpus, counter) if corpus is not None else ():
        builder.add_passage(passage)


def _add_questions(path: Path, builder: TextSetBuilder, counter: SkipCounter, *, answers_suffice: bool) -> list[int]:
    """The rows of the queries of a file, each once."""
    rows: dict[int, None] = {}
    for line, entry in read_entries(path, counter):
        try:
            rows[_add_question(interpret(entry), builder, answers_suffice, f"{path}:{line}")] = None
        except Skipped as reason:
            counter.skip(str(reason), path, line)
    return list(rows)


def _add_question(question: Question, builder: TextSetBuilder, answers_suffice: bool, place: str) -> int:
    if not question.text.strip():
        raise Skipped("empty question")

    def rows(ids: Sequence[str], passages: Sequence[tuple[str, str, str]]) -> list[int]:
        known = (builder.row_of_id(identity) for identity in ids)
        written = (Passage(*passage, place) for passage in _id_text_title(passages))
        return [*(row for row in known if row is not None), *map(builder.add_passage, written)]

    positives, negatives = (
        rows(question.positive_ids, question.positives),
        rows(question.negative_ids, question.negatives),
    )
    if not positives and not (answers_suffice and question.answers):
        raise Skipped("positives not in the corpus" if question.positive_ids else "no positives")
    right = tuple(dict.fromkeys(positives))
    wrong = tuple(dict.fromkeys(row for row in negatives if row not in right))
    return builder.add_query(Query(question.id, question.text, right, negatives=wrong, answers=question.answers))


def _id_text_title(passages: Sequence[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """Passages that are not empty, in the order of the fields of `Passage`."""
    return ((identity, text, title) for identity, title, text in passages if text.strip() or title.strip())


def interpret(entry: Entry) -> Question:
    """An entry as a question, by its keys. Raises `Skipped` with the reason."""
    if "question" in entry and "positive_ctxs" in entry:
        hard = entry.get("hard_negative_ctxs") or entry.get("negative_ctxs")
        positives, negatives = _contexts(entry["positive_ctxs"]), _contexts(hard)
        return Question(text_of(entry["question"]), positives, negatives, answers=_texts(entry.get("answers")))
    question = first(entry, ("query", "query_text"))
    if "positive_passages" in entry:
        positives, negatives = _contexts(entry["positive_passages"]), _contexts(entry.get("negative_passages"))
        answers = _texts(entry.get("answers"))
        return Question(text_of(question), positives, negatives, answers=answers, id=_id(entry.get("query_id")))
    if "positive_document_ids" in entry:
        ids = [[str(one) for one in entry.get(f"{side}_document_ids") or ()] for side in ("positive", "negative")]
        return Question(text_of(question), positive_ids=ids[0], negative_ids=ids[1], id=_id(entry.get("query_id")))
    if "pos" in entry:
        return Question(text_of(question), _plain(_texts(entry["pos"])), _plain(_texts(entry.get("neg"))))
    return _columns(entry)


def _columns(entry: Entry) -> Question:
    """Question, positive, negatives, by their names or in this order.

    Two columns may be a question and a list of its answers, as in DPR's test files. A negative may be a list of texts.
    """
    for name in NUMBERS & entry.keys():
        if not _matches(entry[name]):
            raise Skipped("a pair that is no match")
    texts = {name: value for name, value in entry.items() if name not in NUMBERS}
    anchor = next((name for name in QUESTIONS if name in texts), None)
    if anchor is not None and POSITIVE in texts:
        numbered = {key: value for key, value in texts.items() if key.startswith(NEGATIVE)}
        texts = {anchor: texts[anchor], POSITIVE: texts[POSITIVE], **numbered}
    if len(texts) < 2:
        raise Skipped("no positives")
    question, positive, *others = texts.values()
    if isinstance(positive, str) and positive.startswith("[") and not others:
        try:
            return Question(text_of(question), answers=_texts(ast.literal_eval(positive)))
        except (ValueError, SyntaxError):
            pass
    return Question(
        text_of(question), _plain(_texts(positive)), _plain([text for one in others for text in _texts(one)])
    )


def _matches(label: Any) -> bool:
    try:
        return float(label or 0) > 0
    except (TypeError, ValueError):
        raise Skipped("a label that is no number") from None


def _contexts(entries: Any) -> list[tuple[str, str, str]]:
    if not isinstance(entries, list | None) or not all(isinstance(entry, dict) for entry in entries or ()):
        raise Skipped("passages that are no objects")
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
