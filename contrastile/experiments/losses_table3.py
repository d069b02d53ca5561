"""One loss computed in five ways: table 3 of the Inf-CL paper (Cheng et al. 2024), on a recipe's own pairs.

A study of `sweep.py`, on several ranks. All ways are exact: runs of equal seed differ by rounding only, and the table
shows how far rounding grows over a run. Differences are taken seed by seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from contrastile.experiments.results import Result, by_labels, markdown, mean_cost, measures_of, seeds_of, spread
from contrastile.experiments.sweep import Study, Trial
from contrastile.train.run import choose_device

# of each way the exchange, and the computation of a block; the first way is the baseline
WAYS = {
    "dense": ("replicate", "dense"),
    "OpenCLIP local": ("gather", "dense"),
    "gather": ("gather", "tiles"),
    "ring": ("ring", "dense"),
    "tiled": ("ring", "tiles"),
}
BASELINE = "dense"
# points of recall; a difference is shown to be none by an interval narrower than this either way
NARROW = 1.0


def difference(results: Sequence[Result], way: str, test: str) -> tuple[float, float] | None:
    """Return the mean difference from the baseline in points, and half the width of its 95 % interval.

    mean ± t · s / √n, with t of n − 1 degrees of freedom, over the n seeds that both have; None for fewer than two.
    """
    from scipy.stats import t  # type: ignore[import-untyped]

    recalls = {(one.labels["way"], one.seed): one.measures[test] for one in results if test in one.measures}
    seeds = [seed for name, seed in recalls if name == way and (BASELINE, seed) in recalls]
    gaps = [100 * (recalls[way, seed] - recalls[BASELINE, seed]) for seed in seeds]
    if len(gaps) < 2:
        return None
    return statistics.mean(gaps), float(t.ppf(0.975, len(gaps) - 1)) * statistics.stdev(gaps) / math.sqrt(len(gaps))


def negligible(mean: float, half: float) -> bool:
    """Return True where 0 lies in the interval, and the interval is narrow."""
    return abs(mean) <= half < NARROW or mean == half == 0


@dataclass(frozen=True, kw_only=True)
class Losses(Study):
    """Every way with every seed, seed by seed."""

    suffix = "losses"
    title = "one loss in five ways"

    def trials(self, _data: Any) -> list[Trial]:
        """Exchange and backend of the loss are overridden; tiles are fused kernels where they can be."""
        fused = choose_device(self.recipe.device).type == "cuda" and self.recipe.train.precision != "float64"
        backends = {"dense": "dense", "tiles": "triton" if fused else "eager"}
        unlimited = {"train": {"minutes": None}}
        return [
            Trial({"way": way}, seed, {"loss": {"exchange": exchange, "backend": backends[block]}, **unlimited})
            for seed, (way, (exchange, block)) in product(self.all_seeds, WAYS.items())
        ]

    def order(self, result: Result) -> tuple[int | None, int]:
        return result.seed, [*WAYS].index(result.labels["way"])

    def table(self, results: Sequence[Result]) -> str:
        """Recall at 1 of every way over the seeds, and its difference from the baseline in points."""
        tests, groups = measures_of(results), by_labels(results)
        columns = (head for test in tests for head in (f"{test}, @1", f"from {BASELINE}, points"))
        heads = ["way", "exchange", "block", "seconds", *columns]
        rows = [
            [way, *words, mean_cost(groups[way,], "seconds"),
             *(cell for test in tests for cell in (spread(groups[way,], test), _gap(results, way, test)))]
            for way, words in WAYS.items()
            if (way,) in groups
        ]  # fmt: skip
        return markdown(heads, rows)

    def introduction(self, results: Sequence[Result]) -> str:
        batches = ", ".join(f"{batch:,}" for _, batch in self.recipe.train.batch)
        return f"""\
Batches of {batches} pairs on {self.ranks} ranks, {results[0].costs["examples"]:,} pairs a run, {seeds_of(results)};
recall at 1, mean and standard deviation. *Dense* is CLIP's: every rank has all features and computes the whole matrix.
*OpenCLIP local*: its own rows against all columns, with gathered gradients. *Gather*: the same in tiles. *Ring*:
columns travel, blocks are dense. *Tiled*: columns travel, blocks in tiles, Inf-CL's way. Differences from {BASELINE}
are taken seed by seed, mean and 95 % interval in points; (!) where 0 lies outside or the interval is wider than
{NARROW:g} point either way."""


def _gap(results: Sequence[Result], way: str, test: str) -> str:
    gap = difference(results, way, test) if way != BASELINE else None
    return f"{gap[0]:+.2f} ± {gap[1]:.2f}{'' if negligible(*gap) else ' (!)'}" if gap else ""
