"""The towers and the pairs of the bench of steps: CLIPs from their configurations with random weights, made-up inputs.

Stands below `ways.py`. Nothing is downloaded. Pictures are uint8 and become numbers on the device, in the encoder, so
that a quarter of the bytes travels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from contrastile._check import one_of
from contrastile.offload import free_memory

# different examples; larger batches take them again and again
POOL = 4096
SCALE = 20.0
# of the host's free memory, what inputs may take
HOST_SHARE = 0.9


@dataclass(frozen=True)
class Shape:
    """A CLIP as its configurations describe it, and a sub-batch that keeps a GPU busy with both towers."""

    vision: dict[str, Any]
    text: dict[str, Any]
    sub_batch: int


def _text(width: int, heads: int, features: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": heads,
        "num_hidden_layers": 12,
        "projection_dim": features,
        "vocab_size": 49408,
        "max_position_embeddings": 77,
        "bos_token_id": 49406,
        "eos_token_id": 49407,
    }


def _vision(width: int, heads: int, layers: int, patch: int, features: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "patch_size": patch,
        "image_size": 224,
        "projection_dim": features,
    }


_TINY = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
MODELS = {
    "vit-b-16": Shape(_vision(768, 12, 12, 16, 512), _text(512, 8, 512), sub_batch=512),
    "vit-l-14": Shape(_vision(1024, 16, 24, 14, 768), _text(768, 12, 768), sub_batch=192),
    "tiny": Shape(
        {**_TINY, "patch_size": 8, "image_size": 32, "projection_dim": 24},
        {
            **_text(32, 2, 24),
            **_TINY,
            "vocab_size": 99,
            "max_position_embeddings": 12,
            "bos_token_id": 97,
            "eos_token_id": 98,
        },
        sub_batch=16,
    ),
}


class Pictures(nn.Module):
    """uint8 pictures [B, 3, S, S] to features [B, D] of unit length."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        features = self.model(pixel_values=pixels.float().div_(127.5).sub_(1)).image_embeds
        return F.normalize(features, dim=-1).to(features.dtype)


class Texts(nn.Module):
    """Tokens [B, L] to features [B, D] of unit length."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        features = self.model(input_ids=input_ids).text_embeds
        return F.normalize(features, dim=-1).to(features.dtype)


class Towers(nn.Module):
    """Two towers and the logarithm of the scale."""

    def __init__(self, name: str, device: torch.device, *, dropout: float = 0.0) -> None:
        from transformers import (
            CLIPTextConfig,
            CLIPTextModelWithProjection,
            CLIPVisionConfig,
            CLIPVisionModelWithProjection,
        )

        super().__init__()
        one_of("model", name, tuple(MODELS), "The tiny one suits a CPU.")
        shape = MODELS[name]
        with torch.device(device):
            self.image = Pictures(
                CLIPVisionModelWithProjection(CLIPVisionConfig(**shape.vision, attention_dropout=dropout))
            )
            self.text = Texts(CLIPTextModelWithProjection(CLIPTextConfig(**shape.text, attention_dropout=dropout)))
            self.logit_scale = nn.Parameter(torch.tensor(math.log(SCALE)))
        self.shape = shape
        self.train()

    def towers(self) -> list[nn.Parameter]:
        """The towers' parameters."""
        return [*self.image.parameters(), *self.text.parameters()]

    def checkpointing(self, wanted: bool) -> None:
        """Each layer's activations computed again in the backward, or kept."""
        for layer in self.modules():
            if type(layer).__name__ == "CLIPEncoderLayer":
                vars(layer).pop("forward", None)
                if wanted:
                    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


class Drawing(nn.Module):
    """A tower whose inputs are places in a pool of examples that lies on the device."""

    def __init__(self, tower: nn.Module, pool: Tensor) -> None:
        super().__init__()
        self.tower, self.pool = tower, pool

    def forward(self, places: Tensor) -> Tensor:
        return self.tower(self.pool[places])


@dataclass(frozen=True)
class Pairs:
    """Made-up pictures and texts: as many as the pool has, and batches of them in one of three places."""

    shape: Shape
    device: torch.device
    most: int = POOL
    pictures: Tensor = field(init=False)
    texts: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        side, text = self.shape.vision["image_size"], self.shape.text
        pool = min(self.most, 16 * self.shape.sub_batch)
        pictures = torch.empty(pool, 3, side, side, dtype=torch.uint8).random_(0, 256, generator=generator)
        texts = torch.randint(0, text["eos_token_id"], (pool, text["max_position_embeddings"]), generator=generator)
        texts[:, -1] = text["eos_token_id"]
        object.__setattr__(self, "pictures", pictures)
        object.__setattr__(self, "texts", texts)

    def sides(self, towers: Towers, batch: int, inputs: str) -> list[tuple[nn.Module, Tensor]]:
        """Each tower with its leaf: a batch on the "device", on the "host" (pinned), or places in a "pool"."""
        places = torch.arange(batch) % len(self.pictures)
        both = ((towers.image, self.pictures), (towers.text, self.texts))
        if inputs == "pool":
            return [(Drawing(tower, pool.to(self.device)), places.to(self.device)) for tower, pool in both]
        if inputs == "device":
            return [(tower, pool.to(self.device)[places.to(self.device)]) for tower, pool in both]
        need, (room, _) = batch * sum(pool[0].nbytes for _, pool in both), free_memory(torch.device("cpu"))
        if need > HOST_SHARE * room:
            raise torch.OutOfMemoryError(f"inputs take {need:,} bytes of the host, and {room:,} are free")
        pin = self.device.type == "cuda"
        found: list[tuple[nn.Module, Tensor]] = []
        for tower, pool in both:
            whole = torch.empty((batch, *pool.shape[1:]), dtype=pool.dtype, pin_memory=pin)
            torch.index_select(pool, 0, places, out=whole)
            found.append((tower, whole))
        return found
