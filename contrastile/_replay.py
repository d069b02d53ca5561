"""Small batches on a CUDA device: a call captured once as a graph, and replayed.

Stands between `_contrast.py` and `_sweep.py`. A batch of 4096 rows keeps a GPU busy for 0.2 ms, but its thirty launches
keep the host busy for six times that. So a small call computes its gradients with its loss, for an upstream of 1, and
from the third call of its kind on all of it is one launch: inputs are copied to where the graph reads them, and what it
leaves is copied from there, so that calls know nothing of each other. The kernels, their order and the bits are those
of the calls before.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from contrastile._sweep import Call, Gradients, at_once, forward_with_gradients

logger = logging.getLogger("contrastile")

# pairs of a batch that is small: its strip of gradients, which a graph keeps, takes twice as many bytes
MOST_PAIRS = 8192**2
# calls of a kind before it is captured, which also compile its kernels; and graphs kept, the latest used
CALLS, KEPT = 2, 2
NEVER = -(2**62)


def small(call: Call, q: Tensor) -> bool:
    """Whether a call takes this way: fused kernels, one process, and no tensors beside features, scale and bias."""
    rows, cols = call.rows, call.cols
    return (
        q.is_cuda
        and len(rows) * len(cols) <= MOST_PAIRS
        and getattr(call.tiles, "capturable", False)
        and len(call.exchange.shards) == 1
        and call.reduction != "none"
        and call.weights is rows.positives is rows.labels is rows.ids is None
    )


class _Graph:
    """A captured call, the inputs it reads and the outputs it writes."""

    def __init__(self, call: Call, inputs: Sequence[Tensor | None], wanted: Sequence[bool]) -> None:
        self.inputs = [None if x is None else x.detach().clone() for x in inputs]
        self.graph = torch.cuda.CUDAGraph()
        self.last = torch.cuda.Event()
        here, apart = torch.cuda.current_stream(), _stream(torch.cuda.current_device())
        apart.wait_stream(here)
        q, k, scale, bias = self.inputs
        assert q is not None
        assert k is not None
        assert scale is not None
        with torch.cuda.stream(apart):
            # what other threads do to the device meanwhile is theirs
            self.graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.outputs = forward_with_gradients(replace(call, made=[]), q, k, scale, bias, wanted)
            finally:
                self.graph.capture_end()
        here.wait_stream(apart)

    def __call__(self, inputs: Sequence[Tensor | None]) -> tuple[Tensor, Gradients]:
        stream = torch.cuda.current_stream()
        # another stream may still be reading what the last call left
        stream.wait_event(self.last)
        given = [x.detach() for x in inputs if x is not None]
        torch._foreach_copy_([kept for kept in self.inputs if kept is not None], given)
        self.graph.replay()
        value, found = self.outputs
        left = value.clone(), Gradients(*(None if x is None else x.clone() for x in found))  # type: ignore[arg-type]
        self.last.record(stream)
        return left


_graphs: OrderedDict[Any, _Graph] = OrderedDict()
_calls: dict[Any, int] = {}
_streams: dict[int, torch.cuda.Stream] = {}
_lock = threading.Lock()


def _stream(device: int) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def replayed(
    call: Call, q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, Gradients]:
    """`forward_with_gradients`, as a graph once it has been called often enough to pay."""
    if not small(call, q) or torch.cuda.is_current_stream_capturing():
        return forward_with_gradients(call, q, k, scale, bias, wanted)
    inputs = (q, k, scale, bias)
    key = (
        q.device, *((x.shape, x.dtype) if x is not None else None for x in inputs), call.loss, call.reduction,
        call.workspace, call.rows.diagonal, tuple(wanted), torch.backends.cuda.matmul.fp32_precision,
    )  # fmt: skip
    with _lock, _on(q.device):
        _calls[key] = _calls.get(key, 0) + 1
        graph = _graph(key, call, inputs, wanted) if _calls[key] > CALLS else None
        if graph is not None:
            return graph(inputs)
    return forward_with_gradients(call, q, k, scale, bias, wanted)


def _graph(key: Any, call: Call, inputs: Sequence[Tensor | None], wanted: Sequence[bool]) -> _Graph | None:
    """The graph of this kind of call, captured if need be; None if that fails, now and later."""
    if key not in _graphs:
        try:
            _graphs[key] = _Graph(call, inputs, wanted)
        except RuntimeError as error:
            logger.info("a small call is not replayed: %s", error)
            _calls[key] = NEVER
            return None
        if len(_graphs) > KEPT:
            # a kind that is pushed out has to be called often again
            del _calls[_graphs.popitem(last=False)[0]]
    _graphs.move_to_end(key)
    return _graphs[key]


def _on(device: torch.device) -> AbstractContextManager[object]:
    return nullcontext() if device.index in (None, torch.cuda.current_device()) else torch.cuda.device(device)


def with_loss(call: Call, q: Tensor) -> bool:
    """Whether a call's gradients come with its loss."""
    return at_once(call) or small(call, q)
