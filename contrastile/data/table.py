"""Source: a table of `filepath` and `title`, the user's own images.

Stands between `tables.py` and the registry `sources.py`. Every image is decoded once, cut to a square in its middle and
kept with the captions in a folder of the cache. Rows that cannot be used are skipped and counted by their reason; too
many of them are an error.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from pathlib import Path

from contrastile._errors import invalid
from contrastile.data.base import groups_by_id, hash_split, joined_ids
from contrastile.data.cache import FORMAT
from contrastile.data.images import decode
from contrastile.data.pairs import ImageWriter, Labels, PairOptions, PairSet, cached_pairs
from contrastile.data.skipped import Skipped, check_bad, counted
from contrastile.data.tables import Row, read_table

logger = logging.getLogger("contrastile")


def open_table(source: str, options: PairOptions) -> PairSet:
    """The pairs of a table, decoded once into the cache, with the splits "train" and "held_out".

    Pairs that share a caption or the very image share an id, and lie on the same side of the split, which is drawn by
    the hash of their captions: a pair stays on its side when others are added. Raises ValueError where more than the
    share `most_bad` of the rows is skipped.
    """
    table = Path(source)
    rows = read_table(table)
    settings = {
        "format": FORMAT,
        "image_size": options.image_size,
        "channels": options.channels,
        "held_out": options.held_out,
        "rows": hashlib.sha256(repr([_state(row) for row in rows]).encode()).hexdigest(),
    }

    def make(writer: ImageWriter) -> Labels:
        return _decode_all(writer, rows, table, options)

    pairs = cached_pairs(options.cache, "table", settings, shape=options.shape, make=make)
    if pairs.skipped:
        count = sum(pairs.skipped.values())
        logger.warning("%s: %d of %d rows are skipped (%s)", table, count, len(rows), counted(pairs.skipped))
    check_bad(pairs.skipped, len(rows), options.most_bad)
    return pairs


def _state(row: Row | str) -> object:
    """The state of a row, by which a cached row is known: caption, path, size and date of the file."""
    if isinstance(row, str):
        return row
    path, caption = row
    try:
        stat = path.stat()
    except OSError:
        return str(path), caption, None
    return str(path), caption, stat.st_size, stat.st_mtime_ns


def _decode_all(writer: ImageWriter, rows: list[Row | str], table: Path, options: PairOptions) -> Labels:
    captions: list[str] = []
    digests: list[bytes] = []
    skipped: Counter[str] = Counter()
    with options.progress(len(rows), "reading the pictures", "pictures") as bar:
        for row in rows:
            try:
                if isinstance(row, str):
                    raise Skipped(row)
                path, caption = row
                image = decode(path, writer.shape)
            except Skipped as reason:
                skipped[str(reason)] += 1
            else:
                writer.add(image)
                captions.append(caption)
                digests.append(hashlib.sha256(image.tobytes()).digest())
            bar.update(1)
    ids = joined_ids(captions, digests)
    if len(set(ids.tolist())) < 2:
        got = f"{len(captions)} readable pairs" + (f" and skipped {counted(skipped)}" if skipped else "")
        remedy = "One is needed to train on, one to be held out."
        raise invalid("source", f"hold at least two pairs that differ and can be read ({table})", got, remedy)
    return captions, ids, hash_split(groups_by_id(captions, ids), options.held_out), dict(skipped)
