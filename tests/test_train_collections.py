"""Runs that learn from tar shards: they learn, they count what they skip, they go on bit for bit."""

import json
import signal

import pytest
import torch
from test_train_resume import killed
from tiny_runs import interrupted, left, same_run, tiny_recipe, write_pictures, write_shards

from contrastile.train import loop
from contrastile.train.log import read_metrics
from contrastile.train.loop import run_recipe


def shards_recipe(folder, *overrides):
    write_pictures(folder)
    return tiny_recipe(folder, f"data.source={write_shards(folder)}", "train.batch=16", *overrides)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    recipe = shards_recipe(folder, "save.steps=4", "train.examples=240")
    return recipe, run_recipe(recipe, folder / "runs").folder


def test_a_run_learns_from_tar_shards(tmp_path):
    recipe = shards_recipe(tmp_path, "train.examples=800", "data.augment=false")
    losses = [
        line["loss"]
        for line in read_metrics(run_recipe(recipe, tmp_path / "runs").folder / "metrics.jsonl")
        if line["kind"] == "step"
    ]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_a_collection_is_evaluated_and_reported(undisturbed):
    _, folder = undisturbed
    tests = [row["test"] for row in json.loads((folder / "evaluation.json").read_text())]
    assert tests[0] == "held-out pairs, picture → name"
    assert "held-out pairs, zero-shot among all held-out names" in tests
    assert (folder / "report.html").is_file()


def test_a_run_killed_within_an_epoch_resumes_bit_identically(undisturbed, tmp_path):
    recipe, whole = undisturbed
    patience = 0.3
    while not killed(recipe, tmp_path, patience):
        patience *= 1.4
    same_run(tmp_path / recipe.name, whole)


def test_counts_of_skipped_pairs_resume(tmp_path, caplog):
    recipe = shards_recipe(tmp_path, "data.max_bad_fraction=1.0", "train.examples=160")
    (tmp_path / "B-left.png").write_bytes(b"<html>")
    (tmp_path / "H-low.png").write_bytes(b"<html>")
    write_shards(tmp_path)
    whole = run_recipe(recipe, tmp_path / "whole").folder
    with interrupted(at=7):
        run_recipe(recipe, tmp_path / "runs")
    again = run_recipe(recipe, tmp_path / "runs", resume=True).folder
    same_run(again, whole)
    counts = [json.loads((folder / "run.json").read_text())["skipped"] for folder in (whole, again)]
    # of several epochs, and of two broken images
    assert counts == [{"broken picture": 2}] * 2
    assert "skipped: 2 \u00d7 broken picture" in (again / "report.html").read_text()
    assert "images of the collection that were skipped in training: broken picture: " in caplog.text


def test_the_crop_is_not_drawn_without_augmentation(tmp_path):
    recipe = shards_recipe(tmp_path, "train.examples=32")
    plain = recipe.model_copy(update={"data": recipe.data.model_copy(update={"augment": False})})
    bent, straight = (run_recipe(one, tmp_path / name).folder for one, name in ((recipe, "a"), (plain, "b")))
    weights = [left(folder)[0]["image.projection.weight"] for folder in (bent, straight)]
    assert not torch.equal(*weights)


def test_a_changed_collection_is_refused_on_resume(undisturbed, tmp_path, monkeypatch):
    recipe = shards_recipe(tmp_path, "train.examples=64")
    real = loop.step
    monkeypatch.setattr(loop, "step", lambda *arguments: signal.raise_signal(signal.SIGINT) or real(*arguments))
    run_recipe(recipe, tmp_path / "runs")
    write_shards(tmp_path)
    with pytest.raises(ValueError, match="`data` must be the pairs and the tokens that the run began with"):
        run_recipe(recipe, tmp_path / "runs", resume=True)
