"""The story of a run, top to bottom: data, towers, optimizer, steps, evaluation, report.

`run_recipe` tells it for the command line; `train` is the part between the towers and the weights, which `compare`
tells many times over. Under torchrun every rank tells it, on its share of each batch; see `ranks.py`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from contrastile.cache import encode
from contrastile.data.batches import Batches
from contrastile.models.text import load_tokenizer
from contrastile.modules import ClipLoss, SigLipLoss
from contrastile.train.average import Average
from contrastile.train.checkpoint import Run, begin_run, build_run, fingerprint, load, same_recipe, save_run
from contrastile.train.config import Recipe
from contrastile.train.evaluation import encode_held_out, evaluate, probe
from contrastile.train.facts import Trained, facts, finished
from contrastile.train.feed import Batch, Feed, Materials, open_materials
from contrastile.train.folder import (
    CHECKPOINTS,
    EVALUATION,
    METRICS,
    RunFolder,
    begun_run,
    finished_run,
    new_run,
    resumed_run,
)
from contrastile.train.galleries import galleries
from contrastile.train.guard import Guard
from contrastile.train.log import Metrics, progress, size
from contrastile.train.memory import PeakMemory
from contrastile.train.optim import (
    build_optimizer,
    clamp_scale,
    clip_gradients,
    learning_rate,
    set_learning_rate,
    with_warmup,
)
from contrastile.train.ranks import ALONE, Ranks
from contrastile.train.report import table_text, write_report
from contrastile.train.signals import StopRequest
from contrastile.train.state import Checkpoints, Course, Parts, step_seed

logger = logging.getLogger("contrastile")

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


def run_recipe(recipe: Recipe, runs: str | Path, *, resume: bool = False) -> Outcome:
    """Train what `recipe` describes into `runs/<its name>`, evaluate it, write its report.

    With `resume` a run of that name goes on from its newest checkpoint, as if it had never been interrupted; where
    there is none yet, it begins. One that is through is evaluated again.
    """
    ranks = Ranks.of_environment(recipe.device)
    begun = begun_run(runs, recipe.name) if resume else None
    if begun is not None:
        same_recipe(begun, recipe)
    materials = open_materials(recipe, load_tokenizer(begun.path) if begun is not None else None)
    run = build_run(recipe, materials.tokenizer)
    data = fingerprint(materials.pairs, materials.tokens)
    checkpoints = Checkpoints(Path(runs) / recipe.name / CHECKPOINTS, recipe.save, data, writes=ranks.rank == 0)
    if ranks.rank > 0:
        beside = (finished(begun) if begun is not None else None) or train_beside(run, materials, checkpoints, ranks)
        return Outcome(None, beside.examples, "", beside.stopped_by)
    with resumed_run(begun) if begun is not None else new_run(runs, recipe.name) as folder:
        if begun is None:
            begin_run(folder, run)
        trained = finished(folder)
        if trained is None:
            trained = train_into(folder, run, materials, checkpoints, ranks)
        else:
            run = load(folder.path, device=recipe.device)
        table = evaluate_and_report(folder, run, materials) if trained.finished else ""
        if trained.finished:
            checkpoints.drop()
    return Outcome(folder.path, trained.examples, table, trained.stopped_by)


def train_into(folder: RunFolder, run: Run, materials: Materials, checkpoints: Checkpoints, ranks: Ranks) -> Trained:
    """Train, and keep the weights of the last whole step in the folder, whatever ended the training."""
    trained = Trained(ranks=ranks.size)
    keeping = kept(trained, lambda: save_run(folder, run, facts(run, materials, trained)))
    with keeping, Metrics(folder / METRICS) as metrics, ranks.joined(run, materials):
        train(run, materials, metrics, trained, checkpoints, ranks)
    return trained


@contextmanager
def kept(trained: Trained, save: Callable[[], None]) -> Iterator[None]:
    """Saves what was trained within, whatever ended it."""
    whole = True
    try:
        yield
    except KeyboardInterrupt:
        # asked twice to stop: at once, and perhaps in the middle of a step
        whole = False
        raise
    except BaseException:
        # before the first step there is nothing to keep, and what an interrupted run has kept is better
        whole = trained.steps > 0
        raise
    finally:
        # a launcher that saw another rank end asks this one to, which has to wait
        with StopRequest(patient=True) if trained.ranks > 1 else nullcontext():
            if whole:
                save()


def train_beside(run: Run, materials: Materials, checkpoints: Checkpoints, ranks: Ranks) -> Trained:
    """Train as one of several ranks, of which the first one keeps what comes of it."""
    trained = Trained(ranks=ranks.size)
    with Metrics(None) as metrics, ranks.joined(run, materials):
        train(run, materials, metrics, trained, checkpoints, ranks)
    return trained


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


def train(
    run: Run,
    materials: Materials,
    metrics: Metrics,
    trained: Trained,
    checkpoints: Checkpoints | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """All steps of the run's recipe. The model is trained in place, `trained` says how far it came."""
    recipe, rows = run.recipe, materials.pairs.splits["train"]
    checkpoints = checkpoints or Checkpoints(None, recipe.save)
    optim = with_warmup(recipe.optim, recipe.train, len(rows))
    optimizer = build_optimizer(run.model, optim)
    loss = LOSSES[recipe.loss.kind](**recipe.loss.words())
    feed = Feed(materials, bend=recipe.data.augment, seed=recipe.seed)
    memory = PeakMemory(run.device)
    trained.base_bytes = memory.start()
    clock = Clock(recipe.train.length(len(rows)), recipe.train.minutes)
    course, guard = Course(recipe.evaluate.every), Guard()
    scaler = torch.amp.GradScaler(run.device.type, enabled=recipe.train.precision == "fp16")
    average = Average(run.model, recipe.optim.ema)
    # everything that a step changes; what dropout draws depends on the step alone
    parts: Parts = {
        "model": run.model, "optimizer": optimizer, "scaler": scaler, "average": average,
        "feed": feed, "guard": guard, "metrics": metrics, "course": course,
    }  # fmt: skip

    def measure() -> None:
        with average.in_place():
            probe_into(metrics, run, materials, clock.seen)

    if not ranks.restore(checkpoints, parts, materials.pairs.stream):
        metrics.load_state_dict({"bytes": 0})
        measure()
    # `batches` reads the sizes as it goes, because the clock decides about them
    sizes = course.sizes
    batches = Batches(rows, sizes=sizes, seed=recipe.seed, step=len(sizes))
    clock.go_on(sum(sizes), course.seconds)
    trained.note(course, guard)
    stopping = StopRequest(patient=ranks.size > 1)
    with progress(clock.examples, "training", "pairs") as bar, stopping as stop, average.at_the_end():
        bar.update(clock.seen)
        while True:
            clock.now, trained.stopped_by = ranks.agree(len(sizes) + 1, clock.seconds(), stop.signal)
            done = clock.share()
            # one step at least, even where the first probe took all the time
            if (sizes and done >= 1) or trained.stopped_by is not None:
                break
            planned = recipe.train.batch_at(done)
            sizes.append(min(planned, clock.examples - clock.seen))
            rate = learning_rate(clock.share(ahead=sizes[-1] / 2), optim, planned)
            set_learning_rate(optimizer, rate)
            torch.manual_seed(step_seed(recipe.seed, len(sizes), ranks.rank))
            began = time.monotonic()
            batch = feed.batch(next(batches), ranks.share)
            feed.expect(batches.ahead(sizes[-1]), ranks.share)
            value, norm = step(run, loss, optimizer, batch, scaler, ranks)
            seconds = time.monotonic() - began
            clock.seen += sizes[-1]
            # in fp16 a gradient may be too large for now: the scaler lowers its factor
            too_large = scaler.is_enabled() and math.isfinite(value) and scaler.get_scale() >= 1
            if guard.passes(len(sizes), value, norm, run.model, batch.pixels, counted=not too_large):
                average.update()
                metrics.write(
                    "step", examples=clock.seen, batch=sizes[-1], planned=planned, loss=value, norm=norm,
                    learning_rate=rate, scale=run.model.logit_scale.exp().item(), seconds=seconds,
                )  # fmt: skip
            else:
                metrics.write("skip", examples=clock.seen, batch=sizes[-1], loss=str(value), norm=str(norm))
            course.seconds, course.peak_bytes = clock.seconds(), max(course.peak_bytes, memory.bytes())
            trained.note(course, guard)
            bar.update(sizes[-1], total=clock.expected(), loss=f"{value:.3f}", peak=size(course.peak_bytes))
            if course.next_probe <= clock.share() < 1:
                course.next_probe += recipe.evaluate.every
                measure()
            # the clock of all ranks, who decide alike
            if checkpoints.due(len(sizes), clock.now):
                ranks.hand_in(materials.pairs.stream)
                checkpoints.save(len(sizes), clock.now, parts)
        ranks.hand_in(materials.pairs.stream)
        if trained.stopped_by is not None:
            checkpoints.save(len(sizes), clock.now, parts, must=True)
    if trained.stopped_by is None:
        trained.finished = True
        probe_into(metrics, run, materials, clock.seen)


def probe_into(metrics: Metrics, run: Run, materials: Materials, examples: int) -> None:
    """Measure in small; a measurement that fails is told, and does not end the training."""
    try:
        metrics.write("probe", examples=examples, recall=probe(run, materials.pairs))
    except Exception as failure:
        logger.warning("the probe after %d pairs failed, the training goes on: %r", examples, failure)
        metrics.write("failure", examples=examples, what="probe", why=repr(failure))


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

    def go_on(self, seen: int, seconds: float) -> None:
        """From where a checkpoint says that the run was."""
        self.seen, self.now, self.began = seen, seconds, time.monotonic() - seconds

    def seconds(self) -> float:
        """Since the run began, without the time that it was interrupted for."""
        return time.monotonic() - self.began

    def share(self, ahead: float = 0.0) -> float:
        """The share that is done, or will be when `ahead` more examples are seen."""
        time_share = self.now / (60 * self.minutes) if self.minutes is not None else 0.0
        return max((self.seen + ahead) / self.examples, time_share)

    def expected(self) -> int:
        """How many examples the run will have seen at its end if it goes on like this."""
        return round(self.seen / min(self.share(), 1.0))


def step(
    run: Run,
    loss: Loss,
    optimizer: Optimizer,
    batch: Batch,
    scaler: torch.amp.GradScaler | None = None,
    ranks: Ranks = ALONE,
) -> tuple[float, float]:
    """Encode, compare, back-propagate, clip, move the weights, clamp the scale. The loss and the gradient's norm.

    Both, and the weights, are those of the batch of all ranks, of which `batch` is this one's share. With a `scaler`
    the gradients are enlarged while they are in fp16, and of their true size when they are clipped. Where loss or norm
    is no finite number the model stays as it was, on every rank.
    """
    settings = run.recipe
    scaler = scaler or torch.amp.GradScaler(run.device.type, enabled=False)
    optimizer.zero_grad()
    total = torch.zeros((), device=run.device)
    for part in batch.parts(settings.train.accumulate):
        value = batch_loss(run, loss, part) * (part.whole / batch.whole)
        scaler.scale(value).backward()
        total += value.detach()
    # before the scaler looks at them: all ranks' factors stay the same
    total = ranks.combine(run.model, total, settings.loss.gradient)
    scaler.unscale_(optimizer)
    value, norm = torch.stack([total, clip_gradients(run.model, settings.optim.clip_norm)]).tolist()
    if math.isfinite(value + norm):
        optimizer.step()
        clamp_scale(run.model.logit_scale)
    scaler.update()
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
