"""Frozen towers: the weights that learn, and eval mode of all frozen parts."""

import pytest
import torch
from refusals import refusal
from torch import nn

from contrastile import encode
from contrastile.models.base import eval_frozen, freeze, layers_of
from contrastile.models.pretrained import Library, image_tower, text_tower
from contrastile.models.text import train_tokenizer
from contrastile.models.towers import Projected

VIT = {"model_type": "vit", "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 8,
       "patch_size": 16}  # fmt: skip
BERT = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2,
        "intermediate_size": 8}  # fmt: skip
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 1],
          "layer_type": "basic"}  # fmt: skip


def image(config):
    return image_tower(Library(config=config), image_size=32, channels=3).module


def text(config):
    return text_tower(Library(config=config), tokenizer=train_tokenizer(["a b c"], length=4)).module


def learning(tower):
    return [name for name, weight in tower.named_parameters() if weight.requires_grad]


@pytest.mark.parametrize("tower", [image(VIT), text(BERT)], ids=["vit", "bert"])
@pytest.mark.parametrize("unlocked", [0, 1, 2, 3])
def test_the_last_layers_and_the_modules_behind_them_learn(tower, unlocked):
    freeze(tower, "image", unlocked)
    row = layers_of(tower)
    assert len(row) == 3
    inside = [all(w.requires_grad for w in layer.parameters()) for layer in row]
    assert inside == [False] * (3 - unlocked) + [True] * unlocked
    locked = [not any(w.requires_grad for w in layer.parameters()) for layer in row]
    assert locked == [not one for one in inside]
    assert not any("embeddings" in name for name in learning(tower))
    behind = [name for name in learning(tower) if "layer." not in name and "layers." not in name]
    assert bool(behind) == (unlocked > 0)


def test_layers_are_the_innermost_blocks_of_stages():
    tower = image(RESNET)
    row = layers_of(tower)
    # three blocks of two convolutions
    assert [type(layer).__name__ for layer in row] == ["ResNetConvLayer"] * 6
    freeze(tower, "image", 2)
    assert all("encoder.stages.1." in name for name in learning(tower))
    assert all(w.requires_grad for layer in row[4:] for w in layer.parameters())


def test_a_stage_of_one_layer_counts_as_a_layer():
    tower = image({"model_type": "convnext", "hidden_sizes": [8, 8, 16], "depths": [1, 2, 1], "num_stages": 3})
    assert [type(layer).__name__ for layer in layers_of(tower)] == [
        "ConvNextStage", "ConvNextLayer", "ConvNextLayer", "ConvNextStage",
    ]  # fmt: skip
    freeze(tower, "image", 1)
    assert all("encoder.stages.2." in name or "encoder" not in name for name in learning(tower))


def test_embeddings_stay_frozen_in_any_position():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))
            self.words = nn.Embedding(3, 2)
            self.norm = nn.LayerNorm(2)

    tower = Odd()
    freeze(tower, "text", 1)
    assert learning(tower) == ["blocks.1.0.weight", "blocks.1.0.bias", "norm.weight", "norm.bias"]


def test_more_unlocked_layers_than_layers_are_refused():
    assert refusal(freeze, image(VIT), "image", 4) == (
        "`model.unlocked.image` must be at most the 3 layers of the tower; got 4. "
        "Leave the side out of model.locked to train all of it."
    )


def test_frozen_towers_stay_in_eval_mode():
    both = Projected(image({**RESNET, "depths": [1, 1]}), nn.Linear(16, 4))
    freeze(both.tower, "image")
    both.train()
    assert both.projection.training
    assert not any(part.training for part in both.tower.modules())
    # statistics of a batch would depend on its size; those that are kept do not, and stay
    kept = {name: value.clone() for name, value in both.tower.state_dict().items()}
    pixels = torch.rand(6, 3, 32, 32)
    torch.testing.assert_close(encode(both, pixels, sub_batch=2), both(pixels))
    assert all(torch.equal(value, kept[name]) for name, value in both.tower.state_dict().items())


def test_unfrozen_layers_have_dropout():
    tower = text({**BERT, "hidden_dropout_prob": 0.5})
    freeze(tower, "text", 1)
    tower.train()
    eval_frozen(tower)
    first, *_, last = layers_of(tower)
    assert not first.training
    assert all(part.training for part in last.modules())


def test_cached_features_of_the_tower_are_projected():
    both = Projected(image(VIT), nn.Linear(8, 4)).eval()
    pixels = torch.rand(3, 3, 32, 32)
    assert torch.equal(both(both.tower(pixels), ahead=True), both(pixels))
