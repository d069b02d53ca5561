"""Locked towers: weights that stay as they are, all of them or those before a tower's last layers (LiT).

Within the second box of the flow, asked for by a recipe's `model.locked` and `model.unlocked`.
"""

from __future__ import annotations

from itertools import dropwhile

from torch import nn

from contrastile._check import wrong
from contrastile.models.base import repeated


def lock(tower: nn.Module, side: str, unlocked: int = 0) -> None:
    """No weight of the tower learns, but for those of its last `unlocked` layers and of what comes behind these.

    Raises ValueError where it has fewer layers.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> tower = nn.Sequential(nn.Linear(3, 4), nn.ModuleList([block(), block()]), nn.LayerNorm(4))
    >>> lock(tower, "image", unlocked=1)
    >>> [name for name, weight in tower.named_parameters() if weight.requires_grad]
    ['1.1.0.weight', '1.1.0.bias', '2.weight', '2.bias']
    """
    row = layers(tower)
    if unlocked > len(row):
        remedy = "Leave the side out of model.locked to train all of it."
        raise wrong(f"model.unlocked.{side}", f"be at most the {len(row)} layers of the tower", unlocked, remedy)
    tower.requires_grad_(False)
    if unlocked:
        first = row[-unlocked]
        # modules stand in the order in which they are made, which is the one of their use, but for tables of words
        for part in dropwhile(lambda part: part is not first, tower.modules()):
            if not isinstance(part, nn.Embedding):
                for weight in part.parameters(recurse=False):
                    weight.requires_grad_()


def layers(tower: nn.Module) -> list[nn.Module]:
    """The smallest parts that are repeated and made of others, in their order: blocks of attention, of convolutions."""
    found = set(repeated(tower))
    # one that holds others is a stage
    held = {part for part in found if any(inner in found for inner in part.modules() if inner is not part)}
    return [part for part in tower.modules() if part in found - held]


def rest(module: nn.Module) -> None:
    """Whatever has weights, none of which learns, is as in use: no dropout, no statistics of the batch."""
    weights = list(module.parameters())
    if weights and not any(weight.requires_grad for weight in weights):
        module.eval()
        return
    for part in module.children():
        rest(part)
