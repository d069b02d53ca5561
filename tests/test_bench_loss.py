"""`LossBench` on one process: right results only, each row for itself, and the cases that a device is judged by."""

from dataclasses import replace

import pytest
import torch

from contrastile import ClipLoss
from contrastile.bench import gate as bench_gate
from contrastile.bench import loss as bench_loss
from contrastile.bench.gate import Gate, Sample, problem
from contrastile.bench.harness import COLUMNS, Machine, Report, Timing, read_rows, results_file
from contrastile.bench.loss import LossBench, columns_of
from contrastile.bench.peers import DENSE, Case, Contestant
from contrastile.bench.subjects import SUBJECTS, guides
from contrastile.losses.reference import dense_clip

CPU = torch.device("cpu")
CASE = Case("clip", 96, 16, "float32")


def machine():
    x = torch.randn(64, 64)
    return Machine(CPU, 0.01, lambda: x @ x, 2 * 64**3)


def run(monkeypatch, *entered, cases=(CASE,), write=lambda row: None):
    """Measure these contestants; return the lines and if all of contrastile passed."""
    if entered:
        monkeypatch.setattr(bench_loss, "contestants", lambda case, device, *, peers: list(entered))
    lines = []
    report = Report(lines.append, write)
    LossBench(machine(), peers=False, report=report).measure(cases)
    assert "ratio: of torch.mm's rate" in lines[0]
    return [line for line in lines[2:] if not line.startswith("  speed/dense")], report.passed


def ours(loss):
    return Contestant("contrastile", "eager", {"clip": loss})


def other(loss, name="somebody"):
    return Contestant(name, "a way", {"clip": loss})


def fail(*_):
    raise RuntimeError("the first line\nand a long trace")


def full(*_):
    raise torch.OutOfMemoryError("no room")


@pytest.mark.parametrize("name", SUBJECTS)
def test_contrastile_passes_the_gate(name):
    gate = Gate(replace(CASE, loss=name, b=300), CPU)
    subject = SUBJECTS[name]
    assert gate.red(gate.distance(subject.module())) is None


@pytest.mark.parametrize(
    ("wrong_loss", "what"),
    [
        (lambda q, k, s: dense_clip(q, k, s) * (1 + 1e-5), "the loss is 1.0e-05 from float64, and 1.0e-06 is allowed"),
        (lambda q, k, s: dense_clip(q, k, s) * float("nan"), "the loss is nan from float64"),
        (lambda q, k, s: dense_clip(q, k, s) + 1e-2 * (k - k.detach()).sum(), "a gradient is"),
        (lambda q, k, s: dense_clip(q, k, s) + (s - s.detach()), "the scale's or the bias's gradient is"),
    ],
)
def test_a_wrong_result_is_red(wrong_loss, what):
    gate = Gate(CASE, CPU)
    assert gate.red(gate.distance(wrong_loss)).startswith(what)


def test_a_loss_of_zero_is_no_distance_from_itself():
    gate = Gate(replace(CASE, b=1), CPU)
    assert gate.red(gate.distance(ClipLoss())) is None


def test_a_gradient_in_16_bits_may_be_as_far_as_its_cast_and_no_further():
    gate = Gate(replace(CASE, dtype="bfloat16"), CPU)
    assert 1e-3 < gate.cast < 3e-3
    assert gate.red(gate.distance(ClipLoss())) is None
    assert "a gradient is" in gate.red(replace(gate.distance(ClipLoss()), gradient=gate.cast + 2.1e-3))


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_sample_has_the_truth_of_a_few_rows_and_columns(name):
    leaves = problem(replace(CASE, loss=name, b=300, dtype="float64"), CPU)
    sample = Sample(name, leaves)
    assert sample.rows[[0, -1]].tolist() == [0, 299]
    assert len(sample.rows) == 32
    distance, cast = sample.distance(sample.step(SUBJECTS[name].module()))
    assert max(distance.loss, distance.gradient, distance.scalar) <= 1e-12
    assert cast == 0
    results = sample.step(SUBJECTS[name].module())
    results[2][results[2].norm(dim=1).argmax()] *= 1.01
    assert sample.distance(results)[0].gradient > 1e-6


def wrong_when_large(q, k, scale, weights=None):
    loss = ClipLoss()(q, k, scale, weights=weights)
    return loss if len(q) <= 60 else loss + 1e-3 * (q[7] - q[7].detach()).sum()


@pytest.mark.parametrize(("loss", "right"), [(ClipLoss(), True), (wrong_when_large, False)])
@pytest.mark.parametrize("once", [False, True])
def test_a_case_is_checked_at_its_own_size_too(loss, right, once, monkeypatch, tmp_path):
    monkeypatch.setitem(bench_gate.GATE_ROWS, "cpu", 60)
    monkeypatch.setattr(bench_loss, "contestants", lambda case, device, *, peers: [ours(loss), *DENSE])
    monkeypatch.setattr(Machine, "peak", lambda self, step: (step(), 4096)[1])
    lines = []
    with results_file(tmp_path / "rows.csv", COLUMNS["losses"]) as write:
        bench = LossBench(machine(), peers=False, report=Report(lines.append, write))
        (bench.once if once else bench.measure)([CASE])
    assert "60 rows, and on 32 of all" in lines[0]
    assert bench.report.passed is right
    assert any("a gradient is" in line and "96 x 16" in line for line in lines) is not right
    assert ("contrastile" in {row["impl"] for row in read_rows(tmp_path / "rows.csv")}) is right


def test_the_multiples_name_their_dense_formula(monkeypatch):
    lines = []
    monkeypatch.setattr(bench_loss, "contestants", lambda case, device, *, peers: list(DENSE[1:2]))
    LossBench(machine(), peers=False, report=Report(lines.append)).measure([CASE, replace(CASE, b=97)])
    assert [line for line in lines if "over" in line] == ["  speed/dense: over dense (one dtype)"]


def test_a_wrong_result_has_no_speed(monkeypatch):
    lines, passed = run(monkeypatch, ours(lambda q, k, s: 2 * dense_clip(q, k, s)))
    assert not passed
    assert len(lines) == 1
    assert lines[0].endswith("no speed for a wrong result")


def test_a_peers_distance_is_shown_and_not_judged(monkeypatch):
    lines, passed = run(monkeypatch, other(lambda q, k, s: 2 * dense_clip(q, k, s)))
    assert passed
    assert lines[0].split()[-2:] == ["1e+00", "1e+00"]


def test_a_failure_is_named_and_costs_its_own_row_only(monkeypatch, tmp_path):
    with results_file(tmp_path / "rows.csv", COLUMNS["losses"]) as write:
        entered = (other(fail), ours(ClipLoss()), other(full, "greedy"), DENSE[1])
        lines, passed = run(monkeypatch, *entered, write=write)
    assert passed
    assert "  somebody (a way), clip, 96 x 16, float32: RuntimeError: the first line" in lines
    assert "  greedy (a way), clip, 96 x 16, float32: OutOfMemoryError: no room" in lines
    assert [row["impl"] for row in read_rows(tmp_path / "rows.csv")] == ["contrastile", "dense"]


def test_failing_while_timed_keeps_the_other_cases(monkeypatch):
    calls = []

    def late(*leaves):
        calls.append(leaves)
        return fail() if len(calls) == 2 else dense_clip(*leaves)

    lines, passed = run(monkeypatch, ours(late), cases=(CASE, replace(CASE, b=97)))
    assert not passed
    assert [line.split()[0] for line in lines] == ["contrastile", "clip"]


def test_a_failure_of_contrastile_is_a_failure_of_the_bench(monkeypatch):
    assert not run(monkeypatch, ours(fail))[1]


def test_a_contestant_that_declines_is_named_once(monkeypatch):
    absent = replace(other(fail), module="surely_not_installed")
    lines, _ = run(monkeypatch, absent, cases=(CASE, replace(CASE, b=97)))
    assert lines == ["  somebody (a way): is not installed"]


def test_speed_and_the_ratio_come_from_the_times(monkeypatch, tmp_path):
    timing = {"dense (one dtype)": 6.0, "contrastile (eager)": 2.0}
    monkeypatch.setattr(Machine, "race", lambda self, steps: {name: Timing(timing[name], 1e9) for name in steps})
    monkeypatch.setattr(Machine, "peak", lambda self, step: 4096)
    with results_file(tmp_path / "rows.csv", COLUMNS["losses"]) as write:
        lines, _ = run(monkeypatch, write=write)
    assert [line.split()[-4] for line in lines] == ["1.00", "3.00"]
    row = read_rows(tmp_path / "rows.csv")[1]
    rate = 8 * 96 * 96 * 16 / 2e-3
    assert float(row["effective_tflops"]) == pytest.approx(rate / 1e12, abs=1e-4)
    assert float(row["ratio"]) == pytest.approx(rate / 1e9, abs=1e-3)
    wanted = {"impl": "contrastile", "loss": "clip", "backend": "eager", "b": "96", "peak_bytes": "4096"}
    assert row.items() >= wanted.items()


def test_the_precision_of_float32_products_is_given_back():
    before = torch.get_float32_matmul_precision()
    with bench_loss.float32_products("high"):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


def test_features_are_of_unit_length():
    q, k, scale = problem(replace(CASE, b=4000, d=64), CPU)
    assert torch.allclose(q.norm(dim=1), torch.ones(4000), atol=1e-5)
    assert torch.allclose(k.norm(dim=1), torch.ones(4000), atol=1e-5)
    assert scale.item() == 100


def test_rows_name_settings_other_than_the_defaults():
    case = Case("clip", 96, 16, "float32", (None, 2 * 2**30, 192 * 2**20), "high")
    entered = [one for one in bench_loss.contestants(case, torch.device("cuda"), peers=False) if one.name != "dense"]
    assert [one.backend for one in entered] == ["triton", "triton", "triton, workspace 192 MiB"]
    row = columns_of(case, entered[2], bench_gate.Distance(0, 0, 0), CPU)
    assert row["backend"] == "triton, workspace 192 MiB, precision high"


@pytest.mark.unpoisoned
def test_peaks_are_those_of_the_tensors():
    case = Case("clip", 3000, 16, "float32")
    leaves = problem(case, CPU)
    dense, ours = (machine().peak(lambda loss=loss: bench_gate.step(loss, leaves)) for loss in (dense_clip, ClipLoss()))
    assert ours < 4 * case.b**2 < dense / 2


def test_features_in_host_memory_are_measured_beside_resident_ones(tmp_path):
    lines, path, losses = [], tmp_path / "rows.csv", ("clip", "siglip")
    with results_file(path, COLUMNS["host"]) as write:
        bench = LossBench(machine(), peers=False, report=Report(lines.append, write))
        bench.host([replace(CASE, loss=loss) for loss in losses], 2**30)
    assert bench.report.passed
    rows, ways = read_rows(path), [(loss, f"eager, {place}") for loss in losses for place in ("resident", "host")]
    assert [(row["loss"], row["backend"]) for row in rows] == ways
    assert {row["limit_bytes"] for row in rows} == {str(2**30)}
    first, *_, last = (SUBJECTS[row["loss"]].operations / float(row["ms"]) for row in rows)
    assert float(rows[0]["ratio"]) == 1
    assert float(rows[-1]["ratio"]) == pytest.approx(last / first, rel=0.01)
    assert len(lines) == 2 + len(rows)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_problem_is_the_same_wherever_its_features_are(on_host, monkeypatch):
    whole = problem(CASE, CPU)
    monkeypatch.setattr(bench_gate, "DRAWN", 96)
    assert all(torch.equal(a, b) for a, b in zip(whole, problem(CASE, CPU, on_host=on_host), strict=True))


@pytest.mark.parametrize("d", [512, 768, 1024])
def test_the_guide_of_a_case_is_the_same_in_every_type(d):
    leaves = problem(Case("gist", 64, d, "bfloat16"), CPU)[:2]
    found, true = (guides(*sides) for sides in (leaves, bench_gate.double(leaves)))
    assert all(torch.equal(found[name].double(), true[name]) for name in true)
    assert 0.5 < float(true["guide_query"].abs().mean()) < 0.8
