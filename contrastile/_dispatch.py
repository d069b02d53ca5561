"""The options that every loss takes, and the choices that "auto" makes of them.

Stands between `engine/`, which plans a call, and the strategies that it is handed: an exchange and tiles. An explicit
name never falls back; "auto" says once, in the log of the name `contrastile`, what it chose and why the others
declined.
"""

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from numbers import Real
from typing import Any, Never, Self, get_args

import torch

from contrastile._errors import SMOOTHING, invalid, one_of, unknown_keyword, whole_number
from contrastile._types import Backend, ExchangeName, Gradient, Reduction
from contrastile.distributed import collectives, consistency
from contrastile.distributed.failure import in_step
from contrastile.distributed.neighbours import copies_carry
from contrastile.exchange.base import Exchange, Layout, Single, bytes_per_feature
from contrastile.exchange.gather import Gather, Replicate, in_one_block
from contrastile.exchange.hierarchical import Hierarchical
from contrastile.exchange.ring import Ring
from contrastile.losses.base import PairLoss, Shard
from contrastile.offload import default_workspace, known_device
from contrastile.scorers import MaxSim
from contrastile.tiles.base import Tiles
from contrastile.tiles.bfloat import of_dtype
from contrastile.tiles.eager import Dense, Eager
from contrastile.tiles.scored import Scorer

logger = logging.getLogger("contrastile")

LEAST_WORKSPACE = 2**20
# "auto" gathers columns within the device's memory divided by this
GATHERED_SHARE = 16
WORDS = {
    "backend": get_args(Backend),
    "exchange": get_args(ExchangeName),
    "gradient": get_args(Gradient),
    "reduction": get_args(Reduction),
}


@dataclass(frozen=True)
class Options:
    """The keywords of every loss (see the docstring of `contrast`)."""

    backend: Backend = "auto"
    exchange: ExchangeName = "auto"
    group: Any = None
    gradient: Gradient = "mean"
    label_smoothing: float = 0.0
    reduction: Reduction = "mean"
    workspace: int | None = None
    device: torch.device | str | None = None

    def __deepcopy__(self, memo: object) -> Self:
        # nothing in it changes, and a process group cannot be copied
        return self

    @classmethod
    def refuse(cls, unknown: Mapping[str, object], others: tuple[str, ...] = ()) -> Never:
        """Raise for keywords that are no option; `others`: names that the called function knows beside them."""
        raise unknown_keyword(unknown, [*others, *cls.__dataclass_fields__])

    def __post_init__(self) -> None:
        for name, words in WORDS.items():
            one_of(name, getattr(self, name), words, "Leave it out for the default.")
        smoothing, workspace = self.label_smoothing, self.workspace
        if not isinstance(smoothing, (int, float, Real)) or not 0.0 <= smoothing < 1.0:
            rule, remedy = SMOOTHING
            raise invalid("label_smoothing", rule, repr(smoothing), remedy)
        if workspace is not None:
            # 2e9 is a number of bytes too
            count = int(workspace) if isinstance(workspace, float) and math.isfinite(workspace) else workspace
            remedy, rule = "Leave it out for the default.", f"be a whole number of bytes, {LEAST_WORKSPACE} at least"
            count = whole_number("workspace", count, LEAST_WORKSPACE, remedy, rule=rule)
            object.__setattr__(self, "workspace", count)
        if self.device is not None:
            known_device(self.device, "where the features are")


def workspace_on(device: torch.device, workspace: int | None, *, alone: bool = False) -> int:
    """Bytes that tiles may use on a device; None: the default for its memory."""
    if workspace is not None:
        return workspace
    return default_workspace(device_memory(device), alone=alone and device.type == "cuda")


EXCHANGES: dict[str, type[Exchange]] = {
    "single": Single, "replicate": Replicate, "gather": Gather, "ring": Ring, "hierarchical": Hierarchical,
}  # fmt: skip


def choose_exchange(
    options: Options, loss: PairLoss, rows: Shard, cols: Shard, statement: dict[str, Any],
    tokens: tuple[int, int] | None = None, unnamed: tuple[bool, bool] = (False, False),
) -> Exchange:  # fmt: skip
    """The exchange by name; for "auto" that of `automatic_exchange`, the same on all ranks.

    statement: further facts that all ranks must have in common, such as which inputs require a gradient. tokens: those
    of a row and of a column on this rank, where they may differ. unnamed: as in `Problem`.
    """
    name, group = options.exchange, options.group
    W = collectives.size(group)
    if W == 1:
        not_empty(len(rows))
        return Single(options.gradient, Layout(group, 0, (len(rows),), (len(cols),)))
    if name == "single":
        # nothing travels: one rank may compute a loss of its own while the others do not, for validation
        return Single(options.gradient, Layout(None, 0, (len(rows),), (len(cols),)))
    layout = agreed_layout(options, loss, rows, cols, statement, tokens, unnamed)
    if name == "auto":
        most = layout.tokens or (None, None)
        D = max(_numbers_per_row(side, length) for side, length in zip((rows, cols), most, strict=True))
        dtype = max((x.dtype for side in (rows, cols) for x in side.leaves), key=bytes_per_feature)
        with in_step(group):
            copied = partial(copies_carry, group, rows.features.device)
            name = automatic_exchange(layout, D, dtype, layout.allowed, copied)
        _say_once(f"exchange: {name}")
    if name == "replicate" and loss.exclude_self and layout.rows != layout.cols:
        rule = "meet the ranks' columns in turn for a loss of examples among themselves with further keys"
        raise invalid("exchange", rule, "'replicate'", "Take gather or ring.")
    return EXCHANGES[name](options.gradient, layout)


def agreed_layout(
    options: Options, loss: PairLoss, rows: Shard, cols: Shard, statement: dict[str, Any],
    tokens: tuple[int, int] | None = None, unnamed: tuple[bool, bool] = (False, False),
) -> Layout:  # fmt: skip
    """The rows and columns of every rank, and the most tokens; raises where the ranks' statements differ."""
    group = collectives.resolved(options.group)
    statement = _statement(options, loss, rows, cols, ragged=tokens is not None) | statement
    allowed = gathering_allowed(rows.features.device)
    counted = consistency.tally(group, statement, (len(rows), len(cols), allowed, *unnamed, *(tokens or (0, 0))))
    of_rows, of_cols, allowances, labels, ids, *lengths = (tuple(each) for each in zip(*counted, strict=True))
    longest = None if tokens is None else (max(lengths[0]), max(lengths[1]))
    shared: dict[str, Any] = {"allowed": min(allowances), "unnamed": (any(labels), any(ids))}
    layout = Layout(group, collectives.rank(group), of_rows, of_cols, tokens=longest, **shared)
    not_empty(sum(layout.rows))
    return layout


def _numbers_per_row(side: Shard, tokens: int | None) -> int:
    """Numbers of a row in all tensors of a side; tokens: those of the row, where they differ between ranks."""
    shapes = (x.shape[1:] if tokens is None else (tokens, *x.shape[2:]) for x in side.leaves)
    return sum(map(math.prod, shapes))


def not_empty(rows: int) -> None:
    """Raise for a global batch without rows, which has no mean."""
    if rows == 0:
        raise invalid("q", "have at least one row over all ranks", 0, "Skip the step when the batch is empty.")


def automatic_exchange(
    layout: Layout, D: int, dtype: torch.dtype, allowed: int, copied: Callable[[], bool]
) -> ExchangeName:  # fmt: skip
    """The ring if copy engines carry it and columns are many, gather if its bytes are allowed, else the ring.

    With copies the ring takes the time of gather and less memory; few columns are one block in gather and W blocks in
    the ring. copied: asks whether copy engines carry transfers, on all ranks at once.
    """
    if Ring.kept_bytes(layout, D, dtype) and not in_one_block(layout, D) and copied():
        return "ring"
    return "gather" if Gather.extra_bytes(layout, D, dtype) <= allowed else "ring"


def gathering_allowed(device: torch.device) -> int:
    """Bytes of gathered columns that "auto" allows a rank: a share of the device's memory."""
    return device_memory(device) // GATHERED_SHARE


def _statement(options: Options, loss: PairLoss, rows: Shard, cols: Shard, *, ragged: bool) -> dict[str, Any]:
    """The facts that ranks must have in common. The exchange comes first: it decides what else must agree."""
    return {
        # the value is in `Problem.statement`; named before the feature sizes, which differ where it does
        "exchange": options.exchange, "loss": repr(loss), "contrast_positives": False,
        "backend": options.backend, "gradient": options.gradient,
        "reduction": options.reduction, "features": _shapes(rows, ragged=ragged),
        "key features": _shapes(cols, ragged=ragged), "dtype": str(rows.features.dtype),
        "device": rows.features.device.type, "positives": None if rows.positives is None else rows.positives.shape[1],
        "labels": _presence(rows.labels), "ids": _presence(rows.ids), "in_batch": not rows.own_positives,
        "negatives of each query": _presence(rows.own),
    }  # fmt: skip


def _presence(x: object) -> str:
    return "left out" if x is None else "given"


def _shapes(side: Shard, *, ragged: bool) -> Any:
    """The feature size; for a learned score the shape and dtype of each tensor, or of one token of ragged ones."""
    if side.features.ndim == 2 and not side.others:
        return side.features.shape[1]
    return [f"{list(x.shape[2 if ragged else 1 :])} {x.dtype}" for x in side.leaves]


def _triton() -> type[Tiles]:
    """The fused tiles, imported at their first use: importing the library must not import Triton."""
    from contrastile.tiles.triton.backend import Triton

    return Triton


TILES: dict[str, Callable[[], type[Tiles]]] = {"dense": lambda: Dense, "eager": lambda: Eager, "triton": _triton}
# in the order of preference, by type of device
AUTOMATIC = {"cuda": ("triton", "eager")}


def choose_tiles(backend: Backend, loss: PairLoss, rows: Shard, cols: Shard) -> type[Tiles]:
    """The tiles by name, which never falls back; for "auto" the first that does not decline, said once in the log."""
    if backend != "auto":
        tiles, reason = _offer(backend, loss, rows, cols)
        if tiles is None:
            raise invalid("backend", "be able to compute this loss", repr(backend), f"It declines: {reason}.")
        return tiles
    declined = ""
    for name, tiles, reason in offers(loss, rows, cols):
        if tiles is not None:
            _say_once(f"backend: {name}{declined}")
            return tiles
        declined += f"; {name} declined: {reason}"
    raise AssertionError("eager declines nothing")


def choose_fused(backend: Backend, scorer: Scorer, rows: Shard, cols: Shard) -> Any:
    """The tiles of a scorer that has kernels; None for those of its own operations."""
    has_kernels, on_gpu = type(scorer.module) is MaxSim, rows.features.device.type == "cuda"
    if backend == "triton" and not has_kernels:
        remedy = "A scorer brings its own kernels."
        raise invalid("backend", "be auto, eager or dense with a scorer", "'triton'", remedy)
    if not has_kernels or backend in ("eager", "dense") or (backend == "auto" and not on_gpu):
        return None
    try:
        from contrastile.tiles.triton.maxsim.late import FusedMaxSim

        reason = FusedMaxSim.refusal(scorer, rows, cols)
    except ImportError as error:
        reason = f"{error.name} is not installed"
    if reason is None:
        _say_once("backend: triton for MaxSim")
        return FusedMaxSim
    if backend == "triton":
        raise invalid("backend", "be able to compute this scorer", "'triton'", f"It declines: {reason}.")
    _say_once(f"backend: eager for MaxSim; triton declined: {reason}")
    return None


def offers(loss: PairLoss, rows: Shard, cols: Shard) -> Iterator[tuple[str, type[Tiles] | None, str | None]]:
    """The backends that "auto" considers, in order: name, and tiles or the reason why they decline."""
    for name in AUTOMATIC.get(rows.features.device.type, ("eager",)):
        yield name, *_offer(name, loss, rows, cols)


def _offer(name: str, loss: PairLoss, rows: Shard, cols: Shard) -> tuple[type[Tiles] | None, str | None]:
    """The tiles of a backend, or those that it has for rows with columns of their own alone; else why it declines."""
    try:
        tiles = TILES[name]()
    except ImportError as error:
        return None, f"{error.name} is not installed"
    reason = tiles.declines(loss, rows, cols)
    if reason and rows.own is not None and not len(cols) and tiles.own_fallback is not None:
        tiles = tiles.own_fallback
        reason = tiles.declines(loss, rows, cols)
    return (None, reason) if reason else (of_dtype(tiles, rows.features.dtype, rows.features.device), None)


def _say_once(message: str) -> None:
    """Log a message once in a process; nothing while a graph is traced, where logging would become part of it."""
    if not torch.compiler.is_compiling():
        _log_once(message)


@cache
def _log_once(message: str) -> None:
    logger.info(message)


@cache
def device_memory(device: torch.device) -> int:
    """All bytes of the device's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
