"""encode with an engine of DeepSpeed: a stand-in with its attributes; `tests/integrations` has the library itself."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from refusals import refusal
from torch import Tensor, nn

from contrastile import encode


class Engine(nn.Module):
    """The engine's names, its backward and its flag of a backward that it runs."""

    def __init__(self, module: nn.Module, autocast: bool = False) -> None:
        super().__init__()
        self.module, self.autocast, self._running_engine_backward = module, autocast, False

    def zero_optimization_stage(self) -> int:
        return 2

    def torch_autocast_enabled(self) -> bool:
        return self.autocast

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("an engine's forward counts the backwards that follow")

    def backward(self, loss: Tensor) -> None:
        self._running_engine_backward = True
        loss.backward()
        self._running_engine_backward = False


@pytest.mark.parametrize("way", ["engine", "method", "function"])
def test_the_module_inside_gets_the_plain_gradient(way: str) -> None:
    tower = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    plain, engine, x = deepcopy(tower), Engine(tower), torch.randn(7, 3)
    encoder: Any = {"engine": engine, "method": (engine, "forward"), "function": (engine, lambda model, x: model(x))}[
        way
    ]
    engine.backward(encode(encoder, x, sub_batch=3).square().sum())
    plain(x).square().sum().backward()
    for p, q in zip(tower.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_backward_without_the_engine_is_refused() -> None:
    loss = encode(Engine(nn.Linear(3, 2)), torch.randn(4, 3), sub_batch=2).sum()
    assert refusal(loss.backward) == (
        "`encoder` must be back-propagated by its DeepSpeed engine; got a backward without it. "
        "Call engine.backward(loss)."
    )


def test_the_autocast_of_the_engine_is_not_left_out() -> None:
    engine, x = Engine(nn.Linear(3, 2), autocast=True), torch.randn(4, 3)
    assert refusal(encode, engine, x, sub_batch=2) == (
        "`encoder` must run under the autocast that its DeepSpeed engine is configured for; got none. "
        "Put encode and the loss under torch.autocast."
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert encode(engine, x, sub_batch=2).dtype == torch.bfloat16
