"""The program that torchrun starts for `test_failure.py`: a loop of a user's own, in which one rank is killed.

torchrun --standalone --nproc-per-node 3 tests/loop_on_ranks.py 2
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from contrastile import ClipLoss

STEP = 4


def loop(victim: int) -> None:
    dist.init_process_group("gloo")
    tower, loss = torch.nn.Linear(8, 8), ClipLoss(exchange="ring")
    for step in range(1, 10_000):
        if (dist.get_rank(), step) == (victim, STEP):
            # so that the others wait for it, as they do most of the time where one is slow
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        features = F.normalize(tower(torch.randn(5, 8)), dim=-1)
        loss(features, features.flip(0), 10.0).backward()


if __name__ == "__main__":
    torch.set_num_threads(1)
    loop(int(sys.argv[1]))
