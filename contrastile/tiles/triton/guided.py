"""Bits of excluded pairs, from kernels of their own before those of the tiles; a teacher's constants.

Between `launch.py` and `backend.py`. A tile's registers hold one product, and no ids. So a guide's product comes first,
as do comparisons of ids, and leave one bit for each pair. A teacher needs no kernel of its own: each program sets a
tile of its products aside.

A backward that follows at once needs both products of a pair anyway, and adds what the loss lacks. The forward then
has two plain sweeps, of the student and of the teacher. With q_i the teacher's softmax, w the weight of its loss and
γ_i = ∂loss/∂loss_i, the loss lacks, over both directions,

    Σ_i γ_i w Σ_j q_ij (t_ij − x_ij − lift_i) ,

in powers of 2. A lift, the difference of the two sums' binades, makes it as small as the divergence, which has few
correct bits. Each tile adds up γ_i w q_ij (t_ij − x_ij); the lifts' part follows from the sums of the forward.

In bf16, where the workspace has room for all pairs of a symmetric loss, the teacher's sweep keeps its exponentials, and
the backward reads them: 10·N·M·D operations in place of 12. Sums are those of the rounded numbers, so that a row's
targets add up to 1, and are the same in loss and gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any

import torch
from torch import Tensor

from contrastile.losses.base import Shard
from contrastile.tiles.base import ForwardResult
from contrastile.tiles.triton import launch, plan
from contrastile.tiles.triton.block import Block, SuperTile
from contrastile.tiles.triton.budget import COLUMN_SUMS
from contrastile.tiles.triton.kernels.arithmetic import LOGIT_SUM, NONFINITE, UNIT
from contrastile.tiles.triton.launch import CONSTANTS
from contrastile.tiles.triton.plan import Epilogue, Pair


class Gap:
    """The part of a teacher's loss that is missing after a forward of two sweeps."""

    def __init__(self, stats: Sequence[Tensor]) -> None:
        rows = sum(side.shape[1] for side in stats)
        # of the gradient's programs, and behind them of each row of both sides
        self.sums = stats[0].new_zeros(plan.most_programs(stats[0].device) + rows)
        # [2, n] of each side, which `merge_sums` has written, and memory for each row's part
        self.weighed = [side[LOGIT_SUM.value :][:2] for side in stats], self.sums[-rows:]
        # the loss, as `finish` returns it
        self.value: Tensor | None = None


@dataclass
class Guidance:
    """Values kept by a block's forward for its backward.

    position: of the block. bits: of all its pairs. gap: of a teacher's loss. strip: a teacher's exponentials.
    """

    position: tuple[int, ...] | None = None
    bits: Tensor | None = None
    gap: Gap | None = None
    strip: Tensor | None = None

    def masked(self, pair: Pair, block: Block, at: tuple[slice, slice], *, careful: bool) -> Pair:
        """The operands with the bits of their pairs, if any are excluded; careful: for the careful kernels alone."""
        has_mask = block.epilogue.has_mask
        if pair.masks.ids is None and not has_mask:
            return pair
        size = plan.bits_shape(len(pair.q), len(pair.k), pair.shape)
        if self.bits is not None and self.position == block.position:
            i, j = at[0].start // pair.shape.rows, at[1].start // pair.shape.cols
            return replace(pair, bits=self.bits[i : i + size[0], j : j + size[1]])
        pair = replace(pair, bits=torch.empty(size, dtype=torch.int32, device=block.constants.device))
        launch.excluded_bits(pair, block.constants, mask=has_mask, careful=careful)
        return pair

    @property
    def weighed(self) -> tuple[list[Tensor], Tensor] | tuple[()]:
        """The arguments of `launch.direction_weights`."""
        return () if self.gap is None else self.gap.weighed

    @property
    def of_teacher(self) -> dict[str, Any]:
        """Further arguments of `launch.gradient`."""
        return {} if self.gap is None else {"row_part": self.gap.sums, "kept": self.strip is not None}

    def noted(self, result: ForwardResult) -> ForwardResult:
        """The result, to whose value the backward adds the gap."""
        if self.gap is not None:
            self.gap.value = result.value
        return result

    def complete(self, constants: Tensor) -> None:
        """Add the gap, a sum in powers of 2 and in the unit of the strip, to the value."""
        if self.gap is not None:
            assert self.gap.value is not None
            total = launch.add_up([(self.gap.sums, 0.0)])[1]
            self.gap.value.addcdiv_(total, constants[UNIT.value], value=log(2))

    def held(self, block: Block) -> int:
        """Bytes of the bits of this block."""
        return self.bits.nbytes if self.bits is not None and self.position == block.position else 0


def with_guide(constants: Tensor, rows: Shard, cols: Shard, epilogue: Epilogue, *, first: bool) -> Tensor:
    """The constants of a block, and behind them those of a teacher's logits, if there is one.

    first: the flag becomes NaN where the features of a guide whose products are a mask, or a threshold, are not finite.
    """
    if epilogue.has_mask and first and rows.numbers is not None:
        ((a,), (b,)) = rows.guides, cols.guides
        constants[NONFINITE.value].add_(launch.feature_norms(a, b)[1].sum() + (rows.numbers * 0).sum())
    if not epilogue.has_teacher:
        return constants
    ((a,), (b,)), scale = (rows.guides, cols.guides), rows.numbers
    scale = constants.new_ones(()) if scale is None else scale[0]
    return torch.cat([constants, launch.block_constants(a, b, scale, None, epilogue)])


def separate_sums(tile: SuperTile, strip: Tensor | None) -> list[Tensor]:
    """The sums of the student's exponentials, and behind them those of the teacher's, from a sweep each.

    strip: also write the teacher's exponentials into it.
    """
    pair, constants, student = tile.pair, tile.block.constants, tile.block.epilogue.student
    parts = tile.block.new_parts(2)
    if strip is not None:
        _, *size = parts.pop().shape
        parts.append(constants.new_empty(1 + COLUMN_SUMS, *size))
    launch.sums(replace(pair, guide=None, has_teacher=False), constants, parts, student)
    of_teacher = [part[1:] for part in parts]
    launch.sums(pair.of_guide, constants[CONSTANTS:], of_teacher, student, strip, rounded=strip is not None)
    for more in of_teacher[-1][1:]:
        of_teacher[-1][0].add_(more)
    return [part[:2] for part in parts]
