"""The recipe of pictures and texts: its data, its losses, its training steps, and how its sections fit together.

Part of the configuration, on top of the sections of every run (`run.py`) and of the towers (`towers.py`).
"""

from __future__ import annotations

import json
import logging
import os
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from contrastile.data.sources import columns, is_collection, missing, read_source
from contrastile.train.config.base import (
    ClashError,
    Count,
    Fraction,
    Instead,
    Settings,
    Unused,
    check_installed,
    kind_or,
    needs_files,
    same_for,
)
from contrastile.train.config.evaluate import EvaluateSettings
from contrastile.train.config.run import AnyRecipe, LossSettings, Steps
from contrastile.train.config.sizes import check_image_text
from contrastile.train.config.towers import ModelSettings

logger = logging.getLogger("contrastile")


class DataSettings(Settings):
    """Pairs of pictures and titles. `source`: "glyphs", a table (.tsv or .csv), or a collection: tar shards such as
    "a/{000..099}.tar", parquet files and folders of pictures, several joined by "::".
    """

    source: str = "glyphs"
    image_size: Annotated[int, Field(ge=8, le=1024)] = 32
    channels: Literal[1, 3] = 1
    held_out: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    cache: str = "~/.cache/contrastile"
    augment: bool = True
    weights: tuple[Count, ...] = ()
    max_bad_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.01
    copies: Annotated[int, Field(ge=1, le=10_000)] = 1

    @model_validator(mode="after")
    def _copies_are_augmented(self) -> DataSettings:
        if self.copies > 1 and (is_collection(self.source) or not self.augment):
            reason = f"must be 1 but for glyphs or a table, with data.augment; got {self.copies}"
            raise ClashError("data.copies", reason)
        return self

    @field_validator("channels", mode="before")
    @classmethod
    def _channels_are_a_number(cls, channels: Any) -> Any:
        # pydantic's Literal[1, 3] accepts true, which is equal to 1
        if channels is True:
            raise ValueError("must be 1 or 3; got true")
        return channels

    @field_validator("source")
    @classmethod
    def _source_is_known(cls, source: str, info: ValidationInfo) -> str:
        if source == "docstrings":
            raise ValueError('is a set of texts; set kind = "retriever" at the top of the recipe')
        parts = [] if source == "glyphs" else read_source(source)
        if not needs_files(info):
            return source
        absent = [path for part in parts if (path := missing(part)) is not None]
        if absent and source == absent[0] and not os.path.splitext(source)[1]:
            raise ValueError(f'must be "glyphs", a .tsv, .csv, .tar or .parquet file, or a folder; got "{source}"')
        if absent:
            raise ValueError(f'no such file "{absent[0]}"')
        if any(part.kind == ".parquet" for part in parts):
            check_installed("pyarrow", '"contrastile[data]"')
        # of many tables the first one stands for all
        table = next((path for part in parts if part.kind == ".tsv" for path in part.paths), None)
        if table is not None and not {"filepath", "title"} <= set(names := columns(table)):
            got = json.dumps(names, ensure_ascii=False)
            raise ValueError(f"must have the columns filepath and title in the first line, between tabs; got {got}")
        return source

    @field_validator("weights")
    @classmethod
    def _one_weight_for_each_source(cls, weights: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        source = info.data.get("source")
        if not weights or source is None:
            return weights
        if not is_collection(source):
            raise ValueError(f'must be left out: "{source}" is no collection of several sources')
        if len(weights) != (count := len(read_source(source))):
            raise ValueError(f"must be one for each of the {count} sources; got {len(weights)}")
        return weights


class ClipSettings(LossSettings):
    """ClipLoss. The learned scale starts at `scale`; 14.3 is CLIP's temperature of 0.07."""

    kind: Literal["clip"] = "clip"
    scale: Annotated[float, Field(ge=1.0, le=100.0)] = 14.3
    label_smoothing: Fraction = 0.0


class SigLipSettings(LossSettings):
    """SigLipLoss. The learned scale and bias start at `scale` and `bias`, by default SigLIP's values."""

    kind: Literal["siglip"] = "siglip"
    scale: Annotated[float, Field(ge=1.0, le=100.0)] = 10.0
    bias: float = -10.0


AnyLoss = Annotated[ClipSettings | SigLipSettings, Field(discriminator="kind"), kind_or("clip")]


class SubBatch(Settings):
    """Examples that each encoder sees at once; with `text_tokens`, as many texts as so many tokens allow."""

    image: Count = 256
    text: Annotated[Count, Instead(("text_tokens",))] = 256
    text_tokens: Annotated[Count | None, Instead(("text",))] = None

    def of_texts(self) -> dict[str, Any]:
        """The arguments of `encode` that limit a sub-batch of texts."""
        return {"sub_batch": self.text} if self.text_tokens is None else {"sub_batch_tokens": self.text_tokens}

    def texts_at_once(self, length: int) -> int:
        """The number of texts of `length` tokens in a sub-batch."""
        return self.text if self.text_tokens is None else max(1, self.text_tokens // length)


def _limited(sub_batch: SubBatch, batch: tuple[tuple[float, int], ...] | None) -> SubBatch:
    """The sub-batch, at most as large as the largest batch."""
    largest = max((size for _, size in batch), default=1) if batch else 2**53
    return sub_batch.model_copy(update={side: min(getattr(sub_batch, side), largest) for side in ("image", "text")})


class TrainSettings(Steps):
    """Training steps on pictures and texts. A sub-batch above the largest batch is reduced to it.

    "float64" is for comparing ways to compute the same: after a hundred steps rounding still does not show.
    """

    sub_batch: Annotated[SubBatch, same_for("image", "text")] = Field(
        default_factory=lambda data: _limited(SubBatch(), data.get("batch"))
    )
    precision: Literal["float32", "float64", "bf16", "fp16"] = "float32"
    compile: bool = False
    smallest_part: ClassVar[int] = 2

    @model_validator(mode="after")
    def _shards_are_not_compiled(self) -> TrainSettings:
        if self.compile and self.parallel == "shard":
            raise ClashError("train.compile", 'must be false with train.parallel = "shard"; got true')
        return self

    @field_validator("sub_batch")
    @classmethod
    def _sub_batch_is_part_of_a_batch(cls, sub_batch: SubBatch, info: ValidationInfo) -> SubBatch:
        limited = _limited(sub_batch, info.data.get("batch"))
        for side in ("image", "text") if needs_files(info) else ():
            given, size = getattr(sub_batch, side), getattr(limited, side)
            if side in sub_batch.model_fields_set and given > size:
                logger.warning("train.sub_batch.%s is %d, the largest batch, instead of %d", side, size, given)
        return limited


class Recipe(AnyRecipe):
    """A whole run of pictures and texts."""

    kind: Literal["image-text"] = "image-text"
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings.model_validate({})
    loss: AnyLoss = ClipSettings()
    train: TrainSettings
    evaluate: Annotated[
        EvaluateSettings,
        Unused(
            "data.source",
            lambda recipe: recipe.evaluate.digits and recipe.data.source != "glyphs",
            "leave it out: they are a test of glyphs",
            part="digits",
        ),
    ] = EvaluateSettings()

    @model_validator(mode="after")
    def _sections_fit_together(self, info: ValidationInfo) -> Recipe:
        if needs_files(info):
            check_image_text(self.data, self.model)
        if self.model.precompute and self.data.augment:
            raise ClashError("data.augment", "must be false with model.precompute: each picture is seen once; got true")
        tokens, length = self.train.sub_batch.text_tokens, self.model.tokenizer.length
        if tokens is not None and tokens < length:
            reason = f"must be at least model.tokenizer.length, the tokens of one title; got {tokens} and {length}"
            raise ClashError("train.sub_batch.text_tokens", reason)
        return self
