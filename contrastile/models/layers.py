"""Switches of a tower's layers: frozen weights (LiT, Zhai et al. 2022), and activations that are computed again.

On top of `base.py`. A recipe asks for them with `model.locked` and `model.unlocked`, and with `model.checkpointing`.
"""

from __future__ import annotations

from itertools import dropwhile
from typing import Any

from torch import nn

from contrastile._errors import invalid
from contrastile.models.base import repeated_modules


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
        for part in dropwhile(lambda part: part is not first, tower.modules()):
            if not isinstance(part, nn.Embedding):
                for weight in part.parameters(recurse=False):
                    weight.requires_grad_()


def layers_of(tower: nn.Module) -> list[nn.Module]:
    """The innermost repeated blocks in order, such as attention or convolution blocks; a stage of blocks is none."""
    blocks = set(repeated_modules(tower))
    stages = {block for block in blocks if any(inner in blocks for inner in block.modules() if inner is not block)}
    return [part for part in tower.modules() if part in blocks - stages]


def eval_frozen(module: nn.Module) -> None:
    """Set every module whose weights are all frozen to eval mode: no dropout, no batch statistics."""
    weights = list(module.parameters())
    if weights and not any(weight.requires_grad for weight in weights):
        module.eval()
        return
    for part in module.children():
        eval_frozen(part)


def checkpoint_activations(tower: nn.Module, side: str) -> None:
    """Let the tower's backward recompute the activations of its layers instead of storing them.

    Uses the switch of transformers, or `set_grad_checkpointing` of open_clip and timm; raises ValueError for a tower
    with neither.
    """
    switched = False
    for part in tower.modules():
        library: Any = part
        if getattr(part, "supports_gradient_checkpointing", False):
            # older versions of transformers have the second name
            switches = "activation_checkpointing_enable", "gradient_checkpointing_enable"
            name = next(name for name in switches if hasattr(library, name))
            # the reentrant variant returns no gradients where no input requires one
            getattr(library, name)({"use_reentrant": False})
            switched = True
        elif callable(getattr(part, "set_grad_checkpointing", None)):
            library.set_grad_checkpointing(True)
            switched = True
    if not switched:
        kind = type(getattr(tower, "tower", tower)).__name__
        remedy = "Leave it out: the gradient cache keeps one sub-batch of activations anyway."
        raise invalid("model.checkpointing", "name towers that have it", f"{side}, a {kind}", remedy)
