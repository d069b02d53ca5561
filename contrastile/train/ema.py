"""Exponential moving average of the weights, which often measures better than the weights themselves.

Beside `loop.py`: updated after every step, put in place of the weights for measurements and for the saved run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Ema:
    """The average of a model's trained parameters, in float32. Without a `decay` it is the model itself.

    After step t: mean ← d mean + (1 − d) weights, with d = min(decay, (1 + t) / (10 + t)), so that the average forgets
    the first steps early.
    """

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        self._decay, self._step = decay, 0
        trained = {} if decay is None else {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._weights: dict[str, nn.Parameter] = trained
        self._means = {name: parameter.detach().float().clone() for name, parameter in trained.items()}

    def state_dict(self) -> dict[str, Any]:
        """The means and the number of steps."""
        return {"step": self._step, "means": self._means}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both."""
        self._step = state_dict["step"]
        for name, mean in state_dict["means"].items():
            self._means[name].copy_(mean)

    @torch.no_grad()
    def update(self) -> None:
        """Average in the weights after one more step."""
        if self._decay is None:
            return
        self._step += 1
        decay = min(self._decay, (1 + self._step) / (10 + self._step))
        for name, mean in self._means.items():
            mean.lerp_(self._weights[name].float(), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the means for its weights; restore its weights afterwards."""
        own = {name: weights.detach().clone() for name, weights in self._weights.items()}
        self.settle()
        try:
            yield
        finally:
            self._copy(own)

    def settle(self) -> None:
        """Give the model the means for good, when its steps have ended or failed."""
        self._copy(self._means)

    @torch.no_grad()
    def _copy(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self._weights[name].copy_(value)
