"""Sums of a strip's gradients times the features, by the vendor's matrix product, in float32 accumulators.

Between `plan.py`, which cuts features into pieces, and `backend.py`, which knows where the sums go.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contrastile.tiles.triton import launch, plan
from contrastile.tiles.triton.plan import Pair

# terms of an inner sum per product where float32's full precision is requested: the matrix units truncate their sums by
# a few parts in 10^8 for every 16 terms
INNER = 1024


def add_rows(u: Tensor, pair: Pair, strip: Tensor, *, fresh: bool) -> None:
    """u += g @ k of a super-tile whose gradient g is in the strip; `fresh`: u = g @ k."""
    g = pair.strip_pieces(strip)
    for of_g, of_k, inner, lost in _strip_products(pair):
        _add_product(u, g[of_g], pair.k.piece(of_k, u.shape[1]), inner, lost, fresh=fresh)
        fresh = False


def add_cols(v: Tensor, pair: Pair, strip: Tensor, *, fresh: bool) -> None:
    """v += gᵀ @ q; `fresh`: v = gᵀ @ q."""
    g = pair.strip_pieces(strip)
    for of_g, of_q, inner, lost in _strip_products(pair):
        _add_product(v, g[of_g].T, pair.q.piece(of_q, v.shape[1]), inner, lost, fresh=fresh)
        fresh = False


def _strip_products(pair: Pair) -> list[tuple[int, int, int | None, float]]:
    """Pieces of the gradient and of the features that are multiplied, terms of an inner sum, and what each loses."""
    parts = pair.q.parts
    exact = parts == plan.EXACT
    lost = launch.truncation_per_term(pair.q.data.device, exact=True) if exact else 0.0
    # of three pieces, the product of the largest must be as exact as the last are small
    return [(g, x, INNER if exact and g == x == 0 else None, lost) for g, x in plan.piece_products(parts)]


def _add_product(total: Tensor, g: Tensor, x: Tensor, inner: int | None, lost: float, *, fresh: bool) -> None:
    """total += g @ x in float32, from 16-bit operands, with at most `inner` terms at once.

    lost: share of a sum that the matrix units truncate, per term. fresh: total has no values yet.
    """
    n = len(x) if inner is None else inner
    for start in range(0, len(x), n):
        terms = x[start : start + n]
        keep = 0.0 if fresh and start == 0 else 1.0
        add_at_once(total, g[:, start : start + n], terms, 1 + lost * len(terms), keep)


def add_at_once(total: Tensor, g: Tensor, x: Tensor, times: float, keep: float) -> None:
    """total = keep · total + times · g @ x; with `keep` 0 the values of total are not read."""
    if total.is_cuda:
        torch.addmm(total, g, x, alpha=times, beta=keep, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(g.float(), x.float(), alpha=times, beta=keep)
