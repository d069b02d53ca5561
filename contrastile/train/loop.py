"""The story of a run, top to bottom: data, towers, optimizer, steps, evaluation, report.

`run_recipe` tells it for the command line; `train` is the part between the towers and the weights, which `compare`
tells many times over. Under torchrun every rank tells it, on its share of each batch; see `ranks.py`.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from contrastile.cache import encode
from contrastile.data.batches import Batches
from contrastile.modules import ClipLoss, SigLipLoss
from contrastile.train.checkpoint import Run, build_run, load, save_run
from contrastile.train.config import Recipe
from contrastile.train.evaluation import encode_held_out, evaluate, probe
from contrastile.train.facts import Trained, facts
from contrastile.train.feed import Batch, Feed, Materials, open_materials
from contrastile.train.folder import EVALUATION, METRICS, RunFolder, finished_run, new_run
from contrastile.train.galleries import galleries
from contrastile.train.log import Metrics, progress, size
from contrastile.train.memory import PeakMemory
from contrastile.train.optim import build_optimizer, clamp_scale, clip_gradients, learning_rate, set_learning_rate
from contrastile.train.ranks import ALONE, Ranks
from contrastile.train.report import table_text, write_report
from contrastile.train.signals import StopRequest

Loss = ClipLoss | SigLipLoss
LOSSES: dict[str, type[Loss]] = {"clip": ClipLoss, "siglip": SigLipLoss}


@dataclass(frozen=True)
class Outcome:
    """What a run came to: its folder, the table of its results, and the signal that ended it early, if one did.

    Of several ranks the first one writes; the others have no folder.
    """

    folder: Path | None
    examples: int
    table: str
    stopped_by: int | None


def run_recipe(recipe: Recipe, runs: str | Path) -> Outcome:
    """Train what `recipe` describes into `runs/<its name>`, evaluate it, write its report."""
    ranks = Ranks.of_environment(recipe.device)
    materials = open_materials(recipe)
    run = build_run(recipe, materials.tokenizer)
    trained = Trained(ranks=ranks.size)
    if ranks.rank > 0:
        with Metrics(None) as metrics, ranks.joined(run, materials):
            train(run, materials, metrics, trained, ranks)
        return Outcome(None, trained.examples, "", trained.stopped_by)
    with new_run(runs, recipe.name) as folder:
        try:
            with Metrics(folder / METRICS) as metrics, ranks.joined(run, materials):
                train(run, materials, metrics, trained, ranks)
        finally:
            # after an error too: these are the weights of the last whole step. A launcher that saw another rank end
            # asks this one to, which has to wait
            with StopRequest(patient=True) if ranks.size > 1 else nullcontext():
                save_run(folder, run, facts(run, materials, trained))
        table = "" if trained.stopped_by is not None else evaluate_and_report(folder, run, materials)
    return Outcome(folder.path, trained.examples, table, trained.stopped_by)


def evaluate_run(path: str | Path, *, device: str = "auto") -> str:
    """Measure the saved weights of a run again and write its report again; the table."""
    folder = finished_run(path)
    run = load(folder.path, device=device)
    return evaluate_and_report(folder, run, open_materials(run.recipe, run.tokenizer))


def evaluate_and_report(folder: RunFolder, run: Run, materials: Materials) -> str:
    """Measure everything, write evaluation.json and report.html; the table of results as text."""
    seen = encode_held_out(run, materials.pairs)
    results = evaluate(run, seen)
    folder.write_json(EVALUATION, results)
    write_report(folder, galleries(materials.pairs, seen))
    return table_text(results)


def train(run: Run, materials: Materials, metrics: Metrics, trained: Trained, ranks: Ranks = ALONE) -> None:
    """All steps of the run's recipe. The model is trained in place, `trained` says how far it came."""
    recipe, rows = run.recipe, materials.pairs.splits["train"]
    optimizer = build_optimizer(run.model, recipe.optim)
    loss = LOSSES[recipe.loss.kind](**recipe.loss.words())
    feed = Feed(materials, bend=recipe.data.augment, seed=recipe.seed)
    # `batches` reads the sizes as it goes, because the clock decides about them
    sizes: list[int] = []
    batches = Batches(rows, sizes=sizes, seed=recipe.seed)
    memory = PeakMemory(run.device)
    trained.base_bytes = memory.start()
    clock = Clock(recipe.train.length(len(rows)), recipe.train.minutes)
    next_probe = recipe.evaluate.every
    metrics.write("probe", examples=0, recall=probe(run, materials.pairs))
    with progress(clock.examples, "training", "pairs") as bar, StopRequest(patient=ranks.size > 1) as stop:
        while True:
            clock.now, trained.stopped_by = ranks.agree(len(sizes) + 1, clock.seconds(), stop.signal)
            done = clock.share()
            # one step at least, even where the first probe took all the time
            if (sizes and done >= 1) or trained.stopped_by is not None:
                break
            planned = recipe.train.batch_at(done)
            sizes.append(min(planned, clock.examples - clock.seen))
            rate = learning_rate(clock.share(ahead=sizes[-1] / 2), recipe.optim)
            set_learning_rate(optimizer, rate)
            began = time.monotonic()
            value, norm = step(run, loss, optimizer, feed.batch(next(batches), ranks.share), ranks)
            seconds = time.monotonic() - began
            clock.seen += sizes[-1]
            trained.examples, trained.steps, trained.seconds = clock.seen, len(sizes), clock.seconds()
            trained.largest_batch, trained.peak_bytes = max(sizes), memory.bytes()
            metrics.write(
                "step", examples=clock.seen, batch=sizes[-1], planned=planned, loss=value, norm=norm,
                learning_rate=rate, scale=run.model.logit_scale.exp().item(), seconds=seconds,
            )  # fmt: skip
            bar.update(sizes[-1], total=clock.expected(), loss=f"{value:.3f}", peak=size(trained.peak_bytes))
            if next_probe <= clock.share() < 1:
                next_probe += recipe.evaluate.every
                metrics.write("probe", examples=clock.seen, recall=probe(run, materials.pairs))
    if trained.stopped_by is None:
        metrics.write("probe", examples=clock.seen, recall=probe(run, materials.pairs))


@dataclass
class Clock:
    """How much of a run is done: of its examples or of its minutes, whichever is further.

    `now` is the time, in seconds of the run, at which the present step is planned: the same for all ranks.
    """

    examples: int
    minutes: float | None
    seen: int = 0
    now: float = 0.0
    began: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self.began

    def share(self, ahead: float = 0.0) -> float:
        """The share that is done, or will be when `ahead` more examples are seen."""
        time_share = self.now / (60 * self.minutes) if self.minutes is not None else 0.0
        return max((self.seen + ahead) / self.examples, time_share)

    def expected(self) -> int:
        """How many examples the run will have seen at its end if it goes on like this."""
        return round(self.seen / min(self.share(), 1.0))


def step(run: Run, loss: Loss, optimizer: Optimizer, batch: Batch, ranks: Ranks = ALONE) -> tuple[float, float]:
    """Encode, compare, back-propagate, clip, move the weights, clamp the scale. The loss and the gradient's norm.

    Both, and the weights, are those of the batch of all ranks, of which `batch` is this one's share.
    """
    settings = run.recipe
    optimizer.zero_grad()
    total = torch.zeros((), device=run.device)
    for part in batch.parts(settings.train.accumulate):
        value = batch_loss(run, loss, part) * (part.whole / batch.whole)
        value.backward()
        total += value.detach()
    total = ranks.combine(run.model, total, settings.loss.gradient)
    value, norm = torch.stack([total, clip_gradients(run.model, settings.optim.clip_norm)]).tolist()
    if not math.isfinite(value + norm):
        raise FloatingPointError(
            f"the loss must stay a finite number; got a loss of {value} with a gradient of norm {norm}. "
            "Lower optim.learning_rate or raise optim.warmup; the weights from before that step are kept."
        )
    optimizer.step()
    clamp_scale(run.model.logit_scale)
    return value, norm


def batch_loss(run: Run, loss: Loss, batch: Batch) -> Tensor:
    """The loss of a batch of any size; activations are kept of the retained sub-batches, or of one at a time."""
    model, settings = run.model, run.recipe.train
    size = settings.sub_batch
    texts, tokens = (size.text, None) if size.text_tokens is None else (None, size.text_tokens)
    with run.autocast():
        # with a sub-batch retained, a batch that fits into one is encoded once, in the plain way
        image = encode(model.encode_image, batch.pixels, sub_batch=size.image, retain=settings.retain)
        text = encode(
            model.encode_text,
            batch.tokens,
            sub_batch=texts,
            sub_batch_tokens=tokens,
            retain=settings.retain,
        )
    image, text = F.normalize(image.float(), dim=-1), F.normalize(text.float(), dim=-1)
    return loss(image, text, model.logit_scale.exp(), model.logit_bias, ids=batch.ids.to(run.device))
