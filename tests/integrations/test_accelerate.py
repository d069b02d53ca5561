"""`encode` under `Accelerator.prepare`, which puts autocast on the model's forward alone."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from contrastile import ClipLoss, encode

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.unpoisoned]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 8), nn.Linear(6, 8)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def encode_image(self, x: Tensor) -> Tensor:
        return F.normalize(self.image(x), dim=-1)

    def encode_text(self, x: Tensor) -> Tensor:
        return F.normalize(self.text(x), dim=-1)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.encode_image(x), self.encode_text(y)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_methods_of_a_prepared_model(precision: str) -> None:
    torch.manual_seed(0)
    # a process has one state
    AcceleratorState._reset_state(reset_partial_state=True)
    model, seen = Model(), set()
    plain = deepcopy(model)
    x, y = torch.randn(2, 8, 6)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for part in (model, plain):
        part.image.register_forward_hook(lambda module, inputs, out: seen.add(out.dtype))
    with accelerator.accumulate(prepared), accelerator.autocast():
        image = encode((prepared, "encode_image"), x, sub_batch=3)
        text = encode((prepared, "encode_text"), y, sub_batch=3)
        loss = ClipLoss()(image, text, accelerator.unwrap_model(prepared).logit_scale.exp())
        accelerator.backward(loss)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        truth = ClipLoss(backend="dense")(*plain(x, y), plain.logit_scale.exp())
    # accelerate divides by the steps that it accumulates
    (truth / 2).backward()
    assert seen == {torch.bfloat16 if precision == "bf16" else torch.float32}
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if precision == "bf16" else {"rtol": 1e-5, "atol": 1e-6}
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **tolerance)
    optimizer.step()
