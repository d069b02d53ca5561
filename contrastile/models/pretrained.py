"""Towers of the library transformers: any vision or text model, from a configuration or a local folder.

Nothing is downloaded: a configuration gives random weights, a folder its own. A CLIP or SigLIP is split into its two
towers and their projections, so that it trains like any other pair.
"""

import difflib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile._errors import invalid, logger
from contrastile.models import base
from contrastile.models.remote_code import RULE, read_table, refuse_remote_code, remote_code
from contrastile.models.text import Tokenizer

# the text that finds the position of a tower's pooling
TRIAL_TEXT = "a small red fox in the snow"
# weights are float32, because half precisions lose small updates; `train.precision` sets the precision of products
DTYPE = torch.float32
# code in a folder is not run, nor is the user asked to allow it
LOCAL_ONLY = {"local_files_only": True, "trust_remote_code": False}
# nothing is unpickled; weights that differ from the model's are reported
LOAD_OPTIONS: dict[str, Any] = {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
# names of poolings in folders of sentence-transformers, and those of older versions
SENTENCE_POOLINGS: dict[str, tuple[Any, ...]] = {
    "mean": ("mean", ["pooling_mode_mean_tokens"]),
    "cls": ("cls", ["pooling_mode_cls_token"]),
    "last": ("lasttoken", ["pooling_mode_lasttoken"]),
}
# the module that only the pooling "pooler" uses; models saved without their task's head may lack it
POOLER = "pooler"


@dataclass(frozen=True)
class Library:
    """The origin of a model, a local `folder` or a `config` with its `model_type`, and the pooling of its outputs.

    `pooling`, one of `POOLINGS`: "mean" over all positions but padding, "cls" the first position, "last" the last one
    but padding, "pooler" the model's own. `mean` and `std` normalise the pixels; by default they are the folder's own.
    """

    folder: str | None = None
    config: dict[str, Any] | None = None
    pooling: str = "mean"
    mean: list[float] | None = None
    std: list[float] | None = None

    def __post_init__(self) -> None:
        # the recipe has checked the form, and that exactly one of folder and config is given
        if (entry := remote_code(self.config)) is not None:
            raise invalid("config", RULE, entry, "Leave it out.")
        if self.folder is not None:
            refuse_remote_code(self.folder)
            _check_files(Path(self.folder))

    def build(self, **defaults: Any) -> nn.Module:
        """The model; `defaults` complete a configuration, and are ignored for a folder."""
        from transformers import AutoModel

        if self.folder is not None:
            return _load(self.folder, self.pooling)
        config = self.described(**defaults)
        with _config_errors(config.model_type):
            return AutoModel.from_config(config, dtype=DTYPE)

    def described(self, **defaults: Any) -> Any:
        """The complete configuration of the model; raises ValueError where the library has none."""
        from transformers import AutoConfig

        if self.folder is not None:
            with _folder_errors(self.folder):
                return AutoConfig.from_pretrained(self.folder, **LOCAL_ONLY)
        entries = {**defaults, **(self.config or {})}
        kind = entries.pop("model_type")
        with _config_errors(kind):
            config = AutoConfig.for_model(kind, **entries)
        # defaults may be unknown to the model; the library wrote a configuration with a version, in a folder or a run,
        # and may have added keys that other classes read
        if "transformers_version" not in entries:
            _refuse_unknown_keys({key: value for key, value in entries.items() if key not in defaults}, config)
            # the key in this version of transformers, and in older ones
            for name in ("dtype", "torch_dtype"):
                if (got := entries.get(name)) is not None and str(got).removeprefix("torch.") != "float32":
                    remedy = "Leave it out, and set train.precision."
                    raise invalid("config", "have weights of float32", f'{name} = "{got}"', remedy)
        return config

    def normalisation(self) -> tuple[list[float], list[float]]:
        table: dict[str, Any] = {}
        if self.folder is not None and (path := Path(self.folder) / "preprocessor_config.json").is_file():
            table = read_table(path)
        return self.mean or table.get("image_mean") or [0.5], self.std or table.get("image_std") or [0.5]


def _check_files(folder: Path) -> None:
    """Raise ValueError for a folder without safetensors, or with an adapter, whose model may not be local."""
    remedy = "Save the whole model there with save_pretrained."
    if (folder / "adapter_config.json").exists():
        raise invalid("folder", "hold a model without an adapter", f'"{folder / "adapter_config.json"}"', remedy)
    if next(folder.glob("*.safetensors"), None) is None:
        others = ", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "none"
        raise invalid("folder", "hold the model's weights as safetensors", f'{others} in "{folder}"', remedy)
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        weight_map = read_table(index).get("weight_map")
        named = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else {"no weight_map"}
        absent = sorted(name for name in named if Path(name).suffix != ".safetensors" or not (folder / name).is_file())
        if absent:
            rule = f"hold the safetensors that {index.name} names"
            raise invalid("folder", rule, f'{", ".join(absent[:3])} in "{folder}"', remedy)


def _load(folder: str, pooling: str) -> nn.Module:
    """The model of a folder; ValueError for weights that are missing, except a pooler that `pooling` does not use."""
    from transformers import AutoModel
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    # hide the library's table of weights that differ; the error below names them
    transformers_logging.set_verbosity_error()
    try:
        with _folder_errors(folder):
            model, report = AutoModel.from_pretrained(folder, **LOCAL_ONLY, **LOAD_OPTIONS, dtype=DTYPE)
    finally:
        transformers_logging.set_verbosity(verbosity)
    unused = {name for name in report["missing_keys"] if pooling != POOLER and name.startswith(f"{POOLER}.")}
    missing = report["missing_keys"] - unused
    if text := base.differences(lacking=missing, reshaped={name for name, *_ in report["mismatched_keys"]}):
        remedy = f"Save the whole model there; it may lack a {POOLER} where another pooling is taken."
        raise invalid("folder", "hold the weights of its model", f'"{folder}": {text}', remedy)
    if text := base.differences(lacking=unused, besides=report["unexpected_keys"]):
        logger.warning('the weights in "%s" fit but for what is not used: %s', folder, text)
    with _folder_errors(folder):
        _compare_modules(Path(folder), pooling)
    return model


def _compare_modules(folder: Path, pooling: str) -> None:
    """Warn where a folder of sentence-transformers has another pooling, or a module such as Dense that is left out."""
    modules = folder / "modules.json"
    for module in json.loads(modules.read_text(encoding="utf-8")) if modules.is_file() else ():
        kind = module["type"].rpartition(".")[2]
        if kind == "Pooling":
            words = read_table(folder / module["path"] / "config.json")
            modes = words.get("pooling_mode")
            # older folders have a truth value for each mode
            modes = modes or [name for name, value in words.items() if name.startswith(f"{kind.lower()}_") and value]
            if modes not in SENTENCE_POOLINGS.get(pooling, ()):
                logger.warning('"%s" pools by %s, and the tower by %s: set its pooling', folder, modes, pooling)
        elif kind not in ("Transformer", "Normalize"):
            logger.warning('the module %s in "%s" is left out: %s', kind, folder, module["path"])


@contextmanager
def _folder_errors(folder: str) -> Iterator[None]:
    """Turn errors of the library about a folder into one line in our form, except those of memory."""
    try:
        yield
    # the library raises errors of many types, safetensors a bare Exception
    except Exception as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise
        got = f'"{folder}" ({type(error).__name__}: {" ".join(str(error).split())})'
        remedy = "Save the model there again with save_pretrained."
        raise invalid("folder", "hold a model that transformers can load", got, remedy) from error


@contextmanager
def _config_errors(kind: str) -> Iterator[None]:
    """Turn errors of the library about a configuration into our form, the first two lines of each."""
    try:
        yield
    except Exception as error:
        remedy = " ".join(str(error).split("\n")[:2]) or type(error).__name__
        raise invalid("config", "describe a model of transformers", kind, remedy) from error


def _refuse_unknown_keys(entries: Mapping[str, Any], config: Any, path: str = "config") -> None:
    """Raise ValueError for keys that the model does not read; the library accepts any."""
    known = type(config)()
    for key, value in entries.items():
        # the library renames older keys, so that the configuration no longer has them
        if hasattr(config, key) and not any(hasattr(known, name) for name in (key, f"_{key}")):
            near = difflib.get_close_matches(key, known.to_dict(), n=1)
            remedy = f"Did you mean {near[0]}?" if near else "Leave it out."
            raise invalid(path, f"have keys that a {config.model_type} reads", key, remedy)
        if isinstance(value, Mapping) and key in getattr(config, "sub_configs", {}):
            _refuse_unknown_keys(value, getattr(config, key), f"{path}.{key}")


# a model of patches, or with added tokens, has more or fewer positions than the mask, and no padding
def _mean(output: Any, mask: Tensor | None) -> Tensor:
    states = output.last_hidden_state
    if states.ndim == 4:
        return states.mean(dim=(2, 3))
    if mask is None or mask.shape[1] != states.shape[1]:
        return states.mean(dim=1)
    weight = mask[..., None].to(states.dtype)
    return (states * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1)


def _last(output: Any, mask: Tensor | None) -> Tensor:
    states = output.last_hidden_state
    if mask is None or mask.shape[1] != states.shape[1]:
        return states[:, -1]
    last = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(dim=1)
    return states[torch.arange(len(states), device=states.device), last]


def _pooler(output: Any, _: Tensor | None) -> Tensor:
    pooled = getattr(output, "pooler_output", None)
    if pooled is None:
        raise invalid("pooling", "be one that the model has", "pooler", 'This model has none: take "mean" or "cls".')
    return pooled.flatten(1)


POOLINGS: dict[str, Callable[[Any, Tensor | None], Tensor]] = {
    "mean": _mean,
    "cls": lambda output, _: output.last_hidden_state[:, 0],
    "last": _last,
    "pooler": _pooler,
}


class ImageTower(base.PixelTower):
    def __init__(self, model: nn.Module, pooling: str, mean: list[float], std: list[float]) -> None:
        channels: Any = model.config.num_channels  # type: ignore[union-attr]
        super().__init__(model, channels, mean, std)
        self.pooling = pooling

    def _features(self, pixels: Tensor) -> Tensor:
        return POOLINGS[self.pooling](self.model(pixel_values=pixels), None)


class TextTower(nn.Module):
    """A text model with pooling. Texts shorter than `length` are padded with `pad`."""

    def __init__(self, model: nn.Module, pooling: str, *, length: int = 0, pad: int = 0) -> None:
        super().__init__()
        self.model = model
        self.pooling = pooling
        self.length, self.pad = length, pad
        # a decoder would cache the keys and values of each layer, to continue the text
        decodes = "use_cache" in inspect.signature(model.forward).parameters
        self.options = {"use_cache": False} if decodes else {}

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return POOLINGS[self.pooling](*self._output(input_ids, attention_mask))

    def states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """`[B, L]` twice to the last layer's state of each token, `[B, L, width]`."""
        return self._output(input_ids, attention_mask)[0].last_hidden_state[:, : input_ids.shape[1]]

    def _output(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Any, Tensor]:
        """The model's output, and the mask of the tokens with padding."""
        padding = (0, max(self.length - input_ids.shape[1], 0))
        input_ids, attention_mask = F.pad(input_ids, padding, value=self.pad), F.pad(attention_mask, padding)
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **self.options), attention_mask


def _plain(config: Any) -> dict[str, Any]:
    return json.loads(config.to_json_string(use_diff=True))


def image_tower(library: Library, *, image_size: int, channels: int, model: nn.Module | None = None) -> base.Tower:
    model = model or library.build(image_size=image_size, num_channels=channels)
    config: Any = model.config
    base.check_image_input(image_size, channels, size=getattr(config, "image_size", None), colours=config.num_channels)
    mean, std = library.normalisation()
    tower = ImageTower(model, library.pooling, mean, std)
    try:
        features = base.feature_size(tower, torch.zeros(1, channels, image_size, image_size))
    # a text model raises an error of its own for images
    except (ValueError, TypeError) as error:
        if str(error).startswith("`"):
            raise
        got = f"{type(model).__name__} ({' '.join(str(error).split())})"
        raise invalid("image", "be a model of images", got, "Name another model_type or folder.") from error
    return base.Tower(tower, features, {"config": _plain(config), "pooling": library.pooling, "mean": mean, "std": std})


def text_tower(library: Library, *, tokenizer: Tokenizer, model: nn.Module | None = None) -> base.Tower:
    model = model or library.build(vocab_size=tokenizer.vocabulary_size, pad_token_id=tokenizer.pad)
    config: Any = model.config
    base.check_text_input(tokenizer, vocabulary=config.vocab_size, longest=_longest(model))
    pooling = _pooling_of(model, tokenizer) if library.pooling == "pooler" else library.pooling
    tower = TextTower(model, pooling)
    if shapes := any(x.is_meta for x in tower.parameters()):
        # XLNet makes a parameter on the CPU by itself
        tower.to("meta")
    # features of meta weights have no values to compare
    if not shapes and _sees_padding(tower, tokenizer):
        tower = TextTower(model, pooling, length=tokenizer.length, pad=tokenizer.pad)
    trial = torch.full((1, min(4, tokenizer.length)), tokenizer.pad)
    features = base.feature_size(tower, trial, torch.ones_like(trial))
    return base.Tower(tower, features, {"config": _plain(config), "pooling": pooling})


def _longest(model: nn.Module) -> int | None:
    """The most tokens of a text. RoBERTa and models like it number positions from that of their padding + 1."""
    longest = getattr(model.config, "max_position_embeddings", None)
    # XLNet, without such a limit, has -1
    if longest is None or longest < 0:
        return None
    paddings = (
        getattr(module, "padding_idx", None)
        for name, module in model.named_modules()
        if name.endswith("position_embeddings")
    )
    return int(longest) - max((padding + 1 for padding in paddings if padding is not None), default=0)


@torch.no_grad()
def _pooling_of(model: nn.Module, tokenizer: Tokenizer) -> str:
    """Choose "pooler", or "last" for a causal model whose pooler takes another position than the last token's.

    CLIP's pooler takes the position of the end token. With a tokenizer that writes no end token it mostly takes the
    first position, whose state depends on no other token: all texts with the same first word would be equal.
    """
    if next(model.parameters()).is_meta:
        return "pooler"
    text = tokenizer.tokenise([TRIAL_TEXT])
    ids, mask = text["input_ids"], text["attention_mask"]
    if mask.sum() < 2:
        return "pooler"
    # the same text with another second token: a high one, because some poolers look for the highest number, but no end
    other = ids.clone()
    ends = torch.tensor(getattr(model.config, "eos_token_id", None) or []).flatten().tolist()
    other[0, 1] = next(token for token in range(tokenizer.vocabulary_size - 2, -1, -1) if token not in ends)
    with base.evaluating(model):
        outputs = [model(input_ids=tokens, attention_mask=mask) for tokens in (ids, other)]
    states = [output.last_hidden_state for output in outputs]
    pooled, last = ([pool(output, mask) for output in outputs] for pool in (_pooler, _last))
    causal = torch.equal(states[0][:, 0], states[1][:, 0])
    is_state = pooled[0].shape == last[0].shape and bool((states[0] == pooled[0][:, None]).all(dim=2).any())
    return "last" if causal and is_state and not all(map(torch.equal, pooled, last)) else "pooler"


@torch.no_grad()
def _sees_padding(tower: TextTower, tokenizer: Tokenizer) -> bool:
    """True where features depend on the amount of padding, as in SigLIP, which pools the last position."""
    text = tokenizer.tokenise(["a"])
    trimmed = {name: ids[:, : int(text["attention_mask"].sum())] for name, ids in text.items()}
    with base.evaluating(tower):
        padded, short = tower(**text), tower(**trimmed)
    return bool((padded - short).norm() > 1e-2 * padded.norm())


def whole_model(library: Library, *, image_size: int, channels: int, tokenizer: Tokenizer) -> base.TowerPair:
    model: Any = library.build()
    remedy = "Take a CLIP or a SigLIP, or give the two sides a tower each."
    if not (hasattr(model, "vision_model") and hasattr(model, "text_model")):
        raise invalid("both", "be a model with vision_model and text_model", type(model).__name__, remedy)
    pooled = replace(library, pooling="pooler")
    try:
        image = image_tower(pooled, image_size=image_size, channels=channels, model=model.vision_model)
        text = text_tower(pooled, tokenizer=tokenizer, model=model.text_model)
    except ValueError as error:
        # a recipe has no pooling of `both`
        if not str(error).startswith("`pooling`"):
            raise
        raise invalid("both", "be a model whose sides have poolers", type(model).__name__, remedy) from error
    visual, textual = (getattr(model, f"{name}_projection", nn.Identity()) for name in ("visual", "text"))
    settings = {"config": _plain(model.config), "mean": image.settings["mean"], "std": image.settings["std"]}
    pair = base.TowerPair(image, text, visual, textual, settings)
    return pair if library.folder is None else pair.with_scale_of(model)
