"""The same loss computed in five ways: table 3 of the Inf-CL paper (Cheng et al. 2024) on a recipe's own data.

Beside `compare.py`; every run is one of `trials.py`, on several ranks. All ways are exact, so runs of equal seed differ
by rounding alone, and what rounding grows to over a run is what the table shows: differences are taken seed by seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from contrastile._check import wrong
from contrastile.train.checkpoint import choose_device
from contrastile.train.config import Recipe
from contrastile.train.provenance import provenance
from contrastile.train.results import markdown
from contrastile.train.trials import (
    Comparison,
    Plan,
    Trial,
    comparison,
    computed,
    open_once,
    read_back,
    side_by_side,
    spread,
    tests_of,
    unmade,
    written_down,
)

# exchange, and whether blocks are computed in tiles; the first is what the others are compared with
WAYS = {
    "dense": ("replicate", False),
    "OpenCLIP local": ("gather", False),
    "gather": ("gather", True),
    "ring": ("ring", False),
    "tiled": ("ring", True),
}
FIRST = next(iter(WAYS))
# an interval of a difference, in points of recall, has to be narrower than this either way
NARROW = 1.0


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences in points, and half the width of its 95 % interval."""

    mean: float
    half: float

    @property
    def none(self) -> bool:
        """Whether 0 lies in the interval, and the interval is narrow enough to say something."""
        return abs(self.mean) <= self.half < NARROW or (self.mean == 0 and self.half == 0)


def compare_losses(
    recipe: Recipe, runs: str | Path, *, seeds: int, jobs: int, ranks: int, resume: bool = False
) -> Comparison:
    """Run every way with every seed on `ranks` ranks, `jobs` runs at a time.

    With `resume` an earlier comparison of this recipe goes on, and what it has made is not made again.
    """
    if seeds < 2:
        raise wrong("seeds", "be at least 2", seeds, "An interval needs a spread; five are usual.")
    if ranks < 2:
        raise wrong("ranks", "be at least 2", ranks, "On one process there is nothing to exchange.")
    # what is wrong with the data is told here, and the others find it ready
    open_once(recipe)
    with comparison(runs, recipe, "losses", resume=resume) as folder:
        trials = read_back(folder)
        made = side_by_side([*unmade(plans(recipe, seeds), trials)], folder.path, jobs=jobs, ranks=ranks)
        origin = provenance(choose_device(recipe.device), processes=jobs * ranks)
        stopped_by = written_down(made, trials, folder, partial(page, recipe, ranks=ranks), origin, in_order)
    return Comparison(folder.path, table(in_order(trials)), stopped_by)


def plans(recipe: Recipe, seeds: int) -> list[Plan]:
    """What to run, seed by seed, so that what is through can be compared."""
    fused = choose_device(recipe.device).type == "cuda" and recipe.train.precision != "float64"
    made = []
    for seed in range(recipe.seed, recipe.seed + seeds):
        for way, (exchange, tiled) in WAYS.items():
            backend = ("triton" if fused else "eager") if tiled else "dense"
            loss = recipe.loss.model_copy(update={"exchange": exchange, "backend": backend})
            steps = recipe.train.model_copy(update={"minutes": None})
            made.append(Plan({"way": way}, recipe.model_copy(update={"loss": loss, "train": steps, "seed": seed})))
    return made


def in_order(trials: Sequence[Trial]) -> list[Trial]:
    """By seed and way, whichever was through first."""
    return sorted(trials, key=lambda trial: (trial.seed, [*WAYS].index(trial.labels["way"])))


def difference(trials: Sequence[Trial], way: str, test: str) -> Difference | None:
    """Of a way from the first one, over the seeds that both were run with; None where there are fewer than two.

    mean ± t · s / √n, with t of n − 1 degrees of freedom.
    """
    from scipy.stats import t  # type: ignore[import-untyped]

    found = {(trial.labels["way"], trial.seed): trial.recall[test] for trial in trials if not trial.failed}
    seeds = [seed for name, seed in found if name == way and (FIRST, seed) in found]
    gaps = [100 * (found[way, seed] - found[FIRST, seed]) for seed in seeds]
    if len(gaps) < 2:
        return None
    half = float(t.ppf(0.975, len(gaps) - 1)) * statistics.stdev(gaps) / math.sqrt(len(gaps))
    return Difference(statistics.mean(gaps), half)


def table(trials: Sequence[Trial]) -> str:
    """A Markdown table of every way: recall at 1 over the seeds, and its difference from the first way in points."""
    if not trials:
        return "nothing was finished"
    heads, rows = ["way", "exchange", "block", "seconds"], []
    tests = tests_of(trials)
    for test in tests:
        heads += [f"{test}, @1", f"from {FIRST}, points"]
    for way, (exchange, tiled) in WAYS.items():
        same = [trial for trial in trials if trial.labels["way"] == way]
        if not same:
            continue
        cells = [way, exchange, "tiles" if tiled else "dense", f"{statistics.mean(one.seconds for one in same):,.0f}"]
        for test in tests:
            found = difference(trials, way, test) if way != FIRST else None
            gap = f"{found.mean:+.2f} ± {found.half:.2f}{'' if found.none else ' (!)'}" if found else ""
            cells += [spread(same, test), gap]
        rows.append(cells)
    return markdown(heads, rows)


def page(recipe: Recipe, trials: Sequence[Trial], ranks: int) -> str:
    """compare.md: the table with what one must know to read it."""
    seeds = len({trial.seed for trial in trials})
    batches = ", ".join(f"{batch:,}" for _, batch in recipe.train.batch)
    return f"""# {recipe.name}: one loss in five ways

Batches of {batches} pairs on {ranks} ranks, {trials[0].examples:,} pairs a run, {seeds} seeds; recall at 1, mean and
standard deviation. *Dense* is CLIP's: every rank has all features and computes the whole matrix. *OpenCLIP local*: its
own rows against all columns, with gathered gradients. *Gather*: the same in tiles. *Ring*: columns travel, blocks are
dense. *Tiled*: columns travel, blocks in tiles, Inf-CL's way. Differences from {FIRST} are taken seed by seed, mean and
95 % interval in points; (!) where 0 lies outside or the interval is wider than {NARROW:g} point either way.

{table(trials)}

{computed(trials)}
"""
