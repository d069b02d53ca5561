"""Augmentation of a whole batch: stored bytes become floats, with or without small distortions.

Stands between the `PairSet` and the image tower. All randomness comes from the generator that is passed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Augmentation:
    """The ranges that distortions are drawn from.

    Angles are in degrees, scales a factor either way, shifts a share of the image. `blur` is the largest weight of a
    smoothed copy, from 0 to 1.
    """

    rotation: float = 8.0
    shear: float = 12.0
    scale: float = 1.25
    shift: float = 0.08
    blur: float = 1.0


@dataclass(frozen=True)
class AugmentParameters:
    """The distortion of each image: matrices `[B, 2, 3]` for affine_grid, weights of the blur `[B]`."""

    matrices: Tensor
    blur: Tensor

    def __getitem__(self, rows: slice) -> AugmentParameters:
        return AugmentParameters(self.matrices[rows], self.blur[rows])

    def to(self, device: torch.device) -> AugmentParameters:
        """The same parameters on another device."""
        return AugmentParameters(self.matrices.to(device), self.blur.to(device))


def draw_parameters(count: int, generator: torch.Generator, ranges: Augmentation = Augmentation()) -> AugmentParameters:
    """Random parameters for `count` images, on the generator's device."""
    return AugmentParameters(_matrices(count, generator, ranges), _uniform(count, generator, 0.0, ranges.blur))


def prepare(images: Tensor) -> Tensor:
    """uint8 `[B, C, S, S]` as float32 in [0, 1].

    >>> prepare(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)).max()
    tensor(1.)
    """
    return images.float() / 255


def augment(images: Tensor, parameters: AugmentParameters) -> Tensor:
    """uint8 `[B, C, S, S]` as float32 in [0, 1], each image distorted and blurred by its own parameters.

    Pixels from outside of an image repeat its border.
    """
    grid = F.affine_grid(parameters.matrices, list(images.shape), align_corners=False)
    warped = F.grid_sample(prepare(images), grid, padding_mode="border", align_corners=False)
    smoothed = warped
    # each pixel becomes the mean of its 3 × 3 neighbours within the image, twice
    for _ in range(2):
        smoothed = F.avg_pool2d(smoothed, 3, stride=1, padding=1, count_include_pad=False)
    return torch.lerp(warped, smoothed, parameters.blur[:, None, None, None])


def _uniform(count: int, generator: torch.Generator, low: float, high: float) -> Tensor:
    return low + (high - low) * torch.rand(count, generator=generator, device=generator.device)


def _matrices(count: int, generator: torch.Generator, ranges: Augmentation) -> Tensor:
    """`[B, 2, 3]`: shift after rotation after shear after scale, in the coordinates of affine_grid, from -1 to 1."""
    angle = _uniform(count, generator, -math.radians(ranges.rotation), math.radians(ranges.rotation))
    slant = _uniform(count, generator, -math.radians(ranges.shear), math.radians(ranges.shear)).tan()
    x_scale, y_scale = (
        _uniform(count, generator, -math.log(ranges.scale), math.log(ranges.scale)).exp() for _ in range(2)
    )
    x, y = (_uniform(count, generator, -2 * ranges.shift, 2 * ranges.shift) for _ in range(2))
    cos, sin = angle.cos(), angle.sin()
    rows = [cos * x_scale, (cos * slant - sin) * y_scale, x, sin * x_scale, (sin * slant + cos) * y_scale, y]
    return torch.stack(rows, dim=1).view(count, 2, 3)
