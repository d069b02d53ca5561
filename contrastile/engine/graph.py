"""Small batches on a CUDA device: a call captured once as a graph, and replayed.

A way of the plan to compute the gradients with the loss (`Plan.at_once`). A batch of 4,096 rows keeps a GPU busy for
0.2 ms, but its thirty launches keep the host busy for six times that, and with ids, labels or listed positives there
are sixty. From the third call of a plan on all of them are one launch: features, numbers, labels and weights are copied
to the memory that the graph reads. The loss is copied from the memory that it writes; gradient sums stay there until
their backward (`Held`), so that calls are independent of each other. Kernels, their order and the bits are those of the
calls before.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from contrastile._torch import backward_is_kept, copy_each_
from contrastile._types import Reduction
from contrastile.engine.operation import Call, MakeTiles, Plan, with_gradients
from contrastile.exchange.base import Exchange
from contrastile.losses.base import Shard
from contrastile.tiles.base import Accumulated, Tiles, joined

logger = logging.getLogger("contrastile")

# rows of a small batch's shorter side: longer ones keep the device busy for longer than the host
MOST_ROWS = 16384
# bytes of the strip of gradients, which a graph keeps
MOST_BYTES = 2**29
# calls of a plan before its capture, which also compile its kernels
CALLS = 2
# graphs kept, and the bytes that they keep together: those used last
KEPT, KEPT_BYTES = 8, 2**30
NEVER = -(2**62)
LABELS = ("positives", "labels", "ids", "numbers")


def small(rows: Shard, cols: Shard, reduction: Reduction, exchange: Exchange, tiles: MakeTiles) -> bool:
    """A call is replayed: fused kernels, one process, and no more pairs than the host can launch as fast."""
    # float32 features have three 16-bit pieces
    strip = len(rows) * len(cols) * (6 if rows.features.dtype == torch.float32 else 2)
    return (
        rows.features.is_cuda
        and min(len(rows), len(cols)) <= MOST_ROWS
        and strip <= MOST_BYTES
        and getattr(tiles, "capturable", False)
        and len(exchange.layout) == 1
        and reduction != "none"
    )


def _labels(call: Call) -> list[Tensor]:
    """The tensors beside scale, bias and features that the tiles read."""
    named = [x for shard in (call.rows, call.cols) for x in (*(getattr(shard, name) for name in LABELS), *shard.guides)]
    return [x for x in (*named, call.weights) if x is not None]


def _relabelled(call: Call, labels: Sequence[Tensor]) -> Call:
    """The call with these tensors, in the order of `_labels`."""
    following = iter(labels)

    def relabelled(shard: Shard) -> Shard:
        given: dict[str, Any] = {name: next(following) for name in LABELS if getattr(shard, name) is not None}
        return replace(shard, **given, guides=tuple([next(following) for _ in shard.guides]))

    rows, cols = relabelled(call.rows), relabelled(call.cols)
    return replace(call, rows=rows, cols=cols, weights=None if call.weights is None else next(following))


class Held:
    """Gradient sums of one call in a graph's memory, until their backward.

    The backward reads them in `with held as sums:`. A replay before it, or before a second one, has them copied away.
    """

    def __init__(self, accumulated: Accumulated, *, joined: bool) -> None:
        self._accumulated: Accumulated | None = accumulated
        self._joined = joined

    def move(self) -> None:
        """Copy the sums to memory of their own."""
        if self._accumulated is None:
            return
        u, v, sums = self._accumulated
        if self._joined and u is not None and v is not None:
            u, v = joined(u, v).clone().split([len(u), len(v)])
        else:
            u, v = (None if x is None else x.clone() for x in (u, v))
        self._accumulated = Accumulated(u, v, sums.clone())

    def __enter__(self) -> Accumulated:
        assert self._accumulated is not None
        # no replay in another thread while the memory is read
        _lock.acquire()
        return self._accumulated

    def __exit__(self, kind: object, *error: object) -> None:
        # a backward that failed may be tried again
        if kind is None and not backward_is_kept():
            self._accumulated = None
        _lock.release()


def _nothing() -> None:
    """The reference of a graph that was not called yet."""


class _Graph:
    """A captured call, the inputs and labels that it reads and the outputs that it writes."""

    def __init__(self, call: Call, inputs: Sequence[Tensor | None], wanted: Sequence[bool]) -> None:
        self.inputs = [None if x is None else x.detach().clone() for x in inputs]
        self.labels = [x.clone() for x in _labels(call)]
        # tensors of one type are copied in one launch
        read = [*[own for own in self.inputs if own is not None], *self.labels]
        self.types = {x.dtype: [i for i, other in enumerate(read) if other.dtype == x.dtype] for x in read}
        self.read = {dtype: [read[i] for i in indices] for dtype, indices in self.types.items()}
        self.graph = torch.cuda.CUDAGraph()
        self.stream = torch.cuda.current_stream()
        # the results of the latest call, as long as somebody may want their backward
        self.held: Callable[[], Held | None] = _nothing
        call, apart = _relabelled(call, self.labels), _stream(torch.cuda.current_device())
        apart.wait_stream(self.stream)
        scale, bias, *features = self.inputs
        assert scale is not None
        given = [x for x in features if x is not None]
        before = torch.cuda.memory_reserved()
        with torch.cuda.stream(apart):
            # other threads may use the device meanwhile
            self.graph.capture_begin(capture_error_mode="thread_local")
            try:
                tiles = call.tiles(scale, bias)
                tiles.joined = True
                self.value, (u, v, sums) = with_gradients(call, tiles, scale, bias, given, wanted)
                # both sums here: the backward's own would be four launches
                sums = torch.stack(tiles.pair_sums(sums, *call.shards(given), u, v, wanted[0]))
            finally:
                self.graph.capture_end()
        tiles.joined = tiles.joined and u is not None and v is not None
        self.joined, self.accumulated = tiles.joined, Accumulated(u, v, sums)
        # the memory that the graph keeps
        self.bytes = torch.cuda.memory_reserved() - before
        self.stream.wait_stream(apart)

    def __call__(self, call: Call, tiles: Tiles, inputs: Sequence[Tensor | None]) -> tuple[Tensor, Accumulated]:
        stream = torch.cuda.current_stream()
        if stream != self.stream:
            # another stream may still read the results of the last call
            stream.wait_stream(self.stream)
            self.stream = stream
        given = [*[x.detach() for x in inputs if x is not None], *_labels(call)]
        for dtype, indices in self.types.items():
            copy_each_(self.read[dtype], [given[i] for i in indices])
        self.graph.replay()
        tiles.joined, tiles.summed = self.joined, True
        # the loss in memory of its own: a user may change it in place
        return self.value.clone(), self.accumulated


_graphs: OrderedDict[tuple[Plan, str], _Graph] = OrderedDict()
_calls: WeakKeyDictionary[Plan, int] = WeakKeyDictionary()
_streams: dict[int, torch.cuda.Stream] = {}
_lock = threading.Lock()


def _stream(device: int) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def replayed(
    call: Call, tiles: Tiles, scale: Tensor, bias: Tensor | None, inputs: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Tensor, Accumulated | Held]:
    """`with_gradients`, as a graph once the plan has been called often enough to pay for the capture."""
    if len(call.exchange.layout) == 1 and not torch.cuda.is_current_stream_capturing():
        with _lock, _on(scale.device):
            every = (scale, bias, *inputs)
            graph = _graph(call, every, wanted)
            if graph is not None:
                before = graph.held()
                if before is not None:
                    # on the stream that its backward reads it on
                    with torch.cuda.stream(graph.stream):
                        before.move()
                value, accumulated = graph(call, tiles, every)
                held = Held(accumulated, joined=tiles.joined)
                graph.held = ref(held)
                return value, held
    return with_gradients(call, tiles, scale, bias, inputs, wanted)


def _graph(call: Call, inputs: Sequence[Tensor | None], wanted: Sequence[bool]) -> _Graph | None:
    """The plan's graph, captured if need be; None if it was called too seldom, or if that failed."""
    # torch's precision of float32 products decides which kernels run
    key = call.plan, torch.backends.cuda.matmul.fp32_precision
    if key in _graphs:
        _graphs.move_to_end(key)
        return _graphs[key]
    _calls[call.plan] = _calls.get(call.plan, 0) + 1
    if _calls[call.plan] <= CALLS:
        return None
    try:
        _graphs[key] = graph = _Graph(call, inputs, wanted)
    except RuntimeError as error:
        logger.info("a small call is not replayed: %s", error)
        _calls[call.plan] = NEVER
        return None
    while len(_graphs) > KEPT or (len(_graphs) > 1 and sum(one.bytes for one in _graphs.values()) > KEPT_BYTES):
        # a plan whose graph is dropped has to be called often again
        _calls.pop(_graphs.popitem(last=False)[0][0], None)
    return graph


def _on(device: torch.device) -> AbstractContextManager[object]:
    return nullcontext() if device.index in (None, torch.cuda.current_device()) else torch.cuda.device(device)
