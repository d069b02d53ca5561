"""Four ways to spend the memory of one sub-batch: table 1 of the gradient cache's paper (Gao et al. 2021), on pairs.

A study of `sweep.py`. Each way is trained twice: for equal examples, and for the time that the sequential way took.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from contrastile.experiments.arguments import large_and_small
from contrastile.experiments.results import Result, by_labels, markdown, mean_cost, measures_of, seeds_of, spread
from contrastile.experiments.sweep import Study, Trial
from contrastile.train.batch_builder import DataBundle

# a run of so many examples is ended by the clock alone
ENDLESS = 10**12
BUDGETS = ("examples", "time")
WAYS = ("sequential", "accumulated", "cached", "schedule")


@dataclass(frozen=True, kw_only=True)
class FourWays(Study):
    """Sequential, accumulated and cached batches, and the recipe's schedule, for equal examples and equal time."""

    title = "the same memory in four ways"

    def ways(self) -> dict[str, dict[str, Any]]:
        """Overrides of `[train]`: the small batch is a sub-batch of images, the large one the recipe's largest."""
        large, small = large_and_small(self.recipe)
        batches = {
            "sequential": (((0.0, small),), 1),
            "accumulated": (((0.0, large),), -(-large // small)),
            "cached": (((0.0, large),), 1),
            "schedule": (self.recipe.train.batch, 1),
        }
        # retain = 1 keeps the activations of one sub-batch, even where the recipe has room for more
        return {
            way: {"batch": batch, "accumulate": parts, "epochs": None, "retain": 1}
            for way, (batch, parts) in batches.items()
        }

    def trials(self, data: DataBundle) -> list[Trial]:
        lengths = {"examples": self.examples(data), "time": ENDLESS}
        return [
            Trial(
                {"budget": budget, "way": way}, seed, {"train": {**train, "examples": lengths[budget], "minutes": None}}
            )
            for budget in BUDGETS
            for way, train in self.ways().items()
            for seed in self.all_seeds
        ]

    def ready(self, trial: Trial, results: Sequence[Result]) -> Trial:
        """Equal time is the mean over the seeds of the sequential way."""
        if trial.labels["budget"] == "examples":
            return trial
        sequential = by_labels(results)["examples", "sequential"]
        minutes = statistics.mean(result.costs["seconds"] for result in sequential) / 60
        return replace(trial, overrides={"train": {**trial.overrides["train"], "minutes": minutes}})

    def order(self, result: Result) -> tuple[int, int, int | None]:
        return BUDGETS.index(result.labels["budget"]), WAYS.index(result.labels["way"]), result.seed

    def table(self, results: Sequence[Result]) -> str:
        tests = measures_of(results)
        costs = ("steps", "examples", "seconds")
        rows = [
            [*labels, *(mean_cost(group, name) for name in costs), *(spread(group, test) for test in tests)]
            for labels, group in by_labels(results).items()
        ]
        return markdown(["equal", "way", "steps", "pairs", "seconds", *(f"{test}, @1" for test in tests)], rows)

    def introduction(self, results: Sequence[Result]) -> str:
        large, small = large_and_small(self.recipe)
        return f"""\
Every way keeps the activations of one sub-batch of {small}. *Sequential*: batches of that size. *Accumulated*: large
batches of {large:,} in parts of that size, each with its own negatives only. *Cached*: the same large batches with all
their negatives, by the gradient cache. *Schedule*: the recipe's own. Learning rate and everything else are the
recipe's. Equal time: the mean time of the sequential way. Mean and standard deviation over {seeds_of(results)}."""
