"""What an encoder reaches when it runs, and what must be the same when it runs again.

Beside `cache.py`, which runs every sub-batch twice: the modules and parameters that a callable touches, the random
numbers and the autocast that the second pass needs, and the things that a pass in parts must not do: normalise over
examples, carry something from one to the next, and call a parameter's hooks for each part.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from contrastile._check import wrong
from contrastile.footprint import as_written
from contrastile.offload import stream
from contrastile.randomness import PROCESS, Own, RandomState, Shared, own_generators

# rows that show which modules and parameters a function reaches
PROBE_ROWS = 2
# in the names of what attention adds to its scores for how far apart two positions are: T5's, Swin's, BEiT's, SAM's
RELATIVE = ("relative_", "rel_pos")


@dataclass(frozen=True)
class Reached:
    """What running the encoder touches."""

    modules: list[nn.Module]
    # those that want a gradient
    parameters: list[Tensor]
    # where the inputs go
    device: torch.device | None
    # others want none
    partly_frozen: bool = False

    @cached_property
    def held(self) -> list[Tensor]:
        """What is in memory however many sub-batches run: all parameters and buffers, frozen ones too."""
        theirs = [(*module._parameters.values(), *module._buffers.values()) for module in self.modules]
        return [*self.parameters, *(x for each in theirs for x in each if x is not None)]

    @cached_property
    def devices(self) -> list[torch.device | None]:
        """All that compute: a model may be spread over several."""
        return list(dict.fromkeys([self.device, *(x.device for x in self.held)]))

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        """Those of all parameters."""
        return {x.dtype for module in self.modules for x in module._parameters.values() if x is not None}

    @cached_property
    def generators(self) -> list[Own]:
        """Those that the modules have for themselves."""
        return own_generators(self.modules)

    def random(self, last: RandomState | None = None, process: Iterable[Shared] = PROCESS) -> RandomState:
        """Where all generators stand that running the encoder may touch."""
        return RandomState.capture(*self.devices, own=self.generators, process=process, last=last)


def reach(
    encoder: Callable[..., Any], leaves: Sequence[Tensor | None], structure: Any, device: torch.device | None
) -> Reached:
    """The modules and parameters of an encoder: its own, its owner's, or those that a trial on two rows shows.

    It computes on `device`; by default where its parameters are, else its inputs.
    """
    owner: Any = encoder
    while not isinstance(owner, nn.Module) and (inner := _wrapped(owner)) is not None:
        owner = inner
    owner = getattr(owner, "__self__", owner)
    asked, inputs = device, next((leaf.device for leaf in leaves if leaf is not None), None)
    if isinstance(owner, nn.Module):
        modules, found = list(owner.modules()), list[Tensor](owner.parameters())
        device = asked or (found[0].device if found else inputs)
    else:
        modules, found, differentiable = _trial(encoder, leaves, structure, asked or inputs)
        device = asked or next((parameter.device for parameter in found if parameter.requires_grad), inputs)
    if not torch.is_grad_enabled():
        return Reached(modules, [], device)
    if any(map(is_lazy, found)):
        remedy = "Run it once on a few rows first."
        raise wrong("encoder", "know the shapes of its parameters", "one that is made when it runs", remedy)
    wanted = [parameter for parameter in found if parameter.requires_grad]
    partly_frozen = 0 < len(wanted) < len(found)
    if isinstance(owner, nn.Module):
        differentiable = not partly_frozen or _reaches_trained(encoder, leaves, structure, device, modules)
    # where the part that is used is frozen, nothing will ever be back-propagated
    return Reached(modules, wanted if differentiable else [], device, partly_frozen)


def _wrapped(function: Any) -> Any:
    """What a partial, or a compiled function, is made from."""
    return function.func if isinstance(function, partial) else getattr(function, "_torchdynamo_orig_callable", None)


def _reaches_trained(
    encoder: Callable[..., Any],
    leaves: Sequence[Tensor | None],
    structure: Any,
    device: torch.device | None,
    modules: Sequence[nn.Module],
) -> bool:
    """Whether a trial's outputs want a gradient; `modules` are those that may run."""
    with refusing_batch_norm(modules):
        return any(out.requires_grad for out in _few(encoder, leaves, structure, device, own_generators(modules)))


def _trial(
    encoder: Callable[..., Any], leaves: Sequence[Tensor | None], structure: Any, device: torch.device | None
) -> tuple[list[nn.Module], list[Tensor], bool]:
    """Modules that run, parameters reached, and whether the outputs want gradients."""
    ran: dict[int, nn.Module] = {}
    owned: list[tuple[Own, Any]] = []

    def note(module: nn.Module, _: Any) -> None:
        if normalises_over_rows(module):
            refuse_batch_norm(module, "encoder")
        if id(module) not in ran:
            ran[id(module)] = module
            # before it draws from them
            owned.extend((generator, generator.read()) for generator in own_generators([module]))

    hook = register_module_forward_pre_hook(note)
    try:
        with _hook_unsaid():
            outputs = _few(encoder, leaves, structure, device)
    finally:
        hook.remove()
        for generator, state in reversed(owned):
            generator.set(state)
    differentiable = any(out.requires_grad for out in outputs)
    met = [ref(leaf) for leaf in graph_leaves(outputs)]
    # what the encoder made itself is gone with its graph
    del outputs
    reached = {id(leaf): leaf for each in met if (leaf := each()) is not None}
    for module in ran.values():
        reached |= {id(p): p for p in module.parameters()}
    return list(ran.values()), list(reached.values()), differentiable


def _few(
    encoder: Callable[..., Any],
    leaves: Sequence[Tensor | None],
    structure: Any,
    device: torch.device | None,
    own: Sequence[Own] = (),
) -> list[Tensor]:
    """What the encoder returns for two rows, uncompiled; the random numbers stay untouched."""
    # an encoder that writes over them spoils nothing
    few = [None if leaf is None else leaf.detach()[:PROBE_ROWS].clone() for leaf in leaves]
    (rows,) = stream(few, [(0, PROBE_ROWS)], device)
    states = RandomState.capture(device, own=own)
    try:
        args, kwargs = pytree.tree_unflatten(rows, structure)
        with computing_weights(), as_written():
            return [out for out in pytree.tree_leaves(encoder(*args, **kwargs)) if isinstance(out, Tensor)]
    finally:
        states.restore()


@contextmanager
def _hook_unsaid() -> Iterator[None]:
    """Without torch's word that a hook of all modules is called for a compiled one and for what is in it."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
        yield


@contextmanager
def computing_weights() -> Iterator[None]:
    """Weights that parametrizations make are made anew: `parametrize.cached()` would keep those without a graph."""
    held = parametrize._cache_enabled
    if not held:
        yield
        return
    parametrize._cache_enabled = 0
    try:
        yield
    finally:
        parametrize._cache_enabled = held


@contextmanager
def in_modes(modules: Sequence[nn.Module], training: Sequence[bool]) -> Iterator[None]:
    """With each module in training mode or not, as it was; somebody may have changed that meanwhile."""
    changed = [(module, was) for module, was in zip(modules, training, strict=True) if module.training != was]
    for module, was in changed:
        module.training = was
    try:
        yield
    finally:
        for module, was in changed:
            module.training = not was


def has_other_path(encoder: Callable[..., Any], modules: Sequence[nn.Module]) -> bool:
    """Whether the encoder may compute something else where no graph is wanted: other bits, even other random numbers.

    Compiled code does, and torch's attention modules in eval mode do. So does attention with a bias that is learned,
    in other kernels where the bias wants a gradient; it is known by its name.
    """
    while isinstance(encoder, partial):
        encoder = encoder.func
    return hasattr(encoder, "_torchdynamo_orig_callable") or any(
        hasattr(module, "_torchdynamo_orig_callable")
        or module._compiled_call_impl is not None
        or (isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)) and not module.training)
        or _learns_a_bias(module)
        for module in modules
    )


def _learns_a_bias(module: nn.Module) -> bool:
    """Whether it adds something of its own, which is trained, to attention's scores."""
    return any(
        any(word in name for word in RELATIVE) and any(p.requires_grad for p in _parameters_of(part))
        for name, part in (*module._parameters.items(), *module._modules.items())
    )


def _parameters_of(part: Tensor | nn.Module | None) -> Iterable[Tensor]:
    if isinstance(part, nn.Module):
        return part.parameters()
    return () if part is None else (part,)


def graph_leaves(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors in which the outputs' graph would accumulate gradients."""
    # one may be such a leaf itself
    yield from (out for out in outputs if out.grad_fn is None and out.requires_grad)
    pending = [out.grad_fn for out in outputs if out.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)


def back_propagated(
    outs: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor], name: str = "encoder"
) -> Sequence[Tensor | None]:
    """The gradients of inputs and parameters of one part, without touching any `.grad`; None of what is not used."""
    passed = "an input" if name == "encoder" else "a feature"
    try:
        return torch.autograd.grad(outs, inputs, gradients, allow_unused=True)
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            rule, got = "compute in each call all that it differentiates", "a part of the graph that was made before"
            remedy = f"Compute that inside too, or pass it as {passed}, a row for each example."
            raise wrong(name, rule, got, remedy) from error
        if "use_reentrant" not in str(error):
            raise
        rule = "checkpoint activations without entering autograd again"
        remedy = "Pass use_reentrant=False to torch.utils.checkpoint."
        raise wrong(name, rule, "use_reentrant=True", remedy) from error


@dataclass(frozen=True)
class Autocast:
    """Autocast as it was when `encode` was called."""

    settings: list[dict[str, Any]]

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Those that are cast to."""
        return [setting["dtype"] for setting in self.settings if setting["enabled"]]

    @classmethod
    def current(cls, device: torch.device | None) -> Autocast:
        """As it is now, on the CPU and on the device."""
        kinds = {"cpu"} if device is None or device.type == "meta" else {"cpu", device.type}
        return cls([
            {
                "device_type": kind,
                "dtype": torch.get_autocast_dtype(kind),
                "enabled": torch.is_autocast_enabled(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for kind in sorted(kinds)
        ])  # fmt: skip

    @contextmanager
    def entered(self) -> Iterator[None]:
        """With these settings."""
        with ExitStack() as stack:
            for setting in self.settings:
                stack.enter_context(torch.autocast(**setting))
            yield

    @contextmanager
    def restored(self) -> Iterator[None]:
        """With these settings, and casts that nobody else finds."""
        with sharing_casts(None), self.entered():
            yield


@contextmanager
def sharing_casts(device: torch.device | None) -> Iterator[None]:
    """Weights that autocast casts in here are cast once, and are not found outside.

    Those that were cast before may be without a graph, and must not be found in here.
    """
    torch.clear_autocast_cache()
    try:
        # emptied where the outermost autocast ends: this one, which changes nothing
        with Autocast.current(device).entered():
            yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def silent(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Without the parameters' own hooks, which autograd would call for each sub-batch; they get the sum, once."""
    hooks = [hooks for parameter in parameters if (hooks := parameter._backward_hooks)]
    held = [dict(hook) for hook in hooks]
    for hook in hooks:
        hook.clear()
    try:
        yield
    finally:
        for hook, items in zip(hooks, held, strict=True):
            hook.update(items)


def normalises_over_rows(module: nn.Module) -> bool:
    """Whether a row's output depends on the other rows: batch normalisation that takes its statistics from them."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def refuse_batch_norm(module: nn.Module, name: str) -> NoReturn:
    """Raises ValueError: the statistics of parts are not those of the batch."""
    remedy = "Put it in eval mode, or take GroupNorm or LayerNorm."
    if name == "encoder":
        remedy += " Or call the encoder itself, or cache only the part before it."
    raise wrong(
        name,
        "treat examples one by one",
        f"{type(module).__name__} in training mode, whose statistics over a sub-batch are not those of the batch",
        remedy,
    )


@contextmanager
def refusing_batch_norm(modules: Sequence[nn.Module], name: str = "encoder") -> Iterator[None]:
    """Raises when one of the modules that runs normalises over the examples of its sub-batch."""

    def refuse(module: nn.Module, _: Any) -> None:
        # the encoder itself may have put it in eval mode
        if normalises_over_rows(module):
            refuse_batch_norm(module, name)

    hooks = [module.register_forward_pre_hook(refuse) for module in modules if normalises_over_rows(module)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def refusing_state(modules: Sequence[nn.Module], name: str = "encoder", parts: str = "examples") -> Iterator[None]:
    """Raises when a module has changed one of its buffers meanwhile: what it computes depends on what came before."""
    held = [
        # those that were made for inference count no changes
        (module, buffer, x, None if x.is_inference() else x._version)
        for module in modules
        for buffer, x in module._buffers.items()
        if x is not None
    ]
    yield
    for module, buffer, x, version in held:
        if (version is not None and x._version != version) or _replaced(x, module._buffers.get(buffer)):
            raise wrong(
                name,
                f"treat {parts} one by one",
                f"{type(module).__name__}, which changes a buffer when it runs",
                "Put it in eval mode.",
            )


@contextmanager
def refusing_changes(leaves: Sequence[Tensor | None], name: str = "inputs", by: str = "encoder") -> Iterator[None]:
    """Raises when somebody has written over what he was given: computed again, it would come to something else."""
    held = [(leaf, leaf._version) for leaf in leaves if leaf is not None and not leaf.is_inference()]
    yield
    for leaf, version in held:
        if leaf._version != version:
            got = f"one of shape {list(leaf.shape)} that it writes over"
            raise wrong(name, f"be left as it is by the {by}", got, "Clone it there, or work out of place.")


def _replaced(x: Tensor, now: Tensor | None) -> bool:
    """Whether a buffer has other values than before; one of another shape is a table that has grown."""
    return now is not None and now is not x and now.shape == x.shape and not torch.equal(now.to(x.device), x)
