"""Manifests beside shards: `sizes.json`, the number of pairs, and `SHA256SUMS`, the checksum of every byte.

Stands below `shards.py`. Both are optional; a shard that one of them names is compared with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import TypeVar

from contrastile._errors import invalid
from contrastile.data.cache import checksum

SIZES, SUMS = "sizes.json", "SHA256SUMS"
T = TypeVar("T")


def damaged(shard: Path, got: object) -> ValueError:
    """The error for a damaged shard."""
    reason = " ".join(str(got).split()).rstrip(".") or repr(got)
    return invalid("source", f"be whole shards ({shard})", reason, "Copy that shard again; it is cut or damaged.")


def compare_sum(shard: Path) -> None:
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
        raise damaged(shard, f"another checksum than {SUMS} says")


def compare_size(shard: Path, pairs: Iterable[T]) -> Iterator[T]:
    """The pairs of a shard; raises ValueError at its end where a sizes.json beside it states another number."""
    count = 0
    for count, pair in enumerate(pairs, start=1):  # noqa: B007
        yield pair
    stated = _stated_size(shard)
    if stated is not None and stated != count:
        raise damaged(shard, f"{count} pairs where {SIZES} says {stated}")


def _stated_size(shard: Path) -> int | None:
    sizes = shard.parent / SIZES
    if not sizes.is_file():
        return None
    try:
        stated = json.loads(sizes.read_text(encoding="utf-8")).get(shard.name)
        return None if stated is None else int(stated)
    except (ValueError, TypeError, AttributeError) as failure:
        remedy = "Write it again, or remove it."
        raise invalid(SIZES, "be an object of shards and their numbers of pairs", sizes, remedy) from failure
