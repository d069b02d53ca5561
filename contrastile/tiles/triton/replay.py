"""The launches at the two ends of a replayed call, which differ between steps only in their addresses.

Beside `launch.py`, which launches what is between them. Triton's own dispatch, and a launch for each tensor, take
longer on the host than the graph itself.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from contrastile.scorers import padded_to
from contrastile.tiles.base import Accumulated
from contrastile.tiles.triton import launch
from contrastile.tiles.triton.kernels import replay as replay_kernels
from contrastile.tiles.triton.kernels.own import own_gradients
from contrastile.tiles.triton.launch import ROWS
from contrastile.tiles.triton.own import gradient_programs
from contrastile.tiles.triton.plan import ALIGNMENT, interpreting, tiles_of
from contrastile.tiles.triton.start import start

# numbers of one program
BLOCK = 4096
# features that one program measures at a time, of `launch.ROWS` rows
COLS = 256


class _Repeated:
    """A kernel launched again and again with tensors of the same dtypes, lengths and alignment."""

    def __init__(self, kernel: Any, programs: int, arguments: Sequence[Any]) -> None:
        """Launch by Triton, which compiles."""
        # without any number there is one program too
        self._grid = (max(programs, 1), 1, 1)
        self._compiled = kernel[self._grid](*arguments)

    def __call__(self, stream: int, arguments: Sequence[Any]) -> None:
        """Launch with other tensors, as addresses."""
        start(self._compiled, self._grid, stream, arguments)


def _addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple([x.data_ptr() for x in tensors])


def _like(target: Tensor, x: Tensor) -> Tensor:
    """A copy of x with the strides of the target, and its length of texts."""
    if x.shape != target.shape:
        x = padded_to(x, target.shape[1])
    return x if x.stride() == target.stride() else torch.empty_like(target, dtype=x.dtype).copy_(x)


class Filling:
    """Copies tensors to the memory that a graph reads, each in the dtype of its target, in one launch.

    Targets have no gaps. measured: number of the first ones whose rows' norms are computed on the way, as
    `launch.feature_norms` does: two or three [n, D], or none.
    """

    def __init__(self, targets: Sequence[Tensor], measured: int = 0) -> None:
        self._targets = tuple(targets)
        self._lengths, self._strides = tuple([x.numel() for x in targets]), [x.stride() for x in targets]
        self._shapes = [x.shape for x in targets]
        # address to which the graph's last kernel writes the loss
        self._address = torch.zeros((), dtype=torch.int64, device=targets[0].device)
        D, blocks = targets[0].shape[-1] if measured else 1, sum(tiles_of(len(x), ROWS) for x in targets[:measured])
        self._programs = blocks + sum(tiles_of(n, BLOCK) for n in self._lengths[measured:])
        self.norms = targets[0].new_empty(2, blocks, dtype=torch.float32) if measured else None
        norms = self._address if self.norms is None else self.norms
        # the kernel's fixed arguments, for a launch by Triton and for one by addresses
        self._as_tensors = self._targets, self._lengths, D, norms, blocks
        self._as_addresses = _addresses(targets), self._lengths, D, norms.data_ptr(), blocks
        # of one program, by their kernel's names: rows and features at a time, and numbers
        self._sizes = measured, ROWS, COLS, BLOCK
        # by dtypes of the sources
        self._launches: dict[tuple[torch.dtype, ...], _Repeated] = {}

    def __call__(self, sources: Sequence[Tensor], value: Tensor, stream: int) -> None:
        """Copy, and have the next replay write its loss to `value`."""
        # numbers at odd addresses, in another order, or of fewer tokens are copied before
        sources = [
            x if x.shape == shape and x.stride() == strides and not x.data_ptr() % ALIGNMENT else _like(target, x)
            for x, target, shape, strides in zip(sources, self._targets, self._shapes, self._strides, strict=True)
        ]
        types = tuple([x.dtype for x in sources])
        repeated = self._launches.get(types)
        if repeated is None or interpreting():
            tensors = (tuple(sources), *self._as_tensors, value, self._address, *self._sizes)
            self._launches[types] = _Repeated(replay_kernels.fill, self._programs, tensors)
        else:
            ends_at = value.data_ptr(), self._address.data_ptr()
            repeated(stream, (_addresses(sources), *self._as_addresses, *ends_at, *self._sizes))

    def deliver(self, value: Tensor) -> None:
        """Copy the loss, or that of each row, to the address of the last `__call__`."""
        programs = (tiles_of(value.numel(), BLOCK),)
        launch.run(replay_kernels.deliver, programs, value_ptr=value, address_ptr=self._address, length=value.numel(),
                   BLOCK=BLOCK)  # fmt: skip


class Gradients:
    """Gradients from a graph's sums and an upstream gradient, in one launch.

    sums: sums of queries and keys, then the scale and, for an upstream gradient of 1, its gradient and the bias's.
    wanted: whether scale, bias, queries and keys get a gradient.
    """

    def __init__(self, sums: Accumulated, wanted: Sequence[bool]) -> None:
        self._sums, self._wanted = sums, wanted
        self._lengths = tuple([x.numel() for x in self._totals(sums)])
        self._fixed = self._read(sums)
        # number of the numbers that get a gradient, and position of the first
        self._numbers, self._first = sum(wanted[:2]), 1 if wanted[0] else 2
        self._launch: _Repeated | None = None
        self._own_launch: _Repeated | None = None
        self._own_numbers: tuple[int, ...] = ()

    def own(self, sums: Accumulated, q: Tensor, upstream: Tensor, out: Tensor, stream: int) -> None:
        """Write the gradient of the rows' own columns [N, H, D], of queries q in the dtype of products."""
        assert sums.own is not None
        if not out.numel():
            return
        if not q.is_contiguous() or q.data_ptr() % ALIGNMENT:
            q = q.clone(memory_format=torch.contiguous_format)
        memory, (_, H, D) = (sums.own, q, sums.sums, upstream, out), out.shape
        if self._own_launch is None or interpreting():
            programs, sizes = gradient_programs(out)
            self._own_numbers = H, D, D, 1, True, sizes["COLS"], sizes["BLOCK"]
            self._own_launch = _Repeated(own_gradients, programs, (*memory, *self._own_numbers))
        else:
            self._own_launch(stream, (*_addresses(memory), *self._own_numbers))

    def _totals(self, sums: Accumulated) -> tuple[Tensor, ...]:
        return tuple([x for x, want in zip(sums, self._wanted[2:], strict=False) if want and x is not None])

    def _read(self, sums: Accumulated) -> tuple[tuple[int, ...], int]:
        return _addresses(self._totals(sums)), sums.sums.data_ptr()

    def __call__(self, sums: Accumulated, gradients: Sequence[Tensor], upstream: Tensor, stream: int) -> None:
        """Write those gradients that are wanted. sums: those of the graph, or a copy."""
        n = self._numbers
        for total, out in zip(self._totals(sums), gradients[n:], strict=True):
            # the last columns are constants: they have no sums, and their gradient is 0
            if len(out) > len(total):
                out[len(total) :].zero_()
        if self._launch is None or interpreting():
            each = tuple(gradients)
            tensors = self._totals(sums), each[n:], self._lengths, sums.sums, upstream, each[:n]
            programs = sum(tiles_of(n, BLOCK) for n in self._lengths)
            self._launch = _Repeated(replay_kernels.gradients, programs, (*tensors, self._first, BLOCK))
        else:
            totals, numbers = self._fixed if sums is self._sums else self._read(sums)
            outs = _addresses(gradients)
            addresses = totals, outs[n:], self._lengths, numbers, upstream.data_ptr(), outs[:n]
            self._launch(stream, (*addresses, self._first, BLOCK))
