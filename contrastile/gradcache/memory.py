"""Memory: the bytes of computations and their graphs, and the graphs that `encode` retains where there is room.

Used by `forward.py`, by `auto.py`, and by `tiles/scored.py` for the size of a tile. The size of a graph is measured on
the first one; the free memory is read from the device. If too many graphs were retained, they are released one by one:
any call of `encode` that runs out of memory releases one, and the backward of its call encodes that sub-batch again.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from contrastile._errors import logger
from contrastile._torch import DispatchMode, pytree, storage_id, version
from contrastile._types import accumulator
from contrastile.offload import allocated, default_workspace, free_memory

# a sub-batch's outputs with their graph, and its inputs that want a gradient
Graph = tuple[list[Any], list[Tensor]]

AUTO: Literal["auto"] = "auto"


class Releasable(int):
    """A number of graphs to retain as long as memory lasts; a plain number is kept, or the step fails."""


# share of an accelerator's memory left free, for fragmentation and for allocations that are not counted
MARGIN = 0.06
# a CPU's memory has other users too: the share of it left free, and the share of the rest that is used
MARGIN_CPU, SHARE_CPU = 0.1, 0.6
# room beside the retained graphs: that of one more graph, at most this share of the memory; a backward needs it while
# graphs are there, and so does a sub-batch of another tower
BESIDE = 1 / 10
# tensors in the accumulator's dtype that vectors of tokens take beside features, gradient and accumulator: their
# normalised copies, and what the backward of the normalisation holds
TOKEN_TENSORS = 6
# size of the graph of a trained head behind a frozen trunk, in features: the trunk's, and a hidden layer or two
HEAD = 16


def footprint(run: Callable[[], object]) -> int:
    """The most bytes of tensors made by `run` that are alive at the same time, on any device. Its result is dropped.

    Results of PyTorch's operations count until they are freed. Tensors made before, and the workspace of an operation,
    do not count.

    >>> footprint(lambda: torch.ones(1000).exp().sum())
    8000
    """
    with as_written(), _Allocations() as allocations:
        run()
    # tensors made before live on
    allocations.living.clear()
    return allocations.most


def as_written() -> AbstractContextManager[Any]:
    """A context in which functions run uncompiled: a trial of a few rows is not worth a compilation."""
    # importing torch._dynamo takes seconds; where it was not imported, nothing is compiled
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class _Allocations(DispatchMode):
    """Follow every storage that an operation returns, until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.present = self.most = 0
        # a reference to each storage, which `_forget` follows
        self.living: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs), counted=False)
        out = func(*args, **(kwargs or {}))
        self._note(out, counted=True)
        return out

    def _note(self, tree: Any, *, counted: bool) -> None:
        for x in pytree.tree_leaves(tree):
            if isinstance(x, Tensor) and _has_storage(x) and (key := storage_id(x)) not in self.living:
                storage = x.untyped_storage()
                size = storage.nbytes() if counted else 0
                self.present += size
                self.most = max(self.most, self.present)
                self.living[key] = weakref.ref(storage, partial(self._forget, key, size))

    def _forget(self, key: int, size: int, _storage: object) -> None:
        self.living.pop(key, None)
        self.present -= size


@contextmanager
def counting() -> Iterator[dict[int, int]]:
    """Count the bytes of every storage that autograd saves inside, by storage. Valid while the graph lives.

    As without the count, the backward raises RuntimeError for a saved tensor that was written over.
    """
    sizes: dict[int, int] = {}

    def note(saved: Tensor) -> tuple[Tensor, int]:
        if _has_storage(saved):
            sizes[storage_id(saved)] = saved.untyped_storage().nbytes()
        # detached: an output saved by its own node would be a reference cycle, and a dropped graph would stay alive
        held = saved.detach()
        return held, version(held)

    def unchanged(noted: tuple[Tensor, int]) -> Tensor:
        # autograd leaves this check out where it has hooks
        held, before = noted
        if version(held) != before:
            # torch's own words
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {list(held.shape)} is at version {version(held)}; expected version {before} instead."
            )
        return held

    hooks: list[Callable[[Any], Any]] = [note, unchanged]
    if "torch._dynamo" in sys.modules:
        # code that runs compiled would compile them too, with the version of a tensor as a constant
        hooks = [torch.compiler.disable(hook) for hook in hooks]
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        yield sizes


def graph_bytes(forward: Callable[[], object]) -> int:
    """The bytes that autograd keeps for the backward of `forward()`, every storage counted once."""
    with counting() as sizes:
        # the graph lives until the sum is taken: a freed storage's identity could be that of another
        graph = forward()
    total = sum(sizes.values())
    del graph
    return total


def bytes_per_example(
    forward: Callable[[int], object], sub_batch: int, measure: Callable[[Callable[[], object]], int] = graph_bytes
) -> int:
    """Bytes that one more example adds: the slope between half a sub-batch and a whole one.

    `forward(n)` encodes n examples. Bytes that do not grow with n (parameters, their copies in another dtype) cancel.
    """
    whole = max(sub_batch, 2)
    half = whole // 2
    return (measure(lambda: forward(whole)) - measure(lambda: forward(half))) // (whole - half)


def spare_bytes(device: torch.device | None) -> int:
    """Bytes that may be used: the free ones less a margin and the workspace of a loss; on a CPU a share of them."""
    free, total = free_memory(device)
    if device is None or device.type == "cpu":
        return int(SHARE_CPU * max(0.0, free - MARGIN_CPU * total))
    return max(0, int(free - MARGIN * total) - default_workspace(total))


def later_bytes(
    parameters: Sequence[Tensor], inputs: int, outputs: Sequence[Any], times: float, packed: Sequence[int] = ()
) -> int:
    """Bytes that a step takes after its first sub-batch, beside graphs: features, gradients, running sums.

    `inputs`: bytes of those that want a gradient. `outputs`: the first sub-batch's; a batch has `times` as many.
    `packed`: positions of packed ones, which have one axis fewer.
    """
    total = inputs
    for x in parameters:
        wide = accumulator(x.dtype).itemsize
        # the running sum, a backward's own gradient, and the sum in the parameter's dtype
        total += x.numel() * (wide + x.dtype.itemsize * (1 if wide == x.dtype.itemsize else 2))
    for at, x in enumerate(outputs):
        if isinstance(x, Tensor) and x.requires_grad:
            # features, their gradient, and the loss's accumulator; vectors of tokens have more than two axes
            wide = accumulator(x.dtype).itemsize * (1 + TOKEN_TENSORS * (x.ndim + (at in packed) > 2))
            total += int(times * x.numel()) * (2 * x.dtype.itemsize + wide)
    return total


def retained_graphs(count: int, spare: int, others: int, each: int) -> int:
    """Graphs of `each` bytes, of `count` sub-batches, that `spare` bytes have room for beside `others`."""
    return min(count, max(0, (spare - others) // each))


class RetainedGraphs(dict[int, Graph]):
    """Graphs that one call of `encode` retains from its first pass, by sub-batch.

    retain: number of the `count` sub-batches, the last ones, that retain their graph; "auto": as many as fit.
    resident: lists tensors that are in memory in any case: parameters, buffers, inputs. frugal: retain all graphs if
    the first one is smaller than the inputs of its sub-batch, or than HEAD times its features. Graphs behind a frozen
    trunk are so small, because they hold only the trunk's features. releasable: any call that runs out of memory may
    release them. most: the largest of a number over ranks that must run equally often.
    """

    def __init__(
        self, retain: int | Literal["auto"], count: int, device: torch.device | None, *,
        resident: Callable[[], Sequence[Tensor]] = tuple, frugal: bool = False, releasable: bool = False,
        most: Callable[[int], int] = int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.auto, self.frugal, self.releasable = retain == AUTO, frugal, releasable
        self.count, self.device, self.most = count, device, most
        # bytes of each of the graphs that are retained because there was room; 0 for all others
        self.each = 0
        # the first sub-batch that retains its graph, as all behind it do
        self.first = 0 if retain == AUTO else count - retain
        self.resident = {storage_id(x) for x in resident() if _has_storage(x)} if self.auto or frugal else set()
        if releasable:
            _calls[next(_numbers)] = self

    def retains(self, index: int) -> bool:
        """Return whether the sub-batch retains its graph."""
        return index >= self.first

    def builds(self, index: int) -> bool:
        """Return whether the sub-batch runs with a graph, to retain it or to measure it."""
        return self.retains(index) or (self.frugal and index == 0)

    def measured(
        self, index: int, run: Callable[[], Graph], inputs: int, later: Callable[[Graph], int],
        gathered: Callable[[], int] = int,
    ) -> Graph:  # fmt: skip
        """The graph of a sub-batch, made by `run`. The size of the first one decides how many are retained.

        inputs: bytes of the sub-batch's inputs. later: bytes that the rest of the step takes beside graphs. gathered:
        bytes of gathered weights, which may stay for all sub-batches.
        """
        if index > 0 or not (self.auto or self.frugal):
            return run()
        spare, before = spare_bytes(self.device) + gathered(), allocated(self.device) - gathered()
        with counting() as sizes:
            graph = run()
        saved = sum(size for storage, size in sizes.items() if storage not in self.resident)
        # the device counts whole blocks, and memory that autograd does not save
        each = max(1, saved, allocated(self.device) - gathered() - before)
        features = sum(out.nbytes for out in graph[0] if isinstance(out, Tensor))
        # without rows there is nothing to measure, and the other ranks decide
        if self.frugal and (features == 0 or saved <= max(inputs, HEAD * features)):
            self.first = 0
        elif self.auto:
            beside = min(each, int(BESIDE * free_memory(self.device)[1]))
            spare, others = spare - gathered(), later(graph) + beside
            # earlier calls did not know what the features of this one take; graphs behind a frozen trunk are too small
            while self.releasable and spare < others and (earlier := _oldest(self.device, sized=True)):
                earlier.pop(min(earlier))
                spare += earlier.each
            self.first, self.each = self.count - retained_graphs(self.count, spare, others, each), each
        self.first = self.most(self.first)
        return graph

    def retain_fewer(self, index: int) -> None:
        """Retain fewer graphs, after sub-batch `index` ran out of memory."""
        self.first, self.frugal = max(self.first, min(self, default=index) + 1), False
        self.release(self.first - 1)

    def release(self, index: int) -> None:
        """Release the graph of sub-batch `index`, if it is there; those before it have none."""
        self.pop(index, None)
        left = self.count - index - 1
        logger.warning("encode: out of memory; %d of %d sub-batches keep their graph", left, self.count)


_numbers = itertools.count()
# calls whose graphs may be released, in the order of the calls
_calls: weakref.WeakValueDictionary[int, RetainedGraphs] = weakref.WeakValueDictionary()


def free_a_graph(device: torch.device | None) -> bool:
    """Release one graph on the device; return False if there is none.

    It is the oldest graph of the first call, whose backward comes last.
    """
    if (graphs := _oldest(device)) is None:
        return False
    graphs.release(min(graphs))
    return True


def _oldest(device: torch.device | None, *, sized: bool = False) -> RetainedGraphs | None:
    """The graphs of the first call that has some on the device; sized: of those whose `each` is known."""
    calls = (graphs for _, graphs in sorted(_calls.items()) if graphs and graphs.device == device)
    return next((graphs for graphs in calls if graphs.each or not sized), None)


def _has_storage(x: Tensor) -> bool:
    """Return whether the tensor has one storage. A sparse tensor has several, and is not counted."""
    return x.layout == torch.strided
