"""Sharded towers, and a rank that runs out of memory in a step: the others do not wait for the time-out."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import fresh
from test_failure import SOON
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from contrastile import encode

W, STEPS = 2, 3
# of a step of three sub-batches: the second one's first pass, and the second one that is encoded again
PLACES = {"first pass": 2, "replay": 5}
SHORT = "CUDA out of memory. Tried to allocate 3.00 GiB."


class Tower(nn.Module):
    """Two layers, one of them gathered by itself; runs out of memory at call `ends`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)
        self.calls, self.ends = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        self.calls += 1
        if self.calls == self.ends:
            raise torch.OutOfMemoryError(SHORT)
        return self.last(x)


def _run(rank: int, folder: Path, who: tuple[int, ...], place: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=W)
    torch.manual_seed(0)
    tower, said = Tower(), []
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    fully_shard(tower.last, mesh=mesh)
    fully_shard(tower, mesh=mesh)
    for step in range(STEPS):
        if step == 1:
            tower.calls, tower.ends = 0, PLACES[place] if rank in who else 0
        try:
            encode(tower, torch.ones(6, 4), sub_batch=2, retain=0).sum().backward()
            said.append("done")
        except (ConnectionError, torch.OutOfMemoryError) as error:
            said.append(f"{type(error).__name__}: {error}")
    (folder / f"{rank}.txt").write_text("\n".join(said))
    # none of them hears of the other by a connection that its end closes
    began = time.monotonic()
    while not (folder / f"{1 - rank}.txt").exists() and time.monotonic() - began < 30:
        time.sleep(0.05)


def _all(folder: Path, who: tuple[int, ...], place: str) -> list[list[str]]:
    with fresh(W, _run, folder, who, place) as processes:
        # gloo's own half hour is not needed
        for process in processes:
            process.join(SOON)
        assert [process.exitcode for process in processes] == [0] * W
    return [(folder / f"{rank}.txt").read_text().splitlines() for rank in range(W)]


@pytest.mark.parametrize("place", PLACES)
def test_one_rank_short_of_memory_is_an_error_on_all(tmp_path: Path, place: str) -> None:
    other, short = _all(tmp_path, (1,), place)
    assert short[:2] == ["done", f"OutOfMemoryError: {SHORT}"]
    assert short[2].startswith("LostRankError: ")
    assert other[0] == "done"
    words = f"got no answer from rank 1, which left by OutOfMemoryError: {SHORT.rstrip('.')}, on rank 0 in step "
    assert other[1].startswith("LostRankError: `exchange of shards` must be carried out by all ranks; ")
    assert words in other[1]


@pytest.mark.parametrize("place", PLACES)
def test_ranks_that_all_run_out_of_memory_raise_their_own_error(tmp_path: Path, place: str) -> None:
    for said in _all(tmp_path, (0, 1), place):
        assert said[:2] == ["done", f"OutOfMemoryError: {SHORT}"]
