"""The `[model]` section of a recipe of pictures and texts: its towers, and the tokenizer of the texts.

Within the first station of a run, beside `config.py`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Tag, ValidationInfo, field_validator, model_validator

from contrastile.train.settings import (
    ClashError,
    Count,
    Positive,
    Settings,
    Width,
    files_matter,
    holds_tokenizer,
    installed,
    kind_or,
)


class ConvTower(Settings):
    """The small convolutional net of the demo."""

    kind: Literal["conv"] = "conv"
    width: Width = 32


class WordsTower(Settings):
    """The small word-level text tower of the demo."""

    kind: Literal["words"] = "words"
    width: Width = 128


def _for_each_channel(numbers: tuple[float, ...]) -> tuple[float, ...]:
    if len(numbers) not in (1, 3):
        raise ValueError(f"must be one number, or three; got {len(numbers)}")
    return numbers


OfChannels = Annotated[tuple[float, ...], AfterValidator(_for_each_channel)]
OfChannelsAboveZero = Annotated[tuple[Positive, ...], AfterValidator(_for_each_channel)]


def read_config(path: str) -> Mapping[str, Any]:
    """A model's config.json; raises ValueError where that is none."""
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError, RecursionError) as failure:
        raise ValueError(f'must be a folder whose config.json can be read; got "{path}" ({failure})') from failure
    if not isinstance(config, Mapping) or "model_type" not in config:
        raise ValueError(f'must be a folder whose config.json has a model_type; got "{path}"')
    return config


def _check_type(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a model_type that transformers does not know, by the words in its own lists.

    The library itself takes seconds to load. Where it is loaded, others may have told it of models of their own.
    """
    lists = _sources("models/auto/auto_mappings.py", "models/auto/configuration_auto.py")
    known = set(re.findall(r'"([a-z0-9._-]+)"', "".join(lists)))
    kind = str(config["model_type"])
    if known and kind not in known:
        raise ValueError(f'must have a model_type that transformers knows; got "{kind}"{_near(kind, known)}')


def _check_keys(config: Mapping[str, Any], kind: str | None = None) -> None:
    """Raises ValueError for a key that no configuration of transformers reads, whatever the model, likewise.

    What another model reads, and this one does not, the library says when it is loaded.
    """
    # one that the library wrote holds what others read
    if "transformers_version" in config:
        return
    kind = str(config.get("model_type", kind))
    sources = _sources("configuration_utils.py", "generation/configuration_utils.py", "models/*/configuration_*.py")
    known = {word for text in sources for word in _words(text)}
    for key, value in config.items() if known else ():
        if key not in known:
            own = {word for text in sources if f'"{kind}"' in text for word in _words(text)}
            raise ValueError(f"must have keys that transformers reads; got {key}{_near(key, own)}")
        if key in ("vision_config", "text_config") and isinstance(value, Mapping):
            _check_keys(value, kind)


def _words(text: str) -> list[str]:
    return re.findall(r"\b[A-Za-z_]\w*", text)


def _near(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, sorted(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _sources(*patterns: str) -> list[str]:
    """Files of transformers; none where it is loaded, or is not there."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None or "transformers" in sys.modules:
        return []
    folder = Path(spec.origin).parent
    return [path.read_text(encoding="utf-8") for pattern in patterns for path in folder.glob(pattern)]


class OfPixels(Settings):
    """What sees pictures: `mean` and `std` are what pixels are normalised with; the model's own where left out."""

    mean: OfChannels | None = None
    std: OfChannelsAboveZero | None = None


class TransformersModel(Settings):
    """A model of transformers: a local `folder` with its weights, or a `config` with its model_type, from scratch."""

    kind: Literal["transformers"] = "transformers"
    folder: str | None = None
    config: dict[str, Any] | None = None

    @field_validator("folder")
    @classmethod
    def _folder_exists(cls, folder: str | None, info: ValidationInfo) -> str | None:
        if folder is not None and files_matter(info):
            path = os.path.join(folder, "config.json")
            if not os.path.isfile(path):
                raise ValueError(f'must be a folder with a config.json; got "{folder}"')
            _check_type(read_config(path))
        return folder

    @field_validator("config")
    @classmethod
    def _config_has_a_type(cls, config: dict[str, Any] | None, info: ValidationInfo) -> dict[str, Any] | None:
        if config is not None and "model_type" not in config:
            raise ValueError('must have a model_type, such as "vit"')
        if config is not None and files_matter(info):
            _check_type(config)
            _check_keys(config)
        return config

    @model_validator(mode="after")
    def _one_origin(self) -> TransformersModel:
        if (self.folder is None) == (self.config is None):
            raise ValueError("must have either folder or config, and not both")
        return self

    @property
    def trained(self) -> bool:
        """Whether it comes with weights."""
        return self.folder is not None


def own_tokenizer(encoders: Sequence[Any], tokenizer: str | None) -> None:
    """Raises `ClashError` where an encoder of texts has a folder's weights, and the run would make a new tokenizer."""
    for encoder in encoders:
        if tokenizer is None and isinstance(encoder, TransformersModel) and encoder.trained:
            reason = f'must be given with the text encoder in "{encoder.folder}": its weights know its own tokens'
            raise ClashError("model.tokenizer.folder", reason)


class FileModel(Settings):
    """What models of other libraries share: random weights, or those of a local `checkpoint`.

    It is safetensors, or tensors that torch.save wrote.
    """

    checkpoint: str | None = None

    @field_validator("checkpoint")
    @classmethod
    def _checkpoint_exists(cls, checkpoint: str | None, info: ValidationInfo) -> str | None:
        if checkpoint is not None and files_matter(info) and not os.path.isfile(checkpoint):
            raise ValueError(f'no such file "{checkpoint}"')
        return checkpoint

    @property
    def trained(self) -> bool:
        """Whether it comes with weights."""
        return self.checkpoint is not None


class TimmTower(FileModel, OfPixels):
    """An image model of timm, by its `name` there; `config` are further arguments of timm.create_model."""

    kind: Literal["timm"] = "timm"
    name: str
    config: dict[str, Any] = Field(default_factory=dict)

    @field_validator("kind")
    @classmethod
    def _is_there(cls, kind: str, info: ValidationInfo) -> str:
        if files_matter(info):
            installed("timm", "timm")
        return kind


class OpenClipModel(FileModel):
    """A model of open_clip, or one side of it: by its `name` there, or a `config` such as open_clip's files hold."""

    kind: Literal["open_clip"] = "open_clip"
    name: str | None = None
    config: dict[str, Any] | None = None

    @field_validator("kind")
    @classmethod
    def _is_there(cls, kind: str, info: ValidationInfo) -> str:
        if files_matter(info):
            installed("open_clip", "open_clip_torch")
        return kind

    @model_validator(mode="after")
    def _one_origin(self) -> OpenClipModel:
        if (self.name is None) == (self.config is None):
            raise ValueError("must have either name or config, and not both")
        return self


class OpenClipOfPixels(OpenClipModel, OfPixels):
    """The whole of it, or its side of pictures."""


class TransformersTower(TransformersModel):
    """One side alone: its features are the mean over its places, its first place ("cls") or its own pooler's."""

    pooling: Literal["mean", "cls", "pooler"] = "mean"


class TransformersOfPixels(TransformersTower, OfPixels):
    """The side of pictures."""


class TransformersWhole(TransformersModel, OfPixels):
    """Both sides of a CLIP or SigLIP, which have poolers of their own."""


AnyImageTower = Annotated[
    Annotated[ConvTower, Tag("conv")]
    | Annotated[TransformersOfPixels, Tag("transformers")]
    | Annotated[TimmTower, Tag("timm")]
    | Annotated[OpenClipOfPixels, Tag("open_clip")],
    kind_or("conv"),
]
AnyTextTower = Annotated[
    Annotated[WordsTower, Tag("words")]
    | Annotated[TransformersTower, Tag("transformers")]
    | Annotated[OpenClipModel, Tag("open_clip")],
    kind_or("words"),
]
AnyWhole = Annotated[
    Annotated[TransformersWhole, Tag("transformers")] | Annotated[OpenClipOfPixels, Tag("open_clip")],
    kind_or("transformers"),
]


class TokenizerSettings(Settings):
    """A tokenizer of `size` words trained on the run's own titles, or that in `folder`; titles are cut at `length`.

    Of the kind "open_clip" it is CLIP's, from the package open_clip, which text towers of open_clip have by default.
    """

    kind: Literal["words", "open_clip"] = "words"
    size: Annotated[int, Field(ge=8, le=2**24)] = 8000
    length: Width = 16
    folder: Annotated[str | None, AfterValidator(holds_tokenizer)] = None


class ModelSettings(Settings):
    """The two towers, or one model for `both`, and the size of the features that they meet in.

    A tower that is `locked` keeps its weights; its projection learns (LiT), and so do its last `unlocked` layers, such
    as {image = 2}. With `precompute` a locked image tower sees each picture once, before the first step. Those named by
    `checkpointing` compute their layers again in the backward, where their library can: a larger sub-batch then fits.
    """

    features: Width = 256
    locked: tuple[Literal["image", "text"], ...] = ()
    unlocked: dict[Literal["image", "text"], Count] = Field(default_factory=dict)
    precompute: bool = False
    checkpointing: tuple[Literal["image", "text"], ...] = ()
    image: AnyImageTower | None = None
    text: AnyTextTower | None = None
    both: AnyWhole | None = None
    tokenizer: TokenizerSettings = TokenizerSettings()

    @model_validator(mode="before")
    @classmethod
    def _towers_or_both(cls, section: Any) -> Any:
        """Where there is no model for both, each side has its small tower by default."""
        if not isinstance(section, Mapping):
            return section
        sides = [section.get(side) for side in ("both", "text")]
        if any(isinstance(side, Mapping) and side.get("kind") == "open_clip" for side in sides):
            section = {**section, "tokenizer": _clips(section.get("tokenizer", {}))}
        if "both" not in section:
            return {"image": {"kind": "conv"}, "text": {"kind": "words"}, **section}
        if "image" in section or "text" in section:
            raise ValueError("must have either both or image and text")
        return section

    @model_validator(mode="after")
    def _weights_come_with_their_tokenizer(self) -> ModelSettings:
        own_tokenizer([self.both, self.text], self.tokenizer.folder)
        return self

    @model_validator(mode="after")
    def _unlocked_is_part_of_locked(self) -> ModelSettings:
        if loose := sorted(set(self.unlocked) - set(self.locked)):
            reason = f'must be layers of a tower in model.locked; add "{loose[0]}" there'
            raise ClashError(f"model.unlocked.{loose[0]}", reason)
        if self.precompute and ("image" not in self.locked or "image" in self.unlocked):
            reason = 'must be false unless model.locked has "image" and none of its layers is unlocked; got true'
            raise ClashError("model.precompute", reason)
        return self

    @model_validator(mode="after")
    def _clip_reads_with_its_own_tokenizer(self) -> ModelSettings:
        other = self.tokenizer.kind != "open_clip" and self.tokenizer.folder is None
        if other and any(isinstance(side, OpenClipModel) for side in (self.both, self.text)):
            raise ClashError(
                "model.tokenizer.kind", 'must be "open_clip", or a folder, for a text tower of open_clip; got "words"'
            )
        return self


def _clips(tokenizer: Any) -> Any:
    """What is left out of a tokenizer for CLIP's text tower."""
    return {"kind": "open_clip", "length": 77, **tokenizer} if isinstance(tokenizer, Mapping) else tokenizer
