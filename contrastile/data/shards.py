"""Places of every pair of a collection: tar shards of key.jpg and key.txt, parquet files, tables, folders of images.

Stands below `index.py`, which stores the places. Only headers and captions are read, no image. A shard that was cut
anywhere is an error: a tar file must end in the zeros that its format asks for, in no more of them than tools write,
and agree with the manifests beside it (`manifest.py`). Names inside a shard are keys and never become paths; links,
devices and anything else that is no plain file are passed over.

No library in use keeps these promises: readers end silently where a shard is cut at or in a header, and their shuffling
and resuming depend on the number of ranks and workers.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Generator, Iterator, Sequence
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from contrastile._errors import invalid
from contrastile.data.manifest import SIZES, SUMS, compare_size, compare_sum, damaged
from contrastile.data.parquet import unpack
from contrastile.data.skipped import Skipped
from contrastile.data.sources import PICTURES, TABLES, Source
from contrastile.data.tables import read_table

# the most bytes of an image, more than 64 megapixels take in any format, and of a caption
MOST_BYTES, LONGEST_CAPTION = 1 << 28, 1 << 16
# two empty records end a tar file, and tools fill it up to a whole number of larger ones
TAIL, LONGEST_TAIL = 2 * tarfile.BLOCKSIZE, 2 * tarfile.BLOCKSIZE + tarfile.RECORDSIZE


class Pair(NamedTuple):
    """The place of an image's bytes within a file, and its caption."""

    path: str
    offset: int
    size: int
    caption: str


# a pair, or the reason why there is none
Finding = Pair | str


def find_pairs(source: Source, unpacked: Path) -> Iterator[Finding]:
    """Every pair of a source, in the order of its files. Parquet files are unpacked into tar shards in `unpacked`."""
    for path in map(Path, source.paths):
        if source.kind == "folder":
            yield from find_in_folder(path)
        elif source.kind in TABLES:
            yield from find_in_table(path)
        elif source.kind == ".parquet":
            compare_sum(path)
            yield from compare_size(path, _tar_pairs(unpack(path, unpacked)))
        else:
            yield from find_in_tar(path)


def find_in_tar(shard: Path) -> Iterator[Finding]:
    """Every pair of a tar shard. Raises ValueError where the shard is not whole."""
    compare_sum(shard)
    yield from compare_size(shard, _tar_pairs(shard))


def read_bytes(path: str, offset: int, size: int | None) -> bytes:
    """The bytes of an image within a file; without `size`, the whole file.

    Raises `Skipped` where the file has become shorter, or is longer than any image.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size if size is None else size
        if size > MOST_BYTES:
            raise Skipped("too large")
        content = os.pread(file.fileno(), size, offset)
    if len(content) != size:
        raise Skipped("missing picture")
    return content


def state(source: Source) -> list[Any]:
    """The state of a source, by which an index is known to be its own: paths, sizes and dates of all its files."""
    paths = list(source.paths)
    if source.kind == "folder":
        paths = [str(path) for path in _files(Path(paths[0]), (*PICTURES, ".txt"))]
    elif source.kind in TABLES:
        paths += [str(row[0]) for table in source.paths for row in read_table(Path(table)) if not isinstance(row, str)]
    return [source.kind, *map(_stat, paths)]


def manifest_state(source: Source) -> list[Any]:
    """The state of the manifests beside its shards; the shards are compared again when a manifest is new or changed."""
    has_manifests = source.kind in (".tar", ".parquet")
    folders = sorted({os.path.dirname(path) for path in source.paths}) if has_manifests else []
    manifests = (os.path.join(folder, name) for folder in folders for name in (SIZES, SUMS))
    return [_stat(path) for path in manifests if os.path.isfile(path)]


def _stat(path: str) -> list[Any]:
    try:
        stat = os.stat(path)
    except OSError:
        return [os.path.abspath(path), None]
    return [os.path.abspath(path), stat.st_size, stat.st_mtime_ns]


def _tar_pairs(shard: Path) -> Iterator[Finding]:
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
    """Every entry, then a check of the end: the library stops silently at a header that is damaged or cut."""
    try:
        with shard.open("rb") as file:
            end = yield from _entries(shard, file)
            file.seek(end)
            rest = file.read(LONGEST_TAIL + tarfile.BLOCKSIZE)
    except OSError as failure:
        raise invalid("source", "be files that can be read", shard, f"{failure.strerror}.") from failure
    if len(rest) < TAIL or len(rest) % tarfile.BLOCKSIZE or rest.strip(b"\0"):
        raise damaged(shard, f"no end at byte {end:,}")
    if len(rest) > LONGEST_TAIL:
        raise damaged(shard, f"nothing but zeros from byte {end:,} on")


def _entries(shard: Path, file: BinaryIO) -> Generator[Member, None, int]:
    """Every entry as the library reads it; returns the end of the last one."""
    end = 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for entry in tar:
                # with a size below zero the library would go back and forth between two headers for ever
                if entry.size < 0 or tar.offset <= end:
                    raise tarfile.ReadError(f"a size below 0 at byte {entry.offset:,}")
                plain = entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and entry.sparse is None
                suffix = os.path.splitext(entry.name)[1].lower() if plain else ""
                end = tar.offset
                yield Member(entry.name, suffix, entry.offset_data, entry.size)
                # the library would keep every entry in memory
                tar.members = []  # type: ignore[attr-defined]
            return tar.offset
    except OSError:
        raise
    # a damaged header leads the library into any exception: numbers too large, endless headers of headers
    except Exception as failure:
        raise damaged(shard, failure) from failure


def _pair(shard: Path, members: Sequence[Member]) -> Finding | None:
    """The pair of one key; None for a key without an image or a text, such as a shard's own notes."""
    images = [member for member in members if member.suffix in PICTURES]
    texts = [member for member in members if member.suffix == ".txt"]
    if not images and not texts:
        return None if all(member.suffix for member in members) else "not a plain file"
    if not images:
        return "missing picture"
    if not texts:
        return "missing title"
    if len(images) > 1 or len(texts) > 1:
        return "key used twice"
    image, text = images[0], texts[0]
    with shard.open("rb") as file:
        file.seek(text.offset)
        # one byte more than a caption may have, so that a longer one is noticed
        return _checked(shard, image.offset, image.size, file.read(min(text.size, LONGEST_CAPTION + 1)))


def _checked(path: Path, offset: int, size: int, caption: bytes) -> Finding:
    """The pair with its caption in one line, or the reason why it is none."""
    if not size:
        return "missing picture"
    if size > MOST_BYTES or len(caption) > LONGEST_CAPTION:
        return "too large"
    try:
        clean = " ".join(caption.decode("utf-8").split())
    except UnicodeDecodeError:
        return "not UTF-8"
    # a disk gives zeros in the place of what it lost
    return "not a text" if "\0" in clean else Pair(str(path), offset, size, clean) if clean else "empty title"


def find_in_table(table: Path) -> Iterator[Finding]:
    """Every row of a table of images."""
    for row in read_table(table):
        if isinstance(row, str):
            yield row
        else:
            path, caption = row
            yield _checked(path, 0, path.stat().st_size if path.is_file() else 0, caption.encode())


def find_in_folder(folder: Path) -> Iterator[Finding]:
    """Every image below a folder: its caption is the .txt beside it, or else the name of the folder that it lies in.

    Links are followed only to files that lie inside too.
    """
    root = folder.resolve()
    for path in _files(folder, PICTURES):
        text = path.with_suffix(".txt")
        if not all(one.resolve().is_relative_to(root) for one in (path, text)):
            yield "outside the folder"
            continue
        yield _checked(path, 0, path.stat().st_size, _folder_caption(path, text))


def _folder_caption(path: Path, text: Path) -> bytes:
    """The caption of an image in a folder."""
    if not text.is_file():
        return path.parent.name.replace("_", " ").encode()
    with text.open("rb") as file:
        return file.read(LONGEST_CAPTION + 1)


def _files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes and path.is_file())
