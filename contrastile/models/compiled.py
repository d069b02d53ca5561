"""Towers through torch.compile: their repeated layers, in place, where that pays.

Beside `base.py`, which knows the layers of a tower. All layers of a kind share one compiled graph, so a tower of 24
layers is compiled as quickly as one of 12, and a further shape costs seconds. Weights keep their names, and hooks,
wrappers and checkpoints of activations around a layer stay as they are.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import torch
from torch import nn

from contrastile._torch import compile_graphs, uncompile
from contrastile.models.base import layers_of


def compile_tower(tower: nn.Module) -> None:
    """Compile the tower's layers, or all of it where it has none that repeat; for training, not for evaluation."""
    for module in _compiled_parts(tower):
        compile_graphs(module)


def uncompile_tower(tower: nn.Module) -> None:
    """Run the tower as it is written again."""
    for module in _compiled_parts(tower):
        uncompile(module)


def _compiled_parts(tower: nn.Module) -> list[nn.Module]:
    # torch.compile skips modules of torch itself, unless another one is around them
    return [layer for layer in layers_of(tower) if not type(layer).__module__.startswith("torch.nn.")] or [tower]


def no_compiler(device: torch.device) -> str | None:
    """Return the reason why towers are not compiled for this device by themselves; None where they can be."""
    if device.type != "cuda":
        return "they run on a CPU"
    if find_spec("triton") is None:
        return "triton is not installed"
    compilers = (os.environ.get("CC"), "gcc", "clang", "cc")
    if not any(shutil.which(name) for name in compilers if name):
        return "there is no C compiler"
    return None
