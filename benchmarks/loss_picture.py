"""The picture of the README, from a results file: memory and time of a loss against its batch, ours and the formula.

python benchmarks/loss_picture.py
"""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "benchmarks" / "results" / "h200_loss.csv"
TARGET = ROOT / "docs" / "h200_loss.png"
FEATURES = "512"
# rows of the file as (impl, backend), their name and colour
LINES = {
    ("dense", "autocast"): ("plain formula, under autocast", "tab:gray"),
    ("contrastile", "triton"): ("contrastile", "tab:blue"),
}
# memory of an H200
LIMIT_GIB = 139.8


def points(impl: str, backend: str) -> list[tuple[int, float, float]]:
    """Batch, milliseconds and GiB; of several rows of one batch the latest."""
    wanted = {"impl": impl, "backend": backend, "loss": "clip", "d": FEATURES, "dtype": "bfloat16"}
    with SOURCE.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if all(row[key] == value for key, value in wanted.items())]
    latest = {int(row["b"]): (float(row["ms"]), int(row["peak_bytes"]) / 2**30) for row in rows}
    return [(b, *latest[b]) for b in sorted(latest)]


def label(b: float) -> str:
    return f"{b / 2**20:g}M" if b >= 2**20 else f"{b / 2**10:g}k"


def main() -> None:
    figure, (memory, time) = pyplot.subplots(1, 2, figsize=(8.4, 3.0), layout="constrained")
    for way, (name, colour) in LINES.items():
        batches, milliseconds, gib = zip(*points(*way), strict=True)
        memory.plot(batches, gib, "o-", color=colour, label=name)
        time.plot(batches, milliseconds, "o-", color=colour, label=name)
    memory.axhline(LIMIT_GIB, color="tab:red", linestyle="--", linewidth=1, label="memory of the GPU")
    memory.set_title("memory beside the features, GiB", fontsize=10)
    time.set_title("forward and backward, milliseconds", fontsize=10)
    for axes in (memory, time):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = [2**power for power in range(12, 23, 2)]
        axes.set_xticks(ticks, [label(b) for b in ticks])
        axes.set_xlabel("pairs per batch")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(TARGET, dpi=96, metadata={"Software": None})


if __name__ == "__main__":
    main()
