"""A random part of a picture, enlarged to the tower's size: the augmentation of CLIP and of the papers after it.

Between a collection's bytes and its pixels, beside `augment.py`, which bends what is already decoded. Scale from 0.08
to 1, ratio from 3/4 to 4/3 (Inception's, Szegedy et al. 2014; section 4.1 of Inf-CL, arXiv:2410.17243); never mirrored,
because a text may say what is left and what is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Box = tuple[float, float, float, float]
Boxes = Callable[[int, int], Box]

TRIES = 10


@dataclass(frozen=True)
class Crop:
    """Boxes whose area is a share of the picture between `scale`'s, width over height between `ratio`'s.

    The lots of a place (which example of the run it is) depend on it and on `seed` alone.
    """

    seed: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def words(self) -> list[Any]:
        """What `of_words` makes it from in another process."""
        return [self.seed, self.scale, self.ratio]

    @classmethod
    def of_words(cls, words: Sequence[Any]) -> Crop:
        """The same crop again."""
        seed, scale, ratio = words
        return cls(seed, tuple(scale), tuple(ratio))

    def box(self, place: int) -> Boxes:
        """For the picture at `place`: from width and height to left, top, right, bottom, in whole pixels.

        >>> Crop(0, scale=(1.0, 1.0), ratio=(1.0, 1.0)).box(7)(40, 40)
        (0, 0, 40, 40)
        """

        def box(width: int, height: int) -> Box:
            lot = np.random.default_rng((self.seed, place))
            for _ in range(TRIES):
                area = width * height * lot.uniform(*self.scale)
                ratio = math.exp(lot.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
                wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
                if 0 < wide <= width and 0 < high <= height:
                    left, top = (int(lot.integers(room + 1)) for room in (width - wide, height - high))
                    return left, top, left + wide, top + high
            return self._middle(width, height)

        return box

    def _middle(self, width: int, height: int) -> Box:
        """As much of the middle as the ratio allows, of a picture too long for every try."""
        low, high = self.ratio
        wide = min(width, max(1, round(height * high)))
        tall = min(height, max(1, round(width / low)))
        left, top = (width - wide) // 2, (height - tall) // 2
        return left, top, left + wide, top + tall
