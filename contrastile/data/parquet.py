"""A parquet file of titles and pictures as a tar shard, whose pictures can be read one by one.

Under `shards.py`. It is unpacked once, into the cache.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from contrastile._check import wrong
from contrastile.data.cache import sync
from contrastile.data.manifest import cut

TITLES, PICTURES = ("title", "text", "caption", "TEXT"), ("image", "jpg", "png", "picture")
# rows that are in memory at once
ROWS = 8
# pictures hardly become smaller by being packed: so many times the file's size, and so many bytes, is a bomb
MOST_TIMES, MOST_MORE = 100, 1 << 28


def unpack(table: Path, folder: Path) -> Path:
    """The shard in `folder`. Where a row has no title or no picture its entry is empty.

    A column of titles and one of pictures: bytes, or as `datasets` writes them, a struct of bytes and path, whose path
    is never followed. Raises ValueError where there are none, and for a file that is damaged or a bomb.
    """
    import pyarrow
    import pyarrow.parquet

    stat = table.stat()
    told = f"{table.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    shard = folder / f"{hashlib.sha256(told.encode()).hexdigest()[:16]}.tar"
    if shard.exists():
        return shard
    folder.mkdir(parents=True, exist_ok=True)
    beside = shard.with_suffix(f".part-{os.getpid()}")
    room = MOST_TIMES * stat.st_size + MOST_MORE
    try:
        with (
            pyarrow.parquet.ParquetFile(table, page_checksum_verification=True) as file,
            tarfile.open(beside, "w") as tar,
        ):
            for number, row in enumerate(_rows(file)):
                for suffix, content in zip((".txt", ".jpg"), row, strict=True):
                    if (room := room - len(content)) < 0:
                        raise cut(table, f"more than {MOST_TIMES} times its size in it")
                    entry = tarfile.TarInfo(f"{number:09}{suffix}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
        sync(beside)
        os.replace(beside, shard)
    except (pyarrow.ArrowException, OSError) as failure:
        # the library's own failures to read are without a number
        if isinstance(failure, OSError) and failure.errno is not None:
            raise
        raise cut(table, failure) from failure
    finally:
        beside.unlink(missing_ok=True)
    return shard


def _rows(file: Any) -> Iterator[tuple[bytes, bytes]]:
    """Titles and pictures as they lie there, both as bytes: a title that is no text costs its own row only."""
    import pyarrow
    from pyarrow import compute

    schema = file.schema_arrow
    titles = _column(schema, TITLES, "texts", _of_bytes)
    pictures = _column(schema, PICTURES, "bytes, or structs with bytes", lambda kind: _of_bytes(_inner(kind)))
    for batch in file.iter_batches(batch_size=ROWS, columns=[titles, pictures]):
        title, picture = batch.column(titles), batch.column(pictures)
        if pyarrow.types.is_struct(picture.type):
            picture = compute.struct_field(picture, "bytes")
        for row in zip(*(_plain(column).to_pylist() for column in (title, picture)), strict=True):
            yield row[0] or b"", row[1] or b""


def _plain(column: Any) -> Any:
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pyarrow.large_binary())


def _column(schema: Any, known: Sequence[str], what: str, fits: Callable[[Any], bool]) -> str:
    there = [name for name in known if name in schema.names]
    if not there:
        raise wrong(
            "source", f"have a column among {', '.join(known)}", ", ".join(schema.names), "Rename the one that is."
        )
    kind = schema.field(there[0]).type
    if not fits(kind):
        raise wrong("source", f"have {what} in the column {there[0]}", kind, "Write it anew as these.")
    return there[0]


def _inner(kind: Any) -> Any:
    """Of a struct its bytes."""
    import pyarrow

    if pyarrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return kind.field("bytes").type
    return kind


def _of_bytes(kind: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    texts = (types.is_string, types.is_large_string, types.is_string_view)
    content = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary, types.is_null)
    return any(test(kind) for test in (*texts, *content))
