"""Process groups: the state of each in this process, and failures of a rank, which become errors on all ranks.

Lowest file of `distributed/`. None means the default group; without torch.distributed there is one rank. Ranks are
counted within the group.

`collectives.py` calls `lost` where a backend raises, which reports an address or a time-out, and no rank. How the rank
is found is in docs/rank_failure.md. Without a failure nothing is written into the store, or read.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from contrastile._errors import invalid
from contrastile._torch import default_store, is_destroyed, process_groups

# seconds that other ranks have for signing, twice as many if several have not; and seconds between two looks
PATIENCE, LOOK = 1.5, 0.05
# most letters of the error by which a rank leaves
LETTERS = 200
# keys of the store, by rank: the error by which it left, and its signature
REASON, SIGNATURE = "contrastile/has left by/{}", "contrastile/sees the failure/{}"
# tag of a message that no rank sends, see `hang_up`
UNUSED_TAG = 31337


@dataclass
class GroupState:
    """The state of one process group in this process."""

    # held by the thread whose step it is: two at once would receive each other's shards
    turn: Any = field(default_factory=threading.RLock)
    # transfer that was posted and not waited for; kept here, because its buffers must live until it ends
    in_flight: Any = None
    # operations that this rank has begun
    operations: int = 0
    # copies between GPUs that it has begun in the present step, apart: a rank that replays them in a graph counts none
    hops: int = 0
    # error of its own by which this rank left the group
    left_by: str | None = None
    # Gloo group of the same ranks, through which they compare numbers on the host
    host_group: Any = None
    # the ranks have looked for a page that they share, and the page (`page.py`); None: they have none
    sought: bool = False
    page: Any = None
    # all ranks' GPUs reach each other's memory (`neighbours.py`), and the buffers there; None: not known, none yet
    reachable: bool | None = None
    neighbours: Any = None


_states: WeakKeyDictionary[Any, GroupState] = WeakKeyDictionary()


def state_of(group: Any) -> GroupState:
    """The state of a group, made at the first call."""
    group = resolved(group)
    return _states.get(group) or _states.setdefault(group, GroupState())


def _leave_in_child() -> None:
    """Leave all groups in a fork of this process: the threads that serve their connections are in the parent alone."""
    for group in process_groups():
        state_of(group).left_by = 'being a fork of the rank, where exchange="single" computes'


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)


def resolved(group: Any) -> Any:
    """The group itself: the default one for None."""
    return dist.group.WORLD if group is None else group


def weakly(group: Any) -> Any:
    """A reference that keeps no group alive, hashable as the group is; anything else as it is."""
    return ref(group) if dist.is_available() and isinstance(group, dist.ProcessGroup) else group


def size(group: Any) -> int:
    """The number of ranks in the group; 1 without torch.distributed."""
    if not dist.is_available():
        return 1
    if group is not None and not isinstance(group, dist.ProcessGroup) and group != dist.GroupMember.NON_GROUP_MEMBER:
        remedy = "Pass what torch.distributed.new_group gives."
        raise invalid("group", "be a process group", type(group).__name__, remedy)
    if isinstance(group, dist.ProcessGroup) and not torch.compiler.is_compiling() and is_destroyed(group):
        # without torch.distributed the batch of this rank would pass for that of the group
        raise invalid("group", "exist", "one that has been destroyed", "Make another, and pass that.")
    if not dist.is_initialized():
        return 1
    ranks = dist.get_world_size(group)
    if ranks < 1:
        got = f"a group without rank {dist.get_rank()}"
        raise invalid("group", "have this rank in it", got, "Pass the rank's own.")
    return ranks


def rank(group: Any) -> int:
    """This rank's number within the group; 0 without torch.distributed."""
    return dist.get_rank(group) if size(group) > 1 else 0


class LostRankError(ConnectionError, RuntimeError):
    """A collective failed because a rank did not take part: killed, stopped, or ended by an error of its own."""


@dataclass
class Progress:
    """Position of this process, for the sentence of a failure: the step, and the collective that is running.

    A training loop counts its steps; without one, each agreement of the ranks counts, which is one call of a loss.
    """

    step: int = 0
    operation: str | None = None
    counted_by_loop: bool = False
    # the main thread has seen the failure, and will report it
    failing: bool = False

    def count(self) -> None:
        """Count one more agreement."""
        if not self.counted_by_loop:
            self.step += 1

    def begin(self, step: int) -> None:
        """Take over a training loop's count."""
        self.step, self.counted_by_loop = step, True


progress = Progress()


def lost(operation: str, group: Any, error: Exception) -> LostRankError:
    """The error for a failed operation: the missing ranks, the step, and the backend's message.

    Closes this rank's connections, so that ranks which wait for it learn of the failure at once.
    """
    message = str(error).strip().split("\n")[0].rpartition("] ")[2].split(". ")[0]
    with before_sigterm() as sentences:
        missing, remedy = _named(*_missing(group))
        got = f"{missing}, on rank {dist.get_rank()} in step {progress.step} ({message})"
        sentences.append(str(invalid(operation, "be carried out by all ranks", got, remedy)))
    return LostRankError(sentences[0])


@contextmanager
def before_sigterm() -> Iterator[list[str]]:
    """Delay SIGTERM until the block ends, and write its sentences before the process ends by it.

    torchrun sends SIGTERM to all ranks as soon as one has ended. A handler of the user's own stays in place.
    """
    sentences: list[str] = []
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield sentences
        return
    arrived = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: arrived.set())
    try:
        yield sentences
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if arrived.is_set():
            sys.stderr.write("".join(f"{sentence}\n" for sentence in sentences))
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGTERM)


def hang_up(group: Any) -> None:
    """Close this rank's connections on the host, the group's own and those of its host group.

    Ranks that wait for this one wake up, and so does a thread of this process that waits for another.
    """
    group = resolved(group)
    for each in {group, state_of(group).host_group or group}:
        _close(each)


def _close(group: Any) -> None:
    """Close the group's connections. Gloo closes all of them when one receive times out; NCCL's watchdog its own."""
    group = resolved(group)
    if (page := state_of(group).page) is not None:
        page.close()
    for each, state in list(_states.items()):
        if state.neighbours is not None and group in (each, state.host_group):
            # destroy_process_group would wait for a copy from a lost rank
            state.neighbours.keep()
    for receive in _receives(group).values():
        if receive is not None:
            with suppress(RuntimeError):
                receive.wait(timedelta(milliseconds=1))


def _receives(group: Any) -> dict[int, dist.Work | None]:
    """A receive from each other rank that nobody serves; None where Gloo refuses it: the connection is closed."""
    receives: dict[int, dist.Work | None] = {}
    if "cpu:gloo" in dist.get_backend_config(group):
        for other in dist.get_process_group_ranks(group):
            if other != dist.get_rank():
                receives[other] = None
                with suppress(RuntimeError):
                    receives[other] = dist.irecv(torch.empty(1, device="cpu"), other, group, tag=UNUSED_TAG)
    return receives


def farewell(error: BaseException) -> str:
    """Write into the store the error of its own by which this rank leaves; return the text."""
    text = f"{type(error).__name__}: {error}".strip().split("\n")[0][:LETTERS].rstrip(".: ")
    _with_store(lambda store: store.set(REASON.format(dist.get_rank()), text)).join(PATIENCE)
    return text


def all_failed(place: str, group: Any) -> bool:
    """Return whether all ranks of the group report in time that they fail at this place, whose name is used once."""
    group = resolved(group)
    key, pending = f"contrastile/{group.group_name}/{place}", set(dist.get_process_group_ranks(group))

    def report(store: Any) -> None:
        store.set(f"{key}/{dist.get_rank()}", "")
        began = time.monotonic()
        while pending and time.monotonic() - began < PATIENCE:
            pending.difference_update([rank for rank in pending if store.check([f"{key}/{rank}"])])
            time.sleep(LOOK if pending else 0)

    _with_store(report).join(2 * PATIENCE)
    return not pending


@contextmanager
def in_step(group: Any, place: str = "operation") -> Iterator[None]:
    """Turn an error of one rank, in a step of all ranks of the group, into an error on all of them.

    Where all ranks fail at the same place, such as for too little memory, none waits: each raises its own error, and
    the group stays usable. A rank that fails alone leaves: it reports its error and closes its connections, so that the
    others raise `LostRankError` with that error; so does every later collective on it.

    place: a word for what is done, beside which the operations are counted.
    """
    state = state_of(group)
    if not state.turn.acquire(blocking=False):
        error = misused("a step of a second thread")
        state.left_by = farewell(error)
        hang_up(group)
        raise error
    state.hops = 0
    try:
        yield
    except LostRankError:
        raise
    except Exception as error:
        if all_failed(f"{place} {state.operations} {state.hops}", group):
            # the next attempt fails at another place, even if no collective comes before it
            state.operations += 1
            if state.in_flight is not None:
                state.in_flight.complete()
        else:
            # a transfer under way stays: its buffers may still be read
            state.left_by = farewell(error)
            hang_up(group)
        raise
    finally:
        state.turn.release()


def misused(got: str) -> RuntimeError:
    """The error for an exchange that would meet another one of its group."""
    remedy = "An error or a second thread left it so; start all ranks again, and give each thread a group of its own."
    return RuntimeError(str(invalid("group", "carry one exchange at a time", got, remedy)))


def _with_store(run: Callable[[Any], None]) -> threading.Thread:
    """Run run(store) in a thread: a store whose process was stopped never answers."""

    def call() -> None:
        # the process that keeps the store may end before the last answer
        with suppress(RuntimeError):
            run(default_store())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def _missing(group: Any) -> tuple[list[int] | None, dict[int, str]]:
    """Ranks that do not sign in time, and the errors of those that wrote one; None where the store does not answer.

    Where connections are closed, only the ranks behind them: another one is computing, and will sign later.
    """
    closed = {other for other, receive in _receives(group).items() if receive is None}
    looks: list[list[int]] = []
    reasons: dict[int, str] = {}
    signed = threading.Event()

    def sign(store: Any) -> None:
        absent = dist.get_process_group_ranks(group)
        store.set(SIGNATURE.format(dist.get_rank()), "")
        signed.set()
        began = time.monotonic()
        while set(absent) - set(reasons) and time.monotonic() - began < PATIENCE * (1 if len(absent) == 1 else 2):
            absent = [rank for rank in absent if not store.check([SIGNATURE.format(rank)])]
            left = [rank for rank in absent if store.check([REASON.format(rank)])]
            reasons.update((rank, store.get(REASON.format(rank)).decode()) for rank in left)
            looks.append(absent)
            time.sleep(LOOK)

    thread = _with_store(sign)
    # a rank that wakes because this one closes its connections must find the signature in the store
    answers = signed.wait(PATIENCE / 3)
    _close(group)
    thread.join(2 * PATIENCE + 1 if answers else PATIENCE)
    if not looks:
        return None, {}
    absent = looks[-1]
    left = [rank for rank in absent if rank in reasons]
    return left or [rank for rank in absent if rank in closed] or absent, reasons


def _named(missing: list[int] | None, reasons: dict[int, str]) -> tuple[str, str]:
    """The error's "got" and its remedy."""
    if missing is None:
        keeper = "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
        return f"no answer from {keeper}, which keeps the store", f"See what {keeper} said last, and start again."
    if not missing:
        remedy = "See whether one of them came late, or sends what the others do not expect."
        return "a failure that every rank sees", remedy
    names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    left = ", which left by {1}" if len(missing) == 1 else "; rank {0} left by {1}"
    errors = "".join(left.format(rank, reasons[rank]) for rank in missing if rank in reasons)
    return f"no answer from {names}{errors}", f"See what {names} said last, and start all ranks again."
