"""One kernel's launch: its compiled form is found by the arguments' values, and started without Triton's dispatch.

Below `launch.py`, which knows the arguments of each kernel. Triton's own dispatch of a compiled kernel takes longer
than many of these kernels run, so it is used once for each signature.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from contrastile._torch import current_stream_address
from contrastile.tiles.triton.plan import ALIGNMENT, interpreting

# sets of values by which a kernel is found at once
MOST_RECENT = 1024


class _Kernel:
    """A kernel's arguments by name, and its compiled forms."""

    def __init__(self, kernel: Any) -> None:
        names: list[str] = kernel.arg_names
        parameters = {parameter.name: parameter for parameter in kernel.params}
        index = {name: position for position, name in enumerate(names)}
        memory = [name for name in names if name.endswith(("_ptr", "_mem"))]
        self.names = names
        self.ordered = itemgetter(*names)
        self.memory = [index[name] for name in memory]
        others = [name for name in names if name not in memory]
        # values of arguments that are no memory
        self.values = itemgetter(*others) if len(others) > 1 else lambda given: tuple(given[name] for name in others)
        self.constants = [index[name] for name in others if parameters[name].is_constexpr]
        numbers = [name for name in others if not parameters[name].is_constexpr]
        # compiled once for all values up to 32 bits
        self.general = [index[name] for name in numbers if parameters[name].do_not_specialize]
        self.specialized = [index[name] for name in numbers if not parameters[name].do_not_specialize]
        # by all that Triton specializes on; and by the arguments' values, which take less time to compare
        self.compiled: dict[Any, Any] = {}
        self.recent: dict[Any, Any] = {}

    def addressed(self, given: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """The arguments in order, tensors as addresses; and the kinds of memory: dtypes, and what is unaligned."""
        arguments, kinds, unaligned = list(self.ordered(given)), [], []
        for index in self.memory:
            value = arguments[index]
            if type(value) is TensorDescriptor:
                kinds.append(value.base.dtype)
            else:
                kinds.append(value.dtype)
                arguments[index] = address = value.data_ptr()
                if address % ALIGNMENT:
                    unaligned.append(index)
        return arguments, [*kinds, None, *unaligned] if unaligned else kinds

    def signature(self, arguments: list[Any], memory: list[Any]) -> tuple[Any, ...]:
        """All that Triton specializes on."""
        kinds = [arguments[index] for index in self.constants]
        for index in self.specialized:
            value = arguments[index]
            kinds.append((value == 1, value % ALIGNMENT == 0, value < 2**31))
        large = [index for index in self.general if not -(2**31) <= arguments[index] < 2**31]
        return (*kinds, *large, None, *memory)


def start(compiled: Any, grid: tuple[int, int, int], stream: int, arguments: Sequence[Any]) -> None:
    """Launch a compiled kernel with all of its arguments, tensors as addresses.

    As `compiled[grid]` does, but without a record of each launch for a profiler's hooks where there are none.
    """
    runtime = triton.knobs.runtime
    # chains of functions; in older versions one or None
    hooks = [getattr(x, "calls", x) for x in (runtime.launch_enter_hook, runtime.launch_exit_hook)]
    if any(hooks):
        compiled[grid](*arguments, stream=stream)
    else:
        compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


_kernels: dict[int, _Kernel] = {}


def run(
    kernel: Any, grid: tuple[int, ...], *, warps: int = 4, stages: int = 3, registers: int | None = None,
    fusion: int = True, **given: Any,
) -> None:  # fmt: skip
    """Launch a kernel with those of the given arguments that it has; `registers`: the most of a thread.

    fusion: the compiler may join a product and a sum to one rounding.
    """
    if interpreting():
        kernel[grid](**{name: given[name] for name in kernel.arg_names})
        return
    known = _kernels.get(id(kernel))
    if known is None:
        known = _kernels[id(kernel)] = _Kernel(kernel)
    arguments, memory = known.addressed(given)
    device = torch.cuda.current_device()
    recent = (device, warps, stages, registers, fusion, known.values(given), *memory)
    compiled = known.recent.get(recent)
    if compiled is None:
        key = (device, warps, stages, registers, fusion, *known.signature(arguments, memory))
        compiled = known.compiled.get(key)
        if compiled is None:
            chosen = {name: given[name] for name in known.names}
            options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers, "enable_fp_fusion": fusion}
            known.compiled[key] = kernel[grid](**chosen, **options)
            return
        if len(known.recent) >= MOST_RECENT:
            known.recent.clear()
        known.recent[recent] = compiled
    x, y, z = (*grid, 1, 1)[:3]
    start(compiled, (x, y, z), current_stream_address(device), arguments)
