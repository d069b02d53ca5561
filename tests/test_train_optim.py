"""The step's last part: which parameters decay, how the rate runs, where the scale may go."""

import math

import pytest
import torch
from torch import nn

from contrastile.train.config import AdafactorSettings, AdamWSettings
from contrastile.train.optim import (
    build_optimizer,
    clamp_scale,
    clip_gradients,
    learning_rate,
    parameter_groups,
    set_learning_rate,
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


@pytest.mark.parametrize(
    ("settings", "kind"), [(AdamWSettings(), torch.optim.AdamW), (AdafactorSettings(), torch.optim.Adafactor)]
)
def test_the_recipe_names_the_optimizer(settings, kind):
    assert type(build_optimizer(small_model(), settings)) is kind


def test_adamw_takes_its_settings():
    settings = AdamWSettings(learning_rate=0.3, betas=(0.5, 0.6), eps=1e-3)
    group = build_optimizer(small_model(), settings).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.3, (0.5, 0.6), 1e-3)


def test_adafactor_takes_its_settings():
    group = build_optimizer(small_model(), AdafactorSettings(learning_rate=0.3, beta2_decay=-0.7)).param_groups[0]
    assert (group["lr"], group["beta2_decay"]) == (0.3, -0.7)


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


def test_a_linear_decay_falls_in_a_straight_line():
    settings = AdamWSettings(learning_rate=1.0, warmup=0.2, final=0.1, decay="linear")
    assert [learning_rate(share, settings) for share in (0.1, 0.2, 0.6, 1.0)] == pytest.approx([0.5, 1.0, 0.55, 0.1])
