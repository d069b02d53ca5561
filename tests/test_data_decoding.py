"""Processes that decode: what threads would, into memory that is not written over, ending with their parent."""

import subprocess
import sys
import time
from pathlib import Path
from threading import Event

import pytest
import torch
from test_data_shards import jpeg, stream_of

from contrastile.data import decoding
from contrastile.data.crop import Crop
from contrastile.data.decoding import Piece, Processes, Room, Worker, fill
from contrastile.data.shards import MOST_BYTES


@pytest.fixture
def apart(tmp_path):
    """A stream of 40 pictures, one of them broken, decoded by two processes."""
    contents = [jpeg(number) for number in range(39)] + [b"<html>"]
    stream = stream_of(tmp_path, contents, most_bad=0.5)
    stream.workers, stream.apart = 2, True
    yield stream
    stream.close()


def test_processes_decode_what_threads_decode(apart):
    crop, rows, places = Crop(5), range(len(apart)), range(100, 100 + len(apart))
    there, skipped = apart.read(rows, places, crop), dict(apart.skipped)
    plain = apart.read(range(3), range(3), None)
    apart.close()
    apart.apart = False
    apart.skipped.clear()
    here = apart.read(rows, places, crop)
    assert torch.equal(there[0], here[0])
    assert there[1] == here[1]
    assert apart.skipped == skipped == {"broken picture": 1}
    assert torch.equal(plain[0], apart.read(range(3), range(3), None)[0])


def test_a_file_that_is_gone_is_counted(apart, tmp_path):
    (tmp_path / "a.tar").unlink()
    # all of the batch, and others in their places until it is given up
    with pytest.raises(ValueError, match="unreadable file \\(No such file or directory\\): 220"):
        apart.read(range(20), range(20), None)


def test_a_batch_that_is_held_is_not_written_over(apart):
    first, _ = apart.read(range(4), range(4), Crop(1))
    kept = first.clone()
    for start in range(4, 24, 4):
        apart.read(range(start, start + 4), range(start, start + 4), Crop(1))
    assert torch.equal(first, kept)
    # of the others one took the room of another
    assert len(apart._decoders._rooms) == 2


def test_a_batch_that_is_given_up_is_not_written_over_while_it_is_decoded(tmp_path):
    (tmp_path / "a.jpg").write_bytes(jpeg(1))
    decoders, asked = Processes(1), Event()

    def origins():
        asked.wait()
        return [Piece(str(tmp_path / "a.jpg"), 0, None, 0)]

    try:
        given_up = decoders.room((2, 1, 16, 16))
        address, task = given_up.data_ptr(), decoders.fill(given_up, 0, origins, None)
        del given_up
        assert decoders.room((2, 1, 16, 16)).data_ptr() != address
        asked.set()
        assert task.result() == [None]
        # then it is
        assert [decoders.room((2, 1, 16, 16)).data_ptr() for _ in range(2)].count(address)
    finally:
        asked.set()
        decoders.close()


def test_a_task_that_cannot_be_sent_is_an_error_and_no_endless_wait():
    worker = Worker()
    with pytest.raises(RuntimeError, match="a decoding process ended with exit code 0"):
        worker.ask(Room(16), {"pieces": ["x" * (1 << 22)]})
    worker.close()


def test_there_is_a_process_for_each_core_that_the_container_has(monkeypatch):
    monkeypatch.setattr(decoding, "usable_cpus", lambda: 6.5)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert decoding.cores() == 6
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert decoding.cores() == 1


def test_a_file_longer_than_any_picture_is_not_read(tmp_path):
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    room = torch.empty(1, 1, 16, 16, dtype=torch.uint8).numpy()
    assert fill(room, [Piece(str(tmp_path / "a.png"), 0, None, 0)], None) == ["too large"]


def test_a_process_that_is_lost_is_an_error(apart):
    apart.read(range(20), range(20), None)
    for worker in apart._decoders._workers:
        worker._process.kill()
        worker._process.wait()
    with pytest.raises(RuntimeError) as caught:
        apart.read(range(20, 24), range(20, 24), None)
    assert str(caught.value) == "a decoding process ended with exit code -9: is there memory enough?"


def test_processes_end_with_their_parent(tmp_path):
    program = (
        "import os, signal\n"
        "from contrastile.data.decoding import Worker\n"
        "print(Worker()._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == -9
    assert ended(int(done.stdout))


def ended(process):
    """Whether it is gone, or a zombie that nobody waits for, within half a minute."""
    for _ in range(300):
        try:
            if (Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2])[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False
