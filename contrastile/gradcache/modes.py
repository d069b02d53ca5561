"""Modes of a replay: autocast and training mode of the first pass, and a backward without the parameters' hooks.

Used by both passes of `encode`, and by `tiles/scored.py`, which computes each tile twice.

The backward of `encode` and of the losses has first derivatives only: a second one is an error (`first_order`), never a
constant. torch's `once_differentiable` refuses only where the upstream gradient requires a gradient itself, which a
scalar loss's does not: a penalty on gradients would then be differentiated as a constant, silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from contrastile._errors import invalid
from contrastile._torch import accumulation_hooks, backward_hooks, func_transform, is_batched, jit_traces

Backward = Callable[..., tuple[Tensor | None, ...]]


@dataclass(frozen=True)
class Autocast:
    """Autocast settings of a moment, by device type."""

    settings: list[dict[str, Any]]

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Types that are cast to."""
        return [setting["dtype"] for setting in self.settings if setting["enabled"]]

    @classmethod
    def current(cls, device: torch.device | None) -> Autocast:
        """The settings now, on the CPU and on the device."""
        kinds = {"cpu"} if device is None or device.type == "meta" else {"cpu", device.type}
        cache, dtype, enabled = torch.is_autocast_cache_enabled(), torch.get_autocast_dtype, torch.is_autocast_enabled
        return cls([
            {"device_type": kind, "dtype": dtype(kind), "enabled": enabled(kind), "cache_enabled": cache}
            for kind in sorted(kinds)
        ])  # fmt: skip

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for setting in self.settings:
                stack.enter_context(torch.autocast(**setting))
            yield

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run with these settings and a cache of casts of its own."""
        with sharing_casts(None), self.entered():
            yield


def joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """torch.cat, also of float16 under autocast to bfloat16 and the other way round, which torch refuses."""
    kind = tensors[0].device.type
    on = kind != "meta" and torch.is_autocast_enabled(kind)
    with torch.autocast(kind, enabled=False) if on else nullcontext():
        return torch.cat(list(tensors), dim)


def recording_error(name: str, tool: str) -> ValueError:
    """The error of a call inside a tool that records one graph, whose sizes and numbers would be those of this call."""
    return invalid(name, f"be called outside of {tool}", "a call inside", "Export the encoders alone.")


def uncompiled(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, to be called between two graphs of torch.compile. A graph of other tools cannot break: an error."""
    if torch.compiler.is_exporting():
        raise recording_error(name, "torch.export")
    if not torch.compiler.is_compiling() and jit_traces():
        raise recording_error(name, "torch.jit.trace")
    disabled: Callable[..., Any] = torch.compiler.disable(function)
    return disabled


@contextmanager
def sharing_casts(device: torch.device | None) -> Iterator[None]:
    """Cast each weight once inside. Earlier casts, which may have no graph, are not used."""
    torch.clear_autocast_cache()
    try:
        # the cache is emptied where the outermost autocast ends: this one, which changes nothing else
        with Autocast.current(device).entered():
            yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def in_modes(modules: Sequence[nn.Module], training: Sequence[bool]) -> Iterator[None]:
    """Set each module's training mode as given, and set it back at the end."""
    changed = [(module, mode) for module, mode in zip(modules, training, strict=True) if module.training != mode]
    for module, mode in changed:
        module.training = mode
    try:
        yield
    finally:
        for module, mode in changed:
            module.training = not mode


@contextmanager
def without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Suspend the parameters' hooks, which autograd would call for each sub-batch; they get the sum once, later."""
    suspended = [(hooks, dict(hooks)) for parameter in parameters if (hooks := backward_hooks(parameter))]
    for hooks, _ in suspended:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, saved in suspended:
            hooks.update(saved)


def skip_hooks_without_gradient(parameter: Tensor) -> None:
    """Skip the parameter's hooks if `encode` returns no gradient for it: autograd would call them with None."""
    of_gradient, after_accumulation = backward_hooks(parameter) or {}, accumulation_hooks(parameter) or {}
    for hooks, call in ((of_gradient, _with_gradient), (after_accumulation, _with_grad)):
        for key, hook in hooks.items():
            # torch's own (`register_multi_grad_hook`) count their calls
            if getattr(hook, "func", None) is not call and getattr(hook, "__module__", "") != "torch.autograd.graph":
                hooks[key] = partial(call, hook)


def _with_gradient(hook: Callable[[Tensor], Any], gradient: Tensor | None) -> Any:
    return None if gradient is None else hook(gradient)


def _with_grad(hook: Callable[[Tensor], Any], parameter: Tensor) -> Any:
    return None if parameter.grad is None else hook(parameter)


def back_propagated(
    outs: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor], name: str = "encoder"
) -> Sequence[Tensor | None]:
    """The gradients of inputs and parameters of a sub-batch or tile; None for unused ones. No `.grad` changes."""
    try:
        return torch.autograd.grad(outs, inputs, gradients, allow_unused=True)
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            rule, got = "compute in each call all that it differentiates", "a part of the graph that was made before"
            passed = "an input" if name == "encoder" else "a feature"
            remedy = f"Compute that inside too, or pass it as {passed}, a row for each example."
        elif "use_reentrant" in str(error):
            rule, got = "checkpoint activations without entering autograd again", "use_reentrant=True"
            remedy = (
                "Pass use_reentrant=False to torch.utils.checkpoint, or transformers "
                'gradient_checkpointing_kwargs={"use_reentrant": False}.'
            )
        else:
            raise
        raise invalid(name, rule, got, remedy) from error


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
            try:
                if not torch.is_grad_enabled():
                    return backward(ctx, saved, *upstream)
                with torch.no_grad():
                    gradients = backward(ctx, saved, *upstream)
                inputs = (*upstream, *saved, *getattr(ctx, "parameters", ()))
                return _Refusing.apply(name, gradients, *inputs)
            except RuntimeError as error:
                # vmap refuses many operations, and takes others: one sub-batch, the mean of few rows
                if func_transform() is None and not any(x is not None and is_batched(x) for x in upstream):
                    raise
                rule, got = "be differentiated outside of torch.func", "a backward inside, as of is_grads_batched=True"
                raise invalid(name, rule, got, "Call torch.autograd.grad for one gradient at a time.") from error

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
