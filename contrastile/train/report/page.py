"""The page: `report.html`, one file that needs nothing beside it, made of metrics, metadata, results and samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from contrastile._errors import printable
from contrastile.train.folder import EVALUATION, GALLERIES, METADATA, METRICS, QUESTIONS, RECIPE, REPORT, RunFolder
from contrastile.train.log import clock, metrics_lines, size
from contrastile.train.report.figures import Curve, curves
from contrastile.train.report.steps import StepColumns

if TYPE_CHECKING:
    from jinja2 import Template

Line = Mapping[str, Any]
# JSON of the samples that a page shows, as `samples.py` and `questions.py` make it
Samples = list[dict[str, Any]]


@dataclass(frozen=True)
class Wording:
    """The terms of a task: the table's heads and rows, the title of the probes' curves, the unit of its examples."""

    heads: Sequence[str]
    row: Callable[[Mapping[str, Any]], list[str]]
    probes: str
    legend: str
    unit: str = "pairs"


def write_report(
    folder: RunFolder,
    galleries: Samples | None = None,
    *,
    questions: Samples | None = None,
    wording: Wording | None = None,
    so_far: Mapping[str, Any] | None = None,
) -> None:
    """Write `report.html`. The `wording` is that of pictures and texts unless another is passed.

    so_far: the metadata of a run that still trains, which has no results yet. Samples are stored in the folder; those
    stored before are shown where none are passed.
    """
    wording = wording or IMAGE_TEXT
    metadata = folder.read_json(METADATA) if so_far is None else so_far
    results = folder.read_json(EVALUATION) if so_far is None else []
    page = _template().render(
        run=metadata,
        results=results,
        so_far=so_far is not None,
        wording=wording,
        unit=wording.unit,
        measures=measures(results),
        figures=_figures(StepColumns(metrics_lines(folder / METRICS)), metadata["loss"], wording),
        galleries=stored_samples(folder, GALLERIES, galleries),
        questions=stored_samples(folder, QUESTIONS, questions),
        recipe=(folder / RECIPE).read_text(encoding="utf-8"),
    )
    folder.write_text(REPORT, page)


@cache
def _template() -> Template:
    """The page's template, compiled once: a run that trains writes its report at every probe."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("contrastile.train.report", ".")
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    pages.filters.update(percent=percent, clock=clock, size=size, thousands="{:,}".format)
    return pages.get_template("page.html.jinja")


def stored_samples(folder: RunFolder, name: str, samples: Samples | None = None) -> Samples:
    """Store `samples` in the file `name` and return them; without any, return those stored before."""
    if samples:
        folder.write_json(name, samples)
        return samples
    return folder.read_json(name) if (folder / name).is_file() else []


def measures(results: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[str, str]]]:
    """The measures of each test by open_clip's names, and the number of its unreadable pictures."""
    return {
        row["test"]: [
            *((name, f"{value:.4f}") for name, value in row["metrics"].items()),
            *((f"left out: {reason}", f"{count:,}") for reason, count in row["skipped"].items()),
        ]
        for row in results
        if row.get("metrics")
    }


def percent(share: float | None) -> str:
    """A share in percent; empty for None."""
    if share is None:
        return ""
    return f"{share:.2%}" if share < 0.01 else f"{share:.1%}"


def counted(row: Mapping[str, Any]) -> list[str]:
    """The first cells of a test's row: its name, its numbers of queries and of choices."""
    return [row["test"], f"{row['queries']:,}", f"{row['choices']:,}"]


def _image_text_row(row: Mapping[str, Any]) -> list[str]:
    """The cells of a test: name, queries, choices, recall at 1, 5 and 10, and chance."""
    return [*counted(row), *(percent(row["recall"].get(str(k))) for k in (1, 5, 10)), percent(row["chance"])]


IMAGE_TEXT = Wording(
    heads=("", "queries", "choices", "@1", "@5", "@10", "chance @1"),
    row=_image_text_row,
    probes="Recall, picture → name (a sample)",
    legend="Recall@k: the share of queries with a right answer among the first k. Chance is the recall of guessing.",
)


def table_text(results: Sequence[Mapping[str, Any]], wording: Wording = IMAGE_TEXT) -> str:
    """The table of results for a terminal."""
    rows = [list(wording.heads), *(wording.row(row) for row in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    named = [f"{name}  {value}" for test in measures(results).values() for name, value in test]
    rows_text = [lines[0], "─" * len(lines[0]), *lines[1:], *([""] if named else []), *named]
    return "\n".join(map(printable, rows_text))


def _figures(steps: StepColumns, loss: str, wording: Wording) -> list[str]:
    """The curves of a run as SVG; none before the first step."""
    if not len(steps):
        return []
    draw, whole = partial(curves, stages=steps.stages, unit=wording.unit), slice(steps.full)
    # the loss of a uniform guess among the b texts of a batch is ln b
    guess = {"guessing": steps.averaged(np.log(steps["planned"]))} if loss == "clip" else {}
    figures = [draw({"loss": steps.averaged(steps["loss"][whole], whole)}, title="Loss", under=guess)]
    # there are no recalls if every probe failed, or if no question has known right passages
    if recalls := _probed(steps.others):
        figures.append(draw(recalls, title=wording.probes, percent=True))
    if tested := _tested(steps.others):
        figures.append(draw(tested, title="Tests on other pictures (a sample)", percent=True))
    single = {
        "scale": ("Scale", steps["scale"]),
        "rate": ("Learning rate", steps["learning_rate"]),
        "speed": (f"{wording.unit.capitalize()} per second", steps["batch"] / np.maximum(steps["seconds"], 1e-9)),
    }
    figures += [draw({name: steps.averaged(values)}, title=title) for name, (title, values) in single.items()]
    if steps.shares:
        shares = {part: steps.averaged(100 * values, steps.timed) for part, values in steps.shares.items()}
        figures.append(draw(shares, title="Where a step's time goes, in percent"))
    return figures


def _probed(metrics: Sequence[Line]) -> dict[str, Curve]:
    """Recall at 1 and 5 of each held-out part at the probes, in percent."""
    probes = [line for line in metrics if line["kind"] == "probe"]
    seen = [line["examples"] for line in probes]
    return {
        f"{part} @{k}": (seen, [100 * line["recall"][part][k] for line in probes])
        for part in (probes[0]["recall"] if probes else ())
        for k in ("1", "5")
    }


def _tested(metrics: Sequence[Line]) -> dict[str, Curve]:
    """The first measure of each test on a sample: the share of right first answers, in percent."""
    tested: dict[str, tuple[list[float], list[float]]] = {}
    for line in metrics:
        if line["kind"] == "test" and not line.get("whole"):
            name = next(name for name in line if name.endswith(("-top1", "_R@1")))
            seen, values = tested.setdefault(f"{line['test']} @1", ([], []))
            seen.append(line["examples"])
            values.append(100 * line[name])
    return dict(tested)
