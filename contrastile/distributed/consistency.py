"""Consistency: arguments and counts that ranks compare, so that a wrong rank is an error before a collective waits.

Stands on the ground of the house, beside `collectives.py`, which carries tensors between devices; the checks before an
exchange, `ddp_fsdp.py` and `train/` use it. Ranks compare on the host where possible, so that none waits for a device.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from io import BytesIO
from struct import Struct
from typing import Any

import torch
import torch.distributed as dist

from contrastile._errors import invalid
from contrastile._torch import backend_timeout
from contrastile.distributed import collectives, page
from contrastile.distributed.collectives import Collective, all_gather
from contrastile.distributed.failure import before_sigterm, progress, resolved, size, state_of

# bytes of a rank's full statement, letters of a sentence in it, and letters of any other value
STATEMENT = 2048
SENTENCE = 320
VALUE = 160
# value in place of a statement's digest that requests the full statements
IN_FULL = 0
# counts beside a digest, as many in every call, so that ranks which are in different calls can compare
COUNTS = 7
NUMBERS = Struct(f"{1 + COUNTS}q")


def tally(group: Any, statement: dict[str, Any], counts: Sequence[int]) -> list[list[int]]:
    """The counts of every rank, in rank order; raises where the ranks' statements differ.

    Each step begins with it, so it is short: one gather of whole numbers, a digest of the statement and the counts,
    which waits for the other ranks but for nothing that a device still computes. Where digests differ, all ranks
    exchange their full statements and raise the same error.
    """
    progress.count()
    return _tally(group, statement, counts)


def _tally(group: Any, statement: dict[str, Any], counts: Sequence[int]) -> list[list[int]]:
    digest = IN_FULL if "error" in statement else _digest(statement)
    numbers = [digest, *counts, *[0] * (COUNTS - len(counts))]
    gathered = [NUMBERS.unpack(each) for each in _gather(NUMBERS.pack(*numbers), group)]
    if any(digest == IN_FULL or digest != numbers[0] for digest, *_ in gathered):
        _compare(group, statement, ())
    return [[*numbers[1 : 1 + len(counts)]] for numbers in gathered]


def agree(group: Any, statement: dict[str, Any], free: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The statement of every rank, in rank order; raises where they differ in another entry than the `free` ones.

    A rank whose own checks failed states {"error": its sentence}, and every rank raises that: so a wrong rank is an
    error on all of them, before any collective could wait for ever.
    """
    progress.count()
    return _compare(group, statement, free)


def _compare(group: Any, statement: dict[str, Any], free: Sequence[str]) -> list[dict[str, Any]]:
    if "error" in statement:
        statement = {"error": statement["error"][:SENTENCE]}
    else:
        statement = {name: value if name in free else _short(value) for name, value in statement.items()}
    # a letter takes at most four bytes, so every sentence fits
    written = json.dumps(statement, ensure_ascii=False).encode(errors="replace")
    statements = [json.loads(each.rstrip(b"\0")) for each in _gather(written.ljust(STATEMENT, b"\0"), group)]
    # as they are numbered among all processes
    ranks = dist.get_process_group_ranks(resolved(group))
    for rank, other in zip(ranks, statements, strict=True):
        if "error" in other:
            raise ValueError(f"rank {rank}: {other['error']}")
    # ranks in different calls state different names; a short statement says in which call
    for name in dict.fromkeys(name for other in sorted(statements, key=len) for name in other):
        values = [other.get(name) for other in statements]
        if name not in free and any(value != values[0] for value in values):
            odd, value = next((rank, x) for rank, x in zip(ranks, values, strict=True) if x != values[0])
            got = f"{values[0]!r} on rank {ranks[0]} and {value!r} on rank {odd}"
            raise invalid(name, "be the same on all ranks", got, "Build the loss and its inputs alike everywhere.")
    return statements


def most(number: int, group: Any, **statement: Any) -> int:
    """The largest of the ranks' whole numbers; like `tally`, it does not wait for this rank's device."""
    return number if size(group) == 1 else max(_tally(group, {"parts": None, **statement}, [number]))[0]


def numbers_of_ranks(group: Any, parts: str, numbers: Sequence[int]) -> list[list[int]]:
    """Each rank's whole numbers, at most `COUNTS`, in rank order; raises where another rank is in another call."""
    return _tally(group, {"parts": parts}, numbers)


def any_of(flags: Sequence[bool], group: Any) -> list[bool]:
    """Return for each flag whether it is set on any rank of the group."""
    # ranks have the same number of flags; a backend sends no empty tensor
    return [any(of_ranks) for of_ranks in zip(*_gather(bytes(flags), group), strict=True)] if flags else []


def lent(group: Any, make: Callable[[], Any] | None) -> Any:
    """The object that the first rank with `make` makes, on a rank without; None where all ranks have one, or none has.

    make: makes what `torch.load(weights_only=True)` reads: tensors, numbers and texts, in dicts, lists and tuples.
    Raises ValueError on all ranks for anything else.
    """
    has = [count for (count,) in _tally(group, {"parts": "given"}, [make is not None])]
    if all(has) or not any(has):
        return None
    lender, file, statement = has.index(1), BytesIO(), dict[str, Any]()
    if make is not None and collectives.rank(group) == lender:
        try:
            torch.save(make(), file)
            file.seek(0)
            # as the others will read it
            torch.load(file, weights_only=True)
        except Exception as error:
            got = f"one that cannot be sent ({type(error).__name__})"
            remedy = "Give every rank one, or make it of tensors, numbers and texts in dicts, lists and tuples."
            statement["error"] = str(invalid("parts", "hold sub-batches for a rank without any", got, remedy))
    stored = file.getvalue()
    length = tally(group, statement, [len(stored)])[lender][0]
    carrier, device = _carrier(group)
    content = torch.frombuffer(bytearray(stored or length), dtype=torch.uint8).to(device)
    collectives.broadcast(content, carrier, lender)
    return None if make is not None else torch.load(BytesIO(content.cpu().numpy().tobytes()), weights_only=True)


def _gather(own: bytes, group: Any) -> list[bytes]:
    """The bytes of all ranks, in rank order."""
    carrier, device = _carrier(group)
    memory, rounds = _page(group, carrier, device), list[list[bytes]]()
    if memory is None:
        return _gather_by(carrier, device, own, group)
    with Collective("agreement", group, carrier):
        for at in range(0, len(own), page.MOST_BYTES):
            part = own[at : at + page.MOST_BYTES]
            rounds.append(memory.gather(part))
            if any(len(record) != len(part) for record in rounds[-1]):
                raise RuntimeError("ranks are in different calls")
    return [b"".join(parts) for parts in zip(*rounds, strict=True)]


def _page(group: Any, carrier: Any, device: torch.device) -> Any:
    """The page of memory that the ranks share (`page.py`), made at the first call; None where there is none."""
    state = state_of(carrier)
    # of other backends no time-out is known, and their ranks may be threads of one process
    has_timeout = (f"{device.type}:{backend}" in dist.get_backend_config(carrier) for backend in ("gloo", "nccl"))
    if not state.sought and any(has_timeout):
        state.sought, ranks, rank = True, carrier.size(), carrier.rank()
        # the file has a name from here on: a signal that ends this rank while it waits for the others would leave it
        _gather_by(carrier, device, b"\0", group)
        with before_sigterm():
            written = page.made(ranks) if rank == 0 else ""
            named = written.encode().ljust(page.LONGEST_PATH, b"\0")
            try:
                path = _gather_by(carrier, device, named, group)[0].rstrip(b"\0").decode()
                timeout, names = backend_timeout(carrier, device.type), dist.get_process_group_ranks(carrier)
                opened = page.opened(path, rank, ranks, timeout.total_seconds(), names)
                missing = any(map(any, _gather_by(carrier, device, bytes([opened is None]), group)))
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(written)
        state.page = None if missing else opened
    return state.page


def _gather_by(carrier: Any, device: torch.device, own: bytes, group: Any) -> list[bytes]:
    """The bytes of all ranks, by the group's backend."""
    with _own_stream(device):
        sent = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
        gathered = sent.new_empty(size(group) * len(own))
        with Collective("agreement", group, carrier):
            all_gather(gathered, sent, group=carrier)
        return [part.tobytes() for part in gathered.cpu().numpy().reshape(-1, len(own))]


def _carrier(group: Any) -> tuple[Any, torch.device]:
    """The group through which the ranks compare, and the device of its tensors: the host if possible.

    NCCL carries out a group's operations one after the other: through it, ranks would hear of each other when their
    devices have done everything sent before, and the next step's kernels would be launched too late. So a group of all
    ranks gets a host group beside it, which all ranks make here.
    """
    group, state = resolved(group), state_of(group)
    if state.host_group is None and not _on_host(group) and size(group) == dist.get_world_size():
        with Collective("first meeting", group):
            state.host_group = dist.new_group(timeout=backend_timeout(group), backend="gloo")
            # some backends connect all ranks with the first operation, which a rank without rows may skip later
            dist.all_reduce(torch.zeros(1, device=_device(group)), group=group)
    carrier = state.host_group or group
    return carrier, _device(carrier)


def carrier_on_host(group: Any, device: torch.device) -> Any:
    """The group of the same ranks that carries tensors in host memory; raises ValueError where there is none.

    device: where this rank computes. NCCL carries them by way of GPUs (`collectives.post`).
    """
    if device.type == "cuda" and collectives.has_nccl(group):
        return resolved(group)
    carrier, carried = _carrier(group)
    if carried.type != "cpu":
        got = f"one for tensors on {carried.type} alone"
        remedy = "Make it with backend='cpu:gloo,cuda:nccl', or take the group of all ranks."
        raise invalid("group", "carry features in host memory", got, remedy)
    return carrier


def _device(group: Any) -> torch.device:
    """Device of the tensors that the group carries, the host before others."""
    return torch.device("cpu") if _on_host(group) else torch.device("cuda", torch.cuda.current_device())


def _on_host(group: Any) -> bool:
    """Return whether the group has a backend for tensors in host memory."""
    return "cpu" in dist.get_backend_config(group)


def _digest(statement: dict[str, Any]) -> int:
    """63 bits that differ where two statements do; never `IN_FULL`."""
    short = hashlib.blake2b(json.dumps(statement).encode(), digest_size=8).digest()
    return int.from_bytes(short) >> 1 | 1


def _short(value: Any) -> Any:
    """The value; of a long one its beginning and a number that tells it from others."""
    written = json.dumps(value)
    return value if len(written) <= VALUE else f"{written[:VALUE]}... ({_digest({'': value}):x})"


def _own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Compute on a stream of its own on a GPU, which does not wait for earlier kernels."""
    return torch.cuda.stream(_stream(device)) if device.type == "cuda" else nullcontext()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
