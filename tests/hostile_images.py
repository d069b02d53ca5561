"""Images that promise more than they hold, and what an honest one may take: made by code, a few kilobytes each."""

import io
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from contrastile.data.base import Skipped
from contrastile.data.images import crop_box, decode

# classes of errors that tests expect, by their short names
MEMORY, PIXELS, SIDE = "picture over 100 MB to decode", "picture over 64 megapixels", "picture with a side over 65,535"
PARTS, SLOW, BROKEN = "picture in too many parts", "picture too large for its format", "broken picture"


def saved(size: tuple[int, int], kind: str, *, mode: str = "RGB", **options: object) -> bytes:
    """A black image of one format."""
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind, **options)
    return file.getvalue()


def noise(size: tuple[int, int], kind: str, *, channels: int = 3, **options: object) -> bytes:
    """An image that does not compress."""
    file = io.BytesIO()
    values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], channels), dtype=np.uint8)
    Image.fromarray(values).save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(size: tuple[int, int], *, depth: int = 8, colour: int = 2, extra: bytes = b"") -> bytes:
    """A black PNG, packed without ever being in memory."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    left = ((size[0] * channels * depth + 7) // 8 + 1) * size[1]
    packer, packed = zlib.compressobj(9), []
    while left > 0:
        packed.append(packer.compress(bytes(min(left, 1 << 22))))
        left -= 1 << 22
    header = struct.pack(">IIBBBBB", *size, depth, colour, 0, 0, 0)
    palette = chunk(b"PLTE", bytes(768)) if colour == 3 else b""
    data = chunk(b"IDAT", b"".join(packed) + packer.flush())
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + palette + extra + data + chunk(b"IEND", b"")


def scans(count: int) -> bytes:
    """A progressive JPEG whose last scan comes `count` times more."""
    plain = saved((4000, 4000), "JPEG", progressive=True)
    return plain[:-2] + plain[plain.rindex(b"\xff\xda") : -2] * count + plain[-2:]


def gif(blocks: bytes) -> bytes:
    """A GIF with further blocks before its image."""
    plain = saved((8, 8), "GIF", mode="P")
    start = plain.index(b",", 13 + 6)
    return plain[:start] + blocks + plain[start:]


def run_length_bmp(side: int) -> bytes:
    """A BMP of 8 bits, packed by the lengths of its runs."""
    header = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, 0, 0, 0, 256, 0)
    colours = b"".join(bytes((value, value, 255 - value, 0)) for value in range(256))
    content = b"BM" + struct.pack("<IHHI", 0, 0, 0, 54 + 1024) + header + colours
    return content + b"\xff\0" * (side * side // 255 + 1)


def tiff(size: tuple[int, int], mode: str = "RGB", **options: object) -> bytes:
    """A packed TIFF."""
    return saved(size, "TIFF", mode=mode, compression="tiff_deflate", **options)


def packed_texts() -> bytes:
    packed = zlib.compress(bytes(1 << 20))
    return b"".join(chunk(b"zTXt", b"%d\0\0" % number + packed) for number in range(60))


MARKS = chunk(b"tRNS", b"\0")

# the image, and the reason why it is skipped; None for one that is read
ATTACKS: dict[str, tuple[Callable[[], bytes], str | None]] = {
    "webp of 64 megapixels": (partial(saved, (16383, 3900), "WEBP", lossless=True, quality=0, method=0), MEMORY),
    "lossy webp of 64 megapixels": (partial(saved, (16383, 3900), "WEBP", quality=1, method=0), MEMORY),
    "webp with many chunks": (lambda: saved((8, 8), "WEBP") + b"XXXX\0\0\0\0" * 100_000, PARTS),
    "png of one column": (partial(png, (1, 63_999_999)), SIDE),
    "png of one row": (partial(png, (63_999_999, 1)), SIDE),
    "png over 64 megapixels": (partial(png, (8001, 8001), depth=1, colour=0), PIXELS),
    "png of 26 megapixels": (partial(png, (5200, 5000)), MEMORY),
    "png of 16 bits": (partial(png, (3600, 3600), depth=16, colour=6), MEMORY),
    "png of one bit": (partial(png, (7900, 7900), depth=1, colour=0), MEMORY),
    "png with a transparent colour": (partial(png, (4500, 4500), colour=3, extra=MARKS), MEMORY),
    "png with packed texts": (lambda: png((4500, 4500), extra=packed_texts()), MEMORY),
    "png of many chunks": (lambda: png((8, 8), extra=chunk(b"abCd", b"") * 100_000), PARTS),
    "progressive jpeg of 64 megapixels": (partial(saved, (8000, 8000), "JPEG", progressive=True), MEMORY),
    "progressive jpeg of 5,000 scans": (partial(scans, 5000), PARTS),
    "jpeg with many segments": (lambda: b"\xff\xd8" + b"\xff\xe1\0\2" * 1_000_000 + scans(0)[2:], PARTS),
    "jpeg with filling": (lambda: b"\xff\xd8\xff\xe1\0\2" + bytes(20_000_000) + scans(0)[2:], PARTS),
    "gif of 64 megapixels": (partial(saved, (8000, 8000), "GIF", mode="P"), MEMORY),
    "gif of many comments": (lambda: gif(b"!\xfe\1c\0" * 1_000_000), PARTS),
    "gif of a long comment": (lambda: gif(b"!\xfe" + b"\1c" * 1_000_000 + b"\0"), PARTS),
    "gif with filling": (lambda: gif(bytes(20_000_000)), PARTS),
    "tiff of one strip": (partial(tiff, (3500, 3500), strip_size=1 << 30), MEMORY),
    "tiff of 32-bit numbers": (partial(tiff, (3600, 3500), "F"), MEMORY),
    "tiff of many strips": (partial(tiff, (1, 60_000), strip_size=1), PARTS),
    "ppm in words": (lambda: b"P2\n3000 3000\n255\n" + b"0 " * 9_000_000, SLOW),
    "ppm with a long comment": (lambda: b"P6\n#" + b"x" * 20_000_000 + b"\n4 4\n255\n" + bytes(48), PARTS),
    "bmp of run lengths": (partial(run_length_bmp, 3500), SLOW),
    # honest images, as large as they may be
    "png of 12 megapixels": (partial(noise, (4000, 3000), "PNG", compress_level=0), None),
    "transparent png": (partial(png, (4000, 3000), colour=6), None),
    "webp of 4.8 megapixels": (
        partial(noise, (2400, 2000), "WEBP", channels=4, lossless=True, quality=0, method=0),
        None,
    ),
    "jpeg of 64 megapixels": (partial(saved, (8000, 8000), "JPEG"), None),
    "progressive jpeg of 24 megapixels": (partial(saved, (6000, 4000), "JPEG", progressive=True), None),
    "jpeg of 50 scans": (partial(scans, 40), None),
    "tiff of 9 megapixels": (partial(tiff, (3000, 3000)), None),
    "bmp of 12 megapixels": (partial(saved, (4000, 3000), "BMP"), None),
}


# those that take less than half a second to make and read
QUICK = (
    "webp with many chunks", "png of one column", "png of 16 bits", "png of many chunks",
    "progressive jpeg of 5,000 scans", "jpeg with many segments", "gif of a long comment", "tiff of one strip",
    "tiff of many strips", "ppm with a long comment", "bmp of run lengths", "transparent png",
    "jpeg of 64 megapixels",
)  # fmt: skip


def decoded(path: str, cut: bool) -> str | None:
    """Decode the middle of a file, or all of it as if it were cut out; the reason why it is skipped."""
    try:
        decode(Path(path).read_bytes(), (3, 224, 224), partial(crop_box, 0, 1) if cut else None)
    except Skipped as reason:
        return str(reason)
    return None
