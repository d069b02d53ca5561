"""`LossBench` across ranks: exchanges beside one process, right results only, failures of one rank, the profile."""

import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import RANKS, Pool

from contrastile.bench import gate as bench_gate
from contrastile.bench import harness
from contrastile.bench import loss as bench_loss
from contrastile.bench.harness import COLUMNS, Machine, Report, Timing, World, read_rows, results_file
from contrastile.bench.loss import Distance, LossBench, columns_of, device_line, profile, times_of
from contrastile.bench.peers import Case, Contestant, rank_peers
from contrastile.losses.reference import dense_clip

CPU = torch.device("cpu")
CASE = Case("clip", 96, 16, "float32")
WAYS = [f"eager, {way}" for way in ("one process", "gather", "ring", "replicate")]


def _machine(rank: int = 0) -> Machine:
    x = torch.eye(3)
    return Machine(CPU, 0.01, lambda: x @ x, 2 * 3**3, World(rank, RANKS))


def _run(rank: int, group: Any, case: Case, path: Path | None, spoil: str) -> tuple[list[str], bool]:
    lines: list[str] = []
    patch = pytest.MonkeyPatch()
    # times are of no interest here: as few steps as can be
    for name, steps in (("WARMUP_STEPS", 1), ("RANK_ROUNDS", 1), ("ROW_STEPS", 2), ("ROW_SECONDS", 0.0)):
        patch.setattr(harness, name, steps)
    if spoil == "nodes":
        patch.setenv("LOCAL_WORLD_SIZE", "2")
    if spoil == "gate":
        patch.setattr(bench_gate, "LOSS_TOLERANCE", -1.0)

    def local(q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if rank == 2:
            raise RuntimeError("no room\nand a long trace")
        return dense_clip(q, k, scale)

    peers = (Contestant("somebody", "a way", {"clip": local}),)
    patch.setattr(bench_loss, "rank_peers", lambda rank, world: peers)
    try:
        with results_file(path if rank == 0 else None, COLUMNS["exchanges"]) as write:
            bench = LossBench(_machine(rank), spoil == "peer", Report(lines.append, write, World(rank, RANKS)))
            bench.measure([case])
    finally:
        patch.undo()
    return lines[2:], bench.report.passed


def _names(lines: list[str]) -> list[str]:
    return [line[40:84].strip() for line in lines if not line.startswith("  ")]


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_every_exchange_is_compared_with_one_process(pool: Pool, tmp_path: Path, name: str) -> None:
    path = tmp_path / "rows.csv"
    answers = pool.run(_run, RANKS, Case(name, 96, 16, "float32"), path, "")
    assert all(passed for _, passed in answers)
    assert _names(answers[0][0]) == [f"contrastile ({way})" for way in WAYS]
    rows = read_rows(path)
    assert [row["backend"] for row in rows] == WAYS
    assert [row["world"] for row in rows] == ["1", "4", "4", "4"]
    # the ranks' time together over one process's: of steps in a row, and of single ones
    for at, cost, ms in ((-8, "cost", "ms"), (-6, "single_cost", "single_ms")):
        milliseconds = [float(row[ms]) * int(row["world"]) for row in rows]
        # milliseconds have three digits, which are few on a fast machine
        rel = 0.02 + 0.001 / min(float(row[ms]) for row in rows)
        expected_costs = pytest.approx([each / milliseconds[0] for each in milliseconds], rel=rel, abs=0.002)
        assert [float(row[cost]) for row in rows] == expected_costs
        assert [float(line.split()[at]) for line in answers[0][0]] == expected_costs


@pytest.mark.parametrize("name", ["clip_labels", "clip_two_labels", "siglip_balanced", "supcon"])
def test_ranks_have_their_part_of_the_labels_of_the_whole_batch(pool: Pool, name: str) -> None:
    # 21 rows of each rank, which are no whole number of labels
    (lines, passed), *_ = pool.run(_run, RANKS, Case(name, 84, 16, "float32"), None, "")
    assert passed
    assert len(_names(lines)) == len(WAYS)


def test_copies_of_other_ranks_keys_are_left_out(pool: Pool) -> None:
    (lines, passed), *_ = pool.run(_run, RANKS, Case("own", 84, 16, "float32"), None, "")
    assert passed
    assert lines == ["  own is left out across ranks: its queries have copies of other ranks' keys"]


def test_two_levels_are_measured_between_nodes(pool: Pool) -> None:
    (lines, passed), *_ = pool.run(_run, RANKS, CASE, None, "nodes")
    assert passed
    ways = ("one process", "gather", "ring", "hierarchical", "replicate")
    assert _names(lines) == [f"contrastile (eager, {way})" for way in ways]


@pytest.mark.parametrize(("seconds", "steps"), [(0.01, 10), (0.2, 3), (0.999, 3), (1.0, 1), (6.0, 1)])
def test_short_steps_are_timed_in_a_row(seconds: float, steps: int) -> None:
    assert harness._repeats(seconds, across=True) == steps


def test_costs_are_unknown_where_one_process_does_not_fit() -> None:
    one, timing = Contestant("somebody", "a way", {}, world=4), Timing(2.0, 1e9, 2.0, 3.0)
    row = times_of(CASE, one, timing)
    assert (row["cost"], row["single_cost"], row["ms"], row["single_ms"]) == (None, None, 2.0, 3.0)
    row = times_of(CASE, one, timing, Timing(4.0, 1e9, 4.0, 8.0))
    assert (row["cost"], row["single_cost"]) == (2.0, 1.5)


def test_each_workspace_is_a_row_and_a_peer_that_fails_on_one_rank_is_left_out_on_all(
    pool: Pool, tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    case = Case("clip", 96, 16, "float32", (2 * 2**30, 2**20))
    for lines, passed in pool.run(_run, RANKS, case, path, "peer"):
        assert passed
        assert lines[0] == "  somebody (a way), clip, 96 x 16, float32: rank 2: RuntimeError: no room"
        assert len(_names(lines)) == 8
    assert [row["backend"] for row in read_rows(path)] == [*WAYS, *(f"{way}, workspace 1 MiB" for way in WAYS)]


def test_a_row_has_the_version_that_computed_it() -> None:
    one = Contestant("somebody", "a way", {}, package="numpy", world=4)
    row = columns_of(CASE, one, Distance(0, 0, 0), CPU) | times_of(CASE, one, Timing(2.0, 1e9))
    assert f"numpy {version('numpy')}" in row["versions"]
    # for each rank: 8 b² d operations, shared by four, in 2 ms; and a product's rate of 1e9
    assert row["effective_tflops"] == round(8 * 96**2 * 16 / 4 / 2e-3 / 1e12, 4)
    assert row["ratio"] == round(8 * 96**2 * 16 / 4 / 2e-3 / 1e9, 4)


def test_beside_is_the_peak_of_the_least_workspace_without_it_and_the_gradients() -> None:
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

    bench: Any = SimpleNamespace(machine=SimpleNamespace(peak=peak, device=torch.device("cuda")), _across=True)
    leaves, losses = [torch.ones(2**8, requires_grad=True)], {"clip": loss("wide")}
    for frugal, beside in ((loss("frugal"), 2**30 - 2**10 - bench_loss.LEAST_WORKSPACE), (None, 3 * 2**30 - 2**10)):
        one = Contestant("somebody", "a way", losses, world=4, frugal=frugal)
        memory = LossBench._memory(bench, one, bench_loss.step_of(CASE, one, leaves), leaves)
        assert memory == (3 * 2**30, beside)


def test_a_wrong_result_has_no_speed_on_any_rank(pool: Pool) -> None:
    for lines, passed in pool.run(_run, RANKS, CASE, None, "gate"):
        assert not passed
        assert len(lines) == 4
        assert all("no speed for a wrong result" in line for line in lines)


def test_rows_that_cannot_be_shared_are_left_out(pool: Pool) -> None:
    (lines, passed), *_ = pool.run(_run, RANKS, Case("clip", 98, 16, "float32"), None, "")
    assert passed
    assert lines == ["  98 rows are left out: they cannot be shared evenly by 4 ranks"]


def test_peers_get_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def make(**how: Any) -> Any:
        seen.append(how)
        return lambda *tensors: tensors[0].sum()

    monkeypatch.setitem(sys.modules, "open_clip", SimpleNamespace(ClipLoss=make))
    monkeypatch.setitem(sys.modules, "open_clip.loss", SimpleNamespace(SigLipLoss=make))
    monkeypatch.setitem(sys.modules, "siglip_kernel", SimpleNamespace(DistributedSigLIPLoss=make))
    q = torch.eye(4, dtype=torch.bfloat16)
    inf_cl, *siglip_kernel, open_clip = rank_peers(1, 4)
    open_clip.losses["clip"](q, q, torch.ones(()))
    open_clip.losses["siglip"](q, q, torch.ones(()), torch.zeros(()))
    where = {"rank": 1, "world_size": 4}
    assert seen == [{"local_loss": True, "gather_with_grad": True, **where}, where]
    del seen[:]
    for peer in siglip_kernel:
        peer.losses["siglip"](q, q, torch.ones(()), torch.zeros(()))
    assert seen == [{"strategy": way, **where} for way in ("gather", "ring")]
    stand_in = SimpleNamespace(cal_inf_loss=lambda q, k, scale: (q.sum() + 2 * k.sum()) * scale)
    monkeypatch.setitem(sys.modules, "inf_cl", stand_in)
    assert inf_cl.losses["clip"](torch.ones(2, 2), torch.zeros(2, 2), torch.tensor(3.0)) == 18.0


def _profiled(rank: int, group: Any) -> list[str]:
    lines: list[str] = []
    profile(LossBench(_machine(rank), False, Report(lines.append, world=World(rank, RANKS))), CASE)
    return lines


def _host(rank: int, group: Any, path: Path) -> bool:
    patch = pytest.MonkeyPatch()
    for name, steps in (("WARMUP_STEPS", 1), ("RANK_ROUNDS", 1), ("ROW_STEPS", 2), ("ROW_SECONDS", 0.0)):
        patch.setattr(harness, name, steps)
    try:
        with results_file(path if rank == 0 else None, COLUMNS["host"]) as write:
            report = Report(lambda _: None, write, World(rank, RANKS))
            LossBench(_machine(rank), False, report).host([CASE], 2**30)
    finally:
        patch.undo()
    return report.passed


def test_features_in_host_memory_are_measured_in_a_ring(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    assert all(pool.run(_host, RANKS, path))
    rows = read_rows(path)
    assert [row["backend"] for row in rows] == [f"eager, {place}, ring of {RANKS}" for place in ("resident", "host")]
    assert rows[0]["ratio"] == "1.0"
    assert all(float(row["ms"]) > 0 < int(row["peak_bytes"]) for row in rows)


@pytest.mark.unpoisoned
def test_the_profile_has_the_host_operations_of_every_exchange(pool: Pool) -> None:
    lines = pool.run(_profiled, RANKS)[0]
    assert lines[::2] == [f"contrastile ({way}), {CASE}" for way in WAYS]
    assert all("host, ms until the call returns: " in line and "(1)" in line for line in lines[1::2])


def test_the_devices_time_is_divided_by_kinds_of_kernels() -> None:
    kernels = [
        ("ncclDevKernel_SendRecv", 1000.0, 4000.0),
        ("totals", 2000.0, 3000.0),
        ("nvjet_tst_128x256", 5000.0, 7000.0),
        ("vectorized_elementwise_kernel", 7000.0, 7500.0),
    ]
    assert device_line(kernels, 500.0) == (
        "device, ms (kernels): communication 3.00 (1), products 2.00 (1), small 0.50 (1), tiles 1.00 (1); "
        "alone 2.00, idle 1.00 in 1 gaps, before the first 0.50"
    )
