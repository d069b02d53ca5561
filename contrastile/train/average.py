"""The mean of the weights over the last steps, which is often better than the weights themselves.

Beside `loop.py`: updated after every step, it stands in for the weights while they are measured and when they are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Average:
    """An exponential moving average of a model's trained parameters; without a `decay` it is the model itself.

    After step t: mean ← d mean + (1 − d) weights, with d = min(decay, (1 + t) / (10 + t)), so that the first steps are
    soon forgotten. In float32.
    """

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        self._decay, self._step = decay, 0
        trained = {} if decay is None else {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._weights: dict[str, nn.Parameter] = trained
        self._means = {name: parameter.detach().float().clone() for name, parameter in trained.items()}

    def state_dict(self) -> dict[str, Any]:
        """The means, and how many steps they are of."""
        return {"step": self._step, "means": self._means}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._step = state_dict["step"]
        for name, mean in state_dict["means"].items():
            self._means[name].copy_(mean)

    @torch.no_grad()
    def update(self) -> None:
        """One more step."""
        if self._decay is None:
            return
        self._step += 1
        kept = min(self._decay, (1 + self._step) / (10 + self._step))
        for name, mean in self._means.items():
            mean.lerp_(self._weights[name].float(), 1 - kept)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the means for its weights; afterwards its own again."""
        own = {name: weights.detach().clone() for name, weights in self._weights.items()}
        self._put(self._means)
        try:
            yield
        finally:
            self._put(own)

    def settle(self) -> None:
        """The model has the means for good."""
        self._put(self._means)

    @contextmanager
    def at_the_end(self) -> Iterator[None]:
        """Settles when the steps within are over, or have failed: what is kept is what is measured."""
        try:
            yield
        finally:
            self.settle()

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self._weights[name].copy_(value)
