"""What a comparison of retrievers found out: every trial, what an update takes, BM25; as CSV, tables and a page.

Beside `compare.py`, which fills it and writes it whenever there is more.
"""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from contrastile._check import wrong
from contrastile.train.folder import RunFolder
from contrastile.train.log import size
from contrastile.train.results import RESULTS, TABLE, as_lines, markdown, mean_percent, origin_of, rows_of
from contrastile.train.retriever.config import RetrieverRecipe
from contrastile.train.retriever.updates import Speed, Update, draw_speeds

logger = logging.getLogger("contrastile")

SPEEDS, FIGURE = "updates.csv", "updates.svg"
MEASURES = ("@1", "@5", "@20", "@100", "nDCG@10")
# by part and measure
Found = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Way:
    """One row of the table: how its batches are made. A plain one keeps the graph of each part, `at_once` queries."""

    name: str
    batch: int
    accumulate: int
    at_once: int
    cached: bool


@dataclass(frozen=True)
class Trial:
    """One run that was made: what it took, and what it finds in each part; or why it `failed`."""

    way: Way
    seed: int
    steps: int
    queries: int
    rate: float
    seconds: float
    found: Found
    failed: str = ""
    # chip, versions, date and commit
    origin: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Findings:
    """All that was found out so far."""

    recipe: RetrieverRecipe
    memory: int
    updates: dict[Way, Update]
    jobs: int
    # of what is found out from now on
    origin: Mapping[str, str]
    trials: list[Trial] = field(default_factory=list)
    bm25: Found = field(default_factory=dict)


def write(folder: RunFolder, findings: Findings) -> None:
    """compare.csv and compare.md."""
    folder.write_text(RESULTS, as_csv(findings))
    folder.write_text(TABLE, page(findings))


def write_speeds(folder: RunFolder, found: Sequence[Speed], origin: Mapping[str, str]) -> None:
    """updates.csv and its figure."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["way", "queries", "seconds", "bytes", *origin])
    for one in found:
        writer.writerow([one.way, one.batch, f"{one.update.seconds:.5f}", one.update.bytes, *origin.values()])
    folder.write_text(SPEEDS, file.getvalue())
    try:
        folder.write_text(FIGURE, draw_speeds(found))
    except ModuleNotFoundError as missing:
        # hours of training are not lost for a figure
        logger.warning("%s is not drawn: %s is not installed; its numbers are in %s", FIGURE, missing.name, SPEEDS)


def as_csv(findings: Findings) -> str:
    """One line per trial, a column per part and measure; BM25's last. `seconds` may be those of trials side by side."""
    rows: list[dict[str, Any]] = []
    order = list(findings.updates)
    for one in sorted(findings.trials, key=lambda one: (order.index(one.way), one.seed)):
        update = findings.updates[one.way]
        row = {"way": one.way.name, "batch": one.way.batch, "seed": one.seed, "steps": one.steps}
        row |= {"queries": one.queries, "learning_rate": one.rate, "seconds": one.seconds}
        row |= {"update_seconds": round(update.seconds, 5), "update_bytes": update.bytes}
        rows.append({**row, **_flat(one.found), "failed": one.failed, **one.origin})
    if findings.bm25:
        rows.append({"way": "BM25", **_flat(findings.bm25), **findings.origin})
    return as_lines(rows)


def read_back(folder: RunFolder, ways: Sequence[Way]) -> tuple[list[Trial], Found]:
    """The trials that `as_csv` wrote, and what BM25 found. Raises ValueError where one is of none of the `ways`."""
    trials, bm25, known = [], {}, {(way.name, str(way.batch)): way for way in ways}
    for row in rows_of(folder):
        names = [*row]
        found: Found = {}
        for name in names[: names.index("failed")]:
            part, _, measure = name.rpartition(" ")
            if measure in MEASURES and row[name]:
                found.setdefault(part, {})[measure] = float(row[name])
        if row["way"] == "BM25":
            bm25 = found
            continue
        if (way := known.get((row["way"], row["batch"]))) is None:
            remedy = "Give the memory and the batches that it began with, or begin anew."
            raise wrong("--resume", "find ways of this comparison", f"{row['way']} of {row['batch']}", remedy)
        took = int(row["steps"]), int(row["queries"]), float(row["learning_rate"]), float(row["seconds"])
        trials.append(Trial(way, int(row["seed"]), *took, found, row["failed"], origin_of(row)))
    return trials, bm25


def _flat(found: Found) -> dict[str, float]:
    return {f"{part} {name}": value for part, values in found.items() for name, value in values.items()}


def tables(findings: Findings) -> str:
    """A Markdown table for each part: mean ± standard deviation over the seeds, in percent."""
    parts = list(dict.fromkeys(part for one in findings.trials for part in one.found)) or list(findings.bm25)
    return "\n\n".join(f"**{part}**\n\n{_table(findings, part)}" for part in parts) or "nothing was finished"


def _table(findings: Findings, part: str) -> str:
    heads = ["way", "batch", "updates", *MEASURES, "seconds", "memory"]
    rows = []
    for way, update in findings.updates.items():
        same = [one for one in findings.trials if one.way == way]
        if not same:
            continue
        steps = same[0].steps
        shown = [_spread([one.found[part].get(name) for one in same if part in one.found]) for name in MEASURES]
        failed = sum(bool(one.failed) for one in same)
        name = way.name + (f" ({failed} of {len(same)} failed)" if failed else "")
        took = [f"{update.seconds * steps:.1f}", size(update.bytes)]
        rows.append([name, f"{way.batch:,}", f"{steps:,}", *shown, *took])
    if part in findings.bm25:
        shown = [_spread([findings.bm25[part].get(name)]) for name in MEASURES]
        rows.append(["BM25", "", "", *shown, "", ""])
    return markdown(heads, rows)


def _spread(shares: Sequence[float | None]) -> str:
    return mean_percent([share for share in shares if share is not None])


def page(findings: Findings) -> str:
    """compare.md: the tables with what one must know to read them."""
    recipe, at_once = findings.recipe, next(iter(findings.updates)).at_once
    optim = recipe.optim
    rule = {"none": "", "sqrt": f" · √(batch / {optim.base_batch})", "linear": f" · batch / {optim.base_batch}"}
    rate = f"{optim.learning_rate:g}{rule[optim.rate_scaling]}"
    seeds = len({one.seed for one in findings.trials})
    return f"""# {recipe.name}: the same memory in several ways

*Sequential*: plain steps of {at_once} queries, the most of which fit into {size(findings.memory)} beside the weights
(powers of two were tried, with the longest passages). *Accumulated*: parts of that size, each with its own negatives
only, their gradients added. *Cached*: all queries of the batch with all their negatives, by the gradient cache; the
encoders see no more tokens at once than in the plain step. Everything else is the recipe's: the learning rate is
{rate}, the warm-up a share of the run. All ways see as many queries.

Percent of queries with a right passage among the first k of all, and nDCG@10; mean ± standard deviation over {seeds}
seed{"s" if seeds != 1 else ""}. Seconds: all updates, at the median time of one, measured alone. Memory: what an
update adds to the weights at its peak, counted by torch, tensor by tensor.

{tables(findings)}

{findings.origin["chip"]} · trials {findings.jobs} at a time · {findings.origin["versions"]}
"""
