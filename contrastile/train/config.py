"""What a recipe may say: one frozen class per section, every key with its type, its bounds and its default.

The first station of a run: `recipe.py` reads a TOML file into these classes, and everything after takes its settings
from them and from nowhere else. Values are taken strictly (the text "8" is no number) and unknown keys are refused.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag, ValidationInfo, field_validator, model_validator

from contrastile.data.sources import columns, is_collection, missing, read_source
from contrastile.train.evaluate_settings import EvaluateSettings
from contrastile.train.model_settings import ModelSettings
from contrastile.train.optim_settings import AdamWSettings, AnyOptim, OptimSettings
from contrastile.train.settings import (
    DEVICE,
    DEVICES,
    ClashError,
    Count,
    Many,
    Positive,
    Settings,
    Share,
    files_matter,
    for_cpus_alone,
    installed,
    kind_or,
)
from contrastile.train.sizes import fit_pictures

logger = logging.getLogger("contrastile")


class DataSettings(Settings):
    """`source`: "glyphs", a table (.tsv or .csv) with the columns filepath and title, or a collection: tar shards such
    as "a/{000..099}.tar", parquet files, folders of pictures, several joined by "::", tables too.

    A pair of a collection's source comes `weights` times an epoch, one number for each source; `augment` cuts out a
    random part of each of its pictures. More than `max_bad_fraction` bad pairs end the run.
    Pictures become `image_size` pixels square, grey (1 channel) or in colour (3), and are kept under `cache`.
    `held_out` is the share kept from training, of the names or, for a table, of the pairs; `augment` bends them a bit.
    With `copies` an epoch has so many of each pair, each bent anew, in tar shards that are written on the way.
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
    def _copies_are_bent(self) -> DataSettings:
        if self.copies > 1 and (is_collection(self.source) or not self.augment):
            reason = f"must be 1 but for glyphs or a table, with data.augment; got {self.copies}"
            raise ClashError("data.copies", reason)
        return self

    @field_validator("channels", mode="before")
    @classmethod
    def _channels_are_counted(cls, channels: Any) -> Any:
        # which is equal to 1
        if channels is True:
            raise ValueError("must be 1 or 3; got true")
        return channels

    @field_validator("source")
    @classmethod
    def _source_is_known(cls, source: str, info: ValidationInfo) -> str:
        if source == "docstrings":
            raise ValueError('is a set of texts; set kind = "retriever" at the top of the recipe')
        if is_collection(source):
            absent = [path for one in read_source(source) if (path := missing(one)) is not None]
        else:
            absent = [source] if source != "glyphs" and not os.path.isfile(source) else []
        if absent and files_matter(info):
            if source == absent[0] and not os.path.splitext(source)[1]:
                raise ValueError(f'must be "glyphs", a .tsv, .csv, .tar or .parquet file, or a folder; got "{source}"')
            raise ValueError(f'no such file "{absent[0]}"')
        if files_matter(info) and any(one.kind == ".parquet" for one in read_source(source)):
            installed("pyarrow", '"contrastile[data]"')
        tables = [path for one in read_source(source) if one.kind == ".tsv" for path in one.paths]
        # of many the first one
        if tables and files_matter(info) and not {"filepath", "title"} <= set(found := columns(tables[0])):
            got = json.dumps(found, ensure_ascii=False)
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


class LossSettings(Settings):
    """What every loss shares: how it is computed (`backend`, `exchange`, `gradient` are its own words)."""

    backend: Literal["auto", "dense", "eager", "triton"] = "auto"
    exchange: Literal["auto", "single", "replicate", "gather", "ring"] = "auto"
    gradient: Literal["mean", "sum"] = "mean"
    scale: Annotated[float, Field(ge=1.0, le=100.0)]

    def words(self) -> dict[str, Any]:
        """What the loss itself is made with."""
        return self.model_dump(exclude={"kind", "scale", "bias"})


class ClipSettings(LossSettings):
    """ClipLoss. The learned scale begins at `scale`; 14.3 is CLIP's temperature of 0.07.

    A trained model of `model.both` keeps its own scale unless the recipe names one; with siglip its bias too.
    """

    kind: Literal["clip"] = "clip"
    scale: Annotated[float, Field(ge=1.0, le=100.0)] = 14.3
    label_smoothing: Share = 0.0


class SigLipSettings(LossSettings):
    """SigLipLoss. The learned scale and bias begin at `scale` and `bias`, SigLIP's values."""

    kind: Literal["siglip"] = "siglip"
    scale: Annotated[float, Field(ge=1.0, le=100.0)] = 10.0
    bias: float = -10.0


AnyLoss = Annotated[Annotated[ClipSettings, Tag("clip")] | Annotated[SigLipSettings, Tag("siglip")], kind_or("clip")]


class SubBatch(Settings):
    """How many examples each encoder sees at once; of the texts, with `text_tokens`, as many as these tokens allow.

    Texts then travel by length, and leave their padding behind.
    """

    image: Count = 256
    text: Count = 256
    text_tokens: Count | None = None

    def of_texts(self) -> dict[str, Any]:
        """What `encode` is told of texts."""
        return {"sub_batch": self.text} if self.text_tokens is None else {"sub_batch_tokens": self.text_tokens}

    def texts_at_once(self, length: int) -> int:
        """So many texts of `length` tokens are encoded together."""
        return self.text if self.text_tokens is None else max(1, self.text_tokens // length)


def _constant_schedule(batch: Any) -> Any:
    """A plain number is a schedule of one step."""
    if isinstance(batch, int) and not isinstance(batch, bool):
        return ((0.0, batch),)
    if not isinstance(batch, (tuple, list)):
        rule = "must be a whole number, or a list of [share of the run, size]"
        raise ValueError(f"{rule}; got {json.dumps(batch, default=str)}")
    return batch


def _same_sub_batch(sub_batch: Any) -> Any:
    """A plain number is meant for both towers."""
    whole = isinstance(sub_batch, int) and not isinstance(sub_batch, bool)
    return {"image": sub_batch, "text": sub_batch} if whole else sub_batch


class Steps(Settings):
    """How long (`examples` or `epochs`, and at most `minutes`), in which batches.

    `batch` is a schedule of shares of the run and sizes, or one size. `retain` sub-batches of each tower keep their
    activations and need no second forward: memory for time; "auto" keeps as many as fit. With `accumulate = 4` a batch
    is four parts, each with its own negatives only, whose gradients are averaged: the poorer way, there to be compared
    with.

    Under torchrun `batch` is that of all ranks together; a rank that waits `timeout` seconds for another gives up.
    `parallel`: every rank has the whole weights ("replicate"), or a part of them, of their gradients and of the
    optimizer's state ("shard": FSDP2).
    """

    # a question may have negatives of its own
    smallest_part: ClassVar[int] = 1

    examples: Many | None = None
    epochs: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    minutes: Positive | None = None
    batch: Annotated[tuple[tuple[Share, Count], ...], BeforeValidator(_constant_schedule)] = ((0.0, 256),)
    retain: Annotated[int, Field(ge=0)] | Literal["auto"] = 1
    accumulate: Count = 1
    timeout: Annotated[float, Field(gt=0.0, le=1e6)] = 100.0
    parallel: Literal["replicate", "shard"] = "replicate"

    @field_validator("batch")
    @classmethod
    def _schedule_is_a_staircase(cls, batch: tuple[tuple[float, int], ...]) -> tuple[tuple[float, int], ...]:
        starts = [start for start, _ in batch]
        if not starts or starts[0] != 0.0:
            raise ValueError("must begin at 0.0, as in [[0.0, 256], [0.5, 4096]]")
        if any(late <= early for early, late in pairwise(starts)):
            raise ValueError("must have rising starts, as in [[0.0, 256], [0.5, 4096]]")
        return batch

    @model_validator(mode="after")
    def _one_length(self) -> Steps:
        if (self.examples is None) == (self.epochs is None):
            raise ValueError("must have either examples or epochs, and not both")
        return self

    @model_validator(mode="after")
    def _parts_have_negatives(self) -> Steps:
        smallest = min(size for _, size in self.batch)
        if smallest < self.smallest_part:
            raise ClashError(
                "train.batch", f"must be at least {self.smallest_part}: one pair has no negatives; got {smallest}"
            )
        if self.accumulate > 1 and self.accumulate * self.smallest_part > smallest:
            reason = (
                f"must leave parts of {self.smallest_part} at least; got {self.accumulate} of a batch of {smallest}"
            )
            raise ClashError("train.accumulate", reason)
        return self

    def batch_at(self, share: float) -> int:
        """The batch size when the share `share` of the run is done."""
        return next(size for start, size in reversed(self.batch) if start <= share)

    def steps(self, count: int, examples: int) -> Iterator[int]:
        """The sizes of the first `count` steps of a run of so many examples, the last one uncut."""
        seen = 0
        for _ in range(count):
            yield (size := self.batch_at(seen / examples))
            if (seen := seen + size) >= examples:
                break

    def length(self, pairs: int) -> int:
        """How many examples the run sees where the training split has `pairs`."""
        return self.examples if self.examples is not None else max(1, round((self.epochs or 0.0) * pairs))


class TrainSettings(Steps):
    """The steps of towers of pictures and texts, at which precision, `compile`d by torch.compile or not.

    "float64" is for comparing ways to compute the same: after a hundred steps rounding still does not show. A
    sub-batch above the largest batch is cut to it.
    """

    sub_batch: Annotated[SubBatch, BeforeValidator(_same_sub_batch)] = Field(
        default_factory=lambda told: _within(SubBatch(), told.get("batch"))
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
        cut = _within(sub_batch, info.data.get("batch"))
        for side in ("image", "text") if files_matter(info) else ():
            if side in sub_batch.model_fields_set and (named := getattr(sub_batch, side)) > (now := getattr(cut, side)):
                logger.warning("train.sub_batch.%s is %d, the largest batch, instead of %d", side, now, named)
        return cut


def _within(sub_batch: SubBatch, batch: tuple[tuple[float, int], ...] | None) -> SubBatch:
    """The sub-batch cut to the largest batch: an encoder never sees more at once."""
    if not batch:
        return sub_batch
    largest = max(size for _, size in batch)
    return sub_batch.model_copy(update={side: min(getattr(sub_batch, side), largest) for side in ("image", "text")})


class SaveSettings(Settings):
    """When everything that a step changes is kept: every `minutes`, and every so many `steps`; the newest `keep`.

    A run that was killed goes on from there with --resume; what it did since is done again, bit for bit. Of several
    ranks the first one writes, and the others wait: `train.timeout` has to be longer than that takes.
    """

    steps: Count | None = None
    minutes: Positive = 10.0
    keep: Count = 2


class LogSettings(Settings):
    """Who is told what the run says, beside its folder: `tensorboard` files in it, a project of `wandb`."""

    tensorboard: bool = False
    wandb: str | None = None

    @field_validator("tensorboard", "wandb")
    @classmethod
    def _is_installed(cls, wanted: Any, info: ValidationInfo) -> Any:
        if wanted and files_matter(info):
            installed(str(info.field_name), '"contrastile[log]"')
        return wanted


class AnyRecipe(Settings):
    """What every run has. `name` is that of its folder, the recipe file's own where the recipe does not say."""

    name: str
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: str = "auto"
    log: LogSettings = LogSettings()

    @field_validator("name")
    @classmethod
    def _name_is_a_folder_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(f'must be a folder name of letters, digits, ".", "_" and "-"; got {json.dumps(name)}')
        return name

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, device: str, info: ValidationInfo) -> str:
        if not DEVICE.fullmatch(device):
            raise ValueError(f"must {DEVICES}; got {json.dumps(device)}")
        if device.startswith("cuda") and files_matter(info) and for_cpus_alone():
            raise ValueError(f'must be "auto" or "cpu": the torch that is installed is for CPUs alone; got "{device}"')
        return device


def fit_together(device: str, loss: LossSettings, optim: OptimSettings, train: Steps, info: ValidationInfo) -> None:
    """Raises `ClashError` where what one section says does not go with another."""
    if optim.warmup_epochs is not None and train.epochs is not None and optim.warmup_epochs >= train.epochs:
        got = f"{optim.warmup_epochs:g} of {train.epochs:g} epochs"
        raise ClashError("optim.warmup_epochs", f"must be shorter than the run; got {got}")
    if optim.warmup_steps is not None and train.examples is not None:
        longest = max(size for _, size in train.batch) * optim.warmup_steps
        seen = sum(train.steps(optim.warmup_steps, train.examples)) if longest >= train.examples else 0
        if seen >= train.examples:
            got = f"{optim.warmup_steps:,} steps, {seen:,} of {train.examples:,} examples"
            raise ClashError("optim.warmup_steps", f"must be shorter than the run; got {got}")
    if files_matter(info) and loss.backend == "triton" and "TRITON_INTERPRET" not in os.environ:
        if device == "cpu":
            raise ClashError("loss.backend", 'must be "auto", "eager" or "dense" with device = "cpu"; got "triton"')
        if for_cpus_alone():
            told = 'must be "auto", "eager" or "dense": the torch that is installed is for CPUs alone; got "triton"'
            raise ClashError("loss.backend", told)
        installed("triton", "triton", "loss.backend")


class Recipe(AnyRecipe):
    """A whole run of pictures and texts."""

    kind: Literal["image-text"] = "image-text"
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings.model_validate({})
    loss: AnyLoss = ClipSettings()
    optim: AnyOptim = AdamWSettings()
    train: TrainSettings
    evaluate: EvaluateSettings = EvaluateSettings()
    save: SaveSettings = SaveSettings()

    @model_validator(mode="after")
    def _sections_fit_together(self, info: ValidationInfo) -> Recipe:
        fit_together(self.device, self.loss, self.optim, self.train, info)
        if files_matter(info):
            fit_pictures(self.data, self.model)
        if self.model.precompute and self.data.augment:
            raise ClashError("data.augment", "must be false with model.precompute: each picture is seen once; got true")
        tokens, length = self.train.sub_batch.text_tokens, self.model.tokenizer.length
        if tokens is not None and tokens < length:
            reason = f"must be at least model.tokenizer.length, the tokens of one title; got {tokens} and {length}"
            raise ClashError("train.sub_batch.text_tokens", reason)
        return self
