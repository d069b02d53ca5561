"""SigLIP's loss: every pair is a yes-or-no question (Zhai et al. 2023, algorithm 1).

    loss_i = Σ_j log(1 + exp(−z_ij x_ij)),   z_ij = 1 for a positive pair, −1 for all others,

with x_ij = scale · ⟨q_i, k_j⟩ + bias. The mean over rows is the sum over all pairs divided by the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from contrastile._errors import invalid
from contrastile.losses.base import Diagonal, Finished, Formula, PairLoss, Shard, Tile


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
        losses = torch.logaddexp(tile.x, tile.x.new_zeros(()))
        if isinstance(tile.positive, Diagonal):
            at_positive = tile.positive.of(tile.x)
            tile.positive.of(losses).copy_(torch.logaddexp(-at_positive, at_positive.new_zeros(())))
        elif tile.positive is not None:
            losses = torch.logaddexp(torch.where(tile.positive, -tile.x, tile.x), tile.x.new_zeros(()))
        return (losses.sum(1)[None],)

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
