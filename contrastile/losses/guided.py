"""GIST: a guide finds false negatives (Solatorio 2024).

A guide is another model, with features a_i of the queries and b_j of the keys. For row i with positives P(i) and the
guide's similarity of its positive t_i = min_{p ∈ P(i)} ⟨a_i, b_p⟩, the negatives j with

    ⟨a_i, b_j⟩ > t_i − margin            ("absolute")
    ⟨a_i, b_j⟩ > t_i − margin · |t_i|    ("relative")

leave the denominator of the softmax. The guide's similarities are a second product of each tile, and mask the first.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from contrastile._errors import invalid, number, one_of
from contrastile._types import accumulator
from contrastile.losses.base import Direct, Formula, Products, Shard, Tile, fill
from contrastile.losses.softmax import Softmax

STRATEGIES = ("absolute", "relative")
# rows whose features are copied to the accumulator's dtype at once
ROWS_AT_ONCE = 8192
# roundings within which a similarity equals that of the positive
TIES = 16
# further features of a guide, 16 bytes in 16 bits, and their value, whose product is beyond any threshold
MARKS, FAR = 8, 2.0**15


@dataclass(frozen=True)
class Guided(Softmax):
    """The softmax loss of one direction without the negatives that a guide finds too similar to the query (GIST,
    Solatorio 2024).

    Naively, with logits x [N, M], a diagonal of positives, and guide_q [N, G], guide_k [M, G],

        guide = guide_q @ guide_k.T
        threshold = guide.diagonal()[:, None]
        false = guide > threshold - margin
        F.cross_entropy(x.masked_fill(false & ~eye, -torch.inf), labels)

    margin: subtracted from the threshold as it is (margin_strategy="absolute"), or times the threshold's size
    ("relative"). A similarity within 16 roundings of the accumulator's dtype does not exceed the threshold, so that
    every backend treats copies of the positive alike.

    >>> from contrastile import contrast
    >>> q, k, a, b = torch.nn.functional.normalize(torch.randn(4, 6, 16), dim=-1)
    >>> contrast(q, k, scale=10.0, loss=Guided(), guide_q=a, guide_k=b).shape
    torch.Size([])
    """

    formula = Formula(
        "exponential", denominator="all", finish_fields=frozenset({"margin", "margin_strategy"}), guide="mask"
    )
    guides: ClassVar[int] = 1

    margin: float = 0.0
    margin_strategy: str = "absolute"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("margin_strategy", self.margin_strategy, STRATEGIES, "They are sentence-transformers' words.")
        number("margin", self.margin, lambda _: True, "be a finite number", "0.0 is the paper's.")
        if self.symmetric:
            remedy = "Add the loss of the exchanged sides for both directions."
            raise invalid("symmetric", "be False for a guided loss", self.symmetric, remedy)

    def guide_numbers(self, rows: Shard, cols: Shard, products: Products | None) -> Tensor:
        """The threshold of each row."""
        (of_rows,), (of_cols,) = rows.guides, cols.guides
        # of rows with two halves the first one has the positives (`tiles/halves.py`)
        of_rows = of_rows[:, : of_cols.shape[1]]
        wide = accumulator(rows.features.dtype)
        if rows.diagonal is not None:
            listed = torch.arange(rows.diagonal, rows.diagonal + len(of_rows), device=of_rows.device)[:, None]
        elif rows.positives is not None:
            listed = rows.positives
        else:
            raise invalid("query_labels", "be left out for a guided loss", "some", "Pass `positives`.")
        if self.exclude_self:
            # an example is no positive of its own
            itself = torch.arange(len(of_rows), device=of_rows.device)[:, None]
            listed = listed.masked_fill(listed == itself, -1)
        least = of_rows.new_zeros(len(of_rows), dtype=wide)
        if listed.shape[1]:
            least = (products or listed_products)(of_rows, of_cols, listed, wide).amin(1)
            # a row without a positive has no loss, whatever its negatives are
            least = least.masked_fill(least == torch.inf, 0.0)
        margin = self.margin * least.abs() if self.margin_strategy == "relative" else self.margin
        return least - margin + TIES * torch.finfo(wide).eps * least.abs().clamp(min=1.0)

    def direct(self, tile: Tile) -> Direct | None:
        return self._direct(_masked(tile)) if type(self) is Guided else None

    def absorb(self, tile: Tile) -> tuple[Tensor, ...]:
        return super().absorb(_masked(tile))

    def pair_grad(self, tile: Tile, rows: Shard, cols: Shard) -> Tensor:
        return super().pair_grad(_masked(tile), rows, cols)


def _masked(tile: Tile) -> Tile:
    """The tile without the negatives that exceed their row's threshold."""
    (similar,), (threshold, _) = tile.guides, tile.numbers
    assert threshold is not None
    excluded = fill(fill(similar > threshold[:, None], tile.positive, False), tile.excluded, True)
    return tile._replace(x=tile.x.masked_fill_(excluded, -torch.inf), excluded=excluded)


def listed_products(a: Tensor, b: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """⟨a_i, b_j⟩ [n, P] of each row and the columns j at its positions, ∞ where a position is negative."""
    out = a.new_full(positions.shape, torch.inf, dtype=dtype)
    # autocast, in which ranks compute these numbers before the call, would round them
    with torch.autocast(a.device.type, enabled=False):
        # without a column, no position is one
        for start in range(0, len(a) if len(b) else 0, ROWS_AT_ONCE):
            along = slice(start, start + ROWS_AT_ONCE)
            some = a[along].to(dtype)
            for product, at in zip(out[along].unbind(1), positions[along].unbind(1), strict=True):
                similar = torch.linalg.vecdot(some, b[at.clamp(0, len(b) - 1)].to(dtype))
                product.copy_(similar.masked_fill(at < 0, torch.inf))
    return out
