"""The `[optim]` section of every recipe: the optimizer, its rates and the schedule of the rate.

Part of the configuration; `train/optim.py` builds the optimizer and the schedule.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from contrastile.train.config.base import ClashError, Count, Fraction, Instead, Positive, Settings, Unused, kind_or


class OptimSettings(Settings):
    """Settings of every optimizer: `docs/recipe.md` explains the keys.

    With `rate_scaling` a step of b pairs has the rate times b / base_batch ("linear"), or times its root ("sqrt"), at
    every stage of `train.batch`.
    """

    learning_rate: Positive = 1e-3
    rate_scaling: Literal["none", "sqrt", "linear"] = "none"
    base_batch: Annotated[
        Count | None,
        Unused(
            "rate_scaling",
            lambda optim: optim.rate_scaling == "none",
            'leave it out, or set optim.rate_scaling = "sqrt" or "linear"',
        ),
    ] = None
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    schedule: Literal["cosine", "linear", "constant", "cooldown"] = "cosine"
    warmup: Annotated[Fraction, Instead(("warmup_steps", "warmup_epochs"))] = 0.05
    warmup_steps: Annotated[Count | None, Instead(("warmup", "warmup_epochs"))] = None
    warmup_epochs: Annotated[Positive | None, Instead(("warmup", "warmup_steps"))] = None
    cooldown: Annotated[
        float,
        Field(gt=0.0, le=1.0),
        Unused(
            "schedule",
            lambda optim: optim.schedule != "cooldown",
            'leave it out, or set optim.schedule = "cooldown"',
        ),
    ] = 0.2
    final: Annotated[float, Field(ge=0.0, le=1.0), Unused("schedule", lambda optim: optim.schedule == "constant")] = 0.0
    clip_norm: Annotated[float, Field(ge=0.0)] = 1.0
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None

    @model_validator(mode="after")
    def _keys_agree(self) -> OptimSettings:
        # recipes that earlier versions wrote hold the default of `warmup` beside `warmup_steps`
        given = self.warmup != type(self).model_fields["warmup"].default
        if given + (self.warmup_steps is not None) + (self.warmup_epochs is not None) > 1:
            raise ValueError("must have one of warmup, warmup_steps and warmup_epochs")
        by_fraction = self.warmup_steps is None and self.warmup_epochs is None
        if self.schedule == "cooldown" and by_fraction and self.warmup + self.cooldown > 1:
            reason = f"must leave the warm-up its share of {self.warmup:g}; got {self.cooldown:g}"
            raise ClashError("optim.cooldown", reason)
        if self.rate_scaling != "none" and self.base_batch is None:
            reason = f'must be given with optim.rate_scaling = "{self.rate_scaling}": the batch of that rate'
            raise ClashError("optim.base_batch", reason)
        return self


class AdamWSettings(OptimSettings):
    """torch.optim.AdamW."""

    kind: Literal["adamw"] = "adamw"
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    eps: Positive = 1e-8


class AdafactorSettings(OptimSettings):
    """Adafactor as vision transformers are trained with it: second moments by row and column, momentum betas[0].

    The second moment decays by 1 - t^beta2_decay, but never slower than betas[1]. `weight_decay` follows the schedule
    of the rate, not its height.
    """

    kind: Literal["adafactor"] = "adafactor"
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    beta2_decay: Annotated[float, Field(lt=0.0)] = -0.8
    weight_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 1e-4


class MuonSettings(OptimSettings):
    """Muon with `momentum` for the matrices of the towers, AdamW for all other weights, both at one learning rate."""

    kind: Literal["muon"] = "muon"
    momentum: Fraction = 0.95
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    eps: Positive = 1e-8


AnyOptim = Annotated[AdamWSettings | AdafactorSettings | MuonSettings, Field(discriminator="kind"), kind_or("adamw")]
