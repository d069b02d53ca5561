"""The `[evaluate]` section of a recipe of pictures and texts: how often to measure, on how much, on which other tests.

Part of the configuration. It checks that files and folders are there; their contents are read before the first step.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from contrastile.data.sources import PICTURES, PROMPTS
from contrastile.train.config.base import Count, FilePath, FolderPath, Settings, check_path, needs_files


def _templates(name: str, info: ValidationInfo) -> str:
    kind = f"{', '.join(map(repr, PROMPTS))} or a file".replace("'", '"')
    return check_path(name, info, lambda path: path in PROMPTS or os.path.isfile(path), kind)


class ZeroShotSettings(Settings):
    """Classify the pictures of `folder`, which has a sub-folder for each class, by the names of the classes.

    `classes`: a JSON file or lines of folder, tab and names. `templates`: "plain", "several" or a file with a sentence
    a line. `mapping`: a JSON file, from folder to the several classes that are right for it.
    """

    folder: FolderPath
    name: str | None = None
    classes: FilePath | None = None
    templates: Annotated[str, AfterValidator(_templates)] = "plain"
    mapping: FilePath | None = None
    among: Literal["folders", "all"] = "folders"

    @property
    def called(self) -> str:
        """The name of its measures, by default the folder's."""
        return self.name or os.path.basename(os.path.normpath(self.folder))

    @model_validator(mode="after")
    def _classes_have_pictures(self, info: ValidationInfo) -> ZeroShotSettings:
        if needs_files(info):
            with os.scandir(self.folder) as entries:
                classes = [entry.path for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
            if not classes:
                raise ValueError(f'must have a folder with a sub-folder for each class; "{self.folder}" has none')
            if not any(_has_pictures(folder) for folder in classes):
                kinds = ", ".join(PICTURES)
                raise ValueError(f'must have a folder with pictures ({kinds}) of each class; "{self.folder}" has none')
        return self


def _has_pictures(folder: str) -> bool:
    return any(name.lower().endswith(PICTURES) for _, _, files in os.walk(folder) for name in files)


class RetrievalSettings(Settings):
    """Find captions by pictures and pictures by captions: Karpathy's JSON, or a table (.tsv or .csv).

    `split`: of the JSON, by default "test". `images`: the folder of the pictures, by default the file's own.
    """

    captions: FilePath
    name: str | None = None
    images: FolderPath | None = None
    split: str | None = None

    @property
    def called(self) -> str:
        """The name of its measures, by default the file's."""
        return self.name or os.path.splitext(os.path.basename(self.captions))[0]

    @field_validator("split")
    @classmethod
    def _only_json_has_splits(cls, split: str | None, info: ValidationInfo) -> str | None:
        if split is not None and needs_files(info) and not info.data.get("captions", ".json").endswith(".json"):
            raise ValueError(f'must be left out with a table: only Karpathy\'s JSON has splits; got "{split}"')
        return split


class EvaluateSettings(Settings):
    """Probes of recall at each fraction `every` of the run, digits, and tests on other pictures."""

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
