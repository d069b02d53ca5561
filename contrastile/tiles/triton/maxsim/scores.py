"""Tiles of scores that kernels have computed: everything between the scores and their gradients.

Beside `triton/backend.py`, for scorers with kernels of their own; `late.py` derives from it. Losses whose pairs are
exponentials take three kernels here (`triton/kernels/scores.py`) and two of `reductions.py`; all others take the
operations of `eager.py`. Nothing waits for the device, so that small calls are captured as a CUDA graph.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from contrastile._types import Reduction
from contrastile.losses.base import Shard, Tile, Total
from contrastile.tiles.base import ForwardResult, InFlight
from contrastile.tiles.scored import Form, Scored
from contrastile.tiles.triton import launch, plan
from contrastile.tiles.triton.block import Block, readable_side
from contrastile.tiles.triton.kernels import scores as kernels
from contrastile.tiles.triton.launch import on
from contrastile.tiles.triton.plan import Epilogue, tiles_of
from contrastile.tiles.triton.start import run

# rows, or columns, of a program of statistics, and of the others that it meets at once
SIDE, STEP = 16, 128
# sides of a tile of gradients
SQUARE = 64
# tokens of a program that looks for values that are not finite, and their features at a time
TOKENS, FEATURES = 64, 64


@dataclass
class FusedScores(Scored):
    """Blocks of scores from kernels; the vectors of each side are the one leaf that can want a gradient."""

    capturable: ClassVar[bool] = True

    def accumulators(self, rows: Shard, cols: Shard, wanted: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
        del wanted
        # then sums are float32 for a strip at a time, and take memory as tiles are met, each of which frees what the
        # forward has kept for it
        self.sums_are_gradients = self.whole_backward

        def zeros(form: Form, side: Shard) -> Tensor | None:
            if not form.wanted[0]:
                return None
            x, n = side.features, 0 if self.whole_backward and len(cols) else len(side)
            return x.new_zeros(n, math.prod(x.shape[1:]), dtype=x.dtype if self.whole_backward else self.scale.dtype)

        return zeros(self.scorer.rows, rows), zeros(self.scorer.cols, cols)

    def backward(
        self, rows: Shard, cols: Shard, u: Tensor | None, v: Tensor | InFlight | None, row_stats: Tensor | None = None
    ) -> Tensor:
        if not self.whole_backward:
            return super().backward(rows, cols, u, v, row_stats)
        assert not isinstance(v, InFlight)
        sums = self.no_pairs()
        u_strips: dict[int, Tensor] = {}
        for along_j, col_strip in self._tiles(cols, self.side):
            v_J = None if v is None else self.scale.new_zeros(len(col_strip), v.shape[1])
            for along_i, row_strip in self._tiles(rows, self.side):
                if u is not None and along_i.start not in u_strips:
                    u_strips[along_i.start] = self.scale.new_zeros(len(row_strip), u.shape[1])
                stats = None if row_stats is None else row_stats[:, along_i]
                sums += super().backward(row_strip, col_strip, u_strips.get(along_i.start), v_J, stats)
            self._fill(v, len(cols), along_j, v_J)
        for along_i, _ in self._tiles(rows, self.side):
            self._fill(u, len(rows), along_i, u_strips.pop(along_i.start, None))
        return sums

    def _fill(self, gradient: Tensor | None, n: int, along: slice, total: Tensor | None) -> None:
        """Write the sums of a strip, scaled, to the gradient, whose n rows take memory with the first strip."""
        if gradient is not None and total is not None:
            gradient.resize_(n, gradient.shape[1])
            gradient[along] = self.scaled(total, gradient.dtype, None, keep=False).view_as(total)

    @abstractmethod
    def _scores(self, rows: Shard, cols: Shard, *, with_graph: bool) -> tuple[Tensor, Any]:
        """The scores [I, J], dense in either order, and the block of tokens for `_pass_on`."""

    @abstractmethod
    def _pass_on(self, g_IJ: Tensor, block: Any, u_I: Tensor | None, v_J: Tensor | None) -> None:
        """Add the gradient of the vectors to the accumulators."""

    @cached_property
    def _epilogue(self) -> Epilogue | None:
        """The work of the kernels; None for a loss that takes torch's operations, and for scores of float32 tokens.

        The exponentials and logarithms of the chip are further from float64 than theirs.
        """
        exact = self.scorer.dtype == torch.float32 and not plan.interpreting()
        if exact or plan.unknown_part(self.loss) is not None:
            return None
        epilogue = plan.epilogue_for(self.loss)
        formula = epilogue.formula
        plain = formula.denominator is not None and formula.guide is None
        plain = plain and not (formula.inside or formula.mises_fisher or epilogue.hardness)
        return epilogue if epilogue.exponential and plain else None

    def merge(self, stats: Tensor, parts: Tensor) -> None:
        if self._epilogue is None:
            super().merge(stats, parts)
            return
        with on(self.scale.device):
            launch.merge_parts(stats, parts, self._epilogue)

    def finish(
        self, stats: Sequence[Tensor], weights: Tensor | None, reduction: Reduction, total: Total,
        nonfinite: Callable[[], Tensor],
    ) -> ForwardResult:  # fmt: skip
        epilogue = self._epilogue
        if epilogue is None or not max(side.shape[1] for side in stats):
            return super().finish(stats, weights, reduction, total, nonfinite)
        weights = None if weights is None else weights.to(torch.float32).contiguous()
        stats = [side.contiguous() for side in stats]
        numbers = nonfinite().expand(launch.CONSTANTS).contiguous(), self.scale
        with on(self.scale.device):
            return ForwardResult(*launch.finish(stats, weights, numbers, total, epilogue, reduction))

    def scaled(self, total: Tensor, dtype: torch.dtype, upstream: Tensor | None, *, keep: bool) -> Tensor:
        # rows of tokens are few and long, and a program has whole rows
        width = launch.BLOCK if total.numel() % launch.BLOCK == 0 else total.shape[1]
        with on(self.scale.device):
            return launch.scaled(total.view(-1, width), self.scale, upstream, dtype, keep=keep)

    def _logits(self, rows: Shard, cols: Shard, room: Tensor, *, with_graph: bool) -> tuple[Tensor, Any]:
        del room
        self.computed = True
        with on(self.scale.device):
            scores, block = self._scores(rows, cols, with_graph=with_graph)
        # the kernels scale what they load
        return scores if self._epilogue else scores * self.scale, (scores, block)

    def _tile(self, x: Tensor, rows: Shard, cols: Shard, context: Any) -> Tile:
        # the kernels find positives and excluded pairs themselves
        return Tile(x, None, None, None) if self._epilogue else super()._tile(x, rows, cols, context)

    def _stats(self, tile: Tile, rows: Shard, cols: Shard, *, keep: bool = False) -> Sequence[Tensor]:
        epilogue = self._epilogue
        if epilogue is None:
            return super()._stats(tile, rows, cols, keep=keep)
        sides = (rows, cols)[: 1 + self.loss.symmetric]
        stats = [self.scale.new_empty(epilogue.stats, len(side)) for side in sides]
        with on(self.scale.device):
            run(
                kernels.score_stats, (tiles_of(max(map(len, sides)), SIDE), len(sides)), row_stats_ptr=stats[0],
                row_stats_stride=stats[0].stride(0), col_stats_ptr=stats[-1], col_stats_stride=stats[-1].stride(0),
                SMOOTH=epilogue.smooth, SIDE=SIDE, STEP=STEP, **self._pairs(tile.x, rows, cols),
            )  # fmt: skip
        return stats

    def _propagate(
        self, tile: Tile, context: Any, rows: Shard, cols: Shard, u_I: Tensor | None, v_J: Tensor | None, sums: Tensor
    ) -> None:
        (scores, block), epilogue = context, self._epilogue
        if epilogue is None:
            g = self.loss.pair_grad(tile, rows, cols)
            parts = torch.stack([g.sum(), (g * scores).sum()])[:, None]
        else:
            rows, cols = readable_side(rows, {}), readable_side(cols, {})
            g, grid = torch.empty_like(scores), (tiles_of(len(rows), SQUARE), tiles_of(len(cols), SQUARE))
            parts = scores.new_empty(2, grid[0] * grid[1])
            given = launch.directions(Block(rows, cols, self.scale, self.loss))
            given |= self._pairs(scores, rows, cols)
            with on(self.scale.device):
                run(kernels.score_gradients, grid, out_ptr=g, sums_ptr=parts, BM=SQUARE, BN=SQUARE, **given)
        sums += parts.sum(1)
        with on(self.scale.device):
            self._pass_on(g, block, u_I, v_J)

    def _pairs(self, scores: Tensor, rows: Shard, cols: Shard) -> dict[str, Any]:
        """The scores of a tile and its masks, as the kernels read them."""
        rows = readable_side(rows, {})
        masks = Block(rows, cols, self.scale, self.loss).masks
        return masks.arguments(scores) | {
            "scores_ptr": scores, "scale_ptr": self.scale, "row_stride": scores.stride(0),
            "col_stride": scores.stride(1), "N": len(rows), "M": len(cols),
        }  # fmt: skip


def token_flag(scale: Tensor, sides: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """0 if the scale and the vectors [B, L, D] that their mask [B, L] does not hide are finite, NaN otherwise."""
    (q, q_tokens, q_mask), (k, k_tokens, k_mask) = (
        (x.contiguous(), x.shape[0] * x.shape[1], x if mask is None else mask.contiguous().view(torch.uint8))
        for x, mask in sides
    )
    q_blocks = tiles_of(q_tokens, TOKENS)
    flags = torch.empty(q_blocks + tiles_of(k_tokens, TOKENS), dtype=torch.float32, device=q.device)
    if not len(flags):
        return scale * 0
    (_, rows_masked), (_, cols_masked) = ((x, mask is not None) for x, mask in sides)
    with on(scale.device):
        run(
            kernels.token_flags, (len(flags),), q_ptr=q, q_mask_ptr=q_mask, k_ptr=k, k_mask_ptr=k_mask, scale_ptr=scale,
            out_ptr=flags, q_tokens=q_tokens, k_tokens=k_tokens, q_blocks=q_blocks, D=q.shape[2],
            ROWS_MASKED=rows_masked, COLS_MASKED=cols_masked, ROWS=TOKENS, BLOCK=FEATURES,
        )  # fmt: skip
    return flags.sum()
