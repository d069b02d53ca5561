"""What every optimizer of our own has: a step that asks the closure, then moves all that has a gradient.

Under `adafactor.py` and `muon.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Moving(Optimizer):
    """An optimizer that is told by how it moves one parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move everything that has a gradient; what the closure gives, where there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.move_all()
        return loss

    def move_all(self) -> None:
        """One after the other."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, self.state[parameter], group)

    def move(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One parameter, by its gradient, what is kept of it, and its group's settings."""
        raise NotImplementedError
