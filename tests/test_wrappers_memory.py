"""A rank that runs out of memory under DistributedDataParallel and FSDP2: all ranks agree, and none waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradient_table import D_IN
from problems import distance
from ranks import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from contrastile import ClipLoss, encode
from contrastile.gradcache import auto, forward, memory

ROWS, PLENTY = 12, 100


class _Overflow(torch.autograd.Function):
    """An operation that runs out of memory in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no room")


class Limited(nn.Module):
    """A tower with room for some rows, which fails after its first block, or in that block's backward."""

    def __init__(self, room: int, where: str, seed: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Linear(D_IN, D_IN) for _ in range(3)).double()
        self.room, self.where = room, where
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        x = self.blocks[0](x).tanh()
        if len(x) > self.room:
            if self.where == "forward":
                raise torch.OutOfMemoryError("no room")
            x = _Overflow.apply(x) if torch.is_grad_enabled() else x
        return self.blocks[2](self.blocks[1](x).tanh())


class Both(nn.Module):
    """Two towers whose inputs look alike, as two methods of one module."""

    def __init__(self, rooms: tuple[int, int], where: str) -> None:
        super().__init__()
        self.image, self.text = (Limited(room, where, seed) for seed, room in enumerate(rooms))
        self.logit_scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def encode_image(self, x: Tensor) -> Tensor:
        return self.image(x)

    def encode_text(self, y: Tensor) -> Tensor:
        return self.text(y)


@contextmanager
def _trying() -> Iterator[None]:
    """Try sizes, as on a GPU."""
    tries, auto.tries = auto.tries, lambda _: True
    try:
        yield
    finally:
        auto.tries = tries


def _mine(rank: int, seed: int = 1) -> Tensor:
    whole = torch.randn(3, ROWS, D_IN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return whole[rank]


def _sharded(tower: Any, group: Any) -> Any:
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in tower.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(tower, mesh=mesh)


def _wrapped(how: str, tower: Limited, group: Any) -> Any:
    return _sharded(tower, group) if how == "FSDP2" else DistributedDataParallel(tower, process_group=group)


def _combined(model: nn.Module, group: Any) -> dict[str, Tensor]:
    """The mean of all ranks' gradients, of a model that is not wrapped."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for gradient in found.values():
        dist.all_reduce(gradient, group=group)
        gradient /= dist.get_world_size(group)
    return found


def _compare(model: nn.Module, truth: dict[str, Tensor]) -> None:
    parameters = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    assert truth.keys() <= parameters.keys()
    for name, gradient in truth.items():
        found: Any = parameters[name].grad
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        assert distance(found, gradient) <= 1e-12, name


def _one_runs_out_of_memory(rank: int, group: Any, how: str, where: str) -> None:
    """All ranks take the size that fits on the one with the least room."""
    tower, plain = Limited(3 if rank == 1 else PLENTY, where), Limited(PLENTY, where)
    plain(_mine(rank)).square().sum().backward()
    truth, wrapped = _combined(plain, group), _wrapped(how, tower, group)
    with _trying():
        for _ in range(2):
            tower.zero_grad()
            tower.sizes.clear()
            encode(wrapped, _mine(rank), sub_batch="auto").square().sum().backward()
            _compare(wrapped, truth)
            # 12, 6, 3 on the way back; forward the first look at 8, and 4, had to end at 2
            last = [2] * 12 if where == "forward" else [3] * 8
            assert tower.sizes[-len(last) :] == last
    # in the last step nobody looked again
    assert tower.sizes == last


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("how", ["DistributedDataParallel", "FSDP2"])
def test_all_ranks_take_the_size_of_the_smallest(pool: Pool, how: str, where: str) -> None:
    pool.check(_one_runs_out_of_memory, 3, how, where)


def _each_tower_has_its_size(rank: int, group: Any, where: str, retain: Any) -> None:
    """Rank 1 has little room for pictures, rank 0 less for texts; the text's trials meet the pictures' graphs."""
    plain = Both((PLENTY, PLENTY), where)
    model = Both((3 if rank == 1 else PLENTY, 1 if rank == 0 else PLENTY), where)
    x, y, loss = _mine(rank), _mine(rank, seed=2), ClipLoss(group=group)
    loss(*(torch.nn.functional.normalize(z) for z in (plain.image(x), plain.text(y))), plain.logit_scale).backward()
    truth = _combined(plain, group)
    for tower in (model.image, model.text):
        _sharded(tower, group)
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    with _trying():
        # first without a graph, where more may fit, and trials leave other traces
        with torch.no_grad():
            encode((model, "encode_image"), x, sub_batch="auto")
        for _ in range(2):
            model.zero_grad()
            model.image.sizes.clear()
            model.text.sizes.clear()
            image = encode((model, "encode_image"), x, sub_batch="auto", retain=retain)
            text = encode((model, "encode_text"), y, sub_batch="auto", retain=retain)
            features = (torch.nn.functional.normalize(z) for z in (image, text))
            loss(*features, model.logit_scale).backward()
            _compare(model, truth)
    assert set(model.image.sizes) == {2 if where == "forward" else 3}
    assert set(model.text.sizes) == {1}


@pytest.mark.parametrize(("where", "retain"), [("forward", 0), ("backward", 0), ("backward", 2), ("forward", "auto")])
def test_each_method_of_a_module_has_its_own_size(pool: Pool, where: str, retain: Any) -> None:
    pool.check(_each_tower_has_its_size, 2, where, retain)


def _no_room_at_all(rank: int, group: Any, how: str, where: str) -> str:
    tower = Limited(0 if rank == 1 else PLENTY, where)
    wrapped = _wrapped(how, tower, group)
    with _trying(), pytest.raises(torch.OutOfMemoryError) as raised:
        encode(wrapped, _mine(rank), sub_batch="auto")
    return str(raised.value)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("how", ["DistributedDataParallel", "FSDP2"])
def test_a_rank_without_room_for_one_example_is_an_error_on_all(pool: Pool, how: str, where: str) -> None:
    theirs = "encode: another rank has no room for a single example"
    assert pool.run(_no_room_at_all, 3, how, where) == [theirs, "no room", theirs]


def _weights_are_no_part_of_a_graph(rank: int, group: Any, frozen: bool) -> None:
    """Allow memory for three graphs without their gathered weights, and for none with them."""
    width = 64
    torch.manual_seed(3)
    tower = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(4)]).double()
    tower[2].requires_grad_(not frozen)
    runs: list[int] = []
    tower[0].register_forward_hook(lambda *_: runs.append(1))
    for layer in tower:
        fully_shard(layer, mesh=DeviceMesh.from_group(group, "cpu"))
    fully_shard(tower, mesh=DeviceMesh.from_group(group, "cpu"))
    # of two rows, each layer's inputs
    each = 4 * 2 * width * 8
    kept, later = memory.spare_bytes, forward.later_bytes
    memory.spare_bytes, forward.later_bytes = lambda _: 5 * each, lambda *_: 0
    try:
        encode(tower, torch.randn(8, width, dtype=torch.float64), sub_batch=2, retain="auto").sum().backward()
    finally:
        memory.spare_bytes, forward.later_bytes = kept, later
    # one more shows whether what is trained is used
    assert len(runs) == 4 + frozen


@pytest.mark.parametrize("frozen", [False, True])
def test_gathered_weights_do_not_count_as_graph(pool: Pool, frozen: bool) -> None:
    pool.check(_weights_are_no_part_of_a_graph, 2, frozen)
