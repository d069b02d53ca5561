"""`contrastile compare` of retrievers: the ways to spend a memory, the time and memory of updates, the files."""

import csv
import json
import math
import multiprocessing
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import server
from refusals import refusal
from tiny_texts import tiny_retriever, write_text_recipe

from contrastile.cli.main import main
from contrastile.experiments import retriever_memory, sweep
from contrastile.experiments.results import Result, to_csv
from contrastile.experiments.retriever_memory import (
    RetrieverMemory,
    Update,
    by_length,
    draw_updates,
    fitting_batch,
    time_updates,
    update_overrides,
)
from contrastile.experiments.sweep import Comparison, compare, overridden
from contrastile.train.log import Metrics, read_metrics
from contrastile.train.loop import run_recipe, train
from contrastile.train.retriever.job import RetrieverJob
from contrastile.train.retriever.run import RetrieverRun, open_text_materials
from contrastile.train.state import TrainResult

MIB = 2**20


def let_four_fit(patch):
    """Four queries fit into any memory."""
    patch.setattr(retriever_memory, "fitting_batch", lambda *_: 4)
    patch.setattr(retriever_memory, "UPDATES", 1)


@pytest.fixture
def four_fit(monkeypatch):
    let_four_fit(monkeypatch)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A recipe and the folder of its comparison."""
    folder = tmp_path_factory.mktemp("compared")
    recipe = tiny_retriever(folder, "train.examples=64")
    with pytest.MonkeyPatch.context() as patch:
        let_four_fit(patch)
        return recipe, compare(study_of(recipe), folder).folder


def rows_of(path):
    return [*csv.DictReader(path.read_text().splitlines())]


def study_of(recipe, **others):
    return RetrieverMemory(recipe=recipe, **{"memory": MIB, "batches": [16], "seeds": 1, **others})


def way_of(recipe, way, batch, largest):
    return overridden(recipe, update_overrides(recipe, way, batch, largest))


def steps_of(path):
    return [line for line in read_metrics(path) if line["kind"] == "step"]


def test_every_way_is_run_with_every_seed_beside_bm25(tmp_path, four_fit):
    words = ["train.examples=90", "optim.learning_rate=1e-2", "optim.rate_scaling=sqrt", "optim.base_batch=16"]
    study = study_of(tiny_retriever(tmp_path, *words), memory=64 * MIB, batches=[8, 45], sizes=[2, 8], seeds=2)
    comparison = compare(study, tmp_path)
    folder = tmp_path / "tiny-compare"
    assert comparison.folder == folder
    rows = rows_of(folder / "compare.csv")
    ways = [("sequential", "4"), ("accumulated", "8"), ("cached", "8"), ("cached", "45")]
    assert [(row["way"], row["batch"], row["seed"]) for row in rows] == [
        *((*way, seed) for way in ways for seed in "01"),
        ("BM25", "", ""),
    ]
    assert [row["steps"] for row in rows[:-1:2]] == ["23", "12", "12", "2"]
    assert {row["queries"] for row in rows[:-1]} == {"90"}
    assert len({row["held-out queries nDCG@10"] for row in rows}) > 2
    # the rate follows the recipe's rule, and is that of the steps behind the warm-up
    rates = [float(row["learning_rate"]) for row in rows[:-1:2]]
    assert rates == pytest.approx([1e-2 * math.sqrt(batch / 16) for batch in (4, 8, 8, 45)])
    highest = max(step["learning_rate"] for step in steps_of(folder / "sequential-4-0.jsonl"))
    assert highest == pytest.approx(0.5e-2, rel=0.05)
    assert [step["batch"] for step in steps_of(folder / "cached-45-1.jsonl")] == [45, 45]
    page = (folder / "compare.md").read_text()
    assert "plain steps of 4 queries, the most of which fit into 64 MiB" in page
    assert "the learning rate is\n0.01 · √(batch / 16)" in page
    assert comparison.table in page
    assert comparison.table.count(" ± ") == 5 * len(ways)
    assert "| BM25 |" in comparison.table
    updates = rows_of(folder / "updates.csv")
    assert all(row["chip"] and row["versions"] for row in rows + updates)
    assert [row["way"] + row["queries"] for row in updates] == [
        "plain2", "plain8", "accumulated2", "accumulated8", "cached2", "cached8"
    ]  # fmt: skip
    assert (folder / "updates.svg").read_text().count("queries per update") == 1


def test_trials_side_by_side_have_the_results_of_trials_one_by_one(compared, tmp_path, four_fit, monkeypatch):
    recipe, alone = compared
    # processes that need not import anything; a comparison of batch sizes starts them as users do
    context = server()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    tables = []
    for folder in (alone, compare(study_of(recipe, jobs=2), tmp_path).folder):
        rows = rows_of(folder / "compare.csv")
        tables.append(
            [{name: row[name] for name in row if "seconds" not in name and "bytes" not in name} for row in rows]
        )
    assert tables[0] == tables[1]


def test_measures_are_those_of_an_evaluation(compared, tmp_path):
    """A line of compare.csv holds the evaluation of a run of its recipe and seed."""
    recipe, folder = compared
    (row,) = [row for row in rows_of(folder / "compare.csv") if row["way"] == "cached"]
    run = run_recipe(way_of(recipe, "cached", 16, 4), tmp_path / "runs")
    (evaluation, *_) = json.loads((run.folder / "evaluation.json").read_text())
    assert math.isclose(float(row["held-out queries @1"]), evaluation["recall"]["1"])
    assert math.isclose(float(row["held-out queries nDCG@10"]), evaluation["measures"]["nDCG@10"])


def test_an_interrupted_comparison_goes_on(compared, tmp_path, four_fit, monkeypatch):
    recipe, whole = compared
    study, folder = study_of(recipe), Path(shutil.copytree(whole, tmp_path / whole.name))
    head, *lines = (folder / "compare.csv").read_text().splitlines()
    assert len(lines) == 4
    lines[0] = lines[0].replace("sequential,4,0,16,64,", "sequential,4,0,16,6400,")
    (folder / "compare.csv").write_text("\n".join([head, lines[0], lines[3], ""]))
    monkeypatch.setattr(retriever_memory, "BM25", None)
    table = compare(study, tmp_path, resume=True).table
    rows = rows_of(folder / "compare.csv")
    assert [(row["way"], row["queries"]) for row in rows] == [
        ("sequential", "6400"), ("accumulated", "64"), ("cached", "64"), ("BM25", ""),
    ]  # fmt: skip
    assert (folder / "compare.csv").read_text().splitlines()[1] == lines[0]
    assert all(row["chip"] and row["versions"] for row in rows)
    assert "| BM25 |" in table
    assert len(steps_of(folder / "cached-16-0.jsonl")) == 4
    assert refusal(compare, study_of(study.recipe, batches=[32]), tmp_path, resume=True) == (
        "`--resume` must find ways of this comparison; got accumulated of 16. "
        "Give the memory and the batches that it began with, or begin anew."
    )


def test_a_cached_way_learns_as_the_plain_one_of_that_batch(tmp_path):
    recipe = tiny_retriever(tmp_path, "train.examples=64", "model.dimensions=[4]")
    curves = []
    for way, largest in (("plain", 8), ("cached", 2)):
        path = tmp_path / f"{way}.jsonl"
        job = RetrieverJob.open(way_of(recipe, way, 8, largest))
        with Metrics(path) as metrics:
            train(job, metrics, TrainResult())
        assert len(job.materials.texts.queries) == 60
        curves.append([step["loss"] for step in steps_of(path)])
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


def test_no_way_encodes_more_at_once_than_a_plain_step(tmp_path):
    recipe = tiny_retriever(tmp_path)
    plain, cached = way_of(recipe, "sequential", 4, 4), way_of(recipe, "cached", 8, 4)
    # one positive and two negatives for each of 4 queries, 16 tokens each
    assert (plain.train.sub_batch.query, plain.train.sub_batch.passage, plain.train.retain) == (4, 12, 1)
    assert cached.train.sub_batch.words("passage", 16) == {"sub_batch_tokens": 4 * 3 * 16}
    assert cached.train.sub_batch.at_once("query", 6) == 32
    assert (cached.train.retain, cached.evaluate.bm25, cached.train.minutes) == (0, False, None)
    accumulated = [way_of(recipe, way, 64, 4).train.accumulate for way in ("accumulated", "cached", "plain")]
    assert accumulated == [16, 1, 1]


def test_a_mistake_of_one_trial_is_found_before_updates_are_timed(tmp_path):
    recipe = tiny_retriever(tmp_path, "loss.queue=100")
    sentence = "way cached, batch 48: loss.queue: must have room for the keys of a step, 144 at most; got 100"
    assert refusal(compare, study_of(recipe, batches=[16, 48]), tmp_path / "runs") == sentence
    assert not (tmp_path / "runs").exists()


def test_a_memory_that_holds_the_first_batch_is_refused(tmp_path, four_fit):
    assert refusal(compare, study_of(tiny_retriever(tmp_path), batches=[4]), tmp_path) == (
        "`memory` must hold a plain step of 1 query, but not of 4, the first batch; got 1 MiB, into which 4 fit. "
        "Give less, or larger batches."
    )


class Counted:
    """A memory measurement that shows 100 bytes a query."""

    def __init__(self, device):
        self.device = device

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self.bytes = 100 * Counted.queries


def test_the_largest_power_of_two_that_fits_is_found(tmp_path, monkeypatch):
    recipe = tiny_retriever(tmp_path)
    materials = open_text_materials(recipe)
    real = retriever_memory.step

    def counted(job, optimizer, parts):
        Counted.queries = len(parts[0])
        assert len(parts) == 1
        return real(job, optimizer, parts)

    monkeypatch.setattr(retriever_memory, "Weighed", Counted)
    monkeypatch.setattr(retriever_memory, "step", counted)
    monkeypatch.setattr(retriever_memory, "UPDATES", 1)
    # there are 47 queries to train on
    sizes = {memory: fitting_batch(recipe, materials, memory) for memory in (99, 799, 800, 10**9)}
    assert sizes == {99: 0, 799: 4, 800: 8, 10**9: 32}

    def full(job, optimizer, parts):
        if len(parts[0]) > 2:
            raise torch.OutOfMemoryError
        return counted(job, optimizer, parts)

    monkeypatch.setattr(retriever_memory, "step", full)
    assert fitting_batch(recipe, materials, 10**9) == 2


def test_the_longest_passages_are_tried(tmp_path):
    materials = open_text_materials(tiny_retriever(tmp_path))
    queries, lengths = materials.texts.queries, materials.passages.lengths
    longest = [max(int(lengths[row]) for row in (*queries[place].positives, *queries[place].negatives))
               for place in by_length(materials).tolist()]  # fmt: skip
    assert longest == sorted(longest, reverse=True)
    assert len(longest) == len(materials.texts.splits["train"])


def test_the_memory_of_an_update_does_not_depend_on_earlier_ones(tmp_path, capfd):
    recipe = tiny_retriever(tmp_path, "model.both.width=256")
    materials = open_text_materials(recipe)
    capfd.readouterr()
    plain, small, cached, again = (
        time_updates(way_of(recipe, way, queries, largest), materials)
        for way, queries, largest in (("plain", 32, 32), ("plain", 4, 4), ("cached", 32, 4), ("plain", 32, 32))
    )
    assert plain.bytes == again.bytes
    assert plain.seconds > 0
    model = RetrieverRun.untrained(recipe, materials.tokenizer).model
    # gradients, and both of AdamW's averages
    assert 3 * sum(4 * weight.numel() for weight in model.parameters()) < small.bytes < plain.bytes
    assert small.bytes < cached.bytes
    # torch's profiler would write to the terminal
    assert capfd.readouterr() == ("", "")


def test_the_memory_of_a_single_update_includes_the_optimizers_state(tmp_path, monkeypatch):
    recipe = way_of(tiny_retriever(tmp_path, "model.both.width=256"), "plain", 8, 8)
    materials = open_text_materials(recipe)
    rows = by_length(materials)[:8]
    several = time_updates(recipe, materials, rows).bytes
    monkeypatch.setattr(retriever_memory, "SECONDS", 0.0)
    assert time_updates(recipe, materials, rows).bytes == several


def test_an_update_is_timed_when_it_is_made_again(tmp_path, monkeypatch):
    batches, clock = [], [0.0]

    def step(job, optimizer, batch):
        # a new batch takes as long as a compiler does
        clock[0] += 0.02 if batch in batches else 0.1
        batches.append(batch)

    monkeypatch.setattr(RetrieverJob, "parts", lambda job, rows, number, ranks: (number, rows.tolist()))
    monkeypatch.setattr(retriever_memory, "step", step)
    monkeypatch.setattr(retriever_memory, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    recipe = way_of(tiny_retriever(tmp_path), "cached", 8, 4)
    assert time_updates(recipe, open_text_materials(recipe)).seconds == pytest.approx(0.02)
    # one query first, for the optimizer's state; then six different batches, twice
    assert len(batches[0][1]) == 1
    assert batches[1:7] == batches[7:]
    assert len({tuple(rows) for _, rows in batches[1:]}) == 6


def test_a_failed_trial_is_counted(tmp_path):
    updates = {("sequential", "4"): Update(0.5, MIB), ("cached", "8"): Update(0.25, MIB)}
    measures = {f"held-out queries {name}": 0.5 for name in ("@1", "@5", "@20", "nDCG@10")}
    results = [
        Result({"way": "sequential", "batch": "4"}, 0, {"steps": 10}, measures),
        Result({"way": "cached", "batch": "8"}, 0, {"steps": 5}, failed="the loss must stay a finite number"),
        Result({"way": "cached", "batch": "8"}, 1, {"steps": 5}, measures),
    ]
    table = study_of(tiny_retriever(tmp_path), updates=updates).table(results)
    assert "| sequential | 4 | 10 | 50.0 | 50.0 | 50.0 |  | 50.0 | 5.0 | 1 MiB |" in table
    assert "| cached (1 of 2 failed) | 8 | 5 | 50.0 |" in table
    assert to_csv(results).splitlines()[2].endswith("the loss must stay a finite number,,,,")


def test_the_figure_has_a_line_for_each_way_and_the_same_bytes():
    updates = {(way, size): Update(size / 100, 1) for way in ("plain", "cached") for size in (64, 4096)}
    assert draw_updates(updates) == draw_updates(updates)
    assert "accumulated" not in draw_updates(updates)
    assert "4,096" in draw_updates(updates)


def test_the_command_compares_retrievers_without_bm25(tmp_path, four_fit, monkeypatch, capsys):
    monkeypatch.setattr(retriever_memory, "BM25", None)
    words = ["train.examples=32", "evaluate.bm25=false", "--memory", "64MiB", "--batches", "8", "--seeds", "1"]
    assert main(["compare", str(write_text_recipe(tmp_path)), *words, "--runs", str(tmp_path / "runs")]) == 0
    output = capsys.readouterr().out
    folder = tmp_path / "runs" / "tiny-compare"
    assert "| accumulated | 8 | 4 |" in output
    assert "BM25" not in output
    assert f"results: {folder}" in output
    # the loss keeps to a sixteenth of the memory, whatever the device has
    assert f"workspace = {4 * MIB}" in (folder / "recipe.toml").read_text().splitlines()
    assert not (folder / "updates.csv").exists()


def test_keys_that_the_comparison_sets_are_reported_of_a_recipe_and_refused_of_an_override(
    tmp_path, caplog, capsys, monkeypatch
):
    monkeypatch.setattr(sweep, "compare", lambda *_, **__: Comparison(tmp_path, "made", None))
    recipe, runs = write_text_recipe(tmp_path), ["--runs", str(tmp_path / "runs")]
    assert main(["compare", str(recipe), *runs]) == 0
    keys = "train.batch, train.sub_batch, train.retain, evaluate.every"
    assert caplog.messages == [
        f"{recipe}: compare of retrievers sets {keys} itself: the recipe's own values are not used"
    ]
    capsys.readouterr()
    for word in ("train.sub_batch.query=4", "evaluate.every=0.2", "train.accumulate=2", "train.epoch_steps=2"):
        assert main(["compare", str(recipe), word, *runs]) == 2
        key = word.partition("=")[0].removesuffix(".query")
        assert capsys.readouterr().err.splitlines()[-1] == (
            f"{word}: {key}: has no effect: compare of retrievers sets it itself; leave it out"
        )
