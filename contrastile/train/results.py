"""What a comparison leaves behind: compare.csv, a line for each run, and compare.md, tables with what one must know.

Beside `trials.py` and `retriever/findings.py`, which say what stands in them.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from contrastile.train.folder import RunFolder
from contrastile.train.provenance import ORIGIN

RESULTS, TABLE = "compare.csv", "compare.md"


def as_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """CSV: a column for whatever one of the rows has, and behind them why it failed and where it comes from."""
    last = ["failed", *ORIGIN]
    names = list(dict.fromkeys(name for row in rows for name in row if name not in last))
    file = io.StringIO()
    writer = csv.DictWriter(file, [*names, *last], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def rows_of(folder: RunFolder) -> list[dict[str, str]]:
    """The rows that a folder's results were written from; none where it has no results."""
    if not (folder / RESULTS).is_file():
        return []
    with (folder / RESULTS).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def origin_of(row: Mapping[str, str]) -> dict[str, str]:
    """Where a row comes from."""
    return {name: row[name] for name in ORIGIN}


def markdown(heads: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table of Markdown."""
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in (heads, ["---"] * len(heads), *rows))


def mean_percent(shares: Sequence[float]) -> str:
    """Mean ± standard deviation in percent; of one share itself, of none nothing."""
    if not shares:
        return ""
    mean = f"{100 * statistics.mean(shares):.1f}"
    return f"{mean} ± {100 * statistics.stdev(shares):.1f}" if len(shares) > 1 else mean
