"""Exponentials that the forward of a small call keeps for its backward: 6·N·M·D operations instead of 8.

In one direction a pair's gradient is its exponential times a number of its row, g_ij = e_ij · a_i, which is known once
the row's sum is. The forward therefore writes the exponentials as the 16-bit strip, with Σ e and Σ e · ⟨q, k⟩ of each
tile, and the backward needs no product before those with the features:

    u_i = a_i · Σ_j e_ij k_j        v_j = Σ_i e_ij · (a_i q_i)        Σ g · ⟨q, k⟩ = Σ_i a_i · Σ_j e_ij ⟨q_i, k_j⟩

A symmetric loss would have to multiply the strip by a_i + b_j in memory, which takes as long as to compute it again.
A block of several super-tiles has no memory to keep all of its strips.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contrastile.losses.base import PairLoss, Shard
from contrastile.tiles.triton import backward, launch
from contrastile.tiles.triton.block import Block, Budget, by_label
from contrastile.tiles.triton.plan import Epilogue, Pair, most_programs, shape_for, tiles_of
from contrastile.tiles.triton.products import add_at_once, add_rows

# power of two that keeps a_i · q_i within the range of bf16: a_i lies between 2^−137 and 2^60
UNIT = 2.0**40
# rows of one program of `kept_rows`, features at a time, and tiles added at once
ROWS, FEATURES, TILES = 8, 256, 128
# columns per row from which the columns' sums, most of the memory that a call writes, have 16 bits
NARROW = 4


@dataclass(frozen=True)
class Kept:
    """A block's exponentials [N, M] as a strip, and Σ e · ⟨q, k⟩ along the rows of each tile [col tiles, N]."""

    pair: Pair
    strip: Tensor
    inner: Tensor
    # of each row, and behind them those of `launch.new_sums` for the careful form
    sums: Tensor

    @property
    def narrow(self) -> bool:
        """The columns' sums have 16 bits."""
        return len(self.pair.k) >= NARROW * len(self.pair.q)

    def add(self, block: Block, weights: Tensor, u: Tensor | None, v: Tensor | None, epilogue: Epilogue) -> Tensor:
        """Write the gradient sums of all pairs to u and v; returns Σ g · ⟨q, k⟩ in float64.

        weights: a [N]. Where the careful flag is set, the strip becomes the gradient itself.
        """
        (col_tiles, N), q = self.inner.shape, self.pair.q
        launch.careful_gradient(self.pair, block, self.strip, self.sums[N:], epilogue)
        factors, weighted = torch.empty_like(weights), q.data.new_empty(N, q.width)
        launch.run(
            backward.kept_rows, (tiles_of(N, ROWS),), q_ptr=q.data, out_ptr=weighted, weights_ptr=weights,
            inner_ptr=self.inner, factors_ptr=factors, sums_ptr=self.sums, constants_ptr=block.constants, N=N,
            D=q.width, q_row_stride=q.data.stride(0), col_tiles=col_tiles, UNIT=UNIT, ROWS=ROWS, BLOCK=FEATURES,
            TILES=TILES,
        )  # fmt: skip
        if u is not None:
            add_rows(u, self.pair, self.strip, fresh=True)
            u.mul_(factors[:, None])
        if v is not None:
            (g,), x = self.pair.strip_pieces(self.strip), weighted[:, : v.shape[1]]
            if v.dtype == torch.float32:
                add_at_once(v, g.T, x, 1 / UNIT, 0.0)
            else:
                torch.addmm(v, g.T, x, alpha=1 / UNIT, beta=0, out=v)
        return self.sums.sum(dtype=torch.float64) * (1 + launch.truncation(block.rows.features))


def suits(rows: Shard, loss: PairLoss, epilogue: Epilogue) -> bool:
    """Return whether exponentials of this kind can be kept: of one direction, without soft targets, in bf16.

    The range of fp16 is too small for exponentials, and float32 features would have three strips.
    """
    kind = epilogue.exponential and not (epilogue.smooth or epilogue.taught or loss.symmetric)
    return kind and rows.features.dtype == torch.bfloat16 and not by_label(rows)


def fits(block: Block, epilogue: Epilogue, budget: Budget) -> bool:
    """Return whether a block's exponentials can be kept: of a kind that suits, and all in one strip."""
    return suits(block.rows, block.loss, epilogue) and budget.keeps(block)


def exponentials(pair: Pair, constants: Tensor, parts: Tensor, epilogue: Epilogue) -> Kept:
    """Write the strip, and to the parts [2, col tiles, N] each tile's Σ e and Σ e · ⟨q, k⟩ along rows."""
    # weights are not read: memory of their length
    strip, unused, device = pair.new_strip(), [parts[0]], constants.device
    sums = torch.zeros(parts.shape[2] + most_programs(device) * shape_for(device).rows, device=device)
    launch.gradient(pair, constants, unused, strip, sums[parts.shape[2] :], epilogue, parts)
    return Kept(pair, strip, parts[1], sums)
