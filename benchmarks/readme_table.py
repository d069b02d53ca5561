"""The table of README.md, made of the newest rows of benchmarks/results: contrastile beside the fastest other way.

python benchmarks/readme_table.py              # prints the table
python benchmarks/readme_table.py --write      # and puts it into README.md
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- readme_table -->\n", "<!-- end -->"
NAMES = {"clip": "ClipLoss", "siglip": "SigLipLoss", "infonce": "InfoNCELoss"}
# file of results, loss, rows, features, ranks, and our way; sizes at which another way wins are among them
PROBLEMS = [
    ("h200_loss", "clip", 8_192, 512, 1, "triton"),
    ("h200_loss", "clip", 65_536, 512, 1, "triton"),
    ("h200_loss", "clip", 65_536, 512, 1, "triton, workspace 192 MiB"),
    ("h200_loss", "clip", 1_048_576, 1_024, 1, "triton"),
    ("h200_loss", "siglip", 4_096, 768, 1, "triton"),
    ("h200_loss", "siglip", 65_536, 768, 1, "triton"),
    ("h200_4_ranks", "clip", 65_536, 768, 4, "triton, gather"),
    ("h200_4_ranks", "clip", 65_536, 768, 4, "triton, ring"),
    ("h200_4_ranks", "clip", 262_144, 768, 4, "triton, ring"),
    ("cpu_loss", "clip", 8_192, 128, 1, "eager"),
    ("cpu_loss", "infonce", 4_096, 128, 1, "eager"),
    ("cpu_loss", "infonce", 8_192, 128, 1, "eager"),
]


def table() -> str:
    """Write one line for each problem; a time is that of a forward and backward."""
    lines = [
        "| forward and backward | device | contrastile | fastest other | times as fast |",
        "|---|---|---|---|---|",
    ]
    for file, loss, b, d, world, way in PROBLEMS:
        rows = measured(file, loss, b, d, world)
        ours = rows.pop(("contrastile", way))
        others = {name: row for name, row in rows.items() if name[0] != "contrastile"}
        bits = "bf16" if ours["dtype"] == "bfloat16" else "float32"
        shape = f"`{NAMES[loss]}` {b:,} x {d:,}, {bits}" + way.removeprefix("triton").removeprefix("eager")
        beside = "none fits", ""
        if others:
            name = min(others, key=lambda one: float(others[one]["ms"]))
            beside = f"{label(*name)}: {cost(others[name])}", ratio(ours, others[name])
        lines.append(f"| {' | '.join([shape, device(ours, world), cost(ours), *beside])} |")
    return "\n".join(lines) + "\n"


def measured(file: str, loss: str, b: int, d: int, world: int) -> dict[tuple[str, str], dict[str, str]]:
    """Read the rows of a problem by implementation and way; of rows measured again the newest one, in 16 bits first."""
    with (RESULTS / f"{file}.csv").open(encoding="utf-8", newline="") as stream:
        every = [row for row in csv.DictReader(stream) if row["ms"]]
    problem = (loss, str(b), str(d), str(world))
    rows = [row for row in every if tuple(row[name] for name in ("loss", "b", "d", "world")) == problem]
    halves = [row for row in rows if row["dtype"] == "bfloat16"]
    return {(row["impl"], row["backend"]): row for row in halves or rows}


def label(impl: str, way: str) -> str:
    """Name another library, or the plain formula with its types."""
    if impl == "dense":
        return f"plain formula, {way}"
    return "torch's `linear_cross_entropy`" if way == "torch" else impl


def device(row: dict[str, str], world: int) -> str:
    """Name the device: a GPU by its model, a CPU by its cores."""
    if "CPU" in row["chip"]:
        return row["chip"].split(" of ")[0] + " CPU cores"
    model = "H200" if "H200" in row["chip"] else row["chip"]
    return f"{world} x {model}" if world > 1 else model


def cost(row: dict[str, str]) -> str:
    """Write time and peak memory beside the inputs, those of one rank."""
    ms, mebibytes = float(row["ms"]), int(row["peak_bytes"]) / 2**20
    time = f"{ms:.2f} ms" if ms < 10 else f"{ms:,.0f} ms" if ms < 10_000 else f"{ms / 1000:.1f} s"
    return f"{time}, " + (f"{mebibytes:,.0f} MiB" if mebibytes < 1024 else f"{mebibytes / 1024:.1f} GiB")


def ratio(ours: dict[str, str], other: dict[str, str]) -> str:
    """Write the other's time over ours; bold where the other wins, so that nobody overlooks it."""
    times = float(other["ms"]) / float(ours["ms"])
    return f"{times:.1f}" if times >= 1.95 else f"{times:.2f}" if times >= 1 else f"**{times:.2f}**"


def written(page: str) -> str:
    """Return README's text with the table of today between its two comments."""
    head, rest = page.split(BEGIN)
    return head + BEGIN + table() + END + rest.split(END, 1)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(table(), end="")


if __name__ == "__main__":
    main()
