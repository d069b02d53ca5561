"""A CUDA graph played on a CPU: what is captured is computed, noted, and repeated in the same memory.

Memory that the program drops during a capture is overwritten there, also in each repetition: a graph's pool may use it
again. Torch's operations are noted by a dispatch mode, interpreted kernels by `run`.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from contrastile._torch import DispatchMode, pytree
from contrastile.tiles.triton import start

# byte of a NaN in every type of floats
POISON = 0xFF


class Memory:
    """Memory of all tapes of this process, by address."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._blocks: dict[int, np.ndarray] = {}

    def moved(self, x: Tensor, dropped: Callable[[np.ndarray], None]) -> Tensor:
        """A copy of x in a block of its own; `dropped` is called once nobody else has the copy."""
        room = np.full(x.untyped_storage().nbytes() + 128, POISON, dtype=np.uint8)
        first = -room.ctypes.data % 64
        block = room[first : first + (len(room) - 64) // 8 * 8]
        self._blocks[block.ctypes.data] = block
        insort(self._addresses, block.ctypes.data)
        lent = block[:]
        finalize(lent, dropped, block)
        like = torch.from_numpy(lent).view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())
        return like.copy_(x)

    def named(self, x: Any) -> Any:
        """A tensor of this memory that does not count as had by the program; anything else as it is."""
        at = bisect_right(self._addresses, x.data_ptr()) if isinstance(x, Tensor) else 0
        block = self._blocks[self._addresses[at - 1]] if at else np.empty(0)
        if not at or not x.numel() or x.data_ptr() >= block.ctypes.data + block.nbytes:
            return x
        offset = (x.data_ptr() - block.ctypes.data) // x.element_size()
        return torch.from_numpy(block[:]).view(x.dtype).as_strided(x.shape, x.stride(), offset)


class Tape(DispatchMode):
    """In place of `torch.cuda.CUDAGraph`."""

    memory = Memory()
    current: ClassVar[Tape | None] = None
    # blocks dropped between two graphs of one capture
    between: ClassVar[list[np.ndarray]] = []

    def __init__(self) -> None:
        super().__init__()
        self._notes: list[Callable[[], object]] = []
        self._computed = True

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        Tape.current = self
        for block in Tape.between if pool else ():
            self._dropped(block)
        Tape.between.clear()
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        Tape.current = None

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        """Repeat all that is noted; the first time it has been computed."""
        notes, self._computed = () if self._computed else self._notes, False
        for note in notes:
            note()

    @staticmethod
    def _dropped(block: np.ndarray) -> None:
        if Tape.current is None:
            # overwritten by the next graph of this pool alone: a collector may find it in the middle of a replay
            Tape.between.append(block)
        else:
            block.fill(POISON)
            Tape.current._notes.append(lambda: block.fill(POISON))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, outs = (args, kwargs or {}), function(*args, **(kwargs or {}))
        before = {x.untyped_storage().data_ptr() for x in pytree.tree_leaves(given) if isinstance(x, Tensor)}

        def moved(x: Any) -> Any:
            known = not isinstance(x, Tensor) or not x.numel() or x.untyped_storage().data_ptr() in before
            return x if known else self.memory.moved(x, self._dropped)

        results = pytree.tree_map(moved, outs)
        pairs = zip(pytree.tree_leaves(outs), pytree.tree_leaves(results), strict=True)
        written = [(at, self.memory.named(new)) for at, (old, new) in enumerate(pairs) if old is not new]
        if written or function._schema.is_mutable:
            args, kwargs = pytree.tree_map(self.memory.named, given)

            def repeat() -> None:
                again = pytree.tree_leaves(function(*args, **kwargs))
                for at, out in written:
                    out.copy_(again[at])

            self._notes.append(repeat)
        return results


def run(function: Any, grid: tuple[int, ...], **given: Any) -> None:
    """Launch as `start.run`, and note it on the current tape."""
    with _disable_current_modes():
        start.run(function, grid, **given)
        if Tape.current is not None:
            named = pytree.tree_map(Tape.memory.named, given)
            Tape.current._notes.append(lambda: start.run(function, grid, **named))
