"""Introspection: the modules and parameters of an encoder, and refusals of encoders that cannot run in sub-batches.

First station of `encode`; `tiles/scored.py` uses it too. A module, or the owner of a method, lists its own. For any
other function a probe on two rows shows the modules that run, and the parameters that its graph reaches.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from contrastile import _torch
from contrastile._errors import invalid
from contrastile._torch import pytree
from contrastile.gradcache.inputs import Layout, Parts, flatten_outputs
from contrastile.gradcache.memory import as_written
from contrastile.gradcache.rng import Generator, RandomState, own_generators
from contrastile.offload import stream

# parts of the names of relative position biases, which attention adds to its scores: T5's, Swin's, BEiT's, SAM's
RELATIVE = ("relative_", "rel_pos")


@dataclass(frozen=True)
class Reached:
    """The modules, the trained parameters and the device that an encoder uses when it runs."""

    modules: list[nn.Module]
    # those that require a gradient
    parameters: list[Tensor]
    # device of the inputs
    device: torch.device | None
    # some parameters want a gradient, others want none
    partly_frozen: bool = False
    # the encoder's forward reads a parameter that wants no gradient
    reads_frozen: bool = False

    @cached_property
    def every(self) -> list[nn.Parameter]:
        """All parameters, frozen ones included."""
        return _torch.own_parameters(self.modules)

    @cached_property
    def resident(self) -> list[Tensor]:
        """Parameters and buffers, frozen ones included, which are in memory in any case."""
        return [*self.parameters, *self.every, *(x for _, _, x in _torch.own_buffers(self.modules))]

    @cached_property
    def devices(self) -> list[torch.device | None]:
        """All devices that compute; a model may be spread over several."""
        return list(dict.fromkeys([self.device, *(x.device for x in self.resident)]))

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {x.dtype for x in self.every}

    @cached_property
    def _generators(self) -> list[Generator]:
        return own_generators(self.modules)

    def refuse_replaced(self) -> None:
        """Raise ValueError where the modules have other parameters than in the first pass."""
        if list(map(id, _torch.own_parameters(self.modules))) != list(map(id, self.every)):
            rule, got = "have the parameters of the first pass", "others, as after torch.func.functional_call"
            raise invalid("encoder", rule, got, "Call backward before they are replaced.")

    def random(self, last: RandomState | None = None, process: Iterable[str] | None = None) -> RandomState:
        """State of all generators that running the encoder may use."""
        return RandomState.capture(*self.devices, own=self._generators, process=process, last=last)


def without_partials(function: Any) -> Any:
    """The function inside partials."""
    while isinstance(function, partial):
        function = function.func
    return function


def of_its_module(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function for a pair (module, function) as one that uses the parameters of its module alone.

    Its modules are known without a probe, which is a forward more in each call.
    """
    function.of_its_module = True  # type: ignore[attr-defined]
    return function


def _owner(encoder: Callable[..., Any]) -> Any:
    """The module that an encoder is, is a method of, or is marked to use alone; of other functions another object."""
    marked = isinstance(encoder, partial) and getattr(encoder.func, of_its_module.__name__, False)
    owner = encoder.args[0] if marked and isinstance(encoder, partial) else without_partials(encoder)
    while not isinstance(owner, nn.Module) and (inner := _torch.uncompiled(owner)) is not None:
        owner = without_partials(inner)
    return getattr(owner, "__self__", owner)


def reach(
    encoder: Callable[..., Any], leaves: Sequence[Tensor], layout: Layout | Parts, device: torch.device | None
) -> Reached:
    """The modules and parameters of an encoder: its own, its owner's, or those that a probe shows.

    device: where it computes; by default that of its parameters, or else of its inputs.
    """
    owner = _owner(encoder)
    input_device = next((leaf.device for leaf in leaves), None)
    if isinstance(owner, nn.Module):
        modules, differentiable, reads_frozen = _torch.modules_of(owner), True, False
        parameters: list[Tensor] = [*_torch.own_parameters(modules)]
        first = next(iter(parameters), None)
    else:
        probe = partial(_probe, encoder, leaves, layout, device or input_device)
        modules, parameters, differentiable, reads_frozen = _probe_function(probe)
        first = next((parameter for parameter in parameters if parameter.requires_grad), None)
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
        # its hooks do not run, so that a batch normalisation inside would go unnoticed
        got, remedy = "one of torch.jit", "Pass the module that it was made from, or what torch.compile makes of that."
        raise invalid("encoder", "consist of Python's modules", got, remedy)
    device = device or (input_device if first is None else first.device)
    if any(leaf.is_meta and leaf.device != device for leaf in leaves):
        rule, got = "have values where the encoder's parameters have", f"a tensor on meta, and an encoder on {device}"
        raise invalid("inputs", rule, got, "Load them on a device that computes.")
    if not torch.is_grad_enabled():
        return Reached(modules, [], device)
    if any(map(is_lazy, parameters)):
        remedy = "Run it once on a few rows first."
        raise invalid("encoder", "know the shapes of its parameters", "one that is made when it runs", remedy)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    partly_frozen = 0 < len(trained) < len(parameters)
    if partly_frozen and isinstance(owner, nn.Module):
        with refusing_batch_norm(modules), FrozenReads() as reads:
            outputs = _probe(encoder, leaves, layout, device, own_generators(modules))
        differentiable, reads_frozen = any(out.requires_grad for out in outputs), reads.any
    # outputs without a gradient mean that no parameter is trained
    return Reached(modules, trained if differentiable else [], device, partly_frozen, reads_frozen)


class FrozenReads(TorchFunctionMode):
    """Note if an operation within reads a parameter that wants no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # attributes such as the type or the device have no values of the parameter
        if not self.any and getattr(func, "__name__", "") != "__get__":
            leaves = pytree.tree_leaves((args, kwargs))
            self.any = any(isinstance(x, nn.Parameter) and not x.requires_grad for x in leaves)
        return func(*args, **(kwargs or {}))


def _probe_function(probe: Callable[[], list[Tensor]]) -> tuple[list[nn.Module], list[Tensor], bool, bool]:
    """Modules that run in a probe, parameters reached, whether the outputs want gradients, and whether a frozen
    parameter is read.
    """
    modules: dict[int, nn.Module] = {}
    before: list[tuple[Generator, Any]] = []

    def note(module: nn.Module, _: Any) -> None:
        _refuse_batch_norm(module)
        if id(module) not in modules:
            modules[id(module)] = module
            # read before the module draws from them
            before.extend((generator, generator.read()) for generator in own_generators([module]))

    hook = register_module_forward_pre_hook(note)
    try:
        with _without_hook_warning(), FrozenReads() as reads:
            outputs = probe()
    finally:
        hook.remove()
        for generator, state in reversed(before):
            generator.set(state)
    differentiable = any(out.requires_grad for out in outputs)
    # weak references: a tensor that the encoder made dies with its graph
    met = [ref(leaf) for leaf in graph_leaves(outputs)]
    del outputs
    parameters = {id(leaf): leaf for each in met if (leaf := each()) is not None}
    visited = set[nn.Module]()
    inside = [each for module in modules.values() for _, each in module.named_modules(visited)]
    parameters |= {id(p): p for p in _torch.own_parameters(inside)}
    return list(modules.values()), list(parameters.values()), differentiable, reads.any


def _probe(
    encoder: Callable[..., Any], leaves: Sequence[Tensor], layout: Layout | Parts, device: torch.device | None,
    own: Sequence[Generator] = (),
) -> list[Tensor]:  # fmt: skip
    """The encoder's outputs for two rows, or one part, not compiled; random generators are restored."""
    # clones, in case the encoder writes over its inputs
    few = [None if rows is None else rows.detach().clone() for rows in layout.rows(leaves, layout.probe)]
    (rows,) = stream([few], device)
    args, kwargs = layout.arguments(rows, layout.probe)
    with RandomState.capture(device, own=own).restoring(), _torch.without_parametrization_cache(), as_written():
        return [out for out in flatten_outputs(encoder(*args, **kwargs))[0] if isinstance(out, Tensor)]


@contextmanager
def _without_hook_warning() -> Iterator[None]:
    """Suppress torch.compile's warning that a global hook runs for a compiled module and for the modules in it."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
        yield


def graph_leaves(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors in which the outputs' graph would accumulate gradients."""
    # an output may be such a leaf itself
    yield from (out for out in outputs if out.grad_fn is None and out.requires_grad)
    pending = [out.grad_fn for out in outputs if out.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        following = node.next_functions
        # a graph has hundreds of nodes, and few that accumulate a gradient, which lead no further
        if not following and hasattr(node, "variable"):
            yield node.variable
        for each, _ in following:
            if each is not None and each not in seen:
                seen.add(each)
                pending.append(each)


def not_owned(leaf: Tensor, owner: str = "elsewhere") -> ValueError:
    """The error for a parameter that would get no gradient."""
    got, remedy = f"one of shape {list(leaf.shape)} {owner}", "Pass the module that holds them, or its method."
    return invalid("encoder", "own every parameter that it uses", got, remedy)


def graph_may_change_bits(encoder: Callable[..., Any], modules: Sequence[nn.Module]) -> bool:
    """Return whether the encoder may compute other bits, or draw other random numbers, without a graph than with one.

    Compiled code does, and so do torch's attention modules in eval mode. Attention with a learned bias takes another
    kernel if the bias requires a gradient.
    """
    attention = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
    if runs_compiled(encoder, modules) or any(isinstance(m, attention) and not m.training for m in modules):
        return True
    # most models have none of the words in any name
    names = " ".join(_torch.own_names(*modules))
    return any(word in names for word in RELATIVE) and any(map(_learns_a_bias, modules))


def runs_compiled(encoder: Callable[..., Any], modules: Sequence[nn.Module]) -> bool:
    """Return whether torch.compile has wrapped the encoder or a part of it."""
    return _torch.uncompiled(without_partials(encoder)) is not None or any(map(_torch.is_compiled, modules))


def _learns_a_bias(module: nn.Module) -> bool:
    """Return whether a trained parameter or child of the module is named as a relative position bias is."""
    biases = [getattr(module, name) for name in _torch.own_names(module) if any(word in name for word in RELATIVE)]
    parameters = (p for x in biases for p in (x.parameters() if isinstance(x, nn.Module) else [x]))
    return any(parameter is not None and parameter.requires_grad for parameter in parameters)


def _normalises_over_rows(module: nn.Module) -> bool:
    """Return whether the module is a batch normalisation that takes its statistics from the rows it sees."""
    return isinstance(module, _torch.BatchNorm) and (module.training or module.running_mean is None)


def _refuse_batch_norm(module: nn.Module, name: str = "encoder") -> None:
    """Raise ValueError for a batch normalisation whose statistics over a part are not those of the batch."""
    # checked when it runs: the encoder may have put it in eval mode
    if _normalises_over_rows(module):
        # eval mode reads running statistics, if there are any
        averages = module.running_mean is not None
        mode = "in training mode" if averages else "without running statistics"
        got = f"{type(module).__name__} {mode}, whose statistics over a sub-batch are not those of the batch"
        remedy = f"{'Put it in eval mode, or take' if averages else 'Take'} GroupNorm or LayerNorm."
        if name == "encoder":
            remedy += " Or call the encoder itself, or cache only the part before it."
        raise invalid(name, "treat examples one by one", got, remedy)


@contextmanager
def refusing_batch_norm(modules: Sequence[nn.Module], name: str = "encoder") -> Iterator[None]:
    """Raise when one of the modules normalises over the examples of its sub-batch."""
    normalising = [module for module in modules if _normalises_over_rows(module)]
    hooks = [m.register_forward_pre_hook(lambda module, _: _refuse_batch_norm(module, name)) for m in normalising]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def refusing_state(modules: Sequence[nn.Module], name: str = "encoder", parts: str = "examples") -> Iterator[None]:
    """Raise when a module changes one of its buffers: its output depends on the calls before."""
    before = [(*each, _version(each[-1])) for each in _torch.own_buffers(modules)]
    yield
    for module, key, x, counted in before:
        now = getattr(module, key, None)
        # a buffer of another shape is a table that has grown
        replaced = now is not None and now is not x and now.shape == x.shape and not torch.equal(now.to(x.device), x)
        if _version(x) != counted or replaced:
            got = f"{type(module).__name__}, which changes a buffer when it runs"
            raise invalid(name, f"treat {parts} one by one", got, "Put it in eval mode.")


@contextmanager
def refusing_changes(leaves: Sequence[Tensor | None], name: str = "inputs", by: str = "encoder") -> Iterator[None]:
    """Raise when an input is written over: computed again, the result would be another."""
    before = [(leaf, _version(leaf)) for leaf in leaves if leaf is not None]
    yield
    for leaf, counted in before:
        if _version(leaf) != counted:
            got = f"one of shape {list(leaf.shape)} that it writes over"
            raise invalid(name, f"be left as it is by the {by}", got, "Clone it there, or work out of place.")


def _version(x: Tensor) -> int | None:
    """Count of a tensor's changes; None for one made in inference mode, which counts none."""
    return None if x.is_inference() else _torch.version(x)
