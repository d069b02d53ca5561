"""Passages from files: BEIR's and Tevatron's lines of JSON, the Wikipedia passages of DPR, one's own Python code.

A source of what is searched, beside `text_files.py`. Passages stream by: a corpus may be larger than the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from contrastile._check import wrong
from contrastile.data.docstrings import LEFT_OUT, functions, source_files
from contrastile.data.entries import Entry, Tally, Unusable, read_entries, text_of
from contrastile.data.texts import Passage

BEIR_CORPUS = "corpus.jsonl"
# what the columns are called: BEIR, DPR and MS MARCO, Tevatron
IDS = ("_id", "id", "docid", "passage_id")
TEXTS = ("text", "document_text", "contents")


def read_corpus(source: Path, tally: Tally) -> Iterator[Passage]:
    """The passages of a file or a folder; what is none is tallied.

    A folder is in BEIR's format where it holds corpus.jsonl; of any other one, and of a .py file, the Python functions
    are the passages. A file's entries have an id, a text and perhaps a title, by the names that are usual.
    """
    if source.is_dir() and (source / BEIR_CORPUS).is_file():
        source = source / BEIR_CORPUS
    if source.is_dir() or source.suffix == ".py":
        yield from _functions(source, tally)
        return
    for line, entry in read_entries(source, tally):
        try:
            yield passage(entry, f"{source}:{line}")
        except Unusable as reason:
            tally.skip(str(reason), source, line)


def passage(entry: Entry, place: str) -> Passage:
    """An entry as a passage. Raises `Unusable` with the reason."""
    identity, text, title = first(entry, IDS), text_of(first(entry, TEXTS)), text_of(entry.get("title") or "")
    if identity is None or identity == "":
        raise Unusable("no id")
    if not (text.strip() or title.strip()):
        raise Unusable("empty text")
    return Passage(str(identity), text, title, place)


def first(entry: Entry, names: tuple[str, ...]) -> object:
    """What the entry says under the first of `names` that it knows."""
    return next((entry[name] for name in names if name in entry), None)


def _functions(source: Path, tally: Tally) -> Iterator[Passage]:
    files = source_files(source)
    if not files:
        remedy = f"Folders called {', '.join(sorted(LEFT_OUT))} are left out."
        raise wrong("source", "hold corpus.jsonl or Python files", source, remedy)
    base = source if source.is_dir() else source.parent
    for path in files:
        module = ".".join(path.relative_to(base).with_suffix("").parts)
        for name, node, code in functions(path, module):
            tally.rows += 1
            yield Passage(name, code, source=f"{path}:{node.lineno}")
