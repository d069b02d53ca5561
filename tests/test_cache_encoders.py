"""Encoders of many kinds: random depth, several outputs, shared numbers, buffers; inexact ones are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import distance
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode

from contrastile import ClipLoss, SigLipLoss, encode
from contrastile.gradcache.inputs import PROBE_ROWS
from contrastile.gradcache.introspect import of_its_module

B, D_IN, D, SUB = 23, 6, 8, 5


@pytest.fixture
def x() -> Tensor:
    return torch.randn(B, D_IN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def y() -> Tensor:
    return torch.randn(B, D_IN, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def _by_parts(encoder: Any, inputs: Tensor) -> Any:
    """The plain encoder with the random numbers of the same sub-batches."""
    parts = [encoder(part) for part in inputs.split(SUB)]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], dict):
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return tuple(torch.cat(group) for group in zip(*parts, strict=True))


def _compare(module: nn.Module, value: Any, retain: Any = 0) -> None:
    """value(encode) must be value(plain), with the gradients of the module's parameters."""
    found = []
    for encoding in (_by_parts, lambda encoder, inputs: encode(encoder, inputs, sub_batch=SUB, retain=retain)):
        torch.manual_seed(3)
        result = value(encoding)
        gradients = torch.autograd.grad(result, list(module.parameters()), allow_unused=True)
        found.append([result.detach(), *[torch.zeros(()) if g is None else g for g in gradients]])
    assert any(g.abs().sum() > 0 for g in found[0][1:])
    assert all(distance(x, truth) <= 1e-12 for x, truth in zip(found[1], found[0], strict=True))


class Deep(nn.Module):
    """Residual layers, each left out for a random part of the examples: stochastic depth. And dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D_IN, D_IN) for _ in range(4))
        self.project = nn.Linear(D_IN, D)
        self.kept: list[Tensor] = []
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            kept = (torch.rand(len(x), 1) < 0.6).to(x.dtype)
            self.kept.append(kept)
            x = x + F.dropout(layer(x).tanh(), 0.2) * kept / 0.6
        return F.normalize(self.project(x), dim=-1)


@pytest.mark.parametrize("retain", [0, 2, "auto"])
def test_stochastic_depth_drops_the_same_layers_again(x: Tensor, retain: Any) -> None:
    torch.manual_seed(0)
    deep = Deep()
    _compare(deep, lambda encoding: encoding(deep, x).sin().sum(), retain)
    deep.kept.clear()
    features = encode(deep, x, sub_batch=SUB)
    first = deep.kept[:]
    features.sum().backward()
    again = deep.kept[len(first) :]
    assert len(first) == len(again) == 4 * 5
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("retain", [0, 2, "auto"])
def test_a_bias_that_all_examples_share(x: Tensor, y: Tensor, retain: Any, as_function: bool) -> None:
    """A number comes back as a number, with its gradient once, whether it was computed or is a parameter itself."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D_IN, D).double()
            self.shared = nn.Parameter(torch.tensor(-0.5, dtype=torch.float64))

        def forward(self, x: Tensor) -> Any:
            return F.normalize(self.linear(x), dim=-1), self.shared, (-self.shared).exp()

    torch.manual_seed(0)
    biased = Biased()
    encoder = (lambda rows: biased(rows)) if as_function else biased
    q, bias, scale = biased(x)
    truth = torch.autograd.grad(
        SigLipLoss()(q, biased(y)[0], scale, bias), list(biased.parameters()), allow_unused=True
    )
    q, bias, scale = encode(encoder, x, sub_batch=SUB, retain=retain)
    k, *_ = encode(encoder, y, sub_batch=SUB, retain=retain, features="host")
    assert (bias.shape, float(bias.detach())) == ((), -0.5)
    found = torch.autograd.grad(SigLipLoss()(q, k, scale, bias), list(biased.parameters()), allow_unused=True)
    for one, other in zip(found, truth, strict=True):
        assert (one is None) == (other is None)
        assert one is None or distance(one, other) <= 1e-12


class HostReads(TorchDispatchMode):
    """Count reads of device memory, for which the host waits."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("value", [2.0, math.nan])
def test_a_number_is_compared_once_however_many_sub_batches(value: float, x: Tensor) -> None:
    number = torch.tensor(value, dtype=x.dtype)
    with HostReads() as reads:
        _, found = encode(lambda rows: (rows, number), x, sub_batch=1)
    assert reads.count == 1
    assert found.item() == pytest.approx(value, nan_ok=True)


class Scored(nn.Module):
    """As OpenCLIP's model: features of both sides, and a scale, of shape [1] as FSDP2 wants it; and a score a row."""

    def __init__(self, shape: tuple[int, ...], trained: bool) -> None:
        super().__init__()
        self.image, self.text, self.score = nn.Linear(D_IN, D), nn.Linear(D_IN, D), nn.Linear(D_IN, 1)
        self.logit_scale = nn.Parameter(torch.full(shape, 1.5), requires_grad=trained)
        self.double()

    def forward(self, x: Tensor, y: Tensor | None = None, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        y = x.cos() if y is None else y
        image, text = (F.normalize(side, dim=-1) for side in (self.image(x), self.text(y)))
        scores = self.score(x).squeeze(-1)
        return {"image_features": image, "text_features": text, "logit_scale": self.logit_scale.exp(), "scores": scores}


CUTS: list[dict[str, Any]] = [{"sub_batch": 1}, {"sub_batch": 1, "retain": 3}, {"sub_batch": 4}, {"sub_batch": 99}]
# the longest text is alone, all are, none is
CUTS += [{"sub_batch_tokens": tokens, "retain": 1} for tokens in (9, 1, 30)]


@pytest.mark.parametrize("how", CUTS, ids=str)
@pytest.mark.parametrize("batch", [1, 2, 9])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scale_leaves_encode_with_its_shape_and_gradient(
    x: Tensor, shape: tuple[int, ...], batch: int, how: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    scored, random = Scored(shape, True), torch.get_rng_state()
    inputs = {"x": x[:batch], "attention_mask": (torch.arange(9) < torch.arange(9, 0, -1)[:, None]).long()[:batch]}
    found = []
    for out in (scored(**inputs), encode(scored, inputs, **how)):
        assert out["logit_scale"].shape == shape
        scores = out.pop("scores")
        assert scores.shape == (batch,)
        loss = ClipLoss()(**out) + (scores * torch.arange(batch)).sum() + out["logit_scale"].sum().sin()
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(scored.parameters()))]))
    assert distance(found[1], found[0]) <= 1e-12
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("how", CUTS, ids=str)
def test_a_frozen_scale_and_equal_scores_are_distinguished(how: dict[str, Any]) -> None:
    """Without a graph too, and with equal examples."""
    scored = Scored((1,), False)
    inputs = {"x": torch.ones(9, D_IN).double(), "attention_mask": torch.ones(9, 3)}
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out = encode(scored, inputs, **how)
        assert (out["logit_scale"].shape, out["scores"].shape) == ((1,), (9,))


def test_a_scale_of_a_batch_without_rows(x: Tensor) -> None:
    scored = Scored((1,), True)
    out = encode(scored, (x[:0], x[:0]), sub_batch=1)
    assert (out["logit_scale"].shape, out["scores"].shape) == ((1,), (0,))
    out["logit_scale"].sum().backward()
    assert torch.equal(scored.logit_scale.grad, scored.logit_scale.detach().exp())


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_number_that_depends_on_the_examples_is_refused(x: Tensor, shape: tuple[int, ...]) -> None:
    ones = torch.ones(shape)
    numbers = iter([ones, 2.5 * ones, *[ones] * 9])
    sentence = r"^`encoder` must return the same number for all examples; got 2\.5 after 1\. Return one for each\.$"
    with pytest.raises(ValueError, match=sentence):
        encode(lambda rows: (rows, next(numbers)) if len(rows) > 2 else (rows, ones), x, sub_batch=SUB)


def test_a_number_that_becomes_rows_is_refused(x: Tensor) -> None:
    outputs = iter([torch.zeros(()), torch.zeros(()), torch.zeros(SUB)])
    with pytest.raises(ValueError, match=rf"`encoder` must return rows of one shape.* got shape \[{SUB}\]"):
        encode(lambda rows: (rows, next(outputs)), x, sub_batch=SUB)
    outputs = iter([torch.zeros(PROBE_ROWS), torch.zeros(SUB), torch.zeros(())])
    with pytest.raises(ValueError, match=r"`encoder` must return rows of one shape.* got shape \[\]"):
        encode(lambda rows: (rows, next(outputs)), x, sub_batch=SUB)


def test_hooks_of_modules_run_in_both_passes(x: Tensor) -> None:
    torch.manual_seed(0)
    deep, ran = Deep(), []
    deep.project.register_forward_pre_hook(lambda _, arguments: (arguments[0] * 1.5,))
    deep.project.register_forward_hook(lambda *_: ran.append("forward"))
    deep.project.register_full_backward_hook(lambda *_: ran.append("backward"))
    _compare(deep, lambda encoding: encoding(deep, x).sin().sum())
    ran.clear()
    encode(deep, x, sub_batch=SUB, retain=2).sum().backward()
    assert ran == ["forward"] * 5 + ["backward"] * 2 + ["forward", "backward"] * 3


class Running(nn.Module):
    """A layer that subtracts a running mean, which every forward moves in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D_IN, D)
        self.register_buffer("mean", torch.zeros(D_IN))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.linear(x - self.mean)


class Replaced(Running):
    """The same, with another tensor each time."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
        return self.linear(x - self.mean)


@pytest.mark.parametrize(
    ("module", "name"),
    [(Running(), "Running"), (Replaced(), "Replaced"), (spectral_norm(nn.Linear(D_IN, D).double()), "_SpectralNorm")],
    ids=["running mean", "replaced mean", "spectral norm"],
)
@pytest.mark.parametrize("how", ["module", "function", "no gradient", "function, no gradient"])
def test_a_module_that_changes_a_buffer_is_refused(module: nn.Module, name: str, how: str, x: Tensor) -> None:
    encoder = (lambda rows: module(rows)) if how.startswith("function") else module
    sentence = f"`encoder` must treat examples one by one; got {name}, which changes a buffer when it runs. Put it in e"
    with torch.set_grad_enabled(not how.endswith("no gradient")), pytest.raises(ValueError, match=sentence):
        encode(encoder, x, sub_batch=SUB)
    module.eval()
    assert distance(encode(encoder, x, sub_batch=SUB).detach(), module(x).detach()) <= 1e-12
    module.train()


class Table(nn.Module):
    """A layer that adds positions from a table, which grows when needed and is replaced by an equal one otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D_IN, D)
        self.register_buffer("places", torch.zeros(1), persistent=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.places = torch.arange(max(D_IN, len(self.places)), dtype=x.dtype)
        return self.linear(x + self.places)


def test_a_buffer_that_grows_is_accepted(x: Tensor) -> None:
    table = Table()
    for _ in range(2):
        # products of fewer rows may have other last digits
        assert distance(encode(table, x, sub_batch=SUB).detach(), table(x).detach()) <= 1e-12


def test_a_marked_function_of_a_module_runs_without_a_probe() -> None:
    runs = []
    linear = nn.Linear(3, 2)
    linear.register_forward_pre_hook(lambda *_: runs.append(1))

    def doubled(module: nn.Module, x: Tensor) -> Tensor:
        return 2 * module(x)

    x = torch.randn(4, 3)
    for marks, count in ((False, 5), (True, 4)):
        function = of_its_module(doubled) if marks else doubled
        runs.clear()
        linear.zero_grad()
        encode((linear, function), x, sub_batch=2).square().sum().backward()
        assert len(runs) == count
        assert linear.weight.grad is not None
        torch.testing.assert_close(linear.weight.grad, 8 * linear(x).T @ x)
