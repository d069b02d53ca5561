"""Tables of the pages, made of the CSVs in benchmarks/results. A test compares pages and files.

python docs/site/tables.py          # writes every table anew between its two marks
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import papers_tables
import training_tables
from cells import ROOT, Row, cost, gib, last, mib, rows_of, table_of, time_text

MARKS = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
# implementation and way of a step, as the files name them
STEPS = (
    ("plain", "plain", "whole batch"),
    ("activation checkpointing, whole batch", "plain", "activation checkpointing"),
    ("accumulation, another gradient", "plain", "accumulation, not the same gradient"),
    ("two passes by hand", "by hand", "two passes"),
    ("contrastile, `retain=0`", "contrastile", "retain 0"),
    ("contrastile, half of the graphs kept", "contrastile", "retain half"),
    ("contrastile, all graphs kept", "contrastile", "retain all"),
    ('contrastile, `retain="auto"`', "contrastile", "retain auto"),
    ("GradCache", "GradCache", "dense loss"),
    ("sentence-transformers", "sentence-transformers", "cached loss"),
    ("open_clip, `--accum-freq`", "open_clip", "accum-freq"),
    ("plain, compiled", "plain", "whole batch, compiled"),
    ("contrastile, `retain=0`, compiled", "contrastile", "retain 0, compiled"),
    ('contrastile, `retain="auto"`, compiled', "contrastile", "retain auto, compiled"),
)
# losses beside `ClipLoss`, as the bench names them
LOSSES = {
    "clip_labels": "`ClipLoss`, four rows of a label",
    "clip_two_labels": "`ClipLoss`, two labels in all",
    "infonce": "`InfoNCELoss`",
    "hardness": "`InfoNCELoss`, hardness",
    "queue": "`InfoNCELoss`, a queue of as many keys",
    "own": "`InfoNCELoss`, eight negatives of each query",
    "hardness_own": "`InfoNCELoss`, the same with hardness",
    "own_alone": "`InfoNCELoss(in_batch=False)`, the same",
    "dcl": "`DCLLoss`",
    "dclw": "`DCLLoss(sigma=0.5)`",
    "gist": "`GISTLoss`",
    "gist_relative": '`GISTLoss(margin_strategy="relative")`',
    "gist_pairs": "`GISTLoss`, pairs of queries and of keys too",
    "distill": "`DistillClipLoss`",
    "siglip": "`SigLipLoss`",
    "siglip_labels": "`SigLipLoss`, four rows of a label",
    "siglip_balanced": "`SigLipLoss(balanced=True)`, the same",
    "ntxent": "`NTXentLoss`, of both sides as views",
    "supcon": "`SupConLoss`, the same, four rows of a label",
    "supcon_in": '`SupConLoss(form="in")`, the same',
}
# of README: file, loss, rows, features, ranks, and our way; sizes at which another way wins are among them
README = (
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
)
# doors by page, as the files name them, theirs and ours
DOORS = {
    "doors": (
        ("ranking", "`CachedMultipleNegativesRankingLoss`", "`CachedRankingLoss`"),
        ("symmetric", "`CachedMultipleNegativesSymmetricRankingLoss`", "`CachedSymmetricLoss`"),
        ("gist", "`CachedGISTEmbedLoss`", "`CachedGISTLoss`"),
        ("multi-vector", "`CachedMultiVectorMultipleNegativesRankingLoss`", "`CachedMultiVectorLoss`"),
    ),
    "door_transformers": (("trainer", "the formula as `compute_loss`, whole batch", "`ContrastileTrainer`"),),
    "door_lightning": (("lightning", "the formula in `training_step`, whole batch", "`ContrastileMixin`"),),
    "door_accelerate": (("accelerate", "the formula, whole batch", "the code"),),
    "door_deepspeed": (("deepspeed", "the formula, whole batch", "the code"),),
    "door_tevatron": (("tevatron", "`DenseModel`, whole batch", "the subclass"),),
    "door_flag_embedding": (("flag-embedding", "`sub_batch_size`", "the subclass"),),
    "door_colpali_engine": (("colpali-engine", "`ContrastiveTrainer`, whole batch", "the subclass"),),
    "door_pylate": (("pylate", "`CachedContrastive`", "the subclass"),),
}


def readme() -> str:
    """Forward and backward by contrastile, and by the fastest other way: times as fast, bold where that way wins."""
    names = {"clip": "ClipLoss", "siglip": "SigLipLoss", "infonce": "InfoNCELoss"}
    cells = []
    for file, loss, b, d, world, way in README:
        at = {"loss": loss, "b": str(b), "d": str(d), "world": str(world)}
        # on a GPU in 16 bits
        rows = rows_of(f"{file}.csv", dtype="float32" if file == "cpu_loss" else "bfloat16", **at)
        # of rows measured again the newest one; a row without a time ran out of memory
        newest = {(row["impl"], row["backend"]): row for row in rows if row["ms"]}
        ours = newest["contrastile", way]
        bits = {"bfloat16": "bf16", "float32": "float32"}[ours["dtype"]]
        shape = f"`{names[loss]}` {b:,} x {d:,}, {bits}{way.removeprefix('triton').removeprefix('eager')}"
        device = f"{ours['chip'].split(' of ')[0]} CPU cores" if "CPU" in ours["chip"] else "H200"
        others = [row for row in newest.values() if row["impl"] != "contrastile"]
        beside = "not measured" if all(row["ms"] for row in rows) else "none fits", ""
        if others:
            best = min(others, key=lambda row: float(row["ms"]))
            title = {
                "dense": f"plain formula, {best['backend']}",
                "linear_cross_entropy": "torch's `linear_cross_entropy`",
            }.get(best["impl"], best["impl"])
            times = float(best["ms"]) / float(ours["ms"])
            beside = (
                f"{title}: {cost(best)}",
                f"{times:.1f}" if times >= 1.95 else f"{times:.2f}" if times >= 1 else f"**{times:.2f}**",
            )
        cells.append((shape, f"{world} x {device}" if world > 1 else device, cost(ours), *beside))
    return table_of(("forward and backward", "device", "contrastile", "fastest other", "times as fast"), cells)


def steps() -> str:
    """Time and memory of whole steps, plain and cached."""
    file, model = "h200_step.csv", {"model": "vit-b-16", "dtype": "bfloat16"}
    plain = last(file, impl="plain", way="whole batch", batch="1024", **model)
    rows = [("plain", plain)]
    for way, title in (("retain 0", "`retain=0`"), ("retain auto", '`retain="auto"`')):
        for batch in ("1024", "8192", "65536"):
            rows.append((title, last(file, impl="contrastile", way=way, batch=batch, sub_batch="512", **model)))
    pace = float(plain["us_per_pair"])
    cells = ((way, f"{int(row['batch']):,}", f"{float(row['us_per_pair']) / pace:.2f}", gib(row)) for way, row in rows)
    return table_of(("step", "pairs", "time per pair, in multiples of the plain step's", "peak memory"), cells)


def doors(page: str) -> str:
    """A step in the trainers of other libraries by their losses, and by ours in their place."""
    cells = []
    for door, theirs, ours in DOORS[page]:
        theirs_rows = [row for row in rows_of("h200_doors.csv", loss=door) if not row["impl"].startswith("contrastile")]
        # the largest batch that theirs has; small batches are said in the text
        beside = max(theirs_rows[::-1], key=lambda row: int(row["batch"]))
        rows = rows_of("h200_doors.csv", loss=door, batch=beside["batch"])
        ways = {(row["impl"], row["retain"]): row for row in rows if row["impl"].startswith("contrastile")}
        for (impl, retain), row in sorted(ways.items()):
            option = impl.removeprefix("contrastile, ")
            words = ours + (f", `{option}`" if option != impl else "")
            words += f', `retain="{retain}"`' if retain != "0" else ""
            figures = (
                f"{float(each['ms']):,.0f} ms, {mib(each['peak_bytes'])} MiB" if each["ms"] else "out of memory"
                for each in (beside, row)
            )
            cells.append((theirs, f"{int(row['batch']):,}", next(figures), words, next(figures)))
    return table_of(("theirs", "pairs", "time, peak memory", "ours", "time, peak memory"), cells)


def cpu_loss() -> str:
    """Speed and memory of the losses beside the plain formula on two cores."""
    cells = []
    for loss, title in (("clip", "CLIP"), ("siglip", "SigLIP"), ("infonce", "InfoNCE, one direction")):
        at = {"loss": loss, "b": "8192", "d": "128", "dtype": "float32"}
        dense = last("cpu_loss.csv", impl="dense", **at)
        ours = last("cpu_loss.csv", impl="contrastile", **at)
        theirs = rows_of("cpu_loss.csv", **{**at, "impl": "linear_cross_entropy"})
        speed = [float(dense["ms"]) / float(row["ms"]) for row in (ours, *theirs[-1:])]
        mib = [f"{float(row['peak_bytes']) / 2**20:,.0f} MiB" for row in (ours, dense)]
        cells.append((title, f"{speed[0]:.1f}", f"{speed[1]:.1f}" if theirs else "", *mib))
    head = (
        "loss", "speed, times the plain formula's", "torch's `linear_cross_entropy`", "memory beside the features",
        "the plain formula's memory",
    )  # fmt: skip
    return table_of(head, cells)


def h200_loss() -> str:
    """Rate of the losses on one H200 beside that of a matrix product, and their times."""
    cells = []
    for b, title in ((65536, "64k"), (262144, "256k"), (1048576, "1M"), (4194304, "4.2M")):
        for workspace in ("", ", workspace 192 MiB")[: 2 if b == 65536 else 1]:
            at = {"impl": "contrastile", "loss": "clip", "dtype": "bfloat16", "backend": f"triton{workspace}"}
            rows = [rows_of("h200_loss.csv", **at, b=str(b), d=d)[-1:] for d in ("512", "768", "1024")]
            rates = (f"{float(row[0]['ratio']):.2f} ({time_text(float(row[0]['ms']))})" if row else "" for row in rows)
            cells.append((title, workspace.removeprefix(", workspace ") or "2 GiB", *rates))
    return table_of(("pairs", "workspace", "512 features", "768", "1024"), cells)


def h100_loss() -> str:
    """Rate of `ClipLoss` on one H100, with 2 GiB, over that of a product, and its time."""
    cells = []
    for b in (8192, 16384, 65536):
        at = {"impl": "contrastile", "loss": "clip", "backend": "triton", "b": str(b)}
        rows = [last("h100_loss.csv", **at, d=d) for d in ("512", "768", "1024")]
        cells.append((f"{b:,}", *(f"{float(row['ratio']):.2f} ({time_text(float(row['ms']))})" for row in rows)))
    return table_of(("pairs", "512 features", "768", "1024"), cells)


def calls(file: str) -> str:
    """Calls of users on one GPU: median and least milliseconds, beside the plain formula and the same compiled."""
    every = ("contrastile", "plain", "compiled", "compiled contrastile")
    cells, ways = [], [impl for impl in every if rows_of(file, impl=impl)]
    for call in dict.fromkeys(row["call"] for row in rows_of(file, impl="compiled")):
        rows = [rows_of(file, call=call, impl=impl)[-1:] for impl in ways]
        times = (", ".join(f"{float(row[ms]):.2f}" for row in found for ms in ("ms", "least_ms")) for found in rows)
        cells.append((call.replace(" x ", " × "), *times))
    return table_of(("call", *ways), cells)


def ranks(loss: str) -> str:
    """Times and memory of a loss of 768 features on two and four H200s: the newest measurement of each way."""
    cells = []
    for b, title in (("65536", "64k"), ("131072", "128k"), ("262144", "256k"), ("1048576", "1M")):
        for world in ("2", "4"):
            rows = rows_of(f"h200_{world}_ranks.csv", b=b, loss=loss, world=world)
            newest = {(row["impl"], row["backend"]): row for row in rows}
            for (impl, backend), row in sorted(newest.items(), key=_ours_first):
                way = backend.removeprefix("triton, ") if impl == "contrastile" else f"{impl}, {backend}"
                times = (f"{float(row[ms]):,.1f}" + _times_alone(row[cost]) for ms, cost in TIMES_OF_RANKS)
                cells.append((title, world, way, *times, f"{float(row['beside_bytes']) / 2**20:,.0f}"))
    head = (
        "pairs", "GPUs", "way", "steps in a row, ms", "a single step, ms", "memory beside gradients and workspace, MiB",
    )  # fmt: skip
    return table_of(head, cells)


def few_rows() -> str:
    """Times of `ClipLoss` with few rows on each of two and four H200s, beside OpenCLIP's class in its faster form."""
    calls = dict.fromkeys(row["call"] for row in rows_of("h200_2_user_calls.csv"))
    cells = []
    for call in calls:
        times = []
        for world in (2, 4):
            # the newest of each
            newest = {row["impl"]: row for row in rows_of(f"h200_{world}_user_calls.csv", call=call)}
            ours, ring, *peers = newest.values()
            faster = min(peers, key=lambda row: float(row["ms"]))
            times += [f"{float(row['ms']):.2f}, {float(row['least_ms']):.2f}" for row in (ours, ring, faster)]
        cells.append((call.removeprefix("clip ").removesuffix(" on each rank").replace("x", "×"), *times))
    ways = [f"{world} GPUs: {way}" for world in (2, 4) for way in ("gather", "ring", "OpenCLIP")]
    return table_of(("rows of a rank × features", *ways), cells)


def _ours_first(measured: tuple[tuple[str, str], Row]) -> tuple[bool, str, bool, str]:
    """Order of the ways: ours as they are, ours with a setting, and other implementations by name."""
    impl, backend = measured[0]
    return impl != "contrastile", impl, "multiprocessors" in backend, backend.replace("hierarchical", "z")


# columns of times, and of their multiples of one GPU's
TIMES_OF_RANKS = (("ms", "cost"), ("single_ms", "single_cost"))


def _times_alone(cost: str) -> str:
    """The time multiplied by the ranks over that of one GPU, where that was measured."""
    return f" ({float(cost):.2f})" if cost else ""


def h200_peers() -> str:
    """Times of other implementations of a loss on one H200, in multiples of ours."""
    peers = (
        ("plain formula under autocast", "clip", "dense", "autocast", (65536,)),
        ("OpenCLIP's class, 16-bit logits", "clip", "open_clip", "one process", (65536,)),
        ("plain formula, float32 logits", "clip", "dense", "float32 logits", (65536,)),
        ("cut-cross-entropy, called for both directions", "clip", "cut-cross-entropy", "exact", (65536,)),
        ("Inf-CLIP's kernels", "clip", "inf-cl", "triton", (8192, 32768)),
        ("`siglip-kernel`, sigmoid", "siglip", "siglip-kernel", "auto", (65536,)),
        ("plain formula, one dtype", "clip", "dense", "one dtype", (4096, 8192)),
    )
    rows = []
    for title, loss, impl, backend, sizes in peers:
        for b in sizes:
            at = {"loss": loss, "dtype": "bfloat16", "b": str(b)}
            cells = []
            for d in ("512", "768", "1024"):
                theirs = rows_of("h200_loss.csv", impl=impl, backend=backend, d=d, **at)
                ours = rows_of("h200_loss.csv", impl="contrastile", backend="triton", d=d, **at)
                cells.append(f"{float(theirs[-1]['ms']) / float(ours[-1]['ms']):.1f}" if theirs and ours else "")
            rows.append((title, f"{b // 1024}k", *cells))
    return table_of(("implementation", "pairs", "512 features", "768", "1024"), rows)


def two_ranks() -> str:
    """Times of `ClipLoss` on two H200s beside one GPU and beside other implementations."""
    rows = []
    for b, title in (("65536", "64k"), ("131072", "128k"), ("262144", "256k")):
        peers = [rows_of("h200_2_ranks.csv", impl=impl, loss="clip", b=b) for impl in ("inf-cl", "open_clip")]
        for exchange in ("gather", "ring"):
            ours = last("h200_2_ranks.csv", loss="clip", backend=f"triton, {exchange}", b=b)
            times = (f"{float(peer[0]['ms']) / float(ours['ms']):.1f}" if peer else "" for peer in peers)
            rows.append((title, exchange, f"{round(100 * float(ours['cost']) - 100)} %".replace("-", "−"), *times))
    head = (
        "pairs", "exchange", "time × ranks, above one GPU's time", "times as fast as Inf-CLIP's ring",
        "times as fast as OpenCLIP's loss",
    )  # fmt: skip
    return table_of(head, rows)


def texts() -> str:
    """Steps of texts in sub-batches cut in three ways, as they are written and compiled."""
    rows = ((row["way"], f"{float(row['us_per_pair']):,.0f}", gib(row)) for row in rows_of("h200_towers.csv"))
    return table_of(("way", "µs a text", "peak"), rows)


def _pace(row: Row) -> str:
    """Microseconds a pair, in brackets the multiple of the plain step, and peak."""
    ratio = f" ({float(row['ratio_to_plain']):.2f})" if row["ratio_to_plain"] else ""
    return f"{float(row['us_per_pair']):,.0f}{ratio}, {gib(row)}"


def _by_way(columns: Iterable[tuple[str, list[Row]]]) -> str:
    """A row for each way of a step, a column for each list of measurements."""
    lines, columns = [], list(columns)
    for title, impl, way in STEPS:
        cells = []
        for _, measured in columns:
            ways = {f"{way}{of_way}": words for of_way, words in INPUTS.items()}
            found = {row["way"]: row for row in measured if row["impl"] == impl and row["way"] in ways}
            # the bench writes a row without a time where memory ran out
            texts = (f"{_pace(row)}{ways[way]}" if row["ms"] else "does not fit" for way, row in found.items())
            cells.append("; ".join(texts))
        if any(cells):
            lines.append((title, *cells))
    return table_of(("way", *(head for head, _ in columns)), lines)


def side_by_side(model: str, sub_batch: str, batches: Sequence[int]) -> str:
    """All ways of a step by batch."""
    rows = [row for row in rows_of("h200_step.csv", model=model) if row["sub_batch"] in ("", sub_batch)]
    return _by_way((f"{batch:,}", [row for row in rows if row["batch"] == str(batch)]) for batch in batches)


def sub_batches() -> str:
    """Steps of 1,024 pairs of ViT-B/16 by sub-batch."""
    at = {"model": "vit-b-16", "batch": "1024"}
    return _by_way((f"{size:,}", rows_of("h200_step.csv", sub_batch=str(size), **at)) for size in (128, 256, 512, 1024))


def loss_ratios() -> str:
    """Time and memory of each loss over those of `ClipLoss` of the same rows."""
    shapes = (("8192", "512"), ("32768", "512"), ("32768", "768"))
    cases = (*((*shape, "ms") for shape in shapes), *((*shape, "peak_bytes") for shape in shapes[:2]))
    cells = ((title, *(_over_clip(loss, *case) for case in cases)) for loss, title in LOSSES.items())
    heads = ("8,192 × 512", "32,768 × 512", "32,768 × 768", "memory, 8,192", "32,768 × 512")
    return table_of(("loss", *heads), cells)


def _over_clip(loss: str, b: str, d: str, column: str) -> str:
    rows, clips = (rows_of("h200_loss_ratios.csv", loss=name, b=b, d=d) for name in (loss, "clip"))
    if not rows:
        return ""
    # of the same run where it measured both
    beside = [clip for clip in clips if clip["commit"] == rows[-1]["commit"]] or clips
    return f"{float(rows[-1][column]) / float(beside[0][column]):.2f}"


# ending of a way's name, and text of a cell, for inputs that are not on the device
INPUTS = {"": "", ", streamed": ", host", ", from a pool": ", pool"}
VIT_B = ("vit-b-16", "512", (1024, 8192, 65536, 262144, 1048576))
VIT_L = ("vit-l-14", "192", (384, 1024, 8192, 65536, 262144))


def four_ranks(*, compiled: bool) -> str:
    """Memory and time of whole steps on four H200s: the newest measurement of each way."""
    titles = {
        "replicate, dense": "replicate, dense (CLIP)",
        "gather, dense": "gather, dense (OpenCLIP)",
        "ring, triton": "ring, fused tiles",
    }
    names = {"vit-b-16": "ViT-B/16", "vit-l-14": "ViT-L/14"}
    newest = {}
    for row in rows_of("h200_4_step.csv"):
        if row["way"].endswith(", compiled") != compiled:
            continue
        memory = (mib(row[f"{kind}_bytes"]) for kind in ("data", "loss", "backbone", "peak"))
        way = row["way"] if row["impl"] == "contrastile" else f"{row['impl']}, {row['way']}"
        title = (names[row["model"]], f"{int(row['batch']):,}", titles.get(way, way.removesuffix(", compiled")))
        newest[title] = (*memory, f"{float(row['ms']) / 1000:.2f} s")
    rows = [(*title, *measured) for title, measured in newest.items()]
    return table_of(("model", "batch", "way", "data, MiB", "loss, MiB", "backbone, MiB", "peak, MiB", "step"), rows)


def side_by_loss(loss: str, d: str, sizes: Sequence[int], ways: dict[tuple[str, str], str]) -> str:
    """Time and memory of a loss on one H200 by several implementations and ways, which have names."""
    at = {"loss": loss, "d": d, "dtype": "bfloat16"}
    rows = (
        (f"{b:,}", *(cost(last("h200_loss.csv", impl=impl, backend=way, b=str(b), **at)) for impl, way in ways))
        for b in sizes
    )
    return table_of((f"pairs × {d}", *ways.values()), rows)


def open_clip() -> str:
    """Time and memory of OpenCLIP and of ours: losses of 65,536 pairs, and a step."""
    b, step = {"b": "65536", "d": "768", "loss": "clip"}, {"batch": "8192", "model": "vit-b-16", "sub_batch": "512"}
    measured = (
        (
            "the loss of 65,536 pairs on one GPU, 768 features",
            last("h200_loss.csv", impl="open_clip", backend="one process", **b),
            last("h200_loss.csv", impl="contrastile", backend="triton", **b),
        ),
        (
            "the same on a rank of two",
            last("h200_2_ranks.csv", impl="open_clip", **b),
            last("h200_2_ranks.csv", backend="triton, gather", **b),
        ),
        (
            "a step of 8,192 pairs of ViT-B/16, `--accum-freq` and `encode`",
            last("h200_step.csv", impl="open_clip", **step),
            last("h200_step.csv", way="retain 0", **step),
        ),
    )
    return table_of(("", "OpenCLIP", "contrastile"), ((t, cost(a), cost(c)) for t, a, c in measured))


FORMULA = {
    ("dense", "one dtype"): "plain, bf16 features",
    ("dense", "autocast"): "plain, under autocast",
    ("contrastile", "triton"): "contrastile",
}
SIGLIP = {("siglip-kernel", "auto"): "siglip-kernel", ("contrastile", "triton"): "`SigLipLoss`"}
MEASURED = (
    *(readme, steps, cpu_loss, h200_loss, h200_peers, two_ranks, sub_batches, texts),
    *(open_clip, loss_ratios, h100_loss),
)
TABLES: dict[str, Callable[[], str]] = {
    **{each.__name__: each for each in MEASURED},
    **{page: partial(doors, page) for page in DOORS},
    **{f"{chip}_calls": partial(calls, f"{chip}_user_calls.csv") for chip in ("h100", "h200")},
    "ranks": partial(ranks, "clip"),
    "ranks_sigmoid": partial(ranks, "siglip"),
    "few_rows": few_rows,
    "four_ranks": partial(four_ranks, compiled=False),
    "four_ranks_compiled": partial(four_ranks, compiled=True),
    "formula": partial(side_by_loss, "clip", "512", (4096, 8192, 32768, 65536), FORMULA),
    "siglip": partial(side_by_loss, "siglip", "768", (4096, 8192, 65536), SIGLIP),
    "siglip_plus": partial(side_by_loss, "siglip_balanced", "768", (8192, 32768), SIGLIP),
    "vit_b": partial(side_by_side, *VIT_B),
    "vit_l": partial(side_by_side, *VIT_L),
    **papers_tables.TABLES,
    **training_tables.TABLES,
}


def current(text: str) -> str:
    """A page with all its tables as the files have them."""
    return MARKS.sub(lambda mark: f"{mark[1]}\n{TABLES[mark[2]]()}\n{mark[4]}", text)


if __name__ == "__main__":
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        if text != current(text):
            page.write_text(current(text), encoding="utf-8")
