"""Tables of trainings: measures of losses, batches and retrievers, by the files of `compare`. Part of `tables.py`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

from cells import last, mib, rows_of, table_of

from contrastile.experiments.results import Result, by_labels, mean_cost, mean_percent
from contrastile.experiments.studies import LOSS_WAYS, difference, gap

# columns of the files, and their heads on the pages; earlier versions called fonts faces
TESTS = {
    "held-out faces, picture → name": "held-out fonts",
    "held-out names, picture → name": "held-out names",
    "handwritten digits, zero-shot": "digits",
}
LATE_WAYS = {"single": "one vector a text", "late": "late interaction", "BM25": "BM25"}
LOSSES = {"float64": "cpu_losses_float64", "float32": "cpu_losses_float32", "h200": "h200_losses"}
WAYS_TESTS = {name.replace("faces", "fonts"): title for name, title in TESTS.items()}
# table 3 of Inf-CL at 64k: ways here, names there, ImageNet's validation set, and MSCOCO's recall at 1 both ways
PAPER_LOSSES = {
    "dense": ("Vanilla (CLIP)", "74.74", "25.71", "44.31"),
    "OpenCLIP local": ("OpenCLIP", "74.86", "25.98", "44.02"),
    "tiled": ("Inf-CL", "74.93", "26.01", "43.95"),
}
# figure 5 of Inf-CL: the batch at which a set of pairs saturates; shares of the glyphs beside them
PAPER_DATA = {"0.1": ("CC3M", ""), "0.3": ("CC12M", "32k"), "1": ("LAION-400M", "256k")}
# table 1 of GradCache: ways and batches here, hits among the first 5, 20 and 100 there
PAPER_RETRIEVAL = {
    ("sequential", "64"): ("Sequential, 8", "59.3", "71.9", "80.9"),
    ("accumulated", "128"): ("Accumulation, 128", "64.3", "77.2", "84.9"),
    ("cached", "128"): ("Cache, 128", "68.6", "79.3", "86.0"),
    ("cached", "512"): ("Cache, 512", "68.3", "79.9", "86.6"),
}
QUERY_TESTS = {
    "held-out queries @1": "first",
    "held-out queries @20": "among the first 20",
    "held-out queries nDCG@10": "nDCG@10",
}


def _trials(name: str, *labels: str, **wanted: str) -> list[Result]:
    """The trials of a comparison."""
    return [
        Result(
            {label: row[label] for label in labels},
            int(row["seed"]) if row["seed"] else None,
            {cost: float(row[cost]) for cost in ("steps", "examples", "update_bytes") if row.get(cost)},
            {test: float(got) for test, got in row.items() if test.startswith(("held-out", "handwritten")) and got},
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
    """Seconds and memory of an update of the small late model, by machine and batch."""
    rows = [
        (where, f"{int(row['batch']):,}", f"{float(row['seconds']):.{digits}f}", row["peak_mib"], row["planned_mib"])
        for where, file, digits in (("CPU", "late_batches.csv", 1), ("H200", "h200_late_batches.csv", 3))
        for row in rows_of(file)
        if row["what"] == "update"
    ]
    return table_of(("", "questions", "seconds", "MiB", "MiB by the plan"), rows)


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
    heads = ("way", "batch", "updates", "seconds", "MiB", "@1", "@5", "@20", "@100", "nDCG@10")
    return table_of((*heads, "packages: @1", "nDCG@10"), rows)


def updates() -> str:
    """Time and memory of an update of a retriever."""
    ways = ("plain", "accumulated", "cached")
    rows = []
    for queries in dict.fromkeys(row["queries"] for row in rows_of("h200_updates.csv", way="plain")):
        measured = [last("h200_updates.csv", way=way, queries=queries) for way in ways]
        times = (f"{1000 * float(row['seconds']):,.0f}" for row in measured)
        rows.append((f"{int(queries):,}", *times, *(mib(row["bytes"]) for row in measured)))
    return table_of(("queries", *(f"{way}, ms" for way in ways), *(f"{way}, MiB" for way in ways)), rows)


def paper_losses() -> str:
    """Inf-CL's table 3 beside glyphs: equal losses train equal models."""
    groups = by_labels(_trials("h200_losses.csv", "way"))
    rows = (
        (*theirs, way, *(mean_percent(groups[way,], test) for test in TESTS)) for way, theirs in PAPER_LOSSES.items()
    )
    return table_of(("paper", "ImageNet", "MSCOCO I → T", "T → I", "here", *TESTS.values()), rows)


def paper_batches() -> str:
    """Inf-CL's figure 5 beside glyphs: the best batch of each share of the data, by recall on held-out fonts."""
    groups, fonts = by_labels(_trials("h200_2_batches.csv", "data", "batch", "rate")), next(iter(TESTS))
    rows = []
    for data, theirs in PAPER_DATA.items():
        means = {
            (int(batch), rate): statistics.mean(trial.measures[fonts] for trial in trials)
            for (share, batch, rate), trials in groups.items()
            if share == data
        }
        best = max(means, key=lambda key: means[key])
        sizes = sorted({batch for batch, _ in means})
        recalls = (f"{100 * max(means[key] for key in means if key[0] == batch):.1f}" for batch in sizes)
        rows.append((*theirs, f"{float(data):.0%} of the glyphs", f"{best[0]:,}", *recalls))
    heads = ("paper: data", "saturates at", "here: data", "best batch", *(f"{batch:,}" for batch in sizes))
    return table_of(heads, rows)


def paper_retrieval() -> str:
    """GradCache's table 1 beside docstrings: hits among the first 5, 20 and 100."""
    file, tests = "h200_retrieval.csv", [f"held-out functions {name}" for name in ("@5", "@20", "@100")]
    groups = by_labels(_trials(file, "way", "batch", queries="108560"))
    rows = (
        (*theirs, f"{way}, {batch}", *(mean_percent(groups[way, batch], test) for test in tests))
        for (way, batch), theirs in PAPER_RETRIEVAL.items()
    )
    return table_of(("paper", "top 5", "top 20", "top 100", "here", "@5", "@20", "@100"), rows)


def paper_updates() -> str:
    """GradCache's figure 1: seconds of an update for each number of queries, accumulated and cached."""
    rows = []
    for queries in dict.fromkeys(row["queries"] for row in rows_of("h200_updates.csv", way="plain")):
        slow, fast = (
            float(last("h200_updates.csv", way=way, queries=queries)["seconds"]) for way in ("accumulated", "cached")
        )
        rows.append((f"{int(queries):,}", f"{slow:.2f}", f"{fast:.2f}", f"{fast / slow:.2f}"))
    return table_of(("queries", "accumulated, s", "cached, s", "cached over accumulated"), rows)


TABLES: dict[str, Callable[[], str]] = {
    **{each.__name__: each for each in (batches, retrieval, updates, late_interaction, late_batches)},
    **{each.__name__: each for each in (paper_losses, paper_batches, paper_retrieval, paper_updates)},
    "late_interaction_time": partial(late_interaction, "late_docstrings_time.csv"),
    "ways_glyphs": partial(ways, "cpu_loss_ways_glyphs.csv", WAYS_TESTS),
    "ways_docstrings": partial(ways, "cpu_loss_ways_docstrings.csv", QUERY_TESTS),
    **{f"losses_{name}": partial(losses, f"{file}.csv") for name, file in LOSSES.items()},
}
