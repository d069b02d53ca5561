"""Files of a run's folder and of a cache: made new, or opened in place, and never through a symbolic link.

Under whatever writes: `train/folder.py`, `train/log.py`, `data/cache.py`. A folder may come from somebody else,
with links under the names that are written there. Followed, they would lead to any file of its reader. Only the last
part of a path is looked at: a folder that the user names may be a link.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import IO, Any

from contrastile._errors import invalid


def new_file(path: Path) -> None:
    """Make an empty file at `path`. An earlier file or link of that name is removed, what a link leads to is not."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))


def open_in_place(path: Path, mode: str, *, buffering: int = -1, encoding: str | None = None) -> IO[Any]:
    """The built-in `open` of a file that is appended to, truncated or written where it lies.

    Raises ValueError where `path` is a symbolic link.
    """
    try:
        return open(path, mode, buffering, encoding, opener=_opened)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise _linked(path, "file") from None


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def own_folder(path: Path) -> Path:
    """The path of a folder that is written into, whether it is there or not; ValueError where it is a symbolic link."""
    if path.is_symlink():
        raise _linked(path, "folder")
    return path


def _linked(path: Path, kind: str) -> ValueError:
    return invalid(path.name, f"be a {kind}, not a symbolic link", f'"{path}"', f"Put the {kind} itself there.")
