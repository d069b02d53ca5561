"""The type that `contrastile.load` returns, for finished runs of either kind, with the methods of both.

A type checker cannot know which kind a folder holds; a method of the other kind raises and says what the run has.
"""

# arguments are those of the methods that override these
# ruff: noqa: ARG002
from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from contrastile._errors import invalid

if TYPE_CHECKING:
    from PIL.Image import Image

    from contrastile.data.texts import Passage
    from contrastile.models.text import Tokenizer

# each kind of run, and its methods
PICTURES = "of pictures and texts", "encode_image, encode_text and transform"
RETRIEVER = "a retriever's", "encode_query and encode_passage"
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """The autocast context of a precision; without effect for those that weights are stored in."""
    half = HALVES.get(precision)
    return torch.autocast(device.type, dtype=half, enabled=half is not None)


@dataclass(frozen=True, repr=False)
class LoadedRun:
    """The encoders of a run with tokenizer and device; raises ValueError at a method of the other kind."""

    recipe: Any
    model: Any
    tokenizer: Tokenizer
    device: torch.device

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision that the run's encoders train with."""
        return autocast(self.device, self.recipe.train.precision)

    def __repr__(self) -> str:
        """One line: the name, the methods, the size and the device."""
        methods = (PICTURES if self.recipe.kind == "image-text" else RETRIEVER)[1]
        millions = sum(parameter.numel() for parameter in self.model.parameters()) / 1e6
        return f"<run {self.recipe.name}: {methods}; {millions:.1f} million parameters on {self.device}>"

    def transform(self, images: Sequence[Image]) -> Tensor:
        """Pillow pictures as uint8 `[n, C, S, S]`, for a run of pictures and texts."""
        raise _other("transform", PICTURES, RETRIEVER)

    def encode_image(self, images: Sequence[Image] | Tensor) -> Tensor:
        """Features `[n, D]` of pictures, float32 unit rows, for a run of pictures and texts."""
        raise _other("encode_image", PICTURES, RETRIEVER)

    def encode_text(self, texts: Sequence[str]) -> Tensor:
        """Features `[n, D]` of texts, float32 unit rows, for a run of pictures and texts."""
        raise _other("encode_text", PICTURES, RETRIEVER)

    def encode_query(self, texts: Sequence[str], *, dimensions: int | None = None) -> Tensor:
        """Features `[n, D]` of questions, float32, for a retriever."""
        raise _other("encode_query", RETRIEVER, PICTURES)

    def encode_passage(self, passages: Sequence[Passage | str], *, dimensions: int | None = None) -> Tensor:
        """Features `[n, D]` of passages, float32, for a retriever."""
        raise _other("encode_passage", RETRIEVER, PICTURES)


def _other(method: str, needed: tuple[str, str], own: tuple[str, str]) -> ValueError:
    return invalid("run", f"be {needed[0]} for {method}", f"one that is {own[0]}", f"It has {own[1]}.")
