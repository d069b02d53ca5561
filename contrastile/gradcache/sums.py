"""The gradients of a second pass, summed over its sub-batches.

Stands below `encode.py`, which runs the sub-batches. torch's `backward` would add them in the parameters' own dtype,
and run the hooks of each parameter once per sub-batch.
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from contrastile._errors import invalid
from contrastile._torch import add_each, add_each_
from contrastile._types import accumulator
from contrastile.gradcache import introspect, modes
from contrastile.gradcache.forward import Job, OutputForm, differentiable
from contrastile.gradcache.inputs import Place
from contrastile.gradcache.modes import back_propagated


@dataclass
class GradientSums:
    """Sums of gradients over sub-batches.

    frozen: parameters that get no gradient, because they wanted none in the first pass. leaves: all tensors of the
    inputs. upstream: gradients of each output of the encoder, for the whole batch. The first sub-batch's gradients stay
    as autograd returned them; adding the second's allocates the accumulators, to which all others are added in place.
    So a step takes few kernels for all parameters, and copies nothing.
    """

    job: Job
    form: OutputForm
    parameters: Sequence[Tensor]
    frozen: Sequence[Tensor]
    leaves: Sequence[Tensor]
    upstream: Sequence[Tensor | None]
    # sums by position of the parameter
    totals: dict[int, Tensor] = field(default_factory=dict)
    # positions of the sums that are added to in place; a first gradient is autograd's, whose memory may be shared
    own_memory: set[int] = field(default_factory=set)
    # gradients of the inputs, by position among the leaves
    of_inputs: dict[int, Tensor] = field(default_factory=dict)
    # graph leaves that are no known parameter; those that the encoder made are dead after the sub-batch
    unknown: list[ReferenceType[Tensor]] = field(default_factory=list)

    def add(self, index: int, outputs: Sequence[Any], inputs: list[Tensor]) -> None:
        """Back-propagate one sub-batch from its part of the cached gradients."""
        pairs = [
            # gradients that wait on the host are copied now; that of a shared number counts once
            (out, (whole if shared else whole[slice(*rows)]).to(out.device, non_blocking=True))
            for out, whole, shared, rows in zip(
                outputs, self.upstream, self.form.shared, self.form.bounds[index], strict=True
            )
            if out is not None and out.requires_grad and whole is not None and (index == 0 or not shared)
        ]
        for out, cached in pairs:
            if out.shape != cached.shape:
                got = f"{list(cached.shape)} and {list(out.shape)}"
                remedy = "Change nothing that it depends on before the backward."
                raise invalid("encoder", "return features of one shape in both passes", got, remedy)
        # a parameter that was frozen after the first pass gets no gradient, as in plain autograd
        trained = [position for position, parameter in enumerate(self.parameters) if parameter.requires_grad]
        if not pairs or not (trained or inputs):
            return
        outs, gradients = zip(*pairs, strict=True)
        results = back_propagated(outs, [*(self.parameters[position] for position in trained), *inputs], gradients)
        # the host checks while the device computes
        self._refuse_unknown(outs, inputs)
        self._accumulate({at: x for at, x in zip(trained, results, strict=False) if x is not None})
        for place, gradient in zip(self._places(index), results[len(trained) :], strict=True):
            if gradient is not None:
                if place.tensor not in self.of_inputs:
                    self.of_inputs[place.tensor] = torch.zeros_like(self.leaves[place.tensor])
                start, stop = self.job.bounds[index]
                # an empty sub-batch ran on a row of another
                if start < stop:
                    place.of(self.of_inputs[place.tensor]).copy_(gradient)

    def _places(self, index: int) -> list[Place]:
        """Places of the inputs that want a gradient; packed values of which the sub-batch has none are no input."""
        if not differentiable(self.leaves):
            return []
        bounds = self.job.batches.encoded[index]
        rows = self.job.layout.rows(self.leaves, bounds)
        return [
            place
            for place, row in zip(self.job.layout.places(bounds), rows, strict=True)
            if row is not None and self.leaves[place.tensor].requires_grad
        ]

    def _accumulate(self, gradients: Mapping[int, Tensor]) -> None:
        """Add gradients by position of the parameter."""
        first = {at: _as_type(x, accumulator(x.dtype)) for at, x in gradients.items() if at not in self.totals}
        second = [at for at in gradients if at in self.totals and at not in self.own_memory]
        later = [at for at in gradients if at in self.own_memory]
        # allocate before the first addition: a sub-batch that runs again after an error counts once
        sums = add_each([self.totals[at] for at in second], [gradients[at] for at in second]) if second else ()
        self.totals |= {**first, **dict(zip(second, sums, strict=True))}
        self.own_memory.update(second)
        if later:
            add_each_([self.totals[at] for at in later], [gradients[at] for at in later])

    def _refuse_unknown(self, outs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Refuse a parameter that is not the encoder's, which would get no gradient.

        A tensor that the encoder made and wants a gradient of, such as features behind frozen embeddings
        (`enable_input_require_grads` of transformers), needs none.
        """
        known = {id(x) for x in (*self.parameters, *inputs, *self.frozen)}
        for leaf in introspect.graph_leaves(outs):
            if id(leaf) not in known:
                if isinstance(leaf, nn.Parameter):
                    raise introspect.not_owned(leaf)
                self.unknown.append(ref(leaf))

    def finish(self) -> list[Tensor | None]:
        """The sums in their parameters' dtypes, None for an unused one, and the inputs' gradients."""
        if any(reference() is not None for reference in self.unknown):
            # a reference cycle may keep a dropped one alive
            gc.collect()
        for reference in self.unknown:
            if (leaf := reference()) is not None:
                raise introspect.not_owned(leaf)
        # a rank of which no example reaches a parameter has zeros for it, where another rank has a gradient
        reached = self.job.sharding.any_of([position in self.totals for position in range(len(self.parameters))])
        totals: list[Tensor | None] = []
        for position, (parameter, on_any_rank) in enumerate(zip(self.parameters, reached, strict=True)):
            total = self.totals.get(position)
            if total is None and not on_any_rank:
                modes.skip_hooks_without_gradient(parameter)
                totals.append(None)
            else:
                totals.append(torch.zeros_like(parameter) if total is None else _as_type(total, parameter.dtype))
        wanted = (index for index, leaf in enumerate(self.leaves) if leaf.requires_grad)
        return [*totals, *map(self.of_inputs.get, wanted)]


def _as_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), without a call of torch where there is nothing to do; a model has hundreds of parameters."""
    return x if x.dtype == dtype else x.to(dtype)
