"""Compilation of towers by torch.compile: of their repeated layers, in place.

All layers of a kind share one compiled graph, so a tower of 24 layers is compiled as quickly as one of 12. Weights keep
their names, and hooks, wrappers and checkpoints of activations around a layer stay as they are.
"""

import os
import shutil
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile._torch import compile_graphs, replace_calls, uncompile
from contrastile.models.base import layers_of

# the most channels of pixels: red, green, blue, and a mask
COLOURS = 4


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
