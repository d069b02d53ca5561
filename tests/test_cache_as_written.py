"""Encoders as people write them, each beside the plain gradient in float64; what cannot be exact is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import distance
from refusals import refusal
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from contrastile import encode

B, D_IN, D, SUB = 13, 6, 5, 4


def _linear(inputs: int = D_IN, outputs: int = D) -> nn.Linear:
    return nn.Linear(inputs, outputs).double()


def _x(*shape: int) -> Tensor:
    return torch.randn(B, *(shape or (D_IN,)), dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _total(tree: Any) -> Tensor:
    if isinstance(tree, Tensor):
        return (torch.view_as_real(tree) if tree.is_complex() else tree).sin().sum()
    return sum((_total(part) for part in (tree.values() if isinstance(tree, Mapping) else tree)), torch.zeros(()))


def _gradient(module: nn.Module) -> Tensor:
    """The gradient of all parameters as one vector: some alone are zero up to rounding, such as a key's bias."""
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
    module.zero_grad(set_to_none=True)
    dense = [each.to_dense() if each.is_sparse else each.clone() for each in found]
    return torch.cat([(torch.view_as_real(each) if each.is_complex() else each).flatten() for each in dense])


def _check(holder: nn.Module, encoder: Callable[..., Any], inputs: Any, retain: Any = 0) -> None:
    """`holder` has all parameters that the encoder reaches."""
    plain = encoder(**inputs) if isinstance(inputs, dict) else encoder(inputs)
    _total(plain).backward()
    truth = _gradient(holder)
    assert truth.any()
    _total(encode(encoder, inputs, sub_batch=SUB, retain=retain)).backward()
    assert distance(_gradient(holder), truth) <= 1e-12


class NoGraphInside(nn.Module):
    """A module whose first layer is not differentiated, by the means named in `how`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, _linear(D_IN, D_IN), _linear()

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "requires_grad":
            self.first.requires_grad_(False)
            middle = self.first(x)
            self.first.requires_grad_(True)
        elif self.how == "inference mode":
            with torch.inference_mode():
                middle = self.first(x)
            middle = middle.clone()
        else:
            with torch.no_grad():
                middle = self.first(x)
        return self.last(middle.tanh())


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D_IN, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.fft.fft(x).mm(self.weight)).flatten(1)


class WithToken(nn.Module):
    """A row of its own for each example, which is a view of a parameter, and the same tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.token = _linear(), nn.Parameter(torch.ones(1, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        out = self.linear(x)
        return out, out, out[:, :2], self.token.expand(len(x), -1), x


class Doubling(nn.Module):
    """A hook changes the gradient on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = _linear(D_IN, D_IN), _linear()
        self.last.register_full_backward_hook(lambda _module, inwards, _outwards: (inwards[0] * 2,))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D_IN, D, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[1][0][-1]


def _tokens() -> Tensor:
    return torch.randint(0, 50, (B, 7), generator=torch.Generator().manual_seed(2))


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "no_grad inside": (lambda: NoGraphInside("no_grad"), _x),
    "inference mode inside": (lambda: NoGraphInside("inference mode"), _x),
    "requires_grad changed inside": (lambda: NoGraphInside("requires_grad"), _x),
    "complex parameters": (Complex, _x),
    "a row of a parameter": (WithToken, _x),
    "a backward hook": (Doubling, _x),
    "recurrent": (Recurrent, lambda: _x(4, D_IN)),
    "attention in eval mode": (
        lambda: nn.TransformerEncoderLayer(D_IN, 2, 8, batch_first=True).double().eval(),
        lambda: _x(4, D_IN),
    ),
    "weight norm": (lambda: parametrizations.weight_norm(_linear()), _x),
    "orthogonal": (lambda: parametrizations.orthogonal(_linear()), _x),
    "spectral norm in eval mode": (lambda: parametrizations.spectral_norm(_linear()).eval(), _x),
    "sparse gradients": (
        lambda: nn.Sequential(nn.Embedding(50, 3, sparse=True), nn.Flatten(), nn.Linear(21, D)).double(),
        _tokens,
    ),
}


@pytest.mark.parametrize("retain", [0, 2])
@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_modules_of_many_kinds_get_the_plain_gradient(name: str, as_function: bool, retain: int) -> None:
    module, inputs = (make() for make in MODULES[name])
    _check(module, (lambda x: module(x)) if as_function else module, inputs, retain)


def test_functions_of_many_kinds_get_the_plain_gradient() -> None:
    linear, other = _linear(), nn.Parameter(torch.randn(D, dtype=torch.float64))
    both = nn.ModuleDict({"linear": linear, "other": nn.ParameterList([other])})

    class Plain:
        def encode(self, x: Tensor) -> Tensor:
            return linear(x) * other.exp()

    apart = nn.ParameterDict({name: nn.Parameter(p.detach().clone()) for name, p in linear.named_parameters()})
    _check(both, Plain().encode, _x())
    _check(both, partial(lambda x, times: linear(x) * times, times=other), _x())
    _check(apart, lambda x: functional_call(linear, dict(apart.items()), (x,)), _x())
    _check(linear, lambda x: checkpoint(lambda y: linear(y).tanh(), x, use_reentrant=False), _x())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_output_classes_of_transformers_are_returned() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    bert = transformers.BertModel(config).double()
    inputs = {"input_ids": _tokens(), "attention_mask": (torch.arange(7) < 5).long().expand(B, -1)}
    assert type(encode(bert, inputs, sub_batch=SUB)) is type(bert(**inputs))
    _check(bert, partial(bert, output_hidden_states=True), inputs)
    bert.train().gradient_checkpointing_enable()
    _check(bert, bert, inputs)


@pytest.mark.parametrize("retain", [0, 2])
@pytest.mark.parametrize("inside", [True, False])
def test_cached_parametrizations_are_computed_in_each_pass(inside: bool, retain: int) -> None:
    """Weights cached in the first pass would have no graph, and their parameters no gradient."""
    normed = parametrizations.weight_norm(_linear())
    _total(normed(_x())).backward()
    truth = _gradient(normed)
    with parametrize.cached():
        total = _total(encode(normed, _x(), sub_batch=SUB, retain=retain))
        if inside:
            total.backward()
        assert parametrize._cache_enabled == 1
    if not inside:
        total.backward()
    assert distance(_gradient(normed), truth) <= 1e-12
    _check(normed, lambda x: _with_cache(normed, x), _x())


def _with_cache(module: nn.Module, x: Tensor) -> Tensor:
    with parametrize.cached():
        return module(x) + module(x.sin())


@pytest.mark.parametrize("retain", [0, 2])
@pytest.mark.parametrize("frozen", [[0], [2], [0, 2]])
def test_a_parameter_frozen_before_the_backward_gets_no_gradient(frozen: list[int], retain: int) -> None:
    found = []
    for plain in (True, False):
        torch.manual_seed(0)
        tower = nn.Sequential(_linear(D_IN, D_IN), nn.Tanh(), _linear())
        features = tower(_x()) if plain else encode(tower, _x(), sub_batch=SUB, retain=retain)
        for place in frozen:
            tower[place].requires_grad_(False)
        _total(features).backward()
        assert [p.grad is None for layer in (0, 2) for p in tower[layer].parameters()] == [
            layer in frozen for layer in (0, 2) for _ in range(2)
        ]
        found.append(_gradient(tower))
    assert distance(found[1], found[0]) <= 1e-12


@pytest.mark.parametrize("retain", [0, 2])
def test_parameters_unfrozen_before_the_backward_get_no_gradient(retain: int) -> None:
    """As those of a critic, which is frozen while the features of a generator pass through it."""
    tower, found = nn.Sequential(_linear(), nn.Tanh()), list[Tensor]()
    for plain in (True, False):
        x = _x().requires_grad_()
        tower.requires_grad_(False)
        features = tower(x) if plain else encode(tower, x, sub_batch=SUB, retain=retain)
        tower.requires_grad_(True)
        _total(features).backward()
        assert tower[0].weight.grad is None
        found.append(x.grad)
    assert distance(found[1], found[0]) <= 1e-12


@pytest.mark.parametrize("retain", [0, 2])
@pytest.mark.parametrize("wanted", [True, False])
def test_inputs_have_the_gradients_that_they_wanted_in_the_first_pass(wanted: bool, retain: int) -> None:
    tower, found = _linear(), list[Tensor]()
    for plain in (True, False):
        x, y = _x().requires_grad_(wanted), _x().requires_grad_()
        tower.zero_grad()
        features = [tower(x), tower(y)] if plain else [encode(tower, z, sub_batch=SUB, retain=retain) for z in (x, y)]
        x.requires_grad_(not wanted)
        _total(features).backward()
        assert x.grad is None or wanted
        found.append(torch.cat([z.grad.flatten() for z in (x, y, tower.weight) if z.grad is not None]))
    assert distance(found[1], found[0]) <= 1e-12


class Differentiating(nn.Module):
    """A trunk, and the derivative of a layer behind it in each example."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.trunk, self.layer = _linear(D_IN, D_IN).requires_grad_(not frozen), _linear()

    def forward(self, x: Tensor) -> Tensor:
        return vmap(jacrev(lambda row: self.layer(row).sin()))(F.dropout(self.trunk(x), 0.3)).sum(2)


@pytest.mark.parametrize(("frozen", "retain"), [(True, 0), (False, "auto")])
def test_graphs_of_torch_func_are_not_measured(frozen: bool, retain: Any) -> None:
    found = []
    for plain in (True, False):
        torch.manual_seed(0)
        encoder = Differentiating(frozen=frozen)
        parts = [encoder(part) for part in _x().split(SUB)] if plain else []
        _total(torch.cat(parts) if plain else encode(encoder, _x(), sub_batch=SUB, retain=retain)).backward()
        found.append(_gradient(encoder))
    assert distance(found[1], found[0]) <= 1e-12


class Cached(nn.Module):
    """A tower in the gradient cache."""

    def __init__(self, tower: nn.Module, retain: int) -> None:
        super().__init__()
        self.tower, self.retain = tower, retain

    def forward(self, x: Tensor) -> Tensor:
        return encode(self.tower, x, sub_batch=SUB, retain=self.retain)


@pytest.mark.parametrize("trained", [True, False])
def test_parameters_that_are_replaced_before_a_replay_are_refused(trained: bool) -> None:
    """They would get no gradient, silently where those in their place are frozen."""
    tower = _linear().requires_grad_(trained)
    given = {f"tower.{name}": (2 * x.detach()).requires_grad_() for name, x in tower.named_parameters()}
    features = functional_call(Cached(tower, retain=0), given, (_x(),))
    assert refusal(_total(features).backward) == (
        "`encoder` must have the parameters of the first pass; got others, as after torch.func.functional_call. Call "
        "backward before they are replaced."
    )
    # no replay, no need of them
    _total(functional_call(Cached(tower, retain=99), given, (_x(),))).backward()
    found = torch.cat([x.grad.flatten() for x in given.values()])
    _total(F.linear(_x(), *given.values())).backward()
    assert distance(torch.cat([x.grad.flatten() for x in given.values()]), 2 * found) <= 1e-12


def test_the_second_pass_runs_in_the_mode_of_the_first() -> None:
    """A model may be evaluated between its loss and the backward."""
    tower = nn.Sequential(_linear(D_IN, D_IN), nn.Dropout(0.5), nn.Sequential(_linear(), nn.Dropout(0.2))).train()
    tower[2].eval()
    found = []
    for mode in (True, False):
        tower[1].train()
        torch.manual_seed(3)
        features = encode(tower, _x(), sub_batch=SUB)
        tower[1].train(mode)
        _total(features).backward()
        assert tower[1].training is mode
        found.append(_gradient(tower))
    assert torch.equal(*found)


def _made_before(linear: nn.Module | None = None, before: nn.Module | None = None) -> Any:
    linear, before = linear or _linear(), before or _linear(D_IN, D_IN)
    prompt = before(torch.ones(1, D_IN, dtype=torch.float64))
    return lambda x: linear(x + prompt)


REFUSED: dict[str, tuple[Callable[[], Any], Callable[[], Tensor]]] = {
    "`encoder` must know the shapes of its parameters; got one that is made when it runs. Run it once on a few rows "
    "first.": (lambda: nn.LazyLinear(D), _x),
    "`encoder` must leave its parameters as they are; got one of shape [50, 5] that it writes over, as "
    "Embedding(max_norm=...) does. Change them after the optimizer's step.": (
        lambda: nn.Embedding(50, D, max_norm=0.5),
        _tokens,
    ),
    "`encoder` must compute in each call all that it differentiates; got a part of the graph that was made before. "
    "Compute that inside too, or pass it as an input, a row for each example.": (_made_before, _x),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_inexact_encoders_are_refused(sentence: str) -> None:
    encoder, inputs = (make() for make in REFUSED[sentence])
    assert refusal(lambda: encode(encoder, inputs, sub_batch=SUB).sum().backward()) == sentence


class Unregistered(nn.Module):
    """A module that runs a layer which is no submodule: in a list, or as a bound method."""

    def __init__(self, layer: nn.Module, *, own: bool) -> None:
        super().__init__()
        self.layers = [layer]
        self.own = _linear(3, 3).requires_grad_(False) if own else None

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


class Late(nn.Module):
    """A frozen trunk, and a trained part that only later examples reach."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = _linear().requires_grad_(False), _linear()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.trunk(x) if self.calls < 3 else self.head(x)


@pytest.mark.parametrize(
    "make", [lambda: Unregistered(_linear(), own=True), lambda: Unregistered(_linear(), own=False), Late]
)
def test_a_missed_gradient_is_refused(make: Any) -> None:
    """Beside another tower, features without a gradient would not be noticed."""
    sentence = (
        r"^`encoder` must own every parameter that it uses; got one of shape \[5(, 6)?\] that only some examples "
        r"reach, or that is elsewhere\. Pass the module that holds them, or its method\.$"
    )
    with pytest.raises(ValueError, match=sentence):
        encode(make(), _x(), sub_batch=SUB)
    with torch.no_grad():
        assert encode(make(), _x(), sub_batch=SUB).shape == (B, D)


class Auxiliary(nn.Module):
    """A module that stores a loss as an attribute, and returns it too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = _linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.linear(x)
        self.left = out.square().mean()
        return out, out.square().mean(1)


def test_attributes_have_no_graph_and_outputs_have_one() -> None:
    auxiliary = Auxiliary()
    features, returned = encode(auxiliary, _x(), sub_batch=SUB)
    assert not auxiliary.left.requires_grad
    (_total(features) + returned.mean()).backward()
    found = _gradient(auxiliary)
    (_total(auxiliary(_x())[0]) + auxiliary.left).backward()
    assert distance(found, _gradient(auxiliary)) <= 1e-12


def test_a_cached_function_of_parameters_has_no_graph() -> None:
    one, other = nn.Parameter(torch.randn(D_IN, 3).double()), nn.Parameter(torch.randn(3, D).double())
    kept: list[Tensor] = []

    def encoder(x: Tensor, keeps: bool) -> Tensor:
        if not kept or not keeps:
            kept[:] = [one @ other]
        return x @ kept[0]

    plain = torch.autograd.grad(encoder(_x(), False).sin().sum(), [one, other])
    holder = nn.ParameterList([one, other])
    for keeps in (False, True):
        kept.clear()

        class Keeping(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.held = holder

            def forward(self, x: Tensor, keeps: bool = keeps) -> Tensor:
                return encoder(x, keeps)

        _total(encode(Keeping(), _x(), sub_batch=SUB)).backward()
        assert (one.grad is None) == (other.grad is None) == keeps
        if not keeps:
            assert distance(_gradient(holder), torch.cat([g.flatten() for g in plain])) <= 1e-12


def test_an_outer_graph_serves_a_single_sub_batch() -> None:
    """The outer graph is back-propagated once, so the tensors before it get their gradient."""
    parts = nn.ModuleDict({"linear": _linear(), "before": _linear(D_IN, D_IN)})
    found = []
    for encoded in (_made_before(**parts)(_x()), encode(_made_before(**parts), _x(), sub_batch=B)):
        _total(F.normalize(encoded)).backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in parts.parameters())
        found.append(_gradient(parts))
    assert distance(found[1], found[0]) <= 1e-12
