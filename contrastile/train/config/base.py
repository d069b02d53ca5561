"""Ground of the configuration: the base class of all sections, types of numbers and paths, and marks on fields.

Every section of a recipe is a frozen pydantic class. Checks of files, packages and devices run only for a recipe that
is about to be trained (`needs_files`), so that a run folder stays readable after its data are gone.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from contrastile._errors import invalid

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1)]
# bounds on the examples of a run and on the sizes of tensors: more is a slip of the keyboard
Many = Annotated[int, Field(ge=1, le=2**53)]
Width = Annotated[int, Field(ge=1, le=2**20)]

DEVICE, DEVICE_RULE = re.compile(r"auto|cpu|cuda(:[0-9]+)?"), 'be "auto", "cpu", "cuda" or "cuda:1"'


class Settings(BaseModel):
    """A section of a recipe: exact types (the text "8" is no number), no unknown keys, finite numbers, frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ClashError(ValueError):
    """A value of `key` that is wrong only beside another key, and so is found outside its own section."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(reason)
        self.key = key


@dataclass(frozen=True)
class Unused:
    """Mark a field that has no effect because of another key, so that a recipe that gives it is refused.

    `by` is the deciding key, relative to the section; `when` receives the section. `also` are further keys that decide;
    `part` is a key inside the field, where not the whole field is meant.
    """

    by: str
    when: Callable[[Any], bool]
    remedy: str = "leave it out"
    also: tuple[str, ...] = ()
    part: str = ""


@dataclass(frozen=True)
class Instead:
    """Mark a field that takes the place of other `keys` of its section.

    An override of the field removes those keys from the file. Where the field is given, their defaults are unused.
    """

    keys: tuple[str, ...]


class UnusedKey(NamedTuple):
    """A `key` without effect in one recipe, the keys that decide so, and the sentence that says it."""

    key: str
    by: tuple[str, ...]
    reason: str


def unused_keys(section: Settings, prefix: str = "") -> Iterator[UnusedKey]:
    """The keys of a validated recipe that nothing would read, by the marks on its fields."""
    fields = type(section).model_fields
    for name, field in fields.items():
        value = getattr(section, name)
        for mark in field.metadata:
            if isinstance(mark, Unused) and mark.when(section):
                key = f"{name}.{mark.part}" if mark.part else name
                yield _unused(section, prefix, key, (mark.by, *mark.also), mark.remedy)
            if isinstance(mark, Instead) and field.default is None and value is not None:
                for other in mark.keys:
                    if fields[other].default is not None:
                        yield _unused(section, prefix, other, (name,), "leave either out")
        if isinstance(value, Settings):
            yield from unused_keys(value, f"{prefix}{name}.")


def _unused(section: Settings, prefix: str, key: str, by: tuple[str, ...], remedy: str) -> UnusedKey:
    value = attrgetter(by[0])(section)
    shown = "" if isinstance(value, Settings) else f" = {json.dumps(value, ensure_ascii=False)}"
    reason = f"has no effect with {prefix}{by[0]}{shown}; {remedy}"
    return UnusedKey(prefix + key, tuple(prefix + each for each in by), reason)


def known_fields(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted key that a recipe may hold, with its field; a key of several kinds comes once for each."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", field
        for inner in _sections(field.annotation):
            yield from known_fields(inner, f"{prefix}{name}.")


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


def needs_files(info: ValidationInfo) -> bool:
    """True for a recipe that is to be trained, false for one that is read back from its run folder."""
    return bool((info.context or {}).get("files"))


def kind_or(default: str) -> BeforeValidator:
    """Give a section of several kinds its default `kind`; `Field(discriminator="kind")` then chooses the class."""
    return BeforeValidator(lambda section: {"kind": default, **section} if isinstance(section, Mapping) else section)


def same_for(*names: str) -> BeforeValidator:
    """Take one number for each of several keys of a section."""
    return BeforeValidator(lambda value: dict.fromkeys(names, value) if type(value) is int else value)


def either(first: str, second: str) -> Any:
    """A validator of sections that need exactly one of two keys."""

    def check(section: Any) -> Any:
        if (getattr(section, first) is None) == (getattr(section, second) is None):
            raise ValueError(f"must have either {first} or {second}, and not both")
        return section

    return model_validator(mode="after")(check)


def check_path(path: str, info: ValidationInfo, is_there: Callable[[str], bool], kind: str) -> str:
    """The path, unless a recipe that is to be trained needs it and there is none of that kind."""
    if needs_files(info) and not is_there(path):
        raise ValueError(f'must be {kind}; there is no "{path}"')
    return path


FilePath = Annotated[str, AfterValidator(lambda path, info: check_path(path, info, os.path.isfile, "a file"))]
FolderPath = Annotated[str, AfterValidator(lambda path, info: check_path(path, info, os.path.isdir, "a folder"))]


def _holds_tokenizer(folder: str, info: ValidationInfo) -> str:
    if needs_files(info) and not os.path.isfile(os.path.join(folder, "tokenizer.json")):
        raise ValueError(f'must be a folder with a tokenizer.json; got "{folder}"')
    return folder


TokenizerFolder = Annotated[str, AfterValidator(_holds_tokenizer)]


def needs(package: str, source: str) -> AfterValidator:
    """A field whose value, unless false or empty, needs an installed package; `source` is the argument of pip."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if value and needs_files(info):
            check_installed(package, source)
        return value

    return AfterValidator(check)


def check_installed(package: str, source: str, key: str | None = None) -> None:
    """Raise ValueError where a package is missing; `key` is the one that needs it, if not the one being validated."""
    if find_spec(package) is None:
        reason = f"needs the package {package}, which is not installed; run: pip install {source}"
        raise ValueError(reason) if key is None else ClashError(key, reason)


def known_device(name: str) -> str:
    """A device as the command line names it; torch checks later that the machine has it."""
    if not DEVICE.fullmatch(name):
        raise invalid("--device", DEVICE_RULE, f'"{name}"', "Leave it out for the best device of the machine.")
    if name.startswith("cuda") and torch_is_cpu_only():
        rule = 'be "auto" or "cpu" with a torch for CPUs alone'
        raise invalid("--device", rule, f'"{name}"', "Install one for CUDA.")
    return name


def torch_is_cpu_only() -> bool:
    """True where the installed torch supports no GPU, by its version file: loading torch takes seconds.

    False where torch is loaded already, because torch itself is then asked a moment later.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None or "torch" in sys.modules:
        return False
    version = Path(spec.origin).parent / "version.py"
    text = version.read_text(encoding="utf-8") if version.is_file() else ""
    return all(re.search(rf"^{name}\b.*= None$", text, re.MULTILINE) for name in ("cuda", "hip"))
