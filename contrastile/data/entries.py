"""Entries of text files, one by one: lines of JSON, JSON lists, comma- and tab-separated tables, parquet.

Stands below `text_files.py`, `beir.py` and `passages.py`, which interpret the entries. A file is read in blocks,
however large it is. An entry that cannot be used is counted by its reason in a `SkipCounter`, with the place of the
first one.
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
from contrastile.data.tables import is_utf8, read_rows

# the characters of a JSON list that are read at once
BLOCK = 1 << 20
# the longest entry of a JSON list
MOST_CHARACTERS = 64 << 20

Entry = Mapping[str, Any]


@contextmanager
def reading(sources: list[Path], progress: ProgressFactory) -> Iterator[SkipCounter]:
    """A counter for the files in `sources`, with a bar over all their bytes."""
    files = [path for source in sources for path in (source.rglob("*") if source.is_dir() else [source])]
    with progress(sum(path.stat().st_size for path in files if path.is_file()), "reading the texts", "bytes") as bar:
        yield SkipCounter(bar.update)


class _ProgressFile(io.FileIO):
    """A file that moves a bar by the bytes read."""

    def __init__(self, path: Path, advance: Callable[[int], object]) -> None:
        super().__init__(path, "rb")
        self._advance = advance

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self._advance(count or 0)
        return count


def read_entries(path: Path, counter: SkipCounter) -> Iterator[tuple[int, Entry]]:
    """The entries of a file with the lines where they begin; rows that are no entry are counted.

    By the file's name: .jsonl and .json (a list, or lines), .csv, .tsv, .parquet; all but the last also as .gz.
    """
    kind = _kind(path)
    if kind not in READERS:
        raise invalid("source", f"end in {', '.join(READERS)}", path, "Or give a folder in BEIR's format.")
    try:
        yield from READERS[kind](path, counter)
    except FileNotFoundError:
        raise invalid("source", "be a file that exists", path, "Check its path.") from None
    except (OSError, EOFError) as failure:
        raise invalid("source", "be a file that can be read", path, f"{failure}.") from failure


def _kind(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix.lower()


@contextmanager
def _open(path: Path, advance: Callable[[int], object]) -> Iterator[TextIO]:
    """Open a text file. Bytes that are not UTF-8 become lone surrogates, which `is_utf8` finds: they cost one row."""
    with io.BufferedReader(_ProgressFile(path, advance), BLOCK) as packed:
        plain: Any = gzip.GzipFile(fileobj=packed) if path.name.endswith(".gz") else packed
        with io.TextIOWrapper(plain, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            yield text


def text_of(value: Any) -> str:
    """The value as a text that can be written again. Raises `Skipped` with the reason."""
    if not isinstance(value, str):
        raise Skipped("not a text")
    if not is_utf8(value):
        raise Skipped("not UTF-8")
    return value


def _json(path: Path, counter: SkipCounter) -> Iterator[tuple[int, Entry]]:
    """A list of entries, or lines of entries; a list that begins with a text is itself an entry of a line."""
    with _open(path, lambda _: None) as file:
        signs = (sign for sign in iter(lambda: file.read(1), "") if not sign.isspace())
        first, second = next(signs, ""), next(signs, "")
    yield from (_list if first == "[" and second != '"' else _lines)(path, counter)


def _lines(path: Path, counter: SkipCounter) -> Iterator[tuple[int, Entry]]:
    with _open(path, counter.advance) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            counter.rows += 1
            try:
                yield number, _checked(line, lambda text: json.loads(text))
            except Skipped as reason:
                counter.skip(str(reason), path, number)


def _checked(text: str, parse: Any) -> Entry:
    if not is_utf8(text):
        raise Skipped("not UTF-8")
    try:
        entry = parse(text)
    except (ValueError, RecursionError):
        raise Skipped("not JSON") from None
    if isinstance(entry, list):
        entry = {str(place): value for place, value in enumerate(entry)}
    if not isinstance(entry, dict):
        raise Skipped("not an object")
    return entry


def _list(path: Path, counter: SkipCounter) -> Iterator[tuple[int, Entry]]:
    """The objects of a JSON list, read block by block; a list that breaks off is an error."""
    decoder = json.JSONDecoder()
    with _open(path, counter.advance) as file:
        buffer, line, place = file.read(BLOCK), 1, 0
        place = buffer.index("[") + 1
        line += buffer.count("\n", 0, place)
        while True:
            end = place
            while end < len(buffer) and (buffer[end].isspace() or buffer[end] == ","):
                end += 1
            line += buffer.count("\n", place, end)
            place = end
            if place < len(buffer) and buffer[place] == "]":
                return
            try:
                entry, end = decoder.raw_decode(buffer, place)
                # a number at the end of the buffer may go on in the next block
                complete = end < len(buffer)
            except (ValueError, RecursionError):
                complete = False
            if not complete:
                block = file.read(BLOCK)
                if not block or len(buffer) - place > MOST_CHARACTERS:
                    got = f"one that breaks off or cannot be read at {path}:{line}"
                    raise invalid("source", "be a whole JSON list", got, "Mend the file, or write one object a line.")
                buffer, place = buffer[place:] + block, 0
                continue
            counter.rows += 1
            try:
                yield line, _checked(buffer[place:end], lambda _, entry=entry: entry)
            except Skipped as reason:
                counter.skip(str(reason), path, line)
            line += buffer.count("\n", place, end)
            place = end


# first lines that do not name columns: a tab, then a list of answers as Python writes it; two ids and a grade, with a
# column without meaning between them in TREC's form
LISTED = re.compile(r"""^[^\t]+\t"?\[.*\]"?\s*$""")
JUDGED = re.compile(r"^\S+\t(?P<trec>\S+\t)?\S+\t-?[\d.]+\s*$")


def _table(path: Path, counter: SkipCounter) -> Iterator[tuple[int, Entry]]:
    """The rows of a table whose first row names its columns; DPR's tables have tabs and no names, also as .csv."""
    with _open(path, counter.advance) as file:
        first = next(iter(file), "")
        tabs = _kind(path) == ".tsv" or LISTED.search(first)
        rows = read_rows(chain([first], file), "\t" if tabs else ",", path)
        names = _names(first, bool(tabs)) or next(rows, (0, ""))[1]
        if isinstance(names, str):
            got = f"{path}, where it is broken" if first.strip() else f"{path}, which is empty"
            raise invalid("source", "have a first line", got, "Name the columns there.")
        for number, fields in rows:
            counter.rows += 1
            if isinstance(fields, str):
                counter.skip(fields, path, number)
            elif len(fields) != len(names):
                counter.skip("wrong number of columns", path, number)
            else:
                yield number, dict(zip(names, fields, strict=True))


def _names(first: str, tabs: bool) -> list[str]:
    """The names of the columns of a table without names."""
    if LISTED.search(first):
        return ["question", "answers"]
    if tabs and (judged := JUDGED.search(first)):
        return ["query-id", *(["iteration"] if judged["trec"] else []), "corpus-id", "score"]
    return []


def _parquet(path: Path, counter: SkipCounter) -> Iterator[tuple[int, Entry]]:
    """The rows of a parquet file, with their number as the line."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    counter.advance(path.stat().st_size)
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for entry in batch.to_pylist():
                    number += 1
                    counter.rows += 1
                    yield number, entry
    except pa.ArrowInvalid as failure:
        got = f"{path} (at row {number + 1}: {str(failure).splitlines()[0]})"
        raise invalid("source", "be a whole parquet file", got, "Write it again.") from failure


READERS = {".jsonl": _json, ".json": _json, ".csv": _table, ".tsv": _table, ".parquet": _parquet}
