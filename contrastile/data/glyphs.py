"""The built-in data: pictures of characters from the fonts that matplotlib ships, each with its Unicode name.

A source of the flow's first box. Nothing is downloaded: the fonts lie on the disk wherever matplotlib is installed, the
names come with Python. About 54,000 pairs of 7,300 names in 18 faces.

**Ids.** Capital A is LATIN, GREEK, CYRILLIC, LISU ... CAPITAL LETTER A or ALPHA: one picture, several right names. Two
pairs get the same id when they share the name or the very picture, directly or through other pairs; in effect names are
joined that some face draws identically. On this data that is tame: the largest group joins 19 names (the capital I's),
and four fifths of the names stay alone, because a group grows only by pictures that agree in every pixel.

**Splits.** "faces": two whole faces, for the names that training knows; a picture that training shows in the very same
pixels (a face often borrows its neighbour's) tests nothing and is left out. "names": whole groups of names, whose every
word still occurs in at least two names of the training set, so that they are new compositions of known words. The names
of the ten digits are never held out: they are the labels of the handwritten digits.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np

from contrastile.data.cache import FORMAT, PictureWriter, cached_pairs
from contrastile.data.digits import DIGIT_NAMES
from contrastile.data.pairs import (
    Indices,
    Labels,
    PairSet,
    Pictures,
    ProgressFactory,
    groups_by_lot,
    joined_ids,
)

HELD_OUT_FACES = ("DejaVuSans-BoldOblique.ttf", "STIXGeneralItalic.ttf")

# the em square as a share of the picture, and where the baseline lies, from the top: capitals and their accents fit
EM, BASELINE = 0.8, 0.75
# drawn larger, then averaged: at 32 pixels hinting would bend the shapes
SUPERSAMPLING = 2
# a word of a held-out name occurs in at least so many names of the training set
WORD_OCCURRENCES = 2


def font_files() -> list[Path]:
    """The DejaVu and STIXGeneral faces of matplotlib, which map characters by Unicode.

    The others do not: cm* uses TeX's encodings, STIXNonUni* private code points, LastResort draws placeholders.
    """
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return sorted([*folder.glob("DejaVu*.ttf"), *folder.glob("STIXGeneral*.ttf")])


def open_glyphs(
    *,
    image_size: int,
    channels: int,
    held_out: float,
    cache: Path,
    progress: ProgressFactory,
    faces: list[Path] | None = None,
) -> PairSet:
    """All pairs of `faces` (default: `font_files()`), drawn once into a folder under `cache`."""
    faces = font_files() if faces is None else faces
    settings = {
        "format": FORMAT,
        "image_size": image_size,
        "channels": channels,
        "held_out": held_out,
        "held_out_faces": HELD_OUT_FACES,
        "unicode": unicodedata.unidata_version,
        "faces": {face.name: hashlib.sha256(face.read_bytes()).hexdigest() for face in faces},
    }

    def make(writer: PictureWriter) -> Labels:
        return _draw_all(writer, faces, held_out=held_out, progress=progress)

    return cached_pairs(cache, "glyphs", settings, shape=(channels, image_size, image_size), make=make)


def _draw_all(writer: PictureWriter, faces: list[Path], *, held_out: float, progress: ProgressFactory) -> Labels:
    """Every named character of every face that leaves ink; returns what belongs beside the pictures."""
    characters = [named_characters(face) for face in faces]
    names: list[str] = []
    face_of: list[int] = []
    digests: list[bytes] = []
    blank = 0
    with progress(sum(map(len, characters)), "drawing the glyphs", "pictures") as bar:
        for number, (face, named) in enumerate(zip(faces, characters, strict=True)):
            pen = Pen(face, writer.shape[1])
            for character, name in named:
                picture = pen.draw(character)
                if picture is None:
                    blank += 1
                    continue
                writer.add(np.broadcast_to(picture, writer.shape))
                names.append(name)
                face_of.append(number)
                digests.append(hashlib.sha256(picture.tobytes()).digest())
            bar.update(len(named))
    unseen = {number for number, face in enumerate(faces) if face.name in HELD_OUT_FACES}
    style_held_out = np.isin(face_of, sorted(unseen))
    ids = joined_ids(names, digests)
    splits = split(names, digests, ids, style_held_out=style_held_out, share=held_out)
    return names, ids, splits, {"blank picture": blank} if blank else {}


def named_characters(face: Path) -> list[tuple[str, str]]:
    """The characters that a face has a glyph for and Unicode a name, in code point order."""
    from fontTools.ttLib import TTFont  # type: ignore[import-untyped]

    with TTFont(face, lazy=True) as font:
        code_points = sorted(font.getBestCmap())
    named = [(chr(point), unicodedata.name(chr(point), "")) for point in code_points]
    return [(character, name) for character, name in named if name]


class Pen:
    """Draws single characters of one face as `[size, size]` uint8, ink bright on dark.

    The em and the baseline are the same for all, so that a comma stays small and low; what is larger than the
    picture is shrunk to it.
    """

    def __init__(self, face: Path, size: int) -> None:
        from PIL import ImageFont

        self.size = size
        self.side = size * SUPERSAMPLING
        # the other layout engine fails on some code points, and single characters need no shaping
        self._font = ImageFont.truetype(face, round(EM * self.side), layout_engine=ImageFont.Layout.BASIC)

    def draw(self, character: str) -> Pictures | None:
        """The character's picture, or None where it leaves no ink."""
        from PIL import Image

        mask, (left, top) = self._font.getmask2(character, mode="L", anchor="ms")
        ink = Image.frombytes("L", mask.size, bytes(mask)) if mask.size[0] * mask.size[1] else None
        box = ink.getbbox() if ink is not None else None
        if ink is None or box is None:
            return None
        ink = ink.crop(box)
        x, y = self.side / 2 + left + box[0], BASELINE * self.side + top + box[1]
        # one pixel of the small picture stays free all round
        ratio = (self.side - 2 * SUPERSAMPLING) / max(ink.size)
        if ratio < 1:
            ink = ink.resize(
                (max(1, round(ink.width * ratio)), max(1, round(ink.height * ratio))), Image.Resampling.BOX
            )
        place = self._inside(round(x), ink.width), self._inside(round(y), ink.height)
        canvas = Image.new("L", (self.side, self.side))
        canvas.paste(ink, place)
        return np.asarray(canvas.reduce(SUPERSAMPLING))

    def _inside(self, start: int, length: int) -> int:
        """The start moved as little as needed for the ink to lie within the margins."""
        return min(max(start, SUPERSAMPLING), self.side - SUPERSAMPLING - length)


def split(
    names: list[str], digests: list[bytes], ids: Indices, *, style_held_out: np.ndarray, share: float
) -> dict[str, Indices]:
    """Rows of "train", "faces" and "names"; see the top of this file. About `share` of the names are held out."""
    name_held_out = np.zeros(len(names), dtype=bool)
    name_held_out[_names_to_hold_out(names, ids, np.flatnonzero(~style_held_out), share)] = True
    train = np.flatnonzero(~style_held_out & ~name_held_out)
    known_names = {names[row] for row in train}
    known_pictures = {digests[row] for row in train}
    new_style = [
        row
        for row in np.flatnonzero(style_held_out & ~name_held_out)
        if names[row] in known_names and digests[row] not in known_pictures
    ]
    return {"train": train, "faces": np.array(new_style, dtype=np.int64), "names": np.flatnonzero(name_held_out)}


def _names_to_hold_out(names: list[str], ids: Indices, trainable: Indices, share: float) -> list[int]:
    """Rows of whole groups, taken by lot while every word of theirs stays known and the share is not reached."""
    left = Counter(word for name in {names[row] for row in trainable} for word in name.split())
    wanted = round(share * len(set(names)))
    rows: list[int] = []
    for _, members in groups_by_lot(names, ids):
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
