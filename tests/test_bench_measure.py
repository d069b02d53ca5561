"""The bench's ground: interleaved times, peaks, and files of rows that lose nothing."""

import csv
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from contrastile.bench.measure import FIRST_STEPS, Ledger, Machine, Row, busy

COLUMNS = "impl,loss,backend,b,d,dtype,world,ms,effective_tflops,ratio,peak_bytes,chip,versions,date,commit"
ROW = Row(
    "contrastile", "clip", "eager", 64, 8, "float32", 1, 1.5, 0.1, 0.5, 4096, "a chip", "torch 2", "2026-01-01", ""
)


def machine(seconds=0.02, product=lambda: None, device="cpu"):
    return Machine(torch.device(device), seconds, product, product_operations=1000)


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_columns_are_those_that_readers_rely_on():
    assert ",".join(field.name for field in fields(Row)) == COLUMNS


def test_a_row_is_on_disk_before_the_next_one(tmp_path):
    path = tmp_path / "deep" / "rows.csv"
    with Ledger(path) as ledger:
        ledger.write(ROW)
        assert read(path)[0]["ms"] == "1.5"


def test_rows_go_behind_those_that_are_there(tmp_path):
    path = tmp_path / "rows.csv"
    for b in (64, 128):
        with Ledger(path) as ledger:
            ledger.write(replace(ROW, b=b))
    assert [row["b"] for row in read(path)] == ["64", "128"]


def test_a_file_of_other_columns_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"`csv` must have the columns of a results file; got .*x.csv: a, b"):
        Ledger(path)
    assert path.read_text() == "a,b\n1,2\n"


def test_a_full_disk_is_told_with_the_files_name():
    told = r"/dev/full could not be written \(No space left on device\); free the disk and begin again"
    with pytest.raises(OSError, match=told), Ledger(Path("/dev/full")) as ledger:
        ledger.write(ROW)


def test_a_product_runs_before_every_step():
    said = []

    def slow(word):
        said.append(word)
        # long enough not to be repeated
        time.sleep(0.02)

    machine(0.1, lambda: slow("product")).race({"a": lambda: slow("a"), "b": lambda: slow("b")})
    # some of each to see how long they take
    first = 2 * FIRST_STEPS + 1
    assert said[:first] == ["a"] * FIRST_STEPS + ["b"] * FIRST_STEPS + ["product"]
    assert len(said) > first
    assert said[first:] == ["product", "a", "product", "b"] * (len(said[first:]) // 4)


def test_the_slower_step_is_the_slower():
    small, large = torch.randn(64, 64), torch.randn(512, 512)
    timings = machine().race({"small": lambda: small @ small, "large": lambda: large @ large})
    assert timings["small"].ms < timings["large"].ms


def test_the_product_rate_is_its_operations_over_its_time():
    x = torch.randn(256, 256)
    timed = Machine(torch.device("cpu"), 0.02, lambda: x @ x, 2 * 256**3).race({"same": lambda: x @ x})["same"]
    assert 0.2 < timed.product_rate * timed.ms / 1e3 / (2 * 256**3) < 5


@pytest.mark.parametrize(("device", "turns"), [("cpu", [["a", "b"]]), ("cuda", [["a"], ["b"]])])
def test_a_shared_cpu_lets_all_drift_alike_and_a_gpu_has_one_at_a_time(device, turns):
    assert machine(device=device).turns(["a", "b"]) == turns


def test_nobody_left_is_no_race():
    assert machine().turns([]) == []


@pytest.mark.unpoisoned
def test_the_peak_is_what_a_step_holds_at_once():
    size = 2**26

    def run():
        for _ in range(2):
            torch.ones(size // 4)

    assert size * 0.9 < machine().peak(run) < size * 1.5


@pytest.mark.parametrize(("device", "load", "said"), [("cpu", 3.0, True), ("cpu", 0.5, False), ("cuda", 3.0, False)])
def test_a_cpu_that_has_other_work_is_spoken_of(device, load, said, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert (busy(torch.device(device)) is not None) == said


def test_products_between_long_steps_last_as_long():
    ran = []

    def product():
        ran.append("product")
        time.sleep(0.01)

    machine(0.1, product).race({"step": lambda: ran.append("step") or time.sleep(0.1)})
    # some of each to see how long they take
    assert ran[: FIRST_STEPS + 2] == ["step"] * FIRST_STEPS + ["product", "product"]
    # as many as take a tenth of a second, or fewer where sleeping takes longer
    assert 3 <= ran[FIRST_STEPS + 1 :].count("product") <= 11
