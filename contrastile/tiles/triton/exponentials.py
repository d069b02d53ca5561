"""Exponentials that the forward of a call keeps for the backward behind it: 6·N·M·D operations instead of 8.

A pair's gradient is its exponential times a row factor plus a column factor, g_ij = e_ij · (a_i + b_j), which are known
once all sums are. The forward therefore writes the exponentials as the 16-bit strip, and the backward needs no product
before those with the features.

A symmetric loss multiplies the strip by a_i + b_j in place: four bytes of memory for each pair are faster than its
product from some 300 features on. In one direction the products have the factor instead, as does Σ e · ⟨q, k⟩ of each
tile, written by the forward:

    u_i = a_i · Σ_j e_ij k_j        v_j = Σ_i e_ij · (a_i q_i)        Σ g · ⟨q, k⟩ = Σ_i a_i · Σ_j e_ij ⟨q_i, k_j⟩

Positives by label in tiles are no exponentials: their gradients are written into the strip before its products, in one
direction divided by the factor of their row.

A block of several super-tiles has no memory to keep all of its strips.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from contrastile.tiles.base import NARROW
from contrastile.tiles.triton import launch, sorting
from contrastile.tiles.triton.block import Block
from contrastile.tiles.triton.budget import COLUMN_SUMS
from contrastile.tiles.triton.kernels import exponentials as exponential_kernels
from contrastile.tiles.triton.launch import Weights, add_at_once, add_cols, add_rows
from contrastile.tiles.triton.plan import Pair, tiles_of

# power of two that keeps a_i · q_i within the range of bf16: a_i lies between 2^−137 and 2^60
UNIT = 2.0**40
# least of the largest |t| at which a symmetric loss takes Σ g · ⟨q, k⟩ from Σ g · t, with its rounding over the scale
LEAST = 2.0**-4
# rows of one program of `weighted_rows`, features at a time, and tiles added at once
ROWS, FEATURES, TILES = 8, 256, 128
# of one program of `weighted_pairs`: rows at a time, columns, times, of which so many are loaded ahead; and its warps
PAIRS, PAIRS_WARPS = (2, 1024, 8, 4), 4
# numbers that `weighted_total` reads at once
NUMBERS = 2048


@dataclass(frozen=True)
class Exponentials:
    """A block's exponentials [N, M] as a strip, and sums along the rows of each tile [1, col tiles, N] or [2, ...].

    They are Σ e and, of one direction, Σ e · ⟨q, k⟩.
    """

    pair: Pair
    strip: Tensor
    # those of the careful kernels (`launch.new_sums`); in one direction a number of each row follows
    sums: Tensor
    parts: Tensor

    @property
    def symmetric(self) -> bool:
        """Both directions have Σ e; of one direction there is Σ e · ⟨q, k⟩ too."""
        return len(self.parts) == 1

    @property
    def narrow(self) -> bool:
        """The columns' sums have 16 bits."""
        return not self.symmetric and len(self.pair.k) >= NARROW * len(self.pair.q)

    def add(
        self, block: Block, weights: Weights, u: Tensor | None, v: Tensor | None, positives: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        """Write the gradient sums of all pairs to u and v; returns numbers that add up to Σ g · ⟨q, k⟩.

        weights: a [1, N] and, of a symmetric loss, b [1, M]. Where the careful flag is set, the strip becomes the
        gradient itself. positives: their kernel follows and multiplies u by the factors [N] of its rows, which are
        returned too: a pass over u less.
        """
        launch.careful_gradient(self.pair, block, self.strip, self.sums)
        (of_rows, of_cols), factors, weighted = block.places, None, None
        later: Tensor | None = None
        if self.symmetric:
            numbers = [self._weigh_pairs(block, weights)]
        else:
            numbers, (factors, weighted) = [self.sums], self._weigh_rows(block, weights[0][0])
        if block.order is not None:
            numbers.append(sorting.new_sums(block))
            sorting.label_gradients(self.pair, block, self.strip, numbers[-1], weights, factored=not self.symmetric)
        if u is not None:
            if positives and of_rows is None:
                later, factors = factors, None
            with sorting.in_order(u, of_rows, factors=factors) as total:
                add_rows(total, self.pair, self.strip, fresh=True)
            # freed before the columns' sums in the order of labels are allocated
            del total
        if v is not None:
            with sorting.in_order(v, of_cols) as total:
                if weighted is None:
                    add_cols(total, self.pair, self.strip, fresh=True)
                else:
                    self._add_weighted(total, weighted)
        return numbers, later

    def _weigh_rows(self, block: Block, a: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of each row's sums [N], and the rows times them; writes the rows' Σ g · ⟨q, k⟩."""
        inner, q = self.parts[1], self.pair.q
        col_tiles, N = inner.shape
        factors, weighted = torch.empty_like(a), q.data.new_empty(N, q.width)
        launch.run(
            exponential_kernels.weighted_rows, (tiles_of(N, ROWS),), q_ptr=q.data, out_ptr=weighted, weights_ptr=a,
            inner_ptr=inner, factors_ptr=factors, sums_ptr=self.sums[-N:], constants_ptr=block.constants, N=N,
            D=q.width, q_row_stride=q.data.stride(0), col_tiles=col_tiles, UNIT=UNIT, ROWS=ROWS, BLOCK=FEATURES,
            TILES=TILES,
        )  # fmt: skip
        return factors, weighted

    def _add_weighted(self, total: Tensor, weighted: Tensor) -> None:
        """Write the sums of columns from the rows times their factors."""
        (g,), x = self.pair.strip_pieces(self.strip), weighted[:, : total.shape[1]]
        # the last columns may have no sums
        of_cols = g.T[: len(total)]
        if total.dtype == torch.float32:
            add_at_once(total, of_cols, x, 0.0, 1 / UNIT)
        else:
            torch.addmm(total, of_cols, x, alpha=1 / UNIT, beta=0, out=total)

    def _weigh_pairs(self, block: Block, weights: Weights) -> Tensor:
        """Turn the strip into the gradient, and return Σ g · ⟨q, k⟩."""
        rows, cols, steps, stages = PAIRS
        N, M = len(self.pair.q), len(self.pair.k)
        # the strip has whole tiles
        blocks = tiles_of(M, cols) * (self.strip.shape[0] // (rows * steps))
        parts, total = weights[0].new_empty(2, blocks), weights[0].new_empty((), dtype=torch.float64)
        launch.run(
            exponential_kernels.weighted_pairs, (blocks,), strip_ptr=self.strip, out_stride=self.strip.stride(0),
            row_part_ptr=self.parts, row_a_ptr=weights[0], col_b_ptr=weights[1], sums_ptr=parts,
            constants_ptr=block.constants, N=N, M=M, blocks=blocks, ROWS=rows, BLOCK=cols, STEPS=steps, STAGES=stages,
            BN=self.pair.shape.cols, warps=PAIRS_WARPS,
        )  # fmt: skip
        launch.run(
            exponential_kernels.weighted_total, (1,), N=N, M=M, sums_ptr=parts, careful_ptr=self.sums, out_ptr=total,
            blocks=blocks, parts=self.sums.numel(), BLOCK=NUMBERS, warps=16,
            **launch.directions(block),
        )  # fmt: skip
        return total


def written(pair: Pair, block: Block) -> tuple[Exponentials, list[Tensor]]:
    """Write the strip; and each tile's sums, as `launch.sums`: of one direction also Σ e · ⟨q, k⟩, of both several of
    each column.
    """
    strip, constants, epilogue = pair.new_strip(), block.constants, block.epilogue
    if block.loss.symmetric:
        parts = block.new_parts(1, each=COLUMN_SUMS)
        launch.sums(pair, constants, parts, epilogue, strip)
        sums = launch.new_sums(constants.device)
    else:
        parts = block.new_parts(2)
        sums = launch.new_sums(constants.device, len(pair.q))
        # weights are not read: memory of their length
        launch.gradient(pair, constants, [parts[0][0]], strip, sums, epilogue, parts[0])
    return Exponentials(pair, strip, sums, parts[0]), parts
