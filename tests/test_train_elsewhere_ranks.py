"""Pictures from elsewhere, shared out among ranks: the numbers of one process, whatever fails and whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from ranks import Pool
from test_train_elsewhere import overrides
from test_train_ranks import Launched, _main, _trained, _words, codes_of
from tiny_runs import same_run, tiny_recipe

from contrastile.cli.main import main
from contrastile.train import evaluation, loop
from contrastile.train.config import Recipe
from contrastile.train.image_text import ImageText
from contrastile.train.load import load
from contrastile.train.log import read_metrics
from contrastile.train.sharded import shard

SHORT = ("train.examples=48", "train.batch=16", "evaluate.every=1.0")


def _rows(job: ImageText, most: int | None) -> list[Any]:
    """24 and 6 pictures, in chunks of four, the last one short, and in one, where three of four ranks have none."""
    found = []
    for stretch in (4, 100):
        with patch.object(evaluation, "FILES_AT_ONCE", stretch):
            found += [row for _, measure in job._tests for row in measure(job.run, most)]
    return found


def _rows_of_ranks(rank: int, group: Any, recipe: Recipe, most: int | None, in_shards: bool) -> list[Any]:
    job = ImageText.open(recipe)
    if in_shards:
        shard(job.run.model, job.run.device)
    return _rows(job, most)


@pytest.mark.parametrize("most", [None, 7])
@pytest.mark.parametrize("in_shards", [False, True])
def test_measures_are_those_of_one_process_exactly(
    pool: Pool, tmp_path: Path, most: int | None, in_shards: bool
) -> None:
    recipe = tiny_recipe(tmp_path, *overrides(tmp_path), "train.sub_batch=3", "data.max_bad_fraction=0.8")
    # some of a stretch, and all of another
    for name in ("n00000000/1.png", "n00000001/0.png", *(f"n00000007/{number}.png" for number in range(3))):
        (tmp_path / "val" / name).write_bytes(b"<html>")
    alone = _rows(ImageText.open(recipe), most)
    if most is None:
        assert [(row["queries"], row["skipped"]) for row in alone[::3]] == [(19, {"broken picture": 5})] * 2
    assert pool.run(_rows_of_ranks, 4, recipe, most, in_shards) == [alone] * 4


def _fails_on_one(rank: int, group: Any, recipe: Recipe) -> list[str]:
    job, told = ImageText.open(recipe), []
    real = evaluation.read_chunks

    def read_chunks(*arguments: Any, **words: Any) -> Any:
        if rank == 2:
            raise MemoryError("no room for pictures")
        return real(*arguments, **words)

    for _, measure in job._tests:
        with patch.object(evaluation, "read_chunks", read_chunks):
            try:
                measure(job.run)
            except (ValueError, MemoryError) as error:
                told.append(str(error))
    # none of them waits for another
    return [*told, str(len(_rows(job, None)))]


def test_a_test_that_fails_on_one_rank_fails_on_all(pool: Pool, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, *overrides(tmp_path))
    assert pool.run(_fails_on_one, 4, recipe) == [["rank 2: no room for pictures"] * 2 + ["6"]] * 4


def _fails_on(rank: int, words: list[str], who: tuple[int, ...]) -> int:
    """Some ranks have no room for pictures where they look at them first."""
    real, calls = evaluation.read_chunks, []

    def read_chunks(*arguments: Any, **more: Any) -> Any:
        calls.append(1)
        if rank in who and len(calls) == 1:
            raise MemoryError("no room for pictures")
        return real(*arguments, **more)

    evaluation.read_chunks = read_chunks
    try:
        return main(words)
    except MemoryError as error:
        sys.stderr.write(str(error))
        return 1


def test_a_sharded_test_that_fails_on_one_rank_ends_all_with_its_message(tmp_path: Path) -> None:
    """They run the towers together then: an agreement would meet what they exchange."""
    words = _words(tmp_path, *overrides(tmp_path), *SHORT, "train.parallel=shard")
    with Launched(3, tmp_path, _fails_on, words, (1,)) as launched:
        assert launched.codes() == [1, 1, 1]
        for rank in (0, 2):
            assert "no answer from rank 1, which left by MemoryError: no room for pictures, " in launched.said(rank)


def test_a_sharded_test_that_fails_on_all_ranks_is_logged(tmp_path: Path) -> None:
    words = _words(tmp_path, *overrides(tmp_path), *SHORT, "train.parallel=shard")
    assert codes_of(2, tmp_path, _fails_on, words, (0, 1)) == [0, 0]
    lines = read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert [line["why"] for line in lines if line["kind"] == "failure"] == ["MemoryError('no room for pictures')"]


def _tests(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "test"]


def _of_few_files(rank: int, words: list[str]) -> int:
    evaluation.FILES_AT_ONCE = 4
    return main(words)


@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_at_the_end_all_ranks_measure_all_pictures(tmp_path: Path, parallel: str) -> None:
    words = (*overrides(tmp_path), *SHORT, "evaluate.probe=5", f"train.parallel={parallel}", "optim.ema=0.9")
    assert codes_of(3, tmp_path, _of_few_files, _words(tmp_path, *words, "train.sub_batch=4")) == [0] * 3
    with patch.object(evaluation, "FILES_AT_ONCE", 4):
        folder = tmp_path / "runs" / "tiny"
        recipe = tiny_recipe(tmp_path, *words)
        run = load(folder, device="cpu")
        alone = [row for _, measure in ImageText.open(recipe)._tests for row in measure(run)]
    lines = _tests(folder)
    assert [(line["examples"], line["queries"], line.get("whole", False)) for line in lines] == [
        *[(0, 5, False), (0, 5, False), (0, 15, False)],
        *[(48, 5, False), (48, 5, False), (48, 15, False)],
        *[(48, 24, True), (48, 6, True), (48, 18, True)],
    ]
    table = json.loads((folder / "evaluation.json").read_text())[-3:]
    assert table == alone
    for line, row in zip(lines[-3:], table, strict=True):
        assert {name: line[name] for name in row["metrics"]} == row["metrics"]


def _killed_while_it_measures(rank: int, words: list[str], name: str) -> int:
    def test(_: Any) -> None:
        os.kill(os.getpid(), getattr(signal, name))

    loop.Trainer.test = test
    return main(words)


def test_a_run_killed_during_its_tests_keeps_its_steps(tmp_path: Path) -> None:
    words = (*overrides(tmp_path), *SHORT)
    whole = _trained(tmp_path, 2, *words).rename(tmp_path / "whole")
    assert (
        codes_of(2, tmp_path, _killed_while_it_measures, _words(tmp_path, *words), "SIGKILL") == [-signal.SIGKILL] * 2
    )
    folder = tmp_path / "runs" / "tiny"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000000003"]
    assert not (folder / "run.json").exists()
    # the second time it is finished, and measured again by the first rank alone
    for _ in range(2):
        assert codes_of(2, tmp_path, _main, [*_words(tmp_path, *words), "--resume"]) == [0, 0]
        same_run(folder, whole)
