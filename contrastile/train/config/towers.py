"""The `[model]` section of a recipe of pictures and texts: its towers, and the tokenizer of the texts.

Part of the configuration. `models/` builds what these classes describe; `sizes.py` compares sizes between sections.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from contrastile.models.remote_code import RULE, refuse_remote_code, remote_code
from contrastile.train.config.base import (
    ClashError,
    Count,
    FilePath,
    Instead,
    Positive,
    Settings,
    TokenizerFolder,
    Unused,
    Width,
    either,
    kind_or,
    needs,
    needs_files,
)

Side = Literal["image", "text"]


class ConvTower(Settings):
    """The small convolutional net of the demo."""

    kind: Literal["conv"] = "conv"
    width: Width = 32


class WordsTower(Settings):
    """The small word-level text tower of the demo."""

    kind: Literal["words"] = "words"
    width: Width = 128


def _one_or_three(numbers: tuple[float, ...]) -> tuple[float, ...]:
    if len(numbers) not in (1, 3):
        raise ValueError(f"must be one number, or three; got {len(numbers)}")
    return numbers


class OfPixels(Settings):
    """Normalisation of pixels by `mean` and `std`, one number or one for each channel; by default the model's own."""

    mean: Annotated[tuple[float, ...], AfterValidator(_one_or_three)] | None = None
    std: Annotated[tuple[Positive, ...], AfterValidator(_one_or_three)] | None = None


class TransformersModel(Settings):
    """A model of transformers: a local `folder` with its weights, or a `config` with its model_type, from scratch.

    `model_probe.py` asks transformers for the keys that a model_type reads, once the rest of the recipe is right.
    """

    kind: Literal["transformers"] = "transformers"
    folder: Annotated[str | None, Instead(("config",))] = None
    config: Annotated[dict[str, Any] | None, Instead(("folder",))] = None

    _one_origin = either("folder", "config")

    @field_validator("folder")
    @classmethod
    def _folder_holds_a_model(cls, folder: str | None, info: ValidationInfo) -> str | None:
        if folder is None or not needs_files(info):
            return folder
        if not os.path.isfile(os.path.join(folder, "config.json")):
            raise ValueError(f'must be a folder with a config.json; got "{folder}"')
        try:
            entries = refuse_remote_code(folder)
        except ValueError as failure:
            # the sentence without its name, which the recipe's key replaces
            raise ValueError(str(failure).partition("` ")[2]) from failure
        if "model_type" not in entries:
            raise ValueError(f'must be a folder whose config.json has a model_type; got "{folder}"')
        return folder

    @field_validator("config")
    @classmethod
    def _config_has_a_type(cls, config: dict[str, Any] | None, info: ValidationInfo) -> dict[str, Any] | None:
        if config is not None and "model_type" not in config:
            raise ValueError('must have a model_type, such as "vit"')
        if needs_files(info) and (code := remote_code(config)) is not None:
            raise ValueError(f"must {RULE}; got {code}")
        return config

    @property
    def trained(self) -> bool:
        """True where it comes with weights."""
        return self.folder is not None


class TransformersTower(TransformersModel):
    """A text tower. Its features are the mean over positions, the first position ("cls") or the model's pooler."""

    pooling: Literal["mean", "cls", "pooler"] = "mean"


class TransformersOfPixels(TransformersTower, OfPixels):
    """An image tower."""


class TransformersWhole(TransformersModel, OfPixels):
    """Both sides of a CLIP or SigLIP, which have poolers of their own."""


class FileModel(Settings):
    """A model of another library: random weights, or those of a local `checkpoint`: safetensors, or of torch.save."""

    checkpoint: FilePath | None = None

    @property
    def trained(self) -> bool:
        """True where it comes with weights."""
        return self.checkpoint is not None


class TimmTower(FileModel, OfPixels):
    """An image model of timm by its `name`; `config` holds further arguments of timm.create_model."""

    kind: Annotated[Literal["timm"], needs("timm", "timm")] = "timm"
    name: str
    config: dict[str, Any] = Field(default_factory=dict)


class OpenClipModel(FileModel):
    """A model of open_clip, or one side of it: by its `name`, or a `config` such as open_clip's files hold."""

    kind: Annotated[Literal["open_clip"], needs("open_clip", "open_clip_torch")] = "open_clip"
    name: str | None = None
    config: dict[str, Any] | None = None

    _one_origin = either("name", "config")


class OpenClipOfPixels(OpenClipModel, OfPixels):
    """A whole model of open_clip, or its image side."""


AnyImageTower = Annotated[
    ConvTower | TransformersOfPixels | TimmTower | OpenClipOfPixels, Field(discriminator="kind"), kind_or("conv")
]
AnyTextTower = Annotated[WordsTower | TransformersTower | OpenClipModel, Field(discriminator="kind"), kind_or("words")]
AnyWhole = Annotated[TransformersWhole | OpenClipOfPixels, Field(discriminator="kind"), kind_or("transformers")]

# the words and subwords of a tokenizer are learned only where none is given
GIVEN = Unused("folder", lambda tokenizer: tokenizer.folder is not None)


class TokenizerSettings(Settings):
    """A tokenizer learned from the run's own titles, the one in `folder`, or CLIP's from the package open_clip."""

    kind: Annotated[Literal["words", "open_clip"], GIVEN] = "words"
    size: Annotated[int, Field(ge=8, le=2**24), GIVEN] = 8000
    length: Width = 16
    folder: TokenizerFolder | None = None


def require_tokenizer(encoders: Iterable[Any], folder: str | None) -> None:
    """Raise `ClashError` where a text encoder has trained weights, and the run would learn another tokenizer."""
    for encoder in encoders:
        if folder is None and isinstance(encoder, TransformersModel) and encoder.trained:
            reason = f'must be given with the text encoder in "{encoder.folder}": its weights know its own tokens'
            raise ClashError("model.tokenizer.folder", reason)


class ModelSettings(Settings):
    """Two towers, or one model for `both`, and the size of the features that they share."""

    features: Annotated[
        Width, Unused("both", lambda model: model.both is not None, "leave it out: that model has its own")
    ] = 256
    locked: tuple[Side, ...] = ()
    unlocked: dict[Side, Count] = Field(default_factory=dict)
    precompute: bool = False
    checkpointing: tuple[Side, ...] = ()
    image: AnyImageTower | None = None
    text: AnyTextTower | None = None
    both: Annotated[AnyWhole | None, Instead(("image", "text"))] = None
    tokenizer: Annotated[
        TokenizerSettings,
        Unused(
            "tokenizer.kind",
            lambda model: model.tokenizer.kind == "open_clip",
            "leave it out: CLIP's words are given",
            also=("text", "both"),
            part="size",
        ),
    ] = TokenizerSettings()

    @model_validator(mode="before")
    @classmethod
    def _fill_in_towers(cls, section: Any) -> Any:
        """Give each side its small tower where no model for both is named, and open_clip its own tokenizer."""
        if not isinstance(section, Mapping):
            return section
        sides, tokenizer = [section.get(side) for side in ("both", "text")], section.get("tokenizer", {})
        clip = any(isinstance(side, Mapping) and side.get("kind") == "open_clip" for side in sides)
        if clip and isinstance(tokenizer, Mapping):
            section = {**section, "tokenizer": {"kind": "open_clip", "length": 77, **tokenizer}}
        if "both" not in section:
            return {"image": {"kind": "conv"}, "text": {"kind": "words"}, **section}
        if "image" in section or "text" in section:
            raise ValueError("must have either both or image and text")
        return section

    @model_validator(mode="after")
    def _text_towers_have_their_tokenizer(self) -> ModelSettings:
        require_tokenizer([self.both, self.text], self.tokenizer.folder)
        learned = self.tokenizer.kind != "open_clip" and self.tokenizer.folder is None
        if learned and any(isinstance(tower, OpenClipModel) for tower in (self.both, self.text)):
            rule = 'must be "open_clip", or a folder, for a text tower of open_clip'
            raise ClashError("model.tokenizer.kind", f'{rule}; got "{self.tokenizer.kind}"')
        return self

    @model_validator(mode="after")
    def _unlocked_layers_are_of_locked_towers(self) -> ModelSettings:
        if free := sorted(set(self.unlocked) - set(self.locked)):
            reason = f'must be layers of a tower in model.locked; add "{free[0]}" there'
            raise ClashError(f"model.unlocked.{free[0]}", reason)
        if self.precompute and ("image" not in self.locked or "image" in self.unlocked):
            reason = 'must be false unless model.locked has "image" and none of its layers is unlocked; got true'
            raise ClashError("model.precompute", reason)
        return self
