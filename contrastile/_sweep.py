"""One call's two sweeps over the matrix: forward, from features to the loss; backward, from its gradient to theirs.

Stands between `_contrast.py`, which makes an autograd operation of the two, and the strategies they are handed: an
exchange walks over the columns, tiles compute blocks, the loss ends the statistics. Nothing here knows autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contrastile._choose import device_memory
from contrastile._types import Reduction, accumulator
from contrastile.exchange.base import Exchange
from contrastile.losses.base import Finished, PairLoss, Side
from contrastile.tiles.base import Tiles

# the default workspace is the device's memory by this
DEFAULT_SHARE = 64
# of a loss, a scale, a bias and a workspace
MakeTiles = Callable[[PairLoss, Tensor, Tensor | None, int], Tiles]


@dataclass(frozen=True)
class Call:
    """All that crosses autograd's boundary without being differentiated."""

    loss: PairLoss
    tiles: MakeTiles
    exchange: Exchange
    rows: Side
    cols: Side
    weights: Tensor | None
    reduction: Reduction
    # None: the device's default
    workspace: int | None
    # the tiles, once made: what they know of the forward serves the backward
    made: list[Tiles] = field(default_factory=list)

    def arithmetic(self, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tiles:
        """The tiles of this call, with its numbers in the accumulator's type."""
        if not self.made:
            self.made.append(self._make(scale, bias, accumulator(dtype)))
        return self.made[0]

    @property
    def groups(self) -> list[Tensor]:
        """What the backward reads again beside features and numbers: autograd has to see that it has not changed."""
        found = (x for side in (self.rows, self.cols) for x in (side.positives, side.labels, side.ids))
        return [x for x in found if x is not None and not x.is_inference()]

    def _make(self, scale: Tensor, bias: Tensor | None, wide: torch.dtype) -> Tiles:
        used = None if bias is None or not self.loss.uses_bias else _scalar(bias, wide)
        workspace = workspace_on(scale.device, self.workspace)
        return self.tiles(self.loss, _scalar(scale, wide), used, workspace).sparing(self.exchange.held())


def workspace_on(device: torch.device, asked: int | None) -> int:
    """Bytes that tiles may use."""
    return device_memory(device) // DEFAULT_SHARE if asked is None else asked


class Swept(NamedTuple):
    """What the forward leaves: the loss, and for each direction what the backward needs."""

    value: Tensor
    # [S, n] each
    states: list[Tensor]
    # [n] each: ∂(loss)/∂(each row's loss)
    coefficients: list[Tensor]


class Gradients(NamedTuple):
    """∂(loss), all without the scale: u [N, D] of q, v [M, D] of k, and what tiles return of their sums."""

    u: Tensor | None
    v: Tensor | None
    total: Tensor


def halves(saved: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The states and the coefficients of a forward, which were saved one behind the other, as many of each."""
    half = len(saved) // 2
    return saved[:half], saved[half:]


def forward(call: Call, q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None) -> Swept:
    """The statistics of all rows and columns, and the loss they come to."""
    with _as_given(q):
        tiles = call.arithmetic(scale, bias, q.dtype)
        rows, cols = replace(call.rows, features=q), replace(call.cols, features=k)
        stats = call.exchange.stats(tiles, rows, cols)
        there = [side for side in stats if side is not None]
        ended = tiles.ended(there, call.weights, call.reduction, call.exchange.total)
        return finished(call, there, poison(tiles.scale, q, k)) if ended is None else Swept(*ended)


def finished(call: Call, stats: Sequence[Tensor | None], not_finite: Tensor) -> Swept:
    """What the statistics of rows and columns come to; `not_finite` is 0, or NaN where something is not."""
    directions = [call.loss.finish(side) for side in stats if side is not None]
    value, coefficients = _reduce(call, directions, not_finite)
    return Swept(value, [direction.state for direction in directions], coefficients)


def with_states(
    call: Call, upstream: Tensor, swept: tuple[Sequence[Tensor], Sequence[Tensor]], wide: torch.dtype
) -> tuple[Side, Side]:
    """The call's sides with what the backward needs of their statistics."""
    states, coefficients = swept
    upstream = upstream.to(wide) * call.exchange.gradient_factor()
    return _carrying(call, states, [coefficient * upstream for coefficient in coefficients])


def _carrying(call: Call, states: Sequence[Tensor], coefficients: Sequence[Tensor]) -> tuple[Side, Side]:
    carried: list[dict[str, Any]] = [
        {"state": state, "coefficient": coefficient} for state, coefficient in zip(states, coefficients, strict=True)
    ]
    return replace(call.rows, **carried[0]), replace(call.cols, **(carried[1] if call.loss.symmetric else {}))


def forward_with_gradients(
    call: Call, q: Tensor, k: Tensor, scale: Tensor, bias: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, Gradients]:
    """The loss and its gradients for an upstream of 1, from the same sweep where a loss is pairwise."""
    if not call.loss.pairwise:
        value, states, coefficients = forward(call, q, k, scale, bias)
        return value, _gradients(call, q, k, scale, bias, states, coefficients, wanted)
    with _as_given(q):
        tiles = call.arithmetic(scale, bias, q.dtype)
        rows, coefficient = with_coefficients(call, poison(tiles.scale, q, k))
        u, v = _room(tiles, q, k, wanted)
        rows, cols = replace(rows, features=q), replace(call.cols, features=k)
        stats, total = call.exchange.stats_and_grads(tiles, rows, cols, u, v)
        value = call.exchange.total((coefficient * call.loss.finish(stats).loss).sum())
    return value, Gradients(u, v, total)


def with_coefficients(call: Call, not_finite: Tensor) -> tuple[Side, Tensor]:
    """The rows with their coefficients for an upstream of 1, which those of a pairwise loss have before any sweep."""
    n, wide = len(call.rows), not_finite.dtype
    weights = not_finite.new_ones(n) if call.weights is None else call.weights.to(wide)
    # of all ranks, so that what one has makes the gradients of all NaN
    mass, not_finite = call.exchange.total(torch.stack([weights.sum(), not_finite])).unbind()
    coefficient = (weights / mass if call.reduction == "mean" else weights) + not_finite
    # a pairwise loss leaves no state
    return replace(call.rows, coefficient=coefficient, state=coefficient.new_empty(0, n)), coefficient


def at_once(call: Call) -> bool:
    """Whether the gradients can come with the loss: those of a pair wait for nothing."""
    return call.loss.pairwise and call.reduction != "none"


def backward(
    call: Call,
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    swept: tuple[Sequence[Tensor], Sequence[Tensor]],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of q, k, scale and bias, of those that are wanted."""
    states, coefficients = swept
    upstream = upstream.to(accumulator(q.dtype)) * call.exchange.gradient_factor()
    coefficients = [coefficient * upstream for coefficient in coefficients]
    found = _gradients(call, q, k, scale, bias, states, coefficients, wanted)
    return hand_back(call, found, None, q, k, scale, bias, wanted)


def _gradients(
    call: Call,
    q: Tensor,
    k: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    states: Sequence[Tensor],
    coefficients: Sequence[Tensor],
    wanted: Sequence[bool],
) -> Gradients:
    """The second sweep."""
    with _as_given(q):
        tiles = call.arithmetic(scale, bias, q.dtype)
        rows, cols = _carrying(call, states, coefficients)
        u, v = _room(tiles, q, k, wanted)
        total = call.exchange.grads(tiles, replace(rows, features=q), replace(cols, features=k), u, v)
        return Gradients(u, v, total)


def hand_back(
    call: Call,
    found: Gradients,
    upstream: Tensor | None,
    q: Tensor,
    k: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """What was accumulated, as gradients in their own types; times `upstream`, where that is not in yet."""
    want_q, want_k, want_scale, want_bias = wanted
    u, v, total = found
    keep = upstream is not None
    with _as_given(q):
        tiles = call.arithmetic(scale, bias, q.dtype)
        times = None if upstream is None else upstream.to(total.dtype)
        # before the accumulators are overwritten
        x, of_x = (q, u) if u is not None else (k, v)
        of_pairs, of_products = tiles.sums(total, x, of_x if want_scale else None)
        dq = tiles.scaled(q, u, times, keep=keep) if want_q and u is not None else None
        dk = tiles.scaled(k, v, times, keep=keep) if want_k and v is not None else None
        dscale = dbias = None
        if want_scale:
            assert of_products is not None
            dscale = _number(of_products, times, scale)
        if want_bias and bias is not None:
            dbias = _number(of_pairs if call.loss.uses_bias else torch.zeros_like(of_pairs), times, bias)
    return [dq, dk, dscale, dbias]


def _number(found: Tensor, times: Tensor | None, of: Tensor) -> Tensor:
    """The gradient of a scalar in its own type and shape."""
    return (found if times is None else found * times).to(of.dtype).reshape(of.shape)


def _room(tiles: Tiles, q: Tensor, k: Tensor, wanted: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
    """Accumulators of what is wanted; tiles that do not weigh need one for the scale's gradient too."""
    want_q, want_k, want_scale, _ = wanted
    wide = accumulator(q.dtype)
    for_scale = want_scale and not want_k and not tiles.weighs
    # rows one after the other, whatever the strides of the features
    u = torch.zeros(q.shape, dtype=wide, device=q.device) if want_q or for_scale else None
    return u, torch.zeros(k.shape, dtype=wide, device=k.device) if want_k else None


def _reduce(call: Call, directions: list[Finished], not_finite: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The loss, and for each direction ∂(loss)/∂(each row's loss) for an upstream gradient of 1."""
    here = len(call.rows)
    weights = [
        direction.counts if call.weights is None else direction.counts * call.weights.to(direction.counts.dtype)
        for direction in directions
    ]
    summed = [(w * direction.loss).sum() for w, direction in zip(weights, directions, strict=True)]
    local = torch.stack([*summed, *(w.sum() for w in weights), not_finite + here, not_finite])
    *sums, rows, not_finite = call.exchange.total(local).unbind()
    losses, masses = sums[: len(directions)], sums[len(directions) :]
    share = 1 / len(directions)
    if call.reduction == "sum":
        value = sum(losses, not_finite) * share
        each = [w * share + not_finite for w in weights]
    elif call.reduction == "mean":
        value = sum((loss / mass for loss, mass in zip(losses, masses, strict=True)), not_finite * 0) * share
        each = [w * (share / mass) + not_finite for w, mass in zip(weights, masses, strict=True)]
    else:
        scaled = [w * (share / mass) for w, mass in zip(weights, masses, strict=True)]
        value = sum((s * d.loss for s, d in zip(scaled, directions, strict=True)), not_finite) * rows
        # the caller divides by this rank's rows, the value by those of all ranks
        each = [s * here + not_finite for s in scaled]
    return value + not_finite, each


def poison(scale: Tensor, *features: Tensor) -> Tensor:
    """0 if all is finite, NaN otherwise, without asking the device."""
    found = scale * 0
    for x in features:
        if x.numel():
            least, most = torch.aminmax(x)
            found = found + (least.to(scale.dtype) + most.to(scale.dtype)) * 0
    return found


def _as_given(x: Tensor) -> AbstractContextManager[object]:
    """No autocast inside; entering it anyway takes longer than asking."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _scalar(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().reshape(()).to(dtype)
