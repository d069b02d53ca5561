"""Towers from the library transformers: any vision or text model, from a configuration or a local folder.

Within the second box of the flow. Nothing is downloaded: a configuration gives fresh weights, a folder its own. A whole
CLIP or SigLIP is taken apart into its two towers with their projections, so that it trains like any other pair.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile._check import wrong
from contrastile.models.base import (
    PixelTower,
    Tower,
    Whole,
    evaluating,
    refuse_other_pictures,
    refuse_other_tokens,
    width_of,
)
from contrastile.models.text import Tokenizer

# tokens that a tower is tried with, to see how wide its features are; a text, to see where it looks for them
TRIAL_LENGTH = 4
TRIAL_TEXT = "a small red fox in the snow"
# weights of half precision would lose small updates; what an encoder computes with is `train.precision`'s to say. So
# whatever a folder or a configuration says, as this version of the library calls it or an older one:
DTYPE = torch.float32
DTYPE_NAMES = ("dtype", "torch_dtype")
# a folder's own code is not run, and nobody is asked whether it may
HERE = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True)
class Library:
    """Where a model comes from: a local `folder`, or a `config` with its `model_type`; and how its features are taken.

    Its weights are float32, those of a folder in half precision too.

    `pooling` is one of `POOLINGS`: "mean" over the places that are no padding, "cls" the first place, "last" the last
    one that is no padding, "pooler" the model's own. `mean` and `std` are what the pixels are normalised with; a
    folder's own unless given.
    """

    folder: str | None = None
    config: dict[str, Any] | None = None
    pooling: str = "mean"
    mean: list[float] | None = None
    std: list[float] | None = None

    def __post_init__(self) -> None:
        if (self.folder is None) == (self.config is None):
            remedy = "A folder has its own weights, a config gets fresh ones."
            raise wrong("config", "be given, or folder, not both", f"{self.config} and {self.folder}", remedy)
        if self.pooling not in POOLINGS:
            raise wrong("pooling", f"be one of {', '.join(POOLINGS)}", self.pooling, '"mean" suits every model.')
        if self.folder is not None and not (Path(self.folder) / "config.json").is_file():
            raise wrong("folder", "hold a config.json", self.folder, "Save the model there with save_pretrained.")
        if self.config is not None and "model_type" not in self.config:
            raise wrong("config", "have a model_type", self.config, 'For example model_type = "vit".')

    def build(self, **unless_given: Any) -> nn.Module:
        """The model; `unless_given` completes a configuration, and is ignored by a folder."""
        from transformers import AutoModel

        if self.folder is not None:
            return AutoModel.from_pretrained(self.folder, **HERE, dtype=DTYPE)
        config = self.described(**unless_given)
        with _describing(config.model_type):
            return AutoModel.from_config(config, dtype=DTYPE)

    def described(self, **unless_given: Any) -> Any:
        """The configuration that the model is built with, complete; raises ValueError where the library has none."""
        from transformers import AutoConfig

        if self.folder is not None:
            return AutoConfig.from_pretrained(self.folder, **HERE)
        described = {**unless_given, **(self.config or {})}
        kind = described.pop("model_type")
        with _describing(kind):
            config = AutoConfig.for_model(kind, **described)
        # what completes a configuration is ignored where it has no use for it; one that the library wrote, for a folder
        # or a run, says which version did, and holds what others read
        if "transformers_version" not in described:
            refuse_unknown({key: value for key, value in described.items() if key not in unless_given}, config)
            _refuse_another_dtype(described)
        return config

    def normalisation(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of the pixels, one per channel or one for all."""
        found: dict[str, Any] = {}
        if self.folder is not None and (path := Path(self.folder) / "preprocessor_config.json").is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
        return self.mean or found.get("image_mean") or [0.5], self.std or found.get("image_std") or [0.5]


@contextmanager
def _describing(kind: str) -> Iterator[None]:
    """What the library finds wrong with a configuration, in our form."""
    try:
        yield
    # it has errors of many kinds, some of them of two lines
    except Exception as failure:
        remedy = " ".join(str(failure).split("\n")[:2]) or type(failure).__name__
        raise wrong("config", "describe a model of transformers", kind, remedy) from failure


def refuse_unknown(told: Mapping[str, Any], config: Any, place: str = "config") -> None:
    """Raises ValueError where a configuration has keys that its model does not read: the library takes any."""
    known = type(config)()
    for key, value in told.items():
        # an older name of a setting is read, and gone
        if hasattr(config, key) and not any(hasattr(known, name) for name in (key, f"_{key}")):
            near = difflib.get_close_matches(key, known.to_dict(), n=1)
            remedy = f"Did you mean {near[0]}?" if near else "Leave it out."
            raise wrong(place, f"have keys that a {config.model_type} reads", key, remedy)
        if isinstance(value, Mapping) and key in getattr(config, "sub_configs", {}):
            refuse_unknown(value, getattr(config, key), f"{place}.{key}")


def _refuse_another_dtype(told: Mapping[str, Any]) -> None:
    """Raises ValueError where somebody asks for weights of another precision; a library's file says how it was kept."""
    for name in DTYPE_NAMES:
        if (got := told.get(name)) is not None and str(got).removeprefix("torch.") != "float32":
            remedy = "Leave it out, and set train.precision."
            raise wrong("config", "have weights of float32", f'{name} = "{got}"', remedy)


def _mean(output: Any, mask: Tensor | None) -> Tensor:
    states = output.last_hidden_state
    if states.ndim == 4:
        return states.mean(dim=(2, 3))
    # a model may merge or add places (patches, a class token); then there is no padding either
    if mask is None or mask.shape[1] != states.shape[1]:
        return states.mean(dim=1)
    weight = mask[..., None].to(states.dtype)
    return (states * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1)


def _cls(output: Any, mask: Tensor | None) -> Tensor:  # noqa: ARG001
    return output.last_hidden_state[:, 0]


def _last(output: Any, mask: Tensor | None) -> Tensor:
    states = output.last_hidden_state
    if mask is None or mask.shape[1] != states.shape[1]:
        return states[:, -1]
    places = torch.arange(mask.shape[1], device=mask.device)
    last = (mask * (places + 1)).argmax(dim=1)
    return states[torch.arange(len(states), device=states.device), last]


def _pooler(output: Any, mask: Tensor | None) -> Tensor:  # noqa: ARG001
    pooled = getattr(output, "pooler_output", None)
    if pooled is None:
        raise wrong("pooling", "be one that the model has", "pooler", 'This model has none: take "mean" or "cls".')
    return pooled.flatten(1)


POOLINGS = {"mean": _mean, "cls": _cls, "last": _last, "pooler": _pooler}


class ImageTower(PixelTower):
    """A vision model of the library, of whose outputs features are made."""

    def __init__(self, model: nn.Module, pooling: str, mean: list[float], std: list[float]) -> None:
        channels: Any = model.config.num_channels  # type: ignore[union-attr]
        super().__init__(model, channels, mean, std)
        self.pooling = pooling

    def _features(self, pixels: Tensor) -> Tensor:
        return POOLINGS[self.pooling](self.model(pixel_values=pixels), None)


class TextTower(nn.Module):
    """A text model. Texts that come shorter than `length` are filled up with `pad` again."""

    def __init__(self, model: nn.Module, pooling: str, *, length: int = 0, pad: int = 0) -> None:
        super().__init__()
        self.model = model
        self.pooling = pooling
        self.length, self.pad = length, pad

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """`[B, L]` twice to `[B, features]`."""
        room = (0, max(self.length - input_ids.shape[1], 0))
        input_ids, attention_mask = F.pad(input_ids, room, value=self.pad), F.pad(attention_mask, room)
        output = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return POOLINGS[self.pooling](output, attention_mask)


def _plain(config: Any) -> dict[str, Any]:
    """A configuration as a recipe holds it."""
    return json.loads(config.to_json_string(use_diff=True))


def image_tower(library: Library, *, image_size: int, channels: int) -> Tower:
    """The vision model of a library; a configuration that does not tell gets the pictures' size and channels."""
    model = library.build(image_size=image_size, num_channels=channels)
    return _image(model, library, image_size=image_size, channels=channels)


def _image(model: nn.Module, library: Library, *, image_size: int, channels: int) -> Tower:
    config: Any = model.config
    size = getattr(config, "image_size", None)
    refuse_other_pictures(image_size, channels, size=size, colours=config.num_channels)
    mean, std = library.normalisation()
    tower = ImageTower(model, library.pooling, mean, std)
    try:
        width = width_of(tower, torch.zeros(1, channels, image_size, image_size))
    # a model of texts has an error of its own for pictures
    except (ValueError, TypeError) as failure:
        if str(failure).startswith("`"):
            raise
        got = f"{type(model).__name__} ({' '.join(str(failure).split())})"
        raise wrong("image", "be a model of pictures", got, "Name another model_type or folder.") from failure
    return Tower(tower, width, {"config": _plain(config), "pooling": library.pooling, "mean": mean, "std": std})


def text_tower(library: Library, *, tokenizer: Tokenizer) -> Tower:
    """The text model of a library; a configuration that does not tell gets the tokenizer's vocabulary and padding."""
    return _text(library.build(vocab_size=tokenizer.vocabulary_size, pad_token_id=tokenizer.pad), library, tokenizer)


def _text(model: nn.Module, library: Library, tokenizer: Tokenizer) -> Tower:
    config: Any = model.config
    longest = getattr(config, "max_position_embeddings", None)
    refuse_other_tokens(tokenizer, vocabulary=config.vocab_size, longest=longest)
    pooling = _pooling_of(model, tokenizer) if library.pooling == "pooler" else library.pooling
    tower = TextTower(model, pooling)
    if _sees_padding(tower, tokenizer):
        tower = TextTower(model, pooling, length=tokenizer.length, pad=tokenizer.pad)
    trial = torch.full((1, min(TRIAL_LENGTH, tokenizer.length)), tokenizer.pad)
    width = width_of(tower, trial, torch.ones_like(trial))
    return Tower(tower, width, {"config": _plain(config), "pooling": pooling})


@torch.no_grad()
def _pooling_of(model: nn.Module, tokenizer: Tokenizer) -> str:
    """ "pooler", or "last" for a causal model that takes one of its places, and with this tokenizer not the last one.

    CLIP's is the place of the token that ends a text. A tokenizer that writes none leaves it with another, mostly the
    first, which has seen no other word: all texts that begin alike would be one.
    """
    text = tokenizer.tokenise([TRIAL_TEXT])
    ids, mask = text["input_ids"], text["attention_mask"]
    if mask.sum() < 2:
        return "pooler"
    other = ids.clone()
    # one of the highest, for which some look instead, and none that ends a text, of which a model may have several
    ends = torch.tensor(getattr(model.config, "eos_token_id", None) or []).flatten().tolist()
    other[0, 1] = next(token for token in range(tokenizer.vocabulary_size - 2, -1, -1) if token not in ends)
    with evaluating(model):
        outputs = [model(input_ids=one, attention_mask=mask) for one in (ids, other)]
    states, pooled, last = ([pool(one, mask) for one in outputs] for pool in (_states, _pooler, _last))
    causal = torch.equal(states[0][:, 0], states[1][:, 0])
    takes_one = pooled[0].shape == last[0].shape and bool((states[0] == pooled[0][:, None]).all(dim=2).any())
    return "last" if causal and takes_one and not all(map(torch.equal, pooled, last)) else "pooler"


@torch.no_grad()
def _sees_padding(tower: TextTower, tokenizer: Tokenizer) -> bool:
    """Whether a text's features depend on how far it is padded: SigLIP's are those of the last place of all."""
    text = tokenizer.tokenise(["a"])
    cut = {name: ids[:, : int(text["attention_mask"].sum())] for name, ids in text.items()}
    with evaluating(tower):
        whole, short = tower(**text), tower(**cut)
    return bool((whole - short).norm() > 1e-2 * whole.norm())


def _states(output: Any, mask: Tensor | None) -> Tensor:  # noqa: ARG001
    return output.last_hidden_state


def whole_model(library: Library, *, image_size: int, channels: int, tokenizer: Tokenizer) -> Whole:
    """A model of transformers that holds both towers, taken apart; the features are its own, pooling too."""
    model: Any = library.build()
    if not (hasattr(model, "vision_model") and hasattr(model, "text_model")):
        remedy = "Take a CLIP or a SigLIP, or give the two sides a tower each."
        raise wrong("both", "be a model with vision_model and text_model", type(model).__name__, remedy)
    pooled = replace(library, pooling="pooler")
    image = _image(model.vision_model, pooled, image_size=image_size, channels=channels)
    text = _text(model.text_model, pooled, tokenizer)
    trained = library.folder is not None
    return Whole(
        image=image,
        text=text,
        image_projection=getattr(model, "visual_projection", nn.Identity()),
        text_projection=getattr(model, "text_projection", nn.Identity()),
        scale=math.exp(model.logit_scale.item()) if trained else None,
        bias=model.logit_bias.item() if trained and hasattr(model, "logit_bias") else None,
        settings={"config": _plain(model.config), "mean": image.settings["mean"], "std": image.settings["std"]},
    )
