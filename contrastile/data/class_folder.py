"""Images with classes, for zero-shot classification: a folder with a sub-folder for each class, as ImageNet has.

Stands beside `captions.py`; evaluation alone reads it. Nothing is decoded here: `loader.py` reads the images when they
are measured. The known layouts:

    ImageNet val             1000 folders n01440764, ...; names by folder
    ImageNet-V2              1000 folders "0" ... "999": numbers of the classes, in numeric order
    ImageNet-A, -R, -Sketch  folders of some of the classes (200, 200, all): the others are no answers
    ObjectNet                folders of its own, each of several classes: a mapping; folders without one are left out
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from contrastile._errors import invalid
from contrastile.data.base import Indices
from contrastile.data.classes import Class, read_classes, read_mapping
from contrastile.data.sources import PICTURES


@dataclass(frozen=True)
class ClassFolder:
    """Images `paths` `[n]`, the number of the folder of each, `labels` `[n]`, and the possible answers.

    names: those of each class, with synonyms. right: `[folders, classes]`, true where a class is right for a folder.
    left_out: the number of folders without a class.
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
    """The images below `folder` and their classes.

    The class of a sub-folder is the entry of its name in the file `classes`; else, where every sub-folder is a number,
    the class of that number; else, where the file is a list of as many names, the class at its alphabetical place.
    Without a file, the name of a sub-folder is its class, underscores read as spaces. `mapping`, a JSON file, gives a
    sub-folder several classes. Answers are the classes that are right for some folder, or "all".

    Raises ValueError for a folder without sub-folders or images, for links that lead out of it, and for sub-folders
    without a class.
    """
    root = Path(folder)
    folders = _folders(root)
    listed = [Class(name, (name.replace("_", " "),)) for name in folders]
    known = read_classes(classes) if classes is not None else listed
    classes_of = read_mapping(mapping) if mapping is not None else None
    if classes_of is None:
        of_folder = _single_classes(folders, known, classes)
    else:
        of_folder = {name: _several_classes(classes_of[name], name, known) for name in folders if name in classes_of}
        if not of_folder:
            remedy = "Its keys are the names of the folders."
            raise invalid("mapping", f"name folders of {root}", f"{len(classes_of)} others", remedy)
    images = {name: _images(root / name, root.resolve()) for name in of_folder}
    paths = [path for name in of_folder for path in images[name]]
    if not paths:
        raise invalid("folder", f"hold pictures ({', '.join(PICTURES)})", f'"{root}"', "Look at its sub-folders.")
    right = np.zeros((len(of_folder), len(known)), dtype=bool)
    for row, members in enumerate(of_folder.values()):
        right[row, members] = True
    offered = np.flatnonzero(right.any(axis=0)) if among == "folders" else np.arange(len(known))
    if len(offered) < 2:
        raise invalid(
            "folder", "hold two classes at least", f"{len(offered)} in {root}", "There is nothing to choose from."
        )
    return ClassFolder(
        paths=paths,
        labels=np.repeat(np.arange(len(of_folder)), [len(images[name]) for name in of_folder]),
        names=[known[number].names for number in offered],
        right=right[:, offered],
        left_out=len(folders) - len(of_folder),
    )


def _folders(root: Path) -> list[str]:
    """The sub-folders in alphabetical order, or in numeric order where all of them are numbers."""
    try:
        names = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as failure:
        raise invalid("folder", "be a folder that can be read", root, f"{failure.strerror}.") from failure
    if not names:
        raise invalid("folder", "have a sub-folder for each class", root, "Name the folder above them.")
    return sorted(names, key=int) if _all_numbers(names) else names


def _all_numbers(names: list[str]) -> bool:
    return all(name.isdecimal() for name in names)


def _single_classes(folders: list[str], known: list[Class], file: str | Path | None) -> dict[str, list[int]]:
    """The class of each folder."""
    numbers = {one.key: number for number, one in enumerate(known) if one.key is not None}
    by_number = _all_numbers(folders)
    if not numbers and not by_number:
        if len(folders) != len(known):
            got = f"{len(folders)} folders and {len(known)} names in {file}"
            remedy = "Give an object from folder to name."
            raise invalid("classes", "be one for each folder where they are a mere list", got, remedy)
        return {name: [number] for number, name in enumerate(folders)}
    classes = {}
    for name in folders:
        number = numbers.get(name, int(name) if by_number else len(known))
        if number >= len(known):
            raise invalid("classes", "name every folder", f'none for "{name}" in {file}', "Add it, or give a mapping.")
        classes[name] = [number]
    return classes


def _several_classes(members: list[int | str], folder: str, known: list[Class]) -> list[int]:
    """The classes that a mapping gives a folder, by number."""
    numbers = {one.key: number for number, one in enumerate(known) if one.key is not None}
    classes = []
    for member in members:
        number = member if isinstance(member, int) else numbers.get(member, -1)
        if not 0 <= number < len(known):
            got = f'{member} for "{folder}"'
            raise invalid("mapping", f"name classes among the {len(known)} there are", got, "By number or by folder.")
        classes.append(number)
    return classes


def _images(folder: Path, root: Path) -> list[str]:
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in PICTURES and path.is_file())
    for path in (folder, *paths):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise invalid(
                "folder", "hold no links that lead out of it", path, "Copy what they show, or name it instead."
            )
    return [str(path) for path in paths]
