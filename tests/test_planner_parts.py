"""Plans of late interaction, guides, queues, nodes, compiled towers and optimizers; hosts' memory; units for people."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import Pool
from test_planner import SUB_BATCH, _cost, _inputs, _tower
from tiny_runs import write_recipe
from tiny_texts import tiny_retriever, write_text_recipe
from torch import Tensor

import contrastile
from contrastile import ClipLoss
from contrastile.cli import plan as cli
from contrastile.cli.plan import lines
from contrastile.engine.graph import MOST_GRAPH_ROWS
from contrastile.exchange import gather
from contrastile.losses import Sigmoid, Softmax
from contrastile.losses.base import Shard
from contrastile.losses.scores import ScoreDivergence
from contrastile.models.towers import special_tokens
from contrastile.planner.loss import LateSize, LossSize
from contrastile.planner.profile import target, this_machine
from contrastile.planner.seconds import UPDATE_LAUNCHES, exchange_seconds, loss_seconds, update_seconds
from contrastile.planner.towers import as_compiled, measure, shapes_only
from contrastile.scorers import MaxSim
from contrastile.tiles.triton.budget import Budget
from contrastile.train.image_text import ImageText
from contrastile.train.memory import Weighed
from contrastile.train.objective import QueryObjective, Teacher
from contrastile.train.planned import keys_of, made_up_tokenizer, plan_of, planned, towers
from contrastile.train.ranks import ALONE
from contrastile.train.recipe import load_any_recipe
from contrastile.train.retriever.job import RetrieverJob
from contrastile.train.retriever.run import RetrieverRun

CPU = torch.device("cpu")
LENGTHS = {"query": 12, "passage": 24}
WORDS = (
    "model.features=32", "data.negatives=1", "train.sub_batch={query=32,passage=32}", "model.tokenizer.length=24",
    "model.tokenizer.query_length=12", "loss.workspace=2097152", "loss.learn_scale=true",
)  # fmt: skip
LATE = ("model.kind=late",)
GUIDED = ("loss.kind=gist", "loss.guide={folder}/guide")
QUEUED = ("loss.queue=4096",)
SHORTER = "model.dimensions=[8,16]"
WIDER = ("model.features=256", "model.dimensions=[64,128]")


def write_guide(folder: Path, features: int = 256) -> Path:
    """The recipe of a finished run with larger features."""
    (folder / "guide").mkdir()
    recipe = folder / "guide" / "recipe.toml"
    recipe.write_text(write_text_recipe(folder).read_text().replace("[model]", f"[model]\nfeatures = {features}"))
    return recipe


@pytest.mark.parametrize(("words", "batch", "moment"), [
    (LATE, 32, "loss"), ((*LATE, "train.retain=3"), 100, "gradients of features"), (GUIDED, 500, "loss"),
    (GUIDED, 100, "thresholds of the guide"), (QUEUED, 100, "loss"),
    ((*GUIDED, "loss.contrast_anchors=true", "loss.contrast_positives=true"), 300, "loss"),
    ((*LATE, "loss.learn_scale=false"), 100, "gradients of features"),
    ((*LATE, SHORTER), 100, "gradients of features"), ((*QUEUED, SHORTER), 100, "loss"),
    (WIDER, 100, "gradients of features"), ((*WIDER, "train.precision=bf16"), 100, "loss"),
])  # fmt: skip
def test_the_planned_peak_is_that_of_a_real_step(
    tmp_path: Path, words: tuple[str, ...], batch: int, moment: str
) -> None:
    guide = write_guide(tmp_path, 1024 if batch == 100 else 256)
    recipe = tiny_retriever(tmp_path, *WORDS, *[word.format(folder=tmp_path) for word in words])
    late = recipe.model.kind == "late"
    tokenizer = made_up_tokenizer(recipe.model.tokenizer, special_tokens(recipe.model) if late else ())
    run = RetrieverRun.untrained(recipe, tokenizer)
    objective = QueryObjective(recipe.loss, features=32, scorer=MaxSim() if late else None)
    for queue in objective.queues.values():
        queue.push(torch.randn(4096, 32))  # type: ignore[operator]
    passages, teacher = 2 * batch, None
    if recipe.loss.other_model:
        teacher = Teacher(RetrieverRun.untrained(load_any_recipe(guide, files=False), tokenizer), 1.0)
        teacher.run.model.eval().requires_grad_(False)
    texts: Any = {
        side: {name: torch.full((n, LENGTHS[side]), 5) for name in ("input_ids", "attention_mask")}
        for side, n in (("query", batch), ("passage", passages))
    }
    marks = {"positives": torch.arange(batch)[:, None], "query_ids": torch.arange(batch)}
    marks["key_ids"] = torch.arange(passages)
    both = texts["query"], texts["passage"]
    part: Any = SimpleNamespace(queries=both[0], passages=both[1], teacher_tokens=both, inputs=lambda _: dict(marks))
    job: Any = SimpleNamespace(run=run, objective=objective, teacher=teacher, _loss=objective)

    def step() -> None:
        RetrieverJob.loss(job, part).backward()
        objective.end_step(taken=False)

    step()
    run.model.zero_grad()
    with Weighed(CPU) as weighed:
        step()
    plan = plan_of(recipe, this_machine(), batch, *towers(recipe, 1, batch, "cpu"))
    held = plan.step.held
    planned = plan.peak.bytes - held.weights - held.optimizer - held.teacher - held.queue
    assert plan.peak.name == moment
    assert weighed.bytes <= 1.06 * planned
    # with a guide a plan has the masks of both directions, of which one has none
    assert planned <= 1.27 * weighed.bytes


@pytest.mark.parametrize("words", [(), LATE, ("train.features=host",)], ids=str)
def test_each_number_of_features_has_a_loss_of_its_own(words: tuple[str, ...], tmp_path: Path) -> None:
    path, lone = write_text_recipe(tmp_path), {"gpus": "H100", "batch": 4096}
    plain, nested = (contrastile.plan(path, *WORDS, *words, *more, **lone) for more in ((), (SHORTER,)))
    eight, sixteen = (replace(nested.step.loss, dimensions=size) for size in (8, 16))
    further = sum(loss_seconds(size, target("H100").profile) for size in (eight, sixteen))
    assert nested.seconds.loss == pytest.approx(plain.seconds.loss + further)
    # in host memory the 8 and 16 of the 32 features wait too
    on_device = contrastile.plan(path, *WORDS, *words, "train.features=device", **lone)
    assert 4 * (nested.host - plain.host) == 3 * (plain.host - on_device.host)


def test_features_of_pictures_and_texts_are_released_as_planned(tmp_path: Path) -> None:
    """Of many features the gradient of their normalisation takes most."""
    words = ["train.batch=400", "train.sub_batch=32", "train.retain=0", "model.features=4096", "device=cpu"]
    job = ImageText.open(load_any_recipe(write_recipe(tmp_path), words))
    (part,) = job.parts(torch.from_numpy(np.resize(job.rows, 400)), 1, ALONE)
    with Weighed(CPU) as weighed:
        job.loss(part).backward()
    recipe = job.run.recipe
    plan = plan_of(recipe, this_machine(), 400, *towers(recipe, 1, 400, "cpu", tokenizer=job.run.tokenizer))
    held = plan.step.held
    assert plan.peak.name == "gradients of features"
    assert plan.peak.bytes - held.weights - held.optimizer == pytest.approx(weighed.bytes, rel=0.01)


def test_a_guide_and_a_queue_are_parts_of_the_plan(tmp_path: Path) -> None:
    write_guide(tmp_path)
    path, lone = write_text_recipe(tmp_path), {"gpus": "H100", "batch": 64}
    plain = contrastile.plan(path, *WORDS, **lone)
    guided = contrastile.plan(path, *WORDS, *[word.format(folder=tmp_path) for word in GUIDED], **lone)
    assert [one.cost.dimensions for one in guided.step.guides] == [256, 256]
    assert guided.step.held.teacher > plain.step.held.weights
    assert guided.seconds.towers > plain.seconds.towers
    assert "teacher, passage" in [moment.name for moment in guided.step.moments()]
    assert guided.at(128).step.guides[1].examples == 256
    queued = contrastile.plan(path, *WORDS, *QUEUED, gpus="2xH100", batch=64)
    assert queued.peak.parts["queue"] == 4096 * (4 * 32 + 8)
    # each rank has its share of the queue as columns
    assert (queued.step.loss.columns, queued.at(128).step.loss.columns) == (2 * 32 + 2048, 2 * 64 + 2048)
    with pytest.raises(ValueError, match=re.escape("`loss.guide` must be the folder of a run, or of a model of trans")):
        contrastile.plan(path, "loss.kind=gist", f"loss.guide={tmp_path}", **lone)


def test_a_guide_whose_own_folders_are_gone_is_left_out_of_the_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guide = write_guide(tmp_path)
    learned = 'kind = "words", size = 100'
    guide.write_text(guide.read_text().replace(learned, f'kind = "bpe", folder = "{tmp_path}/gone"'))
    words = [word.format(folder=tmp_path) for word in GUIDED]
    plan = contrastile.plan(write_text_recipe(tmp_path), *WORDS, *words, gpus="H100", batch=64)
    assert plan.step.guides == []
    assert "the plan leaves loss.guide out: `folder` must hold a tokenizer.json" in caplog.text


def test_token_vectors_in_host_memory_leave_a_strip_and_three_shards() -> None:
    waiting = LateSize(4096, 4096, 1, 128, 2**37, tokens=(32, 180), host=True)
    resident = replace(waiting, host=False)
    assert waiting.blocks == [(4096, 65536 // 180)]
    assert waiting.resident == (6 * 128 * (4096 * 32 + 3 * 364 * 180) + 14 * 4 * 2 * 4096, 0)
    assert waiting.peak < resident.peak / 2
    # statistics first, and winners with the gradients
    assert (waiting.at_once, resident.at_once) == (False, True)


def test_a_source_without_hard_negatives_has_one_passage_for_each_question(tmp_path: Path) -> None:
    given = write_text_recipe(tmp_path)
    (folder := tmp_path / "beir").mkdir()
    for words, keys in ([], 3), ([f"data.source={folder}"], 1), ([f"data.source={folder}", "data.mined=3"], 3):
        assert keys_of(load_any_recipe(str(given), words, files=False)) == keys


@pytest.mark.parametrize(("words", "numbers"), [((), 32 + 2 * 32), (LATE, 12 * 32 + 2 * 24 * 32)])
def test_a_retriever_with_features_in_host_memory(tmp_path: Path, words: tuple[str, ...], numbers: int) -> None:
    """Each query has its own passage and a negative, of which both features and gradients wait."""
    path, gpu = write_text_recipe(tmp_path), {"gpus": "H100", "batch": 2**18}
    device, host = (
        contrastile.plan(path, *WORDS, *words, f"train.features={where}", **gpu) for where in ("device", "host")
    )
    assert host.host - device.host == 2**18 * numbers * 2 * 4
    assert all("features" not in moment.parts for moment in host.step.moments())
    assert host.peak.bytes < device.peak.bytes
    assert host.largest() > device.largest()
    assert any(choice.peak == host.peak.bytes for choice in device.choices() if "host memory" in choice.name)


def test_the_plan_of_token_vectors(tmp_path: Path) -> None:
    path = write_text_recipe(tmp_path)
    plan = contrastile.plan(path, *WORDS, *LATE, "train.precision=bf16", gpus="4xH100", batch=64)
    assert plan.step.loss.tokens == (12, 24)
    assert plan.step.loss.operations == 2 * 16 * 4 * 32 * 12 * 24 * 32
    # a ring or a gather carries the vectors of all tokens of a passage
    one = contrastile.plan(path, *WORDS, "train.precision=bf16", gpus="4xH100", batch=64).step.loss
    assert plan.step.loss.traffic.sent[0] == 24 * one.traffic.sent[0] > 0
    largest = plan.largest()
    assert plan.at(largest).fits
    assert not plan.at(int(1.02 * largest)).fits
    assert plan.seconds.loss < plan.at(2**14).seconds.loss


def test_compiled_towers_keep_less_and_launch_fewer_kernels() -> None:
    """The layer norm's input and the activation are computed again from the first product."""
    as_written = _cost()
    with shapes_only():
        tower = _tower()

        def features(n: int) -> Tensor:
            return tower(*_inputs(n))

        with as_compiled([tower], features, SUB_BATCH):
            cost = measure("tower", tower, _inputs, tower, SUB_BATCH, torch.enable_grad, builds_graph=True)
        again = measure("tower", tower, _inputs, tower, SUB_BATCH, torch.enable_grad)
    assert again == as_written
    assert cost.replay_work.products == as_written.replay_work.products
    assert cost.replay_work.kernels < as_written.replay_work.kernels
    assert cost.replay_work.moved < as_written.replay_work.moved
    assert cost.graph < as_written.graph
    # the first pass builds its graph
    assert as_written.forward < cost.forward <= cost.replay


def test_layers_that_cannot_be_traced_are_planned_as_written(caplog: Any) -> None:
    class Reading(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("not now")

    layer = Reading()
    with shapes_only(), as_compiled([layer], partial(torch.nn.Module.__call__, layer), 4):  # type: ignore[arg-type]
        assert layer._compiled_call_impl is None
    assert "compiled towers are planned as written ones: RuntimeError: not now" in caplog.text


def test_a_batch_must_fit_the_host_memory_of_this_machine(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = contrastile.plan(write_recipe(tmp_path), "train.retain=0")
    assert plan.fits
    assert plan.target.host == plan.target.memory
    # pictures in host memory take more than a tower's step
    small = replace(plan, target=replace(plan.target, host=plan.peak.bytes + 30 * 2 * 10**6), host_inputs=10**6)
    assert small.peak.bytes <= small.allowed
    assert not small.fits
    assert "  host memory: DOES NOT FIT: " in "\n".join(lines(small))
    largest = small.largest()
    assert 0 < largest < plan.batch
    assert small.at(largest).fits
    assert not small.at(largest + 2).fits
    # the memory of other machines' hosts is not known, and the plan says what it must be
    text = "\n".join(lines(contrastile.plan(write_recipe(tmp_path), gpus="H100")))
    assert "  host memory of a node: must have " in text


def test_peaks_of_all_ranks_of_a_cpu_stand_beside_the_batch(tmp_path: Path) -> None:
    plan = planned(write_recipe(tmp_path), ["train.retain=0", "device=cpu"], ranks=4)
    target = replace(plan.target, memory=2**40, host=int((4 * (plan.peak.bytes - plan.parameters) + plan.host) / 0.94))
    assert replace(plan, target=replace(target, host=target.host + 10)).fits
    assert not replace(plan, target=replace(target, host=target.host - 10)).fits
    # each rank has a quarter
    small = replace(plan.target, memory=int(4 * plan.peak.bytes / 0.94), host=None)
    assert replace(plan, target=replace(small, memory=small.memory + 10)).fits
    assert not replace(plan, target=replace(small, memory=small.memory - 10)).fits


def test_this_machine_is_that_of_the_recipes_device(monkeypatch: Any) -> None:
    gigabytes = {"cpu": 64, "cuda": 80}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        "contrastile.offload.free_memory", lambda device: (0, gigabytes[device.type if device else "cpu"])
    )
    monkeypatch.setattr("contrastile.distributed.neighbours.reach_each_other", lambda _, ranks: len(ranks) < 2)
    gpu, cpu = (this_machine(torch.device(name), 2) for name in ("cuda", "cpu"))
    assert (gpu.copies, this_machine(torch.device("cuda")).copies) == (False, True)
    assert (gpu.word, gpu.device, gpu.memory, gpu.host, gpu.ranks, gpu.per_node) == (
        "NVIDIA H100 80GB HBM3", "cuda", 80, 64, 2, 2,
    )  # fmt: skip
    assert gpu.profile is not None
    assert (gpu.profile.name, gpu.profile.memory) == ("H100", 80)
    assert (cpu.word, cpu.device, cpu.memory, cpu.host, cpu.ranks, cpu.per_node) == ("cpu", "cpu", 64, 64, 2, 2)
    sentence = (
        "`--ranks` must be at most 2, the GPUs that torch sees; got 3. "
        "Plan other machines by their names: contrastile plan RECIPE --gpus 8xH100-80GB."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        this_machine(torch.device("cuda"), 3)


def test_numbers_for_people_have_units(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    plan = contrastile.plan(path, "train.retain=0", gpus="T4-2GB")
    # not one pair fits beside the weights of a hundred times as many bytes
    held = replace(plan.step.held, weights=2**41)
    text = "\n".join(lines(replace(plan, step=replace(plan.step, held=held))))
    assert "2.0 TiB" in text
    assert "largest batch, without kept graphs: none, not a pair for each rank fits" in text
    rows = [line.split() for line in text.split("other choices")[1].splitlines()[2:]]
    assert {row[-1] for row in rows} == {"none"}
    # the table writes the largest batch as the line above it does
    text, largest = "\n".join(lines(plan)), f"{plan.largest():,}"
    assert f"largest batch, without kept graphs: {largest}, with " in text
    assert [line for line in text.splitlines() if line.endswith(" ")] == []
    assert next(lines(contrastile.plan(path, gpus="T4-2GB", batch=1))).startswith("tiny on T4-2GB: 1 pair a step, ")
    rows = [line for line in text.split("other choices")[1].splitlines() if "exchange single, backend auto" in line]
    assert f"  {largest}  " in rows[0]
    # a schedule has steps of several sizes, and this run fewer pairs than fit
    text = "\n".join(lines(contrastile.plan(path, "train.batch=[[0.0, 48], [0.5, 96]]", gpus="H100")))
    assert "\nstep of the largest batch: " in text
    assert "of host memory on a node; the run has 480 pairs\n" in text
    seconds = (0.0123, 90.0, 1_500.0, 36_000.0)
    assert [cli._seconds(each) for each in seconds] == ["12.3 ms", "90.0 s", "25.0 min", "10.0 hours"]


def test_an_optimizer_takes_its_passes_or_the_hosts_launches(tmp_path: Path) -> None:
    path, profile = write_recipe(tmp_path), target("H200").profile
    works = {}
    for kind in ("adamw", "adafactor", "muon"):
        plan = contrastile.plan(path, f"optim={{kind='{kind}'}}", gpus="H200")
        works[kind] = plan.update
        assert plan.seconds.optimizer == update_seconds(plan.update, profile) > 0
    # AdamW reads and writes weights, gradients and moments in 21 passes, and 3 more clip the gradient
    assert works["adamw"].moved == pytest.approx(24 * plan.trained, rel=0.02)
    # Adafactor launches its kernels for every tensor, and only Muon has products
    assert works["adafactor"].kernels > 3 * works["adamw"].kernels
    assert [kind for kind, work in works.items() if work.products] == ["muon"]
    slow = replace(profile, launch=1.0)
    assert update_seconds(works["muon"], slow) == pytest.approx(UPDATE_LAUNCHES * works["muon"].kernels)
    # a rank of sharded weights updates its part, and gathers the few that there are once in a step
    shared, whole = (contrastile.plan(path, *words, gpus="2xH200") for words in (["train.parallel='shard'"], []))
    assert shared.update.moved == pytest.approx(whole.update.moved / 2)
    assert shared.step.held.weights == pytest.approx(1.5 * whole.step.held.weights)


@pytest.mark.parametrize(("N", "M", "features", "symmetric", "gigabytes", "keeps"), [
    (2**13, 2**13, 512, True, 2.0, True), (2**15, 2**15, 512, True, 2.0, False), (2**15, 2**15, 512, True, 2.2, True),
    (2**13, 2**13, 256, True, 2.0, False), (2**13, 2**13, 256, False, 2.0, True), (2**10, 2**16, 768, False, 2.0, True),
])  # fmt: skip
def test_exponentials_are_planned_as_kept_where_the_kernels_keep_them(
    N: int, M: int, features: int, symmetric: bool, gigabytes: float, keeps: bool
) -> None:
    """Two of eight products are saved, and the gradients come with the loss."""
    loss, workspace = Softmax(symmetric=symmetric), int(gigabytes * 2**30)
    size = LossSize(N, M, 1, features, 2**37, "single", "triton", workspace=workspace, loss=loss)
    budget = Budget(loss, torch.device("meta"), workspace)
    rows, cols = (Shard(torch.empty(n, features, dtype=torch.bfloat16, device="meta")) for n in (N, M))
    assert size.exponentials == budget.keeps_exponentials(rows, cols) == keeps
    # pairs of equal ids have a bit each, for which a forward has the room of the gradient sums
    with_ids, ids = replace(size, ids=True), [torch.empty(n, dtype=torch.int64, device="meta") for n in (N, M)]
    marked = [replace(side, ids=x) for side, x in zip((rows, cols), ids, strict=True)]
    assert with_ids.exponentials == budget.keeps_exponentials(*marked)
    if max(size.workspace_bytes, with_ids.workspace_bytes) < workspace:
        assert N * M // 16 < with_ids.workspace_bytes - size.workspace_bytes <= N * M // 8
    assert size.operations == (6 if keeps else 8) * N * M * features
    assert not replace(size, ranks=2, exchange="gather").exponentials
    assert not replace(size, dtype=torch.float32).exponentials
    if symmetric:
        assert (size.backward_sums == 0) == keeps


def test_gradients_of_ranks_of_few_rows_are_planned_to_come_with_the_loss() -> None:
    few = LossSize(4096, 4096, 4, 512, 2**37, "gather", "triton")
    assert few.backward_sums == 0
    assert replace(few, exchange="ring").backward_sums == 0
    more = {"rows": 2**15, "keys": 2**15}
    others = ({"exchange": "hierarchical"}, {"device": "cpu", "backend": "eager"}, more, more | {"exchange": "ring"})
    for apart in (replace(few, **other) for other in others):
        assert apart.backward_sums == 2 * apart.rows * 512 * 4


@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_graphs_of_ranks_keep_few_bytes_of_rows_too(exchange: str) -> None:
    """Many rows and few columns make few pairs. Features in host memory are never replayed."""
    many = LossSize(2**19, 2**9, 2, 128, 2**37, exchange, "triton")
    assert many.replayed
    assert not replace(many, dimensions=256).replayed
    assert not replace(many, host=True).replayed


def test_a_loss_in_float64_is_no_faster_than_in_float32() -> None:
    size = LossSize(2**14, 2**14, 1, 512, 2**37, backend="eager", dtype=torch.float32, feature_dtype=torch.float32)
    double = replace(size, dtype=torch.float64, feature_dtype=torch.float64)
    profile = target("H200").profile
    assert loss_seconds(double, profile) == loss_seconds(size, profile)


def test_a_small_call_takes_the_hosts_time_and_the_devices() -> None:
    profile = target("H200").profile
    small = LossSize(256, 256, 1, 512, 2**37, "single", "triton")
    for loss in (Softmax(symmetric=True), Sigmoid()):
        assert loss_seconds(replace(small, loss=loss), profile) == pytest.approx(profile.call, rel=0.05)
    # one more row than is replayed has the start of a larger loss, and no graph whose memory is filled
    most = LossSize(MOST_GRAPH_ROWS, MOST_GRAPH_ROWS, 1, 512, 2**37, "single", "triton")
    assert (most.replayed, replace(most, rows=MOST_GRAPH_ROWS + 1, keys=MOST_GRAPH_ROWS + 1).replayed) == (True, False)
    assert most.replay_copies == 2 * MOST_GRAPH_ROWS * 512 * (2 + 2 + 4 + 2)
    assert loss_seconds(most, replace(profile, call=1e-9)) > loss_seconds(
        most, replace(profile, bandwidth=1e18, call=1e-9)
    )


def test_a_ring_of_nodes_has_fewer_hops_and_a_gather_in_each(tmp_path: Path) -> None:
    """Every column comes to a node once in a pass, from one rank of it to the others by fast links."""
    plan = contrastile.plan(write_recipe(tmp_path), gpus="2x2xH100", batch=48)
    assert [choice.name for choice in plan.choices()].count("exchange hierarchical, backend auto") == 1
    flat = LossSize(2**15, 2**15, 32, 768, 2**37, "ring", "triton", node=8)
    size, bytes_of_shard = replace(flat, exchange="hierarchical"), 2**15 * 768 * 8
    assert flat.traffic == (64, (0, 31 * bytes_of_shard), (1.0, 1.0))
    assert size.traffic == (16, (4 * 7 * bytes_of_shard, 3 * bytes_of_shard), (1 / 8, 1.0))
    assert exchange_seconds(size, target("H100").profile) < exchange_seconds(flat, target("H100").profile)
    # a rank computes blocks of its own node's columns; more nodes take no more memory
    assert size.blocks == [(2**15, 2**15), (2**15, 7 * 2**15)]
    assert size.peak == replace(size, ranks=64).peak
    # on one node it is a gather
    one, gather = replace(size, node=None), replace(size, exchange="gather", node=None)
    assert (one.peak, one.blocks, one.traffic) == (gather.peak, gather.blocks, gather.traffic)


def _bytes_of_rank(rank: int, group: Any, exchange: Any, N: int, features: int, together: int) -> int:
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"), mock.patch.object(gather, "ONE_BLOCK", together):
        torch.manual_seed(rank)
        loss = ClipLoss(exchange=exchange, backend="eager", workspace=2**20, group=group)
        q, k = (F.normalize(torch.randn(N, features), dim=-1).requires_grad_() for _ in range(2))
        loss(q, k, 100.0).backward()
        q.grad = k.grad = None
        with Weighed(CPU) as weighed:
            loss(q, k, 100.0).backward()
    return weighed.bytes


@pytest.mark.parametrize(
    ("exchange", "gathered", "together"),
    [("gather", 4, 0), ("gather", 4, gather.ONE_BLOCK), ("ring", 0, 0), ("hierarchical", 2, 0)],
)
def test_the_planned_peak_of_a_rank_is_the_measured_one(
    pool: Pool, exchange: str, gathered: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of two ranks; Gloo copies the columns' gradients before it sums those of ranks."""
    monkeypatch.setattr(gather, "ONE_BLOCK", together)
    N = features = 256
    measured = max(pool.run(_bytes_of_rank, 4, exchange, N, features, together))
    node = 2 if exchange == "hierarchical" else None
    size = LossSize(N, N, 4, features, 2**35, exchange, "eager", "cpu", 2**20, torch.float, torch.float, node=node)
    assert measured <= size.peak + gathered * N * features * 4 <= 1.15 * measured


@pytest.mark.parametrize(("words", "columns", "listed"), [
    ((), 3, 0), (("loss.own_negatives=true",), 1, 2), (("loss.own_negatives=true", "loss.in_batch=false"), 0, 3),
    (("loss.kind=kl",), 0, 3), (("loss.kind=margin_mse",), 0, 3), (("loss.kind=kl", "loss.weight=0.5"), 3, 3),
], ids=str)  # fmt: skip
def test_a_loss_of_lists_has_the_time_of_its_own_products(
    tmp_path: Path, words: tuple[str, ...], columns: int, listed: int
) -> None:
    """Every query meets `columns` keys of each query, and `listed` ones alone."""
    plan = contrastile.plan(write_text_recipe(tmp_path), *words, gpus="H200", batch=2**16)
    size = plan.step.loss
    assert (size.columns, size.listed) == (columns * 2**16, listed)
    assert plan.seconds.loss == loss_seconds(size, target("H200").profile)
    # pairs of all queries take most
    assert (plan.seconds.loss > 5e-3) == (columns > 0)


@pytest.mark.parametrize(("keys", "loss", "call"), [(1, Softmax(), 6.126), (0, ScoreDivergence(), 1.173)])
def test_lists_of_eight_take_what_a_gpu_took(keys: int, loss: Any, call: float) -> None:
    """The rows of 32,768 x 8 x 512 in h200_user_calls.csv."""
    words = {"loss": loss, "feature_dtype": torch.float32, "indexed": True, "listed": 8}
    size = LossSize(2**15, keys * 2**15, 1, 512, target("H200").memory, **words)
    assert 1e3 * loss_seconds(size, target("H200").profile) == pytest.approx(call, rel=0.1)


@pytest.mark.parametrize("negatives", [1, 7, 15])
@pytest.mark.parametrize("words", [
    ("loss.own_negatives=true",), ("loss.own_negatives=true", "loss.in_batch=false"), ("loss.kind=kl",),
    ("loss.kind=margin_mse",), ("loss.kind=kl", "loss.weight=0.5"),
], ids=str)  # fmt: skip
def test_passages_of_a_list_are_planned(tmp_path: Path, words: tuple[str, ...], negatives: int) -> None:
    N, D = 1200, 256
    recipe = tiny_retriever(tmp_path, *WORDS, *words, f"model.features={D}", f"data.negatives={negatives}")
    objective, rows = QueryObjective(recipe.loss, features=D), torch.arange(N)
    own = torch.arange(N, N * (1 + negatives)).view(N, negatives)
    scored = {"lists": torch.cat([rows[:, None], own], 1), "scores": torch.randn(N, 1 + negatives)}
    marks: dict[str, Any] = {"shared": rows, "lists": own} if "own" in words[0] else scored
    marks |= {"positives": rows[:, None], "query_ids": rows, "key_ids": torch.arange(N * (1 + negatives))}
    sides = [F.normalize(torch.randn(n, D), dim=-1).requires_grad_() for n in (N, N * (1 + negatives))]

    def step() -> None:
        torch.autograd.grad(objective(*sides, torch.tensor(20.0), **marks), sides)

    step()
    with Weighed(CPU) as weighed:
        step()
    plan = plan_of(recipe, this_machine(), N, *towers(recipe, 1, N, "cpu"))
    parts = next(moment.parts for moment in plan.step.moments() if moment.name == "loss")
    # a loss of lists alone has no sums of queries' gradients, which are planned
    most = 1.17 if negatives == 1 else 1.07
    assert 0.95 <= (parts["loss"] + parts["lists"]) / weighed.bytes <= most
    few = [moment.parts.get("lists") for moment in plan.at(N // 2).step.moments()]
    assert set(few) == {None, parts["lists"] // 2}
