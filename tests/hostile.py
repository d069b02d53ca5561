"""Hostile input: each attack in a process of its own, whose memory and processor time are limited and measured.

`Arena` starts one program that has loaded the library, and forks it for each attack. The memory of an attack is the
growth of the largest resident set since the fork; processor time beyond `SECONDS` ends it, as does memory beyond
`MEMORY`, so that a mistake cannot take the machine with it.
"""

import gc
import importlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

# of an attack: seconds of processor time, and address space beside that of the program
SECONDS, MEMORY = 20, 4 << 30


class Outcome(NamedTuple):
    """The end of an attack: the value returned, or the error's type and text; bytes of memory beside the program's."""

    value: Any
    error: str
    memory: int


class Arena:
    """The program in which attacks run. `modules` are loaded before the first fork."""

    def __init__(self, *modules: str) -> None:
        command = [sys.executable, "-W", "ignore", __file__, *modules]
        own = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
        self._program = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **own}
        )

    def run(self, function: Callable[..., Any], *arguments: Any) -> Outcome:
        """Call a function of a test module in a fork; arguments and value travel as JSON."""
        task = [function.__module__, function.__name__, arguments]
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(json.dumps(task, default=str) + "\n")
        self._program.stdin.flush()
        return Outcome(*json.loads(self._program.stdout.readline()))

    def close(self) -> None:
        """End the program."""
        self._program.communicate()


def sampled(names: Collection[str], quick: Collection[str]) -> list[Any]:
    """Parameters of a test: those among `quick` always, the others in `make test-hostile` alone."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.hostile) for name in names]


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _attack(line: str, answer: int) -> None:
    """The fork's own work."""
    module, name, arguments = json.loads(line)
    function = getattr(importlib.import_module(module), name)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    before, value, error = _peak(), None, ""
    try:
        value = function(*arguments)
    # the test says which error is right
    except BaseException as failure:
        error = f"{type(failure).__name__}: {failure}"
    os.write(answer, json.dumps([value, error, _peak() - before]).encode())


def _serve() -> None:
    # forks inherit that: none looks through what is loaded, and so copies it
    gc.freeze()
    for line in sys.stdin:
        answers, answer = os.pipe()
        child = os.fork()
        if child == 0:
            # a library's prints are no answer
            os.dup2(2, 1)
            _attack(line, answer)
            os._exit(0)
        os.close(answer)
        with open(answers, "rb") as file:
            content = file.read()
        _, status = os.waitpid(child, 0)
        lost = json.dumps([None, f"ended by signal {os.waitstatus_to_exitcode(status)}", 0])
        sys.stdout.write((content.decode() or lost) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    for loaded in sys.argv[1:]:
        importlib.import_module(loaded)
    _serve()
