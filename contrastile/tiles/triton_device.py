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
from torch import Tensor
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


# by compute capability; shared memory of a multiprocessor's block is what limits the stages (99 KiB on 8.6, 8.9, 12.0)
SHAPES = {
    80: Shape(warps=8, stages=4, programs=1, flatten=False, tma=False),
    86: Shape(warps=8, programs=1, flatten=False, tma=False),
    89: Shape(warps=8, programs=1, flatten=False, tma=False),
    90: Shape(),
    100: Shape(flatten=False),
    120: Shape(warps=8, depth=32, programs=1, flatten=False),
}
# small enough that odd shapes have several tiles
SHAPE_INTERPRETED = Shape(rows=32, cols=32, depth=32)
PROGRAMS_INTERPRETED = 3


def interpreting() -> bool:
    """Whether Triton runs kernels on the CPU, one program after the other."""
    return bool(triton.knobs.runtime.interpret)


def on(device: torch.device) -> AbstractContextManager[None]:
    """Launches go to this device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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


@cache
def _names(kernel: Any) -> tuple[list[str], list[str], list[str]]:
    """A kernel's arguments: all in their order, those it was compiled for, and those it is told at run time."""
    constants = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
    return kernel.arg_names, constants, [name for name in kernel.arg_names if name not in constants]


def _kind(value: Any) -> Any:
    """What Triton may compile a kernel for, of a run-time argument."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % ALIGNMENT == 0
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, *value.block_shape
    if isinstance(value, int):
        return value == 1, value % ALIGNMENT == 0, -(2**31) <= value < 2**31
    return type(value)


_compiled: dict[Any, Any] = {}


def run(kernel: Any, grid: tuple[int, ...], *, warps: int = 4, stages: int = 3, **given: Any) -> None:
    """Launches a kernel with arguments by name.

    Triton's own way to a kernel that is compiled already takes longer than many of these kernels; so it is taken once
    for each kind of arguments.
    """
    if interpreting():
        kernel[grid](**given)
        return
    names, constants, told = _names(kernel)
    key = (
        kernel,
        torch.cuda.current_device(),
        warps,
        stages,
        *(given[name] for name in constants),
        *(_kind(given[name]) for name in told),
    )
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](**given, num_warps=warps, num_stages=stages)
    else:
        compiled[(*grid, 1, 1)[:3]](*(given[name] for name in names))
