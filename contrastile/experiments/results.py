"""Results of a comparison: one value for each trial, and their text as CSV and as Markdown."""

import csv
import io
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from contrastile.train.folder import RunFolder
from contrastile.train.provenance import ORIGIN

RESULTS, PAGE = "compare.csv", "compare.md"
# columns of costs; the other columns between `seed` and `failed` are measures
COSTS = ("examples", "steps", "queries", "learning_rate", "seconds", "update_seconds", "update_bytes")


@dataclass(frozen=True)
class Result:
    """One finished trial: its cost and its measures (shares of 1, by column), or the reason why it `failed`.

    The seed is None for BM25. `origin` holds chip, versions, date and commit.
    """

    labels: dict[str, str]
    seed: int | None
    costs: dict[str, float] = field(default_factory=dict)
    measures: dict[str, float] = field(default_factory=dict)
    failed: str = ""
    origin: Mapping[str, str] = field(default_factory=dict)


def to_csv(results: Iterable[Result]) -> str:
    rows = [{**x.labels, "seed": x.seed, **x.costs, **x.measures, "failed": x.failed, **x.origin} for x in results]
    last = ["failed", *ORIGIN]
    columns = dict.fromkeys(name for row in rows for name in row if name not in last)
    file = io.StringIO()
    writer = csv.DictWriter(file, [*columns, *last], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def read_results(folder: RunFolder) -> list[Result]:
    """Read compare.csv; empty where the folder has none."""
    if not (folder / RESULTS).is_file():
        return []
    results = []
    with (folder / RESULTS).open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            origin, failed = {name: row.pop(name) for name in ORIGIN}, row.pop("failed")
            costs = {name: json.loads(text) for name in COSTS if (text := row.pop(name, ""))}
            labels = {name: row.pop(name) for name in [*row][: [*row].index("seed")]}
            seed = row.pop("seed")
            # earlier versions called fonts faces
            measures = {name.replace("held-out faces", "held-out fonts"): float(row[name]) for name in row if row[name]}
            results.append(Result(labels, int(seed) if seed else None, costs, measures, failed, origin))
    return results


def markdown(heads: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in (heads, ["---"] * len(heads), *rows))


def by_labels(results: Iterable[Result]) -> dict[tuple[str, ...], list[Result]]:
    """Group the results that differ in their seed only."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        groups.setdefault(tuple(result.labels.values()), []).append(result)
    return groups


def measures_of(results: Iterable[Result]) -> list[str]:
    return list(dict.fromkeys(name for result in results for name in result.measures))


def mean_cost(results: Iterable[Result], name: str) -> str:
    return f"{statistics.mean(result.costs[name] for result in results):,.0f}"


def mean_percent(results: Iterable[Result], measure: str) -> str:
    """Write mean ± standard deviation in percent; the value itself for one result, nothing for none."""
    shares = [result.measures[measure] for result in results if measure in result.measures]
    deviation = f" ± {100 * statistics.stdev(shares):.1f}" if len(shares) > 1 else ""
    return f"{100 * statistics.mean(shares):.1f}{deviation}" if shares else ""


def spread(results: Sequence[Result], measure: str) -> str:
    """Write mean ± standard deviation with its unit, and the number of failed trials."""
    percent, failed = mean_percent(results, measure), sum(bool(result.failed) for result in results)
    return " ".join([f"{percent} %"] * bool(percent) + [f"({failed} failed)"] * bool(failed))


def seeds_of(results: Iterable[Result]) -> str:
    count = len({result.seed for result in results} - {None})
    return f"{count} seed{'' if count == 1 else 's'}"
