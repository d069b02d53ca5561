"""Where every pair of a collection lies: tar shards of key.jpg and key.txt, parquet files, folders of pictures.

Before `collection.py`, which remembers what is found here. Only headers and titles are read, no picture. A shard that
was cut anywhere is an error: a tar file must end in the zeros that its format asks for, and hold as many pairs as
`sizes.json` beside it says; where a `SHA256SUMS` lies there, every byte is compared. Names inside a shard are keys and
never become paths; links, devices and anything else that is no plain file are passed over.

A reader of our own, because those in use do not keep these promises: they end silently where a shard is cut at or in
a header, and their shuffling and resuming depend on the number of ranks and workers.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from contrastile._check import wrong
from contrastile.data.sources import Source

PICTURES = (".jpg", ".jpeg", ".png", ".webp")
TITLE_COLUMNS, PICTURE_COLUMNS = ("title", "text", "caption", "TEXT"), ("image", "jpg", "png", "picture")
SIZES, SUMS = "sizes.json", "SHA256SUMS"
# a picture of 64 megapixels is smaller in any format, and a title is no book
MOST_BYTES, LONGEST_TITLE = 1 << 28, 1 << 16
# two empty records end a tar file
TAIL = 2 * 512


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
    for path in source.paths:
        if source.kind == "folder":
            yield from find_in_folder(Path(path))
        elif source.kind == ".parquet":
            yield from find_in_tar(unpack(Path(path), unpacked))
        else:
            yield from find_in_tar(Path(path))


def state(source: Source) -> list[Any]:
    """What decides whether a source is still the one that was read: paths, sizes and dates of its files."""
    paths = source.paths if source.kind != "folder" else [*map(str, _files(Path(source.paths[0]), (*PICTURES, ".txt")))]
    found = [(path, os.stat(path)) for path in paths]
    return [source.kind, *([os.path.abspath(path), stat.st_size, stat.st_mtime_ns] for path, stat in found)]


def find_in_tar(shard: Path) -> Iterator[Finding]:
    """Every pair of a shard. Raises ValueError where the shard is not whole."""
    pairs = 0
    _compare_sum(shard)
    for _, members in groupby(_members(shard), key=lambda member: _key(member.name)):
        finding = _pair(shard, list(members))
        if finding is not None:
            pairs += 1
            yield finding
    expected = _expected(shard)
    if expected is not None and expected != pairs:
        raise _cut(shard, f"{pairs} pairs where {SIZES} says {expected}")


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
        with shard.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for entry in tar:
                plain = entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and entry.sparse is None
                suffix = os.path.splitext(entry.name)[1].lower() if plain else ""
                yield Member(entry.name, suffix, entry.offset_data, entry.size)
                # the library would remember all of them
                tar.members = []  # type: ignore[attr-defined]
            file.seek(tar.offset)
            if len(rest := file.read(TAIL)) < TAIL or any(map(any, (rest, *iter(lambda: file.read(TAIL), b"")))):
                raise _cut(shard, f"no end at byte {tar.offset:,}")
    except (tarfile.TarError, EOFError) as failure:
        raise _cut(shard, str(failure)) from failure
    except OSError as failure:
        raise wrong("source", "be files that can be read", shard, f"{failure.strerror}.") from failure


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
    if picture.size > MOST_BYTES or text.size > LONGEST_TITLE:
        return "too large"
    with shard.open("rb") as file:
        file.seek(text.offset)
        return _found(shard, picture.offset, picture.size, file.read(text.size))


def _found(path: Path, offset: int, size: int, title: bytes) -> Finding:
    """The pair, its title in one line."""
    try:
        clean = " ".join(title.decode("utf-8").split())
    except UnicodeDecodeError:
        return "not UTF-8"
    return Found(str(path), offset, size, clean) if clean else "empty title"


def _expected(shard: Path) -> int | None:
    """How many pairs `sizes.json` promises, where it lies beside the shard."""
    sizes = shard.parent / SIZES
    if not sizes.is_file():
        return None
    try:
        told = json.loads(sizes.read_text(encoding="utf-8")).get(shard.name)
    except (ValueError, AttributeError) as failure:
        remedy = "Write it again, or remove it."
        raise wrong(SIZES, "be an object of shards and their numbers of pairs", sizes, remedy) from failure
    return None if told is None else int(told)


def _compare_sum(shard: Path) -> None:
    """Every byte of the shard, where a SHA256SUMS beside it names it."""
    sums = shard.parent / SUMS
    if not sums.is_file():
        return
    # as the tool of that name writes them, a star before the name of a file that was read as bytes
    lines = (line.split(maxsplit=1) for line in sums.read_text(encoding="utf-8").splitlines() if line)
    told = [sum_ for sum_, name in lines if name.removeprefix("*") == shard.name]
    with shard.open("rb") as file:
        if told and hashlib.file_digest(file, "sha256").hexdigest() != told[0]:
            raise _cut(shard, f"another checksum than {SUMS} says")


def _cut(shard: Path, got: str) -> ValueError:
    return wrong("source", f"be whole shards ({shard})", got, "Copy that shard again; it is cut or damaged.")


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
        title = text.read_bytes() if text.is_file() else path.parent.name.replace("_", " ").encode()
        yield _found(path, 0, path.stat().st_size, title)


def _files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes and path.is_file())


def unpack(table: Path, folder: Path) -> Path:
    """A parquet file as a tar shard in `folder`, whose pictures can be read one by one. A row without either is empty.

    A column of titles and one of pictures: bytes, or as `datasets` writes them, a struct of bytes and path, whose path
    is never followed.
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
    try:
        with pyarrow.parquet.ParquetFile(table) as file, tarfile.open(beside, "w") as tar:
            names = [_column(file.schema_arrow.names, known) for known in (TITLE_COLUMNS, PICTURE_COLUMNS)]
            for number, row in enumerate(_rows(file, names)):
                for suffix, content in zip((".txt", ".jpg"), row, strict=True):
                    entry = tarfile.TarInfo(f"{number:09}{suffix}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
        os.replace(beside, shard)
    except pyarrow.ArrowException as failure:
        raise _cut(table, str(failure)) from failure
    finally:
        beside.unlink(missing_ok=True)
    return shard


def _column(names: Sequence[str], known: Sequence[str]) -> str:
    there = [name for name in known if name in names]
    if not there:
        raise wrong("source", f"have a column among {', '.join(known)}", ", ".join(names), "Rename the one that is.")
    return there[0]


def _rows(file: Any, names: list[str]) -> Iterator[tuple[bytes, bytes]]:
    for batch in file.iter_batches(batch_size=64, columns=names):
        for row in batch.to_pylist():
            title, picture = (row[name] for name in names)
            content = picture.get("bytes") if isinstance(picture, dict) else picture
            yield (title or "").encode(), content if isinstance(content, bytes) else b""
