"""Comparing ways to spend a memory on a retriever: what the ways are, that every trial is made, what is written."""

import csv
import json
import math
from types import SimpleNamespace

import pytest
import torch
from tiny_texts import tiny_retriever, write_text_recipe

from contrastile.cli.main import main
from contrastile.train import crews
from contrastile.train.facts import Trained
from contrastile.train.log import Metrics, read_metrics
from contrastile.train.loop import train
from contrastile.train.retriever import compare, updates
from contrastile.train.retriever.compare import compare_retriever, told, told_at, ways
from contrastile.train.retriever.feed import open_text_materials
from contrastile.train.retriever.findings import Findings, Trial, Way, as_csv, tables
from contrastile.train.retriever.job import Retrieval
from contrastile.train.retriever.run import build_retriever_run
from contrastile.train.retriever.updates import Speed, Update, by_length, draw_speeds, fitting_batch, time_updates
from contrastile.train.trials import Comparison

MIB = 2**20


@pytest.fixture
def four_fit(monkeypatch):
    """Whatever they take, four queries fit."""
    monkeypatch.setattr(compare, "fitting_batch", lambda *_: 4)
    monkeypatch.setattr(updates, "UPDATES", 1)


def lines_of(path):
    return csv.DictReader(path.read_text().splitlines())


def by_way(path):
    return [(row["way"], row["batch"], row["seed"]) for row in lines_of(path)]


def test_every_way_is_run_with_every_seed_beside_bm25(tmp_path, four_fit):
    recipe = tiny_retriever(tmp_path, "train.examples=90")
    got = compare_retriever(recipe, tmp_path, memory=64 * MIB, batches=[8, 45], updates=[2, 8], seeds=2)
    folder = tmp_path / "tiny-compare"
    assert got.folder == folder
    assert by_way(folder / "compare.csv") == [
        *((way, batch, seed) for way, batch in WAYS for seed in ("0", "1")),
        ("BM25", "", ""),
    ]
    rows = list(lines_of(folder / "compare.csv"))
    assert [row["steps"] for row in rows[:-1:2]] == ["23", "12", "12", "2"]
    assert {row["queries"] for row in rows[:-1]} == {"90"}
    assert len({row["held-out queries nDCG@10"] for row in rows}) > 2
    page = (folder / "compare.md").read_text()
    assert "plain steps of 4 queries, the most of which fit into 64 MiB" in page
    assert got.table in page
    assert got.table.count(" ± ") == 5 * len(WAYS)
    assert "| BM25 |" in got.table
    # every trial's curve is there
    steps = [line for line in read_metrics(folder / "cached-45-1.jsonl") if line["kind"] == "step"]
    assert [line["batch"] for line in steps] == [45, 45]
    sizes = [row["way"] + row["queries"] for row in lines_of(folder / "updates.csv")]
    assert all(
        row["chip"] and row["versions"] for name in ("compare", "updates") for row in lines_of(folder / f"{name}.csv")
    )
    assert sizes == ["plain2", "plain8", "accumulated2", "accumulated8", "cached2", "cached8"]
    assert (folder / "updates.svg").read_text().count("queries per update") == 1


WAYS = [("sequential", "4"), ("accumulated", "8"), ("cached", "8"), ("cached", "45")]


def test_trials_side_by_side_are_those_one_by_one(tmp_path, four_fit):
    recipe = tiny_retriever(tmp_path, "train.examples=64")
    found = []
    for jobs in (1, 2):
        folder = tmp_path / str(jobs)
        compare_retriever(recipe, folder, memory=MIB, batches=[16], seeds=1, jobs=jobs)
        rows = list(lines_of(folder / "tiny-compare" / "compare.csv"))
        found.append(
            [{name: row[name] for name in row if "seconds" not in name and "bytes" not in name} for row in rows]
        )
    assert found[0] == found[1]


def test_what_was_interrupted_goes_on(tmp_path, four_fit, monkeypatch):
    recipe, words = tiny_retriever(tmp_path, "train.examples=64"), {"memory": MIB, "batches": [16]}
    folder = compare_retriever(recipe, tmp_path, seeds=1, **words).folder
    head, *lines = (folder / "compare.csv").read_text().splitlines()
    assert len(lines) == 4
    lines[0] = lines[0].replace("sequential,4,0,16,64,", "sequential,4,0,16,6400,")
    (folder / "compare.csv").write_text("\n".join([head, lines[0], lines[3], ""]))
    monkeypatch.setattr(compare, "bm25", None)
    table = compare_retriever(recipe, tmp_path, seeds=1, resume=True, **words).table
    rows = list(lines_of(folder / "compare.csv"))
    assert [(row["way"], row["queries"]) for row in rows] == [
        ("sequential", "6400"), ("accumulated", "64"), ("cached", "64"), ("BM25", ""),
    ]  # fmt: skip
    assert all(row["chip"] and row["versions"] for row in rows)
    assert "| BM25 |" in table
    steps = [line for line in read_metrics(folder / "cached-16-0.jsonl") if line["kind"] == "step"]
    assert len(steps) == 4
    with pytest.raises(ValueError) as caught:
        compare_retriever(recipe, tmp_path, memory=MIB, batches=[32], seeds=1, resume=True)
    assert str(caught.value) == (
        "`--resume` must find ways of this comparison; got accumulated of 16. "
        "Give the memory and the batches that it began with, or begin anew."
    )


def test_a_process_that_is_killed_is_an_error_and_no_endless_wait(tmp_path, four_fit, monkeypatch):
    begin = crews.Crew.begin

    def begin_and_lose(crew, task):
        begin(crew, task)
        crew._processes[0].kill()

    monkeypatch.setattr(crews.Crew, "begin", begin_and_lose)
    with pytest.raises(RuntimeError, match=r"a process of .*crew-[01]\.log ended: "):
        compare_retriever(tiny_retriever(tmp_path), tmp_path, memory=MIB, batches=[16], seeds=1, jobs=2)


def test_a_cached_way_is_the_plain_one_of_that_batch(tmp_path):
    """Sequential steps of 8, and cached ones of 8 with the sub-batches of 2, learn the same."""
    recipe = tiny_retriever(tmp_path, "train.examples=64", "model.dimensions=[4]")
    curves = []
    for way in (Way("sequential", 8, 1, 8, cached=False), Way("cached", 8, 1, 2, cached=True)):
        one = told(recipe, way)
        materials, path = open_text_materials(one), tmp_path / f"{way.name}.jsonl"
        with Metrics(path) as metrics:
            train(Retrieval.open(one), metrics, Trained())
        assert len(materials.texts.queries) == 60
        curves.append([line["loss"] for line in read_metrics(path) if line["kind"] == "step"])
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


def test_the_ways_keep_to_what_a_plain_step_sees(tmp_path):
    recipe = tiny_retriever(tmp_path)
    every = ways(4, [8, 32], MIB)
    assert [(way.name, way.batch, way.accumulate) for way in every] == [
        ("sequential", 4, 1),
        ("accumulated", 8, 2),
        ("cached", 8, 1),
        ("cached", 32, 1),
    ]
    plain, _, cached, _ = (told(recipe, way) for way in every)
    # one positive and two negatives for each of 4 queries, 16 tokens each
    assert (plain.train.sub_batch.query, plain.train.sub_batch.passage, plain.train.retain) == (4, 12, 1)
    assert cached.train.sub_batch.words("passage", 16) == {"sub_batch_tokens": 4 * 3 * 16}
    assert cached.train.sub_batch.at_once("query", 6) == 32
    assert (cached.train.retain, cached.evaluate.bm25, cached.train.minutes) == (0, False, None)
    assert told_at(recipe, "accumulated", 64, 4).train.accumulate == 16
    assert told_at(recipe, "cached", 64, 4).train.accumulate == 1


def test_the_rate_is_that_of_the_recipes_own_rule(tmp_path, four_fit):
    words = ["train.examples=64", "optim.learning_rate=1e-2", "optim.rate_scaling=sqrt", "optim.base_batch=16"]
    compare_retriever(tiny_retriever(tmp_path, *words), tmp_path, memory=MIB, batches=[16, 32], seeds=1)
    rows = list(lines_of(tmp_path / "tiny-compare" / "compare.csv"))[:-1]
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx([0.5e-2, 1e-2, 1e-2, math.sqrt(2) * 1e-2])
    assert "the learning rate is\n0.01 · √(batch / 16)" in (tmp_path / "tiny-compare" / "compare.md").read_text()
    # the rate that the steps had, behind the warm-up
    steps = [one for one in read_metrics(tmp_path / "tiny-compare" / "sequential-4-0.jsonl") if one["kind"] == "step"]
    assert max(one["learning_rate"] for one in steps) == pytest.approx(0.5e-2, rel=0.05)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"batches": [8, 4]}, "`batches` must be rising sizes of at least 2; got [8, 4]. Such as 128 512 4096."),
        ({"seeds": 0}, "`seeds` must be at least 1; got 0. Three show a spread."),
        ({"jobs": 0}, "`jobs` must be at least 1; got 0. So many runs are made at a time."),
        (
            {"batches": [4]},
            "`memory` must hold a plain step of 1 query, but not of 4, the first batch; got 1 MiB, into which 4 fit. "
            "Give less, or larger batches.",
        ),
    ],
)
def test_mistakes_are_told(tmp_path, four_fit, words, sentence):
    asked = {"memory": MIB, "batches": [8], "seeds": 1, "jobs": 1, **words}
    with pytest.raises(ValueError) as caught:
        compare_retriever(tiny_retriever(tmp_path), tmp_path, **asked)
    assert str(caught.value) == sentence


class Counted:
    """A balance that shows what the batch says."""

    def __init__(self, device):
        self.device = device

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self.bytes = 100 * Counted.queries


def test_the_largest_power_of_two_that_fits_is_found(tmp_path, monkeypatch):
    recipe = tiny_retriever(tmp_path)
    materials = open_text_materials(recipe)
    real = updates.step

    def seen(job, optimizer, parts):
        Counted.queries = len(parts[0])
        assert len(parts) == 1
        return real(job, optimizer, parts)

    monkeypatch.setattr(updates, "Weighed", Counted)
    monkeypatch.setattr(updates, "step", seen)
    monkeypatch.setattr(updates, "UPDATES", 1)
    assert fitting_batch(recipe, materials, 799) == 4
    assert fitting_batch(recipe, materials, 800) == 8
    assert fitting_batch(recipe, materials, 99) == 0
    # there are 47 queries to train on
    assert fitting_batch(recipe, materials, 10**9) == 32

    def full(job, optimizer, parts):
        if len(parts[0]) > 2:
            raise torch.OutOfMemoryError
        return seen(job, optimizer, parts)

    monkeypatch.setattr(updates, "step", full)
    assert fitting_batch(recipe, materials, 10**9) == 2


def test_the_longest_passages_are_tried(tmp_path):
    materials = open_text_materials(tiny_retriever(tmp_path))
    queries, lengths = materials.texts.queries, materials.passages.lengths
    longest = [max(int(lengths[row]) for row in (*queries[place].positives, *queries[place].negatives))
               for place in by_length(materials).tolist()]  # fmt: skip
    assert longest == sorted(longest, reverse=True)
    assert len(longest) == len(materials.texts.splits["train"])


def test_an_update_is_timed_and_weighed(tmp_path):
    recipe = tiny_retriever(tmp_path)
    update = time_updates(told(recipe, Way("cached", 8, 1, 4, cached=True)), open_text_materials(recipe))
    assert 0 < update.seconds < 10
    assert update.bytes > 0


def test_an_update_weighs_the_same_whatever_was_made_before(tmp_path):
    recipe = tiny_retriever(tmp_path, "model.both.width=256")
    materials = open_text_materials(recipe)

    def weighed(name, queries, at_once):
        return time_updates(told(recipe, Way(name, queries, 1, at_once, name == "cached")), materials).bytes

    plain, small, cached, again = (
        weighed("plain", 32, 32), weighed("plain", 4, 4), weighed("cached", 32, 4), weighed("plain", 32, 32)
    )  # fmt: skip
    assert plain == again
    model = build_retriever_run(recipe, materials.tokenizer).model
    # gradients, and both of AdamW's averages
    assert 3 * sum(4 * weight.numel() for weight in model.parameters()) < small < plain
    assert small < cached


def test_what_an_optimizer_keeps_is_weighed_where_there_is_time_for_one_update_only(tmp_path, monkeypatch):
    recipe = tiny_retriever(tmp_path, "model.both.width=256")
    way, materials = told(recipe, Way("plain", 8, 1, 8, cached=False)), open_text_materials(recipe)
    rows = by_length(materials)[:8]
    several = time_updates(way, materials, rows).bytes
    monkeypatch.setattr(updates, "SECONDS", 0.0)
    assert time_updates(way, materials, rows).bytes == several


def test_an_update_leaves_the_terminal_alone(tmp_path, capfd):
    recipe = tiny_retriever(tmp_path)
    materials = open_text_materials(recipe)
    capfd.readouterr()
    time_updates(told(recipe, Way("cached", 8, 1, 4, cached=True)), materials)
    assert capfd.readouterr() == ("", "")


def test_an_update_counts_when_it_is_made_again(tmp_path, monkeypatch):
    made, clock = [], [0.0]

    def step(job, optimizer, asked):
        # what is met for the first time takes as long as a compiler does
        clock[0] += 0.02 if asked in made else 0.1
        made.append(asked)

    monkeypatch.setattr(updates.Retrieval, "parts", lambda job, rows, number, ranks: (number, rows.tolist()))
    monkeypatch.setattr(updates, "step", step)
    monkeypatch.setattr(updates, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    recipe = tiny_retriever(tmp_path)
    update = time_updates(told(recipe, Way("cached", 8, 1, 4, cached=True)), open_text_materials(recipe))
    assert update.seconds == pytest.approx(0.02)
    # before them one of a single query, for what the optimizer keeps
    assert len(made[0][1]) == 1
    assert made[1:7] == made[7:]
    assert len({tuple(rows) for _, rows in made[1:]}) == 6


def test_a_failed_trial_is_counted_and_told(tmp_path):
    way, other = Way("sequential", 4, 1, 4, cached=False), Way("cached", 8, 1, 4, cached=True)
    found = {"held-out queries": dict.fromkeys(("@1", "@5", "@20", "nDCG@10"), 0.5)}
    updates = {way: Update(0.5, MIB), other: Update(0.25, MIB)}
    findings = Findings(tiny_retriever(tmp_path), MIB, updates, jobs=1, origin={})
    findings.trials[:] = [
        Trial(other, 0, 5, 40, 0.1, 1.0, {}, "the loss must stay a finite number"),
        Trial(way, 0, 10, 40, 0.1, 1.0, found),
        Trial(other, 1, 5, 40, 0.1, 1.0, found),
    ]
    shown = tables(findings)
    assert "| sequential | 4 | 10 | 50.0 | 50.0 | 50.0 |  | 50.0 | 5.0 | 1 MiB |" in shown
    assert "| cached (1 of 2 failed) | 8 | 5 | 50.0 |" in shown
    assert as_csv(findings).splitlines()[2].endswith("the loss must stay a finite number,,,,")


def test_the_figure_has_a_line_for_each_way_and_the_same_bytes():
    found = [Speed(way, size, Update(size / 100, 1)) for way in ("plain", "cached") for size in (64, 4096)]
    assert draw_speeds(found) == draw_speeds(found)
    assert "accumulated" not in draw_speeds(found)
    assert "4,096" in draw_speeds(found)


def test_the_command_compares_retrievers(tmp_path, four_fit, capsys):
    words = ["compare", str(write_text_recipe(tmp_path)), "train.examples=32", "--memory", "64MiB", "--batches", "8"]
    assert main([*words, "--seeds", "1", "--runs", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr().out
    assert "| accumulated | 8 | 4 |" in said
    assert f"results: {tmp_path / 'runs' / 'tiny-compare'}" in said
    rows = (tmp_path / "runs" / "tiny-compare" / "recipe.toml").read_text()
    assert f"workspace = {4 * MIB}" in rows
    assert not (tmp_path / "runs" / "tiny-compare" / "updates.csv").exists()


def test_a_comparison_without_bm25_has_no_row_of_it(tmp_path, four_fit, monkeypatch, capsys):
    monkeypatch.setattr(compare, "BM25", None)
    words = ["train.examples=32", "evaluate.bm25=false", "--memory", "64MiB", "--batches", "8", "--seeds", "1"]
    assert main(["compare", str(write_text_recipe(tmp_path)), *words, "--runs", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr().out
    assert "| accumulated | 8 | 4 |" in said
    assert "BM25" not in said


def test_what_the_comparison_sets_itself_is_said_of_a_recipe_and_refused_of_an_override(
    tmp_path, caplog, capsys, monkeypatch
):
    monkeypatch.setattr(compare, "compare_retriever", lambda *_, **__: Comparison(tmp_path, "made", None))
    recipe, runs = write_text_recipe(tmp_path), ["--runs", str(tmp_path / "runs")]
    assert main(["compare", str(recipe), *runs]) == 0
    keys = "train.batch, train.sub_batch, train.retain, evaluate.every"
    assert caplog.messages == [f"{recipe}: compare of retrievers sets {keys} itself, whatever is said there"]
    capsys.readouterr()
    for word in ("train.sub_batch.query=4", "evaluate.every=0.2", "train.accumulate=2", "train.minutes=1.0"):
        assert main(["compare", str(recipe), word, *runs]) == 2
        key = word.partition("=")[0].removesuffix(".query")
        assert capsys.readouterr().err.splitlines()[-1] == (
            f"{word}: {key}: has no effect: compare of retrievers sets it itself; leave it out"
        )


def test_each_kind_of_recipe_has_its_own_options(tmp_path, capsys):
    from tiny_runs import write_recipe

    (tmp_path / "pictures").mkdir()
    assert main(["compare", str(write_recipe(tmp_path / "pictures")), "--memory", "1GiB"]) == 2
    assert main(["compare", str(write_text_recipe(tmp_path)), "--losses"]) == 2
    assert main(["compare", str(write_text_recipe(tmp_path)), "--ranks", "2"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "`--memory` must be left out for this recipe; got 1GiB. It belongs to a retriever.",
        "`--losses` must be left out for this recipe; got True. It belongs to pictures and texts.",
        "`--ranks` must be left out for this recipe; got 2. It belongs to pictures and texts.",
    ]


def test_measures_are_those_of_an_evaluation(tmp_path, four_fit):
    """The line of a trial says what a run of its recipe and seed says of itself."""
    from contrastile.train.loop import run_recipe

    recipe = tiny_retriever(tmp_path, "train.examples=64")
    compare_retriever(recipe, tmp_path, memory=MIB, batches=[16], seeds=1)
    (row,) = [row for row in lines_of(tmp_path / "tiny-compare" / "compare.csv") if row["way"] == "cached"]
    one = told(recipe, Way("cached", 16, 1, 4, cached=True))
    (said, *_) = json.loads((run_recipe(one, tmp_path / "runs").folder / "evaluation.json").read_text())
    assert math.isclose(float(row["held-out queries @1"]), said["recall"]["1"])
    assert math.isclose(float(row["held-out queries nDCG@10"]), said["measures"]["nDCG@10"])
