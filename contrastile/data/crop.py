"""Random resized crops: the augmentation of CLIP and of the papers after it.

Stands between the bytes of a collection and its pixels; `augment.py` distorts images that are decoded already. Scale
from 0.08 to 1, ratio from 3/4 to 4/3 (Inception's, Szegedy et al. 2014; section 4.1 of Inf-CL, arXiv:2410.17243). No
mirroring, because a caption may name left and right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Box = tuple[float, float, float, float]
Boxes = Callable[[int, int], Box]

# draws until a box lies within the image
TRIES = 10


@dataclass(frozen=True)
class Crop:
    """Random boxes: their area is a share of the image within `scale`, width over height lies within `ratio`.

    The box of an image depends on `seed` and on its place, the number of the example in the run, alone.
    """

    seed: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def box(self, place: int) -> Boxes:
        """For the image at `place`: a function from width and height to left, top, right, bottom, in whole pixels.

        >>> Crop(0, scale=(1.0, 1.0), ratio=(1.0, 1.0)).box(7)(40, 40)
        (0, 0, 40, 40)
        """

        def box(width: int, height: int) -> Box:
            random = np.random.default_rng((self.seed, place))
            for _ in range(TRIES):
                area = width * height * random.uniform(*self.scale)
                ratio = math.exp(random.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
                w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
                if 0 < w <= width and 0 < h <= height:
                    left, top = (int(random.integers(margin + 1)) for margin in (width - w, height - h))
                    return left, top, left + w, top + h
            return self._middle(width, height)

        return box

    def _middle(self, width: int, height: int) -> Box:
        """The largest box in the middle that the ratio allows, for an image too long for every try."""
        low, high = self.ratio
        w = min(width, max(1, round(height * high)))
        h = min(height, max(1, round(width / low)))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h
