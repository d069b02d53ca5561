"""The curves of the report, drawn with matplotlib as SVG that takes its colours from the page.

Used by `report.py`. Text stays text and the ink is a variable of the page's style, so a figure is right on a light and
on a dark screen. Comparisons draw with the same colours, for a page of their own.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# stand-ins that matplotlib draws with, and the variables of the page's style that replace them
INK, FAINT = "#010203", "#030201"
VARIABLES = {INK: "var(--ink)", FAINT: "var(--line)"}
COLOURS = ("#3f7fc4", "#d97b29", "#4a9c6d", "#a26bb5")

Curve = tuple[Sequence[float], Sequence[float]]


def curves(
    lines: Mapping[str, Curve],
    *,
    title: str,
    stages: Sequence[tuple[float, str]],
    unit: str = "pairs",
    percent: bool = False,
    under: Mapping[str, Curve] | None = None,
) -> str:
    """An SVG of `lines` over pairs, or another `unit`, seen.

    `stages` says where the batch changed, `under` holds faint lines beneath.
    """
    figure, axes = _canvas(title, unit)
    for name, (seen, values) in (under or {}).items():
        axes.plot(seen, values, color=FAINT, linewidth=1.2, linestyle=(0, (3, 2)), label=name)
    for (name, (seen, values)), colour in zip(lines.items(), COLOURS, strict=False):
        # one step makes no line
        marker = "o" if percent or len(values) == 1 else ""
        axes.plot(seen, values, color=colour, linewidth=1.6, label=name, marker=marker, markersize=3.5)
    # the first stage begins there; of a run of few steps its name would lie far outside
    axes.set_xlim(left=0)
    _mark_stages(axes, stages)
    if percent:
        axes.set_ylim(0, 100)
        axes.yaxis.set_major_formatter("{x:.0f}%")
    if len(lines) + len(under or {}) > 1:
        axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="best")
    return _svg(figure)


def _canvas(title: str, unit: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(5.2, 3.1), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11, color=INK, pad=18)
    axes.set_xlabel(f"{unit} seen", fontsize=9, color=INK)
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.tick_params(colors=INK, labelsize=9, color=FAINT)
    axes.grid(axis="y", color=FAINT, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    return figure, axes


def _mark_stages(axes: Axes, stages: Sequence[tuple[float, str]]) -> None:
    """A thin upright where each stage begins, its name above."""
    for place, (seen, name) in enumerate(stages):
        if place:
            axes.axvline(seen, color=FAINT, linewidth=1.0)
        axes.annotate(
            name, (seen, 1.02), xycoords=("data", "axes fraction"), va="bottom", fontsize=8, color=INK, alpha=0.7
        )


def as_svg(figure: Figure, *, transparent: bool = False) -> str:
    """The figure as text: the same numbers give the same bytes, on any day."""
    import matplotlib

    page = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "contrastile", "font.family": "sans-serif"}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(page, format="svg", transparent=transparent, metadata=nothing)
    return page.getvalue()


def _svg(figure: Figure) -> str:
    """The drawing alone, in the colours of the page around it."""
    svg = as_svg(figure, transparent=True)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg[svg.index("<svg") :]
