"""The ways to take a step: plain, in parts, by hand, and through the cache.

Stands below `step.py`, which checks and times them. A way takes a task, leaves the gradients in the parameters'
`.grad`, and returns the loss. Other people's ways are in `caches.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from contrastile.bench.towers import Towers
from contrastile.cache import encode
from contrastile.modules import ClipLoss

Side = tuple[nn.Module, Tensor]
Retain = int | Literal["half", "all", "auto"]


@dataclass(frozen=True)
class Task:
    """A batch to take a step on: each tower with its inputs, and how it is cut and computed."""

    towers: Towers
    sides: list[Side]
    sub_batch: int
    device: torch.device
    # what the towers compute in under autocast; float32 is without
    dtype: torch.dtype
    loss: ClipLoss

    @property
    def batch(self) -> int:
        """Pairs."""
        return len(self.sides[0][1])

    @property
    def sub_batches(self) -> int:
        """Into how many the batch is cut; the last may be shorter."""
        return -(-self.batch // self.sub_batch)

    def autocast(self) -> AbstractContextManager[object]:
        """What the towers compute in."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def first(self, batch: int) -> Task:
        """The same with fewer pairs."""
        return replace(self, sides=[(tower, leaf[:batch]) for tower, leaf in self.sides])

    def loss_of(self, images: Tensor, texts: Tensor) -> Tensor:
        """Of the features, at the towers' own scale."""
        return self.loss(images, texts, self.towers.logit_scale.exp())


Run = Callable[[Task], Tensor]


@dataclass(frozen=True)
class Way:
    """A way to take a step, by name.

    cut: whether it encodes sub-batches; dropout's random numbers depend on it. same: whether it takes the batch's
    gradient. replays: whether its second pass draws the random numbers of the first. inputs: where they wait.
    missing: why it cannot take part; None if it can. package: as it is installed, where that is another name.
    """

    impl: str
    name: str
    run: Run
    cut: bool = True
    same: bool = True
    replays: bool = True
    retain: str = ""
    inputs: str = "device"
    checkpointing: bool = False
    missing: Callable[[], str | None] = lambda: None
    package: str = ""

    @property
    def label(self) -> str:
        return f"{self.impl}, {self.name}"


def plain(task: Task) -> Tensor:
    """All activations at once."""
    with task.autocast():
        loss = task.loss_of(*(tower(leaf) for tower, leaf in task.sides))
    loss.backward()
    return loss.detach()


def accumulated(task: Task) -> Tensor:
    """A loss for each sub-batch, gradients averaged: the negatives are those of the sub-batch."""
    total = torch.zeros((), device=task.device)
    for parts in zip(*(leaf.split(task.sub_batch) for _, leaf in task.sides), strict=True):
        with task.autocast():
            loss = task.loss_of(*(tower(part) for (tower, _), part in zip(task.sides, parts, strict=True)))
        (loss * (len(parts[0]) / task.batch)).backward()
        total += loss.detach() * (len(parts[0]) / task.batch)
    return total


def random_state(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def set_random_state(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


def by_hand(task: Task) -> Tensor:
    """The two passes as one would write them for these two towers and nothing else."""
    device, n = task.device, task.sub_batch
    features, states = [], []
    for tower, leaf in task.sides:
        with torch.no_grad(), task.autocast():
            parts = []
            for rows in leaf.split(n):
                states.append(random_state(device))
                parts.append(tower(rows))
        features.append(torch.cat(parts).requires_grad_())
    loss = task.loss_of(*features)
    loss.backward()
    after, past = random_state(device), iter(states)
    for (tower, leaf), whole in zip(task.sides, features, strict=True):
        assert whole.grad is not None
        for rows, gradient in zip(leaf.split(n), whole.grad.split(n), strict=True):
            set_random_state(device, next(past))
            with task.autocast():
                out = tower(rows)
            torch.dot(out.flatten(), gradient.flatten()).backward()
    set_random_state(device, after)
    return loss.detach()


def cached(task: Task, retain: Retain) -> Tensor:
    """`encode` behind the loss."""
    words: dict[str, int] = {"half": task.sub_batches // 2, "all": task.sub_batches}
    kept = retain if retain == "auto" or isinstance(retain, int) else words[retain]
    with task.autocast():
        features = [
            encode(tower, leaf, sub_batch=task.sub_batch, retain=kept, device=task.device) for tower, leaf in task.sides
        ]
        loss = task.loss_of(*features)
    loss.backward()
    return loss.detach()


def waiting(way: Way, inputs: Literal["host", "pool"]) -> Way:
    """The same way with its inputs there."""
    where = {"host": "streamed", "pool": "from a pool"}[inputs]
    return replace(way, name=f"{way.name}, {where}", inputs=inputs)


def _ours(retain: Retain) -> Way:
    return Way("contrastile", f"retain {retain}", partial(cached, retain=retain), retain=str(retain))


OURS = {
    **{f"retain-{retain}": _ours(retain) for retain in (0, "half", "all", "auto")},
    **{f"streamed-{retain}": waiting(_ours(retain), "host") for retain in (0, "auto")},
    **{f"pool-{retain}": waiting(_ours(retain), "pool") for retain in (0, "auto")},
}
PLAIN = {
    "plain": Way("plain", "whole batch", plain, cut=False),
    "checkpointing": Way("plain", "activation checkpointing", plain, cut=False, checkpointing=True),
    "accumulation": Way("plain", "accumulation, not the same gradient", accumulated, same=False),
    "by-hand": Way("by hand", "two passes", by_hand),
}
