"""What every section of a recipe is made of: a frozen class of exact types, and the numbers that many of them take.

Ground of `config.py` and of the sections in files of their own.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, ValidationInfo

from contrastile._wrong import wrong

Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=1)]
# how many examples a run may see, and how wide or long a tensor may be: more is a slip
Many = Annotated[int, Field(ge=1, le=2**53)]
Width = Annotated[int, Field(ge=1, le=2**20)]
Positive = Annotated[float, Field(gt=0.0)]

# what a device is called, and how that is said
DEVICE, DEVICES = re.compile(r"auto|cpu|cuda(:[0-9]+)?"), 'be "auto", "cpu", "cuda" or "cuda:1"'


class Settings(BaseModel):
    """A section of a recipe: exact types, no unknown keys, finite numbers, never changed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def known_device(word: str) -> str:
    """A device as a command names it; whether it is there is another question, which mostly torch answers."""
    if not DEVICE.fullmatch(word):
        raise wrong("--device", DEVICES, f'"{word}"', "Leave it out for the best that is there.")
    if word.startswith("cuda") and for_cpus_alone():
        raise wrong("--device", 'be "auto" or "cpu" with a torch for CPUs alone', f'"{word}"', "Install one for CUDA.")
    return word


def for_cpus_alone() -> bool:
    """Whether the torch that is installed can use no GPU, by a file of its own: to load it takes seconds.

    Where it is loaded it is asked itself, a moment later.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None or "torch" in sys.modules:
        return False
    version = Path(spec.origin).parent / "version.py"
    text = version.read_text(encoding="utf-8") if version.is_file() else ""
    return all(re.search(rf"^{name}\b.*= None$", text, re.MULTILINE) for name in ("cuda", "hip"))


def kind_or(default: str) -> Discriminator:
    """Which class reads a section, by its key `kind`; `default` where the key is left out."""

    def kind(section: Any) -> Any:
        return section.get("kind", default) if isinstance(section, Mapping) else getattr(section, "kind", default)

    return Discriminator(kind)


def files_matter(info: ValidationInfo) -> bool:
    """A recipe to be run needs its files; one that is read back from its run folder does not."""
    return bool((info.context or {}).get("files"))


def holds_tokenizer(folder: str | None, info: ValidationInfo) -> str | None:
    """The folder of a tokenizer, where there is one; raises ValueError where it holds none."""
    if folder is not None and files_matter(info) and not os.path.isfile(os.path.join(folder, "tokenizer.json")):
        raise ValueError(f'must be a folder with a tokenizer.json; got "{folder}"')
    return folder


class ClashError(ValueError):
    """What is wrong with a `key` only beside another one, which no section knows alone."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(reason)
        self.key = key


def installed(package: str, source: str, key: str | None = None) -> None:
    """Raises ValueError where a package that the recipe asks for is not there; `source` is what pip installs.

    `key`: what asks for it, where that is not the key that is being read.
    """
    if find_spec(package) is None:
        reason = f"needs the package {package}, which is not installed; run: pip install {source}"
        raise ValueError(reason) if key is None else ClashError(key, reason)
