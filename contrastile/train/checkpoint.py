"""A run in memory and on disk: the two towers, their tokenizer and transform; saved whole, loaded exactly.

`image_text.py` builds a `Run`, the loop trains its model and saves it; `contrastile.load` gives it back to anyone.
Nothing here is unpickled: weights are safetensors, everything else is text, and the weights' checksum is compared when
they are read.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile._check import wrong
from contrastile.cache import encode
from contrastile.data.pairs import PairSet
from contrastile.data.table import squared
from contrastile.models.economy import checkpoint_activations
from contrastile.models.locking import lock
from contrastile.models.text import Tokenizer, load_tokenizer
from contrastile.models.towers import DualEncoder, build_model
from contrastile.train.config import AnyRecipe, Recipe
from contrastile.train.folder import FACTS, RECIPE, WEIGHTS, RunFolder, finished_run
from contrastile.train.idle import idle_keys
from contrastile.train.recipe import load_any_recipe, load_recipe, to_toml

if TYPE_CHECKING:
    from PIL.Image import Image


# of the model's settings those that its shapes do not depend on
HOW_TRAINED = {"tokenizer", "locked", "unlocked", "precompute", "checkpointing"}
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """What towers of this precision compute in, where it is not the weights' own."""
    half = HALVES.get(precision)
    return torch.autocast(device.type, dtype=half, enabled=half is not None)


def listed(name: str, given: Any, what: str, *kinds: type) -> list[Any]:
    """The items of what was given, all of these kinds. A text alone would be taken for a list of its letters."""
    if isinstance(given, (str, *kinds)):
        raise wrong(name, f"be a list of {what}s", type(given).__name__, f"Pass [{what}], where there is one only.")
    items = list(given)
    if strange := [type(item).__name__ for item in items if not isinstance(item, kinds)]:
        remedy = "Open files with PIL.Image.open." if what == "picture" else "Decode or convert them first."
        if what == "picture" and strange[0] == "ndarray":
            remedy = "Make them with PIL.Image.fromarray."
        raise wrong(name, f"be a list of {what}s", f"one of {strange[0]}", remedy)
    return items


@dataclass(frozen=True)
class Run:
    """The towers of a run with what they need to see pictures and read texts.

    `encode_image` and `encode_text` give unit rows, so that their product is the cosine of picture and text.
    """

    recipe: Recipe
    model: DualEncoder
    tokenizer: Tokenizer
    device: torch.device

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision that the run's towers train with."""
        return autocast(self.device, self.recipe.train.precision)

    def transform(self, images: Sequence[Image]) -> Tensor:
        """Pillow pictures of any size as uint8 `[n, C, S, S]`, in the run's size and number of channels."""
        data = self.recipe.data
        shape = (data.channels, data.image_size, data.image_size)
        from PIL.Image import Image as Picture

        pictures = listed("images", images, "picture", Picture)
        squares = [torch.from_numpy(squared(picture, shape)) for picture in pictures]
        return torch.stack(squares) if squares else torch.empty(0, *shape, dtype=torch.uint8)

    @torch.no_grad()
    def encode_image(self, images: Sequence[Image] | Tensor) -> Tensor:
        """Features `[n, D]`, float32 unit rows, of Pillow pictures or of uint8 `[n, C, S, S]` as `transform` gives."""
        pictures = images if isinstance(images, Tensor) else self.transform(images)
        if pictures.dtype != torch.uint8:
            remedy = "Give bytes from 0 to 255; floats are made of them here."
            raise wrong("images", "be Pillow pictures or a uint8 tensor", pictures.dtype, remedy)
        sub_batch = self.recipe.train.sub_batch.image
        return F.normalize(encode(self.model.encode_image, pictures, sub_batch=sub_batch).float(), dim=-1)

    @torch.no_grad()
    def encode_text(self, texts: Sequence[str]) -> Tensor:
        """Features `[n, D]`, float32 unit rows, of texts."""
        texts = listed("texts", texts, "text", str)
        if not texts:
            # not every tokenizer takes none
            return self.encode_text([""])[:0]
        tokens, cut = self.tokenizer.tokenise(texts), self.recipe.train.sub_batch.of_texts()
        return F.normalize(encode(self.model.encode_text, tokens, **cut).float(), dim=-1)


def load(run: str | Path, *, device: str = "auto") -> Run:
    """`contrastile.load` for pictures and texts: the towers, the tokenizer and the transform of a finished run."""
    folder = finished_run(run)
    recipe = load_recipe(folder / RECIPE, files=False)
    tokenizer = load_tokenizer(folder.path)
    model = _in_precision(build_model(checked_towers(folder), tokenizer=tokenizer), recipe)
    load_weights(model, folder)
    return Run(recipe, model.to(choose_device(device)).eval(), tokenizer, choose_device(device))


def _in_precision(model: DualEncoder, recipe: Recipe) -> DualEncoder:
    """The towers with weights of the recipe's precision; those of half precisions are float32, too."""
    return model.double() if recipe.train.precision == "float64" else model


def checked_towers(folder: RunFolder) -> dict[str, Any]:
    """The settings of a run's towers; raises ValueError where its weights are not the bytes that the run wrote."""
    facts = folder.read_json(FACTS)
    if folder.checksum(WEIGHTS) != facts["weights_sha256"]:
        remedy = "The file is damaged or another one; train again or restore it."
        raise wrong(WEIGHTS, "be the file that the run wrote", "another checksum", remedy)
    return facts["towers"]


def load_weights(model: nn.Module, folder: RunFolder) -> None:
    """A run's weights into the towers that its settings made."""
    from safetensors.torch import load_model

    try:
        load_model(model, folder / WEIGHTS)
    except RuntimeError as error:
        remedy = "Another version of contrastile wrote it; train again or install that version."
        raise wrong("run", "hold weights of these towers", f'"{folder.path}", whose shapes differ', remedy) from error


def build_run(recipe: Recipe, tokenizer: Tokenizer) -> Run:
    """The untrained run of a recipe: its towers at the numbers that its seed draws."""
    torch.manual_seed(recipe.seed)
    device = choose_device(recipe.device)
    model = _in_precision(build_model(tower_settings(recipe), tokenizer=tokenizer), recipe).to(device)
    for side in recipe.model.locked:
        lock(getattr(model, side).tower, side, recipe.model.unlocked.get(side, 0))
    for side in recipe.model.checkpointing:
        checkpoint_activations(getattr(model, side), side)
    for side in ("image", "text") if recipe.train.compile else ():
        # in its place: the names of its weights stay
        getattr(model, side).compile()
    return Run(recipe, model, tokenizer, device)


def tower_settings(recipe: Recipe) -> dict[str, Any]:
    """What `build_model` reads of a recipe."""
    trained = recipe.model.both is not None and recipe.model.both.trained
    return {
        **recipe.model.model_dump(exclude=HOW_TRAINED, exclude_none=True),
        "image_size": recipe.data.image_size,
        "channels": recipe.data.channels,
        # a trained model has a scale and a bias of its own, which only an explicit word replaces
        **recipe.loss.model_dump(include={"scale", "bias"}, exclude_unset=trained),
    }


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto" is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise wrong("device", "be on this machine", f'"{name}", and torch finds no GPU', 'Use "cpu" or "auto".')
    device = torch.device(name)
    if device.index is not None and device.index >= torch.cuda.device_count():
        got = f'"{name}", and torch finds {torch.cuda.device_count()}'
        raise wrong("device", "be on this machine", got, "They are counted from 0.")
    return device


class Saveable(Protocol):
    """What `begin_run` and `save_run` need of a run."""

    @property
    def recipe(self) -> AnyRecipe:
        """What it was told."""

    @property
    def model(self) -> Any:
        """A module with `settings`."""

    @property
    def tokenizer(self) -> Tokenizer:
        """What it reads with."""


def begin_run(folder: RunFolder, run: Saveable) -> None:
    """What a run is told by, before its first step: the tokenizer, then the recipe, which says that both are there."""
    with tempfile.TemporaryDirectory(dir=folder.path, prefix=".tokenizer-") as beside:
        run.tokenizer.save(Path(beside))
        for file in Path(beside).iterdir():
            os.replace(file, folder / file.name)
    folder.write_text(RECIPE, to_toml(run.recipe))


def save_run(folder: RunFolder, run: Saveable, facts: dict[str, Any]) -> None:
    """Weights and facts into the folder, each file whole or not at all; raises OSError where there is no room."""
    from safetensors import SafetensorError
    from safetensors.torch import save_model

    with folder.written_whole(WEIGHTS) as path:
        try:
            save_model(run.model, str(path))
        except SafetensorError as failure:
            # the library has an error of its own for a full disk
            said = f"the weights could not be saved into {folder.path} ({failure})"
            raise OSError(f"{said}; what was saved before is there, free the disk and resume") from failure
        # the library makes a file that nobody else may read
        path.chmod(0o644)
    folder.write_json(FACTS, {**facts, "towers": run.model.settings, "weights_sha256": folder.checksum(WEIGHTS)})


def fingerprint(pairs: PairSet, tokens: Mapping[str, Tensor]) -> str:
    """What a run learns from, in one number: which pairs are trained on, who equals whom, every title's tokens."""
    digest = sha256(pairs.splits["train"].tobytes() + pairs.ids.tobytes())
    digest.update(pairs.stream.digest.encode() if pairs.stream is not None else b"")
    for name, ids in tokens.items():
        digest.update(name.encode() + ids.numpy().tobytes())
    return digest.hexdigest()


def same_recipe(folder: RunFolder, recipe: AnyRecipe, verb: str = "train") -> None:
    """Raises ValueError where `verb` began with another recipe, but for what changes nothing that is learned."""
    began = _flat(load_any_recipe(folder / RECIPE, files=False).model_dump(mode="json"))
    now = _flat(recipe.model_dump(mode="json"))
    # what nothing reads is the same whatever it says
    idle = {rule.key for rule in idle_keys(recipe)}
    for key in sorted((began.keys() | now.keys()) - idle):
        if began.get(key) != now.get(key) and not key.startswith(FREE):
            again = f"contrastile {verb} {folder / RECIPE} --runs {folder.path.parent} --resume"
            remedy = f"It began with {began.get(key)}: go on with {again}, or {verb} anew, without --resume."
            raise wrong(key, "be what the run began with", now.get(key), remedy)


# what may be another when a run is resumed
FREE = (
    "device",
    "save.",
    "log.",
    "data.cache",
    "train.timeout",
    "train.parallel",
    "evaluate.zero_shot",
    "evaluate.retrieval",
)


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
