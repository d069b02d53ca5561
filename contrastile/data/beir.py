"""Source: a folder in BEIR's format, with corpus.jsonl, queries.jsonl and judgements in qrels.

Stands between `entries.py`, `passages.py` and the registry.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from contrastile._errors import invalid
from contrastile.data.base import Indices, ProgressFactory, SkipCounter, Skipped, sorted_rows
from contrastile.data.entries import Entry, read_entries, reading
from contrastile.data.passages import BEIR_CORPUS, read_passages
from contrastile.data.texts import Passage, Query, TextOptions, TextSet

logger = logging.getLogger("contrastile")


def open_beir_source(source: str, options: TextOptions) -> TextSet:
    """The texts of a folder, with mined negatives."""
    texts = open_beir(Path(source).expanduser(), bad_rows=options.bad_rows, progress=options.progress)
    return options.with_negatives(texts)


def open_beir(
    folder: Path, *, bad_rows: float, allowed_by: str = "data.bad_rows", progress: ProgressFactory
) -> TextSet:
    """A folder with corpus.jsonl, queries.jsonl and qrels/*.tsv; each file of qrels is a split by its name.

    A passage with a question's own id is that question (ArguAna, Quora), and no result of it, as in BEIR's evaluation,
    unless it is judged to be right.
    """
    judged = sorted((folder / "qrels").glob("*.tsv"))
    missing = [name for name in (BEIR_CORPUS, "queries.jsonl") if not (folder / name).is_file()]
    if missing or not judged:
        got = f"{folder} without {', '.join(missing) or 'qrels/*.tsv'}"
        raise invalid("source", "be a folder in BEIR's format", got, "It needs corpus.jsonl, queries.jsonl, qrels.")
    with reading([folder], progress) as counter:
        passages = list(_once(read_passages(folder, counter), counter))
        texts = {
            passage.id: passage.text for passage in _once(read_passages(folder / "queries.jsonl", counter), counter)
        }
        rows = {passage.id: row for row, passage in enumerate(passages)}
        queries: list[Query] = []
        splits: dict[str, Indices] = {"train": sorted_rows([])}
        for path in judged:
            start = len(queries)
            queries.extend(_judged(path, texts, rows, counter))
            splits[path.stem] = sorted_rows(range(start, len(queries)))
    if count := sum(query.itself is not None for query in queries):
        message = "%s: %d of %d questions have a passage's id, which is taken for the question itself: no result of it"
        logger.warning(message, folder, count, len(queries))
    return TextSet(passages, queries, splits, counter.close(folder, bad_rows, allowed_by=allowed_by))


def _once(passages: Iterator[Passage], counter: SkipCounter) -> Iterator[Passage]:
    """The first passage of each id: judgements cannot tell the others from it."""
    seen: set[str] = set()
    for passage in passages:
        if passage.id in seen:
            path, _, line = passage.source.rpartition(":")
            counter.skip("id seen before", Path(path), int(line))
        else:
            seen.add(passage.id)
            yield passage


def _judged(path: Path, texts: dict[str, str], rows: dict[str, int], counter: SkipCounter) -> Iterator[Query]:
    """The queries of one file of judgements, with their positives."""
    grades: dict[str, dict[int, int]] = {}
    for line, entry in read_entries(path, counter):
        try:
            query, passage, grade = _judgement(entry)
            if query not in texts:
                raise Skipped("query id not in queries.jsonl")
            if passage not in rows:
                raise Skipped("passage id not in corpus.jsonl")
        except Skipped as reason:
            counter.skip(str(reason), path, line)
        else:
            # a passage that is judged to be wrong is known, and no positive
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
        raise Skipped("no judgement") from None
