"""Runs: the encoders of either kind, and of images and texts their building; saved whole, loaded exactly.

Nothing is unpickled: weights are safetensors with a checksum, everything else is text.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import safetensors.torch
import torch
import torch.nn.functional as F
from PIL.Image import Image
from torch import Tensor, nn

from contrastile._errors import invalid, logger, printable
from contrastile.data.files import as_open_makes_it, sync
from contrastile.data.images import squared
from contrastile.data.tables import is_utf8
from contrastile.data.texts import Passage
from contrastile.gradcache.encode import encode
from contrastile.models.base import checkpoint_activations, compile_tower, freeze, no_compiler, towers_of
from contrastile.models.text import Tokenizer, load_tokenizer
from contrastile.models.timm_openclip import clip_tokenizer
from contrastile.models.towers import DualEncoder, build_model
from contrastile.train.config import AnyRecipe, Recipe
from contrastile.train.config.base import unused_keys
from contrastile.train.config.towers import GROWTH
from contrastile.train.folder import METADATA, RECIPE, WEIGHTS, RunFolder
from contrastile.train.recipe import load_any_recipe, to_toml

R = TypeVar("R", bound=AnyRecipe)

# the name of each kind of run in sentences, and its methods
PICTURES = "of images and texts", "encode_image, encode_text and transform"
RETRIEVER = "a retriever's", "encode_query and encode_passage"
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# settings of the model that its shapes do not depend on
HOW_TRAINED = {"tokenizer", "locked", "unlocked", "precompute", "checkpointing"}
# Linux's description of the CPU, and its names of bf16 instructions
CPU, BF16 = Path("/proc/cpuinfo"), re.compile(r"\b(avx512_bf16|amx_bf16|svebf16|bf16)\b")
# examples of a run from which on compiled towers save more time than they take to compile
WORTH_COMPILING = 200_000


def checked_list(name: str, values: Any, noun: str, *kinds: type) -> list[Any]:
    """The items of `values`, all of these kinds. A single text is refused: it would pass for a list of letters."""
    if isinstance(values, (str, *kinds)):
        raise invalid(name, f"be a list of {noun}s", type(values).__name__, f"Pass [{noun}], where there is one only.")
    items = list(values)
    if foreign := [type(item).__name__ for item in items if not isinstance(item, kinds)]:
        remedy = "Open files with PIL.Image.open." if noun == "image" else "Decode or convert them first."
        if noun == "image" and foreign[0] == "ndarray":
            remedy = "Make them with PIL.Image.fromarray."
        raise invalid(name, f"be a list of {noun}s", f"one of {foreign[0]}", remedy)
    if broken := [item for item in items if isinstance(item, str) and not is_utf8(item)]:
        got, remedy = f'"{printable(broken[0][:60])}"', "Decode them as what they are."
        raise invalid(name, f"be {noun}s of characters that UTF-8 has", got, remedy)
    return items


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """The autocast context of a precision; it has no effect unless the precision is one of `HALVES`."""
    half = HALVES.get(precision)
    return torch.autocast(device.type, dtype=half, enabled=half is not None)


@dataclass(frozen=True, repr=False)
class LoadedRun:
    """The encoders of a run of either kind, with the methods of both; ValueError at a method of the other kind.

    A type checker cannot know which kind a folder holds.
    """

    recipe: Any
    model: Any
    tokenizer: Tokenizer
    device: torch.device

    @classmethod
    def untrained(cls, recipe: Any, tokenizer: Tokenizer) -> Self:
        """The run of a recipe, its towers initialised from the recipe's seed."""
        recipe = settled(recipe)
        torch.manual_seed(recipe.seed)
        device = choose_device(recipe.device)
        model = cls.model_of(recipe, tokenizer).to(device)
        for tower in towers_of(model) if recipe.train.compile else ():
            compile_tower(tower)
        return cls(recipe, model, tokenizer, device)

    @classmethod
    def saved(cls, folder: RunFolder, recipe: Any, device: torch.device) -> Self:
        """The run in a folder; raises ValueError where the checksum or the shapes of its weights differ."""
        tokenizer = load_tokenizer(folder.path, length=recipe.model.tokenizer.length)
        metadata = folder.read_json(METADATA)
        if folder.checksum(WEIGHTS) != metadata["weights_sha256"]:
            remedy = "The file is damaged or another one; train again or restore it."
            raise invalid(WEIGHTS, "be the file that the run wrote", "another checksum", remedy)
        model = cls.build(metadata["towers"], recipe, tokenizer)
        try:
            safetensors.torch.load_model(model, folder / WEIGHTS)
        except RuntimeError as error:
            got = f'"{folder.path}", whose shapes differ'
            remedy = "Another version of contrastile wrote it; train again or install that version."
            raise invalid("run", "hold weights of these towers", got, remedy) from error
        return cls(recipe, model.to(device).eval(), tokenizer, device)

    @classmethod
    def model_of(cls, recipe: Any, tokenizer: Tokenizer) -> nn.Module:
        """The model of a recipe, untrained."""
        raise NotImplementedError

    @classmethod
    def build(cls, settings: dict[str, Any], recipe: Any, tokenizer: Tokenizer) -> nn.Module:
        """The model that `settings` describe, with weights of the recipe's precision."""
        raise NotImplementedError

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision that the run's encoders train with."""
        return autocast(self.device, self.recipe.train.precision)

    def __repr__(self) -> str:
        """One line: the name, the methods, the size and the device."""
        methods = (PICTURES if self.recipe.kind == "image-text" else RETRIEVER)[1]
        millions = sum(parameter.numel() for parameter in self.model.parameters()) / 1e6
        return f"<run {self.recipe.name}: {methods}; {millions:.1f} million parameters on {self.device}>"

    def transform(self, images: Sequence[Image]) -> Tensor:  # noqa: ARG002
        """Pillow images as uint8 `[n, C, S, S]`, for a run of images and texts."""
        raise _other("transform", PICTURES, RETRIEVER)

    def encode_image(self, images: Sequence[Image] | Tensor) -> Tensor:  # noqa: ARG002
        """Features `[n, D]` of images, float32 unit rows, for a run of images and texts."""
        raise _other("encode_image", PICTURES, RETRIEVER)

    def encode_text(self, texts: Sequence[str]) -> Tensor:  # noqa: ARG002
        """Features `[n, D]` of texts, float32 unit rows, for a run of images and texts."""
        raise _other("encode_text", PICTURES, RETRIEVER)

    def encode_query(self, texts: Sequence[str], *, dimensions: int | None = None) -> Tensor:  # noqa: ARG002
        """Features `[n, D]` of questions, float32, for a retriever."""
        raise _other("encode_query", RETRIEVER, PICTURES)

    def encode_passage(self, passages: Sequence[Passage | str], *, dimensions: int | None = None) -> Tensor:  # noqa: ARG002
        """Features `[n, D]` of passages, float32, for a retriever."""
        raise _other("encode_passage", RETRIEVER, PICTURES)


def _other(method: str, needed: tuple[str, str], own: tuple[str, str]) -> ValueError:
    return invalid("run", f"be {needed[0]} for {method}", f"one that is {own[0]}", f"It has {own[1]}.")


class Run(LoadedRun):
    """The towers of a run, with transform and tokenizer; features are unit rows, whose product is the cosine."""

    recipe: Recipe
    model: DualEncoder

    @classmethod
    def model_of(cls, recipe: Recipe, tokenizer: Tokenizer) -> DualEncoder:
        pretrained = _has_weights(recipe.model.both)
        settings = {
            **recipe.model.model_dump(exclude=HOW_TRAINED, exclude_none=True),
            "image_size": recipe.data.image_size,
            "channels": recipe.data.channels,
            # a pretrained model has a scale and a bias, which only an explicit setting replaces
            **recipe.loss.model_dump(include={"scale", "bias"}, exclude_unset=pretrained),
        }
        model = cls.build(settings, recipe, tokenizer)
        for side in recipe.model.locked:
            if not _has_weights(recipe.model.both or getattr(recipe.model, side)):
                message = "model.locked: the %s tower keeps random weights, for it has no folder or checkpoint; "
                logger.warning(message + "name one, or leave the tower out of model.locked", side)
            freeze(getattr(model, side).tower, side, recipe.model.unlocked.get(side, 0))
        for side in recipe.model.checkpointing:
            checkpoint_activations(getattr(model, side), side)
        return model

    @classmethod
    def build(cls, settings: dict[str, Any], recipe: Recipe, tokenizer: Tokenizer) -> DualEncoder:
        model = build_model(settings, tokenizer=tokenizer)
        # half precisions store float32 weights
        return model.double() if recipe.train.precision == "float64" else model

    def transform(self, images: Sequence[Image]) -> Tensor:
        """Pillow images of any size as uint8 `[n, C, S, S]`, in the run's size and number of channels."""
        data = self.recipe.data
        shape = (data.channels, data.image_size, data.image_size)
        pictures = checked_list("images", images, "image", Image)
        squares = [torch.from_numpy(squared(picture, shape)) for picture in pictures]
        return torch.stack(squares) if squares else torch.empty(0, *shape, dtype=torch.uint8)

    @torch.no_grad()
    def encode_image(self, images: Sequence[Image] | Tensor) -> Tensor:
        """Features `[n, D]`, float32 unit rows, of Pillow images or of uint8 `[n, C, S, S]` as `transform` gives."""
        pictures = images if isinstance(images, Tensor) else self.transform(images)
        if pictures.dtype != torch.uint8:
            remedy = "Give bytes from 0 to 255; floats are made of them here."
            raise invalid("images", "be Pillow images or a uint8 tensor", pictures.dtype, remedy)
        sub_batch = self.recipe.train.sub_batch.image
        return F.normalize(encode(self.model.encode_image, pictures, sub_batch=sub_batch).float(), dim=-1)

    @torch.no_grad()
    def encode_text(self, texts: Sequence[str]) -> Tensor:
        """Features `[n, D]`, float32 unit rows, of texts."""
        texts = checked_list("texts", texts, "text", str)
        if not texts:
            # some tokenizers refuse an empty list
            return self.encode_text([""])[:0]
        tokens, sub_batch = self.tokenizer.tokenise(texts), self.recipe.train.sub_batch.words("text")
        return F.normalize(encode(self.model.encode_text, tokens, **sub_batch).float(), dim=-1)


def _has_weights(tower: Any) -> bool:
    """True for a recipe's tower whose weights come from a file."""
    return any(getattr(tower, origin, None) for origin in ("folder", "checkpoint"))


def ready_tokenizer(settings: Any) -> Tokenizer | None:
    """The tokenizer that a recipe's settings name; None where one is trained on the run's texts."""
    if settings.folder is not None:
        return load_tokenizer(Path(settings.folder), length=settings.length)
    return clip_tokenizer(settings.length) if settings.kind == "open_clip" else None


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto" is the GPU if there is one."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if gpus else "cpu")
    if name.startswith("cuda") and not gpus:
        raise invalid("device", "be on this machine", f'"{name}", and torch finds no GPU', 'Use "cpu" or "auto".')
    device = torch.device(name)
    if device.index is not None and device.index >= gpus:
        raise invalid("device", "be on this machine", f'"{name}", and torch finds {gpus}', "GPUs are counted from 0.")
    return device


def settled(recipe: R, begun: RunFolder | None = None) -> R:
    """The recipe with choices in place of "auto": those of the run `begun`, or else the fastest of the device.

    The precision is bf16 where the device has instructions for it, else float32, because emulated products are many
    times slower. Towers are compiled where that pays.
    """
    train: Any = recipe.train
    earlier: Any = None if begun is None else load_any_recipe(begun / RECIPE, files=False).train
    choices: dict[str, Any] = {}
    if train.precision == "auto":
        bf16 = earlier is None and has_bf16(choose_device(recipe.device))
        choices["precision"] = earlier.precision if earlier is not None else "bf16" if bf16 else "float32"
    if train.compile == "auto":
        # a run of an earlier version has no such key in its recipe, and compiled nothing by itself
        choices["compile"] = earlier.compile is True if earlier is not None else _pays_to_compile(recipe)
    return recipe.model_copy(update={"train": train.model_copy(update=choices)}) if choices else recipe


def _pays_to_compile(recipe: Any) -> bool:
    """Return whether the recipe's towers are compiled, and log it; quietly not on a CPU."""
    device, train = choose_device(recipe.device), recipe.train
    towers = [getattr(recipe.model, side, None) for side in ("both", "image", "text", "query", "passage")]
    reason = no_compiler(device)
    if {tower.kind for tower in towers if tower is not None} <= GROWTH.keys():
        reason = "they are small"
    elif train.examples is not None and train.examples < WORTH_COMPILING:
        reason = f"{train.examples:,} examples are over sooner"
    if device.type != "cpu":
        logger.info("train.compile: %s", "towers are compiled" if reason is None else f"no, because {reason}")
    return reason is None


def has_bf16(device: torch.device) -> bool:
    """True for a GPU of compute capability 8 or more, and for a CPU that lists the instructions."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return CPU.is_file() and BF16.search(CPU.read_text()) is not None


def begin_run(folder: RunFolder, run: LoadedRun) -> None:
    """Write a run's first files: the tokenizer, then the recipe, without which a folder is no run."""
    run.tokenizer.save(folder.path)
    # the recipe must not be on the disk before these files and their names
    for path in (*folder.path.iterdir(), folder.path):
        sync(path)
    folder.write_text(RECIPE, to_toml(run.recipe))


def save_run(folder: RunFolder, run: LoadedRun, metadata: dict[str, Any]) -> None:
    """Save weights and metadata, each file whole or not at all; raises OSError where the disk is full."""
    with folder.written_whole(WEIGHTS) as path:
        try:
            with as_open_makes_it(path):
                safetensors.torch.save_model(run.model, str(path))
        except safetensors.SafetensorError as failure:
            # safetensors raises an error of its own for a full disk
            sentence = f"the weights could not be saved into {folder.path} ({failure})"
            raise OSError(f"{sentence}; what was saved before is there, free the disk and resume") from failure
    folder.write_json(METADATA, {**metadata, "towers": run.model.settings, "weights_sha256": folder.checksum(WEIGHTS)})


# keys that may change when a run is resumed
FREE = (
    *("device", "save.", "log.", "data.cache", "data.max_bad_fraction", "train.timeout", "train.parallel"),
    *("evaluate.zero_shot", "evaluate.retrieval"),
)


def same_recipe(folder: RunFolder, recipe: AnyRecipe, verb: str = "train", options: Sequence[str] = ()) -> None:
    """Raise ValueError where `verb` began with a recipe that differs in a key that training depends on.

    options: those of the command beside recipe and folder.
    """
    earlier: Any = load_any_recipe(folder / RECIPE, files=False)
    began, now = (learned_by(settled(version, folder), used_by=recipe) for version in (earlier, recipe))

    def written(value: object) -> str:
        """The value as a recipe has it."""
        return "none" if value is None else json.dumps(value, ensure_ascii=False, default=str)

    # the kind of a section comes first, because it decides about the others
    for key in sorted(began.keys() | now.keys(), key=lambda key: (not key.endswith("kind"), key)):
        if began.get(key) != now.get(key):
            words = ["contrastile", verb, str(folder / RECIPE), *options, "--runs", str(folder.path.parent), "--resume"]
            again = shlex.join(words)
            remedy = f"It began with {written(began.get(key))}: go on with {again}, or {verb} anew, without --resume."
            raise invalid(key, "be what the run began with", written(now.get(key)), remedy)


def learned_by(recipe: AnyRecipe, used_by: AnyRecipe | None = None) -> dict[str, Any]:
    """The dotted keys that training depends on, with their values, as checkpoints hold them.

    Keys that have no effect in `used_by`, by default the recipe itself, are left out.
    """
    # a folder may have been renamed
    free = {"name", *(rule.key for rule in unused_keys(used_by or recipe))}
    flat = _flat(recipe.model_dump(mode="json"))
    return {key: value for key, value in flat.items() if key not in free and not key.startswith(FREE)}


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
