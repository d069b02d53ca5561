"""Ranks on this machine: a pool of four, started once, because starting one costs seconds, asking it milliseconds.

And processes of a test's own, for what leaves a group unusable or kills a rank.
"""

import datetime
import gc
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from contrastile.train.report import page

RANKS = 4
# functions that draw the figures of a report, for `patch.multiple(page, **FIGURES)`
FIGURES = {"curves": page.curves, "memory_bars": page.memory_bars}
# seconds after which a rank that waits for another gives up
PATIENCE = 40


def set_aside() -> None:
    """Keep loaded modules out of garbage collections, each of which would take a third of a second longer.

    In a forked process it would also copy it.
    """
    gc.collect()
    gc.freeze()


def server() -> Any:
    """The context of processes that are forks of a server without threads.

    A fork of this process can inherit a lock that a thread holds, and then waits for it for ever.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["loaded"])
    # Python 3.11's server does not use the path that it is given, without which it loads nothing of the tests
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        ensure_running()
    return context


def as_in_tests() -> None:
    """Give a process of the server what `conftest.py` gives a test: one thread, NaN in new memory, figures left out."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if not torch.cuda.is_available():
        # for devices that are not there torch notes the stack that each seed came from, which takes half a millisecond
        for devices in (torch.cuda, torch.xpu, torch.mtia):
            devices.manual_seed_all = lambda _: None
    for name in FIGURES:
        setattr(page, name, lambda *_, title="", **__: f"<svg>{title}</svg>")


@contextmanager
def fresh(W: int, function: Callable[..., None], *arguments: Any) -> Iterator[list[BaseProcess]]:
    """W processes, in each of which function(rank, *arguments) runs; none outlives the block."""
    context = server()
    processes = [context.Process(target=function, args=(rank, *arguments)) for rank in range(W)]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


# below the ports that a system gives to connections; a thousand for each process of the suite, from its number
_ports = count(10_000 + 1_000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")))


def free_port() -> int:
    """A port for ranks to meet at, which no connection of another test takes before the first rank listens there."""
    for port in _ports:
        with suppress(OSError), closing(socket.socket()) as free:
            free.bind(("localhost", port))
            return port
    raise AssertionError("the numbers do not end")


class Pool:
    """Runs a function on the first W ranks, each in the group of those W, and collects what they return."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        # forked: torch is loaded already, and with one thread no thread pool is left behind
        set_aside()
        context = multiprocessing.get_context("fork")
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(RANKS):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, there, Path(self.folder.name) / "rendezvous"), daemon=True
            )
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], W: int, *arguments: Any) -> list[Any]:
        """function(rank, group, *arguments) on each of W ranks; the first exception is raised here."""
        for connection in self.connections[:W]:
            _send(connection, (function, W, arguments))
        answers = [pickle.loads(connection.recv_bytes()) for connection in self.connections[:W]]
        for rank, (ok, answer) in enumerate(answers):
            if not ok:
                raise AssertionError(f"rank {rank} of {W}:\n{answer}")
        return [answer for _, answer in answers]

    def check(self, function: Callable[..., None], W: int, *arguments: Any) -> None:
        """Runs what asserts for itself on every rank."""
        assert self.run(function, W, *arguments) == [None] * W

    def close(self) -> None:
        for connection in self.connections:
            _send(connection, None)
        for process in self.processes:
            process.join(timeout=10)
        self.folder.cleanup()


def _send(connection: Connection, what: Any) -> None:
    """As bytes: a connection's own pickler opens a file and a socket for each tensor."""
    connection.send_bytes(pickle.dumps(what))


def _serve(rank: int, connection: Connection, rendezvous: Path) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS, timeout=timeout)
    # a group does not inherit the timeout
    groups = {W: dist.new_group(list(range(W)), timeout=timeout) for W in range(1, RANKS + 1)}
    while (task := pickle.loads(connection.recv_bytes())) is not None:
        function, W, arguments = task
        try:
            _send(connection, (True, function(rank, groups[W], *arguments)))
        except Exception:
            _send(connection, (False, traceback.format_exc()))
    dist.destroy_process_group()
