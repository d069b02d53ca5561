"""Cells and rows of the pages' tables: what `tables.py` and `papers_tables.py` share."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
Row = dict[str, str]


@cache
def file_of(name: str) -> list[Row]:
    with open(ROOT / "benchmarks" / "results" / name, encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rows_of(name: str, **wanted: str) -> list[Row]:
    """The rows of a file with these values."""
    return [row for row in file_of(name) if all(row[key] == value for key, value in wanted.items())]


def last(name: str, **wanted: str) -> Row:
    """The newest of several measurements of one thing: files grow at their end."""
    return rows_of(name, **wanted)[-1]


def table_of(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = ("|".join(["", *(f" {cell} " if cell else " " for cell in row), ""]) for row in (head, *rows))
    first, *others = lines
    return "\n".join([first, f"|{'---|' * len(head)}", *others, ""])


def gib(row: Row) -> str:
    return f"{float(row['peak_bytes']) / 2**30:.0f} GiB"


def mib(count: str | float) -> str:
    return f"{float(count) / 2**20:,.0f}"


def time_text(ms: float) -> str:
    if ms >= 1000:
        return f"{ms / 1000:.{0 if ms > 1e5 else 1}f} s"
    return f"{ms:.{0 if ms >= 10 else 2}f} ms"


def cost(row: Row) -> str:
    """Time and peak memory."""
    gib = float(row["peak_bytes"]) / 2**30
    memory = f"{gib:.{0 if gib >= 10 else 1}f} GiB" if gib >= 1 else f"{1024 * gib:.0f} MiB"
    return f"{time_text(float(row['ms']))}, {memory}"
