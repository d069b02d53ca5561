"""`contrastile compare` of pairs: the trials of each study, the arithmetic of its tables, and the worker processes."""

import csv
import math
import multiprocessing
import os
import re
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks import fresh, server
from tiny_runs import tiny_recipe, write_recipe

from contrastile.cli.main import main
from contrastile.experiments import studies, sweep
from contrastile.experiments.results import Result, spread, to_csv
from contrastile.experiments.studies import LOSS_WAYS, BatchSizes, FourWays, Losses, difference, negligible
from contrastile.experiments.sweep import Comparison, Trial, assigned_gpu, overridden, run_parallel, training_share
from contrastile.train.batch_builder import open_data_bundle
from contrastile.train.log import read_metrics
from contrastile.train.optim import learning_rate
from contrastile.train.provenance import chip
from contrastile.train.ranks import Ranks
from contrastile.train.recipe import load_any_recipe, to_toml
from contrastile.train.state import TrainResult


def result(labels, seed, recall, **others):
    costs = {"examples": 100, "steps": 10, "seconds": 2.0}
    return Result(labels, seed, costs, {} if recall is None else {"faces": recall}, **others)


def loss_result(way, seed, recall, **others):
    return result({"way": way}, seed, recall, **others)


def rows_of(folder):
    with (folder / "compare.csv").open() as file:
        return list(csv.DictReader(file))


def last_error(capsys):
    return capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def command(tmp_path):
    """The start of a short comparison of the tiny recipe."""
    words = ["train.examples=64", "evaluate.every=1.0", "device=cpu", "--runs", str(tmp_path / "runs")]
    return ["compare", str(write_recipe(tmp_path)), *words]


@pytest.fixture
def served(monkeypatch):
    """Worker processes that need not import anything; those of batch sizes are started as users start them."""
    context = server()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    # other tests of this process have ranks of their own
    return set(multiprocessing.active_children())


# --- the trials of all studies


@pytest.mark.parametrize(
    ("batch", "overrides", "sentence"),
    [
        (4, ["train.accumulate=4"], "train.accumulate: must leave parts of 2 at least; got 4 of a batch of 4"),
        (128, ["loss.kind=infonce", "loss.queue=64"],
         "loss.queue: must have room for the keys of a step, 128 at most; got 64"),
        (48, ["optim.warmup_steps=2"], "optim.warmup_steps: must be shorter than the run; got 2 steps, 96 of 64"),
        (8, ["optim.warmup_epochs=20.0"], "`optim.warmup_epochs` must be shorter than the run; got 20 epochs, "),
    ],
)  # fmt: skip
def test_a_mistake_of_one_trial_is_found_before_the_first(tmp_path, command, capsys, batch, overrides, sentence):
    recipe, *words = command[1:]
    assert main(["compare", recipe, *overrides, *words, "--batches", "8", str(batch)]) == 2
    assert last_error(capsys).startswith(f"data 1, batch {batch}, rate fixed: {sentence}")
    assert not [*(tmp_path / "runs").iterdir()]


# --- the same memory in four ways


def test_all_four_ways_keep_the_activations_of_one_sub_batch(tmp_path):
    study = FourWays(recipe=tiny_recipe(tmp_path, "train.epoch_steps=100"), seeds=1)
    ways = {trial.labels["way"]: trial.overrides["train"] for trial in study.trials(open_data_bundle(study.recipe))}
    assert {train["epoch_steps"] for train in ways.values()} == {None}
    assert {way: (train["batch"], train["accumulate"], train["retain"]) for way, train in ways.items()} == {
        "sequential": (((0.0, 16),), 1, 1),
        "accumulated": (((0.0, 48),), 3, 1),
        "cached": (((0.0, 48),), 1, 1),
        "schedule": (((0.0, 16), (0.5, 48)), 1, 1),
    }


def test_the_table_of_four_ways_shows_mean_and_spread(tmp_path):
    study = FourWays(recipe=tiny_recipe(tmp_path))
    results = [result({"budget": "time", "way": "cached"}, seed, recall) for seed, recall in enumerate((0.5, 0.6, 0.7))]
    assert study.table(results).splitlines()[-1] == "| time | cached | 10 | 100 | 2 | 60.0 ± 10.0 % |"
    assert study.table(results[:1]).endswith("| 50.0 % |")


def test_equal_time_is_above_zero_for_trainings_of_milliseconds(tmp_path):
    study = FourWays(recipe=tiny_recipe(tmp_path), seeds=2)
    trial, timed = study.trials(open_data_bundle(study.recipe))[0], []
    for seconds in (0.012, 0.018):
        costs = study.costs(trial, TrainResult(seconds=seconds))
        timed.append(Result({"budget": "examples", "way": "sequential"}, 0, costs, {}))
    ready = study.ready(Trial({"budget": "time", "way": "cached"}, 0, {"train": {}}), timed)
    assert ready.overrides["train"]["minutes"] == pytest.approx(0.015 / 60)


FOUR_WAYS = [
    (budget, way)
    for budget in ("examples", "time")
    for way in ("sequential", "accumulated", "cached", "schedule")
]  # fmt: skip


def test_every_way_is_run_for_equal_examples_and_for_equal_time_and_goes_on_when_interrupted(tmp_path, command, capsys):
    command += ["--seeds", "2"]
    assert main(command) == 0
    folder = tmp_path / "runs" / "tiny-compare"
    rows, every = rows_of(folder), [(*way, seed) for way in FOUR_WAYS for seed in "01"]
    assert [(row["budget"], row["way"], row["seed"]) for row in rows] == every
    assert {row["examples"] for row in rows[:8:2]} == {"64"}
    assert "held-out pairs, picture → name" in rows[0]
    page = (folder / "compare.md").read_text()
    output = capsys.readouterr()
    sentence = (
        "16 runs: about [0-9:]+ of training, one after the other; evaluation and the start of processes add to it"
    )
    assert re.search(f"^{sentence}$", output.err, re.MULTILINE)
    named = re.findall(r"^run (\d+) of 16: budget (\w+), way (\w+), seed (\d)$", output.err, re.MULTILINE)
    assert [tuple(words[1:]) for words in named] == every
    assert "| time | schedule |" in page
    assert "over 2 seeds" in page
    assert page.split("\n\n")[2] in output.out
    head, *lines = (folder / "compare.csv").read_text().splitlines()
    # finished trials are taken as they stand; an interrupted one starts again
    for seed in range(2):
        lines[seed] = lines[seed].replace(f"examples,sequential,{seed},64,", f"examples,sequential,{seed},640,")
    (folder / "compare.csv").write_text("\n".join([head, *lines[:-3], ""]))
    interrupted = folder / "time-schedule-0.jsonl"
    interrupted.write_text('{"kind": "step", "of": "another run"}\n')
    assert main([*command, "--resume"]) == 0
    output = capsys.readouterr()
    assert "| examples | sequential | 4 | 640 |" in output.out
    assert "is now" not in output.err
    rows = rows_of(folder)
    assert [(row["budget"], row["way"], row["seed"]) for row in rows] == every
    assert (folder / "compare.csv").read_text().splitlines()[:14] == [head, *lines[:-3]]
    assert all(row["chip"] and row["versions"] for row in rows)
    assert "another run" not in interrupted.read_text()
    # another recipe is another comparison
    assert main([*command, "--resume", "optim.learning_rate=1e-4"]) == 2
    assert last_error(capsys) == (
        "`optim.learning_rate` must be what the run began with; got 0.0001. "
        f"It began with 0.003: go on with contrastile compare {folder}/recipe.toml --seeds 2 --runs {folder.parent} "
        "--resume, or compare anew, without --resume."
    )


# --- one loss in five ways


def test_each_way_of_the_loss_is_an_exchange_and_a_backend(tmp_path, monkeypatch):
    study = Losses(recipe=tiny_recipe(tmp_path, "device=cpu", "seed=7"), seeds=2, ranks=2)
    trials = study.trials(None)
    assert [(trial.labels["way"], trial.seed) for trial in trials] == [
        (way, seed) for seed in (7, 8) for way in LOSS_WAYS
    ]
    assert [tuple(trial.overrides["loss"].values()) for trial in trials[:5]] == [
        ("replicate", "dense"), ("gather", "dense"), ("gather", "eager"), ("ring", "dense"), ("ring", "eager"),
    ]  # fmt: skip
    monkeypatch.setattr(studies, "choose_device", lambda name: torch.device("cuda"))
    backends = [trial.overrides["loss"]["backend"] for trial in study.trials(None)[:5]]
    assert backends == ["dense", "dense", "triton", "dense", "triton"]


def test_differences_are_taken_seed_by_seed():
    # seeds differ much more than ways
    dense, ring = [0.50, 0.70, 0.60, 0.80, 0.40], [0.51, 0.70, 0.59, 0.81, 0.41]
    results = [loss_result("dense", seed, recall) for seed, recall in enumerate(dense)]
    results += [loss_result("ring", seed, recall) for seed, recall in enumerate(ring)]
    mean, half = difference(results, "ring", "faces")
    assert mean == pytest.approx(0.4)
    # Student's t of four degrees of freedom
    assert half == pytest.approx(2.776445 * statistics.stdev([1.0, 0.0, -1.0, 1.0, 1.0]) / math.sqrt(5))


def test_seeds_of_one_way_alone_do_not_count():
    results = [loss_result("dense", 0, 0.5), loss_result("ring", 0, 0.5), loss_result("dense", 1, 0.6)]
    assert difference(results, "ring", "faces") is None
    results += [loss_result("ring", 1, 0.7), loss_result("ring", 2, 0.1), loss_result("dense", 3, None, failed="lost")]
    assert difference(results, "ring", "faces")[0] == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("mean", "half", "expected"),
    [(0.2, 0.5, True), (0.6, 0.5, False), (0.2, 1.5, False), (0.0, 0.0, True), (0.1, 0.0, False)],
)
def test_a_difference_is_negligible_where_a_narrow_interval_holds_0(mean, half, expected):
    assert negligible(mean, half) == negligible(-mean, half) == expected


def test_the_table_of_losses_marks_differences(tmp_path):
    results = [loss_result(way, seed, 0.5 + 0.01 * seed) for way in ("dense", "gather") for seed in range(3)]
    results += [loss_result("ring", seed, 0.6 + 0.01 * seed) for seed in range(3)]
    lines = Losses(recipe=tiny_recipe(tmp_path)).table(results).splitlines()
    assert lines[2] == "| dense | replicate | dense | 2 | 51.0 ± 1.0 % |  |"
    assert lines[3] == "| gather | gather | tiles | 2 | 51.0 ± 1.0 % | +0.00 ± 0.00 |"
    assert lines[4].startswith("| ring | ring | dense | 2 | 61.0 ± 1.0 % | +10.00 ± 0.00")
    assert lines[4].endswith("(!) |")


def test_all_losses_have_the_same_curves_on_two_ranks(tmp_path, command, capfd, served):
    assert main([*command, "--losses", "--seeds", "2", "train.batch=32"]) == 0
    folder = tmp_path / "runs" / "tiny-losses"
    rows = rows_of(folder)
    assert [(row["way"], row["seed"]) for row in rows] == [(way, seed) for seed in "01" for way in LOSS_WAYS]
    assert {row["chip"] for row in rows} == {chip(torch.device("cpu"))}
    assert all(row["versions"].startswith("contrastile ") and len(row["date"]) == 10 for row in rows)
    curves = {}
    for path in folder.glob("*.jsonl"):
        curves[path.stem] = [line["loss"] for line in read_metrics(path) if line["kind"] == "step"]
    assert len(curves) == 10
    for seed in "01":
        for way in LOSS_WAYS:
            assert curves[f"{way}-{seed}".replace(" ", "_")] == pytest.approx(curves[f"dense-{seed}"], rel=1e-4)
    assert curves["dense-0"] != pytest.approx(curves["dense-1"], rel=1e-4)
    assert "on 2 ranks, 64 pairs a run, 2 seeds" in (folder / "compare.md").read_text()
    assert "| tiled | ring | tiles |" in capfd.readouterr().out


# --- batch sizes


def test_the_grid_sees_equal_examples_at_the_rates_of_its_rules(tmp_path):
    recipe = tiny_recipe(tmp_path, "train.minutes=3.0", "train.epoch_steps=100")
    rates = ["fixed", "sqrt", "linear"]
    study = BatchSizes(recipe=recipe, seeds=2, batches=[64, 16], shares=[0.5, 1.0], rates=rates)
    trials = study.trials(open_data_bundle(recipe))
    # at the smallest batch all rules are one
    assert len(trials) == 2 * 2 * (1 + 3)
    again = replace(study, batches=[64, 16, 16], shares=[0.5, 1.0, 0.5], rates=[*rates, "fixed"])
    assert again.trials(open_data_bundle(recipe)) == trials
    recipes = {tuple(trial.labels.values()): overridden(recipe, trial.overrides) for trial in trials}
    assert {(one.train.examples, one.train.minutes) for one in recipes.values()} == {(480, None)}
    for rule, times in {"fixed": 1, "sqrt": 2, "linear": 4}.items():
        optim = recipes["1", "64", rule].optim
        assert learning_rate(optim.warmup, optim, 64) == pytest.approx(times * 3e-3)
        assert learning_rate(optim.warmup, optim, 16) == pytest.approx(3e-3)
    assert recipes["0.5", "16", "fixed"].train.batch == ((0.0, 16),)
    # few data make no batch smaller than the table says
    assert {one.train.epoch_steps for one in recipes.values()} == {None}
    assert {trial.share for trial in trials if trial.labels["data"] == "0.5"} == {0.5}


def test_a_smaller_share_lies_in_a_larger(tmp_path):
    data = open_data_bundle(tiny_recipe(tmp_path))
    whole = data.pairs.splits["train"]
    rows = [set(training_share(data, share).pairs.splits["train"].tolist()) for share in (0.1, 0.5, 1.0)]
    assert rows[0] < rows[1] < rows[2] == set(whole.tolist())
    assert [len(some) for some in rows] == [round(0.1 * len(whole)), round(0.5 * len(whole)), len(whole)]
    part = training_share(data, 0.5)
    assert np.array_equal(part.pairs.splits["held_out"], data.pairs.splits["held_out"])
    assert (np.diff(part.pairs.splits["train"]) > 0).all()


def test_the_table_of_batch_sizes_has_a_line_for_each_batch_and_a_column_for_each_rule(tmp_path):
    def point(batch, rate, seed, recall, **others):
        return result({"data": "0.1", "batch": batch, "rate": rate}, seed, recall, **others)

    results = [point("16", "fixed", seed, 0.4) for seed in range(2)]
    results += [point("64", "fixed", 0, 0.3), point("64", "sqrt", 0, None, failed="lost")]
    assert BatchSizes(recipe=tiny_recipe(tmp_path), batches=[16, 64]).table(results).splitlines() == [
        "faces, recall at 1",
        "",
        "| data | batch | steps | fixed rate | sqrt rate |",
        "| --- | --- | --- | --- | --- |",
        "| 0.1 | 16 | 10 | 40.0 ± 0.0 % | 40.0 ± 0.0 % |",
        "| 0.1 | 64 | 10 | 30.0 % | (1 failed) |",
    ]


def test_batch_sizes_are_compared_in_worker_processes(tmp_path, command, capsys):
    grid = ["--batches", "16", "64", "--data", "0.5", "1", "--rates", "fixed", "sqrt", "--seeds", "1", "--jobs", "2"]
    assert main([*command, *grid]) == 0
    folder = tmp_path / "runs" / "tiny-batches"
    rows = rows_of(folder)
    assert [tuple(row[name] for name in ("data", "batch", "rate", "seed")) for row in rows] == [
        (share, batch, rate, "0")
        for share in ("0.5", "1")
        for batch, rate in (("16", "fixed"), ("64", "fixed"), ("64", "sqrt"))
    ]
    assert [row["steps"] for row in rows[:3]] == ["4", "1", "1"]
    assert (folder / "compare.svg").read_text().count("% of the pairs, sqrt rate") == 2
    assert "64 pairs seen in every run" in (folder / "compare.md").read_text()
    output = capsys.readouterr()
    assert "| 0.5 | 64 | 1 |" in output.out
    # side by side they end in any order, each named
    assert output.err.count("finished: data ") == len(rows)
    assert "finished: data 0.5, batch 64, rate sqrt, seed 0\n" in output.err
    # a trial in this process has the same result
    recipe = tiny_recipe(tmp_path, *command[2:5], "train.batch=64")
    alone = FourWays(recipe=recipe).run(Trial({"only": "one"}, 0, {}), open_data_bundle(recipe), Ranks(), tmp_path)
    assert str(alone.measures["held-out pairs, picture → name"]) == rows[4]["held-out pairs, picture → name"]


def test_more_seeds_are_added_to_those_there_are(tmp_path, command, capfd):
    files = []
    # the last command has nothing left to do
    for words in (["--seeds", "1"], ["--seeds", "2", "--resume"], ["--seeds", "2", "--resume"]):
        assert main([*command, "--batches", "16", *words]) == 0
        files.append((tmp_path / "runs" / "tiny-batches" / "compare.csv").read_text().splitlines())
        table = capfd.readouterr().out
    assert [len(lines) for lines in files] == [2, 3, 3]
    assert files[0] == files[1][:2]
    assert files[1] == files[2]
    assert " ± " in table


# --- trials and worker processes


def test_a_failed_trial_is_reported(tmp_path, monkeypatch):
    def diverge(*_, **__):
        raise FloatingPointError("three steps in a row")

    monkeypatch.setattr(sweep, "train", diverge)
    recipe = tiny_recipe(tmp_path)
    failed = FourWays(recipe=recipe).run(Trial({"way": "x"}, 0, {}), open_data_bundle(recipe), Ranks(), tmp_path)
    assert (failed.failed, failed.measures) == ("three steps in a row", {})
    assert spread([failed], "faces") == "(1 failed)"
    assert to_csv([failed]).splitlines()[1] == "x,0,0,0,0.0,three steps in a row,,,,"


@pytest.mark.parametrize(
    ("gpus", "jobs", "ranks", "places", "sharing"),
    [
        (2, 3, 1, [0, 1, 0], 2),
        (4, 2, 2, [0, 1, 2, 3], 1),
        (3, 2, 2, [0, 1, 2, 0], 2),
        (1, 5, 1, [0] * 5, 5),
        # each rank of a group has its own number where there are no GPUs, or too few
        (0, 2, 2, [0, 1, 0, 1], 2),
        (1, 1, 2, [0, 1], 1),
    ],
)
def test_worker_processes_are_spread_over_all_gpus(monkeypatch, gpus, jobs, ranks, places, sharing):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assigned = [assigned_gpu(process, ranks, jobs * ranks) for process in range(jobs * ranks)]
    assert assigned == [(place, sharing) for place in places]


def fail(task, _data, ranks):
    """A task that ends one rank, or raises on one; the other waits for ever."""
    if ranks.rank == 1 and task == "die":
        os._exit(9)
    if ranks.rank == 1:
        raise FileNotFoundError(task)
    torch.multiprocessing.Event().wait()


@pytest.mark.parametrize(("task", "reason"), [("die", "without a word"), ("x/y", "FileNotFoundError: x/y")])
def test_any_rank_that_ends_ends_the_comparison(tmp_path, served, task, reason):
    with pytest.raises(RuntimeError, match=rf"a process of .*crew-0\.log ended: {reason}"):
        list(run_parallel(fail, [task], int, tmp_path, jobs=1, ranks=2))
    assert set(multiprocessing.active_children()) <= served


def interrupt(parent, _data, _ranks):
    os.kill(parent, 15)
    torch.multiprocessing.Event().wait()


def test_a_signal_ends_worker_processes(tmp_path, served):
    assert list(run_parallel(interrupt, [os.getpid()], int, tmp_path, jobs=1)) == [15]
    assert set(multiprocessing.active_children()) <= served


def announce(pipe, _data, _ranks):
    os.write(os.open(pipe, os.O_WRONLY), b"x")
    torch.multiprocessing.Event().wait()


def announced(_, pipe, folder):
    context = server()
    multiprocessing.get_context = lambda _: context
    list(run_parallel(announce, [pipe], int, folder, jobs=1))


def test_worker_processes_end_with_their_parent(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with fresh(1, announced, pipe, tmp_path) as (parent,), pipe.open("rb", buffering=0) as reading:
        assert reading.read(1) == b"x"
        parent.kill()
        # the end of the file: no process holds the other end of the pipe
        assert reading.read(1) == b""


# --- arguments


OVERRIDDEN = {
    "compare": ([], ["train.accumulate=2", "train.minutes=1.0", "train.epoch_steps=2", "train.retain=0"]),
    "compare --losses": (["--losses"], ["loss.backend=dense", "loss.exchange=ring", "train.minutes=1.0"]),
    "compare --batches": (
        ["--batches", "16"],
        [
            "train.batch=32",
            "train.epoch_steps=2",
            "train.minutes=1.0",
            "optim.rate_scaling=sqrt",
            "optim.base_batch=32",
        ],
    ),
}


@pytest.mark.parametrize("comparison", OVERRIDDEN)
def test_keys_that_a_comparison_sets_are_reported_of_a_recipe_and_refused_of_an_override(
    tmp_path, capsys, caplog, monkeypatch, comparison
):
    monkeypatch.setattr(sweep, "compare", lambda *_, **__: Comparison(tmp_path, "made", None))
    options, words = OVERRIDDEN[comparison]
    recipe = write_recipe(tmp_path)
    rest = ["--runs", str(tmp_path / "runs"), *options]
    # the rule of the rate and its base go together
    together = [word for word in words if word.startswith("optim")]
    for word in words:
        overrides = together if word in together else [word]
        assert main(["compare", str(recipe), *overrides, *rest]) == 2
        key = overrides[0].partition("=")[0]
        assert last_error(capsys) == f"{overrides[0]}: {key}: has no effect: {comparison} sets it itself; leave it out"
    recipe.write_text(to_toml(load_any_recipe(recipe, words)))
    caplog.clear()
    assert main(["compare", str(recipe), *rest]) == 0
    keys = ", ".join(word.partition("=")[0] for word in words)
    assert [one for one in caplog.messages if "itself" in one] == [
        f"{recipe}: {comparison} sets {keys} itself: the recipe's own values are not used"
    ]
    # defaults, and values that the comparison sets too, are no loss
    recipe.write_text(to_toml(load_any_recipe(write_recipe(tmp_path), ["train.retain=1", "train.batch=256"])))
    caplog.clear()
    assert main(["compare", str(recipe), *rest]) == 0
    assert not [one for one in caplog.messages if "itself" in one]
