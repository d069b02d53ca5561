"""Parquet files of captions and images, unpacked to tar shards, whose images can be read one by one.

Stands below `shards.py`. A file is unpacked once, into the cache.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from contrastile._errors import invalid
from contrastile.data.cache import sync
from contrastile.data.files import new_file
from contrastile.data.manifest import damaged

CAPTION_COLUMNS, IMAGE_COLUMNS = ("title", "text", "caption", "TEXT"), ("image", "jpg", "png", "picture")
# rows that are in memory at once
ROWS = 8
# the limit of what a file unpacks to: so many times its size, and so many bytes more; images hardly compress further
MOST_TIMES, MOST_MORE = 100, 1 << 28


def unpack(table: Path, folder: Path) -> Path:
    """The path of the tar shard in `folder`. A row without a caption or an image has an empty entry.

    The file has a column of captions and one of images: bytes, or as `datasets` writes them, a struct of bytes and
    path, whose path is never followed. Raises ValueError where a column is missing, and for a file that is damaged or
    unpacks to far more than its size.
    """
    import pyarrow
    import pyarrow.parquet

    stat = table.stat()
    state = f"{table.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    shard = folder / f"{hashlib.sha256(state.encode()).hexdigest()[:16]}.tar"
    if shard.exists():
        return shard
    folder.mkdir(parents=True, exist_ok=True)
    temporary = shard.with_suffix(f".part-{os.getpid()}")
    new_file(temporary)
    remaining = MOST_TIMES * stat.st_size + MOST_MORE
    try:
        with (
            pyarrow.parquet.ParquetFile(table, page_checksum_verification=True) as file,
            tarfile.open(temporary, "w") as tar,
        ):
            for number, row in enumerate(_rows(file)):
                for suffix, content in zip((".txt", ".jpg"), row, strict=True):
                    if (remaining := remaining - len(content)) < 0:
                        raise damaged(table, f"more than {MOST_TIMES} times its size in it")
                    entry = tarfile.TarInfo(f"{number:09}{suffix}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
        sync(temporary)
        os.replace(temporary, shard)
    except (pyarrow.ArrowException, OSError) as failure:
        # the library's own failures have no error number
        if isinstance(failure, OSError) and failure.errno is not None:
            raise
        raise damaged(table, failure) from failure
    finally:
        temporary.unlink(missing_ok=True)
    return shard


def _rows(file: Any) -> Iterator[tuple[bytes, bytes]]:
    """Captions and images, both as bytes: a caption that is no text costs its own row only."""
    import pyarrow
    from pyarrow import compute

    schema = file.schema_arrow
    captions = _column(schema, CAPTION_COLUMNS, "texts", _is_bytes)
    images = _column(schema, IMAGE_COLUMNS, "bytes, or structs with bytes", lambda kind: _is_bytes(_inner(kind)))
    for batch in file.iter_batches(batch_size=ROWS, columns=[captions, images]):
        caption, image = batch.column(captions), batch.column(images)
        if pyarrow.types.is_struct(image.type):
            image = compute.struct_field(image, "bytes")
        for row in zip(*(_plain(column).to_pylist() for column in (caption, image)), strict=True):
            yield row[0] or b"", row[1] or b""


def _plain(column: Any) -> Any:
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pyarrow.large_binary())


def _column(schema: Any, known: Sequence[str], content: str, fits: Callable[[Any], bool]) -> str:
    name = next((name for name in known if name in schema.names), None)
    if name is None:
        rule = f"have a column among {', '.join(known)}"
        raise invalid("source", rule, ", ".join(schema.names), "Rename the one that is.")
    kind = schema.field(name).type
    if not fits(kind):
        raise invalid("source", f"have {content} in the column {name}", kind, "Write it anew as these.")
    return name


def _inner(kind: Any) -> Any:
    """The type of a struct's bytes; any other type itself."""
    import pyarrow

    if pyarrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return kind.field("bytes").type
    return kind


def _is_bytes(kind: Any) -> bool:
    import pyarrow

    try:
        _plain(pyarrow.nulls(1, kind))
    except pyarrow.ArrowException:
        return False
    return True
