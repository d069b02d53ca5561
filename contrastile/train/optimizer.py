"""Base of our own optimizers, `adafactor.py` and `muon.py`: one update rule, applied to each parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class PerParameterOptimizer(Optimizer):
    """An optimizer defined by its update of one parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update_all()
        return loss

    def update_all(self) -> None:
        """Update one parameter after the other."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update one parameter in place, by its gradient, its state and its group's settings."""
        raise NotImplementedError
