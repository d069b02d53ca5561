"""Names that a recipe gives to data: collections of files on this machine, and prompts.

Stands on the ground, so that a recipe can be checked before any file is read. The sources of a collection are joined by
`::`; each is tar shards, parquet files or tables, with ranges in braces, or a folder of images. Nothing is fetched and
nothing is run: an address or a pipe is refused.
"""

import math
import os
import re
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

# the source of a recipe for one's own data, until it is given
TO_BE_GIVEN = ""
# the formats of images that Pillow decodes itself, by its names, with the endings of their files; for others it may
# call programs of the machine
FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"), "PNG": (".png",), "WEBP": (".webp",), "GIF": (".gif",),
    "BMP": (".bmp",), "TIFF": (".tif", ".tiff"), "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
}  # fmt: skip
PICTURES = tuple(ending for endings in FORMATS.values() for ending in endings)
TABLES = (".tsv", ".csv")
KINDS = (".tar", ".parquet", *TABLES)
MOST_FILES = 1_000_000

# sentences with a place for the name of a class, by their names in a recipe; the sentences are this project's own
PROMPTS: dict[str, tuple[str, ...]] = {
    # the most common prompt of the field
    "plain": ("a photo of a {}.",),
    "several": (
        "a photo of a {}.", "a close photo of a {}.", "a photo of a {}, seen from afar.",
        "a poor and blurred photo of a {}.", "a {} among other things.", "a drawing of a {}.",
        "something that looks like a {}.",
    ),
}  # fmt: skip


class Source(NamedTuple):
    """Files of one of the `KINDS`, or "folder" with the path of one folder of images."""

    kind: str
    paths: tuple[str, ...]


def is_collection(source: str) -> bool:
    """True for shards, parquet files, folders and several tables; False for the glyphs, one table, or no source."""
    return source not in ("glyphs", TO_BE_GIVEN) and (
        "::" in source or "{" in source or not source.lower().endswith(TABLES)
    )


def read_source(text: str) -> list[Source]:
    """The sources of a text such as "a/{000..099}.tar::b/pictures", in its order; no file is opened.

    Raises ValueError for a text that names no files.

    >>> read_source("a/{08..10}.tar::b/x.parquet")[0].paths
    ('a/08.tar', 'a/09.tar', 'a/10.tar')
    """
    return [_source(pattern) for pattern in text.split("::")]


def _source(pattern: str) -> Source:
    if not pattern.strip() or pattern.startswith("pipe:") or "://" in pattern:
        raise ValueError(f'must name files on this machine; got "{pattern}"')
    if "*" in pattern and not os.path.exists(pattern):
        # a pattern would silently match fewer files where one is lost
        raise ValueError(f'must count its files, as in "shards/{{000..099}}.tar"; got "{pattern}"')
    paths = tuple(braces(pattern))
    kind = next((kind for kind in KINDS if pattern.lower().endswith(kind)), "folder")
    if kind == "folder" and (len(paths) > 1 or re.search(r"\.(gz|tgz|zip|json|jsonl)$", pattern)):
        ends = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}"
        raise ValueError(f'must end in {ends}, or be a folder of images or "glyphs"; got "{pattern}"')
    return Source(kind, paths)


def missing(source: Source) -> str | None:
    exists = os.path.isdir if source.kind == "folder" else os.path.isfile
    return next((path for path in source.paths if not exists(path)), None)


def braces(pattern: str) -> Iterator[str]:
    """Expand braces in every way: {007..012} counts and keeps the zeros, {a,b} is either.

    >>> list(braces("{x,y}/{9..11}"))
    ['x/9', 'x/10', 'x/11', 'y/9', 'y/10', 'y/11']
    """
    pieces = re.split(r"(\{[^{}]*\})", pattern)
    choices = [_choices(piece) if piece.startswith("{") else [piece] for piece in pieces]
    if (count := math.prod(map(len, choices))) > MOST_FILES:
        raise ValueError(f'must name at most {MOST_FILES:,} files; got {count:,} in "{pattern}"')
    return ("".join(chosen) for chosen in product(*choices))


def _choices(group: str) -> list[str]:
    counted = re.fullmatch(r"\{(\d+)\.\.(\d+)\}", group)
    if counted is None and ".." in group and "," not in group:
        raise ValueError(f"must count in whole numbers, as in {{000..099}}; got {group}")
    if counted is None:
        return group[1:-1].split(",")
    low, high = counted.groups()
    if int(high) < int(low) or int(high) - int(low) >= MOST_FILES:
        raise ValueError(f"must count upwards, to {MOST_FILES:,} files at most; got {group}")
    return [f"{number:0{len(low)}}" for number in range(int(low), int(high) + 1)]
