"""Worker processes of a comparison: several trials at a time, each on one or several ranks.

An executor knows nothing of groups of ranks, so each rank is an executor of a single process.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import chain, islice
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from contrastile.data.files import open_in_place
from contrastile.offload import usable_cpus
from contrastile.train.folder import RunFolder
from contrastile.train.ranks import Ranks
from contrastile.train.state import StopRequest

# seconds between two checks for a request to stop
POLL = 0.2
# share of a GPU's memory for all processes on it together; drivers and libraries take the rest in each process
MEMORY_SHARE = 0.9

# from a task, the opened data and the rank to the outcome of the task, which is None on all ranks but the first
Work = Callable[[Any, Any, Ranks], Any]


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
        # a link there is refused here, with its sentence, and not in a process
        open_in_place(log, "a").close()
    groups = [
        [
            ProcessPoolExecutor(1, spawn, _start, (work, opening, log, device, group * ranks + rank, ranks, jobs))
            for rank in range(ranks)
        ]
        for group, log in enumerate(logs)
    ]
    waiting, running = iter(tasks), dict[Future[Any], int]()
    # where the ranks of a group meet: kept by this process, as by torchrun, because a port that is only chosen here may
    # be taken before the first rank listens at it
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
    # all processes share the cores: each decodes images with its part, and a tokenizer's threads would be more
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
