"""Several ways to spend a given memory on a retriever: table 1 of the gradient cache's paper (Gao et al. 2021).

A study of `sweep.py`. *Sequential*: plain steps of the largest batch that fits. *Accumulated*: batches of the first
size of a list, in parts of that largest batch, each with its own negatives. *Cached*: every size of the list with all
negatives, while the encoders see no more tokens at once than in the plain step. All ways see as many queries. Updates
are measured alone before (`retriever_updates.py`), since trials that run side by side slow each other down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from contrastile._errors import invalid
from contrastile.data.bm25 import BM25
from contrastile.experiments.results import Result, by_labels, markdown, mean_percent, measures_of, seeds_of
from contrastile.experiments.retriever_updates import (
    Update,
    fitting_batch,
    time_sizes,
    time_updates,
    update_overrides,
    write_updates,
)
from contrastile.experiments.sweep import Study, Trial, overridden
from contrastile.train.folder import RunFolder
from contrastile.train.log import progress, size
from contrastile.train.metadata import TrainResult
from contrastile.train.optim import rate_factor
from contrastile.train.provenance import provenance
from contrastile.train.ranks import Ranks
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.retriever.evaluation import PARTS, Rankings, evaluate, held_out, rank_all, rank_part
from contrastile.train.retriever.job import RetrieverJob
from contrastile.train.retriever.run import TextMaterials, build_retriever_run, open_text_materials
from contrastile.train.run import choose_device

MEASURES = ("@1", "@5", "@20", "@100", "nDCG@10")
# the loss's part of the memory is one in LOSS_SHARE, and at least so many bytes
LOSS_SHARE, LEAST_WORKSPACE = 16, 2**20
BM25_LABELS = {"way": "BM25", "batch": ""}


def limit_loss(recipe: RetrieverRecipe, memory: int) -> RetrieverRecipe:
    """Limit the loss to a part of the memory, unless the recipe says how much it may take."""
    workspace = recipe.loss.workspace or max(LEAST_WORKSPACE, memory // LOSS_SHARE)
    return overridden(recipe, {"loss": {"workspace": workspace}})


@dataclass(frozen=True, kw_only=True)
class RetrieverMemory(Study):
    """Every way with every seed, beside BM25.

    `memory`: bytes that a plain step may add to the model. `batches`: the sizes that are cached. `sizes`: those whose
    update is timed for the figure. `largest` and `updates` (by labels) are measured by `prepared`.
    """

    recipe: RetrieverRecipe
    memory: int
    batches: Sequence[int]
    sizes: Sequence[int] = ()
    largest: int = 0
    updates: Mapping[tuple[str, ...], Update] = field(default_factory=dict)
    title = "the same memory in several ways"
    # texts are tokenised once, which takes longer than to hand over the tokens
    pickles_data = True

    def open(self) -> TextMaterials:
        return open_text_materials(self.recipe)

    def prepared(self, data: TextMaterials, folder: RunFolder) -> RetrieverMemory:
        """Find the largest plain batch, and time an update of each way; the figure's updates too, where wanted."""
        study = replace(self, largest=fitting_batch(self.recipe, data, self.memory))
        ways = study.ways()
        if self.sizes:
            timed = time_sizes(self.recipe, data, study.largest, self.sizes)
            write_updates(folder, timed, provenance(choose_device(self.recipe.device)))
        updates: dict[tuple[str, ...], Update] = {}
        with progress(len(ways), "timing updates", "ways") as bar:
            for way, batch in ways:
                recipe = overridden(self.recipe, update_overrides(self.recipe, way, batch, study.largest))
                updates[way, str(batch)] = time_updates(recipe, data)
                bar.update(1)
        return replace(study, updates=updates)

    def ways(self) -> list[tuple[str, int]]:
        """The rows of the table: name and batch size. Raise ValueError where the largest plain batch suits no table."""
        first = self.batches[0]
        if not 1 <= self.largest < first:
            remedy = "Give more." if self.largest < 1 else "Give less, or larger batches."
            rule = f"hold a plain step of 1 query, but not of {first}, the first batch"
            raise invalid("memory", rule, f"{size(self.memory)}, into which {self.largest} fit", remedy)
        return [("sequential", self.largest), ("accumulated", first), *(("cached", batch) for batch in self.batches)]

    def trials(self, data: TextMaterials) -> list[Trial]:
        """BM25, then seed by seed, the longest runs first: side by side they end together."""
        queries = self.recipe.train.length(len(data.texts.splits["train"]))
        seconds = {labels: update.seconds * queries / int(labels[1]) for labels, update in self.updates.items()}
        trials = [Trial(BM25_LABELS, None, {})] if self.recipe.evaluate.bm25 else []
        for seed in self.all_seeds:
            for way, batch in sorted(seconds, key=lambda labels: -seconds[labels]):
                overrides = update_overrides(self.recipe, way, int(batch), self.largest)
                trials.append(Trial({"way": way, "batch": batch}, seed, overrides, seconds=seconds[way, batch]))
        return trials

    def run(self, trial: Trial, data: TextMaterials, ranks: Ranks, folder: RunFolder) -> Result | int | None:
        """Train and evaluate a trial; BM25 answers without training."""
        if trial.labels != BM25_LABELS:
            return super().run(trial, data, ranks, folder)
        texts, engine, depth = data.texts, BM25(data.texts.passages), self.recipe.evaluate.depth
        answered = [rank_part(texts, part, "BM25", texts.passages, engine.search, depth) for part in held_out(texts)]
        return Result(trial.labels, None, measures=_measures(self.recipe, data, answered))

    def job(self, recipe: RetrieverRecipe, data: TextMaterials, _share: float) -> RetrieverJob:
        return RetrieverJob(build_retriever_run(recipe, data.tokenizer), data)

    def costs(self, trial: Trial, trained: TrainResult) -> dict[str, float]:
        """Add the costs of an update, measured alone, to those of a training beside others."""
        optim, update = self.recipe.optim, self.updates[tuple(trial.labels.values())]
        return {
            "steps": trained.steps,
            "queries": trained.examples,
            "learning_rate": optim.learning_rate * rate_factor(optim, int(trial.labels["batch"])),
            "seconds": round(trained.seconds, 2),
            "update_seconds": round(update.seconds, 5),
            "update_bytes": update.bytes,
        }

    def measures(self, job: RetrieverJob, data: TextMaterials) -> dict[str, float]:
        return _measures(job.run.recipe, data, rank_all(job.run, data.texts, data.passages))

    def order(self, result: Result) -> tuple[int, int]:
        """Way and seed; BM25 last. Raise ValueError for an earlier result of another memory or other batches."""
        ways = [*self.updates, tuple(BM25_LABELS.values())]
        labels = tuple(result.labels.values())
        if labels not in ways:
            remedy = "Give the memory and the batches that it began with, or begin anew."
            raise invalid("--resume", "find ways of this comparison", " of ".join(labels), remedy)
        return ways.index(labels), result.seed or 0

    def table(self, results: Sequence[Result]) -> str:
        """A table for each held-out part: mean ± standard deviation over the seeds, in percent."""
        parts = dict.fromkeys(name.rpartition(" ")[0] for name in measures_of(results))
        tables = (f"**{part}**\n\n{self._part(results, part)}" for part in parts)
        return "\n\n".join(tables) or "nothing was finished"

    def _part(self, results: Sequence[Result], part: str) -> str:
        rows = []
        for labels, group in by_labels(results).items():
            way, batch = labels
            made = took = ["", ""]
            if update := self.updates.get(labels):
                steps, failed = int(group[0].costs["steps"]), sum(bool(result.failed) for result in group)
                way += f" ({failed} of {len(group)} failed)" if failed else ""
                made, took = [f"{int(batch):,}", f"{steps:,}"], [f"{update.seconds * steps:.1f}", size(update.bytes)]
            rows.append([way, *made, *(mean_percent(group, f"{part} {name}") for name in MEASURES), *took])
        return markdown(["way", "batch", "updates", *MEASURES, "seconds", "memory"], rows)

    def introduction(self, results: Sequence[Result]) -> str:
        optim = self.recipe.optim
        rule = {"none": "", "sqrt": f" · √(batch / {optim.base_batch})", "linear": f" · batch / {optim.base_batch}"}
        rate = f"{optim.learning_rate:g}{rule[optim.rate_scaling]}"
        return f"""\
*Sequential*: plain steps of {self.largest} queries, the most of which fit into {size(self.memory)} beside the weights
(powers of two were tried, with the longest passages). *Accumulated*: parts of that size, each with its own negatives
only, their gradients added. *Cached*: all queries of the batch with all their negatives, by the gradient cache; the
encoders see no more tokens at once than in the plain step. Everything else is the recipe's: the learning rate is
{rate}, the warm-up a share of the run. All ways see as many queries.

Percent of queries with a right passage among the first k of all, and nDCG@10; mean ± standard deviation over
{seeds_of(results)}. Seconds: all updates, at the median time of one, measured alone. Memory: what an update adds to the
weights at its peak, counted by torch, tensor by tensor. Trials ran {self.jobs} at a time."""


def _measures(recipe: RetrieverRecipe, data: TextMaterials, answered: Sequence[Rankings]) -> dict[str, float]:
    """For each part the share of queries with a right passage among the first k, and nDCG@10."""
    measures: dict[str, float] = {}
    for one in answered:
        for row in evaluate(recipe, data.texts, [one]):
            if row["measures"]:
                values = {f"@{k}": share for k, share in row["recall"].items()} | row["measures"]
                part = PARTS.get(one.part, one.part)
                measures |= {f"{part} {name}": values[name] for name in MEASURES if name in values}
    return measures
