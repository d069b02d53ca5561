"""The common form of a tower, its layers that are frozen, checkpointed or compiled, and checks that a recipe fits it.

The files that build towers import this one. `model.locked` and `model.unlocked` of a recipe freeze weights (LiT, Zhai
et al. 2022); `model.checkpointing` computes activations again in the backward. `train.compile` compiles repeated layers
in place: all layers of a kind share one graph, so a tower of 24 is compiled as quickly as one of 12. Weights keep their
names, and hooks, wrappers and checkpoints of activations around a layer stay as they are.
"""

import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain, dropwhile
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile._errors import invalid
from contrastile._torch import compile_graphs, replace_calls, uncompile
from contrastile.models.text import Tokenizer

Settings = Mapping[str, Any]
# the most channels of pixels: red, green, blue, and a mask
COLOURS = 4


@dataclass(frozen=True)
class Tower:
    """A tower, the size of its features, and settings that rebuild its shapes without any folder."""

    module: nn.Module
    features: int
    settings: dict[str, Any]


@dataclass(frozen=True)
class TowerPair:
    """Two towers with their projections; `scale` and `bias` are those of loaded weights, None for random ones."""

    image: Tower
    text: Tower
    image_projection: nn.Module
    text_projection: nn.Module
    settings: dict[str, Any]
    scale: float | None = None
    bias: float | None = None

    def with_scale_of(self, model: Any) -> Self:
        bias = getattr(model, "logit_bias", None)
        return replace(self, scale=math.exp(model.logit_scale.item()), bias=None if bias is None else bias.item())


class PixelTower(nn.Module):
    """An image model with normalisation: takes pixels in [0, 1], grey ones also where the model has colours."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, channels: int, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.model = model
        self.channels = channels
        for name, values in (("mean", mean), ("std", std)):
            # a model of one channel is normalised with the mean over the given channels
            values = values if len(values) == channels else [sum(values) / len(values)]
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        if pixels.shape[1] == 1:
            pixels = pixels.expand(-1, self.channels, -1, -1)
        return self._features((pixels - self.mean) / self.std)

    def _features(self, pixels: Tensor) -> Tensor:
        return self.model(pixels)


class ProjectedTower(nn.Module):
    def __init__(self, tower: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.tower, self.projection = tower, projection

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.projection(self.tower(*inputs))


# builds a tower from its own settings, those of the whole model, and the tokenizer
TowerBuilder = Callable[[dict[str, Any], Settings, Tokenizer], Tower]


def build_tower(side: str, kinds: Mapping[str, TowerBuilder], settings: Settings, tokenizer: Tokenizer) -> Tower:
    """The tower that `settings[side]` describes, its `kind` one of `kinds`; raises ValueError for other settings."""
    own = dict(settings[side])
    kind = own.pop("kind", None)
    if kind not in kinds:
        raise invalid(f"{side}.kind", f"be one of {', '.join(kinds)}", kind, "See the recipes for examples.")
    try:
        tower = kinds[kind](own, settings, tokenizer)
    except TypeError as error:
        raise invalid(side, f"have the settings of a tower of the kind {kind}", own, f"{error}.") from error
    return Tower(tower.module, tower.features, {"kind": kind, **tower.settings})


def completed(settings: Settings, defaults: Settings) -> dict[str, Any]:
    if unknown := sorted(set(settings) - set(defaults)):
        raise invalid("settings", f"have keys among {', '.join(defaults)}", ", ".join(unknown), "Leave the others out.")
    return {**defaults, **settings}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside the context, the previous mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def feature_size(tower: nn.Module, *inputs: Tensor) -> int:
    """The size of a tower's features, found by running it in eval mode: statistics and random state do not change."""
    with evaluating(tower), torch.no_grad():
        return int(tower(*inputs).shape[1])


def towers_of(model: nn.Module) -> list[nn.Module]:
    """The towers of a model of either kind: its modules, or the members of a ModuleDict of them."""
    children = [child.values() if isinstance(child, nn.ModuleDict) else [child] for child in model.children()]
    return [*chain.from_iterable(children)]


def repeated_modules(tower: nn.Module) -> list[nn.Module]:
    """Modules with children, in a list with others of their type, such as attention blocks; outer ones first."""
    repeated: list[nn.Module] = []
    for row in tower.modules():
        if isinstance(row, (nn.ModuleList, nn.Sequential)):
            types = Counter(map(type, row))
            repeated += [module for module in row if types[type(module)] > 1 and [*module.children()]]
    return repeated


def freeze(tower: nn.Module, side: str, unlocked: int = 0) -> None:
    """Freeze the tower's weights, except its last `unlocked` layers and all modules behind them.

    Raises ValueError where it has fewer layers.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> tower = nn.Sequential(nn.Linear(3, 4), nn.ModuleList([block(), block()]), nn.LayerNorm(4))
    >>> freeze(tower, "image", unlocked=1)
    >>> [name for name, weight in tower.named_parameters() if weight.requires_grad]
    ['1.1.0.weight', '1.1.0.bias', '2.weight', '2.bias']
    """
    layers = layers_of(tower)
    if unlocked > len(layers):
        remedy = "Leave the side out of model.locked to train all of it."
        raise invalid(f"model.unlocked.{side}", f"be at most the {len(layers)} layers of the tower", unlocked, remedy)
    tower.requires_grad_(False)
    if unlocked:
        first = layers[-unlocked]
        # modules are listed in order of construction, which is the order of use except for embeddings
        for module in dropwhile(lambda module: module is not first, tower.modules()):
            if not isinstance(module, nn.Embedding):
                for weight in module.parameters(recurse=False):
                    weight.requires_grad_()


def layers_of(tower: nn.Module) -> list[nn.Module]:
    """The innermost repeated blocks in order, such as attention or convolution blocks; a stage of blocks is none."""
    blocks = set(repeated_modules(tower))
    stages = {block for block in blocks if any(inner in blocks for inner in block.modules() if inner is not block)}
    return [module for module in tower.modules() if module in blocks - stages]


def eval_frozen(module: nn.Module) -> None:
    """Set every module whose weights are all frozen to eval mode: no dropout, no batch statistics."""
    weights = list(module.parameters())
    if weights and not any(weight.requires_grad for weight in weights):
        module.eval()
        return
    for child in module.children():
        eval_frozen(child)


def checkpoint_activations(tower: nn.Module, side: str) -> None:
    """Recompute the activations of a tower's layers in its backward, by the switch of its library."""
    switched = False
    module: Any
    for module in tower.modules():
        if getattr(module, "supports_gradient_checkpointing", False):
            # older versions of transformers have the second name
            switches = "activation_checkpointing_enable", "gradient_checkpointing_enable"
            name = next(name for name in switches if hasattr(module, name))
            # the reentrant variant returns no gradients where no input requires one
            getattr(module, name)({"use_reentrant": False})
            switched = True
        elif callable(getattr(module, "set_grad_checkpointing", None)):
            module.set_grad_checkpointing(True)
            switched = True
    if not switched:
        kind = type(getattr(tower, "tower", tower)).__name__
        remedy = "Leave it out: the gradient cache keeps one sub-batch of activations anyway."
        raise invalid("model.checkpointing", "name towers that have it", f"{side}, a {kind}", remedy)


def compile_tower(tower: nn.Module) -> None:
    """Compile the tower's repeated layers, or the whole tower if it has none; for training, not for evaluation."""
    for module in compiled_parts(tower):
        compile_graphs(module)
    for module in _patch_embeddings(tower):
        replace_calls(module, partial(_as_product, module))


def uncompile_tower(tower: nn.Module) -> None:
    for module in (*compiled_parts(tower), *_patch_embeddings(tower)):
        uncompile(module)


def compiled_parts(tower: nn.Module) -> list[nn.Module]:
    """The modules of a tower that are compiled one by one."""
    # torch.compile skips modules of torch itself, unless another one is around them
    return [layer for layer in layers_of(tower) if not type(layer).__module__.startswith("torch.nn.")] or [tower]


def _patch_embeddings(tower: nn.Module) -> list[nn.Conv2d]:
    """Convolutions of pixels that cut them into patches which do not overlap."""
    plain = {"padding": (0, 0), "dilation": (1, 1), "groups": 1}
    return [
        module
        for module in tower.modules()
        if type(module) is nn.Conv2d
        and module.kernel_size == module.stride
        and module.in_channels <= COLOURS
        and all(getattr(module, name) == value for name, value in plain.items())
    ]


def _as_product(conv: nn.Conv2d, pixels: Tensor) -> Tensor:
    """A convolution of patches `[B, C, H, W]` to `[B, D, h, w]` as one product: cuDNN takes many times as long.

    >>> conv = nn.Conv2d(3, 8, kernel_size=4, stride=4)
    >>> pixels = torch.randn(2, 3, 9, 8)
    >>> torch.allclose(_as_product(conv, pixels), conv(pixels), atol=1e-6)
    True
    """
    p, q = conv.kernel_size
    h, w = pixels.shape[-2] // p, pixels.shape[-1] // q
    patches = pixels[..., : h * p, : w * q].unflatten(-1, (w, q)).unflatten(-3, (h, p))
    patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)
    return F.linear(patches, conv.weight.flatten(1), conv.bias).permute(0, 3, 1, 2)


def no_compiler(device: torch.device) -> str | None:
    """Return the reason why `compile = "auto"` compiles no towers for this device; None if it may."""
    if device.type != "cuda":
        return "they run on a CPU"
    if find_spec("triton") is None:
        return "triton is not installed"
    if not any(shutil.which(name) for name in (os.environ.get("CC"), "gcc", "clang", "cc") if name):
        return "there is no C compiler"
    return None


def check_image_input(
    image_size: int, channels: int, *, size: int | Sequence[int] | None, colours: int | None = None
) -> None:
    """Raise ValueError where an image tower takes images of another `size`, or another number of `colours`."""
    if size is not None and size not in (image_size, [image_size, image_size], (image_size, image_size)):
        rule = f"be the {size} pixels of the image tower"
        raise invalid("image_size", rule, image_size, "Set data.image_size to it.")
    if colours is not None and channels not in (1, colours):
        raise invalid("channels", f"be the {colours} of the image tower", channels, "Set data.channels to it, or to 1.")


def check_text_input(tokenizer: Tokenizer, *, vocabulary: int, longest: int | None) -> None:
    """Raise ValueError where a tokenizer has more tokens, or longer texts, than a text tower takes."""
    if tokenizer.vocabulary_size > vocabulary:
        remedy = "Use the tokenizer that the model was made with."
        got = f"{tokenizer.vocabulary_size} for a text tower of {vocabulary}"
        raise invalid("tokenizer", "have no more tokens than the text tower", got, remedy)
    if longest is not None and tokenizer.length > longest:
        remedy = "Set model.tokenizer.length to it."
        raise invalid("length", f"be at most the {longest} tokens of the text tower", tokenizer.length, remedy)


def differences(*, lacking: Set[str], besides: Set[str] = frozenset(), reshaped: Set[str] = frozenset()) -> str:
    """A description of weights that differ from a model's, the first three names of each kind; empty for none.

    >>> differences(lacking={"bias", "gain"}, besides={"head"})
    'it lacks bias, gain; it has besides head'
    """
    kinds = {"lacks": lacking, "has besides": besides, "has of another shape": reshaped}
    return "; ".join(
        f"it {kind} {', '.join(sorted(names)[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for kind, names in kinds.items()
        if names
    )
