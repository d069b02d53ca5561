"""Two panels from a results file of steps: time per pair against batch, and peak memory against batch.

As figure 1 of Gao et al. 2021 (speed of a cached update beside accumulation) and figure 4 of Cheng et al. 2024 (a step
against its batch). Called by `contrastile bench step --figure`, and with any results file by hand.
"""

from __future__ import annotations

import csv
from pathlib import Path

from contrastile._check import wrong

Point = tuple[int, float, float]


def series(path: Path, model: str) -> tuple[int | None, dict[str, list[Point]]]:
    """A sub-batch, and (batch, microseconds a pair, GiB) of every way that uses it, or none.

    The sub-batch is the one measured at the most batches, the rows are the latest. What did not fit is left out.
    """
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == model and row["ms"]]
    batches: dict[int, set[str]] = {}
    for row in rows:
        if row["sub_batch"]:
            batches.setdefault(int(row["sub_batch"]), set()).add(row["batch"])
    sub_batch = max(batches, key=lambda one: (len(batches[one]), one), default=None)
    found: dict[str, dict[int, Point]] = {}
    for row in rows:
        if not row["sub_batch"] or int(row["sub_batch"]) == sub_batch:
            name = f"{row['impl']}, {row['way']}"
            # the same way, wherever its inputs wait
            for inputs in (", streamed", ", from a pool"):
                name = name.removesuffix(inputs)
            batch = int(row["batch"])
            found.setdefault(name, {})[batch] = batch, float(row["us_per_pair"]), int(row["peak_bytes"]) / 2**30
    return sub_batch, {name: [points[batch] for batch in sorted(points)] for name, points in found.items()}


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
        sub_batch, drawn = series(source, model)
        for place, (name, points) in enumerate(drawn.items()):
            batches, times, memory = zip(*points, strict=True)
            ours = name.startswith("contrastile")
            style = {
                # ten colours; who comes later differs by the marker
                "marker": "os^"[place // 10 % 3],
                "ms": 4,
                "lw": 2 if ours else 1,
                "ls": "-" if ours else "--",
                "color": f"C{place % 10}",
            }
            left.plot(batches, times, label=name, **style)
            right.plot(batches, memory, **style)
        of = f"{model}, sub-batch {sub_batch}" if sub_batch else model
        left.set(title=f"{of}: time", ylabel="µs per pair")
        right.set(title=f"{of}: peak memory", ylabel="GiB")
        for panel in (left, right):
            panel.set_xscale("log", base=2)
            panel.set_xlabel("pairs per step")
            panel.grid(alpha=0.3)
            panel.set_ylim(0, 1.1 * panel.dataLim.ymax)
        right.legend(*left.get_legend_handles_labels(), fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    # the same rows draw the same file
    with mpl.rc_context({"svg.hashsalt": "contrastile"}):
        figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    plt.close(figure)
