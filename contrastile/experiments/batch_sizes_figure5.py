"""Accuracy against batch size: figure 5 and appendix A.3 of the Inf-CL paper (Cheng et al. 2024), on a recipe's pairs.

A study of `sweep.py`: several batch sizes, shares of the training pairs and rules of the learning rate, for equal
examples.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from contrastile.experiments.arguments import RATES
from contrastile.experiments.results import Result, markdown, measures_of, seeds_of, spread
from contrastile.experiments.sweep import Study, Trial
from contrastile.train.batch_builder import DataBundle
from contrastile.train.folder import RunFolder
from contrastile.train.report.figures import COLOURS, as_svg

FIGURE = "compare.svg"


@dataclass(frozen=True, kw_only=True)
class BatchSizes(Study):
    """Every batch size on every share of the pairs by every rule of the learning rate."""

    batches: Sequence[int]
    shares: Sequence[float] = (1.0,)
    rates: Sequence[str] = ("fixed",)
    suffix = "batches"
    title = "accuracy against batch size"

    def trials(self, data: DataBundle) -> list[Trial]:
        """Seed by seed, and the longest first; at the smallest batch all rules are the same."""
        examples, smallest = self.examples(data), min(self.batches)
        return [
            Trial(
                {"data": f"{share:g}", "batch": str(batch), "rate": rule},
                seed,
                {
                    "train": {"batch": ((0.0, batch),), "epochs": None, "examples": examples, "minutes": None},
                    "optim": {"rate_scaling": RATES[rule], "base_batch": None if rule == "fixed" else smallest},
                },
                share,
            )
            for seed, batch, share in product(self.all_seeds, sorted({*self.batches}), self.shares)
            for rule in (self.rates if batch > smallest else self.rates[:1])
        ]

    def order(self, result: Result) -> tuple[float, int, int, int | None]:
        labels = result.labels
        return float(labels["data"]), int(labels["batch"]), [*RATES].index(labels["rate"]), result.seed

    def table(self, results: Sequence[Result]) -> str:
        """A table for each test: a line for each share and batch, a column for each rule."""
        rules, points = _rules(results), _points(results)
        blocks = []
        for test in measures_of(results):
            rows = [
                [share, batch, next(iter(groups.values()))[0].costs["steps"],
                 *(spread(groups.get(rule, []), test) for rule in rules)]
                for (share, batch), groups in points.items()
            ]  # fmt: skip
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
            recalls = {
                batch: [100 * one.measures[test] for one in group if test in one.measures]
                for batch, group in sorted(groups.items())
            }
            known = [batch for batch, values in recalls.items() if values]
            means = [statistics.mean(recalls[batch]) for batch in known]
            deviations = [statistics.stdev(recalls[batch]) if len(recalls[batch]) > 1 else 0 for batch in known]
            label = f"{float(share):.0%} of the pairs, {rule} rate"
            panel.errorbar(known, means, deviations, ls=dash, color=colour, marker="o", ms=3, lw=1.4, label=label)
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
    """Group results by share and batch, then by rule; those at the smallest batch count for every rule."""
    smallest, rules = min((one.labels["batch"] for one in results), key=int), _rules(results)
    points: dict[tuple[str, str], dict[str, list[Result]]] = {}
    for result in results:
        share, batch, rule = result.labels.values()
        groups = points.setdefault((share, batch), {})
        for each in rules if batch == smallest else [rule]:
            groups.setdefault(each, []).append(result)
    return points
