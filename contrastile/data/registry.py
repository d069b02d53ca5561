"""The registry of data sources: opens pairs and texts by the name that a recipe gives.

A new source is one file with an open function, and a name in `open_pairs` or `open_texts`.
"""

from collections.abc import Sequence
from pathlib import Path

from contrastile._errors import invalid
from contrastile.data.base import ProgressFactory, silent
from contrastile.data.collection import open_collection, open_table
from contrastile.data.copies import with_copies
from contrastile.data.docstrings import open_docstrings
from contrastile.data.glyphs import open_glyphs
from contrastile.data.pairs import PairOptions, PairSet
from contrastile.data.sources import TO_BE_GIVEN, is_collection, missing, read_source
from contrastile.data.text_files import open_beir, open_text_files
from contrastile.data.texts import TextSet, with_mined_negatives


def open_pairs(
    source: str, *, image_size: int, cache: Path, channels: int = 1, held_out: float = 0.05,
    weights: Sequence[int] = (), most_bad: float = 1.0, copies: int = 1, seed: int = 0,
    progress: ProgressFactory = silent,
) -> PairSet:  # fmt: skip
    """The pairs of `source`: "glyphs", the path of a table with the columns `filepath` and `title`, or a collection.

    Images are `image_size` pixels square, with 1 channel (grey) or 3 (colour), kept in a folder under `cache`; those of
    a collection's training pairs are read on demand. `held_out`: the share kept from training. `most_bad`: the share of
    pairs that may be unusable. `weights`: the times that each source of a collection comes in an epoch. `copies`: the
    number of augmented copies of each pair of other sources, written to shards in the order of `seed`; see `copies.py`.
    """
    if image_size < 8:
        raise invalid("image_size", "be at least 8 pixels", image_size, "Glyphs are legible from 32 on.")
    if channels not in (1, 3):
        raise invalid("channels", "be 1 (grey) or 3 (colour)", channels, "Images are converted to either.")
    _check_share(held_out)
    if source not in ("glyphs", TO_BE_GIVEN):
        _check_exists(next(filter(None, map(missing, read_source(source))), None))
    options = PairOptions(image_size, channels, held_out, cache, progress, weights, most_bad)
    open_source = open_glyphs if source == "glyphs" else open_collection if is_collection(source) else open_table
    pairs = open_source(source, options)
    return pairs if copies == 1 else with_copies(pairs, copies, seed=seed, cache=cache)


def open_texts(
    source: str, *, cache: Path, corpus: str | None = None, test: str | None = None, packages: Sequence[str] = (),
    held_out: float = 0.05, mined: int = 0, bad_rows: float = 0.01, progress: ProgressFactory = silent,
) -> TextSet:  # fmt: skip
    """The texts of `source`: "docstrings", a folder in BEIR's format, or a file of questions with their passages.

    "docstrings" are the functions of Python's library and of the installed `packages`. For a file, `corpus` has further
    passages, and the questions of the file `test`, else the share `held_out` of all, are held out. `mined`: the number
    of hard negatives that BM25 looks up for each training query without any. `bad_rows`: the share of unusable rows.
    """
    _check_share(held_out)
    path = Path(source).expanduser()
    for name, file in (("corpus", corpus), ("test", test)):
        if file is not None and (source == "docstrings" or path.is_dir()):
            remedy = "These come with their own passages and held-out questions."
            raise invalid(name, f'be left out with the source "{source}"', f'"{file}"', remedy)
    files = {name: Path(file).expanduser() if file else None for name, file in (("corpus", corpus), ("test", test))}
    if files["test"] is not None and files["test"].is_dir():
        raise invalid("test", "be a file of questions", f'the folder "{test}"', "Name a BEIR folder as the source.")
    if source == "docstrings":
        return open_docstrings(cache=cache, packages=packages, held_out=held_out, mined=mined, progress=progress)
    _check_exists(None if path.exists() else source)
    if path.is_dir():
        texts = open_beir(path, bad_rows=bad_rows, progress=progress)
    else:
        texts = open_text_files(path, **files, held_out=held_out, bad_rows=bad_rows, progress=progress)
    return with_mined_negatives(texts, mined, progress=progress)


def _check_exists(absent: str | None) -> None:
    if absent is not None:
        remedy = "Check its path: a relative one begins at the folder in which the command runs."
        raise invalid("source", "be a file or folder that exists", f'"{absent}"', remedy)


def _check_share(held_out: float) -> None:
    if not 0 < held_out < 1:
        raise invalid("held_out", "be a share between 0 and 1", held_out, "0.05 keeps a twentieth for evaluation.")
