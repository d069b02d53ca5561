"""Source: the user's own images with captions, in a table or in a collection too large to be decoded beforehand.

The cache holds all pairs of a table, decoded. It holds the held-out pairs of a collection, decoded, which are few, and
an index of all its pairs: the place of each, its caption and its hash fraction. Training pairs of a collection are read
by their row in the index. `Batches` alone decides the order, on any number of ranks and workers, and a run resumes in
the middle of an epoch at no cost.
"""

import hashlib
import json
import os
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from contrastile._errors import invalid, logger
from contrastile.data import base
from contrastile.data.base import Indices, ProgressFactory, Skipped
from contrastile.data.files import cached_folder, file_state
from contrastile.data.images import decode
from contrastile.data.loader import Origin, Piece
from contrastile.data.pairs import ImageWriter, Labels, PairOptions, PairSet, Stream, cached_pairs
from contrastile.data.shards import find_pairs, manifest_state, state, unpack
from contrastile.data.sources import Source, read_source
from contrastile.data.tables import Row, read_table, warn_of_quotes

# increased whenever the digest of a collection, or what is cached of it, changes
FORMAT, TABLE_FORMAT = 1, 2
# increased whenever other members of a shard count as bad pairs; the digest stays
INDEX_FORMAT = 4
# the most pairs that are held out, whatever the share: they are decoded beforehand and compared with each other
MOST_HELD_OUT = 10_000
# endings of the file with the captions of a folder of images in `datasets`
METADATA = (".csv", ".jsonl")

# files of an index, by the names of its fields
HEADER, ARRAYS = "index.json", {"where": "where.npy", "ends": "ends.npy", "fractions": "lots.npy", "text": "titles.npy"}


def open_table(source: str, options: PairOptions) -> PairSet:
    """The pairs of a table, decoded once into the cache, with the splits "train", "held_out" and perhaps "images".

    Pairs that share a caption or the very image share an id, and lie on the same side of the split, which is drawn by
    the hash of their captions. Where few captions are held out, so are "images" of the other captions.
    """
    rows = read_table(Path(source))
    warn_of_quotes(Path(source), rows)
    states = [row if isinstance(row, str) else [*file_state(str(row[0])), row[1]] for row in rows]
    digest = hashlib.sha256(json.dumps(states).encode()).hexdigest()
    settings = {**options.settings, "format": TABLE_FORMAT, "rows": digest}

    def make(writer: ImageWriter) -> Labels:
        pairs = [row if isinstance(row, str) else (row[1], Piece(str(row[0]), 0, None)) for row in rows]
        captions, digests, skipped = _decode_all(writer, pairs, options.progress, "reading the images")
        ids = base.joined_ids(captions, digests)
        if len(set(ids.tolist())) < 2:
            # equal captions or equal images make pairs one
            alike = ", all with one caption or one image" if len(captions) > 1 else ""
            got = f"{len(captions)} readable{alike}" + (f"; skipped {base.counted(skipped)}" if skipped else "")
            got += _first_missing(rows, Path(source).parent)
            remedy = "One is needed to train on, one to be held out."
            raise invalid("source", f"hold at least two pairs that differ and can be read ({source})", got, remedy)
        splits = base.hash_split(base.groups_by_id(captions, ids), options.held_out)
        train = splits["train"]
        if len(np.unique(ids[splits["held_out"]])) < base.FEW_CAPTIONS:
            images = base.image_split(ids[train], [digests[row].hex() for row in train], options.held_out)
            if len(images):
                splits = {**splits, "train": np.delete(train, images), "images": train[images]}
        return captions, ids, splits, skipped

    pairs = cached_pairs(options.cache, "table", settings, shape=options.shape, make=make)
    if pairs.skipped:
        count, example = sum(pairs.skipped.values()), _first_missing(rows, Path(source).parent)
        message = "%s: %d of %d rows are skipped (%s)%s"
        logger.warning(message, source, count, len(rows), base.counted(pairs.skipped), example)
        base.check_bad(pairs.skipped, len(rows), options.most_bad, example=example)
    _warn_of_one_caption(source, pairs.ids[pairs.splits["train"]])
    return pairs


def _warn_of_one_caption(source: str, captions: npt.NDArray[Any]) -> None:
    """Warn where all pairs to train on have one caption; captions: a number for each."""
    if (captions == captions[:1]).all():
        message = "%s: one caption is left to train on, so that no pair has a negative and the loss is 0; add captions"
        logger.warning(message, source)


def _first_missing(rows: Sequence[Row | str], folder: Path) -> str:
    """A clause about the first image of a table that is no file, and the folder of its path; empty without one."""
    path = next((row[0] for row in rows if not isinstance(row, str) and not row[0].is_file()), None)
    if path is not None and path.is_relative_to(folder):
        return f'; there is no "{path.relative_to(folder)}" in the folder "{folder}"'
    return "" if path is None else f'; there is no "{path}"'


def _decode_all(
    writer: ImageWriter, pairs: Sequence[tuple[str, Origin] | str], progress: ProgressFactory, title: str
) -> tuple[list[str], list[bytes], dict[str, int]]:
    """Decode pairs, or reasons in their place: captions, digests of images, counts of the unusable ones by reason."""
    captions, digests, skipped = [], [], Counter[str]()
    with progress(len(pairs), title, "images") as bar:
        for pair in pairs:
            try:
                if isinstance(pair, str):
                    raise Skipped(pair)
                caption, origin = pair
                image = decode(origin(), writer.shape)
            except (Skipped, OSError) as failure:
                missing = isinstance(failure, FileNotFoundError)
                read = "missing picture" if missing else "broken picture"
                reason = str(failure) if isinstance(failure, Skipped) else read
                skipped[reason] += 1
                # the counts do not tell which image is broken; a missing one is named beside them
                if skipped[reason] == 1 and not missing and not isinstance(pair, str) and isinstance(pair[1], Piece):
                    logger.warning("the first image that is skipped (%s): %s", reason, pair[1].path)
            else:
                writer.add(image)
                captions.append(caption)
                digests.append(hashlib.sha256(image.tobytes()).digest())
            bar.update(1)
    return captions, digests, dict(skipped)


def open_collection(source: str, options: PairOptions) -> PairSet:
    """The pairs of a collection: held-out pairs as rows of the set, training pairs, from these on, in its stream.

    A pair of source `i` comes `weights[i]` times an epoch. Pairs that share a caption share an id and a side of the
    split. Where few captions are held out, so are "images" of the other captions.
    """
    sources, weights = read_source(source), options.weights
    if weights and len(weights) != len(sources):
        raise invalid("weights", f"be one for each of the {len(sources)} sources", len(weights), "Or leave them out.")
    digest = hashlib.sha256(json.dumps([FORMAT, *map(state, sources)]).encode()).hexdigest()
    for folder in (Path(source.paths[0]) for source in sources if source.kind == "folder"):
        _warn_of_metadata(folder)
    index = open_index(digest, sources, options)
    base.check_bad(index.skipped, len(index) + sum(index.skipped.values()), options.most_bad)
    if len(np.unique(index.fractions)) < 2:
        unread = f" and skipped {base.counted(index.skipped)}" if index.skipped else ""
        got = f'{len(index)} pairs in "{source}"{unread}'
        remedy = "Name a folder with images below it, or shards of pairs, as shards/{000..099}.tar."
        if len(index):
            remedy = "One is held out. In a folder an image's caption is the .txt beside it, or its folder's name."
        raise invalid("source", "hold at least two pairs that differ in their captions", got, remedy)
    held_out = _held_out(index, options.held_out)
    parts = {"held_out": np.flatnonzero(held_out)}
    settings = {"format": FORMAT, "index": [digest, len(index)], "held_out": options.held_out}
    settings["channels"] = options.channels
    if len(images := _held_out_images(index, held_out, options.held_out)):
        parts["images"], settings["images"], held_out[images] = images, len(images), True

    def make(writer: ImageWriter) -> Labels:
        captions: list[str] = []
        splits, skipped = {}, Counter[str]()
        for name, rows in parts.items():
            places = [(index.caption(row), index.origin(row, 0)) for row in rows.tolist()]
            decoded, _, bad = _decode_all(writer, places, options.progress, "reading the held-out images")
            splits[name] = np.arange(len(captions), len(captions) + len(decoded))
            captions += decoded
            skipped.update(bad)
        return captions, base.joined_ids(captions), splits, dict(skipped)

    pairs = cached_pairs(options.cache, "held-out", settings, shape=options.shape, make=make)
    base.check_bad(pairs.skipped, int(held_out.sum()), options.most_bad, of=len(index))
    if skipped := Counter(index.skipped) + Counter(pairs.skipped):
        count = len(index) + sum(index.skipped.values())
        logger.warning("%s: %d of %d pairs are skipped (%s)", source, skipped.total(), count, base.counted(skipped))
    _warn_of_one_caption(source, index.fractions[~held_out])
    source_of_pair = np.repeat(np.arange(len(sources)), index.parts)
    times = np.asarray(weights or [1] * len(sources))[source_of_pair] * ~held_out
    rows = np.repeat(np.arange(len(index)), times)
    stream = Stream(index, rows, shape=options.shape, most_bad=options.most_bad, digest=digest)
    training = np.arange(len(pairs), len(pairs) + len(stream))
    return replace(pairs, splits={**pairs.splits, "train": training}, skipped=dict(skipped), stream=stream)


def _warn_of_metadata(folder: Path) -> None:
    """Warn of captions in a file as `datasets` has them in a folder of images, which is not read as one."""
    found = [path for path in (*folder.glob("metadata.*"), *folder.glob("*/metadata.*")) if path.suffix in METADATA]
    if found:
        as_table = "it" if found[0].suffix == ".csv" else "a .csv of its file_name and text"
        message = "%s is not read: captions of a folder are .txt files or names of folders. To have its captions, name "
        logger.warning(message + "%s as data.source", found[0], as_table)


@dataclass(frozen=True)
class Index:
    """Places of `n` pairs: file number, offset, size `[n, 3]`; their captions in one text, caption i up to `ends[i]`.

    fractions: `[n]`, the hash fractions of the captions. parts: the number of pairs of each source.
    """

    files: list[str]
    parts: list[int]
    skipped: dict[str, int]
    where: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    fractions: npt.NDArray[np.float64]
    text: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.where)

    def caption(self, row: int) -> str:
        return bytes(self.text[self.ends[row - 1] if row else 0 : self.ends[row]]).decode()

    def identity(self, caption: str) -> int:
        return int(base.hash_fraction(caption) * 2**53)

    def origin(self, row: int, example: int) -> Piece:  # noqa: ARG002
        number, offset, size = self.where[row].tolist()
        return Piece(self.files[number], offset, size)


def open_index(digest: str, sources: Sequence[Source], options: PairOptions) -> Index:
    """The index from the cache, made again if manifests beside shards have changed."""
    unpacked = Path(os.path.abspath(options.cache / "unpacked"))
    tables = [Path(path) for source in sources if source.kind == ".parquet" for path in source.paths]
    key: list[Any] = [INDEX_FORMAT, digest, [line for source in sources for line in manifest_state(source)]]
    if tables:
        # the index names files there, whose folders are named by the tables behind links
        key += [str(unpacked), *map(os.path.realpath, tables)]
    make = partial(_write_index, sources, unpacked, options.progress)
    folder = cached_folder(options.cache, "index", key, files=(HEADER, *ARRAYS.values()), make=make)
    for table in tables:
        # a file that was damaged or removed since is unpacked again, to the same bytes
        unpack(table, unpacked)
    header = json.loads((folder / HEADER).read_text(encoding="utf-8"))
    return Index(**header, **{key: np.load(folder / name, mmap_mode="r") for key, name in ARRAYS.items()})


def _write_index(sources: Sequence[Source], unpacked: Path, progress: ProgressFactory, folder: Path) -> None:
    # arrays of plain numbers, because millions of pairs as Python objects would not fit into memory
    where, ends, fractions, text, parts = array("q"), array("q"), array("d"), bytearray(), []
    files: dict[str, int] = {}
    skipped: Counter[str] = Counter()
    with progress(sum(len(source.paths) for source in sources), "reading the shards", "files") as bar:
        for source in sources:
            before = len(ends)
            for path in source.paths:
                for pair in find_pairs(source.kind, Path(path), unpacked):
                    if isinstance(pair, str):
                        skipped[pair] += 1
                        continue
                    where.extend((files.setdefault(pair.path, len(files)), pair.offset, pair.size))
                    text += pair.caption.encode()
                    ends.append(len(text))
                    fractions.append(base.hash_fraction(pair.caption))
                bar.update(1)
            parts.append(len(ends) - before)
    places = np.frombuffer(where, np.int64).reshape(-1, 3)
    for name, values in zip(ARRAYS.values(), (places, ends, fractions, np.frombuffer(text, np.uint8)), strict=True):
        np.save(folder / name, np.asarray(values))
    header = {"files": list(files), "parts": parts, "skipped": skipped}
    (folder / HEADER).write_text(json.dumps(header), encoding="utf-8")


def _held_out(index: Index, share: float) -> npt.NDArray[np.bool_]:
    """A mask of the pairs with the smallest hash fractions: the share, at most `MOST_HELD_OUT`; never none or all."""
    distinct = np.unique(index.fractions)
    most = np.sort(index.fractions)[min(MOST_HELD_OUT, len(index) - 1)]
    bound = min(max(min(share, most), distinct[1]), distinct[-1])
    return index.fractions < bound


def _held_out_images(index: Index, held_out: npt.NDArray[np.bool_], share: float) -> Indices:
    """Rows of further pairs to hold out, at most `MOST_HELD_OUT`, if few captions are held out; else none."""
    train = np.flatnonzero(~held_out)
    captions = np.unique(index.fractions[train], return_inverse=True)[1]
    if len(np.unique(index.fractions[held_out])) >= base.FEW_CAPTIONS or len(train) < 2 * (captions.max() + 1):
        # returned before the keys are made, which takes seconds for millions of pairs
        return train[:0]
    pieces = [(row, index.origin(row, 0)) for row in train.tolist()]
    keys = [f"{index.caption(row)} {Path(piece.path).name} {piece.offset}" for row, piece in pieces]
    return train[base.image_split(captions, keys, share)[:MOST_HELD_OUT]]
