"""Pixels of an image: decoding, random crops, and the augmentation of a whole batch.

Stands below every source of images and the training step. The header of a file is checked before anything is decoded,
and only formats that Pillow decodes itself are opened. All randomness comes from a seed or generator passed in.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile.data.base import Images, Skipped

if TYPE_CHECKING:
    from PIL import Image

# the limit on the pixels that a header promises: a few bytes may promise gigabytes
MOST_PIXELS = 64_000_000
# the formats that Pillow decodes itself; for others it may call programs of the machine
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# random crops: their share of the image's area, their width over height, and the draws until one lies within the image
CROP_SCALE, CROP_RATIO, CROP_TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10

# left, top, right, bottom in pixels
Box = tuple[float, float, float, float]


def decode(file: Path | BytesIO, shape: tuple[int, int, int], crop: Callable[[int, int], Box] | None = None) -> Images:
    """One image as uint8 `[C, S, S]`, resampled: its middle square, or the box that `crop(width, height)` returns.

    Raises `Skipped` with the reason.
    """
    from PIL import Image

    try:
        # Pillow's own limit on pixels is a warning up to twice its size; the limit here is checked below and is lower
        with warnings.catch_warnings(action="ignore"), Image.open(file, formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise Skipped("picture over 64 megapixels")
            if crop is not None:
                return _cropped(image, shape, crop(*image.size))
            # a JPEG can be decoded at a fraction of its size
            image.draft(None, (2 * shape[1], 2 * shape[2]))
            return squared(image, shape)
    except FileNotFoundError as failure:
        raise Skipped("missing picture") from failure
    except Image.DecompressionBombError as failure:
        raise Skipped("picture over 64 megapixels") from failure
    except Skipped:
        raise
    # a decoder raises any exception on a broken file
    except Exception as failure:
        raise Skipped("broken picture") from failure


def squared(image: Image.Image, shape: tuple[int, int, int]) -> Images:
    """An image of any size as uint8 `[C, S, S]`: upright, its middle square, resampled, grey or in colour."""
    from PIL import Image, ImageOps

    channels, size, _ = shape
    plain = _flattened(ImageOps.exif_transpose(image)).convert("L" if channels == 1 else "RGB")
    square = ImageOps.fit(plain, (size, size), Image.Resampling.BICUBIC)
    return np.asarray(square).reshape(size, size, channels).transpose(2, 0, 1).copy()


def _cropped(image: Image.Image, shape: tuple[int, int, int], box: Box) -> Images:
    """The pixels within `box`, cut as they lie in the file, turned upright, resampled.

    The filter is torch's bicubic with antialiasing: Pillow's own but for a rounding, in a quarter of its time.
    """
    from PIL import ImageOps

    channels, size, _ = shape
    width, height = image.size
    # a JPEG can be decoded at a fraction of its size; the box keeps at least twice the size wanted
    image.draft(None, (round(2 * size * width / (box[2] - box[0])), round(2 * size * height / (box[3] - box[1]))))
    across, down = image.width / width, image.height / height
    left, top = round(box[0] * across), round(box[1] * down)
    right, bottom = max(round(box[2] * across), left + 1), max(round(box[3] * down), top + 1)
    crop = _flattened(ImageOps.exif_transpose(image.crop((left, top, right, bottom))))
    mode = "L" if channels == 1 else "RGB"
    pixels = np.asarray(crop if crop.mode == mode else crop.convert(mode))
    batch = torch.from_numpy(pixels).view(1, crop.height, crop.width, channels).permute(0, 3, 1, 2)
    return F.interpolate(batch, (size, size), mode="bicubic", antialias=True)[0].numpy()


def _flattened(image: Image.Image) -> Image.Image:
    """Transparent images on white; images of 16 bits reduced to 8, which Pillow would clip instead."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image, dtype=np.uint16) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        paper = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(paper, image.convert("RGBA"))
    return image


def crop_box(seed: int, example: int, width: int, height: int) -> Box:
    """The box of a random resized crop, the augmentation of CLIP, in whole pixels.

    Its area and its width over height are drawn as Inception's (Szegedy et al. 2014; section 4.1 of Inf-CL,
    arXiv:2410.17243); `seed` and the number of the example in the run decide alone. No mirroring, because a caption may
    name left and right.
    """
    (low, high), random = CROP_RATIO, np.random.default_rng((seed, example))
    for _ in range(CROP_TRIES):
        area = width * height * random.uniform(*CROP_SCALE)
        ratio = math.exp(random.uniform(math.log(low), math.log(high)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = (int(random.integers(margin + 1)) for margin in (width - w, height - h))
            return left, top, left + w, top + h
    # an image too long for every try: the largest box in the middle that the ratio allows
    w, h = min(width, max(1, round(height * high))), min(height, max(1, round(width / low)))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def draw_parameters(
    count: int,
    generator: torch.Generator,
    *,
    rotation: float = 8.0,
    shear: float = 12.0,
    scale: float = 1.25,
    shift: float = 0.08,
    blur: float = 1.0,
) -> Tensor:
    """Random distortions of `count` images, on the generator's device: `[count, 7]`.

    Six numbers are the matrix `[2, 3]` for affine_grid (shift after rotation after shear after scale, in its
    coordinates from -1 to 1), the last is the weight of a smoothed copy, up to `blur`. Angles are in degrees either
    way, scales a factor either way, shifts a share of the image.
    """

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator, device=generator.device)

    rotation, shear, scale = math.radians(rotation), math.radians(shear), math.log(scale)
    angle, slant = uniform(-rotation, rotation), uniform(-shear, shear).tan()
    x_scale, y_scale = (uniform(-scale, scale).exp() for _ in range(2))
    x, y = (uniform(-2 * shift, 2 * shift) for _ in range(2))
    cos, sin = angle.cos(), angle.sin()
    rows = [cos * x_scale, (cos * slant - sin) * y_scale, x, sin * x_scale, (sin * slant + cos) * y_scale, y]
    return torch.stack([*rows, uniform(0.0, blur)], dim=1)


def prepare(images: Tensor) -> Tensor:
    """uint8 `[B, C, S, S]` as float32 in [0, 1].

    >>> prepare(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)).max()
    tensor(1.)
    """
    return images.float() / 255


def augment(images: Tensor, parameters: Tensor) -> Tensor:
    """uint8 `[B, C, S, S]` as float32 in [0, 1], each image distorted and blurred by its own `parameters` `[B, 7]`.

    Pixels from outside of an image repeat its border.
    """
    matrices, blur = parameters[:, :6].reshape(-1, 2, 3), parameters[:, 6]
    grid = F.affine_grid(matrices, list(images.shape), align_corners=False)
    warped = F.grid_sample(prepare(images), grid, padding_mode="border", align_corners=False)
    smoothed = warped
    # each pixel becomes the mean of its 3 × 3 neighbours within the image, twice
    for _ in range(2):
        smoothed = F.avg_pool2d(smoothed, 3, stride=1, padding=1, count_include_pad=False)
    return torch.lerp(warped, smoothed, blur[:, None, None, None])
