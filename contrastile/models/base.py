"""What a tower is, whichever library it is of: its module, the size of its features, and whether a recipe fits it.

Under `pretrained.py`, `timm_tower.py` and `openclip.py`, which build the towers of their libraries, and under
`towers.py` and `retriever.py`, which join them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from contrastile._check import wrong
from contrastile.models.text import Tokenizer

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Tower:
    """A tower, the size of its features, and the settings that make its shapes again from no folder."""

    module: nn.Module
    features: int
    settings: dict[str, Any]


@dataclass(frozen=True)
class Whole:
    """The two towers of a CLIP or SigLIP and their projections; a folder's own scale and bias, None for a config."""

    image: Tower
    text: Tower
    image_projection: nn.Module
    text_projection: nn.Module
    scale: float | None
    bias: float | None
    settings: dict[str, Any]


class PixelTower(nn.Module):
    """A model of pixels that ends in features; takes pixels in [0, 1], grey ones also where it expects colours."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, channels: int, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.model = model
        self.channels = channels
        for name, values in (("mean", mean), ("std", std)):
            # one grey channel is normalised with the mean of the colours'
            kept = values if len(values) == channels else [sum(values) / len(values)]
            self.register_buffer(name, torch.tensor(kept).view(-1, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """`[B, C, S, S]` to `[B, features]`."""
        if pixels.shape[1] == 1:
            pixels = pixels.expand(-1, self.channels, -1, -1)
        return self._features((pixels - self.mean) / self.std)

    def _features(self, pixels: Tensor) -> Tensor:
        """What the model gives of pixels as it expects them."""
        return self.model(pixels)


def completed(settings: Settings, defaults: Settings) -> dict[str, Any]:
    """The settings, with the defaults of those that are not given; raises ValueError for a key that has none."""
    unknown = sorted(set(settings) - set(defaults))
    if unknown:
        raise wrong("settings", f"have keys among {', '.join(defaults)}", ", ".join(unknown), "Leave the others out.")
    return {**defaults, **settings}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout; afterwards as it was."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def width_of(tower: nn.Module, *inputs: Tensor) -> int:
    """How wide a tower's features are, whatever its configuration calls it; leaves weights and random numbers alone."""
    with evaluating(tower), torch.no_grad():
        return int(tower(*inputs).shape[1])


def repeated(tower: nn.Module) -> list[nn.Module]:
    """Parts that are made of others and stand in a row with more of their kind: blocks of attention, of convolutions.

    In the order of their rows; what is inside of one comes behind it.
    """
    found: list[nn.Module] = []
    for row in tower.modules():
        if isinstance(row, (nn.ModuleList, nn.Sequential)):
            kinds = Counter(type(part) for part in row)
            found += [part for part in row if kinds[type(part)] > 1 and next(part.children(), None) is not None]
    return found


def refuse_other_pictures(
    image_size: int, channels: int, *, size: int | Sequence[int] | None, colours: int | None = None
) -> None:
    """Raises ValueError where an image tower takes pictures of another `size`, or of other `colours` than one grey."""
    if size is not None and size not in (image_size, [image_size, image_size], (image_size, image_size)):
        raise wrong("image_size", f"be the {size} pixels of the image tower", image_size, "Set data.image_size to it.")
    if colours is not None and channels not in (1, colours):
        remedy = "Set data.channels to it, or to 1."
        raise wrong("channels", f"be the {colours} of the image tower", channels, remedy)


def refuse_other_tokens(tokenizer: Tokenizer, *, vocabulary: int, longest: int | None) -> None:
    """Raises ValueError where a text tower has too few tokens, or too few places, for what the tokenizer gives."""
    if tokenizer.vocabulary_size > vocabulary:
        remedy = "Use the tokenizer that the model was made with."
        got = f"{tokenizer.vocabulary_size} for a text tower of {vocabulary}"
        raise wrong("tokenizer", "have no more tokens than the text tower", got, remedy)
    if longest is not None and tokenizer.length > longest:
        remedy = "Set model.tokenizer.length to it."
        raise wrong("length", f"be at most the {longest} tokens of the text tower", tokenizer.length, remedy)
