"""Figures of the report: the steps of metrics.jsonl as columns of numbers, drawn with matplotlib as SVG.

Text stays text and colours are variables of the page's style, so a figure fits light and dark screens.
"""

import io
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, product
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from contrastile._errors import logger

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# placeholder colours for matplotlib, and the variables of the page's style that replace them
INK, SOFT, FAINT = "#010203", "#020103", "#030201"
VARIABLES = {INK: "var(--ink)", SOFT: "var(--soft)", FAINT: "var(--line)"}
COLOURS = ("#3f7fc4", "#d97b29", "#4a9c6d", "#a26bb5")
# letters of a legend of one line
LEGEND = 44

Column = npt.NDArray[np.float64]
Curve = tuple[list[float], list[float]]
# values of a step that the page draws, and the parts of its time, which earlier versions did not write
VALUES = ("examples", "batch", "planned", "loss", "scale", "learning_rate", "seconds")
PARTS = ("data", "loss", "optimizer", "towers")


class StepColumns:
    """Columns of the steps of a run by name; `shares`: of the parts of a step's time, for the rows `timed` alone.

    others: the lines of measurements. As dictionaries the lines of 300,000 steps would fill 700 MB, as columns 30.
    """

    def __init__(self, lines: Iterable[dict[str, Any]]) -> None:
        numbers, incomplete = array("d"), 0
        self.others: list[dict[str, Any]] = []
        for line in lines:
            if line.get("kind") in ("probe", "test"):
                self.others.append(line)
            elif line.get("kind") == "step":
                shares, absent = line.get("shares") or {}, 0.0 if line.get("shares") else math.nan
                values = [*map(line.get, VALUES), *(shares.get(part, absent) for part in PARTS)]
                try:
                    numbers.extend([*map(float, values)])
                except (TypeError, ValueError):
                    incomplete += 1
        if incomplete:
            logger.warning("%d steps of the metrics lack values and are left out", incomplete)
        columns = np.array(numbers).reshape(-1, len(VALUES) + len(PARTS)).T.copy()
        self.columns: dict[str, Column] = dict(zip(VALUES, columns, strict=False))
        shares = columns[len(VALUES) :]
        self.timed = np.flatnonzero(~np.isnan(shares[0]))
        self.shares = {part: share for part, share in zip(PARTS, shares[:, self.timed], strict=True) if share.any()}

    def __len__(self) -> int:
        return len(self.columns["examples"])

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    @property
    def full(self) -> int:
        """The number of steps without a short last one, whose loss has fewer negatives."""
        short = len(self) > 1 and self["batch"][-1] < self["planned"][-1]
        return len(self) - short

    @property
    def stages(self) -> list[tuple[float, str]]:
        """The begin of each batch size, and its name; a short last step is no stage."""
        firsts = _firsts(self["planned"])
        begins = (self["examples"] - self["batch"])[firsts].tolist()
        return [(begin, f"batch {size:,.0f}") for begin, size in zip(begins, self["planned"][firsts], strict=True)]

    def averaged(self, values: Column, rows: Any = slice(None), points: int = 200) -> Curve:
        """`values` of the steps `rows` over examples seen: means of `points` equal intervals at most.

        A gap stands where the batch size changes.
        """
        seen, planned = self["examples"][rows], self["planned"][rows]
        firsts = _firsts(planned, np.floor(seen / (seen[-1] / points)))
        counts = np.diff([*firsts, len(seen)])
        means = [np.add.reduceat(column, firsts) / counts for column in (seen, values)]
        curve: Curve = ([], [])
        before = planned[0]
        for size, *point in zip(planned[firsts], *means, strict=True):
            if size != before:
                curve[0].append(curve[0][-1])
                curve[1].append(math.nan)
            before = size
            for axis, value in zip(curve, point, strict=True):
                axis.append(float(value))
        return curve


def _firsts(*columns: Column) -> npt.NDArray[np.int64]:
    """The rows at which a value of any column differs from the row before, the first row included."""
    changes = np.zeros(len(columns[0]), dtype=bool)
    changes[:1] = True
    for column in columns:
        changes[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(changes)


def curves(
    lines: Mapping[str, Curve], *, title: str, stages: Sequence[tuple[float, str]], unit: str = "pairs",
    percent: bool = False, under: Mapping[str, Curve] | None = None,
) -> str:  # fmt: skip
    """An SVG of `lines` over the examples seen. stages: begin and name of each batch size. under: dashed lines."""
    import matplotlib

    under = under or {}
    # a name from the data may hold dollar signs, which begin a formula
    with matplotlib.rc_context({"text.parse_math": False}):
        figure, axes = _canvas(title, unit)
        for name, (seen, values) in under.items():
            axes.plot(seen, values, color=SOFT, linewidth=1.2, linestyle=(0, (3, 2)), label=name)
        # more lines than colours have other dashes
        looks = product(("-", ":", "-."), COLOURS)
        for (name, (seen, values)), (dashes, colour) in zip(lines.items(), cycle(looks), strict=False):
            # a single point needs a marker
            marker = "o" if percent or len(values) == 1 else ""
            look: dict[str, Any] = {"color": colour, "linestyle": dashes, "marker": marker, "markersize": 3.5}
            axes.plot(seen, values, linewidth=1.6, label=name, **look)
        # the name of the first stage stands at 0, which a run of few steps would not show
        axes.set_xlim(left=0)
        above = ("data", "axes fraction")
        for index, (begin, name) in enumerate(stages):
            if index:
                axes.axvline(begin, color=FAINT, linewidth=1.0)
            axes.annotate(name, (begin, 1.02), xycoords=above, va="bottom", fontsize=8, color=INK, alpha=0.7)
        if percent:
            axes.set_ylim(0, 100)
            axes.yaxis.set_major_formatter("{x:.0f}%")
        if len(lines) + len(under) > 1:
            # below the axes, where it covers no curve
            columns = 4 if sum(map(len, [*lines, *under])) < LEGEND else 2
            figure.legend(frameon=False, labelcolor=INK, fontsize=8, loc="outside lower center", ncols=columns)
        return _svg(figure)


def memory_bars(planned: Mapping[str, int], measured: int) -> str:
    """An SVG of two bars in GiB: the parts of the planned peak, the largest first, and the measured peak."""
    figure, axes = _canvas("Memory of a rank at its peak, GiB", "")
    left = 0.0
    for index, (name, count) in enumerate(sorted(planned.items(), key=lambda part: -part[1])):
        width = count / 2**30
        colour, faint = COLOURS[index % len(COLOURS)], 1.0 if index < len(COLOURS) else 0.5
        axes.barh("planned", width, left=left, color=colour, alpha=faint, label=name)
        left += width
    axes.barh("measured", measured / 2**30, color=FAINT)
    axes.invert_yaxis()
    axes.legend(frameon=False, labelcolor=INK, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4)
    return _svg(figure)


def _canvas(title: str, unit: str) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(5.2, 3.1), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11, color=INK, pad=18)
    if unit:
        axes.set_xlabel(f"{unit} seen", fontsize=9, color=INK)
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.tick_params(colors=INK, labelsize=9, color=FAINT)
    axes.grid(axis="y", color=FAINT, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    return figure, axes


def as_svg(figure: "Figure", *, transparent: bool = False) -> str:
    """The figure as text. Equal numbers give equal bytes: dates and other metadata are left out."""
    import matplotlib

    page = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "contrastile", "font.family": "sans-serif"}):
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(page, format="svg", transparent=transparent, metadata=metadata)
    return page.getvalue()


def _svg(figure: "Figure") -> str:
    svg = as_svg(figure, transparent=True)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg[svg.index("<svg") :]
