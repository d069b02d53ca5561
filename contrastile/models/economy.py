"""Towers that take less: activation checkpointing, as each library has it.

Within the second box of the flow, asked for by a recipe's `model.checkpointing`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from contrastile._check import wrong

# what transformers calls it in its newer versions
NEW = "activation_checkpointing_enable"


def checkpoint_activations(tower: nn.Module, side: str) -> None:
    """The tower's backward computes its layers again instead of keeping what they held.

    By `activation_checkpointing_enable` of transformers (formerly `gradient_checkpointing_enable`), or
    `set_grad_checkpointing` of open_clip and timm; raises ValueError for a tower that has neither.
    """
    found = False
    for part in tower.modules():
        library: Any = part
        if getattr(part, "supports_gradient_checkpointing", False):
            # the other way of torch's loses gradients where no input wants one
            switch = getattr(library, NEW, None) or library.gradient_checkpointing_enable
            switch({"use_reentrant": False})
            found = True
        elif callable(getattr(part, "set_grad_checkpointing", None)):
            library.set_grad_checkpointing(True)
            found = True
    if not found:
        kind = type(getattr(tower, "tower", tower)).__name__
        remedy = "Leave it out: the gradient cache keeps one sub-batch of activations anyway."
        raise wrong("model.checkpointing", "name towers that have it", f"{side}, a {kind}", remedy)
