"""Watching a run: where a step's time goes, who is told, the report meanwhile; and that none of it can end one."""

import json
import signal
import sys
import types
from functools import partial
from itertools import count
from unittest.mock import patch

import pytest
import torch
from ranks import FIGURES
from refusals import refusal
from test_train_resume import Killed
from tiny_runs import interrupted, left, same_run, tiny_recipe
from torch import nn

from contrastile.train import loop
from contrastile.train.folder import RunFolder
from contrastile.train.log import Metrics, read_metrics, scalars
from contrastile.train.loop import run_recipe
from contrastile.train.report import page as report_page
from contrastile.train.state import HostEvent, Stopwatch, shares_text

SHORT = ("train.examples=96", "train.batch=16", "save.steps=2")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    recipe = tiny_recipe(folder, *SHORT)
    return recipe, run_recipe(recipe, folder / "runs").folder


def logged(recipe, **named):
    return recipe.model_copy(update={"log": recipe.log.model_copy(update=named)})


# --- where the time goes


class Counted(HostEvent):
    """An event of a clock that is one further at every look."""

    clock = count()

    def record(self):
        self.moment = next(self.clock)


def test_every_part_of_a_step_is_marked_in_both_directions():
    watch = Stopwatch(Counted)
    towers = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*towers[0].parameters(), *towers[1].parameters()], lr=0.1)
    watch.follow(optimizer)
    loss = watch.around(lambda one, other: (one * other).sum())
    seen = []
    for _ in range(2):
        watch.start()
        watch.mark("towers")
        loss(*(tower(torch.ones(2, 3)) for tower in towers)).backward()
        optimizer.step()
        seen.append(watch.read(6)["shares"])
    # data; towers; loss, forward and backward; the towers' backwards, one after the other
    assert seen[0] == {"data": round(1 / 6, 4), "loss": round(2 / 6, 4), "towers": round(3 / 6, 4)}
    # and the optimizer's step before
    counts = {"data": 1, "loss": 2, "optimizer": 1, "towers": 3}
    assert seen[1] == {part: round(count / 7, 4) for part, count in counts.items()}


def test_the_marks_of_a_skipped_step_are_dropped():
    watch = Stopwatch(Counted)
    for _ in range(3):
        watch.start()
        watch.mark("towers")
        assert watch.read(1)["shares"] == {"data": 1.0}


def test_a_mark_does_not_wait_for_the_device():
    waited = []

    class Event(HostEvent):
        def synchronize(self):
            waited.append(self)

    watch = Stopwatch(Event)
    watch.start()
    watch.mark("towers")
    assert waited == []
    assert watch.read(1)["shares"] == {"data": 1.0}
    assert len(waited) == 1


@pytest.mark.parametrize("overrides", [(), ("train.accumulate=3", "train.retain=0", "loss.kind=siglip")])
def test_metrics_have_the_shares_of_a_steps_time(tmp_path, overrides):
    recipe = tiny_recipe(tmp_path, "train.examples=96", *overrides)
    lines = read_metrics(run_recipe(recipe, tmp_path / "runs").folder / "metrics.jsonl")
    steps = [line for line in lines if line["kind"] == "step"]
    for line in steps[1:]:
        assert line["shares"].keys() == {"towers", "loss", "optimizer", "data"}
        assert sum(line["shares"].values()) == pytest.approx(1.0, abs=1e-3)
        assert line["speed"] == pytest.approx(line["batch"] / line["seconds"])
        assert line["peak_bytes"] > 0
    assert "optimizer" not in steps[0]["shares"]


def test_the_log_line_has_all_values(tmp_path, capsys):
    run_recipe(tiny_recipe(tmp_path, "train.examples=64"), tmp_path / "runs")
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("training 100%"))
    for fact in ("pairs/s", "loss ", "norm ", "rate ", "scale ", "time ", "peak ", "towers ", "data "):
        assert fact in line
    assert shares_text({"data": 0.031, "towers": 0.969}) == "towers 97%, data 3%"


def test_the_rate_of_a_batch_is_in_the_metrics(tmp_path):
    words = "optim.rate_scaling=sqrt", "optim.base_batch=16", "optim.schedule=constant", "optim.warmup=0.0"
    recipe = tiny_recipe(tmp_path, "train.examples=480", *words)
    lines = read_metrics(run_recipe(recipe, tmp_path / "runs").folder / "metrics.jsonl")
    rates = {line["planned"]: line["learning_rate"] for line in lines if line["kind"] == "step"}
    assert rates == {16: pytest.approx(3e-3), 48: pytest.approx(3e-3 * 3**0.5)}


# --- who is told


class Raising:
    def __init__(self, at=0):
        self.heard, self.at = 0, at

    def log(self, kind, values):
        self.heard += 1
        if self.heard > self.at:
            raise ConnectionError("no way there")

    def close(self):
        raise OSError("nor back")


def test_a_failing_listener_is_logged_once_and_the_file_is_complete(tmp_path, caplog):
    listener = Raising(at=2)
    with Metrics(tmp_path / "metrics.jsonl", {"it": listener}) as metrics:
        for step in range(5):
            metrics.write("step", examples=step)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5
    assert listener.heard == 3
    assert [record.getMessage() for record in caplog.records] == [
        "it failed and is told nothing more; the run goes on: ConnectionError('no way there')"
    ]


def test_a_listener_that_fails_at_its_close_is_logged(tmp_path, caplog):
    with Metrics(tmp_path / "metrics.jsonl", {"it": Raising(at=9)}) as metrics:
        metrics.write("step", examples=1)
    assert "OSError('nor back')" in caplog.text


def fake_wandb(monkeypatch):
    """A wandb that keeps what it is told by run id, and refuses steps that do not rise, as the real one does."""
    told = types.SimpleNamespace(runs={}, inits=[], finished=0)

    class Run:
        def __init__(self, name):
            self.steps = told.runs.setdefault(name, {})

        def log(self, values, step):
            if step >= max(self.steps, default=0):
                self.steps.setdefault(step, {}).update(values)

        def finish(self):
            told.finished += 1

    def init(**words):
        told.inits.append(words)
        return Run(words["id"])

    module = types.ModuleType("wandb")
    module.__spec__ = types.SimpleNamespace()
    module.init, module.Settings = init, lambda **words: words
    monkeypatch.setitem(sys.modules, "wandb", module)
    return told


def test_wandb_receives_steps_and_probes_and_the_run_is_the_same(plain, tmp_path, monkeypatch):
    told = fake_wandb(monkeypatch)
    recipe, whole = plain
    folder = run_recipe(logged(recipe, wandb="letters"), tmp_path).folder
    same_run(folder, whole)
    ((name, steps),) = told.runs.items()
    (words,) = told.inits
    assert (words["project"], words["name"], words["resume"]) == ("letters", "tiny", "allow")
    assert words["config"]["optim"]["learning_rate"] == 3e-3
    assert json.loads((folder / "wandb.json").read_text()) == {"id": name}
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "step"]
    assert [steps[line["examples"]]["step/loss"] for line in lines] == [line["loss"] for line in lines]
    assert "probe/recall/held_out/1" in steps[0]
    assert steps[96]["step/shares/towers"] > 0
    assert told.finished == 1


def lost_at(monkeypatch, at):
    real, steps = loop.step, []

    def lost(*arguments):
        steps.append(1)
        if len(steps) == at:
            raise Killed
        return real(*arguments)

    monkeypatch.setattr(loop, "step", lost)


def test_a_resumed_run_continues_in_wandb_without_repeated_steps(plain, tmp_path, monkeypatch):
    told = fake_wandb(monkeypatch)
    recipe, whole = plain
    with monkeypatch.context() as patched:
        lost_at(patched, 4)
        with pytest.raises(Killed):
            run_recipe(logged(recipe, wandb="letters"), tmp_path)
    # the third step is behind the last checkpoint and is taken again
    folder = run_recipe(logged(recipe, wandb="letters"), tmp_path, resume=True).folder
    same_run(folder, whole)
    assert [words["id"] for words in told.inits] == [next(iter(told.runs))] * 2
    (steps,) = told.runs.values()
    assert [step for step, values in steps.items() if "step/loss" in values] == [16, 32, 48, 64, 80, 96]


class FakeWriter:
    """As TensorBoard shows it: scalars by tag and step, those purged that came before a restart."""

    def __init__(self, files, folder, purge_step):
        self.shown = files.setdefault(folder, {})
        for tag in self.shown:
            self.shown[tag] = [(step, value) for step, value in self.shown[tag] if step < purge_step]

    def add_scalar(self, tag, value, global_step):
        self.shown.setdefault(tag, []).append((global_step, value))

    def flush(self):
        pass

    def close(self):
        pass


def test_a_resumed_run_continues_in_tensorboard_without_repeated_steps(plain, tmp_path, monkeypatch):
    module = types.ModuleType("torch.utils.tensorboard")
    files = {}
    module.SummaryWriter = partial(FakeWriter, files)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    recipe, whole = plain
    with monkeypatch.context() as patched:
        lost_at(patched, 4)
        with pytest.raises(Killed):
            run_recipe(logged(recipe, tensorboard=True), tmp_path)
    folder = run_recipe(logged(recipe, tensorboard=True), tmp_path, resume=True).folder
    same_run(folder, whole)
    shown = files[str(folder / "tensorboard")]
    assert [step for step, _ in shown["step/loss"]] == [16, 32, 48, 64, 80, 96]
    assert [step for step, _ in shown["probe/recall/held_out/1"]] == [0, 48, 96]


def test_the_real_tensorboard_reads_it_back(plain, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe, _ = plain
    folder = run_recipe(logged(recipe, tensorboard=True), tmp_path).folder
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "step"]
    shown = [(event.step, event.value) for event in events.Scalars("step/loss")]
    assert shown == [(line["examples"], pytest.approx(line["loss"])) for line in lines]


def test_the_real_wandb_takes_it_without_a_server(plain, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    recipe, whole = plain
    folder = run_recipe(logged(recipe, wandb="letters"), tmp_path).folder
    same_run(folder, whole)
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))


def test_listeners_receive_numbers_only():
    line = {"examples": 3, "loss": 1, "ok": True, "why": "x", "shares": {"data": 0.5}, "none": None}
    assert list(scalars("step", line)) == [("step/loss", 1.0), ("step/shares/data", 0.5)]


@pytest.mark.parametrize(("override", "package"), [("log.tensorboard=true", "tensorboard"), ("log.wandb=x", "wandb")])
def test_a_tracker_that_is_not_installed_is_one_line(tmp_path, monkeypatch, override, package):
    monkeypatch.setattr("contrastile.train.config.base.find_spec", lambda name: None)
    assert refusal(tiny_recipe, tmp_path, override) == (
        f"{override}: log.{package}: needs the package {package}, which is not installed; run: pip install '.[log]'"
    )


def test_trackers_may_change_on_resume(plain, tmp_path, monkeypatch):
    recipe, _ = plain
    monkeypatch.setattr(loop, "step", lambda *words: signal.raise_signal(signal.SIGINT) or (1.0, 1.0))
    run_recipe(recipe, tmp_path)
    told = fake_wandb(monkeypatch)
    run_recipe(logged(recipe, wandb="letters"), tmp_path, resume=True)
    assert len(told.inits) == 1


# --- the report while it trains


def test_the_report_is_written_while_the_run_trains(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(report_page, "MOST", float("inf"))
    pages, real = [], loop.step

    def look(*arguments):
        pages.append((tmp_path / "tiny" / "report.html").read_text())
        return real(*arguments)

    monkeypatch.setattr(loop, "step", look)
    recipe, whole = plain
    folder = run_recipe(recipe, tmp_path).folder
    same_run(folder, whole)
    # a probe before the first step, and one in the middle
    assert [page.count("<svg") for page in pages] == [0, 0, 0, 6, 6, 6]
    assert all("This run was still training" in page and "<h2>Results" not in page for page in pages)
    # before the first step there is no memory to tell of
    assert [page.count("peak memory") for page in pages] == [0, 0, 0, 1, 1, 1]
    assert "48 seen" in pages[3]
    last = (folder / "report.html").read_text()
    assert "still training" not in last
    assert "<h2>Results" in last


def test_the_report_of_a_stopped_run_has_curves_and_says_how_to_resume(plain, tmp_path, monkeypatch, caplog):
    recipe, whole = plain
    # figures of few steps
    with interrupted(at=4), patch.multiple(report_page, **FIGURES):
        folder = run_recipe(recipe, tmp_path).folder
    page = (folder / "report.html").read_text()
    assert "This run was asked to stop." in page
    assert "still training" not in page
    assert "64 seen" in page
    assert page.count("<svg") == 6
    # one that fails is told, and the run is resumed all the same
    monkeypatch.setattr(report_page, "write_report", lambda *_, **__: 1 / 0)
    with interrupted(at=1):
        run_recipe(recipe, tmp_path, resume=True)
    assert "the report failed, the run is kept: ZeroDivisionError('division by zero')" in caplog.messages
    monkeypatch.undo()
    same_run(run_recipe(recipe, tmp_path, resume=True).folder, whole)


def test_live_reports_take_at_most_their_share_of_the_time(plain, tmp_path, monkeypatch):
    written, now = [], [100.0]
    monkeypatch.setattr(report_page.time, "monotonic", lambda: now[0])

    def draw(*names, **words):
        written.append(now[0])
        now[0] += 1.0

    monkeypatch.setattr(report_page, "write_report", draw)
    heard = report_page.LiveReport(RunFolder(tmp_path), dict, report_page.IMAGE_TEXT)
    for _ in range(100):
        heard.log("probe", {})
        now[0] += 1.0
    heard.log("step", {})
    assert written[0] == 100.0
    assert 2 <= len(written) <= 0.05 * (now[0] - 100.0) + 1


def test_a_failing_report_does_not_end_the_run(plain, tmp_path, monkeypatch, caplog):
    real = report_page.write_report

    def fail_while_training(*names, so_far=None, **words):
        if so_far is not None:
            raise OSError("the disk is full")
        return real(*names, **words)

    monkeypatch.setattr(report_page, "write_report", fail_while_training)
    recipe, whole = plain
    folder = run_recipe(recipe, tmp_path).folder
    same_run(folder, whole)
    assert caplog.text.count("the report failed and is told nothing more") == 1
    assert left(folder)[1] == left(whole)[1]
