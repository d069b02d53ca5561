"""What every way of computing a block of the matrix must offer.

Stands between `exchange/`, which decides which columns meet which rows, and the arithmetic: a `Tiles` value knows
the loss, the scale and the bias of one call, computes any block of rows × columns, and never holds more than its
workspace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from contrastile._types import Reduction
from contrastile.losses.base import PairLoss, Side

# rows multiplied at once where a product with float32 copies is summed up
ROWS_AT_ONCE = 8192


class Turn:
    """An accumulator that passes from rank to rank, each of which adds its part, and is here during one block.

    It comes while the block is computed, and is waited for when first asked for; a `first` one is new, and only what
    comes beside it is waited for, before it leaves. It leaves once: with the block, or where `early` says that nothing
    else will be written over, as soon as it has been added to.
    """

    def __init__(
        self, gathered: Tensor, wait: Callable[[], object], go_on: Callable[[], object], *, first: bool, early: bool
    ) -> None:
        self._gathered, self._go_on = gathered, go_on
        # what is still to be done before it is here, and before it has left
        self._wait: Callable[[], object] | None = wait
        self._left = False
        # nobody has added anything: what it holds is not to be read
        self.first, self.early = first, early

    def here(self) -> Tensor:
        """The accumulator, as soon as it is here."""
        if not self.first:
            self._arrive()
        return self._gathered

    def leave(self) -> None:
        """It may go on. Asking again does nothing."""
        if not self._left:
            self._arrive()
            self._left = True
            self._go_on()

    def _arrive(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None


@dataclass(frozen=True)
class Tiles(ABC):
    """One call's arithmetic: logits x_ij = scale · ⟨q_i, k_j⟩ (+ bias), and what `loss` makes of them."""

    # waits for nothing on the device, so that a call can be captured as a graph
    capturable: ClassVar[bool] = False
    # `grads` and `stats_and_grads` add to a v that is a `Turn`, and let it leave
    takes_turns: ClassVar[bool] = False

    loss: PairLoss
    # [] in the accumulator's type
    scale: Tensor
    # [] in the accumulator's type
    bias: Tensor | None
    # bytes that may be used beside inputs, outputs and accumulators
    workspace: int

    @classmethod
    @abstractmethod
    def declines(cls, loss: PairLoss, rows: Side, cols: Side) -> str | None:
        """Why this way cannot compute such blocks; None if it can."""

    @abstractmethod
    def stats(self, rows: Side, cols: Side) -> tuple[Tensor, Tensor | None]:
        """The statistics [K, N] of the rows over these columns and, if symmetric, [K, M] of the columns over these
        rows.

        One sweep over the block serves both.
        """

    @abstractmethod
    def grads(self, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None) -> Tensor:
        """Adds Σ_j g_ij k_j to u [N, D] and Σ_i g_ij q_i to v [M, D], g being the pairs' gradient; returns Σ_ij g_ij.

        Both in the accumulator's type, both without the scale; what is None is not computed. Tiles that weigh return
        Σ_ij g_ij · ⟨q_i, k_j⟩ behind the sum. A learned score's derivatives stand in the place of k_j and q_i, and its
        sums go on beyond these two (see `scored.py`).
        """

    @abstractmethod
    def stats_and_grads(self, rows: Side, cols: Side, u: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor]:
        """Both in one sweep of 6·N·M·D operations, for a pairwise loss whose rows carry their coefficients already.

        Returns the statistics of the rows, and what `grads` does.
        """

    def merge(self, stats: Tensor, parts: Tensor) -> None:
        """Merges the parts [P, K, n], one after the other, into the statistics [K, n] of the same rows."""
        for part in parts:
            stats.copy_(self.loss.merge(stats, part))

    @abstractmethod
    def workspace_bytes(self, N: int, M: int, D: int, dtype: torch.dtype) -> int:
        """The most that a block of N × M of D features in `dtype` takes beside inputs, outputs and accumulators."""

    def ended(
        self,
        stats: Sequence[Tensor],
        weights: Tensor | None,
        reduction: Reduction,
        total: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, list[Tensor], list[Tensor]] | None:
        """The loss of all rows, and each direction's state and coefficients, from the statistics of a call's sweep.

        None where these tiles have no shorter way than `PairLoss.finish` and the formulas of `_sweep.py`.
        """
        del stats, weights, reduction, total
        return None

    def scaled(self, x: Tensor, total: Tensor, times: Tensor | None, *, keep: bool) -> Tensor:
        """total · scale · times in the type of x; times is 1 if None. Overwrites `total` if it need not be kept."""
        factor = self.scale if times is None else self.scale * times
        return (total * factor if keep else total.mul_(factor)).to(x.dtype)

    def sums(self, found: Tensor, x: Tensor, total: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Σ_ij g_ij and Σ_ij g_ij · ⟨q_i, k_j⟩, from what `grads` returned.

        x, total: q and u, or k and v, off which the second is read where tiles do not weigh; None without `total`.
        """
        if self.weighs:
            return found[0], found[1]
        return found, None if total is None else inner_product(x, total)

    @property
    def weighs(self) -> bool:
        """Whether `grads` also returns Σ_ij g_ij · ⟨q_i, k_j⟩, the scale's gradient, which else is read off u or v."""
        return False

    def sparing(self, multiprocessors: int) -> Tiles:
        """The same, which leaves so many of the device's multiprocessors to others."""
        del multiprocessors
        return self

    def init(self, side: Side) -> Tensor:
        """Statistics of rows that have met no column."""
        return self.loss.init(len(side), dtype=self.scale.dtype, device=self.scale.device)

    def no_pairs(self) -> Tensor:
        """What `grads` returns where no row meets a column."""
        return self.scale.new_zeros(2) if self.weighs else torch.zeros_like(self.scale)


def inner_product(x: Tensor, total: Tensor) -> Tensor:
    """Σ ⟨x_i, total_i⟩ in the accumulator's type, some rows at a time."""
    parts = [
        torch.linalg.vecdot(some.to(total.dtype), other).sum()
        for some, other in zip(x.split(ROWS_AT_ONCE), total.split(ROWS_AT_ONCE), strict=True)
    ]
    return torch.stack(parts).sum()
