"""Transfers around a ring by copies: without a GPU, its streams and flags are played by threads and words in memory."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from ctypes import c_uint32
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from problems import PROBLEMS, distance
from test_exchange import SHARES, compare
from test_ring import PATIENCE, Circle, Place, simulate, simulated
from torch import Tensor

from contrastile import ClipLoss, SigLipLoss
from contrastile._torch import environment
from contrastile.bench.memory import one_rank_of
from contrastile.distributed import collectives, failure
from contrastile.distributed import neighbours as near
from contrastile.distributed.collectives import captured_call
from contrastile.distributed.neighbours import Neighbours
from contrastile.engine import graph
from contrastile.exchange import gather, ring
from contrastile.exchange.base import Layout
from contrastile.exchange.ring import Ring
from contrastile.losses.base import Shard

__all__ = ["simulated"]

_total = collectives.total


class _Stream:
    """A stream that does everything at once."""

    cuda_stream = 0

    def __init__(self, *_: Any) -> None:
        self.waited: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)

    def synchronize(self) -> None:
        pass

    def record_event(self) -> Any:
        return SimpleNamespace(wait=lambda: None)


def _played(_: int, orders: Sequence[tuple[int, int, int]]) -> None:
    """The driver's function on words of this process."""
    for kind, address, value in orders:
        word, began = c_uint32.from_address(address), time.monotonic()
        if kind == near.WRITE:
            # each write is awaited before the next
            assert word.value != value
            word.value = value
        while kind == near.WAIT and word.value != value:
            assert time.monotonic() - began < PATIENCE
            time.sleep(0)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "in_order", _played)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", _Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**40, 2**40))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(near, "current_stream_address", lambda _: 0)


def _of_ranks(count: int) -> list[Tensor]:
    """Memory of three ranks, with what each writes into its own when it makes it."""
    memories = [torch.full((count,), 255, dtype=torch.uint8) for _ in range(3)]
    for rank, memory in enumerate(memories):
        memory[: near.ALIGNMENT] = near._written_by(rank, memory.device)
    return memories


def _memory(size: int) -> Tensor:
    memory = torch.full((2 * size + near.ALIGNMENT,), 255, dtype=torch.uint8)
    memory[-near.ALIGNMENT :] = 0
    return memory


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, streams: None) -> Iterator[list[int]]:
    """Ranks that are threads read each other's buffers; yields the sizes of buffers that were made."""
    found, sizes = dict[Place, Neighbours](), list[int]()

    def of_place(group: Place, size: int, _: torch.device) -> Neighbours:
        if group not in found or found[group].size < size:
            sizes.append(size)
            found[group] = Neighbours(group.circle.everyone(group.rank, _memory(size)), group.rank, size)
        return found[group]

    for module in (ring, gather):
        monkeypatch.setattr(module, "neighbours", of_place)
    yield sizes
    assert all(not each.memory[-near.ALIGNMENT :].any() for each in found.values())


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("W", [2, 3, 5])
@pytest.mark.parametrize(
    "name", [name for name in PROBLEMS if name in ("clip", "siglip", "clip_ids_weights_smoothing")]
)
def test_buffers_that_are_read_have_the_bits_of_those_that_are_sent(
    request: pytest.FixtureRequest, name: str, W: int
) -> None:
    shares = SHARES[3] if W == 3 else [((2 * rank) % 5, (3 * rank) % 7) for rank in range(W)]
    sent = simulate(name, shares)
    made = request.getfixturevalue("read")
    for (loss, gradients), (same_loss, same_gradients) in zip(sent, simulate(name, shares), strict=True):
        assert distance(loss, same_loss) <= 1e-15
        assert all(torch.equal(gradients[key], same_gradients[key]) for key in ("q", "k"))
    # larger ones for the backward, and none else
    assert W <= len(made) <= 2 * W


def _rows(rank: int, n: int) -> list[Tensor]:
    """Tensors of a rank that travel together, of several types and shapes."""
    generator = torch.Generator().manual_seed(rank)
    numbers = torch.randn(n, 3, generator=generator)
    return [numbers.bfloat16(), torch.arange(n) + 10 * rank, numbers[:, 0] > 0, numbers.double()]


@pytest.mark.parametrize("sizes", [(2, 2), (3, 0, 4), (0, 0, 5, 1)], ids=str)
def test_ranks_that_read_all_others_get_what_a_backend_brings(streams: None, sizes: tuple[int, ...]) -> None:
    circle, W = Circle(len(sizes)), len(sizes)

    def rank(place: int) -> tuple[Any, ...]:
        group, n = Place(circle, place), sizes[place]
        buffers = Neighbours(circle.everyone(place, _memory(1024)), place, 1024)
        flight = buffers.begin_gather(_rows(place, n), sizes, group)
        # as a block that is computed beside it
        assert (failure.state_of(group).in_flight, buffers.unwatched) == (flight, True)
        gathered = flight.wait()
        sums = torch.arange(2.0 * sum(sizes)).view(-1, 2) * (1 + place)
        (own,) = buffers.begin_scatter_sum(sums, sizes, group).wait()
        # row j for another rank: 100 · this rank + that one, and j
        leaving = [
            torch.tensor([100 * place + other, j]) for other in range(W) if other != place for j in range(sizes[other])
        ]
        others = buffers.exchange_rows(torch.stack(leaving) if leaving else torch.empty(0, 2).long(), sizes, group)
        every = buffers.every(torch.tensor(float(place)), "sum", group)
        return gathered, own, others, every

    with ThreadPoolExecutor(W) as threads:
        results = list(threads.map(rank, range(W)))
    expected = [torch.cat(parts) for parts in zip(*(_rows(*each) for each in enumerate(sizes)), strict=True)]
    whole = torch.arange(2.0 * sum(sizes)).view(-1, 2) * sum(range(1, W + 1))
    for place, (gathered, own, others, every) in enumerate(results):
        assert all(torch.equal(x, y) for x, y in zip(gathered, expected, strict=True))
        assert torch.equal(own, whole.split(sizes)[place])
        assert others.tolist() == [
            [[100 * other + place, j] for j in range(sizes[place])] for other in range(W) if other != place
        ]
        assert every.tolist() == list(range(W))


def test_small_tensors_on_a_gpu_are_copied_where_ranks_have_buffers(
    monkeypatch: pytest.MonkeyPatch, streams: None
) -> None:
    class OnGpu(Tensor):
        is_cuda = True

    group, called = Group(), list[str]()
    buffers = SimpleNamespace(size=256, follow=lambda: None)
    for name in ("begin_gather", "begin_scatter_sum", "exchange_rows"):
        setattr(buffers, name, lambda *_, name=name: called.append(name))
    buffers.every = lambda x, *_: torch.stack([x, x + 1])
    failure.state_of(group).neighbours = buffers
    x = torch.ones(2, 4).as_subclass(OnGpu)
    collectives.begin_gather([x, x[:, 0]], [2, 2], group)
    collectives.begin_scatter_sum(x, [1, 1], group)
    collectives.exchange_rows(x, [2, 2], group)
    assert collectives.total(x, group).unique().tolist() == [3]
    assert collectives.largest(x, group).unique().tolist() == [2]
    assert called == ["begin_gather", "begin_scatter_sum", "exchange_rows"]
    # too many bytes, on the host, or in a graph of the user's own
    monkeypatch.setattr(collectives, "_reduce", lambda *_: called.append("backend"))
    collectives.total(torch.ones(129).as_subclass(OnGpu), group)
    collectives.total(torch.ones(2, 4), group)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    collectives.largest(x, group)
    assert called[3:] == ["backend"] * 3


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("exchange", ["gather", "gather in two blocks", "ring", "replicate"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_exchange_by_copies_is_one_process(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str, exchange: str
) -> None:
    exchange, *apart = exchange.split()
    if apart:
        monkeypatch.setattr(gather, "ONE_BLOCK", 0)
    request.getfixturevalue("read")
    # all transfers are copies, and sums of numbers too
    monkeypatch.setattr(collectives, "total", _total)

    def made(_: Tensor, count: int, group: Any) -> Any:
        return gather.neighbours(group, max(count, 4096), None)

    monkeypatch.setattr(collectives, "_copy_buffers", made)
    shares = [(4, 4), (2, 2), (6, 6)] if name in ("info_nce_everything", "nt_xent") else SHARES[3]
    compare(simulate(name, shares, exchange), name, shares)


HERE = torch.device("cuda", 1)


class Group:
    group_name = "three"
    rank, size = staticmethod(lambda: 0), staticmethod(lambda: 3)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(near, "any_of", lambda flags, _: list(flags))
    monkeypatch.setattr(near, "backend_timeout", lambda _: timedelta(minutes=10))
    return Group()


@pytest.mark.parametrize(
    ("ranks", "reaches", "driver", "found"),
    [
        ([[0], [1], [2]], True, True, True),
        ([[0], [1], [2]], False, True, False),
        # each sees one GPU alone
        ([[1], [1], [1]], True, True, False),
        ([[0], [1], [2, "another"]], True, True, False),
        ([[0], [1], [2]], True, False, False),
    ],
)
def test_ranks_read_each_other_where_all_their_gpus_reach_each_other(
    monkeypatch: pytest.MonkeyPatch, group: Any, ranks: list[Any], reaches: bool, driver: bool, found: bool
) -> None:
    asked: list[tuple[torch.device, int]] = []
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: asked.append(pair) or reaches)
    monkeypatch.setattr(near, "_driver", lambda: driver or None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)

    def numbers(_: Any, parts: str, own: list[int]) -> list[list[Any]]:
        assert parts == "neighbours"
        node, index = own
        assert index == 1
        return [[(elsewhere or [node])[0], each] for each, *elsewhere in ranks]

    monkeypatch.setattr(near, "numbers_of_ranks", numbers)
    assert near._reachable(group, HERE) is found
    if found:
        assert asked == [(HERE, 0), (HERE, 2)]
        # a rank that sees fewer GPUs than another uses
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert near._reachable(group, HERE) is False
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
        monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
        assert near._reachable(group, HERE) is False
        monkeypatch.delenv("NCCL_P2P_DISABLE")
        # a group of some ranks
        monkeypatch.setattr(dist, "get_world_size", lambda: 4)
        assert near._reachable(group, HERE) is False
        monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo")
    assert near._reachable(group, HERE) is False


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "_driver", object)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _, index: index == 0)
    assert near.reach_each_other(torch.device("cuda"), range(2))


def test_buffers_grow_and_stay(monkeypatch: pytest.MonkeyPatch, group: Any, streams: None) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(near, "_reachable", lambda *_: asked.append("reachable") or True)

    def symmetric(count: int, _: torch.device) -> tuple[Tensor, Callable[[Any], Callable[[int], Tensor]]]:
        asked.append(count)
        if count > 4000:
            raise RuntimeError("out of memory")
        ranks = _of_ranks(count)
        return ranks[0], lambda _: ranks.__getitem__

    monkeypatch.setattr(near, "symmetric", symmetric)
    near.used_bytes()
    assert near.neighbours(group, 100, torch.device("cpu")) is None
    assert near.neighbours(group, near.MOST_BUFFER_BYTES // 2 + 1, HERE) is None
    assert asked == []
    first = near.neighbours(group, 512, HERE)
    assert first is not None
    assert near.neighbours(group, 256, HERE) is first
    assert (near.used_bytes(), near.used_bytes()) == (2 * 512 + 256, 0)
    # a smaller batch counts what it needs, a replayed call all
    assert near.neighbours(group, 256, HERE) is first
    assert near.used_bytes() == 2 * 256 + 256
    first.follow()
    assert near.used_bytes() == 2 * 512 + 256
    second = near.neighbours(group, 1024, HERE)
    assert second is not None
    # those of before stay as they are, for a graph that reads them
    assert (len(first.buffers[1]), len(second.buffers[1])) == (512, 1024)
    # no room on some rank: the group's backend carries everything from now on
    assert near.neighbours(group, 4096, HERE) is None
    assert near.neighbours(group, 256, HERE) is None
    assert asked == ["reachable", *(2 * size + 256 for size in (512, 1024, 4096))]


def test_another_stream_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch, streams: None) -> None:
    memory = _memory(256)
    buffers = Neighbours([memory], 0, 256)
    first = buffers._reader
    buffers.follow()
    assert buffers._reader is first
    monkeypatch.setattr(near, "current_stream_address", lambda _: 7)
    buffers.follow()
    assert buffers._reader.waited == [first]


def test_a_copy_is_no_operation_between_graphs(monkeypatch: pytest.MonkeyPatch, streams: None) -> None:
    """Ranks that replay it, which take no step on the host, count as many operations as ranks that do not."""
    group, memory = Group(), _memory(256)
    state, buffers = failure.state_of(group), Neighbours([memory], 0, 256)
    buffers.buffers[1][:12] = torch.arange(12)
    arriving = torch.empty(3)
    monkeypatch.setattr(captured_call, "transfer", lambda _: pytest.fail("a step between graphs"))
    flight = buffers.post(group, 1, arriving)
    assert state.in_flight is flight
    assert torch.equal(flight.wait()[0].view(torch.uint8), torch.arange(12, dtype=torch.uint8))
    assert (state.operations, state.in_flight) == (0, None)


def test_ranks_that_fail_at_different_hops_have_not_failed_alike(
    monkeypatch: pytest.MonkeyPatch, streams: None
) -> None:
    """Otherwise the group would stay in use, while a stream waits for a copy that another rank never posted."""
    memory, places = _memory(256), list[str]()
    monkeypatch.setattr(failure, "all_failed", lambda place, _: places.append(place) or False)
    monkeypatch.setattr(failure, "farewell", str)
    monkeypatch.setattr(failure, "hang_up", lambda _: None)
    for before, hops in ((3, 0), (3, 1), (3, 2), (0, 1)):
        # the same group on several ranks, the last of which has replayed the step before
        group, buffers = Group(), Neighbours([memory], 0, 256)
        for fails in (False, True):
            with pytest.raises(MemoryError) if fails else nullcontext(), failure.in_step(group):
                for _ in range(hops if fails else before):
                    buffers.post(group, 0, torch.empty(3)).wait()
                if fails:
                    raise MemoryError
    assert places[1] == places[3]
    assert len(set(places)) == 3


def test_a_step_that_fails_joins_the_transfer_under_way(streams: None) -> None:
    """A capture whose streams have not met again cannot end; afterwards no event of it can be waited for."""
    group, memory = Group(), _memory(256)
    state, buffers = failure.state_of(group), Neighbours([memory], 0, 256)

    def fail() -> None:
        buffers.post(group, 0, torch.empty(3))
        raise MemoryError

    with pytest.raises(MemoryError), near.joining(group):
        fail()
    assert state.in_flight is None


def test_an_error_of_a_copy_is_no_lost_rank(monkeypatch: pytest.MonkeyPatch, streams: None) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("invalidated capture")

    memory = _memory(256)
    buffers = Neighbours([memory], 0, 256)
    monkeypatch.setattr(near, "in_order", refuse)
    monkeypatch.setattr(collectives, "lost", lambda *_: pytest.fail("a lost rank"))
    with pytest.raises(RuntimeError, match="invalidated capture"):
        buffers.post(Group(), 0, torch.empty(3))


@pytest.mark.parametrize("refused", [None, "memory", "flags", "handles", "another"])
def test_all_ranks_keep_to_the_backend_where_one_cannot_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, group: Any, streams: None, refused: str | None
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError(refused)

    def symmetric(count: int, _: torch.device) -> Any:
        ranks = _of_ranks(count)
        if refused == "another":
            # that of another process, which a container takes for this rank's
            ranks[2] = ranks[1]
        return ranks[0], refuse if refused == "handles" else lambda _: ranks.__getitem__

    monkeypatch.setattr(near, "_reachable", lambda *_: True)
    monkeypatch.setattr(near, "symmetric", refuse if refused == "memory" else symmetric)
    if refused == "flags":
        monkeypatch.setattr(near, "in_order", refuse)
    asked: list[list[bool]] = []
    monkeypatch.setattr(near, "any_of", lambda flags, _: asked.append(flags) or list(flags))
    assert (near.neighbours(group, 256, HERE) is None) is (refused is not None)
    first, *second = asked
    assert first == [refused in ("memory", "flags")]
    assert second == [[refused is not None]] * (not first[0])


def test_buffers_that_inference_has_made_serve_training(
    monkeypatch: pytest.MonkeyPatch, group: Any, streams: None
) -> None:
    """Lightning validates in inference mode before it trains; torch lets no tensor of it be written to outside."""

    def symmetric(count: int, _: torch.device) -> Any:
        ranks = _of_ranks(count)
        return ranks[0], lambda _: ranks.__getitem__

    monkeypatch.setattr(near, "_reachable", lambda *_: True)
    monkeypatch.setattr(near, "symmetric", symmetric)
    with torch.inference_mode():
        buffers = near.neighbours(group, 256, HERE)
        assert buffers is not None
        buffers._write(torch.ones(2), 0)
    buffers._write(torch.ones(3), 0)
    buffers.buffers[1][:4].copy_(torch.arange(4))


def test_copies_have_no_gradient_and_keep_their_dtype(monkeypatch: pytest.MonkeyPatch, streams: None) -> None:
    """As with a backend; a gather whose rows require a gradient would otherwise be refused."""
    memory, x = _memory(256), torch.ones(2, 3, requires_grad=True)
    buffers = Neighbours([memory], 0, 256)
    (gathered,) = buffers.begin_gather([x], [2], Group()).wait()
    (own,) = buffers.begin_scatter_sum(x, [2], Group()).wait()
    assert torch.equal(gathered, x)
    assert torch.equal(own, x)
    assert not any(tensor.requires_grad for tensor in (gathered, own, memory))
    monkeypatch.setattr(collectives, "_copy_buffers", lambda *_: buffers)
    group = Group()
    counts = torch.arange(3, dtype=torch.int32)
    assert [collectives.total(counts, group).dtype, collectives.largest(counts, group).dtype] == [torch.int32] * 2


def test_the_thread_that_watches_uses_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch, streams: None) -> None:
    """Once for all transfers of a step; a step without transfers is not watched."""
    used: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(near, "_driver", lambda: None)
    monkeypatch.setattr(near, "watch", lambda _group, _timeout, prepare: prepare())
    buffers = Neighbours([_memory(256)], 0, 256, 60.0)
    buffers.watch(Group())
    assert used == []
    buffers.unwatched = True
    for _ in range(2):
        buffers.watch(Group())
    assert used == [buffers.memory.device]


def test_the_step_that_makes_buffers_is_watched(monkeypatch: pytest.MonkeyPatch, group: Any) -> None:
    watched: list[Any] = []
    with Ring("mean", Layout(group, 0, (3, 3), (3, 3))).in_step():
        failure.state_of(group).neighbours = SimpleNamespace(watch=watched.append)
    assert watched == [group]


@pytest.mark.parametrize("before", [None, "0"])
def test_one_variable_is_set_for_a_while(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    """Another thread may set others meanwhile."""
    for name in ("CONTRASTILE_TEST", "CONTRASTILE_OTHER"):
        # gone after the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if before is not None:
        monkeypatch.setenv("CONTRASTILE_TEST", before)
    with environment("CONTRASTILE_TEST", "1"):
        assert os.environ["CONTRASTILE_TEST"] == "1"
        os.environ["CONTRASTILE_OTHER"] = "2"
    assert (os.environ.get("CONTRASTILE_TEST"), os.environ["CONTRASTILE_OTHER"]) == (before, "2")


def test_a_graph_of_the_users_own_reads_no_buffers_that_may_be_replaced(
    monkeypatch: pytest.MonkeyPatch, group: Any, streams: None
) -> None:
    memory = _memory(256)
    state, buffers = failure.state_of(group), Neighbours([memory], 0, 256)
    state.reachable, state.neighbours = True, buffers
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert near.neighbours(group, 256, HERE) is None
    monkeypatch.setattr(captured_call, "transfer", lambda _: None)
    assert near.neighbours(group, 256, HERE) is buffers


def test_buffers_keep_no_group_and_stay_at_the_end_of_the_process(streams: None) -> None:
    group, memory = Group(), _memory(256)
    state, reference = failure.state_of(group), ref(group)
    state.neighbours = buffers = Neighbours([memory], 0, 256)
    buffers.post(group, 0, torch.empty(3)).wait()
    del state, group
    gc.collect()
    assert reference() is None
    references = sys.getrefcount(memory)
    near._keep()
    assert sys.getrefcount(memory) == references + 1


@pytest.mark.parametrize("on_host", [False, True])
def test_buffers_of_a_group_that_lost_a_rank_outlive_it(
    monkeypatch: pytest.MonkeyPatch, streams: None, on_host: bool
) -> None:
    """The release of a GPU's memory waits for its copies, one of which may wait for the lost rank."""
    monkeypatch.setattr(failure, "_receives", lambda _: {})
    group, host, other, memory = Group(), Group(), Group(), _memory(256)
    state = failure.state_of(group)
    state.host_group, state.neighbours = host, Neighbours([memory], 0, 256)
    references = sys.getrefcount(memory)
    failure._close(other)
    assert sys.getrefcount(memory) == references
    failure._close(host if on_host else group)
    assert sys.getrefcount(memory) == references + 1


def test_copies_leave_all_multiprocessors_to_the_tiles(monkeypatch: pytest.MonkeyPatch, group: Any) -> None:
    monkeypatch.setattr(collectives, "reserved_multiprocessors", lambda _: 8)
    exchange = Ring("mean", Layout(group, 0, (3, 3), (3, 3)))
    cols, many = Shard(torch.zeros(3, 4)), Shard(torch.zeros(3, near.MOST_BUFFER_BYTES // 8, device="meta"))
    assert exchange.reserved(cols) == 8
    followed: list[str] = []
    buffers = {name: lambda *_, name=name: followed.append(name) for name in ("follow", "watch")}
    failure.state_of(group).neighbours = SimpleNamespace(**buffers)
    assert exchange.reserved(cols) == 0
    # NCCL carries it
    assert exchange.reserved(many) == 8
    with exchange.in_step():
        assert followed == ["follow"]
    assert followed == ["follow", "watch"]


def test_a_forward_takes_no_buffers_that_its_backward_has_no_room_in(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(ring, "neighbours", lambda _group, size, _device: asked.append(size))
    loss = ClipLoss(exchange="ring")
    for most, calls in ((2**20, 2), (1000, 0)):
        monkeypatch.setattr(ring, "MOST_BUFFER_BYTES", most)
        asked.clear()
        with one_rank_of(3):
            q, k = (x.requires_grad_() for x in F.normalize(torch.randn(2, 5, 16), dim=-1))
            loss(q, k, 1.0).backward()
        assert len(asked) == calls


def test_an_error_of_the_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "_driver", lambda: SimpleNamespace(cuStreamBatchMemOp_v2=lambda *_: 801))
    with pytest.raises(RuntimeError, match=r"^cuStreamBatchMemOp_v2 of CUDA's driver failed with error 801$"):
        near.in_order(0, [(near.WRITE, 0, 1)])


@pytest.mark.gpu
@pytest.mark.unpoisoned
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("make", "numbers"), [(ClipLoss, (20.0,)), (SigLipLoss, (10.0, -5.0))])
def test_copies_on_a_gpu_have_the_bits_of_transfers(
    monkeypatch: pytest.MonkeyPatch, make: Any, numbers: tuple[float, ...]
) -> None:
    """One rank of three whose neighbours are itself; the third call is captured, and replayed by the fourth."""
    here = torch.device("cuda", torch.cuda.current_device())

    def made(group: Any, size: int, device: torch.device) -> Neighbours:
        memory = torch.zeros(2 * size + near.ALIGNMENT, dtype=torch.uint8, device=device)
        torch.cuda.synchronize()
        return Neighbours([memory], 0, size)

    monkeypatch.setattr(near, "_made", made)
    torch.manual_seed(0)
    sides = [F.normalize(torch.randn(700, 256, device=here), dim=-1).bfloat16().requires_grad_() for _ in range(2)]
    leaves = [*sides, *(torch.tensor(number, device=here, requires_grad=True) for number in numbers)]
    results = []
    with one_rank_of(3):
        for reachable in (False, True):
            graph._graphs.clear()
            graph._calls.clear()
            failure.state_of(None).reachable = reachable
            loss = make(exchange="ring")
            for _ in range(5):
                value = loss(*leaves)
                results.append([value.detach(), *torch.autograd.grad(value, leaves)])
            assert len(graph._graphs) == 1
        assert failure.state_of(None).neighbours is not None
    first, *others = results
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))
