"""An embedder of transformers' Qwen2-VL, built from a configuration, through `encode` beside the whole batch."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import torch.nn.functional as F
from torch import Tensor, nn

from contrastile import ClipLoss, Ragged, encode

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.unpoisoned]
IMAGE, START, END, PATCH = 90, 91, 92, 3 * 2 * 4 * 4
# images of each example, and the height and width of each image in patches
IMAGES, GRID = [1, 0, 2, 1, 1], [(2, 2), (4, 2), (2, 4), (2, 2), (4, 4)]


class Embedder(nn.Module):
    """The last token's state of a Qwen2-VL."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import Qwen2VLConfig, Qwen2VLModel

        torch.manual_seed(0)
        text = {
            "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
            "intermediate_size": 32, "vocab_size": 100, "max_position_embeddings": 64, "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
        }  # fmt: skip
        vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
        tokens = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
        self.model = Qwen2VLModel(Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)).double()

    def forward(self, **inputs: Any) -> Tensor:
        states = self.model(**inputs).last_hidden_state
        return F.normalize(states[torch.arange(len(states)), inputs["attention_mask"].sum(1) - 1], dim=-1)


def batch() -> tuple[dict[str, Tensor], list[int]]:
    """As Qwen2-VL's processor returns it, and the number of patches of each example."""
    grid, tokens, patches = torch.tensor([(1, *sides) for sides in GRID]), [], []
    image = iter(grid.prod(-1).tolist())
    for example, count in enumerate(IMAGES):
        sizes = [next(image) for _ in range(count)]
        pictures = [token for size in sizes for token in (START, *[IMAGE] * (size // 4), END)]
        tokens.append(torch.tensor([*pictures, *range(1, 4 + example % 3)]))
        patches.append(sum(sizes))
    ids = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "image_grid_thw": grid}
    inputs["mm_token_type_ids"] = (ids == IMAGE).long()
    return {**inputs, "pixel_values": torch.randn(sum(patches), PATCH, dtype=torch.float64)}, patches


@pytest.mark.parametrize("size", [1, 2])
def test_the_gradient_is_that_of_the_whole_batch(size: int) -> None:
    inputs, patches = batch()
    model = Embedder()
    plain = deepcopy(model)
    other = F.normalize(torch.randn(len(IMAGES), 16, dtype=torch.float64), dim=-1)
    packed = {
        **inputs,
        "pixel_values": Ragged(inputs["pixel_values"], patches),
        "image_grid_thw": Ragged(inputs["image_grid_thw"], IMAGES),
    }
    losses = [
        ClipLoss()(features, other, 10.0) for features in (encode(model, packed, sub_batch=size), plain(**inputs))
    ]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1])
    found, truth = ({name: p.grad for name, p in each.named_parameters()} for each in (model, plain))
    assert truth["model.visual.patch_embed.proj.weight"].any()
    assert truth["model.language_model.embed_tokens.weight"].any()
    torch.testing.assert_close(found, truth, rtol=1e-6, atol=1e-12)
