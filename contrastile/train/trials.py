"""Runs that are made to be compared: what each is called, what came of it, several of them side by side.

Beside `loop.py`, whose `train` each of them is. What is compared `compare.py` decides (the same memory in four ways),
`compare_losses.py` or `compare_batches.py`. One run after the other happens in this process, several at a time in
crews of others (`crews.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from contrastile.train import crews
from contrastile.train.asked import one_set_of_data
from contrastile.train.checkpoint import build_run, same_recipe
from contrastile.train.config import AnyRecipe, Recipe
from contrastile.train.evaluation import encode_held_out, evaluate
from contrastile.train.facts import Trained
from contrastile.train.feed import Materials, open_materials
from contrastile.train.folder import RECIPE, RunFolder, begun_run, new_run, resumed_run
from contrastile.train.image_text import ImageText
from contrastile.train.log import Metrics, progress
from contrastile.train.loop import train
from contrastile.train.precomputed import precomputed
from contrastile.train.ranks import Ranks
from contrastile.train.recipe import to_toml
from contrastile.train.results import RESULTS, TABLE, as_lines, mean_percent, origin_of, rows_of


@dataclass(frozen=True)
class Plan:
    """One run to be made, by its `labels`, with the share `share` of the training pairs."""

    labels: dict[str, str]
    recipe: Recipe
    share: float = 1.0


@dataclass(frozen=True)
class Trial:
    """One run that was made: what it took, and the recall at 1 of each headline test; or why it `failed`."""

    labels: dict[str, str]
    seed: int
    examples: int
    steps: int
    seconds: float
    recall: dict[str, float] = field(default_factory=dict)
    failed: str = ""
    # chip, versions, date and commit
    origin: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Where the results are, the table, and the signal that ended it early, if one did."""

    folder: Path
    table: str
    stopped_by: int | None


Outcome = Trial | int
"""A trial, or the signal that stopped it."""


def open_once(recipe: Recipe) -> Materials:
    """What all runs of a comparison learn from, whatever their seeds; raises ValueError where each seed has its own."""
    one_set_of_data(recipe)
    return open_materials(recipe)


@contextmanager
def comparison(runs: str | Path, recipe: AnyRecipe, kind: str, *, resume: bool) -> Iterator[RunFolder]:
    """The folder `<name>-<kind>`, with the recipe: a new one, or with `resume` an earlier one that began with it."""
    name = f"{recipe.name}-{kind}"
    begun = begun_run(runs, name) if resume else None
    if begun is not None:
        same_recipe(begun, recipe, "compare")
    with resumed_run(begun) if begun is not None else new_run(runs, name) as folder:
        if begun is None:
            folder.write_text(RECIPE, to_toml(recipe))
        yield folder


def unmade(plans: Iterable[Plan], trials: Sequence[Trial]) -> Iterator[Plan]:
    """The plans that none of the trials was made by, as they are now."""
    made = [(trial.labels, trial.seed) for trial in trials]
    return (plan for plan in plans if (plan.labels, plan.recipe.seed) not in made)


def make(plan: Plan, materials: Materials, folder: Path, ranks: Ranks) -> Outcome | None:
    """Train and measure one plan; its metrics lie in `folder`. Of several ranks the first one has something to say."""
    recipe, trained, failed = plan.recipe, Trained(ranks=ranks.size), ""
    run = build_run(recipe, materials.tokenizer)
    job = ImageText(run, precomputed(run, portion(materials, plan.share)))
    name = "-".join([*plan.labels.values(), str(recipe.seed)]).replace(" ", "_")
    path = folder / f"{name}.jsonl" if ranks.rank == 0 else None
    if path is not None:
        # of a run that was given up
        path.unlink(missing_ok=True)
    with Metrics(path) as metrics, ranks.joined(job):
        try:
            train(job, metrics, trained, ranks=ranks)
        except FloatingPointError as failure:
            # on all ranks in the same step
            failed = str(failure)
    if ranks.rank > 0:
        return None
    if trained.stopped_by is not None:
        return trained.stopped_by
    rows = [] if failed else evaluate(run, encode_held_out(run, materials.pairs))
    recall = {row["test"]: row["recall"]["1"] for row in rows if row["headline"]}
    took = (trained.examples, trained.steps, round(trained.seconds, 1))
    return Trial(plan.labels, recipe.seed, *took, recall, failed)


def portion(materials: Materials, share: float) -> Materials:
    """With the share `share` of the pairs to train on, drawn alike for every seed; a smaller share lies in a larger."""
    if share == 1:
        return materials
    rows = materials.pairs.splits["train"]
    some = np.sort(np.random.default_rng(0).permutation(rows)[: max(1, round(share * len(rows)))])
    return replace(materials, pairs=replace(materials.pairs, splits={**materials.pairs.splits, "train": some}))


def one_by_one(plans: Iterable[Plan], materials: Materials, folder: Path) -> Iterator[Outcome]:
    """Make every plan in this process. The plans are asked for one by one, as time depends on what came before."""
    for plan in plans:
        outcome = make(plan, materials, folder, Ranks())
        assert outcome is not None
        yield outcome
        if isinstance(outcome, int):
            return


def side_by_side(plans: Sequence[Plan], folder: Path, *, jobs: int, ranks: int) -> Iterator[Outcome]:
    """Make every plan with `jobs` crews of `ranks` processes each; outcomes come as they are ready."""
    if not plans:
        return
    recipe = plans[0].recipe
    tasks, opening = [partial(_made, plan, folder) for plan in plans], partial(open_once, recipe)
    with progress(len(plans), "comparing", "runs") as bar:
        for outcome in crews.side_by_side(tasks, opening, folder, jobs=jobs, ranks=ranks, device=recipe.device):
            yield outcome
            bar.update(1)


def _made(plan: Plan, folder: Path, materials: Materials, ranks: Ranks) -> Outcome | None:
    return make(plan, materials, folder, ranks)


def written_down(
    outcomes: Iterable[Outcome],
    trials: list[Trial],
    folder: RunFolder,
    page: Callable[[Sequence[Trial]], str],
    origin: Mapping[str, str],
    in_order: Callable[[Sequence[Trial]], Sequence[Trial]] = list,
) -> int | None:
    """Every trial joins the others, and their results and their page are written again; the signal that stopped them.

    `page` gets them `in_order`, as the lines of the results are; `origin` is that of those that come.
    """
    for outcome in outcomes:
        if isinstance(outcome, int):
            return outcome
        trials.append(replace(outcome, origin=origin))
        folder.write_text(RESULTS, as_csv(in_order(trials)))
        folder.write_text(TABLE, page(in_order(trials)))
    return None


def as_csv(trials: Sequence[Trial]) -> str:
    """One line per trial, recall in a column per test, and where it comes from."""
    return as_lines(
        [
            {**trial.labels, "seed": trial.seed, "examples": trial.examples, "steps": trial.steps}
            | {"seconds": trial.seconds, **trial.recall, "failed": trial.failed, **trial.origin}
            for trial in trials
        ]
    )


def read_back(folder: RunFolder) -> list[Trial]:
    """The trials that `as_csv` wrote."""
    trials = []
    for row in rows_of(folder):
        names = [*row]
        labels, tests = names[: names.index("seed")], names[names.index("seconds") + 1 : names.index("failed")]
        took = int(row["examples"]), int(row["steps"]), float(row["seconds"])
        recall = {test: float(row[test]) for test in tests if row[test]}
        own = {name: row[name] for name in labels}
        trials.append(Trial(own, int(row["seed"]), *took, recall, row["failed"], origin_of(row)))
    return trials


def computed(trials: Sequence[Trial]) -> str:
    """Chips and versions of all trials, a line each."""
    return "  \n".join(dict.fromkeys(f"{one.origin['chip']} · {one.origin['versions']}" for one in trials))


def tests_of(trials: Sequence[Trial]) -> list[str]:
    """The tests that any of the trials was measured with."""
    return list(dict.fromkeys(test for trial in trials for test in trial.recall))


def spread(trials: Sequence[Trial], test: str) -> str:
    """Mean ± standard deviation of a test in percent; the mean alone where there is one seed; how many failed."""
    shares = [trial.recall[test] for trial in trials if not trial.failed]
    failed = f" ({len(trials) - len(shares)} failed)" if len(shares) < len(trials) else ""
    return f"{mean_percent(shares)} %{failed}" if shares else failed.strip()
