"""Steps under `Accelerator.prepare` that torchrun may start: writes the weights after two steps of each case."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from contrastile import ClipLoss, encode

STEPS, ACCUMULATED = 2, 2
CASES: dict[str, dict[str, Any]] = {"ddp": {}, "ddp, compiled": {"dynamo_backend": "EAGER"}}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(6, 8), nn.Linear(6, 8)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def encode_image(self, x: Tensor) -> Tensor:
        return F.normalize(self.image(x), dim=-1)

    def encode_text(self, x: Tensor) -> Tensor:
        return F.normalize(self.text(x), dim=-1)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.encode_image(x), self.encode_text(y)


def cached(accelerator: Accelerator, prepared: Any, x: Tensor, y: Tensor) -> Tensor:
    image = encode((prepared, "encode_image"), x, sub_batch=3)
    text = encode((prepared, "encode_text"), y, sub_batch=3)
    bare = accelerator.unwrap_model(prepared, keep_torch_compile=False)
    return ClipLoss()(image, text, bare.logit_scale.exp())


def plain(_accelerator: Any, prepared: Any, x: Tensor, y: Tensor) -> Tensor:
    return ClipLoss(backend="dense")(*prepared(x, y), prepared.logit_scale.exp())


def trained(loss: Callable[..., Tensor], **how: Any) -> list[Tensor]:
    """The weights after some steps of SGD, each of two batches, of which every rank has its share."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, **how)
    model, generator = Model().double(), torch.Generator().manual_seed(1)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(STEPS * ACCUMULATED):
        sides = torch.randn(2, 8, 6, dtype=torch.float64, generator=generator)
        x, y = sides.chunk(accelerator.num_processes, 1)[accelerator.process_index]
        with accelerator.accumulate(prepared), accelerator.autocast():
            accelerator.backward(loss(accelerator, prepared, x, y))
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = {}
    for case, words in CASES.items():
        AcceleratorState._reset_state()
        results[case] = trained(cached, **words)
    torch.save(results, Path(sys.argv[1]) / f"{Accelerator().process_index}.pt")
    # torch's threads of a group that is still there may abort an interpreter that ends
    Accelerator().end_training()
