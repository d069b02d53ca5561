"""The planner beside every measured row of benchmarks/results: the bounds that docs/planner.md states."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
# a block has 64² pairs, whose logits lie closer together than is planned for: both directions share exponentials
CLOSE_LOGITS = {f"clip {way} 2048 x 128 on 32 CPUs" for way in ("gather, eager", "ring, eager", "ring, dense")}


def _imported(name: str) -> Any:
    """A script of the benchmarks, which finds those beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def module() -> Any:
    return _imported("planner_rows")


@pytest.fixture(scope="module")
def cases(module: Any) -> dict[str, list[Any]]:
    cases = {kind: list(module.cases(kind)) for kind in module.KINDS}
    assert _unsteady(module, cases["losses"]) == {f"H200: {label}" for label in module.HOST_BOUND}
    assert not _unsteady(module, cases["steps"]) | _unsteady(module, cases["tokens"])
    return cases


def _unsteady(module: Any, cases: list[Any]) -> set[str]:
    """The cases of which two measurements differ by more than a plan within 20 % of both could."""
    seconds: dict[str, list[float]] = {}
    for case in cases:
        if case.seconds:
            seconds.setdefault(f"{case.chip}: {case.label}", []).append(case.seconds)
    return {label for label, several in seconds.items() if max(several) > 1.2 / 0.8 * min(several)}


def _bytes_off(case: Any) -> float:
    return abs(case.planned_bytes / case.bytes - 1)


def _seconds_off(case: Any) -> float:
    return abs(case.planned_seconds() / case.seconds - 1)


def test_every_row_is_planned_or_left_out_for_a_reason_with_a_name(module: Any, cases: dict[str, list[Any]]) -> None:
    planned = Counter(case.file for several in cases.values() for case in several)
    reasons = Counter[str]()
    for path in sorted((FOLDER / "results").glob("*.csv")):
        verdicts = [module.left_out(path.stem, row) for row in module.read_rows(path)]
        assert planned[path.stem] == verdicts.count(None), path.stem
        reasons.update(verdict for verdict in verdicts if verdict is not None)
    assert set(reasons) == {
        module.RUN, module.SHORT, module.EAGER, module.LIBRARIES, module.HELD, module.OWN_KEYS, module.BENCHED,
        "another implementation", "no plan beside it", "out of memory, or too long", "no gradients",
    }  # fmt: skip


def test_the_page_has_the_table_of_today(cases: dict[str, list[Any]]) -> None:
    page = (FOLDER.parent / "docs" / "planner.md").read_text(encoding="utf-8")
    for line in _imported("planner").accuracy(cases).splitlines()[2:]:
        _, title, *numbers, _ = line.split("|")
        (written,) = (other.split("|")[2:-1] for other in page.splitlines() if other.startswith(f"|{title}|"))
        # under the interpreter a row at the bound may lie beyond it, because its tiles differ
        off = [abs(int(a) - int(b)) for a, b in zip(numbers, written, strict=True)]
        assert max(off) <= 1, "take the table of benchmarks/planner.py"


@pytest.mark.parametrize("kind", ["losses", "ranks", "steps", "carried", "cpu"])
def test_peaks_are_within_5_percent_of_nine_rows_in_ten_and_10_of_all(cases: dict[str, list[Any]], kind: str) -> None:
    others = cases["other losses"] if kind == "losses" else []
    every = [case for case in (*cases[kind], *others) if case.bytes and case.other_code is None]
    off = [_bytes_off(case) for case in every if case.label not in CLOSE_LOGITS]
    assert all(case.planned_bytes > case.bytes for case in every if case.label in CLOSE_LOGITS)
    assert len(off) >= {"cpu": 15, "carried": 8, "losses": 120}.get(kind, 48)
    assert max(off) <= 0.1
    assert sum(x <= 0.05 for x in off) >= 0.9 * len(off)


def test_communication_is_fitted_to_one_half_of_the_rows_of_several_ranks_and_meets_the_other(
    module: Any, cases: dict[str, list[Any]]
) -> None:
    several = [case for case in cases["losses"] if case.loss.ranks > 1]
    for chip in {case.chip for case in several}:
        fitted, new = ([x for x in several if x.chip == chip and x.fitted is half] for half in (True, False))
        assert 0 <= len(fitted) - len(new) <= len(module.EXCHANGES)
        # both halves have every exchange, on two ranks and on four
        assert {(x.loss.exchange_name, x.loss.ranks) for x in fitted} == {
            (x.loss.exchange_name, x.loss.ranks) for x in new
        }
        off = [_seconds_off(case) for case in new]
        assert max(off) <= 0.2
        assert sum(x <= 0.1 for x in off) >= 0.9 * len(off)
    # without the term the short ones are planned too short
    silent = replace(module.profile_of("H200"), hop=1e-12, link=1e18)
    of_h200 = [case for case in several if case.chip == "H200"]
    assert min(case.planned_seconds(silent) / case.seconds - 1 for case in of_h200) < -0.1


def test_a_fit_finds_the_rates_of_another_chip_and_leaves_those_that_its_rows_do_not_tell(
    module: Any, cases: dict[str, list[Any]]
) -> None:
    profile = module.profile_of("H200")
    true = replace(profile, loss=0.8 * profile.loss, pair=1.2 * profile.pair, hop=1.5 * profile.hop)
    across = [case for case in cases["losses"] if case.loss.ranks > 1]
    alone = [replace(case, loss=replace(case.loss, ranks=1, exchange="single")) for case in across]
    measured = [replace(case, seconds=case.planned_seconds(true)) for case in (*across, *alone)]
    found = _imported("planner").fit(measured, ("loss", "pair", "hop", "decode"), profile)
    assert [found.loss, found.pair, found.hop] == pytest.approx([true.loss, true.pair, true.hop], rel=0.02)
    assert found.decode == pytest.approx(profile.decode)


def test_token_vectors_of_a_gpu(cases: dict[str, list[Any]]) -> None:
    alone, several = ([case for case in cases["tokens"] if (case.loss.ranks > 1) is more] for more in (False, True))
    assert (len(alone), len(several)) == (15, 8)
    assert max(_bytes_off(case) for case in alone if case.other_code is None) <= 0.04
    assert max(map(_bytes_off, several)) <= 0.1
    new = [case for case in (*alone, *several) if not case.fitted]
    assert len(new) == 19
    # one round was timed, behind products of as long a time
    off = {f"{case.chip}, {case.label}": x for case in new if (x := _seconds_off(case)) > 0.1}
    assert list(off) == ["H100, symmetric, 4096 x 4096 of 32 x 180 tokens on 1"]
    assert max(off.values()) <= 0.12


def test_updates_of_a_gpu(cases: dict[str, list[Any]]) -> None:
    """Adafactor waits for the host, AdamW for memory; nothing was fitted to Adafactor without momentum."""
    several = [case for case in cases["carried"] if case.timed]
    assert sorted(case.fitted for case in several) == [False, True, True]
    assert max(map(_seconds_off, several)) <= 0.03


def test_compiled_towers_of_a_gpu(cases: dict[str, list[Any]]) -> None:
    """Nothing was fitted to these rows."""
    several = [case for case in cases["steps"] if case.file == "h200_step" and "compiled" in case.label]
    assert len(several) >= 10
    # with "auto" the number of graphs is planned too
    assert max(_bytes_off(case) for case in several if "auto" not in case.label) <= 0.03
    assert max(map(_seconds_off, several)) <= 0.1


def test_rows_of_other_code_are_named_one_by_one(cases: dict[str, list[Any]]) -> None:
    named = [case for several in cases.values() for case in several if case.other_code is not None]
    assert len(named) == 5
    # a row that the planner meets is not left out
    assert min(map(_bytes_off, named)) > 0.05


@pytest.mark.parametrize("half", ["every row", "rows that nothing was fitted to"])
@pytest.mark.parametrize("kind", ["losses", "calls", "other losses", "ranks", "steps", "tokens"])
def test_seconds_are_within_10_percent_of_nine_rows_in_ten_and_20_of_all(
    cases: dict[str, list[Any]], kind: str, half: str
) -> None:
    kinds = ("other losses", "calls") if kind == "other losses" else (kind,)
    every = [case for kind in kinds for case in cases[kind] if case.timed]
    off = [_seconds_off(case) for case in every if not (case.fitted and half != "every row")]
    assert len(off) >= {"losses": 36, "calls": 10, "other losses": 70, "ranks": 25, "steps": 52, "tokens": 6}[kind]
    assert max(off) <= 0.2
    assert sum(x <= 0.1 for x in off) >= 0.9 * len(off)


def test_seconds_that_are_not_planned_have_a_reason_with_a_name(module: Any, cases: dict[str, list[Any]]) -> None:
    named = [case for several in cases.values() for case in several if case.seconds and case.untimed]
    reasons = Counter((case.untimed, case.file) for case in named)
    assert reasons == {
        (module.HOST, "h200_loss"): 10, (module.HOST, "h200_user_calls"): 29, (module.HOST, "h200_memory"): 30,
        (module.HOST, "h100_loss"): 5, (module.HOST, "h100_user_calls"): 6,
    }  # fmt: skip
