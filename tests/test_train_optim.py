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


@pytest.mark.parametrize(
    ("settings", "kind"),
    [(AdamWSettings(), torch.optim.AdamW), (AdafactorSettings(), Adafactor), (MuonSettings(), CombinedOptimizer)],
)
def test_the_recipe_names_the_optimizer(settings, kind):
    assert type(build_optimizer(small_model(), settings)) is kind


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (AdamWSettings(learning_rate=0.3, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.2), {"eps": 1e-3}),
        (
            AdafactorSettings(learning_rate=0.3, betas=(0.5, 0.6), beta2_decay=-0.7, weight_decay=0.2),
            {"beta2_decay": -0.7},
        ),
    ],
)
def test_optimizers_take_their_settings(settings, names):
    decaying, free = build_optimizer(small_model(), settings).param_groups
    expected = {"lr": 0.3, "betas": (0.5, 0.6), **names}
    for group, decay in ((decaying, 0.2), (free, 0.0)):
        assert {name: group[name] for name in expected} == expected
        assert group["weight_decay"] == decay


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


def test_adafactors_state_of_a_matrix_is_two_vectors():
    weight = torch.nn.Parameter(torch.zeros(64, 128))
    weight.grad = torch.ones_like(weight)
    optimizer = Adafactor([weight], betas=(0.0, 0.95))
    optimizer.step()
    kept = sum(value.numel() for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor))
    assert kept == 64 + 128


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


@pytest.mark.parametrize(
    ("shape", "power"),
    [((7,), 0.8), ((31, 90), 0.8), ((32, 90), 0.8), ((90, 32), 0.8), ((48, 48), 0.7), ((34, 3, 40), 0.8)],
)
def test_adafactor_equals_big_visions(shape, power):
    lots = np.random.default_rng(0)
    start, gradients = lots.normal(size=shape).astype(np.float32), lots.normal(size=(40, *shape)).astype(np.float32)
    peak, decay, schedule = 0.03, 1e-2, [min((step + 1) / 10, 1.0) for step in range(40)]
    expected = big_vision_adafactor(start, gradients, schedule, peak, decay, power=power)
    weight = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = Adafactor([weight], lr=peak, betas=(0.9, 0.95), weight_decay=decay, beta2_decay=-power)
    for gradient, height in zip(gradients, schedule, strict=True):
        set_learning_rate(optimizer, peak * height)
        weight.grad = torch.from_numpy(gradient)
        optimizer.step()
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=0, atol=2e-6 * np.abs(expected).max())


# --- Muon


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
