"""Hardness: each negative is counted exp(β · similarity) times (Robinson et al. 2021, equation 4, unnormalised).

For row i with positives P(i) and the other keys N(i) that count,

    loss_i = log(Σ_{p ∈ P(i)} exp x_ip + Σ_{j ∈ N(i)} w_ij exp x_ij) − mean_{p ∈ P(i)} x_ip ,
    w_ij = exp(β ⟨q_i, k_j⟩),

where weights are constants: no gradient goes through them, as in sentence-transformers' losses. Lan et al. 2025
(equation 5) weigh the negatives of the batch in this way, and Schechter Vera et al. 2025 (EmbeddingGemma) those of the
query itself.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from contrastile._errors import number, one_of
from contrastile.losses.base import Formula, Shard, Tile
from contrastile.losses.softmax import Softmax

IN_BATCH, OWN, ALL = MODES = ("in_batch_negatives", "hard_negatives", "all_negatives")


@dataclass(frozen=True)
class Hardness(Softmax):
    """The softmax loss with β · ⟨q, k⟩ added to the logits of negatives, as a constant (Robinson et al. 2021).

    Naively, with logits x [N, M], a diagonal of positives, and `eye` as ones on it,
    `F.cross_entropy(x + hardness_strength * (q @ k.T).detach() * (1 - eye), labels)`; label smoothing spreads over
    these logits.

    hardness_strength: β, for unit features 5 to 9 in the papers; 0 weighs nothing. A β in units of logits, as in
    Robinson's own code, is β · scale here.
    hardness_mode: negatives that are weighed: all keys but those of the query alone ("in_batch_negatives"), only those
    of the query alone ([N, H, D], "hard_negatives"), or both ("all_negatives").

    >>> from contrastile import contrast
    >>> q, k = torch.nn.functional.normalize(torch.randn(2, 6, 16), dim=-1)
    >>> contrast(q, k, scale=10.0, loss=Hardness(hardness_strength=5.0)).shape
    torch.Size([])
    """

    formula = Formula("exponential", denominator="all")
    reads_products: ClassVar[bool] = True

    hardness_strength: float = 0.0
    hardness_mode: str = ALL

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("hardness_mode", self.hardness_mode, MODES, "They are sentence-transformers' words.")
        strength = self.hardness_strength
        number("hardness_strength", strength, lambda beta: beta >= 0.0, "be at least 0", "5 to 9 is usual.")

    @property
    def block_hardness(self) -> float:
        """β of the block of all pairs."""
        return 0.0 if self.hardness_mode == OWN else self.hardness_strength

    def absorb(self, tile: Tile) -> tuple[Tensor, ...]:
        return super().absorb(self._weighed(tile))

    def pair_grad(self, tile: Tile, rows: Shard, cols: Shard) -> Tensor:
        return super().pair_grad(self._weighed(tile), rows, cols)

    def _weighed(self, tile: Tile) -> Tile:
        """The tile whose negatives' logits are x + β · ⟨q, k⟩, in place."""
        beta = (0.0 if self.hardness_mode == IN_BATCH else self.hardness_strength) if tile.own else self.block_hardness
        if beta == 0.0:
            return tile
        x, positive = tile.x, tile.positive
        assert tile.products is not None
        if isinstance(positive, Tensor):
            weighed = torch.where(positive, x, x + beta * tile.products)
        else:
            before = x if positive is None else positive.of(x).clone()
            weighed = x.add_(tile.products, alpha=beta)
            if positive is not None:
                positive.of(weighed).copy_(before)
        bounds = tile.bounds
        if bounds is not None:
            least, most = (beta * float(bound) for bound in tile.products.aminmax())
            bounds = min(bounds[0], bounds[0] + least), max(bounds[1], bounds[1] + most)
        return tile._replace(x=weighed, bounds=bounds)
