"""Time and memory of the losses on this machine's CPU, beside what people run today.

    python benchmarks/cpu_loss.py [--csv benchmarks/results/cpu_loss.csv] [--sizes 4096 8192] [--features 128]

Every implementation is timed in one process, in turn, and compared by the median of the ratios within each round: a
shared machine drifts, a ratio does not. Memory is the growth of the resident peak in a process of its own. Nothing is
timed before its loss and gradients have been compared with float64.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile import ClipLoss, InfoNCELoss, SigLipLoss
from contrastile.losses.dense import dense_clip, dense_sigmoid, dense_softmax

ROUNDS = 7
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def torch_chunked(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """torch's own chunked cross-entropy, called once for each direction."""
    target = torch.arange(len(q))
    options = torch.nn.LinearCrossEntropyOptions()
    one = F.linear_cross_entropy(scale * q, k, target, options=options)
    return (one + F.linear_cross_entropy(scale * k, q, target, options=options)) / 2


LOSSES: dict[str, dict[str, Loss]] = {
    "clip": {"dense formula": dense_clip, "contrastile": ClipLoss()},
    "siglip": {
        "dense formula": lambda q, k, scale: dense_sigmoid(q, k, scale, -10.0),
        "contrastile": lambda q, k, scale: siglip(q, k, scale, -10.0),
    },
    "infonce": {"dense formula": dense_softmax, "contrastile": InfoNCELoss()},
}
siglip = SigLipLoss()
if hasattr(F, "linear_cross_entropy"):
    LOSSES["clip"]["torch linear_cross_entropy, twice"] = torch_chunked
TRUTH: dict[str, Loss] = {
    "clip": dense_clip,
    "siglip": lambda q, k, scale: dense_sigmoid(q, k, scale, -10.0),
    "infonce": dense_softmax,
}
# per b² · d: logits once forward, and once more backward beside the products with either side
OPERATIONS = 8


def problem(b: int, d: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sides = [F.normalize(torch.randn(b, d, generator=generator, dtype=torch.float64), dim=-1) for _ in range(2)]
    return [x.to(dtype).requires_grad_() for x in (*sides, torch.tensor(20.0))]


def step(loss: Loss, leaves: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    value = loss(*leaves)
    return value.detach(), torch.autograd.grad(value, leaves)


def check(name: str, impl: str) -> float:
    """The largest relative distance to float64 of the loss and its gradients; raises when it is more than rounding."""
    value, gradients = step(LOSSES[name][impl], problem(1000, 96))
    truth, true_gradients = step(TRUTH[name], problem(1000, 96, torch.float64))
    pairs = zip((value, *gradients), (truth, *true_gradients), strict=True)
    worst = max(float((x - t).norm() / t.norm()) for x, t in pairs)
    if not worst < 1e-5:
        raise SystemExit(f"{impl}, {name}: {worst:.1e} from float64; no speed is printed on a wrong result")
    return worst


def times(name: str, b: int, d: int) -> dict[str, tuple[float, float]]:
    """Milliseconds, and the ratio to the dense formula's in the same round: medians over rounds."""
    leaves = problem(b, d)
    rounds: list[dict[str, float]] = []
    for _ in range(ROUNDS + 1):
        taken = {}
        for impl, loss in LOSSES[name].items():
            start = time.perf_counter()
            step(loss, leaves)
            taken[impl] = (time.perf_counter() - start) * 1e3
        rounds.append(taken)
    # the first round loads and allocates
    rounds = rounds[1:]
    return {
        impl: (
            statistics.median(taken[impl] for taken in rounds),
            statistics.median(taken["dense formula"] / taken[impl] for taken in rounds),
        )
        for impl in LOSSES[name]
    }


def resident_peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def peak_bytes(name: str, impl: str, b: int, d: int) -> int:
    command = [sys.executable, __file__, "--peak", name, impl, str(b), str(d)]
    # memory that was freed goes back to the system, and is not counted as room for what follows
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


def print_peak(name: str, impl: str, b: int, d: int) -> None:
    step(LOSSES[name][impl], problem(600, d))
    leaves = problem(b, d)
    # from here on the peak counts anew
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_peak()
    step(LOSSES[name][impl], leaves)
    print(resident_peak() - before)


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        name, impl, b, d = options.peak
        print_peak(name, impl, int(b), int(d))
        return
    rows = []
    print(f"{'loss':8} {'b':>6} {'implementation':34} {'ms':>8} {'times dense':>12} {'extra MB':>9} {'float64':>8}")
    for name in LOSSES:
        errors = {impl: check(name, impl) for impl in LOSSES[name]}
        for b in options.sizes:
            for impl, (ms, speed) in times(name, b, options.features).items():
                peak = peak_bytes(name, impl, b, options.features)
                print(f"{name:8} {b:6} {impl:34} {ms:8.0f} {speed:12.2f} {peak / 1e6:9.0f} {errors[impl]:8.0e}")
                rows.append(
                    {
                        "impl": impl,
                        "loss": name,
                        "backend": "eager" if impl == "contrastile" else "",
                        "b": b,
                        "d": options.features,
                        "dtype": "float32",
                        "world": 1,
                        "ms": round(ms, 1),
                        "effective_tflops": round(OPERATIONS * b * b * options.features / ms / 1e9, 4),
                        "ratio": round(speed, 3),
                        "peak_bytes": peak,
                        "chip": f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
                        "versions": f"torch {torch.__version__}, python {platform.python_version()}",
                        "date": date.today().isoformat(),
                        "commit": commit(),
                    }
                )
    if options.csv:
        options.csv.parent.mkdir(parents=True, exist_ok=True)
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
