"""Text files that promise more than they hold, that lose what they hold, or that no reader expects; made by code."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from contrastile.data.base import silent
from contrastile.data.text_files import open_questions

LINE = "`source` must have lines and entries of at most 16,777,216 characters; got a longer one at {path}:1. "
BLANKS = "`source` must have at most 1,048,576 blanks in a row; got more up to {path}:"
PIPE = "`source` must be a file that can be read; got {path}. [Errno 22] Not a plain file: '{path}'."
BAD = "`source` must have at most 10% of rows that cannot be used; got 1 of 3 ({}: 1), the first at {{path}}:"


class Attack(NamedTuple):
    """A file by its name, the one that writes it, and the beginning of the error; "" for a file that is read."""

    name: str
    write: Callable[[Path], Any]
    error: str


def plain(text: str | bytes) -> Callable[[Path], Any]:
    """The writer of a text, packed where the name of the file says so."""

    def write(path: Path) -> None:
        content = text.encode() if isinstance(text, str) else text
        path.write_bytes(gzip.compress(content, 9) if path.suffix == ".gz" else content)

    return write


def packed(character: bytes, times: int, *, before: bytes = b"", after: bytes = b"") -> Callable[[Path], Any]:
    """The writer of a packed file of one character `times` times, never held in memory."""

    def write(path: Path) -> None:
        with gzip.open(path, "wb", compresslevel=9) as file:
            file.write(before)
            for start in range(0, times, 1 << 20):
                file.write(character * min(1 << 20, times - start))
            file.write(after)

    return write


def csv(answers: str) -> Callable[[Path], Any]:
    """A table of three questions, one of them with these answers."""
    return plain(f'question,answers\na,"[\'b\']"\nc,"{answers}"\ne,"[\'f\']"\n')


def parquet(names: list[str], *columns: list[Any], **options: Any) -> Callable[[Path], Any]:
    """A parquet file of columns, whose names may be equal."""

    def write(path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.Table.from_arrays([pyarrow.array(column) for column in columns], names=names)
        pyarrow.parquet.write_table(table, path, **options)

    return write


ENTRIES = "\n".join(json.dumps({"query": f"a{row}", "pos": [f"b{row}"]}) for row in range(2))
LONG = "\n" + json.dumps({"query": "c", "pos": ["x" * 10_000_000]})
TWO = '[{"query": "a", "pos": ["b"]}, {"query": "c", "pos": ["d"]}]'

ATTACKS: dict[str, Attack] = {
    "list of sets": Attack("a.csv", csv("[{[]: 1}]"), BAD.format("a list of answers that cannot be read")),
    "deep list": Attack("a.csv", csv("[" * 20_000 + "]" * 20_000), ""),
    "deep sums": Attack("a.csv", csv("[" + "-" * 60_000 + "1]"), BAD.format("a list of answers that cannot be read")),
    "long list": Attack("a.csv", csv("[" + "1," * 200_000 + "]"), BAD.format("a list of answers that is too long")),
    "deep JSON": Attack("a.jsonl", plain(ENTRIES + "\n" + "[" * 500_000), BAD.format("not JSON")),
    "two lists": Attack(
        "a.json",
        plain(TWO + "\n" + TWO),
        "`source` must be one JSON list; got more behind its end at {path}:2. Join the lists, or write ",
    ),
    "packed blanks": Attack("a.jsonl.gz", packed(b" ", 1 << 26), LINE),
    "packed empty lines": Attack("a.jsonl.gz", packed(b"\n", 1 << 26), BLANKS),
    "packed empty lines of a table": Attack("a.csv.gz", packed(b"\n", 1 << 26, before=b"query,positive\n"), BLANKS),
    "blanks in a list": Attack("a.json.gz", packed(b" ", 1 << 26, before=b"[{}"), BLANKS),
    "blanks behind a list": Attack("a.json.gz", packed(b" ", 1 << 26, before=TWO.encode()), BLANKS),
    "a long line": Attack("a.jsonl.gz", packed(b"x", 50_000_000), LINE),
    "a long line of a table": Attack("a.tsv.gz", packed(b"x", 50_000_000), LINE),
    "a long text of a list": Attack("a.json.gz", packed(b"x", 50_000_000, before=b'[{"query": "'), LINE),
    "a pipe": Attack("a.jsonl", os.mkfifo, PIPE),
    "a pipe of a table": Attack("a.csv", os.mkfifo, PIPE),
    "a pipe of parquet": Attack("a.parquet", os.mkfifo, PIPE),
    "damaged gzip": Attack(
        "a.jsonl.gz",
        lambda path: path.write_bytes(gzip.compress(ENTRIES.encode() * 99)[:30] + b"\xff" * 40),
        "`source` must be a file that can be read; got {path}. Error -3 while decompressing",
    ),
    "NUL in a name": Attack("a\0.jsonl", lambda path: None, "`source` must be a file that exists; got {path}. "),
    "two columns of a table": Attack(
        "a.csv",
        plain("query,positive,positive\na,b,c\n"),
        '`source` must have columns of different names; got "positive" twice in {path}. Rename one of them.',
    ),
    "two columns of parquet": Attack(
        "a.parquet",
        parquet(["query", "positive", "positive"], ["a"], ["b"], ["c"]),
        '`source` must have columns of different names; got "positive" twice in {path}. Rename one of them.',
    ),
    "parquet that unpacks": Attack(
        "a.parquet",
        lambda path: parquet(["query", "positive"], ["a"] * 600, ["x" * (1 << 20)] * 600, compression="zstd")(path),
        "`source` must unpack to at most 100 times its size; got more in {path} up to row ",
    ),
    "a label too large": Attack(
        "a.jsonl",
        plain(ENTRIES + '\n{"query": "a", "positive": "b", "label": 1' + "0" * 400 + "}"),
        BAD.format("a label that is no number"),
    ),
    # honest files at the edge of a limit
    "answers of DPR": Attack("a.csv", csv(str([f"answer {number}" for number in range(5000)])), ""),
    "a row of 10 MB": Attack("a.jsonl", plain(ENTRIES + LONG), ""),
    "blanks around a list": Attack("a.json", plain(" \n" * 1000 + TWO + " \n" * 1000), ""),
}

# those that take a tenth of a second
QUICK = (
    "list of sets", "deep list", "deep sums", "long list", "deep JSON", "two lists", "a pipe", "a pipe of a table",
    "a pipe of parquet", "damaged gzip", "NUL in a name", "two columns of a table", "two columns of parquet",
    "a label too large", "answers of DPR", "blanks around a list",
)  # fmt: skip


def opened(path: str) -> int:
    """Read a file of questions; the number of them."""
    options: dict[str, Any] = {"corpus": None, "bad_rows": 0.1, "allowed_by": "--bad-rows", "progress": silent}
    return len(open_questions(Path(path), **options).queries)
