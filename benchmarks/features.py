"""Features that no other file measures: learned distances, LiT, optimizers, features in host memory, data waits.

    python benchmarks/features.py --out FOLDER [--seconds 150] [--tiny]

FOLDER gets `features.csv` and the run's `report.html`. Steps are those of the training loop (`train/loop.py`), on a
batch whose inputs are there; the row "recipe" is a run of recipes/clip-vit-l-14.toml in small batches, on tar shards of
made-up pictures, with its share of waiting for data. What would not end within the seconds is left out; each part lasts
about what it says in `PARTS` on an H200. --tiny: small sizes, on any machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import time
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
from loading import WARMUP, write_shards
from torch import Tensor, nn

from contrastile import contrast
from contrastile.bench.harness import Machine, Report, Row, Table, results_file
from contrastile.cli.main import main as main_command
from contrastile.scorers import Bilinear, MaxSim, PairMLP
from contrastile.train.image_text import ImageText
from contrastile.train.log import read_metrics
from contrastile.train.loop import step
from contrastile.train.memory import PeakMemory
from contrastile.train.optim import build_optimizer, state_bytes, step_bytes
from contrastile.train.planned import made_up_tokenizer, planned_memory
from contrastile.train.provenance import ORIGIN, provenance, signature
from contrastile.train.ranks import ALONE
from contrastile.train.recipe import load_recipe
from contrastile.train.run import build_run

COLUMNS = (
    *("what", "way", "batch", "sub_batch", "steps", "ms", "us_per_pair", "peak_bytes", "planned_bytes", "waiting"),
    *ORIGIN,
)
TABLE = Table(
    *(("what", "what", "9"), ("way", "way", "44"), ("batch", "batch", ">7"), ("steps", "steps", ">5")),
    *(("ms", "ms", ">10.2f"), ("us_per_pair", "us/pair", ">8.1f"), ("peak_bytes", "peak MiB", ">9,.0f")),
    *(("planned_bytes", "planned", ">9,.0f"), ("waiting", "waiting", ">8.1%")),
)
LIT, CLIP = "recipes/lit-vit-b-16.toml", "recipes/clip-vit-l-14.toml"
OPTIMIZERS = {
    "AdamW": "optim={kind='adamw'}",
    "Adafactor": "optim={kind='adafactor'}",
    "Adafactor, no first moment": "optim={kind='adafactor', betas=[0.0, 0.95]}",
    "Muon": "optim={kind='muon'}",
}
# towers of a few thousand weights
_TINY_TOWERS = (("image", "vit", ", patch_size=8"), ("text", "bert", ""))
TINY_LIT = (
    "data.image_size=32", "model.features=32", "train.precision=float32",
    *(f"model.{side}.config={{model_type='{kind}', hidden_size=32, intermediate_size=64, num_hidden_layers=2, "
      f"num_attention_heads=2{more}}}" for side, kind, more in _TINY_TOWERS),
    "model.tokenizer={size=500, length=16}",
)  # fmt: skip
TINY_CLIP = (
    "data.image_size=32", "train.precision=float32", "model.tokenizer={size=500, length=16}",
    "model.both={mean=[0.5], std=[0.5], config={model_type='clip', projection_dim=32, vision_config={image_size=32, "
    "patch_size=8, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2}, text_config="
    "{hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2}}}",
)  # fmt: skip


@dataclass
class Bench:
    """Measures the parts. `source`: tar shards of `pictures` pictures in `folder`. out: of the results."""

    machine: Machine
    report: Report
    out: Path
    folder: Path
    pictures: int
    source: str
    tiny: bool
    # steps that are timed, after one that is not
    rounds: int = 2

    @property
    def device(self) -> torch.device:
        return self.machine.device

    def result(self, what: str, way: str, batch: int, ms: float, peak: int | None, **others: Any) -> None:
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
        ms = 1e3 * median(self.machine.time(run) for _ in range(self.rounds))
        return ms, memory.bytes()

    def distances(self) -> None:
        """Learned distances in tiles, beside plain autograd over the whole matrix of scores."""
        for name, scorer, sides, b in self.scored():
            for backend in ("auto", "dense"):
                leaves = [x.detach().requires_grad_() for x in sides]

                def run(leaves: list[Tensor] = leaves, scorer: nn.Module = scorer, backend: Any = backend) -> None:
                    contrast(*leaves, scorer=scorer, scale=20.0, backend=backend).backward()

                label = "tiles" if backend == "auto" else "the whole matrix"
                with self.report.failures(f"{name}, {label}", judged=backend == "auto"):
                    ms, _ = self.timed(run)
                    for leaf in leaves:
                        leaf.grad = None
                    self.result("distance", f"{name}, {label}", b, ms, self.machine.peak(run))
                del leaves

    def scored(self) -> Iterator[tuple[str, nn.Module, list[Tensor], int]]:
        """Scorers with features of both sides; the rows of a side."""
        few = 32 if self.tiny else 1
        make = partial(torch.randn, device=self.device)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        for b, d in ((16384 // few, 768 // few),):
            sides = [F.normalize(make(b, d), dim=-1).to(dtype) for _ in range(2)]
            yield f"Bilinear, {d} features", Bilinear(d, d).to(self.device, dtype), sides, b
        for b, d in ((2048 // few, 256 // few),):
            sides = [F.normalize(make(b, d), dim=-1).to(dtype) for _ in range(2)]
            yield f"PairMLP, {d} features", PairMLP(d, d, d).to(self.device, dtype), sides, b
        for b in (1024 // few,):
            sides = [F.normalize(make(b, n, 128), dim=-1).to(dtype) for n in (32, 180)]
            yield "MaxSim, 32 and 180 tokens of 128", MaxSim(), sides, b

    def job(self, path: str, *words: str) -> ImageText:
        common = [f"data.source={self.source}", f"data.cache={self.folder / 'cache'}", "data.held_out=0.01"]
        common += [f"device={self.device.type}", "data.augment=false", "evaluate={every=1.0, probe=1}"]
        tiny = () if not self.tiny else TINY_LIT if path == LIT else TINY_CLIP
        return ImageText.open(load_recipe(path, [*common, *tiny, *words]))

    def steps(self, what: str, way: str, job: ImageText, batch: int, planned: bool) -> None:
        """A step of the training loop on a batch that is there."""
        optimizer = build_optimizer(job.run.model.train(), job.run.recipe.optim)
        scaler = torch.amp.GradScaler(self.device.type, enabled=job.run.recipe.train.precision == "fp16")
        parts = job.parts(torch.from_numpy(np.resize(job.rows, batch)), 1, ALONE)
        ms, peak = self.timed(lambda: step(job, optimizer, parts, scaler))
        plan = planned_memory(job.run, batch, 1) if planned else None
        size = job.run.recipe.train.sub_batch.image
        bytes_planned = None if plan is None else sum(plan.values())
        self.result(what, way, batch, ms, peak, sub_batch=size, steps=self.rounds, planned_bytes=bytes_planned)
        job.close()

    def lit(self) -> None:
        """LiT's recipe: both towers trained, the image tower locked, its features computed once, and on the host."""
        batch = 64 if self.tiny else 2048
        words = ["train.sub_batch=16"] if self.tiny else ["train.sub_batch=256"]
        words += ["train.retain=0", f"train.batch={batch}"]
        ways = {
            "both towers learn": ["model.locked=[]"],
            "image tower locked": [],
            "locked, features computed once": ["model.precompute=true"],
            "the same, features in host memory": ["model.precompute=true", "train.features=host"],
        }
        for way, more in ways.items():
            job = self.job(LIT, *words, *more)
            self.steps("LiT", way, job, batch, planned="host" not in way)
            del job
            gc.collect()

    def optimizers(self) -> None:
        """Steps of the optimizers on the weights of ViT-L/14 with both towers, without forward and backward."""
        words = [f"device={self.device.type}", *(TINY_CLIP if self.tiny else ())]
        recipe = load_recipe(CLIP, words, files=False)
        tokenizer = made_up_tokenizer(recipe.model.tokenizer)
        with torch.device(self.device):
            model = build_run(recipe, tokenizer).model
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
        gradients = sum(parameter.nbytes for parameter in model.parameters())
        for way, word in OPTIMIZERS.items():
            settings = load_recipe(CLIP, [word, *words], files=False).optim
            optimizer = build_optimizer(model, settings)
            ms, peak = self.timed(optimizer.step)
            planned = weights + gradients + state_bytes(model, settings) + step_bytes(model, settings)
            label = f"{way}, {gradients / 4e6:.0f} M weights"
            self.result("optimizer", label, 1, ms, peak, planned_bytes=planned, us_per_pair=None)
            del optimizer
            gc.collect()

    def recipe(self, steps: int, minutes: float) -> None:
        """A run of the paper's recipe on the shards: its first steps, in batches of one sub-batch."""
        batch = 32 if self.tiny else 128
        words = [f"data.source={self.source}", f"data.cache={self.folder / 'cache'}", "data.held_out=0.01"]
        words += [f"device={self.device.type}", "evaluate={every=1.0, probe=1}", *(TINY_CLIP if self.tiny else ())]
        words += [f"train.examples={steps * batch}", f"train.batch={batch}", f"train.sub_batch={batch}"]
        words += ["optim.warmup=0.05", f"train.minutes={minutes}"]
        code = main_command(["train", CLIP, *words, "--runs", str(self.folder / "runs")])
        assert code == 0, code
        run = next((self.folder / "runs").glob("*"))
        lines, planned = (
            read_metrics(run / "metrics.jsonl"),
            json.loads((run / "run.json").read_text())["planned_memory"],
        )
        # the picture of planned and measured memory
        shutil.copy(run / "report.html", self.out)
        taken = [line for line in lines if line["kind"] == "step"][WARMUP:]
        waits = [line["seconds"] * line["shares"].get("data", 0.0) for line in taken]
        seconds = [line["seconds"] for line in taken]
        way = f"clip-vit-l-14, {len(taken)} steps, the longest wait {max(waits) * 1e3:.0f} ms"
        peak = max(line["peak_bytes"] for line in taken)
        waiting = sum(waits) / sum(seconds)
        ms = 1e3 * sum(seconds) / len(taken)
        bytes_planned = None if planned is None else sum(planned.values())
        others = {"sub_batch": batch, "steps": len(taken), "waiting": round(waiting, 4), "planned_bytes": bytes_planned}
        self.result("recipe", way, batch, ms, peak, **others)


# seconds of each part on an H200, about
PARTS = {"distances": 15.0, "lit": 40.0, "optimizers": 15.0, "recipe": 60.0}
# seconds of a run beside its steps
BESIDE = 25.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="folder for the rows")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on any machine")
    options = parser.parse_args()
    start = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(signature(device, "transformers"), flush=True)
    with (
        TemporaryDirectory() as temporary,
        results_file(Path(options.out) / "features.csv", COLUMNS) as write,
    ):
        folder, pictures = Path(temporary), 250 if options.tiny else 1000
        report = Report(partial(print, flush=True), write)
        source = write_shards(folder, pictures)
        bench = Bench(Machine(device), report, Path(options.out), folder, pictures, source, options.tiny)
        report.say(TABLE.header())
        for name, seconds in PARTS.items():
            left = options.seconds - (time.perf_counter() - start)
            if left < seconds / 2:
                report.say(f"left out: {name}, {left:.0f} s left")
                continue
            words = (20 if options.tiny else 200, (left - BESIDE) / 60) if name == "recipe" else ()
            with report.failures(name, judged=True):
                getattr(bench, name)(*words)
            gc.collect()
            report.say(f"-- {name}: {options.seconds - (time.perf_counter() - start):.0f} s left")


if __name__ == "__main__":
    main()
