"""`contrastile compare --ways`: ways of one's own for equal time, and the mistakes of their file."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from refusals import refusal
from tiny_runs import tiny_recipe
from tiny_texts import write_text_recipe

from contrastile.cli.main import main
from contrastile.experiments import studies
from contrastile.experiments.results import Result
from contrastile.experiments.studies import Ways
from contrastile.train.batch_builder import open_data_bundle

WAYS = """
[ways]
infonce = []
own = ["loss.own_negatives=true", "optim.learning_rate=5e-3"]
"""


def compared(folder: Path, text: str, *more: str) -> tuple[int, Path]:
    (folder / "ways.toml").write_text(text)
    words = [str(write_text_recipe(folder)), "train.examples=64", "--ways", str(folder / "ways.toml")]
    return main(["compare", *words, "--runs", str(folder / "runs"), *more]), folder / "runs" / "tiny-ways"


def test_ways_of_a_retriever_are_compared_and_resumed(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies, "WARM", 1)
    monkeypatch.setattr(studies, "TIMED", 1)
    monkeypatch.setattr(studies, "ROUNDS", 1)
    code, folder = compared(tmp_path, WAYS, "--seeds", "1")
    assert code == 0
    rows = [*csv.DictReader((folder / "compare.csv").read_text().splitlines())]
    assert [row["way"] for row in rows] == ["infonce", "own"]
    assert rows[0]["examples"] == "64"
    paces = json.loads((folder / "paces.json").read_text())
    expected = max(1, round(64 * paces["infonce"][0] / paces["own"][0]))
    assert rows[1]["examples"] == str(expected)
    assert "held-out queries @1" in rows[0]
    page = (folder / "compare.md").read_text()
    assert '- infonce: `{"loss": {"kind": "infonce"' in page
    assert '"optim": {"learning_rate": 0.005}' in page.partition("- own: ")[2]
    capsys.readouterr()
    # a finished comparison has nothing left to do; another way of that name is refused
    assert compared(tmp_path, WAYS, "--seeds", "1", "--resume")[0] == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[0].startswith("| way | steps | examples | seconds | held-out ")
    assert "timing steps" not in output.err
    assert compared(tmp_path, WAYS.replace("own_negatives=true", "queue=100"), "--seeds", "1", "--resume")[0] == 2
    assert '`--ways` must leave "own" as it began; got ' in capsys.readouterr().err
    # the command that goes on with another recipe's comparison names its ways, its seeds and runs at a time
    (tmp_path / "ways.toml").write_text(WAYS)
    assert compared(tmp_path, WAYS, "--seeds", "1", "--jobs", "2", "--resume", "seed=5")[0] == 2
    again = capsys.readouterr().err.partition("go on with contrastile ")[2].partition(", or compare")[0]
    assert again.split() == [
        "compare", f"{folder}/recipe.toml", "--ways", f"{tmp_path}/ways.toml", "--seeds", "1", "--jobs", "2",
        "--runs", f"{tmp_path}/runs", "--resume",
    ]  # fmt: skip
    assert main(again.split()) == 0


def test_a_slower_way_sees_fewer_examples(tmp_path: Path) -> None:
    first = tiny_recipe(tmp_path)
    second = tiny_recipe(tmp_path, "loss.kind=siglip", "train.batch=32")
    warmed = tiny_recipe(tmp_path, "train.batch=32", "optim.warmup_steps=2")
    study = Ways(recipe=first, recipes={"a": first, "b": second}, seeds=2, paces={"a": 1.0, "b": 1.5})
    trials = study.trials(data := open_data_bundle(first))
    slow = replace(study, paces={"a": 1.0, "b": 20.0}, recipes={"a": first, "b": warmed})
    sentence = "way b: optim.warmup_steps: must be shorter than the run; got 2 steps, 32 of 24 examples"
    assert refusal(slow.check, data) == sentence
    assert [(trial.labels["way"], trial.seed) for trial in trials] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    train = trials[1].overrides["train"]
    assert (train.examples, train.batch, trials[1].overrides["loss"].kind) == (320, ((0.0, 32),), "siglip")
    results = [
        Result({"way": way}, seed, {"steps": 1, "examples": 480, "seconds": 1}, {"@1": recall})
        for way, recalls in (("a", (0.5, 0.6)), ("b", (0.51, 0.63)))
        for seed, recall in enumerate(recalls)
    ]
    assert study.table(results).splitlines()[-1] == "| b | 1 | 480 | 1 | 57.0 ± 8.5 % | +2.0 ± 12.7 |"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[ways]\na = []", "`--ways` must name a file with a table `ways` of two lists or more; got "),
        ("[ways]\na = []\nb = 3", "`--ways` must name a file with a table `ways` of two lists or more; got "),
        *((f"[ways]\na = []\n{name} = []",
           "`--ways` must name ways by a line of 1 to 100 bytes without / and |; got ")
          for name in ("'b/c'", "'b|c'", '"b\\nc"', "''", "'" + 51 * "é" + "'")),
        ("[ways]\n'a b' = []\na_b = []", '`--ways` must name ways whose files differ; got "a b" and "a_b". '),
        ("[ways]\na = []\nb = ['data.negatives=1']",
         "`--ways` must override keys of loss, optim, train; got 'data.negatives=1' in "),
        ("[ways]\na = []\nb = ['train.epochs=2.0']",
         "`--ways` must say nothing about the length; got 'train.epochs=2.0' in "),
        ("[ways]\na = []\nb = ['loss.kind=clip']", "loss.kind=clip: loss.kind: must be one of "),
    ],
)  # fmt: skip
def test_a_mistake_in_the_ways_has_its_sentence(tmp_path: Path, capsys: Any, text: str, sentence: str) -> None:
    assert compared(tmp_path, text)[0] == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (None, '"losses.toml" (No such file or directory)'),
        ("", '"losses.toml" (Is a directory)'),
        (b"\xff", '"losses.toml" (not a text in UTF-8)'),
        (b"[", '"losses.toml" (not valid TOML: '),
    ],
)
def test_a_file_of_ways_that_is_none_has_its_sentence(
    tmp_path: Path, monkeypatch: Any, capsys: Any, content: str | bytes | None, got: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content == "":
        Path("losses.toml").mkdir()
    elif isinstance(content, bytes):
        Path("losses.toml").write_bytes(content)
    words = [str(write_text_recipe(tmp_path)), "train.examples=64", "--ways", "losses.toml"]
    assert main(["compare", *words, "--runs", str(tmp_path / "runs")]) == 2
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert complaint.startswith(f"`--ways` must be a TOML file with a table `ways`; got {got}")
    assert complaint.endswith('. Such as clip = [] and siglip = ["loss.kind=siglip"].')
