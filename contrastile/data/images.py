"""Pixels of an image: decoding, random crops, and the augmentation of a whole batch.

Decoding one image takes at most 100 MB beside the bytes of its file, and about a second. A few bytes may promise
gigabytes of pixels, hundreds of passes over them, or millions of parts. The header says how many, so an image over a
limit is skipped before a pixel is decoded. The bytes per pixel were measured with Pillow 13;
`tests/test_hostile_images.py` measures them again. Only formats that Pillow decodes itself are opened. All randomness
comes from a seed or generator passed in.
"""

import math
import re
import struct
import warnings
from collections.abc import Callable, Iterator
from io import BytesIO
from itertools import repeat

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from contrastile._errors import invalid
from contrastile.data.base import Images, Shape, Skipped
from contrastile.data.sources import FORMATS

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

# the memory of a decoded image with its copies, less what is converted at once; the pixels that a header may promise
MOST_MEMORY, MOST_PIXELS, LONGEST_SIDE = 96_000_000, 64_000_000, 65_535
# the pixels of an image that Pillow decodes in Python, by the names of these decoders: a microsecond for each
MOST_SLOW_PIXELS, SLOW_DECODERS = 1 << 20, {"ppm", "ppm_plain", "bmp_rle"}
# the bytes of an image file: more than 64 megapixels take in any format
MOST_BYTES = 1 << 28
# the scans of a JPEG, of which encoders write about ten
MOST_SCANS = 50
# the parts of a file, with one more for each kilobyte; the bytes between parts, which mean nothing
MOST_PARTS, MOST_FILLING = 4096, 1 << 16
# the chunks of a PNG that are unpacked, each to so many bytes at most
PACKED_CHUNKS, PACKED_BYTES = (b"zTXt", b"iTXt", b"iCCP"), 1 << 20
# a marker of a JPEG that begins a segment, or ends the image; the others have no length
MARKER = re.compile(rb"\xff+([^\x00\x01\xff\xd0-\xd8])", re.DOTALL)
# the markers of frames, which are not those of tables; of frames that are refined by scans
FRAMES, PROGRESSIVE = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}, {0xC2, 0xC6, 0xCA, 0xCE}
# tags of a TIFF: its orientation, the rows of a strip, the width and the length of a tile
ORIENTATION, STRIP_ROWS, TILE_WIDTH, TILE_LENGTH = 274, 278, 322, 323
# types of a TIFF's values that are kept as bytes
BYTES = (1, 2, 6, 7)
# a comment in the header of a PPM
COMMENT = re.compile(rb"#[^\r\n]*")

# left, top, right, bottom in pixels
Box = tuple[float, float, float, float]


def decode(content: bytes, shape: Shape, crop: Callable[[int, int], Box] | None = None) -> Images:
    """The image of a file as uint8 `[C, S, S]`, resampled: its middle square, or the box of `crop(width, height)`.

    Raises `Skipped` with the reason; for an image over a limit before it is decoded.
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
    beside, mode = check_parts(content), _mode(shape)
    with Image.open(BytesIO(content), formats=(*FORMATS,)) as image:
        check_size(image)
        width, height = image.size
        left, top, right, bottom = crop(width, height) if crop else (0, 0, width, height)
        # a JPEG can be decoded at a fraction of its size; the box keeps at least twice the size wanted
        image.draft(None, (round(2 * shape[1] * width / (right - left)), round(2 * shape[2] * height / (bottom - top))))
        check_memory(decoding_memory(image) + beside)
        across, down = image.width / width, image.height / height
        image.load()
        turn, box = image.getexif().get(ORIENTATION), (0, 0, *image.size)
        if crop is not None:
            left, top = round(left * across), round(top * down)
            box = (left, top, max(round(right * across), left + 1), max(round(bottom * down), top + 1))
        copied = crop is not None or turn in TURNS or not _is_plain(image, mode)
        # a part that is cut out is copied once more, for torch
        check_memory(image.width * image.height * (8 if crop else stored(image.mode) + 4 * copied))
        return _converted(image, mode, box), turn


def squared(image: Image.Image, shape: Shape) -> Images:
    """An image of any size as uint8 `[C, S, S]`: upright, its middle square, resampled, grey or in colour."""
    plain = _converted(image, _mode(shape), (0, 0, *image.size))
    return _middle(_turned(plain, image.getexif().get(ORIENTATION)), shape)


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
        raise invalid("picture", "have finite pixels", f"{low} to {high}", "Replace what is not a number.")
    largest = next((largest for largest in ranges if low >= 0 and high <= largest), None)
    if largest is not None:
        return 255 / largest, 0.0
    # one value alone is black
    return (255 / (high - low), -255 * low / (high - low)) if high > low else (0.0, 0.0)


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


def stored(mode: str) -> int:
    return 2 if mode.startswith("I;16") else 1 if mode in ("1", "L", "P") else 4


def check_memory(size: int) -> None:
    if size > MOST_MEMORY:
        raise Skipped("picture over 100 MB to decode")


def check_size(image: Image.Image) -> None:
    """Raise `Skipped` for an opened image with too many pixels, or a side too long: every row costs memory too."""
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise Skipped("picture over 64 megapixels")
    if max(width, height) > LONGEST_SIDE:
        raise Skipped(f"picture with a side over {LONGEST_SIDE:,}")


def decoding_memory(image: Image.Image) -> int:
    """The bytes that loading an opened image takes at most, at its present size; `Skipped` for one that takes long."""
    width, height = image.size
    pixels = width * height
    if pixels > MOST_SLOW_PIXELS and any(tile[0] in SLOW_DECODERS for tile in image.tile):
        raise Skipped("picture too large for its format")
    extra = 0
    if image.format == "WEBP":
        # two canvases, their copy as bytes, and the pixels of a lossless image
        extra = 16 * pixels
    elif image.format == "TIFF":
        tags = image.tag_v2
        strip = width * min(int(tags.get(STRIP_ROWS, height)), height)
        tile = int(tags.get(TILE_WIDTH, 0)) * int(tags.get(TILE_LENGTH, 0))
        # up to six samples of 16 bits; Pillow turns the image while it loads it
        extra = 12 * max(strip, tile) + (4 * pixels if tags.get(ORIENTATION, 1) != 1 else 0)
    return stored(image.mode) * pixels + extra


def check_parts(content: bytes) -> int:
    """The memory that the parts of a file take beside its pixels; `Skipped` where there are too many.

    Pillow visits segments, chunks, blocks and lists of numbers in Python, and each scan of a JPEG visits all pixels.
    """
    memory, most = 0, MOST_PARTS + len(content) // 1024
    for number, size in enumerate(PARTS.get(content[:2], _ppm)(content)):
        if number > most:
            raise _too_many()
        memory += size
    return memory


def _too_many() -> Skipped:
    return Skipped("picture in too many parts")


def _jpeg(content: bytes) -> Iterator[int]:
    """The segments of a JPEG; the coefficients are held until the last of several scans is read."""
    position, components, coefficients, scans, filling, progressive = 2, 0, 0, 0, 0, False
    while (match := MARKER.search(content, position)) and match[1] != b"\xd9":
        marker, start = match[1][0], match.end() + 2
        filling += 0 if scans else match.end() - position
        position = max(start, match.end() + int.from_bytes(content[match.end() : start], "big"))
        if marker in FRAMES and len(content) > start + 5:
            progressive, components = marker in PROGRESSIVE, content[start + 5]
            coefficients = _coefficients(content[start : start + 6 + 3 * components])
        elif marker == 0xDA:
            scans += 1
            # one scan with all components is the whole image
            if not progressive and content[start : start + 1] == bytes([components]):
                return
        if scans > MOST_SCANS or filling > MOST_FILLING:
            raise _too_many()
        yield 0
    yield coefficients


def _coefficients(frame: bytes) -> int:
    """The bytes of all coefficients of a frame: blocks of 64 with 2 bytes each, subsampled by component."""
    height, width = int.from_bytes(frame[1:3], "big"), int.from_bytes(frame[3:5], "big")
    factors = [divmod(sampling, 16) for sampling in frame[7::3]]
    most_across, most_down = (max(1, *(factor[axis] for factor in factors)) if factors else 1 for axis in (0, 1))
    across, down = -(-width // (8 * most_across)), -(-height // (8 * most_down))
    return sum(across * horizontal * down * vertical * 128 for horizontal, vertical in factors)


def _png(content: bytes) -> Iterator[int]:
    position = 8
    while position + 8 <= len(content):
        size, kind = struct.unpack_from(">I4s", content, position)
        yield PACKED_BYTES if kind in PACKED_CHUNKS else 0
        position += 12 + size


def _riff(content: bytes) -> Iterator[int]:
    position = 12
    while position + 8 <= len(content):
        (size,) = struct.unpack_from("<I", content, position + 4)
        yield 0
        position += 8 + size + size % 2


def _gif(content: bytes) -> Iterator[int]:
    """The blocks of a GIF before its first image, and each byte between them."""
    flags = content[10] if len(content) > 10 else 0
    position = 13 + (6 << (flags & 7) if flags & 128 else 0)
    while (kind := content[position : position + 1]) not in (b"", b",", b";"):
        yield 0
        position += 1
        if kind == b"!":
            position += 1
            while size := int.from_bytes(content[position : position + 1]):
                yield 0
                position += 1 + size
            position += 1


def _tiff(content: bytes) -> Iterator[int]:
    order = "<" if content.startswith(b"II") else ">"
    big = content[2:4] in (b"+\0", b"\0+")
    where, count, entry = ("8xQ", "Q", "HHQ8x") if big else ("4xI", "H", "HHI4x")
    try:
        (start,) = struct.unpack_from(order + where, content)
        (entries,) = struct.unpack_from(order + count, content, start)
        first, step = start + struct.calcsize(order + count), struct.calcsize(order + entry)
        for position in range(first, first + entries * step, step):
            _, kind, values = struct.unpack_from(order + entry, content, position)
            yield from repeat(0, 1 if kind in BYTES else values)
    # a directory that lies outside of the file
    except (struct.error, OverflowError):
        return


def _ppm(content: bytes) -> Iterator[int]:
    """The header of a PPM: Pillow reads it byte by byte."""
    tokens = COMMENT.sub(b" ", content[:MOST_FILLING]).split(None, 3)
    if content.startswith(b"P") and len(content) > MOST_FILLING and len(tokens) < 4:
        raise _too_many()
    yield 0


# readers of the parts, by the first bytes of a file
PARTS: dict[bytes, Callable[[bytes], Iterator[int]]] = {
    b"\xff\xd8": _jpeg, b"\x89P": _png, b"RI": _riff, b"GI": _gif, b"II": _tiff, b"MM": _tiff,
}  # fmt: skip
