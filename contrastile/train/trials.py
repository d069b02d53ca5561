"""Runs that are made to be compared: what each is called, what came of it, several of them side by side.

Beside `loop.py`, whose `train` each of them is. What is compared `compare.py` decides (the same memory in four ways),
`compare_losses.py` or `compare_batches.py`. One run after the other happens in this process; crews are processes
of their own, of one or several ranks each, that open the data once and take one run after the other.
"""

from __future__ import annotations

import csv
import io
import multiprocessing
import os
import socket
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from contrastile._check import wrong
from contrastile.train.checkpoint import build_run
from contrastile.train.config import Recipe
from contrastile.train.evaluation import encode_held_out, evaluate
from contrastile.train.facts import Trained
from contrastile.train.feed import Materials, open_materials
from contrastile.train.image_text import ImageText
from contrastile.train.log import Metrics, progress
from contrastile.train.loop import train
from contrastile.train.ranks import Ranks
from contrastile.train.signals import StopRequest

RESULTS, TABLE = "compare.csv", "compare.md"
# seconds between two looks at whether one is asked to stop
LOOK = 0.2


@dataclass(frozen=True)
class Plan:
    """One run to be made, by its `labels`, with the share `share` of the training pairs."""

    labels: dict[str, str]
    recipe: Recipe
    share: float = 1.0


@dataclass(frozen=True)
class Trial:
    """One run that was made: what it took, and the recall at 1 of each headline test; or why it `failed`."""

    labels: dict[str, str]
    seed: int
    examples: int
    steps: int
    seconds: float
    recall: dict[str, float] = field(default_factory=dict)
    failed: str = ""


@dataclass(frozen=True)
class Comparison:
    """Where the results are, the table, and the signal that ended it early, if one did."""

    folder: Path
    table: str
    stopped_by: int | None


Outcome = Trial | int
"""A trial, or the signal that stopped it."""


def make(plan: Plan, materials: Materials, folder: Path, ranks: Ranks) -> Outcome | None:
    """Train and measure one plan; its metrics lie in `folder`. Of several ranks the first one has something to say."""
    recipe, trained, failed = plan.recipe, Trained(ranks=ranks.size), ""
    run = build_run(recipe, materials.tokenizer)
    job = ImageText(run, portion(materials, plan.share))
    name = "-".join([*plan.labels.values(), str(recipe.seed)]).replace(" ", "_")
    with Metrics(folder / f"{name}.jsonl" if ranks.rank == 0 else None) as metrics, ranks.joined(job):
        try:
            train(job, metrics, trained, ranks=ranks)
        except FloatingPointError as failure:
            # on all ranks in the same step
            failed = str(failure)
    if ranks.rank > 0:
        return None
    if trained.stopped_by is not None:
        return trained.stopped_by
    rows = [] if failed else evaluate(run, encode_held_out(run, materials.pairs))
    recall = {row["test"]: row["recall"]["1"] for row in rows if row["headline"]}
    took = (trained.examples, trained.steps, round(trained.seconds, 1))
    return Trial(plan.labels, recipe.seed, *took, recall, failed)


def portion(materials: Materials, share: float) -> Materials:
    """With the share `share` of the pairs to train on, drawn alike for every seed; a smaller share lies in a larger."""
    if share == 1:
        return materials
    rows = materials.pairs.splits["train"]
    some = np.sort(np.random.default_rng(0).permutation(rows)[: max(1, round(share * len(rows)))])
    return replace(materials, pairs=replace(materials.pairs, splits={**materials.pairs.splits, "train": some}))


def one_by_one(plans: Iterable[Plan], materials: Materials, folder: Path) -> Iterator[Outcome]:
    """Make every plan in this process. The plans are asked for one by one, as time depends on what came before."""
    for plan in plans:
        outcome = make(plan, materials, folder, Ranks())
        assert outcome is not None
        yield outcome
        if isinstance(outcome, int):
            return


def side_by_side(plans: Sequence[Plan], folder: Path, *, jobs: int, ranks: int) -> Iterator[Outcome]:
    """Make every plan with `jobs` crews of `ranks` processes each; outcomes come as they are ready.

    What the processes say is in `crew-<number>.log` in the folder.
    """
    if jobs < 1 or ranks < 1:
        raise wrong("jobs", "be at least 1, as ranks must", f"{jobs} and {ranks}", "One process is 1 of both.")
    crews = [Crew(number, ranks, plans[0].recipe, folder, jobs) for number in range(min(jobs, len(plans)))]
    left, busy = iter(plans), {crew.first: crew for crew in crews}
    try:
        for crew in crews:
            crew.begin(next(left))
        with progress(len(plans), "comparing", "runs") as bar, StopRequest() as stop:
            while busy and stop.signal is None:
                for ready in wait([*busy], timeout=LOOK):
                    assert isinstance(ready, Connection)
                    if stop.signal is not None:
                        # who asks this process to stop may ask the others too
                        break
                    yield busy[ready].outcome()
                    bar.update(1)
                    if (plan := next(left, None)) is not None:
                        busy[ready].begin(plan)
                    else:
                        del busy[ready]
            if stop.signal is not None:
                yield stop.signal
    finally:
        for crew in crews:
            crew.end()


class Crew:
    """Processes that train together, one run after the other, with the environment that torchrun gives them."""

    def __init__(self, number: int, ranks: int, recipe: Recipe, folder: Path, jobs: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._log = folder / f"crew-{number}.log"
        self._ours: list[Connection] = []
        self._processes = []
        # the cores, shared out evenly unless one is told otherwise
        threads = int(os.environ.get("OMP_NUM_THREADS", max(1, (os.cpu_count() or 1) // (jobs * ranks))))
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost"}
            words = (theirs, place, recipe, folder, self._log, threads)
            process = context.Process(target=_serve, args=words, daemon=True)
            process.start()
            theirs.close()
            self._ours.append(ours)
            self._processes.append(process)
        self.first = self._ours[0]

    def begin(self, plan: Plan) -> None:
        """Give all ranks a plan, and a port to meet at."""
        with closing(socket.socket()) as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        for connection in self._ours:
            connection.send((plan, port))

    def outcome(self) -> Outcome:
        """What the first rank has to say of the plan; raises RuntimeError where a process ended instead."""
        try:
            return self.first.recv()
        except EOFError:
            said = self._log.read_text(encoding="utf-8").strip().splitlines()
            raise RuntimeError(f"a process of {self._log} ended: {said[-1] if said else 'without a word'}") from None

    def end(self) -> None:
        """No more plans; what is under way is given up."""
        for process in self._processes:
            process.kill()
            process.join()


def _serve(plans: Connection, place: dict[str, str], recipe: Recipe, folder: Path, log: Path, threads: int) -> None:
    """One rank of a crew: train what comes, until nothing comes any more."""
    os.environ |= place
    with log.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    torch.set_num_threads(threads)
    ranks, materials = Ranks.of_environment(recipe.device), open_materials(recipe)
    while True:
        try:
            plan, os.environ["MASTER_PORT"] = plans.recv()
        except EOFError:
            return
        outcome = make(plan, materials, folder, ranks)
        if ranks.rank == 0:
            plans.send(outcome)


def as_csv(trials: Sequence[Trial]) -> str:
    """One line per trial, recall in a column per test."""
    file = io.StringIO()
    rows: list[dict[str, Any]] = [
        {**trial.labels, "seed": trial.seed, "examples": trial.examples, "steps": trial.steps}
        | {"seconds": trial.seconds, **trial.recall, "failed": trial.failed}
        for trial in trials
    ]
    names = list(dict.fromkeys(name for row in rows for name in row if name != "failed"))
    writer = csv.DictWriter(file, [*names, "failed"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def tests_of(trials: Sequence[Trial]) -> list[str]:
    """The tests that any of the trials was measured with."""
    return list(dict.fromkeys(test for trial in trials for test in trial.recall))


def line(cells: Iterable[object]) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def spread(trials: Sequence[Trial], test: str) -> str:
    """Mean ± standard deviation of a test in percent; the mean alone where there is one seed; how many failed."""
    shares = [trial.recall[test] for trial in trials if not trial.failed]
    failed = f" ({len(trials) - len(shares)} failed)" if len(shares) < len(trials) else ""
    if not shares:
        return failed.strip()
    mean = f"{100 * statistics.mean(shares):.1f}"
    return (f"{mean} ± {100 * statistics.stdev(shares):.1f} %" if len(shares) > 1 else f"{mean} %") + failed
