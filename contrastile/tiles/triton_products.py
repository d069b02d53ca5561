"""The backward's matrix products: a strip of the gradient times the features, added to the accumulators.

Used by `triton.py` for each super-tile, after the kernels of `triton_launch.py` have filled its strip.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from contrastile.tiles import triton_operands as operands
from contrastile.tiles.triton_operands import Pair

# terms of a product that the matrix units may add up by themselves where float32's own precision is asked for: they
# cut their sums off, by a few parts in 10^8 for every 16 terms
INNER = 1024
# a strip in fp16 holds gradients up to 2 to this power
UNIT_POWER = 14


def add_rows(u: Tensor | None, at: slice, pair: Pair, out: Tensor) -> None:
    """u[at] += g @ k of a super-tile whose g is in the strip `out`."""
    if u is None:
        return
    part, g = along(u, at, 0), operands.pieces(out, pair.q, pair.k)
    for of_g, of_k, inner in _products(pair):
        _add_product(part, g[of_g], pair.k.piece(of_k, u.shape[1]), inner)


def add_cols(v: Tensor, at: slice, pair: Pair, out: Tensor) -> None:
    """v[at] += gᵀ @ q of it."""
    part, g = along(v, at, 0), operands.pieces(out, pair.q, pair.k)
    for of_g, of_q, inner in _products(pair):
        _add_product(part, g[of_g].T, pair.q.piece(of_q, v.shape[1]), inner)


def _products(pair: Pair) -> list[tuple[int, int, int | None]]:
    """Which piece of the gradient meets which of the features, and how many terms are added up at once."""
    parts = pair.q.parts
    # of three pieces the first must be summed up as exactly as the last are small
    return [(g, x, INNER if parts == 3 and g == x == 0 else None) for g, x in operands.products(parts)]


def _add_product(total: Tensor, g: Tensor, x: Tensor, inner: int | None = None) -> None:
    """total += g @ x in float32, from 16-bit operands; if asked, so many terms of the inner sum at once."""
    if inner is not None and len(x) > inner:
        for start in range(0, len(x), inner):
            _add_product(total, g[:, start : start + inner], x[start : start + inner])
    elif total.is_cuda:
        torch.addmm(total, g, x, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(g.float(), x.float())


def unit(coefficients: list[Tensor]) -> Tensor:
    """The power of two that brings the largest gradient of a pair just under fp16's range, chosen on the device."""
    most = torch.stack([coefficient.abs().amax() for coefficient in coefficients]).sum()
    power = UNIT_POWER - torch.log2(most).ceil()
    return torch.where(most == 0, 1.0, torch.exp2(power))


def multiply(totals: Iterable[Tensor | None], factor: Tensor) -> None:
    for total in totals:
        if total is not None:
            total.mul_(factor)


def along(x: Tensor, at: slice, axis: int = -1) -> Tensor:
    """x[at] along an axis; x itself where that is all of it."""
    return x if at.stop - at.start == x.shape[axis] else x.narrow(axis, at.start, at.stop - at.start)
