"""The `[optim]` section of a recipe: which optimizer, at which rates.

Within the first station of a run, beside `config.py`; `optim.py` does what it says.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag, model_validator

from contrastile.train.settings import ClashError, Count, Positive, Settings, Share, kind_or


class OptimSettings(Settings):
    """What every optimizer shares. The rate rises over the first `warmup` of the run (a share), or `warmup_steps`, or
    `warmup_epochs`; then it falls as half a cosine, in a straight line ("linear"), stays ("constant"), or stays and
    falls straight over the last `cooldown` (a share). `final` is the last rate over the highest.

    The norm of the whole gradient is cut down to `clip_norm`; 0 leaves it as it is. With `ema`, such as 0.9999, what is
    measured and kept is the moving average of the weights.

    `learning_rate` is that of every batch, unless `rate_scaling` makes it the rate of a batch of `base_batch`: a step
    of b pairs then has b / base_batch times that ("linear"), or its root ("sqrt"), at every stage of `train.batch`.
    """

    learning_rate: Positive = 1e-3
    rate_scaling: Literal["none", "sqrt", "linear"] = "none"
    base_batch: Count | None = None
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    schedule: Literal["cosine", "linear", "constant", "cooldown"] = "cosine"
    warmup: Share = 0.05
    warmup_steps: Count | None = None
    warmup_epochs: Positive | None = None
    cooldown: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    final: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    clip_norm: Annotated[float, Field(ge=0.0)] = 1.0
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None

    @model_validator(mode="after")
    def _one_warmup(self) -> OptimSettings:
        # a share of the default's is there in every recipe that was written out
        share = self.warmup != type(self).model_fields["warmup"].default
        if share + (self.warmup_steps is not None) + (self.warmup_epochs is not None) > 1:
            raise ValueError("must have one of warmup, warmup_steps and warmup_epochs")
        return self

    @model_validator(mode="after")
    def _the_rate_is_up_before_it_falls(self) -> OptimSettings:
        in_shares = self.warmup_steps is None and self.warmup_epochs is None
        if self.schedule == "cooldown" and in_shares and self.warmup + self.cooldown > 1:
            reason = f"must leave the warm-up its share of {self.warmup:g}; got {self.cooldown:g}"
            raise ClashError("optim.cooldown", reason)
        return self

    @model_validator(mode="after")
    def _scaling_has_a_base(self) -> OptimSettings:
        if self.rate_scaling != "none" and self.base_batch is None:
            reason = f'must be given with optim.rate_scaling = "{self.rate_scaling}": the batch of that rate'
            raise ClashError("optim.base_batch", reason)
        return self


class AdamWSettings(OptimSettings):
    """torch.optim.AdamW."""

    kind: Literal["adamw"] = "adamw"
    betas: tuple[Share, Share] = (0.9, 0.98)
    eps: Positive = 1e-8


class AdafactorSettings(OptimSettings):
    """Adafactor as vision transformers are trained with it: second moments by row and column, momentum betas[0].

    The second moment forgets at 1 - t^beta2_decay, but never slower than betas[1]; weight_decay follows the schedule of
    the rate, not its height (1e-4 is usual).
    """

    kind: Literal["adafactor"] = "adafactor"
    betas: tuple[Share, Share] = (0.9, 0.95)
    beta2_decay: Annotated[float, Field(lt=0.0)] = -0.8
    weight_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 1e-4


class MuonSettings(OptimSettings):
    """Muon for the matrices of the towers, with `momentum`; AdamW, with `betas` and `eps`, for all else.

    Its steps are as large as AdamW's, so that one learning_rate and one weight_decay serve both.
    """

    kind: Literal["muon"] = "muon"
    momentum: Share = 0.95
    betas: tuple[Share, Share] = (0.9, 0.98)
    eps: Positive = 1e-8


AnyOptim = Annotated[
    Annotated[AdamWSettings, Tag("adamw")]
    | Annotated[AdafactorSettings, Tag("adafactor")]
    | Annotated[MuonSettings, Tag("muon")],
    kind_or("adamw"),
]
