"""A run that is killed anywhere and resumed is, bit for bit, the run that was never interrupted."""

import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
from functools import partial

import pytest
import torch
from PIL import Image, ImageOps
from ranks import as_in_tests, fresh, set_aside
from refusals import refusal
from tiny_runs import interrupted, left, same_run, timed, tiny_recipe

from contrastile.cli.main import main
from contrastile.train import checkpoints, image_text, log, loop
from contrastile.train.batch_builder import BatchBuilder
from contrastile.train.folder import RunFolder, resumed_run
from contrastile.train.image_text import ImageText
from contrastile.train.log import Metrics, read_metrics
from contrastile.train.loop import evaluate_run, run_recipe
from contrastile.train.recipe import load_any_recipe
from contrastile.train.run import same_recipe

# dropout and augmentation are on, and a checkpoint is saved every fourth step
DROPOUT = (
    "model.text={kind='transformers', config={model_type='bert', hidden_size=16, num_hidden_layers=1, "
    "num_attention_heads=2, intermediate_size=16, hidden_dropout_prob=0.2}}"
)
SAVED = ("train.examples=192", "train.batch=16", "save.steps=4")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    recipe = tiny_recipe(folder, DROPOUT, *SAVED)
    whole = run_recipe(recipe, folder / "runs").folder
    # forked processes have its modules
    set_aside()
    return recipe, whole


def _resumed(_, recipe, runs):
    as_in_tests()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    run_recipe(recipe, runs, resume=True)


def killed(recipe, runs, seconds):
    """Resume the run in a process of its own and kill it after `seconds`; whether it was through by then."""
    with fresh(1, _resumed, recipe, runs) as (process,):
        process.join(seconds)
        code = process.exitcode
    process.join()
    assert code in (None, 0)
    return code == 0


def test_kills_at_random_moments_leave_the_result_bit_identical(undisturbed, tmp_path):
    recipe, whole = undisturbed
    lot, kills, stories = random.Random(0), 0, 0
    # a run is killed again and again until it comes through; then another one, until there were six kills
    while kills < 6:
        runs, patience, stories = tmp_path / str(stories), 0.05, stories + 1
        while not killed(recipe, runs, lot.uniform(0, patience)):
            kills += 1
            # long enough to come a little further in the end
            patience *= 1.3
        same_run(runs / recipe.name, whole)


class Killed(BaseException):
    """In the place of a kill: nothing catches it."""


def _dies(_, recipe, runs, at):
    as_in_tests()
    real, steps = loop.step, []

    def step(*arguments):
        steps.append(1)
        if len(steps) == at:
            os._exit(9)
        return real(*arguments)

    loop.step = step
    run_recipe(recipe, runs)


@pytest.mark.parametrize("at", [4, 5, 12])
def test_a_run_killed_after_any_step_resumes_from_its_newest_checkpoint(undisturbed, tmp_path, monkeypatch, at):
    recipe, whole = undisturbed
    with fresh(1, _dies, recipe, tmp_path, at) as (process,):
        process.join()
    assert process.exitcode == 9
    real = loop.step
    count = []
    monkeypatch.setattr(loop, "step", lambda *arguments: count.append(1) or real(*arguments))
    outcome = run_recipe(recipe, tmp_path, resume=True)
    # only what came after the last checkpoint is done again
    assert len(count) == 12 - 4 * ((at - 1) // 4)
    same_run(outcome.folder, whole)
    assert outcome.examples == 192
    assert not (outcome.folder / "checkpoints").exists()


def stopped(recipe, runs, at, number=signal.SIGTERM, times=1):
    with interrupted(at, number, times):
        return run_recipe(recipe, runs)


def test_a_stopped_run_finishes_its_step_saves_and_resumes_there(undisturbed, tmp_path, monkeypatch):
    recipe, whole = undisturbed
    outcome = stopped(recipe, tmp_path, at=6)
    assert (outcome.stopped_by, outcome.examples) == (signal.SIGTERM, 6 * 16)
    assert (outcome.folder / "checkpoints" / "step-000000006" / "manifest.json").is_file()
    real, count = loop.step, []
    monkeypatch.setattr(loop, "step", lambda *arguments: count.append(1) or real(*arguments))
    same_run(run_recipe(recipe, tmp_path, resume=True).folder, whole)
    assert len(count) == 6


def test_a_stop_in_the_last_step_leaves_the_result_bit_identical(undisturbed, tmp_path):
    recipe, whole = undisturbed
    assert stopped(recipe, tmp_path, at=12).stopped_by == signal.SIGTERM
    same_run(run_recipe(recipe, tmp_path, resume=True).folder, whole)


@pytest.mark.parametrize(
    "overrides",
    [
        ("optim.kind=adafactor", "optim.ema=0.9", "train.precision=fp16", "optim.warmup_epochs=2.0"),
        (
            "loss.kind=infonce", "loss.queue=50", "optim.kind=muon", "optim.rate_scaling=sqrt", "optim.base_batch=8",
            "train.batch=[[0.0, 16], [0.5, 48]]",
        ),
        ("loss.kind=siglip", "train.precision=bf16", "train.batch=[[0.0, 16], [0.5, 48]]", "optim.schedule=cooldown"),
    ],
)  # fmt: skip
def test_every_optimizer_and_precision_resumes_bit_identically(tmp_path, overrides):
    recipe = tiny_recipe(tmp_path, "train.examples=240", "train.batch=16", *overrides)
    whole = run_recipe(recipe, tmp_path / "whole").folder
    assert stopped(recipe, tmp_path / "runs", at=7).stopped_by
    same_run(run_recipe(recipe, tmp_path / "runs", resume=True).folder, whole)


def test_a_second_signal_stops_at_once(undisturbed, tmp_path):
    recipe, whole = undisturbed
    with pytest.raises(KeyboardInterrupt) as caught:
        stopped(recipe, tmp_path, at=6, number=signal.SIGTERM, times=2)
    assert caught.value.args == (signal.SIGTERM,)
    folder = tmp_path / recipe.name
    # no weights that may be those of half a step
    assert not (folder / "model.safetensors").exists()
    same_run(run_recipe(recipe, tmp_path, resume=True).folder, whole)


def test_a_failing_evaluation_is_an_error_and_loses_nothing(undisturbed, tmp_path, monkeypatch):
    recipe, whole = undisturbed
    with monkeypatch.context() as patched:
        patched.setattr(ImageText, "report", lambda *_: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            run_recipe(recipe, tmp_path)
    monkeypatch.setattr(loop, "step", None)
    same_run(run_recipe(recipe, tmp_path, resume=True).folder, whole)


def test_a_failing_probe_and_lost_metrics_do_not_change_the_training(undisturbed, tmp_path, monkeypatch, caplog):
    recipe, whole = undisturbed
    monkeypatch.setattr(image_text, "probe", lambda *_: 1 / 0)
    outcome = run_recipe(recipe, tmp_path)
    weights, lines, _ = left(outcome.folder)
    assert all(torch.equal(value, left(whole)[0][name]) for name, value in weights.items())
    assert [line["what"] for line in lines if line["kind"] == "failure"] == ["probe"] * 3
    assert "the probe after 0 pairs failed, the training goes on: ZeroDivisionError" in caplog.text


def test_metrics_on_a_full_disk_lose_whole_lines_only(tmp_path, caplog):
    class Full:
        """Takes half a line, as a disk that fills up does."""

        def __init__(self, file):
            self.file, self.name, self.fileno, self.truncate, self.close = (
                file, file.name, file.fileno, file.truncate, file.close,
            )  # fmt: skip

        def write(self, line):
            return self.file.write(line[: len(line) // 2])

    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        metrics.write("step", loss=1.0)
        file = metrics._file
        metrics._file = Full(file)
        metrics.write("step", loss=2.0)
        metrics.write("step", loss=3.0)
        metrics._file = file
        metrics.write("step", loss=4.0)
    assert [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 4.0]
    assert "cannot be written (the disk is full); the run goes on" in caplog.text
    assert "2 lines of" in caplog.text


def _limited(_, size, words, said):
    as_in_tests()
    with said.open("w", buffering=1) as sys.stderr:
        os.dup2(sys.stderr.fileno(), 2)
        logging.getLogger("contrastile").addHandler(logging.StreamHandler(sys.stderr))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        raise SystemExit(main(words))


def limited(size, words, said):
    """The end of a command in a process whose files cannot grow beyond `size`: a disk that is full, for real.

    Returns its exit code and its output, by way of the file `said`.
    """
    with fresh(1, _limited, size, words, said) as (process,):
        process.join()
    return process.exitcode, said.read_text()


def test_a_full_disk_fails_at_the_end_of_a_run_and_loses_no_checkpoint(undisturbed, tmp_path):
    recipe, whole = undisturbed
    kept = stopped(recipe, tmp_path, at=6).folder / "checkpoints" / "step-000000006"
    words = [str(tmp_path / "tiny.toml"), DROPOUT, *SAVED, "--runs", str(tmp_path), "--resume"]
    (tmp_path / "tiny.toml").write_text((whole.parent.parent / "tiny.toml").read_text())
    before = (tmp_path / recipe.name / "model.safetensors").read_bytes()
    # room for lines of metrics, and for no weights
    code, said = limited(12_000, ["train", *words], tmp_path / "said.txt")
    assert code == 1, said
    assert said.count("could not be saved into") >= 2
    assert said.count("the run goes on, and tries again when the next one is due") >= 2
    last = said.strip().splitlines()[-1]
    assert last.startswith("the weights could not be saved into ")
    assert last.endswith("File too large (os error 27)); what was saved before is there, free the disk and resume")
    assert "Traceback" not in said
    # older files are there, whole
    assert (tmp_path / recipe.name / "model.safetensors").read_bytes() == before
    assert (kept / "manifest.json").is_file()
    assert main(["train", *words]) == 0
    same_run(tmp_path / recipe.name, whole)


class Broken:
    """A stream whose reader has gone away."""

    encoding = "utf-8"

    def isatty(self):
        return False

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self):
        raise BrokenPipeError(32, "Broken pipe")


def test_a_closed_output_does_not_end_a_run(undisturbed, tmp_path, monkeypatch):
    recipe, whole = undisturbed
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", Broken())
        patched.setattr("contrastile.train.log.LINE_EVERY", 0.0)
        outcome = run_recipe(recipe, tmp_path)
    same_run(outcome.folder, whole)


def test_lost_lines_of_metrics_are_logged(tmp_path, caplog):
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        metrics.load_state_dict({"bytes": 10})
    assert "has lost lines from before the checkpoint" in caplog.text


def test_damaged_lines_of_metrics_are_left_out(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "step"}\n{"kind": "st')
    with Metrics(path) as metrics:
        metrics.load_state_dict({"bytes": 100})
        metrics.write("probe", examples=3)
    path.write_bytes(b"\xff\0\n[1, 2]\n7\n" + path.read_bytes() + b'{"kind"')
    assert read_metrics(path) == [{"kind": "step"}, {"kind": "probe", "examples": 3}]
    assert f"3 lines of {path} are damaged and are left out" in caplog.text


def test_a_damaged_tokenizer_is_refused(undisturbed, tmp_path):
    recipe, _ = undisturbed
    path = stopped(recipe, tmp_path, at=2).folder / "tokenizer.json"
    whole = path.read_text()
    for damaged in ("", whole[:700], whole.replace("id", "ix", 1)):
        path.write_text(damaged)
        with pytest.raises(
            ValueError, match=r"^`tokenizer` must be one that can be read; got .*Restore or replace it\.$"
        ):
            run_recipe(recipe, tmp_path, resume=True)


def test_a_non_finite_step_is_skipped_and_counted(tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path, "train.examples=128", "train.batch=16")
    real, calls = BatchBuilder.batch, []

    def spoilt(feed, rows, share):
        batch = real(feed, rows, share)
        calls.append(1)
        if len(calls) in (2, 3, 5):
            batch.pixels[0] = float("nan")
        return batch

    monkeypatch.setattr(BatchBuilder, "batch", spoilt)
    outcome = run_recipe(recipe, tmp_path / "runs")
    lines = read_metrics(outcome.folder / "metrics.jsonl")
    kinds = [line["kind"] for line in lines if line["kind"] != "probe"]
    assert kinds == ["step", "skip", "skip", "step", "skip", "step", "step", "step"]
    assert json.loads((outcome.folder / "run.json").read_text())["skipped_steps"] == 3
    assert all(value.isfinite().all() for value in left(outcome.folder)[0].values())
    assert "3 steps whose loss or gradient was no finite number" in (outcome.folder / "report.html").read_text()


def test_resuming_a_run_that_does_not_exist_begins_it(undisturbed, tmp_path):
    recipe, whole = undisturbed
    (tmp_path / recipe.name).mkdir()
    same_run(run_recipe(recipe, tmp_path, resume=True).folder, whole)
    assert (tmp_path / f"{recipe.name}-1").is_dir()


def test_unused_keys_of_a_recipe_may_change_on_resume(undisturbed, tmp_path):
    recipe, _ = undisturbed
    stopped(recipe, tmp_path, at=2)
    same_recipe(RunFolder(tmp_path / recipe.name), _with_optim(recipe, cooldown=0.5))
    with pytest.raises(ValueError, match=r"`optim\.schedule` must be what the run began with; got .cooldown"):
        same_recipe(RunFolder(tmp_path / recipe.name), _with_optim(recipe, schedule="cooldown"))


def test_a_run_that_bad_pairs_stopped_goes_on_with_more_of_them_allowed(undisturbed, tmp_path):
    recipe, whole = undisturbed
    stopped(recipe, tmp_path, at=2)
    data = recipe.data.model_copy(update={"max_bad_fraction": 0.5})
    same_run(run_recipe(recipe.model_copy(update={"data": data}), tmp_path, resume=True).folder, whole)


def _with_optim(recipe, **change):
    return recipe.model_copy(update={"optim": recipe.optim.model_copy(update=change)})


def test_another_recipe_is_refused(undisturbed, tmp_path):
    recipe, _ = undisturbed
    stopped(recipe, tmp_path, at=2)
    switched = recipe.model_copy(update={"data": recipe.data.model_copy(update={"augment": not recipe.data.augment})})
    value = str(switched.data.augment).lower()
    assert f"`data.augment` must be what the run began with; got {value}. " in refusal(
        run_recipe, switched, tmp_path, resume=True
    )
    siglip = load_any_recipe(tmp_path / recipe.name / "recipe.toml", ["loss.kind=siglip"], files=False)
    # before loss.bias, which that kind has beside it
    assert refusal(same_recipe, RunFolder(tmp_path / recipe.name), siglip).startswith(
        '`loss.kind` must be what the run began with; got "siglip". It began with "clip": go on with '
    )
    other = recipe.model_copy(update={"optim": recipe.optim.model_copy(update={"learning_rate": 0.5})})
    assert refusal(run_recipe, other, tmp_path, resume=True) == (
        "`optim.learning_rate` must be what the run began with; got 0.5. "
        f"It began with 0.003: go on with contrastile train {tmp_path / recipe.name}/recipe.toml --runs {tmp_path} "
        "--resume, or train anew, without --resume."
    )


def _change(picture):
    with Image.open(picture) as image:
        ImageOps.invert(image).save(picture)


def test_other_pictures_under_the_same_captions_are_refused(tmp_path):
    recipe = tiny_recipe(tmp_path)
    stopped(recipe, tmp_path, at=2)
    _change(tmp_path / "A-left.png")
    with pytest.raises(ValueError, match=r"`checkpoint` must be this run's own, of pictures \w+; got .*, of pictures"):
        run_recipe(recipe, tmp_path, resume=True)


def test_measuring_a_finished_run_on_other_data_is_logged(tmp_path, caplog):
    recipe = tiny_recipe(tmp_path)
    folder = run_recipe(recipe, tmp_path).folder
    evaluate_run(folder)
    assert "not those of the training" not in caplog.text
    _change(tmp_path / "A-left.png")
    for measure in (partial(evaluate_run, folder), partial(run_recipe, recipe, tmp_path, resume=True)):
        caplog.clear()
        measure()
        assert f"{folder}: the data are not those of the training" in caplog.text


def test_resumed_steps_do_not_count_for_the_rate_and_a_large_batch_is_logged(tmp_path, monkeypatch, capsys, caplog):
    recipe = tiny_recipe(tmp_path)
    stopped(recipe, tmp_path, at=3)
    assert "train.batch is 48, of 18 pairs to train on: they come several times in a step" in caplog.text
    capsys.readouterr()
    begun = []
    monkeypatch.setattr(log.Bar, "close", lambda bar: begun.append((bar._label, bar._begun)))
    run_recipe(recipe, tmp_path, resume=True)
    assert ("training", 48) in begun


def test_remains_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / ".run.json.part").write_text("hal")
    (tmp_path / "recipe.toml").write_text("")
    with resumed_run(RunFolder(tmp_path)):
        assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


def test_files_of_the_user_in_a_run_stay(undisturbed, tmp_path):
    recipe, whole = undisturbed
    folder = stopped(recipe, tmp_path, at=6).folder
    for name in (".git", ".wide.part", "checkpoints/.mine"):
        (folder / name).mkdir()
    for name in (".notes.md", ".part", "checkpoints/notes.md", "checkpoints/step-notes"):
        (folder / name).write_text("mine")
    (folder / ".linked").symlink_to(tmp_path)
    checkpoint = folder / "checkpoints" / "step-000000006"
    for copy in (".bak", "-keep", "-1"):
        shutil.copytree(checkpoint, checkpoint.with_name(checkpoint.name + copy))
    own = {checkpoint, checkpoint.with_name("step-000000004"), folder / "run.id"}
    before = {path for path in folder.rglob("*") if not own & {path, *path.parents}}
    same_run(run_recipe(recipe, tmp_path, resume=True).folder, whole)
    assert not [path for path in before if not os.path.lexists(path)]
    assert not [path for path in (folder / "checkpoints").iterdir() if path not in before]


def test_a_checkpoint_of_another_run_is_refused(undisturbed, tmp_path):
    recipe, _ = undisturbed
    folder = stopped(recipe, tmp_path / "one", at=2).folder
    for name, seed in (("another", recipe.seed + 1), ("alike", recipe.seed)):
        other = stopped(recipe.model_copy(update={"seed": seed}), tmp_path / name, at=6).folder
        step = folder / "checkpoints" / "step-000000006"
        shutil.copytree(other / "checkpoints" / step.name, step)
        with pytest.raises(ValueError) as caught:
            run_recipe(recipe, tmp_path / "one", resume=True)
        ids = [(at / "run.id").read_text().strip() for at in (folder, other)]
        key, own, got = ("seed", 0, 1) if name == "another" else ("run", *ids)
        assert str(caught.value) == (
            f'`checkpoint` must be this run\'s own, of {key} {own}; got "{step}", of {key} {got}. '
            "Move it away, or train anew, without --resume."
        )
        shutil.rmtree(step)


def test_checkpoints_of_earlier_versions_without_an_origin_resume(undisturbed, tmp_path, monkeypatch):
    recipe, whole = undisturbed
    folder, probe = stopped(recipe, tmp_path, at=6).folder, image_text.probe
    step = folder / "checkpoints" / "step-000000006"
    (folder / "run.id").unlink()
    plain = json.loads((step / "state.json").read_text())
    del plain["origin"]
    (step / "state.json").write_text(json.dumps(plain))
    files = {path.name: checkpoints._size_and_checksum(path) for path in step.iterdir() if path.name != "manifest.json"}
    (step / "manifest.json").write_text(checkpoints._manifest(files))
    drawn = []
    monkeypatch.setattr(image_text, "probe", lambda *_: drawn.append((folder / "run.id").read_text()) or probe(*_))
    same_run(run_recipe(recipe, tmp_path, resume=True).folder, whole)
    assert len(drawn[0]) == 17
    # it is of use only while there are checkpoints
    assert not (folder / "run.id").exists()


def test_a_run_whose_folder_is_moved_writes_nothing_into_another(undisturbed, tmp_path, monkeypatch):
    recipe, whole = undisturbed
    real, steps, path = loop.step, [], tmp_path / recipe.name

    def step(*arguments):
        steps.append(1)
        if len(steps) == 3:
            path.rename(tmp_path / "moved")
            path.mkdir()
        return real(*arguments)

    monkeypatch.setattr(loop, "step", step)
    assert refusal(run_recipe, recipe, tmp_path) == (
        f'`run` must find its folder where it began; got another one at "{path}". '
        "Move its own back there and go on with --resume."
    )
    assert list(path.iterdir()) == []
    # at the next checkpoint, which is saved every fourth step
    assert len(steps) == 4
    # its values are in its own
    path.rmdir()
    (tmp_path / "moved").rename(path)
    monkeypatch.setattr(loop, "step", real)
    same_run(run_recipe(recipe, tmp_path, resume=True).folder, whole)


def test_a_resumed_run_restores_the_time_of_its_steps(tmp_path):
    recipe = tiny_recipe(tmp_path, "train.minutes=2.0")
    with timed(lambda count: count):
        # the step of 48 pairs from 64 to 112 seconds: there is no time for another one
        assert stopped(recipe, tmp_path, at=5).stopped_by
    with timed(lambda count: count):
        outcome = run_recipe(recipe, tmp_path, resume=True)
    assert outcome.examples == 112
    assert [line["kind"] for line in read_metrics(outcome.folder / "metrics.jsonl")].count("end") == 1
