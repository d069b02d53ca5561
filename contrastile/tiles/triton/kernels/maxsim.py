"""Device code of late interaction: scores Σ_l max_m ⟨q_il, k_jm⟩, and the gradients that follow from them.

Launched by `triton/maxsim/block.py`. Query tokens are entries: those of a query lie one after the other and fill whole
slots of SLOT entries, so that a tile of entries holds several short queries. Documents are [J, M, D], the tokens of
each first.

    order_tokens        the tokens of each example that count, then its others, each in their order
    pack_tokens         the vectors of documents in that order, the last again where a token does not count
    fill_entries        the tokens of each query in slots of its own, which follow those of the query before
    slot_scores         the score of each pair from the sums of the query's slots
    sweep               each document's tokens against a tile of entries: sums of the maxima of each slot and, where
                        BEST, the index of the token that attains each maximum
    query_gradients     Σ_j g_ij · k_j,best of each entry, documents in order
    list_entries        the entries whose maximum each block of document tokens attains, in order
    document_gradients  Σ g_ij · q_il of each document token over its listed entries

The first four serve masks of tokens alone. No sum depends on the order in which programs run: the same bits every time.

Names: L and M are the tokens of a query and of a document, N and J their numbers, e numbers entries, BM and BN are the
entries and tokens of a tile, BD is the feature size as a power of two. Indices of tokens lie below 2^31.
"""

import triton
import triton.language as tl

from contrastile.tiles.triton.kernels.arithmetic import INTERPRETED
from contrastile.tiles.triton.kernels.forward import load_features
from contrastile.tiles.triton.kernels.maxsim_lists import BEFORE, FIELDS, OTHER, bounds, counted, listed, places_by_step
from contrastile.tiles.triton.kernels.maxsim_maxima import LANES, column, maxima

# below every product, and finite
LOWEST = tl.constexpr(-3.0e38)
# warps that share 64 rows of wide products
WARPS = tl.constexpr(4)
# arguments that change from call to call: compiled once for all their values
ANY = ("N", "J", "L", "M", "slots", "per_query", "documents", "row_weight_stride", "col_weight_stride", "out_stride",
       "first", "blocks")  # fmt: skip


@triton.jit
def _counted(mask_ptr, row, start, L, CHUNK: tl.constexpr):
    """1 for each token of a chunk that counts, else 0."""
    at = start + tl.arange(0, CHUNK)
    return (tl.load(mask_ptr + row * L + at, mask=at < L, other=0) != 0).to(tl.int32)


@triton.jit(do_not_specialize=ANY)
def order_tokens(mask_ptr, order_ptr, lengths_ptr, L, CHUNK: tl.constexpr):
    """Write the order [n, L] of an example's tokens, and the number [n] of those that count."""
    row = tl.program_id(0).to(tl.int64)
    length = 0
    for start in range(0, L, CHUNK):
        length += tl.sum(_counted(mask_ptr, row, start, L, CHUNK))
    tl.store(lengths_ptr + row, length)
    before = 0
    for start in range(0, L, CHUNK):
        at = start + tl.arange(0, CHUNK)
        counted = _counted(mask_ptr, row, start, L, CHUNK)
        rank = before + tl.cumsum(counted, 0)
        # a token that does not count follows all that count, and the earlier ones that do not
        position = tl.where(counted != 0, rank - 1, length + at - rank)
        tl.store(order_ptr + row * L + position, at, mask=at < L)
        before = tl.max(rank)


@triton.jit(do_not_specialize=ANY)
def pack_tokens(x_ptr, order_ptr, lengths_ptr, out_ptr, M, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the vectors [J, M, width] of documents, the tokens of each in this order, then the last one again.

    A copy may win against its token by a rounding error. `sweep` then has an index beyond the tokens, for which it
    takes the last one.
    """
    j = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    length = tl.load(lengths_ptr + j)
    token = tl.load(order_ptr + j * M + tl.minimum(at, tl.maximum(length - 1, 0)))
    for start in range(0, width, BLOCK):
        d = start + tl.arange(0, BLOCK)
        inside = (d < width)[None, :] & (length > 0)
        x = tl.load(x_ptr + (j * M + token)[:, None] * width + d[None, :], mask=inside, other=0.0)
        tl.store(out_ptr + (j * M + at)[:, None] * width + d[None, :], x, mask=(at < M)[:, None] & (d < width)[None, :])


@triton.jit(do_not_specialize=ANY)
def fill_entries(order_ptr, lengths_ptr, tokens_ptr, begins_ptr, N, L, per_query, SLOT: tl.constexpr,
                 CHUNK: tl.constexpr):  # fmt: skip
    """Write the row of each entry's token, −1 without one, and the first slot [N] of each query.

    Of its `per_query` slots a query leaves those without a token to the end, behind those of the queries before.
    """
    i = tl.program_id(0)
    begin = 0
    total = 0
    for start in range(0, N, CHUNK):
        other = start + tl.arange(0, CHUNK)
        slots = tl.cdiv(tl.load(lengths_ptr + other, mask=other < N, other=0), SLOT)
        total += tl.sum(slots)
        begin += tl.sum(tl.where(other < i, slots, 0))
    tl.store(begins_ptr + i, begin)
    length = tl.load(lengths_ptr + i)
    used = tl.cdiv(length, SLOT) * SLOT
    behind = (total + i * per_query - begin) * SLOT
    for start in range(0, per_query * SLOT, CHUNK):
        at = start + tl.arange(0, CHUNK)
        token = tl.load(order_ptr + i.to(tl.int64) * L + at, mask=at < length, other=0)
        entry = tl.where(at < used, begin * SLOT + at, behind + at - used)
        tl.store(tokens_ptr + entry, tl.where(at < length, i * L + token, -1), mask=at < per_query * SLOT)


@triton.jit(do_not_specialize=ANY)
def slot_scores(sums_ptr, begins_ptr, lengths_ptr, out_ptr, N, J, slots, SLOT: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr):  # fmt: skip
    """Write the scores [J, N] from the sums [J, slots]."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    j = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    begin = tl.load(begins_ptr + i, mask=i < N, other=0)
    used = tl.cdiv(tl.load(lengths_ptr + i, mask=i < N, other=0), SLOT)
    score = tl.zeros((BN, BM), tl.float32)
    for slot in range(tl.max(used)):
        at = (j * slots)[:, None] + (begin + slot)[None, :]
        score += tl.load(sums_ptr + at, mask=(j < J)[:, None] & (slot < used)[None, :], other=0.0)
    tl.store(out_ptr + (j * N)[:, None] + i[None, :], score, mask=(j < J)[:, None] & (i < N)[None, :])


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


@triton.jit(do_not_specialize=ANY)
def sweep(q_ptr, k_mem, tokens_ptr, lengths_ptr, sums_ptr, best_ptr, N, J, L, M, D, q_stride, k_stride, entries, slots,
          documents, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, SLOT: tl.constexpr, PADDED: tl.constexpr,
          ROWS_MASKED: tl.constexpr, COLS_MASKED: tl.constexpr, BEST: tl.constexpr, NONE: tl.constexpr,
          SHORT: tl.constexpr, TMA: tl.constexpr, FLATTEN: tl.constexpr, REGISTERS: tl.constexpr):  # fmt: skip
    """Write sums [J, slots] of a tile of entries over a group of documents and, where BEST, indices [J, entries].

    SHORT: M < BN. Otherwise a document of fewer tokens than BN has its last one again behind them.
    """
    tiles = tl.cdiv(entries, BM)
    tile = tl.program_id(0) % tiles
    group = tl.program_id(0) // tiles
    row = tl.arange(0, BM)
    # each warp has 16 of every 64 rows: a slot as long as its rows is summed by one warp
    BY_WARP: tl.constexpr = REGISTERS and BM == WARPS * SLOT
    if BY_WARP:
        row = row // 16 % WARPS * SLOT + row // 64 * 16 + row % 16
    e = tile * BM + row
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
    # always false: the branch separates the registers of the product above from those of the loop
    if first >= J:
        return
    for j in tl.range(first, min(first + documents, J), flatten=FLATTEN):
        n = M
        if COLS_MASKED:
            n = tl.load(lengths_ptr + j)
        top = tl.full((BM, LANES), LOWEST, tl.float32)
        place = tl.zeros((BM, LANES), tl.int32)
        # the last tile begins earlier, so that all its tokens are those of the document
        most_begin = tl.maximum(n - BN, 0)
        for start in range(0, n, BN):
            k = load_features(k_mem, k_stride, j * M + tl.minimum(start, most_begin), 0, J * M, D, BN, BD, TMA)
            s = tl.dot(q, k.T)
            if SHORT:
                s = tl.where((cols < n)[None, :], s, LOWEST)
            value, at = maxima(s, BM, BN, BEST)
            if BEST:
                place = tl.where(value > top, start // LANES + at, place)
            top = tl.maximum(top, value)
        # products of an entry without a token are 0
        most = tl.max(top, 1)
        counted = tl.where(n > 0, most, 0.0)
        if BY_WARP:
            of_warps = tl.permute(tl.reshape(counted, (SLOT // 16, WARPS, 16)), (1, 0, 2))
            sums = tl.sum(tl.sum(of_warps, 2), 1)
        else:
            sums = tl.sum(tl.reshape(counted, (BM // SLOT, SLOT)), 1)
        tl.store(sums_ptr + j * slots.to(tl.int64) + slot, sums, mask=slot < slots)
        if BEST:
            block, of_block = column(place, BN)
            begin = tl.minimum(block * BN, most_begin)
            index = tl.min(tl.where(top == most[:, None], begin + of_block, NONE), 1)
            # an index in range, also where products are not finite, or a copy of the last token has won
            index = tl.minimum(tl.maximum(index, 0), n - 1)
            # computed again for each document: registers hold the products
            _, _, has = entry_tokens(e, tokens_ptr, N, L, entries, PADDED, ROWS_MASKED)
            at = best_ptr + j * entries.to(tl.int64) + e
            tl.store(at, tl.where(has & (n > 0), index, NONE).to(best_ptr.dtype.element_ty), mask=e < entries)


@triton.jit
def _winners(best_ptr, weight_at, e, j, J, M, entries, col_weight_stride, valid):
    """The winning token of each entry in document j, and its weight; 0 where there is none."""
    best = tl.load(best_ptr + j * entries.to(tl.int64) + e, mask=(e < entries) & (j < J), other=M).to(tl.int32)
    # not only of winners: both loads at once
    g = tl.load(weight_at + j * col_weight_stride.to(tl.int64), mask=valid & (j < J), other=0.0)
    won = valid & (best < M)
    return tl.where(won, best, 0), tl.where(won, g, 0.0)


@triton.jit
def _wide(x):
    """x in float32; two numbers of bf16 at once take two operations instead of three."""
    if x.dtype == tl.bfloat16 and not INTERPRETED:
        x = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        x = x.to(tl.float32)
    return x


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
        acc += weight[:, None] * _wide(k)
    out = out_ptr + (query * out_stride + (token - query * L) * D)[:, None] + d[None, :]
    inside = valid[:, None] & (d < D)[None, :]
    # no other program adds there: the order is fixed, and no register waits for a load
    tl.atomic_add(out, acc, mask=inside, sem="relaxed")


@triton.jit
def _codes(best, first, M, BN: tl.constexpr):
    """Codes of the winners' blocks: from the first on 0 to FIELDS − 1, BEFORE, OTHER."""
    field = best // BN - first
    behind = (best >= M) | (field >= FIELDS)
    return tl.where(behind, OTHER, tl.where(field < 0, BEFORE, field))


@triton.jit(do_not_specialize=ANY)
def list_entries(best_ptr, list_ptr, bounds_ptr, M, entries, first, blocks, BN: tl.constexpr, ROWS: tl.constexpr):
    """List the entries that each of FIELDS blocks of BN tokens has won: numbers e · BN + token of the block.

    The list [J, entries] of a document has those of its first block, then of the next; bounds [J, 2, blocks]: where
    each begins and ends. A program is one warp.
    """
    j = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * FIELDS
    best_at = best_ptr + (j + first) * entries
    list_at = list_ptr + j * entries
    bounds_at = bounds_ptr + j * 2 * blocks + block
    places = places_by_step(ROWS)
    # of each code, one to a thread; interpreted, one to each of the first places
    counts = tl.zeros_like(places)
    # loaded one step ahead
    best = tl.load(best_at + places, mask=places < entries, other=M)
    for start in range(ROWS, entries + ROWS, ROWS):
        code = _codes(best.to(tl.int32), block, M, BN)
        best = tl.load(best_at + start + places, mask=start + places < entries, other=M)
        counts = counted(code, counts)
    begin, end, field = bounds(counts)
    inside = (field >= 0) & (block + field < blocks)
    tl.store(bounds_at + field, begin, mask=inside)
    tl.store(bounds_at + blocks + field, end, mask=inside)
    best = tl.load(best_at + places, mask=places < entries, other=M)
    for start in range(0, entries, ROWS):
        token = best.to(tl.int32)
        best = tl.load(best_at + start + ROWS + places, mask=start + ROWS + places < entries, other=M)
        value = (start + places) * BN + token % BN
        begin = listed(list_at, _codes(token, block, M, BN), value, begin)


@triton.jit(do_not_specialize=ANY)
def document_gradients(q_ptr, list_ptr, bounds_ptr, weight_ptr, tokens_ptr, order_ptr, unit_ptr, out_ptr, N, L, M, D,
                       q_stride, entries, first, blocks, row_weight_stride, col_weight_stride, out_stride,
                       BN: tl.constexpr, BD: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr,
                       ROWS_MASKED: tl.constexpr, COLS_MASKED: tl.constexpr, WHOLE: tl.constexpr,
                       STAGES: tl.constexpr):  # fmt: skip
    """Add Σ g_ij · q_il over the listed entries of a block of BN tokens to `out` [J, M · D], in their order."""
    block = tl.program_id(0)
    j = (tl.program_id(1) + first).to(tl.int64)
    bounds_at = bounds_ptr + tl.program_id(1).to(tl.int64) * 2 * blocks + block
    begin = tl.load(bounds_at)
    count = tl.load(bounds_at + blocks) - begin
    list_at = list_ptr + tl.program_id(1).to(tl.int64) * entries + begin
    d = tl.program_id(2) * BD + tl.arange(0, BD)
    unit = tl.load(unit_ptr)
    acc = tl.zeros((BN, BD), tl.float32)
    for start in tl.range(0, count, GROUP, num_stages=STAGES):
        at = start + tl.arange(0, GROUP)
        packed = tl.load(list_at + at, mask=at < count, other=0)
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
