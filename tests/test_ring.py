"""The ring simulated in one process, a thread for each rank: its arithmetic, told apart from the network's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Barrier
from typing import Any

import pytest
import torch
from problems import PROBLEMS, distance
from ranks import Pool
from test_exchange import SHARES, compare, on_a_rank
from torch import Tensor

from contrastile.distributed import collectives, consistency
from contrastile.exchange.base import Layout
from contrastile.exchange.ring import Ring
from contrastile.losses.base import Shard
from contrastile.tiles.base import InFlight

# seconds after which a rank of the simulation that waits for another gives up
PATIENCE = 20
HOW = {"exchange": "ring", "backend": "eager"}


@dataclass
class Circle:
    """Shared state of W simulated ranks: a queue from each to the next, and one table of their messages."""

    W: int
    queues: list[SimpleQueue[Tensor]] = field(init=False)
    table: list[Any] = field(init=False)
    barrier: Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.queues = [SimpleQueue() for _ in range(self.W)]
        self.table = [None] * self.W
        self.barrier = Barrier(self.W)

    def everyone(self, rank: int, said: Any) -> list[Any]:
        """Messages of all ranks."""
        self.table[rank] = said
        self.barrier.wait(PATIENCE)
        heard = list(self.table)
        self.barrier.wait(PATIENCE)
        return heard


@dataclass(frozen=True, eq=False)
class Place:
    """A rank's place in the circle: what stands in for a process group."""

    circle: Circle
    rank: int


@dataclass
class Posted:
    place: Place
    arriving: Tensor

    def wait(self) -> None:
        arrived = self.place.circle.queues[self.place.rank].get(timeout=PATIENCE)
        # exactly what room was made for
        assert (arrived.shape, arrived.dtype) == (self.arriving.shape, self.arriving.dtype)
        self.arriving.copy_(arrived)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of ranks in a ring, without torch.distributed."""

    def post(leaving: Tensor, arriving: Tensor, group: Place, _: Any = None) -> Posted:
        following = (group.rank + 1) % group.circle.W
        group.circle.queues[following].put(leaving.clone())
        return Posted(group, arriving)

    def total(x: Tensor, group: Place) -> Tensor:
        return torch.stack(group.circle.everyone(group.rank, x)).sum(0)

    for name, stand_in in (
        ("size", lambda group: group.circle.W if group else 1),
        ("rank", lambda group: group.rank),
        ("total", total),
        ("reserved_multiprocessors", lambda group: 0),
        ("post", post),
    ):
        monkeypatch.setattr(collectives, name, stand_in)
    monkeypatch.setattr(consistency, "tally", lambda group, _, counts: group.circle.everyone(group.rank, counts))


def simulate(
    name: str, shares: list[tuple[int, int]], exchange: str = "ring"
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    circle = Circle(len(shares))

    def rank(place: int) -> tuple[Tensor, dict[str, Tensor]]:
        return on_a_rank(place, Place(circle, place), name, shares, HOW | {"exchange": exchange})

    with ThreadPoolExecutor(circle.W) as threads:
        return list(threads.map(rank, range(circle.W)))


NAMES = ["clip", "siglip", "info_nce_everything", "clip_ids_weights_smoothing", "sup_con"]


@pytest.mark.parametrize("W", [2, 3, 5, 8])
@pytest.mark.parametrize("name", [name for name in PROBLEMS if name in NAMES])
def test_the_rings_arithmetic_is_that_of_one_process(simulated: None, name: str, W: int) -> None:
    shares = [(3 + (2 * rank) % 5, 3 + (2 * rank) % 5) for rank in range(W)]
    compare(simulate(name, shares), name, shares)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_the_network_changes_no_bit(pool: Pool, monkeypatch: pytest.MonkeyPatch, request: Any, name: str) -> None:
    over_gloo = pool.run(on_a_rank, 3, name, SHARES[3], HOW)
    request.getfixturevalue("simulated")
    for (loss, gradients), (same_loss, same_gradients) in zip(over_gloo, simulate(name, SHARES[3]), strict=True):
        assert distance(loss, same_loss) <= 1e-15
        for key in ("q", "k"):
            assert torch.equal(gradients[key], same_gradients[key]), key


@dataclass
class Air:
    """Stands in for a network that carries whatever it was handed at any time until it is waited for."""

    leaving: Tensor | None = None
    arriving: Tensor | None = None
    posted: int = 0

    def post(self, leaving: Tensor, arriving: Tensor, group: Any, _: Any = None) -> Air:
        assert self.leaving is None
        assert self.arriving is None
        assert not _share(leaving, arriving)
        self.leaving, self.arriving = leaving, arriving
        self.posted += 1
        return self

    def wait(self) -> None:
        self.leaving = self.arriving = None

    def read(self, *tensors: Tensor) -> None:
        assert not any(_share(x, self.arriving) for x in tensors)

    def write(self, x: Tensor) -> None:
        self.read(x)
        assert not _share(x, self.leaving)


def _share(x: Tensor, y: Tensor | None) -> bool:
    """True where two tensors have memory in common."""
    if y is None or not x.numel() or not y.numel():
        return False
    return x.data_ptr() < y.data_ptr() + y.nbytes and y.data_ptr() < x.data_ptr() + x.nbytes


@pytest.mark.parametrize("columns", [(3,), (3, 4), (4, 0), (3, 4, 2), (0, 0, 5), (3, 4, 2, 5), (1, 0, 6, 0)], ids=str)
@pytest.mark.parametrize("early", [True, False])
def test_nothing_is_touched_while_it_travels(
    monkeypatch: pytest.MonkeyPatch, columns: tuple[int, ...], early: bool
) -> None:
    """Work between a post and its wait runs beside the transfer on a device: neither may see the other."""
    for rank, n in enumerate(columns):
        air = Air()
        monkeypatch.setattr(collectives, "post", air.post)
        features, home = torch.zeros(n, 5, dtype=torch.bfloat16), torch.zeros(n, 5)

        def visit(shard: Shard, turn: InFlight, air: Air = air) -> None:
            # the rows' product
            air.read(*shard.payload())
            air.write(turn.value())
            if early and turn.early:
                turn.release()
                air.read(*shard.payload())

        layout = Layout(None, rank, (7,) * len(columns), columns)
        Ring("mean", layout)._around(Shard(features, 0), home, 0, visit)
        # a hop for each rank, and the way home
        assert air.posted == len(columns) + 1
        assert air.arriving is None
