"""The operations that torch dispatches, counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Counted(TorchDispatchMode):
    """How often each operation runs within the block, by name, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))
