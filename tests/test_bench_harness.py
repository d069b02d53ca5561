"""The bench's harness: interleaved times, peaks, tables, and files of rows that lose nothing."""

import csv
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from contrastile.bench import harness
from contrastile.bench.harness import (
    COLUMNS,
    MOST_ROUNDS,
    WARMUP_STEPS,
    Machine,
    Table,
    busy,
    read_rows,
    results_file,
    script,
)
from contrastile.train.provenance import ORIGIN, provenance

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
FILES = {
    "(cpu|h200)_loss|h200_loss_ratios": "losses",
    "h200_[248]_ranks": "exchanges",
    "h200(_2)?_host_features": "host",
    "h200_[248]_step": "rank steps",
    "h200_(step|towers)": "steps",
}
# results of before rows were signed, and rows of a source that was not committed: these are to be measured again
UNSIGNED = {"cpu_losses_float64", "h200_retrieval"}
DIRTY = {"h200_8_step": 1}
ROW = dict.fromkeys(COLUMNS["losses"], "") | {"impl": "contrastile", "b": 64, "ms": 1.5}


class Clock:
    """Stands in for the bench's `time`: only steps take any."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def step(self, seconds, note=lambda: None):
        """A step that takes so long. Powers of two add up without rounding."""

        def run():
            note()
            self.now += seconds

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(harness, "time", clock)
    return clock


def machine(seconds=0.02, product=lambda: None, device="cpu"):
    return Machine(torch.device(device), seconds, product, product_operations=1000)


@pytest.mark.parametrize("pattern", FILES)
def test_committed_results_have_the_columns_that_the_bench_appends(pattern):
    paths = [path for path in RESULTS.glob("*.csv") if re.fullmatch(pattern, path.stem)]
    assert paths
    for path in paths:
        rows = read_rows(path)
        assert tuple(rows[0]) == COLUMNS[FILES[pattern]]
        assert all(row["chip"] for row in rows if "chip" in row)


def test_a_table_aligns_its_columns_and_leaves_none_blank():
    table = Table("name 6 | ms=the time >9.2f | share >6.0% | peak_bytes=MiB >4")
    assert table.header() == "name    the time  share  MiB"
    assert table.line({"name": "a", "ms": 1.5, "peak_bytes": 2**20}) == "a           1.50         1.0"


def test_a_row_is_on_disk_before_the_next_one(tmp_path):
    path = tmp_path / "deep" / "rows.csv"
    with results_file(path, COLUMNS["losses"]) as write:
        write(ROW)
        assert read_rows(path)[0]["ms"] == "1.5"


def test_rows_are_appended_to_a_file(tmp_path):
    path = tmp_path / "rows.csv"
    for b in (64, 128):
        with results_file(path, COLUMNS["losses"]) as write:
            write(ROW | {"b": b})
    assert [row["b"] for row in read_rows(path)] == ["64", "128"]


def test_a_file_of_other_columns_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"`csv` must have the columns of a results file; got .*x.csv: a, b"):
        results_file(path, COLUMNS["losses"]).__enter__()
    assert path.read_text() == "a,b\n1,2\n"


def test_a_file_that_cannot_be_made_is_refused():
    message = r'`csv` must be a file that can be written to; got "/proc/x.csv"\. No such file or directory\.'
    with pytest.raises(ValueError, match=message):
        results_file(Path("/proc/x.csv"), COLUMNS["losses"]).__enter__()


def test_a_full_disk_is_an_error_with_the_files_name():
    message = r"/dev/full could not be written \(No space left on device\); free the disk and begin again"
    with pytest.raises(OSError, match=message), results_file(Path("/dev/full"), ["b"]) as write:
        write(ROW)


def test_a_product_runs_before_every_step(clock):
    calls = []
    # long enough not to be repeated
    steps = {word: clock.step(2**-6, lambda word=word: calls.append(word)) for word in ("product", "a", "b")}
    machine(2**-3, steps.pop("product")).race(steps)
    # some of each to see how long they take, and a second one behind the first, which may have compiled
    first = 2 * WARMUP_STEPS + 1
    assert calls[:first] == ["a"] * WARMUP_STEPS + ["b"] * WARMUP_STEPS + ["product"]
    # an eighth of a second for each of two steps
    assert calls[first:] == ["product", "a", "product", "b"] * 8


def test_a_short_step_is_repeated(clock):
    ran = []
    timed = machine(2**-4, clock.step(2**-6)).race({"short": clock.step(2**-10, lambda: ran.append(1))})["short"]
    # ten of them take the least that is timed, in each of at most 25 rounds
    assert len(ran) == WARMUP_STEPS + 10 * MOST_ROUNDS
    assert timed.ms == 1e3 * 2**-10


def test_a_timing_is_the_median_and_the_least_of_the_rounds(clock):
    seconds = iter([2**-6] * WARMUP_STEPS + [2**-5, 2**-6, 2**-4, 2**-5])

    def varying():
        clock.now += next(seconds)

    timed = machine(2**-4, clock.step(2**-6)).race({"varying": varying})["varying"]
    assert (timed.ms, timed.least_ms) == (31.25, 15.625)


def test_the_product_rate_is_its_operations_over_its_time(clock):
    timed = machine(1.0, clock.step(2**-6)).race({"same": clock.step(2**-5)})["same"]
    # a thousand operations in a 64th of a second
    assert timed.product_rate == 64_000


@pytest.mark.unpoisoned
def test_the_peak_is_what_a_step_holds_at_once():
    size = 2**26

    def run():
        for _ in range(2):
            torch.ones(size // 4)

    assert size * 0.9 < machine().peak(run) < size * 1.5


def test_a_limit_is_a_share_of_the_device_and_ends(monkeypatch):
    shares = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=2**30))
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda *of: shares.append(of))
    # torch refuses a device without an index there, and takes the index None for the current one
    with pytest.raises(KeyError), machine(device="cuda").limited(2**28):
        raise KeyError
    assert shares == [(0.25, None), (1.0, None)]


@pytest.mark.parametrize(("device", "load", "warned"), [("cpu", 3.0, True), ("cpu", 0.5, False), ("cuda", 3.0, False)])
def test_a_busy_cpu_has_a_warning(device, load, warned, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert (busy(torch.device(device)) is not None) == warned


@pytest.mark.parametrize(("seconds", "products"), [(2**-3, 8), (2**-2, 16), (1.0, 16)])
def test_products_between_long_steps_last_as_long(clock, seconds, products):
    """Up to a quarter of a second."""
    ran = []
    steps = {"step": clock.step(seconds, lambda: ran.append("step"))}
    machine(seconds, clock.step(2**-6, lambda: ran.append("product"))).race(steps)
    # some to see how long they take: the first may have compiled, and a short one may have been captured
    first = 3 if seconds == 1 else WARMUP_STEPS
    assert ran == ["step"] * first + ["product"] + ["product"] * products + ["step"]


def test_a_script_has_its_own_arguments_and_the_file_of_its_rows(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.csv"
    monkeypatch.setattr("sys.argv", ["script.py", "one", "--rows", "4", "--csv", str(path)])
    options = {"names": {"nargs": "*"}, "--rows": {"type": int, "default": 2}}
    table = Table("what 5 | ms >4")
    with script("What it measures.", table, options=options) as (given, machine, report):
        assert (given.names, given.rows, machine.seconds) == (["one"], 4, 0.0)
        report.result({"what": "one", "ms": 3}, " a remark")
    (row,) = read_rows(path)
    assert row == {"what": "one", "ms": "3", **provenance(torch.device("cpu"))}
    lines = ["what    ms", "one      3 a remark", f"rows: {path}"]
    assert capsys.readouterr().out.splitlines()[-3:] == lines


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.csv")), ids=lambda path: path.stem)
def test_every_row_of_results_has_its_provenance(path):
    rows = csv.DictReader(path.read_text().splitlines())
    signatures = [[row.get(name, "") for name in ORIGIN] for row in rows]
    assert signatures
    assert all(map(all, signatures)) == (path.stem not in UNSIGNED)
    assert sum(commit.endswith("-dirty") for *_, commit in signatures) == DIRTY.get(path.stem, 0)
