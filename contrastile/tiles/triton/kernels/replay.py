"""Device code of the two ends of a replayed call: inputs into a graph's memory, the loss and the gradients out of it.

Launched by `triton/replay.py`. Tensors of one end differ in dtype and length and are arguments as tuples, so that all
of them take one launch.
"""

import triton
import triton.language as tl


@triton.jit
def _fill_rows(source_ptr, target_ptr, n, D, block, norm_ptr, blocks, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Copy a block of rows [ROWS, D]; write its largest squared norm and, `blocks` further, Σ x · 0."""
    rows = block * ROWS + tl.arange(0, ROWS)
    squares = tl.zeros((ROWS, COLS), tl.float32)
    zeros = tl.zeros((ROWS, COLS), tl.float32)
    for step in range(0, D, COLS):
        cols = step + tl.arange(0, COLS)
        at = rows.to(tl.int64)[:, None] * D + cols[None, :]
        inside = (rows < n)[:, None] & (cols < D)[None, :]
        x = tl.load(source_ptr + at, mask=inside, other=0.0).to(target_ptr.dtype.element_ty)
        tl.store(target_ptr + at, x, mask=inside)
        x = x.to(tl.float32)
        squares += x * x
        zeros += x * 0.0
    tl.store(norm_ptr, tl.max(tl.sum(squares, 1)))
    tl.store(norm_ptr + blocks, tl.sum(zeros))


@triton.jit(do_not_specialize_on_alignment=["value_ptr"])
def fill(sources, targets, lengths, D, norms_ptr, norms_blocks, value_ptr, address_ptr, MEASURED: tl.constexpr,
         ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Copy each source to its target [length], in the target's dtype, and note the address of the value.

    Of the first MEASURED, [n, D], the partial norms are written too, as `reductions.norms` writes them.
    """
    block = tl.program_id(0)
    if block == 0:
        tl.store(address_ptr, value_ptr.to(tl.int64))
    first = block * 0
    for i in tl.static_range(MEASURED):
        n = lengths[i] // D
        blocks = tl.cdiv(n, ROWS)
        if (block >= 0) & (block < blocks):
            _fill_rows(sources[i], targets[i], n, D, block, norms_ptr + first + block, norms_blocks, ROWS, COLS)
        block -= blocks
        first += blocks
    for i in tl.static_range(MEASURED, len(sources)):
        blocks = tl.cdiv(lengths[i], BLOCK)
        if (block >= 0) & (block < blocks):
            at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = at < lengths[i]
            x = tl.load(sources[i] + at, mask=inside)
            tl.store(targets[i] + at, x.to(targets[i].dtype.element_ty), mask=inside)
        block -= blocks


@triton.jit(do_not_specialize_on_alignment=["value_ptr", "address_ptr"])
def deliver(value_ptr, address_ptr, length, BLOCK: tl.constexpr):
    """Store the values at the address that `fill` has noted."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(value_ptr + at, mask=at < length)
    tl.store(tl.load(address_ptr).to(value_ptr.dtype) + at, values, mask=at < length)


@triton.jit(do_not_specialize_on_alignment=["upstream_ptr"])
def gradients(totals, outs, lengths, numbers_ptr, upstream_ptr, number_outs, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """out = total · scale · upstream, and the gradients of scale and bias, each in the dtype of its tensor.

    numbers: the scale, then the gradients of scale and bias for an upstream gradient of 1; those from FIRST on have
    a tensor in `number_outs`.
    """
    block = tl.program_id(0)
    upstream = tl.load(upstream_ptr)
    if block == 0:
        for i in tl.static_range(len(number_outs)):
            x = tl.load(numbers_ptr + FIRST + i) * upstream
            tl.store(number_outs[i], x.to(number_outs[i].dtype.element_ty))
    factor = tl.load(numbers_ptr) * upstream
    for i in tl.static_range(len(totals)):
        blocks = tl.cdiv(lengths[i], BLOCK)
        if (block >= 0) & (block < blocks):
            at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = at < lengths[i]
            x = tl.load(totals[i] + at, mask=inside) * factor
            tl.store(outs[i] + at, x.to(outs[i].dtype.element_ty), mask=inside)
        block -= blocks
