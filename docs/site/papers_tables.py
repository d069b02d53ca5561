"""Tables of docs/papers.md that were measured on one GPU, and the estimates of docs/cost.md. Part of `tables.py`."""

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
# GB of the loss in table 1 of Inf-CL, by ranks and loss, for 32k to 256k pairs and a million; "" where it has none
PUBLISHED_SIZES = (15, 16, 17, 18, 20)
PUBLISHED = {
    ("8", "CLIP"): ("16.67", "66.11", "", "", ""),
    ("8", "OpenCLIP"): ("2.27", "8.63", "33.64", "", ""),
    ("8", "Inf-CL"): ("0.18", "0.36", "0.72", "1.45", "6.53"),
    ("32", "CLIP"): ("16.66", "66.11", "", "", ""),
    ("32", "OpenCLIP"): ("0.71", "2.45", "8.98", "34.35", ""),
    ("32", "Inf-CL"): ("0.05", "0.09", "0.18", "0.35", "1.44"),
}
# of the estimates: operations per second, measured on an H200 at 768 features (h200_loss.csv); bytes of a feature in
# bf16 and of an accumulator; ms that a hop adds in one pass, measured on four H200s (contrastile bench loss --profile)
RATE, D, FEATURE, WIDE, HOP_MS = 600e12, 768, 2, 4, 0.5
# bytes per second and direction between two GPUs: NVLink 4 within a node (two thirds of its peak), 400 and 200 Gb/s
LINKS = {"NVLink": 300e9, "400 Gb/s": 50e9, "200 Gb/s": 25e9}
# GPUs, thousands of pairs, and link
ESTIMATED = (
    *((8, 64, "NVLink"), (8, 1024, "NVLink"), (32, 64, "400 Gb/s"), (32, 1024, "400 Gb/s"), (32, 12288, "400 Gb/s")),
    *((256, 1024, "400 Gb/s"), (256, 4096, "400 Gb/s"), (256, 12288, "400 Gb/s"), (256, 12288, "200 Gb/s")),
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


def rank_losses() -> str:
    """GB of a rank's loss in Inf-CL's table 1, and GiB of the same loss here, ours for that of the paper."""
    lines = []
    for (world, name), published in PUBLISHED.items():
        impl, way = {"CLIP": WAYS[6][1:], "OpenCLIP": WAYS[4][1:], "Inf-CL": WAYS[1][1:]}[name]
        cells = []
        for exponent, gigabytes in zip(PUBLISHED_SIZES, published, strict=True):
            rows = rows_of("h200_memory.csv", impl=impl, way=way, world=world, b=str(2**exponent))
            here = gib_text(rows[-1]["peak_bytes"]) if rows and rows[-1]["peak_bytes"] else ""
            cells.append(f"{gigabytes or '–'}, {here}" if here else gigabytes)
        lines.append((world, name, *cells))
    return table_of(("ranks", "loss", "32k", "64k", "128k", "256k", "1M"), lines)


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
        planned = gib_text(row["planned_bytes"]) if row["planned_bytes"] else ""
        waiting = f"{100 * float(row['waiting']):.1f} %" if row["waiting"] else ""
        # the steps of an optimizer have no pairs
        batch, ms = f"{int(row['batch']):,}" if row["batch"] else "", time_text(float(row["ms"]))
        lines.append((row["what"], row["way"], batch, ms, gib_text(row["peak_bytes"]), planned, waiting))
    return table_of(("", "way", "pairs", "step", "peak GiB", "planned GiB", "waiting for data"), lines)


def hidden_hops() -> str:
    """Rows per GPU from which a hop of the ring is hidden, in both passes alike."""
    rows = ((name, f"{link / 1e9:.0f} GB/s", f"{RATE * FEATURE / (2 * link):,.0f}") for name, link in LINKS.items())
    return table_of(("link", "B", "from rows per GPU"), rows)


def estimated_cost() -> str:
    """Seconds and GiB of a symmetric loss on n GPUs, on paper."""
    lines = []
    for n, thousands, name in ESTIMATED:
        b, link, hops = thousands * 2**10, LINKS[name], 2 * n * HOP_MS / 1e3
        N = b // n
        arithmetic = 8 * b * b * D / n / RATE
        # operations and bytes of a hop, forward and backward; the columns' gradient returns after the last one
        passes = {2 * N * N * D: N * D * FEATURE, 6 * N * N * D: N * D * (FEATURE + WIDE)}
        late = sum(n * max(0.0, moved / link - work / RATE) for work, moved in passes.items()) + N * D * WIDE / link
        # columns in both passes and float32 gradients back, nothing overlaps
        gather = b * D * (2 * FEATURE + WIDE) / link
        # accumulators of both sides, and held columns
        ring_gib, gather_gib = ((2 * N * D * WIDE + held * D * (FEATURE + WIDE)) / 2**30 for held in (2 * N, b))
        ring = (f"{late:.2g}", f"{hops:.2g}", f"{arithmetic / (arithmetic + late + hops):.2f}", f"{ring_gib:.2f}")
        sizes = (str(n), f"{thousands}k", f"{N:,}", name, f"{arithmetic:.3g}")
        lines.append((*sizes, *ring, f"{gather:.2g}", f"{gather_gib:.2f}"))
    heads = ("GPUs", "pairs", "rows per GPU", "link", "arithmetic", "ring: link", "hop", "share", "GiB", "gather: link")
    return table_of((*heads, "GiB"), lines)


TABLES: dict[str, Callable[[], str]] = {
    each.__name__: each for each in (rank_memory, rank_losses, largest, features, hidden_hops, estimated_cost)
}
