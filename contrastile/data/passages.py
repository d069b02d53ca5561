"""Passages from files: BEIR's and Tevatron's lines of JSON, the Wikipedia passages of DPR, Python code.

Stands between `entries.py` and the sources of texts. Passages are read one by one, because a corpus may be larger than
the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from contrastile._errors import invalid
from contrastile.data.base import SkipCounter, Skipped
from contrastile.data.entries import Entry, read_entries, text_of
from contrastile.data.python_code import LEFT_OUT, parse_functions, source_files
from contrastile.data.texts import Passage

BEIR_CORPUS = "corpus.jsonl"
# names of the columns: BEIR, DPR and MS MARCO, Tevatron
IDS = ("_id", "id", "docid", "passage_id")
TEXTS = ("text", "document_text", "contents")


def read_passages(source: Path, counter: SkipCounter) -> Iterator[Passage]:
    """The passages of a file or a folder; entries that are none are counted.

    A folder with corpus.jsonl is in BEIR's format; the passages of any other folder, and of a .py file, are the Python
    functions. The entries of a file have an id, a text and perhaps a title, by their usual names.
    """
    if source.is_dir() and (source / BEIR_CORPUS).is_file():
        source = source / BEIR_CORPUS
    if source.is_dir() or source.suffix == ".py":
        yield from _functions(source, counter)
        return
    for line, entry in read_entries(source, counter):
        try:
            yield passage(entry, f"{source}:{line}")
        except Skipped as reason:
            counter.skip(str(reason), source, line)


def passage(entry: Entry, place: str) -> Passage:
    """An entry as a passage. Raises `Skipped` with the reason."""
    identity, text, title = first(entry, IDS), text_of(first(entry, TEXTS)), text_of(entry.get("title") or "")
    if identity is None or identity == "":
        raise Skipped("no id")
    if not (text.strip() or title.strip()):
        raise Skipped("empty text")
    return Passage(str(identity), text, title, place)


def first(entry: Entry, names: tuple[str, ...]) -> object:
    """The value under the first of `names` that the entry has."""
    return next((entry[name] for name in names if name in entry), None)


def _functions(source: Path, counter: SkipCounter) -> Iterator[Passage]:
    files = source_files(source)
    if not files:
        remedy = f"Folders called {', '.join(sorted(LEFT_OUT))} are left out."
        raise invalid("source", "hold corpus.jsonl or Python files", source, remedy)
    base = source if source.is_dir() else source.parent
    for path in files:
        module = ".".join(path.relative_to(base).with_suffix("").parts)
        for name, node, code in parse_functions(path, module):
            counter.rows += 1
            yield Passage(name, code, source=f"{path}:{node.lineno}")
