"""nDCG@10 on the docstrings at equal numbers of questions, or in equal time: one vector a text, one a token, and BM25.

    python benchmarks/late_docstrings.py [--seeds 0 1 2] [--epochs 0.3] [--minutes 2] [--batch 64] [--jobs 1]
        [--seconds 3600] [--towers demo|bert] [--runs runs] [--out FOLDER] [key=value ...]

`--towers demo` trains the recipes `docstrings` and `docstrings-late` (twenty minutes on two cores); `bert` trains
`docstrings-bert` with either kind of `model.kind`, with the same encoder, and searches all passages exactly (100 s on
an H200 with `--jobs 6 --epochs 2 --batch 512`). Finished runs under `--runs` are taken up. A row for each way, seed and
held-out part goes to `late_docstrings.csv`; runs that are not finished after `--seconds` are ended, and left out.
`key=value` goes to all runs.

With `--minutes` every run trains for that long instead, and the rows go to `late_docstrings_time.csv`. Without a GPU
these are minutes of the run's own CPU time, so that other programs on the machine take none of them; with
OMP_NUM_THREADS=1 that is the time of one free core.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from contrastile.bench.harness import results_file
from contrastile.train.folder import EVALUATION, METADATA, RECIPE, RunFolder
from contrastile.train.provenance import ORIGIN, provenance
from contrastile.train.recipe import load_retriever_recipe
from contrastile.train.retriever.run import open_run_texts

# of each choice of towers: the words of a run with one vector a text, and of one with a vector for each token
LATE = ("model.kind=late", "model.features=64", "model.query_expansion=false", "loss.scale=4.0")
TOWERS = {
    "demo": {"single": ("docstrings",), "late": ("docstrings-late",)},
    "bert": {"single": ("docstrings-bert",), "late": ("docstrings-bert", *LATE)},
}
COLUMNS = ("way", "towers", "seed", "queries", "batch", "candidates", "part", "ndcg_10", "mrr_10", *ORIGIN)

# more than any run has time for
MOST_EPOCHS = 100.0
# the command, and the same with the run's CPU time as its clock
COMMAND = ("-m", "contrastile")
OWN_CLOCK = (
    "-c", "import sys, time; time.monotonic = time.process_time; "
    "from contrastile.cli.main import main; sys.exit(main(sys.argv[1:]))",
)  # fmt: skip


def rows_of(folder: RunFolder, way: str, towers: str, seed: int) -> list[dict[str, Any]]:
    """The rows of a finished run: its own, and BM25's where the run has it."""
    run, rows = folder.read_json(METADATA), []
    own = {"towers": towers, "seed": seed, "queries": run["examples"], "batch": run["batch"][0]}
    own["candidates"] = load_retriever_recipe(folder / RECIPE, files=False).evaluate.candidates
    for result in folder.read_json(EVALUATION):
        part, _, system = result["test"].partition(", ")
        measures = {"ndcg_10": result["measures"]["nDCG@10"], "mrr_10": result["measures"]["MRR@10"]}
        named = {"way": way, **own} if system == "retriever" else {"way": system, **dict.fromkeys(own, "")}
        rows.append({**named, "part": part, **{name: round(value, 4) for name, value in measures.items()}})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=float, default=0.3)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--towers", choices=[*TOWERS], default="demo")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    minutes, on_gpu = arguments.minutes, torch.cuda.is_available()
    length = [f"train.epochs={arguments.epochs}"]
    if minutes is not None:
        length = [f"train.epochs={MOST_EPOCHS}", f"train.minutes={minutes}"]
    how = [f"train.batch={arguments.batch}", *length, "evaluate.every=1.0"]
    waiting: list[tuple[Path, list[str]]] = []
    ways = [(seed, way, words) for seed in arguments.seeds for way, words in TOWERS[arguments.towers].items()]
    for seed, way, (recipe, *words) in ways:
        path = arguments.runs / f"{way}-s{seed}"
        bm25 = str(seed == arguments.seeds[0] and way == "single").lower()
        own = [f"name={path.name}", f"seed={seed}", f"evaluate.bm25={bm25}"]
        if not (path / EVALUATION).is_file():
            waiting.append((path, [recipe, *words, *how, *own, *arguments.overrides]))
    if waiting:
        # the texts are read once, and found in the cache by all runs
        open_run_texts(load_retriever_recipe(waiting[0][1][0], waiting[0][1][1:]))
    arguments.runs.mkdir(parents=True, exist_ok=True)
    program = COMMAND if on_gpu or minutes is None else OWN_CLOCK

    def train(path: Path, words: list[str]) -> None:
        command = [sys.executable, *program, "train", *words, "--runs", str(arguments.runs)]
        if (left := end - time.monotonic()) > 0:
            with path.with_suffix(".log").open("wb") as log, suppress(subprocess.TimeoutExpired):
                subprocess.run(command, stdout=log, stderr=log, timeout=left, check=False)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda run: train(*run), waiting))
    origin = provenance(torch.device("cuda" if on_gpu else "cpu"))
    name, columns = "late_docstrings.csv", COLUMNS
    if minutes is not None:
        name, columns = "late_docstrings_time.csv", (*COLUMNS, "minutes")
    with results_file(arguments.out and arguments.out / name, columns) as write:
        for seed, way, _ in ways:
            path = arguments.runs / f"{way}-s{seed}"
            if not (path / EVALUATION).is_file():
                log = path.with_suffix(".log")
                print(f"{path.name} is not finished: {log.read_bytes()[-300:] if log.is_file() else 'not begun'!r}")
                continue
            for row in rows_of(RunFolder(path), way, arguments.towers, seed):
                write({**row, **origin, "minutes": minutes if row["towers"] else ""})
                print(f"{row['way']:<8}{row['seed']!s:>5}{row['queries']!s:>8} {row['part']:<24}{row['ndcg_10']:.4f}")


if __name__ == "__main__":
    main()
