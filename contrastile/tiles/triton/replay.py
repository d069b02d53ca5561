"""The launches at the two ends of a replayed call, which differ from step to step in their addresses alone.

Beside `launch.py`, which launches what is between them. Triton's own dispatch, and a launch for each tensor, take
longer on the host than the graph itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from contrastile.tiles.base import Accumulated
from contrastile.tiles.triton import ends, launch
from contrastile.tiles.triton.plan import ALIGNMENT, tiles_of

# numbers of one program
BLOCK = 4096
# function of the arguments in their order, tensors as addresses
Launch = Callable[..., None]


def _first(kernel: Any, lengths: Sequence[int], *arguments: Any) -> Launch | None:
    """Launch by Triton, which compiles for these types; later launches with others of them. None: always by Triton."""
    # without any number there is one program too
    grid = (max(sum(tiles_of(n, BLOCK) for n in lengths), 1), 1, 1)
    compiled = kernel[grid](*arguments)
    # the interpreter compiles nothing
    later: Launch | None = None if compiled is None else compiled[grid]
    return later


def _addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple([x.data_ptr() for x in tensors])


def _like(target: Tensor, x: Tensor) -> Tensor:
    """A copy of x with the strides of the target."""
    return torch.empty_like(target, dtype=x.dtype).copy_(x)


class Filling:
    """Copies tensors to the memory that a graph reads, each in the type of its target, in one launch.

    Targets have no gaps.
    """

    def __init__(self, targets: Sequence[Tensor]) -> None:
        self._targets = tuple(targets)
        self._lengths, self._strides = tuple([x.numel() for x in targets]), [x.stride() for x in targets]
        # address to which the graph's last kernel writes the loss
        self._address = torch.zeros((), dtype=torch.int64, device=targets[0].device)
        self._fixed = _addresses(targets), self._lengths
        # by types of the sources
        self._launches: dict[tuple[torch.dtype, ...], Launch | None] = {}

    def __call__(self, sources: Sequence[Tensor], value: Tensor, stream: int) -> None:
        """Copy, and have the next replay write its loss to `value`."""
        # numbers at odd addresses, or in another order, are copied before
        sources = [
            x if x.stride() == strides and not x.data_ptr() % ALIGNMENT else _like(target, x)
            for x, target, strides in zip(sources, self._targets, self._strides, strict=True)
        ]
        types = tuple([x.dtype for x in sources])
        launched = self._launches.get(types)
        if launched is None:
            tensors = (tuple(sources), self._targets, self._lengths, value, self._address, BLOCK)
            self._launches[types] = _first(ends.fill, self._lengths, *tensors)
        else:
            addresses = _addresses(sources), *self._fixed, value.data_ptr(), self._address.data_ptr(), BLOCK
            launched(*addresses, stream=stream)

    def deliver(self, value: Tensor) -> None:
        """Copy the loss to where the last `__call__` has said."""
        launch.run(ends.deliver, (1,), value_ptr=value, address_ptr=self._address)


class Gradients:
    """Gradients from a graph's sums and an upstream gradient, in one launch."""

    def __init__(self) -> None:
        self._launch: Launch | None = None

    def __call__(self, sums: Accumulated, of_inputs: Sequence[Tensor | None], upstream: Tensor, stream: int) -> None:
        """Write the gradients of scale, bias, queries and keys; None is not wanted.

        sums: sums of queries and keys, then the scale and, for an upstream gradient of 1, its gradient and the bias's.
        """
        u, v, numbers = sums
        of_scale, of_bias, of_q, of_k = of_inputs
        sides = [(x, out) for x, out in ((u, of_q), (v, of_k)) if x is not None and out is not None]
        totals, outs = [x for x, _ in sides], [out for _, out in sides]
        lengths, of_numbers = tuple([x.numel() for x in outs]), [x for x in (of_scale, of_bias) if x is not None]
        # position of the first gradient that is read
        first = 1 if of_scale is not None else 2
        if self._launch is None:
            tensors = tuple(totals), tuple(outs), lengths, numbers, upstream, tuple(of_numbers)
            self._launch = _first(ends.gradients, lengths, *tensors, first, BLOCK)
        else:
            addresses = _addresses(totals), _addresses(outs), lengths, numbers.data_ptr(), upstream.data_ptr()
            self._launch(*addresses, _addresses(of_numbers), first, BLOCK, stream=stream)
