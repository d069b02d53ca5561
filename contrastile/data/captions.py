"""Images with several captions each, for retrieval: the JSON of Karpathy's splits, or a table.

Stands beside `class_folder.py`; evaluation alone reads it. Nothing is decoded here.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from contrastile._errors import invalid
from contrastile.data.base import Indices, counted
from contrastile.data.tables import read_table


@dataclass(frozen=True)
class Captioned:
    """Images `paths` `[n]` and captions `texts` `[m]`; `owner` `[m]`: the image that each caption belongs to."""

    paths: list[str]
    texts: list[str]
    owner: Indices


def open_captions(file: str | Path, *, images: str | Path | None = None, split: str | None = None) -> Captioned:
    """The images of a split with all of their captions, in the file's order.

    A `.json` file is read as Karpathy's (`dataset_coco.json`, `dataset_flickr30k.json`): `images`, each with `split`,
    `filename`, perhaps `filepath`, and `sentences` with `raw`; the images lie at images/filepath/filename or at
    images/filename; `split` is "test" by default. Any other file is a table with the columns filepath and title, a line
    for each caption, and has no splits. `images`: the folder of the images; by default the file's own.

    Raises ValueError for a file in another format, a split that it lacks, images outside of the folder, and fewer than
    two images.
    """
    folder = Path(images) if images is not None else Path(file).parent
    if not folder.is_dir():
        raise invalid("images", "be the folder of the pictures", folder, "There is no such folder.")
    if Path(file).suffix == ".json":
        captions = _read_json(Path(file), folder, split or "test")
    elif split is not None:
        raise invalid("split", "be left out with a table", f'"{split}"', "Only Karpathy's JSON has splits.")
    else:
        captions = _read_captions(Path(file), folder)
    if len(captions) < 2:
        raise invalid(
            "captions", "hold two pictures with captions at least", f"{len(captions)} in {file}", "Look at it."
        )
    owner = np.repeat(np.arange(len(captions)), [len(texts) for texts in captions.values()])
    return Captioned(list(captions), [text for texts in captions.values() for text in texts], owner)


def _read_json(file: Path, folder: Path, split: str) -> dict[str, list[str]]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        entries = [(str(entry["split"]), _path(entry), _texts(entry)) for entry in content["images"]]
    except OSError as failure:
        raise invalid("captions", "be a file that can be read", file, f"{failure.strerror}.") from failure
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failure:
        remedy = "Each of `images` has split, filename and sentences with raw."
        raise invalid("captions", "be Karpathy's JSON", f"{file} ({failure!r})", remedy) from failure
    splits = Counter(name for name, _, _ in entries)
    if split not in splits:
        raise invalid("split", f"be one of {', '.join(sorted(splits))}", f'"{split}"', f"These are in {file}.")
    captions: dict[str, list[str]] = {}
    for name, (subfolder, file_name), texts in entries:
        if name == split and texts:
            path = folder / subfolder / file_name
            captions.setdefault(_inside(folder, path if path.is_file() else folder / file_name), []).extend(texts)
    return captions


def _inside(folder: Path, path: Path) -> str:
    """The path as a text; raises ValueError for a path that leads out of the folder, through links too."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise invalid("captions", "name pictures within the folder", path, "Paths go down only.")
    return str(path)


def _path(entry: Any) -> tuple[str, str]:
    """The sub-folder and the name of an image's file; Flickr30k has no sub-folder."""
    return str(entry.get("filepath", "")), str(entry["filename"])


def _texts(entry: Any) -> list[str]:
    clean = (" ".join(sentence["raw"].split()) for sentence in entry["sentences"])
    return [text for text in clean if text]


def _read_captions(file: Path, folder: Path) -> dict[str, list[str]]:
    captions: dict[str, list[str]] = {}
    bad: Counter[str] = Counter()
    for row in read_table(file, folder, name="captions"):
        if isinstance(row, str):
            bad[row] += 1
        else:
            path, caption = row
            captions.setdefault(_inside(folder, path), []).append(caption)
    if bad:
        raise invalid(
            "captions", "have a picture and a caption in each line", f"{counted(bad)} in {file}", "Mend them."
        )
    return captions
