"""What ranks say to each other of themselves: what all have in common, and who is wrong before an exchange could wait.

Ground of the house, beside `comm.py`, which carries tensors between devices: used by the checks before an exchange, by
`wrappers.py` and by `train/`. All that is said is on the host where that can be, so that nobody waits for a device.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from contrastile import rollcall
from contrastile._check import wrong
from contrastile.comm import all_gather, options, resolved, size, together
from contrastile.rollcall import here

# bytes of what a rank says of itself where it is asked in full, and letters of a sentence in it, and of any other value
STATEMENT = 2048
SENTENCE = 320
VALUE = 160
# in the place of a statement's digest: look at what I say
LISTEN = 0

# by group: the one beside it through which its ranks talk on the host
_voices: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def tally(group: Any, statement: dict[str, Any], counts: Sequence[int]) -> list[list[int]]:
    """The counts of every rank, in rank order, after making sure that all ranks state the same.

    What each step begins with, so it is short: a digest of the statement and the counts, in one gather of whole
    numbers, which waits for the other ranks but for nothing that a device still has to do. Where digests differ, all
    ranks `agree`, and raise what comes of it.
    """
    here.count()
    said = [LISTEN if "error" in statement else _digest(statement), *counts]
    heard = _said_by_all(torch.tensor(said), group).view(-1, len(said)).tolist()
    if any(digest == LISTEN or digest != said[0] for digest, *_ in heard):
        _agreed(group, statement, ())
    return [counted for _, *counted in heard]


def agree(group: Any, statement: dict[str, Any], free: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What every rank states, in rank order, after making sure that they state the same (but for the `free` entries).

    A rank whose own checks failed states {"error": its sentence}; every rank then raises it. So a rank that is
    wrong is an error on all of them, before any exchange could wait for ever.
    """
    here.count()
    return _agreed(group, statement, free)


def _agreed(group: Any, statement: dict[str, Any], free: Sequence[str]) -> list[dict[str, Any]]:
    if "error" in statement:
        statement = {"error": statement["error"][:SENTENCE]}
    else:
        statement = {name: value if name in free else _short(value) for name, value in statement.items()}
    # a letter has four bytes at most: any sentence has room
    written = json.dumps(statement, ensure_ascii=False).encode(errors="replace")
    mine = torch.zeros(STATEMENT, dtype=torch.uint8)
    mine[: len(written)] = torch.frombuffer(bytearray(written), dtype=torch.uint8)
    heard = _said_by_all(mine, group).numpy().tobytes()
    stated = [json.loads(heard[at : at + STATEMENT].rstrip(b"\0")) for at in range(0, len(heard), STATEMENT)]
    for at, other in enumerate(stated):
        if "error" in other:
            raise ValueError(f"rank {at}: {other['error']}")
    for name in stated[0]:
        values = [other.get(name) for other in stated]
        if name not in free and any(value != values[0] for value in values):
            odd = next(at for at, value in enumerate(values) if value != values[0])
            raise wrong(
                name,
                "be the same on all ranks",
                f"{values[0]!r} on rank 0 and {values[odd]!r} on rank {odd}",
                "Build the loss and its inputs alike everywhere.",
            )
    return stated


def _said_by_all(mine: Tensor, group: Any) -> Tensor:
    """What each rank says, one after the other, in host memory."""
    voice, device = _voice(group)
    with _apart(device):
        everyone = mine.new_empty(size(group) * len(mine), device=device)
        with together("agreement", group, voice):
            all_gather(everyone, mine.to(device), group=voice)
        return everyone.cpu()


def _voice(group: Any) -> tuple[Any, torch.device]:
    """Through which group its ranks agree, and where that one's tensors are: on the host if that can be.

    NCCL carries out what a group is handed one after the other. Asked through it, ranks would learn of each other when
    their devices have done all that was sent before, and the next step's kernels would come too late. So a group of
    all ranks gets another one beside it, which all ranks are here to make.
    """
    group = resolved(group)
    if group not in _voices and not _speaks(group) and size(group) == dist.get_world_size():
        with together("first meeting", group):
            _voices[group] = dist.new_group(timeout=_patience(group), backend="gloo")
            # some backends connect all ranks with the first operation, which may be one that a rank without rows skips
            dist.all_reduce(torch.zeros(1, device=_device(group)), group=group)
    voice = _voices.get(group, group)
    return voice, _device(voice)


def _device(group: Any) -> torch.device:
    """Where the group carries tensors from and to, the host before others."""
    return torch.device("cpu") if _speaks(group) else torch.device("cuda", torch.cuda.current_device())


def hang_up(group: Any) -> None:
    """Closes this rank's connections on the host, so that whoever waits for it there, or here for another, wakes."""
    group = resolved(group)
    for each in {group, _voices.get(group, group)}:
        rollcall.hang_up(each)


def most(number: int, group: Any) -> int:
    """The largest of the ranks' whole numbers; like a `tally`, it does not wait for this rank's device."""
    if size(group) == 1:
        return number
    voice, device = _voice(group)
    with _apart(device):
        largest = torch.tensor(number, device=device)
        with together("agreement on a number", group, voice):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=voice)
        return int(largest)


def _speaks(group: Any) -> bool:
    """Whether the group has a backend for tensors of the host."""
    return "cpu" in dist.get_backend_config(group)


def _patience(group: Any) -> timedelta:
    """The time-out of the group's operations."""
    found: timedelta = options(group)._timeout
    return found


def _digest(statement: dict[str, Any]) -> int:
    """63 bits that say whether two statements are the same; never `LISTEN`."""
    short = hashlib.blake2b(json.dumps(statement).encode(), digest_size=8).digest()
    return int.from_bytes(short) >> 1 | 1


def _short(value: Any) -> Any:
    """The value, where it is short; else its beginning, and a number that tells it from others."""
    written = json.dumps(value)
    return value if len(written) <= VALUE else f"{written[:VALUE]}... ({_digest({'': value}):x})"


def _apart(device: torch.device) -> AbstractContextManager[object]:
    """On a GPU, a stream that waits for nothing which the device still has to do."""
    return torch.cuda.stream(_stream(device)) if device.type == "cuda" else nullcontext()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
