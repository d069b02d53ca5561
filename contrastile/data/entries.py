"""Entries of text files and the passages among them, one by one, however large a file is.

Stands below `text_files.py`, which interprets the entries of questions: lines of JSON, JSON lists, comma- and
tab-separated tables, parquet. A `SkipCounter` counts the entries that cannot be used by reason, and keeps the location
of the first one.
"""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from contrastile._errors import invalid
from contrastile.data.base import ProgressFactory, SkipCounter, Skipped
from contrastile.data.docstrings import LEFT_OUT, module_name, parse_functions, source_files
from contrastile.data.tables import is_utf8, read_rows
from contrastile.data.texts import Passage

# the characters of a JSON list that are read at once, and of its longest entry
BLOCK, MOST_CHARACTERS = 1 << 20, 64 << 20
# what lies between the entries of a JSON list
GAP = re.compile(r"[\s,]*")
# first lines that do not name columns: a tab, then a list of answers as Python writes it; two ids and a grade, with a
# column without meaning between them in TREC's form
LISTED = re.compile(r"""^[^\t]+\t"?\[.*\]"?\s*$""")
JUDGED = re.compile(r"^\S+\t(?P<trec>\S+\t)?\S+\t-?[\d.]+\s*$")

BEIR_CORPUS = "corpus.jsonl"
# names of the columns of passages: BEIR, DPR and MS MARCO, Tevatron
IDS, TEXTS = ("_id", "id", "docid", "passage_id"), ("text", "document_text", "contents")

Entry = Mapping[str, Any]


@contextmanager
def reading(sources: list[Path], progress: ProgressFactory) -> Iterator[SkipCounter]:
    """A counter for the files in `sources`, with a bar over all their bytes."""
    files = [path for source in sources for path in (source.rglob("*") if source.is_dir() else [source])]
    with progress(sum(path.stat().st_size for path in files if path.is_file()), "reading the texts", "bytes") as bar:
        yield SkipCounter(bar.update)


def read_entries(path: Path, counter: SkipCounter) -> Iterator[tuple[str, Entry]]:
    """The entries of a file behind the places "file:line" where they begin; rows that are no entry are counted.

    By the file's name: .jsonl and .json (a list, or lines), .csv, .tsv, .parquet; all but the last also as .gz.
    """
    kind = _kind(path)
    if kind not in READERS:
        raise invalid("source", f"end in {', '.join(READERS)}", path, "Or give a folder in BEIR's format.")
    try:
        for line, row in READERS[kind](path, counter):
            counter.rows += 1
            if isinstance(row, str):
                counter.skip(row, f"{path}:{line}")
            else:
                yield f"{path}:{line}", row
    except FileNotFoundError:
        raise invalid("source", "be a file that exists", path, "Check its path.") from None
    except (OSError, EOFError) as failure:
        raise invalid("source", "be a file that can be read", path, f"{failure}.") from failure


def text_of(value: Any) -> str:
    """The value as a text that can be written again. Raises `Skipped` with the reason."""
    if not isinstance(value, str):
        raise Skipped("not a text")
    if not is_utf8(value):
        raise Skipped("not UTF-8")
    return value


def first(entry: Entry, names: tuple[str, ...]) -> object:
    """The value under the first of `names` that the entry has."""
    return next((entry[name] for name in names if name in entry), None)


def _kind(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix.lower()


class _ProgressFile(io.FileIO):
    """A file that moves a bar by the bytes read."""

    def __init__(self, path: Path, advance: Callable[[int], object]) -> None:
        super().__init__(path, "rb")
        self._advance = advance

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self._advance(count or 0)
        return count


@contextmanager
def _open(path: Path, advance: Callable[[int], object]) -> Iterator[TextIO]:
    """Open a text file. Bytes that are not UTF-8 become lone surrogates, which `is_utf8` finds: they cost one row."""
    with io.BufferedReader(_ProgressFile(path, advance), BLOCK) as packed:
        plain: Any = gzip.GzipFile(fileobj=packed) if path.name.endswith(".gz") else packed
        with io.TextIOWrapper(plain, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            yield text


def _json(path: Path, counter: SkipCounter) -> Iterator[tuple[int, Entry | str]]:
    """A list of entries, or lines of entries; a list that begins with a text is itself an entry of a line."""
    with _open(path, lambda _: None) as file:
        signs = (sign for sign in iter(lambda: file.read(1), "") if not sign.isspace())
        start, second = next(signs, ""), next(signs, "")
    return (_list if start == "[" and second != '"' else _lines)(path, counter)


def _lines(path: Path, counter: SkipCounter) -> Iterator[tuple[int, Entry | str]]:
    with _open(path, counter.advance) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield number, _entry(json.loads(line), line)
                except (ValueError, RecursionError):
                    yield number, "not JSON" if is_utf8(line) else "not UTF-8"


def _entry(value: Any, text: str) -> Entry | str:
    """A JSON value as an entry, a list by its numbers; or the reason why it is none."""
    if not is_utf8(text):
        return "not UTF-8"
    if isinstance(value, list):
        return {str(number): item for number, item in enumerate(value)}
    return value if isinstance(value, dict) else "not an object"


def _list(path: Path, counter: SkipCounter) -> Iterator[tuple[int, Entry | str]]:
    """The objects of a JSON list, read block by block; a list that breaks off is an error."""
    decoder = json.JSONDecoder()
    with _open(path, counter.advance) as file:
        buffer, line, start = file.read(BLOCK), 1, 0
        end = buffer.index("[") + 1
        while True:
            gap = GAP.match(buffer, end).end()  # type: ignore[union-attr]
            line += buffer.count("\n", start, gap)
            start = gap
            if buffer.startswith("]", start):
                return
            try:
                value, end = decoder.raw_decode(buffer, start)
                # a number at the end of the buffer may go on in the next block
                complete = end < len(buffer)
            except (ValueError, RecursionError):
                complete = False
            if complete:
                yield line, _entry(value, buffer[start:end])
                continue
            block = file.read(BLOCK)
            if not block or len(buffer) - start > MOST_CHARACTERS:
                got = f"one that breaks off or cannot be read at {path}:{line}"
                raise invalid("source", "be a whole JSON list", got, "Mend the file, or write one object a line.")
            buffer, start, end = buffer[start:] + block, 0, 0


def _table(path: Path, counter: SkipCounter) -> Iterator[tuple[int, Entry | str]]:
    """The rows of a table whose first row names its columns; DPR's tables have tabs and no names, also as .csv."""
    with _open(path, counter.advance) as file:
        header = next(iter(file), "")
        tabs = _kind(path) == ".tsv" or bool(LISTED.search(header))
        rows = read_rows(chain([header], file), "\t" if tabs else ",", path)
        if LISTED.search(header):
            names: list[str] | str = ["question", "answers"]
        elif tabs and (judged := JUDGED.search(header)):
            names = ["query-id", *(["iteration"] if judged["trec"] else []), "corpus-id", "score"]
        else:
            names = next(rows, (0, ""))[1]
        if isinstance(names, str):
            got = f"{path}, where it is broken" if header.strip() else f"{path}, which is empty"
            raise invalid("source", "have a first line", got, "Name the columns there.")
        for number, fields in rows:
            if not isinstance(fields, str) and len(fields) != len(names):
                yield number, "wrong number of columns"
            else:
                yield number, fields if isinstance(fields, str) else dict(zip(names, fields, strict=True))


def _parquet(path: Path, counter: SkipCounter) -> Iterator[tuple[int, Entry | str]]:
    """The rows of a parquet file, with their number as the line."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    counter.advance(path.stat().st_size)
    try:
        with pq.ParquetFile(path) as file:
            entries = (entry for batch in file.iter_batches(batch_size=1024) for entry in batch.to_pylist())
            for number, entry in enumerate(entries, start=1):
                yield number, entry
    except pa.ArrowInvalid as failure:
        got = f"{path} (at row {number + 1}: {str(failure).splitlines()[0]})"
        raise invalid("source", "be a whole parquet file", got, "Write it again.") from failure


READERS = {".jsonl": _json, ".json": _json, ".csv": _table, ".tsv": _table, ".parquet": _parquet}


def read_passages(source: Path, counter: SkipCounter) -> Iterator[Passage]:
    """The passages of a file or a folder; entries that are none are counted.

    A folder with corpus.jsonl is in BEIR's format; the passages of any other folder, and of a .py file, are the Python
    functions. The entries of a file have an id, a text and perhaps a title, by their usual names.
    """
    if (source / BEIR_CORPUS).is_file():
        source = source / BEIR_CORPUS
    if source.is_dir() or source.suffix == ".py":
        yield from _functions(source, counter)
        return
    for location, entry in read_entries(source, counter):
        try:
            identity, text, title = first(entry, IDS), text_of(first(entry, TEXTS)), text_of(entry.get("title") or "")
        except Skipped as reason:
            counter.skip(reason, location)
            continue
        if identity is None or identity == "":
            counter.skip("no id", location)
        elif not (text.strip() or title.strip()):
            counter.skip("empty text", location)
        else:
            yield Passage(str(identity), text, title, location)


def _functions(source: Path, counter: SkipCounter) -> Iterator[Passage]:
    files = source_files(source)
    if not files:
        remedy = f"Folders called {', '.join(sorted(LEFT_OUT))} are left out."
        raise invalid("source", "hold corpus.jsonl or Python files", source, remedy)
    for path in files:
        for name, node, code in parse_functions(path, module_name(path, source)):
            counter.rows += 1
            yield Passage(name, code, source=f"{path}:{node.lineno}")
