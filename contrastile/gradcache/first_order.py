"""First derivatives only: a second one is an error, never a constant.

Used by the backward of `encode` and of the losses. torch's `once_differentiable` refuses only where the upstream
gradient requires a gradient itself, which a scalar loss's does not: a penalty on gradients would then be differentiated
as a constant, silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


def refusal(name: str) -> RuntimeError:
    """The error of a second derivative of `name`."""
    return RuntimeError(
        f"`{name}` must be differentiated only once; got a derivative of its gradient. Compute a penalty on gradients "
        "with the plain formula, or take those gradients without create_graph=True, as constants."
    )


def first_order(name: str) -> Callable[[Backward], Backward]:
    """A decorator for the backward of an autograd operation, which then runs without gradients.

    The backward is called with ctx, the saved tensors, which a checkpoint returns only once, and the upstream
    gradients. Under create_graph=True its results depend on the inputs of the operation (the saved tensors and
    `ctx.parameters`) by a node whose own backward raises: they can be read, but not differentiated.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def once(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors
            if not torch.is_grad_enabled():
                return backward(ctx, saved, *upstream)
            with torch.no_grad():
                gradients = backward(ctx, saved, *upstream)
            inputs = (*upstream, *saved, *getattr(ctx, "parameters", ()))
            return _Refusing.apply(name, gradients, *inputs)

        return once

    return decorate


class _Refusing(torch.autograd.Function):
    """Gradients as a function of the inputs that has no derivative."""

    @staticmethod
    def forward(ctx: Any, name: str, gradients: Sequence[Tensor | None], *_inputs: Tensor | None) -> tuple[Any, ...]:
        ctx.name = name
        # a gradient may be a view of an upstream one, which must not be tied again
        return tuple(None if x is None else x.detach() for x in gradients)

    @staticmethod
    def backward(ctx: Any, *_upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        raise refusal(ctx.name)
