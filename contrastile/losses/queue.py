"""A queue of keys of earlier steps, further negatives of a small batch (MoCo, He et al. 2020; cross-batch memory).

Stands beside the losses, which take its keys as `negatives`. Every rank holds the keys of all ranks, so that one rank's
state is that of the whole queue, and any number of ranks may load it. A rank passes its own share of the keys to the
loss, which compares every query with the shares of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor, nn

from contrastile._errors import invalid, whole_number
from contrastile._types import shape_or_type
from contrastile.distributed import collectives, consistency
from contrastile.offload import free_memory

# the id of a key that was pushed without one: no query has it
NOBODY = torch.iinfo(torch.int64).min


class KeyQueue(nn.Module):
    """The last `size` keys that were pushed, detached, with their ids: a ring buffer (MoCo, He et al. 2020).

    Naively `keys = torch.cat([keys, key.detach()])[-size:]`, for the keys of all ranks, but in another order: new keys
    take the places of the oldest. The queue has a `state_dict` for checkpoints, and no parameters.

    Arguments:
        size: keys that are held, of all ranks together.
        features: D.
        group: the process group that shares the batch; None is the default group.
        dtype: of the keys; by default that of torch.

    Raises ValueError for keys that do not fit, and for ranks that hold another number of keys, as where some of them
    loaded a checkpoint; an error of one rank is raised on all of them.

    >>> from contrastile import InfoNCELoss
    >>> queue, loss = KeyQueue(6, features=8), InfoNCELoss()
    >>> for step in range(3):
    ...     query, key = torch.nn.functional.normalize(torch.randn(2, 4, 8), dim=-1)
    ...     value = loss(query, key, 10.0, negatives=queue.keys)
    ...     queue.push(key)
    >>> len(queue), queue.keys.shape
    (6, torch.Size([6, 8]))
    """

    _keys: Tensor
    _ids: Tensor

    def __init__(self, size: int, features: int, *, group: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.size = whole_number("size", size, 1, "Pass the number of keys to keep.")
        self.features = whole_number("features", features, 1, "Pass the size of a key.")
        self.group = group
        dtype = dtype or torch.get_default_dtype()
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise invalid("dtype", "be floating point", dtype, "Keys are features.")
        # a system may promise more memory than it has
        needed, memory = self.size * self.features * dtype.itemsize, free_memory(None)[1]
        if needed > memory:
            rule = f"make keys that fit into the {memory / 2**30:,.1f} GiB of this machine"
            raise invalid("size", rule, f"{self.size}, for {needed / 2**30:,.1f} GiB", "Hold fewer.")
        self.register_buffer("_keys", torch.zeros(self.size, self.features, dtype=dtype))
        self.register_buffer("_ids", torch.full((self.size,), NOBODY))
        # keys pushed so far, hence the place of the next one; on the host, so that nothing waits for a device
        self._pushed = 0

    def extra_repr(self) -> str:
        return f"{self.size}, features={self.features}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # a process group cannot be copied
        memo[id(self.group)] = self.group
        other = memo[id(self)] = object.__new__(type(self))
        other.__dict__.update(deepcopy(self.__dict__, memo))
        return other

    def __len__(self) -> int:
        return min(self._pushed, self.size)

    @property
    def keys(self) -> Tensor:
        """This rank's share [H, D] of the keys, every W-th of them; [0, D] at first."""
        return self._share(self._keys)

    @property
    def ids(self) -> Tensor:
        """The ids [H] of these keys, for `key_ids` behind those of the batch."""
        return self._share(self._ids)

    def _share(self, held: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            # break the graph: the number of keys would be a constant in it, and each push would compile it anew
            share: Callable[[Tensor], Tensor] = torch.compiler.disable(self._share)
            return share(held)
        W = collectives.size(self.group)
        # a copy, because the next push overwrites what a graph may still read
        return held[: len(self)][collectives.rank(self.group) if W > 1 else 0 :: W].clone()

    @torch.no_grad()
    def push(self, key: Tensor, ids: Tensor | None = None) -> None:
        """Push this rank's keys [n, D], detached, with their ids [n]; the oldest leave. All ranks push together.

        NaN is held as any other number, because a look at the keys would wait for the device.
        """
        if torch.compiler.is_dynamo_compiling():
            torch.compiler.disable(self.push)(key, ids)
            return
        error = self._error(key, ids)
        counts = [0 if error is not None else len(key)]
        W = collectives.size(self.group)
        if W > 1:
            agreed = {
                "queue": [self.size, self.features], "dtype of the queue": str(self._keys.dtype),
                "keys pushed before": self._pushed, "ids": ids is not None,
            }  # fmt: skip
            statement = agreed if error is None else {"error": str(error)}
            counts = [n for (n,) in consistency.tally(self.group, statement, counts)]
        if error is not None:
            raise error
        if sum(counts) > self.size:
            rule = f"have at most {self.size} rows over all ranks, the size of the queue"
            raise invalid("key", rule, sum(counts), "Make the queue larger.")
        key, ids = key.detach().to(self._keys.dtype), None if ids is None else ids.long()
        if W > 1:
            key = collectives.gather_rows(key.contiguous(), counts, self.group)
            # on all ranks or on none
            ids = None if ids is None else collectives.gather_rows(ids.contiguous(), counts, self.group)
        places = torch.arange(self._pushed, self._pushed + len(key), device=self._keys.device) % self.size
        self._keys[places] = key
        self._ids[places] = NOBODY if ids is None else ids
        self._pushed += len(key)

    def _error(self, key: Tensor, ids: Tensor | None) -> ValueError | None:
        if not isinstance(key, Tensor) or key.ndim != 2 or key.shape[1] != self.features:
            rule = f"be a tensor [n, {self.features}]"
            return invalid("key", rule, shape_or_type(key), "Pass the features of the keys.")
        if not key.is_floating_point():
            return invalid("key", "be floating point", key.dtype, "Convert it with .float().")
        for name, x in (("key", key), ("ids", ids)):
            if isinstance(x, Tensor) and x.device != self._keys.device:
                got = f"{x.device} and {self._keys.device}"
                return invalid(name, "be on the device of the queue", got, "Move the queue with .to(device).")
        # truth values would be the ids 0 and 1
        whole = isinstance(ids, Tensor) and not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
        if ids is not None and (not whole or ids.shape != key.shape[:1]):
            got = f"shape {list(ids.shape)}, {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
            return invalid("ids", f"be integers of shape [{len(key)}], one for each key", got, "Or leave them out.")
        return None

    def get_extra_state(self) -> Tensor:
        """The number of keys pushed so far, part of the `state_dict`."""
        return torch.tensor(self._pushed)

    def set_extra_state(self, state: Tensor) -> None:
        """Take the number of keys pushed so far out of a `state_dict`."""
        self._pushed = int(state)
