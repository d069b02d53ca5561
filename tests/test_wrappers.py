"""encode under DistributedDataParallel and FSDP2: true gradients, one reduction, no bypass of the wrapper."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gradient_table import D_IN, SHARES, D, Pair, batch, loss_of, shard, wrap
from problems import distance
from ranks import Pool
from refusals import refusal, unlike
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint_sequential

from contrastile import _torch, encode
from contrastile.distributed import collectives, consistency
from contrastile.gradcache.ddp_fsdp import Sharding
from contrastile.train.sharded import full, local, shard_like

STEPS = 3


def _truth(model: Pair, micro_batches: int = 1) -> dict[str, Tensor]:
    for micro_batch in range(micro_batches):
        x, y, labels = batch(1, micro_batch)
        loss_of("ClipLoss", model(x, y), labels, exchange="single").backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _found(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _compare(found: dict[str, Tensor], truth: dict[str, Tensor], allowed: float = 1e-12) -> None:
    """This rank's parts of sharded gradients; a collective for each would be most of a test."""
    for name, gradient in truth.items():
        difference = local(found[name]) - local(shard_like(gradient, found[name]))
        assert difference.norm() <= allowed * gradient.norm(), name
    for name in found.keys() - truth.keys():
        assert not local(found[name]).any(), name


def _mine(rank: int, group: Any, micro_batch: int = 0) -> tuple[Tensor, ...]:
    W = dist.get_world_size(group)
    return tuple(whole.split(SHARES[W])[rank] for whole in batch(W, micro_batch))


def _both(wrapped: Any, x: Tensor, y: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    image = encode((wrapped, "encode_image"), x, sub_batch=2, **how)
    return image, encode((wrapped, "encode_text"), y, sub_batch=3, **how)


def _text_first(wrapped: Any, model: Pair, x: Tensor, y: Tensor) -> Any:
    text = encode((wrapped, "encode_text"), y, sub_batch=2, retain=2)
    return encode((wrapped, "encode_image"), x, sub_batch=2, retain=1), text, *model.numbers()


# the ways in which users call encode; each returns what the loss takes
WAYS: dict[str, Callable[[Any, Pair, Tensor, Tensor], Any]] = {
    "in the forward": lambda wrapped, model, x, y: wrapped(x, y),
    "by the method's name": lambda wrapped, model, x, y: (*_both(wrapped, x, y), *model.numbers()),
    "text first, some kept": _text_first,
    "by a function of the module": lambda wrapped, model, x, y: (
        *encode((wrapped, lambda inner, x, y: inner(x, y)[:2]), (x, y), sub_batch=2),
        *model.numbers(),
    ),
}


# without the module's own call, so that its numbers are not reached
DDP_WAYS = WAYS | {
    "by a function of its methods": lambda wrapped, model, x, y: (
        *encode((wrapped, lambda inner, x, y: (inner.encode_image(x), inner.encode_text(y))), (x, y), sub_batch=2),
        *model.numbers(),
    ),
}


def _wrapped_ddp(model: nn.Module, group: Any, **how: Any) -> tuple[DistributedDataParallel, list[int]]:
    """The wrapper, and the number of elements in each of its reductions."""
    wrapped = DistributedDataParallel(model, process_group=group, **how)
    reduced: list[int] = []

    # torch wants its own annotations here, or none
    def count(state, bucket):  # type: ignore[no-untyped-def]
        reduced.append(bucket.buffer().numel())
        return allreduce_hook(group, bucket)

    wrapped.register_comm_hook(None, count)
    return wrapped, reduced


def _ddp_steps(rank: int, group: Any, way: str, how: dict[str, Any]) -> None:
    model = Pair(shape=(), sub_batch=2 if way == "in the forward" else None)
    truth = _truth(Pair(shape=()))
    wrapped, reduced = _wrapped_ddp(model, group, bucket_cap_mb=0.0002, **how)
    x, y, labels = _mine(rank, group)
    for step in range(STEPS):
        wrapped.zero_grad()
        reduced.clear()
        loss_of("ClipLoss", DDP_WAYS[way](wrapped, model, x, y), labels, group=group).backward()
        _compare(_found(model), truth)
        # each parameter once; DDP begins with one bucket for all of them
        assert sum(reduced) == sum(p.numel() for p in model.parameters())
        assert step < STEPS - 1 or len(reduced) > 1


# every way as DDP is by default; other settings where the module's numbers are reached inside of encode, and outside
@pytest.mark.parametrize(
    ("way", "how"),
    [
        *((way, {}) for way in DDP_WAYS),
        *(
            (way, {name: True})
            for name in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
            for way in ("in the forward", "text first, some kept")
        ),
    ],
    ids=str,
)
def test_ddp_reduces_each_gradient_once(pool: Pool, way: str, how: dict[str, Any]) -> None:
    pool.check(_ddp_steps, 3, way, how)


def _compiled_steps(rank: int, group: Any, kind: str) -> None:
    # torch's own words, on tensors that are no leaves
    warnings.filterwarnings("ignore", message="The .grad attribute", category=UserWarning)
    torch._dynamo.reset()
    model, truth, graphs = Pair(depth=2), _truth(Pair(depth=2)), list[Any]()

    def look(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    for tower in (model.image, model.text):
        # layers, in place, before the wrapper
        for layer in tower.blocks:
            layer.compile(backend=look, dynamic=False)
    names = list(model.state_dict())
    wrapped = wrap(kind, model, group)
    x, y, labels = _mine(rank, group)
    for _ in range(2):
        wrapped.zero_grad()
        loss_of("ClipLoss", WAYS["by the method's name"](wrapped, model, x, y), labels, group=group).backward()
        _compare(_found(model), truth)
    assert graphs
    assert list(model.state_dict()) == names
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_compiled_layers_have_the_gradients_of_one_process(pool: Pool, kind: str) -> None:
    pool.check(_compiled_steps, 2, kind)


class Shifted(nn.Linear):
    """A tower with a buffer, such as a table of positions."""

    def __init__(self) -> None:
        super().__init__(D_IN, D, dtype=torch.float64)
        self.register_buffer("shift", torch.ones(D, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.shift


def _buffers(rank: int, group: Any) -> None:
    torch.manual_seed(0)
    tower, x = Shifted(), torch.randn(4, D_IN, dtype=torch.float64)
    wrapped = DistributedDataParallel(tower, process_group=group)
    for step in range(2):
        # the first rank's is everybody's, before each forward
        tower.shift.fill_(step + 2 if rank == 0 else 100)
        encoded = [encode(encoder, x, sub_batch=3) for encoder in (wrapped, (wrapped, lambda inner, x: inner(x)))]
        assert tower.shift.tolist() == [step + 2] * D
        for features in encoded:
            wrapped.zero_grad()
            features.sum().backward()
            assert distance(tower.weight.grad, (x.sum(0) * (step + 2)).expand(D, D_IN)) <= 1e-15


def test_ddp_broadcasts_buffers_to_all_ranks(pool: Pool) -> None:
    pool.check(_buffers, 2)


def _each_tower(rank: int, group: Any) -> None:
    model, reference = Pair(shape=()), Pair(shape=())
    x, y, labels = batch(1, 0)
    loss_of("ClipLoss", (reference.image(x), reference.text(y), 4.5, None), labels, exchange="single").backward()
    image, image_reduced = _wrapped_ddp(model.image, group)
    text, text_reduced = _wrapped_ddp(model.text, group)
    x, y, labels = _mine(rank, group)
    features = encode(image, x, sub_batch=2), encode(partial(text), (y,), sub_batch=2, retain=1)
    loss_of("ClipLoss", (*features, 4.5, None), labels, group=group).backward()
    assert image_reduced == text_reduced == [sum(p.numel() for p in model.text.parameters())]
    _compare(_found(model), _found(reference))


def test_each_tower_may_have_its_own_wrapper(pool: Pool) -> None:
    pool.check(_each_tower, 3)


def _order(rank: int, group: Any, apart: bool) -> list[str]:
    """The replays of both towers and DDP's reductions, in the order of a backward."""
    model, seen = Pair(shape=()), []

    # torch wants its own annotations here, or none
    def note(state, bucket):  # type: ignore[no-untyped-def]
        seen.append("reduced")
        return allreduce_hook(group, bucket)

    # act 1 has no graph, and the last to be encoded is the first to be replayed
    for name in ("image", "text"):
        tower = getattr(model, name)
        tower.register_forward_hook(lambda *_, name=name: seen.append(name) if torch.is_grad_enabled() else None)
    if apart:
        wrapped = [DistributedDataParallel(tower, process_group=group) for tower in (model.image, model.text)]
        encoders: list[Any] = list(wrapped)
    else:
        wrapped = [DistributedDataParallel(model, process_group=group)]
        encoders = [(wrapped[0], "encode_image"), (wrapped[0], "encode_text")]
    for wrapper in wrapped:
        wrapper.register_comm_hook(None, note)
    x, y, labels = _mine(rank, group)
    features = [encode(encoder, rows, sub_batch=2) for encoder, rows in zip(encoders, (x, y), strict=True)]
    numbers = (4.5, None) if apart else model.numbers()
    loss_of("ClipLoss", (*features, *numbers), labels, group=group).backward()
    return [what for at, what in enumerate(seen) if at == 0 or what != seen[at - 1]]


def test_ddp_reduces_a_tower_after_its_last_replay(pool: Pool) -> None:
    assert pool.run(_order, 2, False) == [["text", "image", "reduced"]] * 2
    assert pool.run(_order, 2, True) == [["text", "reduced", "image", "reduced"]] * 2


def _shared_tower(rank: int, group: Any, kind: str, plain: str) -> None:
    model, reference = Pair(depth=2).image, Pair(depth=2).image
    x, y, labels = batch(1, 0)
    loss_of("ClipLoss", (reference(x), reference(y), 4.5, None), labels, exchange="single").backward()
    with _scatters() as scattered:
        wrapped, reduced = _wrapped_ddp(model, group) if kind == "DDP" else (_shard_blocks(model, group), scattered)
        x, y, labels = _mine(rank, group)
        for _ in range(2):
            wrapped.zero_grad()
            reduced.clear()
            image = wrapped(x) if plain == "before" else encode(wrapped, x, sub_batch=2)
            text = wrapped(y) if plain == "after" else encode(wrapped, y, sub_batch=3)
            loss_of("ClipLoss", (image, text, 4.5, None), labels, group=group).backward()
            _compare(_found(model), _found(reference))
            # FSDP2 itself scatters after a plain call
            assert len(reduced) == (1 if kind == "DDP" else 3) or (kind == "FSDP2" and plain != "nowhere")


@pytest.mark.parametrize("plain", ["nowhere", "before", "after"])
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_one_tower_for_both_sides_is_reduced_once(pool: Pool, kind: str, plain: str) -> None:
    pool.check(_shared_tower, 3, kind, plain)


def _accumulate(rank: int, group: Any, kind: str, way: str) -> None:
    """Two micro-batches with a loss scaled by a GradScaler; only the second is reduced."""
    model = Pair(sub_batch=2 if way == "in the forward" else None)
    truth = _truth(Pair(), 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with _scatters() as scattered:
        wrapped, reduced = _wrapped_ddp(model, group) if kind == "DDP" else (shard(model, group), scattered)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for micro_batch in range(2):
            x, y, labels = _mine(rank, group, micro_batch)
            if kind == "FSDP2":
                wrapped.set_requires_gradient_sync(micro_batch == 1)
                wrapped.set_is_last_backward(micro_batch == 1)
            elif micro_batch == 0:
                with wrapped.no_sync():
                    out = WAYS[way](wrapped, model, x, y)
            if kind == "FSDP2" or micro_batch == 1:
                out = WAYS[way](wrapped, model, x, y)
            scaler.scale(loss_of("ClipLoss", out, labels, group=group)).backward()
            assert len(reduced) == (0 if micro_batch == 0 else 1 if kind == "DDP" else 3)
        scaler.unscale_(optimizer)
        _compare(_found(model), truth)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_accumulation_reduces_with_the_last_micro_batch(pool: Pool, kind: str, way: str) -> None:
    pool.check(_accumulate, 3, kind, way)


def _partly_trained(rank: int, group: Any, kind: str, way: str, what: str, how: dict[str, Any]) -> None:
    def prepared() -> Pair:
        model = Pair(sub_batch=2 if way == "in the forward" else None)
        if what == "frozen tower":
            model.image.requires_grad_(False)
        if what == "frozen layer, unused one":
            model.text.blocks.requires_grad_(False)
            model.text.unused = nn.Linear(2, 2).double()
        return model

    reference, model = prepared(), prepared()
    reference.sub_batch = None
    truth = _truth(reference)
    wrapped = DistributedDataParallel(model, process_group=group, **how) if kind == "DDP" else shard(model, group)
    x, y, labels = _mine(rank, group)
    for _ in range(STEPS if kind == "DDP" else 2):
        wrapped.zero_grad()
        loss_of("ClipLoss", WAYS[way](wrapped, model, x, y), labels, group=group).backward()
        _compare(_found(model), truth)


@pytest.mark.parametrize("what", ["frozen tower", "frozen layer, unused one"])
@pytest.mark.parametrize(
    ("kind", "how", "way"),
    [
        *((kind, {}, way) for kind in ("DDP", "FSDP2") for way in WAYS),
        ("DDP", {"find_unused_parameters": True}, "in the forward"),
        ("DDP", {"find_unused_parameters": True}, "text first, some kept"),
        ("DDP", {"static_graph": True}, "in the forward"),
        ("DDP", {"static_graph": True}, "text first, some kept"),
    ],
    ids=str,
)
def test_frozen_and_unused_parameters_get_the_plain_gradients(
    pool: Pool, kind: str, how: dict[str, Any], way: str, what: str
) -> None:
    pool.check(_partly_trained, 2, kind, way, what, how)


@contextmanager
def _transfers(kind: str) -> Iterator[list[str]]:
    """Record each collective of FSDP2 of a kind, by the name of the first parameter in it."""
    transferred: list[str] = []
    plain = getattr(_fsdp_param_group, kind)

    def counted(parameters: list[Any], *rest: Any, **named: Any) -> Any:
        transferred.append(parameters[0]._param_fqn)
        return plain(parameters, *rest, **named)

    with patch.object(_fsdp_param_group, kind, counted):
        yield transferred


_scatters, _gathers = partial(_transfers, "foreach_reduce"), partial(_transfers, "foreach_all_gather")


def _shard_blocks(tower: Any, group: Any, **how: Any) -> Any:
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in tower.blocks:
        fully_shard(block, mesh=mesh, **how)
    return fully_shard(tower, mesh=mesh, **how)


def _scale_first(wrapped: Any, model: Pair, x: Tensor, y: Tensor) -> Any:
    numbers = model.numbers()
    return *_both(wrapped, x, y), *numbers


def _scale_by_method(wrapped: Any, model: Pair, x: Tensor, y: Tensor) -> Any:
    if "numbers" not in vars(model):
        register_fsdp_forward_method(model, "numbers")
    return *_both(wrapped, x, y), *model.numbers()


def _by_function(wrapped: Any, model: Pair, x: Tensor, y: Tensor) -> Any:
    for name in ("encode_image", "encode_text"):
        if name not in vars(model):
            register_fsdp_forward_method(model, name)
    return (
        encode(lambda z: model.encode_image(z), x, sub_batch=2),
        encode(model.encode_text, y, sub_batch=3),
        *model.numbers(),
    )


def _text_plain(wrapped: Any, model: Pair, x: Tensor, y: Tensor, first: bool) -> Any:
    """The same module run by encode and by itself, in one backward."""
    if "encode_text" not in vars(model):
        register_fsdp_forward_method(model, "encode_text")
    text = model.encode_text(y) if first else None
    image = encode((wrapped, "encode_image"), x, sub_batch=2)
    return image, model.encode_text(y) if text is None else text, *model.numbers()


def _checkpointed(wrapped: Any, model: Pair, x: Tensor, y: Tensor) -> Any:
    for tower in (model.image, model.text):
        # parameters inside are gathered again for recomputation
        tower.blocks.forward = lambda z, blocks=tower.blocks: checkpoint_sequential(blocks, 2, z, use_reentrant=False)
    return *_both(wrapped, x, y), *model.numbers()


SHARDED_WAYS = WAYS | {
    "activation checkpointing": _checkpointed,
    "text plain, before": partial(_text_plain, first=True),
    "text plain, after": partial(_text_plain, first=False),
    "scale first": _scale_first,
    "scale by method": _scale_by_method,
    "by a function": _by_function,
}


def _sharded_steps(rank: int, group: Any, way: str, how: str) -> None:
    model = Pair(depth=2, sub_batch=2 if way == "in the forward" else None)
    truth = _truth(Pair(depth=2))
    if how == "blocks":
        mesh = DeviceMesh.from_group(group, "cpu")
        _shard_blocks(model.image, group)
        _shard_blocks(model.text, group)
        fully_shard(model, mesh=mesh)
    elif how == "towers":
        shard(model, group, reshard_after_forward=True)
    else:
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    groups = {"blocks": 7, "towers": 3, "all at once": 1}[how]
    x, y, labels = _mine(rank, group)
    with _scatters() as scattered:
        for _ in range(2):
            model.zero_grad()
            scattered.clear()
            loss_of("ClipLoss", SHARDED_WAYS[way](model, model, x, y), labels, group=group).backward()
            _compare(_found(model), truth)
            assert len(set(scattered)) == len(scattered)
            # a scale that was taken while it was sharded is combined on its own
            assert groups - len(scattered) in ((0, 1) if way == "scale first" or how == "towers" else (0,))


# every way with the finest shards; coarser ones where they are gathered at another moment
@pytest.mark.parametrize(
    ("way", "how"),
    [
        *((way, "blocks") for way in SHARDED_WAYS),
        *((way, "towers") for way in ("in the forward", "scale first", "text plain, before", "text plain, after")),
        *((way, "all at once") for way in ("in the forward", "scale first")),
    ],
)
def test_fsdp2_scatters_each_group_once(pool: Pool, way: str, how: str) -> None:
    pool.check(_sharded_steps, 3, way, how)


def _staying(rank: int, group: Any, reshard: bool | int) -> None:
    model, truth = Pair(depth=2), _truth(Pair(depth=2))
    for tower in (model.image, model.text):
        _shard_blocks(tower, group, reshard_after_forward=reshard)
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    x, y, labels = _mine(rank, group)
    shards = [local(p).shape for p in model.parameters()]
    sharding = Sharding([module for module in model.modules() if isinstance(module, FSDPModule)])
    everything = sum(p.nbytes for p in model.parameters())
    with _gathers() as gathered:
        for step in range(3):
            model.zero_grad()
            gathered.clear()
            features = _both(model, x, y)
            # of uneven shards with a margin
            assert (sharding.whole_bytes() >= everything) == (reshard is False)
            loss_of("ClipLoss", (*features, *model.numbers()), labels, group=group).backward()
            _compare(_found(model), truth)
            # nothing is whole between two steps
            assert [local(p).shape for p in model.parameters()] == shards
            assert sharding.whole_bytes() == 0
            # wholes are made in the first step
            assert step == 0 or (max(Counter(gathered).values()) == 1) == (reshard is False)


# 2: among two ranks each, until the backward
@pytest.mark.parametrize(("W", "reshard"), [(3, False), (3, True), (4, 2)])
def test_fsdp2_gathers_once_a_step_where_it_does_not_reshard_after_the_forward(
    pool: Pool, W: int, reshard: bool | int
) -> None:
    pool.check(_staying, W, reshard)


def _gathers_in_steps(rank: int, group: Any, sizes: Any) -> list[list[str]]:
    """Gathers of two backwards, and of the second step's forward."""
    model = Pair(depth=2)
    for tower in (model.image, model.text):
        _shard_blocks(tower, group)
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    x, y, labels = _mine(rank, group)
    found = list[list[str]]()
    with _gathers() as gathered:
        for _ in range(2):
            image = encode((model, "encode_image"), x, sub_batch=sizes)
            text = encode((model, "encode_text"), y, sub_batch=sizes)
            loss = loss_of("ClipLoss", (image, text, *model.numbers()), labels, group=group)
            found.append([*gathered])
            gathered.clear()
            loss.backward()
            found.append([*gathered])
            gathered.clear()
    return found[1:]


def test_trials_of_sizes_leave_fsdp2_as_it_was(pool: Pool) -> None:
    # all of the batch fits; where only some ranks made a trial, other gathers would be a hang
    assert pool.run(_gathers_in_steps, 2, "auto") == pool.run(_gathers_in_steps, 2, 7)


class ByMethods(Pair):
    """A model whose forward calls its methods."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Any, ...]:
        return self.encode_image(x), self.encode_text(y), *self.numbers()


def _methods_then_forward(rank: int, group: Any, registered: bool) -> None:
    model, truth = shard(ByMethods(), group, reshard_after_forward=True), _truth(ByMethods())
    for name in ("encode_image", "encode_text") if registered else ():
        register_fsdp_forward_method(model, name)
    x, y, labels = _mine(rank, group)
    for forward in (False, True, False):
        model.zero_grad()
        out = encode(model, (x, y), sub_batch=2) if forward else (*_both(model, x, y), *model.numbers())
        loss_of("ClipLoss", out, labels, group=group).backward()
        _compare(_found(model), truth)


@pytest.mark.parametrize("registered", [False, True])
def test_methods_and_the_forward_that_calls_them_under_fsdp2(pool: Pool, registered: bool) -> None:
    pool.check(_methods_then_forward, 2, registered)


def _named_in_encode(rank: int, group: Any) -> None:
    plain, model = ByMethods(), shard(ByMethods(), group, reshard_after_forward=True)
    x, y, _ = _mine(rank, group)
    for feature in _both(model, x, y):
        feature.sum().backward()
    with torch.no_grad():
        # the scale is whole behind the methods
        assert torch.equal(model(x, y)[2], plain.numbers()[0])
        register_fsdp_forward_method(model, "encode_text")
        encode((model, "encode_text"), y, sub_batch=3)
        torch.testing.assert_close(model.encode_text(y), plain.encode_text(y))


def test_encode_leaves_the_methods_of_an_fsdp2_module_as_they_are(pool: Pool) -> None:
    pool.check(_named_in_encode, 2)


def _mixed(rank: int, group: Any) -> None:
    """bfloat16 parameters, float32 shards and reduction: sums of sub-batches are rounded once."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for cached in (False, True):
        model = shard(Pair().float(), group, mp_policy=policy)
        for micro_batch in range(2):
            model.set_requires_gradient_sync(micro_batch == 1)
            x, y, labels = _mine(rank, group, micro_batch)
            features = _both(model, x, y) if cached else model(x, y)[:2]
            loss_of("ClipLoss", (*features, 4.5, None), labels, group=group).backward()
        found.append({name: full(gradient) for name, gradient in _found(model).items()})
    for name, gradient in found[0].items():
        if name != "logit_scale":
            assert found[1][name].dtype == torch.float32
            assert distance(found[1][name], gradient) <= 2e-2, name


def test_fsdp2_in_mixed_precision_rounds_once(pool: Pool) -> None:
    pool.check(_mixed, 2)


def _hybrid(rank: int, group: Any) -> None:
    """Two replicas of two shards; the second replica runs more sub-batches than the first."""
    model = Pair(depth=2)
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicas", "shards"))
    for part in (model.image, model.text, model):
        fully_shard(part, mesh=mesh)
    x, y, labels = _mine(rank, group)
    gather, met = consistency._gather, set[Any]()
    consistency._gather = lambda own, group: met.add(group) or gather(own, group)
    try:
        with _scatters() as scattered:
            features = _both(model, x, y)
            loss_of("ClipLoss", (*features, *model.numbers()), labels).backward()
    finally:
        consistency._gather = gather
    _compare(_found(model), _truth(Pair(depth=2)))
    assert len(scattered) == 3
    # those of the axes would compare on the device
    assert met <= {None, dist.group.WORLD}


def test_hybrid_sharding_gives_the_plain_gradients(pool: Pool) -> None:
    pool.check(_hybrid, 4)


def _sentences(rank: int, group: Any) -> dict[str, str]:
    """The error of each use that would give a wrong gradient."""
    model, x = Pair(shape=()), torch.ones(4, D_IN, dtype=torch.float64)
    wrapped = DistributedDataParallel(model, process_group=group)
    holder = nn.ModuleDict({"tower": wrapped})
    flat = fully_shard(Pair(), mesh=DeviceMesh.from_group(group, "cpu"))
    # made by hand, for it wants an accelerator
    former = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(former)
    former._fsdp_wrapped_module = nn.Linear(D_IN, D)
    wrong = {
        "module inside": model.encode_image, "a part of it": model.image,
        "function around it": lambda x: model.encode_image(x), "holds a wrapper": lambda x: holder["tower"](x, x)[0],
        "holds a former one": nn.Sequential(former), "no such method": (wrapped, "encode_sound"),
        "not a method": (wrapped, "sub_batch"), "not a module": ("model", "encode_image"),
        "the other way round": ("encode_image", model), "two modules": (model.image, model.text),
        "a method of the module inside": (wrapped, model.encode_image),
        "not registered": flat.encode_image, "not registered, bound": partial(flat.encode_image),
        "part of a shard": flat.image,
    }  # fmt: skip
    said = {}
    for name, encoder in wrong.items():
        try:
            encode(encoder, x, sub_batch=2)
            said[name] = "nothing"
        except ValueError as error:
            said[name] = str(error)
    return said


BYPASS = (
    "`encoder` must be reached through its DistributedDataParallel; got the module inside, whose gradients would not "
    "be reduced. Pass the wrapper, or (wrapper, 'method'), or call encode in the forward of the wrapped module."
)
NESTED = (
    "`encoder` must run without a data-parallel wrapper on each sub-batch; got one that runs DistributedDataParallel "
    "inside. Pass the DistributedDataParallel itself, or (it, 'method'); or shard with fully_shard (FSDP2)."
)
NAMES = "`encoder` must be callable, or a module and the name of its method; got "
CHECK = ". Check the name, as in (model, 'encode_image')."
UNKNOWN = (
    "`encoder` must be a forward method that FSDP2 knows; got encode_image of FSDPPair, which does not gather its "
    "parameters. Pass (module, 'encode_image')."
)


def test_an_unreduced_gradient_is_refused(pool: Pool) -> None:
    first, second = pool.run(_sentences, 2)
    assert first == second
    assert first == {
        "module inside": BYPASS,
        "a part of it": BYPASS,
        "function around it": BYPASS,
        "holds a wrapper": NESTED,
        "holds a former one": NESTED.replace("runs DistributedDataParallel", "runs FullyShardedDataParallel"),
        "no such method": NAMES + "(Pair, 'encode_sound')" + CHECK,
        "not a method": NAMES + "(Pair, 'sub_batch')" + CHECK,
        "not a module": NAMES + "(str, 'encode_image')" + CHECK,
        "the other way round": NAMES + "(str, Pair)" + CHECK,
        "two modules": NAMES + "(Tower, Tower)" + CHECK,
        "a method of the module inside": "`encoder` must be a module and the name of its method, or a function of it; "
        "got encode_image of the module itself. Write (model, 'encode_image').",
        "not registered": UNKNOWN,
        "not registered, bound": UNKNOWN,
        "part of a shard": "`encoder` must be a module that FSDP2 shards, or its method; got a part of one, whose "
        "parameters it would not gather. Pass (module, 'method').",
    }


def _allowed(rank: int, group: Any) -> None:
    model, x = Pair(shape=()), torch.ones(4, D_IN, dtype=torch.float64)
    wrapped = DistributedDataParallel(model, process_group=group)
    with torch.no_grad():
        # on one rank only: evaluation exchanges nothing
        if rank == 0:
            assert encode(model.encode_image, x, sub_batch=3).shape == (4, D)
            assert encode((wrapped, "encode_image"), x, sub_batch=3).shape == (4, D)
    with wrapped.no_sync():
        encode(model.encode_image, x, sub_batch=3).sum().backward()
    assert model.image.project.weight.grad is not None
    # wrapped anew, and given up
    again = DistributedDataParallel(model, process_group=group)
    del wrapped
    encode((again, "encode_image"), x, sub_batch=3)
    forgotten = [again]
    forgotten.append(forgotten)
    del again, forgotten
    encode(model.encode_image, x, sub_batch=3)
    # a pair is right without any wrapper, too
    plain = Pair().encode_image(x).detach()
    assert distance(encode((Pair(), "encode_image"), x, sub_batch=3).detach(), plain) <= 1e-15
    assert distance(encode((model.image, "forward"), x, sub_batch=3).detach(), plain) <= 1e-15


def test_an_encoder_that_needs_no_reduction_is_accepted(pool: Pool) -> None:
    pool.check(_allowed, 2)


def _compiled_outside(rank: int, group: Any) -> None:
    """Trainers compile the wrapper; the module inside is then compiled alike, and each gradient reduced."""
    x = torch.randn(8, D_IN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    truth = Pair()
    truth.encode_image(x).square().sum().backward()
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    tower = Pair().image
    compiled = torch.compile(DistributedDataParallel(tower, process_group=group), backend=backend)
    own = x[4 * rank : 4 * rank + 4]
    for encoder in (compiled, (compiled, lambda model, x: model(x))):
        tower.zero_grad()
        # the wrapper takes the mean over ranks
        (2 * encode(encoder, own, sub_batch=2).square().sum()).backward()
        for p, q in zip(tower.parameters(), truth.image.parameters(), strict=True):
            assert distance(p.grad, q.grad) <= 1e-14
    assert graphs
    assert encode((compiled, "forward"), own, sub_batch=2).shape == (4, D)


def test_a_compiled_wrapper_is_reduced(pool: Pool) -> None:
    pool.check(_compiled_outside, 2)


def _stepped_too_soon(rank: int, group: Any, kind: str) -> str:
    model = Pair()
    wrapped = DistributedDataParallel(model, process_group=group) if kind == "DDP" else shard(model, group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x, y, labels = _mine(rank, group)
    for _ in range(2):
        loss = loss_of("ClipLoss", (*_both(wrapped, x, y), *model.numbers()), labels, group=group)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = loss_of("ClipLoss", (*_both(wrapped, x, y), 4.5, None), labels, group=group)
    with torch.no_grad():
        for parameter in model.image.parameters():
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return refusal(loss.backward)


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_parameters_changed_before_the_backward_are_noticed(pool: Pool, kind: str) -> None:
    for said in pool.run(_stepped_too_soon, 2, kind):
        assert said.startswith("`encoder` must have the parameters of the first pass; got one of shape"), said


def _unequal_retain(rank: int, group: Any) -> str:
    model = shard(Pair(), group)
    return refusal(encode, (model, "encode_image"), _mine(rank, group)[0], sub_batch=2, retain=rank)


def test_ranks_of_a_sharded_module_that_retain_different_graphs_are_told(pool: Pool) -> None:
    """They would run a different number of times, and wait for each other's shards."""
    assert pool.run(_unequal_retain, 2) == [unlike("retain", 0, 1)] * 2


def _sharded_number(rank: int, group: Any, combined: str) -> Tensor:
    mesh = DeviceMesh.from_group(group, "cpu")
    number = distribute_tensor(torch.tensor([2.0]), mesh, [Shard(0)]).requires_grad_()
    whole = collectives.unsharded(number, combined)
    assert torch.equal(whole, torch.tensor([2.0]))
    (whole * (rank + 1)).sum().backward()
    return number.grad.full_tensor()


@pytest.mark.parametrize(("combined", "gradient"), [("mean", 2.0), ("sum", 6.0)])
def test_a_sharded_scale_is_combined_as_the_wrapper_would(pool: Pool, combined: str, gradient: float) -> None:
    assert pool.run(_sharded_number, 3, combined) == [torch.tensor([gradient])] * 3


def test_a_state_of_torch_2_11_has_one_group_or_none() -> None:
    group = SimpleNamespace(fsdp_params=[])
    assert _torch.fsdp_groups(SimpleNamespace(_fsdp_param_group=group)) == [group]
    assert _torch.fsdp_groups(SimpleNamespace(_fsdp_param_group=None)) == []
