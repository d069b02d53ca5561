"""The retrievers' recipes that ship, at small sizes: a step with dropout on, runs on entries of DPR's form."""

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_texts import entries

import contrastile
from contrastile.losses import Hardness, Softmax
from contrastile.modules import InfoNCELoss
from contrastile.train.log import read_metrics
from contrastile.train.loop import run_recipe
from contrastile.train.recipe import load_any_recipe
from contrastile.train.retriever.config import RetrieverLoss
from contrastile.train.retriever.job import RetrieverJob

RECIPES = Path(__file__).parent.parent / "recipes"
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def shipped(name, folder, *overrides):
    """A recipe that ships, its encoders made small, on sixty questions of DPR's form."""
    (folder / "train.json").write_text(json.dumps(list(entries()), indent=1))
    recipe = load_any_recipe(RECIPES / f"{name}.toml", files=False)
    sides = [side for side in ("both", "query", "passage") if getattr(recipe.model, side) is not None]
    small = [f"model.{side}.config.{key}={value}" for side in sides for key, value in SMALL.items()]
    data = [f"data.source={folder}/train.json", f"data.cache={folder}/cache", "data.mined=0"]
    if not any(word.startswith("data.test=") for word in overrides):
        data.append("data.held_out=0.2")
    text = ["model.tokenizer.size=120", "model.tokenizer.length=24", "model.tokenizer.query_length=10"]
    return load_any_recipe(RECIPES / f"{name}.toml", [*small, *data, *text, *overrides])


@pytest.mark.parametrize(("name", "precision", "batch"), [("dpr", "bf16", 16), ("dpr-512", "fp16", 40)])
def test_the_dpr_settings_train_on_its_entries(tmp_path, name, precision, batch):
    lines = [f"tell me {entry['question']}\t{entry['answers']!r}" for entry in entries()][:7]
    # as DPR has them, without a line of names
    (tmp_path / "test.qa.csv").write_text("\n".join(lines) + "\n")
    short = [f"train.batch={batch}", "train.epochs=2.0", f"data.test={tmp_path}/test.qa.csv"]
    recipe = shipped(name, tmp_path, f"train.precision={precision}", *short)
    assert (recipe.train.sub_batch.query, recipe.train.sub_batch.passage, recipe.train.retain) == (16, 8, 0)
    assert (recipe.loss.scale, recipe.model.normalise, recipe.optim.schedule) == (1.0, False, "linear")
    folder = run_recipe(recipe, tmp_path / "runs").folder
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] != "probe"]
    steps = [line for line in lines if line["kind"] == "step"]
    assert len(lines) == math.ceil(120 / batch)
    # in fp16 the scaler's first factors may be too large
    assert len(steps) >= len(lines) - 3
    assert all(math.isfinite(line["loss"]) and line["norm"] > 0 for line in steps)
    rows = json.loads((folder / "evaluation.json").read_text())
    assert [row["test"] for row in rows if row["headline"]] == ["held-out queries, retriever, answers"]
    assert rows[0]["queries"] == 7
    run = contrastile.load(folder, device="cpu")
    assert sorted(run.model.encoders) == ["passage", "query"]
    assert run.encode_query(["where is the red fox house"]).shape == (1, 16)
    assert run.encode_query([]).shape == (0, 16)


def test_the_dpr_recipe_has_the_published_settings():
    recipe = load_any_recipe(RECIPES / "dpr.toml", files=False)
    assert (recipe.train.epochs, recipe.optim.learning_rate, recipe.train.precision) == (40.0, 2e-5, "fp16")
    assert (recipe.data.negatives, recipe.optim.clip_norm, recipe.optim.weight_decay) == (1, 2.0, 0.0)


def test_the_late_recipe_has_the_published_settings():
    recipe = load_any_recipe(RECIPES / "colbert.toml", files=False)
    model, tokenizer = recipe.model, recipe.model.tokenizer
    assert (model.features, tokenizer.query_length, tokenizer.length) == (128, 32, 180)
    assert (model.query_expansion, model.attend_to_expansion, model.skip_punctuation) == (True, False, True)
    assert (recipe.train.batch, recipe.optim.learning_rate, recipe.loss.scale) == (((0.0, 32),), 3e-6, 1.0)


@pytest.mark.parametrize(("name", "more"), [("docstrings-bert", ()), ("colbert", ("model.features=8",))])
def test_a_step_of_the_other_recipes_has_a_gradient_with_dropout_on(tmp_path, name, more):
    recipe = shipped(name, tmp_path, "train.precision=float32", "train.sub_batch={query=16, passage=8}", *more)
    job = RetrieverJob.open(recipe)
    model = job.run.model.train()
    assert {part.p for part in model.modules() if isinstance(part, torch.nn.Dropout)} == {0.1}
    (batch,) = job.builder.parts(job.builder.sample(torch.from_numpy(job.rows), 1), 1)
    loss = job.loss(batch)
    loss.backward()
    assert 0 < loss.item() < 10
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert sum(bool(gradient.any()) for gradient in gradients) >= 30
    assert job.loss(batch).item() != loss.item()


def test_the_strength_of_hardness_reaches_the_loss():
    assert RetrieverLoss(hardness_strength=5.0).words()["hardness_mode"] == "all_negatives"
    assert InfoNCELoss(**RetrieverLoss(hardness_strength=5.0).words()).loss == Hardness(hardness_strength=5.0)
    assert InfoNCELoss(**RetrieverLoss().words()).loss == Softmax()
