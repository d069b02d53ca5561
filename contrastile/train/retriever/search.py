"""From a source of passages to an index, and from a question to the passages that answer it.

What the verbs `encode` and `search` call; `index.py` does the work.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from contrastile._check import whole_number, wrong
from contrastile.data.corpora import read_corpus
from contrastile.data.entries import Tally
from contrastile.data.texts import Passage
from contrastile.train.folder import RunFolder
from contrastile.train.retriever.feed import open_run_texts
from contrastile.train.retriever.index import Index, encode_corpus, maker
from contrastile.train.retriever.run import RetrieverRun, load_retriever


def encode_source(
    folder: RunFolder,
    corpus: str | None,
    out: Path,
    *,
    shard: int,
    dimensions: int | None,
    device: str,
    bad_rows: float | None = None,
) -> Index:
    """The index of `corpus`, or of the passages that the run was evaluated on.

    `bad_rows`: the share of a corpus' rows that may be unusable; that of the run's recipe unless given.
    """
    run = load_retriever(folder.path, device=device)
    return encode_corpus(
        run,
        _passages(run, corpus, run.recipe.data.bad_rows if bad_rows is None else bad_rows),
        out,
        corpus=str(Path(corpus).resolve()) if corpus else run.recipe.data.source,
        made_by=maker(folder),
        shard=shard,
        dimensions=dimensions,
    )


def _passages(run: RetrieverRun, corpus: str | None, bad_rows: float) -> Iterator[Passage]:
    if corpus is None:
        yield from open_run_texts(run.recipe).passages
        return
    source = Path(corpus)
    if not source.exists():
        raise wrong("corpus", "be a file or folder", f'"{corpus}"', "Check its path.")
    tally = Tally()
    yield from read_corpus(source, tally)
    tally.close(source, bad_rows, allowed_by="--bad-rows")


@dataclass(frozen=True)
class Search:
    """A retriever and its index, ready to be asked."""

    run: RetrieverRun
    index: Index

    def ask(self, question: str, k: int = 5) -> list[tuple[float, Passage]]:
        """The `k` best passages with their scores, the best first."""
        k = whole_number("k", k, 1, "It is how many passages are shown.", rule="be at least 1")
        features = self.run.encode_query([question], dimensions=self.index.dimensions)
        scores, rows = self.index.search(features, k)
        found = zip(scores[0].tolist(), rows[0].tolist(), strict=True)
        return [(score, self.index[row]) for score, row in found]

    def text(self, question: str, k: int = 5, *, lines: int = 4) -> str:
        """The same for a terminal: score, name, file and line, and how the passage begins."""
        shown = []
        for score, passage in self.ask(question, k):
            name = passage.id if not passage.title else f"{passage.title} ({passage.id})"
            beginning = passage.text.splitlines()[:lines]
            more = ["…"] if len(passage.text.splitlines()) > lines else []
            body = "\n".join(textwrap.shorten(line, 160) if len(line) > 160 else line for line in [*beginning, *more])
            head = f"{score:6.3f}  {name}" + (f"\n        {passage.source}" if passage.source else "")
            shown.append(f"{head}\n{textwrap.indent(body, ' ' * 10)}")
        return "\n\n".join(shown)


def open_search(folder: RunFolder, index: Path, *, engine: str = "torch", device: str = "auto") -> Search:
    """A run and the index that it made. Raises ValueError where another run, or other weights, made it."""
    opened = index_of(folder, index, engine=engine)
    return Search(load_retriever(folder.path, device=device), opened)


def index_of(folder: RunFolder, index: Path, *, engine: str = "torch") -> Index:
    """The index, which the weights of this run made."""
    opened = Index(index, engine=engine)
    if opened.told["made_by"] != maker(folder):
        remedy = f"Encode the corpus again: contrastile encode {folder.path}"
        raise wrong("index", "be made by this run", f'"{index}", made by another', remedy)
    return opened
