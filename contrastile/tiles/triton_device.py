"""The device under the kernels: how it likes its tiles, and how a kernel gets there.

Ground of `triton_operands.py` and `triton_launch.py`. Nothing here waits for the device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

# what the address and the rows of a tensor descriptor are multiples of, in bytes
ALIGNMENT = 16


@dataclass(frozen=True)
class Shape:
    """How a chip cuts the matrix: tiles of rows × cols, `depth` features at a time."""

    rows: int = 128
    cols: int = 128
    depth: int = 64
    warps: int = 4
    stages: int = 3
    # programs that share a multiprocessor: one's epilogue hides behind the other's products
    programs: int = 2
    # one loop over tiles and features, so that the next tile's loads overlap the epilogue
    flatten: bool = True
    # the copy engine moves tiles to shared memory
    tma: bool = True
    # what a product of features loses, per feature, of its own size: the matrix units cut their running sums off
    # instead of rounding them. Measured; 0 where nobody has
    cut: float = 0.0


# by compute capability; shared memory of a multiprocessor's block is what limits the stages (99 KiB on 8.6, 8.9, 12.0)
SHAPES = {
    80: Shape(warps=8, stages=4, programs=1, flatten=False, tma=False),
    86: Shape(warps=8, programs=1, flatten=False, tma=False),
    89: Shape(warps=8, programs=1, flatten=False, tma=False),
    90: Shape(cut=2.0**-30),
    100: Shape(flatten=False),
    120: Shape(warps=8, depth=32, programs=1, flatten=False),
}
# small enough that odd shapes have several tiles
SHAPE_INTERPRETED = Shape(rows=32, cols=32, depth=32)


@cache
def interpreting() -> bool:
    """Whether Triton runs kernels on the CPU, one program after the other. Settled when they are first imported."""
    return bool(triton.knobs.runtime.interpret)


def on(device: torch.device) -> AbstractContextManager[None]:
    """Launches go to this device."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else nullcontext()


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def shape_for(device: torch.device) -> Shape:
    """The shape of tiles on this device: that of the newest chip we know which is not newer."""
    if interpreting():
        return SHAPE_INTERPRETED
    return SHAPES[max(known for known in SHAPES if known <= _capability(device))]


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class _Kernel:
    """A kernel's arguments by name, and what was compiled of it so far."""

    def __init__(self, kernel: Any) -> None:
        self.names: list[str] = kernel.arg_names
        parameters = {parameter.name: parameter for parameter in kernel.params}
        at = {name: place for place, name in enumerate(self.names)}
        memory = [name for name in self.names if name.endswith(("_ptr", "_mem"))]
        self.memory = [at[name] for name in memory]
        self.constants = [at[name] for name in self.names if parameters[name].is_constexpr]
        told = [name for name in self.names if name not in memory and not parameters[name].is_constexpr]
        # compiled once for all values, but for those that need 64 bits
        self.anyhow = [at[name] for name in told if parameters[name].do_not_specialize]
        self.special = [at[name] for name in told if not parameters[name].do_not_specialize]
        self.compiled: dict[Any, Any] = {}

    def seen(self, given: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """What Triton may compile a kernel for, and the arguments in their order, tensors as addresses."""
        arguments = [given[name] for name in self.names]
        kinds = [arguments[at] for at in self.constants]
        for at in self.special:
            value = arguments[at]
            kinds.append((value == 1, value % ALIGNMENT == 0, value < 2**31))
        large = [at for at in self.anyhow if not -(2**31) <= arguments[at] < 2**31]
        odd = []
        for at in self.memory:
            value = arguments[at]
            if type(value) is TensorDescriptor:
                kinds.append(value.base.dtype)
            else:
                kinds.append(value.dtype)
                arguments[at] = address = value.data_ptr()
                if address % ALIGNMENT:
                    odd.append(at)
        if large or odd:
            kinds += (*large, None, *odd)
        return kinds, arguments


_kernels: dict[int, _Kernel] = {}


def run(kernel: Any, grid: tuple[int, ...], *, warps: int = 4, stages: int = 3, **given: Any) -> None:
    """Launches a kernel with arguments by name.

    Triton's own way to a kernel that is compiled already takes longer than many of these kernels; so it is taken once
    for each kind of arguments.
    """
    if interpreting():
        kernel[grid](**given)
        return
    known = _kernels.get(id(kernel))
    if known is None:
        known = _kernels[id(kernel)] = _Kernel(kernel)
    kinds, arguments = known.seen(given)
    key = (torch.cuda.current_device(), warps, stages, *kinds)
    compiled = known.compiled.get(key)
    if compiled is None:
        known.compiled[key] = kernel[grid](**given, num_warps=warps, num_stages=stages)
    else:
        compiled[(*grid, 1, 1)[:3]](*arguments)
