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
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from contrastile._check import one_of, present_device, whole_number, wrong
from contrastile.first_pass import Job, differentiable
from contrastile.fitting import fitted
from contrastile.lengths import Cut, cut, cut_by_tokens
from contrastile.likeness import Likeness, hear
from contrastile.offload import numbered, settle, stream
from contrastile.reach import Autocast, has_other_path, in_modes, reach, refusing_batch_norm, sharing_casts, silent
from contrastile.retention import AUTO, Graphs
from contrastile.sums import Sums
from contrastile.wrappers import Sharding, inside, refuse_bypass, unwrap


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

    Naively `encoder(inputs)`, value and gradients, for every encoder that treats examples one by one. What it draws
    from torch, from Python's `random` and NumPy's, or from a generator that is a module's attribute is the same in both
    passes.

    Arguments:
        encoder: a module, a method of one (`model.encode_image`), or any function that reaches one. A pair
            `(model, "encode_image")` names a method, also where DistributedDataParallel wraps the model or FSDP2
            (`fully_shard`) shards it; either may be passed as a module too. However many sub-batches and calls, each
            gradient is reduced once.
        inputs: a tensor is passed as `encoder(x)`, a tuple as `encoder(*x)`, a mapping as `encoder(**x)`; nested as
            you like. Every leaf is None or a tensor whose first axis is the batch, on the device or in (pinned)
            host memory.
        sub_batch: examples encoded at once. The last sub-batch may be shorter. "auto": as many as fit into memory,
            found at the first call for an encoder and kept; halved where memory ends after all. Ranks that a wrapper
            joins take the smallest size of any.
        sub_batch_tokens: tokens encoded at once, padding included, of a mapping with an `attention_mask` [batch,
            length], which is 0 at padding. Texts are sorted by length, so that short ones travel together, and trimmed
            to the longest of their sub-batch, in every tensor whose second axis is as long as the mask's. One without
            any token keeps all its positions. With `sub_batch` too, both are limits.
        retain: sub-batches, the last ones, whose graph is kept from the first pass; they need no second forward.
            "auto": as many as memory allows; with room for all, caching costs nothing. Behind a frozen trunk, where
            they hold little more than its features, all are kept unasked, as long as there is room.
        device: where the encoder computes; by default where its parameters are.
        features: where they wait. "host": in pinned host memory, which every sub-batch's go to as soon as they are
            there; a loss with `device=` takes them from it, and their gradients come back from it sub-batch by
            sub-batch. Normalise them in the encoder then. Without an accelerator it is the same.

    Returns what the encoder returns (tensor, tuple, dict, nested), each leaf for the whole batch. A tensor without
    axes, a bias say, must be the same number for every sub-batch, and comes back as that number.
    Warns once where the second pass gives other features than the first; on a GPU in a later call.
    Raises ValueError for inputs that cannot be cut, for batch normalisation in training mode, whose statistics over a
    sub-batch are not those of the batch, for modules that change a buffer when they run, for encoders that write over
    their inputs or parameters, for the module inside a DistributedDataParallel, whose gradients would not be reduced,
    and for `checkpoint(..., use_reentrant=True)`.

    >>> from torch import nn
    >>> tower = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    >>> features = encode(tower, torch.randn(10, 8), sub_batch=4)
    >>> features.sum().backward()
    """
    if torch.compiler.is_compiling():
        # a graph ends here and goes on behind: compiled with the first pass only, the encoder would draw other numbers
        return torch.compiler.disable(encode)(
            encoder, inputs, sub_batch=sub_batch, sub_batch_tokens=sub_batch_tokens, retain=retain, device=device,
            features=features,
        )  # fmt: skip
    hear()
    function, wrapper = unwrap(encoder)
    if not callable(function):
        raise wrong("encoder", "be callable", type(function).__name__, "Pass a module, a method of one, or a function.")
    if sub_batch is None and sub_batch_tokens is None:
        raise wrong("sub_batch", "be given, or sub_batch_tokens", None, 'Say how much is encoded at once, or "auto".')
    sub_batch, retain = _count("sub_batch", sub_batch, 1), _count("retain", retain, 0, (AUTO,))
    sub_batch_tokens = _count("sub_batch_tokens", sub_batch_tokens, 1, (None,))
    one_of("features", features, ("device", "host"), "The host has room for more.")
    leaves, structure = pytree.tree_flatten(_arguments(inputs))
    batch = _batch_size(leaves)
    reached = reach(function, leaves, structure, _device(device))
    refuse_bypass(wrapper, reached.modules, reached.parameters)
    sharding = Sharding.of(function, reached.modules)
    reached = replace(reached, parameters=sharding.wholes(reached.modules, reached.parameters))
    autocast, other = Autocast.current(reached.device), has_other_path(function, reached.modules)
    job = Job(function, structure, Cut([(0, batch)]), retain, features == "host", reached, autocast, sharding, other)
    # the wrapper of what will be reduced
    wrapper = wrapper if reached.parameters else None
    run: Callable[..., list[Tensor | None]] = partial(_encoded, job, leaves, inputs, sub_batch_tokens)
    run = partial(fitted, job, leaves, batch, wrapper, run) if sub_batch == AUTO else partial(run, sub_batch)
    with refusing_batch_norm(reached.modules):
        found = run() if wrapper is None else inside(wrapper, run)
    return pytree.tree_unflatten(found, job.output_structure[0])


def _count(name: str, value: Any, least: int, words: tuple[Any, ...] = (None, AUTO)) -> Any:
    """How many examples, tokens or sub-batches; or one of the words."""
    if (value is None or isinstance(value, str)) and value in words:
        return value
    remedy = "Count examples, tokens, or sub-batches" + (', or say "auto".' if AUTO in words else ".")
    return whole_number(name, value, least, remedy)


def _device(device: torch.device | str | None) -> torch.device | None:
    return None if device is None else numbered(present_device(device, "where the encoder is"))


def _encoded(
    job: Job, leaves: Sequence[Tensor | None], inputs: Any, tokens: int | None, sub_batch: int | None
) -> list[Tensor | None]:
    """The features of the batch, in sub-batches of so many examples, or tokens, or both."""
    batch = _batch_size(leaves)
    planned = cut(batch, sub_batch or batch) if tokens is None else cut_by_tokens(inputs, tokens, sub_batch)
    planned = planned.extended(job.sharding.most(len(planned.bounds)))
    job, leaves = replace(job, cut=planned), planned.sort(leaves)
    if job.differentiates(leaves):
        # what measures between two steps knows itself what to do about an error
        with job.sharding.in_step():
            found = _Encode.apply(job, leaves, *job.reached.parameters, *differentiable(leaves))
    else:
        found = job.first_pass(leaves, job.nothing_kept(), grad=False)
    return planned.unsort(found)


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def _batch_size(leaves: Sequence[Any]) -> int:
    sizes = []
    for leaf in leaves:
        if leaf is not None and (not isinstance(leaf, Tensor) or leaf.ndim == 0):
            got = "a tensor without axes" if isinstance(leaf, Tensor) else type(leaf).__name__
            remedy = "Convert arrays with torch.as_tensor; bind other arguments with functools.partial."
            if isinstance(leaf, str):
                remedy = "Tokenise texts first; bind other arguments with functools.partial."
            raise wrong("inputs", "be tensors whose first axis is the batch", got, remedy)
        if leaf is not None:
            sizes.append(len(leaf))
    if not sizes:
        raise wrong("inputs", "contain a tensor", "none", "Pass what the encoder takes.")
    if len(set(sizes)) > 1:
        raise wrong("inputs", "have the same first axis, the batch", sorted(set(sizes)), "Check each tensor's shape.")
    return sizes[0]


class _Encode(torch.autograd.Function):
    """Acts 1 and 3. Its inputs are the parameters, so that each one's hooks fire once, with the whole gradient."""

    @staticmethod
    def forward(ctx: Any, job: Job, leaves: list[Tensor | None], *inputs: Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.job, ctx.kept = job, job.nothing_kept()
        ctx.wanted = [leaf is not None and leaf.requires_grad for leaf in leaves]
        ctx.parameters = inputs[: len(inputs) - sum(ctx.wanted)]
        ctx.versions = [parameter._version for parameter in job.sharding.stored(ctx.parameters)]
        ctx.save_for_backward(*leaves)
        features = job.first_pass(leaves, ctx.kept, grad=True)
        if (parameter := _written_over(job, ctx)) is not None:
            got = f"one of shape {list(parameter.shape)} that it writes over, as Embedding(max_norm=...) does"
            raise wrong("encoder", "leave its parameters as they are", got, "Change them after the optimizer's step.")
        ctx.mark_non_differentiable(
            *(out for out in features if out is not None and not (out.is_floating_point() or out.is_complex()))
        )
        return tuple(features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        job: Job = ctx.job
        leaves: Sequence[Tensor | None] = ctx.saved_tensors
        if (parameter := _written_over(job, ctx)) is not None:
            got = f"one of shape {list(parameter.shape)} that has changed since"
            raise wrong("encoder", "have the parameters of the first pass", got, "Step the optimizer after backward.")
        sums = Sums(job.bounds, list(ctx.parameters), leaves, upstream)
        likeness = Likeness(ctx.kept.sketches, [*job.reached.dtypes, *job.autocast.dtypes])
        values = [None if leaf is None else leaf.detach() for leaf in leaves]
        drawn = {generator for state in ctx.kept.random for generator in state.process}
        after = job.reached.random(process=drawn)
        try:
            modes = in_modes(job.reached.modules, ctx.kept.training)
            with job.sharding.in_step(), silent(ctx.parameters), job.sharding.holding_back(), modes:
                done = _consume(job, ctx.kept.graphs, sums)
                again = [index for index in range(len(job.bounds)) if index not in done]
                places = stream(values, [job.bounds[index] for index in again], job.device)
                with sharing_casts(job.device):
                    for index, rows in zip(again, places, strict=True):
                        ctx.kept.random[index].restore()
                        job.with_room(ctx.kept.random[index], _replay, job, index, rows, ctx.wanted, likeness, sums)
        finally:
            after.restore()
        likeness.tell(job.name)
        if job.home:
            # autograd takes this for a node of the CPU, and would not let the parameters' stream wait for it
            settle(job.device)
        return None, None, *sums.finish()


def _written_over(job: Job, ctx: Any) -> Tensor | None:
    """A parameter that somebody has changed since the first pass began."""
    now = zip(job.sharding.stored(ctx.parameters), ctx.versions, strict=True)
    return next((parameter for parameter, version in now if parameter._version != version), None)


def _consume(job: Job, graphs: Graphs, sums: Sums) -> set[int]:
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


def _replay(
    job: Job, index: int, rows: Sequence[Tensor | None], wanted: Sequence[bool], likeness: Likeness, sums: Sums
) -> None:
    """Encodes a sub-batch again, as the first time, and back-propagates it."""
    with job.autocast.entered():
        outputs, inputs = job.run_with_graph(index, rows, wanted)
    likeness.look(index, outputs, sums.upstream)
    sums.add(index, outputs, inputs)
    job.sharding.settle()
