"""Sizes of models, compared with the rest of a recipe before any library is loaded.

Part of the configuration. Small towers have their sizes as settings; those of transformers and open_clip stand in the
recipe, or in the config.json of a folder. `model_probe.py` compares the sizes that neither tells, and `models/` the
rest, when it builds the model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from contrastile.models.remote_code import read_table
from contrastile.train.config.base import ClashError
from contrastile.train.config.towers import WordsTower

# names of the libraries for the size of features, and for the most tokens of a text
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim")
LENGTHS = ("max_position_embeddings", "n_positions", "context_length")
# image and text towers in one piece: no layers to unlock or to checkpoint
SMALL = ("conv", "words")
# small towers: most of their weights over the square of the width, and features over the width
GROWTH = {"conv": (378, 64), "words": (3, 2), "bag": (4, 1)}
WEIGHT_BYTES = 4


def _described(model: Any, part: Literal["vision", "text"]) -> Mapping[str, Any]:
    """The configuration of a model's image or text side; empty where neither recipe nor folder has one."""
    config: Any = getattr(model, "config", None)
    folder = getattr(model, "folder", None)
    if folder is not None and (path := Path(folder) / "config.json").is_file():
        config = read_table(path)
    if not isinstance(config, Mapping):
        return {}
    sides = (config.get(f"{part}_config"), config.get(f"{part}_cfg"))
    return next((side for side in sides if isinstance(side, Mapping)), config)


def _number(config: Mapping[str, Any], *names: str) -> int | None:
    """The value of the first of these names that is a whole number there."""
    return next((config[name] for name in names if type(config.get(name)) is int), None)


def _check_length(config: Mapping[str, Any], length: int) -> None:
    longest = _number(config, *LENGTHS)
    if longest is not None and length > longest:
        reason = f"must be at most the {longest} tokens of the text tower; got {length}"
        raise ClashError("model.tokenizer.length", reason)


def host_memory() -> int:
    """All bytes of this machine, in whose memory every model is built first."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_memory(model: Any, sides: Sequence[str]) -> None:
    """Reject small towers that do not fit into host memory: a slip of the keyboard."""
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


def check_image_text(data: Any, model: Any) -> None:
    """Raise `ClashError` where pictures, texts and towers do not fit together."""
    image, text = _described(model.both or model.image, "vision"), _described(model.both or model.text, "text")
    size, patch, channels = (_number(image, name) for name in ("image_size", "patch_size", "num_channels"))
    if size is not None and size != data.image_size:
        reason = f"must be the {size} pixels of the image tower; got {data.image_size}"
        raise ClashError("data.image_size", reason)
    if patch is not None and patch > data.image_size:
        reason = f"must be at least a patch of the image tower, {patch} pixels; got {data.image_size}"
        raise ClashError("data.image_size", reason)
    if channels is not None and data.channels not in (1, channels):
        raise ClashError("data.channels", f"must be at most the {channels} of the image tower; got {data.channels}")
    _check_length(text, model.tokenizer.length)
    for side in ("image", "text"):
        _check_layers(model, side)
    _check_memory(model, ("image", "text"))


def _check_layers(model: Any, side: str) -> None:
    """Reject settings of layers that a tower does not have or train."""
    tower = getattr(model, side)
    small = tower is not None and tower.kind in SMALL
    if small and side in model.unlocked:
        reason = f'must be left out for a tower of kind "{tower.kind}", which has no layers to tell apart'
        raise ClashError(f"model.unlocked.{side}", reason)
    if side in model.checkpointing and small:
        raise ClashError("model.checkpointing", f'must name towers that have it; got "{side}", of kind "{tower.kind}"')
    if side in model.checkpointing and side in model.locked and side not in model.unlocked:
        raise ClashError("model.checkpointing", f'must name towers that learn; got "{side}", which model.locked has')


def _width(encoder: Any) -> int | None:
    """The size of a text encoder's features, if known."""
    if encoder.kind in GROWTH:
        return int(encoder.width) * (2 if isinstance(encoder, WordsTower) else 1)
    config = _described(encoder, "text")
    # models with this key project their features to another size
    return None if "word_embed_proj_dim" in config else _number(config, *WIDTHS)


def check_retriever(model: Any) -> None:
    """Raise `ClashError` where texts and a retriever's encoders do not fit together."""
    _check_memory(model, ("both", "query", "passage"))
    encoders = [encoder for encoder in (model.both, model.query, model.passage) if encoder is not None]
    for encoder in encoders:
        _check_length(_described(encoder, "text"), model.tokenizer.length)
    widths = sorted({width for encoder in encoders if (width := model.features or _width(encoder)) is not None})
    if len(widths) > 1:
        got = " and ".join(map(str, widths))
        raise ClashError("model.features", f"must be given for encoders of unequal sizes; got {got}")
    largest = max(model.dimensions, default=0)
    if widths and largest > widths[0]:
        raise ClashError("model.dimensions", f"must be at most the {widths[0]} features there are; got {largest}")
