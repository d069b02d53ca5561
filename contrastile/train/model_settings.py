"""The `[model]` section of a recipe of pictures and texts: its towers, and the tokenizer of the texts.

Within the first station of a run, beside `config.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, ValidationInfo, field_validator, model_validator

from contrastile.train.settings import Count, Settings, files_matter, kind_or


class ConvTower(Settings):
    """The small convolutional net of the demo."""

    kind: Literal["conv"] = "conv"
    width: Count = 32


class WordsTower(Settings):
    """The small word-level text tower of the demo."""

    kind: Literal["words"] = "words"
    width: Count = 128


class TransformersModel(Settings):
    """A model of transformers: a local `folder` with its weights, or a `config` with its model_type, from scratch.

    `mean` and `std` are what pixels are normalised with; a folder's own where they are left out.
    """

    kind: Literal["transformers"] = "transformers"
    folder: str | None = None
    config: dict[str, Any] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    @field_validator("folder")
    @classmethod
    def _folder_exists(cls, folder: str | None, info: ValidationInfo) -> str | None:
        absent = folder is not None and not os.path.isfile(os.path.join(folder, "config.json"))
        if absent and files_matter(info):
            raise ValueError(f'must be a folder with a config.json; got "{folder}"')
        return folder

    @field_validator("config")
    @classmethod
    def _config_has_a_type(cls, config: dict[str, Any] | None) -> dict[str, Any] | None:
        if config is not None and "model_type" not in config:
            raise ValueError('must have a model_type, such as "vit"')
        return config

    @model_validator(mode="after")
    def _one_origin(self) -> TransformersModel:
        if (self.folder is None) == (self.config is None):
            raise ValueError("must have either folder or config, and not both")
        return self


class TransformersTower(TransformersModel):
    """One side alone: its features are the mean over its places, its first place ("cls") or its own pooler's."""

    pooling: Literal["mean", "cls", "pooler"] = "mean"


AnyImageTower = Annotated[
    Annotated[ConvTower, Tag("conv")] | Annotated[TransformersTower, Tag("transformers")], kind_or("conv")
]
AnyTextTower = Annotated[
    Annotated[WordsTower, Tag("words")] | Annotated[TransformersTower, Tag("transformers")], kind_or("words")
]


class TokenizerSettings(Settings):
    """A tokenizer of `size` words trained on the run's own titles, or that in `folder`; titles are cut at `length`."""

    kind: Literal["words"] = "words"
    size: Annotated[int, Field(ge=8)] = 8000
    length: Count = 16
    folder: str | None = None


class ModelSettings(Settings):
    """The two towers, or one model of transformers for `both`, and the size of the features that they meet in.

    A tower that is `locked` keeps its weights; its projection learns (LiT).
    """

    features: Count = 256
    locked: tuple[Literal["image", "text"], ...] = ()
    image: AnyImageTower | None = None
    text: AnyTextTower | None = None
    both: TransformersModel | None = None
    tokenizer: TokenizerSettings = TokenizerSettings()

    @model_validator(mode="before")
    @classmethod
    def _towers_or_both(cls, section: Any) -> Any:
        """Where there is no model for both, each side has its small tower by default."""
        if not isinstance(section, Mapping):
            return section
        if "both" not in section:
            return {"image": {"kind": "conv"}, "text": {"kind": "words"}, **section}
        if "image" in section or "text" in section:
            raise ValueError("must have either both or image and text")
        return section
