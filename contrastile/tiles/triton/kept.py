"""Exponentials that the forward of a small call keeps for its backward: 6·N·M·D operations instead of 8.

A pair's gradient is its exponential times a number of its row and one of its column, g_ij = e_ij · (a_i + b_j), which
are known once the sums of all rows and columns are. The forward therefore writes the exponentials as the 16-bit strip,
and Σ e and Σ e · ⟨q, k⟩ of each tile; the backward needs no product before those with the features. A symmetric loss
multiplies the strip by a_i + b_j in memory. In one direction no b exists, and the factors move to the features:

    u_i = a_i · Σ_j e_ij k_j        v_j = Σ_i e_ij · (a_i q_i)

A block of several super-tiles has no memory to keep all of its strips.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from contrastile.tiles.triton import backward, launch
from contrastile.tiles.triton.block import Block, Budget, by_label
from contrastile.tiles.triton.launch import Weights
from contrastile.tiles.triton.plan import Epilogue, Pair, tiles_of
from contrastile.tiles.triton.products import add_at_once, add_cols, add_rows

# power of two that keeps a_i · q_i within the range of bf16: a_i lies between 2^−137 and 2^60
UNIT = 2.0**40
# rows of one program of `kept_sums`, and tiles added at once; rows and columns of one of `weighed_strip`
ROWS, TILES, STRIP = 32, 64, (8, 512)
# columns per row from which the columns' sums, most of the memory that a call writes, have 16 bits
NARROW = 4


@dataclass(frozen=True)
class Kept:
    """A block's exponentials [N, M] as a strip, and the tiles' numbers of each side, as `gradient` writes them."""

    pair: Pair
    strip: Tensor
    # [2, col tiles, N] and, if symmetric, [2, row tiles, M]: Σ e, and Σ e · ⟨q, k⟩
    parts: Sequence[Tensor]
    # as `launch.new_sums`, for the careful form
    sums: Tensor

    @property
    def narrow(self) -> bool:
        """The columns' sums have 16 bits: those of one direction with far more columns than rows."""
        return len(self.parts) == 1 and self.strip.shape[1] >= NARROW * self.strip.shape[0]

    def add(self, block: Block, weights: Weights, u: Tensor | None, v: Tensor | None, epilogue: Epilogue) -> Tensor:
        """Write the gradient sums of all pairs to u and v; returns Σ g · ⟨q, k⟩ in float64.

        weights: those of `launch.direction_weights`. Where the careful flag is set, the strip becomes the gradient.
        """
        launch.careful_gradient(self.pair, block, self.strip, self.sums, epilogue)
        # those of the columns lie behind them
        every = weights[0][0]
        factors, of_rows = self._sums(every, block.constants)
        if len(self.parts) == 2:
            self._weigh(every, block.constants)
            if u is not None:
                add_rows(u, self.pair, self.strip, fresh=True)
            if v is not None:
                add_cols(v, self.pair, self.strip, fresh=True)
        else:
            (g,), q = self.pair.strip_pieces(self.strip), self.pair.q.data
            if u is not None:
                add_rows(u, self.pair, self.strip, fresh=True)
                u.mul_(factors[:, None])
            if v is not None:
                weighted = torch.mul(q, (factors * UNIT)[:, None], out=torch.empty_like(q))
                x = weighted[:, : v.shape[1]]
                if v.dtype == q.dtype:
                    torch.addmm(v, g.T, x, alpha=1 / UNIT, beta=0, out=v)
                else:
                    add_at_once(v, g.T, x, 1 / UNIT, 0.0)
        total = self.sums.sum(dtype=torch.float64) + of_rows.sum(dtype=torch.float64)
        return total * (1 + launch.truncation(block.rows.features))

    def _sums(self, weights: Tensor, constants: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of rows and columns, and Σ g · ⟨q, k⟩ of each: [N], or [N + M]."""
        (_, col_tiles, N), (_, row_tiles, M) = self.parts[0].shape, self.parts[-1].shape
        n = N + M if len(self.parts) == 2 else N
        factors, sums = constants.new_empty(2, n)
        launch.run(
            backward.kept_sums, (tiles_of(max(N, M), ROWS), len(self.parts)), row_inner_ptr=self.parts[0][1],
            col_inner_ptr=self.parts[-1][1], weights_ptr=weights, factors_ptr=factors, sums_ptr=sums,
            constants_ptr=constants, N=N, M=M, row_tiles=row_tiles, col_tiles=col_tiles, ROWS=ROWS, TILES=TILES,
        )  # fmt: skip
        return factors, sums

    def _weigh(self, weights: Tensor, constants: Tensor) -> None:
        N, M = len(self.pair.q), len(self.pair.k)
        rows, cols = STRIP
        launch.run(
            backward.weighed_strip, (tiles_of(N, rows), tiles_of(M, cols)), strip_ptr=self.strip,
            stride=self.strip.stride(0), weights_ptr=weights, constants_ptr=constants, N=N, M=M, ROWS=rows, BLOCK=cols,
        )  # fmt: skip


def fits(block: Block, epilogue: Epilogue, budget: Budget) -> bool:
    """A block's exponentials can be kept: without soft targets, in bf16, and all in one strip.

    The range of fp16 is too small for exponentials, and float32 features would have three strips.
    """
    kind = epilogue.exponential and not (epilogue.smooth or epilogue.taught)
    return kind and block.rows.features.dtype == torch.bfloat16 and not by_label(block.rows) and budget.keeps(block)


def exponentials(pair: Pair, constants: Tensor, parts: Sequence[Tensor], epilogue: Epilogue) -> Kept:
    """Write the strip, and to the parts each tile's Σ e and Σ e · ⟨q, k⟩."""
    strip, sums, unused = pair.new_strip(), launch.new_sums(constants.device), [(constants, constants)] * len(parts)
    launch.gradient(pair, constants, unused, strip, sums, epilogue, *parts)
    return Kept(pair, strip, parts, sums)
