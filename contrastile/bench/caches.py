"""Public gradient caches on the same towers, measured beside `encode`.

Stands on `ways.py`. Each is imported when it runs and called as its documentation says; none is a dependency. The loss
is the package's own or the dense formula, as its users have it.
"""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from contrastile.bench.ways import Task, Way
from contrastile.losses.reference import dense_clip


class _Under(nn.Module):
    """A tower with autocast inside: around both passes of these caches, autocast would keep the cast weights of the
    first pass, which have no graph."""

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
    loss_value: Tensor = cache(*(leaf for _, leaf in task.sides))
    return loss_value


class _Model(nn.ModuleList):
    """Both towers as a model of sentence-transformers, which gets its inputs by name."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        side, name = (0, "pixels") if "pixels" in features else (1, "input_ids")
        return {"sentence_embedding": self[side](features[name])}


def cached_ranking(task: Task) -> Tensor:
    """Run its cached loss in both directions; the scale is a constant there."""
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
    """Both towers as a model of open_clip's training loop."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.image, self.text = (tower for tower, _ in task.sides)
        self.logit_scale = task.towers.logit_scale

    def forward(self, images: Tensor, texts: Tensor) -> dict[str, Tensor]:
        scale = self.logit_scale.exp()
        return {"image_features": self.image(images), "text_features": self.text(texts), "logit_scale": scale}


class _Loader(list[Any]):
    """A batch as the loader of open_clip's training loop."""

    def __init__(self, task: Task) -> None:
        super().__init__(zip(*(leaf.split(task.sub_batch) for _, leaf in task.sides), strict=True))
        self.num_batches, self.num_samples = task.sub_batches, task.batch


def open_clip(task: Task) -> Tensor:
    """Run its training loop with `--accum-freq`: one loss of the whole batch per sub-batch."""
    loss, train = import_module("open_clip").ClipLoss(), import_module("open_clip_train.train").train_one_epoch
    arguments = Namespace(
        device=str(task.device),
        precision="fp32" if task.dtype == torch.float32 else "amp_bf16",
        accum_freq=task.sub_batches,
        distill=False,
        skip_scheduler=True,
        grad_clip_norm=None,
        horovod=False,
        # only the first rank logs
        rank=1,
        local_rank=1,
        log_every_n_steps=1,
    )
    data = Namespace(dataloader=_Loader(task), set_epoch=lambda _: None)
    optimizer = Namespace(zero_grad=lambda: None, step=lambda: None)
    train(_Clip(task), {"train": data}, loss, 0, optimizer, None, None, None, arguments)
    return torch.zeros(())


PEERS = {
    "GradCache": Way("GradCache", "dense loss", grad_cache, module="grad_cache"),
    "sentence-transformers": Way(
        "sentence-transformers", "cached loss", cached_ranking, module="sentence_transformers"
    ),
    "open_clip": Way(
        "open_clip", "accum-freq", open_clip, replays=False, module="open_clip_train", package="open_clip_torch"
    ),
}
