"""One sub-batch of a call of `encode`: its run, the graph that it may retain, and its rows of the features.

Called by `encode.py`, which has the loops over sub-batches of both passes. `batching.py` splits the batch, `memory.py`
chooses the graphs that are retained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from contrastile._errors import invalid
from contrastile._torch import pytree, without_parametrization_cache
from contrastile._types import shape_or_type
from contrastile.distributed import collectives
from contrastile.gradcache.batching import SubBatches
from contrastile.gradcache.ddp_fsdp import Sharding
from contrastile.gradcache.inputs import Layout, Parts, Ragged, flatten_outputs
from contrastile.gradcache.introspect import Reached, graph_leaves, not_owned, without_partials
from contrastile.gradcache.memory import AUTO, Graph, Releasable, RetainedGraphs, as_written, free_a_graph, later_bytes
from contrastile.gradcache.modes import Autocast, joined
from contrastile.gradcache.replay_check import Sketches
from contrastile.gradcache.rng import RandomState
from contrastile.offload import Bounds, host_room, on_accelerator, settle, stream

T = TypeVar("T")


@dataclass
class OutputForm:
    """Form of the encoder's outputs, which the first sub-batch determines, and all others of both passes must have."""

    structure: Any = None
    # shape of one row of each output
    row_shapes: list[torch.Size | None] = field(default_factory=list)
    # outputs that are one number for all examples, such as a scale
    shared: list[bool] = field(default_factory=list)
    # positions of packed values among the outputs; behind each are the lengths of their examples
    packed: list[int] = field(default_factory=list)
    # of each sub-batch, the part of each output of the whole batch
    bounds: list[list[Bounds]] = field(default_factory=list)
    # lengths of all examples, by position of their packed values
    lengths: dict[int, list[int]] = field(default_factory=dict)

    def flatten(self, tree: Any) -> list[Any]:
        """The outputs as a list. Raises ValueError where their structure is another one."""
        outputs, structure, packed = flatten_outputs(tree)
        if self.structure is None:
            if all(out is None for out in outputs):
                raise invalid("encoder", "return features", "nothing", "See whether it has a `return`.")
            if any(isinstance(out, Tensor) and (out.layout != torch.strided or out.is_nested) for out in outputs):
                remedy = "Call to_dense() there, or return Ragged(values, lengths)."
                raise invalid("encoder", "return dense tensors", "a sparse or nested one", remedy)
            self.structure, self.packed = structure, packed
            self.row_shapes = [out.shape[1:] if isinstance(out, Tensor) else None for out in outputs]
        if (structure, packed) != (self.structure, self.packed):
            remedy = "Check what depends on the input."
            raise invalid("encoder", "return the same structure each time", structure, remedy)
        return outputs

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """The outputs of the whole batch, as the encoder nests them."""
        leaves = [
            Ragged(out, self.lengths[position]) if position in self.packed else out
            for position, out in enumerate(outputs)
            if position - 1 not in self.packed
        ]
        return pytree.tree_unflatten(leaves, self.structure)

    def by_example(self, outputs: Sequence[Any]) -> list[Any]:
        """Outputs that have a row for each example: all but packed values, and numbers that examples share."""
        shared = self.shared or [False] * len(outputs)
        return [out for at, out in enumerate(outputs) if at not in self.packed and not shared[at]]

    def unsort(self, features: Sequence[Tensor | None], batches: SubBatches) -> list[Tensor | None]:
        """Features in the batch's own order."""
        ordered = batches.unsort([None if at in self.packed else x for at, x in enumerate(features)])
        for position in self.packed:
            ordered[position], self.lengths[position] = batches.unsort_packed(
                cast(Tensor, features[position]), self.lengths[position]
            )
        return ordered


@dataclass(frozen=True)
class Job:
    """One call of `encode`: the encoder, the layout of its inputs, and all settings."""

    encoder: Callable[..., Any]
    layout: Layout | Parts
    batches: SubBatches
    retain: int | Literal["auto"]
    # features go to host memory
    to_host: bool
    reached: Reached
    autocast: Autocast
    sharding: Sharding
    # the encoder may compute other bits without a graph: the first pass builds each graph and drops it
    graph_changes_bits: bool
    # engine of DeepSpeed, which must run the backward
    engine: Any = None

    @property
    def device(self) -> torch.device | None:
        return self.reached.device

    @property
    def name(self) -> str:
        """Name of the encoder, for messages."""
        encoder = without_partials(self.encoder)
        return getattr(encoder, "__qualname__", type(encoder).__name__)

    @property
    def bounds(self) -> list[Bounds]:
        """Start and stop of each sub-batch, in examples or in parts."""
        return self.batches.bounds

    def rows(self, values: Sequence[Tensor], indices: Iterable[int] | None = None) -> list[list[Tensor | None]]:
        """The inputs of each sub-batch, or of those at `indices`."""
        indices = range(len(self.bounds)) if indices is None else indices
        return [self.layout.rows(values, self.batches.encoded[index]) for index in indices]

    @property
    def retains_the_batch(self) -> bool:
        """Return whether the batch is one sub-batch that retains its graph, and no wrapper or host takes part."""
        (start, stop), *others = self.bounds
        takes_part = self.sharding.modules or self.engine or self.to_host
        return not others and start < stop and self.retain not in (0, AUTO) and not takes_part

    def differentiates(self, leaves: Sequence[Tensor]) -> bool:
        """Return whether anything will be back-propagated."""
        return torch.is_grad_enabled() and bool(self.reached.parameters or differentiable(leaves))

    def graphs(self, leaves: Sequence[Tensor], grad: bool) -> RetainedGraphs:
        """The graphs that the call will retain; none without `grad`."""
        # graphs are kept only where the encoder itself reads a frozen parameter; ranks agree, because they run a
        # sharded module equally often
        frugal = grad and self.reached.partly_frozen and bool(self.sharding.most(int(self.reached.reads_frozen)))
        return RetainedGraphs(
            self.retain if grad else 0,
            len(self.bounds),
            self.device,
            resident=lambda: [*self.reached.resident, *self.sharding.wholes(), *leaves],
            frugal=frugal,
            # a number that the user gave is kept; with sharded modules the other ranks would have to replay too
            releasable=(self.retain in (AUTO, 0) or isinstance(self.retain, Releasable)) and not self.sharding.modules,
            most=self.sharding.most,
        )

    def run(
        self, index: int, rows: Sequence[Tensor | None], form: OutputForm, wanted: Sequence[bool] | None = None,
        examples: Bounds | None = None,
    ) -> Graph:  # fmt: skip
        """The outputs of a sub-batch, and its inputs that require a gradient.

        wanted: for each leaf whether it requires a gradient; None: run without a graph. examples: those in `rows`, if
        they are not the sub-batch's own. An empty sub-batch runs on a row or two, and returns none.
        """
        examples = examples or self.batches.encoded[index]
        if wanted is not None:
            pairs = [(row, wanted[place.tensor]) for row, place in zip(rows, self.layout.places(examples), strict=True)]
            rows = [row.detach().requires_grad_() if want and row is not None else row for row, want in pairs]
        # before the encoder runs, which may mark its inputs
        inputs = differentiable(rows)
        start, stop = self.bounds[index]
        with (
            nullcontext() if wanted is None else torch.enable_grad(),
            without_parametrization_cache(),
            nullcontext() if start < stop else self.reached.random().restoring(),
            # a compilation for the shape of a last, shorter sub-batch does not pay
            as_written() if self.graph_changes_bits and self.batches.is_short(index) else nullcontext(),
        ):
            args, kwargs = self.layout.arguments(self.batches.trim(index, rows), examples)
            outputs = form.flatten(self.encoder(*args, **kwargs))
            outputs = [self.batches.pad(index, out, shape) for out, shape in zip(outputs, form.row_shapes, strict=True)]
            if start == stop:
                ran = self.layout.count(examples, form.by_example(outputs))
                has_rows = [isinstance(out, Tensor) and out.shape[:1] == (ran,) for out in outputs]
                outputs = [
                    out[:0] if at in form.packed or (has_rows[at] and not (form.shared and form.shared[at])) else out
                    for at, out in enumerate(outputs)
                ]
        return outputs, inputs

    def run_retaining(
        self, record: Record, index: int, rows: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> list[Any] | None:
        """The outputs of a sub-batch that retains its graph, or measures it; None for any other.

        If memory runs out, the oldest graphs of this call are released.
        """
        graphs, size = record.graphs, sum(row.nbytes for row in rows if row is not None)

        def later(graph: Graph) -> int:
            """Bytes that the step takes beside graphs from here on; `graph`: that of the first sub-batch."""
            outputs, inputs = graph
            times = self.bounds[-1][1] / max(1, self.bounds[0][1])
            input_bytes = int(times * sum(x.nbytes for x in inputs))
            outputs = [] if self.to_host else outputs
            return later_bytes(self.reached.parameters, input_bytes, outputs, times, record.form.packed)

        while graphs.builds(index):
            try:
                run = partial(self.run, index, rows, record.form, wanted)
                graph = graphs.measured(index, run, size, later, self.sharding.whole_bytes)
            except RuntimeError as error:
                if "saved tensor hooks" in str(error):
                    # the encoder uses torch.func, under which no graph can be measured
                    graphs.first, graphs.frugal = graphs.count, False
                elif isinstance(error, torch.OutOfMemoryError) and graphs.releasable:
                    graphs.retain_fewer(index)
                else:
                    raise
                record.random[index].restore()
            else:
                if graphs.retains(index):
                    graphs[index] = graph
                return graph[0]
        return None

    def with_room(self, run: Callable[[], T], random: RandomState) -> T:
        """The result of run(). If memory runs out, release a graph of any call and run again, as often as there is one.

        Sharded modules run once only, because all ranks would have to run again.
        """
        while True:
            try:
                return run()
            except torch.OutOfMemoryError:
                if self.sharding.modules or not free_a_graph(self.device):
                    raise
                random.restore()

    def shared_outputs(
        self, outputs: Sequence[Any], values: Sequence[Tensor], form: OutputForm, random: RandomState
    ) -> list[bool]:
        """Return for each output of the first sub-batch whether it is one number, of shape [] or [1], for all examples.

        A sub-batch of one row may also return [1] as a number for each example. Then the encoder runs on two rows.
        """
        batch, rows = self.bounds[-1][1], self.layout.count(self.bounds[0], form.by_example(outputs))
        ragged = {position for values in form.packed for position in (values, values + 1)}
        one_axis = isinstance(self.layout, Layout) and any(
            isinstance(x, Tensor) and x.ndim == 1 and position not in ragged for position, x in enumerate(outputs)
        )
        # all ranks of a sharded encoder take the same branch, because their outputs have the same axes
        if one_axis and self.sharding.most(int(rows == 1 < batch)):
            probe = self.layout.probe
            (two,) = stream([self.layout.rows(values, probe)], self.device)
            with torch.no_grad(), self.reached.random().restoring(), as_written():
                outputs, _ = self.with_room(partial(self.run, 0, two, form, examples=probe), random)
            rows = min(probe[1], batch)
        return [
            isinstance(out, Tensor) and at not in ragged and (out.ndim == 0 or (out.shape == (1,) and rows != 1))
            for at, out in enumerate(outputs)
        ]


@dataclass
class Record:
    """State of the first pass that the second one needs."""

    form: OutputForm
    graphs: RetainedGraphs
    # training mode of each module
    training: list[bool]
    # parameters of the encoder that wanted no gradient
    frozen: list[nn.Parameter]
    # for each leaf of the inputs whether it wants one
    wanted: list[bool]
    # state of the generators before each sub-batch
    random: list[RandomState] = field(default_factory=list)
    sketches: list[Sketches] = field(default_factory=list)


class Features:
    """The outputs of all sub-batches: one tensor for the rows of each, or one number that all examples share."""

    def __init__(self, job: Job, form: OutputForm) -> None:
        self.job, self.form = job, form
        form.bounds.clear()
        # for each output memory for all rows; or a list: of a shared number, packed values, or rows of unknown count
        self.outputs: list[Any] = []
        self.devices: set[torch.device] = set()

    def add(self, index: int, outputs: Sequence[Any]) -> None:
        """Copy a sub-batch's outputs to their rows."""
        shared, packed = self.form.shared, self.form.packed
        count = self.job.layout.count(self.job.bounds[index], self.form.by_example(outputs))
        # a number of shape [1] was taken for a row while each part had one
        for at, (out, before) in enumerate(zip(outputs, self.outputs, strict=False)):
            is_number = at not in packed and count != 1 and isinstance(out, Tensor) and out.shape == (1,)
            shared[at] |= is_number and isinstance(before, list) and all(x.shape == (1,) for x in before)
        counts = [len(out) if at in packed else count for at, out in enumerate(outputs)]
        before = self.form.bounds[-1] if self.form.bounds else [(0, 0)] * len(outputs)
        bounds = [(stop, stop + more) for (_, stop), more in zip(before, counts, strict=True)]
        self.form.bounds.append(bounds)
        self.outputs = self.outputs or [
            [] if one or at in packed else self._room(out, count)
            for at, (out, one) in enumerate(zip(outputs, shared, strict=True))
        ]
        first = [stop for _, stop in self.form.bounds[0]]
        for output, rows, one, (start, stop), width in zip(self.outputs, outputs, shared, bounds, first, strict=True):
            if isinstance(output, list) and rows is not None and _fits(output, rows, None if one else stop - start):
                output.append(self._copy(rows))
            elif isinstance(output, Tensor) and rows is not None and rows.shape == (stop - start, *output.shape[1:]):
                output[start:stop].copy_(rows, non_blocking=self.job.to_host)
            elif output is not None or rows is not None:
                got = "None" if rows is None else f"shape {list(rows.shape)}"
                rule, remedy = "return rows of one shape, one for each example", "Pad all sub-batches alike."
                if rows is not None and rows.ndim > 1 and rows.shape[1] == len(rows) and _is_square(output, width):
                    remedy = "Leave it out: a second size that follows the sub-batch, as of logits, cannot be joined."
                raise invalid("encoder", rule, got, remedy)
        self.devices.update(out.device for out in outputs if out is not None)

    def _copy(self, rows: Tensor) -> Tensor:
        """The rows, in the memory in which the features wait."""
        if self.job.to_host and on_accelerator(rows):
            return host_room(rows.shape, rows.dtype).copy_(rows, non_blocking=True)
        return rows.clone()

    def _room(self, out: Any, rows: int) -> Tensor | list[Tensor] | None:
        """Memory for an output of all sub-batches."""
        if out is None:
            return None
        if not isinstance(out, Tensor) or len(out) != rows:
            rule = f"return tensors whose first axis is the sub-batch of {rows}"
            raise invalid("encoder", rule, shape_or_type(out), "Return the features only.")
        if isinstance(self.job.layout, Parts):
            return []
        shape = (self.job.bounds[-1][1], *out.shape[1:])
        return host_room(shape, out.dtype) if self.job.to_host and on_accelerator(out) else out.new_empty(shape)

    def finish(self) -> list[Tensor | None]:
        """The features, after their copies to the host are done; the lengths of packed ones go into the form."""
        for device in self.devices if self.job.to_host else ():
            settle(device)
        features = [
            (_equal_number if one else joined)(output) if isinstance(output, list) else output
            for output, one in zip(self.outputs, self.form.shared, strict=True)
        ]
        for position in self.form.packed:
            self.form.lengths[position] = features[position + 1].tolist()
            features[position + 1] = None
        return features


def _fits(before: Sequence[Tensor], rows: Tensor, count: int | None) -> bool:
    """Return whether rows may follow those before: `count` of them, or one number for all examples."""
    if count is None:
        return not before or rows.shape == before[0].shape
    return len(rows) == count and (not before or rows.shape[1:] == before[0].shape[1:])


def _is_square(output: Tensor | Sequence[Tensor], rows: int) -> bool:
    """Return whether the first sub-batch, of this many rows, had as many columns."""
    before = output if isinstance(output, Tensor) else next(iter(output), None)
    return before is not None and before.shape[1:2] == (rows,)


def _equal_number(numbers: Sequence[Tensor]) -> Tensor:
    """The number that every sub-batch returned. They are compared at the end, so that the host waits once."""
    every = joined([number[None] for number in numbers])
    other = (every != every[0]) & ~(every.isnan() & every[0].isnan())
    if len(numbers) > 1 and bool(other.any()):
        got = f"{every[other][0]:.6g} after {every[0].item():.6g}"
        raise invalid("encoder", "return the same number for all examples", got, "Return one for each.")
    number = every[0].clone()
    # sharded where the forward calls a method that is registered with FSDP2; the replays compute it whole
    return number if number.requires_grad else collectives.unsharded(number, "sum")


def differentiable(leaves: Sequence[Tensor | None]) -> list[Tensor]:
    return [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]


def detached(leaves: Sequence[Tensor]) -> tuple[list[Tensor], list[bool]]:
    """The leaves without their graph, and which of them want a gradient."""
    return [leaf.detach() for leaf in leaves], [leaf.requires_grad for leaf in leaves]


def refuse_gradients(outputs: Sequence[Any]) -> None:
    """Raise for outputs with a graph, whose gradient nothing would compute."""
    for leaf in graph_leaves([out for out in outputs if isinstance(out, Tensor) and out.requires_grad]):
        raise not_owned(leaf, "that only some examples reach, or that is elsewhere")
