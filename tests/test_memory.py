"""Peak memory of the losses and of encode, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

MEASURE = """
import json, torch, torch.nn.functional as F
from contrastile import ClipLoss, SigLipLoss
torch.set_num_threads(1)

def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024

def run(b, loss, d=64):
    q, k = (F.normalize(torch.randn(b, d), dim=-1).requires_grad_() for _ in range(2))
    scale, bias = torch.tensor(20.0, requires_grad=True), [-10.0] if loss is SigLipLoss else []
    # the peak counts anew from here
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    loss()(q, k, scale, *bias).backward()
    return peak() - before

for loss, b in ((ClipLoss, 2048), (ClipLoss, 4096), (SigLipLoss, 4096)):
    # everything that is loaded and allocated once
    run(600, loss)
    print(json.dumps((loss.__name__, b, run(b, loss))))
"""


@pytest.fixture(scope="module")
def extra() -> dict[tuple[str, int], float]:
    """Megabytes beside the features, by loss and batch."""
    # memory that was freed goes back to the system, and is not counted as room for what follows
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    command = [sys.executable, "-c", MEASURE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, env=environment)
    return {(loss, b): size / 1e6 for loss, b, size in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("loss", ["ClipLoss", "SigLipLoss"])
def test_4096_pairs_take_at_most_24_megabytes(extra: dict[tuple[str, int], float], loss: str) -> None:
    """The matrix alone would be 67 MB."""
    assert 2 < extra[loss, 4096] <= 24


def test_twice_the_batch_takes_at_most_2_2_times_the_memory(extra: dict[tuple[str, int], float]) -> None:
    assert extra["ClipLoss", 4096] <= 2.2 * extra["ClipLoss", 2048]
