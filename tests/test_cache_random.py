"""The second pass draws the numbers of the first, from every kind of generator, or is refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from problems import distance
from torch import Tensor, nn

from contrastile import contrast, encode
from contrastile.gradcache.rng import RandomState, own_generators
from contrastile.losses.softmax import Softmax

B, D_IN, D, SUB = 23, 6, 5, 4
DRAWS: dict[str, Any] = {
    "python": lambda: random.uniform(0, 1),
    "python, gauss": lambda: abs(random.gauss(0, 1)),
    "numpy": lambda: np.random.uniform(),
    "numpy, normal": lambda: abs(np.random.normal()),
    "both and torch": lambda: (random.random() + np.random.rand() + float(torch.rand(()))) / 3,
}


@pytest.fixture
def x() -> Tensor:
    return torch.randn(B, D_IN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class LayerDrop(nn.Module):
    """Layers of which some are left out at random, as in older models, and the others are scaled."""

    def __init__(self, draw: Any, layers: int = 3) -> None:
        super().__init__()
        self.draw = draw
        self.layers = nn.ModuleList(nn.Linear(D_IN, D_IN) for _ in range(layers))
        self.project = nn.Linear(D_IN, D)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            drawn = self.draw()
            if drawn > 0.4:
                x = x + drawn * layer(x).tanh()
        return self.project(x)


def _seed() -> None:
    torch.manual_seed(3)
    random.seed(4)
    np.random.seed(5)


def _next() -> list[float]:
    """The next draw of each generator, a cached normal number included."""
    return [random.random(), random.gauss(0, 1), np.random.normal(), np.random.rand(), float(torch.rand(()))]


def _plain(module: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor], list[float]]:
    _seed()
    features = torch.cat([module(part) for part in x.split(SUB)])
    return features.detach(), list(torch.autograd.grad(features.sin().sum(), list(module.parameters()))), _next()


def _check(module: nn.Module, encoder: Any, x: Tensor, truth: Any, retain: Any = 0) -> None:
    _seed()
    features = encode(encoder, x, sub_batch=SUB, retain=retain)
    found = torch.autograd.grad(features.sin().sum(), list(module.parameters()))
    assert torch.equal(features, truth[0])
    assert all(distance(one, other) <= 1e-12 for one, other in zip(found, truth[1], strict=True))
    assert _next() == truth[2]


@pytest.mark.parametrize("retain", [0, 2])
@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("draw", DRAWS)
def test_python_and_numpy_draw_the_same_numbers_in_both_passes(
    draw: str, as_function: bool, retain: int, x: Tensor
) -> None:
    # an odd number of layers: every other sub-batch begins with a normal number that was drawn before
    module = LayerDrop(DRAWS[draw])
    truth = _plain(module, x)
    assert truth[1][0].any()
    _check(module, (lambda rows: module(rows)) if as_function else module, x, truth, retain)


def test_a_cached_normal_number_is_drawn_again(x: Tensor) -> None:
    module = LayerDrop(lambda: 0.5 + abs(np.random.normal()), layers=1)
    found = []
    for encoding in (lambda x: torch.cat([module(part) for part in x.split(SUB)]), None):
        np.random.seed(5)
        np.random.normal()
        features = encode(module, x, sub_batch=SUB) if encoding is None else encoding(x)
        found.append(torch.autograd.grad(features.sin().sum(), list(module.parameters())))
    assert all(distance(one, other) <= 1e-12 for one, other in zip(*found, strict=True))


def test_numpys_generator_may_be_of_another_type(x: Tensor) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(7))
    try:
        module = LayerDrop(DRAWS["numpy"])
        start = np.random.get_state(legacy=False)
        truth = torch.cat([module(part) for part in x.split(SUB)])
        expected = torch.autograd.grad(truth.sin().sum(), list(module.parameters()))
        np.random.set_state(start)
        found = torch.autograd.grad(encode(module, x, sub_batch=SUB).sin().sum(), list(module.parameters()))
    finally:
        np.random.set_bit_generator(before)
    assert all(distance(one, other) <= 1e-12 for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("waiting", [False, True])
def test_unused_generators_of_the_process_are_not_set(
    waiting: bool, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads that draw from them go on undisturbed; dropout draws from torch."""
    module = nn.Sequential(nn.Linear(D_IN, D), nn.Dropout(0.3)).double()
    _seed()
    if waiting:
        np.random.normal()
    sets: list[str] = []
    monkeypatch.setattr(random, "setstate", lambda _: sets.append("python"))
    monkeypatch.setattr(np.random, "set_state", lambda _: sets.append("numpy"))
    features = encode(lambda rows: module(rows), x, sub_batch=SUB)
    between = random.random(), np.random.rand()
    features.sum().backward()
    assert sets == []
    assert (random.random(), np.random.rand()) != between


def test_captures_without_draws_share_one_state() -> None:
    _seed()
    first = RandomState.capture()
    second = RandomState.capture(last=first)
    assert all(second.process[shared] is state for shared, state in first.process.items())
    assert first.drawn(second).process == {}
    random.random()
    third = RandomState.capture(last=second)
    assert len(second.drawn(third).process) == 1
    assert not second.same(third)


OWN: dict[str, Any] = {
    "torch": (lambda: torch.Generator().manual_seed(9), lambda g: float(torch.rand((), generator=g))),
    "python": (lambda: random.Random(9), lambda g: g.random()),
    "numpy": (lambda: np.random.default_rng(9), lambda g: g.random()),
    "numpy, old": (lambda: np.random.RandomState(9), lambda g: g.rand()),
}


@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("kind", OWN)
def test_a_modules_own_generator_is_set_back(kind: str, as_function: bool, x: Tensor) -> None:
    make, draw = OWN[kind]
    module = LayerDrop(lambda: draw(module.generator))
    module.generator = make()
    assert len(own_generators(module.modules())) == 1
    truth = _plain(module, x)
    after, module.generator = draw(module.generator), make()
    _check(module, (lambda rows: module(rows)) if as_function else module, x, truth)
    assert draw(module.generator) == after


@pytest.mark.parametrize("draw", DRAWS)
def test_a_learned_distance_draws_the_same_numbers_twice(draw: str) -> None:
    """Each pair is scored twice, and needs the same numbers for the gradient of the loss."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4, dtype=torch.float64))

        def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
            return DRAWS[draw]() * rows @ self.weight @ columns.T

    module, q = Dropping(), torch.randn(9, 4, dtype=torch.float64)
    k = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)

    def loss(k: Tensor, _: Tensor) -> Tensor:
        _seed()
        return contrast(q, k, scorer=module, loss=Softmax(), workspace=2**20)

    assert torch.autograd.gradcheck(loss, (k, module.weight))
    _seed()
    loss(k, module.weight)
    # a call draws one number of torch's, for its seed, and none of the others
    drawn = random.random(), np.random.rand()
    _seed()
    assert drawn == (random.random(), np.random.rand())


@pytest.mark.parametrize("kind", OWN)
def test_a_learned_distance_that_draws_from_a_generator_of_its_own_is_refused(kind: str) -> None:
    make, draw = OWN[kind]

    class Drawing(nn.Module):
        def __init__(self, draws: bool) -> None:
            super().__init__()
            self.generator, self.draws = make(), draws

        def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
            return (draw(self.generator) if self.draws else 1.0) * rows @ columns.T

    q = torch.randn(5, 4)
    assert contrast(q, q, scorer=Drawing(False)) == contrast(q, q, scorer=Drawing(False))
    sentence = (
        r"^`scorer` must draw from torch's, Python's or NumPy's own generators; got one that is an attribute of "
        r"a module\. A tile begins them anew each time it is computed\.$"
    )
    with pytest.raises(ValueError, match=sentence):
        contrast(q, q, scorer=Drawing(True))
