"""Two panels from a results file of steps: time per pair against batch, and peak memory against batch.

As figure 1 of Gao et al. 2021 (speed of a cached update beside accumulation) and figure 4 of Cheng et al. 2024 (a step
against its batch). Called by `contrastile bench step --figure`, and with any results file by hand.
"""

from __future__ import annotations

import csv
from pathlib import Path

from contrastile._check import wrong

Point = tuple[int, float, float]


def series(path: Path, model: str) -> dict[str, list[Point]]:
    """(batch, microseconds a pair, GiB) of every way, the latest row of each batch; without what did not fit."""
    found: dict[str, dict[int, Point]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["model"] == model and row["ms"]:
                # inputs taken from a pool are the same way, continued where others do not fit
                name = f"{row['impl']}, {row['way']}".removesuffix(", from a pool").removeprefix("plain, whole batch, ")
                name += f", sub-batch {row['sub_batch']}" if row["sub_batch"] else ""
                batch = int(row["batch"])
                point = batch, float(row["us_per_pair"]), int(row["peak_bytes"]) / 2**30
                found.setdefault(name, {})[batch] = point
    return {name: [points[batch] for batch in sorted(points)] for name, points in found.items()}


def models(path: Path) -> list[str]:
    """Those that a results file has rows of."""
    with path.open(newline="") as file:
        return sorted({row["model"] for row in csv.DictReader(file)})


def draw(source: Path, target: Path) -> None:
    """A row of two panels for each model."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = models(source)
    if not names:
        raise wrong("csv", "hold rows of steps", f"none in {source}", "Measure something first.")
    figure, rows = plt.subplots(len(names), 2, figsize=(14, 4.2 * len(names)), squeeze=False)
    for model, (left, right) in zip(names, rows, strict=True):
        for place, (name, points) in enumerate(series(source, model).items()):
            batches, times, memory = zip(*points, strict=True)
            ours = name.startswith("contrastile")
            style = {
                "marker": "o",
                "ms": 4,
                "lw": 2 if ours else 1,
                "ls": "-" if ours else "--",
                "color": f"C{place % 10}",
            }
            left.plot(batches, times, label=name, **style)
            right.plot(batches, memory, **style)
        left.set(title=f"{model}: time", ylabel="µs per pair")
        right.set(title=f"{model}: peak memory", ylabel="GiB", yscale="log")
        for panel in (left, right):
            panel.set_xscale("log", base=2)
            panel.set_xlabel("pairs per step")
            panel.grid(alpha=0.3)
        left.set_ylim(bottom=0)
        right.legend(*left.get_legend_handles_labels(), fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    # the same rows draw the same file
    with mpl.rc_context({"svg.hashsalt": "contrastile"}):
        figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    plt.close(figure)
