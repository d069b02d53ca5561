"""Options that several verbs have, and their checks before anything heavy is imported."""

import argparse
import os
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from contrastile._errors import invalid
from contrastile.train.folder import INDEX, RunFolder, finished_run
from contrastile.train.folder import RECIPE as RECIPE_FILE

# in lower case
UNITS = {"": 1, "k": 2**10, "m": 2**20, "kib": 2**10, "mib": 2**20, "gib": 2**30}
SIZE = re.compile(r"(\d{1,3}(?:_\d{3})+|\d{1,30})([a-z]*)", re.IGNORECASE | re.ASCII)
SIZES = "Such as 4096, 64k, 1M, 192MiB or 2GiB."
RECIPE = "a TOML file, or a recipe of the package by its name, such as glyphs"
OVERRIDES: dict[str, Any] = {"nargs": "*", "default": [], "metavar": "key=value"}
DEFAULT = "Leave it out for the default."
# passages that a first stage picks for a late retriever
CANDIDATES = 1000


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")


def flag(name: str) -> str:
    return name if name.startswith("-") else f"--{name.replace('_', '-')}"


def needs(*modules: str) -> None:
    """Raise ModuleNotFoundError, at once, for a module that a verb imports at its end."""
    for name in modules:
        if find_spec(name) is None:
            raise ModuleNotFoundError(name=name)


def at_least(name: str, number: float | None, least: int = 1, reason: str = DEFAULT) -> None:
    if number is not None and not number >= least:
        raise invalid(flag(name), f"be at least {least}", number, reason)


def number(name: str, text: str, remedy: str = SIZES) -> int:
    """Return a size written with a unit, in any case.

    >>> number("sizes", "64k"), number("workspace", "2GiB")
    (65536, 2147483648)
    """
    match = SIZE.fullmatch(text)
    if match is None or int(match[1]) == 0 or match[2].lower() not in UNITS:
        remedy = "Write key=value before the options." if "=" in text else remedy
        raise invalid(name, "be whole numbers above 0, perhaps with a unit", repr(text), remedy)
    return int(match[1]) * UNITS[match[2].lower()]


def check_bad_rows(fraction: float | None) -> None:
    if fraction is not None and not 0 <= fraction < 1:
        raise invalid("--bad-rows", "be a share from 0 to below 1", fraction, "0.01 is one row of a hundred.")


def add_candidates(parser: argparse.ArgumentParser) -> None:
    text = "for a late retriever: score the first N passages (default: 1000) of bm25, or of another run's index; or all"
    parser.add_argument("--candidates", metavar="SOURCE[:N]", help=text)


def candidates(text: str | None, recipe: Any) -> tuple[str, int] | None:
    """The source of --candidates and their number; ValueError for an unknown source, or a run that is not late."""
    if text is None:
        return None
    kind = getattr(recipe.model, "kind", "single")
    if kind != "late":
        rule, remedy = "be left out unless the run is a late retriever", "It compares all passages at once anyway."
        raise invalid("--candidates", rule, f'a run of kind "{kind}"', remedy)
    head, colon, tail = text.rpartition(":")
    source, count = (head, int(tail)) if colon and tail.isdecimal() else (text, CANDIDATES)
    at_least("--candidates", count, reason="Such as bm25:1000.")
    if source not in ("bm25", "all") and not (Path(source) / "index" / INDEX).is_file():
        remedy = f"Make it first: contrastile encode {source}" if os.path.isdir(source) else "Check its spelling."
        raise invalid("--candidates", "be all, bm25, or a run with an index", f'"{source}"', remedy)
    return source, count


def check_source(name: str, path: str | None) -> None:
    if path is not None and not os.path.exists(path):
        raise invalid(name, "be a file or folder", f'"{path}"', "Check its path.")


def check_path(name: str, path: str | None) -> None:
    """Check that a path is not empty, as that of an unset variable is."""
    if path == "":
        raise invalid(name, "name a file or folder", '""', "Leave it out for the run's own.")


def index_of(arguments: argparse.Namespace, recipe: Any) -> Path:
    """The index of --index, or the run's own; where it is missing, ValueError names the command that makes it."""
    check_path("--index", arguments.index)
    index = Path(arguments.index or Path(arguments.run) / "index")
    if not (index / INDEX).is_file():
        words = ["encode", arguments.run, *(["FOLDER_OF_PICTURES"] if recipe.kind == "image-text" else [])]
        command = shlex.join(["contrastile", *words, *(["--out", str(index)] if arguments.index else [])])
        raise invalid("index", f"hold an {INDEX}", f'"{index}"', f"Make it first: {command}")
    return index


def finished_run_on(run: str, device: str) -> tuple[RunFolder, Any]:
    """Return the folder of a finished run and its recipe, after a check of the device."""
    from contrastile.train.config.base import known_device
    from contrastile.train.recipe import load_any_recipe

    known_device(device)
    folder = finished_run(run)
    return folder, load_any_recipe(folder / RECIPE_FILE, files=False)
