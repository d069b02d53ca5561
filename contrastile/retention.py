"""How much of an encoder's work fits into memory: the graphs worth keeping, and the largest sub-batch.

Ground of the house, used by `cache.py` where the user says "auto". What a graph holds is measured by asking autograd
for everything that it saves; what is free is asked of the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from contrastile.offload import free_memory

AUTO: Literal["auto"] = "auto"
# of what is free beyond the reserve, one call of `encode` may keep this much: the other towers want some as well
SHARE = 0.6
# of all that the device has, left alone: the loss, the optimizer's temporaries, fragmentation
RESERVE = 0.1
# a backward holds about as much again as the graph that it consumes
BACKWARD = 2.0

logger = logging.getLogger("contrastile")


class Retention:
    """Which sub-batches of one call keep their graph: the last `retain`, or of "auto" as many as fit.

    `held` are tensors that stay in memory whatever happens: parameters and inputs. `thrifty`: graphs that are smaller
    than a sub-batch's inputs are all kept. So are those of a tower whose trunk is frozen, because they begin behind it:
    they hold the trunk's features, and no trunk runs twice. `most`: the largest of a number over ranks that must run
    equally often.
    """

    def __init__(
        self,
        retain: int | Literal["auto"],
        count: int,
        device: torch.device | None,
        *,
        held: Sequence[Tensor] = (),
        thrifty: bool = False,
        most: Callable[[int], int] = int,
    ) -> None:
        self.most = most
        self.auto, self.thrifty = retain == AUTO, thrifty
        self.count, self.device = count, device
        self.first = 0 if retain == AUTO else count - retain
        self.held = {tensor.untyped_storage().data_ptr() for tensor in held} if self.auto or thrifty else set()

    def keeps(self, index: int) -> bool:
        """Whether the sub-batch keeps its graph."""
        return index >= self.first

    def tries(self, index: int) -> bool:
        """Whether the sub-batch runs with a graph, to keep it or to see how large it is."""
        return self.keeps(index) or (self.thrifty and index == 0)

    @contextmanager
    def weighing(self, index: int, inputs: int) -> Iterator[None]:
        """Run the first sub-batch in here, with its graph: it shows how many fit. `inputs`: its inputs' bytes."""
        if index > 0 or not (self.auto or self.thrifty):
            yield
            return
        free = spare_bytes(self.device)
        with counting() as kept:
            yield
        each = max(1, sum(size for address, size in kept.items() if address not in self.held))
        if self.thrifty and each <= inputs:
            self.first = 0
        elif self.auto:
            # one more for the sub-batch that is being replayed or back-propagated
            self.first = max(0, self.count - max(0, int(SHARE * free / each) - 1))
        self.first = self.most(self.first)

    def gave_up(self, index: int) -> None:
        """There was no room after all: everything up to `index` goes without."""
        self.first = index + 1
        logger.warning(
            "encode: out of memory; %d of %d sub-batches keep their graph", self.count - index - 1, self.count
        )


@contextmanager
def counting() -> Iterator[dict[int, int]]:
    """Bytes of every storage that autograd saves meanwhile, by address. Meaningful while the graph lives."""
    kept: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        # an output of its own node would hold the graph in a cycle: one that is dropped would stay for ever
        return saved.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        yield kept


def kept_bytes(forward: Callable[[], object]) -> int:
    """The bytes that autograd keeps for the backward of `forward()`, every storage counted once."""
    with counting() as kept:
        # the graph lives until the sum is taken, so that no storage is freed and its address used again
        graph = forward()
    total = sum(kept.values())
    del graph
    return total


def bytes_per_example(forward: Callable[[int], object], sub_batch: int) -> int:
    """What one more example adds to the graph: the slope between half a sub-batch and a whole one.

    `forward(n)` encodes n examples. What does not grow with n (parameters, their copies in another dtype) cancels.
    """
    whole = max(sub_batch, 2)
    half = whole // 2
    return (kept_bytes(lambda: forward(whole)) - kept_bytes(lambda: forward(half))) // (whole - half)


def spare_bytes(device: torch.device | None) -> int:
    """What the device has free beyond the reserve."""
    free, total = free_memory(device)
    return max(0, free - int(RESERVE * total))


# by an encoder's first parameter: what was found for inputs of some shapes
_found = WeakIdKeyDictionary()


def largest_sub_batch(
    work: Callable[[int, bool], object],
    batch: int,
    device: torch.device | None,
    *,
    key: Tensor | None,
    shapes: object,
    most: Callable[[int], int] = int,
) -> int:
    """The largest sub-batch whose forward and backward fit, found once for an encoder and its inputs' shapes.

    `work(n, backward)` encodes the first n examples with a graph, and back-propagates if asked. The size comes from
    what an example adds to the graph; on a CUDA device it is then tried, and halved until it fits. Of several ranks
    that must run equally often, the smallest size is everybody's.
    """
    known = _found.setdefault(key, {}) if key is not None else {}
    size = known.get(shapes)
    if size is None:
        few = min(batch, 8)
        each = max(1, bytes_per_example(lambda n: work(n, False), few) if few > 1 else 1)
        size = max(1, min(batch, int(SHARE * spare_bytes(device) / (BACKWARD * each))))
        while device is not None and device.type == "cuda":
            try:
                work(size, True)
                break
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                size //= 2
        known[shapes] = size = -most(-size)
        logger.info("encode: sub-batches of %d", size)
    return min(size, max(batch, 1))
