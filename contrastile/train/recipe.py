"""Recipes in and out: TOML text and overrides become a checked `Recipe`, and a `Recipe` becomes TOML again.

Every mistake is one line that names the file or the override, the key and the reason.
"""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from contrastile._errors import logger
from contrastile.train.config import AnyRecipe, Recipe
from contrastile.train.config.base import known_keys, unused_keys
from contrastile.train.folder import METRICS, PACKAGED, recipe_names
from contrastile.train.retriever.config import RetrieverRecipe

# the recipes by their key `kind`; a file without it has the first
KINDS: dict[str, type[AnyRecipe]] = {"image-text": Recipe, "retriever": RetrieverRecipe}

# the sides of each kind, for all of which one number of `train.sub_batch` stands
SIDES = {"image-text": ("image", "text"), "retriever": ("query", "passage")}

# names of other programs for a key
SYNONYMS = {
    "lr": "learning_rate", "wd": "weight_decay", **dict.fromkeys(("src", "path"), "source"), "batch_size": "batch",
    **dict.fromkeys(("micro_batch_size", "mini_batch_size"), "sub_batch"),
    **dict.fromkeys(("accum_freq", "gradient_accumulation_steps"), "accumulate"), "max_epochs": "epochs",
    "temperature": "scale", "embed_dim": "features",
}  # fmt: skip

# pydantic's errors that read better in other words
RULES = {
    "string_type": "must be a text in quotes",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be a table of keys"),
    "greater_than_equal": "must be at least {ge:,.16g}",
    "less_than_equal": "must be at most {le:,.16g}",
}


class RecipeError(ValueError):
    """A mistake in a recipe or an override, in one line: origin, key, reason."""

    def __init__(self, line: str) -> None:
        super().__init__(" ".join(line.splitlines()))


def load_any_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, files: bool = True, effects: bool | None = None
) -> Recipe | RetrieverRecipe:
    """Load the recipe at `path`, with `overrides` such as "optim.learning_rate=1e-3" put over it.

    A name such as "glyphs", where there is no file of that name, is that of a packaged recipe.

    An override takes the place of a key that it excludes, as `train.examples` does of `train.epochs`. Keys of the file
    that an override makes unused, as `optim.schedule` may `optim.cooldown`, are left out with a warning. With `files`,
    for a recipe that is to be trained, its files and folders must exist, and transformers must know its models; for
    these last ones alone the library is loaded. With `effects`, by default as `files`, every key that it gives must
    have an effect.

    Raises `RecipeError` with one line such as
    `recipes/x.toml: optim.learning_rte: unknown key (did you mean optim.learning_rate?)`.
    """
    reader = _Reader(str(path), overrides)
    if files if effects is None else effects:
        reader.remove_unused()
    recipe: Any = reader.validated(files=files)
    return recipe


def read_tables(origin: str) -> dict[str, Any]:
    """Read a TOML file, or a packaged recipe by its name, as nested dictionaries; raise `RecipeError` for neither."""
    packaged = PACKAGED / f"{origin}.toml"
    naming = f"a recipe is a TOML file that names its data: contrastile train RECIPE data.source={origin}"
    path = packaged if os.path.basename(origin) == origin and not os.path.exists(origin) else Path(origin)
    try:
        return tomllib.loads((path if path.is_file() else Path(origin)).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        reason = "no such file"
        if "=" in origin:
            reason += "; a recipe comes before key=value, such as glyphs"
        elif near := difflib.get_close_matches(Path(origin).stem, recipe_names(), n=1, cutoff=0.7):
            reason += f"; did you mean {near[0]}, a recipe of the package?"
        elif os.path.basename(origin) == origin:
            reason += "; contrastile --help lists the recipes of the package"
    except IsADirectoryError:
        inside = os.path.join(origin, "recipe.toml")
        reason = f"is a folder; {f'the recipe of this run is {inside}' if os.path.exists(inside) else naming}"
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = "not a text in UTF-8" if isinstance(error, UnicodeDecodeError) else f"not valid TOML: {error}"
        if not origin.endswith(".toml"):
            reason = f"not a recipe; {naming}"
    raise RecipeError(f"{origin}: {reason}")


def to_toml(recipe: AnyRecipe) -> str:
    """The recipe with every default that has an effect, as TOML that `load_any_recipe` reads back to an equal one."""
    tables = recipe.model_dump(mode="json", exclude_none=True)
    for unused in unused_keys(recipe):
        section, _, name = unused.key.rpartition(".")
        _value_at(section, tables).pop(name, None)
    return tomli_w.dumps(tables)


def touched(key: str, overrides: Collection[str]) -> bool:
    """True where an override sets the key, the table it lies in, or something within it."""
    return any(_within(key, name) or _within(name, key) for name in overrides)


def _within(key: str, table: str) -> bool:
    return f"{key}.".startswith(f"{table}.")


def _value_at(key: str, tables: dict[str, Any]) -> Any:
    """The value of a dotted key; None where there is none."""
    value: Any = tables
    for part in filter(None, key.split(".")):
        value = value.get(part) if isinstance(value, dict) else None
    return value


class _Reader:
    """The tables of one recipe with the overrides in them, and the sentences about its mistakes.

    `overrides` holds the text of each override under the dotted key that it sets.
    """

    def __init__(self, origin: str, overrides: Sequence[str]) -> None:
        self.origin, self.tables = origin, read_tables(origin)
        self.overrides: dict[str, str] = {}
        for override in overrides:
            self._apply(override)
        kind = self.tables.get("kind", "image-text")
        if not isinstance(kind, str) or kind not in KINDS:
            known = ", ".join(f"'{name}'" for name in KINDS)
            raise self._error("kind", f"must be one of {known}; got {_shown(kind)}")
        self.schema = KINDS[kind]
        self.known = [*known_keys(self.schema)]
        for key in self.overrides:
            self._remove_excluded(key)
        self.tables.setdefault("name", Path(origin).stem)

    def _apply(self, override: str) -> None:
        """Put one `key=value` over the tables."""
        key, equals, value = override.partition("=")
        *sections, name = parts = key.strip().split(".")
        if not equals or not all(parts):
            raise RecipeError(f"{override}: an override is written key=value, as in optim.learning_rate=1e-3")
        table = self.tables
        for depth, part in enumerate(sections, start=1):
            inner = table.setdefault(part, {})
            if parts[:depth] == ["train", "sub_batch"] and type(inner) is int:
                sides = SIDES.get(str(self.tables.get("kind", "image-text")), ())
                inner = table[part] = dict.fromkeys(sides, inner)
            table = inner
            if not isinstance(table, dict):
                raise RecipeError(f"{override}: {'.'.join(parts[:depth])}: has no keys of its own")
        table[name] = _parse(value.strip(), override)
        self.overrides[key.strip()] = override

    def _remove_excluded(self, key: str) -> None:
        """Remove the keys that an override takes the place of, but for those that another override sets."""
        section, _, name = key.rpartition(".")
        table = _value_at(section, self.tables)
        for rival in {rival for known, owner in self.known if known == key for rival in owner.instead.get(name, ())}:
            if isinstance(table, dict) and not any(_within(other, f"{section}.{rival}") for other in self.overrides):
                table.pop(rival, None)

    def remove_unused(self) -> None:
        """Remove keys of the file that overrides make unused; raise `RecipeError` for other unused keys.

        Keys of a run's own recipe are removed too, because earlier versions wrote every key.
        """
        of_a_run = (Path(self.origin).parent / METRICS).is_file()
        for unused in unused_keys(self.validated(files=False)):
            if _value_at(unused.key, self.tables) is not None:
                excused = of_a_run or any(touched(by, self.overrides) for by in unused.by)
                if self._is_overridden(unused.key) or not excused:
                    raise self._error(unused.key, unused.reason)
                self._leave_out(unused.key, unused.reason.partition(";")[0])

    def validated(self, *, files: bool) -> AnyRecipe:
        """The tables as a recipe; raises `RecipeError` for the first mistake."""
        context = {"files": files, "overrides": [*self.overrides]}
        try:
            return self.schema.model_validate(_frozen(self.tables), context=context)
        except ValidationError as error:
            mistakes = error.errors()
        # unknown keys first: one is often the reason why another is missing
        first = min(mistakes, key=lambda mistake: mistake["type"] != "extra_forbidden")
        key = self._key(first)
        kind = f"{key.rpartition('.')[0]}.kind"
        of_other_kind = first["type"] == "extra_forbidden" and key in dict(self.known)
        if of_other_kind and kind in self.overrides and not self._is_overridden(key):
            # a key of the file that belongs to another kind than the one an override asks for
            self._leave_out(key, f"has no effect with {kind} = {_shown(_value_at(kind, self.tables))}")
            return self.validated(files=files)
        raise self._error(key, self._reason(key, first))

    def _error(self, key: str, reason: str) -> RecipeError:
        """The error of a key, with the override that touches it, else with the file."""
        override = next((text for name, text in self.overrides.items() if touched(key, [name])), self.origin)
        return RecipeError(f"{override}: {key}: {reason}")

    def _is_overridden(self, key: str) -> bool:
        """True where an override sets the key, or the table that it lies in."""
        return any(_within(key, name) for name in self.overrides)

    def _leave_out(self, key: str, why: str) -> None:
        section, _, name = key.rpartition(".")
        _value_at(section, self.tables).pop(name)
        logger.warning("%s: %s is left out: it %s", self.origin, key, why)

    def _key(self, mistake: ErrorDetails) -> str:
        """The dotted key of a mistake, without pydantic's own marks for the member of a union."""
        parts: list[str] = []
        value: Any = self.tables
        for step, part in enumerate(mistake["loc"], start=1):
            absent = mistake["type"] == "missing" and step == len(mistake["loc"])
            if isinstance(value, list) and isinstance(part, int):
                value = value[part] if part < len(value) else None
            elif isinstance(value, dict) and (part in value or absent):
                value = value.get(part)
            else:
                continue
            parts.append(str(part))
        within = "kind" if mistake["type"] == "union_tag_invalid" else mistake.get("ctx", {}).get("key")
        return ".".join(filter(None, [*parts, within]))

    def _reason(self, key: str, mistake: ErrorDetails) -> str:
        kind, context = mistake["type"], mistake.get("ctx", {})
        if kind == "extra_forbidden":
            return f"unknown key{self._suggestion(key)}"
        if kind == "missing":
            # a whole table is missing in a recipe of any kind
            table = key.rpartition(".")[0]
            chosen = f"{table}.kind"
            value = _value_at(chosen, self.tables) if table else None
            return "missing" if value is None else f"missing; {chosen} = {_shown(value)} needs it"
        if kind in ("value_error", "clash"):
            return mistake["msg"].removeprefix("Value error, ")
        if kind == "union_tag_invalid":
            return f"must be one of {context['expected_tags']}; got {_shown(context['tag'])}"
        rule = RULES[kind].format(**context) if kind in RULES else re.sub(r"^\w+ should", "must", mistake["msg"])
        return f"{rule}; got {_shown(mistake['input'])}"

    def _suggestion(self, key: str) -> str:
        """The kinds of the section that have the key, else the known key of the nearest name, or of a synonym.

        A key of the same section is preferred to others of that name.
        """
        # the number of an entry in a list is no part of a known key
        *sections, name = (part for part in key.split(".") if not part.isdecimal())
        section = ".".join(sections)
        fields = [owner.model_fields for known, owner in self.known if known == f"{section}.{name}"]
        if kinds := [_shown(kind) for x in fields if "kind" in x for kind in get_args(x["kind"].annotation)]:
            return f" with this kind; it belongs to {section}.kind = {' or '.join(kinds)}"
        name = SYNONYMS.get(name, name)
        keys = (known.rpartition(".") for known, _ in reversed(self.known))
        by_name = {last: table for table, _, last in sorted(keys, key=lambda parts: parts[0] == section)}
        own = [last for last, table in by_name.items() if table == section]
        # a slip of a letter in its own table comes before the very name in another one
        near = difflib.get_close_matches(name, own, n=1, cutoff=0.9)
        near = near or difflib.get_close_matches(name, by_name, n=1, cutoff=0.7)
        return f" (did you mean {f'{by_name[near[0]]}.{near[0]}'.lstrip('.')}?)" if near else ""


def _parse(text: str, override: str) -> Any:
    """The TOML value of an override; a bare word, such as a path, is a text."""
    with suppress(tomllib.TOMLDecodeError):
        parsed = tomllib.loads(f"value = {text}")
        # a line break would begin another key
        if parsed.keys() == {"value"}:
            return parsed["value"]
    if text.startswith(("[", "{", '"', "'")):
        raise RecipeError(f"{override}: not a TOML value; a text that begins like one needs quotes within: '\"...\"'")
    return text


def _frozen(value: Any) -> Any:
    """The value with tuples for lists: recipes are immutable, and pydantic's strict types take no list for a tuple."""
    if isinstance(value, Mapping):
        return {key: _frozen(inner) for key, inner in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
