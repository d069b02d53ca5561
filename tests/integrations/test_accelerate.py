"""`encode` under `Accelerator.prepare`, which puts autocast on the model's forward alone."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate_on_ranks import CASES, Model, cached, plain, trained
from comparison import same

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.unpoisoned]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_methods_of_a_prepared_model(precision: str) -> None:
    torch.manual_seed(0)
    # a process has one state
    AcceleratorState._reset_state(reset_partial_state=True)
    model, seen = Model(), set()
    copy = deepcopy(model)
    x, y = torch.randn(2, 8, 6)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for part in (model, copy):
        part.image.register_forward_hook(lambda module, inputs, out: seen.add(out.dtype))
    with accelerator.accumulate(prepared), accelerator.autocast():
        accelerator.backward(cached(accelerator, prepared, x, y))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        truth = plain(accelerator, copy, x, y)
    # accelerate divides by the steps that it accumulates
    (truth / 2).backward()
    assert seen == {torch.bfloat16 if precision == "bf16" else torch.float32}
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if precision == "bf16" else {"rtol": 1e-5, "atol": 1e-6}
    for p, q in zip(model.parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **tolerance)
    optimizer.step()


def test_two_ranks_that_accumulate_have_the_weights_of_the_whole_batch(tmp_path: Path) -> None:
    script = Path(__file__).with_name("accelerate_on_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run([*command, str(tmp_path)], check=True, timeout=240)
    AcceleratorState._reset_state(reset_partial_state=True)
    truth = trained(plain)
    for rank in range(2):
        same(torch.load(tmp_path / f"{rank}.pt"), dict.fromkeys(CASES, truth))
