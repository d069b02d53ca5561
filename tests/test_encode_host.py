"""Features in host memory between encode and a loss: values and gradients stay the same."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from problems import distance
from torch import Tensor, nn

from contrastile import ClipLoss, encode
from contrastile.engine import plan
from contrastile.exchange import host
from contrastile.gradcache import encode as encoding
from contrastile.gradcache import forward

B, D = 29, 6


class Tower(nn.Module):
    """Rows of unit length, and a mask beside them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, D))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.layers(x), dim=-1), x[:, 0] > 0


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Treat the CPU as an accelerator with a host of its own; return the shapes allocated on that host."""
    made: list[tuple[int, ...]] = []
    room = forward.host_room

    def noted(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made.append(tuple(shape))
        return room(shape, dtype)

    monkeypatch.setattr(forward, "on_accelerator", lambda x: True)
    monkeypatch.setattr(forward, "host_room", noted)
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "waits_on_host", lambda features, device: True)
    monkeypatch.setattr(host, "cut", lambda *_: host.Cut(13, 7))
    return made


def _step(towers: list[Tower], inputs: list[Tensor], device: str | None = None, **how: Any) -> list[Tensor]:
    """The loss of a step, its features, and the gradients of inputs, scale and parameters."""
    torch.manual_seed(3)
    leaves = [x.detach().requires_grad_() for x in inputs]
    scale = torch.tensor(10.0, dtype=torch.float64, requires_grad=True)
    features = [encode(tower, x, sub_batch=8, **how)[0] for tower, x in zip(towers, leaves, strict=True)]
    value = ClipLoss(device=device)(*features, scale)
    wanted = [*leaves, scale, *(p for tower in towers for p in tower.parameters())]
    return [value.detach(), *(x.detach() for x in features), *torch.autograd.grad(value, wanted)]


@pytest.fixture
def towers() -> list[Tower]:
    torch.manual_seed(1)
    return [Tower(7).double(), Tower(5).double()]


@pytest.fixture
def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(B, width, dtype=torch.float64, generator=generator) for width in (7, 5)]


@pytest.mark.parametrize("retain", [0, 2, "auto"])
def test_features_in_host_memory_give_the_same_gradients(
    towers: list[Tower], inputs: list[Tensor], retain: int | Literal["auto"], request: pytest.FixtureRequest
) -> None:
    truth = _step(towers, inputs, retain=retain)
    rooms = request.getfixturevalue("rooms")
    found = _step(towers, inputs, device="cpu", retain=retain, features="host")
    # every output of both towers
    assert rooms == [(B, D), (B,)] * 2
    assert all(torch.equal(one, other) for one, other in zip(found[1:3], truth[1:3], strict=True))
    assert all(distance(one, other) <= 1e-12 for one, other in zip(found, truth, strict=True))


def test_features_without_gradient_go_to_the_host(
    towers: list[Tower], inputs: list[Tensor], rooms: list[tuple[int, ...]]
) -> None:
    with torch.no_grad():
        encode(towers[0].eval(), inputs[0], sub_batch=8, features="host")
    assert rooms == [(B, D), (B,)]


def test_each_pass_waits_for_copies_to_the_host(
    towers: list[Tower], inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of either pass, for modules and functions, and only with features on the host."""
    waited: list[Any] = []
    for module in (forward, encoding):
        monkeypatch.setattr(module, "settle", waited.append)
    _step(towers, inputs)
    assert waited == []
    _step(towers, inputs, features="host")
    assert waited == [torch.device("cpu")] * 4
    waited.clear()
    # a function has no device of its own
    features = encode(lambda x: towers[0](x)[0], inputs[0], sub_batch=8, features="host")
    features.sum().backward()
    with torch.no_grad():
        encode(lambda x: towers[0](x)[0], inputs[0], sub_batch=8, features="host")
    assert waited == [torch.device("cpu")] * 3


def test_without_an_accelerator_host_and_device_are_the_same(towers: list[Tower], inputs: list[Tensor]) -> None:
    one, other = (_step(towers, inputs, features=where) for where in ("device", "host"))
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_an_unknown_place_for_features_is_refused(towers: list[Tower], inputs: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="`features` must be one of device, host; got 'disk'"):
        encode(towers[0], inputs[0], sub_batch=8, features="disk")  # type: ignore[arg-type]
