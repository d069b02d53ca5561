"""The loader: processes decode the same as threads, batches keep their memory, processes end with their parent."""

import ctypes
import os
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from ranks import fresh, server
from test_data_collection import stream_of
from test_data_shards import jpeg

from contrastile.cli import main as main_module
from contrastile.data import loader
from contrastile.data.images import MOST_BYTES
from contrastile.data.loader import ImageLoader, Piece, SharedBuffer, Worker, read_chunks


@contextmanager
def stream_in(folder, processes, workers=2):
    """A stream of 40 pictures, one of them broken, decoded by so many processes or threads."""
    contents = [jpeg(number) for number in range(39)] + [b"<html>"]
    stream = stream_of(folder, contents, most_bad=0.5)
    stream.workers, stream.processes = workers, processes
    yield stream
    stream.close()


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    with stream_in(tmp_path_factory.mktemp("apart"), processes=True) as stream:
        yield stream


@pytest.fixture
def threads(tmp_path):
    with stream_in(tmp_path, processes=False) as stream:
        yield stream


class Forked:
    """Decoding processes that need not load torch; those of `apart` are started as in a run."""

    def __init__(self, _command, pass_fds, **_):
        with socket.socket(fileno=os.dup(*pass_fds)) as far:
            self._process = server().Process(target=loader.serve, args=(far,))
            self._process.start()
        self.pid, self.kill = self._process.pid, self._process.kill

    def wait(self, seconds=None):
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("serve", seconds)
        return self._process.exitcode


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setattr(loader.subprocess, "Popen", Forked)


def test_processes_decode_the_same_as_threads(apart, threads):
    crop, rows, places = 5, range(len(apart)), range(100, 100 + len(apart))
    apart.skipped.clear()
    by_processes, by_threads = apart.read(rows, places, crop), threads.read(rows, places, crop)
    assert torch.equal(by_processes[0], by_threads[0])
    assert by_processes[1] == by_threads[1]
    assert apart.skipped == threads.skipped == {"broken picture": 1}
    whole = [stream.read(range(3), range(3), None)[0] for stream in (apart, threads)]
    assert torch.equal(*whole)


@pytest.mark.parametrize("name", ["threads", "apart"])
def test_batches_of_any_size_follow_each_other_whether_they_are_used_or_given_up(request, name):
    stream = request.getfixturevalue(name)
    rows = range(len(stream) - 1)
    whole = stream.read(rows, rows, 1)[0].clone()
    for size in (1, 5, 17):
        stream.prefetch(range(size), range(size), 1)
        stream.prefetch(range(2, 2 + size), range(2, 2 + size), 1)
        batch = stream.read(range(2, 2 + size), range(2, 2 + size), 1)[0]
        stream.read(range(size), range(size), 1)
        assert torch.equal(batch, whole[2 : 2 + size])


def test_loading_draws_no_number_of_the_run(apart):
    state = torch.get_rng_state()
    apart.read(range(4), range(4), 1)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_file_longer_than_any_picture_is_not_read(tmp_path):
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    (chunk,) = read_chunks([str(tmp_path / "a.png")], (1, 16, 16), chunk=4, processes=False)
    assert chunk[2] == ["too large"]


def test_there_is_a_worker_for_each_core_that_the_container_has(monkeypatch):
    monkeypatch.setattr(loader, "usable_cpus", lambda: 6.5)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert loader.cores() == 6
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert loader.cores() == 1


def test_a_file_that_is_gone_or_a_process_that_is_lost_is_an_error(tmp_path, forked):
    with stream_in(tmp_path, processes=True, workers=1) as stream:
        (tmp_path / "a.tar").unlink()
        with pytest.raises(ValueError, match="unreadable file \\(No such file or directory\\): 30"):
            stream.read(range(20), range(20), None)
        for worker in stream._loader._workers:
            worker._process.kill()
            worker._process.wait()
        with pytest.raises(ChildProcessError) as caught:
            stream.read(range(20, 24), range(20, 24), None)
        assert str(caught.value) == "a decoding process ended with exit code -9: is there memory enough?"


def test_a_stopped_process_is_named_within_the_timeout(tmp_path, forked):
    with stream_in(tmp_path, processes=True) as stream:
        stream.timeout = 77.0
        stream.read(range(39), range(39), None)
        workers = stream._loader._workers
        assert [worker._socket.gettimeout() for worker in workers] == [77.0] * 2
        numbers = [worker._process.pid for worker in workers]
        for worker in workers:
            # less than it takes to start a process
            worker._socket.settimeout(0.5)
            os.kill(worker._process.pid, signal.SIGSTOP)
        with pytest.raises(ChildProcessError) as caught:
            stream.read(range(4), range(4), 1)
        sentence = (
            "no answer for 0.5 s from the decoding process {}: was it stopped, or is the storage of the images lost?"
        )
        assert str(caught.value) in [sentence.format(number) for number in numbers]
        with pytest.raises(ChildProcessError):
            stream.read(range(4), range(4), 2)
    # a process that nobody waits for is stopped too
    assert all(map(ended, numbers))


def test_a_process_that_ended_is_one_line_of_the_command():
    code = main_module._explained(ChildProcessError("a decoding process ended with exit code -9"))
    assert code == ("a decoding process ended with exit code -9", 1)


def test_a_task_that_cannot_be_sent_is_an_error_and_no_endless_wait(forked):
    worker = Worker()
    with pytest.raises(ChildProcessError, match="a decoding process ended with exit code 0"):
        worker.run(SharedBuffer(16), {"pieces": ["x" * (1 << 22)]})
    worker.close()


def test_a_batch_that_is_held_is_not_written_over(apart):
    first, _ = apart.read(range(4), range(4), 1)
    copy, addresses = first.clone(), set()
    for start in range(4, 24, 4):
        addresses.add(apart.read(range(start, start + 4), range(start, start + 4), 1)[0].data_ptr())
    assert torch.equal(first, copy)
    # the later batches share one buffer
    assert len(addresses) == 1
    assert first.data_ptr() not in addresses


def test_a_batch_that_is_given_up_is_not_written_over_while_it_is_decoded(tmp_path, forked):
    (tmp_path / "a.jpg").write_bytes(jpeg(1))
    released = Event()

    def origin(row, example):
        released.wait()
        return Piece(str(tmp_path / "a.jpg"), 0, None)

    images = ImageLoader(origin, (1, 16, 16), 1, processes=True)
    try:
        images.prefetch([(0, 0, None)])
        address, tasks = images._images.data_ptr(), images._tasks
        images.prefetch([(1, 1, None)])
        assert images._images.data_ptr() != address
        released.set()
        assert tasks[0].result() == [None]
        # the buffer is lent again once the task is done
        first, _ = images.load([(1, 1, None)])
        images.prefetch([(2, 2, None)])
        assert images._images.data_ptr() == address != first.data_ptr()
    finally:
        released.set()
        images.close()


def test_pinned_memory_is_released_with_its_last_tensor(monkeypatch):
    calls = []
    cuda = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: calls.append("register") or 0,
        # the memory is still mapped
        cudaHostUnregister=lambda address: calls.append(ctypes.string_at(address, 1)),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    buffer = SharedBuffer(16)
    images = buffer.lend((1, 16))
    images.fill_(7)
    part = images[0, 3:]
    assert not buffer.idle
    del buffer, images
    assert calls == ["register"]
    assert (part == 7).all()
    del part
    assert calls == ["register", b"\x07"]


def _parent(_, path):
    path.write_text(str(Worker()._process.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def test_processes_end_with_their_parent(tmp_path):
    with fresh(1, _parent, tmp_path / "pid") as (process,):
        process.join()
    assert process.exitcode == -signal.SIGKILL
    assert ended(int((tmp_path / "pid").read_text()))


def ended(process):
    """True for a process that is gone, or a zombie, within two minutes."""
    for _ in range(1200):
        try:
            if (Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2])[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False
