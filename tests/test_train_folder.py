"""Run folders: the newest has the name, older ones are moved aside, files appear whole, nothing is lost."""

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest
from ranks import fresh
from refusals import refusal
from tiny_runs import interrupted, tiny_recipe

from contrastile.train.folder import RunFolder, finished_run, make_way, new_run, run_id
from contrastile.train.loop import run_recipe


def test_a_second_run_renames_the_first(tmp_path, caplog):
    for text in ("first", "second", "third"):
        with new_run(tmp_path, "glyphs") as folder:
            folder.write_text("note", text)
    notes = {path.parent.name: path.read_text() for path in tmp_path.glob("*/note")}
    assert notes == {"glyphs": "third", "glyphs-1": "first", "glyphs-2": "second"}
    path = tmp_path / "glyphs"
    assert caplog.messages == [f"the earlier {path} is now {path}-{number}" for number in (1, 2)]


def test_a_running_folder_is_locked(tmp_path):
    with new_run(tmp_path, "glyphs") as folder:
        folder.write_text("note", "mine")
        with pytest.raises(ValueError) as caught, new_run(tmp_path, "glyphs"):
            pass
        assert str(caught.value) == (
            '`name` must be that of no run under way; got "glyphs". '
            "Wait for that run to end, or give this one another name: name=another"
        )
        assert (folder / "note").read_text() == "mine"


def test_of_runs_that_begin_at_once_one_begins_and_the_others_get_the_sentence(tmp_path, monkeypatch):
    count, exists = 8, Path.exists
    # the threads change between two looks at the folder, as processes on several cores do
    monkeypatch.setattr(Path, "exists", lambda path: (exists(path), time.sleep(0))[0])
    for attempt in range(6):
        runs, said = tmp_path / str(attempt), []
        together, done = threading.Barrier(count), threading.Barrier(count)

        def begin(runs=runs, said=said, together=together, done=done):
            together.wait()
            try:
                with new_run(runs, "glyphs") as folder:
                    folder.write_text("note", "mine")
                    done.wait()
            except Exception as error:
                said.append(repr(error))
                done.wait()

        threads = [threading.Thread(target=begin) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(said) == count - 1
        assert set(said) == {
            'ValueError(\'`name` must be that of no run under way; got "glyphs". '
            "Wait for that run to end, or give this one another name: name=another')"
        }
        assert (runs / "glyphs" / "note").read_text() == "mine"


def test_a_folder_that_is_renamed_before_it_is_locked_is_refused_and_stays(tmp_path, monkeypatch):
    flock = fcntl.flock
    (tmp_path / "glyphs").mkdir()

    def late(handle, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        # meanwhile another process puts the earlier run aside and begins its own
        (tmp_path / "glyphs").rename(tmp_path / "glyphs-1")
        (tmp_path / "glyphs").mkdir()
        (tmp_path / "glyphs" / "note").write_text("theirs")
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(ValueError, match="must be that of no run under way"), new_run(tmp_path, "glyphs"):
        pass
    assert (tmp_path / "glyphs" / "note").read_text() == "theirs"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["glyphs", "glyphs-1"]


def _dies(_, folder):
    with new_run(folder, "glyphs"):
        os._exit(9)


def test_a_killed_process_releases_its_lock(tmp_path):
    with fresh(1, _dies, tmp_path) as (process,):
        process.join()
    assert process.exitcode == 9
    with new_run(tmp_path, "glyphs") as folder:
        assert folder.path == tmp_path / "glyphs"
    assert (tmp_path / "glyphs-1").is_dir()


def test_a_file_is_replaced_only_by_a_complete_one(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_text("note", "whole")

    def fail_halfway():
        with folder.written_whole("note") as path:
            path.write_text("hal")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        fail_halfway()
    assert [path.name for path in tmp_path.iterdir()] == ["note"]
    assert (folder / "note").read_text() == "whole"


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    sentence = rf"^{tmp_path}/note could not be written \(No space left on device\); free the disk and begin again$"
    with pytest.raises(OSError, match=sentence):
        RunFolder(tmp_path).write_json("note", 1)


@pytest.mark.parametrize("there", ["another one", "none"])
def test_a_locked_folder_that_was_moved_is_refused(tmp_path, there):
    with new_run(tmp_path, "glyphs") as folder:
        path = folder.path
        folder.write_text("note", "mine")
        path.rename(tmp_path / "moved")
        if there == "another one":
            path.mkdir()
        for act in (
            lambda: folder.write_text("note", "more"),
            lambda: folder / "note",
            lambda: run_id(folder),
            lambda: folder.checksum("note"),
        ):
            assert refusal(act) == (
                f'`run` must find its folder where it began; got {there} at "{path}". '
                "Move its own back there and go on with --resume."
            )
        assert [one.name for one in tmp_path.rglob("*") if one.is_file()] == ["note"]
        if there == "another one":
            path.rmdir()
        (tmp_path / "moved").rename(path)
        assert (folder / "note").read_text() == "mine"


def test_every_run_has_its_own_id(tmp_path):
    ids = []
    for name in ("one", "two"):
        with new_run(tmp_path, name) as folder:
            ids += [run_id(folder), run_id(folder)]
    assert ids[0] == ids[1] != ids[2] == ids[3]


def test_json_reads_back(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_json("facts", {"é": [1, 2.5, None]})
    assert folder.read_json("facts") == {"é": [1, 2.5, None]}


def test_a_folder_without_a_run_is_refused(tmp_path):
    assert refusal(finished_run, tmp_path) == (
        f'`run` must be the folder of a run, with recipe.toml, model.safetensors, run.json; got "{tmp_path}". '
        "Train one first: contrastile train glyphs"
    )
    assert refusal(finished_run, tmp_path / "docstrings-late").endswith("contrastile train docstrings-late")


def test_an_unfinished_run_is_refused_with_the_command_that_resumes_it(tmp_path):
    run = tmp_path / "runs" / "glyphs"
    run.mkdir(parents=True)
    for name in ("recipe.toml", "metrics.jsonl"):
        (run / name).touch()
    assert refusal(finished_run, run) == (
        f'`run` must be the folder of a run, with model.safetensors, run.json; got "{run}". '
        f"It has begun: contrastile train {run}/recipe.toml --runs {run.parent} --resume"
    )


def test_damaged_json_is_refused_by_name(tmp_path):
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"`run\.json` must be JSON; got .*: Expecting property name"):
        RunFolder(tmp_path).read_json("run.json")


def test_an_unwritable_file_is_refused_in_advance(tmp_path, monkeypatch):
    make_way("csv", tmp_path / "some" / "where" / "x.csv")
    assert [path.name for path in (tmp_path / "some").rglob("*")] == ["where"]
    with pytest.raises(ValueError, match=r"`csv` must be a file that can be written to; got .*some\"\. Name another"):
        make_way("csv", tmp_path / "some")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"`csv` must be a file, or where one can be made; got .*x\.csv\"\. Not a dir"):
        make_way("csv", tmp_path / "file" / "some" / "x.csv")
    with pytest.raises(ValueError, match=r"`csv` must be a file that can be written to; got .* File name too long"):
        make_way("csv", tmp_path / ("x" * 300))
    # the file that is there is not touched
    make_way("csv", tmp_path / "file")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for path in (tmp_path / "file", tmp_path / "x.csv"):
        with pytest.raises(ValueError, match="`csv` must be a file that can be written to"):
            make_way("csv", path)


def test_files_have_the_permissions_that_the_umask_leaves(tmp_path):
    """A group that shares nothing gets nothing."""
    recipe = tiny_recipe(tmp_path, "train.examples=32", "save.steps=1", "evaluate.every=1.0")
    before = os.umask(0o077)
    try:
        with interrupted(2):
            folder = run_recipe(recipe, tmp_path / "runs").folder
    finally:
        os.umask(before)
    checkpoint = folder / "checkpoints" / "step-000000002"
    files = {path.name: path.stat().st_mode & 0o777 for path in (*folder.iterdir(), *checkpoint.iterdir())}
    assert files.pop("checkpoints") == 0o700
    assert set(files.values()) == {0o600}
    assert {"model.safetensors", "optimizer.safetensors", "tokenizer.json"} <= files.keys()


def test_a_tokenizer_is_on_the_disk_before_the_recipe_that_needs_it(tmp_path, monkeypatch):
    """A recipe marks a folder as a run to resume, which cannot be without the tokenizer's files."""
    recipe, events = tiny_recipe(tmp_path, "train.examples=16", "evaluate.every=1.0"), []
    real, replace = os.fsync, os.replace

    def fsync(handle):
        events.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda one, two: events.append(f"-> {Path(two).name}") or replace(one, two))
    with interrupted(1):
        run_recipe(recipe, tmp_path / "runs")
    assert "tiny" in events[events.index("tokenizer.json") : events.index("-> recipe.toml")]
