"""Failure is an error, never a hang: ranks that die, stop, disagree or leave an exchange in the middle."""

from __future__ import annotations

import datetime
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import RANKS, Pool, fresh
from refusals import refusal, unlike
from torch.distributed.run import main as torchrun

from contrastile import ClipLoss, SigLipLoss, _dispatch
from contrastile._torch import backend_timeout
from contrastile.distributed import collectives, consistency, failure
from contrastile.distributed.failure import LostRankError, in_step, state_of
from contrastile.exchange import gather
from contrastile.tiles.eager import Eager

W = 3
# the step in which a rank fails
STEP = 3
# seconds after which a rank that waits for another gives up: for one that is stopped, and where none is to wait so long
TIMEOUT, LONG = 4, 600
# seconds in which all others have to be gone, on a busy machine too
SOON = 60
# of a rank that is still computing when another dies
LATE = "late"


def _joined(rank: int, folder: Path) -> None:
    """Join this process to the other ranks."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=LONG)
    store = dist.TCPStore("localhost", _port(folder, rank), W, rank == 0, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=W, timeout=timeout)


def _train(rank: int, folder: Path, exchange: str, victim: int, how: signal.Signals) -> None:
    """Run a loop over a loss, in which one rank gets a signal."""
    _joined(rank, folder)
    try:
        if exchange == "chain":
            # each waits for the previous rank alone, and learns of the death through it
            _struck_by(how) if rank == victim else _receive((rank - 1) % W)
        if exchange == LATE:
            failure.PATIENCE = 0.5
            # rank 0 looks after rank 2 has reported
            if rank == victim:
                _struck_by(how)
            if rank == 0:
                _computes_until(folder / "2.txt")
            _receive(victim)
        features = torch.eye(4, 8)
        loss = ClipLoss(exchange=exchange, group=_impatient(features) if how == signal.SIGSTOP else None)
        for step in range(1, 10_000):
            if (rank, step) == (victim, STEP):
                # when it waits for the others, after the agreement
                collectives.Transfer.wait = lambda flight: _struck_by(how)
                if exchange == "gather":
                    _struck_by(how)
            loss(features.requires_grad_(), features, 10.0).backward()
    except ConnectionError as error:
        (folder / f"{rank}.txt").write_text(str(error))
        raise SystemExit(1) from error


def _impatient(features: torch.Tensor) -> Any:
    """All ranks in a group with a short time-out, made once each has started, which may take some of them long."""
    ClipLoss(exchange="single")(features.requires_grad_(), features, 10.0).backward()
    dist.barrier()
    return dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT))


def _computes_until(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def _receive(other: int) -> None:
    with collectives.Collective("chain", None):
        dist.recv(torch.empty(1), other)


def _struck_by(how: signal.Signals) -> None:
    os.kill(os.getpid(), how)
    # it may arrive a moment later
    time.sleep(60)


def _port(folder: Path, rank: int) -> int:
    """A free port, the same for all ranks."""
    path = folder / "port"
    if rank == 0:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            (folder / "part").write_text(str(free.getsockname()[1]))
        (folder / "part").rename(path)
    while not path.exists():
        time.sleep(0.01)
    return int(path.read_text())


def _struck(
    folder: Path, exchange: str, victim: int, how: signal.Signals, code: int = 1, run: Callable[..., None] = _train
) -> dict[int, str]:
    """The errors of the other ranks, which must end soon, with exit code `code`."""
    with fresh(W, run, folder, exchange, victim, how) as processes:
        others = [rank for rank in range(W) if rank != victim]
        for rank in others:
            processes[rank].join(SOON)
        assert [processes[rank].exitcode for rank in others] == [code] * 2
        return {rank: (folder / f"{rank}.txt").read_text() for rank in others}


@pytest.mark.parametrize(("exchange", "victim"), [("ring", 1), ("gather", 2), ("ring", 0)])
def test_a_killed_rank_ends_the_others(tmp_path: Path, exchange: str, victim: int) -> None:
    said = _struck(tmp_path, exchange, victim, signal.SIGKILL)
    operation = {"ring": "ring exchange", "gather": "agreement"}[exchange]
    for rank, sentence in said.items():
        assert re.fullmatch(
            rf"`{operation}` must be carried out by all ranks; got no answer from rank {victim}"
            rf"(, which keeps the store)?, on rank {rank} in step {STEP} \(.+\)\. "
            rf"See what rank {victim} said last, and start (all ranks )?again\.",
            sentence,
        ), sentence


def test_a_rank_that_sees_a_failure_wakes_those_that_wait_for_it(tmp_path: Path) -> None:
    said = _struck(tmp_path, "chain", 1, signal.SIGKILL)
    for rank, sentence in said.items():
        assert f"got no answer from rank 1, on rank {rank} in step 0 (" in sentence


def test_a_rank_that_is_computing_is_not_named(tmp_path: Path) -> None:
    said = _struck(tmp_path, LATE, 1, signal.SIGKILL)
    for rank, sentence in said.items():
        assert f"got no answer from rank 1, on rank {rank} in step 0 (" in sentence


def _torchrun(_: int, path: Path) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    sys.stderr = path.open("w")
    # the ranks write there too
    os.dup2(sys.stderr.fileno(), 2)
    program = [str(Path(__file__).with_name("loop_on_ranks.py")), "2"]
    torchrun(["--standalone", "--nproc-per-node", str(W), *program])


def test_torchrun_ends_the_others(tmp_path: Path) -> None:
    """torchrun sends SIGTERM to all at once; a rank that has seen the failure reports it before it ends."""
    with fresh(1, _torchrun, tmp_path / "said.txt") as (process,):
        process.join(200)
    assert process.exitcode == 1
    output = (tmp_path / "said.txt").read_text()
    # torchrun's record of the end of each; its own half minute, after which it kills, is not needed
    codes = re.findall(r"exitcode +: (\S+) ", output)
    codes.remove("-9")
    assert len(codes) == W - 1
    assert set(codes) <= {"-15", "1"}
    for sentence in re.findall("`.+` must be carried out by all ranks.*", output):
        # torchrun may have ended another by then
        assert re.search(r"got no answer from ranks? ([01], )?2, on rank [01] in step 4 \(", sentence), sentence


def _train_till_sigterm(rank: int, folder: Path, *arguments: Any) -> None:
    real = failure._missing

    def missing(group: Any) -> tuple[list[int] | None, dict[int, str]]:
        sys.stderr = (folder / f"{rank}.txt").open("w")
        # while the ranks sign, as torchrun does
        os.kill(os.getpid(), signal.SIGTERM)
        return real(group)

    failure._missing = missing
    _train(rank, folder, *arguments)


def test_sigterm_comes_after_the_sentence(tmp_path: Path) -> None:
    said = _struck(tmp_path, "ring", 1, signal.SIGKILL, code=-signal.SIGTERM, run=_train_till_sigterm)
    for rank, sentence in said.items():
        assert f"got no answer from rank 1, on rank {rank} in step {STEP} (" in sentence


def test_a_users_own_sigterm_handler_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(sys, "stderr", None)
    before = signal.signal(signal.SIGTERM, lambda number, _frame: seen.append(number))
    try:
        with failure.before_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0)
            assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("victim", [2, 0])
def test_a_stopped_rank_ends_the_others(tmp_path: Path, victim: int) -> None:
    said = _struck(tmp_path, "ring", victim, signal.SIGSTOP)
    for rank, sentence in said.items():
        assert f"no answer from rank {victim}" in sentence
        assert f"on rank {rank} in step {STEP} (" in sentence


def _disagree(rank: int, group: Any, kind: str) -> str:
    q = torch.eye(3, 4, requires_grad=kind != "requires_grad" or rank == 2)
    exchange = "gather" if kind == "exchange" and rank == 1 else "ring"
    ids = {"ids": torch.arange(3)} if kind == "ids" and rank == 1 else {}
    return refusal(ClipLoss(exchange=exchange, group=group), q, q, 1.0, **ids)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("exchange", unlike("exchange", "ring", "gather")),
        ("requires_grad", unlike("requires_grad", [], ["q", "k"], (0, 2))),
        ("ids", unlike("ids", "left out", "given")),
    ],
)
def test_a_disagreement_is_an_error_before_any_exchange(pool: Pool, kind: str, sentence: str) -> None:
    assert pool.run(_disagree, 3, kind) == [sentence] * 3


def _alone(rank: int, group: Any) -> float:
    q = torch.eye(3, 4 + rank)
    return ClipLoss(exchange="single", group=group)(q, q, 1.0 + rank).item()


def test_single_ranks_may_differ(pool: Pool) -> None:
    first, second = pool.run(_alone, 2)
    assert first != second


def _alone_while_others_are_elsewhere(rank: int, group: Any) -> float | None:
    return _alone(rank, group) if rank == 1 else None


def test_a_single_rank_waits_for_no_other(pool: Pool) -> None:
    none, value = pool.run(_alone_while_others_are_elsewhere, 2)
    assert none is None
    assert value is not None


def _a_long_complaint(rank: int, group: Any) -> str:
    return refusal(consistency.agree, group, {"error": "⟨" * 5000} if rank == 1 else {})


def test_a_long_sentence_is_shortened(pool: Pool) -> None:
    assert pool.run(_a_long_complaint, 2) == ["rank 1: " + "⟨" * consistency.SENTENCE] * 2


def _long_statements(rank: int, group: Any) -> str:
    """Long statements that differ at their ends only."""
    given = {"shapes": ["[3, 64, 64] torch.float32"] * 200 * rank, "leaves": [0] * 900 + [rank]}
    return refusal(consistency.tally, group, given, (1,))


def test_a_long_statement_is_shortened_and_still_compared(pool: Pool) -> None:
    first, second = pool.run(_long_statements, 2)
    assert first == second
    assert first.startswith("`shapes` must be the same on all ranks; got [] on rank 0 and '[\"[3, 64, 64] torch")

    same, other = (consistency._short([0] * 900 + [end]) for end in (1, 2))
    assert same != other
    assert same == consistency._short([0] * 900 + [1])
    assert len(same) < consistency.STATEMENT / 8


def _post_twice(rank: int, group: Any) -> list[str]:
    def posted() -> collectives.Transfer:
        return collectives.post(torch.full((2,), float(rank)), torch.empty(2), group)

    flight, said = posted(), []
    for misuse in (posted, lambda: collectives.total(torch.ones(1), group), lambda: consistency.agree(group, {})):
        with pytest.raises(RuntimeError) as caught:
            misuse()
        said.append(str(caught.value))
    (arrived,) = flight.wait()
    with pytest.raises(RuntimeError) as caught:
        flight.wait()
    # and the group is as good as before
    assert collectives.total(torch.ones(1), group).item() == 2
    return [*said, str(caught.value), str(arrived.tolist())]


def test_a_second_transfer_under_way_is_refused(pool: Pool) -> None:
    start = "`group` must carry one exchange at a time; got a ring exchange "
    end = "An error or a second thread left it so; start all ranks again, and give each thread a group of its own."
    for rank, (*said, arrived) in enumerate(pool.run(_post_twice, 2)):
        assert said == [
            f"{start}under way, which the ring exchange would meet. {end}",
            f"{start}under way, which the sum over ranks would meet. {end}",
            f"{start}under way, which the agreement would meet. {end}",
            f"{start}that was waited for already. {end}",
        ]
        assert arrived == str([1.0 - rank] * 2)


def test_a_step_of_a_second_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would receive the other's shards, as gradients that are wrong without a word."""

    class Group:
        pass

    group, left = Group(), list[Any]()
    monkeypatch.setattr(failure, "farewell", lambda error: f"{type(error).__name__}")
    monkeypatch.setattr(failure, "hang_up", left.append)

    def step() -> None:
        with in_step(group):
            pass

    # one after the other, and one within the other of a thread
    with ThreadPoolExecutor(1) as threads:
        threads.submit(step).result()
        with in_step(group):
            step()
            assert left == []
            with pytest.raises(RuntimeError, match=r"^`group` must carry one exchange at a time; got a step of a"):
                threads.submit(step).result()
    assert left == [group]
    assert state_of(group).left_by == "RuntimeError"


def _dropped(rank: int, group: Any) -> list[float]:
    collectives.post(torch.full((1000,), float(rank)), torch.empty(1000), group)
    # the transfer lives on without a reference
    trash = [torch.full((1000,), -1.0) for _ in range(100)]
    flight = state_of(group).in_flight
    (arrived,) = flight.wait()
    return [*arrived.unique().tolist(), trash[0][0].item()]


def test_a_dropped_transfer_keeps_its_buffers(pool: Pool) -> None:
    assert pool.run(_dropped, 2) == [[1.0, -1.0], [0.0, -1.0]]


def _two_groups(rank: int, group: Any) -> str:
    q = torch.eye(3)
    try:
        if rank == 1:
            # `new_group` returns this to a rank outside of the group
            ClipLoss(group=dist.GroupMember.NON_GROUP_MEMBER)(q, q, 1.0)
    except ValueError as error:
        return str(error)
    return "nothing was wrong"


def test_a_rank_outside_of_the_group_is_refused(pool: Pool) -> None:
    sentence = "`group` must have this rank in it; got a group without rank 1. Pass the rank's own."
    assert pool.run(_two_groups, 2)[1] == sentence


def _forked(rank: int, group: Any, folder: Path) -> list[float]:
    q = torch.eye(3)
    together, alone = ClipLoss(group=group), ClipLoss(group=group, exchange="single")
    before = together(q, q, 1.0).item()
    if (child := os.fork()) == 0:
        try:
            alone(q, q, 1.0)
            together(q, q, 1.0)
        except LostRankError as error:
            (folder / str(rank)).write_text(str(error))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    # the rank itself goes on
    return [before, together(q, q, 1.0).item()]


def test_a_fork_of_a_rank_is_refused_the_group(pool: Pool, tmp_path: Path) -> None:
    """It would wait for ever for threads that it does not have, as in a worker of a DataLoader."""
    for rank, (before, after) in enumerate(pool.run(_forked, 2, tmp_path)):
        assert before == after
        assert (tmp_path / str(rank)).read_text() == (
            "`agreement` must be carried out by all ranks; got this one, which left the others by being a fork of the "
            'rank, where exchange="single" computes. Start all ranks again.'
        )


def _destroyed(_: int, __: Any) -> list[str]:
    ended = dist.new_group()
    loss, q, said = ClipLoss(group=ended), torch.eye(3), list[str]()
    loss(q, q, 1.0)
    dist.destroy_process_group(ended)
    for initialized in (True, False):
        with mock.patch.object(dist, "is_initialized", return_value=initialized):
            try:
                said.append(str(loss(q, q, 1.0)))
            except ValueError as error:
                said.append(str(error))
    return said


def test_a_group_that_has_been_destroyed_is_refused(pool: Pool) -> None:
    """Without any group the rank's own batch would pass for that of all."""
    sentence = "`group` must exist; got one that has been destroyed. Make another, and pass that."
    assert pool.run(_destroyed, RANKS) == [[sentence] * 2] * RANKS


def _short_of_memory(method: str, calls: int, where: Any = Eager) -> None:
    """Let the tiles of this process run out of memory at the call of that number, counted from now."""
    real, seen = getattr(where, method), []

    def tiles(*arguments: Any) -> Any:
        seen.append(1)
        if len(seen) == calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
        return real(*arguments)

    setattr(where, method, tiles)


def _all_short_of_memory(rank: int, group: Any, loss: type, exchange: str, method: str, calls: int) -> list[float]:
    q, k = (torch.eye(3 + rank, 9, requires_grad=True) for _ in range(2))

    def step() -> list[float]:
        q.grad = k.grad = None
        # the rank's own columns are a block of their own, as ranks of many rows have it
        with mock.patch.object(gather, "ONE_BLOCK", 0):
            value = loss(exchange=exchange, group=group)(q, k, 4.0)
            value.backward()
        return [value.item(), q.grad.sum().item(), k.grad.abs().sum().item()]

    found = step()
    for _ in range(2):
        real = getattr(Eager, method)
        _short_of_memory(method, calls)
        try:
            with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
                step()
        finally:
            setattr(Eager, method, real)
        found += step()
    return found


@pytest.mark.parametrize(
    ("W", "loss", "exchange", "method", "calls"),
    [
        *((3, ClipLoss, "ring", method, calls) for method in ("forward", "backward") for calls in (1, 2, 3)),
        (3, ClipLoss, "gather", "forward", 1),
        (3, ClipLoss, "gather", "forward", 2),
        (3, ClipLoss, "gather", "backward", 1),
        # this rank's own columns, while the others' gradients are on their way
        (2, ClipLoss, "gather", "backward", 2),
        (3, ClipLoss, "replicate", "forward", 1),
        (3, ClipLoss, "replicate", "backward", 1),
        (3, SigLipLoss, "ring", "backward", 2),
        (2, SigLipLoss, "gather", "backward", 2),
    ],
)
def test_a_group_stays_usable_when_all_ranks_run_out_of_memory(
    pool: Pool, W: int, loss: type, exchange: str, method: str, calls: int
) -> None:
    for found in pool.run(_all_short_of_memory, W, loss, exchange, method, calls):
        assert found[:3] == found[3:6] == found[6:]


def test_a_repeated_error_is_reported_under_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports of the first error must not count for the second, which one rank may have alone."""

    class Group:
        group_name = "two"

    group, places = Group(), []
    monkeypatch.setattr(failure, "all_failed", lambda place, group: places.append(place) or True)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError), in_step(group):
            raise torch.OutOfMemoryError
    assert len(places) == len(set(places)) == 2


def _one_short_of_memory(rank: int, folder: Path, exchange: str, method: str, calls: int) -> None:
    _joined(rank, folder)
    gather.ONE_BLOCK = 0
    if rank == 1:
        # time for other failing ranks to report: there are none
        failure.PATIENCE = 0.5
    loss, features = ClipLoss(exchange=exchange), torch.eye(4, 8)
    # as on GPUs of one node that are new to the group
    _dispatch.copies_carry = lambda *_: consistency.any_of([False], None)[0]

    def step() -> None:
        loss(features.requires_grad_(), features, 10.0).backward()

    said = []
    for _ in range(STEP - 1):
        step()
    if rank == 1:
        _short_of_memory(method, calls, _dispatch if method == "copies_carry" else Eager)
    for _ in range(2):
        try:
            step()
        except (ConnectionError, torch.OutOfMemoryError) as error:
            said.append(f"{type(error).__name__}: {error}")
    (folder / f"{rank}.txt").write_text("\n".join(said))
    for other in range(1, W) if rank == 0 else ():
        # the rank that keeps the store ends last: the others read the errors there
        _computes_until(folder / f"{other}.txt")
    raise SystemExit(1)


@pytest.mark.parametrize(
    # of gather's backward the last call has this rank's own columns: the others have all that they need
    ("exchange", "method", "calls"),
    [
        *(
            (exchange, method, calls)
            for exchange, calls in (("ring", 2), ("ring", 3), ("gather", 2), ("gather", 3), ("replicate", 1))
            for method in ("forward", "backward")
        ),
        ("auto", "copies_carry", 1),
    ],
)
def test_one_rank_short_of_memory_is_an_error_on_all(tmp_path: Path, exchange: str, method: str, calls: int) -> None:
    with fresh(W, _one_short_of_memory, tmp_path, exchange, method, calls) as processes:
        # none waits for the time-out
        for process in processes:
            process.join(SOON)
        assert [process.exitcode for process in processes] == [1] * W
    words = "OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB"
    first, second = (tmp_path / "1.txt").read_text().splitlines()
    assert first == f"{words}."
    assert second == (
        "LostRankError: `agreement` must be carried out by all ranks; "
        f"got this one, which left the others by {words}. Start all ranks again."
    )
    for rank in (0, 2):
        sentences = (tmp_path / f"{rank}.txt").read_text().splitlines()
        # a rank that needs nothing more for this step fails in the next agreement
        ready = method == "backward" and (exchange, calls) in (("replicate", 1), ("gather", 3))
        assert len(sentences) in ((1, 2) if ready else (2,))
        for step, sentence in zip((STEP + 1, STEP), reversed(sentences), strict=False):
            assert re.fullmatch(
                rf"LostRankError: `.+` must be carried out by all ranks; got no answer from rank 1, which left by "
                rf"{re.escape(words)}, on rank {rank} in step {step} \(.+\)\. "
                r"See what rank 1 said last, and start all ranks again\.",
                sentence,
            ), sentence


def test_open_connections_are_found_whatever_the_default_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo refuses a tensor of a GPU, which would look like a closed connection."""
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "irecv", lambda tensor, *_, **__: tensor.device.type)
    with torch.device("meta"):
        assert failure._receives(None) == {1: "cpu"}


def test_missing_ranks_are_named() -> None:
    both = failure._named([1, 4], {4: "KeyError: 'x'"})
    assert both[0] == "no answer from ranks 1, 4; rank 4 left by KeyError: 'x'"
    assert failure._named([1], {})[0] == "no answer from rank 1"
    assert failure._named([1, 4], {})[0] == "no answer from ranks 1, 4"
    assert failure._named([], {})[0] == "a failure that every rank sees"
    assert failure._named(None, {})[0] == "no answer from rank 0, which keeps the store"


def _beside_itself(rank: int, group: Any) -> tuple[str, float]:
    """Treat the default group as one of NCCL, which carries no host tensors."""
    real, where, world = consistency._on_host, consistency._device, dist.group.WORLD
    consistency._on_host = lambda group: group is not world
    consistency._device = lambda group: torch.device("cpu")
    try:
        said = _disagree(rank, world, "exchange")
        largest = consistency.most(rank, world)
        voice, _ = consistency._carrier(None)
        assert voice is consistency._carrier(world)[0]
        assert voice not in (world, group)
        assert dist.get_process_group_ranks(voice) == dist.get_process_group_ranks(world)
        assert backend_timeout(voice) == backend_timeout(world)
        q = torch.eye(3, 4)
        return said, largest + ClipLoss(exchange="ring", group=world)(q, q, 1.0).item()
    finally:
        consistency._on_host, consistency._device = real, where
        dist.destroy_process_group(state_of(world).host_group)
        state_of(world).host_group = None


def test_ranks_compare_through_a_host_group_beside_nccl(pool: Pool) -> None:
    answers = pool.run(_beside_itself, RANKS)
    assert len({said for said, _ in answers}) == 1
    assert answers[0][0].startswith("`exchange` must be the same on all ranks; got 'ring' on rank 0")
    assert len({number for _, number in answers}) == 1
    assert answers[0][1] > RANKS - 1


@pytest.mark.parametrize(
    ("config", "speaks"), [("cpu:gloo,cuda:gloo", True), ("cpu:gloo,cuda:nccl", True), ("cuda:nccl", False)]
)
def test_groups_with_a_cpu_backend_compare_on_the_host(
    monkeypatch: pytest.MonkeyPatch, config: str, speaks: bool
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert consistency._on_host(None) is speaks


def test_a_group_ends_that_was_made_before_torch_loaded_its_compiler(tmp_path: Path) -> None:
    """`DistributedDataParallel`, optimizers and learned distances load it, and functions whose default is a group."""
    program = (
        "import weakref, torch, torch.distributed as dist, contrastile.functional\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/meet', rank=0, world_size=1)\n"
        "import torch.distributed.nn.functional\n"
        "group = weakref.ref(dist.group.WORLD)\n"
        "dist.destroy_process_group()\n"
        "assert group() is None"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
