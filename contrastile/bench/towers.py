"""CLIPs with random weights from their configurations, and made-up pairs of images and texts, for the bench of steps.

Stands below `ways.py`. Nothing is downloaded. Images are uint8 and become float32 in the encoder, on the device, so
that a quarter of the bytes is copied.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from contrastile._errors import one_of
from contrastile.models.base import compile_tower, uncompile_tower
from contrastile.offload import free_memory

# different examples; larger batches repeat them
POOL = 4096
SCALE = 20.0
# the share of the host's free memory that inputs may take
HOST_SHARE = 0.9


@dataclass(frozen=True)
class Shape:
    """The sizes of a CLIP that differ from ViT-B/32's, and a sub-batch that keeps a GPU busy with both towers."""

    vision: dict[str, Any]
    text: dict[str, Any]
    sub_batch: int


def _sizes(width: int, heads: int, features: int, layers: int, **others: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": heads}
    return sizes | {"num_hidden_layers": layers, "projection_dim": features} | others


_TINY_TEXT = {"max_position_embeddings": 12, "vocab_size": 99, "bos_token_id": 97, "eos_token_id": 98}
MODELS = {
    "vit-b-16": Shape({"patch_size": 16}, {}, 512),
    "vit-l-14": Shape(_sizes(1024, 16, 768, 24, patch_size=14), _sizes(768, 12, 768, 12), 192),
    # as many features as Inf-CL's loss takes at least
    "tiny": Shape(
        _sizes(32, 2, 256, 2, intermediate_size=64, patch_size=8, image_size=32),
        _sizes(32, 2, 256, 2, intermediate_size=64, **_TINY_TEXT),
        16,
    ),
}


class Encoder(nn.Module):
    """A tower: uint8 images [B, 3, S, S] or tokens [B, L] to features [B, D] of unit length.

    With a pool of examples on the device, the inputs are indices [B] into it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.pool: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.pool is not None:
            inputs = self.pool[inputs]
        if inputs.dtype == torch.uint8:
            features = self.model(pixel_values=inputs.float().div_(127.5).sub_(1)).image_embeds
        else:
            features = self.model(input_ids=inputs).text_embeds
        return F.normalize(features, dim=-1).to(features.dtype)


class Towers(nn.Module):
    """Two towers and the logarithm of the scale."""

    def __init__(self, name: str, device: torch.device, *, dropout: float = 0.0) -> None:
        import transformers as hf

        super().__init__()
        one_of("model", name, tuple(MODELS), "The tiny one suits a CPU.")
        shape = MODELS[name]
        self.vision_config = hf.CLIPVisionConfig(**shape.vision, attention_dropout=dropout)
        self.text_config = hf.CLIPTextConfig(**shape.text, attention_dropout=dropout)
        self.sub_batch = shape.sub_batch
        with torch.device(device):
            self.image = Encoder(hf.CLIPVisionModelWithProjection(self.vision_config))
            self.text = Encoder(hf.CLIPTextModelWithProjection(self.text_config))
            self.logit_scale = nn.Parameter(torch.tensor(math.log(SCALE)))
        self.train()

    def encode_image(self, inputs: Tensor) -> Tensor:
        return self.image(inputs)

    def encode_text(self, inputs: Tensor) -> Tensor:
        return self.text(inputs)

    def forward(self, images: Tensor, texts: Tensor) -> dict[str, Tensor]:
        """Both features and the scale, as open_clip's training loop has them."""
        scale = self.logit_scale.exp()
        return {"image_features": self.image(images), "text_features": self.text(texts), "logit_scale": scale}

    def checkpointing(self, wanted: bool) -> None:
        """Recompute each layer's activations in the backward, or keep them."""
        for layer in self.modules():
            if type(layer).__name__ == "CLIPEncoderLayer":
                vars(layer).pop("forward", None)
                if wanted:
                    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def compiled(self, wanted: bool) -> None:
        """Compile the layers of both towers, or run them as they are written."""
        for tower in (self.image, self.text):
            (compile_tower if wanted else uncompile_tower)(tower)


class Pairs:
    """A pool of made-up images and texts, and batches of them in one of three places."""

    def __init__(self, towers: Towers, most: int = POOL) -> None:
        self.towers, self.device = towers, towers.logit_scale.device
        generator, pool = torch.Generator().manual_seed(0), min(most, 16 * towers.sub_batch)
        side, text = towers.vision_config.image_size, towers.text_config
        # drawn on the host, whatever the default device
        drawn: dict[str, Any] = {"generator": generator, "device": "cpu"}
        self.images = torch.randint(0, 256, (pool, 3, side, side), dtype=torch.uint8, **drawn)
        self.texts = torch.randint(0, text.eos_token_id, (pool, text.max_position_embeddings), **drawn)
        self.texts[:, -1] = text.eos_token_id

    def sides(self, batch: int, inputs: str) -> list[tuple[Encoder, Tensor]]:
        """Return each tower with a batch on the "device", on the "host" (pinned), or as indices into a "pool".

        The towers keep the pool until the next call.
        """
        pools = ((self.towers.image, self.images), (self.towers.text, self.texts))
        for tower, pool in pools:
            tower.pool = pool.to(self.device) if inputs == "pool" else None
        if inputs != "host":
            indices = (torch.arange(batch) % len(self.images)).to(self.device)
            return [(tower, indices if inputs == "pool" else pool.to(self.device)[indices]) for tower, pool in pools]
        need, (room, _) = batch * sum(pool[0].nbytes for _, pool in pools), free_memory(torch.device("cpu"))
        if need > HOST_SHARE * room:
            raise torch.OutOfMemoryError(f"inputs take {need:,} bytes of the host, and {room:,} are free")
        sides: list[tuple[Encoder, Tensor]] = []
        for tower, pool in pools:
            pinned = torch.empty((batch, *pool.shape[1:]), dtype=pool.dtype, pin_memory=self.device.type == "cuda")
            sides.append((tower, torch.index_select(pool, 0, torch.arange(batch) % len(pool), out=pinned)))
        return sides
