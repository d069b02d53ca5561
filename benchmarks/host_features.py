"""A loss whose features are in host memory: its rate on one GPU beside the same loss with resident features.

    python benchmarks/host_features.py [--size 4194304] [--beside 262144] [--limit 16] [--csv FILE]

The process may allocate `--limit` GiB of the device. Loss and gradients from the host are first compared with those of
resident features on a small batch. Then `ClipLoss` is timed in bf16: resident and from the host at `--beside` pairs,
and from the host at `--size` pairs, whose features and float32 gradients alone exceed the limit. `ratio` is that to the
resident loss. A step of 4,194,304 pairs of 768 features takes minutes and about 36 GiB of pinned host memory, of which
the allocator rounds each piece up to a power of two.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile import ClipLoss
from contrastile.bench.gate import Distance, step
from contrastile.bench.harness import COLUMNS, Machine, results_file
from contrastile.train.provenance import provenance

DEVICE = torch.device("cuda", 0)
CHUNK, ROUNDS, CHECKED = 65536, 3, 20_000
# relative distance of bf16 gradients of the same pairs, summed in another order
TOLERANCE = 5e-3


def leaves(b: int, d: int, seed: int) -> list[Tensor]:
    """Return unit rows in pinned host memory for both sides, drawn on the device a chunk at a time, and the scale."""
    generator, sides = torch.Generator(DEVICE).manual_seed(seed), []
    for _ in range(2):
        out = torch.empty(b, d, dtype=torch.bfloat16, pin_memory=True)
        for rows in out.split(CHUNK):
            rows.copy_(F.normalize(torch.randn(rows.shape, device=DEVICE, generator=generator), dim=-1))
        sides.append(out.requires_grad_())
    return [*sides, torch.tensor(100.0, device=DEVICE, requires_grad=True)]


def resident(host: list[Tensor]) -> list[Tensor]:
    return [leaf.detach().to(DEVICE).requires_grad_() for leaf in host]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, default=2**22)
    parser.add_argument("--beside", type=int, default=2**18)
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--limit", type=float, default=16.0, help="GiB of the device that may be allocated")
    parser.add_argument("--workspace", type=int, default=2**30)
    parser.add_argument("--longest", type=float, default=600.0, help="seconds that the step of --size may take")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is what this measures, and torch finds none")
    limit, d, machine = int(options.limit * 2**30), options.features, Machine(DEVICE)
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), DEVICE)
    losses = {
        "host": ClipLoss(device=DEVICE, workspace=options.workspace), "resident": ClipLoss(workspace=options.workspace)
    }  # fmt: skip
    rates: list[float] = []

    few = leaves(CHECKED, d, 1)
    results, true = step(losses["host"], few), step(losses["resident"], resident(few))
    far = Distance.between(*([x.cpu().double() for x in several] for several in (results, true)))
    print(f"from the host: {far} from the resident loss, {CHECKED} pairs", flush=True)
    if not max(far.loss, far.gradient, far.scalar) < TOLERANCE or any(x.device.type != "cpu" for x in results[1:3]):
        raise SystemExit("no speed for a wrong result")

    def measure(name: str, inputs: list[Tensor], rounds: int) -> None:
        """Print one line and append one row."""
        machine.free_bytes()
        torch.cuda.reset_peak_memory_stats()
        run, b = partial(step, losses[name], inputs), len(inputs[0])
        seconds = median(machine.time(run) for _ in range(rounds))
        rates.append(8 * b * b * d / seconds / 1e12)
        row = {"impl": "contrastile", "loss": "clip", "backend": f"triton, {name}", "b": b, "d": d, "dtype": "bfloat16"}
        row |= {"ms": round(seconds * 1e3, 2), "effective_tflops": round(rates[-1], 1)}
        row |= {"ratio": round(rates[-1] / rates[0], 4), "peak_bytes": torch.cuda.max_memory_reserved()}
        print(*[*row.values()][2:], flush=True)
        write(row | {"limit_bytes": limit, **provenance(DEVICE)})

    with results_file(options.csv, COLUMNS["host"]) as write:
        inputs = leaves(options.beside, d, 1)
        on_device = resident(inputs)
        # kernels are compiled and clocks fall before the first time that counts
        machine.time(partial(step, losses["resident"], on_device), ROUNDS)
        measure("resident", on_device, ROUNDS)
        del on_device
        step(losses["host"], inputs)
        measure("host", inputs, ROUNDS)
        ahead = 8 * options.size**2 * d / rates[-1] / 1e12
        if ahead > options.longest:
            print(f"{options.size} pairs: left out, a step would take about {ahead:,.0f} s", flush=True)
        elif options.size > options.beside:
            many = leaves(options.size, d, 3)
            # pins the memory of a step beforehand, as the steps before would in training
            pinned = [
                torch.empty(options.size, d, dtype=dtype, pin_memory=True)
                for dtype in (torch.bfloat16, torch.bfloat16, torch.float32)
            ]
            del pinned
            measure("host", many, 1)
            measure("resident", resident(inputs), ROUNDS)


if __name__ == "__main__":
    main()
