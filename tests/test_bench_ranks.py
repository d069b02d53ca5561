"""The bench across ranks: everyone in turn, right results only, and what one rank cannot do nobody is measured at."""

from __future__ import annotations

import csv
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import RANKS, Pool

from contrastile.bench import gate as bench_gate
from contrastile.bench import ranks as bench_ranks
from contrastile.bench.loss import Distance, Line
from contrastile.bench.measure import Ledger, Machine, Timing
from contrastile.bench.peers import Case, Contestant, rank_peers
from contrastile.bench.ranks import ExchangeRow, RankBench, suite
from contrastile.losses.dense import dense_clip
from contrastile.train.ranks import Ranks

CPU = torch.device("cpu")
CASE = Case("clip", 96, 16, "float32")


def _run(rank: int, group: Any, case: Case, path: Path | None, spoil: str) -> tuple[list[str], bool]:
    lines: list[str] = []
    x = torch.randn(64, 64)
    ledger = Ledger(path, ExchangeRow) if path is not None and rank == 0 else None
    bench = RankBench(Machine(CPU, 0.01, lambda: x @ x, 2 * 64**3), Ranks(rank, RANKS), False, lines.append, ledger)
    kept, peers = bench_gate.LOSS_TOLERANCE, bench_ranks.rank_peers
    if spoil == "gate":
        bench_gate.LOSS_TOLERANCE = -1.0
    if spoil == "peer":

        def local(q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            if rank == 2:
                raise RuntimeError("no room\nand a long trace")
            return dense_clip(q, k, scale)

        bench.peers = True
        bench_ranks.rank_peers = lambda rank, world: (Contestant("somebody", "a way", {"clip": local}),)
    try:
        bench.measure([case])
    finally:
        bench_gate.LOSS_TOLERANCE, bench_ranks.rank_peers = kept, peers
    return lines[1:], bench.right


def _names(lines: list[str]) -> list[str]:
    return [line[33:77].strip() for line in lines if not line.startswith("  ")]


@pytest.mark.parametrize("name", ["clip", "siglip", "infonce"])
def test_every_exchange_beside_one_process(pool: Pool, tmp_path: Path, name: str) -> None:
    path = tmp_path / "rows.csv"
    answers = pool.run(_run, RANKS, Case(name, 96, 16, "float32"), path, "")
    assert all(right for _, right in answers)
    expected = [f"eager, {way}" for way in ("one process", "gather", "ring", "replicate")]
    assert _names(answers[0][0]) == [f"contrastile ({way})" for way in expected]
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["backend"] for row in rows] == expected
    assert [row["world"] for row in rows] == ["1", "4", "4", "4"]
    # the ranks' time together over one process's: of steps in a row, and of single ones
    for at, cost, ms in ((-8, "cost", "ms"), (-6, "single_cost", "single_ms")):
        milliseconds = [float(row[ms]) * int(row["world"]) for row in rows]
        expected_costs = pytest.approx([each / milliseconds[0] for each in milliseconds], rel=0.02, abs=0.002)
        assert [float(row[cost]) for row in rows] == expected_costs
        assert [float(line.split()[at]) for line in answers[0][0]] == expected_costs


@pytest.mark.parametrize(("seconds", "steps"), [(0.01, 10), (0.2, 3), (0.999, 3), (1.0, 1), (6.0, 1)])
def test_a_long_step_is_its_own_row(seconds: float, steps: int) -> None:
    assert bench_ranks._in_a_row(seconds) == steps


def test_costs_are_unknown_where_one_process_has_no_room() -> None:
    x = torch.eye(3)
    line = Line(CASE, Contestant("somebody", "a way", {}), Distance(0, 0, 0), 7, Timing(2.0, 1e9), 4)
    machine = Machine(CPU, 0.01, lambda: x @ x, 2 * 3**3)
    row = bench_ranks._Result(line, 3.0, 5, None).row(machine)
    assert (row.cost, row.single_cost, row.ms, row.single_ms, row.beside_bytes) == (None, None, 2.0, 3.0, 5)
    row = bench_ranks._Result(line, 3.0, 5, (4.0, 8.0)).row(machine)
    assert (row.cost, row.single_cost) == (2.0, 1.5)


def test_each_workspace_is_a_row_that_says_so_and_peers_are_measured_once(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    case = Case("clip", 96, 16, "float32", (2 * 2**30, 2**20))
    (lines, right), *_ = pool.run(_run, RANKS, case, path, "peer")
    assert right
    with path.open() as file:
        named = [row["backend"] for row in csv.DictReader(file)]
    ways = [f"eager, {way}" for way in ("one process", "gather", "ring", "replicate")]
    assert named == [*ways, *(f"{way}, workspace 1 MiB" for way in ways)]
    assert sum("somebody" in line for line in lines) == 1


def test_a_row_says_which_version_computed_it() -> None:
    x = torch.eye(3)
    line = Line(CASE, Contestant("somebody", "a way", {}, package="numpy"), Distance(0, 0, 0), 7, Timing(2.0, 1e9), 4)
    row = line.row(Machine(CPU, 0.01, lambda: x @ x, 2 * 3**3))
    assert f"numpy {version('numpy')}" in row.versions
    # for each rank: 8 b² d operations, shared by four, in 2 ms; and a product's rate of 1e9
    assert row.effective_tflops == round(8 * 96**2 * 16 / 4 / 2e-3 / 1e12, 4)
    assert row.ratio == round(8 * 96**2 * 16 / 4 / 2e-3 / 1e9, 4)


def test_what_lies_beside_is_seen_where_all_of_the_workspace_is_used() -> None:
    peaks = {"wide": 3 * 2**30, "frugal": 2**30}
    ran: list[str] = []

    def loss(name: str) -> Any:
        def value(q: torch.Tensor) -> torch.Tensor:
            ran.append(name)
            return q.sum()

        return value

    def peak(run: Any) -> int:
        run()
        return peaks[ran[-1]]

    bench: Any = SimpleNamespace(machine=SimpleNamespace(peak=peak))
    leaves = [torch.ones(2**8, requires_grad=True)]
    memory = RankBench._memory(bench, loss("wide"), loss("frugal"), leaves)
    assert memory == (3 * 2**30, 2**30 - 2**10 - bench_ranks.LEAST_WORKSPACE)
    assert RankBench._memory(bench, loss("wide"), None, leaves) == (3 * 2**30, 3 * 2**30 - 2**10)


def test_a_wrong_result_has_no_speed_on_any_rank(pool: Pool) -> None:
    for lines, right in pool.run(_run, RANKS, CASE, None, "gate"):
        assert not right
        assert len(lines) == 4
        assert all("no speed for a wrong result" in line for line in lines)


def test_what_one_rank_cannot_do_all_leave_out(pool: Pool) -> None:
    for lines, right in pool.run(_run, RANKS, CASE, None, "peer"):
        assert right
        assert lines[0] == "  somebody (a way), clip, 96 x 16: rank 2: RuntimeError: no room"
        assert len(_names(lines)) == 4


def test_rows_that_cannot_be_shared_are_left_out(pool: Pool) -> None:
    (lines, right), *_ = pool.run(_run, RANKS, Case("clip", 98, 16, "float32"), None, "")
    assert right
    assert lines == ["  98 rows are left out: they cannot be shared evenly by 4 ranks"]


def test_peers_are_told_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def make(**how: Any) -> Any:
        seen.append(how)
        return lambda *tensors: tensors[0].sum()

    monkeypatch.setitem(sys.modules, "open_clip", SimpleNamespace(ClipLoss=make))
    monkeypatch.setitem(sys.modules, "open_clip.loss", SimpleNamespace(SigLipLoss=make))
    q = torch.eye(4, dtype=torch.bfloat16)
    inf_cl, open_clip = rank_peers(1, 4)
    open_clip.losses["clip"](q, q, torch.ones(()))
    open_clip.losses["siglip"](q, q, torch.ones(()), torch.zeros(()))
    where = {"rank": 1, "world_size": 4}
    assert seen == [{"local_loss": True, "gather_with_grad": True, **where}, where]
    stand_in = SimpleNamespace(cal_inf_loss=lambda q, k, scale: (q.sum() + 2 * k.sum()) * scale)
    monkeypatch.setitem(sys.modules, "inf_cl", stand_in)
    assert inf_cl.losses["clip"](torch.ones(2, 2), torch.zeros(2, 2), torch.tensor(3.0)) == 18.0


def test_gpus_are_judged_by_all_that_is_promised() -> None:
    cases = suite(torch.device("cuda"), quick=False)
    for b in (2**16, 2**17, 2**18):
        assert Case("clip", b, 768, "bfloat16", (2 * 2**30,)) in cases
    assert len(suite(CPU, quick=True)) == 2
