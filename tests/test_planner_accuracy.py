"""The planner beside every measured row of benchmarks/results: the bounds that docs/planner.md states."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contrastile.planner.profile import target

FOLDER = Path(__file__).parent.parent / "benchmarks"
# a block has 64² pairs, whose logits lie closer together than is planned for: both directions share exponentials
CLOSE_LOGITS = {f"clip {way} 2048 x 128 on 32 CPUs" for way in ("gather, eager", "ring, eager", "ring, dense")}


@pytest.fixture(scope="module")
def module() -> Any:
    spec = importlib.util.spec_from_file_location("planner_rows", FOLDER / "planner.py")
    assert spec is not None
    assert spec.loader is not None
    # dataclasses look their module up
    sys.modules["planner_rows"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cases(module: Any) -> dict[str, list[Any]]:
    memory = target("H200").memory
    cases = {kind: list(make(memory)) for kind, make in module.KINDS.items()}
    assert {label.removesuffix(" bfloat16 on 1") for label in module.unsteady(cases["losses"])} == set(
        module.HOST_BOUND
    )
    assert not module.unsteady(cases["steps"]) | module.unsteady(cases["tokens"])
    return cases


def _bytes_off(case: Any) -> float:
    return abs(case.planned_bytes / case.bytes - 1)


def test_every_row_is_planned_or_left_out_for_a_reason_with_a_name(module: Any, cases: dict[str, list[Any]]) -> None:
    planned = Counter(case.file for several in cases.values() for case in several)
    reasons = Counter[str]()
    for path in sorted((FOLDER / "results").glob("*.csv")):
        verdicts = [module.left_out(path.stem, row) for row in module.read_rows(path)]
        assert planned[path.stem] == verdicts.count(None), path.stem
        reasons.update(verdict for verdict in verdicts if verdict is not None)
    assert set(reasons) == {
        module.RUN, module.SHORT, module.EAGER,
        *map(module.FILES_LEFT_OUT.get, ("h200_doors", "h200_host_features", "h200_user_calls")),
        "another implementation", "no plan beside it", "out of memory, or too long", "no gradients",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["losses", "ranks", "steps", "carried", "cpu"])
def test_peaks_are_within_5_percent_of_nine_rows_in_ten_and_10_of_all(cases: dict[str, list[Any]], kind: str) -> None:
    others = cases["other losses"] if kind == "losses" else []
    every = [case for case in (*cases[kind], *others) if case.bytes and case.other_code is None]
    off = [_bytes_off(case) for case in every if case.label not in CLOSE_LOGITS]
    assert all(case.planned_bytes > case.bytes for case in every if case.label in CLOSE_LOGITS)
    assert len(off) >= {"cpu": 17, "carried": 8, "losses": 62}.get(kind, 48)
    assert max(off) <= 0.1
    assert sum(x <= 0.05 for x in off) >= 0.9 * len(off)


def test_communication_is_fitted_to_one_half_of_the_rows_of_several_ranks_and_meets_the_other(
    cases: dict[str, list[Any]],
) -> None:
    profile = target("H200").profile
    several = [case for case in cases["losses"] if case.loss.ranks > 1]
    fitted, new = ([case for case in several if case.fitted is half] for half in (True, False))
    assert (len(fitted), len(new)) == (5, 5)
    # both halves have both exchanges, on two ranks and on four
    assert {(c.loss.exchange_name, c.loss.ranks) for c in fitted} == {(c.loss.exchange_name, c.loss.ranks) for c in new}
    assert max(abs(case.planned_seconds(profile) / case.seconds - 1) for case in new) <= 0.03
    # without the term the short ones are planned too short
    silent = replace(profile, hop=1e-12, link=1e18)
    assert min(case.planned_seconds(silent) / case.seconds - 1 for case in new) < -0.1


def test_token_vectors_of_a_gpu(cases: dict[str, list[Any]]) -> None:
    several = cases["tokens"]
    assert len(several) == 8
    assert max(map(_bytes_off, several)) <= 0.005
    profile = target("H200").profile
    new = [case for case in several if not case.fitted]
    assert len(new) == 6
    assert max(abs(case.planned_seconds(profile) / case.seconds - 1) for case in new) <= 0.1


def test_updates_of_a_gpu(cases: dict[str, list[Any]]) -> None:
    """Adafactor waits for the host, AdamW for memory; nothing was fitted to Adafactor without momentum."""
    profile = target("H200").profile
    several = [case for case in cases["carried"] if case.timed]
    assert sorted(case.fitted for case in several) == [False, True, True]
    assert max(abs(case.planned_seconds(profile) / case.seconds - 1) for case in several) <= 0.03


def test_compiled_towers_of_a_gpu(cases: dict[str, list[Any]]) -> None:
    """Nothing was fitted to these rows."""
    several = [case for case in cases["steps"] if case.file == "h200_towers" and "compiled" in case.label]
    assert len(several) >= 5
    assert max(map(_bytes_off, several)) <= 0.02
    profile = target("H200").profile
    assert max(abs(case.planned_seconds(profile) / case.seconds - 1) for case in several) <= 0.1


def test_rows_of_other_code_are_named_one_by_one(cases: dict[str, list[Any]]) -> None:
    named = [case for several in cases.values() for case in several if case.other_code is not None]
    assert len(named) == 29
    # a row that the planner meets is not left out
    assert min(_bytes_off(case) for case in named) > 0.1


@pytest.mark.parametrize("half", ["every row", "rows that nothing was fitted to"])
@pytest.mark.parametrize("kind", ["losses", "steps", "tokens"])
def test_seconds_are_within_10_percent_of_nine_rows_in_ten_and_20_of_all(
    cases: dict[str, list[Any]], kind: str, half: str
) -> None:
    profile = target("H200").profile
    several = [case for case in cases[kind] if case.timed and not (case.fitted and half != "every row")]
    off = [abs(case.planned_seconds(profile) / case.seconds - 1) for case in several]
    assert len(off) >= {"losses": 28, "steps": 77, "tokens": 5}[kind]
    assert max(off) <= 0.2
    assert sum(x <= 0.1 for x in off) >= 0.9 * len(off)


def test_seconds_that_are_not_planned_have_a_reason_with_a_name(module: Any, cases: dict[str, list[Any]]) -> None:
    reasons = Counter(case.untimed for several in cases.values() for case in several if case.seconds)
    del reasons[None]
    assert reasons == {module.CAPTURED: 8, module.HOST: 6, module.DISTURBED: 1}
