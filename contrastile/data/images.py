"""Pixels of an image: decoding, random crops, and the augmentation of a whole batch.

The header of a file is checked before anything is decoded (`image_limits.py`), and only formats that Pillow decodes
itself are opened. All randomness comes from a seed or generator passed in.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from io import BytesIO

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from contrastile._errors import invalid
from contrastile.data import image_limits as limits
from contrastile.data.base import Images, Shape, Skipped

# the formats that Pillow decodes itself; for others it may call programs of the machine
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# random crops: their share of the image's area, their width over height, and the draws until one lies within the image
CROP_SCALE, CROP_RATIO, CROP_TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
# Pillow's names of the turns that the values of EXIF's orientation ask for
TURNS = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip
# ranges of an augmentation: degrees either way, a factor either way, a share of the image, a smoothed copy's weight
RANGES = {"rotation": 8.0, "shear": 12.0, "scale": 1.25, "shift": 0.08, "blur": 1.0}
# the pixels that are converted at once, so that a conversion takes no second copy of an image
BAND = 1 << 17

# left, top, right, bottom in pixels
Box = tuple[float, float, float, float]


def decode(content: bytes, shape: Shape, crop: Callable[[int, int], Box] | None = None) -> Images:
    """The image of a file as uint8 `[C, S, S]`, resampled: its middle square, or the box of `crop(width, height)`.

    Raises `Skipped` with the reason; for an image over the limits of `image_limits.py` before it is decoded.
    """
    try:
        # Pillow's own limit on pixels is a warning up to twice its size; the limit of `check_size` is lower
        with warnings.catch_warnings(action="ignore"):
            plain, turn = _opened(content, shape, crop)
        plain = _turned(plain, turn)
        if crop is None:
            return _middle(plain, shape)
        pixels = torch.from_numpy(_array(plain))[None].permute(0, 3, 1, 2)
        del plain
        # the filter of Pillow but for a rounding, in a quarter of its time
        return F.interpolate(pixels, shape[1:], mode="bicubic", antialias=True)[0].numpy()
    except Image.DecompressionBombError as failure:
        raise Skipped("picture over 64 megapixels") from failure
    except Skipped:
        raise
    # a decoder raises any exception on a broken file
    except Exception as failure:
        raise Skipped("broken picture") from failure


def _opened(content: bytes, shape: Shape, crop: Callable[[int, int], Box] | None) -> tuple[Image.Image, object]:
    """The image, or its part within the box, in grey or colour as it lies in the file, and its orientation."""
    beside, mode = limits.check_parts(content), _mode(shape)
    with Image.open(BytesIO(content), formats=FORMATS) as image:
        limits.check_size(image)
        width, height = image.size
        left, top, right, bottom = crop(width, height) if crop else (0, 0, width, height)
        # a JPEG can be decoded at a fraction of its size; the box keeps at least twice the size wanted
        image.draft(None, (round(2 * shape[1] * width / (right - left)), round(2 * shape[2] * height / (bottom - top))))
        limits.check_memory(limits.decoding_memory(image) + beside)
        across, down = image.width / width, image.height / height
        image.load()
        turn, box = image.getexif().get(limits.ORIENTATION), (0, 0, *image.size)
        if crop is not None:
            left, top = round(left * across), round(top * down)
            box = (left, top, max(round(right * across), left + 1), max(round(bottom * down), top + 1))
        copied = crop is not None or turn in TURNS or not _is_plain(image, mode)
        # a part that is cut out is copied once more, for torch
        limits.check_memory(image.width * image.height * (8 if crop else limits.stored(image.mode) + 4 * copied))
        return _converted(image, mode, box), turn


def squared(image: Image.Image, shape: Shape) -> Images:
    """An image of any size as uint8 `[C, S, S]`: upright, its middle square, resampled, grey or in colour."""
    plain = _converted(image, _mode(shape), (0, 0, *image.size))
    return _middle(_turned(plain, image.getexif().get(limits.ORIENTATION)), shape)


def _mode(shape: Shape) -> str:
    return "L" if shape[0] == 1 else "RGB"


def _turned(image: Image.Image, orientation: object) -> Image.Image:
    return image.transpose(Image.Transpose[TURNS[orientation]]) if orientation in TURNS else image


def _middle(image: Image.Image, shape: Shape) -> Images:
    channels, size, _ = shape
    square = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
    return np.asarray(square).reshape(size, size, channels).transpose(2, 0, 1).copy()


def _bands(box: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
    left, top, right, bottom = box
    rows = max(1, BAND // (right - left))
    for start in range(top, bottom, rows):
        yield left, start, right, min(start + rows, bottom)


def _array(image: Image.Image) -> Images:
    pixels = np.empty((image.height, image.width, len(image.getbands())), np.uint8)
    for band in _bands((0, 0, *image.size)):
        pixels[band[1] : band[3]] = np.asarray(image.crop(band)).reshape(-1, *pixels.shape[1:])
    return pixels


def _is_plain(image: Image.Image, mode: str) -> bool:
    return image.mode == mode and not image.has_transparency_data


def _converted(image: Image.Image, mode: str, box: tuple[int, ...]) -> Image.Image:
    """The part of an image within `box`, in grey ("L") or in colour ("RGB"), transparent images on white."""
    if box == (0, 0, *image.size) and _is_plain(image, mode):
        return image
    stretch = _stretch(image)
    bands = ((band, _flattened(image.crop(band), stretch).convert(mode)) for band in _bands(box))
    (_, top, _, end), first = next(bands)
    if end == box[3]:
        return first
    whole = Image.new(mode, (box[2] - box[0], box[3] - box[1]))
    whole.paste(first, (0, 0))
    for band, plain in bands:
        whole.paste(plain, (0, band[1] - top))
    return whole


def _stretch(image: Image.Image) -> tuple[float, float] | None:
    """The factor and the summand that bring pixels of 32 bits to 0 ... 255; None for other images.

    Pixels from 0 to 1 (in fractions), to 255 or to 65,535 are divided by the first of these bounds that holds them;
    others are stretched from the least to the largest.
    """
    if image.mode not in ("I", "F"):
        return None
    # 16 bits by the header
    ranges = (65_535.0,) if image.format == "PPM" else (1.0, 255.0, 65_535.0)[image.mode == "I" :]
    low, high = image.getextrema()
    if not (math.isfinite(low) and math.isfinite(high)):
        remedy = "Replace what is not a number."
        raise invalid("picture", "have finite pixels", f"{low} to {high}", remedy)
    largest = next((largest for largest in ranges if low >= 0 and high <= largest), None)
    if largest is not None:
        return 255 / largest, 0.0
    return 255 / (high - low), -255 * low / (high - low)


def _flattened(image: Image.Image, stretch: tuple[float, float] | None) -> Image.Image:
    """Transparent images on white; images of 16 or 32 bits reduced to 8, which Pillow would clip instead."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image, dtype=np.uint16) >> 8).astype(np.uint8))
    if stretch is not None:
        factor, summand = stretch
        # Pillow's form of a linear function; the conversion cuts off fractions and clips
        return image.point(lambda value: value * factor + summand).convert("L")
    if image.has_transparency_data:
        paper = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(paper, image.convert("RGBA"))
    return image


def crop_box(seed: int, example: int, width: int, height: int) -> Box:
    """The box of a random resized crop, the augmentation of CLIP, in whole pixels, by `seed` and `example` alone.

    Area and width over height are drawn as Inception's (Szegedy et al. 2014; section 4.1 of Inf-CL, arXiv:2410.17243).
    No mirroring, because a caption may name left and right.
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


def draw_parameters(count: int, generator: torch.Generator, **ranges: float) -> Tensor:
    """Random distortions of `count` images within `RANGES`, on the generator's device: `[count, 7]`.

    Six numbers are the matrix `[2, 3]` for affine_grid (shift after rotation after shear after scale), the last is the
    weight of a smoothed copy.
    """
    rotation, shear, scale, shift, blur = (RANGES | ranges).values()

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
    """uint8 `[B, C, S, S]` as float32 in [0, 1]."""
    return images.float() / 255


def augment(images: Tensor, parameters: Tensor) -> Tensor:
    """uint8 `[B, C, S, S]` as float32 in [0, 1], each image distorted and blurred by its own `parameters` `[B, 7]`."""
    matrices, blur = parameters[:, :6].reshape(-1, 2, 3), parameters[:, 6]
    grid = F.affine_grid(matrices, list(images.shape), align_corners=False)
    warped = F.grid_sample(prepare(images), grid, padding_mode="border", align_corners=False)
    smoothed = warped
    # each pixel becomes the mean of its 3 × 3 neighbours within the image, twice
    for _ in range(2):
        smoothed = F.avg_pool2d(smoothed, 3, stride=1, padding=1, count_include_pad=False)
    return torch.lerp(warped, smoothed, blur[:, None, None, None])
