"""Features that wait in host memory between encode and a loss that takes them from there: nothing else changes."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from problems import distance
from torch import Tensor, nn

from contrastile import ClipLoss, _contrast, _streamed, cache, encode, first_pass

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
    """As if the CPU were an accelerator, and its host somewhere else; what was kept there."""
    made: list[tuple[int, ...]] = []
    room = first_pass.host_room

    def noted(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made.append(tuple(shape))
        return room(shape, dtype)

    monkeypatch.setattr(first_pass, "on_accelerator", lambda x: True)
    monkeypatch.setattr(first_pass, "host_room", noted)
    monkeypatch.setattr(_contrast, "away", lambda features, device: True)
    monkeypatch.setattr(_streamed, "cut", lambda *_: _streamed.Cut(13, 7))
    return made


def _step(towers: list[Tower], inputs: list[Tensor], device: str | None = None, **how: Any) -> list[Tensor]:
    """A step's loss and its gradients, those of the inputs and the scale too."""
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
def test_from_encode_to_the_loss_and_back_by_way_of_the_host(
    towers: list[Tower], inputs: list[Tensor], retain: int | Literal["auto"], request: pytest.FixtureRequest
) -> None:
    truth = _step(towers, inputs, retain=retain)
    rooms = request.getfixturevalue("rooms")
    found = _step(towers, inputs, device="cpu", retain=retain, features="host")
    # every output of both towers
    assert rooms == [(B, D), (B,)] * 2
    assert all(torch.equal(one, other) for one, other in zip(found[1:3], truth[1:3], strict=True))
    assert all(distance(one, other) <= 1e-12 for one, other in zip(found, truth, strict=True))


def test_where_nothing_is_differentiated_features_go_there_too(
    towers: list[Tower], inputs: list[Tensor], rooms: list[tuple[int, ...]]
) -> None:
    with torch.no_grad():
        encode(towers[0].eval(), inputs[0], sub_batch=8, features="host")
    assert rooms == [(B, D), (B,)]


def test_the_host_waits_for_what_is_on_its_way(
    towers: list[Tower], inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of either pass, and only where it is asked for."""
    waited: list[Any] = []
    for module in (first_pass, cache):
        monkeypatch.setattr(module, "settle", waited.append)
    _step(towers, inputs)
    assert waited == []
    _step(towers, inputs, features="host")
    assert waited == [torch.device("cpu")] * 4


def test_it_waits_for_a_function_too(
    towers: list[Tower], inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which says nothing of devices."""
    waited: list[Any] = []
    for module in (first_pass, cache):
        monkeypatch.setattr(module, "settle", waited.append)
    features = encode(lambda x: towers[0](x)[0], inputs[0], sub_batch=8, features="host")
    features.sum().backward()
    with torch.no_grad():
        encode(lambda x: towers[0](x)[0], inputs[0], sub_batch=8, features="host")
    assert waited == [torch.device("cpu")] * 3


def test_without_an_accelerator_it_is_the_same(towers: list[Tower], inputs: list[Tensor]) -> None:
    one, other = (_step(towers, inputs, features=where) for where in ("device", "host"))
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_other_places_are_refused(towers: list[Tower], inputs: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="`features` must be one of device, host; got 'disk'"):
        encode(towers[0], inputs[0], sub_batch=8, features="disk")  # type: ignore[arg-type]
