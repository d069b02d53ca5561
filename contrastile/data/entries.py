"""Entries of text files and the passages among them, one by one, however large a file is.

Lines of JSON, JSON lists, comma- and tab-separated tables, parquet. A `SkipCounter` counts the entries that cannot be
used by reason, and keeps the location of the first one.
"""

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from contrastile._errors import invalid, logger
from contrastile.data.base import ProgressFactory, SkipCounter, Skipped
from contrastile.data.docstrings import LEFT_OUT, module_name, parse_functions, source_files
from contrastile.data.files import open_file, plain_file
from contrastile.data.tables import check_names, comma, folded, is_utf8, read_rows
from contrastile.data.texts import Passage

# the characters of a JSON list that are read at once, of the longest line or entry, and of blanks in a row
BLOCK, MOST_CHARACTERS, MOST_BLANKS = 1 << 20, 16 << 20, 1 << 20
# the limit of what parquet unpacks to: so many times its size, and so many bytes more; the rows that are read at once
MOST_TIMES, MOST_MORE, ROWS = 100, 1 << 28, 64
# separators of the entries of a JSON list
GAP = re.compile(r"[\s,]*")
# first lines that do not name columns: a tab, then a list of answers as Python writes it; two ids and a grade, with a
# column without meaning between them in TREC's form
LISTED = re.compile(r"""^[^\t]+\t"?\[.*\]"?\s*$""")
JUDGED = re.compile(r"^\S+\t(?P<trec>\S+\t)?\S+\t-?[\d.]+\s*$")

BEIR_CORPUS = "corpus.jsonl"
# names of the columns of passages: BEIR, DPR and MS MARCO, Tevatron
IDS, TEXTS = ("_id", "id", "docid", "passage_id"), ("text", "document_text", "contents")
# columns of a table of pairs that hold numbers
NUMBERS = {"label", "labels", "score", "scores"}
# columns that hold ids, of the row, the question or the passage; pandas writes a first column without a name
ROW_IDS = {"", *IDS, "doc_id", "pid", "idx", "index", "qid", "query_id", "question_id", "unnamed: 0"}
# names of columns in any order; negatives may be numbered
QUESTIONS, POSITIVE, NEGATIVE = ("anchor", "query", "question"), "positive", "negative"
# names of columns that are no question, whatever their place
PASSAGES = {POSITIVE, "answer", "answers", "passage"}
# a first line that has none of these may be a row
NAMES = {*TEXTS, *NUMBERS, *ROW_IDS, *QUESTIONS, *PASSAGES, "title"}

Entry = Mapping[str, Any]


@contextmanager
def reading(sources: list[Path], progress: ProgressFactory) -> Iterator[SkipCounter]:
    """A counter for the files in `sources`, with a bar over all their bytes."""
    files = [path for source in sources for path in (source.rglob("*") if source.is_dir() else [source])]
    with progress(sum(path.stat().st_size for path in files if path.is_file()), "reading the texts", "bytes") as bar:
        yield SkipCounter(bar.update)


def read_entries(path: Path, counter: SkipCounter) -> Iterator[tuple[str, Entry]]:
    """The entries of a file behind the places "file:line" where they begin; rows that are no entry are counted.

    Names of columns and keys of entries are in lower case, and without blanks around them.
    """
    kind = _kind(path)
    if kind not in READERS:
        raise invalid("source", f"end in {', '.join(READERS)}", path, "Or give a folder in BEIR's format.")
    try:
        for line, row in READERS[kind](path, counter):
            counter.rows += 1
            entry = row if isinstance(row, str) else dict(zip(folded(row), row.values(), strict=True))
            if isinstance(entry, str) or len(entry) < len(row):
                counter.skip(entry if isinstance(entry, str) else "two keys of one name", f"{path}:{line}")
            else:
                yield f"{path}:{line}", entry
    except FileNotFoundError:
        raise invalid("source", "be a file that exists", path, "Check its path.") from None
    except (OSError, EOFError, zlib.error) as failure:
        raise invalid("source", "be a file that can be read", path, f"{failure}.") from failure


def text_of(value: Any) -> str:
    """The value as a text that can be written again. Raises `Skipped` with the reason."""
    if not isinstance(value, str):
        raise Skipped("not a text")
    if not is_utf8(value):
        raise Skipped("not UTF-8")
    return value


def first(entry: Entry, names: tuple[str, ...]) -> object:
    return next((entry[name] for name in names if name in entry), None)


def _kind(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix.lower()


class _ProgressFile(io.FileIO):
    def __init__(self, path: Path, advance: Callable[[int], object]) -> None:
        super().__init__(plain_file(str(path)), "rb")
        self._advance = advance

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self._advance(count or 0)
        return count


@contextmanager
def _open(path: Path, advance: Callable[[int], object]) -> Iterator[TextIO]:
    """Open a text file. Bytes that are not UTF-8 become lone surrogates, and `is_utf8` then refuses their row alone."""
    with io.BufferedReader(_ProgressFile(path, advance), BLOCK) as packed:
        plain: Any = gzip.GzipFile(fileobj=packed) if path.name.endswith(".gz") else packed
        with io.TextIOWrapper(plain, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            yield text


def _json(path: Path, counter: SkipCounter) -> Iterator[tuple[int, Entry | str]]:
    """The entries of a list, or of lines. A file that begins with a list of texts has a list as the entry of a line."""
    with _open(path, lambda _: None) as file:
        beginning = file.read(BLOCK).lstrip()
    listed = beginning.startswith("[") and not beginning[1:].lstrip().startswith('"')
    return (_list if listed else _lines)(path, counter)


def _limited(file: TextIO, path: Path) -> Iterator[str]:
    """The lines of a text file; raises ValueError for endless lines or blanks, which a few packed bytes may give."""
    blanks = 0
    for number, line in enumerate(iter(partial(file.readline, MOST_CHARACTERS + 1), ""), start=1):
        blanks = blanks + len(line) if line.isspace() else 0
        if len(line) > MOST_CHARACTERS:
            raise _too_long(path, number)
        if blanks > MOST_BLANKS:
            raise _too_blank(path, number)
        yield line


def _too_long(path: Path, line: int) -> ValueError:
    rule = f"have lines and entries of at most {MOST_CHARACTERS:,} characters"
    return invalid("source", rule, f"a longer one at {path}:{line}", "Write one object a line.")


def _too_blank(path: Path, line: int) -> ValueError:
    got = f"more up to {path}:{line}"
    return invalid("source", f"have at most {MOST_BLANKS:,} blanks in a row", got, "Write one object a line.")


def _lines(path: Path, counter: SkipCounter) -> Iterator[tuple[int, Entry | str]]:
    with _open(path, counter.advance) as file:
        for number, line in enumerate(_limited(file, path), start=1):
            if not line.isspace():
                try:
                    yield number, _entry(json.loads(line), line)
                except (ValueError, RecursionError):
                    yield number, "not JSON" if is_utf8(line) else "not UTF-8"


def _entry(value: Any, text: str) -> Entry | str:
    """A JSON value as an entry, a list with its indices as keys; or the reason why it is no entry."""
    if not is_utf8(text):
        return "not UTF-8"
    if isinstance(value, list):
        return {str(number): item for number, item in enumerate(value)}
    return value if isinstance(value, dict) else "not an object"


def _list(path: Path, counter: SkipCounter) -> Iterator[tuple[int, Entry | str]]:
    """The objects of a JSON list, read block by block; a list that breaks off is an error."""
    decoder = json.JSONDecoder()
    with _open(path, counter.advance) as file:
        buffer, line, start, blanks = file.read(BLOCK), 1, 0, 0
        end = buffer.index("[") + 1
        while True:
            gap = GAP.match(buffer, end).end()  # type: ignore[union-attr]
            line, blanks = line + buffer.count("\n", start, gap), blanks + gap - end
            start = gap
            if blanks > MOST_BLANKS:
                raise _too_blank(path, line)
            if buffer.startswith("]", start):
                _check_end(chain([buffer[start + 1 :]], iter(lambda: file.read(BLOCK), "")), path, line)
                return
            try:
                value, end = decoder.raw_decode(buffer, start)
                # a number at the end of the buffer may go on in the next block
                complete = end < len(buffer)
            except (ValueError, RecursionError):
                complete = False
            if complete:
                blanks = 0
                yield line, _entry(value, buffer[start:end])
                continue
            block = file.read(BLOCK)
            if block and len(buffer) - start > MOST_CHARACTERS:
                raise _too_long(path, line)
            if not block:
                got = f"one that breaks off or cannot be read at {path}:{line}"
                raise invalid("source", "be a whole JSON list", got, "Mend the file, or write one object a line.")
            buffer, start, end = buffer[start:] + block, 0, 0


def _check_end(blocks: Iterator[str], path: Path, line: int) -> None:
    """Raise ValueError where more than blanks follow the list that ends in `line`."""
    blanks = 0
    for block in blocks:
        line += block.count("\n", 0, len(block) - len(block.lstrip()))
        if not block.isspace() and block:
            got = f"more behind its end at {path}:{line}"
            raise invalid("source", "be one JSON list", got, "Join the lists, or write one object a line.")
        blanks += len(block)
        if blanks > MOST_BLANKS:
            raise _too_blank(path, line)


def _table(path: Path, counter: SkipCounter) -> Iterator[tuple[int, Entry | str]]:
    """The rows of a table whose first row names its columns; DPR's tables have tabs and no names, also as .csv."""
    with _open(path, counter.advance) as file:
        lines = _limited(file, path)
        header = next(lines, "")
        tabs = _kind(path) == ".tsv" or bool(LISTED.search(header))
        joined = "\t".join(header.split())
        if tabs and "\t" not in header and (JUDGED.search(joined) or "query-id" in header):
            # judgements between blanks
            header, lines = f"{joined}\n", ("\t".join(line.split()) + "\n" for line in lines)
        rows = read_rows(chain([header], lines), "\t" if tabs else comma(header), path)
        if LISTED.search(header):
            names: list[str] | str = ["question", "answers"]
        elif tabs and (judged := JUDGED.search(header)):
            names = ["query-id", *(["iteration"] if judged["trec"] else []), "corpus-id", "score"]
        else:
            names = next(rows, (0, ""))[1]
        if isinstance(names, str):
            got = f"{path}, where it is {names.removesuffix(' row')}" if header.strip() else f"{path}, which is empty"
            remedy = "Save it as UTF-8." if names == "not UTF-8" else "Name the columns there."
            raise invalid("source", "have a first line", got, remedy)
        check_names(folded(names), path)
        if NAMES.isdisjoint(folded(names)):
            message = "%s: the first line is taken as names of columns: %.80s; if it is a pair, put names above it, "
            logger.warning(message + "such as question and positive", path, ", ".join(names))
        for number, fields in rows:
            if not isinstance(fields, str) and len(fields) != len(names):
                yield number, "wrong number of columns"
            else:
                yield number, fields if isinstance(fields, str) else dict(zip(names, fields, strict=True))


def _parquet(path: Path, counter: SkipCounter) -> Iterator[tuple[int, Entry | str]]:
    """The rows of a parquet file, with their number as the line."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number, size = 0, path.stat().st_size
    counter.advance(size)
    remaining = MOST_TIMES * size + MOST_MORE
    try:
        with open_file(path) as source, pq.ParquetFile(source) as file:
            check_names(folded(file.schema_arrow.names), path)
            for batch in file.iter_batches(batch_size=ROWS):
                if (remaining := remaining - batch.nbytes) < 0:
                    got = f"more in {path} up to row {number + batch.num_rows}"
                    raise invalid("source", f"unpack to at most {MOST_TIMES} times its size", got, "Write it again.")
                for entry in batch.to_pylist():
                    number += 1
                    yield number, entry
    except (pa.ArrowException, UnicodeDecodeError, OSError) as failure:
        # the library's own failures have no error number
        if isinstance(failure, OSError) and failure.errno is not None:
            raise
        got = f"{path} (at row {number + 1}: {next(iter(str(failure).splitlines()), repr(failure))})"
        raise invalid("source", "be a whole parquet file", got, "Write the file again.") from failure


READERS = {".jsonl": _json, ".json": _json, ".csv": _table, ".tsv": _table, ".parquet": _parquet}


def read_passages(source: Path, counter: SkipCounter) -> Iterator[Passage]:
    """The passages of a file or a folder; entries that are none are counted.

    A folder with corpus.jsonl is in BEIR's format; the passages of any other folder, and of a .py file, are the Python
    functions. The entries of a file have an id, a text and perhaps a title, by their usual names.
    """
    if (source / BEIR_CORPUS).is_file():
        source = source / BEIR_CORPUS
    if source.is_dir() or source.suffix == ".py":
        if not (files := source_files(source)):
            remedy = f"Folders called {', '.join(sorted(LEFT_OUT))} are left out."
            raise invalid("source", "hold corpus.jsonl or Python files", source, remedy)
        for path in files:
            for name, node, code in parse_functions(path, module_name(path, source)):
                counter.rows += 1
                yield Passage(name, code, source=f"{path}:{node.lineno}")
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
