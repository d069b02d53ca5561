# mypy: ignore-errors
# device code: Triton compiles these functions from their source, their arguments have no Python types
"""Device code of the two ends of a replayed call: inputs into a graph's memory, the loss and the gradients out of it.

Launched by `replay.py`. Tensors of one end differ in type and length and are arguments as tuples, so that all of them
take one launch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["value_ptr"])
def fill(sources, targets, lengths, value_ptr, address_ptr, BLOCK: tl.constexpr):
    """Copy each source to its target [length], in the target's type, and note the address of the value."""
    block = tl.program_id(0)
    if block == 0:
        tl.store(address_ptr, value_ptr.to(tl.int64))
    for i in tl.static_range(len(sources)):
        blocks = tl.cdiv(lengths[i], BLOCK)
        if (block >= 0) & (block < blocks):
            at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = at < lengths[i]
            x = tl.load(sources[i] + at, mask=inside)
            tl.store(targets[i] + at, x.to(targets[i].dtype.element_ty), mask=inside)
        block -= blocks


@triton.jit(do_not_specialize_on_alignment=["value_ptr", "address_ptr"])
def deliver(value_ptr, address_ptr):
    """Store the value at the address that `fill` has noted."""
    tl.store(tl.load(address_ptr).to(value_ptr.dtype), tl.load(value_ptr))


@triton.jit(do_not_specialize_on_alignment=["upstream_ptr"])
def gradients(totals, outs, lengths, numbers_ptr, upstream_ptr, number_outs, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """out = total · scale · upstream, and the gradients of scale and bias, each in the type of its tensor.

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
