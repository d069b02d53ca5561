"""The last station: everything a run found out, as one HTML file that needs nothing beside it.

`write_report` reads the folder of a run (its metrics, facts and evaluation), takes the galleries of pictures and names
that the evaluation made, and fills `report.html.jinja`.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contrastile.data.pairs import Pictures
from contrastile.train.figures import Curve, curves
from contrastile.train.folder import EVALUATION, FACTS, GALLERIES, METRICS, QUESTIONS, RECIPE, REPORT, RunFolder
from contrastile.train.log import clock, read_metrics, size

if TYPE_CHECKING:
    from jinja2 import Template

Line = Mapping[str, Any]

# pictures in the report are at most so many pixels wide: it stays a file one can send
THUMBNAIL = 96


@dataclass(frozen=True)
class Answer:
    """One thing that the model found: a name, or a picture as a data address; what it is; whether it is right."""

    shown: str
    truth: str
    right: bool


@dataclass(frozen=True)
class Find:
    """One query and the answers found for it, the best first."""

    query: str
    truth: str
    answers: Sequence[Answer]

    @property
    def found(self) -> bool:
        """Whether a right answer is among them."""
        return any(answer.right for answer in self.answers)


@dataclass(frozen=True)
class Gallery:
    """A grid of finds: from pictures to names, or from names to pictures."""

    title: str
    sentence: str
    by_picture: bool
    finds: Sequence[Find]


@dataclass(frozen=True)
class FoundText:
    """A passage that was found: its name, where it stands, its text in pieces, marked or not, and if it is right."""

    name: str
    source: str
    score: float
    pieces: Sequence[tuple[str, bool]]
    right: bool


@dataclass(frozen=True)
class Ask:
    """A question and the passages found for it, the best first; the place of the first right one, 0 where none is."""

    question: str
    found: Sequence[FoundText]
    place: int


@dataclass(frozen=True)
class Asks:
    """Questions of one part."""

    title: str
    sentence: str
    asks: Sequence[Ask]


@dataclass(frozen=True)
class Wording:
    """What a job calls its things: the table's heads and rows, the title of the probes' curves, what is counted."""

    heads: Sequence[str]
    row: Callable[[Mapping[str, Any]], list[str]]
    probes: str
    legend: str
    unit: str = "pairs"


def picture_address(picture: Pictures) -> str:
    """A picture `[C, S, S]` uint8 as a data address, made small enough for a page."""
    from PIL import Image

    image = Image.fromarray(picture[0] if len(picture) == 1 else picture.transpose(1, 2, 0))
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def write_report(
    folder: RunFolder,
    galleries: Sequence[Gallery] = (),
    *,
    questions: Sequence[Asks] = (),
    wording: Wording | None = None,
    so_far: Mapping[str, Any] | None = None,
) -> Path:
    """Write `report.html`; its path. The `wording` is that of pictures and names unless another is given.

    Of a run that is not through there are the facts `so_far`, and no results. Galleries and questions are kept beside
    it, and shown again where none are given.
    """
    wording = wording or IMAGE_TEXT
    facts = folder.read_json(FACTS) if so_far is None else so_far
    results = folder.read_json(EVALUATION) if so_far is None else []
    metrics = read_metrics(folder / METRICS)
    if galleries:
        folder.write_json(GALLERIES, [asdict(gallery) for gallery in galleries])
    elif (folder / GALLERIES).is_file():
        galleries = [_gallery(kept) for kept in folder.read_json(GALLERIES)]
    if questions:
        folder.write_json(QUESTIONS, [asdict(one) for one in questions])
    else:
        questions = kept_asks(folder)
    page = _template().render(
        name=facts["name"],
        subtitle=_subtitle(facts, wording.unit),
        so_far=so_far is not None,
        stopped=facts.get("stopped_by") is not None,
        cards=_cards(facts, results),
        legend=wording.legend,
        table={"heads": wording.heads, "rows": [wording.row(row) for row in results]},
        measures=measures(results),
        figures=_figures(metrics, facts["loss"], wording),
        learning=_learning(facts),
        memory=_memory(facts) if "memory" in facts else None,
        unit=wording.unit,
        galleries=galleries,
        questions=questions,
        recipe=(folder / RECIPE).read_text(encoding="utf-8"),
        footer=" · ".join((*(f"{name} {version}" for name, version in facts["versions"].items()), facts["ended"])),
    )
    folder.write_text(REPORT, page)
    return folder / REPORT


@cache
def _template() -> Template:
    """The page, compiled once: a run that trains writes it at every probe."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    pages = Environment(loader=PackageLoader("contrastile.train", "."), autoescape=True, undefined=StrictUndefined)
    return pages.get_template("report.html.jinja")


def _gallery(kept: Mapping[str, Any]) -> Gallery:
    """What `asdict` made of a gallery, as it was."""
    finds = [Find(**{**find, "answers": [Answer(**answer) for answer in find["answers"]]}) for find in kept["finds"]]
    return Gallery(**{**kept, "finds": finds})


def kept_asks(folder: RunFolder) -> list[Asks]:
    """The questions that the last report showed."""
    if not (folder / QUESTIONS).is_file():
        return []
    return [
        Asks(
            **{
                **part,
                "asks": [Ask(**{**ask, "found": [FoundText(**one) for one in ask["found"]]}) for ask in part["asks"]],
            }
        )
        for part in folder.read_json(QUESTIONS)
    ]


def measures(results: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[str, str]]]:
    """Of each test that has some, the measures by the names that others give them, and the pictures left out."""
    return {
        row["test"]: [
            *((name, f"{value:.4f}") for name, value in row["metrics"].items()),
            *((f"left out: {reason}", f"{count:,}") for reason, count in row["skipped"].items()),
        ]
        for row in results
        if row.get("metrics")
    }


def _learning(facts: Mapping[str, Any]) -> str:
    """What one must know to read the curves, of those marks that they have."""
    told = []
    if len(facts["batch"]) > 1:
        told.append(
            "Uprights mark where the batch size changes. More negatives are harder, so the loss steps up there."
        )
    if facts["loss"] == "clip":
        told.append("The dashed line is what guessing would reach at that batch.")
    return " ".join(told)


def _image_text_row(row: Mapping[str, Any]) -> list[str]:
    """One test as text: its name, how many queries and choices, recall at 1, 5 and 10, and chance."""
    return [*counted(row), *(percent(row["recall"].get(str(k))) for k in (1, 5, 10)), percent(row["chance"])]


def counted(row: Mapping[str, Any]) -> list[str]:
    """A test's name, and how many queries and choices it has."""
    return [row["test"], f"{row['queries']:,}", f"{row['choices']:,}"]


IMAGE_TEXT = Wording(
    heads=("", "queries", "choices", "@1", "@5", "@10", "chance @1"),
    row=_image_text_row,
    probes="Recall, picture → name (a sample)",
    legend="Recall@k: the share of queries with a right answer among the first k. Chance is what guessing would reach.",
)


def table_text(results: Sequence[Mapping[str, Any]], wording: Wording = IMAGE_TEXT) -> str:
    """The same table for a terminal."""
    rows = [list(wording.heads), *(wording.row(row) for row in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(wording.heads))]
    lines = [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    told = [f"{name}  {value}" for named in measures(results).values() for name, value in named]
    return "\n".join([lines[0], "─" * len(lines[0]), *lines[1:], *([""] if told else []), *told])


def percent(share: float | None) -> str:
    """A share as people read it; nothing where there is none."""
    if share is None:
        return ""
    return f"{share:.2%}" if share < 0.01 else f"{share:.1%}"


def _subtitle(facts: Mapping[str, Any], unit: str) -> str:
    batches = " → ".join(f"{batch:,}" for batch in facts["batch"])
    each = f"{facts['ranks']} ranks, each with " if facts.get("ranks", 1) > 1 else ""
    took = f"{facts['examples']:,} seen in {clock(facts['seconds'])} on {each}{facts['device']}"
    millions = facts["parameters"] / 1e6
    skipped = "".join(f"; skipped: {count:,} × {reason}" for reason, count in facts["skipped"].items())  # noqa: RUF001
    if facts.get("skipped_steps"):
        skipped += f"; {facts['skipped_steps']:,} steps whose loss or gradient was no finite number"
    return f"{facts['pairs']:,} training {unit}, {took}; batch {batches}; {millions:.1f} million parameters{skipped}"


def _cards(facts: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    firsts = [
        {"value": percent(row["recall"]["1"]), "what": f"{row['test']}, @1 (chance {percent(row['chance'])})"}
        for row in results
        if row.get("headline")
    ]
    dense = f"; the dense way: {size(_dense(facts))}" if "memory" in facts else ""
    # before the first step nothing was measured
    peak = [{"value": size(facts["peak_bytes"]), "what": f"peak memory{dense}"}] if facts["peak_bytes"] else []
    return [*firsts, *peak]


def _figures(metrics: Sequence[Line], loss: str, wording: Wording) -> list[str]:
    steps = [line for line in metrics if line["kind"] == "step"]
    probes = [line for line in metrics if line["kind"] == "probe"]
    if not steps:
        return []
    stages = _stages(steps)
    draw = partial(curves, stages=stages, unit=wording.unit)
    losses = draw(
        {"loss": averaged(full(steps), lambda line: line["loss"])},
        title="Loss",
        # by chance every one of the b texts is as likely as the right one
        under={"guessing": averaged(steps, lambda line: math.log(line["planned"]))} if loss == "clip" else {},
    )
    seen = [line["examples"] for line in probes]
    recalls = {
        f"{part} @{k}": (seen, [100 * line["recall"][part][k] for line in probes])
        for part in (probes[0]["recall"] if probes else ())
        for k in ("1", "5")
    }
    # a run whose every probe failed has none, nor one of questions whose right passages nobody knows
    recall = [draw(recalls, title=wording.probes, percent=True)] if recalls else []
    if tested := _tested(metrics):
        recall.append(draw(tested, title="Tests on other pictures (a sample)", percent=True))
    scale = draw({"scale": averaged(steps, lambda line: line["scale"])}, title="Scale")
    rates = draw({"rate": averaged(steps, lambda line: line["learning_rate"])}, title="Learning rate")
    speeds = averaged(steps, lambda line: line["batch"] / line["seconds"])
    speed = draw({"speed": speeds}, title=f"{wording.unit.capitalize()} per second")
    return [losses, *recall, scale, rates, speed, *_shares(steps, draw)]


def full(steps: Sequence[Line]) -> Sequence[Line]:
    """Without the short last step of a run, whose loss has fewer negatives than those before it."""
    return steps[:-1] if len(steps) > 1 and steps[-1]["batch"] < steps[-1]["planned"] else steps


def _shares(steps: Sequence[Line], draw: Callable[..., str]) -> list[str]:
    """Where the steps' time went; runs of earlier versions do not tell."""
    told = [line for line in steps if line.get("shares")]
    parts = sorted({part for line in told for part in line["shares"]})
    shares = {part: averaged(told, partial(_percent_of, part)) for part in parts}
    return [draw(shares, title="Where a step's time goes, in percent")] if told else []


def _percent_of(part: str, line: Line) -> float:
    return 100 * line["shares"].get(part, 0.0)


def _tested(metrics: Sequence[Line]) -> dict[str, Curve]:
    """The first measure of each test that was made in small: how often the first answer is right."""
    found: dict[str, Curve] = {}
    for line in metrics:
        if line["kind"] == "test" and not line.get("whole"):
            name = next(name for name in line if name.endswith(("-top1", "_R@1")))
            seen, values = found.get(f"{line['test']} @1", ((), ()))
            found[f"{line['test']} @1"] = ([*seen, line["examples"]], [*values, 100 * line[name]])
    return found


def _stages(steps: Sequence[Line]) -> list[tuple[float, str]]:
    """Where each batch size began; the short last step of a run is no stage."""
    stages: list[tuple[float, str]] = []
    planned = None
    for line in steps:
        if line["planned"] != planned:
            planned = line["planned"]
            stages.append((line["examples"] - line["batch"], f"batch {planned:,}"))
    return stages


def averaged(steps: Sequence[Line], value: Callable[[Line], float], points: int = 200) -> Curve:
    """`value` over pairs seen: means of at most `points` equal stretches, with a gap where the batch size changes."""
    stretch = steps[-1]["examples"] / points
    seen: list[float] = []
    values: list[float] = []
    planned = None
    for (size_planned, _), group in groupby(steps, lambda line: (line["planned"], int(line["examples"] / stretch))):
        lines = list(group)
        if planned not in (None, size_planned):
            seen.append(seen[-1])
            values.append(math.nan)
        planned = size_planned
        seen.append(sum(line["examples"] for line in lines) / len(lines))
        values.append(sum(map(value, lines)) / len(lines))
    return seen, values


def _dense(facts: Mapping[str, Any]) -> int:
    return facts["peak_bytes"] + facts["memory"]["activations"] + facts["memory"]["matrix"]


def _memory(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Two bars on one scale: what this run took at its peak, and what plain autograd would have held."""
    need, peak, dense = facts["memory"], facts["peak_bytes"], _dense(facts)
    return {
        "bars": [
            # room is left for the label behind the longest bar
            {"name": name, "label": size(total), "width": 78 * total / dense, "dark": 100 * peak / total}
            for name, total in {"this run": peak, "the dense way": dense}.items()
        ],
        "batch": f"{need['batch']:,}",
        "beyond": f"{need['beyond']:,}",
        "base": size(facts["base_bytes"]),
        **{name: size(need[name]) for name in ("per_example", "activations", "matrix")},
    }
