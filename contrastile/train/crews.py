"""Several runs at a time: crews of processes, each of one or several ranks, that take one task after the other.

Beside `trials.py` and `retriever/compare.py`, which say what a task is. A process opens the data once, and keeps what
it says in a file of its crew. One that ends by itself, however it does, ends the whole with a sentence; so does a
signal with none.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from contrastile._check import wrong
from contrastile.offload import usable_cpus
from contrastile.train.ranks import Ranks
from contrastile.train.signals import StopRequest

# seconds between two looks at whether one is asked to stop
LOOK = 0.2
# of a GPU's memory, what all crews together may hold; the rest is what drivers and libraries take for each process
SHARED = 0.9

# of what was opened, and of the rank that does it; of several ranks the first one has something to say
Task = Callable[[Any, Ranks], Any]


def side_by_side(
    tasks: Sequence[Task],
    opening: Callable[[], Any],
    folder: Path,
    *,
    jobs: int,
    ranks: int = 1,
    device: str = "auto",
) -> Iterator[Any]:
    """What each task comes to, as soon as it does, by `jobs` crews of `ranks` processes; at last the signal to stop.

    Tasks, and `opening`, which gives what they need once in each process, are pickled. What the processes say is in
    `crew-<number>.log` in the folder. The crews are dealt out to the GPUs that torch sees, unless `device` names one.
    Raises RuntimeError where one of them ends.
    """
    if jobs < 1 or ranks < 1:
        raise wrong("jobs", "be at least 1, as ranks must", f"{jobs} and {ranks}", "One process is 1 of both.")
    # what torch holds unused here is theirs now, and what is garbage: models and graphs refer to themselves
    gc.collect()
    torch.cuda.empty_cache()
    crews = [Crew(number, ranks, opening, device, folder, jobs) for number in range(min(jobs, len(tasks)))]
    left, busy = iter(tasks), {connection: crew for crew in crews for connection in crew.connections}
    try:
        for crew in crews:
            crew.begin(next(left))
        with StopRequest() as stop:
            while busy and stop.signal is None:
                for ready in wait([*busy], timeout=LOOK):
                    assert isinstance(ready, Connection)
                    if stop.signal is not None:
                        # who asks this process to stop may ask the others too
                        break
                    crew = busy[ready]
                    yield crew.answer(ready)
                    if (task := next(left, None)) is not None:
                        crew.begin(task)
                    else:
                        busy = {other: one for other, one in busy.items() if one is not crew}
            if stop.signal is not None:
                yield stop.signal
    finally:
        for crew in crews:
            crew.end()


class Crew:
    """Processes that work together, on one task after the other, with the environment that torchrun gives them."""

    def __init__(
        self, number: int, ranks: int, opening: Callable[[], Any], device: str, folder: Path, jobs: int
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._log = folder / f"crew-{number}.log"
        # the first rank's first; the others' say nothing but that they end
        self.connections: list[Connection] = []
        self._processes = []
        # the cores, shared out evenly unless one is told otherwise
        threads = int(os.environ.get("OMP_NUM_THREADS", max(1, int(usable_cpus()) // (jobs * ranks))))
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            gpu, beside = dealt(number * ranks + rank, ranks, jobs * ranks)
            place = {"RANK": str(rank), "LOCAL_RANK": str(gpu), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost"}
            # of a node's cores each decodes with its share; a tokenizer's threads would be more than those
            place |= {"LOCAL_WORLD_SIZE": str(jobs * ranks), "TOKENIZERS_PARALLELISM": "false"}
            share = SHARED / (jobs if ":" in device else beside)
            words = (theirs, place, opening, device, self._log, threads, share)
            process = context.Process(target=_serve, args=words, daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self._processes.append(process)

    def begin(self, task: Task) -> None:
        """Give all ranks a task, and a port to meet at."""
        with closing(socket.socket()) as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        for connection in self.connections:
            try:
                connection.send((task, port))
            except OSError:
                raise self._ended() from None

    def answer(self, connection: Connection) -> Any:
        """What is said there of the task; raises RuntimeError where a process ended instead."""
        try:
            return connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None

    def _ended(self) -> RuntimeError:
        said = self._log.read_text(encoding="utf-8").strip().splitlines() if self._log.exists() else []
        return RuntimeError(f"a process of {self._log} ended: {said[-1] if said else 'without a word'}")

    def end(self) -> None:
        """No more tasks; what is under way is given up."""
        for process in self._processes:
            process.kill()
            process.join()


def dealt(process: int, ranks: int, processes: int) -> tuple[int, int]:
    """The GPU of a process of crews of `ranks`, and the most processes that share one.

    With too few GPUs for a crew each rank has its own number, and says so itself.
    """
    gpus = max(torch.cuda.device_count(), ranks)
    return process % gpus, math.ceil(processes / gpus)


def _serve(
    tasks: Connection,
    place: dict[str, str],
    opening: Callable[[], Any],
    device: str,
    log: Path,
    threads: int,
    share: float,
) -> None:
    """One rank of a crew: do what comes, until nothing comes any more."""
    os.environ |= place
    with log.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    torch.set_num_threads(threads)
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu and ":" not in device:
        # of several ranks the same is asked again, and refused where there is no such GPU
        torch.cuda.set_device(int(place["LOCAL_RANK"]) % torch.cuda.device_count())
    ranks, given = Ranks.of_environment(device), opening()
    if on_gpu:
        # what torch holds and cannot use again, pieces of other sizes, it gives back at this limit; else nobody would
        torch.cuda.set_per_process_memory_fraction(share)
    while True:
        try:
            task, os.environ["MASTER_PORT"] = tasks.recv()
        except EOFError:
            return
        answer = task(given, ranks)
        if ranks.rank == 0:
            tasks.send(answer)
