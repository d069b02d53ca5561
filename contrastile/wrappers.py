"""What `encode` owes the data-parallel wrappers: one reduction per parameter and step, however many sub-batches.

Beside `cache.py`. DistributedDataParallel reduces what passes through its forward, so the whole of `encode` becomes
one forward of the wrapper, in which the wrapped module runs sub-batch by sub-batch. FSDP2 gathers a module's
parameters whenever it runs and scatters their gradients whenever they are back-propagated, so every rank must run
equally often, and no replay may scatter: the sums reach FSDP2's own bookkeeping through autograd, once, and are
scattered where the backward around all of it ends.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from contrastile import comm
from contrastile._check import wrong
from contrastile.offload import Bounds

Result = TypeVar("Result")

# DistributedDataParallel leaves no mark on what it wraps: remember every one that is made
_wrappers: WeakSet[DistributedDataParallel] = WeakSet()


def _note_wrapper(module: nn.Module, _name: str, _submodule: nn.Module | None) -> None:
    if isinstance(module, DistributedDataParallel):
        _wrappers.add(module)


register_module_module_registration_hook(_note_wrapper)


def unwrap(encoder: Any) -> tuple[Any, DistributedDataParallel | None]:
    """What runs on each sub-batch, and the wrapper around it; an encoder may be (module, "method") too."""
    if isinstance(encoder, partial):
        inner, wrapper = unwrap(encoder.func)
        return partial(inner, *encoder.args, **encoder.keywords), wrapper
    if not isinstance(encoder, tuple):
        return (encoder.module, encoder) if isinstance(encoder, DistributedDataParallel) else (encoder, None)
    module, name = encoder if len(encoder) == 2 else (None, None)
    if not isinstance(module, nn.Module) or not isinstance(name, str):
        got = f"({', '.join(type(part).__name__ for part in encoder)})"
        raise wrong("encoder", "be callable, or a module and a method's name", got, "Pass (model, 'encode_image'), say.")
    wrapper = module if isinstance(module, DistributedDataParallel) else None
    module = module.module if wrapper is not None else module
    if not callable(getattr(module, name, None)):
        raise wrong("encoder", f"name a method of {type(module).__name__}", repr(name), "Check the spelling.")
    if isinstance(module, _sharded_kind()) and name not in vars(module):
        sys.modules["torch.distributed.fsdp"].register_fsdp_forward_method(module, name)
    return getattr(module, name), wrapper


class _Stage(nn.Module):
    def forward(self, run: Callable[[], Result]) -> Result:
        return run()


def inside(wrapper: DistributedDataParallel, run: Callable[[], Result]) -> Result:
    """run() as the wrapper's one forward: in the backward it reduces each parameter's gradient once."""
    wrapped, wrapper.module = wrapper.module, _Stage()
    try:
        return wrapper(run)
    finally:
        wrapper.module = wrapped


def refuse_bypass(
    encoder: Any, wrapper: DistributedDataParallel | None, modules: Sequence[nn.Module], parameters: Sequence[Tensor]
) -> None:
    """Raises where a wrapper would be reached around, so that nobody reduced the gradients."""
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        raise wrong(
            "encoder",
            "be the data-parallel wrapper itself, not run one inside",
            "one that runs DistributedDataParallel on each sub-batch",
            "Pass the wrapper, or (wrapper, 'method').",
        )
    if wrapper is not None or not _unreduced(parameters):
        return
    # wrappers are in reference cycles: one that was given up may not have gone yet
    gc.collect()
    if _unreduced(parameters):
        raise wrong(
            "encoder",
            "be reached through its data-parallel wrapper",
            "the module inside, whose gradients would not be reduced",
            "Pass the wrapper, or (wrapper, 'method'), or call encode in the wrapped module's forward.",
        )


def _unreduced(parameters: Sequence[Tensor]) -> bool:
    """Whether a wrapper that is to reduce some of these is not in its forward now."""
    wanted = {id(parameter) for parameter in parameters}
    reducing = DistributedDataParallel._get_active_ddp_module()
    if reducing is not None:
        wanted -= {id(parameter) for parameter in reducing.module.parameters()}
    return bool(wanted) and any(
        id(parameter) in wanted
        for known in list(_wrappers)
        if known.require_backward_grad_sync
        for parameter in known.module.parameters()
    )


def _sharded_kind() -> Any:
    """The class of FSDP2's modules; nothing where it was never imported, for then there are none."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())


@dataclass(frozen=True)
class Sharding:
    """FSDP2's bookkeeping for the modules that an encoder runs; without any of them, nothing to do."""

    states: list[Any]

    @classmethod
    def of(cls, encoder: Any, modules: Sequence[nn.Module]) -> Sharding:
        while isinstance(encoder, partial):
            encoder = encoder.func
        owner, name = getattr(encoder, "__self__", None), getattr(encoder, "__name__", "")
        if isinstance(owner, _sharded_kind()) and name not in vars(owner):
            raise wrong(
                "encoder",
                "be a forward method that FSDP2 knows",
                f"{name} of {type(owner).__name__}",
                f"Pass the module itself, or (module, {name!r}).",
            )
        states = [module._get_fsdp_state() for module in modules if isinstance(module, _sharded_kind())]
        return cls(list(dict.fromkeys(states)))

    def _groups(self) -> Iterator[Any]:
        for state in self.states:
            # torch 2.11 has at most one a state
            yield from getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group])

    def unsharded(self, modules: Sequence[nn.Module], parameters: Sequence[Tensor]) -> list[Tensor]:
        """The whole parameters behind the shards: those that the encoder computes with."""
        for module in modules if self.states else []:
            if isinstance(module, _sharded_kind()) and not all(_whole(group) for group in Sharding([module._get_fsdp_state()])._groups()):
                module.unshard()
                module.reshard()
        whole = {id(each.sharded_param): each._unsharded_param for group in self._groups() for each in group.fsdp_params}
        found = {id(twin): twin for twin in (whole.get(id(p), p).requires_grad_(p.requires_grad) for p in parameters)}
        return list(found.values())

    def agree(self, bounds: list[Bounds]) -> list[Bounds]:
        """Bounds with empty ones behind them, as many as any rank has: each run is an exchange between ranks."""
        meshes = {each.sharded_param.device_mesh for group in self._groups() for each in group.fsdp_params}
        most = len(bounds)
        for mesh in meshes:
            for axis in range(mesh.ndim):
                most = comm.most(most, mesh.get_group(axis))
        end = bounds[-1][1]
        return bounds + [(end, end)] * (most - len(bounds))

    @contextmanager
    def holding_back(self) -> Iterator[None]:
        """No replay scatters gradients; FSDP2 does once, where the backward around it ends."""
        for state in self.states:
            state._register_root_post_backward_final_callback()
        groups = list(self._groups())
        before = [(group.reduce_grads, group.all_reduce_grads) for group in groups]
        for group in groups:
            group.reduce_grads = group.all_reduce_grads = False
        try:
            yield
        finally:
            for group, (reduce, all_reduce) in zip(groups, before, strict=True):
                group.reduce_grads, group.all_reduce_grads = reduce, all_reduce

    def settle(self) -> None:
        """After a replay, as FSDP2 does at the end of a backward: the next one starts afresh."""
        for state in self.states:
            idle = type(state._training_state).IDLE
            for group in Sharding([state])._groups():
                if group._training_state != idle:
                    group.post_backward()
                    group._training_state = idle
            state._training_state = idle


def _whole(group: Any) -> bool:
    return all(hasattr(each, "_unsharded_param") for each in group.fsdp_params)
