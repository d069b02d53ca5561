"""What becomes of a rank's own error in the middle of what all ranks do together, such as too little memory.

Ground of the house, beside `comm.py`, whose operations an exchange is made of, and `rollcall.py`. An error between two
of them is nothing that a backend notices: the others would wait, and what was posted would meet what comes next.
Nothing is written or asked while all goes well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from contrastile import agreement, comm, rollcall
from contrastile.rollcall import LostRankError


@contextmanager
def in_step(group: Any) -> Iterator[None]:
    """Around what all ranks of the group go through alike: an error of one rank's own is an error on all of them.

    Where all of them fail at the same place, as where all have too little memory for the same, nobody waits: each
    raises its own error, and the group is as good as before. A rank that fails alone leaves: it says why and hangs up,
    so that the others raise `LostRankError` with its words; so does every later operation on it.
    """
    try:
        yield
    except LostRankError:
        raise
    except Exception as error:
        group = comm.resolved(group)
        begun = comm.begun.get(group, 0)
        if all_failed(f"operation {begun}", group):
            # what is tried again fails at another place, also where no operation comes before it
            comm.begun[group] = begun + 1
            _land(group)
        else:
            # what is under way stays where it is: its buffers may still be read
            comm.left[group] = rollcall.farewell(error)
            agreement.hang_up(group)
        raise


def all_failed(place: str, group: Any) -> bool:
    """Whether all ranks of the group fail at this place, whose name it has once only."""
    group = comm.resolved(group)
    return rollcall.all_fail(f"contrastile/{group.group_name}/{place}", dist.get_process_group_ranks(group))


def _land(group: Any) -> None:
    """Nothing is under way any more, and nobody wants what was."""
    flight = comm.under_way.pop(group, None)
    if flight is not None:
        with comm.together(flight.operation, group):
            for work in flight.works:
                work.wait()
