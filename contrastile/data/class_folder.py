"""Pictures to be classified: a folder with a sub-folder for each class, as ImageNet and its relatives lie.

A source of evaluation alone, beside `captions.py`. Nothing is decoded here: `decoding.py` reads the pictures when they
are measured. How the known layouts are read:

    ImageNet val             1000 folders n01440764, ...; names by folder
    ImageNet-V2              1000 folders "0" ... "999": numbers of the classes, in their order as numbers
    ImageNet-A, -R, -Sketch  folders of some of the classes (200, 200, all): the others are not offered as answers
    ObjectNet                folders of its own, each of several classes: a mapping; folders without one are left out
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from contrastile._check import wrong
from contrastile.data.classes import Class, read_classes, read_mapping
from contrastile.data.pairs import Indices
from contrastile.data.sources import PICTURES


@dataclass(frozen=True)
class ClassFolder:
    """Pictures `paths` `[n]`, each of the folder number `labels` `[n]`, and what may be answered.

    names: of each class, with synonyms. right: `[folders, classes]`, which answers are right for a folder's pictures.
    left_out: how many folders have no class.
    """

    paths: list[str]
    labels: Indices
    names: list[tuple[str, ...]]
    right: npt.NDArray[np.bool_]
    left_out: int


def open_class_folder(
    folder: str | Path,
    *,
    classes: str | Path | None = None,
    mapping: str | Path | None = None,
    among: Literal["folders", "all"] = "folders",
) -> ClassFolder:
    """The pictures below `folder` and their classes.

    A folder's class is the one of its name in the file `classes`; else, where every folder is a number, the one of that
    number; else, where the file is a mere list of as many names, the one of its place in alphabetical order. Without a
    file, folders are called by their own names, underscores read as spaces. With `mapping` (a JSON file) a folder has
    the classes that it names. Answers are chosen among the classes that are right for some folder, or among "all".

    Raises ValueError for a folder without sub-folders or pictures, for links that lead out of it, and for sub-folders
    whose class nobody names.
    """
    root = Path(folder)
    folders = _folders(root)
    listed = [Class(name, (name.replace("_", " "),)) for name in folders]
    known = read_classes(classes) if classes is not None else listed
    told = read_mapping(mapping) if mapping is not None else None
    if told is None:
        of_folder = _one_each(folders, known, classes)
    else:
        of_folder = {name: _several(told[name], name, known) for name in folders if name in told}
        if not of_folder:
            remedy = "Its keys are the names of the folders."
            raise wrong("mapping", f"name folders of {root}", f"{len(told)} others", remedy)
    pictures = {name: _pictures(root / name, root.resolve()) for name in of_folder}
    paths = [path for name in of_folder for path in pictures[name]]
    if not paths:
        raise wrong("folder", f"hold pictures ({', '.join(PICTURES)})", f'"{root}"', "Look at its sub-folders.")
    right = np.zeros((len(of_folder), len(known)), dtype=bool)
    for row, members in enumerate(of_folder.values()):
        right[row, members] = True
    offered = np.flatnonzero(right.any(axis=0)) if among == "folders" else np.arange(len(known))
    if len(offered) < 2:
        raise wrong(
            "folder", "hold two classes at least", f"{len(offered)} in {root}", "There is nothing to choose from."
        )
    return ClassFolder(
        paths=paths,
        labels=np.repeat(np.arange(len(of_folder)), [len(pictures[name]) for name in of_folder]),
        names=[known[place].names for place in offered],
        right=right[:, offered],
        left_out=len(folders) - len(of_folder),
    )


def _folders(root: Path) -> list[str]:
    """The sub-folders in the order of their classes: of their names, or as numbers where all of them are."""
    try:
        names = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as failure:
        raise wrong("folder", "be a folder that can be read", root, f"{failure.strerror}.") from failure
    if not names:
        raise wrong("folder", "have a sub-folder for each class", root, "Name the folder above them.")
    return sorted(names, key=int) if _all_numbers(names) else names


def _all_numbers(names: list[str]) -> bool:
    return all(name.isdecimal() for name in names)


def _one_each(folders: list[str], known: list[Class], file: str | Path | None) -> dict[str, list[int]]:
    """The class of each folder."""
    by_key = {one.key: place for place, one in enumerate(known) if one.key is not None}
    by_number = _all_numbers(folders)
    if not by_key and not by_number:
        if len(folders) != len(known):
            got = f"{len(folders)} folders and {len(known)} names in {file}"
            remedy = "Give an object from folder to name."
            raise wrong("classes", "be one for each folder where they are a mere list", got, remedy)
        return {name: [place] for place, name in enumerate(folders)}
    found = {}
    for name in folders:
        place = by_key.get(name, int(name) if by_number else len(known))
        if place >= len(known):
            raise wrong("classes", "name every folder", f'none for "{name}" in {file}', "Add it, or give a mapping.")
        found[name] = [place]
    return found


def _several(members: list[int | str], folder: str, known: list[Class]) -> list[int]:
    """The classes that a mapping gives a folder, by number."""
    by_key = {one.key: place for place, one in enumerate(known) if one.key is not None}
    found = []
    for member in members:
        place = member if isinstance(member, int) else by_key.get(member, -1)
        if not 0 <= place < len(known):
            got = f'{member} for "{folder}"'
            raise wrong("mapping", f"name classes among the {len(known)} there are", got, "By number or by folder.")
        found.append(place)
    return found


def _pictures(folder: Path, inside: Path) -> list[str]:
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in PICTURES and path.is_file())
    for path in (folder, *found):
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            raise wrong("folder", "hold no links that lead out of it", path, "Copy what they show, or name it instead.")
    return [str(path) for path in found]
