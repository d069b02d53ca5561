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
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile import ClipLoss
from contrastile.bench.gate import Distance, step
from contrastile.bench.harness import HOST_COLUMNS, Ledger, Machine
from contrastile.train.provenance import provenance

DEVICE = torch.device("cuda", 0)
CHUNK, ROUNDS, CHECKED = 65536, 3, 20_000
# relative distance of bf16 gradients of the same pairs, summed in another order
TOLERANCE = 5e-3


def features(b: int, d: int, seed: int) -> Tensor:
    """Return unit rows in pinned host memory, drawn on the device a chunk at a time."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    out = torch.empty(b, d, dtype=torch.bfloat16, pin_memory=True)
    for rows in out.split(CHUNK):
        rows.copy_(F.normalize(torch.randn(rows.shape, device=DEVICE, generator=generator), dim=-1))
    return out


def leaves(q: Tensor, k: Tensor, device: str = "cpu") -> list[Tensor]:
    scale = torch.tensor(100.0, device=DEVICE, requires_grad=True)
    return [*(x.detach().to(device).requires_grad_() for x in (q, k)), scale]


def check(d: int, host: ClipLoss, resident: ClipLoss) -> None:
    q, k = (features(CHECKED, d, seed) for seed in (1, 2))
    results, true = step(host, leaves(q, k)), step(resident, leaves(q, k, "cuda"))
    far = Distance.between(*([x.cpu().double() for x in several] for several in (results, true)))
    if not max(far.loss, far.gradient, far.scalar) < TOLERANCE or any(x.device.type != "cpu" for x in results[1:3]):
        raise SystemExit(f"from the host: {far} from the resident loss; no speed for a wrong result")
    print(f"from the host: {far} from the resident loss, {CHECKED} pairs", flush=True)


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
    limit, d = int(options.limit * 2**30), options.features
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), DEVICE)
    host, resident = ClipLoss(device=DEVICE, workspace=options.workspace), ClipLoss(workspace=options.workspace)
    check(d, host, resident)
    machine, rates = Machine(DEVICE, 0.0, lambda: None, 1), []

    def measure(name: str, loss: ClipLoss, inputs: list[Tensor], rounds: int) -> None:
        """Print one line and append one row."""
        machine.room()
        torch.cuda.reset_peak_memory_stats()
        seconds, b = median(machine.time(lambda: step(loss, inputs)) for _ in range(rounds)), len(inputs[0])
        rates.append(8 * b * b * d / seconds / 1e12)
        values = (b, d, "bfloat16", round(seconds * 1e3, 2), round(rates[-1], 1), round(rates[-1] / rates[0], 4))
        peak, origin = torch.cuda.max_memory_reserved(), provenance(DEVICE).values()
        row = ("contrastile", "clip", f"triton, {name}", *values, peak, limit, *origin)
        print(*row[2:10], flush=True)
        if ledger is not None:
            ledger.write(dict(zip(HOST_COLUMNS, row, strict=True)))

    with Ledger(options.csv, HOST_COLUMNS) if options.csv else nullcontext() as ledger:
        q, k = (features(options.beside, d, seed) for seed in (1, 2))
        on_device, on_host = leaves(q, k, "cuda"), leaves(q, k)
        # kernels are compiled and clocks fall before the first time that counts
        machine.time(partial(step, resident, on_device), ROUNDS)
        measure("resident", resident, on_device, ROUNDS)
        del on_device
        step(host, on_host)
        measure("host", host, on_host, ROUNDS)
        ahead = 8 * options.size**2 * d / rates[-1] / 1e12
        if ahead > options.longest:
            print(f"{options.size} pairs: left out, a step would take about {ahead:,.0f} s", flush=True)
        elif options.size > options.beside:
            many = leaves(*(features(options.size, d, seed) for seed in (3, 4)))
            # pins the memory of a step beforehand, as the steps before would in training
            types = (q.dtype, q.dtype, torch.float32)
            rooms = [torch.empty(options.size, d, dtype=dtype, pin_memory=True) for dtype in types]
            del rooms
            measure("host", host, many, 1)
            measure("resident", resident, leaves(q, k, "cuda"), ROUNDS)


if __name__ == "__main__":
    main()
