"""Who is missing: what the ranks that are left tell each other when an operation between them fails.

Ground of the house, beside `comm.py`, which calls it where a backend raises. A backend knows an address, or that time
is up. Here the ranks that see the failure say so in the store that they met in; those that do not are missing, or
have not looked yet: where a connection is closed, it is the rank behind it that is missing. A rank that leaves by an
error of its own says which. Nothing is written or asked while all goes well.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from contrastile._check import wrong

# seconds that the others have for saying that they see the failure too, as many again where several are silent; and
# between two looks
PATIENCE, LOOK = 1.5, 0.05
# letters of what a rank says of its own error
LETTERS = 200
# of the message that never comes, see `hang_up`
NOBODYS_TAG = 31337


class LostRankError(ConnectionError, RuntimeError):
    """Ranks were to do something together, and one of them did not: killed, stopped, or ended by its own error."""


@dataclass
class Here:
    """Where this process is, for the sentence of a failure.

    A step is what a training loop says, and where none does, one agreement of the ranks: a call of a loss.
    """

    step: int = 0
    # None: between two operations
    operation: str | None = None
    told: bool = False
    # whether the computation itself met the failure, and is about to say so
    failing: bool = False

    def count(self) -> None:
        """One more agreement."""
        self.step += not self.told

    def begin(self, step: int) -> None:
        """A training loop's own count."""
        self.step, self.told = step, True


here = Here()


def lost(operation: str, group: Any, error: Exception) -> LostRankError:
    """The error to raise where `operation` failed: which ranks are missing, in which step, and what the backend said.

    Hangs up, so that ranks that wait for this one learn of the failure at once.
    """
    said = str(error).strip().split("\n")[0].rpartition("] ")[2].split(". ")[0]
    with _last_words() as words:
        missing, remedy = _named(*_missing(group))
        got = f"{missing}, on rank {dist.get_rank()} in step {here.step} ({said})"
        words.append(str(wrong(operation, "be carried out by all ranks", got, remedy)))
    return LostRankError(words[0])


@contextmanager
def _last_words() -> Iterator[list[str]]:
    """Where SIGTERM comes meanwhile, it ends this process after the words that are found, and not before.

    torchrun sends it to all ranks as soon as it sees that one has ended. A handler of the user's own stays in place.
    """
    words: list[str] = []
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield words
        return
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: asked.set())
    try:
        yield words
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if asked.is_set():
            sys.stderr.write("".join(f"{sentence}\n" for sentence in words))
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGTERM)


def hang_up(group: Any) -> None:
    """Closes this rank's connections within the group.

    Gloo closes them all where time is up for one receive. NCCL's are left to its own watchdog.
    """
    for receive in _receives(group).values():
        if receive is not None:
            with suppress(RuntimeError):
                receive.wait(timedelta(milliseconds=1))


def _closed(group: Any) -> set[int]:
    """The ranks whose connection to this one is closed: they ended, or hung up. Without Gloo none is known."""
    return {other for other, receive in _receives(group).items() if receive is None}


def _receives(group: Any) -> dict[int, dist.Work | None]:
    """For each other rank a receive of what it never sends; None where Gloo refuses: the connection is closed."""
    receives: dict[int, dist.Work | None] = {}
    if "cpu:gloo" in dist.get_backend_config(group):
        for other in dist.get_process_group_ranks(group):
            if other != dist.get_rank():
                receives[other] = None
                with suppress(RuntimeError):
                    receives[other] = dist.irecv(torch.empty(1), other, group, tag=NOBODYS_TAG)
    return receives


def farewell(error: BaseException) -> str:
    """Says to those who will miss this rank which error of its own it leaves by; the words."""
    words = f"{type(error).__name__}: {error}".strip().split("\n")[0][:LETTERS].rstrip(".: ")
    _asking(lambda store: store.set(_why(dist.get_rank()), words)).join(PATIENCE)
    return words


def all_fail(place: str, ranks: Sequence[int]) -> bool:
    """Whether all of these ranks say in time that they fail at this place: then no one waits for another."""
    silent = set(ranks)

    def ask(store: Any) -> None:
        store.set(f"{place}/{dist.get_rank()}", "")
        began = time.monotonic()
        while silent and time.monotonic() - began < PATIENCE:
            silent.difference_update([rank for rank in silent if store.check([f"{place}/{rank}"])])
            time.sleep(LOOK if silent else 0)

    _asking(ask).join(2 * PATIENCE)
    return not silent


def _asking(ask: Callable[[Any], None]) -> threading.Thread:
    """ask(store), in a thread: a store whose keeper was stopped answers never."""

    def call() -> None:
        # the process that keeps the store may leave before this one has asked its last
        with suppress(RuntimeError):
            ask(dist.distributed_c10d._get_default_store())

    asking = threading.Thread(target=call, daemon=True)
    asking.start()
    return asking


def _named(missing: list[int] | None, why: dict[int, str]) -> tuple[str, str]:
    """What was got, and what to do."""
    if missing is None:
        by_the_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        names = "the launcher" if by_the_launcher else "rank 0"
        return f"no answer from {names}, which keeps the store", f"See what {names} said last, and start again."
    if not missing:
        remedy = "See whether one of them came late, or sends what the others do not expect."
        return "a failure that every rank sees", remedy
    names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    left = ", which left by {1}" if len(missing) == 1 else "; rank {0} left by {1}"
    words = "".join(left.format(rank, why[rank]) for rank in missing if rank in why)
    return f"no answer from {names}{words}", f"See what {names} said last, and start all ranks again."


def _missing(group: Any) -> tuple[list[int] | None, dict[int, str]]:
    """The ranks that do not say in time that they see the failure, and why those left that told; None for no store.

    Where the connections of some of them are closed, only those: another one is computing, and will see it later.
    """
    closed = _closed(group)
    silent: list[list[int]] = []
    why: dict[int, str] = {}
    signed = threading.Event()

    def ask(store: Any) -> None:
        absent = dist.get_process_group_ranks(group)
        store.set(_key(dist.get_rank()), "")
        signed.set()
        began = time.monotonic()
        while set(absent) - set(why) and time.monotonic() - began < (PATIENCE if len(absent) == 1 else 2 * PATIENCE):
            absent = [rank for rank in absent if not store.check([_key(rank)])]
            why.update((rank, store.get(_why(rank)).decode()) for rank in absent if store.check([_why(rank)]))
            silent.append(absent)
            time.sleep(LOOK)

    calling = _asking(ask)
    # whoever hears this rank hang up finds its name in the store
    answers = signed.wait(PATIENCE / 3)
    hang_up(group)
    calling.join(2 * PATIENCE + 1 if answers else PATIENCE)
    if not silent:
        return None, {}
    absent = silent[-1]
    return [rank for rank in absent if rank in why] or [rank for rank in absent if rank in closed] or absent, why


def _why(rank: int) -> str:
    return f"contrastile/has left by/{rank}"


def _key(rank: int) -> str:
    return f"contrastile/sees the failure/{rank}"
