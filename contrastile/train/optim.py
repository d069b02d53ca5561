"""The `[optim]` section of a recipe: optimizers, parameter groups, schedules, clipping, the bounds of the scale.

Adafactor: Shazeer & Stern (arXiv:1804.04235) in the form of Zhai et al., "Scaling Vision Transformers"
(arXiv:2106.04560, section 3.4), which Inf-CL uses (arXiv:2410.17243, section 4.1). Muon: Keller Jordan
(https://kellerjordan.github.io/posts/muon/), with the size of updates after Moonshot (arXiv:2502.16982).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from contrastile._errors import invalid
from contrastile._types import accumulator
from contrastile.train.config import Steps
from contrastile.train.config.base import AdafactorSettings, AdamWSettings, MuonSettings, OptimSettings
from contrastile.train.sharded import full, shard_like

# CLIP's bounds of the scale, 1 and 100
LOG_SCALE_BOUNDS = (0.0, math.log(100.0))
# Adafactor: a matrix with fewer rows or columns keeps its whole second moment
SMALLEST_FACTORED, EPS = 32, 1e-30
# Muon: one iteration a x + b x xᵀx + c x xᵀx xᵀx moves every singular value in (0, 1] towards 1; five are enough
COEFFICIENTS, TIMES, SMALLEST_NORM = (3.4445, -4.7750, 2.0315), 5, 1e-7
# the usual root mean square of AdamW's updates
RMS = 0.2
# name of the layer from a tower to the common features, a head, which AdamW trains
HEAD = "projection"


class PerParameterOptimizer(Optimizer):
    """An optimizer defined by its update of one parameter."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update one parameter in place, by its gradient, its state and its group's settings."""
        raise NotImplementedError


class Adafactor(PerParameterOptimizer):
    """For a gradient g at step t, with β₂(t) = min(beta2, 1 − t^beta2_decay):

        v ← β₂(t) v + (1 − β₂(t)) (g² + 1e-30)        a matrix keeps only its means by row r and by column c,
        u = g / √v                                    and v = r cᵀ / mean(r)
        m ← beta1 m + (1 − beta1) u
        p ← p − lr m − (lr / peak) weight_decay p

    so that decay follows the schedule of the rate, not its height; `peak` is the initial `lr` of the group. A tensor
    with more axes is factored over its two longest. State is float32, of float64 weights float64: `m` and two vectors
    for a matrix. The momentum `m` of sharded weights is sharded; every rank has the means by row and by column of the
    whole matrix.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95),
        beta2_decay: float = -0.8, weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "beta2_decay": beta2_decay, "weight_decay": weight_decay})
        for group in self.param_groups:
            group["peak"] = group["lr"]

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        # state that torch loads has the dtype of the weights
        gradient = gradient.to(accumulator(gradient.dtype))
        beta1, beta2 = group["betas"]
        state["step"] = state.get("step", 0) + 1
        beta2 = min(beta2, 1 - state["step"] ** group["beta2_decay"])
        update = gradient * _inverse_root(gradient.square() + EPS, state, beta2)
        if beta1 > 0:
            momentum = state.setdefault("momentum", torch.zeros_like(gradient))
            update = momentum.lerp_(update, 1 - beta1)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] / group["peak"] * group["weight_decay"])
        parameter.sub_(group["lr"] * update)


def _inverse_root(square: Tensor, state: dict[str, Any], beta2: float) -> Tensor:
    """1/√v for the running mean v of squares: whole, or the product of its means over the two longest axes."""
    axes = sorted(range(square.ndim), key=lambda axis: square.shape[axis])[-2:]
    if len(axes) < 2 or square.shape[axes[0]] < SMALLEST_FACTORED:
        return state.setdefault("square", torch.zeros_like(square)).lerp_(square, 1 - beta2).rsqrt()
    second, first = axes
    # the sum over a sharded axis is partial on each rank
    by_row, by_column = (full(square.sum(axis, keepdim=True)) / square.shape[axis] for axis in (first, second))
    row = state.setdefault("row", torch.zeros_like(by_row)).lerp_(by_row, 1 - beta2)
    column = state.setdefault("column", torch.zeros_like(by_column)).lerp_(by_column, 1 - beta2)
    return shard_like((row / row.mean(second, keepdim=True)).rsqrt() * column.rsqrt(), square)


class Muon(PerParameterOptimizer):
    """For the gradient g [rows, columns] of a matrix:

        m ← momentum m + (1 − momentum) g
        u = orthogonal((1 − momentum) g + momentum m)
        p ← p − lr weight_decay p − lr 0.2 √max(rows, columns) u

    which is `torch.optim.Muon(..., adjust_lr_fn="match_rms_adamw")`, bit for bit; torch's would orthogonalise each
    shard of a matrix alone. The momentum of sharded weights is sharded; each matrix is gathered on every rank while it
    is made orthogonal.
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        rate, momentum = group["lr"], group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = orthogonal(full(gradient.lerp(mean, momentum))).to(parameter.dtype)
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.add_(shard_like(update, parameter), alpha=-rate * (RMS * math.sqrt(max(parameter.shape))))


def orthogonal(x: Tensor) -> Tensor:
    """Approximately the nearest orthogonal matrix [rows, columns], in bfloat16, by Newton-Schulz iterations.

    Singular values end between 0.5 and 1.5, except those a thousand times smaller than the largest.
    """
    a, b, c = COEFFICIENTS
    tall = len(x) > x.shape[1]
    x = (x.T if tall else x).bfloat16()
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(TIMES):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trained matrices of the layers inside a model's towers, for which Muon is meant.

    Embeddings, tied ones too, position tables and heads are left to AdamW: a matrix counts if its name ends in
    `weight`, as those of layers do, and it lies outside a `projection`.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv1d(4, 2, 3))
    >>> [tuple(weight.shape) for weight in matrices(model)]
    [(4, 4)]
    """
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)}
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and parameter.ndim == 2
        and name.endswith("weight")
        and HEAD not in name.split(".")
        and id(parameter) not in tables
    ]


class CombinedOptimizer(Optimizer):
    """Several optimizers with disjoint parameters as one: their groups in one list, their states by class name."""

    def __init__(self, *members: Optimizer) -> None:
        self.members = {type(member).__name__: member for member in members}
        super().__init__([p for member in members for group in member.param_groups for p in group["params"]], {})
        self._join_groups()

    def _join_groups(self) -> None:
        # the members' own group objects, so that a rate set here is theirs
        self.param_groups = [group for member in self.members.values() for group in member.param_groups]

    def step(self) -> None:  # type: ignore[override]
        for member in self.members.values():
            member.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: member.state_dict() for name, member in self.members.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        # loading makes new group objects in each member
        for name, member in self.members.items():
            member.load_state_dict(state_dict[name])
        self._join_groups()


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of trained parameters: matrices and filters with decay; gains, biases and the scale without."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    decaying, free = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, settings: OptimSettings) -> Optimizer:
    """The recipe's optimizer over the model's trained parameters; Muon for the matrices inside the towers alone."""
    rate, decay, parameters = settings.learning_rate, settings.weight_decay, model.parameters()
    if isinstance(settings, AdafactorSettings):
        groups = parameter_groups(parameters, decay)
        return Adafactor(groups, lr=rate, betas=settings.betas, beta2_decay=settings.beta2_decay)
    assert isinstance(settings, AdamWSettings | MuonSettings)
    inner = matrices(model) if isinstance(settings, MuonSettings) else []
    own = {id(parameter) for parameter in inner}
    groups = parameter_groups((p for p in parameters if id(p) not in own), decay)
    adamw = torch.optim.AdamW(groups, lr=rate, betas=settings.betas, eps=settings.eps)
    if isinstance(settings, AdamWSettings):
        return adamw
    if not inner:
        raise invalid("optim.kind", "suit towers with matrices", "muon, and they have none", 'Use "adamw".')
    return CombinedOptimizer(Muon(inner, rate, settings.momentum, decay), adamw)


def members_of(optimizer: Optimizer) -> list[Any]:
    """The optimizers in one that combines several, or the one itself."""
    return list(optimizer.members.values()) if isinstance(optimizer, CombinedOptimizer) else [optimizer]


def stepped_without_memory(model: nn.Module, settings: OptimSettings) -> Optimizer:
    """The optimizer after its first step, with a gradient for each weight, all on the device "meta".

    Where each weight is updated alone, one stands for all of its shape in a group; their number is the group's `alike`.
    """
    optimizer = build_optimizer(model, settings)
    for member in members_of(optimizer):
        each_alone, groups = isinstance(member, PerParameterOptimizer), list[dict[str, Any]]()
        for group in member.param_groups:
            shapes = [(p.shape, p.dtype) for p in group["params"]]
            for some, alike in [([one], n) for one, n in Counter(shapes).items()] if each_alone else [(shapes, 1)]:
                parameters = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in some]
                for parameter in parameters:
                    parameter.grad = torch.empty_like(parameter)
                groups.append({**group, "params": parameters, "alike": alike})
                # torch's AdamW updates many tensors at once, as on a GPU
                if not each_alone:
                    groups[-1]["foreach"] = True
        member.param_groups = groups
    optimizer.step()
    return optimizer


def state_bytes(model: nn.Module, settings: OptimSettings) -> int:
    """Bytes of the optimizer's state after its first step, but for the counts of steps."""
    return sum(
        group["alike"] * x.nbytes
        for member in members_of(stepped_without_memory(model, settings))
        for group in member.param_groups
        for parameter in group["params"]
        for name, x in member.state[parameter].items()
        if name != "step"
    )


def step_bytes(model: nn.Module, settings: OptimSettings) -> int:
    """Bytes that a step takes for a moment on a GPU: AdamW for all weights at once, others for the largest of them."""
    trained = [p.nbytes for p in model.parameters() if p.requires_grad]
    if isinstance(settings, AdamWSettings):
        # the root of every second moment
        return sum(trained)
    # Adafactor holds the square of a gradient and its root, or the root and the update; Muon a few products
    return (2 if isinstance(settings, AdafactorSettings) else 4) * max(trained, default=0)


def with_warmup(settings: OptimSettings, train: Steps, pairs: int) -> OptimSettings:
    """The settings with `warmup` as a share of the run's examples, converted from steps or epochs of `pairs`."""
    examples, seen, key, got = train.length(pairs), 0, "optim.warmup", ""
    if settings.warmup_epochs is not None:
        seen = round(settings.warmup_epochs * pairs)
        key, got = "optim.warmup_epochs", f"{settings.warmup_epochs:g} epochs, {seen:,} of {examples:,} examples"
    elif settings.warmup_steps is not None:
        seen = sum(train.steps(settings.warmup_steps, examples))
        key, got = "optim.warmup_steps", f"{settings.warmup_steps:,} steps, for {examples:,} examples"
    if seen >= examples:
        raise invalid(key, "be shorter than the run", got, "Warm up over less, or train longer.")
    if settings.schedule == "cooldown" and seen / examples + settings.cooldown > 1:
        got = f"{settings.cooldown:g} behind a warm-up of {seen:,} of {examples:,} examples"
        raise invalid("optim.cooldown", "leave the warm-up its share", got, "Make either shorter.")
    return settings.model_copy(update={"warmup": seen / examples}) if seen else settings


def learning_rate(
    progress: float, settings: OptimSettings, batch: int | None = None, seen: float | None = None
) -> float:
    """The rate after the share `progress` of the run: a linear rise over `warmup`, then the `schedule`.

    seen: the share of the run's examples, which is less where minutes end it; a warm-up in steps or epochs goes by it.
    The last rate is `final` times the highest, except for a constant schedule; `rate_factor` multiplies all rates.
    """
    highest = settings.learning_rate * rate_factor(settings, batch)
    in_examples = settings.warmup_steps is not None or settings.warmup_epochs is not None
    risen = seen if seen is not None and in_examples else progress
    if risen < settings.warmup:
        return highest * risen / settings.warmup
    height = SCHEDULES[settings.schedule](min(progress, 1.0), settings)
    return highest * (settings.final + (1.0 - settings.final) * height)


def rate_factor(settings: OptimSettings, batch: int | None) -> float:
    """The factor of a step of `batch` pairs: (batch / base_batch) to the power of 0, 1/2 or 1."""
    if settings.base_batch is None or batch is None:
        return 1.0
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[settings.rate_scaling]
    return float((batch / settings.base_batch) ** power)


# from 1 to 0 after the warm-up, by the share of the run that is done
SCHEDULES: dict[str, Callable[[float, OptimSettings], float]] = {
    "cosine": lambda done, how: 0.5 * (1.0 + math.cos(math.pi * (done - how.warmup) / (1.0 - how.warmup))),
    "linear": lambda done, how: (1.0 - done) / (1.0 - how.warmup),
    "cooldown": lambda done, how: min(1.0, (1.0 - done) / how.cooldown),
    "constant": lambda done, how: 1.0,  # noqa: ARG005
}


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(model: nn.Module, clip_norm: float) -> Tensor:
    """Clip the gradient to `clip_norm` if that is positive; the norm before, on its device."""
    return full(nn.utils.clip_grad_norm_(model.parameters(), clip_norm if clip_norm > 0 else math.inf))


@torch.no_grad()
def weight_norm(model: nn.Module) -> Tensor:
    """The norm of all trained weights, on their device; collective where they are sharded."""
    return full(nn.utils.get_total_norm([p for p in model.parameters() if p.requires_grad]))


@torch.no_grad()
def clamp_scale(log_scale: Tensor) -> None:
    log_scale.clamp_(*LOG_SCALE_BOUNDS)
