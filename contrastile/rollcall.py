"""Who is missing: what the ranks that are left tell each other when an operation between them fails.

Ground of the house, beside `comm.py`, which calls it where a backend raises. A backend knows an address, or that time
is up. Here the ranks that see the failure say so in the store that they met in; those that do not are the missing
ones. Nothing is written or asked while all goes well.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from contrastile._check import wrong

# seconds that the others have for saying that they see the failure too; and between two looks
PATIENCE, LOOK = 1.5, 0.05
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

    Hangs up first, so that ranks that wait for this one learn of the failure at once.
    """
    hang_up(group)
    said = str(error).strip().split("\n")[0].rpartition("] ")[2].split(". ")[0]
    missing, remedy = _named(_missing(dist.get_process_group_ranks(group)))
    got = f"{missing}, on rank {dist.get_rank()} in step {here.step} ({said})"
    return LostRankError(str(wrong(operation, "be carried out by all ranks", got, remedy)))


def hang_up(group: Any) -> None:
    """Closes this rank's connections within the group.

    Gloo closes them all where time is up for one receive. NCCL's are left to its own watchdog.
    """
    if dist.get_backend(group) != "gloo":
        return
    for other in dist.get_process_group_ranks(group):
        if other != dist.get_rank():
            with suppress(RuntimeError):
                work = dist.irecv(torch.empty(1), other, group, tag=NOBODYS_TAG)
                assert work is not None
                work.wait(timedelta(milliseconds=1))


def _named(missing: list[int] | None) -> tuple[str, str]:
    """What was got, and what to do."""
    if missing is None:
        by_the_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        names = "the launcher" if by_the_launcher else "rank 0"
        return f"no answer from {names}, which keeps the store", f"See what {names} said last, and start again."
    if not missing:
        remedy = "See whether one of them came late, or sends what the others do not expect."
        return "a failure that every rank sees", remedy
    names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return f"no answer from {names}", f"See what {names} said last, and start all ranks again."


def _missing(ranks: Sequence[int]) -> list[int] | None:
    """The ranks that do not say, within `PATIENCE` seconds, that they see the failure; None if the store is gone."""
    answer: list[list[int]] = []

    def ask() -> None:
        store = dist.distributed_c10d._get_default_store()
        absent = list(ranks)
        store.set(_key(dist.get_rank()), "")
        end = time.monotonic() + PATIENCE
        while absent and time.monotonic() < end:
            absent = [rank for rank in absent if not store.check([_key(rank)])]
            answer.append(absent)
            time.sleep(LOOK)

    def ask_whom_it_may_concern() -> None:
        # the process that keeps the store may leave before this one has asked its last
        with suppress(RuntimeError):
            ask()

    # a store whose keeper was stopped answers never
    asking = threading.Thread(target=ask_whom_it_may_concern, daemon=True)
    asking.start()
    asking.join(PATIENCE + 1)
    return answer[-1] if answer else None


def _key(rank: int) -> str:
    return f"contrastile/sees the failure/{rank}"
