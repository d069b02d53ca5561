"""Studies of images and texts: tables and figures of the papers on a recipe's own pairs, and ways of one's own.

`FourWays` is table 1 of the gradient cache's paper (Gao et al. 2021): four ways to spend the memory of one sub-batch.
`Losses` is table 3 of the Inf-CL paper (Cheng et al. 2024): one loss computed in five ways. `BatchSizes` is its figure
5 and appendix A.3: accuracy against batch size. `Ways` compares the ways of `contrastile compare --ways FILE`, such as
several losses, for equal time: the first way sees the recipe's examples, the others as many as take the same time.
"""

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Self

from contrastile._errors import invalid
from contrastile.experiments.arguments import OF_WAYS, RATES, large_and_small
from contrastile.experiments.results import Result, by_labels, markdown, mean_cost, measures_of, seeds_of, spread
from contrastile.experiments.sweep import Study, Trial, timed_steps
from contrastile.train.batch_builder import DataBundle
from contrastile.train.config import AnyRecipe
from contrastile.train.folder import RunFolder
from contrastile.train.log import progress
from contrastile.train.report.figures import COLOURS, as_svg
from contrastile.train.run import choose_device

# a run of so many examples is ended by the clock alone
ENDLESS = 10**12
BUDGETS = ("examples", "time")
MEMORY_WAYS = ("sequential", "accumulated", "cached", "schedule")
# the exchange of each way, and its computation of a block; the first way is the baseline
LOSS_WAYS = {
    "dense": ("replicate", "dense"),
    "OpenCLIP local": ("gather", "dense"),
    "gather": ("gather", "tiles"),
    "ring": ("ring", "dense"),
    "tiled": ("ring", "tiles"),
}
BASELINE = "dense"
# points of recall: an interval around 0 that is narrower than this either way shows that there is no difference
NARROW = 1.0
FIGURE = "compare.svg"
PACES = "paces.json"
# steps of `Ways` before the timed ones, which fill a queue, and timed steps
WARM, TIMED = 4, 4
# times that each way's steps are timed, in turns with the other ways: caches are shared, and clocks drift
ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class FourWays(Study):
    """Sequential, accumulated and cached batches, and the schedule: for equal examples, and for equal time."""

    title = "the same memory in four ways"

    def trials(self, data: DataBundle) -> list[Trial]:
        """The small batch is a sub-batch of images, the large one the recipe's largest."""
        large, small = large_and_small(self.recipe)
        # batch and accumulate
        ways = {
            "sequential": (((0.0, small),), 1),
            "accumulated": (((0.0, large),), -(-large // small)),
            "cached": (((0.0, large),), 1),
            "schedule": (self.recipe.train.batch, 1),
        }
        trials = []
        for budget, examples in {"examples": self.examples(data), "time": ENDLESS}.items():
            for way, (batch, count) in ways.items():
                # retain = 1 keeps the activations of one sub-batch, even where the recipe has room for more
                train = {"batch": batch, "accumulate": count, "retain": 1, "examples": examples}
                overrides = {"train": {**train, "epochs": None, "epoch_steps": None, "minutes": None}}
                trials += [Trial({"budget": budget, "way": way}, seed, overrides) for seed in self.all_seeds]
        return trials

    def ready(self, trial: Trial, results: Sequence[Result]) -> Trial:
        """Equal time is the mean over the seeds of the sequential way."""
        if trial.labels["budget"] == "examples":
            return trial
        sequential = by_labels(results)["examples", "sequential"]
        minutes = statistics.mean(result.costs["seconds"] for result in sequential) / 60
        return replace(trial, overrides={"train": {**trial.overrides["train"], "minutes": minutes}})

    def order(self, result: Result) -> tuple[int, int, int | None]:
        return BUDGETS.index(result.labels["budget"]), MEMORY_WAYS.index(result.labels["way"]), result.seed

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


@dataclass(frozen=True, kw_only=True)
class Losses(Study):
    """Every way with every seed, seed by seed, on several ranks.

    All ways are exact: runs of equal seed differ by rounding only, and the table shows how far rounding grows.
    """

    suffix = "losses"
    title = "one loss in five ways"

    def trials(self, _data: Any) -> list[Trial]:
        """Exchange and backend of the loss are overridden; tiles are fused kernels where they can be."""
        fused = choose_device(self.recipe.device).type == "cuda" and self.recipe.train.precision != "float64"
        backends = {"dense": "dense", "tiles": "triton" if fused else "eager"}
        unlimited = {"train": {"minutes": None}}
        return [
            Trial({"way": way}, seed, {"loss": {"exchange": exchange, "backend": backends[block]}, **unlimited})
            for seed, (way, (exchange, block)) in product(self.all_seeds, LOSS_WAYS.items())
        ]

    def order(self, result: Result) -> tuple[int | None, int]:
        return result.seed, [*LOSS_WAYS].index(result.labels["way"])

    def table(self, results: Sequence[Result]) -> str:
        """Recall at 1 of every way over the seeds, and its difference from the baseline in points."""
        tests, groups = measures_of(results), by_labels(results)
        columns = (head for test in tests for head in (f"{test}, @1", f"from {BASELINE}, points"))
        rows = []
        for way, group in ((way, groups[way,]) for way in LOSS_WAYS if (way,) in groups):
            cells = (cell for test in tests for cell in (spread(group, test), _marked_gap(results, way, test)))
            rows.append([way, *LOSS_WAYS[way], mean_cost(group, "seconds"), *cells])
        return markdown(["way", "exchange", "block", "seconds", *columns], rows)

    def introduction(self, results: Sequence[Result]) -> str:
        batches = ", ".join(f"{batch:,}" for _, batch in self.recipe.train.batch)
        return f"""\
Batches of {batches} pairs on {self.ranks} ranks, {results[0].costs["examples"]:,} pairs a run, {seeds_of(results)};
recall at 1, mean and standard deviation. *Dense* is CLIP's: every rank has all features and computes the whole matrix.
*OpenCLIP local*: its own rows against all columns, with gathered gradients. *Gather*: the same in tiles. *Ring*:
columns travel, blocks are dense. *Tiled*: columns travel, blocks in tiles, Inf-CL's way. Differences from {BASELINE}
are taken seed by seed, mean and 95 % interval in points; (!) where 0 lies outside or the interval is wider than
{NARROW:g} point either way."""


def _marked_gap(results: Sequence[Result], way: str, test: str) -> str:
    interval = difference(results, way, test) if way != BASELINE else None
    return f"{interval[0]:+.2f} ± {interval[1]:.2f}{'' if negligible(*interval) else ' (!)'}" if interval else ""


def difference(results: Sequence[Result], way: str, test: str, baseline: str = BASELINE) -> tuple[float, float] | None:
    """Return the mean difference from the baseline in points, and half the width of its 95 % interval.

    mean ± t · s / √n, with t of n − 1 degrees of freedom, over the n seeds that both have; None for fewer than two.
    """
    from scipy.stats import t  # type: ignore[import-untyped]

    recalls = {(x.labels["way"], x.seed): x.measures[test] for x in results if test in x.measures}
    seeds = [seed for name, seed in recalls if name == way and (baseline, seed) in recalls]
    gaps = [100 * (recalls[way, seed] - recalls[baseline, seed]) for seed in seeds]
    if len(gaps) < 2:
        return None
    return statistics.mean(gaps), float(t.ppf(0.975, len(gaps) - 1)) * statistics.stdev(gaps) / math.sqrt(len(gaps))


def negligible(mean: float, half: float) -> bool:
    """Return True where 0 lies in the interval, and the interval is narrow."""
    return abs(mean) <= half < NARROW or mean == half == 0


@dataclass(frozen=True, kw_only=True)
class BatchSizes(Study):
    batches: Sequence[int]
    shares: Sequence[float] = (1.0,)
    rates: Sequence[str] = ("fixed",)
    suffix = "batches"
    title = "accuracy against batch size"

    def trials(self, data: DataBundle) -> list[Trial]:
        """Seed by seed, and the longest first; at the smallest batch all rules are the same."""
        examples, smallest, trials = self.examples(data), min(self.batches), []
        # what is named twice is trained once
        shares, rates = {f"{share:g}": share for share in self.shares}, [*dict.fromkeys(self.rates)]
        for seed, batch, (data_label, share) in product(self.all_seeds, sorted({*self.batches}), shares.items()):
            train = {"batch": ((0.0, batch),), "epochs": None, "examples": examples}
            # batches have the sizes of the table, with few data too
            train |= {"epoch_steps": None, "minutes": None}
            for rule in rates if batch > smallest else rates[:1]:
                optim = {"rate_scaling": RATES[rule], "base_batch": None if rule == "fixed" else smallest}
                labels = {"data": data_label, "batch": str(batch), "rate": rule}
                trials.append(Trial(labels, seed, {"train": train, "optim": optim}, share))
        return trials

    def order(self, result: Result) -> tuple[float, int, int, int | None]:
        labels = result.labels
        return float(labels["data"]), int(labels["batch"]), [*RATES].index(labels["rate"]), result.seed

    def table(self, results: Sequence[Result]) -> str:
        """A table for each test: a line for each share and batch, a column for each rule."""
        rules, blocks = _rules(results), []
        for test in measures_of(results):
            rows = []
            for (share, batch), groups in _points(results).items():
                steps = next(iter(groups.values()))[0].costs["steps"]
                rows.append([share, batch, steps, *(spread(groups.get(rule, []), test) for rule in rules)])
            heads = ["data", "batch", "steps", *(f"{rule} rate" for rule in rules)]
            blocks.append(f"{test}, recall at 1\n\n{markdown(heads, rows)}")
        return "\n\n".join(blocks)

    def introduction(self, results: Sequence[Result]) -> str:
        return f"""\
{results[0].costs["examples"]:,} pairs seen in every run, on a share of the pairs to train on; recall at 1, mean and
standard deviation over {seeds_of(results)}. *Fixed* rate: {self.recipe.optim.learning_rate:g} at every batch size.
*sqrt* and *linear*: so much at the smallest one, and more with the root of the batch size or in proportion to it."""

    def write(self, folder: RunFolder, results: Sequence[Result]) -> None:
        super().write(folder, results)
        folder.write_text(FIGURE, draw(results))


def draw(results: Sequence[Result]) -> str:
    """Draw recall at 1 against batch size as SVG: a panel per test, a colour per share, a dash per rule."""
    from matplotlib.figure import Figure

    tests, points = measures_of(results), _points(results)
    colours = zip(dict.fromkeys(share for share, _ in points), COLOURS, strict=False)
    lines = [*product(colours, zip(_rules(results), ("-", "--", ":"), strict=False))]
    figure = Figure(figsize=(5.0 * max(len(tests), 1), 3.6), layout="constrained")
    for panel, test in zip(figure.subplots(1, max(len(tests), 1), squeeze=False)[0], tests, strict=False):
        for (share, colour), (rule, dash) in lines:
            groups = {int(batch): rules.get(rule, []) for (data, batch), rules in points.items() if data == share}
            percents = {
                batch: [100 * x.measures[test] for x in groups[batch] if test in x.measures] for batch in groups
            }
            measured = {batch: percents[batch] for batch in sorted(percents) if percents[batch]}
            means = [statistics.mean(values) for values in measured.values()]
            deviations = [statistics.stdev(values) if len(values) > 1 else 0 for values in measured.values()]
            label = f"{float(share):.0%} of the pairs, {rule} rate"
            panel.errorbar([*measured], means, deviations, ls=dash, color=colour, marker="o", ms=3, lw=1.4, label=label)
        panel.set_title(test, loc="left", fontsize=10)
        panel.set_xscale("log", base=2)
        panel.set(xlabel="pairs per batch", ylim=(0, None))
        panel.yaxis.set_major_formatter("{x:.0f}%")
        panel.grid(alpha=0.3)
        if test == tests[-1]:
            panel.legend(fontsize=7, frameon=False)
    return as_svg(figure)


def _rules(results: Sequence[Result]) -> list[str]:
    return [rule for rule in RATES if any(result.labels["rate"] == rule for result in results)]


def _points(results: Sequence[Result]) -> dict[tuple[str, str], dict[str, list[Result]]]:
    smallest, all_rules = min((result.labels["batch"] for result in results), key=int), _rules(results)
    points: dict[tuple[str, str], dict[str, list[Result]]] = {}
    for result in results:
        share, batch, rule = result.labels.values()
        groups = points.setdefault((share, batch), {})
        # trained once at the smallest batch, where all rules are the same
        for name in all_rules if batch == smallest else [rule]:
            groups.setdefault(name, []).append(result)
    return points


@dataclass(frozen=True, kw_only=True)
class Ways(Study):
    """Every way with every seed, of either kind of recipe. `paces`: seconds of an example, measured by `prepared`."""

    recipes: Mapping[str, AnyRecipe]
    paces: Mapping[str, float] = field(default_factory=dict)
    suffix = "ways"
    title = "several ways for equal time"

    def prepared(self, data: Any, folder: RunFolder) -> Self:
        """Measure the paces of ways that the folder does not have; raise ValueError for ways of other keys."""
        known = folder.read_json(PACES) if (folder / PACES).is_file() else {}
        keys = {way: _keys(recipe) for way, recipe in self.recipes.items()}
        for way, (_, began) in known.items():
            if keys.get(way, began) != began:
                remedy = "Give it another name, or begin anew."
                raise invalid("--ways", f'leave "{way}" as it began', json.dumps(keys[way]), remedy)
        if missing := [way for way in self.recipes if way not in known]:
            # the least pace of each way counts
            with progress(ROUNDS * len(missing), "timing steps", "timings") as bar:
                for way in ROUNDS * missing:
                    pace = self._pace(self.recipes[way], data)
                    known[way] = min(pace, *known.get(way, [pace])[:1]), keys[way]
                    bar.update(1)
        folder.write_json(PACES, known)
        return replace(self, paces={way: pace for way, (pace, _) in known.items()})

    def _pace(self, recipe: Any, data: Any) -> float:
        clock = time.process_time if choose_device(recipe.device).type == "cpu" else time.perf_counter
        job = self.job(recipe, data, 1.0)
        size = min(max(size for _, size in recipe.train.batch), len(job.rows))
        return min(timed_steps(job, recipe, size, WARM + TIMED, clock)[WARM:]) / size

    def trials(self, data: Any) -> list[Trial]:
        """Seed by seed; sections that may differ are overridden as a whole."""
        examples, (first, *_), trials = self.examples(data), self.recipes, []
        # before they are measured, all ways are as fast as the first
        paces = {**dict.fromkeys(self.recipes, 1.0), **self.paces}
        for seed in self.all_seeds:
            for way, recipe in self.recipes.items():
                count = max(1, round(examples * paces[first] / paces[way]))
                train = recipe.train.model_copy(update={"examples": count, "epochs": None, "minutes": None})
                evaluate = {"every": 1.0} | ({"bm25": False} if recipe.kind == "retriever" else {})
                overrides = {"loss": recipe.loss, "optim": recipe.optim, "train": train, "evaluate": evaluate}
                trials.append(Trial({"way": way}, seed, overrides, seconds=count * paces[way]))
        return trials

    def order(self, result: Result) -> tuple[int, int | None]:
        """Way and seed; raise ValueError for an earlier result of another way."""
        way = result.labels["way"]
        if way not in self.recipes:
            raise invalid("--resume", "find ways of this comparison", way, "Name them all, or begin anew.")
        return [*self.recipes].index(way), result.seed

    def table(self, results: Sequence[Result]) -> str:
        """Measures of every way over the seeds, and differences from the first way in points."""
        tests, (first, *_) = measures_of(results), self.recipes
        columns = (head for test in tests for head in (test, f"from {first}"))
        rows = []
        for (way,), group in by_labels(results).items():
            costs = (mean_cost(group, name) for name in ("steps", "examples", "seconds"))
            cells = (cell for test in tests for cell in (spread(group, test), gap(results, way, test, first)))
            rows.append([way, *costs, *cells])
        return markdown(["way", "steps", "examples", "seconds", *columns], rows)

    def introduction(self, results: Sequence[Result]) -> str:
        first, *_ = self.recipes
        examples = next((int(x.costs["examples"]) for x in results if x.labels["way"] == first), 0)
        keys, of_first = {way: _keys(recipe) for way, recipe in self.recipes.items()}, _keys(self.recipes[first])
        shown = {
            way: {name: section for name, section in sections.items() if name == "loss" or section != of_first[name]}
            for way, sections in keys.items()
        }
        ways = "\n".join(f"- {way}: `{json.dumps(sections)}`" for way, sections in shown.items())
        return f"""\
Every way learns for the time that {first} takes for {examples:,} examples, by steps that were timed
beforehand; seconds are those of the training itself, beside whatever else the machine did. Mean and standard deviation
over {seeds_of(results)}; differences are taken seed by seed, mean and 95 % interval in points. The losses,
and sections that differ from those of {first}:

{ways}"""


def gap(results: Sequence[Result], way: str, test: str, first: str) -> str:
    """Write the difference of a way from the first, and half of its 95 % interval; nothing for the first."""
    interval = difference(results, way, test, first) if way != first else None
    # plus 0.0, so that no difference is -0.0
    return f"{round(interval[0], 1) + 0.0:+.1f} ± {interval[1]:.1f}" if interval else ""


def _keys(recipe: Any) -> dict[str, Any]:
    keys = {name: getattr(recipe, name).model_dump(mode="json", exclude_defaults=True) for name in OF_WAYS}
    return keys | {"loss": {"kind": recipe.loss.kind, **keys["loss"]}}
