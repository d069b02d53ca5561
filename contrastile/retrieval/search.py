"""From a source of passages to an index, and from a question to the passages that answer it.

The bodies of the commands `encode` and `search`, above `index.py`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from contrastile._errors import invalid, whole_number
from contrastile.data.passages import read_passages
from contrastile.data.skipped import SkipCounter
from contrastile.data.texts import Passage
from contrastile.retrieval.index import Index, encode_corpus, open_index, run_checksums
from contrastile.train.folder import RunFolder
from contrastile.train.retriever.run import RetrieverRun, load_retriever, open_run_texts


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
    """The index of `corpus`, or of the run's own passages where it is None.

    `bad_rows`: the share of unusable rows that is allowed, the recipe's by default.
    """
    run = load_retriever(folder.path, device=device)
    return encode_corpus(
        run,
        _read_passages(run, corpus, run.recipe.data.bad_rows if bad_rows is None else bad_rows),
        out,
        corpus=str(Path(corpus).resolve()) if corpus else run.recipe.data.source,
        made_by=run_checksums(folder),
        shard=shard,
        dimensions=dimensions,
    )


def _read_passages(run: RetrieverRun, corpus: str | None, bad_rows: float) -> Iterator[Passage]:
    if corpus is None:
        yield from open_run_texts(run.recipe).passages
        return
    source = Path(corpus)
    if not source.exists():
        raise invalid("corpus", "be a file or folder", f'"{corpus}"', "Check its path.")
    tally = SkipCounter()
    yield from read_passages(source, tally)
    tally.close(source, bad_rows, allowed_by="--bad-rows")


@dataclass(frozen=True)
class Search:
    """A retriever and an index of its features."""

    run: RetrieverRun
    index: Index

    def results(self, question: str, k: int = 5) -> list[tuple[float, Passage]]:
        """The `k` best passages with their scores, the best first."""
        k = whole_number("k", k, 1, "It is how many passages are shown.", rule="be at least 1")
        features = self.run.encode_query([question], dimensions=self.index.dimensions)
        scores, rows = self.index.search(features, k)
        return [(score, self.index[row]) for score, row in zip(scores[0].tolist(), rows[0].tolist(), strict=True)]

    def results_text(self, question: str, k: int = 5, *, lines: int = 4) -> str:
        """The results for a terminal: score, name, file and line, and the first `lines` lines of each passage."""
        blocks = []
        for score, passage in self.results(question, k):
            name = f"{passage.title} ({passage.id})" if passage.title else passage.id
            source = f"\n        {passage.source}" if passage.source else ""
            text = passage.text.splitlines()
            body = [textwrap.shorten(line, 160) if len(line) > 160 else line for line in text[:lines]]
            body += ["…"] if len(text) > lines else []
            joined = "\n".join(body)
            blocks.append(f"{score:6.3f}  {name}{source}\n{textwrap.indent(joined, ' ' * 10)}")
        return "\n\n".join(blocks)


def open_search(folder: RunFolder, index: Path, *, engine: str = "torch", device: str = "auto") -> Search:
    """A run with its index; raises ValueError where another run, or other weights, made the index."""
    opened = open_index(folder, index, engine=engine)
    return Search(load_retriever(folder.path, device=device), opened)
