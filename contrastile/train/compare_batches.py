"""Accuracy against batch size, at several sizes of the data and rules of the learning rate, equal examples seen.

Figure 5 and appendix A.3 of the Inf-CL paper (Cheng et al. 2024) on a recipe's own data. Beside `compare.py`; every run
is one of `trials.py`. A share of the data is the same pairs for every seed, and a smaller one lies within a larger.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from contrastile._check import wrong
from contrastile.train.asked import RATES, a_grid
from contrastile.train.checkpoint import choose_device
from contrastile.train.config import Recipe
from contrastile.train.figures import COLOURS, as_svg
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

FIGURE = "compare.svg"


def compare_batches(
    recipe: Recipe,
    runs: str | Path,
    *,
    batches: Sequence[int],
    shares: Sequence[float],
    rates: Sequence[str],
    seeds: int,
    jobs: int,
    resume: bool = False,
) -> Comparison:
    """Run every batch size on every share of the data by every rule, `jobs` runs at a time, seed after seed.

    With `resume` an earlier comparison of this recipe goes on, and what it has made is not made again.
    """
    if seeds < 1:
        raise wrong("seeds", "be at least 1", seeds, "Three show a spread.")
    a_grid(batches, shares, rates)
    examples = recipe.train.length(len(open_once(recipe).pairs.splits["train"]))
    with comparison(runs, recipe, "batches", resume=resume) as folder:
        trials = read_back(folder)
        planned = [*unmade(plans(recipe, examples, batches, shares, rates, seeds), trials)]
        made = side_by_side(planned, folder.path, jobs=jobs, ranks=1)
        origin = provenance(choose_device(recipe.device), processes=jobs)
        stopped_by = written_down(made, trials, folder, partial(page, recipe), origin, in_order)
        if trials:
            folder.write_text(FIGURE, figure(in_order(trials)))
    return Comparison(folder.path, table(in_order(trials)), stopped_by)


def plans(
    recipe: Recipe,
    examples: int,
    batches: Sequence[int],
    shares: Sequence[float],
    rates: Sequence[str],
    seeds: int,
) -> list[Plan]:
    """What to run: seed by seed, and of a seed what takes longest first. At the smallest batch all rules are one."""
    made, smallest = [], min(batches)
    for seed in range(recipe.seed, recipe.seed + seeds):
        for batch in sorted(set(batches)):
            steps = recipe.train.model_copy(
                update={"batch": ((0.0, batch),), "epochs": None, "examples": examples, "minutes": None}
            )
            for share in shares:
                for rule in rates if batch > smallest else rates[:1]:
                    scaling = {"rate_scaling": RATES[rule], "base_batch": None if rule == "fixed" else smallest}
                    change: dict[str, Any] = {
                        "optim": recipe.optim.model_copy(update=scaling),
                        "train": steps,
                        "seed": seed,
                    }
                    labels = {"data": f"{share:g}", "batch": str(batch), "rate": rule}
                    made.append(Plan(labels, recipe.model_copy(update=change), share))
    return made


def in_order(trials: Sequence[Trial]) -> list[Trial]:
    """By share, batch, rule and seed, whichever was through first."""

    def place(trial: Trial) -> tuple[float, int, int, int]:
        labels = trial.labels
        return float(labels["data"]), int(labels["batch"]), [*RATES].index(labels["rate"]), trial.seed

    return sorted(trials, key=place)


def _rules(trials: Sequence[Trial]) -> list[str]:
    return [rule for rule in RATES if any(trial.labels["rate"] == rule for trial in trials)]


def _of(trials: Sequence[Trial], share: str, batch: str, rule: str) -> list[Trial]:
    """The trials of one point; at the smallest batch those of whichever rule they were made by."""
    here = [trial for trial in trials if (trial.labels["data"], trial.labels["batch"]) == (share, batch)]
    smallest = min(trials, key=lambda trial: int(trial.labels["batch"])).labels["batch"]
    return here if batch == smallest else [trial for trial in here if trial.labels["rate"] == rule]


def table(trials: Sequence[Trial]) -> str:
    """A Markdown table for each test: a line for each share and batch, a column for each rule."""
    if not trials:
        return "nothing was finished"
    rules, blocks = _rules(trials), []
    for test in tests_of(trials):
        heads = ["data", "batch", "steps", *(f"{rule} rate" for rule in rules)]
        rows = []
        for share, batch in dict.fromkeys((trial.labels["data"], trial.labels["batch"]) for trial in trials):
            points = {rule: _of(trials, share, batch, rule) for rule in rules}
            steps = next(found[0].steps for found in points.values() if found)
            rows.append([share, batch, steps, *(spread(points[rule], test) if points[rule] else "" for rule in rules)])
        blocks.append(f"{test}, recall at 1\n\n{markdown(heads, rows)}")
    return "\n\n".join(blocks)


def figure(trials: Sequence[Trial]) -> str:
    """An SVG: a panel for each test, recall at 1 against batch, a colour for each share, a dash for each rule."""
    from matplotlib.figure import Figure

    tests = tests_of(trials)
    drawing = Figure(figsize=(5.0 * max(len(tests), 1), 3.6), layout="constrained")
    panels = drawing.subplots(1, max(len(tests), 1), squeeze=False)[0]
    for panel, test in zip(panels, tests, strict=False):
        for colour, share in zip(COLOURS, dict.fromkeys(trial.labels["data"] for trial in trials), strict=False):
            for dash, rule in zip(("-", "--", ":"), _rules(trials), strict=False):
                sizes = dict.fromkeys(trial.labels["batch"] for trial in trials)
                points = {
                    int(batch): [one.recall[test] for one in _of(trials, share, batch, rule) if not one.failed]
                    for batch in sizes
                }
                known = sorted(batch for batch, found in points.items() if found)
                means = [100 * statistics.mean(points[batch]) for batch in known]
                spans = [100 * statistics.stdev(points[batch]) if len(points[batch]) > 1 else 0 for batch in known]
                label = f"{float(share):.0%} of the pairs, {rule} rate"
                panel.errorbar(known, means, spans, ls=dash, color=colour, marker="o", ms=3, lw=1.4, label=label)
        panel.set_title(test, loc="left", fontsize=10)
        panel.set_xscale("log", base=2)
        panel.set_xlabel("pairs per batch")
        panel.set_ylim(bottom=0)
        panel.yaxis.set_major_formatter("{x:.0f}%")
        panel.grid(alpha=0.3)
    if tests:
        panels[-1].legend(fontsize=7, frameon=False)
    return as_svg(drawing)


def page(recipe: Recipe, trials: Sequence[Trial]) -> str:
    """compare.md: the tables with what one must know to read them."""
    seeds = len({trial.seed for trial in trials})
    return f"""# {recipe.name}: accuracy against batch size

{trials[0].examples:,} pairs seen in every run, on a share of the pairs to train on; recall at 1, mean and standard
deviation over {seeds} seed{"s" if seeds > 1 else ""}. *Fixed* rate: {recipe.optim.learning_rate:g} at every batch size.
*sqrt* and *linear*: so much at the smallest one, and more with the root of the batch size or in proportion to it.

{table(trials)}

{computed(trials)}
"""
