"""The interface of a contrastive loss over tiles of the matrix.

Used by `tiles/`, which computes tiles of logits, accumulates the statistics of each, and reduces the losses of the rows
to one number. A loss does not depend on ranks, devices or kernels.

CLIP's loss is `Softmax(symmetric=True)` with a diagonal of positives, DPR's `Softmax()` with positives by index,
SimCLR's `Softmax(exclude_self=True)` of the views against themselves, SupCon's the same with positives by label,
SigLIP's `Sigmoid()`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from ast import literal_eval
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from contrastile._errors import invalid, truth_value

# the tensors of a shard whose first axis are its rows
ROWS_FIRST = (
    "features", "positives", "targets", "labels", "ids", "numbers", "coefficient", "own", "own_excluded",
)  # fmt: skip
# the tensors that travel with a shard's features
CARRIED = ("labels", "ids", "numbers", "coefficient", "state")
# share of a tile's pairs up to which excluded ones are listed; above it a mask is faster
FEW = 1 / 32
# exp(−60) is still a normal number in float32, with room for a sum below it
SPREAD = 60.0
_Value = TypeVar("_Value")


def changed(value: _Value, **fields: Any) -> _Value:
    """A dataclass with other fields: `dataclasses.replace` without its checks, at a sixth of its time per call."""
    other = object.__new__(type(value))
    other.__dict__.update(value.__dict__, **fields)
    return other


@dataclass(frozen=True)
class Shard:
    """The rows, or the columns, of a block: their features, positives, labels, ids and states.

    Positions count over the shards of all ranks, in rank order. So the marks of a block (positive pairs, excluded
    pairs) follow from its rows and columns alone.
    """

    # [n, D]; with a learned score, the first [n, ...] of its inputs
    features: Tensor
    # global position of the first column; of rows, that of the column that is the same example as the first one
    start: int = 0
    # global column that is the positive of the first row; the next one is that of the second row, and so on
    diagonal: int | None = None
    # [n, P] global columns that are positives of each row, -1 pads
    positives: Tensor | None = None
    # [n] equal labels make a positive pair
    labels: Tensor | None = None
    # [n] equal ids are not negatives of each other
    ids: Tensor | None = None
    # [S, n] state of each row for the backward, made of the finished statistics
    state: Tensor | None = None
    # [n] the upstream gradient of each row's loss
    coefficient: Tensor | None = None
    # [n, ...] each: with a learned score, its further inputs
    others: tuple[Tensor, ...] = ()
    # [n, D_g] each: further features, constants, whose products with the other side's are a tile's `guides`
    guides: tuple[Tensor, ...] = ()
    # [n] a number of each row that the loss reads: a threshold of the guide, the teacher's scale, or a weight
    numbers: Tensor | None = None
    # [n, P] weight of each listed positive, which makes a tile's `target`
    targets: Tensor | None = None
    # [n, H, D] further columns: each row meets its own H of them
    own: Tensor | None = None
    # [n, H] mask of those that do not count, and the number of positives, which are the first ones
    own_excluded: Tensor | None = None
    own_positives: int = 0

    def __len__(self) -> int:
        return self.features.shape[0]

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return (self.features, *self.others)

    def with_leaves(self, leaves: Sequence[Tensor]) -> Shard:
        """The same shard with other features."""
        return changed(self, features=leaves[0], others=tuple(leaves[1:]))

    def narrow(self, start: int, stop: int) -> Shard:
        """Rows start ... stop − 1, as views."""
        along = slice(start, stop)
        return changed(
            self,
            **{name: x[along] for name in ROWS_FIRST if (x := getattr(self, name)) is not None},
            start=self.start + start,
            diagonal=None if self.diagonal is None else self.diagonal + start,
            state=None if self.state is None else self.state[:, along],
            others=tuple([leaf[along] for leaf in self.others]),
            guides=tuple([guide[along] for guide in self.guides]),
        )

    def payload(self) -> list[Tensor]:
        """The tensors that travel with the shard. Rows are the first axis of each, and the last of the state's."""
        carried = (getattr(self, name) for name in CARRIED)
        return [*self.leaves, *self.guides, *(x for x in carried if x is not None)]

    def unpacked(self, payload: Sequence[Tensor], start: int) -> Shard:
        """The shard of a payload with the same tensors as this one's, which begins at `start`."""
        tensors = iter(payload)
        features, *others = (next(tensors) for _ in self.leaves)
        guides = tuple([next(tensors) for _ in self.guides])
        carried: dict[str, Any] = {name: next(tensors) for name in CARRIED if getattr(self, name) is not None}
        return Shard(features, start, others=tuple(others), guides=guides, **carried)


def with_states(
    rows: Shard, cols: Shard, states: Sequence[Tensor], coefficients: Sequence[Tensor]
) -> tuple[Shard, Shard]:
    """Both shards with the states and coefficients of a backward; those of the columns for a symmetric loss."""
    rows = changed(rows, state=states[0], coefficient=coefficients[0])
    return rows, changed(cols, state=states[1], coefficient=coefficients[1]) if len(states) > 1 else cols


@dataclass(frozen=True)
class Diagonal:
    """The pairs (r, r + offset) of a tile."""

    offset: int

    def of(self, x: Tensor) -> Tensor:
        """A view of these pairs."""
        return x.diagonal(self.offset)

    def along(self, x: Tensor) -> tuple[slice, slice]:
        """Their rows and their columns."""
        first = max(0, -self.offset)
        stop = min(x.shape[0], x.shape[1] - self.offset)
        return slice(first, stop), slice(first + self.offset, stop + self.offset)


Where = Diagonal | Tensor | tuple[Tensor, Tensor]  # pairs of a tile; a mask [I, J], or row and column of each


def fill(x: Tensor, where: Where | None, value: Tensor | float) -> Tensor:
    """`x` [I, J] with `value` at these pairs, in place."""
    if isinstance(where, Diagonal):
        _ = where.of(x).copy_(value) if isinstance(value, Tensor) else where.of(x).fill_(value)
    elif isinstance(where, Tensor):
        x.masked_fill_(where, value)
    elif where is not None:
        x[where] = value
    return x


class Tile(NamedTuple):
    """A tile of logits with its marks; the logits of pairs that do not count are −∞."""

    x: Tensor  # [I, J]
    positive: Diagonal | Tensor | None
    excluded: Where | None
    # lowest and highest logit of the tile; None on an accelerator, for which the host would wait
    bounds: tuple[float, float] | None
    guides: tuple[Tensor, ...] = ()  # [I, J] each: products of the shards' guides, such as a teacher's logits
    # `Shard.numbers` of the rows [I] and of the columns [J]
    numbers: tuple[Tensor | None, Tensor | None] = (None, None)
    # [I, J] weight of each listed positive, 0 elsewhere
    target: Tensor | None = None
    # [I, J] products ⟨q, k⟩, where the loss reads them beside the logits
    products: Tensor | None = None
    own: bool = False  # the columns are those of `Shard.own`
    # `Labels` of labelled.py, in the place of positives
    labels: Any = None


def mark(rows: Shard, cols: Shard, *, exclude_self: bool) -> tuple[Diagonal | Tensor | None, Where | None]:
    """The positive pairs of the tile of `rows` and `cols`, and those that do not count; None where it has none.

    A pair is positive by index, by label or on the diagonal. It is excluded when it is an example with itself
    (`exclude_self`), or when the ids are equal and it is not positive.
    """
    itself = _diagonal(rows, cols, rows.start) if exclude_self else None
    positive = _positive(rows, cols)
    if isinstance(positive, Tensor):
        fill(positive, itself, False)
    elif positive == itself:
        positive = None
    if rows.ids is None or cols.ids is None:
        return positive, itself
    few = _few_equal(rows.ids, cols.ids) if itself is None else None
    if few is not None:
        return positive, _without(few, positive)
    same = fill(rows.ids[:, None] == cols.ids[None, :], positive, False)
    return positive, fill(same, itself, True)


def _positive(rows: Shard, cols: Shard) -> Diagonal | Tensor | None:
    if rows.diagonal is not None:
        return _diagonal(rows, cols, rows.diagonal)
    if rows.positives is not None:
        columns = _columns(rows.positives, cols)
        # a device would have to be waited for
        if columns.device.type == "cpu" and not (columns < len(cols)).any():
            return None
        return columns.new_zeros(len(columns), len(cols) + 1, dtype=torch.bool).scatter_(1, columns, True)[:, :-1]
    if rows.labels is not None and cols.labels is not None:
        return rows.labels[:, None] == cols.labels[None, :]
    return None


def _diagonal(rows: Shard, cols: Shard, first: int) -> Diagonal | None:
    """The pairs of row r and global column first + r; None where the tile has none of them."""
    offset = first - cols.start
    return Diagonal(offset) if -rows.features.shape[0] < offset < cols.features.shape[0] else None


def _few_equal(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """Row and column of each pair of equal ids; None if they are many, or on a device, where a count would wait."""
    if a.device.type != "cpu":
        return None
    # in NumPy, because torch wakes its threads for each of these small steps
    left, right = a.numpy(), b.numpy()
    order = right.argsort()
    right = right[order]
    first = right.searchsorted(left)
    counts = right.searchsorted(left, side="right") - first
    pairs = int(counts.sum())
    if pairs > FEW * len(left) * len(right):
        return None
    row = np.repeat(np.arange(len(left)), counts)
    # position of each pair's column in `order`: those of a row follow each other
    position = np.arange(pairs) + (first - (counts.cumsum() - counts))[row]
    return torch.from_numpy(row), torch.from_numpy(order[position])


def _without(pairs: tuple[Tensor, Tensor], positive: Diagonal | Tensor | None) -> tuple[Tensor, Tensor]:
    """The pairs that are not positive."""
    row, column = pairs
    if positive is None:
        return pairs
    others = column - row != positive.offset if isinstance(positive, Diagonal) else ~positive[pairs]
    return row[others], column[others]


def target(rows: Shard, cols: Shard) -> Tensor | None:
    """The weights of the tile's listed positives [I, J]; None where the rows have none."""
    if rows.targets is None or rows.positives is None:
        return None
    weights = rows.targets.new_zeros(len(rows), len(cols) + 1)
    return weights.scatter_add_(1, _columns(rows.positives, cols), rows.targets)[:, :-1]


def _columns(positives: Tensor, cols: Shard) -> Tensor:
    """The tile's column [I, P] of each listed positive; one behind the last column receives all the pads."""
    column, J = positives - cols.start, len(cols)
    return torch.where((column >= 0) & (column < J) & (positives >= 0), column, J)


def divisor(sums: Tensor, mass: Tensor) -> Tensor:
    """The mass that a mean of these sums divides by: 1 where both are 0, because no row has a loss."""
    return mass.masked_fill((mass == 0) & (sums == 0), 1.0)


class Finished(NamedTuple):
    """The results of a direction: of the rows, or of the columns."""

    loss: Tensor  # [n] loss of each row, 0 where it has none
    counts: Tensor  # [n] 1 where the row has a loss, 0 where it has no positive
    state: Tensor  # [S, n] numbers of each row for the backward


class Direct(NamedTuple):
    """The loss of a tile whose rows meet all columns, without statistics, and its gradient."""

    results: list[Finished]  # of each direction
    # ∂loss/∂x [I, J] from ∂loss/∂losses [K, n], or one number; True leaves what it reads for another call
    pair_grad: Callable[[Tensor | float, bool], Tensor]
    every: bool = True  # each row has a loss


@dataclass(frozen=True)
class Formula:
    """The formula of a loss, for a backend that does not call the methods of the loss."""

    # contribution of a pair: exp(x) to its row's sum of negatives or of positives, with statistics and state as in
    # `softmax.py`; or log(1 + exp(±x)) to its row's loss, with those of `sigmoid.py`
    pairs: Literal["exponential", "softplus"]
    # keys in the denominator of a row; None: the loss's own `finish` is called, which does not wait for the device
    denominator: Literal["all", "negatives"] | None = None
    # names of fields that the tiles do not need
    finish_fields: frozenset[str] = frozenset()
    # use of the guides' product. "mask": negatives whose product exceeds the row's number leave the sums. "teacher":
    # times the row's number it is a teacher's logit; the teacher's probabilities are `soft_share` of the targets
    guide: Literal["mask", "teacher"] | None = None
    # the mean of the positives' exponentials is inside the logarithm
    inside: bool = False
    # positives by label have the weight (number of the row + number of the column)
    weighed: bool = False
    # positives have the weights of `DecoupledWeighted`
    mises_fisher: bool = False

    @property
    def linear(self) -> bool:
        """The loss is linear in the logits of positives, all of which are part of the denominator."""
        return self == Formula("exponential", denominator="all")


# function from labels [n] and others to the number [n] of others that equal each label
Count = Callable[[Tensor, Tensor], Tensor]
# function from rows [n, D], columns [m, D], positions [n, P] of columns and a dtype to the products [n, P]
Products = Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor]
# functions that gather a tensor of this rank's rows, and one of its columns, from all ranks
Gathers = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def count_equal(labels: Tensor, others: Tensor) -> Tensor:
    """The number [n] of other labels that equal each label."""
    ordered = others.sort().values
    return torch.searchsorted(ordered, labels, right=True) - torch.searchsorted(ordered, labels)


class Total(Protocol):
    """A function that sums a small tensor over the ranks, or takes the largest of each of its numbers."""

    def __call__(self, local: Tensor, *, largest: bool = False) -> Tensor: ...


@cache
def _made(kind: type[PairLoss], *words: str) -> PairLoss:
    """A loss of this class, with its fields as in `spelled`."""
    values = (word.split("=", 1) for word in words)
    return kind(**{field: literal_eval(value) for field, value in values})


class PairLoss(ABC):
    """A loss whose rows are functions of statistics that can be accumulated over any partition of the pairs.

    A subclass is a frozen dataclass. Every backend computes all of its fields, or declines the loss by name. The
    statistics of n rows are a tensor [K, n] in the accumulator's dtype. Tiles cut it, exchanges send and merge it; the
    loss alone knows its K rows.
    """

    # every loss by the name of its class
    registry: ClassVar[dict[str, type[PairLoss]]] = {}
    # None: the methods alone compute the loss. Not inherited, because a subclass may change any method
    formula: ClassVar[Formula | None] = None
    # rows of `Finished.state`
    state_rows: ClassVar[int]
    # number of pairs of guides, further features whose products are the `guides` of a tile
    guides: ClassVar[int] = 0
    # `absorb` and `pair_grad` read a tile's `products`
    reads_products: ClassVar[bool] = False
    # pairs have targets, such as a teacher's scores of listed keys
    reads_targets: ClassVar[bool] = False
    # `counted` weighs positives by their number over all ranks
    counts_positives: ClassVar[bool] = False
    # a bias may be given; without `uses_bias` it changes nothing
    takes_bias: ClassVar[bool] = True
    # scale of the tiles' logits in place of 0, for a loss that reads similarities off them
    least_scale: ClassVar[float] = 0.0
    # words for the loss, and a remedy, in the error of label smoothing; None: it has label smoothing
    unsmoothed: ClassVar[tuple[str, str] | None] = ("this loss", "Leave it out.")
    # the loss of a row depends on no other row
    rowwise: ClassVar[bool] = True
    # the class and all fields as a string; None if a field is no number, truth value or string
    spelled: str | None

    # the loss is the mean of both directions: columns have losses too
    symmetric: bool
    # a row's pair with itself does not count
    exclude_self: bool
    # the loss depends on an added bias
    uses_bias: bool
    # a pair's gradient waits for no statistic of its row
    pairwise: bool

    def __init_subclass__(cls) -> None:
        PairLoss.registry[cls.__name__] = cls
        cls.formula = vars(cls).get("formula")

    def __post_init__(self) -> None:
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]  # type: ignore[arg-type]
        for name in ("symmetric", "exclude_self"):
            truth_value(name, getattr(self, name))
        for name in ("uses_bias", "pairwise"):
            if getattr(type(self), name, False) and not getattr(self, name):
                raise invalid(name, f"stay as {type(self).__name__} has it", getattr(self, name), "Leave it out.")
        plain = all(isinstance(value, (bool, int, float, str)) for _, value in values)
        # a float of NumPy is written as Python's
        words = [f"{name}={float(value) if isinstance(value, float) else value!r}" for name, value in values]
        object.__setattr__(self, "spelled", " ".join([type(self).__name__, *words]) if plain else None)

    @staticmethod
    def parsed(spelled: str) -> PairLoss:
        """The loss of a string as in `spelled`."""
        name, *words = spelled.split()
        return _made(PairLoss.registry[name], *words)

    def smoothed(self, label_smoothing: float) -> PairLoss:
        """The same loss with this share of every target spread over the keys that count; an error by default."""
        assert self.unsmoothed is not None
        loss, remedy = self.unsmoothed
        raise invalid("label_smoothing", f"be 0 for {loss}", label_smoothing, remedy)

    def guide_numbers(self, rows: Shard, _cols: Shard, _products: Products | None) -> Tensor | None:
        """The numbers [n] of the rows for a tile's `guides`; positions are still counted on this rank."""
        return rows.numbers

    def counted(self, rows: Shard, cols: Shard, gathers: Gathers, count: Count) -> tuple[Shard, Shard]:
        """Both shards with weights of their positives, where `counts_positives`."""
        raise NotImplementedError

    @abstractmethod
    def init(self, n: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The statistics [K, n] of n rows that have met no column."""

    @abstractmethod
    def absorb(self, tile: Tile) -> tuple[Tensor, ...]:
        """The statistics of a tile: its rows' [K, I] and, if symmetric, its columns' [K, J].

        Uses the tile up, unless the loss is pairwise.
        """

    def direct(self, _tile: Tile) -> Direct | None:
        """The loss of rows that meet all columns, which uses the tile up; None leaves it to the other methods."""
        return None

    @abstractmethod
    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        """The statistics [K, n] of the union of two disjoint sets of pairs."""

    @abstractmethod
    def finish(self, stats: Tensor) -> Finished:
        """The rows' losses, and their state for the backward."""

    def finish_all(self, directions: Sequence[Tensor], _scale: Tensor, _total: Total) -> list[Finished]:
        """`finish` of each direction's statistics, or of both at once where they have one size: half the operations."""
        if len(directions) != 2 or directions[0].shape != directions[1].shape:
            return list(map(self.finish, directions))
        loss, counts, state = self.finish(torch.stack(list(directions), 1))
        return [Finished(*each) for each in zip(loss, counts, state.unbind(1), strict=True)]

    @abstractmethod
    def pair_grad(self, tile: Tile, rows: Shard, cols: Shard) -> Tensor:
        """∂loss/∂x [I, J], with the coefficients and states that both sides carry. Uses the tile up."""
