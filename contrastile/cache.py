"""encode(): the gradient cache as one autograd operation (Gao et al. 2021, section 3.3).

The first and the last station of the flow. Act 1, in the forward: the encoder runs over the batch sub-batch by
sub-batch and keeps no graph; its features go on to the loss. Act 2 is the loss's, which hands back the features'
gradients: that is the cache. Act 3, in the backward: each sub-batch is encoded again, with the random numbers and
the autocast of the first time, and back-propagated. The parameters' gradients are summed in float32 and handed to
autograd once, as if the whole batch had been encoded at once; so any loss, any number of towers and any training
loop work with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from contrastile._check import one_of, wrong
from contrastile.lengths import Cut, cut, cut_by_tokens
from contrastile.offload import Bounds, host_room, numbered, on_accelerator, settle, stream
from contrastile.reach import (
    Autocast,
    RandomState,
    Reached,
    has_other_path,
    reach,
    refusing_batch_norm,
    refusing_state,
    sharing_casts,
    silent,
)
from contrastile.retention import AUTO, Graph, Graphs, Retention, largest_sub_batch, later_bytes, with_room
from contrastile.sums import Sums
from contrastile.wrappers import Sharding, inside, refuse_bypass, unwrap

Result = TypeVar("Result")


def encode(
    encoder: Callable[..., Any] | tuple[nn.Module, str],
    inputs: Any,
    *,
    sub_batch: int | Literal["auto"] | None = None,
    sub_batch_tokens: int | None = None,
    retain: int | Literal["auto"] = 0,
    device: torch.device | str | None = None,
    features: Literal["device", "host"] = "device",
) -> Any:
    """The features of a batch of any size, with the activations of one sub-batch at a time.

    Naively `encoder(inputs)`, value and gradients, for every encoder that treats examples one by one. Dropout sees
    the same random numbers in both passes.

    Arguments:
        encoder: a module, a method of one (`model.encode_image`), or any function that reaches one. A pair
            `(model, "encode_image")` names a method, also where DistributedDataParallel wraps the model or FSDP2
            (`fully_shard`) shards it; either may be passed as a module too. However many sub-batches and calls, each
            gradient is reduced once.
        inputs: a tensor is passed as `encoder(x)`, a tuple as `encoder(*x)`, a mapping as `encoder(**x)`; nested as
            you like. Every leaf is None or a tensor whose first axis is the batch, on the device or in (pinned)
            host memory.
        sub_batch: examples encoded at once. The last sub-batch may be shorter. "auto": as many as fit into memory,
            found at the first call for an encoder and kept.
        sub_batch_tokens: tokens encoded at once, padding included, of a mapping with an `attention_mask` [batch,
            length]. Texts are sorted by length, so that short ones travel together, and trimmed to the longest of their
            sub-batch. With `sub_batch` too, both are limits.
        retain: sub-batches, the last ones, whose graph is kept from the first pass; they need no second forward.
            "auto": as many as memory allows; with room for all, caching costs nothing.
        device: where the encoder computes; by default where its parameters are.
        features: where they wait. "host": in pinned host memory, which every sub-batch's go to as soon as they are
            there; a loss with `device=` takes them from it, and their gradients come back from it sub-batch by
            sub-batch. Normalise them in the encoder then. Without an accelerator it is the same.

    Returns what the encoder returns (tensor, tuple, dict, nested), each leaf for the whole batch.
    Raises ValueError for inputs that cannot be cut, for batch normalisation in training mode, whose statistics over a
    sub-batch are not those of the batch, for modules that change a buffer when they run, and for the module inside a
    DistributedDataParallel, whose gradients would not be reduced.

    >>> from torch import nn
    >>> tower = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    >>> features = encode(tower, torch.randn(10, 8), sub_batch=4)
    >>> features.sum().backward()
    """
    function, wrapper = unwrap(encoder)
    if not callable(function):
        raise wrong("encoder", "be callable", type(function).__name__, "Pass a module, a method of one, or a function.")
    _check_sizes(sub_batch, sub_batch_tokens, retain)
    one_of("features", features, ("device", "host"), "The host has room for more.")
    leaves, structure = pytree.tree_flatten(_arguments(inputs))
    batch = _batch_size(leaves)
    reached = reach(function, leaves, structure, numbered(device) if device is not None else None)
    refuse_bypass(wrapper, reached.modules, reached.parameters)
    sharding = Sharding.of(function, reached.modules)
    reached = replace(reached, parameters=sharding.wholes(reached.modules, reached.parameters))
    autocast, other = Autocast.current(reached.device), has_other_path(function, reached.modules)
    job = _Job(function, structure, Cut([(0, batch)]), retain, features == "host", reached, autocast, sharding, other)
    with refusing_batch_norm(reached.modules):
        if sub_batch == AUTO:
            sub_batch = _fitting(job, leaves)
        if sub_batch_tokens is None:
            planned = cut(batch, sub_batch or batch)
        else:
            planned = cut_by_tokens(inputs, sub_batch_tokens, sub_batch)
        planned = planned.extended(sharding.most(len(planned.bounds)))
        job, leaves = replace(job, cut=planned), planned.sort(leaves)
        if reached.parameters or any(leaf is not None and leaf.requires_grad for leaf in leaves):
            apply = partial(_Encode.apply, job, leaves, *reached.parameters, *_differentiable(leaves))
            found = inside(wrapper, apply) if wrapper is not None and reached.parameters else apply()
        else:
            found = job.first_pass(leaves, job.nothing_kept(), grad=False)
    return pytree.tree_unflatten(planned.unsort(found), job.output_structure[0])


def _check_sizes(sub_batch: Any, sub_batch_tokens: Any, retain: Any) -> None:
    if sub_batch is None and sub_batch_tokens is None:
        raise wrong("sub_batch", "be given, or sub_batch_tokens", None, 'Say how much is encoded at once, or "auto".')
    remedy = "Count examples, tokens, or sub-batches."
    for name, value, least, words in (
        ("sub_batch", sub_batch, 1, (None, AUTO)),
        ("sub_batch_tokens", sub_batch_tokens, 1, (None,)),
        ("retain", retain, 0, (AUTO,)),
    ):
        if value not in words and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise wrong(name, f"be a whole number of at least {least}", repr(value), remedy)


def _fitting(job: _Job, leaves: Sequence[Tensor | None]) -> int:
    """The largest sub-batch whose forward and backward fit into memory."""
    wanted = [leaf is not None and leaf.requires_grad for leaf in leaves]
    values = [None if leaf is None else leaf.detach() for leaf in leaves]

    def work(n: int, backward: bool) -> object:
        (rows,) = stream(values, [(0, n)], job.device)
        outputs, inputs = job.run_with_graph(0, rows, wanted)
        outs = [out for out in outputs if out is not None and out.requires_grad]
        if backward and outs:
            torch.autograd.grad(
                outs, [*job.reached.parameters, *inputs], [torch.zeros_like(out) for out in outs], allow_unused=True
            )
        return outputs

    key = next(iter(job.reached.parameters), None)
    shapes = tuple(None if leaf is None else (leaf.shape[1:], leaf.dtype) for leaf in leaves)
    later = later_bytes(job.reached.parameters, sum(leaf.nbytes for leaf in _differentiable(leaves)), (), 1)
    before = RandomState.capture(job.device)
    try:
        return largest_sub_batch(
            work, _batch_size(leaves), job.device, key=key, shapes=shapes, later=later, most=job.sharding.most
        )
    finally:
        before.restore()


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def _batch_size(leaves: Sequence[Any]) -> int:
    sizes = []
    for leaf in leaves:
        if leaf is not None and (not isinstance(leaf, Tensor) or leaf.ndim == 0):
            got = "a tensor without axes" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise wrong("inputs", "be tensors whose first axis is the batch", got, "Bind other arguments with partial.")
        if leaf is not None:
            sizes.append(len(leaf))
    if not sizes:
        raise wrong("inputs", "contain a tensor", "none", "Pass what the encoder takes.")
    if len(set(sizes)) > 1:
        raise wrong("inputs", "have the same first axis, the batch", sorted(set(sizes)), "Check each tensor's shape.")
    return sizes[0]


def _differentiable(leaves: Sequence[Tensor | None]) -> list[Tensor]:
    return [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]


@dataclass
class _Kept:
    """What the first pass keeps for the backward."""

    graphs: Graphs
    random: list[RandomState] = field(default_factory=list)


@dataclass(frozen=True)
class _Job:
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
        return self.reached.device

    @property
    def bounds(self) -> list[Bounds]:
        return self.cut.bounds

    def run(self, index: int, rows: Sequence[Tensor | None]) -> list[Any]:
        """What the encoder returns for a sub-batch."""
        args, kwargs = pytree.tree_unflatten(self.cut.trim(index, rows), self.structure)
        outputs, structure = pytree.tree_flatten(self.encoder(*args, **kwargs))
        if not self.output_structure:
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

    def nothing_kept(self) -> _Kept:
        # what one rank runs again, all would have to
        yielding = self.retain == AUTO and not self.sharding.modules
        return _Kept(Graphs(len(self.bounds), self.device, yielding=yielding))

    def with_room(self, random: RandomState, run: Callable[..., Result], *arguments: Any) -> Result:
        """run(), for which graphs give way where memory ends, unless other ranks would have to run again as well."""
        run = partial(run, *arguments)
        return run() if self.sharding.modules else with_room(run, self.device, random.restore)

    def first_pass(self, leaves: Sequence[Tensor | None], kept: _Kept, *, grad: bool) -> list[Any]:
        """Act 1: features of the whole batch, the graph of the last sub-batches only."""
        wanted = [leaf is not None and leaf.requires_grad for leaf in leaves]
        gathered: list[Any] = []
        # what nobody will back-propagate needs no graph
        retain = self.retain if grad else 0
        held = [leaf for leaf in (*self.reached.parameters, *leaves) if leaf is not None]
        thrifty = grad and self.reached.partly_frozen
        retention = Retention(
            retain, len(self.bounds), self.device, held=held, thrifty=thrifty, most=self.sharding.most
        )
        values = [None if leaf is None else leaf.detach() for leaf in leaves]
        with torch.no_grad(), refusing_state(self.reached.modules):
            for index, rows in enumerate(stream(values, self.bounds, self.device)):
                kept.random.append(RandomState.capture(self.device))
                if retention.tries(index):
                    outputs = self._keep_graph(index, rows, wanted, kept, retention)
                else:
                    graph = grad and self.other_path
                    outputs = self._drop_graph(index, rows, wanted if graph else None, kept)
                self._gather(gathered, outputs, self.bounds[index])
        for device in {out.device for out in outputs if out is not None} if self.home else ():
            settle(device)
        return gathered

    def _drop_graph(
        self, index: int, rows: Sequence[Tensor | None], wanted: Sequence[bool] | None, kept: _Kept
    ) -> list[Any]:
        """A sub-batch's outputs, computed with a graph if something is `wanted`."""
        if wanted is None:
            return self.with_room(kept.random[index], self.run, index, rows)
        return self.with_room(kept.random[index], self.run_with_graph, index, rows, wanted)[0]

    def _keep_graph(
        self, index: int, rows: Sequence[Tensor | None], wanted: Sequence[bool], kept: _Kept, retention: Retention
    ) -> list[Any]:
        """A sub-batch's outputs with their graph; of "auto", the oldest graphs give way where memory ends."""
        size = sum(row.nbytes for row in rows if row is not None)
        run = partial(self.run_with_graph, index, rows, wanted)
        while retention.tries(index):
            try:
                graph = retention.weighed(index, run, size, partial(self._later, rows, wanted))
            except torch.OutOfMemoryError:
                if not retention.auto or self.sharding.modules:
                    raise
                oldest = min(kept.graphs, default=index)
                kept.graphs.give_up(oldest)
                retention.gave_up(oldest)
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
        batch = self.bounds[-1][1]
        if not gathered:
            gathered += [None if out is None else _room(out, batch, stop - start, self.home) for out in outputs]
        for whole, part in zip(gathered, outputs, strict=True):
            if (whole is None) != (part is None) or (
                whole is not None and (part.shape[1:] != whole.shape[1:] or len(part) != stop - start)
            ):
                got = "None" if part is None else f"shape {list(part.shape)}"
                raise wrong(
                    "encoder", "return rows of one shape, one for each example", got, "Pad all sub-batches alike."
                )
            if whole is not None:
                whole[start:stop].copy_(part, non_blocking=self.home)


def _room(out: Any, batch: int, rows: int, home: bool) -> Tensor:
    if not isinstance(out, Tensor) or out.ndim == 0 or len(out) != rows:
        got = f"shape {list(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise wrong(
            "encoder", f"return tensors whose first axis is the sub-batch of {rows}", got, "Return the features only."
        )
    shape = (batch, *out.shape[1:])
    return host_room(shape, out.dtype) if home and on_accelerator(out) else out.new_empty(shape)


class _Encode(torch.autograd.Function):
    """Acts 1 and 3. Its inputs are the parameters, so that each one's hooks fire once, with the whole gradient."""

    @staticmethod
    def forward(ctx: Any, job: _Job, leaves: list[Tensor | None], *inputs: Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.job, ctx.kept = job, job.nothing_kept()
        ctx.wanted = [leaf is not None and leaf.requires_grad for leaf in leaves]
        ctx.parameters = inputs[: len(inputs) - sum(ctx.wanted)]
        ctx.versions = [parameter._version for parameter in job.sharding.stored(ctx.parameters)]
        ctx.save_for_backward(*leaves)
        features = job.first_pass(leaves, ctx.kept, grad=True)
        ctx.mark_non_differentiable(
            *(out for out in features if out is not None and not (out.is_floating_point() or out.is_complex()))
        )
        return tuple(features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        job: _Job = ctx.job
        leaves: Sequence[Tensor | None] = ctx.saved_tensors
        for parameter, version in zip(job.sharding.stored(ctx.parameters), ctx.versions, strict=True):
            if parameter._version != version:
                got = f"one of shape {list(parameter.shape)} that has changed since"
                raise wrong(
                    "encoder", "have the parameters of the first pass", got, "Step the optimizer after backward."
                )
        sums = Sums(job.bounds, list(ctx.parameters), leaves, upstream)
        values = [None if leaf is None else leaf.detach() for leaf in leaves]
        after = RandomState.capture(job.device)
        try:
            with silent(ctx.parameters), job.sharding.holding_back():
                done = _consume(job, ctx.kept.graphs, sums)
                again = [index for index in range(len(job.bounds)) if index not in done]
                places = stream(values, [job.bounds[index] for index in again], job.device)
                with sharing_casts(job.device):
                    for index, rows in zip(again, places, strict=True):
                        ctx.kept.random[index].restore()
                        job.with_room(ctx.kept.random[index], _replay, job, index, rows, ctx.wanted, sums)
        finally:
            after.restore()
        if job.home:
            # autograd takes this for a node of the CPU, and would not let the parameters' stream wait for it
            settle(job.device)
        return None, None, *sums.finish()


def _consume(job: _Job, graphs: Graphs, sums: Sums) -> set[int]:
    """Back-propagates the sub-batches that still have their graph, the last first; those that came through."""
    done = set()
    while graphs:
        index = max(graphs)
        try:
            # out of the others' reach; each gives memory back
            sums.add(index, *graphs.pop(index))
        except torch.OutOfMemoryError:
            if not graphs.yielding:
                raise
            graphs.give_up(index)
        else:
            job.sharding.settle()
            done.add(index)
    return done


def _replay(job: _Job, index: int, rows: Sequence[Tensor | None], wanted: Sequence[bool], sums: Sums) -> None:
    """Encodes a sub-batch again, as the first time, and back-propagates it."""
    with job.autocast.entered():
        outputs, inputs = job.run_with_graph(index, rows, wanted)
    sums.add(index, outputs, inputs)
    job.sharding.settle()
