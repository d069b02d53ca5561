"""Recipes in and out: TOML text and overrides become a checked `Recipe`, and a `Recipe` becomes TOML again.

Every mistake, in the file or in an override, is one line that names the file, the key and the reason.
"""

from __future__ import annotations

import difflib
import json
import logging
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from contrastile.train.config import AnyRecipe, Recipe
from contrastile.train.folder import METRICS
from contrastile.train.idle import idle_keys
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.settings import ClashError

logger = logging.getLogger("contrastile")

Tables = dict[str, Any]

# what a recipe may be, by its key `kind`; the first where it does not say
KINDS: dict[str, type[AnyRecipe]] = {"image-text": Recipe, "retriever": RetrieverRecipe}

# what a key of a section excludes there. A tower of one side alone does not: the other one would be the default
INSTEAD = {
    "examples": ("epochs",),
    "epochs": ("examples",),
    "warmup": ("warmup_steps", "warmup_epochs"),
    "warmup_steps": ("warmup", "warmup_epochs"),
    "warmup_epochs": ("warmup", "warmup_steps"),
    "folder": ("config",),
    "config": ("folder",),
    "both": ("image", "text", "query", "passage"),
    # an encoder, or how many texts it sees at once
    "query": ("both", "query_tokens"),
    "passage": ("both", "passage_tokens"),
    "text": ("text_tokens",),
    "text_tokens": ("text",),
    "query_tokens": ("query",),
    "passage_tokens": ("passage",),
}

# what other programs call a key
CALLED = {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "src": "source",
    "path": "source",
    "batch_size": "batch",
    "micro_batch_size": "sub_batch",
    "mini_batch_size": "sub_batch",
    "accum_freq": "accumulate",
    "gradient_accumulation_steps": "accumulate",
    "max_epochs": "epochs",
    "temperature": "scale",
    "embed_dim": "features",
}

RULES = {
    "string_type": "must be a text in quotes",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "finite_number": "must be a finite number",
    "tuple_type": "must be a list",
    "too_long": "must have {max_length} entries at most",
    "too_short": "must have {min_length} entries at least",
    "model_type": "must be a table of keys",
    "dict_type": "must be a table of keys",
    "literal_error": "must be {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
}


class RecipeError(ValueError):
    """A mistake in a recipe or an override, told in one line: origin, key, reason."""

    def __init__(self, line: str) -> None:
        super().__init__(" ".join(line.splitlines()))


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, files: bool = True) -> Recipe:
    """The recipe of pictures and texts at `path`; as `load_any_recipe`, which reads the others too."""
    recipe = load_any_recipe(path, overrides, files=files)
    if not isinstance(recipe, Recipe):
        raise RecipeError(f'{path}: kind: must be "image-text" here; got "{recipe.kind}"')
    return recipe


def load_retriever_recipe(path: str | Path, overrides: Sequence[str] = (), *, files: bool = True) -> RetrieverRecipe:
    """The recipe of a retriever at `path`, likewise."""
    recipe = load_any_recipe(path, overrides, files=files)
    if not isinstance(recipe, RetrieverRecipe):
        encoded = "; pictures and texts are encoded in Python: contrastile.load(run).encode_image([picture])"
        raise RecipeError(f'{path}: kind: must be "retriever" here; got "{recipe.kind}"{encoded}')
    return recipe


def load_any_recipe(path: str | Path, overrides: Sequence[str] = (), *, files: bool = True) -> Recipe | RetrieverRecipe:
    """The recipe at `path` with `overrides` ("optim.learning_rate=1e-3") put over it, checked.

    An override that excludes what the file says, as `train.examples` does `train.epochs`, takes its place; what it
    leaves without effect in the file, as `optim.schedule` may `optim.cooldown`, is left out with a warning. With
    `files`, for a recipe that is to be run, the files and folders that it names must be there, and every key that it
    has must have an effect.

    Raises `RecipeError` with one line such as
    `recipes/x.toml: optim.learning_rte: unknown key (did you mean optim.learning_rate?)`.
    """
    origin = str(path)
    tables = read_tables(origin)
    origins: dict[str, str] = {}
    for override in overrides:
        key = _apply(override, tables)
        origins[key] = override
    for key in origins:
        _take_the_place(key, tables, origins)
    tables.setdefault("name", Path(path).stem)
    return _checked(tables, origin, origins, files)


def read_tables(origin: str) -> Tables:
    """The TOML file as nested dictionaries, or one line that says why not."""
    try:
        return tomllib.loads(Path(origin).read_text(encoding="utf-8"))
    except FileNotFoundError:
        forgotten = "; a recipe comes before key=value, such as recipes/glyphs.toml" if "=" in origin else ""
        raise RecipeError(f"{origin}: no such file{forgotten}") from None
    except OSError as error:
        raise RecipeError(f"{origin}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        if not origin.endswith(".toml"):
            how = f"a recipe is a TOML file that names its data: contrastile train RECIPE data.source={origin}"
            raise RecipeError(f"{origin}: not a recipe; {how}") from None
        if isinstance(error, UnicodeDecodeError):
            raise RecipeError(f"{origin}: not a text in UTF-8") from None
        raise RecipeError(f"{origin}: not valid TOML: {error}") from None


def _apply(override: str, tables: Tables) -> str:
    """Put one `key=value` over the tables; the dotted key it set."""
    key, equals, value = override.partition("=")
    key = key.strip()
    parts = key.split(".")
    if not equals or not all(parts):
        raise RecipeError(f"{override}: an override is written key=value, as in optim.learning_rate=1e-3")
    table = tables
    for depth, part in enumerate(parts[:-1], start=1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise RecipeError(f"{override}: {'.'.join(parts[:depth])}: has no keys of its own")
    table[parts[-1]] = _value(value.strip(), override)
    return key


def _take_the_place(key: str, tables: Tables, given: Collection[str]) -> None:
    """An override takes the place of what the file says in its stead, unless another override says that too."""
    section, _, last = key.rpartition(".")
    table: Any = tables
    for part in filter(None, section.split(".")):
        table = table.get(part) if isinstance(table, dict) else None
    for rival in INSTEAD.get(last, ()) if isinstance(table, dict) else ():
        path = f"{section}.{rival}"
        if not any(f"{name}.".startswith(f"{path}.") for name in given):
            table.pop(rival, None)


def _value(text: str, override: str) -> Any:
    """A TOML value; a bare word, such as a path, is taken as text."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    if parsed.keys() == {"value"}:
        return parsed["value"]
    if text.startswith(("[", "{", '"', "'")):
        raise RecipeError(f"{override}: not a TOML value; a text that begins like one needs quotes within: '\"...\"'")
    return text


def _checked(tables: Tables, origin: str, origins: Mapping[str, str], files: bool) -> Any:
    kind = tables.get("kind", "image-text")
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(f"'{name}'" for name in KINDS)
        raise RecipeError(f"{origins.get('kind', origin)}: kind: must be one of {known}; got {_shown(kind)}")
    if files:
        _without_idle(tables, origin, origins, KINDS[kind])
    return _validated(tables, origin, origins, KINDS[kind], files)


def _validated(
    tables: Tables, origin: str, origins: Mapping[str, str], recipe: type[AnyRecipe], files: bool
) -> AnyRecipe:
    try:
        return recipe.model_validate(_frozen(tables), context={"files": files})
    except ValidationError as error:
        mistakes = error.errors()
    for mistake in mistakes:
        key = ".".join(_place(mistake, tables))
        # the file's keys of a kind that an override replaces
        another = mistake["type"] == "extra_forbidden" and key in known_keys(recipe)
        by = f"{key.rpartition('.')[0]}.kind"
        if another and by in origins and _blamed(key, origins) is None:
            _leave_out(key, tables, origin, f"has no effect with {by} = {_shown(_found(by, tables))}")
            return _validated(tables, origin, origins, recipe, files)
    # an unknown key first: it is often why another one is missing
    mistakes.sort(key=lambda mistake: mistake["type"] != "extra_forbidden")
    raise RecipeError(_one_line(mistakes[0], tables, origin, origins, recipe))


def _without_idle(tables: Tables, origin: str, origins: Mapping[str, str], recipe: type[AnyRecipe]) -> None:
    """Leaves out what overrides made idle in the file; raises `RecipeError` for what else is idle."""
    known = _validated(tables, origin, origins, recipe, False)
    # an earlier version wrote every key into a run's folder
    of_a_run = (Path(origin).parent / METRICS).is_file()
    for rule in idle_keys(known):
        if _found(rule.key, tables) is None:
            continue
        blamed = _blamed(rule.key, origins)
        excused = of_a_run or any(touched(by, origins) for by in (rule.by, *rule.others))
        if blamed is not None or not excused:
            raise RecipeError(f"{blamed or origin}: {rule.key}: {rule.reason(known)}")
        _leave_out(rule.key, tables, origin, rule.reason(known).partition(";")[0])


def touched(key: str, origins: Collection[str]) -> bool:
    """Whether an override set a key, the table it lies in, or something within it."""
    return any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in origins)


def _found(key: str, tables: Tables) -> Any:
    """What stands under a dotted key; None where nothing does."""
    found: Any = tables
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _leave_out(key: str, tables: Tables, origin: str, why: str) -> None:
    section, _, last = key.rpartition(".")
    _found(section, tables).pop(last)
    logger.warning("%s: %s is left out: it %s", origin, key, why)


def _blamed(key: str, origins: Mapping[str, str]) -> str | None:
    """The override that set a key, or the table that it lies in."""
    return next((text for name, text in origins.items() if f"{key}.".startswith(f"{name}.")), None)


def _frozen(value: Any) -> Any:
    """Lists as tuples: a recipe never changes, and pydantic's strict types take no list for a tuple."""
    if isinstance(value, dict):
        return {key: _frozen(inner) for key, inner in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _one_line(
    error: ErrorDetails, tables: Tables, origin: str, origins: Mapping[str, str], recipe: type[AnyRecipe]
) -> str:
    place = _place(error, tables)
    key = ".".join(place)
    # an override is to blame for the key that it set, for what lies in it and for the section it stands in
    blamed = next((text for name, text in origins.items() if touched(key, [name])), origin)
    return f"{blamed}: {key}: {_reason(error, place, recipe)}"


def _place(error: ErrorDetails, tables: Tables) -> list[str]:
    """The key's path as the user wrote it: pydantic's own marks of a union's member are left out."""
    if isinstance(mistake := error.get("ctx", {}).get("error"), ClashError):
        return mistake.key.split(".")
    place: list[str] = []
    here: Any = tables
    for step, part in enumerate(error["loc"], start=1):
        absent = error["type"] == "missing" and step == len(error["loc"])
        if isinstance(here, list) and isinstance(part, int):
            here = here[part] if part < len(here) else None
        elif isinstance(here, dict) and (part in here or absent):
            here = here.get(part)
        else:
            continue
        place.append(str(part))
    return [*place, "kind"] if error["type"] == "union_tag_invalid" else place


def _reason(error: ErrorDetails, place: Sequence[str], recipe: type[AnyRecipe]) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return "unknown key" + _did_you_mean(place, recipe)
    if kind == "missing":
        return "missing"
    if kind == "value_error":
        return str(context["error"])
    if kind == "union_tag_invalid":
        return f"must be one of {context['expected_tags']}; got {_shown(context['tag'])}"
    context = {name: _bound(value) for name, value in context.items()}
    rule = RULES[kind].format(**context) if kind in RULES else error["msg"][:1].lower() + error["msg"][1:]
    return f"{rule}; got {_shown(error['input'])}"


def _bound(value: Any) -> Any:
    """A number as people write it."""
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else value


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _did_you_mean(place: Sequence[str], recipe: type[AnyRecipe]) -> str:
    """The nearest known key: of that very last word, or of the same section with a like one, else anywhere."""
    known = list(known_keys(recipe))
    # which entry of a list it is says nothing of its keys
    place = [part for part in place if not part.isdecimal()]
    if ".".join(place) in known:
        return " with this kind"
    section = ".".join(place[:-1])
    siblings = [key for key in known if key.rpartition(".")[0] == section]
    word = CALLED.get(place[-1], place[-1])
    same = [key for key in known if key.rpartition(".")[2] == word]
    for candidates in (same, siblings, known):
        by_word = {key.rpartition(".")[2]: key for key in reversed(candidates)}
        near = difflib.get_close_matches(word, by_word, n=1, cutoff=0.7)
        if near:
            return f" (did you mean {by_word[near[0]]}?)"
    return ""


def known_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key that a recipe may hold."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        yield key
        for inner in _sections(field):
            yield from known_keys(inner, f"{key}.")


def _sections(field: FieldInfo) -> Iterator[type[BaseModel]]:
    """The classes of settings that a field may hold, looked for in unions and annotations."""
    waiting = [field.annotation]
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield kind
        else:
            waiting.extend(get_args(kind))


def to_toml(recipe: AnyRecipe) -> str:
    """The recipe with every default that counts filled in, as TOML that `load_recipe` reads back to an equal recipe."""
    tables = recipe.model_dump(mode="json", exclude_none=True)
    for rule in idle_keys(recipe):
        section, _, last = rule.key.rpartition(".")
        _found(section, tables).pop(last, None)
    return "\n".join(_table_lines(tables, "")).lstrip("\n") + "\n"


def _table_lines(table: Mapping[str, Any], path: str) -> Iterator[str]:
    if path:
        yield f"\n[{path}]"
    for key, value in table.items():
        if not isinstance(value, dict):
            yield f"{_key(key)} = {_literal(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _table_lines(value, f"{path}.{_key(key)}" if path else _key(key))


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _literal(key)


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_literal(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, float):
        return repr(value)
    # JSON's texts, whole numbers and booleans are TOML's, but for one control character
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
