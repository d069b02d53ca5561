"""The page: `report.html`, one file that needs nothing beside it, made of metrics, metadata, results and samples."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

from contrastile._errors import logger, printable
from contrastile.train.folder import EVALUATION, GALLERIES, METADATA, METRICS, QUESTIONS, RECIPE, REPORT, RunFolder
from contrastile.train.log import Listener, clock, metrics_lines, size
from contrastile.train.report.figures import Curve, StepColumns, curves, memory_bars

Line = Mapping[str, Any]
Row = dict[str, Any]
# the largest share of a run's time that its reports may take: one takes about half a second
MOST = 0.05
# share of the plain way's memory from which its saving is shown
SAVED = 0.25
# fewer queries or choices say nothing about a model
FEW_QUERIES, FEW_CHOICES = 20, 5
# JSON of the samples that a page shows, as the evaluations make it
Samples = list[dict[str, Any]]


@dataclass(frozen=True)
class Wording:
    """The terms of a task: the table's heads and rows, the title of the probes' curves, the unit of its examples.

    use: lines that use a finished run, with {run} for its folder. parts: the names of held-out parts in tables.
    """

    heads: Sequence[str]
    row: Callable[[Mapping[str, Any]], list[str]]
    probes: str
    legend: str
    use: str
    unit: str = "pairs"
    parts: Mapping[str, str] = field(default_factory=dict)


def write_report(
    folder: RunFolder, galleries: Samples | None = None, *, questions: Samples | None = None,
    wording: Wording | None = None, so_far: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write `report.html`. The `wording` is that of images and texts unless another is passed.

    so_far: the metadata of a run that still trains, which has no results yet. Samples are stored in the folder; those
    stored before are shown where none are passed.
    """
    wording = wording or IMAGE_TEXT
    metadata = folder.read_json(METADATA) if so_far is None else so_far
    results = folder.read_json(EVALUATION) if so_far is None else []
    heads, *rows = table(results, wording)
    page = template("page.html.jinja").render(
        run=metadata, heads=heads, rows=list(zip(results, rows, strict=True)), few=few_text(results),
        memory=memory_saved(metadata), use=wording.use.format(run=folder.path), so_far=so_far is not None,
        wording=wording, unit=wording.unit, measures=measures(results),
        figures=_figures(StepColumns(metrics_lines(folder / METRICS)), metadata, wording),
        galleries=stored_samples(folder, GALLERIES, galleries),
        questions=stored_samples(folder, QUESTIONS, questions), recipe=(folder / RECIPE).read_text(encoding="utf-8"),
    )  # fmt: skip
    folder.write_text(REPORT, page)


def result_row(
    test: str, queries: int, choices: int, recall: Mapping[Any, float], chance: float | None, **more: Any
) -> Row:
    """A test's row in evaluation.json; recall: the shares by k."""
    shares = {str(k): share for k, share in recall.items()}
    return {"test": test, "queries": queries, "choices": choices, "recall": shares, "chance": chance, **more}


def write_results(folder: RunFolder, results: Sequence[Mapping[str, Any]], *, beside: bool = False) -> None:
    """Write the rows of evaluation.json; `beside`: behind those of other tests that are there."""
    tested = {row["test"] for row in results}
    before = folder.read_json(EVALUATION) if beside and (folder / EVALUATION).is_file() else []
    folder.write_json(EVALUATION, [*(row for row in before if row["test"] not in tested), *results])


class LiveReport(Listener):
    """The report of a run that still trains, written after each probe from the folder and from `metadata()`.

    A probe writes none where reports would take more than the share `MOST` of the time since the run started.
    """

    def __init__(self, folder: RunFolder, metadata: Callable[[], Mapping[str, Any]], wording: Wording) -> None:
        self._folder, self._metadata, self._wording = folder, metadata, wording
        self._began = time.monotonic()
        self._spent = self._last = 0.0

    def log(self, kind: str, values: Mapping[str, Any]) -> None:  # noqa: ARG002
        now = time.monotonic()
        if kind != "probe" or self._spent + self._last > MOST * (now - self._began):
            return
        write_report(self._folder, wording=self._wording, so_far=self._metadata())
        self._last = time.monotonic() - now
        self._spent += self._last


def write_stopped_report(folder: RunFolder, metadata: Mapping[str, Any], wording: Wording) -> None:
    """Write the report of a run that a signal stopped; a failure is logged, because the run can be resumed."""
    try:
        write_report(folder, wording=wording, so_far=metadata)
    except Exception as failure:
        logger.warning("the report failed, the run is kept: %r", failure)


@cache
def template(name: str) -> Any:
    """A page's template, compiled once: a run that trains writes its report at every probe."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("contrastile.train.report", ".")
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    pages.filters.update(percent=percent, clock=clock, size=size, thousands="{:,}".format)
    return pages.get_template(name)


def stored_samples(folder: RunFolder, name: str, samples: Samples | None = None) -> Samples:
    """Store `samples` in the file `name` and return them; without any, return those stored before."""
    if samples:
        folder.write_json(name, samples)
        return samples
    return folder.read_json(name) if (folder / name).is_file() else []


def memory_saved(metadata: Mapping[str, Any]) -> dict[str, int] | None:
    """Bytes that a step took above those in use before it, and bytes of the plain way; None where it saved little."""
    need = metadata.get("memory")
    step = metadata["peak_bytes"] - metadata["base_bytes"]
    if need is None or step <= 0:
        return None
    plain = step + need["activations"] + need["matrix"]
    return {"step": step, "plain": plain} if plain - step >= SAVED * plain else None


def measures(results: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[str, str]]]:
    """The measures of each test by open_clip's names, and the number of its unreadable images."""
    return {
        row["test"]: [
            *((name, f"{value:.4f}") for name, value in row["metrics"].items()),
            *((f"left out: {reason}", f"{count:,}") for reason, count in row["skipped"].items()),
        ]
        for row in results
        if row.get("metrics")
    }


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}" if share < 0.01 else f"{share:.1%}"


def counted(row: Mapping[str, Any]) -> list[str]:
    """The first cells of a test's row: its name, its numbers of queries and of choices."""
    return [row["test"], f"{row['queries']:,}", f"{row['choices']:,}"]


IMAGE_TEXT = Wording(
    heads=("", "queries", "choices", "@1", "@5", "@10", "chance @1"),
    row=lambda row: [*counted(row), *(percent(row["recall"].get(k)) for k in ("1", "5", "10")), percent(row["chance"])],
    probes="Recall, picture → name (a sample)",
    legend="Recall@k: the share of queries with a right answer among the first k. Chance is the recall of guessing.",
    use="""\
import contrastile
from PIL import Image

run = contrastile.load("{run}")
scores = run.encode_image([Image.open("picture.png")]) @ run.encode_text(["one caption", "another caption"]).T

# on the command line: images of a folder by a text
contrastile encode {run} my/pictures
contrastile search {run} "one caption\"""",
    parts={
        "faces": "held-out fonts",
        "names": "held-out names",
        "held_out": "held-out pairs",
        "images": "held-out images",
    },
)


def table(results: Sequence[Mapping[str, Any]], wording: Wording) -> list[list[str]]:
    """The heads and rows of the table of results, without a column `recall@k` that repeats the column `@k`."""
    rows = [list(wording.heads), *(wording.row(row) for row in results)]
    columns = {column[0]: column for column in zip(*rows, strict=True)}
    chosen = [
        column
        for head, column in columns.items()
        if not head.startswith("recall@") or column[1:] != columns.get(head.removeprefix("recall"), ())[1:]
    ]
    return [list(row) for row in zip(*chosen, strict=True)]


def few_text(results: Sequence[Mapping[str, Any]]) -> str:
    """A sentence about tests with too few queries or choices for their numbers to mean something; empty without any."""
    few = [row for row in results if 0 < row["queries"] < FEW_QUERIES or 0 < row["choices"] < FEW_CHOICES]
    if not few:
        return ""
    named = "; ".join(f"{row['test']} ({row['queries']:,} among {row['choices']:,})" for row in few)
    own = ", or a larger data.held_out," if any(row["test"].startswith("held-out") for row in few) else ""
    return f"Too few to say anything about the model: {named}. More data{own} helps."


def table_text(results: Sequence[Mapping[str, Any]], wording: Wording = IMAGE_TEXT) -> str:
    rows = table(results, wording)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    named = [f"{name}  {value}" for test in measures(results).values() for name, value in test]
    rows_text = [lines[0], "─" * len(lines[0]), *lines[1:], *([""] if named else []), *named]
    return "\n".join(map(printable, [*rows_text, *filter(None, [few_text(results)])]))


def _figures(steps: StepColumns, metadata: Mapping[str, Any], wording: Wording) -> list[str]:
    """The curves of a run as SVG, none before the first step, and where it is known its planned memory."""
    planned = metadata.get("planned_memory")
    memory = [memory_bars(planned, metadata["peak_bytes"])] if planned else []
    if not len(steps):
        return memory
    draw, whole = partial(curves, stages=steps.stages, unit=wording.unit), slice(steps.full)
    # the loss of a uniform guess among the b texts of a batch, or of a part of it, is ln b
    texts = steps["planned"] / metadata.get("accumulate", 1)
    guess = {"guessing": steps.averaged(np.log(texts))} if metadata["loss"] == "clip" else {}
    figures = [draw({"loss": steps.averaged(steps["loss"][whole], whole)}, title="Loss", under=guess)]
    # there are no recalls if every probe failed, or if no question has known right passages
    if recalls := _probed(steps.others, wording.parts):
        figures.append(draw(recalls, title=wording.probes, percent=True))
    if tested := _tested(steps.others):
        figures.append(draw(tested, title="Tests on other images (a sample)", percent=True))
    single = {
        "scale": ("Scale", steps["scale"]),
        "rate": ("Learning rate", steps["learning_rate"]),
        "speed": (f"{wording.unit.capitalize()} per second", steps["batch"] / np.maximum(steps["seconds"], 1e-9)),
    }
    if len(steps) > 1 and np.ptp(steps["scale"]) == 0:
        # a constant line shows nothing
        del single["scale"]
    figures += [draw({name: steps.averaged(values)}, title=title) for name, (title, values) in single.items()]
    if steps.shares:
        shares = {part: steps.averaged(100 * values, steps.timed) for part, values in steps.shares.items()}
        figures.append(draw(shares, title="Where a step's time goes, in percent"))
    return figures + memory


def _probed(metrics: Sequence[Line], parts: Mapping[str, str]) -> dict[str, Curve]:
    """Recall at 1 and 5 of each held-out part at the probes, in percent."""
    probes = [line for line in metrics if line["kind"] == "probe"]
    seen = [line["examples"] for line in probes]
    return {
        f"{parts.get(part, part).removeprefix('held-out ')} @{k}": (
            seen,
            [100 * line["recall"][part][k] for line in probes],
        )
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
