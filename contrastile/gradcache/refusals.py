"""Refusals: encoders and scorers that cannot be computed in parts, because examples or calls depend on each other.

Used by both passes of `encode`, by its probes, and by `tiles/scored.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor, nn

from contrastile._errors import invalid
from contrastile._torch import BatchNorm, version


def normalises_over_rows(module: nn.Module) -> bool:
    """Return whether the module is a batch normalisation that takes its statistics from the rows it sees."""
    return isinstance(module, BatchNorm) and (module.training or module.running_mean is None)


def refuse_batch_norm(module: nn.Module, name: str) -> NoReturn:
    """Raise ValueError: the statistics of parts are not those of the batch."""
    remedy = "Put it in eval mode, or take GroupNorm or LayerNorm."
    if name == "encoder":
        remedy += " Or call the encoder itself, or cache only the part before it."
    raise invalid(
        name,
        "treat examples one by one",
        f"{type(module).__name__} in training mode, whose statistics over a sub-batch are not those of the batch",
        remedy,
    )


@contextmanager
def refusing_batch_norm(modules: Sequence[nn.Module], name: str = "encoder") -> Iterator[None]:
    """Raise when one of the modules normalises over the examples of its sub-batch."""

    def refuse(module: nn.Module, _: object) -> None:
        # the encoder itself may have put it in eval mode by now
        if normalises_over_rows(module):
            refuse_batch_norm(module, name)

    hooks = [module.register_forward_pre_hook(refuse) for module in modules if normalises_over_rows(module)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def refusing_state(modules: Sequence[nn.Module], name: str = "encoder", parts: str = "examples") -> Iterator[None]:
    """Raise when a module changes one of its buffers: its output depends on the calls before."""
    before = [(m, key, x, _version(x)) for m in modules for key, x in m.named_buffers(recurse=False)]
    yield
    for module, key, x, counted in before:
        now = dict(module.named_buffers(recurse=False)).get(key)
        if _version(x) != counted or _replaced(x, now):
            raise invalid(
                name,
                f"treat {parts} one by one",
                f"{type(module).__name__}, which changes a buffer when it runs",
                "Put it in eval mode.",
            )


@contextmanager
def refusing_changes(leaves: Sequence[Tensor | None], name: str = "inputs", by: str = "encoder") -> Iterator[None]:
    """Raise when an input is written over: computed again, the result would be another."""
    before = [(leaf, _version(leaf)) for leaf in leaves if leaf is not None]
    yield
    for leaf, counted in before:
        if _version(leaf) != counted:
            got = f"one of shape {list(leaf.shape)} that it writes over"
            raise invalid(name, f"be left as it is by the {by}", got, "Clone it there, or work out of place.")


def _version(x: Tensor) -> int | None:
    """Count of a tensor's changes; None for one made in inference mode, which counts none."""
    return None if x.is_inference() else version(x)


def _replaced(x: Tensor, now: Tensor | None) -> bool:
    """Return whether a buffer has other values than before; one of another shape is a table that has grown."""
    return now is not None and now is not x and now.shape == x.shape and not torch.equal(now.to(x.device), x)
