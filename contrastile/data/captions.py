"""Pictures to be found, and their captions, several each: the JSON of Karpathy's splits, or a table.

A source of evaluation alone, beside `class_folder.py`. Nothing is decoded here.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from contrastile._check import wrong
from contrastile.data.pairs import Indices
from contrastile.data.skipped import counted
from contrastile.data.table import read_table


@dataclass(frozen=True)
class Captioned:
    """Pictures `paths` `[n]` and captions `texts` `[m]`; `owner` `[m]`: the picture that each belongs to."""

    paths: list[str]
    texts: list[str]
    owner: Indices


def open_captions(file: str | Path, *, images: str | Path | None = None, split: str | None = None) -> Captioned:
    """The pictures of a split with all of their captions, in the file's order.

    A `.json` file is read as Karpathy's (`dataset_coco.json`, `dataset_flickr30k.json`): `images`, each with `split`,
    `filename`, perhaps `filepath`, and `sentences` with `raw`; the pictures lie at images/filepath/filename or at
    images/filename; `split` is "test" unless it is given. Any other file is a table with the columns filepath and
    title, a line for each caption, and has no splits. `images`: the folder of the pictures; by default the file's own.

    Raises ValueError for a file that is none of these, a split that it lacks, pictures outside of the folder, and fewer
    than two pictures.
    """
    folder = Path(images) if images is not None else Path(file).parent
    if not folder.is_dir():
        raise wrong("images", "be the folder of the pictures", folder, "There is no such folder.")
    if Path(file).suffix == ".json":
        found = _of_json(Path(file), folder, split or "test")
    elif split is not None:
        raise wrong("split", "be left out with a table", f'"{split}"', "Only Karpathy's JSON has splits.")
    else:
        found = _of_table(Path(file), folder)
    if len(found) < 2:
        raise wrong("captions", "hold two pictures with captions at least", f"{len(found)} in {file}", "Look at it.")
    owner = np.repeat(np.arange(len(found)), [len(texts) for texts in found.values()])
    return Captioned(list(found), [text for texts in found.values() for text in texts], owner)


def _of_json(file: Path, folder: Path, split: str) -> dict[str, list[str]]:
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        entries = [(str(entry["split"]), _place(entry), _captions(entry)) for entry in told["images"]]
    except OSError as failure:
        raise wrong("captions", "be a file that can be read", file, f"{failure.strerror}.") from failure
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failure:
        remedy = "Each of `images` has split, filename and sentences with raw."
        raise wrong("captions", "be Karpathy's JSON", f"{file} ({failure!r})", remedy) from failure
    splits = Counter(name for name, _, _ in entries)
    if split not in splits:
        raise wrong("split", f"be one of {', '.join(sorted(splits))}", f'"{split}"', f"These are in {file}.")
    found: dict[str, list[str]] = {}
    for name, (above, own), texts in entries:
        if name == split and texts:
            path = folder / above / own
            found.setdefault(_inside(folder, path if path.is_file() else folder / own), []).extend(texts)
    return found


def _inside(folder: Path, path: Path) -> str:
    """The path, which leads to a place below the folder, whatever it is made of; links are followed."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise wrong("captions", "name pictures within the folder", path, "Paths go down only.")
    return str(path)


def _place(entry: Any) -> tuple[str, str]:
    """Of COCO the folder too; Flickr30k has none."""
    return str(entry.get("filepath", "")), str(entry["filename"])


def _captions(entry: Any) -> list[str]:
    clean = (" ".join(sentence["raw"].split()) for sentence in entry["sentences"])
    return [text for text in clean if text]


def _of_table(file: Path, folder: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    bad: Counter[str] = Counter()
    for row in read_table(file, folder, name="captions"):
        if isinstance(row, str):
            bad[row] += 1
        else:
            path, title = row
            found.setdefault(_inside(folder, path), []).append(title)
    if bad:
        raise wrong("captions", "have a picture and a caption in each line", f"{counted(bad)} in {file}", "Mend them.")
    return found
