"""Late interaction in fused kernels: blocks of `MaxSim` scores without the similarities of their tokens.

Below `late.py`, whose tiles take the place of `triton/backend.py` for the scorer `MaxSim`. The work is in three kernels
of `triton/kernels/maxsim.py`:

    scores      one sweep over the tokens of the block: 2·N·L·M·T·D operations for N queries of L and M documents of T
                tokens. In the backward the sweep also writes the winning token of each query token and document
    gradients   each query token gathers the tokens that won it, each document token the query tokens that it won:
                2·N·L·M·D operations each, in a fixed order

Masked tokens are not computed: a query's tokens fill slots, of which only those in use are swept, and a document's
tokens come first in a copy of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from threading import get_ident
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from contrastile.tiles.eager import LEAST_STRIP
from contrastile.tiles.triton.kernels import maxsim as kernels
from contrastile.tiles.triton.kernels.maxsim_lists import FIELDS
from contrastile.tiles.triton.maxsim.plan import Tiling, documents_for, gathering_for, slot_of, tiling_for
from contrastile.tiles.triton.plan import ALIGNMENT, interpreting, shape_for, tiles_of
from contrastile.tiles.triton.start import run

# bytes of a pair of float32 scores, logits, gradients and temporaries
PAIR_BYTES = 24
# share of the workspace for lists of the entries that each document token has won, beside winners of other tiles at
# least, and their bytes at most
LISTS, LEAST_LISTS, LIST_BYTES = 4, 64, 2**28
# share of the workspace for the winning tokens that a forward keeps; lists have the rest in the backward
STORED = 0.78
# pairs from which a copy of their gradients by queries pays
COPIED = 2**20
# programs along the second axis of a grid, at most
MOST_PROGRAMS = 65535
# rows, and columns, of a tile at most: larger ones are not faster
SIDE = 2048
# tokens, or queries, that a kernel of masks reads at once; sides of its tiles
CHUNK, PAIRS = 1024, 32
# tokens of a document up to which indices have 8 bits, else 16
MOST_SMALL, MOST_TOKENS = 255, 2**15 - 1


@dataclass
class Entries:
    """A block's query tokens: vectors [N, L, D] and, behind a mask, the table of its slots."""

    vectors: Tensor
    slot: int
    # entries of a query's slots, and of all
    padded: int
    count: int
    # with a mask: [count] rows of the tokens, −1 where there is none; [N] the first slot of each query, and its tokens
    tokens: Tensor | None = None
    begins: Tensor | None = None
    lengths: Tensor | None = None

    @classmethod
    def of(cls, vectors: Tensor, mask: Tensor | None) -> Entries:
        N, L, _ = vectors.shape
        slot = slot_of(L, tiling_for(vectors).entries, masked=mask is not None)
        per_query = tiles_of(L, slot)
        entries = cls(vectors, slot, per_query * slot, N * per_query * slot)
        if mask is None:
            return entries
        order, entries.lengths = ordered(mask)
        entries.tokens, entries.begins = (order.new_empty(n) for n in (entries.count, N))
        run(
            kernels.fill_entries, (N,), order_ptr=order, lengths_ptr=entries.lengths, tokens_ptr=entries.tokens,
            begins_ptr=entries.begins, N=N, L=L, per_query=per_query, SLOT=slot, CHUNK=CHUNK,
        )  # fmt: skip
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
        N, (J, slots) = len(self.vectors), sums.shape
        if self.begins is None:
            return (sums if slots == N else sums.unflatten(1, (N, -1)).sum(-1)).T
        scores = sums.new_empty(J, N)
        run(
            kernels.slot_scores, (tiles_of(N, PAIRS), tiles_of(J, PAIRS)), sums_ptr=sums, begins_ptr=self.begins,
            lengths_ptr=self.lengths, out_ptr=scores, N=N, J=J, slots=slots, SLOT=self.slot, BM=PAIRS, BN=PAIRS,
        )  # fmt: skip
        return scores.T


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
        (J, M, width), (order, lengths) = vectors.shape, ordered(mask)
        packed = torch.empty_like(vectors)
        run(
            kernels.pack_tokens, (J, tiles_of(M, PAIRS)), x_ptr=vectors, order_ptr=order, lengths_ptr=lengths,
            out_ptr=packed, M=M, width=width, ROWS=PAIRS, BLOCK=PAIRS,
        )  # fmt: skip
        return cls(packed, lengths, order)

    @property
    def index(self) -> torch.dtype:
        return torch.uint8 if self.vectors.shape[1] < MOST_SMALL else torch.int16

    @property
    def none(self) -> int:
        """Index of no token."""
        return MOST_SMALL if self.index == torch.uint8 else MOST_TOKENS


class Expected(NamedTuple):
    """The memory of a loss with gradients, beside inputs and accumulators."""

    bytes: int
    # columns of a tile; 0 where the gradients come with the loss
    columns: int
    # pairs whose winning tokens the forward keeps, and bytes while they are there, with the gradients of rows, when
    # columns have none yet
    pairs: int
    beginning: int


def expected_bytes(
    N: int, M: int, tokens: tuple[int, int], D: int, workspace: int, *, symmetric: bool, copies: int = 0,
    at_once: bool = True,
) -> Expected:  # fmt: skip
    """Bytes of a loss with gradients beside inputs and accumulators, for a planner.

    copies: bytes of a feature in tokens without those behind a mask, or in another dtype; 0 without a mask. at_once:
    the gradients come with the loss where its tiles allow it; otherwise the forward keeps what fits.
    """
    L, T = tokens
    index = 1 if T < MOST_SMALL else 2
    padded = tiles_of(L, slot := slot_of(L, Tiling().entries, masked=False)) * slot
    # sides of tiles follow from queries without a mask
    pair = (PAIR_BYTES + padded * (index + 4 / slot)) / (1 - 1 / LISTS)
    padded = tiles_of(L, slot := slot_of(L, Tiling().entries, masked=copies > 0)) * slot
    winners = padded * index
    whole = at_once and workspace >= pair * N * M
    side = max(LEAST_STRIP, min(SIDE, int((workspace / pair) ** 0.5)))
    # a loss of one way has all columns in a strip
    strip = 0 if symmetric or not at_once else int(workspace / (pair * M))
    rows, cols = (N, M) if whole else (strip, M) if strip >= LEAST_STRIP else (min(N, side), min(M, side))

    def lists(held: int = 0) -> int:
        each = 4 * rows * padded
        return each * max(1, min(cols, list_bytes(workspace, held) // each))

    columns = 0 if whole or strip >= LEAST_STRIP else cols
    # scores and gradients, with the loss logits too, and of many pairs gradients by queries
    by_queries = 4 * rows * cols * (rows * cols >= COPIED)
    most = (winners + (8 if columns else 12)) * rows * cols + by_queries + lists()
    copied = copies * (rows * L + cols * T) * D
    pairs = beginning = 0
    if columns and at_once:
        each, row_tiles = (winners + 4) * rows * cols, tiles_of(N, rows)
        room = int(min(workspace - pair * rows * cols, STORED * workspace) / each)
        tiles = max(0, min(row_tiles * tiles_of(M, cols), room))
        pairs = min(tiles * rows * cols, N * M)
        # each tile frees its winners, and those of the first columns make room for the gradients of their rows
        for at in range(tiles):
            waiting = (tiles - at) * each
            used = waiting + 4 * rows * cols + by_queries + lists(waiting + 8 * rows * cols if at < tiles - 1 else 0)
            if at < row_tiles:
                beginning = max(beginning, used + 4 * rows * L * D * (at + 1))
            else:
                most = max(most, used)
        beginning += copied
    return Expected(most + copied, columns, pairs, beginning)


def list_bytes(workspace: int, held: int) -> int:
    """Bytes of the lists of a tile's winners, beside those `held` by other tiles' winners and this tile; 0: none."""
    most = min(workspace // LISTS, LIST_BYTES)
    return max(workspace // LEAST_LISTS, min(most, int(STORED * workspace) - held)) if held else most


def ordered(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens [n, L] of each example in their order, those that the mask [n, L] shows first, and their number."""
    n, L = mask.shape
    order, lengths = (torch.empty(shape, dtype=torch.int32, device=mask.device) for shape in ((n, L), (n,)))
    run(
        kernels.order_tokens, (n,), mask_ptr=mask.contiguous().view(torch.uint8), order_ptr=order,
        lengths_ptr=lengths, L=L, CHUNK=min(CHUNK, triton.next_power_of_2(L)),
    )  # fmt: skip
    return order, lengths


def readable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [n, L, D] of this dtype, as the kernels read it: contiguous, rows aligned."""
    D, step = x.shape[2], ALIGNMENT // dtype.itemsize
    if D % step:
        padded = x.new_zeros((*x.shape[:2], D + step - D % step), dtype=dtype)
        padded[..., :D] = x
        return padded
    x = x.to(dtype).contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


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
    tiles = tiles_of(entries.count, BM)
    each = documents_for(tiling, tiles, J, M, q.device)
    sums = torch.empty(J, slots, dtype=torch.float32, device=q.device)
    winners = None
    if best:
        winners = torch.empty(J, entries.count, dtype=documents.index, device=q.device)
        if entries.tokens is not None:
            winners.fill_(documents.none)  # slots that are not in use are not written
    tokens_k = k.flatten(0, 1)
    run(
        kernels.sweep, (tiles * tiles_of(J, each),), warps=tiling.warps, stages=tiling.stages,
        registers=tiling.most_registers, q_ptr=q,
        k_mem=TensorDescriptor.from_tensor(tokens_k, [tiling.tokens, BD]) if tma else tokens_k,
        tokens_ptr=q if entries.tokens is None else entries.tokens,
        lengths_ptr=q if documents.lengths is None else documents.lengths,
        sums_ptr=sums, best_ptr=sums if winners is None else winners, N=N, J=J, L=L, M=M, D=width, q_stride=width,
        k_stride=width, entries=entries.count, slots=slots, documents=each, BM=BM, BN=tiling.tokens, BD=BD,
        SLOT=entries.slot, PADDED=entries.padded, ROWS_MASKED=entries.tokens is not None,
        COLS_MASKED=documents.lengths is not None, BEST=best, NONE=documents.none, SHORT=tiling.tokens > M, TMA=tma,
        FLATTEN=tiling.flatten, REGISTERS=tiling.registers,
    )  # fmt: skip
    return entries.scores(sums), winners


def multiplied(entries: Entries, documents: Documents, workspace: int, *, best: bool) -> tuple[Tensor, Tensor | None]:
    """`scored` by torch's own products, for dtypes that the tensor cores round."""
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


def add_query_gradients(u: Tensor, g: Tensor, entries: Entries, documents: Documents, winners: Tensor) -> None:
    """Add Σ_j g_ij · (the token of document j that won it) to each query token of u [N, L · D]."""
    (N, L, _), (J, M, width) = entries.vectors.shape, documents.vectors.shape
    D = u.shape[1] // L
    gathering = gathering_for(entries.vectors)
    # a query's weights side by side, which its entries read document after document
    g = g.contiguous() if g.numel() >= COPIED else g
    BD = min(gathering.features, max(16, triton.next_power_of_2(D)))
    run(
        kernels.query_gradients, (tiles_of(entries.count, gathering.entries), tiles_of(D, BD)), warps=gathering.warps,
        registers=gathering.registers, k_ptr=documents.vectors, best_ptr=winners, weight_ptr=g,
        tokens_ptr=_or(entries.tokens, winners), out_ptr=u, N=N, J=J, L=L, M=M, D=D, k_stride=width,
        entries=entries.count, row_weight_stride=g.stride(0), col_weight_stride=g.stride(1), out_stride=u.stride(0),
        BM=gathering.entries, BD=BD, PADDED=entries.padded, ROWS_MASKED=entries.tokens is not None,
        WHOLE=D % BD == 0, STAGES=gathering.stages,
    )  # fmt: skip


def add_document_gradients(
    v: Tensor, g: Tensor, entries: Entries, documents: Documents, winners: Tensor, workspace: int,
    meanwhile: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Add Σ g_ij · q_il over the query tokens that each document token has won to v [J, M · D].

    Documents are listed and multiplied some at a time, of many pairs on two streams in turn: lists keep few
    multiprocessors busy. meanwhile: called beside the first lists.
    """
    (N, L, width), (J, M, _) = entries.vectors.shape, documents.vectors.shape
    D = v.shape[1] // M
    streams = _streams(g.device, get_ident()) if g.is_cuda and g.numel() >= COPIED else (None,)
    at_once = max(1, min(tiles_of(J, len(streams)), MOST_PROGRAMS, workspace // (4 * entries.count * len(streams))))
    gathering = gathering_for(entries.vectors)
    BD, BN = min(gathering.document_features, max(16, triton.next_power_of_2(D))), gathering.tokens
    blocks = tiles_of(M, BN)
    buffers: list[dict[str, Any]] = [
        {
            "list_ptr": torch.empty(at_once, entries.count, dtype=torch.int32, device=g.device),
            "bounds_ptr": torch.empty(at_once, 2, blocks, dtype=torch.int32, device=g.device),
        }
        for _ in streams
    ]
    unit = _unit(g) if entries.vectors.dtype == torch.float16 else torch.ones((), device=g.device)
    given: dict[str, Any] = {"M": M, "entries": entries.count, "blocks": blocks, "BN": BN}

    def list_entries(part: int) -> None:
        first, turn = part * at_once, part % len(streams)
        with torch.cuda.stream(streams[turn]):
            run(
                kernels.list_entries, (tiles_of(blocks, FIELDS.value), min(at_once, J - first)), warps=1,
                best_ptr=winners, first=first, ROWS=gathering.listed, **given, **buffers[turn],
            )  # fmt: skip

    def multiply(part: int) -> None:
        first, turn = part * at_once, part % len(streams)
        with torch.cuda.stream(streams[turn]):
            run(
                kernels.document_gradients, (blocks, min(at_once, J - first), tiles_of(D, BD)),
                warps=gathering.document_warps, registers=gathering.document_registers, q_ptr=entries.vectors,
                weight_ptr=g, tokens_ptr=_or(entries.tokens, winners), order_ptr=_or(documents.order, winners),
                unit_ptr=unit, out_ptr=v, N=N, L=L, D=D, q_stride=width, first=first, row_weight_stride=g.stride(0),
                col_weight_stride=g.stride(1), out_stride=v.stride(0), BD=BD, GROUP=gathering.group,
                PADDED=entries.padded, ROWS_MASKED=entries.tokens is not None,
                COLS_MASKED=documents.order is not None, WHOLE=D % BD == 0, STAGES=gathering.document_stages,
                **given, **buffers[turn],
            )  # fmt: skip

    parts = range(tiles_of(J, at_once))
    _follow(streams)
    for part in parts[: len(streams)]:
        list_entries(part)
    if meanwhile is not None:
        meanwhile()
    # products would take the cache from what is computed meanwhile
    _follow(streams)
    for part in parts:
        if part >= len(streams):
            list_entries(part)
        multiply(part)
    for stream in filter(None, streams):
        torch.cuda.current_stream().wait_stream(stream)


@cache
def _streams(device: torch.device, _thread: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Two streams of a thread: one that another thread captures would take up what this one launches."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _follow(streams: Sequence[torch.cuda.Stream | None]) -> None:
    """Let the streams wait for what was launched on the current one."""
    for stream in filter(None, streams):
        stream.wait_stream(torch.cuda.current_stream())


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """x, or another tensor's memory that the kernel does not read."""
    return other if x is None else x


def _unit(g: Tensor) -> Tensor:
    """The power of two that brings g to the upper end of fp16."""
    most = torch.linalg.vector_norm(g, ord=torch.inf)
    power = (14 - torch.log2(most).ceil()).clamp(max=126)
    return torch.where(most == 0, 1.0, torch.exp2(power))
