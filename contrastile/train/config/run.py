"""Sections that every recipe has: loss, length and batches, checkpoints, trackers.

Part of the configuration; `image_text.py` and `train/retriever/config.py` add the sections of their own jobs.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from contrastile.train.config.base import (
    DEVICE,
    DEVICE_RULE,
    ClashError,
    Count,
    Fraction,
    Instead,
    Many,
    Positive,
    Settings,
    check_installed,
    either,
    needs,
    needs_files,
    torch_is_cpu_only,
)
from contrastile.train.config.optim import AdamWSettings, AnyOptim


class LossSettings(Settings):
    """Settings of every loss: `backend`, `exchange` and `gradient` are the arguments of that name."""

    backend: Literal["auto", "dense", "eager", "triton"] = "auto"
    exchange: Literal["auto", "single", "replicate", "gather", "ring", "hierarchical"] = "auto"
    gradient: Literal["mean", "sum"] = "mean"
    scale: Annotated[float, Field(ge=1.0, le=100.0)]

    def words(self) -> dict[str, Any]:
        """The keyword arguments of the loss module."""
        return self.model_dump(exclude={"kind", "scale", "bias", "learn_scale"})


def _constant_schedule(batch: Any) -> Any:
    """Take a plain number as a schedule of one stage."""
    if type(batch) is int:
        return ((0.0, batch),)
    if not isinstance(batch, tuple | list):
        rule = "must be a whole number, or a list of [share of the run, size]"
        raise ValueError(f"{rule}; got {json.dumps(batch, default=str)}")
    return batch


class Steps(Settings):
    """The length of a run, in examples or epochs, and its batches: a schedule of pairs (fraction of the run, size)."""

    # a pair needs another one for its negatives; a question may have negatives of its own
    smallest_part: ClassVar[int] = 1

    examples: Annotated[Many | None, Instead(("epochs",))] = None
    epochs: Annotated[Annotated[float, Field(gt=0.0, le=1e6)] | None, Instead(("examples",))] = None
    minutes: Positive | None = None
    batch: Annotated[tuple[tuple[Fraction, Count], ...], BeforeValidator(_constant_schedule)] = ((0.0, 256),)
    retain: Annotated[int, Field(ge=0)] | Literal["auto"] = 1
    accumulate: Count = 1
    timeout: Annotated[float, Field(gt=0.0, le=1e6)] = 100.0
    parallel: Literal["replicate", "shard"] = "replicate"

    _one_length = either("examples", "epochs")

    @field_validator("batch")
    @classmethod
    def _starts_rise_from_zero(cls, batch: tuple[tuple[float, int], ...]) -> tuple[tuple[float, int], ...]:
        starts = [start for start, _ in batch]
        if not starts or starts[0] != 0.0:
            raise ValueError("must begin at 0.0, as in [[0.0, 256], [0.5, 4096]]")
        if any(late <= early for early, late in pairwise(starts)):
            raise ValueError("must have rising starts, as in [[0.0, 256], [0.5, 4096]]")
        return batch

    @model_validator(mode="after")
    def _parts_have_negatives(self) -> Steps:
        least, smallest = self.smallest_part, min(size for _, size in self.batch)
        if smallest < least:
            raise ClashError("train.batch", f"must be at least {least}: one pair has no negatives; got {smallest}")
        if self.accumulate > 1 and self.accumulate * least > smallest:
            reason = f"must leave parts of {least} at least; got {self.accumulate} of a batch of {smallest}"
            raise ClashError("train.accumulate", reason)
        return self

    def batch_at(self, fraction: float) -> int:
        """The batch size after that fraction of the run."""
        return next(size for start, size in reversed(self.batch) if start <= fraction)

    def steps(self, count: int, examples: int) -> Iterator[int]:
        """The sizes of the first `count` steps of a run of so many examples; the last one is not cut."""
        seen = 0
        for _ in range(count):
            yield (size := self.batch_at(seen / examples))
            if (seen := seen + size) >= examples:
                break

    def length(self, pairs: int) -> int:
        """The examples of the run, for a training split of so many `pairs`."""
        return self.examples if self.examples is not None else max(1, round((self.epochs or 0.0) * pairs))


class SaveSettings(Settings):
    """Checkpoints: one every `minutes`, and one every so many `steps`; the newest `keep` stay."""

    steps: Count | None = None
    minutes: Positive = 10.0
    keep: Count = 2


class LogSettings(Settings):
    """Trackers beside the run's own folder: `tensorboard` files in it, a project of `wandb`."""

    tensorboard: Annotated[bool, needs("tensorboard", '"contrastile[log]"')] = False
    wandb: Annotated[str | None, needs("wandb", '"contrastile[log]"')] = None


class AnyRecipe(Settings):
    """Keys and sections of every recipe. `name` is that of the run's folder, by default the recipe file's own."""

    kind: str
    name: str
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: str = "auto"
    log: LogSettings = LogSettings()
    loss: LossSettings
    optim: AnyOptim = AdamWSettings()
    train: Steps
    save: SaveSettings = SaveSettings()

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(f'must be a folder name of letters, digits, ".", "_" and "-"; got {json.dumps(name)}')
        return name

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, device: str, info: ValidationInfo) -> str:
        if not DEVICE.fullmatch(device):
            raise ValueError(f"must {DEVICE_RULE}; got {json.dumps(device)}")
        if device.startswith("cuda") and needs_files(info) and torch_is_cpu_only():
            raise ValueError(f'must be "auto" or "cpu": the torch that is installed is for CPUs alone; got "{device}"')
        return device

    @model_validator(mode="after")
    def _warmup_is_shorter_than_the_run(self) -> AnyRecipe:
        optim, train = self.optim, self.train
        if optim.warmup_epochs is not None and train.epochs is not None and optim.warmup_epochs >= train.epochs:
            got = f"{optim.warmup_epochs:g} of {train.epochs:g} epochs"
            raise ClashError("optim.warmup_epochs", f"must be shorter than the run; got {got}")
        if optim.warmup_steps is not None and train.examples is not None:
            # summing the steps is slow where warmup_steps is huge and the batch small, so bound them first
            longest = max(size for _, size in train.batch) * optim.warmup_steps
            seen = sum(train.steps(optim.warmup_steps, train.examples)) if longest >= train.examples else 0
            if seen >= train.examples:
                got = f"{optim.warmup_steps:,} steps, {seen:,} of {train.examples:,} examples"
                raise ClashError("optim.warmup_steps", f"must be shorter than the run; got {got}")
        return self

    @model_validator(mode="after")
    def _backend_runs_on_the_device(self, info: ValidationInfo) -> AnyRecipe:
        if self.loss.backend != "triton" or not needs_files(info) or "TRITON_INTERPRET" in os.environ:
            return self
        rule = 'must be "auto", "eager" or "dense"'
        if self.device == "cpu":
            raise ClashError("loss.backend", f'{rule} with device = "cpu"; got "triton"')
        if torch_is_cpu_only():
            reason = f'{rule}: the torch that is installed is for CPUs alone; got "triton"'
            raise ClashError("loss.backend", reason)
        check_installed("triton", "triton", "loss.backend")
        return self
