"""The same memory spent in four ways: table 1 of the gradient cache's paper (Gao et al. 2021) on a recipe's own data.

Beside `loop.py`, whose `train` it runs for every way and seed. Every way keeps the activations of one sub-batch: as
small batches, one after the other (sequential); as small batches whose gradients are averaged (accumulated); as one
large batch through the cache (cached); and as the recipe's own schedule. Once at equal examples, once at equal time,
namely what the sequential way took. Whatever comes out is written down.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from contrastile._check import wrong
from contrastile.train.asked import large_and_small
from contrastile.train.checkpoint import choose_device
from contrastile.train.config import Recipe
from contrastile.train.feed import Materials
from contrastile.train.provenance import provenance
from contrastile.train.results import markdown
from contrastile.train.trials import (
    Comparison,
    Plan,
    Trial,
    comparison,
    computed,
    one_by_one,
    open_once,
    read_back,
    spread,
    tests_of,
    unmade,
    written_down,
)

# at equal time the clock alone ends a run
NO_END = 10**12

BUDGETS = ("examples", "time")


def compare_recipe(recipe: Recipe, runs: str | Path, *, seeds: int, resume: bool = False) -> Comparison:
    """Run every way with every seed, at equal examples and at the time that the sequential way took on average.

    With `resume` an earlier comparison of this recipe goes on, and what it has made is not made again.
    """
    if seeds < 1:
        raise wrong("seeds", "be at least 1", seeds, "Three show a spread.")
    every_way = ways(recipe)
    materials = open_once(recipe)
    with comparison(runs, recipe, "compare", resume=resume) as folder:
        trials = read_back(folder)
        # planned as they come: equal time is what the sequential way took
        planned = unmade(_plans(recipe, materials, every_way, seeds, trials), trials)
        made = one_by_one(planned, materials, folder.path)
        origin = provenance(choose_device(recipe.device))
        stopped_by = written_down(made, trials, folder, partial(page, recipe), origin)
    return Comparison(folder.path, table(trials), stopped_by)


def ways(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """The four ways as changes of `[train]`: the small batch is a sub-batch, the large one the recipe's largest."""
    large, small = large_and_small(recipe)
    return {
        "sequential": {"batch": ((0.0, small),), "accumulate": 1},
        "accumulated": {"batch": ((0.0, large),), "accumulate": -(-large // small)},
        "cached": {"batch": ((0.0, large),), "accumulate": 1},
        "schedule": {"batch": recipe.train.batch, "accumulate": 1},
    }


def _plans(
    recipe: Recipe, materials: Materials, every_way: dict[str, dict[str, Any]], seeds: int, trials: Sequence[Trial]
) -> Iterator[Plan]:
    """What to run, in order; the time to be kept is read from `trials`, once the sequential way is through."""
    examples = recipe.train.length(len(materials.pairs.splits["train"]))
    for budget in BUDGETS:
        for way, change in every_way.items():
            for seed in range(recipe.seed, recipe.seed + seeds):
                length: dict[str, Any] = {"examples": examples, "minutes": None}
                if budget == "time":
                    kept = {"budget": "examples", "way": "sequential"}
                    taken = [trial.seconds for trial in trials if trial.labels == kept]
                    length = {"examples": NO_END, "minutes": statistics.mean(taken) / 60}
                # the activations of one sub-batch, whatever the recipe can afford
                settings = recipe.train.model_copy(update={"epochs": None, "retain": 1, **length, **change})
                labels = {"budget": budget, "way": way}
                yield Plan(labels, recipe.model_copy(update={"train": settings, "seed": seed}))


def table(trials: Sequence[Trial]) -> str:
    """A Markdown table of every budget and way: what was spent, and recall at 1 as mean and spread over the seeds."""
    if not trials:
        return "nothing was finished"
    tests = tests_of(trials)
    heads = ["equal", "way", "steps", "pairs", "seconds", *(f"{test}, @1" for test in tests)]
    rows = []
    for labels in dict.fromkeys(tuple(trial.labels.values()) for trial in trials):
        same = [trial for trial in trials if tuple(trial.labels.values()) == labels]
        spent = [
            f"{statistics.mean(trial.steps for trial in same):,.0f}",
            f"{statistics.mean(trial.examples for trial in same):,.0f}",
            f"{statistics.mean(trial.seconds for trial in same):,.0f}",
        ]
        rows.append([*labels, *spent, *(spread(same, test) for test in tests)])
    return markdown(heads, rows)


def page(recipe: Recipe, trials: Sequence[Trial]) -> str:
    """compare.md: the table with what one must know to read it."""
    seeds = len({trial.seed for trial in trials})
    return f"""# {recipe.name}: the same memory in four ways

Every way keeps the activations of one sub-batch of {recipe.train.sub_batch.image}. *Sequential*: batches of that size.
*Accumulated*: large batches of {large_and_small(recipe)[0]:,} in parts of that size, each with its own
negatives only. *Cached*: the same large batches with all their negatives, by the gradient cache. *Schedule*: the
recipe's own. Learning rate and everything else are the recipe's. Equal time: what the sequential way took on average.
Mean and standard deviation over {seeds} seed{"s" if seeds > 1 else ""}.

{table(trials)}

{computed(trials)}
"""
