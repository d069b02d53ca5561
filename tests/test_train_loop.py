"""Whole small runs: files, metrics, weights, report; learning, repeating, stopping."""

import json
import math
import re
import shutil
import signal
import tracemalloc
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from ranks import FIGURES
from refusals import refusal
from tiny_runs import interrupted, same_run, timed, tiny_recipe, weights, write_pictures, write_recipe

import contrastile
from contrastile.cli.main import main
from contrastile.engine import plan
from contrastile.train import loop, state
from contrastile.train import run as run_of_pairs
from contrastile.train.folder import RunFolder
from contrastile.train.image_text import ImageText
from contrastile.train.log import Metrics, read_metrics
from contrastile.train.loop import run_recipe, step
from contrastile.train.optim import build_optimizer
from contrastile.train.ranks import ALONE
from contrastile.train.recipe import load_any_recipe
from contrastile.train.report import figures, page
from contrastile.train.report.figures import StepColumns
from contrastile.train.report.page import IMAGE_TEXT, _figures, memory_saved, table_text, write_report
from contrastile.train.state import TrainResult


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run that several tests look at, with its figures."""
    folder = tmp_path_factory.mktemp("run")
    recipe = tiny_recipe(folder)
    with patch.multiple(page, **FIGURES):
        return recipe, run_recipe(recipe, folder / "runs")


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished run's folder, to be damaged."""
    return Path(shutil.copytree(finished[1].folder, tmp_path / "copied"))


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """The folder of a run that is long enough to learn something."""
    folder = tmp_path_factory.mktemp("learned")
    return run_recipe(tiny_recipe(folder, "train.examples=1440", "data.held_out=0.1"), folder / "runs").folder


def test_a_run_leaves_its_files_and_no_others(finished):
    _, outcome = finished
    assert sorted(path.name for path in outcome.folder.iterdir()) == [
        "evaluation.json", "galleries.json", "metrics.jsonl", "model.safetensors", "recipe.toml", "report.html",
        "run.json", "tokenizer.json",
    ]  # fmt: skip


def test_metrics_have_a_line_for_every_step(finished):
    recipe, outcome = finished
    steps = [line for line in read_metrics(outcome.folder / "metrics.jsonl") if line["kind"] == "step"]
    assert [line["batch"] for line in steps] == [16] * 15 + [48] * 5
    assert steps[-1]["examples"] == recipe.train.examples == outcome.examples
    assert all(math.isfinite(line["loss"]) and 1.0 <= line["scale"] <= 100.01 for line in steps)


def test_probes_come_at_the_start_between_and_at_the_end(finished):
    _, outcome = finished
    probes = [line for line in read_metrics(outcome.folder / "metrics.jsonl") if line["kind"] == "probe"]
    assert [line["examples"] for line in probes] == [0, 240, 480]
    assert set(probes[0]["recall"]) == {"held_out"}


def test_a_step_past_several_probes_makes_one(tmp_path):
    words = ("train.examples=96", "train.batch=[[0.0, 48], [0.5, 2]]", "evaluate.every=0.1")
    folder = run_recipe(tiny_recipe(tmp_path, *words), tmp_path / "runs").folder
    probes = [line["examples"] for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "probe"]
    # at the first step behind each tenth
    assert probes == [0, 48, 58, 68, 78, 88, 96]


def test_the_table_has_recall_and_chance_of_every_test(finished):
    _, outcome = finished
    results = json.loads((outcome.folder / "evaluation.json").read_text())
    assert [row["test"] for row in results] == [
        "held-out pairs, picture → name",
        "held-out pairs, name → picture",
        "held-out pairs, zero-shot among all names",
    ]
    assert all(0 < row["chance"] < 1 and 0 <= row["recall"]["1"] <= 1 for row in results)
    assert results[2]["choices"] == 32
    assert "held-out pairs, picture → name" in outcome.table


def test_the_run_learns(learned):
    losses = [line["loss"] for line in read_metrics(learned / "metrics.jsonl") if line["kind"] == "step"]
    # by chance the logarithm of the batch, 48
    assert losses[-1] < 0.8 * math.log(48)


@pytest.mark.parametrize("seed", [0, 1])
def test_equal_seeds_alone_give_equal_weights(finished, tmp_path, seed):
    recipe, outcome = finished
    again = run_recipe(recipe.model_copy(update={"seed": seed}), tmp_path)
    first, second = weights(outcome.folder), weights(again.folder)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first) == (seed == recipe.seed)


def test_a_loaded_run_has_the_trained_weights(finished):
    _, outcome = finished
    run = contrastile.load(outcome.folder, device="cpu")
    assert {name: value.tolist() for name, value in run.model.state_dict().items()} == {
        name: value.tolist() for name, value in weights(outcome.folder).items()
    }
    assert not run.model.training


def test_a_loaded_run_encodes_pictures_and_texts_or_none(finished):
    _, outcome = finished
    run = contrastile.load(outcome.folder, device="cpu")
    images = run.encode_image([Image.new("RGB", (40, 20), "white"), Image.new("L", (16, 16))])
    texts = run.encode_text(["letter A left", "letter Q"])
    assert images.shape == texts.shape == (2, 16)
    assert torch.cat([images, texts]).norm(dim=-1).tolist() == pytest.approx([1.0] * 4)
    assert run.encode_image([]).shape == run.encode_text([]).shape == (0, 16)
    line = "<run tiny: encode_image, encode_text and transform; 0.0 million parameters on cpu>"
    assert repr(run) == line


def test_a_single_picture_or_text_outside_a_list_is_refused(finished):
    _, outcome = finished
    run = contrastile.load(outcome.folder, device="cpu")
    picture = Image.new("L", (16, 16))
    for call, sentence in {
        lambda: run.encode_text("letter A"): (
            "`texts` must be a list of texts; got str. Pass [text], where there is one only."
        ),
        lambda: run.encode_text([1]): "`texts` must be a list of texts; got one of int. Decode or convert them first.",
        lambda: run.encode_text(["letter A", None]): (
            "`texts` must be a list of texts; got one of NoneType. Decode or convert them first."
        ),
        lambda: run.encode_image([np.zeros((16, 16), np.uint8)]): (
            "`images` must be a list of images; got one of ndarray. Make them with PIL.Image.fromarray."
        ),
        lambda: run.encode_image(picture): (
            "`images` must be a list of images; got Image. Pass [image], where there is one only."
        ),
        lambda: run.encode_image([picture, "b.png"]): (
            "`images` must be a list of images; got one of str. Open files with PIL.Image.open."
        ),
    }.items():
        assert refusal(call) == sentence


def test_a_curve_of_one_step_can_be_seen():
    point = f"fill: {figures.COLOURS[0]}"
    assert point in figures.curves({"loss": ([512], [1.2])}, title="Loss", stages=[])
    assert point not in figures.curves({"loss": ([512, 600], [1.2, 1.1])}, title="Loss", stages=[])


def test_all_curves_of_a_figure_are_drawn_and_differ():
    names = [f"part {number}" for number in range(6)]
    svg = figures.curves({name: ([1, 2], [3, 4]) for name in names}, title="Recall", stages=[])
    assert all(f"{name}</text>" in svg for name in names)
    assert len(set(re.findall(r'style="(fill: none;[^"]*stroke-width: 1.6[^"]*)"', svg))) == 6


@pytest.mark.parametrize("damaged", [{"loss": None}, {"loss": "low"}, {"shares": {"data": None}}])
def test_a_damaged_step_shifts_no_column(damaged):
    step = {**dict.fromkeys(figures.VALUES, 1.0), "kind": "step", "shares": {"data": 1.0}}
    steps = StepColumns([step, step | damaged, step])
    assert steps["loss"].tolist() == [1.0, 1.0]
    assert steps.shares["data"].tolist() == [1.0, 1.0]


def test_guessing_is_among_the_texts_of_an_accumulated_part(monkeypatch):
    under = []
    monkeypatch.setattr(page, "curves", lambda *_, **how: under.append(how.get("under")) or "")
    step = {**dict.fromkeys(figures.VALUES, 1.0), "kind": "step", "planned": 64, "batch": 64}
    _figures(StepColumns([step]), {"loss": "clip", "accumulate": 4}, IMAGE_TEXT)
    assert under[0]["guessing"][1] == [pytest.approx(math.log(16))]


def test_pictures_and_their_bytes_are_encoded_alike(finished):
    _, outcome = finished
    run = contrastile.load(outcome.folder, device="cpu")
    pictures = [Image.new("L", (16, 16), 100), Image.new("L", (16, 16), 200)]
    assert torch.equal(run.encode_image(pictures), run.encode_image(run.transform(pictures)))


def test_float_pictures_are_refused(finished):
    _, outcome = finished
    run = contrastile.load(outcome.folder, device="cpu")
    assert refusal(run.encode_image, torch.zeros(2, 1, 16, 16)) == (
        "`images` must be Pillow images or a uint8 tensor; got torch.float32. "
        "Give bytes from 0 to 255; floats are made of them here."
    )


def test_damaged_weights_are_refused(copied):
    path = copied / "model.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    assert refusal(contrastile.load, copied) == (
        "`model.safetensors` must be the file that the run wrote; got another checksum. "
        "The file is damaged or another one; train again or restore it."
    )


def test_weights_of_other_towers_are_refused(copied):
    metadata = json.loads((copied / "run.json").read_text())
    metadata["towers"]["image"]["width"] = 16
    (copied / "run.json").write_text(json.dumps(metadata))
    assert refusal(contrastile.load, copied) == (
        f'`run` must hold weights of these towers; got "{copied}", whose shapes differ. '
        "Another version of contrastile wrote it; train again or install that version."
    )


def test_a_missing_gpu_is_refused(finished):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    said = '`device` must be on this machine; got "cuda", and torch finds no GPU. Use "cpu" or "auto".'
    assert refusal(contrastile.load, finished[1].folder, device="cuda") == said


@pytest.mark.parametrize("device", ["gpu", "cuda:x", None])
def test_a_word_that_is_no_device_is_refused(finished, device):
    rule, remedy = 'be "auto", "cpu", "cuda" or "cuda:1"', "Leave it out for the best device of the machine."
    assert (
        refusal(contrastile.load, finished[1].folder, device=device)
        == f"`device` must {rule}; got {device!r}. {remedy}"
    )


def test_a_step_with_sub_batches_or_features_on_the_host_has_the_gradients_of_a_plain_one(tmp_path, monkeypatch):
    gradients, streamed = [], []
    for sub_batch, retain, features in ((48, 1, "device"), (16, 0, "device"), (16, 0, "host")):
        overrides = f"train.sub_batch={sub_batch}", f"train.retain={retain}", f"train.features={features}"
        recipe = tiny_recipe(tmp_path, *overrides, "data.augment=false")
        job = ImageText.open(recipe)
        # features of a CPU's run are where the loss computes; the streamed loss is taken all the same
        monkeypatch.setattr(plan, "waits_on_host", lambda *_, host=features == "host": streamed.append(host) or host)
        job.loss(job.builder.batch(torch.from_numpy(np.resize(job.rows, 48)))).backward()
        gradients.append({name: parameter.grad for name, parameter in job.run.model.named_parameters()})
    assert streamed[-1]
    for name, gradient in gradients[0].items():
        for others in gradients[1:]:
            torch.testing.assert_close(gradient, others[name], rtol=1e-4, atol=1e-6)


def test_accumulated_parts_have_their_own_negatives(tmp_path):
    recipe = tiny_recipe(tmp_path, "data.augment=false", "train.accumulate=3", "optim.clip_norm=0")
    job = ImageText.open(recipe)
    parts = job.parts(torch.arange(12), 1, ALONE)
    expected = sum(job.loss(part).item() for part in parts) / 3
    said, _ = step(job, build_optimizer(job.run.model, recipe.optim), parts)
    assert [len(part) for part in parts] == [4, 4, 4]
    assert said == pytest.approx(expected, rel=1e-5)


def test_equal_ids_are_not_negatives(tmp_path):
    recipe = tiny_recipe(tmp_path, "data.augment=false")
    job = ImageText.open(recipe)
    batch = job.builder.batch(torch.arange(6))
    alike = replace(batch, ids=torch.zeros(6, dtype=torch.int64))
    assert job.loss(alike).item() == pytest.approx(0.0, abs=1e-6)
    assert job.loss(batch).item() > 0.5


def test_the_scale_is_clamped_after_a_step(tmp_path):
    recipe = tiny_recipe(tmp_path)
    job = ImageText.open(recipe)
    with torch.no_grad():
        job.run.model.logit_scale.fill_(9.0)
    step(job, build_optimizer(job.run.model, recipe.optim), [job.builder.batch(torch.arange(8))])
    assert job.run.model.logit_scale.item() == pytest.approx(math.log(100.0))


def test_a_non_finite_loss_does_not_change_the_weights(tmp_path):
    recipe = tiny_recipe(tmp_path)
    job = ImageText.open(recipe)
    model, batch = job.run.model, job.builder.batch(torch.arange(8))
    batch.pixels[3] = math.nan
    before = {name: value.clone() for name, value in model.state_dict().items()}
    value, norm = step(job, build_optimizer(model, recipe.optim), [batch])
    assert math.isnan(value)
    assert math.isnan(norm)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_fp16_gradients_are_unscaled_before_clipping(tmp_path):
    norms = []
    for precision in ("float32", "fp16"):
        recipe = tiny_recipe(tmp_path, "data.augment=false", f"train.precision={precision}")
        job = ImageText.open(recipe)
        scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16", init_scale=2.0**10)
        batch = job.builder.batch(torch.arange(12))
        norms.append(step(job, build_optimizer(job.run.model, recipe.optim), [batch], scaler))
    assert norms[1] == pytest.approx(norms[0], rel=2e-2)


def test_float64_training_is_exact_with_any_sub_batch(tmp_path):
    """Whatever is rounded on the way, to float32 say, would show."""
    found = []
    for sub_batch in ("48", "16"):
        words = ["train.precision=float64", "train.examples=96", f"train.sub_batch={sub_batch}", "evaluate.every=1.0"]
        found.append(run_recipe(tiny_recipe(tmp_path, *words), tmp_path / sub_batch).folder)
    plain, cached = (weights(folder) for folder in found)
    for name, value in plain.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(cached[name], value, rtol=1e-10, atol=1e-12)
    again = contrastile.load(found[1], device="cpu")
    assert all(parameter.dtype == torch.float64 for parameter in again.model.parameters())


def test_fp16_recovers_from_a_loss_scale_that_is_too_large(tmp_path, monkeypatch):
    """The scaler halves its factor until gradients fit: these steps are skipped, and no row of them ends the run."""
    real = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *names, **words: real(*names, **words, init_scale=2.0**40))
    outcome = run_recipe(tiny_recipe(tmp_path, "train.precision=fp16", "train.batch=16"), tmp_path / "runs")
    kinds = [line["kind"] for line in read_metrics(outcome.folder / "metrics.jsonl") if line["kind"] != "probe"]
    skips = kinds.count("skip")
    assert kinds == ["skip"] * skips + ["step"] * (30 - skips)
    assert 3 < skips < 28
    assert all(value.isfinite().all() for value in weights(outcome.folder).values())


@pytest.mark.parametrize("largest", [1e18, 1.0])
def test_a_run_that_diverges_keeps_finite_weights(tmp_path, monkeypatch, capsys, largest):
    """A step multiplies the matrices by a million; the second one's activations overflow, unless the guard is first."""
    monkeypatch.setattr(state, "LARGEST_NORM", largest)
    words = ["optim.learning_rate=1e3", "optim.weight_decay=1e3", "optim.schedule=constant", "optim.warmup=0.0"]
    assert main(["train", str(write_recipe(tmp_path)), *words, "--runs", str(tmp_path / "runs")]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    if largest == 1.0:
        assert said.startswith("the weights must stay below a norm of 1; step 1 left them at ")
        assert said.endswith(". Lower optim.learning_rate or optim.weight_decay; they are kept as they are now.")
    else:
        assert said.endswith("raise optim.warmup; the weights from before these steps are kept.")
    learned = weights(tmp_path / "runs" / "tiny").values()
    assert all(value.isfinite().all() for value in learned)
    assert max(value.abs().max().item() for value in learned) > 1e3


def test_a_failure_that_destroys_the_weights_leaves_those_of_the_folder(finished, tmp_path, monkeypatch):
    recipe, _ = finished

    def destroyed(model):
        next(model.parameters()).detach().fill_(math.nan)
        return torch.tensor(math.nan)

    with interrupted(3):
        folder = run_recipe(recipe, tmp_path).folder
    before = weights(folder)
    monkeypatch.setattr(loop.optim, "weight_norm", destroyed)
    with pytest.raises(FloatingPointError, match="the newest checkpoint has the last finite ones"):
        run_recipe(recipe, tmp_path, resume=True)
    assert all(torch.equal(value, before[name]) for name, value in weights(folder).items())


def test_a_locked_tower_stays_and_its_projection_learns(tmp_path, caplog):
    recipe = tiny_recipe(tmp_path, "model.locked=['image']", "train.examples=64")
    began = ImageText.open(recipe).run.model.state_dict()
    assert "model.locked: the image tower keeps random weights, for it has no folder or checkpoint" in caplog.text
    trained = weights(run_recipe(recipe, tmp_path / "runs").folder)
    moved = {name for name, value in trained.items() if not torch.equal(value, began[name])}
    assert "image.projection.weight" in moved
    assert not [name for name in moved if name.startswith("image.tower")]
    assert [name for name in moved if name.startswith("text.tower")]


def test_the_saved_weights_are_the_ema(tmp_path, finished):
    recipe, outcome = finished
    averaged = recipe.model_copy(update={"optim": recipe.optim.model_copy(update={"ema": 0.9})})
    other = run_recipe(averaged, tmp_path)
    own, mean = weights(outcome.folder), weights(other.folder)
    name = "image.projection.weight"
    assert not torch.equal(own[name], mean[name])
    # the training itself was the same
    losses = [
        [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "step"]
        for folder in (outcome.folder, other.folder)
    ]
    assert losses[0] == losses[1]


def test_a_stopped_run_saves_its_weights(tmp_path):
    with interrupted(at=3):
        outcome = run_recipe(tiny_recipe(tmp_path), tmp_path / "runs")
    assert (outcome.stopped_by, outcome.examples) == (signal.SIGINT, 48)
    assert "held-out pairs, picture → name" in loop.evaluate_run(outcome.folder)
    assert (outcome.folder / "report.html").is_file()


def test_a_failing_step_leaves_the_weights_before_it_saved(tmp_path, monkeypatch):
    real, calls = loop.step, []

    def fail_at_the_third(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise FloatingPointError("no number")
        return real(*arguments)

    monkeypatch.setattr(loop, "step", fail_at_the_third)
    with pytest.raises(FloatingPointError):
        run_recipe(tiny_recipe(tmp_path), tmp_path / "runs")
    assert json.loads((tmp_path / "runs" / "tiny" / "run.json").read_text())["examples"] == 32
    assert contrastile.load(tmp_path / "runs" / "tiny").model is not None


def test_evaluating_again_gives_the_same(finished):
    _, outcome = finished
    before = (outcome.folder / "evaluation.json").read_text()
    with patch.multiple(page, **FIGURES):
        assert loop.evaluate_run(outcome.folder) == outcome.table
    assert (outcome.folder / "evaluation.json").read_text() == before


def test_a_loaded_run_needs_no_data(tmp_path):
    outcome = run_recipe(tiny_recipe(tmp_path, "train.examples=32"), tmp_path / "runs")
    for picture in tmp_path.glob("*.png"):
        picture.unlink()
    (tmp_path / "pictures.tsv").unlink()
    assert contrastile.load(outcome.folder).encode_text(["letter A"]).shape == (1, 16)


def test_failing_measurements_of_one_step_have_distinct_names(tmp_path, monkeypatch):
    """In shards ranks ask each other whether all failed: one answer must not be taken for the next one's."""
    places = []
    monkeypatch.setattr(loop, "is_sharded", lambda model: True)
    monkeypatch.setattr(loop, "all_failed", lambda place, group: places.append(place) or True)
    job = ImageText.open(tiny_recipe(tmp_path))
    monkeypatch.setattr(job, "probe", lambda: 1 / 0)
    with Metrics(None) as metrics:
        trainer = loop.Trainer(job, metrics, TrainResult(), ALONE)
        trainer.probe()
        trainer.probe()
    assert len(places) == len(set(places)) == 2


def test_a_resumed_run_that_is_not_there_begins_with_a_line(tmp_path, caplog):
    for begins in (True, False):
        caplog.clear()
        folder = run_recipe(tiny_recipe(tmp_path, "train.examples=16"), tmp_path / "runs", resume=True).folder
        assert (f"no run {folder} to go on with: a new one begins" in caplog.messages) == begins


def test_a_run_takes_at_least_one_step(tmp_path):
    recipe = tiny_recipe(tmp_path, "train.minutes=0.000001")
    trained = TrainResult()
    with Metrics(None) as metrics:
        loop.train(ImageText.open(recipe), metrics, trained)
    assert (trained.steps, trained.examples) == (1, 48)


def test_a_step_that_would_exceed_the_minutes_is_not_taken(tmp_path, caplog, capsys):
    # a second for each pair: steps of 16 until half of the time is over, then of 48
    with timed(lambda count: count):
        outcome = run_recipe(tiny_recipe(tmp_path, "train.minutes=2.0"), tmp_path / "runs")
    assert outcome.examples == 4 * 16 + 48
    assert "train.minutes=2 ended the training after 112 of 480 pairs" in caplog.messages
    last = [line for line in capsys.readouterr().err.splitlines() if line.startswith("training")][-1]
    assert last.startswith("training 100% · 112 pairs")
    lines = read_metrics(outcome.folder / "metrics.jsonl")
    assert [line["batch"] for line in lines if line["kind"] == "step"] == [16] * 4 + [48]
    assert [line for line in lines if line["kind"] == "end"] == [
        {"kind": "end", "examples": 112, "of": 480, "why": "train.minutes"}
    ]
    facts = json.loads((outcome.folder / "run.json").read_text())
    assert (facts["examples"], facts["planned"], facts["seconds"]) == (112, 480, 112.0)
    assert "; train.minutes ended the run after 112 of 480 pairs" in (outcome.folder / "report.html").read_text()


@pytest.mark.parametrize("examples", [480, 10**12])
def test_a_warmup_of_steps_takes_them_where_minutes_end_the_run(tmp_path, examples):
    words = ("train.minutes=2.0", "train.batch=16", f"train.examples={examples}", "optim.warmup_steps=4")
    with timed(lambda count: count):
        folder = run_recipe(tiny_recipe(tmp_path, *words), tmp_path / "runs").folder
    rates = [line["learning_rate"] for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "step"]
    assert rates[:4] == pytest.approx([3e-3 * (number + 0.5) / 4 for number in range(4)])
    # then the schedule, by the clock
    assert len(rates) == 7
    assert max(rates[4:]) < 0.75 * 3e-3


@pytest.mark.parametrize("threads", [1, 2])
def test_an_end_by_the_clock_is_foretold(tmp_path, caplog, monkeypatch, threads):
    monkeypatch.setattr(loop.os, "getloadavg", lambda: (5.2, 0.0, 0.0))
    monkeypatch.setattr(loop.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with timed(lambda count: count / 4):
        run_recipe(tiny_recipe(tmp_path, "train.minutes=1.0"), tmp_path / "runs")
    (line,) = [line for line in caplog.messages if "will end" in line]
    slow = "4 pairs a second: train.minutes=1 will end the training after about 240 of 480; more minutes learn more"
    busy = "; 5 processes share 2 cores, where OMP_NUM_THREADS=1 may be several times as fast"
    assert line == slow + busy * (threads > 1)


def test_a_run_that_fits_into_its_minutes_takes_all_steps(tmp_path, caplog):
    with timed(lambda count: count):
        outcome = run_recipe(tiny_recipe(tmp_path, "train.minutes=8.0"), tmp_path / "runs")
    assert outcome.examples == 480
    assert "train.minutes" not in caplog.text
    assert "end" not in {line["kind"] for line in read_metrics(outcome.folder / "metrics.jsonl")}
    assert "train.minutes ended" not in (outcome.folder / "report.html").read_text()


def test_the_report_has_no_external_references(finished):
    page = (finished[1].folder / "report.html").read_text()
    addresses = re.findall(r"""(?:src|href|action)\s*=\s*["']([^"']*)""", page) + re.findall(r"url\(([^)]*)\)", page)
    assert addresses
    assert all(address.startswith(("data:", "#")) for address in addresses)
    assert "<script" not in page
    assert "@import" not in page
    assert "<link" not in page


def test_the_report_has_all_sections_and_figures(finished):
    _, outcome = finished
    page = (outcome.folder / "report.html").read_text()
    for heading in ("Results", "How it learned", "What it reads", "What it finds", "How to use it"):
        assert f"<h2>{heading}" in page
    titles = ("Loss", "Recall, picture → name (a sample)", "Scale", "Learning rate", "Pairs per second")
    for title in (*titles, "Where a step's time goes, in percent"):
        assert title.replace("'", "&#x27;") in page or title in page
    assert page.count("<svg") == 6
    assert "still training" not in page
    assert "batch 48" in page
    assert f"run = contrastile.load(&#34;{outcome.folder}&#34;)" in page
    assert "examples = 480" in page
    assert page.count('src="data:image/png;base64,') > 5


def test_the_memory_of_a_step_is_shown_where_the_plain_way_takes_more(copied):
    folder = RunFolder(copied)
    metadata = folder.read_json("run.json")
    need = {"batch": 48, "beyond": 32, "per_example": 2**20, "activations": 32 * 2**20, "matrix": 4 * 48 * 48}
    for peak, shown in ((16, "<h2>Memory"), (200, "peak memory")):
        measured = {"base_bytes": 2**30, "peak_bytes": 2**30 + peak * 2**20, "memory": need}
        folder.write_json("run.json", {**metadata, **measured})
        write_report(folder)
        page = (copied / "report.html").read_text()
        assert [text for text in ("<h2>Memory", "peak memory") if text in page] == [shown]
    assert memory_saved({"base_bytes": 5, "peak_bytes": 5, "memory": need}) is None
    assert memory_saved({"base_bytes": 0, "peak_bytes": 9, "memory": {"activations": 3, "matrix": 0}}) == {
        "step": 9,
        "plain": 12,
    }


def test_a_constant_scale_has_no_figure(finished):
    lines = [line for line in read_metrics(finished[1].folder / "metrics.jsonl") if line["kind"] == "step"]
    for scale, count in ((20.0, 4), (None, 5)):
        changed = [{**line, "scale": scale or line["scale"]} for line in lines]
        assert len(_figures(StepColumns(changed), {"loss": "siglip"}, IMAGE_TEXT)) == count


def test_few_queries_or_choices_are_named_below_the_table():
    def row(test, queries, choices):
        return {"test": test, "queries": queries, "choices": choices, "recall": {"1": 1.0}, "chance": 0.5}

    few, many = row("held-out pairs", 2, 2), row("digits", 1797, 10)
    sentence = "Too few to say anything about the model: held-out pairs (2 among 2). More data, or a larger "
    assert table_text([many, few]).splitlines()[-1] == f"{sentence}data.held_out, helps."
    other = table_text([row("classes, zero-shot", 240, 3)])
    assert other.endswith("about the model: classes, zero-shot (240 among 3). More data helps.")
    assert "Too few" not in table_text([many])


def step_line(seen, planned=48, batch=None, **more):
    values = {"loss": seen / 10, "scale": 14.0, "learning_rate": 0.1, "seconds": 2.0}
    return {"kind": "step", "examples": seen, "batch": batch or planned, "planned": planned, **values, **more}


def test_the_loss_curve_leaves_out_a_short_last_step():
    lines = [step_line(48), step_line(96), step_line(99, batch=3)]
    assert [StepColumns(some).full for some in (lines, lines[:2], lines[2:])] == [2, 2, 1]


def test_the_curves_are_means_of_intervals_with_a_gap_between_batch_sizes():
    lines = [{"kind": "skip"}, *(step_line(seen) for seen in range(1, 5)), step_line(8, 4), step_line(10, 4, batch=2)]
    lines += [{"kind": "probe", "examples": 10}, {"kind": "step", "examples": 11}]
    lines[3] |= {"shares": {"towers": 0.5}}
    lines[5] |= {"shares": {"towers": 0.25, "data": 0.5}}
    steps = StepColumns(lines)
    assert steps.stages == [(-47, "batch 48"), (4, "batch 4")]
    seen, values = steps.averaged(steps["loss"], points=4)
    # intervals of 2.5 examples
    assert seen == [1.5, 3.5, 3.5, 8.0, 10.0]
    assert values == [pytest.approx(0.15), pytest.approx(0.35), pytest.approx(math.nan, nan_ok=True), 0.8, 1.0]
    assert steps.averaged(steps["loss"][:2], slice(2)) == ([1.0, 2.0], [0.1, 0.2])
    assert {part: values.tolist() for part, values in steps.shares.items()} == {
        "data": [0.0, 0.5],
        "towers": [0.5, 0.25],
    }
    assert steps.averaged(steps.shares["towers"], steps.timed)[1][::2] == [0.5, 0.25]
    assert [line["kind"] for line in steps.others] == ["probe"]


def test_a_long_run_is_reported_in_little_memory():
    line = {**step_line(1), "shares": {"towers": 0.5, "data": 0.5}}
    count = 20_000
    tracemalloc.start()
    steps = StepColumns({**line, "examples": seen} for seen in range(1, count + 1))
    steps.averaged(steps["loss"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # as dictionaries each step would take over 1,000 bytes
    assert peak < 300 * count


def test_a_name_with_dollar_signs_is_no_formula():
    name = "cost $5 {or $6 @1"
    page = figures.curves({name: ([1.0], [2.0])}, title="$\\frac$", stages=[], under={"$": ([1.0], [1.0])}, unit="$")
    assert name in page


def test_right_answers_are_marked_in_the_report(learned):
    page = (learned / "report.html").read_text()
    assert '<li class="right">' in page or '<figure class="right">' in page


def test_names_are_escaped_in_the_report(tmp_path):
    write_pictures(tmp_path)
    table = tmp_path / "pictures.tsv"
    recipe = tiny_recipe(tmp_path, "train.examples=32")
    table.write_text(table.read_text().replace("letter", "<script>letter</script>"))
    page = (run_recipe(recipe, tmp_path / "runs").folder / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;letter" in page


def test_skipped_pictures_are_counted_in_the_report(finished):
    page = (finished[1].folder / "report.html").read_text()
    assert "; skipped: 1 \u00d7 missing picture" in page


def test_batches_follow_the_size_of_the_data_where_an_epoch_has_steps(tmp_path, caplog):
    recipe = tiny_recipe(tmp_path, "train.batch=48", "train.examples=96", "train.epoch_steps=1")
    outcome = run_recipe(recipe, tmp_path / "runs")
    rows = json.loads((outcome.folder / "run.json").read_text())
    assert rows["batch"] == [rows["pairs"]] == [18]
    steps = [line for line in read_metrics(outcome.folder / "metrics.jsonl") if line["kind"] == "step"]
    assert [line["batch"] for line in steps] == [18] * 5 + [6]
    assert "batches of 18 at most: train.epoch_steps is 1, for 18 pairs to train on" in caplog.messages
    for pairs, most in ((10**6, 48), (96, 24), (20, 16)):
        assert recipe.train.model_copy(update={"epoch_steps": 4}).fitted(pairs).batch == ((0.0, most),)
    assert recipe.train.model_copy(update={"epoch_steps": None}).fitted(2).batch == ((0.0, 48),)


@pytest.mark.parametrize(
    ("flags", "precision"), [("Features : asimd bf16", "bf16"), ("fma avx512f avx512bw", "float32")]
)
def test_the_precision_follows_the_cpu_and_stays_that_of_the_run(tmp_path, monkeypatch, flags, precision):
    cpu = tmp_path / "cpuinfo"
    cpu.write_text(f"flags : {flags}\n")
    monkeypatch.setattr(run_of_pairs, "CPU", cpu)
    recipe = tiny_recipe(tmp_path, "train.examples=64", "train.precision=auto")
    with interrupted(at=2):
        folder = run_recipe(recipe, tmp_path / "runs").folder
    assert load_any_recipe(folder / "recipe.toml", files=False).train.precision == precision
    for name, there in (("avx512_bf16", True), ("amx_bf16", True), ("avx512bf", False)):
        cpu.write_text(f"flags : fma {name} amx\n")
        assert run_of_pairs.has_bf16(torch.device("cpu")) is there
    # another machine goes on with the precision that the run began with, by either recipe
    cpu.write_text("flags : bf16\n" if precision == "float32" else "flags :\n")
    named = recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": precision})})
    resumed = run_recipe(recipe if precision == "bf16" else named, tmp_path / "runs", resume=True)
    assert (resumed.folder, resumed.stopped_by) == (folder, None)
    whole = run_recipe(named, tmp_path / "whole").folder
    same_run(folder, whole)
