"""Embedders of transformers' Qwen2-VL and Qwen2.5-VL, built from a configuration, beside the whole batch."""

from __future__ import annotations

from copy import deepcopy
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Pool
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")

import torch.nn.functional as F
from torch import Tensor, nn

from contrastile import ClipLoss, Ragged, encode

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.unpoisoned]
IMAGE, START, END, PATCH = 90, 91, 92, 3 * 2 * 4 * 4
# images of each example, and the height and width of each image in patches
IMAGES, GRID = [1, 0, 2, 1, 1], [(2, 2), (4, 2), (2, 4), (2, 2), (4, 4)]


class Embedder(nn.Module):
    """The last token's state of a Qwen-VL."""

    def __init__(self, family: str) -> None:
        super().__init__()
        import transformers

        torch.manual_seed(0)
        text = {
            "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
            "intermediate_size": 32, "vocab_size": 100, "max_position_embeddings": 64, "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
        }  # fmt: skip
        vision: dict[str, Any] = {"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 4}
        # the second attends within windows, of 2 x 2 blocks of patches here
        vision |= (
            {"embed_dim": 16, "mlp_ratio": 2}
            if family == "Qwen2VL"
            else {"out_hidden_size": 16, "intermediate_size": 32, "window_size": 16, "fullatt_block_indexes": []}
        )
        tokens = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
        config, model = getattr(transformers, f"{family}Config"), getattr(transformers, f"{family}Model")
        self.model = model(config(text_config=text, vision_config=vision, **tokens)).double()

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
    pixels = torch.linspace(-3, 3, sum(patches) * PATCH, dtype=torch.float64).view(-1, PATCH)
    return {**inputs, "pixel_values": (pixels * 100).sin()}, patches


def share(rows: slice, how: str) -> dict[str, Any]:
    """Arguments of `encode` for some examples of the batch, in sub-batches of two or of one's own."""
    inputs, patches = batch()
    images, values = (list(accumulate(counts, initial=0)) for counts in (IMAGES, patches))

    def cut(rows: slice) -> dict[str, Tensor]:
        packed = {"pixel_values": values, "image_grid_thw": images}
        return {
            name: x[packed[name][rows.start] : packed[name][rows.stop]] if name in packed else x[rows]
            for name, x in inputs.items()
        }

    if how == "parts":
        made = [cut(slice(at, min(at + 2, rows.stop))) for at in range(rows.start, rows.stop, 2)]
        # as a processor leaves them out where there is no picture
        return {"parts": [{name: x for name, x in part.items() if x.numel()} for part in made]}
    mine: dict[str, Any] = cut(rows)
    mine["pixel_values"] = Ragged(mine["pixel_values"], patches[rows])
    mine["image_grid_thw"] = Ragged(mine["image_grid_thw"], IMAGES[rows])
    return {"inputs": mine, "sub_batch": 2 if how == "ragged" else 1}


def other() -> Tensor:
    count = len(IMAGES) * 16
    return F.normalize(torch.linspace(-1, 1, count, dtype=torch.float64).view(-1, 16).sin(), dim=-1)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


def plain(model: Embedder) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of the whole batch at once."""
    loss = ClipLoss()(model(**batch()[0]), other(), 10.0)
    loss.backward()
    truth = gradients(model)
    for name in ("model.visual.patch_embed.proj.weight", "model.language_model.embed_tokens.weight"):
        assert truth[name].any()
    return loss.detach(), truth


def same(found: Any, truth: Any) -> None:
    """The loss, and each gradient to 1e-6 of its length.

    The models normalise in float32: a third of the gradients of three times the loss differs from them by 3e-7 of
    their length, in single entries by 1e-5.
    """
    torch.testing.assert_close(found[0], truth[0])
    assert found[1].keys() == truth[1].keys()
    for name, gradient in truth[1].items():
        assert (found[1][name] - gradient).norm() <= 1e-6 * gradient.norm(), name


def on_a_rank(rank: int, group: Any, family: str, how: str) -> tuple[Tensor, dict[str, Tensor | None]]:
    # of two ranks the second has fewer; of three the second has a text alone
    sizes = {1: [5], 2: [3, 2], 3: [1, 1, 3]}[dist.get_world_size(group)]
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    model = Embedder(family)
    wrapped = DistributedDataParallel(model, process_group=group)
    loss = ClipLoss(group=group)(encode(wrapped, **share(rows, how)), other()[rows], 10.0)
    loss.backward()
    return loss.detach(), gradients(model)


FAMILIES = ["Qwen2VL", "Qwen2_5_VL"]


@pytest.mark.parametrize("how", ["ragged", "ragged, one by one", "parts"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_the_whole_batch(family: str, how: str) -> None:
    model = Embedder(family)
    truth = plain(deepcopy(model))
    loss = ClipLoss()(encode(model, **share(slice(0, len(IMAGES)), how)), other(), 10.0)
    loss.backward()
    same((loss.detach(), gradients(model)), truth)


@pytest.mark.parametrize("how", ["ragged", "parts"])
@pytest.mark.parametrize("W", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_have_the_gradient_of_the_whole_batch(pool: Pool, family: str, W: int, how: str) -> None:
    truth = plain(Embedder(family))
    for found in pool.run(on_a_rank, W, family, how):
        same(found, truth)
