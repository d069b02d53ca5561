"""A loss whose features wait in host memory: its rate on one GPU beside the same loss with everything resident.

    python benchmarks/host_features.py [--size 4194304] [--beside 262144] [--limit 16] [--csv FILE]

The process may allocate `--limit` GiB of the device (torch.cuda.set_per_process_memory_fraction). First loss and
gradients from the host are compared with those of resident features on a small batch; then `ClipLoss`, forward and
backward, is timed in bf16: resident and from the host at `--beside` pairs, which fit, and from the host at `--size`
pairs, of which features and float32 gradients alone take more than the limit. The rate is 8 · b² · d / time, `ratio`
that of the resident loss, measured before and after. A step of 4 194 304 pairs of 768 features is 1.1e17 operations:
minutes. Host memory: features, their gradients, and one side's gradient in float32, about 36 GiB then, pinned, of
which the allocator rounds each piece up to a power of two.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile import ClipLoss

DEVICE = torch.device("cuda", 0)
BLOCK = 65536
ROUNDS = 3
CHECKED = 20_000
# bf16 gradients of the same pairs, summed in another order
TOLERANCE = 5e-3


def features(b: int, d: int, seed: int) -> Tensor:
    """Unit rows in pinned host memory, drawn on the device some at a time."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    out = torch.empty(b, d, dtype=torch.bfloat16, pin_memory=True)
    for rows in out.split(BLOCK):
        rows.copy_(F.normalize(torch.randn(rows.shape, device=DEVICE, generator=generator), dim=-1))
    return out


def step(loss: ClipLoss, q: Tensor, k: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves = [q.detach().requires_grad_(), k.detach().requires_grad_()]
    scale = torch.tensor(100.0, device=DEVICE, requires_grad=True)
    value = loss(*leaves, scale)
    return value.detach(), torch.autograd.grad(value, [*leaves, scale])


def distance(x: Tensor, truth: Tensor) -> float:
    x, truth = x.cpu().double(), truth.cpu().double()
    return float((x - truth).norm() / truth.norm())


def check(d: int, host: ClipLoss, resident: ClipLoss) -> None:
    q, k = (features(CHECKED, d, seed) for seed in (1, 2))
    value, found = step(host, q, k)
    truth, true = step(resident, q.to(DEVICE), k.to(DEVICE))
    worst = max(distance(x, t) for x, t in zip((value, *found), (truth, *true), strict=True))
    if not worst < TOLERANCE or any(x.device.type != "cpu" for x in found[:2]):
        raise SystemExit(f"from the host: {worst:.1e} from the resident loss; no speed on a wrong result")
    print(f"from the host: {worst:.0e} from the resident loss, {CHECKED} pairs", flush=True)


def pinned_before(b: int, d: int) -> None:
    """Lets the host's allocator pin what a step will want, as the steps before it would have in training."""
    rooms = [torch.empty(b, d, dtype=dtype, pin_memory=True) for dtype in (torch.bfloat16,) * 2 + (torch.float32,)]
    del rooms


def milliseconds(loss: ClipLoss, q: Tensor, k: Tensor, rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(loss, q, k)
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - start) * 1e3)
    return sorted(taken)[len(taken) // 2]


def note(path: Path | None, row: dict[str, object]) -> None:
    """Writes a row behind those that are there, at once: what comes next may take minutes, or fail."""
    if path is None:
        return
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, row, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


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
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, options.limit * 2**30 / total), DEVICE)
    d = options.features
    host, resident = ClipLoss(device=DEVICE, workspace=options.workspace), ClipLoss(workspace=options.workspace)
    check(d, host, resident)
    rates: list[float] = []

    def measure(name: str, loss: ClipLoss, q: Tensor, k: Tensor, rounds: int) -> float:
        """Prints and notes one line; returns effective TFLOP/s."""
        b = len(q)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        ms = milliseconds(loss, q, k, rounds)
        rate, peak = 8 * b * b * d / ms / 1e9, torch.cuda.max_memory_reserved()
        rates.append(rate)
        ratio = rate / rates[0]
        print(
            f"{name:9} b {b:8} d {d} {ms:10.1f} ms {rate:6.1f} TFLOP/s {ratio:.3f} {peak / 2**30:5.2f} GiB", flush=True
        )
        note(options.csv, {
            "impl": "contrastile", "loss": "clip", "backend": f"triton, {name}", "b": b, "d": d, "dtype": "bfloat16",
            "ms": round(ms, 2), "effective_tflops": round(rate, 1), "ratio": round(ratio, 4), "peak_bytes": peak,
            "limit_bytes": int(options.limit * 2**30), "chip": torch.cuda.get_device_name(),
            "versions": f"torch {torch.__version__}", "date": date.today().isoformat(),
            "commit": os.environ.get("COMMIT", ""),
        })  # fmt: skip
        return rate

    q, k = (features(options.beside, d, seed) for seed in (1, 2))
    on_device = q.to(DEVICE), k.to(DEVICE)
    # kernels are compiled, and clocks fall, before the first time that counts
    milliseconds(resident, *on_device, ROUNDS)
    measure("resident", resident, *on_device, ROUNDS)
    del on_device
    milliseconds(host, q, k, 1)
    rate = measure("host", host, q, k, ROUNDS)
    ahead = 8 * options.size**2 * d / rate / 1e12
    if ahead > options.longest:
        print(f"{options.size} pairs: left out, a step would take about {ahead:,.0f} s", flush=True)
    elif options.size > options.beside:
        print(f"{options.size} pairs: about {ahead:,.0f} s from when their features lie there", flush=True)
        many = [features(options.size, d, seed) for seed in (3, 4)]
        pinned_before(options.size, d)
        measure("host", host, *many, 1)
        measure("resident", resident, q.to(DEVICE), k.to(DEVICE), ROUNDS)


if __name__ == "__main__":
    main()
