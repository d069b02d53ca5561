"""The settings of each kind of tower, of a recipe of pictures and texts and of a retriever's encoders.

Part of the configuration, on `base.py` and under `image_text.py`. `models/` builds the towers.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from contrastile.models.remote_code import RULE, read_open_clip, refuse_remote_code, remote_code
from contrastile.train.config.base import Clash, FilePath, FolderPath, Positive, Settings, Width, kind_or, needs, one_of


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

    `sizes.py` asks transformers for the keys that a model_type reads, once the rest of the recipe is right.
    """

    kind: Literal["transformers"] = "transformers"
    folder: str | None = None
    config: dict[str, Any] | None = None
    instead: ClassVar = one_of("folder", "config")

    def clashes(self) -> Iterable[Clash]:
        yield self.either("folder", "config")
        no_type = self.config is not None and "model_type" not in self.config
        yield no_type, "config", 'must have a model_type, such as "vit"'

    def training_clashes(self) -> Iterable[Clash]:
        code, folder = remote_code(self.config), self.folder
        yield code is not None, "config", f"must {RULE}; got {code}"
        if folder is not None:
            no_config = not Path(folder, "config.json").is_file()
            yield no_config, "folder", f'must be a folder with a config.json; got "{folder}"'
            try:
                no_type = "model_type" not in refuse_remote_code(folder)
            except ValueError as failure:
                # the sentence without its name, which the recipe's key replaces; a clash ends the checks
                yield True, "folder", str(failure).partition("` ")[2]
            yield no_type, "folder", f'must be a folder whose config.json has a model_type; got "{folder}"'


class TransformersTower(TransformersModel):
    """A text tower. Its features are the mean over positions, the first position ("cls") or the model's pooler."""

    pooling: Literal["mean", "cls", "pooler"] = "mean"


class TransformersOfPixels(TransformersTower, OfPixels):
    """An image tower."""


class TransformersWhole(TransformersModel, OfPixels):
    """Both sides of a CLIP or SigLIP, which have poolers of their own."""


class TimmTower(OfPixels):
    """An image model of timm by its `name`; `config` holds further arguments of timm.create_model.

    checkpoint, here and of open_clip: local weights as safetensors, or of torch.save; without one they are random.
    """

    checkpoint: FilePath | None = None
    kind: Annotated[Literal["timm"], needs("timm", "timm")] = "timm"
    name: str
    config: dict[str, Any] = Field(default_factory=dict)


class OpenClipModel(Settings):
    """A model of open_clip, or one side of it: by its `name`, or a `config` such as open_clip's files hold.

    Or a local `folder` with its files on the hub: open_clip_config.json and weights.
    """

    checkpoint: FilePath | None = None
    kind: Annotated[Literal["open_clip"], needs("open_clip", "open_clip_torch")] = "open_clip"
    name: str | None = None
    config: dict[str, Any] | None = None
    folder: FolderPath | None = None
    instead: ClassVar = {"folder": ("name", "config", "checkpoint"), "name": ("folder",), "config": ("folder",)}

    def clashes(self) -> Iterable[Clash]:
        wrong, key, reason = self.either("name", "config")
        yield wrong and self.folder is None, key, reason
        beside = [name for name in ("name", "config", "checkpoint") if getattr(self, name) is not None]
        got = f"must be given alone, it has all of them; got {' and '.join(beside)} beside it"
        yield beside and self.folder is not None, "folder", got

    def training_clashes(self) -> Iterable[Clash]:
        try:
            self.described()
        except ValueError as failure:
            yield True, "folder", str(failure).partition("` ")[2]

    def described(self) -> dict[str, Any] | None:
        """The configuration of the model, of the folder's or of `config`; None for a name."""
        return self.config if self.folder is None else read_open_clip(self.folder)["model_cfg"]


class OpenClipOfPixels(OpenClipModel, OfPixels):
    """A whole model of open_clip, or its image side."""


AnyImageTower = Annotated[
    ConvTower | TransformersOfPixels | TimmTower | OpenClipOfPixels, Field(discriminator="kind"), kind_or("conv")
]
AnyTextTower = Annotated[WordsTower | TransformersTower | OpenClipModel, Field(discriminator="kind"), kind_or("words")]
AnyWhole = Annotated[TransformersWhole | OpenClipOfPixels, Field(discriminator="kind"), kind_or("transformers")]
