"""A loss whose features stay in host memory, and their gradients too: it computes on a device that cannot hold them.

Beside `_sweep.py`, for `contrast(..., device=...)`. A ring of one process: what a neighbour's shard is there, the
host's is here. A strip of rows, as long as the device's memory allows, stays with its statistics or its gradient,
while the columns are streamed past it shard by shard, the next one copied under the present one's computation. In
the backward each shard brings the float32 gradient that its columns have so far, and takes it home; after the last
strip it goes home in the features' type. With rows cut into n strips a sweep moves n · M · D numbers each way, and
nothing of size b but statistics lives on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from contrastile._choose import choose_tiles
from contrastile._sweep import Call, Swept, finished, halves, poison, with_states, workspace_on
from contrastile._task import Task
from contrastile._types import accumulator
from contrastile.exchange.base import Exchange
from contrastile.losses.base import Side
from contrastile.offload import Belt, free_memory, host_room
from contrastile.tiles.base import inner_product

# columns of a shard: long enough for the matrix products, short beside the device's memory
SHARD = 65536
# share of the free memory that strip and shards may take
SHARE = 0.6
LEAST_ROWS = 128


@dataclass(frozen=True)
class Cut:
    """Rows of a strip, which stays, and of a shard, which passes by."""

    strip: int
    shard: int


def away(features: Tensor, device: torch.device) -> bool:
    """Whether features wait in host memory for a device."""
    return features.device != device


def cut(N: int, M: int, D: int, dtype: torch.dtype, device: torch.device, workspace: int) -> Cut:
    """Strips of equal length, as few as the free memory allows."""
    per_row = D * (dtype.itemsize + accumulator(dtype).itemsize)
    room = int(SHARE * max(0, free_memory(device)[0] - workspace))
    # two shards on the device, and what is on its way back
    shard = max(LEAST_ROWS, min(SHARD, M, room // (4 * 3 * per_row)))
    most = max(LEAST_ROWS, (room - 3 * shard * per_row) // per_row)
    strips = max(1, -(-N // most))
    return Cut(max(LEAST_ROWS, -(-N // (strips * LEAST_ROWS)) * LEAST_ROWS), shard)


def _on_device(side: Side, device: torch.device) -> Side:
    """All but the features, which are larger than the rest by their size."""
    small = {name: getattr(side, name) for name in ("positives", "labels", "ids")}
    return replace(side, **{name: x.to(device) for name, x in small.items() if x is not None})


def streamed(task: Task, exchange: Exchange) -> Tensor:
    """The loss on the task's device, of features on the host."""
    device, sides = task.device, (task.rows, task.cols)
    there = [replace(side, features=side.features[:0].to(device)) for side in sides]
    tiles = choose_tiles(task.options.backend, task.loss, *there)
    rows, cols = (_on_device(side, device) for side in sides)
    weights = None if task.weights is None else task.weights.to(device)
    call = replace(task, rows=rows, cols=cols, weights=weights).call(tiles, exchange)
    result: Tensor = _Streamed.apply(task.inputs.q, task.inputs.k, task.scale, task.bias, call, device)
    return result


class _Streamed(torch.autograd.Function):
    """Forward and backward: strips of rows outside, shards of columns inside."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None, call: Call, device: torch.device
    ) -> Tensor:
        numbers = [None if x is None else x.to(device) for x in (scale, bias)]
        cuts = cut(len(q), len(k), q.shape[1], q.dtype, device, workspace_on(device, call.workspace))
        swept = _forward(call, q, k, numbers, cuts)
        ctx.call, ctx.cuts = call, cuts
        ctx.save_for_backward(q, k, scale, bias, *swept.states, *swept.coefficients)
        return swept.value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, scale, bias, *saved = ctx.saved_tensors
        numbers = [None if x is None else x.to(upstream.device) for x in (scale, bias)]
        wanted = ctx.needs_input_grad[:4]
        dq, dk, *sums = _backward(ctx.call, upstream, q, k, numbers, halves(saved), wanted, ctx.cuts)
        given = [
            None if x is None or total is None else total.to(x.device, x.dtype).reshape(x.shape)
            for x, total in zip((scale, bias), sums, strict=True)
        ]
        return dq, dk, *given, None, None


def _forward(call: Call, q: Tensor, k: Tensor, numbers: Sequence[Tensor | None], cuts: Cut) -> Swept:
    scale, bias = numbers
    assert scale is not None
    with torch.autocast(scale.device.type, enabled=False):
        tiles = call.arithmetic(scale, bias, q.dtype)
        belt = Belt(k, cuts.shard, scale.device)
        row_stats, not_finite = tiles.init(replace(call.rows, features=q)), poison(tiles.scale)
        col_stats = tiles.init(replace(call.cols, features=k)) if call.loss.symmetric else None
        for along_i, rows in _strips(call.rows, q, cuts, scale.device):
            not_finite = not_finite + poison(tiles.scale, rows.features)
            for _, bounds, block, _ in belt.turn(fresh=True):
                along_j = slice(*bounds)
                here, there = tiles.stats(rows, _part(call.cols, along_j, block))
                row_stats[:, along_i] = call.loss.merge(row_stats[:, along_i], here)
                if col_stats is not None and there is not None:
                    col_stats[:, along_j] = call.loss.merge(col_stats[:, along_j], there)
                if along_i.start == 0:
                    not_finite = not_finite + poison(tiles.scale, block)
            # before the next strip comes
            del rows
        return finished(call, (row_stats, col_stats), not_finite)


def _backward(
    call: Call,
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    numbers: Sequence[Tensor | None],
    swept: tuple[Sequence[Tensor], Sequence[Tensor]],
    wanted: Sequence[bool],
    cuts: Cut,
) -> list[Tensor | None]:
    """The gradients of q, k (both on the host), scale and bias, of those that are wanted."""
    scale, bias = numbers
    assert scale is not None
    want_q, want_k, want_scale, want_bias = wanted
    with torch.autocast(scale.device.type, enabled=False):
        tiles = call.arithmetic(scale, bias, q.dtype)
        every_row, every_col = with_states(call, upstream, swept, tiles.scale.dtype)
        dq, dk = (host_room(x.shape, x.dtype) if want else None for x, want in ((q, want_q), (k, want_k)))
        # the scale's gradient is read off the rows, or else off the columns, where the tiles do not weigh
        by_rows = want_q or (want_scale and not want_k and not tiles.weighs)
        wide = tiles.scale.dtype
        running = _room_so_far(dk, wide) if cuts.strip < len(q) else None
        belt = Belt(k, cuts.shard, scale.device, wide=wide if want_k else None, totals=running)
        total, dscale = tiles.no_pairs(), torch.zeros_like(tiles.scale)

        def hand_over(found: Tensor, to: Tensor, index: int | None = None) -> None:
            belt.bring_back(found.mul_(tiles.scale).to(to.dtype), to, index)

        for along_i, rows in _strips(every_row, q, cuts, scale.device):
            u = torch.zeros_like(rows.features, dtype=tiles.scale.dtype) if by_rows else None
            for index, bounds, block, so_far in belt.turn(fresh=along_i.start == 0):
                along_j = slice(*bounds)
                v = so_far if want_k else None
                total += tiles.grads(rows, _part(every_col, along_j, block), u, v)
                if v is None or dk is None:
                    continue
                if running is not None and along_i.stop < len(q):
                    belt.bring_back(v, running[along_j], index)
                else:
                    dscale += 0 if by_rows or tiles.weighs else inner_product(block, v)
                    hand_over(v, dk[along_j], index)
            if u is not None:
                dscale += 0 if tiles.weighs else inner_product(rows.features, u)
                if dq is not None:
                    for part, to in zip(u.split(cuts.shard), dq[along_i].split(cuts.shard), strict=True):
                        hand_over(part, to)
                    del part
            del rows, u
        belt.finish()
    of_pairs, dscale = (total[0], total[1]) if tiles.weighs else (total, dscale)
    of_bias = of_pairs if call.loss.uses_bias else torch.zeros_like(of_pairs)
    return [dq, dk, dscale if want_scale else None, of_bias if want_bias else None]


def _room_so_far(dk: Tensor | None, wide: torch.dtype) -> Tensor | None:
    """Where the columns' gradient waits between two strips; wide features have room for it where it ends."""
    return dk if dk is None or dk.dtype == wide else host_room(dk.shape, wide)


def _strips(side: Side, features: Tensor, cuts: Cut, device: torch.device) -> Iterator[tuple[slice, Side]]:
    """Strips of rows on the device. Whoever takes the next one has to have forgotten the one before."""
    for start in range(0, len(features), cuts.strip):
        along = slice(start, min(start + cuts.strip, len(features)))
        yield along, _part(side, along, features[along].to(device))


def _part(side: Side, along: slice, features: Tensor) -> Side:
    """Some rows of a side whose features are on the host, with those features on the device."""
    return replace(side.narrow(along.start, along.stop), features=features)
