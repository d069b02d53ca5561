"""Towers of open_clip: a whole model or one of its sides, by name or configuration, with the tokenizer of CLIP.

Within the second box of the flow. Random weights, or those of a local file; a name gives the shapes that open_clip
ships and fetches nothing. Used are `open_clip.get_model_config`, `CustomTextCLIP`, whose two sides are modules of their
own, and `SimpleTokenizer`. open_clip needs torchvision and timm. Run with open_clip 3.3.0: features equal to its own
`encode_image` and `encode_text`, files in its old and its new layout, tokens equal to its tokenizer's, on a machine
where an empty stand-in took the place of torchvision. Not run: its published weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile._check import wrong
from contrastile.models.base import PixelTower, Tower, Whole, refuse_other_pictures, refuse_other_tokens, width_of
from contrastile.models.text import CLIP_ENDS, WordTokenizer, bpe_as_clip
from contrastile.models.weights import put_into, read_weights

# of an open_clip model's file, what is neither side's
SCALES = ("logit_scale", "logit_bias")
# text towers that open_clip itself would fetch, and models that are no pair of towers
ELSEWHERE = ("hf_model_name",)
OTHERS = ("multimodal_cfg", "audio_cfg", "genlip_cfg", "genlap_cfg")
CONTEXT, IMAGE_SIZE = 77, 224


@dataclass(frozen=True)
class OpenClip:
    """A model's `name` in open_clip or its `config`; a `checkpoint` with its weights.

    `mean` and `std` are what the pixels are normalised with; OpenAI's unless given.
    """

    name: str | None = None
    config: dict[str, Any] | None = None
    checkpoint: str | None = None
    mean: list[float] | None = None
    std: list[float] | None = None

    def __post_init__(self) -> None:
        if (self.name is None) == (self.config is None):
            remedy = "A name has the shapes that open_clip ships."
            raise wrong("config", "be given, or name, not both", f"{self.config} and {self.name}", remedy)

    def shapes(self) -> dict[str, Any]:
        """The configuration, as open_clip's own files have it."""
        import open_clip

        config = self.config if self.name is None else open_clip.get_model_config(self.name)
        if config is None or ":" in (self.name or ""):
            remedy = "open_clip.list_models() names them; none is fetched."
            raise wrong("name", "be a model of open_clip", f'"{self.name}"', remedy)
        strange = [key for key in OTHERS if key in config] or [
            key for key in ("embed_dim", "vision_cfg", "text_cfg") if key not in config
        ]
        if strange:
            remedy = "It needs embed_dim, vision_cfg and text_cfg."
            raise wrong("config", "be a model of one image tower and one text tower", ", ".join(strange), remedy)
        if ":" in config["vision_cfg"].get("timm_model_name", ""):
            remedy = "timm.list_models() names them; none is fetched."
            raise wrong("timm_model_name", "be a model of timm", f'"{config["vision_cfg"]["timm_model_name"]}"', remedy)
        if any(key in config["text_cfg"] for key in ELSEWHERE):
            remedy = 'Give the image side alone and a text tower of kind "transformers".'
            raise wrong("text_cfg", "be a text tower of open_clip's own", "hf_model_name", remedy)
        return {key: value for key, value in config.items() if key != "custom_text"}

    def build(self) -> Any:
        """The whole model."""
        import open_clip

        shapes = self.shapes()
        vision = {**shapes["vision_cfg"], **({"timm_model_pretrained": False} if _of_timm(shapes) else {})}
        try:
            model = open_clip.CustomTextCLIP(**{**shapes, "vision_cfg": vision})
        except TypeError as failure:
            raise wrong("config", "describe a model of open_clip", sorted(shapes), f"{failure}.") from failure
        if self.checkpoint is not None:
            weights = {_of_a_side(name): value for name, value in read_weights(self.checkpoint).items()}
            for name in SCALES:
                # written as [] by some, as [1] by others
                if name in weights and getattr(model, name, None) is not None:
                    weights[name] = weights[name].reshape(getattr(model, name).shape)
            put_into(model, weights, self.checkpoint)
        return model

    def normalisation(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of the pixels."""
        import open_clip

        return list(self.mean or open_clip.OPENAI_DATASET_MEAN), list(self.std or open_clip.OPENAI_DATASET_STD)


def _of_timm(shapes: dict[str, Any]) -> bool:
    return "timm_model_name" in shapes["vision_cfg"]


def _of_a_side(name: str) -> str:
    """A weight's name in the layout with a text side of its own; the old one has its parts beside the image side."""
    return name if name.startswith(("visual.", "text.", *SCALES)) else f"text.{name}"


class OpenClipText(nn.Module):
    """A text side. It knows no mask: texts have its full length, as it was trained to see them."""

    def __init__(self, model: nn.Module, context: int, pad: int) -> None:
        super().__init__()
        self.model, self.context, self.pad = model, context, pad

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """`[B, L]` twice to `[B, features]`."""
        del attention_mask
        return self.model(F.pad(input_ids, (0, self.context - input_ids.shape[1]), value=self.pad))


def openclip_image(origin: OpenClip, *, image_size: int, channels: int) -> Tower:
    """The image side of a model of open_clip, with its projection."""
    return _image(origin.build(), origin, image_size=image_size, channels=channels)


def openclip_text(origin: OpenClip, *, tokenizer: Any) -> Tower:
    """The text side of a model of open_clip, with its projection."""
    return _text(origin.build(), origin, tokenizer)


def openclip_whole(origin: OpenClip, *, image_size: int, channels: int, tokenizer: Any) -> Whole:
    """Both sides; a file's own scale and bias."""
    model = origin.build()
    trained = origin.checkpoint is not None
    image = _image(model, origin, image_size=image_size, channels=channels)
    bias = getattr(model, "logit_bias", None)
    return Whole(
        image=image,
        text=_text(model, origin, tokenizer),
        image_projection=nn.Identity(),
        text_projection=nn.Identity(),
        scale=math.exp(model.logit_scale.item()) if trained else None,
        bias=bias.item() if trained and bias is not None else None,
        settings=image.settings,
    )


def _image(model: Any, origin: OpenClip, *, image_size: int, channels: int) -> Tower:
    shapes = origin.shapes()
    size = shapes["vision_cfg"].get("image_size", IMAGE_SIZE)
    refuse_other_pictures(image_size, channels, size=size)
    mean, std = origin.normalisation()
    tower = PixelTower(model.visual, 3, mean, std)
    width = width_of(tower, torch.zeros(1, channels, image_size, image_size))
    return Tower(tower, width, {"config": shapes, "mean": mean, "std": std})


def _text(model: Any, origin: OpenClip, tokenizer: Any) -> Tower:
    shapes = origin.shapes()
    vocabulary = shapes["text_cfg"].get("vocab_size", len(_clip_words()[0]))
    context = shapes["text_cfg"].get("context_length", CONTEXT)
    refuse_other_tokens(tokenizer, vocabulary=vocabulary, longest=context)
    tower = OpenClipText(model.text, context, tokenizer.pad)
    trial = torch.full((1, 1), tokenizer.pad)
    return Tower(tower, width_of(tower, trial, torch.ones_like(trial)), {"config": shapes})


def clip_tokenizer(length: int = CONTEXT) -> WordTokenizer:
    """CLIP's tokenizer, made of the words that open_clip ships; kept with a run, which then needs open_clip no more.

    Equal to `open_clip.SimpleTokenizer` but for what ftfy repairs there (wrongly decoded text, HTML's entities).
    """
    return WordTokenizer(bpe_as_clip(*_clip_words()), length=length)


def _clip_words() -> tuple[dict[str, int], list[tuple[str, str]]]:
    import open_clip

    engine = open_clip.SimpleTokenizer()
    absent = [end for end in CLIP_ENDS if end not in engine.encoder]
    if absent:
        remedy = "Another version of open_clip has them."
        raise wrong("open_clip", f"have the tokens {', '.join(CLIP_ENDS)}", ", ".join(absent), remedy)
    return dict(engine.encoder), sorted(engine.bpe_ranks, key=engine.bpe_ranks.__getitem__)
