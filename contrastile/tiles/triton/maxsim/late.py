"""Tiles of late interaction: blocks of `MaxSim` scores by the kernels of `block.py`, and their losses and gradients.

Beside `triton/backend.py`, whose place they take for the scorer `MaxSim`. Losses whose pairs are exponentials take
three kernels on the scores (`triton/kernels/scores.py`) and two of `kernels/finish.py`; all others take the operations
of `eager.py`. Nothing waits for the device, so that small calls are captured as a CUDA graph.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from contrastile._types import Reduction
from contrastile.losses.base import Direct, Shard, Tile, Total
from contrastile.scorers import MaxSim, tokens
from contrastile.tiles.base import ForwardResult, InFlight, Sum
from contrastile.tiles.eager import LEAST_STRIP
from contrastile.tiles.scored import Form, Scored, Scorer
from contrastile.tiles.triton import launch, plan
from contrastile.tiles.triton.block import Block, readable_side
from contrastile.tiles.triton.kernels import scores as kernels
from contrastile.tiles.triton.launch import on
from contrastile.tiles.triton.maxsim import block as maxsim
from contrastile.tiles.triton.maxsim.block import Documents, Entries
from contrastile.tiles.triton.plan import Epilogue, interpreting, tiles_of
from contrastile.tiles.triton.start import run

# features of a token up to which a tile of them fits shared memory
MOST_FEATURES = 256
# rows, or columns, of a program of statistics, and of the others that it meets at once
SIDE, STEP = 16, 128
# sides of a tile of gradients
SQUARE = 64
# tokens of a program that looks for values that are not finite, and their features at a time
TOKENS, FEATURES = 64, 64


# a block's tokens, as the kernels read them, and the winning tokens [J, entries] where gradients are wanted
TokenBlock = tuple[Entries, Documents, Tensor | None]


@dataclass
class FusedMaxSim(Scored):
    """Blocks of `MaxSim` scores from fused kernels; the vectors of each side are the one leaf that can want a gradient.

    Where a backward follows, the forward keeps scores and winning tokens of the tiles with which the backward begins,
    as many as fit the workspace beside a tile. They are not computed again.
    """

    capturable: ClassVar[bool] = True
    # scores and winning tokens of tiles, by the first row and column of each
    stored: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)
    # numbers of tiles along the rows, and of tiles to be stored
    row_tiles: int = field(default=0, init=False, repr=False)
    most_stored: int = field(default=0, init=False, repr=False)

    @classmethod
    def refusal(cls, scorer: Scorer, rows: Shard, cols: Shard) -> str | None:
        """The reason why the kernels cannot compute this scorer; None if they can."""
        module = scorer.module
        if not isinstance(module, MaxSim) or not module.plain:
            return f"no kernel for the scorer {type(module).__name__}"
        sides = ("q", scorer.rows, rows), ("k", scorer.cols, cols)
        (q, _), (k, _) = (tokens(name, form.nested(side.leaves)) for name, form, side in sides)
        if q.shape[2] > MOST_FEATURES or k.shape[1] >= maxsim.MOST_TOKENS:
            return f"no kernel for {q.shape[2]} features and {k.shape[1]} tokens"
        if not q.shape[1] or not k.shape[1]:
            return "no kernel for sides without tokens"
        return plan.refusal(scorer.dtype, q.device)

    @classmethod
    def fitting_side(cls, rows: Shard, cols: Shard, workspace: int) -> int:
        """Rows, and columns, of a tile of scores within the workspace."""
        fit = int((workspace / _pair_bytes(rows, cols)) ** 0.5)
        return max(LEAST_STRIP, min(maxsim.SIDE, fit))

    @classmethod
    def captured_bytes(cls, rows: Shard, cols: Shard, dtype: torch.dtype) -> int:
        q, k = rows.features, cols.features
        # lists of winners; similarities of float32 tokens; copies of the tokens and their gradients
        each = 4 * Entries.of(q[:0], None).padded + (8 * q.shape[1] * k.shape[1] if dtype == torch.float32 else 0)
        return int(len(q) * len(k) * (_pair_bytes(rows, cols) + each)) + 12 * (q.numel() + k.numel())

    def strip(self, rows: Shard, cols: Shard, wanted: bool) -> int:
        if not (wanted and self.loss.rowwise):
            return 0
        N, M = len(rows), len(cols)
        fit = int(self.workspace / (_pair_bytes(rows, cols) * max(M, 1)))
        if fit >= N:
            return N if M else 0
        # the columns have their statistics only after all rows
        return fit if fit >= LEAST_STRIP and not self.loss.symmetric else 0

    def _direct(self, tile: Tile, *, whole: bool) -> Direct | None:
        """None: gradients of a tile go to tokens, by kernels of their own."""

    def accumulators(self, rows: Shard, cols: Shard, _wanted: Sequence[bool]) -> tuple[Sum, Sum]:
        # then sums are float32 for a strip at a time, and take memory as tiles are met, each of which frees what the
        # forward has kept for it
        self.sums_are_gradients = self.whole_backward

        def zeros(form: Form, side: Shard) -> Tensor | None:
            if not form.wanted[0]:
                return None
            x, n = side.features, 0 if self.whole_backward and len(cols) else len(side)
            return x.new_zeros(n, math.prod(x.shape[1:]), dtype=x.dtype if self.whole_backward else self.scale.dtype)

        return zeros(self.scorer.rows, rows), zeros(self.scorer.cols, cols)

    def forward(self, rows: Shard, cols: Shard) -> tuple[Tensor, Tensor | None]:
        self.row_tiles, self.most_stored = tiles_of(len(rows), self.side), -1
        return super().forward(rows, cols)

    def backward(self, rows: Shard, cols: Shard, u: Sum, v: Sum | InFlight, row_stats: Tensor | None = None) -> Tensor:
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

    def nonfinite(self, rows: Shard, cols: Shard) -> Tensor:
        return self._token_flag(rows, cols) if self.flag is None else self.flag

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

    def _logits(self, rows: Shard, cols: Shard, _room: Tensor, *, with_graph: bool) -> tuple[Tensor, Any]:
        self.computed = True
        with on(self.scale.device):
            scores, block = self._scores(rows, cols, with_graph=with_graph)
        # the kernels scale what they load
        return scores if self._epilogue else scores * self.scale, (scores, block)

    def _tile(self, x: Tensor, rows: Shard, cols: Shard, context: Any, *, by_label: bool = False) -> Tile:
        # the kernels find positives and excluded pairs themselves
        return Tile(x, None, None, None) if self._epilogue else super()._tile(x, rows, cols, context, by_label=by_label)

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

    def _propagate(self, tile: Tile, context: Any, rows: Shard, cols: Shard, u_I: Sum, v_J: Sum, sums: Tensor) -> None:
        (scores, block), epilogue = context, self._epilogue
        if epilogue is None:
            g = self.loss.pair_grad(tile, rows, cols)
            parts = torch.stack([g.sum(), (g * scores).sum()])[:, None]
        else:
            rows, cols = readable_side(rows), readable_side(cols)
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
        rows = readable_side(rows)
        masks = Block(rows, cols, self.scale, self.loss).masks
        return masks.arguments(scores) | {
            "scores_ptr": scores, "scale_ptr": self.scale, "row_stride": scores.stride(0),
            "col_stride": scores.stride(1), "N": len(rows), "M": len(cols),
        }  # fmt: skip

    def _tokens(self, rows: Shard, cols: Shard) -> list[tuple[Tensor, Tensor | None]]:
        """Vectors and mask of each side."""
        return [(side.features, side.others[0].bool() if side.others else None) for side in (rows, cols)]

    def _token_flag(self, rows: Shard, cols: Shard) -> Tensor:
        """0 if the scale and all tokens but those behind a mask, which may be anything, are finite, NaN otherwise."""
        sides = self._tokens(rows, cols)
        (q, q_tokens, q_mask), (k, k_tokens, k_mask) = (
            (x.contiguous(), x.shape[0] * x.shape[1], x if mask is None else mask.contiguous().view(torch.uint8))
            for x, mask in sides
        )
        q_blocks = tiles_of(q_tokens, TOKENS)
        flags = torch.empty(q_blocks + tiles_of(k_tokens, TOKENS), dtype=torch.float32, device=q.device)
        if not len(flags):
            return self.scale * 0
        rows_masked, cols_masked = (mask is not None for _, mask in sides)
        with on(self.scale.device):
            run(
                kernels.token_flags, (len(flags),), q_ptr=q, q_mask_ptr=q_mask, k_ptr=k, k_mask_ptr=k_mask,
                scale_ptr=self.scale, out_ptr=flags, q_tokens=q_tokens, k_tokens=k_tokens, q_blocks=q_blocks,
                D=q.shape[2], ROWS_MASKED=rows_masked, COLS_MASKED=cols_masked, ROWS=TOKENS, BLOCK=FEATURES,
            )  # fmt: skip
        return flags.sum()

    def _scores(self, rows: Shard, cols: Shard, *, with_graph: bool) -> tuple[Tensor, TokenBlock]:
        """The scores [I, J], dense in either order, and the block of tokens for `_pass_on`."""
        (q, row_mask), (k, col_mask) = self._tokens(rows, cols)
        wide = self.scorer.dtype
        entries = Entries.of(maxsim.readable(q, wide), row_mask)
        documents = Documents.of(maxsim.readable(k, wide), col_mask)
        position = rows.start, cols.start
        if with_graph and position in self.stored:
            scores, stored = self.stored.pop(position)
            return scores, (entries, documents, stored)
        keeps = not with_graph and self._keeps(rows, cols, entries.count * documents.index.itemsize + 4 * len(rows))
        if wide == torch.float32 and not interpreting():
            room = self.workspace // maxsim.LISTS
            scores, winners = maxsim.multiplied(entries, documents, room, best=with_graph or keeps)
        else:
            scores, winners = maxsim.scored(entries, documents, best=with_graph or keeps)
        if keeps and winners is not None:
            self.stored[position] = scores, winners
        return scores, (entries, documents, winners)

    def _keeps(self, rows: Shard, cols: Shard, bytes_of_column: int) -> bool:
        """True for a tile that the forward keeps, in the order of the backward: rows first, then columns."""
        if not (self.backward_later and self.scorer.wanted):
            return False
        if self.most_stored < 0:
            # by the first tile, which is as large as any
            beside = _pair_bytes(rows, cols) * len(rows) * len(cols)
            room = min(self.workspace - beside, maxsim.STORED * self.workspace)
            self.most_stored = int(room / (bytes_of_column * len(cols)))
        return cols.start // self.side * self.row_tiles + rows.start // self.side < self.most_stored

    def _pass_on(self, g_IJ: Tensor, block: TokenBlock, u_I: Sum, v_J: Sum) -> None:
        """Add the gradient of the vectors to the accumulators."""
        entries, documents, winners = block
        if winners is None:
            return
        queries = None if u_I is None else partial(maxsim.add_query_gradients, u_I, g_IJ, entries, documents, winners)
        if v_J is not None:
            # beside the winners that are kept and this tile's, the gradients of pairs and their copy by queries
            held = sum(x.nbytes for tile in self.stored.values() for x in tile)
            held += (winners.nbytes + 3 * g_IJ.nbytes) if held else 0
            workspace = maxsim.list_bytes(self.workspace, held)
            maxsim.add_document_gradients(v_J, g_IJ, entries, documents, winners, workspace, meanwhile=queries)
        elif queries is not None:
            queries()


def _pair_bytes(rows: Shard, cols: Shard) -> float:
    """Bytes of a pair of the workspace: its score, logit and gradient, its winning tokens and their lists."""
    return _bytes_of_pair(rows.features.shape[1:], cols.features.shape[1:], rows.features.device)


@lru_cache(1024)
def _bytes_of_pair(of_row: torch.Size, of_col: torch.Size, device: torch.device) -> float:
    q, k = (torch.empty(0, *shape, device=device) for shape in (of_row, of_col))
    entries, documents = Entries.of(q, None), Documents(k)
    each = documents.index.itemsize + 4 / entries.slot
    return (maxsim.PAIR_BYTES + entries.padded * each) / (1 - 1 / maxsim.LISTS)
