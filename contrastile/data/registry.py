"""The registry of data sources: opens pairs and texts by the name that a recipe gives.

Stands above all sources. A new source of pairs is one file with an open function, and one line in `PAIR_SOURCES`, where
the first line that accepts the name opens it; `open_texts` names the sources of texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from contrastile._errors import invalid
from contrastile.data.base import ProgressFactory, silent
from contrastile.data.bm25 import with_mined_negatives
from contrastile.data.collection import open_collection, open_table
from contrastile.data.copies import with_copies
from contrastile.data.docstrings import open_docstrings
from contrastile.data.glyphs import open_glyphs
from contrastile.data.pairs import PairOptions, PairSet
from contrastile.data.sources import is_collection
from contrastile.data.text_files import open_beir, open_text_files
from contrastile.data.texts import TextSet

PAIR_SOURCES: list[tuple[Callable[[str], bool], Callable[[str, PairOptions], PairSet]]] = [
    (lambda source: source == "glyphs", open_glyphs),
    (is_collection, open_collection),
    (lambda _: True, open_table),
]


def open_pairs(
    source: str,
    *,
    image_size: int,
    cache: Path,
    channels: int = 1,
    held_out: float = 0.05,
    weights: Sequence[int] = (),
    most_bad: float = 1.0,
    copies: int = 1,
    seed: int = 0,
    progress: ProgressFactory = silent,
) -> PairSet:
    """The pairs of `source`: "glyphs", the path of a table (.tsv, .csv) with the columns `filepath` and `title`, or a
    collection: tar shards, parquet files, several tables, folders of images, in the syntax of `sources.py`.

    Images are `image_size` pixels square, with 1 channel (grey) or 3 (colour). They are made once and kept in a folder
    under `cache`; of a collection only the held-out ones, the others are read on demand. `held_out` is the share kept
    from training: of the names (glyphs), of the pairs (a table, a collection). `most_bad`: the share of pairs that may
    be unusable. `weights`: how often each source of a collection comes in an epoch. `copies`: the number of augmented
    copies of each pair of the other sources, written to shards in the order of `seed`; see `copies.py`.

    Raises ValueError for a size, a number of channels or a share that makes no sense, for a table without pairs, and
    for more bad pairs than `most_bad`.
    """
    if image_size < 8:
        raise invalid("image_size", "be at least 8 pixels", image_size, "Glyphs are legible from 32 on.")
    if channels not in (1, 3):
        raise invalid("channels", "be 1 (grey) or 3 (colour)", channels, "Pictures are converted to either.")
    _check_share(held_out)
    options = PairOptions(image_size, channels, held_out, cache, progress, weights, most_bad)
    open_source = next(opener for accepts, opener in PAIR_SOURCES if accepts(source))
    pairs = open_source(source, options)
    return pairs if copies == 1 else with_copies(pairs, copies, seed=seed, cache=cache)


def open_texts(
    source: str,
    *,
    cache: Path,
    corpus: str | None = None,
    test: str | None = None,
    packages: Sequence[str] = (),
    held_out: float = 0.05,
    mined: int = 0,
    bad_rows: float = 0.01,
    progress: ProgressFactory = silent,
) -> TextSet:
    """The texts of `source`: "docstrings", a folder in BEIR's format, or a file of questions with their passages.

    "docstrings" are the functions of Python's library and of the installed `packages`. For a file, `corpus` has further
    passages, and `test` is a second file, whose questions are the held-out part; without it `held_out`, a share of the
    questions, is. `mined`: the number of hard negatives that BM25 looks up for each training query without negatives.
    `bad_rows`: the share of rows that may be unusable; they are counted in `skipped`. Texts made of "docstrings" are
    kept in a folder under `cache`.

    Raises ValueError for a share that makes no sense, for `corpus` or `test` where they have no place, for a source
    that cannot be read or has no questions, and for more bad rows than allowed.
    """
    _check_share(held_out)
    path = Path(source).expanduser()
    for name, file in (("corpus", corpus), ("test", test)):
        if file is not None and (source == "docstrings" or path.is_dir()):
            remedy = "These come with their own passages and held-out questions."
            raise invalid(name, f'be left out with the source "{source}"', f'"{file}"', remedy)
    files = {name: Path(file).expanduser() if file else None for name, file in (("corpus", corpus), ("test", test))}
    if files["test"] is not None and files["test"].is_dir():
        raise invalid("test", "be a file of questions", f'the folder "{test}"', "A BEIR folder is a source of its own.")
    if source == "docstrings":
        return open_docstrings(cache=cache, packages=packages, held_out=held_out, mined=mined, progress=progress)
    if path.is_dir():
        texts = open_beir(path, bad_rows=bad_rows, progress=progress)
    else:
        texts = open_text_files(path, **files, held_out=held_out, bad_rows=bad_rows, progress=progress)
    return with_mined_negatives(texts, mined, progress=progress)


def _check_share(held_out: float) -> None:
    if not 0 < held_out < 1:
        raise invalid("held_out", "be a share between 0 and 1", held_out, "0.05 keeps a twentieth for evaluation.")
