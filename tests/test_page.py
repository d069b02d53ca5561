"""The page of memory in which the ranks of one host compare bytes; kills of ranks are in `test_failure.py`."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import RANKS, Pool, fresh

from contrastile.distributed import consistency, page
from contrastile.distributed.failure import LostRankError, hang_up, state_of
from contrastile.distributed.page import HEAD, Page

# seconds that a rank waits for another, on a busy machine too
PATIENCE = 60


@pytest.fixture
def path() -> Any:
    made = page.made(3)
    assert made
    assert len(made) <= page.LONGEST_PATH
    yield made
    Path(made).unlink(missing_ok=True)
    shutil.rmtree(f"{made}-ranks", ignore_errors=True)


def _opened(rank: int, path: str, ranks: int) -> Page:
    """The page, once all ranks are there."""
    shared, folder = Page(path, rank, ranks, PATIENCE), Path(f"{path}-ranks")
    folder.mkdir(exist_ok=True)
    (folder / str(rank)).touch()
    while len(list(folder.iterdir())) < ranks:
        time.sleep(0.001)
    return shared


def _rounds(rank: int, path: str, folder: Path) -> None:
    """Gather some hundred times, at times slower than the others, what all ranks can compute."""
    shared, random_ = _opened(rank, path, 3), random.Random(rank)
    for number in range(400):
        if random_.random() < 0.02:
            time.sleep(0.003)
        found = shared.gather(_written(rank, number))
        assert found == [_written(other, number) for other in range(3)], number
    (folder / str(rank)).touch()


def _written(rank: int, number: int) -> bytes:
    return random.Random(3 * number + rank).randbytes((number * 37) % page.MOST_BYTES)


def test_every_rank_reads_what_all_wrote_in_the_round(path: str, tmp_path: Path) -> None:
    with fresh(3, _rounds, path, tmp_path) as processes:
        for process in processes:
            process.join(PATIENCE)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0", "1", "2"]


def test_a_record_is_read_when_all_of_it_is_there(path: str) -> None:
    """Some processors show the head of a record before its bytes."""
    shared, answers = Page(path, 0, 2, PATIENCE), list[list[bytes]]()
    thread = threading.Thread(target=lambda: answers.append(shared.gather(b"mine")))
    with mock.patch.object(page, "TEST", PATIENCE):
        at = page.RECORD * (2 * 1 + 1)
        whole = HEAD.pack(1, 6, page.crc32(b"theirs", 1))
        shared._memory[at : at + len(whole)] = whole
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        shared._memory[at + HEAD.size : at + HEAD.size + 6] = b"theirs"
        thread.join(PATIENCE)
    assert answers == [[b"mine", b"theirs"]]


def _leaves(rank: int, path: str, folder: Path, how: str) -> None:
    """The second rank leaves before its second record; its child lives on."""
    shared = _opened(rank, path, 2)
    shared.gather(b"1")
    if rank == 1:
        if os.fork() == 0:
            time.sleep(PATIENCE / 2)
            os._exit(0)
        if how == "closes":
            shared.close()
            with pytest.raises(RuntimeError, match=r"^this rank has left$"):
                shared.gather(b"2")
            time.sleep(PATIENCE)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"^rank 1 has left$"):
        shared.gather(b"2")
    (folder / "found").touch()


@pytest.mark.parametrize("how", ["killed", "closes"])
def test_a_rank_that_has_left_is_found(path: str, tmp_path: Path, how: str) -> None:
    with fresh(2, _leaves, path, tmp_path, how) as (first, _):
        first.join(PATIENCE / 2)
    assert (tmp_path / "found").exists()


def test_a_rank_that_left_while_it_wrote_is_found(path: str) -> None:
    """Its record has the round already, and never becomes whole."""
    shared = Page(path, 0, 2, PATIENCE, (5, 7))
    shared._memory[page.RECORD * 3 : page.RECORD * 3 + HEAD.size] = HEAD.pack(1, 6, 0)
    with pytest.raises(RuntimeError, match=r"^rank 7 has left$"):
        shared.gather(b"mine")


def test_a_rank_whose_agreement_is_interrupted_has_left(path: str) -> None:
    """Its next record would be where another rank may still look for the last but one."""
    shared = Page(path, 0, 2, PATIENCE)
    with mock.patch.object(Page, "_left", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        shared.gather(b"mine")
    with pytest.raises(RuntimeError, match=r"^this rank has left$"):
        shared.gather(b"mine")


def test_a_closed_file_is_not_locked(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another file's by then, whose locks would be released."""
    shared, locked = Page(path, 0, 2, PATIENCE), list[Any]()
    shared.close()
    monkeypatch.setattr(page.fcntl, "lockf", lambda *words: locked.append(words))
    with pytest.raises(RuntimeError, match=r"^this rank has left$"):
        shared._left(1)
    assert locked == []


def test_a_page_that_is_freed_at_the_end_of_python_closes_its_file(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of its module are None by then."""
    shared = Page(path, 0, 2, PATIENCE)
    file = shared._file
    with monkeypatch.context() as patch:
        patch.setattr(page, "os", None)
        del shared
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def _from_threads(rank: int, path: str, folder: Path) -> None:
    shared = _opened(rank, path, 2)
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda _: shared.gather(b"%d" % rank), range(300)))
    assert answers == [[b"0", b"1"]] * 300
    (folder / str(rank)).touch()


def test_threads_of_a_rank_gather_one_after_the_other(path: str, tmp_path: Path) -> None:
    with fresh(2, _from_threads, path, tmp_path) as processes:
        for process in processes:
            process.join(PATIENCE)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0", "1"]


def test_another_thread_of_a_rank_ends_its_wait(path: str) -> None:
    """Such as that of a heartbeat, which has found that a rank is lost."""
    shared = Page(path, 0, 2, PATIENCE)
    threading.Timer(0.05, shared.close).start()
    with mock.patch.object(page, "TEST", PATIENCE), pytest.raises(RuntimeError, match=r"^this rank has left$"):
        shared.gather(b"mine")


def test_a_rank_that_does_not_come_is_an_error(path: str) -> None:
    shared = Page(path, 0, 2, 0.2)
    with (
        mock.patch.object(Page, "_left", return_value=False),
        pytest.raises(RuntimeError, match=r"^rank 1 did not come within 0\.2 s$"),
    ):
        shared.gather(b"mine")


def test_a_page_needs_a_system_and_a_host_that_have_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert page.opened("", 0, 2, 1.0) is None
    assert page.opened(f"{page.FOLDER}/contrastile-of-another-host", 0, 2, 1.0) is None
    for name, value in (("FOLDER", str(tmp_path / "nowhere")), ("fcntl", None)):
        with monkeypatch.context() as patch:
            patch.setattr(page, name, value)
            assert page.made(2) == ""
    # full, or not to be written to
    monkeypatch.setattr(os, "posix_fallocate", mock.Mock(side_effect=OSError))
    monkeypatch.setattr(page, "FOLDER", str(tmp_path))
    assert page.made(2) == ""
    assert list(tmp_path.iterdir()) == []


def _agreements(rank: int, group: Any, apart: bool) -> tuple[Any, ...]:
    """Agreements of every kind, by a page or, where one rank does not reach it, by the backend."""
    state = state_of(group)
    state.sought, state.page = False, None
    there, opened = set(os.listdir(page.FOLDER)), page.opened
    with mock.patch.object(page, "opened", lambda *words: None if apart and rank == 1 else opened(*words)):
        found = (
            consistency.tally(group, {"loss": "clip"}, [rank, 7]),
            consistency.agree(group, {"rank": rank, "all": 1}, free=("rank",)),
            consistency.any_of([rank == 1, False], group),
            consistency.any_of([], group),
            # more than a record holds
            consistency.any_of([position == rank for position in range(3 * page.MOST_BYTES)], group)[: RANKS + 1],
            consistency.most(rank, group),
        )
    assert (state.page is None) == apart
    # its file has no name any more, unless another test's has
    assert not [name for name in set(os.listdir(page.FOLDER)) - there if _is_open(name)]
    # the next test makes another
    state.sought, state.page = False, None
    return found


def _gathers_behind_a_file(rank: int, group: Any) -> list[bool]:
    """For each gather by the backend in the first agreement whether this rank has made the page's file by then."""
    state, gather, behind = state_of(group), consistency._gather_by, list[bool]()
    state.sought, state.page = False, None

    def gathered(*words: Any) -> list[bytes]:
        behind.append(made.called)
        return gather(*words)

    with (
        mock.patch.object(page, "made", wraps=page.made) as made,
        mock.patch.object(consistency, "_gather_by", gathered),
    ):
        consistency.tally(group, {"loss": "clip"}, [rank])
    state.sought, state.page = False, None
    return behind


def test_a_rank_waits_for_the_others_before_it_makes_a_file(pool: Pool) -> None:
    """A signal that ends it while it waits, which may be for long, would leave the file in memory."""
    assert pool.run(_gathers_behind_a_file, 2) == [[False, True, True], [False] * 3]


def _ended_while_its_file_has_a_name(rank: int, folder: Path) -> None:
    store, gather = dist.FileStore(f"{folder}/meet", 2), consistency._gather_by
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

    def gathered(*words: Any) -> list[bytes]:
        if made.called:
            (folder / "path").write_text(paths[0])
            os.kill(os.getpid(), signal.SIGTERM)
        return gather(*words)

    paths, known = list[str](), page.made
    with (
        mock.patch.object(page, "made", side_effect=lambda W: paths.append(known(W)) or paths[0]) as made,
        mock.patch.object(consistency, "_gather_by", gathered),
    ):
        consistency.tally(None, {"loss": "clip"}, [rank])


def test_a_rank_that_is_ended_leaves_no_file(tmp_path: Path) -> None:
    with fresh(2, _ended_while_its_file_has_a_name, tmp_path) as (first, second):
        first.join(PATIENCE)
        second.join(PATIENCE)
    assert first.exitcode == -signal.SIGTERM
    assert not Path((tmp_path / "path").read_text()).exists()


def _on_meta(rank: int, group: Any) -> tuple[Any, ...]:
    """Agreements where torch makes tensors elsewhere, as after torch.set_default_device("cuda")."""
    state_of(group).sought, state_of(group).page = False, None
    with torch.device("meta"):
        return (
            consistency.tally(group, {"loss": "clip"}, [rank]),
            consistency.agree(group, {"rank": rank}, free=("rank",)),
            consistency.any_of([rank == 1, False], group),
        )


def test_agreements_do_not_depend_on_the_default_device(pool: Pool) -> None:
    expected = [[0], [1]], [{"rank": 0}, {"rank": 1}], [True, False]
    assert pool.run(_on_meta, 2) == [expected] * 2


def _by_another_backend(rank: int, group: Any) -> bool:
    state = state_of(group)
    state.sought, state.page = False, None
    with mock.patch.object(dist, "get_backend_config", return_value="cpu:mpi"):
        consistency.tally(group, {"loss": "clip"}, [rank])
    return state.sought


def test_ranks_of_an_unknown_backend_have_no_page(pool: Pool) -> None:
    """Its time-out is not known, and its ranks may be threads."""
    assert pool.run(_by_another_backend, 2) == [False] * 2


def _is_open(name: str) -> bool:
    """Return whether this process has the file."""
    links = (os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
    return f"{page.FOLDER}/{name}" in links


@pytest.mark.parametrize("apart", [False, True])
def test_agreements_are_the_same_by_a_page_and_by_the_backend(pool: Pool, apart: bool) -> None:
    expected = (
        [[rank, 7] for rank in range(RANKS)],
        [{"rank": rank, "all": 1} for rank in range(RANKS)],
        [True, False],
        [],
        [True] * RANKS + [False],
        RANKS - 1,
    )
    assert pool.run(_agreements, RANKS, apart) == [expected] * RANKS


def _in_different_calls(rank: int, group: Any) -> str:
    with pytest.raises(LostRankError) as caught:
        # one of them has more than a record holds
        consistency.any_of([True] * (1 + 2 * page.MOST_BYTES * rank), group)
    return str(caught.value)


def _apart(rank: int, path: str, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    group = torch.distributed.group.WORLD
    if rank == 0:
        (folder / "said").write_text(_in_different_calls(rank, group))
    else:
        _in_different_calls(rank, group)
    hang_up(group)


def test_ranks_in_different_calls_are_an_error(path: str, tmp_path: Path) -> None:
    with fresh(2, _apart, path, tmp_path) as processes:
        for process in processes:
            process.join(PATIENCE)
    assert "(ranks are in different calls)" in (tmp_path / "said").read_text()
