"""Act 1: the first pass over a batch, sub-batch by sub-batch, which keeps few graphs or none.

Between `encode.py`, which describes each call as a `Job`, and `backward.py`, which reads the pass's `Record`. The loop
over sub-batches is in this file; `batching.py` splits the batch, `memory.py` chooses the graphs that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile._torch import pytree, without_parametrization_cache
from contrastile.gradcache.batching import SubBatches
from contrastile.gradcache.ddp_fsdp import Sharding
from contrastile.gradcache.introspect import PROBE_ROWS, Reached, graph_leaves, without_partials
from contrastile.gradcache.memory import AUTO, Graph, RetainedGraphs, as_written, free_a_graph, later_bytes
from contrastile.gradcache.modes import Autocast
from contrastile.gradcache.refusals import refusing_changes, refusing_state
from contrastile.gradcache.replay_check import Sketches
from contrastile.gradcache.rng import RandomState
from contrastile.offload import Bounds, host_room, on_accelerator, settle, stream

T = TypeVar("T")


@dataclass
class OutputForm:
    """Form of the encoder's outputs. The first sub-batch fills it in; both passes must agree with it."""

    structure: Any = None
    # shape of one row of each output
    row_shapes: list[torch.Size | None] = field(default_factory=list)
    # outputs that are one number for all examples, such as a scale
    shared: list[bool] = field(default_factory=list)

    def flatten(self, tree: Any) -> list[Any]:
        """The outputs as a list. Raises ValueError where their structure is another one."""
        outputs, structure = pytree.tree_flatten(tree)
        if self.structure is None:
            if all(out is None for out in outputs):
                raise invalid("encoder", "return features", "nothing", "See whether it has a `return`.")
            self.structure = structure
            self.row_shapes = [out.shape[1:] if isinstance(out, Tensor) else None for out in outputs]
        if structure != self.structure:
            raise invalid(
                "encoder", "return the same structure each time", structure, "Check what depends on the input."
            )
        return outputs


@dataclass(frozen=True)
class Job:
    """One call of `encode`: everything that is not differentiated."""

    encoder: Callable[..., Any]
    # of the inputs
    structure: Any
    batches: SubBatches
    retain: int | Literal["auto"]
    # features go to host memory
    to_host: bool
    reached: Reached
    autocast: Autocast
    sharding: Sharding
    # without a graph the encoder may compute other bits: the first pass then builds each graph and drops it
    other_path: bool

    @property
    def device(self) -> torch.device | None:
        """Device on which the encoder computes."""
        return self.reached.device

    @property
    def name(self) -> str:
        """Name of the encoder, for messages."""
        encoder = without_partials(self.encoder)
        return getattr(encoder, "__qualname__", type(encoder).__name__)

    @property
    def bounds(self) -> list[Bounds]:
        """First row of each sub-batch, and the row behind its last."""
        return self.batches.bounds

    @property
    def yielding(self) -> bool:
        """Graphs may give way: the user did not ask for a number, and no other rank would have to replay as well."""
        return self.retain in (AUTO, 0) and not self.sharding.modules

    def differentiates(self, leaves: Sequence[Tensor | None]) -> bool:
        """Return whether anything will be back-propagated."""
        return torch.is_grad_enabled() and bool(self.reached.parameters or differentiable(leaves))

    def run(
        self, index: int, rows: Sequence[Tensor | None], form: OutputForm, wanted: Sequence[bool] | None = None
    ) -> Graph:
        """The outputs of a sub-batch, and its inputs that want a gradient; with a graph where `wanted` is given.

        An empty sub-batch runs on a row or two and returns no rows.
        """
        inputs: list[Tensor] = []
        if wanted is not None:
            pairs = list(zip(rows, wanted, strict=True))
            rows = [row.detach().requires_grad_() if want and row is not None else row for row, want in pairs]
            inputs = [row for row, want in zip(rows, wanted, strict=True) if want and row is not None]
        start, stop = self.bounds[index]
        with (
            nullcontext() if wanted is None else torch.enable_grad(),
            without_parametrization_cache(),
            nullcontext() if start < stop else self.reached.keeping_random(),
        ):
            args, kwargs = pytree.tree_unflatten(self.batches.trim(index, rows), self.structure)
            outputs = form.flatten(self.encoder(*args, **kwargs))
            outputs = [self.batches.pad(index, out, shape) for out, shape in zip(outputs, form.row_shapes, strict=True)]
            if start == stop:
                ran = next(len(row) for row in rows if row is not None)
                outputs = [
                    out[:0] if isinstance(out, Tensor) and out.shape[:1] == (ran,) and not shared else out
                    for out, shared in zip(outputs, form.shared or [False] * len(outputs), strict=True)
                ]
        return outputs, inputs

    def with_room(self, run: Callable[[], T], random: RandomState) -> T:
        """run(), and again after each graph of any call that gives way, as long as memory runs out.

        No second attempt where shards are gathered: all ranks would have to run again as well.
        """
        while True:
            try:
                return run()
            except torch.OutOfMemoryError:
                if self.sharding.modules or not free_a_graph(self.device):
                    raise
                random.restore()


@dataclass
class Record:
    """Notes of the first pass for the backward."""

    form: OutputForm
    graphs: RetainedGraphs
    # training mode of each module
    training: list[bool]
    # state of the generators before each sub-batch
    random: list[RandomState] = field(default_factory=list)
    sketches: Sketches = field(default_factory=Sketches)


def differentiable(leaves: Sequence[Tensor | None]) -> list[Tensor]:
    """The leaves that want a gradient."""
    return [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]


def first_pass(job: Job, leaves: Sequence[Tensor | None], form: OutputForm, *, grad: bool) -> tuple[list[Any], Record]:
    """Features of the whole batch, and the record for the backward; without `grad` nothing will be back-propagated."""
    wanted = [leaf is not None and leaf.requires_grad for leaf in leaves]
    values = [None if leaf is None else leaf.detach() for leaf in leaves]
    record = Record(form, _graphs(job, leaves, grad), [module.training for module in job.reached.modules])
    with_graph = wanted if grad and job.other_path else None
    features: list[Any] = []
    devices: set[torch.device] = set()
    # without `grad`, grad mode stays as the caller set it: an output with a graph shows a parameter that was missed
    with refusing_state(job.reached.modules), refusing_changes(leaves):
        for index, rows in enumerate(stream(values, job.batches.encoded, job.device)):
            random = job.reached.random(last=record.random[-1] if record.random else None)
            record.random.append(random)
            outputs = _retained(job, record, index, rows, wanted) if record.graphs.tries(index) else None
            if outputs is None:
                outputs, _ = job.with_room(partial(job.run, index, rows, form, with_graph), random)
            if grad:
                record.sketches.add(outputs)
            else:
                _refuse_gradients(outputs)
            if not form.shared:
                form.shared = _shared(job, record, outputs, values)
            _store(job, form, features, outputs, job.bounds[index])
            devices.update(out.device for out in outputs if out is not None)
            # or its graph would live beside the next one's
            del outputs
    following = [*record.random[1:], job.reached.random(last=record.random[-1])]
    record.random = [state.drawn(after) for state, after in zip(record.random, following, strict=True)]
    for device in devices if job.to_host else ():
        settle(device)
    return [_the_number(whole) if isinstance(whole, list) else whole for whole in features], record


def _graphs(job: Job, leaves: Sequence[Tensor | None], grad: bool) -> RetainedGraphs:
    return RetainedGraphs(
        job.retain if grad else 0,
        len(job.bounds),
        job.device,
        resident=[*job.reached.resident, *job.sharding.wholes(), *(leaf for leaf in leaves if leaf is not None)],
        frugal=grad and job.reached.partly_frozen,
        yielding=job.yielding,
        most=job.sharding.most,
    )


def _retained(
    job: Job, record: Record, index: int, rows: Sequence[Tensor | None], wanted: Sequence[bool]
) -> list[Any] | None:
    """A sub-batch's outputs with their graph; None where memory ends. The oldest graphs of this call give way."""
    graphs, size = record.graphs, sum(row.nbytes for row in rows if row is not None)
    run = partial(job.run, index, rows, record.form, wanted)
    while graphs.tries(index):
        try:
            graph = graphs.weighed(index, run, size, partial(_later, job, rows, wanted))
        except torch.OutOfMemoryError:
            if not graphs.yielding:
                raise
            graphs.shrink(index)
            record.random[index].restore()
        else:
            if graphs.keeps(index):
                graphs[index] = graph
            return graph[0]
    return None


def _later(job: Job, rows: Sequence[Tensor | None], wanted: Sequence[bool], graph: Graph) -> int:
    """Bytes that the step takes beside graphs, after the first sub-batch, whose rows and graph these are."""
    start, stop = job.bounds[0]
    times = job.bounds[-1][1] / max(1, stop - start)
    inputs = sum(row.nbytes for row, want in zip(rows, wanted, strict=True) if want and row is not None)
    return later_bytes(job.reached.parameters, int(times * inputs), () if job.to_host else graph[0], times)


def _refuse_gradients(outputs: Sequence[Any]) -> None:
    """Raise where a gradient is wanted that nothing would compute."""
    for leaf in graph_leaves([out for out in outputs if isinstance(out, Tensor) and out.requires_grad]):
        got = f"one of shape {list(leaf.shape)} that only some examples reach, or that is elsewhere"
        remedy = "Pass the module that holds them, or its method."
        raise invalid("encoder", "own every parameter that it uses", got, remedy)


def _shared(job: Job, record: Record, outputs: Sequence[Any], values: Sequence[Tensor | None]) -> list[bool]:
    """Return for each output of the first sub-batch whether it is a number of shape [] or [1] for all examples.

    Of a single row, [1] may also be one number for each example; then two rows are encoded, which decide it.
    """
    (start, stop), (_, batch) = job.bounds[0], job.bounds[-1]
    rows = stop - start
    one_axis = any(isinstance(out, Tensor) and out.ndim == 1 for out in outputs)
    # ranks that run together have outputs of the same axes, so all of them compare
    if one_axis and job.sharding.most(int(rows == 1 < batch)):
        (two,) = stream(values, [(0, PROBE_ROWS)], job.device)
        with torch.no_grad(), job.reached.keeping_random(), as_written():
            outputs, _ = job.with_room(partial(job.run, 0, two, record.form), record.random[0])
        rows = min(PROBE_ROWS, batch)
    return [isinstance(out, Tensor) and (out.ndim == 0 or (out.shape == (1,) and rows != 1)) for out in outputs]


def _store(job: Job, form: OutputForm, features: list[Any], outputs: Sequence[Any], bounds: Bounds) -> None:
    """Copy a sub-batch's outputs to their rows of the features; collect shared numbers in lists."""
    start, stop = bounds
    if not features:
        batch = job.bounds[-1][1]
        features += [
            [] if shared else _features(out, batch, stop - start, job.to_host)
            for out, shared in zip(outputs, form.shared, strict=True)
        ]
    for whole, part in zip(features, outputs, strict=True):
        if isinstance(whole, list) and part is not None and (not whole or part.shape == whole[0].shape):
            whole.append(part.detach().clone())
        elif isinstance(whole, Tensor) and part is not None and part.shape == (stop - start, *whole.shape[1:]):
            whole[start:stop].copy_(part, non_blocking=job.to_host)
        elif whole is not None or part is not None:
            got = "None" if part is None else f"shape {list(part.shape)}"
            raise invalid(
                "encoder", "return rows of one shape, one for each example", got, "Pad all sub-batches alike."
            )


def _features(out: Any, batch: int, rows: int, to_host: bool) -> Tensor | None:
    """Memory for an output of all sub-batches."""
    if out is None:
        return None
    if not isinstance(out, Tensor) or len(out) != rows:
        got = f"shape {list(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise invalid(
            "encoder", f"return tensors whose first axis is the sub-batch of {rows}", got, "Return the features only."
        )
    shape = (batch, *out.shape[1:])
    return host_room(shape, out.dtype) if to_host and on_accelerator(out) else out.new_empty(shape)


def _the_number(parts: Sequence[Tensor]) -> Tensor:
    """The number that every sub-batch returned, compared once for all so that the host waits for the device once."""
    every = torch.stack(list(parts))
    other = (every != every[0]) & ~(every.isnan() & every[0].isnan())
    if len(parts) > 1 and bool(other.any()):
        got = f"{every[other][0]:.6g} after {every[0].item():.6g}"
        raise invalid("encoder", "return the same number for all examples", got, "Return one for each.")
    return every[0].clone()
