"""An image tower of timm by its name, with random weights or those of a local file.

Below `towers.py`. The adapter uses `timm.create_model(name, pretrained=False, num_classes=0, ...)`, which pools, and
`timm.data.resolve_model_data_config` for the normalisation of pixels. timm needs torchvision. Tested with timm 1.0.31
and an empty stand-in for torchvision: small ViTs and ResNets, forward and backward, and weights from files. Its
published weights were not tested.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from contrastile._errors import invalid
from contrastile.models.base import PixelTower, Tower, check_image_input, feature_size
from contrastile.models.weights import load_weights_into, read_weights


@dataclass(frozen=True)
class Timm:
    """A model's `name` in timm, a `checkpoint` with its weights, and further arguments of timm.create_model.

    `mean` and `std` normalise the pixels, by default the model's own.
    """

    name: str
    checkpoint: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    mean: list[float] | None = None
    std: list[float] | None = None

    def __post_init__(self) -> None:
        # timm would unpickle or download the weights that these name
        weights = [key for key in self.config if key.startswith(("checkpoint", "pretrained", "cache_dir"))]
        if weights:
            raise invalid("config", "leave weights to checkpoint", ", ".join(weights), "Name a file of tensors there.")


def timm_tower(origin: Timm, *, image_size: int, channels: int) -> Tower:
    """The model without its classifier.

    With random weights, a model of fixed image size is built for the recipe's images. With a checkpoint, it keeps its
    own image size and three channels.
    """
    import timm

    bare = origin.name.partition(".")[0]
    if not timm.is_model(bare):
        remedy = "timm.list_models() names them; none is fetched."
        raise invalid("name", "be a model of timm", f'"{origin.name}"', remedy)
    known = timm.models.get_pretrained_cfg(bare)
    config = dict(origin.config)
    config.setdefault("in_chans", channels if origin.checkpoint is None else 3)
    if known is not None and known.fixed_input_size and "img_size" not in config:
        config["img_size"] = image_size if origin.checkpoint is None else known.input_size[-1]
    check_image_input(image_size, channels, size=config.get("img_size"), colours=config["in_chans"])
    model = timm.create_model(origin.name, pretrained=False, num_classes=0, **config)
    if origin.checkpoint is not None:
        names = model.pretrained_cfg.get("classifier") or ()
        classifier = tuple(f"{name}." for name in ((names,) if isinstance(names, str) else names))
        weights = {name: x for name, x in read_weights(origin.checkpoint).items() if not name.startswith(classifier)}
        load_weights_into(model, weights, origin.checkpoint)
    own = timm.data.resolve_model_data_config(model)
    mean, std = list(origin.mean or own["mean"]), list(origin.std or own["std"])
    tower = PixelTower(model, config["in_chans"], mean, std)
    features = feature_size(tower, torch.zeros(1, channels, image_size, image_size))
    return Tower(tower, features, {"name": origin.name, "config": config, "mean": mean, "std": std})
