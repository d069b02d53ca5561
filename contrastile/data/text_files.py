"""Source: the user's own questions and passages, in the usual formats.

A folder in BEIR's format has corpus.jsonl, queries.jsonl and judgements in qrels. An entry of a file is read by its
keys: DPR (`question`, `positive_ctxs`, `hard_negative_ctxs`, `answers`), Tevatron (`query`, `positive_passages`,
`negative_passages`, or ids into a corpus), FlagEmbedding (`query`, `pos`, `neg`, and a teacher's `pos_scores`,
`neg_scores`); any other entry is a pair or triplet as in sentence-transformers, by the names `anchor`, `query` or
`question`, `positive`, `negative...`, else in the order of its columns: question, positive, negatives, with a list
`scores` of the passages in this order. A passage that is an object may have a `score`.
"""

import ast
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from contrastile._errors import invalid, logger, renamed
from contrastile.data.base import Indices, ProgressFactory, SkipCounter, Skipped, hash_split, sorted_rows
from contrastile.data.entries import (
    BEIR_CORPUS,
    NEGATIVE,
    NUMBERS,
    PASSAGES,
    POSITIVE,
    QUESTIONS,
    ROW_IDS,
    Entry,
    first,
    read_entries,
    read_passages,
    reading,
    text_of,
)
from contrastile.data.texts import Passage, Query, TextSet, text_digest

# letters of the longest list in Python's form: an element takes a few hundred bytes while it is read
LONGEST_LIST = 1 << 17
# names of the ids of passages within an entry
CONTEXT_IDS = ("passage_id", "psg_id", "docid", "id", "_id")


def open_text_files(
    source: Path, *, corpus: Path | None, test: Path | None, held_out: float, bad_rows: float, progress: ProgressFactory
) -> TextSet:
    """The texts of a file with the splits "train" and "held_out": the questions of `test`, or a share of all."""
    texts = _read_files(source, corpus, test, bad_rows=bad_rows, progress=progress)
    train, tests = texts.splits["source"], texts.splits["test"]
    if len(train) < 2:
        got = f"{len(train)} that can be used"
        raise invalid("source", f"hold at least two questions ({source})", got, "One to train on, one to be held out.")
    if test is not None:
        if not len(tests):
            raise invalid("test", f"hold a question ({test})", "none that can be used", "Name a file of questions.")
        return replace(texts, splits={"train": np.setdiff1d(train, tests), "held_out": tests})
    return replace(texts, splits=hash_split(((query.text, [row]) for row, query in enumerate(texts.queries)), held_out))


def open_questions(
    source: Path, *, corpus: Path | None, bad_rows: float, allowed_by: str, progress: ProgressFactory
) -> TextSet:
    """The questions of a file, for evaluation alone, over its passages and those of `corpus`; none to train on."""
    options: dict[str, Any] = {"bad_rows": bad_rows, "allowed_by": allowed_by, "progress": progress}
    texts = _read_files(source, corpus, None, answers_suffice=True, **options)
    if not texts.queries:
        raise invalid("source", f"hold a question ({source})", "none that can be used", "Name a file of questions.")
    return replace(texts, splits={"train": sorted_rows([]), "questions": texts.splits["source"]})


def _read_files(
    source: Path, corpus: Path | None, test: Path | None, *, bad_rows: float, progress: ProgressFactory,
    allowed_by: str = "data.bad_rows", answers_suffice: bool = False,
) -> TextSet:  # fmt: skip
    builder = TextSetBuilder()
    with reading([path for path in (source, corpus, test) if path is not None], progress) as counter:
        with renamed(source="corpus"):
            for passage in read_passages(corpus, counter) if corpus is not None else ():
                builder.add_passage(passage)
        rows = builder.add_questions(source, counter, answers_suffice=answers_suffice)
        with renamed(source="test"):
            test_rows = [] if test is None else builder.add_questions(test, counter, answers_suffice=True)
    skipped = counter.close(source, bad_rows, allowed_by=allowed_by)
    builder.check_ids(source)
    splits = {"source": sorted_rows(rows), "test": sorted_rows(test_rows)}
    return TextSet(builder.passages, builder.queries, splits, skipped)


class Question(NamedTuple):
    """One entry: a question with its passages, or their ids in a corpus; `answers` and `id` as they are written.

    scores: a number or None for each of the positives, then of the negatives; empty where there are none. unnamed: the
    columns that are negatives by their place alone.
    """

    text: Any
    positives: Sequence[Passage | str] = ()
    negatives: Sequence[Passage | str] = ()
    answers: Any = None
    id: Any = None
    scores: Sequence[float | None] = ()
    unnamed: Sequence[str] = ()


class TextSetBuilder:
    """Collects passages and queries: equal texts, or ids, become one passage, equal questions one query."""

    def __init__(self) -> None:
        self.passages: list[Passage] = []
        self.queries: list[Query] = []
        self._passage_rows: dict[bytes, int] = {}
        self._id_rows: dict[str, int] = {}
        self._query_rows: dict[str, int] = {}
        self._query_ids: set[str] = set()
        # questions that have the id of another question
        self._same_id = 0
        # the number of texts that share the id of another text, and the place of the first one
        self._clashes, self._first = 0, ""

    def add_passage(self, passage: Passage) -> int:
        """The row of the passage with this title and text, or id; without an id, its hash becomes its id."""
        digest = text_digest(passage)
        if digest not in self._passage_rows:
            row = self._id_rows.get(passage.id, len(self.passages))
            if row < len(self.passages):
                self._clashes, self._first = self._clashes + 1, self._first or passage.source
            else:
                self.passages.append(passage if passage.id else replace(passage, id=digest.hex()))
            self._passage_rows[digest] = row
        row = self._passage_rows[digest]
        if passage.id:
            self._id_rows.setdefault(passage.id, row)
        return row

    def check_ids(self, source: Path) -> None:
        """Log the number of ids with several texts; raise ValueError where they are too many to be ids."""
        ids = len(self._id_rows)
        if self._clashes > ids:
            got = f"{ids:,} ids for {ids + self._clashes:,} texts, another text the first time at {self._first}"
            remedy = "Leave out ids that count within a question."
            raise invalid("source", f"have ids that are one passage each ({source})", got, remedy)
        if self._clashes:
            texts = "texts whose id another one has: %d, the first at %s"
            message = f"%s: {texts}; they are one passage, with the first text"
            logger.warning(message, source, self._clashes, self._first)
        if self._same_id:
            message = "%s: questions whose id another one has: %d; they have new ids, by which results are told apart"
            logger.warning(message, source, self._same_id)

    def add_questions(self, path: Path, counter: SkipCounter, *, answers_suffice: bool) -> list[int]:
        """The rows of the queries of a file, each once."""
        rows: dict[int, None] = {}
        unnamed: Sequence[str] = ()
        for place, entry in read_entries(path, counter):
            try:
                question = interpret(entry, place)
                rows[self._add_question(question, answers_suffice)] = None
                if not unnamed:
                    unnamed = question.unnamed
            except Skipped as reason:
                counter.skip(reason, place)
        if unnamed:
            message = "%s: columns read as negatives by their place: %s; beside columns called question and positive, "
            logger.warning(message + "only those called negative are read", path, ", ".join(unnamed))
        return list(rows)

    def _add_question(self, question: Question, answers_suffice: bool) -> int:
        text, answers = text_of(question.text), _texts(question.answers)
        if not text.strip():
            raise Skipped("empty question")
        positives, negatives = self._rows(question.positives), self._rows(question.negatives)
        if not positives and not (answers_suffice and answers):
            by_id = any(isinstance(passage, str) for passage in question.positives)
            raise Skipped("positives not in the corpus" if by_id else "no positives")
        # a positive is no negative
        wrong = tuple(row for row in negatives if row not in positives)
        scored = zip(map(self._row, (*question.positives, *question.negatives)), question.scores, strict=False)
        scores = {passage: score for passage, score in scored if passage is not None and score is not None}
        all_scores, identity = tuple(scores.items()), _id(question.id)
        query = Query(identity, text, tuple(positives), negatives=wrong, answers=answers, scores=all_scores)
        row = self._query_rows.setdefault(text, len(self.queries))
        if row == len(self.queries):
            self._same_id += identity in self._query_ids
            names = chain([identity] if identity else [], (f"q{number}" for number in count(row)))
            identity = next(name for name in names if name not in self._query_ids)
            self._query_ids.add(identity)
            self.queries.append(replace(query, id=identity))
        else:
            self.queries[row] = _merged(self.queries[row], query)
        return row

    def _rows(self, passages: Sequence[Passage | str]) -> list[int]:
        """The rows of passages that are not empty, and of ids that are known, each once."""
        return [row for row in dict.fromkeys(map(self._row, passages)) if row is not None]

    def _row(self, passage: Passage | str) -> int | None:
        """The row of a passage or of an id; None for an empty passage and an id that is not known."""
        if isinstance(passage, str):
            return self._id_rows.get(passage)
        return self.add_passage(passage) if passage.text.strip() or passage.title.strip() else None


def _merged(first: Query, second: Query) -> Query:
    """The positives and negatives of both; a positive of one is no negative of the other."""
    positives = dict.fromkeys((*first.positives, *second.positives))
    negatives = dict.fromkeys(row for row in (*first.negatives, *second.negatives) if row not in positives)
    answers = dict.fromkeys((*first.answers, *second.answers))
    scores = tuple({**dict(second.scores), **dict(first.scores)}.items())
    return replace(first, positives=tuple(positives), negatives=tuple(negatives), answers=tuple(answers), scores=scores)


def interpret(entry: Entry, place: str) -> Question:
    """The entry at `place` as a question, by its keys. Raises `Skipped` with the reason."""
    query, answers, identity = first(entry, ("query", "query_text")), entry.get("answers"), entry.get("query_id")
    if "question" in entry and "positive_ctxs" in entry:
        hard, right = entry.get("hard_negative_ctxs") or entry.get("negative_ctxs"), entry["positive_ctxs"]
        both = _contexts(right, place), _contexts(hard, place)
        return Question(entry["question"], *both, answers, scores=_own_scores(right, hard))
    if "positive_passages" in entry:
        right, wrong = entry["positive_passages"], entry.get("negative_passages")
        both = _contexts(right, place), _contexts(wrong, place)
        return Question(query, *both, answers, identity, _own_scores(right, wrong))
    if "positive_document_ids" in entry:
        positives, negatives = (_document_ids(entry.get(f"{side}_document_ids")) for side in ("positive", "negative"))
        return Question(query, positives, negatives, id=identity)
    if "pos" in entry:
        right, wrong = _plain(entry["pos"], place), _plain(entry.get("neg"), place)
        scores = [*_scores(entry.get("pos_scores"), right), *_scores(entry.get("neg_scores"), wrong)]
        return Question(query, right, wrong, scores=scores)
    return _columns(entry, place)


def _columns(entry: Entry, place: str) -> Question:
    """Question, positive, negatives, by their names or in this order.

    Two columns may be a question and a list of its answers, as in DPR's test files. A negative may be a list of texts.
    """
    scores = entry.get("scores")
    if isinstance(scores, str) and scores.startswith("["):
        scores = _listed(scores)
    for name in NUMBERS & entry.keys() - ({"scores"} if isinstance(scores, list) else set()):
        try:
            matches = float(entry[name] or 0) > 0
        except (TypeError, ValueError, OverflowError):
            raise Skipped("a label that is no number") from None
        if not matches:
            raise Skipped("a pair that is no match")
    texts = {name: value for name, value in entry.items() if name not in NUMBERS | ROW_IDS}
    anchor = next((name for name in QUESTIONS if name in texts), None)
    if anchor is not None and POSITIVE in texts:
        numbered = {key: value for key, value in texts.items() if key.startswith(NEGATIVE)}
        texts = {anchor: texts[anchor], POSITIVE: texts[POSITIVE], **numbered}
    head = next(iter(texts), "")
    if anchor not in (None, head):
        raise Skipped(f"{anchor} not the first column")
    if head in PASSAGES or head.startswith(NEGATIVE):
        raise Skipped(f"{head} where the question belongs")
    if len(texts) < 2:
        raise Skipped("no positives")
    question, positive, *others = texts.values()
    if isinstance(positive, str) and positive.startswith("[") and not others:
        answers = _listed(positive)
        if answers is not None:
            return Question(question, answers=_texts(answers))
    right, wrong = _plain(positive, place), [passage for text in others for passage in _plain(text, place)]
    listed = _scores(scores, [*right, *wrong]) if isinstance(scores, list) else ()
    unnamed = [name for name in list(texts)[2:] if "neg" not in name and not name.isdecimal()]
    return Question(question, right, wrong, scores=listed, unnamed=unnamed)


def _scores(values: Any, passages: Sequence[Passage]) -> list[float | None]:
    if not values:
        return [None] * len(passages)
    if not isinstance(values, list) or len(values) != len(passages):
        raise Skipped("scores of another number than passages")
    return [_score(value) for value in values]


def _score(value: Any) -> float | None:
    """A finite number; None for no score."""
    try:
        score = None if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if score is not None and not math.isfinite(score):
        raise Skipped("a score that is no number")
    return score


def _own_scores(*lists: Any) -> list[float | None]:
    return [_score(entry.get("score")) for entries in lists for entry in entries or ()]


def _listed(text: str) -> Any:
    """The list that `text` is in Python's form; None for any other text. Raises `Skipped` for one that is too long."""
    if len(text) > LONGEST_LIST and text.rstrip().endswith("]"):
        raise Skipped("a list of answers that is too long")
    try:
        return ast.literal_eval(text) if len(text) <= LONGEST_LIST else None
    except (ValueError, SyntaxError):
        return None
    except (TypeError, RecursionError, MemoryError):
        raise Skipped("a list of answers that cannot be read") from None


def _contexts(entries: Any, place: str) -> list[Passage]:
    if not isinstance(entries, list | None) or not all(isinstance(entry, dict) for entry in entries or ()):
        raise Skipped("passages that are no objects")
    return [
        Passage(_id(first(entry, CONTEXT_IDS)), text_of(entry.get("text")), text_of(entry.get("title") or ""), place)
        for entry in entries or ()
    ]


def _document_ids(ids: Any) -> list[str]:
    if not isinstance(ids, list | None):
        raise Skipped("ids that are no list")
    return list(map(str, ids or ()))


def _id(value: object) -> str:
    return "" if value is None else str(value)


def _plain(value: Any, place: str) -> list[Passage]:
    return [Passage("", text, source=place) for text in _texts(value)]


def _texts(value: Any) -> tuple[str, ...]:
    values = () if value is None else value if isinstance(value, list | tuple) else [value]
    return tuple(map(text_of, values))


def open_beir(
    folder: Path, *, bad_rows: float, allowed_by: str = "data.bad_rows", progress: ProgressFactory
) -> TextSet:
    """A folder with corpus.jsonl, queries.jsonl and qrels/*.tsv; each file of qrels is a split by its name.

    A passage with a question's own id is that question (ArguAna, Quora). It is left out of the question's results,
    unless it is judged to be right.
    """
    judged = sorted((folder / "qrels").glob("*.tsv"))
    missing = [name for name in (BEIR_CORPUS, "queries.jsonl") if not (folder / name).is_file()]
    if missing or not judged:
        got = f"{folder} without {', '.join(missing) or 'qrels/*.tsv'}"
        raise invalid("source", "be a folder in BEIR's format", got, "It needs corpus.jsonl, queries.jsonl, qrels.")
    with reading([folder], progress) as counter:
        passages = _by_id(folder / BEIR_CORPUS, counter)
        texts = {identity: passage.text for identity, passage in _by_id(folder / "queries.jsonl", counter).items()}
        rows = {identity: row for row, identity in enumerate(passages)}
        queries: list[Query] = []
        splits: dict[str, Indices] = {"train": sorted_rows([])}
        for path in judged:
            start = len(queries)
            queries.extend(_judged(path, texts, rows, counter))
            splits[path.stem] = sorted_rows(range(start, len(queries)))
            if len(queries) == start:
                logger.warning("%s: no question has a right passage by this file, and %s is left out", path, path.stem)
    if count := sum(query.itself is not None for query in queries):
        message = "%s: %d of %d questions have a passage's id, which is taken for the question itself: no result of it"
        logger.warning(message, folder, count, len(queries))
    skipped = counter.close(folder, bad_rows, allowed_by=allowed_by)
    return TextSet(list(passages.values()), queries, splits, skipped)


def _by_id(path: Path, counter: SkipCounter) -> dict[str, Passage]:
    """The first passage of each id: judgements, which name ids, cannot mean another one."""
    passages: dict[str, Passage] = {}
    for passage in read_passages(path, counter):
        if passages.setdefault(passage.id, passage) is not passage:
            counter.skip("id seen before", passage.source)
    return passages


def _judged(path: Path, texts: dict[str, str], rows: dict[str, int], counter: SkipCounter) -> Iterator[Query]:
    """The queries of one file of judgements, with their positives; a passage has one grade of a query."""
    grades: dict[str, dict[int, int]] = {}
    for place, entry in read_entries(path, counter):
        # query, passage and grade by their names, or of three columns or TREC's four
        values = list(entry.values())
        try:
            query, passage = str(entry.get("query-id", values[0])), str(entry.get("corpus-id", values[-2]))
            grade = float(entry.get("score", values[-1]))
        except (IndexError, ValueError):
            counter.skip("no judgement", place)
            continue
        if not grade.is_integer():
            # a half that was cut to 0 would make a right passage a wrong one
            counter.skip("no judgement", place)
        elif query not in texts:
            counter.skip("query id not in queries.jsonl", place)
        elif passage not in rows:
            counter.skip("passage id not in corpus.jsonl", place)
        elif grades.setdefault(query, {}).setdefault(rows[passage], int(grade)) != grade:
            got = f'"{query} {passage} {int(grade)}" at {place}'
            raise invalid("source", "have one grade of each passage per query", got, "Leave one of them out.")
    for query, judged in grades.items():
        # a passage that is judged to be wrong is no positive, and no error
        if right := {row: grade for row, grade in judged.items() if grade > 0}:
            grades_of = () if set(right.values()) == {1} else tuple(right.values())
            itself = rows.get(query)
            itself = None if itself in right else itself
            yield Query(query, texts[query], tuple(right), grades_of, itself=itself)
