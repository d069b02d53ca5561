"""Process groups: their ranks, and everything that this process remembers of each.

Stands on the ground of the house, under the other files of `distributed/`. None means the default group; without
torch.distributed there is one rank. Ranks are counted within the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from contrastile._errors import invalid


@dataclass
class GroupState:
    """The state of one process group in this process."""

    # transfer that was posted and not waited for; it keeps its buffers alive, whatever becomes of the caller
    in_flight: Any = None
    # operations that this rank has begun
    operations: int = 0
    # error of its own by which this rank left the group
    left_by: str | None = None
    # Gloo group of the same ranks, through which they compare numbers on the host
    host_group: Any = None


_states: WeakKeyDictionary[Any, GroupState] = WeakKeyDictionary()


def state_of(group: Any) -> GroupState:
    """The state of a group, made when it is first asked for."""
    return _states.setdefault(resolved(group), GroupState())


def resolved(group: Any) -> Any:
    """The group itself: the default one for None."""
    return dist.group.WORLD if group is None else group


def size(group: Any) -> int:
    """The number of ranks in the group; 1 without torch.distributed."""
    if not dist.is_available():
        return 1
    if group is not None and not isinstance(group, dist.ProcessGroup) and group != dist.GroupMember.NON_GROUP_MEMBER:
        remedy = "Pass what torch.distributed.new_group gives."
        raise invalid("group", "be a process group", type(group).__name__, remedy)
    if not dist.is_initialized():
        return 1
    ranks = dist.get_world_size(group)
    if ranks < 1:
        raise invalid(
            "group", "have this rank in it", f"a group without rank {dist.get_rank()}", "Pass the rank's own."
        )
    return ranks


def rank(group: Any) -> int:
    """This rank's number within the group; 0 without torch.distributed."""
    return dist.get_rank(group) if size(group) > 1 else 0
