"""encode(): the gradient cache as one autograd operation (Gao et al. 2021, section 3.3).

1. `first_pass` runs the encoder over the batch, sub-batch by sub-batch, without graphs, and returns the features.
2. The loss returns the gradients of the features: they are the cache.
3. `second_pass` encodes each sub-batch again, with the random numbers and the autocast of the first pass, and
   back-propagates it. The parameters' gradients are summed in float32, and autograd gets them once, as if the whole
   batch had been encoded at once. So it works with any loss, any number of towers and any training loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Any, Literal, Never

import torch
from torch import Tensor, nn

from contrastile._errors import invalid, one_of, unknown_keyword, whole_number
from contrastile._torch import forward_ad_runs, func_transform, jit_traces, running_ddp, version
from contrastile.gradcache import ddp_fsdp, introspect, modes
from contrastile.gradcache.auto import with_fitting_size
from contrastile.gradcache.batching import SubBatches, split, split_by_tokens, stand_ins
from contrastile.gradcache.ddp_fsdp import Sharding
from contrastile.gradcache.forward import Features, Job, OutputForm, Record, detached, differentiable, refuse_gradients
from contrastile.gradcache.inputs import Layout, Parts, laid_out, laid_out_parts, lendable, listed
from contrastile.gradcache.introspect import Reached
from contrastile.gradcache.memory import AUTO, Releasable
from contrastile.gradcache.modes import Autocast, first_order, in_modes, sharing_casts, without_hooks
from contrastile.gradcache.replay_check import ReplayCheck, poll, sketched, warn_of_detached
from contrastile.gradcache.sums import GradientSums
from contrastile.offload import present_device, settle, stream, with_index


def encode(
    encoder: Callable[..., Any] | tuple[nn.Module, str | Callable[..., Any]],
    inputs: Any = None,
    *,
    parts: Sequence[Any] | None = None,
    sub_batch: int | Literal["auto"] | None = None,
    sub_batch_tokens: int | None = None,
    retain: int | Literal["auto"] = 0,
    device: torch.device | str | None = None,
    features: Literal["device", "host"] = "device",
    **unknown: Never,
) -> Any:
    """Features of a batch of any size, with the activations of one sub-batch in memory at a time.

    Equal to `encoder(inputs)`, value and gradients, for every encoder that treats examples one by one. Both passes draw
    the same random numbers from torch, Python's `random`, NumPy, and generators that are attributes of a module.

    Arguments:
        encoder: a module, a method of one (`model.encode_image`), or any function that reaches one. A pair
            `(model, "encode_image")` names a method, also of a model that DistributedDataParallel wraps or FSDP2
            (`fully_shard`) shards; such a model may be passed as a module too. A pair `(model, function)` stands for
            `function(model, ...)`, with the module inside a DistributedDataParallel. Each gradient is reduced once, for
            any number of sub-batches and calls. DeepSpeed's engine of ZeRO stage 0, 1 or 2 is such a wrapper too, and
            runs the backward.
        inputs: a tensor is passed as `encoder(x)`, a tuple as `encoder(*x)`, a mapping as `encoder(**x)`; nesting is
            allowed. A tensor's first axis is the batch; it may be on the device or in (pinned) host memory. Packed
            values, such as the patches of images of many sizes, come as `Ragged(values, lengths)`. A list with an entry
            for each example and no tensor in it, or a tuple of texts, is cut beside a tensor. All other values are
            passed on as they are.
        parts: in place of `inputs`, a list of the sub-batches that a data loader made, in any form that the encoder
            takes: each is passed whole, and its features follow those of the one before. A rank without examples may
            pass `[]`, in training under DistributedDataParallel, DeepSpeed or FSDP2, if all ranks pass `parts`: it gets
            features without rows, and runs the encoder on a sub-batch of another rank without adding to gradients.
        sub_batch: examples encoded at once. The last sub-batch may be shorter; a compiled encoder runs uncompiled
            on it. "auto": as many as fit into memory, measured at the first call for an encoder and remembered,
            and halved if memory runs out later. Ranks that a wrapper joins take the smallest size of any.
        sub_batch_tokens: tokens encoded at once, padding included, for a mapping with an `attention_mask` [batch,
            length], which is 0 at padding. Texts are sorted by length, so that short ones share a sub-batch, and
            trimmed to the longest of their sub-batch, in every tensor whose second axis is as long as the mask's. An
            encoder in which padding counts, as in a convolution over tokens, gets other features. A text without any
            token keeps all its positions. `sub_batch` is a further limit. A compiled encoder is compiled for each
            length, so lengths are rounded up for it.
        retain: number of sub-batches, the last ones, whose graph is kept from the first pass; they need no second
            forward. "auto": as many as memory allows; with room for all, caching costs nothing. With 1 or more, a batch
            of one sub-batch is plain autograd, outside of wrappers. Behind a frozen trunk all graphs are kept while
            there is room, for any `retain`: they hold little more than the trunk's features.
        device: device on which the encoder computes; by default that of its parameters.
        features: memory in which the features wait. "host": pinned host memory, to which each sub-batch's features are
            copied at once; a loss with `device=` reads them there, and their gradients come back from there sub-batch
            by sub-batch. Normalise them in the encoder then. Without an accelerator both are the same.

    Returns the encoder's result (tensor, tuple, dict, nested), each leaf for the whole batch. Packed values, `Ragged`,
    are joined along their first axis. A number of shape [] or [1] that is not a row for each example, such as a scale,
    must be the same for every sub-batch, and is returned as it is. It must have shape [] where all parts have one row.
    Warns once about features that differ in the second pass (on a GPU in a later call), and about those that a module
    or its method detaches; those of another function then have no graph, as without `encode`.
    Raises ValueError for inputs that cannot be split; for batch normalisation in training mode, and modules that change
    a buffer when they run; for encoders that write over their inputs or parameters; for the module inside a
    DistributedDataParallel, whose gradients would not be reduced; for modules of torch.jit; and for
    `checkpoint(..., use_reentrant=True)`.

    >>> from torch import nn
    >>> tower = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    >>> features = encode(tower, torch.randn(10, 8), sub_batch=4)
    >>> features.sum().backward()
    """
    if unknown:
        raise unknown_keyword(unknown, list(signature(encode).parameters)[2:-1])
    if torch.compiler.is_compiling() or jit_traces():
        # break the graph: an encoder compiled in the first pass alone would draw other random numbers
        return modes.uncompiled("encode", encode)(
            encoder, inputs, parts=parts, sub_batch=sub_batch, sub_batch_tokens=sub_batch_tokens, retain=retain,
            device=device, features=features,
        )  # fmt: skip
    if func_transform() is not None or forward_ad_runs():
        rule, got = "run outside of torch.func and of forward-mode differentiation", "a call inside"
        raise invalid("encode", rule, got, "Call backward, or torch.autograd.grad.")
    poll()
    function, wrapper = ddp_fsdp.unwrap(encoder)
    if isinstance(function, type):
        raise invalid("encoder", "be an object", f"the class {function.__name__}", f"Pass {function.__name__}(...).")
    if not callable(function):
        remedy = "Pass a module, a method of one, or a function."
        raise invalid("encoder", "be callable", type(function).__name__, remedy)
    check_sizes(inputs, parts, sub_batch, sub_batch_tokens)
    examples, retain = checked_count("sub_batch", sub_batch, 1), checked_count("retain", retain, 0, (AUTO,))
    tokens = checked_count("sub_batch_tokens", sub_batch_tokens, 1, (None,))
    one_of("features", features, ("device", "host"), "The host has room for more.")
    layout, leaves = _laid_out(encoder, wrapper, inputs, parts)
    if tokens is not None and not layout.plain:
        remedy = "Cut by examples with sub_batch."
        raise invalid("sub_batch_tokens", "come with inputs that are all rows", "packed values or lists", remedy)
    target = None if device is None else with_index(present_device(device, "where the encoder is"))
    reached = introspect.reach(function, leaves, layout, target)
    ddp_fsdp.refuse_bypass(wrapper, reached.modules, reached.parameters)
    engine = ddp_fsdp.engine_of(encoder)
    job = _job(function, wrapper, layout, reached, engine, retain=retain, to_host=features == "host")
    batch, parameters = layout.batch, job.reached.parameters
    form, rounded = OutputForm(), tokens is not None and introspect.runs_compiled(function, reached.modules)
    # evaluation reduces nothing, so it needs no forward of the wrapper
    wrapper = wrapper if parameters else None

    def run(size: int | None = examples) -> list[Tensor | None]:
        batches = (
            split(batch, size or (batch if parts is None else 1))
            if tokens is None
            else split_by_tokens(inputs, tokens, size, rounded=rounded)
        )
        batches = batches.extended(job.sharding.most(len(batches.bounds), retain=retain))
        planned, ordered = replace(job, batches=batches), batches.sort(leaves)
        if not planned.differentiates(ordered):
            return form.unsort(first_pass(planned, ordered, form, grad=False)[0], batches)
        # DistributedDataParallel waits for all parameters, also for those that no example reaches: inputs of `_Encode`
        if planned.retains_the_batch and wrapper is None and running_ddp() is None:
            return form.unsort(one_pass(planned, ordered, form), batches)
        with job.sharding.in_step():
            return form.unsort(_Encode.apply(planned, form, ordered, *parameters, *differentiable(ordered)), batches)

    # a search for the size handles its own errors, outside of `in_step`
    encoded = partial(with_fitting_size, job, leaves, batch, wrapper, run) if examples == AUTO else run
    with introspect.refusing_batch_norm(reached.modules):
        outputs = encoded() if wrapper is None else ddp_fsdp.as_forward_of(wrapper, encoded)
    return form.unflatten(outputs)


def _laid_out(
    encoder: Any, wrapper: Any, inputs: Any, parts: Sequence[Any] | None
) -> tuple[Layout | Parts, list[Tensor]]:  # fmt: skip
    """The layout of the batch, and its tensors.

    A rank without parts has those that another lends it, a batch without examples stand-ins of their shapes.
    """
    if parts is None:
        layout, leaves = laid_out(inputs)
        return layout, leaves if layout.batch else stand_ins(leaves, inputs)
    parts = listed(parts)
    borrowed = ddp_fsdp.lent_part(encoder, wrapper, partial(lendable, parts) if parts else None)
    return laid_out_parts(parts, borrowed)


def _job(function: Any, wrapper: Any, layout: Layout | Parts, reached: Reached, engine: Any, **settings: Any) -> Job:
    """The work of both passes, with the batch as one sub-batch, and with the wrapper's parameters."""
    ddp_fsdp.refuse_missing_autocast(engine, reached.device)
    sharding = Sharding.of(function, reached.modules)
    parameters = sharding.wholes_of(reached.parameters, reached.modules)
    if wrapper is not None and parameters:
        # the wrapper waits for all, and a function of its module may reach a part of them
        others = (parameter for parameter in wrapper.module.parameters() if parameter.requires_grad)
        parameters = list(dict.fromkeys([*parameters, *others]))
    return Job(
        encoder=function, layout=layout, batches=SubBatches([(0, layout.batch)]),
        reached=replace(reached, parameters=parameters), autocast=Autocast.current(reached.device), sharding=sharding,
        graph_changes_bits=introspect.graph_may_change_bits(function, reached.modules), engine=engine, **settings,
    )  # fmt: skip


class _Encode(torch.autograd.Function):
    """Both passes as one operation. Its inputs are the parameters, whose hooks fire once, with the whole gradient."""

    @staticmethod
    def forward(ctx: Any, job: Job, form: OutputForm, leaves: list[Tensor], *inputs: Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.job = job
        ctx.parameters = inputs[: len(inputs) - len(differentiable(leaves))]
        ctx.versions = [(version(x), x.dtype, x.device) for x in job.sharding.shards_of(ctx.parameters)]
        ctx.save_for_backward(*leaves)
        features, ctx.record = first_pass(job, leaves, form, grad=True)
        rule, got = "leave its parameters as they are", "that it writes over, as Embedding(max_norm=...) does"
        _refuse_changed_parameters(ctx, rule, got, "Change them after the optimizer's step.")
        ctx.mark_non_differentiable(
            *(out for out in features if out is not None and not (out.is_floating_point() or out.is_complex()))
        )
        return tuple(features)

    @staticmethod
    @first_order("encode")
    def backward(ctx: Any, leaves: Sequence[Tensor], *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        ddp_fsdp.refuse_bare_backward(ctx.job.engine)
        rule = "have the parameters of the first pass"
        _refuse_changed_parameters(ctx, rule, "that has changed since", "Step the optimizer after backward.")
        return None, None, None, *second_pass(ctx.job, ctx.record, ctx.parameters, leaves, upstream)


def first_pass(job: Job, leaves: Sequence[Tensor], form: OutputForm, *, grad: bool) -> tuple[list[Any], Record]:
    """The features of the whole batch, and the record for the second pass. grad: a backward will follow."""
    values, wanted = detached(leaves)
    frozen = [parameter for parameter in job.reached.every if not parameter.requires_grad]
    training = [module.training for module in job.reached.modules]
    record = Record(form, job.graphs(leaves, grad), training, frozen, wanted)
    with_graph = wanted if grad and job.graph_changes_bits else None
    features = Features(job, form)
    # in the caller's grad mode: without `grad`, an output with a graph shows a parameter that was missed
    with introspect.refusing_state(job.reached.modules), introspect.refusing_changes(leaves):
        for index, rows in enumerate(stream(job.rows(values), job.device)):
            random = job.reached.random(last=record.random[-1] if record.random else None)
            record.random.append(random)
            outputs = job.run_retaining(record, index, rows, wanted)
            if outputs is None:
                outputs, _ = job.with_room(partial(job.run, index, rows, form, with_graph), random)
            if grad:
                record.sketches.append(sketched(outputs))
            else:
                refuse_gradients(outputs)
            form.shared = form.shared or job.shared_outputs(outputs, values, form, random)
            features.add(index, outputs)
            # free the graph before the next one is built
            del outputs
    states = [*record.random, job.reached.random(last=record.random[-1])]
    record.random = [state.drawn(following) for state, following in pairwise(states)]
    return features.finish(), record


def one_pass(job: Job, leaves: Sequence[Tensor], form: OutputForm) -> list[Any]:
    """The features of a batch that is one sub-batch and retains its graph, by plain autograd: nothing is summed."""
    features = Features(job, form)
    with introspect.refusing_state(job.reached.modules), introspect.refusing_changes(leaves):
        (rows,) = stream(job.rows(leaves), job.device)
        random = job.reached.random()
        outputs, _ = job.with_room(partial(job.run, 0, rows, form), random)
        form.shared = job.shared_outputs(outputs, leaves, form, random)
        features.add(0, outputs)
    return features.finish()


def second_pass(
    job: Job, record: Record, parameters: Sequence[Tensor], leaves: Sequence[Tensor], upstream: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of the parameters, and of the leaves that require one.

    upstream: gradients of the features, the cache. Sub-batches that retained their graph come first, without a second
    forward.
    """
    # as in the first pass: by now other leaves may require a gradient
    leaves = [leaf.detach().requires_grad_(want) for leaf, want in zip(leaves, record.wanted, strict=True)]
    values, wanted = detached(leaves)
    sums = GradientSums(job, record.form, parameters, record.frozen, leaves, upstream)
    check = ReplayCheck(record.sketches, [*job.reached.dtypes, *job.autocast.dtypes])
    after = job.reached.random(process={name for state in record.random for name in state.process})

    def replay(index: int, rows: Sequence[Tensor | None]) -> None:
        with job.autocast.entered():
            outputs, inputs = job.run(index, rows, record.form, wanted)
        check.compare(index, outputs, upstream)
        sums.add(index, outputs, inputs)
        job.sharding.reshard()

    mode = in_modes(job.reached.modules, record.training)
    with after.restoring(), job.sharding.in_step(), without_hooks(parameters), job.sharding.holding_back(), mode:
        done = _consume_graphs(job, record, sums)
        replayed = [index for index in range(len(job.bounds)) if index not in done]
        if replayed and not job.sharding.modules:
            # FSDP2 has shards in their place between its gathers
            job.reached.refuse_replaced()
        with sharing_casts(job.device):
            for index, rows in zip(replayed, stream(job.rows(values, replayed), job.device), strict=True):
                record.random[index].restore()
                job.with_room(partial(replay, index, rows), record.random[index])
        if parameters and not sums.totals and any(x is not None for x in upstream):
            warn_of_detached(job, record.form, values, wanted, upstream)
    check.report(job.name)
    if job.to_host:
        # features on the host make this an operation of the CPU, for which autograd lets no stream wait
        settle(job.device)
    return sums.finish()


def _consume_graphs(job: Job, record: Record, sums: GradientSums) -> set[int]:
    """Back-propagate the sub-batches that have their graph, the last one first; return those that succeeded."""
    graphs, done = record.graphs, set()
    while graphs:
        index = max(graphs)
        try:
            # popped first, so that no other call releases it
            sums.add(index, *graphs.pop(index))
        except torch.OutOfMemoryError:
            if not graphs.releasable:
                raise
            graphs.release(index)
        else:
            job.sharding.reshard()
            done.add(index)
    return done


def _refuse_changed_parameters(ctx: Any, rule: str, got: str, remedy: str) -> None:
    """Raise ValueError where a parameter was written over, or moved, since the first pass began."""
    for x, before in zip(ctx.job.sharding.shards_of(ctx.parameters), ctx.versions, strict=True):
        # autograd reaches a parameter of another dtype or device by a new node, which is not in a graph that was kept
        if (version(x), x.dtype, x.device) != before:
            raise invalid("encoder", rule, f"one of shape {list(x.shape)} {got}", remedy)


def checked_count(name: str, value: Any, least: int, words: tuple[Any, ...] = (None, AUTO)) -> Any:
    """A checked number of examples, tokens or sub-batches, or one of the words."""
    if isinstance(value, Releasable) or ((value is None or isinstance(value, str)) and value in words):
        return value
    remedy = "Count examples, tokens, or sub-batches" + (', or say "auto".' if AUTO in words else ".")
    return whole_number(name, value, least, remedy)


def check_sizes(inputs: Any, parts: Any, sub_batch: Any, sub_batch_tokens: Any) -> None:
    """Raise where a size is missing, or given for parts that are made already."""
    sized = sub_batch is not None or sub_batch_tokens is not None
    if parts is None and not sized:
        raise invalid("sub_batch", "be given, or sub_batch_tokens", None, 'Say how much is encoded at once, or "auto".')
    if parts is not None and (sized or inputs is not None):
        remedy = "Leave the others out, or pass inputs and sub_batch."
        raise invalid("parts", "come without inputs and a size", "both", remedy)
