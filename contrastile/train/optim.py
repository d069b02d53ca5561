"""Optimizer, parameter groups, learning-rate schedule, clipping and the bounds of the scale.

Used by `loop.py`: functions of the recipe's `[optim]` section.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from contrastile._errors import invalid
from contrastile.train.adafactor import Adafactor
from contrastile.train.config import Steps
from contrastile.train.config.base import AdafactorSettings, AdamWSettings, MuonSettings, OptimSettings
from contrastile.train.muon import CombinedOptimizer, Muon, matrices
from contrastile.train.sharded import full

Groups = list[dict[str, Any]]

# CLIP's bounds of the scale, 1 and 100
LOG_SCALE_BOUNDS = (0.0, math.log(100.0))


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> Groups:
    """Two groups of trained parameters: matrices and filters with decay; gains, biases and the scale without.

    A group without parameters is left out.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(parameters: Iterable[nn.Parameter], settings: AdamWSettings | MuonSettings) -> Optimizer:
    groups = parameter_groups(parameters, settings.weight_decay)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps)


def _adafactor(model: nn.Module, settings: AdafactorSettings) -> Optimizer:
    groups = parameter_groups(model.parameters(), settings.weight_decay)
    return Adafactor(groups, lr=settings.learning_rate, betas=settings.betas, beta2_decay=settings.beta2_decay)


def _muon(model: nn.Module, settings: MuonSettings) -> Optimizer:
    """Muon for the matrices inside the towers, AdamW for all other parameters."""
    inner = matrices(model)
    if not inner:
        raise invalid("optim.kind", "suit towers with matrices", "muon, and they have none", 'Use "adamw".')
    own = {id(parameter) for parameter in inner}
    muon = Muon(inner, settings.learning_rate, settings.momentum, settings.weight_decay)
    return CombinedOptimizer(muon, _adamw((p for p in model.parameters() if id(p) not in own), settings))


OPTIMIZERS: dict[type[OptimSettings], Callable[[nn.Module, Any], Optimizer]] = {
    AdamWSettings: lambda model, settings: _adamw(model.parameters(), settings),
    AdafactorSettings: _adafactor,
    MuonSettings: _muon,
}


def build_optimizer(model: nn.Module, settings: OptimSettings) -> Optimizer:
    """The recipe's optimizer over the model's trained parameters."""
    return OPTIMIZERS[type(settings)](model, settings)


def with_warmup(settings: OptimSettings, train: Steps, pairs: int) -> OptimSettings:
    """The settings with `warmup` as a share of the run, converted from steps or epochs of `pairs`.

    Raises ValueError where the warm-up is not shorter than the run, or reaches into the cooldown.
    """
    examples, seen = train.length(pairs), 0
    if settings.warmup_epochs is not None:
        seen = round(settings.warmup_epochs * pairs)
    elif settings.warmup_steps is not None:
        seen = sum(train.steps(settings.warmup_steps, examples))
    if seen >= examples:
        got = f"{seen:,} of {examples:,} examples"
        raise invalid("optim.warmup", "be shorter than the run", got, "Warm up over less, or train longer.")
    if settings.schedule == "cooldown" and seen / examples + settings.cooldown > 1:
        got = f"{settings.cooldown:g} behind a warm-up of {seen:,} of {examples:,} examples"
        raise invalid("optim.cooldown", "leave the warm-up its share", got, "Make either shorter.")
    return settings.model_copy(update={"warmup": seen / examples}) if seen else settings


def learning_rate(progress: float, settings: OptimSettings, batch: int | None = None) -> float:
    """The rate after the share `progress` of the run: a linear rise over `warmup`, then the `schedule`.

    The last rate is `final` times the highest, except for a constant schedule. The batch size multiplies all rates by
    `rate_factor`.
    """
    highest = settings.learning_rate * rate_factor(settings, batch)
    if progress < settings.warmup:
        return highest * progress / settings.warmup
    height = SCHEDULES[settings.schedule](min(progress, 1.0), settings)
    return highest * (settings.final + (1.0 - settings.final) * height)


def rate_factor(settings: OptimSettings, batch: int | None) -> float:
    """The factor of a step of `batch` pairs: (batch / base_batch) to the power of 0, 1/2 or 1."""
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


# from 1 to 0 after the warm-up, by the share of the run that is done
SCHEDULES: dict[str, Callable[[float, OptimSettings], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "cooldown": _cooldown,
    "constant": lambda progress, settings: 1.0,  # noqa: ARG005
}


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(model: nn.Module, clip_norm: float) -> Tensor:
    """Clip the gradient to `clip_norm` if that is positive; the norm before, on its device."""
    return full(nn.utils.clip_grad_norm_(model.parameters(), clip_norm if clip_norm > 0 else math.inf))


@torch.no_grad()
def clamp_scale(log_scale: Tensor) -> None:
    """Clamp the logarithm of the scale to [0, ln 100]."""
    log_scale.clamp_(*LOG_SCALE_BOUNDS)
