"""Set-up of all tests: the interpreter for kernels, poisoned memory, and seeds."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

# kernels are interpreted on the CPU; Triton reads this when it decorates a kernel
os.environ.setdefault("TRITON_INTERPRET", "1")
# and so does cuBLAS, of which a suite in deterministic mode asks for the same bits
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
from hostile import Arena

# modules loaded before the first test stay: the garbage collector need not look through them
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    """Load what tests need, but not where this process leaves all of them to workers."""
    if config.getoption("numprocesses", None):
        return
    from interpreter import quicken
    from ranks import as_in_tests

    # as many processes as there are cores: threads of each would only wait for the others; NaN in all memory that a
    # test's code does not write itself, where a switch takes longer than many a test; figures take a third of a small
    # run
    as_in_tests()
    if os.environ["TRITON_INTERPRET"] == "1":
        quicken()


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    from ranks import set_aside

    set_aside()
    gc.enable()


@pytest.fixture(autouse=True)
def _seeded_and_poisoned(request: pytest.FixtureRequest) -> Iterator[None]:
    """The same numbers every time; new memory as it comes for a test that is marked so."""
    import torch

    torch.manual_seed(0)
    unpoisoned = request.node.get_closest_marker("unpoisoned")
    if unpoisoned:
        torch.use_deterministic_algorithms(False)
    yield
    if unpoisoned:
        torch.use_deterministic_algorithms(True)


@pytest.fixture(scope="session")
def attacked() -> Iterator[Arena]:
    arena = Arena("hostile_images", "hostile_texts", "hostile_random", "pyarrow.parquet")
    yield arena
    arena.close()


@pytest.fixture(scope="session")
def pool() -> Iterator[Any]:
    from ranks import Pool

    ranks = Pool()
    yield ranks
    ranks.close()
