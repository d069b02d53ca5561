"""Tables of docs/papers.md that were measured on one GPU: memory of a rank, largest batches. Part of `tables.py`."""

from __future__ import annotations

from collections.abc import Callable

from cells import Row, mib, rows_of, table_of, time_text

SIZES = [2**exponent for exponent in range(15, 23)]
# implementation and way of the file, and a name
WAYS = (
    ("contrastile, gather of tiles", "contrastile", "gather, triton"),
    ("contrastile, ring of tiles", "contrastile", "ring, triton"),
    ("contrastile, ring, dense blocks", "contrastile", "ring, dense"),
    ("Inf-CLIP, ring", "inf-cl", "ring"),
    ("OpenCLIP, local loss", "open_clip", "local loss"),
    ("DisCo-CLIP, decomposed", "DisCo-CLIP", "decomposed"),
    ("CLIP, plain", "CLIP", "plain: all rows and columns"),
)


def rank_memory() -> str:
    """MiB of a rank's loss beside the features, by way, ranks and pairs."""

    def cell(rows: list[Row], b: int) -> str:
        measured = [row for row in rows if row["b"] == str(b)]
        return "" if not measured else mib(measured[-1]["peak_bytes"]) if measured[-1]["peak_bytes"] else "too much"

    lines = []
    for world in ("8", "32", "128"):
        for name, impl, way in WAYS:
            rows = rows_of("h200_memory.csv", impl=impl, way=way, world=world)
            lines.append((world, name, *(cell(rows, b) for b in SIZES)))
    heads = (f"{b // 2**10}k" if b < 2**20 else f"{b // 2**20}M" for b in SIZES)
    return table_of(("ranks", "loss", *heads), lines)


def gib_text(count: str) -> str:
    return f"{int(count) / 2**30:.2f}"


def largest() -> str:
    """Each largest batch that the planner found, and one above it, with the outcome of its step."""
    lines = []
    for row in rows_of("h200_largest.csv"):
        verdict = {"fits": "ran", "fails": "out of memory"}[row["outcome"]]
        names = {"contrastile": "contrastile, ring", "CLIP": "CLIP", "open_clip": "OpenCLIP"}
        name = "contrastile, alone" if row["world"] == "1" else names[row["impl"]]
        peak = gib_text(row["peak_bytes"]) if row["outcome"] == "fits" else ""
        lines.append((
            name, row["model"], row["world"], f"{row['gigabytes']} GB", f"{int(row['b']):,}",
            gib_text(row["planned_bytes"]), peak, verdict,
        ))  # fmt: skip
    heads = ("loss", "model", "GPUs", "card", "pairs", "planned GiB", "measured GiB", "the step")
    return table_of(heads, lines)


def features() -> str:
    """Time and memory of what no other table has."""
    lines = []
    for row in rows_of("h200_features.csv"):
        waiting = f"{100 * float(row['waiting']):.1f} %" if row["waiting"] else ""
        planned = gib_text(row["planned_bytes"]) if row["planned_bytes"] else ""
        batch = f"{int(row['batch']):,}" if row["what"] != "optimizer" else ""
        ms = time_text(float(row["ms"]))
        lines.append((row["what"], row["way"], batch, ms, gib_text(row["peak_bytes"]), planned, waiting))
    heads = ("", "way", "pairs", "step", "peak GiB", "planned GiB", "waiting for data")
    return table_of(heads, lines)


TABLES: dict[str, Callable[[], str]] = {"rank_memory": rank_memory, "largest": largest, "features": features}
