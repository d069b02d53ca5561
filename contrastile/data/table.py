"""One's own pictures: a table of `filepath` and `title`.

A source of the flow's first box. Every picture is decoded once, cut to a square in its middle and kept with the titles
in a folder of the cache. What cannot be used is skipped and counted by its reason; too much of it is an error.

The first line names the columns; paths are relative to the file's own folder. A .tsv file has tabs and no quoting; a
.csv file has commas, or tabs where its first line has one, and fields may stand in quotes.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from contrastile._check import wrong
from contrastile.data.cache import FORMAT, PictureWriter, cached_pairs
from contrastile.data.crop import Box, Boxes
from contrastile.data.pairs import (
    Indices,
    Labels,
    PairSet,
    Pictures,
    ProgressFactory,
    groups_by_lot,
    joined_ids,
)
from contrastile.data.skipped import Skipped, check_bad, counted

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger("contrastile")

# by the picture's header, before anything is decoded: a few bytes may promise gigabytes
MOST_PIXELS = 64_000_000

# what is decoded by Pillow itself; other formats may call programs of the machine
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")

# what the columns may be called, the first of these that a table has; the titles' as in parquet files
PLACES, TITLES = ("filepath", "file_name", "image"), ("title", "text", "caption")

Row = tuple[Path, str]


def open_table(
    table: Path,
    *,
    image_size: int,
    channels: int,
    held_out: float,
    cache: Path,
    progress: ProgressFactory,
    most_bad: float = 1.0,
) -> PairSet:
    """The pairs of a table, decoded once into a folder under `cache`, with the splits "train" and "held_out".

    Pairs that share a title or the very picture share an id, and lie on the same side of the split, which is drawn by
    their titles: a pair stays on its side when others are added. Raises ValueError where more than the share `most_bad`
    of the rows is skipped.
    """
    rows = read_table(table)
    settings = {
        "format": FORMAT,
        "image_size": image_size,
        "channels": channels,
        "held_out": held_out,
        "rows": hashlib.sha256(repr([_state(row) for row in rows]).encode()).hexdigest(),
    }

    def make(writer: PictureWriter) -> Labels:
        return _decode_all(writer, rows, table, held_out=held_out, progress=progress)

    pairs = cached_pairs(cache, "table", settings, shape=(channels, image_size, image_size), make=make)
    if pairs.skipped:
        count = sum(pairs.skipped.values())
        logger.warning("%s: %d of %d rows are skipped (%s)", table, count, len(rows), counted(pairs.skipped))
    check_bad(pairs.skipped, len(rows), most_bad)
    return pairs


def read_table(table: Path, folder: Path | None = None, *, name: str = "source") -> list[Row | str]:
    """Every row below the first: its picture's path and its title, or the reason why it has none.

    Paths are relative to `folder`, by default the table's own; `name` is what errors call it.
    """
    try:
        content = table.read_bytes()
    except OSError as failure:
        rule = 'be "glyphs" or a file that can be read' if name == "source" else "be a file that can be read"
        raise wrong(name, rule, table, str(failure.strerror) + ".") from failure
    lines = _comma_separated(content) if table.suffix == ".csv" else _tab_separated(content)
    first = next(lines, [])
    columns = first if isinstance(first, list) else []
    where, what = (next((column for column in names if column in columns), None) for names in (PLACES, TITLES))
    if where is None or what is None:
        rule = f"have a column {' or '.join(PLACES)} and one {' or '.join(TITLES)}"
        by = "commas or tabs" if table.suffix == ".csv" else "tabs"
        raise wrong(name, rule, columns, f"Name them in the first line, separated by {by}.")
    places = columns.index(where), columns.index(what)
    folder = folder or table.parent
    return [_row(line, len(columns), *places, folder) for line in lines]


def _tab_separated(content: bytes) -> Iterator[list[str] | str]:
    """The fields of every line that is not empty, or why it has none."""
    for number, line in enumerate(content.splitlines()):
        if not number or line.strip():
            try:
                yield line.decode("utf-8-sig" if not number else "utf-8").split("\t")
            except UnicodeDecodeError:
                yield "not UTF-8"


def _comma_separated(content: bytes) -> Iterator[list[str] | str]:
    """Likewise of a .csv file, in which a field in quotes may go over several lines."""
    text = content.removeprefix(codecs.BOM_UTF8).decode("utf-8", errors="surrogateescape")
    tabs = "\t" in text.partition("\n")[0]
    rows = csv.reader(StringIO(text, newline=""), delimiter="\t" if tabs else ",")
    while True:
        try:
            fields = next(rows)
        except StopIteration:
            return
        except csv.Error:
            yield "broken row"
            continue
        if fields:
            yield fields if all(map(_readable, fields)) else "not UTF-8"


def _readable(field: str) -> bool:
    """Whether no byte of it was left over when it was decoded."""
    return not any("\udc80" <= letter <= "\udcff" for letter in field)


def _row(fields: list[str] | str, width: int, where: int, what: int, folder: Path) -> Row | str:
    if isinstance(fields, str):
        return fields
    if len(fields) != width:
        return "wrong number of columns"
    title = " ".join(fields[what].split())
    return (folder / fields[where].strip(), title) if title else "empty title"


def _state(row: Row | str) -> object:
    """What decides whether a cached row is still the row: the title, the path, the file's size and its date."""
    if isinstance(row, str):
        return row
    path, title = row
    try:
        found = path.stat()
    except OSError:
        return str(path), title, None
    return str(path), title, found.st_size, found.st_mtime_ns


def _decode_all(
    writer: PictureWriter, rows: list[Row | str], table: Path, *, held_out: float, progress: ProgressFactory
) -> Labels:
    titles: list[str] = []
    digests: list[bytes] = []
    skipped: Counter[str] = Counter()
    with progress(len(rows), "reading the pictures", "pictures") as bar:
        for row in rows:
            try:
                if isinstance(row, str):
                    raise Skipped(row)
                path, title = row
                picture = decode(path, writer.shape)
            except Skipped as reason:
                skipped[str(reason)] += 1
            else:
                writer.add(picture)
                titles.append(title)
                digests.append(hashlib.sha256(picture.tobytes()).digest())
            bar.update(1)
    ids = joined_ids(titles, digests)
    if len(set(ids.tolist())) < 2:
        got = f"{len(titles)} readable pairs" + (f" and skipped {counted(skipped)}" if skipped else "")
        remedy = "One is needed to train on, one to be held out."
        raise wrong("source", f"hold at least two pairs that differ and can be read ({table})", got, remedy)
    return titles, ids, split(titles, ids, held_out), dict(skipped)


def split(titles: list[str], ids: Indices, share: float) -> dict[str, Indices]:
    """Rows of "train" and "held_out", by lot; at least one group of equal ids lies on either side."""
    groups = groups_by_lot(titles, ids)
    below = sum(drawn < share for drawn, _ in groups)
    count = min(max(below, 1), len(groups) - 1)
    sides = {"train": groups[count:], "held_out": groups[:count]}
    return {
        name: np.sort(np.array([row for _, members in side for row in members], dtype=np.int64))
        for name, side in sides.items()
    }


def decode(file: Path | BytesIO, shape: tuple[int, int, int], crop: Boxes | None = None) -> Pictures:
    """One picture as uint8 `[C, S, S]`: its middle square, or the part that `crop` says, resampled.

    Raises `Skipped` with the reason.
    """
    import warnings

    from PIL import Image

    try:
        # Pillow's own limit on pixels is a warning where it is not an error; ours is checked below and lies lower.
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
    # a reader of pictures raises whatever a broken file leads it into
    except Exception as failure:
        raise Skipped("broken picture") from failure


def _part(image: Image.Image, shape: tuple[int, int, int], box: Box) -> Pictures:
    """The part within `box`, cut as it lies in the file, turned upright, resampled.

    By torch's bicubic filter with antialiasing, Pillow's own (they differ by a rounding) at a quarter of its time.
    """
    from PIL import ImageOps

    channels, size, _ = shape
    width, height = image.size
    # a JPEG can be decoded at a fraction of its size; at least twice the part's
    image.draft(None, (round(2 * size * width / (box[2] - box[0])), round(2 * size * height / (box[3] - box[1]))))
    across, down = image.width / width, image.height / height
    left, top = round(box[0] * across), round(box[1] * down)
    right, bottom = max(round(box[2] * across), left + 1), max(round(box[3] * down), top + 1)
    part = _flattened(ImageOps.exif_transpose(image.crop((left, top, right, bottom))))
    wanted = "L" if channels == 1 else "RGB"
    pixels = np.asarray(part if part.mode == wanted else part.convert(wanted))
    whole = torch.from_numpy(pixels).view(1, part.height, part.width, channels).permute(0, 3, 1, 2)
    return F.interpolate(whole, (size, size), mode="bicubic", antialias=True)[0].numpy()


def squared(image: Image.Image, shape: tuple[int, int, int]) -> Pictures:
    """A picture of any size as uint8 `[C, S, S]`: upright, its middle square, resampled, grey or in colours."""
    from PIL import Image, ImageOps

    channels, size, _ = shape
    plain = _flattened(ImageOps.exif_transpose(image)).convert("L" if channels == 1 else "RGB")
    square = ImageOps.fit(plain, (size, size), Image.Resampling.BICUBIC)
    return np.asarray(square).reshape(size, size, channels).transpose(2, 0, 1).copy()


def _flattened(image: Image.Image) -> Image.Image:
    """On white paper where the picture is transparent, and with 8 bits where it has 16, which Pillow would cut off."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image, dtype=np.uint16) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        paper = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(paper, image.convert("RGBA"))
    return image
