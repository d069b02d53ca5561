"""Comparisons: the plans, the arithmetic of their tables, and crews of processes that make the runs."""

import csv
import math
import multiprocessing
import statistics

import numpy as np
import pytest
import torch
from tiny_runs import tiny_recipe, write_recipe

from contrastile.cli.main import main
from contrastile.train import compare, compare_batches, compare_losses, crews, trials
from contrastile.train.compare_losses import WAYS, Difference, difference
from contrastile.train.feed import open_materials
from contrastile.train.log import read_metrics
from contrastile.train.optim import learning_rate
from contrastile.train.provenance import chip
from contrastile.train.recipe import load_recipe, to_toml
from contrastile.train.trials import Comparison, Plan, Trial, make, portion


def loss_trial(way, seed, recall, **others):
    return Trial({"way": way}, seed, 100, 10, 2.0, {"faces": recall}, **others)


def batch_trial(share, batch, rate, seed, recall, **others):
    labels = {"data": share, "batch": batch, "rate": rate}
    return Trial(labels, seed, 100, 100 // int(batch), 2.0, {} if recall is None else {"faces": recall}, **others)


# --- one loss in five ways


def test_each_way_is_two_words_of_the_recipe(tmp_path):
    made = compare_losses.plans(tiny_recipe(tmp_path, "device=cpu", "seed=7"), 2)
    assert [(plan.labels["way"], plan.recipe.seed) for plan in made] == [(way, seed) for seed in (7, 8) for way in WAYS]
    words = [(plan.recipe.loss.exchange, plan.recipe.loss.backend) for plan in made[:5]]
    assert words == [
        ("replicate", "dense"), ("gather", "dense"), ("gather", "eager"), ("ring", "dense"), ("ring", "eager"),
    ]  # fmt: skip
    assert len({plan.recipe.model_copy(update={"loss": None, "seed": 0}).model_dump_json() for plan in made}) == 1


def test_on_a_gpu_tiles_are_the_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(compare_losses, "choose_device", lambda name: torch.device("cuda"))
    backends = [plan.recipe.loss.backend for plan in compare_losses.plans(tiny_recipe(tmp_path), 2)[:5]]
    assert backends == ["dense", "dense", "triton", "dense", "triton"]


def test_differences_are_taken_seed_by_seed():
    # seeds far from each other, ways near
    dense, ring = [0.50, 0.70, 0.60, 0.80, 0.40], [0.51, 0.70, 0.59, 0.81, 0.41]
    made = [loss_trial("dense", seed, recall) for seed, recall in enumerate(dense)]
    made += [loss_trial("ring", seed, recall) for seed, recall in enumerate(ring)]
    gaps = [1.0, 0.0, -1.0, 1.0, 1.0]
    found = difference(made, "ring", "faces")
    assert found.mean == pytest.approx(0.4)
    # Student's t of four degrees of freedom
    assert found.half == pytest.approx(2.776445 * statistics.stdev(gaps) / math.sqrt(5))


def test_a_seed_without_its_other_half_does_not_count():
    made = [loss_trial("dense", 0, 0.5), loss_trial("ring", 0, 0.5), loss_trial("dense", 1, 0.6)]
    assert difference(made, "ring", "faces") is None
    made += [loss_trial("ring", 1, 0.7), loss_trial("ring", 2, 0.1), loss_trial("dense", 3, 0.9, failed="lost")]
    assert difference(made, "ring", "faces").mean == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("mean", "half", "none"),
    [(0.2, 0.5, True), (0.6, 0.5, False), (0.2, 1.5, False), (0.0, 0.0, True), (0.1, 0.0, False)],
)
def test_a_difference_is_none_where_a_narrow_interval_holds_0(mean, half, none):
    assert Difference(mean, half).none == Difference(-mean, half).none == none


def test_the_table_marks_what_differs():
    made = [loss_trial(way, seed, 0.5 + 0.01 * seed) for way in ("dense", "gather") for seed in range(3)]
    made += [loss_trial("ring", seed, 0.6 + 0.01 * seed) for seed in range(3)]
    lines = compare_losses.table(made).splitlines()
    assert lines[2] == "| dense | replicate | dense | 2 | 51.0 ± 1.0 % |  |"
    assert lines[3] == "| gather | gather | tiles | 2 | 51.0 ± 1.0 % | +0.00 ± 0.00 |"
    assert lines[4].startswith("| ring | ring | dense | 2 | 61.0 ± 1.0 % | +10.00 ± 0.00")
    assert lines[4].endswith("(!) |")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--seeds", "1"], "`--seeds` must be at least 2; got 1. An interval needs a spread; five are usual."),
        (["--ranks", "1"], "`--ranks` must be at least 2; got 1. On one process there is nothing to exchange."),
        (["--jobs", "0"], "`--jobs` must be at least 1; got 0. So many runs are made at a time."),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, capsys, words, sentence):
    assert main(["compare", str(write_recipe(tmp_path)), "--losses", "--runs", str(tmp_path), *words]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == sentence


@pytest.fixture
def forked(monkeypatch):
    """Crews have loaded everything; those of batch sizes load it themselves."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(crews.multiprocessing, "get_context", lambda _: fork)


def test_on_two_ranks_all_ways_are_one(tmp_path, capfd, forked):
    words = ["train.examples=64", "train.batch=32", "evaluate.every=1.0", "device=cpu"]
    command = [
        "compare",
        str(write_recipe(tmp_path)),
        "--losses",
        "--seeds",
        "2",
        *words,
        "--runs",
        str(tmp_path / "runs"),
    ]
    assert main(command) == 0
    folder = tmp_path / "runs" / "tiny-losses"
    with (folder / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["way"], row["seed"]) for row in rows] == [(way, seed) for seed in "01" for way in WAYS]
    assert {row["chip"] for row in rows} == {chip(torch.device("cpu"))}
    assert all(row["versions"].startswith("contrastile ") and len(row["date"]) == 10 for row in rows)
    curves = {}
    for path in folder.glob("*.jsonl"):
        curves[path.stem] = [line["loss"] for line in read_metrics(path) if line["kind"] == "step"]
    assert len(curves) == 10
    for seed in "01":
        for way in WAYS:
            assert curves[f"{way}-{seed}".replace(" ", "_")] == pytest.approx(curves[f"dense-{seed}"], rel=1e-4)
    assert curves["dense-0"] != pytest.approx(curves["dense-1"], rel=1e-4)
    assert "on 2 ranks, 64 pairs a run, 2 seeds" in (folder / "compare.md").read_text()
    assert "| tiled | ring | tiles |" in capfd.readouterr().out


# --- batch sizes


def test_the_grid_sees_equal_examples_at_the_rates_of_its_rules(tmp_path):
    recipe = tiny_recipe(tmp_path, "train.minutes=3.0")
    made = compare_batches.plans(recipe, 480, [64, 16], [0.5, 1.0], ["fixed", "sqrt", "linear"], 2)
    # at the smallest batch all rules are one
    assert len(made) == 2 * 2 * (1 + 3)
    assert {plan.recipe.train.examples for plan in made} == {480}
    assert {plan.recipe.train.minutes for plan in made} == {None}
    found = {tuple(plan.labels.values()): plan for plan in made}
    for rule, times in {"fixed": 1, "sqrt": 2, "linear": 4}.items():
        optim = found["1", "64", rule].recipe.optim
        assert learning_rate(optim.warmup, optim, 64) == pytest.approx(times * 3e-3)
        assert learning_rate(optim.warmup, optim, 16) == pytest.approx(3e-3)
    assert found["0.5", "16", "fixed"].share == 0.5
    assert found["0.5", "16", "fixed"].recipe.train.batch == ((0.0, 16),)


def test_a_smaller_share_lies_in_a_larger(tmp_path):
    materials = open_materials(tiny_recipe(tmp_path))
    whole = materials.pairs.splits["train"]
    rows = [set(portion(materials, share).pairs.splits["train"].tolist()) for share in (0.1, 0.5, 1.0)]
    assert rows[0] < rows[1] < rows[2] == set(whole.tolist())
    assert [len(some) for some in rows] == [round(0.1 * len(whole)), round(0.5 * len(whole)), len(whole)]
    part = portion(materials, 0.5)
    assert np.array_equal(part.pairs.splits["held_out"], materials.pairs.splits["held_out"])
    assert (np.diff(part.pairs.splits["train"]) > 0).all()


def test_the_tables_have_a_line_for_each_batch_and_a_column_for_each_rule():
    made = [batch_trial("0.1", "16", "fixed", seed, 0.4) for seed in range(2)]
    made += [batch_trial("0.1", "64", "fixed", 0, 0.3), batch_trial("0.1", "64", "sqrt", 0, None, failed="lost")]
    assert compare_batches.table(compare_batches.in_order(made)).splitlines() == [
        "faces, recall at 1",
        "",
        "| data | batch | steps | fixed rate | sqrt rate |",
        "| --- | --- | --- | --- | --- |",
        "| 0.1 | 16 | 6 | 40.0 ± 0.0 % | 40.0 ± 0.0 % |",
        "| 0.1 | 64 | 1 | 30.0 % | (1 failed) |",
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--batches 0",
            "`batches` must be whole numbers above 0, perhaps with a unit; got '0'. "
            "Such as 4096, 64k, 1M, 192MiB or 2GiB.",
        ),
        ("--batches 16 --data 1.5", "`data` must be shares above 0, up to 1; got [1.5]. Such as 0.1 0.3 1.0."),
        ("--batches 16 --rates cube", "`rates` must be among fixed, sqrt, linear; got ['cube']. Such as fixed sqrt."),
        ("--batches 16 --seeds 0", "`--seeds` must be at least 1; got 0. Three show a spread."),
        ("--jobs 2", "`jobs` must be 1 where time is compared; got 2. Runs side by side slow each other down."),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(tmp_path, capsys, words, sentence):
    assert main(["compare", str(write_recipe(tmp_path)), "--runs", str(tmp_path), *words.split()]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == sentence


def test_batch_sizes_are_compared_side_by_side(tmp_path, capsys):
    grid = ["--batches", "16", "64", "--data", "0.5", "1", "--rates", "fixed", "sqrt", "--seeds", "2", "--jobs", "2"]
    words = ["train.examples=128", "evaluate.every=1.0", "device=cpu"]
    assert main(["compare", str(write_recipe(tmp_path)), *words, *grid, "--runs", str(tmp_path / "runs")]) == 0
    folder = tmp_path / "runs" / "tiny-batches"
    with (folder / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [tuple(row[name] for name in ("data", "batch", "rate", "seed")) for row in rows] == [
        (share, batch, rate, seed)
        for share in ("0.5", "1")
        for batch, rate in (("16", "fixed"), ("64", "fixed"), ("64", "sqrt"))
        for seed in "01"
    ]
    assert [row["steps"] for row in rows[:6]] == ["8", "8", "2", "2", "2", "2"]
    assert (folder / "compare.svg").read_text().count("% of the pairs, sqrt rate") == 2
    assert "128 pairs seen in every run" in (folder / "compare.md").read_text()
    assert "| 0.5 | 64 | 2 |" in capsys.readouterr().out
    # a trial of a crew is the trial of one process
    recipe = tiny_recipe(tmp_path, *words, "train.batch=64", "seed=1")
    alone = make(Plan({"only": "one"}, recipe), open_materials(recipe), tmp_path, trials.Ranks())
    assert str(alone.recall["held-out pairs, picture → name"]) == rows[9]["held-out pairs, picture → name"]


@pytest.mark.parametrize(
    ("gpus", "jobs", "ranks", "places", "beside"),
    [
        (2, 3, 1, [0, 1, 0], 2),
        (4, 2, 2, [0, 1, 2, 3], 1),
        (3, 2, 2, [0, 1, 2, 0], 2),
        (1, 5, 1, [0] * 5, 5),
        # each rank of a crew has its own number where there are no GPUs, or too few
        (0, 2, 2, [0, 1, 0, 1], 2),
        (1, 1, 2, [0, 1], 1),
    ],
)
def test_crews_are_dealt_out_to_all_gpus(monkeypatch, gpus, jobs, ranks, places, beside):
    monkeypatch.setattr(crews.torch.cuda, "device_count", lambda: gpus)
    dealt = [crews.dealt(process, ranks, jobs * ranks) for process in range(jobs * ranks)]
    assert dealt == [(place, beside) for place in places]


def test_a_process_that_ends_is_an_error(tmp_path, forked):
    recipe = tiny_recipe(tmp_path)
    # where metrics cannot be written a run does not begin
    plans = [Plan({"way": "x/y"}, recipe)]
    with pytest.raises(RuntimeError, match=r"a process of .*crew-0\.log ended: FileNotFoundError"):
        list(trials.side_by_side(plans, tmp_path, jobs=1, ranks=1))


def test_any_process_of_a_crew_that_ends_is_an_error(tmp_path, monkeypatch):
    """Not the first rank's alone: it would wait for the others for an hour."""
    begin = crews.Crew.begin

    def begin_and_lose_one(crew, task):
        begin(crew, task)
        crew._processes[1].kill()

    monkeypatch.setattr(crews.Crew, "begin", begin_and_lose_one)
    with pytest.raises(RuntimeError, match=r"a process of .*crew-0\.log ended: without a word"):
        list(trials.side_by_side([Plan({"way": "x"}, tiny_recipe(tmp_path))], tmp_path, jobs=1, ranks=2))


def test_more_seeds_are_added_to_those_made(tmp_path, capfd, forked):
    grid = [
        "train.examples=64",
        "evaluate.every=1.0",
        "device=cpu",
        "--batches",
        "16",
        "--runs",
        str(tmp_path / "runs"),
    ]
    command, found = ["compare", str(write_recipe(tmp_path)), *grid], []
    # the last one has nothing left to make
    for words in (["--seeds", "1"], ["--seeds", "2", "--resume"], ["--seeds", "2", "--resume"]):
        assert main([*command, *words]) == 0
        found.append((tmp_path / "runs" / "tiny-batches" / "compare.csv").read_text().splitlines())
        table = capfd.readouterr().out
    assert [len(lines) for lines in found] == [2, 3, 3]
    assert found[0] == found[1][:2]
    assert found[1] == found[2]
    assert " ± " in table


SET = {
    "compare": ([], ["train.accumulate=2", "train.minutes=1.0", "train.retain=0"]),
    "compare --losses": (["--losses"], ["loss.backend=dense", "loss.exchange=ring", "train.minutes=1.0"]),
    "compare --batches": (
        ["--batches", "16"],
        ["train.batch=32", "train.minutes=1.0", "optim.rate_scaling=sqrt", "optim.base_batch=32"],
    ),
}


@pytest.mark.parametrize("comparison", SET)
def test_what_a_comparison_sets_itself_is_said_of_a_recipe_and_refused_of_an_override(
    tmp_path, capsys, caplog, monkeypatch, comparison
):
    for module, name in ((compare, "recipe"), (compare_losses, "losses"), (compare_batches, "batches")):
        monkeypatch.setattr(module, f"compare_{name}", lambda *_, **__: Comparison(tmp_path, "made", None))
    options, words = SET[comparison]
    recipe = write_recipe(tmp_path)
    rest = ["--runs", str(tmp_path / "runs"), *options]
    beside = [word for word in words if word.startswith("optim")]
    for word in words:
        more = [] if word not in beside else [one for one in beside if one != word]
        assert main(["compare", str(recipe), word, *more, *rest]) == 2
        first = word if word not in beside else beside[0]
        line = f"{first}: {first.partition('=')[0]}: has no effect: {comparison} sets it itself; leave it out"
        assert capsys.readouterr().err.splitlines()[-1] == line
    recipe.write_text(to_toml(load_recipe(recipe, words)))
    caplog.clear()
    assert main(["compare", str(recipe), *rest]) == 0
    keys = ", ".join(word.partition("=")[0] for word in words)
    assert [one for one in caplog.messages if "itself" in one] == [
        f"{recipe}: {comparison} sets {keys} itself, whatever is said there"
    ]
    # what is the default, or what the comparison says too, is nothing lost
    recipe.write_text(to_toml(load_recipe(write_recipe(tmp_path), ["train.retain=1", "train.batch=256"])))
    caplog.clear()
    assert main(["compare", str(recipe), *rest]) == 0
    assert not [one for one in caplog.messages if "itself" in one]


@pytest.mark.parametrize("what", [[], ["--losses"], ["--batches", "16"]])
def test_copies_of_one_seed_are_not_for_several(tmp_path, capsys, what):
    words = ["compare", str(write_recipe(tmp_path)), "data.copies=3", "--runs", str(tmp_path / "runs"), *what]
    assert main(words) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "`data.copies` must be 1 for a comparison, whose seeds share their data; got 3. "
        "Pictures are bent anew in every run without it."
    )


def test_a_run_that_comes_to_nothing_is_told(tmp_path, monkeypatch):
    def lost(*_, **__):
        raise FloatingPointError("three steps in a row")

    monkeypatch.setattr(trials, "train", lost)
    recipe = tiny_recipe(tmp_path)
    trial = make(Plan({"way": "x"}, recipe), open_materials(recipe), tmp_path, trials.Ranks())
    assert (trial.failed, trial.recall) == ("three steps in a row", {})
    assert trials.spread([trial], "faces") == "(1 failed)"
    assert trials.as_csv([trial]).splitlines()[1] == "x,0,0,0,0.0,three steps in a row,,,,"
