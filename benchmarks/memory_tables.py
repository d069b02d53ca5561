"""The largest batches that the planner finds for a card, taken on one GPU: table 2 of Inf-CL in docs/papers.md.

    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    python benchmarks/memory_tables.py [--impl CLIP open_clip contrastile] [--csv FILE]

Takes about a minute on an H200; without a GPU sizes are small. A step at the largest planned batch must pass under the
card's memory, and a step above it must fail; expandable segments leave no gaps behind steps of other sizes. A step is
one rank's of a world of which no other rank exists. Every tensor of the step is there and the loss is computed as a
whole. Of each side's sub-batches the first FEW run through the tower, whose activations are those of any other; the
others' features are one trained row, in long parts, because their number would take minutes.
"""

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from papers import B_16, RECIPE, TINY_CLIP, K, dense_bytes, dense_peak
from torch import Tensor, nn

from contrastile import ClipLoss, encode
from contrastile.bench.gate import SCALE
from contrastile.bench.harness import Machine, Report, Table, script
from contrastile.bench.loss import OURS
from contrastile.bench.memory import clip, one_rank_of
from contrastile.planner.memory import CONTEXT
from contrastile.planner.plan import Plan
from contrastile.planner.profile import target
from contrastile.train.memory import PeakMemory
from contrastile.train.optim import build_optimizer
from contrastile.train.planned import made_up_tokenizer, plan_of, towers
from contrastile.train.recipe import load_any_recipe
from contrastile.train.run import Run

# sub-batches of a side that run through its tower, each at the head of a part of so many
FEW, PART = 3, 32
# pairs of a batch that must fail, over those that exactly fill the card
ABOVE = 1.03
# pairs of a rank: no more are looked for; of the tiny model
MOST_ROWS, MOST_ROWS_TINY = 2**22, 2**8
TABLE = Table(
    "impl=implementation 14 | model 9 | gigabytes=GB >4 | world=ranks >5 | sub_batch | b=pairs >10, | expected 8"
    " | outcome 8 | planned_bytes=planned MiB >12,.0f | peak_bytes=peak MiB >12,.0f | limit_bytes | seconds=s >7.1f"
)


@dataclass(frozen=True)
class Card:
    """A question of table 2: the largest batch of a way on cards of `gigabytes`."""

    impl: str
    model: str
    ranks: int
    gigabytes: int
    sub_batch: int


IMPLS = ("CLIP", "open_clip", OURS)
# cards of one model and sub-batch in a row, because one model is held at a time; contrastile's are smaller, because the
# loss of a step that fills 80 GB takes minutes
CARDS = tuple(
    card
    for model, own, size in (("ViT-B/16", 8, 32), ("ViT-L/14", 15, 16))
    for card in (
        *(Card(impl, model, ranks, 80, 128) for impl, ranks in (("CLIP", 8), ("open_clip", 8), ("open_clip", 32))),
        Card(OURS, model, 8, own, size),
    )
)
TINY = [Card(impl, "tiny", 8, 3, 16) for impl in IMPLS]
MODELS = {"ViT-B/16": B_16, "ViT-L/14": (), "tiny": TINY_CLIP}


class Sampled(nn.Module):
    """A tower over indices [n] into a batch: a sub-batch of each of the first FEW parts runs through it.

    All other examples get one trained row.
    """

    def __init__(self, tower: nn.Module, encoder: Callable[..., Tensor], inputs: list[Tensor], D: int) -> None:
        super().__init__()
        self.tower, self.inputs, self._encoder = tower, inputs, encoder
        self.row = nn.Parameter(torch.randn(D, device=inputs[0].device))

    def forward(self, indices: Tensor) -> Tensor:
        row = self.row.to(torch.get_autocast_dtype(indices.device.type))
        if int(indices[0]) >= FEW * PART * len(self.inputs[0]):
            return row.expand(len(indices), -1).clone()
        run = self._encoder(*(x[: len(indices)] for x in self.inputs))
        return torch.cat([run, row.expand(len(indices) - len(run), -1)])


class Steps:
    """The largest batches of a model on cards, planned and taken."""

    def __init__(self, model: str, sub_batch: int, report: Report, machine: Machine) -> None:
        device = machine.device
        # without a loss scaler: bf16, and weights that stay; a compilation takes longer than the steps
        words = ["optim={kind='adamw', learning_rate=1e-9}", "train.retain=0", "train.precision=bf16"]
        words += [f"train.sub_batch={sub_batch}", f"device={device.type}", "train.compile=false", *MODELS[model]]
        self.recipe = load_any_recipe(RECIPE, words, files=False)
        self.report, self.machine, self.device = report, machine, device
        self._shapes, self._costs = towers(self.recipe, 8, 8 * K * sub_batch)
        data, settings = self.recipe.data, self.recipe.model.tokenizer
        with torch.device(device):
            self.run = Run.untrained(self.recipe, made_up_tokenizer(settings))
            pixels = torch.zeros(sub_batch, data.channels, data.image_size, data.image_size)
            tokens = [torch.ones(sub_batch, settings.length, dtype=torch.int64) for _ in range(2)]
        D, net = self._costs[0].dimensions, self.run.model.train()
        self.optimizer = build_optimizer(net, self.recipe.optim)
        towers_of = ((net.image, net.encode_image, [pixels]), (net.text, net.encode_text, tokens))
        self.sides = [Sampled(*tower, D) for tower in towers_of]

    def planned(self, card: Card) -> Plan:
        gpus = f"{card.ranks // 8}x8" if card.ranks > 8 else card.ranks
        machines = replace(target(f"{gpus}xcard-{card.gigabytes}GB"), device=self.device.type)
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
        self.take(card, one, (FEW * PART + 1) * card.sub_batch * card.ranks)
        with self.machine.limited(limit):
            for batch, expected in ((inside, "fits"), (above // card.ranks * card.ranks, "fails")):
                memory, start, outcome = PeakMemory(self.device), time.perf_counter(), "fits"
                memory.start()
                try:
                    self.take(card, one, batch)
                except torch.OutOfMemoryError as error:
                    outcome = "fails"
                    if expected == "fits":
                        self.report.note(str(error))
                seconds, peak = time.perf_counter() - start, memory.bytes()
                self.optimizer.zero_grad()
                gc.collect()
                self.report.result({
                    **vars(card), "world": card.ranks, "b": batch, "expected": expected, "outcome": outcome,
                    "planned_bytes": peak_of(card, one, batch), "peak_bytes": peak, "limit_bytes": limit,
                    "seconds": round(seconds, 3),
                })  # fmt: skip

    def largest(self, card: Card, one: Plan, room: int) -> int:
        """The largest batch of all ranks whose planned peak is at most `room`."""
        low, high = 1, MOST_ROWS_TINY if card.model == "tiny" else MOST_ROWS
        while high - low > max(1, low // 500):
            rows = (low + high) // 2
            low, high = (rows, high) if peak_of(card, one, rows * card.ranks) <= room else (low, rows)
        return low * card.ranks

    def loss(self, card: Card, one: Plan, indices: Tensor) -> Tensor:
        """A rank's loss, as a task of the training loop computes it."""
        with self.run.autocast():
            q, k = (encode(side, indices, sub_batch=PART * card.sub_batch) for side in self.sides)
            q, k = map(self.run.model.unit_rows, (q, k))
            if card.impl == OURS:
                words = {name: getattr(one.step.loss, name) for name in ("exchange", "backend", "workspace")}
                return ClipLoss(**words)(q, k, SCALE)
            local = card.impl != "CLIP"
            return clip(q, k, SCALE, local=local, with_grad=local)

    def take(self, card: Card, one: Plan, batch: int) -> None:
        indices = torch.arange(batch // card.ranks, device=self.device)
        with one_rank_of(card.ranks) if card.ranks > 1 else nullcontext():
            self.loss(card, one, indices).backward()
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.machine.wait()


def peak_of(card: Card, one: Plan, batch: int) -> int:
    """Planned bytes of a step; of the baselines with the bytes per pair that their formulas took in measured rows."""
    step = one.at(batch).step
    if card.impl == OURS:
        return step.peak().bytes
    # gathered features of both sides in float32, and of OpenCLIP their gradients
    gathered = 2 * 4 * batch * step.loss.dimensions * (1 if card.impl == "CLIP" else 2)
    return dense_peak(step, dense_bytes(card.impl, step) + gathered)


def main() -> None:
    all_cards = CARDS if torch.cuda.is_available() else TINY
    words = {"--impl": {"nargs": "+", "choices": IMPLS, "default": IMPLS}}
    with script(__doc__, TABLE, "transformers", options=words) as (options, machine, report):
        chosen = [card for card in all_cards if card.impl in options.impl]
        for (model, sub_batch), cards in groupby(chosen, lambda card: (card.model, card.sub_batch)):
            steps = Steps(model, sub_batch, report, machine)
            for card in cards:
                with report.failures(str(card), judged=True):
                    steps.measure(card)
            del steps
            gc.collect()


if __name__ == "__main__":
    main()
