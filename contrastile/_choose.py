"""How a loss is computed: the options that every loss takes, and what "auto" makes of them.

Stands between `_contrast.py` and the strategies it is handed: an exchange and a way of computing tiles. An explicit
name never falls back; "auto" says once, in the log of the name `contrastile`, what it took and why the others
declined.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from inspect import signature
from numbers import Real
from typing import Any, get_args

import torch

from contrastile import _check, agreement, comm
from contrastile._check import wrong
from contrastile._types import Backend, ExchangeName, Gradient, Reduction
from contrastile.exchange.base import Exchange, Shards, held_each
from contrastile.exchange.gather import Gather
from contrastile.exchange.replicate import Replicate
from contrastile.exchange.ring import Ring
from contrastile.exchange.single import Single
from contrastile.losses.base import PairLoss, Side
from contrastile.tiles.base import Tiles
from contrastile.tiles.dense import Dense
from contrastile.tiles.eager import Eager

logger = logging.getLogger("contrastile")

LEAST_WORKSPACE = 2**20
WORDS = {
    "backend": get_args(Backend),
    "exchange": get_args(ExchangeName),
    "gradient": get_args(Gradient),
    "reduction": get_args(Reduction),
}

# what other libraries' losses are told, and who says it here
_RANKS = "Leave it out: a loss meets all ranks by itself, with gradients to all of them."
_SCALE = "Pass the scale, 1 / temperature, in the call."
ELSEWHERE = dict.fromkeys(
    ("local_loss", "gather_with_grad", "cache_labels", "rank", "world_size", "use_horovod", "dist_impl",
     "gather_across_devices", "bidirectional"), _RANKS,
) | {"temperature": _SCALE, "base_temperature": _SCALE, "scale": "Pass it in the call."}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """How a loss is computed: the keywords that every loss takes, told in the docstring of `contrast`."""

    backend: Backend = "auto"
    exchange: ExchangeName = "auto"
    group: Any = None
    gradient: Gradient = "mean"
    label_smoothing: float = 0.0
    reduction: Reduction = "mean"
    workspace: int | None = None
    device: torch.device | str | None = None

    @classmethod
    def of(cls, how: dict[str, Any], function: Callable[..., Any] | None = None) -> Options:
        """The options of a call's keywords; one that neither they nor the called function know is an error."""
        unknown = [name for name in how if name not in cls.__dataclass_fields__]
        if unknown:
            others = signature(function).parameters if function is not None else ()
            near = get_close_matches(unknown[0], [*cls.__dataclass_fields__, *others], n=1, cutoff=0.75)
            remedy = f"Did you mean {near[0]}?" if near else ELSEWHERE.get(unknown[0], "Check the spelling.")
            raise wrong("how", f"be made of {', '.join(cls.__dataclass_fields__)}", ", ".join(unknown), remedy)
        return cls(**how)

    def __post_init__(self) -> None:
        for name, words in WORDS.items():
            _check.one_of(name, getattr(self, name), words, "Leave it out for the default.")
        smoothing, workspace = self.label_smoothing, self.workspace
        if not isinstance(smoothing, (int, float, Real)) or not 0.0 <= smoothing < 1.0:
            raise wrong("label_smoothing", "be at least 0 and below 1", repr(smoothing), "0.1 is usual.")
        if workspace is not None:
            # 2e9 is a number of bytes too
            count = int(workspace) if isinstance(workspace, float) and math.isfinite(workspace) else workspace
            remedy, rule = "Leave it out for the default.", f"be at least {LEAST_WORKSPACE} bytes"
            count = _check.whole_number("workspace", count, LEAST_WORKSPACE, remedy, rule=rule)
            object.__setattr__(self, "workspace", count)
        if self.device is not None:
            _check.known_device(self.device, "where the features are")


EXCHANGES: dict[str, type[Exchange]] = {"single": Single, "replicate": Replicate, "gather": Gather, "ring": Ring}


def choose_exchange(options: Options, loss: PairLoss, rows: Side, cols: Side, said: dict[str, Any]) -> Exchange:
    """Where the columns come from: what was asked for, or what needs no more than a sixteenth of the memory.

    said: what ranks must have in common beside that, such as what gets a gradient, for which they work together.
    """
    name, group = options.exchange, options.group
    W = comm.size(group)
    if W == 1:
        _check.not_empty(len(rows))
        return Single(options.gradient, Shards(group, 0, (len(rows),), (len(cols),)))
    if name == "single":
        # nothing travels: one rank may compute a loss of its own, for validation, while the others do not
        return Single(options.gradient, Shards(None, 0, (len(rows),), (len(cols),)))
    statement = _statement(options, loss, rows, cols) | said
    counted = agreement.tally(group, statement, (len(rows), len(cols)))
    shards = Shards(group, comm.rank(group), *(tuple(each) for each in zip(*counted, strict=True)))
    _check.not_empty(sum(shards.rows))
    if name == "auto":
        D = max(sum(math.prod(x.shape[1:]) for x in side.leaves) for side in (rows, cols))
        dtype = max((x.dtype for side in (rows, cols) for x in side.leaves), key=held_each)
        name = automatic_exchange(shards, D, dtype, rows.features.device)
        _say_once(f"exchange: {name}")
    return EXCHANGES[name](options.gradient, shards)


def automatic_exchange(shards: Shards, D: int, dtype: torch.dtype, device: torch.device) -> ExchangeName:
    """Gather, where it takes no more than it may; else the ring."""
    return "gather" if Gather.extra_bytes(shards, D, dtype) <= gathering_allowed(device) else "ring"


def gathering_allowed(device: torch.device) -> int:
    """Bytes that "auto" lets a rank hold of what it gathers: a sixteenth of the memory."""
    return device_memory(device) // 16


def _statement(options: Options, loss: PairLoss, rows: Side, cols: Side) -> dict[str, Any]:
    """What the ranks must have in common. The exchange first: it says what else must agree."""
    return {
        "exchange": options.exchange,
        "loss": repr(loss),
        "backend": options.backend,
        "gradient": options.gradient,
        "reduction": options.reduction,
        "features": _shapes(rows),
        "key features": _shapes(cols),
        "dtype": str(rows.features.dtype),
        "device": rows.features.device.type,
        "positives": None if rows.positives is None else rows.positives.shape[1],
        "labels": rows.labels is not None,
        "ids": rows.ids is not None,
    }


def _shapes(side: Side) -> Any:
    """The feature size; or, of what a learned score reads, the shape and type of each tensor."""
    if side.features.ndim == 2 and not side.others:
        return side.features.shape[1]
    return [f"{list(x.shape[1:])} {x.dtype}" for x in side.leaves]


def _triton() -> type[Tiles]:
    """Loaded when first wanted: importing the library must not import Triton."""
    from contrastile.tiles.triton import Triton

    return Triton


TILES: dict[str, Callable[[], type[Tiles]]] = {"dense": lambda: Dense, "eager": lambda: Eager, "triton": _triton}
# in the order of preference, by type of device
AUTOMATIC = {"cuda": ("triton", "eager")}


def choose_tiles(backend: Backend, loss: PairLoss, rows: Side, cols: Side) -> type[Tiles]:
    """The way of computing blocks: an explicit name never falls back, "auto" says once what it took and why."""
    if backend != "auto":
        tiles, reason = _offer(backend, loss, rows, cols)
        if tiles is None:
            raise wrong("backend", "be able to compute this loss", repr(backend), f"It declines: {reason}.")
        return tiles
    declined = ""
    for name, tiles, reason in offers(loss, rows, cols):
        if tiles is not None:
            _say_once(f"backend: {name}{declined}")
            return tiles
        declined += f"; {name} declined: {reason}"
    raise AssertionError("eager declines nothing")


def offers(loss: PairLoss, rows: Side, cols: Side) -> Iterator[tuple[str, type[Tiles] | None, str | None]]:
    """Whom "auto" asks, in its order: the name, and the tiles or why they decline."""
    for name in AUTOMATIC.get(rows.features.device.type, ("eager",)):
        yield name, *_offer(name, loss, rows, cols)


def _offer(name: str, loss: PairLoss, rows: Side, cols: Side) -> tuple[type[Tiles] | None, str | None]:
    try:
        tiles = TILES[name]()
    except ImportError as error:
        return None, f"{error.name} is not installed"
    reason = tiles.declines(loss, rows, cols)
    return (None, reason) if reason else (tiles, None)


def _say_once(message: str) -> None:
    """Once in a process; nothing while a graph is traced, which would take it for a part of the computation."""
    if not torch.compiler.is_compiling():
        _log_once(message)


@cache
def _log_once(message: str) -> None:
    logger.info(message)


@cache
def device_memory(device: torch.device) -> int:
    """All bytes that the device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
