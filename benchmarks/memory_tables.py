"""The measured rows of docs/papers.md and docs/planner.md on one GPU, by one command of about 150 seconds on an H200.

    python benchmarks/memory_tables.py --out FOLDER [--parts largest more] [--seconds 150] [--tiny]

FOLDER gets three files of rows: `planner_loss.csv` (losses that the planner has to meet), `memory.csv` (one rank's loss
in worlds of 8, 32 and 128 ranks, as `contrastile bench memory`), and `largest.csv` (table 2 of Inf-CL: a step at the
largest batch that the planner finds for a card must pass under the card's memory, and a step above it must fail).
--parts: of largest, memory, planner_loss, more (the longest steps of memory) and alone (the longest of largest); what
would not end within the seconds is left out. --tiny: small sizes, on any machine.

A step of `largest.csv` is one rank's of a world of which no other rank exists. Every tensor of the step is there and
the loss is computed as a whole. Of each side's sub-batches the first FEW run through the tower, whose activations are
those of any other; the others' features are one trained row.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from papers import B_16, CLIP, OPENCLIP, RECIPE
from torch import Tensor, nn

from contrastile import ClipLoss, encode
from contrastile.bench.harness import COLUMNS, Machine, Report, Row, Table, results_file
from contrastile.bench.loss import OURS, SMALL_WORKSPACE, WORKSPACE, LossBench
from contrastile.bench.memory import SCALE, MemoryBench, clip, one_rank_of
from contrastile.bench.memory import TABLE as MEMORY_TABLE
from contrastile.bench.peers import Case, Contestant
from contrastile.planner.memory import CONTEXT, StepMemory
from contrastile.planner.plan import Plan
from contrastile.planner.profile import target
from contrastile.train.memory import PeakMemory
from contrastile.train.optim import build_optimizer
from contrastile.train.planned import made_up_tokenizer, plan_of, towers
from contrastile.train.provenance import ORIGIN, provenance, signature
from contrastile.train.recipe import load_recipe
from contrastile.train.run import build_run

K, MIB, GIB = 2**10, 2**20, 2**30
# sub-batches of a side that run through its tower
FEW = 3
# pairs of a batch that must fail, over those that exactly fill the card
ABOVE = 1.03
# pairs of a rank: no more are looked for; of --tiny
MOST_ROWS, MOST_ROWS_TINY = 2**22, 2**8
# seconds of a step of `bench memory`: of all ways, and of contrastile's at the largest sizes
LONGEST, LONGEST_OURS = 2.0, 6.0
LARGEST_COLUMNS = (
    *("impl", "model", "gigabytes", "world", "sub_batch", "b", "expected", "outcome", "planned_bytes", "peak_bytes"),
    *("limit_bytes", "seconds", *ORIGIN),
)
TABLE = Table(
    *(("impl", "implementation", "14"), ("model", "model", "9"), ("gigabytes", "GB", ">4"), ("world", "ranks", ">5")),
    *(("b", "pairs", ">10,"), ("expected", "expected", "8"), ("outcome", "outcome", "8")),
    *(("planned_bytes", "planned MiB", ">12,.0f"), ("peak_bytes", "peak MiB", ">12,.0f"), ("seconds", "s", ">7.1f")),
)


@dataclass(frozen=True)
class Card:
    """A question of table 2: the largest batch of a way on cards of `gigabytes`. seconds: of both its steps, about."""

    impl: str
    model: str
    ranks: int
    gigabytes: int
    sub_batch: int
    seconds: float = 5.0

    @property
    def gpus(self) -> str:
        nodes = f"{self.ranks // 8}x8x" if self.ranks > 8 else f"{self.ranks}x"
        return f"{nodes}card-{self.gigabytes}GB"


BASELINES = [
    Card(impl, model, ranks, 80, 128)
    for model in ("ViT-B/16", "ViT-L/14")
    for impl, ranks in (("CLIP", 8), ("open_clip", 8), ("open_clip", 32))
]
SMALL_CARDS = [Card(OURS, "ViT-L/14", 8, 16, 16, 10.0), Card(OURS, "ViT-B/16", 8, 12, 16, 30.0)]
ALONE = Card(OURS, "ViT-L/14", 1, 80, 128, 75.0)
TINY = [Card(impl, "tiny", 8, 3, 16) for impl in ("CLIP", "open_clip", OURS)]
MODELS = {
    "ViT-B/16": B_16,
    "ViT-L/14": (),
    "tiny": ("data.image_size=32", 'model.both={mean=[0.5], std=[0.5], config={model_type="clip", projection_dim=32,'
             ' vision_config={image_size=32, patch_size=8, hidden_size=64, intermediate_size=128, num_hidden_layers=2,'
             ' num_attention_heads=2}, text_config={hidden_size=64, intermediate_size=128, num_hidden_layers=2,'
             ' num_attention_heads=2}}}'),
}  # fmt: skip


class Sampled(nn.Module):
    """A tower over indices [n] into a batch: the first FEW sub-batches run through it, others get one trained row."""

    def __init__(self, tower: nn.Module, encoder: Callable[..., Tensor], inputs: list[Tensor], D: int) -> None:
        super().__init__()
        self.tower, self.inputs, self._encoder = tower, inputs, encoder
        self.row = nn.Parameter(torch.randn(D, device=inputs[0].device))

    def forward(self, indices: Tensor) -> Tensor:
        if int(indices[0]) < FEW * len(self.inputs[0]):
            return self._encoder(*(x[: len(indices)] for x in self.inputs))
        return self.row.to(torch.get_autocast_dtype(indices.device.type)).expand(len(indices), -1).clone()


class Ours(LossBench):
    """contrastile's losses alone."""

    def entries(self, case: Case, *, peers: bool) -> Iterator[Contestant]:
        return (one for one in super().entries(case, peers=peers) if one.name == OURS)


class Steps:
    """The largest batches of a model on cards, planned and taken."""

    def __init__(self, model: str, sub_batch: int, report: Report, device: torch.device) -> None:
        # without a loss scaler: bf16, and weights that stay
        words = ["optim={kind='adamw', learning_rate=1e-9}", "train.retain=0", "train.precision=bf16"]
        words += [f"train.sub_batch={sub_batch}", f"device={device.type}"]
        self.recipe = load_recipe(RECIPE, [*words, *MODELS[model]], files=False)
        self.report, self.device = report, device
        self._shapes, self._costs = towers(self.recipe, 8, 8 * K * sub_batch)
        tokenizer = made_up_tokenizer(self.recipe.model.tokenizer)
        with torch.device(device):
            self.run = build_run(self.recipe, tokenizer)
        self.optimizer = build_optimizer(self.run.model.train(), self.recipe.optim)
        size, data, length = sub_batch, self.recipe.data, self.recipe.model.tokenizer.length
        pixels = torch.zeros(size, data.channels, data.image_size, data.image_size, device=device)
        tokens = [torch.ones(size, length, dtype=torch.int64, device=device) for _ in range(2)]
        D, net = self._costs[0].dimensions, self.run.model
        self.sides = [
            Sampled(net.image, net.encode_image, [pixels], D), Sampled(net.text, net.encode_text, tokens, D)
        ]  # fmt: skip

    def planned(self, card: Card) -> Plan:
        machines = replace(target(card.gpus), device=self.device.type)
        one = plan_of(self.recipe, machines, 8 * K * card.ranks, self._shapes, self._costs)
        words = {"exchange": "ring" if card.ranks > 1 else "single", "workspace": machines.memory // 64}
        words |= {"backend": "triton" if self.device.type == "cuda" else "eager"}
        return replace(one, step=replace(one.step, loss=replace(one.step.loss, **words)))

    def measure(self, card: Card) -> None:
        """A step at the largest planned batch, and one above the batch that fills the card."""
        one = self.planned(card)
        limit = one.target.memory - CONTEXT
        inside, above = self.largest(card, one, one.allowed), int(ABOVE * self.largest(card, one, limit))
        # makes the optimizer's state, and compiles the kernels of the towers
        self.take(card, one, 4 * card.sub_batch * card.ranks)
        with limited(limit, self.device):
            for batch, expected in ((inside, "fits"), (above // card.ranks * card.ranks, "fails")):
                self.report.result(*self.row(card, one, batch, expected, limit))

    def row(self, card: Card, one: Plan, batch: int, expected: str, limit: int) -> tuple[str, Row]:
        memory, start, outcome = PeakMemory(self.device), time.perf_counter(), "fits"
        memory.start()
        try:
            self.take(card, one, batch)
        except torch.OutOfMemoryError:
            outcome = "fails"
        seconds, peak = time.perf_counter() - start, memory.bytes()
        self.optimizer.zero_grad()
        gc.collect()
        row = {
            **vars(card), "world": card.ranks, "b": batch, "expected": expected, "outcome": outcome,
            "planned_bytes": peak_of(card, one, batch), "peak_bytes": peak, "limit_bytes": limit,
            "seconds": round(seconds, 3), **provenance(self.device, "transformers"),
        }  # fmt: skip
        return TABLE.line(row), row

    def largest(self, card: Card, one: Plan, room: int) -> int:
        """The largest batch of all ranks whose planned peak is at most `room`."""
        low, high = 1, MOST_ROWS_TINY if card.model == "tiny" else MOST_ROWS
        while high - low > max(1, low // 500):
            rows = (low + high) // 2
            low, high = (rows, high) if peak_of(card, one, rows * card.ranks) <= room else (low, rows)
        return low * card.ranks

    def take(self, card: Card, one: Plan, batch: int) -> None:
        """A rank's step of `batch` pairs of all ranks."""
        indices = torch.arange(batch // card.ranks, device=self.device)
        with one_rank_of(card.ranks) if card.ranks > 1 else nullcontext():
            with self.run.autocast():
                features = [encode(side, indices, sub_batch=card.sub_batch) for side in self.sides]
                q, k = (F.normalize(side.float(), dim=-1) for side in features)
            del features
            if card.impl == OURS:
                words = {name: getattr(one.step.loss, name) for name in ("exchange", "backend", "workspace")}
                with self.run.autocast():
                    loss = ClipLoss(**words)(q, k, SCALE)
                loss.backward()
            else:
                clip(q, k, local=card.impl != "CLIP", with_grad=card.impl != "CLIP", autocast=self.run.autocast())
            del q, k
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def peak_of(card: Card, one: Plan, batch: int) -> int:
    """Planned bytes of a step; of the baselines with the bytes per pair that their formulas took in measured rows."""
    step = one.at(batch).step
    if card.impl == OURS:
        return step.peak().bytes
    return max(moment.bytes - _tiles(moment.parts) + added for moment, added in _dense(card, step, batch))


def _tiles(parts: dict[str, int]) -> int:
    return sum(parts.get(name, 0) for name in ("loss", "exchange"))


def _dense(card: Card, step: StepMemory, batch: int) -> Iterator[tuple[Any, int]]:
    """The moments of a step, with the bytes of a dense loss in that of the loss."""
    rows, D = step.loss.rows, step.loss.dimensions
    pairs = CLIP * batch**2 if card.impl == "CLIP" else OPENCLIP * rows * batch
    # gathered features of both sides in float32, and of OpenCLIP their gradients
    gathered = 2 * 4 * batch * D * (1 if card.impl == "CLIP" else 2)
    for moment in step.moments():
        yield moment, int(pairs) + gathered if moment.name == "loss" else 0


@contextmanager
def limited(limit: int, device: torch.device) -> Iterator[None]:
    """Let torch allocate `limit` bytes of a GPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(index).total_memory, index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, index)


def loss_cases(tiny: bool) -> list[Case]:
    """Small calls, calls of little workspace, and one of a quarter of a million rows."""
    both, wide = (WORKSPACE, SMALL_WORKSPACE), (WORKSPACE,)
    if tiny:
        return [Case("clip", 256, 32, "float32", wide)]
    small = [("clip", 4 * K, 512), ("clip", 8 * K, 512), ("clip", 16 * K, 768), ("siglip", 8 * K, 768)]
    return [
        *(Case(loss, b, d, "bfloat16", wide) for loss, b, d in small),
        *(Case("clip", 64 * K, d, "bfloat16", (*both, 32 * MIB)) for d in (512, 768)),
        Case("clip", 256 * K, 768, "bfloat16", wide),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="folder for the rows")
    parser.add_argument("--parts", nargs="+", default=["largest", "memory", "planner_loss", "more", "alone"])
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on any machine")
    options = parser.parse_args()
    # steps of all sizes must not fail because of gaps
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    start, folder, tiny = time.perf_counter(), Path(options.out), options.tiny
    # a limit of the memory needs the GPU's index
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    print(signature(device, "transformers", "open_clip_torch", "inf_cl"), flush=True)

    def left() -> float:
        return options.seconds - (time.perf_counter() - start)

    def part(name: str, columns: Any, measure: Callable[[Report], None], seconds: float = 0.0) -> None:
        if left() <= seconds:
            print(f"left out: {name}, {seconds:.0f} s", flush=True)
            return
        with results_file(folder / f"{name}.csv", columns) as write:
            report = Report(partial(print, flush=True), write)
            with report.failures(name, judged=True):
                measure(report)
        print(f"-- {name}: {left():.0f} s left", flush=True)

    def losses(report: Report) -> None:
        Ours(Machine.of(device, 0.3), False, report).measure(loss_cases(tiny))

    def memory(report: Report, worlds: dict[int, list[int]], **words: Any) -> None:
        report.say(MEMORY_TABLE.header())
        for world, sizes in worlds.items():
            MemoryBench(Machine(device), report, **words).measure(world, sizes, 768, dtype)

    def largest(report: Report, cards: list[Card]) -> None:
        report.say(TABLE.header())
        steps: dict[tuple[str, int], Steps] = {}
        for card in cards:
            if left() < card.seconds:
                report.say(f"left out: {card}")
            elif (key := (card.model, card.sub_batch)) in steps:
                steps[key].measure(card)
            else:
                # one model at a time
                steps.clear()
                gc.collect()
                steps[key] = Steps(card.model, card.sub_batch, report, device)
                steps[key].measure(card)

    def more(report: Report) -> None:
        memory(report, {8: [2**21], 32: [2**22]}, longest=LONGEST_OURS, words=["gather, triton", "ring, triton"])

    sizes = [2**exponent for exponent in (range(11, 13) if tiny else range(15, 23))]
    worlds = {8: sizes} if tiny else dict.fromkeys((8, 32, 128), sizes)
    parts: dict[str, tuple[str, Any, Callable[[Report], None], float]] = {
        "largest": (
            "largest",
            LARGEST_COLUMNS,
            partial(largest, cards=TINY if tiny else [*BASELINES[:3], *SMALL_CARDS, *BASELINES[3:]]),
            0,
        ),
        "memory": ("memory", COLUMNS["memory"], partial(memory, worlds=worlds, longest=LONGEST), 0),
        "planner_loss": ("planner_loss", COLUMNS["losses"], losses, 0),
        "more": ("memory", COLUMNS["memory"], more, 25),
        "alone": ("largest", LARGEST_COLUMNS, partial(largest, cards=[ALONE]), ALONE.seconds),
    }
    for name in options.parts:
        part(*parts[name])


if __name__ == "__main__":
    main()
