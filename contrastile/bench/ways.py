"""The ways to take a step: plain, accumulated, two passes by hand, through `encode`, and peers' caches; across ranks.

Stands below `step.py`, which checks and times them. A way takes a task, leaves the gradients in the parameters'
`.grad`, and returns the loss. Public gradient caches are imported when they run and called as their documentation says;
none is a dependency. Their loss is the package's own or the plain formula, as its users have it. All ways across ranks
go through `encode`. Without a wrapper one explicit all-reduce averages the gradients, those of peers' losses too,
whatever their own convention is.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from contrastile._types import Backend, ExchangeName
from contrastile.bench.peers import rank_peers
from contrastile.bench.towers import Towers
from contrastile.gradcache.encode import encode
from contrastile.gradcache.rng import RandomState
from contrastile.losses.reference import dense_clip
from contrastile.modules import ClipLoss
from contrastile.train.ranks import Ranks
from contrastile.train.sharded import gathered_once, shard

# a tower, or the pair that names a wrapped model's method, and its inputs
Side = tuple[Any, Tensor]
Retain = int | Literal["half", "all", "auto"]

# the beginning of the names of ways with compiled towers
COMPILED = "compiled-"
# places of the inputs, nearest to the device first, and the end of a way's name there
PLACES = {"device": "", "host": "streamed", "pool": "from a pool"}
# measured by default across ranks: the losses of CLIP and OpenCLIP, tiles across ranks only, and tiles on both levels
STANDARD = ("replicate-dense", "gather-dense", "ring-dense", "ring-tiles")


@dataclass(frozen=True)
class Task:
    """A batch to take a step on: each tower with its inputs, the sub-batch, and the loss.

    dtype: of the towers under autocast; float32 is without autocast.
    """

    towers: Towers
    sides: list[Side]
    sub_batch: int
    device: torch.device
    dtype: torch.dtype
    loss: Callable[..., Tensor]

    @property
    def batch(self) -> int:
        return len(self.sides[0][1])

    @property
    def sub_batches(self) -> int:
        return -(-self.batch // self.sub_batch)

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def first(self, batch: int) -> Self:
        return replace(self, sides=[(tower, leaf[:batch]) for tower, leaf in self.sides])

    def loss_of(self, images: Tensor, texts: Tensor) -> Tensor:
        return self.loss(images, texts, self.towers.logit_scale.exp())


@dataclass(frozen=True)
class Way:
    """A way to take a step.

    cut: encodes sub-batches, on which dropout's random numbers depend. same: computes the gradient of the whole batch.
    replays: draws the same random numbers in both passes. inputs: their place. compiled: its towers are. wrap: puts the
    towers of a task into a wrapper that cannot be taken off. loss: that of its tasks. module: the one it is imported
    from. package: its name on PyPI where that differs from impl.
    """

    impl: str
    name: str
    run: Callable[[Task], Tensor]
    cut: bool = True
    same: bool = True
    replays: bool = True
    retain: str = ""
    inputs: str = "device"
    checkpointing: bool = False
    compiled: bool = False
    wrap: Callable[[Task], Task] | None = None
    loss: Callable[..., Tensor] = field(default_factory=ClipLoss)
    module: str = ""
    package: str = ""

    @property
    def label(self) -> str:
        return f"{self.impl}, {self.name}"

    @property
    def judged(self) -> bool:
        """A wrong gradient of contrastile or of the reference ways has no speed; peers' are shown."""
        return self.impl in ("contrastile", "plain", "by hand")


def plain(task: Task) -> Tensor:
    with task.autocast():
        loss = task.loss_of(*(tower(leaf) for tower, leaf in task.sides))
    loss.backward()
    return loss.detach()


def accumulated(task: Task) -> Tensor:
    """Average the gradients of one loss per sub-batch, whose negatives are those of the sub-batch."""
    total = torch.zeros((), device=task.device)
    for leaves in zip(*(leaf.split(task.sub_batch) for _, leaf in task.sides), strict=True):
        with task.autocast():
            loss = task.loss_of(*(tower(leaf) for (tower, _), leaf in zip(task.sides, leaves, strict=True)))
        loss = loss * (len(leaves[0]) / task.batch)
        loss.backward()
        total += loss.detach()
    return total


def by_hand(task: Task) -> Tensor:
    """Take the two passes in plain PyTorch, for these two towers and nothing else."""
    capture = partial(RandomState.capture, task.device, process=())
    states, features = list[RandomState](), list[Tensor]()
    for tower, leaf in task.sides:
        with torch.no_grad(), task.autocast():
            encoded = []
            for rows in leaf.split(task.sub_batch):
                states.append(capture())
                encoded.append(tower(rows))
        features.append(torch.cat(encoded).requires_grad_())
    loss = task.loss_of(*features)
    loss.backward()
    after, replayed = capture(), iter(states)
    for (tower, leaf), side in zip(task.sides, features, strict=True):
        gradients = cast(Tensor, side.grad).split(task.sub_batch)
        for rows, gradient in zip(leaf.split(task.sub_batch), gradients, strict=True):
            next(replayed).restore()
            with task.autocast():
                out = tower(rows)
            torch.dot(out.flatten(), gradient.flatten()).backward()
    after.restore()
    return loss.detach()


def cached(task: Task, retain: Retain = 0) -> Tensor:
    """Use `encode` in front of the loss."""
    counts = {"half": task.sub_batches // 2, "all": task.sub_batches}
    graphs = retain if retain == "auto" or isinstance(retain, int) else counts[retain]
    with task.autocast():
        features = [
            encode(tower, leaf, sub_batch=task.sub_batch, retain=graphs, device=task.device)
            for tower, leaf in task.sides
        ]
        loss = task.loss_of(*features)
    loss.backward()
    return loss.detach()


class _Under(nn.Module):
    """A tower with autocast inside.

    Around both passes of the peers' caches, autocast would keep the cast weights of the first pass, without a graph.
    """

    def __init__(self, tower: nn.Module, task: Task) -> None:
        super().__init__()
        self.tower, self.task = tower, task

    def forward(self, rows: Tensor) -> Tensor:
        with self.task.autocast():
            return self.tower(rows)


def grad_cache(task: Task) -> Tensor:
    """Run the class of the paper's repository with the dense loss."""

    def loss(images: Tensor, texts: Tensor) -> Tensor:
        with task.autocast():
            return dense_clip(images, texts, task.towers.logit_scale.exp())

    towers = [_Under(tower, task) for tower, _ in task.sides]
    cache = import_module("grad_cache").GradCache(models=towers, chunk_sizes=task.sub_batch, loss_fn=loss)
    return cast(Tensor, cache(*(leaf for _, leaf in task.sides)))


class _Model(nn.ModuleList):
    """Both towers as a model of sentence-transformers, which gets its inputs by name."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        side, name = (0, "pixels") if "pixels" in features else (1, "input_ids")
        return {"sentence_embedding": self[side](features[name])}


def cached_ranking(task: Task) -> Tensor:
    """Run the cached loss of sentence-transformers in both directions; the scale is a constant there."""
    loss = import_module("sentence_transformers.losses").CachedMultipleNegativesRankingLoss(
        _Model(_Under(tower, task) for tower, _ in task.sides),
        scale=float(task.towers.logit_scale.detach().exp()),
        similarity_fct=import_module("sentence_transformers.util").dot_score,
        mini_batch_size=task.sub_batch,
        directions=("query_to_doc", "doc_to_query"),
        partition_mode="per_direction",
    )
    names = ("pixels", "input_ids")
    value = loss([{name: leaf} for name, (_, leaf) in zip(names, task.sides, strict=True)], None)
    value.backward()
    return value.detach()


class _Loader(list[Any]):
    """A batch as the loader of open_clip's training loop."""

    def __init__(self, task: Task) -> None:
        super().__init__(zip(*(leaf.split(task.sub_batch) for _, leaf in task.sides), strict=True))
        self.num_batches, self.num_samples = task.sub_batches, task.batch


def open_clip(task: Task) -> Tensor:
    """Run the training loop of open_clip with `--accum-freq`: one loss of the whole batch per sub-batch."""
    loss, train = import_module("open_clip").ClipLoss(), import_module("open_clip_train.train").train_one_epoch
    arguments = Namespace(
        device=str(task.device), precision="fp32" if task.dtype == torch.float32 else "amp_bf16",
        accum_freq=task.sub_batches, distill=False, skip_scheduler=True, grad_clip_norm=None, horovod=False,
        # only the first rank logs
        rank=1, local_rank=1, log_every_n_steps=1,
    )  # fmt: skip
    data = Namespace(dataloader=_Loader(task), set_epoch=lambda _: None)
    optimizer = Namespace(zero_grad=lambda: None, step=lambda: None)
    train(task.towers, {"train": data}, loss, 0, optimizer, None, None, None, arguments)
    return torch.zeros(())


def with_inputs(way: Way, inputs: Literal["host", "pool"]) -> Way:
    return replace(way, name=f"{way.name}, {PLACES[inputs]}", inputs=inputs)


def with_compiled_towers(ways: Mapping[str, Way]) -> dict[str, Way]:
    return {COMPILED + key: replace(way, name=f"{way.name}, compiled", compiled=True) for key, way in ways.items()}


def averaged(ranks: Ranks, task: Task) -> Tensor:
    """Use `encode` for this rank's pairs and the loss of all; average the gradients as the training loop does."""
    with gathered_once(task.towers):
        loss = cached(task)
    return ranks.combine(task.towers, loss, "mean")


def in_shards(towers: Towers) -> Towers:
    """Shard layers, towers and model with FSDP2, as `train.parallel = "shard"` does."""
    shard(towers, towers.logit_scale.device)
    return towers


def wrapped(wrap: Callable[[Towers], Any], task: Task) -> Task:
    """The task with the methods of the wrapped model as encoders."""
    model, names = wrap(task.towers), ("encode_image", "encode_text")
    return replace(task, sides=[((model, name), leaf) for name, (_, leaf) in zip(names, task.sides, strict=True)])


def rank_ways(device: torch.device, rank: int, world: int) -> dict[str, Way]:
    """Return the ways across ranks by their words on the command line; exchange and block name those of our loss."""
    # tiles are the device's own
    ways: dict[str, Way] = {}
    combined = partial(averaged, Ranks(rank, world))
    tiles: Backend = "triton" if device.type == "cuda" else "eager"
    for word in (*STANDARD, "gather-tiles"):
        exchange, block = word.split("-")
        backend = tiles if block == "tiles" else cast(Backend, block)
        loss = ClipLoss(exchange=cast(ExchangeName, exchange), backend=backend)
        ways[word] = Way("contrastile", f"{exchange}, {backend}", combined, retain="0", loss=loss)
    ours = partial(Way, "contrastile", retain="0", loss=ClipLoss(backend=tiles))
    ways["ddp"] = ours(f"DDP, auto, {tiles}", cached, wrap=partial(wrapped, DistributedDataParallel))
    ways["fsdp"] = ours(f"FSDP2, auto, {tiles}", combined, wrap=partial(wrapped, in_shards))
    for peer in rank_peers(rank, world):
        if "clip" in peer.losses and peer.only_on in (None, device.type):
            which: Any = {"loss": peer.losses["clip"], "module": peer.module, "package": peer.package}
            ways[peer.name] = Way(peer.name, peer.backend, combined, retain="0", **which)
    return ways | {f"pool-{word}": with_inputs(way, "pool") for word, way in ways.items()}


def _ours(retain: Retain) -> Way:
    return Way("contrastile", f"retain {retain}", partial(cached, retain=retain), retain=str(retain))


OURS = {
    **{f"retain-{retain}": _ours(retain) for retain in (0, "half", "all", "auto")},
    **{f"streamed-{retain}": with_inputs(_ours(retain), "host") for retain in (0, "auto")},
    **{f"pool-{retain}": with_inputs(_ours(retain), "pool") for retain in (0, "auto")},
}
PLAIN = {
    "plain": Way("plain", "whole batch", plain, cut=False),
    "checkpointing": Way("plain", "activation checkpointing", plain, cut=False, checkpointing=True),
    "accumulation": Way("plain", "accumulation, not the same gradient", accumulated, same=False),
    "by-hand": Way("by hand", "two passes", by_hand),
}
PEERS = {
    "GradCache": Way("GradCache", "dense loss", grad_cache, module="grad_cache"),
    "sentence-transformers": Way(
        "sentence-transformers", "cached loss", cached_ranking, module="sentence_transformers"
    ),
    "open_clip": Way(
        "open_clip", "accum-freq", open_clip, replays=False, module="open_clip_train", package="open_clip_torch"
    ),
}
# ways that keep inputs on the device take them from a pool where the whole batch does not fit
POOLS = {f"pool-{name}": with_inputs(way, "pool") for name, way in {**PLAIN, **PEERS}.items() if way.cut}
WAYS = {**PLAIN, **OURS, **PEERS, **POOLS}
