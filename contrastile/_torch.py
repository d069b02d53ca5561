"""Private names of torch that the package depends on, each behind a public name of its own.

Stands on the ground of the house: everything may import it, and nothing else names a private part of torch. A release
of torch may change any of these without notice; then this file changes, and no other.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["BatchNorm", "pytree"]

if dist.is_available() and not dist.is_initialized():
    # default arguments of this keep the group of all ranks that is there when torch first loads it, with its threads
    import torch.distributed.nn.functional

# one call for a list of tensors
add_each, add_each_, multiply_each = torch._foreach_add, torch._foreach_add_, torch._foreach_mul
# the CPU multiplies bf16 by instructions of its own, several times as fast as float32
fast_bf16: bool = any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("avx512_bf16", "amx_tile"))
# shapes that torch.compile may compile a function for; 8 by default
COMPILED_SHAPES = 128


class DispatchMode(TorchDispatchMode):
    """A mode for functions that run uncompiled: torch imports torch._dynamo for any other, which takes 1.5 seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def without_values() -> Any:
    """Context in which tensors have shapes, dtypes and storages of a size, and no memory behind them."""
    # imported here: it takes half a second, and the planner alone needs it
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def fake_store() -> Any:
    """The store of torch's process group "fake", whose operations send nothing and return at once."""
    # its module registers the backend
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def version(x: Tensor) -> int:
    """Count of the in-place changes of a tensor."""
    return x._version


def storage_id(x: Tensor) -> int:
    """Identity of a tensor's storage while it lives. Its address changes each time that FSDP2 gathers it."""
    return x.untyped_storage()._cdata


def backward_hooks(x: Tensor) -> dict[int, Any] | None:
    """Hooks that autograd calls with a tensor's gradient; None where it never had any."""
    return x._backward_hooks


def accumulation_hooks(x: Tensor) -> dict[int, Any] | None:
    """Hooks that autograd calls with a leaf after its gradient was accumulated; None where it never had any."""
    return x._post_accumulate_grad_hooks


def backward_is_repeatable() -> bool:
    """Return whether the running backward may run again: `retain_graph=True`."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def cudagraphs_warm_up(device: torch.device) -> bool:
    """Return whether inductor's CUDA graphs, of mode="reduce-overhead", own all memory that is allocated now."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or device.type != "cuda":
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    manager = trees.get_manager(index, create_if_none_exists=False)
    return manager is not None and manager.in_warmup


def current_stream_address(device: int) -> int:
    """Address of a CUDA device's current stream; torch takes twenty times as long to return the stream itself."""
    return torch._C._cuda_getCurrentRawStream(device)


# innermost transform of torch.func around a call; None outside of all
func_transform = torch._C._functorch.peek_interpreter_stack
# whether a gradient is one of many at once, as of torch.autograd.grad(is_grads_batched=True)
is_batched = torch._C._functorch.is_legacy_batchedtensor
# whether torch.jit.trace, or an export by it, records operations
jit_traces = torch._C._is_tracing


def forward_ad_runs() -> bool:
    """Return whether forward-mode differentiation is in progress, whose tangents copies in place lose."""
    return forward_ad._current_level >= 0


def saving_is_hooked() -> bool:
    """Return whether tensors saved for a backward go through hooks, such as those of an activation checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def uncompiled(function: Any) -> Any:
    """Function or module that torch.compile has wrapped; None where it has not."""
    return getattr(function, "_torchdynamo_orig_callable", None)


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile has wrapped the module or its call."""
    # getattr is slow for an attribute that a module lacks, and a model has hundreds of modules
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def compiled_module(module: Any) -> Any:
    """Module that torch.compile was called with; None for any other."""
    # torch.jit's modules have another kind of dict
    held = isinstance(module, nn.Module) and "_orig_mod" in module._modules
    return module._modules["_orig_mod"] if held else None


def compiled_alike(compiled: Any, module: nn.Module) -> nn.Module:
    """The module, compiled with the options of a compiled one."""
    alike: nn.Module = compiled.dynamo_ctx(module)
    return alike


def modules_of(root: nn.Module) -> list[nn.Module]:
    """The module and all inside, each once; in the order of `modules()`, which puts names together and is slower."""
    modules: dict[int, nn.Module] = {}
    pending: list[nn.Module | None] = [root]
    while pending:
        module = pending.pop()
        if module is not None and id(module) not in modules:
            modules[id(module)] = module
            pending += reversed(module._modules.values())
    return list(modules.values())


def own_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of these modules themselves, each once; as `parameters(recurse=False)` of each, and faster."""
    return list({id(x): x for module in modules for x in module._parameters.values() if x is not None}.values())


def own_buffers(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, Tensor]]:
    """The buffers of these modules themselves, with their module and name."""
    named = ((module, *item) for module in modules if module._buffers for item in module._buffers.items())
    return [(module, name, x) for module, name, x in named if x is not None]


def own_names(*modules: nn.Module) -> list[str]:
    """Names of the parameters and modules that are attributes of these modules."""
    return [name for module in modules for names in (module._parameters, module._modules) for name in names]


def compile_graphs(module: nn.Module) -> None:
    """Compile a module's calls in grad mode, in place, so that no weight changes its name; other calls run as written.

    Each shape is compiled for itself, by choices that do not depend on timings: a second process computes the same
    bits. All modules share one count of compiled shapes, above which torch would silently compile no more.
    """
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    dynamo.recompile_limit = max(dynamo.recompile_limit, COMPILED_SHAPES)
    module.compile(dynamic=False, options={"deterministic": True} if hasattr(inductor, "deterministic") else None)
    compiled: Any = module._compiled_call_impl
    replace_calls(module, compiled)


def replace_calls(module: nn.Module, function: Callable[..., Any]) -> None:
    """Call `function` in grad mode where the module would be called, its hooks left out; in place."""
    as_written = module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if torch.is_grad_enabled() else as_written)(*args, **kwargs)

    module._compiled_call_impl = call


def uncompile(module: nn.Module) -> None:
    """Undo `compile_graphs` and `replace_calls`; compiled code stays in torch's cache."""
    module._compiled_call_impl = None


def partitioned(
    function: Callable[..., Any], runner: Callable[[Any], Callable[[list[Any]], Any]]
) -> Callable[..., Any]:
    """The function by graphs of its forward and its backward, traced at its first call and cut as for torch.compile.

    runner: makes a graph a function of the list of its inputs.
    """
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def compiled(graph: Any, _inputs: Any) -> Any:
        run = runner(graph)

        def boxed(inputs: list[Any]) -> Any:
            return run(inputs)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    compilers: Any = {"fw_compiler": compiled, "bw_compiler": compiled}
    return aot_function(
        function, **compilers, decompositions=select_decomp_table(), partition_fn=min_cut_rematerialization_partition
    )


@contextmanager
def without_parametrization_cache() -> Iterator[None]:
    """Suspend `parametrize.cached()`, which would hand out weights that were computed without a graph."""
    depth, parametrize._cache_enabled = parametrize._cache_enabled, 0
    try:
        yield
    finally:
        parametrize._cache_enabled = depth


def backend_options(group: Any, device: str = "cuda") -> Any:
    """Options of the group's backend for tensors on devices of this kind."""
    backend = group._get_backend(torch.device(device))
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it in another backend, which in older versions has no options
    return getattr(backend, "wrapped_pg", backend).options


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set one variable of the process for a while, and no other: threads of backends may read theirs."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def symmetric(size: int, device: torch.device) -> tuple[Tensor, Callable[[Any], Callable[[int], Tensor]]]:
    """Bytes that other ranks can reach, and a function of a group that returns each rank's; all ranks call it."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    if symmetric_memory.get_backend(device) != "CUDA":
        # NVSHMEM's memory is made by all ranks of the world together
        raise RuntimeError("symmetric memory has another backend than CUDA")
    own = symmetric_memory.empty(size, dtype=torch.uint8, device=device)

    def of_rank(group: Any) -> Callable[[int], Tensor]:
        # nobody needs multicast here, and a node with a wrong setting of it may stand still
        with environment("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"):
            handle = symmetric_memory.rendezvous(own, group)
        return lambda rank: handle.get_buffer(rank, (size,), torch.uint8)

    return own, of_rank


def backend_timeout(group: Any, device: str = "cuda") -> timedelta:
    """Time-out of the group's operations on such tensors."""
    return backend_options(group, device)._timeout


def default_store() -> Any:
    """Key-value store in which the processes met."""
    return dist.distributed_c10d._get_default_store()


def has_ranks() -> bool:
    """Return whether processes have met; a graph is compiled anew where that changes, for which it is no constant."""
    return dist.is_available() and dist.distributed_c10d._world.default_pg is not None


def process_groups() -> list[Any]:
    return [*dist.distributed_c10d._world.pg_map] if dist.is_available() else []


def is_destroyed(group: Any) -> bool:
    """Return whether `destroy_process_group` has ended this process group."""
    return group not in dist.distributed_c10d._world.pg_map


def post_together(operations: Sequence[tuple[Callable[..., Any], Tensor, int]], group: Any) -> list[Any]:
    """Post sends and receives at once, as `dist.batch_isend_irecv` does, in a third of its time on the host."""
    if not operations:
        return []
    device = operations[0][1].device
    coalesced = group._get_backend(device).supports_coalescing
    if coalesced:
        group._start_coalescing(device)
    works = [operation([x], other, 0) for operation, x, other in operations]
    return [group._end_coalescing(device)] if coalesced else works


def running_ddp() -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward is running."""
    return DistributedDataParallel._get_active_ddp_module()


# FSDP2 keeps a state for each module; in it, groups of parameters that are gathered together; of each parameter, the
# shard, which the optimizer knows, and the whole, which the module has while it is gathered.


def fsdp_module_class() -> Any:
    """Class of FSDP2's modules; an empty tuple where FSDP2 was never imported, for then there are none."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())


def in_fsdp_module(module: nn.Module) -> bool:
    """Return whether FSDP2 shards the module itself or a module around it."""
    return "_is_fsdp_managed_module" in vars(module)


def fsdp_states(modules: Sequence[Any]) -> list[Any]:
    """States of FSDP2's modules, each once: several modules may share one."""
    return list(dict.fromkeys(module._get_fsdp_state() for module in modules))


def fsdp_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        # torch 2.11 has one or none
        groups = [group for group in (state._fsdp_param_group,) if group is not None]
    return list(groups)


def _fsdp_params(states: Sequence[Any]) -> list[Any]:
    return [each for state in states for group in fsdp_groups(state) for each in group.fsdp_params]


def fsdp_parameters(states: Sequence[Any]) -> list[tuple[Tensor, Tensor | None]]:
    """Shard and whole of each parameter; the whole is None until it was gathered for the first time."""
    return [(each.sharded_param, getattr(each, "_unsharded_param", None)) for each in _fsdp_params(states)]


def fsdp_wholes(states: Sequence[Any]) -> dict[int, Tensor]:
    """Whole of each parameter that was gathered, by the ids of what the module may have in its place.

    That is the shard, or the larger one that `reshard_after_forward=8` leaves after a forward.
    """
    return {
        id(shard): each._unsharded_param
        for each in _fsdp_params(states)
        if hasattr(each, "_unsharded_param")
        for shard in (each.sharded_param, getattr(each, "_sharded_post_forward_param", None))
    }


def settle_fsdp_roots(states: Sequence[Any]) -> None:
    """Have FSDP2 settle now what it would in the first forward: the root, which is not sharded after its forward."""
    for state in states:
        state._lazy_init()


@contextmanager
def restoring_fsdp_records(states: Sequence[Any]) -> Iterator[None]:
    """Restore FSDP2's records: the module that runs as the root, the callback queued for its backward, and the order
    of forwards, by which each rank gathers in advance for a backward.
    """
    settle_fsdp_roots(states)
    contexts = list(dict.fromkeys(state._state_ctx for state in states))
    before = [(each.iter_forward_root, each.post_backward_final_callback_queued) for each in contexts]
    orders = [group._post_forward_indices for state in states for group in fsdp_groups(state)]
    orders += [state._comm_ctx.post_forward_order for state in states]
    kept = [(order, [*order]) for order in orders]
    try:
        yield
    finally:
        for each, (root, queued) in zip(contexts, before, strict=True):
            each.iter_forward_root, each.post_backward_final_callback_queued = root, queued
        for order, entries in kept:
            order[:] = entries


def reduce_at_end_of_backward(states: Sequence[Any]) -> None:
    """Have FSDP2 reduce the gradients of these states when the running backward ends."""
    for state in states:
        state._register_root_post_backward_final_callback()


def finish_fsdp_backward(states: Sequence[Any]) -> None:
    """Shard every group again and make it ready for the next forward, as FSDP2 does after a backward."""
    for state in states:
        idle = type(state._training_state).IDLE
        for group in fsdp_groups(state):
            if group._training_state != idle:
                group.post_backward()
                group._training_state = idle
        state._training_state = idle
