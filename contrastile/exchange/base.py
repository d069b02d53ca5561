"""Which blocks a rank computes, and the one place that owns the gradient convention.

Stands between `_sweep.py` and `tiles/`: an exchange walks over the shards of columns, brings each one here, and
merges what the tiles say of it.

**The gradient convention.** The loss is that of the global batch, L, the same number on every rank. A data-parallel
wrapper then combines the ranks' parameter gradients: by their mean (DDP, FSDP) or by their sum. So that the combined
gradient of every parameter, the scale's and the bias's included, is exactly ∂L/∂θ, the gradient that a rank hands
back for its own features is `W · ∂L/∂features` where the wrapper takes the mean, and `∂L/∂features` where it sums.
`Exchange.gradient_factor` is that number; nothing else in the library multiplies by a number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from contrastile import comm
from contrastile._types import Gradient, accumulator
from contrastile.in_step import in_step
from contrastile.losses.base import Side
from contrastile.tiles.base import Tiles


@dataclass(frozen=True)
class Shards:
    """Who shares the batch, and how many rows and columns each rank has."""

    group: Any
    rank: int
    rows: tuple[int, ...]
    cols: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, rows: Side, cols: Side) -> tuple[Side, Side]:
        """This rank's sides with their positions counted over all ranks."""
        first_row, first_col = sum(self.rows[: self.rank]), sum(self.cols[: self.rank])
        positives = rows.positives
        if positives is not None:
            positives = torch.where(positives >= 0, positives + first_col, positives)
        diagonal = None if rows.diagonal is None else rows.diagonal + first_col
        return (
            replace(rows, start=first_row, diagonal=diagonal, positives=positives),
            replace(cols, start=first_col),
        )


@dataclass(frozen=True)
class Exchange(ABC):
    """One way of letting the rows of this rank meet the columns of all."""

    # what the data-parallel wrapper does with gradients
    gradient: Gradient
    shards: Shards
    # a pair is computed on one rank only
    once: ClassVar[bool] = True

    @abstractmethod
    def stats(self, tiles: Tiles, rows: Side, cols: Side) -> tuple[Tensor, Tensor | None]:
        """Statistics of this rank's rows over all columns, and of this rank's columns over all rows."""

    @abstractmethod
    def grads(self, tiles: Tiles, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None) -> Tensor:
        """Adds to u and v, which come as zeros, what all ranks' pairs give this rank's rows and columns.

        Returns the sums over this rank's rows.
        """

    @abstractmethod
    def stats_and_grads(
        self, tiles: Tiles, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Both in one sweep, for a pairwise loss whose rows carry their coefficients: the rows' statistics, and the
        sums over this rank's rows.
        """

    @classmethod
    @abstractmethod
    def extra_bytes(cls, shards: Shards, D: int, dtype: torch.dtype) -> int:
        """Bytes that a rank holds beside its own features, gradients and workspace, at the worst moment."""

    def total(self, here: Tensor) -> Tensor:
        """The sum over all ranks of a small tensor."""
        return here if len(self.shards) == 1 else comm.total(here, self.shards.group)

    def in_step(self) -> AbstractContextManager[None]:
        """Around a sweep: an error of one rank's own is an error on all of them."""
        return nullcontext() if len(self.shards) == 1 else in_step(self.shards.group)

    def held(self) -> int:
        """Multiprocessors that tiles had better leave to what travels meanwhile."""
        return 0 if len(self.shards) == 1 else comm.held(self.shards.group)

    def gradient_factor(self) -> int:
        """What the wrapper's averaging will divide by."""
        return len(self.shards) if self.gradient == "mean" else 1


def held_each(dtype: torch.dtype) -> int:
    """Bytes of a feature that is here from another rank, and of its gradient, which is accumulated."""
    return dtype.itemsize + accumulator(dtype).itemsize


@dataclass(frozen=True)
class Gathering:
    """All ranks' shards of a side, on their way."""

    side: Side
    flight: comm.Flight

    def wait(self) -> Side:
        """All of them as one side, in rank order."""
        luggage = self.flight.wait()
        if self.side.state is not None:
            luggage[-1] = luggage[-1].T
        return self.side.moved(luggage, 0)


def gather_side(side: Side, sizes: Sequence[int], group: Any) -> Gathering:
    """Asks all ranks for their shards, with all that travels with them."""
    luggage = side.luggage()
    if side.state is not None:
        luggage[-1] = luggage[-1].T.contiguous()
    return Gathering(side, comm.begin_gather([x.contiguous() for x in luggage], sizes, group))
