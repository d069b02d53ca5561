"""Images to evaluate with: those with classes for zero-shot classification, those with captions for retrieval.

Nothing is decoded here. Classes are sub-folders, as ImageNet has them. The known layouts:

    ImageNet val             1000 folders n01440764, ...; names by folder
    ImageNet-V2              1000 folders "0" ... "999": numbers of the classes, in numeric order
    ImageNet-A, -R, -Sketch  folders of some of the classes (200, 200, all): the others are no answers
    ObjectNet                folders of its own, each of several classes: a mapping; folders without one are left out
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from contrastile._errors import invalid
from contrastile.data.base import Indices, counted
from contrastile.data.files import files_below, open_file
from contrastile.data.sources import PICTURES, PROMPTS
from contrastile.data.tables import read_table, warn_of_quotes

# names of ImageNet's folders
WNID = re.compile(r"n\d{8}")


class Class(NamedTuple):
    """A class and its names. key: its folder, or None in a list without folders, where classes have numbers only."""

    key: str | None
    names: tuple[str, ...]


def read_classes(path: str | Path) -> list[Class]:
    """The classes of a file, in its order.

    JSON: a list of names, or an object from folder to name; a name may be a list of synonyms. Keras's object from
    number to folder and name is read too. Any other file is text, a line `folder<TAB>name, synonym, ...` a class.
    """
    entries = (_json_entries if Path(path).suffix == ".json" else _lines)(_text(path, "classes"), path)
    classes = [Class(key, _names(value)) for key, value in entries]
    times = Counter(entry.key for entry in classes if entry.key is not None)
    if (twice := next((key for key, count in times.items() if count > 1), None)) is not None:
        raise invalid("classes", "name each folder once", f'"{twice}" twice in {path}', "Put its names into one entry.")
    if (nameless := next((number for number, entry in enumerate(classes) if not entry.names), None)) is not None:
        got = f"none for {classes[nameless].key or nameless} in {path}"
        raise invalid("classes", "have a name each", got, "A text, or a list of synonyms.")
    if len(classes) < 2:
        raise invalid("classes", "be two at least", f"{len(classes)} in {path}", "There is nothing to choose from.")
    return classes


def _json_entries(text: str, path: str | Path) -> list[tuple[str | None, Any]]:
    # pairs, because a dict would silently lose the first of two equal keys
    content = _loads(text, path, "classes", "be a JSON file where its name says so", object_pairs_hook=list)
    if not isinstance(content, list):
        remedy = "One name for each class, or an object from folder to name."
        raise invalid("classes", "be a JSON list or object", f"{type(content).__name__} in {path}", remedy)
    if not text.lstrip().startswith("{"):
        return [(None, value) for value in content]
    if all(
        key.isdecimal() and isinstance(value, list) and len(value) == 2 and WNID.fullmatch(str(value[0]))
        for key, value in content
    ):
        # Keras's {"0": ["n01440764", "great_white_shark"], ...}
        numbered = sorted(content, key=lambda entry: int(entry[0]))
        return [(folder, name.replace("_", " ")) for _, (folder, name) in numbered]
    return content


def _lines(text: str, path: str | Path) -> Iterator[tuple[str | None, Any]]:
    for number, line in enumerate(text.splitlines(), start=1):
        folder, tab, names = line.partition("\t")
        if line.strip() and not tab:
            got = f"none at {path}:{number}"
            raise invalid("classes", "have a tab between folder and name", got, "Or give a JSON file.")
        if line.strip():
            yield folder.strip(), names.split(",")


def _names(value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in values):
        return ()
    return tuple(clean for name in values if (clean := " ".join(name.split())))


def read_mapping(path: str | Path) -> dict[str, list[int | str]]:
    """The classes that are right for each folder, by number or by folder: a JSON object, such as ObjectNet's."""
    content = _loads(_text(path, "mapping"), path, "mapping", "be a JSON file")
    if not isinstance(content, dict) or not content:
        raise invalid("mapping", "be a JSON object from folder to classes", path, 'For example {"chair": [423, 559]}.')
    mapping = {folder: value if isinstance(value, list) else [value] for folder, value in content.items()}
    for folder, value in mapping.items():
        if not value or not all(isinstance(key, int | str) and not isinstance(key, bool) for key in value):
            remedy = "Numbers, or the folders that the classes go by."
            raise invalid("mapping", "give each folder its classes", f'{json.dumps(value)} for "{folder}"', remedy)
    return mapping


def read_prompts(name: str | Path) -> tuple[str, ...]:
    """A set of `PROMPTS` by name, or a file with a prompt a line, each with `{}` or `{c}` in the place of the class."""
    if name in PROMPTS:
        return PROMPTS[str(name)]
    lines = [line.strip() for line in _text(name, "templates").splitlines()]
    prompts = tuple(line.replace("{c}", "{}") for line in lines if line)
    wrong = next((prompt for prompt in prompts if prompt.count("{}") != 1), None)
    if wrong is not None or not prompts:
        got = f"{json.dumps(wrong) if prompts else 'none'} in {name}"
        raise invalid("templates", "have one {} or {c} each, the place of the name", got, "One template a line.")
    return prompts


def _text(path: str | Path, name: str) -> str:
    try:
        with open_file(path) as file:
            return file.read().decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        raise invalid(name, "be a text in UTF-8", path, "Save it again.") from failure
    except OSError as failure:
        raise invalid(name, "be a file that can be read", path, f"{failure.strerror}.") from failure


def _loads(text: str, path: str | Path, name: str, rule: str, **options: Any) -> Any:
    try:
        return json.loads(text, **options)
    except (ValueError, RecursionError) as failure:
        raise invalid(name, rule, f"{path}: {failure}", "Mend it.") from failure


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
    folder: str | Path, *, classes: str | Path | None = None, mapping: str | Path | None = None,
    among: Literal["folders", "all"] = "folders",
) -> ClassFolder:  # fmt: skip
    """The images below `folder` and their classes.

    The class of a sub-folder is the first of these that exists: the entry of its name in the file `classes`; the class
    of its number, if every sub-folder is a number; the class at its alphabetical place, if the file is a list of as
    many names. Without a file, the name of a sub-folder is its class, underscores read as spaces. `mapping`, a JSON
    file, gives a sub-folder several classes. `among`: the answers are the classes that are right for some of the
    "folders", or "all".
    """
    root = Path(folder)
    folders = _folders(root)
    known = [Class(name, (name.replace("_", " "),)) for name in folders] if classes is None else read_classes(classes)
    numbers = {entry.key: number for number, entry in enumerate(known) if entry.key is not None}
    if mapping is None:
        of_folder = _single_classes(folders, numbers, len(known), classes)
    else:
        members, count = read_mapping(mapping), len(known)
        mapped = [name for name in folders if name in members]
        of_folder = {name: [_mapped_class(key, name, numbers, count) for key in members[name]] for name in mapped}
        if not of_folder:
            remedy = "Its keys are the names of the folders."
            raise invalid("mapping", f"name folders of {root}", f"{len(members)} others", remedy)
    images = {name: _images(root / name, root.resolve()) for name in of_folder}
    paths = [path for name in of_folder for path in images[name]]
    if not paths:
        raise invalid("folder", f"hold images ({', '.join(PICTURES)})", f'"{root}"', "Look at its sub-folders.")
    right = np.zeros((len(of_folder), len(known)), dtype=bool)
    for row, right_classes in enumerate(of_folder.values()):
        right[row, right_classes] = True
    offered = np.flatnonzero(right.any(axis=0)) if among == "folders" else np.arange(len(known))
    if len(offered) < 2:
        got = f"{len(offered)} in {root}"
        raise invalid("folder", "hold two classes at least", got, "There is nothing to choose from.")
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
    return sorted(names, key=int) if all(map(str.isdecimal, names)) else names


def _single_classes(
    folders: list[str], numbers: dict[str, int], count: int, file: str | Path | None
) -> dict[str, list[int]]:
    """The class of each folder, by number."""
    by_number = all(map(str.isdecimal, folders)) and numbers.keys().isdisjoint(folders)
    if not numbers and not by_number:
        if len(folders) != count:
            got = f"{len(folders)} folders and {count} names in {file}"
            remedy = "Give an object from folder to name."
            raise invalid("classes", "be one for each folder where they are a mere list", got, remedy)
        numbers = {name: number for number, name in enumerate(folders)}
    classes = {name: [numbers.get(name, int(name) if by_number else count)] for name in folders}
    if (nameless := next((name for name, (number,) in classes.items() if number >= count), None)) is not None:
        got = f'none for "{nameless}" in {file}'
        raise invalid("classes", "name every folder", got, "Add it, or give a mapping.")
    return classes


def _mapped_class(key: int | str, folder: str, numbers: dict[str, int], count: int) -> int:
    """The number of a class that a mapping gives a folder."""
    number = key if isinstance(key, int) else numbers.get(key, -1)
    if not 0 <= number < count:
        rule = f"name classes among the {count} there are"
        raise invalid("mapping", rule, f'{key} for "{folder}"', "By number or by folder.")
    return number


def _images(folder: Path, root: Path) -> list[str]:
    paths = files_below(folder, PICTURES)
    for path in (folder, *paths):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            remedy = "Copy what they show, or name it instead."
            raise invalid("folder", "hold no links that lead out of it", path, remedy)
    return [str(path) for path in paths]


@dataclass(frozen=True)
class Captioned:
    """Images `paths` `[n]` and captions `texts` `[m]`; `owner` `[m]`: the image that each caption belongs to."""

    paths: list[str]
    texts: list[str]
    owner: Indices


def open_captions(file: str | Path, *, images: str | Path | None = None, split: str | None = None) -> Captioned:
    """The images of a split with all of their captions, in the file's order.

    A `.json` file is Karpathy's (`dataset_coco.json`): its `images` have `split`, `filename`, perhaps `filepath`, and
    `sentences` with `raw`; `split` is "test" by default. Any other file is a table with the columns filepath and title,
    and has no splits. `images`: the folder of the images, by default the file's own; none may lie outside of it.
    """
    file = Path(file)
    folder = Path(images) if images is not None else file.parent
    if not folder.is_dir():
        raise invalid("images", "be the folder of the images", folder, "There is no such folder.")
    if file.suffix != ".json" and split is not None:
        raise invalid("split", "be left out with a table", f'"{split}"', "Only Karpathy's JSON has splits.")
    if file.suffix == ".json":
        pairs = _json_captions(file, folder, split or "test")
    else:
        rows = read_table(file, folder, name="captions")
        warn_of_quotes(file, rows)
        if bad := Counter(row for row in rows if isinstance(row, str)):
            got = f"{counted(bad)} in {file}"
            raise invalid("captions", "have an image and a caption in each line", got, "Mend them.")
        pairs = [(row[0], [row[1]]) for row in rows if not isinstance(row, str)]
    captions = defaultdict[Path, list[str]](list)
    for path, texts in pairs:
        # links are followed too
        if not path.resolve().is_relative_to(folder.resolve()):
            raise invalid("captions", "name images within the folder", path, "Paths go down only.")
        captions[path].extend(texts)
    if len(captions) < 2:
        got = f"{len(captions)} in {file}"
        raise invalid("captions", "hold two images with captions at least", got, "Look at it.")
    owner = np.repeat(np.arange(len(captions)), [len(texts) for texts in captions.values()])
    return Captioned(list(map(str, captions)), [text for texts in captions.values() for text in texts], owner)


def _json_captions(file: Path, folder: Path, split: str) -> list[tuple[Path, list[str]]]:
    text = _text(file, "captions")
    try:
        # Flickr30k has no `filepath`
        entries = [
            (str(entry["split"]), str(entry.get("filepath", "")), str(entry["filename"]), _texts(entry))
            for entry in json.loads(text)["images"]
        ]
        if any("\0" in f"{subfolder}{name}" for _, subfolder, name, _ in entries):
            raise ValueError("NUL in a name")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failure:
        remedy = "Each of `images` has split, filename and sentences with raw."
        raise invalid("captions", "be Karpathy's JSON", f"{file} ({failure!r})", remedy) from failure
    splits = Counter(name for name, *_ in entries)
    if split not in splits:
        raise invalid("split", f"be one of {', '.join(sorted(splits))}", f'"{split}"', f"These are in {file}.")
    return [
        (path if (path := folder / subfolder / name).is_file() else folder / name, texts)
        for of, subfolder, name, texts in entries
        if of == split and texts
    ]


def _texts(entry: Any) -> list[str]:
    return [text for sentence in entry["sentences"] if (text := " ".join(sentence["raw"].split()))]
