"""The script that compares two copies across ranks: parts that end, fail and wait, and its last lines."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "ranks_compared.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("ranks_compared", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ranks_compared", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "GRACE", 0.5)
    return module


def _run(script: ModuleType, folder: Path, body: str, limit: float = 10.0) -> tuple[str, list[str]]:
    code = f"import os, sys, time\nrank = int(os.environ['RANK'])\n{body}"
    outcome = script.carried_out(script.Part("a part", folder, ["-c", code]), 2, limit)
    return outcome.ended.split(" after")[0], outcome.lines


def test_a_part_that_ends_says_what_the_first_rank_said(script: ModuleType, tmp_path: Path) -> None:
    assert _run(script, tmp_path, "print('rank', rank, os.environ['WORLD_SIZE'])") == ("done", ["rank 0 2"])


def test_a_rank_that_fails_ends_the_part(script: ModuleType, tmp_path: Path) -> None:
    ended, lines = _run(script, tmp_path, "if rank: raise SystemExit('wrong')\nprint('so far')\ntime.sleep(60)")
    assert ended == "failed"
    assert lines[0] == "so far"
    assert "rank 1: wrong" in lines


def test_ranks_that_wait_say_where(script: ModuleType, tmp_path: Path) -> None:
    ended, lines = _run(script, tmp_path, "def stuck():\n    time.sleep(60)\nstuck()", limit=1.0)
    assert ended == "STOPPED"
    assert [line.split()[-1] for line in lines if line.startswith("rank 1")] == ["stuck", "<module>"]


def test_before_and_after_are_side_by_side(script: ModuleType) -> None:
    row = (
        "  65536 x 768  {:16} {:9.2f} ms, cost {:.3f}, running {:9.2f} ms, cost {:.3f}, host 9.0 ms, 0.2 GiB, off 3e-03"
    )
    before = script.Outcome("done", ["something else", row.format("ring", 17.5, 1.6, 15.0, 1.39)])
    after = script.Outcome(
        "done", [row.format("ring", 14.0, 1.3, 12.0, 1.1), row.format("ring, first", 13.0, 1.2, 11.0, 1.05)]
    )
    lines = script.compared({"before": before, "after": after})
    assert lines[0] == (
        "  65536 ring             in a row   15.00 ->   12.00 ms, cost 1.390 -> 1.100; "
        "single   17.50 ->   14.00 ms, cost 1.600 -> 1.300; right, 3e-03 off"
    )
    wrong = script.Outcome("done", [row.format("ring", 14.0, 1.3, 12.0, 1.1).replace("3e-03", "2e-01")])
    assert script.compared({"after": wrong})[0].endswith("WRONG, 2e-01 off")
    nothing = script.Outcome("done", [row.format("ring", 14.0, 1.3, 12.0, 1.1).replace("3e-03", "nan")])
    assert script.compared({"after": nothing})[0].endswith("WRONG, nan off")
    assert "? ->   11.00 ms" in lines[1]
    assert script.compared({"after": script.Outcome("STOPPED", [])}) == []
