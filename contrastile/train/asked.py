"""What a comparison is asked for, and whether that makes sense: told before any library is loaded.

Beside the comparisons, which ask the same again where they are called from Python.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from contrastile._wrong import wrong
from contrastile.train.config import AnyRecipe, Recipe
from contrastile.train.idle import value_of
from contrastile.train.recipe import touched

logger = logging.getLogger("contrastile")

# rules of the learning rate, and what they are called in a recipe
RATES = {"fixed": "none", "sqrt": "sqrt", "linear": "linear"}
# the keys of a recipe that each comparison sets itself: to one value in all runs, or to one after the other
MANY = object()
SETS: dict[str, dict[str, Any]] = {
    "compare": {"train.accumulate": MANY, "train.minutes": MANY, "train.retain": 1},
    "compare --losses": {"loss.backend": MANY, "loss.exchange": MANY, "train.minutes": None},
    "compare --batches": {
        "train.batch": MANY, "train.minutes": None, "optim.rate_scaling": MANY, "optim.base_batch": MANY
    },
    "compare of retrievers": {
        "train.batch": MANY, "train.sub_batch": MANY, "train.accumulate": MANY, "train.retain": MANY,
        "train.minutes": None, "evaluate.every": 1.0,
    },
}  # fmt: skip


def set_itself(comparison: str, recipe: AnyRecipe, origin: str, overrides: Sequence[str]) -> None:
    """Says in a line which keys of the recipe at `origin` the comparison sets to something else.

    Raises ValueError for the first one that an override asked for.
    """
    lost = []
    for key, value in SETS[comparison].items():
        section, _, name = key.rpartition(".")
        table = value_of(recipe, section)
        got, default = getattr(table, name), type(table).model_fields[name].default
        if name not in table.model_fields_set or got == value:
            continue
        if asked := next((one for one in overrides if touched(key, [one.partition("=")[0].strip()])), None):
            raise ValueError(f"{asked}: {key}: has no effect: {comparison} sets it itself; leave it out")
        # a run's folder has the defaults written out
        if got != default:
            lost.append(key)
    if lost:
        logger.warning("%s: %s sets %s itself, whatever is said there", origin, comparison, ", ".join(lost))


def one_set_of_data(recipe: Recipe) -> None:
    """Raises ValueError where each seed would have data of its own."""
    if recipe.data.copies > 1:
        remedy = "Pictures are bent anew in every run without it."
        raise wrong("data.copies", "be 1 for a comparison, whose seeds share their data", recipe.data.copies, remedy)


def large_and_small(recipe: Recipe) -> tuple[int, int]:
    """The recipe's largest batch and its sub-batch of pictures; raises ValueError where they do not differ."""
    small, large = recipe.train.sub_batch.image, max(batch for _, batch in recipe.train.batch)
    if large <= small:
        got = f"{large} and {small}"
        raise wrong("train.batch", "have a size above train.sub_batch.image", got, "There is nothing to compare.")
    return large, small


def a_grid(batches: Sequence[int], shares: Sequence[float], rates: Sequence[str]) -> None:
    """Raises ValueError for sizes, shares of the data or rules of the rate that there cannot be."""
    if not batches or min(batches) < 2:
        raise wrong("batches", "be sizes of at least 2", list(batches), "Such as 256 1024 4096.")
    if not shares or not all(0 < share <= 1 for share in shares):
        raise wrong("data", "be shares above 0, up to 1", list(shares), "Such as 0.1 0.3 1.0.")
    if not rates or not RATES.keys() >= set(rates):
        raise wrong("rates", f"be among {', '.join(RATES)}", list(rates), "Such as fixed sqrt.")


def rising_sizes(batches: Sequence[int]) -> None:
    """Raises ValueError for a retriever's sizes that there cannot be, or in another order."""
    if not batches or min(batches) < 2 or list(batches) != sorted(set(batches)):
        raise wrong("batches", "be rising sizes of at least 2", list(batches), "Such as 128 512 4096.")
