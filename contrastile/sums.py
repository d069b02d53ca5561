"""The running sums of act 3: gradients of parameters and inputs, sub-batch by sub-batch, in float32 or better.

Beside `cache.py`, whose backward fills them and hands them to autograd once. The first sub-batch's gradients are taken
as autograd gives them, the second's sum makes the room that is ours, and from then on all is added in place: a few
kernels for all parameters, and nothing copied.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from contrastile._check import wrong
from contrastile._types import accumulator
from contrastile.offload import Bounds
from contrastile.reach import back_propagated, graph_leaves


def _strange(leaf: Tensor) -> ValueError:
    got, remedy = f"one of shape {list(leaf.shape)} elsewhere", "Pass the module that holds them, or its method."
    return wrong("encoder", "own every parameter that it uses", got, remedy)


class Sums:
    """Sums over sub-batches. `upstream`: the cached gradients, of each output of the encoder for the whole batch."""

    def __init__(
        self,
        bounds: Sequence[Bounds],
        parameters: list[Tensor],
        leaves: Sequence[Tensor | None],
        upstream: Sequence[Tensor | None],
    ) -> None:
        self.bounds, self.parameters, self.upstream = bounds, parameters, upstream
        self.totals: list[Tensor | None] = [None] * len(parameters)
        # whether a total is ours to add to in place; the first gradient is autograd's, and may be shared
        self.owned = [False] * len(parameters)
        self.known = {id(parameter) for parameter in parameters}
        # leaves of graphs that were nobody's: they are gone by now if the encoder made them
        self.strangers: list[ReferenceType[Tensor]] = []
        self.leaves = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        self.inputs: list[Tensor | None] = [None] * len(self.leaves)

    def add(self, index: int, outputs: Sequence[Any], inputs: list[Tensor]) -> None:
        """Back-propagates one sub-batch from its part of the cached gradients."""
        start, stop = self.bounds[index]
        pairs = [
            # those that wait on the host come here now; a number is everybody's, and counts once
            (out, (whole[start:stop] if whole.ndim else whole).to(out.device, non_blocking=True))
            for out, whole in zip(outputs, self.upstream, strict=True)
            if out is not None and out.requires_grad and whole is not None and (whole.ndim or index == 0)
        ]
        if not pairs:
            return
        outs, gradients = zip(*pairs, strict=True)
        # one that was frozen after the first pass gets none, as in plain autograd
        places = [place for place, parameter in enumerate(self.parameters) if parameter.requires_grad]
        wanted = [self.parameters[place] for place in places]
        if not wanted and not inputs:
            return
        found = back_propagated(outs, [*wanted, *inputs], gradients)
        # while the device still computes
        self._refuse_strangers(outs, inputs)
        self._accumulate(dict(zip(places, found, strict=False)))
        for place, gradient in enumerate(found[len(places) :]):
            if gradient is not None:
                self._room(place)[start:stop] = gradient

    def _room(self, place: int) -> Tensor:
        """For the gradient of an input; one that is not used has none."""
        room = self.inputs[place]
        if room is None:
            room = self.inputs[place] = torch.zeros_like(self.leaves[place])
        return room

    def _accumulate(self, gradients: Mapping[int, Tensor | None]) -> None:
        first: list[tuple[int, Tensor]] = []
        second: list[tuple[int, Tensor, Tensor]] = []
        later: list[tuple[Tensor, Tensor]] = []
        for place, gradient in gradients.items():
            if gradient is None:
                continue
            total = self.totals[place]
            if total is None:
                first.append((place, gradient.to(accumulator(gradient.dtype))))
            elif self.owned[place]:
                later.append((total, gradient))
            else:
                second.append((place, total, gradient))
        # all that may run out of memory comes before anything is added: a sub-batch that runs again counts once
        sums: Sequence[Tensor] = ()
        if second:
            _, totals, more = map(list, zip(*second, strict=True))
            sums = torch._foreach_add(totals, more)
        for (place, *_), total in zip(second, sums, strict=True):
            self.totals[place], self.owned[place] = total, True
        for place, gradient in first:
            self.totals[place] = gradient
        if later:
            torch._foreach_add_(*map(list, zip(*later, strict=True)))

    def _refuse_strangers(self, outs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """A parameter that is not the encoder's would get no gradient. What it made itself and wants one, such as
        features behind frozen embeddings (`enable_input_require_grads` of transformers), needs none."""
        known = self.known | {id(row) for row in inputs}
        for leaf in graph_leaves(outs):
            if id(leaf) not in known:
                if isinstance(leaf, nn.Parameter):
                    raise _strange(leaf)
                self.strangers.append(ref(leaf))

    def _refuse_living(self) -> None:
        # a cycle may keep what is nobody's
        if any(stranger() is not None for stranger in self.strangers):
            gc.collect()
        for stranger in self.strangers:
            if (leaf := stranger()) is not None:
                raise _strange(leaf)

    def finish(self) -> list[Tensor | None]:
        """The sums in their parameters' types, and the inputs' gradients."""
        self._refuse_living()
        return [
            None if total is None else total.to(parameter.dtype)
            for parameter, total in zip(self.parameters, self.totals, strict=True)
        ] + self.inputs
