"""Late interaction in fused kernels: blocks of `MaxSim` scores without the similarities of their tokens.

Beside `backend.py`, whose place it takes for the scorer `MaxSim`. Scores of a block, and the gradient of each score,
are small and go through the loss in plain PyTorch (`eager.py`); the work is in three kernels of `maxsim_kernels.py`:

    scores      one sweep over the tokens of the block: 2·N·L·M·T·D operations for N queries of L and M documents of T
                tokens. In the backward the sweep also writes the winning token of each query token and document
    gradients   each query token gathers the tokens that won it, each document token the query tokens that it won:
                2·N·L·M·D operations each, in a fixed order

Of tokens behind a mask nothing is computed: a query's tokens fill slots of which only those in use are swept, and a
document's tokens come first in a copy of the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from contrastile.losses.base import Shard
from contrastile.scorers import MaxSim, tokens
from contrastile.tiles.eager import LEAST_STRIP, SIDE_ACCELERATOR
from contrastile.tiles.scored import Scored, Scorer
from contrastile.tiles.triton import maxsim_kernels as kernels
from contrastile.tiles.triton.backend import LEAST_CAPABILITY
from contrastile.tiles.triton.launch import on, run
from contrastile.tiles.triton.plan import ALIGNMENT, PIECES, interpreting, shape_for, tiles_of

# features of a token up to which a tile of them fits shared memory
MOST_FEATURES = 256
# entries of a slot, the first whose padding is at most this share; the last of them otherwise
SLOTS, PADDING = (256, 128, 64, 32, 16, 8), 1 / 15
SLOT_MASKED = 16
# compute capabilities of chips that have 99 KiB of shared memory for a program
LESS_SHARED = (8, 6), (8, 9), (12, 0)
# bytes of a pair in float32 scores, logits, gradients and temporaries
PAIR_BYTES = 24
# share of the workspace for lists of the entries that each document token has won
LISTS = 4
# indices of 8 bits, up to so many tokens of a document, else of 16
MOST_SMALL, MOST_TOKENS = 255, 2**15 - 1


class Tiling(NamedTuple):
    """The sweep on a chip: entries × tokens of a tile, documents of a program, and the form of its loop."""

    entries: int = 256
    tokens: int = 64
    warps: int = 8
    stages: int = 3
    documents: int = 32
    # documents and their tiles are one loop, so that the next document's loads overlap the sums
    flatten: bool = True
    # the entries stay in registers instead of shared memory
    registers: bool = False
    # of a thread, at most: more would leave one program to a multiprocessor
    most_registers: int | None = None


class Gathering(NamedTuple):
    """The gradients' kernels on a chip: entries of a query tile, tokens of a document tile, and listed entries."""

    entries: int = 128
    # of a query tile, at most
    features: int = 64
    warps: int = 4
    stages: int = 1
    registers: int | None = 128
    tokens: int = 16
    group: int = 64
    chunk: int = 1024
    document_warps: int = 4
    document_stages: int = 3
    document_registers: int | None = None


TILING_INTERPRETED = Tiling(entries=32, tokens=16, documents=3)
# for short documents in 16 bits
GATHERING_SHORT = Gathering(group=32, document_warps=1)
GATHERING_INTERPRETED = Gathering(entries=32, tokens=16, group=16, chunk=64)


@dataclass
class Entries:
    """A block's query tokens: vectors [N, L, D] and, behind a mask, the table of its slots."""

    vectors: Tensor
    slot: int
    # entries of a query's slots, and of all
    padded: int
    count: int
    # with a mask: [count] rows of the tokens, −1 where there is none; [N, slots of a query] positions of a query's
    # slots, and whether it has them
    tokens: Tensor | None = None
    slots: Tensor | None = None
    used: Tensor | None = None

    @classmethod
    def of(cls, vectors: Tensor, mask: Tensor | None) -> Entries:
        N, L, _ = vectors.shape
        slot = slot_of(L, tiling_for(vectors).entries, masked=mask is not None)
        per_query = tiles_of(L, slot)
        entries = cls(vectors, slot, per_query * slot, N * per_query * slot)
        if mask is None:
            return entries
        present = torch.arange(per_query, device=mask.device)
        lengths = mask.sum(1)
        counts = (lengths + slot - 1) // slot
        ends = counts.cumsum(0)
        # the query of each slot, and the slot's place in it
        every = torch.arange(N * per_query, device=mask.device)
        query = torch.searchsorted(ends, every, right=True).clamp(max=N - 1)
        place = every - (ends - counts)[query]
        within = place[:, None] * slot + torch.arange(slot, device=mask.device)
        order = mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)
        rows = query[:, None] * L + order.flatten()[(query[:, None] * L + within.clamp(max=L - 1)).clamp(max=N * L - 1)]
        inside = (within < lengths[query][:, None]) & (every < ends[-1])[:, None]
        entries.tokens = torch.where(inside, rows, -1).flatten().int()
        entries.used = present < counts[:, None]
        entries.slots = torch.where(entries.used, (ends - counts)[:, None] + present, 0)
        return entries

    def positions(self) -> Tensor:
        """[count] rows of the entries' tokens, −1 where there is none."""
        if self.tokens is not None:
            return self.tokens.long()
        (N, L, _), device = self.vectors.shape, self.vectors.device
        within = torch.arange(self.padded, device=device)
        rows = torch.arange(N, device=device)[:, None] * L + within
        return torch.where(within < L, rows, -1).flatten()

    def scores(self, sums: Tensor) -> Tensor:
        """Scores [N, J] from the sums [J, slots]."""
        if self.slots is None:
            return sums.unflatten(1, (len(self.vectors), -1)).sum(-1).T
        assert self.used is not None
        return sums[:, self.slots].masked_fill(~self.used, 0.0).sum(-1).T


@dataclass
class Documents:
    """A block's document tokens: vectors [J, M, D] and, behind a mask, those of each document first."""

    vectors: Tensor
    # with a mask: [J] tokens of each, and [J, M] their positions
    lengths: Tensor | None = None
    order: Tensor | None = None

    @classmethod
    def of(cls, vectors: Tensor, mask: Tensor | None) -> Documents:
        if mask is None:
            return cls(vectors)
        order = mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)
        lengths = mask.sum(1, keepdim=True)
        first = vectors.gather(1, order[..., None].expand_as(vectors))
        behind = torch.arange(mask.shape[1], device=mask.device) >= lengths
        return cls(first.masked_fill_(behind[..., None], 0.0), lengths[:, 0].int(), order)

    @property
    def index(self) -> torch.dtype:
        """Type of the index of a token."""
        return torch.uint8 if self.vectors.shape[1] < MOST_SMALL else torch.int16

    @property
    def none(self) -> int:
        """Index of no token."""
        return MOST_SMALL if self.index == torch.uint8 else MOST_TOKENS


class Block(NamedTuple):
    """A block's tokens, as the kernels read them, and the winning tokens [J, entries] where gradients are wanted."""

    entries: Entries
    documents: Documents
    best: Tensor | None


@dataclass
class FusedMaxSim(Scored):
    """Blocks of `MaxSim` scores from fused kernels."""

    @classmethod
    def refusal(cls, scorer: Scorer, rows: Shard, cols: Shard) -> str | None:
        """The reason why the kernels cannot compute this scorer; None if they can."""
        module = scorer.module
        if not isinstance(module, MaxSim) or not module.known:
            return f"no kernel for the scorer {type(module).__name__}"
        (q, _), (k, _) = (tokens(name, form.nested(side.leaves)) for name, form, side in _sides(scorer, rows, cols))
        if scorer.dtype not in PIECES:
            return f"no kernel for {scorer.dtype}"
        if q.shape[2] > MOST_FEATURES or k.shape[1] >= MOST_TOKENS:
            return f"no kernel for {q.shape[2]} features and {k.shape[1]} tokens"
        if not q.shape[1] or not k.shape[1]:
            return "no kernel for sides without tokens"
        if interpreting():
            return None
        if q.device.type != "cuda" or torch.version.cuda is None:
            return f"the features are on {q.device.type}, not on an NVIDIA device"
        if torch.cuda.get_device_capability(q.device) < LEAST_CAPABILITY:
            return "the device is older than compute capability 8.0"
        return None

    @classmethod
    def fitting_side(cls, rows: Shard, cols: Shard, workspace: int) -> int:
        """Rows, and columns, of a tile of scores within the workspace."""
        fit = int((workspace / _pair_bytes(rows, cols)) ** 0.5)
        return max(LEAST_STRIP, min(SIDE_ACCELERATOR, fit))

    def strip(self, rows: Shard, cols: Shard) -> int:
        if not self.loss.rowwise:
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
        flag = self.scale * 0
        for name, form, side in _sides(self.scorer, rows, cols):
            vectors, mask = tokens(name, form.nested(side.leaves))
            if vectors.numel():
                least, most = torch.aminmax(vectors, dim=-1)
                unfit = ((least + most) * 0).to(flag.dtype)
                flag = flag + (unfit if mask is None else unfit.masked_fill(~mask, 0.0)).sum()
        return flag

    def _logits(self, rows: Shard, cols: Shard, room: Tensor, *, with_graph: bool) -> tuple[Tensor, Any]:
        del room
        self.computed = True
        (q, asking), (k, answering) = (
            tokens(name, form.nested(side.leaves)) for name, form, side in _sides(self.scorer, rows, cols)
        )
        wide = self.scorer.dtype
        entries, documents = Entries.of(readable(q, wide), asking), Documents.of(readable(k, wide), answering)
        with on(self.scale.device):
            if wide == torch.float32 and not interpreting():
                scores, best = multiplied(entries, documents, self.workspace // LISTS, best=with_graph)
            else:
                scores, best = scored(entries, documents, best=with_graph)
        return scores * self.scale, (scores, Block(entries, documents, best))

    def _propagate(
        self, g_IJ: Tensor, graph: Any, rows: Shard, cols: Shard, u_I: Tensor | None, v_J: Tensor | None, sums: Tensor
    ) -> None:
        del rows, cols
        scores, (entries, documents, best) = graph
        sums[0] += g_IJ.sum()
        sums[1] += (g_IJ * scores).sum()
        # the vectors are the first leaf of a side, and the only one that can want a gradient
        with on(self.scale.device):
            if u_I is not None:
                add_query_gradients(u_I, g_IJ, entries, documents, best)
            if v_J is not None:
                add_document_gradients(v_J, g_IJ, entries, documents, best, self.workspace // LISTS)


def _pair_bytes(rows: Shard, cols: Shard) -> float:
    """Bytes of a pair of the workspace: its score, logit and gradient, its winning tokens and their lists."""
    entries, documents = Entries.of(rows.features[:0], None), Documents(cols.features[:0])
    return (PAIR_BYTES + entries.padded * (documents.index.itemsize + 4 / entries.slot)) / (1 - 1 / LISTS)


def slot_of(L: int, most: int, *, masked: bool) -> int:
    """Entries of a slot of queries of L tokens, `most` of which fit a tile."""
    slot = next((s for s in SLOTS if s <= most and tiles_of(L, s) * s <= (1 + PADDING) * L), SLOTS[-1])
    return min(slot, SLOT_MASKED) if masked else slot


def expected_bytes(
    N: int, M: int, tokens: tuple[int, int], D: int, workspace: int, *, symmetric: bool, copies: int = 0,
    at_once: bool = True,
) -> tuple[int, bool]:  # fmt: skip
    """Bytes of a loss with gradients beside inputs and accumulators, for a planner, and whether it is one tile.

    copies: bytes of a feature in tokens without those behind a mask, or in another type; 0 without a mask. at_once: the
    gradients come with the loss where its tiles allow it.
    """
    L, T = tokens
    most = 256 if D <= 128 else 128
    padded = tiles_of(L, slot := slot_of(L, most, masked=copies > 0)) * slot
    winners = padded * (1 if T < MOST_SMALL else 2)
    pair = (PAIR_BYTES + winners + 4 * padded / slot) / (1 - 1 / LISTS)
    whole = at_once and workspace >= pair * N * M
    side = max(LEAST_STRIP, min(SIDE_ACCELERATOR, int((workspace / pair) ** 0.5)))
    # a loss of one way has all columns in a strip
    strip = 0 if symmetric or not at_once else int(workspace / (pair * M))
    rows, cols = (N, M) if whole else (strip, M) if strip >= LEAST_STRIP else (min(N, side), min(M, side))
    lists = 4 * rows * padded * max(1, min(cols, workspace // LISTS // (4 * rows * padded)))
    # scores, logits and gradients; of the tile before, its winners and three of them are still there
    first = (winners + 12 + 4 * symmetric) * rows * cols + lists
    next_one = 0 if (rows, cols) == (N, M) else (2 * winners + 20) * rows * cols
    return max(first, next_one) + copies * (rows * L + cols * T) * D, whole or strip >= LEAST_STRIP


def _sides(scorer: Scorer, rows: Shard, cols: Shard) -> Sequence[tuple[str, Any, Shard]]:
    return ("q", scorer.rows, rows), ("k", scorer.cols, cols)


def readable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [n, L, D] of this type, as the kernels read it: contiguous, rows aligned."""
    D, step = x.shape[2], ALIGNMENT // dtype.itemsize
    if D % step:
        padded = x.new_zeros((*x.shape[:2], D + step - D % step), dtype=dtype)
        padded[..., :D] = x
        return padded
    x = x.to(dtype).contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def tiling_for(x: Tensor, *, best: bool = False) -> Tiling:
    """The tiling of the sweep for queries [N, L, D]."""
    if interpreting():
        return TILING_INTERPRETED
    if x.shape[2] > 128:
        less = torch.cuda.get_device_capability(x.device) in LESS_SHARED
        return Tiling(entries=64, warps=4, stages=2) if less else Tiling(entries=128)
    return Tiling(most_registers=128 if best else None)


def scored(
    entries: Entries, documents: Documents, *, best: bool, tiling: Tiling | None = None
) -> tuple[Tensor, Tensor | None]:
    """The scores [N, J] of a block and, if asked for, the winning token [J, entries] of each entry and document."""
    q, k = entries.vectors, documents.vectors
    (N, L, width), (J, M, _) = q.shape, k.shape
    tiling = tiling_for(q, best=best) if tiling is None else tiling
    tma = not interpreting() and shape_for(q.device).tma
    slots, BD = entries.count // entries.slot, max(16, triton.next_power_of_2(width))
    BM = max(tiling.entries, entries.slot)
    sums = torch.empty(J, slots, dtype=torch.float32, device=q.device)
    winners = None
    if best:
        # slots that are not in use are not written
        new = torch.empty if entries.tokens is None else _full(documents.none)
        winners = new(J, entries.count, dtype=documents.index, device=q.device)
    tokens_k = k.flatten(0, 1)
    grid = tiles_of(entries.count, BM) * tiles_of(J, tiling.documents)
    run(
        kernels.sweep, (grid,), warps=tiling.warps, stages=tiling.stages, registers=tiling.most_registers, q_ptr=q,
        k_mem=TensorDescriptor.from_tensor(tokens_k, [tiling.tokens, BD]) if tma else tokens_k,
        tokens_ptr=q if entries.tokens is None else entries.tokens,
        lengths_ptr=q if documents.lengths is None else documents.lengths,
        sums_ptr=sums, best_ptr=sums if winners is None else winners, N=N, J=J, L=L, M=M, D=width, q_stride=width,
        k_stride=width, entries=entries.count, slots=slots, documents=tiling.documents, BM=BM, BN=tiling.tokens, BD=BD,
        SLOT=entries.slot, PADDED=entries.padded, ROWS_MASKED=entries.tokens is not None,
        COLS_MASKED=documents.lengths is not None, BEST=best, NONE=documents.none, TMA=tma,
        FLATTEN=tiling.flatten, REGISTERS=tiling.registers, INTERPRETED=interpreting(),
    )  # fmt: skip
    return entries.scores(sums), winners


def multiplied(entries: Entries, documents: Documents, workspace: int, *, best: bool) -> tuple[Tensor, Tensor | None]:
    """`scored` by torch's own products, for types that the matrix units round."""
    positions, k = entries.positions(), documents.vectors
    q, empty, (J, M, _) = entries.vectors.flatten(0, 1)[positions.clamp(min=0)], positions < 0, k.shape
    sums = torch.empty(J, entries.count // entries.slot, dtype=q.dtype, device=q.device)
    winners = torch.empty(J, entries.count, dtype=documents.index, device=q.device) if best else None
    # products, and a copy of them behind a mask
    rows = max(entries.slot, min(entries.count, workspace // (2 * M * q.itemsize)) // entries.slot * entries.slot)
    step = max(1, workspace // (2 * M * q.itemsize * rows))
    for start in range(0, entries.count, rows):
        along = slice(start, min(start + rows, entries.count))
        of_slots = slice(along.start // entries.slot, along.stop // entries.slot)
        for first in range(0, J, step):
            some = slice(first, first + step)
            products = (q[along] @ k[some].flatten(0, 1).T).unflatten(1, (-1, M))
            none = empty[along, None]
            if documents.lengths is not None:
                lengths = documents.lengths[some]
                products.masked_fill_(torch.arange(M, device=q.device) >= lengths[:, None], -torch.inf)
                none = none | (lengths == 0)
            top, index = products.max(-1) if best else (products.amax(-1), None)
            sums[some, of_slots] = top.masked_fill(none, 0.0).T.unflatten(1, (-1, entries.slot)).sum(-1)
            if winners is not None and index is not None:
                winners[some, along] = index.masked_fill(none, documents.none).T.to(winners.dtype)
    return entries.scores(sums), winners


def _full(value: int) -> Any:
    return lambda *shape, **how: torch.full(shape, value, **how)


def add_query_gradients(
    u: Tensor, g: Tensor, entries: Entries, documents: Documents, best: Tensor, gathering: Gathering | None = None
) -> None:
    """Add Σ_j g_ij · k_j,best to each query token of u [N, L · D]."""
    (N, L, _), (J, M, width) = entries.vectors.shape, documents.vectors.shape
    D = u.shape[1] // L
    if gathering is None:
        gathering = GATHERING_INTERPRETED if interpreting() else Gathering()
    BD = min(gathering.features, max(16, triton.next_power_of_2(D)))
    run(
        kernels.query_gradients, (tiles_of(entries.count, gathering.entries), tiles_of(D, BD)), warps=gathering.warps,
        registers=gathering.registers, k_ptr=documents.vectors, best_ptr=best, weight_ptr=g,
        tokens_ptr=_or(entries.tokens, best), out_ptr=u, N=N, J=J, L=L, M=M, D=D, k_stride=width,
        entries=entries.count, row_weight_stride=g.stride(0), col_weight_stride=g.stride(1), out_stride=u.stride(0),
        BM=gathering.entries, BD=BD, PADDED=entries.padded, ROWS_MASKED=entries.tokens is not None,
        WHOLE=D % BD == 0, STAGES=gathering.stages,
    )  # fmt: skip


def add_document_gradients(
    v: Tensor, g: Tensor, entries: Entries, documents: Documents, best: Tensor, workspace: int,
    gathering: Gathering | None = None,
) -> None:  # fmt: skip
    """Add Σ g_ij · q_il over the query tokens that each document token has won to v [J, M · D]."""
    (N, L, width), (J, M, _) = entries.vectors.shape, documents.vectors.shape
    D = v.shape[1] // M
    BD = max(16, triton.next_power_of_2(D))
    if gathering is None:
        # one warp has registers for so many features, and lists the entries of few blocks of tokens
        short = BD <= 128 and M <= MOST_SMALL and g.dtype != entries.vectors.dtype
        gathering = GATHERING_INTERPRETED if interpreting() else GATHERING_SHORT if short else Gathering()
    at_once = max(1, min(J, workspace // (4 * entries.count)))
    lists = torch.empty(at_once, entries.count, dtype=torch.int32, device=g.device)
    unit = _unit(g) if entries.vectors.dtype == torch.float16 else torch.ones((), device=g.device)
    for first in range(0, J, at_once):
        run(
            kernels.document_gradients, (tiles_of(M, gathering.tokens), min(at_once, J - first)),
            warps=gathering.document_warps, registers=gathering.document_registers, q_ptr=entries.vectors,
            best_ptr=best, weight_ptr=g, tokens_ptr=_or(entries.tokens, best), order_ptr=_or(documents.order, best),
            list_ptr=lists, unit_ptr=unit, out_ptr=v, N=N, L=L, M=M, D=D, q_stride=width, entries=entries.count,
            first=first, row_weight_stride=g.stride(0), col_weight_stride=g.stride(1), out_stride=v.stride(0),
            BN=gathering.tokens, BD=BD, CHUNK=gathering.chunk, GROUP=gathering.group, PADDED=entries.padded,
            ROWS_MASKED=entries.tokens is not None, COLS_MASKED=documents.order is not None,
            WHOLE=BD == D, STAGES=gathering.document_stages,
        )  # fmt: skip


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """x, or another tensor's memory that the kernel does not read."""
    return other if x is None else x


def _unit(g: Tensor) -> Tensor:
    """The power of two that brings g to the upper end of fp16."""
    most = torch.linalg.vector_norm(g, ord=torch.inf)
    power = (14 - torch.log2(most).ceil()).clamp(max=126)
    return torch.where(most == 0, 1.0, torch.exp2(power))
