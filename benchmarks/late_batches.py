"""Late interaction by batch: memory and seconds of an update of a small model; and the tiles beside the plain formula.

    python benchmarks/late_batches.py [--parts ratio batches] [--sizes 64 256 1024 4096 16384] [--seconds 120]
        [--gibibytes 6] [--out FOLDER]

`batches` takes whole updates of the recipe `docstrings-late`, with made-up texts of full length, each question with two
passages; on a GPU where there is one, in bf16. A size that does not fit by plan, or whose update would take longer than
`--seconds` by the one before, is left out. `ratio` times 256² pairs of 32 × 64 tokens, d = 128, symmetric, with
gradients: the tiles of `contrast` and the plain formula in turns, so that both meet the same machine. Memory is that of
tensors, without the parameters. Rows go to `late_batches.csv`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile import contrast
from contrastile.bench.harness import results_file
from contrastile.losses import Softmax
from contrastile.models.late import special_tokens
from contrastile.planner.profile import target
from contrastile.scorers import MaxSim
from contrastile.train.memory import Weighed
from contrastile.train.objective import QueryObjective
from contrastile.train.optim import build_optimizer
from contrastile.train.planned import made_up_tokenizer, plan_of, towers
from contrastile.train.provenance import ORIGIN, provenance
from contrastile.train.recipe import load_retriever_recipe
from contrastile.train.retriever.job import RetrieverJob
from contrastile.train.retriever.run import build_retriever_run

COLUMNS = ("what", "impl", "batch", "query_tokens", "passage_tokens", "d", "dtype", "seconds", "ratio", "peak_mib",
           "planned_mib", *ORIGIN)  # fmt: skip
SIZES = (64, 256, 1024, 4096, 16384)
# queries and documents, tokens of each, features; and the runs in turns
RATIO, TURNS = (256, 32, 64, 128), 3
MIB = 2**20


def settled(device: torch.device) -> float:
    """The time when the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Seconds of a step."""
    began = settled(device)
    step()
    return settled(device) - began


def plain(q: Tensor, k: Tensor) -> Tensor:
    """The symmetric loss of all similarities at once."""
    x = torch.einsum("ild,jmd->ijlm", q, k).amax(3).sum(2)
    labels = torch.arange(len(x), device=x.device)
    return (F.cross_entropy(x, labels) + F.cross_entropy(x.T, labels)) / 2


def ratio(device: torch.device, write: Callable[[dict[str, Any]], None]) -> None:
    """The tiles beside the plain formula."""
    b, L, T, D = RATIO
    q, k = (F.normalize(torch.randn(b, n, D, device=device), dim=-1).requires_grad_() for n in (L, T))
    tiles: Any = partial(contrast, scorer=MaxSim(), loss=Softmax(symmetric=True), scale=1.0, backend="eager")
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    values = {}
    for turn in range(TURNS + 1):
        for name, loss in (("contrastile, eager", tiles), ("plain formula", plain)):
            q.grad = k.grad = None

            def step(loss: Any = loss) -> None:
                loss(q, k).backward()

            if turn:
                seconds.setdefault(name, []).append(timed(step, device))
                continue
            with Weighed(device) as weighed:
                step()
            peaks[name], values[name] = weighed.bytes, q.grad.clone()  # type: ignore[attr-defined]
    first, second = values.values()
    assert torch.allclose(first, second, atol=1e-5), "other gradients"
    pairs = zip(*seconds.values(), strict=True)
    halves = {"contrastile, eager": statistics.median(ours / theirs for ours, theirs in pairs), "plain formula": 1.0}
    for name, several in seconds.items():
        row = {"what": "loss + grads", "impl": name, "batch": b, "query_tokens": L, "passage_tokens": T, "d": D}
        row |= {"dtype": "float32", "seconds": round(statistics.median(several), 4), "ratio": round(halves[name], 3)}
        write(row | {"peak_mib": round(peaks[name] / MIB, 1), "planned_mib": None})


def batches(device: torch.device, write: Callable[[dict[str, Any]], None], options: Any) -> None:
    """Whole updates of the small model."""
    precision = "bf16" if device.type == "cuda" else "float32"
    words = [f"train.precision={precision}", "train.retain=0", "evaluate.candidates=0", "evaluate.bm25=false"]
    recipe = load_retriever_recipe("docstrings-late", words)
    tokenizer = made_up_tokenizer(recipe.model.tokenizer, special_tokens(recipe.model))
    run, settings = build_retriever_run(recipe, tokenizer), recipe.model.tokenizer
    objective = QueryObjective(recipe.loss, features=run.model.features, scorer=MaxSim())
    job: Any = SimpleNamespace(run=run, objective=objective, teacher=None, _loss=objective)
    optimizer, lengths = build_optimizer(run.model, recipe.optim), (settings.query_length, settings.length)
    generator, before = torch.Generator().manual_seed(0), (0, 0.0)
    for b in options.sizes:
        plan = plan_of(recipe, target(None), b, *towers(recipe, 1, b))
        held = plan.step.held
        planned = plan.peak.bytes - held.weights - held.optimizer
        expected = before[1] * (b / before[0]) ** 2 if before[0] else 0.0
        if planned > options.gibibytes * 2**30 or expected > options.seconds:
            print(f"{b}: left out; {planned / MIB:,.0f} MiB planned, at most {expected:.0f} s expected", flush=True)
            continue
        texts = [
            {"input_ids": torch.randint(10, 100, (n, length), generator=generator),
             "attention_mask": torch.ones(n, length, dtype=torch.int64)}
            for n, length in zip((b, 2 * b), lengths, strict=True)
        ]  # fmt: skip
        marks = {"positives": torch.arange(b)[:, None], "query_ids": torch.arange(b), "key_ids": torch.arange(2 * b)}
        marks = {name: x.to(device) for name, x in marks.items()}
        part: Any = SimpleNamespace(queries=texts[0], passages=texts[1], inputs=lambda _, marks=marks: marks)

        def step(part: Any = part) -> None:
            optimizer.zero_grad()
            RetrieverJob.loss(job, part).backward()
            optimizer.step()

        # the first update also makes the optimizer's state
        seconds, weighed = [], Weighed(device)
        if not before[0]:
            step()
        with weighed:
            seconds.append(timed(step, device))
        if 3 * seconds[0] < options.seconds:
            seconds = [timed(step, device) for _ in range(3)]
        before = (b, min(seconds))
        row = {"what": "update", "impl": "contrastile", "batch": b, "query_tokens": lengths[0]}
        row |= {"passage_tokens": lengths[1], "d": run.model.features, "dtype": precision, "ratio": None}
        row |= {"seconds": round(statistics.median(seconds), 4), "peak_mib": round(weighed.bytes / MIB, 1)}
        write(row | {"planned_mib": round(planned / MIB, 1)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("ratio", "batches"), default=["ratio", "batches"])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--gibibytes", type=float, default=6.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    origin = provenance(device)
    print(f"{origin['chip']}; {origin['versions']}")
    with results_file(options.out and options.out / "late_batches.csv", COLUMNS) as results:

        def write(row: dict[str, Any]) -> None:
            results({**row, **origin})
            ours = f"{row['ratio']:.3f}" if row["ratio"] else ""
            planned = f"{row['planned_mib']:,.1f} planned" if row["planned_mib"] else ""
            print(
                f"{row['what']:13} {row['impl']:20} {row['batch']:>6} {row['seconds']:9.4f} s {ours:>6} "
                f"{row['peak_mib']:9,.1f} MiB {planned}", flush=True,
            )  # fmt: skip

        if "ratio" in options.parts:
            ratio(device, write)
        if "batches" in options.parts:
            batches(device, write, options)


if __name__ == "__main__":
    main()
