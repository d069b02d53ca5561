"""Gradients of a call of `encode`: sums over sub-batches, in float32 or better, and the graphs that were kept.

Under `encode.py`, whose second pass adds one sub-batch after the other.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from contrastile._torch import add_each, add_each_
from contrastile._types import accumulator
from contrastile.gradcache.forward import Job, Record
from contrastile.gradcache.introspect import graph_leaves, not_owned
from contrastile.gradcache.modes import back_propagated
from contrastile.offload import Bounds


@dataclass
class GradientSums:
    """Sums of gradients over sub-batches. `upstream`: gradients of each output of the encoder, for the whole batch.

    The first sub-batch's gradients stay as autograd returned them, the second's sum allocates the accumulator, and all
    others are added to it in place: a few kernels for all parameters, and nothing copied. `leaves`: inputs that want a
    gradient. `shared`: outputs that are one number for all examples.
    """

    bounds: Sequence[Bounds]
    parameters: Sequence[Tensor]
    leaves: Sequence[Tensor]
    upstream: Sequence[Tensor | None]
    shared: Sequence[bool]
    # sums by position of the parameter
    totals: dict[int, Tensor] = field(default_factory=dict)
    # totals that may be added to in place; the first gradient is autograd's, and may be shared
    owned: set[int] = field(default_factory=set)
    # gradients of the leaves, by position
    inputs: dict[int, Tensor] = field(default_factory=dict)
    # graph leaves that are no known parameter; dead by now if the encoder made them
    strangers: list[ReferenceType[Tensor]] = field(default_factory=list)

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
        self._accumulate({at: x for at, x in zip(trained, results, strict=False) if x is not None})
        for position, gradient in enumerate(results[len(trained) :]):
            if gradient is not None:
                if position not in self.inputs:
                    self.inputs[position] = torch.zeros_like(self.leaves[position])
                # an empty sub-batch ran on a row of another
                self.inputs[position][start:stop] = gradient[: stop - start]

    def _accumulate(self, gradients: Mapping[int, Tensor]) -> None:
        """Add gradients by position of the parameter."""
        first = {at: x.to(accumulator(x.dtype)) for at, x in gradients.items() if at not in self.totals}
        second = [at for at in gradients if at in self.totals and at not in self.owned]
        later = [at for at in gradients if at in self.owned]
        # whatever may run out of memory comes before any addition: a sub-batch that runs again counts once
        sums = add_each([self.totals[at] for at in second], [gradients[at] for at in second]) if second else ()
        self.totals |= {**first, **dict(zip(second, sums, strict=True))}
        self.owned.update(second)
        if later:
            add_each_([self.totals[at] for at in later], [gradients[at] for at in later])

    def _refuse_strangers(self, outs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Refuse a parameter that is not the encoder's, which would get no gradient.

        A tensor that the encoder made and wants a gradient of, such as features behind frozen embeddings
        (`enable_input_require_grads` of transformers), needs none.
        """
        known = {id(x) for x in (*self.parameters, *inputs)}
        for leaf in graph_leaves(outs):
            if id(leaf) not in known:
                if isinstance(leaf, nn.Parameter):
                    raise not_owned(leaf)
                self.strangers.append(ref(leaf))

    def finish(self) -> list[Tensor | None]:
        """The sums in their parameters' types, None for an unused one, and the inputs' gradients."""
        if any(stranger() is not None for stranger in self.strangers):
            # a reference cycle may keep a dead one
            gc.collect()
        for stranger in self.strangers:
            if (leaf := stranger()) is not None:
                raise not_owned(leaf)
        totals = [
            self.totals[position].to(parameter.dtype) if position in self.totals else None
            for position, parameter in enumerate(self.parameters)
        ]
        return [*totals, *(self.inputs.get(position) for position in range(len(self.leaves)))]


def consume_graphs(job: Job, record: Record, sums: GradientSums) -> set[int]:
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
