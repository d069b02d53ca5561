"""Two towers and what joins them, built from a recipe's settings.

The second box of the flow: pictures and titles become features of one size. A tower is any module that turns its inputs
into `[B, features]`: the small ones of `small.py`, or whatever `pretrained.py` finds in the library transformers,
`timm_tower.py` in timm and `openclip.py` in open_clip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from contrastile._check import wrong
from contrastile.models.base import Settings, Tower, Whole, completed
from contrastile.models.locking import rest
from contrastile.models.openclip import OpenClip, openclip_image, openclip_text, openclip_whole
from contrastile.models.pretrained import Library, image_tower, text_tower, whole_model
from contrastile.models.small import ConvTower, WordsTower
from contrastile.models.text import Tokenizer
from contrastile.models.timm_tower import Timm, timm_tower


class DualEncoder(nn.Module):
    """Features of pictures and of titles, not normalised, and the scale and bias of their comparison.

    `logit_scale` is the logarithm of the scale, shape `[]`; `logit_bias` is shape `[]`, or None where the loss has no
    use for it. `settings` are those with which `build_model` makes the same shapes again, from no folder.
    """

    def __init__(
        self, image: nn.Module, text: nn.Module, *, scale: float, bias: float | None, settings: dict[str, Any]
    ) -> None:
        super().__init__()
        if not scale > 0:
            raise wrong("scale", "be above 0", scale, "It is the inverse of the temperature; 14 is a usual start.")
        self.image, self.text = image, text
        self.logit_scale = nn.Parameter(torch.tensor(math.log(scale)))
        self.logit_bias = None if bias is None else nn.Parameter(torch.tensor(float(bias)))
        self.settings = settings

    def encode_image(self, pixels: Tensor) -> Tensor:
        """Pixels `[B, C, S, S]` in [0, 1], or bytes that become so here, to features `[B, D]`.

        Or what the tower gave of them before, `[B, F]`.
        """
        pixels = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels
        # the tower's own precision, which may be another one than the scale's
        dtype = next((x.dtype for x in self.image.parameters() if x.is_floating_point()), pixels.dtype)
        return self.image(pixels.to(dtype), ahead=pixels.ndim == 2)

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Tokens `[B, L]` to features `[B, D]`."""
        return self.text(input_ids, attention_mask)


class Projected(nn.Module):
    """A tower, and the map from its features to the common ones. What is locked of it is as in use while it trains."""

    def __init__(self, tower: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.tower, self.projection = tower, projection

    def forward(self, *inputs: Tensor, ahead: bool = False) -> Tensor:
        """Whatever the tower takes, or what it gave `ahead` of time, to `[B, features]`."""
        return self.projection(*inputs if ahead else (self.tower(*inputs),))

    def train(self, mode: bool = True) -> Self:
        """As torch's."""
        super().train(mode)
        rest(self.tower)
        return self


def build_model(settings: Settings, *, tokenizer: Tokenizer) -> DualEncoder:
    """The towers that `settings` describe, with fresh weights, or those of the local folders that they name.

    `features`: the size of the common features. `image`, `text`: a table each, its `kind` one of `IMAGE_TOWERS` and
    `TEXT_TOWERS`, the rest that tower's own settings. Or `both` instead of the two: a CLIP or SigLIP, its `kind` one
    of `WHOLE`.
    `scale`, `bias`: where the comparison starts. `image_size`, `channels`: of the pictures.

    >>> from contrastile.models.text import train_tokenizer
    >>> tokenizer = train_tokenizer(["LATIN SMALL LETTER A"], length=4)
    >>> model = build_model({"features": 64, "image_size": 32, "channels": 1}, tokenizer=tokenizer)
    >>> model.encode_text(**tokenizer.tokenise(["LETTER A", "LETTER B"])).shape
    torch.Size([2, 64])
    """
    complete = completed(settings, DEFAULTS)
    towers = _separate if complete["both"] is None else _whole
    return towers(complete, tokenizer)


SCALE = 1 / 0.07
DEFAULTS: dict[str, Any] = {
    "features": 256,
    "image_size": 32,
    "channels": 1,
    "image": {"kind": "conv"},
    "text": {"kind": "words"},
    "both": None,
    "scale": None,
    "bias": None,
}


def _separate(settings: Settings, tokenizer: Tokenizer) -> DualEncoder:
    """One tower of each side, each with a projection of its own."""
    image = _tower("image", IMAGE_TOWERS, settings, tokenizer)
    text = _tower("text", TEXT_TOWERS, settings, tokenizer)
    common = settings["features"]
    return DualEncoder(
        Projected(image.module, nn.Linear(image.features, common, bias=False)),
        Projected(text.module, nn.Linear(text.features, common, bias=False)),
        scale=_first(settings["scale"], SCALE),
        bias=settings["bias"],
        settings={**settings, "image": image.settings, "text": text.settings},
    )


def _whole(settings: Settings, tokenizer: Tokenizer) -> DualEncoder:
    """Both towers of one model; its own scale and bias where the settings name none."""
    own = dict(settings["both"])
    kind = own.pop("kind", "transformers")
    if kind not in WHOLE:
        raise wrong("both.kind", f"be one of {', '.join(WHOLE)}", kind, "See the recipes for examples.")
    origin, parts = WHOLE[kind]
    size, channels = settings["image_size"], settings["channels"]
    whole = parts(origin(**own), image_size=size, channels=channels, tokenizer=tokenizer)
    return DualEncoder(
        Projected(whole.image.module, whole.image_projection),
        Projected(whole.text.module, whole.text_projection),
        scale=_first(settings["scale"], whole.scale, SCALE),
        bias=_first(settings["bias"], whole.bias, None),
        settings={**settings, "both": {"kind": kind, **whole.settings}},
    )


def _first(*candidates: float | None) -> Any:
    """The first that is given, the last where none is."""
    return next((value for value in candidates if value is not None), candidates[-1])


def _tower(side: str, kinds: Mapping[str, Maker], settings: Settings, tokenizer: Tokenizer) -> Tower:
    own = dict(settings[side])
    kind = own.pop("kind", None)
    if kind not in kinds:
        raise wrong(f"{side}.kind", f"be one of {', '.join(kinds)}", kind, "See the recipes for examples.")
    try:
        tower = kinds[kind](own, settings, tokenizer)
    except TypeError as failure:
        raise wrong(side, f"have the settings of a tower of the kind {kind}", own, f"{failure}.") from failure
    return Tower(tower.module, tower.features, {"kind": kind, **tower.settings})


def _conv(own: dict[str, Any], settings: Settings, tokenizer: Tokenizer) -> Tower:  # noqa: ARG001
    tower = ConvTower(channels=settings["channels"], **own)
    return Tower(tower, tower.features, own)


def _words(own: dict[str, Any], settings: Settings, tokenizer: Tokenizer) -> Tower:  # noqa: ARG001
    tower = WordsTower(vocabulary=tokenizer.vocabulary_size, length=tokenizer.length, **own)
    return Tower(tower, tower.features, own)


def _library_image(own: dict[str, Any], settings: Settings, tokenizer: Tokenizer) -> Tower:  # noqa: ARG001
    return image_tower(Library(**own), image_size=settings["image_size"], channels=settings["channels"])


def _library_text(own: dict[str, Any], settings: Settings, tokenizer: Tokenizer) -> Tower:  # noqa: ARG001
    return text_tower(Library(**own), tokenizer=tokenizer)


def _timm(own: dict[str, Any], settings: Settings, tokenizer: Tokenizer) -> Tower:  # noqa: ARG001
    return timm_tower(Timm(**own), image_size=settings["image_size"], channels=settings["channels"])


def _openclip_image(own: dict[str, Any], settings: Settings, tokenizer: Tokenizer) -> Tower:  # noqa: ARG001
    return openclip_image(OpenClip(**own), image_size=settings["image_size"], channels=settings["channels"])


def _openclip_text(own: dict[str, Any], settings: Settings, tokenizer: Tokenizer) -> Tower:  # noqa: ARG001
    return openclip_text(OpenClip(**own), tokenizer=tokenizer)


Maker = Callable[[dict[str, Any], Settings, Tokenizer], Tower]
IMAGE_TOWERS: dict[str, Maker] = {
    "conv": _conv,
    "transformers": _library_image,
    "timm": _timm,
    "open_clip": _openclip_image,
}
TEXT_TOWERS: dict[str, Maker] = {"words": _words, "transformers": _library_text, "open_clip": _openclip_text}
# what a model of both sides comes from, and what takes it apart
WHOLE: dict[str, tuple[Callable[..., Any], Callable[..., Whole]]] = {
    "transformers": (Library, whole_model),
    "open_clip": (OpenClip, openclip_whole),
}
