"""Tiles of late interaction: blocks of `MaxSim` scores by the kernels of `block.py`.

Beside `triton/backend.py`, whose place they take for the scorer `MaxSim`. `scores.py` has what lies between the scores
of a block and their gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contrastile.losses.base import Shard
from contrastile.scorers import MaxSim, tokens
from contrastile.tiles.eager import LEAST_STRIP
from contrastile.tiles.scored import Scorer
from contrastile.tiles.triton.maxsim.block import (
    LISTS,
    MOST_TOKENS,
    PAIR_BYTES,
    SIDE,
    STORED,
    Documents,
    Entries,
    add_document_gradients,
    add_query_gradients,
    list_bytes,
    multiplied,
    readable,
    scored,
)
from contrastile.tiles.triton.maxsim.scores import FusedScores, token_flag
from contrastile.tiles.triton.plan import interpreting, refusal, tiles_of

# features of a token up to which a tile of them fits shared memory
MOST_FEATURES = 256


class Block(NamedTuple):
    """A block's tokens, as the kernels read them, and the winning tokens [J, entries] where gradients are wanted."""

    entries: Entries
    documents: Documents
    winners: Tensor | None


@dataclass
class FusedMaxSim(FusedScores):
    """Blocks of `MaxSim` scores from fused kernels.

    Where a backward follows, the forward keeps scores and winning tokens of the tiles with which the backward begins,
    as many as fit the workspace beside a tile. They are not computed again.
    """

    # scores and winning tokens of tiles, by the first row and column of each
    stored: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)
    # numbers of tiles along the rows, and of tiles to be stored
    row_tiles: int = field(default=0, init=False, repr=False)
    most_stored: int = field(default=0, init=False, repr=False)

    def forward(self, rows: Shard, cols: Shard) -> tuple[Tensor, Tensor | None]:
        self.row_tiles, self.most_stored = tiles_of(len(rows), self.side), -1
        return super().forward(rows, cols)

    @classmethod
    def refusal(cls, scorer: Scorer, rows: Shard, cols: Shard) -> str | None:
        """The reason why the kernels cannot compute this scorer; None if they can."""
        module = scorer.module
        if not isinstance(module, MaxSim) or not module.plain:
            return f"no kernel for the scorer {type(module).__name__}"
        (q, _), (k, _) = (tokens(name, form.nested(side.leaves)) for name, form, side in _sides(scorer, rows, cols))
        if q.shape[2] > MOST_FEATURES or k.shape[1] >= MOST_TOKENS:
            return f"no kernel for {q.shape[2]} features and {k.shape[1]} tokens"
        if not q.shape[1] or not k.shape[1]:
            return "no kernel for sides without tokens"
        return refusal(scorer.dtype, q.device)

    @classmethod
    def fitting_side(cls, rows: Shard, cols: Shard, workspace: int) -> int:
        """Rows, and columns, of a tile of scores within the workspace."""
        fit = int((workspace / _pair_bytes(rows, cols)) ** 0.5)
        return max(LEAST_STRIP, min(SIDE, fit))

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

    def nonfinite(self, rows: Shard, cols: Shard) -> Tensor:
        if self.flag is not None:
            return self.flag
        # a token behind a mask may be anything
        return token_flag(self.scale, self._tokens(rows, cols))

    def _tokens(self, rows: Shard, cols: Shard) -> list[tuple[Tensor, Tensor | None]]:
        """Vectors and mask of each side."""
        return [(side.features, side.others[0].bool() if side.others else None) for side in (rows, cols)]

    def _scores(self, rows: Shard, cols: Shard, *, with_graph: bool) -> tuple[Tensor, Block]:
        (q, row_mask), (k, col_mask) = self._tokens(rows, cols)
        wide = self.scorer.dtype
        entries, documents = Entries.of(readable(q, wide), row_mask), Documents.of(readable(k, wide), col_mask)
        position = rows.start, cols.start
        if with_graph and position in self.stored:
            scores, stored = self.stored.pop(position)
            return scores, Block(entries, documents, stored)
        keeps = not with_graph and self._keeps(rows, cols, entries.count * documents.index.itemsize + 4 * len(rows))
        if wide == torch.float32 and not interpreting():
            scores, winners = multiplied(entries, documents, self.workspace // LISTS, best=with_graph or keeps)
        else:
            scores, winners = scored(entries, documents, best=with_graph or keeps)
        if keeps and winners is not None:
            self.stored[position] = scores, winners
        return scores, Block(entries, documents, winners)

    def _keeps(self, rows: Shard, cols: Shard, bytes_of_column: int) -> bool:
        """True for a tile that the forward keeps, in the order of the backward: rows first, then columns."""
        if not (self.backward_later and self.scorer.wanted):
            return False
        if self.most_stored < 0:
            # by the first tile, which is as large as any
            room = min(self.workspace - _pair_bytes(rows, cols) * len(rows) * len(cols), STORED * self.workspace)
            self.most_stored = int(room / (bytes_of_column * len(cols)))
        return cols.start // self.side * self.row_tiles + rows.start // self.side < self.most_stored

    def _pass_on(self, g_IJ: Tensor, block: Block, u_I: Tensor | None, v_J: Tensor | None) -> None:
        entries, documents, winners = block
        if winners is None:
            return
        queries = None if u_I is None else partial(add_query_gradients, u_I, g_IJ, entries, documents, winners)
        if v_J is not None:
            # beside the winners that are kept and this tile's, the gradients of pairs and their copy by queries
            held = sum(x.nbytes for tile in self.stored.values() for x in tile)
            held += (winners.nbytes + 3 * g_IJ.nbytes) if held else 0
            workspace = list_bytes(self.workspace, held)
            add_document_gradients(v_J, g_IJ, entries, documents, winners, workspace, meanwhile=queries)
        elif queries is not None:
            queries()


def _pair_bytes(rows: Shard, cols: Shard) -> float:
    """Bytes of a pair of the workspace: its score, logit and gradient, its winning tokens and their lists."""
    return _bytes_of_pair(rows.features.shape[1:], cols.features.shape[1:], rows.features.device)


@lru_cache(1024)
def _bytes_of_pair(of_row: torch.Size, of_col: torch.Size, device: torch.device) -> float:
    q, k = (torch.empty(0, *shape, device=device) for shape in (of_row, of_col))
    entries, documents = Entries.of(q, None), Documents(k)
    return (PAIR_BYTES + entries.padded * (documents.index.itemsize + 4 / entries.slot)) / (1 - 1 / LISTS)


def _sides(scorer: Scorer, rows: Shard, cols: Shard) -> Sequence[tuple[str, Any, Shard]]:
    return ("q", scorer.rows, rows), ("k", scorer.cols, cols)
