"""Search for a terminal: a run, the index of its features, and questions in words.

Above `index.py`; the body of `contrastile search`. Some passage is always the nearest one. Made-up questions, of random
words of the corpus, say how near that is where nothing fits.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from contrastile._errors import printable
from contrastile.data.bm25 import words
from contrastile.retrieval.index import Index, load_run, open_index
from contrastile.train.folder import RunFolder
from contrastile.train.retriever.evaluation import Candidates
from contrastile.train.retriever.run import RetrieverRun
from contrastile.train.run import Run

# made-up questions, their words, and the passages that these come from; a smaller corpus says too little
MADE_UP, WORDS_EACH, PASSAGES, LEAST = 64, 6, 512, 200
# share of the made-up questions whose best score is below the threshold
BELOW = 0.75


@dataclass(frozen=True)
class Search:
    """A run and an index of its features."""

    run: Run | RetrieverRun
    index: Index
    # picks the passages that a late retriever scores
    candidates: Candidates | None = None

    def encoded(self, questions: list[str]) -> Any:
        """Features of questions, or of texts that pictures are to be found for."""
        if isinstance(self.run, Run):
            return self.run.encode_text(questions)
        return self.run.encode_query(questions, dimensions=self.index.dimensions)

    @cached_property
    def threshold(self) -> float | None:
        """A score that most made-up questions do not reach: below it nothing is close. None for a small corpus."""
        if len(self.index) < LEAST:
            return None
        generator = np.random.default_rng(0)
        rows = np.sort(generator.permutation(len(self.index))[:PASSAGES])
        vocabulary = sorted({word for row in rows.tolist() for word in words(self.index[row].text) if len(word) > 2})
        if not vocabulary:
            return None
        questions = [" ".join(generator.choice(vocabulary, WORDS_EACH)) for _ in range(MADE_UP)]
        scores, _ = self.best(questions, 1)
        return float(scores.quantile(BELOW))

    def best(self, questions: list[str], k: int) -> tuple[Tensor, Tensor]:
        """The `k` best passages of each question: scores and rows `[n, k]`.

        A score of a late retriever is divided by the number of the question's tokens, so that a long question has no
        better ones.
        """
        features = self.encoded(questions)
        if isinstance(features, Tensor):
            return self.index.search(features, k)
        among = None if self.candidates is None else self.candidates(questions)
        scores, rows = self.index.search(features, k, among)
        return scores / features[1].sum(1, keepdim=True).clamp(min=1), rows

    def results_text(self, question: str, k: int, *, lines: int) -> str:
        """The `k` best passages for a terminal: score, name, source, and the first `lines` lines of each.

        A first line says so where nothing is close.
        """
        scores, rows = self.best([question], k)
        blocks, best = [], float(scores[0, 0])
        if self.threshold is not None and best < self.threshold:
            sentence = f"nothing close: {best:.3f}, and random words of the corpus come as near as {self.threshold:.3f}"
            blocks.append(f"{sentence}; the nearest are")
        for score, row in zip(scores[0].tolist(), rows[0].tolist(), strict=True):
            if row < 0:
                # fewer candidates than passages to show
                break
            passage = self.index[row]
            name = f"{passage.title} ({passage.id})" if passage.title else passage.id
            source = f"\n        {printable(passage.source)}" if passage.source else ""
            text = passage.text.splitlines()
            body = [printable(textwrap.shorten(line, 160) if len(line) > 160 else line) for line in text[:lines]]
            joined = "\n".join([*body, "…"] if len(text) > lines else body)
            blocks.append(f"{score:6.3f}  {printable(name)}{source}\n{textwrap.indent(joined, ' ' * 10)}".rstrip())
        return "\n\n".join(blocks)


def open_search(
    folder: RunFolder, index: Path, *, engine: str = "torch", device: str = "auto", verify: bool = False
) -> Search:
    """A run with its index; raises ValueError where another run, or other weights, made the index."""
    opened = open_index(folder, index, engine=engine, verify=verify)
    return Search(index=opened, run=load_run(folder, device=device))
