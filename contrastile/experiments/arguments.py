"""Checks of the arguments of `contrastile compare` against its recipe, before torch is imported.

Below the studies, and called by the command line.
"""

import tomllib
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from contrastile._errors import invalid, logger
from contrastile.train.config import AnyRecipe, Recipe
from contrastile.train.recipe import load_any_recipe, touched

# rules of the learning rate, and their values of optim.rate_scaling
RATES = {"fixed": "none", "sqrt": "sqrt", "linear": "linear"}
# sections that may differ between ways
OF_WAYS = ("loss", "optim", "train")
# bytes of the name of a way, which is the beginning of a file's name
LONGEST_NAME = 100
# keys of the length that all ways share
LENGTHS = ("train.examples", "train.epochs", "train.minutes")
# the value, in `OVERRIDES`, of a key that gets several values; other keys get one value in all trials
SEVERAL = object()
OVERRIDES: dict[str, dict[str, Any]] = {
    "compare": {
        "train.accumulate": SEVERAL, "train.minutes": SEVERAL, "train.epoch_steps": None, "train.retain": 1
    },
    "compare --losses": {"loss.backend": SEVERAL, "loss.exchange": SEVERAL, "train.minutes": None},
    "compare --ways": {"train.minutes": None},
    "compare --batches": {
        "train.batch": SEVERAL, "train.epoch_steps": None, "train.minutes": None, "optim.rate_scaling": SEVERAL,
        "optim.base_batch": SEVERAL,
    },
    "compare of retrievers": {
        "train.batch": SEVERAL, "train.epoch_steps": None, "train.sub_batch": SEVERAL, "train.accumulate": SEVERAL,
        "train.retain": SEVERAL, "train.minutes": None, "evaluate.every": 1.0,
    },
}  # fmt: skip


def report_overrides(comparison: str, recipe: AnyRecipe, origin: str, overrides: Sequence[str]) -> None:
    """Warn of keys of the recipe at `origin` that the comparison overrides; raise ValueError for a user's override."""
    lost = []
    for key, value in OVERRIDES[comparison].items():
        section, _, name = key.rpartition(".")
        table = attrgetter(section)(recipe)
        got, default = getattr(table, name), type(table).model_fields[name].default
        if name not in table.model_fields_set or got == value:
            continue
        if word := next((word for word in overrides if touched(key, [word.partition("=")[0].strip()])), None):
            raise ValueError(f"{word}: {key}: has no effect: {comparison} sets it itself; leave it out")
        # the recipe in a run's folder states the defaults
        if got != default:
            lost.append(key)
    if lost:
        message = "%s: %s sets %s itself: the recipe's own values are not used"
        logger.warning(message, origin, comparison, ", ".join(lost))


def read_ways(path: str, origin: str, overrides: Sequence[str]) -> dict[str, AnyRecipe]:
    """Read the ways of a comparison: under `[ways]`, the overrides of the recipe at `origin` for each."""
    remedy = 'Such as clip = [] and siglip = ["loss.kind=siglip"].'
    try:
        ways = tomllib.loads(Path(path).read_text(encoding="utf-8-sig")).get("ways")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = "not a text in UTF-8" if isinstance(error, UnicodeDecodeError) else f"not valid TOML: {error}"
        reason = getattr(error, "strerror", None) or reason
        raise invalid("--ways", "be a TOML file with a table `ways`", f'"{path}" ({reason})', remedy) from None
    if not isinstance(ways, dict) or len(ways) < 2 or not all(isinstance(words, list) for words in ways.values()):
        raise invalid("--ways", "name a file with a table `ways` of two lists or more", f'"{path}"', remedy)
    _check_names(ways)
    for text in chain(*ways.values()):
        if not isinstance(text, str) or text.split(".")[0] not in OF_WAYS:
            rule, remedy = f"override keys of {', '.join(OF_WAYS)}", "All ways share data and model."
            raise invalid("--ways", rule, f"{text!r} in {path}", remedy)
        if text.partition("=")[0].strip() in LENGTHS:
            remedy = "All ways take the time of the first; give its length behind the recipe."
            raise invalid("--ways", "say nothing about the length", f"{text!r} in {path}", remedy)
    return {name: load_any_recipe(origin, [*overrides, *words]) for name, words in ways.items()}


def _check_names(ways: Iterable[str]) -> None:
    """Raise ValueError for names that are none of a file or of a cell in a table, or are those of one file."""
    files = dict[str, str]()
    for name in ways:
        wrong = not name.strip() or not name.isprintable() or {"/", "|"} & {*name}
        if wrong or len(name.encode()) > LONGEST_NAME:
            rule = f"name ways by a line of 1 to {LONGEST_NAME} bytes without / and |"
            raise invalid("--ways", rule, f"{name!r:.60}", "The name is that of a file, too.")
        if (other := files.setdefault(name.replace(" ", "_"), name)) != name:
            remedy = "The blanks of a name are _ in that of its file."
            raise invalid("--ways", "name ways whose files differ", f'"{other}" and "{name}"', remedy)


def large_and_small(recipe: Recipe) -> tuple[int, int]:
    """Return the recipe's largest batch and its sub-batch of images; raise ValueError where they do not differ."""
    small, large = recipe.train.sub_batch.image, max(batch for _, batch in recipe.train.batch)
    if large <= small:
        got = f"{large} and {small}"
        raise invalid("train.batch", "have a size above train.sub_batch.image", got, "There is nothing to compare.")
    return large, small
