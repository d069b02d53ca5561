"""The story of a retriever, top to bottom: texts, encoders, optimizer, steps, evaluation, report.

As `train/loop.py` tells it of pictures and texts, whose clock, outcome and optimizer it shares. A step encodes the
queries and every passage of the batch once, each side sub-batch by sub-batch, and compares all with all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from contrastile.cache import encode
from contrastile.data.batches import Batches
from contrastile.models.text import load_tokenizer
from contrastile.modules import InfoNCELoss
from contrastile.retention import bytes_per_example
from contrastile.train.average import Average
from contrastile.train.checkpoint import begin_run, same_recipe, save_run
from contrastile.train.facts import Trained, finished, kept_at_once, run_facts
from contrastile.train.folder import CHECKPOINTS, METRICS, RunFolder, begun_run, finished_run, new_run, resumed_run
from contrastile.train.guard import Guard
from contrastile.train.log import Metrics, progress, size
from contrastile.train.loop import Clock, Outcome, kept
from contrastile.train.memory import PeakMemory, dense_need
from contrastile.train.optim import (
    build_optimizer,
    clamp_scale,
    clip_gradients,
    learning_rate,
    set_learning_rate,
    with_warmup,
)
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.retriever.evaluation import probe
from contrastile.train.retriever.feed import TextBatch, TextFeed, TextMaterials, open_text_materials
from contrastile.train.retriever.report import evaluate_and_report
from contrastile.train.retriever.run import RetrieverRun, build_retriever_run, load_retriever
from contrastile.train.retriever.search import index_of
from contrastile.train.signals import StopRequest
from contrastile.train.state import Checkpoints, Course, Parts, step_seed


def run_retriever(recipe: RetrieverRecipe, runs: str | Path, *, resume: bool = False) -> Outcome:
    """Train what `recipe` describes into `runs/<its name>`, evaluate it, write its report.

    `resume` as in `run_recipe`.
    """
    begun = begun_run(runs, recipe.name) if resume else None
    tokenizer = None
    if begun is not None:
        same_recipe(begun, recipe)
        tokenizer = load_tokenizer(begun.path, length=recipe.model.tokenizer.length)
    materials = open_text_materials(recipe, tokenizer)
    run = build_retriever_run(recipe, materials.tokenizer)
    with resumed_run(begun) if begun is not None else new_run(runs, recipe.name) as folder:
        if begun is None:
            begin_run(folder, run)
        checkpoints = Checkpoints(folder / CHECKPOINTS, recipe.save, materials.texts.digest())
        trained = finished(folder)
        if trained is None:
            trained = train_into(folder, run, materials, checkpoints)
        else:
            run = load_retriever(folder.path, device=recipe.device)
        table = evaluate_and_report(folder, run, materials) if trained.finished else ""
        if trained.finished:
            checkpoints.drop()
    return Outcome(folder.path, trained.examples, table, trained.stopped_by)


def train_into(folder: RunFolder, run: RetrieverRun, materials: TextMaterials, checkpoints: Checkpoints) -> Trained:
    """Train, and keep the weights of the last whole step in the folder, whatever ended the training."""
    trained = Trained()
    keeping = kept(trained, lambda: save_run(folder, run, retriever_facts(run, materials, trained)))
    with keeping, Metrics(folder / METRICS) as metrics:
        train_retriever(run, materials, metrics, trained, checkpoints)
    return trained


def evaluate_retriever(path: str | Path, *, device: str = "auto", index: str | None = None) -> str:
    """Measure the saved weights of a retriever again and write its report again; the table.

    `index`: look among its passages, which may be more than fit into memory, instead of the run's own.
    """
    folder = finished_run(path)
    opened = None if index is None else index_of(folder, Path(index))
    run = load_retriever(folder.path, device=device)
    return evaluate_and_report(folder, run, open_text_materials(run.recipe, run.tokenizer), opened)


def train_retriever(
    run: RetrieverRun, materials: TextMaterials, metrics: Metrics, trained: Trained, checkpoints: Checkpoints
) -> None:
    """All steps of the run's recipe. The model is trained in place, `trained` says how far it came."""
    recipe, rows = run.recipe, materials.texts.splits["train"]
    optim = with_warmup(recipe.optim, recipe.train, len(rows))
    optimizer = build_optimizer(run.model, optim)
    loss = InfoNCELoss(**recipe.loss.words())
    feed = TextFeed(materials, recipe.data, seed=recipe.seed)
    memory = PeakMemory(run.device)
    trained.base_bytes = memory.start()
    clock = Clock(recipe.train.length(len(rows)), recipe.train.minutes)
    course, guard, average = Course(recipe.evaluate.every), Guard(), Average(run.model, recipe.optim.ema)
    # everything that a step changes; what is drawn, and what dropout draws, depends on the step alone
    parts: Parts = {
        "model": run.model, "optimizer": optimizer, "average": average, "metrics": metrics, "course": course,
    }  # fmt: skip

    def measure() -> None:
        with average.in_place():
            metrics.write("probe", examples=clock.seen, recall=probe(run, materials))

    if not checkpoints.restore(parts):
        metrics.load_state_dict({"bytes": 0})
        measure()
    # `batches` reads the sizes as it goes, because the clock decides about them
    sizes = course.sizes
    batches = Batches(rows, sizes=sizes, seed=recipe.seed, step=len(sizes))
    clock.go_on(sum(sizes), course.seconds)
    trained.note(course, guard)
    run.model.train()
    with progress(clock.examples, "training", "queries") as bar, StopRequest() as stop, average.at_the_end():
        bar.update(clock.seen)
        while stop.signal is None:
            clock.now = clock.seconds()
            if (done := clock.share()) >= 1:
                break
            planned = recipe.train.batch_at(done)
            sizes.append(min(planned, clock.examples - clock.seen))
            rate = learning_rate(clock.share(ahead=sizes[-1] / 2), optim, planned)
            set_learning_rate(optimizer, rate)
            torch.manual_seed(step_seed(recipe.seed, len(sizes)))
            began = time.monotonic()
            drawn = feed.draw(next(batches), len(sizes))
            value, norm = retriever_step(run, loss, optimizer, feed.parts(drawn, recipe.train.accumulate))
            average.update()
            seconds = time.monotonic() - began
            clock.seen += sizes[-1]
            course.seconds, course.peak_bytes = clock.seconds(), max(course.peak_bytes, memory.bytes())
            trained.note(course, guard)
            metrics.write(
                "step", examples=clock.seen, batch=sizes[-1], planned=planned, loss=value, norm=norm,
                learning_rate=rate, scale=run.model.logit_scale.exp().item(), seconds=seconds,
            )  # fmt: skip
            bar.update(sizes[-1], total=clock.expected(), loss=f"{value:.3f}", peak=size(course.peak_bytes))
            if course.next_probe <= clock.share() < 1:
                course.next_probe += recipe.evaluate.every
                measure()
            if checkpoints.due(len(sizes), clock.now):
                checkpoints.save(len(sizes), clock.now, parts)
        trained.stopped_by = stop.signal
        if trained.stopped_by is not None:
            checkpoints.save(len(sizes), clock.now, parts, must=True)
    if trained.stopped_by is None:
        trained.finished = True
        metrics.write("probe", examples=clock.seen, recall=probe(run, materials))


def retriever_step(
    run: RetrieverRun, loss: InfoNCELoss, optimizer: Optimizer, parts: Sequence[TextBatch]
) -> tuple[float, float]:
    """Encode, compare, back-propagate, clip, move the weights, clamp the scale. The loss and the gradient's norm."""
    settings = run.recipe
    optimizer.zero_grad()
    total = torch.zeros((), device=run.device)
    whole = sum(map(len, parts))
    for part in parts:
        value = retriever_loss(run, loss, part) * (len(part) / whole)
        value.backward()
        total += value.detach()
    value, norm = torch.stack([total, clip_gradients(run.model, settings.optim.clip_norm)]).tolist()
    if not math.isfinite(value + norm):
        raise FloatingPointError(
            f"the loss must stay a finite number; got a loss of {value} with a gradient of norm {norm}. "
            "Lower optim.learning_rate or raise optim.warmup; the weights from before that step are kept."
        )
    optimizer.step()
    clamp_scale(run.model.logit_scale)
    return value, norm


def retriever_loss(run: RetrieverRun, loss: InfoNCELoss, batch: TextBatch) -> Tensor:
    """The loss of a batch of any size: from queries to all its passages, averaged over the recipe's dimensions."""
    model, settings = run.model, run.recipe.train
    with run.autocast():
        queries = encode(model.encode_query, batch.queries, sub_batch=settings.sub_batch.query, retain=settings.retain)
        passages = encode(
            model.encode_passage, batch.passages, sub_batch=settings.sub_batch.passage, retain=settings.retain
        )
    ids = {name: getattr(batch, name).to(run.device) for name in ("positives", "query_ids", "key_ids")}
    cuts = (None, *run.recipe.model.dimensions)
    losses = [
        loss(model.comparable(queries, cut), model.comparable(passages, cut), model.logit_scale.exp(), **ids)
        for cut in cuts
    ]
    return torch.stack(losses).mean()


def retriever_facts(run: RetrieverRun, materials: TextMaterials, trained: Trained) -> dict[str, Any]:
    """All that the report says beside curves and results."""
    recipe, texts = run.recipe, materials.texts
    largest = max(trained.largest_batch, 1)
    kept = kept_at_once(recipe.train.retain, recipe.train.sub_batch.query, largest)
    return {
        **run_facts(recipe, run.model, run.device, trained),
        "pairs": len(texts.splits["train"]),
        "unit": "queries",
        "passages": len(texts.passages),
        "texts_sha256": texts.digest(),
        "skipped": texts.skipped,
        "loss": "infonce",
        "batch": [batch for _, batch in recipe.train.batch],
        "memory": asdict(dense_need(activations_per_query(run, materials), largest, kept)),
    }


def activations_per_query(run: RetrieverRun, materials: TextMaterials) -> int:
    """The bytes that autograd keeps for one query and its passages, measured on texts of middling length."""
    data, sub_batch = run.recipe.data, run.recipe.train.sub_batch

    def of(side: str) -> int:
        store = materials.queries if side == "query" else materials.passages
        middle = store.lengths.argsort()[len(store) // 2]
        encoder = getattr(run.model, f"encode_{side}")

        def forward(count: int) -> object:
            tokens = {name: ids.to(run.device) for name, ids in store.rows(middle.expand(count)).items()}
            return encoder(**tokens)

        return bytes_per_example(forward, getattr(sub_batch, side))

    with run.autocast():
        return of("query") + of("passage") * (data.positives + data.negatives)
