"""Integrity of an index: the sizes and checksums of its files in index.json, compared when it is opened.

A file has a size and a checksum of each block of 1 MiB. Compared are every size, every block of the offsets, which are
read anyway, and a random sample of the other blocks: a fraction of a second for an index of any size. They protect
against damage, not against somebody who writes a whole index with its checksums.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from contrastile._errors import invalid
from contrastile.data.files import checksum
from contrastile.train.folder import INDEX

# bytes of a block, hexadecimal digits of its checksum, blocks compared when an index is opened
BLOCK, DIGITS, SAMPLED = 2**20, 16, 64
OFFSETS, LENGTHS = ".offsets.npy", ".lengths.npy"
# endings of the files of a shard; the last one of token vectors only
ENDINGS = (".npy", ".ids", ".jsonl", OFFSETS, LENGTHS)
NAME = re.compile(r"\d{5,}")
REMEDY = "Restore it, or remove the folder and encode again."


def described(folder: Path, shard: str) -> dict[str, dict[str, Any]]:
    """The entries of a shard's files: bytes, and the checksums of the blocks, one after the other in one text."""
    paths = [path for ending in ENDINGS if (path := folder / f"{shard}{ending}").is_file()]
    return {path.name: {"bytes": path.stat().st_size, "blocks": "".join(_digests(path))} for path in paths}


def sealed(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of index.json with a checksum of its own, under "sha256"."""
    content = {key: value for key, value in metadata.items() if key != "sha256"}
    return {**content, "sha256": sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def check_index(folder: Path, metadata: Any, *, whole: bool = False) -> None:
    """Raise ValueError where files of an index are not what index.json, `metadata`, says; `whole`: in any byte.

    Indices of earlier versions have checksums of two of the four files of a shard, which only `whole` compares.
    """
    if not _well_formed(metadata):
        raise invalid(INDEX, "list the shards that were written", f'others in "{folder}"', REMEDY)
    if metadata.get("sha256") not in (None, sealed(metadata)["sha256"]):
        raise _damaged(folder / INDEX, "other bytes")
    sampled: list[tuple[Path, int, str]] = []
    for shard in metadata["shards"]:
        for name, expected in shard.get("files", {}).items():
            path, blocks = folder / name, expected["blocks"]
            if not path.is_file() or path.stat().st_size != expected["bytes"]:
                raise _damaged(path, "another size" if path.is_file() else "none")
            numbered = [(path, at, blocks[at * DIGITS :][:DIGITS]) for at in range(len(blocks) // DIGITS)]
            if whole or name.endswith((OFFSETS, LENGTHS)):
                _compare(numbered)
            else:
                sampled += numbered
        if whole and "files" not in shard:
            for ending, key in ((".npy", "sha256"), (".jsonl", "passages_sha256")):
                path = folder / f"{shard['name']}{ending}"
                if not path.is_file() or checksum(path) != shard[key]:
                    raise _damaged(path, "other bytes")
    # a generator of its own, because a program may have seeded Python's
    _compare(random.Random().sample(sampled, min(SAMPLED, len(sampled))))


def _well_formed(metadata: Any) -> bool:
    """True where index.json has the keys that are read, and shards whose names lead to no other folder."""
    try:
        shards, known = metadata["shards"], {"complete", "made_by"} <= metadata.keys()
        return known and all(
            NAME.fullmatch(shard["name"])
            and isinstance(shard["passages"], int)
            and {"sha256", "passages_sha256"} <= shard.keys()
            and shard.get("files", {}).keys() <= {f"{shard['name']}{ending}" for ending in ENDINGS}
            and all(isinstance(one["bytes"], int) and one["blocks"] + "" for one in shard.get("files", {}).values())
            for shard in shards
        )
    except (TypeError, KeyError, AttributeError):
        return False


def _compare(blocks: Sequence[tuple[Path, int, str]]) -> None:
    """Raise ValueError for the first block whose bytes have another checksum."""
    for path, number, expected in blocks:
        with path.open("rb") as file:
            file.seek(number * BLOCK)
            if _digest(file.read(BLOCK)) != expected:
                raise _damaged(path, f"other bytes from {number * BLOCK:,} on")


def _digests(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield _digest(block)


def _digest(block: bytes) -> str:
    return sha256(block).hexdigest()[:DIGITS]


def _damaged(path: Path, got: str) -> ValueError:
    return invalid("index", f"hold {path.name} as it was written", f'{got} in "{path.parent}"', REMEDY)
