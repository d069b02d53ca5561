"""Every check on what a user hands to the losses and to `encode`; the form of its sentence is `_wrong.py`'s.

Stands on the ground of the house: everything may import it. A check looks at shapes, types and devices only; the
exceptions, an index out of range and rows that are not of unit length, have to be read, which on a GPU happens in few
calls only (`Looks`).
"""

from __future__ import annotations

import itertools
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contrastile._wrong import one_of as one_of
from contrastile._wrong import whole_number as whole_number
from contrastile._wrong import wrong as wrong

# the types that features are computed with
FEATURES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# calls of a process that read one kind of thing on a GPU: what is called in every step must not wait for it each time
MOST_LOOKS = 16


class Looks:
    """How often this process has read one kind of thing on a GPU."""

    def __init__(self) -> None:
        self._taken = itertools.count()

    def one_more(self, *tensors: Tensor) -> bool:
        """Whether they may be read now: on the host always, on a GPU `MOST_LOOKS` times."""
        return not any(waits(x) for x in tensors) or next(self._taken) < MOST_LOOKS


def waits(x: Tensor) -> bool:
    """Whether the host waits for the device when it reads x."""
    return x.is_cuda


def captured(*tensors: Tensor) -> bool:
    """Whether what is done with them now becomes part of a CUDA graph, so that nothing can be read."""
    return any(waits(x) for x in tensors) and torch.cuda.is_current_stream_capturing()


def known_device(asked: Any, place: str) -> torch.device:
    """A device by its name; `place` says where one computes who leaves it out."""
    try:
        return torch.device(asked)
    except (RuntimeError, TypeError):
        raise wrong("device", "be one that torch knows", repr(asked), f"Leave it out to compute {place}.") from None


def present_device(asked: Any, place: str) -> torch.device:
    """A device that this machine has."""
    device = known_device(asked, place)
    if device.type not in ("cpu", "meta") and not _accelerates(device.type):
        raise wrong("device", "be on this machine", repr(str(asked)), f"Leave it out to compute {place}.")
    return device


def _accelerates(kind: str) -> bool:
    try:
        found: bool = torch.get_device_module(kind).is_available()
    except (AttributeError, RuntimeError):
        # a kind that torch has a name for, and nothing more
        return False
    return found


def features(name: str, x: Tensor) -> None:
    """x is [rows, features], of a type that is computed with."""
    if not isinstance(x, Tensor):
        raise wrong(name, "be a tensor", type(x).__name__, "Convert it with torch.as_tensor.")
    if x.ndim != 2:
        raise wrong(name, "have two dimensions [rows, features]", f"shape {list(x.shape)}", "Flatten the others first.")
    if not x.is_floating_point():
        raise wrong(name, "be floating point", x.dtype, "Convert it with .float().")
    if x.dtype not in FEATURES:
        raise wrong(name, "be bf16, fp16, fp32 or fp64", x.dtype, "Convert it with .float().")
    if x.shape[1] == 0:
        raise wrong(name, "have at least one feature", f"shape {list(x.shape)}", "Check the encoder's output.")


def alike(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """x and other can be multiplied with each other."""
    if x.shape[1] != other.shape[1]:
        raise wrong(
            name,
            f"have the same feature size as `{other_name}`",
            f"{other.shape[1]} and {x.shape[1]}",
            "Project one side first.",
        )
    if x.dtype != other.dtype:
        raise wrong(
            name, f"have the dtype of `{other_name}`", f"{other.dtype} and {x.dtype}", "Convert one side first."
        )
    if x.device != other.device:
        raise wrong(
            name, f"be on the device of `{other_name}`", f"{other.device} and {x.device}", "Move one side first."
        )


def same_length(name: str, x: Tensor, other_name: str, other: Tensor, otherwise: str = "") -> None:
    """x has a row for each of other's; `otherwise` says what does without."""
    if len(x) != len(other):
        raise wrong(
            name,
            f"have as many rows as `{other_name}`",
            f"{len(other)} and {len(x)}",
            f"Pass one row for each; a symmetric loss pairs row i with row i.{otherwise}",
        )


def vector(name: str, x: Tensor, rows_name: str, rows: Tensor, *, integer: bool) -> None:
    """x is [n], one entry for each of the rows, on their device."""
    if not isinstance(x, Tensor) or x.shape != rows.shape[:1]:
        rule = f"be a tensor of shape [{len(rows)}], one entry for each row of `{rows_name}`"
        if isinstance(x, Tensor):
            raise wrong(name, rule, f"shape {list(x.shape)}", "Check it.")
        raise wrong(name, rule, type(x).__name__, "Convert it with torch.as_tensor.")
    if integer and (x.is_floating_point() or x.is_complex()):
        raise wrong(name, "be integers", x.dtype, "Number the groups first, with torch.unique for example.")
    if x.is_complex():
        raise wrong(name, "be real numbers", x.dtype, "Convert it with .float().")
    if x.device != rows.device:
        raise wrong(name, f"be on the device of `{rows_name}`", f"{rows.device} and {x.device}", "Move one side first.")


def constant(name: str, x: Tensor) -> None:
    """Nobody waits for x's gradient, which is not computed."""
    if x.requires_grad and torch.is_grad_enabled():
        raise wrong(name, "not require a gradient", "some that do", "Detach them: they are taken as constants.")


def positives(x: Tensor, q: Tensor) -> None:
    """x is [N] or [N, P] of indices into the keys, −1 where there is none."""
    if not isinstance(x, Tensor) or x.ndim not in (1, 2) or len(x) != len(q):
        got = f"shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise wrong("positives", f"be a tensor of shape [{len(q)}] or [{len(q)}, P]", got, "List each query's keys.")
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise wrong("positives", "be integers", x.dtype, "Pass indices of keys, -1 where there is none.")
    if x.device != q.device:
        raise wrong("positives", "be on the device of `q`", f"{q.device} and {x.device}", "Move one side first.")


class Sound(NamedTuple):
    """Positives that are in range by the way they were made: nobody has to read them."""

    indices: Tensor


_looks = Looks()


def in_range(positives: Tensor, keys: int) -> None:
    """All positives index one of the keys, or are −1, if they may be read; for what cannot be, see `kept_in_range`."""
    if positives.numel() == 0 or captured(positives) or not _looks.one_more(positives):
        return
    least, most = (int(bound) for bound in torch.aminmax(positives))
    if least < -1 or most >= keys:
        index = most if most >= keys else least
        raise wrong("positives", f"index this rank's {keys} keys, or be -1", index, "Count from this rank's first key.")


def kept_in_range(positives: Tensor, keys: int, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same of positives on a GPU, in every call and without waiting for it.

    One that is out of range is taken out, and makes the scale NaN: and so the loss, and every gradient, of all ranks.
    """
    if not waits(positives):
        return positives, scale
    outside = (positives < -1) | (positives >= keys)
    nothing = torch.zeros_like(scale)
    return positives.masked_fill(outside, -1), scale + nothing.masked_fill(outside.any(), torch.nan)


def number(name: str, x: Tensor | float, q: Tensor, device: torch.device | str | None = None) -> None:
    """x is a float, or a floating tensor of shape [] or [1] beside q or on the device that is computed on."""
    if isinstance(x, bool) or not isinstance(x, (int, float, Tensor, Real)):
        raise wrong(
            name, "be a number or a tensor of shape [] or [1]", type(x).__name__, "Pass logit_scale.exp(), say."
        )
    if not isinstance(x, Tensor):
        return
    if x.shape not in (torch.Size([]), torch.Size([1])):
        raise wrong(name, "be a tensor of shape [] or [1]", f"shape {list(x.shape)}", "One number serves all pairs.")
    if not x.is_floating_point():
        raise wrong(name, "be floating point", x.dtype, "Convert it with .float().")
    if x.device != q.device and (device is None or x.device.type != torch.device(device).type):
        raise wrong(name, "be on the device of `q`", f"{q.device} and {x.device}", "Move one side first.")


def not_empty(rows: int) -> None:
    """There is a mean to take."""
    if rows == 0:
        raise wrong("q", "have at least one row over all ranks", 0, "Skip the step when the batch is empty.")
