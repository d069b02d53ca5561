"""The two ends of a call in few launches: from statistics to the loss, and from accumulators to gradients.

Beside `triton.py`, with the kernels of `triton_ends.py`. Every number here has its formula elsewhere: the softmax's
`finish`, and `_sweep.py`, which takes that way where this one declines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from contrastile.tiles import triton_ends as ends
from contrastile.tiles.triton_device import run
from contrastile.tiles.triton_operands import tiles_of

# rows of one program, where there is one number per row
BLOCK = 128
# rows, and features at a time, of one program that reads features
ROWS, FEATURES = 16, 128
# rows of what a softmax's `finish` leaves: the state, then each row's loss and its weight
STATE, WEIGHT, LEFT = 7, 8, 9


def ended(
    stats: Sequence[Tensor],
    weights: Tensor | None,
    numbers: Tensor,
    total: Callable[[Tensor], Tensor],
    *,
    mean: bool,
    smoothing: float,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """A softmax's loss, and each direction's state [7, n] and ∂loss/∂(each row's loss) [n].

    stats: [8, n] of each direction. total: sums a small tensor over all ranks.
    """
    lengths = [side.shape[1] for side in stats]
    (N, M), S, n = ((*lengths, 0)[:2]), len(stats), sum(lengths)
    blocks = tiles_of(max(lengths), BLOCK)
    left, sums = numbers.new_empty(LEFT, n), numbers.new_empty(2 * S + 2, blocks)
    run(
        ends.finish, (blocks, S), row_stats_ptr=stats[0], row_stride=stats[0].stride(0), N=N, col_stats_ptr=stats[-1],
        col_stride=stats[-1].stride(0), M=M, weights_ptr=numbers if weights is None else weights, numbers_ptr=numbers,
        out_ptr=left, sums_ptr=sums, blocks=blocks, smoothing=smoothing, WEIGHTS=weights is not None,
        SMOOTH=bool(smoothing), BLOCK=BLOCK,
    )  # fmt: skip
    value, coefficients = numbers.new_empty(()), numbers.new_empty(n)
    # a rank without rows has a value, too
    run(
        ends.share, (max(tiles_of(n, BLOCK), 1),), weight_ptr=left[WEIGHT], totals_ptr=total(sums.sum(1)),
        out_ptr=coefficients, value_ptr=value, N=N, n=n, MEAN=mean, SIDES=S, BLOCK=BLOCK,
    )  # fmt: skip
    return value, list(left[:STATE].split(lengths, 1)), list(coefficients.split(lengths))


def scaled(total: Tensor, scale: Tensor, times: Tensor | None, out: Tensor) -> None:
    """Writes total · scale (· times) to `out`, in its type."""
    n, D = total.shape
    run(
        ends.scaled, (tiles_of(n, ROWS),), total_ptr=total, out_ptr=out, scale_ptr=scale,
        times_ptr=scale if times is None else times, n=n, D=D, total_stride=total.stride(0), out_stride=out.stride(0),
        TIMES=times is not None, ROWS=ROWS, BLOCK=FEATURES,
    )  # fmt: skip
