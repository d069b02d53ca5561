"""Names of classes and prompts, read from files in the usual formats.

Stands below `class_folder.py`, which gives each image its class; `evaluate/retrieval.py` makes features of names and
prompts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from contrastile._errors import invalid
from contrastile.data.prompts import PROMPTS

WNID = re.compile(r"n\d{8}")


class Class(NamedTuple):
    """A class: its folder, or None where its place in the list is its number; and its names."""

    key: str | None
    names: tuple[str, ...]


def read_classes(path: str | Path) -> list[Class]:
    """The classes of a file, in its order.

    JSON: a list of names, or an object from folder to name; a name may be a list of synonyms. Keras's object from
    number to folder and name is read too. Any other file is text, a line `folder<TAB>name, synonym, ...` a class.
    Raises ValueError for any other content, for a class without a name and for one that comes twice.
    """
    text = _text(path, "classes")
    classes = _from_json(text, path) if Path(path).suffix == ".json" else _from_lines(text, path)
    times = Counter(one.key for one in classes if one.key is not None)
    twice = next((key for key, count in times.items() if count > 1), None)
    if twice is not None:
        raise invalid("classes", "name each folder once", f'"{twice}" twice in {path}', "Put its names into one entry.")
    nameless = next((place for place, one in enumerate(classes) if not one.names), None)
    if nameless is not None:
        got = f"none for {classes[nameless].key or nameless} in {path}"
        raise invalid("classes", "have a name each", got, "A text, or a list of synonyms.")
    if len(classes) < 2:
        raise invalid("classes", "be two at least", f"{len(classes)} in {path}", "There is nothing to choose from.")
    return classes


def _from_json(text: str, path: str | Path) -> list[Class]:
    try:
        # pairs, because a dict would silently lose the first of two equal keys
        content = json.loads(text, object_pairs_hook=list if _is_object(text) else dict)
    except (ValueError, RecursionError) as failure:
        raise invalid("classes", "be a JSON file where its name says so", f"{path}: {failure}", "Mend it.") from failure
    if _is_object(text):
        entries = [(str(key), value) for key, value in content]
        return _from_keras(entries) if _is_keras(entries) else [Class(key, _names(value)) for key, value in entries]
    if not isinstance(content, list):
        remedy = "One name for each class, or an object from folder to name."
        raise invalid("classes", "be a JSON list or object", f"{type(content).__name__} in {path}", remedy)
    return [Class(None, _names(value)) for value in content]


def _is_object(text: str) -> bool:
    return text.lstrip().startswith("{")


def _is_keras(entries: list[tuple[str, Any]]) -> bool:
    return all(
        key.isdecimal() and isinstance(value, list) and len(value) == 2 and WNID.fullmatch(str(value[0]))
        for key, value in entries
    )


def _from_keras(entries: list[tuple[str, Any]]) -> list[Class]:
    """The classes of {"0": ["n01440764", "tench"], ...} in numeric order, underscores read as spaces."""
    numbered = sorted(entries, key=lambda entry: int(entry[0]))
    return [Class(folder, _names(name.replace("_", " "))) for _, (folder, name) in numbered]


def _names(value: Any) -> tuple[str, ...]:
    """One name or several; none for any other value."""
    listed = value if isinstance(value, list) else [value]
    clean = [" ".join(name.split()) for name in listed if isinstance(name, str)]
    return tuple(name for name in clean if name) if len(clean) == len(listed) else ()


def _from_lines(text: str, path: str | Path) -> list[Class]:
    classes = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        folder, tab, names = line.partition("\t")
        if not tab:
            got = f"none at {path}:{number}"
            raise invalid("classes", "have a tab between folder and name", got, "Or give a JSON file.")
        classes.append(Class(folder.strip(), _names(names.split(","))))
    return classes


def read_mapping(path: str | Path) -> dict[str, list[int | str]]:
    """The classes that are right for each folder, by number or by folder: a JSON object, such as ObjectNet's.

    Raises ValueError for a file that cannot be read or is no such object, and for a folder without classes.
    """
    text = _text(path, "mapping")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as failure:
        raise invalid("mapping", "be a JSON file", f"{path}: {failure}", "Mend it.") from failure
    if not isinstance(content, Mapping) or not content:
        raise invalid("mapping", "be a JSON object from folder to classes", path, 'For example {"chair": [423, 559]}.')
    mapping = {folder: value if isinstance(value, list) else [value] for folder, value in content.items()}
    for folder, value in mapping.items():
        if not value or not all(isinstance(one, int | str) and not isinstance(one, bool) for one in value):
            remedy = "Numbers, or the folders that the classes go by."
            raise invalid("mapping", "give each folder its classes", f'{json.dumps(value)} for "{folder}"', remedy)
    return mapping


def read_prompts(name: str | Path) -> tuple[str, ...]:
    """A set of `PROMPTS` by its name, or a file with a prompt a line; the place of the class's name is `{}` or `{c}`.

    Raises ValueError for a file that cannot be read or is empty, and for a prompt with no such place, or two.

    >>> read_prompts("plain")
    ('a photo of a {}.',)
    """
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
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as failure:
        raise invalid(name, "be a text in UTF-8", path, "Save it again.") from failure
    except OSError as failure:
        raise invalid(name, "be a file that can be read", path, f"{failure.strerror}.") from failure
