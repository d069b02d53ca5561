"""Features that no other file measures: learned distances, and LiT with both towers, one tower, or cached features.

    python benchmarks/features.py [--csv FILE]

Takes a minute on an H200; without a GPU sizes are small. Steps of LiT are those of the training loop
(`train/loop.py`), on a batch whose inputs are there, of tar shards of made-up pictures.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from loading import write_shards
from torch import Tensor, nn

from contrastile import contrast
from contrastile.bench.harness import Machine, Report, Row, Table, script
from contrastile.scorers import Bilinear, MaxSim, PairMLP
from contrastile.train.image_text import ImageText
from contrastile.train.loop import step
from contrastile.train.memory import PeakMemory
from contrastile.train.optim import build_optimizer
from contrastile.train.planned import planned_memory
from contrastile.train.provenance import ORIGIN, provenance
from contrastile.train.ranks import ALONE
from contrastile.train.recipe import load_recipe

COLUMNS = (
    *("what", "way", "batch", "sub_batch", "steps", "ms", "us_per_pair", "peak_bytes", "planned_bytes", "waiting"),
    *ORIGIN,
)
TABLE = Table(
    *(("what", "what", "9"), ("way", "way", "44"), ("batch", "batch", ">7"), ("ms", "ms", ">10.2f")),
    *(
        ("us_per_pair", "us/pair", ">8.1f"),
        ("peak_bytes", "peak MiB", ">9,.0f"),
        ("planned_bytes", "planned", ">9,.0f"),
    ),
)
RECIPE = "lit-vit-b-16"
LIT_WAYS = {
    "both towers learn": ["model.locked=[]"],
    "image tower locked": [],
    "locked, features computed once": ["model.precompute=true"],
    "the same, features in host memory": ["model.precompute=true", "train.features=host"],
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
ROUNDS = 2


@dataclass
class Bench:
    """Measures features in small sizes on a CPU."""

    machine: Machine
    report: Report

    @property
    def device(self) -> torch.device:
        return self.machine.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def result(self, what: str, way: str, batch: int, ms: float, peak: int, **others: Any) -> None:
        row: Row = {
            "what": what, "way": way, "batch": batch, "sub_batch": None, "steps": None, "ms": round(ms, 3),
            "us_per_pair": round(ms / batch * 1e3, 3), "peak_bytes": peak, "planned_bytes": None, "waiting": None,
            **others, **provenance(self.device, "transformers"),
        }  # fmt: skip
        self.report.result(TABLE.line(row), row)

    def timed(self, run: Callable[[], object]) -> tuple[float, int]:
        """Milliseconds of a step, and its peak with everything that is held before it."""
        memory = PeakMemory(self.device)
        run()
        self.machine.free_bytes()
        memory.start()
        ms = 1e3 * median(self.machine.time(run) for _ in range(ROUNDS))
        return ms, memory.bytes()

    def distances(self) -> None:
        """Learned distances in tiles, beside plain autograd over the whole matrix of scores."""
        for name, scorer, sides in self.scored():
            for backend, way in (("auto", "tiles"), ("dense", "the whole matrix")):
                leaves = [x.detach().requires_grad_() for x in sides]

                def run(leaves: list[Tensor] = leaves, scorer: nn.Module = scorer, backend: Any = backend) -> None:
                    contrast(*leaves, scorer=scorer, scale=20.0, backend=backend).backward()

                with self.report.failures(f"{name}, {way}", judged=backend == "auto"):
                    ms, _ = self.timed(run)
                    for leaf in leaves:
                        leaf.grad = None
                    self.result("distance", f"{name}, {way}", len(sides[0]), ms, self.machine.peak(run))
                del leaves

    def scored(self) -> Iterator[tuple[str, nn.Module, list[Tensor]]]:
        """Scorers with features of both sides."""
        fewer, dtype = (1, torch.bfloat16) if self.on_gpu else (32, torch.float32)

        def sides(*shapes: tuple[int, ...]) -> list[Tensor]:
            return [F.normalize(torch.randn(shape, device=self.device), dim=-1).to(dtype) for shape in shapes]

        d = 768 // fewer
        yield f"Bilinear, {d} features", Bilinear(d, d).to(self.device, dtype), sides(*[(16384 // fewer, d)] * 2)
        d = 256 // fewer
        yield f"PairMLP, {d} features", PairMLP(d, d, d).to(self.device, dtype), sides(*[(2048 // fewer, d)] * 2)
        b = 1024 // fewer
        yield "MaxSim, 32 and 180 tokens of 128", MaxSim(), sides((b, 32, 128), (b, 180, 128))

    def lit(self, folder: Path) -> None:
        """LiT's recipe: both towers trained, the image tower locked, its features computed once, and on the host."""
        batch, sub_batch, pictures = (2048, 256, 1000) if self.on_gpu else (64, 16, 250)
        words = [f"data.source={write_shards(folder, pictures)}", f"data.cache={folder / 'cache'}"]
        words += [f"device={self.device.type}", "data.held_out=0.01", "data.augment=false"]
        words += ["evaluate={every=1.0, probe=1}", *(() if self.on_gpu else TINY_LIT)]
        words += [f"train.sub_batch={sub_batch}", "train.retain=0", f"train.batch={batch}"]
        for way, more in LIT_WAYS.items():
            with self.report.failures(way, judged=True):
                self._lit(way, ImageText.open(load_recipe(RECIPE, [*words, *more])), batch)
            gc.collect()

    def _lit(self, way: str, job: ImageText, batch: int) -> None:
        """A step of the training loop on a batch that is there."""
        train = job.run.recipe.train
        optimizer = build_optimizer(job.run.model.train(), job.run.recipe.optim)
        scaler = torch.amp.GradScaler(self.device.type, enabled=train.precision == "fp16")
        parts = job.parts(torch.from_numpy(np.resize(job.rows, batch)), 1, ALONE)
        ms, peak = self.timed(partial(step, job, optimizer, parts, scaler))
        plan = planned_memory(job.run, batch, 1) if train.features != "host" else None
        planned = None if plan is None else sum(plan.values())
        self.result("LiT", way, batch, ms, peak, sub_batch=train.sub_batch.image, steps=ROUNDS, planned_bytes=planned)
        job.close()


def main() -> None:
    with TemporaryDirectory() as folder, script(__doc__, COLUMNS, "transformers") as (_, machine, report):
        report.say(TABLE.header())
        bench = Bench(machine, report)
        bench.distances()
        bench.lit(Path(folder))


if __name__ == "__main__":
    main()
