"""The same memory spent in several ways on a retriever: table 1 of the gradient cache's paper (Gao et al. 2021).

Beside `loop.py`, whose `train` every trial is. *Sequential*: plain steps of the largest batch that fits into the memory
given. *Accumulated*: batches of the first size of a list, in parts of that largest batch, each with its own negatives
only. *Cached*: every size of the list, all negatives, the encoders never seeing more tokens at once than the plain step
does. All see as many queries. `updates.py` says what an update takes, measured alone; trials may run side by side, each
in a process of its own. What comes of it is in `findings.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from contrastile._check import wrong
from contrastile.data.bm25 import BM25
from contrastile.train import crews
from contrastile.train.asked import rising_sizes
from contrastile.train.checkpoint import choose_device
from contrastile.train.facts import Trained
from contrastile.train.log import Metrics, clock, progress, size
from contrastile.train.loop import train
from contrastile.train.optim import rate_factor
from contrastile.train.provenance import provenance
from contrastile.train.ranks import Ranks
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.retriever.evaluation import PARTS, Answered, answer, answer_all, evaluate, held_out
from contrastile.train.retriever.feed import TextMaterials, open_text_materials
from contrastile.train.retriever.findings import (
    MEASURES,
    Findings,
    Found,
    Trial,
    Way,
    read_back,
    tables,
    write,
    write_speeds,
)
from contrastile.train.retriever.job import Retrieval
from contrastile.train.retriever.run import build_retriever_run
from contrastile.train.retriever.updates import Update, fitting_batch, speeds, time_updates
from contrastile.train.trials import Comparison, comparison

# of the memory given, what the loss may use, and the least that it needs
LOSS_SHARE, LEAST_WORKSPACE = 16, 2**20


@dataclass(frozen=True)
class Plan:
    """One run to be made."""

    way: Way
    recipe: RetrieverRecipe


# or the signal that ended a trial
Outcome = Trial | Found | int


def compare_retriever(
    recipe: RetrieverRecipe,
    runs: str | Path,
    *,
    memory: int,
    batches: Sequence[int],
    updates: Sequence[int] = (),
    seeds: int = 3,
    jobs: int = 1,
    resume: bool = False,
) -> Comparison:
    """Every way with every seed, `jobs` at a time, beside BM25; before that, what an update takes, one by one.

    `memory`: bytes that a plain step of the sequential way may add to the model. `batches`: the sizes that are cached.
    `updates`: the sizes whose update is timed for the figure, plain, accumulated and cached. With `resume` an earlier
    comparison of this recipe goes on: updates are timed anew, and what it has trained is not trained again.
    """
    _check(batches, seeds, jobs)
    recipe = _with_workspace(recipe, memory)
    materials, device = open_text_materials(recipe), choose_device(recipe.device)
    with comparison(runs, recipe, "compare", resume=resume) as folder:
        every = ways(fitting_batch(recipe, materials, memory), batches, memory)
        if updates:
            timed = speeds(recipe, materials, every[0].at_once, updates, told_at)
            write_speeds(folder, timed, provenance(device))
        findings = Findings(recipe, memory, _timed(recipe, materials, every), jobs, provenance(device, processes=jobs))
        earlier, found = read_back(folder, every)
        findings.trials.extend(earlier)
        findings.bm25.update(found)
        plans = _plans(findings, materials, seeds)
        write(folder, findings)
        with progress(len(plans), "comparing", "runs") as bar:
            for outcome in _outcomes(findings, plans, materials, folder.path):
                if isinstance(outcome, int):
                    return Comparison(folder.path, tables(findings), outcome)
                if isinstance(outcome, Trial):
                    findings.trials.append(replace(outcome, origin=findings.origin))
                    bar.update(1)
                else:
                    findings.bm25.update(outcome)
                write(folder, findings)
    return Comparison(folder.path, tables(findings), None)


def _timed(recipe: RetrieverRecipe, materials: TextMaterials, every: Sequence[Way]) -> dict[Way, Update]:
    """What an update of each way takes, one way after the other."""
    found = {}
    with progress(len(every), "timing updates", "ways") as bar:
        for way in every:
            found[way] = time_updates(told(recipe, way), materials)
            bar.update(1)
    return found


def _plans(findings: Findings, materials: TextMaterials, seeds: int) -> list[Plan]:
    """Seed after seed, of each the longest runs first: side by side they end together."""
    recipe = findings.recipe
    queries = recipe.train.length(len(materials.texts.splits["train"]))
    slowest = sorted(findings.updates, key=lambda way: -findings.updates[way].seconds / way.batch)
    made = [(one.way, one.seed) for one in findings.trials]
    plans = [
        Plan(way, told(recipe, way).model_copy(update={"seed": seed}))
        for seed in range(recipe.seed, recipe.seed + seeds)
        for way in slowest
        if (way, seed) not in made
    ]
    total = sum(findings.updates[plan.way].seconds * queries / plan.way.batch for plan in plans)
    sys.stderr.write(f"{len(plans)} runs of {queries:,} queries: about {clock(total)} one after the other\n")
    return plans


def _check(batches: Sequence[int], seeds: int, jobs: int) -> None:
    rising_sizes(batches)
    if seeds < 1:
        raise wrong("seeds", "be at least 1", seeds, "Three show a spread.")
    if jobs < 1:
        raise wrong("jobs", "be at least 1", jobs, "So many runs are made at a time.")


def _with_workspace(recipe: RetrieverRecipe, memory: int) -> RetrieverRecipe:
    """The loss keeps to a part of the memory given, whatever the device has."""
    loss = recipe.loss.model_copy(
        update={"workspace": recipe.loss.workspace or max(LEAST_WORKSPACE, memory // LOSS_SHARE)}
    )
    return recipe.model_copy(update={"loss": loss})


def ways(largest: int, batches: Sequence[int], memory: int) -> list[Way]:
    """The rows of the table, `largest` being the plain batch that fits."""
    first = batches[0]
    if not 1 <= largest < first:
        remedy = "Give more." if largest < 1 else "Give less, or larger batches."
        rule = f"hold a plain step of 1 query, but not of {first}, the first batch"
        raise wrong("memory", rule, f"{size(memory)}, into which {largest} fit", remedy)
    return [
        Way("sequential", largest, 1, largest, cached=False),
        Way("accumulated", first, -(-first // largest), largest, cached=False),
        *(Way("cached", batch, 1, largest, cached=True) for batch in batches),
    ]


def told(recipe: RetrieverRecipe, way: Way) -> RetrieverRecipe:
    """The recipe of a way; how its learning rate follows the batch is the recipe's own `optim.rate_scaling`."""
    data, tokenizer = recipe.data, recipe.model.tokenizer
    passages = way.at_once * (data.positives + data.negatives)
    tokens = passages * tokenizer.length
    # a cached encoder sees one side at a time, and as many tokens as the plain step's passages may have
    cut = (
        {"query_tokens": tokens, "passage_tokens": tokens}
        if way.cached
        else {"query_tokens": None, "passage_tokens": None}
    )
    sub_batch = recipe.train.sub_batch.model_copy(update={"query": way.at_once, "passage": passages, **cut})
    steps = {"batch": ((0.0, way.batch),), "accumulate": way.accumulate, "minutes": None, "sub_batch": sub_batch}
    quiet = recipe.evaluate.model_copy(update={"every": 1.0, "bm25": False})
    return recipe.model_copy(
        update={
            "train": recipe.train.model_copy(update={**steps, "retain": 0 if way.cached else 1}),
            "evaluate": quiet,
        }
    )


def told_at(recipe: RetrieverRecipe, name: str, batch: int, largest: int) -> RetrieverRecipe:
    """The recipe of a way of the figure, at any size."""
    at_once = batch if name == "plain" else min(batch, largest)
    return told(
        recipe, Way(name, batch, -(-batch // at_once) if name == "accumulated" else 1, at_once, name == "cached")
    )


def _outcomes(findings: Findings, plans: Sequence[Plan], materials: TextMaterials, folder: Path) -> Iterator[Outcome]:
    """BM25's row, if wanted and not there, and every trial, as they come; several jobs are processes of their own."""
    recipe, jobs = findings.recipe, findings.jobs
    if jobs == 1:
        if recipe.evaluate.bm25 and not findings.bm25:
            yield bm25(recipe, materials)
        for plan in plans:
            yield trial(plan, materials, folder)
        return
    tasks = [partial(_made, plan, folder) for plan in plans]
    if recipe.evaluate.bm25 and not findings.bm25:
        tasks.insert(0, partial(_found_by_bm25, recipe))
    yield from crews.side_by_side(tasks, partial(_as_they_are, materials), folder, jobs=jobs, device=recipe.device)


def _as_they_are(materials: TextMaterials) -> TextMaterials:
    """A process of its own is handed what this one has opened."""
    return materials


def _made(plan: Plan, folder: Path, materials: TextMaterials, ranks: Ranks) -> Outcome:
    del ranks
    return trial(plan, materials, folder)


def _found_by_bm25(recipe: RetrieverRecipe, materials: TextMaterials, ranks: Ranks) -> Outcome:
    del ranks
    return bm25(recipe, materials)


def trial(plan: Plan, materials: TextMaterials, folder: Path) -> Trial | int:
    """Train and measure one plan; its metrics lie in the folder."""
    way, recipe, trained, failed = plan.way, plan.recipe, Trained(), ""
    run = build_retriever_run(recipe, materials.tokenizer)
    path = folder / f"{way.name}-{way.batch}-{recipe.seed}.jsonl"
    # of a trial that was given up
    path.unlink(missing_ok=True)
    with Metrics(path) as metrics:
        try:
            train(Retrieval(run, materials), metrics, trained)
        except FloatingPointError as failure:
            failed = str(failure)
    if trained.stopped_by is not None:
        return trained.stopped_by
    found = {} if failed else measured(recipe, materials, answer_all(run, materials.texts, materials.passages))
    rate = recipe.optim.learning_rate * rate_factor(recipe.optim, way.batch)
    took = (trained.steps, trained.examples, rate, round(trained.seconds, 2))
    return Trial(way, recipe.seed, *took, found, failed)


def bm25(recipe: RetrieverRecipe, materials: TextMaterials) -> Found:
    """What BM25 finds in each part."""
    texts, engine, depth = materials.texts, BM25(materials.texts.passages), recipe.evaluate.depth
    answered = [answer(texts, part, "BM25", texts.passages, engine.search, depth) for part in held_out(texts)]
    return measured(recipe, materials, answered)


def measured(recipe: RetrieverRecipe, materials: TextMaterials, answered: Sequence[Answered]) -> Found:
    """By part: the share of queries with a right passage among the first k, and nDCG@10."""
    found = {}
    for one in answered:
        rows = [row for row in evaluate(recipe, materials.texts, [one]) if row["measures"]]
        for row in rows:
            values = {f"@{k}": value for k, value in row["recall"].items()} | row["measures"]
            found[PARTS.get(one.part, one.part)] = {name: values[name] for name in MEASURES if name in values}
    return found
