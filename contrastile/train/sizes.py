"""What models say of their own sizes, and whether the rest of a recipe fits: before any library is loaded.

Beside `config.py`. The small towers' sizes are their settings; those of a model of transformers or open_clip are looked
for in the recipe, or in the config.json of its folder. What they do not tell, `models/` finds out when it builds them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from contrastile.train.model_settings import WordsTower, read_config
from contrastile.train.settings import ClashError

Part = Literal["vision", "text"]

# what libraries call the size of features, and the most tokens of a text
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim")
LENGTHS = ("max_position_embeddings", "n_positions", "context_length")
# towers that are one piece: no layers to unlock or to compute again
SMALL = ("conv", "words")
# of small towers: how many weights they have, but for few, over the square of the width; and features, over the width
GROWTH = {"conv": (378, 64), "words": (3, 2), "bag": (4, 1)}
WEIGHT_BYTES = 4


def told(model: Any, part: Part) -> Mapping[str, Any]:
    """What a model's configuration says of its side of pictures or of texts; nothing where it has none at hand."""
    config: Any = getattr(model, "config", None)
    folder = getattr(model, "folder", None)
    if folder is not None and os.path.isfile(os.path.join(folder, "config.json")):
        config = read_config(os.path.join(folder, "config.json"))
    for name in (f"{part}_config", f"{part}_cfg"):
        if isinstance(config, Mapping) and isinstance(config.get(name), Mapping):
            return config[name]
    return config if isinstance(config, Mapping) else {}


def _number(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these that is a whole number there."""
    return next((config[name] for name in names if type(config.get(name)) is int), None)


def width_of(encoder: Any) -> int | None:
    """How many features an encoder of texts gives, where that is known."""
    if encoder.kind in ("bag", "words"):
        return int(encoder.width) * (2 if isinstance(encoder, WordsTower) else 1)
    config = told(encoder, "text")
    # some project what they give
    return None if "word_embed_proj_dim" in config else _number(config, *WIDTHS)


def host_memory() -> int:
    """All bytes of this machine, on which every model is made first."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _fits_memory(model: Any, sides: Sequence[str]) -> None:
    """What cannot even be held was not meant."""
    memory = host_memory()
    for side in sides:
        tower = getattr(model, side)
        if tower is None or tower.kind not in GROWTH:
            continue
        squares, outputs = GROWTH[tower.kind]
        for key, got, weights in (
            (f"model.{side}.width", tower.width, squares * tower.width**2),
            ("model.features", model.features, outputs * tower.width * (model.features or 0)),
        ):
            if (needed := WEIGHT_BYTES * weights) > memory:
                reason = f"must make weights that fit into the {memory / 2**30:,.1f} GiB of this machine"
                raise ClashError(key, f"{reason}; got {got}, for {needed / 2**30:,.1f} GiB at least")


def fit_pictures(data: Any, model: Any) -> None:
    """Raises `ClashError` where pictures, texts and towers do not fit together."""
    image, text = told(model.both or model.image, "vision"), told(model.both or model.text, "text")
    size, patch = _number(image, "image_size"), _number(image, "patch_size")
    if size is not None and size != data.image_size:
        reason = f"must be the {size} pixels of the image tower; got {data.image_size}"
        raise ClashError("data.image_size", reason)
    if patch is not None and patch > data.image_size:
        reason = f"must be at least a patch of the image tower, {patch} pixels; got {data.image_size}"
        raise ClashError("data.image_size", reason)
    channels = _number(image, "num_channels")
    if channels is not None and data.channels not in (1, channels):
        raise ClashError("data.channels", f"must be at most the {channels} of the image tower; got {data.channels}")
    _fits_length(text, model.tokenizer.length)
    for side in ("image", "text"):
        _fits_layers(model, side)
    _fits_memory(model, ("image", "text"))


def _fits_layers(model: Any, side: str) -> None:
    """What is asked of a tower's layers, it has and uses."""
    tower = getattr(model, side)
    small = tower is not None and tower.kind in SMALL
    if small and side in model.unlocked:
        reason = f'must be left out for a tower of kind "{tower.kind}", which has no layers to tell apart'
        raise ClashError(f"model.unlocked.{side}", reason)
    if side in model.checkpointing and small:
        raise ClashError("model.checkpointing", f'must name towers that have it; got "{side}", of kind "{tower.kind}"')
    if side in model.checkpointing and side in model.locked and side not in model.unlocked:
        raise ClashError("model.checkpointing", f'must name towers that learn; got "{side}", which model.locked has')


def fit_texts(model: Any) -> None:
    """Raises `ClashError` where texts and a retriever's encoders do not fit together."""
    _fits_memory(model, ("both", "query", "passage"))
    sides = [encoder for encoder in (model.both, model.query, model.passage) if encoder is not None]
    widths = [model.features or width_of(encoder) for encoder in sides]
    for encoder in sides:
        _fits_length(told(encoder, "text"), model.tokenizer.length)
    known = {width for width in widths if width is not None}
    if len(known) > 1:
        got = " and ".join(map(str, sorted(known)))
        raise ClashError("model.features", f"must be given for encoders of unequal sizes; got {got}")
    for width in known:
        if (most := max(model.dimensions, default=0)) > width:
            raise ClashError("model.dimensions", f"must be at most the {width} features there are; got {most}")


def _fits_length(config: Mapping[str, Any], length: int) -> None:
    longest = _number(config, *LENGTHS)
    if longest is not None and length > longest:
        reason = f"must be at most the {longest} tokens of the text tower; got {length}"
        raise ClashError("model.tokenizer.length", reason)
