"""What `encode` owes the data-parallel wrappers: one reduction per parameter and step, however many sub-batches.

Beside `cache.py`. DistributedDataParallel reduces the gradients of what passes through its forward: so the whole of
`encode` becomes one forward of the wrapper, in which the wrapped module runs on sub-batch after sub-batch. FSDP2
gathers a module's parameters whenever it runs and scatters their gradients whenever it is back-propagated: so every
rank runs equally often, and no replay leaves a gradient for FSDP2 to scatter. The sums reach the whole parameters
through autograd, and FSDP2 scatters them where the backward around all of it ends.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from contrastile import agreement, comm
from contrastile._check import wrong
from contrastile.in_step import in_step

Result = TypeVar("Result")

# settings of FSDP2's groups: no gradient is scattered, none is averaged over replicas
NOTHING_LEAVES = {"reduce_grads": False, "all_reduce_grads": False}

# DistributedDataParallel leaves no mark on the module inside: remember each one that is made
_wrappers: WeakSet[DistributedDataParallel] = WeakSet()


def _note(module: nn.Module, _name: str, _part: nn.Module | None) -> None:
    if isinstance(module, DistributedDataParallel):
        _wrappers.add(module)


register_module_module_registration_hook(_note)


def unwrap(encoder: Any) -> tuple[Any, DistributedDataParallel | None]:
    """What runs on each sub-batch, and the DistributedDataParallel around it if there is one.

    An encoder may be a pair, (module, "method"): a wrapper does not have its module's methods.
    """
    if isinstance(encoder, partial):
        function, wrapper = unwrap(encoder.func)
        return partial(function, *encoder.args, **encoder.keywords), wrapper
    module, name = encoder if isinstance(encoder, tuple) and len(encoder) == 2 else (encoder, "forward")
    wrapper = module if isinstance(module, DistributedDataParallel) else None
    module = module if wrapper is None else wrapper.module
    if name == "forward":
        return module, wrapper
    if not isinstance(module, nn.Module) or not callable(getattr(module, str(name), None)):
        got = f"({type(module).__name__}, {repr(name) if isinstance(name, str) else type(name).__name__})"
        remedy = "Check the name, as in (model, 'encode_image')."
        raise wrong("encoder", "be callable, or a module and the name of its method", got, remedy)
    if isinstance(module, _sharded_kind()) and not _registered(module, name):
        sys.modules["torch.distributed.fsdp"].register_fsdp_forward_method(module, name)
    return getattr(module, name), wrapper


class _Stage(nn.Module):
    """Stands where the wrapped module does, for one forward."""

    def forward(self, run: Callable[[], Result]) -> Result:
        return run()


def inside(wrapper: DistributedDataParallel, run: Callable[[], Result]) -> Result:
    """run() as the wrapper's forward: it sees one forward of what it wraps, and reduces once in the backward."""
    wrapped, wrapper.module = wrapper.module, _Stage()
    try:
        return wrapper(run)
    finally:
        wrapper.module = wrapped


def refuse_bypass(wrapper: Any, modules: Sequence[nn.Module], parameters: Sequence[Tensor]) -> None:
    """Raises where the wrapper that there is would not reduce the gradients, or would for every sub-batch."""
    fully_sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for module in modules if parameters else []:
        if isinstance(module, (DistributedDataParallel, fully_sharded)):
            got = f"one that runs {type(module).__name__} inside"
            remedy = "Pass the DistributedDataParallel itself, or (it, 'method'); or shard with fully_shard (FSDP2)."
            raise wrong("encoder", "run without a data-parallel wrapper on each sub-batch", got, remedy)
    if wrapper is not None or not _unreduced(parameters):
        return
    # a wrapper is part of reference cycles: one that was given up may still be there
    gc.collect()
    if _unreduced(parameters):
        raise wrong(
            "encoder",
            "be reached through its DistributedDataParallel",
            "the module inside, whose gradients would not be reduced",
            "Pass the wrapper, or (wrapper, 'method'), or call encode in the forward of the wrapped module.",
        )


def _unreduced(parameters: Sequence[Tensor]) -> bool:
    """Whether a wrapper that means to reduce some of these is not in its forward now."""
    if not _wrappers:
        return False
    wanted = {id(parameter) for parameter in parameters}
    running = DistributedDataParallel._get_active_ddp_module()
    if running is not None:
        wanted -= {id(parameter) for parameter in running.module.parameters()}
    return any(
        id(parameter) in wanted
        for wrapper in list(_wrappers)
        if wrapper.require_backward_grad_sync
        for parameter in wrapper.module.parameters()
    )


def _sharded_kind() -> Any:
    """The class of FSDP2's modules; of nothing where it was never imported, for then there are none."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())


def _registered(module: nn.Module, name: str) -> bool:
    """Whether the method gathers the parameters: FSDP2 wraps it and puts it on the instance."""
    return hasattr(vars(module).get(name), "__wrapped__")


@dataclass(frozen=True)
class Sharding:
    """FSDP2's own records of the modules that an encoder runs; nothing to do where there are none.

    FSDP2 keeps a state for each module; in it, groups of parameters that travel together; of each parameter, the
    shard, which the optimizer knows, and the whole, which the module has while it is gathered.
    """

    modules: list[Any]

    @classmethod
    def of(cls, encoder: Callable[..., Any], modules: Sequence[nn.Module]) -> Sharding:
        while isinstance(encoder, partial):
            encoder = encoder.func
        owner, name = getattr(encoder, "__self__", None), getattr(encoder, "__name__", "")
        if isinstance(owner, _sharded_kind()) and not _registered(owner, name):
            got = f"{name} of {type(owner).__name__}, which does not gather its parameters"
            raise wrong("encoder", "be a forward method that FSDP2 knows", got, f"Pass (module, {name!r}).")
        return cls([module for module in modules if isinstance(module, _sharded_kind())])

    def wholes(self, reached: Sequence[nn.Module], parameters: Sequence[Tensor]) -> list[Tensor]:
        """The parameters that the encoder computes with: for shards, the wholes behind them."""
        for module in self.modules:
            if not all(hasattr(each, "_unsharded_param") for each in _parameters(module._get_fsdp_state())):
                # made when they are gathered for the first time
                module.unshard()
                module.reshard()
        wholes = {
            id(each.sharded_param): each._unsharded_param for state in self._states() for each in _parameters(state)
        }
        found = [wholes[id(p)].requires_grad_() if id(p) in wholes else p for p in parameters]
        managed = any(hasattr(m, "_is_fsdp_managed_module") for m in reached)
        apart = [p for p in found if managed and hasattr(p, "device_mesh")]
        if any(not placement.is_replicate() for p in apart for placement in getattr(p, "placements", ())):
            got = "a part of one, whose parameters it would not gather"
            raise wrong("encoder", "be a module that FSDP2 shards, or its method", got, "Pass (module, 'method').")
        # a number beside the shards that every rank has whole is the loss's
        strangers = {id(p) for p in apart}
        return [p for p in dict.fromkeys(found) if id(p) not in strangers]

    def stored(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """What the optimizer changes: for wholes, the shards behind them."""
        shards = {id(p._unsharded_param): p.sharded_param for state in self._states() for p in _parameters(state)}
        return [shards.get(id(parameter), parameter) for parameter in parameters]

    def held(self) -> list[Tensor]:
        """The wholes of all shards, frozen ones too: a graph that keeps one takes nothing for it."""
        return [each._unsharded_param for state in self._states() for each in _parameters(state)]

    def most(self, value: int) -> int:
        """The largest value of any rank: what a rank runs, all must run, because each run is an exchange among them."""
        for group in self._ranks():
            value = agreement.most(value, group)
        return value

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Around what all ranks run: an error of one rank's own, such as too little memory, is an error on all of them.

        The others would wait for its shards until time is up.
        """
        with ExitStack() as around:
            for group in self._ranks():
                around.enter_context(in_step(group))
                around.enter_context(comm.naming_the_lost("exchange of shards", group))
            yield

    def _ranks(self) -> list[Any]:
        """The groups of ranks that have a part each, or the same."""
        meshes = [each.sharded_param.device_mesh for state in self._states() for each in _parameters(state)]
        groups = [mesh.get_group(axis) for mesh in dict.fromkeys(meshes) for axis in range(mesh.ndim)]
        return [group for group in dict.fromkeys(groups) if comm.size(group) > 1]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Around attempts, which may end anywhere: parameters are whole all along, so no rank waits for another."""
        groups = [group for state in self._states() for group in _groups(state)]
        apart = [group for group in groups if not group.is_unsharded]
        for module in self.modules:
            module.unshard()
        whole = {"post_forward_mesh_info": None, "reshard_after_backward": False, **NOTHING_LEAVES}
        try:
            with _set_to(groups, whole):
                yield
        finally:
            for group in apart:
                group.reshard()

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Around one attempt: FSDP2's records are afterwards as they were, whether or not it came to its end."""
        contexts = list(dict.fromkeys(state._state_ctx for state in self._states()))
        before = [(each.iter_forward_root, each.post_backward_final_callback_queued) for each in contexts]
        try:
            yield
        finally:
            self.settle()
            for each, (root, queued) in zip(contexts, before, strict=True):
                each.iter_forward_root, each.post_backward_final_callback_queued = root, queued

    @contextmanager
    def holding_back(self) -> Iterator[None]:
        """Around the replays: no gradient leaves this rank before the end of the backward that they are part of."""
        groups = [group for state in self._states() for group in _groups(state)]
        for state in self._states():
            state._register_root_post_backward_final_callback()
        with _set_to(groups, NOTHING_LEAVES):
            yield

    def settle(self) -> None:
        """After a replay, as FSDP2 does after a backward: every group is sharded and ready for the next one."""
        for state in self._states():
            idle = type(state._training_state).IDLE
            for group in _groups(state):
                if group._training_state != idle:
                    group.post_backward()
                    group._training_state = idle
            state._training_state = idle

    def _states(self) -> list[Any]:
        # one may serve several modules
        return list(dict.fromkeys(module._get_fsdp_state() for module in self.modules))


@contextmanager
def _set_to(groups: Sequence[Any], values: dict[str, Any]) -> Iterator[None]:
    """The groups' attributes at these values, and afterwards as they were."""
    before = [{name: getattr(group, name) for name in values} for group in groups]
    for group in groups:
        vars(group).update(values)
    try:
        yield
    finally:
        for group, held in zip(groups, before, strict=True):
            vars(group).update(held)


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        # torch 2.11 has one or none
        groups = [group for group in (state._fsdp_param_group,) if group is not None]
    return list(groups)


def _parameters(state: Any) -> list[Any]:
    return [each for group in _groups(state) for each in group.fsdp_params]
