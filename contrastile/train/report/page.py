"""The page: `report.html`, one file that needs nothing beside it.

`write_report` reads metrics, metadata and results from the folder of a run, takes samples of pictures or questions from
the evaluation, and fills `page.html.jinja`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contrastile.train.folder import EVALUATION, GALLERIES, METADATA, METRICS, QUESTIONS, RECIPE, REPORT, RunFolder
from contrastile.train.log import clock, read_metrics, size
from contrastile.train.report.figures import Curve, curves

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
) -> Path:
    """Write `report.html`; its path. The `wording` is that of pictures and texts unless another is passed.

    so_far: the metadata of a run that still trains, which has no results yet. Samples are stored in the folder; those
    stored before are shown where none are passed.
    """
    wording = wording or IMAGE_TEXT
    metadata = folder.read_json(METADATA) if so_far is None else so_far
    results = folder.read_json(EVALUATION) if so_far is None else []
    page = _template().render(
        name=metadata["name"],
        subtitle=_subtitle(metadata, wording.unit),
        so_far=so_far is not None,
        stopped=metadata.get("stopped_by") is not None,
        cards=_cards(metadata, results),
        legend=wording.legend,
        table={"heads": wording.heads, "rows": [wording.row(row) for row in results]},
        measures=measures(results),
        figures=_figures(read_metrics(folder / METRICS), metadata["loss"], wording),
        learning=_learning(metadata),
        memory=_memory(metadata) if "memory" in metadata else None,
        unit=wording.unit,
        galleries=stored_samples(folder, GALLERIES, galleries),
        questions=stored_samples(folder, QUESTIONS, questions),
        recipe=(folder / RECIPE).read_text(encoding="utf-8"),
        footer=" · ".join(
            (*(f"{name} {version}" for name, version in metadata["versions"].items()), metadata["ended"])
        ),
    )
    folder.write_text(REPORT, page)
    return folder / REPORT


@cache
def _template() -> Template:
    """The page's template, compiled once: a run that trains writes its report at every probe."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    pages = Environment(
        loader=PackageLoader("contrastile.train.report", "."), autoescape=True, undefined=StrictUndefined
    )
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


def _learning(metadata: Mapping[str, Any]) -> str:
    """The explanation of the marks in the curves."""
    sentences = []
    if len(metadata["batch"]) > 1:
        sentences.append(
            "Vertical lines mark changes of the batch size. More negatives are harder, so the loss steps up there."
        )
    if metadata["loss"] == "clip":
        sentences.append("The dashed line is the loss of guessing at that batch size.")
    return " ".join(sentences)


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
    widths = [max(len(row[column]) for row in rows) for column in range(len(wording.heads))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    named = [f"{name}  {value}" for test in measures(results).values() for name, value in test]
    return "\n".join([lines[0], "─" * len(lines[0]), *lines[1:], *([""] if named else []), *named])


def _subtitle(metadata: Mapping[str, Any], unit: str) -> str:
    batches = " → ".join(f"{batch:,}" for batch in metadata["batch"])
    each = f"{metadata['ranks']} ranks, each with " if metadata.get("ranks", 1) > 1 else ""
    took = f"{metadata['examples']:,} seen in {clock(metadata['seconds'])} on {each}{metadata['device']}"
    millions = metadata["parameters"] / 1e6
    notes = "".join(f"; skipped: {count:,} × {reason}" for reason, count in metadata["skipped"].items())  # noqa: RUF001
    if metadata.get("skipped_steps"):
        notes += f"; {metadata['skipped_steps']:,} steps whose loss or gradient was no finite number"
    # earlier versions did not write `planned`
    if metadata.get("finished") and metadata["examples"] < metadata.get("planned", 0):
        notes += f"; train.minutes ended the run after {metadata['examples']:,} of {metadata['planned']:,} {unit}"
    return f"{metadata['pairs']:,} training {unit}, {took}; batch {batches}; {millions:.1f} million parameters{notes}"


def _cards(metadata: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    headlines = [
        {"value": percent(row["recall"]["1"]), "label": f"{row['test']}, @1 (chance {percent(row['chance'])})"}
        for row in results
        if row.get("headline")
    ]
    dense = f"; the dense way: {size(_dense(metadata))}" if "memory" in metadata else ""
    # no memory is measured before the first step
    peak = [{"value": size(metadata["peak_bytes"]), "label": f"peak memory{dense}"}] if metadata["peak_bytes"] else []
    return [*headlines, *peak]


def _figures(metrics: Sequence[Line], loss: str, wording: Wording) -> list[str]:
    steps = [line for line in metrics if line["kind"] == "step"]
    probes = [line for line in metrics if line["kind"] == "probe"]
    if not steps:
        return []
    draw = partial(curves, stages=_stages(steps), unit=wording.unit)

    def draw_one(name: str, title: str, value: Callable[[Line], float]) -> str:
        return draw({name: averaged(steps, value)}, title=title)

    losses = draw(
        {"loss": averaged(full(steps), lambda line: line["loss"])},
        title="Loss",
        # the loss of a uniform guess among the b texts of a batch is ln b
        under={"guessing": averaged(steps, lambda line: math.log(line["planned"]))} if loss == "clip" else {},
    )
    seen = [line["examples"] for line in probes]
    recalls = {
        f"{part} @{k}": (seen, [100 * line["recall"][part][k] for line in probes])
        for part in (probes[0]["recall"] if probes else ())
        for k in ("1", "5")
    }
    # there are none if every probe failed, or if no question has known right passages
    recall = [draw(recalls, title=wording.probes, percent=True)] if recalls else []
    if tested := _tested(metrics):
        recall.append(draw(tested, title="Tests on other pictures (a sample)", percent=True))
    return [
        losses,
        *recall,
        draw_one("scale", "Scale", lambda line: line["scale"]),
        draw_one("rate", "Learning rate", lambda line: line["learning_rate"]),
        draw_one("speed", f"{wording.unit.capitalize()} per second", lambda line: line["batch"] / line["seconds"]),
        *_shares(steps, draw),
    ]


def full(steps: Sequence[Line]) -> Sequence[Line]:
    """The steps without a short last one, whose loss has fewer negatives."""
    return steps[:-1] if len(steps) > 1 and steps[-1]["batch"] < steps[-1]["planned"] else steps


def _shares(steps: Sequence[Line], draw: Callable[..., str]) -> list[str]:
    """The parts of the steps' time. Earlier versions did not write them."""
    lines = [line for line in steps if line.get("shares")]
    parts = sorted({part for line in lines for part in line["shares"]})
    shares = {part: averaged(lines, partial(_percent_of, part)) for part in parts}
    return [draw(shares, title="Where a step's time goes, in percent")] if lines else []


def _percent_of(part: str, line: Line) -> float:
    return 100 * line["shares"].get(part, 0.0)


def _tested(metrics: Sequence[Line]) -> dict[str, Curve]:
    """The first measure of each test on a sample: the share of right first answers."""
    curves_of: dict[str, Curve] = {}
    for line in metrics:
        if line["kind"] == "test" and not line.get("whole"):
            name = next(name for name in line if name.endswith(("-top1", "_R@1")))
            seen, values = curves_of.get(f"{line['test']} @1", ((), ()))
            curves_of[f"{line['test']} @1"] = ([*seen, line["examples"]], [*values, 100 * line[name]])
    return curves_of


def _stages(steps: Sequence[Line]) -> list[tuple[float, str]]:
    """The begin of each batch size; a short last step is no stage."""
    stages: list[tuple[float, str]] = []
    planned = None
    for line in steps:
        if line["planned"] != planned:
            planned = line["planned"]
            stages.append((line["examples"] - line["batch"], f"batch {planned:,}"))
    return stages


def averaged(steps: Sequence[Line], value: Callable[[Line], float], points: int = 200) -> Curve:
    """`value` over examples seen: means of `points` equal intervals at most, a gap where the batch size changes."""
    interval = steps[-1]["examples"] / points
    seen: list[float] = []
    values: list[float] = []
    planned = None
    for (batch, _), group in groupby(steps, lambda line: (line["planned"], int(line["examples"] / interval))):
        lines = list(group)
        if planned not in (None, batch):
            seen.append(seen[-1])
            values.append(math.nan)
        planned = batch
        seen.append(sum(line["examples"] for line in lines) / len(lines))
        values.append(sum(map(value, lines)) / len(lines))
    return seen, values


def _dense(metadata: Mapping[str, Any]) -> int:
    return metadata["peak_bytes"] + metadata["memory"]["activations"] + metadata["memory"]["matrix"]


def _memory(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Two bars on one scale: the peak of this run, and the memory of plain autograd."""
    need, peak, dense = metadata["memory"], metadata["peak_bytes"], _dense(metadata)
    return {
        "bars": [
            # 78 % leave room for the label behind the longer bar
            {"name": name, "label": size(total), "width": 78 * total / dense, "dark": 100 * peak / total}
            for name, total in {"this run": peak, "the dense way": dense}.items()
        ],
        "batch": f"{need['batch']:,}",
        "beyond": f"{need['beyond']:,}",
        "base": size(metadata["base_bytes"]),
        **{name: size(need[name]) for name in ("per_example", "activations", "matrix")},
    }
