"""The cache: folders are whole or absent, made once, and checked for damage."""

import logging
import os
import re
import signal
import time

import numpy as np
import pytest

from contrastile.data.pairs import ImageWriter, cached_pairs

SHAPE = (1, 8, 8)


class Maker:
    """Writes `count` pictures and counts how often it was asked."""

    def __init__(self, count=3):
        self.count, self.calls = count, 0

    def __call__(self, writer):
        self.calls += 1
        for value in range(self.count):
            writer.add(np.full(SHAPE, value, np.uint8))
        rows = np.arange(self.count)
        return [f"title {row}" for row in rows], rows, {"train": rows[1:], "held_out": rows[:1]}, {"broken picture": 2}


def opened(folder, make, **settings):
    return cached_pairs(folder, "kind", settings, shape=SHAPE, make=make)


def the_folder(cache):
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    return folder


def test_pairs_are_read_as_they_were_written(tmp_path):
    pairs = opened(tmp_path, Maker())
    assert pairs.images[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert pairs.captions == ["title 0", "title 1", "title 2"]
    assert pairs.ids.tolist() == [0, 1, 2]
    assert {name: rows.tolist() for name, rows in pairs.splits.items()} == {"train": [1, 2], "held_out": [0]}
    assert pairs.skipped == {"broken picture": 2}
    assert len(pairs) == 3
    assert isinstance(pairs.images, np.memmap)
    assert not pairs.images.flags.writeable


def test_each_settings_have_a_folder_that_is_made_once_in_silence(tmp_path, caplog):
    make = Maker()
    for size in (1, 1, 2):
        opened(tmp_path, make, size=size)
    assert make.calls == 2
    assert sum(path.is_dir() for path in tmp_path.iterdir()) == 2
    assert caplog.text == ""


def test_a_failure_leaves_nothing(tmp_path):
    def fails(writer):
        writer.add(np.zeros(SHAPE, np.uint8))
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        opened(tmp_path, fails)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip_a_bit, cut, os.remove])
@pytest.mark.parametrize("name", ["images.npy", "pairs.json", "manifest.json"])
def test_damage_is_logged_and_repaired(tmp_path, caplog, name, damage):
    make = Maker()
    opened(tmp_path, make)
    damage(the_folder(tmp_path) / name)
    with caplog.at_level(logging.WARNING, logger="contrastile"):
        pairs = opened(tmp_path, make)
    assert make.calls == 2
    assert name in caplog.text
    assert "damaged" in caplog.text
    assert pairs.images[:, 0, 0, 0].tolist() == [0, 1, 2]


def apart(run):
    """A process that runs this, and ends with 0 if it came through."""
    child = os.fork()
    if not child:
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    return child


def code_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_kill_in_the_middle_leaves_no_half_cache(tmp_path):
    def killed(writer):
        writer.add(np.zeros(SHAPE, np.uint8))
        os.kill(os.getpid(), signal.SIGKILL)

    assert code_of(apart(lambda: opened(tmp_path, killed))) == -signal.SIGKILL
    pairs = opened(tmp_path, Maker())
    assert pairs.images[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [the_folder(tmp_path).name]


def test_two_processes_at_once_make_it_once(tmp_path):
    def slow(writer):
        with (tmp_path / "made").open("a") as file:
            file.write("made\n")
        # long enough for the other to come meanwhile
        time.sleep(0.5)
        return Maker()(writer)

    both = [apart(lambda: opened(tmp_path / "cache", slow)) for _ in range(2)]
    assert [code_of(child) for child in both] == [0, 0]
    assert (tmp_path / "made").read_text() == "made\n"


def test_a_file_of_any_length_has_the_right_header(tmp_path):
    for count in (0, 1, 1000):
        with ImageWriter(tmp_path / "images.npy", SHAPE) as writer:
            for _ in range(count):
                writer.add(np.ones(SHAPE, np.uint8))
        assert np.load(tmp_path / "images.npy").shape == (count, *SHAPE)


def test_a_picture_of_another_shape_is_refused(tmp_path):
    with ImageWriter(tmp_path / "images.npy", SHAPE) as writer, pytest.raises(ValueError) as caught:
        writer.add(np.ones((1, 9, 9), np.uint8))
    assert str(caught.value) == "`picture` must be uint8 (1, 8, 8); got uint8 (1, 9, 9). Convert it first."


def test_a_full_disk_is_an_error_with_the_folders_name(tmp_path):
    def make(writer):
        with open("/dev/full", "wb") as file:
            file.write(bytes(100_000))

    with pytest.raises(OSError) as caught:
        opened(tmp_path / "cache", make)
    place = re.escape(str(tmp_path / "cache" / "kind-8px-"))
    told = rf"{place}\w+ could not be written \(No space left on device\); free the disk and begin again"
    assert re.fullmatch(told, str(caught.value))
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


def test_a_cache_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(ValueError, match=r"`cache` must be a folder that can be written; got .*taken\. Choose another"):
        opened(tmp_path / "taken", Maker())
