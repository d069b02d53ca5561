"""Towers in shards: of every parameter, its gradient and its optimizer's state each rank keeps a part (FSDP2).

Beside `ranks.py`, for recipes with `train.parallel = "shard"`. torch's `fully_shard` gathers a layer's parameters where
it runs and scatters the mean of their gradients; `encode` knows that. What is here is the rest of a run: which layers
are gathered at once, the scale and bias that every rank keeps, checkpoints and final weights that are whole again.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from contrastile import comm
from contrastile._check import wrong
from contrastile._types import Gradient
from contrastile.models.base import repeated
from contrastile.train.state import Parts, Stateful

if TYPE_CHECKING:
    from contrastile.train.job import Job

# the parts of a run's state that have tensors in shards
DIVIDED = ("model", "optimizer", "average")


class FoundByAllError(FloatingPointError):
    """What all ranks find in the same step: none is lost."""


@contextmanager
def in_shards(job: Job[Any], rank: int) -> Iterator[None]:
    """The job's model is in shards over all ranks; afterwards the first rank has it whole again.

    Where a rank is lost, so is its part: the model then stays as it is, and a checkpoint is what is left.
    """
    model = job.run.model
    # what torch has sharded it does not put together again
    whole = _on_the_host(model) if rank == 0 else None
    shard(model, job.run.device)
    try:
        with comm.naming_the_lost("exchange of shards", None):
            yield
    except FoundByAllError:
        _put_together(job, whole)
        raise
    _put_together(job, whole)


def _on_the_host(model: nn.Module) -> nn.Module:
    """A copy with its parameters in host memory."""
    return deepcopy(model, {id(p): nn.Parameter(p.detach().cpu().clone(), p.requires_grad) for p in model.parameters()})


def _put_together(job: Job[Any], whole: nn.Module | None) -> None:
    state = gathered(job.run.model.state_dict(), keep=whole is not None)
    if whole is not None:
        whole.load_state_dict(state)
        job.take(whole.to(job.run.device))


def shard(model: nn.Module, device: torch.device) -> None:
    """Give each rank its part of the towers' parameters; a scale and a bias stay whole: all ranks change them alike.

    A tower's layers are gathered one after the other, and what is left of it together. Calls of the model's `encode_`
    methods gather by themselves.

    Raises ValueError for towers that share parameters.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    from torch.distributed.tensor import Replicate, distribute_tensor

    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    towers = _towers(model)
    if any(count > 1 for count in Counter(id(p) for tower in towers for p in tower.parameters()).values()):
        remedy = 'Set train.parallel = "replicate".'
        raise wrong("train.parallel", 'be "replicate" for towers that share weights', '"shard"', remedy)
    for tower in towers:
        for layer in layers(tower):
            fully_shard(layer, mesh=mesh)
        fully_shard(tower, mesh=mesh)
    numbers = dict(model.named_parameters(recurse=False))
    fully_shard(model, mesh=mesh, ignored_params=set(numbers.values()))
    for name, number in numbers.items():
        # every optimizer wants tensors of one kind
        everywhere = distribute_tensor(number.detach(), mesh, [Replicate()], src_data_rank=None)
        setattr(model, name, nn.Parameter(everywhere, number.requires_grad))
    for name in dir(model):
        if name.startswith("encode_"):
            register_fsdp_forward_method(model, name)


def _towers(model: nn.Module) -> list[nn.Module]:
    """Of a table of towers those in it."""
    children = list(model.children())
    return [tower for one in children for tower in (one.values() if isinstance(one, nn.ModuleDict) else [one])]


def layers(tower: nn.Module) -> list[nn.Module]:
    """The parts of a tower that are gathered one at a time: its layers that are made of others, several of one kind.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> [len(layers(nn.Sequential(*parts))) for parts in ([block(), block(), nn.ReLU()], [nn.Linear(4, 4)] * 2)]
    [2, 0]
    """
    # the same weights in two places are gathered with what holds both
    uses = Counter(id(p) for _, p in tower.named_parameters(remove_duplicate=False))
    own = [part for part in repeated(tower) if all(uses[id(p)] == 1 for p in part.parameters())]
    # torch wants what is inside before what is around it
    return [part for part in dict.fromkeys(reversed(own)) if next(part.parameters(), None) is not None]


def is_sharded(model: Any) -> bool:
    """Whether `shard` was here."""
    return isinstance(model, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))


def mine(x: Tensor) -> Tensor:
    """What this rank has of a tensor that may be in shards; no other rank is asked."""
    return x.to_local() if hasattr(x, "to_local") else x


def whole(x: Tensor) -> Tensor:
    """The tensor that may be in shards, whole; all ranks ask at once."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def like(x: Tensor, own: Any) -> Tensor:
    """This rank's shard of `x`, which it has whole, where `own` is in shards; no other rank is asked."""
    if not hasattr(own, "device_mesh"):
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


@torch.no_grad()
def settle_gradients(model: nn.Module, how: Gradient) -> None:
    """After the last backward: shards have their mean over ranks already, which becomes the sum where that is meant.

    A scale's and a bias's gradient the loss has divided as `how` says; here it is added up.
    """
    parameters: Any = model.parameters()
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        divided = any(placement.is_shard() for placement in parameter.placements)
        if divided and how == "sum":
            gradient.mul_(gradient.device_mesh.size())
        elif not divided:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def gathered(state: Any, *, keep: bool) -> Any:
    """`state` with every tensor in shards whole, in host memory; all ranks take part, and those that `keep` have it."""
    if isinstance(state, Tensor):
        found = whole(state)
        return found.cpu() if keep else None
    if isinstance(state, Mapping):
        return {name: gathered(inner, keep=keep) for name, inner in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(gathered(inner, keep=keep) for inner in state)
    return state


def taken(parts: Parts, *, keep: bool) -> Parts:
    """The parts as a checkpoint has them, whole; all ranks take part, and those that `keep` have them."""
    found = {name: Taken(gathered(parts[name].state_dict(), keep=keep)) for name in DIVIDED}
    return {**parts, **found}


def dealt(parts: Parts) -> Parts:
    """The parts, to be restored from a checkpoint: each rank reads it and takes its own, and asks nobody."""
    return {**parts, **{name: Dealt(parts[name]) for name in DIVIDED}}


@dataclass(frozen=True)
class Taken:
    """A part of a run as it was."""

    state: Any

    def state_dict(self) -> Any:
        """What was gathered."""
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        """It is a copy; the part itself is restored."""
        raise NotImplementedError


@dataclass(frozen=True)
class Dealt:
    """A part that is in shards, and becomes what a checkpoint has whole."""

    part: Stateful

    def state_dict(self) -> Any:
        """In shards, as it is."""
        return self.part.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Each tensor becomes a shard where the part's own is one."""
        own = _of_parameters(self.part, state_dict) if isinstance(self.part, Optimizer) else self.state_dict()
        self.part.load_state_dict(_alike(state_dict, own))


def _of_parameters(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """In the place of every tensor of its state that lies as a parameter does, that one; a new optimizer has no state.

    Others every rank has whole: how many steps it has made, means of a matrix.
    """
    if members := getattr(optimizer, "members", None):
        return {name: _of_parameters(member, state_dict[name]) for name, member in members.items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        place: {
            name: parameters[place] if name != "step" and value.shape == parameters[place].shape else None
            for name, value in own.items()
        }
        for place, own in state_dict["state"].items()
    }
    return {"state": state}


def _alike(whole: Any, own: Any) -> Any:
    """`whole` with this rank's shards of those tensors that are in shards in `own`."""
    if isinstance(own, Tensor):
        return like(whole, own)
    if isinstance(own, Mapping):
        return {name: _alike(inner, own.get(name)) for name, inner in whole.items()}
    return whole
