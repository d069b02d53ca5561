"""Augmentation: small distortions, each picture its own, decided by the generator alone."""

import pytest
import torch
import torch.nn.functional as F

from contrastile.data import images as augmentation
from contrastile.data.images import draw_parameters, prepare

NOTHING = {"rotation": 0.0, "shear": 0.0, "scale": 1.0, "shift": 0.0, "blur": 0.0}


def augment(images, generator, **ranges):
    return augmentation.augment(images, draw_parameters(len(images), generator, **ranges))


@pytest.fixture
def pictures():
    return torch.randint(0, 256, (6, 1, 16, 16), dtype=torch.uint8)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def square():
    picture = torch.zeros(1, 1, 33, 33, dtype=torch.uint8)
    picture[..., 12:21, 12:21] = 255
    return picture.expand(200, -1, -1, -1)


def test_prepared_pictures_are_between_0_and_1(pictures):
    prepared = prepare(pictures)
    assert prepared.dtype == torch.float32
    assert torch.equal((prepared * 255).round().byte(), pictures)


def test_without_distortions_it_only_prepares(pictures):
    torch.testing.assert_close(augment(pictures, seeded(), **NOTHING), prepare(pictures), rtol=0, atol=1e-6)


def test_the_generator_alone_decides(pictures):
    before = torch.get_rng_state()
    assert torch.equal(augment(pictures, seeded(7)), augment(pictures, seeded(7)))
    assert not torch.equal(augment(pictures, seeded(7)), augment(pictures, seeded(8)))
    assert torch.equal(torch.get_rng_state(), before)


def test_every_picture_is_distorted_its_own_way_within_0_and_1():
    distorted = augment(square(), seeded())
    assert len({picture.numpy().tobytes() for picture in distorted}) == 200
    assert distorted.min() >= 0
    assert distorted.max() <= 1


def test_pixels_from_outside_repeat_the_border():
    white = torch.full((50, 1, 16, 16), 255, dtype=torch.uint8)
    torch.testing.assert_close(augment(white, seeded()), torch.ones(50, 1, 16, 16))


def centres(pictures):
    places = torch.arange(33.0)
    mass = pictures.sum(dim=(1, 2, 3))
    return [(pictures.sum(dim=(1, axis)) * places).sum(dim=1) / mass - 16 for axis in (2, 3)]


def test_shifts_stay_within_their_share_of_the_picture():
    how = {**NOTHING, "shift": 0.1}
    for centre in centres(augment(square(), seeded(), **how)):
        assert centre.abs().max() <= 3.3 + 1e-3
        assert centre.abs().max() > 3.0


def test_scales_stay_within_their_factor():
    how = {**NOTHING, "scale": 1.25}
    sides = augment(square(), seeded(), **how)[:, 0, 16].sum(dim=1) / 9
    assert sides.max() == pytest.approx(1.25, abs=0.03)
    assert sides.min() == pytest.approx(1 / 1.25, abs=0.03)


def test_rotation_leaves_a_round_thing_alone():
    y, x = torch.meshgrid(*[torch.arange(33.0) - 16] * 2, indexing="ij")
    disc = ((100 - x**2 - y**2).clamp(0, 20) * 12).byte()[None, None].expand(20, -1, -1, -1)
    how = {**NOTHING, "rotation": 30.0}
    assert (augment(disc, seeded(), **how) - prepare(disc)).abs().max() < 0.25
    assert (augment(square()[:20], seeded(), **how) - prepare(square()[:20])).abs().max() > 0.4


def test_shear_moves_the_top_against_the_bottom():
    line = torch.zeros(200, 1, 33, 33, dtype=torch.uint8)
    line[..., 16] = 255
    sheared = augment(line, seeded(), **{**NOTHING, "shear": 20.0})[:, 0]
    places = torch.arange(33.0)
    top, middle, bottom = ((sheared[:, row] * places).sum(dim=1) / sheared[:, row].sum(dim=1) for row in (4, 16, 28))
    torch.testing.assert_close(middle, torch.full((200,), 16.0), atol=1e-3, rtol=0)
    assert ((top - 16) * (bottom - 16) <= 0).all()
    assert (top - 16).abs().max() == pytest.approx(12 * 0.364, abs=0.3)


def test_blur_mixes_in_a_smoothed_copy(pictures):
    clear = prepare(pictures)
    blurred = augment(pictures, seeded(), **{**NOTHING, "blur": 1.0})
    smoothed = clear
    for _ in range(2):
        smoothed = F.avg_pool2d(smoothed, 3, stride=1, padding=1, count_include_pad=False)
    change, most = (blurred - clear).flatten(1), (smoothed - clear).flatten(1)
    amounts = (change * most).sum(dim=1) / most.square().sum(dim=1)
    expected = clear + amounts[:, None, None, None] * (smoothed - clear)
    torch.testing.assert_close(blurred, expected, atol=1e-4, rtol=0)
    assert 0 <= amounts.min() < amounts.max() <= 1
