"""A whole run, small: what it leaves behind, that it learns, that it repeats, that it stops well."""

import json
import math
import re
import signal

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_runs import tiny_recipe, weights, write_pictures

import contrastile
from contrastile.train import figures, loop
from contrastile.train.clock import Clock
from contrastile.train.facts import Trained
from contrastile.train.feed import Batch
from contrastile.train.image_text import ImageText
from contrastile.train.log import Metrics, read_metrics
from contrastile.train.loop import run_recipe, step
from contrastile.train.optim import build_optimizer
from contrastile.train.ranks import ALONE
from contrastile.train.recipe import load_recipe
from contrastile.train.report import full


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run that several tests look at."""
    folder = tmp_path_factory.mktemp("run")
    recipe = tiny_recipe(folder)
    return recipe, run_recipe(recipe, folder / "runs")


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """The folder of a run that is long enough to learn something."""
    folder = tmp_path_factory.mktemp("learned")
    return run_recipe(tiny_recipe(folder, "train.examples=1440", "data.held_out=0.1"), folder / "runs").folder


def test_a_run_leaves_its_files_and_no_others(finished):
    _, outcome = finished
    assert sorted(path.name for path in outcome.folder.iterdir()) == [
        "evaluation.json",
        "galleries.json",
        "metrics.jsonl",
        "model.safetensors",
        "recipe.toml",
        "report.html",
        "run.json",
        "tokenizer.json",
    ]


def test_the_resolved_recipe_reads_back(finished):
    recipe, outcome = finished
    assert load_recipe(outcome.folder / "recipe.toml") == recipe


def test_metrics_tell_of_every_step(finished):
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


def test_the_table_has_every_test_beside_its_chance(finished):
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


def test_the_same_seed_gives_the_same_weights(finished, tmp_path):
    recipe, outcome = finished
    again = run_recipe(recipe, tmp_path)
    first, second = weights(outcome.folder), weights(again.folder)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_seed_gives_other_weights(finished, tmp_path):
    recipe, outcome = finished
    again = run_recipe(recipe.model_copy(update={"seed": 1}), tmp_path)
    first, second = weights(outcome.folder), weights(again.folder)
    assert not all(torch.equal(first[name], second[name]) for name in first)


def test_a_loaded_run_is_the_trained_one(finished):
    _, outcome = finished
    run = contrastile.load(outcome.folder, device="cpu")
    assert {name: value.tolist() for name, value in run.model.state_dict().items()} == {
        name: value.tolist() for name, value in weights(outcome.folder).items()
    }
    assert not run.model.training


def test_a_loaded_run_reads_pictures_and_texts(finished):
    _, outcome = finished
    run = contrastile.load(outcome.folder, device="cpu")
    images = run.encode_image([Image.new("RGB", (40, 20), "white"), Image.new("L", (16, 16))])
    texts = run.encode_text(["letter A left", "letter Q"])
    assert images.shape == texts.shape == (2, 16)
    assert torch.cat([images, texts]).norm(dim=-1).tolist() == pytest.approx([1.0] * 4)


def test_one_picture_or_text_goes_into_a_list(finished):
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
            "`images` must be a list of pictures; got one of ndarray. Make them with PIL.Image.fromarray."
        ),
        lambda: run.encode_image(picture): (
            "`images` must be a list of pictures; got Image. Pass [picture], where there is one only."
        ),
        lambda: run.encode_image([picture, "b.png"]): (
            "`images` must be a list of pictures; got one of str. Open files with PIL.Image.open."
        ),
    }.items():
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value) == sentence


def test_no_pictures_and_no_texts_have_no_features(finished):
    _, outcome = finished
    run = contrastile.load(outcome.folder, device="cpu")
    assert run.encode_image([]).shape == run.encode_text([]).shape == (0, 16)


@pytest.mark.drawn
def test_a_curve_of_one_step_can_be_seen():
    point = f"fill: {figures.COLOURS[0]}"
    assert point in figures.curves({"loss": ([512], [1.2])}, title="Loss", stages=[])
    assert point not in figures.curves({"loss": ([512, 600], [1.2, 1.1])}, title="Loss", stages=[])


def test_pictures_and_their_bytes_are_encoded_alike(finished):
    _, outcome = finished
    run = contrastile.load(outcome.folder, device="cpu")
    pictures = [Image.new("L", (16, 16), 100), Image.new("L", (16, 16), 200)]
    assert torch.equal(run.encode_image(pictures), run.encode_image(run.transform(pictures)))


def test_floats_are_no_pictures(finished):
    _, outcome = finished
    run = contrastile.load(outcome.folder, device="cpu")
    with pytest.raises(ValueError) as caught:
        run.encode_image(torch.zeros(2, 1, 16, 16))
    assert str(caught.value) == (
        "`images` must be Pillow pictures or a uint8 tensor; got torch.float32. "
        "Give bytes from 0 to 255; floats are made of them here."
    )


def test_damaged_weights_are_refused(tmp_path):
    outcome = run_recipe(tiny_recipe(tmp_path, "train.examples=32"), tmp_path / "runs")
    path = outcome.folder / "model.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError) as caught:
        contrastile.load(outcome.folder)
    assert str(caught.value) == (
        "`model.safetensors` must be the file that the run wrote; got another checksum. "
        "The file is damaged or another one; train again or restore it."
    )


def test_weights_of_other_towers_are_refused(tmp_path):
    outcome = run_recipe(tiny_recipe(tmp_path, "train.examples=32"), tmp_path / "runs")
    facts = json.loads((outcome.folder / "run.json").read_text())
    facts["towers"]["image"]["width"] = 16
    (outcome.folder / "run.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError) as caught:
        contrastile.load(outcome.folder)
    assert str(caught.value) == (
        f'`run` must hold weights of these towers; got "{outcome.folder}", whose shapes differ. '
        "Another version of contrastile wrote it; train again or install that version."
    )


def test_towers_of_the_library_train_and_load(tmp_path):
    size = "hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16"
    vision = f"model.image={{kind='transformers', config={{model_type='vit', patch_size=8, {size}}}}}"
    text = f"model.text={{kind='transformers', config={{model_type='bert', {size}}}}}"
    outcome = run_recipe(tiny_recipe(tmp_path, vision, text, "train.examples=32"), tmp_path / "runs")
    assert contrastile.load(outcome.folder).encode_text(["letter A"]).shape == (1, 16)


def test_a_gpu_that_is_not_there_is_refused(finished):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError) as caught:
        contrastile.load(finished[1].folder, device="cuda")
    said = '`device` must be on this machine; got "cuda", and torch finds no GPU. Use "cpu" or "auto".'
    assert str(caught.value) == said


def test_the_cached_step_is_the_plain_one(tmp_path):
    gradients = []
    for sub_batch, retain in ((16, 0), (48, 1)):
        overrides = f"train.sub_batch={sub_batch}", f"train.retain={retain}"
        recipe = tiny_recipe(tmp_path, *overrides, "data.augment=false")
        job = ImageText.open(recipe)
        job.loss(job.feed.batch(torch.from_numpy(np.resize(job.rows, 48)))).backward()
        gradients.append({name: parameter.grad for name, parameter in job.run.model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-6)


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
    batch = job.feed.batch(torch.arange(6))
    alike = Batch(batch.pixels, batch.tokens, torch.zeros(6, dtype=torch.int64))
    assert job.loss(alike).item() == pytest.approx(0.0, abs=1e-6)
    assert job.loss(batch).item() > 0.5


def test_the_scale_is_clamped_after_a_step(tmp_path):
    recipe = tiny_recipe(tmp_path)
    job = ImageText.open(recipe)
    with torch.no_grad():
        job.run.model.logit_scale.fill_(9.0)
    step(job, build_optimizer(job.run.model, recipe.optim), [job.feed.batch(torch.arange(8))])
    assert job.run.model.logit_scale.item() == pytest.approx(math.log(100.0))


def test_a_loss_that_is_no_number_never_reaches_the_weights(tmp_path):
    recipe = tiny_recipe(tmp_path)
    job = ImageText.open(recipe)
    model, batch = job.run.model, job.feed.batch(torch.arange(8))
    batch.pixels[3] = math.nan
    before = {name: value.clone() for name, value in model.state_dict().items()}
    value, norm = step(job, build_optimizer(model, recipe.optim), [batch])
    assert math.isnan(value)
    assert math.isnan(norm)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_siglip_bf16_and_adafactor_run(tmp_path):
    overrides = ["loss.kind=siglip", "optim.kind=adafactor", "train.precision=bf16", "train.examples=96"]
    outcome = run_recipe(tiny_recipe(tmp_path, *overrides), tmp_path / "runs")
    assert weights(outcome.folder)["logit_bias"].shape == ()


def test_fp16_is_scaled_and_comes_back_to_its_size(tmp_path):
    norms = []
    for precision in ("float32", "fp16"):
        recipe = tiny_recipe(tmp_path, "data.augment=false", f"train.precision={precision}")
        job = ImageText.open(recipe)
        scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16", init_scale=2.0**10)
        batch = job.feed.batch(torch.arange(12))
        norms.append(step(job, build_optimizer(job.run.model, recipe.optim), [batch], scaler))
    assert norms[1] == pytest.approx(norms[0], rel=2e-2)


def test_in_float64_all_ways_end_with_the_same_weights(tmp_path):
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


def test_fp16_gets_over_a_factor_that_is_too_large(tmp_path, monkeypatch):
    """The scaler halves its factor until gradients fit: these steps are skipped, and no row of them ends the run."""
    real = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *names, **words: real(*names, **words, init_scale=2.0**40))
    outcome = run_recipe(tiny_recipe(tmp_path, "train.precision=fp16", "train.batch=16"), tmp_path / "runs")
    kinds = [line["kind"] for line in read_metrics(outcome.folder / "metrics.jsonl") if line["kind"] != "probe"]
    skips = kinds.count("skip")
    assert kinds == ["skip"] * skips + ["step"] * (30 - skips)
    assert 3 < skips < 28
    assert all(value.isfinite().all() for value in weights(outcome.folder).values())


def test_a_locked_tower_stays_and_its_projection_learns(tmp_path):
    recipe = tiny_recipe(tmp_path, "model.locked=['image']", "train.examples=64")
    began = ImageText.open(recipe).run.model.state_dict()
    trained = weights(run_recipe(recipe, tmp_path / "runs").folder)
    moved = {name for name, value in trained.items() if not torch.equal(value, began[name])}
    assert "image.projection.weight" in moved
    assert not [name for name in moved if name.startswith("image.tower")]
    assert [name for name in moved if name.startswith("text.tower")]


def test_what_is_kept_is_the_average(tmp_path, finished):
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


def test_a_stop_keeps_what_was_learned(tmp_path, monkeypatch):
    real, calls = loop.step, []

    def stop_at_the_third(*arguments):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(loop, "step", stop_at_the_third)
    outcome = run_recipe(tiny_recipe(tmp_path), tmp_path / "runs")
    assert (outcome.stopped_by, outcome.examples) == (signal.SIGINT, 48)
    assert "held-out pairs, picture → name" in loop.evaluate_run(outcome.folder)
    assert (outcome.folder / "report.html").is_file()


def test_a_failing_step_keeps_the_weights_before_it(tmp_path, monkeypatch):
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


@pytest.mark.drawn
def test_evaluating_again_gives_the_same(finished):
    _, outcome = finished
    before = (outcome.folder / "evaluation.json").read_text()
    assert loop.evaluate_run(outcome.folder) == outcome.table
    assert (outcome.folder / "evaluation.json").read_text() == before


def test_a_loaded_run_needs_no_data(tmp_path):
    outcome = run_recipe(tiny_recipe(tmp_path, "train.examples=32"), tmp_path / "runs")
    for picture in tmp_path.glob("*.png"):
        picture.unlink()
    (tmp_path / "pictures.tsv").unlink()
    assert contrastile.load(outcome.folder).encode_text(["letter A"]).shape == (1, 16)


def test_measurements_of_one_step_that_fail_are_told_apart(tmp_path, monkeypatch):
    """In shards ranks ask each other whether all failed: one answer must not be taken for the next one's."""
    places = []
    monkeypatch.setattr(loop, "is_sharded", lambda model: True)
    monkeypatch.setattr(loop, "all_failed", lambda place, group: places.append(place) or True)
    job = ImageText.open(tiny_recipe(tmp_path))
    monkeypatch.setattr(job, "probe", lambda: 1 / 0)
    with Metrics(None) as metrics:
        course = loop.Training(job, metrics, Trained(), ALONE)
        course.probe()
        course.probe()
    assert len(places) == len(set(places)) == 2


def test_minutes_end_a_run_that_is_not_through(tmp_path, caplog, capsys):
    outcome = run_recipe(tiny_recipe(tmp_path, "train.examples=10000000", "train.minutes=0.01"), tmp_path / "runs")
    assert 0 < outcome.examples < 10_000_000
    said = f"train.minutes=0.01 ended the training after {outcome.examples} of 10000000 pairs"
    assert said in caplog.messages
    last = [line for line in capsys.readouterr().err.splitlines() if line.startswith("training")][-1]
    assert last.startswith(f"training 100% · {outcome.examples:,} pairs")


def test_a_run_makes_one_step_at_least(tmp_path):
    recipe = tiny_recipe(tmp_path, "train.minutes=0.000001")
    trained = Trained()
    with Metrics(None) as metrics:
        loop.train(ImageText.open(recipe), metrics, trained)
    assert (trained.steps, trained.examples) == (1, 48)


def test_the_clock_goes_by_what_is_further():
    by_examples, by_time = Clock(100, minutes=None), Clock(10**9, minutes=1.0)
    by_examples.seen = 25
    by_time.now = 30.0
    assert by_examples.share() == 0.25
    assert by_examples.share(ahead=5) == 0.3
    assert by_time.share() == pytest.approx(0.5, abs=0.01)


def test_the_clock_foresees_the_end():
    clock = Clock(10**9, minutes=1.0, seen=1000)
    clock.now = 15.0
    assert clock.expected() == pytest.approx(4000, rel=0.02)


def test_the_report_needs_nothing_beside_it(finished):
    page = (finished[1].folder / "report.html").read_text()
    addresses = re.findall(r"""(?:src|href|action)\s*=\s*["']([^"']*)""", page) + re.findall(r"url\(([^)]*)\)", page)
    assert addresses
    assert all(address.startswith(("data:", "#")) for address in addresses)
    assert "<script" not in page
    assert "@import" not in page
    assert "<link" not in page


def test_the_report_says_what_it_must(finished):
    _, outcome = finished
    page = (outcome.folder / "report.html").read_text()
    for heading in ("Results", "How it learned", "Memory", "What it reads", "What it finds"):
        assert f"<h2>{heading}" in page
    titles = ("Loss", "Recall, picture → name (a sample)", "Scale", "Learning rate", "Pairs per second")
    for title in (*titles, "Where a step's time goes, in percent"):
        assert title.replace("'", "&#x27;") in page or title in page
    assert page.count("<svg") == 6
    assert "still training" not in page
    assert "batch 48" in page
    assert "the dense way" in page
    assert "examples = 480" in page
    assert page.count('src="data:image/png;base64,') > 5


def test_the_short_last_step_is_no_drop_of_the_loss():
    steps = [{"batch": 48, "planned": 48}, {"batch": 48, "planned": 48}, {"batch": 3, "planned": 48}]
    assert full(steps) == steps[:2]
    assert full(steps[:2]) == steps[:2]
    assert full(steps[2:]) == steps[2:]


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
