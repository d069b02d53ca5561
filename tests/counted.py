"""The operations that torch dispatches, counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Counted(TorchDispatchMode):
    """How often each operation runs within the block, by name, views included; and the multiplications of products."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()
        self.multiplications = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.ran[name] += 1
        if "mm" in name:
            *_, a, b = [x for x in args if isinstance(x, Tensor)]
            self.multiplications += a.numel() * b.shape[-1]
        return function(*args, **(kwargs or {}))
