"""Late interaction by batch: memory and seconds of an update of a small model; and the tiles beside the plain formula.

    python benchmarks/late_batches.py [--parts ratio batches] [--sizes 64 256 1024] [--csv FILE]

`batches` takes whole updates of the recipe `docstrings-late`, with made-up texts of full length, each question with two
passages; on a GPU where there is one, in bf16. `ratio` times 256² pairs of 32 × 64 tokens, d = 128, symmetric, with
gradients: the tiles of `contrast` and the plain formula in turns, so that both meet the same machine. Memory is that of
tensors, without the parameters. On a GPU sub-batches have 1,024 texts, and the workspace of the loss has 1 GiB.
"""

from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastile import contrast
from contrastile.bench.gate import step
from contrastile.bench.harness import Machine, Report, Row, Table, script
from contrastile.bench.peers import both_directions
from contrastile.losses import Softmax
from contrastile.models.towers import special_tokens
from contrastile.planner.profile import this_machine
from contrastile.scorers import MaxSim
from contrastile.train.objective import QueryObjective
from contrastile.train.optim import build_optimizer
from contrastile.train.planned import made_up_tokenizer, plan_of, towers
from contrastile.train.recipe import load_any_recipe
from contrastile.train.retriever.job import RetrieverJob
from contrastile.train.retriever.run import RetrieverRun

TABLE = Table(
    "what 13 | impl=by 20 | batch >6 | query_tokens | passage_tokens | d | dtype | seconds >9.4f | ratio >6.3f"
    " | peak_mib=MiB >9,.1f | planned_mib=planned >9,.1f"
)
# queries and documents, tokens of each, features; and the seconds of each way in turns
RATIO, SECONDS = (256, 32, 64, 128), 5.0
# a longer update is timed once
LONG_UPDATE = 40.0
MIB = 2**20


def plain(q: Tensor, k: Tensor) -> Tensor:
    """The symmetric loss of all similarities at once."""
    x = torch.einsum("ild,jmd->ijlm", q, k).amax(3).sum(2)
    return both_directions(x, x.T)


def row(what: str, impl: str, sizes: tuple[int, ...], dtype: str, seconds: float, peak: int, **more: Any) -> Row:
    """A row; sizes: the batch, tokens of a query and of a passage, features."""
    sized = dict(zip(("batch", "query_tokens", "passage_tokens", "d"), sizes, strict=True))
    measured = {"seconds": round(seconds, 4), "peak_mib": round(peak / MIB, 1)}
    return {"what": what, "impl": impl, "dtype": dtype, **sized, **measured, **more}


def ratio(machine: Machine, report: Report) -> None:
    b, L, T, D = RATIO
    q, k = (F.normalize(torch.randn(b, n, D, device=machine.device), dim=-1).requires_grad_() for n in (L, T))
    tiles = partial(contrast, scorer=MaxSim(), loss=Softmax(symmetric=True), scale=1.0, backend="eager")
    losses = {"contrastile, eager": tiles, "plain formula": plain}
    runs = {name: partial(step, loss, [q, k]) for name, loss in losses.items()}
    for ours, true in zip(*(run()[1:] for run in runs.values()), strict=True):
        assert torch.allclose(ours, true, atol=1e-5), "other gradients"
    peaks, timings = {name: machine.peak(run) for name, run in runs.items()}, machine.race(runs)
    for name, timing in timings.items():
        times = round(timing.ms / timings["plain formula"].ms, 3)
        report.result(row("loss + grads", name, RATIO, "float32", timing.ms / 1e3, peaks[name], ratio=times))


def batches(machine: Machine, report: Report, updates: list[int]) -> None:
    on_gpu = machine.device.type == "cuda"
    precision = "bf16" if on_gpu else "float32"
    words = [f"train.precision={precision}", "train.retain=0", "evaluate.candidates=0", "evaluate.bm25=false"]
    if on_gpu:
        words += ["train.sub_batch={query=1024,passage=1024}", f"loss.workspace={2**30}"]
    recipe: Any = load_any_recipe("docstrings-late", words)
    tokenizer = made_up_tokenizer(recipe.model.tokenizer, special_tokens(recipe.model))
    run, settings = RetrieverRun.untrained(recipe, tokenizer), recipe.model.tokenizer
    objective = QueryObjective(recipe.loss, features=run.model.features, scorer=MaxSim())
    job: Any = SimpleNamespace(run=run, objective=objective, teacher=None, _loss=objective)
    optimizer, lengths = build_optimizer(run.model, recipe.optim), (settings.query_length, settings.length)
    generator = torch.Generator().manual_seed(0)
    for b in updates:
        plan = plan_of(recipe, this_machine(), b, *towers(recipe, 1, b, machine.device.type))
        held = plan.step.held
        # those of libraries are there since the first update
        planned = round((plan.peak.bytes - held.weights - held.optimizer - held.libraries) / MIB, 1)
        texts = [
            {"input_ids": torch.randint(10, 100, (n, length), generator=generator),
             "attention_mask": torch.ones(n, length, dtype=torch.int64)}
            for n, length in zip((b, 2 * b), lengths, strict=True)
        ]  # fmt: skip
        marks = {"positives": torch.arange(b)[:, None], "query_ids": torch.arange(b), "key_ids": torch.arange(2 * b)}
        marks = {name: x.to(machine.device) for name, x in marks.items()}
        part: Any = SimpleNamespace(queries=texts[0], passages=texts[1], inputs=lambda _, marks=marks: marks)

        def update(part: Any = part) -> None:
            optimizer.zero_grad()
            RetrieverJob.loss(job, part).backward()
            optimizer.step()

        # the first update also makes the optimizer's state
        if b == updates[0]:
            update()
        first, peak = machine.time_and_peak(update)
        seconds = median(machine.time(update) for _ in range(3)) if first < LONG_UPDATE else first
        sizes = (b, *lengths, run.model.features)
        report.result(row("update", "contrastile", sizes, precision, seconds, peak, planned_mib=planned))


def main() -> None:
    parts = ("ratio", "batches")
    words = {
        "--parts": {"nargs": "+", "choices": parts, "default": parts},
        "--sizes": {"type": int, "nargs": "+", "default": [64, 256, 1024]},
    }
    with script(__doc__, TABLE, seconds=SECONDS, options=words) as (options, machine, report):
        if "ratio" in options.parts:
            ratio(machine, report)
        if "batches" in options.parts:
            batches(machine, report, options.sizes)


if __name__ == "__main__":
    main()
