"""Every loss, exchange, number of ranks and wrapper beside one process with the whole batch, as a table.

python tests/gradient_table.py          the worst of each kind, as docs/gradients.md has it
python tests/gradient_table.py --all    every combination
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

# FSDP2 loads it, in seconds: once, before the ranks are forked
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from contrastile import (
    ClipLoss,
    DCLLoss,
    DistillClipLoss,
    GISTLoss,
    InfoNCELoss,
    KeyQueue,
    NTXentLoss,
    ScoreDistillLoss,
    SigLipLoss,
    SupConLoss,
    encode,
)

PLAIN = {loss.__name__: loss for loss in (ClipLoss, SigLipLoss, InfoNCELoss, SupConLoss, NTXentLoss)}
# losses with inputs of their own, or with another end of a row
FURTHER: dict[str, Any] = {
    "DistillClipLoss": DistillClipLoss,
    "GISTLoss": GISTLoss,
    "GISTLoss, pairs": partial(GISTLoss, contrast_anchors=True, contrast_positives=True),
    "ClipLoss, labels": ClipLoss,
    "SigLipLoss, labels": SigLipLoss,
    "SigLipLoss, balanced": partial(SigLipLoss, balanced=True),
    "SupConLoss, in": partial(SupConLoss, form="in"),
    "DCLLoss": DCLLoss,
    "DCLLoss, sigma": partial(DCLLoss, sigma=0.5),
    "InfoNCELoss, hardness": partial(InfoNCELoss, hardness_mode="all_negatives", hardness_strength=5.0),
    "InfoNCELoss, own negatives": InfoNCELoss,
    "InfoNCELoss, own negatives alone": partial(InfoNCELoss, in_batch=False),
    "InfoNCELoss, queue": InfoNCELoss,
    "ScoreDistillLoss": ScoreDistillLoss,
    "ScoreDistillLoss, margins": partial(ScoreDistillLoss, kind="margin_mse"),
}
LOSSES = {**PLAIN, **FURTHER}
BIASED = ("SigLipLoss", "SigLipLoss, labels", "SigLipLoss, balanced")
EXCHANGES = ("replicate", "gather", "ring")
WRAPPERS = ("plain", "DDP", "FSDP2")
D_IN, D = 5, 4
# keys of earlier steps, of all ranks: more than a batch has
QUEUE = 16
# each rank's examples, for every one of two micro-batches: uneven, and one rank without any
SHARES = {1: [12], 2: [7, 5], 3: [5, 0, 7], 4: [2, 5, 1, 4]}
MICRO_BATCHES = 2
# with encode or not, and the number of micro-batches
WAYS = tuple(product((False, True), (1, MICRO_BATCHES)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D_IN, D_IN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Tower(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.project = nn.Linear(D_IN, D)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.project(self.blocks(x)), dim=-1)


class Pair(nn.Module):
    """Two towers, a scale and perhaps a bias, as users have them: called at once, or by method."""

    def __init__(
        self, bias: bool = False, shape: tuple[int, ...] = (1,), sub_batch: int | None = None, depth: int = 1
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text, self.sub_batch = Tower(depth), Tower(depth), sub_batch
        self.logit_scale = nn.Parameter(torch.full(shape, 1.5))
        self.logit_bias = nn.Parameter(torch.full(shape, -2.0)) if bias else None
        self.double()

    def encode_image(self, x: Tensor) -> Tensor:
        return self.image(x)

    def encode_text(self, x: Tensor) -> Tensor:
        return self.text(x)

    def numbers(self) -> tuple[Tensor, Tensor | None]:
        return self.logit_scale.exp(), None if self.logit_bias is None else self.logit_bias * 1.0

    def forward(self, x: Tensor, y: Tensor) -> tuple[Any, ...]:
        if self.sub_batch is None:
            return self.image(x), self.text(y), *self.numbers()
        image = encode(self.image, x, sub_batch=self.sub_batch)
        return image, encode(self.text, y, sub_batch=self.sub_batch + 1), *self.numbers()


def batch(W: int, micro_batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same examples whatever the number of ranks: pictures, texts, labels."""
    generator = torch.Generator().manual_seed(micro_batch)
    x, y = torch.randn(2, sum(SHARES[W]), D_IN, generator=generator, dtype=torch.float64)
    return x, x + y, torch.arange(sum(SHARES[W])) // 3


def loss_of(name: str, out: Sequence[Any], labels: Tensor | None, **how: Any) -> Tensor:
    image, text, scale, bias = out
    loss = LOSSES[name](**how)
    if labels is None:
        return loss(image, text, scale, bias) if bias is not None else loss(image, text, scale)
    if name.startswith("SupConLoss"):
        return loss(torch.stack([image, text], 1), labels, scale)
    # a teacher or guide that compares other features than the student
    others = [torch.cat([x.detach()[:, 1:], labels[:, None].sin()], 1) for x in (image, text)]
    if name == "DistillClipLoss":
        return loss(image, text, scale, *others, 7.0)
    if name.startswith("GISTLoss"):
        return loss(image, text, scale, guide_query=others[0], guide_key=others[1])
    if name.startswith("InfoNCELoss, own"):
        return loss(image, text, scale, negatives=torch.stack([text.flip(1), image.roll(1, 1)], 1))
    if name == "InfoNCELoss, queue":
        queue = KeyQueue(QUEUE, features=D, group=how.get("group"), dtype=image.dtype)
        queue.push(text.roll(1, 1))
        return loss(image, text, scale, negatives=queue.keys)
    if name.startswith("ScoreDistillLoss"):
        keys = torch.stack([text, text.flip(1)], 1)
        return loss(image, keys, torch.stack([labels.cos(), labels.sin()], 1).to(image.dtype), scale)
    if name == "ClipLoss, labels":
        return loss(image, text, scale, labels=labels)
    if name in ("SigLipLoss, labels", "SigLipLoss, balanced"):
        return loss(image, text, scale, bias, labels=labels)
    return loss(image, text, scale, bias) if bias is not None else loss(image, text, scale)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By name, what this rank has of them; a parameter without one is left out."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.to_local() if isinstance(g, DTensor) else g.clone() for name, g in found.items()}


def truth(name: str, micro_batches: int) -> dict[str, Tensor]:
    model = Pair(bias=name in BIASED)
    for micro_batch in range(micro_batches):
        x, y, labels = batch(1, micro_batch)
        loss_of(name, model(x, y), labels).backward()
    return gradients(model)


def shard(model: Any, group: Any, **how: Any) -> Any:
    """FSDP2 as it is used: parts first, then the rest."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for tower in (model.image, model.text):
        fully_shard(tower, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def wrap(wrapper: str, model: nn.Module, group: Any) -> Any:
    if wrapper == "DDP":
        return DistributedDataParallel(model, process_group=group)
    return shard(model, group) if wrapper == "FSDP2" else model


@dataclass(frozen=True)
class Row:
    """One combination: the length of each part's gradient along the true one, and the cosine between them."""

    loss: str
    exchange: str
    ranks: int
    wrapper: str
    cached: bool
    accumulated: bool
    parts: dict[str, tuple[float, float]]


def step(
    rank: int, group: Any, model: Pair, wrapped: Any, loss: str, exchange: str, cached: bool, micro_batches: int
) -> dict[str, Tensor]:
    """A rank's parameter gradients after one step, combined by the wrapper, or else by hand."""
    W = dist.get_world_size(group)
    model.zero_grad()
    for micro_batch in range(micro_batches):
        last = micro_batch == micro_batches - 1
        if isinstance(wrapped, FSDPModule):
            wrapped.set_requires_gradient_sync(last)
        x, y, labels = (whole.split(SHARES[W])[rank] for whole in batch(W, micro_batch))
        with wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) and not last else nullcontext():
            if cached:
                image = encode((wrapped, "encode_image"), x, sub_batch=3)
                text = encode((wrapped, "encode_text"), y, sub_batch=4)
                out = (image, text, *model.numbers())
            else:
                out = wrapped(x, y)
            loss_of(loss, out, labels, exchange=exchange, group=group).backward()
    found = gradients(model)
    if wrapped is model and not isinstance(model, FSDPModule):
        for gradient in found.values():
            dist.all_reduce(gradient, group=group)
            gradient /= W
    return found


PARTS = {"towers": ("image", "text"), "scale": ("logit_scale",), "bias": ("logit_bias",)}


def compare(
    found: dict[str, Tensor], true: dict[str, Tensor], shards: tuple[int, Any]
) -> dict[str, tuple[float, float]]:
    """Of each part, ⟨found, true⟩ / ⟨true, true⟩ and the cosine; shards: this rank among those that share them."""
    rank, group = shards
    if group is not None:
        W = dist.get_world_size(group)
        true = {name: ([*t.chunk(W)] + [t[:0]] * W)[rank] for name, t in true.items()}
    rows = []
    for starts in PARTS.values():
        g, t = (
            torch.cat([x[name].flatten() for name in true if name.startswith(starts)] or [torch.zeros(1)]).double()
            for x in (found, true)
        )
        rows.append(torch.stack([g @ t, t @ t, g @ g]))
    products = torch.stack(rows)
    if group is not None:
        dist.all_reduce(products, group=group)
    return {
        part: (float(gt / tt), float(gt / (tt * gg).sqrt()))
        for part, (gt, tt, gg) in zip(PARTS, products, strict=True)
        if tt
    }


def _on_a_rank(
    rank: int,
    group: Any,
    wrapper: str,
    exchanges: Sequence[str],
    ways: Sequence[tuple[bool, int]],
    losses: Sequence[str],
    truths: dict[Any, dict[str, Tensor]],
) -> list[Row]:
    rows = []
    for bias in (False, True):
        # FSDP2 takes no number of shape []
        model = Pair(bias, (1,) if wrapper == "FSDP2" else ())
        wrapped = wrap(wrapper, model, group)
        for loss, exchange, (cached, micro) in product(losses, exchanges, ways):
            if bias == (loss in BIASED):
                found = step(rank, group, model, wrapped, loss, exchange, cached, micro)
                parts = compare(found, truths[loss, micro], (rank, group if wrapper == "FSDP2" else None))
                rows.append(Row(loss, exchange, dist.get_world_size(group), wrapper, cached, micro > 1, parts))
    return rows


def measure(
    pool: Pool,
    ranks: Sequence[int] = (1, 2, 3, 4),
    wrappers: Sequence[str] = WRAPPERS,
    exchanges: Sequence[str] = EXCHANGES,
    ways: Sequence[tuple[bool, int]] = WAYS,
    losses: Sequence[str] = tuple(LOSSES),
) -> Iterator[Row]:
    """All combinations; of each, what every rank found."""
    truths = {(name, micro): truth(name, micro) for name in losses for micro in (1, MICRO_BATCHES)}
    for W, wrapper in product(ranks, wrappers):
        for answer in pool.run(_on_a_rank, W, wrapper, exchanges, ways, losses, truths):
            yield from answer


def _cell(pairs: Sequence[tuple[float, float]]) -> str:
    """The ratio that is farthest from 1, and the smallest cosine."""
    return f"{max((ratio for ratio, _ in pairs), key=lambda r: abs(r - 1)):.3f}, {min(c for _, c in pairs):.6f}"


def summary(rows: Sequence[Row]) -> str:
    """Of each loss and exchange the worst under each wrapper: over numbers of ranks, with encode or not, and so on."""
    lines = [
        "| loss | exchange | " + " | ".join(f"{w}: {p}" for w in WRAPPERS for p in ("towers", "scale, bias")) + " |"
    ]
    lines.append("|---|---|" + "---|" * 2 * len(WRAPPERS))
    for name, exchange in product(LOSSES, EXCHANGES):
        cells = []
        for wrapper in WRAPPERS:
            here = [r for r in rows if (r.loss, r.exchange, r.wrapper) == (name, exchange, wrapper)]
            cells.append(_cell([r.parts["towers"] for r in here]))
            cells.append(_cell([value for r in here for part, value in r.parts.items() if part != "towers"]))
        lines.append(f"| {name} | {exchange} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def every(rows: Sequence[Row]) -> str:
    lines = ["| loss | exchange | ranks | wrapper | encode | accumulation | towers | scale | bias |", "|---" * 9 + "|"]
    for r in dict.fromkeys((r.loss, r.exchange, r.ranks, r.wrapper, r.cached, r.accumulated) for r in rows):
        here = [x for x in rows if (x.loss, x.exchange, x.ranks, x.wrapper, x.cached, x.accumulated) == r]
        cells = [_cell([x.parts[p] for x in here]) if p in here[0].parts else "" for p in PARTS]
        lines.append("| " + " | ".join([*map(str, r), *cells]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    started = Pool()
    found = list(measure(started))
    started.close()
    sys.stdout.write((every if "--all" in sys.argv else summary)(found) + "\n")
