"""The first stage of a late retriever, and the page of a search: passages with a picture of the tokens that matched.

Above `search.py`. A first stage picks the passages whose token vectors are scored: BM25, or the index of a run with one
vector a passage.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from contrastile._errors import invalid
from contrastile.retrieval.index import SINGLE, Index
from contrastile.retrieval.search import Search, open_search
from contrastile.train.folder import RunFolder
from contrastile.train.report.page import template
from contrastile.train.retriever.evaluation import Candidates, FirstStage, Passages, alignment, bm25_candidates

BM25, ALL = "bm25", "all"


def first_stage(source: str, count: int, device: str) -> FirstStage:
    """The stage that picks `count` passages: "bm25", or a run's folder with its index of the same passages.

    "all" picks none: every passage is scored, whatever the recipe says.
    """
    if source == ALL:
        return lambda _: lambda _: None
    if source == BM25:
        return partial(bm25_candidates, count=count)
    return partial(_run_candidates, RunFolder(Path(source)), count, device)


def _run_candidates(folder: RunFolder, count: int, device: str, passages: Passages) -> Candidates:
    """The first `count` passages of another run's index, as rows of `passages`, found by their ids."""
    first = open_search(folder, folder / "index", device=device)
    if first.index.kind != SINGLE:
        remedy = "Name a run of kind single, or bm25."
        raise invalid("--candidates", "have one vector a passage", f'an index of kind "{first.index.kind}"', remedy)
    ids = passages.ids() if isinstance(passages, Index) else [passage.id for passage in passages]
    rows = {identity: row for row, identity in reversed([*enumerate(ids)])}
    known = np.array([rows.get(identity, -1) for identity in first.index.ids()])
    if (known < 0).all():
        remedy = "Encode the same corpus with both runs."
        raise invalid("--candidates", "hold passages of the index", f'none of their ids in "{folder.path}"', remedy)
    return lambda questions: known[first.best(list(questions), count)[1].numpy(force=True)]


def write_page(search: Search, question: str, k: int, path: Path) -> None:
    """Write the best passages for a question as one HTML file, with the alignment of their tokens."""
    scores, rows = search.best([question], k)
    # the command line asks for a late retriever
    run: Any = search.run
    ranked = [(score, row) for score, row in zip(scores[0].tolist(), rows[0].tolist(), strict=True) if row >= 0]
    passages = [
        {"passage": search.index[row], "score": score, "alignment": alignment(run, question, search.index[row])}
        for score, row in ranked
    ]
    content = template("search.html.jinja").render(question=question, run=search.run.recipe.name, passages=passages)
    path.write_text(content, encoding="utf-8")
