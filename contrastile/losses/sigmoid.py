"""SigLIP's loss: every pair is a yes-or-no question (Zhai et al. 2023, algorithm 1).

    loss_i = Σ_j log(1 + exp(−z_ij x_ij)),   z_ij = 1 for a positive pair, −1 for all others,

with x_ij = scale · ⟨q_i, k_j⟩ + bias. The mean over rows is the sum over all pairs divided by the batch.

`BalancedSigmoid` (SigLIP+ of siglip-kernel) multiplies the term of a positive pair by (1 / k_i + 1 / k'_j) / 2, with
k_i the positives of row i and k'_j those of column j, over all ranks: a number of the row plus one of the column.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile._types import accumulator
from contrastile.losses.base import (
    SPREAD,
    Count,
    Diagonal,
    Direct,
    Finished,
    Formula,
    Gathers,
    PairLoss,
    Shard,
    Tile,
    changed,
)


@dataclass(frozen=True)
class Sigmoid(PairLoss):
    """Binary cross-entropy of every pair that counts (SigLIP, Zhai et al. 2023).

    Naively `-F.logsigmoid(z * x).sum() / N` with logits x [N, M], and z = 1 for a positive pair and −1 for all others.

    >>> from contrastile import contrast
    >>> q, k = torch.nn.functional.normalize(torch.randn(2, 6, 16), dim=-1)
    >>> contrast(q, k, scale=10.0, bias=-10.0, loss=Sigmoid()).shape
    torch.Size([])
    """

    state_rows: ClassVar[int] = 0
    formula = Formula("softplus")
    unsmoothed = "the sigmoid loss", "Leave it out, or take a softmax loss."

    symmetric: bool = False
    exclude_self: bool = False
    uses_bias: bool = True
    pairwise: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.symmetric:
            remedy = "Leave it out: each pair counts once for both sides."
            raise invalid("symmetric", "be False for a sigmoid loss", self.symmetric, remedy)

    def init(self, n: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(1, n, dtype=dtype, device=device)

    def absorb(self, tile: Tile) -> tuple[Tensor, ...]:
        x, positive = tile.x, tile.positive
        losses = torch.logaddexp(torch.where(positive, -x, x) if isinstance(positive, Tensor) else x, x.new_zeros(()))
        if isinstance(positive, Diagonal):
            positive.of(losses).copy_(torch.logaddexp(-positive.of(x), x.new_zeros(())))
        return (losses.sum(1)[None],)

    def direct(self, tile: Tile) -> Direct | None:
        x, positive, bounds = tile.x, tile.positive, tile.bounds
        if type(self) is not Sigmoid or bounds is None or not -torch.inf < bounds[0] <= bounds[1] <= SPREAD:
            return None
        at_positive = -positive.of(x) if isinstance(positive, Diagonal) else x
        sign = None
        if isinstance(positive, Tensor):
            if bounds[0] < -SPREAD:
                return None
            sign = torch.ones_like(x).masked_fill_(positive, -1.0)
            x.mul_(sign)
        exponential = x.exp_()
        losses = exponential.log1p()
        if isinstance(positive, Diagonal):
            positive.of(losses).copy_(torch.logaddexp(at_positive, x.new_zeros(())))
        end = self.finish(losses.sum(1)[None])

        def pair_grad(coefficients: Tensor | float, keep: bool) -> Tensor:
            # in the memory of the losses
            above = torch.add(exponential, 1, out=losses)
            grad = torch.div(exponential, above, out=above if keep else exponential)
            if isinstance(positive, Diagonal):
                positive.of(grad).copy_(torch.sigmoid(at_positive).neg_())
            elif sign is not None:
                grad.mul_(sign)
            return grad.mul_(coefficients.T if isinstance(coefficients, Tensor) else coefficients)

        return Direct([end], pair_grad)

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def finish(self, stats: Tensor) -> Finished:
        (loss,) = stats
        return Finished(loss, torch.ones_like(loss), stats[:0])

    def pair_grad(self, tile: Tile, rows: Shard, _cols: Shard) -> Tensor:
        assert rows.coefficient is not None
        grad = torch.sigmoid(tile.x)
        # −σ(−x), not σ(x) − 1, which would cancel
        if isinstance(tile.positive, Diagonal):
            tile.positive.of(grad).copy_(torch.sigmoid(-tile.positive.of(tile.x)).neg_())
        elif tile.positive is not None:
            grad = torch.where(tile.positive, torch.sigmoid(-tile.x).neg_(), grad)
        return grad.mul_(rows.coefficient[:, None])


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

    def counted(self, rows: Shard, cols: Shard, gathers: Gathers, count: Count) -> tuple[Shard, Shard]:
        if rows.positives is not None:
            raise invalid("positives", "be left out for the balanced sigmoid loss", "some", "Pass labels.")
        if rows.labels is None or cols.labels is None:
            # one positive each
            return rows, cols
        wide = accumulator(rows.features.dtype)
        of_all_rows, of_all_cols = gathers
        every_row, every_col = of_all_rows(rows.labels), of_all_cols(cols.labels)
        numbers = [count(rows.labels, every_col)]
        if every_row is not every_col:
            numbers.append(count(cols.labels, every_row))
        if self.exclude_self:
            # an example is no positive of its own
            N = len(rows)
            itself = (rows.labels == cols.labels[:N]).to(numbers[0].dtype)
            numbers = [torch.cat([n[:N] - itself, n[N:]]) for n in numbers]
        shares = [0.5 / n.clamp(min=1).to(wide) for n in numbers]
        return changed(rows, numbers=shares[0]), changed(cols, numbers=shares[-1])

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
