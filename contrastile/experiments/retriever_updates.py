"""Updates of a retriever: their seconds and memory, and the largest plain one that fits; figure 1 of Gao et al. 2021.

Below `retriever_memory.py`. An update draws a batch, encodes and compares it, propagates back and steps the optimizer.
All are measured one after the other in one process.
"""

from __future__ import annotations

import csv
import io
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrastile.data.batches import Batches
from contrastile.experiments.sweep import overridden
from contrastile.gradcache.memory import spare_bytes
from contrastile.train.folder import RunFolder
from contrastile.train.log import progress
from contrastile.train.loop import step
from contrastile.train.memory import Weighed
from contrastile.train.optim import build_optimizer
from contrastile.train.ranks import ALONE
from contrastile.train.report.figures import COLOURS, as_svg
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.retriever.job import RetrieverJob
from contrastile.train.retriever.run import TextMaterials, build_retriever_run
from contrastile.train.run import choose_device

logger = logging.getLogger("contrastile")

TABLE, FIGURE = "updates.csv", "updates.svg"
# different updates that are timed, and seconds after which no further one is drawn; one is timed in any case
UPDATES, SECONDS = 6, 1.0
# share of the free memory that a plain update of the figure may be expected to take
ROOM = 0.8
WAYS = ("plain", "accumulated", "cached")


@dataclass(frozen=True)
class Update:
    """The median seconds of an update, and the bytes of tensors that it adds to the weights at its peak."""

    seconds: float
    bytes: int


def update_overrides(recipe: RetrieverRecipe, way: str, batch: int, largest: int) -> dict[str, Any]:
    """Overrides for batches of one size, made one way; `largest` is the plain batch that fits.

    Plain and accumulated ways keep the graph of a part, of at most `largest` queries with their passages. A cached
    encoder sees one side at a time, and at most as many tokens as the passages of the plain batch may have.
    """
    queries = batch if way == "plain" else min(batch, largest)
    passages = queries * (recipe.data.positives + recipe.data.negatives)
    tokens = passages * recipe.model.tokenizer.length if way == "cached" else None
    sub_batch = {"query": queries, "passage": passages, "query_tokens": tokens, "passage_tokens": tokens}
    train = {"batch": ((0.0, batch),), "minutes": None, "retain": 0 if way == "cached" else 1, "sub_batch": sub_batch}
    train["accumulate"] = -(-batch // queries) if way == "accumulated" else 1
    return {"train": train, "evaluate": {"every": 1.0, "bm25": False}}


def time_updates(recipe: RetrieverRecipe, materials: TextMaterials, rows: Tensor | None = None) -> Update:
    """Time updates of a recipe's first batch size, with fresh weights; all of them of `rows` where these are given.

    Each update is made twice. Memory is measured the first time, and time the second time: kernels are compiled for
    the shapes that they meet, and two updates may have different numbers of passages.
    """
    job = RetrieverJob(build_retriever_run(recipe, materials.tokenizer), materials)
    model, seconds = job.run.model.train(), [0.0]
    batches: list[Tensor] = []
    with Weighed(job.run.device) as weighed:
        optimizer, size = build_optimizer(model, recipe.optim), recipe.train.batch[0][1]
        drawn = Batches(job.rows, sizes=[size] * UPDATES, seed=recipe.seed) if rows is None else [rows] * UPDATES

        def update(number: int, batch: Tensor) -> float:
            began = time.perf_counter()
            # a step reads its loss, so it waits for the device
            step(job, optimizer, job.parts(batch, number, ALONE))
            return time.perf_counter() - began

        # the optimizer's state, which exists from its first step on, counts even where one update is timed
        update(0, torch.from_numpy(job.rows[:1]))
        for batch in drawn:
            batches.append(batch)
            seconds.append(update(len(batches), batch))
            if sum(seconds) > SECONDS:
                break
    return Update(statistics.median(update(number, batch) for number, batch in enumerate(batches, 1)), weighed.bytes)


def fitting_batch(recipe: RetrieverRecipe, materials: TextMaterials, memory: int) -> int:
    """Return the largest power of two of queries, those with the longest passages, whose plain update fits in `memory`.

    0 where the update of a single query does not fit.
    """
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

    rows = materials.texts.splits["train"]
    order = np.argsort([-tokens(row) for row in rows.tolist()], kind="stable")
    return torch.from_numpy(rows[order])


def time_sizes(
    recipe: RetrieverRecipe, materials: TextMaterials, largest: int, sizes: Sequence[int]
) -> dict[tuple[str, int], Update]:
    """Time an update of every way and size; plain ones up to the size that the device has room for."""
    updates: dict[tuple[str, int], Update] = {}
    expected = 0.0
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
    """Write updates.csv, and its figure where matplotlib is installed."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["way", "queries", "seconds", "bytes", *origin])
    for (way, batch), update in updates.items():
        writer.writerow([way, batch, f"{update.seconds:.5f}", update.bytes, *origin.values()])
    folder.write_text(TABLE, file.getvalue())
    try:
        folder.write_text(FIGURE, draw_updates(updates))
    except ModuleNotFoundError as missing:
        # hours of training follow, which a missing figure must not prevent
        logger.warning("%s is not drawn: %s is not installed; its numbers are in %s", FIGURE, missing.name, TABLE)


def draw_updates(updates: Mapping[tuple[str, int], Update]) -> str:
    """Draw seconds per update against its queries as SVG, with a line for each way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.subplots()
    for way, colour in zip(WAYS, COLOURS, strict=False):
        points = [(batch, update.seconds) for (name, batch), update in updates.items() if name == way]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3.5, label=way)
    sizes = sorted({batch for _, batch in updates})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("queries per update")
    axes.set_ylabel("seconds per update")
    axes.grid(linewidth=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return as_svg(figure)
