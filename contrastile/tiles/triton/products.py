"""Sums of a strip's gradients times the features, by the vendor's matrix product, in float32 accumulators.

Between `plan.py`, which cuts features into pieces, and `backend.py`, which knows where the sums go.
"""

import torch
from torch import Tensor

from contrastile.tiles.triton import plan
from contrastile.tiles.triton.plan import Pair

# terms of an inner sum where float32's full precision is requested: the tensor cores truncate sums of terms of
# different sizes by 2⁻³⁰ a term, and those of like terms not at all; half of it is made up for
INNER, MADE_UP = 512, 0.5


def add_rows(u: Tensor, pair: Pair, strip: Tensor, *, fresh: bool) -> None:
    """u += g @ k of a super-tile whose gradient g is in the strip; `fresh`: u = g @ k."""
    g = pair.strip_pieces(strip)
    for of_g, of_k, inner in _strip_products(pair):
        _add_product(u, g[of_g], pair.k.piece(of_k, u.shape[1]), inner, fresh=fresh)
        fresh = False


def add_cols(v: Tensor, pair: Pair, strip: Tensor, *, fresh: bool) -> None:
    """v += gᵀ @ q of as many columns as v has rows; `fresh`: v = gᵀ @ q."""
    g = pair.strip_pieces(strip)
    for of_g, of_q, inner in _strip_products(pair):
        _add_product(v, g[of_g].T[: len(v)], pair.q.piece(of_q, v.shape[1]), inner, fresh=fresh)
        fresh = False


def _strip_products(pair: Pair) -> list[tuple[int, int, int | None]]:
    """Pieces of the gradient and of the features that are multiplied, and terms of an inner sum."""
    parts = pair.q.parts
    # of three pieces, the product of the largest must be as exact as the last are small
    return [(g, x, INNER if parts == plan.EXACT and g == x == 0 else None) for g, x in plan.piece_products(parts)]


def _add_product(total: Tensor, g: Tensor, x: Tensor, inner: int | None, *, fresh: bool) -> None:
    """total += g @ x in float32, from 16-bit operands, with at most `inner` terms at once; fresh: no values yet."""
    n, lost = (len(x), 0.0) if inner is None else (inner, MADE_UP * plan.shape_for(x.device).truncation)
    for start in range(0, len(x), n):
        terms = x[start : start + n]
        keep = 0.0 if fresh and start == 0 else 1.0
        add_at_once(total, g[:, start : start + n], terms, keep, 1 + lost * len(terms))


def add_at_once(total: Tensor, g: Tensor, x: Tensor, keep: float, times: float = 1.0) -> None:
    """total = keep · total + times · g @ x; with `keep` 0 the values of total are not read."""
    if total.is_cuda:
        torch.addmm(total, g, x, alpha=times, beta=keep, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(g.float(), x.float(), alpha=times, beta=keep)
