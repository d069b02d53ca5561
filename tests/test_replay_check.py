"""An encoder with other features in its second pass is warned of, and one that only rounds otherwise is not."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile import encode
from contrastile.gradcache import replay_check
from contrastile.gradcache.replay_check import PRODUCTS, ReplayCheck, poll, sketch, sketched, tolerance

B, D_IN, D, SUB = 23, 6, 16, 4
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def _sentence(name: str) -> str:
    return (
        rf"^`encoder` must give the same features in both passes; got {name}, which gave others in the second, so that "
        r"the gradient is not that of the first\. Draw random numbers from torch's, Python's or NumPy's generators, "
        r"keep nothing from call to call, and change nothing before the backward\.$"
    )


class Keeping(nn.Module):
    """A linear layer with something that changes from call to call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.cache = kind, 0, {}
        self.linear = nn.Linear(D_IN, D)
        self.generators = [torch.Generator().manual_seed(1)]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = self.linear(x)
        if self.kind == "counter":
            return out * (1 + 0.1 * (self.calls % 7))
        if self.kind == "its own generator":
            # in a list, where it is not detected
            return out * (torch.rand(out.shape, generator=self.generators[0]) > 0.1).to(out.dtype)
        if self.kind == "cache":
            before, self.cache["out"] = self.cache.get("out"), out.detach().mean()
            return out if before is None else out + before
        return out


def _keeping(kind: str, dtype: torch.dtype = torch.float32) -> Keeping:
    torch.manual_seed(0)
    return Keeping(kind).to(dtype)


def _x(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(B, D_IN, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["counter", "its own generator", "cache"])
def test_state_from_call_to_call_is_warned_of(kind: str, dtype: torch.dtype) -> None:
    features = encode(_keeping(kind, dtype), _x(dtype), sub_batch=SUB)
    with pytest.warns(UserWarning, match=_sentence("Keeping")):
        features.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_passes_give_no_warning(dtype: torch.dtype) -> None:
    encode(_keeping("nothing", dtype), _x(dtype), sub_batch=SUB).sum().backward()


def test_changed_data_are_warned_of() -> None:
    table, tower = [torch.ones(D_IN)], nn.Linear(D_IN, D)

    def looked_up(x: Tensor) -> Tensor:
        return tower(x * table[0])

    features = encode(looked_up, _x(), sub_batch=SUB)
    table[0] = torch.full((D_IN,), 1.1)
    with pytest.warns(UserWarning, match="got .*looked_up, which gave others"):
        features.sum().backward()


@pytest.mark.parametrize("how", ["written over", "host", "tokens", "numbers", "twice", "one sub-batch"])
def test_the_warning_does_not_depend_on_later_use_of_the_features(how: str) -> None:
    keeping, where = _keeping("counter"), "host" if how == "host" else "device"
    shaped = {"tokens": lambda x: keeping(x).unflatten(1, (4, 4)), "numbers": lambda x: keeping(x).sum(1)}
    features = encode(shaped.get(how, keeping), _x(), sub_batch=B if how == "one sub-batch" else SUB, features=where)
    if how == "written over":
        features.zero_()
    out = features.sin().sum()
    for again in (True, False) if how == "twice" else (False,):
        with pytest.warns(UserWarning, match="must give the same features in both passes"):
            out.backward(retain_graph=again)


def test_without_a_second_pass_there_is_no_warning() -> None:
    keeping = _keeping("counter")
    encode(keeping, _x(), sub_batch=SUB, retain=99).sum().backward()
    with pytest.warns(UserWarning, match="must give the same features in both passes"):
        encode(keeping, _x(), sub_batch=SUB, retain=5).sum().backward()


def test_an_output_without_gradient_may_differ() -> None:
    keeping, plain = _keeping("counter"), nn.Linear(D_IN, D)

    def both(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return plain(x), keeping(x), torch.full((len(x),), float(keeping.calls))

    features, other, number = encode(both, _x(), sub_batch=SUB)
    (features.sum() + number.sum()).backward(retain_graph=True)
    with pytest.warns(UserWarning, match="must give the same features in both passes"):
        (features.sum() + other.sum()).backward()


@pytest.mark.parametrize("batch", [0, 1, 5])
@pytest.mark.parametrize("times", [0.0, math.nan, math.inf])
def test_zero_and_non_finite_features_give_no_warning(times: float, batch: int) -> None:
    tower = nn.Linear(D_IN, D)
    encode(lambda x: tower(x) * times, _x()[:batch], sub_batch=2).sum().backward()


def test_the_warning_is_shown_once() -> None:
    keeping = _keeping("counter")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            encode(keeping, _x(), sub_batch=SUB).sum().backward()
    assert len(said) == 1


class Rounding(nn.Module):
    """Features that differ by `relative` where a graph is wanted."""

    def __init__(self, relative: float) -> None:
        super().__init__()
        self.relative, self.linear = relative, nn.Linear(D_IN, D)

    def forward(self, x: Tensor) -> Tensor:
        out = F.normalize(self.linear(x), dim=-1)
        # orthogonal to the features, pair by pair
        turned = torch.stack([-out[:, 1::2], out[:, ::2]], -1).flatten(1)
        return out + self.relative * turned if torch.is_grad_enabled() else out


def _other(dtype: torch.dtype, relative: float, autocast: bool = False) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        return encode(Rounding(relative).to(dtype), _x(dtype), sub_batch=SUB)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_accepted_and_more_is_warned_of(dtype: torch.dtype) -> None:
    allowed = tolerance([dtype], accelerated=False)
    assert allowed == 0.5 * torch.finfo(dtype).eps ** 0.5
    _other(dtype, allowed / 3).sum().backward()
    with pytest.warns(UserWarning, match="must give the same features in both passes"):
        _other(dtype, 3 * allowed).sum().backward()


def test_under_autocast_the_tolerance_is_that_of_its_type() -> None:
    between = 0.5 * tolerance([torch.bfloat16], accelerated=False)
    _other(torch.float32, between, autocast=True).sum().backward()
    with pytest.warns(UserWarning, match="must give the same features in both passes"):
        _other(torch.float32, between).sum().backward()


def test_tolerance_is_that_of_the_coarsest_type() -> None:
    mixed = [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn]
    assert tolerance(mixed, accelerated=False) == 0.5 * 2**-3.5
    assert tolerance([torch.float32], accelerated=True) == 2**-6
    assert tolerance([torch.float64], accelerated=True) == 2**-27


@pytest.mark.parametrize("shape", [(9, 40), (9, 3, 40), (300,)])
def test_distances_of_sketches_are_those_of_features(shape: tuple[int, ...]) -> None:
    """The mean of the features is larger than their differences."""
    one = 5 + torch.rand(shape)
    other = one + 0.01 * torch.randn(shape)
    here, there = sketch(one), sketch(other)
    assert here.shape == (one.numel() // (shape[-1] if len(shape) > 1 else 1), PRODUCTS)
    found = torch.linalg.vector_norm(there - here) / torch.linalg.vector_norm(here)
    true = torch.linalg.vector_norm(other - one) / torch.linalg.vector_norm(one)
    assert 1 / 3 < found / true < 3


def test_a_result_from_a_gpu_is_reported_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived = []
    event = SimpleNamespace(query=lambda: bool(arrived))
    awaited: Any = replay_check._pending
    awaited.extend([(torch.tensor(0.5), event, "first"), (torch.tensor(2.0), event, "second")])
    poll()
    encode(nn.Linear(D_IN, D), _x(), sub_batch=SUB)
    assert len(awaited) == 2
    arrived.append(True)
    with pytest.warns(UserWarning, match="^second$"):
        encode(nn.Linear(D_IN, D), _x(), sub_batch=SUB)
    assert not awaited


def test_only_dense_floating_point_rows_are_sketched() -> None:
    class Spread(Tensor):
        pass

    rows = torch.zeros(3, 2)
    first = [rows, nn.Parameter(rows), None, torch.ones(()), torch.ones(3, dtype=torch.int64), rows > 0]
    others = [rows.to_sparse(), rows.to("meta"), rows.as_subclass(Spread), rows.cfloat()]
    sketches = [sketched(first), sketched(others)]
    compared = [[x is not None for x in outputs] for outputs in sketches]
    assert compared == [[True] * 2 + [False] * 4, [False] * 4]
    assert ReplayCheck(sketches, []).report("nobody") is None


class Detaching(nn.Module):
    """A tower that detaches its features in several ways, and one that detaches its trunk alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D_IN, D)

    @torch.no_grad()
    def off(self, x: Tensor) -> Tensor:
        return self.linear(x)

    @torch.inference_mode()
    def inference(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def cut(self, x: Tensor) -> Tensor:
        return self.linear(x).detach()

    def trunk(self, x: Tensor) -> Tensor:
        return self.linear(self.off(x)[:, :D_IN])


@pytest.mark.parametrize("retain", [0, 2, 9])
@pytest.mark.parametrize("method", ["off", "inference", "cut"])
def test_an_encoder_that_trains_nothing_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, method: str, retain: int
) -> None:
    monkeypatch.setattr(replay_check, "_looked_into", WeakSet())
    model = Detaching()
    sentence = (
        rf"^`encoder` must return features with a gradient; got Detaching\.{method}, which runs Linear and detaches "
        r"it, by no_grad, inference_mode or detach\. Take that out of the encoder; or call encode under "
        r"torch\.no_grad\(\), if nothing is to be trained\.$"
    )
    with pytest.warns(UserWarning, match=sentence):
        encode((model, method), _x(), sub_batch=SUB, retain=retain).sum().backward()
    assert model.linear.weight.grad is None
    # warnings are errors here
    encode((model, method), _x(), sub_batch=SUB, retain=retain).sum().backward()


def test_a_detached_trunk_and_an_evaluation_give_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_check, "_looked_into", WeakSet())
    model = Detaching()
    encode((model, "trunk"), _x(), sub_batch=SUB).sum().backward()
    assert model.linear.weight.grad is not None
    with torch.no_grad():
        encode((model, "off"), _x(), sub_batch=SUB)


def test_a_function_that_detaches_has_features_without_a_graph() -> None:
    model = Detaching()
    assert not encode(lambda x: model.linear(x).detach(), _x(), sub_batch=SUB).requires_grad


def test_an_output_that_the_loss_leaves_out_is_not_detached() -> None:
    model = Detaching()
    encode(lambda x: (model.linear(x), x * 2), _x().requires_grad_(), sub_batch=SUB)[1].sum().backward()
