"""A sample of the faults of `faults.py`, and the layer itself; `make test-faults` tries more of them."""

import os
import signal

import pytest
from faults import FAULTS, SCENARIOS, Faults
from ranks import fresh


def _writes(_, folder, at, how):
    faults = Faults(folder, at, how)
    faults.install()
    with (folder / "synced").open("w") as file:
        file.write("0123456789")
        file.flush()
        os.fsync(file.fileno())
        file.write("abcdef")
    (folder / "part").write_text("01234567")
    (folder / "part").rename(folder / "whole")
    # elsewhere nothing is counted
    (folder.parent / "other").write_text("0")
    (folder / "synced").unlink()
    os._exit(faults.seen)


@pytest.mark.parametrize(
    ("at", "how", "code", "left"),
    [
        (0, "kill", 5, {"whole": "01234567"}),
        (3, "kill", -signal.SIGKILL, {"synced": "0123456789abcdef"}),
        (4, "tear", -signal.SIGKILL, {"synced": "0123456789abc", "part": "0123"}),
        # a file renamed before it was synced is torn under its new name
        (5, "tear", -signal.SIGKILL, {"synced": "0123456789abc", "whole": "0123"}),
        (4, "fail", 1, {"synced": "0123456789abcdef", "part": "01234567"}),
        (2, "full", 1, {"synced": "0123456789"}),
    ],
)
def test_the_layer_counts_kills_tears_and_fails(tmp_path, at, how, code, left):
    folder = tmp_path / "folder"
    folder.mkdir()
    with fresh(1, _writes, folder, at, how) as (process,):
        process.join()
    assert process.exitcode == code
    assert {path.name: path.read_text() for path in folder.iterdir()} == left


def test_an_index_survives_a_fault_of_each_kind(tmp_path):
    scenario, runs = SCENARIOS["encode"](tmp_path), tmp_path / "try" / "out"
    runs.mkdir(parents=True)
    scenario.begin(runs)
    for number, how in enumerate(FAULTS):
        place = tmp_path / how / "out"
        place.mkdir(parents=True)
        assert not scenario.survives(place, (2 * number + 1) * scenario.events // 8, how)
