# mypy: ignore-errors
# device code: Triton compiles these functions from their source, their arguments have no Python types
"""Device code of token masks: the tokens that count brought together, for the kernels of late interaction.

Launched by `maxsim.py`. L tokens of each of n examples, N of them queries; M tokens of each of J documents:

    order_tokens    the tokens of each example that count, then its others, each in their order
    pack_tokens     the vectors of documents in that order, the last again where a token does not count
    fill_entries    the tokens of each query in slots of its own, which follow those of the query before
    slot_scores     the score of each pair from the sums of the query's slots

Indices of tokens lie below 2^31.
"""

from __future__ import annotations

import triton
import triton.language as tl

# arguments that change from call to call: compiled once for all their values
ANY = ("L", "M", "N", "J", "slots", "per_query")


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
