"""A run whose towers are in shards: the curve of one process, checkpoints and weights that are whole, and no hang."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import Pool
from refusals import refusal
from test_train_ranks import Launched, _late_signal, _main, _spoilt, _steps, _trained, _words, codes_of, same_as_alone
from test_train_resume import DROPOUT
from test_train_retriever import bert
from test_train_retriever_ranks import _trained as _trained_retriever
from tiny_runs import compiling, same_run, tiny_recipe, weights
from tiny_texts import tiny_retriever
from torch import Tensor, nn
from torch.optim import Optimizer

import contrastile
from contrastile.cli.main import main
from contrastile.models.small import WordsTower
from contrastile.train import loop, sharded
from contrastile.train.config.base import AdafactorSettings, AdamWSettings, MuonSettings, OptimSettings
from contrastile.train.log import read_metrics
from contrastile.train.loop import evaluate_run, run_recipe
from contrastile.train.optim import build_optimizer, clamp_scale, clip_gradients
from contrastile.train.sharded import full, layers, shard, shard_like

SHARD = "train.parallel=shard"
# two layers that are gathered one at a time, and dropout
LAYERS = DROPOUT.replace("num_hidden_layers=1", "num_hidden_layers=2")
STILL = LAYERS.replace("hidden_dropout_prob=0.2", "hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0")
END = "evaluate.every=1.0"
COMPILE = "train.compile=true"
SAVED = ("train.examples=160", "save.steps=4", END, "optim.ema=0.9")


def _compiling(rank: int, words: list[str]) -> int:
    """Train with compiled towers; 0 if those are two graphs, of the image tower and of the layers of the text's."""
    graphs = list[torch.fx.GraphModule]()
    with compiling(lambda graph, _: graphs.append(graph)):
        return _main(rank, words) or int(len(graphs) != 2)


@pytest.mark.parametrize(
    ("W", "overrides"),
    [
        # parts of each batch, the last batch a single pair: two ranks have nothing of it
        (3, ("train.batch=23", "train.examples=47", "train.accumulate=2", "optim.ema=0.9")),
        (
            2,
            (
                "loss.kind=siglip", "loss.exchange=ring", "loss.gradient=sum", "optim.kind=muon", "train.examples=64",
                "train.retain=auto",
            ),
        ),
        # a tower that does not train, and one whose layers are computed again in the backward
        (2, ("model.locked=['image']", "model.checkpointing=['text']", STILL, "train.batch=16", "train.examples=48")),
        (2, (COMPILE, STILL, "train.batch=16", "train.examples=48", "optim.ema=0.9")),
    ],
)  # fmt: skip
def test_ranks_have_the_curve_of_one_process(tmp_path: Path, W: int, overrides: tuple[str, ...]) -> None:
    (tmp_path / "alone").mkdir()
    overrides = (*overrides, SHARD, END)
    as_written = [word for word in overrides if word != COMPILE]
    alone = run_recipe(tiny_recipe(tmp_path / "alone", *as_written), tmp_path / "alone" / "runs").folder
    together = _trained(tmp_path, W, *overrides, run=_compiling if COMPILE in overrides else _main)
    same_as_alone(alone, together, W)
    assert contrastile.load(together).encode_text(["letter A"]).shape == (1, 16)
    same_weights, own = weights(together), weights(alone)
    assert same_weights.keys() == own.keys()
    for name, value in own.items():
        torch.testing.assert_close(same_weights[name], value, rtol=1e-2, atol=1e-3)


def test_sharded_retrievers_have_the_curve_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    overrides = ("train.examples=132", "model.dimensions=[4, 8]", "loss.learn_scale=true", SHARD)
    alone = run_recipe(tiny_retriever(tmp_path / "alone", *overrides), tmp_path / "alone" / "runs").folder
    together = _trained_retriever(tmp_path, 2, *overrides)
    same_as_alone(alone, together, 2, norm=1e-3, least=1e-12)
    assert contrastile.load(together).encode_query(["where"]).shape == (1, 16)


def test_a_retriever_with_adapters_and_fp16_trains(tmp_path: Path) -> None:
    lora = "model.lora={rank=2, targets=['query', 'value']}"
    folder = _trained_retriever(tmp_path, 2, "train.examples=64", "train.precision=fp16", SHARD, bert("both"), lora)
    steps = _steps(folder)
    assert steps
    assert all(0 < step["loss"] < 10 and step["norm"] > 0 for step in steps)


def test_a_stopped_run_resumes_bit_identically_on_as_many_ranks(tmp_path: Path) -> None:
    # layers that are gathered one at a time, with dropout, and a state of the optimizer that is factored
    overrides = (*SAVED, SHARD, "train.examples=64", "train.batch=16", "optim.kind=adafactor", LAYERS)
    whole = _trained(tmp_path, 2, *overrides).rename(tmp_path / "whole")
    words = _words(tmp_path, *overrides)
    assert codes_of(2, tmp_path, _late_signal, words, signal.SIGTERM) == [128 + signal.SIGTERM, 0]
    folder = tmp_path / "runs" / "tiny"
    # the weights of a run that was stopped are there, too
    assert "held-out pairs" in evaluate_run(folder)
    plain = json.loads(next(folder.glob("checkpoints/step-*/state.json")).read_text())
    assert plain["origin"]["run"] == (folder / "run.id").read_text().strip()
    assert plain["origin"]["optim.kind"] == "adafactor"
    assert codes_of(2, tmp_path, _main, [*words, "--resume"]) == [0, 0]
    # a finished run does the same with whole towers
    same_run(folder, whole)


def test_a_sharded_run_resumes_on_other_ranks_and_unsharded(tmp_path: Path) -> None:
    overrides = ("optim.kind=muon", "train.examples=128", "save.steps=2", "evaluate.every=1.0", "optim.ema=0.9")
    (tmp_path / "alone").mkdir()
    alone = run_recipe(tiny_recipe(tmp_path / "alone", *overrides), tmp_path / "alone" / "runs").folder
    words, folder = _words(tmp_path, *overrides), tmp_path / "runs" / "tiny"
    with Launched(3, tmp_path, _said_aloud, [*words[:2], SHARD, *words[2:]], signal.SIGKILL) as launched:
        assert launched.codes() == [1, -signal.SIGKILL, 1]
        for rank in (0, 2):
            assert f"got no answer from rank 1, on rank {rank} in step 3 (" in launched.said(rank)
        assert "the weights were in shards, of which some are lost; resume" in launched.said(0)
    assert not (folder / "run.json").exists()
    assert codes_of(2, tmp_path, _late_signal, [*words[:2], SHARD, *words[2:], "--resume"], signal.SIGTERM) == [
        128 + signal.SIGTERM,
        0,
    ]
    assert len(_steps(folder)) == 5
    assert main([*words, "--resume"]) == 0
    for one, other in zip(_steps(alone), _steps(folder), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4, abs=1e-4)


def _killed_while_it_replays(rank: int, words: list[str]) -> int:
    """Rank 1 dies in the backward of its third step, where the others wait for its shards of weights that are many."""
    sharded.GATHERED_ONCE = 0
    real, calls = WordsTower.forward, []

    def forward(*arguments: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        # a sub-batch that is kept, and two that are replayed
        if (rank, sum(calls)) == (1, 8):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    WordsTower.forward = forward
    return main(words)


def test_a_rank_lost_during_a_gather_is_named(tmp_path: Path) -> None:
    words = _words(tmp_path, SHARD, "train.sub_batch=2", "evaluate.every=1.0")
    with Launched(3, tmp_path, _killed_while_it_replays, words) as launched:
        assert launched.codes() == [1, -signal.SIGKILL, 1]
        for rank in (0, 2):
            assert "`exchange of shards` must be carried out by all ranks; got no answer from rank 1" in launched.said(
                rank
            )


class _Ending(torch.autograd.Function):
    """A function that raises in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, end: Any) -> Tensor:
        ctx.end = end
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> Any:
        ctx.end()


def _errs(rank: int, words: list[str], who: tuple[int, ...], when: tuple[str, int], kind: type[Exception]) -> int:
    """Some ranks have an error of their own: in the probe before the first step, in a replay, in its backward, or
    at the end, when the others put the weights together.
    """
    real, calls = WordsTower.forward, []

    def end() -> None:
        raise kind("no room")

    def forward(*arguments: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        place, count = when
        # of the probe, the first sub-batch
        here = rank in who and count == (len(calls) if place == "probe" else sum(calls) if calls[-1] else 0)
        if here and place != "backward":
            end()
        out = real(*arguments)
        return _Ending.apply(out, end) if here else out

    WordsTower.forward = forward
    if when[0] == "end" and rank in who:
        loop.Trainer.test = lambda _: end()
    try:
        return main(words)
    except kind as error:
        # Python's own traceback would come when nobody listens any more
        sys.stderr.write(str(error))
        return 1


@pytest.mark.parametrize(
    ("when", "kind"),
    [
        (("probe", 1), ValueError),
        (("replay", 2), torch.OutOfMemoryError),
        (("backward", 2), FloatingPointError),
        (("end", 1), ValueError),
    ],
)
def test_an_error_of_one_rank_ends_all_with_its_message(
    tmp_path: Path, when: tuple[str, int], kind: type[Exception]
) -> None:
    words = _words(tmp_path, SHARD, "train.sub_batch=2", "train.examples=64", "evaluate.every=1.0")
    with Launched(3, tmp_path, _errs, words, (1,), when, kind) as launched:
        assert launched.codes() == [1, 2 if kind is ValueError else 1, 1]
        sentence = (
            f"must be carried out by all ranks; got no answer from rank 1, which left by {kind.__name__}: no room, "
        )
        assert f"{sentence}on rank 0 in step " in launched.said(0)
        # the store goes with rank 0, and may be gone before this one has read who left: then it is sent there
        gone = "must be carried out by all ranks; got no answer from rank 0, which keeps the store, on rank 2 in step "
        said = launched.said(2)
        assert f"{sentence}on rank 2 in step " in said or (gone in said and "See what rank 0 said last" in said)
        assert "no room" in launched.said(1)
        assert "must be carried out" not in launched.said(1)


def _fails_in_a_probe(rank: int, words: list[str]) -> int:
    """Each step begins with shards alone: what a failed probe left whole might have the values of the average."""
    real = loop.Trainer.step

    def step(trainer: Any) -> None:
        assert all(hasattr(parameter, "device_mesh") for parameter in trainer.model.parameters())
        real(trainer)

    loop.Trainer.step = step
    return _errs(rank, words, (0, 1), ("probe", 1), ValueError)


def test_a_probe_that_fails_on_all_ranks_is_logged_and_the_training_continues(tmp_path: Path) -> None:
    words = _words(tmp_path, SHARD, "train.examples=64", "evaluate.every=1.0")
    assert codes_of(2, tmp_path, _fails_in_a_probe, words) == [0, 0]
    lines = read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    assert [line["what"] for line in lines if line["kind"] == "failure"] == ["probe"]
    assert sum(line["examples"] == 64 for line in lines if line["kind"] == "step") == 1


def test_the_third_non_finite_step_in_a_row_stops_all_and_the_weights_are_saved(tmp_path: Path) -> None:
    words = _words(tmp_path, SHARD, "train.examples=160", "train.batch=16")
    with Launched(2, tmp_path, _spoilt, words, range(3, 99)) as launched:
        assert launched.codes() == [1, 1]
        assert "the loss must stay a finite number; step 5 is skipped" in launched.said(0)
    folder = tmp_path / "runs" / "tiny"
    assert len(_steps(folder)) == 2
    assert all(value.isfinite().all() for value in weights(folder).values())
    assert "held-out pairs" in evaluate_run(folder)


def _said_aloud(rank: int, words: list[str], how: int) -> int:
    logging.getLogger("contrastile").addHandler(logging.StreamHandler(sys.stderr))
    return _late_signal(rank, words, how)


class _Odd(nn.Module):
    """Sizes that four ranks cannot share out evenly, and numbers of both shapes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        # factored by Adafactor: over both axes, over axes that are not shared out, over one that is
        self.image = nn.Sequential(nn.Linear(37, 45), nn.Conv2d(34, 5, (1, 36)), nn.Conv1d(33, 70, 3))
        self.text = nn.Sequential(nn.Linear(2, 7), nn.Linear(5, 3))
        self.logit_scale, self.logit_bias = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor([-2.0]))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)


def _stepped(model: nn.Module, gradients: list[Tensor], optimizer: Optimizer) -> list[Tensor]:
    """Parameters after clipping and three steps, and the norm."""
    for number in range(1, 4):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = shard_like(number * gradient, parameter)
        norm = clip_gradients(model, 0.5)
        optimizer.step()
    clamp_scale(model.logit_scale)
    assert type(norm) is Tensor
    return [norm, *(full(parameter.detach()) for parameter in model.parameters())]


def _clipped_and_moved(rank: int, group: Any, settings: OptimSettings, foreach: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    model, reference = _Odd(), _Odd()
    gradients = [torch.randn(p.shape, generator=generator) for p in reference.parameters()]
    with (
        patch.object(nn.utils, "clip_grad_norm_", partial(nn.utils.clip_grad_norm_, foreach=foreach)),
        patch.object(torch.optim, "AdamW", partial(torch.optim.AdamW, foreach=foreach)),
    ):
        expected = _stepped(reference, gradients, build_optimizer(reference, settings))
        shard(model, torch.device("cpu"))
        found = _stepped(model, gradients, build_optimizer(model, settings))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# a GPU takes all parameters in one call, which AdamW has, and clips before any optimizer
@pytest.mark.parametrize(
    ("kind", "foreach"),
    [(AdamWSettings, False), (AdamWSettings, True), (AdafactorSettings, False), (MuonSettings, True)],
)
def test_sharded_clipping_and_steps_equal_unsharded_ones(pool: Pool, kind: type[OptimSettings], foreach: bool) -> None:
    pool.check(_clipped_and_moved, 4, kind(learning_rate=0.1, weight_decay=0.1), foreach)


def _measured(rank: int, words: list[str], folder: Path) -> int:
    """Writes down how many numbers this rank holds after the steps."""
    real = loop.Trainer.end

    def end(trainer: Any, checkpoints: Any) -> None:
        held = list(trainer.model.parameters())
        moments = [value for state in trainer.optimizer.state.values() for value in state.values() if value.ndim]
        means = list(trainer.ema._means.values())
        local = [sum(x.to_local().numel() for x in some) for some in (held, moments, means)]
        entire = sum(p.numel() for p in held)
        (folder / f"{rank}.json").write_text(json.dumps([*local, entire]))
        real(trainer, checkpoints)

    loop.Trainer.end = end
    return main(words)


def test_a_rank_holds_a_part_of_weights_moments_and_ema(tmp_path: Path) -> None:
    words = _words(tmp_path, *SAVED, SHARD, "train.examples=32")
    assert codes_of(2, tmp_path, _measured, words, tmp_path) == [0, 0]
    parts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    entire = parts[0][-1]
    for held, moments, means, _ in parts:
        assert held < 0.6 * entire
        assert moments < 2 * 0.6 * entire
        assert means < 0.6 * entire
    # the scale is whole on both
    assert parts[0][0] + parts[1][0] == entire + 1


def test_layers_are_repeated_composite_modules() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    first, second = block(), block()
    assert layers(nn.ModuleList([first, second])) == [second, first]
    # in stages, the inner ones first
    stages = nn.ModuleList([nn.Sequential(block(), block()), nn.Sequential(block(), block())])
    found = layers(stages)
    assert len(found) == 6
    assert all(found.index(inner) < found.index(stage) for stage in stages for inner in stage)
    # leaves, single ones and layers without weights are none
    assert layers(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), block())) == []
    assert layers(nn.ModuleList([nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())])) == []
    # weights in two places are gathered with what holds both
    tied = nn.ModuleList([block(), block(), block()])
    tied[1][0].weight = tied[0][0].weight
    assert layers(tied) == [tied[2]]
    assert layers(nn.ModuleList([first, first])) == []


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(2, 2)
        self.text = nn.Linear(2, 2)
        self.text.weight = self.image.weight


def _of_one_piece(rank: int, group: Any) -> str:
    return refusal(shard, _Pair(), torch.device("cpu"))


def test_towers_that_share_weights_are_refused(pool: Pool) -> None:
    sentence = (
        '`train.parallel` must be "replicate" for towers that share weights; got "shard". Set train.parallel = '
        '"replicate".'
    )
    assert pool.run(_of_one_piece, 4) == [sentence] * 4
