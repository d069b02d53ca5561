"""What a recipe may say of measuring: how often, on how much, and on which pictures from elsewhere.

A section of `config.py`. Files are looked for when a recipe is read that is to be run; what is in them is read by
`elsewhere.py`, before the first step.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from contrastile.data.sources import PICTURES
from contrastile.data.templates import TEMPLATES
from contrastile.train.settings import Count, Settings, files_matter


class ZeroShotSettings(Settings):
    """Classify the pictures of `folder`, which has a sub-folder for each class, by the names of the classes.

    `classes`: their names, a JSON file or lines of folder, tab and names; the folders' own without. `templates`: the
    sentences that they are put into, "plain", "several" or a file with one a line. `mapping`: a JSON file, from folder
    to the several classes that are right for it. Answers are chosen `among` the classes of the folders, or "all". The
    measures are called by `name`: imagenet-zeroshot-val-top1.
    """

    folder: str
    name: str | None = None
    classes: str | None = None
    templates: str = "plain"
    mapping: str | None = None
    among: Literal["folders", "all"] = "folders"

    @property
    def called(self) -> str:
        """Its name; without one, the folder's."""
        return self.name or os.path.basename(os.path.normpath(self.folder))

    @field_validator("folder")
    @classmethod
    def _folder_is_there(cls, folder: str, info: ValidationInfo) -> str:
        return _there(folder, info, is_folder=True)

    @field_validator("classes", "mapping")
    @classmethod
    def _file_is_there(cls, file: str | None, info: ValidationInfo) -> str | None:
        return None if file is None else _there(file, info)

    @field_validator("templates")
    @classmethod
    def _templates_are_there(cls, templates: str, info: ValidationInfo) -> str:
        return templates if templates in TEMPLATES else _there(templates, info, or_else=f"{_quoted(TEMPLATES)} or ")

    @model_validator(mode="after")
    def _there_are_classes(self, info: ValidationInfo) -> ZeroShotSettings:
        if files_matter(info):
            with os.scandir(self.folder) as entries:
                classes = [entry.path for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
            if not classes:
                raise ValueError(f'must have a folder with a sub-folder for each class; "{self.folder}" has none')
            if not any(map(_has_pictures, classes)):
                kinds = ", ".join(PICTURES)
                raise ValueError(f'must have a folder with pictures ({kinds}) of each class; "{self.folder}" has none')
        return self


class RetrievalSettings(Settings):
    """Find captions by pictures and pictures by captions: Karpathy's JSON, or a table (.tsv or .csv).

    `split`: of the JSON, "test" without. `images`: the folder of the pictures; the file's own without.
    """

    captions: str
    name: str | None = None
    images: str | None = None
    split: str | None = None

    @property
    def called(self) -> str:
        """Its name; without one, the file's."""
        return self.name or os.path.splitext(os.path.basename(self.captions))[0]

    @field_validator("captions")
    @classmethod
    def _file_is_there(cls, file: str, info: ValidationInfo) -> str:
        return _there(file, info)

    @field_validator("split")
    @classmethod
    def _tables_have_no_splits(cls, split: str | None, info: ValidationInfo) -> str | None:
        if split is not None and files_matter(info) and not info.data.get("captions", ".json").endswith(".json"):
            raise ValueError(f'must be left out with a table: only Karpathy\'s JSON has splits; got "{split}"')
        return split

    @field_validator("images")
    @classmethod
    def _folder_is_there(cls, folder: str | None, info: ValidationInfo) -> str | None:
        return None if folder is None else _there(folder, info, is_folder=True)


def _has_pictures(folder: str) -> bool:
    return any(name.lower().endswith(PICTURES) for _, _, files in os.walk(folder) for name in files)


def _there(path: str, info: ValidationInfo, *, is_folder: bool = False, or_else: str = "") -> str:
    there = os.path.isdir(path) if is_folder else os.path.isfile(path)
    if files_matter(info) and not there:
        raise ValueError(f'must be {or_else}a {"folder" if is_folder else "file"}; there is no "{path}"')
    return path


def _quoted(names: dict[str, tuple[str, ...]]) -> str:
    return ", ".join(f'"{name}"' for name in names)


class EvaluateSettings(Settings):
    """`every`: the share of the run between two probes of recall, on at most `probe` examples of each held-out part.

    `prompts` are what names are put into for zero-shot tests. `digits`: after training on the glyphs, handwritten
    digits too; they say nothing about other pictures. `zero_shot` and `retrieval`: tests on pictures from elsewhere, at
    each probe on at most `probe` pictures, at the end on all. Ranks share the pictures out.
    """

    every: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    probe: Count = 1000
    prompts: tuple[str, ...] = ("{}",)
    digits: bool = True
    zero_shot: tuple[ZeroShotSettings, ...] = ()
    retrieval: tuple[RetrievalSettings, ...] = ()

    @field_validator("prompts")
    @classmethod
    def _prompts_have_a_place(cls, prompts: tuple[str, ...]) -> tuple[str, ...]:
        if not prompts or any(prompt.count("{}") != 1 for prompt in prompts):
            raise ValueError("must be texts with one {} each, the place of the name")
        return prompts

    @model_validator(mode="after")
    def _names_differ(self) -> EvaluateSettings:
        for tests in (self.zero_shot, self.retrieval):
            name, count = Counter(test.called for test in tests).most_common(1)[0] if tests else ("", 1)
            if count > 1:
                raise ValueError(f'must have tests of different names; got "{name}" twice')
        return self
