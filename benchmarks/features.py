"""Features that no other file measures: learned distances, LiT, optimizers, and the first steps of the paper's recipe.

    python benchmarks/features.py [--csv FILE]

Takes two minutes on an H200; without a GPU sizes are small. Steps of LiT are those of the training loop
(`train/loop.py`), on a batch whose inputs are there, of tar shards of made-up pictures whose titles fill the text
tower. The recipe's steps read the same shards, and `waiting` is the share of their time before the batch is there.
"""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from loading import trained, write_shards
from papers import TINY_CLIP
from planner_rows import CLIP, OPTIMIZERS
from torch import Tensor, nn

from contrastile import contrast
from contrastile.bench.harness import Machine, Report, Table, script
from contrastile.scorers import Bilinear, MaxSim, PairMLP
from contrastile.train.image_text import ImageText
from contrastile.train.loop import step
from contrastile.train.memory import PeakMemory
from contrastile.train.optim import build_optimizer, state_bytes, step_bytes
from contrastile.train.planned import made_up_tokenizer, planned_memory
from contrastile.train.ranks import ALONE
from contrastile.train.recipe import load_any_recipe
from contrastile.train.run import Run

TABLE = Table(
    "what 9 | way 44 | batch >7 | sub_batch | steps | ms >10.2f | us_per_pair=us/pair >8.1f"
    " | peak_bytes=peak MiB >9,.0f | planned_bytes=planned >9,.0f | waiting"
)
RECIPE = "lit-vit-b-16"
# words of a title: more tokens than a text tower reads
TITLE = 90
# steps of the recipe, and their pairs
STEPS, BATCH = 200, 128
LIT_WAYS = {
    "image tower locked": [],
    "locked, features computed once": ["model.precompute=true"],
    "the same, features in host memory": ["model.precompute=true", "train.features=host"],
    "both towers learn": ["model.locked=[]"],
}
# towers of a few thousand weights
_TINY_TOWERS = (("image", "vit", ", patch_size=8"), ("text", "bert", ""))
TINY_LIT = (
    "data.image_size=32", "model.features=32", "train.precision=float32",
    *(f"model.{side}.config={{model_type='{kind}', hidden_size=32, intermediate_size=64, num_hidden_layers=2, "
      f"num_attention_heads=2{more}}}" for side, kind, more in _TINY_TOWERS),
    "model.tokenizer={size=500, length=16}",
)  # fmt: skip
# steps that are timed, after one that is not
ROUNDS = 3


class Bench:
    """Measures features in small sizes on a CPU."""

    def __init__(self, machine: Machine, report: Report, folder: Path) -> None:
        self.machine, self.report, self.device, self.folder = machine, report, machine.device, folder
        self.on_gpu = self.device.type == "cuda"

    def result(self, what: str, way: str, batch: int | None, ms: float, peak: int, **others: Any) -> None:
        pace = round(ms / batch * 1e3, 3) if batch else None
        row = {"what": what, "way": way, "batch": batch, "ms": round(ms, 3), "us_per_pair": pace, "peak_bytes": peak}
        self.report.result(row | others)

    def timed(self, run: Callable[[], object]) -> tuple[float, int]:
        """Milliseconds of a step, and its peak with everything that is held before it."""
        memory = PeakMemory(self.device)
        self.machine.free_bytes()
        memory.start()
        # allocates anew after the cache was emptied, and is not timed
        run()
        return 1e3 * median(self.machine.time(run) for _ in range(ROUNDS)), memory.bytes()

    def distances(self) -> None:
        """Learned distances in tiles, beside plain autograd over the whole matrix of scores."""
        for (name, scorer, sides), backend in product(self.scored(), ("auto", "dense")):
            label = f"{name}, {'tiles' if backend == 'auto' else 'the whole matrix'}"
            leaves = [x.detach().requires_grad_() for x in sides]
            run = partial(gradients, *leaves, scorer=scorer, scale=20.0, backend=backend)
            with self.report.failures(label, judged=backend == "auto"):
                ms, _ = self.timed(run)
                for leaf in leaves:
                    leaf.grad = None
                self.result("distance", label, len(sides[0]), ms, self.machine.peak(run))

    def scored(self) -> Iterator[tuple[str, nn.Module, list[Tensor]]]:
        fewer, dtype = (1, torch.bfloat16) if self.on_gpu else (32, torch.float32)

        def sides(*shapes: tuple[int, ...]) -> list[Tensor]:
            return [F.normalize(torch.randn(shape, device=self.device), dim=-1).to(dtype) for shape in shapes]

        d, e, b = 768 // fewer, 256 // fewer, 1024 // fewer
        yield f"Bilinear, {d} features", Bilinear(d, d).to(self.device, dtype), sides(*[(16 * b, d)] * 2)
        yield f"PairMLP, {e} features", PairMLP(e, e, e).to(self.device, dtype), sides(*[(2 * b, e)] * 2)
        yield "MaxSim, 32 and 180 tokens of 128", MaxSim(), sides((b, 32, 128), (b, 180, 128))

    def words(self) -> list[str]:
        """The overrides of the recipe for the shards, which are written where they are not there."""
        if not (shards := self.folder / "shards").exists():
            shards.mkdir()
            write_shards(shards, 500 if self.on_gpu else 250, TITLE)
        last = len(list(shards.glob("*.tar"))) - 1
        words = [f"data.source={shards}/{{00000..{last:05}}}.tar", f"data.cache={self.folder / 'cache'}"]
        words += [f"device={self.device.type}", "data.held_out=0.01", "evaluate={every=1.0, probe=1}"]
        # a compilation takes longer than the steps, and "auto" is planned as written
        return [*words, "train.compile=false", *(() if self.on_gpu else TINY_LIT)]

    def lit(self) -> None:
        batch, sub_batch = (2048, 256) if self.on_gpu else (64, 16)
        words = [*self.words(), "data.augment=false"]
        words += [f"train.sub_batch={sub_batch}", "train.retain=0", f"train.batch={batch}"]
        for way, more in LIT_WAYS.items():
            with self.report.failures(way, judged=True):
                self._lit(way, ImageText.open(load_any_recipe(RECIPE, [*words, *more])), batch)
            gc.collect()

    def _lit(self, way: str, job: ImageText, batch: int) -> None:
        """A step of the training loop on a batch that is there."""
        train = job.run.recipe.train
        optimizer = build_optimizer(job.run.model.train(), job.run.recipe.optim)
        scaler = torch.amp.GradScaler(self.device.type, enabled=train.precision == "fp16")
        parts = job.parts(torch.from_numpy(np.resize(job.rows, batch)), 1, ALONE)
        ms, peak = self.timed(partial(step, job, optimizer, parts, scaler))
        plan = planned_memory(job.run, batch, 1)
        more = {"steps": ROUNDS, "planned_bytes": plan and sum(plan.values())}
        self.result("LiT", way, batch, ms, peak, sub_batch=train.sub_batch.image, **more)
        job.close()

    def optimizers(self) -> None:
        """Steps of optimizers on the weights of ViT-L/14 with both towers, without forward and backward."""
        words = [f"device={self.device.type}", *(() if self.on_gpu else TINY_CLIP)]
        recipe = load_any_recipe(CLIP, words, files=False)
        tokenizer = made_up_tokenizer(recipe.model.tokenizer)
        with torch.device(self.device):
            model = Run.untrained(recipe, tokenizer).model
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
        gradients = sum(parameter.nbytes for parameter in model.parameters())
        for way, more in OPTIMIZERS.items():
            settings = load_any_recipe(CLIP, [*words, *more], files=False).optim
            optimizer = build_optimizer(model, settings)
            ms, peak = self.timed(optimizer.step)
            planned = weights + gradients + state_bytes(model, settings) + step_bytes(model, settings)
            label = f"{way}, {gradients / 4e6:.0f} M weights"
            self.result("optimizer", label, None, ms, peak, planned_bytes=planned)
            del optimizer

    def recipe(self) -> None:
        """The first steps of the paper's recipe on the shards, whose pictures are cropped at random."""
        steps, batch = (STEPS, BATCH) if self.on_gpu else (20, 32)
        words = [*self.words(), f"train.examples={steps * batch}", "optim.warmup=0.05"]
        words += [f"train.batch={batch}", f"train.sub_batch={batch}"]
        lines, waits = trained(RECIPE, words, self.folder)
        seconds, peak = sum(line["seconds"] for line in lines), max(line["peak_bytes"] for line in lines)
        way = f"{RECIPE}, the longest wait {max(waits) * 1e3:.0f} ms"
        more = {"sub_batch": batch, "steps": len(lines), "waiting": round(sum(waits) / seconds, 4)}
        self.result("recipe", way, batch, 1e3 * seconds / len(lines), peak, **more)


def gradients(q: Tensor, k: Tensor, **how: Any) -> None:
    contrast(q, k, **how).backward()


def main() -> None:
    with TemporaryDirectory() as folder, script(__doc__, TABLE, "transformers") as (_, machine, report):
        bench = Bench(machine, report, Path(folder))
        for part in (bench.distances, bench.lit, bench.optimizers, bench.recipe):
            with report.failures(part.__name__, judged=True):
                part()
            gc.collect()


if __name__ == "__main__":
    main()
