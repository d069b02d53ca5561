"""Act 1: a call of `encode` as a value, and its first pass over the batch, of which only some graphs are kept.

Between `cache.py`, which makes a job of each call and back-propagates it, and `fitting.py`, which tries how much of it
fits. What the encoder reaches, how the batch is cut, which graphs stay and where features go is said by others; the
loop over sub-batches is here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from contrastile._check import wrong
from contrastile.lengths import Cut
from contrastile.likeness import Sketches
from contrastile.offload import Bounds, host_room, on_accelerator, settle, stream
from contrastile.randomness import RandomState
from contrastile.reach import Autocast, Reached, computing_weights, graph_leaves, refusing_changes, refusing_state
from contrastile.retention import AUTO, Graph, Graphs, Retention, later_bytes, with_room
from contrastile.wrappers import Sharding

Result = TypeVar("Result")


def differentiable(leaves: Sequence[Tensor | None]) -> list[Tensor]:
    """The leaves that want a gradient."""
    return [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]


@dataclass
class Kept:
    """What the first pass keeps for the backward."""

    graphs: Graphs
    random: list[RandomState] = field(default_factory=list)
    sketches: Sketches = field(default_factory=Sketches)
    # of each module, whether it was in training mode
    training: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """One call of `encode`: all that is not differentiated."""

    encoder: Callable[..., Any]
    structure: Any
    cut: Cut
    retain: int | Literal["auto"]
    # features go to host memory
    home: bool
    reached: Reached
    autocast: Autocast
    sharding: Sharding
    # what is computed without a graph may differ: the first pass then builds it and drops it
    other_path: bool
    # filled by the first pass, and compared by the second
    output_structure: list[Any] = field(default_factory=list)
    # shape of one row of each output
    tails: list[torch.Size | None] = field(default_factory=list)

    @property
    def device(self) -> torch.device | None:
        """Where the encoder computes."""
        return self.reached.device

    @property
    def name(self) -> str:
        """What the encoder is called."""
        encoder = self.encoder
        while isinstance(encoder, partial):
            encoder = encoder.func
        return getattr(encoder, "__qualname__", type(encoder).__name__)

    @property
    def bounds(self) -> list[Bounds]:
        """Where each sub-batch begins and ends."""
        return self.cut.bounds

    def differentiates(self, leaves: Sequence[Tensor | None]) -> bool:
        """Whether anything will be back-propagated."""
        return torch.is_grad_enabled() and bool(self.reached.parameters or differentiable(leaves))

    def run(self, index: int, rows: Sequence[Tensor | None]) -> list[Any]:
        """What the encoder returns for a sub-batch."""
        args, kwargs = pytree.tree_unflatten(self.cut.trim(index, rows), self.structure)
        with computing_weights():
            outputs, structure = pytree.tree_flatten(self.encoder(*args, **kwargs))
        if not self.output_structure:
            if all(out is None for out in outputs):
                raise wrong("encoder", "return features", "nothing", "See whether it has a `return`.")
            self.output_structure.append(structure)
            self.tails.extend(out.shape[1:] if isinstance(out, Tensor) else None for out in outputs)
        if structure != self.output_structure[0]:
            raise wrong("encoder", "return the same structure each time", structure, "Check what depends on the input.")
        return [self.cut.pad(index, out, tail) for out, tail in zip(outputs, self.tails, strict=True)]

    def run_with_graph(self, index: int, rows: Sequence[Tensor | None], wanted: Sequence[bool]) -> Graph:
        """The outputs, and the inputs that want a gradient as leaves of the outputs' graph."""
        rows = [
            row.detach().requires_grad_() if want and row is not None else row
            for row, want in zip(rows, wanted, strict=True)
        ]
        with torch.enable_grad():
            return self.run(index, rows), [
                row for row, want in zip(rows, wanted, strict=True) if want and row is not None
            ]

    def nothing_kept(self) -> Kept:
        """Room for what a first pass keeps."""
        # nobody asked for those of a frozen trunk; and what one rank runs again, all would have to
        yielding = self.retain in (AUTO, 0) and not self.sharding.modules
        graphs = Graphs(len(self.bounds), self.device, yielding=yielding)
        return Kept(graphs, training=[module.training for module in self.reached.modules])

    def with_room(self, random: RandomState, run: Callable[..., Result], *arguments: Any) -> Result:
        """run(), for which graphs give way where memory ends, unless other ranks would have to run again as well."""
        run = partial(run, *arguments)
        return run() if self.sharding.modules else with_room(run, self.device, random.restore)

    def first_pass(self, leaves: Sequence[Tensor | None], kept: Kept, *, grad: bool) -> list[Any]:
        """Act 1: features of the whole batch, the graph of the last sub-batches only."""
        wanted = [leaf is not None and leaf.requires_grad for leaf in leaves]
        gathered: list[Any] = []
        computed_on: set[torch.device] = set()
        # what nobody will back-propagate needs no graph
        retain = self.retain if grad else 0
        held = [*self.reached.held, *self.sharding.held(), *(leaf for leaf in leaves if leaf is not None)]
        thrifty = grad and self.reached.partly_frozen
        retention = Retention(
            retain, len(self.bounds), self.device, held=held, thrifty=thrifty, most=self.sharding.most
        )
        values = [None if leaf is None else leaf.detach() for leaf in leaves]
        # where nothing wants a gradient as far as one sees, the caller's mode shows whether something does after all
        with refusing_state(self.reached.modules), refusing_changes(leaves):
            for index, rows in enumerate(stream(values, self.bounds, self.device)):
                kept.random.append(self.reached.random(last=kept.random[-1] if kept.random else None))
                if retention.tries(index):
                    outputs = self._keep_graph(index, rows, wanted, kept, retention)
                else:
                    graph = grad and self.other_path
                    outputs = self._drop_graph(index, rows, wanted if graph else None, kept)
                if grad:
                    kept.sketches.keep(outputs)
                else:
                    self._refuse_gradients(outputs)
                self._gather(gathered, outputs, self.bounds[index])
                computed_on.update(out.device for out in outputs if out is not None)
                # or its graph would be there beside the next one's
                del outputs
        following = [*kept.random[1:], self.reached.random(last=kept.random[-1])]
        kept.random = [state.drawn(after) for state, after in zip(kept.random, following, strict=True)]
        for device in computed_on if self.home else ():
            settle(device)
        return [_the_number(whole) if isinstance(whole, list) else whole for whole in gathered]

    def _refuse_gradients(self, outputs: Sequence[Any]) -> None:
        """Raises where a gradient is wanted that nobody would compute."""
        for leaf in graph_leaves([out for out in outputs if isinstance(out, Tensor) and out.requires_grad]):
            got = f"one of shape {list(leaf.shape)} that only some examples reach, or that is elsewhere"
            remedy = "Pass the module that holds them, or its method."
            raise wrong("encoder", "own every parameter that it uses", got, remedy)

    def _drop_graph(
        self, index: int, rows: Sequence[Tensor | None], wanted: Sequence[bool] | None, kept: Kept
    ) -> list[Any]:
        """A sub-batch's outputs, computed with a graph if something is `wanted`."""
        if wanted is None:
            return self.with_room(kept.random[index], self.run, index, rows)
        return self.with_room(kept.random[index], self.run_with_graph, index, rows, wanted)[0]

    def _keep_graph(
        self, index: int, rows: Sequence[Tensor | None], wanted: Sequence[bool], kept: Kept, retention: Retention
    ) -> list[Any]:
        """A sub-batch's outputs with their graph; of those not asked for, the oldest give way where memory ends."""
        size = sum(row.nbytes for row in rows if row is not None)
        run = partial(self.run_with_graph, index, rows, wanted)
        while retention.tries(index):
            try:
                graph = retention.weighed(index, run, size, partial(self._later, rows, wanted))
            except torch.OutOfMemoryError:
                if not kept.graphs.yielding:
                    raise
                retention.gave_up(min(kept.graphs, default=index))
                kept.graphs.give_up(retention.first - 1)
                kept.random[index].restore()
            else:
                if retention.keeps(index):
                    kept.graphs[index] = graph
                return graph[0]
        return self._drop_graph(index, rows, wanted if self.other_path else None, kept)

    def _later(self, rows: Sequence[Tensor | None], wanted: Sequence[bool], graph: Graph) -> int:
        """Bytes that the step takes beside graphs, after the first sub-batch, whose rows and graph these are."""
        start, stop = self.bounds[0]
        times = self.bounds[-1][1] / max(1, stop - start)
        inputs = sum(row.nbytes for row, want in zip(rows, wanted, strict=True) if want and row is not None)
        return later_bytes(self.reached.parameters, int(times * inputs), () if self.home else graph[0], times)

    def _gather(self, gathered: list[Any], outputs: Sequence[Any], bounds: Bounds) -> None:
        start, stop = bounds
        if not gathered:
            gathered += [_room(out, self.bounds[-1][1], stop - start, self.home) for out in outputs]
        for whole, part in zip(gathered, outputs, strict=True):
            number = part is not None and part.ndim == 0
            if isinstance(whole, list) and number:
                whole.append(part.detach().clone())
            elif isinstance(whole, Tensor) and part is not None and not number and _fits(part, whole, stop - start):
                whole[start:stop].copy_(part, non_blocking=self.home)
            elif whole is not None or part is not None:
                got = "None" if part is None else f"shape {list(part.shape)}"
                raise wrong(
                    "encoder", "return rows of one shape, one for each example", got, "Pad all sub-batches alike."
                )


def _fits(part: Tensor, whole: Tensor, rows: int) -> bool:
    return part.shape[1:] == whole.shape[1:] and len(part) == rows


def _room(out: Any, batch: int, rows: int, home: bool) -> Tensor | list[Tensor] | None:
    """Where an output of all sub-batches goes; what has no axes is nobody's row, and is only compared."""
    if out is None:
        return None
    if isinstance(out, Tensor) and out.ndim == 0:
        return []
    if not isinstance(out, Tensor) or len(out) != rows:
        got = f"shape {list(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise wrong(
            "encoder", f"return tensors whose first axis is the sub-batch of {rows}", got, "Return the features only."
        )
    shape = (batch, *out.shape[1:])
    return host_room(shape, out.dtype) if home and on_accelerator(out) else out.new_empty(shape)


def _the_number(parts: Sequence[Tensor]) -> Tensor:
    """What every sub-batch gave, a bias say. The host waits for the device once, and not for every sub-batch."""
    every = torch.stack(list(parts))
    other = (every != every[0]) & ~(every.isnan() & every[0].isnan())
    if len(parts) > 1 and bool(other.any()):
        got = f"{every[other][0]:.6g} after {every[0]:.6g}"
        raise wrong("encoder", "return the same number for all examples", got, "Return one for each.")
    return every[0].clone()
