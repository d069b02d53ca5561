"""Steps of engines of DeepSpeed that torchrun may start: writes the weights after each kind of training."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile import ClipLoss, encode

# where torchrun starts this file, tests/ is not on the path
sys.path.append(str(Path(__file__).parents[1]))
from test_coming_from import blocks, run

N, STEPS = 4, 2
WAYS = ("engine", "method", "function", "inside", "no rows", "page")


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
        self.text = nn.Linear(5, 8)
        # DeepSpeed refuses a parameter without axes
        self.logit_scale = nn.Parameter(torch.tensor([1.0]))

    def encode_image(self, x: Tensor) -> Tensor:
        return F.normalize(self.image(x), dim=-1)

    def encode_text(self, x: Tensor) -> Tensor:
        return F.normalize(self.text(x), dim=-1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.encode_image(x), self.encode_text(y)


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2 * N, size, generator=generator) for size in (6, 5)) for _ in range(steps)]


def encoded(way: str, engine: Any, x: Tensor, y: Tensor) -> Any:
    """Features of both sides, the image's in three sub-batches on each rank, the text's in two."""
    if way == "engine":
        return encode(engine, (x, y), sub_batch=3)
    if way == "no rows":
        # the first rank has the rows of both
        both = (
            encode((engine, name), parts=[*side.split(3)] if len(side) else [])
            for name, side in (("encode_image", x), ("encode_text", y))
        )
        return tuple(both)
    sides = {
        "method": ((engine, "encode_image"), (engine, "encode_text")),
        "function": ((engine, Clip.encode_image), (engine, Clip.encode_text)),
        "inside": (engine.module.encode_image, engine.module.encode_text),
    }[way]
    return encode(sides[0], x, sub_batch=2), encode(sides[1], y, sub_batch=3)


def trained(stage: int, way: str, accumulated: int) -> list[Tensor]:
    """The weights after two steps of SGD."""
    model, rank = Clip(), dist.get_rank()
    config = {
        "train_micro_batch_size_per_gpu": N, "gradient_accumulation_steps": accumulated,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
        # the default is a norm of 1
        "gradient_clipping": 0.0,
    }  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for x, y in batches(STEPS * accumulated):
        mine = slice(rank * N, rank * N + N) if way != "no rows" else slice(0, 2 * N * (rank == 0))
        if way == "page":
            run(blocks("DeepSpeed")[0], engine=engine, images=x[mine], texts=y[mine])
            continue
        image, text = encoded(way, engine, x[mine], y[mine])
        engine.backward(ClipLoss()(image, text, engine.module.logit_scale.exp()))
        engine.step()
    return [p.detach().clone() for p in model.parameters()]


def refusal(way: str) -> str:
    """The sentence for parameters that ZeRO stage 3 keeps in parts."""
    try:
        trained(3, way, 1)
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # its own collectives for a CPU would be compiled now, for a minute
    deepspeed.ops.__compatible_ops__.clear()
    deepspeed.init_distributed(dist_backend="gloo")
    weights = {(stage, way, 1): trained(stage, way, 1) for stage in (0, 1, 2) for way in WAYS}
    weights |= {(stage, "method", 2): trained(stage, "method", 2) for stage in (1, 2)}
    torch.save((weights, [refusal(way) for way in WAYS]), Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    # engines keep groups, of which torch's threads may abort an interpreter that ends
    os._exit(0)
