"""Muon: its update, the parameters that it is meant for, and its combination with AdamW.

One of the optimizers of `optim.py`. After Keller Jordan (https://kellerjordan.github.io/posts/muon/), with the size of
updates after Moonshot (arXiv:2502.16982). The update is that of `torch.optim.Muon`, bit for bit; torch's is not used
because it would orthogonalise each shard of a sharded matrix alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from contrastile.train.optimizer import PerParameterOptimizer
from contrastile.train.sharded import full, shard_like

# one iteration a x + b x xᵀx + c x xᵀx xᵀx moves every singular value in (0, 1] towards 1; five are enough
COEFFICIENTS, TIMES, SMALLEST_NORM = (3.4445, -4.7750, 2.0315), 5, 1e-7
# the usual root mean square of AdamW's updates
RMS = 0.2
# the layers from a tower to the common features: heads, which AdamW trains
HEAD = "projection"


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trained matrices of the layers inside a model's towers.

    Embeddings, tied ones too, position tables and heads are left to AdamW: a matrix counts if its name ends in
    `weight`, as those of layers do, and it lies outside a `projection`.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv1d(4, 2, 3))
    >>> [tuple(weight.shape) for weight in matrices(model)]
    [(4, 4)]
    """
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)}
    chosen = {
        id(parameter): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and parameter.ndim == 2
        and name.endswith("weight")
        and HEAD not in name.split(".")
        and id(parameter) not in tables
    }
    return list(chosen.values())


class Muon(PerParameterOptimizer):
    """For the gradient g [rows, columns] of a matrix:

        m ← momentum m + (1 − momentum) g
        u = orthogonal((1 − momentum) g + momentum m)
        p ← p − lr weight_decay p − lr 0.2 √max(rows, columns) u

    which is `torch.optim.Muon(..., adjust_lr_fn="match_rms_adamw")`. The momentum of sharded weights is sharded; each
    matrix is gathered on every rank while it is made orthogonal.

    >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
    >>> optimizer = Muon([weight], lr=1.0, momentum=0.95, weight_decay=0.0)
    >>> weight.grad = 9 * torch.eye(2)
    >>> optimizer.step(); weight.abs() > 0.1
    tensor([[ True, False],
            [False,  True]])
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Apply the formula above."""
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


class CombinedOptimizer(PerParameterOptimizer):
    """Several optimizers with disjoint parameters as one: their groups in one list, their states by class name.

    >>> one, other = nn.Linear(2, 2).parameters(), nn.Linear(2, 2).parameters()
    >>> both = CombinedOptimizer(torch.optim.SGD(one, lr=0.1), torch.optim.AdamW(other, lr=0.2))
    >>> [group["lr"] for group in both.param_groups], list(both.state_dict())
    ([0.1, 0.2], ['SGD', 'AdamW'])
    """

    def __init__(self, *members: Optimizer) -> None:
        self.members = {type(member).__name__: member for member in members}
        super().__init__([p for member in members for group in member.param_groups for p in group["params"]], {})
        self._join_groups()

    def _join_groups(self) -> None:
        # the members' own group objects, so that a rate set here is theirs
        self.param_groups = [group for member in self.members.values() for group in member.param_groups]

    def update_all(self) -> None:
        """Step each member."""
        for member in self.members.values():
            member.step()

    def state_dict(self) -> dict[str, Any]:
        """The members' states by class name."""
        return {name: member.state_dict() for name, member in self.members.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the members, which make new group objects."""
        for name, member in self.members.items():
            member.load_state_dict(state_dict[name])
        self._join_groups()
