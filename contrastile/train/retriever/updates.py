"""What an update of a retriever takes: seconds and memory of whole steps, and the largest plain one that fits.

Beside `compare.py`, whose rows and figure are measured here, one after the other in one process. An update is drawn,
encoded, compared, back-propagated and applied.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from contrastile.data.batches import Batches
from contrastile.retention import spare_bytes
from contrastile.train.figures import COLOURS, as_svg
from contrastile.train.log import progress
from contrastile.train.loop import step
from contrastile.train.memory import Weighed
from contrastile.train.optim import build_optimizer
from contrastile.train.ranks import ALONE
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.retriever.feed import TextMaterials
from contrastile.train.retriever.job import Retrieval
from contrastile.train.retriever.run import build_retriever_run

# of different updates: so many, or as many as these seconds allow when they are made first, but one at least
UPDATES, SECONDS = 6, 1.0
# of the memory that is free, what a plain update of the figure may be expected to take
ROOM = 0.8
NAMES = ("plain", "accumulated", "cached")


@dataclass(frozen=True)
class Update:
    """The median seconds of an update, and the bytes of tensors that it adds to the weights at its peak."""

    seconds: float
    bytes: int


@dataclass(frozen=True)
class Speed:
    """An update of `batch` queries, made one way."""

    way: str
    batch: int
    update: Update


def time_updates(recipe: RetrieverRecipe, materials: TextMaterials, rows: Tensor | None = None) -> Update:
    """Whole updates of a recipe's first batch size, with fresh weights; always of `rows` where they are given.

    All are made twice. The first time they are weighed, and the second time counts: kernels are compiled for the shapes
    that they meet, and two updates need not have equally many passages.
    """
    job = Retrieval(build_retriever_run(recipe, materials.tokenizer), materials)
    device, model = job.run.device, job.run.model.train()
    made: list[Tensor] = []
    seconds: list[float] = []
    with Weighed(device) as weighed:
        optimizer, size = build_optimizer(model, recipe.optim), recipe.train.batch[0][1]
        drawn = Batches(job.rows, sizes=[size] * UPDATES, seed=recipe.seed) if rows is None else [rows] * UPDATES

        def update(number: int, asked: Tensor) -> float:
            began = time.perf_counter()
            # a step reads its loss, so it waits for the device
            step(job, optimizer, job.parts(asked, number, ALONE))
            return time.perf_counter() - began

        # what an optimizer keeps, it has after its first step: also where one update is all that there is time for
        update(0, torch.from_numpy(job.rows[:1]))
        for asked in drawn:
            made.append(asked)
            seconds.append(update(len(made), asked))
            if sum(seconds) > SECONDS:
                break
    seconds = [update(number, asked) for number, asked in enumerate(made, 1)]
    return Update(statistics.median(seconds), weighed.bytes)


def fitting_batch(recipe: RetrieverRecipe, materials: TextMaterials, memory: int) -> int:
    """The largest power of two of queries, those with the longest passages, whose plain update fits into `memory`.

    0 where that of a single query does not.
    """
    longest = by_length(materials)
    # what is loaded and allocated once and for all
    time_updates(_plain(recipe, 1), materials)
    fitting = 0
    for batch in (2**power for power in count()):
        if batch > len(longest):
            return fitting
        try:
            needed = time_updates(_plain(recipe, batch), materials, longest[:batch]).bytes
        except torch.OutOfMemoryError:
            return fitting
        if needed > memory:
            return fitting
        fitting = batch
    return fitting


def _plain(recipe: RetrieverRecipe, batch: int) -> RetrieverRecipe:
    passages = batch * (recipe.data.positives + recipe.data.negatives)
    sub_batch = recipe.train.sub_batch.model_copy(
        update={"query": batch, "passage": passages, "query_tokens": None, "passage_tokens": None}
    )
    steps = {"batch": ((0.0, batch),), "accumulate": 1, "retain": 1, "sub_batch": sub_batch}
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=steps)})


def by_length(materials: TextMaterials) -> Tensor:
    """The queries to train on, those with the longest passages first."""
    queries, lengths = materials.texts.queries, materials.passages.lengths

    def tokens(row: int) -> int:
        return max(int(lengths[passage]) for passage in (*queries[row].positives, *queries[row].negatives))

    rows = materials.texts.splits["train"]
    order = np.argsort([-tokens(row) for row in rows.tolist()], kind="stable")
    return torch.from_numpy(rows[order])


def speeds(
    recipe: RetrieverRecipe,
    materials: TextMaterials,
    largest: int,
    sizes: Sequence[int],
    told: Callable[[RetrieverRecipe, str, int, int], RetrieverRecipe],
) -> list[Speed]:
    """Every way at every size; the plain one up to the size that the device has room for."""
    found: list[Speed] = []
    with progress(len(sizes) * len(NAMES), "timing updates of all sizes", "updates") as bar:
        for way in NAMES:
            for batch in sizes:
                bar.update(1)
                if way == "plain" and not _has_room(recipe, found, batch):
                    continue
                try:
                    found.append(Speed(way, batch, time_updates(told(recipe, way, batch, largest), materials)))
                except torch.OutOfMemoryError:
                    # the plain way ends here; the others never come here
                    continue
    return found


def _has_room(recipe: RetrieverRecipe, found: Sequence[Speed], batch: int) -> bool:
    """Whether `batch` queries are expected to fit, by what fewer of them took."""
    if not found:
        return True
    last = found[-1]
    device = torch.device("cuda" if recipe.device != "cpu" and torch.cuda.is_available() else "cpu")
    return last.update.bytes * batch / last.batch < ROOM * spare_bytes(device)


def draw_speeds(found: Sequence[Speed]) -> str:
    """Seconds per update over its queries, a line per way, as SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.subplots()
    for way, colour in zip(NAMES, COLOURS, strict=False):
        points = [(one.batch, one.update.seconds) for one in found if one.way == way]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3.5, label=way)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({one.batch for one in found})
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("queries per update")
    axes.set_ylabel("seconds per update")
    axes.grid(linewidth=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return as_svg(figure)
