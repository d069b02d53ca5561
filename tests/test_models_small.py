"""The small towers: features independent of batch and padding, gradients of all parameters, size."""

import pytest
import torch

from contrastile.models.small import ConvTower, WordsTower


@pytest.fixture
def conv():
    return ConvTower(channels=1, width=8)


@pytest.fixture
def words():
    return WordsTower(vocabulary=50, length=6, width=16)


def text(*rows):
    ids = torch.tensor([[*row, *[0] * (6 - len(row))] for row in rows])
    return ids, (ids != 0).long()


@pytest.mark.parametrize("size", [8, 31, 32, 64])
@pytest.mark.parametrize(("channels", "width"), [(1, 8), (3, 8), (1, 1), (1, 3), (1, 6)])
def test_images_of_any_size_have_features_of_the_same_size(size, channels, width):
    tower = ConvTower(channels=channels, width=width)
    assert tower(torch.rand(3, channels, size, size)).shape == (3, tower.features)


def test_features_do_not_depend_on_the_batch(conv, words):
    for tower, inputs in ((conv, (torch.rand(6, 1, 32, 32),)), (words, text([1, 2, 3], [4], [5, 6, 7, 8, 9, 10]))):
        alone = tower(*(each[1:2] for each in inputs))
        torch.testing.assert_close(tower(*inputs)[1:2], alone, rtol=1e-5, atol=1e-6)


def test_the_position_of_strokes_matters(conv):
    pixels = torch.zeros(2, 1, 32, 32)
    pixels[0, :, 4:8, 4:8] = pixels[1, :, 20:24, 20:24] = 1
    left, right = conv(pixels)
    assert (left - right).norm() > 0.1 * left.norm()


def test_the_order_of_words_matters(words):
    forth, back = words(*text([1, 2, 3], [3, 2, 1]))
    assert (forth - back).norm() > 1e-2 * forth.norm()


def test_padding_has_no_influence(words):
    ids, mask = text([1, 2, 3], [4])
    other = torch.where(mask.bool(), ids, 7)
    torch.testing.assert_close(words(other, mask), words(ids, mask))
    torch.testing.assert_close(words(ids[:, :4], mask[:, :4]), words(ids, mask))


def test_the_features_of_a_text_without_a_token_are_0(words):
    features = words(*text([], [1, 2]))
    assert not features[0].any()
    torch.testing.assert_close(features[1:], words(*text([1, 2])))


@pytest.mark.parametrize("side", ["image", "text"])
def test_every_parameter_learns(conv, words, side):
    tower, inputs = {"image": (conv, (torch.rand(4, 1, 32, 32),)), "text": (words, text([1, 2], [3], [4, 5, 6]))}[side]
    (tower(*inputs) * torch.randn(tower.features)).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in tower.parameters())


@pytest.mark.parametrize("side", ["image", "text"])
def test_bfloat16_autocast_stays_close(conv, words, side):
    tower, inputs = {"image": (conv, (torch.rand(4, 1, 32, 32),)), "text": (words, text([1, 2], [3], [4, 5, 6]))}[side]
    plain = tower(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        features = tower(*inputs)
    assert (features.float() - plain).norm() < 0.03 * plain.norm()
    features.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in tower.parameters())


def test_the_default_towers_are_small():
    towers = [ConvTower(channels=1), WordsTower(vocabulary=1870, length=13)]
    assert sum(parameter.numel() for tower in towers for parameter in tower.parameters()) < 800_000
