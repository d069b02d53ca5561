"""Learned distances in tiles, beside plain autograd over the whole matrix of scores.

    python benchmarks/features.py [--csv FILE]

Forward and backward in bf16, half a minute on an H200; without a GPU sizes are small.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastile import contrast
from contrastile.bench.harness import Machine, Report, Row, Table, script
from contrastile.scorers import Bilinear, MaxSim, PairMLP
from contrastile.train.provenance import ORIGIN, provenance

COLUMNS = (
    *("what", "way", "batch", "sub_batch", "steps", "ms", "us_per_pair", "peak_bytes", "planned_bytes", "waiting"),
    *ORIGIN,
)
TABLE = Table(
    *(("way", "way", "44"), ("batch", "batch", ">7"), ("ms", "ms", ">10.2f")),
    *(("us_per_pair", "us/pair", ">8.1f"), ("peak_bytes", "peak MiB", ">9,.0f")),
)
# steps that are timed, after one that is not
ROUNDS = 2


def scored(device: torch.device) -> Iterator[tuple[str, nn.Module, list[Tensor]]]:
    """Scorers with features of both sides."""
    fewer, dtype = (1, torch.bfloat16) if device.type == "cuda" else (32, torch.float32)

    def sides(*shapes: tuple[int, ...]) -> list[Tensor]:
        drawn = (F.normalize(torch.randn(shape, device=device), dim=-1) for shape in shapes)
        return [x.to(dtype).requires_grad_() for x in drawn]

    d = 768 // fewer
    yield f"Bilinear, {d} features", Bilinear(d, d).to(device, dtype), sides(*[(16384 // fewer, d)] * 2)
    d = 256 // fewer
    yield f"PairMLP, {d} features", PairMLP(d, d, d).to(device, dtype), sides(*[(2048 // fewer, d)] * 2)
    b = 1024 // fewer
    yield "MaxSim, 32 and 180 tokens of 128", MaxSim(), sides((b, 32, 128), (b, 180, 128))


def measure(machine: Machine, report: Report, backend: str, scorer: nn.Module, sides: list[Tensor], way: str) -> None:
    """Report the time of a step, and the most bytes that it holds beside what is there before it."""

    def step() -> None:
        contrast(*sides, scorer=scorer, scale=20.0, backend=backend).backward()

    # compiles, and is not timed
    step()
    ms = 1e3 * median(machine.time(step) for _ in range(ROUNDS))
    for x in sides:
        x.grad = None
    row: Row = dict.fromkeys(COLUMNS) | {
        "what": "distance", "way": way, "batch": len(sides[0]), "ms": round(ms, 3),
        "us_per_pair": round(ms / len(sides[0]) * 1e3, 3), "peak_bytes": machine.peak(step),
        **provenance(machine.device, "transformers"),
    }  # fmt: skip
    report.result(TABLE.line(row), row)


def main() -> None:
    with script(__doc__, COLUMNS, "transformers") as (_, machine, report):
        report.say(TABLE.header())
        for name, scorer, sides in scored(machine.device):
            for backend, kind in (("auto", "tiles"), ("dense", "the whole matrix")):
                with report.failures(f"{name}, {kind}", judged=backend == "auto"):
                    measure(machine, report, backend, scorer, sides, f"{name}, {kind}")
                for x in sides:
                    x.grad = None


if __name__ == "__main__":
    main()
