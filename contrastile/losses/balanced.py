"""SigLIP's loss with several positives, each anchor's of one weight together (SigLIP+ of siglip-kernel).

With z_ij = ±1 as in `sigmoid.py`, k_i the positives of row i and k'_j those of column j, over all ranks,

    loss_i = Σ_j v_ij log(1 + exp(−z_ij x_ij)),   v_ij = (1 / k_i + 1 / k'_j) / 2 for a positive pair, 1 for all others.

The weight of a positive is the sum of a number of its row and one of its column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile._types import accumulator
from contrastile.losses.base import Count, Formula, Shard, Tile, changed
from contrastile.losses.sigmoid import Sigmoid


@dataclass(frozen=True)
class BalancedSigmoid(Sigmoid):
    """The sigmoid loss of positives by label, weighted by their number (SigLIP+ of siglip-kernel).

    Naively, with logits x and `positive` [N, M], `z = 2 * positive - 1` and

        v = torch.where(positive, (1 / positive.sum(1, keepdim=True) + 1 / positive.sum(0)) / 2, 1)
        (-v * F.logsigmoid(z * x)).sum() / N

    >>> from contrastile import contrast
    >>> q, k, labels = *torch.nn.functional.normalize(torch.randn(2, 6, 16), dim=-1), torch.arange(6) // 2
    >>> contrast(q, k, scale=10.0, bias=-10.0, loss=BalancedSigmoid(), query_labels=labels, key_labels=labels).shape
    torch.Size([])
    """

    formula = Formula("softplus", weighed=True)
    counts_positives: ClassVar[bool] = True

    def counted(
        self,
        rows: Shard,
        cols: Shard,
        all_rows: Callable[[Tensor], Tensor],
        all_cols: Callable[[Tensor], Tensor],
        count: Count,
    ) -> tuple[Shard, Shard]:
        if rows.positives is not None:
            raise invalid("positives", "be left out for the balanced sigmoid loss", "some", "Pass labels.")
        if rows.labels is None or cols.labels is None:
            # one positive each
            return rows, cols
        wide = accumulator(rows.features.dtype)
        every_row, every_col = all_rows(rows.labels), all_cols(cols.labels)
        of_rows = 0.5 / count(rows.labels, every_col).clamp(min=1).to(wide)
        shares = [of_rows, of_rows]
        if every_row is not every_col:
            shares[1] = 0.5 / count(cols.labels, every_row).clamp(min=1).to(wide)
        return changed(rows, numbers=shares[0]), changed(cols, numbers=shares[1])

    def absorb(self, tile: Tile) -> tuple[Tensor, ...]:
        weights = _weights(tile)
        if weights is None:
            return super().absorb(tile)
        assert isinstance(tile.positive, Tensor)
        losses = torch.logaddexp(torch.where(tile.positive, -tile.x, tile.x), tile.x.new_zeros(()))
        return (torch.where(tile.positive, losses * weights, losses).sum(1)[None],)

    def pair_grad(self, tile: Tile, rows: Shard, cols: Shard) -> Tensor:
        grad, weights = super().pair_grad(tile, rows, cols), _weights(tile)
        if weights is None:
            return grad
        assert isinstance(tile.positive, Tensor)
        return torch.where(tile.positive, grad * weights, grad)


def _weights(tile: Tile) -> Tensor | None:
    """v [I, J] of the positives; None where each row has one."""
    of_rows, of_cols = tile.numbers
    if of_rows is None or of_cols is None or not isinstance(tile.positive, Tensor):
        return None
    return of_rows[:, None] + of_cols
