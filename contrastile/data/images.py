"""Decoding of one image: from the bytes of a file to the square of uint8 that a tower sees.

Stands below every source of images. The header of a file is checked before anything is decoded, and only formats that
Pillow decodes itself are opened.
"""

from __future__ import annotations

import warnings
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from contrastile.data.base import Images
from contrastile.data.crop import Box, Boxes
from contrastile.data.skipped import Skipped

if TYPE_CHECKING:
    from PIL import Image

# the limit on the pixels that a header promises: a few bytes may promise gigabytes
MOST_PIXELS = 64_000_000

# the formats that Pillow decodes itself; for others it may call programs of the machine
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


def decode(file: Path | BytesIO, shape: tuple[int, int, int], crop: Boxes | None = None) -> Images:
    """One image as uint8 `[C, S, S]`: its middle square, or the part that `crop` names, resampled.

    Raises `Skipped` with the reason.
    """
    from PIL import Image

    try:
        # Pillow's own limit on pixels is a warning up to twice its size; the limit here is checked below and is lower
        with warnings.catch_warnings(action="ignore"), Image.open(file, formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise Skipped("picture over 64 megapixels")
            if crop is not None:
                return _part(image, shape, crop(*image.size))
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


def _part(image: Image.Image, shape: tuple[int, int, int], box: Box) -> Images:
    """The part within `box`, cut as it lies in the file, turned upright, resampled.

    The filter is torch's bicubic with antialiasing: Pillow's own but for a rounding, in a quarter of its time.
    """
    from PIL import ImageOps

    channels, size, _ = shape
    width, height = image.size
    # a JPEG can be decoded at a fraction of its size; the part keeps at least twice the size wanted
    image.draft(None, (round(2 * size * width / (box[2] - box[0])), round(2 * size * height / (box[3] - box[1]))))
    across, down = image.width / width, image.height / height
    left, top = round(box[0] * across), round(box[1] * down)
    right, bottom = max(round(box[2] * across), left + 1), max(round(box[3] * down), top + 1)
    part = _flattened(ImageOps.exif_transpose(image.crop((left, top, right, bottom))))
    mode = "L" if channels == 1 else "RGB"
    pixels = np.asarray(part if part.mode == mode else part.convert(mode))
    whole = torch.from_numpy(pixels).view(1, part.height, part.width, channels).permute(0, 3, 1, 2)
    return F.interpolate(whole, (size, size), mode="bicubic", antialias=True)[0].numpy()


def _flattened(image: Image.Image) -> Image.Image:
    """Transparent images on white; images of 16 bits reduced to 8, which Pillow would clip instead."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image, dtype=np.uint16) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        paper = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(paper, image.convert("RGBA"))
    return image
