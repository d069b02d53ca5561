"""Engines of DeepSpeed of ZeRO stages 0 to 2 beside the plain big batch, with the library itself, on two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed_on_ranks import STEPS, WAYS, Clip, batches

from contrastile import ClipLoss

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.unpoisoned]


def plain(accumulated: int) -> list[torch.Tensor]:
    model = Clip()
    optimizer, data = torch.optim.SGD(model.parameters(), lr=1.0), iter(batches(STEPS * accumulated))
    for _ in range(STEPS):
        for _ in range(accumulated):
            loss = ClipLoss(backend="dense")(*model(*next(data)), model.logit_scale.exp())
            (loss / accumulated).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def test_two_ranks_have_the_weights_of_the_whole_batch(tmp_path: Path) -> None:
    script = Path(__file__).with_name("deepspeed_on_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run([*command, str(tmp_path)], check=True, timeout=240)
    truth = {accumulated: plain(accumulated) for accumulated in (1, 2)}
    for rank in range(2):
        weights, refusals = torch.load(tmp_path / f"{rank}.pt")
        assert len(weights) == 3 * len(WAYS) + 2
        for (_, _, accumulated), found in weights.items():
            torch.testing.assert_close(found, truth[accumulated], rtol=1e-5, atol=2e-6)
        sentence = "`encoder` must hold its parameters whole; got parameters of DeepSpeed's ZeRO stage 3. Shard with"
        assert all(refusal.startswith(f"{sentence} fully_shard (FSDP2)") for refusal in refusals)
        assert len(refusals) == len(WAYS)
