"""The figures of results files: steps per model, time per pair and peak memory against the batch; memory of losses.

Compare figure 1 of Gao et al. 2021 (speed of a cached update beside accumulation), and figures 4 (a step against its
batch) and 1 (memory of the loss) of Cheng et al. 2024. Called by `contrastile bench step` and `memory` with `--figure`.
"""

from pathlib import Path
from typing import Any

from contrastile._errors import invalid
from contrastile.bench.harness import read_rows
from contrastile.bench.ways import PLACES

# batch, microseconds per pair, GiB, and the place of the inputs
Point = tuple[int, float, float, str]
# a panel's title, unit, points by way, and their column
Panel = tuple[str, str, dict[str, list[Point]], int]


def series(rows: list[dict[str, str]], model: str) -> tuple[int | None, dict[str, list[Point]]]:
    """Return the sub-batch measured at the most batches, and the points of every way that uses it, or none.

    A way is one line in all places of its inputs: per batch the latest row nearest to the device. Rows of steps that
    did not fit are left out.
    """
    rows = [row for row in rows if row["model"] == model and row["ms"]]
    batches: dict[int, set[str]] = {}
    for row in rows:
        if row["sub_batch"]:
            batches.setdefault(int(row["sub_batch"]), set()).add(row["batch"])
    sub_batch = max(batches, key=lambda one: (len(batches[one]), one), default=None)
    lines: dict[str, dict[int, Point]] = {}
    nearest = list(PLACES).index
    for row in rows:
        if not row["sub_batch"] or int(row["sub_batch"]) == sub_batch:
            # rows of steps across ranks have no column of inputs, which are on the device
            place, batch = row.get("inputs", "device"), int(row["batch"])
            name = f"{row['impl']}, {row['way']}".removesuffix(f", {PLACES[place]}")
            points = lines.setdefault(name, {})
            if batch not in points or nearest(place) <= nearest(points[batch][-1]):
                points[batch] = batch, float(row["us_per_pair"]), int(row["peak_bytes"]) / 2**30, place
    return sub_batch, {name: [points[batch] for batch in sorted(points)] for name, points in lines.items()}


def draw(source: Path, target: Path) -> None:
    """Draw a row of two panels for each model; the same rows draw the same file."""
    rows, panels = read_rows(source), list[list[Panel]]()
    for model in sorted({row["model"] for row in rows}):
        sub_batch, lines = series(rows, model)
        title = f"{model}, sub-batch {sub_batch}" if sub_batch else model
        panels.append([(f"{title}: time", "µs per pair", lines, 1), (f"{title}: peak memory", "GiB", lines, 2)])
    if not panels:
        raise invalid("csv", "hold rows of steps", f"none in {source}", "Measure something first.")
    _draw(panels, "pairs per step", target)


def draw_memory(source: Path, target: Path) -> None:
    """Draw a panel for each size of the world: bytes of a rank's loss against the pairs of all ranks."""
    # of rows measured again the newest one
    peaks: dict[str, dict[str, dict[int, Point]]] = {}
    for row in read_rows(source):
        if row["peak_bytes"]:
            points = peaks.setdefault(row["world"], {}).setdefault(f"{row['impl']}, {row['way']}", {})
            points[int(row["b"])] = int(row["b"]), 0.0, int(row["peak_bytes"]) / 2**30, "device"
    if not peaks:
        raise invalid("csv", "hold rows of memory", f"none in {source}", "Measure something first.")
    panels = []
    for world, ways in peaks.items():
        lines = {name: [points[b] for b in sorted(points)] for name, points in ways.items()}
        panels.append((f"a rank of {world}", "GiB beside the features", lines, 2))
    _draw([panels], "pairs of all ranks", target, logarithmic=True)


def _draw(grid: list[list[Panel]], xlabel: str, target: Path, *, logarithmic: bool = False) -> None:
    """Draw rows of panels with a legend behind each; a way looks the same in every panel."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    names = dict.fromkeys(name for row in grid for _, _, lines, _ in row for name in lines)
    styles = {name: at for at, name in enumerate(names)}
    figure = Figure(figsize=(5 * len(grid[0]) + 4, 4.2 * len(grid)))
    subplots = figure.subplots(len(grid), len(grid[0]), squeeze=False, sharey=logarithmic)
    for row, several in zip(grid, subplots, strict=True):
        for (title, unit, lines, column), axes in zip(row, several, strict=True):
            axes.set(title=title, ylabel=unit, xlabel=xlabel)
            _lines(axes, lines, styles, column)
            if logarithmic:
                axes.set_yscale("log")
                axes.label_outer()
            else:
                axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
        hollow = any(point[-1] != "device" for points in row[0][2].values() for point in points)
        beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5), "fontsize": 8}
        beside |= {"title": "hollow: inputs not on the device" if hollow else None, "title_fontsize": 8}
        several[-1].legend(*several[0].get_legend_handles_labels(), **beside)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": "contrastile"}):
        figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    if target.suffix == ".png":
        # a palette takes a quarter of the bytes
        from PIL import Image

        image = Image.open(target).convert("RGB").quantize(128, dither=Image.Dither.NONE)
        image.save(target, optimize=True)


def _lines(panel: Any, lines: dict[str, list[Point]], styles: dict[str, int], column: int) -> None:
    """Draw one column of the ways' points; hollow where inputs are not on the device."""
    for name, points in lines.items():
        ours, at = name.startswith("contrastile"), styles[name]
        # ten colours; later ways differ by the marker
        style: dict[str, Any] = {"marker": "os^"[at // 10 % 3], "ms": 4, "color": f"C{at % 10}"}
        batches, values = [point[0] for point in points], [point[column] for point in points]
        panel.plot(batches, values, label=name, lw=2 if ours else 1, ls="-" if ours else "--", **style)
        far = [point for point in points if point[-1] != "device"]
        panel.plot([point[0] for point in far], [point[column] for point in far], ls="", mfc="white", zorder=3, **style)
    panel.set_xscale("log", base=2)
    panel.grid(alpha=0.3)
