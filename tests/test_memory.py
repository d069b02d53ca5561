"""Peak memory of the losses and of encode, each measured in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest

MEASURE = """
import sys, torch, torch.nn.functional as F
from contrastile import {loss}
torch.set_num_threads(1)

def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024

def run(b, d=128):
    q, k = (F.normalize(torch.randn(b, d), dim=-1).requires_grad_() for _ in range(2))
    scale = torch.tensor(20.0, requires_grad=True)
    # the peak counts anew from here
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    {loss}()(q, k, scale{bias}).backward()
    return peak() - before

# everything that is loaded and allocated once
run(600)
print(run(int(sys.argv[1])))
"""


@cache
def _extra(loss: str, b: int) -> float:
    code = MEASURE.format(loss=loss, bias=", -10.0" if loss == "SigLipLoss" else "")
    # memory that was freed goes back to the system, and is not counted as room for what follows
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    command = [sys.executable, "-c", code, str(b)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, env=environment)
    return int(done.stdout) / 1e6


@pytest.mark.parametrize("loss", ["ClipLoss", "SigLipLoss"])
def test_8192_pairs_take_at_most_48_megabytes(loss: str) -> None:
    """The matrix alone would be 268 MB."""
    assert _extra(loss, 8192) <= 48


def test_twice_the_batch_takes_at_most_2_2_times_the_memory() -> None:
    assert _extra("ClipLoss", 8192) <= 2.2 * _extra("ClipLoss", 4096)
