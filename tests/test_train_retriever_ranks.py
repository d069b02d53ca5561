"""A retriever on several ranks: the losses of one process, each passage on one rank, bit-identical resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_ranks import Launched, _main, _steps, same_as_alone, stopped_and_resumed
from test_train_retriever import bert
from tiny_texts import tiny_retriever, write_text_recipe

import contrastile
from contrastile.train.loop import run_recipe
from contrastile.train.ranks import Ranks
from contrastile.train.recipe import load_any_recipe
from contrastile.train.retriever.job import RetrieverJob, assign_ranks

SHORT = ("train.examples=132", "evaluate.every=1.0")
# a question has several right passages, and some passages are right for several
SEVERAL = ("data.positives=2", "data.negatives=1")


def _words(folder: Path, *overrides: str) -> list[str]:
    return ["train", str(write_text_recipe(folder)), *overrides, "--runs", str(folder / "runs")]


def _trained(folder: Path, W: int, *overrides: str) -> Path:
    with Launched(W, folder, _main, _words(folder, *overrides)) as launched:
        assert launched.codes() == [0] * W, launched.said(0)
    return folder / "runs" / "tiny"


@pytest.mark.parametrize(
    ("W", "overrides"),
    [
        (2, ("model.dimensions=[4, 8]", "loss.learn_scale=true", "loss.queue=1000")),
        # parts of each batch, the last batch so small that a rank has nothing of its second part
        (3, ("train.batch=43", "train.accumulate=2", "loss.exchange=ring", "loss.gradient=sum", *SEVERAL)),
    ],
)
def test_ranks_have_the_losses_of_one_process(tmp_path: Path, W: int, overrides: tuple[str, ...]) -> None:
    (tmp_path / "alone").mkdir()
    alone = run_recipe(tiny_retriever(tmp_path / "alone", *SHORT, *overrides), tmp_path / "alone" / "runs").folder
    together = _trained(tmp_path, W, *SHORT, *overrides)
    same_as_alone(alone, together, W, norm=1e-3, least=1e-12)
    assert contrastile.load(together).encode_query(["where"]).shape == (1, 16)


def test_ranks_without_queries_train(tmp_path: Path) -> None:
    recipe = write_text_recipe(tmp_path)
    recipe.write_text("\n".join(line for line in recipe.read_text().splitlines() if not line.startswith("both")))
    encoders = bert("query", "cls"), bert("passage", "last")
    words = ["train", str(recipe), *encoders, "train.batch=2", "train.examples=6", "--runs", str(tmp_path / "runs")]
    with Launched(3, tmp_path, _main, words) as launched:
        codes = launched.codes()
        assert codes == [0, 0, 0], "".join(launched.said(rank) for rank in range(3))
    steps = _steps(tmp_path / "runs" / "tiny")
    assert len(steps) == 3
    assert all(0 < step["loss"] < 10 and step["norm"] > 0 for step in steps)


# dropout is on
SAVED = ("train.examples=96", "save.steps=4", "evaluate.every=1.0", "optim.ema=0.9", "loss.queue=100", bert("both"))


def test_a_run_resumed_on_as_many_ranks_is_bit_identical(tmp_path: Path) -> None:
    whole = _trained(tmp_path, 2, *SAVED).rename(tmp_path / "whole")
    stopped_and_resumed(tmp_path, _words(tmp_path, *SAVED), whole)


def test_ranks_that_read_other_texts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    words = _words(tmp_path)
    others = Path(_words(tmp_path / "other")[1])
    source = tmp_path / "other" / "texts.jsonl"
    source.write_text(source.read_text().replace("forest", "meadow"))
    others.write_text(others.read_text().replace(str(source), str(tmp_path / "texts.jsonl")))
    with Launched(2, tmp_path, _other_texts, words, source) as launched:
        assert launched.codes() == [2, 2]
        for rank in range(2):
            assert launched.said(rank).splitlines()[-1].startswith("`data` must be the same on all ranks; got ")


def _other_texts(rank: int, words: list[str], source: Path) -> int:
    """Rank 1 finds other texts under the same name."""
    from contrastile.cli.main import main
    from contrastile.train.retriever import run

    real = run.open_texts
    run.open_texts = lambda name, **how: real(str(source) if rank == 1 else name, **how)
    return main(words)


def _answer_some_twice(texts: Path, *, every: int) -> None:
    """One question of `every` few is also answered by the next one's passage."""
    entries = [json.loads(line) for line in texts.read_text().splitlines()]
    for one, after in zip(entries[::every], entries[1::every], strict=True):
        one["positive_ctxs"] += after["positive_ctxs"]
    texts.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


@pytest.mark.parametrize(("size", "every"), [(2, 4), (3, 4), (7, 30)])
def test_each_passage_is_on_one_rank_with_its_queries(tmp_path: Path, size: int, every: int) -> None:
    write_text_recipe(tmp_path)
    _answer_some_twice(tmp_path / "texts.jsonl", every=every)
    job = RetrieverJob.open(load_any_recipe(tmp_path / "tiny.toml", SEVERAL))
    rows = torch.from_numpy(job.rows)
    (whole,) = job.parts(rows, 1, Ranks())
    shares = [job.parts(rows, 1, Ranks(rank, size))[0] for rank in range(size)]
    assert {share.global_size for share in shares} == {len(rows)}
    # the width of the positives too, whichever rank has queries with two
    assert {share.positives.shape[1] for share in shares} == {whole.positives.shape[1]} == {2}
    assert sum(map(len, shares)) == len(rows)
    assert max(map(len, shares)) - min(map(len, shares)) <= 2
    assert sorted(torch.cat([share.key_ids for share in shares]).tolist()) == sorted(whole.key_ids.tolist())

    def known(batch: Any) -> list[tuple[int, list[int]]]:
        keys = batch.key_ids.tolist()
        right = [sorted(keys[place] for place in places if place >= 0) for places in batch.positives.tolist()]
        return sorted(zip(batch.query_ids.tolist(), right, strict=True))

    assert sorted(pair for share in shares for pair in known(share)) == known(whole)
    assert max(len(right) for _, right in known(whole)) == 2
    # a loss asks all ranks for as many columns
    assert {share.positives.shape[1] for share in shares} == {2}


def test_queries_that_share_a_positive_share_a_rank() -> None:
    assert assign_ranks([[1], [2], [3], [4]], size=2) == [0, 1, 0, 1]
    assert assign_ranks([[1], [2, 3], [4], [3, 5], [5], [6]], size=3) == [0, 1, 2, 1, 1, 0]
    assert assign_ranks([[1], [2], [1, 2]], size=2) == [0, 0, 0]
    assert assign_ranks([], size=2) == []
