"""Files that are written, never through a symbolic link; and the cache, folders that are made once.

A folder from somebody else may hold links under the names that this program writes, and a link may lead to any file of
the user. Only the last part of a path is checked, so a folder that the user names may be a link. A folder of the cache
is written under a temporary name and renamed, under a lock, so that neither a kill nor a second process leaves half of
it. Its checksums are compared whenever it is opened; a damaged folder is made again.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from contrastile._errors import invalid, logger, written_to

# increased whenever the content of a cached folder changes, so that older folders are not used
FORMAT = 1
MANIFEST = "manifest.json"


def new_file(path: Path) -> None:
    """Make an empty file at `path`. An earlier file or link of that name is removed, but not the target of a link."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))


@contextmanager
def as_open_makes_it(path: Path) -> Iterator[None]:
    """Give a file that a library writes within the permissions that `open` gives, by the process's umask."""
    new_file(path)
    mode = path.stat().st_mode & 0o777
    yield
    path.chmod(mode)


def open_in_place(path: Path, mode: str, *, buffering: int = -1, encoding: str | None = None) -> IO[Any]:
    """The built-in `open` of a file that is written where it lies; ValueError where `path` is a symbolic link."""
    try:
        return open(path, mode, buffering, encoding, opener=lambda name, how: os.open(name, how | os.O_NOFOLLOW, 0o666))
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise _linked(path, "file") from None


def plain_file(path: str) -> int:
    """The descriptor of a file that is read; OSError for a pipe or a device, whose end may never come."""
    if "\0" in path:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = os.fstat(handle).st_mode
    if not stat.S_ISREG(kind):
        os.close(handle)
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise OSError(errno.EINVAL, "Not a plain file", path)
    return handle


def open_file(path: str | Path) -> IO[bytes]:
    """Open a file for reading; OSError for a pipe or a device, and for a NUL in a name."""
    return open(plain_file(str(path)), "rb")


def own_folder(path: Path) -> Path:
    """`path`, of a folder to write into, which need not exist; ValueError where it is a symbolic link."""
    if path.is_symlink():
        raise _linked(path, "folder")
    return path


def _linked(path: Path, kind: str) -> ValueError:
    return invalid(path.name, f"be a {kind}, not a symbolic link", f'"{path}"', f"Put the {kind} itself there.")


def locked(folder: Path, name: str) -> IO[Any]:
    """A file in `folder` that one process at a time holds, until it closes the file or ends; the others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = open_in_place(folder / name, "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def write_text(path: Path, text: str) -> None:
    """Write a file and flush it to the disk."""
    with open_in_place(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached_folder(
    cache: Path, kind: str, settings: Any, *, files: Sequence[str], make: Callable[[Path], object]
) -> Path:
    """The folder under `cache` of exactly these `settings`, with `files`, which `make(folder)` writes.

    A folder that is damaged is made again, with a warning.
    """
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    folder = cache / f"{kind}-{digest[:16]}"
    try:
        lock = locked(cache, f".{folder.name}.lock")
    except OSError as failure:
        remedy = f"Choose another one ({failure})."
        raise invalid("cache", "be a folder that can be written", cache, remedy) from failure
    with lock:
        if folder.exists() and (damage := _damage(folder, files)):
            logger.warning("the cache %s is damaged (%s) and is made again", folder, damage)
            shutil.rmtree(folder)
        if folder.exists():
            return folder
        temporary = folder.with_name(f".{folder.name}.making")
        # leftovers of a killed process
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
                sync(cache)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def files_below(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Files below a folder, in order, whose names end in one of the suffixes; a name may be the suffix alone."""
    return sorted(path for path in folder.rglob("*") if path.name.lower().endswith(tuple(suffixes)) and path.is_file())


def file_state(path: str) -> list[Any]:
    try:
        status = os.stat(path)
    except OSError:
        return [os.path.abspath(path), None]
    return [os.path.abspath(path), status.st_size, status.st_mtime_ns]


def _damage(folder: Path, files: Sequence[str]) -> str | None:
    """The damage of a folder, in words; None for a whole one."""
    try:
        sums = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"]
        for name in files:
            if checksum(folder / name) != sums[name]:
                return f"the checksum of {name} does not agree"
    except FileNotFoundError as missing:
        return f"{Path(missing.filename).name} is missing"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"{MANIFEST} cannot be read"
    return None
