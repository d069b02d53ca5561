"""A folder that came with symbolic links leads to no file of its reader: they are replaced, or refused by name."""

import os
import shutil
import sys
import types

import numpy as np
import pytest
from refusals import refusal
from tiny_runs import write_recipe

from contrastile.cli.main import main
from contrastile.data import copies, files, shards
from contrastile.data.files import new_file, open_in_place, own_folder
from contrastile.data.pairs import PairSet
from contrastile.experiments import sweep
from contrastile.train.checkpoints import Checkpoints
from contrastile.train.config import Recipe, SaveSettings
from contrastile.train.folder import RunFolder
from contrastile.train.log import Metrics, TensorBoard, WandB

SECRET = "the reader's own\n"
# the files that an evaluation writes whole
WRITTEN_WHOLE = ("evaluation.json", "galleries.json", "report.html")


@pytest.fixture
def own(tmp_path):
    """A file of the reader, outside of the folder."""
    path = tmp_path / "own"
    path.write_text(SECRET)
    yield path
    assert path.read_text() == SECRET


@pytest.fixture
def foreign(tmp_path):
    """The folder that came from somebody else."""
    path = tmp_path / "foreign"
    path.mkdir()
    return path


def refused(path, kind="file"):
    return f'`{path.name}` must be a {kind}, not a symbolic link; got "{path}". Put the {kind} itself there.'


def test_a_new_file_is_none_of_those_that_were_there(own, foreign):
    (foreign / "link").symlink_to(own)
    (foreign / "left").write_text("hal")
    for name in ("link", "left", "free"):
        new_file(foreign / name)
        assert (foreign / name).read_bytes() == b""
        assert not (foreign / name).is_symlink()
        # as `open` makes it
        (foreign / "plain").open("w").close()
        assert (foreign / name).stat().st_mode == (foreign / "plain").stat().st_mode


@pytest.mark.parametrize("mode", ["w", "a", "wb", "ab", "r+"])
def test_nothing_is_written_in_place_through_a_link(own, foreign, mode):
    (foreign / "x").symlink_to(own)
    assert refusal(open_in_place, foreign / "x", mode) == refused(foreign / "x")


def test_a_link_to_nothing_makes_nothing(foreign):
    (foreign / "x").symlink_to(foreign / "nothing")
    assert refusal(open_in_place, foreign / "x", "a") == refused(foreign / "x")
    assert not (foreign / "nothing").exists()


def test_a_file_is_opened_in_place_and_other_errors_stay(foreign):
    with open_in_place(foreign / "x", "a", encoding="utf-8") as file:
        file.write("é")
    assert (foreign / "x").read_bytes() == "é".encode()
    with pytest.raises(IsADirectoryError):
        open_in_place(foreign, "w")


def test_a_folder_that_is_a_link_is_refused(foreign):
    (foreign / "x").symlink_to(foreign)
    assert refusal(own_folder, foreign / "x") == refused(foreign / "x", "folder")
    assert own_folder(foreign / "none") == foreign / "none"


def test_a_run_folder_may_itself_be_a_link(foreign, tmp_path):
    (tmp_path / "mine").symlink_to(foreign)
    RunFolder(tmp_path / "mine").write_text("note", "text")
    with Metrics(tmp_path / "mine" / "metrics.jsonl") as metrics:
        metrics.write("step", examples=1)
    assert sorted(path.name for path in foreign.iterdir()) == ["metrics.jsonl", "note"]


@pytest.mark.parametrize("link", [".note.part", "note"])
def test_a_file_written_whole_replaces_links(own, foreign, link):
    (foreign / link).symlink_to(own)
    RunFolder(foreign).write_text("note", "text")
    assert [path.name for path in foreign.iterdir()] == ["note"]
    assert not (foreign / "note").is_symlink()
    assert (foreign / "note").read_text() == "text"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    assert main(["train", str(write_recipe(folder)), "train.examples=32", "--runs", str(folder / "runs")]) == 0
    return folder / "runs" / "tiny"


def test_evaluating_a_foreign_run_writes_none_of_the_readers_files(finished, own, foreign, capsys):
    shutil.copytree(finished, foreign, dirs_exist_ok=True)
    for name in WRITTEN_WHOLE:
        (foreign / f".{name}.part").symlink_to(own)
    (foreign / "report.html").unlink()
    (foreign / "report.html").symlink_to(own)
    assert main(["evaluate", str(foreign)]) == 0
    assert "<html" in (foreign / "report.html").read_text()
    assert not (foreign / "report.html").is_symlink()


def test_resuming_a_foreign_run_is_refused_where_its_metrics_are_a_link(finished, own, tmp_path, capsys):
    run = tmp_path / "runs" / "tiny"
    shutil.copytree(finished, run)
    # as of a run that has only begun
    for name in ("run.json", "metrics.jsonl"):
        (run / name).unlink()
    (run / "metrics.jsonl").symlink_to(own)
    asked = ["train", str(run / "recipe.toml"), "--runs", str(run.parent), "--resume"]
    assert main(asked) == 2
    assert capsys.readouterr().err.splitlines()[-1] == refused(run / "metrics.jsonl")


def test_checkpoints_are_not_swept_behind_a_link(foreign, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / ".part-1").mkdir(parents=True)
    (foreign / "checkpoints").symlink_to(elsewhere)
    checkpoints = Checkpoints(foreign / "checkpoints", SaveSettings())
    for act in (lambda: checkpoints.restore({}), lambda: checkpoints.save(1, 0.0, {})):
        assert refusal(act) == refused(foreign / "checkpoints", "folder")
    assert [path.name for path in elsewhere.iterdir()] == [".part-1"]


def test_trackers_write_into_no_folder_behind_a_link(foreign, tmp_path, monkeypatch):
    for name, module, tracker in (
        ("tensorboard", "torch.utils.tensorboard", TensorBoard(RunFolder(foreign))),
        ("wandb", "wandb", WandB(RunFolder(foreign), "project", Recipe.model_construct(name="run"))),
    ):
        (foreign / name).symlink_to(tmp_path)
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        if name == "tensorboard":
            sys.modules[module].SummaryWriter = None
        assert refusal(tracker.log, "step", {"examples": 1}) == refused(foreign / name, "folder")


def test_a_crew_says_nothing_into_a_link(own, foreign):
    (foreign / "crew-0.log").symlink_to(own)
    assert refusal(list, sweep.run_parallel(None, [None], None, foreign, jobs=1, device="cpu")) == refused(
        foreign / "crew-0.log"
    )


def test_an_index_is_not_written_behind_a_link_that_nobody_named(foreign, tmp_path, capsys):
    (foreign / "recipe.toml").write_text('kind = "retriever"\n[data]\nsource = "docstrings"\n[train]\nexamples = 10\n')
    for name in ("model.safetensors", "run.json"):
        (foreign / name).touch()
    (foreign / "index").symlink_to(tmp_path)
    assert main(["encode", str(foreign)]) == 2
    assert capsys.readouterr().err == refused(foreign / "index", "folder") + "\n"


def test_the_locks_of_a_cache_are_no_links(own, foreign):
    def make(folder):
        files.write_text(folder / "x", "text")

    made = files.cached_folder(foreign, "kind", {}, files=("x",), make=make)
    lock = foreign / f".{made.name}.lock"
    lock.unlink()
    lock.symlink_to(own)
    assert refusal(files.cached_folder, foreign, "kind", {}, files=("x",), make=make) == refused(lock)
    pairs = PairSet(np.zeros((2, 1, 8, 8), np.uint8), ["a", "b"], np.arange(2), {"train": np.arange(2)}, {})
    (foreign / ".lock").symlink_to(own)
    assert refusal(copies.Copies(pairs, np.arange(2), seed=0, folder=foreign).image_bytes, 0, 0) == refused(
        foreign / ".lock"
    )


def test_what_is_unpacked_is_written_through_no_link(own, foreign):
    pyarrow = pytest.importorskip("pyarrow")
    table = foreign / "x.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"title": ["a"], "image": [b"bytes"]}), table)
    shard = shards.unpack(table, foreign)
    shard.unlink()
    shard.with_suffix(f".part-{os.getpid()}").symlink_to(own)
    assert shards.unpack(table, foreign) == shard
    assert not shard.is_symlink()
