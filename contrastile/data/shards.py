"""Where every pair of a collection lies: tar shards of key.jpg and key.txt, parquet files, tables, folders of pictures.

Before `collection.py`, which remembers what is found here. Only headers and titles are read, no picture. A shard that
was cut anywhere is an error: a tar file must end in the zeros that its format asks for, in no more of them than tools
write, and be what `manifest.py` finds beside it. Names inside a shard are keys and never become paths; links, devices
and anything else that is no plain file are passed over.

A reader of our own, because those in use do not keep these promises: they end silently where a shard is cut at or in
a header, and their shuffling and resuming depend on the number of ranks and workers.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Generator, Iterator, Sequence
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from contrastile._check import wrong
from contrastile.data.manifest import SIZES, SUMS, as_many_as_told, compare_sum, cut
from contrastile.data.parquet import unpack
from contrastile.data.sources import PICTURES, TABLES, Source
from contrastile.data.table import read_table

# a picture of 64 megapixels is smaller in any format, and a title is no book
MOST_BYTES, LONGEST_TITLE = 1 << 28, 1 << 16
# two empty records end a tar file, and tools fill it up to a whole number of larger ones
TAIL, LONGEST_TAIL = 2 * tarfile.BLOCKSIZE, 2 * tarfile.BLOCKSIZE + tarfile.RECORDSIZE


class Found(NamedTuple):
    """A pair: the bytes of its picture within a file, and its title."""

    path: str
    offset: int
    size: int
    title: str


# a pair, or the reason why there is none
Finding = Found | str


def find_pairs(source: Source, unpacked: Path) -> Iterator[Finding]:
    """Every pair of a source, in the order of its files. Parquet files are unpacked into tar shards in `unpacked`."""
    for path in map(Path, source.paths):
        if source.kind == "folder":
            yield from find_in_folder(path)
        elif source.kind in TABLES:
            yield from find_in_table(path)
        elif source.kind == ".parquet":
            compare_sum(path)
            yield from as_many_as_told(path, _pairs(unpack(path, unpacked)))
        else:
            yield from find_in_tar(path)


def state(source: Source) -> list[Any]:
    """What decides whether a source is still the one that was read: paths, sizes and dates of all its files."""
    paths = list(source.paths)
    if source.kind == "folder":
        paths = [str(path) for path in _files(Path(paths[0]), (*PICTURES, ".txt"))]
    elif source.kind in TABLES:
        paths += [str(row[0]) for table in source.paths for row in read_table(Path(table)) if not isinstance(row, str)]
    return [source.kind, *map(_stat, paths)]


def promises(source: Source) -> list[Any]:
    """Likewise of the manifests beside its shards, with which they are compared again when one has come or changed."""
    kept = source.kind in (".tar", ".parquet")
    folders = sorted({os.path.dirname(path) for path in source.paths}) if kept else []
    beside = (os.path.join(folder, name) for folder in folders for name in (SIZES, SUMS))
    return [_stat(path) for path in beside if os.path.isfile(path)]


def _stat(path: str) -> list[Any]:
    try:
        stat = os.stat(path)
    except OSError:
        return [os.path.abspath(path), None]
    return [os.path.abspath(path), stat.st_size, stat.st_mtime_ns]


def find_in_tar(shard: Path) -> Iterator[Finding]:
    """Every pair of a shard. Raises ValueError where the shard is not whole."""
    compare_sum(shard)
    yield from as_many_as_told(shard, _pairs(shard))


def _pairs(shard: Path) -> Iterator[Finding]:
    for _, members in groupby(_members(shard), key=lambda member: _key(member.name)):
        finding = _pair(shard, list(members))
        if finding is not None:
            yield finding


def _key(name: str) -> str:
    """The name up to the first dot of its last part."""
    path = PurePosixPath(name)
    return str(path.with_name(path.name.partition(".")[0] or path.name)) if path.name else name


class Member(NamedTuple):
    """A plain file inside a shard, or another entry, which has no suffix."""

    name: str
    suffix: str
    offset: int
    size: int


def _members(shard: Path) -> Iterator[Member]:
    """Every entry; at the end, the end is looked at: the library stops silently at a header that is damaged or cut."""
    try:
        with shard.open("rb") as file:
            end = yield from _entries(shard, file)
            file.seek(end)
            rest = file.read(LONGEST_TAIL + tarfile.BLOCKSIZE)
    except OSError as failure:
        raise wrong("source", "be files that can be read", shard, f"{failure.strerror}.") from failure
    if len(rest) < TAIL or len(rest) % tarfile.BLOCKSIZE or rest.strip(b"\0"):
        raise cut(shard, f"no end at byte {end:,}")
    if len(rest) > LONGEST_TAIL:
        raise cut(shard, f"nothing but zeros from byte {end:,} on")


def _entries(shard: Path, file: BinaryIO) -> Generator[Member, None, int]:
    """Every entry as the library tells it, and where it found the last one's end."""
    end = 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for entry in tar:
                # it would follow a size below zero back to where it was, for ever
                if entry.size < 0 or tar.offset <= end:
                    raise tarfile.ReadError(f"a size below 0 at byte {entry.offset:,}")
                plain = entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and entry.sparse is None
                suffix = os.path.splitext(entry.name)[1].lower() if plain else ""
                end = tar.offset
                yield Member(entry.name, suffix, entry.offset_data, entry.size)
                # the library would remember all of them
                tar.members = []  # type: ignore[attr-defined]
            return tar.offset
    except OSError:
        raise
    # it raises whatever a damaged header leads it into: numbers too large, too many headers of headers
    except Exception as failure:
        raise cut(shard, failure) from failure


def _pair(shard: Path, members: Sequence[Member]) -> Finding | None:
    """The pair of one key; None where nothing of it is a picture or a text, such as the shard's own notes."""
    pictures = [member for member in members if member.suffix in PICTURES]
    texts = [member for member in members if member.suffix == ".txt"]
    if not pictures and not texts:
        return None if all(member.suffix for member in members) else "not a plain file"
    if not pictures:
        return "missing picture"
    if not texts:
        return "missing title"
    if len(pictures) > 1 or len(texts) > 1:
        return "key used twice"
    picture, text = pictures[0], texts[0]
    with shard.open("rb") as file:
        file.seek(text.offset)
        # one letter more than a title has: too large then
        return _found(shard, picture.offset, picture.size, file.read(min(text.size, LONGEST_TITLE + 1)))


def _found(path: Path, offset: int, size: int, title: bytes) -> Finding:
    """The pair, its title in one line."""
    if not size:
        return "missing picture"
    if size > MOST_BYTES or len(title) > LONGEST_TITLE:
        return "too large"
    try:
        clean = " ".join(title.decode("utf-8").split())
    except UnicodeDecodeError:
        return "not UTF-8"
    # zeros are what a disk gives in the place of what it lost
    return "not a text" if "\0" in clean else Found(str(path), offset, size, clean) if clean else "empty title"


def find_in_table(table: Path) -> Iterator[Finding]:
    """Every row of a table, as `table.py` reads it."""
    for row in read_table(table):
        if isinstance(row, str):
            yield row
        else:
            path, title = row
            yield _found(path, 0, path.stat().st_size if path.is_file() else 0, title.encode())


def find_in_folder(folder: Path) -> Iterator[Finding]:
    """Every picture below a folder: its title is the .txt beside it, or else the name of the folder that it lies in.

    Links are followed only to files that lie inside too.
    """
    inside = folder.resolve()
    for path in _files(folder, PICTURES):
        text = path.with_suffix(".txt")
        if not all(one.resolve().is_relative_to(inside) for one in (path, text)):
            yield "outside the folder"
            continue
        yield _found(path, 0, path.stat().st_size, _beside(path, text))


def _beside(path: Path, text: Path) -> bytes:
    """The title of a picture in a folder."""
    if not text.is_file():
        return path.parent.name.replace("_", " ").encode()
    with text.open("rb") as file:
        return file.read(LONGEST_TITLE + 1)


def _files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes and path.is_file())
