"""From stored bytes to what the towers see, a whole batch at once, with or without small distortions.

Between the `PairSet` and the image tower. All randomness comes from the generator that is passed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Augmentation:
    """How far a picture may be bent.

    Angles are in degrees, scales a factor either way, shifts a share of the picture. `blur` is how much of a smoothed
    copy may be mixed in, from 0 to 1.
    """

    rotation: float = 8.0
    shear: float = 12.0
    scale: float = 1.25
    shift: float = 0.08
    blur: float = 1.0


def prepare(images: Tensor) -> Tensor:
    """uint8 `[B, C, S, S]` as float32 in [0, 1].

    >>> prepare(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)).max()
    tensor(1.)
    """
    return images.float() / 255


@dataclass(frozen=True)
class Lots:
    """What fell to each picture: matrices `[B, 2, 3]` for affine_grid, and how much of it is blurred, `[B]`."""

    matrices: Tensor
    blur: Tensor

    def __getitem__(self, some: slice) -> Lots:
        return Lots(self.matrices[some], self.blur[some])

    def to(self, device: torch.device) -> Lots:
        """Where the pictures are."""
        return Lots(self.matrices.to(device), self.blur.to(device))


def augment(images: Tensor, generator: torch.Generator, how: Augmentation = Augmentation()) -> Tensor:
    """uint8 `[B, C, S, S]` as float32 in [0, 1], each picture bent and blurred by its own lot.

    The generator lives on the images' device. What comes in from outside continues the picture's border.
    """
    return bend(images, draw(len(images), generator, how))


def draw(count: int, generator: torch.Generator, how: Augmentation = Augmentation()) -> Lots:
    """Lots for `count` pictures, on the generator's device."""
    return Lots(_matrices(count, generator, how), _uniform(count, generator, 0.0, how.blur))


def bend(images: Tensor, lots: Lots) -> Tensor:
    """`augment` with lots that were drawn before."""
    grid = F.affine_grid(lots.matrices, list(images.shape), align_corners=False)
    bent = F.grid_sample(prepare(images), grid, padding_mode="border", align_corners=False)
    return torch.lerp(bent, _smoothed(bent), lots.blur[:, None, None, None])


def _uniform(count: int, generator: torch.Generator, low: float, high: float) -> Tensor:
    return low + (high - low) * torch.rand(count, generator=generator, device=generator.device)


def _matrices(count: int, generator: torch.Generator, how: Augmentation) -> Tensor:
    """`[B, 2, 3]`: shift after rotation after shear after scale, in the coordinates of affine_grid, from -1 to 1."""
    angle = _uniform(count, generator, -math.radians(how.rotation), math.radians(how.rotation))
    slant = _uniform(count, generator, -math.radians(how.shear), math.radians(how.shear)).tan()
    wide, high = (_uniform(count, generator, -math.log(how.scale), math.log(how.scale)).exp() for _ in range(2))
    x, y = (_uniform(count, generator, -2 * how.shift, 2 * how.shift) for _ in range(2))
    cos, sin = angle.cos(), angle.sin()
    rows = [cos * wide, (cos * slant - sin) * high, x, sin * wide, (sin * slant + cos) * high, y]
    return torch.stack(rows, dim=1).view(count, 2, 3)


def _smoothed(images: Tensor) -> Tensor:
    """Each pixel the mean of its 3 × 3 neighbours within the picture, taken twice."""
    for _ in range(2):
        images = F.avg_pool2d(images, 3, stride=1, padding=1, count_include_pad=False)
    return images
