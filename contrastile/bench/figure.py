"""Two panels from a results file of steps: time per pair against batch, and peak memory against batch.

As figure 1 of Gao et al. 2021 (speed of a cached update beside accumulation) and figure 4 of Cheng et al. 2024 (a step
against its batch). Called by `contrastile bench step --figure`, and with any results file by hand.
"""

from __future__ import annotations

import csv
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contrastile._check import wrong

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# a batch, microseconds a pair, GiB, and where the inputs wait
Point = tuple[int, float, float, str]
# nearest to the device first, and how a way's name ends there
PLACES = {"device": "", "host": ", streamed", "pool": ", from a pool"}


def series(path: Path, model: str) -> tuple[int | None, dict[str, list[Point]]]:
    """A sub-batch, and the points of every way that uses it, or none.

    The sub-batch is the one measured at the most batches. A way is one line, wherever its inputs wait: of a batch the
    latest row nearest to the device. What did not fit is left out.
    """
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == model and row["ms"]]
    batches: dict[int, set[str]] = {}
    for row in rows:
        if row["sub_batch"]:
            batches.setdefault(int(row["sub_batch"]), set()).add(row["batch"])
    sub_batch = max(batches, key=lambda one: (len(batches[one]), one), default=None)
    found: dict[str, dict[int, Point]] = {}
    nearest = list(PLACES).index
    for row in rows:
        if not row["sub_batch"] or int(row["sub_batch"]) == sub_batch:
            # steps across ranks do not say; there inputs are on the device
            place, batch = row.get("inputs", "device"), int(row["batch"])
            points = found.setdefault(f"{row['impl']}, {row['way']}".removesuffix(PLACES[place]), {})
            if batch not in points or nearest(place) <= nearest(points[batch][-1]):
                points[batch] = batch, float(row["us_per_pair"]), int(row["peak_bytes"]) / 2**30, place
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
    drawn = {model: series(source, model) for model in names}
    # a way looks the same in every panel
    places = {name: place for place, name in enumerate(dict.fromkeys(chain(*(found for _, found in drawn.values()))))}
    for (model, (sub_batch, found)), (left, right) in zip(drawn.items(), rows, strict=True):
        of = f"{model}, sub-batch {sub_batch}" if sub_batch else model
        for panel, column, what, unit in ((left, 1, "time", "µs per pair"), (right, 2, "peak memory", "GiB")):
            for name, points in found.items():
                _line(panel, name, places[name], points, column)
            panel.set(title=f"{of}: {what}", ylabel=unit)
            panel.set_xscale("log", base=2)
            panel.set_xlabel("pairs per step")
            panel.grid(alpha=0.3)
            panel.set_ylim(0, 1.1 * panel.dataLim.ymax)
        far = any(point[-1] != "device" for points in found.values() for point in points)
        beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5)}
        hint = "hollow: inputs not on the device" if far else None
        right.legend(*left.get_legend_handles_labels(), title=hint, fontsize=8, title_fontsize=8, **beside)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    # the same rows draw the same file
    with mpl.rc_context({"svg.hashsalt": "contrastile"}):
        figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    plt.close(figure)


def _line(panel: Axes, name: str, place: int, points: list[Point], column: int) -> None:
    """A way's points of one column; hollow where inputs are not on the device."""
    ours = name.startswith("contrastile")
    # ten colours; who comes later differs by the marker
    style: dict[str, Any] = {"marker": "os^"[place // 10 % 3], "ms": 4, "color": f"C{place % 10}"}
    batches, values = [point[0] for point in points], [point[column] for point in points]
    panel.plot(batches, values, label=name, lw=2 if ours else 1, ls="-" if ours else "--", **style)
    far = [point for point in points if point[-1] != "device"]
    panel.plot([point[0] for point in far], [point[column] for point in far], ls="", mfc="white", zorder=3, **style)
