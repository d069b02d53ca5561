"""Checkpointed and compiled towers have the gradients and weights of plain ones."""

import logging

import pytest
import torch
from problems import distance
from refusals import refusal
from test_models_towers import BERT, CLIP, SIGLIP, TINY, VIT
from test_train_resume import left
from tiny_runs import tiny_recipe
from torch import nn

from contrastile.gradcache.memory import graph_bytes
from contrastile.models import base
from contrastile.models.base import checkpoint_activations, compile_tower, uncompile_tower
from contrastile.models.text import train_tokenizer
from contrastile.models.towers import build_model
from contrastile.train.batch_builder import open_data_bundle
from contrastile.train.image_text import ImageText
from contrastile.train.loop import run_recipe
from contrastile.train.run import Run
from contrastile.train.state import TrainResult


@pytest.fixture(autouse=True)
def _quiet_library():
    logging.getLogger("transformers").setLevel(logging.ERROR)


def deeper(tower):
    return {**tower, "config": {**tower["config"], "num_hidden_layers": 4}}


@pytest.mark.parametrize(
    "settings", [{"image": deeper(VIT), "text": deeper(BERT)}, {"both": CLIP}, {"both": SIGLIP}], ids=str
)
def test_a_checkpointed_tower_has_the_same_gradients(settings):
    tokenizer = train_tokenizer(["LATIN SMALL LETTER A"], length=6)
    pixels, tokens = torch.rand(4, 1, 32, 32), tokenizer.tokenise(["LATIN A", "SMALL", "LETTER A", "A"])
    plain = build_model({"features": 20, **settings}, tokenizer=tokenizer)
    saving = build_model(plain.settings, tokenizer=tokenizer)
    saving.load_state_dict(plain.state_dict())
    kept = []
    for model in (plain, saving):
        # no dropout, but the mode in which libraries checkpoint
        model.train()
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        if model is saving:
            for side in ("image", "text"):
                checkpoint_activations(getattr(model, side), side)
        kept.append(graph_bytes(lambda model=model: model.encode_image(pixels)))
        (model.encode_image(pixels).square().sum() + model.encode_text(**tokens).square().sum()).backward()
    for (name, one), other in zip(plain.named_parameters(), saving.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, msg=name)
    if "image" in settings:
        assert kept[1] < 0.6 * kept[0]


class Libraries(nn.Module):
    """As towers of open_clip and timm have it."""

    asked = None

    def set_grad_checkpointing(self, enable):
        self.asked = enable


def test_open_clip_and_timm_are_switched_by_their_own_method():
    tower = nn.Sequential(Libraries(), nn.Linear(2, 2))
    checkpoint_activations(tower, "image")
    assert tower[0].asked is True


def test_a_tower_without_checkpointing_is_refused(tmp_path):
    recipe = tiny_recipe(tmp_path)
    # of a tower that the recipe knows to have none it would be told before
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"checkpointing": ("image",)})})
    assert refusal(Run.untrained, recipe, open_data_bundle(recipe).tokenizer) == (
        "`model.checkpointing` must name towers that have it; got image, a ConvTower. "
        "Leave it out: the gradient cache keeps one sub-batch of activations anyway."
    )


def test_a_recipe_with_checkpointing_trains_the_same_weights(tmp_path):
    layers = {"hidden_dropout_prob": 0.1, **TINY}
    config = ", ".join(f"{key}={value}" for key, value in layers.items())
    text = f"model.text={{kind='transformers', config={{model_type='bert', {config}}}}}"
    folders = [
        run_recipe(tiny_recipe(tmp_path, "train.examples=64", text, *more), tmp_path / name).folder
        for name, more in (("plain", ()), ("saving", ("model.checkpointing=['text']",)))
    ]
    (one, *_), (other, *_) = map(left, folders)
    # dropout draws the same lots when a layer is computed again
    for name, weights in one.items():
        torch.testing.assert_close(other[name], weights, rtol=1e-3, atol=1e-4)


class OfALibrary(nn.Sequential):
    """A layer whose class is not torch's own."""

    def __init__(self):
        super().__init__(nn.Linear(3, 3))


def test_a_tower_is_compiled_layer_by_layer_or_as_a_whole_for_training_alone(monkeypatch):
    """Compiled recipes are in test_train_compiled.py."""
    runs = []

    def compile_nothing(self, **_):
        plain = self._call_impl
        self._compiled_call_impl = lambda *inputs: runs.append(self) or plain(*inputs)

    monkeypatch.setattr(nn.Module, "compile", compile_nothing)
    layers = [OfALibrary() for _ in range(2)]
    of_torch = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3)) for _ in range(2)))
    for tower, parts in ((nn.Sequential(nn.Linear(3, 3), nn.Sequential(*layers)), layers), (of_torch, None)):
        names = list(tower.state_dict())
        compile_tower(tower)
        tower(torch.ones(1, 3))
        assert runs == (parts or [tower])
        with torch.no_grad():
            tower(torch.ones(1, 3))
        uncompile_tower(tower)
        tower(torch.ones(1, 3))
        assert runs == (parts or [tower])
        assert list(tower.state_dict()) == names
        runs.clear()


@pytest.mark.parametrize("bias", [True, False])
def test_patches_are_embedded_by_a_product_in_training(monkeypatch, bias):
    monkeypatch.setattr(base, "compile_graphs", lambda _: None)
    conv = nn.Conv2d(3, 8, kernel_size=(4, 2), stride=(4, 2), bias=bias, dtype=torch.float64)
    others = [nn.Conv2d(3, 8, 4, 2), nn.Conv2d(3, 8, 4, 4, padding=1), nn.Conv2d(8, 8, 2, 2)]
    others.append(nn.Conv2d(4, 8, 2, 2, groups=4))
    tower, upstream = nn.Sequential(conv), torch.randn(5, 8, 2, 4, dtype=torch.float64)
    # a row and a column of pixels that belong to no patch
    leaves = [torch.randn(5, 3, 9, 9, dtype=torch.float64, requires_grad=True), *conv.parameters()]
    truth = torch.autograd.grad(tower(leaves[0]), leaves, upstream)
    compile_tower(tower)
    found = torch.autograd.grad(out := tower(leaves[0]), leaves, upstream)
    assert not out.is_contiguous(), "a product has its features last"
    assert all(distance(a, b) < 1e-14 for a, b in zip(found, truth, strict=True))
    assert base._patch_embeddings(nn.Sequential(conv, *others)) == [conv]


def test_measuring_activations_does_not_change_batch_statistics(tmp_path):
    image = "{kind='transformers', config={model_type='resnet', embedding_size=8, hidden_sizes=[8], depths=[1]}}"
    recipe = tiny_recipe(tmp_path, f"model.image={image}")
    job = ImageText.open(recipe)
    run = job.run
    run.model.train()
    before = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
    assert any("running_mean" in name for name in before)
    assert job.metadata(TrainResult())["memory"]["per_example"] > 0
    assert all(torch.equal(buffer, before[name]) for name, buffer in run.model.named_buffers())
