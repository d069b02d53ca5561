"""What the classes of a test are called: files of names and of templates, as the field writes them.

Beside `class_folder.py`, which says which picture is of which class. Names and templates only become features in
`evaluate/zeroshot.py`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from contrastile._check import wrong
from contrastile.data.templates import TEMPLATES

WNID = re.compile(r"n\d{8}")


class Class(NamedTuple):
    """A class: the folder or number that stands for it, None where its place in the list does; and its names."""

    key: str | None
    names: tuple[str, ...]


def read_classes(path: str | Path) -> list[Class]:
    """The classes of a file, in its order.

    JSON: a list of names, or an object from folder to name; a name may be a list of synonyms. Keras's object from
    number to folder and name is read too. Any other file is text, a line `folder<TAB>name, synonym, ...` for each.
    Raises ValueError for what is neither, for a class without a name and for one that comes twice.
    """
    text = _text(path, "classes")
    classes = _of_json(text, path) if Path(path).suffix == ".json" else _of_lines(text, path)
    times = Counter(one.key for one in classes if one.key is not None)
    twice = next((key for key, count in times.items() if count > 1), None)
    if twice is not None:
        raise wrong("classes", "name each folder once", f'"{twice}" twice in {path}', "Put its names into one entry.")
    nameless = next((place for place, one in enumerate(classes) if not one.names), None)
    if nameless is not None:
        got = f"none for {classes[nameless].key or nameless} in {path}"
        raise wrong("classes", "have a name each", got, "A text, or a list of synonyms.")
    if len(classes) < 2:
        raise wrong("classes", "be two at least", f"{len(classes)} in {path}", "There is nothing to choose from.")
    return classes


def _of_json(text: str, path: str | Path) -> list[Class]:
    try:
        # an object that says a key twice would lose the first one silently
        told = json.loads(text, object_pairs_hook=list if _is_object(text) else dict)
    except (ValueError, RecursionError) as failure:
        raise wrong("classes", "be a JSON file where its name says so", f"{path}: {failure}", "Mend it.") from failure
    if _is_object(text):
        entries = [(str(key), value) for key, value in told]
        return _of_keras(entries) if _is_keras(entries) else [Class(key, _names(value)) for key, value in entries]
    if not isinstance(told, list):
        remedy = "One name for each class, or an object from folder to name."
        raise wrong("classes", "be a JSON list or object", f"{type(told).__name__} in {path}", remedy)
    return [Class(None, _names(value)) for value in told]


def _is_object(text: str) -> bool:
    return text.lstrip().startswith("{")


def _is_keras(entries: list[tuple[str, Any]]) -> bool:
    return all(
        key.isdecimal() and isinstance(value, list) and len(value) == 2 and WNID.fullmatch(str(value[0]))
        for key, value in entries
    )


def _of_keras(entries: list[tuple[str, Any]]) -> list[Class]:
    """{"0": ["n01440764", "tench"], ...}: by number; names with underscores."""
    numbered = sorted(entries, key=lambda entry: int(entry[0]))
    return [Class(folder, _names(name.replace("_", " "))) for _, (folder, name) in numbered]


def _names(value: Any) -> tuple[str, ...]:
    """One name or several; none where it is anything else."""
    listed = value if isinstance(value, list) else [value]
    clean = [" ".join(name.split()) for name in listed if isinstance(name, str)]
    return tuple(name for name in clean if name) if len(clean) == len(listed) else ()


def _of_lines(text: str, path: str | Path) -> list[Class]:
    classes = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        folder, tab, names = line.partition("\t")
        if not tab:
            got = f"none at {path}:{number}"
            raise wrong("classes", "have a tab between folder and name", got, "Or give a JSON file.")
        classes.append(Class(folder.strip(), _names(names.split(","))))
    return classes


def read_mapping(path: str | Path) -> dict[str, list[int | str]]:
    """From folder to the classes that are right for it, by number or by folder: a JSON object, such as ObjectNet's.

    Raises ValueError for a file that cannot be read or is none, and for a folder without classes.
    """
    text = _text(path, "mapping")
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as failure:
        raise wrong("mapping", "be a JSON file", f"{path}: {failure}", "Mend it.") from failure
    if not isinstance(told, Mapping) or not told:
        raise wrong("mapping", "be a JSON object from folder to classes", path, 'For example {"chair": [423, 559]}.')
    mapping = {folder: value if isinstance(value, list) else [value] for folder, value in told.items()}
    for folder, value in mapping.items():
        if not value or not all(isinstance(one, int | str) and not isinstance(one, bool) for one in value):
            remedy = "Numbers, or the folders that the classes go by."
            raise wrong("mapping", "give each folder its classes", f'{json.dumps(value)} for "{folder}"', remedy)
    return mapping


def read_templates(name: str | Path) -> tuple[str, ...]:
    """A set of `TEMPLATES` by its name, or a file with one a line; the place of the name is `{}` or `{c}`.

    Raises ValueError for a file that cannot be read or has none, and for a template with no such place, or two.

    >>> read_templates("plain")
    ('a photo of a {}.',)
    """
    if name in TEMPLATES:
        return TEMPLATES[str(name)]
    lines = [line.strip() for line in _text(name, "templates").splitlines()]
    templates = tuple(line.replace("{c}", "{}") for line in lines if line)
    wrong_one = next((template for template in templates if template.count("{}") != 1), None)
    if wrong_one is not None or not templates:
        got = f"{json.dumps(wrong_one) if templates else 'none'} in {name}"
        raise wrong("templates", "have one {} or {c} each, the place of the name", got, "One template a line.")
    return templates


def _text(path: str | Path, what: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as failure:
        raise wrong(what, "be a text in UTF-8", path, "Save it again.") from failure
    except OSError as failure:
        raise wrong(what, "be a file that can be read", path, f"{failure.strerror}.") from failure
