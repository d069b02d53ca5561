"""Small batches on a CUDA device: a call captured once as a graph, and replayed.

A batch of 4,096 rows keeps a GPU busy for 0.2 ms, but its thirty launches keep the host busy for six times that, and
with ids, labels or listed positives there are sixty. From the third call of a plan on they are two launches in the
forward, one that copies features, numbers, labels and weights to the memory that the graph reads, and the graph itself,
and one or two in the backward. Gradient sums stay in the graph's memory until their backward (`Held`): calls are
independent of each other. Ranks of few rows have graphs between their transfers, but copies within a node are in them.

`small.py` has the operations that replay them.
"""

from __future__ import annotations

import logging
import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from contrastile._torch import backward_is_repeatable, current_stream_address, saving_is_hooked
from contrastile.distributed.collectives import captured_call
from contrastile.distributed.failure import LostRankError, state_of
from contrastile.engine.operation import Call, MakeTiles, Plan, with_gradients, without_autocast
from contrastile.engine.problem import PLAIN, Problem
from contrastile.exchange.base import Exchange
from contrastile.gradcache.batching import rounded_length
from contrastile.losses.base import Shard
from contrastile.scorers import padded_to
from contrastile.tiles.base import Accumulated

logger = logging.getLogger("contrastile")

# rows of a small batch's shorter side: longer ones keep the device busy for longer than the host
MOST_GRAPH_ROWS = 16384
# bytes that a graph keeps for the pairs (`Tiles.captured_bytes`)
MOST_GRAPH_BYTES = 2**29
# calls of a plan before its capture, which also compile its kernels, and before the next capture of a dropped graph;
# a plan whose capture failed counts from NEVER
CALLS_BEFORE_CAPTURE, CALLS_BEFORE_RECAPTURE, NEVER = 2, 32, -(2**62)
# graphs kept, those used last, and the bytes that they may keep together with copies of inputs, or the workspace of the
# latest one if that is larger; a single graph may take more
MOST_GRAPHS, GRAPHS_BYTES = 8, 2**30
# seconds that a call of one process waits for another thread's capture; then it is computed without a graph
PATIENCE = 1.0
# a graph's plan, the precision of its float32 products, and whether its tensors are those of inference mode
Key = tuple[Plan, str | None, bool]
LABELS = ("positives", "labels", "ids", "numbers", "targets", "own_excluded")
# numbers that a graph holds as tensors; tokens up to which texts of several lengths share a graph
MOST_NUMBERS, MOST_ROUNDED = 8, 4096


def replayable(problem: Problem, exchange: Exchange) -> bool:
    """Return whether calls like this one may be replayed, by the facts that all ranks share.

    They then compute the gradients with the loss, also on a rank that replays none.
    """
    rows, alone = problem.rows, len(exchange.layout) == 1
    return (
        rows.features.is_cuda
        and (alone or problem.scorer is None)
        and exchange.replayable(problem.cols.features.shape[-1], problem.dtype)
        and (alone or problem.options.reduction != "none")
        and (rows.own is None or not problem.loss.pairwise)
    )


def small(problem: Problem, exchange: Exchange, tiles: MakeTiles) -> bool:
    """Return whether a replayable call is replayed here: fused kernels, few rows, and little memory for pairs."""
    # tiles of a scorer come as a partial application of their class
    kind: Any = getattr(tiles, "func", tiles)
    tensors = (problem.scale, problem.bias, *problem.inputs, *_labels(problem))
    # a subclass of tensors may have its values anywhere
    if not getattr(kind, "capturable", False) or any(x is not None and type(x) not in PLAIN for x in tensors):
        return False
    if len(exchange.layout) == 1:
        return _fits(problem, kind)
    return problem.rows.own is None or problem.rows.own.nbytes <= MOST_GRAPH_BYTES


def _fits(problem: Problem, kind: Any) -> bool:
    """Return whether a call of one process has few rows, and its graph little memory."""
    rows, cols = problem.rows, problem.cols
    # a graph has a copy of what it reads, and sums as large as both sides
    copies = sum(x.nbytes for x in (*features_of(problem), *rows.leaves, *cols.leaves))
    of_pairs = kind.captured_bytes(rows, cols, problem.dtype)
    return (
        min(len(rows), len(cols)) <= MOST_GRAPH_ROWS
        and _padding_factor(problem) * max(of_pairs, copies) <= MOST_GRAPH_BYTES
    )


def shared_length(tokens: int) -> int:
    """The length to which masked token vectors are padded in a graph, for calls of few lengths."""
    return rounded_length(tokens, max(tokens, MOST_ROUNDED))


def _padding_factor(problem: Problem) -> float:
    """Pairs of tokens with the padding of a graph (`shared_length`), over those without; 1 without masks."""
    lengths = [side.leaves[0].shape[1] for side in (problem.rows, problem.cols) if side.others]
    return math.prod(shared_length(length) / length for length in lengths if length)


def _padded(call: Call) -> Call:
    """The call with masked token vectors, and their masks, of `shared_length`."""
    rows, cols = (
        side.with_leaves([padded_to(x, shared_length(x.shape[1])) for x in side.leaves]) if side.others else side
        for side in (call.rows, call.cols)
    )
    return replace(call, rows=rows, cols=cols)


def _labels(call: Call | Problem) -> list[Tensor]:
    """The tensors beside scale, bias and features that the call reads."""
    named = [x for shard in (call.rows, call.cols) for x in (*[getattr(shard, name) for name in LABELS], *shard.guides)]
    return [x for x in (*named, call.weights, getattr(call, "upstream", None)) if x is not None]


def features_of(call: Call | Problem) -> list[Tensor]:
    """The features of both sides, one tensor each, or the vectors and the mask of a scorer; the rows' own columns."""
    own = call.rows.own
    return [*call.rows.leaves, *call.cols.leaves, *([] if own is None else [own])]


def _apart(call: Call, features: Sequence[Tensor]) -> Sequence[Tensor]:
    """The features with constant keys, such as a queue's, apart: they are copied from where they are, unjoined."""
    if not call.constant_cols:
        return features
    q, k = features
    return q, k[: -call.constant_cols], k[-call.constant_cols :]


def _refilled(call: Call, features: Sequence[Tensor], labels: Sequence[Tensor]) -> Call:
    """The call with these features and labels, in the order of `features_of` and `_labels`."""
    following = iter(labels)

    def refilled(shard: Shard, leaves: Sequence[Tensor]) -> Shard:
        named: dict[str, Any] = {name: next(following) for name in LABELS if getattr(shard, name) is not None}
        return replace(shard.with_leaves(leaves), **named, guides=tuple([next(following) for _ in shard.guides]))

    n, m = len(call.rows.leaves), len(call.rows.leaves) + len(call.cols.leaves)
    rows, cols = refilled(call.rows, features[:n]), refilled(call.cols, features[n:m])
    rows = replace(rows, own=None if rows.own is None else features[m])
    weights, upstream = (None if x is None else next(following) for x in (call.weights, call.upstream))
    return replace(call, rows=rows, cols=cols, weights=weights, upstream=upstream)


class Held:
    """Gradient sums of one call in a graph's memory, until their backward."""

    def __init__(self, sums: Accumulated) -> None:
        # None after the backward
        self.sums: Accumulated | None = sums

    def move(self) -> None:
        """Copy the sums to memory of their own, before a replay overwrites them."""
        if self.sums is not None:
            u, v, numbers, own = (None if x is None else x.clone() for x in self.sums)
            assert numbers is not None
            self.sums = Accumulated(u, v, numbers, own)


class Graph:
    """A captured call, the tensors that it reads and the gradient sums that it writes."""

    def __init__(self, call: Call, inputs: Sequence[Tensor | None]) -> None:
        # fused kernels have been chosen: Triton is there
        from contrastile.tiles.triton.replay import Filling, Gradients

        shapes = [x.shape for x in features_of(call)]
        call = _padded(call)
        users, labels, q = _apart(call, features_of(call)), _labels(call), call.rows.features
        self.device, self.wide, self.exchange, self.dtype = call.device, call.plan.wide, call.exchange, q.dtype
        # one for each graph: ranks wait for each other in a replay, possibly for that of another thread
        self.lock = threading.Lock()
        ranks = len(call.exchange.layout)
        # without grad mode the loss alone, and that of each row before its upstream gradient is known
        wants = torch.is_grad_enabled() and call.plan.at_once
        self.wanted = wanted = [wants and x is not None and x.requires_grad for x in inputs]
        # scale and bias in the accumulator's dtype, all others with the strides of a clone
        numbers = [x for x in inputs[:2] if x is not None]
        scale, *others = (torch.empty_like(x, dtype=self.wide) for x in numbers)
        features, own_labels = ([torch.empty_like(x) for x in tensors] for tensors in (features_of(call), labels))
        own_call = _refilled(call, features, own_labels)
        if call.cols.labels is call.rows.labels:
            # one tensor for both sides, in every call of this plan
            own_call = replace(own_call, cols=replace(own_call.cols, labels=own_call.rows.labels))
        # norms are those of two contiguous sides of one width, whose vectors are compared only with each other
        measured = call.scorer is None and ranks == 1 and all(x.is_contiguous() for x in features[:2])
        measured = measured and features[0].shape[1] == features[1].shape[1]
        sides, targets = 3 if call.constant_cols else 2, _apart(call, features)
        self.fill = Filling([*targets, scale, *others, *own_labels], sides * measured)
        # of scale, bias and all other inputs, where texts are padded
        self.shapes = (None, None, *[x.shape if call.scorer is not None else None for x in features])
        # scale and bias that were passed as Python numbers
        self.numbers: dict[float, Tensor] = {}
        # a reference to the sums of the latest call, alive until its backward
        self.held: Callable[[], Held | None] = lambda: None
        self.stream, self.stream_address = torch.cuda.current_stream(), current_stream_address(call.device.index)

        def compute() -> Accumulated:
            tiles = own_call.tiles(scale, others[0] if others else None)
            tiles.norms = self.fill.norms
            with own_call.exchange.joining():
                value, (u, v, sums, of_own) = with_gradients(own_call, tiles, features, wanted)
            of_pairs, of_products = tiles.pair_sums(sums, *own_call.shards(features), u, v, wanted[0])
            if call.upstream is None:
                self.fill.deliver(value)
            # tiles of vectors that sum products have written an exact 0
            zero = not (call.loss.uses_bias or (tiles.sums_products and call.scorer is None))
            of_bias = torch.zeros_like(of_pairs) if zero else of_pairs
            return Accumulated(u, v, torch.stack([tiles.scale, of_products, of_bias]), of_own)

        # before the capture, in which no kernel can be compiled
        of_rows = call.reduction == "none" and call.upstream is None
        self.value = q.new_empty((len(q),) if of_rows else (), dtype=self.wide)
        self.fill([*users, *numbers, *labels], self.value, self.stream_address)
        self.fill.deliver(self.value)
        with without_autocast(call.device):
            if shapes != [x.shape for x in users]:
                # the calls before had no padding, and may have had other kernels
                compute()
            self.sums, self.replay, self.bytes, self.capture_stream = _captured(compute, across_ranks=ranks > 1)
        # several ranks have computed the first call already: others may compute theirs without a graph
        self.computed, self.buffers = ranks > 1, call.exchange.buffers()
        self.bytes += sum(x.nbytes for x in (*features, *own_labels))
        # vectors come first on each side, and masks get no gradient
        self.gradients = Gradients(self.sums, [*wanted[:3], wanted[2 + len(call.rows.leaves)]])

    def __call__(self, arguments: Sequence[Tensor | float]) -> tuple[Tensor, Held]:
        """The loss of these arguments, in the order of `graph_inputs`, and its gradient sums."""
        with self.lock, _on(self.device), self.exchange.in_step():
            before, stream = self.held(), current_stream_address(self.device.index)
            if before is not None and before.sums is not None:
                # on the stream that its backward reads it on
                with torch.cuda.stream(self.stream):
                    before.move()
            if stream != self.stream_address:
                # another stream may still read the results of the last call
                torch.cuda.current_stream().wait_stream(self.stream)
                self.stream, self.stream_address = torch.cuda.current_stream(), stream
            value = self.value.clone() if self.computed else torch.empty_like(self.value)
            if not self.computed:
                tensors = [x if isinstance(x, Tensor) else self.number(x) for x in arguments]
                self.fill(tensors, value, stream)
                self.replay()
            if self.buffers is not None:
                self.buffers.unwatched = True
            self.computed = False
            held = Held(self.sums)
            self.held = ref(held)
            return value, held

    def loss(self, arguments: Sequence[Tensor | float]) -> Tensor:
        """The loss alone, without gradients."""
        return self(arguments)[0]

    def number(self, x: float) -> Tensor:
        if x not in self.numbers:
            if len(self.numbers) == MOST_NUMBERS:
                self.numbers.clear()
            self.numbers[x] = torch.full((), x, dtype=self.wide, device=self.device)
        return self.numbers[x]

    def backward(self, held: Held, inputs: Sequence[Tensor | None], upstream: Tensor) -> list[Tensor | None]:
        """The gradients of scale, bias and all other inputs; None for masks."""
        # no replay in another thread while the sums are read
        with self.lock, _on(self.device), self.exchange.in_step():
            gradients = [
                x.new_empty(x.shape if shape is None else shape) if want and x is not None else None
                for x, want, shape in zip(inputs, self.wanted, self.shapes, strict=True)
            ]
            assert held.sums is not None
            *of_block, of_own = gradients if held.sums.own is not None else (*gradients, None)
            outs, factor = [x for x in of_block if x is not None], self.exchange.gradient_factor()
            if factor != 1:
                upstream = upstream * factor
            stream = current_stream_address(self.device.index)
            self.gradients(held.sums, outs, upstream, stream)
            if of_own is not None and (q := inputs[2]) is not None:
                # the queries of this call: the graph's memory may have those of a later one
                self.gradients.own(held.sums, q.to(self.dtype), upstream, of_own, stream)
            # a backward that failed may be tried again
            if not backward_is_repeatable():
                held.sums = None
        return [
            x if x is None or passed is None or x.shape == passed.shape else x[:, : passed.shape[1]]
            for x, passed in zip(gradients, inputs, strict=True)
        ]


_graphs: OrderedDict[Key, Graph] = OrderedDict()
_calls: WeakKeyDictionary[Plan, int] = WeakKeyDictionary()
_streams: dict[int, list[torch.cuda.Stream]] = {}
_lock = threading.Lock()


def _free_stream() -> torch.cuda.Stream:
    """A stream on which no graph that is kept was captured: graphs of one stream would share cuBLAS's workspace."""
    streams = _streams.setdefault(torch.cuda.current_device(), [])
    taken = [graph.capture_stream for graph in _graphs.values()]
    while not (free := [stream for stream in streams if stream not in taken]):
        streams.append(torch.cuda.Stream())
    return free[0]


class Parts:
    """The graphs of a call, and between them its transfers, each of which is computed as soon as it is captured."""

    def __init__(self) -> None:
        self._parts: list[Callable[[], None]] = []
        self._pool: Any = None
        self._capturing: Any = None

    def begin(self) -> None:
        """Begin a graph."""
        graph = torch.cuda.CUDAGraph()
        # other threads may use the device meanwhile
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._capturing = graph

    def end(self) -> None:
        """End the graph; there is none where a transfer failed."""
        graph, self._capturing = self._capturing, None
        if graph is None:
            return
        with warnings.catch_warnings():
            # nothing may be between two transfers
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            graph.capture_end()
        self._pool = graph.pool()
        self._parts.append(graph.replay)

    def last(self) -> None:
        """Compute the last graph."""
        self._parts[-1]()

    def transfer(self, step: Callable[[], None]) -> None:
        """Compute what comes before a step of a transfer, take it, and begin another graph."""
        self.end()
        self.last()
        step()
        self._parts.append(step)
        self.begin()

    def replay(self) -> None:
        """Compute the call."""
        for part in self._parts:
            part()


def _captured(
    compute: Callable[[], Accumulated], *, across_ranks: bool
) -> tuple[Accumulated, Callable[[], None], int, torch.cuda.Stream]:
    """The results of a computation in a graph's memory, its replay, its bytes, and the stream of its capture.

    across_ranks: the results are computed too.
    """
    parts, stream = Parts(), torch.cuda.current_stream()
    if across_ranks and torch.cuda.mem_get_info()[0] < 2 * GRAPHS_BYTES:
        # torch frees no cached memory during a capture, and a rank that runs short of it fails all others; a call takes
        # 512 MiB for tiles, as much for features, sums and transfers, and in the ring up to a third of that again
        torch.cuda.empty_cache()
    capture_stream, before = _free_stream(), torch.cuda.memory_reserved()
    capture_stream.wait_stream(stream)
    with torch.cuda.stream(capture_stream):
        parts.begin()
        captured_call.transfer = parts.transfer if across_ranks else None
        try:
            results = compute()
        finally:
            captured_call.transfer = None
            parts.end()
        if across_ranks:
            parts.last()
    stream.wait_stream(capture_stream)
    return results, parts.replay, torch.cuda.memory_reserved() - before, capture_stream


def graph_inputs(call: Call, scale: Tensor, bias: Tensor | None) -> list[Tensor]:
    """The tensors of a call in the order in which its graph reads them."""
    return [*_apart(call, features_of(call)), *([scale] if bias is None else [scale, bias]), *_labels(call)]


def graph_for(call: Call, inputs: Sequence[Tensor | None] | None = None) -> Graph | None:
    """The graph of calls like this one. With `inputs` (scale, bias, queries, keys) it is captured at the third call.

    None where there is none, where the capture failed, and where the user captures a graph. None under hooks of saved
    tensors too: a checkpoint expects of a later call what the first one saved.
    """
    if torch.cuda.is_current_stream_capturing() or saving_is_hooked():
        return None
    # torch's precision of float32 products decides which kernels run
    precision = torch.backends.cuda.matmul.fp32_precision if call.rows.features.dtype == torch.float32 else None
    key = call.plan, precision, torch.is_inference_mode_enabled()
    # a capture waits for other ranks, which may wait for another thread of this process
    if not _lock.acquire(timeout=PATIENCE if len(call.exchange.layout) == 1 else 0):
        return None
    try:
        if key in _graphs and _graphs[key].buffers is not _graphs[key].exchange.buffers():
            # the ranks share larger ones by now, and one without a graph uses those
            del _graphs[key]
        if key in _graphs:
            _graphs.move_to_end(key)
        elif inputs is not None:
            with _on(call.device):
                _capture(key, call, inputs)
        return _graphs.get(key)
    finally:
        _lock.release()


def _capture(key: Key, call: Call, inputs: Sequence[Tensor | None]) -> None:
    """Count a call of the plan, and capture it once that pays."""
    _calls[call.plan] = _calls.get(call.plan, 0) + 1
    if _calls[call.plan] <= CALLS_BEFORE_CAPTURE:
        return
    try:
        # ranks that all fail to capture compute this call without a graph; one whose others raise must not
        with call.exchange.in_step("capture"):
            _graphs[key] = Graph(call, inputs)
    except RuntimeError as error:
        several, group = len(call.exchange.layout) > 1, call.exchange.layout.group
        if several and (isinstance(error, LostRankError) or state_of(group).left_by is not None):
            # the others have not failed alike: they are in the middle of the call
            raise
        logger.info("a small call is not replayed: %s", error)
        _calls[call.plan] = NEVER
    most = max(GRAPHS_BYTES, call.plan.workspace)
    while len(_graphs) > MOST_GRAPHS or (len(_graphs) > 1 and sum(one.bytes for one in _graphs.values()) > most):
        # batches of many lengths would be captured more often than replayed
        _calls[_graphs.popitem(last=False)[0][0]] = CALLS_BEFORE_CAPTURE - CALLS_BEFORE_RECAPTURE


def _on(device: torch.device) -> AbstractContextManager[object]:
    return nullcontext() if device.index in (None, torch.cuda.current_device()) else torch.cuda.device(device)
