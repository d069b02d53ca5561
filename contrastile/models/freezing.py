"""Frozen towers: all weights, or those before a tower's last layers, are left as they are (LiT, Zhai et al. 2022).

Stands beside `activation_checkpointing.py`; a recipe asks for it with `model.locked` and `model.unlocked`.
"""

from __future__ import annotations

from itertools import dropwhile

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
