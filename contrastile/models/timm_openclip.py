"""Towers of timm and open_clip by name or configuration, with random weights or those of a local file.

A name stands for shapes that the library ships; nothing is downloaded. A folder of open_clip has the files of its hub:
a configuration, with the normalisation of pixels, and weights. Both libraries need torchvision, and open_clip needs
timm too. Only tensors are unpickled. Tested versions are in docs/models.md.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile._errors import invalid
from contrastile.models import base
from contrastile.models.remote_code import read_open_clip
from contrastile.models.text import CLIP_ENDS, Tokenizer, WordTokenizer, bpe_as_clip

# keys under which training scripts store the weights, and prefixes of wrappers
ENVELOPES = ("state_dict", "model")
WRAPPERS = ("module.", "_orig_mod.")
# the weights of a model's file that belong to neither side
SCALES = ("logit_scale", "logit_bias")
# keys of models that are not an image tower with a text tower
OTHERS = ("multimodal_cfg", "audio_cfg", "genlip_cfg", "genlap_cfg")
CONTEXT, IMAGE_SIZE = 77, 224
# files of weights in a folder of open_clip; the first that exists is read
WEIGHTS_FILES = ("open_clip_model.safetensors", "model.safetensors", "open_clip_pytorch_model.bin")


def read_weights(checkpoint: str | Path) -> dict[str, Tensor]:
    """The tensors of a file by name, without prefixes of wrappers; raises ValueError for a file of anything else."""
    path = Path(checkpoint)
    if not path.is_file():
        remedy = "Weights are read from this machine and from nowhere else."
        raise invalid("checkpoint", "be a file", f'"{path}"', remedy)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        # torch's message about a pickle explains how to allow it
        pickled = reason.startswith("Weights only load failed")
        remedy = "Anything else is not unpickled." if pickled else f"It cannot be read: {reason}"
        raise invalid("checkpoint", "be safetensors, or tensors that torch.save wrote", f'"{path}"', remedy) from error
    for envelope in ENVELOPES:
        if isinstance(content, dict) and isinstance(content.get(envelope), dict):
            content = content[envelope]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise invalid("checkpoint", "hold tensors by name", f'"{path}"', "Save the model's state_dict alone.")
    # several wrappers may be around the model
    while any(name.startswith(WRAPPERS) for name in content):
        content = {name.partition(".")[2] if name.startswith(WRAPPERS) else name: x for name, x in content.items()}
    return content


def load_weights_into(module: nn.Module, weights: dict[str, Tensor], checkpoint: str | Path) -> None:
    """Load exactly the module's weights; raises ValueError with the names that are missing, extra or of other shape."""
    expected = module.state_dict()
    shared = expected.keys() & weights.keys()
    text = base.differences(
        lacking=expected.keys() - weights.keys(),
        besides=weights.keys() - expected.keys(),
        reshaped={name for name in shared if expected[name].shape != weights[name].shape},
    )
    if text:
        remedy = "Name the model that it is of, and the size of its images."
        raise invalid("checkpoint", "hold the weights of this model", f'"{checkpoint}": {text}', remedy)
    module.load_state_dict(weights)


def timm_tower(
    name: str, checkpoint: str | None = None, config: base.Settings | None = None, mean: list[float] | None = None,
    std: list[float] | None = None, *, image_size: int, channels: int,
) -> base.Tower:  # fmt: skip
    """A model of timm without its classifier; `config` holds further arguments of timm.create_model.

    With random weights, a model of fixed image size is built for the recipe's images; with a checkpoint, it keeps its
    own size and three channels. `mean` and `std` normalise the pixels, by default the model's own.
    """
    config = dict(config or {})
    # timm would unpickle or download the weights that these name
    if refused := [key for key in config if key.startswith(("checkpoint", "pretrained", "cache_dir"))]:
        raise invalid("config", "leave weights to checkpoint", ", ".join(refused), "Name a file of tensors there.")

    import timm

    bare = name.partition(".")[0]
    if not timm.is_model(bare):
        raise invalid("name", "be a model of timm", f'"{name}"', "timm.list_models() names them; none is fetched.")
    known = timm.models.get_pretrained_cfg(bare)
    config.setdefault("in_chans", channels if checkpoint is None else 3)
    if known is not None and known.fixed_input_size and "img_size" not in config:
        config["img_size"] = image_size if checkpoint is None else known.input_size[-1]
    base.check_image_input(image_size, channels, size=config.get("img_size"), colours=config["in_chans"])
    model = timm.create_model(name, pretrained=False, num_classes=0, **config)
    if checkpoint is not None:
        names = model.pretrained_cfg.get("classifier") or ()
        classifier = tuple(f"{layer}." for layer in ((names,) if isinstance(names, str) else names))
        weights = {key: value for key, value in read_weights(checkpoint).items() if not key.startswith(classifier)}
        load_weights_into(model, weights, checkpoint)
    pixels = timm.data.resolve_model_data_config(model)
    mean, std = list(mean or pixels["mean"]), list(std or pixels["std"])
    tower = base.PixelTower(model, config["in_chans"], mean, std)
    features = base.feature_size(tower, torch.zeros(1, channels, image_size, image_size))
    return base.Tower(tower, features, {"name": name, "config": config, "mean": mean, "std": std})


@dataclass(frozen=True)
class OpenClip:
    """A model's `name` in open_clip or its `config`, with a `checkpoint` of weights; or a `folder` of all three."""

    name: str | None = None
    config: dict[str, Any] | None = None
    checkpoint: str | None = None
    mean: list[float] | None = None
    std: list[float] | None = None
    folder: str | None = None

    @cached_property
    def _described(self) -> dict[str, Any]:
        return {} if self.folder is None else read_open_clip(self.folder)

    @property
    def _weights(self) -> str | Path | None:
        if self.folder is None:
            return self.checkpoint
        for name in WEIGHTS_FILES:
            if (path := Path(self.folder, name)).is_file():
                return path
        rule, remedy = f"hold one of {', '.join(WEIGHTS_FILES)}", "Save the model there with its weights."
        raise invalid("folder", rule, f'"{self.folder}"', remedy)

    @cached_property
    def shapes(self) -> dict[str, Any]:
        import open_clip

        config = self.config if self.name is None else open_clip.get_model_config(self.name)
        config = self._described.get("model_cfg", config)
        if config is None or ":" in (self.name or ""):
            remedy = "open_clip.list_models() names them; none is fetched."
            raise invalid("name", "be a model of open_clip", f'"{self.name}"', remedy)
        required = ("embed_dim", "vision_cfg", "text_cfg")
        if wrong := [key for key in OTHERS if key in config] or [key for key in required if key not in config]:
            remedy = "It needs embed_dim, vision_cfg and text_cfg."
            raise invalid("config", "be a model of one image tower and one text tower", ", ".join(wrong), remedy)
        if ":" in (timm_name := config["vision_cfg"].get("timm_model_name", "")):
            remedy = "timm.list_models() names them; none is fetched."
            raise invalid("timm_model_name", "be a model of timm", f'"{timm_name}"', remedy)
        if "hf_model_name" in config["text_cfg"]:
            # open_clip downloads such a text tower
            remedy = 'Give the image side alone and a text tower of kind "transformers".'
            raise invalid("text_cfg", "be a text tower of open_clip's own", "hf_model_name", remedy)
        return {key: value for key, value in config.items() if key != "custom_text"}

    @cached_property
    def model(self) -> Any:
        import open_clip

        vision = dict(self.shapes["vision_cfg"])
        if "timm_model_name" in vision:
            vision["timm_model_pretrained"] = False
        try:
            model = open_clip.CustomTextCLIP(**{**self.shapes, "vision_cfg": vision})
        except TypeError as error:
            raise invalid("config", "describe a model of open_clip", sorted(self.shapes), f"{error}.") from error
        if self._weights is not None:
            # the old layout has the parts of the module `text` at the top level
            current = ("visual.", "text.", *SCALES)
            weights = {
                name if name.startswith(current) else f"text.{name}": value
                for name, value in read_weights(self._weights).items()
            }
            for name in SCALES:
                # some versions write shape [], others [1]
                if name in weights and getattr(model, name, None) is not None:
                    weights[name] = weights[name].reshape(getattr(model, name).shape)
            load_weights_into(model, weights, self._weights)
        return model

    def image(self, *, image_size: int, channels: int) -> base.Tower:
        import open_clip

        base.check_image_input(image_size, channels, size=self.shapes["vision_cfg"].get("image_size", IMAGE_SIZE))
        pixels = self._described.get("preprocess_cfg", {})
        mean = list(self.mean or pixels.get("mean") or open_clip.OPENAI_DATASET_MEAN)
        std = list(self.std or pixels.get("std") or open_clip.OPENAI_DATASET_STD)
        tower = base.PixelTower(self.model.visual, 3, mean, std)
        features = base.feature_size(tower, torch.zeros(1, channels, image_size, image_size))
        return base.Tower(tower, features, {"config": self.shapes, "mean": mean, "std": std})

    def text(self, *, tokenizer: Tokenizer) -> base.Tower:
        vocabulary = self.shapes["text_cfg"].get("vocab_size", len(_clip_words()[0]))
        context = self.shapes["text_cfg"].get("context_length", CONTEXT)
        base.check_text_input(tokenizer, vocabulary=vocabulary, longest=context)
        tower = OpenClipText(self.model.text, context, tokenizer.pad)
        trial = torch.full((1, 1), tokenizer.pad)
        return base.Tower(tower, base.feature_size(tower, trial, torch.ones_like(trial)), {"config": self.shapes})

    def pair(self, *, image_size: int, channels: int, tokenizer: Tokenizer) -> base.TowerPair:
        image = self.image(image_size=image_size, channels=channels)
        pair = base.TowerPair(image, self.text(tokenizer=tokenizer), nn.Identity(), nn.Identity(), image.settings)
        return pair if self._weights is None else pair.with_scale_of(self.model)


class OpenClipText(nn.Module):
    """A text side. It takes no mask and was trained on padded texts, so every text is padded to `context` tokens."""

    def __init__(self, model: nn.Module, context: int, pad: int) -> None:
        super().__init__()
        self.model, self.context, self.pad = model, context, pad

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        del attention_mask
        return self.model(F.pad(input_ids, (0, self.context - input_ids.shape[1]), value=self.pad))


def clip_tokenizer(length: int = CONTEXT) -> WordTokenizer:
    """CLIP's tokenizer, from open_clip's vocabulary: equal to its `SimpleTokenizer` but for the repairs of ftfy."""
    return WordTokenizer(bpe_as_clip(*_clip_words()), length=length)


def _clip_words() -> tuple[dict[str, int], list[tuple[str, str]]]:
    import open_clip

    engine = open_clip.SimpleTokenizer()
    if absent := [end for end in CLIP_ENDS if end not in engine.encoder]:
        remedy = "Another version of open_clip has them."
        raise invalid("open_clip", f"have the tokens {', '.join(CLIP_ENDS)}", ", ".join(absent), remedy)
    return dict(engine.encoder), sorted(engine.bpe_ranks, key=engine.bpe_ranks.__getitem__)
