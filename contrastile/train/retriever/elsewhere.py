"""What a finished retriever is worth on other texts than its recipe's: `contrastile evaluate RUN --texts FOLDER`.

Beside `job.py`, which measures on the run's own. Other texts are a folder in BEIR's format, of which the parts that are
held out are measured, or a file of questions, of which all are. They are encoded as the run encodes its own, with its
prefixes and lengths, and the rows join those that the run has.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from contrastile._check import wrong
from contrastile.data.text_files import open_beir, open_questions
from contrastile.data.texts import TextSet
from contrastile.train.folder import finished_run
from contrastile.train.log import progress
from contrastile.train.retriever.feed import passage_tokens
from contrastile.train.retriever.report import evaluate_and_report
from contrastile.train.retriever.run import load_retriever
from contrastile.train.retriever.search import index_of


def evaluate_texts(
    path: str | Path,
    source: str | Path,
    *,
    corpus: str | Path | None = None,
    index: str | Path | None = None,
    split: str | None = None,
    name: str | None = None,
    bad_rows: float | None = None,
    device: str = "auto",
) -> str:
    """Measure a finished retriever on the texts of `source` alone, put the rows into its results; a table of them.

    corpus: further passages beside a file of questions. index: look among what `contrastile encode` wrote instead. The
    run files and rows are called `name` (the source's unless given) and the part: scifact-test. bad_rows: the share of
    rows that may be unusable; that of the run's recipe unless given.
    """
    folder = finished_run(path)
    opened = None if index is None else index_of(folder, Path(index))
    run = load_retriever(folder.path, device=device)
    allowed = run.recipe.data.bad_rows if bad_rows is None else bad_rows
    texts = open_others(Path(source), corpus=corpus, split=split, name=name, bad_rows=allowed)
    if opened is None and not texts.passages:
        raise wrong(
            "--texts", "come with passages to look among", f'"{source}" alone', "Name a --corpus or an --index."
        )
    passages = passage_tokens(texts.passages, run.tokenizer, run.recipe) if opened is None else opened
    return evaluate_and_report(folder, run, texts, passages, beside=True)


def open_others(
    source: Path, *, corpus: str | Path | None, split: str | None, name: str | None, bad_rows: float
) -> TextSet:
    """The texts with their parts, by name; of a folder all parts but that to train on, or the one that is asked for."""
    allowed: dict[str, Any] = {"bad_rows": bad_rows, "allowed_by": "--bad-rows", "progress": progress}
    if not source.is_dir():
        texts = open_questions(source, corpus=None if corpus is None else Path(corpus), **allowed)
    elif corpus is not None:
        raise wrong("--corpus", f'be left out with the folder "{source}"', f'"{corpus}"', "It has its own passages.")
    else:
        texts = open_beir(source, **allowed)
    there = [part for part, rows in texts.splits.items() if len(rows)]
    asked = [part for part in there if part != "train"] if split is None else [split]
    if not asked or asked[0] not in there:
        got = "none" if split is None else f'"{split}"'
        rule = f'be one of the parts of "{source}" with questions ({", ".join(there) or "none"})'
        raise wrong("--split", rule, got, "Name one of them.")
    called = name or source.name.partition(".")[0]
    parts = {f"{called}-{part}": texts.splits[part] for part in asked}
    return replace(texts, splits={"train": np.array([], dtype=np.int64), **parts})
