"""Provenance of a number: device, software versions, date and commit, the last columns of every file of results."""

import os
import platform
import subprocess
from contextlib import suppress
from datetime import date
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

# names of the columns
ORIGIN = ("chip", "versions", "date", "commit")


def provenance(device: torch.device, *packages: str, processes: int = 1) -> dict[str, str]:
    """The columns of `ORIGIN`, as of now."""
    software = ", ".join(f"{package} {version}" for package, version in versions(*packages).items())
    today = date.today().isoformat()
    return dict(zip(ORIGIN, (chip(device, processes), software, today, commit()), strict=True))


def chip(device: torch.device, processes: int = 1) -> str:
    """The name of the device: a GPU's, with the number of GPUs that `processes` share out, or the CPU's cores."""
    if device.type != "cuda":
        return f"{torch.get_num_threads()} of {os.cpu_count()} {device.type.upper()} cores, {platform.machine()}"
    count = min(processes, torch.cuda.device_count()) if device.index is None else 1
    return f"{count} x {torch.cuda.get_device_name(device)}" if count > 1 else torch.cuda.get_device_name(device)


def versions(*packages: str) -> dict[str, str]:
    """Versions of contrastile, torch, python, triton and `packages`, without those that are not installed."""
    from contrastile import __version__

    installed = {"contrastile": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for package in ("triton", *packages):
        with suppress(metadata.PackageNotFoundError):
            installed.setdefault(package, metadata.version(package))
    return installed


@cache
def commit() -> str:
    """The commit of the package, with "-dirty" if a file of the package differs from it; empty where git has none.

    Only files of the package count, not results that are written beside it, nor a repository around an installed one.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = "-dirty" if git("status", "--porcelain", "--", ".") else ""
        return git("describe", "--always", "--exclude", "*") + changed
    except (OSError, subprocess.CalledProcessError):
        return ""
