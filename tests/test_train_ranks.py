"""A run on several ranks: the curve of one process, one folder, the same steps, and an end for all or for none."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Pool, as_in_tests, free_port, fresh, server
from refusals import refusal
from test_train_resume import DROPOUT
from test_train_resume import SAVED as SAVED_EVERY_FOURTH
from tiny_runs import same_run, timed, tiny_recipe, weights, write_pictures, write_recipe, write_shards
from torch import nn

import contrastile
from contrastile.cli.main import main
from contrastile.distributed import failure
from contrastile.train import image_text, loop
from contrastile.train.batch_builder import BatchBuilder, open_data_bundle
from contrastile.train.log import read_metrics
from contrastile.train.loop import run_recipe
from contrastile.train.ranks import Heartbeat, Ranks

# seconds in which all have to be gone, on a busy machine too: fewer than those of `train.timeout`, of a rank that waits
SOON = 60
# seconds after which a rank that waits gives up: for one that is stopped, and where nobody is to wait so long
TIMEOUT, LONG = 4, 600


class Launched:
    """Processes with the environment that torchrun gives them, each running a function of its rank."""

    def __init__(self, size: int, folder: Path, run: Any, *arguments: Any) -> None:
        self.folder, start = folder, server().Process
        shared = (size, str(free_port()), folder, run, *arguments)
        self.processes = [start(target=_launched, args=(rank, *shared)) for rank in range(size)]

    def __enter__(self) -> Launched:
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()

    def codes(self) -> list[int | None]:
        """Exit codes, in the order of the ranks."""
        for process in self.processes:
            process.join(SOON)
        return [process.exitcode for process in self.processes]

    def said(self, rank: int) -> str:
        return (self.folder / f"{rank}.err").read_text()


def codes_of(size: int, folder: Path, run: Any, *arguments: Any) -> list[int | None]:
    """Exit codes of ranks that run to their ends."""
    with Launched(size, folder, run, *arguments) as launched:
        return launched.codes()


def _launched(rank: int, size: int, port: str, folder: Path, run: Any, *arguments: Any) -> None:
    as_in_tests()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    with (folder / f"{rank}.err").open("w") as sys.stderr:
        raise SystemExit(run(rank, *arguments))


def _main(rank: int, words: list[str]) -> int:
    return main(words)


def _words(folder: Path, *overrides: str) -> list[str]:
    return ["train", str(write_recipe(folder)), *overrides, "--runs", str(folder / "runs")]


def _trained(folder: Path, W: int, *overrides: str, run: Callable[[int, list[str]], int] = _main) -> Path:
    assert codes_of(W, folder, run, _words(folder, *overrides)) == [0] * W
    return folder / "runs" / "tiny"


def _steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "step"]


def same_as_alone(alone: Path, together: Path, W: int, norm: float = 1e-2, least: float = 1e-4) -> None:
    """W ranks have the steps of one process, whose sums have another order, and leave the same files.

    norm: share by which the gradient's norm may differ; least: what any number may.
    """
    for one, same in zip(_steps(alone), _steps(together), strict=True):
        for exact in ("examples", "batch", "learning_rate"):
            assert same[exact] == one[exact]
        assert same["loss"] == pytest.approx(one["loss"], rel=1e-4, abs=least)
        assert same["norm"] == pytest.approx(one["norm"], rel=norm, abs=least)
        assert same.get("scale") == pytest.approx(one.get("scale"), rel=1e-4)
    assert sorted(path.name for path in together.iterdir()) == sorted(path.name for path in alone.iterdir())
    one, same = (json.loads((folder / "run.json").read_text()) for folder in (alone, together))
    assert (same["ranks"], same["parameters"]) == (W, one["parameters"])


@pytest.mark.parametrize(
    ("W", "overrides"),
    [
        # parts of each batch, the last batch a single pair: two ranks have nothing of it
        (3, ("train.batch=23", "train.examples=93", "train.accumulate=2")),
        (2, ("loss.kind=siglip", "loss.exchange=ring", "loss.gradient=sum", "train.examples=128")),
    ],
)
def test_ranks_have_the_curve_of_one_process(tmp_path: Path, W: int, overrides: tuple[str, ...]) -> None:
    (tmp_path / "alone").mkdir()
    overrides = (*overrides, "evaluate.every=1.0")
    alone = run_recipe(tiny_recipe(tmp_path / "alone", *overrides), tmp_path / "alone" / "runs").folder
    together = _trained(tmp_path, W, *overrides)
    same_as_alone(alone, together, W)
    assert contrastile.load(together).encode_text(["letter A"]).shape == (1, 16)


def _with_clocks(rank: int, words: list[str]) -> int:
    """On the first rank a pair takes a second; by the other one's clock there is no end of time."""
    with timed(lambda count: count * (rank == 0)):
        return main(words)


def test_the_first_rank_decides_if_time_remains_for_a_step(tmp_path: Path) -> None:
    assert codes_of(2, tmp_path, _with_clocks, _words(tmp_path, "train.minutes=2.0")) == [0, 0]
    folder = tmp_path / "runs" / "tiny"
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["examples"] for line in lines if line["kind"] in ("step", "end")] == [16, 32, 48, 64, 112, 112]
    assert "2 ranks, each with" in (folder / "report.html").read_text()


def _late_signal(rank: int, words: list[str], how: int) -> int:
    """Rank 1 gets a signal in its third step."""
    real, calls = loop.step, []

    def step(*arguments: Any) -> Any:
        calls.append(1)
        if (rank, len(calls)) == (1, 3):
            os.kill(os.getpid(), how)
            time.sleep(0.01 if how == signal.SIGTERM else 60)
        return real(*arguments)

    loop.step = step
    return main(words)


def _busy(rank: int, victim: int, how: int) -> int:
    """No rank waits for another: all compute when one is struck."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=LONG))
    # on a busy machine a rank may start long after the others
    dist.barrier()
    with Heartbeat(timedelta(seconds=TIMEOUT if how == signal.SIGSTOP else LONG)):
        if rank == victim:
            os.kill(os.getpid(), how)
        time.sleep(LONG)
    return 0


@pytest.mark.parametrize(("victim", "how"), [(1, signal.SIGKILL), (2, signal.SIGSTOP)])
def test_computing_ranks_notice_a_lost_rank(tmp_path: Path, victim: int, how: signal.Signals) -> None:
    with Launched(3, tmp_path, _busy, victim, how) as launched:
        others = [rank for rank in range(3) if rank != victim]
        for rank in others:
            launched.processes[rank].join(SOON)
        assert [launched.processes[rank].exitcode for rank in others] == [1, 1]
        for rank in others:
            sentence = f"`training` must be carried out by all ranks; got no answer from rank {victim}, on rank {rank}"
            assert launched.said(rank).startswith(sentence)


def _launcher(_: int, folder: Path, words: list[str], port: int) -> None:
    """A stand-in for torchrun: the parent of its ranks, named in their environment."""
    as_in_tests()
    os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "x"}
    for rank in range(2):
        if not os.fork():
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            code = main(words)
            (folder / f"{rank}.code").write_text(f"{code}\n")
            os._exit(code)
    time.sleep(LONG)


def test_ranks_end_with_their_launcher_and_save(tmp_path: Path) -> None:
    words, folder = _words(tmp_path, "train.examples=100000000", "evaluate.every=1.0"), tmp_path / "runs" / "tiny"
    with fresh(1, _launcher, tmp_path, words, free_port()) as processes:
        _until(lambda: (folder / "metrics.jsonl").is_file() and _steps(folder))
        processes[0].kill()
        _until(lambda: all((tmp_path / f"{rank}.code").is_file() for rank in range(2)))
    assert [(tmp_path / f"{rank}.code").read_text() for rank in range(2)] == ["143\n", "0\n"]
    # everything that was learned
    assert json.loads((folder / "run.json").read_text())["steps"] == len(_steps(folder))
    assert (folder / "checkpoints").is_dir()


def _until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 2 * SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def _ends_early(rank: int, words: list[str]) -> int:
    """The first rank fails before the ranks join, as on a full disk."""
    return 1 if rank == 0 else main(words)


def test_a_first_rank_that_never_joins_is_a_sentence_on_the_others(tmp_path: Path) -> None:
    with Launched(2, tmp_path, _ends_early, _words(tmp_path, "train.timeout=1.0")) as launched:
        assert launched.codes() == [1, 1]
        assert launched.said(1).splitlines()[-1] == (
            "`training` must be begun by all ranks; got no answer to rank 1 from the store of the first. "
            "See what the first rank said last, and start all ranks again."
        )


def _another_recipe(rank: int, words: list[str]) -> int:
    return main([*words[:2], f"seed={rank}", *words[2:]])


def _other_weights(rank: int, words: list[str]) -> int:
    real = image_text.Run.untrained

    def build(*arguments: Any) -> Any:
        run = real(*arguments)
        with torch.no_grad():
            for tensor in run.model.state_dict().values():
                tensor.add_(rank)
        return run

    image_text.Run.untrained = build
    return main(words)


def test_all_ranks_start_with_the_first_ranks_weights(tmp_path: Path) -> None:
    words = _words(tmp_path, "train.examples=32", "evaluate.every=1.0")
    assert codes_of(2, tmp_path, _other_weights, words) == [0, 0]
    (tmp_path / "alone").mkdir()
    recipe = tiny_recipe(tmp_path / "alone", "train.examples=32", "evaluate.every=1.0")
    alone = run_recipe(recipe, tmp_path / "alone" / "runs").folder
    curves = [[line["loss"] for line in _steps(folder)] for folder in (alone, tmp_path / "runs" / "tiny")]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def test_ranks_with_other_recipes_are_refused(tmp_path: Path) -> None:
    with Launched(2, tmp_path, _another_recipe, _words(tmp_path)) as launched:
        assert launched.codes() == [2, 2]
        for rank in range(2):
            assert launched.said(rank).splitlines()[-1].startswith("`recipe` must be the same on all ranks; got ")


def _combined(rank: int, group: Any, how: str) -> tuple[float, list[Any]]:
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in ("all", "none", "one")})
    model["all"].grad = torch.tensor([rank, 1.0])
    if rank == 3:
        model["one"].grad = torch.tensor([4.0, 8.0])
    loss = Ranks(rank, 4).combine(model, torch.tensor(float(rank)), how)
    return loss.item(), [None if parameter.grad is None else parameter.grad.tolist() for parameter in model.values()]


@pytest.mark.parametrize(("how", "factor"), [("mean", 1), ("sum", 4)])
def test_gradients_are_reduced_by_the_losss_gradient_option(pool: Pool, how: str, factor: int) -> None:
    expected = [[1.5 * factor, 1.0 * factor], None, [1.0 * factor, 2.0 * factor]]
    assert pool.run(_combined, 4, how) == [(1.5, expected)] * 4


def _combined_in_float64(rank: int, group: Any) -> tuple[float, float]:
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    model.weight.grad = torch.tensor([[1 / 3]], dtype=torch.float64)
    loss = Ranks(rank, 4).combine(model, torch.tensor(1 / 3, dtype=torch.float64), "mean")
    return loss.item(), model.weight.grad.item()


def test_float64_is_not_rounded_on_its_way_between_ranks(pool: Pool) -> None:
    assert pool.run(_combined_in_float64, 4) == [pytest.approx((1 / 3, 1 / 3), rel=1e-14)] * 4


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_the_shares_of_all_ranks_make_the_whole_batch(tmp_path: Path, size: int) -> None:
    materials = open_data_bundle(tiny_recipe(tmp_path))
    rows = torch.arange(14)
    whole = BatchBuilder(materials, augment=True, seed=3).batch(rows)
    shares = [
        BatchBuilder(materials, augment=True, seed=3).batch(rows, Ranks(rank, size).share) for rank in range(size)
    ]
    assert sum(map(len, shares)) == len(whole) == shares[0].global_size == shares[-1].global_size
    for rank, share in enumerate(shares):
        assert torch.equal(share.pixels, whole.pixels[rank::size])
        assert torch.equal(share.ids, whole.ids[rank::size])
    for count in (1, 3, 4, 20):
        parts = [list(share.parts(count)) for share in shares]
        assert len({len(each) for each in parts}) == 1
        for place, part in enumerate(whole.parts(count)):
            mine = [each[place] for each in parts]
            assert {one.global_size for one in mine} == {part.global_size}
            found = torch.cat([one.pixels for one in mine])
            order = torch.cat([torch.arange(part.global_size)[one.positions.start :: size] for one in mine])
            assert torch.equal(found, part.pixels[order])


def test_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert Ranks.of_environment("auto") == Ranks(0, 1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Ranks.of_environment("cuda:1") == Ranks(0, 1)


@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        (
            "cuda:1",
            '`device` must be "auto", "cpu" or "cuda" for several ranks; got "cuda:1". Each rank takes a GPU of its '
            "own; CUDA_VISIBLE_DEVICES says which there are.",
        ),
        (
            "auto",
            "`nproc-per-node` must be at most 2, the GPUs that torch sees; got 4. Start as many ranks as there are "
            "GPUs.",
        ),
    ],
)
def test_a_rank_without_a_gpu_of_its_own_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, sentence: str
) -> None:
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "3"), ("LOCAL_RANK", "3")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert refusal(Ranks.of_environment, device) == sentence
    assert Ranks.of_environment("cpu") == Ranks(3, 4)


SAVED = ("train.examples=160", "save.steps=4", "evaluate.every=1.0", "optim.ema=0.9")


def stopped_and_resumed(folder: Path, words: list[str], whole: Path, W: int = 2) -> None:
    """Ranks that are stopped after three steps and go on give the files of a run that was not stopped."""
    # the first one says it for all: a launcher ends a run with the first rank that fails
    assert codes_of(W, folder, _late_signal, words, signal.SIGTERM) == [128 + signal.SIGTERM, *[0] * (W - 1)]
    assert (folder / "runs/tiny/checkpoints/step-000000003").is_dir()
    assert codes_of(W, folder, _main, [*words, "--resume"]) == [0] * W
    same_run(folder / "runs" / "tiny", whole)


def test_a_signal_to_one_rank_stops_all_and_they_resume_bit_identically(tmp_path: Path) -> None:
    whole = _trained(tmp_path, 3, *SAVED).rename(tmp_path / "whole")
    words, folder = _words(tmp_path, *SAVED), tmp_path / "runs" / "tiny"
    stopped_and_resumed(tmp_path, words, whole, W=3)
    # it is through: all ranks see that, and measure it again at most
    assert codes_of(3, tmp_path, _main, [*words, "--resume"]) == [0] * 3
    same_run(folder, whole)


def _impatient(rank: int, words: list[str]) -> int:
    """A rank that is alone does not look long for the other."""
    failure.PATIENCE = 0.5
    return main(words)


def _killed_at(launched: Launched, metrics: Path, step: int, seconds: float, victims: list[int]) -> bool:
    """SIGKILL to some ranks, so long after so many steps were told of; False where the run was through before."""
    end = None
    while any(process.is_alive() for process in launched.processes):
        if end is None and (metrics.read_text().count('"step"') if metrics.exists() else 0) >= step:
            end = time.monotonic() + seconds
        if end is not None and time.monotonic() >= end:
            for rank in victims:
                launched.processes[rank].kill()
            # the others notice; a launcher ends those that wait for it to begin
            for process in launched.processes:
                process.join(2)
            return True
        time.sleep(0.02)
    assert launched.codes() == [0] * len(launched.processes)
    return False


def test_kills_at_random_moments_on_two_ranks_leave_the_result_bit_identical(tmp_path: Path) -> None:
    # shards that are written on the way, dropout, and a checkpoint every fourth of twelve steps
    overrides = ("data.copies=5", "evaluate.every=1.0", DROPOUT, *SAVED_EVERY_FOURTH)
    whole = _trained(tmp_path, 2, *overrides).rename(tmp_path / "whole")
    words, metrics = _words(tmp_path, *overrides), tmp_path / "runs" / "tiny" / "metrics.jsonl"
    lot, kills = random.Random(0), 0
    # while it starts, and at two of its steps; so soon that a fast machine is not through before
    for step in [0, lot.randrange(1, 6), lot.randrange(6, 12), 10**9]:
        victims = [0, 1] if lot.random() < 0.5 else [lot.randrange(2)]
        with Launched(2, tmp_path, _impatient, [*words, "--resume"]) as launched:
            kills += _killed_at(launched, metrics, step, lot.uniform(0, 0.05), victims)
    assert kills >= 2
    same_run(tmp_path / "runs" / "tiny", whole)


def test_a_killed_rank_ends_the_run_and_other_ranks_go_on_with_the_curve_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    alone = run_recipe(tiny_recipe(tmp_path / "alone", *SAVED), tmp_path / "alone" / "runs").folder
    words, folder = _words(tmp_path, *SAVED, "save.steps=2"), tmp_path / "runs" / "tiny"
    with Launched(3, tmp_path, _late_signal, words, signal.SIGKILL) as launched:
        assert launched.codes() == [1, -signal.SIGKILL, 1]
        for rank in (0, 2):
            assert f"got no answer from rank 1, on rank {rank} in step 3 (" in launched.said(rank)
    assert json.loads((folder / "run.json").read_text())["examples"] == 32
    assert weights(folder)
    assert codes_of(2, tmp_path, _main, [*words, "--resume"]) == [0, 0]
    for one, other in zip(_steps(alone), _steps(folder), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4, abs=1e-4)


def _spoilt(rank: int, words: list[str], batches: Sequence[int]) -> int:
    """Rank 1 has a pixel in these of its batches that is no number."""
    real, calls = BatchBuilder.batch, []

    def batch(*arguments: Any) -> Any:
        made = real(*arguments)
        calls.append(1)
        if rank == 1 and len(calls) in batches:
            made.pixels[0] = math.nan
        return made

    BatchBuilder.batch = batch
    return main(words)


@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_a_non_finite_step_of_one_rank_is_skipped_on_all(tmp_path: Path, parallel: str) -> None:
    words = _words(tmp_path, "train.examples=64", "train.batch=16", f"train.parallel={parallel}")
    assert codes_of(2, tmp_path, _spoilt, words, [2]) == [0, 0]
    folder = tmp_path / "runs" / "tiny"
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["kind"] for line in lines if line["kind"] != "probe"] == ["step", "skip", "step", "step"]
    assert json.loads((folder / "run.json").read_text())["skipped_steps"] == 1
    assert all(value.isfinite().all() for value in weights(folder).values())


def test_ranks_share_a_collection_and_skipped_pairs_are_counted_once(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    (tmp_path / "B-left.png").write_bytes(b"<html>")
    source = write_shards(tmp_path)
    overrides = (f"data.source={source}", "data.max_bad_fraction=1.0", "train.examples=117", "save.steps=3")
    (tmp_path / "alone").mkdir()
    alone = run_recipe(tiny_recipe(tmp_path / "alone", *overrides), tmp_path / "alone" / "runs").folder
    folder = _trained(tmp_path, 2, *overrides)
    counts = [json.loads((one / "run.json").read_text())["skipped"] for one in (alone, folder)]
    assert counts[0] == counts[1]
    assert counts[0] == {"broken picture": 1}
    words = _words(tmp_path, *overrides, "save.steps=1")
    assert codes_of(2, tmp_path, _late_signal, words, signal.SIGKILL) == [1, -signal.SIGKILL]
    assert codes_of(2, tmp_path, _late_signal, [*words, "--resume"], signal.SIGTERM) == [128 + signal.SIGTERM, 0]
    assert codes_of(2, tmp_path, _main, [*words, "--resume"]) == [0, 0]
    assert json.loads((folder / "run.json").read_text())["skipped"] == counts[0]


def test_too_many_skipped_pairs_of_all_ranks_stop_all(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    for name in ("B-left", "C-high", "E-low", "F-right"):
        (tmp_path / f"{name}.png").write_bytes(b"<html>")
    source = write_shards(tmp_path)
    # of 32 pairs 4 are bad, of which 2 are held out: a rank alone, or two of them, would pass
    words = _words(tmp_path, f"data.source={source}", "data.max_bad_fraction=0.1", "train.examples=117")
    assert codes_of(2, tmp_path, _main, words) == [2, 2]
    for rank in range(2):
        assert "`data.source` must have at most 10% bad pairs; got 2 of " in (tmp_path / f"{rank}.err").read_text()
    # both ranks' are counted, beside the one that was held out
    folder = tmp_path / "runs" / "tiny"
    assert json.loads((folder / "run.json").read_text())["skipped"] == {"broken picture": 3}


def test_ranks_on_a_collection_have_the_curve_of_one_process(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    overrides = (f"data.source={write_shards(tmp_path)}", "train.examples=117", "evaluate.every=1.0")
    (tmp_path / "alone").mkdir()
    alone = run_recipe(tiny_recipe(tmp_path / "alone", *overrides), tmp_path / "alone" / "runs").folder
    for one, other in zip(_steps(alone), _steps(_trained(tmp_path, 2, *overrides)), strict=True):
        assert other["batch"] == one["batch"]
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4, abs=1e-4)


def _nothing_to_see(rank: int, words: list[str]) -> int:
    """Rank 1 looks for the checkpoints on another disk."""
    if rank == 1:
        words[words.index("--runs") + 1] += "-elsewhere"
    return main(words)


def test_checkpoints_that_not_all_ranks_can_read_are_refused_and_the_run_stays(tmp_path: Path) -> None:
    words, folder = _words(tmp_path, *SAVED), tmp_path / "runs" / "tiny"
    assert codes_of(2, tmp_path, _late_signal, words, signal.SIGTERM) == [128 + signal.SIGTERM, 0]
    kept = weights(folder)
    with Launched(2, tmp_path, _nothing_to_see, [*words, "--resume"]) as launched:
        assert launched.codes() == [1, 2]
        assert launched.said(1).splitlines()[-1] == (
            "`checkpoints` must be the same files on all ranks; got manifest.json: No such file or directory. "
            "Put the folder of runs on a file system that all ranks share."
        )
    (folder / "checkpoints" / "step-000000003" / "manifest.json").unlink()
    with Launched(2, tmp_path, _main, [*words, "--resume"]) as launched:
        assert launched.codes() == [2, 2]
        for rank in range(2):
            assert launched.said(rank).splitlines()[-1].startswith("rank 0: `checkpoints` must hold one that is whole")
    # parameters learned before are not written over
    assert all(torch.equal(value, kept[name]) for name, value in weights(folder).items())
    assert json.loads((folder / "run.json").read_text())["examples"] == 48


def test_ranks_in_half_precision_skip_the_same_steps(tmp_path: Path) -> None:
    folder = _trained(tmp_path, 2, "train.precision=fp16", "optim.kind=adafactor", "train.examples=240")
    kinds = [line["kind"] for line in read_metrics(folder / "metrics.jsonl") if line["kind"] != "probe"]
    # the scaler's first factors are too large, for all
    assert kinds[0] == "skip"
    assert set(kinds[4:]) == {"step"}
    assert all(value.isfinite().all() for value in weights(folder).values())
