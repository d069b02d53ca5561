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
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from contrastile._check import wrong
from contrastile._types import accumulator
from contrastile.lengths import Cut, cut, cut_by_tokens
from contrastile.offload import Bounds, numbered, stream
from contrastile.reach import (
    Autocast,
    RandomState,
    Reached,
    graph_leaves,
    has_other_path,
    reach,
    refusing_batch_norm,
    silent,
)
from contrastile.retention import AUTO, Retention, largest_sub_batch
from contrastile.wrappers import Sharding, inside, refuse_bypass, unwrap


def encode(
    encoder: Callable[..., Any] | tuple[nn.Module, str],
    inputs: Any,
    *,
    sub_batch: int | Literal["auto"] | None = None,
    sub_batch_tokens: int | None = None,
    retain: int | Literal["auto"] = 0,
    device: torch.device | str | None = None,
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

    Returns what the encoder returns (tensor, tuple, dict, nested), each leaf for the whole batch.
    Raises ValueError for inputs that cannot be cut, for batch normalisation in training mode, whose statistics over a
    sub-batch are not those of the batch, and for the module inside a DistributedDataParallel, whose gradients would
    not be reduced.

    >>> from torch import nn
    >>> tower = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    >>> features = encode(tower, torch.randn(10, 8), sub_batch=4)
    >>> features.sum().backward()
    """
    function, wrapper = unwrap(encoder)
    if not callable(function):
        raise wrong("encoder", "be callable", type(function).__name__, "Pass a module, a method of one, or a function.")
    _check_sizes(sub_batch, sub_batch_tokens, retain)
    leaves, structure = pytree.tree_flatten(_arguments(inputs))
    batch = _batch_size(leaves)
    reached = reach(function, leaves, structure, numbered(device) if device is not None else None)
    refuse_bypass(wrapper, reached.modules, reached.parameters)
    sharding = Sharding.of(function, reached.modules)
    reached = replace(reached, parameters=sharding.wholes(reached.modules, reached.parameters))
    autocast, other = Autocast.current(reached.device), has_other_path(function, reached.modules)
    job = _Job(function, structure, Cut([(0, batch)]), retain, reached, autocast, sharding, other)
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
            features = inside(wrapper, apply) if wrapper is not None and reached.parameters else apply()
        else:
            features = job.first_pass(leaves, _Kept(), grad=False)
    return pytree.tree_unflatten(planned.unsort(features), job.output_structure[0])


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
    before = RandomState.capture(job.device)
    try:
        return largest_sub_batch(work, _batch_size(leaves), job.device, key=key, shapes=shapes, most=job.sharding.most)
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


# a sub-batch's outputs with their graph, and the inputs that want a gradient
Graph = tuple[list[Any], list[Tensor]]


@dataclass
class _Kept:
    """What the first pass keeps for the backward."""

    random: list[RandomState] = field(default_factory=list)
    # by sub-batch
    graphs: dict[int, Graph] = field(default_factory=dict)


@dataclass(frozen=True)
class _Job:
    """One call of `encode`: all that is not differentiated."""

    encoder: Callable[..., Any]
    structure: Any
    cut: Cut
    retain: int | Literal["auto"]
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
        with torch.no_grad():
            for index, rows in enumerate(stream(values, self.bounds, self.device)):
                kept.random.append(RandomState.capture(self.device))
                if retention.tries(index):
                    outputs = self._keep_graph(index, rows, wanted, kept, retention)
                elif grad and self.other_path:
                    outputs, _ = self.run_with_graph(index, rows, wanted)
                else:
                    outputs = self.run(index, rows)
                self._gather(gathered, outputs, self.bounds[index])
        return gathered

    def _keep_graph(
        self, index: int, rows: Sequence[Tensor | None], wanted: Sequence[bool], kept: _Kept, retention: Retention
    ) -> list[Any]:
        """A sub-batch's outputs with their graph; of "auto", the oldest graphs give way where memory ends."""
        size = sum(row.nbytes for row in rows if row is not None)
        while retention.tries(index):
            try:
                with retention.weighing(index, size):
                    graph = self.run_with_graph(index, rows, wanted)
            except torch.OutOfMemoryError:
                # what one rank runs again, all would have to
                if not retention.auto or self.sharding.modules:
                    raise
                oldest = min(kept.graphs, default=index)
                kept.graphs.pop(oldest, None)
                retention.gave_up(oldest)
                kept.random[index].restore()
            else:
                if retention.keeps(index):
                    kept.graphs[index] = graph
                return graph[0]
        return self.run(index, rows)

    def _gather(self, gathered: list[Any], outputs: Sequence[Any], bounds: Bounds) -> None:
        start, stop = bounds
        batch = self.bounds[-1][1]
        if not gathered:
            gathered += [None if out is None else _room(out, batch, stop - start) for out in outputs]
        for whole, part in zip(gathered, outputs, strict=True):
            if (whole is None) != (part is None) or (
                whole is not None and (part.shape[1:] != whole.shape[1:] or len(part) != stop - start)
            ):
                got = "None" if part is None else f"shape {list(part.shape)}"
                raise wrong(
                    "encoder", "return rows of one shape, one for each example", got, "Pad all sub-batches alike."
                )
            if whole is not None:
                whole[start:stop] = part.detach()


def _room(out: Any, batch: int, rows: int) -> Tensor:
    if not isinstance(out, Tensor) or out.ndim == 0 or len(out) != rows:
        got = f"shape {list(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise wrong(
            "encoder", f"return tensors whose first axis is the sub-batch of {rows}", got, "Return the features only."
        )
    return out.new_empty((batch, *out.shape[1:]))


class _Encode(torch.autograd.Function):
    """Acts 1 and 3. Its inputs are the parameters, so that each one's hooks fire once, with the whole gradient."""

    @staticmethod
    def forward(ctx: Any, job: _Job, leaves: list[Tensor | None], *inputs: Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.job, ctx.kept = job, _Kept()
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
        sums = _Sums(job, list(ctx.parameters), leaves, upstream)
        graphs, ctx.kept.graphs = ctx.kept.graphs, {}
        again = [index for index in range(len(job.bounds)) if index not in graphs]
        values = [None if leaf is None else leaf.detach() for leaf in leaves]
        after = RandomState.capture(job.device)
        try:
            with silent(ctx.parameters), job.sharding.holding_back():
                # those that still have their graph first: each gives memory back
                for index in sorted(graphs, reverse=True):
                    sums.add(index, *graphs.pop(index))
                for index, rows in zip(again, stream(values, [job.bounds[i] for i in again], job.device), strict=True):
                    ctx.kept.random[index].restore()
                    with job.autocast.restored():
                        outputs, inputs = job.run_with_graph(index, rows, ctx.wanted)
                    sums.add(index, outputs, inputs)
        finally:
            after.restore()
        return None, None, *sums.finish()


class _Sums:
    """Act 3's running gradients of parameters and inputs, in the accumulator's type."""

    def __init__(
        self,
        job: _Job,
        parameters: list[Tensor],
        leaves: Sequence[Tensor | None],
        upstream: Sequence[Tensor | None],
    ) -> None:
        self.job, self.parameters, self.upstream = job, parameters, upstream
        self.totals: list[Tensor | None] = [None] * len(parameters)
        # whether a total is ours to add to in place; the first gradient is autograd's, and may be shared
        self.owned = [False] * len(parameters)
        self.known = {id(parameter) for parameter in parameters}
        self.inputs = [torch.zeros_like(leaf) for leaf in leaves if leaf is not None and leaf.requires_grad]

    def add(self, index: int, outputs: Sequence[Any], inputs: list[Tensor]) -> None:
        """Back-propagates one sub-batch from its part of the cached gradients."""
        start, stop = self.job.bounds[index]
        pairs = [
            (out, whole[start:stop])
            for out, whole in zip(outputs, self.upstream, strict=True)
            if out is not None and out.requires_grad and whole is not None
        ]
        if not pairs:
            return
        outs, gradients = zip(*pairs, strict=True)
        self._refuse_strangers(outs, inputs)
        found = torch.autograd.grad(outs, [*self.parameters, *inputs], gradients, allow_unused=True)
        self.job.sharding.settle()
        self._accumulate(found[: len(self.parameters)])
        for whole, gradient in zip(self.inputs, found[len(self.parameters) :], strict=True):
            if gradient is not None:
                whole[start:stop] = gradient

    def _accumulate(self, gradients: Sequence[Tensor | None]) -> None:
        owned: list[tuple[Tensor, Tensor]] = []
        for place, gradient in enumerate(gradients):
            if gradient is None:
                continue
            total, wide = self.totals[place], gradient.to(accumulator(gradient.dtype))
            if total is None:
                self.totals[place] = wide
            elif self.owned[place]:
                owned.append((total, wide))
            else:
                self.totals[place] = total + wide
                self.owned[place] = True
        if owned:
            # a few kernels instead of one for each parameter
            torch._foreach_add_(*map(list, zip(*owned, strict=True)))

    def _refuse_strangers(self, outs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        known = self.known | {id(row) for row in inputs}
        for leaf in graph_leaves(outs):
            if id(leaf) not in known:
                got = f"one of shape {list(leaf.shape)} elsewhere"
                raise wrong(
                    "encoder",
                    "own every parameter that it uses",
                    got,
                    "Pass the module that holds them, or its method.",
                )

    def finish(self) -> list[Tensor | None]:
        return [
            None if total is None else total.to(parameter.dtype)
            for parameter, total in zip(self.parameters, self.totals, strict=True)
        ] + self.inputs
