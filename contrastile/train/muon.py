"""Muon: its step, which parameters it is for, and how it and AdamW become one optimizer.

Beside `optim.py`, which builds them. After Keller Jordan (https://kellerjordan.github.io/posts/muon/), with the size of
its updates after Moonshot (arXiv:2502.16982). The step is that of `torch.optim.Muon`, bit for bit, but also of weights
in shards, of which torch's would orthogonalise each alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from contrastile.train.moving import Moving
from contrastile.train.sharded import like, whole

# a x + b x xᵀx + c x xᵀx xᵀx brings every singular value up to 1 towards it, and so many times brings it there
COEFFICIENTS, TIMES, SMALLEST_NORM = (3.4445, -4.7750, 2.0315), 5, 1e-7
# as large as AdamW's usual updates
RMS = 0.2
# the maps from a tower to the common features: heads, which Muon leaves to AdamW
HEAD = "projection"


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights of the layers inside a model's towers that are matrices, and train.

    Embeddings are tables and no matrices; of a tied table AdamW has both uses. Tables of places and heads are left
    out too: what is called `weight`, as layers do, and lies outside a `projection`, is meant.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv1d(4, 2, 3))
    >>> [tuple(weight.shape) for weight in matrices(model)]
    [(4, 4)]
    """
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)}
    found = {
        id(parameter): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and parameter.ndim == 2
        and name.endswith("weight")
        and HEAD not in name.split(".")
        and id(parameter) not in tables
    }
    return list(found.values())


class Muon(Moving):
    """For the gradient g [rows, columns] of a matrix:

        m ← momentum m + (1 − momentum) g
        u = orthogonal((1 − momentum) g + momentum m)
        p ← p − lr weight_decay p − lr 0.2 √max(rows, columns) u

    which is `torch.optim.Muon(..., adjust_lr_fn="match_rms_adamw")`. Of weights in shards `m` is too; each matrix is
    whole on every rank while it is made orthogonal.

    >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
    >>> optimizer = Muon([weight], lr=1.0, momentum=0.95, weight_decay=0.0)
    >>> weight.grad = 9 * torch.eye(2)
    >>> optimizer.step(); weight.abs() > 0.1
    tensor([[ True, False],
            [False,  True]])
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def move(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """The formula above."""
        rate, momentum = group["lr"], group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = orthogonal(whole(gradient.lerp(mean, momentum))).to(parameter.dtype)
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.add_(like(update, parameter), alpha=-rate * (RMS * math.sqrt(max(parameter.shape))))


def orthogonal(x: Tensor) -> Tensor:
    """About the nearest matrix [rows, columns] whose singular values are all 1, in bfloat16, by Newton and Schulz.

    They end between 0.5 and 1.5, but for those a thousand times smaller than the largest.
    """
    a, b, c = COEFFICIENTS
    tall = len(x) > x.shape[1]
    x = (x.T if tall else x).bfloat16()
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(TIMES):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Together(Moving):
    """Several optimizers with parameters of their own, as one: their groups side by side, their states under one roof.

    >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> both = Together(torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.AdamW(other.parameters(), lr=0.2))
    >>> [group["lr"] for group in both.param_groups], list(both.state_dict())
    ([0.1, 0.2], ['SGD', 'AdamW'])
    """

    def __init__(self, *members: Optimizer) -> None:
        self.members = {type(member).__name__: member for member in members}
        super().__init__([p for member in members for group in member.param_groups for p in group["params"]], {})
        self._side_by_side()

    def _side_by_side(self) -> None:
        # the very groups of the members: who sets a rate here sets it there
        self.param_groups = [group for member in self.members.values() for group in member.param_groups]

    def move_all(self) -> None:
        """Each member its own."""
        for member in self.members.values():
            member.step()

    def state_dict(self) -> dict[str, Any]:
        """Every member's, by its name."""
        return {name: member.state_dict() for name, member in self.members.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Be as you were; the members make new groups of it."""
        for name, member in self.members.items():
            member.load_state_dict(state_dict[name])
        self._side_by_side()
