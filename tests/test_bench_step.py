"""`contrastile bench step` on the tiny model: right gradients only, every way a row, and what does not fit a result."""

import csv
import math

import pytest
import torch

from contrastile.bench import step as bench_step
from contrastile.bench import step_ranks
from contrastile.bench.caches import PEERS
from contrastile.bench.figure import draw, series
from contrastile.bench.measure import Ledger
from contrastile.bench.step import GATE_TOLERANCE, WAYS, StepBench, StepRow, gate, standard, usual
from contrastile.bench.step_ranks import RankRow
from contrastile.bench.towers import Pairs, Towers
from contrastile.bench.ways import Way, by_hand, cached, plain
from contrastile.cli.main import main

CPU = torch.device("cpu")
OURS = [name for name, way in WAYS.items() if way.impl in ("plain", "by hand", "contrastile")]


def measured(monkeypatch, ways, batches=(24,), **words):
    """Lines said, and the bench, with these ways."""
    monkeypatch.setattr(bench_step, "WAYS", ways)
    lines = []
    bench = StepBench(CPU, torch.float32, lines.append, seconds=0.0, **words)
    bench.measure("tiny", {batch: list(ways) for batch in batches})
    return lines, bench


@pytest.mark.parametrize("name", [name for name in OURS if WAYS[name].same])
def test_our_ways_have_the_plain_gradients_with_dropout(name):
    assert max(gate("tiny", WAYS[name], CPU)) < GATE_TOLERANCE


@pytest.mark.parametrize("name", [*PEERS, *(f"pool-{name}" for name in PEERS)])
def test_other_caches_are_driven_to_the_plain_gradients_of_the_towers(name):
    if reason := WAYS[name].missing():
        pytest.skip(f"{name} {reason}")
    assert gate("tiny", WAYS[name], CPU)[0] < GATE_TOLERANCE


def test_the_gate_sees_accumulation_and_says_that_it_is_another_gradient():
    assert gate("tiny", WAYS["accumulation"], CPU)[0] > 0.1


# which `encode` notices itself
@pytest.mark.filterwarnings("ignore:`encoder` must give the same features in both passes")
def test_the_gate_sees_random_numbers_that_are_not_restored(monkeypatch):
    monkeypatch.setattr("contrastile.randomness.RandomState.restore", lambda self: None)
    monkeypatch.setattr("contrastile.bench.ways.set_random_state", lambda device, states: None)
    for name in ("by-hand", "retain-0"):
        assert gate("tiny", WAYS[name], CPU)[0] > 1e-2


def test_the_gate_sees_a_scale_without_gradient():
    def constant(task):
        loss = plain(task)
        task.towers.logit_scale.grad = None
        return loss

    towers, scale = gate("tiny", Way("contrastile", "", constant, cut=False), CPU)
    assert towers < GATE_TOLERANCE
    assert scale == 1


def test_a_wrong_way_has_no_speed(monkeypatch):
    def twice(task):
        loss = cached(task, 0)
        task.towers.text.model.text_projection.weight.grad.mul_(2)
        return loss

    lines, bench = measured(monkeypatch, {"retain-0": Way("contrastile", "retain 0", twice)})
    assert not bench.right
    assert lines[0].endswith("no speed for a wrong result")
    assert not bench.rows


def test_what_does_not_fit_is_a_row_and_stays_so(monkeypatch, tmp_path):
    calls = []

    def greedy(task):
        calls.append(task.batch)
        if task.batch > 8:
            raise torch.OutOfMemoryError("no room")
        return plain(task)

    with Ledger(tmp_path / "rows.csv", StepRow) as ledger:
        ways = {
            "plain": Way("plain", "whole batch", greedy, cut=False),
            "by-hand": Way("by hand", "two passes", by_hand),
        }
        lines, bench = measured(monkeypatch, ways, batches=(8, 24, 32), ledger=ledger)
    assert bench.right
    assert sum(line.endswith("does not fit") for line in lines) == 2
    assert max(calls) == 24
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["impl"], row["batch"], bool(row["ms"])) for row in rows] == [
        ("plain", "8", True),
        ("by hand", "8", True),
        ("plain", "24", False),
        ("by hand", "24", True),
        ("plain", "32", False),
        ("by hand", "32", True),
    ]
    # the plain step's time is that of the largest batch that it could do
    by_pair = [float(row["us_per_pair"]) / float(rows[0]["us_per_pair"]) for row in rows[1::2]]
    assert [float(row["ratio_to_plain"]) for row in rows[1::2]] == pytest.approx(by_pair, rel=1e-2)


def test_what_fails_or_takes_too_long_is_named_and_costs_its_own_row_only(monkeypatch):
    def fail(task):
        raise RuntimeError("the first line\nand a long trace")

    absent = Way("nobody", "at all", fail, missing=lambda: "is not installed")
    ways = {"somebody": Way("somebody", "a way", fail), "nobody": absent, "plain": WAYS["plain"]}
    lines, bench = measured(monkeypatch, ways, batches=(8, 24), longest=0.0)
    assert bench.right
    assert "  somebody, a way: RuntimeError: the first line" in lines
    assert "  nobody, at all: is not installed" in lines
    assert [(row.impl, row.batch) for row in bench.rows] == [("plain", 8)]
    assert lines[-1].startswith("  plain, whole batch at 24: left out, it would take about ")


def test_a_bench_ends_in_its_time(monkeypatch):
    """What is not known to fit into the rest of it is left out: an unmeasured way is as slow as the slowest."""
    clock = iter(range(10_000))
    monkeypatch.setattr(bench_step.time, "perf_counter", lambda: float(next(clock)))
    ways = {name: WAYS[name] for name in ("plain", "retain-0")}
    monkeypatch.setattr(bench_step, "WAYS", ways)
    lines = []
    # a step takes a tick of this clock: 8 pairs a second
    bench = StepBench(CPU, torch.float32, lines.append, seconds=0.0, within=40.0)
    bench.measure("tiny", {8: ["plain"], 16: ["plain"], 2**20: ["plain", "retain-0"]})
    assert [(row.way, row.batch) for row in bench.rows] == [("whole batch", 8), ("whole batch", 16)]
    assert [line for line in lines if "left out" in line] == [
        "  plain, whole batch at 1,048,576: left out, it would take about 65,536 s",
        "  contrastile, retain 0 at 1,048,576: left out, it would take about 65,536 s",
    ]


def test_a_way_may_have_sizes_of_its_own(tmp_path):
    rows = tmp_path / "rows.csv"
    words = [
        "--models",
        "tiny",
        "--sizes",
        "8",
        "24",
        "--ways",
        "plain@8",
        "retain-0",
        "pool-0@24,32",
        "--seconds",
        "0",
    ]
    assert main(["bench", "step", "--device", "cpu", *words, "--csv", str(rows)]) == 0
    with rows.open() as file:
        found = [(row["way"], int(row["batch"])) for row in csv.DictReader(file)]
    assert found == [
        ("whole batch", 8),
        ("retain 0", 8),
        ("retain 0", 24),
        ("retain 0, from a pool", 24),
        ("retain 0, from a pool", 32),
    ]


def test_a_failure_of_ours_is_not_passed_over(monkeypatch):
    def fail(task):
        raise RuntimeError("no")

    assert not measured(monkeypatch, {"retain-0": Way("contrastile", "retain 0", fail)})[1].right


def test_inputs_in_three_places_are_the_same_pairs():
    torch.manual_seed(0)
    towers = Towers("tiny", CPU).eval()
    pairs = Pairs(towers.shape, CPU, most=5)
    for side in (0, 1):
        features = [
            (towers_leaf := pairs.sides(towers, 12, inputs)[side])[0](towers_leaf[1])
            for inputs in ("device", "host", "pool")
        ]
        assert all(torch.equal(features[0], other) for other in features[1:])
        assert torch.equal(features[0][:5], features[0][5:10])
        assert not torch.equal(features[0][0], features[0][1])


def test_activation_checkpointing_is_taken_back():
    towers = Towers("tiny", CPU)
    layers = [layer for layer in towers.modules() if type(layer).__name__ == "CLIPEncoderLayer"]
    assert len(layers) == 4
    for wanted in (True, True, False):
        towers.checkpointing(wanted)
        assert all(("forward" in vars(layer)) is wanted for layer in layers)


def test_host_inputs_that_do_not_fit_are_out_of_memory(monkeypatch):
    monkeypatch.setattr("contrastile.bench.towers.free_memory", lambda device: (1000, 9_000_000))
    towers = Towers("tiny", CPU)
    with pytest.raises(torch.OutOfMemoryError, match=r"of the host, and 1,000 are free"):
        Pairs(towers.shape, CPU).sides(towers, 12, "host")


def test_what_is_measured_unasked():
    assert standard(CPU, quick=False)[0] == ["tiny"]
    assert standard(torch.device("cuda"), quick=False) == (
        ["vit-b-16", "vit-l-14"],
        [2**10, 2**13, 2**16, 2**18, 2**20],
    )
    assert not any(name.startswith("pool") for name in usual(2**18))
    assert {"pool-0", "pool-auto", "pool-by-hand", "pool-GradCache"} < set(usual(2**20))


def test_a_table_a_file_and_a_figure(tmp_path, capsys):
    rows, picture = tmp_path / "made" / "rows.csv", tmp_path / "made" / "too" / "figure.svg"
    words = ["--models", "tiny", "--sizes", "8", "24", "--ways", "plain", "retain-0", "--seconds", "0.01"]
    assert main(["bench", "step", "--device", "cpu", *words, "--csv", str(rows), "--figure", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "times plain" in said
    assert said.endswith(f"rows: {rows}\nfigure: {picture}\n")
    sub_batch, found = series(rows, "tiny")
    assert sub_batch == 16
    assert {name: [batch for batch, *_ in points] for name, points in found.items()} == {
        "plain, whole batch": [8, 24],
        "contrastile, retain 0": [8, 24],
    }
    assert all(
        math.isfinite(number) and number > 0 for points in found.values() for *point, _ in points for number in point
    )
    text = picture.read_text()
    assert text.startswith("<?xml")
    draw(rows, picture)
    assert picture.read_text() == text


def test_a_figure_has_one_sub_batch_and_the_latest_rows_nearest_to_the_device(tmp_path):
    header = "impl,way,model,batch,sub_batch,inputs,ms,us_per_pair,peak_bytes\n"
    rows = [
        ("plain", "whole batch", 8, "", "device", 1.0),
        ("contrastile", "retain 0", 8, 4, "device", 2.0),
        ("contrastile", "retain 0", 8, 2, "device", 3.0),
        ("contrastile", "retain 0", 8, 2, "device", 3.5),
        ("contrastile", '"retain 0, streamed"', 8, 2, "host", 3.7),
        ("contrastile", "retain 0", 16, 2, "device", ""),
        ("contrastile", '"retain 0, from a pool"', 16, 2, "pool", 4.0),
        ("contrastile", '"retain 0, streamed"', 16, 2, "host", 5.0),
        ("contrastile", '"retain 0, from a pool"', 32, 2, "pool", 6.0),
        ("contrastile", "retain all", 32, 2, "device", ""),
    ]
    lines = [
        f"{impl},{way},tiny,{batch},{cut},{place},{ms},{ms},{2**30}\n" for impl, way, batch, cut, place, ms in rows
    ]
    (tmp_path / "rows.csv").write_text(header + "".join(lines))
    assert series(tmp_path / "rows.csv", "tiny") == (
        2,
        {
            "plain, whole batch": [(8, 1.0, 1.0, "device")],
            "contrastile, retain 0": [(8, 3.5, 1.0, "device"), (16, 5.0, 1.0, "host"), (32, 6.0, 1.0, "pool")],
        },
    )


def test_a_figure_needs_rows(tmp_path, capsys):
    with Ledger(tmp_path / "rows.csv", StepRow):
        pass
    with pytest.raises(ValueError, match="`csv` must hold rows of steps; got none in"):
        draw(tmp_path / "rows.csv", tmp_path / "figure.svg")
    assert main(["bench", "step", "--figure", "x.svg"]) == 2
    assert capsys.readouterr().err == "`figure` must come with csv, whose rows it draws; got none. Add --csv FILE.\n"


def test_a_figure_that_nothing_can_draw_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "step", "--csv", str(tmp_path / "x.csv"), "--figure", str(tmp_path / "x.svg")]) == 2
    assert capsys.readouterr().err == '`matplotlib` is not installed; run: pip install "contrastile[train]"\n'
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_hold_under_torchrun_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", "step", "--models", "tiny", "--optimizer"]) == 2
    sentence = "`optimizer` must be left out under torchrun; got True. Run one process with it.\n"
    assert capsys.readouterr().err == sentence
    assert main(["bench", "step", "--models", "tiny", "--device", "cpu", "--sizes", "8", "33"]) == 2
    sentence = "`sizes` must be multiples of the 2 ranks; got 33. Each rank takes as many pairs.\n"
    assert capsys.readouterr().err == sentence
    assert main(["bench", "step", "--models", "tiny", "--ways", "plain"]) == 2
    assert capsys.readouterr().err.startswith("`ways` must be one of replicate-dense, gather-dense, ring-dense, ring")


@pytest.mark.parametrize(
    ("option", "word", "sentence"),
    [
        ("--sub-batch", "0", "`sub_batch` must be a whole number of at least 1; got 0. Leave it out for the model's."),
        ("--models", "nobody", "`models` must be one of"),
        ("--ways", "nobody", "`ways` must be"),
        ("--ways", "nobody@8", "`ways` must be"),
        ("--ways", "plain@many", "`ways` must"),
        ("--ways", "plain@", "`ways` must be whole numbers"),
    ],
)
def test_unknown_words_are_refused(option, word, sentence, capsys):
    assert main(["bench", "step", "--device", "cpu", option, word]) == 2
    assert capsys.readouterr().err.startswith(sentence)


def test_ranks_compute_where_they_are_told_to(monkeypatch):
    """On a CPU also where there is a GPU."""
    backends = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(step_ranks.dist, "init_process_group", backends.append)
    assert step_ranks.join("cpu") == CPU
    assert backends == ["gloo"]


def test_a_peer_that_is_named_is_not_left_out(capsys):
    words = ["--models", "tiny", "--sizes", "8", "--ways", "plain", "GradCache@8", "--no-peers"]
    assert main(["bench", "step", "--device", "cpu", *words]) == 2
    sentence = "`peers` must be measured where one is named; got --no-peers and GradCache. Leave out the one.\n"
    assert capsys.readouterr().err == sentence


def test_sizes_that_nobody_named_are_those_that_ranks_divide(monkeypatch):
    plans = []
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(step_ranks, "join", lambda kind: torch.device(kind))
    monkeypatch.setattr(step_ranks, "measure", lambda model, plan, *_: not plans.append(plan))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    assert main(["bench", "step", "--device", "cpu"]) == 0
    assert [list(plan) for plan in plans] == [[63, 255]]


def _on_a_rank(rank, group, path):
    ledger = Ledger(path, RankRow) if rank == 0 else None
    plan = {32: list(step_ranks.LOSSES), 64: ["ring-tiles"]}
    return step_ranks.measure("tiny", plan, CPU, torch.float32, lambda line: None, ledger, sub_batch=5)


def test_the_four_losses_across_ranks(pool, tmp_path):
    assert pool.run(_on_a_rank, 4, tmp_path / "rows.csv") == [True] * 4
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    ways = ["replicate, dense", "gather, dense", "ring, dense", "ring, eager"]
    assert [(row["way"], row["batch"]) for row in rows] == [*((way, "32") for way in ways), ("ring, eager", "64")]
    assert {(row["world"], row["batch"], row["data_bytes"]) for row in rows} == {
        ("4", str(batch), str(batch // 4 * (3 * 32 * 32 + 96))) for batch in (32, 64)
    }
    # times and memory beside each other, as for one device
    draw(tmp_path / "rows.csv", tmp_path / "figure.svg")
    assert series(tmp_path / "rows.csv", "tiny")[1].keys() == {f"contrastile, {row['way']}" for row in rows}
    assert "ring, eager" in (tmp_path / "figure.svg").read_text()
