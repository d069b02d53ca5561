"""Peak memory of a rank of the ring, beside its features: counted bytes, whatever the number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from contrastile.exchange.base import Layout
from contrastile.exchange.ring import Ring
from contrastile.losses.softmax import Softmax
from contrastile.tiles.eager import Eager

# rows of a rank, and features: two shards under way are more than all else
N, D = 512, 1024
WORKSPACE = 2**20

MEASURE = """
import json, multiprocessing, tempfile, torch, torch.distributed as dist, torch.nn.functional as F
from contrastile import ClipLoss, SigLipLoss
torch.set_num_threads(1)

def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024

def run(N, D, loss, group):
    q, k = (F.normalize(torch.randn(N, D), dim=-1).bfloat16().requires_grad_() for _ in range(2))
    scale, bias = torch.tensor(20.0, requires_grad=True), [-10.0] if loss is SigLipLoss else []
    dist.barrier(group)
    # the peak counts anew from here
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    loss(exchange="ring", backend="eager", workspace={workspace}, group=group)(q, k, scale, *bias).backward()
    return peak() - before

def rank(me, path, found):
    dist.init_process_group("gloo", init_method="file://" + path, rank=me, world_size=4)
    for loss, W in ((ClipLoss, 2), (ClipLoss, 3), (ClipLoss, 4), (SigLipLoss, 3)):
        group = dist.new_group(list(range(W)))
        if me < W:
            # the first run loads modules; on a busy machine threads of the transport take up to 2 MiB more in some
            run(64, {D}, loss, group)
            found.put((loss.__name__, W, min(run({N}, {D}, loss, group) for _ in range(2))))
    dist.barrier()

context = multiprocessing.get_context("fork")
found = context.SimpleQueue()
with tempfile.TemporaryDirectory() as folder:
    ranks = [context.Process(target=rank, args=(me, folder + "/meet", found)) for me in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert all(process.exitcode == 0 for process in ranks)
print(json.dumps([found.get() for _ in range(2 + 3 + 4 + 3)]))
"""


@pytest.fixture(scope="module")
def extra() -> dict[tuple[str, int], int]:
    """The most bytes that a rank holds beside its features, the gradients returned included, by loss and ranks."""
    # memory that was freed goes back to the system, and is not counted as room for what follows
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    command = [sys.executable, "-c", MEASURE.format(workspace=WORKSPACE, N=N, D=D)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, env=environment)
    measured = json.loads(done.stdout)
    assert len(measured) == 12
    return {(loss, W): max(size for *which, size in measured if which == [loss, W]) for loss, W, _ in measured}


def _declared(N: int, D: int, W: int) -> int:
    """Bytes of the two shards under way, and of both sides' accumulators in float32."""
    sizes = (N,) * W
    return Ring.extra_bytes(Layout(None, 0, sizes, sizes), D, torch.bfloat16) + 2 * N * D * 4


@pytest.mark.parametrize(("loss", "W"), [("ClipLoss", 2), ("ClipLoss", 3), ("SigLipLoss", 3)])
def test_a_rank_holds_two_shards_beside_its_accumulators(extra: dict[tuple[str, int], int], loss: str, W: int) -> None:
    """A third buffer would take 6 N D bytes more, gathered columns 6 (W - 2) N D."""
    tiles = Eager(Softmax(symmetric=True), torch.tensor(1.0), None, WORKSPACE)
    within = _declared(N, D, W) + tiles.workspace_bytes(N, N, D, torch.bfloat16)
    assert extra[loss, W] <= within < 30 * N * D


def test_more_ranks_take_no_more(extra: dict[tuple[str, int], int]) -> None:
    """The bytes of a shard are 2 N D; one that stayed at each hop would show."""
    assert extra["ClipLoss", 4] <= extra["ClipLoss", 3] + 1.5 * N * D


@pytest.mark.parametrize("W", [2, 4, 256])
def test_16k_rows_of_768_features_take_a_quarter_of_a_gibibyte(W: int) -> None:
    assert _declared(2**14, 768, W) / 2**30 == pytest.approx(0.234, abs=5e-4)
