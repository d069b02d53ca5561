"""The outer loop of a run: data, model, optimizer, steps, evaluation, report.

`run_recipe` makes a whole run; comparisons call `train`, which takes the steps alone. A `Task` has the model and the
data. Every rank runs this file on its share of each batch.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from contrastile._errors import logger
from contrastile._types import accumulator
from contrastile.data.base import Batches, counted
from contrastile.distributed.failure import all_failed
from contrastile.gradcache.rng import begin_random
from contrastile.train import folder as folders
from contrastile.train import optim
from contrastile.train import state as states
from contrastile.train.checkpoints import Checkpoints, Parts, step_seed
from contrastile.train.config import Recipe
from contrastile.train.folder import CHECKPOINTS, METRICS, RECIPE, RunFolder
from contrastile.train.image_text import ImageText
from contrastile.train.load import load
from contrastile.train.log import Bar, Listener, Metrics, progress, size, trackers
from contrastile.train.memory import PeakMemory
from contrastile.train.ranks import ALONE, Ranks
from contrastile.train.recipe import load_any_recipe
from contrastile.train.report.page import LiveReport, write_stopped_report
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.retriever.job import RetrieverJob
from contrastile.train.run import begin_run, learned_by, same_recipe, save_run, settled
from contrastile.train.sharded import SHARDED_PARTS, ShardedPart, attempt, full, gathered_once, is_sharded
from contrastile.train.state import Progress, StopRequest, TrainResult, all_finite
from contrastile.train.task import BatchPart, Task

# share of the run after which `foretell_end` estimates when `train.minutes` ends it
FORETOLD = 0.1
# the task of each kind of recipe
TASKS: dict[str, type[Task[Any]]] = {"image-text": ImageText, "retriever": RetrieverJob}


@dataclass(frozen=True)
class Outcome:
    """Result of a run: its folder (on the first rank), its table, the signal that ended it, the unit of `examples`."""

    folder: Path | None
    examples: int
    table: str
    stopped_by: int | None
    unit: str


def run_recipe(recipe: Recipe | RetrieverRecipe, runs: str | Path, *, resume: bool = False) -> Outcome:
    """Train the model of `recipe` into `runs/<its name>`, evaluate it, write its report.

    resume: continue the run of that name from its newest checkpoint, bit for bit as if it had not been interrupted; or
    begin it, where there is none. A finished run is evaluated again.
    """
    ranks = Ranks.of_environment(recipe.device)
    begun = folders.begun_run(runs, recipe.name) if resume else None
    recipe = settled(recipe, begun)
    if begun is not None:
        same_recipe(begun, recipe)
    task = TASKS[recipe.kind].open(recipe, begun)
    checkpoints_of = partial(
        Checkpoints, Path(runs) / recipe.name / CHECKPOINTS, recipe.save, task.data_digest,
        recipe={**learned_by(recipe), **task.origin},
    )  # fmt: skip
    if ranks.rank > 0:
        result = states.finished_result(begun) if begun is not None else None
        result = result or train_run(None, task, checkpoints_of(writes=False), ranks)
        return Outcome(None, result.examples, "", result.stopped_by, task.unit)
    with folders.resumed_run(begun) if begun is not None else folders.new_run(runs, recipe.name) as folder:
        if begun is None:
            if resume:
                logger.warning("no run %s to go on with: a new one begins", folder.path)
            begin_run(folder, task.run)
        checkpoints = checkpoints_of(run=folder)
        result = states.finished_result(folder)
        if result is None:
            result = train_run(folder, task, checkpoints, ranks)
            if result.finished and result.examples < result.planned:
                message = "train.minutes=%g ended the training after %s of %s %s"
                logger.warning(message, recipe.train.minutes, f"{result.examples:,}", f"{result.planned:,}", task.unit)
        else:
            task.compared(folder).set_model(load(folder.path, device=recipe.device).model)
        table = task.report(folder) if result.finished else ""
        if result.stopped_by is not None:
            write_stopped_report(folder, task.metadata_so_far(result), task.wording)
        if result.finished:
            checkpoints.drop()
    return Outcome(folder.path, result.examples, table, result.stopped_by, task.unit)


def evaluate_run(path: str | Path, *, device: str = "auto") -> str:
    """Evaluate the saved weights of a run again and write its report again; the table."""
    folder = folders.finished_run(path)
    recipe = load_any_recipe(folder / RECIPE, files=False)
    return TASKS[recipe.kind].of_run(folder, device=device).report(folder)


def train_run(folder: RunFolder | None, task: Task[Any], checkpoints: Checkpoints, ranks: Ranks) -> TrainResult:
    """Train. With a folder, which the first rank has, write metrics and report, and save the weights at the end."""
    result = TrainResult(ranks=ranks.size)
    with ExitStack() as at_end:
        path: Path | None = None
        receivers: dict[str, Listener] = {}
        if folder is not None:
            at_end.enter_context(saved_at_end(folder, task, result))
            path = folder / METRICS
            report = LiveReport(folder, lambda: task.metadata_so_far(result), task.wording)
            receivers = {"the report": report, **trackers(task.run.recipe, folder)}
        metrics = at_end.enter_context(Metrics(path, receivers))
        at_end.enter_context(ranks.joined(task))
        train(task, metrics, result, checkpoints, ranks)
    return result


@contextmanager
def saved_at_end(folder: RunFolder, task: Task[Any], result: TrainResult) -> Iterator[None]:
    """Save weights and metadata when the training within has ended, or has failed after a whole step."""
    savable = True
    try:
        yield
    except KeyboardInterrupt:
        # a second signal stops at once, perhaps in the middle of a step
        savable = False
        raise
    except BaseException:
        # a failure before the first step, or one that destroyed the weights, must not overwrite those of the folder
        savable = result.steps > 0 and all_finite(task.run.model)
        raise
    finally:
        # torchrun sends SIGTERM when another rank has ended; it must not interrupt the saving
        with StopRequest(patient=True) if result.ranks > 1 else nullcontext():
            if savable and is_sharded(task.run.model):
                logger.warning("the weights were in shards, of which some are lost; resume from the newest checkpoint")
            elif savable:
                save_run(folder, task.run, task.metadata(result))


def train(
    task: Task[Any], metrics: Metrics, result: TrainResult, checkpoints: Checkpoints | None = None, ranks: Ranks = ALONE
) -> None:
    """Take all steps of the task's recipe. The model is trained in place; `result` is updated after every step."""
    trainer = Trainer(task, metrics, result, ranks)
    checkpoints = checkpoints or Checkpoints(None, trainer.recipe.save)
    trainer.begin(checkpoints)
    state, patient = trainer.progress, ranks.size > 1
    bar_at = progress(state.examples, "training", task.unit, state.seen)
    with bar_at as bar, StopRequest(patient=patient) as stop, ExitStack() as at_end, closing(task):
        # a run saves the weights that it measures
        at_end.callback(trainer.ema.settle)
        while trainer.agree_to_continue(stop.signal):
            trainer.step()
            trainer.show(bar)
            trainer.foretell_end()
            trainer.guard.check_weights(len(state.sizes), trainer.weight_norm, trainer.model)
            if state.next_probe <= state.share() < 1:
                # one probe for all that a large step has passed
                every = trainer.recipe.evaluate.every
                state.next_probe += every * (1 + (state.share() - state.next_probe) // every)
                trainer.probe()
            # due by the clock that all ranks share
            if checkpoints.due(len(state.sizes), state.now):
                ranks.collect_counts(task.stream)
                trainer.save(checkpoints)
        trainer.end(checkpoints)
        if result.stopped_by is None:
            # a run that train.minutes ended is complete, too
            bar.update(0, total=state.seen)
    if result.stopped_by is None:
        result.finished = True
        trainer.probe()
        trainer.test()


class Trainer:
    """The steps of a task, with all state that they change."""

    def __init__(self, task: Task[Any], metrics: Metrics, result: TrainResult, ranks: Ranks) -> None:
        recipe: Any = task.run.recipe
        self.task, self.recipe, self.model = task, recipe, task.run.model
        self.metrics, self.result, self.ranks = metrics, result, ranks
        self.steps = recipe.train.fitted(len(task.rows))
        self.optim = optim.with_warmup(recipe.optim, self.steps, len(task.rows))
        self.optimizer = optim.build_optimizer(self.model, self.optim)
        self.scaler = torch.amp.GradScaler(task.run.device.type, enabled=recipe.train.precision == "fp16")
        self.ema = states.Ema(self.model, recipe.optim.ema)
        on_gpu = task.run.device.type == "cuda"
        self.stopwatch = states.Stopwatch(partial(torch.cuda.Event, enable_timing=True) if on_gpu else states.HostEvent)
        self.stopwatch.follow(self.optimizer)
        task.timed(self.stopwatch)
        self.memory = PeakMemory(task.run.device)
        result.base_bytes = self.memory.start()
        result.planned = recipe.train.length(len(task.rows))
        self.progress = Progress(result.planned, recipe.train.minutes, recipe.evaluate.every)
        self.guard = states.NonFiniteGuard()
        # measurements so far, which number them: two of one name may follow the same step
        self.measurements = 0
        # the norm of all trained weights after the last step
        self.weight_norm = 0.0
        self.shown: dict[str, str] = {}
        self.foretold = False
        # the parts of a checkpoint, under the names that earlier versions gave them
        self.checkpointed: Parts = {
            "model": self.model, "optimizer": self.optimizer, "scaler": self.scaler, "average": self.ema,
            "guard": self.guard, "metrics": metrics, "course": self.progress, **task.state,
        }  # fmt: skip
        if is_sharded(self.model):
            sharded = {name: ShardedPart(self.checkpointed[name]) for name in SHARDED_PARTS}
            self.checkpointed = {**self.checkpointed, **sharded}

    def begin(self, checkpoints: Checkpoints) -> None:
        """Restore the newest checkpoint, or probe the untrained model."""
        if not self.ranks.restore(checkpoints, self.checkpointed, self.task.stream):
            self.metrics.load_state_dict({"bytes": 0})
            self.probe()
        self.progress.start()
        self.batches = Batches(self.task.rows, seed=self.recipe.seed, examples=self.progress.seen)
        most, rows = max(size for _, size in self.steps.batch), len(self.task.rows)
        if self.steps != self.recipe.train and self.ranks.rank == 0:
            message = "batches of %d at most: train.epoch_steps is %d, for %d %s to train on"
            logger.warning(message, most, self.steps.epoch_steps, rows, self.task.unit)
        if most > rows and self.ranks.rank == 0:
            message = "train.batch is %d, of %d %s to train on: they come several times in a step."
            logger.warning(f"{message} A smaller batch makes more steps", most, rows, self.task.unit)
        self.result.update(self.progress, self.guard.skipped)
        self.model.train()

    def agree_to_continue(self, signal: int | None) -> bool:
        """True if another step follows: all ranks ask together and get the same answer."""
        state, steps = self.progress, len(self.progress.sizes)
        state.now = state.elapsed()
        # at least one step, even where the first probe took all the time
        over = steps > 0 and not (state.share() < 1 and state.has_time_for(self._planned()[1]))
        state.now, over, self.result.stopped_by = self.ranks.agree(steps + 1, state.now, over, signal, self.task.stream)
        return self.result.stopped_by is None and not over

    def _planned(self) -> tuple[int, int]:
        """The recipe's present batch size, and that of the next step, which is smaller at the end of the run."""
        planned = self.steps.batch_at(self.progress.share())
        return planned, min(planned, self.progress.examples - self.progress.seen)

    def step(self) -> None:
        """Take one step: build the batch, update the weights unless loss or norm are non-finite, log the values."""
        task, state, ranks = self.task, self.progress, self.ranks
        planned, count = self._planned()
        state.sizes.append(count)
        number = len(state.sizes)
        seen = (state.seen + count / 2) / state.examples
        rate = optim.learning_rate(state.share(ahead=count / 2), self.optim, planned, seen)
        optim.set_learning_rate(self.optimizer, rate)
        # torch.manual_seed would take half a millisecond to record the stack for absent devices
        begin_random(task.run.device, step_seed(self.recipe.seed, number, ranks.rank))
        self.stopwatch.start()
        parts = task.parts(self.batches.take(count), number, ranks)
        task.prefetch(self.batches.ahead(count), ranks)
        self.stopwatch.mark("towers")
        with gathered_once(self.model):
            value, norm = step(task, self.optimizer, parts, self.scaler, ranks)
        timing = self.stopwatch.read(count)
        # read together, because each reading waits for the device
        values = torch.stack([full(self.model.logit_scale.exp()), optim.weight_norm(self.model)])
        scale, self.weight_norm = values.tolist()
        state.seen += count
        state.pace = (state.elapsed() - state.now) / count
        # an overflow of fp16 is not counted while the scaler can lower its factor
        overflow = self.scaler.is_enabled() and math.isfinite(value) and self.scaler.get_scale() >= 1
        inputs = (part.floats for part in parts)
        if self.guard.passes(number, value, norm, self.model, inputs, counted=not overflow):
            self.ema.update()
            self.metrics.write(
                "step", examples=state.seen, batch=count, planned=planned, loss=value, norm=norm,
                learning_rate=rate, scale=scale, **timing, peak_bytes=self.memory.bytes(),
            )  # fmt: skip
        else:
            self.metrics.write("skip", examples=state.seen, batch=count, loss=str(value), norm=str(norm))
        self.shown = {"loss": f"{value:.3f}", "norm": f"{norm:.2f}", "rate": f"{rate:.1e}", "scale": f"{scale:.1f}"}
        self.shown["time"] = states.shares_text(timing["shares"])

    def show(self, bar: Bar) -> None:
        """Record the progress in the result and on the bar."""
        state = self.progress
        state.seconds = state.elapsed()
        state.peak_bytes = max(state.peak_bytes, self.memory.bytes())
        self.result.update(state, self.guard.skipped)
        bar.update(state.sizes[-1], total=state.expected(), **self.shown, peak=size(state.peak_bytes))

    def foretell_end(self) -> None:
        """Warn once, early in the run, if `train.minutes` will end it before it has seen all of its examples."""
        state = self.progress
        if self.foretold or state.minutes is None or self.ranks.rank or not FORETOLD <= state.share() < 1:
            return
        self.foretold, rate = True, state.seen / max(state.elapsed(), 1e-9)
        expected = round(60 * state.minutes * rate)
        if expected >= (1 - FORETOLD) * state.examples:
            return
        sentence = f"{rate:,.0f} {self.task.unit} a second: train.minutes={state.minutes:g} will "
        sentence += f"end the training after about {expected:,} of {state.examples:,}; more minutes learn more"
        busy, cores, threads = os.getloadavg()[0], os.cpu_count() or 1, torch.get_num_threads()
        if self.task.run.device.type == "cpu" and threads > 1 and busy > cores + 1:
            # threads of one product wait for each other, and each of them for a core
            sentence += f"; {busy:.0f} processes share {cores} cores, "
            sentence += "where OMP_NUM_THREADS=1 may be several times as fast"
        logger.warning(sentence)

    def probe(self) -> None:
        """Measure on samples; a failure is logged and does not end the training.

        Sharded towers run on all ranks together: with these a failure on some of the ranks ends the training.
        """
        self._measure("probe", lambda: [{"recall": self.task.probe()}])
        for name, measure in self.task.tests():
            self._measure(name, measure, kind="test")

    def test(self) -> None:
        """Measure the tests whole with several ranks, which is faster than the first rank alone in the report."""
        for name, measure in self.task.tests(whole=True) if self.ranks.size > 1 else ():
            self._measure(name, measure, kind="test", whole=True)

    def _measure(
        self, name: str, measure: Callable[[], Sequence[Mapping[str, Any]]], kind: str = "probe", **failed: Any
    ) -> None:
        examples, unit = self.progress.seen, self.task.unit
        self.measurements += 1
        try:
            with self.ema.in_place(), attempt(self.model):
                for line in measure():
                    self.metrics.write(kind, examples=examples, **line)
        except Exception as failure:
            if is_sharded(self.model) and not all_failed(f"measurement {self.measurements}", None):
                raise
            logger.warning("the %s after %d %s failed, the training goes on: %r", name, examples, unit, failure)
            self.metrics.write("failure", examples=examples, what=name, why=repr(failure), **failed)

    def save(self, checkpoints: Checkpoints, *, must: bool = False) -> None:
        checkpoints.save(len(self.progress.sizes), self.progress.now, self.checkpointed, must=must)

    def end(self, checkpoints: Checkpoints) -> None:
        """Collect the counts of all ranks, save a stopped run's checkpoint, log an end by `train.minutes`."""
        stream = self.task.stream
        self.ranks.collect_counts(stream)
        if stream is not None and stream.lost:
            # on the first rank, which holds the counts of all
            logger.warning("images of the collection that were skipped in training: %s", counted(stream.lost))
        if self.result.stopped_by is not None:
            self.save(checkpoints, must=True)
        elif self.ranks.size > 1 and self.task.tests():
            # tests may take long, and start again where they are interrupted
            self.save(checkpoints)
        # after the checkpoint, because a run that is resumed at its end writes this line again
        if self.result.stopped_by is None and self.progress.seen < self.progress.examples:
            self.metrics.write("end", examples=self.progress.seen, of=self.progress.examples, why="train.minutes")


def step(
    task: Task[Any], optimizer: Optimizer, parts: Sequence[BatchPart], scaler: torch.amp.GradScaler | None = None,
    ranks: Ranks = ALONE,
) -> tuple[float, float]:  # fmt: skip
    """Back-propagate the loss of all parts, clip, update the weights, clamp the scale; loss and gradient norm.

    `parts` are this rank's shares of a batch; loss, norm and update are those of the batch of all ranks. A `scaler`
    enlarges gradients in fp16; they are clipped at their true size. If loss or norm are not finite, the weights stay
    as they are on every rank.
    """
    run = task.run
    settings: Any = run.recipe
    scaler = scaler or torch.amp.GradScaler(run.device.type, enabled=False)
    optimizer.zero_grad()
    total = torch.zeros((), device=run.device, dtype=accumulator(run.model.logit_scale.dtype))
    examples = sum(part.global_size for part in parts)
    for part in parts:
        value = task.loss(part) * (part.global_size / examples)
        scaler.scale(value).backward()
        total += value.detach()
    # reduced before the scaler inspects them, so that the factors of all ranks stay equal
    total = ranks.combine(run.model, total, settings.loss.gradient)
    scaler.unscale_(optimizer)
    value, norm = torch.stack([total, optim.clip_gradients(run.model, settings.optim.clip_norm)]).tolist()
    taken = math.isfinite(value + norm)
    if taken:
        optimizer.step()
        optim.clamp_scale(run.model.logit_scale)
    scaler.update()
    task.objective.end_step(taken)
    return value, norm
