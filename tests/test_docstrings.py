"""Examples in docstrings run, and print what they say."""

from __future__ import annotations

import doctest
import importlib
import warnings
from pathlib import Path

import pytest

import contrastile

ROOT = Path(contrastile.__file__).parent


def _has_examples(path: Path) -> bool:
    """Those of a run that somebody has trained are only read."""
    return any(">>> " in line and "+SKIP" not in line for line in path.read_text().splitlines())


WITH_EXAMPLES = sorted(path for path in ROOT.rglob("*.py") if _has_examples(path))


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_run(path: Path) -> None:
    module = importlib.import_module(".".join(path.relative_to(ROOT.parent).with_suffix("").parts))
    with warnings.catch_warnings():
        # examples of one line do without normalising
        warnings.filterwarnings("ignore", ".*rows of length other than 1")
        found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed


def test_every_public_name_has_an_example() -> None:
    for name in contrastile.__all__:
        assert ">>> " in (getattr(contrastile, name).__doc__ or ""), name
