"""How many bytes a computation takes at once, on any device, without asking the device.

Ground of the house, used where a tile must fit a workspace and only running it tells what it takes. Counted is what
PyTorch's operations return while the computation runs, until nothing refers to it any more; what was there before is
not, nor what an operation needs for itself alone.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


def footprint(run: Callable[[], object]) -> int:
    """The most bytes of tensors made by `run` that live at the same time; what it returns dies with it.

    >>> footprint(lambda: torch.ones(1000).exp().sum())
    8000
    """
    with as_written(), _Allocations() as allocations:
        run()
    return allocations.most


@contextmanager
def as_written() -> Iterator[None]:
    """What torch.compile has made of a function does not run in here, but the function itself.

    Neither a trial of a few rows nor a watched one is worth compiling for; and what is met while it is watched would
    never be compiled again.
    """
    # not imported, nothing is compiled; importing it takes seconds
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


class _Allocations(TorchDispatchMode):
    """Follows every storage that an operation returns from its birth to its death."""

    def __init__(self) -> None:
        super().__init__()
        self.present = self.most = 0
        # addresses of living storages
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self._note((args, kwargs), counted=False)
        out = func(*args, **(kwargs or {}))
        self._note(out, counted=True)
        return out

    def _note(self, tree: Any, *, counted: bool) -> None:
        for x in pytree.tree_leaves(tree):
            if isinstance(x, Tensor) and x.layout == torch.strided:
                storage = x.untyped_storage()
                if storage._cdata not in self.known:
                    self.known.add(storage._cdata)
                    size = storage.nbytes() if counted else 0
                    self.present += size
                    self.most = max(self.most, self.present)
                    weakref.finalize(storage, self._forget, storage._cdata, size)

    def _forget(self, address: int, size: int) -> None:
        self.known.discard(address)
        self.present -= size
