"""Entries of text files, one by one: lines of JSON, JSON lists, comma- and tab-separated tables, parquet.

Under `text_files.py` and `corpora.py`, which say what an entry means. A file is read as it streams by, however large.
What cannot be used is counted by its reason in a `Tally`, with the place where it first happened; a run goes on until
too large a share of the rows is like that.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from contrastile._check import wrong
from contrastile.data.pairs import Progress, ProgressFactory, Silence

logger = logging.getLogger("contrastile")

# what is read at once of a JSON list
BLOCK = 1 << 20
# the longest entry of a JSON list, and the longest field of a table
MOST_LETTERS = 64 << 20
FIELD_LETTERS = 1 << 20

Entry = Mapping[str, Any]


class Unusable(Exception):  # noqa: N818 - not a failure: the row is passed over
    """Why a row is passed over."""


class Tally:
    """How many rows a source has, and how many of them cannot be used, by reason; `bar` moves by the bytes read."""

    def __init__(self, bar: Progress | None = None) -> None:
        self.bar: Progress = bar or Silence()
        self.rows = 0
        self.skipped: Counter[str] = Counter()
        self._first = ""

    def skip(self, reason: str, path: Path, line: int) -> None:
        """One row less."""
        self._first = self._first or f"{path}:{line}"
        self.skipped[reason] += 1

    def close(self, source: Path, limit: float, *, allowed_by: str = "data.bad_rows") -> dict[str, int]:
        """The counts by reason, said aloud; an error where they are more than the share `limit` of all rows.

        `allowed_by`: what the user may set to allow more.
        """
        count = self.skipped.total()
        reasons = ", ".join(f"{reason}: {times:,}" for reason, times in sorted(self.skipped.items()))
        if count > limit * self.rows:
            got = f"{count:,} of {self.rows:,} ({reasons}), the first at {self._first}"
            rule = f"have at most {limit:.1%} of rows that cannot be used"
            raise wrong("source", rule, got, f"Mend them, or raise {allowed_by}.")
        if count:
            logger.warning(
                "%s: %d of %d rows are skipped (%s), the first at %s", source, count, self.rows, reasons, self._first
            )
        return dict(self.skipped)


@contextmanager
def reading(sources: list[Path], progress: ProgressFactory) -> Iterator[Tally]:
    """A tally of the files in `sources`, with a bar over all their bytes."""
    files = [path for source in sources for path in (source.rglob("*") if source.is_dir() else [source])]
    with progress(sum(path.stat().st_size for path in files if path.is_file()), "reading the texts", "bytes") as bar:
        yield Tally(bar)


class _Watched(io.FileIO):
    """A file that tells a bar how far it is read."""

    def __init__(self, path: Path, bar: Progress) -> None:
        super().__init__(path, "rb")
        self._bar = bar

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self._bar.update(count or 0)
        return count


def read_entries(path: Path, tally: Tally) -> Iterator[tuple[int, Entry]]:
    """The entries of a file with the lines where they begin; what is no entry is tallied.

    By the file's name: .jsonl and .json (a list, or lines), .csv, .tsv, .parquet; all but the last also as .gz.
    """
    kind = _kind(path)
    if kind not in READERS:
        raise wrong("source", f"end in {', '.join(READERS)}", path, "Or give a folder in BEIR's format.")
    try:
        yield from READERS[kind](path, tally)
    except FileNotFoundError:
        raise wrong("source", "be a file that exists", path, "Check its path.") from None
    except (OSError, EOFError) as failure:
        raise wrong("source", "be a file that can be read", path, f"{failure}.") from failure


def _kind(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix.lower()


@contextmanager
def _open(path: Path, bar: Progress) -> Iterator[TextIO]:
    """What is not UTF-8 comes in as lone surrogates, which `_readable` finds: it costs its own row only."""
    with io.BufferedReader(_Watched(path, bar), BLOCK) as packed:
        plain: Any = gzip.GzipFile(fileobj=packed) if path.name.endswith(".gz") else packed
        with io.TextIOWrapper(plain, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            yield text


def text_of(value: Any) -> str:
    """The value as a text that can be written again. Raises `Unusable` with the reason."""
    if not isinstance(value, str):
        raise Unusable("not a text")
    if not _readable(value):
        raise Unusable("not UTF-8")
    return value


def _readable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _json(path: Path, tally: Tally) -> Iterator[tuple[int, Entry]]:
    """A list of entries, or one a line; a list that begins with a text is itself an entry, and its file has lines."""
    with _open(path, Silence()) as file:
        signs = (sign for sign in iter(lambda: file.read(1), "") if not sign.isspace())
        first, second = next(signs, ""), next(signs, "")
    yield from (_list if first == "[" and second != '"' else _lines)(path, tally)


def _lines(path: Path, tally: Tally) -> Iterator[tuple[int, Entry]]:
    with _open(path, tally.bar) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            tally.rows += 1
            try:
                yield number, _checked(line, lambda text: json.loads(text))
            except Unusable as reason:
                tally.skip(str(reason), path, number)


def _checked(text: str, parse: Any) -> Entry:
    if not _readable(text):
        raise Unusable("not UTF-8")
    try:
        entry = parse(text)
    except (ValueError, RecursionError):
        raise Unusable("not JSON") from None
    if isinstance(entry, list):
        entry = {str(place): value for place, value in enumerate(entry)}
    if not isinstance(entry, dict):
        raise Unusable("not an object")
    return entry


def _list(path: Path, tally: Tally) -> Iterator[tuple[int, Entry]]:
    """The objects of a JSON list, read block by block; one that breaks off is an error: who knows what is missing."""
    decoder = json.JSONDecoder()
    with _open(path, tally.bar) as file:
        waiting, line, place = file.read(BLOCK), 1, 0
        place = waiting.index("[") + 1
        line += waiting.count("\n", 0, place)
        while True:
            end = place
            while end < len(waiting) and (waiting[end].isspace() or waiting[end] == ","):
                end += 1
            line += waiting.count("\n", place, end)
            place = end
            if place < len(waiting) and waiting[place] == "]":
                return
            try:
                entry, end = decoder.raw_decode(waiting, place)
                # a number at the very end of what was read may go on
                complete = end < len(waiting)
            except (ValueError, RecursionError):
                complete = False
            if not complete:
                block = file.read(BLOCK)
                if not block or len(waiting) - place > MOST_LETTERS:
                    got = f"one that breaks off or cannot be read at {path}:{line}"
                    raise wrong("source", "be a whole JSON list", got, "Mend the file, or write one object a line.")
                waiting, place = waiting[place:] + block, 0
                continue
            tally.rows += 1
            try:
                yield line, _checked(waiting[place:end], lambda _, entry=entry: entry)
            except Unusable as reason:
                tally.skip(str(reason), path, line)
            line += waiting.count("\n", place, end)
            place = end


# first lines that are no names of columns: a tab, then a list of answers as Python writes it; two ids and a grade,
# which in TREC's form have a column of no meaning between them
LISTED = re.compile(r"""^[^\t]+\t"?\[.*\]"?\s*$""")
JUDGED = re.compile(r"^\S+\t(?P<trec>\S+\t)?\S+\t-?[\d.]+\s*$")


def _table(path: Path, tally: Tally) -> Iterator[tuple[int, Entry]]:
    """The rows of a table whose first row names its columns; DPR's have tabs and no names, as .csv too."""
    csv.field_size_limit(FIELD_LETTERS)
    with _open(path, tally.bar) as file:
        first = next(iter(file), "")
        tabs = _kind(path) == ".tsv" or LISTED.search(first)
        rows = csv.reader(chain([first], file), delimiter="\t" if tabs else ",")
        names = _names(first, bool(tabs)) or next(rows, [])
        if not names:
            raise wrong("source", "have a first line", f"{path}, which is empty", "Name the columns there.")
        while True:
            number = rows.line_num + 1
            try:
                fields = next(rows)
            except StopIteration:
                return
            except csv.Error:
                tally.rows += 1
                tally.skip("broken row", path, number)
                continue
            if not fields:
                continue
            tally.rows += 1
            if len(fields) != len(names):
                tally.skip("wrong number of columns", path, number)
            elif not all(map(_readable, fields)):
                tally.skip("not UTF-8", path, number)
            else:
                yield number, dict(zip(names, fields, strict=True))


def _names(first: str, tabs: bool) -> list[str]:
    """What the columns are called where the first line does not say."""
    if LISTED.search(first):
        return ["question", "answers"]
    if tabs and (judged := JUDGED.search(first)):
        return ["query-id", *(["iteration"] if judged["trec"] else []), "corpus-id", "score"]
    return []


def _parquet(path: Path, tally: Tally) -> Iterator[tuple[int, Entry]]:
    """The rows of a parquet file; their number stands for the line."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    tally.bar.update(path.stat().st_size)
    try:
        with pq.ParquetFile(path) as file:
            for some in file.iter_batches(batch_size=1024):
                for entry in some.to_pylist():
                    number += 1
                    tally.rows += 1
                    yield number, entry
    except pa.ArrowInvalid as failure:
        got = f"{path} (at row {number + 1}: {str(failure).splitlines()[0]})"
        raise wrong("source", "be a whole parquet file", got, "Write it again.") from failure


READERS = {".jsonl": _json, ".json": _json, ".csv": _table, ".tsv": _table, ".parquet": _parquet}
