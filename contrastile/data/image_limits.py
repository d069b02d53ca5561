"""Limits of what decoding one image may take: 100 MB beside the bytes of its file, and about a second.

A few bytes may promise gigabytes of pixels, hundreds of passes over them, or millions of parts. The header says how
many, so an image over a limit is skipped before a pixel is decoded. The bytes per pixel were measured with Pillow 13;
`tests/test_hostile_images.py` measures them again.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from itertools import repeat

from PIL import Image

from contrastile.data.base import Skipped

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
