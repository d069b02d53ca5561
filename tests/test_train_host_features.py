"""Recipes whose features wait in host memory: the gradients of features on the device, alone and on several ranks."""

import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from ranks import Pool
from tiny_runs import tiny_recipe
from tiny_texts import tiny_retriever
from torch import Tensor

from contrastile.engine import plan
from contrastile.train.image_text import ImageText
from contrastile.train.ranks import ALONE, Ranks
from contrastile.train.recipe import RecipeError
from contrastile.train.retriever.job import RetrieverJob

RECIPES: dict[str, Any] = {"pairs": (ImageText, tiny_recipe), "queries": (RetrieverJob, tiny_retriever)}
# of two ranks none has as many rows as another; a sub-batch is shorter than the others
ROWS = 41
ON_CPU = os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()
LATE = ("model.kind=late", "model.features=8", "data.negatives=1")


def _step(kind: str, folder: Path, words: tuple[str, ...], where: str, ranks: Ranks = ALONE) -> tuple[float, Any]:
    """The loss and the gradients of a batch, of all ranks; with features on the `host` the streamed loss computes."""
    task, tiny = RECIPES[kind]
    more = ("data.augment=false",) if kind == "pairs" else ()
    job = task.open(tiny(folder, *words, *more, "train.retain=0", f"train.features={where}"))
    (part,) = job.parts(torch.from_numpy(np.resize(job.rows, ROWS)), 1, ranks)
    calls: list[Tensor] = []
    # features of a CPU's run are where the loss computes; the streamed loss is taken all the same, without a kept plan
    plan._plans.clear()
    with patch.object(plan, "waits_on_host", lambda x, _: calls.append(x) or where == "host"):
        loss = job.loss(part)
    loss.backward()
    assert calls
    if ranks.size > 1:
        loss = ranks.combine(job.run.model, loss.detach(), "mean")
    return loss.item(), {name: x.grad for name, x in job.run.model.named_parameters() if x.grad is not None}


def _on_rank(rank: int, group: Any, kind: str, folder: Path, words: tuple[str, ...]) -> tuple[float, Any]:
    del group
    # each rank writes its own files
    (folder := folder / str(rank)).mkdir()
    return _step(kind, folder, words, "host", Ranks(rank, 4))


DIMENSIONS = ("model.dimensions=[4, 8]", "loss.learn_scale=true", "loss.workspace=1048576")
DCL = ("loss.kind=dcl", "data.positives=2", "train.sub_batch={query_tokens=40, passage=12}")


@pytest.mark.parametrize(("kind", "words", "W"), [
    ("pairs", (), 1), ("pairs", (), 4), ("queries", DIMENSIONS, 1), ("queries", DIMENSIONS, 4), ("queries", DCL, 1),
    ("queries", LATE, 1),
])  # fmt: skip
def test_features_on_the_host_have_the_gradients_of_those_on_the_device(
    tmp_path: Path, pool: Pool, kind: str, words: tuple[str, ...], W: int
) -> None:
    value, gradients = _step(kind, tmp_path, words, "device")
    results = [_step(kind, tmp_path, words, "host")] if W == 1 else pool.run(_on_rank, W, kind, tmp_path, words)
    for other, others in results:
        assert other == pytest.approx(value, rel=1e-4)
        assert others.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.unpoisoned
@pytest.mark.skipif(ON_CPU, reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("kind", "words"), [("pairs", ()), ("queries", DIMENSIONS), ("queries", DCL), ("queries", LATE)]
)
def test_features_of_a_gpu_on_the_host(tmp_path: Path, kind: str, words: tuple[str, ...]) -> None:
    """Strips and shards go to the GPU and back."""
    (value, gradients), (other, others) = (
        _step(kind, tmp_path, (*words, "device=cuda"), where) for where in ("device", "host")
    )
    assert other == pytest.approx(value, rel=1e-4)
    for name, gradient in gradients.items():
        assert (others[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-6


@pytest.mark.parametrize("words", [
    ("loss.kind=gist", "loss.guide=."), ("loss.queue=100",), ("loss.own_negatives=true",),
])  # fmt: skip
def test_losses_with_more_than_features_of_the_batch_are_refused_on_the_host(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    rule = 'must be "device" but for loss.kind = "infonce" or "dcl" without a queue or own_negatives; got "host"'
    with pytest.raises(RecipeError, match=re.escape(f"train.features: {rule}")):
        tiny_retriever(tmp_path, *words, "train.features=host")


def test_pairs_of_a_loss_of_two_directions_stay_on_the_device(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r'must be "device" with loss.kind = "infonce"'):
        tiny_recipe(tmp_path, "loss.kind=infonce", "train.features=host")
