"""Output of a run: readable lines where there is no terminal, and metrics that survive a crash."""

import io
import json
import os
import re

import pytest

from contrastile.train import log
from contrastile.train.log import Bar, Metrics, clock, read_metrics, size


def test_a_log_gets_a_line_at_the_end():
    stream = io.StringIO()
    bar = Bar(1000, "training", "pairs", stream=stream)
    bar.update(600)
    bar.update(400, loss="1.5")
    bar.close()
    assert "\r" not in stream.getvalue()
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("training 100% · 1,000 pairs · ")
    assert line.endswith(" · loss 1.5")


def test_a_log_gets_a_line_every_interval(monkeypatch):
    monkeypatch.setattr(log, "LINE_EVERY", 0.0)
    stream = io.StringIO()
    bar = Bar(1000, "training", "pairs", stream=stream)
    bar.update(250)
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("training  25% · 250 pairs · ")
    assert line.endswith(" left")


def test_a_log_has_its_last_line_once(monkeypatch):
    monkeypatch.setattr(log, "LINE_EVERY", 0.0)
    stream = io.StringIO()
    bar = Bar(1000, "training", "pairs", stream=stream)
    bar.update(1000)
    bar.close()
    assert len(stream.getvalue().splitlines()) == 1


def test_a_slow_rate_is_shown_in_seconds_each():
    stream = io.StringIO()
    bar = Bar(10, "comparing", "runs", stream=stream)
    bar._began -= 9
    bar.update(3)
    bar.close()
    assert stream.getvalue() == "comparing  30% · 3 runs · 3 s each · 0:21 left\n"


@pytest.mark.parametrize(("units", "one"), [("runs", "1 run"), ("queries", "1 query")])
def test_one_unit_is_in_the_singular(units, one):
    stream = io.StringIO()
    bar = Bar(4, "comparing", units, stream=stream)
    bar.update(1)
    bar.close()
    assert f" 25% · {one} · " in stream.getvalue()


def test_resumed_units_do_not_count_for_the_rate():
    stream = io.StringIO()
    bar = Bar(10, "training", "pairs", 5, stream)
    bar._began -= 2
    bar.update(1)
    bar.close()
    assert stream.getvalue() == "training  60% · 6 pairs · 2 s each · 0:08 left\n"
    bar = Bar(10, "training", "pairs", 10, stream)
    bar.close()
    assert stream.getvalue().endswith("training 100% · 10 pairs · 0 pairs/s · 0:00 taken\n")


def test_the_total_may_change(monkeypatch):
    monkeypatch.setattr(log, "LINE_EVERY", 0.0)
    stream = io.StringIO()
    Bar(1000, "training", "pairs", stream=stream).update(250, total=500)
    assert stream.getvalue().startswith("training  50%")


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_on_a_terminal_the_bar_has_width_and_every_fact_is_shown(columns, monkeypatch):
    monkeypatch.setattr(log.shutil, "get_terminal_size", lambda: os.terminal_size((columns, 40)))
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    facts = {"loss": "3.214", "norm": "12.34", "time": "towers 86%, optimizer 7%, loss 4%", "peak": "1,016 MiB"}
    bar = Bar(1000, "training", "pairs", stream=terminal)
    bar.update(990, **facts)
    bar.close()
    lines = [line for line in re.split(r"[\r\n]|\x1b\[A", terminal.getvalue()) if line.strip()]
    assert max(map(len, lines)) < columns
    (bars,) = {line for line in lines if "99%" in line}
    assert bars.count("#") >= 4
    shown = " · ".join(dict.fromkeys(line.strip(" ·") for line in lines if "%|" not in line))
    assert shown == " · ".join(f"{name} {value}" for name, value in facts.items())


def test_metrics_are_on_disk_at_once_and_read_back_but_for_a_line_cut_short(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"kind": "step", "loss": 1.5}, {"kind": "probe", "recall": {"faces": 0.5}}]
    with Metrics(path) as metrics:
        metrics.write("step", loss=1.5)
        assert json.loads(path.read_text()) == lines[0]
        metrics.write("probe", recall={"faces": 0.5})
    with path.open("a") as file:
        file.write('{"kind": "st')
    assert read_metrics(path) == lines
    # a report is written without it
    path.unlink()
    assert read_metrics(path) == []


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (75, "1:15"), (3599.7, "1:00:00"), (3725, "1:02:05")])
def test_seconds_are_formatted_as_hours_minutes_and_seconds(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (2048, "2 KiB"), (5 << 20, "5 MiB"), (3 << 30, "3.0 GiB"), (5 << 40, "5.0 TiB")]
)
def test_bytes_are_formatted_in_powers_of_1024(count, text):
    assert size(count) == text
