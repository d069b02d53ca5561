"""Search for a terminal: a run, the index of its features, and questions in words.

The body of `contrastile search`. Every question has a nearest passage, even if no passage answers it. Questions of
random words of the corpus give the score of a nearest passage that is no answer. A late retriever may have a first
stage, which picks the passages whose token vectors are scored, and a page with a figure of the tokens that matched.
"""

import textwrap
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from contrastile._errors import invalid, printable
from contrastile.data.texts import words
from contrastile.retrieval.index import SINGLE, Index, open_index
from contrastile.train.folder import RunFolder
from contrastile.train.load import load
from contrastile.train.report.page import template
from contrastile.train.retriever.evaluation import Candidates, FirstStage, Passages, alignment, bm25_candidates
from contrastile.train.retriever.run import RetrieverRun
from contrastile.train.run import Run

# made-up questions, words of each, passages that give the words; the fewest passages of a corpus with a threshold
QUESTIONS, WORDS, PASSAGES, LEAST_PASSAGES = 64, 6, 512, 200
# sources of candidates beside the index of a run
BM25, ALL = "bm25", "all"
# share of the made-up questions whose best score is below the threshold
BELOW = 0.75


@dataclass(frozen=True)
class Search:
    run: Run | RetrieverRun
    index: Index
    # picks the passages that a late retriever scores
    candidates: Candidates | None = None

    @cached_property
    def threshold(self) -> float | None:
        """The score below which nothing is close: most made-up questions do not reach it. None for a small corpus."""
        if len(self.index) < LEAST_PASSAGES:
            return None
        generator = np.random.default_rng(0)
        rows = np.sort(generator.permutation(len(self.index))[:PASSAGES])
        vocabulary = sorted({word for row in rows.tolist() for word in words(self.index[row].text) if len(word) > 2})
        if not vocabulary:
            return None
        questions = [" ".join(generator.choice(vocabulary, WORDS)) for _ in range(QUESTIONS)]
        scores, _ = self.best(questions, 1)
        return float(scores.quantile(BELOW))

    def best(self, questions: list[str], k: int) -> tuple[Tensor, Tensor]:
        """The `k` best passages of each question: scores and rows `[n, k]`.

        A late retriever's score is divided by the number of the question's tokens, so that it does not grow with them.
        """
        features: Any
        if isinstance(self.run, Run):
            features = self.run.encode_text(questions)
        else:
            features = self.run.encode_query(questions, dimensions=self.index.dimensions)
        if isinstance(features, Tensor):
            return self.index.search(features, k)
        candidates = None if self.candidates is None else self.candidates(questions)
        scores, rows = self.index.search(features, k, candidates)
        return scores / features[1].sum(1, keepdim=True).clamp(min=1), rows

    def results_text(self, question: str, k: int, *, lines: int) -> str:
        """The `k` best passages for a terminal, `lines` lines of each, and a first line where nothing is close."""
        scores, rows = self.best([question], k)
        if int(rows.max()) < 0:
            return "no passage: the index has none of the candidates"
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
            body = [printable(_shortened(line)) for line in text[:lines]]
            joined = "\n".join([*body, "…"] if len(text) > lines else body)
            blocks.append(f"{score:6.3f}  {printable(name)}{source}\n{textwrap.indent(joined, ' ' * 10)}".rstrip())
        return "\n\n".join(blocks)


def _shortened(line: str) -> str:
    """At most 160 characters of a line, in whole words but for longer ones."""
    # a placeholder of its own would take the place of a long first word
    return line if len(line) <= 160 else textwrap.shorten(line, 154, placeholder="") + " [...]"


def open_search(
    folder: RunFolder, index: Path, *, engine: str = "torch", device: str = "auto", verify: bool = False
) -> Search:
    """A run with its index; raises ValueError where another run, or other weights, made the index."""
    opened = open_index(folder, index, engine=engine, verify=verify)
    run: Any = load(folder.path, device=device)
    return Search(run, opened)


def first_stage(source: str, count: int, device: str) -> FirstStage:
    """The stage that picks `count` passages: "bm25", or a run's folder with its index; "all" scores every passage."""
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
    figure = partial(alignment, run, question, dimensions=search.index.dimensions)
    best = [(score, search.index[row]) for score, row in ranked]
    passages = [{"passage": passage, "score": score, "alignment": figure(passage)} for score, passage in best]
    content = template("search.html.jinja").render(question=question, run=search.run.recipe.name, passages=passages)
    path.write_text(content, encoding="utf-8")
