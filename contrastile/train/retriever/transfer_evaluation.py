"""A finished retriever measured on texts other than its recipe's: `contrastile evaluate RUN --texts SOURCE`.

Stands beside `job.py`, which measures on the run's own texts. The other texts are a folder in BEIR's format, whose
held-out parts are measured, or a file of questions, all of which are. They are encoded with the run's prefixes and
lengths, and their rows join the run's results.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from contrastile._errors import invalid
from contrastile.data.text_files import open_beir, open_questions
from contrastile.data.texts import TextSet
from contrastile.train.folder import RunFolder
from contrastile.train.log import progress
from contrastile.train.report.questions import evaluate_and_report
from contrastile.train.retriever.batches import passage_tokens
from contrastile.train.retriever.evaluation import Searchable
from contrastile.train.retriever.run import load_retriever


def evaluate_texts(
    folder: RunFolder,
    source: str | Path,
    *,
    corpus: str | Path | None = None,
    index: Searchable | None = None,
    split: str | None = None,
    name: str | None = None,
    bad_rows: float | None = None,
    device: str = "auto",
) -> str:
    """Measure a finished retriever on the texts of `source`, add the rows to its results, and return their table.

    corpus: further passages beside a file of questions. index: an index to search instead of the passages of `source`.
    Run files and rows are named after `name`, by default the source's name, and the part: scifact-test. bad_rows: the
    share of unusable rows that is allowed, the recipe's by default.
    """
    run = load_retriever(folder.path, device=device)
    allowed = run.recipe.data.bad_rows if bad_rows is None else bad_rows
    texts = open_transfer_texts(Path(source), corpus=corpus, split=split, name=name, bad_rows=allowed)
    if index is None and not texts.passages:
        remedy = "Name a --corpus or an --index."
        raise invalid("--texts", "come with passages to look among", f'"{source}" alone', remedy)
    passages = passage_tokens(texts.passages, run.tokenizer, run.recipe) if index is None else index
    return evaluate_and_report(folder, run, texts, passages, beside=True)


def open_transfer_texts(
    source: Path, *, corpus: str | Path | None, split: str | None, name: str | None, bad_rows: float
) -> TextSet:
    """The texts of a file, or of a folder: its part `split`, or all parts but that for training."""
    options: dict[str, Any] = {"bad_rows": bad_rows, "allowed_by": "--bad-rows", "progress": progress}
    if not source.is_dir():
        texts = open_questions(source, corpus=None if corpus is None else Path(corpus), **options)
    elif corpus is not None:
        raise invalid("--corpus", f'be left out with the folder "{source}"', f'"{corpus}"', "It has its own passages.")
    else:
        texts = open_beir(source, **options)
    available = [part for part, rows in texts.splits.items() if len(rows)]
    chosen = [part for part in available if part != "train"] if split is None else [split]
    if not chosen or chosen[0] not in available:
        got = "none" if split is None else f'"{split}"'
        rule = f'be one of the parts of "{source}" with questions ({", ".join(available) or "none"})'
        raise invalid("--split", rule, got, "Name one of them.")
    prefix = name or source.name.partition(".")[0]
    parts = {f"{prefix}-{part}": texts.splits[part] for part in chosen}
    return replace(texts, splits={"train": np.array([], dtype=np.int64), **parts})
