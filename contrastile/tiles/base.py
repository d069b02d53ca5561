"""The interface of every way to compute a block of the matrix.

Stands between `exchange/`, which brings rows and columns together, and the arithmetic. A `Tiles` object belongs to one
call. It has the loss, the scale and the bias, and computes any block of rows × columns within its workspace. Its
attributes are the forward's results for the backward.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from contrastile._torch import backward_is_repeatable
from contrastile._types import Reduction, accumulator
from contrastile.losses.base import Finished, PairLoss, Shard, Total, count_equal, divisor

# rows converted to float32 at a time where an inner product over all features is summed
ROWS_AT_ONCE = 8192
# upper bound of the numbers that a loss has for each row: statistics, a block's part of them, state and coefficient
STATISTICS = 14
# columns per row from which fused kernels of one direction sum the columns, most of the memory that a call writes, in
# 16 bits
NARROW = 4


class InFlight:
    """An accumulator that travels around the ring, here while this rank computes one block and adds its part.

    It may still be arriving; the first access waits for it. On the `first` rank of its journey it has no values yet.
    It is sent on once: after the block or, with `early`, as soon as this rank has added its part.
    """

    def __init__(
        self, buffer: Tensor, wait: Callable[[], object], send: Callable[[], object], *, first: bool, early: bool
    ) -> None:
        self._buffer, self._send = buffer, send
        # completes the transfer that fills the buffer; None once done
        self._wait: Callable[[], object] | None = wait
        self._sent = False
        # with `first` the buffer is uninitialised memory, to be written before it is read
        self.first, self.early = first, early

    def value(self) -> Tensor:
        """The accumulator, after its arrival."""
        if not self.first:
            self._complete()
        return self._buffer

    def release(self) -> None:
        """Release the accumulator to the next rank. Idempotent."""
        if not self._sent:
            self._complete()
            self._sent = True
            self._send()

    def _complete(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None


class ForwardResult(NamedTuple):
    """The loss, and the inputs of the backward: one state and one coefficient for each direction."""

    value: Tensor
    # [S, n] each
    states: list[Tensor]
    # [n] each: ∂(loss)/∂(loss of each row)
    coefficients: list[Tensor]


# function from a strip's statistics of each direction, or its direct results, and its slice of the rows to states and
# coefficients
Weigh = Callable[[Sequence[Tensor], Sequence[Finished], slice], tuple[Sequence[Tensor], Sequence[Tensor]]]


# an accumulator of gradients; None where they are not wanted
Sum = Tensor | None


class Accumulated(NamedTuple):
    """Gradient sums of a backward, all without the factor `scale`."""

    u: Sum  # [N, numbers of a row]: Σ_j g_ij · k_j
    v: Sum  # [M, numbers of a column]: Σ_i g_ij · q_i
    sums: Tensor  # as `Tiles.backward` returns them
    own: Sum = None  # [N, H]: g_ij of the rows' own columns


class SumRow(NamedTuple):
    """A row of an accumulator: its numbers, and the dtype of the gradient made of it.

    The dtype is None where only the scale's gradient is read off the accumulator.
    """

    numbers: int
    dtype: torch.dtype | None


class OwnColumns:
    """Arithmetic of rows q [I, D] with columns [I, H, D] that each row meets alone, in plain PyTorch."""

    # copies of the columns in the accumulator's dtype that are held at once
    copies: ClassVar[int] = 3

    @staticmethod
    def products(q: Tensor, own: Tensor, out: Tensor, flag: Tensor) -> None:
        """Write ⟨q_i, own_ih⟩ to out [I, H], and NaN to the flag if one is not finite, as for such columns."""
        torch.bmm(own.to(out.dtype), q.to(out.dtype)[..., None], out=out[..., None])
        flag += (out * 0).sum()

    @staticmethod
    def add(g: Tensor, own: Tensor, u: Tensor) -> None:
        """Add Σ_h g_ih · own_ih to u [I, D]."""
        u += torch.bmm(g[:, None], own.to(u.dtype))[:, 0]

    @staticmethod
    def gradient(g: Tensor, q: Tensor, number: Tensor, out: Tensor) -> None:
        """Write g_ih · number · q_i to out [I, H, D]."""
        out.copy_((g * number)[..., None] * q.to(g.dtype)[:, None])

    @staticmethod
    def absorb(_tiles: "Tiles", _rows: Shard, _products: Tensor, _flag: Tensor, _stats: Tensor) -> bool:
        """Write `products`, and merge them into the statistics [K, I]; False where no kernel does both."""
        return False

    @staticmethod
    def backward(_tiles: "Tiles", _rows: Shard, _products: Tensor, _g: Tensor, _u: Tensor, _sums: Tensor) -> bool:
        """Write the gradient g of the logits, `add` it, and add to Σ g · products; False where no kernel does."""
        return False


@dataclass
class Tiles(ABC):
    """One call's arithmetic: logits x_ij = scale · ⟨q_i, k_j⟩ (+ bias), their statistics and gradients by `loss`."""

    # a call can be captured as a CUDA graph, because it never waits for the device
    capturable: ClassVar[bool] = False
    # `backward` writes accumulators that are `fresh`; so does one strip of all rows
    writes_fresh: ClassVar[bool] = False
    writes_fresh_strip: ClassVar[bool] = False
    # `backward` accepts an `InFlight` as v, adds to it and releases it
    accepts_in_flight: ClassVar[bool] = False
    # `finish` makes the loss NaN where a guide's features or the rows' numbers are not finite
    checks_guides: ClassVar[bool] = False
    # arithmetic of columns that a row meets alone; tiles for calls without other columns whose loss these decline
    own_columns: ClassVar[type[OwnColumns]] = OwnColumns
    own_fallback: "ClassVar[type[Tiles] | None]" = None

    loss: PairLoss
    # [] in the accumulator's dtype
    scale: Tensor
    # [] in the accumulator's dtype; None where the loss does not depend on a bias
    bias: Tensor | None
    # bytes that may be used beside inputs, outputs and accumulators
    workspace: int
    # columns of all ranks, which an exchange that gathers them saves for the backward
    columns: Shard | None = field(default=None, init=False, repr=False)
    # NaN if a feature streamed from the host is not finite, else 0; None if `nonfinite` reads the features itself
    flag: Tensor | None = field(default=None, init=False, repr=False)
    # `note` has set the flag: it is that of the first block, and of what was computed beside it
    noted: bool = field(default=False, init=False, repr=False)
    # u and v are uninitialised memory, all of which one `backward` writes
    fresh: bool = field(default=False, init=False, repr=False)
    # the backward of the same block follows the forward at once, which may keep results for it, and leave a part of the
    # loss to it: the backward adds that to the value of `finish` in place
    backward_next: bool = field(default=False, init=False, repr=False)
    # a backward of the same block comes later, for which the forward may keep results within the workspace
    backward_later: bool = field(default=False, init=False, repr=False)
    # the next backward is the whole one of its rows and columns, and only the scale is missing from its sums
    whole_backward: bool = field(default=False, init=False, repr=False)
    # u and v are the gradients of the features, scaled and in their own dtypes, and the sums those of `pair_sums`
    sums_are_gradients: bool = field(default=False, init=False, repr=False)
    # partial norms of rows and columns, where a replay has computed them (`tiles/triton/launch.py`)
    norms: Tensor | None = field(default=None, init=False, repr=False)
    # number of the last columns, which are constants: v has no rows for them
    constant_cols: int = field(default=0, init=False, repr=False)
    # of the rows with their own columns [N, H]: products; the gradients of logits, of a strip that they are part of
    own_products: Tensor | None = field(default=None, init=False, repr=False)
    own_gradients: Tensor | None = field(default=None, init=False, repr=False)
    # dtypes of the gradients of rows and columns; None: those of the features
    grad_dtypes: tuple[torch.dtype, torch.dtype] | None = field(default=None, init=False, repr=False)

    @classmethod
    def declines(cls, _loss: PairLoss, _rows: Shard, _cols: Shard) -> str | None:
        """The reason why this backend cannot compute such blocks; None if it can, as all can that call the loss."""
        return None

    @abstractmethod
    def forward(self, rows: Shard, cols: Shard) -> tuple[Tensor, Tensor | None]:
        """Statistics [K, N] of the rows over these columns and, for a symmetric loss, [K, M] of the columns.

        One sweep over the block serves both: 2·N·M·D operations.
        """

    @abstractmethod
    def backward(self, rows: Shard, cols: Shard, u: Sum, v: Sum | InFlight, row_stats: Tensor | None = None) -> Tensor:
        """Add Σ_j g_ij k_j to u [N, D] and Σ_i g_ij q_i to v [M, D], where g_ij is the gradient of a pair's logit.

        Accumulators are in the accumulator's dtype and without the scale; None is not computed. 6·N·M·D operations.
        With `row_stats` [K, N] the statistics of a pairwise loss are merged into it from the same sweep.

        Returns Σ_ij g_ij, and behind it Σ_ij g_ij · ⟨q_i, k_j⟩ where `sums_products`. For a learned score its
        derivatives stand in place of k_j and q_i, and its parameters' gradients follow the two sums (`scored.py`).
        """

    @classmethod
    def captured_bytes(cls, rows: Shard, cols: Shard, dtype: torch.dtype) -> int:
        """Bytes that a captured call keeps beside its features and their gradients: those of the pairs' gradients.

        dtype: of the products. In float32 the gradients have three times as many, and come in several super-tiles.
        """
        del dtype
        return 2 * len(rows) * len(cols)

    def strip(self, _rows: Shard, _cols: Shard, _wanted: bool) -> int:
        """Rows of a strip over all columns, own ones too: one product for its loss, and gradient if wanted. 0: none."""
        return 0

    def strips(
        self, rows: Shard, cols: Shard, u: Sum, v: Sum, weigh: Weigh, *, mean: bool, wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Add the gradients of all pairs to u and v, strip by strip, as `backward`: 6·N·M·D operations with the loss.

        Where no gradient is `wanted`, it computes the loss alone, in 2·N·M·D operations.
        Returns the sums of `backward`, and the loss where it is the `mean` of all rows and needed no `weigh`.
        """
        raise NotImplementedError

    def keeps(self, _rows: Shard, _cols: Shard) -> bool:
        """Return whether a forward keeps results for a backward of the same block (`backward_next`)."""
        return False

    @abstractmethod
    def workspace_bytes(self, N: int, M: int, D: int, dtype: torch.dtype) -> int:
        """Upper bound of the bytes for a block of N × M of D features, beside inputs, outputs and accumulators."""

    @classmethod
    def expected_bytes(
        cls, loss: PairLoss, N: int, M: int, D: int, dtype: torch.dtype, workspace: int, device: torch.device,
        *, by_index: bool = False, labels: bool = False, ids: bool = False, backward_next: bool = False,
    ) -> int:  # fmt: skip
        """Bytes that a block takes at its peak, for a planner.

        device: "meta" stands for an accelerator. by_index: positives are known by their indices or labels. labels: by
        labels. ids: of pairs that are left out. backward_next: the backward follows the forward at once.
        """
        del by_index, labels, ids, backward_next
        return cls(loss, torch.empty((), device=device), None, workspace).workspace_bytes(N, M, D, dtype)

    def merge(self, stats: Tensor, parts: Tensor) -> None:
        """Merge the parts [P, K, n], in order, into the statistics [K, n] of the same rows."""
        for part in parts:
            stats.copy_(self.loss.merge(stats, part))

    def guide_numbers(self, rows: Shard, cols: Shard) -> Tensor | None:
        """The numbers [n] of the rows, as the loss takes them from guides."""
        return self.loss.guide_numbers(rows, cols, None)

    def count_equal(self, labels: Tensor, others: Tensor) -> Tensor:
        """The number [n] of other labels that equal each label."""
        return count_equal(labels, others)

    def nonfinite(self, rows: Shard, cols: Shard) -> Tensor:
        """0 if the scale and all features are finite, NaN otherwise, computed without a synchronisation."""
        return nonfinite_flag(self.scale, rows.features, cols.features) if self.flag is None else self.flag

    def nonfinite_after(self, rows: Shard, cols: Shard) -> Tensor:
        """`nonfinite` of the first block after its forward, which may have computed it on the way."""
        return self.nonfinite(rows, cols)

    def note(self, flag: Tensor, rows: Shard, cols: Shard) -> None:
        """Have `finish` read this flag too: NaN if a column of one row alone is not finite, else 0."""
        self.flag, self.noted = flag + self.nonfinite_after(rows, cols), True

    def finish(
        self, stats: Sequence[Tensor], weights: Tensor | None, reduction: Reduction, total: Total,
        nonfinite: Callable[[], Tensor],
    ) -> ForwardResult:  # fmt: skip
        """The loss of all ranks' rows from the statistics of each direction.

        nonfinite: 0, or NaN where an input is not finite.
        """
        return reduced(self.loss.finish_all(stats, self.scale, total), weights, reduction, total, nonfinite())

    def needed(self, wanted: Sequence[bool]) -> tuple[bool, bool]:
        """Return whether a backward needs u, and v, for the `wanted` gradients of scale, bias, q and k.

        Tiles that do not sum products read the scale's gradient off one of the two.
        """
        want_scale, _, want_q, want_k = wanted
        return want_q or (want_scale and not want_k and not self.sums_products), want_k

    def sum_rows(self, rows: Shard, cols: Shard, wanted: Sequence[bool]) -> tuple[SumRow | None, SumRow | None]:
        """The rows of u and of v where they are `needed`."""
        (needs_u, needs_v), (q, k) = self.needed(wanted), (rows.features, cols.features)
        return (
            SumRow(q.shape[1], q.dtype if wanted[2] else None) if needs_u else None,
            SumRow(k.shape[1], k.dtype) if needs_v else None,
        )

    def accumulators(self, rows: Shard, cols: Shard, wanted: Sequence[bool]) -> tuple[Sum, Sum]:
        """Zeros, or `fresh` memory, for u and v where they are `needed`."""
        needs_u, needs_v = self.needed(wanted)
        wide = self.scale.dtype
        new = torch.empty if self.fresh else torch.zeros
        # contiguous rows, whatever the strides of the features
        u = new(rows.features.shape, dtype=wide, device=self.scale.device) if needs_u else None
        size = (len(cols) - self.constant_cols, *cols.features.shape[1:])
        return u, new(size, dtype=wide, device=self.scale.device) if needs_v else None

    def gradients(
        self, accumulated: Accumulated, rows: Shard, cols: Shard, wanted: Sequence[bool],
        numbers: tuple[Tensor, Tensor | None], upstream: Tensor | None,
    ) -> list[Tensor | None]:  # fmt: skip
        """Gradients of scale, bias and features in their own dtypes.

        numbers: scale and bias as the user passed them. upstream: a factor that is not in the sums yet. With it the
        accumulators stay as they are if a second backward may read them again.
        """
        scale, bias = numbers
        want_scale, want_bias, want_q, want_k = wanted
        u, v, sums, _ = accumulated
        # the accumulators are overwritten below
        of_pairs, of_products = sums if self.sums_are_gradients else self.pair_sums(sums, rows, cols, u, v, want_scale)
        dscale = as_given(of_products, scale, upstream) if want_scale else None
        dbias = None
        if want_bias and bias is not None:
            dbias = as_given(of_pairs if self.loss.uses_bias else torch.zeros_like(of_pairs), bias, upstream)
        if self.sums_are_gradients:
            return [dscale, dbias, u, v]
        keep = upstream is not None and backward_is_repeatable()
        of_q, of_k = self.grad_dtypes or (rows.features.dtype, cols.features.dtype)
        dq = self.scaled(u, of_q, upstream, keep=keep) if want_q and u is not None else None
        dk = self.scaled(v, of_k, upstream, keep=keep) if want_k and v is not None else None
        if dk is not None and self.constant_cols:
            dk = pad(dk, (0, 0, 0, self.constant_cols))
        return [dscale, dbias, dq, dk]

    def pair_sums(
        self, sums: Tensor, rows: Shard, cols: Shard, u: Sum, v: Sum, want_scale: bool
    ) -> tuple[Tensor, Tensor]:
        """Σ g_ij and Σ g_ij · ⟨q_i, k_j⟩; the second is read off u or v where `backward` did not sum it."""
        if self.sums_products:
            return sums[0], sums[1]
        if not want_scale:
            return sums, sums
        x, total = (rows.features, u) if u is not None else (cols.features, v)
        assert total is not None
        return sums, self.inner_product(x, total)

    def inner_product(self, x: Tensor, total: Tensor) -> Tensor:
        """Σ ⟨x_i, total_i⟩ of features and their sums."""
        return inner_product(x, total)

    def scaled(self, total: Tensor, dtype: torch.dtype, upstream: Tensor | None, *, keep: bool) -> Tensor:
        """total · scale · upstream in this dtype; overwrites `total` unless `keep`."""
        factor = self.scale if upstream is None else self.scale * upstream
        return (total * factor if keep else total.mul_(factor)).to(dtype)

    @property
    def sums_products(self) -> bool:
        """`backward` also returns Σ_ij g_ij · ⟨q_i, k_j⟩, the scale's gradient; otherwise it is read off u or v."""
        return False

    def reserve(self, multiprocessors: int) -> None:
        """Leave this number of the device's multiprocessors to transfers between devices."""
        del multiprocessors

    def init(self, shard: Shard) -> Tensor:
        """Statistics [K, n] of rows that have met no column."""
        return self.loss.init(len(shard), dtype=self.scale.dtype, device=self.scale.device)

    def no_pairs(self) -> Tensor:
        """The return value of `backward` for a block without pairs."""
        return self.scale.new_zeros(2) if self.sums_products else torch.zeros_like(self.scale)


def reduced(
    directions: Sequence[Finished], weights: Tensor | None, reduction: Reduction, total: Total, nonfinite: Tensor
) -> ForwardResult:
    """The loss of the global batch, and for each direction ∂(loss)/∂(loss of each row) for an upstream gradient of 1.

    Naively, with w the weights of rows that have a loss: Σ w·loss / Σ w for "mean", Σ w·loss for "sum", each averaged
    over the directions; with "none" this rank's rows, scaled so that their mean over all ranks is "mean". A direction
    in which no row has a loss adds 0.
    """
    n = directions[0].loss.shape[0]
    masses = [each.counts if weights is None else each.counts * weights.to(each.counts.dtype) for each in directions]
    local = [(w * each.loss).sum() for w, each in zip(masses, directions, strict=True)]
    local += [w.sum() for w in masses]
    number = len(directions)
    losses, mass, others = total(torch.stack([*local, nonfinite + n, nonfinite])).split([number, number, 2])
    (rows, nonfinite), share = others.unbind(), 1 / number
    if reduction != "sum":
        mass = divisor(losses, mass)
    if reduction == "sum":
        value = losses.sum() * share
        coefficients = [w * share + nonfinite for w in masses]
    elif reduction == "mean":
        value = (losses / mass).sum() * share
        coefficients = [w * (share / b) + nonfinite for w, b in zip(masses, mass, strict=True)]
    else:
        scaled = [w * (share / b) for w, b in zip(masses, mass, strict=True)]
        value = sum([s * each.loss for s, each in zip(scaled, directions, strict=True)], nonfinite) * rows
        # the caller's mean divides by this rank's rows, the value above by those of all ranks
        coefficients = [s * n + nonfinite for s in scaled]
    return ForwardResult(value + nonfinite, [each.state for each in directions], coefficients)


def bounds_of(x: Tensor) -> tuple[float, float] | None:
    """The lowest and the highest logit of a tile on a CPU; None on a device, which the host would wait for."""
    if x.device.type != "cpu":
        return None
    least, most = torch.aminmax(x)
    return float(least), float(most)


def nonfinite_flag(scale: Tensor, *features: Tensor) -> Tensor:
    """0 if all values are finite, NaN otherwise, computed without a synchronisation."""
    flag = scale * 0
    for x in features:
        if x.numel():
            least, most = torch.aminmax(x)
            flag = flag + (least.to(scale.dtype) + most.to(scale.dtype)) * 0
    return flag


def as_given(gradient: Tensor, number: Tensor, upstream: Tensor | None = None) -> Tensor:
    """The gradient of a scalar, times upstream, in the scalar's own dtype and shape, on its device."""
    gradient = (gradient if upstream is None else gradient * upstream).to(number.device, number.dtype)
    return gradient.reshape(number.shape) if number.ndim else gradient


def inner_product(x: Tensor, total: Tensor) -> Tensor:
    """Σ ⟨x_i, total_i⟩ in the accumulator's dtype, `ROWS_AT_ONCE` rows at a time."""
    wide = accumulator(x.dtype)
    if len(x) <= ROWS_AT_ONCE:
        return torch.linalg.vecdot(x.to(wide), total).sum()
    parts = [
        torch.linalg.vecdot(some.to(wide), other).sum()
        for some, other in zip(x.split(ROWS_AT_ONCE), total.split(ROWS_AT_ONCE), strict=True)
    ]
    return torch.stack(parts).sum()
