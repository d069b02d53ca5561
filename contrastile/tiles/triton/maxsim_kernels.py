# mypy: ignore-errors
# device code: Triton compiles these functions from their source, their arguments have no Python types
"""Device code of late interaction: scores Σ_l max_m ⟨q_il, k_jm⟩, and the gradients that follow from them.

Launched by `maxsim.py`. Query tokens are entries: those of a query lie one after the other and fill whole slots of
SLOT entries, so that a tile of entries holds several short queries. Documents are [J, M, D], the tokens of each first.

    sweep               each document's tokens against a tile of entries: sums of the maxima of each slot and, where
                        BEST, the index of the token that attains each maximum
    query_gradients     Σ_j g_ij · k_j,best of each entry, documents in order
    document_gradients  Σ g_ij · q_il of each document token over the entries whose maximum it attains, in order

No sum depends on the order in which programs run: the same bits every time.

Names: L and M are the tokens of a query and of a document, N and J their numbers, e numbers entries, BM and BN are the
entries and tokens of a tile, BD is the feature size as a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

# below every product, and finite
LOWEST = tl.constexpr(-3.0e38)
# arguments that change from call to call: compiled once for all their values
ANY = ("N", "J", "L", "M", "slots", "documents", "row_weight_stride", "col_weight_stride", "out_stride",
       "first")  # fmt: skip


@triton.jit
def entry_tokens(e, tokens_ptr, N, L, entries, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Rows of the query tokens [N · L] of these entries, their queries, and whether there is a token."""
    if MASKED:
        token = tl.load(tokens_ptr + e, mask=e < entries, other=-1)
        valid = token >= 0
        token = tl.where(valid, token, 0)
        query = token // L
    else:
        query = e // PADDED
        within = e % PADDED
        valid = (query < N) & (within < L)
        query = tl.where(valid, query, 0)
        token = query * L + tl.where(valid, within, 0)
    return token.to(tl.int64), query.to(tl.int64), valid


@triton.jit
def _load_tokens(mem, stride, row, rows, D, BN: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr):
    """[BN, BD] features of the tokens from this row on, 0 outside; through the copy engine where TMA."""
    if TMA:
        piece = mem.load([row, 0])
    else:
        at = row + tl.arange(0, BN)
        d = tl.arange(0, BD)
        inside = (at < rows)[:, None] & (d < D)[None, :]
        piece = tl.load(mem + at.to(tl.int64)[:, None] * stride + d[None, :], mask=inside, other=0.0)
    return piece


@triton.jit
def _best(s, cols, BN: tl.constexpr, INTERPRETED: tl.constexpr):
    """Maximum of each row, and the first column that attains it; at most 64 columns.

    Each column has a power of a quarter. Those of the maxima are added up: the sum lies below twice the first of them,
    whose exponent is the column. Multiplications have units of their own beside those of comparisons, of which one per
    product is left.
    """
    top = tl.max(s, 1)
    below = s - top[:, None]
    # 1 where the product is the maximum, else 0: 2^100 times the difference is below −1
    if INTERPRETED:
        won = (below == 0.0).to(tl.float32)
    else:
        won = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, 0f71800000, 0f3F800000;", "=f,f", [below], dtype=tl.float32, is_pure=True, pack=1
        )
    power = ((127 - 2 * cols) << 23).to(tl.float32, bitcast=True)
    first = tl.sum(won * power[None, :], 1)
    index = (127 - (first.to(tl.int32, bitcast=True) >> 23)) >> 1
    return top, tl.minimum(index, BN - 1)


@triton.jit(do_not_specialize=ANY)
def sweep(q_ptr, k_mem, tokens_ptr, lengths_ptr, sums_ptr, best_ptr, N, J, L, M, D, q_stride, k_stride, entries, slots,
          documents, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, SLOT: tl.constexpr, PADDED: tl.constexpr,
          ROWS_MASKED: tl.constexpr, COLS_MASKED: tl.constexpr, BEST: tl.constexpr, NONE: tl.constexpr,
          TMA: tl.constexpr, FLATTEN: tl.constexpr, REGISTERS: tl.constexpr,
          INTERPRETED: tl.constexpr):  # fmt: skip
    """Write sums [J, slots] of a tile of entries over a group of documents and, where BEST, indices [J, entries]."""
    tiles = tl.cdiv(entries, BM)
    tile = tl.program_id(0) % tiles
    group = tl.program_id(0) // tiles
    e = tile * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    cols = tl.arange(0, BN)
    slot = tile * (BM // SLOT) + tl.arange(0, BM // SLOT)
    token, _, valid = entry_tokens(e, tokens_ptr, N, L, entries, PADDED, ROWS_MASKED)
    if ROWS_MASKED:  # noqa: SIM102 - known when compiled
        # slots behind the last token
        if tl.max(valid.to(tl.int32)) == 0:
            return
    q = tl.load(q_ptr + token[:, None] * q_stride + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
    if REGISTERS:
        # times one: products read their left side from registers where a product has made it
        one = (tl.arange(0, BD)[:, None] == d[None, :]).to(q.dtype)
        q = tl.dot(q, one).to(q.dtype)
    first = group * documents
    for j in tl.range(first, min(first + documents, J), flatten=FLATTEN):
        n = M
        if COLS_MASKED:
            n = tl.load(lengths_ptr + j)
        top = tl.full((BM,), LOWEST, tl.float32)
        index = tl.zeros((BM,), tl.int32)
        for start in range(0, tl.maximum(n, 1), BN):
            k = _load_tokens(k_mem, k_stride, j * M + start, J * M, D, BN, BD, TMA)
            s = tl.dot(q, k.T)
            if start + BN > n:
                s = tl.where((cols < n - start)[None, :], s, LOWEST)
            if BEST:
                value, at = _best(s, cols, BN, INTERPRETED)
                index = tl.where(value > top, start + at, index)
                top = tl.maximum(top, value)
            else:
                top = tl.maximum(top, tl.max(s, 1))
        has = valid & (n > 0)
        top = tl.where(has, top, 0.0)
        sums = tl.sum(tl.reshape(top, (BM // SLOT, SLOT)), 1)
        tl.store(sums_ptr + j * slots.to(tl.int64) + slot, sums, mask=slot < slots)
        if BEST:
            at = best_ptr + j * entries.to(tl.int64) + e
            tl.store(at, tl.where(has, index, NONE).to(best_ptr.dtype.element_ty), mask=e < entries)


@triton.jit
def _winners(best_ptr, weight_at, e, j, J, M, entries, col_weight_stride, valid):
    """The winning token of each entry in document j and its weight; token 0 with weight 0 where there is none."""
    best = tl.load(best_ptr + j * entries.to(tl.int64) + e, mask=(e < entries) & (j < J), other=0).to(tl.int32)
    won = valid & (best < M) & (j < J)
    g = tl.load(weight_at + j * col_weight_stride.to(tl.int64), mask=won, other=0.0)
    return tl.where(won, best, 0), g


@triton.jit(do_not_specialize=ANY)
def query_gradients(k_ptr, best_ptr, weight_ptr, tokens_ptr, out_ptr, N, J, L, M, D, k_stride, entries,
                    row_weight_stride, col_weight_stride, out_stride, BM: tl.constexpr, BD: tl.constexpr,
                    PADDED: tl.constexpr, ROWS_MASKED: tl.constexpr, WHOLE: tl.constexpr,
                    STAGES: tl.constexpr):  # fmt: skip
    """Add Σ_j g_ij · k_j,best to each entry's token of `out` [N, L · D]."""
    e = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    token, query, valid = entry_tokens(e, tokens_ptr, N, L, entries, PADDED, ROWS_MASKED)
    if ROWS_MASKED:  # noqa: SIM102 - known when compiled
        if tl.max(valid.to(tl.int32)) == 0:
            return
    weight_at = weight_ptr + query * row_weight_stride
    # winners and weights are loaded one document ahead of the tokens that they point to
    best, g = _winners(best_ptr, weight_at, e, 0, J, M, entries, col_weight_stride, valid)
    acc = tl.zeros((BM, BD), tl.float32)
    for j in tl.range(0, J, num_stages=STAGES):
        k_at = k_ptr + j * (M * k_stride).to(tl.int64)
        if WHOLE:
            k = tl.load(k_at + (best * k_stride)[:, None] + d[None, :])
        else:
            k = tl.load(k_at + (best * k_stride)[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
        weight = g
        best, g = _winners(best_ptr, weight_at, e, j + 1, J, M, entries, col_weight_stride, valid)
        acc += weight[:, None] * k.to(tl.float32)
    out = out_ptr + (query * out_stride + (token - query * L) * D)[:, None] + d[None, :]
    inside = valid[:, None] & (d < D)[None, :]
    # no other program adds there: the order is fixed, and no register waits for a load
    tl.atomic_add(out, acc, mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=ANY)
def document_gradients(q_ptr, best_ptr, weight_ptr, tokens_ptr, order_ptr, list_ptr, unit_ptr, out_ptr, N, L, M, D,
                       q_stride, entries, first, row_weight_stride, col_weight_stride, out_stride, BN: tl.constexpr,
                       BD: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr,
                       ROWS_MASKED: tl.constexpr, COLS_MASKED: tl.constexpr, WHOLE: tl.constexpr,
                       STAGES: tl.constexpr):  # fmt: skip
    """Add Σ g_ij · q_il over the entries won by each of BN tokens to `out` [J, M · D], for one document.

    The entries are listed in their order; of the list [J, entries] each block of tokens has a part of its own.
    """
    block = tl.program_id(0)
    j = (tl.program_id(1) + first).to(tl.int64)
    best_at = best_ptr + j * entries
    list_at = list_ptr + tl.program_id(1).to(tl.int64) * entries
    chunk = tl.arange(0, CHUNK)
    before = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, entries, CHUNK):
        best = tl.load(best_at + start + chunk, mask=start + chunk < entries, other=M).to(tl.int32)
        before += (best < block * BN).to(tl.int32)
    begin = tl.sum(before)
    count = 0
    for start in range(0, entries, CHUNK):
        best = tl.load(best_at + start + chunk, mask=start + chunk < entries, other=M).to(tl.int32)
        won = (best >= block * BN) & (best < tl.minimum((block + 1) * BN, M))
        rank = tl.cumsum(won.to(tl.int32), 0)
        packed = (start + chunk) * BN + best - block * BN
        tl.store(list_at + begin + count + rank - 1, packed, mask=won)
        count += tl.max(rank)
    tl.debug_barrier()
    d = tl.arange(0, BD)
    unit = tl.load(unit_ptr)
    acc = tl.zeros((BN, BD), tl.float32)
    for start in tl.range(0, count, GROUP, num_stages=STAGES):
        at = start + tl.arange(0, GROUP)
        packed = tl.load(list_at + begin + at, mask=at < count, other=0)
        token, query, _ = entry_tokens(packed // BN, tokens_ptr, N, L, entries, PADDED, ROWS_MASKED)
        g = tl.load(weight_ptr + query * row_weight_stride + j * col_weight_stride, mask=at < count, other=0.0)
        q_at = q_ptr + token[:, None] * q_stride + d[None, :]
        if WHOLE:
            q = tl.load(q_at)
        else:
            q = tl.load(q_at, mask=(d < D)[None, :], other=0.0)
        won = (packed % BN)[None, :] == tl.arange(0, BN)[:, None]
        weights = tl.where(won, (g * unit)[None, :], 0.0).to(q.dtype)
        acc = tl.dot(weights, q, acc, input_precision="ieee")
    acc = acc / unit
    tokens = block * BN + tl.arange(0, BN)
    inside = tokens < M
    place = tokens.to(tl.int64)
    if COLS_MASKED:
        place = tl.load(order_ptr + j * M + tokens, mask=inside, other=0)
    out = out_ptr + j * out_stride + (place * D)[:, None] + d[None, :]
    inside = inside[:, None] & (d < D)[None, :]
    tl.atomic_add(out, acc, mask=inside, sem="relaxed")
