"""Tables of the pages, made of the CSVs in benchmarks/results. A test compares pages and files.

python docs/site/tables.py          # writes every table anew between its two marks
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARKS = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
Row = dict[str, str]


def _rows(name: str, **wanted: str) -> list[Row]:
    """The rows of a file with these values."""
    with open(ROOT / "benchmarks" / "results" / name, encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if all(row[key] == value for key, value in wanted.items())]


def _last(name: str, **wanted: str) -> Row:
    """The newest of several measurements of one thing: files grow at their end."""
    return _rows(name, **wanted)[-1]


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = (f"| {' | '.join(row)} |".replace("|  |", "| |") for row in (head, ["---"] * len(head), *rows))
    return "\n".join(lines).replace("| --- ", "|---").replace("|--- |", "|---|") + "\n"


def _gib(row: Row) -> str:
    return f"{float(row['peak_bytes']) / 2**30:.0f} GiB"


def steps() -> str:
    """Time and memory of whole steps, plain and cached."""
    file, model = "h200_step.csv", {"model": "vit-b-16", "dtype": "bfloat16"}
    plain = _last(file, impl="plain", way="whole batch", batch="1024", **model)
    rows = [("plain", plain)]
    for batch in ("1024", "8192", "65536", "262144"):
        rows.append(("`retain=0`", _last(file, impl="contrastile", retain="0", batch=batch, sub_batch="512", **model)))
    for batch in ("1024", "8192"):
        row = _last(file, impl="contrastile", retain="auto", inputs="device", batch=batch, sub_batch="512", **model)
        rows.append(('`retain="auto"`', row))
    pace = float(plain["us_per_pair"])
    cells = ((way, f"{int(row['batch']):,}", f"{float(row['us_per_pair']) / pace:.2f}", _gib(row)) for way, row in rows)
    return _table(("step", "pairs", "time of a pair, times the plain step's", "peak memory"), cells)


def cpu_loss() -> str:
    """Speed and memory of the losses beside the dense formula on two cores."""
    cells = []
    for loss, title in (("clip", "CLIP"), ("siglip", "SigLIP"), ("infonce", "InfoNCE, one direction")):
        at = {"loss": loss, "b": "8192", "d": "128", "dtype": "float32"}
        dense = _last("cpu_loss.csv", impl="dense", **at)
        ours = _last("cpu_loss.csv", impl="contrastile", **at)
        theirs = _rows("cpu_loss.csv", **{**at, "impl": "linear_cross_entropy"})
        speed = [float(dense["ms"]) / float(row["ms"]) for row in (ours, *theirs[-1:])]
        mib = [f"{float(row['peak_bytes']) / 2**20:,.0f} MiB" for row in (ours, dense)]
        cells.append((title, f"{speed[0]:.1f}", f"{speed[1]:.1f}" if theirs else "", *mib))
    head = (
        "loss", "speed, times the dense formula's", "torch's `linear_cross_entropy`", "memory beside the features",
        "the dense formula's memory",
    )  # fmt: skip
    return _table(head, cells)


def h200_loss() -> str:
    """Rate of the losses on one H200 beside that of a matrix product, and their times."""
    cells = []
    for b, title in ((65536, "64k"), (262144, "256k"), (1048576, "1M"), (4194304, "4.2M")):
        for workspace in ("", ", workspace 192 MiB")[: 2 if b == 65536 else 1]:
            at = {
                "impl": "contrastile",
                "loss": "clip",
                "dtype": "bfloat16",
                "backend": f"triton{workspace}",
                "b": str(b),
            }
            found = [_rows("h200_loss.csv", **at, d=d)[-1:] for d in ("512", "768", "1024")]
            rates = (f"{float(row[0]['ratio']):.2f} ({_time(float(row[0]['ms']))})" if row else "" for row in found)
            cells.append((title, workspace.removeprefix(", workspace ") or "2 GiB", *rates))
    return _table(("pairs", "workspace", "512 features", "768", "1024"), cells)


def _time(ms: float) -> str:
    return f"{ms / 1000:.{0 if ms > 1e5 else 1}f} s" if ms >= 1000 else f"{ms:.0f} ms"


def ranks() -> str:
    """Times and memory of a loss of 768 features on one, two and four H200s."""
    cells = []
    for b, title in (("65536", "64k"), ("262144", "256k")):
        for world in ("2", "4"):
            rows = [row for row in _rows(f"h200_{world}_ranks.csv", b=b) if row["world"] == world]
            for row in rows:
                way = row["backend"] if row["impl"] == "contrastile" else f"{row['impl']}, {row['backend']}"
                single = f"{float(row['single_ms']):,.1f} ({float(row['single_cost']):.2f})"
                cells.append((
                    title, world, way.removeprefix("triton, "), f"{float(row['ms']):,.1f} ({float(row['cost']):.2f})",
                    single, f"{float(row['beside_bytes']) / 2**20:,.0f}",
                ))  # fmt: skip
    head = ("pairs", "GPUs", "way", "steps in a row, ms", "a single step, ms", "memory, MiB")
    return _table(head, cells)


TABLES: dict[str, Callable[[], str]] = {each.__name__: each for each in (steps, cpu_loss, h200_loss, ranks)}


def current(text: str) -> str:
    """A page with all its tables as the files have them."""
    return MARKS.sub(lambda mark: f"{mark[1]}\n{TABLES[mark[2]]()}\n{mark[4]}", text)


if __name__ == "__main__":
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        if text != current(text):
            page.write_text(current(text), encoding="utf-8")
