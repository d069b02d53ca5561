"""The guided loss for sentence-transformers beside its own, with the library itself."""

from __future__ import annotations

import inspect
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sentence_transformers")

import torch
import torch.distributed as dist
from comparison import same
from ranks import Pool
from sentences import CACHED, WIDTH, N, build, columns_of, gradients, losses, step, trained
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from contrastile.integrations.sentence_transformers import CachedGISTLoss

# warnings of the library about itself
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.unpoisoned]
# a margin that removes some negatives of the small models, and leaves others
MARGIN = 0.002


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models")
    return {
        "model": build(folder / "model").double(),
        "alike": build(folder / "alike", width=8).double(),
        "other": build(folder / "other", width=8, letters="jihgfedcba").double(),
        "float": build(folder / "float", width=8),
    }


WORDS: list[dict[str, Any]] = [
    {},
    {"margin": MARGIN},
    {"margin": -MARGIN},
    {"margin": MARGIN, "margin_strategy": "relative"},
    {"margin": MARGIN, "contrast_anchors": False},
    {"margin": MARGIN, "contrast_positives": False},
    {"contrast_anchors": False, "contrast_positives": False, "temperature": 0.05},
]


@pytest.mark.parametrize("guide", ["alike", "other"])
@pytest.mark.parametrize("words", WORDS, ids=lambda words: "-".join(map(str, words.values())) or "default")
def test_the_loss_and_gradients_of_their_class(models: dict[str, Any], words: dict[str, Any], guide: str) -> None:
    model, judge = models["model"], models[guide]
    for names in ("ab", "abc", "abcd"):
        columns = columns_of(model, names)
        theirs = losses.CachedGISTEmbedLoss(model, judge, mini_batch_size=5, **words)
        assert theirs.must_retokenize == (guide == "other")
        found = step(CachedGISTLoss(model, judge, mini_batch_size=3, **words), columns)
        # before version 6.2 their class cannot tokenize anew
        if CACHED < 1e-6 or not theirs.must_retokenize:
            same(found, step(theirs, columns), CACHED)
        if len(names) < 4:
            # takes no more columns
            same(found, step(losses.GISTEmbedLoss(model, judge, **words), columns))


def test_the_guide_leaves_some_negatives_and_not_others(models: dict[str, Any]) -> None:
    columns = columns_of(models["model"], "abc")
    values = {
        float(step(CachedGISTLoss(models["model"], models[guide], margin=margin), columns)[0])
        for guide in ("alike", "other")
        for margin in (-2.0, -MARGIN, MARGIN)
    }
    # with -2 every negative stays, whatever the guide
    assert len(values) == 5


def test_a_guide_of_another_type_and_shorter_texts(models: dict[str, Any]) -> None:
    model, guide = models["model"], models["float"]
    columns = columns_of(model, "abc")
    longest, guide.max_seq_length = guide.max_seq_length, 6
    try:
        ours, theirs = CachedGISTLoss(model, guide), losses.GISTEmbedLoss(model, guide)
        assert ours.must_retokenize
        same(step(ours, columns), step(theirs, columns))
    finally:
        guide.max_seq_length = longest


def test_inside_matryoshka(models: dict[str, Any]) -> None:
    model, guide = models["model"], models["alike"]
    columns, results = columns_of(model, "abc"), []
    for kind in (CachedGISTLoss, losses.CachedGISTEmbedLoss):
        model.zero_grad()
        loss = losses.MatryoshkaLoss(
            model, kind(model, guide, mini_batch_size=3, margin=MARGIN), [WIDTH, 8], [1.0, 0.3]
        )
        value = loss(columns, None)
        (2 * value).backward()
        results.append((value.detach(), gradients(model)))
        assert all(p.grad is None for p in guide.parameters())
    same(*results, CACHED)


@pytest.mark.parametrize("guide", ["alike", "other"])
def test_inside_adaptive_layers(models: dict[str, Any], guide: str) -> None:
    model, columns, results = models["model"], columns_of(models["model"], "abc"), []
    for kind, how in ((CachedGISTLoss, {"mini_batch_size": 3}), (losses.GISTEmbedLoss, {})):
        loss = losses.AdaptiveLayerLoss(model, kind(model, models[guide], margin=MARGIN, **how), n_layers_per_step=-1)
        results.append(step(loss, columns))
    same(*results)


def test_a_guide_that_is_the_model_judges_with_all_its_layers(models: dict[str, Any]) -> None:
    model, columns, results = models["model"], columns_of(models["model"], "ab"), []
    for guide in (model, deepcopy(model)):
        loss = losses.AdaptiveLayerLoss(model, CachedGISTLoss(model, guide, margin=MARGIN), n_layers_per_step=-1)
        results.append(step(loss, columns))
    same(*results)


def test_the_scores_of_16_bit_embeddings_are_in_float32(models: dict[str, Any]) -> None:
    columns, guides = torch.randn(2, 2, 32, WIDTH).bfloat16()
    loss, results = CachedGISTLoss(models["model"], models["alike"]), []
    for dtype in (torch.bfloat16, torch.float64):
        leaf = columns.to(dtype).requires_grad_()
        (gradient,) = torch.autograd.grad(loss.compute_loss_from_embeddings([*leaf], [*guides.to(dtype)]), leaf)
        results.append(gradient.double())
    found, truth = results
    # no more than twice what the gradient's own type costs
    assert (found - truth).norm() <= 2 * (truth.bfloat16() - truth).norm()


def on_a_rank(rank: int, group: Any, folder: Path) -> None:
    model, guide, columns = torch.load(folder / "whole.pt", weights_only=False)
    W = dist.get_world_size(group)
    default, dist.GroupMember.WORLD = dist.GroupMember.WORLD, group
    try:
        rows = slice(rank * N // W, (rank + 1) * N // W)
        mine = [{name: x[rows] if isinstance(x, Tensor) else x for name, x in column.items()} for column in columns]
        loss = CachedGISTLoss(model, guide, mini_batch_size=3, margin=MARGIN, gather_across_devices=True)
        loss.model = DistributedDataParallel(model)
        value = loss(mine, None)
        value.backward()
    finally:
        dist.GroupMember.WORLD = default
    torch.save((value.detach(), gradients(model)), folder / f"{rank}.pt")


@pytest.mark.parametrize(("guide", "ranks"), [("alike", 2), ("other", 3)])
def test_ranks_have_the_gradient_of_the_whole_batch(
    pool: Pool, tmp_path: Path, models: dict[str, Any], guide: str, ranks: int
) -> None:
    columns = columns_of(models["model"], "abc")
    truth = step(losses.GISTEmbedLoss(models["model"], models[guide], margin=MARGIN), columns)
    torch.save((models["model"], models[guide], columns), tmp_path / "whole.pt")
    pool.check(on_a_rank, ranks, tmp_path)
    for rank in range(ranks):
        same(torch.load(tmp_path / f"{rank}.pt"), truth)


def test_their_constructors_words(models: dict[str, Any]) -> None:
    words = inspect.signature(losses.CachedGISTEmbedLoss).parameters
    known = inspect.signature(CachedGISTLoss).parameters
    assert list(words) == list(known)[: len(words)]
    assert {name: word.default for name, word in words.items()} == {name: known[name].default for name in words}
    pair = models["model"], models["alike"]
    assert CachedGISTLoss(*pair).get_config_dict() == losses.CachedGISTEmbedLoss(*pair).get_config_dict()
    assert "solatorio2024" in CachedGISTLoss(*pair).citation


def test_a_model_card_names_no_loss_inside(models: dict[str, Any], tmp_path: Path) -> None:
    model = deepcopy(models["model"])
    trained(model, CachedGISTLoss(model, models["alike"]), tmp_path)
    model.save_pretrained(str(tmp_path / "saved"))
    card = (tmp_path / "saved" / "README.md").read_text()
    assert [line for line in card.splitlines() if line.startswith("- loss:")] == ["- loss:CachedGISTLoss"]


def test_a_scale_in_the_place_of_the_temperature_gives_a_warning(models: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="CachedGISTLoss got a temperature of 20, as if it were a scale; cosines are"):
        CachedGISTLoss(models["model"], models["alike"], temperature=20.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CachedGISTLoss(models["model"], models["alike"])


SENTENCES: dict[str, dict[str, Any]] = {
    "`temperature` must be above 0; got 0. Pass 0.01, say.": {"temperature": 0},
    "`temperature` must be above 0; got '0.05'. Pass 0.01": {"temperature": "0.05"},
    "`contrast_anchors` must be True or False; got 'no'. Pass one of these": {"contrast_anchors": "no"},
    "`contrast_positives` must be True or False; got 1. Pass one of these": {"contrast_positives": 1},
    "`guide` must be a model of sentence-transformers; got 'all-MiniLM-L6-v2'. Load it": {"guide": "all-MiniLM-L6-v2"},
    "`margin_strategy` must be one of absolute, relative; got 'both'.": {"margin_strategy": "both"},
    "`show_progress_bar` must be False; got True.": {"show_progress_bar": True},
    "`guide` must have a tokenizer of transformers; got NoneType. Take CachedRankingLoss": {"guide": nn.Identity()},
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_refusals(models: dict[str, Any], sentence: str) -> None:
    words = {"guide": models["alike"], **SENTENCES[sentence]}
    with pytest.raises(ValueError) as raised:
        CachedGISTLoss(models["model"], **words)
    assert str(raised.value).startswith(sentence)
