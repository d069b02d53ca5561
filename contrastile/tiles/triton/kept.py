"""Exponentials that the forward of a small call keeps for its backward: 6·N·M·D operations instead of 8.

In one direction a pair's gradient is its exponential times a number of its row, g_ij = 2^t_ij · a_i, which is known
once the row's sum is. The forward therefore writes the exponentials e as the 16-bit strip, and the backward needs no
products of its own:

    u_i = a_i · Σ_j e_ij k_j        v_j = Σ_i e_ij · (a_i q_i)        Σ g · ⟨q, k⟩ = Σ_i a_i · Σ_j e_ij ⟨q_i, k_j⟩

A symmetric loss has a second number for each column, and its two exponentials differ. A block of several super-tiles
has no memory to keep all of its strips.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contrastile.tiles.triton import backward, launch
from contrastile.tiles.triton.block import Block, Budget, by_label
from contrastile.tiles.triton.plan import Epilogue, Pair, tiles_of
from contrastile.tiles.triton.products import add_at_once, add_rows

# power of two that keeps a_i · q_i within the range of bf16: a_i lies between 2^−137 and 2^60
UNIT = 2.0**40
# rows of one program of `kept_rows`, and tiles added at once
ROWS, TILES = 8, 64


@dataclass(frozen=True)
class Kept:
    """A block's exponentials [N, M] as a strip, and Σ e · ⟨q, k⟩ along the rows of each tile [col tiles, N]."""

    pair: Pair
    strip: Tensor
    inner: Tensor
    # as `launch.new_sums`, for the careful form
    sums: Tensor

    def add(self, block: Block, weights: Tensor, u: Tensor | None, v: Tensor | None, epilogue: Epilogue) -> Tensor:
        """Write the gradient sums of all pairs to u and v; returns Σ g · ⟨q, k⟩ in float64.

        weights: a [N]. Where the careful flag is set, the strip becomes the gradient itself.
        """
        launch.careful_gradient(self.pair, block, self.strip, self.sums, epilogue)
        factors, weighted, of_rows = self._rows(weights, block.constants)
        if u is not None:
            add_rows(u, self.pair, self.strip, fresh=True)
            u.mul_(factors[:, None])
        if v is not None:
            (g,) = self.pair.strip_pieces(self.strip)
            add_at_once(v, g.T, weighted[:, : v.shape[1]], 1 / UNIT, 0.0)
        total = self.sums.sum(dtype=torch.float64) + of_rows.sum(dtype=torch.float64)
        return total * (1 + launch.truncation(block.rows.features))

    def _rows(self, weights: Tensor, constants: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each row's factor [N], the operand UNIT · a_i · q_i of the columns' sums, and Σ_j g_ij · ⟨q_i, k_j⟩ [N]."""
        q, (col_tiles, N) = self.pair.q, self.inner.shape
        factors, sums = self.inner.new_empty(2, N)
        weighted = q.data.new_empty(N, q.width)
        launch.run(
            backward.kept_rows, (tiles_of(N, ROWS),), q_ptr=q.data, out_ptr=weighted, weights_ptr=weights,
            inner_ptr=self.inner, factors_ptr=factors, sums_ptr=sums, constants_ptr=constants, N=N, D=q.width,
            q_row_stride=q.data.stride(0), col_tiles=col_tiles, UNIT=UNIT, ROWS=ROWS, BLOCK=launch.BLOCK, TILES=TILES,
        )  # fmt: skip
        return factors, weighted, sums


def fits(block: Block, epilogue: Epilogue, budget: Budget) -> bool:
    """A block's exponentials can be kept: one direction, without soft targets, in bf16, and all in one strip.

    The range of fp16 is too small for exponentials, and float32 features would have three strips.
    """
    kind = epilogue.exponential and not (epilogue.smooth or epilogue.taught or block.loss.symmetric)
    return kind and block.rows.features.dtype == torch.bfloat16 and not by_label(block.rows) and budget.keeps(block)


def exponentials(pair: Pair, constants: Tensor, parts: Tensor, epilogue: Epilogue) -> Kept:
    """Write the strip, and to the parts [2, col tiles, N] each tile's Σ e and Σ e · ⟨q, k⟩ along rows."""
    strip, sums, unused = pair.new_strip(), launch.new_sums(constants.device), [(constants, constants)]
    launch.gradient(pair, constants, unused, strip, sums, epilogue, parts)
    return Kept(pair, strip, parts[1], sums)
