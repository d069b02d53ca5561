"""Sharded training (FSDP2): each rank holds a part of every parameter, of its gradient and of its optimizer state.

For recipes with `train.parallel = "shard"`. Checkpoints hold full tensors, which any number of ranks can resume.
`torch.distributed.checkpoint` is not used, because its metadata are a pickle.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from contrastile._errors import invalid
from contrastile._torch import pytree
from contrastile._types import Gradient
from contrastile.distributed import collectives
from contrastile.gradcache.ddp_fsdp import Sharding
from contrastile.models.base import repeated_modules, towers_of
from contrastile.train.checkpoints import Stateful

# bytes of weights up to which a step gathers each of them once, and keeps it; sums of gradients take as many anyway
GATHERED_ONCE = 2 * 2**30
# the parts of a run's state that have sharded tensors
SHARDED_PARTS = ("model", "optimizer", "average")


class AllRanksError(FloatingPointError):
    """An error that every rank raises in the same step, so that none is lost."""


@contextmanager
def sharded_model(task: Any, rank: int) -> Iterator[None]:
    """Shard the model of a task over all ranks; afterwards give the first rank's task a whole one.

    A lost rank takes its shards with it: the model then stays sharded, and the run resumes from a checkpoint.
    """
    model, device = task.run.model, task.run.device
    # fully_shard cannot be undone, so the first rank fills a copy in host memory
    copy = None
    if rank == 0:
        on_host = {id(p): nn.Parameter(p.detach().cpu().clone(), p.requires_grad) for p in model.parameters()}
        copy = deepcopy(model, on_host)

    def unshard() -> None:
        with collectives.reporting_lost_ranks("exchange of shards", None):
            state = gathered(model.state_dict(), keep=copy is not None)
        if copy is not None:
            copy.load_state_dict(state)
            task.set_model(copy.to(device))

    shard(model, device)
    try:
        with collectives.reporting_lost_ranks("exchange of shards", None):
            yield
    except AllRanksError:
        unshard()
        raise
    unshard()


def shard(model: nn.Module, device: torch.device) -> None:
    """Shard the towers' parameters; scale and bias stay whole, because all ranks change them alike.

    A tower's layers are gathered one at a time, its other parameters together; see `gathered_once`. Calls of the
    model's `encode_` methods gather. Raises ValueError for towers that share parameters.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    from torch.distributed.tensor import Replicate, distribute_tensor

    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    towers = towers_of(model)
    if any(count > 1 for count in Counter(id(p) for tower in towers for p in tower.parameters()).values()):
        remedy = 'Set train.parallel = "replicate".'
        raise invalid("train.parallel", 'be "replicate" for towers that share weights', '"shard"', remedy)
    for tower in towers:
        for layer in layers(tower):
            fully_shard(layer, mesh=mesh)
        fully_shard(tower, mesh=mesh)
    scalars = dict(model.named_parameters(recurse=False))
    fully_shard(model, mesh=mesh, ignored_params=set(scalars.values()))
    for name, scalar in scalars.items():
        # an optimizer's foreach kernels refuse a mix of DTensors and plain tensors
        replicated = distribute_tensor(scalar.detach(), mesh, [Replicate()], src_data_rank=None)
        setattr(model, name, nn.Parameter(replicated, scalar.requires_grad))
    for name in dir(model):
        if name.startswith("encode_"):
            register_fsdp_forward_method(model, name)


@contextmanager
def gathered_once(model: Any) -> Iterator[None]:
    """Gather the weights of a sharded model once a step, if they are few, instead of for each sub-batch and pass.

    No weight stays gathered afterwards: it would keep its values when its shards change.
    """
    few = is_sharded(model) and sum(p.nbytes for p in model.parameters()) <= GATHERED_ONCE
    if few:
        model.set_reshard_after_forward(False)
    try:
        yield
    finally:
        if few:
            model.set_reshard_after_forward(True)
            for module in filter(is_sharded, model.modules()):
                module.reshard()


def attempt(model: nn.Module) -> AbstractContextManager[None]:
    """Release gathered weights if a forward within fails: they would keep their values when their shards change."""
    return Sharding([module for module in model.modules() if is_sharded(module)]).attempt()


def layers(tower: nn.Module) -> list[nn.Module]:
    """The modules of a tower that are gathered one at a time: composite modules that the tower repeats.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> [len(layers(nn.Sequential(*parts))) for parts in ([block(), block(), nn.ReLU()], [nn.Linear(4, 4)] * 2)]
    [2, 0]
    """
    # a weight that two modules share is gathered with the module that contains both
    uses = Counter(id(p) for _, p in tower.named_parameters(remove_duplicate=False))
    unshared = [module for module in repeated_modules(tower) if all(uses[id(p)] == 1 for p in module.parameters())]
    # fully_shard requires inner modules before outer ones
    return [module for module in dict.fromkeys(reversed(unshared)) if next(module.parameters(), None) is not None]


def is_sharded(model: Any) -> bool:
    """True after `shard`."""
    return isinstance(model, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))


def local(x: Tensor) -> Tensor:
    """This rank's part of a tensor, sharded or not; no collective."""
    return x.to_local() if hasattr(x, "to_local") else x


def full(x: Tensor) -> Tensor:
    """The whole of a tensor, sharded or not; collective."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def shard_like(x: Tensor, example: Any) -> Tensor:
    """This rank's shard of a whole tensor `x` where `example` is sharded, otherwise `x`; no collective."""
    if not hasattr(example, "device_mesh"):
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x.to(example.device), example.device_mesh, example.placements, src_data_rank=None)


@torch.no_grad()
def settle_gradients(model: nn.Module, how: Gradient) -> None:
    """Finish the reduction after the last backward, as the loss's `gradient` option says.

    Sharded gradients are means over ranks already; "sum" multiplies them by the number of ranks. The gradients of scale
    and bias, which the loss has divided according to `how`, are summed.
    """
    parameters: Any = [parameter for parameter in model.parameters() if parameter.grad is not None]
    for parameter in parameters:
        if not any(placement.is_shard() for placement in parameter.placements):
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        elif how == "sum":
            parameter.grad.mul_(parameter.grad.device_mesh.size())


def gathered(state: Any, *, keep: bool) -> Any:
    """`state` with whole tensors in host memory on ranks that `keep` them, None on the others; collective."""

    def whole(x: Tensor) -> Tensor | None:
        tensor = full(x)
        return tensor.cpu() if keep else None

    return pytree.tree_map_only(Tensor, whole, state)


class ShardedPart:
    """A sharded part of a run as checkpoints see it: its state dict has whole tensors."""

    def __init__(self, part: Stateful) -> None:
        self._part = part

    def state_dict(self) -> Any:
        """The whole state on the first rank; collective."""
        return gathered(self._part.state_dict(), keep=dist.get_rank() == 0)

    def load_state_dict(self, state_dict: Any) -> None:
        """Take this rank's shards of the whole tensors of a checkpoint, which every rank reads; no collective."""
        part = self._part
        examples = _parameters_of(part, state_dict) if isinstance(part, Optimizer) else part.state_dict()
        part.load_state_dict(_shards(state_dict, examples))


def _parameters_of(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state with each sharded tensor replaced by a parameter sharded like it: a new optimizer has no state yet.

    All other values, such as step counts and means of a matrix, are whole on every rank.
    """
    if members := getattr(optimizer, "members", None):
        return {name: _parameters_of(member, state_dict[name]) for name, member in members.items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def example(index: int, name: str, value: Any) -> Any:
        return parameters[index] if name != "step" and value.shape == parameters[index].shape else None

    states = state_dict["state"].items()
    return {"state": {index: {name: example(index, name, x) for name, x in values.items()} for index, values in states}}


def _shards(state: Any, examples: Any) -> Any:
    """`state` with this rank's shards of the tensors that are sharded in `examples`."""
    if isinstance(examples, Tensor):
        return shard_like(state, examples)
    if isinstance(examples, Mapping):
        return {name: _shards(inner, examples.get(name)) for name, inner in state.items()}
    return state
