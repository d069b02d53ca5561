"""The story of a run, top to bottom: data, model, optimizer, steps, evaluation, report.

`run_recipe` tells it for the command line; `train` is the part between the model and the weights, which `compare` tells
many times over. What is trained is a `Job`, the same story for all. Under torchrun every rank tells it, on its share of
each batch; see `ranks.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from contrastile.data.batches import Batches
from contrastile.in_step import all_failed
from contrastile.randomness import begin_random
from contrastile.train.average import Average
from contrastile.train.checkpoint import begin_run, same_recipe, save_run
from contrastile.train.clock import Clock
from contrastile.train.facts import Trained, finished
from contrastile.train.folder import (
    CHECKPOINTS,
    METRICS,
    RECIPE,
    RunFolder,
    begun_run,
    finished_run,
    new_run,
    resumed_run,
)
from contrastile.train.guard import Guard
from contrastile.train.image_text import ImageText
from contrastile.train.job import AnyTrained, Job, Share
from contrastile.train.live import listeners, page_of_stopped
from contrastile.train.log import Bar, Metrics, progress, size
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
from contrastile.train.recipe import load_any_recipe
from contrastile.train.retriever.job import Retrieval
from contrastile.train.sharded import is_sharded
from contrastile.train.signals import StopRequest
from contrastile.train.state import Checkpoints, Course, Parts, step_seed
from contrastile.train.stopwatch import Stopwatch, shares_text

logger = logging.getLogger("contrastile")

# who does what a recipe of each kind describes
JOBS: dict[str, type[Job[Any]]] = {"image-text": ImageText, "retriever": Retrieval}


@dataclass(frozen=True)
class Outcome:
    """What a run came to: its folder, the table of its results, and the signal that ended it early, if one did.

    Of several ranks the first one writes; the others have no folder. `unit`: what the examples are.
    """

    folder: Path | None
    examples: int
    table: str
    stopped_by: int | None
    unit: str


def run_recipe(recipe: AnyTrained, runs: str | Path, *, resume: bool = False) -> Outcome:
    """Train what `recipe` describes into `runs/<its name>`, evaluate it, write its report.

    With `resume` a run of that name goes on from its newest checkpoint, as if it had never been interrupted; where
    there is none yet, it begins. One that is through is evaluated again.
    """
    ranks = Ranks.of_environment(recipe.device)
    begun = begun_run(runs, recipe.name) if resume else None
    if begun is not None:
        same_recipe(begun, recipe)
    job = JOBS[recipe.kind].open(recipe, begun)
    checkpoints = Checkpoints(Path(runs) / recipe.name / CHECKPOINTS, recipe.save, job.data, writes=ranks.rank == 0)
    if ranks.rank > 0:
        beside = (finished(begun) if begun is not None else None) or train_beside(job, checkpoints, ranks)
        return Outcome(None, beside.examples, "", beside.stopped_by, job.unit)
    with resumed_run(begun) if begun is not None else new_run(runs, recipe.name) as folder:
        if begun is None:
            begin_run(folder, job.run)
        trained = finished(folder)
        if trained is None:
            trained = train_into(folder, job, checkpoints, ranks)
            planned = recipe.train.length(len(job.rows))
            if trained.finished and trained.examples < planned:
                told = "train.minutes=%g ended the training after %d of %d %s"
                logger.warning(told, recipe.train.minutes, trained.examples, planned, job.unit)
        else:
            job = job.trained_in(folder)
        table = job.report(folder) if trained.finished else ""
        if trained.stopped_by is not None:
            page_of_stopped(folder, job.facts_so_far(trained), job.wording)
        if trained.finished:
            checkpoints.drop()
    return Outcome(folder.path, trained.examples, table, trained.stopped_by, job.unit)


def evaluate_run(path: str | Path, *, device: str = "auto", index: str | Path | None = None) -> str:
    """Measure the saved weights of a run again and write its report again; the table.

    `index`: of a retriever, what `contrastile encode` wrote, in which to look instead of in the run's own passages.
    """
    folder = finished_run(path)
    recipe = load_any_recipe(folder / RECIPE, files=False)
    job = JOBS[recipe.kind].of_run(folder, device=device, index=None if index is None else Path(index))
    return job.report(folder)


def train_into(folder: RunFolder, job: Job[Any], checkpoints: Checkpoints, ranks: Ranks) -> Trained:
    """Train, and keep the weights of the last whole step in the folder, whatever ended the training."""
    trained = Trained(ranks=ranks.size)
    keeping = kept(trained, lambda: keep_weights(folder, job, trained))
    told = listeners(job.run.recipe, folder, lambda: job.facts_so_far(trained), job.wording)
    with keeping, Metrics(folder / METRICS, told) as metrics, ranks.joined(job):
        train(job, metrics, trained, checkpoints, ranks)
    return trained


def keep_weights(folder: RunFolder, job: Job[Any], trained: Trained) -> None:
    """Weights and facts into the folder; of weights that a lost rank had a part of nothing can be kept."""
    if is_sharded(job.run.model):
        logger.warning("the weights were in shards, of which some are lost; resume from the newest checkpoint")
    else:
        save_run(folder, job.run, job.facts(trained))


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


def train_beside(job: Job[Any], checkpoints: Checkpoints, ranks: Ranks) -> Trained:
    """Train as one of several ranks, of which the first one keeps what comes of it."""
    trained = Trained(ranks=ranks.size)
    with Metrics(None) as metrics, ranks.joined(job):
        train(job, metrics, trained, checkpoints, ranks)
    return trained


def train(
    job: Job[Any],
    metrics: Metrics,
    trained: Trained,
    checkpoints: Checkpoints | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """All steps of the job's recipe. The model is trained in place, `trained` says how far it came."""
    checkpoints = checkpoints or Checkpoints(None, job.run.recipe.save)
    course = Training(job, metrics, trained, ranks)
    course.begin(checkpoints)
    stopping = StopRequest(patient=ranks.size > 1)
    with course.shown() as bar, stopping as stop, course.average.at_the_end(), closing(job):
        while course.goes_on(stop.signal):
            course.step()
            course.tell(bar)
            course.probe_if_due()
            course.save_if_due(checkpoints)
        course.end(checkpoints)
        if trained.stopped_by is None:
            # through, also where the clock ended it
            bar.update(0, total=course.clock.seen)
    if trained.stopped_by is None:
        trained.finished = True
        course.probe()
        course.test()


class Training:
    """A job's steps: what they read, and everything that they change."""

    def __init__(self, job: Job[Any], metrics: Metrics, trained: Trained, ranks: Ranks) -> None:
        self.job, self.recipe, self.model = job, job.run.recipe, job.run.model
        self.metrics, self.trained, self.ranks = metrics, trained, ranks
        self.optim = with_warmup(self.recipe.optim, self.recipe.train, len(job.rows))
        self.optimizer = build_optimizer(self.model, self.optim)
        self.scaler = torch.amp.GradScaler(job.run.device.type, enabled=self.recipe.train.precision == "fp16")
        self.average = Average(self.model, self.recipe.optim.ema)
        self.watch = Stopwatch.of(job.run.device)
        self.watch.follow(self.optimizer)
        job.timed(self.watch)
        self.memory = PeakMemory(job.run.device)
        trained.base_bytes = self.memory.start()
        self.clock = Clock(self.recipe.train.length(len(job.rows)), self.recipe.train.minutes)
        self.course, self.guard = Course(self.recipe.evaluate.every), Guard()
        # how many measurements there were: of two at the same step, and of the same name, each is a place of its own
        self.measurements = 0
        # everything that a step changes; what dropout draws depends on the step alone
        self.state: Parts = {
            "model": self.model, "optimizer": self.optimizer, "scaler": self.scaler, "average": self.average,
            "guard": self.guard, "metrics": metrics, "course": self.course, **job.state,
        }  # fmt: skip

    @property
    def sizes(self) -> list[int]:
        """The batch of every step so far: `batches` reads them as they come, because the clock decides about them."""
        return self.course.sizes

    def begin(self, checkpoints: Checkpoints) -> None:
        """From the newest checkpoint, or with a first probe."""
        if not self.ranks.restore(checkpoints, self.state, self.job.stream):
            self.metrics.load_state_dict({"bytes": 0})
            self.probe()
        self.batches = Batches(self.job.rows, sizes=self.sizes, seed=self.recipe.seed, step=len(self.sizes))
        self.clock.go_on(sum(self.sizes), self.course.seconds)
        most, rows = max(size for _, size in self.recipe.train.batch), len(self.job.rows)
        if most > rows and self.ranks.rank == 0:
            told = "train.batch is %d, of %d %s to train on: they come several times in a step. Less makes more steps"
            logger.warning(told, most, rows, self.job.unit)
        self.trained.note(self.course, self.guard)
        self.model.train()

    @contextmanager
    def shown(self) -> Iterator[Bar]:
        """A bar that stands where the run does."""
        with progress(self.clock.examples, "training", self.job.unit, self.clock.seen) as bar:
            yield bar

    def goes_on(self, signal: int | None) -> bool:
        """Whether there is another step: all ranks ask at once, and answer alike."""
        clock, trained = self.clock, self.trained
        clock.now, trained.stopped_by = self.ranks.agree(len(self.sizes) + 1, clock.seconds(), signal, self.job.stream)
        # one step at least, even where the first probe took all the time
        return trained.stopped_by is None and (not self.sizes or clock.share() < 1)

    def step(self) -> None:
        """The next batch: drawn, compared, learned from unless its loss is no number, told."""
        job, clock, ranks = self.job, self.clock, self.ranks
        planned = self.recipe.train.batch_at(clock.share())
        self.sizes.append(min(planned, clock.examples - clock.seen))
        number, count = len(self.sizes), self.sizes[-1]
        rate = learning_rate(clock.share(ahead=count / 2), self.optim, planned)
        set_learning_rate(self.optimizer, rate)
        # not torch.manual_seed, which notes the stack for devices that are not there: half a millisecond
        begin_random(job.run.device, step_seed(self.recipe.seed, number, ranks.rank))
        self.watch.start()
        parts = job.parts(next(self.batches), number, ranks)
        job.expect(self.batches.ahead(count), ranks)
        self.watch.mark("towers")
        value, norm = step(job, self.optimizer, parts, self.scaler, ranks)
        took = {**self.watch.facts(count), "peak_bytes": self.memory.bytes()}
        scale = self.model.logit_scale.exp().item()
        clock.seen += count
        if self._learned(number, value, norm, parts):
            self.average.update()
            self.metrics.write(
                "step", examples=clock.seen, batch=count, planned=planned, loss=value, norm=norm,
                learning_rate=rate, scale=scale, **took,
            )  # fmt: skip
        else:
            self.metrics.write("skip", examples=clock.seen, batch=count, loss=str(value), norm=str(norm))
        self.said = {
            "loss": f"{value:.3f}", "norm": f"{norm:.2f}", "rate": f"{rate:.1e}", "scale": f"{scale:.1f}",
            "time": shares_text(took["shares"]),
        }  # fmt: skip

    def _learned(self, number: int, value: float, norm: float, parts: Sequence[Share]) -> bool:
        """Whether loss and norm were numbers; raises FloatingPointError at the third in a row that were not."""
        scaler = self.scaler
        # in fp16 a gradient may be too large for now: the scaler lowers its factor
        too_large = scaler.is_enabled() and math.isfinite(value) and scaler.get_scale() >= 1
        return self.guard.passes(number, value, norm, self.model, parts, counted=not too_large)

    def tell(self, bar: Bar) -> None:
        """How far it is, to the bar and to whoever keeps the facts."""
        course = self.course
        course.seconds, course.peak_bytes = self.clock.seconds(), max(course.peak_bytes, self.memory.bytes())
        self.trained.note(course, self.guard)
        bar.update(self.sizes[-1], total=self.clock.expected(), **self.said, peak=size(course.peak_bytes))

    def probe_if_due(self) -> None:
        """Between two steps, on the averaged weights."""
        if self.course.next_probe <= self.clock.share() < 1:
            self.course.next_probe += self.recipe.evaluate.every
            self.probe()

    def probe(self) -> None:
        """Measure in small; a measurement that fails is told, and does not end the training.

        But where towers are in shards one that fails on some ranks only does: all of them run the towers together.
        """
        self._measure("probe", lambda: [{"recall": self.job.probe()}])
        for name, measure in self.job.tests():
            self._measure(name, measure, kind="test")

    def test(self) -> None:
        """All pictures from elsewhere, which several ranks see sooner than the first one would for the report."""
        for name, measure in self.job.tests(whole=True) if self.ranks.size > 1 else ():
            self._measure(name, measure, kind="test")

    def _measure(self, what: str, measure: Callable[[], Sequence[Mapping[str, Any]]], kind: str = "probe") -> None:
        examples, unit = self.clock.seen, self.job.unit
        self.measurements += 1
        try:
            with self.average.in_place():
                for line in measure():
                    self.metrics.write(kind, examples=examples, **line)
        except Exception as failure:
            if is_sharded(self.model) and not all_failed(f"measurement {self.measurements}", None):
                raise
            logger.warning("the %s after %d %s failed, the training goes on: %r", what, examples, unit, failure)
            self.metrics.write("failure", examples=examples, what=what, why=repr(failure))

    def save_if_due(self, checkpoints: Checkpoints) -> None:
        """By the clock of all ranks, who decide alike."""
        if checkpoints.due(len(self.sizes), self.clock.now):
            self.ranks.hand_in(self.job.stream)
            self.ranks.save(checkpoints, len(self.sizes), self.clock.now, self.state)

    def end(self, checkpoints: Checkpoints) -> None:
        """What was counted is brought together; what was asked to stop can go on later."""
        self.ranks.hand_in(self.job.stream)
        if self.trained.stopped_by is not None:
            self.ranks.save(checkpoints, len(self.sizes), self.clock.now, self.state, must=True)
        elif self.ranks.size > 1 and self.job.tests():
            # measuring may take long, and is made again where it is interrupted
            self.ranks.save(checkpoints, len(self.sizes), self.clock.now, self.state)


def step(
    job: Job[Any],
    optimizer: Optimizer,
    parts: Sequence[Share],
    scaler: torch.amp.GradScaler | None = None,
    ranks: Ranks = ALONE,
) -> tuple[float, float]:
    """Encode, compare, back-propagate, clip, move the weights, clamp the scale. The loss and the gradient's norm.

    Both, and the weights, are those of the batch of all ranks, of which `parts` are this one's shares. With a `scaler`
    the gradients are enlarged while they are in fp16, and of their true size when they are clipped. Where loss or norm
    is no finite number the model stays as it was, on every rank.
    """
    run, settings = job.run, job.run.recipe
    scaler = scaler or torch.amp.GradScaler(run.device.type, enabled=False)
    optimizer.zero_grad()
    total = torch.zeros((), device=run.device)
    whole = sum(part.whole for part in parts)
    for part in parts:
        value = job.loss(part) * (part.whole / whole)
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
