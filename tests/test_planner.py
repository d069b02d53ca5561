"""The planner: costs of encoders beside real ones, a step's moments beside a real step, words, files, command."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from refusals import refusal
from tiny_runs import tiny_recipe, write_recipe
from torch import Tensor, nn

import contrastile
from contrastile import ClipLoss, encode
from contrastile.bench.gate import problem
from contrastile.bench.gate import step as bench_step
from contrastile.bench.peers import Case
from contrastile.bench.subjects import HARDNESS, SUBJECTS
from contrastile.cli.main import main
from contrastile.cli.plan import lines
from contrastile.gradcache.memory import MARGIN, footprint, graph_bytes
from contrastile.losses import Guided, Hardness, Sigmoid, Softmax
from contrastile.planner import calibrate as calibration
from contrastile.planner.loss import LossSize
from contrastile.planner.memory import CONTEXT, Held, Side, StepMemory
from contrastile.planner.profile import Profile, known_profiles, target, this_machine
from contrastile.planner.seconds import exchange_seconds, loss_seconds, step_seconds
from contrastile.planner.towers import Counted, TowerCost, Work, measure, shapes_only
from contrastile.train.config.base import AdafactorSettings, AdamWSettings, MuonSettings
from contrastile.train.memory import Weighed
from contrastile.train.optim import build_optimizer, state_bytes
from contrastile.train.planned import planned_memory, update_work
from contrastile.train.recipe import load_any_recipe
from contrastile.train.report.figures import StepColumns, memory_bars
from contrastile.train.report.page import IMAGE_TEXT, _figures

CPU, FLOAT = torch.device("cpu"), torch.float32
WIDTH, D, SUB_BATCH = 96, 32, 16


class _Unit(nn.Module):
    """Rows of unit length."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


def _tower() -> nn.Module:
    torch.manual_seed(0)
    wide = 4 * WIDTH
    return nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.LayerNorm(wide), nn.Linear(wide, D), _Unit())


def _inputs(n: int) -> list[Tensor]:
    return [torch.zeros(n, WIDTH)]


def _cost(name: str = "tower", size: int = SUB_BATCH, frozen: bool = False) -> TowerCost:
    with shapes_only():
        tower = _tower().requires_grad_(not frozen)
        return measure(name, tower, _inputs, tower, size, torch.enable_grad)


def test_the_cost_of_an_encoder_is_that_of_a_real_one() -> None:
    tower, cost = _tower(), _cost()
    assert cost.weights == cost.trained == sum(x.nbytes for x in tower.parameters())

    def forward(n: int = SUB_BATCH) -> Tensor:
        return tower(*_inputs(n))

    def replay() -> None:
        out = forward()
        torch.autograd.grad(out, [*tower.parameters()], torch.ones_like(out))

    with torch.no_grad():
        assert cost.forward == pytest.approx(footprint(forward), rel=0.01)
    assert cost.replay == pytest.approx(footprint(replay), rel=0.01)
    assert cost.graph == graph_bytes(forward) - graph_bytes(partial(forward, SUB_BATCH // 2)) + cost.graph // 2
    assert (cost.dimensions, cost.features, cost.inputs) == (D, 4 * D, 4 * WIDTH)
    # the products of the two layers, and again twice backward, but for the gradient of the inputs
    assert cost.forward_work.products == 2 * SUB_BATCH * 4 * WIDTH * (WIDTH + D)
    assert cost.replay_work.products == 2 * SUB_BATCH * 4 * WIDTH * (2 * WIDTH + 3 * D)


def test_attention_is_counted_forward_and_backward() -> None:
    with shapes_only():
        layer = nn.Linear(32, 32)

        def encoder(x: Tensor) -> Tensor:
            heads = layer(x).view(len(x), 10, 4, 8).transpose(1, 2)
            return F.scaled_dot_product_attention(heads, heads, heads).flatten(1)

        cost = measure("layer", encoder, lambda n: [torch.zeros(n, 10, 32)], layer, 4, torch.enable_grad)
    # two products of 10 x 10 x 8 in each of 4 heads of 4 examples; five backward
    assert cost.replay_work.attention == 14 * 4 * 4 * 10 * 10 * 8


def test_dropout_costs_what_a_gpu_keeps_of_it() -> None:
    """A mask of a byte, and no probabilities of attention, which a CPU keeps in float32."""

    def graph(device: str, p: float) -> int:
        with shapes_only(device):
            layer = nn.Linear(32, 32)

            def encoder(x: Tensor) -> Tensor:
                heads = layer(x).view(len(x), 10, 4, 8).transpose(1, 2)
                return F.dropout(F.scaled_dot_product_attention(heads, heads, heads, None, p).flatten(1), p)

            return measure("layer", encoder, lambda n: [torch.zeros(n, 10, 32)], layer, 4, torch.enable_grad).graph

    numbers = 4 * 10 * 32
    assert graph("cuda", 0.1) == graph("cuda", 0.0) + numbers
    assert graph("cpu", 0.1) > graph("cpu", 0.0) + 4 * numbers + 4 * 4 * (4 * 10 * 10)


def test_a_frozen_encoder_has_no_graph_and_no_second_pass() -> None:
    cost = _cost(frozen=True)
    assert (cost.trained, cost.graph, cost.replay) == (0, 0, cost.forward)
    step = _step([Side(cost, 64), Side(_cost("text"), 64)])
    assert [moment.name for moment in step.moments()] == [
        "tower: first pass", "text: first pass", "loss", "text: second pass", "text: sum of gradients", "optimizer",
    ]  # fmt: skip


def test_measuring_leaves_the_random_numbers_as_they_were() -> None:
    torch.manual_seed(1)
    expected = torch.randn(3)
    torch.manual_seed(1)
    _cost()
    assert torch.equal(torch.randn(3), expected)


def _step(sides: list[Side], retain: Any = 0, memory: int = 2**33, **loss: Any) -> StepMemory:
    rows = sides[0].examples
    words = {"device": "cpu", "dtype": torch.float32, "feature_dtype": torch.float32, **loss}
    weights = sum(side.cost.weights for side in sides)
    return StepMemory(sides, LossSize(rows, rows, 1, D, memory, **words), Held(weights, libraries=0), retain)


def test_a_rings_buffers_within_a_node_are_held_in_the_whole_step() -> None:
    step = _step([Side(_cost(), 16)], exchange="ring", backend="triton", device="cuda", dtype=torch.bfloat16)
    # two buffers of 16 columns: their features in bf16, and the sums of their gradients in float32
    buffers = 2 * 16 * D * (2 + 4)
    within = replace(step, loss=replace(step.loss, ranks=4))
    assert {moment.parts["exchange"] for moment in within.moments()} == {buffers}
    for others in ({"node": 2}, {"device": "cpu", "backend": "eager"}):
        apart = replace(step, loss=replace(within.loss, **others))
        assert [moment.name for moment in apart.moments() if "exchange" in moment.parts] == ["loss"]


def test_a_hierarchy_of_one_node_has_the_buffers_of_its_gather() -> None:
    gather = _step([Side(_cost(), 16)], exchange="gather", backend="triton", device="cuda", dtype=torch.bfloat16).loss
    gather = replace(gather, ranks=4)
    one, several = (replace(gather, exchange="hierarchical", node=node) for node in (None, 2))
    # the float32 sums of all columns
    assert (gather.kept_bytes, one.kept_bytes, several.kept_bytes) == (64 * D * 4, 64 * D * 4, 0)


@pytest.mark.parametrize(
    ("changes", "taken"),
    [({}, "ring"), ({"copies": False}, "gather"), ({"node": 2}, "gather"), ({"device": "cpu"}, "gather")],
)
def test_auto_is_planned_as_the_losses_choose(changes: dict[str, Any], taken: str) -> None:
    size = LossSize(8192, 8192, 4, 768, 2**37, backend="triton", device="cuda", dtype=torch.bfloat16)
    assert replace(size, **changes).exchange_name == taken


@pytest.mark.parametrize("backend", ["dense", "eager"])
@pytest.mark.parametrize(("batch", "retain"), [(96, 0), (96, 2), (90, 6), (1024, 0)])
def test_the_planned_peak_is_that_of_a_real_step(batch: int, retain: int, backend: Any) -> None:
    """The peak of the operations' results on a CPU, for few rows that of the towers, for many that of the loss."""
    towers, cost = [_tower(), _tower()], _cost()
    step = _step([Side(cost, batch)] * 2, retain, backend=backend, workspace=2**20)
    x = torch.randn(batch, WIDTH)

    def run() -> None:
        sides = (encode(tower, x, sub_batch=SUB_BATCH, retain=retain) for tower in towers)
        # logits far apart, whose exponentials rows and columns have for themselves
        ClipLoss(backend=backend, workspace=2**20)(*sides, 100.0).backward()

    run()
    for tower in towers:
        tower.zero_grad()
    with Weighed(CPU) as weighed:
        run()
    planned = step.peak().bytes - step.held.weights
    assert weighed.bytes <= 1.1 * planned
    assert planned <= 1.2 * weighed.bytes


@pytest.mark.parametrize("rows", [96, 1300])
@pytest.mark.parametrize(("name", "loss"), [
    ("clip", Softmax(symmetric=True)), ("infonce", Softmax()), ("siglip", Sigmoid()), ("gist", Guided()),
    ("hardness", Hardness(hardness_strength=HARDNESS)), ("infonce", Softmax(label_smoothing=0.1)),
])  # fmt: skip
def test_the_planned_peak_of_a_loss_on_a_cpu_is_the_measured_one(name: str, loss: Any, rows: int) -> None:
    """A tile, several tiles, and strips; with few rows of many features the gradients are most of it."""
    features = 512 if rows < 100 else 64
    smoothing = getattr(loss, "label_smoothing", 0.0)
    leaves = problem(Case(name, rows, features, "float32"), CPU)
    module = SUBJECTS[name].module(**{"label_smoothing": smoothing} if smoothing else {})
    bench_step(module, leaves)
    with Weighed(CPU) as weighed:
        bench_step(module, leaves)
    size = LossSize(
        rows, rows, 1, features, 2**35, "single", "eager", "cpu", dtype=FLOAT, feature_dtype=FLOAT, loss=loss
    )
    assert weighed.bytes <= size.peak <= 1.04 * weighed.bytes + 2**15


def test_kept_graphs_follow_the_rule_of_the_gradient_cache() -> None:
    """The last sub-batch may be short, and "auto" keeps as many graphs as there is room for."""
    side = Side(replace(_cost(), graph=1000), 40)
    assert (side.count, side.graph_bytes(0), side.graph_bytes(1), side.graph_bytes(3)) == (3, 0, 500, 2500)
    step = _step([side, side], "auto", memory=2 * CONTEXT)
    assert step.retained_graphs() == [3, 3]
    assert replace(step, loss=replace(step.loss, memory=CONTEXT // 2)).retained_graphs() == [0, 0]
    assert _step([side, side], 2).retained_graphs() == [2, 2]
    # a later side with large features takes back what the first one has
    first = Side(replace(_cost(), graph=2**26), 320)
    for features, kept in ((0, 12), (2**19, 7), (2**22, 0)):
        sides = [first, replace(first, cost=replace(first.cost, features=features))]
        assert _step(sides, "auto", memory=2 * CONTEXT).retained_graphs() == [kept, 0]
    # ranks that shard their weights encode equally often, and take none back
    assert replace(_step(sides, "auto", memory=2 * CONTEXT), sharded=True).retained_graphs() == [12, 0]
    # where the second pass of a later side has no room, encode releases the oldest ones; a CPU reports no lack
    late = [first, replace(first, cost=replace(first.cost, replay=2**26 * 6))]
    small = {"device": "cuda", "backend": "eager"}
    for released, words, kept in ((True, small, 8), (False, small, 12), (True, {"device": "cpu"}, 12)):
        step = replace(_step(late, "auto", memory=2 * CONTEXT, **words), sharded=not released)
        assert step.retained_graphs() == [kept, 0]
        assert (step.peak().bytes <= 2 * CONTEXT * (1 - MARGIN) - CONTEXT) == (kept == 8)
    # graphs behind frozen weights stay
    trunk = Side(replace(_cost(), graph=1, reads_frozen=True), 320)
    assert trunk.keeps_all
    assert _step([trunk, first, sides[1]], "auto", memory=2 * CONTEXT).retained_graphs() == [trunk.count, 0, 0]


@pytest.mark.parametrize("settings", [
    AdamWSettings(), AdafactorSettings(), AdafactorSettings(betas=(0.0, 0.95)), MuonSettings(),
])  # fmt: skip
def test_an_optimizer_has_the_declared_state_and_work(settings: Any) -> None:
    model = nn.Sequential(nn.Linear(40, 48), nn.Linear(48, 48), nn.Linear(48, 48), nn.Conv2d(3, 5, 3))
    model[0].bias.requires_grad_(False)
    optimizer = build_optimizer(model, settings)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    members = getattr(optimizer, "members", {"": optimizer}).values()
    states = [x for member in members for state in member.state.values() for name, x in state.items() if name != "step"]
    assert state_bytes(model, settings) == sum(x.nbytes for x in states)
    for group in optimizer.param_groups:
        group.update({"foreach": True} if "foreach" in group else {})
    with Counted() as counter:
        optimizer.step()
    assert update_work(model, settings, clipped=False) == counter.work


def test_seconds_are_those_of_the_slower_of_device_and_host() -> None:
    profile = replace(target("H200").profile, products=1e3, attention=1e3, bandwidth=1e3, launch=0.1, call=1e-9)
    cost = replace(_cost(), forward_work=Work(100, 0, 0, 5), replay_work=Work(300, 0, 0, 1))
    seconds = step_seconds(_step([Side(cost, 40)] * 2), profile, per_node=8, trained=0)
    # of each side, two whole sub-batches and a half: forward 0.5 on the host, replay 0.3 on the device
    assert seconds.towers == pytest.approx(2 * (3 * 0.5 + 2.5 * 0.3))
    assert seconds.host == pytest.approx(2 * (2 * 0.4 + 0.45) / seconds.towers)
    slow = step_seconds(_step([Side(cost, 40)] * 2), profile, per_node=8, trained=0, decoded=10**6)
    assert (slow.total, slow.bottleneck) == (10**6 / (profile.decode * profile.cpus), "data")


def test_a_ring_is_hidden_by_its_arithmetic_but_for_its_hops() -> None:
    profile = target("H200").profile
    many, slow = LossSize(2**15, 2**15, 8, 768, 2**37, "ring", "triton"), replace(profile, link=1e6)
    assert exchange_seconds(many, profile) == 16 * profile.hop
    assert exchange_seconds(many, slow) > 100
    assert exchange_seconds(replace(many, ranks=1), slow) == 0
    # between nodes the network is slow
    assert exchange_seconds(replace(many, node=4), slow) == 16 * profile.hop
    assert exchange_seconds(replace(many, node=4), replace(profile, network=1e6)) > 100


@pytest.mark.parametrize(("word", "ranks", "per_node", "gibibytes"), [
    ("H200", 1, 1, 139.8), ("8xH100-80GB", 8, 8, 79.2), ("32x8xH100-80GB", 256, 8, 79.2), ("4xA800-80GB", 4, 4, 79.2),
    ("2xh100-94GB", 2, 2, 93.1), ("2xrtx4090-24GB", 2, 2, 23.8), ("gtx1080-8GB", 1, 1, 7.9),
    ("8Xh100-80gb", 8, 8, 79.2),
])  # fmt: skip
def test_machines_by_a_word(word: str, ranks: int, per_node: int, gibibytes: float) -> None:
    machines = target(word)
    assert (machines.ranks, machines.per_node, machines.device) == (ranks, per_node, "cuda")
    assert machines.memory / 2**30 == pytest.approx(gibibytes, abs=0.05)
    assert (machines.profile is None) == any(name in word for name in ("A800", "tx"))


# words with the number of GPUs behind the chip, and the right ones
BEHIND = {
    "H100x8": "8xH100-80GB", "H100x8-94GB": "8xH100-94GB", "4xH100x8": "4x8xH100-80GB", "H200x2": "2xH200-141GB",
    "L40Sx2-48GB": "2xL40S-48GB", "A800x2": "2xA800-80GB",
}  # fmt: skip


@pytest.mark.parametrize(("word", "sentence"), [
    ("0xH100", "`gpus` must be [nodes x] [GPUs x] chip [- memory in GB]; got '0xH100'. "
     "Such as H200, 8xH100-80GB, or 32x8xH100-80GB for 32 nodes."),
    ("8xA800", "`gpus` must name a chip with a profile (H100, H200), or its memory too; got '8xA800'. "
     "Add its gigabytes, as 8xA100-80GB does."),
    ("2x8xA800", "`gpus` must name a chip with a profile (H100, H200), or its memory too; got '2x8xA800'. "
     "Add its gigabytes, as 8xA100-80GB does."),
    *[(word, f"`gpus` must name a chip with a profile (H100, H200), or its memory too; got '{word}'. "
       "Leave it out for this machine.") for word in ("cuda", "8xgpu", "cpu")],
    ("lots", "`gpus` must name a chip with a profile (H100, H200), or its memory too; got 'lots'. "
     "Such as H200, 8xH100-80GB, or 32x8xH100-80GB for 32 nodes."),
    *[(word, f"`gpus` must have the number of GPUs before the chip; got '{word}'. Such as {right}.")
      for word, right in BEHIND.items()],
    ("9999x8xH100", "`ranks` must be at most 65,536; got 79,992. Plan for fewer GPUs."),
])  # fmt: skip
def test_a_word_that_names_no_machine_is_refused(word: str, sentence: str, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError) as error:
        target(word)
    assert str(error.value) == sentence


@pytest.mark.parametrize(("words", "sentence"), [
    ({"gpus": 8}, "`gpus` must be [nodes x] [GPUs x] chip [- memory in GB]; got 8. "
     "Such as H200, 8xH100-80GB, or 32x8xH100-80GB for 32 nodes."),
    ({"gpus": "8xH100", "batch": "64k"},
     "`batch` must be a whole number of pairs, at least 8, one for each rank; got '64k'. Such as 65536."),
    ({"gpus": "8xH100", "batch": 64.5},
     "`batch` must be a whole number of pairs, at least 8, one for each rank; got 64.5. Such as 65536."),
    ({"pairs": 0}, "`pairs` must be a whole number of at least 1; got 0. Leave it out for the recipe's own."),
])  # fmt: skip
def test_arguments_of_another_kind_are_refused(words: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        contrastile.plan(write_recipe(tmp_path), **words)
    assert str(error.value) == sentence


@pytest.mark.parametrize(("gpus", "precision"), [
    ("H200", "bf16"), ("4xA800-80GB", "bf16"), ("V100-32GB", "float32"), ("8xT4-16GB", "float32"),
    ("rtx2080ti-11GB", "float32"), ("P100-16GB", "float32"),
])  # fmt: skip
def test_a_precision_of_auto_is_the_one_that_a_run_takes(gpus: str, precision: str, tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    auto = contrastile.plan(path, "train.precision=auto", gpus=gpus)
    assert auto.values() == contrastile.plan(path, f"train.precision={precision}", gpus=gpus).values()
    assert f"products in {'bfloat16' if precision == 'bf16' else 'float32'}" in "\n".join(lines(auto))


@pytest.mark.parametrize(("gpus", "backend"), [
    ("A800-80GB", "triton"), ("rtx4090-24GB", "triton"), ("V100-32GB", "eager"), ("8xT4-16GB", "eager"),
    ("rtx2080ti-11GB", "eager"), ("8xMI300X-192GB", "eager"),
])  # fmt: skip
def test_chips_without_fused_kernels_have_eager_tiles(gpus: str, backend: str, tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    assert contrastile.plan(path, gpus=gpus).step.loss.backend_name == backend
    if backend == "eager":
        sentence = f'`loss.backend` must be "auto", "eager" or "dense" on {gpus}; got "triton". '
        assert refusal(contrastile.plan, path, "loss.backend=triton", gpus=gpus).startswith(sentence)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_precision_of_auto_is_that_of_this_machine(bf16: bool, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("contrastile.train.planned.has_bf16", lambda device: bf16)
    plan = contrastile.plan(write_recipe(tmp_path), "train.precision=auto", "device=cpu")
    assert plan.values()["dtype"] == ("bfloat16" if bf16 else "float32")


@pytest.mark.parametrize("words", [(), ("device=cpu",)])
def test_kernels_are_not_planned_on_a_cpu(words: tuple[str, ...], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    rule = '`loss.backend` must be "auto", "eager" or "dense" on a CPU; got "triton"'
    assert refusal(contrastile.plan, write_recipe(tmp_path), "loss.backend=triton", *words) == (
        f"{rule}. Or name GPUs to plan, such as 8xH100-80GB."
    )


@pytest.mark.parametrize("kind", ["kl", "margin_mse"])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_losses_of_scores_are_planned_on_gpus_as_eager_tiles_compute_them(kind: str, backend: str) -> None:
    plan = contrastile.plan("docstrings", f"loss.kind={kind}", f"loss.backend={backend}", gpus="8xH100-80GB")
    assert plan.step.loss.backend_name == "eager"
    assert plan.fits


def test_a_profile_with_a_wrong_key_is_refused() -> None:
    values = asdict(known_profiles()["h100"])
    for wrong in ({**values, "speed": 1.0}, {**values, "loss": 0}, {k: v for k, v in values.items() if k != "hop"}):
        with pytest.raises(ValueError) as error:
            Profile.of(wrong, "mine.toml")
        key = next(iter((wrong.keys() ^ values.keys()) or {"loss"}))
        rule = "`profile` must have every rate of a profile, each above 0, and no other key"
        assert str(error.value) == f"{rule}; got {key} in mine.toml. Make it anew: contrastile plan --calibrate."


def test_this_machine_is_calibrated_once_and_found_again(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert this_machine().profile is None
    for name, value in (
        ("SIDES", {"cpu": 64}), ("NUMBERS", {"cpu": 64}), ("ROWS", {"cpu": 64}), ("LAYER", {"cpu": (32, 2, 8)}),
    ):  # fmt: skip
        monkeypatch.setattr(calibration, name, value)
    monkeypatch.setattr("contrastile.planner.calibrate.calibrate.__defaults__", (None, 0.0))
    assert main(["plan", "--calibrate"]) == 0
    assert capsys.readouterr().out == f"profile: {tmp_path}/contrastile/profile.toml\n"
    profile = this_machine().profile
    assert profile is not None
    assert (profile.name, profile.device) == ("cpu", "cpu")
    assert "--calibrate" in profile.provenance[0]


@pytest.mark.parametrize("few", [0.0, 1.0, 1.9, 2.1, 3.0])
def test_a_disturbed_measurement_leaves_a_rate_of_products(few: float) -> None:
    assert 0.5 * 2.0 <= calibration.feature_seconds(few, 2.0, (512, 1024)) * 1024 <= 2.0


def test_the_rate_of_a_cpu_is_that_of_float32() -> None:
    """A CPU without bf16 instructions multiplies float32 a hundred times as fast."""
    profile = replace(known_profiles()["h200"], device="cpu", loss=1e11, pair=1e-9, float32=100.0)
    words = {"device": "cpu", "backend": "eager", "feature_dtype": FLOAT}
    loss = LossSize(4096, 4096, 1, 64, 2**35, dtype=FLOAT, **words)
    assert loss_seconds(loss, profile) >= loss.operations / 1e11


def test_the_plan_of_a_recipe(tmp_path: Path, capsys: Any) -> None:
    path = write_recipe(tmp_path)
    plan = contrastile.plan(path, gpus="2xH100")
    values = plan.values()
    assert (values["batch"], values["rows"], values["exchange"], values["backend"]) == (48, 24, "gather", "triton")
    assert [(side["name"], side["examples"], side["sub_batches"]) for side in values["sides"]] == [
        ("image", 24, 2), ("text", 24, 3),
    ]  # fmt: skip
    # half of 480 examples in batches of 16, half in batches of 48
    assert plan.stages == ((16, 15), (48, 5))
    assert plan.run_seconds == pytest.approx(15 * plan.at(16).seconds.total + 5 * plan.seconds.total)
    assert values["peak"]["bytes"] == sum(values["peak"]["parts"].values())
    assert values["peak"]["bytes"] == max(moment["bytes"] for moment in values["moments"])
    # another batch, given or found, is that of the whole run
    assert plan.at(32).stages == contrastile.plan(path, gpus="2xH100", batch=32).stages == ((32, 15),)
    few = contrastile.plan(path, "train.examples=481", gpus="2xH100")
    assert few.stages == ((16, 16), (48, 5))
    assert (few.at(8).stages, few.at(480).stages) == (((8, 61),), ((480, 2),))
    assert plan.at(32).run_seconds == pytest.approx(15 * plan.at(32).seconds.total)
    # the last step is shorter, and none of a larger batch than the run has pairs
    assert plan.at(100).stages == contrastile.plan(path, gpus="2xH100", batch=100).stages == ((100, 5),)
    assert (plan.at(480).stages, plan.at(482).stages) == (((480, 1),), ())
    # the same recipe, loaded, and nothing of the data is opened
    (tmp_path / "pictures.tsv").unlink()
    assert contrastile.plan(load_any_recipe(path, files=False), gpus="2xH100").values() == values
    text = "\n".join(lines(plan))
    assert "tiny on 2xH100: 48 pairs a step, 24 on each of 2 ranks" in text
    assert "  image: sub-batches of 16, 1 of 2 graphs kept" in text
    # a number of pairs with a unit is written out
    assert main(["plan", str(path), "train.epochs=2.0", "--gpus", "2xH100", "--hours", "1M"]) == 0
    assert " steps, with 1,048,576 pairs to train on\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "280M (k: times 1,024; M: times 1,048,576)" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", str(path), "--gpus", "2xH100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(values))


def test_a_locked_tower_that_ran_before_costs_its_projection(tmp_path: Path) -> None:
    words = ("model.locked=['image']", "data.augment=false")
    path = write_recipe(tmp_path)
    (cost, _), (ahead, _) = (
        [side.cost for side in contrastile.plan(path, *words, f"model.precompute={word}", gpus="H100").step.sides]
        for word in ("false", "true")
    )
    width = ahead.inputs // 4
    assert width != cost.inputs // 4
    # the projection's product forward, and backward for its weights alone
    assert ahead.forward_work.products == 2 * ahead.sub_batch * width * ahead.dimensions
    assert ahead.replay_work.products == 2 * ahead.forward_work.products
    assert ahead.trained == cost.trained
    assert ahead.forward_work.products < cost.forward_work.products


@pytest.mark.parametrize("gpus", ["H100", "2xH100"])
def test_features_in_host_memory_leave_the_device(tmp_path: Path, gpus: str) -> None:
    path, words = write_recipe(tmp_path), ("train.retain=0", "train.precision=bf16")
    device, host = (
        contrastile.plan(path, *words, f"train.features={where}", gpus=gpus, batch=2**20)
        for where in ("device", "host")
    )
    assert all("features" not in moment.parts for moment in host.step.moments())
    assert host.peak.bytes < device.peak.bytes
    # float32 features and their gradients; of a ring the sums of rows and columns, and two packets
    ranks, D = host.target.ranks, host.step.loss.dimensions
    assert host.host - device.host == 2**20 * 4 * D * (4 + (6 if ranks > 1 else 0))
    there = next(choice for choice in device.choices() if choice.name == "features in host memory")
    assert (there.peak, there.host) == (host.peak.bytes, host.host)
    assert host.largest() == host.most > device.largest()
    assert "no limit" in "\n".join(lines(host))
    assert host.step.loss.exchange_name == ("ring" if ranks > 1 else "single")
    # features of a CPU are in host memory already
    here = contrastile.plan(path, "train.retain=0", "device=cpu")
    assert not any(choice.name.startswith("features in host") for choice in here.choices())
    assert here.peak == contrastile.plan(path, "train.retain=0", "device=cpu", "train.features=host").peak
    # no exchange that a call refuses there
    exchanges = {choice.name.split(", ")[0] for choice in host.choices() if choice.name.startswith("exchange")}
    assert exchanges == {f"exchange {host.step.loss.exchange_name}"}
    if ranks > 1:
        with pytest.raises(ValueError, match=r"`loss\.exchange` must be auto, ring or single for features in host"):
            contrastile.plan(path, *words, "train.features=host", "loss.exchange=gather", gpus=gpus, batch=64)
    # no choice of a loss that is refused there
    refused = contrastile.plan(path, *words, "loss.kind=infonce", gpus=gpus, batch=1024)
    assert not any(choice.name.startswith("features in host") for choice in refused.choices())


@pytest.mark.parametrize(
    ("batch", "examples"),
    [("64", 64), ("[[0.0, 256], [0.5, 4096]]", 300), ("[[0.0, 7], [0.3, 50], [0.4, 60], [0.9, 11]]", 1000)],
)
def test_the_steps_of_a_run_are_those_of_its_training(tmp_path: Path, batch: str, examples: int) -> None:
    plan = contrastile.plan(write_recipe(tmp_path), f"train.batch={batch}", f"train.examples={examples}", gpus="H200")
    train = tiny_recipe(tmp_path, f"train.batch={batch}", f"train.examples={examples}").train
    assert [size for size, steps in plan.stages for _ in range(steps)] == [*train.steps(9999, examples)]


def test_few_pairs_have_the_batches_of_their_training(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    plan = contrastile.plan(path, "train.epochs=2.0", "train.batch=512", "train.epoch_steps=4", gpus="H200", pairs=100)
    assert (plan.batch, plan.stages) == (25, ((25, 8),))


def test_a_key_without_effect_is_refused_as_training_refuses_it(tmp_path: Path, capsys: Any) -> None:
    words = [str(write_recipe(tmp_path)), "optim.cooldown=0.1"]
    (tmp_path / "pictures.tsv").unlink()
    line = 'optim.cooldown=0.1: optim.cooldown: has no effect with optim.schedule = "cosine"; leave it out, or set '
    assert refusal(contrastile.plan, *words).startswith(line)
    assert main(["plan", *words]) == 2
    assert line in capsys.readouterr().err
    # a run's own recipe has every key of the version that wrote it
    (tmp_path / "metrics.jsonl").touch()
    Path(words[0]).write_text(Path(words[0]).read_text().replace("[optim]", "[optim]\ncooldown = 0.1"))
    assert contrastile.plan(words[0], gpus="H100").fits


def test_mistaken_calls_of_a_plan_are_refused(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    loaded = load_any_recipe(path, files=False)
    assert refusal(contrastile.plan, loaded, "train.batch=64", gpus="H200") == (
        "`overrides` must be left out with a recipe that was loaded; got train.batch=64. "
        "Give them where it is loaded, or name its file."
    )
    sentence = "`batch` must be a whole number of at least 1; got 0. Such as 65536."
    assert refusal(contrastile.plan(path, gpus="H200").at, 0) == sentence


def test_the_largest_batch_fits_and_a_larger_one_does_not(tmp_path: Path, capsys: Any) -> None:
    plan = contrastile.plan(write_recipe(tmp_path), "train.retain=0", gpus="4xT4-2GB")
    largest = plan.largest()
    assert plan.at(largest).fits
    assert not plan.at(int(1.01 * largest)).fits
    # no more than a block of the dense matrix fits
    dense = plan.largest(exchange="gather", backend="dense")
    assert dense < largest / 5
    # the target has no profile
    assert plan.seconds is None
    assert all(choice.seconds is None for choice in plan.choices())
    assert main(["plan", str(tmp_path / "tiny.toml"), "--gpus", "4xT4-2GB", "--largest"]) == 0
    assert f"{largest:,} pairs a step" in capsys.readouterr().out
    # a run of fewer pairs than a batch has no time
    assert replace(plan, stages=((64, 4),)).at(128).stages == ((128, 2),)
    assert replace(plan, stages=((64, 4),)).at(512).stages == ()
    assert main(["plan", str(tmp_path / "tiny.toml"), "--gpus", "4xT4-2GB", "--batch", "512M"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "sentence"), [
    ([], "`recipe` must be named; got none. Such as glyphs."),
    (["RECIPE", "--gpus", "8xH100", "--batch", "4"],
     "`--batch` must be a whole number of pairs, at least 8, one for each rank; got 4. Such as 65536."),
    (["RECIPE", "train.epochs=2.0", "--gpus", "H100", "--batch", "64", "--hours"],
     "`--hours` must come with a run of known length; got none. "
     "Give the pairs to train on, such as --hours 280M."),
    (["RECIPE", "--gpus", "T4-2GB", "--hours"],
     "`--hours` must come with a chip with a profile; got T4-2GB. "
     "Measure such a machine: contrastile plan --calibrate, there."),
    (["RECIPE", "--gpus", "H100", "--batch", "4k", "--hours"],
     "`--hours` must come with a batch of at most the run's 480 pairs; got 4,096. Such as --batch 480."),
    (["RECIPE", "--gpus", "H100", "--hours", "280M"],
     "`--hours` must be left out for a run of known length; got 293,601,280 beside train.examples=480. "
     "Or train for epochs of them."),
    (["RECIPE", "--gpus", "H100", "--batch", "64q"],
     "`--batch` must be whole numbers above 0, perhaps with a unit; got '64q'. Such as 4096, 64k or 1M pairs."),
    (["RECIPE", "--gpus", "H100", "--batch", "999999999999999999999"],
     "`--batch` must be at most 268,435,456 pairs; got 999,999,999,999,999,999,999. Plan a smaller one."),
    (["RECIPE", "--gpus", "9xT4-1GB", "--largest"],
     "`--gpus` must have room for weights, gradients, optimizer and one pair; got 0.1 GiB of them, and room for "
     "0.0 GiB on 9xT4-1GB. Take GPUs with more memory, or with weights and gradients in parts: "
     'train.parallel="shard".'),
])  # fmt: skip
def test_what_the_command_refuses(words: list[str], sentence: str, tmp_path: Path, capsys: Any) -> None:
    path = write_recipe(tmp_path)
    assert main(["plan", *(str(path) if word == "RECIPE" else word for word in words)]) == 2
    assert capsys.readouterr().err == sentence + "\n"


def test_a_batch_of_fewer_pairs_than_a_sub_batch_has_the_sub_batches_of_larger_ones(tmp_path: Path) -> None:
    """A plan that begins at few pairs says about all others, and about other sub-batches, what their own plans do."""
    path = write_recipe(tmp_path)

    def planned(batch: int, sub_batch: int = 48) -> Any:
        words = [f"train.sub_batch={sub_batch}", "train.batch=4096", "train.retain=0"]
        return contrastile.plan(path, *words, gpus="2xT4-2GB", batch=batch)

    few, many = planned(8), planned(4096)
    assert [side.cost.sub_batch for side in few.step.sides] == [4, 4]
    assert few.largest() == many.largest()
    assert few.at(4096).peak == many.peak
    assert many.at(8).peak.bytes == pytest.approx(few.peak.bytes, rel=0.02)
    for name, sub_batch in (("half", 24), ("twice", 96)):
        choice = next(one for one in few.choices() if one.name.startswith(name))
        assert choice.name == f"{name} the sub-batch: {sub_batch} and {sub_batch}"
        assert choice.peak == few.peak.bytes == planned(8, sub_batch).peak.bytes
        assert choice.largest == pytest.approx(planned(4096, sub_batch).largest(), rel=0.01)


@pytest.mark.parametrize("batch", [512, 2**15, 2**17])
def test_the_largest_batch_of_a_choice_is_that_of_its_own_step(tmp_path: Path, batch: int) -> None:
    """Kept graphs count, and another sub-batch is whole."""
    words = ["train.sub_batch=1024", "train.batch=4096", "train.retain=0"]
    plan = contrastile.plan(write_recipe(tmp_path), *words, gpus="T4-2GB", batch=batch)
    choices = {choice.name.split(":")[0]: choice for choice in plan.choices()}
    assert all(choice.fits == (choice.largest >= batch) for choice in choices.values())
    kept = replace(plan, step=replace(plan.step, retain="auto"))
    assert kept.at(choices["retain auto"].largest).fits
    # room for a step of one whole sub-batch, but not of one of twice the size
    room = plan.at(1024).peak.bytes
    small = replace(plan.at(1024), target=replace(plan.target, memory=int((room + CONTEXT) / (1 - MARGIN)) + 2**10))
    assert small.fits
    assert next(one.largest for one in small.at(4096).choices() if one.name.startswith("twice")) == 0


def test_the_largest_batch_may_be_smaller_than_a_sub_batch(tmp_path: Path) -> None:
    words = [f"train.batch={2**22}", f"train.sub_batch={2**22}"]
    plan = contrastile.plan(write_recipe(tmp_path), *words, gpus="T4-2GB")
    largest = plan.at_largest()
    assert not plan.fits
    assert largest.fits
    assert largest.step.sides[0].cost.sub_batch == largest.batch < 2**22


def test_a_sub_batch_of_one_has_no_half(tmp_path: Path) -> None:
    plan = contrastile.plan(write_recipe(tmp_path), "train.sub_batch=1", gpus="H100")
    assert [one.name for one in plan.choices() if "sub-batch" in one.name] == ["twice the sub-batch: 2 and 2"]


def test_the_report_shows_the_plan_beside_the_measured_peak() -> None:
    svg = memory_bars({"graphs": 3 * 2**30, "weights": 2**30}, 5 * 2**30)
    assert svg.startswith("<svg")
    assert all(f">{word}<" in svg for word in ("planned", "measured", "graphs", "weights"))
    # earlier versions wrote no plan, and on a CPU there is none
    for plan in ({}, {"planned_memory": None}):
        assert _figures(StepColumns([]), {"peak_bytes": 1, **plan}, IMAGE_TEXT) == []


def test_a_plan_that_fails_costs_a_finished_run_nothing(caplog: Any) -> None:
    run: Any = SimpleNamespace(device=CPU, recipe=None)
    assert planned_memory(run, 64, 1) is None
    run.device = SimpleNamespace(type="cuda")
    assert planned_memory(run, 64, 1) is None
    assert "no plan of the memory" in caplog.text


def test_a_model_that_makes_a_parameter_by_itself_has_a_plan() -> None:
    config = '{model_type="xlnet", d_model=32, n_layer=1, n_head=2, d_inner=32}'
    both = f'model.both={{kind="transformers", config={config}, pooling="mean"}}'
    assert contrastile.plan("docstrings-bert", both, gpus="H200", batch=64).peak.bytes > 0
