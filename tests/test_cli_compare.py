"""`contrastile compare`: four ways at equal examples and at equal time, every trial written down."""

import csv

import pytest
from tiny_runs import tiny_recipe, write_recipe

from contrastile.cli.main import main
from contrastile.train.compare import table, ways
from contrastile.train.trials import Trial


def trial(budget, way, seed, recall):
    return Trial({"budget": budget, "way": way}, seed, examples=100, steps=10, seconds=2.0, recall={"faces": recall})


def test_the_ways_spend_the_memory_of_one_sub_batch(tmp_path):
    assert ways(tiny_recipe(tmp_path)) == {
        "sequential": {"batch": ((0.0, 16),), "accumulate": 1},
        "accumulated": {"batch": ((0.0, 48),), "accumulate": 3},
        "cached": {"batch": ((0.0, 48),), "accumulate": 1},
        "schedule": {"batch": ((0.0, 16), (0.5, 48)), "accumulate": 1},
    }


def test_a_recipe_without_a_large_batch_is_refused(tmp_path):
    with pytest.raises(ValueError) as caught:
        ways(tiny_recipe(tmp_path, "train.batch=16"))
    assert str(caught.value) == (
        "`train.batch` must have a size above train.sub_batch.image; got 16 and 16. There is nothing to compare."
    )


def test_no_seeds_are_refused(tmp_path, capsys):
    assert main(["compare", str(write_recipe(tmp_path)), "--seeds", "0"]) == 2
    assert capsys.readouterr().err == "`--seeds` must be at least 1; got 0. Three show a spread.\n"


def test_the_table_shows_mean_and_spread():
    said = table([trial("examples", "cached", seed, recall) for seed, recall in enumerate((0.5, 0.6, 0.7))])
    assert said.splitlines()[-1] == "| examples | cached | 10 | 100 | 2 | 60.0 ± 10.0 % |"


def test_one_seed_has_no_spread():
    assert table([trial("time", "cached", 0, 0.5)]).endswith("| 50.0 % |")


def test_every_way_is_run_both_ways_and_written_down(tmp_path, capsys):
    runs = tmp_path / "runs"
    recipe = write_recipe(tmp_path)
    assert main(["compare", str(recipe), "train.examples=96", "--seeds", "2", "--runs", str(runs)]) == 0
    with (runs / "tiny-compare" / "compare.csv").open() as file:
        trials = list(csv.DictReader(file))
    assert [(line["budget"], line["way"], line["seed"]) for line in trials] == [
        (budget, way, seed)
        for budget in ("examples", "time")
        for way in ("sequential", "accumulated", "cached", "schedule")
        for seed in "01"
    ]
    assert {line["examples"] for line in trials[:8]} == {"96"}
    assert "held-out pairs, picture → name" in trials[0]
    page = (runs / "tiny-compare" / "compare.md").read_text()
    assert "| time | schedule |" in page
    assert "over 2 seeds" in page
    assert page.split("\n\n")[2] in capsys.readouterr().out


def test_what_was_interrupted_goes_on(tmp_path, capsys):
    runs, recipe = tmp_path / "runs", write_recipe(tmp_path)
    command = ["compare", str(recipe), "train.examples=96", "--seeds", "1", "--runs", str(runs)]
    assert main(command) == 0
    folder = runs / "tiny-compare"
    head, *lines = (folder / "compare.csv").read_text().splitlines()
    # what is there is taken as it is; what was given up is made anew
    lines[0] = lines[0].replace("examples,sequential,0,96,", "examples,sequential,0,960,")
    (folder / "compare.csv").write_text("\n".join([head, *lines[:-3], ""]))
    given_up = folder / "time-schedule-0.jsonl"
    given_up.write_text('{"kind": "step", "of": "another run"}\n')
    capsys.readouterr()
    assert main([*command, "--resume"]) == 0
    told = capsys.readouterr()
    assert "| examples | sequential | 6 | 960 |" in told.out
    assert "is now" not in told.err
    with (folder / "compare.csv").open() as file:
        trials = list(csv.DictReader(file))
    assert [(line["budget"], line["way"]) for line in trials] == [
        (budget, way) for budget in ("examples", "time") for way in ("sequential", "accumulated", "cached", "schedule")
    ]
    assert all(line["chip"] and line["versions"] for line in trials)
    assert "another run" not in given_up.read_text()
    # another recipe is another comparison
    assert main([*command, "--resume", "optim.learning_rate=1e-4"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "`optim.learning_rate` must be what the run began with; got 0.0001. "
        f"It began with 0.003: go on with contrastile compare {folder}/recipe.toml --runs {runs} --resume, "
        "or compare anew, without --resume."
    )
