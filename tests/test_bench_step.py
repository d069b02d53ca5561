"""`contrastile bench step` on the tiny model: right gradients only, every way a row, and what does not fit a result."""

import math
import re
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from unittest.mock import patch

import pytest
import torch

# once, before the ranks are forked
import torch._dynamo
import transformers.models.clip.modeling_clip  # noqa: F401
from torch.distributed.fsdp import FSDPModule

from contrastile import ClipLoss, InfoNCELoss
from contrastile.bench import harness
from contrastile.bench import step as bench_step
from contrastile.bench.figure import draw, series
from contrastile.bench.harness import COLUMNS, Machine, Report, World, joined, not_installed, read_rows, results_file
from contrastile.bench.step import GATE_TOLERANCE, StepBench, gate, standard, usual
from contrastile.bench.towers import Pairs, Towers
from contrastile.bench.ways import PEERS, STANDARD, WAYS, Task, Way, cached, plain, rank_ways
from contrastile.cli.main import main

CPU = torch.device("cpu")
OURS = [name for name, way in WAYS.items() if way.judged]
# beside the four losses that are measured by default
FURTHER = ["gather-tiles", "ddp", "fsdp", "inf-cl", "open_clip", "pool-ddp"]
# one timed step of ranks: how many there are is test_bench_harness.py's and test_bench_ranks.py's
ONCE = {"RANK_ROUNDS": 1, "ROW_STEPS": 1, "ROW_SECONDS": 0.0, "WARMUP_STEPS": 1}
# of a results file, as far as a figure reads it
HEADER = "impl,way,model,batch,sub_batch,inputs,ms,us_per_pair,peak_bytes\n"


def measured(ways, batches=(24,), write=lambda row: None, **settings):
    """Measure these ways; return the lines and the bench; `write` gets the rows."""
    lines = []
    bench = StepBench(Machine(CPU), torch.float32, Report(lines.append, write), ways, **settings)
    bench.measure("tiny", {batch: list(ways) for batch in batches})
    return lines, bench


@pytest.mark.parametrize("name", [name for name in OURS if WAYS[name].same])
def test_our_ways_have_the_plain_gradients_with_dropout(name):
    assert max(gate("tiny", WAYS[name], CPU)) < GATE_TOLERANCE


@pytest.mark.parametrize("name", [*PEERS, *(f"pool-{name}" for name in PEERS)])
def test_the_peers_caches_have_the_plain_gradients_of_the_towers(name):
    if reason := not_installed(WAYS[name].module):
        pytest.skip(f"{name} {reason}")
    assert gate("tiny", WAYS[name], CPU)[0] < GATE_TOLERANCE


def test_the_gate_sees_the_other_gradient_of_accumulation():
    assert gate("tiny", WAYS["accumulation"], CPU)[0] > 0.1


# which `encode` notices itself
@pytest.mark.filterwarnings("ignore:`encoder` must give the same features in both passes")
def test_the_gate_sees_random_numbers_that_are_not_restored(monkeypatch):
    monkeypatch.setattr("contrastile.gradcache.rng.RandomState.restore", lambda self: None)
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


def test_a_wrong_way_has_no_speed():
    def twice(task):
        loss = cached(task, 0)
        task.towers.text.model.text_projection.weight.grad.mul_(2)
        return loss

    rows = []
    lines, bench = measured({"retain-0": Way("contrastile", "retain 0", twice)}, write=rows.append)
    assert not bench.report.passed
    assert lines[0].endswith("no speed for a wrong result")
    assert not rows


def test_a_step_that_does_not_fit_is_a_row_and_is_not_tried_again(tmp_path):
    calls = []

    def greedy(task):
        calls.append(task.batch)
        if task.batch > 8:
            raise torch.OutOfMemoryError("no room")
        return plain(task)

    with results_file(tmp_path / "rows.csv", COLUMNS["steps"]) as write:
        ways = {"plain": Way("plain", "whole batch", greedy, cut=False), "by-hand": WAYS["by-hand"]}
        lines, bench = measured(ways, batches=(8, 24, 32), write=write)
    assert bench.report.passed
    assert sum(line.endswith("does not fit") for line in lines) == 2
    assert max(calls) == 24
    rows = read_rows(tmp_path / "rows.csv")
    fits = [(impl, batch, (impl, batch) not in (("plain", "24"), ("plain", "32")))
            for batch in ("8", "24", "32") for impl in ("plain", "by hand")]  # fmt: skip
    assert [(row["impl"], row["batch"], bool(row["ms"])) for row in rows] == fits
    # the plain step's time is that of the largest batch that it could do
    by_pair = [float(row["us_per_pair"]) / float(rows[0]["us_per_pair"]) for row in rows[1::2]]
    assert [float(row["ratio_to_plain"]) for row in rows[1::2]] == pytest.approx(by_pair, rel=1e-2)


def test_failures_and_long_steps_are_named_and_cost_their_own_row_only():
    def fail(task):
        raise RuntimeError("the first line\nand a long trace")

    absent = Way("nobody", "at all", fail, module="surely_not_installed")
    ways = {"somebody": Way("somebody", "a way", fail), "nobody": absent, "plain": WAYS["plain"]}
    rows = []
    lines, bench = measured(ways, batches=(8, 24), write=rows.append, longest=0.0)
    assert bench.report.passed
    assert "  somebody, a way: RuntimeError: the first line" in lines
    assert "  nobody, at all: is not installed" in lines
    assert [(row["impl"], row["batch"]) for row in rows] == [("plain", 8)]
    assert lines[-1].startswith("  plain, whole batch at 24: left out, it would take about ")
    assert not lines[-1].endswith(" 0 s")


def test_a_bench_ends_in_its_time(monkeypatch):
    """Ways that may not fit into the rest of it are left out: an unmeasured one counts as the slowest."""
    clock = iter(range(10_000))
    monkeypatch.setattr(bench_step.time, "perf_counter", lambda: float(next(clock)))
    ways = {name: WAYS[name] for name in ("plain", "retain-0")}
    lines, rows = [], []
    # a step takes a tick of this clock: 8 pairs a second
    bench = StepBench(Machine(CPU), torch.float32, Report(lines.append, rows.append), ways, within=40.0)
    bench.measure("tiny", {8: ["plain"], 16: ["plain"], 2**20: ["plain", "retain-0"]})
    assert [(row["way"], row["batch"]) for row in rows] == [("whole batch", 8), ("whole batch", 16)]
    assert [line for line in lines if "left out" in line] == [
        "  plain, whole batch at 1,048,576: left out, it would take about 65,536 s",
        "  contrastile, retain 0 at 1,048,576: left out, it would take about 65,536 s",
    ]


def test_a_way_may_have_sizes_of_its_own(tmp_path):
    rows = tmp_path / "rows.csv"
    words = [
        "--models", "tiny", "--sizes", "8", "24", "--ways", "plain@8", "retain-0", "pool-0@24,32", "--seconds", "0",
    ]  # fmt: skip
    assert main(["bench", "step", "--device", "cpu", *words, "--csv", str(rows)]) == 0
    plain, cached, pool = "whole batch", "retain 0", "retain 0, from a pool"
    ways = [(plain, "8"), (cached, "8"), (cached, "24"), (pool, "24"), (pool, "32")]
    assert [(row["way"], row["batch"]) for row in read_rows(rows)] == ways


def test_each_way_is_measured_with_compiled_towers_too(tmp_path, monkeypatch):
    compiled = []

    def compile_nothing(layer, **_):
        compiled.append(layer)
        layer._compiled_call_impl = layer._call_impl

    monkeypatch.setattr(torch.nn.Module, "compile", compile_nothing)
    rows, words = tmp_path / "rows.csv", ["--models", "tiny", "--ways", "plain@8", "by-hand@24", "--seconds", "0"]
    assert main(["bench", "step", "--device", "cpu", *words, "--compile", "--csv", str(rows)]) == 0
    ways = [(row["impl"], row["way"], int(row["batch"]), bool(row["ratio_to_plain"])) for row in read_rows(rows)]
    plain, by_hand = (("plain", "whole batch", 8, True), ("by hand", "two passes", 24, True))
    assert ways == [each for way in (plain, by_hand) for each in (way, (way[0], f"{way[1]}, compiled", *way[2:]))]
    # four layers, for the gate and the measurement of two ways
    assert len(compiled) == 16
    assert main(["bench", "step", "--device", "cpu", "--ways", "compiled-nothing"]) == 2


def test_a_failure_of_contrastile_is_a_failure_of_the_bench():
    def fail(task):
        raise RuntimeError("no")

    assert not measured({"retain-0": Way("contrastile", "retain 0", fail)})[1].report.passed


def test_inputs_in_three_places_are_the_same_pairs():
    torch.manual_seed(0)
    towers = Towers("tiny", CPU).eval()
    pairs = Pairs(towers, most=5)
    for side in (0, 1):
        features = []
        for inputs in ("device", "host", "pool"):
            tower, leaf = pairs.sides(12, inputs)[side]
            features.append(tower(leaf))
        assert all(torch.equal(features[0], other) for other in features[1:])
        assert torch.equal(features[0][:5], features[0][5:10])
        assert not torch.equal(features[0][0], features[0][1])


def test_activation_checkpointing_is_switched_on_and_off():
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
        Pairs(towers).sides(12, "host")


def test_the_default_models_and_ways():
    assert standard(CPU, quick=False)[0] == ["tiny"]
    assert not any(name.startswith("pool") for name in usual(2**18))
    assert {"pool-0", "pool-auto", "pool-by-hand", "pool-GradCache"} < set(usual(2**20))


def test_results_are_a_table_a_file_and_a_figure(tmp_path, capsys):
    rows, picture = tmp_path / "made" / "rows.csv", tmp_path / "made" / "too" / "figure.svg"
    words = ["--models", "tiny", "--sizes", "8", "24", "--ways", "plain", "retain-0", "--seconds", "0.01"]
    assert main(["bench", "step", "--device", "cpu", *words, "--csv", str(rows), "--figure", str(picture)]) == 0
    output = capsys.readouterr().out
    assert "times plain" in output
    assert output.endswith(f"rows: {rows}\nfigure: {picture}\n")
    sub_batch, lines = series(read_rows(rows), "tiny")
    assert sub_batch == 16
    assert {name: [batch for batch, *_ in points] for name, points in lines.items()} == {
        "plain, whole batch": [8, 24],
        "contrastile, retain 0": [8, 24],
    }
    assert all(0 < number < math.inf for points in lines.values() for *point, _ in points for number in point)
    text = picture.read_text()
    assert text.startswith("<?xml")
    draw(rows, picture)
    assert picture.read_text() == text


def test_a_figure_has_one_sub_batch_and_the_latest_rows_nearest_to_the_device(tmp_path):
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
    (tmp_path / "rows.csv").write_text(HEADER + "".join(lines))
    points = [(8, 3.5, 1.0, "device"), (16, 5.0, 1.0, "host"), (32, 6.0, 1.0, "pool")]
    drawn = {"plain, whole batch": [(8, 1.0, 1.0, "device")], "contrastile, retain 0": points}
    assert series(read_rows(tmp_path / "rows.csv"), "tiny") == (2, drawn)


def test_a_figure_needs_rows(tmp_path):
    with results_file(tmp_path / "rows.csv", COLUMNS["steps"]):
        pass
    with pytest.raises(ValueError, match="`csv` must hold rows of steps; got none in"):
        draw(tmp_path / "rows.csv", tmp_path / "figure.svg")


def test_a_figure_without_matplotlib_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("contrastile.cli.options.find_spec", lambda name: None)
    assert main(["bench", "step", "--csv", str(tmp_path / "x.csv"), "--figure", str(tmp_path / "x.svg")]) == 2
    assert capsys.readouterr() == ("", "`matplotlib` is not installed; run: pip install '.[train]'\n")
    assert main(["bench", "step"]) == 2
    assert capsys.readouterr() == ("", "`transformers` is not installed; run: pip install '.[train]'\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("words", "sentence"), [
    ("--optimizer", "`--optimizer` must be left out under torchrun; got True. Run one process with it.\n"),
    ("--device cpu --sizes 8 33", "`--sizes` must be multiples of the 2 ranks; got 33. Each rank takes as many"),
    ("--ways plain", "`--ways` must be one of replicate-dense, gather-dense, ring-dense, ring"),
])  # fmt: skip
def test_options_for_one_process_are_refused_under_torchrun(words, sentence, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", "step", "--models", "tiny", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(sentence)


@pytest.mark.parametrize(
    ("option", "word", "sentence"),
    [
        ("--models", "nobody", "`--models` must be one of"),
        ("--ways", "nobody", "`--ways` must be"),
        ("--ways", "nobody@8", "`--ways` must be"),
        ("--ways", "ring-tiles", "`--ways` must come under torchrun for ring-tiles; got one process. Start several"),
        ("--ways", "plain@many", "`--ways` must"),
        ("--ways", "plain@", "`--ways` must be whole numbers"),
    ],
)
def test_unknown_words_are_refused(option, word, sentence, capsys):
    assert main(["bench", "step", "--device", "cpu", option, word]) == 2
    assert capsys.readouterr().err.startswith(sentence)


def test_ranks_compute_on_the_cpu_where_it_is_named(monkeypatch):
    """Also on a machine with a GPU."""
    backends = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(harness.dist, "init_process_group", lambda backend, **_: backends.append(backend))
    monkeypatch.setattr(harness.dist, "destroy_process_group", lambda: None)
    with joined("cpu") as (device, world):
        assert (device, world) == (CPU, World(1, 2))
    assert backends == ["gloo"]


def test_a_named_peer_contradicts_no_peers(capsys):
    words = ["--device", "cpu", "--models", "tiny", "--sizes", "8", "--ways", "plain", "GradCache@8", "--no-peers"]
    assert main(["bench", "step", *words]) == 2
    sentence = "`--peers` must be measured where one is named; got --no-peers and GradCache. Leave out the one.\n"
    assert capsys.readouterr().err == sentence


def test_sizes_and_ways_of_ranks(monkeypatch):
    plans = []
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(harness.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(harness.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(StepBench, "measure", lambda self, model, plan, sub_batch: plans.append(plan))
    assert main(["bench", "step", "--device", "cpu"]) == 0
    assert plans == [{batch: ["replicate-dense", "gather-dense", "ring-dense", "ring-tiles"] for batch in (63, 255)}]
    ways = ["compiled-fsdp", "compiled-pool-ddp@96", "open_clip"]
    assert main(["bench", "step", "--device", "cpu", "--sizes", "9", "--ways", *ways]) == 0
    assert plans[1] == {9: ["compiled-fsdp", "open_clip"], 96: ["compiled-pool-ddp"]}


def _peer(name, **parts):
    """A stand-in for a package that is not installed."""
    module = module_from_spec(ModuleSpec(name, None))
    vars(module).update(parts)
    return module


def _on_a_rank(rank, group, path):
    """Measure the ways; return whether all passed, what was said, how the models are wrapped, and a peer's words."""
    lines, world = [], World(rank, 4)
    # Inf-CL's loss gives each rank the sum of the scale's gradients
    seen, one_way = [], InfoNCELoss()
    clip = {"ClipLoss": lambda **how: seen.append(how) or ClipLoss()}
    ring = {"cal_inf_loss": lambda q, k, scale: one_way(q, k, 4 * scale - 3 * scale.detach())}
    peers = {module.__name__: module for module in (_peer("open_clip", **clip), _peer("inf_cl", **ring))}
    # the peers are those of a GPU, the tiles those of this device
    ways = {**rank_ways(torch.device("cuda"), rank, 4), **rank_ways(CPU, rank, 4)}
    once, path = patch.multiple(harness, **ONCE), path if rank == 0 else None
    with once, patch.dict(sys.modules, peers), results_file(path, COLUMNS["rank steps"]) as write:
        report = Report(lines.append, write, world)
        bench = StepBench(Machine(CPU, world=world), torch.float32, report, ways, longest=math.inf)
        bench.measure("tiny", {32: [*STANDARD, *FURTHER], 64: ["ring-tiles"]}, sub_batch=5)
    wrapped = {}
    for name in ("ddp", "fsdp"):
        towers = Towers("tiny", CPU)
        task = Task(towers, Pairs(towers).sides(8, "device"), 4, CPU, torch.float32, ClipLoss())
        (model, method), _ = ways[name].wrap(task).sides[1]
        wrapped[name] = type(model).__name__, method, sum(isinstance(one, FSDPModule) for one in model.modules())
    return report.passed, lines, wrapped, seen[0]


def test_losses_wrappers_and_peers_across_ranks(pool, tmp_path):
    path, picture = tmp_path / "rows.csv", tmp_path / "figure.svg"
    answers = pool.run(_on_a_rank, 4, path)
    assert all(passed for passed, *_ in answers)
    _, lines, wrapped, how = answers[0]
    rows = [(f"{row['impl']}, {row['way']}", row) for row in read_rows(path)]
    assert [(name, row["world"], row["batch"]) for name, row in rows] == [
        *((name, "4", "32") for name in (
            "contrastile, replicate, dense", "contrastile, gather, dense", "contrastile, ring, dense",
            "contrastile, ring, eager", "contrastile, gather, eager", "contrastile, DDP, auto, eager",
            "contrastile, FSDP2, auto, eager", "inf-cl, ring", "open_clip, local loss, gathered gradients",
            "contrastile, DDP, auto, eager, from a pool",
        )),
        ("contrastile, ring, eager", "4", "64"),
    ]  # fmt: skip
    for name, row in rows:
        assert all(row[column] for column in ("ms", "us_per_pair", "loss_bytes", "backbone_bytes"))
        # a rank's pairs of images and texts, or as many indices into 256 pairs
        each, pairs = 3 * 32 * 32 + 96, int(row["batch"]) // 4
        assert int(row["data_bytes"]) == (256 * each + 2 * 8 * pairs if "pool" in name else pairs * each)
        (line,) = (line for line in lines if line.startswith(f"  {name}: "))
        towers, scale = (float(number) for number in re.findall(r"\d\.\de[+-]\d\d", line))
        assert towers < GATE_TOLERANCE
        # an unusual factor of a peer's is shown, and keeps its speed
        assert scale == 3.0 if name.startswith("inf-cl") else scale < GATE_TOLERANCE
    # model, towers, and two layers of each
    assert wrapped == {
        "ddp": ("DistributedDataParallel", "encode_text", 0), "fsdp": ("FSDPTowers", "encode_text", 7),
    }  # fmt: skip
    assert how == {"local_loss": True, "gather_with_grad": True, "rank": 0, "world_size": 4}
    # times and memory beside each other, as for one device
    draw(path, picture)
    assert series(read_rows(path), "tiny")[1].keys() == {name for name, _ in rows}
    assert "ring, eager" in picture.read_text()


def test_a_png_is_small(tmp_path):
    lines = [f"plain,whole batch,tiny,{2**n},,device,{n},{n},{2**30}\n" for n in range(4, 12)]
    (tmp_path / "rows.csv").write_text(HEADER + "".join(lines))
    draw(tmp_path / "rows.csv", tmp_path / "figure.png")
    assert 1_000 < (tmp_path / "figure.png").stat().st_size < 60_000
