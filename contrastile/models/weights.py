"""Weights from a file of one's own into a module: safetensors, or what torch.save wrote of tensors alone.

Within the second box of the flow, for the towers of open_clip and timm. Nothing else is unpickled, nothing downloaded,
and a file that does not fit is told by the names that differ.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from contrastile._check import wrong

# where training scripts put the weights among other things, and what wrappers write before every name
ENVELOPES = ("state_dict", "model")
WRAPPERS = ("module.", "_orig_mod.")


def read_weights(checkpoint: str | Path) -> dict[str, Tensor]:
    """The tensors of a file by name, without the marks of wrappers.

    Raises ValueError where it holds anything else.
    """
    path = Path(checkpoint)
    if not path.is_file():
        raise wrong("checkpoint", "be a file", f'"{path}"', "Weights are read from this machine and from nowhere else.")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as failure:
        why = str(failure).splitlines() or [type(failure).__name__]
        remedy = f"It cannot be read: {why[0]}"
        raise wrong("checkpoint", "be safetensors, or tensors that torch.save wrote", f'"{path}"', remedy) from failure
    for envelope in ENVELOPES:
        if isinstance(found, dict) and isinstance(found.get(envelope), dict):
            found = found[envelope]
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise wrong("checkpoint", "hold tensors by name", f'"{path}"', "Save the model's state_dict alone.")
    return {_unwrapped(name): value for name, value in found.items()}


def _unwrapped(name: str) -> str:
    while name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    return name


def put_into(module: nn.Module, weights: dict[str, Tensor], checkpoint: str | Path) -> None:
    """The module has these weights, every one of them and no other; raises ValueError with the names that differ."""
    own = module.state_dict()
    differing = {
        "lacks": sorted(own.keys() - weights.keys()),
        "has besides": sorted(weights.keys() - own.keys()),
        "has of another shape": sorted(
            name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape
        ),
    }
    said = [
        f"it {what} {', '.join(names[:3])}{' ...' * (len(names) > 3)}" for what, names in differing.items() if names
    ]
    if said:
        remedy = "Name the model that it is of, and the size of its pictures."
        raise wrong("checkpoint", "hold the weights of this model", f'"{checkpoint}": {"; ".join(said)}', remedy)
    module.load_state_dict(weights)
