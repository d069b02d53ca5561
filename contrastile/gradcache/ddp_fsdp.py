"""Data-parallel wrappers: one reduction per parameter and step, however many sub-batches.

Used by `encode.py` and by both passes.

- DistributedDataParallel reduces the gradients of what passes through its forward. So a call of `encode` becomes one
  forward of the wrapper, in which the wrapped module runs on one sub-batch after the other.
- FSDP2 gathers a module's parameters each time it runs, and scatters their gradients each time it is back-propagated.
  So all ranks run equally often, and no replay leaves a gradient to scatter. Autograd passes the sums to the whole
  parameters, and FSDP2 scatters them at the end of the backward.
- DeepSpeed's ZeRO stages 1 and 2 reduce a gradient when autograd accumulates it, which happens once.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from contrastile import _torch
from contrastile._errors import invalid
from contrastile._torch import pytree
from contrastile.distributed import collectives, consistency
from contrastile.distributed.failure import in_step
from contrastile.gradcache.introspect import without_partials

Result = TypeVar("Result")

# settings of FSDP2's groups: no gradient is scattered, none is averaged over replicas
NO_REDUCTION = {"reduce_grads": False, "all_reduce_grads": False}

# all wrappers, noted when they are made: DistributedDataParallel leaves no mark on the module inside
_wrappers: WeakSet[DistributedDataParallel] = WeakSet()
# the module inside a wrapper, compiled, by the compiled wrapper
_compiled: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


def _note(module: nn.Module, _name: str, _part: nn.Module | None) -> None:
    # torch.compile traces hooks too, of modules that are not made yet
    if not torch.compiler.is_compiling() and isinstance(module, DistributedDataParallel):
        _wrappers.add(module)


register_module_module_registration_hook(_note)


def unwrap(encoder: Any) -> tuple[Any, DistributedDataParallel | None]:
    """The function to run on each sub-batch, and the DistributedDataParallel around it if there is one.

    An encoder may be a pair (module, "method"), because a wrapper does not have its module's methods, or (module,
    function). The function gets the module inside the wrapper, which would reduce after every sub-batch. The module of
    a DeepSpeed engine runs without it, because an engine expects one backward for each of its forwards. Where a wrapper
    is compiled, as trainers do it, the module inside runs compiled. Lightning's Fabric has a module around a wrapper.
    """
    if isinstance(encoder, partial):
        function, wrapper = unwrap(encoder.func)
        return partial(function, *encoder.args, **encoder.keywords), wrapper
    module, name = encoder if isinstance(encoder, tuple) and len(encoder) == 2 else (encoder, "forward")
    passed = _inside_fabric(module)
    module = _uncompiled_wrapper(passed)
    wrapper = module if isinstance(module, DistributedDataParallel) else None
    if wrapper is not None and passed is not wrapper:
        # compiled as the wrapper was, once
        if passed not in _compiled:
            _compiled[passed] = _torch.compiled_alike(passed, wrapper.module)
        module = _compiled[passed]
    elif wrapper is not None or engine_of(module) is not None:
        module = module.module
    if name == "forward":
        if isinstance(module, nn.Module) and getattr(module.forward, "__func__", None) is nn.Module.forward:
            got, remedy = type(module).__name__, "Name the method that encodes, as in (model, 'encode_image')."
            raise invalid("encoder", "have a forward, or be a module and the name of its method", got, remedy)
        return module, wrapper
    if isinstance(module, nn.Module) and callable(name) and not isinstance(name, nn.Module):
        if getattr(name, "__self__", name) in (module, _torch.compiled_module(module)):
            got, remedy = f"{name.__name__} of the module itself", f"Write (model, {name.__name__!r})."
            raise invalid("encoder", "be a module and the name of its method, or a function of it", got, remedy)
        return partial(name, module), wrapper
    if not isinstance(module, nn.Module) or not callable(getattr(module, str(name), None)):
        got = f"({type(module).__name__}, {repr(name) if isinstance(name, str) else type(name).__name__})"
        remedy = "Check the name, as in (model, 'encode_image')."
        raise invalid("encoder", "be callable, or a module and the name of its method", got, remedy)
    method = getattr(module, name)
    if isinstance(module, _torch.fsdp_module_class()) and not _gathers(method):
        method = _gathering(module, name)
    return method, wrapper


def _inside_fabric(module: Any) -> Any:
    """The DistributedDataParallel around which lightning's Fabric has put a module; any other module as it is."""
    inner = getattr(module, "_forward_module", None)
    return inner if isinstance(_uncompiled_wrapper(inner), DistributedDataParallel) else module


def _uncompiled_wrapper(module: Any) -> Any:
    """The DistributedDataParallel that `torch.compile` got, as trainers call it; any other module as it is."""
    inner = module
    while (compiled := _torch.compiled_module(inner)) is not None:
        inner = compiled
    return inner if isinstance(inner, DistributedDataParallel) else module


def engine_of(encoder: Any) -> Any:
    """The engine of DeepSpeed that an encoder is, or is a method of; None for any other."""
    encoder = without_partials(encoder)
    module = encoder[0] if isinstance(encoder, tuple) and encoder else encoder
    return module if isinstance(module, nn.Module) and hasattr(type(module), "zero_optimization_stage") else None


def refuse_missing_autocast(engine: Any, device: torch.device | None) -> None:
    """Raise where an engine of DeepSpeed has an autocast of its own, which only its forward enters."""
    enabled = getattr(engine, "torch_autocast_enabled", None)
    if enabled is not None and enabled() and device is not None and not torch.is_autocast_enabled(device.type):
        got, remedy = "none", "Put encode and the loss under torch.autocast."
        raise invalid("encoder", "run under the autocast that its DeepSpeed engine is configured for", got, remedy)


def refuse_bare_backward(engine: Any) -> None:
    """Raise where an engine of DeepSpeed does not run the backward, and so would not reduce the gradients."""
    if engine is not None and not getattr(engine, "_running_engine_backward", True):
        got, remedy = "a backward without it", "Call engine.backward(loss)."
        raise invalid("encoder", "be back-propagated by its DeepSpeed engine", got, remedy)


class _StandIn(nn.Module):
    """The wrapper's module during one forward, with the wrapped module's buffers, which the wrapper broadcasts."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        # a tuple keeps it from being a submodule: the wrapper excludes buffers by their names
        self.wrapped = (wrapped,)

    def named_buffers(self, *how: Any, **named: Any) -> Iterator[tuple[str, Tensor]]:
        return self.wrapped[0].named_buffers(*how, **named)

    def forward(self, run: Callable[[], Result]) -> Result:
        return run()


def as_forward_of(wrapper: DistributedDataParallel, run: Callable[[], Result]) -> Result:
    """run() as one forward of the wrapper, which reduces once in the backward."""
    wrapped, wrapper.module = wrapper.module, _StandIn(wrapper.module)
    try:
        return wrapper(run)
    finally:
        wrapper.module = wrapped


def lent_part(encoder: Any, wrapper: DistributedDataParallel | None, make: Callable[[], Any] | None) -> Any:
    """A sub-batch of another rank, for a rank that has none of its own; None where none is needed, or none exists.

    The ranks are those that take a step together: those of the wrapper or of DeepSpeed's engine, where a backward will
    follow, or those over which FSDP2 shards. make: makes the sub-batch that this rank would lend; None: it has none.
    """
    borrowed = None
    for group in _groups_of_call(encoder, wrapper):
        received = consistency.lent(group, make)
        if received is not None:
            borrowed = received
            make = partial(lambda part: part, received)
    if borrowed is None:
        return None
    # a function computes where its inputs are: on the rank that lent them, beside the parameters
    parameter = next(_owner(encoder, wrapper or _torch.running_ddp()).parameters(), None)
    place = partial(torch.Tensor.to, device=None if parameter is None else parameter.device)
    return pytree.tree_map_only(Tensor, place, borrowed)


def _owner(encoder: Any, wrapper: DistributedDataParallel | None) -> Any:
    """The wrapper, or the module that the encoder is or belongs to; another object for any other function."""
    encoder = without_partials(encoder)
    return wrapper or (encoder[0] if isinstance(encoder, tuple) and encoder else getattr(encoder, "__self__", encoder))


def _groups_of_call(encoder: Any, wrapper: DistributedDataParallel | None) -> list[Any]:
    """Process groups of several ranks whose ranks all call `encode` for this encoder."""
    wrapper, engine = wrapper or _torch.running_ddp(), engine_of(encoder)
    if wrapper is not None or engine is not None:
        group = engine.data_parallel_group if wrapper is None else wrapper.process_group
        trained = any(parameter.requires_grad for parameter in (wrapper or engine).parameters())
        return [group] if torch.is_grad_enabled() and trained and collectives.size(group) > 1 else []
    module = _owner(encoder, None)
    modules = module.modules() if isinstance(module, nn.Module) else ()
    return Sharding([each for each in modules if isinstance(each, _torch.fsdp_module_class())]).comparing_groups()


def refuse_bypass(wrapper: Any, modules: Sequence[nn.Module], parameters: Sequence[Tensor]) -> None:
    """Raise where a wrapper would not reduce the gradients, or would reduce them for every sub-batch."""
    fully_sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for module in modules if parameters else []:
        if isinstance(module, (DistributedDataParallel, fully_sharded)):
            got = f"one that runs {type(module).__name__} inside"
            remedy = "Pass the DistributedDataParallel itself, or (it, 'method'); or shard with fully_shard (FSDP2)."
            raise invalid("encoder", "run without a data-parallel wrapper on each sub-batch", got, remedy)
    # DeepSpeed puts an id on each parameter that its ZeRO stage 3 keeps in parts
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        remedy = "Shard with fully_shard (FSDP2), or use ZeRO stage 1 or 2."
        raise invalid("encoder", "hold its parameters whole", "parameters of DeepSpeed's ZeRO stage 3", remedy)
    if wrapper is not None or not _unreduced(parameters):
        return
    # a wrapper is part of reference cycles: a discarded one may still be alive
    gc.collect()
    if _unreduced(parameters):
        got = "the module inside, whose gradients would not be reduced"
        remedy = "Pass the wrapper, or (wrapper, 'method'), or call encode in the forward of the wrapped module."
        raise invalid("encoder", "be reached through its DistributedDataParallel", got, remedy)


def _unreduced(parameters: Sequence[Tensor]) -> bool:
    """Return whether a wrapper that reduces some of these parameters is not running its forward now."""
    if not _wrappers:
        return False
    wanted = {id(parameter) for parameter in parameters}
    if (running := _torch.running_ddp()) is not None:
        wanted -= {id(parameter) for parameter in running.module.parameters()}
    return any(
        id(parameter) in wanted
        for wrapper in list(_wrappers)
        if wrapper.require_backward_grad_sync
        for parameter in wrapper.module.parameters()
    )


def _gathering(module: nn.Module, name: str) -> Any:
    """The method as FSDP2 registers it; the module is left without, because its forward may call the method itself.

    There a registered one would shard the parameters that the rest of the forward reads.
    """
    own = {key: value for key, value in vars(module).items() if key == name}
    _fsdp_register()(module, name)
    method = vars(module).pop(name)
    vars(module).update(own)
    return method


def _gathers(method: Any) -> bool:
    # FSDP2's wrapper around a method has the method's name and FSDP2's globals
    return getattr(method, "__globals__", None) is _fsdp_register().__globals__


def _fsdp_register() -> Any:
    return sys.modules["torch.distributed.fsdp"].register_fsdp_forward_method


@dataclass(frozen=True)
class Sharding:
    """The modules of an encoder that FSDP2 shards. Without any, every method does nothing."""

    modules: list[Any]

    @classmethod
    def of(cls, encoder: Callable[..., Any], modules: Sequence[nn.Module]) -> Sharding:
        """The sharded ones of the modules. Raises ValueError for a method that does not gather its parameters."""
        encoder = without_partials(encoder)
        owner, name = getattr(encoder, "__self__", None), getattr(encoder, "__name__", "")
        if isinstance(owner, _torch.fsdp_module_class()) and not _gathers(encoder):
            got = f"{name} of {type(owner).__name__}, which does not gather its parameters"
            raise invalid("encoder", "be a forward method that FSDP2 knows", got, f"Pass (module, {name!r}).")
        return cls([module for module in modules if isinstance(module, _torch.fsdp_module_class())])

    @cached_property
    def _states(self) -> list[Any]:
        return _torch.fsdp_states(self.modules)

    @property
    def _groups(self) -> list[Any]:
        return [group for state in self._states for group in _torch.fsdp_groups(state)]

    def wholes_of(self, parameters: Sequence[Tensor], modules: Sequence[nn.Module]) -> list[Tensor]:
        """The parameters that the encoder computes with: for shards, the wholes behind them."""
        managed = any(map(_torch.in_fsdp_module, modules))
        if not managed and not self.modules:
            return list(parameters)
        for module in self.modules:
            if any(whole is None for _, whole in _torch.fsdp_parameters(_torch.fsdp_states([module]))):
                # a whole is made when it is gathered for the first time; ranks in other calls of `encode` raise before
                self.most(0)
                module.unshard()
                module.reshard()
        wholes = _torch.fsdp_wholes(self._states)
        used = [wholes[id(p)].requires_grad_() if id(p) in wholes else p for p in parameters]
        distributed = [p for p in used if managed and hasattr(p, "device_mesh")]
        if any(not placement.is_replicate() for p in distributed for placement in getattr(p, "placements", ())):
            got = "a part of one, whose parameters it would not gather"
            raise invalid("encoder", "be a module that FSDP2 shards, or its method", got, "Pass (module, 'method').")
        # a replicated number beside the shards, such as a scale, belongs to the loss
        excluded = {id(p) for p in distributed}
        return [p for p in dict.fromkeys(used) if id(p) not in excluded]

    def shards_of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The parameters that the optimizer changes: for wholes, the shards behind them."""
        shards = {id(whole): shard for shard, whole in _torch.fsdp_parameters(self._states)}
        return [shards.get(id(parameter), parameter) for parameter in parameters]

    def wholes(self) -> list[Tensor]:
        """The wholes of all shards, frozen ones too: a graph that refers to one takes no memory for it."""
        return [whole for _, whole in _torch.fsdp_parameters(self._states) if whole is not None]

    def whole_bytes(self) -> int:
        """Bytes of the wholes that are gathered at present: the others' storages are empty."""
        return sum(whole.untyped_storage().nbytes() for whole in self.wholes())

    def most(self, value: int, **statement: Any) -> int:
        """The largest value of any rank: each run is a collective, so all ranks must run equally often.

        Raises ValueError on all ranks where their statements differ.
        """
        for group in self.comparing_groups():
            value = consistency.most(value, group, **statement)
        return value

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set on any rank: FSDP2 scatters the same gradients on all of them."""
        for group in self.comparing_groups():
            flags = consistency.any_of(flags, group)
        return list(flags)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Make an error of one rank, such as too little memory, an error on all: they would wait for its shards."""
        with ExitStack() as stack:
            for group in dict.fromkeys([*self.groups(), *self.comparing_groups()]):
                stack.enter_context(in_step(group))
                stack.enter_context(collectives.reporting_lost_ranks("exchange of shards", group))
            yield

    def groups(self) -> list[Any]:
        """The process groups of several ranks over which parameters are sharded or replicated."""
        groups = [mesh.get_group(axis) for mesh in self._meshes for axis in range(mesh.ndim)]
        return [group for group in dict.fromkeys(groups) if collectives.size(group) > 1]

    def comparing_groups(self) -> list[Any]:
        """The process groups through which these ranks compare: that of all ranks, where one mesh holds them.

        It compares on the host (`consistency.py`). Those of a mesh's axes would wait for their device, twice.
        """
        whole = len(self._meshes) == 1 and self._meshes[0].ndim > 1 and self._meshes[0].size() == dist.get_world_size()
        return [dist.group.WORLD] if whole else self.groups()

    @cached_property
    def _meshes(self) -> list[Any]:
        shards = (shard for shard, _ in _torch.fsdp_parameters(self._states))
        return list(dict.fromkeys(getattr(shard, "device_mesh", None) for shard in shards))

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep all parameters whole during trials, which may end anywhere, so that no rank waits for another."""
        # a trial, which some ranks make without the others, must not be the first forward
        _torch.settle_fsdp_roots(self._states)
        groups = self._groups
        sharded = [group for group in groups if not group.is_unsharded]
        for module in self.modules:
            module.unshard()
        try:
            with _set_to(groups, {"post_forward_mesh_info": None, "reshard_after_backward": False, **NO_REDUCTION}):
                yield
        finally:
            for group in sharded:
                group.reshard()

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Restore FSDP2's records after one trial, whether or not it succeeded."""
        with _torch.restoring_fsdp_records(self._states):
            try:
                yield
            finally:
                self.reshard()

    @contextmanager
    def holding_back(self) -> Iterator[None]:
        """Reduce no gradient during the replays, but at the end of the backward that they are part of.

        Groups with `reshard_after_forward=False` stay gathered until then too.
        """
        _torch.reduce_at_end_of_backward(self._states)
        stay = [group for group in self._groups if group.post_forward_mesh_info is None]
        with _set_to(self._groups, NO_REDUCTION), _set_to(stay, {"reshard_after_backward": False}):
            yield

    def reshard(self) -> None:
        """Shard every group after a replay, but those that stay gathered, and make it ready for the next replay."""
        _torch.finish_fsdp_backward(self._states)


@contextmanager
def _set_to(groups: Sequence[Any], values: dict[str, Any]) -> Iterator[None]:
    """Set attributes of the groups, and set them back at the end."""
    before = [{name: getattr(group, name) for name in values} for group in groups]
    for group in groups:
        vars(group).update(values)
    try:
        yield
    finally:
        for group, values_before in zip(groups, before, strict=True):
            vars(group).update(values_before)
