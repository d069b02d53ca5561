"""The settings of each kind of tower, which `models/` builds, and their sizes compared with the rest of a recipe.

Small towers have their sizes as settings; those of transformers and open_clip stand in the recipe, or in a file of a
folder. Last of all transformers is loaded: its configuration classes fill in defaults, and refuse keys that they do not
read. `models/` compares the sizes that are known only once it builds a model.
"""

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from contrastile.models.remote_code import RULE, read_open_clip, read_table, refuse_remote_code, remote_code
from contrastile.train.config import base
from contrastile.train.config.base import Clash, FilePath, FolderPath, Positive, Settings, Width, kind_or, needs, one_of

# names of the libraries for the size of features, and for the most tokens of a text
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim")
LENGTHS = ("max_position_embeddings", "n_positions", "context_length")
# types of models that number positions from that of their padding + 1
BEHIND_PADDING = {
    "altclip_text_model", "camembert", "data2vec-text", "ibert", "longformer", "luke", "mpnet", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
# small towers, which have no layers to tell apart: nearly all weights over the square of the width, features over it
GROWTH = {"conv": (378, 64), "words": (3, 2), "bag": (4, 1)}
WEIGHT_BYTES = 4


class ConvTower(Settings):
    """The small convolutional net of the demo."""

    kind: Literal["conv"] = "conv"
    width: Width = 32


class WordsTower(Settings):
    """The small word-level text tower of the demo."""

    kind: Literal["words"] = "words"
    width: Width = 128


def _one_or_three(numbers: tuple[float, ...]) -> tuple[float, ...]:
    if len(numbers) not in (1, 3):
        raise ValueError(f"must be one number, or three; got {len(numbers)}")
    return numbers


class OfPixels(Settings):
    """Normalisation of pixels by `mean` and `std`, one number or one for each channel; by default the model's own."""

    mean: Annotated[tuple[float, ...], AfterValidator(_one_or_three)] | None = None
    std: Annotated[tuple[Positive, ...], AfterValidator(_one_or_three)] | None = None


class TransformersModel(Settings):
    """A model of transformers: a local `folder` with its weights, or a `config` with its model_type, from scratch.

    `size_clashes` asks transformers for the keys that a model_type reads, once the rest of the recipe is right.
    """

    kind: Literal["transformers"] = "transformers"
    folder: str | None = None
    config: dict[str, Any] | None = None
    instead: ClassVar = one_of("folder", "config")

    def described(self) -> Any:
        """The configuration of the model, of the folder's or of `config`."""
        return self.config if self.folder is None else read_table(Path(self.folder, "config.json"))

    def clashes(self) -> Iterable[Clash]:
        yield self.either("folder", "config")
        no_type = self.config is not None and "model_type" not in self.config
        yield no_type, "config", 'must have a model_type, such as "vit"'

    def training_clashes(self) -> Iterable[Clash]:
        code, folder = remote_code(self.config), self.folder
        yield code is not None, "config", f"must {RULE}; got {code}"
        if folder is not None:
            no_config = not Path(folder, "config.json").is_file()
            yield no_config, "folder", f'must be a folder with a config.json; got "{folder}"'
            try:
                no_type = "model_type" not in refuse_remote_code(folder)
            except ValueError as failure:
                # the sentence without its name, which the recipe's key replaces; a clash ends the checks
                yield True, "folder", str(failure).partition("` ")[2]
            yield no_type, "folder", f'must be a folder whose config.json has a model_type; got "{folder}"'


class TransformersTower(TransformersModel):
    """A text tower. Its features are the mean over positions, the first position ("cls") or the model's pooler."""

    pooling: Literal["mean", "cls", "pooler"] = "mean"


class TransformersOfPixels(TransformersTower, OfPixels):
    """An image tower."""


class TransformersWhole(TransformersModel, OfPixels):
    """Both sides of a CLIP or SigLIP, which have poolers of their own."""


class TimmTower(OfPixels):
    """An image model of timm by its `name`; `config` holds further arguments of timm.create_model.

    checkpoint, here and of open_clip: local weights as safetensors, or of torch.save; without one they are random.
    """

    checkpoint: FilePath | None = None
    kind: Annotated[Literal["timm"], needs("timm", "timm")] = "timm"
    name: str
    config: dict[str, Any] = Field(default_factory=dict)


class OpenClipModel(Settings):
    """A model of open_clip, or one side of it: by its `name`, or a `config` such as open_clip's files hold.

    Or a local `folder` with its files on the hub: open_clip_config.json and weights.
    """

    checkpoint: FilePath | None = None
    kind: Annotated[Literal["open_clip"], needs("open_clip", "open_clip_torch")] = "open_clip"
    name: str | None = None
    config: dict[str, Any] | None = None
    folder: FolderPath | None = None
    instead: ClassVar = {"folder": ("name", "config", "checkpoint"), "name": ("folder",), "config": ("folder",)}

    def clashes(self) -> Iterable[Clash]:
        wrong, key, reason = self.either("name", "config")
        yield wrong and self.folder is None, key, reason
        beside = [name for name in ("name", "config", "checkpoint") if getattr(self, name) is not None]
        got = f"must be given alone, it has all of them; got {' and '.join(beside)} beside it"
        yield beside and self.folder is not None, "folder", got

    def training_clashes(self) -> Iterable[Clash]:
        try:
            self.described()
        except ValueError as failure:
            yield True, "folder", str(failure).partition("` ")[2]

    def described(self) -> dict[str, Any] | None:
        """The configuration of `config` or of the folder; None for a name."""
        return self.config if self.folder is None else read_open_clip(self.folder)["model_cfg"]


class OpenClipOfPixels(OpenClipModel, OfPixels):
    """A whole model of open_clip, or its image side."""


AnyImageTower = Annotated[
    ConvTower | TransformersOfPixels | TimmTower | OpenClipOfPixels, Field(discriminator="kind"), kind_or("conv")
]
AnyTextTower = Annotated[WordsTower | TransformersTower | OpenClipModel, Field(discriminator="kind"), kind_or("words")]
AnyWhole = Annotated[TransformersWhole | OpenClipOfPixels, Field(discriminator="kind"), kind_or("transformers")]


def size_clashes(recipe: Any) -> Iterator[Clash]:
    """The clashes of data and models: by the sizes in the recipe, then by the sizes that transformers knows."""
    clashes = _image_text if recipe.kind == "image-text" else _retriever
    yield from clashes(recipe)
    yield from clashes(_completed(recipe))


def _image_text(recipe: Any) -> Iterator[Clash]:
    data, model, pixels = recipe.data, recipe.model, recipe.data.image_size
    image, text = _described(model.both or model.image, "vision"), _described(model.both or model.text, "text")
    size, patch, channels = (_number(image, name) for name in ("image_size", "patch_size", "num_channels"))
    yield size not in (None, pixels), "data.image_size", f"must be the {size} pixels of the image tower; got {pixels}"
    reason = f"must be at least a patch of the image tower, {patch} pixels; got {pixels}"
    yield patch is not None and patch > pixels, "data.image_size", reason
    reason = f"must be at most the {channels} of the image tower; got {data.channels}"
    yield channels is not None and data.channels not in (1, channels), "data.channels", reason
    yield _too_long(text, model)
    for side, tower in (("image", model.image), ("text", model.text)):
        small = tower.kind if tower is not None and tower.kind in GROWTH else None
        reason = f'must be left out for a tower of kind "{small}", which has no layers to tell apart'
        yield small and side in model.unlocked, f"model.unlocked.{side}", reason
        if side in model.checkpointing:
            yield small, "model.checkpointing", f'must name towers that have it; got "{side}", of kind "{small}"'
            reason = f'must name towers that learn; got "{side}", which model.locked has'
            yield side in model.locked and side not in model.unlocked, "model.checkpointing", reason
    yield from _too_large(model, "image", "text")
    yield _queue_too_large(recipe, 2 * model.features)


def _retriever(recipe: Any) -> Iterator[Clash]:
    model = recipe.model
    yield from _too_large(model, "both", "query", "passage")
    encoders = [encoder for encoder in (model.both, model.query, model.passage) if encoder is not None]
    for encoder in encoders:
        yield _too_long(_described(encoder, "text"), model)
    widths = sorted({width for encoder in encoders if (width := model.features or _width(encoder)) is not None})
    got = " and ".join(map(str, widths))
    yield len(widths) > 1, "model.features", f"must be given for encoders of unequal sizes; got {got}"
    yield _queue_too_large(recipe, max(widths, default=0))
    largest = max(model.dimensions, default=0)
    reason = f"must be at most the {got} features there are; got {largest}"
    yield widths and largest > widths[0], "model.dimensions", reason


def _described(model: Any, part: str) -> Mapping[str, Any]:
    """The configuration of a model's image or text side; empty where neither recipe nor folder has one."""
    config = model.described() if hasattr(model, "described") else getattr(model, "config", None)
    if not isinstance(config, Mapping):
        return {}
    sides = (config.get(f"{part}_config"), config.get(f"{part}_cfg"))
    return next((side for side in sides if isinstance(side, Mapping)), config)


def _number(config: Mapping[str, Any], *names: str) -> int | None:
    """The value of the first of these names that is a whole number there."""
    return next((config[name] for name in names if type(config.get(name)) is int), None)


def _width(encoder: Any) -> int | None:
    """The size of a text encoder's features, if known."""
    if encoder.kind in GROWTH:
        return int(encoder.width) * GROWTH[encoder.kind][1]
    config = _described(encoder, "text")
    # models with this key project their features to another size
    return None if "word_embed_proj_dim" in config else _number(config, *WIDTHS)


def _too_long(config: Mapping[str, Any], model: Any) -> Clash:
    """The clash of texts that are longer than the model of this configuration can read."""
    longest, length = _number(config, *LENGTHS), model.tokenizer.length
    # XLNet, without such a limit, has -1
    if longest is None or longest < 0:
        return False, "", ""
    if config.get("model_type") in BEHIND_PADDING:
        # a configuration without a padding token is built with that of the tokenizer, 0 if it is learned
        longest -= 1 + (config.get("pad_token_id") or 0)
    reason = f"must be at most the {longest} tokens of the text tower; got {length}"
    return length > longest, "model.tokenizer.length", reason


def host_memory() -> int:
    """The bytes of memory of this machine, where every model is built first."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _too_large(model: Any, *sides: str) -> Iterator[Clash]:
    """The clashes of small towers too large for host memory, which are slips of the keyboard."""
    memory, features = host_memory(), model.features or 0
    towers = {side: tower for side in sides if (tower := getattr(model, side)) is not None and tower.kind in GROWTH}
    for side, tower in towers.items():
        squares, outputs = GROWTH[tower.kind]
        sizes = ((f"{side}.width", tower.width, squares * tower.width), ("features", features, outputs * tower.width))
        for key, got, weights_each in sizes:
            needed = WEIGHT_BYTES * weights_each * got
            reason = f"must make weights that fit into the {memory / 2**30:,.1f} GiB of this machine; got {got}"
            yield needed > memory, f"model.{key}", f"{reason}, for {needed / 2**30:,.1f} GiB at least"


def _queue_too_large(recipe: Any, features: int) -> Clash:
    """The clash of a queue, of keys with so many features, that is too large for host memory."""
    size, memory = getattr(recipe.loss, "queue", 0), host_memory()
    needed = WEIGHT_BYTES * size * features
    reason = f"must make a queue that fits into the {memory / 2**30:,.1f} GiB of this machine; got {size}"
    return needed > memory, "loss.queue", f"{reason}, for {needed / 2**30:,.1f} GiB"


def without_folders(recipe: Any) -> Any:
    """The recipe with configurations instead of folders and checkpoints, so that no weights are read."""
    changes: dict[str, Any] = {}
    for side, tower in recipe.model:
        if hasattr(tower, "described") and tower.folder is not None:
            changes[side] = tower.model_copy(update={"folder": None, "config": tower.described()})
        elif getattr(tower, "checkpoint", None) is not None:
            changes[side] = tower.model_copy(update={"checkpoint": None})
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=changes)}) if changes else recipe


def _completed(recipe: Any) -> Any:
    """The recipe with the whole configurations of its models of transformers."""
    sides = {side: tower for side, tower in recipe.model if getattr(tower, "kind", None) == "transformers"}
    if not sides:
        return recipe
    from transformers import CONFIG_MAPPING

    from contrastile.models.pretrained import Library

    for side, tower in sides.items():
        origin = "config" if tower.folder is None else "folder"
        kind = str(tower.described()["model_type"])
        near = difflib.get_close_matches(kind, CONFIG_MAPPING.keys(), n=1)
        reason = f'must have a model_type that transformers knows; got "{kind}"'
        hint = f" (did you mean {near[0]}?)" if near else ""
        base.refuse([(kind not in CONFIG_MAPPING, f"model.{side}.{origin}", reason + hint)])
        # what the data and the tokenizer say completes a configuration that does not name it
        defaults = {"pad_token_id": 0}
        if side == "image":
            defaults = {"image_size": recipe.data.image_size, "num_channels": recipe.data.channels}
        try:
            described = Library(folder=tower.folder, config=tower.config).described(**defaults)
        except ValueError as failure:
            key, _, reason = str(failure).removeprefix("`").partition("` ")
            base.refuse([(True, f"model.{side}.{key}", reason)])
        if side == "both" and recipe.kind == "image-text":
            reason = f"must be a model of images and texts; got {described.model_type}. "
            reason += "Take a CLIP or a SigLIP, or give the two sides a tower each."
            base.refuse([(not {"vision_config", "text_config"} <= {*described.sub_configs}, "model.both", reason)])
        sides[side] = tower.model_copy(update={"folder": None, "config": described.to_dict()})
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=sides)})
