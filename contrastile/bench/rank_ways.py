"""The ways to take a step across ranks: exchanges of our loss, torch's wrappers around the model, and peers' losses.

Stands on `ways.py` and `peers.py`, below `step.py`. All go through `encode`. Without a wrapper one explicit all-reduce
averages the gradients, those of peers' losses too, whatever their own convention is.
"""

from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from contrastile._types import Backend, ExchangeName
from contrastile.bench.peers import rank_peers
from contrastile.bench.ways import Task, Way, cached, with_inputs
from contrastile.modules import ClipLoss
from contrastile.train.sharded import settle_gradients, shard

# measured by default: the losses of CLIP, of OpenCLIP, with tiles across ranks only, and with tiles on both levels
STANDARD = ("replicate-dense", "gather-dense", "ring-dense", "ring-tiles")


def rank_ways(device: torch.device, rank: int, world: int) -> dict[str, Way]:
    """Return the ways across ranks by their words on the command line; exchange and block name those of our loss."""
    # tiles are the device's own
    ways: dict[str, Way] = {}
    tiles: Backend = "triton" if device.type == "cuda" else "eager"
    for word in (*STANDARD, "gather-tiles"):
        exchange, block = word.split("-")
        backend = tiles if block == "tiles" else cast(Backend, block)
        loss = ClipLoss(exchange=cast(ExchangeName, exchange), backend=backend)
        ways[word] = Way("contrastile", f"{exchange}, {backend}", averaged, retain="0", loss=loss)
    ours = Way("contrastile", f"DDP, auto, {tiles}", cached, retain="0", wrap=in_ddp, loss=ClipLoss(backend=tiles))
    ways["ddp"] = ours
    ways["fsdp"] = replace(ours, name=f"FSDP2, auto, {tiles}", run=sharded, wrap=in_shards)
    for peer in rank_peers(rank, world):
        if "clip" in peer.losses and peer.only_on in (None, device.type):
            which: Any = {"loss": peer.losses["clip"], "module": peer.module, "package": peer.package}
            ways[peer.name] = Way(peer.name, peer.backend, averaged, retain="0", **which)
    return ways | {f"pool-{word}": with_inputs(way, "pool") for word, way in ways.items()}


def averaged(task: Task) -> Tensor:
    """Use `encode` for this rank's pairs and the loss of all; average the gradients in one all-reduce."""
    loss = cached(task)
    gradients = [parameter.grad for parameter in task.towers.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))
    return loss


def in_ddp(task: Task) -> Task:
    return _by_name(task, DistributedDataParallel(task.towers))


def in_shards(task: Task) -> Task:
    """Shard layers, towers and model with FSDP2, as `train.parallel = "shard"` does."""
    shard(task.towers, task.device)
    return _by_name(task, task.towers)


def _by_name(task: Task, model: Any) -> Task:
    """The task with the wrapped model's methods as encoders."""
    names = ("encode_image", "encode_text")
    return replace(task, sides=[((model, name), leaf) for name, (_, leaf) in zip(names, task.sides, strict=True)])


def sharded(task: Task) -> Tensor:
    """Use `encode` under FSDP2, which averages the towers' gradients; sum the scale's as the training loop does."""
    loss = cached(task)
    settle_gradients(task.towers, "mean")
    return loss
