"""The step's last part: which optimizer, which parameters decay, how the learning rate runs, where the scale may go.

Used by `loop.py` alone; everything here is a function of the recipe's `[optim]` section.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from contrastile._check import wrong
from contrastile.train.adafactor import Adafactor
from contrastile.train.config import Steps
from contrastile.train.muon import Muon, Together, matrices
from contrastile.train.optim_settings import AdafactorSettings, AdamWSettings, MuonSettings, OptimSettings
from contrastile.train.sharded import whole

Groups = list[dict[str, Any]]

# CLIP's bounds: at a scale of 100 the softmax is as sharp as it may become
LOG_SCALE_BOUNDS = (0.0, math.log(100.0))


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> Groups:
    """Two groups: matrices and filters, which decay; gains, biases and the scale (at most one axis), which do not.

    Parameters that do not train are left out, and a group that has none.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(model: nn.Module, settings: AdamWSettings) -> Optimizer:
    return _adamw_of(model.parameters(), settings)


def _adamw_of(parameters: Iterable[nn.Parameter], settings: AdamWSettings | MuonSettings) -> Optimizer:
    groups = parameter_groups(parameters, settings.weight_decay)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps)


def _adafactor(model: nn.Module, settings: AdafactorSettings) -> Optimizer:
    groups = parameter_groups(model.parameters(), settings.weight_decay)
    return Adafactor(groups, lr=settings.learning_rate, betas=settings.betas, beta2_decay=settings.beta2_decay)


def _muon(model: nn.Module, settings: MuonSettings) -> Optimizer:
    """Muon for the matrices inside the towers, and AdamW."""
    inner = matrices(model)
    if not inner:
        raise wrong("optim.kind", "suit towers with matrices", "muon, and they have none", 'Use "adamw".')
    theirs = {id(parameter) for parameter in inner}
    muon = Muon(inner, settings.learning_rate, settings.momentum, settings.weight_decay)
    return Together(muon, _adamw_of((p for p in model.parameters() if id(p) not in theirs), settings))


OPTIMIZERS: dict[type[OptimSettings], Callable[[nn.Module, Any], Optimizer]] = {
    AdamWSettings: _adamw,
    AdafactorSettings: _adafactor,
    MuonSettings: _muon,
}


def build_optimizer(model: nn.Module, settings: OptimSettings) -> Optimizer:
    """The optimizer that the recipe names, over the model's trained parameters."""
    return OPTIMIZERS[type(settings)](model, settings)


def with_warmup(settings: OptimSettings, train: Steps, pairs: int) -> OptimSettings:
    """The same with `warmup` as a share of the run, where it is told in steps or epochs of `pairs`.

    Raises ValueError where that is no shorter than the run, or reaches into the cooldown.
    """
    examples, seen = train.length(pairs), 0
    if settings.warmup_epochs is not None:
        seen = round(settings.warmup_epochs * pairs)
    elif settings.warmup_steps is not None:
        seen = sum(train.steps(settings.warmup_steps, examples))
    if seen >= examples:
        got = f"{seen:,} of {examples:,} examples"
        raise wrong("optim.warmup", "be shorter than the run", got, "Warm up over less, or train longer.")
    if settings.schedule == "cooldown" and seen / examples + settings.cooldown > 1:
        got = f"{settings.cooldown:g} behind a warm-up of {seen:,} of {examples:,} examples"
        raise wrong("optim.cooldown", "leave the warm-up its share", got, "Make either shorter.")
    return settings.model_copy(update={"warmup": seen / examples}) if seen else settings


def learning_rate(progress: float, settings: OptimSettings, batch: int | None = None) -> float:
    """The rate when the share `progress` of the run is done: a straight rise over `warmup`, then what `schedule` says.

    At the end it is `final` times the highest, but for a constant one. A step of `batch` pairs has `rate_factor` times
    that.
    """
    highest = settings.learning_rate * rate_factor(settings, batch)
    if progress < settings.warmup:
        return highest * progress / settings.warmup
    height = SCHEDULES[settings.schedule](min(progress, 1.0), settings)
    return highest * (settings.final + (1.0 - settings.final) * height)


def rate_factor(settings: OptimSettings, batch: int | None) -> float:
    """What the rate of a step of `batch` pairs is multiplied with: (batch / base_batch) to the power of 0, 1/2 or 1."""
    if settings.base_batch is None or batch is None:
        return 1.0
    return float((batch / settings.base_batch) ** POWERS[settings.rate_scaling])


POWERS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


def _cosine(progress: float, settings: OptimSettings) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * (progress - settings.warmup) / (1.0 - settings.warmup)))


def _linear(progress: float, settings: OptimSettings) -> float:
    return (1.0 - progress) / (1.0 - settings.warmup)


def _cooldown(progress: float, settings: OptimSettings) -> float:
    return min(1.0, (1.0 - progress) / settings.cooldown)


# from 1 to 0 behind the warm-up, by the share of the run that is done
SCHEDULES: dict[str, Callable[[float, OptimSettings], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "cooldown": _cooldown,
    "constant": lambda progress, settings: 1.0,  # noqa: ARG005
}


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Give every group the same rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(model: nn.Module, clip_norm: float) -> Tensor:
    """Cut the gradient down to `clip_norm` where that is positive; the norm before, on its device."""
    return whole(nn.utils.clip_grad_norm_(model.parameters(), clip_norm if clip_norm > 0 else math.inf))


@torch.no_grad()
def clamp_scale(log_scale: Tensor) -> None:
    """Put the logarithm of the scale back into [0, ln 100]."""
    log_scale.clamp_(*LOG_SCALE_BOUNDS)
