"""Weights of a local file: safetensors, or tensors that torch.save wrote.

Below the towers of open_clip and timm; transformers reads its folders itself. Nothing else is unpickled and nothing is
downloaded. An error about a file that does not fit names the weights that differ.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

import torch
from torch import Tensor, nn

from contrastile._errors import invalid

# keys under which training scripts store the weights, and prefixes of wrappers
ENVELOPES = ("state_dict", "model")
WRAPPERS = ("module.", "_orig_mod.")


def read_weights(checkpoint: str | Path) -> dict[str, Tensor]:
    """The tensors of a file by name, without prefixes of wrappers; raises ValueError for a file of anything else."""
    path = Path(checkpoint)
    if not path.is_file():
        remedy = "Weights are read from this machine and from nowhere else."
        raise invalid("checkpoint", "be a file", f'"{path}"', remedy)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        # torch's message about a pickle explains how to allow it
        pickled = reason.startswith("Weights only load failed")
        remedy = "Anything else is not unpickled." if pickled else f"It cannot be read: {reason}"
        rule = "be safetensors, or tensors that torch.save wrote"
        raise invalid("checkpoint", rule, f'"{path}"', remedy) from error
    for envelope in ENVELOPES:
        if isinstance(content, dict) and isinstance(content.get(envelope), dict):
            content = content[envelope]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise invalid("checkpoint", "hold tensors by name", f'"{path}"', "Save the model's state_dict alone.")
    # several wrappers may be around the model
    while any(name.startswith(WRAPPERS) for name in content):
        content = {name.partition(".")[2] if name.startswith(WRAPPERS) else name: x for name, x in content.items()}
    return content


def load_weights_into(module: nn.Module, weights: dict[str, Tensor], checkpoint: str | Path) -> None:
    """Load exactly the module's weights; raises ValueError with the names that are missing, extra or of other shape."""
    own = module.state_dict()
    shared = own.keys() & weights.keys()
    text = differences(
        lacking=own.keys() - weights.keys(),
        besides=weights.keys() - own.keys(),
        reshaped={name for name in shared if own[name].shape != weights[name].shape},
    )
    if text:
        remedy = "Name the model that it is of, and the size of its pictures."
        raise invalid("checkpoint", "hold the weights of this model", f'"{checkpoint}": {text}', remedy)
    module.load_state_dict(weights)


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
