"""Source: the built-in glyphs, images of characters from the fonts of matplotlib, each with its Unicode name.

Nothing is downloaded. There are about 54,000 pairs of 7,300 names in 18 faces. The handwritten digits of scikit-learn,
in the same form, are a zero-shot test. Two pairs share an id when they share the name or the very image, directly or
through other pairs: capital A is LATIN, GREEK, CYRILLIC ... CAPITAL LETTER A or ALPHA.

**Splits.** "faces": two whole faces, for the names of the training set, without images that the training set has in the
same pixels. "names": whole groups of names, whose every word still occurs in at least two names of the training set, so
that they are new compositions of known words. The names of the ten digits, which label scans, are never held out.
"""

import hashlib
import string
import unicodedata
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageFont

from contrastile.data.base import Images, Indices, groups_by_id, joined_ids, sorted_by_hash, sorted_rows
from contrastile.data.files import FORMAT
from contrastile.data.pairs import ImageWriter, Labels, PairOptions, PairSet, cached_pairs

HELD_OUT_FACES = ("DejaVuSans-BoldOblique.ttf", "STIXGeneralItalic.ttf")
DIGIT_NAMES = [unicodedata.name(digit) for digit in string.digits]

# the em square and the distance of the baseline from the top, as shares of the image: capitals and their accents fit
EM, BASELINE = 0.8, 0.75
# the height of a printed digit, and its middle from the top, as shares of the image
DIGIT_HEIGHT, DIGIT_MIDDLE = 0.62, 0.46
# glyphs are drawn so much larger, then averaged: at 32 pixels hinting would distort the shapes
SUPERSAMPLING = 2
# the least number of training names that have a word of a held-out name
WORD_OCCURRENCES = 2


def font_files() -> list[Path]:
    """The faces of matplotlib that map characters by Unicode; cm* has codes of TeX, STIXNonUni* private ones."""
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return sorted([*folder.glob("DejaVu*.ttf"), *folder.glob("STIXGeneral*.ttf")])


def open_glyphs(source: str, options: PairOptions) -> PairSet:  # noqa: ARG001
    faces = font_files()
    settings = {
        **options.settings, "format": FORMAT, "held_out_faces": HELD_OUT_FACES, "unicode": unicodedata.unidata_version,
        "faces": {face.name: hashlib.sha256(face.read_bytes()).hexdigest() for face in faces},
    }  # fmt: skip
    return cached_pairs(options.cache, "glyphs", settings, shape=options.shape, make=partial(_draw_all, faces, options))


def _draw_all(faces: list[Path], options: PairOptions, writer: ImageWriter) -> Labels:
    """Draw every named character of every face that leaves ink."""
    characters = [named_characters(face) for face in faces]
    names, style_held_out, digests, blank = list[str](), list[bool](), list[bytes](), 0
    with options.progress(sum(map(len, characters)), "drawing the glyphs", "images") as bar:
        for face, named in zip(faces, characters, strict=True):
            pen = Pen(face, writer.shape[1])
            for character, name in named:
                if (image := pen.draw(character)) is None:
                    blank += 1
                    continue
                writer.add(np.broadcast_to(image, writer.shape))
                names.append(name)
                style_held_out.append(face.name in HELD_OUT_FACES)
                digests.append(hashlib.sha256(image.tobytes()).digest())
            bar.update(len(named))
    ids = joined_ids(names, digests)
    splits = split(names, digests, ids, style_held_out=np.array(style_held_out, dtype=bool), share=options.held_out)
    return names, ids, splits, {"blank picture": blank} if blank else {}


def named_characters(face: Path) -> list[tuple[str, str]]:
    """The characters that a face has a glyph for and Unicode a name, in code point order."""
    from fontTools.ttLib import TTFont  # type: ignore[import-untyped]

    with TTFont(face, lazy=True) as font:
        characters = map(chr, sorted(font.getBestCmap()))
    return [(character, name) for character in characters if (name := unicodedata.name(character, ""))]


class Pen:
    """Draws characters of one face as `[size, size]` uint8, bright on dark, with one em and one baseline."""

    def __init__(self, face: Path, size: int) -> None:
        self.side = size * SUPERSAMPLING
        # the other layout engine fails on some code points, and single characters need no shaping
        self._font = ImageFont.truetype(face, round(EM * self.side), layout_engine=ImageFont.Layout.BASIC)

    def draw(self, character: str) -> Images | None:
        mask, (left, top) = self._font.getmask2(character, mode="L", anchor="ms")
        ink = Image.frombytes("L", mask.size, bytes(mask)) if mask.size[0] * mask.size[1] else None
        box = ink.getbbox() if ink is not None else None
        if ink is None or box is None:
            return None
        ink = ink.crop(box)
        x, y = self.side / 2 + left + box[0], BASELINE * self.side + top + box[1]
        # one pixel of the small image stays free all round
        ratio = (self.side - 2 * SUPERSAMPLING) / max(ink.size)
        if ratio < 1:
            width, height = (max(1, round(length * ratio)) for length in ink.size)
            ink = ink.resize((width, height), Image.Resampling.BOX)
        # moved as little as needed for the ink to lie within the margins
        low, high = SUPERSAMPLING, self.side - SUPERSAMPLING
        left, top = (min(max(round(start), low), high - length) for start, length in zip((x, y), ink.size, strict=True))
        canvas = Image.new("L", (self.side, self.side))
        canvas.paste(ink, (left, top))
        return np.asarray(canvas.reduce(SUPERSAMPLING))


def split(
    names: list[str], digests: list[bytes], ids: Indices, *, style_held_out: np.ndarray, share: float
) -> dict[str, Indices]:
    """Rows of "train", "faces" and "names", with about `share` of the names held out; see the top of this file."""
    name_held_out = np.zeros(len(names), dtype=bool)
    name_held_out[_names_to_hold_out(names, ids, np.flatnonzero(~style_held_out), share)] = True
    train = np.flatnonzero(~style_held_out & ~name_held_out)
    known_names = {names[row] for row in train}
    known_images = {digests[row] for row in train}
    faces = np.flatnonzero(style_held_out & ~name_held_out).tolist()
    faces = [row for row in faces if names[row] in known_names and digests[row] not in known_images]
    return {"train": train, "faces": sorted_rows(faces), "names": np.flatnonzero(name_held_out)}


def _names_to_hold_out(names: list[str], ids: Indices, trainable: Indices, share: float) -> list[int]:
    """Rows of whole groups in the order of their hash, until the share is reached; groups with rare words stay."""
    left = Counter(word for name in {names[row] for row in trainable} for word in name.split())
    wanted = round(share * len(set(names)))
    rows: list[int] = []
    for _, members in sorted_by_hash(groups_by_id(names, ids)):
        group = {names[row] for row in members}
        words = Counter(word for name in group for word in name.split())
        if wanted <= 0:
            break
        if group & set(DIGIT_NAMES) or any(left[word] - words[word] < WORD_OCCURRENCES for word in words):
            continue
        left -= words
        wanted -= len(group)
        rows.extend(members)
    return rows


def handwritten_digits(*, image_size: int, channels: int = 1) -> tuple[Images, Indices]:
    """The scans of scikit-learn, uint8 `[1797, channels, image_size, image_size]`, and their digits `[1797]`."""
    from sklearn.datasets import load_digits

    scans = load_digits()
    ink = torch.from_numpy(scans.images).float()[:, None] / scans.images.max()
    height = max(1, round(DIGIT_HEIGHT * image_size))
    enlarged = F.interpolate(ink, size=(height, height), mode="bicubic", align_corners=False).clamp(0, 1)
    canvas = torch.zeros(len(ink), channels, image_size, image_size)
    x, y = (image_size - height) // 2, round(DIGIT_MIDDLE * image_size - height / 2)
    canvas[:, :, y : y + height, x : x + height] = enlarged
    return (canvas * 255).round().byte().numpy(), scans.target.astype(np.int64)
