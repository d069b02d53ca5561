"""How many graphs of a step fit into memory, which of them are worth keeping, and which give way.

Beside `cache.py`, used by `first_pass.py` and `fitting.py`. What a graph holds is measured on the first one;
what is free is asked of the device. If that was too much after all, graphs give way one by one: whoever runs out of
memory here takes one from any call of `encode`, whose backward then encodes that sub-batch again.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from contrastile._types import accumulator
from contrastile.offload import allocated, free_memory

T = TypeVar("T")
# a sub-batch's outputs with their graph, and the inputs that want a gradient
Graph = tuple[list[Any], list[Tensor]]

AUTO: Literal["auto"] = "auto"
# of an accelerator's memory, left alone: fragmentation, and what nobody counts
MARGIN = 0.06
# of an accelerator's memory, what a loss takes beside features, gradients and accumulators
WORKSPACE = 1 / 64
# a CPU's memory has other users too: more is left alone, and of the rest a share is taken
MARGIN_CPU, SHARE_CPU = 0.1, 0.6
# beside the graphs that are kept, room for one more, but not more than this share of the memory: what the backward of
# a graph needs while the graph is still there, and another tower's sub-batch
BESIDE = 1 / 10
# what a trained head behind a frozen trunk keeps at most, in features: the trunk's, and a hidden layer or two
HEAD = 16

logger = logging.getLogger("contrastile")


class Graphs(dict[int, Graph]):
    """The graphs that a call of `encode` keeps, by sub-batch, of `count`. If `yielding`, anyone may take them."""

    def __init__(self, count: int, device: torch.device | None, *, yielding: bool) -> None:
        super().__init__()
        self.count, self.device, self.yielding = count, device, yielding
        if yielding:
            _calling[next(_calls)] = self

    def give_up(self, index: int) -> None:
        """Frees a graph, if it is there; everything up to `index` goes without."""
        self.pop(index, None)
        kept = self.count - index - 1
        logger.warning("encode: out of memory; %d of %d sub-batches keep their graph", kept, self.count)


_calls = itertools.count()
# by the order of the calls
_calling: WeakValueDictionary[int, Graphs] = WeakValueDictionary()


def with_room(run: Callable[[], T], device: torch.device | None, reset: Callable[[], None]) -> T:
    """run(), and reset() and again after each graph that gives way, as long as memory runs out and there is one.

    The first call's graphs go first, because its backward comes last, and of these the oldest for the same reason.
    """
    while True:
        try:
            return run()
        except torch.OutOfMemoryError:
            graphs = next((g for _, g in sorted(_calling.items()) if g and g.device == device), None)
            if graphs is None:
                raise
            graphs.give_up(min(graphs))
            reset()


class Retention:
    """Which sub-batches of one call keep their graph: the last `retain`, or of "auto" as many as fit.

    `held` are tensors that stay in memory whatever happens: parameters, buffers and inputs. `thrifty`: graphs that are
    smaller than a sub-batch's inputs, or than HEAD times its features, are all kept. Those of a tower whose trunk is
    frozen are, because they begin behind it: they hold the trunk's features, and no trunk runs twice. `most`: the
    largest of a number over ranks that must run equally often.
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
        self.held = {x.untyped_storage()._cdata for x in held if _has_storage(x)} if self.auto or thrifty else set()

    def keeps(self, index: int) -> bool:
        """Whether the sub-batch keeps its graph."""
        return index >= self.first

    def tries(self, index: int) -> bool:
        """Whether the sub-batch runs with a graph, to keep it or to see how large it is."""
        return self.keeps(index) or (self.thrifty and index == 0)

    def weighed(self, index: int, run: Callable[[], Graph], inputs: int, later: Callable[[Graph], int]) -> Graph:
        """run(), the graph of a sub-batch; the first one shows how many fit.

        `inputs`: bytes of the sub-batch's inputs. `later`: bytes that the rest of the step takes beside graphs.
        """
        if index > 0 or not (self.auto or self.thrifty):
            return run()
        room, before = spare_bytes(self.device), allocated(self.device)
        with counting() as kept:
            graph = run()
        saved = sum(size for storage, size in kept.items() if storage not in self.held)
        # what the device has handed out: also what is not saved by autograd's own means, and whole blocks
        each = max(1, saved, allocated(self.device) - before)
        features = sum(out.nbytes for out in graph[0] if isinstance(out, Tensor))
        if self.thrifty and saved <= max(inputs, HEAD * features):
            self.first = 0
        elif self.auto:
            beside = min(each, int(BESIDE * free_memory(self.device)[1]))
            self.first = max(0, self.count - max(0, (room - later(graph) - beside) // each))
        self.first = self.most(self.first)
        return graph

    def gave_up(self, index: int) -> None:
        """There was no room after all: everything up to `index` goes without."""
        self.first, self.thrifty = max(self.first, index + 1), False


def later_bytes(parameters: Sequence[Tensor], inputs: int, outputs: Sequence[Any], times: float) -> int:
    """What a step takes after its first sub-batch, beside graphs: features, gradients, running sums.

    `inputs`: bytes of those that want a gradient. `outputs` are the first sub-batch's; a batch has `times` as many.
    """
    total = inputs
    for x in parameters:
        wide = accumulator(x.dtype).itemsize
        # the running sum, a backward's own gradient, and the sum in the parameter's type
        total += x.numel() * (wide + x.dtype.itemsize * (1 if wide == x.dtype.itemsize else 2))
    for x in outputs:
        if isinstance(x, Tensor) and x.requires_grad:
            # features, their gradient, and the loss's accumulator
            total += int(times * x.numel()) * (2 * x.dtype.itemsize + accumulator(x.dtype).itemsize)
    return total


def _has_storage(x: Tensor) -> bool:
    """Whether all numbers lie in one place; those of a sparse tensor do not, and are not counted."""
    return x.layout == torch.strided


@contextmanager
def counting() -> Iterator[dict[int, int]]:
    """Bytes of every storage that autograd saves meanwhile, by storage. Meaningful while the graph lives."""
    kept: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        if _has_storage(saved):
            storage = saved.untyped_storage()
            # its address is another each time that FSDP2 gathers it
            kept[storage._cdata] = storage.nbytes()
        # an output of its own node would hold the graph in a cycle: one that is dropped would stay for ever
        return saved.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        yield kept


def kept_bytes(forward: Callable[[], object]) -> int:
    """The bytes that autograd keeps for the backward of `forward()`, every storage counted once."""
    with counting() as kept:
        # the graph lives until the sum is taken, so that no storage is freed and another takes its name
        graph = forward()
    total = sum(kept.values())
    del graph
    return total


def bytes_per_example(
    forward: Callable[[int], object],
    sub_batch: int,
    measure: Callable[[Callable[[], object]], int] = kept_bytes,
) -> int:
    """What one more example adds to the graph: the slope between half a sub-batch and a whole one.

    `forward(n)` encodes n examples. What does not grow with n (parameters, their copies in another dtype) cancels.
    """
    whole = max(sub_batch, 2)
    half = whole // 2
    return (measure(lambda: forward(whole)) - measure(lambda: forward(half))) // (whole - half)


def spare_bytes(device: torch.device | None) -> int:
    """What may be taken: on an accelerator all that is free but a margin and a loss's workspace, else a share of it."""
    free, total = free_memory(device)
    if device is None or device.type == "cpu":
        return int(SHARE_CPU * max(0.0, free - MARGIN_CPU * total))
    return max(0, int(free - (MARGIN + WORKSPACE) * total))
