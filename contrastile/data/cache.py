"""The cache: folders of images or texts that are made once and checked at every opening.

Stands below the sources that make folders: of pairs (`pairs.py`), of texts (`docstrings.py`). A folder is written
under a temporary name and renamed, under a lock, so that neither a kill nor a second process leaves half of it. Its
checksums are compared whenever it is opened; a damaged folder is made again, with a warning.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from contrastile._errors import invalid, written_to
from contrastile.data.files import open_in_place

logger = logging.getLogger("contrastile")

# increased whenever the content of a cached folder changes, so that older folders are not used
FORMAT = 1
MANIFEST = "manifest.json"


def cached_folder(
    cache: Path, kind: str, settings: Mapping[str, Any], *, files: Sequence[str], make: Callable[[Path], None]
) -> Path:
    """The folder under `cache` that belongs to exactly these `settings`, with `files`, which `make(folder)` writes."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    folder = cache / f"{kind}-{digest[:16]}"
    with _locked(cache, folder.name):
        damage = _damage(folder, files)
        if damage is not None:
            if folder.exists():
                logger.warning("the cache %s is damaged (%s) and is made again", folder, damage)
                shutil.rmtree(folder)
            _write_whole(folder, settings, files, make)
    return folder


@contextmanager
def _locked(cache: Path, name: str) -> Iterator[None]:
    """Lock a folder: one process makes it, the others wait and read it. The lock ends with its process."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = open_in_place(cache / f".{name}.lock", "w")
    except OSError as failure:
        raise invalid(
            "cache", "be a folder that can be written", cache, f"Choose another one ({failure})."
        ) from failure
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_whole(folder: Path, settings: Mapping[str, Any], files: Sequence[str], make: Callable[[Path], None]) -> None:
    """Write the folder under a temporary name, then rename it; leftovers of a killed process are removed first."""
    temporary = folder.with_name(f".{folder.name}.making")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with written_to(folder):
            temporary.mkdir()
            make(temporary)
            sums = {name: checksum(temporary / name) for name in files}
            manifest = {"format": FORMAT, "settings": settings, "sha256": sums}
            write_text(temporary / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))
            sync(temporary)
            temporary.rename(folder)
            sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a file and flush it to the disk."""
    with open_in_place(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Flush a file's bytes, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damage(folder: Path, files: Sequence[str]) -> str | None:
    """The damage of a folder, in words; None for a whole one."""
    if not folder.exists():
        return "it is not there"
    try:
        sums = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"]
        for name in files:
            if checksum(folder / name) != sums[name]:
                return f"the checksum of {name} does not agree"
    except FileNotFoundError as missing:
        return f"{Path(missing.filename).name} is missing"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    return None
