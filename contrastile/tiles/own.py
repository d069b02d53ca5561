"""Columns that a row meets alone, such as the hard negatives of one query: [N, H, D] beside the block of all pairs.

Beside `base.py`; `engine/` calls it after the exchange, whatever tiles compute the shared columns. It costs 2·N·H·D
operations forward and 6·N·H·D backward, in plain PyTorch, a few rows at a time.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from contrastile.losses.base import Shard, Tile, fill
from contrastile.tiles.base import Accumulated, Tiles, bounds_of, nonfinite_flag

# copies of a strip's columns in the accumulator's dtype that are held at once
COPIES = 3


def forward(tiles: Tiles, rows: Shard, cols: Shard, stats: Tensor) -> Tensor:
    """The statistics [K, N] of the rows with those of their own columns merged into them."""
    assert rows.own is not None
    # read here, because a block's kernels look at its own features only
    tiles.flag = nonfinite_flag(tiles.scale, rows.features, cols.features, rows.own)
    for along, strip in _strips(tiles, rows):
        tile, *_ = _tile(tiles, strip)
        stats[:, along] = tiles.loss.merge(stats[:, along], tiles.loss.absorb(tile)[0])
    return stats


def backward(
    tiles: Tiles, rows: Shard, accumulated: Accumulated, dtype: torch.dtype | None, *, wanted: bool
) -> Tensor | None:
    """The gradient [N, H, D] of the own columns, where wanted; the rows' is added to their accumulator and the sums.

    dtype: of the result; None: that of the columns.
    """
    assert rows.own is not None
    gradient = torch.empty_like(rows.own, dtype=dtype) if wanted else None
    for along, strip in _strips(tiles, rows):
        tile, q, own, products = _tile(tiles, strip)
        g = tiles.loss.pair_grad(tile, strip, strip)
        if accumulated.u is not None:
            accumulated.u[along] += torch.bmm(g[:, None], own)[:, 0]
        if gradient is not None:
            gradient[along] = (g * tiles.scale)[..., None] * q[:, None]
        if tiles.sums_products:
            accumulated.sums[1] += (g * products).sum()
        elif tiles.bias is not None:
            accumulated.sums.add_(g.sum())
    return gradient


def _strips(tiles: Tiles, rows: Shard) -> Iterator[tuple[slice, Shard]]:
    assert rows.own is not None
    N, H, D = rows.own.shape
    height = max(1, tiles.workspace // (COPIES * tiles.scale.dtype.itemsize * max(H * D, 1)))
    for start in range(0, N if H else 0, height):
        stop = min(start + height, N)
        yield slice(start, stop), rows.narrow(start, stop)


def _tile(tiles: Tiles, rows: Shard) -> tuple[Tile, Tensor, Tensor, Tensor]:
    """The tile [I, H] of these rows, and behind it q [I, D], the own columns [I, H, D] and their products [I, H]."""
    assert rows.own is not None
    wide = tiles.scale.dtype
    q, own = rows.features.to(wide), rows.own.to(wide)
    products = torch.bmm(own, q[..., None])[..., 0]
    x = products * tiles.scale
    if tiles.bias is not None:
        x += tiles.bias
    bounds = bounds_of(x)
    fill(x, rows.own_excluded, -torch.inf)
    positive = None
    if rows.own_positives:
        first = torch.arange(x.shape[1], device=x.device) < rows.own_positives
        positive = first.expand_as(x)
    target = None if rows.targets is None else rows.targets.to(wide)
    tile = Tile(x, positive, rows.own_excluded, bounds, target=target, products=products, own=True)
    return tile, q, own, products
