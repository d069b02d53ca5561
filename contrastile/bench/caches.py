"""Other people's gradient caches, driven with the same towers: who is measured beside `encode`.

Stands beside `ways.py`. Each is imported when it runs and called the way its documentation says; none is a dependency.
Their loss is their own or the dense formula, as their users have it.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from contrastile.bench.peers import not_installed
from contrastile.bench.ways import Task, Way
from contrastile.losses.dense import dense_clip


class _Under(nn.Module):
    """A tower with autocast inside: these caches run both passes in one go, and autocast would keep the weights of the
    first, which have no graph."""

    def __init__(self, tower: nn.Module, task: Task) -> None:
        super().__init__()
        self.tower, self.task = tower, task

    def forward(self, rows: Tensor) -> Tensor:
        with self.task.autocast():
            return self.tower(rows)


def grad_cache(task: Task) -> Tensor:
    """The class of the paper's repository, with the dense loss."""

    def loss(images: Tensor, texts: Tensor) -> Tensor:
        with task.autocast():
            return dense_clip(images, texts, task.towers.logit_scale.exp())

    towers = [_Under(tower, task) for tower, _ in task.sides]
    cache = import_module("grad_cache").GradCache(models=towers, chunk_sizes=task.sub_batch, loss_fn=loss)
    found: Tensor = cache(*(leaf for _, leaf in task.sides))
    return found


class _Model(nn.ModuleList):
    """Both towers as sentence-transformers calls a model; an input is told by its name."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        place, name = (0, "pixels") if "pixels" in features else (1, "input_ids")
        return {"sentence_embedding": self[place](features[name])}


def cached_ranking(task: Task) -> Tensor:
    """Its cached loss, in both directions; the scale is a constant there."""
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


class _Clip(nn.Module):
    """Both towers as open_clip's training loop calls a model."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.image, self.text = (tower for tower, _ in task.sides)
        self.logit_scale = task.towers.logit_scale

    def forward(self, images: Tensor, texts: Tensor) -> dict[str, Tensor]:
        scale = self.logit_scale.exp()
        return {"image_features": self.image(images), "text_features": self.text(texts), "logit_scale": scale}


class _Data:
    """A batch as the loader that open_clip's loop walks over."""

    def __init__(self, task: Task) -> None:
        parts = zip(*(leaf.split(task.sub_batch) for _, leaf in task.sides), strict=True)
        self.dataloader = _Loader(parts)
        self.dataloader.num_batches, self.dataloader.num_samples = task.sub_batches, task.batch

    def set_epoch(self, epoch: int) -> None:
        pass


class _Loader(list[Any]):
    num_batches: int
    num_samples: int


class _NoOptimizer:
    def zero_grad(self) -> None:
        pass

    def step(self) -> None:
        pass


def open_clip(task: Task) -> Tensor:
    """`--accum-freq` in its training loop: as many losses of the whole batch as there are sub-batches."""
    loss, train = import_module("open_clip").ClipLoss(), import_module("open_clip_train.train").train_one_epoch
    arguments = Namespace(
        device=str(task.device),
        precision="fp32" if task.dtype == torch.float32 else "amp_bf16",
        accum_freq=task.sub_batches,
        distill=False,
        skip_scheduler=True,
        grad_clip_norm=None,
        horovod=False,
        # another than the first does not log
        rank=1,
        local_rank=1,
        log_every_n_steps=1,
    )
    train(_Clip(task), {"train": _Data(task)}, loss, 0, _NoOptimizer(), None, None, None, arguments)
    return torch.zeros(())


PEERS = {
    "GradCache": Way("GradCache", "dense loss", grad_cache, missing=partial(not_installed, "grad_cache")),
    "sentence-transformers": Way(
        "sentence-transformers",
        "cached loss",
        cached_ranking,
        missing=partial(not_installed, "sentence_transformers"),
    ),
    "open_clip": Way(
        "open_clip",
        "accum-freq",
        open_clip,
        replays=False,
        missing=partial(not_installed, "open_clip_train"),
        package="open_clip_torch",
    ),
}
