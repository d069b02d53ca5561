"""An image tower of timm, by its name there: random weights, or those of a local file.

Within the second box of the flow. The documented interface is used: `timm.create_model(name, pretrained=False,
num_classes=0, ...)`, which pools, and `timm.data.resolve_model_data_config`, which knows what pixels are normalised
with. timm needs torchvision. Run with timm 1.0.31: small ViTs and ResNets, forward and backward, and weights from
files, on a machine where an empty stand-in took the place of torchvision. Not run: its published weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from contrastile._check import wrong
from contrastile.models.base import PixelTower, Tower, refuse_other_pictures, width_of
from contrastile.models.weights import put_into, read_weights


@dataclass(frozen=True)
class Timm:
    """A model's `name` in timm; a `checkpoint` with its weights; `config`, further arguments of timm.create_model.

    `mean` and `std` are what the pixels are normalised with; the model's own unless given.
    """

    name: str
    checkpoint: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    mean: list[float] | None = None
    std: list[float] | None = None

    def __post_init__(self) -> None:
        # timm would unpickle some of them, and fetch others
        weights = [key for key in self.config if key.startswith(("checkpoint", "pretrained", "cache_dir"))]
        if weights:
            raise wrong("config", "leave weights to checkpoint", ", ".join(weights), "Name a file of tensors there.")


def timm_tower(origin: Timm, *, image_size: int, channels: int) -> Tower:
    """The model of that name, without its classifier.

    A model of fixed size is made for the pictures' size where it has random weights; one with weights of a file keeps
    its own, and three channels.
    """
    import timm

    bare = origin.name.partition(".")[0]
    if not timm.is_model(bare):
        raise wrong("name", "be a model of timm", f'"{origin.name}"', "timm.list_models() names them; none is fetched.")
    known = timm.models.get_pretrained_cfg(bare)
    given = dict(origin.config)
    given.setdefault("in_chans", channels if origin.checkpoint is None else 3)
    fixed = bool(known is not None and known.fixed_input_size)
    if fixed and "img_size" not in given:
        given["img_size"] = image_size if origin.checkpoint is None else known.input_size[-1]
    refuse_other_pictures(image_size, channels, size=given.get("img_size"), colours=given["in_chans"])
    model = timm.create_model(origin.name, pretrained=False, num_classes=0, **given)
    if origin.checkpoint is not None:
        put_into(model, _without_classifier(model, read_weights(origin.checkpoint)), origin.checkpoint)
    told = timm.data.resolve_model_data_config(model)
    mean, std = list(origin.mean or told["mean"]), list(origin.std or told["std"])
    tower = PixelTower(model, given["in_chans"], mean, std)
    width = width_of(tower, torch.zeros(1, channels, image_size, image_size))
    return Tower(tower, width, {"name": origin.name, "config": given, "mean": mean, "std": std})


def _without_classifier(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a file has of the classifier, which this tower does without, is left out."""
    names = model.pretrained_cfg.get("classifier") or ()
    parts = tuple(f"{name}." for name in ((names,) if isinstance(names, str) else names))
    return {name: value for name, value in weights.items() if not name.startswith(parts)}
