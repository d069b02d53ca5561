"""Several ways to spend a memory on a retriever: table 1 and figure 1 of the gradient cache's paper (Gao et al. 2021).

`RetrieverMemory.introduction` describes the ways. Updates are timed before the trials, one after the other in one
process, because trials that run side by side slow each other down.
"""

import csv
import io
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, product
from typing import Any, Self

import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile.data.base import Batches, held_out
from contrastile.data.texts import BM25
from contrastile.experiments.results import Result, by_labels, markdown, mean_percent, measures_of, seeds_of
from contrastile.experiments.sweep import Study, Trial, overridden
from contrastile.gradcache.memory import spare_bytes
from contrastile.train.folder import RunFolder
from contrastile.train.log import progress, size
from contrastile.train.loop import step
from contrastile.train.memory import Weighed
from contrastile.train.objective import open_teacher
from contrastile.train.optim import build_optimizer, rate_factor
from contrastile.train.provenance import provenance
from contrastile.train.ranks import ALONE, Ranks
from contrastile.train.report.figures import COLOURS, as_svg
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.retriever.evaluation import COMPARED, rank_part, ranking_measures
from contrastile.train.retriever.job import RetrieverJob
from contrastile.train.retriever.run import TextMaterials
from contrastile.train.run import choose_device
from contrastile.train.state import TrainResult

# the loss's part of the memory is one in LOSS_SHARE, and at least so many bytes
LOSS_SHARE, LEAST_WORKSPACE = 16, 2**20
BM25_LABELS = {"way": "BM25", "batch": ""}
TABLE, FIGURE = "updates.csv", "updates.svg"
# the most updates that are timed, and the seconds after which no further one is drawn; one is always timed
UPDATES, SECONDS = 6, 1.0
# share of the free memory that a plain update of the figure may be expected to take
ROOM = 0.8
WAYS = ("plain", "accumulated", "cached")


@dataclass(frozen=True)
class Update:
    """The median seconds of an update, and the bytes of tensors that it adds to the weights at its peak."""

    seconds: float
    bytes: int


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

    def prepared(self, data: TextMaterials, folder: RunFolder) -> Self:
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
        queries = self.examples(data)
        # before they are timed, the cached batches
        updates = self.updates or {("cached", str(batch)): Update(0.0, 0) for batch in self.batches}
        seconds = {labels: update.seconds * queries / int(labels[1]) for labels, update in updates.items()}
        # BM25 answers at once
        trials = [Trial(BM25_LABELS, None, {}, seconds=1.0)] if self.recipe.evaluate.bm25 else []
        for seed in self.all_seeds:
            for way, batch in sorted(seconds, key=lambda labels: -seconds[labels]):
                overrides = update_overrides(self.recipe, way, int(batch), self.largest)
                trials.append(Trial({"way": way, "batch": batch}, seed, overrides, seconds=seconds[way, batch]))
        return trials

    def run(self, trial: Trial, data: TextMaterials, ranks: Ranks, folder: RunFolder) -> Result | int | None:
        """Train and evaluate a trial; BM25 answers without training."""
        if trial.labels != BM25_LABELS:
            return super().run(trial, data, ranks, folder)
        texts, search, depth = data.texts, BM25(data.texts.passages).search, self.recipe.evaluate.depth
        parts = (rank_part(texts, part, "BM25", texts.passages, search, depth) for part in held_out(texts.splits))
        return Result(trial.labels, None, measures=ranking_measures(self.recipe, texts, list(parts)))

    def costs(self, trial: Trial, trained: TrainResult) -> dict[str, float]:
        """Add the costs of an update, measured alone, to those of a training beside others."""
        optim, update = self.recipe.optim, self.updates[tuple(trial.labels.values())]
        return {
            "steps": trained.steps, "queries": trained.examples,
            "learning_rate": optim.learning_rate * rate_factor(optim, int(trial.labels["batch"])),
            "seconds": round(trained.seconds, 3), "update_seconds": round(update.seconds, 5),
            "update_bytes": update.bytes,
        }  # fmt: skip

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
            trained = took = ["", ""]
            if update := self.updates.get(labels):
                steps, failed = int(group[0].costs["steps"]), sum(bool(result.failed) for result in group)
                way += f" ({failed} of {len(group)} failed)" if failed else ""
                trained, took = [f"{int(batch):,}", f"{steps:,}"], [f"{update.seconds * steps:.1f}", size(update.bytes)]
            rows.append([way, *trained, *(mean_percent(group, f"{part} {name}") for name in COMPARED), *took])
        return markdown(["way", "batch", "updates", *COMPARED, "seconds", "memory"], rows)

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


def update_overrides(recipe: RetrieverRecipe, way: str, batch: int, largest: int) -> dict[str, Any]:
    """Overrides for batches of one size, made one way; `largest` is the plain batch that fits.

    A cached encoder sees one side at a time, and at most as many tokens as the passages of the plain batch may have.
    """
    queries = batch if way == "plain" else min(batch, largest)
    passages = queries * (recipe.data.positives + recipe.data.negatives)
    tokens = passages * recipe.model.tokenizer.length if way == "cached" else None
    sub_batch = {"query": queries, "passage": passages, "query_tokens": tokens, "passage_tokens": tokens}
    train: dict[str, Any] = {"batch": ((0.0, batch),), "epoch_steps": None, "minutes": None, "sub_batch": sub_batch}
    train |= {"retain": 0 if way == "cached" else 1, "accumulate": -(-batch // queries) if way == "accumulated" else 1}
    return {"train": train, "evaluate": {"every": 1.0, "bm25": False}}


def time_updates(recipe: RetrieverRecipe, materials: TextMaterials, rows: Tensor | None = None) -> Update:
    """Time updates of a recipe's first batch size, with fresh weights; with `rows`, each update has these queries.

    Each update is made twice: first to measure memory, then to measure time, with kernels compiled for its shapes.
    """
    job = RetrieverJob.untrained(recipe, materials, open_teacher(recipe))
    model, seconds = job.run.model.train(), [0.0]
    batches: list[Tensor] = []
    with Weighed(job.run.device) as weighed:
        optimizer, queries = build_optimizer(model, recipe.optim), recipe.train.batch[0][1]
        order = Batches(job.rows, seed=recipe.seed)

        def update(number: int, batch: Tensor) -> float:
            began = time.perf_counter()
            # a step reads its loss, so it waits for the device
            step(job, optimizer, job.parts(batch, number, ALONE))
            return time.perf_counter() - began

        # a first step makes the optimizer's state, which counts even if one update alone is timed
        update(0, torch.from_numpy(job.rows[:1]))
        for _ in range(UPDATES):
            batches.append(batch := order.take(queries) if rows is None else rows)
            seconds.append(update(len(batches), batch))
            if sum(seconds) > SECONDS:
                break
    return Update(statistics.median(update(number, batch) for number, batch in enumerate(batches, 1)), weighed.bytes)


def fitting_batch(recipe: RetrieverRecipe, materials: TextMaterials, memory: int) -> int:
    """The largest power of two of queries, those with the longest passages, whose plain update fits; 0 for none."""
    rows, largest = by_length(materials), 0

    def update(batch: int, rows: Tensor | None = None) -> Update:
        return time_updates(overridden(recipe, update_overrides(recipe, "plain", batch, batch)), materials, rows)

    # libraries load and allocate with the first update
    update(1)
    for batch in (2**power for power in count()):
        try:
            if batch > len(rows) or update(batch, rows[:batch]).bytes > memory:
                break
        except torch.OutOfMemoryError:
            break
        largest = batch
    return largest


def by_length(materials: TextMaterials) -> Tensor:
    """Order the training queries by their longest passage, descending."""
    queries, lengths = materials.texts.queries, materials.passages.lengths

    def tokens(row: int) -> int:
        return max(int(lengths[passage]) for passage in (*queries[row].positives, *queries[row].negatives))

    return torch.tensor(sorted(materials.rows.tolist(), key=tokens, reverse=True), dtype=torch.int64)


def time_sizes(
    recipe: RetrieverRecipe, materials: TextMaterials, largest: int, sizes: Sequence[int]
) -> dict[tuple[str, int], Update]:
    """Time an update of every way and size; plain ones up to the size that the device has room for."""
    updates, expected = dict[tuple[str, int], Update](), 0.0
    with progress(len(sizes) * len(WAYS), "timing updates of all sizes", "updates") as bar:
        for way, batch in product(WAYS, sizes):
            bar.update(1)
            # memory grows with the queries; out of memory, plain updates end, and the others fit at every size
            if way == "plain" and expected * batch > ROOM * spare_bytes(choose_device(recipe.device)):
                continue
            with suppress(torch.OutOfMemoryError):
                overrides = update_overrides(recipe, way, batch, largest)
                updates[way, batch] = time_updates(overridden(recipe, overrides), materials)
                expected = updates[way, batch].bytes / batch
    return updates


def write_updates(folder: RunFolder, updates: Mapping[tuple[str, int], Update], origin: Mapping[str, str]) -> None:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["way", "queries", "seconds", "bytes", *origin])
    for labels, update in updates.items():
        writer.writerow([*labels, f"{update.seconds:.5f}", update.bytes, *origin.values()])
    folder.write_text(TABLE, file.getvalue())
    folder.write_text(FIGURE, draw_updates(updates))


def draw_updates(updates: Mapping[tuple[str, int], Update]) -> str:
    """Draw seconds per update against its queries as SVG, with a line for each way."""
    from matplotlib.figure import Figure

    figure, sizes = Figure(figsize=(5.6, 3.6), layout="constrained"), sorted({batch for _, batch in updates})
    axes = figure.subplots()
    for way, colour in zip(WAYS, COLOURS, strict=False):
        if points := [(batch, update.seconds) for (name, batch), update in updates.items() if name == way]:
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3.5, label=way)
    axes.set(xscale="log", yscale="log", xlabel="queries per update", ylabel="seconds per update")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.grid(linewidth=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return as_svg(figure)
