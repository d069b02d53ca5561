"""Places of every pair of a collection: tar shards of key.jpg and key.txt, parquet files, tables, folders of images.

Only headers and captions are read, no image. `docs/collections.md` lists the promises about damaged and hostile shards;
no library in use keeps them.
"""

import io
import json
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from contrastile._errors import invalid
from contrastile.data.files import cached_folder, checksum, file_state, files_below, open_file, plain_file, sync
from contrastile.data.images import MOST_BYTES
from contrastile.data.sources import PICTURES, TABLES, Source
from contrastile.data.tables import LONGEST_CAPTION, TOO_LONG, check_names, read_table, warn_of_quotes

SIZES, SUMS = "sizes.json", "SHA256SUMS"
# two empty records end a tar file, and tools fill it up to a whole number of larger ones
TAIL, LONGEST_TAIL = 2 * tarfile.BLOCKSIZE, 2 * tarfile.BLOCKSIZE + tarfile.RECORDSIZE
# the most bytes of a member's header with its extensions, and of a number in it
MOST_HEADER, MOST_DIGITS, DIGITS = 1 << 16, 256, re.compile(rb"\d+")
# the first bytes of a compressed file
GZIP = b"\x1f\x8b"

# columns of parquet files, and rows of them that are in memory at once
CAPTION_COLUMNS, IMAGE_COLUMNS, ROWS = ("title", "text", "caption", "TEXT"), ("image", "jpg", "png", "picture"), 8
# the limit of what a file unpacks to: so many times its size, and so many bytes more; images hardly compress further
MOST_TIMES, MOST_MORE = 100, 1 << 28
# a parquet file's tar shard in its folder of the cache
UNPACKED = "pairs.tar"


class Pair(NamedTuple):
    """The place of an image's bytes within a file, and its caption."""

    path: str
    offset: int
    size: int
    caption: str


# a pair, or the reason why there is none
Finding = Pair | str


def find_pairs(kind: str, path: Path, unpacked: Path) -> Iterator[Finding]:
    if kind == "folder":
        return find_in_folder(path)
    if kind in TABLES:
        return find_in_table(path)
    return find_in_tar(path, unpacked if kind == ".parquet" else None)


def find_in_tar(shard: Path, unpacked: Path | None = None) -> Iterator[Finding]:
    """Every pair of a whole tar shard, or of a parquet file, which is unpacked into one under the folder `unpacked`."""
    _compare_sum(shard)
    tar = shard if unpacked is None else unpack(shard, unpacked)
    count = 0
    files = (member for member in _members(tar) if not member.isdir())
    for _, members in groupby(files, key=lambda member: _key(member.name)):
        findings = _pairs(tar, list(members))
        count += bool(findings)
        yield from findings
    stated = _stated_size(shard)
    if stated is not None and stated != count:
        raise _damaged(shard, f"{count} pairs where {SIZES} says {stated}")


def _damaged(shard: Path, got: object) -> ValueError:
    reason = " ".join(str(got).split()).rstrip(".") or repr(got)
    with open(shard, "rb") as file:
        compressed = file.read(len(GZIP)) == GZIP
    remedy = "Unpack that shard with gunzip." if compressed else "Copy that shard again; it is cut or damaged."
    return invalid("source", f"be whole shards ({shard})", reason, remedy)


def _compare_sum(shard: Path) -> None:
    """Raise ValueError where a SHA256SUMS beside the shard lists its name, with other sums only."""
    sums = shard.parent / SUMS
    if not sums.is_file():
        return
    try:
        # the form of the tool sha256sum: a star before names that were read as bytes, folders as they were given
        lines = (line.split(maxsplit=1) for line in sums.read_text(encoding="utf-8").splitlines() if line.strip())
        known = {one.lower() for one, name in lines if PurePosixPath(name.removeprefix("*")).name == shard.name}
    except ValueError as failure:
        remedy = "Write it again with sha256sum, or remove it."
        raise invalid(SUMS, "be lines of a checksum and a file", sums, remedy) from failure
    if known and checksum(shard) not in known:
        raise _damaged(shard, f"another checksum than {SUMS} says")


def _stated_size(shard: Path) -> int | None:
    sizes = shard.parent / SIZES
    if not sizes.is_file():
        return None
    try:
        stated = json.loads(sizes.read_text(encoding="utf-8")).get(shard.name)
        return None if stated is None else int(stated)
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError) as failure:
        remedy = "Write it again, or remove it."
        raise invalid(SIZES, "be an object of shards and their numbers of pairs", sizes, remedy) from failure


def _key(name: str) -> tuple[str, str]:
    folder, _, last = str(PurePosixPath(name)).rpartition("/")
    return folder, last.partition(".")[0] or last


class _Headers(io.BufferedReader):
    """A tar file whose headers alone are read. `left`: the bytes that a member's header may still take.

    The library parses extensions in a time that grows with the square of their length, and of a number's in them.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(plain_file(str(path))))
        self.left = MOST_HEADER

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= self.left:
            raise tarfile.ReadError(f"a header of over {MOST_HEADER:,} bytes")
        content = super().read(size)
        self.left -= len(content)
        if size > tarfile.BLOCKSIZE and any(len(digits) > MOST_DIGITS for digits in DIGITS.findall(content)):
            raise tarfile.ReadError(f"a number of over {MOST_DIGITS} digits in a header")
        return content


def _members(shard: Path) -> Iterator[tarfile.TarInfo]:
    """Every entry, then a check of the end: the library stops silently at a header that is damaged or cut."""
    end = 0
    try:
        with _Headers(shard) as file:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for entry in tar:
                    # with a size below zero the library would go back and forth between two headers for ever
                    if entry.size < 0 or tar.offset <= end:
                        raise tarfile.ReadError(f"a size below 0 at byte {entry.offset:,}")
                    end = tar.offset
                    yield entry
                    # the library would keep every entry in memory
                    tar.members = []  # type: ignore[attr-defined]
                    file.left = MOST_HEADER
                end = tar.offset
            file.seek(end)
            file.left = MOST_HEADER
            rest = file.read(LONGEST_TAIL + tarfile.BLOCKSIZE)
    except OSError as failure:
        raise invalid("source", "be files that can be read", shard, f"{failure.strerror}.") from failure
    # a damaged header leads the library into any exception: numbers too large, endless headers of headers
    except Exception as failure:
        raise _damaged(shard, failure) from failure
    if len(rest) < TAIL or len(rest) % tarfile.BLOCKSIZE or rest.strip(b"\0"):
        raise _damaged(shard, f"no end at byte {end:,}")
    if len(rest) > LONGEST_TAIL:
        raise _damaged(shard, f"nothing but zeros from byte {end:,} on")


def _pairs(shard: Path, members: Sequence[tarfile.TarInfo]) -> list[Finding]:
    """The pair of one key, or a reason for each pair that is lost; empty for a key without image and caption."""
    named = [(os.path.splitext(member.name)[1].lower(), member) for member in members]
    plain = [(suffix, member) for suffix, member in named if member.isreg() and not member.issparse()]
    images = [member for suffix, member in plain if suffix in PICTURES]
    texts = [member for suffix, member in plain if suffix == ".txt"]
    if not images and not texts:
        return ["not a plain file"] if any(suffix in (*PICTURES, ".txt") for suffix, _ in named) else []
    if not images:
        return ["missing picture"] * len(texts)
    if not texts:
        return ["missing caption"] * len(images)
    if len(images) > 1 or len(texts) > 1:
        return ["key used twice"] * min(len(images), len(texts))
    with open_file(shard) as file:
        file.seek(texts[0].offset_data)
        # one byte more than a caption may have, so that a longer one is noticed
        caption = file.read(min(texts[0].size, LONGEST_CAPTION + 1))
    return [_checked(shard, images[0].offset_data, images[0].size, caption, empty="missing picture")]


def _checked(path: Path, offset: int, size: int, caption: bytes, *, empty: str = "broken picture") -> Finding:
    """The pair with its caption in one line, or the reason why it is none: `empty` for an image without bytes."""
    if not size:
        return empty
    if size > MOST_BYTES or len(caption) > LONGEST_CAPTION:
        return "too large" if size > MOST_BYTES else TOO_LONG
    try:
        clean = " ".join(caption.decode("utf-8-sig").split())
    except UnicodeDecodeError:
        return "not UTF-8"
    # a disk gives zeros in place of lost bytes
    return "not a text" if "\0" in clean else Pair(str(path), offset, size, clean) if clean else "empty caption"


def find_in_table(table: Path) -> Iterator[Finding]:
    rows = read_table(table)
    warn_of_quotes(table, rows)
    for row in rows:
        if isinstance(row, str):
            yield row
        else:
            path, caption = row
            yield _checked(path, 0, path.stat().st_size, caption.encode()) if path.is_file() else "missing picture"


def find_in_folder(folder: Path) -> Iterator[Finding]:
    """Every image below a folder, and none outside.

    Its caption is the .txt beside it, or, if no image of its own folder has one, the name of that folder.
    """
    root, paths = folder.resolve(), files_below(folder, PICTURES)
    beside = ((path, path.with_suffix(ending)) for path in paths for ending in (".TXT", ".txt"))
    texts = {path: text for path, text in beside if text.is_file()}
    titled = {path.parent for path in texts}
    for path in paths:
        text = texts.get(path)
        if not all(file.resolve().is_relative_to(root) for file in (path, text or path)):
            yield "outside the folder"
            continue
        if text is None and path.parent in titled:
            yield "missing caption"
            continue
        caption = path.parent.name.replace("_", " ").encode()
        if text is not None:
            with open_file(text) as file:
                caption = file.read(LONGEST_CAPTION + 1)
        yield _checked(path, 0, path.stat().st_size, caption)


def state(source: Source) -> list[Any]:
    """The state of a source, which its index depends on: paths, sizes and dates of all its files."""
    kind, paths = source.kind, list(source.paths)
    if kind == "folder":
        # renamed when the rule of captions changed, so that no index of an earlier version is used
        kind = "titled folder"
        paths = [str(path) for path in files_below(Path(paths[0]), (*PICTURES, ".txt"))]
    elif kind in TABLES:
        paths += [str(row[0]) for table in source.paths for row in read_table(Path(table)) if not isinstance(row, str)]
    return [kind, *map(file_state, paths)]


def manifest_state(source: Source) -> list[Any]:
    """The state of the manifests beside a source's shards; a new or changed manifest is compared with them again."""
    has_manifests = source.kind in (".tar", ".parquet")
    folders = sorted({os.path.dirname(path) for path in source.paths}) if has_manifests else []
    manifests = (os.path.join(folder, name) for folder in folders for name in (SIZES, SUMS))
    return [file_state(path) for path in manifests if os.path.isfile(path)]


def unpack(table: Path, cache: Path) -> Path:
    """The path of a tar shard with the rows of a parquet file, in a folder of its own under `cache`.

    The file has a column of captions and one of images: bytes, or as `datasets` writes them, a struct of bytes and
    path, whose path is never followed. A row without a caption or an image has an empty entry.
    """
    # files of an earlier version, and the remains of its killed processes
    for leftover in (*cache.glob("*.tar"), *cache.glob("*.part-*")):
        leftover.unlink(missing_ok=True)
    settings, make = file_state(str(table.resolve())), partial(_unpack, table)
    return cached_folder(cache, "parquet", settings, files=(UNPACKED,), make=make) / UNPACKED


def _unpack(table: Path, folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    remaining = MOST_TIMES * table.stat().st_size + MOST_MORE
    try:
        with (
            open_file(table) as source,
            pyarrow.parquet.ParquetFile(source, page_checksum_verification=True) as file,
            tarfile.open(folder / UNPACKED, "w") as tar,
        ):
            for number, row in enumerate(_rows(file, table)):
                for suffix, content in zip((".txt", ".jpg"), row, strict=True):
                    if (remaining := remaining - len(content)) < 0:
                        raise _damaged(table, f"more than {MOST_TIMES} times its size in it")
                    add_to_tar(tar, f"{number:09}{suffix}", content)
        sync(folder / UNPACKED)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as failure:
        # the library's own failures have no error number
        if isinstance(failure, OSError) and failure.errno is not None:
            raise
        raise _damaged(table, failure) from failure


def add_to_tar(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def _rows(file: Any, table: Path) -> Iterator[tuple[bytes, bytes]]:
    """Captions and images, both as bytes: a caption that is no text costs its own row only."""
    columns = [
        _column(file.schema_arrow, CAPTION_COLUMNS, "texts", table),
        _column(file.schema_arrow, IMAGE_COLUMNS, "bytes, or structs with bytes", table),
    ]
    paths = found = False
    for batch in file.iter_batches(batch_size=ROWS, columns=columns):
        captions, images = (_as_bytes(batch.column(name)).to_pylist() for name in columns)
        found = found or any(images)
        paths = paths or (not found and _has_paths(batch.column(columns[1])))
        yield from ((caption or b"", image or b"") for caption, image in zip(captions, images, strict=True))
    if paths and not found:
        got = f"paths alone in the column {columns[1]}, which are not followed"
        raise invalid("source", f"have the bytes of images ({table})", got, "Embed them, or name the files in a .csv.")


def _has_paths(column: Any) -> bool:
    """True for structs of which some have a path, as `datasets` writes them."""
    import pyarrow
    from pyarrow import compute

    structs = pyarrow.types.is_struct(column.type) and column.type.get_field_index("path") >= 0
    return structs and compute.struct_field(column, "path").null_count < len(column)


def _column(schema: Any, names: Sequence[str], content: str, table: Path) -> str:
    import pyarrow

    name = next((name for name in names if name in schema.names), None)
    if name is None:
        rule = f"have a column among {', '.join(names)}"
        raise invalid("source", rule, ", ".join(schema.names), "Rename the one that is.")
    check_names([column for column in schema.names if column == name], table)
    kind = schema.field(name).type
    try:
        _as_bytes(pyarrow.nulls(1, kind))
    except pyarrow.ArrowException:
        raise invalid("source", f"have {content} in the column {name}", kind, "Write it anew as these.") from None
    return name


def _as_bytes(column: Any) -> Any:
    """A column of texts, bytes or structs with bytes, as bytes. Raises ArrowException for any other."""
    import pyarrow
    from pyarrow import compute

    if pyarrow.types.is_struct(column.type):
        column = compute.struct_field(column, "bytes")
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pyarrow.large_binary())
