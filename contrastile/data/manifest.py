"""What lies beside shards and says what they are: `sizes.json`, how many pairs, and `SHA256SUMS`, every byte.

Under `shards.py`. Neither has to be there; a shard that one of them names is compared with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import TypeVar

from contrastile._check import wrong

SIZES, SUMS = "sizes.json", "SHA256SUMS"
T = TypeVar("T")


def cut(shard: Path, got: object) -> ValueError:
    """What a damaged shard is told by."""
    said = " ".join(str(got).split()).rstrip(".") or repr(got)
    return wrong("source", f"be whole shards ({shard})", said, "Copy that shard again; it is cut or damaged.")


def compare_sum(shard: Path) -> None:
    """Raises ValueError where a SHA256SUMS beside the shard has its name, with other sums only."""
    sums = shard.parent / SUMS
    if not sums.is_file():
        return
    try:
        # as the tool of that name writes them: a star before what was read as bytes, folders as they were given
        lines = (line.split(maxsplit=1) for line in sums.read_text(encoding="utf-8").splitlines() if line.strip())
        told = {one.lower() for one, name in lines if PurePosixPath(name.removeprefix("*")).name == shard.name}
    except ValueError as failure:
        remedy = "Write it again with sha256sum, or remove it."
        raise wrong(SUMS, "be lines of a checksum and a file", sums, remedy) from failure
    if told:
        with shard.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() not in told:
                raise cut(shard, f"another checksum than {SUMS} says")


def as_many_as_told(shard: Path, found: Iterable[T]) -> Iterator[T]:
    """What is found in a shard; raises ValueError at its end where a sizes.json beside it says another number."""
    count = 0
    for count, finding in enumerate(found, start=1):  # noqa: B007
        yield finding
    told = _told(shard)
    if told is not None and told != count:
        raise cut(shard, f"{count} pairs where {SIZES} says {told}")


def _told(shard: Path) -> int | None:
    sizes = shard.parent / SIZES
    if not sizes.is_file():
        return None
    try:
        told = json.loads(sizes.read_text(encoding="utf-8")).get(shard.name)
        return None if told is None else int(told)
    except (ValueError, TypeError, AttributeError) as failure:
        remedy = "Write it again, or remove it."
        raise wrong(SIZES, "be an object of shards and their numbers of pairs", sizes, remedy) from failure
