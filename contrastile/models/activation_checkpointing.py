"""Activation checkpointing of towers, by the switch of each tower's library.

Stands beside `freezing.py`; a recipe asks for it with `model.checkpointing`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from contrastile._errors import invalid

# the switch in newer versions of transformers; older ones call it gradient_checkpointing_enable
SWITCH = "activation_checkpointing_enable"


def checkpoint_activations(tower: nn.Module, side: str) -> None:
    """Let the tower's backward recompute the activations of its layers instead of storing them.

    Uses the switch of transformers, or `set_grad_checkpointing` of open_clip and timm; raises ValueError for a tower
    with neither.
    """
    switched = False
    for part in tower.modules():
        library: Any = part
        if getattr(part, "supports_gradient_checkpointing", False):
            # the reentrant variant returns no gradients where no input requires one
            switch = getattr(library, SWITCH, None) or library.gradient_checkpointing_enable
            switch({"use_reentrant": False})
            switched = True
        elif callable(getattr(part, "set_grad_checkpointing", None)):
            library.set_grad_checkpointing(True)
            switched = True
    if not switched:
        kind = type(getattr(tower, "tower", tower)).__name__
        remedy = "Leave it out: the gradient cache keeps one sub-batch of activations anyway."
        raise invalid("model.checkpointing", "name towers that have it", f"{side}, a {kind}", remedy)
