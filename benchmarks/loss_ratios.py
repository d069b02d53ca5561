"""How long each loss takes beside `ClipLoss`, forward and backward, timed in the same rounds; and how exact it is.

The script behind the table of losses in docs/kernels.md. Needs a CUDA device, and takes two minutes on an H200:

    python benchmarks/loss_ratios.py --out FOLDER [--sizes 8192 32768 65536] [--features 512 768] [--losses gist ...]

Every loss is compared with float64 first, on few rows. Kernels are compiled by processes side by side, one for each
loss, because a compiler keeps one core busy for seconds. Rows go to FOLDER/losses.csv. A size is left out if the budget
of seconds is spent before it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from contrastile.bench.gate import SUBJECTS, Gate, problem, step
from contrastile.bench.harness import COLUMNS, Machine, Table, results_file
from contrastile.bench.loss import WORKSPACE, Result
from contrastile.bench.peers import ANY_NUMBER, Case, Contestant
from contrastile.tiles.triton import plan

CLIP = "clip"
# shapes of tiles in which a teacher's products and the student's fit the registers together
SHAPES = {
    "8 warps": plan.Shape(warps=8, programs=1, stages=4, truncation=2.0**-30),
    "64 columns": plan.Shape(cols=64, stages=4, truncation=2.0**-30),
}
# sizes at which eager tiles are timed too, and the losses that fused kernels once declined
EAGER, DECLINED = (32768, 512), ("gist", "distill", "balanced", "inside")
# rows of a step that compiles the kernels
FEW_ROWS = 512
TABLE = Table(
    *(("loss", "loss", "9"), ("backend", "backend", "8"), ("b", "b", ">6"), ("d", "d", ">4"), ("ms", "ms", ">8.2f")),
    *(("times_clip", "/ clip", ">7.2f"), ("ratio", "ratio", ">6.3f"), ("peak_bytes", "MiB", ">7,.0f")),
    *(("peak_to_clip", "/ clip", ">7.2f"), ("loss_distance", "loss", ">8.0e")),
    *(("gradient_distance", "gradient", ">8.0e"), ("red", "gate", "")),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the folder of the results")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8192, 32768, 65536])
    parser.add_argument("--features", type=int, nargs="+", default=[512, 768])
    parser.add_argument("--losses", nargs="+", choices=SUBJECTS, default=[name for name in SUBJECTS if name != "own"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=0.2, help="of each loss and size, at least one round")
    parser.add_argument("--budget", type=float, default=110.0, help="seconds after which no further size begins")
    parser.add_argument("--shape", choices=SHAPES, help="of the tiles, for a comparison of shapes")
    parser.add_argument("--warm", metavar="LOSS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device, started = torch.device(options.device), time.monotonic()
    if options.shape:
        plan.SHAPES.update(dict.fromkeys(plan.SHAPES, SHAPES[options.shape]))
    if options.warm:
        warm(options.warm, options.dtype, device)
        return 0
    names = [CLIP, *[name for name in options.losses if name != CLIP]]
    if device.type == "cuda":
        compile_all(names, options.dtype, ["--shape", options.shape] if options.shape else [])
        print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
    machine, gates = Machine.of(device, options.seconds), {}
    for name, d in product(names, options.features[:1]):
        case = Case(name, max(options.sizes), d, options.dtype)
        gate = Gate(case, device)
        try:
            distance = gate.distance(module(name, device, "triton"))
            gates[name] = distance, gate.red(distance) or "passed"
        except Exception as error:
            gates[name] = None, f"{type(error).__name__}: {str(error)[:200]}"
        print(f"{name}: {gates[name][1]}", flush=True)
    print(f"checked after {time.monotonic() - started:.0f} s\n{TABLE.header()}", flush=True)
    path = None if options.out is None else options.out / "losses.csv"
    with results_file(path, COLUMNS["losses"]) as write:
        for b, d in product(options.sizes, options.features):
            if time.monotonic() - started > options.budget:
                print(f"{b} x {d} is left out: {options.budget:.0f} s are spent")
                continue
            timed = [name for name in names if gates[name][0] is not None]
            for row in measured(timed, b, d, options.dtype, machine, gates):
                print(TABLE.line(row), flush=True)
                write(row)
    print(f"{time.monotonic() - started:.0f} s in all")
    return 0 if all(verdict == "passed" for _, verdict in gates.values()) else 1


def module(name: str, device: torch.device, backend: str) -> torch.nn.Module:
    """Return a loss of the library; on a CPU always in eager tiles."""
    how: dict[str, Any] = {"backend": backend if device.type == "cuda" else "eager"}
    if device.type == "cuda":
        how["workspace"] = WORKSPACE
    return SUBJECTS[name].module(**how)


def warm(name: str, dtype: str, device: torch.device) -> None:
    """Compile the kernels of a loss into Triton's cache."""
    step(module(name, device, "triton"), problem(Case(name, FEW_ROWS, 512, dtype), device))


def compile_all(names: list[str], dtype: str, shape: list[str]) -> None:
    """Compile every loss's kernels, each in a process of its own; the first one's small kernels serve the others."""
    script = [sys.executable, __file__, "--dtype", dtype, *shape, "--warm"]
    subprocess.run([*script, names[0]], check=True)
    for process in [subprocess.Popen([*script, name]) for name in names[1:]]:
        process.wait()


def measured(
    names: list[str], b: int, d: int, dtype: str, machine: Machine, gates: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return a row of each loss, timed in interleaved rounds, with its time and its peak memory over `ClipLoss`'s."""
    device, contestants, steps, peaks = machine.device, {}, {}, {}
    # q and k of all losses are the same tensors
    q, k, *_ = problem(Case(CLIP, b, d, dtype), device)
    eager = DECLINED if (b, d) == EAGER and device.type == "cuda" else ()
    for name, backend in [*[(name, "triton") for name in names], *[(name, "eager") for name in names if name in eager]]:
        numbers = problem(Case(name, 8, d, dtype), device)[2:]
        loss, label = module(name, device, backend), f"{name}, {backend}"
        run = partial(step, loss, [q, k, *numbers])
        # the first call makes further inputs, and workspaces of libraries
        run()
        contestants[label] = name, Contestant("contrastile", backend, {name: loss}, most_rows=ANY_NUMBER)
        steps[label], peaks[label] = run, machine.peak(run)
    timings, rows = machine.race(steps), []
    clip = timings[f"{CLIP}, triton"]
    for label, (name, one) in contestants.items():
        distance, verdict = gates[name]
        result = Result(Case(name, b, d, dtype), one, distance, peaks[label], timing=timings[label])
        rows.append(
            result.row(device)
            | {"times_clip": timings[label].ms / clip.ms, "peak_to_clip": peaks[label] / peaks[f"{CLIP}, triton"]}
            | {"red": "" if verdict == "passed" else verdict[:60]}
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
