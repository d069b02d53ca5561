"""Optimizers, parameter groups, learning-rate schedules, clipping, the bounds of the scale, and the EMA."""

import json
import math

import numpy as np
import pytest
import torch
from refusals import refusal
from torch import nn

from contrastile.train.checkpoints import join_tensors, split_tensors
from contrastile.train.config import TrainSettings
from contrastile.train.config.base import AdafactorSettings, AdamWSettings, MuonSettings
from contrastile.train.optim import (
    Adafactor,
    CombinedOptimizer,
    Muon,
    build_optimizer,
    clamp_scale,
    clip_gradients,
    learning_rate,
    matrices,
    parameter_groups,
    rate_factor,
    set_learning_rate,
    with_warmup,
)
from contrastile.train.state import Ema


def small_model():
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.LayerNorm(3), nn.Linear(3, 2))
    model.register_parameter("logit_scale", nn.Parameter(torch.tensor(2.0)))
    return model


def test_only_parameters_with_two_axes_decay():
    model = small_model()
    decaying, free = parameter_groups(model.parameters(), 0.1)
    assert (decaying["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert {id(parameter) for parameter in decaying["params"]} == {id(model[0].weight), id(model[2].weight)}
    assert any(parameter is model.logit_scale for parameter in free["params"])


def test_every_trained_parameter_is_in_one_group():
    model = small_model()
    model[1].requires_grad_(False)
    grouped = [parameter for group in parameter_groups(model.parameters(), 0.1) for parameter in group["params"]]
    assert sorted(map(id, grouped)) == sorted(
        id(parameter) for parameter in model.parameters() if parameter.requires_grad
    )


def test_the_scale_does_not_decay():
    model = small_model()
    optimizer = build_optimizer(model, AdamWSettings(learning_rate=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    weight = model[2].weight.detach().clone()
    optimizer.step()
    assert model.logit_scale.item() == 2.0
    assert not torch.equal(model[2].weight, weight)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [(AdamWSettings(), torch.optim.AdamW), (AdafactorSettings(), Adafactor), (MuonSettings(), CombinedOptimizer)],
)
def test_the_recipe_names_the_optimizer(settings, kind):
    assert type(build_optimizer(small_model(), settings)) is kind


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (AdamWSettings(learning_rate=0.3, betas=(0.5, 0.6), eps=1e-3), {"eps": 1e-3}),
        (AdafactorSettings(learning_rate=0.3, betas=(0.5, 0.6), beta2_decay=-0.7), {"beta2_decay": -0.7}),
    ],
)
def test_optimizers_take_their_settings(settings, names):
    group = build_optimizer(small_model(), settings).param_groups[0]
    expected = {"lr": 0.3, "betas": (0.5, 0.6), **names}
    assert {name: group[name] for name in expected} == expected


@pytest.mark.parametrize(
    "settings", [kind(learning_rate=0.1) for kind in (AdamWSettings, AdafactorSettings, MuonSettings)]
)
def test_every_optimizer_lowers_a_loss(settings):
    model = nn.Linear(4, 1)
    x, y = torch.randn(64, 4), torch.randn(64, 1)
    optimizer = build_optimizer(model, settings)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("progress", "warmup", "final", "share"),
    [
        *[(0.0, 0.1, 0.0, 0.0), (0.05, 0.1, 0.0, 0.5), (0.1, 0.1, 0.0, 1.0), (0.55, 0.1, 0.0, 0.5)],
        *[(1.0, 0.1, 0.0, 0.0), (1.7, 0.1, 0.0, 0.0), (1.0, 0.1, 0.25, 0.25), (0.0, 0.0, 0.0, 1.0)],
    ],
)
def test_the_rate_rises_linearly_and_falls_as_half_a_cosine_to_its_final_share(progress, warmup, final, share):
    settings = AdamWSettings(learning_rate=2.0, warmup=warmup, final=final)
    assert learning_rate(progress, settings) == pytest.approx(2.0 * share, abs=1e-12)


def test_the_rate_reaches_every_group():
    optimizer = build_optimizer(small_model(), AdamWSettings())
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


@pytest.mark.parametrize(("before", "after"), [(-1.0, 0.0), (3.0, 3.0), (5.0, math.log(100.0))])
def test_the_scale_stays_between_1_and_100(before, after):
    log_scale = nn.Parameter(torch.tensor(before))
    clamp_scale(log_scale)
    assert log_scale.item() == pytest.approx(after)


@pytest.mark.parametrize(("clip_norm", "norm"), [(0.5, 0.5), (0.0, math.sqrt(12))])
def test_a_gradient_is_clipped_to_a_positive_norm(clip_norm, norm):
    model = nn.Linear(3, 3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert clip_gradients(model, clip_norm).item() == pytest.approx(math.sqrt(12))
    clipped = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert clipped.norm().item() == pytest.approx(norm)


# --- Adafactor


def dense_adafactor(weight, gradients, rates, peak, beta1, beta2, decay):
    """The formula in float64, its second moments whole and then replaced by their best product of means."""
    weight, momentum = weight.double().clone(), torch.zeros_like(weight, dtype=torch.float64)
    square = torch.zeros_like(momentum)
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        kept = min(beta2, 1 - t**-0.8)
        square = kept * square + (1 - kept) * (gradient.double() ** 2 + 1e-30)
        shown = square
        if weight.ndim > 1 and sorted(weight.shape)[-2] >= 32:
            first, second = sorted(range(weight.ndim), key=lambda axis: weight.shape[axis])[:-3:-1]
            rows, columns = square.mean(first, keepdim=True), square.mean(second, keepdim=True)
            shown = rows * columns / square.mean((first, second), keepdim=True)
        momentum = beta1 * momentum + (1 - beta1) * gradient.double() / shown.sqrt()
        weight = weight - rate * momentum - rate / peak * decay * weight
    return weight


@pytest.mark.parametrize("shape", [(5,), (40, 31), (40, 33), (33, 40), (64, 64), (3, 40, 2, 36)])
def test_adafactor_is_its_formula(shape):
    weight = torch.nn.Parameter(torch.randn(shape))
    gradients, rates = torch.randn(30, *shape), [0.1 * (step + 1) / 30 for step in range(30)]
    expected = dense_adafactor(weight.detach(), gradients, rates, 0.1, 0.9, 0.95, 0.01)
    optimizer = Adafactor([weight], lr=0.1, betas=(0.9, 0.95), weight_decay=0.01)
    for gradient, rate in zip(gradients, rates, strict=True):
        set_learning_rate(optimizer, rate)
        weight.grad = gradient
        optimizer.step()
    assert (weight.detach().double() - expected).abs().max() < 1e-5 * expected.abs().max()


def test_squares_of_one_row_and_one_column_are_kept_exactly():
    """Where g² is an outer product, the factors lose nothing: every element moves by its sign."""
    row, column = torch.rand(50, 1) + 0.1, torch.rand(1, 40) + 0.1
    weight = torch.nn.Parameter(torch.zeros(50, 40))
    weight.grad = row * column * torch.randn(50, 40).sign()
    Adafactor([weight], lr=1.0, betas=(0.0, 0.95)).step()
    torch.testing.assert_close(weight.detach(), -weight.grad.sign(), rtol=1e-5, atol=1e-5)


def test_adafactors_state_of_a_matrix_is_two_vectors():
    weight = torch.nn.Parameter(torch.zeros(64, 128))
    weight.grad = torch.ones_like(weight)
    optimizer = Adafactor([weight], betas=(0.0, 0.95))
    optimizer.step()
    kept = sum(value.numel() for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor))
    assert kept == 64 + 128


def test_adafactors_decay_follows_the_schedule_and_not_the_height_of_the_rate():
    for peak in (1e-3, 1e-1):
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = Adafactor([weight], lr=peak, weight_decay=0.5)
        set_learning_rate(optimizer, peak / 4)
        weight.grad = torch.zeros(4)
        optimizer.step()
        assert weight.tolist() == [0.875] * 4


def big_vision_adafactor(weight, gradients, schedule, peak, decay, *, momentum=0.9, cap=0.95, power=0.8, least=32):
    """The chain of big_vision's `optax.make` with its `scale_by_adafactor`, step by step, in NumPy's float64.

    Factored second moments without clipping, an average of the updates without debiasing, times the rate; plus the
    decay times the weight; times the schedule; subtracted.
    """
    weight, average = weight.astype(np.float64), np.zeros(weight.shape)
    order = np.argsort(weight.shape, kind="stable")
    factored = weight.ndim > 1 and weight.shape[order[-2]] >= least
    if factored:
        short, long = int(order[-2]), int(order[-1])
        # the mean over the longest axis, and the mean over the one before
        row, column = (np.zeros(np.delete(weight.shape, axis)) for axis in (long, short))
    else:
        whole = np.zeros(weight.shape)
    for count, (gradient, height) in enumerate(zip(gradients, schedule, strict=True)):
        gradient = gradient.astype(np.float64)
        kept = min(cap, 1.0 - (count + 1.0) ** -power)
        squares = gradient**2 + 1e-30
        if factored:
            row = kept * row + (1 - kept) * squares.mean(axis=long)
            column = kept * column + (1 - kept) * squares.mean(axis=short)
            along = short - 1 if short > long else short
            by_row = (row / row.mean(axis=along, keepdims=True)) ** -0.5
            update = gradient * np.expand_dims(by_row, long) * np.expand_dims(column**-0.5, short)
        else:
            whole = kept * whole + (1 - kept) * squares
            update = gradient * whole**-0.5
        average = momentum * average + (1 - momentum) * update
        weight = weight - height * (peak * average + decay * weight)
    return weight


@pytest.mark.parametrize("shape", [(7,), (31, 90), (32, 90), (90, 32), (48, 48), (34, 3, 40)])
def test_adafactor_equals_big_visions(shape):
    lots = np.random.default_rng(0)
    start, gradients = lots.normal(size=shape).astype(np.float32), lots.normal(size=(40, *shape)).astype(np.float32)
    peak, decay, schedule = 0.03, 1e-2, [min((step + 1) / 10, 1.0) for step in range(40)]
    expected = big_vision_adafactor(start, gradients, schedule, peak, decay)
    weight = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = Adafactor([weight], lr=peak, betas=(0.9, 0.95), weight_decay=decay)
    for gradient, height in zip(gradients, schedule, strict=True):
        set_learning_rate(optimizer, peak * height)
        weight.grad = torch.from_numpy(gradient)
        optimizer.step()
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=0, atol=2e-6 * np.abs(expected).max())


# --- Muon


def muon_formula(weight, gradients, rate, momentum, decay):
    """M ← μ M + (1 − μ) G; U = (1 − μ) G + μ M; five times X ← aX + (bA + cA²)X with A = XXᵀ; in NumPy's float64."""
    weight, average = weight.astype(np.float64), np.zeros(weight.shape)
    for gradient in gradients.astype(np.float64):
        average = momentum * average + (1 - momentum) * gradient
        x = (1 - momentum) * gradient + momentum * average
        flat = x.shape[0] <= x.shape[1]
        x = (x if flat else x.T) / np.linalg.norm(x)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        weight = (1 - rate * decay) * weight - rate * 0.2 * math.sqrt(max(weight.shape)) * (x if flat else x.T)
    return weight


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32), (3, 50)])
def test_muon_is_its_formula(shape):
    lots = np.random.default_rng(1)
    start, gradients = lots.normal(size=shape).astype(np.float32), lots.normal(size=(8, *shape)).astype(np.float32)
    layer = nn.Linear(shape[1], shape[0])
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(start))
    optimizer = build_optimizer(layer, MuonSettings(learning_rate=0.02, weight_decay=0.5))
    for gradient in gradients:
        layer.weight.grad = torch.from_numpy(gradient)
        optimizer.step()
    expected = muon_formula(start, gradients, 0.02, 0.95, 0.5)
    moved = np.linalg.norm(expected - start)
    # its iteration runs in bfloat16, which has three digits
    assert np.linalg.norm(layer.weight.detach().numpy() - expected) < 0.02 * moved


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (1, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_equals_torchs_bit_for_bit(shape, dtype):
    generator = torch.Generator().manual_seed(2)
    own, other = (nn.Parameter(torch.ones(shape, dtype=dtype)) for _ in range(2))
    optimizers = (
        Muon([own], lr=0.03, momentum=0.9, weight_decay=0.4),
        torch.optim.Muon([other], lr=0.03, momentum=0.9, weight_decay=0.4, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(4):
        own.grad = torch.randn(shape, generator=generator).to(dtype)
        other.grad = own.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(own, other)
    assert not torch.equal(own, torch.ones(shape, dtype=dtype))


def test_muon_creates_its_state_once(monkeypatch):
    made, zeros_like = [], torch.zeros_like
    monkeypatch.setattr(torch, "zeros_like", lambda x: made.append(x.shape) or zeros_like(x))
    weights = [nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(4, 2))]
    optimizer = Muon(weights, lr=0.1, momentum=0.9, weight_decay=0.0)
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
    assert made == [(3, 5), (4, 2)]


def test_an_update_of_muon_has_nearly_equal_singular_values_and_the_size_of_adamws():
    layer = nn.Linear(60, 40)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.randn(40, 3) @ torch.diag(torch.tensor([30.0, 10.0, 3.0])) @ torch.randn(3, 60)
    layer.weight.grad += 1e-3 * torch.randn(40, 60)
    build_optimizer(layer, MuonSettings(learning_rate=1e-2, weight_decay=0.0)).step()
    update = (layer.weight.detach() - before) / 1e-2
    singular = torch.linalg.svdvals(update / (0.2 * math.sqrt(60)))[:3]
    assert ((singular > 0.5) & (singular < 1.3)).all()
    full = nn.Linear(60, 40)
    full.weight.grad = torch.randn(40, 60)
    before = full.weight.detach().clone()
    build_optimizer(full, MuonSettings(learning_rate=1e-2, weight_decay=0.0)).step()
    # AdamW's first step has a root mean square of 1, its later ones of about 0.2 to 0.4
    assert 0.1 < ((full.weight.detach() - before) / 1e-2).square().mean().sqrt() < 0.3


class Towered(nn.Module):
    """A tower with all that Muon leaves alone around what it takes."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.positional_embedding = nn.Parameter(torch.randn(5, 6))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.patches = nn.Conv2d(3, 6, 2)
        self.unembed = nn.Linear(6, 11, bias=False)
        self.unembed.weight = self.words.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.projection = nn.Linear(6, 4, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))


def test_muon_takes_the_matrices_inside_and_adamw_all_else():
    model = Towered()
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    taken = [named[id(parameter)] for parameter in matrices(model)]
    assert taken == ["attention.in_proj_weight", "attention.out_proj.weight"]
    optimizer = build_optimizer(model, MuonSettings(learning_rate=0.5))
    muon, decaying, free = optimizer.param_groups
    assert [named[id(parameter)] for parameter in muon["params"]] == taken
    assert {named[id(parameter)] for parameter in decaying["params"]} == {
        "words.weight", "positional_embedding", "patches.weight", "projection.weight",
    }  # fmt: skip
    grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters() if parameter.requires_grad)
    assert (muon["momentum"], decaying["betas"], free["weight_decay"]) == (0.95, (0.9, 0.98), 0.0)


def test_towers_without_matrices_are_refused():
    assert refusal(build_optimizer, small_model()[:2], MuonSettings()) == (
        '`optim.kind` must suit towers with matrices; got muon, and they have none. Use "adamw".'
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("settings", [AdamWSettings(), AdafactorSettings(), MuonSettings()], ids=lambda x: x.kind)
def test_optimizers_resume_bit_for_bit_and_the_rate_reaches_all_groups(settings, dtype):
    def model():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 40), nn.LayerNorm(40), nn.Linear(40, 40)).to(dtype)

    def steps(model, optimizer, lots):
        for lot in lots:
            torch.manual_seed(lot)
            set_learning_rate(optimizer, 0.01 * (lot + 1))
            optimizer.zero_grad()
            model(torch.randn(5, 6, dtype=dtype)).square().mean().backward()
            optimizer.step()

    whole = model()
    steps(whole, build_optimizer(whole, settings), range(6))
    begun = model()
    optimizer = build_optimizer(begun, settings)
    steps(begun, optimizer, range(3))
    tensors = {}
    plain = json.loads(json.dumps(split_tensors(optimizer.state_dict(), "optimizer", tensors)))
    resumed = model()
    resumed.load_state_dict(begun.state_dict())
    again = build_optimizer(resumed, settings)
    again.load_state_dict(join_tensors(plain, tensors))
    steps(resumed, again, range(3, 6))
    assert {group["lr"] for group in again.param_groups} == {0.06}
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert not torch.equal(whole[0].weight, begun[0].weight)


# --- the rate and the batch


@pytest.mark.parametrize(("how", "factor"), [("none", 1.0), ("sqrt", 4.0), ("linear", 16.0)])
def test_the_rate_follows_the_batch_as_the_recipe_says(how, factor):
    base = None if how == "none" else 256
    settings = AdamWSettings(learning_rate=0.5, warmup=0.1, final=0.25, rate_scaling=how, base_batch=base)
    assert rate_factor(settings, 4096) == factor
    plain = AdamWSettings(learning_rate=0.5, warmup=0.1, final=0.25)
    for share in (0.05, 0.1, 0.7, 1.0):
        assert learning_rate(share, settings, 4096) == pytest.approx(factor * learning_rate(share, plain))
        assert learning_rate(share, settings, 256) == pytest.approx(learning_rate(share, plain))


# --- schedules


def test_a_linear_schedule_falls_in_a_straight_line():
    settings = AdamWSettings(learning_rate=1.0, warmup=0.2, final=0.1, schedule="linear")
    assert [learning_rate(share, settings) for share in (0.1, 0.2, 0.6, 1.0)] == pytest.approx([0.5, 1.0, 0.55, 0.1])


def test_a_constant_rate_stays():
    settings = AdamWSettings(learning_rate=2.0, warmup=0.1, schedule="constant")
    assert [learning_rate(share, settings) for share in (0.05, 0.1, 0.5, 1.0)] == [1.0, 2.0, 2.0, 2.0]


def test_a_cooldown_falls_straight_at_the_end():
    settings = AdamWSettings(learning_rate=2.0, warmup=0.1, schedule="cooldown", cooldown=0.4, final=0.5)
    rates = [learning_rate(share, settings) for share in (0.1, 0.6, 0.8, 1.0, 1.5)]
    assert rates == pytest.approx([2.0, 2.0, 1.5, 1.0, 1.0])


def test_warmup_in_epochs_and_in_steps_is_a_share_of_the_run():
    epochs = with_warmup(AdamWSettings(warmup_epochs=0.5), TrainSettings(epochs=8.0), 1000)
    assert epochs.warmup == 0.5 / 8
    growing = TrainSettings(examples=1000, batch=((0.0, 10), (0.05, 100)))
    # five steps of 10 reach the second stage, one of 100 follows
    assert with_warmup(AdamWSettings(warmup_steps=6), growing, 77).warmup == 0.15
    assert with_warmup(AdamWSettings(warmup=0.3), growing, 77).warmup == 0.3


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"warmup_epochs": 2.0}, "`optim.warmup_epochs` must be shorter than the run; got 2 epochs, 200 of 200"),
        ({"warmup_steps": 50}, "`optim.warmup_steps` must be shorter than the run; got 50 steps, for 200"),
    ],
)
def test_a_warmup_longer_than_the_run_is_refused_by_its_own_key(settings, sentence):
    train = TrainSettings(epochs=2.0, batch=((0.0, 64),))
    remedy = " examples. Warm up over less, or train longer."
    assert refusal(with_warmup, AdamWSettings(**settings), train, 100) == sentence + remedy


# --- the average


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_ema_is_its_formula(dtype):
    model = nn.Linear(3, 2, dtype=dtype)
    average, mean = Ema(model, 0.5), model.weight.detach().clone()
    for step in range(1, 8):
        with torch.no_grad():
            model.weight.add_(torch.randn(2, 3, dtype=dtype))
        average.update()
        kept = min(0.5, (1 + step) / (10 + step))
        mean = kept * mean + (1 - kept) * model.weight.detach()
    own, close = model.weight.detach().clone(), 32 * torch.finfo(dtype).eps
    with average.in_place():
        torch.testing.assert_close(model.weight.detach(), mean, rtol=close, atol=close)
    assert torch.equal(model.weight, own)
    other = Ema(model, 0.5)
    other.load_state_dict(average.state_dict())
    other.settle()
    torch.testing.assert_close(model.weight.detach(), mean)


def test_without_a_decay_the_ema_is_the_model():
    model = nn.Linear(3, 2)
    average, own = Ema(model, None), model.weight.detach().clone()
    average.update()
    average.settle()
    assert torch.equal(model.weight, own)
    assert average.state_dict() == {"step": 0, "means": {}}
