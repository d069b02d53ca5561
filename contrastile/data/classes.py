"""Names of classes and prompts: the built-in prompts, and files in the usual formats.

Stands below `evaluation_sets.py`, which gives each image its class; `evaluate/zeroshot.py` makes features of names and
prompts. A recipe is checked with this file, so it imports nothing heavy.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from contrastile._errors import invalid

# sentences that the name of a class is put into, by the names that a recipe gives them; the words are ours
PROMPTS: dict[str, tuple[str, ...]] = {
    # the most common prompt of the field
    "plain": ("a photo of a {}.",),
    "several": (
        "a photo of a {}.",
        "a close photo of a {}.",
        "a photo of a {}, seen from afar.",
        "a poor and blurred photo of a {}.",
        "a {} among other things.",
        "a drawing of a {}.",
        "something that looks like a {}.",
    ),
}

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
    entries = (_json_entries if Path(path).suffix == ".json" else _lines)(_text(path, "classes"), path)
    classes = [Class(key, _names(value)) for key, value in entries]
    times = Counter(entry.key for entry in classes if entry.key is not None)
    twice = next((key for key, count in times.items() if count > 1), None)
    if twice is not None:
        raise invalid("classes", "name each folder once", f'"{twice}" twice in {path}', "Put its names into one entry.")
    nameless = next((number for number, entry in enumerate(classes) if not entry.names), None)
    if nameless is not None:
        got = f"none for {classes[nameless].key or nameless} in {path}"
        raise invalid("classes", "have a name each", got, "A text, or a list of synonyms.")
    if len(classes) < 2:
        raise invalid("classes", "be two at least", f"{len(classes)} in {path}", "There is nothing to choose from.")
    return classes


def _json_entries(text: str, path: str | Path) -> list[tuple[str | None, Any]]:
    """Folders, or None, with one name or several."""
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
    """One name or several; none for any other value."""
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in values):
        return ()
    return tuple(clean for name in values if (clean := " ".join(name.split())))


def read_mapping(path: str | Path) -> dict[str, list[int | str]]:
    """The classes that are right for each folder, by number or by folder: a JSON object, such as ObjectNet's.

    Raises ValueError for a file that cannot be read or is no such object, and for a folder without classes.
    """
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


def _loads(
    text: str, path: str | Path, name: str, rule: str, *, object_pairs_hook: Callable[[Any], Any] | None = None
) -> Any:
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except (ValueError, RecursionError) as failure:
        raise invalid(name, rule, f"{path}: {failure}", "Mend it.") from failure
