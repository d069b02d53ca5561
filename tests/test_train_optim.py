"""The step's last part: which parameters decay, how the rate runs, where the scale may go."""

import math

import pytest
import torch
from torch import nn

from contrastile.train.adafactor import Adafactor
from contrastile.train.average import Average
from contrastile.train.config import AdafactorSettings, AdamWSettings, TrainSettings
from contrastile.train.optim import (
    build_optimizer,
    clamp_scale,
    clip_gradients,
    learning_rate,
    parameter_groups,
    set_learning_rate,
    with_warmup,
)


def small_model():
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.LayerNorm(3), nn.Linear(3, 2))
    model.register_parameter("logit_scale", nn.Parameter(torch.tensor(2.0)))
    return model


def test_only_what_has_two_axes_decays():
    model = small_model()
    decaying, free = parameter_groups(model.parameters(), 0.1)
    assert (decaying["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert {id(parameter) for parameter in decaying["params"]} == {id(model[0].weight), id(model[2].weight)}
    assert any(parameter is model.logit_scale for parameter in free["params"])


def test_every_trained_parameter_is_in_one_group():
    model = small_model()
    grouped = [parameter for group in parameter_groups(model.parameters(), 0.1) for parameter in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, model.parameters()))


def test_frozen_parameters_are_left_out():
    model = small_model()
    model[0].requires_grad_(False)
    grouped = [parameter for group in parameter_groups(model.parameters(), 0.1) for parameter in group["params"]]
    assert len(grouped) == len(list(model.parameters())) - 2


def test_a_decay_of_the_scale_would_move_it_and_does_not():
    model = small_model()
    optimizer = build_optimizer(model, AdamWSettings(learning_rate=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    weight = model[2].weight.detach().clone()
    optimizer.step()
    assert model.logit_scale.item() == 2.0
    assert not torch.equal(model[2].weight, weight)


@pytest.mark.parametrize(("settings", "kind"), [(AdamWSettings(), torch.optim.AdamW), (AdafactorSettings(), Adafactor)])
def test_the_recipe_names_the_optimizer(settings, kind):
    assert type(build_optimizer(small_model(), settings)) is kind


def test_adamw_takes_its_settings():
    settings = AdamWSettings(learning_rate=0.3, betas=(0.5, 0.6), eps=1e-3)
    group = build_optimizer(small_model(), settings).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.3, (0.5, 0.6), 1e-3)


def test_adafactor_takes_its_settings():
    settings = AdafactorSettings(learning_rate=0.3, betas=(0.5, 0.6), beta2_decay=-0.7)
    group = build_optimizer(small_model(), settings).param_groups[0]
    assert (group["lr"], group["betas"], group["beta2_decay"]) == (0.3, (0.5, 0.6), -0.7)


@pytest.mark.parametrize("settings", [AdamWSettings(learning_rate=0.1), AdafactorSettings(learning_rate=0.1)])
def test_both_optimizers_lower_a_loss(settings):
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
    ("progress", "share"),
    [(0.0, 0.0), (0.05, 0.5), (0.1, 1.0), (0.55, 0.5), (1.0, 0.0), (1.7, 0.0)],
)
def test_the_rate_rises_straight_and_falls_as_half_a_cosine(progress, share):
    settings = AdamWSettings(learning_rate=2.0, warmup=0.1)
    assert learning_rate(progress, settings) == pytest.approx(2.0 * share, abs=1e-12)


def test_the_rate_ends_at_its_final_share():
    settings = AdamWSettings(learning_rate=2.0, warmup=0.1, final=0.25)
    assert learning_rate(1.0, settings) == pytest.approx(0.5)


def test_without_warmup_the_rate_begins_at_its_highest():
    assert learning_rate(0.0, AdamWSettings(learning_rate=2.0, warmup=0.0)) == 2.0


def test_the_rate_reaches_every_group():
    optimizer = build_optimizer(small_model(), AdamWSettings())
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


@pytest.mark.parametrize(("before", "after"), [(-1.0, 0.0), (3.0, 3.0), (5.0, math.log(100.0))])
def test_the_scale_stays_between_1_and_100(before, after):
    log_scale = nn.Parameter(torch.tensor(before))
    clamp_scale(log_scale)
    assert log_scale.item() == pytest.approx(after)


def test_a_gradient_is_cut_to_the_norm():
    model = nn.Linear(3, 3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert clip_gradients(model, 0.5).item() == pytest.approx(math.sqrt(12))
    assert torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm().item() == pytest.approx(0.5)


def test_a_norm_of_zero_cuts_nothing():
    model = nn.Linear(3, 3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    clip_gradients(model, 0.0)
    assert model.weight.grad.max().item() == 1.0


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


def test_adafactor_keeps_little():
    weight = torch.nn.Parameter(torch.zeros(64, 128))
    weight.grad = torch.ones_like(weight)
    optimizer = Adafactor([weight], betas=(0.0, 0.95))
    optimizer.step()
    kept = sum(value.numel() for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor))
    assert kept == 64 + 128


def test_its_decay_follows_the_schedule_and_not_the_height_of_the_rate():
    for peak in (1e-3, 1e-1):
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = Adafactor([weight], lr=peak, weight_decay=0.5)
        set_learning_rate(optimizer, peak / 4)
        weight.grad = torch.zeros(4)
        optimizer.step()
        assert weight.tolist() == [0.875] * 4


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


def test_a_warmup_longer_than_the_run_is_refused():
    with pytest.raises(ValueError) as caught:
        with_warmup(AdamWSettings(warmup_epochs=2.0), TrainSettings(epochs=2.0), 100)
    assert str(caught.value) == (
        "`optim.warmup` must be shorter than the run; got 200 of 200 examples. Warm up over less, or train longer."
    )


# --- the average


def test_the_average_is_its_formula():
    model = nn.Linear(3, 2)
    average, mean = Average(model, 0.5), model.weight.detach().clone()
    for step in range(1, 8):
        with torch.no_grad():
            model.weight.add_(torch.randn(2, 3))
        average.update()
        kept = min(0.5, (1 + step) / (10 + step))
        mean = kept * mean + (1 - kept) * model.weight.detach()
    own = model.weight.detach().clone()
    with average.in_place():
        torch.testing.assert_close(model.weight.detach(), mean)
    assert torch.equal(model.weight, own)
    other = Average(model, 0.5)
    other.load_state_dict(average.state_dict())
    other.settle()
    torch.testing.assert_close(model.weight.detach(), mean)


def test_without_a_decay_the_average_is_the_model():
    model = nn.Linear(3, 2)
    average, own = Average(model, None), model.weight.detach().clone()
    average.update()
    average.settle()
    assert torch.equal(model.weight, own)
    assert average.state_dict() == {"step": 0, "means": {}}
