"""Tables of the pages, made of the CSVs in benchmarks/results. A test compares pages and files.

python docs/site/tables.py          # writes every table anew between its two marks
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import papers_tables
from cells import ROOT, Row, cost, gib, last, mib, rows_of, table_of, time_text

from contrastile.experiments.pairs import LOSS_WAYS, difference
from contrastile.experiments.results import Result, by_labels, mean_cost, mean_percent
from contrastile.experiments.ways import gap

MARKS = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
# columns of the files, and their heads on the pages; earlier versions called fonts faces
TESTS = {
    "held-out faces, picture → name": "held-out fonts",
    "held-out names, picture → name": "held-out names",
    "handwritten digits, zero-shot": "digits",
}
LATE_WAYS = {"single": "one vector a text", "late": "late interaction", "BM25": "BM25"}
# implementation and way of a step, as the files name them
STEPS = (
    ("plain", "plain", "whole batch"),
    ("activation checkpointing, whole batch", "plain", "activation checkpointing"),
    ("accumulation, another gradient", "plain", "accumulation"),
    ("two passes by hand", "by hand", "two passes"),
    ("contrastile, `retain=0`", "contrastile", "retain 0"),
    ("contrastile, half of the graphs kept", "contrastile", "retain half"),
    ('contrastile, `retain="auto"`', "contrastile", "retain auto"),
    ("GradCache", "GradCache", "dense loss"),
    ("sentence-transformers", "sentence-transformers", "cached loss"),
    ("open_clip, `--accum-freq`", "open_clip", "accum-freq"),
)
# losses of sentence-transformers, as the files name them, theirs and ours
DOORS = (
    ("ranking", "CachedMultipleNegativesRankingLoss", "CachedRankingLoss"),
    ("multi-vector", "CachedMultiVectorMultipleNegativesRankingLoss", "CachedMultiVectorLoss"),
)


def steps() -> str:
    """Time and memory of whole steps, plain and cached."""
    file, model = "h200_step.csv", {"model": "vit-b-16", "dtype": "bfloat16"}
    plain = last(file, impl="plain", way="whole batch", batch="1024", **model)
    rows = [("plain", plain)]
    for batch in ("1024", "8192", "65536", "262144"):
        rows.append(("`retain=0`", last(file, impl="contrastile", retain="0", batch=batch, sub_batch="512", **model)))
    for batch in ("1024", "8192"):
        row = last(file, impl="contrastile", retain="auto", inputs="device", batch=batch, sub_batch="512", **model)
        rows.append(('`retain="auto"`', row))
    pace = float(plain["us_per_pair"])
    cells = ((way, f"{int(row['batch']):,}", f"{float(row['us_per_pair']) / pace:.2f}", gib(row)) for way, row in rows)
    return table_of(("step", "pairs", "time of a pair, times the plain step's", "peak memory"), cells)


def doors() -> str:
    """A step of sentence-transformers' cached losses, and of ours in their place."""
    cells = []
    for loss, theirs, ours in DOORS:
        rows = rows_of("h200_doors.csv", loss=loss)
        for retain in sorted({row["retain"] for row in rows if row["impl"] == "contrastile"}):
            beside = [row for row in rows if row["impl"] == "sentence-transformers"][-1]
            row = last("h200_doors.csv", loss=loss, impl="contrastile", retain=retain)
            words = f"`{ours}`" + (f', `retain="{retain}"`' if retain != "0" else "")
            figures = (f"{float(each['ms']):,.0f} ms, {mib(each['peak_bytes'])} MiB" for each in (beside, row))
            cells.append((f"`{theirs}`", f"{int(row['batch']):,}", next(figures), words, next(figures)))
    return table_of(("theirs", "pairs", "time, peak memory", "ours", "time, peak memory"), cells)


def cpu_loss() -> str:
    """Speed and memory of the losses beside the dense formula on two cores."""
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
        "loss", "speed, times the dense formula's", "torch's `linear_cross_entropy`", "memory beside the features",
        "the dense formula's memory",
    )  # fmt: skip
    return table_of(head, cells)


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
            found = [rows_of("h200_loss.csv", **at, d=d)[-1:] for d in ("512", "768", "1024")]
            rates = (f"{float(row[0]['ratio']):.2f} ({time_text(float(row[0]['ms']))})" if row else "" for row in found)
            cells.append((title, workspace.removeprefix(", workspace ") or "2 GiB", *rates))
    return table_of(("pairs", "workspace", "512 features", "768", "1024"), cells)


def ranks() -> str:
    """Times and memory of a loss of 768 features on one, two and four H200s."""
    cells = []
    for b, title in (("65536", "64k"), ("131072", "128k"), ("262144", "256k")):
        for world in ("2", "4"):
            rows = [row for row in rows_of(f"h200_{world}_ranks.csv", b=b) if row["world"] == world]
            for row in rows:
                way = row["backend"] if row["impl"] == "contrastile" else f"{row['impl']}, {row['backend']}"
                single = f"{float(row['single_ms']):,.1f} ({float(row['single_cost']):.2f})"
                cells.append((
                    title, world, way.removeprefix("triton, "), f"{float(row['ms']):,.1f} ({float(row['cost']):.2f})",
                    single, f"{float(row['beside_bytes']) / 2**20:,.0f}",
                ))  # fmt: skip
    head = ("pairs", "GPUs", "way", "steps in a row, ms", "a single step, ms", "memory, MiB")
    return table_of(head, cells)


def h200_peers() -> str:
    """Times of other implementations of a loss on one H200, in multiples of ours."""
    peers = (
        ("dense formula under autocast", "clip", "dense", "autocast", (65536,)),
        ("OpenCLIP's class, 16-bit logits", "clip", "open_clip", "one process", (65536,)),
        ("dense formula, float32 logits", "clip", "dense", "float32 logits", (65536,)),
        ("cut-cross-entropy, called for both directions", "clip", "cut-cross-entropy", "exact", (65536,)),
        ("Inf-CLIP's kernels", "clip", "inf-cl", "triton", (32768,)),
        ("`siglip-kernel`, sigmoid", "siglip", "siglip-kernel", "auto", (65536,)),
        ("dense formula, one dtype", "clip", "dense", "one dtype", (4096, 8192)),
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
    """Times of a loss on two H200s beside one GPU and beside other implementations."""
    rows = []
    for b, title in (("65536", "64k"), ("131072", "128k"), ("262144", "256k")):
        peers = [rows_of("h200_2_ranks.csv", impl=impl, b=b) for impl in ("inf-cl", "open_clip")]
        for exchange in ("gather", "ring"):
            ours = last("h200_2_ranks.csv", backend=f"triton, {exchange}", b=b)
            times = (f"{float(peer[0]['ms']) / float(ours['ms']):.1f}" if peer else "" for peer in peers)
            rows.append((title, exchange, f"{100 * float(ours['cost']) - 100:.0f} %", *times))
    head = (
        "pairs", "exchange", "time × ranks, above one GPU's time", "times as fast as Inf-CLIP's ring",
        "times as fast as OpenCLIP's loss",
    )  # fmt: skip
    return table_of(head, rows)


def one_gpu() -> str:
    """Whole steps of ViT-B/16 on one H200: the newest measurement of each way, batch and sub-batch."""
    at = {"model": "vit-b-16"}
    file = [*rows_of("h200_step.csv", commit="499b6ae", **at), *rows_of("h200_step.csv", commit="7854740", **at)]
    newest = {(int(row["batch"]), -int(row["sub_batch"] or row["batch"]), row["way"]): row for row in file}
    plain = float(newest[1024, -1024, "whole batch"]["us_per_pair"])
    rows = []
    for (batch, _, way), row in sorted(newest.items(), key=lambda item: item[0][:2]):
        title = {"whole batch": "plain", "two passes": "two passes by hand"}.get(way, way)
        times = float(row["ratio_to_plain"] or float(row["us_per_pair"]) / plain)
        time = (time_text(float(row["ms"])), f"{float(row['us_per_pair']):,.0f}", f"{times:.3f}")
        rows.append((f"{batch:,}", f"{int(row['sub_batch']):,}" if row["sub_batch"] else "", title, *time, gib(row)))
    return table_of(("batch", "sub-batch", "way", "step", "µs a pair", "times plain", "peak"), rows)


def compiled_towers() -> str:
    """Steps with towers as they are written and compiled: the newest measurement of each."""
    newest = {(row["model"], row["batch"], row["way"]): row for row in rows_of("h200_towers.csv")}
    rows = (
        (model, f"{int(batch):,}", row["sub_batch"], way, f"{float(row['us_per_pair']):,.0f}", gib(row))
        for (model, batch, way), row in newest.items()
    )
    return table_of(("model", "batch", "sub-batch", "way", "µs a pair or text", "peak"), rows)


def _pace(rows: Sequence[Row]) -> str:
    """Microseconds a pair, and in brackets the multiple of the plain step; a range for many measurements."""
    times = sorted(float(row["us_per_pair"]) for row in rows)
    if len(rows) > 3:
        return f"{times[0]:,.0f} to {times[-1]:,.0f}"
    ratios = (f" ({float(row['ratio_to_plain']):.2f})" if row["ratio_to_plain"] else "" for row in rows)
    return ", ".join(f"{float(row['us_per_pair']):,.0f}{ratio}" for row, ratio in zip(rows, ratios, strict=True))


def _peak(rows: Sequence[Row]) -> str:
    """Different peaks in GiB."""
    return ", ".join(dict.fromkeys(f"{float(row['peak_bytes']) / 2**30:.0f}" for row in rows))


def _step(rows: Sequence[Row]) -> str:
    """The shortest time of a step, and the longest where it differs."""
    times = sorted(float(row["ms"]) for row in rows)
    return " to ".join(dict.fromkeys((time_text(times[0]), time_text(times[-1]))))


def _by_way(columns: Iterable[tuple[str, list[Row]]], cell: Callable[[Sequence[Row]], str]) -> str:
    """A row for each way of a step, a column for each list of measurements."""
    lines, columns = [], list(columns)
    for title, impl, way in STEPS:
        cells = []
        for _, measured in columns:
            found = [row for row in measured if row["impl"] == impl and row["way"].startswith(way)]
            # the bench writes a row without a time where memory ran out
            texts = ["does not fit"] * any(not row["ms"] for row in found)
            for inputs, words in INPUTS.items():
                if rows := [row for row in found if row["ms"] and row["inputs"] == inputs]:
                    texts.append(f"{cell(rows)}{words}")
            cells.append("; ".join(texts))
        if any(cells):
            lines.append((title, *cells))
    return table_of(("way", *(head for head, _ in columns)), lines)


def side_by_side(model: str, sub_batch: str, batches: Sequence[int], cell: Callable[[Sequence[Row]], str]) -> str:
    """All ways of a step as measured on 2026-11-22, by batch."""
    file = rows_of("h200_step.csv", model=model, date="2026-11-22")
    measured = [row for row in file if row["sub_batch"] in ("", sub_batch)]
    return _by_way(((f"{batch:,}", [row for row in measured if row["batch"] == str(batch)]) for batch in batches), cell)


def small_sub_batches() -> str:
    """Steps of 1,024 pairs in sub-batches of 128 on two hosts."""
    at = {"model": "vit-b-16", "batch": "1024"}
    hosts = (("fast host", "7014e07"), ("slow host", "499b6ae-dirty"))
    return _by_way(
        ((f"{host} ({commit})", rows_of("h200_step.csv", commit=commit, **at)) for host, commit in hosts), _step
    )


# what a cell says of inputs that are not on the device
INPUTS = {"device": "", "host": ", host", "pool": ", pool"}
LOSSES = {"float64": "cpu_losses_float64", "float32": "cpu_losses_float32", "h200": "h200_losses"}
WAYS_TESTS = {
    "held-out fonts, picture → name": "held-out fonts",
    "held-out names, picture → name": "held-out names",
    "handwritten digits, zero-shot": "digits",
}
VIT_B = ("vit-b-16", "512", (1024, 8192, 65536, 262144, 1048576))
VIT_L = ("vit-l-14", "192", (384, 1024, 8192, 65536, 262144))


def four_ranks() -> str:
    """Memory and time of whole steps with four losses on four H200s."""
    titles = {
        "replicate, dense": "replicate, dense (CLIP)",
        "gather, dense": "gather, dense (OpenCLIP)",
        "ring, triton": "ring, fused tiles",
    }
    names = {"vit-b-16": "ViT-B/16", "vit-l-14": "ViT-L/14"}
    rows = []
    for row in rows_of("h200_4_step.csv"):
        memory = (mib(row[f"{kind}_bytes"]) for kind in ("data", "loss", "backbone", "peak"))
        title = (names[row["model"]], f"{int(row['batch']):,}", titles.get(row["way"], row["way"]))
        rows.append((*title, *memory, f"{float(row['ms']) / 1000:.2f} s"))
    return table_of(("model", "batch", "way", "data, MiB", "loss, MiB", "backbone, MiB", "peak, MiB", "step"), rows)


def _trials(name: str, *labels: str, **wanted: str) -> list[Result]:
    """The trials of a comparison."""
    return [
        Result(
            {label: row[label] for label in labels},
            int(row["seed"]) if row["seed"] else None,
            {cost: float(row[cost]) for cost in ("steps", "examples", "update_bytes") if row.get(cost)},
            {
                test: float(value)
                for test, value in row.items()
                if test.startswith(("held-out", "handwritten")) and value
            },
        )
        for row in rows_of(name, **wanted)
    ]


def losses(file: str) -> str:
    """Recall at 1 of one loss in five ways, and the differences from dense."""
    trials = _trials(file, "way")
    # the seeds that every way has
    seeds = set.intersection(*({trial.seed for trial in group} for group in by_labels(trials).values()))
    groups = by_labels(trial for trial in trials if trial.seed in seeds)
    rows = []
    for way, words in LOSS_WAYS.items():
        cells = []
        for test in TESTS:
            gap = difference(trials, way, test) if way != "dense" else None
            signed = f"{round(gap[0], 2) + 0.0:+.2f} ± {gap[1]:.2f}".replace("-", "−") if gap else ""
            cells += [mean_percent(groups[way,], test), signed]
        rows.append((way, ", ".join(words), *cells))
    head = ("way", "exchange, block", *(cell for title in TESTS.values() for cell in (title, "from dense")))
    return table_of(head, rows)


def ways(file: str, tests: dict[str, str]) -> str:
    """Measures of several losses for equal time, and the differences from the first."""
    trials = _trials(file, "way")
    groups = by_labels(trials)
    (first,), *_ = groups
    rows = []
    for (way,), group in groups.items():
        cells = [way, mean_cost(group, "examples")]
        for test in tests:
            cells += [mean_percent(group, test), gap(trials, way, test, first).replace("-", "−")]
        rows.append(cells)
    return table_of(("loss", "examples", *(cell for test in tests.values() for cell in (test, "from the first"))), rows)


def batches() -> str:
    """Recall at 1 against batch size, share of the data and rule of the rate."""
    groups = by_labels(_trials("h200_2_batches.csv", "data", "batch", "rate"))
    rows = []
    for data, batch, _ in sorted(
        (key for key in groups if key[2] == "fixed"), key=lambda key: tuple(map(float, key[:2]))
    ):
        rules = [groups[data, batch, rate] for rate in ("fixed", "sqrt") if (data, batch, rate) in groups]
        recalls = (" / ".join(mean_percent(trials, test) for trials in rules) for test in TESTS)
        rows.append((f"{float(data):.0%}", f"{int(batch):,}", f"{rules[0][0].costs['steps']:,.0f}", *recalls))
    return table_of(("data", "batch", "steps", *TESTS.values()), rows)


def late_interaction(file: str = "late_docstrings.csv") -> str:
    """nDCG@10 of one vector a text, of late interaction and of BM25, the mean of the seeds and their spread."""
    rows = []
    by_way: dict[tuple[str, ...], dict[str, list[float]]] = {}
    seen: dict[tuple[str, ...], list[int]] = {}
    for row in rows_of(file):
        way = tuple(row[name] for name in ("towers", "way", "batch", "candidates", "chip"))
        by_way.setdefault(way, {}).setdefault(row["part"], []).append(float(row["ndcg_10"]))
        seen.setdefault(way, []).extend([int(row["queries"])] if row["queries"] else [])
    for (towers, way, batch, candidates, chip), parts in by_way.items():
        questions = seen[towers, way, batch, candidates, chip]
        queries = round(statistics.mean(questions)) if questions else 0
        spread = [
            f"{100 * statistics.mean(values):.1f}"
            + (f" ± {100 * (max(values) - min(values)) / 2:.1f}" if len(values) > 1 else "")
            for values in (parts["held-out functions"], parts["held-out packages"])
        ]
        name = LATE_WAYS[way] + (f", of {candidates} candidates of BM25" if candidates not in ("", "0") else "")
        cells = [towers, f"{queries:,}" if queries else "", batch, *spread]
        rows.append((name, *cells, "H200" if "H200" in chip else "CPU"))
    heads = ("", "towers", "questions", "batch", "functions, nDCG@10", "packages, nDCG@10", "on")
    return table_of(heads, rows)


def late_batches() -> str:
    """Seconds and memory of an update of the small late model, by batch."""
    rows = [
        (f"{int(row['batch']):,}", f"{float(row['seconds']):.1f}", row["peak_mib"], row["planned_mib"])
        for row in rows_of("late_batches.csv")
        if row["what"] == "update"
    ]
    return table_of(("questions", "seconds", "MiB", "MiB by the plan"), rows)


def retrieval() -> str:
    """A retriever trained in three ways in the same memory; seconds are those of an update, times the updates."""
    file = "h200_retrieval.csv"
    measures = [f"held-out functions {name}" for name in ("@1", "@5", "@20", "@100", "nDCG@10")]
    measures += ["held-out packages @1", "held-out packages nDCG@10"]
    rows = []
    groups = by_labels(
        [*_trials(file, "way", "batch", queries="108560"), *_trials(file, "way", "batch", way="BM25")[:1]]
    )
    for (way, batch), trials in groups.items():
        cost = ["", "", ""]
        if batch:
            updates = statistics.mean(trial.costs["steps"] for trial in trials)
            one = last("h200_updates.csv", way="plain" if way == "sequential" else way, queries=batch)
            cost = [f"{updates:,.0f}", f"{updates * float(one['seconds']):.0f}", mib(trials[0].costs["update_bytes"])]
        rows.append(
            (way, f"{int(batch):,}" if batch else "", *cost, *(mean_percent(trials, name) for name in measures))
        )
    heads = (
        "way",
        "batch",
        "updates",
        "seconds",
        "MiB",
        "@1",
        "@5",
        "@20",
        "@100",
        "nDCG@10",
        "packages: @1",
        "nDCG@10",
    )
    return table_of(heads, rows)


def updates() -> str:
    """Time and memory of an update of a retriever."""
    ways = ("plain", "accumulated", "cached")
    rows = []
    for queries in dict.fromkeys(row["queries"] for row in rows_of("h200_updates.csv", way="plain")):
        measured = [last("h200_updates.csv", way=way, queries=queries) for way in ways]
        times = (f"{1000 * float(row['seconds']):,.0f}" for row in measured)
        rows.append((f"{int(queries):,}", *times, *(mib(row["bytes"]) for row in measured)))
    return table_of(("queries", *(f"{way}, ms" for way in ways), *(f"{way}, MiB" for way in ways)), rows)


def formula() -> str:
    """Time and memory of the dense formula and of ours on one H200, 512 features."""
    ways = (("dense", "one dtype"), ("dense", "autocast"), ("contrastile", "triton"))
    at = {"loss": "clip", "d": "512", "dtype": "bfloat16"}
    rows = (
        (f"{b:,}", *(cost(last("h200_loss.csv", impl=impl, backend=way, b=str(b), **at)) for impl, way in ways))
        for b in (4096, 8192, 32768, 65536)
    )
    return table_of(("pairs × 512", "plain, bf16 features", "plain, under autocast", "contrastile"), rows)


def open_clip() -> str:
    """Time and memory of OpenCLIP and of ours at 65,536 pairs."""
    b, step = {"b": "65536", "d": "768", "loss": "clip"}, {"batch": "65536", "model": "vit-b-16", "sub_batch": "512"}
    measured = (
        (
            "the loss on one GPU, 768 features",
            last("h200_loss.csv", impl="open_clip", backend="one process", **b),
            last("h200_loss.csv", impl="contrastile", backend="triton", **b),
        ),
        (
            "the loss on a rank of two",
            last("h200_2_ranks.csv", impl="open_clip", **b),
            last("h200_2_ranks.csv", backend="triton, gather", **b),
        ),
        (
            "a whole step of ViT-B/16, `--accum-freq` and `encode`",
            last("h200_step.csv", impl="open_clip", **step),
            last("h200_step.csv", way="retain 0", **step),
        ),
    )
    return table_of(("65,536 pairs", "OpenCLIP", "contrastile"), ((t, cost(a), cost(c)) for t, a, c in measured))


def siglip() -> str:
    """Time and memory of siglip-kernel and of `SigLipLoss` on one H200, 768 features."""
    at, impls = {"loss": "siglip", "d": "768"}, (("siglip-kernel", "auto"), ("contrastile", "triton"))
    rows = (
        (
            f"{b:,}",
            *(cost(last("h200_loss.csv", impl=impl, backend=way, b=str(b), **at)) for impl, way in impls),
        )
        for b in (4096, 8192, 65536)
    )
    return table_of(("pairs × 768", "siglip-kernel", "`SigLipLoss`"), rows)


TABLES: dict[str, Callable[[], str]] = {
    **{
        each.__name__: each
        for each in (
            *(steps, cpu_loss, h200_loss, h200_peers, ranks, two_ranks, four_ranks, one_gpu, batches, retrieval),
            *(updates, small_sub_batches, formula, open_clip, siglip, doors, late_interaction, compiled_towers),
            late_batches,
        )
    },
    "late_interaction_time": partial(late_interaction, "late_docstrings_time.csv"),
    "ways_glyphs": partial(ways, "cpu_loss_ways_glyphs.csv", WAYS_TESTS),
    **{f"losses_{name}": partial(losses, f"{file}.csv") for name, file in LOSSES.items()},
    "vit_b_time": partial(side_by_side, *VIT_B, _pace),
    "vit_b_peak": partial(side_by_side, *VIT_B, _peak),
    "vit_b_step": partial(side_by_side, *VIT_B, _step),
    "vit_l_time": partial(side_by_side, *VIT_L, _pace),
    "vit_l_peak": partial(side_by_side, *VIT_L, _peak),
    **papers_tables.TABLES,
}


def current(text: str) -> str:
    """A page with all its tables as the files have them."""
    return MARKS.sub(lambda mark: f"{mark[1]}\n{TABLES[mark[2]]()}\n{mark[4]}", text)


if __name__ == "__main__":
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        if text != current(text):
            page.write_text(current(text), encoding="utf-8")
