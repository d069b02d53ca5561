"""Columns that a row meets alone, such as the hard negatives of one query: [N, H, D] beside the block of all pairs.

Beside `base.py`; `engine/` calls it after the exchange, whatever tiles compute the shared columns. It costs 2·N·H·D
operations forward, whose products are kept, and 4·N·H·D backward: in plain PyTorch, a few rows at a time, or beside
fused tiles in kernels, which take as long as the memory takes for the columns (`triton/own.py`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from contrastile.losses.base import Shard, Tile, fill
from contrastile.tiles.base import Accumulated, Tiles, bounds_of


def forward(tiles: Tiles, rows: Shard, cols: Shard, stats: Tensor) -> Tensor:
    """The statistics [K, N] of the rows with those of their own columns merged into them."""
    columns = tiles.own_columns
    # a block's kernels look at its own features only
    flag, products = torch.zeros_like(tiles.scale), tiles.scale.new_empty(_own(rows).shape[:2])
    for along, strip in _strips(tiles, rows):
        if not columns.absorb(tiles, strip, products[along], flag, stats[:, along]):
            columns.products(strip.features, _own(strip), products[along], flag)
            tiles.merge(stats[:, along], tiles.loss.absorb(_tile(tiles, strip, products[along]))[0][None])
    tiles.note(flag, rows, cols)
    tiles.own_products = products
    return stats


def backward(tiles: Tiles, rows: Shard, accumulated: Accumulated) -> Tensor:
    """The gradients [N, H] of the logits of own columns; the rows' gradient is added to their accumulator and sums."""
    assert tiles.own_products is not None
    gradients = torch.empty_like(tiles.own_products)
    for along, strip in _strips(tiles, rows):
        products, u = tiles.own_products[along], None if accumulated.u is None else accumulated.u[along]
        if u is not None and tiles.sums_products:
            arguments = tiles, strip, products, gradients[along], u, accumulated.sums
            if tiles.own_columns.backward(*arguments):
                continue
        g = tiles.loss.pair_grad(_tile(tiles, strip, products), strip, strip)
        if u is not None:
            tiles.own_columns.add(g, _own(strip), u)
        if tiles.bias is not None:
            # Σ g is the first of two sums, or the only one, of shape []
            accumulated.sums.view(-1)[0] += g.sum()
        if tiles.sums_products:
            accumulated.sums[1] += (g * products).sum()
        gradients[along] = g
    return gradients


def gradient(tiles: Tiles, g: Tensor, q: Tensor, number: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient [N, H, D] of the own columns in this dtype: g · number · q."""
    out = q.new_empty(*g.shape, q.shape[1], dtype=dtype)
    for along in _slices(tiles, *out.shape):
        tiles.own_columns.gradient(g[along], q[along], number, out[along])
    return out


def _own(rows: Shard) -> Tensor:
    assert rows.own is not None
    return rows.own


def _strips(tiles: Tiles, rows: Shard) -> Iterator[tuple[slice, Shard]]:
    for along in _slices(tiles, *_own(rows).shape):
        yield along, rows.narrow(along.start, along.stop)


def _slices(tiles: Tiles, N: int, H: int, D: int) -> Iterator[slice]:
    """Rows whose copies of own columns in the accumulator's dtype fit into the workspace."""
    copies = tiles.own_columns.copies * tiles.scale.dtype.itemsize * H * D
    height = max(1, tiles.workspace // copies if copies else N)
    for start in range(0, N if H else 0, height):
        yield slice(start, min(start + height, N))


def _tile(tiles: Tiles, rows: Shard, products: Tensor) -> Tile:
    """The tile [I, H] of these rows and their own columns."""
    x = products * tiles.scale
    if tiles.bias is not None:
        x += tiles.bias
    bounds = bounds_of(x)
    fill(x, rows.own_excluded, -torch.inf)
    positive = None
    if rows.own_positives:
        first = torch.arange(x.shape[1], device=x.device) < rows.own_positives
        positive = first.expand_as(x)
    target = None if rows.targets is None else rows.targets.to(x.dtype)
    return Tile(x, positive, rows.own_excluded, bounds, target=target, products=products, own=True)
