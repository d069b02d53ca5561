"""encode equals the plain big batch: features and gradients, with dropout, for any inputs and outputs."""

from __future__ import annotations

import traceback
from collections import UserDict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from counted import Counted
from problems import distance
from refusals import refusal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import contrastile
from contrastile import ClipLoss, encode
from contrastile.gradcache import auto
from contrastile.gradcache.introspect import Reached, graph_may_change_bits
from contrastile.gradcache.rng import RandomState

B, D_IN, D = 23, 6, 5


class Tower(nn.Module):
    """Dropout, attention over tokens, a shared projection, and methods beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(D_IN, 16)
        self.mix = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True)
        self.project = nn.Linear(16, D)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(F.dropout(self.mix(self.embed(x)), 0.2, self.training)).mean(1)

    def encode_both(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self(x), self(y)

    def encode_named(self, *, pixels: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        out = self(pixels)
        return {"features": out if mask is None else out * mask[:, None], "nested": (out.square(), None)}


@pytest.fixture
def tower() -> Tower:
    torch.manual_seed(1)
    return Tower()


def _inputs(seed: int = 2, batch: int = B) -> Tensor:
    return torch.randn(batch, 3, D_IN, generator=torch.Generator().manual_seed(seed))


def _gradients(module: nn.Module) -> dict[str, Tensor | None]:
    found = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    return found


def _by_parts(tower: Tower, x: Tensor, sub_batch: int) -> Tensor:
    """The plain encoder with all graphs, in sub-batches so that dropout draws the same numbers."""
    return torch.cat([tower(part) for part in x.split(sub_batch)])


def _check_equal(found: dict[str, Tensor | None], truth: dict[str, Tensor | None], allowed: float = 1e-5) -> None:
    assert found.keys() == truth.keys()
    for name, expected in truth.items():
        if expected is None:
            assert found[name] is None, name
        else:
            assert distance(found[name], expected) <= allowed, name


@pytest.mark.parametrize("retain", [0, 1, 2, 99])
@pytest.mark.parametrize("sub_batch", [1, 8, 23, 100])
def test_features_and_gradients_equal_the_big_batch_with_dropout(tower: Tower, sub_batch: int, retain: int) -> None:
    x = _inputs()
    seeds = torch.randn(B, D)
    torch.manual_seed(3)
    truth = _by_parts(tower, x, sub_batch)
    (truth * seeds).sum().backward()
    true_gradients, after = _gradients(tower), torch.rand(())
    torch.manual_seed(3)
    features = encode(tower, x, sub_batch=sub_batch, retain=retain)
    (features * seeds).sum().backward()
    assert torch.equal(features, truth)
    _check_equal(_gradients(tower), true_gradients)
    # the random numbers that follow are those that would have followed
    assert torch.rand(()) == after


def test_a_shared_tower_and_a_learned_scale_get_the_plain_gradients(tower: Tower) -> None:
    x, y = _inputs(2), _inputs(4)

    def loss(image: Tensor, text: Tensor) -> Tensor:
        return ClipLoss()(F.normalize(image, dim=-1), F.normalize(text, dim=-1), tower.logit_scale.exp())

    torch.manual_seed(3)
    loss(_by_parts(tower, x, 8), _by_parts(tower, y, 5)).backward()
    truth = _gradients(tower)
    torch.manual_seed(3)
    loss(encode(tower, x, sub_batch=8), encode(tower, y, sub_batch=5)).backward()
    _check_equal(_gradients(tower), truth)


def test_a_backward_can_be_repeated(tower: Tower) -> None:
    torch.manual_seed(3)
    out = encode(tower, _inputs(), sub_batch=8, retain=1).square().sum()
    out.backward(retain_graph=True)
    once = _gradients(tower)
    out.backward()
    _check_equal(_gradients(tower), once)


def test_autocast_is_restored(tower: Tower) -> None:
    x = _inputs()
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        truth = _by_parts(tower, x, 8)
    truth.float().square().sum().backward()
    true_gradients = _gradients(tower)
    for inside in (False, True):
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            features = encode(tower, x, sub_batch=8)
            if inside:
                features.float().square().sum().backward()
        if not inside:
            features.float().square().sum().backward()
        assert torch.equal(features, truth)
        # bf16 gradients of sub-batches, summed in another order
        _check_equal(_gradients(tower), true_gradients, 1e-2)


def test_autocast_casts_the_weights_once_for_all_replays() -> None:
    layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    casts = []
    for sub_batch in (12, 4, 2):
        with Counted() as counting, torch.autocast("cpu", dtype=torch.bfloat16):
            features = encode(layers, torch.ones(12, 8), sub_batch=sub_batch)
        with counting:
            features.float().sum().backward()
        # beside the weights, in both passes: the inputs, and the gradients, of weights and of features
        casts.append(counting.ran["_to_copy"] - (12 // sub_batch) * (2 + 4))
    # the weights in each pass, and the features and their gradient here
    assert casts == [2 * 4 + 2] * 3


@pytest.mark.parametrize("layers", [2, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_operations_run_per_sub_batch_beside_the_encoder(dtype: torch.dtype, layers: int) -> None:
    """Slices of inputs, features and their gradients, one operation that adds to all sums, four that compare."""
    tower = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)]).to(dtype)
    few, more, plain = Counted(), Counted(), Counted()
    for counting, batch in ((few, 5), (more, 9)):
        with counting:
            encode(tower, torch.ones(batch, 8, dtype=dtype), sub_batch=1).sum().backward()
        tower.zero_grad()
    row = torch.ones(1, 8, dtype=dtype)
    with plain:
        with torch.no_grad():
            tower(row)
        out = tower(row)
        torch.autograd.grad(out, list(tower.parameters()), out)
    each = {name: (count - few.ran[name]) / 4 - plain.ran[name] for name, count in more.ran.items()}
    own = {"slice": 4, "copy_": 1, "_foreach_add_": 1}
    # the features of both passes; detaching copies nothing
    compared = {"mm": 2, "sub": 1, "linalg_vector_norm": 1, "detach": 2}
    assert {name: count for name, count in each.items() if count > 0} == own | compared


def test_bf16_gradients_are_summed_in_float32() -> None:
    """512 sub-batches whose gradient is 1 each: a bf16 sum would stop growing at 256."""
    weight = nn.Linear(1, 1, bias=False).bfloat16()
    encode(weight, torch.ones(512, 1, dtype=torch.bfloat16), sub_batch=1).sum().backward()
    assert weight.weight.grad.item() == 512


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@pytest.mark.parametrize("kind", ["tuple", "mapping", "none", "nested", "named tuple"])
def test_inputs_and_outputs_may_be_nested(tower: Tower, kind: str) -> None:
    tower.eval()
    x, y, mask = _inputs(2), _inputs(4), torch.rand(B)
    if kind == "tuple":
        encoder, inputs, plain = tower.encode_both, (x, y), tower.encode_both(x, y)
    elif kind == "mapping":
        encoder, inputs = tower.encode_named, {"pixels": x, "mask": mask}
        plain = tower.encode_named(**inputs)
    elif kind == "none":
        encoder, inputs = tower.encode_named, {"pixels": x, "mask": None}
        plain = tower.encode_named(**inputs)
    elif kind == "nested":
        inputs = ({"a": [x, (y, None)]},)
        encoder = lambda tree: tower(tree["a"][0]) + tower(tree["a"][1][0])  # noqa: E731
        plain = encoder(*inputs)
    else:
        inputs = ([x, y],)
        encoder = lambda both: Pair(tower(both[0]), tower(both[1]))  # noqa: E731
        plain = encoder(*inputs)
    total = _total(plain)
    total.backward()
    truth = _gradients(tower)
    features = encode(encoder, inputs, sub_batch=6)
    assert type(features) is type(plain)
    found = _total(features)
    found.backward()
    assert distance(found.detach(), total.detach()) <= 1e-6
    _check_equal(_gradients(tower), truth)


def _total(tree: Any) -> Tensor:
    if isinstance(tree, Tensor):
        return tree.square().sum()
    parts = tree.values() if isinstance(tree, dict) else tree
    return sum((_total(part) for part in parts if part is not None), torch.zeros(()))


def test_a_model_made_in_inference_mode_is_encoded() -> None:
    with torch.inference_mode():
        model = nn.BatchNorm1d(5).eval()
        model.running_mean += 1
        x = torch.randn(7, 5)
        assert torch.equal(encode(model, x, sub_batch=3), model(x))


@pytest.mark.parametrize("kind", ["module", "method", "function", "function of its inputs"])
def test_the_generator_of_the_computing_device_is_captured(
    tower: Tower, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[torch.device | None] = []
    capture = RandomState.capture
    monkeypatch.setattr(RandomState, "capture", lambda *at, **how: kept.extend(at) or capture(*at, **how))
    encoders: dict[str, Any] = {
        "module": tower,
        "method": tower.encode_both,
        "function": lambda x: tower(x),
        "function of its inputs": torch.sin,
    }
    inputs = (_inputs(), _inputs()) if kind == "method" else _inputs().requires_grad_()
    _total(encode(encoders[kind], inputs, sub_batch=9)).backward()
    assert kept
    assert set(kept) == {torch.device("cpu")}


def test_the_generators_of_all_devices_of_a_model_are_captured(tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two simulated devices: each has a generator, and `meta` tensors stand for its memory."""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    states = {first: torch.tensor([1]), second: torch.tensor([2])}
    accelerator = SimpleNamespace(
        get_rng_state=lambda at: states[at].clone(), set_rng_state=lambda state, at: states.update({at: state})
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: accelerator)
    before = RandomState.capture(first, torch.device("cpu"), second, None)
    assert before.same(RandomState.capture(first, second, last=before))
    states[second] = torch.tensor([3])
    assert not before.same(RandomState.capture(first, second, last=before))
    torch.rand(1)
    before.restore()
    assert (states[first].item(), states[second].item()) == (1, 2)
    tower.register_buffer("elsewhere", torch.empty(1, device="meta"))
    assert Reached([tower], [], first).devices == [first, torch.device("cpu"), torch.device("meta")]


@pytest.mark.parametrize("retain", [0, 1])
def test_an_input_that_is_not_used_has_no_gradient(tower: Tower, retain: int) -> None:
    x, y, z = (_inputs(seed).requires_grad_() for seed in (2, 4, 6))

    def encoder(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        # in the last sub-batch only
        return tower(x) if len(x) == 8 else tower(x) * y.mean((1, 2))[:, None]

    encode(encoder, (x, y, z), sub_batch=8, retain=retain).square().sum().backward()
    assert z.grad is None
    assert y.grad is not None
    assert x.grad is not None
    assert not y.grad[:16].any()
    assert y.grad[16:].all()


def test_integer_outputs_are_returned(tower: Tower) -> None:
    features, index = encode(lambda x: (tower(x), x[:, 0].argmax(-1)), _inputs(), sub_batch=9)
    assert not index.requires_grad
    assert torch.equal(index, _inputs()[:, 0].argmax(-1))
    features.sum().backward()
    assert tower.embed.weight.grad is not None


def test_a_parameters_hook_fires_once_with_the_whole_gradient(tower: Tower) -> None:
    tower.eval()
    encode(tower, _inputs(), sub_batch=4).square().sum().backward()
    truth = _gradients(tower)["embed.weight"]
    seen: list[Tensor] = []
    after: list[Tensor] = []
    tower.embed.weight.register_hook(lambda g: seen.append(g.clone()) or 2 * g)
    tower.embed.weight.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    encode(tower, _inputs(), sub_batch=4).square().sum().backward()
    assert len(seen) == len(after) == 1
    assert torch.equal(seen[0], truth)
    assert torch.equal(tower.embed.weight.grad, 2 * truth)


def test_no_hook_of_a_parameter_without_a_gradient_is_called(tower: Tower) -> None:
    called: list[Tensor] = []
    every: list[Any] = []
    tower.logit_scale.register_hook(lambda g: called.append(g.clone()))
    tower.logit_scale.register_post_accumulate_grad_hook(lambda p: called.append(p.grad.clone()))
    torch.autograd.graph.register_multi_grad_hook(list(tower.parameters()), every.append)
    for _ in range(2):
        encode(tower, _inputs(), sub_batch=8).square().sum().backward()
    assert not called
    assert len(every) == 2
    (encode(tower, _inputs(), sub_batch=8).detach().sum() * tower.logit_scale).backward()
    assert len(called) == 2


def test_a_frozen_tower_runs_once(tower: Tower) -> None:
    runs = []
    tower.embed.register_forward_hook(lambda *_: runs.append(1))
    for parameter in tower.parameters():
        parameter.requires_grad_(False)
    assert not encode(tower, _inputs(), sub_batch=8).requires_grad
    assert len(runs) == 3


def test_a_frozen_method_of_a_trained_module_gives_plain_features(tower: Tower) -> None:
    model = nn.ModuleDict({"image": tower, "text": nn.Linear(3, 3)})
    tower.requires_grad_(False)
    model.encode_image = lambda x: tower(x)
    assert not encode(model.encode_image, _inputs(), sub_batch=8).requires_grad


def test_an_empty_batch_gives_zero_gradients(tower: Tower) -> None:
    features = encode(tower, _inputs(batch=0), sub_batch=8)
    assert features.shape == (0, D)
    features.sum().backward()
    assert all((p.grad == 0).all() for n, p in tower.named_parameters() if n != "logit_scale")


def test_the_backward_holds_one_sub_batch_of_activations() -> None:
    """Between the passes autograd keeps only the inputs."""
    kept: list[int] = []
    tower = nn.Sequential(nn.Linear(D_IN, 64), nn.GELU(), nn.Linear(64, D))

    def pack(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = encode(tower, _inputs()[:, 0], sub_batch=4)
        first = sum(kept)
        out.sum().backward()
    assert first == B * D_IN
    assert sum(kept) - first < B * 64 * 4


class Changing(nn.Module):
    """A layer that returns one output more, a wider one, or none per example, from the second call on."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls, self.linear = how, 0, nn.Linear(D_IN, D)

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        out = self.linear(x)
        if self.how == "structure":
            return (out,) if self.calls == 1 else (out, out)
        if self.how == "shape":
            return out[:, : self.calls]
        return out.sum(0)


KEYWORDS = "must be one of the options parts, sub_batch, sub_batch_tokens, retain, device, features; got"
BAD = {
    "`encoder` must be callable": lambda t: encode(3, _inputs(), sub_batch=4),
    "`encoder` must be an object; got the class Linear. Pass Linear(...).":
        lambda t: encode(nn.Linear, _inputs(), sub_batch=4),
    "`encoder` must have a forward, or be a module and the name of its method; got ModuleDict. Name the method that "
    "encodes, as in (model, 'encode_image').": lambda t: encode(nn.ModuleDict({"tower": t}), _inputs()),
    f"`chunk_size` {KEYWORDS} chunk_size=4. Encoders run in sub-batches: pass sub_batch to contrastile.encode.":
        lambda t: encode(t, _inputs(), chunk_size=4),
    f"`batch_size` {KEYWORDS} batch_size=4. Leave it out of a loss, which takes any number of rows; pass sub_batch to "
    "encode.": lambda t: encode(t, _inputs(), batch_size=4),
    f"`sub_batches` {KEYWORDS} sub_batches=4. Did you mean sub_batch?": lambda t: encode(t, _inputs(), sub_batches=4),
    "`inputs` must have values where the encoder's parameters have; got a tensor on meta, and an encoder on cpu. Load "
    "them on a device that computes.": lambda t: encode(t, _inputs().to("meta"), sub_batch=4),
    '`sub_batch` must be a whole number of at least 1; got 0. Count examples, tokens, or sub-batches, or say "auto".':
        lambda t: encode(t, _inputs(), sub_batch=0),
    "`sub_batch_tokens` must be a whole number of at least 1; got 0. Count examples, tokens, or sub-batches.":
        lambda t: encode(t, _inputs(), sub_batch_tokens=0),
    "`sub_batch` must be a whole number of at least 1; got 2.5.": lambda t: encode(t, _inputs(), sub_batch=2.5),
    "`retain` must be a whole number of at least 0; got -1.": lambda t: encode(t, _inputs(), sub_batch=4, retain=-1),
    "`inputs` must be tensors whose first axis is the batch; got ndarray. Convert arrays with torch.as_tensor; bind "
    "other arguments with functools.partial.": lambda t: encode(t, _inputs().numpy(), sub_batch=4),
    "`inputs` must be tensors whose first axis is the batch; got tuple. Tokenise texts first; bind other":
        lambda t: encode(t, ("a",), sub_batch=4),
    "`inputs['input_ids']` must be tensors whose first axis is the batch; got list. Make tensors of lists, as a "
    'tokenizer does with return_tensors="pt"; bind': lambda t: encode(t, {"input_ids": [[1, 2], [3]]}, sub_batch=4),
    "`inputs` must be tensors whose first axis is the batch; got list. Pass sub-batches of your own as parts=[...]; "
    "bind": lambda t: encode(t, [UserDict(x=_inputs())] * 2, sub_batch=4),
    "`inputs` must be tensors whose first axis is the batch; got a tensor without":
        lambda t: encode(t, torch.tensor(1.0), sub_batch=4),
    "`inputs` must contain a tensor; got none.": lambda t: encode(t, (None,), sub_batch=4),
    "`inputs` must have the same first axis, the batch; got 4 for inputs[0] and 5 for inputs[1].":
        lambda t: encode(t, (torch.randn(4, 3), torch.randn(5, 3)), sub_batch=4),
    "`encoder` must treat examples one by one; got BatchNorm1d without running statistics, whose statistics over a "
    "sub-batch are not those of the batch. Take GroupNorm or LayerNorm.":
        lambda t: encode(nn.BatchNorm1d(D_IN, track_running_stats=False).eval(), torch.randn(8, D_IN), sub_batch=4),
    "`encoder` must treat examples one by one; got BatchNorm1d in training mode":
        lambda t: encode(nn.Sequential(nn.Linear(D_IN, 4), nn.BatchNorm1d(4)), torch.randn(8, D_IN), sub_batch=4),
    "`encoder` must return features; got nothing. See whether it has a `return`.":
        lambda t: encode(lambda x: None, _inputs(), sub_batch=8),
    "`encoder` must return the same structure each time":
        lambda t: encode(Changing("structure"), torch.randn(8, D_IN), sub_batch=4),
    "`encoder` must return rows of one shape, one for each example; got shape [4, 2].":
        lambda t: encode(Changing("shape"), torch.randn(8, D_IN), sub_batch=4),
    "`encoder` must return rows of one shape, one for each example; got shape [3, 3]. Leave it out: a second size that "
    "follows the sub-batch, as of logits, cannot be joined.":
        lambda t: encode(lambda x: x @ x.T, torch.randn(7, D_IN), sub_batch=4),
    "`encoder` must return tensors whose first axis is the sub-batch of 4; got shape [5].":
        lambda t: encode(Changing("sum"), torch.randn(8, D_IN), sub_batch=4),
    "`encoder` must return dense tensors; got a sparse or nested one. Call to_dense() there, or return Ragged(values, "
    "lengths).": lambda t: encode(lambda x: t.embed(x).to_sparse(), torch.randn(8, D_IN), sub_batch=4),
    "`inputs` must be left as it is by the encoder; got one of shape [8, 6] that it writes over. Clone it there, or "
    "work out of place.": lambda t: encode(lambda x: t.embed(x.mul_(2)), torch.randn(8, D_IN), sub_batch=4),
    "`inputs` must be left as it is by the encoder; got one of shape [8, 7] that it":
        lambda t: encode(
            lambda input_ids, attention_mask: input_ids.mul_(2) * attention_mask,
            {"input_ids": torch.ones(8, 7), "attention_mask": torch.ones(8, 7)}, sub_batch_tokens=14,
        ),
}  # fmt: skip


@pytest.mark.parametrize("sentence", BAD)
def test_each_error_has_its_sentence(tower: Tower, sentence: str) -> None:
    assert refusal(BAD[sentence], tower).startswith(sentence)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("kind", ["itself", "inside", "function"])
def test_a_module_of_torch_jit_is_refused(kind: str) -> None:
    x = torch.randn(8, D_IN)
    traced = torch.jit.trace(nn.Sequential(nn.Linear(D_IN, 4), nn.Tanh()), x)
    encoder = {"itself": traced, "inside": nn.Sequential(traced, nn.Identity()), "function": lambda x: traced(x)}[kind]
    assert refusal(lambda _: encode(encoder, x, sub_batch=4), None) == (
        "`encoder` must consist of Python's modules; got one of torch.jit. Pass the module that it was made from, or "
        "what torch.compile makes of that."
    )


def test_batch_norm_beside_the_encoder_or_in_eval_mode_is_accepted(tower: Tower) -> None:
    tower.other = nn.BatchNorm1d(4)
    encode(tower.forward, _inputs(), sub_batch=8).sum().backward()
    still = nn.Sequential(nn.Linear(D_IN, 4), nn.BatchNorm1d(4)).eval()
    encode(still, torch.randn(8, D_IN), sub_batch=4).sum().backward()
    assert still[0].weight.grad is not None


@pytest.mark.parametrize("as_function", [False, True])
def test_batch_norm_that_the_encoder_puts_in_eval_mode_is_accepted(as_function: bool) -> None:
    class Still(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(D_IN), nn.Linear(D_IN, D)

        def forward(self, x: Tensor) -> Tensor:
            self.norm.eval()
            return self.linear(self.norm(x))

    still, x = Still(), torch.randn(B, D_IN)
    features = encode((lambda rows: still(rows)) if as_function else still, x, sub_batch=8)
    features.sin().sum().backward()
    found = _gradients(still)
    still(x).sin().sum().backward()
    _check_equal(found, _gradients(still))


def test_batch_norm_in_a_partly_frozen_encoder_is_refused_before_it_changes() -> None:
    normed = nn.Sequential(nn.Linear(D_IN, 4).requires_grad_(False), nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match="got BatchNorm1d in training mode"):
        encode(normed, torch.randn(8, D_IN), sub_batch=4)
    assert not normed[1].running_mean.any()


@pytest.mark.parametrize("grad", [True, False])
def test_batch_norm_behind_a_function_is_refused_before_it_changes(grad: bool) -> None:
    normed = nn.Sequential(nn.Linear(D_IN, 4), nn.BatchNorm1d(4))
    sentence = "`encoder` must treat examples one by one; got BatchNorm1d in training mode"
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=sentence) as caught:
        encode(lambda x: normed(x), torch.randn(8, D_IN), sub_batch=4)
    assert str(caught.value).endswith("Or call the encoder itself, or cache only the part before it.")
    assert not normed[1].running_mean.any()


@pytest.mark.parametrize("retain", [0, 3])
@pytest.mark.parametrize("how", ["values", "type"])
def test_parameters_changed_before_the_backward_are_noticed(tower: Tower, how: str, retain: int) -> None:
    """One of another type would get no gradient from a graph that was kept."""
    features = encode(tower, _inputs(), sub_batch=8, retain=retain)
    with torch.no_grad():
        tower.double() if how == "type" else tower.embed.weight.add_(1.0)
    with pytest.raises(ValueError, match="must have the parameters of the first pass"):
        features.sum().backward()


def test_inputs_changed_before_the_backward_are_noticed(tower: Tower) -> None:
    x = _inputs()
    features = encode(tower, x, sub_batch=8)
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        features.sum().backward()


def test_a_parameter_that_appears_later_is_refused() -> None:
    late = nn.Parameter(torch.ones(D_IN))
    seen: list[int] = []
    tower = nn.Linear(D_IN, D)

    def encoder(x: Tensor) -> Tensor:
        seen.append(len(x))
        return tower(x * late if len(seen) > 2 else x)

    features = encode(encoder, torch.randn(8, D_IN), sub_batch=4)
    with pytest.raises(ValueError, match="`encoder` must own every parameter that it uses"):
        features.sum().backward()


def _passes(encoder: Any, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The features of the first pass and of the second, by sub-batch."""
    seen: list[Tensor] = []

    class Noted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = encoder

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x)
            seen.append(out.detach().clone())
            return out

    encode(Noted().train(encoder.training), x, sub_batch=8).square().sum().backward()
    count = len(seen) // 2
    return seen[:count], seen[count:]


@pytest.mark.parametrize("training", [True, False])
def test_attention_computes_the_same_bits_in_both_passes(tower: Tower, training: bool) -> None:
    # in eval mode torch's attention takes another path where no graph is wanted
    tower.train(training)
    first, second = _passes(tower, _inputs())
    assert len(first) == len(second) == 3
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Relative(nn.Module):
    """Attention over tokens with the learned bias that Swin and BEiT add to the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.relative_position_bias_table = nn.Parameter(torch.randn(31))
        self.project = nn.Linear(D_IN, D)

    def forward(self, x: Tensor) -> Tensor:
        tokens, places = self.project(x)[:, None], torch.arange(16)
        bias = self.relative_position_bias_table[places[:, None] - places + 15]
        return F.scaled_dot_product_attention(tokens, tokens, tokens, attn_mask=bias)[:, 0].mean(1)


def test_attention_with_a_learned_bias_computes_the_same_bits_in_both_passes() -> None:
    # a bias that wants a gradient takes another kernel
    torch.manual_seed(1)
    encoder = Relative()
    first, second = _passes(encoder, torch.randn(B, 16, D_IN))
    assert len(first) == len(second) == 3
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert graph_may_change_bits(encoder, [encoder])
    encoder.relative_position_bias_table.requires_grad_(False)
    assert not graph_may_change_bits(encoder, [encoder])


class Mix(nn.Module):
    """A layer with dropout that is compiled in a moment, unlike one of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.3, self.training)


# torch's own words, on tensors that are no leaves
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize(
    ("way", "partly_frozen"),
    [
        *((way, False) for way in ("module", "method", "inside", "function", "partial")),
        ("module", True),
        ("function", True),
    ],
)
def test_compiled_encoders_draw_the_same_random_numbers_twice(tower: Tower, way: str, partly_frozen: bool) -> None:
    # a short last sub-batch is compiled again, which one way is enough for
    x, seed = _inputs(batch=B if way == "module" else 16), 5
    tower.mix = Mix().requires_grad_(not partly_frozen)
    expected_features, expected = _expect(tower, x, seed)
    if way == "inside":
        tower.mix.compile(backend="aot_eager")
    compiled = torch.compile(tower if way in ("module", "function") else tower.forward, backend="aot_eager")
    encoders: dict[str, Any] = {"inside": tower, "function": lambda rows: compiled(rows), "partial": partial(compiled)}
    torch.manual_seed(seed)
    features = encode(encoders.get(way, compiled), x, sub_batch=8)
    features.square().sum().backward()
    assert distance(features.detach(), expected_features) < 1e-6
    for name, value in _gradients(tower).items():
        if expected[name] is not None:
            assert distance(value, expected[name]) < 1e-5
    torch._dynamo.reset()


def test_graphs_of_torchs_own_modules_are_measured_where_they_are_compiled() -> None:
    """torch.compile sees what runs inside of such a module's call: what measures its graph too."""
    torch.manual_seed(1)
    encoder, x = nn.Sequential(nn.Linear(D_IN, 16), nn.Tanh(), nn.Linear(16, D)), _inputs()[:, 0]
    _, expected = _expect(encoder, x, 5)
    encoder[2].compile(backend="aot_eager")
    encode(encoder, x, sub_batch=8, retain="auto").square().sum().backward()
    for name, value in _gradients(encoder).items():
        assert distance(value, expected[name]) < 1e-5
    torch._dynamo.reset()


def test_a_compiled_function_builds_its_graph_in_the_first_pass_too(tower: Tower) -> None:
    compiled = torch.compile(tower.forward, backend="eager")
    assert graph_may_change_bits(compiled, [])
    assert graph_may_change_bits(partial(partial(compiled)), [])
    assert not graph_may_change_bits(partial(tower.forward), [])


# needed by torch.compile of a tensor that is not a leaf
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("as_function", [False, True])
def test_a_compiled_step_ends_its_graph_before_encode_and_goes_on_behind(tower: Tower, as_function: bool) -> None:
    """Compiled in the first pass only, the encoder would draw other numbers than in the second."""
    torch._dynamo.reset()
    graphs: list[list[str]] = []

    def look(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append([node.name for node in graph.graph.nodes if node.op.startswith("call")])
        return graph

    encoder = (lambda rows: tower(rows)) if as_function else tower

    def step(x: Tensor) -> Tensor:
        return 3 * encode(encoder, x.sin(), sub_batch=8, retain=1).cos()

    found = []
    for run in (step, torch.compile(step, backend=look)):
        torch.manual_seed(5)
        run(_inputs()).square().sum().backward()
        found.append(_gradients(tower))
    _check_equal(found[1], found[0])
    assert graphs == [["sin"], ["cos", "mul"]]


def _expect(tower: Tower, x: Tensor, seed: int) -> tuple[Tensor, dict[str, Tensor | None]]:
    torch.manual_seed(seed)
    features = _by_parts(tower, x, 8)
    features.square().sum().backward()
    return features.detach(), _gradients(tower)


class Locked(nn.Module):
    """A frozen trunk, whose features are far smaller than its inputs, and a trained projection."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(300, 40), nn.Dropout(0.5), nn.Tanh()).requires_grad_(False)
        self.project = nn.Linear(40, D)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.project(self.trunk(x))


@pytest.mark.parametrize("retain", [0, 1, "auto"])
@pytest.mark.parametrize("as_function", [False, True])
def test_a_graph_leaf_that_the_encoder_makes_is_accepted(as_function: bool, retain: Any) -> None:
    """`enable_input_require_grads` of transformers makes such leaves, for checkpoints behind frozen embeddings."""
    words, layer = nn.EmbeddingBag(50, 40).requires_grad_(False), nn.Sequential(nn.Linear(40, D), nn.Tanh())
    words.register_forward_hook(lambda module, args, out: out.requires_grad_())

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.layer = words, layer

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.layer, self.words(x), use_reentrant=False)

    tower, x = Reader(), torch.randint(0, 50, (B, 3))
    encoder = (lambda x: tower(x)) if as_function else tower
    encoder(x).cos().sum().backward()
    expected = _gradients(tower)
    encode(encoder, x, sub_batch=8, retain=retain).cos().sum().backward()
    found = _gradients(tower)
    assert all(distance(found[name], expected[name]) < 1e-6 for name in ("layer.0.weight", "layer.0.bias"))


@pytest.mark.parametrize("retain", [0, 3])
def test_a_foreign_tensor_that_wants_a_gradient_is_refused(retain: int) -> None:
    prompt = torch.randn(D_IN, requires_grad=True)

    class Prompted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + prompt)

    features = encode(Prompted(D_IN, D), torch.randn(8, D_IN), sub_batch=4, retain=retain)
    with pytest.raises(ValueError, match=rf"`encoder` must own every .* that it uses; got one of shape \[{D_IN}\] els"):
        features.sum().backward()


@pytest.mark.parametrize("as_function", [False, True])
def test_a_frozen_trunk_wider_than_the_inputs_runs_once_too(as_function: bool) -> None:
    """Texts are a few whole numbers, and the trunk's features are wider than the projection's."""
    trunk, project = nn.Sequential(nn.EmbeddingBag(50, 40), nn.Tanh()).requires_grad_(False), nn.Linear(40, D)
    runs: list[int] = []
    trunk.register_forward_hook(lambda *_: runs.append(1))
    tower = nn.Sequential(trunk, project)
    encoder = (lambda x: F.normalize(tower(x), dim=-1)) if as_function else tower
    x = torch.randint(0, 50, (B, 3))
    encoder(x).cos().sum().backward()
    expected = _gradients(tower)
    runs.clear()
    encode(encoder, x, sub_batch=8).cos().sum().backward()
    # one probe more shows whether the trained part is used
    assert len(runs) == 3 + 1
    found = _gradients(tower)
    assert all(distance(found[name], expected[name]) < 1e-6 for name in ("1.weight", "1.bias"))


@pytest.mark.parametrize("used", [False, True])
def test_a_frozen_parameter_beside_the_forward_keeps_no_graph(used: bool) -> None:
    """A fixed scale of the loss, or another tower, is not part of the encoder, which has no frozen trunk."""

    class Retriever(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
            self.other, self.project = nn.Linear(300, 40).requires_grad_(False), nn.Linear(300, D)
            self.graphs: list[bool] = []

        def encode(self, x: Tensor) -> Tensor:
            self.graphs.append(torch.is_grad_enabled())
            # a look at a type is no use of the values
            features = self.project(x.to(self.scale.dtype))
            return features * self.scale if used else features

    model = Retriever()
    encode(model.encode, torch.randn(B, 300), sub_batch=8).square().sum().backward()
    # a probe, and one pass or two: kept graphs need no second one
    assert model.graphs == [True] + ([True] * 3 if used else [False] * 3 + [True] * 3)


def test_a_large_graph_behind_a_frozen_part_is_not_kept() -> None:
    tower, x = Locked(), torch.randn(B, 3, 100, generator=torch.Generator().manual_seed(3))
    tower.project = nn.Sequential(nn.Linear(40, 2000), nn.Tanh(), nn.Linear(2000, D))
    encode(tower, x, sub_batch=8).square().sum().backward()
    assert tower.runs == 1 + 3 + 3


def test_checkpointing_tied_weights_and_hooks_give_the_plain_gradients(tower: Tower) -> None:
    """Activation checkpointing inside, one weight in two places, and a hook that changes what passes."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(D_IN, D_IN), nn.Linear(D_IN, D_IN)
            self.other.weight = self.one.weight
            self.one.register_forward_hook(lambda _module, _args, out: out * 1.5)

        def forward(self, x: Tensor) -> Tensor:
            middle = checkpoint(lambda y: F.dropout(self.one(y).tanh(), 0.4), x, use_reentrant=False)
            return self.other(middle).mean(1)

    torch.manual_seed(8)
    tied, x = Tied(), _inputs()
    torch.manual_seed(9)
    _by_parts(tied, x, 8).square().sum().backward()  # type: ignore[arg-type]
    expected = _gradients(tied)
    for retain in (0, 2, "auto"):
        torch.manual_seed(9)
        encode(tied, x, sub_batch=8, retain=retain).square().sum().backward()
        found = _gradients(tied)
        assert found.keys() == expected.keys()
        assert all(distance(found[name], expected[name]) < 1e-6 for name in found)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_is_refused(tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    def encoder(x: Tensor) -> Tensor:
        return checkpoint(torch.sin, tower.embed(x[:, 0]), use_reentrant=True)

    features = encode(encoder, _inputs(), sub_batch=8)
    sentence = (
        "`encoder` must checkpoint activations without entering autograd again; got use_reentrant=True. "
        "Pass use_reentrant=False to torch.utils.checkpoint, or transformers "
        'gradient_checkpointing_kwargs={"use_reentrant": False}.'
    )
    with pytest.raises(ValueError, match=sentence):
        features.sum().backward()
    # where sizes are tried, before that
    monkeypatch.setattr(auto, "tries", lambda _: True)
    with pytest.raises(ValueError, match=sentence):
        encode(encoder, _inputs(), sub_batch="auto")


def test_a_missing_device_is_refused(tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sentence = "`device` must be on this machine; got 'cuda:1'. Leave it out to compute where the encoder is."
    with pytest.raises(ValueError, match=sentence):
        encode(tower, _inputs(), sub_batch=8, device="cuda:1")
    with pytest.raises(ValueError, match="`device` must be one that torch knows; got 'gpu'"):
        encode(tower, _inputs(), sub_batch=8, device="gpu")


def test_float16_overflow_reaches_the_gradient_scaler() -> None:
    """Too large a scale gives infinite gradients, which the scaler sees; a fitting one gives the plain gradients."""
    torch.manual_seed(1)
    tower, x = nn.Linear(D_IN, D), torch.randn(B, D_IN)
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.0)

    def step(scale: float, wrapped: bool) -> tuple[Tensor, float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with torch.autocast("cpu", dtype=torch.float16):
            features = encode(tower, x, sub_batch=8) if wrapped else tower(x)
        assert features.dtype == torch.float16
        scaler.scale(features.float().square().mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        found = _gradients(tower)["weight"]
        assert found is not None
        return found, scaler.get_scale()

    ours, scale = step(2.0**10, True)
    theirs, _ = step(2.0**10, False)
    assert scale == 2.0**10
    assert distance(ours, theirs) < 1e-3
    ours, scale = step(2.0**24, True)
    assert not ours.isfinite().all()
    assert scale == 2.0**23


def test_at_most_six_frames_lie_between_encode_and_the_encoder() -> None:
    """encode, its plan, act 1 and its loop, the room for it, the run of a sub-batch."""
    package = str(Path(contrastile.__file__).parent)
    frames: list[str] = []

    def encoder(x: Tensor) -> Tensor:
        frames[:] = [frame.name for frame in traceback.extract_stack() if frame.filename.startswith(package)]
        return x

    encode(encoder, _inputs().requires_grad_(), sub_batch=8)
    assert frames[0] == "encode"
    assert len(frames) <= 6
