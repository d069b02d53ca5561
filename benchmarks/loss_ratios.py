"""How long each loss takes beside `ClipLoss`, forward and backward, timed in the same rounds; and how exact it is.

The script behind the table of losses in docs/kernels.md. Needs a CUDA device, and takes two minutes on an H200:

    python benchmarks/loss_ratios.py --out FOLDER [--sizes 32768 ...] [--features 512 768] [--losses gist ...]

Kernels are compiled by processes side by side, one for each loss, because a compiler keeps one core busy for seconds.
Every loss is compared with float64 last, on few rows. Rows go to FOLDER/losses.csv. What would begin after the budget
of seconds is left out.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from contrastile.bench.gate import SUBJECTS, Distance, Gate, problem, step
from contrastile.bench.harness import COLUMNS, Machine, Table, results_file
from contrastile.bench.loss import WORKSPACE, Result
from contrastile.bench.peers import ANY_NUMBER, Case, Contestant

CLIP = "clip"
# supcon_in compares twice the rows with twice the columns: four times the work of the others
LOSSES = ("siglip", "infonce", "dcl", "dclw", "hardness", "gist", "distill", "siglip_balanced", "supcon_in")
# sizes at which eager tiles are timed too, and the losses that fused kernels once declined
EAGER, DECLINED = (32768, 512), ("gist", "distill", "siglip_balanced")
# rows of a step that compiles the kernels
FEW_ROWS = 512
TABLE = Table(
    *(("loss", "loss", "15"), ("backend", "backend", "10"), ("b", "b", ">6"), ("d", "d", ">4"), ("ms", "ms", ">8.2f")),
    *(("times_clip", "/ clip", ">7.2f"), ("ratio", "ratio", ">6.3f"), ("peak_bytes", "MiB", ">7,.0f")),
    ("peak_to_clip", "/ clip", ">7.2f"),
)
UNKNOWN = Distance(math.nan, math.nan, math.nan)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the folder of the results")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32768, 65536, 8192])
    parser.add_argument("--features", type=int, nargs="+", default=[512, 768])
    parser.add_argument("--losses", nargs="+", choices=SUBJECTS, default=[*LOSSES])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=0.2, help="of each loss and size, at least one round")
    parser.add_argument("--budget", type=float, default=110.0, help="seconds after which nothing further begins")
    parser.add_argument("--warm", metavar="LOSS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device, started = torch.device(options.device), time.monotonic()
    if options.warm:
        warm(options.warm, options.dtype, device)
        return 0

    def spent() -> float:
        return time.monotonic() - started

    names = [CLIP, *[name for name in options.losses if name != CLIP]]
    if device.type == "cuda":
        compile_all(names, options.dtype)
        print(f"compiled after {spent():.0f} s", flush=True)
    machine = Machine.of(device, options.seconds)
    print(TABLE.header(), flush=True)
    path = None if options.out is None else options.out / "losses.csv"
    with results_file(path, COLUMNS["losses"]) as write:
        for b, d in product(options.sizes, options.features):
            if spent() > options.budget:
                print(f"{b} x {d} is left out: {options.budget:.0f} s are spent")
                continue
            for row in measured(names, b, d, options.dtype, machine):
                print(TABLE.line(row), flush=True)
                write(row)
    print(f"timed after {spent():.0f} s", flush=True)
    verdicts = [checked(name, options, device) if spent() < options.budget else "left out" for name in names]
    for name, verdict in zip(names, verdicts, strict=True):
        print(f"{name}: {verdict}")
    print(f"{spent():.0f} s in all")
    return 0 if all(verdict == "passed" for verdict in verdicts) else 1


def checked(name: str, options: argparse.Namespace, device: torch.device) -> str:
    """Return "passed", or a sentence on a loss that is further from float64 than rounding explains."""
    gate = Gate(Case(name, max(options.sizes), options.features[0], options.dtype), device)
    try:
        return gate.red(gate.distance(module(name, device, "triton"))) or "passed"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def module(name: str, device: torch.device, backend: str) -> torch.nn.Module:
    """Return a loss of the library; on a CPU always in eager tiles."""
    how: dict[str, Any] = {"backend": backend if device.type == "cuda" else "eager"}
    if device.type == "cuda":
        how["workspace"] = WORKSPACE
    return SUBJECTS[name].module(**how)


def warm(name: str, dtype: str, device: torch.device) -> None:
    """Compile the kernels of a loss into Triton's cache."""
    step(module(name, device, "triton"), problem(Case(name, FEW_ROWS, 512, dtype), device))


def compile_all(names: list[str], dtype: str) -> None:
    """Compile every loss's kernels, each in a process of its own."""
    script = [sys.executable, __file__, "--dtype", dtype, "--warm"]
    for process in [subprocess.Popen([*script, name]) for name in names]:
        process.wait()


def measured(names: list[str], b: int, d: int, dtype: str, machine: Machine) -> list[dict[str, Any]]:
    """Return a row of each loss, timed in interleaved rounds, with its time and its peak memory over `ClipLoss`'s."""
    device, losses, steps, peaks = machine.device, {}, {}, {}
    # q and k of all losses are the same tensors
    q, k, *_ = problem(Case(CLIP, b, d, dtype), device)
    eager = DECLINED if (b, d) == EAGER and device.type == "cuda" else ()
    for name, backend in [*[(name, "triton") for name in names], *[(name, "eager") for name in names if name in eager]]:
        numbers = problem(Case(name, 8, d, dtype), device)[2:]
        loss, label = module(name, device, backend), f"{name}, {backend}"
        run = partial(step, loss, [q, k, *numbers])
        # the first call makes further inputs, and workspaces of libraries
        run()
        losses[label], steps[label], peaks[label] = (name, backend, loss), run, machine.peak(run)
    timings = machine.race(steps)
    clip, rows = f"{CLIP}, triton", []
    for label, (name, backend, loss) in losses.items():
        one = Contestant("contrastile", backend, {name: loss}, most_rows=ANY_NUMBER)
        row = Result(Case(name, b, d, dtype), one, UNKNOWN, peaks[label], timing=timings[label]).row(device)
        ratios = {"times_clip": timings[label].ms / timings[clip].ms, "peak_to_clip": peaks[label] / peaks[clip]}
        rows.append(row | ratios)
    return rows


if __name__ == "__main__":
    sys.exit(main())
