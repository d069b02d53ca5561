"""The sweep runner of `contrastile compare`: the trials of a study, one after the other or several at a time.

A study, for a table or figure of the papers, lists trials and lays out their results. Each trial is one training by
`train/loop.py`. Worker processes run several trials at a time, each on one or several ranks. An executor of Python has
no groups of processes, so each rank is an executor of a single process.
"""

import gc
import math
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from contrastile.data.base import Batches
from contrastile.data.files import open_in_place
from contrastile.experiments.results import PAGE, RESULTS, Result, read_results, to_csv
from contrastile.offload import usable_cpus
from contrastile.train.batch_builder import DataBundle
from contrastile.train.config.base import Settings
from contrastile.train.folder import RECIPE, RunFolder, begun_run, new_run, resumed_run
from contrastile.train.log import Metrics, clock, progress, quantity
from contrastile.train.loop import TASKS, step, train
from contrastile.train.objective import open_teacher
from contrastile.train.optim import build_optimizer, with_warmup
from contrastile.train.provenance import provenance
from contrastile.train.ranks import ALONE, Ranks
from contrastile.train.recipe import to_toml
from contrastile.train.run import choose_device, same_recipe
from contrastile.train.state import StopRequest, TrainResult

# steps that are timed beforehand, the first of which does not count
TIMED_STEPS = 4
# seconds between two checks for a request to stop
POLL = 0.2
# share of a GPU's memory for all processes on it together; drivers and libraries take the rest in each process
MEMORY_SHARE = 0.9

T = TypeVar("T")
# from a task, the opened data and the rank to the outcome of the task, which is None on all ranks but the first
Work = Callable[[Any, Any, Ranks], Any]


@dataclass(frozen=True)
class Trial:
    """One training to be made: overrides of the study's recipe by table, a seed, and a share of the training pairs.

    `seconds` is the expected duration, 0 where it is unknown. The seed is None where nothing is drawn.
    """

    labels: dict[str, str]
    seed: int | None
    overrides: Mapping[str, Any]
    share: float = 1.0
    seconds: float = 0.0


def overridden(settings: T, overrides: Mapping[str, Any]) -> T:
    """Copy a recipe, or a table of it, with other values; a mapping overrides keys of the table of its name."""
    table: Any = settings
    values = {
        name: overridden(getattr(table, name), value) if isinstance(value, Mapping) else value
        for name, value in overrides.items()
    }
    return table.model_copy(update=values)


def clashes(section: Settings, prefix: str = "") -> Iterator[str]:
    """The sentences about keys that clash in a recipe which was overridden after it was checked."""
    for name, value in section:
        if isinstance(value, Settings):
            yield from clashes(value, f"{prefix}{name}.")
    yield from (f"{prefix}{key}".rstrip(".") + f": {reason}" for wrong, key, reason in section.clashes() if wrong)


@dataclass(frozen=True)
class Comparison:
    """The folder of the results, their tables, and the signal that ended the comparison early, if one did."""

    folder: Path
    table: str
    stopped_by: int | None


@dataclass(frozen=True, kw_only=True)
class Study(ABC):
    """One table or figure: its trials, and the layout of their results.

    `jobs` trials run at a time, each on `ranks` processes, which get a pickled copy of the study. `options`: those of
    the command that choose the study.
    """

    recipe: Any
    seeds: int = 3
    jobs: int = 1
    ranks: int = 1
    options: tuple[str, ...] = ()
    # the end of the folder's name, and the heading of compare.md
    suffix: ClassVar[str] = "compare"
    title: ClassVar[str]

    @abstractmethod
    def trials(self, data: Any) -> Sequence[Trial]:
        """List all trials in the order in which they start."""

    @abstractmethod
    def order(self, result: Result) -> Any:
        """Return the sort key of a line of compare.csv."""

    @abstractmethod
    def introduction(self, results: Sequence[Result]) -> str:
        """Write whatever a reader of the tables has to know."""

    @abstractmethod
    def table(self, results: Sequence[Result]) -> str:
        """Write the tables in Markdown."""

    def prepared(self, _data: Any, _folder: RunFolder) -> Self:
        """Measure quantities that the trials depend on; return the study that has them."""
        return self

    def ready(self, trial: Trial, _results: Sequence[Result]) -> Trial:
        """Complete a trial that depends on earlier results, directly before it starts."""
        return trial

    def check(self, data: Any) -> None:
        """Raise ValueError for a trial whose keys clash, or whose warm-up is longer than its training."""
        for trial in self.trials(data):
            recipe, pairs = overridden(self.recipe, trial.overrides), max(1, round(trial.share * len(data.rows)))
            try:
                if clash := next(clashes(recipe), None):
                    raise ValueError(clash)
                with_warmup(recipe.optim, recipe.train.fitted(pairs), pairs)
            except ValueError as error:
                raise ValueError(f"{_named(replace(trial, seed=None))}: {error}") from None

    @property
    def all_seeds(self) -> range:
        """The seeds of every row of the table; the first is the recipe's."""
        return range(self.recipe.seed, self.recipe.seed + self.seeds)

    def open(self) -> Any:
        return TASKS[self.recipe.kind].open_data(self.recipe)

    def examples(self, data: Any) -> int:
        return int(self.recipe.train.length(len(data.rows)))

    def job(self, recipe: Any, data: Any, share: float) -> Any:
        return TASKS[recipe.kind].untrained(recipe, training_share(data, share), open_teacher(recipe))

    def seconds(self, data: Any) -> float:
        """Estimate the seconds of one training from a few steps of the recipe's first batch."""
        size = min(self.recipe.train.batch[0][1], len(data.rows))
        times = timed_steps(self.job(self.recipe, data, 1.0), self.recipe, size, TIMED_STEPS)
        # the first step allocates and compiles
        return statistics.median(times[1:]) / size * self.examples(data)

    def costs(self, _trial: Trial, trained: TrainResult) -> dict[str, float]:
        return {"examples": trained.examples, "steps": trained.steps, "seconds": round(trained.seconds, 3)}

    def run(self, trial: Trial, data: Any, ranks: Ranks, folder: RunFolder) -> Result | int | None:
        """Train and evaluate one trial; return the signal that stopped it, if one did, None on ranks but the first."""
        trained, failed = TrainResult(ranks=ranks.size), ""
        job = self.job(overridden(self.recipe, {**trial.overrides, "seed": trial.seed}), data, trial.share)
        path = folder / "-".join([*trial.labels.values(), f"{trial.seed}.jsonl"]).replace(" ", "_")
        if ranks.rank == 0:
            # an interrupted trial starts again from its beginning
            path.unlink(missing_ok=True)
        with Metrics(path if ranks.rank == 0 else None) as metrics, ranks.joined(job):
            try:
                train(job, metrics, trained, ranks=ranks)
            except FloatingPointError as error:
                # all ranks raise it in the same step
                failed = str(error)
        if ranks.rank > 0:
            return None
        if trained.stopped_by is not None:
            return trained.stopped_by
        measures = {} if failed else job.measures()
        return Result(trial.labels, trial.seed, self.costs(trial, trained), measures, failed)

    def write(self, folder: RunFolder, results: Sequence[Result]) -> None:
        machines = dict.fromkeys(f"{result.origin['chip']} · {result.origin['versions']}" for result in results)
        page = [f"# {self.recipe.name}: {self.title}", self.introduction(results), self.table(results)]
        folder.write_text(RESULTS, to_csv(results))
        folder.write_text(PAGE, "\n\n".join([*page, "  \n".join(machines)]) + "\n")


def timed_steps(
    job: Any, recipe: Any, size: int, count: int, timer: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Make `count` steps of `size` examples with fresh weights; return the seconds of each."""
    optimizer, seconds = build_optimizer(job.run.model.train(), recipe.optim), []
    batches = Batches(job.rows, seed=recipe.seed)
    with closing(job):
        for number in range(1, count + 1):
            rows, began = batches.take(size), timer()
            step(job, optimizer, job.parts(rows, number, ALONE))
            seconds.append(timer() - began)
    return seconds


def training_share(data: DataBundle, share: float) -> DataBundle:
    """Keep a share of the training pairs: the same for every seed, and a subset of the pairs of a larger share."""
    if share == 1:
        return data
    subset = np.sort(np.random.default_rng(0).permutation(data.rows)[: max(1, round(share * len(data.rows)))])
    return replace(data, pairs=replace(data.pairs, splits={**data.pairs.splits, "train": subset}))


def compare(study: Study, runs: str | Path, *, resume: bool = False) -> Comparison:
    """Run all trials of a study, or with `resume` the missing ones of compare.csv; write the results after each."""
    # mistakes in data and trials are reported before an earlier folder is moved aside
    data, processes = study.open(), study.jobs * study.ranks
    study.check(data)
    origin, stopped_by = provenance(choose_device(study.recipe.device), processes=processes), None
    name = f"{study.recipe.name}-{study.suffix}"
    begun = begun_run(runs, name) if resume else None
    if begun is not None:
        same_recipe(begun, study.recipe, "compare", study.options)
    with resumed_run(begun) if begun is not None else new_run(runs, name) as folder:
        if begun is None:
            folder.write_text(RECIPE, to_toml(study.recipe))
        study = study.prepared(data, folder)
        # the lengths of its trials may depend on what was measured
        study.check(data)
        results = sorted(read_results(folder), key=study.order)
        finished = [(result.labels, result.seed) for result in results]
        trials = [trial for trial in study.trials(data) if (trial.labels, trial.seed) not in finished]
        if trials:
            expected = sum(trial.seconds for trial in trials) or len(trials) * study.seconds(data)
            training = f"about {clock(expected)} of training, one after the other"
            beside = "evaluation and the start of processes add to it"
            sys.stderr.write(f"{quantity(len(trials), 'runs')}: {training}; {beside}\n")
        if results:
            study.write(folder, results)
        outcomes = _outcomes(study, trials, data, results, folder)
        # worker processes have their own copy
        del data
        with progress(len(trials), "comparing", "runs") as bar, closing(outcomes):
            for outcome in outcomes:
                if isinstance(outcome, int):
                    stopped_by = outcome
                    break
                results.append(replace(outcome, origin=origin))
                results.sort(key=study.order)
                study.write(folder, results)
                if processes > 1:
                    # trials side by side end in any order
                    sys.stderr.write(f"finished: {_named(outcome)}\n")
                bar.update(1)
    return Comparison(folder.path, study.table(results) if results else "nothing was finished", stopped_by)


def _outcomes(
    study: Study, trials: Sequence[Trial], data: Any, results: Sequence[Result], folder: RunFolder
) -> Generator[Result | int, None, None]:
    """Run the trials in this process or in several; yield a result or the signal that stopped it."""
    if study.jobs * study.ranks == 1:
        for number, trial in enumerate(trials, start=1):
            sys.stderr.write(f"run {number} of {len(trials)}: {_named(trial)}\n")
            if (outcome := study.run(study.ready(trial, results), data, Ranks(), folder)) is not None:
                yield outcome
        return
    # texts are tokenised once, which takes longer than to hand over the tokens
    pickled = study.recipe.kind == "retriever"
    work, opening = partial(study.run, folder=folder), partial(_same, data) if pickled else study.open
    del data
    how = {"jobs": study.jobs, "ranks": study.ranks, "device": study.recipe.device}
    yield from run_parallel(work, trials, opening, folder, **how)


def _named(run: Trial | Result) -> str:
    """Labels and seed of a trial, as a line of progress names it."""
    labels = ", ".join(f"{name} {label}" for name, label in run.labels.items())
    return labels if run.seed is None else f"{labels}, seed {run.seed}"


def _same(data: T) -> T:
    return data


def run_parallel(
    work: Work, tasks: Sequence[Any], opening: Callable[[], Any], folder: RunFolder, *, jobs: int, ranks: int = 1,
    device: str = "auto",
) -> Generator[Any, None, None]:  # fmt: skip
    """Yield the outcome of each task when it is ready, and the signal that asked to stop, if one did.

    `jobs` groups of `ranks` processes each take one task after the other, spread over the GPUs unless `device` names
    one. `work`, `opening` (which opens the data once in each process) and the tasks are pickled. The standard error of
    a group goes to `crew-<number>.log`. A process that fails or dies ends them all with a RuntimeError.
    """
    # models in reference cycles, and blocks that torch's allocator caches, are released to the processes
    gc.collect()
    torch.cuda.empty_cache()
    spawn, others = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
    logs = [folder / f"crew-{group}.log" for group in range(min(jobs, len(tasks)))]
    for log in logs:
        # a symbolic link is refused in this process, where its sentence is shown
        open_in_place(log, "a").close()
    groups = [
        [
            ProcessPoolExecutor(1, spawn, _start, (work, opening, log, device, group * ranks + rank, ranks, jobs))
            for rank in range(ranks)
        ]
        for group, log in enumerate(logs)
    ]
    waiting, running = iter(tasks), dict[Future[Any], int]()
    # the stores at which the ranks of each group meet: this process keeps them, as torchrun does, because another
    # program may take a free port before the first rank listens at it
    stores = dict[int, Any]()

    def submit(group: int) -> None:
        for task in islice(waiting, 1):
            if ranks > 1:
                stores[group] = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            port = stores[group].port if ranks > 1 else 0
            running.update((executor.submit(_run, task, port), group) for executor in groups[group])

    try:
        for group in range(len(groups)):
            submit(group)
        with StopRequest() as stop:
            while running and stop.signal is None:
                for future in wait(running, POLL, FIRST_COMPLETED).done:
                    if stop.signal is not None:
                        # the same signal may have ended the process
                        break
                    group = running.pop(future)
                    if error := future.exception():
                        *_, last = ("without a word", *logs[group].read_text(encoding="utf-8").strip().splitlines())
                        raise RuntimeError(f"a process of {logs[group]} ended: {last}") from error
                    if future.result() is not None:
                        yield future.result()
                    if group not in running.values():
                        submit(group)
            if stop.signal is not None:
                yield stop.signal
    finally:
        # an executor of Python 3.11 cannot end a task that runs
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        for executor in chain(*groups):
            executor.shutdown(cancel_futures=True)


def assigned_gpu(process: int, ranks: int, processes: int) -> tuple[int, int]:
    """Return the GPU of a process, and the most processes that share one; `Ranks` refuses a GPU that is missing."""
    gpus = max(torch.cuda.device_count(), ranks)
    return process % gpus, math.ceil(processes / gpus)


# work, opened data and rank of a worker process, set by `_start`
_worker: tuple[Work, Any, Ranks]


def _start(work: Work, opening: Callable[[], Any], log: Path, device: str, process: int, ranks: int, jobs: int) -> None:
    """Make this process a rank: environment as torchrun sets it, standard error, threads, GPU, data."""
    global _worker
    processes = jobs * ranks
    gpu, sharing = assigned_gpu(process, ranks, processes)
    os.environ |= {"RANK": str(process % ranks), "LOCAL_RANK": str(gpu), "WORLD_SIZE": str(ranks)}
    # each process decodes images with its part of the cores; threads of a tokenizer would exceed that part
    os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "TOKENIZERS_PARALLELISM": "false", "MASTER_ADDR": "localhost"}
    with open_in_place(log, "a") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", max(1, int(usable_cpus()) // processes))))
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu and ":" not in device:
        # a group of one rank takes any GPU; `Ranks` checks the numbers of several
        torch.cuda.set_device(gpu % torch.cuda.device_count())
    rank = Ranks.of_environment(device)
    _worker = work, opening(), rank
    if on_gpu:
        # at this limit torch's allocator gives back cached blocks of other sizes, which it never does otherwise
        torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE / (jobs if ":" in device else sharing))


def _end_with_parent() -> None:
    """End this process when its parent is gone: the process of an executor would wait for tasks for ever."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _run(task: Any, port: int) -> Any:
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    work, data, rank = _worker
    try:
        return work(task, data, rank)
    except BaseException:
        traceback.print_exc()
        raise
