"""Muon's part of the optimizers: which parameters it is for, and how it and AdamW become one optimizer.

Beside `optim.py`, which builds them. The steps themselves are torch's: `torch.optim.Muon` after Keller Jordan
(https://kellerjordan.github.io/posts/muon/), with the size of its updates after Moonshot (arXiv:2502.16982).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

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


class Together(Optimizer):
    """Several optimizers with parameters of their own, as one: their groups side by side, their states under one roof.

    >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> both = Together(torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.AdamW(other.parameters(), lr=0.2))
    >>> [group["lr"] for group in both.param_groups], list(both.state_dict())
    ([0.1, 0.2], ['SGD', 'AdamW'])
    """

    def __init__(self, *members: Optimizer) -> None:
        self._members = {type(member).__name__: member for member in members}
        super().__init__([p for member in members for group in member.param_groups for p in group["params"]], {})
        self._side_by_side()

    def _side_by_side(self) -> None:
        # the very groups of the members: who sets a rate here sets it there
        self.param_groups = [group for member in self._members.values() for group in member.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self._members.values():
            member.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Every member's, by its name."""
        return {name: member.state_dict() for name, member in self._members.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Be as you were; the members make new groups of it."""
        for name, member in self._members.items():
            member.load_state_dict(state_dict[name])
        self._side_by_side()
