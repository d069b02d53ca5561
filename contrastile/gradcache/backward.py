"""Act 3: the second pass, which encodes each sub-batch again and back-propagates it from the cached gradients.

Called by `encode.py` with the `Record` of `forward.py`. Sub-batches whose graph was kept need no second forward, and
come first. Gradients of parameters and inputs are summed in float32 or better.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from contrastile._errors import invalid
from contrastile._torch import add_each, add_each_
from contrastile._types import accumulator
from contrastile.gradcache.forward import Job, Record
from contrastile.gradcache.introspect import graph_leaves
from contrastile.gradcache.modes import back_propagated, in_modes, sharing_casts, silent
from contrastile.gradcache.replay_check import ReplayCheck
from contrastile.gradcache.rng import restoring
from contrastile.offload import Bounds, settle, stream


def second_pass(
    job: Job,
    record: Record,
    parameters: Sequence[Tensor],
    leaves: Sequence[Tensor | None],
    upstream: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of the parameters, and of the leaves that want one. `upstream`: those of the features, the cache."""
    wanted = [leaf is not None and leaf.requires_grad for leaf in leaves]
    values = [None if leaf is None else leaf.detach() for leaf in leaves]
    sums = GradientSums(job.bounds, parameters, leaves, upstream, record.form.shared)
    check = ReplayCheck(record.sketches, [*job.reached.dtypes, *job.autocast.dtypes])
    after = job.reached.random(process={generator for state in record.random for generator in state.process})

    def replay(index: int, rows: Sequence[Tensor | None]) -> None:
        with job.autocast.entered():
            outputs, inputs = job.run(index, rows, record.form, wanted)
        check.compare(index, outputs, upstream)
        sums.add(index, outputs, inputs)
        job.sharding.settle()

    modes = in_modes(job.reached.modules, record.training)
    with restoring(after), job.sharding.in_step(), silent(parameters), job.sharding.holding_back(), modes:
        done = _consume_graphs(job, record, sums)
        replayed = [index for index in range(len(job.bounds)) if index not in done]
        bounds = [job.batches.encoded[index] for index in replayed]
        with sharing_casts(job.device):
            for index, rows in zip(replayed, stream(values, bounds, job.device), strict=True):
                record.random[index].restore()
                job.with_room(partial(replay, index, rows), record.random[index])
    check.report(job.name)
    if job.to_host:
        # autograd takes this operation for one of the CPU, and would not let the parameters' stream wait for it
        settle(job.device)
    return sums.finish()


def _consume_graphs(job: Job, record: Record, sums: GradientSums) -> set[int]:
    """Back-propagate the sub-batches that still have their graph, the last first; return those that succeeded."""
    graphs, done = record.graphs, set()
    while graphs:
        index = max(graphs)
        try:
            # taken out first, so that no other call gives it up
            sums.add(index, *graphs.pop(index))
        except torch.OutOfMemoryError:
            if not graphs.yielding:
                raise
            graphs.give_up(index)
        else:
            job.sharding.settle()
            done.add(index)
    return done


class GradientSums:
    """Sums of gradients over sub-batches. `upstream`: gradients of each output of the encoder, for the whole batch.

    The first sub-batch's gradients stay as autograd returned them, the second's sum allocates the accumulator, and all
    others are added to it in place: a few kernels for all parameters, and nothing copied. `shared`: outputs that are
    one number for all examples.
    """

    def __init__(
        self,
        bounds: Sequence[Bounds],
        parameters: Sequence[Tensor],
        leaves: Sequence[Tensor | None],
        upstream: Sequence[Tensor | None],
        shared: Sequence[bool],
    ) -> None:
        self.bounds, self.parameters = bounds, parameters
        self.upstream, self.shared = upstream, shared
        self.totals: list[Tensor | None] = [None] * len(parameters)
        # totals that may be added to in place; the first gradient is autograd's, and may be shared
        self.owned = [False] * len(parameters)
        self.known = {id(parameter) for parameter in parameters}
        # graph leaves that are no known parameter; dead by now if the encoder made them
        self.strangers: list[ReferenceType[Tensor]] = []
        self.leaves = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        self.inputs: list[Tensor | None] = [None] * len(self.leaves)

    def add(self, index: int, outputs: Sequence[Any], inputs: list[Tensor]) -> None:
        """Back-propagate one sub-batch from its part of the cached gradients."""
        start, stop = self.bounds[index]
        pairs = [
            # gradients that wait on the host are copied now; that of a shared number counts once
            (out, (whole if shared else whole[start:stop]).to(out.device, non_blocking=True))
            for out, whole, shared in zip(outputs, self.upstream, self.shared, strict=True)
            if out is not None and out.requires_grad and whole is not None and (index == 0 or not shared)
        ]
        # a parameter that was frozen after the first pass gets no gradient, as in plain autograd
        trained = [position for position, parameter in enumerate(self.parameters) if parameter.requires_grad]
        if not pairs or not (trained or inputs):
            return
        outs, gradients = zip(*pairs, strict=True)
        results = back_propagated(outs, [*(self.parameters[position] for position in trained), *inputs], gradients)
        # while the device still computes
        self._refuse_strangers(outs, inputs)
        self._accumulate(dict(zip(trained, results, strict=False)))
        for position, gradient in enumerate(results[len(trained) :]):
            if gradient is not None:
                whole = self.inputs[position]
                if whole is None:
                    whole = self.inputs[position] = torch.zeros_like(self.leaves[position])
                # an empty sub-batch ran on a row of another
                whole[start:stop] = gradient[: stop - start]

    def _accumulate(self, gradients: Mapping[int, Tensor | None]) -> None:
        first: list[tuple[int, Tensor]] = []
        second: list[tuple[int, Tensor, Tensor]] = []
        later: list[tuple[Tensor, Tensor]] = []
        for position, gradient in gradients.items():
            if gradient is None:
                continue
            total = self.totals[position]
            if total is None:
                first.append((position, gradient.to(accumulator(gradient.dtype))))
            elif self.owned[position]:
                later.append((total, gradient))
            else:
                second.append((position, total, gradient))
        # whatever may run out of memory comes before any addition: a sub-batch that runs again counts once
        sums: Sequence[Tensor] = ()
        if second:
            _, totals, more = map(list, zip(*second, strict=True))
            sums = add_each(totals, more)
        for (position, *_), total in zip(second, sums, strict=True):
            self.totals[position], self.owned[position] = total, True
        for position, gradient in first:
            self.totals[position] = gradient
        if later:
            add_each_(*map(list, zip(*later, strict=True)))

    def _refuse_strangers(self, outs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Refuse a parameter that is not the encoder's, which would get no gradient.

        A tensor that the encoder made and wants a gradient of, such as features behind frozen embeddings
        (`enable_input_require_grads` of transformers), needs none.
        """
        known = self.known | {id(row) for row in inputs}
        for leaf in graph_leaves(outs):
            if id(leaf) not in known:
                if isinstance(leaf, nn.Parameter):
                    raise _stranger(leaf)
                self.strangers.append(ref(leaf))

    def finish(self) -> list[Tensor | None]:
        """The sums in their parameters' types, and the inputs' gradients."""
        if any(stranger() is not None for stranger in self.strangers):
            # a reference cycle may keep a dead one
            gc.collect()
        for stranger in self.strangers:
            if (leaf := stranger()) is not None:
                raise _stranger(leaf)
        return [
            None if total is None else total.to(parameter.dtype)
            for parameter, total in zip(self.parameters, self.totals, strict=True)
        ] + self.inputs


def _stranger(leaf: Tensor) -> ValueError:
    got, remedy = f"one of shape {list(leaf.shape)} elsewhere", "Pass the module that holds them, or its method."
    return invalid("encoder", "own every parameter that it uses", got, remedy)
