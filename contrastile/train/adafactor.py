"""Adafactor in the form that trains vision transformers: momentum, a capped second moment, decoupled weight decay.

One of the optimizers of `optim.py`. Shazeer & Stern (arXiv:1804.04235) in the form of Zhai et al., "Scaling Vision
Transformers" (arXiv:2106.04560, section 3.4), which Inf-CL uses (arXiv:2410.17243, section 4.1): no step sizes relative
to a parameter's size, no clipping of updates, momentum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from contrastile.train.optimizer import PerParameterOptimizer
from contrastile.train.sharded import full, shard_like

# a matrix with fewer rows or columns keeps its whole second moment
SMALLEST_FACTORED = 32
EPS = 1e-30


class Adafactor(PerParameterOptimizer):
    """For a gradient g at step t, with β₂(t) = min(beta2, 1 − t^beta2_decay):

        v ← β₂(t) v + (1 − β₂(t)) (g² + 1e-30)        a matrix keeps only its means by row r and by column c,
        u = g / √v                                    and v = r cᵀ / mean(r)
        m ← beta1 m + (1 − beta1) u
        p ← p − lr m − (lr / peak) weight_decay p

    so that decay follows the schedule of the rate, not its height; `peak` is the initial `lr` of the group. A tensor
    with more axes is factored over its two longest. State is float32: `m` and two vectors for a matrix. The momentum
    `m` of sharded weights is sharded; the means, those of the whole matrix, are on every rank.

    >>> weight = torch.nn.Parameter(torch.ones(2, 2))
    >>> optimizer = Adafactor([weight], lr=0.1, betas=(0.0, 0.95))
    >>> weight.grad = torch.full((2, 2), 7.0)
    >>> optimizer.step(); weight
    Parameter containing:
    tensor([[0.9000, 0.9000],
            [0.9000, 0.9000]], requires_grad=True)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        beta2_decay: float = -0.8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "beta2_decay": beta2_decay, "weight_decay": weight_decay})
        for group in self.param_groups:
            group["peak"] = group["lr"]

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Apply the formula above, in float32."""
        gradient = gradient.float()
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
    axes = _factored(square.shape)
    if axes is None:
        return state.setdefault("square", torch.zeros_like(square)).lerp_(square, 1 - beta2).rsqrt()
    # the sum over a sharded axis is partial on each rank
    by_row, by_column = (full(square.sum(axis, keepdim=True)) / square.shape[axis] for axis in axes)
    row = state.setdefault("row", torch.zeros_like(by_row)).lerp_(by_row, 1 - beta2)
    column = state.setdefault("column", torch.zeros_like(by_column)).lerp_(by_column, 1 - beta2)
    return shard_like((row / row.mean(axes[1], keepdim=True)).rsqrt() * column.rsqrt(), square)


def _factored(shape: torch.Size) -> tuple[int, int] | None:
    """The two longest axes, if both are long enough."""
    if len(shape) < 2:
        return None
    *_, second, first = sorted(range(len(shape)), key=lambda axis: shape[axis])
    return (first, second) if shape[second] >= SMALLEST_FACTORED else None
