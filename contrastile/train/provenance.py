"""What computed a number, and when: the last columns of every file of results, and the last line of every page.

Below a run's facts, the comparisons and the bench, which all say it in these words.
"""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from datetime import date
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

# the columns
ORIGIN = ("chip", "versions", "date", "commit")


def provenance(device: torch.device, *packages: str, processes: int = 1) -> dict[str, str]:
    """The columns of `ORIGIN`, as of now."""
    computed = ", ".join(f"{package} {version}" for package, version in versions(*packages).items())
    today = date.today().isoformat()
    return dict(zip(ORIGIN, (chip(device, processes), computed, today, commit()), strict=True))


def chip(device: torch.device, processes: int = 1) -> str:
    """The device as a reader knows it: a GPU's name, with how many of them where processes share them out, or cores."""
    if device.type != "cuda":
        return f"{torch.get_num_threads()} of {os.cpu_count()} {device.type.upper()} cores, {platform.machine()}"
    several = min(processes, torch.cuda.device_count()) if device.index is None else 1
    return f"{several} x {torch.cuda.get_device_name(device)}" if several > 1 else torch.cuda.get_device_name(device)


def versions(*packages: str) -> dict[str, str]:
    """Of what computed it, and of `packages`; those that are not installed are left out."""
    from contrastile import __version__

    known = {"contrastile": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for package in ("triton", *packages):
        with suppress(metadata.PackageNotFoundError):
            known.setdefault(package, metadata.version(package))
    return known


def signature(device: torch.device, *packages: str) -> str:
    """Chip and versions in a line."""
    origin = provenance(device, *packages)
    return f"{origin['chip']}; {origin['versions']}"


@cache
def commit() -> str:
    """The commit of the source, marked where the source differs from it; empty without git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
