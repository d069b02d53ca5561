"""The handwritten digits of scikit-learn, in the form of the glyphs: a distribution shift for a zero-shot test.

Stands beside `glyphs.py`; evaluation alone reads them. 1,797 scans of 8 × 8 pixels, never trained on.
"""

from __future__ import annotations

import string
import unicodedata

import numpy as np
import torch
import torch.nn.functional as F

from contrastile.data.base import Images, Indices

DIGIT_NAMES = [unicodedata.name(digit) for digit in string.digits]

# the height of a printed digit in a glyph's image, and its middle from the top, as shares of the image
HEIGHT, MIDDLE = 0.62, 0.46


def handwritten_digits(*, image_size: int, channels: int = 1) -> tuple[Images, Indices]:
    """The scans, uint8 `[1797, channels, image_size, image_size]`, ink bright on dark, and their digits `[1797]`.

    The name of digit `k` is `DIGIT_NAMES[k]`.
    """
    from sklearn.datasets import load_digits

    scans = load_digits()
    ink = torch.from_numpy(scans.images).float()[:, None] / scans.images.max()
    height = max(1, round(HEIGHT * image_size))
    enlarged = F.interpolate(ink, size=(height, height), mode="bicubic", align_corners=False).clamp(0, 1)
    canvas = torch.zeros(len(ink), channels, image_size, image_size)
    x, y = (image_size - height) // 2, round(MIDDLE * image_size - height / 2)
    canvas[:, :, y : y + height, x : x + height] = enlarged
    return (canvas * 255).round().byte().numpy(), scans.target.astype(np.int64)
