"""A locked tower that sees each picture once: the run that sees them every time, from tables and shards, on ranks."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refusal
from test_train_ranks import _steps, _trained
from tiny_runs import tiny_recipe, weights, write_shards

import contrastile
from contrastile.cli.main import main
from contrastile.models.small import ConvTower
from contrastile.models.towers import Projected
from contrastile.train import batch_builder as module
from contrastile.train import loop
from contrastile.train.batch_builder import FeatureTable
from contrastile.train.image_text import ImageText
from contrastile.train.loop import run_recipe
from contrastile.train.state import TrainResult

LOCKED = ("model.locked=['image']", "data.augment=false", "train.examples=160", "evaluate.every=1.0")
ONCE = "model.precompute=true"


def sources(folder: Path, shards: bool) -> list[str]:
    if not shards:
        return []
    return [f"data.source='{write_shards(folder)}'", "data.channels=1", "data.max_bad_fraction=0.2"]


FEW = {"PART": 9, "CHUNK": 4}


@pytest.fixture
def few(monkeypatch):
    """Pictures in parts of nine and stretches of four."""
    for name, count in FEW.items():
        monkeypatch.setattr(module, name, count)


def main_in_few(_rank, words):
    """A rank's process has constants of its own."""
    vars(module).update(FEW)
    return main(words)


@pytest.mark.parametrize(
    ("precision", "shards"), [("float32", False), ("float64", True), ("bf16", False), ("fp16", True)]
)
def test_cached_features_train_like_encoded_pictures(few, tmp_path, shards, precision):
    words = (*LOCKED, *sources(tmp_path, shards), f"train.precision={precision}")
    live = run_recipe(tiny_recipe(tmp_path, *words), tmp_path / "live").folder
    once = run_recipe(tiny_recipe(tmp_path, *words, ONCE), tmp_path / "once").folder
    near = {"float32": 1e-5, "float64": 1e-12, "bf16": 2e-2, "fp16": 1e-2}[precision]
    for one, other in zip(_steps(live), _steps(once), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=near)
        assert other["scale"] == pytest.approx(one["scale"], rel=near)
    own, others = weights(live), weights(once)
    for name in own:
        if name.startswith("image.tower"):
            assert torch.equal(own[name], others[name])
        elif precision == "float32":
            torch.testing.assert_close(own[name], others[name], rtol=1e-3, atol=1e-4)
        elif precision == "float64":
            torch.testing.assert_close(own[name], others[name], rtol=1e-10, atol=1e-12)
    # the finished run sees pictures as any other
    assert contrastile.load(once).encode_image(torch.zeros(2, 1, 16, 16, dtype=torch.uint8)).shape == (2, 16)


def test_no_picture_is_encoded_in_a_step_and_the_next_run_encodes_none(few, tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path, *LOCKED, ONCE)
    seen, stepping, forward, step = [], [], Projected.forward, loop.step

    def watched(self, *inputs, ahead=False):
        if stepping and self.tower.__class__ is ConvTower:
            seen.append((inputs[0].ndim, ahead))
        return forward(self, *inputs, ahead=ahead)

    def stepped(*arguments):
        stepping.append(1)
        try:
            return step(*arguments)
        finally:
            stepping.pop()

    monkeypatch.setattr(Projected, "forward", watched)
    monkeypatch.setattr(loop, "step", stepped)
    run_recipe(recipe, tmp_path / "runs")
    assert set(seen) == {(2, True)}
    monkeypatch.setattr(module, "_encode", None)
    ImageText.open(recipe)
    # other weights, other features
    with pytest.raises(TypeError):
        ImageText.open(recipe.model_copy(update={"seed": 5}))


def test_parts_made_before_an_interruption_stay(few, tmp_path, monkeypatch):
    recipe, real, calls = tiny_recipe(tmp_path, *LOCKED, ONCE), module._encode, []

    def encoded(*arguments):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(module, "_encode", encoded)
    with pytest.raises(KeyboardInterrupt):
        ImageText.open(recipe)
    # a part of nine has three stretches; the second part was begun
    calls[:] = [1] * 10
    ImageText.open(recipe)
    assert len(calls) - 10 == sum(-(-len(range(at, min(at + 9, 32))) // 4) for at in range(9, 32, 9))


def test_pairs_whose_picture_cannot_be_read_are_left_out_and_counted(few, tmp_path):
    words = [*LOCKED, ONCE]
    source = write_shards(tmp_path)
    for letter in "AB":
        (tmp_path / f"{letter}-left.png").write_bytes(b"<html>")
    write_again = write_shards(tmp_path)
    assert write_again == source
    words += [f"data.source='{source}'", "data.max_bad_fraction=0.2"]
    job = ImageText.open(tiny_recipe(tmp_path, *words))
    told = json.loads(json.dumps(job.metadata_so_far(TrainResult())))
    assert told["skipped"] == {"broken picture": 2}
    stream, rows = job.stream, job.rows - len(job.bundle.pairs)
    titles = stream.captions(rows.tolist())
    assert len(titles) == told["pairs"]
    assert not {"letter A left", "letter B left"} & set(titles)
    with pytest.raises(ValueError, match=r"`source` must have at most 5% bad pairs; got \d of 18"):
        ImageText.open(tiny_recipe(tmp_path, *words[:-1]))


@pytest.mark.parametrize("shards", [False, True])
def test_non_finite_features_are_refused(few, tmp_path, monkeypatch, shards):
    def encoded(*arguments):
        features = real(*arguments)
        features[1, 2] = np.inf
        return features

    real = module._encode
    monkeypatch.setattr(module, "_encode", encoded)
    recipe = tiny_recipe(tmp_path, *LOCKED, ONCE, *sources(tmp_path, shards))
    assert refusal(ImageText.open, recipe) == (
        "`model.image` must give finite features; got others for 1 of 4 images. Check its weights and train.precision."
    )


@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_ranks_with_cached_features_have_the_curve_of_one_process(few, tmp_path, parallel):
    (tmp_path / "alone").mkdir()
    words = (*LOCKED, ONCE)
    alone = run_recipe(tiny_recipe(tmp_path / "alone", *words), tmp_path / "alone" / "runs").folder
    together = _trained(tmp_path, 2, *words, f"train.parallel={parallel}", run=main_in_few)
    for one, other in zip(_steps(alone), _steps(together), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
    # each part was made once
    assert len(list((tmp_path / "cache").glob("features-*"))) == 4


def test_a_feature_table_reads_rows_from_their_parts():
    every = np.arange(40, dtype=np.float32).reshape(20, 2)
    kept = FeatureTable([every[:8], every[8:16], every[16:]], 8)
    rows = np.array([19, 0, 8, 7, 19, 15])
    assert torch.equal(kept[rows], torch.from_numpy(every[rows]))
    assert kept[rows[:0]].shape == (0, 2)
